"""Other sizes that the guards admit, and what `fuzz` finds at them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
from typing import TYPE_CHECKING, Any

import pytest
import torch
from captured_frames import recorded_frame
from places import GOLDEN
from planting import plant

import torch_fakeify as tfk
from torch_fakeify._atomic_write import check_writable
from torch_fakeify.cli import main
from torch_fakeify.frames.inputs.size_search import SizeSearch
from torch_fakeify.serialization.capture_file import read_capture
from torch_fakeify.tools.fuzzing import FuzzReport, SizeFailure, fuzz
from torch_fakeify.tools.worker.comparing import first_mismatch

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("warm_workers")


BACKENDS = """
def _at(gm, holds, act):
    def call(*args):
        sizes = [a.shape[0] for a in args if getattr(a, "ndim", 0)]
        return act(gm(*args)) if any(map(holds, sizes)) else gm(*args)
    return call


def planted_right(gm, inputs):
    return gm


def planted_wrong(gm, inputs):
    return _at(gm, lambda n: n % 8 and n > 10, lambda out: [out[0] + 1, *out[1:]])


def planted_short(gm, inputs):
    return _at(gm, lambda n: n == 6, lambda out: [out[0][:-1], *out[1:]])


def planted_raises(gm, inputs):
    def act(out):
        raise IndexError("no such lane")
    return _at(gm, lambda n: n > 100, act)


def planted_segfaults(gm, inputs):
    return _at(gm, lambda n: n == 17, lambda out: os.kill(os.getpid(), signal.SIGSEGV))


def planted_hangs(gm, inputs):
    return _at(gm, lambda n: n == 33, lambda out: time.sleep(1000))


def planted_refuses(gm, inputs):
    raise RuntimeError("not this one")
"""


def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Assume equal sizes, one with a lower bound and one that is a multiple."""
    if x.shape[0] > 5:
        x = x + 1
    if x.shape[1] % 4 == 0:
        y = y.view(y.shape[0], -1, 4).sum(-1).sum(1, keepdim=True)
    return x * y.sum(1, keepdim=True)


@pytest.fixture(scope="module")
def frame(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    """The program's capture, in a folder that is on the path of the planted backends."""
    with pytest.MonkeyPatch.context() as patch:
        plant(tmp_path_factory.mktemp("planted"), BACKENDS, patch)
        folder = tmp_path_factory.mktemp("frame")
        x = torch.ones(8, 12)
        yield recorded_frame(folder, program, x, x.clone(), dynamic=True)


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=[pytest.mark.sweep, pytest.mark.long])])
def test_sizes_satisfy_every_guard_of_torchs(every: int) -> None:
    """Torch's own restored environment accepts each choice of sizes, over the golden corpus.

    The first choice has the recorded sizes, and a model has others: its floats with a value are no sizes.
    """
    tried = 0
    models = {GOLDEN / f"model_{name}.fkf" for name in ("llama", "bert", "vit")}
    for path in sorted({*sorted(GOLDEN.glob("*.fkf"))[::every], *models}):
        desc = read_capture(path)
        if desc.shape_env is None:
            continue
        search = SizeSearch(desc)
        found = list(itertools.islice(search, 12)) if search.example else []
        if path in models:
            assert found[0].items() >= search.example.items()
            assert len({tuple(sizes[n] for n in search.example) for sizes in found}) == 12
        env = tfk.restore(desc.shape_env) if found else None
        for sizes in found:
            values = {s: sizes.get(s.name) for s in env.backed_var_to_val}
            known = {s: n for s, n in values.items() if n is not None}
            for guard in env.guards:
                assert guard.expr.xreplace(known) != False, (path.stem, sizes)  # noqa: E712
            for symbol, expr in env.replacements.items():
                if not symbol.is_integer or not expr.free_symbols | {symbol} <= known.keys():
                    continue  # floats with a value, and unbacked symbols, are no sizes
                assert symbol.xreplace(known) - expr.xreplace(known) == 0
            for symbol, n in known.items():
                bounds = env.var_to_range[symbol]
                assert (bounds.lower.xreplace(known) <= n) != False, (path.stem, sizes)  # noqa: E712
                assert (n <= bounds.upper.xreplace(known)) != False, (path.stem, sizes)  # noqa: E712
            tried += 1
    assert tried > 100 // every


