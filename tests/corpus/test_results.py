"""The results of a corpus: files, JSON lines, JUnit XML, comparisons and progress."""

from __future__ import annotations

import io
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import GOLDEN

import torch_fakeify as tfk
from torch_fakeify.corpus.command import progress
from torch_fakeify.corpus.results import ResultFile, Row, compare, junit_xml, read_rows
from torch_fakeify.corpus.runner import frame_key
from torch_fakeify.records.frame import FailureDesc
from torch_fakeify.serialization.capture_file import read_capture
from torch_fakeify.tools.capture_files import CorpusFile, find_captures
from torch_fakeify.tools.run_script import same_frames


def row(file: str, verdict: str = "compiles", **fields: Any) -> Row:
    """Return a row; only these two verdicts count as passed."""
    fields = {"holds": verdict in ("compiles", "reproduced"), "backend": "b", **fields}
    return Row(file=file, verdict=verdict, **fields)


# --- files ----------------------------------------------------------------------------------------


def touched(folder: Path, *names: str) -> None:
    """Make empty files, and their folders."""
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).touch()


def test_captures_are_found_in_order(tmp_path: Path) -> None:
    """The search is recursive and sorted, enters hidden folders and skips temporary files.

    A file system may have names of any bytes; a result is UTF-8.
    """
    touched(
        tmp_path, "b/z.fkf", "b.fkf", "a/.hidden/x.fkf", "build/y.fkf", "a/n.txt", "a/.c.fkf.0.tmp"
    )
    touched(tmp_path, os.fsdecode(b"c/\xff.fkf"))
    found = find_captures([tmp_path])
    assert [file.name for file in found] == [
        "a/.hidden/x.fkf", "b/z.fkf", "b.fkf", "build/y.fkf", "c/\\xff.fkf",
    ]  # fmt: skip
    assert found[1] == CorpusFile("b/z.fkf", tmp_path / "b" / "z.fkf")
    assert found[-1].path.exists()


def test_captures_of_several_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names distinguish the directories; a file that two arguments reach is listed once."""
    touched(tmp_path, "a/x.fkf", "b/x.fkf", "c")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    found = find_captures(["b", "a", "link", "c", "a/x.fkf"])
    assert [file.name for file in found] == ["a/x.fkf", "b/x.fkf", "c"]


def test_captures_of_one_frame_have_one_key() -> None:
    """The fingerprint, the recorded failure but for what differs from run to run, and the backend count."""
    desc = read_capture(GOLDEN / "tensor_strided.fkf")
    other = read_capture(GOLDEN / "tensor_detached.fkf")
    aliases = read_capture(GOLDEN / "aliases.fkf")
    assert frame_key(desc, None) == frame_key(other, None) != frame_key(aliases, None)

    def failed(message: str) -> Any:
        failure = FailureDesc(type="E", message=message)
        return frame_key(msgspec.structs.replace(desc, failure=failure), "eager")

    assert failed("at 0x12") == failed("at 0xab") != failed("elsewhere") != frame_key(desc, "eager")
    frames = [msgspec.structs.replace(desc, backend=name) for name in ("eager", "aot_eager")]
    assert len({frame_key(each, None) for each in frames}) == 2
    assert len({frame_key(each, "inductor") for each in frames}) == 1


def test_a_frame_that_is_recorded_already_is_found() -> None:
    """The first capture of a frame in the run is named for each later one."""
    first, other, again = Path("000-f.fkf"), Path("001-g.fkf"), Path("7/000-f.fkf")
    assert same_frames({first: "key", other: "other", again: "key"}) == {again: first}


# --- JSON lines -----------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
ROWS = st.builds(
    Row,
    **dict.fromkeys(("file", "verdict", "backend"), TEXT),
    **dict.fromkeys(("device", "torch", "fingerprint", "recorded", "same_as"), st.none() | TEXT),
    holds=st.booleans(),
    seconds=st.floats(0, 1e6),
    details=st.lists(TEXT).map(tuple),
)


@given(rows=st.lists(ROWS, max_size=4, unique_by=lambda row: row.file))
def test_rows_survive_their_file(rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each line is an object with every field, and is read as an equal row."""
    path = tmp_path_factory.mktemp("rows") / "r.jsonl"
    with ResultFile(path, [row.file for row in rows]) as result:
        for each in rows:
            result.add(each)
    assert sorted(map(repr, read_rows(path))) == sorted(map(repr, rows))
    for line in path.read_bytes().split(b"\n")[:-1]:
        assert list(json.loads(line)) == list(Row.__struct_fields__)


