"""Attributes, caches and version counters of a ``ShapeEnv`` after a rollback."""

from __future__ import annotations

import collections
import copy
import functools
import pickle
from typing import Any

import pytest
import sympy
from env_sessions import PRELUDE, Session, fake_of, int_of, make_mode, photo_and_record
from torch._dynamo.source import LocalSource
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import (
    ShapeEnv,
)

import torch_fakeify as tfk
from torch_fakeify.shape_env.rollback import clear_method_caches
from torch_fakeify.shape_env.saved_state import SkippingCounter

# --- what is restored -------------------------------------------------------------------------------


def test_all_containers_are_restored_in_place() -> None:
    """References to a dict, list or set of the environment show the state before."""
    env: Any = make_mode().shape_env
    n = int_of(env, "n", 4)
    assert n > 3
    env.deferred_runtime_asserts[None] = []
    env._equality_graph = {n.node.expr: symbolic_shapes.OrderedSet([n.node.expr])}
    env._shape_spec_pending_assumptions.append(({n.node.expr}, n.node.expr > 1))
    env.co_fields = collections.OrderedDict(a="1", b="2")
    check = photo_and_record(env)
    cp = tfk.checkpoint(env)

    symbol = n.node.expr
    env.var_to_sources[symbol].append(LocalSource("m"))
    env.var_to_range_sloc[symbol].upper = env.var_to_range_sloc[symbol].lower = None
    env.deferred_runtime_asserts[None].append(3)
    env._equality_graph[symbol].add(3)
    env._shape_spec_pending_assumptions[0][0].clear()
    env.co_fields.move_to_end("a")
    env.unbacked_inputs.add(3)
    env.guards.clear()
    env.var_to_range[symbol] = env.var_to_range.pop(symbol)
    env.unique_ids, env.size_like = {1}, {symbol}
    env.settings = None
    env.invented = 1
    del env.counter
    env.frozen = env.runtime_asserts_frozen = env._error_on_new_guards = True
    cp.rollback()
    check()
    assert not hasattr(env, "invented")


def test_the_order_of_keys_is_restored() -> None:
    """A key that was removed and added again is at its old position, and so is an attribute."""
    env: Any = make_mode().shape_env
    first, _ = int_of(env, "a", 4), int_of(env, "b", 5)
    check = photo_and_record(env)
    cp = tfk.checkpoint(env)
    symbol = first.node.expr
    env.var_to_range[symbol] = env.var_to_range.pop(symbol)
    guards = env.guards
    del env.guards
    env.guards = guards
    cp.rollback()
    check()


def test_dim_constraints_are_restored() -> None:
    """The object that ``produce_guards`` leaves changes when it is solved."""
    session = Session()
    for action in (*PRELUDE, ("guard", "gt", 0, 0, 3), ("guard", "mod", 1, 1, 0), ("produce",)):
        session.run(action)
    assert session.env.dim_constraints is not None
    check = photo_and_record(session.env)
    cp = tfk.checkpoint(session.env)
    session.env.dim_constraints._substitutions[sympy.Symbol("s9")] = sympy.Integer(3)
    session.env.dim_constraints.add(sympy.Mod(session.pool[0].node.expr, 2) > 0)
    cp.rollback()
    check()


def test_the_cache_of_fake_tensors_is_restored() -> None:
    """Cached outputs of abandoned sizes are removed from the fake tensor mode."""
    mode = make_mode()
    x = fake_of(mode, "x", 4, 6)
    env: Any = mode.shape_env
    with mode:
        x + 1
        cache = env.fake_tensor_cache
        then = dict(cache)
        assert then
        cp = tfk.checkpoint(env)
        fake_of(mode, "y", 7, 5) * 2
        x.sum(0)
    assert len(cache) > len(then)
    cp.rollback()
    assert env.fake_tensor_cache is cache
    assert cache == then


# --- caches of methods ------------------------------------------------------------------------------


