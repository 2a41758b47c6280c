"""`entails` and `why`: which facts of a live ``ShapeEnv`` count, and what follows from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import sympy
import torch
from fact_values import implied
from hypothesis import given, settings
from hypothesis import strategies as st
from test_operator_facts import fake_of
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import IntTrueDiv

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Callable


def unbacked(env: ShapeEnv, count: int) -> list[Any]:
    """Return new unbacked integers of an environment."""
    return [env.create_unbacked_symint() for _ in range(count)]


def sizes(env: ShapeEnv, *shape: int) -> list[Any]:
    """Return the sizes of a fake tensor whose dims are dynamic and distinct."""
    return list(fake_of(torch.empty(shape), env)[0].shape)


def facts_of(env: ShapeEnv, condition: Any) -> list[tuple[str, str]]:
    """Return origin and text of the facts that `why` gives."""
    found = tfk.why(env, condition)
    assert found is not None
    return [(fact.origin, fact.text) for fact in found]


def chain() -> tuple[ShapeEnv, Any]:
    """``u <= v <= s``, asked ``u <= s``."""
    env = ShapeEnv()
    (s,) = sizes(env, 8)
    u, v = unbacked(env, 2)
    torch._check(u <= v)
    torch._check(v <= s)
    return env, u <= s


def divisor() -> tuple[ShapeEnv, Any]:
    """``u % 8 == 0``, asked ``u % 4 == 0``."""
    env = ShapeEnv()
    (u,) = unbacked(env, 1)
    torch._check(u % 8 == 0)
    return env, u % 4 == 0


def maximum() -> tuple[ShapeEnv, Any]:
    """No facts, asked ``max(u, v) >= u``."""
    env = ShapeEnv()
    u, v = unbacked(env, 2)
    return env, torch.sym_max(u, v) >= u


def twice() -> tuple[ShapeEnv, Any]:
    """``2*u <= s`` and ``u >= 0``, asked ``u <= s``."""
    env = ShapeEnv()
    (s,) = sizes(env, 8)
    (u,) = unbacked(env, 1)
    torch._check(2 * u <= s)
    torch._check(u >= 0)
    return env, u <= s


@pytest.mark.parametrize("made", [chain, divisor, maximum, twice])
def test_what_one_step_of_arithmetic_gives_is_answered(
    made: Callable[[], tuple[ShapeEnv, Any]],
) -> None:
    """Conditions about which torch raises a data-dependent error follow, and their negations do not."""
    env, condition = made()
    assert env._maybe_evaluate_static(condition.node.expr) is None
    assert tfk.entails(env, condition) is True
    assert tfk.entails(env, sympy.Not(condition.node.expr)) is False


def test_a_fact_counts_from_the_moment_at_which_it_is_stated() -> None:
    """The same question has no answer before the runtime assert and one after it."""
    env = ShapeEnv()
    u, v = unbacked(env, 2)
    torch._check(u <= v)
    assert tfk.entails(env, u <= v + 1) is True
    assert tfk.entails(env, u <= 20) is None
    torch._check(v <= 16)
    assert tfk.entails(env, u <= 20) is True


def test_a_hint_is_no_fact() -> None:
    """The size of the example decides nothing, although torch would guard on it."""
    env = ShapeEnv()
    (s,) = sizes(env, 8)
    assert tfk.entails(env, s == 8) is None
    assert tfk.entails(env, s <= 100) is None


def test_a_size_like_symbol_may_be_zero_or_one() -> None:
    """What torch assumes in size-oblivious questions is not a fact."""
    env = ShapeEnv()
    (u,) = unbacked(env, 1)
    env._constrain_range_for_size(u.node.expr)
    assert u.node.expr in env.size_like
    assert tfk.entails(env, u >= 0) is True
    assert tfk.entails(env, u >= 1) is None
    assert tfk.entails(env, u != 1) is None


def test_a_range_is_a_fact() -> None:
    """Both bounds of a value range."""
    env = ShapeEnv()
    (u,) = unbacked(env, 1)
    env.constrain_symbol_range(u.node.expr, compiler_min=3, compiler_max=7)
    assert facts_of(env, u >= 2) == [("range", "u0 >= 3")]
    assert facts_of(env, u > 8) == [("range", "u0 <= 7")]


def test_a_replacement_is_a_fact() -> None:
    """A symbol that torch replaced equals its replacement."""
    env = ShapeEnv()
    (s,) = sizes(env, 8)
    (u,) = unbacked(env, 1)
    raw = u.node.expr
    torch._check(u == 2 * s)
    assert u.node.expr == 2 * s.node.expr
    assert ("replacement", f"u0 == 2*{s}") in facts_of(env, raw >= s.node.expr)


def test_a_guard_is_a_fact() -> None:
    """What a branch took for granted holds for later questions."""
    env = ShapeEnv()
    s, t, r = sizes(env, 5, 6, 7)
    assert s < t
    assert t < r
    found = tfk.why(env, s + 2 <= r)
    assert found is not None
    assert [fact.origin for fact in found] == ["guard", "guard"]


def test_divisibility_is_a_fact() -> None:
    """A multiple of 8 that a guard made known is a multiple of 4."""
    env = ShapeEnv()
    (s,) = sizes(env, 16)
    assert s % 8 == 0
    env.guards.clear()  # the set of divisible expressions alone
    assert env.divisible
    assert [origin for origin, _ in facts_of(env, s % 4 == 0)] == ["divisible"]


def test_facts_that_are_rolled_back_are_forgotten() -> None:
    """A rollback removes the facts since its checkpoint, also for a symbol with the same name."""
    env = ShapeEnv()
    (u,) = unbacked(env, 1)
    point = tfk.checkpoint(env)
    (v,) = unbacked(env, 1)
    torch._check(u <= v)
    torch._check(v <= 5)
    assert tfk.entails(env, u <= 5) is True
    point.rollback()
    (v,) = unbacked(env, 1)
    assert str(v) == "u1"
    assert tfk.entails(env, u <= v) is None
    assert tfk.entails(env, u <= 5) is None


def test_a_range_that_was_widened_back_counts_no_more() -> None:
    """The range of before a rollback is the fact again."""
    env = ShapeEnv()
    (u,) = unbacked(env, 1)
    with tfk.checkpoint(env) as point:
        torch._check(u <= 5)
        assert tfk.entails(env, u <= 6) is True
        point.rollback()
    assert tfk.entails(env, u <= 6) is None


def test_a_question_changes_nothing() -> None:
    """The environment is the same after questions, its version counters included."""
    env, condition = chain()
    before = tfk.snapshot(env), env._version_counter, env._replacements_version_counter
    tfk.entails(env, condition)
    tfk.why(env, condition)
    assert (tfk.snapshot(env), env._version_counter, env._replacements_version_counter) == before


def test_floats_are_not_decided() -> None:
    """Over the real numbers it would follow, but floats round."""
    env = ShapeEnv()
    z = env.create_unbacked_symfloat()
    torch._check(z <= 1.0)
    assert tfk.entails(env, z <= 2.0) is None
    (u,) = unbacked(env, 1)
    torch._check(u <= 3)
    assert tfk.entails(env, sympy.Le(u.node.expr, sympy.Float(3.5))) is None
    quotient = IntTrueDiv(u.node.expr, 3)
    assert tfk.entails(env, sympy.Le(quotient, quotient + 1, evaluate=False)) is None


def test_constants_need_no_facts() -> None:
    """Plain truth values are their own answers."""
    env = ShapeEnv()
    assert tfk.entails(env, True) is True
    assert tfk.entails(env, sympy.false) is False
    assert tfk.why(env, True) == []


def test_what_is_no_condition_is_refused() -> None:
    """Numbers, other environments and other objects raise `ShapeEnvError`."""
    env = ShapeEnv()
    (u,) = unbacked(env, 1)
    with pytest.raises(tfk.ShapeEnvError, match="not a condition"):
        tfk.entails(env, u.node.expr)
    with pytest.raises(tfk.ShapeEnvError, match="another ShapeEnv"):
        tfk.entails(ShapeEnv(), u >= 0)
    with pytest.raises(tfk.ShapeEnvError, match="not a shape environment"):
        tfk.why(None, u >= 0)


def test_why_has_the_lines_of_the_user() -> None:
    """A runtime assert that Python itself stated has its file and line."""
    env = ShapeEnv()
    u, v = unbacked(env, 2)
    torch._check(u <= v)
    found = tfk.why(env, u <= v + 1)
    assert found is not None
    (fact,) = found
    assert fact.line is not None
    assert fact.line.startswith(f"{__file__}:")
    assert str(fact) == f"u0 <= u1  (runtime assert)  # {fact.line}"


def test_why_is_none_where_nothing_follows() -> None:
    """There are no reasons for an open question."""
    env = ShapeEnv()
    (u,) = unbacked(env, 1)
    assert tfk.why(env, u <= 3) is None


@given(st.data())
@settings(max_examples=15)
def test_why_is_minimal_and_enough(data: st.DataObject) -> None:
    """From the facts alone the condition follows again, and from no smaller set of them."""
    env = ShapeEnv()
    us = unbacked(env, 4)
    number = st.integers(0, 3)
    pair = st.lists(number, min_size=2, max_size=2, unique=True).map(sorted)
    for _ in range(data.draw(st.integers(1, 7))):
        low, high = data.draw(pair)
        torch._check(us[low] + data.draw(number) <= us[high])
    a, b = (us[at] for at in data.draw(pair))
    condition = sympy.Le(a.node.expr, b.node.expr + 1, evaluate=False)
    found = tfk.why(env, condition)
    if found is None:
        return
    exprs = [fact.expr for fact in found]
    assert implied(exprs, condition)
    for at in range(len(exprs)):
        assert not implied(exprs[:at] + exprs[at + 1 :], condition)
