"""What happens to a frame below Dynamo: read from torch's log, and shown in a report."""

from __future__ import annotations

import json
import re
from html import unescape
from typing import TYPE_CHECKING

import pytest
from processes import COMMAND, fresh

from torch_fakeify.render.report.html import joined
from torch_fakeify.render.report.stages import Phase, Stage, Stages, stages_html
from torch_fakeify.tools.stages import _lines_of, _Log

if TYPE_CHECKING:
    from pathlib import Path

HEAD = "V1126 21:04:31.451000 16210 torch/_dynamo/utils.py:2350] "


def _event(event: dict[str, object], payload: str = "") -> str:
    return HEAD + json.dumps(event) + "\n" + "".join(f"\t{line}\n" for line in payload.splitlines())


def _phase(name: str, ph: str, seconds: float) -> str:
    found = {"name": name, "ph": ph, "ts": seconds * 1e6, "cat": "dynamo_timed"}
    return _event({"chromium_event": {}}, json.dumps(found, indent=0))


def _read(path: Path, text: str) -> _Log:
    path.write_text(text)
    log = _Log()
    log.read(path)
    return log


def test_stages_and_phases_are_read_from_a_log(tmp_path: Path) -> None:
    """Graphs and code have titles, with the direction that inductor compiles; phases are added up."""
    log = _read(
        tmp_path / "a.log",
        _event({"aot_joint_graph": {}}, "class A:\n    pass")
        + _phase("outer", "B", 1.0)
        + _phase("x.<locals>.fw_compiler_base", "B", 1.0)
        + _event({"inductor_output_code": {"filename": "f"}}, "code")
        + _phase("x.<locals>.fw_compiler_base", "E", 2.0)
        + _phase("x.<locals>.bw_compiler", "B", 2.0)
        + _event({"artifact": {"name": "inductor_post_grad_graph"}}, "graph")
        + _event({"artifact": {"name": "something else"}}, "text")
        + _phase("x.<locals>.bw_compiler", "E", 2.5)
        + _phase("outer", "E", 4.0),
    )
    assert log.stages == [
        Stage("AOTAutograd: joint graph", "class A:\n    pass\n"),
        Stage("Inductor: output code, forward", "code\n"),
        Stage("Inductor: graph after the post-grad passes, backward", "graph\n"),
    ]
    assert [*_lines_of(log.phases)] == [
        Phase("outer", 0, 1, 3.0),
        Phase("fw_compiler_base", 1, 1, 1.0),
        Phase("bw_compiler", 1, 1, 0.5),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no event\n",
        HEAD + "{not json\n",
        HEAD + "[1]\n",
        _event({"artifact": "a name"}),
        _event({"chromium_event": {}}, "[]"),
        _phase("an end without a beginning", "E", 1.0),
        "\ta payload without an event\n",
    ],
)
def test_other_lines_of_a_log_are_left_out(tmp_path: Path, text: str) -> None:
    """A process that was killed leaves half a log, and another torch has other events."""
    log = _read(tmp_path / "a.log", text)
    assert (log.stages, log.phases) == ([], {})


def test_texts_of_a_compiler_are_escaped() -> None:
    """A graph cannot put markup into the page."""
    poison = "</code><script>alert(1)</script>\x1b[31m"
    found = Stages((poison,), (Stage(poison, poison),), (Phase(poison, 0, 2, 1.0),))
    page = joined(stages_html(found))
    assert "<script" not in page
    assert "\x1b" not in page
    assert page.count("&lt;script&gt;") == 4


CHIP = """
from torch._dynamo.backends.common import aot_autograd


def inner(gm, inputs):
    raise NotImplementedError("no kernel <here>")


def compiler(gm, inputs):
    return aot_autograd(fw_compiler=inner)(gm, inputs)
"""
MODEL = """
import torch
import torch_fakeify as tfk


def loss(x, w):
    return torch.relu(x @ w).sum()


x, w = torch.ones(4, 5), torch.ones(5, 6, requires_grad=True)
torch.compile(loss, backend=tfk.record("frames", inner="eager"), dynamic=True)(x, w)
"""


def _text(page: Path) -> str:
    """Return the text of the section."""
    html = page.read_text()
    return unescape(re.sub("<[^>]+>", "\n", html[html.index('id="stages"') :]))


@pytest.mark.sweep
def test_a_report_has_the_stages_of_a_compilation(tmp_path: Path) -> None:
    """Forward and backward are compiled, whatever backend is on record; a failure has the stages before it."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "chip.py").write_text(CHIP)
    fresh("model.py", cwd=tmp_path)
    (frame,) = tmp_path.glob("frames/*.fkf")

    page = tmp_path / "page.html"
    report = (*COMMAND, "report", "--stages", "-o", page, frame, "--backend")
    done = fresh(*report, "inductor", cwd=tmp_path)
    assert done.stdout.startswith("compiles\n  with inductor, torch ")
    text = _text(page)
    for title in (
        "AOTAutograd: joint graph", "AOTAutograd: forward graph", "AOTAutograd: backward graph",
        "Inductor: graph after the post-grad passes, forward", "Inductor: output code, forward",
        "Inductor: graph after the post-grad passes, backward", "Inductor: output code, backward",
        "Compile time: ",
    ):  # fmt: skip
        assert text.count(f"\n{title}") == 1, title
    assert "return torch.relu(x @ w).sum()" in text
    assert "Original ATen: [aten.mm]" in text
    assert "aten.threshold_backward" in text

    done = fresh(*report, "chip:compiler", cwd=tmp_path)
    assert done.stdout.startswith("does not compile\n")
    text = _text(page)
    assert "no kernel <here>" in text
    assert "AOTAutograd: forward graph" in text
    assert "Inductor" not in text.partition("torch_fakeify 0")[0]
