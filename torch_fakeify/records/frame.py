"""The records of a captured frame: graph, inputs, shape environment, modes, failure."""

from __future__ import annotations

from typing import Literal

from .graph import GraphModuleDesc
from .shape_env import ShapeEnvDesc
from .tensor import MetaTensorDesc, Record, SourceDesc, StackDesc, SymDesc, Value


class InputDesc(Record, frozen=True, kw_only=True):
    """One graph input: a tensor, a symbolic scalar or a constant, in placeholder order."""

    name: str
    """The placeholder's name."""
    tensor: MetaTensorDesc | None = None
    sym: SymDesc | None = None
    value: Value = None
    """Only of an input that is neither tensor nor symbolic scalar."""
    source: SourceDesc | None = None


class AutocastDesc(Record, frozen=True, kw_only=True):
    """Autocast state of one device type."""

    device_type: str
    enabled: bool
    dtype: str


class ModesDesc(Record, frozen=True, kw_only=True):
    """Global state of torch that a backend reads while it compiles."""

    grad_enabled: bool = True
    inference_mode: bool = False
    autocast: tuple[AutocastDesc, ...] = ()
    """Only of device types whose state is not the default."""
    autocast_cache_enabled: bool = True
    deterministic: bool = False
    deterministic_warn_only: bool = False
    default_dtype: str = "float32"
    float32_matmul_precision: str = "highest"


class FakeModeDesc(Record, frozen=True, kw_only=True):
    """Settings of the ``FakeTensorMode`` that an instance gets."""

    allow_fallback_kernels: bool = True
    allow_non_fake_inputs: bool = False
    export: bool = False
    static_shapes: bool | None = None
    """Whether ``from_tensor`` makes no symbols; ``None`` for torch's own rule, by the ``ShapeEnv``."""
    allow_scalar_outputs: bool = False
    allow_meta: bool = True
    allow_unsafe_data_ptr_access: bool = False
    nt_tensor_id_initial_count: int | None = None
    """The number of the first nested int of an intermediate, in this trace and in a retrace.

    A retrace identifies the ragged sizes of intermediates by it.
    ``None`` if the ``ShapeEnv`` of the frame has no nested ints.
    """
    nt_tensor_id_counter: int | None = None
    """The number of the next nested int; at least the first."""


class FailureDesc(Record, frozen=True, kw_only=True):
    """How a backend failed to compile a frame: the exception, or how its process ended."""

    type: str
    """Qualified name of the exception's class; for a crash the signal (``SIGSEGV``) or the exit status
    (``exit status 3``); empty for a hang and for a lack of memory."""
    message: str
    stack: StackDesc | None = None
    backend: str | None = None
    kind: Literal["raises", "crashes", "hangs", "out of memory"] = "raises"
    """An exception, the death of the process, a timeout, or an exceeded memory limit."""


class ProcessGroupDesc(Record, frozen=True, kw_only=True):
    """A process group of ``torch.distributed`` that a frame communicates in."""

    name: str
    """The name by which collectives and device meshes refer to it."""
    ranks: tuple[int, ...] = ()
    """The ranks of its members in the world; empty for all ranks in order."""


class WorldDesc(Record, frozen=True, kw_only=True):
    """The world of ``torch.distributed`` and the rank that a frame was recorded in."""

    rank: int
    size: int
    """Number of processes."""
    groups: tuple[ProcessGroupDesc, ...] = ()
    """The groups that the frame names."""


class CaptureDesc(Record, frozen=True, kw_only=True):
    """A frame: all that is needed to compile it again, without code, weights or data."""

    graph: GraphModuleDesc
    inputs: tuple[InputDesc, ...]
    modes: ModesDesc
    fake_mode: FakeModeDesc
    parameter_sources: tuple[tuple[str, SourceDesc], ...] = ()
    """Sources of the tensors that the graph holds itself, by attribute name."""
    shape_env: ShapeEnvDesc | None = None
    failure: FailureDesc | None = None
    torch_version: str = ""
    backend: str | None = None
    """Name of the backend that the frame was recorded with."""
    frame: str | None = None
    """Name of the user's function."""
    world: WorldDesc | None = None
    """The process groups that the frame needs; ``None`` if it names none."""
    state: Literal["not finished", "not compiled"] | None = None
    """``not finished``: a backend was called and has not returned; ``not compiled``: none was called.

    ``None`` if the backend has returned or failed. `capture_file.with_state` needs it to be the last field.
    """
