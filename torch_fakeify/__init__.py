"""Describe real tensors as records, make fake tensors from them, and record, replay and minify frames.

Names and public modules are imported on first use: ``import torch_fakeify`` imports neither torch
nor sympy.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_fakeify.convert.converter import MetaConverter as MetaConverter
    from torch_fakeify.describe.describer import MetaTensorDescriber as MetaTensorDescriber
    from torch_fakeify.describe.describer import describe_tensor as describe_tensor
    from torch_fakeify.encoding.subclasses import register_subclass as register_subclass
    from torch_fakeify.frames.captures import Capture as Capture
    from torch_fakeify.frames.captures import Instance as Instance
    from torch_fakeify.frames.notes import RecordWarning as RecordWarning
    from torch_fakeify.frames.record_backend import record as record
    from torch_fakeify.frames.recording import capture as capture
    from torch_fakeify.frames.trace_logs.log import from_trace_log as from_trace_log
    from torch_fakeify.records.shape_env import ShapeEnvDesc as ShapeEnvDesc
    from torch_fakeify.records.tensor import MetaStorageDesc as MetaStorageDesc
    from torch_fakeify.records.tensor import MetaTensorDesc as MetaTensorDesc
    from torch_fakeify.replay.assert_nodes import insert_runtime_asserts as insert_runtime_asserts
    from torch_fakeify.replay.guard_nodes import insert_guards as insert_guards
    from torch_fakeify.replay.guard_nodes import learn as learn
    from torch_fakeify.replay.guard_nodes import strip_guards as strip_guards
    from torch_fakeify.serialization.container import Limits as Limits
    from torch_fakeify.serialization.document import dumps as dumps
    from torch_fakeify.serialization.document import loads as loads
    from torch_fakeify.shape_env.rollback import Checkpoint as Checkpoint
    from torch_fakeify.shape_env.rollback import checkpoint as checkpoint
    from torch_fakeify.shape_env.snapshot import restore as restore
    from torch_fakeify.shape_env.snapshot import snapshot as snapshot
    from torch_fakeify.tools.doctor import Diagnosis as Diagnosis
    from torch_fakeify.tools.doctor import doctor as doctor
    from torch_fakeify.transfer.dynamo_handoff import handoff as handoff
    from torch_fakeify.transfer.refakeifier import refakeify as refakeify
    from torch_fakeify.unbacked.binding_checks import check_bindings as check_bindings
    from torch_fakeify.unbacked.repropagation import repropagate as repropagate
    from torch_fakeify.unbacked.retracing import retrace as retrace
    from torch_fakeify.unbacked.transplanting import transplant as transplant

    from . import cli as cli
    from . import corpus as corpus
    from . import dropin as dropin
    from . import errors as errors
    from . import frontend as frontend
    from . import pytest_plugin as pytest_plugin
    from .errors import (
        CaptureError as CaptureError,
    )
    from .errors import (
        ConvertError as ConvertError,
    )
    from .errors import (
        FakeifyError as FakeifyError,
    )
    from .errors import (
        FormatError as FormatError,
    )
    from .errors import (
        LimitError as LimitError,
    )
    from .errors import (
        NotFailingError as NotFailingError,
    )
    from .errors import (
        ScriptError as ScriptError,
    )
    from .errors import (
        ShapeEnvError as ShapeEnvError,
    )
    from .errors import (
        UnknownNameError as UnknownNameError,
    )
    from .errors import (
        UnsupportedTensorError as UnsupportedTensorError,
    )
    from .errors import (
        UnsupportedValueError as UnsupportedValueError,
    )
    from .errors import (
        VersionError as VersionError,
    )
    from .errors import (
        WriteError as WriteError,
    )
    from .versions import TorchVersionWarning as TorchVersionWarning

from ._version import __version__

_HOME = {
    "Capture": "frames.captures",
    "CaptureError": "errors",
    "Checkpoint": "shape_env.rollback",
    "ConvertError": "errors",
    "Diagnosis": "tools.doctor",
    "FakeifyError": "errors",
    "FormatError": "errors",
    "Instance": "frames.captures",
    "LimitError": "errors",
    "Limits": "serialization.container",
    "MetaConverter": "convert.converter",
    "MetaStorageDesc": "records.tensor",
    "MetaTensorDesc": "records.tensor",
    "MetaTensorDescriber": "describe.describer",
    "NotFailingError": "errors",
    "RecordWarning": "frames.notes",
    "ScriptError": "errors",
    "ShapeEnvDesc": "records.shape_env",
    "ShapeEnvError": "errors",
    "TorchVersionWarning": "versions",
    "UnknownNameError": "errors",
    "UnsupportedTensorError": "errors",
    "UnsupportedValueError": "errors",
    "VersionError": "errors",
    "WriteError": "errors",
    "capture": "frames.recording",
    "check_bindings": "unbacked.binding_checks",
    "checkpoint": "shape_env.rollback",
    "describe_tensor": "describe.describer",
    "doctor": "tools.doctor",
    "dumps": "serialization.document",
    "from_trace_log": "frames.trace_logs.log",
    "handoff": "transfer.dynamo_handoff",
    "insert_guards": "replay.guard_nodes",
    "insert_runtime_asserts": "replay.assert_nodes",
    "learn": "replay.guard_nodes",
    "loads": "serialization.document",
    "record": "frames.record_backend",
    "refakeify": "transfer.refakeifier",
    "register_subclass": "encoding.subclasses",
    "repropagate": "unbacked.repropagation",
    "restore": "shape_env.snapshot",
    "retrace": "unbacked.retracing",
    "snapshot": "shape_env.snapshot",
    "strip_guards": "replay.guard_nodes",
    "transplant": "unbacked.transplanting",
}

_MODULES = frozenset({"cli", "corpus", "dropin", "errors", "frontend", "pytest_plugin"})
"""Modules that can be used as attributes without an import."""

__all__ = [
    "Capture",
    "CaptureError",
    "Checkpoint",
    "ConvertError",
    "Diagnosis",
    "FakeifyError",
    "FormatError",
    "Instance",
    "LimitError",
    "Limits",
    "MetaConverter",
    "MetaStorageDesc",
    "MetaTensorDesc",
    "MetaTensorDescriber",
    "NotFailingError",
    "RecordWarning",
    "ScriptError",
    "ShapeEnvDesc",
    "ShapeEnvError",
    "TorchVersionWarning",
    "UnknownNameError",
    "UnsupportedTensorError",
    "UnsupportedValueError",
    "VersionError",
    "WriteError",
    "__version__",
    "capture",
    "check_bindings",
    "checkpoint",
    "describe_tensor",
    "doctor",
    "dumps",
    "from_trace_log",
    "handoff",
    "insert_guards",
    "insert_runtime_asserts",
    "learn",
    "loads",
    "record",
    "refakeify",
    "register_subclass",
    "repropagate",
    "restore",
    "retrace",
    "snapshot",
    "strip_guards",
    "transplant",
]


if not TYPE_CHECKING:  # else type checkers accept any name

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        home = _HOME.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return [*__all__, *_MODULES]


def _install_dropin() -> None:
    """Install the drop-in; warn if torch is refused or missing, as the rest works without it."""
    try:
        import_module(f"{__name__}.dropin").install()
    except (import_module(f"{__name__}.errors").VersionError, ImportError) as error:
        import warnings

        warnings.warn(f"TORCH_FAKEIFY_DROPIN: it is not installed: {error}", stacklevel=2)


if os.environ.get("TORCH_FAKEIFY_DROPIN", "") not in ("", "0"):
    _install_dropin()
