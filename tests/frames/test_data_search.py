"""The search for data that satisfies a frame's runtime asserts, indices and unbacked symbols."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from captured_frames import recorded_frame
from test_size_names import recorded

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def item(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """A number that is derived from one in an input."""
    k = (n + 0).item()
    torch._check(k >= 2)
    torch._check(k <= x.shape[0])
    return x[:k] * 2


def several(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """Three numbers of one tensor, each with bounds of its own."""
    a, b, c = n.tolist()
    torch._check(a >= 2)
    torch._check(b >= 3)
    torch._check(c == 1)
    torch._check(a + b <= x.shape[0])
    return x[:a].sum() + x[a : a + b].sum() + torch.zeros(c)


def parts(x: torch.Tensor, n: torch.Tensor) -> list[torch.Tensor]:
    """Numbers whose sum is a size."""
    lengths = n.tolist()
    for length in lengths:
        torch._check(length >= 1)
    torch._check(sum(lengths) == x.shape[0])
    return [part.sum() for part in x.split(lengths)]


def largest(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """The largest of some numbers."""
    k = n.max().item()
    torch._check(k >= 5)
    torch._check(k < x.shape[0])
    return x[:k] + 1


def total(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """The sum of some numbers."""
    k = n.sum().item()
    torch._check(k >= 5)
    torch._check(k < x.shape[0])
    return x[:k] + 1


def positive(x: torch.Tensor) -> torch.Tensor:
    """How many elements are positive."""
    found = torch.nonzero(x > 0)
    torch._check(found.shape[0] >= 3)
    torch._check(found.shape[0] <= x.shape[0] // 2)
    return found * 2


def masked(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """How many flags are set."""
    found = torch.masked_select(x, m)
    torch._check(found.shape[0] == 7)
    return found * 2


def repeated(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """How many rows are made of some."""
    found = x.repeat_interleave(n, 0)
    torch._check(found.shape[0] >= 30)
    return found * 2


def rounded(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """An integer of a float."""
    k = int(s.item() * 10)
    torch._check(k >= 12)
    torch._check(k <= 15)
    return x[:k]


def above(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """A float with a bound."""
    v = s.item()
    torch._check(v > 3.5)
    return x * v


def two(x: torch.Tensor, n: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """Numbers of two inputs whose sum is a size."""
    a, b = n.item(), m.item()
    torch._check(a >= 0)
    torch._check(b >= 0)
    torch._check(a + b == x.shape[0])
    p, q = x.split([a, b])
    return p.sum() + q.sum()


def different(x: torch.Tensor) -> torch.Tensor:
    """How many elements are different."""
    found = torch.unique(x)
    torch._check(found.shape[0] >= 4)
    return found + 1


def written(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """A number that is read after something was added to it in place."""
    n.add_(5)
    k = n.item()
    torch._check(k >= 9)
    torch._check(k <= x.shape[0])
    return x[:k] * 2


def asserted(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """An assert on a tensor whose numbers no symbol represents."""
    torch._assert_async((n > 3).all())
    return x + n.sum()


def unset(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """An assert on flags."""
    torch._assert_async(~m.any())
    return torch.where(m, x, x + 1)


def steps(x: torch.Tensor, offsets: torch.Tensor) -> list[torch.Tensor]:
    """Differences of numbers that follow one another."""
    lengths = offsets.diff().tolist()
    for length in lengths:
        torch._check(length >= 2)
    torch._check(sum(lengths) == x.shape[0])
    return [part.sum() for part in x.split(lengths)]


def one_of_a_view(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """One element of a part of a tensor."""
    k = n[2].item()
    torch._check(k >= 4)
    torch._check(k <= x.shape[0])
    return x[:k]


def chosen(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """How many rows have their largest product in one column."""
    rows = torch.nonzero((x @ w).softmax(-1).argmax(-1) == 0).squeeze(-1)
    torch._check(rows.shape[0] >= 1)
    return x[rows].sum(0)


def sorted_in(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """The bucket of a number: it is the same for many."""
    b = torch.bucketize(n, torch.tensor([1, 5, 9])).max().item()
    torch._check(b == 2)
    return x * b


def looked_up(w: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """Indices into a dim of one."""
    return torch.nn.functional.embedding(n, w)


def gathered(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """Indices along a dim of one."""
    return x.gather(1, n)


def shifted(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """Indices that start somewhere else than at 0."""
    return x.index_select(0, n - 10)


def encoded(n: torch.Tensor) -> torch.Tensor:
    """The only class."""
    return torch.nn.functional.one_hot(n, 1)


def whole(*numbers: int) -> torch.Tensor:
    """A tensor of integers."""
    return torch.tensor(numbers)


_X = torch.ones(20, 3)


def batched(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    """Indices that are computed inside of a transform."""
    return torch.func.vmap(lambda row: torch.nn.functional.embedding(row * 2 + 1, x).sum())(i)


CASES: dict[Any, tuple[Any, ...]] = {
    item: (_X, torch.tensor(4)),
    several: (_X, whole(4, 5, 1)),
    parts: (_X, whole(4, 5, 11)),
    largest: (_X, whole(4, 7, 1)),
    total: (_X, whole(4, 7, 1)),
    positive: (torch.linspace(-1, 1, 20),),
    masked: (torch.ones(20), torch.arange(20) < 7),
    repeated: (torch.ones(6, 3), whole(4, 7, 1, 9, 9, 9)),
    rounded: (_X, torch.tensor(1.33)),
    above: (torch.ones(5), torch.tensor(5.0)),
    two: (_X, torch.tensor(13), torch.tensor(7)),
    different: (torch.arange(10),),
    written: (_X, torch.tensor(6)),
    asserted: (torch.ones(3), whole(5, 6, 7)),
    steps: (torch.ones(12, 3), whole(0, 3, 7, 12)),
    one_of_a_view: (_X, torch.arange(40)[3:10]),
    chosen: (torch.eye(3), torch.eye(3)),
    sorted_in: (_X, whole(6)),
    unset: (torch.ones(9), torch.zeros(9, dtype=torch.bool)),
    looked_up: (torch.ones(1, 4), torch.zeros(5, dtype=torch.int64)),
    gathered: (torch.ones(5, 1), torch.zeros(5, 1, dtype=torch.int64)),
    shifted: (torch.ones(5, 3), torch.full((4,), 12)),
    encoded: (torch.zeros(5, dtype=torch.int64),),
    batched: (torch.ones(2, 3), torch.zeros(4, 2, dtype=torch.int64)),
}


def recorded_once(function: Any, folder: Path) -> tfk.Capture:
    """Return the frame of a case, whose inputs may be written into."""
    return recorded(function, folder, *(t.clone() for t in CASES[function]))


def runs(frame: tfk.Capture, **options: Any) -> list[Any]:
    """Return eager's result on made-up inputs; it raises where an assert does not hold."""
    return list(frame.compile("eager")(*frame.materialize(**options)))


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_made_up_data_satisfies_runtime_asserts(
    function: Callable[..., Any], tmp_path: Path
) -> None:
    """Eager mode runs on data that is made up with any seed."""
    frame = recorded_once(function, tmp_path)
    runs(frame)
    first, second = frame.materialize(seed=3), frame.materialize(seed=3)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    frame.compile("eager")(*second)


