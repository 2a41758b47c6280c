"""The node at which a backend failed is found in its message, and no other one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from captured_frames import only_capture_of
from msgspec.structs import replace
from torch import nn

from torch_fakeify.records.frame import CaptureDesc, FailureDesc
from torch_fakeify.render.data_dependent import KnownOf
from torch_fakeify.render.failing_nodes import failing_lines, failing_stacks, find_failing_nodes
from torch_fakeify.render.nested_graphs import all_graphs
from torch_fakeify.render.readable_names import readable_frame
from torch_fakeify.render.summary import summary_lines


class Block(nn.Module):
    """Two layers, with the same activation twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of two activations."""
        y = torch.relu(self.first(x))
        z = torch.relu(self.second(y)) + nn.functional.gelu(y)
        return torch.cumsum(z, 0)


@pytest.fixture(scope="module")
def frame() -> CaptureDesc:
    """A frame of `Block`, compiled by Dynamo."""
    return only_capture_of(Block(), torch.ones(2, 4)).desc


def failed(frame: CaptureDesc, message: str) -> CaptureDesc:
    """Return the frame with a failure."""
    return replace(frame, failure=FailureDesc(type="builtins.ValueError", message=message))


def found(frame: CaptureDesc, message: str) -> list[str]:
    """Return the names of the failing nodes."""
    nodes = find_failing_nodes(failed(frame, message))
    graphs = all_graphs(frame.graph)
    return [graphs[n.graph].graph.nodes[n.position].name for n in nodes.nodes] if nodes else []


def line_of(frame: CaptureDesc, name: str) -> int:
    """Return the user's line of a node."""
    node = next(n for n in frame.graph.nodes if n.name == name)
    assert node.stack is not None
    return node.stack.frames[-1].line


def names(frame: CaptureDesc) -> list[str]:
    """Return the operations of the frame: the activations are ``y``, ``relu_1`` and ``gelu``."""
    found = [n.name for n in frame.graph.nodes if n.op == "call_function"]
    assert found == ["linear", "y", "linear_1", "relu_1", "gelu", "z", "cumsum"]
    return found


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("cannot compile %relu_1", ["relu_1"]),
        ("cannot compile node z", ["z"]),
        ("no kernel for 'linear_1'", ["linear_1"]),
        ("linear_1 and linear do not fit", ["linear_1"]),  # the second may be a word
        ("While executing %z : [num_users=1] = call_function[target=operator.add](args = (%relu_1, %gelu))",
         ["z"]),
        # A node of another graph, which has the same name.
        ("While executing %relu_1 : [num_users=1] = call_function[target=torch.ops.aten.mm.default](args = (%z,))",
         []),
        ("no lowering for torch.cumsum", ["cumsum"]),
        ("missing operator: 'gelu'", ["gelu"]),
        ("the chip has no code for cumsum", ["cumsum"]),
        ("the chip has no cumsum", ["cumsum"]),
        ("Unsupported: gelu", ["gelu"]),
        ("cannot lower cumsum to the chip", ["cumsum"]),
        ("gelu and cumsum are slow", []),
        ("target: aten.gelu.default\n  args[0]: TensorBox(mul_1)", []),  # not torch's own name of it here
        ("no lowering for torch.relu", []),  # which of them?
        ("the input is wrong", []),
        ("z y x", []),
        ("", []),
    ],
)  # fmt: skip
def test_a_message_names_a_node(message: str, expected: list[str], frame: CaptureDesc) -> None:
    """By its name, or by an operator that is called once; words of English are no names."""
    names(frame)
    assert found(frame, message) == expected


def test_a_line_of_the_message_counts_more_than_a_name(frame: CaptureDesc) -> None:
    """The lines of a graph that a backend made of this one are the user's, its names may be others."""
    place = f'File "/elsewhere/{__file__}", line {line_of(frame, "z")}, in forward'
    assert found(frame, place) == ["linear_1", "relu_1", "gelu", "z"]
    assert found(frame, f"{place}\n no lowering for aten.gelu.default") == ["gelu"]
    assert found(frame, f"cannot lower linear {place}") == ["linear_1"]
    assert found(frame, f"cannot lower %cumsum {place}") == ["linear_1", "relu_1", "gelu", "z"]
    assert found(frame, f"cannot lower node y at {__file__}:{line_of(frame, 'y')}") == ["y"]
    other = f'File "other.py", line {line_of(frame, "z")}, in forward'
    assert found(frame, other) == []


def test_the_node_is_shown_with_its_line(frame: CaptureDesc) -> None:
    """``show`` says which node it is, how it is known, and where the user wrote it."""
    desc = failed(frame, "cannot compile node cumsum")
    (line,) = failing_lines(desc, readable_frame(desc))
    place = (
        f"test_failing_nodes.py:{line_of(frame, 'cumsum')} in forward: return torch.cumsum(z, 0)"
    )
    assert line == f"cumsum = torch.cumsum(z, 0)  (named in the message; {place})"
    rows = "\n".join(summary_lines(desc))
    assert f"at node  {line}" in rows
    assert failing_lines(frame, frame) == []


def test_each_failing_node_has_its_stack(frame: CaptureDesc) -> None:
    """No message, no stack."""

    def lines(message: str) -> list[int]:
        stacks = failing_stacks(failed(frame, message))
        return [stack.frames[-1].line for stack in stacks if stack is not None]

    both = "nodes %relu_1 and %cumsum do not fit"
    assert lines(both) == [line_of(frame, "relu_1"), line_of(frame, "cumsum")]
    assert lines("no code for node cumsum") == [line_of(frame, "cumsum")]
    assert lines("the input is wrong") == []
    assert failing_stacks(frame) == []


def test_a_message_of_any_length_is_read(frame: CaptureDesc) -> None:
    """A message of megabytes takes no longer than its ends, which are read."""
    assert found(frame, "node cumsum" + " x" * 10**6) == ["cumsum"]
    assert found(frame, "x " * 10**6 + "node cumsum") == ["cumsum"]
    assert found(frame, "\n".join(f'File "f{i}.py", line {i}' for i in range(10**5))) == []


def test_the_lines_of_known_facts_are_not_where_it_failed(frame: CaptureDesc) -> None:
    """Of a data-dependent error the facts have lines of the program, too."""
    place = f"{Path(__file__).name}:{line_of(frame, 'z')}"
    known = KnownOf(known=(f"n >= 0  # {place}",), checks=(f"torch._check(n <= 8)  # at {place}",))
    message = "Could not guard on data-dependent expression n <= 8"
    assert found(frame, f"{message}\n  {place}") != []
    assert found(frame, f"{message}\n{known.text()}\n") == []
