"""A new ``ShapeEnv`` that has learned what another one knows.

`env_restore` puts a state back; here the state comes about again: a ``ShapeEnv`` of the same
settings makes symbols for the same sources, runs the guard nodes of `replay` on inputs over them,
and is told what no input of a graph holds. What it knows then, torch's own rules have found.

====================================  ============================================================
of the first environment              in the new one
====================================  ============================================================
settings, ``co_fields``               the same
symbols                               made by the new one, under the same sources in the same order;
                                      names are as it gives them
hints, overrides, ``size_like``,      the same
``unbacked_inputs``, duck shapes
``specializations``, shape ids,       the same: they come with the policy by which inputs are made,
spec symbols, exclusion constraints   not with what was found out about them
guards, value ranges, replacements,   learned: those of inputs from the nodes of `insert_guards`,
``divisible``                         the others stated. A guard that follows from others is not
                                      among the guards
deferred runtime asserts              stated, with their messages and stacks; and nodes of the graph,
                                      unless it has them already
``axioms``                            the same, such as what a specialized graph assumes
stacks and locations                  the recorded ones, of each fact that is the same
frozen, ``_error_on_new_guards``      not set: the new environment goes on learning
cache of fake tensors                 the same, unless a symbol got another name
counters, versions, other caches      its own
====================================  ============================================================

A handoff is in the process of the first environment, about the very inputs of the frame: there
`FreshEnv.adopt` states the facts as they are found, the guards that follow from others among them.
It asks nothing, and both environments hold the same expression objects. To compare equal expressions
that are two objects takes torch more time than all else here.
"""

from __future__ import annotations

import dataclasses
import itertools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import sympy

from . import _torch
from ._torch import DimDynamic, SingletonInt, SymT, ValueRangesSLoc
from .conditions import RecordedCondition
from .desc import SymbolNode
from .errors import ShapeEnvError
from .expr_nodes import ASSERTS, mark_of, strip_marked
from .exprs import decode_expr, encode_expr
from .guard_facts import Fact, assumed_facts
from .renaming import rename_symbols
from .replay import insert_guards, learn
from .runtime_asserts import insert_runtime_asserts
from .sizes import narrow_range
from .stacks import copy_stack

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Mapping, Sequence

    import torch

__all__ = ["FreshEnv", "caused_by", "defer_assert", "specialization_over"]


_BY_SYMBOL: tuple[str, ...] = (
    # Attributes of a ``ShapeEnv`` with an entry for each symbol that it makes.
    "backed_var_to_val",
    "var_to_range",
    "var_to_range_sloc",
    "var_to_sources",
    "var_to_stack",
    "symbol_guard_counter",
)


