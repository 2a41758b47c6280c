"""Hypothesis strategies for records of any type, by introspection of the types."""

from __future__ import annotations

import itertools
import types
import typing
from typing import Any, Literal

import msgspec
from hypothesis import strategies as st

from torch_fakeify.records.tensor import (
    ApplyNode,
    AtomNode,
    ExprDesc,
    FloatNode,
    IntNode,
    MetaStorageDesc,
    MetaTensorDesc,
    NestedIntDesc,
    RationalNode,
    SourceDesc,
    SymbolNode,
)

# --- records of any type --------------------------------------------------------------------------

NAMES = st.sampled_from(["x", "s0", "u1", "L['x']", "w.0", "ä", "\u2028", 'a"b\\', ""])
INTS = st.one_of(st.integers(-3, 9), st.integers(-(2**70), 2**70))


@st.composite
def expr_descs(draw: st.DrawFn) -> ExprDesc:
    """Well-formed expressions: distinct nodes in any topological order, arities not checked."""
    leaves = st.one_of(
        st.builds(SymbolNode, NAMES, st.sampled_from([(), (("integer", True),)])),
        st.builds(IntNode, INTS),
        st.builds(FloatNode, st.integers(0, 9), st.integers(-9, 9), st.just(53)),
        st.builds(RationalNode, st.integers(1, 3), st.integers(2, 5)),
        st.builds(AtomNode, st.sampled_from(["int_oo", "true", "nan"])),
    )
    nodes: list[Any] = [draw(leaves)]
    for _ in range(draw(st.integers(0, 6))):
        args = st.lists(st.integers(0, len(nodes) - 1), max_size=3).map(tuple)
        node = draw(st.one_of(leaves, st.builds(ApplyNode, st.sampled_from(["Add", "Mod"]), args)))
        if node not in nodes:
            nodes.append(node)
    return ExprDesc(nodes=tuple(nodes))


def records(hint: Any, depth: int = 3) -> st.SearchStrategy[Any]:
    """Values of any type that a record field may have, and so records of any type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in _SCALARS:
        return _SCALARS[hint]
    if hint is ExprDesc:
        return expr_descs()
    if origin is Literal:
        return st.sampled_from(args)
    if origin in (typing.Union, types.UnionType):
        return _union(args, depth)
    if origin is tuple and args[-1] is Ellipsis:
        if depth <= 0:
            return st.just(())
        return st.lists(records(args[0], depth - 1), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*(records(arg, depth) for arg in args))
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return st.deferred(lambda: _struct(hint, depth))
    if hint is NestedIntDesc:
        return st.builds(NestedIntDesc, INTS, INTS)
    raise TypeError(f"no strategy for {hint}")


_SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    None: st.none(),
    type(None): st.none(),
    bool: st.booleans(),
    int: INTS,
    float: st.floats(allow_nan=False),
    str: NAMES,
    bytes: st.binary(max_size=5),
}


def _union(args: tuple[Any, ...], depth: int) -> st.SearchStrategy[Any]:
    members: list[st.SearchStrategy[Any]] = []
    for arg in args:
        nested = isinstance(arg, type) and issubclass(arg, msgspec.Struct)
        if nested and depth <= 0 and any(not isinstance(a, type(arg)) for a in args):
            continue
        if arg is float and str in args:
            members.append(st.floats(allow_nan=False, allow_infinity=False))
        else:
            members.append(records(arg, depth))
    return st.one_of(members)


def _struct(cls: type[Any], depth: int) -> st.SearchStrategy[Any]:
    fields: dict[str, st.SearchStrategy[Any]] = {}
    for field in msgspec.structs.fields(cls):
        if field.required:
            fields[field.name] = records(field.type, depth - 1)
        elif depth > 0:
            fields[field.name] = st.one_of(st.just(field.default), records(field.type, depth - 1))
    return st.builds(cls, **fields)


def with_own_ids(tree: Any) -> Any:
    """The tree with an id of its own for each tensor and storage: two of one id must be one."""
    numbers = itertools.count()
    done: dict[int, Any] = {}

    def rewrite(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: rewrite(item) for key, item in part.items()}
        if isinstance(part, (list, tuple)) and not hasattr(part, "_fields"):
            return type(part)(map(rewrite, part))
        if not isinstance(part, msgspec.Struct):
            return part
        if id(part) not in done:
            fields = {name: rewrite(getattr(part, name)) for name in part.__struct_fields__}
            if isinstance(part, (MetaTensorDesc, MetaStorageDesc)):
                fields["id"] = part.id * 4096 + next(numbers)
            done[id(part)] = type(part)(**fields)
        return done[id(part)]

    return rewrite(tree)


@st.composite
def linked_tensor_descs(draw: st.DrawFn) -> list[MetaTensorDesc]:
    """Tensor records that refer to earlier ones and share storages and sources."""
    storages = [MetaStorageDesc(id=i, nbytes=draw(st.integers(0, 9))) for i in range(3)]
    root = SourceDesc(cls="LocalSource", name="L['x']", fields=(("local_name", "x"),))
    sources = [root, SourceDesc(cls="GradSource", name="L['x'].grad", base=root)]
    tensors: list[MetaTensorDesc] = []
    for _ in range(draw(st.integers(1, 8))):
        earlier = st.sampled_from([None, *tensors])
        tensors.append(
            MetaTensorDesc(
                id=len(tensors),
                dtype="float32",
                device="cpu",
                size=(),
                stride=(),
                storage=draw(st.sampled_from([None, *storages])),
                source=draw(st.sampled_from([None, *sources])),
                base=draw(earlier),
                grad=draw(earlier),
            )
        )
    return draw(st.lists(st.sampled_from(tensors), min_size=1, max_size=6))
