"""Checks of the fields of sources: annotated types, and inert text where torch evaluates it."""

from __future__ import annotations

import keyword
import types
import typing
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["RENDERED_RAW", "is_a"]


def _is_identifier(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text)


def _is_dotted(text: str) -> bool:
    return all(map(_is_identifier, text.split(".")))


def _is_inert(text: str) -> bool:
    """Whether evaluating the text cannot call anything."""
    return not any(sign in text for sign in "()@;\n\r")


RENDERED_RAW: Mapping[tuple[str, str], Callable[[str], bool]] = types.MappingProxyType(
    {
        ("ImportSource", "module_name"): _is_dotted,
        ("DefaultsSource", "idx_key"): _is_identifier,
        ("GradSource", "member"): _is_identifier,
        ("ConstantSource", "source_name"): _is_inert,
    }
)
"""Checks of fields that torch inserts into Python text verbatim, by class and field."""


def is_a(value: object, hint: Any) -> bool:
    """Whether a value has exactly the annotated type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is object:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(is_a(value, arg) for arg in args)
    if origin is frozenset:
        return isinstance(value, frozenset) and all(is_a(item, args[0]) for item in value)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = args[:1] * len(value) if args[-1] is ... else args
        return len(value) == len(kinds) and all(map(is_a, value, kinds))
    return type(value) is (hint if hint is not None else type(None))
