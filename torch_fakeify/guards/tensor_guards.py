"""Guards on properties of tensors other than sizes, on their identity and storages, and on torch's global state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from torch_fakeify.compat import torch_dynamo, torch_fakes
from torch_fakeify.describe import tensor_state

from .checks import CHECKS, flattened, storage_of
from .conditions import Guard, check_guard

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch_fakeify.records.tensor import MetaTensorDesc


def type_guard(source: Any, value: Any) -> Guard:
    """Return a guard on the exact type of a value; of a fake tensor, on that of the tensor it stands for."""
    cls = type(value)
    if isinstance(value, torch_fakes.FakeTensor):
        cls = torch.nn.Parameter if isinstance(value, torch.nn.Parameter) else torch.Tensor
    return check_guard("type", [source], cls)


def constant_guard(source: Any, value: Any) -> Guard:
    """Return a guard on the type and the value of a constant."""
    return check_guard("constant", [source], value)


def tensor_guards(
    source: Any, t: torch.Tensor, desc: MetaTensorDesc | None = None
) -> Iterator[Guard]:
    """Return guards on a tensor and its inner tensors, except sizes, strides and offsets.

    A fake tensor has a record: fake tensors are no inference tensors. Dynamo hides from backends that a
    tensor is one, so that only a record that says so has a guard.
    """
    yield type_guard(source, t)
    for name in ("dtype", "device", "layout", "ndim", "requires_grad"):
        yield check_guard(name, [source], CHECKS[name].ask(t))
    if desc is None or desc.is_inference:
        is_inference = t.is_inference() if desc is None else True
        yield check_guard("is_inference", [source], is_inference)
    for name in ("is_conj", "is_neg"):
        yield check_guard(name, [source], CHECKS[name].ask(t))
    if t.is_sparse or tensor_state.is_sparse_compressed(t.layout):
        for name in ("sparse_dim", "dense_dim"):
            yield check_guard(name, [source], CHECKS[name].ask(t))
    if torch_fakes.is_traceable_wrapper_subclass(t):
        yield from _subclass_guards(source, t, desc)


def _subclass_guards(source: Any, t: Any, desc: MetaTensorDesc | None) -> Iterator[Guard]:
    yield check_guard("flatten", [source], flattened(t))
    records = dict(desc.subclass.tensors) if desc is not None and desc.subclass is not None else {}
    attr_source = torch_dynamo.dynamo_source().AttrSource
    for name in t.__tensor_flatten__()[0]:
        inner = getattr(t, name)
        if isinstance(inner, torch.Tensor):
            yield from tensor_guards(attr_source(source, name), inner, records.get(name))
        else:
            yield constant_guard(attr_source(source, name), inner)


# --- identity and shared memory -------------------------------------------------------------------


Aliasing: TypeAlias = Literal["objects", "storages", "shared"]
"""What a graph assumes of its tensors: which are one object and which share a storage; or storages
alone; or storages that are shared, but not those that are not.

Dynamo's graphs assume the first. ``torch.export`` makes two fake tensors of a weight that two modules
share, of which the graph reads one; it matters what shares no storage if the graph writes into tensors.
"""


def alias_guards(
    tensors: Sequence[tuple[Any, torch.Tensor]], assumed: Aliasing = "objects"
) -> Iterator[Guard]:
    """Return guards on which of all tensors of a scope are the same, and which share a storage."""
    first: dict[int, Any] = {}
    distinct: list[tuple[Any, torch.Tensor]] = []
    for source, t in tensors:
        earlier = first.setdefault(id(t), source)
        if earlier is source:
            distinct.append((source, t))
        else:
            yield check_guard("same object", [source, earlier], None)
    groups: dict[int, list[Any]] = {}
    others: list[Any] = []
    for source, t in distinct:
        if has_plain_storage(t):
            groups.setdefault(storage_of(t), []).append(source)
        else:
            others.append(source)
    if assumed == "objects" and len(others) > 1:
        yield check_guard("separate objects", others, None)
    for group in groups.values():
        yield from _one_storage(group, are_objects=assumed == "objects")
    if assumed != "shared" and len(groups) > 1:
        yield check_guard("separate storages", [group[0] for group in groups.values()], None)


def has_plain_storage(t: torch.Tensor) -> bool:
    """Whether a tensor has a storage of its own, not only its inner tensors."""
    return tensor_state.has_storage(t) and not torch_fakes.is_traceable_wrapper_subclass(t)


def _one_storage(sources: Sequence[Any], *, are_objects: bool) -> Iterator[Guard]:
    for i, source in enumerate(sources[1:], 1):
        yield check_guard("same storage", [source, sources[0]], None)
        for earlier in sources[:i] if are_objects else ():
            yield check_guard("other object", [source, earlier], None)


def overlap_guard(entry: Any) -> Guard | None:
    """Return the guard for AOTAutograd's assumption about overlap of tensors in one storage.

    Method: ``StorageOverlap`` of ``torch/_guards.py`` (torch 2.13). ``None`` for other entries, which
    `alias_guards` covers.
    """
    if not isinstance(entry, torch_dynamo.StorageOverlap):
        return None
    apart = len(entry.overlapping_sources)
    sources = [*entry.overlapping_sources, *entry.non_overlapping_sources]
    return check_guard("overlap", sources, None, argument=apart)


# --- torch's global state -------------------------------------------------------------------------


def mode_guards(*, hidden: bool = False) -> Iterator[Guard]:
    """Return guards on the global state of torch that a trace depends on, as it is now.

    Args:
        hidden: whether Dynamo has left inference mode, as it does before it calls a backend.
    """
    yield check_guard("grad mode", [], torch.is_grad_enabled())
    if torch.is_inference_mode_enabled() or not hidden:
        yield check_guard("inference mode", [], torch.is_inference_mode_enabled())
    for name in ("default dtype", "deterministic", "matmul precision"):
        yield check_guard(name, [], CHECKS[name].ask())
    for kind in ("cpu", "cuda"):
        yield check_guard("autocast", [], torch.is_autocast_enabled(kind), argument=kind)
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            yield check_guard("autocast dtype", [], dtype, argument=kind)
