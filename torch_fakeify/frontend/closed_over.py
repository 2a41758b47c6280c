"""Errors that name a real tensor which a traced function reads by its name in the program.

Torch's error names only the operator that got the tensor.
"""

from __future__ import annotations

import sys
import traceback
from inspect import getattr_static
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torch_fakeify._version import PACKAGE_DIR
from torch_fakeify.compat import torch_fakes
from torch_fakeify.errors import UnsupportedValueError

from .pytree_nodes import access_text, tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType, TracebackType

_TORCH = str(Path(torch.__file__).parent)
_FAKE_TENSOR = sys.modules[torch_fakes.FakeTensorMode.__module__].__file__


def closed_over_error(
    error: BaseException | None, trace: TracebackType | None
) -> UnsupportedValueError | None:
    """The error to raise for an error of the fake mode about a real tensor; else ``None``."""
    if not isinstance(error, AssertionError):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    raising = [f for f in frames[-8:] if f.f_code.co_filename == _FAKE_TENSOR]
    for frame in reversed(raising):
        for value in frame.f_locals.values():
            for _, t in tensors_in(value):
                if not _is_fake(t):
                    name, owner = next(_names(t, frames), (None, "it"))
                    return _error(t, name, owner)
    return None


def refuse_real(t: torch.Tensor, where: str) -> None:
    """Raise an error if a part of a traced result is a real tensor.

    Raises:
        UnsupportedValueError: the tensor is real.
    """
    if not _is_fake(t):
        raise _error(t, where, "it")


def _error(t: torch.Tensor, where: str | None, owner: str) -> UnsupportedValueError:
    kind = "a parameter" if isinstance(t, torch.nn.Parameter) else "a tensor"
    sizes = "" if t.is_nested else f" of size {tuple(t.shape)}"
    return UnsupportedValueError(
        "the function uses a tensor that is no input",
        where=where,
        found=f"{kind}{sizes}, {t.dtype}, on {t.device}",
        fix=f"Give {owner} a name in the scope that is described, and have the function take it from"
        " there",
    )


def _is_fake(t: torch.Tensor) -> bool:
    return torch_fakes.maybe_get_fake_mode(t) is not None


def _names(t: torch.Tensor, frames: list[FrameType]) -> Iterator[tuple[str, str]]:
    """The names of a tensor, and of the variable that holds it, the innermost function first."""
    for frame in reversed(frames):
        code = frame.f_code
        if code.co_filename.startswith((_TORCH, str(PACKAGE_DIR))):
            continue
        function = code.co_name if code.co_name.startswith("<") else f"{code.co_name}()"
        used = {name: frame.f_globals[name] for name in code.co_names if name in frame.f_globals}
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        for name, value, in_globals in (
            *((name, value, False) for name, value in frame.f_locals.items()),
            *((name, value, True) for name, value in used.items()),
        ):
            path = _path_to(t, value, code.co_names)
            if path is None:
                continue
            kind = "a global"
            if not in_globals:
                kind = "closed over" if name in code.co_freevars else "a variable"
                kind = "an argument" if name in arguments else kind
            yield f"{name}{path} ({kind} in {function})", f"`{name}`"


def _path_to(t: torch.Tensor, value: Any, read: Iterable[str]) -> str | None:
    """The path from a value to a tensor as Python text; ``None`` if there is none.

    Class attributes are found by the names of the attributes that the code reads.
    """
    if isinstance(value, torch.nn.Module):
        for name, module in value.named_modules():
            held = {**module._parameters, **module._buffers, **vars(module)}
            found = next((key for key, part in held.items() if part is t), None)
            if found is not None:
                return f".{name}.{found}" if name else f".{found}"
        return None
    path = next((access_text(path) for path, part in tensors_in(value) if part is t), None)
    if path is None:
        path = next((f".{name}" for name in read if getattr_static(value, name, None) is t), None)
    return path
