"""The capture file: deterministic, atomic, and refused with one clear error when it is not right."""

from __future__ import annotations

import base64
import errno
import hashlib
import io
import json
import os
import random
import re
import stat
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import piped

from torch_fakeify import _atomic_write
from torch_fakeify.errors import (
    FakeifyError,
    FormatError,
    LimitError,
    VersionError,
    WriteError,
)
from torch_fakeify.serialization.container import (
    Container,
    Limits,
    pack_container,
    read_container,
    write_container,
)

MEMBERS = {"graph.json": b'{"nodes":[1,2,3]}' * 20, "tables.json": b"{}", "inputs.json": b"[]"}
VALID = pack_container(MEMBERS, producer="0.1.0", torch="2.13.0")


def manifest_for(members: dict[str, bytes], /, **changes: Any) -> bytes:
    """A right manifest for these members, with some fields changed."""
    fields: dict[str, Any] = {
        "format": "torch_fakeify.capture",
        "version": 1,
        "members": [
            {"name": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in members.items()
        ],
    }
    return json.dumps({**fields, **changes}).encode()


def archive(
    entries: list[tuple[str | zipfile.ZipInfo, bytes]], compression: int = zipfile.ZIP_DEFLATED
) -> bytes:
    """A ZIP of entries, as any tool might write it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as out:
        for name, data in entries:
            out.writestr(name, data)
    return buffer.getvalue()


def capture(
    members: dict[str, bytes] | None = None,
    extra: list[tuple[str | zipfile.ZipInfo, bytes]] | None = None,
    **changes: Any,
) -> bytes:
    """A capture with a changed manifest or additional entries."""
    members = {"graph.json": b"{}"} if members is None else members
    entries: list[tuple[str | zipfile.ZipInfo, bytes]] = [
        ("manifest.json", manifest_for(members, **changes))
    ]
    return archive([*entries, *members.items(), *(extra or [])])


def read(tmp_path: Path, data: bytes, **limits: int) -> Container:
    """Read bytes as a capture file."""
    path = tmp_path / "c.fkf"
    path.write_bytes(data)
    return read_container(path, limits=Limits(**limits))


def names(folder: Path) -> list[str]:
    """What is in a directory."""
    return sorted(path.name for path in folder.iterdir())


# --- writing --------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """All members come back, with the manifest."""
    path = tmp_path / "c.fkf"
    write_container(path, MEMBERS, producer="0.1.0", torch="2.13.0")
    back = read_container(path)
    assert back.members == MEMBERS
    assert (back.manifest.producer, back.manifest.torch) == ("0.1.0", "2.13.0")
    assert [m.name for m in back.manifest.members] == sorted(MEMBERS)
    assert names(tmp_path) == ["c.fkf"]


def test_any_zip_tool_lists_it() -> None:
    """It is an ordinary ZIP: the manifest first, then sorted names, plain files of 1980."""
    with zipfile.ZipFile(io.BytesIO(VALID)) as file:
        assert file.testzip() is None
        infos = file.infolist()
    assert [i.filename for i in infos] == ["manifest.json", *sorted(MEMBERS)]
    assert {i.date_time for i in infos} == {(1980, 1, 1, 0, 0, 0)}
    assert {i.external_attr >> 16 for i in infos} == {stat.S_IFREG | 0o644}


def test_bytes_do_not_depend_on_order_or_process() -> None:
    """The same members give the same bytes, in any order and process."""
    backwards = dict(reversed(MEMBERS.items()))
    assert pack_container(backwards, producer="0.1.0", torch="2.13.0") == VALID
    script = (
        "import sys; from torch_fakeify.serialization.container import pack_container as p\n"
        f"sys.stdout.buffer.write(p({MEMBERS!r}, producer='0.1.0', torch='2.13.0'))"
    )
    assert piped(script, inherits=False, TZ="Asia/Tokyo", PYTHONHASHSEED="7") == VALID


def test_tensor_data_needs_its_feature(tmp_path: Path) -> None:
    """``data.safetensors`` and the feature ``data`` go together, on both sides."""
    data = {**MEMBERS, "data.safetensors": bytes(1000)}
    assert read(tmp_path, pack_container(data, features=["data"])).members == data
    for members, features in ((data, []), (MEMBERS, ["data"])):
        with pytest.raises(WriteError, match="tensor data and the feature 'data' go together"):
            pack_container(members, features=features)
    with pytest.raises(FormatError, match="packed in a way that captures are not"):
        read(tmp_path, capture({"data.safetensors": b"1"}))  # deflated: it may be a bomb
    stored = archive(
        [("manifest.json", manifest_for({"data.safetensors": b"1"})), ("data.safetensors", b"1")],
        zipfile.ZIP_STORED,
    )
    with pytest.raises(FormatError, match="tensor data and the feature 'data' go together"):
        read(tmp_path, stored)
    with pytest.raises(FormatError, match="tensor data and the feature 'data' go together"):
        read(tmp_path, capture(features=["data"]))


@pytest.mark.parametrize(
    "name", ["manifest.json", "../a.json", "a/b.json", "A.json", "x.pkl", "", ".json", "a.json\n"]
)
def test_names_outside_the_format_are_not_written(name: str) -> None:
    """Nothing is written that a reader would refuse, no unknown feature either."""
    with pytest.raises(WriteError) as error:
        pack_container({name: b""})
    assert str(error.value) == f"{name}: the format has no member of this name"
    with pytest.raises(WriteError, match="the format has no such feature; found magic"):
        pack_container(MEMBERS, features=["magic"])


def null_character(call: Any) -> str:
    """Return Python's text of a path with a null character, which names the call as of 3.13."""
    with pytest.raises(ValueError, match="null") as error:
        call("a\0b")
    return str(error.value)


def test_a_path_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path) -> None:
    """A directory in the way, a missing one, a file as directory, an impossible name."""
    (tmp_path / "file").write_bytes(b"old")
    cases = [
        (tmp_path, "a directory is in the way. Give the path of a file"),
        (tmp_path / "no" / "c.fkf", "No such file or directory. Make the directory first"),
        (tmp_path / "file" / "c.fkf", "Not a directory. Give a path below a directory"),
        (tmp_path / ("x" * 300), "File name too long. Choose a shorter name"),
        (tmp_path / "a\0b", f"{null_character(os.lstat)}. Choose another path"),
    ]
    for path, end in cases:
        with pytest.raises(WriteError) as error:
            write_container(path, MEMBERS)
        where = str(path).replace("\0", "\\x00")
        assert str(error.value) == f"{where}: the file cannot be written; found {end}"
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


