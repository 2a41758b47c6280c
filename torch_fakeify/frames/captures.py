"""One frame of ``torch.compile``: its record, and the graph and inputs rebuilt from the record alone.

`recording.capture` makes the record of a frame.
"""

from __future__ import annotations

import traceback
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

from torch_fakeify.compat import backends, torch_dynamo, torch_symbols
from torch_fakeify.convert.converter import MetaConverter
from torch_fakeify.convert.validate import where_of
from torch_fakeify.encoding.contexts import Contexts
from torch_fakeify.encoding.exprs import check_sym, decode_expr
from torch_fakeify.encoding.fake_modes import make_fake_mode
from torch_fakeify.encoding.meshes import Meshes
from torch_fakeify.encoding.modes import apply_modes
from torch_fakeify.encoding.opaque_values import decode_constant
from torch_fakeify.encoding.sources import DecodeMemo, decode_source, decode_sources
from torch_fakeify.errors import CaptureError, UnknownNameError, wrap_torch_errors
from torch_fakeify.frames.graph.codec import decode_graph
from torch_fakeify.records.devices import DeviceMap
from torch_fakeify.records.frame import CaptureDesc, FailureDesc, InputDesc
from torch_fakeify.records.graph import GraphModuleDesc, NodeDesc
from torch_fakeify.records.metadata_keys import losses_of
from torch_fakeify.records.redact_paths import short_message, short_paths
from torch_fakeify.records.rename import rename_symbols
from torch_fakeify.render.text import clip, escape
from torch_fakeify.serialization.capture_file import (
    check_version,
    encode_with_short_paths,
    read_file,
    with_state,
    write_capture,
)
from torch_fakeify.serialization.container import VERSION
from torch_fakeify.shape_env.snapshot import encode_stack, restore
from torch_fakeify.versions import is_newer, warn_of_other_torch, written_by

from .process_groups import check_world, fake_world

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Set
    from pathlib import Path

    from torch_fakeify.compat.backends import Compiled
    from torch_fakeify.records.metadata_keys import Loss
    from torch_fakeify.records.tensor import MetaTensorDesc, SourceDesc, SymDesc
    from torch_fakeify.serialization.container import Limits


