"""Tracks state outside a ``ShapeEnv`` that refers to it, while a checkpoint of it is live.

``SymNode`` objects, memos of fake tensors, converters of fake tensor modes and symbolic contexts
refer to symbols, and a rollback has to undo what was added to them. So a few of torch's methods are
wrapped while at least one environment is tracked.
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from torch_fakeify._locks import fork_safe_lock
from torch_fakeify.compat.torch_fakes import FakeTensor, SymNumberMemoDescriptor, invalidate_layouts
from torch_fakeify.compat.torch_symbols import (
    ShapeEnv,
    StatefulSymbolicContext,
    SymNode,
    layout_methods,
    uninteresting_files,
)
from torch_fakeify.errors import ShapeEnvError

if TYPE_CHECKING:
    from collections.abc import Callable

    from .saved_state import SavedState

_trackers: dict[int, weakref.ref[ExternalStateTracker]] = {}
"""The tracker of each environment by the ``id`` of the environment, to which the tracker refers."""
_wrapped: list[tuple[type[Any], str, Any]] = []
"""The methods that are wrapped: class, name, torch's original."""

_changing = fork_safe_lock()
"""Held while trackers or wrappers change, which all threads share."""

_forgetting = threading.local()
"""Whether this thread recomputes the cached layouts of tensors, which must add no guards."""
_ANSWERS = {"guard_bool": True, "guard_or_false": False, "expect_true": True, "maybe_as_int": None}
"""The answers to torch's checks of symbolic sizes and strides while layouts are recomputed.

No size counts as a plain int, even if it was specialized: an older checkpoint may undo that.
"""

_CONTEXT_POSITION = 6
"""The index of ``symbolic_context`` in the parameters of ``ShapeEnv.create_symbol`` after ``self``."""


class ExternalStateTracker:
    """An undo log of changes outside one ``ShapeEnv`` that refer to its symbols.

    References are weak, except those to the tables of symbolic contexts.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self._nodes: weakref.WeakSet[Any] = weakref.WeakSet()
        self._undo: list[Callable[[], None]] = []
        """The undo log: a function for each change."""
        self._dropped = 0
        """How many entries were dropped from its front."""
        self._seen: set[Any] = set()
        """Keys of the entries since the latest `mark`; a second entry of a key is redundant."""
        self.layouts_cached = False
        """Whether C++ asked for a property of a layout, which it caches on the tensor."""
        self.unversioned = False
        """Whether replacements changed without a new version, which makes ``SymNode`` caches stale."""
        key = id(env)

        def removed(ref: weakref.ref[ExternalStateTracker]) -> None:
            with _changing:
                if _trackers.get(key) is ref:
                    del _trackers[key]
                if not _trackers:
                    _unwrap()

        with _changing:
            # Register before wrapping: a tracker that dies meanwhile must not unwrap the methods.
            _trackers[key] = weakref.ref(self, removed)
            _wrap()

    def mark(self) -> int:
        """The current position in the undo log, for `undo`."""
        self._seen.clear()
        return self._dropped + len(self._undo)

    def drop_before(self, mark: int) -> None:
        """Drop the undo log before a position."""
        del self._undo[: mark - self._dropped]
        self._dropped = max(self._dropped, mark)

    def undo(self, mark: int, state: SavedState) -> None:
        """Undo the changes since a position; call it before the environment is rolled back."""
        if self.layouts_cached:
            self._forget_layouts()
        self._abandon(state)
        while len(self._undo) > mark - self._dropped:
            self._undo.pop()()
        self._seen.clear()
        if self.unversioned:
            self._forget_expressions(state.replacements_version)

    # --- recording ---

    def note_node(self, sym_node: Any) -> None:
        """Record that a ``SymNode`` of this environment was made."""
        self._nodes.add(sym_node)

    def note_context(self, context: Any) -> None:
        """Save the symbols in a stateful symbolic context before it is used."""
        tables: dict[int, dict[str, Any]] = context.shape_env_to_source_to_symbol_cache
        if self._first(("context", id(tables))):
            key = id(self.env)
            table = tables.get(key)
            saved = None if table is None else dict(table)
            self._undo.append(lambda: _restore_table(tables, key, table, saved))

    def note_memo(self, fake: Any, names: tuple[str, ...]) -> None:
        """Save a memo of a fake tensor before it is set or dropped."""
        values = vars(fake)
        if names[0] not in values:  # the tensor is being made
            self.note_mode(fake.fake_mode)
        elif self._first(("memo", id(fake), names)):
            saved = {name: values[name] for name in names if name in values}
            ref = weakref.ref(fake)
            self._undo.append(lambda: _restore_memo(ref(), names, saved))

    def note_mode(self, mode: Any) -> None:
        """Save the keys of a mode's converter before a fake tensor is added."""
        if self._first(("mode", id(mode))):
            memo = mode.fake_tensor_converter.meta_converter
            tensors, storages = set(memo.tensor_memo), set(memo.storage_memo)
            ref = weakref.ref(memo)
            self._undo.append(lambda: _restore_converter(ref(), tensors, storages))

    def _first(self, key: Any) -> bool:
        if key in self._seen:
            return False
        self._seen.add(key)
        return True

    # --- undo ---

    def _abandon(self, state: SavedState) -> None:
        for sym_node in tuple(self._nodes):
            new = state.new_symbols(sym_node._expr)
            if new:
                names = ", ".join(sorted(symbol.name for symbol in new))
                reason = f"the symbol {names} was" if len(new) == 1 else f"{names} were"
            elif state.is_new(sym_node.fx_node):
                reason = "an FX node of the translation validation was"
            else:
                continue
            sym_node.__class__ = AbandonedSymNode
            sym_node.shape_env = _NoShapeEnv(f"{reason} made after the checkpoint")
            self._nodes.discard(sym_node)

    def _forget_layouts(self) -> None:
        fakes = [
            fake
            for fake in _living(FakeTensor)
            if fake.fake_mode.shape_env is self.env and _is_symbolic(fake)
        ]
        _forgetting.active = True
        try:
            invalidate_layouts(fakes)
        finally:
            _forgetting.active = False

    def _forget_expressions(self, version: int) -> None:
        for sym_node in _living(SymNode):
            if sym_node.shape_env is self.env and sym_node._expr_ver == version:
                sym_node._expr_ver = -1


