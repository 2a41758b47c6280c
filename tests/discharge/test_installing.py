"""`entailment`: what a ``ShapeEnv`` answers with it, and that torch is as before without it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import fresh
from test_questions import chain, sizes, unbacked
from torch.fx.experimental import _config as shape_config
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    ShapeEnv,
    guard_or_false,
    guard_or_true,
    statically_known_true,
)

import torch_fakeify as tfk
from torch_fakeify.discharge.known_facts import knowledge_of

if TYPE_CHECKING:
    from collections.abc import Generator


@pytest.fixture(autouse=True)
def as_before() -> Generator[None, None, None]:
    """Fail if a test leaves the methods of ``ShapeEnv`` changed."""
    before = dict(vars(ShapeEnv))
    yield
    tfk.entailment.uninstall()
    assert dict(vars(ShapeEnv)) == before


def test_a_data_dependent_condition_that_follows_is_decided() -> None:
    """The branch is taken instead of an error, and no guard or runtime assert is added."""
    env, condition = chain()
    with pytest.raises(GuardOnDataDependentSymNode):
        bool(condition)
    before = tfk.snapshot(env)
    with tfk.entailment():
        assert bool(condition) is True
        assert bool(torch.sym_not(condition)) is False
    assert tfk.snapshot(env) == before


def test_what_does_not_follow_raises_as_before() -> None:
    """A condition that the facts leave open is torch's data-dependent error."""
    env, _ = chain()
    (u,) = unbacked(env, 1)
    with tfk.entailment(), pytest.raises(GuardOnDataDependentSymNode):
        bool(u <= 3)


def test_the_static_questions_are_answered() -> None:
    """``guard_or_false``, ``guard_or_true`` and ``statically_known_true``, in both directions."""
    _, condition = chain()
    wrong = torch.sym_not(condition)
    assert not statically_known_true(condition)
    with tfk.entailment():
        assert statically_known_true(condition)
        assert not statically_known_true(wrong)
        assert guard_or_false(condition)
        assert not guard_or_true(wrong)


def test_a_runtime_assert_that_follows_is_not_added() -> None:
    """``torch._check`` of what is known adds nothing."""
    env, condition = chain()
    with tfk.entailment():
        before = env.num_deferred_runtime_asserts
        torch._check(condition)
        assert env.num_deferred_runtime_asserts == before


def test_a_runtime_assert_that_contradicts_the_facts_fails_at_once() -> None:
    """It is torch's own error for a check that is statically false."""
    _, condition = chain()
    with tfk.entailment(), pytest.raises(RuntimeError, match="Expected cond to be True"):
        torch._check(torch.sym_not(condition))


def test_a_guard_that_follows_is_not_added() -> None:
    """The third comparison of a chain needs no guard."""
    counts: list[int] = []
    for is_on in (False, True):
        env = ShapeEnv()
        s, t, r = sizes(env, 5, 6, 7)
        if is_on:
            tfk.entailment.install()
        assert s < t
        assert t < r
        assert s < r
        counts.append(len(env.guards))
    assert counts == [3, 2]


def test_a_guard_that_is_left_out_tightens_a_range() -> None:
    """What torch would learn from the guard it learns from the condition, unless guards are suppressed."""
    env = ShapeEnv()
    (s,) = sizes(env, 16)
    symbol = s.node.expr
    assert s >= 4
    assert s // 4 != 1
    with tfk.entailment():
        with env.suppress_guards():
            assert s // 4 >= 2
        assert env.var_to_range[symbol].lower == 4
        assert s // 4 >= 2
        assert env.var_to_range[symbol].lower == 8
    assert len(env.guards) == 2


def test_a_condition_about_inputs_does_not_rest_on_a_runtime_assert() -> None:
    """What the sizes of inputs must satisfy is checked at entry, so that another size recompiles."""
    env = ShapeEnv()
    s, t = sizes(env, 5, 9)
    (u,) = unbacked(env, 1)
    torch._check(s <= u)
    torch._check(u <= t)
    assert tfk.entails(env, s <= t) is True
    with tfk.entailment():
        assert s <= t
    assert [guard.expr for guard in env.guards] == [(s <= t).node.expr]


def test_a_fact_after_an_answer_counts() -> None:
    """Answers are cached for one set of facts."""
    env = ShapeEnv()
    u, v = unbacked(env, 2)
    with tfk.entailment():
        assert not statically_known_true(u <= v + 1)
        torch._check(u <= v)
        assert statically_known_true(u <= v + 1)
        done = knowledge_of(env).work.total
        assert statically_known_true(u <= v + 1)
        assert knowledge_of(env).work.total == done


