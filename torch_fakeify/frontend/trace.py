"""Describe the inputs of a function, trace it in a new `Trace` and compile the graph with a backend."""

from __future__ import annotations

import re
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import sympy
import torch

from torch_fakeify.compat import backends, torch_dispatch, torch_dynamo, torch_fakes, torch_symbols
from torch_fakeify.compat.torch_symbols import DimDynamic, int_oo, narrow_range
from torch_fakeify.convert.converter import MetaConverter
from torch_fakeify.describe.describer import MetaTensorDescriber
from torch_fakeify.encoding.contexts import decode_context
from torch_fakeify.encoding.exprs import encode_sym
from torch_fakeify.encoding.sources import decode_source, encode_source
from torch_fakeify.errors import CaptureError, FormatError, ShapeEnvError
from torch_fakeify.guards.conditions import check_guard
from torch_fakeify.guards.guard_list import Guards
from torch_fakeify.guards.scope import Scope, reader_of
from torch_fakeify.guards.size_guards import Number, numbers_of, shape_guards
from torch_fakeify.guards.tensor_guards import (
    alias_guards,
    constant_guard,
    mode_guards,
    overlap_guard,
    tensor_guards,
    type_guard,
)
from torch_fakeify.records.frame import InputDesc
from torch_fakeify.records.frontend import TracedInputDesc, TracedInputsDesc
from torch_fakeify.replay.assert_nodes import insert_runtime_asserts
from torch_fakeify.serialization.document import Serializable
from torch_fakeify.transfer.dynamo_handoff import fresh_backend_state

from .arguments import (
    flatten,
    is_leaf,
    is_of_module,
    places,
    replaced,
    value_guards,
    walk,
    writer_of,
    written,
)
from .closed_over import closed_over_error, refuse_real
from .policy import Dim, Policy, context_of, scalar_dim

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence, Set
    from types import TracebackType

    from torch_fakeify.records.tensor import ContextDesc, MetaTensorDesc

# --- describe -------------------------------------------------------------------------------------


class _Input(NamedTuple):
    """One input of the graph."""

    source: Any
    record: InputDesc
    """The record of a tensor with its policy, or the value of a number."""
    dim: Dim | None
    """The policy of a number."""


class Inputs(Serializable[TracedInputsDesc]):
    """The described arguments of a function: see `describe`.

    Attributes:
        records: one for each tensor, with its source and policy, and for each symbolic number.
        guards: the conditions on the arguments other than sizes.
    """

    _root = TracedInputsDesc

    def __init__(
        self,
        inputs: Sequence[_Input],
        places: Mapping[str, int],
        guards: Guards,
        policy: Policy,
    ) -> None:
        self._inputs = tuple(inputs)
        self._places = dict(places)
        self.guards = guards
        self.policy = policy

    @property
    def records(self) -> tuple[InputDesc, ...]:
        """The records of the inputs."""
        return tuple(one.record for one in self._inputs)

    def __iter__(self) -> Any:
        return iter(self._inputs)

    def __len__(self) -> int:
        return len(self._inputs)

    @property
    def desc(self) -> TracedInputsDesc:
        """The record of the inputs.

        Raises:
            UnsupportedValueError: a guard has a value without a record.
        """
        return TracedInputsDesc(
            inputs=tuple(
                TracedInputDesc(input=one.record, dim=None if one.dim is None else one.dim.desc)
                for one in self
            ),
            places=tuple(self._places.items()),
            guards=self.guards.desc,
            policy=self.policy.desc,
        )

    @classmethod
    def from_desc(cls, desc: TracedInputsDesc) -> Inputs:
        """The inputs of a record, for a `Trace` without the arguments.

        Raises:
            FormatError: an input has no source, or a place no input.
            ShapeEnvError: a dim cannot have its kind.
        """
        inputs: list[_Input] = []
        for i, one in enumerate(desc.inputs):
            if one.input.source is None:
                raise FormatError("an input has no source", where=f"$.inputs[{i}]")
            dim = None if one.dim is None else Dim.from_desc(one.dim)
            if (one.input.tensor is None) is (dim is None):
                raise FormatError(
                    "an input is neither a tensor nor a number with a policy",
                    where=f"$.inputs[{i}]",
                )
            inputs.append(_Input(decode_source(one.input.source), one.input, dim))
        for i, (_, position) in enumerate(desc.places):
            if not 0 <= position < len(inputs):
                raise FormatError(
                    "a place has no input",
                    where=f"$.places[{i}]",
                    expected=f"a position below {len(inputs)}",
                    found=str(position),
                )
        guards, policy = Guards.from_desc(desc.guards), Policy.from_desc(desc.policy)
        return cls(inputs, dict(desc.places), guards, policy)

    def filled(self, scope: Mapping[str, Any], values: Sequence[Any]) -> dict[str, Any]:
        """A copy of a scope with other values for the inputs.

        The copy of a module shares everything but parameters and buffers with the original.
        """
        return replaced(scope, {name: values[i] for name, i in self._places.items()})


