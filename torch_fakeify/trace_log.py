"""Structured trace logs of torch -> records of the tensors that they describe.

With ``TORCH_TRACE=dir`` torch writes what a process compiles to ``dir/dedicated_log_torch_trace_*.log``:
one line of JSON for each event after a prefix, and under it the lines of its payload, each after a
tab. The events ``describe_storage``, ``describe_tensor`` and ``describe_source`` say which tensors
went into a compilation; all others are passed over. A tensor's event comes after those of the
storage and the tensors that it names, and a describer writes each once: a tensor that changed
afterwards is in the log as it first was.

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
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar

import msgspec

from .errors import FormatError, LimitError
from .strict_json import check_text, decode
from .trace_events import (
    NEVER_LOGGED,
    Lack,
    SourceEvent,
    StorageEvent,
    TensorEvent,
    storage_record,
    tensor_record,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Generator, Iterator

    from .desc import MetaStorageDesc, MetaTensorDesc

__all__ = [
    "CompileId",
    "TraceGroup",
    "TraceLimits",
    "TraceLog",
    "TracedTensor",
    "from_trace_log",
]


class CompileId(NamedTuple):
    """In which compilation an event was written, as far as it says so."""

    frame_id: int | None = None
    frame_compile_id: int | None = None
    attempt: int | None = None
    compiled_autograd_id: int | None = None


@dataclass(frozen=True, kw_only=True)
class TracedTensor:
    """A tensor that a log describes."""

    id: int
    record: MetaTensorDesc | None
    """``None`` if the event lacks what no record is without."""
    lacks: tuple[Lack, ...]
    """What the event does not say, beside what no log says (`TraceLog.lacks`)."""
    sources: tuple[str, ...]
    """Names of the places where Dynamo found it, such as ``L['x']``; none of a part of another."""
    compile_id: CompileId
    line: int
    """Where the event is in the file, from 1."""


@dataclass(frozen=True, kw_only=True)
class TraceGroup:
    """What one describer of one process saw: ids are those of this describer.

    Records of a group belong together, and want a converter of their own.
    """

    process: int
    """Its id."""
    rank: int | None
    describer_id: int
    compile_ids: tuple[CompileId, ...]
    """Those of its events, in the order of the file; torch makes a describer for each attempt."""
    tensors: tuple[TracedTensor, ...]
    storages: tuple[MetaStorageDesc, ...]
    lacks: tuple[Lack, ...]
    """What the events of storages do not say."""

    @property
    def records(self) -> tuple[MetaTensorDesc, ...]:
        """Of the tensors that have one."""
        return tuple(t.record for t in self.tensors if t.record is not None)

    @property
    def sources(self) -> dict[str, TracedTensor]:
        """The tensors that have sources, by name; the last one where a name has several."""
        return {name: t for t in self.tensors for name in t.sources}


@dataclass(frozen=True, kw_only=True)
class TraceLog:
    """What a structured trace log says of tensors."""

    groups: tuple[TraceGroup, ...]
    """In the order in which they begin in the file."""
    torch_versions: tuple[str, ...]
    """Those that the log names, normally one."""
    truncated: bool
    """Whether the file ends within a line."""
    lacks: tuple[Lack, ...] = NEVER_LOGGED
    """What no log says of any tensor."""


@dataclass(frozen=True, kw_only=True)
class TraceLimits:
    """What a reader allows a log to ask for."""

    text_bytes: int = 8 << 30
    """Of the whole text, unpacked."""
    line_bytes: int = 4 << 20
    """Of the line of an event of a tensor, storage or source."""
    events: int = 1_000_000
    """Of these events."""
    event_bytes: int = 256 << 20
    """Of all of them."""
    depth: int = 64
    """Bases of bases, gradients of gradients and inner tensors of inner tensors."""


def from_trace_log(path: str | os.PathLike[str], *, limits: TraceLimits | None = None) -> TraceLog:
    """Reads the tensors that a structured trace log of torch describes.

    Args:
        path: a file that ``TORCH_TRACE`` wrote, or one packed with gzip. Files of several ranks or
            processes may have been joined.
        limits: what it may ask for.

    Returns:
        The records, and by name what the log lacks of them. Sharing is kept: two tensors on one
        storage hold the same record of it, and so for bases, gradients and inner tensors.

    Raises:
        FormatError: no such file, no structured trace log, an event that is malformed, that names a
            tensor or storage which is not in the log, or that contradicts an earlier one.
        LimitError: it asks for more than ``limits`` allow.
    """
    where = str(Path(path))
    limits = limits or TraceLimits()
    reader = _Reader(where, limits)
    try:
        with _open(path) as file:
            for number, line, whole in _lines(file, where, limits):
                reader.read(number, line, whole=whole)
    except EOFError:  # what gzip packed is cut off
        reader.truncated = True
    except (OSError, zlib.error) as error:
        found = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise FormatError("the file cannot be read", where=where, found=found) from error
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
        if not is_packed:
            yield file
            return
        with gzip.GzipFile(fileobj=file) as unpacked:
            yield unpacked  # type: ignore[misc]


def _lines(file: BinaryIO, where: str, limits: TraceLimits) -> Iterator[tuple[int, bytes, bool]]:
    """Numbered lines without their end, and whether it is there.

    Of a long line that is of no event only the beginning is kept.
    """
    total = number = 0
    while True:
        line = file.readline(_CHUNK)
        if not line:
            return
        number += 1
        match = None if line.startswith(b"\t") else _PREFIX.match(line)
        wanted = match is not None and _EVENT.match(line, match.end()) is not None
        chunk = line
        parts = [line]
        size = len(line)
        while chunk and not chunk.endswith(b"\n"):
            chunk = file.readline(_CHUNK)
            size += len(chunk)
            if wanted:
                parts.append(chunk)
            if wanted and size > limits.line_bytes:
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
    """The JSON of a line of one of the three events; what else it says is not of the tensor."""

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
_TENSOR = msgspec.json.Decoder(TensorEvent)
_STORAGE = msgspec.json.Decoder(StorageEvent)
_SOURCE = msgspec.json.Decoder(SourceEvent)
_KEYS = msgspec.json.Decoder(dict[str, msgspec.Raw])

_T = TypeVar("_T")


@dataclass(kw_only=True)
class _Tensor:
    """A tensor while the log is read."""

    record: MetaTensorDesc | None
    lacks: tuple[Lack, ...]
    compile_id: CompileId
    line: int
    digest: bytes
    depth: int
    sources: dict[str, None] = field(default_factory=dict[str, None])


@dataclass(kw_only=True)
class _Storage:
    """A storage while the log is read."""

    record: MetaStorageDesc | None
    lacks: tuple[Lack, ...]
    line: int
    digest: bytes


@dataclass
class _Group:
    """A describer while the log is read."""

    tensors: dict[int, _Tensor] = field(default_factory=dict[int, _Tensor])
    storages: dict[int, _Storage] = field(default_factory=dict[int, _Storage])
    compile_ids: dict[CompileId, None] = field(default_factory=dict[CompileId, None])


class _Reader:
    """Takes the lines of a log one after the other."""

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
        """Reads one line; ``whole`` if its end is there."""
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
        self._count(number, text)
        self._event(int(match[1]), text, f"{self._where} line {number}", number)

    def result(self) -> TraceLog:
        """What the lines said."""
        self._read_version()
        if self._is_empty:
            raise FormatError("the file is empty", where=self._where)
        return TraceLog(
            groups=tuple(_group(key, group) for key, group in self._groups.items()),
            torch_versions=tuple(self._versions),
            truncated=self.truncated,
        )

    def _not_a_line(self, number: int, line: bytes) -> FormatError:
        where = self._where if self._is_empty else f"{self._where} line {number}"
        what = "not a structured trace log of torch"
        if not self._is_empty:
            what = "neither an event nor a line of a payload"
        return FormatError(
            what,
            where=where,
            expected="a prefix such as `V1231 23:59:59.000000 42 torch/file.py:1] {`",
            found=ascii(line[:_MAX_SHOWN].decode(errors="replace")),
            fix="Give a file that TORCH_TRACE wrote; TORCH_LOGS and TORCH_LOGS_OUT write other text"
            if self._is_empty
            else None,
        )

    def _count(self, number: int, text: bytes) -> None:
        self._events += 1
        self._event_bytes += len(text)
        limits = self._limits
        if self._events > limits.events or self._event_bytes > limits.event_bytes:
            raise LimitError(
                "the log describes too much",
                where=f"{self._where} line {number}",
                expected=f"at most {limits.events} events of {limits.event_bytes} bytes in all",
            )

    def _read_version(self) -> None:
        if not self._version_lines:
            return
        payload = b"\n".join(line[1:] for line in self._version_lines)
        self._version_lines = None
        try:
            found = msgspec.json.decode(payload, type=_VersionPayload)
        except msgspec.DecodeError:
            return  # of no use to what is read here
        self._versions[found.pytorch_version] = None

    # --- one event ------------------------------------------------------------------------------

    def _event(self, process: int, text: bytes, where: str, number: int) -> None:
        check_text(text, where)
        line: _Line = decode(_LINE, text, f"{where} $")
        compile_id = CompileId(
            line.frame_id, line.frame_compile_id, line.attempt, line.compiled_autograd_id
        )
        place = _Place(process, line.rank, compile_id, where, number)
        if raw := bytes(line.describe_storage):
            self._storage(decode(_STORAGE, raw, f"{where} $.describe_storage"), raw, place)
        if raw := bytes(line.describe_tensor):
            self._tensor(decode(_TENSOR, raw, f"{where} $.describe_tensor"), raw, place)
        if raw := bytes(line.describe_source):
            self._source(decode(_SOURCE, raw, f"{where} $.describe_source"), place)

    def _group_of(self, place: _Place, describer_id: int) -> _Group:
        group = self._groups.setdefault((place.process, place.rank, describer_id), _Group())
        group.compile_ids[place.compile_id] = None
        return group

    def _storage(self, e: StorageEvent, raw: bytes, place: _Place) -> None:
        group = self._group_of(place, e.describer_id)
        digest = _digest(raw)
        if self._is_known(group.storages.get(e.id), digest, f"storage {e.id}", e, place):
            return
        record, lacks = storage_record(e)
        lacks += _unknown_fields(raw, StorageEvent)
        group.storages[e.id] = _Storage(record=record, lacks=lacks, line=place.line, digest=digest)

    def _tensor(self, e: TensorEvent, raw: bytes, place: _Place) -> None:
        group = self._group_of(place, e.describer_id)
        digest = _digest(raw)
        if self._is_known(group.tensors.get(e.id), digest, f"tensor {e.id}", e, place):
            return
        depth = 0

        def tensor(name: str, tensor_id: int) -> MetaTensorDesc | None:
            nonlocal depth
            part = group.tensors.get(tensor_id)
            if part is None:
                raise _missing(f"tensor {e.id}", name, f"tensor {tensor_id}", e, place)
            depth = max(depth, part.depth + 1)
            return part.record

        def storage(storage_id: int) -> MetaStorageDesc | None:
            known = group.storages.get(storage_id)
            if known is None:
                raise _missing(f"tensor {e.id}", "storage", f"storage {storage_id}", e, place)
            return known.record

        record, lacks = tensor_record(e, tensor=tensor, storage=storage, where=place.where)
        if depth > self._limits.depth:
            raise LimitError(
                "tensors are nested too deep",
                where=place.where,
                expected=f"at most {self._limits.depth} levels",
            )
        group.tensors[e.id] = _Tensor(
            record=record,
            lacks=lacks + _unknown_fields(raw, TensorEvent),
            compile_id=place.compile_id,
            line=place.line,
            digest=digest,
            depth=depth,
        )

    def _source(self, e: SourceEvent, place: _Place) -> None:
        group = self._group_of(place, e.describer_id)
        known = group.tensors.get(e.id)
        if known is None:
            raise _missing(f"the source {e.source!a}", "id", f"tensor {e.id}", e, place)
        known.sources[e.source] = None

    @staticmethod
    def _is_known(
        known: _Tensor | _Storage | None,
        digest: bytes,
        name: str,
        e: TensorEvent | StorageEvent,
        place: _Place,
    ) -> bool:
        if known is None:
            return False
        if known.digest == digest:
            return True
        raise FormatError(
            f"{name} of describer {e.describer_id} is described twice, and differently",
            where=place.where,
            expected=f"what line {known.line} says",
            fix="If logs of several runs were joined, read them one by one",
        )


class _Place(NamedTuple):
    """Where an event stands."""

    process: int
    rank: int | None
    compile_id: CompileId
    where: str
    line: int


def _missing(
    what: str, name: str, missing: str, e: TensorEvent | SourceEvent, place: _Place
) -> FormatError:
    return FormatError(
        f"{what} names as `{name}` what the log does not describe before",
        where=place.where,
        expected=f"an event of {missing} of describer {e.describer_id}",
        fix="The beginning of the log may be missing, or be in that of the process which forked",
    )


def _digest(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=16).digest()


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except msgspec.DecodeError:
        return False
    return True


def _unknown_fields(raw: bytes, event: type[Any]) -> tuple[Lack, ...]:
    """What another version of torch wrote."""
    known = set(event.__struct_fields__)
    return tuple(
        Lack(name, "a field that is not known here", bytes(value)[:200].decode(errors="replace"))
        for name, value in _KEYS.decode(raw).items()
        if name not in known
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
