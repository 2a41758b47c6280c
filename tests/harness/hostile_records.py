"""Records with one text in them exchanged, for each place that a file has a text in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Path: TypeAlias = "tuple[str | int, ...]"


def texts(record: Any) -> Iterator[tuple[Path, str, str]]:
    """Every text of a record: its path, its kind and itself.

    The kind is the path from the last two records on, without positions: texts of one kind are
    treated alike.
    """
    yield from _texts(record, (), (), set())


def _texts(
    value: Any, path: Path, kind: tuple[str, ...], done: set[int]
) -> Iterator[tuple[Path, str, str]]:
    if isinstance(value, str):
        yield path, ".".join(kind[-3:]), value
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _texts(item, (*path, i), kind, done)
    elif isinstance(value, msgspec.Struct) and id(value) not in done:
        done.add(id(value))
        for name in value.__struct_fields__:
            here = (*kind, f"{type(value).__name__}.{name}")
            yield from _texts(getattr(value, name), (*path, name), here, done)


def exchanged(record: Any, path: Path, change: Callable[[str], str]) -> Any:
    """The record with one text changed."""
    if not path:
        return change(record)
    step, rest = path[0], path[1:]
    if isinstance(step, int):
        items = list(record)
        items[step] = exchanged(items[step], rest, change)
        return tuple(items)
    return msgspec.structs.replace(record, **{step: exchanged(getattr(record, step), rest, change)})


def places(record: Any, each: int = 2) -> list[tuple[str, Path]]:
    """Some paths of each kind of text."""
    found: dict[str, list[Path]] = {}
    for path, kind, _ in texts(record):
        known = found.setdefault(kind, [])
        if len(known) < each:
            known.append(path)
    return [(kind, path) for kind, paths in found.items() for path in paths]
