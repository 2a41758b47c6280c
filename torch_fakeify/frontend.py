"""What another frontend than Dynamo needs: fake inputs, a backend in fresh state, guards.

In the order in which a frontend calls it::

    from torch_fakeify import frontend

    policy = frontend.Policy(named={"x": {0: frontend.Dim(min=2, max=64)}})
    inputs = frontend.describe(scope, policy)  # records: no tensor is kept
    trace = frontend.Trace(inputs)  # a new FakeTensorMode with a new ShapeEnv
    with trace:
        gm = make_fx(trace.flat(call, scope))(*trace.inputs)
    run = trace.compile(gm, "inductor")  # a fresh ShapeEnv again; its facts come back
    guards = trace.guards()

    guards.check(scope)  # does the graph hold for these arguments?
    guards.failing(scope)  # the first guard that does not
    run(scope)

A scope is a mapping from names to arguments, such as the locals of a frame or
``inspect.signature(fn).bind(*args, **kwargs).arguments``: tensors, numbers and constants, and lists,
tuples, dictionaries and modules of them. Guards speak of it as ``L``.

`Trace.compile` takes any Dynamo backend. `Trace.handoff` is what it does around the backend; inside,
AOTAutograd may be called directly::

    aot = frontend.aot_autograd()
    with trace.handoff(gm) as (lent, inputs):
        fn = aot.aot_module_simplified(lent, inputs, fw_compiler=compiler)

    with trace.handoff(gm) as (lent, inputs), contextlib.ExitStack() as stack:
        joint = aot.aot_export_joint_with_descriptors(stack, lent, tuple(inputs))
        fn = aot.aot_compile_joint_with_descriptors(joint, fw_compiler=..., bw_compiler=...)

A tensor that the function reads from elsewhere, such as a global, must be a name of the scope. What
else it reads is the frontend's to guard: ``trace.guards() + [Guard(text, holds)]``.
"""

from __future__ import annotations

import re
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import sympy
import torch

from . import _torch
from ._torch import DimDynamic, aot_autograd, int_oo
from .contexts import decode_context
from .convert import MetaConverter
from .desc_frame import InputDesc
from .describe import MetaTensorDescriber
from .errors import CaptureError, ShapeEnvError
from .exprs import encode_sym
from .handoffs import handed_over
from .input_guards import (
    alias_guards,
    mode_guards,
    overlap_guard,
    scope_guard,
    tensor_guards,
    value_guards,
)
from .policies import Dim, Policy, context_of, scalar_dim
from .runtime_asserts import insert_runtime_asserts
from .scopes import flatten, is_leaf, is_of_module, replaced, walk
from .shape_guards import Number, numbers_of, shape_guards
from .sizes import narrow_range
from .source_guards import Guard, Guards, constant_guard, reader_of, type_guard
from .sources import encode_source

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence, Set
    from types import TracebackType

    from .desc import ContextDesc, MetaTensorDesc
    from .scopes import Structure

__all__ = ["Dim", "Guard", "Guards", "Inputs", "Policy", "Trace", "aot_autograd", "describe"]


# --- describe -------------------------------------------------------------------------------------


class _Input(NamedTuple):
    """One input of the graph."""

    source: Any
    record: InputDesc
    """The record of a tensor with its policy, or the value of a number."""
    dim: Dim | None
    """The policy of a number."""


class Inputs:
    """The arguments of a function as data: see `describe`.

    Attributes:
        records: one for each tensor, with its source and its policy, and each number that gets a
            symbol.
        guards: what is relied on beside the sizes.
    """

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

    def filled(self, scope: Mapping[str, Any], values: Sequence[Any]) -> dict[str, Any]:
        """A scope with other values in the place of the inputs.

        A module in it is a copy, which shares all but parameters and buffers with the original.
        """
        return replaced(scope, {name: values[i] for name, i in self._places.items()})