def test_what_follows_is_not_asked_again_after_a_further_fact() -> None:
    """What was answered costs no more work; what was open is asked again."""
    env = ShapeEnv()
    u, v = (one.node.expr for one in unbacked(env, 2))
    env.guard_or_defer_runtime_assert(u <= v, "")
    known = knowledge_of(env)
    assert (known.answer(env, u <= v + 1), known.answer(env, v <= 8)) == (True, None)
    env.guard_or_defer_runtime_assert(v <= 7, "")
    done = known.work.total
    assert known.answer(env, u <= v + 1) is True
    assert known.work.total == done
    assert known.answer(env, v <= 8) is True


def test_environments_with_the_same_facts_share_answers() -> None:
    """Dynamo traces a frame again in a new environment; one with another fact is searched itself."""
    knowledge_of(ShapeEnv()).forget_answers()
    works: list[int] = []
    for most, answer in ((7, True), (7, True), (8, None)):
        env = ShapeEnv()
        u, v = (one.node.expr for one in unbacked(env, 2))
        env.guard_or_defer_runtime_assert(u <= v, "")
        env.guard_or_defer_runtime_assert(v <= most, "")
        assert knowledge_of(env).answer(env, u <= 7) is answer
        works.append(knowledge_of(env).work.total)
    assert works[1] == 0
    assert min(works[0], works[2]) > 0


def test_it_works_with_checkpoints() -> None:
    """After a rollback the condition is open again."""
    env = ShapeEnv()
    u, v = unbacked(env, 2)
    with tfk.entailment():
        point = tfk.checkpoint(env)
        torch._check(u <= v)
        assert guard_or_false(u <= v + 1)
        point.rollback()
        assert not guard_or_false(u <= v + 1)


def test_what_was_answered_inside_is_asked_again_outside() -> None:
    """Torch caches answers; those of the prover do not outlive the block."""
    _, condition = chain()
    with tfk.entailment():
        assert bool(condition)
    with pytest.raises(GuardOnDataDependentSymNode):
        bool(condition)


def test_blocks_nest() -> None:
    """The outermost block, or ``uninstall`` after the last block, restores torch."""
    assert not tfk.entailment.is_installed()
    with tfk.entailment():
        with tfk.entailment():
            tfk.entailment.install()
        tfk.entailment.uninstall()
        assert tfk.entailment.is_installed()
    assert not tfk.entailment.is_installed()
    tfk.entailment.install()
    tfk.entailment.install()
    with tfk.entailment():
        pass
    assert tfk.entailment.is_installed()
    tfk.entailment.uninstall()
    assert not tfk.entailment.is_installed()


def test_blocks_of_threads_overlap() -> None:
    """A block that ends leaves the block of another thread in effect."""
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with tfk.entailment():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with tfk.entailment():
        thread.start()
        entered.wait(10)
    assert tfk.entailment.is_installed()
    leave.set()
    thread.join()
    assert not tfk.entailment.is_installed()


def test_an_exception_ends_the_block() -> None:
    """Torch is restored when the block raises."""
    with pytest.raises(KeyError), tfk.entailment():
        raise KeyError
    assert not tfk.entailment.is_installed()


def test_the_caches_of_the_wrapped_methods_can_be_cleared() -> None:
    """Torch clears the cache of a method after it narrows a range."""
    with tfk.entailment():
        env = ShapeEnv()
        (u,) = unbacked(env, 1)
        assert not statically_known_true(u <= 9)
        torch._check(u <= 5)
        assert statically_known_true(u <= 9)
        assert ShapeEnv._maybe_evaluate_static.cache_info() is not None


def test_a_runtime_assert_has_the_line_that_dynamo_traced() -> None:
    """Torch's stack of a runtime assert has no line of a traced function; the block records it."""
    envs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        envs.append(torch._guards.TracingContext.get().fake_mode.shape_env)
        return graph

    def traced(x: torch.Tensor) -> torch.Tensor:
        u, v = x.tolist()
        torch._check(u <= v)
        return x + 1 if u <= v + 1 else x - 1

    with (
        tfk.entailment(),
        torch._dynamo.config.patch(capture_scalar_outputs=True),
    ):
        compiled = torch.compile(traced, backend=backend, fullgraph=True)
        assert compiled(torch.tensor([1, 2])).tolist() == [2, 3]
    u0, u1 = (sympy.Symbol(name, integer=True) for name in ("u0", "u1"))
    found = tfk.why(envs[0], sympy.Le(u0, u1 + 1))
    assert found is not None
    line = traced.__code__.co_firstlineno + 2
    assert [fact.line for fact in found] == [f"{__file__}:{line}"]