@pytest.mark.parametrize("call", ["fsync", "replace", "write"])
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]
)
def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: BaseException
) -> None:
    """Whenever it fails, the old file is whole and no temporary file stays."""
    path = tmp_path / "c.fkf"
    path.write_bytes(b"old")

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    if call == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    elif call == "replace":
        monkeypatch.setattr(Path, "replace", fail)
    else:
        monkeypatch.setattr(_atomic_write, "_fill", fail)
    expected = WriteError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        write_container(path, MEMBERS)
    if expected is WriteError:
        assert str(caught.value) == (
            f"{path}: the file cannot be written; found No space left on device. "
            "Free some space, or choose another disk"
        )
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["c.fkf"]


def test_an_unwritable_directory(tmp_path: Path) -> None:
    """Permission is reported as such."""
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o555)
    with pytest.MonkeyPatch.context() as patch:
        if os.geteuid() == 0:
            denied = PermissionError(errno.EACCES, "Permission denied")
            patch.setattr(_atomic_write, "_fill", lambda *_: (_ for _ in ()).throw(denied))
        with pytest.raises(WriteError, match="Choose a directory that you may write to"):
            write_container(folder / "c.fkf", MEMBERS)
    assert names(folder) == []


# --- reading --------------------------------------------------------------------------------------


