"""Recognize files that are no captures by their first and last bytes, for error messages.

Nothing in the file is unpacked or loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

_RECORD = "Record a frame with `torch-fakeify run SCRIPT`, which writes captures (*.fkf)"
_ZIP = b"PK\x03\x04"
_MANIFEST = b"manifest.json"
_MOST_NAMED = 5


class Kind(NamedTuple):
    """A kind of file, and what to do with it."""

    name: str
    fix: str = _RECORD


_ARCHIVES: tuple[tuple[Callable[[bytes], bool], Kind], ...] = (
    (
        lambda names: b"/models/" in names and b"/archive_format" in names,
        Kind(
            "a file of torch.export.save",
            "Load it with torch.export.load, and compile its module() with"
            " backend=torch_fakeify.record(DIRECTORY)",
        ),
    ),
    (
        lambda names: b"/constants.pkl" in names,
        Kind("a file of torch.jit.save", f"TorchScript has no captures. {_RECORD}"),
    ),
    (lambda names: b"/data.pkl" in names, Kind("a file of torch.save, such as weights")),
    (lambda names: b".npy" in names, Kind("a file of numpy.savez")),
)
"""Kinds of ZIP files, by names of their members."""

_PACKED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}

_SIGNATURES: tuple[tuple[bytes, Kind], ...] = (
    (b"PK\x05\x06", Kind("an empty ZIP file")),
    (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", Kind("a file of torch.save, such as weights")),
    (b"\x93NUMPY", Kind("a file of numpy.save")),
    *((mark, Kind(f"a file packed by {name}", "Unpack it")) for mark, name in _PACKED.items()),
    (
        b'{"format":"torch_fakeify.records"',
        Kind(
            "records as text, of torch_fakeify.dumps or `show --json`",
            "Read it with torch_fakeify.loads; Capture.save writes a capture",
        ),
    ),
    *((mark, Kind("a web page")) for mark in (b"<!doctype", b"<!DOCTYPE", b"<html")),
    *((b"\x80" + bytes([protocol]), Kind("a pickle")) for protocol in range(2, 6)),
)
"""Kinds of other files, by their first bytes."""


def kind_of(head: bytes, tail: bytes) -> Kind | None:
    """Return the kind of a file, or ``None`` if it may be a capture.

    Args:
        head: its first bytes.
        tail: its last ones.
    """
    if head.startswith(_ZIP):
        return _kind_of_archive(head, tail)
    if not head:
        return Kind("an empty file", "Its writer has not finished. Record the frame again")
    if _ZIP.startswith(head):
        return Kind("the beginning of a ZIP file", "Copy it again, or record the frame again")
    for mark, kind in _SIGNATURES:
        if head.startswith(mark):
            return kind
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 40:
        return Kind("a safetensors file")
    return Kind(_text_kind(head) or "a file of another kind")


def _kind_of_archive(head: bytes, tail: bytes) -> Kind | None:
    names = head + tail
    length = int.from_bytes(head[26:28], "little")
    first = head[30 : 30 + length]
    if first.endswith(b".fkf"):
        return Kind("a ZIP file of captures", "Unpack it")
    if _MANIFEST in names:
        return None
    for is_one, kind in _ARCHIVES:
        if is_one(names):
            return kind
    text = first.decode("utf-8", "replace")
    if text and len(text) <= 200 and text.isprintable():
        return Kind(f"a ZIP file with {text}")
    return None


def _text_kind(head: bytes) -> str | None:
    try:
        text = head[:4000].decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head[:4000]) - 3:  # else a character that is cut
            return None
        text = head[: error.start].decode("utf-8")
    if not all(word.isprintable() for word in text.split()):
        return None
    return "JSON" if text.lstrip()[:1] in {"{", "["} else "text"


def captures_in(directory: str | os.PathLike[str]) -> str | None:
    """Return the names of the captures in a directory as text; ``None`` if there are none."""
    try:
        found = sorted(each.name for each in Path(directory).iterdir() if each.suffix == ".fkf")
    except (OSError, ValueError):
        return None
    names = [name if name.isprintable() else ascii(name) for name in found]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(names[:_MOST_NAMED])}{more}" if names else None
