"""Read and write capture files: the record of a frame in a container, without torch."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from torch_fakeify.errors import TRUST, FormatError, LimitError, UnsupportedValueError, WriteError
from torch_fakeify.records.frame import CaptureDesc
from torch_fakeify.records.redact_paths import may_mention_path, redact_paths, short_paths
from torch_fakeify.versions import PRODUCER, is_newer, newer_release_error

from . import limits as bounds
from .container import VERSION, Limits, read_container, write_container
from .document import Decoder, Encoder
from .faults import check_limit

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping


_MEMBER = "capture"


def _check_surroundings(desc: CaptureDesc) -> None:
    if desc.surroundings is not None:
        bounds.check_surroundings(desc.surroundings, "capture.json $.surroundings")
    bounds.check_operators(desc.operators, "capture.json $.operators")


def _members_of_version_1(desc: CaptureDesc, limits: Limits) -> dict[str, bytes]:
    _check_surroundings(desc)
    return Encoder().add(_MEMBER, desc).check(desc.shape_env, limits.products).members()


WRITERS: Mapping[int, Callable[[CaptureDesc, Limits], dict[str, bytes]]] = MappingProxyType(
    {1: _members_of_version_1}
)
"""Functions that encode a record to the members of a file, by format version, within the limits of a reader.

The function of an older version converts the record to that version, and raises ``WriteError`` for
what the version cannot represent.
"""


class CaptureFile(NamedTuple):
    """The content of a capture file, and the release that wrote it."""

    desc: CaptureDesc
    producer: str
    """The release of this package, as ``torch_fakeify 0.1.0``."""


def check_version(version: int) -> None:
    """Refuse a format version that this release does not write.

    Raises:
        WriteError: there is no writer for it.
    """
    if version not in WRITERS:
        versions = ", ".join(map(str, sorted(WRITERS)))
        raise WriteError(
            "this release cannot write that format version",
            expected=f"one of {versions}" if len(WRITERS) > 1 else f"format version {versions}",
            found=repr(version),
            fix="Ask for another one, or write the file with a release that has it",
        )


def encode_with_short_paths(desc: CaptureDesc) -> tuple[CaptureDesc, dict[str, bytes] | None]:
    """Return the frame with all absolute paths shortened, and the members of its file.

    Most frames have paths only in the stacks of their shape environment, which a search of the encoded
    text shows soonest. The members are ``None`` where the record itself had to be searched.
    """
    if not any(each.tensor_data for each in desc.graph.graphs()):  # bytes may look like a path
        short = msgspec.structs.replace(desc, shape_env=short_paths(desc.shape_env))
        # Such errors are raised when the file is written.
        with contextlib.suppress(UnsupportedValueError, FormatError):
            members = WRITERS[VERSION](short, Limits())
            if not any(map(may_mention_path, members.values())):
                return short, members
    return redact_paths(desc), None


def with_result(
    members: dict[str, bytes], desc: CaptureDesc, *, was: CaptureDesc
) -> dict[str, bytes]:
    """Return the members of a frame's file with another state and time, without encoding again.

    These are the record's last fields, so they are the end of the member.

    Args:
        members: of `encode_with_short_paths`, of ``was``.
        desc: the frame with the new state and time.
        was: the frame before.
    """
    name = f"{_MEMBER}.json"
    text = members[name].removesuffix(_end_of_member(was))
    return {**members, name: text + _end_of_member(desc)}


def _end_of_member(desc: CaptureDesc) -> bytes:
    fields = [(name, getattr(desc, name)) for name in ("compile_seconds", "state")]
    texts = [
        b',"%b":%b' % (name.encode(), msgspec.json.encode(value))
        for name, value in fields
        if value is not None
    ]
    return b"".join([*texts, b"}}"])


def write_capture(
    path: str | os.PathLike[str],
    desc: CaptureDesc,
    *,
    version: int = VERSION,
    members: dict[str, bytes] | None = None,
    limits: Limits | None = None,
) -> int:
    """Write a capture file atomically, and return its size in bytes.

    A written file can be read with the same limits.

    Args:
        path: where.
        desc: the frame.
        version: of the format, for older readers.
        members: the encoded frame in the newest version and within the default limits, if there is one.
        limits: of the reader; by default `Limits()`.

    Raises:
        WriteError: the file cannot be written, or not in this version, or could not be read. An
            existing file is left unchanged.
    """
    check_version(version)
    limits = Limits.of(limits)
    try:
        if members is None or version != VERSION or limits.products < Limits().products:
            members = WRITERS[version](desc, limits)
        _check_nodes(members["tables.json"], limits.expr_nodes)
        return write_container(
            path,
            members,
            version=version,
            producer=PRODUCER,
            torch=desc.torch_version,
            limits=limits,
        )
    except LimitError as error:
        lower = "Pass higher limits to `save`; its readers need them too"
        raise WriteError(
            f"the file could not be read again: {error.what}",
            where=error.where,
            expected=error.expected,
            found=error.found,
            fix=lower if error.fix == TRUST else None,
        ) from error


class _Nodes(msgspec.Struct):
    nodes: tuple[msgspec.Raw, ...] = ()


def _check_nodes(tables: bytes, most: int) -> None:
    """Refuse more expression nodes than a reader allows; a node has more than four bytes."""
    if len(tables) > 4 * most:
        nodes = msgspec.json.decode(tables, type=_Nodes).nodes
        what = "the expressions have too many nodes"
        check_limit(len(nodes), most, what, "tables.json $.nodes", fix=TRUST)


def read_capture(path: str | os.PathLike[str], *, limits: Limits | None = None) -> CaptureDesc:
    """Read a capture file; runs no code of it, imports no torch, and has the errors of `read_container`."""
    return read_file(path, limits=limits).desc


def read_file(path: str | os.PathLike[str], *, limits: Limits | None = None) -> CaptureFile:
    """Read a capture file, with the release that wrote it; errors are those of `read_container`."""
    limits = Limits.of(limits)
    manifest, members = read_container(path, limits=limits)
    try:
        decoder = Decoder(members, limits.expr_nodes)
        del members["tables.json"]  # decoded, and large
        desc = decoder.get(_MEMBER, CaptureDesc)
        if desc.shape_env is not None:  # else expressions are not evaluated
            decoder.check_frame(desc.shape_env, limits.products)
        _check_surroundings(desc)
        return CaptureFile(desc, manifest.producer)
    except LimitError:
        raise
    except FormatError as error:
        if not is_newer(manifest.producer):
            raise
        raise newer_release_error(
            error, str(Path(path)), producer=manifest.producer, torch=manifest.torch
        ) from error
