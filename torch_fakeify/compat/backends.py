"""Dynamo backends: by name, as callables, with the options of ``torch.compile``."""

from __future__ import annotations

import functools
import importlib
import operator
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from torch_fakeify.errors import CaptureError

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

Compiled = Callable[..., Any]
Compiler = Callable[..., Compiled]


def resolve_backend(backend: str | Compiler) -> Compiler:
    """Return the backend of a registered name or of ``MODULE:ATTR``, or the callable itself.

    The module is imported.

    Raises:
        CaptureError: no backend has that name, the module or its attribute cannot be had, or it cannot be called.
    """
    check_backend(backend)
    if not isinstance(backend, str):
        return backend
    module, colon, name = backend.partition(":")
    if colon:
        return _attribute(module, name)
    found = find_backend(backend)
    if found is None:
        from torch._dynamo.backends.registry import list_backends

        raise CaptureError(
            f"there is no Dynamo backend {backend!r}",
            expected=f"one of {', '.join(sorted(list_backends(exclude_tags=())))}, or MODULE:ATTR",
            fix="Import the module that registers it (--import MODULE)",
        )
    return found


def check_backend(backend: object) -> None:
    """Raise ``CaptureError`` unless an argument may be a backend."""
    if not (isinstance(backend, str) or callable(backend)):
        raise CaptureError(
            "not a backend",
            expected="a name that Dynamo knows, MODULE:ATTR, or a function (gm, example_inputs)",
            found="None" if backend is None else type(backend).__qualname__,
        )


def find_backend(name: str) -> Compiler | None:
    """Return the backend that is registered under a name, also by an entry point of a package.

    Raises:
        CaptureError: the package that registers it cannot be imported.
    """
    from torch._dynamo.backends import registry
    from torch._dynamo.exc import InvalidBackend

    try:
        return registry.lookup_backend(name)
    except InvalidBackend:
        return None
    except AssertionError:
        # The module of an entry point registers the name too, so torch would do so twice.
        if registry._COMPILER_FNS.get(name) is None:
            raise
        return registry.lookup_backend(name)
    except Exception as error:
        raise CaptureError(
            f"the package that registers the backend {name!r} cannot be imported",
            found=f"{type(error).__name__}: {error}",
        ) from error


def import_modules(names: Sequence[str]) -> None:
    """Import modules by name.

    Raises:
        CaptureError: one cannot be imported.
    """
    for name in names:
        _module(name)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        found = f"{type(error).__name__}: {error}"
        raise CaptureError(
            f"the module {name!r} cannot be imported",
            found=found,
            fix="Run the command in the folder of the module, or add that folder to PYTHONPATH",
        ) from error


def _attribute(module: str, name: str) -> Compiler:
    try:
        found: Any = operator.attrgetter(name)(_module(module))
    except AttributeError as error:
        raise CaptureError(
            f"the module {module!r} has no backend {name!r}", expected="MODULE:ATTR"
        ) from error
    if not callable(found):
        raise CaptureError(
            f"{module}:{name} is no backend",
            expected="a function of a graph and its example inputs",
            found=type(found).__qualname__,
        )
    return cast("Compiler", found)


def backend_place(backend: Any) -> str | None:
    """Return where a backend is defined: ``module:qualname``, or ``module`` if it has no name there.

    ``None`` for a backend of torch.
    """
    found = getattr(
        _wrapped(backend), "compiler_fn", _wrapped(backend)
    )  # `torch.compile` with a mode or options
    while isinstance(found, functools.partial):
        found = found.func
    if isinstance(found, str):
        found = find_backend(found)
    name = getattr(found, "__qualname__", "")
    module = getattr(found, "__module__", None) or type(found).__module__
    if module.partition(".")[0] in ("torch", "torch_fakeify", "functools"):
        return None
    is_there = "." not in name and getattr(sys.modules.get(module), name, None) is found
    return f"{module}:{name}" if is_there else module


def _wrapped(compiler_fn: Any) -> Any:
    """Return what Dynamo wraps as a compiler function."""
    return getattr(compiler_fn, "_torchdynamo_orig_backend", compiler_fn)


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


def compile_options(compiler_fn: Any) -> tuple[dict[str, Any], bool]:
    """Return the options of ``torch.compile`` that are in Dynamo's wrapper of a backend.

    Returns:
        For inductor its settings, which ``mode`` and ``options`` amount to, and ``True``; else the
        keywords that the backend gets, and ``False``.
    """
    wrapped = _wrapped(compiler_fn)
    inductor, other = compile_wrappers()
    if isinstance(wrapped, inductor):
        return dict(wrapped.config), True
    return (dict(wrapped.kwargs) if isinstance(wrapped, other) else {}), False


def reset_backend(backend: str | Compiler) -> None:
    """Call the backend's ``reset``, if it has one."""
    reset = getattr(resolve_backend(backend), "reset", None)
    if reset is not None:
        reset()


def backend_name(backend: str | Compiler) -> str:
    """Return the backend's name, without the address that torch includes for a nameless object."""
    if isinstance(backend, str):
        return backend
    while isinstance(backend, functools.partial):  # with the options of `torch.compile`
        backend = backend.func
    if isinstance(backend, compile_wrappers()):
        return _ADDRESS.sub("", str(getattr(backend, "compiler_name", "")))
    return _ADDRESS.sub("", str(getattr(backend, "__name__", type(backend).__name__)))
