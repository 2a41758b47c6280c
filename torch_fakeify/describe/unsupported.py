"""Checks for tensors that a record cannot describe.

Every error names the tensor, the field, the expected and found values, and the remedy.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from torch_fakeify.compat import torch_dispatch, torch_fakes
from torch_fakeify.compat.torch_dispatch import dispatch_keys
from torch_fakeify.errors import UnsupportedTensorError, class_name

from . import tensor_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_fakeify.compat.torch_dynamo import Source

__all__ = [
    "MAX_DEPTH",
    "NOT_PLAIN",
    "PLAIN",
    "PLAIN_INFERENCE",
    "TensorPath",
    "device_name",
    "forward_ad_level",
    "is_pinned",
    "kind_of_keys",
    "name_of",
    "refuse_unsupported",
]

_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter

_PLAIN_KEYS = frozenset({
    "Undefined", "Dense", "CPU", "CUDA", "HIP", "MPS", "IPU", "XPU", "HPU", "VE", "MTIA", "MAIA",
    "PrivateUse1", "PrivateUse2", "PrivateUse3", "Meta", "ADInplaceOrView",
})  # fmt: skip
"""Dispatch keys of plain dense tensors, besides autograd's, autocast's and the alias keys."""

_ALIAS_KEYS = ("Autograd", "Autocast", "Composite", "StartOf", "EndOf", "FuncTorchBatchedDecomp")

_FAKE_KEYS = frozenset({"Python", "PythonTLSSnapshot"})
_BIT_KEYS = frozenset({"Conjugate", "Negative"})

NOT_PLAIN, PLAIN, PLAIN_INFERENCE = range(3)

MAX_DEPTH = 64
"""Maximum depth of nested gradients and bases; deeper nesting is treated as a cycle."""


@lru_cache(maxsize=256)
def _key_names(raw_keys: int) -> frozenset[str]:
    keys = torch_dispatch.DispatchKeySet.from_raw_repr(raw_keys)
    return frozenset(
        name
        for name, key in torch_dispatch.DispatchKey.__members__.items()
        if keys.has(key) and not name.startswith(_ALIAS_KEYS)
    )


@lru_cache(maxsize=256)
def kind_of_keys(raw_keys: int, *, fake: bool = False) -> int:
    """``PLAIN``, ``PLAIN_INFERENCE`` or ``NOT_PLAIN`` for the dispatch keys of a tensor."""
    names = _key_names(raw_keys)
    if fake:
        names -= _FAKE_KEYS
    if "Dense" not in names or not names <= _PLAIN_KEYS:
        return NOT_PLAIN
    return PLAIN if "ADInplaceOrView" in names else PLAIN_INFERENCE


@lru_cache(maxsize=256)
def name_of(torch_constant: torch.dtype | torch.layout) -> str:
    """The name of a dtype or layout in torch."""
    # Interned: msgspec omits a field that is identical to its default.
    return sys.intern(str(torch_constant).removeprefix("torch."))


device_name = lru_cache(maxsize=256)(str)
"""The name of a device in torch."""


class TensorPath:
    """A tensor's name in errors: source or id, size, and path of the part."""

    __slots__ = ("_number", "_source", "_t", "path")

    def __init__(
        self,
        number: Callable[[torch.Tensor], int],
        t: torch.Tensor,
        path: str,
        source: Source | None,
    ) -> None:
        self._number = number
        self._t = t
        self.path = path
        self._source = source

    def __str__(self) -> str:
        t: Any = self._t
        if not isinstance(t, _Tensor):
            return self.path
        name = f"tensor {self._number(t)}" if self._source is None else f"{self._source.name}"
        # C++ nested tensors have no size.
        size = "" if tensor_state.is_strided_nested(t) else f" of size {tuple(t.size())}"
        return f"{name}{size}" if self.path == "$" else f"{name}{size}, {self.path}"

    def refuse(self, field: str, expected: str, found: object, fix: str | None) -> NoReturn:
        """Raise the error that a field of the tensor cannot be recorded."""
        raise UnsupportedTensorError(
            f"`{field}` cannot be recorded",
            where=str(self),
            expected=expected,
            found=str(found),
            fix=fix,
        )


