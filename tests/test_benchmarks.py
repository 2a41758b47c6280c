"""The benchmarks run and print what was measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import fresh

ROOT = Path(__file__).parents[1]
STATUS = ("-m", "benchmarks.model_status")
sys.path.append(str(ROOT))

from benchmarks.__main__ import SCRIPTS  # noqa: E402 - a checkout's folder, which is not installed
from benchmarks.model_status import merged, table  # noqa: E402
from benchmarks.run import alone  # noqa: E402
from benchmarks.table import (  # noqa: E402
    Figure,
    Row,
    as_data,
    at_least,
    at_most,
    figures,
    print_rows,
)


def _row(theirs: Any, ours: Any, budget: Any = None) -> Row:
    return Row("work", "us", Figure(theirs) if isinstance(theirs, tuple) else theirs, ours, budget)


@pytest.mark.parametrize(
    ("theirs", "ours", "budget", "ratio", "met"),
    [
        ((80.0, 90.0, 70.0), (10.0, 10.0, 10.0), at_least(8), 8.0, True),
        ((79.0, 90.0, 70.0), (10.0, 10.0, 10.0), at_least(8), 7.9, False),
        ((10.0, 10.0, 10.0), (12.0, 9.0, 13.0), at_most(1.2), 1.2, True),
        ((10.0, 10.0, 10.0), (12.1, 9.0, 13.0), at_most(1.2), 1.21, False),
        ((10.0, 20.0, 30.0), (10.0, 10.0, 10.0), None, 2.0, None),
    ],
)
def test_a_row_has_the_state_of_its_budget(
    theirs: Any, ours: Any, budget: Any, ratio: float, met: bool | None
) -> None:
    """The median of the rounds' ratios decides, in the direction of the budget."""
    row = _row(theirs, Figure(ours), budget)
    assert row.ratio is not None
    assert row.ratio.median == pytest.approx(ratio)
    assert row.met is met


def test_a_ratio_is_that_of_its_round() -> None:
    """A round at half the speed changes both figures and not the ratio."""
    row = _row((10.0, 20.0, 20.0), Figure((1.0, 2.0, 2.0)), at_least(10))
    assert row.ratio == Figure((10.0, 10.0, 10.0))
    assert row.ratio.spread == 0


def test_an_error_of_torch_has_no_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    """The table has the name of the error instead of a figure."""
    row = _row("PicklingError", Figure((1.0,)), at_least(3))
    assert row.met is None
    assert print_rows([row]) == [row]
    line = capsys.readouterr().out.splitlines()[1]
    assert line.split() == ["work", "PicklingError", "1.00", "us", "-", ">=", "3"]


@pytest.mark.sweep
def test_the_sides_alternate() -> None:
    """Each round begins with the other side, and the warm-up is not counted."""
    calls: list[str] = []

    def side(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    theirs, ours = figures(lambda: side("theirs"), lambda: side("ours"), rounds=2)
    assert calls == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert (theirs.values, ours.values) == ((3.0, 6.0), (4.0, 5.0))


@pytest.mark.sweep
@pytest.mark.long
def test_short_rounds_are_repeated() -> None:
    """Rounds are repeated until a time is filled, at most threefold, equally many for each side."""
    for seconds, expected in ((0.0, 2), (60.0, 6)):
        theirs, ours = figures(lambda: 2.0, lambda: 1.0, rounds=2, seconds=seconds)
        assert (theirs.values, ours.values) == ((2.0,) * expected, (1.0,) * expected)


def test_json_has_every_number() -> None:
    """JSON has the figures of the table and the values of each round."""
    (line,) = as_data([_row((8.0, 8.0), Figure((1.0, 2.0)), at_least(5))])
    assert json.loads(json.dumps(line)) == {
        "work": "work",
        "unit": "us",
        "torch": {"median": 8.0, "spread": 0.0, "values": [8.0, 8.0]},
        "torch_fakeify": {"median": 1.5, "spread": pytest.approx(1 / 6), "values": [1.0, 2.0]},
        "ratio": {"median": 6.0, "spread": pytest.approx(1 / 6), "values": [8.0, 4.0]},
        "budget": {"limit": 5, "most": False},
        "met": True,
    }


@pytest.mark.sweep
@pytest.mark.parametrize(
    "script",
    [pytest.param(("benchmarks.bench_memory",), marks=pytest.mark.long), ("benchmarks", "memory")],
    ids=["alone", "in the table"],
)
def test_a_script_prints_json(script: tuple[str, ...]) -> None:
    """The JSON has every line that was asked for, and no progress is printed among it."""
    done = fresh("-m", *script, "--rounds", "1", "--json", cwd=ROOT)
    result = json.loads(done.stdout)
    assert result["rounds"] == 1
    assert [line["unit"] for line in result["lines"]] == ["MB", "B"]


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (("-m", "benchmarks", "--rounds", "1", "no_such"), "no such script: no_such; there are describe, static, dynamic"),
        pytest.param((*STATUS, "transformers.no_such"), "no such architecture: transformers.no_such", marks=pytest.mark.sweep),
    ],
)  # fmt: skip
def test_an_unknown_name_is_refused(command: tuple[str, ...], error: str) -> None:
    """Nothing is run; the error of a benchmark lists those that exist."""
    if command[1] == STATUS[1]:
        pytest.importorskip("transformers")
    assert error in fresh(*command, cwd=ROOT, status=2).stderr


