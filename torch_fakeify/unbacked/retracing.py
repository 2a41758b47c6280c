"""``retrace``: run a graph again on inputs of a fresh ``ShapeEnv`` and map its unbacked symbols.

Torch's ``FakeTensorProp`` runs a graph in its own ``ShapeEnv`` and renames each new symbol to an old
one (``rebind_unbacked``, torch 2.13). That is not possible in a fresh environment, where old and new
symbols may share names. Here symbols correspond by binding site (a node, and the path from its value
to a number): the old symbol from the metadata, the new one from the run.

Torch's memos on tensors (``nonzero_memo`` and others) decide where a symbol is made; a retrace makes
it at the binding sites of the graph, once for each. A node with the symbol of another node gets the
new symbol of that node, so that equal sizes remain provably equal.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torch_fakeify.compat import torch_graphs
from torch_fakeify.compat.arguments import check_mode, placeholders_of
from torch_fakeify.errors import ShapeEnvError
from torch_fakeify.replay.bindings import env_of
from torch_fakeify.replay.facts import runtime_asserts
from torch_fakeify.replay.lowering import attribute_of, graphs_of
from torch_fakeify.shape_env.rollback import checkpoint

from .fx_runs import is_lifted, mode_of, running_in, set_attribute
from .interpreter import RetraceRun

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import sympy


class Retraced(NamedTuple):
    """A graph with the values of another ``ShapeEnv``."""

    gm: torch.fx.GraphModule
    """A copy of the graph; parameters and constants are shared with the original."""
    symbols: dict[sympy.Symbol, sympy.Symbol]
    """The new unbacked symbol for each old one that a node binds: one to one."""
    inputs: dict[sympy.Symbol, sympy.Basic]
    """The expression in the new inputs for each symbol of the old inputs."""
    gone: dict[sympy.Symbol, sympy.Basic]
    """The constant or number of the inputs that a binding site now has instead of its symbol."""
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
    ``unbacked_bindings``; metadata of the old environment is dropped, other metadata remains. Facts
    about unbacked symbols are stated in the new environment once their symbols are bound: runtime
    asserts with their messages and stacks, ranges, replacements. Guards on inputs are transferred by
    `insert_guards` and `learn`; those that operators need are added again by the run.

    Args:
        gm: a graph with fake values in ``meta``. Without values, or without ``unbacked_bindings``, the
            first value with a symbol is its binding site.
        inputs: one for each placeholder, of one fake mode whose ``ShapeEnv`` is not the graph's:
            fake tensors, symbolic scalars, constants.
        mode: the mode, if no input has one.
        allow_gone: accept a binding site that has become a constant or a number of the inputs, and
            check the assumptions about the symbol for that.
        decompositions: also trace the graph with these, as ``make_fx`` does, over the same symbols;
            an empty table gives a graph of ATen operators.

    Raises:
        ShapeEnvError: a binding site is gone, or has a symbol that another site binds; a node has a
            new unbacked symbol where it had none; an assumption does not hold; the inputs do not fit
            the graph. The node is named.

    Example:
        >>> from torch._subclasses import FakeTensorMode
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> from torch.fx.experimental.symbolic_shapes import ShapeEnv
        >>> gm = make_fx(torch.nonzero, tracing_mode="symbolic")(torch.ones(4))
        >>> x = gm.graph.find_nodes(op="placeholder")[0].meta["val"]
        >>> inputs = tfk.refakeify([x], FakeTensorMode(shape_env=ShapeEnv()))
        >>> tfk.retrace(gm, inputs).symbols
        {u0: u0}
    """
    placeholders_of(gm, inputs)
    if mode is None:
        mode = mode_of(inputs)
    else:
        check_mode(mode)
    original = env_of(gm.graph)
    if mode is None or mode.shape_env is None or mode.shape_env is original:
        raise ShapeEnvError(
            "a retrace takes place in a fresh ShapeEnv",
            expected="inputs of a FakeTensorMode whose ShapeEnv is not the graph's",
            found="no ShapeEnv" if mode is None or mode.shape_env is None else "the graph's own",
            fix="Make them with refakeify(inputs, mode); to update a graph in its own: repropagate",
        )
    run = RetraceRun(original, mode, allow_gone=allow_gone)
    made = run.copied(gm)
    with ExitStack() as stack:
        before = None if decompositions is None else checkpoint(mode.shape_env)
        if before is not None:
            stack.callback(before.commit)
        with running_in(mode):
            mode.reset_nt_tensor_id_counter()
            run.graph(made, inputs)
        if before is not None:
            before.rollback()
            run = RetraceRun(original, mode, allow_gone=allow_gone, logs=run.logs)
            with running_in(mode):
                mode.reset_nt_tensor_id_counter()
                made = _decomposed(made, run, run.copied(gm), inputs, decompositions or {})
    unplaced = run.facts.finish()
    if decompositions is not None:  # the tracer merges equal numbers
        fx_nodes = [fx_node for graph in graphs_of(made) for fx_node in graph.nodes]
        bound = {s for n in fx_nodes for s in n.meta.get("unbacked_bindings") or {}}
        lost = {new for new in run.bound.values() if new not in bound and new not in run.loops}
        run.bound = {old: new for old, new in run.bound.items() if new not in lost}
        unplaced += tuple(
            str(one.expr)
            for one in runtime_asserts(mode.shape_env)
            if not lost.isdisjoint(one.expr.free_symbols)
        )
    return Retraced(made, run.bound, run.inputs, run.gone, unplaced)


def _decomposed(
    original: torch.fx.GraphModule,
    run: RetraceRun,
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    decompositions: Mapping[Any, Callable[..., Any]],
) -> torch.fx.GraphModule:
    """Trace a copy of a graph with decompositions, as ``make_fx`` does, while a run executes it."""
    tensors = {
        str(n.target): run.attribute(attribute_of(gm, str(n.target)))
        for n in gm.graph.find_nodes(op="get_attr")
        if isinstance(attribute_of(gm, str(n.target)), torch.Tensor) and not is_lifted(n)
    }
    table: Any = dict(decompositions)
    with torch_graphs.preserve_node_meta():
        # Tensors of the module become inputs: the tracer would take the fakes for constants.
        trace = torch_graphs.make_fx(
            lambda *args: run.graph(gm, args[: len(inputs)]), decomposition_table=table
        )
        made = trace(*inputs, *tensors.values())
    extra = made.graph.find_nodes(op="placeholder")[len(inputs) :]
    for placeholder, name in zip(extra, tensors, strict=True):
        path, _, _ = name.rpartition(".")
        if path:
            made.add_submodule(path, torch.nn.Module())
        set_attribute(made, name, attribute_of(original, name))
        with made.graph.inserting_before(placeholder):
            fx_node = made.graph.get_attr(name)
        fx_node.meta = placeholder.meta
        placeholder.replace_all_uses_with(fx_node)
        made.graph.erase_node(placeholder)
    pairs = [gm.graph.find_nodes(op="placeholder") for gm in (made, original)]
    for new, old in zip(*pairs, strict=True):
        metadata = {k: v for k, v in old.meta.items() if k not in ("example_value", "val")}
        with made.graph.inserting_before(new):
            fx_node = made.graph.placeholder(str(old.target))
        fx_node.meta = {**metadata, **new.meta}
        new.replace_all_uses_with(fx_node)
        made.graph.erase_node(new)
    made.recompile()
    return made