def describe(scope: Mapping[str, Any], policy: Policy | None = None) -> Inputs:
    """Describe the arguments of a function, by one describer for all.

    A tensor that occurs twice is one input. Views stay views of one base, and tensors that share a
    storage share it. Numbers that get no symbol are constants, which are guarded.

    Args:
        scope: the arguments by name; it is neither kept nor changed.
        policy: which dims and numbers get symbols; by default none that is not marked.

    Raises:
        UnsupportedTensorError: a tensor has no record.
        UnsupportedValueError: a value is neither an input nor a constant.
        ShapeEnvError: the policy names what is not there.
    """
    policy = policy or Policy()
    describer = MetaTensorDescriber()
    guards = [*mode_guards(), scope_guard(scope)]
    places: dict[str, int] = {}
    known: dict[int, int] = {}
    inputs: list[_Input] = []
    tensors: list[tuple[Any, torch.Tensor]] = []
    names: set[str] = set()
    for source, value in walk(scope):
        if is_leaf(value):
            names.add(source.name)
        if isinstance(value, torch.Tensor):
            tensors.append((source, value))
            places[source.name] = known.setdefault(id(value), len(inputs))
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
    policy.refuse_unknown(names | _inner_names_of(inputs))
    return Inputs(inputs, places, Guards((*guards, *alias_guards(tensors))), policy)


def _input(source: Any, tensor: Any, value: Any, dim: Dim | None) -> _Input:
    name = re.sub(r"\W+", "_", source.name).strip("_").lower()
    desc = encode_source(source)
    return _Input(source, InputDesc(name=name, tensor=tensor, value=value, source=desc), dim)


def _inner_names_of(inputs: Sequence[_Input]) -> set[str]:
    """The bases and the inner tensors of which a policy may say something."""
    found: set[str] = set()
    for one in inputs:
        if one.record.tensor is not None:
            found |= set(_inner_names(one.source.name, one.record.tensor))
    return found


def _inner_names(name: str, desc: MetaTensorDesc) -> Generator[str, None, None]:
    if desc.base is not None:
        yield f"{name}._base"
    for attribute, inner in () if desc.subclass is None else desc.subclass.tensors:
        yield f"{name}.{attribute}"
        yield from _inner_names(f"{name}.{attribute}", inner)


# --- trace ----------------------------------------------------------------------------------------


