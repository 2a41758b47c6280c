"""What `diff` prints of two frames: their differences, and nothing where there are none."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec
import pytest
import torch
from frame_variants import VARIANTS, renamed
from places import GOLDEN
from processes import COMMAND, fresh

import torch_fakeify as tfk
from torch_fakeify.cli import main
from torch_fakeify.records.fingerprint import fingerprint
from torch_fakeify.records.frame import FailureDesc
from torch_fakeify.render import alignment
from torch_fakeify.render.diff import difference_lines, differences
from torch_fakeify.serialization.capture_file import read_capture

if TYPE_CHECKING:
    from pathlib import Path

    from torch_fakeify.records.frame import CaptureDesc

_TWO = torch.fx.symbolic_trace(lambda a, b: a + b)


@pytest.fixture(scope="module")
def frames() -> dict[str, CaptureDesc]:
    """Return the golden corpus."""
    return {path.stem: read_capture(path) for path in sorted(GOLDEN.glob("*.fkf"))}


def test_frames_with_different_fingerprints_have_differences(
    frames: dict[str, CaptureDesc],
) -> None:
    """Neighbours in the sorted corpus are compared; each line is one line of printable text."""
    pairs = list(itertools.pairwise(frames.values()))
    assert len(pairs) > 200
    prints = {id(desc): fingerprint(desc) for desc in frames.values()}
    for a, b in pairs:
        found = differences(a, b)
        assert bool(found) == (prints[id(a)] != prints[id(b)])
        assert all(each.text and "\n" not in each.text for each in found)


def test_a_frame_has_no_difference_from_itself(frames: dict[str, CaptureDesc]) -> None:
    """A frame has no difference from itself, nor from the same frame with renamed symbols."""
    for desc in frames.values():
        assert differences(desc, desc) == []
    symbolic = [d for d in frames.values() if d.shape_env is not None and d.shape_env.symbols][:20]
    for desc in symbolic:
        assert desc.shape_env is not None
        symbols = [s.name for s in desc.shape_env.symbols]
        names = {n: f"{n[0]}{900 - i}" for i, n in enumerate(symbols)}
        try:
            other = renamed(desc, names)
        except KeyError:  # some facts are about symbols of another environment
            continue
        if fingerprint(other) == fingerprint(desc):
            assert differences(desc, other) == []


def test_every_difference_of_an_input_has_a_name() -> None:
    """Inputs that differ in one property differ by that property, not by an unnamed part."""
    made = {name: tfk.capture(_TWO, make()).desc for name, make in VARIANTS.items()}
    unnamed = {
        (a, b)
        for a, b in itertools.permutations(made, 2)
        if {each.part for each in differences(made[a], made[b])} & {"record"}
        or not differences(made[a], made[b])
    }
    assert not unnamed


def test_one_object_at_two_sources_is_named(frames: dict[str, CaptureDesc]) -> None:
    """Where frames differ, the sources at which only one of them had one object are listed."""
    frame = frames["one_tensor_at_two_sources"]
    other = msgspec.structs.replace(frame, same_objects=(), frame="other", inputs=frame.inputs[:-1])
    found = [each.text for each in differences(frame, other) if each.part == "aliasing"]
    assert found == [
        "self.second and self.first are one object only in A",
        "y and x are one object only in A",
    ]


def test_another_backend_or_result_makes_no_other_frame(frames: dict[str, CaptureDesc]) -> None:
    """Both are named beside the differences of the frames."""
    recorded = frames["one_tensor_at_two_sources"]
    one = msgspec.structs.replace(recorded, backend="eager", state=None)
    failure = FailureDesc(type="builtins.ValueError", message="no")
    other = msgspec.structs.replace(one, backend="acme", failure=failure)
    found = tfk.diff(tfk.Capture(one), tfk.Capture(other))
    assert found.is_one_frame
    assert found.lines() == [
        "one frame",
        "compiled otherwise",
        "  backend: eager against acme",
        "  result: compiled against failed: ValueError",
    ]
    for a, b in ((other, other), (recorded, other)):  # nothing has compiled the second pair's first
        assert tfk.diff(tfk.Capture(a), tfk.Capture(b)).elsewhere == ()


PROGRAM = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4)])

    def forward(self, x, y, last):
        if x.size(0) > 5:
            x = x + 1
        z = self.layers[0](x) + y
        if last:
            z = z.relu()
        return z * 2

model = torch.compile(Model(), backend="eager")
model(torch.ones(3, 4), torch.ones(3, 4), False)
model(torch.ones(8, 4), torch.ones(8, 4), False)
model(torch.ones(4, 4), torch.ones(4, 4), False)
model(torch.ones(4, 4), torch.ones(4, 4), True)
with torch.no_grad():
    model(torch.ones(4, 4), torch.ones(4, 4), True)
"""

