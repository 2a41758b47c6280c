"""Structured trace logs of torch -> records of the tensors that they describe.

With ``TORCH_TRACE=dir`` torch writes what a process compiles to ``dir/dedicated_log_torch_trace_*.log``:
one line of JSON for each event after a prefix, and under it the lines of its payload, each after a
tab. The events ``describe_storage``, ``describe_tensor`` and ``describe_source`` describe the tensors
of a compilation; others are skipped. A tensor's event comes after those of the storage and tensors
that it refers to. A describer writes each once, so later changes of a tensor are not in the log.

Method: ``trace_structured`` and ``TorchLogsFormatter`` of torch 2.13. The file is untrusted: it is
read line by line, without torch, and lines, events and nesting are bounded.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import stat
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import msgspec

from torch_fakeify.errors import FormatError, LimitError, MissingFileError, check_type
from torch_fakeify.serialization.strict_json import check_text, decode

from .events import (
    NEVER_LOGGED,
    MissingField,
    SourceEvent,
    StorageEvent,
    TensorEvent,
    storage_record,
    tensor_record,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Generator, Iterator, Mapping

    from torch_fakeify.records.tensor import MetaStorageDesc, MetaTensorDesc


class CompileId(NamedTuple):
    """The compilation in which an event was written; missing parts are ``None``."""

    frame_id: int | None = None
    frame_compile_id: int | None = None
    attempt: int | None = None
    compiled_autograd_id: int | None = None


@dataclass(frozen=True, kw_only=True)
class TracedTensor:
    """A tensor that a log describes."""

    id: int
    record: MetaTensorDesc | None
    """``None`` if the event lacks a required field of the record."""
    lacks: tuple[MissingField, ...]
    """Fields that the event lacks, besides those that no log has (`TraceLog.lacks`)."""
    sources: tuple[str, ...]
    """Names of its sources, such as ``L['x']``; empty for a part of another tensor."""
    compile_id: CompileId
    line: int
    """Line of the event in the file, from 1."""


@dataclass(frozen=True, kw_only=True)
class TraceGroup:
    """The tensors that one describer of one process described.

    Ids are unique within a group, so each group needs its own converter.
    """

    process: int
    """Process id."""
    rank: int | None
    describer_id: int
    compile_ids: tuple[CompileId, ...]
    """Compilations of its events, in file order; torch makes a describer for each attempt."""
    tensors: tuple[TracedTensor, ...]
    storages: tuple[MetaStorageDesc, ...]
    lacks: tuple[MissingField, ...]
    """Fields that the events of storages lack."""

    @property
    def records(self) -> tuple[MetaTensorDesc, ...]:
        """The records of the tensors that have one."""
        return tuple(t.record for t in self.tensors if t.record is not None)

    @property
    def sources(self) -> dict[str, TracedTensor]:
        """The tensors by the names of their sources; the last one for each name."""
        return {name: t for t in self.tensors for name in t.sources}


@dataclass(frozen=True, kw_only=True)
class TraceLog:
    """The tensors in a structured trace log."""

    groups: tuple[TraceGroup, ...]
    """In the order of their first events."""
    torch_versions: tuple[str, ...]
    """Versions of torch in the log, normally one."""
    truncated: bool
    """Whether the last line is incomplete."""
    lacks: tuple[MissingField, ...] = NEVER_LOGGED
    """Fields that no log has."""


@dataclass(frozen=True, kw_only=True)
class TraceLimits:
    """Limits on a trace log."""

    text_bytes: int = 8 << 30
    """Bytes of the uncompressed text."""
    line_bytes: int = 4 << 20
    """Bytes of the line of an event on a tensor, storage or source."""
    events: int = 1_000_000
    """Number of these events."""
    event_bytes: int = 256 << 20
    """Bytes of all these events."""
    depth: int = 64
    """Nesting depth of bases, gradients and inner tensors."""


def from_trace_log(path: str | os.PathLike[str], *, limits: TraceLimits | None = None) -> TraceLog:
    """Read the tensors in a structured trace log of torch.

    Args:
        path: a file written by ``TORCH_TRACE``, optionally compressed with gzip. Files of several
            ranks or processes may be concatenated.
        limits: limits on its content.

    Returns:
        The records, and the fields that the log lacks. Sharing is preserved: two tensors on one
        storage have the same storage record, and so for bases, gradients and inner tensors.

    Raises:
        FormatError: no such file, not a structured trace log, or an event that is malformed, refers
            to a missing tensor or storage, or contradicts an earlier event.
        LimitError: it exceeds ``limits``.

    Example:
        >>> for group in tfk.from_trace_log(
        ...     "dedicated_log_torch_trace_0.log"
        ... ).groups:  # doctest: +SKIP
        ...     print(group.sources)
    """
    where = str(Path(path))
    check_type(limits, (TraceLimits, type(None)), "limits of a trace log", FormatError)
    limits = limits or TraceLimits()
    reader = _Reader(where, limits)
    try:
        with _open(path) as file:
            for number, line, whole in _lines(file, where, limits):
                reader.read(number, line, whole=whole)
    except EOFError:  # the compressed file is truncated
        reader.truncated = True
    except (OSError, zlib.error) as error:
        found = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        cls = MissingFileError if isinstance(error, FileNotFoundError) else FormatError
        raise cls("the file cannot be read", where=where, found=found) from error
    return reader.result()


# --- lines ----------------------------------------------------------------------------------------

_CHUNK = 1 << 16
_PREFIX = re.compile(
    rb"(?:\[rank\d+\]:)?[VIWEC]\d{4} \d\d:\d\d:\d\d\.\d{6} (\d{1,18}) [^\]\n]{1,4096}:\d+\] (?=\{)"
)
_EVENT = re.compile(rb'\{\s*"describe_(?:tensor|storage|source)"\s*:')
_VERSION = re.compile(rb'\{\s*"artifact"\s*:\s*\{\s*"name"\s*:\s*"torch_version"')
_MAX_SHOWN = 60
_VERSION_LINES = 100


@contextmanager
def _open(path: str | os.PathLike[str]) -> Generator[BinaryIO]:
    if not stat.S_ISREG(Path(path).stat().st_mode):
        raise OSError("not a regular file")
    with Path(path).open("rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        yield gzip.GzipFile(fileobj=file) if is_packed else file  # type: ignore[misc]


def _lines(file: BinaryIO, where: str, limits: TraceLimits) -> Iterator[tuple[int, bytes, bool]]:
    """Yield line numbers, lines without line ends, and whether the line end is present.

    Long lines other than events are truncated.
    """
    total = number = 0
    while True:
        line = file.readline(_CHUNK)
        if not line:
            return
        number += 1
        match = None if line.startswith(b"\t") else _PREFIX.match(line)
        is_event = match is not None and _EVENT.match(line, match.end()) is not None
        chunk = line
        parts = [line]
        size = len(line)
        while chunk and not chunk.endswith(b"\n"):
            chunk = file.readline(_CHUNK)
            size += len(chunk)
            if is_event:
                parts.append(chunk)
            if is_event and size > limits.line_bytes:
                raise LimitError(
                    "the line of an event is too long",
                    where=f"{where} line {number}",
                    expected=f"at most {limits.line_bytes} bytes",
                )
            _check_total(total + size, where, limits)
        total += size
        _check_total(total, where, limits)
        yield number, b"".join(parts).rstrip(b"\r\n"), chunk.endswith(b"\n")


def _check_total(total: int, where: str, limits: TraceLimits) -> None:
    if total > limits.text_bytes:
        raise LimitError(
            "the log is too long", where=where, expected=f"at most {limits.text_bytes} bytes"
        )


# --- events ---------------------------------------------------------------------------------------


_ABSENT = msgspec.Raw()


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of a line with one of the three events; other keys are ignored."""

    describe_tensor: msgspec.Raw = _ABSENT
    describe_storage: msgspec.Raw = _ABSENT
    describe_source: msgspec.Raw = _ABSENT
    rank: int | None = None
    frame_id: int | None = None
    frame_compile_id: int | None = None
    attempt: int | None = None
    compiled_autograd_id: int | None = None


