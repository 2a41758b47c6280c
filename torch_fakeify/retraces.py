"""``retrace``: a graph run again on inputs of a fresh ``ShapeEnv``, its unbacked symbols re-found.

Torch's ``FakeTensorProp`` runs a graph in the ``ShapeEnv`` that it has, and says of each new symbol
that it is an old one (``rebind_unbacked``, torch 2.13). In a fresh environment old and new symbols
may have one name, and there is nobody to say it to. Here a binding site is a place: a node and the
steps from its value to a number. The old note says which symbol was bound there, the new run which
one is now; so the symbols correspond one to one.

What torch remembers of a tensor (``nonzero_memo`` and the like) decides where a symbol is made. A
retrace makes it where the graph says: once for each binding site. A node that showed the symbol of
another node shows that one's new symbol, so that equal sizes stay provably equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .binding_sites import env_of
from .checkpoints import checkpoint
from .decomposed import Tracee, decomposed
from .errors import ShapeEnvError
from .expr_nodes import bodies
from .graph_runs import attribute_of, is_lifted, mode_of
from .retrace_runs import RetraceRun

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import sympy

__all__ = ["Retraced", "retrace"]


class Retraced(NamedTuple):
    """A graph with the values of another ``ShapeEnv``."""

    gm: torch.fx.GraphModule
    """A copy of the graph; parameters and constants are those of the original."""
    symbols: dict[sympy.Symbol, sympy.Symbol]
    """The new unbacked symbol by the old one, of all that nodes bind: one to one."""
    inputs: dict[sympy.Symbol, sympy.Basic]
    """What the new inputs have where the old ones have a symbol."""
    gone: dict[sympy.Symbol, sympy.Basic]
    """Symbols whose binding site gives a constant or a number of the inputs now, and which."""
    unplaced: tuple[str, ...]
    """Runtime asserts about symbols that no node and no input of the graph binds. The new
    environment does not have them."""


def retrace(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: Any = None,
    allow_gone: bool = False,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> Retraced:
    """Propagate a graph again, in the ``ShapeEnv`` of new inputs.

    Every node runs once, also those of the bodies of higher-order operators. The nodes of the copy
    have the new values, under the key that the graph uses (``val`` or ``example_value``), and
    ``unbacked_bindings``; other metadata stays, as far as it is not of the old environment. What
    the old environment assumes of the graph's data is stated in the new one where it is bound:
    runtime asserts with their messages and stacks, ranges, replacements. Guards on inputs are not:
    `insert_guards` and `learn` take them over, or `FreshEnv`; those that operators need come again.

    Args:
        gm: a graph with fake values in ``meta``. One without values, or without notes of what its
            nodes bind, runs too: then the sites are found by the first value that shows a symbol.
        inputs: one for each placeholder, of one fake mode whose ``ShapeEnv`` is not the graph's:
            fake tensors, symbolic scalars, constants.
        mode: the mode, where no input has one.
        allow_gone: take a binding site that has become a constant or a number of the inputs; what
            was assumed of the symbol is then checked of that.
        decompositions: then trace the graph with these, as ``make_fx`` does, over the same symbols;
            an empty table gives a graph of ATen operators.

    Raises:
        ShapeEnvError: a binding site is gone, or gives a symbol that another site binds; a node
            finds a number in its data that it did not find before; an assumption does not hold;
            the inputs do not fit the graph. The node is named.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    if len(placeholders) != len(inputs):
        raise ShapeEnvError(
            "the inputs do not fit the graph",
            expected=f"{len(placeholders)} inputs, one for each placeholder",
            found=str(len(inputs)),
        )
    mode = mode or mode_of(inputs)
    known = env_of(gm.graph)
    if mode is None or mode.shape_env is None or mode.shape_env is known:
        raise ShapeEnvError(
            "a retrace takes place in a fresh ShapeEnv",
            expected="inputs of a FakeTensorMode whose ShapeEnv is not the graph's",
            found="no ShapeEnv" if mode is None or mode.shape_env is None else "the graph's own",
            fix="Make them with refakeify(inputs, mode); to update a graph in its own: repropagate",
        )
    run = RetraceRun(known, mode, allow_gone=allow_gone)
    made = run.copied(gm)
    before = None if decompositions is None else checkpoint(mode.shape_env)
    with run.running():
        run.graph(made, inputs)
    if before is not None:
        before.rollback()
        run = RetraceRun(known, mode, allow_gone=allow_gone, plans=run.plans)
        with run.running():
            made = decomposed(made, _traced(run, run.copied(gm)), inputs, decompositions or {})
    unplaced = run.facts.finish()
    if before is not None:  # the tracer merges numbers that it knows to be equal
        kept = _noted(made)
        lost = {new for new in run.bound.values() if new not in kept and new not in run.loops}
        run.bound = {old: new for old, new in run.bound.items() if new not in lost}
        unplaced += _asserts_about(mode.shape_env, lost)
    return Retraced(made, run.bound, run.inputs, run.gone, unplaced)


def _traced(run: RetraceRun, gm: torch.fx.GraphModule) -> Tracee:
    tensors = {
        str(n.target): run.attribute(attribute_of(gm, str(n.target)))
        for n in gm.graph.find_nodes(op="get_attr")
        if isinstance(attribute_of(gm, str(n.target)), torch.Tensor) and not is_lifted(n)
    }
    return Tracee(lambda values: run.graph(gm, values), tensors)


def _noted(gm: torch.fx.GraphModule) -> set[Any]:
    """All symbols that nodes bind, also those of bodies."""
    found = {s for n in gm.graph.nodes for s in n.meta.get("unbacked_bindings") or {}}
    return found.union(*map(_noted, bodies(gm)))


def _asserts_about(env: Any, symbols: set[Any]) -> tuple[str, ...]:
    return tuple(
        str(one.expr)
        for group in env.deferred_runtime_asserts.values()
        for one in group
        if not symbols.isdisjoint(one.expr.free_symbols)
    )
