"""Remove what is private to a machine from records: absolute paths, user and host names."""

from __future__ import annotations

import functools
import getpass
import os
import platform
import re
import sys
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from .rewrite import Rewriter
from .shape_env import LocationDesc
from .tensor import ExprDesc, FrameDesc, MetaTensorDesc, StackDesc, SymDesc

if TYPE_CHECKING:
    from .frame import CaptureDesc

_T = TypeVar("_T")

# Patterns are compiled on first use: reading a capture needs none of them.
_INSTALLED = r".*[\\/](?:site|dist)-packages[\\/]"
_STANDARD = r".*[\\/]lib[\\/]python\d+(?:\.\d+)*t?[\\/]"

_PART = r"[^\s\\/:*?\"'<>|,;(){}\[\]`]+"
_SPACED = rf"{_PART}(?: +{_PART})*"
_BEFORE = r"(?<![\w.)\]}/~])"
ABSOLUTE = (
    rf"(?<=')/(?:[^'/\n]+/)+[^'/\n]*(?=')"
    rf'|(?<=")/(?:[^"/\n]+/)+[^"/\n]*(?=")'
    rf"|\A/(?:{_SPACED}/)+{_SPACED}\Z"
    rf"|{_BEFORE}/(?:{_PART}/)+(?:{_PART})?"
    rf"|(?<=file://)/(?:{_PART}/)*{_PART}"
    rf"|(?<![\w])[A-Za-z]:[\\/]+(?:{_SPACED}[\\/]+)*(?:{_PART})?"
    rf"|(?<![\w\\])\\\\{_PART}(?:\\+{_SPACED}(?=\\))*(?:\\+{_PART})+"
)
"""An absolute path in a text: of POSIX with two parts or more, of Windows, or of a share.

Folders may have blanks in their names on Windows, and elsewhere between quotes or where the path is
the whole text. `Shortener` also matches the home and the working directory.
"""
_OF_WINDOWS = r"[A-Za-z]:[\\/]|\\\\"

_OTHER = r"[^A-Za-z0-9]+"

_SECRET = r"(?i:TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY)"
_LEAST = 6
"""Fewest characters of a secret or a path that is searched for."""
_EVERYWHERE = frozenset({"root", "user", "admin", "localhost", "ubuntu", "runner"})
"""Common names of users and hosts, which are also words."""


@functools.lru_cache(maxsize=4096)
def short_path(file: str) -> str:
    """Return a file name without the folders that are private to a machine.

    The name is relative to the installed package, the standard library, the working directory, or else
    the folder that contains the file's package.
    """
    for pattern in (_INSTALLED, _STANDARD):
        if (match := re.match(pattern, file)) is not None:
            return file[match.end() :]
    path = PurePath(file)
    if not path.is_absolute():
        # Of another system, such as a share of Windows: its last part.
        return re.split(r"[\\/]", file)[-1] if re.match(_OF_WINDOWS, file) else file
    here = _project()
    if here is not None and path != here and path.is_relative_to(here):
        return str(path.relative_to(here))
    root = Path(file).parent
    while (root / "__init__.py").exists() and root != root.parent:
        root = root.parent
    return str(path.relative_to(root))


def _project() -> Path | None:
    """Return the working directory, unless a path below it would contain a user's name."""
    try:
        here = Path.cwd()
    except OSError:  # it has been removed
        return None
    return None if here == here.parent or here in _home().parents else here


@functools.cache
def _home() -> Path:
    return Path(os.path.expanduser("~"))  # noqa: PTH111 - `Path.home` raises where there is none


@functools.lru_cache(maxsize=16)
def _with_folders(*folders: Path | None) -> re.Pattern[str]:
    """Return a pattern of absolute paths, also below folders whose names have blanks or other signs."""
    unusual = [
        str(f) for f in folders if f is not None and not re.fullmatch(rf"(?:/{_PART})*/?", f"{f}")
    ]
    longest = sorted(map(re.escape, unusual), key=len, reverse=True)
    below = "".join(rf"{_BEFORE}{folder}(?!{_PART})(?:[\\/]{_PART})*|" for folder in longest)
    return re.compile(below + ABSOLUTE)


class Shortener:
    """Shortens the paths in the texts of one record; different paths stay different."""

    def __init__(self) -> None:
        self._pattern = _with_folders(_home(), _project())
        self._short: dict[str, str] = {}
        self._taken: set[str] = set()

    def text(self, text: str) -> str:
        """Return the text with every absolute path shortened."""
        if "/" not in text and "\\" not in text:
            return text
        return self._pattern.sub(lambda match: self._path(match[0]), text)

    def _path(self, path: str) -> str:
        cached = self._short.get(path)
        if cached is None:
            short = short_path(path)
            if short == _home().name:  # it is the user's name
                short = "~"
            cached = short if "/" in short or short == "~" else f".../{short}"
            number = 1
            whole = cached
            while cached in self._taken:
                number += 1
                cached = f"{whole}~{number}"
            self._short[path] = cached
            self._taken.add(cached)
        return cached

    def identifiers(self) -> dict[str, str]:
        """Return replacements of the shortened paths inside names of FX nodes.

        Dynamo names an input after its source, which may be an item of a dictionary keyed by paths.
        """
        found: dict[str, str] = {}
        for number, (path, short) in enumerate(self._short.items(), start=1):
            old = re.sub(_OTHER, "_", path).strip("_")
            if len(old) >= _LEAST:
                last = re.sub(_OTHER, "_", short.rpartition("/")[2]).strip("_")
                found[old.lower()] = f"path{number}_{last}"
        return found


