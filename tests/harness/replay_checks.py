"""What must hold of the guard nodes of one frame: laws 4 to 8 as functions.

The numbers of a frame's inputs are the variables: ``L['x'].size()[0]``. So environments that name
their symbols otherwise are compared by what they say of the same inputs.
"""

from __future__ import annotations

import operator
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import sympy
import torch
import z3
from guard_code import code_facts, equivalent_code
from guard_equivalence import Facts, Naming, Verdict, equivalent, facts_of
from guard_terms import Z3Terms, holds, plain, python_function, variable
from torch._dynamo.source import CallMethodItemSource, ConstantSource
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    compute_unbacked_bindings,
)

import torch_fakeify as tfk
from torch_fakeify.encoding.sources import source_of
from torch_fakeify.replay.assert_nodes import insert_runtime_asserts
from torch_fakeify.replay.guard_nodes import insert_guards, learn, strip_guards
from torch_fakeify.replay.lowering import mark_of
from torch_fakeify.shape_env.rollback import checkpoint as tfk_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_ASSERT = torch.ops.aten._assert_scalar.default
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


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
        real = tuple(i.node.hint if isinstance(i, _SYMBOLIC) else i for i in inputs)
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
        expr = number.node._expr if isinstance(number, _SYMBOLIC) else sympy.sympify(number)
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
            and isinstance(fx_node.meta["example_value"], (int, float, *_SYMBOLIC))
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
        if (memo := _backed_memo(old)) is not None:
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


def _backed_memo(fake: Any) -> Any:
    """The example value of ``item()`` of an input, where Dynamo has made a symbol for it."""
    memo = getattr(fake, "item_memo", None)
    return memo.node.hint if isinstance(memo, _SYMBOLIC) and memo.node.has_hint() else None


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


# --- laws -------------------------------------------------------------------------------------------


