"""``show DIR``: the captures of a directory as a table, within the width of the terminal."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from places import GOLDEN

from torch_fakeify.cli import main
from torch_fakeify.corpus.listing import list_captures

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("aliases", "program_failed", "program_shape_arithmetic")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Three captures, one of them in a subdirectory."""
    (tmp_path / "below").mkdir()
    for name, folder in zip(NAMES, (tmp_path, tmp_path, tmp_path / "below"), strict=True):
        shutil.copy(GOLDEN / f"{name}.fkf", folder)
    (tmp_path / "notes.txt").write_text("no capture")
    return tmp_path


TABLE = """\
file                                function  ops     ms  result
aliases.fkf                         ?           0      -  compiled
below/program_shape_arithmetic.fkf  f          23      -  compiled
program_failed.fkf                  <lambda>    2      -  failed: ValueError

`torch-fakeify show FILE` prints one of them."""

NARROW = """\
file                                function  ops     ms  result
aliases.fkf                         ?           0      -  compiled
below/program_shape_arithmetic.fkf  f          23      -  compiled
program_failed.fkf                  <lambda>    2      -  failed:
                                                          ValueError

`torch-fakeify show FILE` prints one of them."""

NARROWEST = """\
aliases.fkf
  ?, 0 ops, compiled
below/program_shape_
arithmetic.fkf
  f, 23 ops, compiled
program_failed.fkf
  <lambda>, 2 ops, failed:
      ValueError

`torch-fakeify show FILE`
    prints one of them."""


@pytest.mark.parametrize(("columns", "text"), [(120, TABLE), (70, NARROW), (30, NARROWEST)])
def test_the_table_fits_the_terminal(
    directory: Path,
    columns: int,
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In fewer columns a file's name has a line of its own; below a limit there is no table."""
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["show", str(directory)]) == 0
    assert capsys.readouterr().out.rstrip("\n") == text


@pytest.mark.parametrize("columns", [20, 60, 80, 100])
def test_no_line_is_longer_than_the_terminal_is_wide(directory: Path, columns: int) -> None:
    """Long file names and long errors are broken into lines that fit the terminal."""
    (directory / f"{'long' * 40}.fkf").write_bytes(b"not a capture")
    shutil.copy(GOLDEN / "aliases.fkf", directory / f"{'name' * 40}.fkf")
    lines = list_captures(str(directory)).lines(columns)
    assert max(map(len, lines)) <= columns


def test_bad_files_are_listed_with_their_errors(
    directory: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other captures are listed nevertheless, and the exit status is 2; bad files alone make no table."""
    (directory / "a.fkf").write_bytes(b"")
    (directory / "z.fkf").write_bytes((directory / "aliases.fkf").read_bytes()[:-9])
    assert main(["show", str(directory)]) == 2
    text = capsys.readouterr().out
    assert all(f"{name}.fkf" in text for name in NAMES)
    assert text.partition("not read ")[2] == (
        "(2)\n"
        "  a.fkf: not a capture file; expected a ZIP file; found an empty file. Its "
        "writer has not finished. Record the frame again\n"
        "  z.fkf: the file is truncated, or something follows its end. Copy it again, or "
        "record the frame again\n"
        "\n`torch-fakeify show FILE` prints one of them.\n"
    )
    alone = tmp_path_factory.mktemp("alone")
    (alone / "a.fkf").write_bytes(b"PK")
    assert main(["show", str(alone)]) == 2
    assert capsys.readouterr().out == (
        "not read (1)\n"
        "  a.fkf: not a capture file; expected a ZIP file; found the beginning of a ZIP "
        "file. Copy it again, or record the frame again\n"
    )


def test_a_directory_without_captures_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory without captures is an error and no empty success."""
    assert main(["show", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"torch-fakeify: error: {tmp_path}: no captures in this directory; expected files *.fkf. "
        "Record some with `torch-fakeify run`\n"
    )


def test_names_cannot_forge_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line break or a control sequence in the name of a file is printed as an escape."""
    shutil.copy(GOLDEN / "aliases.fkf", tmp_path / "a\n\x1b[2Jb.fkf")
    (tmp_path / "c\nd.fkf").write_bytes(b"")
    assert main(["show", str(tmp_path)]) == 2
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "a\\n\\x1b[2Jb.fkf" in out
    assert "c\\nd.fkf: not a capture file" in out