def test_lines_are_written_at_once_and_sorted_at_the_end(tmp_path: Path) -> None:
    """After any end of the process its rows are in the file, finally in the order of the files."""
    path = tmp_path / "r.jsonl"
    with ResultFile(path, ["a", "b", "c"]) as result:
        for count, name in enumerate("cab", 1):
            result.add(row(name))
            assert len(read_rows(path)) == count
        assert [each.file for each in read_rows(path)] == ["c", "a", "b"]
    assert [each.file for each in read_rows(path)] == ["a", "b", "c"]


def test_a_truncated_line_is_dropped_or_refused(tmp_path: Path) -> None:
    """A resumed run drops the line, a comparison refuses it with its number."""
    path = tmp_path / "r.jsonl"
    with ResultFile(path, ["a", "b"]) as result:
        result.add(row("a"))
        result.add(row("b"))
    path.write_bytes(path.read_bytes()[:-20])
    assert [each.file for each in read_rows(path, whole=False)] == ["a"]
    with pytest.raises(tfk.FormatError, match=r"r.jsonl:2: not a line of a result"):
        read_rows(path)


def test_a_file_that_is_no_result_is_refused(tmp_path: Path) -> None:
    """The error contains the file, the line and the field."""
    path = tmp_path / "r.jsonl"
    for data, error in (
        (b'{"file": 3}\n', r"r.jsonl:1: .* found .*`\$.file`"),
        (b'"\xff"\n', "r.jsonl:1: "),
    ):
        path.write_bytes(data)
        with pytest.raises(tfk.FormatError, match=error):
            read_rows(path)
    with pytest.raises(tfk.FormatError, match="the result cannot be read; found No such file"):
        read_rows(tmp_path / "none")
    with pytest.raises(tfk.WriteError, match="Make the directory first"):
        ResultFile(tmp_path / "no" / "r.jsonl", [])


# --- JUnit ----------------------------------------------------------------------------------------


def test_junit_counts_its_elements() -> None:
    """The numbers in the suite's attributes equal the numbers of its elements."""
    rows = [
        row("a.fkf", seconds=1.5, details=("compiled in 3 ms",)),
        row("sub/b.fkf", "hangs", seconds=2.0, details=("killed after 2 s", "  \x1b[31m\ud800")),
        row("c.fkf", "bad file", details=("not a capture file",)),
        row("d.fkf", "hangs", same_as="sub/b.fkf"),
        row("e.fkf", "compiles", same_as="a.fkf"),
        row("f.fkf", "not reproduced", details=("recorded:", "  E: \uffff", "now:")),
    ]
    root = ET.fromstring(junit_xml(rows))
    (suite,) = root
    found = Counter(child.tag for case in suite for child in case)
    assert (root.tag, suite.tag, suite.get("name")) == (
        "testsuites",
        "testsuite",
        "torch-fakeify b",
    )
    assert found == {"failure": 2, "error": 1, "skipped": 2, "system-out": 1}
    counts = ("tests", "failures", "errors", "skipped")
    assert [int(suite.get(name, "")) for name in counts] == [6, 2, 1, 2]
    assert float(suite.get("time", "")) == 3.5
    names = [(case.get("classname"), case.get("name")) for case in suite]
    assert names[:2] == [("b", "a.fkf"), ("b.sub", "b.fkf")]
    failure = suite[1][0]
    assert failure.attrib == {"type": "hangs", "message": "hangs: killed after 2 s"}
    assert failure.text == "hangs\n  killed after 2 s\n    \\x1b[31m\\ud800"
    assert suite[3][0].get("message") == "the same frame as sub/b.fkf: hangs"
    assert suite[5][0].get("message") == "not reproduced: E: \\uffff"


