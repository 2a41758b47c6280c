"""Torch's private fake tensors: ``FakeTensor``, its mode and converter, view functions, opaque objects."""

# pyright: reportUnusedImport=false
# Other rooms import these names from here; a test finds the ones that none does.
from __future__ import annotations

from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch

from . import gate

gate.check_installed_torch()  # before anything private is asked for

import torch._subclasses.fake_impls as _fake_impls
import torch._subclasses.meta_utils as meta_utils
from torch._library.fake_class_registry import (
    FakeScriptObject,
    maybe_to_fake_obj,
    maybe_unwrap_fake_script_object,
)
from torch._library.opaque_object import is_opaque_type
from torch._prims_common import make_contiguous_strides_for
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorConfig,
    FakeTensorMode,
    SymNumberMemoDescriptor,
    in_kernel_invocation_manager,
    maybe_get_fake_mode,
    unset_fake_temporarily,
)
from torch._subclasses.meta_utils import MetaStorageDesc as TorchStorageDesc
from torch._subclasses.meta_utils import MetaTensorDesc as TorchTensorDesc
from torch._subclasses.meta_utils import assert_eq, assert_metadata_eq, safe_grad
from torch.fx.experimental.proxy_tensor import snapshot_fake
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

from .torch_dispatch import DisableTorchFunction, DispatchKey, DispatchKeySet, disable_current_modes

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

_opaque: Any = import_module("torch._library.opaque_object")
is_custom_class_obj = getattr(_opaque, "is_custom_class_obj", None) or _opaque.is_opaque_value

CustomClassBase: Any = vars(meta_utils).get("CustomClassBase") or vars(meta_utils)["OpaqueBase"]
"""The base class of opaque objects; ``OpaqueBase`` in torch 2.13."""

_c: Any = torch._C


def inference_hidden() -> bool:
    """Return whether inference tensors are treated as normal ones, as Dynamo requests."""
    return getattr(meta_utils.tls, "disable_inference_mode", False)


def no_fake_mode() -> AbstractContextManager[Any]:
    """Return a context in which tensors are real, even while a ``FakeTensorMode`` is active."""
    return unset_fake_temporarily()


def invalidate_layouts(fakes: list[Any]) -> None:
    """Make C++ compute the memory layout of fake tensors again; their versions do not change."""
    keys = DispatchKeySet(DispatchKey.ADInplaceOrView)
    with disable_current_modes(), DisableTorchFunction(), _c._ExcludeDispatchKeyGuard(keys):
        for fake in fakes:
            with torch.no_grad(), in_kernel_invocation_manager(fake.fake_mode):
                fake.as_strided_(fake.size(), fake.stride(), fake.storage_offset())


unwrap_script_object: Callable[[Any], Any] = maybe_unwrap_fake_script_object
"""Returns the real object of a ``FakeScriptObject``, or the object itself."""


def own_subclass(name: str) -> type | None:
    """Return torch's traceable wrapper subclass of a qualified name, else ``None``.

    Its module is imported here: a program that reads a file need not import it.
    """
    distributed = torch.distributed.is_available()
    match name:
        case "torch.nested._internal.nested_tensor.NestedTensor":
            return import_module("torch.nested._internal.nested_tensor").NestedTensor
        case "torch.distributed.tensor.DTensor" if distributed:
            return import_module("torch.distributed.tensor").DTensor
        case "torch.distributed._functional_collectives.AsyncCollectiveTensor" if distributed:
            home = import_module("torch.distributed._functional_collectives")
            return home.AsyncCollectiveTensor
        case "torch._subclasses.complex_tensor.ComplexTensor":
            return import_module("torch._subclasses.complex_tensor").ComplexTensor
        case "torch.testing._internal.two_tensor.TwoTensor":
            return import_module("torch.testing._internal.two_tensor").TwoTensor
        case _:
            return None


view_func_of = meta_utils.ViewFunc.from_tensor
"""Makes torch's view function of a tensor."""

clone_real_storage: Any = getattr(meta_utils, "_clone_real_storage_from_tensor", None)
"""Copies the storage of a tensor, or of the real tensor of a fake one; ``None`` before torch 2.14."""

compute_stride: Any = getattr(_fake_impls, "_compute_stride", lambda *_: None)

WHOLE_STORAGES = clone_real_storage is not None
"""Whether torch's converter makes storages of full size, as since torch 2.14.

Then a storage has its full size even if the tensor is only a part of it, and a real copy has all
bytes. A wrapper subclass has no storage to share; its inner tensors have.
"""

without_functional: Any = getattr(meta_utils, "_unwrap_python_functional_tensor", lambda t: t)
"""Returns the inner tensor of a ``FunctionalTensor``, if torch's describer reads the data there."""


def transfer_symbols(env: Any, geometry: Any, source: Any, context: Any, overrides: Any) -> Any:
    """Return sizes, strides and offset of another ``ShapeEnv``'s fake tensor, in this ``ShapeEnv``.

    ``overrides``, hints for unbacked sizes, are used by torch 2.13 only; later versions use the hints
    of the other environment.
    """
    transfer = env.transfer_symbols_from_foreign_shape_env
    takes_hints = "hint_overrides" in signature(transfer).parameters
    options = {"hint_overrides": overrides} if takes_hints else {}
    return transfer(*geometry, source, symbolic_context=context, **options)


def custom_view_func(t: torch.Tensor) -> Any:
    """Return the view function of a real tensor."""
    return meta_utils._CustomViewFunc(t._view_func_unsafe)


def next_describer_id() -> int:
    """Return a number that no other describer has, torch's own included."""
    number = meta_utils.DESCRIBER_NEXT_ID
    meta_utils.DESCRIBER_NEXT_ID = type(number)(number + 1)
    return number
