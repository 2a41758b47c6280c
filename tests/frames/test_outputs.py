"""Neither a command's inputs nor recordings of an earlier run are overwritten."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from places import GOLDEN

import torch_fakeify as tfk
from torch_fakeify._atomic_write import check_not_input
from torch_fakeify.cli import main
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


def test_a_result_at_the_path_of_the_earlier_one_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As every file of a corpus, an earlier result is an input; two results cannot have one path."""
    earlier = tmp_path / "r.jsonl"
    earlier.write_text("")
    for option in ("--jsonl", "--junit"):
        assert main(["replay", str(source), "--against", str(earlier), option, str(earlier)]) == 2
        assert "the output is an input" in capsys.readouterr().err
        assert main(["replay", str(source.parent), option, str(source)]) == 2
        assert source.read_bytes() == GOLDEN.read_bytes()
    both = ["--jsonl", str(tmp_path / "r"), "--junit", str(tmp_path / "r")]
    assert main(["replay", str(source), *both]) == 2
    assert "two results cannot be in one file" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["frames", "r.jsonl"]


def test_captures_of_an_earlier_run_are_not_overwritten(tmp_path: Path) -> None:
    """By a capture of the same frame that compiles, nor are they removed with one that is skipped."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    def fails(_gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        raise NotImplementedError("no kernel")

    def skips(_gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        raise torch._dynamo.exc.SkipFrame("not this one")

    for inner in (fails, "eager", "eager", skips):
        torch._dynamo.reset()
        refused = pytest.raises(Exception, match="no kernel") if inner is fails else nullcontext()
        with refused:
            torch.compile(program, backend=tfk.record(tmp_path, inner))(torch.ones(3))
    paths = sorted(tmp_path.iterdir())
    assert [path.name[:3] for path in paths] == ["000", "001", "002"]
    assert len({path.name[3:] for path in paths}) == 1
    failures = [read_capture(path).failure for path in paths]
    assert failures[0] is not None
    assert failures[1:] == [None, None]
