"""What `diff` says of two frames: something where they differ, nothing where they do not."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from test_fingerprint import VARIANTS, renamed

import torch_fakeify as tfk
from torch_fakeify.cli import main
from torch_fakeify.diff import difference_lines, differences
from torch_fakeify.files import read_capture
from torch_fakeify.fingerprint import fingerprint

if TYPE_CHECKING:
    from torch_fakeify.desc_frame import CaptureDesc

GOLDEN = Path(__file__).parent / "golden" / "v1"
_TWO = torch.fx.symbolic_trace(lambda a, b: a + b)


@pytest.fixture(scope="module")
def frames() -> dict[str, CaptureDesc]:
    """The golden corpus."""
    return {path.stem: read_capture(path) for path in sorted(GOLDEN.glob("*.fkf"))}


def test_something_is_said_where_fingerprints_differ(frames: dict[str, CaptureDesc]) -> None:
    """Neighbours in the corpus are alike in much; each line is one line of printable text."""
    pairs = list(itertools.pairwise(frames.values()))
    assert len(pairs) > 200
    prints = {id(desc): fingerprint(desc) for desc in frames.values()}
    for a, b in pairs:
        found = differences(a, b)
        assert bool(found) == (prints[id(a)] != prints[id(b)])
        assert all(each.text and "\n" not in each.text for each in found)


def test_nothing_is_said_of_one_frame(frames: dict[str, CaptureDesc]) -> None:
    """Nor of the same one with other names for its symbols."""
    for desc in frames.values():
        assert differences(desc, desc) == []
    symbolic = [d for d in frames.values() if d.shape_env is not None and d.shape_env.symbols][:20]
    for desc in symbolic:
        assert desc.shape_env is not None
        symbols = [s.name for s in desc.shape_env.symbols]
        names = {n: f"{n[0]}{900 - i}" for i, n in enumerate(symbols)}
        try:
            other = renamed(desc, names)
        except KeyError:  # some facts are of symbols of another environment
            continue
        if fingerprint(other) == fingerprint(desc):
            assert differences(desc, other) == []


def test_every_property_of_an_input_is_told_in_words() -> None:
    """Of all pairs of inputs that differ in one thing, that is found, and no part of the record."""
    made = {name: tfk.capture(_TWO, make()).desc for name, make in VARIANTS.items()}
    untold = {
        (a, b)
        for a, b in itertools.permutations(made, 2)
        if {each.part for each in differences(made[a], made[b])} & {"record"}
        or not differences(made[a], made[b])
    }
    assert not untold


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

SAID = [
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
"""Of each compilation against the one before."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Path]]:
    """What `run` prints of the program, and its captures."""
    place = tmp_path_factory.mktemp("run")
    (place / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch_fakeify", "run", "--out", "out", "program.py"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=True)
    return done.stdout, sorted((place / "out").glob("*.fkf"))


def test_recompiles_are_told_in_the_words_of_the_program(run: tuple[str, list[Path]]) -> None:
    """Sizes by their inputs, guards by their lines, nodes by what they compute."""
    descs = [read_capture(path) for path in run[1]]
    said = [difference_lines(differences(a, b)) for a, b in itertools.pairwise(descs)]
    assert ["\n".join(lines) for lines in said] == SAID


def test_run_says_why_it_compiled_again(run: tuple[str, list[Path]]) -> None:
    """Each compilation of a function after the first is told against the one before."""
    text, paths = run
    for (a, b), said in zip(itertools.pairwise(paths), SAID, strict=True):
        lines = [f"{b.name} after {a.name}: A is the former, B the latter", *said.split("\n")]
        assert "\n  ".join(lines) in text


def test_the_command_has_a_status(run: tuple[str, list[Path]], capsys: Any) -> None:
    """0 for one frame, 1 for two, 2 for no capture."""
    first, second = map(str, run[1][:2])
    assert main(["diff", first, first]) == 0
    assert capsys.readouterr().out == "one frame\n"
    assert main(["diff", first, second]) == 1
    assert capsys.readouterr().out == SAID[0] + "\n"
    assert main(["diff", first, __file__]) == 2


def test_what_a_node_takes_is_told_once() -> None:
    """Another argument is a difference, what follows from one that was told is none."""

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
