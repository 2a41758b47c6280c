"""Names of sizes, as the command line and Python accept them."""

from __future__ import annotations

import json
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from captured_frames import recorded_frame
from places import GOLDEN
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torch_fakeify as tfk
from torch_fakeify.cli import main
from torch_fakeify.frames.inputs.size_names import (
    parse_sizes,
    requested_sizes,
    size_names,
    sizes_text,
)
from torch_fakeify.frames.inputs.size_search import SizeSearch, choose_sizes
from torch_fakeify.records.shape_env import SymbolDesc
from torch_fakeify.records.tensor import SourceDesc
from torch_fakeify.serialization.capture_file import read_capture

if TYPE_CHECKING:
    from pathlib import Path


def recorded(function: Any, folder: Path, *args: Any) -> tfk.Capture:
    """Record the frame of a function with dynamic sizes."""
    options = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(options):
        path = recorded_frame(folder, function, *args, dynamic=True, fullgraph=True)
    return tfk.Capture.load(path)


def tied(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Assume twice as many rows in one input as in the other, and more than five."""
    if x.shape[0] == 2 * y.shape[0] and x.shape[0] > 5:
        return x.sum() + y.sum() * y.shape[1]
    return x.sum()


@pytest.fixture(scope="module")
def frame(tmp_path_factory: pytest.TempPathFactory) -> tfk.Capture:
    """The frame of `tied`."""
    return recorded(tied, tmp_path_factory.mktemp("tied"), torch.ones(8, 3), torch.ones(4, 5))


# --- text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("s77=3", {"s77": 3}),
        ("s77=3, s1 = 4", {"s77": 3, "s1": 4}),
        ("x.size(0)=17,u0=-3", {"x.size(0)": 17, "u0": -3}),
        ("L['x'].size()[0]=17", {"L['x'].size()[0]": 17}),
        ("L['a,b=c'].size()[1]=3,d[(1, 2)].size(0)=4", {"L['a,b=c'].size()[1]": 3, "d[(1, 2)].size(0)": 4}),
        ("""d["q,(["].size(0)=4,s=5""", {"""d["q,(["].size(0)""": 4, "s": 5}),
        ("s1=4,s1=4", {"s1": 4}),
    ],
)  # fmt: skip
def test_sizes_are_parsed(text: str, sizes: dict[str, int]) -> None:
    """A comma or an equals sign in brackets or quotes is part of a name."""
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "x=",
            "a size is not NAME=N; expected a name and an integer, as in x.size(0)=17; found x=",
        ),
        ("=3", "a size is not NAME=N"),
        ("x=2.5", "a size is not NAME=N"),
        ("x=1,", "a size is not NAME=N"),
        ("x=1,x=2", "x: a size has two values; found 1, 2"),
        ("none.json", "none.json: neither NAME=N nor a file of `fuzz --save`"),
        ("", "neither NAME=N nor a file"),
    ],
)
def test_text_that_is_no_sizes_is_refused(text: str, message: str) -> None:
    """Text that is no list of sizes is refused, and the error contains the wrong part."""
    with pytest.raises(tfk.CaptureError) as info:
        parse_sizes(text)
    assert message in str(info.value)


def test_the_file_of_fuzz_is_read(tmp_path: Path) -> None:
    """The sizes are those of its smallest failure; a file without a failure has its own error."""
    path = tmp_path / "a=b.json"
    path.write_text(json.dumps({"smallest": {"sizes": {"s77": 3}}}))
    assert parse_sizes(str(path)) == {"s77": 3}
    path.write_text(json.dumps({"smallest": None, "failures": []}))
    with pytest.raises(tfk.CaptureError, match="the file has no sizes that fail"):
        parse_sizes(str(path))


def test_the_command_line_refuses_text_that_is_no_size(capsys: pytest.CaptureFixture[str]) -> None:
    """Text that is no size is bad usage, found before anything runs."""
    with pytest.raises(SystemExit, match="2"):
        main(["minify", "--sizes", "x.size(0)=many", "none.fkf"])
    assert "a size is not NAME=N" in capsys.readouterr().err


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "y.size(0)",
        "y.shape[0]",
        "L['y'].size()[0]",
        "L['y'].shape[0]",
        "l_y_.size(0)",
        " y.size(0) ",
    ],
)
def test_a_size_has_many_names(frame: tfk.Capture, name: str) -> None:
    """Names of a size are torch's, the source, the placeholder, and what the tools print."""
    symbols = {str(each.expr) for each in requested_sizes(frame.desc, {name: 6})}
    assert symbols == {str(requested_sizes(frame.desc, {"y.size(0)": 6})[0].expr)}
    inputs = frame.materialize(sizes={name: 6})
    assert [t.shape for t in inputs if isinstance(t, torch.Tensor)] == [(12, 3), (6, 5)]


def test_sizes_are_written_as_they_are_read() -> None:
    """Each symbol of a frame is written by a name that means this symbol alone."""
    written = 0
    for path in sorted(GOLDEN.glob("*.fkf")):
        if path.stem.startswith("model_"):
            continue  # of many tensors
        desc = read_capture(path)
        sizes = {symbol.name: at for at, symbol in enumerate(desc.symbols, 2)}
        found = parse_sizes(sizes_text(desc, sizes)) if sizes else {}
        names = size_names(desc)
        assert {str(expr): n for word, n in found.items() for expr in names[word]} == sizes
        written += sum(word not in sizes for word in found)
    assert written > 100  # most by what the program calls them


@pytest.mark.parametrize(
    ("name", "word"),
    [("L['n']", "n"), ("L['a,b']", "L['a,b']"), ("L['s1']", "s0"), ("L['s0']", "s0")],
)
def test_a_name_that_means_more_is_not_written(name: str, word: str) -> None:
    """The name of another symbol means that one; a comma in quotes ends no name."""
    frame = tfk.capture(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(2)]).desc
    records = tuple(
        [
            SymbolDesc(name=symbol, sources=(SourceDesc(cls="LocalSource", name=source),))
            for symbol, source in (("s0", name), ("s1", "y"))
        ]
    )
    env = msgspec.structs.replace(tfk.snapshot(ShapeEnv()), symbols=records)
    desc = msgspec.structs.replace(frame, inputs=(), shape_env=env)
    assert sizes_text(desc, {"s0": 3}) == f"{word}=3"


