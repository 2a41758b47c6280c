"""Limits of a reader: expanded products, and files that a reader would refuse are not written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from torch_fakeify.errors import (
    LimitError,
    WriteError,
)
from torch_fakeify.records.frame import CaptureDesc, FakeModeDesc, ModesDesc
from torch_fakeify.records.graph import GraphModuleDesc
from torch_fakeify.records.shape_env import GuardDesc, ShapeEnvDesc, ShapeEnvSettingsDesc
from torch_fakeify.records.tensor import (
    ApplyNode,
    ExprDesc,
    ExprNode,
    IntNode,
    MetaTensorDesc,
    SymbolNode,
    SymDesc,
)
from torch_fakeify.serialization import capture_file
from torch_fakeify.serialization.container import (
    Limits,
)
from torch_fakeify.serialization.expansions import check_products

if TYPE_CHECKING:
    from pathlib import Path

# --- what is written is read ----------------------------------------------------------------------


def product_of(nodes: list[ExprNode], factors: list[int]) -> ExprDesc:
    """A product of some of the nodes."""
    return ExprDesc(nodes=(*nodes, ApplyNode("Mul", tuple(factors))))


def sums(count: int, *, divisor: int | None = None) -> ExprDesc:
    """A product of so many different sums of ``3 * s0`` and an odd number, each divided or not."""
    nodes: list[ExprNode] = [SymbolNode("s0", ()), IntNode(3), ApplyNode("Mul", (0, 1)), IntNode(2)]
    factors: list[int] = []
    for i in range(count):
        nodes += [IntNode(6 * i + 5), ApplyNode("Add", (2, len(nodes)))]
        if divisor is not None:
            nodes.append(ApplyNode("FloorDiv", (len(nodes) - 1, nodes.index(IntNode(divisor)))))
        factors.append(len(nodes) - 1)
    return product_of(nodes, factors)


def frame_of(expr: ExprDesc) -> CaptureDesc:
    """A frame with one guard."""
    settings = dict.fromkeys(ShapeEnvSettingsDesc.__struct_fields__, True)
    env = ShapeEnvDesc(settings=ShapeEnvSettingsDesc(**settings), guards=(GuardDesc(expr=expr),))
    graph = GraphModuleDesc(nodes=())
    return CaptureDesc(
        graph=graph, inputs=(), modes=ModesDesc(), fake_mode=FakeModeDesc(), shape_env=env
    )


@pytest.mark.parametrize(
    ("expr", "fits"),
    [
        (sums(8), True),
        (sums(30), False),
        (sums(30, divisor=2), True),  # sympy leaves these divisions as they are
        (sums(30, divisor=3), False),  # but of these it takes a term out
    ],
)
def test_products_are_counted_as_torch_multiplies_them(
    expr: ExprDesc, fits: bool, tmp_path: Path
) -> None:
    """A frame that takes too long is not written, so that all that is written is read."""
    desc, path = frame_of(expr), tmp_path / "a.fkf"
    if fits:
        capture_file.write_capture(path, desc)
        assert capture_file.read_capture(path) == desc
        return
    with pytest.raises(WriteError, match="the products of sums are too large multiplied out"):
        capture_file.write_capture(path, desc)
    assert not path.exists()


def test_products_of_sizes_are_counted() -> None:
    """The number of elements of a tensor is a product, too."""
    expr = ExprDesc(nodes=(SymbolNode("s0", ()), IntNode(1), ApplyNode("Add", (0, 1))))
    size = (SymDesc(expr=expr, hint=2),)
    row = MetaTensorDesc(id=0, dtype="int8", device="cpu", size=size, stride=(1,))
    tables = {"nodes": expr.nodes, "tensors": [row]}
    check_products(tables, [2], {id(expr): 0}, Limits().products, "$")


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (Limits(values=10), "the file has too many JSON values; expected at most 10"),
        (Limits(containers=1), "the file has too many JSON arrays and objects"),
        (Limits(member_bytes=20), "a member is too large; expected at most 20 bytes"),
        (Limits(total_bytes=20), "the members are too large together"),
        (Limits(expr_nodes=1), "the expressions have too many nodes; expected at most 1"),
    ],
)
def test_a_file_that_could_not_be_read_is_not_written(
    limits: Limits, text: str, tmp_path: Path
) -> None:
    """Each limit of a reader is one of the writer; with higher ones the file is written."""
    desc, path = frame_of(sums(3)), tmp_path / "a.fkf"
    path.write_bytes(b"before")
    with pytest.raises(WriteError) as error:
        capture_file.write_capture(path, desc, limits=limits)
    assert f"the file could not be read again: {text}" in str(error.value)
    assert "Pass higher limits to `save`" in str(error.value)
    assert path.read_bytes() == b"before"
    capture_file.write_capture(path, desc, limits=Limits.none())
    with pytest.raises(LimitError):
        capture_file.read_capture(path, limits=limits)
