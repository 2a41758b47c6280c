"""Guards on properties of a frontend's inputs other than sizes, and on torch's global state.

They cover containers and their lengths, constants, properties of tensors such as dtype and device,
identity and shared storages of tensors, and global modes.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from torch_fakeify.compat import torch_dynamo, torch_fakes, torch_symbols
from torch_fakeify.describe import tensor_state
from torch_fakeify.encoding.values import encode_value
from torch_fakeify.errors import UnsupportedValueError

from .arguments import after, parts_of
from .guards import Guard, constant_guard, reader_of, type_guard, value_text
from .pytree_nodes import constants_of, node_of, plain_attributes, structure_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence, Set

    from .guards import Reader

__all__ = ["alias_guards", "mode_guards", "overlap_guard", "scope_guard", "tensor_guards",
           "value_guards"]  # fmt: skip

_CONFIGURES = (bool, int, float, str, type(None))
"""Types of a module's attributes that are guarded as its configuration."""


def scope_guard(scope: Mapping[str, Any]) -> Guard:
    """A guard on the names of a scope, in any order."""
    names = frozenset(scope)
    return Guard(f"sorted(L) == {sorted(names)!r}", lambda found: found.keys() == names)


def value_guards(source: Any, value: Any) -> Iterator[Guard]:
    """Guards on a constant or container, without its contents."""
    parts = parts_of(value, source.name)
    if parts is None:
        yield constant_guard(source, value)
        return
    yield type_guard(source, value)
    if isinstance(value, torch.nn.Module):
        yield from _module_guards(source, value)
        return
    if isinstance(value, dict):
        yield _guard(f"list({source.name}) == {list(value)!r}", source, list, list(value))
    elif type(value) in (list, tuple):
        yield _guard(f"len({source.name}) == {len(value)}", source, len, len(value))
    if not isinstance(value, tuple):
        yield from _attribute_guards(source, value, {path[0][1] for path, _ in parts})
    if type(value) not in _BUILT_IN and not hasattr(value, "_fields"):
        yield from _node_guards(source, value)


_BUILT_IN = (list, tuple, dict, OrderedDict)


def _attribute_guards(source: Any, value: Any, parts: Set[Any]) -> Iterator[Guard]:
    """Guards on the constant attributes of an object, except its parts."""
    attr_source = torch_dynamo.dynamo_source().AttrSource
    for name, held in plain_attributes(value):
        if name not in parts:
            yield constant_guard(attr_source(source, name), held)


def _node_guards(source: Any, value: Any) -> Iterator[Guard]:
    """Guards on the structure of a value whose class is registered with torch's pytree.

    They cover its ``TreeSpec`` and the objects on the paths to its parts.
    """
    node = node_of(value, source.name)
    if node is None:
        return
    for path, part in node.between:
        inner = after(source, path)
        yield type_guard(inner, part)
        if isinstance(part, dict):
            yield _guard(f"list({inner.name}) == {list(part)!r}", inner, list, list(part))
        elif isinstance(part, (list, tuple)):
            yield _guard(f"len({inner.name}) == {len(part)}", inner, len, len(part))
        else:
            yield from _attribute_guards(inner, part, set())
    name = source.name
    spec = structure_of(value, name)
    text = f"str(torch.utils._pytree.tree_structure({name})) == {str(spec)!r}"
    yield _guard(text, source, lambda found: _or_none(structure_of, found, name), spec)
    if not node.is_whole:
        constants = constants_of(value, name)
        for constant in constants:
            encode_value(constant, where=name)
        leaves = f"torch.utils._pytree.tree_leaves({name})"
        yield _guard(
            f"repr([x for x in {leaves} if not isinstance(x, torch.Tensor)]) == {repr(constants)!r}",
            source,
            lambda found: repr(_or_none(constants_of, found, name)),
            repr(constants),
        )


def _or_none(ask: Callable[[Any, str], Any], value: Any, where: str) -> Any:
    """The result of a function; ``None`` for a value that cannot be flattened."""
    try:
        return ask(value, where)
    except UnsupportedValueError:
        return None


