"""Dynamo backends: by name, as callables, with the options of ``torch.compile``."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from torch_fakeify.errors import CaptureError

__all__ = [
    "Compiled",
    "Compiler",
    "backend_name",
    "compile_wrappers",
    "compiler_of",
    "reset_backend",
    "resolve_backend",
]

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

Compiled = Callable[..., Any]
Compiler = Callable[..., Compiled]


def resolve_backend(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return the Dynamo backend of that name, or the callable itself.

    Raises:
        CaptureError: no backend has that name.
    """
    if not isinstance(backend, str):
        return backend
    from torch._dynamo.backends.registry import list_backends, lookup_backend
    from torch._dynamo.exc import InvalidBackend

    try:
        return lookup_backend(backend)
    except InvalidBackend as error:
        raise CaptureError(
            f"there is no Dynamo backend {backend!r}",
            expected=f"one of {', '.join(sorted(list_backends(exclude_tags=())))}, or a callable",
            fix="Import the package that registers it first",
        ) from error


def compile_wrappers() -> tuple[Any, Any]:
    """Return the classes by which ``torch.compile`` wraps inductor and any other backend."""
    return torch._TorchCompileInductorWrapper, torch._TorchCompileWrapper


def compiler_of(backend: str | Compiler, kwargs: dict[str, Any]) -> Compiler:
    """Return the backend to call with the remaining ``kwargs``, from which inductor's are removed.

    ``torch.compile`` passes ``mode`` and ``options`` to a callable backend as keywords. For inductor it
    makes an object from them, as is done here.

    Raises:
        CaptureError: no backend has that name.
    """
    if backend == "inductor" and kwargs.keys() & {"mode", "options"}:
        inductor, _ = compile_wrappers()
        return inductor(kwargs.pop("mode", None), kwargs.pop("options", None), None)
    return resolve_backend(backend)


def reset_backend(backend: str | Compiler) -> None:
    """Call the backend's ``reset``, if it has one."""
    reset = getattr(resolve_backend(backend), "reset", None)
    if reset is not None:
        reset()


def backend_name(backend: str | Compiler) -> str:
    """Return the backend's name, without the address that torch includes for a nameless object."""
    if isinstance(backend, str):
        return backend
    return _ADDRESS.sub("", str(getattr(backend, "__name__", type(backend).__name__)))
