"""One frame: graph, inputs and shape environment, from its record to compilation.

A capture is one record, which `captures` makes; everything else here rebuilds from that record alone.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator, Mapping, Set
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

from . import _torch
from .container import VERSION
from .contexts import Contexts
from .convert import MetaConverter
from .desc_frame import CaptureDesc, FailureDesc, InputDesc
from .desc_graph import GraphModuleDesc, NodeDesc
from .errors import CaptureError, UnknownNameError
from .exprs import check_sym, decode_expr
from .fake_modes import make_fake_mode
from .files import check_version, private_members, read_file, write_capture
from .graph import decode_graph
from .modes import apply_modes
from .paths import short_message, short_paths
from .record_checks import where_of
from .refusing import refusing
from .renaming import rename_symbols
from .retarget import Retarget
from .shape_env import encode_stack, restore
from .sources import DecodeMemo, decode_source, decode_sources
from .text import clip, escape
from .values import decode_value
from .versions import is_newer, warn_of_torch, written_by

if TYPE_CHECKING:
    from pathlib import Path

    from .container import Limits
    from .desc import MetaTensorDesc, SourceDesc, SymDesc

Compiled = Callable[..., Any]


class Capture:
    """A captured frame. ``desc`` is all of its state.

    Args:
        desc: the record.
        producer: the release that wrote the file it was read from; empty if it was not read.
        paths: ``"short"`` where absolute paths in the record are still to be shortened. It is done
            when ``desc`` is asked for or saved: whether there are any shows in what is to be written.
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
        """Of the file, where they are known."""
        self.producer = producer

    @property
    def desc(self) -> CaptureDesc:
        """The record, without absolute paths unless they were asked for."""
        if self._paths == "short":
            self._desc, self._members = private_members(self._desc)
            self._paths = "full"
        return self._desc

    def __repr__(self) -> str:
        desc = self.desc
        guards = 0 if desc.shape_env is None else len(desc.shape_env.guards)
        return (
            f"<Capture {escape(clip(desc.frame or 'frame', 80))}: {len(desc.graph.nodes)} nodes, "
            f"{len(desc.inputs)} inputs, {guards} guards>"
        )

    def save(self, path: str | Path, *, version: int = VERSION) -> int:
        """Write the capture to a file, whole or not at all, and return its size in bytes.

        Args:
            path: the file.
            version: of the format; an older one for a reader that knows no later one.

        Raises:
            WriteError: the file cannot be written, or not in this version; what was there before
                is untouched.
        """
        check_version(version)
        desc, members = self.desc, self._members
        self._members = None  # they are large
        return write_capture(path, desc, version=version, members=members)

    @classmethod
    def load(cls, path: str | Path, *, limits: Limits | None = None) -> Capture:
        """Read a capture. Runs no code of the file.

        Warns with ``TorchVersionWarning`` if it was recorded with another version of torch.

        Args:
            path: the file.
            limits: what it may ask for; by default what a capture of its size can need.

        Raises:
            FormatError: not a capture, truncated, or ill-typed; ``VersionError``, ``LimitError``
                and ``UnknownNameError`` are its special cases.
        """
        desc, producer = read_file(path, limits=limits)
        warn_of_torch(desc.torch_version, _torch.torch_version(), stacklevel=2)
        return cls(desc, producer=producer)

    def with_failure(
        self,
        error: BaseException,
        *,
        backend: str | None,
        paths: Literal["short", "full"] = "short",
    ) -> Capture:
        """The same frame with the exception that its backend ended with, as text.

        Args:
            error: the exception.
            backend: the backend's name.
            paths: ``"full"`` keeps the message and the file names as they are; else absolute paths
                are shortened, and names of user and host and secrets of the environment left out.
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
        return Capture(msgspec.structs.replace(self.desc, failure=failure, backend=backend))

    def with_backend(self, backend: str | None) -> Capture:
        """The same frame with the name of the backend that it was compiled with."""
        desc = msgspec.structs.replace(self._desc, backend=backend)
        return Capture(desc, paths=self._paths)

    def instantiate(
        self,
        device: str | torch.device | Mapping[str, str] | None = None,
        *,
        fresh: bool = False,
    ) -> Instance:
        """Rebuild the frame: a new ``FakeTensorMode`` and a new ``ShapeEnv``.

        Args:
            device: where to put what was recorded on an accelerator, or everything if nothing was;
                a mapping from recorded to new device names; ``None`` keeps the recorded devices,
                also those that this machine does not have.
            fresh: by default the ``ShapeEnv`` is in the recorded state. A fresh one makes symbols of
                its own under the recorded sources, and has learned the recorded facts by torch's
                rules: see `fresh_env`. Its guards say the same, and may be fewer.

        Raises:
            ConvertError: a tensor cannot be rebuilt here.
            ShapeEnvError: the recorded facts contradict one another (``fresh``).
            UnknownNameError: an operator, function or class is not known or not allowed here.
        """
        try:
            return Instance(self.desc, Retarget.parse(device, self.desc), fresh=fresh)
        except UnknownNameError as error:
            self._tell_writer(error)
            raise

    def _tell_writer(self, error: UnknownNameError) -> None:
        """Say of a name that is not known here who wrote it, if that was not this release."""
        recorded, running = self.desc.torch_version, _torch.torch_version()
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

    def fingerprint(self) -> str:
        """A content hash in hexadecimal, the same for other symbol names, ids, stacks and policies."""
        from .fingerprint import fingerprint  # as below, not loaded to replay a frame

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
            sizes: values for symbols, by name; the others keep their hints.
            device: where to make them; ``None`` means the recorded device.
            max_bytes: what they may have together; by default as much as this machine has memory.
                To make them takes some times more for a while.

        Raises:
            CaptureError: a size violates a guard or a range, a device is not here, or they have
                more than ``max_bytes``.
        """
        from .materialize import materialize

        return materialize(self.desc, seed=seed, sizes=sizes, device=device, max_bytes=max_bytes)


