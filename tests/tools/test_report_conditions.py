"""The section of a report on conditions from data: of a frame that failed on one, and of one that is compiled."""

from __future__ import annotations

import re
import sys
from html import unescape
from typing import TYPE_CHECKING, Any

import pytest
import torch
from captured_frames import recorded_frame
from write_golden import ROOT

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


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


def recorded(folder: Path, backend: Any) -> Path:
    """Return the capture of the function, compiled with entailment by a backend that fails."""
    torch._dynamo.reset()
    with (
        tfk.recording(str(folder)) as frames,
        tfk.entailment(),
        torch._dynamo.config.patch(capture_scalar_outputs=True),
        pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="data-dependent"),
    ):
        torch.compile(tail, backend=backend, dynamic=True)(torch.ones(8, 2), torch.tensor([3]))
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
    written = tfk.report(recorded(tmp_path, branches))
    lines = [line for line in section(written.path).splitlines() if line]
    assert lines[:2] == ["Conditions from data", "It failed on a condition that does not follow: "]
    assert any(line.startswith("0 <= ") or line.endswith(" >= 0") for line in lines)
    at = lines.index("It would follow with:")
    assert re.match(r"torch\._check\(.+ \+ 2 <= .+\)", lines[at + 1])
    assert lines[at + 2] == "Copy"
    assert "Its negation would follow with:" in lines
    assert "Checked at run time, as the other facts do not give them:" in lines


def test_a_frame_that_is_compiled_has_what_is_left_to_run_time(tmp_path: Path) -> None:
    """What follows from other facts is apart; it is what ``show --unproved`` prints."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        path = recorded_frame(tmp_path, tail, torch.ones(8, 2), torch.tensor([3]), dynamic=True)
    text = section(tfk.report(path).path)
    opened, title, proved = text.partition(
        "Checked at run time, although they follow from the other facts:"
    )
    assert title
    assert "u0 <= x.shape[0]\n" in opened
    assert "u0 <= x.shape[0] + 1\n" in proved
    assert "It failed" not in text
    folder = tfk.report(tmp_path, tmp_path / "all.html").path.read_text(encoding="utf-8")
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
