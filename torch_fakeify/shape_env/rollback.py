"""``checkpoint``: save the state of a ``ShapeEnv`` and roll back to it exactly.

When Dynamo abandons a branch it rolls back its own state, but the branch's guards stay in the
``ShapeEnv``. A rollback removes them and clears the caches that depend on them: those of methods, of
``SymNode`` objects, of fake tensors and of symbolic contexts.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch_fakeify.compat.arguments import check_shape_env
from torch_fakeify.errors import ShapeEnvError

from .saved_state import SavedState
from .tracker import ExternalStateTracker

if TYPE_CHECKING:
    from types import TracebackType


def checkpoint(shape_env: Any) -> Checkpoint:
    """Save the current state of a ``ShapeEnv`` for `Checkpoint.rollback`.

    The cost is a shallow copy of every container of the environment. Until the checkpoint is dropped
    or committed, torch makes ``SymNode`` objects a little slower.

    Raises:
        ShapeEnvError: not a ``ShapeEnv``, or one that is currently recording a call.

    Example:
        >>> from torch.fx.experimental.symbolic_shapes import ShapeEnv
        >>> env = ShapeEnv()
        >>> with tfk.checkpoint(env) as point:
        ...     symbol = env.create_unbacked_symint()
        ...     point.rollback()
        >>> str(env.create_unbacked_symint())
        'u0'
    """
    return Checkpoint(shape_env)


class Checkpoint:
    """A state of a ``ShapeEnv`` that `rollback` returns to, any number of times.

    Checkpoints of one environment nest: rolling back to one ends those that were made after it.

    In a ``with`` statement an exception rolls back and propagates; without an exception the changes
    are committed. The checkpoint ends with the block.

    The environment is rolled back in place: its containers are the same objects with their old
    contents in their old order. Tensors are not rolled back: one that was resized remains resized. A
    ``SymInt`` or fake tensor of a symbol made after the checkpoint raises an error when it is used,
    also one in the cache of a `MetaConverter`, since a later symbol may get the same name; over older
    symbols it remains valid. Bare sympy expressions are not tracked.

    Torch's cached answers are dropped and may have to be computed again: those of the environment's
    methods, and the memory layout of tensors, with the guards that they need.

    Example:
        >>> from torch.fx.experimental.symbolic_shapes import ShapeEnv
        >>> point = tfk.checkpoint(ShapeEnv())
        >>> point.commit()
    """

    def __init__(self, shape_env: Any) -> None:
        check_shape_env(shape_env)
        _refuse_recording(shape_env)
        stack = _stacks.get(id(shape_env))
        if stack is None:
            stack = _stacks[id(shape_env)] = _CheckpointStack(shape_env)
        self._stack: _CheckpointStack | None = stack
        self._ended = ""
        self.mark = stack.begin(self)
        """The position in the tracker's undo log at which the checkpoint was made."""
        self._state: SavedState | None = SavedState(shape_env)

    def rollback(self) -> None:
        """Restore the state of the environment at the checkpoint.

        Raises:
            ShapeEnvError: the checkpoint has ended; the environment is currently recording a call; the
                graph of the translation validation has lost FX nodes. Nothing is changed then.
        """
        stack, state = self._stack, self._state
        if stack is None or state is None:
            raise ShapeEnvError(
                f"this checkpoint has ended: {self._ended}",
                fix="Make a new checkpoint where you want to return to",
            )
        _refuse_recording(stack.env)
        state.check()
        stack.tracker.undo(self.mark, state)
        for name, value in state.counters():
            stack.used[name] = max(value, stack.used.get(name, value))
        state.restore(stack.used)
        clear_method_caches(type(stack.env))
        for inner in stack.after(self):
            inner._end("an older checkpoint of the same ShapeEnv was rolled back")

    def commit(self) -> None:
        """End the checkpoint and leave the environment as it is; older checkpoints remain valid."""
        stack = self._stack
        if stack is not None:
            self._end("it was committed")
            stack.trim()

    def _end(self, reason: str) -> None:
        self._stack = self._state = None
        self._ended = reason

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._ended:  # inside the block, by an older one
            return
        try:
            if kind is not None:
                self.rollback()
        finally:
            self.commit()
            self._ended = "its block was left"

    def __repr__(self) -> str:
        return f"<Checkpoint, ended: {self._ended}>" if self._ended else "<Checkpoint>"


class _CheckpointStack:
    """The live checkpoints of one environment, oldest first; they own it."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.tracker = ExternalStateTracker(env)
        self.used: dict[str, int] = {}
        """The highest value that each version counter has had."""
        self._checkpoints: list[weakref.ref[Checkpoint]] = []

    def begin(self, checkpoint: Checkpoint) -> int:
        """Push a checkpoint; returns its position in the tracker's undo log."""
        self.trim()
        self._checkpoints.append(weakref.ref(checkpoint))
        return self.tracker.mark()

    def living(self) -> list[Checkpoint]:
        found = [ref() for ref in self._checkpoints]
        return [checkpoint for checkpoint in found if checkpoint is not None and checkpoint._stack]

    def after(self, checkpoint: Checkpoint) -> list[Checkpoint]:
        living = self.living()
        return living[living.index(checkpoint) + 1 :]

    def trim(self) -> None:
        """Drop ended checkpoints and the part of the undo log that only they needed."""
        living = self.living()
        self._checkpoints = [weakref.ref(checkpoint) for checkpoint in living]
        if living:
            self.tracker.drop_before(living[0].mark)


_stacks: weakref.WeakValueDictionary[int, _CheckpointStack] = weakref.WeakValueDictionary()
"""By the ``id`` of the environment, to which the stack has a reference."""


def _refuse_recording(env: Any) -> None:
    if env.is_recording:
        raise ShapeEnvError(
            "the ShapeEnv is recording a call",
            expected="a moment between two calls of its methods",
            found="is_recording is set",
        )


def clear_method_caches(cls: type[Any]) -> list[str]:
    """Clear the caches of all cached methods of a class; returns the methods' names.

    The caches are shared by all instances of the class.
    """
    cleared: list[str] = []
    for base in cls.__mro__:
        for name, method in vars(base).items():
            clear = getattr(method, "cache_clear", None)
            if callable(clear):
                clear()
                cleared.append(name)
    return cleared
