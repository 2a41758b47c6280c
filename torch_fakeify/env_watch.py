"""What torch remembers outside of a ``ShapeEnv`` about it, noted while a checkpoint of it lives.

``SymNode`` objects, memos on fake tensors, the converters of fake tensor modes and symbolic contexts
all hold symbols. A rollback has to know which of them were made since. So a few of torch's methods
are wrapped while at least one environment is watched; with the last watch the wrappers go.
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from ._torch import (
    FakeTensor,
    ShapeEnv,
    StatefulSymbolicContext,
    SymNode,
    SymNumberMemoDescriptor,
    forget_layouts,
    layout_methods,
    uninteresting_files,
)
from .errors import ShapeEnvError
from .fork_locks import fork_safe_lock

if TYPE_CHECKING:
    from collections.abc import Callable

    from .env_state import SavedState

__all__ = ["AbandonedSymNode", "Watch"]

_watches: dict[int, weakref.ref[Watch]] = {}
"""The watch of each watched environment, by the environment's ``id``: the watch keeps it alive."""
_wrapped: list[tuple[type[Any], str, Any]] = []
"""What is wrapped now: class, name of the method, torch's own."""

_changing = fork_safe_lock()
"""Held while the watches or the wrappers change: environments of several threads share them."""

_unasked = threading.local()
"""Whether this thread sets the layouts of tensors to what they are: no guard comes of that."""
_ANSWERS = {"guard_bool": True, "guard_or_false": False, "expect_true": True, "maybe_as_int": None}
"""What torch's checks of sizes and strides give for those that a tensor has.

None of these is taken for a plain int, whatever has been learned of it: an older checkpoint may take
that back.
"""

_CONTEXT_POSITION = 6
"""Of ``symbolic_context`` among the parameters of ``ShapeEnv.create_symbol``, ``self`` not counted."""


class Watch:
    """Notes what is made of one ``ShapeEnv`` outside of it, so that it can be taken back.

    The notes are weak but for the tables of symbolic contexts.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self._nodes: weakref.WeakSet[Any] = weakref.WeakSet()
        self._undo: list[Callable[[], None]] = []
        """What takes back each note, in the order of the notes."""
        self._dropped = 0
        """How many of them were dropped from the front."""
        self._seen: set[Any] = set()
        """What was noted since the latest `mark`: a second note would say nothing more."""
        self._layouts_known = False
        self._unversioned = False
        key = id(env)

        def gone(ref: weakref.ref[Watch]) -> None:
            with _changing:
                if _watches.get(key) is ref:
                    del _watches[key]
                if not _watches:
                    _unwrap()

        with _changing:
            # First itself: while methods are wrapped, an older one may turn out to be the last.
            _watches[key] = weakref.ref(self, gone)
            _wrap()

    def mark(self) -> int:
        """The present place in the notes, for `take_back`."""
        self._seen.clear()
        return self._dropped + len(self._undo)

    def forget_before(self, mark: int) -> None:
        """Notes older than this place are not needed any more."""
        del self._undo[: mark - self._dropped]
        self._dropped = max(self._dropped, mark)

    def take_back(self, mark: int, state: SavedState) -> None:
        """Undoes what was noted since; to be called while the environment is not yet rolled back."""
        if self._layouts_known:
            self._forget_layouts()
        self._abandon(state)
        while len(self._undo) > mark - self._dropped:
            self._undo.pop()()
        self._seen.clear()
        if self._unversioned:
            self._forget_expressions(state.replacements_version)

    # --- notes ---

    def note_node(self, sym_node: Any) -> None:
        """A ``SymNode`` of this environment was made."""
        self._nodes.add(sym_node)

    def note_layout(self) -> None:
        """C++ has asked for something that it then remembers of a tensor, as if for good."""
        self._layouts_known = True

    def note_unversioned(self) -> None:
        """Replacements are changed without a new version, so what a ``SymNode`` remembers is old."""
        self._unversioned = True

    def note_context(self, context: Any) -> None:
        """A symbol is looked up in, or written into, a stateful symbolic context."""
        tables: dict[int, dict[str, Any]] = context.shape_env_to_source_to_symbol_cache
        if self._first(("context", id(tables))):
            key = id(self.env)
            table = tables.get(key)
            then = None if table is None else dict(table)
            self._undo.append(lambda: _restore_table(tables, key, table, then))

    def note_memo(self, fake: Any, names: tuple[str, ...]) -> None:
        """A memo on a fake tensor is about to be set or dropped."""
        values = vars(fake)
        if names[0] not in values:  # the tensor is being made
            self.note_mode(fake.fake_mode)
        elif self._first(("memo", id(fake), names)):
            then = {name: values[name] for name in names if name in values}
            ref = weakref.ref(fake)
            self._undo.append(lambda: _restore_memo(ref(), names, then))

    def note_mode(self, mode: Any) -> None:
        """A fake tensor is made in a mode; its converter does not know it yet."""
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

    # --- taking back ---

    def _abandon(self, state: SavedState) -> None:
        for sym_node in tuple(self._nodes):
            gone = state.new_symbols(sym_node._expr)
            if gone:
                names = ", ".join(sorted(symbol.name for symbol in gone))
                reason = f"the symbol {names} was" if len(gone) == 1 else f"{names} were"
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
        _unasked.active = True
        try:
            forget_layouts(fakes)
        finally:
            _unasked.active = False

    def _forget_expressions(self, version: int) -> None:
        for sym_node in _living(SymNode):
            if sym_node.shape_env is self.env and sym_node._expr_ver == version:
                sym_node._expr_ver = -1


class _NoShapeEnv:
    """Stands where an abandoned ``SymNode`` had its environment; whoever asks it gets an error."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling ask for what need not be there
            raise AttributeError(name)
        raise self.error()

    def error(self) -> ShapeEnvError:
        """Why it cannot be used."""
        return ShapeEnvError(
            f"{self._reason}, and the ShapeEnv was rolled back",
            fix="Make the tensor or the size again",
        )

    def __repr__(self) -> str:
        return f"<{self._reason}, which was rolled back>"


