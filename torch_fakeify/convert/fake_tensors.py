"""Fake tensors around meta tensors, and a dispatch mode that runs view operators on meta tensors.

Both replace slower code of torch with equal results: ``FakeTensor.__new__`` and the dispatch of
operators on fake tensors.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torch_fakeify.compat import torch_dispatch, torch_dynamo, torch_fakes
from torch_fakeify.compat.torch_dispatch import make_subclass, no_dispatch_guard
from torch_fakeify.compat.torch_fakes import FakeTensor
from torch_fakeify.errors import ConvertError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch_fakeify.compat.torch_fakes import FakeTensorMode

META = torch.device("meta")

DTYPES: dict[str, torch.dtype] = {
    name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
"""Torch's dtypes by name, including short names."""


def dtype_of(name: str, where: str) -> torch.dtype:
    """The dtype of that name.

    Raises:
        ConvertError: torch has no such dtype.
    """
    dtype = DTYPES.get(name)
    if dtype is None:
        raise ConvertError(
            f"torch {torch_dynamo.torch_version()} knows no dtype `{name}`", where=where
        )
    return dtype


def neutral_dispatch_state(
    cleared: Callable[[], AbstractContextManager[Any]],
) -> AbstractContextManager[Any]:
    """Suspend functionalization and functorch's interpreters, which ``cleared`` suspends."""
    has_interpreters = torch_dispatch.peek_interpreter_stack() is not None
    if not has_interpreters and not torch_dispatch.functionalize_included():
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(torch_dispatch.suspend_functionalization())
    stack.enter_context(cleared() if has_interpreters else nullcontext())
    return stack


class FakeDevice(NamedTuple):
    """A device in one fake mode, with the attributes that its fake tensors get."""

    mode: FakeTensorMode
    device: torch.device
    attributes: dict[str, Any]
    """Python attributes that torch's constructor sets on each fake tensor."""
    has_guard: bool
    """Whether this build of torch has a device guard for the device type."""

    @classmethod
    def make(cls, mode: FakeTensorMode, name: str, where: str) -> FakeDevice:
        """The device of that name.

        Raises:
            ConvertError: torch has no such device, or the mode does not allow it.
        """
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise ConvertError(
                f"torch {torch_dynamo.torch_version()} knows no device `{name}`", where=where
            ) from error
        if device.type == "meta" and not mode.allow_meta:
            raise ConvertError(
                "the mode takes no tensors on the device `meta`",
                where=where,
                fix="Make the mode under torch._functorch.config.fake_tensor_allow_meta",
            )
        is_host = device.type in ("cpu", "meta")
        if not is_host:
            with mode:
                pass  # without a GPU, a CUDA build gets a guard here that needs no GPU
        cached = _EXAMPLES.get(name)
        if cached is None or torch_fakes.FakeTensorConfig.debug:
            cached = _example(mode, device)
            if is_host and not torch_fakes.FakeTensorConfig.debug:
                _EXAMPLES[name] = cached
        example, has_guard = cached
        attributes: dict[str, Any] = {**example, "fake_mode": mode}
        return cls(mode, attributes["_fake_device"], attributes, has_guard)

    def wrap(self, meta: torch.Tensor, *, requires_grad: bool = False) -> Any:
        """Wrap a meta tensor in a fake tensor, as the constructor of ``FakeTensor`` does.

        The caller has switched off dispatch to Python.
        """
        if torch_fakes.FakeTensorConfig.debug or torch.compiler.is_exporting():
            return FakeTensor(self.mode, meta, device=self.device).requires_grad_(requires_grad)
        fake: Any = make_subclass(
            FakeTensor,
            meta,
            requires_grad,
            dispatch_device=True,
            device_for_backend_keys=self.device,
        )
        if self.mode._allow_unsafe_data_ptr_access:
            torch_dispatch.warn_on_data_ptr(fake)
        else:
            torch_dispatch.throw_on_data_ptr(fake)
        fake.__dict__.update(self.attributes)
        return fake