EXPECTED = [
    """inputs
  x.size(0): 3 against y.size(0) (8 here)
  y.size(0): 3 against dynamic (8 here)
guards
  x.size(0) > 5 only in B, from program.py:10 in forward: if x.size(0) > 5:
  x.size(0) == y.size(0) only in B, from program.py:12 in forward: z = self.layers[0](x) + y
graph
  x = x + 1 only in B, from program.py:11 in forward: x = x + 1""",
    """symbols
  the range of x.size(0): [6, int_oo] against [2, 5]
  the range of y.size(0): [6, int_oo] against [2, 5]
guards
  x.size(0) > 5 only in A, from program.py:10 in forward: if x.size(0) > 5:
  x.size(0) <= 5 only in B, from program.py:10 in forward: if x.size(0) > 5:
graph
  x = x + 1 only in A, from program.py:11 in forward: x = x + 1
examples
  x.size(0): 8 against 4
  y.size(0): 8 against 4""",
    """graph
  z_1 = z.relu() only in B, from program.py:14 in forward: z = z.relu()""",
    """modes
  grad_enabled: True against False""",
]
"""The differences of each compilation from the one before."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Path]]:
    """What `run` prints of the program, and its captures."""
    place = tmp_path_factory.mktemp("run")
    (place / "program.py").write_text(PROGRAM)
    done = fresh(*COMMAND, "run", "--out", "out", "program.py", cwd=place)
    return done.stdout, sorted((place / "out" / "program").glob("*.fkf"))


@pytest.mark.sweep
def test_recompiles_are_described_by_names_of_the_program(run: tuple[str, list[Path]]) -> None:
    """Sizes are named by inputs, guards by their lines, nodes by what they compute."""
    descs = [read_capture(path) for path in run[1]]
    texts = [difference_lines(differences(a, b)) for a, b in itertools.pairwise(descs)]
    assert ["\n".join(lines) for lines in texts] == EXPECTED


@pytest.mark.sweep
def test_run_prints_why_a_function_was_compiled_again(run: tuple[str, list[Path]]) -> None:
    """Each compilation after the first is compared with the one before."""
    text, paths = run
    for (a, b), expected in zip(itertools.pairwise(paths), EXPECTED, strict=True):
        lines = [f"{b.name} after {a.name}: A is the earlier, B the later", *expected.split("\n")]
        assert "\n  ".join(lines) in text


def test_diff_has_a_status(run: tuple[str, list[Path]], capsys: Any) -> None:
    """The status is 0 for one frame, 1 for two, and 2 for a file that is no capture."""
    first, second = map(str, run[1][:2])
    assert main(["diff", first, first]) == 0
    assert capsys.readouterr().out == "one frame\n"
    assert main(["diff", first, second]) == 1
    assert capsys.readouterr().out == EXPECTED[0] + "\n"
    assert main(["diff", first, __file__]) == 2


def test_a_changed_argument_is_one_difference() -> None:
    """Nodes that differ only because an input of theirs differs are not listed."""

    def lines(*functions: Any) -> list[str]:
        graphs = [torch.fx.symbolic_trace(f) for f in functions]
        example = [torch.ones(2), torch.ones(2)]
        descs = [tfk.capture(gm, example).desc for gm in graphs]
        return [each.text for each in differences(*descs)]

    swapped = lines(lambda a, b: (a - b).relu(), lambda a, b: (b - a).relu())
    assert swapped == ["sub = a - b only in A", "sub = b - a only in B"]
    inserted = lines(lambda a, b: a.relu() + b, lambda a, b: a.neg().relu() + b)
    assert inserted == ["neg = a.neg() only in B"]
    constant = lines(lambda a, b: (a + b) * 2, lambda a, b: (a + b) * 3)
    assert constant == ["mul = add * 2 only in A", "mul = add * 3 only in B"]


def chain(ops: list[str]) -> CaptureDesc:
    """Return the frame of methods that are called one after the other."""
    graph = torch.fx.Graph()
    out = graph.placeholder("x")
    for op in ops:
        out = graph.call_method(op, (out,))
    graph.output((out,))
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    return tfk.capture(gm, [torch.ones(2)]).desc


LAYER = ["sin", "cos", "relu", "tanh"]


def test_long_graphs_are_compared_in_full() -> None:
    """Of repeated layers exactly the differences are listed; a run of nodes is its first and a number."""
    ops = LAYER * 300
    moved = differences(chain(ops), chain(["relu", *ops[:602], *ops[603:]]))
    assert [each.text for each in moved] == [
        "relu = x.relu() only in B",
        "relu_150 = cos_150.relu() only in A",
    ]
    (found,) = differences(chain(ops), chain(["neg"] * 700 + ops))
    assert found.text == "neg = x.neg(), and 699 after it only in B"


def test_nodes_that_were_not_compared_are_counted() -> None:
    """Graphs with the same kinds of nodes in no common order are compared only in part."""
    kinds = [*LAYER, "neg", "exp", "abs", "sqrt"]
    ops = [[kinds[(i * i // k + i) % 8] for i in range(3000)] for k in (7, 11)]
    with mock.patch.object(alignment, "STEPS", 20_000):
        found = differences(*map(chain, ops))
    assert re.fullmatch(
        r"graph\n  these graphs have little in common: \d+ nodes of A and \d+ nodes of B"
        r" were not compared in detail",
        "\n".join(difference_lines(found)[:2]),
    )
