"""Counts and programs for tests of ``retrace``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from assert_frames import V4, T, fresh_inputs

import torch_fakeify as tfk
from torch_fakeify.replay.bindings import canonical_symbol, env_of, is_unbacked, symbols_in
from torch_fakeify.replay.lowering import bodies, graphs_of, value_of
from torch_fakeify.unbacked.binding_checks import binding_faults

if TYPE_CHECKING:
    from collections.abc import Callable

    import sympy

    from torch_fakeify.unbacked.retracing import Retraced


MASK = torch.tensor([True, False, True, True])


def bound_by(gm: torch.fx.GraphModule) -> list[sympy.Symbol]:
    """The symbols that the nodes of a graph note, as its environment names them."""
    env = env_of(gm.graph)
    return [
        canonical_symbol(symbol, env)
        for graph in graphs_of(gm)
        for fx_node in graph.nodes
        if fx_node.op != "placeholder"
        for symbol in fx_node.meta.get("unbacked_bindings") or {}
    ]


def unbacked_in(env: Any) -> set[sympy.Symbol]:
    """All unbacked symbols that an environment has made."""
    return {symbol for symbol in env.var_to_range if is_unbacked(symbol)}


def law_8(gm: torch.fx.GraphModule, **options: Any) -> tuple[Retraced, Any]:
    """Retrace a graph in a fresh environment; as many symbols as in the original, all bound."""
    original = bound_by(gm)
    assert len(set(original)) == len(original)
    mode, inputs = fresh_inputs(gm)
    given_already = unbacked_in(mode.shape_env)
    result = tfk.retrace(gm, inputs, mode=mode, **options)
    bound = bound_by(result.gm)
    assert len(set(bound)) == len(bound) == len(original)
    own = unbacked_in(mode.shape_env) - given_already
    inputs_of_bodies = own - set(bound)
    assert all(
        inputs_of_bodies >= (symbols_in(value_of(n)) - set(bound) - given_already)
        for graph in graphs_of(result.gm)
        for n in graph.find_nodes(op="placeholder")
    )
    shown = {
        s
        for body in bodies(result.gm)
        for n in body.graph.find_nodes(op="placeholder")
        for s in symbols_in(value_of(n))
    }
    assert inputs_of_bodies <= shown
    assert set(result.symbols.values()) == own
    assert len(result.symbols) == len(own)
    assert set(result.symbols) >= set(original)
    if not binding_faults(gm):
        tfk.check_bindings(result.gm)
    return result, mode.shape_env


def memoized(a: torch.Tensor, m: torch.Tensor) -> Any:
    """The same mask four times, a copy of it once, and a selection, which nothing remembers."""
    return a[m], (a + 1)[m], m.nonzero(), m.clone().nonzero(), torch.masked_select(a, m)


def mutated(m: torch.Tensor) -> Any:
    """Numbers that are found again after the data has changed."""
    m = m.clone()
    first, second = m.nonzero(), m.nonzero()
    m.logical_not_()
    third, fourth = m.nonzero(), m.nonzero()
    return first + second, third + fourth


def distinct(x: torch.Tensor) -> Any:
    """Every memo of torch: twice each, and what has none."""
    u, v = torch.unique(x), torch.unique(x, return_counts=True)
    w, z = torch.unique_consecutive(x), torch.unique_consecutive(x)
    k = (x > 0).sum()
    return u + v[0], v[1], w + z, torch.bincount((x > 0).long()), k.item() + k.item()


def flag(x: torch.Tensor) -> Any:
    """A boolean."""
    b = (x > 0).any().item()
    return x * torch.sym_ite(b, 1, 2), b


def split(x: torch.Tensor, n: torch.Tensor) -> Any:
    """Views at sizes from the data, and an offset."""
    k = n.sum().item()
    torch._check(k >= 0)
    torch._check(k <= x.shape[0])
    return torch.split(x, [k, x.shape[0] - k])


def branches(x: torch.Tensor) -> Any:
    """What a branch finds, inside and as the result."""

    def true(x: torch.Tensor) -> torch.Tensor:
        return x[x > 0]

    def false(x: torch.Tensor) -> torch.Tensor:
        return x[:2] + x.nonzero().sum()

    return torch.cond(x.sum() > 0, true, false, (x,))


def mapped(x: torch.Tensor) -> Any:
    """A float found in each row."""
    return torch._higher_order_ops.map(lambda row: row + row.sum().item(), x.view(2, 2))


def jagged(x: torch.Tensor, n: torch.Tensor) -> Any:
    """A nested tensor whose rows the data tells."""
    nested: Any = torch.nested.nested_tensor_from_jagged(x.nonzero().float(), n)
    return nested.sin().sum()


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
    "memoized": (memoized, (V4, MASK), 3),
    "mutated": (mutated, (MASK,), 2),
    "distinct": (distinct, (V4,), 4),
    "flag": (flag, (V4,), 1),
    "split": (split, (V4, T([1, 2])), 1),
    "branches": (branches, (V4,), 3),
    "mapped": (mapped, (V4,), 1),
    "jagged": (jagged, (V4, T([0, 1, 3])), 1),
}
"""With the number of binding sites."""