class FreshEnv:
    """A ``ShapeEnv`` with the symbols of another one, which `learn` teaches its facts.

    Attributes:
        env: the new ``ShapeEnv``.
        symbols: its symbols by those of the other one.
        names: the same as records, for `rename_symbols`.

    Args:
        known: the environment that knows the facts. Nothing in it is changed.

    Raises:
        ShapeEnvError: it has a symbol that no ``ShapeEnv`` would make.
    """

    def __init__(self, known: Any) -> None:
        self._known = known
        # As of a restored environment: what torch checks there is a history of another process.
        self.env: Any = _torch.unvalidated_shape_env(
            co_fields=dict(known.co_fields), **dataclasses.asdict(known.settings)
        )
        self.symbols: dict[sympy.Symbol, sympy.Symbol] = {}
        with self.env.ignore_fresh_unbacked_symbols():  # no operator of a trace binds them
            for symbol in _symbols_of(known):
                self.symbols[symbol] = self._make(symbol)
        self.names = {_record(old): _record(new) for old, new in self.symbols.items()}
        self._moved: set[Any] = {old for old, new in self.symbols.items() if old != new}
        self._moved_names = {old: new for old, new in self.names.items() if old != new}
        self._moved_back = {new: old for old, new in self.symbols.items() if old != new}
        self._names_back = {new: old for old, new in self._moved_names.items()}
        self._copy_policy()

    def learn(
        self,
        gm: torch.fx.GraphModule,
        known: Sequence[Any],
        inputs: Sequence[Any],
    ) -> None:
        """Teach the new environment all facts of the other one.

        Args:
            gm: a graph that takes the inputs. It gets fake values and guard nodes.
            known: the inputs over the other environment's symbols, one for each placeholder.
            inputs: the same over the new environment's symbols.

        Raises:
            ShapeEnvError: the facts contradict one another, or the inputs.
        """
        for fx_node, value in zip(gm.graph.find_nodes(op="placeholder"), known, strict=True):
            fx_node.meta["val"] = value
        facts = _Facts(self)
        # An assert comes with a message; learned from a node first, it would have lost it.
        facts.asserts()
        facts.computed_ranges()
        with facts.without_exclusions():
            inserted = insert_guards(gm, self._known)
            learn(gm, inputs)
            facts.others(frozenset(inserted.unreachable))
        facts.axioms()
        facts.locations()
        self._copy_outputs()

    def adopt(self) -> None:
        """Let the new environment know what the other one does, each fact as it is found there.

        Nothing is asked and no guard is evaluated again: both are about the same inputs.
        """
        env, known, new = self.env, self._known, self.over_new
        env.guards.extend(
            guard if (expr := new(guard.expr)) is guard.expr else guard._replace(expr=expr)
            for guard in known.guards
        )
        for table in _BY_SYMBOL:
            # Under the symbols of the other one: equal, but maybe other objects, which takes torch
            # longer to compare.
            ours, theirs = getattr(env, table), getattr(known, table)
            values = {new(s): ours.pop(new(s)) for s in theirs if new(s) in ours}
            ours.update(values)
        env.var_to_range.update((new(s), bounds) for s, bounds in known.var_to_range.items())
        env.var_to_range_sloc.update(
            (new(s), ValueRangesSLoc(at.lower, at.upper))  # torch changes it in its place
            for s, at in known.var_to_range_sloc.items()
        )
        env.replacements.update((new(s), new(expr)) for s, expr in known.replacements.items())
        env.replacements_slocs.update((new(s), at) for s, at in known.replacements_slocs.items())
        env.divisible.update(map(new, known.divisible))
        env.axioms.update((new(expr), new(value)) for expr, value in known.axioms.items())
        for symbol, group in known.deferred_runtime_asserts.items():
            env.deferred_runtime_asserts[new(symbol)] = [
                dataclasses.replace(one, expr=new(one.expr), stack=copy_stack(one.stack))
                for one in group
            ]
        env.num_deferred_runtime_asserts = known.num_deferred_runtime_asserts
        env.specialization_stacks.update(known.specialization_stacks)
        env._replacements_version_counter += len(env.replacements)  # 0: replaces nothing
        env._update_version_counter()
        env._resimplify_floor_div_axioms = known._resimplify_floor_div_axioms
        self._copy_outputs()

    def assert_in(self, gm: torch.fx.GraphModule) -> None:
        """Make the runtime asserts nodes of a graph over the new symbols, unless they are there.

        A graph whose inputs have no fake values stays as it is; its asserts stay in the environment.
        """
        if not self.env.deferred_runtime_asserts or not _has_values(gm):
            return
        own = any(mark_of(fx_node) is not None for fx_node in gm.graph.nodes)
        if not insert_runtime_asserts(gm, self.env).inserted and not own:
            strip_marked(gm, ASSERTS.__contains__)  # what came along with no assert

    def finish(self) -> None:
        """End what the environment was made for: it keeps nothing of the other one alive.

        From now on no guard comes of what is found: Dynamo has frozen its own environment.
        """
        outputs = self.env.fake_tensor_cache
        for key in self._known.fake_tensor_cache:  # torch leaves the other's symbols in the keys
            outputs.pop(key, None)
        self.env.freeze()

    @property
    def has_other_names(self) -> bool:
        """Whether a symbol of the new environment has another name than the one that it is."""
        return bool(self._moved)

    def over_new(self, value: Any) -> Any:
        """An expression over the new symbols; anything else as it is."""
        return _over(value, self._moved, self._moved_names)

    def over_known(self, value: Any) -> Any:
        """An expression over the symbols of the other environment; anything else as it is."""
        return _over(value, self._moved_back, self._names_back)

    # --- symbols ----------------------------------------------------------------------------------

    def _make(self, symbol: sympy.Symbol) -> sympy.Symbol:
        env, known = self.env, self._known
        sources = known.var_to_sources.get(symbol, [])
        if _torch.symbol_is_type(symbol, SymT.UNBACKED_INT):
            new = env.create_unbacked_symint(sources[0] if sources else None).node.expr
        elif _torch.symbol_is_type(symbol, SymT.UNBACKED_FLOAT):
            new = env.create_unbacked_symfloat().node.expr
        else:
            new = self._backed(symbol, sources)
        if _record(new).assumptions != _record(symbol).assumptions:
            raise _unlikely(symbol, "its assumptions are not torch's")
        if sources or new in env.var_to_sources:
            env.var_to_sources[new] = list(sources)
        if symbol in known.size_like:
            env.size_like.add(new)
        return new

    def _backed(self, symbol: sympy.Symbol, sources: Sequence[Any]) -> sympy.Symbol:
        known = self._known
        hint = known.backed_var_to_val.get(symbol)
        if hint is None:
            raise _unlikely(symbol, "it is backed and has no hint")
        bounds = known.var_to_range.get(symbol)
        source = sources[0] if sources else self._unknown_source(symbol)
        new = self.env.create_symbol(
            _number(hint),
            source,
            # Sizes that are one symbol share it already.
            dynamic_dim=DimDynamic.DYNAMIC,
            positive=True if symbol.is_positive else None,
            do_not_specialize_zero_one=bounds is None or bool(bounds.lower < 2),
        )
        if not isinstance(new, sympy.Symbol):
            raise _unlikely(symbol, f"a size of {hint} gets no symbol")
        return new

    def _unknown_source(self, symbol: sympy.Symbol) -> Any:
        sources = _torch.dynamo_source()
        for i in itertools.count():
            source = sources.ConstantSource(f"__fakeify_{symbol.name}" + f"_{i}" * bool(i))
            if source.name not in self._known.source_to_var:
                return source
        raise AssertionError

    def _copy_outputs(self) -> None:
        """What operators gave for sizes over these symbols, so that a backend need not ask again.

        An entry of torch's cache names symbols and no environment, and rests on facts that are known
        here too. That of a higher order operator goes by the address of a graph, and stays behind.
        """
        if self._moved:
            return
        for key, entry in self._known.fake_tensor_cache.items():
            if isinstance(key.key[0], _torch.OpOverload):
                self.env.fake_tensor_cache[key] = entry

    def _copy_policy(self) -> None:
        """What is known of inputs before anything is asked about them."""
        env, known, new = self.env, self._known, self.over_new
        env.source_to_var.clear()  # in the order of the other, which has all sources of a symbol
        env.source_to_var.update((name, new(expr)) for name, expr in known.source_to_var.items())
        env.source_to_symbol.update(known.source_to_symbol)
        env.source_name_to_debug_name.update(known.source_name_to_debug_name)
        env.val_to_var.update((number, new(symbol)) for number, symbol in known.val_to_var.items())
        for table in (
            "var_to_hint_override",
            "real_tensor_prop_unbacked_vals",
            "unbacked_alloc_order",
            "unbacked_renamings",
        ):
            ours: Any = getattr(env, table)
            ours.update((new(key), new(value)) for key, value in getattr(known, table).items())
        env.var_to_stack.update((new(s), copy_stack(at)) for s, at in known.var_to_stack.items())
        env.unbacked_inputs.update(new(symbol) for symbol in known.unbacked_inputs)
        env.exclusion_constraints.extend((new(s), n) for s, n in known.exclusion_constraints)
        for specialization in known.specializations:
            env.specializations.add(specialization_over(specialization, new))
        for table in ("_shape_id_to_unbacked_symbol", "_spec_symbol_to_compile_symbol"):
            getattr(env, table).update((k, new(v)) for k, v in getattr(known, table).items())
        env._shape_spec_pending_assumptions.extend(
            (set(free), new(condition)) for free, condition in known._shape_spec_pending_assumptions
        )