def named(name: str, mode: int = stat.S_IFREG | 0o644) -> zipfile.ZipInfo:
    """An entry with a file mode."""
    info = zipfile.ZipInfo(name)
    info.create_system = 3
    info.external_attr = mode << 16
    return info


def with_flag(data: bytes, flag: int) -> bytes:
    """The archive with a general purpose flag set on its first member, in both headers."""
    raw = bytearray(data)
    raw[6] |= flag
    raw[data.index(b"PK\x01\x02") + 8] |= flag
    return bytes(raw)


def patched(data: bytes, at: int, layout: str, *values: int) -> bytes:
    """The archive with numbers in its place."""
    raw = bytearray(data)
    struct.pack_into(layout, raw, at, *values)
    return bytes(raw)


def directory(data: bytes, entry: int) -> int:
    """Where an entry of the directory begins."""
    return [found.start() for found in re.finditer(b"PK\x01\x02", data)][entry]


GRAPH = {"graph.json": b"{}"}
LISTED = json.loads(manifest_for(GRAPH))["members"]
TWO = capture({"a.json": b"{}", "b.json": b"{}"})
LONG = capture({"graph.json": b"[" + b"1," * 5000 + b"1]"})
CUT = "the file is truncated, or something follows its end"
NO_ZIP = "not a capture file; expected a ZIP file"
NOT_FIRST = "not a capture file; expected manifest.json to come first"
PACKED = "a member is packed in a way that captures are not"
UNKNOWN = "written by an unknown release. Upgrade torch_fakeify"
NEWER = (
    ":manifest.json: a newer version of torch_fakeify wrote this file; expected format version 1; "
    f"found format version 2, {UNKNOWN}, or have the writer save it with version=1"
)
FEATURE = (
    "the file needs a feature that this version does not support; expected data; found quantum, "
)
TRICKY = ("../a.json", "/a.json", "a\\b.json", "C:a.json", "a/", "a.jsonZ.txt", "A.JSON", "x.py")
BAD: dict[type[FakeifyError], dict[str, tuple[bytes, str]]] = {
    FormatError: {
        "empty": (b"", NO_ZIP),
        "text": (b"hello world" * 9, NO_ZIP),
        "truncated": (VALID[:-30], CUT),
        "appended": (VALID + b"x", CUT),
        "prepended": (b"PK\x03\x04" + VALID, "the file's directory of members is damaged"),
        "no members": (archive([]), NO_ZIP),
        "a zip": (archive([("a.json", b"1")]), NOT_FIRST),
        "manifest last": (
            archive([*GRAPH.items(), ("manifest.json", manifest_for(GRAPH))]),
            NOT_FIRST,
        ),
        "encrypted": (with_flag(VALID, 1), "a member is encrypted"),
        "streamed": (with_flag(VALID, 8), PACKED),
        "bzip2": (archive([("manifest.json", manifest_for({}))], zipfile.ZIP_BZIP2), PACKED),
        "a link": (
            capture({}, [(named("a.json", stat.S_IFLNK | 0o777), b"/etc/passwd")]),
            "a member is a link or another special file",
        ),
        "not listed": (
            capture(extra=[("a.json", b"1")]),
            ":a.json: a member is not in the manifest",
        ),
        "listed but missing": (
            archive([("manifest.json", manifest_for({"a.json": b""}))]),
            ":a.json: a member is missing",
        ),
        "listed twice": (
            archive([("manifest.json", manifest_for({}, members=LISTED * 2)), *GRAPH.items()]),
            "the manifest lists a member twice",
        ),
        "bad json": (capture(format=[]), "a value has the wrong type"),
        "checksum": (
            archive([("manifest.json", manifest_for(GRAPH)), ("graph.json", b"[]")]),
            "a member differs from the manifest; expected 2 bytes with SHA-256 44136fa355b3678a...",
        ),
        "another format": (
            capture(format="torch_fakeify.records"),
            "not a capture file; expected torch_fakeify.capture; found torch_fakeify.records",
        ),
        "unknown field": (capture(owner="me"), "object contains unknown field `owner`"),
        # Several directory entries over the same bytes would multiply what they unpack to.
        "overlap": (
            patched(TWO, directory(TWO, 2) + 42, "<L", TWO.index(b"PK\x03\x04", 4)),
            "members overlap",
        ),
        # A member that unpacks to more than the size in its header is not unpacked further.
        "a wrong size": (patched(LONG, directory(LONG, 1) + 24, "<L", 10), ""),
        "large": (VALID[:-22] + b"PK\x06\x07" + bytes(16) + VALID[-22:], "sizes over 4 GiB"),
        **{
            f"name {name!r}": (
                capture({}, [(named(name), b"1")]).replace(b"Z.txt", b"\0.txt"),
                "a member has a name that captures do not have",
            )
            for name in TRICKY
        },
    },
    VersionError: {
        "newer": (capture(version=2, new_field=1), NEWER),
        "version 0": (capture(version=0), "no such format version; found 0"),
        "feature": (capture(features=["data", "quantum"]), f"{FEATURE}{UNKNOWN}"),
    },
    LimitError: {
        "too many": (
            capture({f"m{i}.json": b"" for i in range(64)}),
            "the file has too many members; expected at most 64; found 65",
        ),
        # The directory is bounded before it is read.
        "far too many": (patched(VALID, len(VALID) - 14, "<2H", 60000, 60000), "too many members"),
        "a bomb": (
            capture({"graph.json": bytes(20 << 20)}),
            "a member unpacks to far more than its size; expected at most 64 times",
        ),
    },
}


