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
    from torch_fakeify.discharge.installing import entailment as entailment
    from torch_fakeify.discharge.known_facts import KnownFact as KnownFact
    from torch_fakeify.discharge.questions import entails as entails
    from torch_fakeify.discharge.questions import why as why
    from torch_fakeify.encoding.subclasses import register_subclass as register_subclass
    from torch_fakeify.fake_kernels.kernels import FakeKernel as FakeKernel
    from torch_fakeify.frames.captures import Capture as Capture
    from torch_fakeify.frames.dynamo_recorder import Recording as Recording
    from torch_fakeify.frames.dynamo_recorder import recording as recording
    from torch_fakeify.frames.instances import Instance as Instance
    from torch_fakeify.frames.notes import RecordWarning as RecordWarning
    from torch_fakeify.frames.notes import SettingsWarning as SettingsWarning
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
    from torch_fakeify.shape_env.restoring import restore as restore
    from torch_fakeify.shape_env.rollback import Checkpoint as Checkpoint
    from torch_fakeify.shape_env.rollback import checkpoint as checkpoint
    from torch_fakeify.shape_env.snapshot import snapshot as snapshot
    from torch_fakeify.tools.checking_fakes import FakeDifference as FakeDifference
    from torch_fakeify.tools.checking_fakes import FakesReport as FakesReport
    from torch_fakeify.tools.checking_fakes import check_fakes as check_fakes
    from torch_fakeify.tools.diffing import FrameDiff as FrameDiff
    from torch_fakeify.tools.diffing import diff as diff
    from torch_fakeify.tools.doctor import Diagnosis as Diagnosis
    from torch_fakeify.tools.doctor import doctor as doctor
    from torch_fakeify.tools.fuzzing import FuzzReport as FuzzReport
    from torch_fakeify.tools.fuzzing import fuzz as fuzz
    from torch_fakeify.tools.infer_fakes import InferredFakes as InferredFakes
    from torch_fakeify.tools.infer_fakes import infer_fake as infer_fake
    from torch_fakeify.tools.infer_fakes import inferring_fakes as inferring_fakes
    from torch_fakeify.tools.minify.results import MinifyReport as MinifyReport
    from torch_fakeify.tools.minify.search import minify as minify
    from torch_fakeify.tools.replaying import ReplayReport as ReplayReport
    from torch_fakeify.tools.replaying import replay_capture as replay_capture
    from torch_fakeify.tools.reporting import WrittenReport as WrittenReport
    from torch_fakeify.tools.reporting import report as report
    from torch_fakeify.tools.run_script import ScriptReport as ScriptReport
    from torch_fakeify.tools.run_script import run as run
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
    from .versions import TorchVersionWarning as TorchVersionWarning
    from .errors import (  # isort: skip - it would be a statement for each name
        CaptureError as CaptureError,
        ConvertError as ConvertError,
        FakeifyError as FakeifyError,
        FakeKernelError as FakeKernelError,
        FormatError as FormatError,
        LimitError as LimitError,
        MissingFileError as MissingFileError,
        MissingScriptError as MissingScriptError,
        NotFailingError as NotFailingError,
        ScriptError as ScriptError,
        ShapeEnvError as ShapeEnvError,
        StubError as StubError,
        UnknownNameError as UnknownNameError,
        UnsupportedTensorError as UnsupportedTensorError,
        UnsupportedValueError as UnsupportedValueError,
        VersionError as VersionError,
        WriteError as WriteError,
    )

from ._version import __version__ as __version__

