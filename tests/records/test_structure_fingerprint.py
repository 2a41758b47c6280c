"""Fingerprints of structure: one for equal layers of a model and for equal pieces of a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from captured_frames import captures_of
from torch._guards import TracingContext
from torch.fx.passes.split_module import split_module

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Callable

_TWO = torch.fx.symbolic_trace(lambda a, b: a + b)


class Block(torch.nn.Module):
    """A layer with two weights."""

    def __init__(self, size: int = 8, *, bias: bool = True) -> None:
        super().__init__()
        self.up = torch.nn.Linear(size, size, bias=bias)
        self.down = torch.nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output of the size of ``x``."""
        return x + self.down(self.up(x).relu())


def kinds(captures: list[tfk.Capture]) -> tuple[int, int]:
    """Return how many fingerprints of content and of structure there are."""
    return (
        len({capture.fingerprint() for capture in captures}),
        len({capture.fingerprint("structure") for capture in captures}),
    )


def test_equal_layers_are_one() -> None:
    """Weights at other sources do not matter; a missing bias, another size and another mode do."""
    a, b = Block(), Block()
    direct = captures_of(a, (torch.randn(4, 8),), dynamic=True)
    inside = captures_of(lambda y: b(y), (torch.randn(4, 8),), dynamic=True)
    assert kinds([*direct, *inside]) == (2, 1)
    other = captures_of(Block(bias=False), (torch.randn(4, 8),), dynamic=True)
    wide = captures_of(Block(6), (torch.randn(4, 6),), dynamic=True)
    with torch.no_grad():
        inference = captures_of(a, (torch.randn(4, 8),), dynamic=True)
    assert kinds([*direct, *other, *wide, *inference]) == (4, 4)


def pieces(model: torch.nn.Module, is_end: Callable[[torch.fx.Node], bool]) -> list[tfk.Capture]:
    """Return the pieces into which a backend splits the graph of a model, as it would compile them."""
    found: list[tfk.Capture] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        part: dict[torch.fx.Node, int] = {}
        for fx_node in gm.graph.nodes:
            if fx_node.op not in ("placeholder", "output"):
                last = next(reversed(part.items()), None)
                part[fx_node] = 0 if last is None else last[1] + is_end(last[0])
        split: Any = split_module(gm, gm, lambda fx_node: part[fx_node])  # pyright: ignore[reportArgumentType]

        class Capturing(torch.fx.Interpreter):
            def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
                found.append(tfk.capture(self.fetch_attr(target), list(args)))
                return super().call_module(target, args, kwargs)

        context: Any = TracingContext.get()
        fakes = [
            context.fake_mode.from_tensor(
                value, symbolic_context=context.tensor_to_context[value], source=node._dynamo_source
            )
            if isinstance(value, torch.Tensor)
            else value
            for value, node in zip(inputs, gm.graph.find_nodes(op="placeholder"), strict=True)
        ]
        with context.fake_mode:
            Capturing(split).run(*fakes)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, dynamic=True)(torch.randn(4, 8))
    return found


def test_equal_pieces_are_one() -> None:
    """Of four layers the first one, whose input needs no gradient, is another piece."""
    model = torch.nn.Sequential(*(Block() for _ in range(4)))
    found = pieces(model, lambda node: "add" in str(node.target))
    assert len(found) == 4
    assert kinds(found) == (4, 2)
    assert found[1].fingerprint("structure") == found[3].fingerprint("structure")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_pieces_are_exchanged(backend: str) -> None:
    """What was compiled for one piece is right for another one of its structure, whose inputs it checks."""
    model = torch.nn.Sequential(*(Block() for _ in range(3)))
    with torch.no_grad():
        found = pieces(model, lambda node: "add" in str(node.target))
        assert kinds(found) == (3, 1)
        instance = found[0].instantiate()
        compiled = instance.compile(backend)
        for rows, block in ((5, model[1]), (7, model[2])):
            x = torch.randn(rows, 8)
            values = {tuple(p.shape): [] for p in block.parameters()}
            for p in block.parameters():
                values[tuple(p.shape)].append(p)
            inputs = [
                rows if each.tensor is None
                else x if not each.tensor.is_parameter
                else values[each.tensor.size].pop(0)
                for each in found[0].desc.inputs
            ]  # fmt: skip
            assert instance.check_inputs(inputs) is None
            torch.testing.assert_close(compiled(*inputs), block(x))


def test_names_of_attributes_do_not_matter() -> None:
    """Bodies and constants have the number of their first use; their order of use matters."""

    def graph(names: tuple[str, str], order: tuple[int, int] = (0, 1)) -> tfk.Capture:
        root = torch.nn.Module()
        root.register_buffer(names[0], torch.ones(2))
        root.register_buffer(names[1], torch.ones(2, dtype=torch.int32))
        fx_graph = torch.fx.Graph()
        x = fx_graph.placeholder("x")
        first, second = (fx_graph.get_attr(names[i]) for i in order)
        fx_graph.output(fx_graph.call_function(torch.where, (x, first, second)))
        return tfk.capture(torch.fx.GraphModule(root, fx_graph), [torch.ones(2, dtype=torch.bool)])

    one, other, swapped = graph(("a", "b")), graph(("weight", "c")), graph(("a", "b"), (1, 0))
    assert kinds([one, other]) == (2, 1)
    assert kinds([one, swapped]) == (2, 2)


def test_an_unknown_kind_is_refused() -> None:
    """With the two that there are."""
    capture = tfk.capture(_TWO, [torch.ones(2), torch.ones(2)])
    with pytest.raises(
        tfk.CaptureError, match="kind: invalid value; expected 'content' or 'structure'"
    ):
        capture.fingerprint("shape")  # pyright: ignore[reportArgumentType]
