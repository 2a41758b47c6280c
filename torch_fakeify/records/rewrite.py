"""Walk and rewrite records."""

from __future__ import annotations

import operator
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from .tensor import ExprDesc, SourceDesc, StackDesc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_LEAVES = frozenset({SourceDesc, StackDesc, str, int, float, bool, bytes, type(None)})


class Rewriter:
    """Rewrites records bottom-up by a function of their parts.

    Shared parts stay shared, and unchanged parts are the same objects.

    Args:
        change: called with a record whose parts are rewritten; returns the replacement, or the same
            object for no change. An expression is one part.
        leaves: types of parts that are neither visited nor changed; texts are changed if ``str`` is
            not among them.
        before: called with a record before its parts are rewritten.
        skipped: names of fields that are not visited, by type of record.
    """

    def __init__(
        self,
        change: Callable[[Any], Any],
        *,
        leaves: frozenset[type[Any]] = _LEAVES,
        before: Callable[[Any], Any] | None = None,
        skipped: Mapping[type[Any], frozenset[str]] = MappingProxyType({}),
    ) -> None:
        self._change = change
        self._leaves = leaves
        self._before = before
        self._skipped = skipped
        # By the id() of a part, which the entry references.
        self._done: dict[int, tuple[Any, Any]] = {}

    def __call__(self, part: Any) -> Any:
        """Return a record, or a tuple of records, rewritten."""
        if type(part) in self._leaves:
            return part
        done = self._done.get(id(part))
        if done is not None:
            return done[1]
        made = part
        # In one function: a record may be the last of hundreds, each in the one before.
        if isinstance(part, tuple):
            items = [self(item) for item in part]  # pyright: ignore[reportUnknownVariableType]
            if any(map(operator.is_not, items, part)):
                kind: Any = type(part)  # a named tuple is made of its fields
                made = tuple(items) if kind is tuple else kind(*items)
        elif isinstance(part, msgspec.Struct):
            if self._before is not None:
                made = self._before(made)
            changes: dict[str, Any] = {}
            skipped = self._skipped.get(type(part), ())
            for field in () if isinstance(part, ExprDesc) else part.__struct_fields__:
                old = getattr(made, field)
                if type(old) in self._leaves or field in skipped:
                    continue
                if (new := self(old)) is not old:
                    changes[field] = new
            made = self._change(msgspec.structs.replace(made, **changes) if changes else made)
        elif isinstance(part, str):
            return self._change(part)
        self._done[id(part)] = (part, made)
        return made


def parts_of(part: Any) -> Sequence[Any]:
    """Return the items of a tuple or the fields of a record; nothing of any other value."""
    if isinstance(part, tuple):
        return part  # pyright: ignore[reportUnknownVariableType]
    return msgspec.structs.astuple(part) if isinstance(part, msgspec.Struct) else ()


def walk(
    record: Any, kind: type[Any] | tuple[type[Any], ...], *, inside: bool = False
) -> Iterator[Any]:
    """Yield the parts of a record that are instances of a type, each object once, itself included.

    Args:
        record: any record, or a tuple of records.
        kind: the type or types.
        inside: whether to also search inside such parts.
    """
    skipped = {each for each in _LEAVES if not issubclass(each, kind)}
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
        if type(part) not in _LEAVES:
            stack += [each for each in reversed(parts_of(part)) if type(each) not in skipped]