class Capture:
    """A captured frame; ``desc`` is its whole state.

    Args:
        desc: the record.
        producer: the release that wrote the file; empty if the capture was not read from a file.
        paths: ``"short"`` if absolute paths in the record must still be shortened, see ``desc``.

    Example:
        >>> capture = tfk.capture(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(2)])
        >>> size = capture.save("frame.fkf")
        >>> tfk.Capture.load("frame.fkf").fingerprint() == capture.fingerprint()
        True
        >>> capture.compile("eager")(torch.zeros(2))
        tensor([0., 0.])
    """

    def __init__(
        self,
        desc: CaptureDesc,
        *,
        producer: str = "",
        paths: Literal["short", "full"] = "full",
    ) -> None:
        self._desc = desc
        self._paths: Literal["short", "full"] = paths
        self._members: dict[str, bytes] | None = None
        """The serialized members of the file, cached for ``save``; ``None`` if not computed."""
        self._on_cpu: torch.fx.GraphModule | None = None
        """The graph on the CPU, cached for ``materialize``."""
        self.producer = producer

    @property
    def desc(self) -> CaptureDesc:
        """The record, with absolute paths shortened unless ``paths="full"`` was requested.

        The first access of a new capture serializes the record, to find the paths in its text, and
        caches the bytes for `save`.
        """
        if self._paths == "short":  # the first access
            self._desc, self._members = encode_with_short_paths(self._desc)
            self._paths = "full"
        return self._desc

    def __repr__(self) -> str:
        desc = self.desc
        guards = 0 if desc.shape_env is None else len(desc.shape_env.guards)
        return (
            f"<Capture {escape(clip(desc.frame or 'frame', 80))}: {len(desc.graph.nodes)} nodes, "
            f"{len(desc.inputs)} inputs, {guards} guards>"
        )

    def save(
        self, path: str | Path, *, version: int = VERSION, limits: Limits | None = None
    ) -> int:
        """Write the capture to a file, whole or not at all, and return its size in bytes.

        Args:
            path: the file.
            version: format version; older ones are for older readers.
            limits: the limits of the reader; a file that `load` would refuse with them is not
                written.

        Raises:
            WriteError: the file cannot be written, the record does not fit the version, or the file
                would exceed the limits; an existing file is unchanged.
        """
        check_version(version)
        desc, members = self.desc, self._members
        self._members = None  # free the memory
        return write_capture(path, desc, version=version, members=members, limits=limits)

    @classmethod
    def load(cls, path: str | Path, *, limits: Limits | None = None) -> Capture:
        """Read a capture. Runs no code of the file.

        Warns with ``TorchVersionWarning`` if it was recorded with another version of torch.

        Args:
            path: the file.
            limits: limits on its content; by default derived from its size.

        Raises:
            FormatError: not a capture, truncated, or ill-typed; subclasses are ``VersionError``,
                ``LimitError`` and ``UnknownNameError``.
        """
        desc, producer = read_file(path, limits=limits)
        warn_of_other_torch(desc.torch_version, torch_dynamo.torch_version(), stacklevel=2)
        return cls(desc, producer=producer)

    @property
    def losses(self) -> tuple[Loss, ...]:
        """Metadata of the graph that the capture lacks, with counts by graph, key and reason.

        Plain data is carried under any key: texts, numbers, torch's constants, and lists, tuples and
        dicts of these. Not counted is metadata that torch recomputes or that belongs to one process
        (``metadata_keys.DROPPED``).
        """
        return losses_of(self.desc.graph)

    def with_failure(
        self,
        error: BaseException,
        *,
        backend: str | None,
        paths: Literal["short", "full"] = "short",
    ) -> Capture:
        """Return a copy with the exception of its backend, as text.

        Args:
            error: the exception.
            backend: the backend's name.
            paths: ``"full"`` leaves message and file names unchanged; ``"short"`` shortens absolute
                paths and removes the names of user and host and secrets of the environment.
        """
        kind = type(error)
        failure = FailureDesc(
            type=f"{kind.__module__}.{kind.__qualname__}",
            message=str(error) if paths == "full" else short_message(str(error)),
            stack=encode_stack(traceback.extract_tb(error.__traceback__)),
            backend=backend,
        )
        if paths == "short":
            failure = short_paths(failure)
        return Capture(
            msgspec.structs.replace(self.desc, failure=failure, backend=backend, state=None)
        )

    def with_backend(self, backend: str | None) -> Capture:
        """Return a copy with the name of its backend."""
        desc = msgspec.structs.replace(self._desc, backend=backend)
        return Capture(desc, paths=self._paths)

    def with_state(self, state: Literal["not finished", "not compiled"] | None) -> Capture:
        """Return a copy with another `CaptureDesc.state`; ``None`` means compiled."""
        desc = self.desc
        made = Capture(msgspec.structs.replace(desc, state=state), producer=self.producer)
        if self._members is not None:
            made._members = with_state(self._members, state, was=desc.state)
        return made

    def instantiate(
        self,
        device: str | torch.device | Mapping[str, str] | None = None,
        *,
        fresh: bool = False,
    ) -> Instance:
        """Rebuild the frame: a new ``FakeTensorMode`` and a new ``ShapeEnv``.

        Args:
            device: new device of the tensors on an accelerator, or of all tensors if none is; or a
                mapping from recorded to new device names. ``None`` uses the recorded devices, even
                if this machine does not have them.
            fresh: by default the ``ShapeEnv`` has the recorded state. A fresh one has new symbols for
                the recorded sources and derives the recorded facts by torch's rules, see
                `fresh_env`. Its guards are equivalent, and may be fewer.

        Raises:
            ConvertError: a tensor cannot be rebuilt here.
            ShapeEnvError: the recorded facts contradict one another (``fresh``).
            UnknownNameError: an operator, function or class is unknown or not allowed here.
        """
        try:
            return Instance(self.desc, DeviceMap.parse(device, self.desc), fresh=fresh)
        except UnknownNameError as error:
            self._name_writer(error)
            raise

    def _name_writer(self, error: UnknownNameError) -> None:
        """Add the writer of the file to the error, unless this release wrote it."""
        recorded, running = self.desc.torch_version, torch_dynamo.torch_version()
        if not is_newer(self.producer) and recorded in ("", running):
            return
        writer = f"{written_by(self.producer, recorded)} wrote the file, this is torch {running}"
        error.fix = f"{(error.fix or 'Use the versions that wrote it').rstrip('.')}: {writer}"

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        *,
        device: str | torch.device | Mapping[str, str] | None = None,
    ) -> Compiled:
        """Instantiate the frame and compile it with a Dynamo backend, by name or callable.

        Returns:
            What the backend returned: a callable that takes the graph's inputs in order.
        """
        return self.instantiate(device).compile(backend)

    @contextmanager
    def fake_world(self) -> Generator[None, None, None]:
        """Initialize ``torch.distributed`` with a fake world, as a frame with collectives or meshes needs it.

        Process groups of torch's ``fake`` backend have the recorded rank, world size and groups; their
        collectives copy the data of this rank. Does nothing for a frame without process groups, or if
        this process has them already.

        Raises:
            CaptureError: this process has other process groups than the frame needs.
        """
        with fake_world(self.desc):
            yield

    def fingerprint(self) -> str:
        """A content hash in hexadecimal, independent of symbol names, ids, stacks and policies."""
        from torch_fakeify.records.fingerprint import (
            fingerprint,  # lazy: replay does not need it
        )

        return fingerprint(self.desc)

    def materialize(
        self,
        seed: int = 0,
        *,
        sizes: Mapping[str, int] | None = None,
        device: str | torch.device | None = None,
        max_bytes: int | None = None,
    ) -> list[Any]:
        """Real inputs that respect dtypes, strides, aliasing and guards.

        Args:
            seed: of the generator that fills floating point data; integers are small and
                non-negative, so that they are valid indices.
            sizes: values for symbols, by name; the others have their hints.
            device: where to make them; ``None`` means the recorded device.
            max_bytes: total size of the inputs; by default the memory of this machine. Making them
                temporarily takes a few times more.

        Raises:
            CaptureError: a size violates a guard or a range, a device is missing, or the inputs exceed
                ``max_bytes``.
        """
        from torch_fakeify.frames.inputs.materializing import materialize

        def rebuild() -> torch.fx.GraphModule:
            if self._on_cpu is None:
                self._on_cpu = self.instantiate("cpu").gm
            return self._on_cpu

        return materialize(
            self.desc,
            seed=seed,
            sizes=sizes,
            device=device,
            max_bytes=max_bytes,
            rebuild=rebuild,
        )