def test_torchs_names_are_accepted(frame: tfk.Capture) -> None:
    """A symbol that was replaced by another is accepted too."""
    assert frame.desc.shape_env is not None
    for symbol in frame.desc.shape_env.symbols:
        value = choose_sizes(frame.desc, {}).sizes[symbol.name]
        assert choose_sizes(frame.desc, {symbol.name: value}).sizes[symbol.name] == value


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"nope": 3}, "the frame has no such symbol; expected one of s"),
        ({"x.size(9)": 3}, "the frame has no such symbol; expected one of s"),
        ({"y.size(0)": 2.5}, "y.size(0): a size is not an integer; found 2.5"),
        ({"y.size(0)": True}, "y.size(0): a size is not an integer; found True"),
        ({"y.size(0)": 6, "y.shape[0]": 7}, "y.shape[0]: a size has two values; found 6, 7"),
        ({"y.size(1)": 1}, "expected y.size(1) >= 2; found y.size(1)=1"),
        ({"y.size(1)": -4}, "expected y.size(1) >= 2; found y.size(1)=-4"),
        ({"x.size(0)": 7}, "expected x.size(0) = 2*y.size(0) = 7"),
        ({"x.size(0)": 8, "y.size(0)": 5}, "expected x.size(0) = 2*y.size(0) = 8; found y.size(0)=5"),
        ({"x.size(0)": 4}, "the sizes violate what the frame was compiled for; expected 2*y.size(0) > 5"),
    ],
)  # fmt: skip
def test_impossible_sizes_are_refused(
    frame: tfk.Capture, sizes: dict[str, Any], message: str
) -> None:
    """The error contains the name and the fact that is violated."""
    with pytest.raises(tfk.CaptureError) as info:
        frame.materialize(sizes=sizes)
    assert message in str(info.value)


