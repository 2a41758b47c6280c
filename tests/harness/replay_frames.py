"""Frames with guard nodes, what is said of their inputs, and fresh inputs for them.

The numbers of a frame's inputs are the variables: ``L['x'].size()[0]``. So environments that name
their symbols otherwise are compared by what they say of the same inputs.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import sympy
import torch
from guard_equivalence import Facts, Naming, facts_of
from guard_terms import plain, variable
from torch._dynamo.source import CallMethodItemSource, ConstantSource
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import torch_fakeify as tfk
from torch_fakeify.encoding.sources import source_of
from torch_fakeify.replay.lowering import mark_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_ASSERT = torch.ops.aten._assert_scalar.default
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Frame(NamedTuple):
    """A graph that a backend got, and what it is about."""

    gm: torch.fx.GraphModule
    env: Any
    inputs: tuple[Any, ...]
    """Real tensors and numbers."""
    fakes: tuple[Any, ...]
    """What the placeholders hold."""
    sources: tuple[Any, ...]
    names: tuple[str, ...]
    """Of the inputs, as text."""
    example_inputs: tuple[Any, ...]
    """What Dynamo gave the backend."""

    @classmethod
    def of(cls, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Frame:
        """The frame that Dynamo compiles now."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        fakes = tuple(p.meta["example_value"] for p in placeholders)
        sources = tuple(source_of(p) or ConstantSource(p.name) for p in placeholders)
        names = tuple(source.name for source in sources)
        real = tuple(i.node.hint if isinstance(i, SYMBOLIC) else i for i in inputs)
        env = TracingContext.get().fake_mode.shape_env
        return cls(gm, env, real, fakes, sources, names, tuple(inputs))


# --- facts over the numbers of inputs ---------------------------------------------------------------


