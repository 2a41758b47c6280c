"""The data from which a page draws the picture of a graph."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from report_pages import large_capture
from write_golden import ROOT

from torch_fakeify.records.graph import NodeDesc
from torch_fakeify.records.tensor import ListValue, NodeValue
from torch_fakeify.render.nested_graphs import NodeAt, all_graphs, used_nodes
from torch_fakeify.render.report.graph import picture_data
from torch_fakeify.serialization.capture_file import read_capture

if TYPE_CHECKING:
    from torch_fakeify.records.graph import GraphModuleDesc

NAMES = sorted(path.stem for path in ROOT.glob("*.fkf"))


def positions(parts: list[Any]) -> list[int]:
    """Return the nodes of an outline in order."""
    return [at for part in parts for at in (positions(part[2]) if len(part) == 3 else part[1])]


def data_of(graph: GraphModuleDesc, hidden: set[int], most: int = 10**6) -> dict[str, Any]:
    """Return the data as the script of the page reads it."""
    data = picture_data(all_graphs(graph), hidden=hidden, failing=[NodeAt(0, 1)], most=most)
    return json.loads(json.dumps(data))


@pytest.mark.parametrize("part", range(2))
def test_every_operation_is_drawn_once_with_what_it_uses(part: int) -> None:
    """A picture has the operations in order, and an edge for each drawn node that one uses."""
    for name in NAMES[part::2]:
        graph = read_capture(ROOT / f"{name}.fkf").graph
        inputs = [at for at, n in enumerate(graph.nodes) if n.op == "placeholder"]
        hidden = set(inputs[::2])
        data = data_of(graph, hidden)
        for number, (each, drawn) in enumerate(zip(all_graphs(graph), data["graphs"], strict=True)):
            nodes = each.graph.nodes
            shown = {
                at for at, n in enumerate(nodes)
                if n.op != "get_attr" and not (number == 0 and at in hidden)
            }  # fmt: skip
            operations = [at for at in sorted(shown) if nodes[at].op != "placeholder"]
            assert positions(drawn["parts"]) == operations, name
            for at, used in enumerate(drawn["uses"]):
                expected = set(used_nodes(nodes[at])) & shown if at in shown else set()
                assert used == sorted(expected), name
            assert len(drawn["labels"]) == len(nodes)
        assert data["failing"] == [[0, 1]]


def test_the_graphs_that_a_node_calls_are_in_its_box() -> None:
    """A higher-order operator has the numbers of its bodies."""
    graph = read_capture(ROOT / "program_cond.fkf").graph
    data = data_of(graph, set())
    cond = next(at for at, n in enumerate(graph.nodes) if "cond" in str(n.target) and n.args
                and n.op == "call_function")  # fmt: skip
    assert data["graphs"][0]["inner"] == {str(cond): [1, 2]}
    assert data["operators"][data["graphs"][0]["labels"][cond]] == "cond"


def test_a_picture_is_limited_as_the_rows_are() -> None:
    """Nodes beyond the limit are neither drawn nor used."""
    data = data_of(large_capture(100).graph, set(), most=10)
    (graph,) = data["graphs"]
    assert len(graph["labels"]) == len(graph["uses"]) == 10
    assert positions(graph["parts"]) == list(range(1, 10))


def test_used_nodes_are_in_the_order_of_the_arguments() -> None:
    """Positional arguments come before keywords, and a node that is used twice is listed twice."""
    first, other, last = (NodeValue(index=at) for at in (3, 1, 0))
    args = (first, ListValue(items=(other, last)), 2)
    fx_node = NodeDesc(op="call_function", name="f", target="f", args=args, kwargs=(("k", first),))
    assert used_nodes(fx_node) == [3, 1, 0, 3]