@pytest.mark.parametrize(
    ("function", "sizes", "rows"),
    [
        (item, {"u0": 4}, 4),
        (item, {"u0": 17, "x.size(0)": 17}, 17),
        (largest, {"u0": 9}, 9),
        (total, {"u0": 13}, 13),
        (positive, {"u0": 7}, 7),
        (positive, {"u0": 30}, 30),
        (repeated, {"u0": 41}, 41),
        (rounded, {"u0": 13}, 13),
        (different, {"u0": 6}, 6),
        (written, {"u0": 12}, 12),
    ],
)
def test_an_unbacked_symbol_can_be_set(
    function: Callable[..., Any], sizes: dict[str, int], rows: int, tmp_path: Path
) -> None:
    """The graph reads the requested value from the data."""
    out = runs(recorded_once(function, tmp_path), sizes=sizes)
    assert out[0].shape[0] == rows


def test_several_symbols_of_one_tensor_can_be_set(tmp_path: Path) -> None:
    """Each symbol has its value, and so has one that is computed from them."""
    frame = recorded_once(several, tmp_path)
    made = [t for t in frame.materialize(sizes={"u0": 5, "u1": 6}) if isinstance(t, torch.Tensor)]
    assert [t.tolist() for t in made if t.shape == (3,)] == [[5, 6, 1]]