@pytest.mark.parametrize(("kind", "case"), [(kind, case) for kind in BAD for case in BAD[kind]])
def test_a_file_that_is_not_right_is_refused(
    tmp_path: Path, kind: type[FakeifyError], case: str
) -> None:
    """Each way to be wrong has its own error, which names the file."""
    data, text = BAD[kind][case]
    with pytest.raises(kind) as error:
        read(tmp_path, data)
    assert type(error.value) is kind
    assert text in str(error.value)
    assert str(error.value).startswith(str(tmp_path / "c.fkf"))


def test_a_member_that_occurs_twice(tmp_path: Path) -> None:
    """Two entries of one name are two truths."""
    with pytest.warns(UserWarning, match="Duplicate name"):
        data = capture(extra=[("graph.json", b"{}")])
    with pytest.raises(FormatError, match="a member occurs twice"):
        read(tmp_path, data)


def test_limits_hold_for_files_of_any_size(tmp_path: Path) -> None:
    """A large file may have more values than a small one, up to a number of them."""
    blob = base64.b64encode(random.Random(0).randbytes(1 << 20))
    large = pack_container({"a.json": b'["' + blob + b'"' + b",[]" * 300_000 + b"]"})
    assert read(tmp_path, large)
    for limit, found in (("containers", 300_001), ("values", 600_001)):
        with pytest.raises(LimitError, match=rf"at most 1000; found {found}\. If you trust it"):
            read(tmp_path, large, **{limit: 1000})


def test_limits_are_the_callers(tmp_path: Path) -> None:
    """Each limit is enforced at its value and not below."""
    members = {"a.json": b"1" * 100, "b.json": b"2" * 100}
    data = pack_container(members)
    assert read(tmp_path, data, members=3, member_bytes=500).members == members
    for limits, text in (
        ({"members": 2}, "too many members; expected at most 2; found 3"),
        ({"member_bytes": 99}, "a member is too large; expected at most 99 bytes"),
        ({"total_bytes": 300}, "the members are too large together; expected at most 300 bytes"),
    ):
        with pytest.raises(LimitError, match=text):
            read(tmp_path, data, **limits)
    tensors = pack_container({"data.safetensors": bytes(300)}, features=["data"])
    assert read(tmp_path, tensors, data_bytes=300, total_bytes=500)
    with pytest.raises(LimitError, match="expected at most 299 bytes; found 300"):
        read(tmp_path, tensors, data_bytes=299)


