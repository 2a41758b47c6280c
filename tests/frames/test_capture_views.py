"""A capture as a Python user looks at it: properties, ``print``, ``repr`` and HTML."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from captured_frames import only_capture_of
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torch_fakeify as tfk
from torch_fakeify.frames import captures as module
from torch_fakeify.records.frame import FailureDesc
from torch_fakeify.records.tensor import MetaStorageDesc, MetaTensorDesc
from torch_fakeify.serialization import capture_file

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def capture() -> tfk.Capture:
    """A frame with a dynamic size and a guard, whose backend failed."""

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 3 else x

    made = only_capture_of(scaled, torch.ones(4, 8), dynamic=True)
    return made.with_failure(ValueError("no <b>mul</b>\nat all"), backend="chip")


def test_the_parts_of_a_capture_have_names_of_the_program(capture: tfk.Capture) -> None:
    """Inputs, symbols and guards are named as in the program, with torch's names beside them."""
    symbol = capture.symbols[0]
    assert symbol.name == "x.size(0)"
    assert (symbol.hint, symbol.symbol[0]) == ("hint 4", "s")
    assert [i.name for i in capture.inputs if i.tensor is not None] == ["x"]
    (guard,) = [g for g in capture.guards if "3" in g.condition]
    assert (guard.condition, guard.expr) == ("x.size(0) > 3", f"{symbol.symbol} > 3")
    assert "test_capture_views.py" in guard.line
    assert repr(guard) == f"<guard x.size(0) > 3, from {guard.line}>"
    assert "mul = l_x_ * 2" in capture.code
    assert capture.backend == "chip"
    assert capture.failure is not None
    assert capture.failure.type == "builtins.ValueError"


def test_print_shows_code_inputs_symbols_guards_and_the_failure(capture: tfk.Capture) -> None:
    """The order is: what it is and how it ended, code, tables, the failure with its stack."""
    text = str(capture)
    parts = [
        "Capture of scaled: ", "failed: ValueError: no <b>mul</b>\n", "def scaled(", "inputs:",
        "symbols:", "guards:", "failure by chip",
    ]  # fmt: skip
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


def test_html_is_escaped_and_has_no_script(capture: tfk.Capture) -> None:
    """A text of the file is no markup; the rest of the frame is folded."""
    html = capture._repr_html_()
    assert "no &lt;b&gt;mul&lt;/b&gt;" in html
    assert set(re.findall(r"<(\w+)", html)) == {"table", "tr", "td", "pre", "details", "summary"}
    report = tfk.ReplayReport("reproduced", True, ("<script>alert(1)</script>\x1b[2J",))
    assert "<script" not in report._repr_html_()
    assert "\x1b" not in report._repr_html_()


def test_a_record_is_a_table_of_what_is_no_default() -> None:
    """Fields by name, with escaped texts of bounded length."""
    desc = tfk.describe_tensor(torch.ones(2, 3))
    html = desc._repr_html_()
    assert html.startswith("<table><tr><td>MetaTensorDesc</td><td></td></tr><tr><td>id</td>")
    assert "<tr><td>size</td><td>(2, 3)</td></tr>" in html
    assert "requires_grad" not in html
    failure = FailureDesc(type="a.B", message="<script>\x1b" + "x" * 10_000)
    html = failure._repr_html_()
    assert "&lt;script&gt;\\x1b" in html
    assert len(html) < 3000


def test_html_of_a_large_result_is_bounded() -> None:
    """A notebook gets the first thousand lines, and the number of the others."""
    html = tfk.ReplayReport("crashes", False, ("line",) * 5000)._repr_html_()
    assert html.count("\n") == 1000
    assert "... and 4001 more" in html


def test_the_record_is_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither ``desc`` nor ``repr`` nor a property encodes a file; ``save`` uses what `capture` encoded."""
    made = tfk.capture(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(2)])

    def encode(*_: Any) -> Any:
        raise AssertionError("encoded again")

    monkeypatch.setattr(capture_file, "WRITERS", dict.fromkeys(capture_file.WRITERS, encode))
    assert vars(made)["desc"] is made.desc
    assert repr(made) == "<Capture frame: 3 nodes, 1 input, 0 guards>"
    assert "relu" in str(made)
    made.save(tmp_path / "a.fkf")
    assert tfk.Capture.load(tmp_path / "a.fkf").path == tmp_path / "a.fkf"
    assert made.path is None
    assert not hasattr(module, "encode_with_short_paths")


def test_the_repr_of_a_record_has_no_defaults() -> None:
    """That of a small tensor fits a terminal; what is unusual is named."""
    record = tfk.describe_tensor(torch.ones(3, 4))
    assert len(repr(record)) <= 80
    assert re.fullmatch(
        r"MetaTensorDesc\(float32\[3, 4\], cpu, id=\d+, storage=\d+ of 48 bytes\)", repr(record)
    )
    other = tfk.describe_tensor(torch.ones(3, 4, requires_grad=True).t())
    assert "float32[4, 3], cpu" in repr(other)
    assert "stride=(1, 4)" in repr(other)
    assert "base=MetaTensorDesc(float32[3, 4], " in repr(other)
    assert "is_conj" not in repr(other)


def test_different_tensors_have_different_reprs() -> None:
    """Each field that is not its default is in the text."""
    plain: dict[str, Any] = {
        "id": 0, "dtype": "float32", "device": "cpu", "size": (2, 3), "stride": (3, 1),
    }  # fmt: skip
    changes: list[dict[str, Any]] = [
        {}, {"id": 1}, {"dtype": "int8"}, {"device": "cuda:0"}, {"size": (3, 2)}, {"stride": (1, 2)},
        {"storage": MetaStorageDesc(id=4, nbytes=24)}, {"storage": MetaStorageDesc(id=4, nbytes=25)},
        {"storage_offset": 1}, {"is_parameter": True}, {"base": MetaTensorDesc(**plain)},
    ]  # fmt: skip
    texts = [repr(MetaTensorDesc(**{**plain, **change})) for change in changes]
    assert len(set(texts)) == len(texts)


def test_no_repr_has_a_memory_address(capture: tfk.Capture, tmp_path: Path) -> None:
    """Objects that users hold have a text that is the same in each process."""
    capture.save(tmp_path / "a.fkf")
    mode = FakeTensorMode(shape_env=ShapeEnv())
    objects = [
        capture, tfk.Capture.load(tmp_path / "a.fkf"), capture.instantiate(), capture.inputs,
        capture.symbols, capture.guards, capture.failure, capture.desc, tfk.MetaTensorDescriber(),
        tfk.MetaConverter(mode), tfk.checkpoint(ShapeEnv()), tfk.Limits(),
        tfk.record(tmp_path / "captures"), tfk.handoff("eager"), tfk.diff(capture, capture),
        tfk.FuzzReport({}), tfk.report(capture, tmp_path / "a.html"),
    ]  # fmt: skip
    texts = [repr(each) for each in objects]
    assert [text for text in texts if re.search(r"0x[0-9a-f]{6}", text)] == []
