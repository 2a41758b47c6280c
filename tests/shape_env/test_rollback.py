"""``checkpoint`` of a ``ShapeEnv``: nesting, ends, events and validation, and Dynamo's speculation."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._dynamo.source import LocalSource
from torch.fx.experimental import _config as shapes_config
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import (
    ShapeEnv,
)

import torch_fakeify as tfk
from torch_fakeify.errors import ShapeEnvError
from torch_fakeify.shape_env import tracker

if TYPE_CHECKING:
    from collections.abc import Callable
from env_sessions import Session, exprs, fake_of, int_of, make_mode, photo_and_record

# --- nesting and ends -------------------------------------------------------------------------------


def test_checkpoints_nest() -> None:
    """An inner checkpoint may be rolled back or committed; the outer one restores its own state."""
    env: Any = make_mode().shape_env
    n = int_of(env, "n", 9)
    outer = tfk.checkpoint(env)
    assert n > 3
    inner = tfk.checkpoint(env)
    assert n > 4
    inner.rollback()
    assert exprs(env) == [f"{n} > 3"]
    assert n > 5
    inner.commit()
    assert exprs(env) == [f"{n} > 3", f"{n} > 5"]
    outer.rollback()
    assert exprs(env) == []
    assert n > 6
    outer.rollback()
    assert exprs(env) == []


def test_an_outer_rollback_ends_the_inner_checkpoints() -> None:
    """The state of an inner checkpoint cannot be restored afterwards."""
    env: Any = make_mode().shape_env
    outer, inner = tfk.checkpoint(env), tfk.checkpoint(env)
    outer.rollback()
    with pytest.raises(ShapeEnvError) as caught:
        inner.rollback()
    assert str(caught.value) == (
        "this checkpoint has ended: an older checkpoint of the same ShapeEnv was rolled back. "
        "Make a new checkpoint where you want to return to"
    )
    assert repr(inner) == (
        "<Checkpoint, ended: an older checkpoint of the same ShapeEnv was rolled back>"
    )
    inner.commit()
    outer.rollback()
    assert repr(outer) == "<Checkpoint>"


def test_an_inner_checkpoint_outlives_its_outer_one() -> None:
    """Committing or dropping the older one does not change what the younger one restores."""
    mode = make_mode()
    env: Any = mode.shape_env
    n = int_of(env, "n", 9)
    with mode:
        x = torch.empty(3)
        outer = tfk.checkpoint(env)
        torch.nonzero(x)
        memo = x._nonzero_memo
        assert n > 3
        inner = tfk.checkpoint(env)
        assert n > 4
        x.add_(1)
        torch.nonzero(x)
        outer.commit()
        inner.rollback()
        assert exprs(env) == [f"{n} > 3"]
        assert x._nonzero_memo is memo
        assert str(memo + 1) == "u0 + 1"
    with pytest.raises(ShapeEnvError, match="ended: it was committed"):
        outer.rollback()


def test_a_block_without_an_exception_is_not_rolled_back() -> None:
    """The checkpoint ends with the block, and the work remains."""
    env: Any = make_mode().shape_env
    n = int_of(env, "n", 9)
    with tfk.checkpoint(env) as cp:
        assert n > 3
        cp.rollback()
        assert n > 4
    assert exprs(env) == [f"{n} > 4"]
    with pytest.raises(ShapeEnvError, match="ended: its block was left"):
        cp.rollback()


def test_a_block_with_an_exception_is_rolled_back() -> None:
    """The exception is raised again, also if an older checkpoint was rolled back inside."""
    env: Any = make_mode().shape_env
    n = int_of(env, "n", 9)

    def block(work: Callable[[], Any], limit: int) -> None:
        with tfk.checkpoint(env):
            work()
            assert n > limit
            raise KeyError

    with pytest.raises(KeyError):
        block(lambda: None, 3)
    assert exprs(env) == []
    outer = tfk.checkpoint(env)
    with pytest.raises(KeyError):
        block(outer.rollback, 4)
    assert exprs(env) == [f"{n} > 4"]


@pytest.mark.parametrize("end", ["drop", "commit", "rollback"])
def test_an_ended_checkpoint_leaves_nothing(end: str) -> None:
    """Torch's methods are restored and the saved state is freed, without garbage collection."""
    gc.collect()  # frees checkpoints of other tests, which the tracebacks of their errors hold
    own = [SymNode.__init__, ShapeEnv.create_symbol, SymNode.guard_bool]
    mode = make_mode()
    gc.disable()
    try:
        cp = tfk.checkpoint(mode.shape_env)
        assert SymNode.__init__ is not own[0]
        fake = fake_of(mode, "x", 4, 6)
        fake.is_contiguous()
        int_of(mode.shape_env, "n", 4)
        refs = [weakref.ref(cp), weakref.ref(cp._state), weakref.ref(cp._stack.tracker)]
        if end == "rollback":
            cp.rollback()
        elif end == "commit":
            cp.commit()
            assert [ref() for ref in refs[1:]] == [None, None]
        del cp
        assert [ref() for ref in refs] == [None] * 3
    finally:
        gc.enable()
    assert [SymNode.__init__, ShapeEnv.create_symbol, SymNode.guard_bool] == own
    assert not tracker._trackers


