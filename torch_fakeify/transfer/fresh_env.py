"""A new ``ShapeEnv`` with the facts of another one, derived by torch's own rules or copied.

`shape_env.restoring` restores a recorded state; here the state is derived again
(`FreshEnv.derive_facts`): a ``ShapeEnv`` with the same settings makes symbols for the same sources,
runs guard nodes (`replay.guard_nodes`) on inputs over them, and gets the facts about symbols that no
input of a graph holds.

====================================  ============================================================
in the original environment           in the new one
====================================  ============================================================
settings, ``co_fields``               the same
symbols                               new ones for the same sources in the same order, with names
                                      of the new environment
hints, overrides, ``size_like``,      the same
``unbacked_inputs``, duck shapes
``specializations``, shape ids,       the same: they belong to the policy of the inputs
spec symbols, exclusion constraints
guards, value ranges, replacements,   facts about inputs by running the nodes of `insert_guards`, the
``divisible``                         others stated; without guards that follow from others
deferred runtime asserts              stated, with their messages and stacks; and inserted as nodes
                                      of the graph
``axioms``                            the same, such as those of a specialized graph
stacks and locations                  the recorded ones, where the fact is the same
frozen, ``_error_on_new_guards``      not set: the new environment accepts new facts
cache of fake tensors                 the same, unless a symbol got another name
counters, versions, other caches      not copied
====================================  ============================================================

A handoff runs in the process of the original environment, on the inputs of the frame: there
`FreshEnv.copy_facts` copies the tables, including guards that follow from others. It evaluates
nothing, and both environments share expression objects: comparing equal expressions that are distinct
objects would take torch more time than everything else here.
"""

from __future__ import annotations

import dataclasses
import itertools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import sympy

from torch_fakeify.compat import torch_dynamo, torch_graphs, torch_symbols
from torch_fakeify.compat.torch_symbols import (
    CapturedTraceback,
    DimDynamic,
    SingletonInt,
    SymT,
    ValueRangesSLoc,
    narrow_range,
)
from torch_fakeify.encoding.conditions import RecordedCondition
from torch_fakeify.encoding.exprs import decode_expr, encode_expr
from torch_fakeify.encoding.stacks import RecordedTraceback, copy_stack
from torch_fakeify.errors import ShapeEnvError
from torch_fakeify.records.symbol_names import rename_symbols
from torch_fakeify.records.tensor import SymbolNode
from torch_fakeify.replay.assert_nodes import insert_runtime_asserts
from torch_fakeify.replay.facts import Fact, assumed_facts, runtime_asserts
from torch_fakeify.replay.guard_nodes import insert_guards, learn
from torch_fakeify.replay.lowering import ASSERTS, mark_of, strip_marked

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    import torch


_BY_SYMBOL = (
    "backed_var_to_val", "var_to_range", "var_to_range_sloc", "var_to_sources", "var_to_stack",
    "symbol_guard_counter",
)  # fmt: skip
"""Attributes of a ``ShapeEnv`` with an entry for each symbol that it makes."""

_POLICY = (
    "source_to_symbol", "source_to_var", "source_name_to_debug_name", "val_to_var", "var_to_stack",
    "var_to_hint_override", "real_tensor_prop_unbacked_vals", "unbacked_alloc_order",
    "unbacked_renamings", "unbacked_inputs", "exclusion_constraints", "specializations",
    "_shape_id_to_unbacked_symbol", "_spec_symbol_to_compile_symbol",
    "_shape_spec_pending_assumptions",
)  # fmt: skip
"""Attributes that come from the policy of the inputs, or belong to the symbols."""

_FACTS = (
    "guards", "var_to_range", "var_to_range_sloc", "replacements", "replacements_slocs", "axioms",
    "divisible", "deferred_runtime_asserts", "specialization_stacks",
)  # fmt: skip
"""Attributes that have the facts, with their locations."""