def specialization_over(specialization: Any, over: Callable[[Any], Any]) -> Any:
    """A condition to specialize on, over other symbols.

    Args:
        specialization: torch's ``Specialization``.
        over: gives an expression over the other symbols.
    """
    check_fn: Any = specialization.check_fn
    if isinstance(check_fn, RecordedCondition):
        check_fn = RecordedCondition(over(check_fn.symbol), over(check_fn.condition))
    return _torch.Specialization(specialization.source, check_fn)


def defer_assert(env: Any, expr: Any, one: Any) -> bool:
    """State a runtime assert with the message and the stack that another environment has of it.

    Args:
        env: the environment.
        expr: the condition, over its symbols.
        one: torch's ``RuntimeAssert`` of the other environment.

    Returns:
        Whether it may hold.
    """
    groups = env.deferred_runtime_asserts
    keys = (None, *expr.free_symbols)  # one of them it is filed under
    before = {key: len(groups.get(key, ())) for key in keys}
    holds = env.guard_or_defer_runtime_assert(expr, one.msg)
    for key, count in before.items():
        if key in groups and len(groups[key]) > count:
            groups[key][-1] = dataclasses.replace(groups[key][-1], stack=copy_stack(one.stack))
    return bool(holds)


@contextmanager
def caused_by(env: Any, location: Any) -> Generator[None, None, None]:
    """Facts that a ``ShapeEnv`` learns inside have this ``SLoc``; ``None`` leaves it to torch."""
    if location is None:
        yield
        return
    env._get_sloc = lambda *_args, **_kwargs: location
    try:
        yield
    finally:
        del env._get_sloc


