"""Comparisons of fake tensors of two modes."""

from __future__ import annotations

import itertools
from typing import Any

import sympy
import torch
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    free_unbacked_symbols,
)
from torch.utils import _pytree as pytree

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def symbolic_mode(**options: Any) -> FakeTensorMode:
    """A mode with a ShapeEnv of its own."""
    return FakeTensorMode(shape_env=ShapeEnv(**options))


def fake(
    mode: FakeTensorMode, t: torch.Tensor, name: str, kind: DimDynamic = DimDynamic.DYNAMIC
) -> Any:
    """A fake tensor with a symbol for every dim, no two of them equal."""
    context = StatelessSymbolicContext(dynamic_sizes=[kind] * t.ndim)
    return mode.from_tensor(t, source=LocalSource(name), symbolic_context=context)


def numbers(t: Any) -> list[Any]:
    """Sizes, strides and offset of a tensor, or the scalar itself."""
    if isinstance(t, SYMBOLIC):
        return [t]
    return [*t.size(), *t.stride(), t.storage_offset()]


def exprs(t: Any) -> list[Any]:
    """The numbers as expressions."""
    return [n.node.expr if isinstance(n, SYMBOLIC) else sympy.sympify(n) for n in numbers(t)]


def hints(t: Any) -> list[Any]:
    """The numbers as hints."""
    return [hint_of(n.node) if isinstance(n, SYMBOLIC) else n for n in numbers(t)]


def hint_of(sym_node: Any) -> Any:
    """The hint, also of a size that had none before its unbacked symbol was found equal to one."""
    if sym_node.hint is not None or free_unbacked_symbols(sym_node.expr):
        return sym_node.hint
    return int(sym_node.expr.xreplace(sym_node.shape_env.backed_var_to_val))


def renaming(old: list[Any], new: list[Any]) -> dict[Any, Any]:
    """The renaming of symbols that makes the old expressions the new ones; fails if there is none."""
    before = [e for t in old for e in exprs(t)]
    after = [e for t in new for e in exprs(t)]
    names: dict[Any, Any] = {}
    for e, f in zip(before, after, strict=True):
        if e.is_Symbol:
            assert names.setdefault(e, f) == f
    assert len(set(names.values())) == len(names)
    missing = sorted({s for e in before for s in e.free_symbols} - names.keys(), key=str)
    spare = sorted({s for e in after for s in e.free_symbols} - set(names.values()), key=str)
    for order in itertools.permutations(spare, len(missing)):
        whole = names | dict(zip(missing, order, strict=True))
        if [e.xreplace(whole) for e in before] == after:
            return whole
    raise AssertionError(f"{before} is no renaming of {after}")


def check_symbols(names: dict[Any, Any], old: ShapeEnv, new: ShapeEnv) -> None:
    """What the one ShapeEnv knows of the symbols, the other knows of the new ones."""
    for a, b in names.items():
        assert new.var_to_range[b] == old.var_to_range[a]
        assert new.backed_var_to_val.get(b) == old.backed_var_to_val.get(a)
        assert (b in new.size_like) == (a in old.size_like)
        assert new.var_to_hint_override.get(b) == old.var_to_hint_override.get(a)
        assert bool(free_unbacked_symbols(b)) == bool(free_unbacked_symbols(a))
        assert b.assumptions0 == a.assumptions0


def check_untouched(env: ShapeEnv) -> None:
    """Nothing was asked of the ShapeEnv, and no symbol waits for a node that binds it."""
    assert env.guards == []
    assert env.deferred_runtime_asserts == {}
    assert env.replacements == {}
    assert env.divisible == set()
    assert env.axioms == {}
    assert env.pending_fresh_unbacked_symbols == []


def values(gm: torch.fx.GraphModule) -> list[Any]:
    """Every tensor and symbolic scalar in the metadata of the nodes, submodules too."""
    found: list[Any] = []
    for module in gm.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                found += pytree.tree_leaves([node.meta.get("val"), node.meta.get("example_value")])
    return [t for t in found if isinstance(t, (torch.Tensor, *SYMBOLIC))]