def numbers_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The numbers of an input: what it is, and what it holds."""
    if not isinstance(value, torch.Tensor):
        yield name, value
        return
    for i, size in enumerate(value.size()):
        yield f"{name}.size()[{i}]", size
    for i, stride in enumerate(value.stride()):
        yield f"{name}.stride()[{i}]", stride
    yield f"{name}.storage_offset()", value.storage_offset()
    if getattr(value, "item_memo", None) is not None:
        yield f"{name}.item()", value.item_memo


def by_inputs(env: Any, names: Sequence[str], values: Sequence[Any]) -> Naming:
    """Names each symbol by the first number of the inputs that is just this symbol."""
    naming = Naming()
    found = [
        pair for name, value in zip(names, values, strict=True) for pair in numbers_of(name, value)
    ]
    equal: list[tuple[str, Any]] = []
    for name, number in found:
        expr = number.node._expr if isinstance(number, SYMBOLIC) else sympy.sympify(number)
        if isinstance(expr, sympy.Symbol) and expr not in naming:
            naming[expr] = variable(name, is_float=not expr.is_integer)
        else:
            equal.append((name, expr))
    for name, expr in equal:
        own = variable(name, is_float=not expr.is_integer)
        held = plain(expr, naming)
        if held != own:
            naming.equalities.append(("input", sympy.Eq(own, held, evaluate=False)))
    return naming


def input_facts(
    env: Any, names: Sequence[str], values: Sequence[Any], *, asserts: bool = False
) -> tuple[Facts, tuple[str, ...]]:
    """What an environment says of inputs; and what it says of anything else, as text."""
    naming = by_inputs(env, names, values)
    facts = facts_of(env, naming, asserts=asserts)
    known = set(naming.values()) | {e.args[0] for _, e in naming.equalities}
    told = {
        symbol: plain(env.replace(symbol), naming) for symbol in env.replacements.keys() - naming
    }
    by_others = {plain(s, {}): e for s, e in told.items() if e and e.free_symbols <= known}
    facts = facts._replace(exprs=tuple(plain(expr, by_others) for expr in facts.exprs))
    about = [expr.free_symbols <= known for expr in facts.exprs]
    keep = [i for i, own in enumerate(about) if own]
    other = tuple(str(facts.exprs[i]) for i, own in enumerate(about) if not own)
    hints = tuple(
        pair
        for pair in facts.hints
        if variable(pair[0]) in known or variable(pair[0], is_float=True) in known
    )
    return Facts(
        tuple(facts.exprs[i] for i in keep), tuple(facts.what[i] for i in keep), hints
    ), other


def node_facts(gm: torch.fx.GraphModule, names: Sequence[str]) -> Facts:
    """What the inserted nodes assert, read from the nodes alone."""
    bare: Any = ShapeEnv()
    values: dict[Any, Any] = {}
    rename: dict[sympy.Symbol, sympy.Symbol] = {}
    placeholders = dict(zip(gm.graph.find_nodes(op="placeholder"), names, strict=True))

    def number(name: str, *, is_float: bool = False) -> Any:
        if name not in numbers:
            made = bare.create_unbacked_symfloat() if is_float else bare.create_unbacked_symint()
            rename[made.node.expr] = variable(name, is_float=is_float)
            numbers[name] = made
        return numbers[name]

    numbers: dict[str, Any] = {}
    exprs: list[sympy.Basic] = []
    what: list[str] = []
    for fx_node in gm.graph.nodes:
        if fx_node.op == "placeholder" and not isinstance(
            fx_node.meta["example_value"], torch.Tensor
        ):
            value = fx_node.meta["example_value"]
            values[fx_node] = number(
                placeholders[fx_node], is_float=isinstance(value, torch.SymFloat)
            )
        mark = mark_of(fx_node)
        if mark is None:
            continue
        first = fx_node.args[0]
        if fx_node.target is _ASSERT:
            condition = values[first] if isinstance(first, torch.fx.Node) else first
            expr = (
                condition.node._expr
                if isinstance(condition, torch.SymBool)
                else sympy.sympify(bool(condition))
            )
            exprs.append(plain(expr, rename))
            what.append(f"{mark['what']}: {mark['expr']}")
        elif (
            first in placeholders
            and isinstance(fx_node.meta["example_value"], (int, float, *SYMBOLIC))
            and first not in values
        ):
            text = {
                "aten.sym_size.int": "size()[{}]", "aten.sym_stride.int": "stride()[{}]",
                "aten.sym_storage_offset.default": "storage_offset()",
                "aten._local_scalar_dense.default": "item()",
            }[str(fx_node.target)]  # fmt: skip
            is_float = isinstance(fx_node.meta["example_value"], (float, torch.SymFloat))
            values[fx_node] = number(
                f"{placeholders[first]}.{text.format(*fx_node.args[1:])}", is_float=is_float
            )
        else:
            args = torch.fx.node.map_arg(fx_node.args, values.__getitem__)
            target = fx_node.target
            # The truth of a condition is the condition.
            values[fx_node] = args[0] if target is operator.truth else target(*args)
    return Facts(tuple(exprs), tuple(what))


# --- fresh inputs -----------------------------------------------------------------------------------


def fresh_inputs(frame: Frame) -> tuple[list[Any], Any]:
    """Fakes of the real inputs in a new environment that knows nothing of the old one.

    Every dim is dynamic and no two share a symbol. Returns the inputs and the environment.
    """
    env: Any = ShapeEnv(duck_shape=False)
    with env.ignore_fresh_unbacked_symbols():  # no operator binds those of inputs
        return _fresh_inputs(frame, env), env


def _fresh_inputs(frame: Frame, env: Any) -> list[Any]:
    mode: Any = FakeTensorMode(shape_env=env)
    made: list[Any] = [None] * len(frame.inputs)
    numbers: dict[str, Any] = {}
    rows = list(zip(frame.inputs, frame.fakes, frame.sources, frame.names, strict=True))
    for i, (real, old, source, name) in enumerate(rows):
        if not isinstance(old, torch.Tensor):
            continue
        dims = [_policy(n) for n in old.size()]
        context = StatelessSymbolicContext(dynamic_sizes=dims)
        real = real if isinstance(real, torch.Tensor) else torch.tensor(real)
        made[i] = mode.from_tensor(real, source=source, symbolic_context=context)
        if (memo := backed_memo(old)) is not None:
            made[i].item_memo = _fresh_item(env, memo, item_source(old, source))
        numbers.update(numbers_of(name, made[i]))
    for i, (real, old, source, name) in enumerate(rows):
        if isinstance(old, torch.Tensor):
            continue
        if name in numbers:
            made[i] = numbers[name]
        elif isinstance(old, torch.SymInt):
            made[i] = _fresh_int(env, real, source)
        else:
            made[i] = old
    return made


def _fresh_int(env: Any, value: int | None, source: Any) -> Any:
    if value is not None:
        return env.create_unspecified_symint_and_symbol(value, source, DimDynamic.DYNAMIC)
    made = env.create_unbacked_symint(source)
    env.unbacked_inputs.add(made.node.expr)
    return made


def _policy(size: Any) -> DimDynamic:
    hinted = not isinstance(size, torch.SymInt) or size.node.has_hint()
    return DimDynamic.DYNAMIC if hinted else DimDynamic.UNBACKED


def backed_memo(fake: Any) -> Any:
    """The example value of ``item()`` of an input, where Dynamo has made a symbol for it."""
    memo = getattr(fake, "item_memo", None)
    return memo.node.hint if isinstance(memo, SYMBOLIC) and memo.node.has_hint() else None


def _fresh_item(env: Any, value: float, source: Any) -> Any:
    symbol = env.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
    make = env.create_symfloatnode if isinstance(value, float) else env.create_symintnode
    return make(symbol, hint=value, source=source)


def item_source(fake: Any, source: Any) -> Any:
    """Where Dynamo says that a tensor's ``item()`` is: a Python float is a tensor in the graph."""
    is_float = isinstance(fake.item_memo, torch.SymFloat)
    return source if is_float else CallMethodItemSource(source)


def carried_inputs(frame: Frame) -> tuple[list[Any], Any]:
    """The frame's fakes taken over to a new environment, with their symbols' ranges."""
    mode: Any = FakeTensorMode(shape_env=ShapeEnv())
    return list(tfk.refakeify(list(frame.fakes), mode)), mode.shape_env


def state(env: Any) -> bytes:
    """All of an environment that a record has."""
    return tfk.dumps(tfk.snapshot(env))


def graph_rows(gm: torch.fx.GraphModule, *, named: bool = True) -> list[Any]:
    """Every node of a graph with its metadata; without names, by positions.

    A graph gives no name a second time, also where the first node that had it is gone.
    """
    at = {fx_node: i for i, fx_node in enumerate(gm.graph.nodes)}

    def row(fx_node: torch.fx.Node) -> Any:
        args: Any = torch.fx.node.map_arg((fx_node.args, fx_node.kwargs), lambda n: f"%{at[n]}")
        name = fx_node.name if named else at[fx_node]
        meta = (
            sorted(map(str, fx_node.meta)),
            fx_node.meta.get("custom"),
            fx_node.meta.get("stack_trace"),
        )
        return name, fx_node.op, str(fx_node.target), str(args), str(meta)

    return [row(fx_node) for fx_node in gm.graph.nodes]