class Instance:
    """A frame rebuilt from its record, with state of its own.

    Attributes:
        gm: the graph.
        inputs: fake tensors, symbolic scalars and constants, one for each placeholder.
        fake_mode: the ``FakeTensorMode`` they live in.
        specialized: float inputs, by placeholder name, whose recorded value is a constant in the
            graph because the backend could not have them as symbols.
    """

    gm: torch.fx.GraphModule
    inputs: list[Any]

    def __init__(self, desc: CaptureDesc, retarget: Retarget, *, fresh: bool = False) -> None:
        self._fresh = fresh
        self._build(desc, retarget)

    def _build(self, desc: CaptureDesc, retarget: Retarget) -> None:
        self.desc = desc
        self.specialized: dict[str, float] = {}
        self._sources = DecodeMemo()
        self._contexts = Contexts(self._sources)
        shape_env, known, pupil = None, None, None
        if desc.shape_env is not None and self._fresh:
            known = Instance(_inputs_alone(desc), Retarget({}))
            from .fresh_env import FreshEnv  # what learns is not loaded to replay a frame

            with refusing("$.shape_env"):
                pupil = FreshEnv(known.shape_env)
            shape_env = pupil.env
            desc = rename_symbols(msgspec.structs.replace(desc, shape_env=None), pupil.names)
        elif desc.shape_env is not None:
            with refusing("$.shape_env"):
                shape_env = restore(desc.shape_env)
        self.fake_mode = make_fake_mode(desc.fake_mode, shape_env)
        self._converter = MetaConverter(
            self.fake_mode, symbols="keep", keep_nested_ints=True, sources=self._sources
        )
        self._retarget, self._moves = retarget, bool(retarget)
        # One kind of work after the other, each in a short loop: the processor keeps its code.
        self._decode_sources(desc)
        # Torch asks about sizes when a tensor is made. The frame has all its guards already.
        with nullcontext() if shape_env is None else shape_env.suppress_guards():
            self.inputs = [self._convert_input(i, d) for i, d in enumerate(desc.inputs)]
        if known is not None and pupil is not None:
            with refusing("$.shape_env"):
                pupil.learn(known.gm, known.inputs, self.inputs)
        guards = nullcontext() if shape_env is None else shape_env.suppress_guards()
        with guards, refusing("$.graph"):
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
            )
        self.tracing_context = _torch.TracingContext(self.fake_mode)
        with refusing("$.inputs"):
            self._dress_graph()
        if pupil is not None:
            with refusing("$.graph"):
                pupil.assert_in(self.gm)

    @property
    def shape_env(self) -> Any | None:
        """The ``ShapeEnv`` of the fake mode."""
        return self.fake_mode.shape_env

    @contextmanager
    def active(self) -> Generator[None, None, None]:
        """Torch as a backend finds it when Dynamo calls it for this frame."""
        with ExitStack() as stack:
            stack.enter_context(_torch.compile_context(_torch.CompileContext(self._compile_id())))
            stack.enter_context(_torch.tracing(self.tracing_context))
            stack.enter_context(apply_modes(self._retarget.modes(self.desc.modes)))
            yield

    def compile(self, backend: str | Callable[..., Any] = "inductor") -> Compiled:
        """Compile the graph with a Dynamo backend, by name or callable.

        A backend owns the graph that it is given and may change it: compile an instance once. A
        backend that cannot have a float as a symbol asks Dynamo to trace again with the float as a
        constant; here the instance is built again so, and ``specialized`` tells the constants.

        Raises:
            CaptureError: no backend has that name.
        """
        compiler_fn = _torch.resolve_backend(backend)
        with _torch.scalar_specializations() as (restart, symbols):
            while True:
                known = set(symbols)
                try:
                    with self.active():
                        compiled = compiler_fn(self.gm, list(self.inputs))
                except restart:
                    if known >= symbols:
                        raise
                    self._build(self.desc, self._retarget)
                    self._specialize(symbols)
                else:
                    return _needing_data(self.desc, compiled)

    def _specialize(self, symbols: Set[str]) -> None:
        """Put the recorded values of float symbols into the graph in their place."""
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
        return _torch.CompileId(frame_id=0, frame_compile_id=0)

    def _decode_sources(self, desc: CaptureDesc) -> None:
        """Those of the inputs, which then are known."""
        with refusing("$.inputs"):
            tensors = [each.tensor for each in desc.inputs if each.tensor is not None]
            decode_sources([t.source for t in tensors if t.source is not None], self._sources)

    def _convert(self, desc: MetaTensorDesc) -> torch.Tensor:
        try:
            moved = self._retarget.tensor(desc) if self._moves else desc
            return self._converter.from_desc(moved)
        except Exception:
            with refusing(where_of(desc)):
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
        return _torch.make_sym(desc.kind, expr, self.shape_env, desc.hint, constant=desc.constant)

    def _convert_input(self, position: int, desc: InputDesc) -> Any:
        if desc.tensor is not None:
            return self._convert(desc.tensor)
        where = f"$.inputs[{position}]"
        with refusing(where):
            if desc.sym is not None:
                return self._make_sym(desc.sym)
            return decode_value(desc.value, where=f"{where}.value")

    def _dress_graph(self) -> None:
        """Put on the graph what AOTAutograd reads from a graph of Dynamo's."""
        placeholders = [n for n in self.gm.graph.nodes if n.op == "placeholder"]
        if len(placeholders) != len(self.inputs):
            raise CaptureError(
                "the capture's inputs do not fit its graph",
                where="$.inputs",
                expected=f"{len(placeholders)} inputs, one for each placeholder",
                found=str(len(self.inputs)),
                fix="The file is damaged: record the frame again",
            )
        known = [n.source for n in self.desc.graph.nodes if n.op == "placeholder"]
        rows = zip(placeholders, self.desc.inputs, self.inputs, known, strict=True)
        for fx_node, desc, value, source in rows:
            self._dress_placeholder(fx_node, desc, value, source)
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

    def _dress_placeholder(
        self, fx_node: torch.fx.Node, desc: InputDesc, value: Any, known: SourceDesc | None
    ) -> None:
        if desc.source is not None and desc.source is not known:  # else the node has it
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


def _inputs_alone(desc: CaptureDesc) -> CaptureDesc:
    """The frame with a graph that takes its inputs and does nothing with them."""
    placeholders = [fx_node for fx_node in desc.graph.nodes if fx_node.op == "placeholder"]
    nodes = [msgspec.structs.replace(n, users=None, meta=()) for n in placeholders]
    nodes.append(NodeDesc(op="output", name="output", target="output", args=(None,)))
    graph = GraphModuleDesc(nodes=tuple(nodes))
    return msgspec.structs.replace(desc, graph=graph, parameter_sources=())


def _needing_data(desc: CaptureDesc, compiled: Compiled) -> Compiled:
    """The compiled frame, or where the graph holds tensors without data, one that says so."""
    missing = desc.graph.without_data
    if not missing:
        return compiled

    def refuse(*_inputs: Any) -> Any:
        raise CaptureError(
            "the graph holds tensors whose data is not in the capture",
            found=", ".join(missing),
            fix='Compile it only, or record it with capture(..., constants="small")',
        )

    return refuse
