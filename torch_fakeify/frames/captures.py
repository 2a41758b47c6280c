"""One frame of ``torch.compile``: its record, and what can be done with it.

`recording.capture` makes the record of a frame, `instances` rebuilds the frame from it.
"""

from __future__ import annotations

import traceback
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from torch_fakeify.compat import torch_dynamo
from torch_fakeify.encoding.settings import NotSet, with_settings
from torch_fakeify.encoding.stacks import encode_stack
from torch_fakeify.errors import UnknownNameError, class_name
from torch_fakeify.records.devices import DeviceMap
from torch_fakeify.records.frame import CaptureDesc, FailureDesc
from torch_fakeify.records.metadata_keys import losses_of
from torch_fakeify.records.redact_paths import short_message, short_paths
from torch_fakeify.render.code import code_lines
from torch_fakeify.render.frame_views import (
    frame_guards,
    frame_html,
    frame_inputs,
    frame_lines,
    frame_summary,
    frame_symbols,
)
from torch_fakeify.render.text import clip, escape
from torch_fakeify.serialization.capture_file import (
    check_version,
    read_file,
    with_result,
    write_capture,
)
from torch_fakeify.serialization.container import VERSION
from torch_fakeify.versions import is_newer, warn_of_other_torch, written_by

from .backend_choice import name_module, with_options
from .instances import Instance, without_operations
from .notes import SettingsWarning
from .process_groups import fake_world
from .ranks import at_rank, running_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    import torch
    from torch.export import ExportedProgram

    from torch_fakeify.compat.backends import Compiled
    from torch_fakeify.guards.conditions import Guard
    from torch_fakeify.records.frame import OperatorDesc, Paths, SurroundingsDesc, WorldDesc
    from torch_fakeify.records.metadata_keys import Loss
    from torch_fakeify.render.frame_views import FrameGuard, FrameInput, FrameSymbol
    from torch_fakeify.serialization.container import Limits
    from torch_fakeify.tools.replaying import ReplayReport