class Instance:
    """A frame rebuilt from its record.

    Attributes:
        gm: the graph.
        inputs: fake tensors, symbolic scalars and constants, one for each placeholder.
        fake_mode: the ``FakeTensorMode`` of the inputs and the graph's values.
        specialized: float inputs, by placeholder name, whose recorded value is a constant in the
            graph because the backend does not support them as symbols.

    Example:
        >>> capture = tfk.capture(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(2)])
        >>> instance = capture.instantiate()
        >>> type(instance.inputs[0]).__name__, tuple(instance.inputs[0].shape)
        ('FakeTensor', (2,))
    """

    gm: torch.fx.GraphModule
    inputs: list[Any]

    def __init__(self, desc: CaptureDesc, retarget: DeviceMap, *, fresh: bool = False) -> None:
        self._fresh = fresh
        self._build(desc, retarget)

    def _build(self, desc: CaptureDesc, retarget: DeviceMap) -> None:
        self.desc = desc
        self.specialized: dict[str, float] = {}
        self._sources = DecodeMemo()
        self._contexts = Contexts(self._sources)
        shape_env, original, fresh_env = None, None, None
        if desc.shape_env is not None and self._fresh:
            original = Instance(_without_operations(desc), DeviceMap({}))
            from torch_fakeify.transfer.fresh_env import (
                FreshEnv,  # lazy: replay does not need it
            )

            with wrap_torch_errors("$.shape_env"):
                fresh_env = FreshEnv(original.shape_env)
            shape_env = fresh_env.env
            desc = rename_symbols(msgspec.structs.replace(desc, shape_env=None), fresh_env.names)
        elif desc.shape_env is not None:
            with wrap_torch_errors("$.shape_env"):
                shape_env = restore(desc.shape_env)
        self.fake_mode = make_fake_mode(desc.fake_mode, shape_env)
        self._meshes = Meshes(retarget.device if retarget else str)
        self._converter = MetaConverter(
            self.fake_mode,
            symbols="keep",
            keep_nested_ints=True,
            sources=self._sources,
            meshes=self._meshes,
        )
        self._retarget, self._moves = retarget, bool(retarget)
        self._decode_sources(desc)
        # Torch guards on sizes when a tensor is made; the frame has all its guards already.
        with nullcontext() if shape_env is None else shape_env.suppress_guards():
            self.inputs = [self._convert_input(i, d) for i, d in enumerate(desc.inputs)]
        if original is not None and fresh_env is not None:
            with wrap_torch_errors("$.shape_env"):
                fresh_env.derive_facts(original.gm, original.inputs, self.inputs)
        guards = nullcontext() if shape_env is None else shape_env.suppress_guards()
        with guards, wrap_torch_errors("$.graph"):
            self.gm = decode_graph(
                desc.graph,
                convert=self._convert,
                sym=self._make_sym,
                retarget=retarget.device if retarget else None,
                sources=self._sources,
                made={
                    id(d.tensor): value
                    for d, value in zip(desc.inputs, self.inputs, strict=True)
                    if d.tensor is not None
                },
                meshes=self._meshes,
            )
        self.tracing_context = torch_dynamo.TracingContext(self.fake_mode)
        with wrap_torch_errors("$.inputs"):
            self._attach_dynamo_metadata()
        if fresh_env is not None:
            with wrap_torch_errors("$.graph"):
                fresh_env.insert_asserts(self.gm)

    @property
    def shape_env(self) -> Any | None:
        """The ``ShapeEnv`` of the fake mode."""
        return self.fake_mode.shape_env

    @contextmanager
    def active(self) -> Generator[None, None, None]:
        """Set torch's global state as it is when Dynamo calls a backend for this frame."""
        with ExitStack() as stack:
            stack.enter_context(
                torch_dynamo.compile_context(torch_dynamo.CompileContext(self._compile_id()))
            )
            stack.enter_context(torch_dynamo.tracing(self.tracing_context))
            stack.enter_context(apply_modes(self._retarget.modes(self.desc.modes)))
            yield

    def compile(self, backend: str | Callable[..., Any] = "inductor") -> Compiled:
        """Compile the graph with a Dynamo backend, by name or callable.

        A backend owns its graph and may change it: compile an instance once. A
        backend that cannot have a float as a symbol asks Dynamo to trace again with the float as a
        constant; here the instance is rebuilt with it, and ``specialized`` has the constants.
        Threads compile one at a time, under the lock of ``torch.compile``.

        Raises:
            CaptureError: no backend has that name, or the frame needs process groups that this
                process does not have: see `Capture.fake_world`.
        """
        compiler_fn = backends.resolve_backend(backend)
        specializing = torch_dynamo.scalar_specializations()
        # The session is of the process: only who has the lock may begin and end one.
        with (
            torch_dynamo.compile_lock(),
            torch_dynamo.compile_session(),
            specializing as (restart, symbols),
        ):
            while True:
                defined = set(symbols)
                try:
                    with self.active(), self._meshes.apart(), _checking_world(self.desc):
                        compiled = compiler_fn(self.gm, list(self.inputs))
                except restart:
                    if defined >= symbols:
                        raise
                    self._build(self.desc, self._retarget)
                    self._specialize(symbols)
                else:
                    return _runnable(self.desc, compiled)

    def _specialize(self, symbols: Set[str]) -> None:
        """Replace float symbols in the graph by their recorded values."""
        placeholders = self.gm.graph.find_nodes(op="placeholder")
        for fx_node, value in zip(placeholders, self.inputs, strict=True):
            scalar = getattr(value, "item_memo", None)
            if not isinstance(scalar, torch.SymFloat) or str(scalar.node.expr) not in symbols:
                continue
            constant = float(scalar.node.hint)
            self.specialized[fx_node.name] = constant
            for user in list(fx_node.users):
                if user.op == "call_method" and user.target == "item":
                    user.replace_all_uses_with(constant)  # pyright: ignore[reportArgumentType]
                    self.gm.graph.erase_node(user)
        self.gm.recompile()

    def _compile_id(self) -> Any:
        return torch_dynamo.CompileId(frame_id=0, frame_compile_id=0)

    def _decode_sources(self, desc: CaptureDesc) -> None:
        """Decode the sources of the inputs into the memo."""
        with wrap_torch_errors("$.inputs"):
            tensors = [each.tensor for each in desc.inputs if each.tensor is not None]
            decode_sources([t.source for t in tensors if t.source is not None], self._sources)

    def _convert(self, desc: MetaTensorDesc) -> torch.Tensor:
        try:
            moved = self._retarget.tensor(desc) if self._moves else desc
            return self._converter.from_desc(moved)
        except Exception:
            with wrap_torch_errors(where_of(desc)):
                raise

    def _make_sym(self, desc: SymDesc) -> Any:
        expr = decode_expr(desc.expr)
        if self.shape_env is None:
            raise CaptureError(
                "a symbolic scalar needs a shape environment",
                where=str(expr),
                fix="The capture has none: record the frame again",
            )
        check_sym(desc)
        return torch_symbols.make_sym(
            desc.kind, expr, self.shape_env, desc.hint, constant=desc.constant
        )

    def _convert_input(self, position: int, desc: InputDesc) -> Any:
        if desc.tensor is not None:
            return self._convert(desc.tensor)
        where = f"$.inputs[{position}]"
        with wrap_torch_errors(where):
            if desc.sym is not None:
                return self._make_sym(desc.sym)
            return decode_constant(desc.value, f"{where}.value", self._meshes)

    def _attach_dynamo_metadata(self) -> None:
        """Attach the metadata that AOTAutograd reads from a graph of Dynamo."""
        placeholders = [n for n in self.gm.graph.nodes if n.op == "placeholder"]
        if len(placeholders) != len(self.inputs):
            raise CaptureError(
                "the capture's inputs do not fit its graph",
                where="$.inputs",
                expected=f"{len(placeholders)} inputs, one for each placeholder",
                found=str(len(self.inputs)),
                fix="The file is damaged: record the frame again",
            )
        node_sources = [n.source for n in self.desc.graph.nodes if n.op == "placeholder"]
        rows = zip(placeholders, self.desc.inputs, self.inputs, node_sources, strict=True)
        for fx_node, desc, value, source in rows:
            self._attach_placeholder_metadata(fx_node, desc, value, source)
        if all(desc.source is not None for desc in self.desc.inputs):
            self.gm.meta["dynamo_compile_id"] = self._compile_id()
            parameters = [name for name, _ in self.desc.parameter_sources]
            records = [record for _, record in self.desc.parameter_sources]
            sources = decode_sources(records, self._sources)
            object.__setattr__(
                self.gm,
                "_param_name_to_source",
                dict(zip(parameters, sources, strict=True)),
            )

    def _attach_placeholder_metadata(
        self, fx_node: torch.fx.Node, desc: InputDesc, value: Any, node_source: SourceDesc | None
    ) -> None:
        if desc.source is not None and desc.source is not node_source:  # else the node has it
            fx_node._dynamo_source = decode_source(desc.source, memo=self._sources)  # pyright: ignore[reportAttributeAccessIssue]
        if desc.tensor is None:
            return
        if desc.tensor.symbolic_context is not None:
            context = self._contexts.make(desc.tensor.symbolic_context)
            fx_node._fakeify_context = context  # pyright: ignore[reportAttributeAccessIssue]
            self.tracing_context.tensor_to_context[value] = context
        marks = desc.tensor.marks
        if marks is not None and marks.static_input_type is not None:
            fx_node.meta["tensor_dict"] = {"_dynamo_static_input_type": marks.static_input_type}