class _NoShapeEnv:
    """The ``shape_env`` of an abandoned ``SymNode``: every attribute access raises an error."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling look for optional methods
            raise AttributeError(name)
        raise self.error()

    def error(self) -> ShapeEnvError:
        return ShapeEnvError(
            f"{self._reason}, and the ShapeEnv was rolled back",
            fix="Make the tensor or the size again",
        )

    def __repr__(self) -> str:
        return f"<{self._reason}, which was rolled back>"


class AbandonedSymNode(SymNode):
    """A ``SymNode`` of a rolled-back symbol: it can be printed, any other use raises an error."""

    @property
    def expr(self) -> Any:
        """Raise an error: the symbol was rolled back."""
        raise self.shape_env.error()  # type: ignore[union-attr]

    @property
    def hint(self) -> Any:
        """Raise an error: the symbol was rolled back."""
        raise self.shape_env.error()  # type: ignore[union-attr]

    def str(self) -> str:
        """The last expression, marked as rolled back."""
        return f"{self._expr} (rolled back)"


# --- undo functions ----------------------------------------------------------------------------------


def _restore_table(
    tables: dict[int, dict[str, Any]],
    key: int,
    table: dict[str, Any] | None,
    saved: dict[str, Any] | None,
) -> None:
    if table is None or saved is None:
        tables.pop(key, None)
        return
    table.clear()
    table.update(saved)
    tables[key] = table


def _restore_memo(fake: Any, names: tuple[str, ...], saved: dict[str, Any]) -> None:
    if fake is None:
        return
    for name in names:
        vars(fake).pop(name, None)
    vars(fake).update(saved)


def _restore_converter(converter: Any, tensors: set[Any], storages: set[Any]) -> None:
    if converter is None:
        return
    for memo, saved in ((converter.tensor_memo, tensors), (converter.storage_memo, storages)):
        for key in set(memo) - saved:
            memo.pop(key, None)


def _is_symbolic(fake: Any) -> bool:
    """Whether a fake tensor has a symbolic layout without rolled-back symbols."""
    if fake.layout is not torch.strided:
        return False
    parts = (*fake.size(), *fake.stride(), fake.storage_offset())
    kinds = {type(part.node) for part in parts if isinstance(part, torch.SymInt)}
    return bool(kinds) and AbandonedSymNode not in kinds


def _living(kind: type[Any]) -> list[Any]:
    """All live instances of a class, found as referrers of the class; slow.

    A list of all objects would break other threads: Python allows no second reference to a tuple that
    is being built.
    """
    kinds: list[type[Any]] = [kind]
    for each in kinds:
        kinds += each.__subclasses__()
    return [found for found in gc.get_referrers(*kinds) if issubclass(type(found), kind)]


# --- the wrappers ------------------------------------------------------------------------------------


def _tracker_of(env: Any) -> ExternalStateTracker | None:
    ref = _trackers.get(id(env))
    return None if ref is None else ref()


def _wrap() -> None:
    """Wrap torch's methods once, and exclude this file from the locations of guards."""
    if _wrapped:
        return
    uninteresting_files().add(__file__)
    made: list[tuple[type[Any], str, Callable[[Any], Any]]] = [
        (SymNode, "__init__", _noting_nodes),
        (ShapeEnv, "create_symbol", _noting_contexts),
        (ShapeEnv, "_constrain_unify", _noting_unversioned),
        (ShapeEnv, "patch_source_specialization", _noting_unversioned),
        (SymNumberMemoDescriptor, "__set__", _noting_memos),
        (SymNumberMemoDescriptor, "__get__", _noting_memos),  # drops an outdated memo
    ]
    made += [(SymNode, name, _noting_layouts) for name in layout_methods()]
    made.append((SymNode, "maybe_as_int", _noting_layouts))
    for cls, name, wrapper in made:
        original = vars(cls)[name]
        _wrapped.append((cls, name, original))
        setattr(cls, name, _around(original, wrapper))