class Trace:
    """One trace of a function: a fake mode with a ``ShapeEnv`` of its own, and its results.

    Inside of ``with trace:`` the mode is active, and Python decompositions are, which symbolic sizes
    need. Trace there, by any means; what is traced takes `inputs`. A tensor that is not among them
    cannot be used there: give it a name in the scope.

    Attributes:
        inputs: of the graph, made of the records alone: first the symbols of the tensors' sizes, as
            numbers of their own, as Dynamo has them; then the described inputs, fake tensors and
            symbolic numbers.
        fake_mode: the ``FakeTensorMode``.
        shape_env: its ``ShapeEnv``.

    Args:
        inputs: what `describe` gave.
        sizes_as_inputs: whether the symbols of sizes are inputs. AOTAutograd needs them for views of
            one base, one of which is changed; its ``aot_export_module`` takes none beside a loss.
    """

    def __init__(self, inputs: Inputs, *, sizes_as_inputs: bool = True) -> None:
        policy = inputs.policy
        self._described = inputs
        self.shape_env: Any = _torch.ShapeEnv(
            duck_shape=policy.duck_shape,
            specialize_zero_one=policy.specialize_zero_one,
            prefer_deferred_runtime_asserts_over_guards=policy.prefer_deferred_runtime_asserts_over_guards,
        )
        self.fake_mode: Any = _torch.FakeTensorMode(shape_env=self.shape_env)
        self._converter = MetaConverter(self.fake_mode)
        self._keeper = MetaConverter(self.fake_mode, symbols="keep", keep_nested_ints=True)
        self._describer = MetaTensorDescriber(keep_nested_ints=True)
        with self.shape_env.ignore_fresh_unbacked_symbols():  # no operator binds those of inputs
            made = self._made(inputs)
        self._numbers = [
            number
            for one, value in zip(inputs, made, strict=True)
            for number in numbers_of(one.source, value)
        ]
        self._sizes = self._lifted(inputs) if sizes_as_inputs else []
        # Tracing may change the fakes (`resize_`); a backend gets what they are now.
        self._records = [
            *(self._size_record(size) for size in self._sizes),
            *(self._recorded(one, value) for one, value in zip(inputs, made, strict=True)),
        ]
        self.inputs = [*map(self._symbol, self._sizes), *made]
        self._sources = [part.source for part in (*self._sizes, *inputs)]
        self._readers = list(map(reader_of, self._sources))
        self._context: Any = _torch.TracingContext(self.fake_mode)
        self._structure: Structure | None = None
        self._asserted: dict[Any, int] | None = None
        self._active: list[ExitStack] = []

    def _made(self, inputs: Inputs) -> list[Any]:
        """The fake inputs. Bases come before views, so that it is their policy that counts."""
        made: dict[int, Any] = {}
        order = sorted(enumerate(inputs), key=lambda row: _is_view(row[1]))
        for i, one in order:
            if one.record.tensor is not None:
                made[i] = self._converter.from_desc(one.record.tensor)
            else:
                made[i] = _symbolic(self.shape_env, one)
        return [made[i] for i in range(len(made))]

    def _lifted(self, inputs: Inputs) -> list[Number]:
        """Where the symbols of sizes are, each once, but for those that are inputs themselves."""
        own = {one.source.name for one in inputs}
        found: dict[Any, Number] = {}
        for number in self._numbers:
            if _is_size(number) and number.source.name not in own:
                found.setdefault(number.expr, number)
        whole = {n.expr for n in self._numbers if n.source.name in own}
        hints = self.shape_env.backed_var_to_val
        return [
            number
            for symbol, number in found.items()
            if symbol not in whole and not isinstance(hints.get(symbol), _torch.SingletonInt)
        ]

    def _began(self) -> list[Any]:
        """The inputs as they were when the trace began, anew."""
        return [
            value if record.tensor is None else self._keeper.from_desc(record.tensor)
            for record, value in zip(self._records, self.inputs, strict=True)
        ]

    def _symbol(self, size: Number) -> Any:
        hint = self.shape_env.backed_var_to_val.get(size.expr)
        return _torch.make_sym(
            "int", size.expr, self.shape_env, None if hint is None else int(hint)
        )

    def _size_record(self, size: Number) -> InputDesc:
        sym = encode_sym(self._symbol(size), replaced=False)
        return InputDesc(name=str(size.expr), sym=sym, source=encode_source(size.source))

    def flatten(self, scope: Mapping[str, Any]) -> list[Any]:
        """The inputs of the graph as they are in a scope for which the guards hold."""
        return [read(scope) for read in self._readers]

    def _recorded(self, one: _Input, value: Any) -> InputDesc:
        name, source = one.record.name, one.record.source
        if one.record.tensor is None:
            return InputDesc(name=name, sym=encode_sym(value, replaced=False), source=source)
        context = decode_context(_context_desc(one))
        desc = self._describer.describe_tensor(value, source=one.source, symbolic_context=context)
        return InputDesc(name=name, tensor=desc, source=source)

    def __enter__(self) -> Trace:
        stack = ExitStack()
        # Of a context with the mode torch would forget all stacks at the end.
        stack.enter_context(_torch.tracing(_torch.TracingContext(None)))
        stack.enter_context(self.fake_mode)
        stack.enter_context(_torch.enable_python_dispatcher())
        self._active.append(stack)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._active.pop().__exit__(kind, error, trace)

    def flat(
        self, call: Callable[[dict[str, Any]], Any], scope: Mapping[str, Any]
    ) -> Callable[..., tuple[Any, ...]]:
        """The function over the inputs of the graph alone, which gives the tensors of its result.

        Args:
            call: the function, of a scope.
            scope: the arguments that were described.
        """

        def run(*values: Any) -> tuple[Any, ...]:
            described = values[len(self._sizes) :]
            leaves, self._structure = flatten(call(self._described.filled(scope, described)))
            return tuple(leaves)

        return run

    # --- a backend --------------------------------------------------------------------------------

    @contextmanager
    def handoff(
        self, gm: torch.fx.GraphModule
    ) -> Generator[tuple[torch.fx.GraphModule, list[Any]], None, None]:
        """Around a backend: gives it the graph and its inputs in a fresh mode.

        The fresh ``ShapeEnv`` knows what was found out while tracing; what the backend finds out is
        known to this trace at the end of the block.

        Args:
            gm: the graph; it gets the runtime asserts of the trace as nodes.

        Raises:
            CaptureError: the graph does not take the inputs.
            ShapeEnvError: the trace has broken a promise of the policy; the facts contradict one
                another; or the backend cannot have a float as a symbol, which `where` names.
        """
        self._refuse_broken_promises()
        self._dress(gm)
        insert_runtime_asserts(gm, self.shape_env)
        groups = self.shape_env.deferred_runtime_asserts
        self._asserted = {symbol: len(group) for symbol, group in groups.items()}
        compile_id = _torch.CompileContext(_torch.CompileId(frame_id=0, frame_compile_id=0))
        began = self._began()
        describer, context = self._describer, self._context
        lending = handed_over(gm, self._records, began, began, context, describer, share_sizes=True)
        with _torch.scalar_specializations() as (restart, symbols):
            before = frozenset(symbols)
            try:
                with _torch.compile_context(compile_id), lending as lent:
                    yield lent
            except restart as error:
                raise self._no_symbol(symbols - before) from error

    def compile(
        self, gm: torch.fx.GraphModule, backend: str | Callable[..., Any] = "inductor"
    ) -> Callable[[Mapping[str, Any]], Any]:
        """Compile the graph with a Dynamo backend, by name or callable.

        Returns:
            What takes a scope for which the guards hold. It gives the result of the function that
            was given to `flat`, else what the backend's function gives.

        Raises:
            CaptureError: there is no such backend, or the graph does not take the inputs.
            ShapeEnvError: as of `handoff`.
        """
        compiler = _torch.resolve_backend(backend)
        with self.handoff(gm) as (lent, inputs):
            compiled = compiler(lent, inputs)
        structure, readers = self._structure, self._readers

        def run(scope: Mapping[str, Any]) -> Any:
            result = compiled(*[read(scope) for read in readers])
            return result if structure is None else structure.filled(result)

        return run

    def _no_symbol(self, symbols: Set[str]) -> ShapeEnvError:
        """The error that says which floats a backend cannot have as symbols."""
        numbers = [n.source.name for n in self._numbers if str(n.expr) in symbols]
        return ShapeEnvError(
            "the backend cannot have a float as a symbol",
            where=", ".join(numbers) or None,
            expected="a constant",
            fix='Describe the arguments again with a policy that says "STATIC" of it',
        )

    def _dress(self, gm: torch.fx.GraphModule) -> None:
        """Says in the graph what its inputs are, as Dynamo does, for the guards of AOTAutograd."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        if len(placeholders) != len(self.inputs):
            raise CaptureError(
                "the graph does not take the inputs of the trace",
                expected=f"{len(self.inputs)} placeholders, one for each input",
                found=str(len(placeholders)),
                fix="Trace a function of trace.inputs, such as trace.flat(call, scope)",
            )
        names = [record.name for record in self._records]
        for fx_node, name in zip(placeholders, names, strict=True):
            fx_node._rename(name)  # asserts speak of them
            fx_node.target = fx_node.name
        for fx_node, source, value in zip(placeholders, self._sources, self._began(), strict=True):
            fx_node._dynamo_source = source
            fx_node.meta["val"] = value
        gm.recompile()
        gm.meta["dynamo_compile_id"] = _torch.CompileId(frame_id=0, frame_compile_id=0)
        own = [*dict(gm.named_parameters()), *dict(gm.named_buffers())]
        constant = _torch.dynamo_source().ConstantSource
        sources = {name: constant(f"__graph_{i}") for i, name in enumerate(own)}
        object.__setattr__(gm, "_param_name_to_source", sources)

    # --- guards -----------------------------------------------------------------------------------

    def guards(self) -> Guards:
        """Under which conditions what was traced and compiled is right for a scope.

        Raises:
            ShapeEnvError: the trace has broken a promise of the policy, or assumes something of what
                no input holds.
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
        except _torch.ConstraintViolationError as error:
            raise ShapeEnvError(
                "the trace has broken a promise of the policy",
                found=_violations(str(error)),
                fix="Make the dim STATIC, or allow it with Dim(..., warn_only=True)",
            ) from error

    def _tracked(
        self, one: _Input, record: InputDesc, value: Any
    ) -> Generator[tuple[Any, Any, Any], None, None]:
        """An input as it was when the trace began, its source and policy, for ``produce_guards``."""
        sources = _torch.dynamo_source()
        if record.tensor is not None:
            fake = self._keeper.from_desc(record.tensor)
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
            number = _torch.make_sym("int", symbol, self.shape_env, int(sym_node.hint))
            yield number, sources.ConvertIntSource(one.source), None
        else:
            constraint = one.dim.constraint if one.dim and isinstance(value, torch.SymInt) else None
            yield value, one.source, _torch.SymIntSymbolicContext(constraint=constraint)