def all_method_caches() -> dict[str, Any]:
    """Return every ``lru_cache`` inside the functions of ``ShapeEnv``, in any wrapper."""
    found: dict[str, Any] = {}
    for name, method in vars(ShapeEnv).items():
        todo, seen = [method], set()
        while todo:
            part = todo.pop()
            if id(part) in seen:
                continue
            seen.add(id(part))
            if isinstance(part, functools._lru_cache_wrapper):
                found[name] = part
            todo.append(getattr(part, "__wrapped__", None))
            todo += [c.cell_contents for c in getattr(part, "__closure__", None) or ()]
    return found


def test_every_method_cache_is_cleared() -> None:
    """All methods of ``ShapeEnv`` that cache answers have an empty cache after a rollback."""
    caches = all_method_caches()
    assert len(caches) >= 15
    assert {"_inner_evaluate_expr", "replace", "size_hint", "constrain_symbol_range"} <= set(caches)
    session = Session()
    for action in (*PRELUDE, ("guard", "gt", 0, 0, 3), ("check", "le", 0, 3, 4)):
        session.run(action)
    with_entries = {name for name, cache in caches.items() if cache.cache_info().currsize}
    assert {"_inner_evaluate_expr", "replace"} <= with_entries
    tfk.checkpoint(session.env).rollback()
    assert {name: cache.cache_info().currsize for name, cache in caches.items()} == dict.fromkeys(
        caches, 0
    )
    assert set(clear_method_caches(ShapeEnv)) == set(caches)


def test_version_numbers_of_the_abandoned_branch_are_not_reused() -> None:
    """Caches compare version numbers, so a number that is reused would give an outdated answer."""
    env: Any = make_mode().shape_env
    a, b, c = (int_of(env, name, 4) for name in "abc")
    cp = tfk.checkpoint(env)
    then = env._version_counter, env._replacements_version_counter
    assert a == b
    abandoned = env._version_counter, env._replacements_version_counter
    assert abandoned == (1, 1)
    cp.rollback()
    assert (env._version_counter, env._replacements_version_counter) == then == (0, 0)
    assert b == c
    assert (env._version_counter, env._replacements_version_counter) == (2, 2)
    cp.rollback()
    assert a == c
    assert (env._version_counter, env._replacements_version_counter) == (3, 3)


def test_version_numbers_of_dropped_checkpoints_are_not_reused() -> None:
    """A later checkpoint skips the numbers that were used after an earlier one."""
    env: Any = make_mode().shape_env
    a, b, c = (int_of(env, name, 4) for name in "abc")
    cp = tfk.checkpoint(env)
    assert a == b
    assert a == c
    cp.rollback()
    del cp
    cp = tfk.checkpoint(env)
    cp.rollback()
    assert env._replacements_version_counter == 0
    assert a == b
    assert env._replacements_version_counter == 3


@pytest.mark.parametrize(
    "clone",
    [copy.copy, copy.deepcopy, lambda n: pickle.loads(pickle.dumps(n))],  # noqa: S301
)
def test_a_skipping_counter_is_an_int(clone: Any) -> None:
    """A counter equals its number, also as a copy, and its next number skips the used ones."""
    counter = clone(SkippingCounter(3, 8))
    assert counter == 3
    assert hash(counter) == hash(3)
    assert (repr(counter), f"{counter}") == ("3", "3")
    assert (counter + 1, counter + 2, counter + 0, counter - 1) == (8, 9, 3, 2)
    assert type(counter + 1) is int


def test_a_rolled_back_environment_can_be_recorded_and_copied() -> None:
    """The record has plain numbers, and ``deepcopy`` retains the numbers to skip."""
    env: Any = make_mode().shape_env
    a, b = int_of(env, "a", 4), int_of(env, "b", 4)
    cp = tfk.checkpoint(env)
    assert a == b
    cp.rollback()
    record = tfk.snapshot(env)
    assert type(record.version_counter) is type(record.replacements_version_counter) is int
    assert tfk.loads(tfk.dumps(record)) == record
    assert copy.deepcopy(env)._replacements_version_counter + 1 == 2