_HOME = {
    "Capture": "frames.captures",
    "CaptureError": "errors",
    "Checkpoint": "shape_env.rollback",
    "ConvertError": "errors",
    "Diagnosis": "tools.doctor",
    "FakeDifference": "tools.checking_fakes",
    "FakeKernel": "fake_kernels.kernels",
    "FakeKernelError": "errors",
    "FakeifyError": "errors",
    "FakesReport": "tools.checking_fakes",
    "FormatError": "errors",
    "FrameDiff": "tools.diffing",
    "FuzzReport": "tools.fuzzing",
    "InferredFakes": "tools.infer_fakes",
    "Instance": "frames.instances",
    "KnownFact": "discharge.known_facts",
    "LimitError": "errors",
    "Limits": "serialization.container",
    "MetaConverter": "convert.converter",
    "MetaStorageDesc": "records.tensor",
    "MetaTensorDesc": "records.tensor",
    "MetaTensorDescriber": "describe.describer",
    "MinifyReport": "tools.minify.results",
    "MissingFileError": "errors",
    "MissingScriptError": "errors",
    "NotFailingError": "errors",
    "RecordWarning": "frames.notes",
    "Recording": "frames.dynamo_recorder",
    "ReplayReport": "tools.replaying",
    "ScriptError": "errors",
    "ScriptReport": "tools.run_script",
    "SettingsWarning": "frames.notes",
    "ShapeEnvDesc": "records.shape_env",
    "ShapeEnvError": "errors",
    "StubError": "errors",
    "TorchVersionWarning": "versions",
    "UnknownNameError": "errors",
    "UnsupportedTensorError": "errors",
    "UnsupportedValueError": "errors",
    "VersionError": "errors",
    "WriteError": "errors",
    "WrittenReport": "tools.reporting",
    "capture": "frames.recording",
    "check_bindings": "unbacked.binding_checks",
    "check_fakes": "tools.checking_fakes",
    "checkpoint": "shape_env.rollback",
    "describe_tensor": "describe.describer",
    "diff": "tools.diffing",
    "doctor": "tools.doctor",
    "dumps": "serialization.document",
    "entailment": "discharge.installing",
    "entails": "discharge.questions",
    "from_trace_log": "frames.trace_logs.log",
    "fuzz": "tools.fuzzing",
    "handoff": "transfer.dynamo_handoff",
    "infer_fake": "tools.infer_fakes",
    "inferring_fakes": "tools.infer_fakes",
    "insert_guards": "replay.guard_nodes",
    "insert_runtime_asserts": "replay.assert_nodes",
    "learn": "replay.guard_nodes",
    "loads": "serialization.document",
    "minify": "tools.minify.search",
    "record": "frames.record_backend",
    "recording": "frames.dynamo_recorder",
    "refakeify": "transfer.refakeifier",
    "register_subclass": "encoding.subclasses",
    "replay_capture": "tools.replaying",
    "report": "tools.reporting",
    "repropagate": "unbacked.repropagation",
    "restore": "shape_env.restoring",
    "retrace": "unbacked.retracing",
    "run": "tools.run_script",
    "snapshot": "shape_env.snapshot",
    "strip_guards": "replay.guard_nodes",
    "transplant": "unbacked.transplanting",
    "why": "discharge.questions",
}

_MODULES = frozenset({"cli", "corpus", "dropin", "errors", "frontend", "pytest_plugin"})
"""Modules that can be used as attributes without an import."""

__all__: list[str]

if not TYPE_CHECKING:  # type checkers read the imports above, and would accept any name
    __all__ = ["__version__", *_HOME]

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        home = _HOME.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{home}"), name)

    def __dir__() -> list[str]:
        return [*__all__, *_MODULES]


def _install_requested() -> None:
    """Install what the environment asks for; warn if torch is refused or missing, as the rest works."""
    for variable, module, attribute in (
        ("TORCH_FAKEIFY_DROPIN", "dropin", None),
        ("TORCH_FAKEIFY_ENTAILMENT", "discharge.installing", "entailment"),
    ):
        if os.environ.get(variable, "") in ("", "0"):
            continue
        try:
            found: Any = import_module(f"{__name__}.{module}")
            (found if attribute is None else getattr(found, attribute)).install()
        except (import_module(f"{__name__}.errors").VersionError, ImportError) as error:
            import warnings

            warnings.warn(f"{variable}: it is not installed: {error}", stacklevel=2)


_install_requested()