def _violations(text: str) -> str:
    """What a ``ConstraintViolationError`` says of each dim, without advice for users of Dynamo."""
    lines = [line[4:] for line in text.splitlines() if line.startswith("  - ")]
    return "; ".join(line.partition(". If you're using")[0].rstrip(".") for line in lines)


def _is_size(number: Number) -> bool:
    """Whether it is a symbol of a tensor's size, stride or offset; bases of views are no inputs."""
    source: Any = number.source
    if not isinstance(source, _torch.dynamo_source().TensorPropertySource):
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
    """The symbolic number for a Python number."""
    value, dim = one.record.value, one.dim
    assert dim is not None
    if dim.kind == "UNBACKED":
        return _unbacked(env, one, dim)
    is_bool = type(value) is bool
    source = _torch.dynamo_source().ConvertIntSource(one.source) if is_bool else one.source
    number: Any = int(value) if is_bool else value
    constraint = dim.constraint if type(value) is int else None
    symbol = env.create_unspecified_symbol(
        number, source=source, dynamic_dim=DimDynamic[dim.kind], constraint_dim=constraint
    )
    if type(value) is float:
        return env.create_symfloatnode(symbol, hint=number, source=source)
    if not is_bool:
        return env.create_symintnode(symbol, hint=number, source=source)
    narrow_range(env, symbol, _torch.ValueRanges(0, 1))  # pyright: ignore[reportArgumentType, reportCallIssue]
    return _torch.make_sym("bool", sympy.Eq(symbol, 1), env, value)


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
    narrow_range(env, symbol, _torch.ValueRanges(lower, upper))  # pyright: ignore[reportArgumentType, reportCallIssue]
    return number


def _promises(context: Any) -> bool:
    """Whether a policy has a constraint that must not be broken."""
    if context is None:
        return False
    if isinstance(context, _torch.SymIntSymbolicContext):
        constraints: list[Any] = [context.constraint]
    else:
        constraints = list(context.constraint_sizes)
    inner: Any = getattr(context, "inner_contexts", {})
    return any(c is not None and not c.warn_only for c in constraints) or any(
        map(_promises, inner.values())
    )
