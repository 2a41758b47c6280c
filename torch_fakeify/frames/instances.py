"""A frame rebuilt from its record: graph, inputs, fake mode and ``ShapeEnv``, ready to be compiled."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.fx.graph import CodeGen

from torch_fakeify.compat import (
    aot_compilers,
    backends,
    torch_dynamo,
    torch_graphs,
    torch_symbols,
)
from torch_fakeify.convert.converter import MetaConverter
from torch_fakeify.convert.validate import where_of
from torch_fakeify.encoding.contexts import decode_context
from torch_fakeify.encoding.exprs import check_sym, decode_expr
from torch_fakeify.encoding.fake_modes import make_fake_mode
from torch_fakeify.encoding.meshes import Meshes
from torch_fakeify.encoding.modes import apply_modes
from torch_fakeify.encoding.opaque_values import decode_constant
from torch_fakeify.encoding.sources import DecodeMemo, decode_source, decode_sources
from torch_fakeify.errors import CaptureError, wrap_torch_errors
from torch_fakeify.frames.graph.codec import decode_graph
from torch_fakeify.guards.scope import Scope
from torch_fakeify.records.devices import DeviceMap
from torch_fakeify.records.graph import GraphModuleDesc, NodeDesc
from torch_fakeify.records.symbol_names import rename_symbols
from torch_fakeify.render.frame_views import frame_summary
from torch_fakeify.render.text import level_text
from torch_fakeify.shape_env.restoring import restore

from .arguments import (
    FrameGuards,
    aliasing_of,
    bind,
    same_objects,
    sources_of,
)
from .backend_choice import choose_backend
from .process_groups import check_world

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence, Set

    from torch.export import ExportedProgram

    from torch_fakeify.compat.backends import Compiled
    from torch_fakeify.guards.conditions import Guard
    from torch_fakeify.guards.guard_list import Guards
    from torch_fakeify.records.frame import CaptureDesc, InputDesc, ModesDesc
    from torch_fakeify.records.tensor import MetaTensorDesc, SymDesc


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

    def __init__(
        self,
        desc: CaptureDesc,
        retarget: DeviceMap,
        *,
        fresh: bool = False,
        frame: CaptureDesc | None = None,
    ) -> None:
        self._fresh = fresh
        self._frame = frame or desc  # the one to build may lack the operations
        self._build(desc, retarget)

    def _build(self, desc: CaptureDesc, retarget: DeviceMap) -> None:
        self.desc = desc
        self._guards: FrameGuards | None = None
        self._input_guards: FrameGuards | None = None
        self.specialized: dict[str, float] = {}
        self._sources = DecodeMemo()
        shape_env, original, fresh_env = None, None, None
        if desc.shape_env is not None and self._fresh:
            original = Instance(without_operations(desc), DeviceMap({}))
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
        self._converter = self._new_converter()
        self._retarget, self._moves = retarget, bool(retarget)
        with wrap_torch_errors("$.inputs"):
            tensors = [each.tensor for each in desc.inputs if each.tensor is not None]
            decode_sources([t.source for t in tensors if t.source is not None], self._sources)
        self._input_records, self._export = desc.inputs, desc.export
        self.inputs = self._made_inputs()
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

    def __repr__(self) -> str:
        return f"<Instance {frame_summary(self.desc)}>"

    @property
    def shape_env(self) -> Any | None:
        """The ``ShapeEnv`` of the fake mode."""
        return self.fake_mode.shape_env

    @property
    def modes(self) -> ModesDesc:
        """Torch's global state when Dynamo called the backend."""
        return self._retarget.modes(self.desc.modes)

    @property
    def guards(self) -> Guards:
        """The conditions on torch's global state and on the arguments under which the graph may be used.

        They are on properties, identity and storages of tensors, and on sizes and numbers, over the
        sources of the inputs. After `compile` those of the backend are among them. What Dynamo guards
        besides, such as constants, classes and code, is not in a capture.

        Raises:
            CaptureError: an input has no source.
            UnsupportedValueError: a source leads to no argument or global.
        """
        if self._guards is None:
            pairs = same_objects(self.desc)
            self._guards = self._frame_guards(sources_of(self.desc), pairs, whole=True)
        return self._guards.guards()

    def check_inputs(self, inputs: Sequence[Any]) -> Guard | None:
        """The first guard that does not hold for inputs in the order of the graph; ``None`` if it may be used.

        The guards are those of `guards` over the names of the inputs, so that it serves graphs without
        sources too, such as those of AOTAutograd and pieces of a graph. Facts of the ``ShapeEnv`` about
        sizes that no input has are not among them.

        Args:
            inputs: one for each placeholder.

        Raises:
            CaptureError: it is another number of inputs.
        """
        if len(inputs) != len(self.inputs):
            raise CaptureError(
                "another number of inputs",
                expected=str(len(self.inputs)),
                found=str(len(inputs)),
                fix="Pass one for each placeholder, as capture.inputs shows them",
            )
        names = [torch_dynamo.dynamo_source().LocalSource(each.name) for each in self.desc.inputs]
        if self._input_guards is None:
            self._input_guards = self._frame_guards(names, (), whole=False)
        scope = {source.local_name: value for source, value in zip(names, inputs, strict=True)}
        return self._input_guards.guards().failing(scope)

    def _frame_guards(
        self, sources: Sequence[Any], pairs: Sequence[tuple[Any, Any]], *, whole: bool
    ) -> FrameGuards:
        converter, self._converter = self._converter, self._new_converter()
        try:
            inputs = self._made_inputs()  # a backend may have changed the sizes of the others
        finally:
            self._converter = converter
        return FrameGuards(
            self._input_records,
            inputs,
            sources,
            pairs,
            self.shape_env,
            self.modes,
            whole=whole,
            aliasing=aliasing_of(self._frame),
        )

    def bind(
        self,
        scope: Mapping[str, Any],
        *,
        globals: Mapping[str, Any] | None = None,  # noqa: A002
        check: bool = True,
    ) -> list[Any]:
        """The inputs of the graph from a scope, see `Capture.bind`; devices are those of the instance."""
        found = Scope(scope, globals)
        values = bind(self.desc, found)
        guard = self.guards.failing(found) if check else None
        if guard is not None:
            raise CaptureError(
                "the arguments are not like those that the frame was recorded with",
                expected=str(guard),
                fix="Record a frame with such arguments, or pass check=False",
            )
        return values

    def check(
        self,
        scope: Mapping[str, Any],
        *,
        globals: Mapping[str, Any] | None = None,  # noqa: A002
    ) -> Guard | None:
        """The first guard that does not hold for a scope, see `Capture.check`."""
        found = Scope(scope, globals)
        bind(self.desc, found)  # names what is missing
        return self.guards.failing(found)

    def exported_program(
        self,
        state_dict: Mapping[str, Any] | None = None,
        constants: Mapping[str, Any] | None = None,
    ) -> ExportedProgram:
        """The program that was exported, see `Capture.exported_program`; it shares the graph with the instance."""
        from .exported import exported_program  # lazy: other frames need none of it

        if self._export is None:
            raise CaptureError(
                "the frame is not an exported program",
                expected="a capture of tfk.capture(program), of an ExportedProgram",
                found=level_text(self.desc),
                fix="Use gm and inputs of the instance, or compile it",
            )
        with wrap_torch_errors("$.export"):
            return exported_program(
                self._export,
                self.gm,
                self._input_records,
                self.inputs,
                self.shape_env,
                state_dict=state_dict,
                constants=constants,
            )

    @contextmanager
    def active(self) -> Generator[None, None, None]:
        """Set torch's global state as it is when Dynamo calls a backend for this frame."""
        with (
            torch_dynamo.compile_context(torch_dynamo.CompileContext(self._compile_id())),
            torch_dynamo.tracing(self.tracing_context),
            apply_modes(self.modes),
        ):
            yield

    def compile(self, backend: str | Callable[..., Any] | None = None) -> Compiled:
        """Compile the graph with a Dynamo backend, see `Capture.compile`.

        A graph whose output is one value, as of a piece that ``split_module`` makes, is compiled with a
        tuple of it; the function returns the value. A graph with structured arguments, as of ``make_fx`` or of
        an exported program's ``module()``, is compiled with flat ones.
        A backend owns its graph and may change it: compile an instance once. A
        backend that cannot have a float as a symbol asks Dynamo to trace again with the float as a
        constant; here the instance is rebuilt with it, and ``specialized`` has the constants.
        Threads compile one at a time, under the lock of ``torch.compile``.

        Raises:
            CaptureError: there is no such backend here, or the frame needs process groups that this
                process does not have: see `Capture.fake_world`.
        """
        compiler_fn = _with_flat_output(self._at_level(choose_backend(self.desc, backend)))
        specializing = torch_dynamo.scalar_specializations()
        # The session is of the process: only who has the lock may begin and end one.
        with (
            torch_dynamo.compiling(),
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

    def _at_level(self, compiler_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return what compiles the graph: the backend, or its compiler for such a graph of AOTAutograd.

        Another backend than the recorded one may decompose other operators: it traces the graph again.
        """
        aot = self.desc.aot
        if aot is None:
            return compiler_fn
        is_recorded = backends.backend_name(compiler_fn) == self.desc.backend_name

        def compile_graph(gm: torch.fx.GraphModule, inputs: list[Any]) -> Compiled:
            graph = aot_compilers.AotGraph(aot.kind, gm, inputs, aot.forward_outputs)
            if is_recorded:
                return aot_compilers.compile_aot_graph(compiler_fn, graph)
            return aot_compilers.compile_again(compiler_fn, graph)

        return compile_graph

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

    def _convert(self, desc: MetaTensorDesc) -> torch.Tensor:
        try:
            return self._converter.from_desc(self._retarget.tensor(desc) if self._moves else desc)
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

    def _new_converter(self) -> MetaConverter:
        return MetaConverter(
            self.fake_mode,
            symbols="keep",
            keep_nested_ints=True,
            sources=self._sources,
            meshes=self._meshes,
        )

    def _made_inputs(self) -> list[Any]:
        env = self.shape_env
        # Torch guards on sizes when a tensor is made; the frame has all its guards already.
        with nullcontext() if env is None else env.suppress_guards():
            return [self._convert_input(i, d) for i, d in enumerate(self._input_records)]

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
        placeholders: list[Any] = self.gm.graph.find_nodes(op="placeholder")
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
        for fx_node, desc, value, node_source in rows:
            tensor = desc.tensor
            if desc.source is not None and desc.source is not node_source:  # else the node has it
                fx_node._dynamo_source = decode_source(desc.source, memo=self._sources)
            if tensor is not None and tensor.symbolic_context is not None:
                context = decode_context(tensor.symbolic_context, memo=self._sources)
                fx_node._fakeify_context = context
                self.tracing_context.tensor_to_context[value] = context
            marks = None if tensor is None else tensor.marks
            if marks is not None and marks.static_input_type is not None:
                fx_node.meta["tensor_dict"] = {"_dynamo_static_input_type": marks.static_input_type}
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


def _with_flat_output(compiler_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiler that also takes graphs that return no tuple, which AOTAutograd requires.

    These are pieces of a graph, whose output is one value, and graphs with structured arguments and
    outputs, of ``make_fx`` and ``torch.export``, which are compiled with flat ones.
    """

    def compile_graph(gm: torch.fx.GraphModule, inputs: list[Any]) -> Compiled:
        (output,) = gm.graph.find_nodes(op="output")
        is_one = isinstance(output.args[0], torch.fx.Node)
        is_structured = isinstance(gm.graph._codegen, torch_graphs.PyTreeCodeGen)
        if not is_one and not is_structured:
            return compiler_fn(gm, inputs)
        if is_one:
            output.args = ((output.args[0],),)
        if is_structured:
            gm.graph.set_codegen(CodeGen())
        gm.recompile()
        compiled = compiler_fn(gm, inputs)
        return (lambda *values: compiled(*values)[0]) if is_one else compiled

    return compile_graph


def without_operations(desc: CaptureDesc) -> CaptureDesc:
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
