"""Loaded by ``import torch``: with ``TORCH_FAKEIFY_RECORD``, record what this process compiles.

Torch calls `start` as an entry point of the group ``torch.backends``, before it is fully imported. Nothing
else is imported before ``torch._dynamo`` is, so that a process that does not compile pays nothing.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["start"]

_VARIABLE = "TORCH_FAKEIFY_RECORD"
_DYNAMO = "torch._dynamo"


def start() -> None:
    """Record from the import of ``torch._dynamo`` on, if the variable is set."""
    directory = os.environ.get(_VARIABLE)
    if not directory:
        return
    os.environ[_VARIABLE] = os.path.abspath(directory)  # noqa: PTH100 - also for children in other folders
    if _DYNAMO in sys.modules:
        _record()
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds ``torch._dynamo`` as the other finders do, and starts to record after its import."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name != _DYNAMO:
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                _record()

            spec.loader.exec_module = exec_module
        return spec


def _record() -> None:
    try:
        from torch_fakeify.frames.process_recorder import record_from_environment

        record_from_environment()
    except Exception as error:  # noqa: BLE001 - the program continues
        text = f"{type(error).__name__}: {error}"
        sys.stderr.write(
            f"torch-fakeify: warning: nothing is recorded in process {os.getpid()}: {text}\n"
        )