class Tally(Counter[str]):
    """How many of what a run of the tests has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def verdict(self, about: str, verdict: Verdict) -> None:
        """Count a verdict, or fail on it.

        Raises:
            AssertionError: the facts are not the same.
        """
        self[f"{about}: {verdict.how}"] += 1
        if verdict.how == "sampled":
            self.notes += verdict.open
        if not verdict:
            raise AssertionError(f"{about}: {verdict}")


def insert(frame: Frame) -> Facts:
    """Insert all facts of a frame, the static sizes too; what the nodes say.

    Raises:
        AssertionError: the environment is not what it was, or a fact of the inputs was left out.
    """
    before, version = state(frame.env), frame.env._version_counter
    done = insert_guards(frame.gm, frame.env, static=True)
    assert state(frame.env) == before
    assert frame.env._version_counter == version
    facts = node_facts(frame.gm, frame.names)
    assert len(facts.exprs) == len(done.inserted)
    return facts


def check_insert(frame: Frame, tally: Tally) -> None:
    """Insert twice is insert once, and strip gives the graph back; law 5 for the nodes alone."""
    rows = graph_rows(frame.gm)
    facts = insert(frame)
    once = graph_rows(frame.gm, named=False)
    insert(frame)
    assert graph_rows(frame.gm, named=False) == once
    frame.gm.graph.lint()
    strip_guards(frame.gm)
    assert graph_rows(frame.gm) == rows
    original, other = input_facts(frame.env, frame.names, frame.fakes)
    tally.verdict("nodes", equivalent(original, facts))
    tally["facts inserted"] += len(facts.exprs)
    tally["facts about other than inputs"] += len(other)


def check_learn(frame: Frame, tally: Tally) -> None:
    """Laws 4, 5 and 7: learn from the nodes alone, go back, and from a record of what was learned."""
    insert(frame)
    original, _ = input_facts(frame.env, frame.names, frame.fakes)
    for about, make in (("carried", carried_inputs), ("fresh", fresh_inputs)):
        fakes, env = make(frame)
        before = state(env)
        with suppress(_Back), tfk_checkpoint(env):
            learn(frame.gm, fakes)
            raise _Back
        assert state(env) == before
        learn(frame.gm, fakes)
        learned, other = input_facts(env, frame.names, fakes)
        tally.verdict(about, equivalent(original, learned))
        assert not [text for text in other if "L[" in text]
        assert same_ranges(frame, fakes, env), "the ranges differ"
        recorded = state(env)
        assert state(tfk.restore(tfk.loads(recorded))) == recorded
        guards = [guard.expr for guard in env.guards]
        learn(frame.gm, fakes)
        assert [guard.expr for guard in env.guards] == guards
    strip_guards(frame.gm)


class _Back(Exception):
    """Out of a ``with`` statement."""


def same_ranges(frame: Frame, fakes: Sequence[Any], env: Any) -> bool:
    """Whether each number of the inputs has the range that it had, or one that is tighter."""
    pairs = zip(frame.names, frame.fakes, fakes, strict=True)
    for name, old, new in pairs:
        for (_, one), (_, two) in zip(numbers_of(name, old), numbers_of(name, new), strict=True):
            if not isinstance(one, torch.SymInt):
                continue
            theirs = frame.env.bound_sympy(one.node.expr)
            ours = env.bound_sympy(
                sympy.sympify(two.node.expr if isinstance(two, torch.SymInt) else two)
            )
            if not ours.issubset(theirs):
                return False
    return True


def check_code(frame: Frame, tally: Tally) -> None:
    """Law 5 for the Python code that ``produce_guards`` writes."""
    known = by_inputs(frame.env, frame.names, frame.fakes).keys()
    asked = [guard.expr for guard in frame.env.guards] + list(frame.env.replacements)
    asked += [symbol for symbol, _ in frame.env.exclusion_constraints]
    asked += [
        n.node.expr for v in frame.fakes for _, n in numbers_of("", v) if isinstance(n, _SYMBOLIC)
    ]
    if not all(expr.free_symbols <= known for expr in asked):
        tally["code: about more than the graph's inputs"] += 1
        return
    insert(frame)
    results = []
    fakes, env = fresh_inputs(frame)
    learn(frame.gm, fakes)
    strip_guards(frame.gm)
    for shape_env, values in ((frame.env, frame.fakes), (env, fakes)):
        with tfk_checkpoint(shape_env) as point:
            items = [
                (value.item_memo, item_source(value, source))
                for value, source in zip(values, frame.sources, strict=True)
                if _backed_memo(value) is not None
            ]
            results.append(
                code_facts(
                    shape_env,
                    [*values, *(value for value, _ in items)],
                    [*frame.sources, *(source for _, source in items)],
                    ignore_static=False,
                )
            )
            point.rollback()
    tally.verdict("code", equivalent_code(*results))


def check_minimal(frame: Frame, tally: Tally) -> None:
    """No inserted condition follows from the others, unless that is hard to see."""
    facts = insert(frame)
    strip_guards(frame.gm)
    terms = Z3Terms()
    solver = z3.Solver()
    solver.set("timeout", 500)
    flags = [z3.Bool(f"fact {i}") for i in range(len(facts.exprs))]
    conditions = [terms.fact(expr) for expr in facts.exprs]
    for flag, condition in zip(flags, conditions, strict=True):
        solver.add(z3.Implies(flag, condition))
    for i, (what, condition) in enumerate(zip(facts.what, conditions, strict=True)):
        if z3.is_true(z3.simplify(condition)):
            tally["minimal: two inputs with one source"] += 1
            continue
        others = [flag for j, flag in enumerate(flags) if j != i]
        found = solver.check(z3.Not(condition), *others)
        kind = what.split(":")[0]
        if found == z3.sat:
            tally["minimal: needed"] += 1
        elif found == z3.unknown:
            tally["minimal: undecided"] += 1
        else:
            tally[f"minimal: {kind} that z3 finds in the others"] += 1
            tally.notes.append(what)


def check_fingerprint(frame: Frame, tally: Tally) -> None:
    """Law 6: an instance captured again is the same; so is one of a file."""
    for with_guards in (False, True):
        if with_guards:
            insert(frame)
        captured = tfk.capture(frame.gm, frame.example_inputs)
        instance = captured.instantiate()
        with instance.active():
            again = tfk.capture(instance.gm, instance.inputs)
        assert again.fingerprint() == captured.fingerprint()
        marks = [mark_of(fx_node) for fx_node in frame.gm.graph.nodes]
        assert [mark_of(fx_node) for fx_node in instance.gm.graph.nodes] == marks
        if with_guards:
            check_instance(instance, tally)
    strip_guards(frame.gm)


def check_instance(instance: Any, tally: Tally) -> None:
    """Law 5 for a capture: a new environment learns from the recorded nodes what was recorded."""
    mode: Any = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes = list(tfk.refakeify(list(instance.inputs), mode))
    learn(instance.gm, fakes)
    names = [f"inputs[{p.name!r}]" for p in instance.gm.graph.find_nodes(op="placeholder")]
    recorded, _ = input_facts(instance.shape_env, names, instance.inputs)
    learned, _ = input_facts(mode.shape_env, names, fakes)
    tally.verdict("from a capture", equivalent(recorded, learned))


class _Retrace(torch.fx.Interpreter):
    """Runs a graph on fakes and notes where unbacked symbols get bound."""

    def __init__(self, gm: torch.fx.GraphModule, env: Any) -> None:
        super().__init__(gm)
        self.shape_env = env
        self.bound: dict[torch.fx.Node, Any] = {}
        self.symbols: set[Any] = set()

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run it; a symbol that it made and that its value does not have is an error of torch."""
        value = super().run_node(n)
        if n.op != "placeholder":
            bindings = compute_unbacked_bindings(self.shape_env, value)
            if bindings:
                self.bound[n] = value
                self.symbols |= set(bindings)
        return value