class FreshEnv:
    """A new ``ShapeEnv`` with the symbols of another one, to which facts can be transferred.

    Attributes:
        env: the new ``ShapeEnv``.
        symbols: its symbols by the original ones.
        names: ``symbols`` as records, for `rename_symbols`.

    Args:
        original: the environment with the facts, which is not changed.

    Raises:
        ShapeEnvError: it has a symbol that no ``ShapeEnv`` would make.
    """

    def __init__(self, original: Any) -> None:
        self._original = original
        # Without translation validation, which checks a history that this environment lacks.
        self.env: Any = torch_symbols.unvalidated_shape_env(
            co_fields=dict(original.co_fields), **dataclasses.asdict(original.settings)
        )
        self.symbols: dict[sympy.Symbol, sympy.Symbol] = {}
        with self.env.ignore_fresh_unbacked_symbols():  # no operator of a trace binds them
            for symbol in _symbols_of(original):
                self.symbols[symbol] = self._make(symbol)
        self.names = {_record(old): _record(new) for old, new in self.symbols.items()}
        self._changed = {old: new for old, new in self.symbols.items() if old != new}
        self._changed_back = {new: old for old, new in self._changed.items()}
        self.env.source_to_var.clear()  # in the original order, with all sources of each symbol
        self._copy(_POLICY)

    def derive_facts(
        self,
        gm: torch.fx.GraphModule,
        original: Sequence[Any],
        inputs: Sequence[Any],
    ) -> None:
        """Derive all facts of the original environment in the new one, by torch's own rules.

        Args:
            gm: a graph that takes the inputs. It gets fake values and guard nodes.
            original: the inputs over the original symbols, one for each placeholder.
            inputs: the inputs over the new symbols.

        Raises:
            ShapeEnvError: the facts contradict each other, or the inputs.
        """
        for fx_node, value in zip(gm.graph.find_nodes(op="placeholder"), original, strict=True):
            fx_node.meta["val"] = value
        # Before the guard nodes, which would state the same conditions without messages.
        for one in runtime_asserts(self._original):
            defer_assert(self.env, self.to_fresh(one.expr), one.msg, copy_stack(one.stack))
        for symbol, bounds in self._original.var_to_range.items():
            if symbol not in self._original.backed_var_to_val:  # which no guard can check
                narrow_range(self.env, self.symbols[symbol], bounds)
        with self._without_exclusions():
            inserted = insert_guards(gm, self._original)
            learn(gm, inputs)
            self._state_others(frozenset(inserted.unreachable))
        for condition, value in self._original.axioms.items():
            # Assumptions of a specialized graph, and those implied by asserts.
            self.env.axioms.setdefault(self.to_fresh(condition), self.to_fresh(value))
        self.env._update_version_counter()
        self._copy_locations()
        self._copy_outputs()

    def copy_facts(self) -> None:
        """Copy the facts of the original environment to the new one, without evaluating them again.

        Both environments must be about the same inputs.
        """
        env, original, new = self.env, self._original, self.to_fresh
        for table in _BY_SYMBOL:
            # Use the original symbol objects as keys: equal distinct objects are slow to compare.
            ours, theirs = getattr(env, table), getattr(original, table)
            values = {new(s): ours.pop(new(s)) for s in theirs if new(s) in ours}
            ours.update(values)
        self._copy(_FACTS)
        env.num_deferred_runtime_asserts = original.num_deferred_runtime_asserts
        env._replacements_version_counter += len(env.replacements)  # 0: replaces nothing
        env._update_version_counter()
        env._resimplify_floor_div_axioms = original._resimplify_floor_div_axioms
        self._copy_outputs()

    def insert_asserts(self, gm: torch.fx.GraphModule) -> None:
        """Insert the runtime asserts into a graph over the new symbols, unless it has them.

        A graph whose inputs have no fake values is not changed.
        """
        if not self.env.deferred_runtime_asserts or not _has_values(gm):
            return
        marked = any(mark_of(fx_node) is not None for fx_node in gm.graph.nodes)
        if not insert_runtime_asserts(gm, self.env).inserted and not marked:
            strip_marked(gm, ASSERTS.__contains__)  # size-like nodes without an assert

    def freeze(self) -> None:
        """Freeze the new environment, as Dynamo freezes its own, and drop references to the original."""
        outputs = self.env.fake_tensor_cache
        for key in self._original.fake_tensor_cache:  # the keys contain original symbols
            outputs.pop(key, None)
        self.env.freeze()

    @property
    def has_other_names(self) -> bool:
        """Whether a symbol has another name in the new environment."""
        return bool(self._changed)

    def to_fresh(self, value: Any) -> Any:
        """An expression over the new symbols; other values unchanged."""
        return renamed(value, self._changed)

    def to_original(self, value: Any) -> Any:
        """An expression over the original symbols; other values unchanged."""
        return renamed(value, self._changed_back)

    def policy(self, context: Any) -> Any:
        """The ``SymbolicContext`` of a tensor that finds the new symbols for its sizes."""
        changes: dict[str, Any] = {}
        if hasattr(context, "shape_env_to_source_to_symbol_cache"):
            found = context.shape_env_to_source_to_symbol_cache.get(id(self._original), {})
            changes["shape_env_to_source_to_symbol_cache"] = {
                id(self.env): {name: self.to_fresh(expr) for name, expr in found.items()}
            }
        if getattr(context, "view_base_context", None) is not None:
            changes["view_base_context"] = self.policy(context.view_base_context)
        if hasattr(context, "inner_contexts"):
            parts = context.inner_contexts.items()
            changes["inner_contexts"] = {name: self.policy(part) for name, part in parts}
        return dataclasses.replace(context, **changes)

    # --- symbols ----------------------------------------------------------------------------------

    def _make(self, symbol: sympy.Symbol) -> sympy.Symbol:
        env, original = self.env, self._original
        sources = original.var_to_sources.get(symbol, [])
        if torch_symbols.symbol_is_type(symbol, SymT.UNBACKED_INT):
            new = env.create_unbacked_symint(sources[0] if sources else None).node.expr
        elif torch_symbols.symbol_is_type(symbol, SymT.UNBACKED_FLOAT):
            new = env.create_unbacked_symfloat().node.expr
        else:
            new = self._backed(symbol, sources)
        if _record(new).assumptions != _record(symbol).assumptions:
            raise _unsupported_symbol(symbol, "its assumptions are not torch's")
        if sources or new in env.var_to_sources:
            env.var_to_sources[new] = list(sources)
        if symbol in original.size_like:
            env.size_like.add(new)
        return new

    def _backed(self, symbol: sympy.Symbol, sources: Sequence[Any]) -> sympy.Symbol:
        original = self._original
        hint = original.backed_var_to_val.get(symbol)
        if hint is None:
            raise _unsupported_symbol(symbol, "it is backed and has no hint")
        bounds = original.var_to_range.get(symbol)
        source = sources[0] if sources else self._unknown_source(symbol)
        new = self.env.create_symbol(
            _number(hint),
            source,
            # Not DUCK: equal sizes share a symbol already.
            dynamic_dim=DimDynamic.DYNAMIC,
            positive=True if symbol.is_positive else None,
            do_not_specialize_zero_one=bounds is None or bool(bounds.lower < 2),
        )
        if not isinstance(new, sympy.Symbol):
            raise _unsupported_symbol(symbol, f"a size of {hint} gets no symbol")
        return new

    def _unknown_source(self, symbol: sympy.Symbol) -> Any:
        sources = torch_dynamo.dynamo_source()
        for i in itertools.count():
            source = sources.ConstantSource(f"__fakeify_{symbol.name}" + f"_{i}" * bool(i))
            if source.name not in self._original.source_to_var:
                return source
        raise AssertionError

    def _copy_outputs(self) -> None:
        """Copy the fake tensor cache, so that a backend need not run the operators again.

        Entries refer to symbols by name, not to an environment, and depend on facts of both. Entries of
        higher-order operators, which have addresses of graphs as keys, are not copied.
        """
        if self._changed:
            return
        for key, entry in self._original.fake_tensor_cache.items():
            if isinstance(key.key[0], torch_graphs.OpOverload):
                self.env.fake_tensor_cache[key] = entry

    def _copy(self, names: Sequence[str]) -> None:
        """Add the entries of attributes of the original environment, over the new symbols."""
        for name in names:
            ours, entries = getattr(self.env, name), getattr(self._original, name)
            moved = moved_over(
                dict(entries) if isinstance(entries, dict) else [*entries], self.to_fresh
            )
            (ours.extend if isinstance(ours, list) else ours.update)(moved)

    # --- facts ------------------------------------------------------------------------------------

    @contextmanager
    def _without_exclusions(self) -> Generator[None, None, None]:
        """Hide the exclusion constraints, which the fresh environment has from the policy."""
        saved = self._original.exclusion_constraints
        self._original.exclusion_constraints = []
        try:
            yield
        finally:
            self._original.exclusion_constraints = saved

    def _state_others(self, unreachable: frozenset[str]) -> None:
        """State the facts that the guard nodes of the graph do not cover."""
        for fact in assumed_facts(self._original):
            expr = self.to_fresh(fact.expr)
            if fact.what == "guard" and str(fact.expr) not in unreachable:
                continue  # it is, or follows from, guard nodes
            if self.env._maybe_evaluate_static(expr) == sympy.true:
                continue
            with caused_by(self.env, fact.location):
                self._state(fact, expr)

    def _state(self, fact: Fact, expr: sympy.Basic) -> None:
        env = self.env
        if expr.free_symbols <= env.backed_var_to_val.keys():
            if env.evaluate_expr(expr) != sympy.true:
                raise ShapeEnvError(
                    "a recorded fact does not hold for the recorded inputs",
                    where=str(fact.expr),
                    expected=str(expr),
                    found=", ".join(
                        f"{s} = {env.backed_var_to_val[s]}"
                        for s in sorted(expr.free_symbols, key=str)
                    ),
                    fix="The capture is damaged: record the frame again",
                )
        elif fact.what == "equality":
            symbol, expr = expr.args
            env._set_replacement(symbol, expr, "recorded")

    def _copy_locations(self) -> None:
        env, original = self.env, self._original
        for symbol, locations in original.var_to_range_sloc.items():
            new = self.symbols[symbol]
            bounds, ours = original.var_to_range.get(symbol), env.var_to_range.get(new)
            if bounds is not None and ours is not None:
                here = env.var_to_range_sloc[new]
                env.var_to_range_sloc[new] = locations_of_equal(bounds, ours, locations, here)
        env.specialization_stacks.update(original.specialization_stacks)
        for symbol, location in original.replacements_slocs.items():
            if self.symbols[symbol] in env.replacements:
                env.replacements_slocs[self.symbols[symbol]] = location