def test_sizes_are_those_at_which_code_is_likely_to_be_wrong(frame: Path) -> None:
    """Ends of ranges, numbers in guards, primes and powers are tried; equal sizes stay equal."""
    desc = read_capture(frame)
    search = SizeSearch(desc)
    found = list(itertools.islice(search, 80))
    assert len({tuple(sizes.items()) for sizes in found}) == len(found)
    (rows, columns) = search.example
    assert search.example == {rows: 8, columns: 12}
    assert found[0].items() >= search.example.items()
    assert {6, 7, 13, 64, 127, 1009} <= {sizes[rows] for sizes in found}
    assert {4, 8, 16} <= {sizes[columns] for sizes in found}
    assert all(sizes[columns] % 4 == 0 and sizes[rows] > 5 for sizes in found)
    for sizes in found[:20]:
        x, y = (
            t for t in tfk.Capture(desc).materialize(sizes=sizes) if isinstance(t, torch.Tensor)
        )
        assert x.shape == y.shape == (sizes[rows], sizes[columns])


def hard(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Assume guards that one choice of sizes in fifty satisfies; two of them are equations."""
    a, b, c = x.shape[0], y.shape[0], z.shape[0]
    if (a * b) % c == 5 and a // 3 == b // 5 and a * a > b + c * 2:
        return x.sum() + y.sum() + z.sum()
    return x.sum()


@pytest.mark.sweep
def test_sizes_that_few_guards_admit_are_found(tmp_path: Path) -> None:
    """At each of the sizes, small and large, the program takes the branch of the example."""
    path = recorded_frame(tmp_path, hard, *(torch.ones(n) for n in (7, 10, 13)), dynamic=True)
    search = SizeSearch(read_capture(path))
    names = list(search.example)
    found = list(itertools.islice(search, 60))
    assert len({tuple(sizes.values()) for sizes in found}) == len(found) == 60
    for sizes in found:
        a, b, c = (sizes[name] for name in names)
        assert (a * b) % c == 5
        assert a // 3 == b // 5
        assert a * a > b + c * 2
    for name in names:
        assert max(sizes[name] for sizes in found) > 100, name


# --- what is found --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "kind", "text", "rows"),
    [
        ("planted_wrong", "wrong", "output 0: 44 of 44 elements are off, by up to 1", 11),
        pytest.param(
            *("planted_short", "wrong", "output 0: shape [5, 4], not [6, 4]", 6),
            marks=[pytest.mark.sweep, pytest.mark.long],
        ),
        pytest.param(
            *("planted_raises", "raises", "IndexError: no such lane", 101),
            marks=[pytest.mark.sweep, pytest.mark.long],
        ),
        pytest.param(*("planted_segfaults", "crashes", "SIGSEGV", 17), marks=pytest.mark.sweep),
    ],
)
def test_the_smallest_sizes_at_which_code_is_wrong_are_found(
    frame: Path, backend: str, kind: str, text: str, rows: int
) -> None:
    """Each planted bug is found, has its kind of failure, and is reported at its smallest sizes."""
    report = fuzz(frame, backend=backend)
    assert report.smallest is not None
    assert (report.smallest.kind, report.smallest.text.splitlines()[0]) == (kind, text)
    assert [report.smallest.sizes[name] for name in SizeSearch(read_capture(frame)).example] == [
        rows,
        4,
    ]
    assert report.lines()[1].startswith("smallest: x.size(0) = ")


@pytest.mark.sweep
@pytest.mark.long
def test_a_hang_is_found(frame: Path) -> None:
    """A hang costs the time limit of a batch once for each half of the batch."""
    report = fuzz(frame, backend="planted_hangs", runs=18, timeout=4)
    assert {failure.kind for failure in report.failures} == {"hangs"}


@pytest.mark.sweep
def test_right_code_has_no_findings(frame: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither correct code nor code that eager mode refuses has a finding."""
    assert main(["fuzz", "--backend", "planted_right", "--runs", "8", str(frame)]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "8 sizes tried, 8 compared, none fails",
        f"with planted_right, torch {torch.__version__.partition('+')[0]}, cpu",
    ]
    assert main(["fuzz", "--backend", "planted_refuses", str(frame)]) == 2
    assert "the frame cannot be run" in capsys.readouterr().err
    options = ["--trust", "--seed", "3", "--backend", "planted_short", "--runs", "8"]
    assert main(["fuzz", *options, str(frame)]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].startswith("smallest: x.size(0) = 6")
    sizes = "x.size(0)=6,x.size(1)=4"
    command = (
        f"minify --accuracy --trust --seed 3 --sizes '{sizes}' --backend planted_short {frame}"
    )
    assert printed[-2:] == ["next", f"  torch-fakeify {command}"]
    assert main(shlex.split(command)) == 0
    assert "wrong numbers in the forward pass" in capsys.readouterr().out


# --- what is compared -----------------------------------------------------------------------------


def never(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """Assert what no data satisfies."""
    torch._assert_async((n * 0 == 1).all())
    return x + n


def test_a_run_that_compared_nothing_is_no_success(
    frame: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first line has the number of sizes that were compared, and why the others were not."""
    del frame  # its planted backends
    saved = tmp_path / "sizes.json"
    with pytest.raises(RuntimeError, match="Expected Tensor with single nonzero value"):
        recorded_frame(
            tmp_path, never, torch.ones(5), torch.ones(5, dtype=torch.int64), dynamic=True
        )
    (path,) = tmp_path.glob("*.fkf")
    asked = ["fuzz", "--backend", "planted_right", "--runs", "4", "--save", str(saved), str(path)]
    assert main(asked) == 2
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("4 sizes tried, 0 compared: no inputs: test_fuzzing.py:")
    result = json.loads(saved.read_text())
    assert (result["tried"], result["compared"], result["smallest"]) == (4, 0, None)
    assert sum(result["not_compared"].values()) == 4


def test_sizes_in_the_data_of_asserts_are_compared(
    frame: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exported program whose number of rows is in its data is run and compared."""
    del frame  # its planted backends

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            k = n.item()
            torch._check(k >= 2)
            torch._check(k <= x.shape[0])
            return x[:k] * 2

    dims = ({0: torch.export.Dim.DYNAMIC}, None)
    args = (torch.ones(9, 3), torch.tensor(4))
    gm = torch.export.export(Model(), args, dynamic_shapes=dims).graph_module
    fakes = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    tfk.capture(gm, fakes).save(tmp_path / "a.fkf")
    asked = ["fuzz", "--backend", "planted_right", "--runs", "12", str(tmp_path / "a.fkf")]
    assert main(asked) == 0
    assert capsys.readouterr().out.startswith("12 sizes tried, 12 compared, none fails\n")


def test_a_frame_without_dynamic_sizes_is_tried_as_recorded(
    frame: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report states that the frame has no other sizes."""
    del frame  # its planted backends
    torch._dynamo.reset()
    torch.compile(torch.sin, backend=tfk.record(tmp_path), dynamic=False)(torch.ones(3))
    (path,) = tmp_path.glob("*.fkf")
    assert main(["fuzz", "--backend", "planted_right", str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1 size tried, 1 compared, none fails",
        "the frame has no dynamic sizes: only the recorded one was tried",
        f"with planted_right, torch {torch.__version__.partition('+')[0]}, cpu",
        "differs here:",
        "  backend: eager recorded, planted_right here",
    ]


def test_the_report_counts_what_is_not_compared() -> None:
    """The reasons are counted, the most frequent first; a failure counts as compared."""
    report = FuzzReport({"s0": "x.size(0)"}, tried=9, compiler="with mine, cpu")
    report.not_compared.update({"eager raised E: a": 1, "eager raised E: b": 3})
    reasons = [
        "3 not compared: eager raised E: b", "1 not compared: eager raised E: a", "with mine, cpu",
    ]  # fmt: skip
    assert report.lines() == ["9 sizes tried, 5 compared, none fails", *reasons]
    smallest = SizeFailure({"s0": 3}, "wrong", "output 0: off")
    report = dataclasses.replace(report, smallest=smallest, failures=(smallest,))
    assert report.lines() == [
        "9 sizes tried, 5 compared, 1 fails",
        "smallest: x.size(0) = 3",
        "  wrong: output 0: off",
        *reasons,
    ]


def test_a_path_that_cannot_be_written_is_refused_before_anything_runs(
    frame: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the capture nor an existing file is overwritten."""
    monkeypatch.setattr("torch_fakeify.tools.fuzzing.fuzz", None)
    before = frame.read_bytes()
    for place in (tmp_path / "none" / "a.json", tmp_path, frame):
        assert main(["fuzz", "--save", str(place), str(frame)]) == 2
        assert str(place) in capsys.readouterr().err
    assert frame.read_bytes() == before
    existing = tmp_path / "kept.json"
    existing.write_text("{}")
    check_writable(existing)
    assert [p.name for p in tmp_path.iterdir()] == ["kept.json"]
    assert existing.read_text() == "{}"


@pytest.mark.parametrize(
    ("found", "expected", "text"),
    [
        (torch.ones(2), torch.ones(2), None),
        (torch.ones(2) + 1e-5, torch.ones(2), None),
        (torch.ones(2) * 1.01, torch.ones(2), "2 of 2 elements are off, by up to 0.01"),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]), None),
        (torch.ones(2), torch.tensor([1.0, torch.nan]), "other elements are infinite or NaN"),
        (torch.ones(2, 1), torch.ones(1, 2), "shape [2, 1], not [1, 2]"),
        (torch.ones(2).double(), torch.ones(2), "dtype torch.float64, not torch.float32"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "1 of 2 elements differ"),
        (torch.tensor([True]), torch.tensor([True]), None),
        (torch.zeros(0, 3), torch.zeros(0, 3), None),
        (torch.ones(2).to_sparse(), torch.ones(2).to_sparse(), None),
        (1, 1.0, "1, not 1.0"),
        (None, torch.ones(2), "nothing, where eager has a value"),
        (torch.ones(2), None, "a value, where eager has none"),
        (float("nan"), float("nan"), None),
        (None, None, None),
    ],
)
def test_results_are_compared_up_to_rounding(found: Any, expected: Any, text: str | None) -> None:
    """Tensors are compared by shape, dtype and elements, numbers by type and value."""
    mismatch = first_mismatch([found], [expected])
    assert mismatch == (None if text is None else f"result 0: {text}")


def test_results_have_names() -> None:
    """A mismatch has the name of its result where names are passed, else its number."""
    pair = [torch.ones(2), torch.ones(2)]
    other = [torch.ones(2), torch.zeros(2)]
    names = ["output 0", "input `x` after the call"]
    assert first_mismatch(pair, other, names) == f"{names[1]}: 2 of 2 elements are off, by up to 1"


# --- a real model ---------------------------------------------------------------------------------


@pytest.mark.sweep
def test_a_real_model_is_fuzzed(frame: Path) -> None:
    """Correct code has no finding; code that is wrong at some lengths is found and minified."""
    del frame  # its planted backends
    path = GOLDEN / "model_llama.fkf"
    right = fuzz(path, backend="planted_right", runs=6)
    assert (right.tried, right.failures) == (6, ())
    wrong = fuzz(path, backend="planted_wrong", runs=40)
    assert wrong.smallest is not None
    assert wrong.smallest.kind == "wrong"
    assert any(n % 8 and n > 10 for n in wrong.smallest.sizes.values())
