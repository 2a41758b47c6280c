"""Values, graphs and guards as plain data that ``==`` compares, without what differs in every run."""

from __future__ import annotations

import re
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import is_fake
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from collections.abc import Sequence

_NUMBERS = re.compile(
    r"0x[0-9a-f]+|\d{9,}|_c\d+\b|\bj\d+\b|___\w+(\(\d+)?|\baot\d+_|_[0-9a-f]{8}_[0-9a-f_]+"
)
"""Addresses, identities and unique names."""

_GUARD_NUMBERS = re.compile(
    r"\b0x[0-9a-f]+\b|(?<!\d)\d{9,}(_c\d+)?|(?<=_c)\d+|(?<=__builtins_dict___)\d+"
    r"|(?<=<eval_with_key>\.)\d+|(?<=\baot)\d+(?=_)| +(?=#)"
    r"|(?<=# )\(unknown .*, please file a bug\)"
)
"""Addresses, identities, the counters in the names of globals and of generated code, the space that
these need before the user's line, and torch's words where it does not know that line."""

_USERS_LINE = "@#"
"""What stands between a guard and the user's line."""

_SHAPE = "+- LAMBDA_GUARD: "
"""Before a guard that belongs to no single input."""


def without_numbers(text: str) -> str:
    """A text with ``*`` for the numbers that differ in every run."""
    return _NUMBERS.sub("*", text)


