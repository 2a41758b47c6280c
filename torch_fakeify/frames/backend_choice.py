"""Which backend compiles a recorded frame, and what to import for it.

A file names backends, operators and modules; nothing imports a module because a file names it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from torch_fakeify.compat import backends
from torch_fakeify.encoding.settings import NotSet, options_to_pass
from torch_fakeify.errors import CaptureError, UnknownNameError

if TYPE_CHECKING:
    from torch_fakeify.compat.backends import Compiler
    from torch_fakeify.records.frame import CaptureDesc


def choose_backend(desc: CaptureDesc, backend: str | Compiler | None) -> Compiler:
    """Return the requested backend of a frame, by default the one that it was recorded with.

    It is a name, ``MODULE:ATTR`` or a callable; ``None`` for the recorded one, or inductor if there is none.

    Raises:
        CaptureError: there is no such backend in this process.
    """
    if backend is not None:
        return backends.resolve_backend(backend)
    name = desc.backend_name
    found = backends.find_backend(name)
    if found is None:
        raise CaptureError(
            f"the frame was recorded with the backend {name!r}, which is not registered here",
            fix=_how_to_get(desc),
        )
    return found


def recorded_name(desc: CaptureDesc, backend: str | Compiler | None) -> str:
    """Return the name of the requested backend; the recorded one if it is that at its recorded place."""
    if backend is None or (isinstance(backend, str) and backend == desc.backend_place):
        return desc.backend_name
    return backends.backend_name(backend)


def with_options(
    desc: CaptureDesc, backend: str | Compiler | None, *, trust: bool = False
) -> tuple[Compiler, tuple[NotSet, ...]]:
    """Return a backend that gets the recorded ``mode`` and ``options``, and those that it does not get.

    Arguments are those of `choose_backend` and `options_to_pass`.

    Raises:
        CaptureError: there is no such backend in this process.
    """
    compiler_fn = choose_backend(desc, backend)
    given, not_passed = options_to_pass(desc, recorded_name(desc, backend), trust=trust)
    return functools.partial(compiler_fn, **given) if given else compiler_fn, not_passed


def _how_to_get(desc: CaptureDesc) -> str:
    module, _, attribute = (desc.backend_place or "").partition(":")
    other = "or compile with another one: --backend inductor"
    if not module:
        return f"Import the module that registers it (--import MODULE), {other}"
    if module == "__main__":
        return (
            "The recorded script itself defines it: move it to a module, then use"
            f" --backend MODULE:{attribute or 'ATTR'}, {other}"
        )
    return f"Use --backend {module}:{attribute or 'ATTR'}, or --import {module} if that registers it, {other}"


def name_module(desc: CaptureDesc, error: UnknownNameError) -> None:
    """Add to an error about an operator that is not registered the module that registered it."""
    for operator, module in desc.operator_modules:
        if f"torch.ops.{operator} is not registered" in error.what:
            error.fix = (
                "The recorded script itself registers it: move that to a module, then use --import MODULE"
                if module == "__main__"
                else f"Use --import {module}, or import {module} first in Python; to compile only, `Capture.operator_stubs`"
            )