def _without_operations(desc: CaptureDesc) -> CaptureDesc:
    """The frame with only the placeholders of its graph."""
    placeholders = [fx_node for fx_node in desc.graph.nodes if fx_node.op == "placeholder"]
    nodes = [msgspec.structs.replace(n, users=None, meta=()) for n in placeholders]
    nodes.append(NodeDesc(op="output", name="output", target="output", args=(None,)))
    graph = GraphModuleDesc(nodes=tuple(nodes))
    return msgspec.structs.replace(desc, graph=graph, parameter_sources=())


@contextmanager
def _checking_world(desc: CaptureDesc) -> Generator[None, None, None]:
    """Check the process groups; name missing ones in errors raised within the block."""
    check_world(desc)
    try:
        yield
    except Exception as error:
        check_world(desc, error)
        raise


def _runnable(desc: CaptureDesc, compiled: Compiled) -> Compiled:
    """Wrap compiled code so that missing process groups or recorded data raise a clear error."""
    missing = desc.graph.without_data
    if not missing:
        if desc.world is None:
            return compiled

        def run(*inputs: Any) -> Any:
            with _checking_world(desc):
                return compiled(*inputs)

        return run

    def refuse(*_inputs: Any) -> Any:
        raise CaptureError(
            "the graph holds tensors whose data is not in the capture",
            found=", ".join(missing),
            fix='Compile it only, or record it with capture(..., constants="small")',
        )

    return refuse