def moved_over(value: Any, over: Callable[[Any], Any]) -> Any:
    """An entry of a ``ShapeEnv``, or a container of entries, over the symbols of another one.

    Args:
        value: the entry; what has no symbols is returned itself.
        over: maps an expression to the other symbols, and other values to themselves.
    """
    move = _MOVES.get(type(value))
    return over(value) if move is None else move(value, over)


def _moved_specialization(specialization: Any, over: Callable[[Any], Any]) -> Any:
    check_fn: Any = specialization.check_fn
    if isinstance(check_fn, RecordedCondition):
        check_fn = RecordedCondition(over(check_fn.symbol), over(check_fn.condition))
    return torch_symbols.Specialization(specialization.source, check_fn)


def _moved_guard(guard: Any, over: Callable[[Any], Any]) -> Any:
    expr = over(guard.expr)
    return guard if expr is guard.expr else guard._replace(expr=expr)


_MOVES: dict[type, Callable[[Any, Callable[[Any], Any]], Any]] = {
    dict: lambda table, over: {over(k): moved_over(v, over) for k, v in table.items()},
    list: lambda entries, over: [moved_over(entry, over) for entry in entries],
    tuple: lambda entries, over: tuple(moved_over(entry, over) for entry in entries),
    set: lambda entries, over: set(map(over, entries)),
    torch_symbols.ShapeGuard: _moved_guard,
    torch_symbols.RuntimeAssert: lambda one, over: dataclasses.replace(
        one, expr=over(one.expr), stack=copy_stack(one.stack)
    ),
    torch_symbols.Specialization: _moved_specialization,
    # Torch changes these in place.
    ValueRangesSLoc: lambda at, _: ValueRangesSLoc(at.lower, at.upper),
    CapturedTraceback: lambda stack, _: copy_stack(stack),
    RecordedTraceback: lambda stack, _: copy_stack(stack),
}
"""How an entry is moved, by its class; of other classes only expressions have symbols."""


