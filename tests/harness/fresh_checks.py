"""The facts of a fresh instance of a capture against those of a restored one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sympy
import torch
from guard_code import code_facts, equivalent_code
from guard_equivalence import Naming, by_sources, equivalent, facts_of
from guard_terms import variable
from torch._dynamo.source import LocalSource
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import SubclassSymbolicContext

from torch_fakeify.replay.lowering import mark_of

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    import torch_fakeify as tfk
    from torch_fakeify.frames.instances import Instance


def rows_of(instance: Instance) -> list[tuple[Any, Any]]:
    """The source and the value of each input."""
    placeholders = instance.gm.graph.find_nodes(op="placeholder")
    sources = [getattr(n, "_dynamo_source", None) or LocalSource(n.name) for n in placeholders]
    rows = zip(sources, instance.inputs, strict=True)
    return [row for row in rows if not isinstance(row[1], torch.SymBool)]  # tracked as 0 or 1


def env_of(instance: Instance) -> ShapeEnv:
    """The environment of a frame that has one."""
    assert instance.shape_env is not None
    return instance.shape_env


def guard_code(instance: Instance) -> frozenset[str]:
    """The guards as ``produce_guards`` writes them, of all that a frontend would track."""
    env, rows = env_of(instance), []
    for source, value in rows_of(instance):
        if not isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat)):
            continue
        plain = "___" not in source.name  # what is wrapped has no code that can be read
        rows.append((source if plain else LocalSource(source.name.strip("_()[]'\"")), value))
        scalar = getattr(value, "item_memo", None)
        if isinstance(scalar, (torch.SymInt, torch.SymFloat)):
            rows += [(s, scalar) for s in env.var_to_sources.get(scalar.node._expr, ())]
    tracked = {source.name for source, _ in (*rows, *rows_of(instance))}
    for symbol, sources in env.var_to_sources.items():  # of inputs that the graph does without
        rest = [s for s in sources if not ({s.name, getattr(s, "base", s).name} & tracked)]
        rest = [s for s in rest if not s.is_ephemeral()]
        if isinstance(env.backed_var_to_val.get(symbol), sympy.Integer):
            sym_ints = [torch.SymInt(SymNode(symbol, env, int, None)) for _ in rest]
            rows += zip(rest, sym_ints, strict=True)
    contexts = [_inner_context(instance, value) for _, value in rows]
    return code_facts(env, [v for _, v in rows], [s for s, _ in rows], input_contexts=contexts)


def _inner_context(instance: Instance, value: Any) -> Any:
    """The policy of a wrapper subclass, without which torch writes no guards for it."""
    context = instance.tracing_context.tensor_to_context.get(value)
    return context if isinstance(context, SubclassSymbolicContext) else None


def named(instance: Instance) -> Naming:
    """A variable for each symbol: its first source, or how many unbacked ones came before."""
    env = env_of(instance)
    names = by_sources(env, inputs=rows_of(instance))
    unbacked = sorted(
        (s for s in env.var_to_range if s not in env.backed_var_to_val),
        key=lambda s: int(s.name.lstrip("zuf")),
    )
    for i, symbol in enumerate(unbacked):
        names[symbol] = variable(f"unbacked{i}", is_float=not symbol.is_integer)
    return names


def knowledge(instance: Instance) -> dict[str, Any]:
    """What an environment knows, over sources; equal things are equal."""
    env, names = env_of(instance), named(instance)
    own = [fx_node for fx_node in instance.gm.graph.nodes if mark_of(fx_node) is None]

    def over(expr: Any) -> str:
        return str(sympy.sympify(expr).xreplace(names))

    def table(entries: Any) -> dict[str, Any]:
        return {over(k): str(v) for k, v in entries.items()}

    return {
        "settings": env.settings,
        "hints": table(env.backed_var_to_val),
        "hint overrides": table(env.var_to_hint_override),
        "ranges": {
            # Of what is replaced, the range of the replacement: torch's table may be behind.
            over(s): str(env.bound_sympy(env.replace(s)) if s in env.replacements else bounds)
            for s, bounds in env.var_to_range.items()
        },
        "lines of ranges": {
            over(s): (sloc.lower.maybe_user_loc, sloc.upper.maybe_user_loc)
            for s, sloc in env.var_to_range_sloc.items()
            if s not in env.replacements
        },
        "replacements": {over(s): over(env.replace(s)) for s in env.replacements},
        "lines of replacements": {
            over(s): sloc.maybe_user_loc for s, sloc in env.replacements_slocs.items()
        },
        "divisible": {over(expr) for expr in env.divisible},
        "sources": {over(s): [x.name for x in v] for s, v in env.var_to_sources.items()},
        "symbols of sources": {name: over(s) for name, s in env.source_to_var.items()},
        "duck shapes": {str(n): over(s) for n, s in env.val_to_var.items()},
        "size_like": {over(s) for s in env.size_like},
        "unbacked inputs": {over(s) for s in env.unbacked_inputs},
        "exclusions": [(over(s), n) for s, n in env.exclusion_constraints],
        "specializations": {
            (s.source.name, bool(s.check_fn(8)), bool(s.check_fn(9))) for s in env.specializations
        },
        "asserts": {
            None if key is None else over(key): [(over(one.expr), one.msg) for one in group]
            for key, group in env.deferred_runtime_asserts.items()
        },
        "lines of guards": {
            guard.sloc.maybe_user_loc
            for guard in env.guards
            if env._maybe_evaluate_static(guard.expr, axioms=()) is None
        },
        "sizes of nodes": [
            over(part.node.expr)
            for fx_node in own
            for key in ("val", "example_value")
            for part in _symbolic(fx_node.meta.get(key))
        ],
        "bindings": [
            sorted(over(s) for s in fx_node.meta.get("unbacked_bindings", {})) for fx_node in own
        ],
    }


def _symbolic(value: Any) -> list[torch.SymInt]:
    leaves = torch.utils._pytree.tree_leaves(value)
    sizes = [
        n
        for leaf in leaves
        for n in ((*leaf.size(), *leaf.stride()) if isinstance(leaf, torch.Tensor) else (leaf,))
    ]
    return [n for n in sizes if isinstance(n, torch.SymInt) and hasattr(n.node, "expr")]


def differences(capture: tfk.Capture) -> list[str]:
    """In what a fresh instance of a frame differs from one in the recorded state."""
    restored, fresh = capture.instantiate(), capture.instantiate(fresh=True)
    if restored.shape_env is None:
        return [] if fresh.shape_env is None else ["an environment out of nothing"]
    ours, theirs = knowledge(fresh), knowledge(restored)
    lines, all_lines = ours.pop("lines of guards"), theirs.pop("lines of guards")
    # A guard that follows from others is gone, and its line with it.
    wrong = [f"a line that caused nothing: {line}" for line in lines - all_lines]
    wrong += [
        f"{what}: {ours[what]}, not {theirs[what]}" for what in theirs if ours[what] != theirs[what]
    ]
    old, new = env_of(restored), env_of(fresh)
    verdict = equivalent(
        facts_of(old, named(restored), asserts=True), facts_of(new, named(fresh), asserts=True)
    )
    if verdict.how != "proved":
        wrong.append(f"the facts: {verdict}")
    code = equivalent_code(guard_code(restored), guard_code(fresh))
    if code.how != "proved":
        wrong.append(f"the code of guards: {code}")
    wrong += [f"a name of ours: {name}" for name in new.source_to_var if "fakeify" in name]
    return wrong
