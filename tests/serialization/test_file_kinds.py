"""A file that is no capture is called what it is, by every command that reads captures."""

from __future__ import annotations

import gzip
import io
import pickle
import zipfile
from typing import TYPE_CHECKING

import numpy as np
import pytest
import safetensors.torch
import torch
from quiet import quiet

import torch_fakeify as tfk
from torch_fakeify.cli import main
from torch_fakeify.errors import FormatError
from torch_fakeify.serialization.container import pack_container, read_container

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

VALID = pack_container({"graph.json": b"{}"})


def archive(entries: list[tuple[str, bytes]]) -> bytes:
    """A ZIP of entries."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as zipped:
        for name, data in entries:
            zipped.writestr(name, data)
    return file.getvalue()


def saved(save: Callable[[io.BytesIO], object]) -> bytes:
    """What a function writes."""
    file = io.BytesIO()
    with quiet():
        save(file)
    return file.getvalue()


RECORD = "Record a frame with `torch-fakeify run SCRIPT`, which writes captures (*.fkf)"
LINEAR = torch.nn.Linear(2, 2)
FOREIGN: dict[str, tuple[Callable[[], bytes], str, str]] = {
    "weights": (
        lambda: saved(lambda f: torch.save(LINEAR.state_dict(), f)),
        "a file of torch.save, such as weights",
        RECORD,
    ),
    "weights of an old torch": (
        lambda: saved(
            lambda f: torch.save(LINEAR.state_dict(), f, _use_new_zipfile_serialization=False)
        ),
        "a file of torch.save, such as weights",
        RECORD,
    ),
    "the beginning of weights": (
        lambda: saved(lambda f: torch.save(LINEAR.state_dict(), f))[:400],
        "a file of torch.save, such as weights",
        RECORD,
    ),
    "an exported program": (
        lambda: saved(
            lambda f: torch.export.save(torch.export.export(LINEAR, (torch.ones(1, 2),)), f)
        ),
        "a file of torch.export.save",
        "Load it with torch.export.load, and compile its module() with"
        " backend=torch_fakeify.record(DIRECTORY)",
    ),
    "TorchScript": (
        lambda: saved(lambda f: torch.jit.save(torch.jit.trace(LINEAR, torch.ones(1, 2)), f)),
        "a file of torch.jit.save",
        f"TorchScript has no captures. {RECORD}",
    ),
    "safetensors": (
        lambda: safetensors.torch.save({"a": torch.ones(2)}), "a safetensors file", RECORD,
    ),
    "arrays": (
        lambda: saved(lambda f: np.savez(f, a=np.ones(3))), "a file of numpy.savez", RECORD,
    ),
    "an array": (lambda: saved(lambda f: np.save(f, np.ones(3))), "a file of numpy.save", RECORD),
    "a pickle": (lambda: pickle.dumps({"a": 1}), "a pickle", RECORD),
    "a ZIP file": (
        lambda: archive([("hello.txt", b"hi")]), "a ZIP file with hello.txt", RECORD,
    ),
    "a capture in a ZIP file": (
        lambda: archive([("a.fkf", VALID)]), "a ZIP file of captures", "Unpack it",
    ),
    "an empty ZIP file": (lambda: archive([]), "an empty ZIP file", RECORD),
    "a capture in gzip": (lambda: gzip.compress(VALID), "a file packed by gzip", "Unpack it"),
    "records": (
        lambda: tfk.dumps(tfk.describe_tensor(torch.ones(2))),
        "records as text, of torch_fakeify.dumps or `show --json`",
        "Read it with torch_fakeify.loads; Capture.save writes a capture",
    ),
    "JSON": (lambda: b' {"a": 1}', "JSON", RECORD),
    "text": (lambda: "h\u00e9llo\n".encode() * 3000, "text", RECORD),
    "a page": (lambda: b"<!doctype html><html>", "a web page", RECORD),
    "an empty file": (
        lambda: b"", "an empty file", "Its writer has not finished. Record the frame again",
    ),
    "three bytes": (
        lambda: VALID[:3], "the beginning of a ZIP file",
        "Copy it again, or record the frame again",
    ),
    "a picture": (lambda: b"\x89PNG\r\n\x1a\n" + bytes(64), "a file of another kind", RECORD),
}  # fmt: skip


@pytest.mark.parametrize("what", FOREIGN)
def test_a_file_of_another_kind_is_called_what_it_is(tmp_path: Path, what: str) -> None:
    """In one line, with what to do."""
    make, found, fix = FOREIGN[what]
    data = make()
    expected = "manifest.json to come first" if data[:4] == b"PK\x03\x04" else "a ZIP file"
    path = tmp_path / "c.fkf"
    path.write_bytes(data)
    with pytest.raises(FormatError) as error:
        read_container(path)
    where, _, text = str(error.value).partition(": ")
    assert where.startswith(str(tmp_path))
    assert text == f"not a capture file; expected {expected}; found {found}. {fix}"


COMMANDS = {
    "show": ["show"], "privacy": ["show", "--privacy"], "json": ["show", "--json"],
    "replay": ["replay"], "minify": ["minify"], "fuzz": ["fuzz"], "report": ["report"],
}  # fmt: skip


BAD = ["weights", "an exported program", "an empty file", "missing", "truncated", "directory"]
TRIED = [*COMMANDS, "diff", "diff, second"]


@pytest.mark.parametrize(
    ("what", "command"),
    [
        (what, command)
        for what in BAD
        for command in TRIED
        if what != "directory" or command not in {"show", "replay", "report"}  # which take them
    ],
)
def test_every_command_says_so_in_one_line(
    what: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit status 2, and nothing written."""
    path = tmp_path / "model.pt"
    if what == "directory":
        path.mkdir()
        (path / "a.fkf").write_bytes(VALID)
    elif what != "missing":
        path.write_bytes(VALID[:-40] if what == "truncated" else FOREIGN[what][0]())
    good = tmp_path / "good.fkf"
    tfk.capture(torch.fx.symbolic_trace(lambda x: x + 1), [torch.ones(2)]).save(good)
    if command.startswith("diff"):
        pair = [str(path), str(good)]
        arguments = ["diff", *(pair if command == "diff" else reversed(pair))]
    else:
        arguments = [*COMMANDS[command], str(path)]
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith(f"torch-fakeify: error: {path}: ")
    said = {
        "missing": "found No such file or directory. Captures beside it: good.fkf",
        "truncated": "Copy it again, or record the frame again",
        "directory": "found the captures a.fkf. Name one of them",
    }
    assert line.endswith(said.get(what) or FOREIGN[what][2])
    assert {each.name for each in tmp_path.iterdir()} <= {"model.pt", "good.fkf"}