@given(rows=st.lists(st.builds(row, st.text(), st.text(), details=st.tuples(st.text()))))
def test_junit_is_xml_for_any_texts(rows: list[Row]) -> None:
    """No name or message makes a document that a parser refuses."""
    (suite,) = ET.fromstring(junit_xml(rows))
    assert len(suite) == len(rows)


# --- comparison -----------------------------------------------------------------------------------


def test_captures_are_compared_with_an_earlier_result() -> None:
    """Each capture is listed by its change since the earlier result."""
    earlier = [
        row("held"),
        row("broke"),
        row("mended", "hangs"),
        row("broken", "hangs"),
        row("gone"),
        row("moved", fingerprint="f", recorded="E"),
        row("unmoved", fingerprint="g"),
    ]
    rows = [
        row("held"),
        row("broke", "crashes"),
        row("mended"),
        row("broken", "crashes"),
        row("there", "hangs", fingerprint="f", recorded="E"),
        row("other", fingerprint="g", recorded="E"),
        row("new"),
        row("bad", "bad file"),
    ]
    found = compare(earlier, rows)
    assert found.lines() == [
        "newly fails: 3",
        "  broke: crashes, was compiles",
        "  there: hangs, was compiles",
        "  bad: bad file, was not there",
        "newly passes: 1",
        "  mended: compiles, was hangs",
        "still fails: 1",
        "  broken: crashes, was hangs",
        "new: 3",
        "  other: compiles, was not there",
        "  new: compiles, was not there",
        "  bad: bad file, was not there",
        "missing: 2",
        "  gone: compiles",
        "  unmoved: compiles",
    ]


@given(
    earlier=st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), unique_by=lambda x: x[0]),
    now=st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), unique_by=lambda x: x[0]),
)
def test_a_comparison_loses_no_capture(
    earlier: list[tuple[str, bool]], now: list[tuple[str, bool]]
) -> None:
    """Each capture that fails now, and each that is missing, is in exactly one list."""
    words = {True: "compiles", False: "hangs"}
    before, after = ([row(name, words[ok]) for name, ok in part] for part in (earlier, now))
    found = compare(before, after)
    changes = found.changes
    failing = [c.after for c in (*changes["newly fails"], *changes["still fails"])]
    assert sorted(r.file for r in failing if r) == sorted(r.file for r in after if not r.holds)
    assert {c.before.file for c in changes["missing"] if c.before} == {a for a, _ in earlier} - {
        a for a, _ in now
    }
    assert not compare(before, before).changes["newly fails"]


def test_a_comparison_lists_other_versions_and_backends() -> None:
    """The lines begin with the differences that may explain the others."""
    found = compare([row("a", torch="2.13.0")], [row("a", "hangs", torch="2.14.0", backend="c")])
    assert found.lines()[:2] == [
        "against the earlier result, backend: c, was b",
        "against the earlier result, torch: 2.14.0, was 2.13.0",
    ]


# --- progress --------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    isatty = lambda _self: True  # noqa: E731


def steps(stream: io.StringIO) -> str:
    """Print the progress of 25 captures of which one does not hold."""
    with progress(25, stream) as step:
        for number in range(25):
            step(number != 12)
    return stream.getvalue()


def test_progress_without_a_terminal_is_lines() -> None:
    """Each tenth has its line, without a control character."""
    lines = steps(io.StringIO()).splitlines()
    assert len(lines) == 10
    assert lines[0] == "3 of 25, 0 do not hold"
    assert lines[-1] == "25 of 25, 1 do not hold"
    assert all(line.isprintable() for line in lines)


def test_progress_on_a_terminal_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `rich` the bar is redrawn in place; without it there are lines."""
    monkeypatch.setenv("TERM", "xterm")
    drawn = steps(Terminal())
    assert "\x1b[" in drawn
    assert "25 of 25, 1 do not hold" in drawn
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert steps(Terminal()).splitlines()[-1] == "25 of 25, 1 do not hold"