def locations_of_equal(bounds: Any, others: Any, locations: Any, other_locations: Any) -> Any:
    """The locations of the ends of a range that equal those of another range, else the other locations."""
    return ValueRangesSLoc(
        locations.lower if bounds.lower == others.lower else other_locations.lower,
        locations.upper if bounds.upper == others.upper else other_locations.upper,
    )


def defer_assert(env: Any, expr: Any, message: str, stack: Any | None) -> bool:
    """State a runtime assert with a message and a stack.

    Args:
        env: the environment.
        expr: the condition, over its symbols.
        message: the message of the assertion.
        stack: the ``CapturedTraceback`` of its cause; ``None`` leaves it to torch.

    Returns:
        False if the condition cannot hold.
    """
    groups = env.deferred_runtime_asserts
    keys = (None, *expr.free_symbols)  # one of them it is filed under
    before = {key: len(groups.get(key, ())) for key in keys}
    holds = env.guard_or_defer_runtime_assert(expr, message)
    for key, count in before.items():
        if stack is not None and key in groups and len(groups[key]) > count:
            groups[key][-1] = dataclasses.replace(groups[key][-1], stack=stack)
    return bool(holds)


@contextmanager
def caused_by(env: Any, location: Any) -> Generator[None, None, None]:
    """Set the ``SLoc`` of facts that a ``ShapeEnv`` adds inside; ``None`` leaves it to torch."""
    if location is None:
        yield
        return
    env._get_sloc = lambda *_args, **_kwargs: location
    try:
        yield
    finally:
        del env._get_sloc


