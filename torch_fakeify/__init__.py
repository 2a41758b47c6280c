"""The boundary between real and fake tensors, as data.

Names are imported on first use: ``import torch_fakeify`` imports neither torch nor sympy.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import record as record
    from .binding_checks import check_bindings as check_bindings
    from .captures import capture as capture
    from .checkpoints import Checkpoint as Checkpoint
    from .checkpoints import checkpoint as checkpoint
    from .codec import dumps as dumps
    from .codec import loads as loads
    from .container import Limits as Limits
    from .convert import MetaConverter as MetaConverter
    from .desc import MetaStorageDesc as MetaStorageDesc
    from .desc import MetaTensorDesc as MetaTensorDesc
    from .desc_env import ShapeEnvDesc as ShapeEnvDesc
    from .describe import (
        MetaTensorDescriber as MetaTensorDescriber,
    )
    from .describe import (
        describe_tensor as describe_tensor,
    )
    from .diagnosis import Diagnosis as Diagnosis
    from .diagnosis import doctor as doctor
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
    from .frame import Capture as Capture
    from .frame import Instance as Instance
    from .handoffs import handoff as handoff
    from .replay import insert_guards as insert_guards
    from .replay import learn as learn
    from .replay import strip_guards as strip_guards
    from .repropagations import repropagate as repropagate
    from .retraces import retrace as retrace
    from .runtime_asserts import insert_runtime_asserts as insert_runtime_asserts
    from .shape_env import restore as restore
    from .shape_env import snapshot as snapshot
    from .subclasses import register_subclass as register_subclass
    from .trace_log import from_trace_log as from_trace_log
    from .transfer import refakeify as refakeify
    from .transplants import transplant as transplant
    from .versions import TorchVersionWarning as TorchVersionWarning

__version__ = "0.1.0"

_HOME = {
    "Capture": "frame",
    "CaptureError": "errors",
    "Checkpoint": "checkpoints",
    "ConvertError": "errors",
    "Diagnosis": "diagnosis",
    "FakeifyError": "errors",
    "FormatError": "errors",
    "Instance": "frame",
    "LimitError": "errors",
    "Limits": "container",
    "MetaConverter": "convert",
    "MetaStorageDesc": "desc",
    "MetaTensorDesc": "desc",
    "MetaTensorDescriber": "describe",
    "ScriptError": "errors",
    "ShapeEnvDesc": "desc_env",
    "ShapeEnvError": "errors",
    "TorchVersionWarning": "versions",
    "UnknownNameError": "errors",
    "UnsupportedTensorError": "errors",
    "UnsupportedValueError": "errors",
    "VersionError": "errors",
    "WriteError": "errors",
    "capture": "captures",
    "check_bindings": "binding_checks",
    "checkpoint": "checkpoints",
    "describe_tensor": "describe",
    "doctor": "diagnosis",
    "dumps": "codec",
    "from_trace_log": "trace_log",
    "handoff": "handoffs",
    "insert_guards": "replay",
    "insert_runtime_asserts": "runtime_asserts",
    "learn": "replay",
    "loads": "codec",
    "record": "backend",
    "refakeify": "transfer",
    "register_subclass": "subclasses",
    "repropagate": "repropagations",
    "restore": "shape_env",
    "retrace": "retraces",
    "snapshot": "shape_env",
    "strip_guards": "replay",
    "transplant": "transplants",
}

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


def __getattr__(name: str) -> Any:
    if name in ("dropin", "frontend"):  # modules, for `torch_fakeify.dropin.install()`
        return import_module(f"{__name__}.{name}")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return list(__all__)


def _install_dropin() -> None:
    """Where torch is refused or missing, a warning: what needs no torch is to work all the same."""
    try:
        import_module(f"{__name__}.dropin").install()
    except (import_module(f"{__name__}.errors").VersionError, ImportError) as error:
        import warnings

        warnings.warn(f"TORCH_FAKEIFY_DROPIN: it is not installed: {error}", stacklevel=2)


if os.environ.get("TORCH_FAKEIFY_DROPIN", "") not in ("", "0"):
    _install_dropin()