@functools.lru_cache(maxsize=32)
def _around(original: Any, wrapper: Callable[[Any], Any]) -> Any:
    """The wrapped form of a method of torch, cached for later checkpoints."""
    method: Any = functools.wraps(original)(wrapper(original))
    method.takes_notes = True  # code that makes symbols without torch's methods checks this
    return method


def _unwrap() -> None:
    uninteresting_files().discard(__file__)
    while _wrapped:
        cls, name, original = _wrapped.pop()
        setattr(cls, name, original)


def _noting_nodes(original: Any) -> Any:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        tracker = _tracker_of(self.shape_env)
        if tracker is not None:
            tracker.note_node(self)

    return init


def _noting_contexts(original: Any) -> Any:
    def create_symbol(self: Any, *args: Any, **kwargs: Any) -> Any:
        tracker = _tracker_of(self)
        if tracker is not None:
            context = kwargs.get("symbolic_context")
            if len(args) > _CONTEXT_POSITION:
                context = args[_CONTEXT_POSITION]
            if isinstance(context, StatefulSymbolicContext):
                tracker.note_context(context)
        return original(self, *args, **kwargs)

    return create_symbol


def _noting_unversioned(original: Any) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        tracker = _tracker_of(self)
        if tracker is not None:
            tracker.unversioned = True
        return original(self, *args, **kwargs)

    return method


def _noting_memos(original: Any) -> Any:
    def method(self: Any, fake: Any, *args: Any) -> Any:
        tracker = None if fake is None else _tracker_of(fake.fake_mode.shape_env)
        if tracker is not None:
            names = self._memo(fake), self._memo_vc(fake), self._memo_epoch(fake)
            tracker.note_memo(fake, names)
        return original(self, fake, *args)

    return method


def _noting_layouts(original: Any) -> Any:
    is_answered = original.__name__ in _ANSWERS
    answer = _ANSWERS.get(original.__name__)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_answered and getattr(_forgetting, "active", False):
            expr = self._expr if answer is None else self.expr
            if not getattr(expr, "is_number", True):
                return answer
        # The first argument is the calling file; caches on tensors are filled from c10.
        if args and (not isinstance(args[0], str) or "c10/core/" in args[0]):
            tracker = _tracker_of(self.shape_env)
            if tracker is not None:
                tracker.layouts_cached = True
        return original(self, *args, **kwargs)

    return method
