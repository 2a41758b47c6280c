"""Every traceable wrapper subclass that ships in torch, and what makes two of them equal."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

from torch_fakeify.encoding import subclasses
from torch_fakeify.records.tensor import MetaTensorDesc

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

WORLD = 4
RANK = 1


@contextlib.contextmanager
def _process_group(backend: str, **options: Any) -> Generator[None]:
    """A process group, without torch's shardings of earlier equal meshes.

    With those a result has the earlier mesh, which AOTAutograd takes for a constant (torch 2.13).
    """
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    dist.init_process_group(backend, **options)
    try:
        yield
    finally:
        dist.destroy_process_group()


def fake_world() -> contextlib.AbstractContextManager[None]:
    """A process group of four ranks without a network; this process is rank 1."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return _process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)


def one_process() -> contextlib.AbstractContextManager[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    return _process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


# --- records, made and read without describe and convert -----------------------------------------


_IDS: Any = WeakIdKeyDictionary()
_COUNT = itertools.count()


def describe(t: torch.Tensor, _attribute: str = "") -> MetaTensorDesc:
    """As much of a record as these tests need; a ragged size stands as ``-1``."""
    is_wrapper = is_traceable_wrapper_subclass(t)
    return MetaTensorDesc(
        id=_IDS.setdefault(t, next(_COUNT)),
        dtype=str(t.dtype).removeprefix("torch."),
        device=str(t.device),
        size=tuple(plain(size) for size in t.shape),
        stride=tuple(plain(stride) for stride in t.stride()) if is_strided(t) else (),
        requires_grad=t.requires_grad,
        subclass=subclasses.encode_subclass(t, describe, where="t") if is_wrapper else None,
    )


def rebuild(desc: MetaTensorDesc, meshes: subclasses.Meshes) -> Any:
    """A real tensor of such a record, its numbers not set."""
    if desc.subclass is None:
        return torch.empty_strided(desc.size, desc.stride, dtype=getattr(torch, desc.dtype))
    record = desc.subclass
    cls = subclasses.subclass_of(record, where="t")
    inner: dict[str, Any] = {name: rebuild(part, meshes) for name, part in record.tensors}
    decoder = subclasses.context_decoder(record, meshes=meshes)
    inner |= subclasses.decode_opaques(record, decoder, where="t")
    context = subclasses.decode_context(record, decoder, where="t")
    made = cls.__tensor_unflatten__(inner, context, torch.Size(desc.size), desc.stride)
    return made.requires_grad_(desc.requires_grad)


def plain(size: Any) -> int:
    """A size, or -1 for a ragged one."""
    return size if isinstance(size, int) else -1


def is_strided(t: torch.Tensor) -> bool:
    """Whether a tensor has strides."""
    return t.layout in (torch.strided, torch.jagged)


def facts(t: Any) -> list[Any]:
    """The metadata of a tensor and of all inside it, as plain data that two processes can compare."""
    found: list[Any] = [
        type(t).__name__,
        [plain(size) for size in t.shape],
        [plain(stride) for stride in t.stride()] if is_strided(t) else [],
        str(t.dtype),
        str(t.device),
        str(t.layout),
        t.requires_grad,
    ]
    if is_traceable_wrapper_subclass(t):
        attributes, context = t.__tensor_flatten__()
        found.append(repr(context))
        for name in attributes:
            inner = getattr(t, name)
            is_tensor = isinstance(inner, torch.Tensor)
            found.append([name, facts(inner) if is_tensor else mesh_facts(inner)])
    return found


def mesh_facts(mesh: Any, *, with_root: bool = True) -> list[Any]:
    """What a device mesh says of itself, also where there is no process group."""
    root = mesh._root_mesh if with_root else None
    return [
        repr(mesh),
        list(mesh._flatten_rank_map),
        mesh._rank_map.tolist(),
        mesh._rank,
        list(mesh._coordinate_on_dim or ()),
        list(mesh._dim_group_names),
        {name: mesh_facts(m, with_root=False) for name, m in mesh._flatten_mapping.items()},
        None if root is None else mesh_facts(root),
    ]


# --- the tensors -----------------------------------------------------------------------------------


def two_tensor() -> Any:
    """Two plain tensors."""
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(torch.randn(3, 4).t(), torch.randn(3, 4).t())


def two_tensor_of_two_tensors() -> Any:
    """A subclass inside a subclass, with a gradient."""
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(two_tensor(), two_tensor()).requires_grad_()


def async_collective() -> Any:
    """The result of a collective that nobody has waited for."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(torch.randn(3))


def complex_tensor() -> Any:
    """A complex tensor as two real ones: its dtype is not theirs."""
    from torch._subclasses.complex_tensor import ComplexTensor

    return ComplexTensor(torch.randn(3), torch.randn(3))


def semi_structured(name: str) -> Any:
    """A 2:4 sparse tensor: its shape is not that of the packed one."""
    cls = getattr(torch.sparse, f"SparseSemiStructuredTensor{name}")
    return cls(
        shape=torch.Size([8, 16]),
        packed=torch.randn(8, 9),
        meta=torch.zeros(8, 2, dtype=torch.int16),
        packed_t=None,
        meta_t=None,
        compressed_swizzled_bitmask=None,
    )


def jagged(*, lengths: bool = False, cached: bool = False) -> Any:
    """A jagged nested tensor."""
    offsets = torch.tensor([0, 2, 5, 9])
    return torch.nested.nested_tensor_from_jagged(
        torch.randn(9, 5),
        offsets,
        lengths=torch.tensor([1, 3, 2]) if lengths else None,
        min_seqlen=1 if cached else None,
        max_seqlen=4 if cached else None,
    )


def transposed_jagged() -> Any:
    """A jagged nested tensor whose ragged dim is the last."""
    return jagged().transpose(1, 2)


def wrapper() -> Any:
    """The wrapper of torch's own tests."""
    from torch.testing._internal.subclasses import WrapperSubclass

    return WrapperSubclass(torch.randn(2, 3))


def constant_metadata() -> Any:
    """A wrapper whose context is a string."""
    from torch.testing._internal.custom_tensor import ConstantExtraMetadataTensor

    t = ConstantExtraMetadataTensor(torch.randn(2, 3))
    t.constant_attribute = 6
    return t


def plain_out() -> Any:
    """A wrapper whose results are plain."""
    from torch.testing._internal.custom_tensor import CustomTensorPlainOut

    return CustomTensorPlainOut(torch.randn(2, 3), torch.randn(2, 3))


def with_factory() -> Any:
    """A wrapper that makes tensors in its dispatch."""
    from torch.testing._internal.common_subclass import SubclassWithTensorFactory

    return SubclassWithTensorFactory(torch.randn(2, 3))


PLAIN: dict[str, Callable[[], Any]] = {
    "TwoTensor": two_tensor,
    "TwoTensor of TwoTensors": two_tensor_of_two_tensors,
    "AsyncCollectiveTensor": async_collective,
    "ComplexTensor": complex_tensor,
    "SparseSemiStructuredTensorCUTLASS": lambda: semi_structured("CUTLASS"),
    "SparseSemiStructuredTensorCUSPARSELT": lambda: semi_structured("CUSPARSELT"),
    "NestedTensor": jagged,
    "NestedTensor with lengths": lambda: jagged(lengths=True),
    "NestedTensor with cached lengths": lambda: jagged(cached=True),
    "NestedTensor transposed": transposed_jagged,
    "WrapperSubclass": wrapper,
    "ConstantExtraMetadataTensor": constant_metadata,
    "CustomTensorPlainOut": plain_out,
    "SubclassWithTensorFactory": with_factory,
}


def distributed() -> dict[str, Any]:
    """DTensors on one mesh, on its parts and on a mesh of its own. Needs :func:`fake_world`."""
    from torch.distributed._local_tensor import LocalTensor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = mesh["dp", "tp"]._flatten("all")
    unnamed = init_device_mesh("cpu", (4,))
    local = torch.randn(2, 6)
    mask = _MaskPartial(offset_shape=torch.Size([8, 6]), offset_dim=0)
    return {
        "sharded": distribute_tensor(torch.randn(4, 6), mesh, [Shard(0), Replicate()]),
        "sharded twice": distribute_tensor(torch.randn(8, 6), mesh, [Shard(0), Shard(0)]),
        "parameter": torch.nn.Parameter(distribute_tensor(torch.randn(4, 6), mesh, [Shard(1)] * 2)),
        "partial": DTensor.from_local(local, mesh, [Partial("avg"), Replicate()]),
        "masked partial": DTensor.from_local(local, mesh, [mask, Replicate()]),
        "strided": DTensor.from_local(local, mesh, [_StridedShard(0, split_factor=2), Shard(0)]),
        "on a part": distribute_tensor(torch.randn(4, 6), mesh["tp"], [Shard(1)]),
        "on a flattened mesh": distribute_tensor(torch.randn(5, 6), flat, [Shard(0)]),
        "on another mesh": distribute_tensor(torch.randn(5, 6), unnamed, [Shard(0)]),
        "of a subclass": DTensor.from_local(two_tensor(), mesh, [Replicate()] * 2),
        "LocalTensor": LocalTensor({0: torch.randn(3), 2: torch.randn(3)}),
    }