def _module_guards(source: Any, module: torch.nn.Module) -> Iterator[Guard]:
    """Guards on the configuration of a module and the names of its parameters and submodules."""
    attr_source = torch_dynamo.dynamo_source().AttrSource
    for name, value in vars(module).items():
        if type(value) in _CONFIGURES:
            yield constant_guard(attr_source(source, name), value)
    for table in ("_parameters", "_buffers", "_modules"):
        part = attr_source(source, table)
        names = list(getattr(module, table))
        yield _guard(f"list({part.name}) == {names!r}", part, list, names)


def _guard(text: str, source: Any, ask: Callable[[Any], Any], answer: Any) -> Guard:
    read = reader_of(source)
    return Guard(text, lambda scope: ask(read(scope)) == answer)


# --- tensors --------------------------------------------------------------------------------------


def tensor_guards(source: Any, t: torch.Tensor) -> Iterator[Guard]:
    """Guards on a tensor and its inner tensors, except sizes, strides and offsets."""
    name = source.name
    yield type_guard(source, t)
    device = value_text(t.device)
    yield _guard(f"{name}.dtype == {t.dtype}", source, lambda t: t.dtype, t.dtype)
    yield _guard(f"{name}.device == {device}", source, lambda t: t.device, t.device)
    yield _guard(f"{name}.layout == {t.layout}", source, lambda t: t.layout, t.layout)
    yield _guard(f"{name}.ndim == {t.ndim}", source, lambda t: t.ndim, t.ndim)
    for ask in ("requires_grad", "is_inference", "is_conj", "is_neg"):
        yield _tensor_flag(source, t, ask)
    if t.is_sparse or tensor_state.is_sparse_compressed(t.layout):
        yield from _sparse_guards(source, t)
    if torch_fakes.is_traceable_wrapper_subclass(t):
        yield from _subclass_guards(source, t)


def _tensor_flag(source: Any, t: torch.Tensor, name: str) -> Guard:
    read = reader_of(source)
    if name == "requires_grad":
        value = t.requires_grad
        text = f"{source.name}.requires_grad is {value}"
        return Guard(text, lambda scope: read(scope).requires_grad is value)
    method: Callable[[torch.Tensor], bool] = getattr(torch.Tensor, name)
    value = method(t)
    return Guard(f"{source.name}.{name}() is {value}", lambda scope: method(read(scope)) is value)


def _sparse_guards(source: Any, t: torch.Tensor) -> Iterator[Guard]:
    for name in ("sparse_dim", "dense_dim"):
        method: Callable[[torch.Tensor], int] = getattr(torch.Tensor, name)
        yield _guard(f"{source.name}.{name}() == {method(t)}", source, method, method(t))


def _subclass_guards(source: Any, t: Any) -> Iterator[Guard]:
    names, context = t.__tensor_flatten__()
    text = f"{source.name}.__tensor_flatten__()"
    yield _guard(f"{text} == ({names!r}, {context!r})", source, _flattened, (list(names), context))
    attr_source = torch_dynamo.dynamo_source().AttrSource
    for name in names:
        inner = getattr(t, name)
        if isinstance(inner, torch.Tensor):
            yield from tensor_guards(attr_source(source, name), inner)
        else:
            yield constant_guard(attr_source(source, name), inner)


def _flattened(t: Any) -> tuple[list[str], Any]:
    names, context = t.__tensor_flatten__()
    return list(names), context


# --- identity and shared memory -------------------------------------------------------------------


def alias_guards(tensors: Sequence[tuple[Any, torch.Tensor]]) -> Iterator[Guard]:
    """Guards on which sources are the same tensor, and which tensors share a storage.

    Args:
        tensors: all tensors of a scope with their sources, including repeated ones.
    """
    first: dict[int, Any] = {}
    distinct: list[tuple[Any, torch.Tensor]] = []
    for source, t in tensors:
        earlier = first.setdefault(id(t), source)
        if earlier is source:
            distinct.append((source, t))
        else:
            one, other = reader_of(source), reader_of(earlier)
            text = f"{source.name} is {earlier.name}"
            yield Guard(text, _compared(one, other, lambda a, b: a is b))
    groups: dict[int, list[Any]] = {}
    for source, t in distinct:
        if _has_plain_storage(t):
            groups.setdefault(_storage(t), []).append(source)
    for group in groups.values():
        yield from _one_storage(group)
    if len(groups) > 1:
        yield _separate_storages([group[0] for group in groups.values()])