def describe(scope: Mapping[str, Any], policy: Policy | None = None) -> Inputs:
    """Describe the arguments of a function, with one describer.

    A tensor that occurs twice is one input. Views share their bases, and tensors their storages.
    Numbers without a symbol are constants, which are guarded.

    Args:
        scope: the arguments by name; neither changed nor referred to later.
        policy: which dims and numbers get symbols; by default only marked ones.

    Raises:
        UnsupportedTensorError: a tensor is not supported by records.
        UnsupportedValueError: a value is neither an input nor a constant.
        ShapeEnvError: the policy names a missing input or dim.
    """
    policy = policy or Policy()
    describer = MetaTensorDescriber()
    guards = [*mode_guards(), check_guard("names", [], sorted(scope))]
    places: dict[str, int] = {}
    positions: dict[int, int] = {}
    inputs: list[_Input] = []
    tensors: list[tuple[Any, torch.Tensor]] = []
    names: set[str] = set()
    for source, value in walk(scope):
        if is_leaf(value):
            names.add(source.name)
        if isinstance(value, torch.Tensor):
            if value.is_nested and value.layout is torch.strided:
                describer.describe_tensor(value, source=source)  # raises an error
            tensors.append((source, value))
            places[source.name] = positions.setdefault(id(value), len(inputs))
            if places[source.name] == len(inputs):
                guards += tensor_guards(source, value)
                in_module = is_of_module(source)
                context = context_of(value, source, policy, in_module=in_module)
                record = describer.describe_tensor(value, source=source, symbolic_context=context)
                inputs.append(_input(source, record, None, None))
        elif not is_leaf(value):
            guards += value_guards(source, value)
        else:
            dim = scalar_dim(source, policy)
            if dim.kind == "STATIC":
                guards.append(constant_guard(source, value))
            else:
                guards.append(type_guard(source, value))
                places[source.name] = len(inputs)
                inputs.append(_input(source, None, value, dim))
    inner = {name for one in inputs for name in _inner_names(one.source.name, one.record.tensor)}
    policy.refuse_unknown(names | inner)
    return Inputs(inputs, places, Guards((*guards, *alias_guards(tensors))), policy)


def _input(source: Any, tensor: Any, value: Any, dim: Dim | None) -> _Input:
    name = re.sub(r"\W+", "_", source.name).strip("_").lower()
    desc = encode_source(source)
    return _Input(source, InputDesc(name=name, tensor=tensor, value=value, source=desc), dim)


def _inner_names(name: str, desc: MetaTensorDesc | None) -> Generator[str, None, None]:
    """The source names of a tensor's base and inner tensors, which a policy may name."""
    if desc is None:
        return
    if desc.base is not None:
        yield f"{name}._base"
    for attribute, inner in () if desc.subclass is None else desc.subclass.tensors:
        yield f"{name}.{attribute}"
        yield from _inner_names(f"{name}.{attribute}", inner)


# --- trace ----------------------------------------------------------------------------------------