class AbandonedSymNode(SymNode):
    """A ``SymNode`` that a rollback took back: it can be printed, and every use is an error."""

    @property
    def expr(self) -> Any:
        """Nobody's expression."""
        raise self.shape_env.error()  # type: ignore[union-attr]

    @property
    def hint(self) -> Any:
        """Nobody's hint."""
        raise self.shape_env.error()  # type: ignore[union-attr]

    def str(self) -> str:
        """The expression as it was, marked."""
        return f"{self._expr} (rolled back)"


# --- what the notes take back ------------------------------------------------------------------------


def _restore_table(
    tables: dict[int, dict[str, Any]],
    key: int,
    table: dict[str, Any] | None,
    then: dict[str, Any] | None,
) -> None:
    if table is None or then is None:
        tables.pop(key, None)
        return
    table.clear()
    table.update(then)
    tables[key] = table


def _restore_memo(fake: Any, names: tuple[str, ...], then: dict[str, Any]) -> None:
    if fake is None:
        return
    for name in names:
        vars(fake).pop(name, None)
    vars(fake).update(then)


def _restore_converter(converter: Any, tensors: set[Any], storages: set[Any]) -> None:
    if converter is None:
        return
    for memo, then in ((converter.tensor_memo, tensors), (converter.storage_memo, storages)):
        for key in set(memo) - then:
            memo.pop(key, None)


def _is_symbolic(fake: Any) -> bool:
    """Whether it has a layout in terms of symbols that are still there."""
    if fake.layout is not torch.strided:
        return False
    parts = (*fake.size(), *fake.stride(), fake.storage_offset())
    kinds = {type(part.node) for part in parts if isinstance(part, torch.SymInt)}
    return bool(kinds) and AbandonedSymNode not in kinds


def _living(kind: type[Any]) -> list[Any]:
    """Every object of a class; slow, as it looks at everything that the process has."""
    return [found for found in gc.get_objects() if issubclass(type(found), kind)]


# --- the wrappers ------------------------------------------------------------------------------------


def _watch_of(env: Any) -> Watch | None:
    ref = _watches.get(id(env))
    return None if ref is None else ref()


def _wrap() -> None:
    """Put the wrappers in place, unless they are; torch leaves them out when it says which line asks for a guard."""
    if _wrapped:
        return
    uninteresting_files().add(__file__)
    made: list[tuple[type[Any], str, Callable[[Any], Any]]] = [
        (SymNode, "__init__", _noting_nodes),
        (ShapeEnv, "create_symbol", _noting_contexts),
        (ShapeEnv, "_constrain_unify", _noting_unversioned),
        (ShapeEnv, "patch_source_specialization", _noting_unversioned),
        (SymNumberMemoDescriptor, "__set__", _noting_memos),
        (SymNumberMemoDescriptor, "__get__", _noting_memos),  # which drops an outdated memo
    ]
    made += [(SymNode, name, _noting_layouts) for name in layout_methods()]
    made.append((SymNode, "maybe_as_int", _noting_layouts))
    for cls, name, wrapper in made:
        own = vars(cls)[name]
        _wrapped.append((cls, name, own))
        setattr(cls, name, _around(own, wrapper))


@functools.lru_cache(maxsize=32)
def _around(own: Any, wrapper: Callable[[Any], Any]) -> Any:
    """A method of torch, wrapped; made once, since checkpoints come and go."""
    method: Any = functools.wraps(own)(wrapper(own))
    method.takes_notes = True  # who makes symbols himself looks for it
    return method


def _unwrap() -> None:
    """Put torch's own methods back."""
    uninteresting_files().discard(__file__)
    while _wrapped:
        cls, name, own = _wrapped.pop()
        setattr(cls, name, own)


def _noting_nodes(own: Any) -> Any:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        watch = _watch_of(self.shape_env)
        if watch is not None:
            watch.note_node(self)

    return init


def _noting_contexts(own: Any) -> Any:
    def create_symbol(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch = _watch_of(self)
        if watch is not None:
            context = kwargs.get("symbolic_context")
            if len(args) > _CONTEXT_POSITION:
                context = args[_CONTEXT_POSITION]
            if isinstance(context, StatefulSymbolicContext):
                watch.note_context(context)
        return own(self, *args, **kwargs)

    return create_symbol


def _noting_unversioned(own: Any) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch = _watch_of(self)
        if watch is not None:
            watch.note_unversioned()
        return own(self, *args, **kwargs)

    return method


def _noting_memos(own: Any) -> Any:
    def method(self: Any, fake: Any, *args: Any) -> Any:
        watch = None if fake is None else _watch_of(fake.fake_mode.shape_env)
        if watch is not None:
            names = self._memo(fake), self._memo_vc(fake), self._memo_epoch(fake)
            watch.note_memo(fake, names)
        return own(self, fake, *args)

    return method


def _noting_layouts(own: Any) -> Any:
    is_answered = own.__name__ in _ANSWERS
    answer = _ANSWERS.get(own.__name__)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_answered and getattr(_unasked, "active", False):
            expr = self._expr if answer is None else self.expr
            if not getattr(expr, "is_number", True):
                return answer
        # A guard names the file that asks; what torch remembers of a tensor it asks for in c10.
        if args and (not isinstance(args[0], str) or "c10/core/" in args[0]):
            watch = _watch_of(self.shape_env)
            if watch is not None:
                watch.note_layout()
        return own(self, *args, **kwargs)

    return method