class Capture:
    """A captured frame; ``desc`` is its whole state.

    ``print`` shows the code of its graph, its inputs, symbols and guards, and how it failed.

    Args:
        desc: the record.
        path: the file that it was read from.
        producer: the release that wrote the file; empty if the capture was not read from a file.
        members: the serialized members of its file, if they are known.

    Attributes:
        desc: the record.
        path: the file that it was read from; ``None`` if it was not.
        producer: the release that wrote the file.

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
        path: Path | None = None,
        producer: str = "",
        members: dict[str, bytes] | None = None,
    ) -> None:
        self.desc = desc
        self.path = path
        self.producer = producer
        self._members = members
        """Cached for ``save``."""
        self._on_cpu: torch.fx.GraphModule | None = None
        """The graph on the CPU, cached for ``materialize``."""
        self._inputs: Instance | None = None
        """The frame without the operations of its graph, cached for ``bind`` and ``check``."""
        self._at_ranks: dict[WorldDesc | int, Capture] = {}
        """The frame as other ranks have it."""

    @property
    def backend(self) -> str | None:
        """Name of the backend that the frame was recorded with."""
        return self.desc.backend

    @property
    def failure(self) -> FailureDesc | None:
        """How the backend failed to compile the frame; ``None`` if it did not."""
        return self.desc.failure

    @property
    def inputs(self) -> tuple[FrameInput, ...]:
        """The inputs in the order of the placeholders, by their names in the program."""
        return frame_inputs(self.desc)

    @property
    def symbols(self) -> tuple[FrameSymbol, ...]:
        """The symbols of the shape environment, by their names in the program."""
        return frame_symbols(self.desc)

    @property
    def guards(self) -> tuple[FrameGuard, ...]:
        """The guards of the shape environment, with the user's lines."""
        return frame_guards(self.desc)

    @property
    def code(self) -> str:
        """The graph and its nested graphs as Python-like source."""
        return "\n".join(map(escape, code_lines(self.desc.graph)))

    @property
    def surroundings(self) -> SurroundingsDesc | None:
        """What else decided the compilation: settings, environment, versions and devices."""
        return self.desc.surroundings

    def __repr__(self) -> str:
        return f"<Capture {frame_summary(self.desc)}>"

    def __str__(self) -> str:
        return "\n".join(frame_lines(self.desc))

    def _repr_html_(self) -> str:
        """The same for a notebook, with code and tables folded."""
        return frame_html(self.desc)

    def replay(
        self,
        *,
        backend: str | None = None,
        imports: Sequence[str] = (),
        device: str | None = None,
        timeout: float = 600.0,
        memory: int | None = None,
        trust: bool = False,
        python: str | None = None,
        time: bool = False,
    ) -> ReplayReport:
        """Compile the frame in a fresh interpreter and compare the result with the recorded one.

        Arguments, result and errors are those of `replay_capture`.

        Example:
            >>> capture = tfk.capture(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(2)])
            >>> capture.replay(backend="eager").verdict
            'compiles'
        """
        from torch_fakeify.tools.replaying import replay_capture  # the one import upwards

        return replay_capture(
            self,
            backend=backend,
            imports=imports,
            device=device,
            timeout=timeout,
            memory=memory,
            trust=trust,
            python=python,
            time=time,
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
            MissingFileError: there is no such file.
            FormatError: not a capture, truncated, or ill-typed; subclasses are ``VersionError``,
                ``LimitError`` and ``UnknownNameError``.
        """
        desc, producer = read_file(path, limits=limits)
        warn_of_other_torch(desc.torch_version, torch_dynamo.torch_version(), stacklevel=2)
        return cls(desc, path=Path(path), producer=producer)

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
        paths: Paths = "short",
        seconds: float | None = None,
    ) -> Capture:
        """Return a copy with the exception of its backend, as text.

        Args:
            error: the exception.
            backend: the backend's name.
            seconds: how long the backend took until it raised.
            paths: ``"full"`` leaves message and file names unchanged; ``"short"`` shortens absolute
                paths and removes the names of user and host and secrets of the environment.
        """
        failure = FailureDesc(
            type=class_name(type(error)),
            message=str(error) if paths == "full" else short_message(str(error)),
            stack=encode_stack(traceback.extract_tb(error.__traceback__)),
            backend=backend,
        )
        if paths == "short":
            failure = short_paths(failure)
        desc = msgspec.structs.replace(
            self.desc, failure=failure, backend=backend, state=None, compile_seconds=seconds
        )
        return Capture(desc)

    def with_state(
        self,
        state: Literal["not finished", "not compiled"] | None,
        *,
        seconds: float | None = None,
    ) -> Capture:
        """Return a copy with another `CaptureDesc.state`; ``None`` means compiled.

        Args:
            state: the state.
            seconds: how long the backend took.
        """
        desc = self.desc
        changed = msgspec.structs.replace(desc, state=state, compile_seconds=seconds)
        members = self._members and with_result(self._members, changed, was=desc)
        return Capture(changed, producer=self.producer, members=members)

    def instantiate(
        self,
        device: str | torch.device | Mapping[str, str] | None = None,
        *,
        fresh: bool = False,
        rank: int | None = None,
    ) -> Instance:
        """Rebuild the frame: a new ``FakeTensorMode`` and a new ``ShapeEnv``.

        Args:
            device: new device of the tensors on an accelerator, or of all tensors if none is; or a
                mapping from recorded to new device names. ``None`` uses the recorded devices, even
                if this machine does not have them.
            fresh: by default the ``ShapeEnv`` has the recorded state. A fresh one has new symbols for
                the recorded sources and derives the recorded facts by torch's rules, see
                `fresh_env`. Its guards are equivalent, and may be fewer.
            rank: whose meshes, process groups and local sizes the frame has, see `at_rank`. By default
                the rank of this process where ``torch.distributed`` is initialized, else the recorded
                one: the lowest.

        Raises:
            CaptureError: the frame cannot be that of the rank.
            ConvertError: a tensor cannot be rebuilt here.
            ShapeEnvError: the recorded facts contradict one another (``fresh``).
            UnknownNameError: an operator, function or class is unknown or not allowed here.
        """
        return self._at(rank)._instance(device, fresh=fresh)

    def _instance(
        self, device: str | torch.device | Mapping[str, str] | None, *, fresh: bool = False
    ) -> Instance:
        """Rebuild the frame as it is here, also where this process has another rank."""
        try:
            return Instance(self.desc, DeviceMap.parse(device, self.desc), fresh=fresh)
        except UnknownNameError as error:
            name_module(self.desc, error)
            self._name_writer(error)
            raise

    def at_rank(self, rank: int) -> Capture:
        """The frame as a rank of its world has it; the same capture for a frame without process groups.

        A frame of DTensors, collectives or meshes is recorded as the lowest rank has it, so that the
        records of all ranks are equal where the program is. Of a rank are its coordinates in meshes, the
        names and members of its process groups, and the local sizes of uneven shards, which torch's rule
        computes from the global ones.

        Args:
            rank: the rank.

        Raises:
            CaptureError: the world has no such rank, a mesh or group of the frame does not have it, a
                local size is not known for it, or the graph may have numbers of the rank that recorded
                it: the program asks for its rank.
        """
        return self._at(rank)

    def _at(self, rank: int | None) -> Capture:
        """The frame of a rank; ``None`` means that of this process, if it has one."""
        by_request = rank is not None
        rank = running_rank(self.desc) if rank is None else rank
        if rank is None:
            return self
        desc = at_rank(self.desc, rank, by_request=by_request)
        if desc is self.desc:
            return self
        key = desc.world or rank  # the groups of a rank may have other names in another world
        if key not in self._at_ranks:
            self._at_ranks[key] = Capture(desc, path=self.path, producer=self.producer)
        return self._at_ranks[key]

    def _name_writer(self, error: UnknownNameError) -> None:
        """Add the writer of the file to the error, unless this release wrote it."""
        recorded, running = self.desc.torch_version, torch_dynamo.torch_version()
        if not is_newer(self.producer) and recorded in ("", running):
            return
        writer = f"{written_by(self.producer, recorded)} wrote the file, this is torch {running}"
        error.fix = f"{(error.fix or 'Use the versions that wrote it').rstrip('.')}: {writer}"

    def exported_program(
        self,
        state_dict: Mapping[str, Any] | None = None,
        constants: Mapping[str, Any] | None = None,
    ) -> ExportedProgram:
        """The program of ``torch.export`` that was recorded: its graph, signature, ranges and guards.

        Args:
            state_dict: its parameters and persistent buffers by name; without one they are fake
                tensors, and the program can be transformed, compiled and saved, but not run.
            constants: its other tensors by name, as ``ExportedProgram.constants``; those whose data is
                recorded need not be given.

        Raises:
            CaptureError: the frame is not of an exported program, a tensor is not given, or the
                arguments of the program have a structure without a record.
            FormatError: the signature does not fit the graph, or has names that cannot be in code.
            UnknownNameError: no library that is imported has the verifier of the program's dialect.
        """
        return self.instantiate().exported_program(state_dict, constants)

    def compile(
        self,
        backend: str | Callable[..., Any] | None = None,
        *,
        device: str | torch.device | Mapping[str, str] | None = None,
        trust: bool = False,
        rank: int | None = None,
    ) -> Compiled:
        """Instantiate the frame and compile it with a Dynamo backend.

        Args:
            backend: a name, ``MODULE:ATTR`` or a callable; by default the recorded backend, or inductor
                for a frame that was recorded without one.
            device: as for `instantiate`.
            trust: as for `settings`.
            rank: as for `instantiate`. Code that communicates runs in the process of that rank.

        The recorded settings are set while it compiles; a `SettingsWarning` names those that are not.
        Compiled code may compile its backward pass later: then use `settings` around both.

        Returns:
            What the backend returned: a callable that takes the graph's inputs in order.
        """
        compiler_fn, not_passed = with_options(self.desc, backend, trust=trust)
        with self.settings(trust=trust) as not_set:
            compiled = self.instantiate(device, rank=rank).compile(compiler_fn)
        if not_set or not_passed:
            lines = "; ".join(escape(clip(each.text, 400)) for each in (*not_set, *not_passed))
            warnings.warn(f"settings are not as recorded: {lines}", SettingsWarning, stacklevel=2)
        return compiled

    @contextmanager
    def settings(self, *, trust: bool = False) -> Generator[tuple[NotSet, ...], None, None]:
        """Set the recorded settings of the compiler in this thread, and restore torch's at the end.

        Args:
            trust: also set what could run a program, write a file, import or connect.

        Yields:
            The settings that are not set, with the reasons.
        """
        with with_settings(self.desc.surroundings, trust=trust) as not_set:
            yield not_set

    @contextmanager
    def fake_world(self, *, rank: int | None = None) -> Generator[None, None, None]:
        """Initialize ``torch.distributed`` with a fake world, as a frame with collectives or meshes needs it.

        Process groups of torch's ``fake`` backend have a rank, and the recorded world size and groups; their
        collectives copy the data of this rank. Does nothing for a frame without process groups, or if
        this process has them already.

        Args:
            rank: the rank of this process in it, as for `instantiate`.

        Raises:
            CaptureError: this process has other process groups than the frame needs, or the frame cannot
                be that of the rank.
        """
        with fake_world(self._at(rank).desc):
            yield

    @contextmanager
    def operator_stubs(self) -> Generator[tuple[OperatorDesc, ...], None, None]:
        """Register stubs of the operators that the frame calls and this process lacks, until the end of the block.

        A stub has the recorded schema and, for calls like the recorded ones, the recorded fake result
        with the sizes of the new arguments. It can be traced and compiled. It has no code: running it
        raises `StubError`.

        Yields:
            The operators with a stub; none if all are registered here.

        Raises:
            FormatError: a schema cannot be parsed.
            StubError: an operator cannot have a stub, such as one that returns a view or takes objects
                of a custom class.
        """
        from .operator_stubs import operator_stubs  # lazy: most frames need none

        with operator_stubs(self.desc) as stubs:
            yield stubs

    def bind(
        self,
        scope: Mapping[str, Any],
        *,
        globals: Mapping[str, Any] | None = None,  # noqa: A002
        check: bool = True,
    ) -> list[Any]:
        """The inputs of the graph, in its order, from the arguments of a call of the recorded function.

        Each input is read by its source: an argument, a global, an attribute or item of one such as a
        weight of a module, or a size of a tensor.

        Args:
            scope: the arguments by name, such as ``{"self": module, "x": x}``; variables of a closure
                are among them.
            globals: the globals of the function's module, if the graph has an input that is one.
            check: whether the guards must hold, see `check`.

        Raises:
            CaptureError: the scope lacks a value, which the error names; a guard does not hold; or the
                inputs have no sources, as those of a graph that neither Dynamo nor a frontend made.
            UnsupportedValueError: an input is no argument or global, such as a random number.
        """
        return self._input_instance().bind(scope, globals=globals, check=check)

    def check(
        self,
        scope: Mapping[str, Any],
        *,
        globals: Mapping[str, Any] | None = None,  # noqa: A002
    ) -> Guard | None:
        """The first guard that does not hold for the arguments of a call; ``None`` if the graph may be used.

        The guards are those of `Instance.guards`: torch's global state, properties, identity and storages
        of tensors, sizes and numbers. Constants, classes and code that Dynamo guards besides are not in
        a capture.

        Args:
            scope: as for `bind`.
            globals: as for `bind`.

        Raises:
            CaptureError: as for `bind`, but not for a guard.
            UnsupportedValueError: as for `bind`.
        """
        return self._input_instance().check(scope, globals=globals)

    def _input_instance(self) -> Instance:
        of_rank = self._at(None)
        if of_rank._inputs is None:
            inputs_alone = without_operations(of_rank.desc)
            of_rank._inputs = Instance(inputs_alone, DeviceMap({}), frame=of_rank.desc)
        return of_rank._inputs

    def fingerprint(self, kind: Literal["content", "structure"] = "content") -> str:
        """A hash in hexadecimal, independent of symbol names, ids, stacks and policies.

        Args:
            kind: ``"content"`` of all that a backend gets; ``"structure"`` without the sources of inputs
                and the names of the graph's attributes, so that the frames of equal layers of a model,
                and equal pieces of a graph, have one hash. Guards on other symbols do not count then.
        """
        from torch_fakeify.records.fingerprint import (
            fingerprint,  # lazy: replay does not need it
        )

        return fingerprint(self.desc, kind)

    def materialize(
        self,
        seed: int = 0,
        *,
        sizes: Mapping[str, int] | None = None,
        device: str | torch.device | None = None,
        max_bytes: int | None = None,
        rank: int | None = None,
    ) -> list[Any]:
        """Real inputs that respect dtypes, strides, aliasing and guards.

        Args:
            seed: of the generator that fills floating point data; integers are small and
                non-negative, so that they are valid indices.
            sizes: values for symbols, by name; the others have their hints.
            device: where to make them; ``None`` means the recorded device.
            max_bytes: total size of the inputs; by default the memory of this machine. Making them
                temporarily takes a few times more.
            rank: as for `instantiate`. The data is that of the seed on every rank.

        Raises:
            CaptureError: a size violates a guard or a range, a device is missing, or the inputs exceed
                ``max_bytes``.
        """
        from torch_fakeify.frames.inputs.materializing import materialize

        of_rank = self._at(rank)

        def rebuild() -> torch.fx.GraphModule:
            if of_rank._on_cpu is None:
                of_rank._on_cpu = of_rank._instance("cpu").gm
            return of_rank._on_cpu

        return materialize(
            of_rank.desc,
            seed=seed,
            sizes=sizes,
            device=device,
            max_bytes=max_bytes,
            rebuild=rebuild,
        )