def test_the_undo_log_of_an_ended_checkpoint_is_dropped() -> None:
    """The undo log of an ended checkpoint is removed when the next one is made."""
    mode = make_mode()
    env: Any = mode.shape_env
    with mode:
        x = torch.empty(3)
        outer = tfk.checkpoint(env)
        torch.nonzero(x)
        inner = tfk.checkpoint(env)
        x.add_(1)
        torch.nonzero(x)
        state_tracker = inner._stack.tracker
        assert len(state_tracker._undo) == 4
        outer.commit()
        assert len(state_tracker._undo) == 2
        inner.rollback()
        assert len(state_tracker._undo) == 0


def test_guards_have_the_line_that_caused_them() -> None:
    """The location is not in the wrappers of a checkpoint."""
    mode = make_mode()
    x = fake_of(mode, "x", 4, 6)
    cp = tfk.checkpoint(mode.shape_env)
    assert x.shape[0] > 3
    assert x.is_contiguous()
    y = fake_of(mode, "y", 7)
    env: Any = mode.shape_env
    slocs = [guard.sloc for guard in env.guards]
    slocs += [env.var_to_range_sloc[y.shape[0].node.expr].upper]
    assert len(slocs) == 3
    for sloc in slocs:
        assert "env_watch" not in str(sloc.framework_loc)
    assert all("test_rollback" in str(sloc.framework_loc) for sloc in slocs[:2])
    cp.rollback()


# --- event recording and translation validation -----------------------------------------------------


def test_no_rollback_happens_inside_a_recorded_call() -> None:
    """A rollback in the middle of a recorded call would remove its event."""
    env: Any = ShapeEnv(should_record_events=True)
    cp = tfk.checkpoint(env)
    with env._recording():
        with pytest.raises(ShapeEnvError, match="is recording a call"):
            cp.rollback()
        with pytest.raises(ShapeEnvError, match="is recording a call"):
            tfk.checkpoint(env)


def validated() -> Session:
    """Return a session whose environment is validated by z3 and checked against its events."""
    session = Session()
    for action in (
        ("number", 0, 4),
        ("number", 1, 6),
        ("unbacked", "int"),
        ("guard", "gt", 0, 0, 3),
        ("check", "le", 2, 0, 6),
    ):
        session.run(action)
    assert session.env._translation_validation_enabled
    return session


def test_validation_and_events_are_rolled_back() -> None:
    """The graph, its names, z3's formulas and the events are restored, and validation passes."""
    with shapes_config.patch(
        translation_validation=True,
        check_shape_env_recorded_events=True,
        translation_validation_timeout=1000,  # ms
    ):
        session, straight = validated(), validated()
        env = session.env
        check = photo_and_record(env)
        events, names = list(env.events), dict(vars(env.graph._graph_namespace))
        names = copy.copy({name: copy.copy(value) for name, value in names.items()})
        cp = tfk.checkpoint(env)
        pool = list(session.pool)
        for _ in range(2):
            for action in (
                ("guard", "gt", 1, 1, 2),
                ("arithmetic", 0, 1, 2),
                ("number", 5, 8),
                ("guard", "is", 1, 1, 6),
            ):
                session.run(action)
            assert len(env.events) > len(events)
            assert len(env.validator._target_exprs) > len(straight.env.validator._target_exprs)
            assert len(env.graph.nodes) > len(straight.env.graph.nodes)
            env.graph.inserting_before(next(iter(env.graph.nodes)))
            env.graph.output_node().meta["added"] = 1
            cp.rollback()
            check()
            assert env.events == events
            assert dict(vars(env.graph._graph_namespace)) == names
            session.pool = list(pool)
            env.graph.lint()
        for each in (session, straight):
            each.run(("guard", "gt", 0, 0, 2))
            each.run(("guard", "mod", 1, 1, 0))
        assert str(env.graph) == str(straight.env.graph)
        assert list(env.name_to_node) == list(straight.env.name_to_node)
        assert session.run(("produce",)) == straight.run(("produce",))


