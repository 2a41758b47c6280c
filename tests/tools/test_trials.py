"""Trials of a frame: results are judged by eager mode in double precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from captured_frames import recorded_frame

import torch_fakeify as tfk
from torch_fakeify.tools.worker.replies import NotCompared, Passed, Wrong
from torch_fakeify.tools.worker.trials import run_trial

if TYPE_CHECKING:
    from pathlib import Path

# --- judging numbers ------------------------------------------------------------------------------


def tried(function: Any, other: Any, folder: Path, *args: Any) -> Any:
    """What a trial says of a backend, on the frame of a function."""
    frame = tfk.Capture.load(recorded_frame(folder, function, *args))
    return run_trial(frame, other, runs=True)


def cancelling(x: torch.Tensor) -> torch.Tensor:
    """Compute a sum whose rounding error is larger than itself."""
    return (x * 1e7 - x * 9999999.0).sum()


@pytest.mark.parametrize(("factor", "outcome"), [(1.0, Passed), (1000.0, Wrong)])
def test_double_precision_is_the_judge(tmp_path: Path, factor: float, outcome: Any) -> None:
    """Code that is nearer to double precision than eager is right, however far it is from eager."""

    def exact(gm: Any, _inputs: Any) -> Any:
        return lambda x: [(x.double().sum() * factor).float()]

    found = tried(cancelling, exact, tmp_path, torch.randn(64, 64))
    assert isinstance(found, outcome)
    assert found.stage == ("forward" if outcome is Wrong else "backward")


class _Halved(torch.autograd.Function):
    """The sine, with half of its derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.cos() / 2


@pytest.mark.parametrize(("function", "outcome"), [(_Halved.apply, Wrong), (torch.sin, Passed)])
def test_gradients_are_compared(tmp_path: Path, function: Any, outcome: Any) -> None:
    """A wrong derivative is found although the values are right."""
    x = torch.ones(8, requires_grad=True)
    other = lambda _gm, _inputs: lambda x: [function(x)]  # noqa: E731
    found = tried(lambda x: x.sin(), other, tmp_path, x)
    assert (type(found), found.stage) == (outcome, "backward")


def test_random_numbers_are_not_wrong(tmp_path: Path) -> None:
    """A frame that draws random numbers is not compared, since a compiler may draw other ones."""
    other = lambda gm, _inputs: lambda *args: [args[0] + 0.25]  # noqa: E731
    found = tried(lambda x: x + torch.rand_like(x), other, tmp_path, torch.zeros(8))
    assert found == NotCompared("eager draws random numbers")


def test_a_random_output_does_not_hide_a_wrong_one(tmp_path: Path) -> None:
    """Outputs that are not random are compared, although another output is random."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + torch.rand_like(x), x * 2

    def off(gm: Any, _inputs: Any) -> Any:
        return lambda x: [x + torch.rand_like(x), x * 3]

    found = tried(program, off, tmp_path, torch.ones(8))
    assert isinstance(found, Wrong)
    assert found.text.startswith("output 1: 8 of 8 elements are off")


def test_a_wrong_result_has_its_name(tmp_path: Path) -> None:
    """A changed input and a gradient are named after the input."""

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = (x * 2).sin()
        y.add_(1)
        return z

    def forgets(gm: Any, _inputs: Any) -> Any:
        return lambda x, _y: [(x * 2).sin()]

    def halves(gm: Any, _inputs: Any) -> Any:
        def call(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
            half = x / 2 + x.detach() / 2
            return gm(half, y)

        return call

    x, y = torch.ones(3, requires_grad=True), torch.ones(4)
    found = tried(program, forgets, tmp_path / "a", x, y)
    assert found.text == "input `y` after the call: 4 of 4 elements are off, by up to 1"
    found = tried(program, halves, tmp_path / "b", x, y)
    assert found.stage == "backward"
    assert found.text.startswith("gradient of `x`: 3 of 3 elements are off")
    more = lambda gm, _: lambda *args: [*gm(*args), 1]  # noqa: E731
    assert tried(program, more, tmp_path / "c", x, y).text == "2 results, not 1"


def test_a_frame_that_raises_in_eager_is_not_compared(tmp_path: Path) -> None:
    """The result has the reason; where eager has no gradient, the values are compared."""
    right = lambda gm, _: gm  # noqa: E731
    found = tried(torch.linalg.cholesky, right, tmp_path, torch.eye(3))
    assert isinstance(found, NotCompared)
    assert found.text.startswith("eager raised _LinAlgError: linalg.cholesky: ")
