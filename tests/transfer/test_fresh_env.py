"""``FreshEnv.copy_facts``: a new ``ShapeEnv`` has the facts of another and is independent."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from sympy.core.cache import clear_cache
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.source import LocalSource
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils._sympy.functions import FloorDiv, Mod

import torch_fakeify as tfk
from torch_fakeify.transfer.fresh_env import FreshEnv

SHAPED = (
    "replacements",
    "divisible",
    "axioms",
    "var_to_range",
    "guards",
    "num_deferred_runtime_asserts",
    "backed_var_to_val",
    "size_like",
    "var_to_sources",
)
"""Attributes that are the same under the same names."""


def env_with_facts(shift: int = 0) -> Any:
    """Return an environment with facts of each kind; unbacked symbols start at ``shift``."""
    env = ShapeEnv(duck_shape=False)
    env.unbacked_symint_counter = shift
    mode = FakeTensorMode(shape_env=env)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 4)
    x = mode.from_tensor(
        torch.empty(8, 12, 24, 7), source=LocalSource("x"), symbolic_context=context
    )
    a, b, c, d = x.size()
    assert a * 3 == c
    assert b % 4 == 0
    assert d <= 40
    assert a * b * d > 100
    with env.ignore_fresh_unbacked_symbols():
        u = env.create_unbacked_symint()
    torch._check(u <= 2 * d, lambda: "not too many")
    torch._check(u >= 3)
    env._constrain_range_for_size(u.node.expr)
    return env


def copied(env: Any) -> FreshEnv:
    """Return a new environment with copied facts."""
    fresh = FreshEnv(env)
    fresh.copy_facts()
    return fresh


def test_all_facts_are_copied() -> None:
    """Locations and messages are equal, and questions have the same answers and guards."""
    env = env_with_facts()
    fresh = copied(env)
    made = fresh.env
    assert not fresh.has_other_names
    for name in SHAPED:
        assert getattr(made, name) == getattr(env, name), name
        assert getattr(env, name), name
    assert made.replacements_slocs == env.replacements_slocs
    assert {s: (at.lower, at.upper) for s, at in made.var_to_range_sloc.items()} == {
        s: (at.lower, at.upper) for s, at in env.var_to_range_sloc.items()
    }
    groups, ours = env.deferred_runtime_asserts, made.deferred_runtime_asserts
    assert {s: [(one.expr, one.msg) for one in group] for s, group in ours.items()} == {
        s: [(one.expr, one.msg) for one in group] for s, group in groups.items()
    }
    b = next(s for s, n in made.backed_var_to_val.items() if n == 12)
    for question in (sympy.Eq(Mod(b, 4), 0), sympy.Ge(FloorDiv(b, 4), 1), sympy.Le(b, 50)):
        assert made.evaluate_expr(question) == env.evaluate_expr(question)
    assert [guard.expr for guard in made.guards] == [guard.expr for guard in env.guards]


def test_symbols_are_the_same_objects() -> None:
    """Torch compares expressions often, and a comparison by identity is faster."""
    env = env_with_facts()
    clear_cache()  # otherwise sympy's cache may return the same objects
    made = copied(env).env
    for name in ("var_to_range", "backed_var_to_val", "var_to_sources", "var_to_stack"):
        theirs, ours = getattr(env, name), getattr(made, name)
        assert list(map(id, ours)) == list(map(id, theirs)), name


def test_the_environments_are_independent() -> None:
    """New facts and removed stacks of one do not show in the other."""
    env = env_with_facts()
    made = copied(env).env
    places = {s: (at.lower, at.upper) for s, at in env.var_to_range_sloc.items()}
    stacks = [
        one.stack.format() for group in env.deferred_runtime_asserts.values() for one in group
    ]
    symbol = next(s for s, n in made.backed_var_to_val.items() if n == 7)
    before = {name: len(getattr(env, name)) for name in ("guards", "axioms", "divisible")}
    assert made.evaluate_expr(sympy.Ge(symbol, 5)) == sympy.true
    made.guard_or_defer_runtime_assert(sympy.Ne(next(iter(made.deferred_runtime_asserts)), 9), "")
    made.cleanup()
    assert made.var_to_range[symbol] != env.var_to_range[symbol]
    assert {name: len(getattr(env, name)) for name in before} == before
    assert {s: (at.lower, at.upper) for s, at in env.var_to_range_sloc.items()} == places
    assert stacks == [
        one.stack.format() for group in env.deferred_runtime_asserts.values() for one in group
    ]
    assert env.num_deferred_runtime_asserts < made.num_deferred_runtime_asserts


def test_facts_are_copied_under_other_names() -> None:
    """Unbacked symbols are numbered from zero in the new environment."""
    env = env_with_facts(shift=5)
    fresh = copied(env)
    assert fresh.has_other_names
    same = env_with_facts()
    for name in ("replacements", "divisible", "axioms", "var_to_range"):
        assert getattr(fresh.env, name) == getattr(same, name), name
    assert [
        (str(s), [str(one.expr) for one in group])
        for s, group in fresh.env.deferred_runtime_asserts.items()
    ] == [
        (str(s), [str(one.expr) for one in group])
        for s, group in same.deferred_runtime_asserts.items()
    ]


def test_replacements_apply_at_once() -> None:
    """A size over a replaced symbol has the replacement as its expression."""
    env = env_with_facts()
    fresh = copied(env)
    (replaced, expr) = next(iter(env.replacements.items()))
    size = fresh.env.create_symintnode(replaced, hint=int(env.backed_var_to_val[replaced]))
    assert size.node.expr == env.replace(expr)


@pytest.mark.parametrize("unbacked", [False, True], ids=["backed", "unbacked"])
def test_a_backend_gets_dynamos_own_expressions(unbacked: bool) -> None:
    """The expressions of inputs and of node values are the same objects."""
    seen: list[bool] = []
    outer: list[Any] = []

    def inner(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        values = [fx_node.meta.get("example_value") for fx_node in gm.graph.nodes]
        ids = {id(expr) for expr in outer}
        seen.extend(
            id(n.node._expr) in ids
            for value in (*inputs, *values)
            if isinstance(value, torch.Tensor)
            for n in value.size()
            if isinstance(n, torch.SymInt)
        )
        return gm.forward

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        assert TracingContext.get().fake_mode is not None
        outer.extend(
            n.node.expr
            for fx_node in gm.graph.nodes
            for value in [fx_node.meta.get("example_value")]
            if isinstance(value, torch.Tensor)
            for n in value.size()
            if isinstance(n, torch.SymInt)
        )
        return tfk.handoff(inner)(gm, inputs)

    x = torch.zeros(6, 5)
    if unbacked:
        mark_unbacked(x, 0)
    else:
        torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.reset()
    torch.compile(lambda x: torch.cat([x, x * 2, x + 1]) + 1, backend=backend)(x)
    assert len(seen) >= 5
    assert all(seen)