def check_retrace(frame: Frame, tally: Tally) -> None:
    """Law 8: a retrace has as many unbacked symbols, all bound, under the same runtime asserts."""
    rows = graph_rows(frame.gm)
    insert(frame)
    before = state(frame.env)
    insert_runtime_asserts(frame.gm, frame.env)
    assert state(frame.env) == before
    once = graph_rows(frame.gm, named=False)
    insert_runtime_asserts(frame.gm, frame.env)
    assert graph_rows(frame.gm, named=False) == once
    frame.gm.graph.lint()
    binding = [
        n for n in frame.gm.graph.nodes if n.meta.get("unbacked_bindings") and n.op != "placeholder"
    ]
    symbols = {symbol for n in binding for symbol in n.meta["unbacked_bindings"]}
    for about, make in (("carried", carried_inputs), ("fresh", fresh_inputs)):
        fakes, env = make(frame)
        learn(frame.gm, fakes)
        retrace = _Retrace(frame.gm, env)
        with fake_mode_of(fakes, env), tracing(TracingContext(None)):
            retrace.run(*fakes)
        assert list(retrace.bound) == binding
        assert len(retrace.symbols) == len(symbols)
        names = [*frame.names, *(f"nodes[{n.name!r}]" for n in binding)]
        theirs = [*frame.fakes, *(n.meta["example_value"] for n in binding)]
        ours = [*fakes, *retrace.bound.values()]
        original, _ = input_facts(frame.env, names, theirs, asserts=True)
        again, _ = input_facts(env, names, ours, asserts=True)
        verdict = equivalent(original, again)
        # An operator gives a symbol the range that its inputs have by then.
        tighter = [d for d in verdict.new if d.what.startswith("range of u")]
        if tighter and len(tighter) == len(verdict.new) and not verdict.lost:
            tally[f"retrace, {about}: ranges are tighter"] += 1
        else:
            tally.verdict(f"retrace, {about}", verdict)
        tally["unbacked symbols"] += len(symbols)
    strip_guards(frame.gm)
    assert graph_rows(frame.gm) == rows


def fake_mode_of(fakes: Sequence[Any], env: Any) -> Any:
    """The mode of some fakes."""
    modes = [fake.fake_mode for fake in fakes if isinstance(fake, torch.Tensor)]
    return modes[0] if modes else FakeTensorMode(shape_env=env)


def check_run(
    frame: Frame, args: dict[str, Any], tally: Tally, others: Sequence[dict[str, Any]]
) -> None:
    """The graph runs on what its guards accept, and names the guard that does not hold."""
    first = real_inputs(frame, args)
    if first is None or not all(map(_same, first, frame.inputs)):
        return  # a frame after another one, whose inputs are not the program's
    expected = [frame.gm.forward(*first)]
    facts = insert(frame)
    tests = [python_function(expr) for expr in facts.exprs]
    _assert_same(frame.gm.forward(*first), expected[0])
    for other in others:
        values = real_inputs(frame, other)
        assert values is not None
        point = {
            k: v
            for n, value in zip(frame.names, values, strict=True)
            for k, v in numbers_of(n, value)
        }
        point |= {
            f"{n}.item()": v.item()
            for n, v in zip(frame.names, values, strict=True)
            if isinstance(v, torch.Tensor) and v.numel() == 1
        }
        broken = [
            what for what, test in zip(facts.what, tests, strict=True) if not holds(test, point)
        ]
        error = ""
        try:
            frame.gm.forward(*values)
        except (RuntimeError, AssertionError) as raised:
            error = str(raised)
        if broken:
            assert error == f"the graph assumes {broken[0].split(': ', 1)[1]}", (error, broken)
            tally["run: refused"] += 1
        else:
            assert not error or error.startswith("Runtime assertion failed"), (error, point)
            tally["run: accepted"] += 1
    strip_guards(frame.gm)


def real_inputs(frame: Frame, args: dict[str, Any]) -> list[Any] | None:
    """The inputs of a frame for arguments of the program, by their sources."""
    made: list[Any] = []
    for name, fake in zip(frame.names, frame.fakes, strict=True):
        try:
            value = eval(name, {"L": args})
        except (KeyError, NameError, SyntaxError):
            return None
        as_tensor = isinstance(fake, torch.Tensor) and not isinstance(value, torch.Tensor)
        made.append(torch.tensor(value, dtype=fake.dtype) if as_tensor else value)
    return made


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.size() == b.size() and a.stride() == b.stride() and torch.equal(a, b)
    return type(a) is type(b) and a == b


def _assert_same(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    assert all(map(_same, ours, theirs))
    assert len(ours) == len(theirs)
