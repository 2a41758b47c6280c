"""``checkpoint`` of a ``ShapeEnv``: whatever is learned after it can be taken back, exactly.

Dynamo rolls back its own state when it gives up a branch; the guards that the branch added stay in
the ``ShapeEnv``. A rollback takes them back too, and with them everything by which torch remembers
the branch: memos of methods, of ``SymNode`` objects, of fake tensors and of symbolic contexts.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from ._torch import ShapeEnv
from .env_state import SavedState
from .env_watch import Watch
from .errors import ShapeEnvError

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Checkpoint", "checkpoint", "clear_method_caches"]


def checkpoint(shape_env: Any) -> Checkpoint:
    """The state of a ``ShapeEnv`` now, to return to.

    It costs a shallow copy of every container that the environment has. While it lives, torch
    makes ``SymNode`` objects a little slower; that ends when it is dropped or committed.

    Raises:
        ShapeEnvError: not a ``ShapeEnv``, or one that is recording a call just now.
    """
    return Checkpoint(shape_env)


class Checkpoint:
    """A state of a ``ShapeEnv`` that `rollback` returns to, any number of times.

    Checkpoints of one environment nest: rolling back to one ends those that were made after it.

    In a ``with`` statement an exception rolls back and goes on; without one the block's work is
    kept. Either way the checkpoint ends with the block.

    Rolled back is the environment, in place: all containers that it had are the same objects, with
    the same contents in the same order. Not rolled back are the tensors: one that was resized since
    stays so. A ``SymInt`` or a fake tensor of a symbol that was made since is an error to use, also
    one that a `MetaConverter` remembers, since the next symbol may get the same name; over older
    symbols it stays what it is. Of plain sympy expressions nobody knows when they were made.

    What torch remembers of a question it may have to find out again: answers of the environment's
    methods, and how tensors lie in memory, with the guards that this takes.
    """

    def __init__(self, shape_env: Any) -> None:
        if not isinstance(shape_env, ShapeEnv):
            raise ShapeEnvError(
                "not a shape environment", expected="ShapeEnv", found=type(shape_env).__qualname__
            )
        _refuse_recording(shape_env)
        self._line: _Line | None = _line_of(shape_env)
        self._ended = ""
        self._mark = self._line.begin(self)
        self._state: SavedState | None = SavedState(shape_env)

    def rollback(self) -> None:
        """Puts the environment back to how it was when this was made.

        Raises:
            ShapeEnvError: the checkpoint has ended; the environment is recording a call just now;
                the graph of the translation validation has lost FX nodes. Nothing is changed then.
        """
        line, state = self._line, self._state
        if line is None or state is None:
            raise ShapeEnvError(
                f"this checkpoint has ended: {self._ended}",
                fix="Make a new checkpoint where you want to return to",
            )
        _refuse_recording(line.env)
        state.check()
        line.watch.take_back(self._mark, state)
        line.note_counters(state)
        state.restore(line.used)
        clear_method_caches(type(line.env))
        for inner in line.after(self):
            inner._end("an older checkpoint of the same ShapeEnv was rolled back")

    def commit(self) -> None:
        """Keeps what was learned since and ends this checkpoint; older ones can still roll back."""
        line = self._line
        if line is not None:
            self._end("it was committed")
            line.trim()

    def _end(self, reason: str) -> None:
        self._line = self._state = None
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

    @property
    def mark(self) -> int:
        """Where in the notes of the watch this was made."""
        return self._mark

    def __repr__(self) -> str:
        return f"<Checkpoint, ended: {self._ended}>" if self._ended else "<Checkpoint>"


class _Line:
    """The living checkpoints of one environment, oldest first; each of them keeps it alive."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.watch = Watch(env)
        self.used: dict[str, int] = {}
        """The highest number that each version counter has had."""
        self._checkpoints: list[weakref.ref[Checkpoint]] = []

    def begin(self, checkpoint: Checkpoint) -> int:
        """Adds the youngest one and gives its mark."""
        self.trim()
        self._checkpoints.append(weakref.ref(checkpoint))
        return self.watch.mark()

    def living(self) -> list[Checkpoint]:
        """Those that have not ended."""
        found = [ref() for ref in self._checkpoints]
        return [checkpoint for checkpoint in found if checkpoint is not None and checkpoint._line]

    def after(self, checkpoint: Checkpoint) -> list[Checkpoint]:
        """Those that were made later than this one."""
        living = self.living()
        return living[living.index(checkpoint) + 1 :]

    def trim(self) -> None:
        """Forgets what only ended checkpoints needed."""
        living = self.living()
        self._checkpoints = [weakref.ref(checkpoint) for checkpoint in living]
        if living:
            self.watch.forget_before(living[0].mark)

    def note_counters(self, state: SavedState) -> None:
        """Looks at the version counters before a rollback."""
        for name, value in state.counters():
            self.used[name] = max(value, self.used.get(name, value))


_lines: weakref.WeakValueDictionary[int, _Line] = weakref.WeakValueDictionary()
"""By the ``id`` of the environment, which its line keeps alive."""


def _line_of(env: Any) -> _Line:
    line = _lines.get(id(env))
    if line is None:
        line = _lines[id(env)] = _Line(env)
    return line


def _refuse_recording(env: Any) -> None:
    if env.is_recording:
        raise ShapeEnvError(
            "the ShapeEnv is recording a call",
            expected="a moment between two calls of its methods",
            found="is_recording is set",
        )


def clear_method_caches(cls: type[Any]) -> list[str]:
    """Clears the caches of the methods of a class, found by looking; gives the methods' names.

    They are the class's, not an environment's: others may have to compute an answer again.
    """
    cleared: list[str] = []
    for base in cls.__mro__:
        for name, method in vars(base).items():
            clear = getattr(method, "cache_clear", None)
            if callable(clear):
                clear()
                cleared.append(name)
    return cleared
