"""Capture files taken apart to the JSON of their members, and put together again.

Mostly with a manifest that fits, so that what is behind the checksums is reached; some with a ZIP that no
tool writes.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import struct
import zipfile
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass
class Parts:
    """A capture file as the JSON of its members."""

    manifest: dict[str, Any]
    members: dict[str, Any]


def unpack(data: bytes) -> Parts | None:
    """The parts of a file, ``None`` where it is too broken for that."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(info.file_size for info in archive.infolist()) > 1 << 20:
                return None
            found = {info.filename: json.loads(archive.read(info)) for info in archive.infolist()}
    except Exception:  # noqa: BLE001 - a broken file is no part of this
        return None
    manifest = found.pop("manifest.json", None)
    if not isinstance(manifest, dict) or not found:
        return None
    return Parts(manifest, found)


@dataclass
class Entry:
    """One member as it stands in the ZIP: what is said of it may be wrong."""

    name: bytes
    data: bytes
    method: int = 8
    flags: int = 0
    mode: int = 0o100644
    packed: bytes | None = None
    """What stands in the file, instead of what ``data`` packs to."""
    changes: dict[str, int] = field(default_factory=dict)
    """Fields of the headers to change: ``local_`` or ``central_`` and the field, and by how much."""


def zip_bytes(entries: Sequence[Entry], **end: Any) -> bytes:
    """A ZIP of entries, also of what no tool writes."""
    out = bytearray(end.get("before", b""))
    directory = bytearray()
    for entry in entries:
        packed = entry.packed
        if packed is None:
            packed = deflate(entry.data) if entry.method == 8 else entry.data
        right = {"crc": zlib.crc32(entry.data), "packed": len(packed), "size": len(entry.data)}

        def fields(place: str, entry: Entry = entry, right: dict[str, int] = right) -> list[int]:
            return [(right[k] + entry.changes.get(f"{place}_{k}", 0)) & 0xFFFFFFFF for k in right]

        offset = (len(out) + entry.changes.get("central_offset", 0)) & 0xFFFFFFFF
        common = (20, entry.flags, entry.method, 0, 33)
        out += struct.pack("<4s5H3L2H", b"PK\3\4", *common, *fields("local"), len(entry.name), 0)
        out += entry.name + packed
        directory += struct.pack(
            "<4sH5H3L5H2L",
            *(b"PK\1\2", 0x0314, *common, *fields("central"), len(entry.name), 0, 0, 0, 0),
            *(entry.mode << 16, offset),
        )
        directory += entry.name
    count, start = len(entries) + end.get("count", 0), len(out)
    out += directory
    out += struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, len(directory), start, 0)
    return bytes(out + end.get("after", b""))


def pairs_of_one_hash(count: int) -> list[tuple[int, int]]:
    """Pairs of numbers below 2**61 whose hash as a tuple is one.

    Method: ``tuplehash`` of CPython 3.8 and later (xxHash of 64 bits), solved for the second number.
    """
    first, second, start, size = (
        *(11400714785074694791, 14029467366897019727, 2870177450012600261),
        2**64,
    )
    inverse = pow(second, -1, size)
    found: list[tuple[int, int]] = []
    for x in itertools.count(1):
        lane = (start + x * second) % size
        lane = (lane << 31 | lane >> 33) * first % size
        y = (12345 - lane) * inverse % size
        if y < 2**61 - 1:
            found.append((x, y))
            if len(found) == count:
                return found
    raise AssertionError


def deflate(data: bytes) -> bytes:
    """The data compressed as in a ZIP."""
    packer = zlib.compressobj(1, wbits=-15)
    return packer.compress(data) + packer.flush()


def repack(parts: Parts, **texts: bytes) -> bytes:
    """A well-formed file of these parts; ``texts`` stand in for members' JSON."""
    members = {name: texts.get(name) or text_of(tree) for name, tree in parts.members.items()}
    return zip_bytes(entries_of(parts.manifest, members))


def text_of(tree: Any) -> bytes:
    """The JSON of a member."""
    return json.dumps(tree, separators=(",", ":"), ensure_ascii=True).encode()


def entries_of(manifest: dict[str, Any], members: dict[str, bytes]) -> list[Entry]:
    """The manifest, which has the sums of the members, and the members."""
    listed = [
        {"name": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in members.items()
    ]
    first = Entry(b"manifest.json", text_of({**manifest, "members": listed}))
    return [first, *(Entry(name.encode(), data) for name, data in members.items())]