class _VersionPayload(msgspec.Struct, frozen=True):
    pytorch_version: str


_LINE = msgspec.json.Decoder(_Line)
_DECODERS: dict[str, Any] = {
    "describe_storage": msgspec.json.Decoder(StorageEvent),
    "describe_tensor": msgspec.json.Decoder(TensorEvent),
    "describe_source": msgspec.json.Decoder(SourceEvent),
}
_KEYS = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass
class _Described:
    """A tensor or storage while the log is read."""

    record: Any
    lacks: tuple[MissingField, ...]
    digest: bytes
    compile_id: CompileId
    line: int
    depth: int = 0
    sources: dict[str, None] = field(default_factory=dict[str, None])


@dataclass
class _Group:
    """A describer while the log is read."""

    tensors: dict[int, _Described] = field(default_factory=dict[int, _Described])
    storages: dict[int, _Described] = field(default_factory=dict[int, _Described])
    compile_ids: dict[CompileId, None] = field(default_factory=dict[CompileId, None])


class _Reader:
    """Reads the lines of a log in order."""

    def __init__(self, where: str, limits: TraceLimits) -> None:
        self._where = where
        self._limits = limits
        self._groups: dict[tuple[int, int | None, int], _Group] = {}
        self._versions: dict[str, None] = {}
        self._version_lines: list[bytes] | None = None
        self._events = self._event_bytes = 0
        self._is_empty = True
        self.truncated = False

    def read(self, number: int, line: bytes, *, whole: bool) -> None:
        """Read one line; ``whole`` if its line end is present."""
        self.truncated = not whole
        if line.startswith(b"\t") and not self._is_empty:
            if self._version_lines is not None and len(self._version_lines) < _VERSION_LINES:
                self._version_lines.append(line)
            return
        self._read_version()
        match = _PREFIX.match(line)
        if match is None:
            if self._is_empty or whole:
                raise self._not_a_line(number, line)
            return  # cut off within the prefix
        self._is_empty = False
        if _VERSION.match(line, match.end()):
            self._version_lines = []
        if _EVENT.match(line, match.end()) is None:
            return
        text = line[match.end() :]
        if not whole and not _is_json(text):
            return
        self._events += 1
        self._event_bytes += len(text)
        limits = self._limits
        if self._events > limits.events or self._event_bytes > limits.event_bytes:
            raise LimitError(
                "the log describes too much",
                where=f"{self._where} line {number}",
                expected=f"at most {limits.events} events of {limits.event_bytes} bytes in all",
            )
        self._event(int(match[1]), text, f"{self._where} line {number}", number)

    def result(self) -> TraceLog:
        self._read_version()
        if self._is_empty:
            raise FormatError("the file is empty", where=self._where)
        return TraceLog(
            groups=tuple(_group(key, group) for key, group in self._groups.items()),
            torch_versions=tuple(self._versions),
            truncated=self.truncated,
        )

    def _not_a_line(self, number: int, line: bytes) -> FormatError:
        prefix = "a prefix such as `V1231 23:59:59.000000 42 torch/file.py:1] {`"
        found = ascii(line[:_MAX_SHOWN].decode(errors="replace"))
        if self._is_empty:
            return FormatError(
                "not a structured trace log of torch",
                where=self._where,
                expected=prefix,
                found=found,
                fix="Use a file written by TORCH_TRACE; TORCH_LOGS and TORCH_LOGS_OUT write another format",
            )
        where = f"{self._where} line {number}"
        what = "neither an event nor a line of a payload"
        return FormatError(what, where=where, expected=prefix, found=found)

    def _read_version(self) -> None:
        if not self._version_lines:
            return
        payload = b"\n".join(line[1:] for line in self._version_lines)
        self._version_lines = None
        try:
            found = msgspec.json.decode(payload, type=_VersionPayload)
        except msgspec.DecodeError:
            return  # the version is optional
        self._versions[found.pytorch_version] = None

    # --- one event ------------------------------------------------------------------------------

    def _event(self, process: int, text: bytes, where: str, number: int) -> None:
        check_text(text, where)
        line: _Line = decode(_LINE, text, f"{where} $")
        compile_id = CompileId(
            line.frame_id, line.frame_compile_id, line.attempt, line.compiled_autograd_id
        )
        for name, decoder in _DECODERS.items():
            raw = bytes(getattr(line, name))
            if not raw:
                continue
            e: Any = decode(decoder, raw, f"{where} $.{name}")
            group = self._groups.setdefault((process, line.rank, e.describer_id), _Group())
            group.compile_ids[compile_id] = None
            if isinstance(e, SourceEvent):
                what = f"the source {e.source!a}"
                found = _known(group.tensors, "tensor", e.id, (what, "id"), e, where)
                found.sources[e.source] = None
                continue
            kind = name.removeprefix("describe_")
            table = group.tensors if isinstance(e, TensorEvent) else group.storages
            digest = hashlib.blake2b(raw, digest_size=16).digest()
            earlier = table.get(e.id)
            if earlier is not None and earlier.digest != digest:
                raise FormatError(
                    f"{kind} {e.id} of describer {e.describer_id} is described twice, and differently",
                    where=where,
                    expected=f"the description in line {earlier.line}",
                    fix="If logs of several runs were joined, read them one by one",
                )
            if earlier is None:
                record, lacks, depth = self._record(e, group, where)
                lacks += _unknown_fields(raw, type(e))
                table[e.id] = _Described(record, lacks, digest, compile_id, number, depth)

    def _record(
        self, e: TensorEvent | StorageEvent, group: _Group, where: str
    ) -> tuple[Any, tuple[MissingField, ...], int]:
        """The record of an event, if it has one, its missing fields, and the depth of nested tensors."""
        if isinstance(e, StorageEvent):
            return *storage_record(e), 0
        depth = 0

        def tensor(name: str, tensor_id: int) -> MetaTensorDesc | None:
            nonlocal depth
            user = (f"tensor {e.id}", name)
            part = _known(group.tensors, "tensor", tensor_id, user, e, where)
            depth = max(depth, part.depth + 1)
            return part.record

        def storage(storage_id: int) -> MetaStorageDesc | None:
            user = (f"tensor {e.id}", "storage")
            return _known(group.storages, "storage", storage_id, user, e, where).record

        record, lacks = tensor_record(e, tensor=tensor, storage=storage, where=where)
        if depth > self._limits.depth:
            raise LimitError(
                "tensors are nested too deep",
                where=where,
                expected=f"at most {self._limits.depth} levels",
            )
        return record, lacks, depth


