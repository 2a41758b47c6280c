"""The container of a capture: a ZIP of JSON members with a manifest, written atomically.

The manifest is the first member. It has the format version, the features that a reader must support,
and the name, size and checksum of every other member. Equal members give equal bytes: names are
sorted, times and attributes fixed. A reader refuses what the manifest does not list, and checks every
size before it allocates memory.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import stat
import struct
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import msgspec

from torch_fakeify._atomic_write import reason_of, write_atomic
from torch_fakeify.errors import (
    TRUST,
    FormatError,
    LimitError,
    MissingFileError,
    VersionError,
    WriteError,
    check_integer,
    check_type,
)
from torch_fakeify.versions import written_by

from . import strict_json
from .faults import check_limit
from .file_kinds import captures_in, kind_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FORMAT = "torch_fakeify.capture"
VERSION = 1
"""History: 1 (2026-11) manifest, JSON members, optional data."""

DATA = "data.safetensors"
"""The only member that is not JSON: real tensor data, where a user asked for it."""

FEATURES = frozenset({"data"})
"""What a file may require of its reader. ``data``: the member of tensor data."""

_MANIFEST = "manifest.json"
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}\.json")
_EPOCH = (1980, 1, 1, 0, 0, 0)
_LARGEST = (1 << 31) - 1
_END = struct.Struct("<4s4H2LH")
_CHUNK = 1 << 16
_DIGITS = bytes(48 if 48 <= byte < 58 else byte for byte in range(256))
_NO_MARKS = bytes(byte for byte in range(256) if byte not in b"[{,")
"""All bytes but those that begin a JSON value or follow one."""
_SMALL = 1 << 20
_FLAGS_ALLOWED = 0x0002 | 0x0004 | 0x0800  # deflate's level, UTF-8 names
_BAD_ZIP = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    OSError,
    OverflowError,
)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a reader on the size and content of a file.

    By default reading takes at most 300 MB and a few seconds, for any file. Measured: an inference
    frame of a decoder of 200 layers with dynamic sizes has 1.2 MB and 19 MB unpacked, 660,000 arrays
    and objects and 1.6 million values, and takes 58 MB and 0.8 s.

    Example:
        >>> size = tfk.capture(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(2)]).save(
        ...     "frame.fkf"
        ... )
        >>> capture = tfk.Capture.load("frame.fkf", limits=tfk.Limits(member_bytes=1 << 20))
    """

    members: int = 64
    member_bytes: int = 64 << 20
    """Unpacked size of a JSON member. Decoding takes four times as much."""
    total_bytes: int = 64 << 20
    """Unpacked size of all JSON members."""
    data_bytes: int = _LARGEST
    """Size of the member of tensor data, which is never compressed."""
    ratio: int = 64
    """Compression ratio of a member larger than 1 MiB. Captures of models have up to 25."""
    containers: int = 1_200_000
    """JSON arrays and objects."""
    values: int = 4_000_000
    """JSON values."""
    containers_per_byte: int = 2
    """JSON arrays and objects for each byte of the file, beyond the first 100,000. The record of an empty
    object takes a hundred times its text; captures of models have up to 1."""
    values_per_byte: int = 8
    """JSON values for each byte of the file, beyond the first 250,000. Captures of models have up to 5."""
    wide_integers: int = 4000
    """Integers of 20 digits or more; every 20 digits of one count. Integers above 2**61 can be chosen to
    have equal hashes, and a set of those takes quadratic time."""
    expr_nodes: int = 250_000
    """Distinct nodes of expressions, which take the most work."""
    products: int = 100_000
    """Multiplications to multiply out the products of sums, as torch does, besides 256 for each distinct
    node and expression. One takes torch about 20 us."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            check_integer(getattr(self, name), name, FormatError, least=0)

    @classmethod
    def of(cls, limits: Limits | None) -> Limits:
        """Return the limits of an argument, by default those of this class.

        Raises:
            FormatError: it has another class.
        """
        check_type(limits, (cls, type(None)), "limits of a reader", FormatError)
        return limits or cls()

    @classmethod
    def none(cls) -> Limits:
        """Return limits for a trusted file: none but those of the format."""
        return cls(**dict.fromkeys(cls.__struct_fields__, _LARGEST))


class MemberDesc(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The manifest's entry of a member."""

    name: str
    size: int
    """Unpacked, in bytes."""
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The manifest of a file."""

    format: str
    version: int
    producer: str = ""
    """Version of the torch_fakeify that wrote the file."""
    torch: str = ""
    """Version of torch that the frame was captured with."""
    features: tuple[str, ...] = ()
    """Features that a reader must support."""
    members: tuple[MemberDesc, ...] = ()


class Container(NamedTuple):
    """A file that was read: its manifest and its other members by name."""

    manifest: Manifest
    members: dict[str, bytes]


class _Header(msgspec.Struct):
    format: str
    version: int
    features: tuple[str, ...] = ()
    producer: Any = ""
    """Of any type, as a later version may have another one."""
    torch: Any = ""

    def written_by(self) -> str:
        """Return the writer's versions as a phrase."""
        versions = [text if isinstance(text, str) else "" for text in (self.producer, self.torch)]
        return written_by(*versions)


