"""Hold a fake kernel against the right one: metadata of fake results, and of real ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map_only

from torch_fakeify.fake_kernels.evaluating import is_same_strides

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def facts(value: Any) -> Any:
    """Return the metadata of a result; sizes that depend on data are ``None``."""
    if isinstance(value, torch.Tensor):
        size = [None if _is_unknown(n) else int(n) for n in value.shape]
        stride = [None if _is_unknown(n) else int(n) for n in value.stride()]
        return (size, stride, value.dtype, value.device.type)
    if isinstance(value, (list, tuple)):
        return [facts(each) for each in value]
    return None if _is_unknown(value) else value


def _is_unknown(value: Any) -> bool:
    return isinstance(value, torch.SymInt) and not value.node.expr.is_number


def fake_facts(kernel: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Return the metadata of the fake results of a call."""
    from torch._library.fake_impl import FakeImplCtx, set_ctx_getter

    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = [faked(mode, each) for each in args]
    context = FakeImplCtx(mode, None)
    with set_ctx_getter(lambda: context), mode:
        return facts(kernel(*fakes))


def faked(mode: Any, value: Any) -> Any:
    """Return an argument with fake tensors of its sizes."""
    return tree_map_only(torch.Tensor, lambda t: mode.from_tensor(t, static_shapes=True), value)


def is_like(fake: Any, real: Any) -> bool:
    """Return whether two results are alike, where the sizes of both are known."""
    if isinstance(fake, tuple) and isinstance(real, tuple):
        if len(fake[0]) != len(real[0]) or fake[2:] != real[2:]:
            return False
        if any(a not in (None, b) and b is not None for a, b in zip(fake[0], real[0], strict=True)):
            return False
        if None in (*fake[0], *fake[1], *real[0], *real[1]):
            return True
        return is_same_strides(real[0], fake[1], real[1])
    if isinstance(fake, list) and isinstance(real, list):
        return len(fake) == len(real) and all(map(is_like, fake, real))
    return bool(fake == real) or None in (fake, real)
