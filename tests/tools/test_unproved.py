"""Conditions from data in a frame: in ``show --unproved``, and in the section of a report."""

from __future__ import annotations

import re
import sys
from html import unescape
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from captured_frames import recorded_frame
from write_golden import ROOT

import torch_fakeify as tfk
from torch_fakeify.cli import main
from torch_fakeify.records.frame import FailureDesc
from torch_fakeify.serialization.capture_file import read_capture
from torch_fakeify.tools.unproved import unproved_of

if TYPE_CHECKING:
    from collections.abc import Callable
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


# --- the section of a report ---


def branches(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Stand for a backend that branches on a number from data and a size."""
    items = [n for n in gm.graph.nodes if getattr(n.target, "__name__", n.target) == "item"]
    (number,) = [node.meta["example_value"] for node in items]
    (size,) = [
        node.meta["example_value"].shape[0]
        for node in gm.graph.find_nodes(op="placeholder")
        if getattr(node.meta["example_value"], "ndim", 0) == 2
    ]
    if 2 * number + 4 <= 2 * size:
        return gm.forward
    return gm.forward


def tail(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """Use a number from data, which is at most the size and, so, at most one more."""
    (length,) = n.tolist()
    torch._check(length >= 0)
    torch._check(length <= x.shape[0])
    torch._check(length <= x.shape[0] + 1)
    return x + length


def failed(folder: Path) -> Path:
    """Return the capture of the function, compiled with entailment by a backend that fails."""
    torch._dynamo.reset()
    with (
        tfk.recording(str(folder)) as frames,
        tfk.entailment(),
        torch._dynamo.config.patch(capture_scalar_outputs=True),
        pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="data-dependent"),
    ):
        torch.compile(tail, backend=branches, dynamic=True)(torch.ones(8, 2), torch.tensor([3]))
    (frame,) = frames
    assert frame.path is not None
    return frame.path


def section(page: Path) -> str:
    """Return the section of a page as text, a line for each element; empty if there is none."""
    text = page.read_text(encoding="utf-8")
    assert ('href="#from-data"' in text) == ('id="from-data"' in text)
    found = re.search(r'<section id="from-data".*?</section>', text, re.DOTALL)
    return "" if found is None else unescape(re.sub(r"<[^>]*>", "\n", found[0]))


def test_a_frame_that_failed_has_the_check_that_would_do(tmp_path: Path) -> None:
    """The condition, what is known with its lines, the checks to copy, and what is left to run time."""
    written = tfk.report(failed(tmp_path))
    lines = [line for line in section(written.path).splitlines() if line]
    assert lines[:2] == ["Conditions from data", "It failed on a condition that does not follow: "]
    assert any(line.startswith("0 <= ") or line.endswith(" >= 0") for line in lines)
    at = lines.index("It would follow with:")
    assert re.match(r"torch\._check\(.+ \+ 2 <= .+\)", lines[at + 1])
    assert lines[at + 2] == "Copy"
    assert "Its negation would follow with:" in lines
    assert "Checked at run time, as the other facts do not give them:" in lines


def test_a_frame_that_is_compiled_has_what_is_left_to_run_time(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What follows from other facts is apart; it is what ``show --unproved`` prints."""
    assert main(["show", "--unproved", str(recorded)]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "Checked at run time, as the other facts do not give them:",
        "0 <= u0",
        "u0 <= u1",
        "u1 <= x.shape[0]",
        "Checked at run time, although they follow from the other facts:",
        "u0 <= x.shape[0]",
    ]
    text = section(tfk.report(recorded, tmp_path / "one.html").path)
    assert [line for line in map(str.strip, text.splitlines()) if line in lines] == lines
    assert "It failed" not in text
    folder = tfk.report(recorded.parent, tmp_path / "all.html").path.read_text(encoding="utf-8")
    assert 'id="f0-from-data"' in folder


def test_a_frame_without_such_conditions_has_no_section(tmp_path: Path) -> None:
    """There is no empty section, and no link to one."""
    capture = tfk.capture(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(2)])
    assert section(tfk.report(capture, tmp_path / "frame.html").path) == ""
    failed = tfk.report(ROOT / "program_failed.fkf", tmp_path / "failed.html").path
    assert section(failed) == ""


def test_without_torch_the_page_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page is written, and has the reason why it was not found out what follows."""
    monkeypatch.setitem(sys.modules, "torch_fakeify.tools.unproved", None)
    page = tfk.report(ROOT / "program_tolist.fkf", tmp_path / "a.html").path
    assert "Which runtime asserts follow from the other facts was not found out" in section(page)