class Trace:
    """One trace of a function: a new fake mode with a new ``ShapeEnv``, and the results of the trace.

    Inside ``with trace:`` the mode and the Python decompositions that symbolic sizes need are active.
    Trace a function of `inputs` there, by any tracer. Other tensors cannot be used there: they need a
    name in the scope. Threads trace one at a time. While a tracer of torch (``make_fx``) runs there,
    torch refuses calls of functions that ``torch.compile`` made, by any thread.

    Attributes:
        inputs: the inputs of the graph, made from the records alone: first the symbols of sizes as
            separate numbers, as in Dynamo; then the described inputs as fake tensors and symbolic
            numbers.
        fake_mode: the ``FakeTensorMode``.
        shape_env: its ``ShapeEnv``.

    Args:
        inputs: the result of `describe`.
        sizes_as_inputs: whether the symbols of sizes are inputs. AOTAutograd needs them for views of a
            base that is mutated; its ``aot_export_module`` does not support them with a loss.
    """

    def __init__(self, inputs: Inputs, *, sizes_as_inputs: bool = True) -> None:
        policy = inputs.policy
        self._described = inputs
        self.shape_env: Any = torch_symbols.ShapeEnv(
            duck_shape=policy.duck_shape,
            specialize_zero_one=policy.specialize_zero_one,
            prefer_deferred_runtime_asserts_over_guards=policy.prefer_deferred_runtime_asserts_over_guards,
        )
        self.fake_mode: Any = torch_fakes.FakeTensorMode(shape_env=self.shape_env)
        self._converter = MetaConverter(self.fake_mode)
        self._symbol_converter = MetaConverter(
            self.fake_mode, symbols="keep", keep_nested_ints=True
        )
        self._describer = MetaTensorDescriber(keep_nested_ints=True)
        with self.shape_env.ignore_fresh_unbacked_symbols():  # inputs bind theirs
            made = self._made(inputs)
        self._numbers = [
            number
            for one, value in zip(inputs, made, strict=True)
            for number in numbers_of(one.source, value)
        ]
        self._sizes = self._lifted(inputs) if sizes_as_inputs else []
        # Describe the inputs before tracing, which may change them (`resize_`).
        self._records = [
            *(self._size_record(size) for size in self._sizes),
            *(self._recorded(one, value) for one, value in zip(inputs, made, strict=True)),
        ]
        self.inputs = [*map(self._symbol, self._sizes), *made]
        self._sources = [part.source for part in (*self._sizes, *inputs)]
        self._readers = list(map(reader_of, self._sources))
        self._context: Any = torch_dynamo.TracingContext(self.fake_mode)
        self._rebuild: Callable[[Sequence[Any]], Any] | None = None
        self._writes: list[Any] = []
        self._asserted: dict[Any, int] | None = None
        self._active: list[ExitStack] = []

    def _made(self, inputs: Inputs) -> list[Any]:
        """The fake inputs; bases are made before views, since their policy takes precedence."""
        made: dict[int, Any] = {}
        order = sorted(enumerate(inputs), key=lambda row: _is_view(row[1]))
        for i, one in order:
            if one.record.tensor is not None:
                made[i] = self._converter.from_desc(one.record.tensor)
            else:
                made[i] = _symbolic(self.shape_env, one)
        return [made[i] for i in range(len(made))]

    def _lifted(self, inputs: Inputs) -> list[Number]:
        """The first size with each symbol, except symbols that are inputs themselves."""
        names = {one.source.name for one in inputs}
        found: dict[Any, Number] = {}
        for number in self._numbers:
            if _is_size(number) and number.source.name not in names:
                found.setdefault(number.expr, number)
        whole = {n.expr for n in self._numbers if n.source.name in names}
        hints = self.shape_env.backed_var_to_val
        return [
            number
            for symbol, number in found.items()
            if symbol not in whole and not isinstance(hints.get(symbol), torch_symbols.SingletonInt)
        ]

    def _initial_inputs(self) -> list[Any]:
        return [
            value if record.tensor is None else self._symbol_converter.from_desc(record.tensor)
            for record, value in zip(self._records, self.inputs, strict=True)
        ]

    def _symbol(self, size: Number) -> Any:
        hint = self.shape_env.backed_var_to_val.get(size.expr)
        return torch_symbols.make_sym(
            "int", size.expr, self.shape_env, None if hint is None else int(hint)
        )

    def _size_record(self, size: Number) -> InputDesc:
        sym = encode_sym(self._symbol(size), replaced=False)
        return InputDesc(name=str(size.expr), sym=sym, source=encode_source(size.source))

    def flatten(self, scope: Mapping[str, Any]) -> list[Any]:
        """The inputs of the graph from a scope for which the guards hold."""
        found = Scope(scope)
        return [read(found) for read in self._readers]

    def _recorded(self, one: _Input, value: Any) -> InputDesc:
        name, source = one.record.name, one.record.source
        if one.record.tensor is None:
            return InputDesc(name=name, sym=encode_sym(value, replaced=False), source=source)
        context = decode_context(_context_desc(one))
        desc = self._describer.describe_tensor(value, source=one.source, symbolic_context=context)
        return InputDesc(name=name, tensor=desc, source=source)

    def __enter__(self) -> Trace:
        stack = ExitStack()
        stack.enter_context(torch_dynamo.compile_lock())
        # Without the mode: torch would drop all stacks of its environment at the end.
        stack.enter_context(torch_dynamo.tracing(torch_dynamo.TracingContext(None)))
        stack.enter_context(self.fake_mode)
        stack.enter_context(torch_dispatch.enable_python_dispatcher())
        self._active.append(stack)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._active.pop().__exit__(kind, error, trace)
        found = closed_over_error(error, trace)
        if found is not None:
            raise found from error

    def flat(
        self, call: Callable[[dict[str, Any]], Any], scope: Mapping[str, Any]
    ) -> Callable[..., tuple[Any, ...]]:
        """The function as one of the graph's inputs that returns the tensors of its result as a tuple.

        New values that the function sets in its arguments, such as a tensor attribute, are returned
        too; the function that `compile` returns sets them again.

        Args:
            call: the function of a scope.
            scope: the described arguments.

        Raises:
            UnsupportedValueError: a part of the result is not supported; or the function adds parts to
                an argument or removes them.
        """

        def run(*values: Any) -> tuple[Any, ...]:
            described = values[len(self._sizes) :]
            filled = self._described.filled(scope, described)
            before = places(filled)
            result = call(dict(filled))
            leaves, self._rebuild = flatten(result, refuse_real)
            self._writes, new = written(before, places(filled))
            if new:
                leaves, self._rebuild = flatten((result, new), refuse_real)
            return tuple(leaves)

        return run

    # --- a backend --------------------------------------------------------------------------------

    @contextmanager
    def handoff(
        self, gm: torch.fx.GraphModule
    ) -> Generator[tuple[torch.fx.GraphModule, list[Any]], None, None]:
        """Yield the graph and its inputs in a fresh mode to a backend.

        The fresh ``ShapeEnv`` has the facts of the trace; the new facts of the backend are propagated to
        the trace at the end of the block. Holds the lock of ``torch.compile``.

        Args:
            gm: the graph; it gets the runtime asserts of the trace as nodes.

        Raises:
            CaptureError: the graph does not take the inputs.
            ShapeEnvError: the trace has broken a promise of the policy; the facts contradict each
                other; or the backend does not support a symbolic float, which `where` names.
        """
        self._refuse_broken_promises()
        self._attach_dynamo_metadata(gm)
        insert_runtime_asserts(gm, self.shape_env)
        groups = self.shape_env.deferred_runtime_asserts
        self._asserted = {symbol: len(group) for symbol, group in groups.items()}
        compile_id = torch_dynamo.CompileContext(
            torch_dynamo.CompileId(frame_id=0, frame_compile_id=0)
        )
        initial = self._initial_inputs()
        describer, context = self._describer, self._context
        state = fresh_backend_state(
            gm, self._records, initial, initial, context, describer, share_sizes=True
        )
        with (
            torch_dynamo.compiling(),
            torch_dynamo.scalar_specializations() as (restart, symbols),
        ):
            before = frozenset(symbols)
            try:
                with torch_dynamo.compile_context(compile_id), state as handoff_state:
                    yield handoff_state
            except restart as error:
                raise self._no_symbol(symbols - before) from error

    def compile(
        self, gm: torch.fx.GraphModule, backend: str | Callable[..., Any] = "inductor"
    ) -> Callable[[Mapping[str, Any]], Any]:
        """Compile the graph with a Dynamo backend, by name or callable.

        Returns:
            A function of a scope for which the guards hold. It returns the result of the function
            that was passed to `flat`; if `flat` was not used, that of the compiled graph.

        Raises:
            CaptureError: there is no such backend, or the graph does not take the inputs.
            ShapeEnvError: raised by `handoff`.
        """
        compiler = backends.resolve_backend(backend)
        with self.handoff(gm) as (graph, inputs):
            compiled = compiler(graph, inputs)
        rebuild, readers = self._rebuild, self._readers
        writers = [writer_of(source) for source in self._writes]

        def run(scope: Mapping[str, Any]) -> Any:
            found = Scope(scope)
            result = compiled(*[read(found) for read in readers])
            if rebuild is None:
                return result
            if not writers:
                return rebuild(result)
            result, new = rebuild(result)
            for write, value in zip(writers, new, strict=True):
                write(scope, value)
            return result

        return run

    def _no_symbol(self, symbols: Set[str]) -> ShapeEnvError:
        numbers = [n.source.name for n in self._numbers if str(n.expr) in symbols]
        return ShapeEnvError(
            "the backend cannot have a float as a symbol",
            where=", ".join(numbers) or None,
            expected="a constant",
            fix='Describe the arguments again with a policy that makes it "STATIC"',
        )

    def _attach_dynamo_metadata(self, gm: torch.fx.GraphModule) -> None:
        """Add the metadata about inputs that Dynamo adds, for the guards of AOTAutograd."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        if len(placeholders) != len(self.inputs):
            raise CaptureError(
                "the graph does not take the inputs of the trace",
                expected=f"{len(self.inputs)} placeholders, one for each input",
                found=str(len(placeholders)),
                fix="Trace a function of trace.inputs, such as trace.flat(call, scope)",
            )
        rows = zip(placeholders, self._records, self._sources, self._initial_inputs(), strict=True)
        for fx_node, record, source, value in rows:
            fx_node._rename(record.name)  # asserts contain these names
            fx_node.target = fx_node.name
            fx_node._dynamo_source = source
            fx_node.meta["val"] = value
        gm.recompile()
        gm.meta["dynamo_compile_id"] = torch_dynamo.CompileId(frame_id=0, frame_compile_id=0)
        names = [*dict(gm.named_parameters()), *dict(gm.named_buffers())]
        constant = torch_dynamo.dynamo_source().ConstantSource
        sources = {name: constant(f"__graph_{i}") for i, name in enumerate(names)}
        object.__setattr__(gm, "_param_name_to_source", sources)

    # --- guards -----------------------------------------------------------------------------------

    def guards(self) -> Guards:
        """The conditions under which the traced graph and its compiled form are valid for a scope.

        Raises:
            ShapeEnvError: the trace has broken a promise of the policy, or has a fact about a symbol
                that no input holds.
        """
        self._refuse_broken_promises()
        entries = self._context.guards_context.aotautograd_guards
        overlaps = [guard for guard in map(overlap_guard, entries) if guard is not None]
        shapes = shape_guards(self.shape_env, self._numbers, self._asserted)
        return self._described.guards + shapes + overlaps

    def _refuse_broken_promises(self) -> None:
        """Method: the constraints that ``ShapeEnv.produce_guards`` (torch 2.13) checks."""
        first = len(self._sizes)
        rows = zip(self._described, self._records[first:], self.inputs[first:], strict=True)
        tracked = [found for row in rows for found in self._tracked(*row)]
        if not any(_promises(context) for _, _, context in tracked):
            return
        values, sources, contexts = map(list, zip(*tracked, strict=True))
        try:
            self.shape_env.produce_guards(values, sources, input_contexts=contexts)
        except torch_symbols.ConstraintViolationError as error:
            raise ShapeEnvError(
                "the trace has broken a promise of the policy",
                found=_violations(str(error)),
                fix="Make the dim STATIC, or allow it with Dim(..., warn_only=True)",
            ) from error

    def _tracked(
        self, one: _Input, record: InputDesc, value: Any
    ) -> Generator[tuple[Any, Any, Any], None, None]:
        """An input at the start of the trace, its source and policy, for ``produce_guards``."""
        sources = torch_dynamo.dynamo_source()
        if record.tensor is not None:
            fake = self._symbol_converter.from_desc(record.tensor)
            yield fake, one.source, decode_context(_context_desc(one))
            if fake._is_view() and fake._base is not None:
                base = decode_context(_context_desc(one)).view_base_context  # type: ignore[attr-defined]
                yield fake._base, sources.AttrSource(one.source, "_base"), base
            memo = getattr(fake, "item_memo", None)
            if memo is not None:
                yield memo, sources.CallMethodItemSource(one.source), None
        elif isinstance(value, torch.SymBool):
            sym_node: Any = value.node
            symbol = sym_node._expr.args[0]
            number = torch_symbols.make_sym("int", symbol, self.shape_env, int(sym_node.hint))
            yield number, sources.ConvertIntSource(one.source), None
        else:
            constraint = one.dim.constraint if one.dim and isinstance(value, torch.SymInt) else None
            yield value, one.source, torch_symbols.SymIntSymbolicContext(constraint=constraint)


def _violations(text: str) -> str:
    """The violations in the text of a ``ConstraintViolationError``, without advice about Dynamo."""
    lines = [line[4:] for line in text.splitlines() if line.startswith("  - ")]
    return "; ".join(line.partition(". If you're using")[0].rstrip(".") for line in lines)


def _is_size(number: Number) -> bool:
    """Whether a number is a symbol of a tensor's size, stride or offset, but not of a view's base."""
    source: Any = number.source
    if not isinstance(source, torch_dynamo.dynamo_source().TensorPropertySource):
        return False
    tensor: Any = source.base  # type: ignore[attr-defined]
    return isinstance(number.expr, sympy.Symbol) and getattr(tensor, "member", None) != "_base"


def _is_view(one: _Input) -> bool:
    return one.record.tensor is not None and one.record.tensor.is_view


def _context_desc(one: _Input) -> ContextDesc:
    tensor = one.record.tensor
    assert tensor is not None
    assert tensor.symbolic_context is not None
    return tensor.symbolic_context


def _symbolic(env: Any, one: _Input) -> Any:
    value, dim = one.record.value, one.dim
    assert dim is not None
    if dim.kind == "UNBACKED":
        return _unbacked(env, one, dim)
    is_bool = type(value) is bool
    source = torch_dynamo.dynamo_source().ConvertIntSource(one.source) if is_bool else one.source
    number: Any = int(value) if is_bool else value
    constraint = dim.constraint if type(value) is int else None
    symbol = env.create_unspecified_symbol(
        number, source=source, dynamic_dim=DimDynamic[dim.kind], constraint_dim=constraint
    )
    if type(value) is float:
        return env.create_symfloatnode(symbol, hint=number, source=source)
    if not is_bool:
        return env.create_symintnode(symbol, hint=number, source=source)
    narrow_range(env, symbol, torch_symbols.ValueRanges(0, 1))  # pyright: ignore[reportArgumentType, reportCallIssue]
    return torch_symbols.make_sym("bool", sympy.Eq(symbol, 1), env, value)


def _unbacked(env: Any, one: _Input, dim: Dim) -> Any:
    if type(one.record.value) is not int:
        raise ShapeEnvError(
            "only an integer can be an unbacked input",
            where=one.source.name,
            found=type(one.record.value).__name__,
            fix="Make it DYNAMIC or STATIC",
        )
    number = env.create_unbacked_symint(one.source)
    symbol = number.node.expr
    env.unbacked_inputs.add(symbol)
    lower = -int_oo if dim.min is None else dim.min
    upper = int_oo if dim.max is None else dim.max
    narrow_range(env, symbol, torch_symbols.ValueRanges(lower, upper))  # pyright: ignore[reportArgumentType, reportCallIssue]
    return number


def _promises(context: Any) -> bool:
    """Whether a policy has a constraint whose violation is an error."""
    if context is None:
        return False
    if isinstance(context, torch_symbols.SymIntSymbolicContext):
        constraints: list[Any] = [context.constraint]
    else:
        constraints = list(context.constraint_sizes)
    inner: Any = getattr(context, "inner_contexts", {})
    return any(c is not None and not c.warn_only for c in constraints) or any(
        map(_promises, inner.values())
    )
