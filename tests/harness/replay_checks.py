"""What must hold of the guard nodes of one frame: laws 4 to 8 as functions."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import sympy
import torch
import z3
from guard_code import code_facts, equivalent_code
from guard_equivalence import Facts, Verdict, equivalent
from guard_terms import holds, python_function
from guard_z3 import Z3Terms
from replay_frames import (
    SYMBOLIC,
    Frame,
    backed_memo,
    by_inputs,
    carried_inputs,
    fresh_inputs,
    graph_rows,
    input_facts,
    item_source,
    node_facts,
    numbers_of,
    state,
)
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, compute_unbacked_bindings

import torch_fakeify as tfk
from torch_fakeify.replay.assert_nodes import insert_runtime_asserts
from torch_fakeify.replay.guard_nodes import insert_guards, learn, strip_guards
from torch_fakeify.replay.lowering import mark_of, value_of
from torch_fakeify.shape_env.rollback import checkpoint as tfk_checkpoint

if TYPE_CHECKING:
    from collections.abc import Sequence


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


def check_values(frame: Frame, tally: Tally) -> None:
    """The value of each inserted node is what its function gives for the values of its arguments."""
    insert(frame)
    for n in frame.gm.graph.nodes:
        found = value_of(n)
        if mark_of(n) is None or not isinstance(found, SYMBOLIC):
            continue
        with frame.env.suppress_guards():
            expected: Any = n.target(*map(value_of, n.args))
        assert type(found) is type(expected), n.format_node()
        assert found.node.pytype is expected.node.pytype, n.format_node()
        assert found.node.hint == expected.node.hint, n.format_node()
        assert found.node.expr in _written(expected.node.expr), n.format_node()
        tally["values compared"] += 1


def _written(expr: sympy.Basic) -> tuple[sympy.Basic, ...]:
    """An expression; a relation also from right to left: Python asks the symbol of ``4 >= s``."""
    return (expr, expr.reversed) if isinstance(expr, sympy.Rel) else (expr,)


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
        n.node.expr for v in frame.fakes for _, n in numbers_of("", v) if isinstance(n, SYMBOLIC)
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
                if backed_memo(value) is not None
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
