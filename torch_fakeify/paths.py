"""File names as they stand in records: relative to their package or project, never absolute."""

from __future__ import annotations

import functools
import re
from pathlib import Path, PurePath

_INSTALLED = re.compile(r".*[\\/](?:site|dist)-packages[\\/]")
_STANDARD = re.compile(r".*[\\/]lib[\\/]python\d+(?:\.\d+)*t?[\\/]")
_QUOTED = re.compile(r'File "([^"\n]+)"')


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


def short_stack_text(text: str) -> str:
    """A formatted stack with every ``File "..."`` shortened."""
    return _QUOTED.sub(lambda m: f'File "{short_path(m[1])}"', text)