_HEADER = msgspec.json.Decoder(_Header)
_MANIFEST_DECODER = msgspec.json.Decoder(Manifest)


# --- writing --------------------------------------------------------------------------------------


def pack_container(
    members: Mapping[str, bytes],
    *,
    version: int = VERSION,
    features: Iterable[str] = (),
    producer: str = "",
    torch: str = "",
) -> bytes:
    """Return the bytes of a capture file.

    Args:
        members: by name, ``*.json`` or ``data.safetensors``; the manifest is made here.
        version: format version of the members.
        features: what a reader must support; ``data`` if and only if there is tensor data.
        producer: version of the writing package.
        torch: version of torch.

    Raises:
        WriteError: the format does not allow a member's name or size, or a feature.
    """
    names = sorted(members)
    required = tuple(sorted(set(features)))
    for name in names:
        if name == _MANIFEST or not (_NAME.fullmatch(name) or name == DATA):
            raise WriteError("the format has no member of this name", where=name)
        if len(members[name]) > _LARGEST:
            raise WriteError(
                "a member is too large",
                where=name,
                expected=f"at most {_LARGEST} bytes",
                found=str(len(members[name])),
            )
    for feature in required:
        if feature not in FEATURES:
            raise WriteError("the format has no such feature", found=feature)
    if (DATA in members) != ("data" in required):
        raise WriteError("tensor data and the feature 'data' go together", where=DATA)
    manifest = Manifest(
        format=FORMAT,
        version=version,
        producer=producer,
        torch=torch,
        features=required,
        members=tuple(
            MemberDesc(
                name=name,
                size=len(members[name]),
                sha256=hashlib.sha256(members[name]).hexdigest(),
            )
            for name in names
        ),
    )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", allowZip64=False) as archive:
        _put(archive, _MANIFEST, msgspec.json.encode(manifest))
        for name in names:
            _put(archive, name, members[name])
    return buffer.getvalue()