def refuse_unsupported(t: torch.Tensor, where: TensorPath, *, strip_subclass: bool = False) -> None:
    """Raise if a record cannot describe the tensor.

    Args:
        t: the tensor.
        where: its name in errors.
        strip_subclass: whether to treat instances of an unsupported class as plain tensors.
    """
    if not isinstance(t, _Tensor):
        where.refuse("type", "a torch.Tensor", type(t).__name__, None)
    if where.path.count(".") > MAX_DEPTH:
        where.refuse("grad", "gradients that end", f"more than {MAX_DEPTH} levels", None)
    if t.is_quantized:
        where.refuse("qscheme", "no quantized dtype", name_of(t.dtype), "Describe its int_repr()")
    if t.device.type in ("xla", "lazy"):
        where.refuse("device", "a device that runs eagerly", t.device, "Move it to the CPU")
    if tensor_state.is_strided_nested(t):
        fix = "Make it with layout=torch.jagged, or describe its components (unbind())"
        where.refuse("layout", "strided, jagged or sparse", "nested with strides", fix)
    base = tensor_state.base_of(t)
    if base is not None and base.layout is not torch.strided and not base.is_nested:
        where.refuse("base", "a strided base", f"a view of {base.layout}", "Describe its clone()")
    if torch_dispatch.functorch_is_legacy_batched(t):
        where.refuse("level", "torch.func.vmap", "the old torch._vmap_internals", "Unwrap it")
    is_fake = isinstance(t, torch_fakes.FakeTensor)
    if not is_fake and forward_ad_level() >= 0 and _has_tangent(t):
        fix = "Describe the primal and the tangent of unpack_dual one by one"
        where.refuse("tangent", "no forward-mode AD", "a dual tensor", fix)
    if torch_dispatch.is_functorch_wrapped(t) or tensor_state.is_functional(t):
        if base is not None or tensor_state.is_functional_view(t):
            fix = "Describe the tensor of which it is a view, or its clone()"
            where.refuse("base", "no view inside functorch or functionalization", "a view", fix)
        return
    if not torch_fakes.is_traceable_wrapper_subclass(t):
        if not strip_subclass:
            _refuse_class(t, where)
        if t.layout is torch.strided:
            _refuse_keys(t, where)
    if is_fake:
        _refuse_unsupported_fake(t, where)


def _refuse_class(t: torch.Tensor, where: TensorPath) -> None:
    """Raise for classes other than torch's, whose behavior would be lost."""
    cls = type(t)
    if cls is _Tensor or cls is _Parameter or isinstance(t, torch_fakes.FakeTensor):
        return
    for method in ("__tensor_flatten__", "__tensor_unflatten__"):
        other = "__tensor_unflatten__" if method == "__tensor_flatten__" else "__tensor_flatten__"
        if hasattr(cls, other) and not hasattr(cls, method):
            fix = f"Give {cls.__qualname__} a `{method}`"
            where.refuse("type", f"both {other} and {method}", class_name(cls), fix)
    fix = "Describe it as a plain tensor: t.as_subclass(torch.Tensor)"
    expected = "Tensor, Parameter, FakeTensor or a traceable wrapper subclass"
    where.refuse("type", expected, class_name(cls), fix)


def _refuse_keys(t: torch.Tensor, where: TensorPath) -> None:
    unusual = _key_names(dispatch_keys(t).raw_repr()) - _PLAIN_KEYS - _BIT_KEYS
    if isinstance(t, torch_fakes.FakeTensor):
        unusual -= _FAKE_KEYS
    if unusual:
        found = ", ".join(sorted(unusual))
        where.refuse("dispatch keys", "a plain dense tensor", found, "Describe its clone()")


def _refuse_unsupported_fake(t: Any, where: TensorPath) -> None:
    if t.pytype is not None and t.pytype is not _Tensor:
        where.refuse("pytype", "a fake of a plain tensor", class_name(t.pytype), None)
    if t.dispatch_keys is not None and not t.is_mkldnn:  # of which they are, as of torch 2.14
        where.refuse("dispatch_keys", "none of its own", t.dispatch_keys, None)


def is_pinned(t: torch.Tensor) -> bool:
    """Whether the tensor is in pinned host memory."""
    guard = torch_dispatch.no_dispatch_guard()
    try:
        return t.device.type == "cpu" and t.is_pinned()
    finally:
        del guard


def forward_ad_level() -> int:
    """The level of forward-mode AD; negative if inactive."""
    return _forward_ad._current_level


_forward_ad: Any = torch.autograd.forward_ad


def _has_tangent(t: torch.Tensor) -> bool:
    if t.layout not in (torch.strided, torch.jagged):
        return False  # torch can neither make nor unpack a dual tensor of a sparse one
    while torch_dispatch.is_batched(t):  # vmap knows no unpack_dual
        t = torch_dispatch.get_unwrapped(t)
    return _forward_ad.unpack_dual(t).tangent is not None
