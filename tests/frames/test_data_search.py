"""The search for data that satisfies a frame's runtime asserts, indices and unbacked symbols."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from captured_frames import recorded_frame
from test_size_names import recorded

import torch_fakeify as tfk
from torch_fakeify.frames.inputs.data_moves import changed

if TYPE_CHECKING:
    from pathlib import Path


Checks = Callable[[Any, torch.Tensor], tuple[Any, ...]]
"""What holds of a number and the first argument."""


def rows_by(number: Callable[[torch.Tensor], Any], checks: Checks) -> Callable[..., Any]:
    """Return a program that takes as many rows as a tensor tells."""

    def program(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        k = number(n)
        for holds in (*checks(k, x), k <= x.shape[0]):
            torch._check(holds)
        return x[:k] * 2

    return program


def found_by(find: Callable[..., torch.Tensor], checks: Checks) -> Callable[..., Any]:
    """Return a program that finds some number of rows."""

    def program(*args: torch.Tensor) -> torch.Tensor:
        found = find(*args)
        for holds in checks(found.shape[0], args[0]):
            torch._check(holds)
        return found * 2

    return program


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


def whole(*numbers: int) -> torch.Tensor:
    """A tensor of integers."""
    return torch.tensor(numbers)


_X = torch.ones(20, 3)


def batched(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    """Indices that are computed inside of a transform."""
    return torch.func.vmap(lambda row: F.embedding(row * 2 + 1, x).sum())(i)


CASES: dict[str, tuple[Any, ...]] = {
    "item": (rows_by(lambda n: (n + 0).item(), lambda k, _: (k >= 2,)), _X, torch.tensor(4)),
    "several": (several, _X, whole(4, 5, 1)),
    "parts": (parts, _X, whole(4, 5, 11)),
    "largest": (rows_by(lambda n: n.max().item(), lambda k, _: (k >= 5,)), _X, whole(4, 7, 1)),
    "total": (rows_by(lambda n: n.sum().item(), lambda k, _: (k >= 5,)), _X, whole(4, 7, 1)),
    "written": (  # the read does not depend on the write but for the tensor
        rows_by(lambda n: (n.add_(5), n.item())[1], lambda k, _: (k >= 9,)),
        _X,
        torch.tensor(6),
    ),
    "rounded": (
        rows_by(lambda s: int(s.item() * 10), lambda k, _: (k >= 12, k <= 15)),
        _X,
        torch.tensor(1.33),
    ),
    "one of a view": (
        rows_by(lambda n: n[2].item(), lambda k, _: (k >= 4,)),
        _X,
        torch.arange(40)[3:10],
    ),
    "positive": (
        found_by(lambda x: torch.nonzero(x > 0), lambda k, x: (k >= 3, k <= x.shape[0] // 2)),
        torch.linspace(-1, 1, 20),
    ),
    "masked": (
        found_by(torch.masked_select, lambda k, _: (k == 7,)),
        torch.ones(20),
        torch.arange(20) < 7,
    ),
    "repeated": (
        found_by(lambda x, n: x.repeat_interleave(n, 0), lambda k, _: (k >= 30,)),
        torch.ones(6, 3),
        whole(4, 7, 1, 9, 9, 9),
    ),
    "different": (found_by(torch.unique, lambda k, _: (k >= 4,)), torch.arange(10)),
    "above": (above, torch.ones(5), torch.tensor(5.0)),
    "two": (two, _X, torch.tensor(13), torch.tensor(7)),
    "asserted": (asserted, torch.ones(3), whole(5, 6, 7)),
    "steps": (steps, torch.ones(12, 3), whole(0, 3, 7, 12)),
    "chosen": (chosen, torch.eye(3), torch.eye(3)),
    "sorted in": (sorted_in, _X, whole(6)),
    "unset": (unset, torch.ones(9), torch.zeros(9, dtype=torch.bool)),
    # indices into a dim of one, and such as start somewhere else than at 0
    "looked up": (lambda w, n: F.embedding(n, w), torch.ones(1, 4), whole(0, 0, 0, 0, 0)),
    "gathered": (lambda x, n: x.gather(1, n), torch.ones(5, 1), whole(0, 0, 0, 0, 0)[:, None]),
    "shifted": (lambda x, n: x.index_select(0, n - 10), torch.ones(5, 3), torch.full((4,), 12)),
    "encoded": (lambda n: F.one_hot(n, 1), whole(0, 0, 0, 0, 0)),
    "batched": (batched, torch.ones(2, 3), torch.zeros(4, 2, dtype=torch.int64)),
}


def recorded_once(case: str, folder: Path) -> tfk.Capture:
    """Return the frame of a case, whose inputs may be written into."""
    function, *args = CASES[case]
    return recorded(function, folder, *(t.clone() for t in args))


def runs(frame: tfk.Capture, **options: Any) -> list[Any]:
    """Return eager's result on made-up inputs; it raises where an assert does not hold."""
    return list(frame.compile("eager")(*frame.materialize(**options)))


@pytest.mark.parametrize("case", CASES)
def test_made_up_data_satisfies_runtime_asserts(case: str, tmp_path: Path) -> None:
    """Eager mode runs on data that is made up with any seed."""
    frame = recorded_once(case, tmp_path)
    runs(frame)
    first, second = frame.materialize(seed=3), frame.materialize(seed=3)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    frame.compile("eager")(*second)


@pytest.mark.parametrize(
    ("case", "sizes", "rows"),
    [
        ("item", {"u0": 4}, 4),
        ("item", {"u0": 17, "x.size(0)": 17}, 17),
        ("largest", {"u0": 9}, 9),
        ("total", {"u0": 13}, 13),
        ("positive", {"u0": 7}, 7),
        ("positive", {"u0": 30}, 30),
        ("repeated", {"u0": 41}, 41),
        ("rounded", {"u0": 13}, 13),
        ("different", {"u0": 6}, 6),
        ("written", {"u0": 12}, 12),
    ],
)
def test_an_unbacked_symbol_can_be_set(
    case: str, sizes: dict[str, int], rows: int, tmp_path: Path
) -> None:
    """The graph reads the requested value from the data."""
    out = runs(recorded_once(case, tmp_path), sizes=sizes)
    assert out[0].shape[0] == rows


def test_several_symbols_of_one_tensor_can_be_set(tmp_path: Path) -> None:
    """Each symbol has its value, and so has one that is computed from them."""
    frame = recorded_once("several", tmp_path)
    made = [t for t in frame.materialize(sizes={"u0": 5, "u1": 6}) if isinstance(t, torch.Tensor)]
    assert [t.tolist() for t in made if t.shape == (3,)] == [[5, 6, 1]]


def test_sizes_and_data_are_consistent(tmp_path: Path) -> None:
    """Data is made for a requested size, and a size for requested data."""
    frame = recorded_once("several", tmp_path)
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
        recorded_once("item", tmp_path).materialize(sizes=sizes)
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


def test_elements_are_drawn_when_all_other_changes_are_taken() -> None:
    """What a search draws later does not depend on a tensor of which it took the first changes."""
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    changes = changed(torch.arange(100), [3], [1], generator)
    assert next(changes).tolist() == [3] * 100
    assert torch.equal(generator.get_state(), before)
    assert len(list(changes)) > 10
    assert not torch.equal(generator.get_state(), before)


def test_a_frame_that_reads_no_data_needs_no_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup in a table of more than two rows does not rebuild the frame."""

    def look_up(w: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return F.embedding(n.view(-1), w)

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