def test_it_works_with_translation_validation() -> None:
    """Torch validates the guards of a compilation in which conditions were answered."""

    def traced(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b, c = x.shape[0], x.shape[1], y.shape[0]
        if a < b and b < c and a < c:
            u, v = y[:2].tolist()
            torch._check(u <= v)
            return x + 1 if u <= v + 1 else x - 1
        return x * 2

    with (
        tfk.entailment(),
        torch._dynamo.config.patch(capture_scalar_outputs=True),
        shape_config.patch(translation_validation=True),
    ):
        compiled = torch.compile(traced, backend="eager", dynamic=True, fullgraph=True)
        x, y = torch.ones(3, 4), torch.arange(5)
        assert torch.equal(compiled(x, y), traced(x, y))
        x = torch.ones(6, 4)
        assert torch.equal(compiled(x, y), traced(x, y))


def drawn_condition(data: st.DataObject, symbols: list[Any]) -> Any:
    """Draw a comparison of symbols and numbers."""
    number = st.integers(-3, 6)
    a, b = (symbols[data.draw(st.integers(0, len(symbols) - 1))] for _ in range(2))
    kind = data.draw(st.sampled_from([sympy.Le, sympy.Lt, sympy.Eq, sympy.Ne, sympy.Ge]))
    left = data.draw(st.sampled_from([1, 1, 1, 2])) * a + data.draw(number)
    return kind(left, b if data.draw(st.booleans()) else data.draw(number))


@given(st.data())
@settings(max_examples=20)
def test_the_answers_of_torch_remain(data: st.DataObject) -> None:
    """Where torch has an answer it is the same with entailment; what is added, `entails` proves."""
    env = ShapeEnv()
    symbols = [u.node.expr for u in unbacked(env, 3)]
    symbols += [s.node.expr for s in sizes(env, 5, 6)]
    for _ in range(data.draw(st.integers(0, 5))):
        fact = drawn_condition(data, symbols)
        if fact in (sympy.true, sympy.false) or env._maybe_evaluate_static(fact) is not None:
            continue
        if tfk.entails(env, fact) is None and fact.free_symbols - env.backed_var_to_val.keys():
            try:
                env.guard_or_defer_runtime_assert(fact, "")
            except AssertionError:
                return  # torch itself: the fact contradicts the example of a size
    for _ in range(4):
        asked = drawn_condition(data, symbols)
        own = env._maybe_evaluate_static(asked)
        with tfk.entailment():
            answer = env._maybe_evaluate_static(asked)
        if own is not None:
            assert answer is own
        elif answer is not None:
            assert bool(answer) is tfk.entails(env, asked)


def test_a_handoff_has_it_by_option() -> None:
    """The inner backend runs inside the block, and a handoff with it is another backend."""
    seen: list[bool] = []

    def inner(graph: Any, _inputs: Any) -> Any:
        seen.append(tfk.entailment.is_installed())
        return graph

    for is_on in (False, True):
        torch._dynamo.reset()
        backend = tfk.handoff(inner, entailment=is_on)
        torch.compile(torch.sin, backend=backend)(torch.zeros(2))
    assert seen == [False, True]
    assert tfk.handoff("eager") != tfk.handoff("eager", entailment=True)
    assert repr(tfk.handoff("eager", entailment=True)) == "<handoff(eager, entailment=True)>"


def test_the_drop_in_has_it_by_option() -> None:
    """``install``, ``uninstall`` and ``installed`` of the drop-in take it along."""
    with tfk.dropin.installed():
        assert not tfk.entailment.is_installed()
    with tfk.dropin.installed(entailment=True):
        assert tfk.entailment.is_installed()
    assert not tfk.entailment.is_installed()
    tfk.dropin.install(entailment=True)
    assert tfk.entailment.is_installed()
    tfk.dropin.uninstall()
    assert tfk.entailment.is_installed()
    tfk.dropin.uninstall(entailment=True)
    assert not tfk.entailment.is_installed()


@pytest.mark.sweep
def test_the_environment_installs_it() -> None:
    """With ``TORCH_FAKEIFY_ENTAILMENT=1``, importing the package is enough."""
    code = "import torch_fakeify as tfk; print(tfk.entailment.is_installed())"
    assert fresh("-c", code, TORCH_FAKEIFY_ENTAILMENT="1").stdout == "True\n"