def renamed(value: Any, symbols: Mapping[Any, Any]) -> Any:
    """An expression with other symbols; values of other classes and without these symbols unchanged."""
    # Not the sets' other way round, which would look at each of the symbols.
    if not isinstance(value, sympy.Basic) or symbols.keys().isdisjoint(value.free_symbols):
        return value
    names = {_record(s): _record(symbols[s]) for s in value.free_symbols & symbols.keys()}
    # Through records: `xreplace` would evaluate unevaluated expressions.
    return decode_expr(rename_symbols(encode_expr(value), names))


def _has_values(gm: torch.fx.GraphModule) -> bool:
    return all(
        "val" in fx_node.meta or "example_value" in fx_node.meta
        for fx_node in gm.graph.find_nodes(op="placeholder")
    )


def _symbols_of(env: Any) -> list[sympy.Symbol]:
    """All symbols of a ``ShapeEnv``, in the order in which they were made."""
    tables = (env.var_to_range, env.backed_var_to_val, env.var_to_sources, env.var_to_stack)
    return list(dict.fromkeys(symbol for table in tables for symbol in table))


def _record(symbol: Any) -> SymbolNode:
    record = encode_expr(symbol).nodes[0]
    assert isinstance(record, SymbolNode)
    return record


def _number(hint: Any) -> Any:
    if isinstance(hint, SingletonInt):
        nested: Any = hint
        return torch_symbols.make_nested_int(int(nested._val), int(nested._coeff))
    return int(hint) if hint.is_Integer else float(hint)


def _unsupported_symbol(symbol: sympy.Symbol, found: str) -> ShapeEnvError:
    return ShapeEnvError(
        "a symbol that a new ShapeEnv would not make",
        where=str(symbol),
        expected="a symbol of an input, or of what an operator gives",
        found=found,
        fix="Use the environment in its recorded state: instantiate()",
    )