def _put(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    info = zipfile.ZipInfo(name, _EPOCH)
    info.create_system = 3  # Unix, on every system
    info.external_attr = (stat.S_IFREG | 0o644) << 16
    info.compress_type = zipfile.ZIP_STORED if name == DATA else zipfile.ZIP_DEFLATED
    archive.writestr(info, data, compresslevel=3)


def write_container(
    path: str | os.PathLike[str],
    members: Mapping[str, bytes],
    *,
    version: int = VERSION,
    features: Iterable[str] = (),
    producer: str = "",
    torch: str = "",
    limits: Limits | None = None,
) -> int:
    """Write a capture file atomically, and return its size in bytes.

    The arguments are those of `pack_container`, and ``limits`` of the reader; ``None`` checks nothing.

    Raises:
        WriteError: the file cannot be written; an existing file is unchanged.
        LimitError: it exceeds ``limits``.
    """
    data = pack_container(
        members, version=version, features=features, producer=producer, torch=torch
    )
    if limits is not None:
        where = str(Path(path))
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            infos = archive.infolist()
            _check_members(infos, archive.start_dir, where, limits)
        _check_values(members, infos, where, limits)
    write_atomic(path, data)
    return len(data)


# --- reading --------------------------------------------------------------------------------------


def read_container(path: str | os.PathLike[str], *, limits: Limits | None = None) -> Container:
    """Read a capture file.

    Args:
        path: the file.
        limits: bounds of its size and content; the defaults fit every capture without tensor data.

    Raises:
        MissingFileError: there is no such file.
        FormatError: it is not a capture, truncated, damaged, or differs from
            its manifest.
        VersionError: it has a newer format version, or needs an unsupported feature.
        LimitError: it exceeds ``limits``.
    """
    where = str(Path(path))
    try:
        with os.fdopen(_open_regular(path), "rb") as file:
            return _read(file, where, Limits.of(limits))
    except FormatError:  # which is a ValueError
        raise
    except (OSError, ValueError) as error:
        raise _unreadable(where, error) from error


def _unreadable(where: str, error: OSError | ValueError) -> FormatError:
    """Return the error for a path that cannot be read, with the captures in that directory."""
    if isinstance(error, OSError) and Path(where).is_dir():
        found = captures_in(where)
        return FormatError(
            "that is a directory",
            where=where,
            expected="a capture file",
            found="no captures in it" if found is None else f"the captures {found}",
            fix="Record some with `torch-fakeify run`" if found is None else "Name one of them",
        )
    cls, fix = FormatError, None
    if isinstance(error, FileNotFoundError):
        cls, found = MissingFileError, captures_in(Path(where).parent)
        fix = None if found is None else f"Captures beside it: {found}"
    elif isinstance(error, PermissionError):
        fix = "Change its permissions, or have it copied to where you may read it"
    reason = reason_of(error)
    return cls("the file cannot be read", where=where, found=reason, fix=fix)


def _open_regular(path: str | os.PathLike[str]) -> int:
    """Open a regular file; refuse a pipe or device without blocking."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file")
    return handle


def _read(file: BinaryIO, where: str, limits: Limits) -> Container:
    _check_end(file, where, limits)
    try:
        with zipfile.ZipFile(file) as archive:
            infos = archive.infolist()
            _check_members(infos, archive.start_dir, where, limits)
            found = _read_members(archive, infos, where)
    except FormatError:
        raise
    except _BAD_ZIP as error:
        raise FormatError(
            "the file is damaged",
            where=where,
            found=str(error),
            fix="Copy it again, or record the frame again",
        ) from error
    _check_values(found.members, infos, where, limits)
    return found


def _check_values(
    members: Mapping[str, bytes], infos: list[zipfile.ZipInfo], where: str, limits: Limits
) -> None:
    """Refuse more JSON values than a file of this size may have, before they are parsed."""
    size = sum(info.compress_size for info in infos if info.filename != DATA)
    texts = [data for name, data in members.items() if name != DATA]
    containers = values = 0
    for text in texts:
        for start in range(0, len(text), _CHUNK):
            marks = text[start : start + _CHUNK].translate(None, _NO_MARKS)
            values += len(marks)
            containers += len(marks) - marks.count(b",")
    wide = sum(
        text.translate(_DIGITS).count(b"0" * 20) for text in texts
        # Every fifth of 20 digits makes four, which is a faster test.
        if b"0000" in text[::5].translate(_DIGITS)
    )  # fmt: skip
    for what, found, most in (
        (
            "arrays and objects",
            containers,
            min(limits.containers, 100_000 + limits.containers_per_byte * size),
        ),
        ("values", values, min(limits.values, 250_000 + limits.values_per_byte * size)),
        ("integers of 20 digits and more", wide, limits.wide_integers),
    ):
        check_limit(found, most, f"the file has too many JSON {what}", where, fix=TRUST)


def _check_end(file: BinaryIO, where: str, limits: Limits) -> None:
    """Check the end record of the ZIP directory, before its entries are read."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(_CHUNK)
    file.seek(max(0, size - _CHUNK))
    tail = file.read()
    kind = kind_of(head, tail)
    if kind is not None:
        is_zip = head[:4] == b"PK\x03\x04"
        raise FormatError(
            "not a capture file",
            where=where,
            expected=f"{_MANIFEST} to come first" if is_zip else "a ZIP file",
            found=kind.name,
            fix=kind.fix,
        )
    tail = tail[-_END.size - 20 :]
    if len(tail) < _END.size or tail[-_END.size :][:4] != b"PK\x05\x06":
        raise FormatError(
            "the file is truncated, or something follows its end",
            where=where,
            fix="Copy it again, or record the frame again",
        )
    if tail[:4] == b"PK\x06\x07":
        raise FormatError("the file has the form for sizes over 4 GiB", where=where)
    _, disk, first, here, count, length, offset, comment = _END.unpack(tail[-_END.size :])
    if disk or first or here != count or comment or offset + length + _END.size != size:
        raise FormatError("the file's directory of members is damaged", where=where)
    if count > limits.members or length > limits.members * 1024:
        raise LimitError(
            "the file has too many members",
            where=where,
            expected=f"at most {limits.members}",
            found=str(count),
        )


def _check_members(
    infos: list[zipfile.ZipInfo], directory: int, where: str, limits: Limits
) -> None:
    """Check the entries of the ZIP directory, which begins at byte ``directory``."""
    seen: set[str] = set()
    end = total = 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        here = f"{where}:{info.filename!r}"
        kind = stat.S_IFMT(info.external_attr >> 16)
        if info.orig_filename != info.filename or not (
            _NAME.fullmatch(info.filename) or info.filename == DATA
        ):
            raise FormatError("a member has a name that captures do not have", where=here)
        if info.filename in seen:
            raise FormatError("a member occurs twice", where=here)
        if info.flag_bits & 0x0001:
            raise FormatError("a member is encrypted", where=here)
        packings = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)[: 1 if info.filename == DATA else 2]
        if info.flag_bits & ~_FLAGS_ALLOWED or info.compress_type not in packings:
            raise FormatError("a member is packed in a way that captures are not", where=here)
        if kind not in (0, stat.S_IFREG):
            raise FormatError("a member is a link or another special file", where=here)
        if info.header_offset < end:
            raise FormatError("members overlap", where=here)
        _check_size(info, here, limits)
        end = info.header_offset + 30 + len(info.filename) + info.compress_size
        total += 0 if info.filename == DATA else info.file_size
        seen.add(info.filename)
    if end > directory:
        raise FormatError("members overlap with their directory", where=where)
    what = "the members are too large together"
    check_limit(total, limits.total_bytes, what, where, " bytes", fix=TRUST)
    if not infos or infos[0].filename != _MANIFEST or infos[0].header_offset != 0:
        raise FormatError(
            "not a capture file",
            where=where,
            expected=f"{_MANIFEST} to come first",
            fix="If the capture was packed again, use the original",
        )