def test_the_table_has_every_script() -> None:
    """Every file of a benchmark is listed in `SCRIPTS`."""
    files = (ROOT / "benchmarks").glob("bench_*.py")
    assert {f"bench_{name}" for name in SCRIPTS} == {file.stem for file in files}


@pytest.mark.models
@pytest.mark.sweep
@pytest.mark.long
def test_the_status_of_a_model_is_resumed(tmp_path: Path) -> None:
    """What is in the file is not run again; the table has a line for each model that was built."""
    pytest.importorskip("transformers")
    out = tmp_path / "status.jsonl"
    known = {"model": "transformers.vit", "mode": "inference", "backend": "aot_eager"}
    versions = fresh(*STATUS, "--versions", cwd=ROOT).stdout
    out.write_text(versions + json.dumps(known | {"error": "longer than 1 s"}) + "\n")
    command = (*STATUS, "--out", out, "--mode", "inference", "--jobs", "1")
    architectures = ("transformers.vit", "transformers.mobilebert", "transformers.dac")
    fresh(*command, *architectures, cwd=ROOT)
    lines = out.read_text().splitlines()
    assert len(lines) == 4  # with the versions
    rows = {key[0]: row for key, row in merged(lines[1:]).items()}
    assert rows["transformers.vit"]["error"] == "longer than 1 s"
    assert "not built" in rows["transformers.dac"]
    found = rows["transformers.mobilebert"]
    assert (found["direct"], found["handoff"], found["drop-in"], found["replay"]) == (None,) * 4
    assert found["recorded"] == found["replayed"] > 0
    printed = fresh(*STATUS, "--table", out, cwd=ROOT).stdout
    assert "| mobilebert | equal | equal | equal | 1 |" in printed
    assert "- transformers.vit, inference, aot_eager, error: longer than 1 s" in printed
    assert "- transformers.dac: " in printed


@pytest.mark.sweep
def test_a_file_of_other_versions_is_not_continued(tmp_path: Path) -> None:
    """The lines of a file are of one set of libraries; nothing is run or written."""
    pytest.importorskip("transformers")
    out = tmp_path / "status.jsonl"
    out.write_text('{"torch": "1.0"}\n')
    done = fresh(*STATUS, "--out", out, "transformers.bert", cwd=ROOT, status=2)
    assert "was made with" in done.stderr
    assert out.read_text() == '{"torch": "1.0"}\n'


def test_the_status_page_has_the_table_of_its_file() -> None:
    """The table in the docs is what the results of the run print."""
    versions, *lines = (ROOT / "benchmarks/results/model_status.jsonl").read_text().splitlines()
    rows = merged(lines).values()
    assert all({"error", "not built", "replayed"} & {*row} for row in rows)
    page = (ROOT / "docs/model-status.md").read_text()
    assert page.endswith("\n" + "\n".join(table(json.loads(versions), rows)) + "\n")


@pytest.mark.sweep
def test_a_script_that_fails_ends_the_table() -> None:
    """A script that fails raises, since its lines would be missing silently."""
    with pytest.raises(SystemExit, match="no_such ended with status 1"):
        list(alone("no_such")(1))
