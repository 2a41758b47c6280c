"""What the drop-in reaches of torch's private modules; beside `_torch` the only room that may."""

from __future__ import annotations

from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
import torch._subclasses.meta_utils as meta_utils
from torch._dispatch.python import suspend_functionalization
from torch._functorch.pyfunctorch import (
    temporarily_clear_interpreter_stack,
    temporarily_restore_interpreter_stack,
)
from torch._library.fake_class_registry import maybe_unwrap_fake_script_object
from torch._logging._internal import trace_structured
from torch._opaque_base import OpaqueBase
from torch._prims_common import make_contiguous_strides_for
from torch._subclasses.fake_tensor import (
    FakeTensorConverter,
    in_kernel_invocation_manager,
    maybe_get_fake_mode,
)
from torch._subclasses.meta_utils import assert_eq, assert_metadata_eq, safe_grad
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import is_symbolic
from torch.utils._mode_utils import no_dispatch
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

__all__ = [
    "OpaqueBase",
    "WeakIdKeyDictionary",
    "add_batch_dim",
    "assert_eq",
    "assert_metadata_eq",
    "custom_view_func",
    "disable_functorch",
    "fake_callback_of",
    "from_functional",
    "in_kernel_invocation_manager",
    "is_functional",
    "is_symbolic",
    "make_contiguous_strides_for",
    "maybe_get_fake_mode",
    "maybe_unwrap_fake_script_object",
    "meta_utils",
    "mirror_autograd_meta",
    "next_describer_id",
    "no_dispatch",
    "python_dispatch_excluded",
    "safe_grad",
    "skip_in_dynamo",
    "suspend_functionalization",
    "sync_functional",
    "temporarily_clear_interpreter_stack",
    "temporarily_restore_interpreter_stack",
    "to_functional",
    "trace_in_dynamo_again",
    "trace_structured",
    "unimplemented",
    "uninteresting_files",
    "view_func_of",
    "wrap_for_grad",
    "wrap_functional",
]

_c: Any = torch._C

add_batch_dim = _c._functorch._add_batch_dim
wrap_functional = _c._functorch._wrap_functional_tensor
wrap_for_grad = _c._functorch._wrap_for_grad
disable_functorch = _c._DisableFuncTorch
_t: Any = torch
is_functional: Any = _t._is_functional_tensor
to_functional: Any = _t._to_functional_tensor
from_functional: Any = _t._from_functional_tensor
sync_functional: Any = _t._sync
mirror_autograd_meta: Any = _t._mirror_autograd_meta_to
view_func_of = meta_utils.ViewFunc.from_tensor
"""Torch's own classes of view functions serve as they are: they only call a function."""


def custom_view_func(t: torch.Tensor) -> Any:
    """The view function of a tensor that is no fake."""
    return meta_utils._CustomViewFunc(t._view_func_unsafe)


_MAKE_FAKE = [
    part
    for part in FakeTensorConverter.from_real_tensor.__code__.co_consts
    if isinstance(part, CodeType) and part.co_name == "mk_fake_tensor"
]


def fake_callback_of(callback: Any) -> Any:
    """The mode of the callback by which ``FakeTensorConverter`` makes fake tensors without data.

    ``None`` of every other callback.
    """
    code: Any = getattr(callback, "__code__", None)
    if not any(code is known for known in _MAKE_FAKE):
        return None
    cells = dict(zip(code.co_freevars, callback.__closure__, strict=True))
    if cells.keys() != {"constant", "fake_mode"} or cells["constant"].cell_contents is not None:
        return None
    return cells["fake_mode"].cell_contents


def next_describer_id() -> int:
    """A number for a describer, which no other has, torch's own included."""
    number = meta_utils.DESCRIBER_NEXT_ID
    meta_utils.DESCRIBER_NEXT_ID = type(number)(number + 1)
    return number


def python_dispatch_excluded() -> bool:
    """Whether dispatch to Python is off, so that operators would miss the fake tensor mode."""
    return _c._dispatch_tls_local_exclude_set().has(_c.DispatchKey.Python)


def unimplemented(gb_type: str, context: str) -> None:
    """Ends what Dynamo traces here, by its own exception."""
    from torch._dynamo import exc

    exc.unimplemented(
        gb_type=gb_type, context=context, explanation="This is not supported.", hints=[]
    )


def uninteresting_files() -> set[str]:
    """The files that torch leaves out of users' stacks: the set itself, not a copy."""
    return symbolic_shapes.uninteresting_files()


def _trace_rules() -> ModuleType:
    import torch._dynamo.trace_rules as module

    return module


def skip_in_dynamo(folder: Path) -> None:
    """Dynamo traces nothing of the files in a folder."""
    rules: Any = _trace_rules()
    rules.SKIP_DIRS.append(f"{folder.as_posix()}/")
    rules._recompile_re()


def trace_in_dynamo_again(folder: Path) -> None:
    """Takes `skip_in_dynamo` back."""
    rules: Any = _trace_rules()
    rules.SKIP_DIRS.remove(f"{folder.as_posix()}/")
    rules._recompile_re()
