"""``snapshot``: the whole state of a ``ShapeEnv`` as a record.

`attribute_policies.SHAPE_ENV_ATTRIBUTES` classifies every attribute of torch's ``ShapeEnv``. A
snapshot only reads attributes: no guard is added, no counter changes. A restored environment
(`restore`) is a new ``ShapeEnv`` that behaves as the original: it has the same simplifications, duck
shapes, names for the next fresh symbols, and guards with the user's line that caused them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import sympy
import torch

from torch_fakeify.compat.arguments import check_shape_env
from torch_fakeify.compat.attribute_policies import SHAPE_ENV_ATTRIBUTES, unknown_attributes
from torch_fakeify.compat.torch_symbols import SingletonInt
from torch_fakeify.encoding.conditions import DIM, RecordedCondition, evaluate_condition
from torch_fakeify.encoding.exprs import encode_expr
from torch_fakeify.encoding.sources import encode_source
from torch_fakeify.encoding.stacks import encode_location, encode_stack
from torch_fakeify.errors import ShapeEnvError, UnsupportedValueError
from torch_fakeify.records.shape_env import (
    IMPLIED_KEYS,
    AssumptionDesc,
    GuardDesc,
    OrderDesc,
    ReplacementDesc,
    RuntimeAssertDesc,
    ShapeEnvDesc,
    ShapeEnvSettingsDesc,
    SpecializationDesc,
    SymbolDesc,
)
from torch_fakeify.records.tensor import SymbolNode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch_fakeify.records.shape_env import LocationDesc
    from torch_fakeify.records.tensor import ExprDesc

_T = TypeVar("_T")


# --- snapshot -----------------------------------------------------------------------------------


def snapshot(env: Any) -> ShapeEnvDesc:
    """The state of a ``ShapeEnv`` as a record; the environment is not changed.

    Raises:
        ShapeEnvError: the environment has an attribute that no supported torch has, or an entry of a
            type that torch never makes; nothing is dropped silently.
        UnsupportedValueError: an expression or a source has no record.

    Example:
        >>> from torch.fx.experimental.symbolic_shapes import ShapeEnv
        >>> tfk.snapshot(ShapeEnv()).guards
        ()
    """
    check_shape_env(env)
    unknown = unknown_attributes(env, SHAPE_ENV_ATTRIBUTES)
    if unknown:
        raise ShapeEnvError(
            "the ShapeEnv has an attribute that a snapshot does not support",
            expected="the attributes of torch's ShapeEnv",
            found=", ".join(unknown),
            fix="Remove the attribute, or use a version of torch_fakeify for this torch.",
        )
    return _Snapshot(env).desc()


class _Snapshot:
    """Builds one snapshot; an object shared in the environment is shared in the record."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self._exprs: dict[int, ExprDesc] = {}
        self._shared: dict[ExprDesc, ExprDesc] = {}
        self._stacks: dict[int, Any] = {}
        self._alive: list[object] = []

    def desc(self) -> ShapeEnvDesc:
        env, expr = self.env, self.expr
        symbols = self.symbols()
        return ShapeEnvDesc(
            settings=ShapeEnvSettingsDesc(
                **{n: getattr(env.settings, n) for n in ShapeEnvSettingsDesc.__struct_fields__}
            ),
            symbols=tuple(symbols.values()),
            orders=self.orders(symbols),
            replacements=tuple(
                ReplacementDesc(symbol=expr(k), expr=expr(v)) for k, v in env.replacements.items()
            ),
            divisible=tuple(sorted(map(expr, env.divisible), key=repr)),
            guards=tuple(
                GuardDesc(
                    expr=expr(guard.expr),
                    location=self.location(guard.sloc),
                    size_oblivious=guard.size_oblivious,
                )
                for guard in env.guards
            ),
            runtime_asserts=tuple(
                RuntimeAssertDesc(
                    symbol=None if symbol is None else expr(symbol),
                    expr=expr(runtime_assert.expr),
                    msg=_typed(runtime_assert.msg, str, "deferred_runtime_asserts"),
                    stack=self._encoded_once(runtime_assert.stack, encode_stack),
                )
                for symbol, group in env.deferred_runtime_asserts.items()
                for runtime_assert in group
            ),
            hint_overrides=tuple(
                (expr(k), _typed(v, int, "var_to_hint_override"))
                for k, v in env.var_to_hint_override.items()
                if not isinstance(k, sympy.Symbol)
            ),
            duck_shapes=tuple((self.number(k), expr(v)) for k, v in env.val_to_var.items()),
            source_name_to_debug_name=tuple(env.source_name_to_debug_name.items()),
            unique_ids=tuple(sorted(env.unique_ids)),
            version_counter=int(env._version_counter),  # may be a `SkippingCounter`
            replacements_version_counter=int(env._replacements_version_counter),
            counter=tuple(env.counter.items()),
            exclusion_constraints=tuple(
                (expr(k), _typed(v, int, "exclusion_constraints"))
                for k, v in env.exclusion_constraints
            ),
            specializations=tuple(map(self.specialization, env.specializations)),
            specialization_stacks=tuple(
                (encode_source(k), self._encoded_once(v, encode_stack))
                for k, v in env.specialization_stacks.items()
            ),
            pending_assumptions=tuple(
                AssumptionDesc(
                    free=tuple(sorted(map(expr, free), key=repr)), condition=expr(condition)
                )
                for free, condition in env._shape_spec_pending_assumptions
            ),
            # The next change would compute this from the cache key, which is not in the record.
            resimplify_floor_div_axioms=env._resimplify_floor_div_axioms
            or len(env.divisible) != env._prev_cache_key[1],
            co_fields=tuple((k, _co_field(k, v)) for k, v in env.co_fields.items()),
            **self.fields(),
        )

    def fields(self) -> dict[str, Any]:
        encoders: dict[str, Callable[[Any], Any]] = {
            "plain": lambda value: value,
            "exprs": lambda exprs: tuple(map(self.expr, exprs)),
            "pairs": lambda table: tuple((self.expr(k), self.expr(v)) for k, v in table.items()),
            "named": lambda table: tuple((name, self.expr(v)) for name, v in table.items()),
        }
        return {
            attribute.why: encoders[attribute.kind](getattr(self.env, name))
            for name, attribute in SHAPE_ENV_ATTRIBUTES.items()
            if attribute.kind is not None
        }

    # --- the symbols ---

    def symbols(self) -> dict[sympy.Symbol, SymbolDesc]:
        env = self.env
        tables = (
            env.var_to_range,
            env.symbol_guard_counter,
            env.var_to_sources,
            env.backed_var_to_val,
            env.var_to_stack,
            env.var_to_range_sloc,
            env.unbacked_alloc_order,
            env.replacements_slocs,
            env.real_tensor_prop_unbacked_vals,
            [k for k in env.var_to_hint_override if isinstance(k, sympy.Symbol)],
            env.unbacked_inputs,
            sorted(env.size_like, key=str),
        )
        found = dict.fromkeys(symbol for table in tables for symbol in table)
        return {symbol: self.symbol(symbol) for symbol in found}

    def symbol(self, symbol: sympy.Symbol) -> SymbolDesc:
        env = self.env
        record = self.expr(symbol).nodes[0]
        if not isinstance(record, SymbolNode):
            raise ShapeEnvError(
                "an entry of the ShapeEnv is not about a symbol",
                expected="a sympy.Symbol",
                found=str(symbol),
            )

        def entry(table: str, encode: Callable[[Any], _T], part: str | None = None) -> _T | None:
            value = getattr(env, table).get(symbol)
            if value is None:
                return None
            return encode(value if part is None else getattr(value, part))

        return SymbolDesc(
            name=record.name,
            assumptions=record.assumptions,
            sources=tuple(map(encode_source, env.var_to_sources.get(symbol, ()))),
            hint=entry("backed_var_to_val", self.number),
            hint_override=entry(
                "var_to_hint_override", lambda n: _typed(n, int, "var_to_hint_override")
            ),
            real_value=entry("real_tensor_prop_unbacked_vals", self.number),
            lower=entry("var_to_range", self.expr, "lower"),
            upper=entry("var_to_range", self.expr, "upper"),
            lower_location=entry("var_to_range_sloc", self.location, "lower"),
            upper_location=entry("var_to_range_sloc", self.location, "upper"),
            stack=self._encoded_once(env.var_to_stack.get(symbol), encode_stack),
            replacement_location=self.location(env.replacements_slocs.get(symbol)),
            guard_count=env.symbol_guard_counter.get(symbol),
            alloc_order=env.unbacked_alloc_order.get(symbol),
            size_like=symbol in env.size_like,
            unbacked_input=symbol in env.unbacked_inputs,
        )

    def orders(self, symbols: Mapping[sympy.Symbol, SymbolDesc]) -> tuple[OrderDesc, ...]:
        """The key orders that `restore` cannot derive from the symbols' records."""
        by_symbol = {self.expr(symbol): record for symbol, record in symbols.items()}
        found: list[OrderDesc] = []
        for table, has in IMPLIED_KEYS.items():
            keys = [self.expr(k) for k in getattr(self.env, table) if isinstance(k, sympy.Symbol)]
            if keys != [symbol for symbol, record in by_symbol.items() if has(record)]:
                found.append(OrderDesc(table=table, keys=tuple(keys)))
        groups = self.env.deferred_runtime_asserts
        if not all(groups.values()):
            keys = tuple(None if k is None else self.expr(k) for k in groups)
            found.append(OrderDesc(table="deferred_runtime_asserts", keys=keys))
        return tuple(found)

    # --- parts ---

    def expr(self, expr: Any) -> ExprDesc:
        found = self._exprs.get(id(expr))
        if found is None:
            self._alive.append(expr)
            encoded = encode_expr(expr)
            found = self._exprs[id(expr)] = self._shared.setdefault(encoded, encoded)
        return found

    def number(self, value: Any) -> ExprDesc:
        if isinstance(value, torch.SymInt):
            sym_node: Any = value.node
            if not sym_node.is_nested_int():
                raise ShapeEnvError(
                    "a duck shape under a symbolic size",
                    where="val_to_var",
                    expected="int, float or nested int",
                    found=str(value),
                )
            return self.expr(SingletonInt(sym_node.nested_int(), coeff=sym_node.nested_int_coeff()))
        if isinstance(value, (int, float)):
            return self.expr(sympy.sympify(value, strict=True))
        return self.expr(value)

    def _encoded_once(self, stack: Any, encode: Callable[[Any], _T]) -> _T:
        if id(stack) not in self._stacks:
            self._alive.append(stack)
            self._stacks[id(stack)] = encode(stack)
        return self._stacks[id(stack)]

    def location(self, location: Any) -> LocationDesc | None:
        return self._encoded_once(location, encode_location)

    def specialization(self, specialization: Any) -> SpecializationDesc:
        check_fn = specialization.check_fn
        if isinstance(check_fn, RecordedCondition):
            symbol, condition = check_fn.symbol, check_fn.condition
        else:
            found = self.env.source_to_var.get(specialization.source.name)
            symbol = found if isinstance(found, sympy.Symbol) else DIM
            condition = evaluate_condition(check_fn, symbol)
        return SpecializationDesc(
            source=encode_source(specialization.source),
            symbol=self.expr(symbol),
            condition=self.expr(condition),
        )


def _typed(value: Any, kind: type[_T], table: str) -> _T:
    if type(value) is not kind:
        raise ShapeEnvError(
            f"an entry of `{table}` that a snapshot does not support",
            expected=kind.__name__,
            found=f"{type(value).__name__} {value!r}",
        )
    return value


def _co_field(name: str, value: Any) -> str | int | float | bool | None:
    if value is not None and type(value) not in (str, int, float, bool):
        raise UnsupportedValueError(
            "a field of co_fields has an unsupported type",
            where=f"co_fields[{name!r}]",
            expected="str, int, float, bool or None",
            found=type(value).__name__,
        )
    return value
