"""Other sizes that the guards admit, and what `fuzz` finds at them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from planting import plant

import torch_fakeify as tfk
from torch_fakeify.cli import main
from torch_fakeify.comparing import first_mismatch
from torch_fakeify.files import read_capture
from torch_fakeify.fuzz import FuzzReport, fuzz
from torch_fakeify.size_search import SizeSearch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

GOLDEN = Path(__file__).parent / "golden" / "v1"

BACKENDS = """
import os, signal, time


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
    """Sizes that are equal, one that is bounded below, one that is a multiple."""
    if x.shape[0] > 5:
        x = x + 1
    if x.shape[1] % 4 == 0:
        y = y.view(y.shape[0], -1, 4).sum(-1).sum(1, keepdim=True)
    return x * y.sum(1, keepdim=True)


def record(function: Callable[..., Any], folder: Path, *args: Any) -> Path:
    """The capture of a function's frame with dynamic sizes."""
    torch._dynamo.reset()
    torch.compile(function, backend=tfk.record(folder), dynamic=True)(*args)
    (path,) = folder.glob("*.fkf")
    return path


@pytest.fixture(scope="module")
def frame(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    """The program's capture, where planted backends can be found."""
    with pytest.MonkeyPatch.context() as patch:
        plant(tmp_path_factory.mktemp("planted"), BACKENDS, patch)
        folder = tmp_path_factory.mktemp("frame")
        yield record(program, folder, torch.ones(8, 12), torch.ones(8, 12))


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=[pytest.mark.sweep, pytest.mark.long])])
def test_sizes_satisfy_every_guard_of_torchs(every: int) -> None:
    """Over the golden corpus: what torch's own restored environment says of each choice."""
    tried = 0
    for path in sorted(GOLDEN.glob("*.fkf"))[::every]:
        desc = read_capture(path)
        if desc.shape_env is None:
            continue
        search = SizeSearch(desc)
        found = list(itertools.islice(search, 12)) if search.example else []
        env = tfk.restore(desc.shape_env) if found else None
        for sizes in found:
            values = {s: sizes.get(s.name) for s in env.backed_var_to_val}
            known = {s: n for s, n in values.items() if n is not None}
            for guard in env.guards:
                assert guard.expr.xreplace(known) != False, (path.stem, sizes)  # noqa: E712
            for symbol, expr in env.replacements.items():
                if not symbol.is_integer:
                    continue  # known floats are no sizes
                assert symbol.xreplace(known) - expr.xreplace(known) == 0
            for symbol, n in known.items():
                bounds = env.var_to_range[symbol]
                assert (bounds.lower.xreplace(known) <= n) != False, (path.stem, sizes)  # noqa: E712
                assert (n <= bounds.upper.xreplace(known)) != False, (path.stem, sizes)  # noqa: E712
            tried += 1
    assert tried > 100 // every


def test_sizes_are_where_code_is_likely_to_be_wrong(frame: Path) -> None:
    """The ends of ranges, what a guard names, primes and powers; equal sizes stay equal."""
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
    """One choice of sizes in about fifty satisfies these guards, and two are equations."""
    a, b, c = x.shape[0], y.shape[0], z.shape[0]
    if (a * b) % c == 5 and a // 3 == b // 5 and a * a > b + c * 2:
        return x.sum() + y.sum() + z.sum()
    return x.sum()


def test_sizes_that_few_guards_admit_are_found(tmp_path: Path) -> None:
    """The program takes the branch of the example at each, small and large."""
    path = record(hard, tmp_path, *(torch.ones(n) for n in (7, 10, 13)))
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


def run(frame: Path, backend: str, **options: Any) -> FuzzReport:
    """Fuzz the program's frame."""
    return fuzz(frame, read_capture(frame), backend=backend, **options)


@pytest.mark.parametrize(
    ("backend", "kind", "text", "rows"),
    [
        ("planted_wrong", "wrong", "result 0: 44 of 44 elements are off, by up to 1", 11),
        pytest.param(
            *("planted_short", "wrong", "result 0: shape [5, 4], not [6, 4]", 6),
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            *("planted_raises", "raises", "builtins.IndexError: no such lane", 101),
            marks=pytest.mark.sweep,
        ),
        pytest.param(*("planted_segfaults", "crashes", "SIGSEGV", 17), marks=pytest.mark.sweep),
    ],
)
def test_the_smallest_sizes_at_which_code_is_wrong(
    frame: Path, backend: str, kind: str, text: str, rows: int
) -> None:
    """Each planted bug is found, told as what it is, and made as small as it gets."""
    report = run(frame, backend)
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
    """It costs the time that a batch is given, once for each half of the batch."""
    report = run(frame, "planted_hangs", runs=18, timeout=4)
    assert {failure.kind for failure in report.failures} == {"hangs"}


def test_right_code_has_no_findings(frame: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor does one that eager mode refuses."""
    assert main(["fuzz", "--backend", "planted_right", "--runs", "8", str(frame)]) == 0
    assert capsys.readouterr().out == "8 sizes tried, none fails\n"
    assert main(["fuzz", "--backend", "planted_refuses", str(frame)]) == 2
    assert "the frame cannot be run" in capsys.readouterr().err
    assert main(["fuzz", "--backend", "planted_short", "--runs", "8", str(frame)]) == 1
    assert "smallest: x.size(0) = 6" in capsys.readouterr().out


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
        (float("nan"), float("nan"), None),
        (None, None, None),
    ],
)
def test_results_are_compared_but_for_rounding(found: Any, expected: Any, text: str | None) -> None:
    """Tensors by shape, dtype and elements, numbers by type and value."""
    said = first_mismatch([found], [expected])
    assert said == (None if text is None else f"result 0: {text}")


# --- a real model ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model_llama", "model_bert", "model_vit"])
def test_a_real_model_has_other_sizes(name: str) -> None:
    """Beside sizes it has floats that are known, which are no sizes."""
    search = SizeSearch(read_capture(GOLDEN / f"{name}.fkf"))
    found = list(itertools.islice(search, 8))
    assert len(found) == 8
    assert found[0].items() >= search.example.items()
    assert len({tuple(sizes[n] for n in search.example) for sizes in found}) == 8


def test_a_real_model_is_fuzzed(frame: Path) -> None:
    """Llama: what is right is found right, what is wrong at some lengths is found, and made small."""
    del frame  # its planted backends
    path = GOLDEN / "model_llama.fkf"
    desc = read_capture(path)
    right = fuzz(path, desc, backend="planted_right", runs=6)
    assert (right.tried, right.failures) == (6, [])
    wrong = fuzz(path, desc, backend="planted_wrong", runs=40)
    assert wrong.smallest is not None
    assert wrong.smallest.kind == "wrong"
    assert any(n % 8 and n > 10 for n in wrong.smallest.sizes.values())
