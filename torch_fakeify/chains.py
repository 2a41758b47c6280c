"""Chains of records of one type, each over the next: what is new in them comes first, without recursion."""

from __future__ import annotations

from typing import Any, TypeAlias

from .closures import Fault
from .errors import LimitError

__all__ = ["MAX_CHAIN", "Link", "too_long", "unseen"]

MAX_CHAIN = 250
"""Rows on the longest path of references, e.g. a source over its base over its base."""

Link: TypeAlias = "tuple[Any, str, Link | None]"
"""An object, the field that led to it, and the link that has the field."""


def too_long() -> Fault:
    """The error for a path of more than ``MAX_CHAIN`` rows."""
    return Fault(f"more than {MAX_CHAIN} rows in a chain", kind=LimitError)


def unseen(obj: Any, fields: tuple[str, ...], seen: dict[int, int]) -> list[Link]:
    """What ``obj`` reaches through ``fields`` and is not in ``seen``, farthest first."""
    if len(fields) == 1:
        return _line(obj, fields[0], seen)
    found: list[Link] = []
    done: set[int] = set()
    stack: list[Link] = [(obj, "", None)]
    while stack:
        link = stack[-1]
        if id(link[0]) in done:
            stack.pop()
            continue
        size = len(stack)
        for name in reversed(fields):
            child = getattr(link[0], name)
            if child is not None and id(child) not in seen and id(child) not in done:
                stack.append((child, name, link))
        if len(stack) == size:
            done.add(id(link[0]))
            found.append(stack.pop())
        elif size > MAX_CHAIN * len(fields):
            raise too_long()
    found.pop()  # obj itself
    return found


def _line(obj: Any, field: str, seen: dict[int, int]) -> list[Link]:
    """The same of a single field: there are no branches."""
    found: list[Link] = []
    link: Link = (obj, "", None)
    while True:
        child = getattr(link[0], field)
        if child is None or id(child) in seen:
            break
        if len(found) >= MAX_CHAIN:
            raise too_long()
        link = (child, field, link)
        found.append(link)
    found.reverse()
    return found
