"""Neither a command's inputs nor recordings of an earlier run are overwritten."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from places import GOLDEN

import torch_fakeify as tfk
from torch_fakeify._atomic_write import check_not_input
from torch_fakeify.cli import main
from torch_fakeify.corpus.command import replay_corpus
from torch_fakeify.corpus.jobs import Job
from torch_fakeify.errors import WriteError
from torch_fakeify.serialization.capture_file import read_capture
from torch_fakeify.tools.fuzzing import FuzzReport
from torch_fakeify.tools.reporting import report

if TYPE_CHECKING:
    from collections.abc import Callable

GOLDEN = GOLDEN / "program_divisible.fkf"

WAYS: dict[str, Callable[[Path], Path]] = {
    "itself": lambda path: path,
    "another path": lambda path: path.parent / ".." / path.parent.name / path.name,
    "symlink": lambda path: linked(path, Path.symlink_to),
    "hard link": lambda path: linked(path, Path.hardlink_to),
}


def linked(path: Path, link: Any) -> Path:
    """Make another name of a file."""
    other = path.with_name("other")
    link(other, path)
    return other


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A capture in a folder of its own."""
    (tmp_path / "frames").mkdir()
    return Path(shutil.copy(GOLDEN, tmp_path / "frames" / "a.fkf"))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_an_output_that_is_the_input_is_refused(source: Path, way: Callable[[Path], Path]) -> None:
    """An output that is the input is refused under any path, and the error contains both paths."""
    output = way(source)
    message = f"{output}: the output is an input; found the same file as {source}"
    with pytest.raises(WriteError) as error:
        check_not_input(output, source)
    assert str(error.value).startswith(message)
    with pytest.raises(WriteError, match="the output is an input"):
        report(source, output)
    with pytest.raises(WriteError, match="the output is an input"):
        FuzzReport({}, source=source).save(output)
    for outputs in ({"jsonl": str(output)}, {"junit": str(output)}):
        with pytest.raises(WriteError, match="the output is an input"):
            replay_corpus([str(source)], Job("compile", "eager"), jobs=1, **outputs)
    assert source.read_bytes() == GOLDEN.read_bytes()


@pytest.mark.parametrize(
    "command",
    [
        "report {} -o {}",
        "fuzz {} --save {}",
        "replay {} --jsonl {}",
        "replay {} --junit {}",
        "replay {} --resume --jsonl {}",
        "minify {} -o {}",
    ],
)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_command_whose_output_is_its_input_is_refused(
    source: Path, way: Callable[[Path], Path], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status is 2, and the file is not changed."""
    output = way(source)
    assert main(command.format(source, output).split()) == 2
    message = capsys.readouterr().err
    assert f"{output}: the output is an input; found the same file as {source}" in message
    assert source.read_bytes() == GOLDEN.read_bytes()


def test_a_result_at_a_path_in_the_corpus_is_refused(source: Path) -> None:
    """A result cannot be written to a file of the corpus, every one of which is an input."""
    for option in ("--jsonl", "--junit"):
        assert main(["replay", str(source.parent), option, str(source)]) == 2
    assert source.read_bytes() == GOLDEN.read_bytes()


def test_a_result_at_the_path_of_the_earlier_one_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An earlier result is an input, and two results cannot have one path."""
    earlier = tmp_path / "r.jsonl"
    earlier.write_text("")
    for option in ("--jsonl", "--junit"):
        assert main(["replay", str(source), "--against", str(earlier), option, str(earlier)]) == 2
        assert "the output is an input" in capsys.readouterr().err
    both = ["--jsonl", str(tmp_path / "r"), "--junit", str(tmp_path / "r")]
    assert main(["replay", str(source), *both]) == 2
    assert "two results cannot be in one file" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["frames", "r.jsonl"]


def raising(_gm: torch.fx.GraphModule, _inputs: Any) -> Any:
    """A backend with a bug."""
    raise NotImplementedError("no kernel")


def test_captures_of_an_earlier_run_are_not_overwritten(tmp_path: Path) -> None:
    """A recorded failure is not replaced by a capture of the same frame that compiles."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    for inner in (raising, "eager", "eager"):
        torch._dynamo.reset()
        compiled = torch.compile(program, backend=tfk.record(tmp_path, inner))
        if inner == "eager":
            compiled(torch.ones(3))
        else:
            with pytest.raises(Exception, match="no kernel"):
                compiled(torch.ones(3))
    paths = sorted(tmp_path.iterdir())
    assert [path.name[:3] for path in paths] == ["000", "001", "002"]
    assert len({path.name[3:] for path in paths}) == 1
    failures = [read_capture(path).failure for path in paths]
    assert failures[0] is not None
    assert failures[1:] == [None, None]


def test_a_skipped_frame_removes_no_earlier_capture(tmp_path: Path) -> None:
    """A backend that has Dynamo skip the frame leaves the earlier files."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    def skips(_gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        raise torch._dynamo.exc.SkipFrame("not this one")

    for inner in ("eager", skips):
        torch._dynamo.reset()
        torch.compile(program, backend=tfk.record(tmp_path, inner))(torch.ones(3))
    assert [path.name[:3] for path in tmp_path.iterdir()] == ["000"]