def test_a_static_size_has_one_possible_value(tmp_path: Path) -> None:
    """A static size accepts the value that it has and refuses any other."""
    x = torch.ones(8, 3)
    torch._dynamo.mark_dynamic(x, 0)
    frame = tfk.Capture.load(recorded_frame(tmp_path, lambda x: x * 2, x))
    made = frame.materialize(sizes={"x.size(1)": 3, "x.size(0)": 5})
    assert made[-1].shape == (5, 3)
    with pytest.raises(tfk.CaptureError, match=r"x\.size\(1\): a size is the same at each call"):
        frame.materialize(sizes={"x.size(1)": 4})


def test_a_frame_without_symbols_takes_no_sizes() -> None:
    """The error explains how to record a frame that has symbols."""
    gm = torch.fx.symbolic_trace(lambda x: x)
    with pytest.raises(tfk.CaptureError, match="the frame has no symbols, so it takes no sizes"):
        tfk.capture(gm, [torch.ones(3)]).materialize(sizes={"x.size(0)": 3})


# --- what follows ---------------------------------------------------------------------------------


def test_sizes_that_guards_tie_are_changed_together(frame: tfk.Capture) -> None:
    """Sizes that a guard relates to a requested one follow it, and others stay as recorded."""
    names = {"x.size(0)": 40, "x.size(1)": 3, "y.size(0)": 20, "y.size(1)": 5}
    for name in ("x.size(0)", "y.size(0)"):
        sizes = choose_sizes(frame.desc, {name: names[name]}).sizes
        for other, value in names.items():
            (each,) = requested_sizes(frame.desc, {other: value})
            found = sizes.get(str(each.expr))
            assert found in (value, None), other
    x, y = (t for t in frame.materialize(sizes={"x.size(0)": 40}) if isinstance(t, torch.Tensor))
    assert (x.shape, y.shape) == ((40, 3), (20, 5))


def test_the_error_for_a_violated_guard_has_its_line(tmp_path: Path) -> None:
    """The error for a violated guard contains the line of the user's program."""

    def bounded(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 5:
            return x * 2
        return x

    frame = recorded(bounded, tmp_path, torch.ones(8, 3))
    with pytest.raises(tfk.CaptureError, match=r"test_size_names\.py:\d+: .*found x\.size\(0\)=4"):
        frame.materialize(sizes={"x.size(0)": 4})


def test_a_base_is_as_large_as_its_view(tmp_path: Path) -> None:
    """A base is made large enough for its view, although no guard relates the two sizes."""

    def add(v: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return v.add_(1) + b.sum()

    base = torch.ones(20, 3)
    frame = recorded(add, tmp_path, base[4:9], base)
    for sizes in ({"v.size(0)": 40}, {"b.size(0)": 5}, {"v.storage_offset()": 90}):
        view, whole = (t for t in frame.materialize(sizes=sizes) if isinstance(t, torch.Tensor))
        assert view._base is whole
        assert view.storage_offset() + view.numel() <= whole.numel(), sizes
    searched = list(islice(SizeSearch(frame.desc), 40))
    assert len(searched) == 40
    for sizes in searched:
        view, whole = (t for t in frame.materialize(sizes=sizes) if isinstance(t, torch.Tensor))
        assert view.storage_offset() + view.numel() <= whole.numel(), sizes
    with pytest.raises(tfk.CaptureError, match="`l_v_` lies inside its base"):
        frame.materialize(sizes={"v.size(0)": 40, "b.size(0)": 20})
