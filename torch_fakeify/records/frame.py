"""The records of a captured frame: graph, inputs, shape environment, modes, failure."""

from __future__ import annotations

from typing import Literal, TypeAlias

from .fake_kernel import FakeKernelDesc
from .graph import CallingDesc, GraphModuleDesc
from .record import Record
from .shape_env import GuardDesc, ReplacementDesc, RuntimeAssertDesc, ShapeEnvDesc, SymbolDesc
from .tensor import ExprDesc, MetaTensorDesc, SourceDesc, StackDesc, SymDesc, Value

Constants: TypeAlias = Literal["none", "small"]
"""Whether a capture has the data of small tensors of its graph."""
Paths: TypeAlias = Literal["short", "full"]
"""Whether the absolute paths in a capture are shortened."""

ConfigModule: TypeAlias = Literal[
    "torch._dynamo.config",
    "torch._inductor.config",
    "torch._functorch.config",
    "torch.fx.experimental._config",
]
"""Torch's modules of compiler settings."""


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
    parts: tuple[tuple[int, ...], ...] = ()
    """The ranks of this group and of those that other ranks have in its place, in torch's order.

    Such groups are along one dim of a mesh. Empty if the group has all ranks, or if only it is known.
    """


class WorldDesc(Record, frozen=True, kw_only=True):
    """The world of ``torch.distributed`` that a frame was recorded in, as one of its ranks has it."""

    rank: int
    """The lowest rank that has the frame; the writer's rank if the frame is of that rank alone."""
    size: int
    """Number of processes."""
    groups: tuple[ProcessGroupDesc, ...] = ()
    """The groups that the frame names, as the rank has them; sorted by name."""
    rank_calls: tuple[str, ...] = ()
    """The functions by which the program asks for its rank: the graph may have numbers of the rank."""


class SettingDesc(Record, frozen=True, kw_only=True):
    """A compiler setting that was not torch's default."""

    module: ConfigModule
    name: str
    """Its name in the module, such as ``triton.cudagraphs``."""
    value: Value = None
    """Plain data: a scalar, or lists, tuples and dictionaries of scalars."""
    option: bool = False
    """Whether ``torch.compile`` was given it, as part of ``mode`` or ``options``; else it was set globally."""
    redacted: bool = False
    """Whether private parts of the value were removed; such a value is not set again."""


class DeviceInfoDesc(Record, frozen=True, kw_only=True):
    """A device that the machine had."""

    device: str
    """The name in torch, such as ``cuda:0``."""
    name: str = ""
    """The name of the product."""
    capability: str = ""
    """The compute capability, or the vector instructions of a CPU."""