def _known(
    table: Mapping[int, _Described],
    kind: str,
    number: int,
    user: tuple[str, str],
    e: TensorEvent | SourceEvent,
    where: str,
) -> _Described:
    """What an event refers to; ``user`` is what refers to it, and by which field."""
    if number in table:
        return table[number]
    raise FormatError(
        "{} refers as `{}` to something that is not described before".format(*user),
        where=where,
        expected=f"an event of {kind} {number} of describer {e.describer_id}",
        fix="The beginning of the log may be missing, or be in that of the process which forked",
    )


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except msgspec.DecodeError:
        return False
    return True


def _unknown_fields(raw: bytes, event: type[Any]) -> tuple[MissingField, ...]:
    """Fields that this release does not know, written by another version of torch."""
    supported = set(event.__struct_fields__)
    return tuple(
        MissingField(
            name, "a field that is not known here", bytes(value)[:200].decode(errors="replace")
        )
        for name, value in _KEYS.decode(raw).items()
        if name not in supported
    )


def _group(key: tuple[int, int | None, int], group: _Group) -> TraceGroup:
    process, rank, describer_id = key
    return TraceGroup(
        process=process,
        rank=rank,
        describer_id=describer_id,
        compile_ids=tuple(group.compile_ids),
        tensors=tuple(
            TracedTensor(
                id=number,
                record=t.record,
                lacks=t.lacks,
                sources=tuple(t.sources),
                compile_id=t.compile_id,
                line=t.line,
            )
            for number, t in group.tensors.items()
        ),
        storages=tuple(s.record for s in group.storages.values() if s.record is not None),
        lacks=tuple(
            lack._replace(field=f"storages[{number}].{lack.field}")
            for number, s in group.storages.items()
            for lack in s.lacks
        ),
    )
