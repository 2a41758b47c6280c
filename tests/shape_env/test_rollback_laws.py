"""Law: a rollback restores every attribute and every answer of a ``ShapeEnv``, for random programs."""

from __future__ import annotations

from typing import Any

import pytest
from env_sessions import GONE, PRELUDE, Session, photo_and_record
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.symbolic_shapes import (
    ShapeEnv,
)

import torch_fakeify as tfk
from torch_fakeify.errors import ShapeEnvError
from torch_fakeify.shape_env import tracker
from torch_fakeify.shape_env.rollback import clear_method_caches

# --- helpers ----------------------------------------------------------------------------------------


def derived_facts(env: Any) -> dict[str, Any]:
    """Return every attribute as text, except objects that two equal environments do not share."""
    own = {"_version_counter", "_replacements_version_counter", "_expr_sym_node_id", "log"}
    own.add("_symop_cache")  # its keys are versions
    found: dict[str, Any] = {}
    for name, value in vars(env).items():
        if name in own:
            continue
        if name in {"var_to_stack", "fake_tensor_cache", "specialization_stacks"}:
            value = len(value)
        elif name == "dim_constraints":
            value = value is None
        elif name == "events":
            # Other events are recorded when an answer was not in a cache.
            value = [event.name for event in value if str(event.name).startswith("create_")]
        elif isinstance(value, set):
            value = sorted(map(repr, value))
        elif isinstance(value, dict):
            value = [(repr(k), repr(v)) for k, v in value.items()]
        else:
            value = repr(value)
        found[name] = value
    return found


# --- programs with detours --------------------------------------------------------------------------


INDEX = st.integers(0, 9)


CONDITION = (
    st.sampled_from(["gt", "le", "eq", "is", "mod", "floor", "max"]),
    INDEX,
    INDEX,
    st.integers(-3, 12),
)


ACTION = st.one_of(
    st.tuples(st.just("number"), INDEX, st.integers(2, 9)),
    st.tuples(st.just("tensor"), INDEX, st.booleans()),
    st.tuples(st.sampled_from(["again", "nonzero", "contiguous", "size_like", "read"]), INDEX),
    st.tuples(st.just("unbacked"), st.sampled_from(["int", "int", "float", "bool"])),
    st.sampled_from([("item",), ("produce",), ("produce",), ("freeze",)]),
    st.tuples(st.just("arithmetic"), INDEX, INDEX, st.integers(1, 4)),
    st.tuples(st.sampled_from(["guard", "guard", "check", "suppressed"]), *CONDITION),
    st.tuples(st.sampled_from(["guard", "check"]), *CONDITION),
    st.tuples(st.just("specialize"), INDEX),
)


def blocks(inner: Any) -> Any:
    """Draw a block that is rolled back, once or more, or committed or dropped."""
    steps = st.lists(inner, max_size=5)
    return st.one_of(
        st.tuples(st.just("detour"), st.lists(steps, min_size=1, max_size=2)),
        st.tuples(st.just("kept"), steps),
    )


STEP = st.one_of(ACTION, ACTION, blocks(st.one_of(ACTION, blocks(ACTION))))


def run_steps(session: Session, steps: list[Any], answers: list[str], *, detours: bool) -> None:
    """Run a program; without detours its rolled back parts are left out."""
    for step in steps:
        if step[0] == "detour":
            run_detour(session, step[1], detours=detours)
        elif step[0] == "kept":
            point = tfk.checkpoint(session.env) if detours else None
            run_steps(session, step[1], answers, detours=detours)
            if point is not None and len(step[1]) % 2:
                point.commit()
            del point
        else:
            answers.append(session.run(step))


def run_detour(session: Session, parts: list[list[Any]], *, detours: bool) -> None:
    """Run parts that are each rolled back, and check that nothing is left of them."""
    if detours:
        check = photo_and_record(session.env)
        pool, fakes = list(session.pool), list(session.fakes)
        memos = [dict(vars(fake)) for fake in fakes]
        symbols = {str(symbol) for symbol in session.env.var_to_range}
        point = tfk.checkpoint(session.env)
        for part in parts:
            run_steps(session, part, [], detours=True)
            made = session.pool[len(pool) :]
            point.rollback()
            check()
            assert [dict(vars(fake)) for fake in fakes] == memos
            for size in made:
                check_survivor(session.env, size, symbols)
            point.rollback()  # asking for expressions is an event and may shorten replacements
            session.pool, session.fakes = list(pool), list(fakes)
    # Torch may clear these caches at any time; the two are comparable only without them.
    clear_method_caches(ShapeEnv)
    # A rollback makes C++ forget the layouts of all tensors: it is unknown which of them were
    # computed since the checkpoint.
    state_tracker = tracker._tracker_of(session.env) or tracker.ExternalStateTracker(session.env)
    state_tracker._forget_layouts()
    for size in session.pool:
        assert size.node.expr == session.env.replace(size.node._expr)


def check_survivor(env: Any, size: Any, symbols: set[str]) -> None:
    """Check that a size over old symbols equals the environment's, and that any other raises."""
    if {str(symbol) for symbol in size.node._expr.free_symbols} <= symbols:
        assert size.node.expr == env.replace(size.node._expr)
        return
    with pytest.raises(ShapeEnvError, match=GONE):
        size.node.expr  # noqa: B018
    with pytest.raises(ShapeEnvError, match=GONE):
        bool(size > 2)


PROGRAMS = {
    "settings_": st.fixed_dictionaries(
        {"specialize_zero_one": st.booleans(), "should_record_events": st.booleans()}
    ),
    "program": st.lists(STEP, min_size=1, max_size=9),
    "last": st.lists(ACTION, max_size=4),
}


@pytest.mark.parametrize("examples", [15, pytest.param(40, marks=pytest.mark.sweep)])
def test_law_rollback_restores_every_attribute(examples: int) -> None:
    """Each rollback is exact, and later state and answers do not depend on the detour."""
    settings(max_examples=examples)(given(**PROGRAMS)(check_law))()


def check_law(settings_: dict[str, Any], program: list[Any], last: list[Any]) -> None:
    """Run a program with its detours and without, and compare."""
    detoured, straight = Session(**settings_), Session(**settings_)
    steps = [*PRELUDE, *program, *last, ("number", 9, 5), ("unbacked", "int"), ("produce",)]
    for session, answers, detours in ((detoured, a := [], True), (straight, b := [], False)):
        run_steps(session, steps, answers, detours=detours)
    assert a == b
    now, expected = derived_facts(detoured.env), derived_facts(straight.env)
    assert {name: now[name] for name in now if now[name] != expected.get(name)} == {}
    assert now.keys() == expected.keys()
    assert [tracker._tracker_of(each.env) for each in (detoured, straight)] == [None, None]
