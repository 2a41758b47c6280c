"""Records rewritten from the leaves up: a part that nothing changes stays the object that it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from .desc import ExprDesc, SourceDesc, StackDesc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Rewriter", "parts_of"]

_LEAVES = (SourceDesc, StackDesc, str, int, float, bytes, type(None))


class Rewriter:
    """Rewrites records by a function of their parts.

    What is one object in a record is one object in the result.

    Args:
        change: gets a record whose own parts are rewritten already, and gives what stands in its
            place: the very same object where there is nothing to do. An expression is one part;
            sources and stacks stay.
    """

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self._change = change
        # By the id of a part, which the entry keeps alive.
        self._done: dict[int, tuple[Any, Any]] = {}

    def __call__(self, part: Any) -> Any:
        """A record, or a tuple of records, rewritten."""
        if isinstance(part, _LEAVES):
            return part
        known = self._done.get(id(part))
        if known is None:
            known = self._done[id(part)] = (part, self._rewritten(part))
        return known[1]

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
        kind: Any = type(part)  # a named one is made of its fields
        return tuple(items) if kind is tuple else kind(*items)

    def _struct(self, part: msgspec.Struct) -> msgspec.Struct:
        changes: dict[str, Any] = {}
        for field in part.__struct_fields__:
            old = getattr(part, field)
            new = self(old)
            if new is not old:
                changes[field] = new
        return msgspec.structs.replace(part, **changes) if changes else part


def parts_of(
    record: Any, kind: type[Any] | tuple[type[Any], ...], *, inside: bool = False
) -> Iterator[Any]:
    """Every part of a record that is of some kind, each object once, the record itself included.

    Args:
        record: any record, or a tuple of records.
        kind: of the parts.
        inside: whether to look for such parts inside such parts, too.
    """
    seen: set[int] = set()
    stack = [record]
    while stack:
        part = stack.pop()
        wanted = isinstance(part, kind)
        if (isinstance(part, _LEAVES) and not wanted) or id(part) in seen:
            continue
        seen.add(id(part))
        if wanted:
            yield part
        if wanted and not inside:
            continue
        if isinstance(part, tuple):
            stack.extend(reversed(part))  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(part, msgspec.Struct):
            stack.extend(getattr(part, f) for f in reversed(part.__struct_fields__))
