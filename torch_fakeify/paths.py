"""File names as they stand in records: relative to their package or project, never absolute."""

from __future__ import annotations

import functools
import re
from pathlib import Path, PurePath
from typing import Any, TypeVar

import msgspec

from .desc import ExprDesc, FrameDesc, SourceDesc

_T = TypeVar("_T")
_INSTALLED = re.compile(r".*[\\/](?:site|dist)-packages[\\/]")
_STANDARD = re.compile(r".*[\\/]lib[\\/]python\d+(?:\.\d+)*t?[\\/]")


@functools.lru_cache(maxsize=4096)
def short_path(file: str) -> str:
    """A file name without what is private to a machine.

    An installed module is named from its package on, a module of the standard library from the
    library on, a file below the working directory from there on, and any other file from the
    folder on that is no package itself.
    """
    for pattern in (_INSTALLED, _STANDARD):
        if (match := pattern.match(file)) is not None:
            return file[match.end() :]
    path = PurePath(file)
    if not path.is_absolute():
        return file
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    root = Path(file).parent
    while (root / "__init__.py").exists() and root != root.parent:
        root = root.parent
    return str(path.relative_to(root))


def short_paths(record: _T) -> _T:
    """The record with every file name of its stacks shortened; unchanged parts are shared.

    Args:
        record: a record without cycles; a stack that it holds twice stays one object.
    """
    return _shorten(record, {})


def _shorten(value: Any, done: dict[int, tuple[Any, Any]]) -> Any:
    known = done.get(id(value))
    if known is not None:
        return known[1]
    match value:
        case FrameDesc():
            result: Any = msgspec.structs.replace(value, file=short_path(value.file))
        case tuple():
            items = tuple(_shorten(item, done) for item in value)
            same = all(a is b for a, b in zip(items, value, strict=True))
            result = value if same else items
        case ExprDesc() | SourceDesc():
            return value
        case msgspec.Struct():
            old = [(name, getattr(value, name)) for name in value.__struct_fields__]
            new = {name: _shorten(part, done) for name, part in old}
            changed = {name: new[name] for name, part in old if new[name] is not part}
            result = msgspec.structs.replace(value, **changed) if changed else value
        case _:
            return value
    done[id(value)] = (value, result)
    return result