def test_a_path_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A missing file, a directory, a pipe: an error of the format, never another one."""
    os.mkfifo(tmp_path / "pipe")
    for path, found in (
        (tmp_path / "no.fkf", "No such file or directory"),
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path / "a\0b", null_character(lambda path: os.open(path, os.O_RDONLY))),
    ):
        with pytest.raises(FormatError) as error:
            read_container(path)
        where = str(path).replace("\0", "\\x00")
        assert str(error.value) == f"{where}: the file cannot be read; found {found}"


def test_a_directory_is_named_with_its_captures(tmp_path: Path) -> None:
    """The error lists them, also for a missing file in a directory."""
    with pytest.raises(FormatError) as error:
        read_container(tmp_path)
    assert str(error.value) == (
        f"{tmp_path}: that is a directory; expected a capture file; found no captures in it. "
        "Record some with `torch-fakeify run`"
    )
    for name in ["x\ny.fkf", *(f"{letter}.fkf" for letter in "gfedcba"), "notes.txt"]:
        (tmp_path / name).write_bytes(VALID)
    named = "a.fkf, b.fkf, c.fkf, d.fkf, e.fkf and 3 more"
    for path, text in (
        (
            tmp_path,
            f"that is a directory; expected a capture file; found the captures {named}. "
            "Name one of them",
        ),
        (
            tmp_path / "no.fkf",
            "the file cannot be read; found No such file or directory. "
            f"Captures beside it: {named}",
        ),
    ):
        with pytest.raises(FormatError) as error:
            read_container(path)
        assert str(error.value) == f"{path}: {text}"


def test_a_rezipped_capture_is_read(tmp_path: Path) -> None:
    """Who unpacks, looks and packs again with another tool still has a capture."""
    with zipfile.ZipFile(io.BytesIO(VALID)) as file:
        entries = [(name, file.read(name)) for name in file.namelist()]
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        assert read(tmp_path, archive(list(entries), compression)).members == MEMBERS


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_damaged_files_never_crash(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Truncation, flipped, inserted and removed bytes: the members as they were, or our error."""
    raw = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["flip", "cut", "drop", "insert", "end"]))
        at = data.draw(st.integers(0, max(0, len(raw) - 1)))
        if kind == "end":  # most of what a reader trusts stands in the last bytes
            at = max(0, len(raw) - 1 - data.draw(st.integers(0, 300)))
        if kind == "cut":
            del raw[at:]
        elif kind == "drop":
            del raw[at : at + data.draw(st.integers(1, 40))]
        elif kind == "insert":
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=20))
        elif raw:
            raw[at] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "fuzz.fkf"
    path.write_bytes(raw)
    text = ""
    try:
        back = read_container(path)
    except FakeifyError as error:
        back = None
        text = str(error)
    assert str(path) in text if back is None else back.members == MEMBERS


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["manifest.json", "graph.json", "tables.json", "x.json", "d/", "../x"]),
            st.sampled_from([b"", b"{}", b"[", manifest_for({"graph.json": b"{}"}), b"\xff" * 50]),
        ),
        max_size=5,
    )
)
@settings(max_examples=200, deadline=None)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_odd_archives_never_crash(
    tmp_path_factory: pytest.TempPathFactory, entries: list[tuple[str | zipfile.ZipInfo, bytes]]
) -> None:
    """Any set of members gives a capture or an error of the package."""
    path = tmp_path_factory.getbasetemp() / "odd.fkf"
    path.write_bytes(archive(entries))
    try:
        back = read_container(path)
    except FormatError:
        return
    assert back.members == {"graph.json": b"{}"}