def test_a_node_without_its_fx_node_cannot_be_used() -> None:
    """Validation needs the FX node; a node with an FX node from before can be used."""
    with shapes_config.patch(translation_validation=True):
        session = validated()
        n = session.pool[0]
        before = n * 3
        cp = tfk.checkpoint(session.env)
        made, same = n * 2, n * 3
        cp.rollback()
        with pytest.raises(ShapeEnvError) as caught:
            made + 1
        assert str(caught.value) == (
            "an FX node of the translation validation was made after the checkpoint, and the "
            "ShapeEnv was rolled back. Make the tensor or the size again"
        )
        assert before + same > 3


def test_a_validation_graph_with_erased_nodes_is_not_rolled_back() -> None:
    """An erased FX node cannot be restored, so nothing is rolled back."""
    with shapes_config.patch(translation_validation=True):
        session = validated()
        last = [fx_node for fx_node in session.env.graph.nodes if not fx_node.users][-2]
        cp = tfk.checkpoint(session.env)
        session.run(("guard", "gt", 1, 1, 2))
        session.env.graph.erase_node(last)
        check = photo_and_record(session.env)
        with pytest.raises(ShapeEnvError) as caught:
            cp.rollback()
        assert str(caught.value) == (
            "cannot roll back the graph of the translation validation; expected the FX nodes that "
            f"it had at the checkpoint, in their order; found FX node {last.name} erased"
        )
        check()


# --- speculation ------------------------------------------------------------------------------------


def test_speculation_leaves_no_guards() -> None:
    """A branch is traced and abandoned, and only the guards of the next one remain."""

    def first(x: Any, y: Any) -> Any:
        if x.shape[0] == y.shape[0] and x.shape[1] % 2 == 0:
            return torch.nonzero(x.reshape(-1, 2) + 1)
        return x

    def second(x: Any, y: Any) -> Any:
        return x + 1 if x.shape[0] > 3 else y

    def guards(speculate: bool) -> list[str]:
        mode = make_mode()
        env: Any = mode.shape_env
        x, y = fake_of(mode, "x", 4, 6), fake_of(mode, "y", 4, 6)
        if speculate:
            with mode, tfk.checkpoint(env) as cp:
                first(x, y)
                assert len(env.guards) > 1
                cp.rollback()
        with mode:
            second(x, y)
        sources = [LocalSource("x"), LocalSource("y")]
        return env.produce_guards_verbose([x, y], sources)[0].exprs

    straight = guards(speculate=False)
    assert guards(speculate=True) == straight
    assert any("3 < L['x'].size()[0]" in guard or "4 <= L['x']" in guard for guard in straight)


def test_a_converter_makes_the_symbols_of_a_record_again() -> None:
    """Two records have one symbol: the second, converted after a rollback, gets a new one."""
    other: Any = make_mode()
    x = fake_of(other, "x", 4, 6)
    describer = tfk.MetaTensorDescriber()
    first, second = describer.describe_tensor(x), describer.describe_tensor(x + 1)
    mode = make_mode()
    env: Any = mode.shape_env
    converter = tfk.MetaConverter(mode)
    with tfk.checkpoint(env) as cp:
        converter.from_desc(first, source=LocalSource("x"))
        cp.rollback()
        fake_of(mode, "y", 9, 9)
        made = converter.from_desc(second, source=LocalSource("z"))
        sizes = [size.node.expr for size in made.size()]
        assert [env.backed_var_to_val[symbol] for symbol in sizes] == [4, 6]
        assert [env.var_to_sources[symbol][0].name for symbol in sizes] == [
            "L['z'].size()[0]",
            "L['z'].size()[1]",
        ]