def test_sizes_and_data_are_consistent(tmp_path: Path) -> None:
    """Data is made for a requested size, and a size for requested data."""
    frame = recorded_once(several, tmp_path)
    x, n = (t for t in frame.materialize(sizes={"x.size(0)": 5}) if isinstance(t, torch.Tensor))
    if x.ndim == 1:
        x, n = n, x
    assert (x.shape[0], n.tolist()) == (5, [2, 3, 1])
    made = frame.materialize(sizes={"u0": 30})
    assert max(t.shape[0] for t in made if isinstance(t, torch.Tensor)) >= 33


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"u0": 1}, "expected u0 >= 2; found u0=1"),
        ({"u0": 4, "x.size(0)": 3}, "expected u0 <= x.size(0); found x.size(0)=3, u0=4"),
        ({"u1": 4}, "the frame has no such symbol; expected one of"),
    ],
)
def test_values_that_violate_asserts_are_refused(
    sizes: dict[str, int], message: str, tmp_path: Path
) -> None:
    """Values that violate an assert are refused, and the error contains the user's line."""
    with pytest.raises(tfk.CaptureError) as info:
        recorded_once(item, tmp_path).materialize(sizes=sizes)
    assert message in str(info.value)
    assert "u1" in sizes or "test_data_search.py:" in str(info.value)


def test_data_that_cannot_be_found_is_an_error(tmp_path: Path) -> None:
    """The error contains the assert, the user's line and what was found."""

    def odd(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        k = (n * 2).item()
        torch._check(k >= 3)
        torch._check(k % 2 == 1)
        return x * k

    (tmp_path / "frame").mkdir()
    with pytest.raises(RuntimeError, match="Runtime assertion failed"):
        recorded(odd, tmp_path, torch.ones(4), torch.tensor(4))
    frame = tfk.Capture.load(next(tmp_path.glob("*.fkf")))
    with pytest.raises(
        tfk.CaptureError, match=r"test_data_search\.py:\d+ in odd: .*u0 % 2 == 1; found u0 = "
    ):
        frame.materialize()
    with pytest.raises(tfk.CaptureError, match="with which u0 = 5"):
        frame.materialize(sizes={"u0": 5})


def test_the_asserts_of_an_exported_program_are_satisfied(tmp_path: Path) -> None:
    """The numbers of an exported program have no source, and its asserts are in the graph."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            k = n.item()
            torch._check(k >= 2)
            torch._check(k <= x.shape[0])
            return x[:k] * 2

    dims = ({0: torch.export.Dim.DYNAMIC}, None)
    program = torch.export.export(Model(), (_X, torch.tensor(4)), dynamic_shapes=dims)
    gm = program.graph_module
    fakes = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    path = tmp_path / "frame.fkf"
    tfk.capture(gm, fakes).save(path)
    frame = tfk.Capture.load(path)
    x, n = frame.materialize(sizes={"x.size(0)": 9})
    assert 2 <= n.item() <= 9 == x.shape[0]
    assert frame.materialize(sizes={"u0": 4})[1].item() == 4


def test_a_frame_that_reads_no_data_needs_no_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup in a table of more than two rows does not rebuild the frame."""

    def look_up(w: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(n.view(-1), w)

    frame = recorded(look_up, tmp_path, torch.ones(9, 4), torch.ones(5, 2, dtype=torch.int64))
    monkeypatch.setattr(tfk.Capture, "instantiate", None)
    assert len(frame.materialize()) >= 2


def test_sizes_of_inputs_without_hints_satisfy_asserts(tmp_path: Path) -> None:
    """A dim of `mark_unbacked` gets a size for which its runtime asserts hold."""

    def f(x: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] >= 5)
        torch._check(x.shape[0] % 4 == 1)
        return x * 2

    x = torch.ones(9, 3)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    frame = tfk.Capture.load(recorded_frame(tmp_path, f, x, fullgraph=True))
    (made,) = (t for t in frame.materialize() if isinstance(t, torch.Tensor))
    assert made.shape[0] >= 5
    assert made.shape[0] % 4 == 1
    sized = frame.materialize(sizes={"x.size(0)": 13})
    assert [t.shape[0] for t in sized if isinstance(t, torch.Tensor)] == [13]
