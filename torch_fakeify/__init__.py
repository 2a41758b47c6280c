"""The boundary between real and fake tensors, as data.

Names are imported on first use: ``import torch_fakeify`` imports neither torch nor sympy.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "Capture": "frame",
    "CaptureError": "errors",
    "ConvertError": "errors",
    "FakeifyError": "errors",
    "FormatError": "errors",
    "Instance": "frame",
    "LimitError": "errors",
    "MetaConverter": "convert",
    "MetaStorageDesc": "desc",
    "MetaTensorDesc": "desc",
    "MetaTensorDescriber": "describe",
    "ScriptError": "errors",
    "ShapeEnvDesc": "desc_env",
    "ShapeEnvError": "errors",
    "UnknownNameError": "errors",
    "UnsupportedTensorError": "errors",
    "UnsupportedValueError": "errors",
    "VersionError": "errors",
    "WriteError": "errors",
    "capture": "frame",
    "describe_tensor": "describe",
    "dumps": "codec",
    "loads": "codec",
    "record": "backend",
    "restore": "shape_env",
    "snapshot": "shape_env",
}

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return [*__all__]
