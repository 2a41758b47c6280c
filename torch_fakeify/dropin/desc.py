"""Descriptions of tensors as torch's callers expect them: with live objects in their fields.

The fields are those of ``MetaTensorDesc`` and ``MetaStorageDesc`` in ``torch._subclasses.meta_utils``
of torch 2.13. Records (`desc.MetaTensorDesc`) have no torch objects in them; these are for callers
within one process, and for ``GraphPickler``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch

from torch_fakeify.compat.torch_dispatch import CreationMeta
from torch_fakeify.compat.torch_fakes import TorchStorageDesc

if TYPE_CHECKING:
    import builtins
    from collections.abc import Mapping

    from torch_fakeify.compat.torch_fakes import FakeTensorMode

_TensorT = TypeVar("_TensorT", bound=torch.Tensor)
_PARTS = (
    "base",
    "grad",
    "crow_indices",
    "col_indices",
    "ccol_indices",
    "row_indices",
    "values",
)
_HIDDEN = frozenset({"data", "autograd_meta_from"})


@dataclass(frozen=True)
class MetaStorageDesc:
    """A storage: its number, its size in bytes, and itself where data is to be copied."""

    id: int
    size: int
    data: torch.UntypedStorage | torch.Tensor | None

    def as_json(self, describer_id: int) -> dict[str, object]:
        """Payload of torch's trace event ``describe_storage``."""
        torchs: Any = TorchStorageDesc
        return torchs(self.id, self.size, None).as_json(describer_id)


@dataclass(frozen=True)
class MetaTensorDesc(Generic[_TensorT]):
    """A tensor. Sizes, strides and the storage offset are in elements and may be symbolic."""

    id: int
    ndim: int
    dtype: torch.dtype
    device: torch.device
    size: tuple[int, ...]
    dynamo_dynamic_indices: list[int]
    dynamo_hint_overrides: dict[int, int]

    layout: torch.layout = torch.strided
    is_inference: bool = False
    is_leaf: bool = False
    requires_grad: bool = False
    is_sparse: bool = False
    """Whether it is COO."""
    is_mkldnn: bool = False
    is_functorch_wrapped: bool = False
    is_batchedtensor: bool = False
    is_legacy_batchedtensor: bool = False
    is_gradtrackingtensor: bool = False
    is_view: bool = False
    is_nested: bool = False
    nested_int: int | None = None
    """The nested int of a tensor of offsets or lengths of jagged tensors."""
    is_traceable_wrapper_subclass: bool = False
    is_functional: bool = False
    is_conj: bool = False
    is_neg: bool = False
    is_parameter: bool = False
    stride: tuple[int, ...] | None = None
    """Of layouts that have strides."""
    storage_offset: int = 0
    storage: MetaStorageDesc | None = None
    sparse_dim: int | None = None
    dense_dim: int | None = None
    is_coalesced: bool | None = None
    crow_indices: MetaTensorDesc[Any] | None = None
    col_indices: MetaTensorDesc[Any] | None = None
    ccol_indices: MetaTensorDesc[Any] | None = None
    row_indices: MetaTensorDesc[Any] | None = None
    values: MetaTensorDesc[Any] | None = None
    unwrapped: MetaTensorDesc[Any] | None = None
    """What functorch or functionalization has wrapped."""
    bdim: int | None = None
    base: MetaTensorDesc[Any] | None = None
    attrs: dict[str, MetaTensorDesc[Any]] | None = None
    """The inner tensors of a traceable wrapper subclass."""
    opaque_attrs: dict[str, Any] | None = None
    """Its other parts."""
    creation_meta: CreationMeta | None = None
    grad: MetaTensorDesc[Any] | None = None

    _UNSERIALIZABLE: ClassVar[set[str]] = {
        "ctx",
        "type",
        "fake_mode",
        "view_func",
        "level",
        "current_level",
        "functorch_stack",
        "autograd_meta_from",
        "data",
        "nested_int",
    }
    """The fields that ``GraphPickler`` cannot serialize; a record of this package can."""

    ctx: object | None = None
    """The context returned by ``__tensor_flatten__``."""
    type: builtins.type | None = None
    fake_mode: FakeTensorMode | None = None
    view_func: Any = None
    level: int | None = None
    current_level: int | None = None
    functorch_stack: list[Any] | None = None
    autograd_meta_from: torch.Tensor | None = None
    data: torch.Tensor | None = None
    """The tensor itself, if its data is to be copied."""

    def __post_init__(self) -> None:
        """Set the fake mode of the parts to that of the tensor."""
        if self.fake_mode is None:
            return
        for name in _PARTS:
            part = getattr(self, name)
            if part is not None and part.fake_mode is None:
                part = dataclasses.replace(part, fake_mode=self.fake_mode)
                object.__setattr__(self, name, part)

    def __getstate__(self) -> dict[str, Any]:
        """What pickling writes: all but the mode, which the reader has another of."""
        return {name: value for name, value in vars(self).items() if name != "fake_mode"}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> MetaTensorDesc[Any]:
        """A description with these fields; the others are at their defaults.

        The constructor of a frozen dataclass would set each of fifty fields by a call.
        """
        made = object.__new__(cls)
        made.__dict__.update(fields)
        return made

    def as_json(self, describer_id: int) -> dict[str, object]:
        """Payload of the trace event ``describe_tensor``: fields that differ from their defaults."""
        event: dict[str, object] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            unmarked = field.name == "dynamo_dynamic_indices" and not value
            if value is not field.default and not unmarked:
                event[field.name] = _json(field.name, value)
        event["describer_id"] = describer_id
        return event

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""
        return self.size


def _json(name: str, value: Any) -> Any:
    if name in _HIDDEN:
        return None
    if name in MetaTensorDesc._UNSERIALIZABLE:
        return repr(value)
    if isinstance(value, (torch.device, torch.dtype, torch.layout, torch.SymInt)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return [_json(name, part) for part in value]
    if isinstance(value, (MetaStorageDesc, MetaTensorDesc)):
        return value.id
    if isinstance(value, CreationMeta):
        return str(value)
    if name == "attrs" and isinstance(value, dict):
        return {key: part.id for key, part in value.items()}
    return value