class SurroundingsDesc(Record, frozen=True, kw_only=True):
    """What decides a compilation besides the frame: settings, environment, versions, devices."""

    settings: tuple[SettingDesc, ...] = ()
    """In the order of torch's modules and of their settings; the options of ``torch.compile`` last."""
    left_out: tuple[str, ...] = ()
    """Dotted names of settings and options whose values are not plain data, such as functions."""
    mode: str | None = None
    """The ``mode`` of ``torch.compile``, for a backend other than inductor."""
    options: tuple[tuple[str, Value], ...] = ()
    """The ``options`` of ``torch.compile``, for a backend other than inductor."""
    environment: tuple[tuple[str, str], ...] = ()
    """The environment variables that torch or triton read for compiling, sorted by name."""
    python: str = ""
    """The version of Python."""
    system: str = ""
    """The operating system."""
    machine: str = ""
    """The type of machine, such as ``x86_64``."""
    devices: tuple[DeviceInfoDesc, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    """The versions of torch, triton and numpy."""
    packages: tuple[tuple[str, str], ...] = ()
    """Names and versions of the distributions that registered operators of the graph or the backend."""


class OperatorDesc(Record, frozen=True, kw_only=True):
    """An operator outside of torch: what a stub of it has."""

    schema: str
    """Its schema as torch prints it, such as ``npu::twice(Tensor x) -> Tensor``."""
    tags: tuple[str, ...] = ()
    """The names of its ``torch.Tag``, sorted."""
    autograd: Literal["formula", "refused", "composite"] | None = None
    """Its gradient: by a formula of its own, refused, of the operators that it calls, or ``None`` without a kernel."""
    fake: FakeKernelDesc | None = None
    """Its fake kernel, if it was inferred."""

    @property
    def operator(self) -> str:
        """Its name without the overload, ``namespace.name``."""
        namespace, _, name = self.schema.partition("(")[0].partition("::")
        return f"{namespace}.{name.partition('.')[0]}"


class AotGraphDesc(Record, frozen=True, kw_only=True):
    """Which graph of AOTAutograd a frame is; its graph is of ATen operators and runs without autograd."""

    kind: Literal["joint", "forward", "backward", "inference"]
    """``inference`` of a function without a backward; ``joint``: forward and backward, not yet partitioned."""
    forward_outputs: int = 0
    """Only of a joint graph: how many of its outputs are those of the forward graph, the first ones."""


class ExportArgumentDesc(Record, frozen=True, kw_only=True):
    """An ``ArgumentSpec`` of ``torch.export``: an input or output of a program, or of a module in it."""

    kind: Literal["tensor", "int", "float", "bool", "constant", "token"]
    """``int``, ``float`` and ``bool`` are symbolic numbers."""
    name: str
    """Of its node."""
    value: Value = None
    """Of a constant."""


class ExportInputDesc(Record, frozen=True, kw_only=True):
    """An ``InputSpec`` of ``torch.export``."""

    kind: Literal["USER_INPUT", "PARAMETER", "BUFFER", "CONSTANT_TENSOR", "TOKEN"]
    argument: ExportArgumentDesc
    target: str | None = None
    """The dotted name of a parameter, buffer or constant."""
    persistent: bool | None = None
    """Whether a buffer is in the ``state_dict``."""


class ExportOutputDesc(Record, frozen=True, kw_only=True):
    """An ``OutputSpec`` of ``torch.export``."""

    kind: Literal[
        "USER_OUTPUT",
        "LOSS_OUTPUT",
        "BUFFER_MUTATION",
        "PARAMETER_MUTATION",
        "GRADIENT_TO_PARAMETER",
        "GRADIENT_TO_USER_INPUT",
        "USER_INPUT_MUTATION",
        "TOKEN",
    ]
    argument: ExportArgumentDesc
    target: str | None = None
    """The dotted name, or the name of the user's input, that has a new value or a gradient."""


class ExportModuleDesc(Record, frozen=True, kw_only=True):
    """A ``ModuleCallEntry`` of ``torch.export``: a module of the program, or, without a name, all of it."""

    name: str
    has_signature: bool = False
    inputs: tuple[ExportArgumentDesc, ...] = ()
    outputs: tuple[ExportArgumentDesc, ...] = ()
    calling: CallingDesc | None = None
    """The structure of its arguments and of its result; ``None`` if that has no record."""


class ExportRangeDesc(Record, frozen=True, kw_only=True):
    """The range of a size of an exported program, both ends included."""

    expr: ExprDesc
    lower: ExprDesc
    upper: ExprDesc


class ExportDesc(Record, frozen=True, kw_only=True):
    """What an ``ExportedProgram`` has beside its graph."""

    inputs: tuple[ExportInputDesc, ...]
    outputs: tuple[ExportOutputDesc, ...]
    modules: tuple[ExportModuleDesc, ...] = ()
    ranges: tuple[ExportRangeDesc, ...] = ()
    """``range_constraints``."""
    dialects: tuple[str, ...] = ()
    """The dialects of its verifiers, such as ``TRAINING`` and ``ATEN``."""
    constants: tuple[tuple[str, bytes], ...] = ()
    """Optional data of small constants, by target: elements in row-major order, little-endian."""


class CaptureDesc(Record, frozen=True, kw_only=True):
    """A frame: all that is needed to compile it again, without code, weights or data."""

    graph: GraphModuleDesc
    inputs: tuple[InputDesc, ...]
    modes: ModesDesc
    fake_mode: FakeModeDesc
    parameter_sources: tuple[tuple[str, SourceDesc], ...] = ()
    """Sources of the tensors that the graph holds itself, by attribute name."""
    same_objects: tuple[tuple[SourceDesc, SourceDesc], ...] = ()
    """Pairs of sources at which one object was found: the graph was traced for that.

    Of an exported program weights that modules share, which are several tensors once it was loaded.
    """
    shape_env: ShapeEnvDesc | None = None
    failure: FailureDesc | None = None
    torch_version: str = ""
    backend: str | None = None
    """Name of the backend that the frame was recorded with."""
    backend_place: str | None = None
    """Where a backend outside of torch is defined: ``module:qualname``, or ``module`` if it has no name there.

    Nothing imports a module because a file names it: it is for error messages.
    """
    operator_modules: tuple[tuple[str, str], ...] = ()
    """The operators outside of torch that the graph calls, as ``namespace.name``, with the module of each.

    The module is the one that registered the operator, as far as torch records it; for error messages.
    """
    operators: tuple[OperatorDesc, ...] = ()
    """Every overload of these operators, for stubs where they are not registered."""
    aot: AotGraphDesc | None = None
    """Which graph of AOTAutograd it is; ``None`` for a graph that a Dynamo backend gets."""
    export: ExportDesc | None = None
    """What else the ``ExportedProgram`` has whose graph it is; ``None`` for all other graphs."""
    frame: str | None = None
    """Name of the user's function."""
    world: WorldDesc | None = None
    """The process groups that the frame needs; ``None`` if it names none."""
    surroundings: SurroundingsDesc | None = None
    """What else decided the compilation; ``None`` in files of earlier releases."""
    compile_seconds: float | None = None
    """How long the backend took; only of frames that a recorder compiled."""
    state: Literal["not finished", "not compiled"] | None = None
    """``not finished``: a backend was called and has not returned; ``not compiled``: none was called.

    ``None`` if the backend has returned or failed. `capture_file.with_result` needs it and the time to be the last fields.
    """

    @property
    def backend_name(self) -> str:
        """The name of the recorded backend; that of torch's default if none is recorded."""
        return self.backend or "inductor"

    @property
    def symbols(self) -> tuple[SymbolDesc, ...]:
        """The symbols of the shape environment; none without one."""
        return () if self.shape_env is None else self.shape_env.symbols

    @property
    def guards(self) -> tuple[GuardDesc, ...]:
        """The guards of the shape environment; none without one."""
        return () if self.shape_env is None else self.shape_env.guards

    @property
    def replacements(self) -> tuple[ReplacementDesc, ...]:
        """The replacements of the shape environment; none without one."""
        return () if self.shape_env is None else self.shape_env.replacements

    @property
    def runtime_asserts(self) -> tuple[RuntimeAssertDesc, ...]:
        """The runtime asserts of the shape environment; none without one."""
        return () if self.shape_env is None else self.shape_env.runtime_asserts