def _check_size(info: zipfile.ZipInfo, where: str, limits: Limits) -> None:
    most = limits.data_bytes if info.filename == DATA else limits.member_bytes
    check_limit(info.file_size, most, "a member is too large", where, " bytes", fix=TRUST)
    if info.file_size > max(_SMALL, info.compress_size * limits.ratio):
        raise LimitError(
            "a member unpacks to far more than its size",
            where=where,
            expected=f"at most {limits.ratio} times",
            found=f"{info.file_size} bytes from {info.compress_size}",
            fix=TRUST,
        )


def _read_members(archive: zipfile.ZipFile, infos: list[zipfile.ZipInfo], where: str) -> Container:
    text = _read_member(archive, infos[0])
    manifest = _read_manifest(text, f"{where}:{_MANIFEST}")
    listed = {member.name: member for member in manifest.members}
    if len(listed) != len(manifest.members):
        raise FormatError("the manifest lists a member twice", where=where)
    for name in listed.keys() ^ {info.filename for info in infos[1:]}:
        what = "a member is missing" if name in listed else "a member is not in the manifest"
        raise FormatError(what, where=f"{where}:{name}")
    if (DATA in listed) != ("data" in manifest.features):
        raise FormatError("tensor data and the feature 'data' go together", where=where)
    members: dict[str, bytes] = {}
    for info in infos[1:]:
        data = members[info.filename] = _read_member(archive, info)
        member = listed[info.filename]
        if len(data) != member.size or hashlib.sha256(data).hexdigest() != member.sha256:
            raise FormatError(
                "a member differs from the manifest",
                where=f"{where}:{info.filename}",
                expected=f"{member.size} bytes with SHA-256 {member.sha256[:16]}...",
            )
    return Container(manifest, members)


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """Return the bytes of a member; no more than its declared size are unpacked."""
    data = io.BytesIO()  # `getvalue` does not copy
    left = info.file_size
    with archive.open(info) as stream:
        while chunk := stream.read(min(_CHUNK, left + 1)):
            left -= len(chunk)
            if left < 0:
                raise zipfile.BadZipFile(f"{info.filename} is longer than its entry")
            data.write(chunk)
    if left:
        raise zipfile.BadZipFile(f"{info.filename} is shorter than its entry")
    return data.getvalue()


def _read_manifest(data: bytes, where: str) -> Manifest:
    strict_json.check_text(data, f"{where} $")
    header: Any = strict_json.decode(_HEADER, data, f"{where} $", whole=False)
    if header.format != FORMAT:
        raise FormatError("not a capture file", where=where, expected=FORMAT, found=header.format)
    unknown = [feature for feature in header.features if feature not in FEATURES]
    if header.version > VERSION:
        also = f" and the features {', '.join(unknown)}" if unknown else ""
        raise VersionError(
            "a newer version of torch_fakeify wrote this file",
            where=where,
            expected=f"format version 1 to {VERSION}" if VERSION > 1 else "format version 1",
            found=f"format version {header.version}{also}, written by {header.written_by()}",
            fix=f"Upgrade torch_fakeify, or have the writer save it with version={VERSION}",
        )
    if header.version < 1:
        raise VersionError("no such format version", where=where, found=str(header.version))
    if unknown:
        raise VersionError(
            "the file needs a feature that this version does not support",
            where=where,
            expected=" | ".join(sorted(FEATURES)),
            found=f"{', '.join(unknown)}, written by {header.written_by()}",
            fix="Upgrade torch_fakeify",
        )
    return strict_json.decode(_MANIFEST_DECODER, data, f"{where} $")