_EXAMPLES: dict[str, tuple[dict[str, Any], bool]] = {}
"""Attributes and `has_guard` for ``cpu`` and ``meta``, which are equal in every mode."""


def _example(mode: FakeTensorMode, device: torch.device) -> tuple[dict[str, Any], bool]:
    """Attributes that torch's constructor sets, without the mode, and `has_guard`."""
    guard = no_dispatch_guard()
    try:
        example: Any = FakeTensor(mode, torch.empty(0, device=META), device=device)
    finally:
        del guard
    # Built pair by pair: a dictionary without gaps is copied in half the time.
    return dict({**vars(example), "fake_mode": None}.items()), _has_guard(device)


def _has_guard(device: torch.device) -> bool:
    accelerator = torch.accelerator.current_accelerator(check_available=False)
    if device.type in ("cpu", "meta") or (accelerator and accelerator.type == device.type):
        return True
    try:
        torch.Stream(device=device)
    except RuntimeError:
        return False
    return True


class MetaDispatchMode(torch_dispatch.TorchDispatchMode):
    """Dispatch mode that runs view operators on fake tensors on the underlying meta tensor.

    Autograd, above it, sees the fake tensors and sets views, version counters and histories.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode
        self._meta: torch.Tensor | None = None
        self._device: FakeDevice | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else `TorchDispatchMode` wraps `__torch_dispatch__`, which takes longer than the method.
        return False

    def on(self, device: FakeDevice, meta: torch.Tensor | None) -> AbstractContextManager[Any]:
        """The mode for operators on fake tensors of a device.

        Args:
            device: of the fake tensors.
            meta: on which view operators run; ``None`` runs all operators on the fake tensors.
        """
        self._meta = meta
        self._device = device
        return self

    def __exit__(self, *args: Any) -> None:
        """Leave the mode and release its tensors."""
        self._meta = self._device = None
        super().__exit__(*args)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Return the device, run view operators on the meta tensor, pass on all others."""
        assert self._device is not None
        if func is _PRIM_DEVICE:
            # Autograd asks the device guard for a stream; a build of torch without that guard
            # aborts the process. No backward runs on such a device.
            return self._device.device if self._device.has_guard else META
        if self._meta is None:
            with self._mode:
                return func(*args, **(kwargs or {}))
        if func not in _REPLAYED:
            return func(*args, **(kwargs or {}))
        guard = no_dispatch_guard()
        try:
            meta: torch.Tensor = func(self._meta, *args[1:], **(kwargs or {}))
            self._meta = meta
            return self._device.wrap(meta)
        finally:
            del guard


_PRIM_DEVICE = torch.ops.prim.device.default
_aten: Any = torch.ops.aten
_REPLAYED = frozenset(
    {
        _aten.as_strided.default,
        _aten.view.default,
        _aten.view.dtype,
        _aten.view_as_real.default,
        _aten.view_as_complex.default,
        _aten.detach.default,
    }
)


def in_kernel(made: Any) -> AbstractContextManager[Any]:
    """Inside, operators run on the meta tensor of a fake tensor, on the device ``meta``."""
    mode = torch_fakes.maybe_get_fake_mode(made)
    return nullcontext() if mode is None else torch_fakes.in_kernel_invocation_manager(mode)


def attach_grad(made: torch.Tensor, grad: torch.Tensor, where: str) -> None:
    """Assign the gradient of a fake tensor.

    A hint override takes the place of a dim's size or hint, but not of its gradient's, so torch 2.13
    finds their sizes different; its own ``from_tensor`` fails there, too.

    Raises:
        ConvertError: torch refuses the gradient.
    """
    try:
        made.grad = grad
    except RuntimeError as error:
        raise ConvertError(
            "torch does not let the fake tensor have the gradient",
            where=where,
            found=str(error).partition("\n")[0],
            fix="Describe the tensor without its gradient; if a dim of it is marked with a hint "
            "override, mark it without",
        ) from error
