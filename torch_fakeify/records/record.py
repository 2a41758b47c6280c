"""The base of every record, and how a record is printed."""

from __future__ import annotations

import html
from typing import Any

import msgspec

_LONGEST = 2000
"""Most characters of a field in a notebook."""


class Record(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    repr_omit_defaults=True,
    forbid_unknown_fields=True,
    gc=False,
):
    """Base of every record: immutable, compared by value, keyword-only. Its ``repr`` has no fields with defaults.

    A record refers only to records made before it, so there are no cycles to collect.
    """

    def __repr__(self) -> str:
        fields = ", ".join([f"{name}={value!r}" for name, value in set_fields(self)])
        return f"{type(self).__name__}({fields})"

    def _repr_html_(self) -> str:
        """Return the fields without defaults as a table, for a notebook."""
        cells = ((name, _clipped(repr(value))) for name, value in set_fields(self))
        rows = [f"<tr><td>{name}</td><td>{html.escape(text)}</td></tr>" for name, text in cells]
        return f"<table><tr><td>{type(self).__name__}</td><td></td></tr>{''.join(rows)}</table>"


def set_fields(record: Record) -> list[tuple[str, Any]]:
    """Return the fields that do not equal their defaults.

    Msgspec's own ``repr`` compares by identity, which equal empty tuples do not have on Python 3.10.
    """
    names = record.__struct_fields__
    defaults = record.__struct_defaults__
    first = len(names) - len(defaults)
    found: list[tuple[str, Any]] = []
    for at, name in enumerate(names):
        value = getattr(record, name)
        if at >= first:
            default = defaults[at - first]
            if value is default or (type(value) is type(default) and value == default):
                continue
        found.append((name, value))
    return found


def _clipped(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