def _over(value: Any, moved: Collection[Any], names: Mapping[SymbolNode, SymbolNode]) -> Any:
    if not isinstance(value, sympy.Basic) or value.free_symbols.isdisjoint(moved):
        return value
    # As a record: `xreplace` would evaluate what torch has left unevaluated.
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


def _record(symbol: sympy.Symbol) -> SymbolNode:
    record = encode_expr(symbol).nodes[0]
    assert isinstance(record, SymbolNode)
    return record


def _number(hint: Any) -> Any:
    if isinstance(hint, SingletonInt):
        nested: Any = hint
        return _torch.make_nested_int(int(nested._val), int(nested._coeff))
    return int(hint) if hint.is_Integer else float(hint)


def _unlikely(symbol: sympy.Symbol, found: str) -> ShapeEnvError:
    return ShapeEnvError(
        "a symbol that a new ShapeEnv would not make",
        where=str(symbol),
        expected="a symbol of an input, or of what an operator gives",
        found=found,
        fix="Use the environment in its recorded state: instantiate()",
    )


# --- facts ----------------------------------------------------------------------------------------


class _Facts:
    """What one environment knows, told to another one."""

    def __init__(self, fresh: FreshEnv) -> None:
        self._env = fresh.env
        self._known = fresh._known  # pyright: ignore[reportPrivateUsage]
        self._symbols = fresh.symbols
        self._new = fresh.over_new

    def asserts(self) -> None:
        """The deferred runtime asserts, with their messages and stacks."""
        for group in self._known.deferred_runtime_asserts.values():
            for one in group:
                defer_assert(self._env, self._new(one.expr), one)

    def computed_ranges(self) -> None:
        """The ranges of symbols that no guard can check: what an operator says of its result."""
        for symbol, bounds in self._known.var_to_range.items():
            if symbol not in self._known.backed_var_to_val:
                narrow_range(self._env, self._symbols[symbol], bounds)

    @contextmanager
    def without_exclusions(self) -> Generator[None, None, None]:
        """Exclusions belong to the policy: the new environment has them already."""
        kept = self._known.exclusion_constraints
        self._known.exclusion_constraints = []
        try:
            yield
        finally:
            self._known.exclusion_constraints = kept

    def others(self, unreachable: frozenset[str]) -> None:
        """State what the inputs of the graph did not tell."""
        for fact in assumed_facts(self._known):
            expr = self._new(fact.expr)
            if fact.what == "guard" and str(fact.expr) not in unreachable:
                continue  # said by a node, or it follows from what the nodes say
            if self._env._maybe_evaluate_static(expr) == sympy.true:
                continue
            with caused_by(self._env, fact.location):
                self._state(fact, expr)

    def _state(self, fact: Fact, expr: sympy.Basic) -> None:
        env = self._env
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

    def axioms(self) -> None:
        """What a specialized graph may assume, which no guard says; and what asserts imply."""
        for condition, value in self._known.axioms.items():
            self._env.axioms.setdefault(self._new(condition), self._new(value))
        self._env._update_version_counter()

    def locations(self) -> None:
        """Who caused a range or a replacement is who caused it in the other environment."""
        env, known = self._env, self._known
        for symbol, locations in known.var_to_range_sloc.items():
            bounds, ours = (
                known.var_to_range.get(symbol),
                env.var_to_range.get(self._symbols[symbol]),
            )
            if bounds is not None and ours is not None:
                here = env.var_to_range_sloc[self._symbols[symbol]]
                lower = locations.lower if bounds.lower == ours.lower else here.lower
                upper = locations.upper if bounds.upper == ours.upper else here.upper
                env.var_to_range_sloc[self._symbols[symbol]] = ValueRangesSLoc(lower, upper)
        env.specialization_stacks.update(known.specialization_stacks)
        for symbol, location in known.replacements_slocs.items():
            if self._symbols[symbol] in env.replacements:
                env.replacements_slocs[self._symbols[symbol]] = location
