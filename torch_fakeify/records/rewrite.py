"""Walk and rewrite records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from .tensor import ExprDesc, SourceDesc, StackDesc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LEAVES = (SourceDesc, StackDesc, str, int, float, bytes, type(None))
_LEAF_CLASSES = frozenset({*_LEAVES, bool})


class Rewriter:
    """Rewrites records bottom-up by a function of their parts.

    Shared parts stay shared, and unchanged parts are the same objects.

    Args:
        change: called with a record whose parts are rewritten; returns the replacement, or the same
            object for no change. An expression is one part; sources and stacks are not visited.
    """

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self._change = change
        # By the id() of a part, which the entry references.
        self._done: dict[int, tuple[Any, Any]] = {}

    def __call__(self, part: Any) -> Any:
        """Return a record, or a tuple of records, rewritten."""
        if isinstance(part, _LEAVES):
            return part
        done = self._done.get(id(part))
        if done is None:
            done = self._done[id(part)] = (part, self._rewritten(part))
        return done[1]

    def _rewritten(self, part: Any) -> Any:
        if isinstance(part, tuple):
            return self._tuple(part)  # pyright: ignore[reportUnknownArgumentType]
        if isinstance(part, msgspec.Struct):
            return self._change(part if isinstance(part, ExprDesc) else self._struct(part))
        return part

    def _tuple(self, part: tuple[Any, ...]) -> Any:
        items = [self(item) for item in part]
        if all(new is old for new, old in zip(items, part, strict=True)):
            return part
        kind: Any = type(part)  # a named tuple is made of its fields
        return tuple(items) if kind is tuple else kind(*items)

    def _struct(self, part: msgspec.Struct) -> msgspec.Struct:
        changes: dict[str, Any] = {}
        for field in part.__struct_fields__:
            old = getattr(part, field)
            new = self(old)
            if new is not old:
                changes[field] = new
        return msgspec.structs.replace(part, **changes) if changes else part


def walk(
    record: Any, kind: type[Any] | tuple[type[Any], ...], *, inside: bool = False
) -> Iterator[Any]:
    """Yield the parts of a record that are instances of a type, each object once, itself included.

    Args:
        record: any record, or a tuple of records.
        kind: the type or types.
        inside: whether to also search inside such parts.
    """
    skipped = {each for each in _LEAF_CLASSES if not issubclass(each, kind)}
    seen: set[int] = set()
    stack = [record]
    while stack:
        part = stack.pop()
        if type(part) in skipped or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, kind):
            yield part
            if not inside:
                continue
        if isinstance(part, tuple):
            parts: Any = part  # pyright: ignore[reportUnknownVariableType]
        elif isinstance(part, msgspec.Struct) and type(part) not in _LEAF_CLASSES:
            parts = [getattr(part, field) for field in part.__struct_fields__]
        else:
            continue
        stack += [each for each in reversed(parts) if type(each) not in skipped]