def short_message(text: str) -> str:
    """Return the message of an exception without paths, names of user and host, and secrets.

    Secrets are the values of environment variables named like ``TOKEN`` or ``PASSWORD``.
    """
    text = Shortener().text(text)
    for value, word in _private():
        text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", word, text)
    return text


def is_secret(variable: str) -> bool:
    """Return whether the value of an environment variable of this name is a secret."""
    return re.search(_SECRET, variable) is not None


def _private() -> list[tuple[str, str]]:
    found = [
        (value, f"<{name}>")
        for name, value in sorted(os.environ.items())
        if is_secret(name) and len(value) >= _LEAST
    ]
    for find, word in ((_user, "<user>"), (platform.node, "<host>")):
        name = find()
        if len(name) > 2 and name not in _EVERYWHERE:
            found.append((name, word))
    return sorted(found, key=lambda pair: -len(pair[0]))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # it has no name
        return ""


def redact_paths(desc: CaptureDesc) -> CaptureDesc:
    """Return the frame with every absolute path in its texts shortened.

    Most frames have paths only in the stacks of their shape environment.
    """
    rest = msgspec.structs.replace(desc, shape_env=None)
    if short_paths(rest) is rest:
        return msgspec.structs.replace(desc, shape_env=short_paths(desc.shape_env))
    return short_paths(desc)


_POSIX_IN_JSON = rb"/(?:(?<=:/)|(?<=['\"]/)[^/\"]|(?:(?<=[^\w.)\]}/~]/)|(?<=\\[nrtbf]/)|(?<=\\u[0-9a-fA-F]{4}/))[^\s/])"
_OF_WINDOWS_IN_JSON = rb'\\\\(?:(?<=[:"]\\\\)|\\\\)'


def may_mention_path(text: bytes) -> bool:
    """Return whether JSON may contain an absolute path; ``False`` if `short_paths` would find none."""
    # Each search begins with one character, and a rare one: this makes it fast.
    return (b"/" in text and re.search(_POSIX_IN_JSON, text) is not None) or (
        b"\\" in text and re.search(_OF_WINDOWS_IN_JSON, text) is not None
    )


def short_paths(record: _T) -> _T:
    """Return the record with every absolute path in its texts shortened; unchanged parts are shared.

    Args:
        record: any record; a part that it contains twice stays one object.
    """
    shortener = Shortener()
    result = Rewriter(
        lambda part: shortener.text(part) if type(part) is str else part,
        leaves=_WITHOUT_TEXTS,
        before=_with_short_file,
    )(record)
    names = shortener.identifiers()
    if names:
        pattern = re.compile(
            "|".join(sorted(map(re.escape, names), key=len, reverse=True)), re.IGNORECASE
        )

        def renamed(part: Any) -> Any:
            if type(part) is not str or "_" not in part:
                return part
            return pattern.sub(lambda match: names[match[0].lower()], part)

        result = Rewriter(renamed, leaves=_WITHOUT_TEXTS, skipped=_NAMES_OF_TORCH)(result)
    return result


_WITHOUT_TEXTS = frozenset({int, float, bool, bytes, type(None), ExprDesc, SymDesc})
"""Types whose values contain no text of the user."""
_NAMES_OF_TORCH = MappingProxyType({MetaTensorDesc: frozenset({"dtype", "layout", "device"})})
"""Fields whose values are names of torch's own, such as ``sparse_csr``."""


def _with_short_file(part: Any) -> Any:
    """Return a frame of a stack, or a location, with the names of its files shortened."""
    if isinstance(part, FrameDesc):
        return _with_file(part, short_path(part.file))
    if isinstance(part, LocationDesc) and part.user is not None:
        # Torch has shortened the name, to the path without its beginning at least.
        frames = tuple([_with_file(f, _of_location(f.file)) for f in part.user.frames])
        if frames != part.user.frames:
            return msgspec.structs.replace(part, user=StackDesc(frames=frames))
    return part


def _with_file(frame: FrameDesc, file: str) -> FrameDesc:
    return frame if file == frame.file else msgspec.structs.replace(frame, file=file)


@functools.lru_cache(maxsize=4096)
def _of_location(file: str) -> str:
    if file.startswith("torch/") or "/" not in file:
        return file
    torch = getattr(sys.modules.get("torch"), "__file__", None) or ""
    for folder in (str(Path(torch).parent), *sys.path):
        installed = Path(folder, file)
        if re.match(_INSTALLED, f"{installed}") and installed.exists():
            return file
    return file.rpartition("/")[2]
