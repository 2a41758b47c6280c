"""What a record does not hold, refused by name.

Every refusal names the tensor, the field, what was expected and found, and what to do.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from . import _torch, facts
from ._torch import dispatch_keys
from .errors import UnsupportedTensorError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._torch import Source

__all__ = [
    "MAX_DEPTH",
    "NOT_PLAIN",
    "PLAIN",
    "PLAIN_INFERENCE",
    "Where",
    "class_name",
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
"""How deep gradients of gradients and bases may nest before they are taken for a cycle."""


@lru_cache(maxsize=256)
def _key_names(raw_keys: int) -> frozenset[str]:
    keys = _torch.DispatchKeySet.from_raw_repr(raw_keys)
    return frozenset(
        name
        for name, key in _torch.DispatchKey.__members__.items()
        if keys.has(key) and not name.startswith(_ALIAS_KEYS)
    )


@lru_cache(maxsize=256)
def kind_of_keys(raw_keys: int, *, fake: bool = False) -> int:
    """Whether a tensor with these dispatch keys is dense and has no bit or wrapper on it."""
    names = _key_names(raw_keys)
    if fake:
        names -= _FAKE_KEYS
    if "Dense" not in names or not names <= _PLAIN_KEYS:
        return NOT_PLAIN
    return PLAIN if "ADInplaceOrView" in names else PLAIN_INFERENCE


@lru_cache(maxsize=256)
def name_of(torch_constant: torch.dtype | torch.layout) -> str:
    """The name of a dtype or layout in torch."""
    # The default of a field is left out of the bytes where it is the very object.
    return sys.intern(str(torch_constant).removeprefix("torch."))


device_name = lru_cache(maxsize=256)(str)
"""The name of a device in torch."""


class Where:
    """Names a tensor for an error: its source or number, its size, and the part of it."""

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
        size = "" if facts.is_strided_nested(t) else f" of size {tuple(t.size())}"
        return f"{name}{size}" if self.path == "$" else f"{name}{size}, {self.path}"

    def refuse(self, field: str, expected: str, found: object, fix: str | None) -> NoReturn:
        """Raises the error that a field of the tensor cannot be recorded."""
        raise UnsupportedTensorError(
            f"`{field}` cannot be recorded",
            where=str(self),
            expected=expected,
            found=str(found),
            fix=fix,
        )


def refuse_unsupported(t: torch.Tensor, where: Where, *, lose_class: bool = False) -> None:
    """Raises for whatever a record does not hold, naming the field and the remedy.

    Args:
        t: what is to be described.
        where: says what it is in errors.
        lose_class: whether an instance of a class that has no record is taken as a plain tensor.
    """
    if not isinstance(t, _Tensor):
        where.refuse("type", "a torch.Tensor", type(t).__name__, None)
    if where.path.count(".") > MAX_DEPTH:
        where.refuse("grad", "gradients that end", f"more than {MAX_DEPTH} levels", None)
    if t.is_quantized:
        where.refuse("qscheme", "no quantized dtype", name_of(t.dtype), "Describe its int_repr()")
    if t.device.type in ("xla", "lazy"):
        where.refuse("device", "a device that runs eagerly", t.device, "Move it to the CPU")
    if facts.is_strided_nested(t):
        fix = "Make it with layout=torch.jagged, or describe its components (unbind())"
        where.refuse("layout", "strided, jagged or sparse", "nested with strides", fix)
    base = facts.base_of(t)
    if base is not None and base.layout is not torch.strided and not base.is_nested:
        where.refuse("base", "a strided base", f"a view of {base.layout}", "Describe its clone()")
    if _torch.functorch_is_legacy_batched(t):
        where.refuse("level", "torch.func.vmap", "the old torch._vmap_internals", "Unwrap it")
    is_fake = isinstance(t, _torch.FakeTensor)
    if not is_fake and forward_ad_level() >= 0 and _has_tangent(t):
        fix = "Describe the primal and the tangent of unpack_dual one by one"
        where.refuse("tangent", "no forward-mode AD", "a dual tensor", fix)
    if _torch.is_functorch_wrapped(t) or facts.is_functional(t):
        if base is not None or facts.is_functional_view(t):
            fix = "Describe the tensor of which it is a view, or its clone()"
            where.refuse("base", "no view inside functorch or functionalization", "a view", fix)
        return
    if not _torch.is_traceable_wrapper_subclass(t):
        if not lose_class:
            _refuse_class(t, where)
        if t.layout is torch.strided:
            _refuse_keys(t, where)
    if is_fake:
        _refuse_unsupported_fake(t, where)


def _refuse_class(t: torch.Tensor, where: Where) -> None:
    """Of a class other than torch's own, something would be lost."""
    cls = type(t)
    if cls is _Tensor or cls is _Parameter or isinstance(t, _torch.FakeTensor):
        return
    for method in ("__tensor_flatten__", "__tensor_unflatten__"):
        other = "__tensor_unflatten__" if method == "__tensor_flatten__" else "__tensor_flatten__"
        if hasattr(cls, other) and not hasattr(cls, method):
            fix = f"Give {cls.__qualname__} a `{method}`"
            where.refuse("type", f"both {other} and {method}", class_name(cls), fix)
    fix = "Describe it as a plain tensor: t.as_subclass(torch.Tensor)"
    expected = "Tensor, Parameter, FakeTensor or a traceable wrapper subclass"
    where.refuse("type", expected, class_name(cls), fix)


def _refuse_keys(t: torch.Tensor, where: Where) -> None:
    unusual = _key_names(dispatch_keys(t).raw_repr()) - _PLAIN_KEYS - _BIT_KEYS
    if isinstance(t, _torch.FakeTensor):
        unusual -= _FAKE_KEYS
    if unusual:
        found = ", ".join(sorted(unusual))
        where.refuse("dispatch keys", "a plain dense tensor", found, "Describe its clone()")


def _refuse_unsupported_fake(t: Any, where: Where) -> None:
    if t.pytype is not None and t.pytype is not _Tensor:
        where.refuse("pytype", "a fake of a plain tensor", class_name(t.pytype), None)
    if t.dispatch_keys is not None and not t.is_mkldnn:
        where.refuse("dispatch_keys", "none of its own", t.dispatch_keys, None)


def is_pinned(t: torch.Tensor) -> bool:
    """Whether the tensor lies in memory of the host that a device can read."""
    guard = _torch.no_dispatch_guard()
    try:
        return t.device.type == "cpu" and t.is_pinned()
    finally:
        del guard


def forward_ad_level() -> int:
    """The level of forward-mode AD, negative outside of it."""
    return _forward_ad._current_level


_forward_ad: Any = torch.autograd.forward_ad


def _has_tangent(t: torch.Tensor) -> bool:
    if t.layout not in (torch.strided, torch.jagged):
        return False  # torch can neither make nor unpack a dual tensor of a sparse one
    while _torch.is_batched(t):  # vmap knows no unpack_dual
        t = _torch.get_unwrapped(t)
    return _forward_ad.unpack_dual(t).tangent is not None


def class_name(cls: type) -> str:
    """The qualified name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"
