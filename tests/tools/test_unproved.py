"""``show --unproved``: what is left to run time in a frame, and what failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
import torch
from captured_frames import recorded_frame

import torch_fakeify as tfk
from torch_fakeify.cli import main
from torch_fakeify.records.frame import FailureDesc
from torch_fakeify.serialization.capture_file import read_capture
from torch_fakeify.tools.unproved import unproved_of

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The capture of a frame with four runtime asserts, of which one follows from two others."""
    folder = tmp_path_factory.mktemp("unproved")

    def traced(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        a, b = n.tolist()
        torch._check(a >= 0)
        torch._check(a <= b)
        torch._check(b <= x.shape[0])
        torch._check(a <= x.shape[0])
        return x + a

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        return recorded_frame(folder, traced, torch.ones(8), torch.tensor([2, 3]), dynamic=True)


def test_what_follows_is_apart(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The asserts that do not follow come first, in the names of the inputs."""
    assert main(["show", "--unproved", str(recorded)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "Checked at run time, as the other facts do not give them:",
        "  0 <= u0",
        "  u0 <= u1",
        "  u1 <= x.shape[0]",
        "Checked at run time, although they follow from the other facts:",
        "  u0 <= x.shape[0]",
    ]


def test_a_frame_without_conditions_says_so() -> None:
    """There is always an answer."""
    capture = tfk.capture(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(2)])
    assert unproved_of(capture.desc).lines() == ["No condition is left to run time."]


def test_the_condition_that_failed_is_shown_with_what_is_known(recorded: Path) -> None:
    """The lines that entailment added to the message, or how to get them."""
    message = "Could not guard on data-dependent expression u0 <= 8 (unhinted: u0 <= s0).  (Size"
    desc = read_capture(str(recorded))
    failed = msgspec.structs.replace(desc, failure=FailureDesc(type="E", message=message))
    assert unproved_of(failed).lines()[:3] == [
        "It failed on a condition that does not follow:",
        "  u0 <= 8",
        "  Record it with TORCH_FAKEIFY_ENTAILMENT=1 to see what is known and which check would do",
    ]
    more = f"{message}\nWhat the facts say (torch_fakeify.entailment):\n  known: n >= 0\n\nMore"
    failed = msgspec.structs.replace(desc, failure=FailureDesc(type="E", message=more))
    assert unproved_of(failed).advice == ("known: n >= 0",)