def _has_plain_storage(t: torch.Tensor) -> bool:
    return tensor_state.has_storage(t) and not torch_fakes.is_traceable_wrapper_subclass(t)


def _storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def _compared(one: Reader, other: Reader, same: Callable[[Any, Any], bool]) -> Any:
    return lambda scope: same(one(scope), other(scope))


def _one_storage(sources: Sequence[Any]) -> Iterator[Guard]:
    for i, source in enumerate(sources[1:], 1):
        one, other = reader_of(sources[0]), reader_of(source)
        text = "{1}.untyped_storage()._cdata == {0}.untyped_storage()._cdata"
        yield Guard(
            text.format(sources[0].name, source.name),
            _compared(one, other, lambda a, b: _storage(a) == _storage(b)),
        )
        for earlier in sources[:i]:
            text = f"{source.name} is not {earlier.name}"
            yield Guard(text, _compared(reader_of(earlier), other, lambda a, b: a is not b))


def _separate_storages(sources: Sequence[Any]) -> Guard:
    reads = [reader_of(source) for source in sources]
    names = ", ".join(source.name for source in sources)
    return Guard(
        f"len({{t.untyped_storage()._cdata for t in ({names})}}) == {len(sources)}",
        lambda scope: len({_storage(read(scope)) for read in reads}) == len(reads),
    )


def overlap_guard(entry: Any) -> Guard | None:
    """The guard for AOTAutograd's assumption about overlap of tensors in one storage.

    Method: ``StorageOverlap`` of ``torch/_guards.py`` (torch 2.13). ``None`` for other entries, which
    `alias_guards` covers.
    """
    if not isinstance(entry, torch_dynamo.StorageOverlap):
        return None
    sources = [*entry.overlapping_sources, *entry.non_overlapping_sources]
    apart = len(entry.overlapping_sources)
    reads = [reader_of(source) for source in sources]

    def holds(scope: Mapping[str, Any]) -> bool:
        found = torch_symbols.compute_overlapping_tensors(
            [read(scope) for read in reads], symbolic=False
        )
        return all(i < apart for i in found)

    names = [", ".join(s.name for s in group) for group in
             (entry.overlapping_sources, entry.non_overlapping_sources)]  # fmt: skip
    return Guard(
        f"check_overlapping(overlapping=[{names[0]}], non_overlapping=[{names[1]}])", holds
    )


# --- torch's global state -------------------------------------------------------------------------


def mode_guards() -> Iterator[Guard]:
    """Guards on the global state of torch that a trace depends on."""
    asked: list[tuple[str, Callable[[], Any]]] = [
        ("torch.is_grad_enabled()", torch.is_grad_enabled),
        ("torch.is_inference_mode_enabled()", torch.is_inference_mode_enabled),
        ("torch.get_default_dtype()", torch.get_default_dtype),
        ("torch.are_deterministic_algorithms_enabled()",
         torch.are_deterministic_algorithms_enabled),
        ("torch.get_float32_matmul_precision()", torch.get_float32_matmul_precision),
    ]  # fmt: skip
    for text, ask in asked:
        yield _state_guard(text, ask)
    for kind in ("cpu", "cuda"):
        yield _state_guard(
            f"torch.is_autocast_enabled({kind!r})", _bound(torch.is_autocast_enabled, kind)
        )
        if torch.is_autocast_enabled(kind):
            yield _state_guard(
                f"torch.get_autocast_dtype({kind!r})", _bound(torch.get_autocast_dtype, kind)
            )


def _bound(ask: Callable[[str], Any], kind: str) -> Callable[[], Any]:
    return lambda: ask(kind)


def _state_guard(text: str, ask: Callable[[], Any]) -> Guard:
    answer = ask()
    return Guard(f"{text} == {value_text(answer)}", lambda _: ask() == answer)
