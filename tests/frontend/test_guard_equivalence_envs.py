"""Equivalence of the facts of two environments."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from equivalence_checks import facts, fakes
from guard_equivalence import (
    Facts,
    assert_equivalent,
    by_sources,
    equivalent,
    facts_of,
)
from torch._dynamo import config as dynamo_config
from torch._dynamo.source import LocalSource
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    _sympy_cast_symbool_to_symint_guardless,
)
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._sympy.singleton_int import SingletonInt


def named(shape_env: ShapeEnv, **kinds: bool) -> Facts:
    """Return the facts of an environment over its sources."""
    return facts_of(shape_env, by_sources(shape_env), **kinds)


def pair(second: bool, *, duck: bool = True) -> tuple[ShapeEnv, Any, Any]:
    """Return an environment with two inputs of one size, made in either order."""
    shape_env = ShapeEnv(duck_shape=duck)
    names = ("y", "x") if second else ("x", "y")
    made = fakes(shape_env, **{n: torch.zeros(8) for n in names})
    return shape_env, made["x"], made["y"]


def test_duck_shape_is_an_equality_of_sources() -> None:
    """One symbol for two sources is equivalent to two symbols and a guard."""
    duck, _, _ = pair(False)
    plain_env, x, y = pair(True, duck=False)
    verdict = equivalent(named(duck), named(plain_env))
    assert [d.what for d in verdict.lost] == ["duck shape"]
    assert str(verdict.lost[0]).startswith(
        "Eq(L['x'].size()[0], L['y'].size()[0]) (duck shape), not at L['x'].size()[0] = "
    )
    assert not verdict.new
    assert x.shape[0] == y.shape[0]
    assert assert_equivalent(named(duck), named(plain_env)).how == "proved"
    both = facts_of(duck), facts_of(plain_env)
    assert not equivalent(*both)  # their symbols have different names
    assert named(duck).hints == (("L['x'].size()[0]", 8),)


def _asked(question: Any, size: int = 8) -> tuple[Facts, Facts]:
    """Return the facts of an environment before and after a question."""
    shape_env = ShapeEnv(duck_shape=False)
    made = fakes(shape_env, x=torch.zeros(size, 6), y=torch.zeros(size * 6), z=torch.zeros(size))
    before = named(shape_env)
    assert question(made["x"].shape, made["y"].shape[0], made["z"].shape[0])
    return before, named(shape_env)


@pytest.mark.parametrize(
    ("question", "what"),
    [
        (lambda x, y, z: 2 * x[0] > 9, "guard"),
        (lambda x, y, z: x[0] * x[1] == y, "guard"),
        (lambda x, y, z: x[0] % 4 == 0, "guard"),
        (lambda x, y, z: x[0] // 3 == 2, "guard"),
        (lambda x, y, z: torch.sym_max(x[0], x[1]) > 7, "guard"),
        (lambda x, y, z: x[0] == z, "guard"),
        (lambda x, y, z: x[0] > 5, "range of"),
        (lambda x, y, z: x[0] == 8, "guard"),
    ],
)
def test_the_answer_to_a_question_is_a_fact(question: Any, what: str) -> None:
    """Without the guard, range, replacement or divisible expression the facts differ."""
    before, after = _asked(question)
    verdict = equivalent(after, before)
    assert verdict.how == "differs"
    assert not verdict.new
    assert any(d.what.startswith(what) for d in verdict.lost), verdict
    assert equivalent(after, _asked(question)[1]).how == "proved"


def test_facts_of_each_kind_are_found() -> None:
    """Kinds are guards, ranges, replacements, divisible expressions and runtime asserts."""
    shape_env = ShapeEnv(duck_shape=False)
    made = fakes(shape_env, x=torch.zeros(12, 6), y=torch.zeros(12))
    s, t = made["x"].shape
    assert s == made["y"].shape[0]
    assert s % 4 == 0
    assert s * t > 5
    u = shape_env.create_unbacked_symint()
    torch._check(u * u <= s)

    def kinds(**flags: bool) -> set[str]:
        return {w.split()[0] for w in facts_of(shape_env, **flags).what}

    assert kinds() == {"guard", "range"}  # the other kinds follow from these
    assert kinds(asserts=True) == {"guard", "range", "runtime"}
    shape_env.guards.clear()
    assert kinds() == {"range", "replacement", "divisible"}


def test_numbers_of_the_inputs_are_facts() -> None:
    """Sizes and strides equal their expressions; constants of tensors are facts on request."""
    shape_env = ShapeEnv()
    x = fakes(shape_env, x=torch.zeros(5, 7))["x"]
    inputs = [(LocalSource("x"), x), ("L['n']", 3), ("L['m']", x.shape[0] + 1), ("L['f']", 1.5)]
    found = facts_of(shape_env, by_sources(shape_env, inputs=inputs))
    texts = [str(e) for e, w in zip(found.exprs, found.what, strict=True) if w == "input"]
    assert texts == [
        "Eq(L['x'].stride()[0], L['x'].size()[1])",
        "Eq(L['n'], 3)",
        "Eq(L['m'], L['x'].size()[0] + 1)",
        "Eq(L['f'], 1.5)",
    ]
    static = facts_of(shape_env, by_sources(shape_env, inputs=inputs, static=True))
    more = sorted(str(e) for e in set(static.exprs) - set(found.exprs))
    assert more == ["Eq(L['x'].storage_offset(), 0)", "Eq(L['x'].stride()[1], 1)"]


def test_inner_tensors_of_a_subclass_are_inputs() -> None:
    """Sizes of inner tensors are named by the path to them."""
    shape_env = ShapeEnv()
    two = fakes(shape_env, x=TwoTensor(torch.zeros(5, 7), torch.zeros(5, 7)))["x"]
    naming = by_sources(shape_env, inputs=[(LocalSource("x"), two)])
    texts = {str(e) for w, e in naming.equalities if w == "input"}
    assert "Eq(L['x'].b.stride()[0], L['x'].size()[1])" in texts


def test_ephemeral_sources_are_no_variables() -> None:
    """A symbol with only an ephemeral source has its own name, as an unbacked one has."""
    from torch._dynamo.source import EphemeralSource

    shape_env = ShapeEnv()
    symbol = shape_env.create_symbol(7, EphemeralSource("base"), DimDynamic.DYNAMIC)
    shape_env.create_unbacked_symint()
    naming = by_sources(shape_env)
    assert symbol not in naming
    assert {str(s) for e in facts_of(shape_env, naming).exprs for s in e.free_symbols} == {
        str(symbol)
    }


def test_unbacked_symbols_have_their_own_names() -> None:
    """Ranges of unbacked symbols are facts, and a size-like one may be 0."""
    a, b = ShapeEnv(), ShapeEnv()
    for shape_env, low, high in ((a, 0, 9), (b, 2, 8)):
        u = shape_env.create_unbacked_symint()
        torch._check(u >= low)
        torch._check(u <= high)
    verdict = equivalent(named(a), named(b))
    assert [str(d.fact) for d in verdict.new] == ["2 <= u0", "u0 <= 8"]
    assert not verdict.lost


def test_runtime_asserts_are_compared_on_request() -> None:
    """An assert on an unbacked symbol that the other side lacks is lost."""
    a, b = ShapeEnv(), ShapeEnv()
    for shape_env in (a, b):
        u, v = shape_env.create_unbacked_symint(), shape_env.create_unbacked_symint()
        if shape_env is a:
            torch._check(u * v == 12)
    assert assert_equivalent(named(a), named(b)).how == "proved"
    verdict = equivalent(named(a, asserts=True), named(b, asserts=True))
    assert [d.what for d in verdict.lost] == ["runtime assert"]


def test_bools_are_zero_or_one() -> None:
    """A condition that is used as a number is 0 or 1."""

    def env(answer: bool) -> Facts:
        shape_env = ShapeEnv()
        x = fakes(shape_env, x=torch.zeros(8 if answer else 3))["x"]
        condition = (x.shape[0] > 5).node.expr
        number = _sympy_cast_symbool_to_symint_guardless(condition)
        assert shape_env.create_symintnode(number, hint=int(answer)) == int(answer)
        return named(shape_env)

    (fact,) = (e for e in env(True).exprs if e.has(sympy.Piecewise))
    size = next(iter(fact.free_symbols))
    assert equivalent(facts(fact), facts(size > 5)).how == "proved"
    verdict = equivalent(env(True), env(False))
    assert verdict.lost
    assert verdict.new


def test_nested_ints_are_distinct_constants() -> None:
    """A replacement by one of them differs from one by another, by a multiple, or by a size."""

    def env(value: Any) -> Facts:
        shape_env = ShapeEnv()
        fakes(shape_env, x=torch.zeros(8))
        (symbol,) = shape_env.var_to_range
        shape_env.replacements[symbol] = value
        return facts_of(shape_env)

    three = env(SingletonInt(3))
    assert assert_equivalent(three, env(SingletonInt(3))).how == "proved"
    for other in (SingletonInt(4), SingletonInt(3, coeff=2), sympy.Integer(8)):
        assert equivalent(three, env(other)).how == "differs"


def test_the_exclusion_guard_is_a_fact_where_torch_writes_it() -> None:
    """The setting must be on, and an example value must differ from the excluded one."""
    shape_env = ShapeEnv()
    fakes(shape_env, x=torch.zeros(8, 6))
    symbols = list(shape_env.var_to_range)
    shape_env.exclusion_constraints = [(symbols[0], 4), (symbols[1], 6)]
    assert "exclusion" not in named(shape_env).what
    with dynamo_config.patch(automatic_dynamic_exclusion_guard=True):
        (excluded,) = (e for e, w in zip(*named(shape_env)[:2], strict=True) if w == "exclusion")
        x0, x1 = (by_sources(shape_env)[s] for s in symbols)
        assert equivalent(facts(excluded), facts(sympy.Ne(x0, 4) | sympy.Ne(x1, 6))).how == "proved"
        shape_env.exclusion_constraints = [(symbols[0], 8), (symbols[1], 6)]
        assert "exclusion" not in named(shape_env).what