def error_message(error: BaseException) -> str:
    """The first two lines, without the name of the handoff and numbers that differ in every run."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return without_numbers("\n".join(lines[:2])).replace("handoff(Spy)", "Spy")


def lines_of_guards(text: str) -> list[str]:
    """The guards of a frame as Dynamo prints them, without numbers that differ in every run."""
    return [_GUARD_NUMBERS.sub("@", line) for line in text.splitlines()]


def split_guards(lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """Other guards, and those on shapes as Python without the user's lines."""
    shapes = [line for line in lines if line.startswith(_SHAPE)]
    code = [line.removeprefix(_SHAPE).partition(_USERS_LINE)[0].rstrip() for line in shapes]
    return [line for line in lines if not line.startswith(_SHAPE)], code


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of a tree."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def first_difference(a: Any, b: Any, where: str = "") -> str | None:
    """The first place where two trees of plain data differ, and an excerpt of both."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        pairs = [(a[key], b[key], f"{where}.{key}") for key in a]
    elif isinstance(a, (list, tuple)) and type(a) is type(b) and len(a) == len(b):
        pairs = [(x, y, f"{where}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True))]
    elif type(a) is type(b) and a == b:
        return None
    else:
        ours, theirs = str(a), str(b)
        pairs = enumerate(zip_longest(ours, theirs))
        start = max(0, next((i for i, (x, y) in pairs if x != y), 0) - 40)
        return f"{where}: {ours[start : start + 300]!r} instead of {theirs[start : start + 300]!r}"
    return next((d for pair in pairs if (d := first_difference(*pair)) is not None), None)


# --- real values ----------------------------------------------------------------------------------


def values(leaves: Sequence[Any]) -> list[Any]:
    """All that can be seen of some values, and how they alias one another."""
    objects: dict[int, int] = {}
    storages: dict[int, int] = {}
    for leaf in leaves:
        objects.setdefault(id(leaf), len(objects))
    return [_value(leaf, objects, storages) for leaf in leaves]


def _value(leaf: Any, objects: dict[int, int], storages: dict[int, int]) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return (type(leaf).__name__, without_numbers(repr(leaf)))
    t = leaf
    found = _common(t)
    found |= {
        "same object as": objects.get(id(t), "another"),
        "size": tuple(t.size()) if not t.is_nested else without_numbers(str(t.shape)),
        "grad_fn": t.grad_fn is not None and without_numbers(type(t.grad_fn).__name__),
        "base": None if t._base is None else objects.get(id(t._base), "another"),
        "output number": t.output_nr,
        "version": None if t.is_inference() else t._version,
    }
    if t.layout is torch.strided and not t.is_nested:
        found["strides"] = t.stride()
        found["offset"] = t.storage_offset()
    if is_traceable_wrapper_subclass(t):
        names, context = t.__tensor_flatten__()
        found["context"] = without_numbers(repr(context))
        for name in names:
            x = getattr(t, name)
            if isinstance(x, torch.Tensor):
                found[name] = _value(x, objects, storages)
            else:  # the mesh of a result of a handoff may be torch's stand-in for it: see the xfail
                found[name] = without_numbers(repr(getattr(t.detach(), name)))
        return found
    if t.layout is torch.strided and not t.is_nested:
        storage = t.untyped_storage()
        found["storage"] = storages.setdefault(storage._cdata, len(storages))
        found["bytes"] = storage.nbytes()
    found["data"] = _data(t)
    return found


def _common(t: torch.Tensor) -> dict[str, Any]:
    return {
        "type": type(t).__name__,
        "dtype": str(t.dtype),
        "layout": str(t.layout),
        "requires_grad": t.requires_grad,
        "leaf": t.is_leaf,
        "view": t._is_view(),
        "inference": t.is_inference(),
        "conj": t.is_conj(),
        "neg": t.is_neg(),
    }


def _data(t: torch.Tensor) -> bytes:
    """The bits of the elements: NaN equals NaN, and the least difference shows."""
    with torch.no_grad():
        t = t.detach()
        if t.layout is not torch.strided:
            t = t.to_dense()
        t = t.resolve_conj().resolve_neg().contiguous()
        if t.numel() == 0 or t.untyped_storage().nbytes() == 0:
            return b""
        flat = t.reshape(-1).clone(memory_format=torch.contiguous_format)
        return flat.view(torch.uint8).numpy().tobytes()


# --- graphs ---------------------------------------------------------------------------------------

_NOT_COMPARED = frozenset({
    "example_value",  # an intermediate one may belong to a transform that has ended: it is left out
    "mutation_region_id",  # AOTAutograd leaves it in its graph, which through a handoff is a copy
})  # fmt: skip


def attached(gm: torch.fx.GraphModule) -> list[Any]:
    """The names of the graph's and its nodes' attributes and metadata."""
    rows = [sorted(gm.meta), sorted(vars(gm)), sorted(gm._modules), sorted(gm._parameters)]
    nodes = [
        (without_numbers(n.name), sorted(n.meta.keys() - _NOT_COMPARED)) for n in gm.graph.nodes
    ]
    return [*rows, *nodes]


def aot_graph(gm: torch.fx.GraphModule) -> str:
    """A graph of AOTAutograd with the metadata of what each node computes; nodes are numbered.

    Their names count nodes that are gone, too. Symbols are numbered as they occur: torch names those
    that a backend makes by how many tensors without a source it has seen.
    """
    numbers = {fx_node: f"%{i}" for i, fx_node in enumerate(gm.graph.nodes)}
    lines = [aot_graph(part) for part in gm.children() if isinstance(part, torch.fx.GraphModule)]
    for fx_node, number in numbers.items():
        args = torch.fx.map_arg((fx_node.args, fx_node.kwargs), numbers.__getitem__)
        value = pytree.tree_map_only(torch.Tensor, _metadata, fx_node.meta.get("val"))
        lines.append(f"{number} = {fx_node.op} {fx_node.target} {args} -> {value}")
    symbols: dict[str, str] = {}
    return re.sub(
        r"\b[su]\d+\b",
        lambda found: symbols.setdefault(found[0], f"{found[0][0]}{len(symbols)}"),
        without_numbers("\n".join(lines)),
    )


def _metadata(t: torch.Tensor) -> str:
    if t.layout is not torch.strided or t.is_nested:
        return f"{t.dtype}{tuple(t.size())} {t.layout}"
    return f"{t.dtype}{tuple(t.size())} at {t.stride()} from {t.storage_offset()}"


def inputs_of(gm: torch.fx.GraphModule, inputs: list[Any]) -> list[Any]:
    """A backend's inputs, as fake tensors of the mode that it traces with."""
    context = TracingContext.try_get()
    mode = context.fake_mode if context is not None else None
    if mode is None:
        return []
    storages: dict[int, int] = {}
    rows: list[Any] = []
    alive: list[Any] = []  # else the next one has the address of the one before
    for value in inputs:
        if isinstance(value, list):  # of compiled autograd
            rows.append(len(value))
            continue
        if not isinstance(value, torch.Tensor):
            rows.append(without_numbers(repr(value)))
            continue
        fake = value
        if not is_fake(value):
            policy = context.tensor_to_context.get(value)
            source = None if policy is None else policy.tensor_source
            with mode:
                fake = mode.from_tensor(
                    value, symbolic_context=policy, source=source, trace=policy is None
                )
        alive.append(fake)
        rows.append(_fake(fake, storages))
    return rows


def _fake(t: torch.Tensor, storages: dict[int, int]) -> dict[str, Any]:
    row = {**_common(t), "size": str(tuple(t.size()))}
    if t.layout is torch.strided and not t.is_nested:
        row["strides"] = str(t.stride())
        row["offset"] = str(t.storage_offset())
        key = id(t) if is_traceable_wrapper_subclass(t) else t.untyped_storage()._cdata
        row["storage"] = storages.setdefault(key, len(storages))
    if t._base is not None:
        row["base"] = _fake(t._base, storages)
    if t.is_leaf and t.grad is not None:
        row["grad"] = str(tuple(t.grad.size()))
    return row
