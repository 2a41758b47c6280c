"""``restore``: a new ``ShapeEnv`` from its record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec
import sympy

from torch_fakeify.compat.attribute_policies import SHAPE_ENV_ATTRIBUTES
from torch_fakeify.compat.torch_symbols import (
    RuntimeAssert,
    ShapeGuard,
    SingletonInt,
    Specialization,
    ValueRanges,
    ValueRangesSLoc,
    make_nested_int,
    register_symbol,
    reserve_nested_int,
    unvalidated_shape_env,
)
from torch_fakeify.encoding.conditions import RecordedCondition
from torch_fakeify.encoding.exprs import decode_expr
from torch_fakeify.encoding.nested_ints import MAX_NESTED_INT
from torch_fakeify.encoding.sources import DecodeMemo, decode_source, name_of
from torch_fakeify.encoding.stacks import decode_location, decode_stack
from torch_fakeify.errors import FormatError, check_type
from torch_fakeify.records.shape_env import IMPLIED_KEYS, ShapeEnvDesc, SymbolDesc
from torch_fakeify.records.tensor import ExprDesc, SymbolNode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch_fakeify.records.shape_env import LocationDesc
    from torch_fakeify.records.tensor import SourceDesc

_T = TypeVar("_T")


def restore(d: ShapeEnvDesc) -> Any:
    """A new ``ShapeEnv`` with the state of a record.

    It records no events and does no translation validation, independent of torch's configuration:
    both check a history that a restored environment does not have.

    Raises:
        FormatError: the record contradicts itself, with its ``$.path``.
        UnknownNameError: it names an unknown function, constant or source.

    Example:
        >>> from torch.fx.experimental.symbolic_shapes import ShapeEnv
        >>> record = tfk.snapshot(ShapeEnv())
        >>> tfk.snapshot(tfk.restore(record)) == record
        True
    """
    check_type(d, ShapeEnvDesc, "the record of a shape environment", FormatError)
    return _Restore(d).env()


class _Restore:
    """Builds one ``ShapeEnv``; an object shared in the record is shared in the result."""

    def __init__(self, d: ShapeEnvDesc) -> None:
        self.d = d
        self._exprs: dict[int, sympy.Basic] = {}
        self._sources = DecodeMemo()
        self._locations: dict[int, Any] = {}
        self._records: dict[ExprDesc, SymbolDesc] = {}
        self._symbols: dict[ExprDesc, sympy.Symbol] = {}
        self._alive: list[ExprDesc] = []
        self._names: dict[str, str] = {}

    def env(self) -> Any:
        d = self.d
        settings = msgspec.structs.asdict(d.settings)
        env: Any = unvalidated_shape_env(co_fields=dict(d.co_fields), **settings)
        self.fill_symbols(env)
        self.fill_facts(env)
        self.fill_names(env)
        env.unique_ids.update(d.unique_ids)
        env._version_counter = d.version_counter
        env._replacements_version_counter = d.replacements_version_counter
        env.counter.update(dict(d.counter))
        env._resimplify_floor_div_axioms = d.resimplify_floor_div_axioms
        self.fill_fields(env)
        env._prev_cache_key = env._get_key()
        return env

    # --- attributes ---

    def fill_symbols(self, env: Any) -> None:
        for i, record in enumerate(self.d.symbols):
            where = f"$.symbols[{i}]"
            key = ExprDesc(nodes=(SymbolNode(record.name, record.assumptions),))
            if key in self._records:
                _fail(where, "a symbol occurs twice", "distinct symbols", record.name)
            self._records[key] = record
            self._symbols[key] = self.symbol(key, where)
            self._alive.append(key)
            register_symbol(env, self._symbols[key])
            if record.size_like:
                env.size_like.add(self._symbols[key])
        orders = self.orders()
        fillers = {
            "backed_var_to_val": lambda s, w: self.number(s.hint, f"{w}.hint"),
            "real_tensor_prop_unbacked_vals": lambda s, w: self.number(
                s.real_value, f"{w}.real_value"
            ),
            "replacements_slocs": lambda s, _: self.location(s.replacement_location),
            "symbol_guard_counter": lambda s, w: _present(s.guard_count, f"{w}.guard_count"),
            "unbacked_alloc_order": lambda s, w: _present(s.alloc_order, f"{w}.alloc_order"),
            "var_to_hint_override": lambda s, w: _present(s.hint_override, f"{w}.hint_override"),
            "var_to_range": self.value_range,
            "var_to_range_sloc": lambda s, _: ValueRangesSLoc(
                self.location(s.lower_location), self.location(s.upper_location)
            ),
            "var_to_sources": lambda s, w: [
                self.source(source, f"{w}.sources[{i}]") for i, source in enumerate(s.sources)
            ],
            "var_to_stack": lambda s, _: decode_stack(s.stack),
        }
        positions = {key: i for i, key in enumerate(self._records)}
        for table, fill in fillers.items():
            entries: Any = getattr(env, table)
            for key in orders[table]:
                where = f"$.symbols[{positions[key]}]"
                entries[self._symbols[key]] = fill(self._records[key], where)
        for key in orders["unbacked_inputs"]:
            env.unbacked_inputs.add(self._symbols[key])
        for i, (expr, override) in enumerate(self.d.hint_overrides):
            env.var_to_hint_override[self.expr(expr, f"$.hint_overrides[{i}][0]")] = override

    def orders(self) -> dict[str, list[ExprDesc]]:
        orders: dict[str, list[ExprDesc]] = {
            table: [key for key, record in self._records.items() if has(record)]
            for table, has in IMPLIED_KEYS.items()
        }
        for i, order in enumerate(self.d.orders):
            if order.table == "deferred_runtime_asserts":
                continue
            where = f"$.orders[{i}].keys"
            keys = [key for key in order.keys if key in self._records]
            if len(keys) != len(order.keys) or len(set(keys)) != len(keys):
                _fail(
                    where, "not keys of symbols", "symbols of this record, each once", order.table
                )
            if not set(orders[order.table]) <= set(keys):
                _fail(where, "keys are missing", "every symbol that has a value", order.table)
            orders[order.table] = keys
        return orders

    def fill_facts(self, env: Any) -> None:
        d = self.d
        for i, replacement in enumerate(d.replacements):
            where = f"$.replacements[{i}]"
            symbol = self.symbol(replacement.symbol, f"{where}.symbol")
            env.replacements[symbol] = self.expr(replacement.expr, f"{where}.expr")
        env.divisible.update(self.each(d.divisible, "$.divisible"))
        for i, guard in enumerate(d.guards):
            expr: Any = self.expr(guard.expr, f"$.guards[{i}].expr")
            sloc = self.location(guard.location)
            env.guards.append(ShapeGuard(expr, sloc, guard.size_oblivious))
        self.fill_runtime_asserts(env)
        for i, (symbol, value) in enumerate(d.exclusion_constraints):
            expr = self.expr(symbol, f"$.exclusion_constraints[{i}][0]")
            env.exclusion_constraints.append((expr, value))
        for i, assumption in enumerate(d.pending_assumptions):
            where = f"$.pending_assumptions[{i}]"
            free = set(self.each(assumption.free, f"{where}.free"))
            condition = self.expr(assumption.condition, f"{where}.condition")
            env._shape_spec_pending_assumptions.append((free, condition))

    def fill_runtime_asserts(self, env: Any) -> None:
        groups = env.deferred_runtime_asserts
        for i, order in enumerate(self.d.orders):
            if order.table != "deferred_runtime_asserts":
                continue
            for j, key in enumerate(order.keys):
                where = f"$.orders[{i}].keys[{j}]"
                groups[None if key is None else self.symbol(key, where)] = []
        for i, record in enumerate(self.d.runtime_asserts):
            where = f"$.runtime_asserts[{i}]"
            symbol = None
            if record.symbol is not None:
                symbol = self.symbol(record.symbol, f"{where}.symbol")
            expr: Any = self.expr(record.expr, f"{where}.expr")
            stack: Any = decode_stack(record.stack)
            groups.setdefault(symbol, []).append(RuntimeAssert(expr, record.msg, stack))

    def fill_names(self, env: Any) -> None:
        d = self.d
        for i, (number, symbol) in enumerate(d.duck_shapes):
            where = f"$.duck_shapes[{i}]"
            key = _python_number(self.number(number, f"{where}[0]"), f"{where}[0]")
            env.val_to_var[key] = self.symbol(symbol, f"{where}[1]")
        env.source_name_to_debug_name.update(
            (self._names.get(name, name), debug) for name, debug in d.source_name_to_debug_name
        )
        for i, record in enumerate(d.specializations):
            where = f"$.specializations[{i}]"
            condition: Any = RecordedCondition(
                self.symbol(record.symbol, f"{where}.symbol"),
                self.expr(record.condition, f"{where}.condition"),
            )
            source = self.source(record.source, f"{where}.source")
            env.specializations.add(Specialization(source, condition))
        for i, (source, stack) in enumerate(d.specialization_stacks):
            key = self.source(source, f"$.specialization_stacks[{i}][0]")
            traceback = decode_stack(stack)
            env.specialization_stacks[key] = None if traceback is None else traceback.summary()

    def fill_fields(self, env: Any) -> None:
        for name, attribute in SHAPE_ENV_ATTRIBUTES.items():
            field = attribute.why
            match attribute.kind:
                case None:
                    pass
                case "plain":
                    setattr(env, name, getattr(self.d, field))
                case "exprs":
                    getattr(env, name).extend(self.each(getattr(self.d, field), f"$.{field}"))
                case kind:
                    # Names of sources; those of this torch differ from a few recorded.
                    names = self._names
                    for i, (key, value) in enumerate(getattr(self.d, field)):
                        at = f"$.{field}[{i}]"
                        key = names.get(key, key) if kind == "named" else self.expr(key, f"{at}[0]")
                        getattr(env, name)[key] = self.expr(value, f"{at}[1]")

    # --- parts ---

    def expr(self, d: ExprDesc, where: str) -> sympy.Basic:
        found = self._exprs.get(id(d))
        if found is None:
            self._alive.append(d)
            try:
                found = decode_expr(d)
            except FormatError as error:
                raise _under(where, error) from None
            self._exprs[id(d)] = found
        return found

    def symbol(self, d: ExprDesc, where: str) -> sympy.Symbol:
        expr = self.expr(d, where)
        if not isinstance(expr, sympy.Symbol):
            _fail(where, "not a symbol", "a symbol", type(expr).__name__)
        return expr

    def number(self, d: ExprDesc | None, where: str) -> sympy.Basic:
        expr = self.expr(_present(d, where), where)
        if expr.free_symbols or not isinstance(
            expr, (sympy.Number, SingletonInt, sympy.logic.boolalg.BooleanAtom)
        ):
            _fail(where, "not a number", "a number", type(expr).__name__)
        return expr

    def value_range(self, record: SymbolDesc, where: str) -> Any:
        lower: Any = self.expr(_present(record.lower, f"{where}.lower"), f"{where}.lower")
        upper: Any = self.expr(_present(record.upper, f"{where}.upper"), f"{where}.upper")
        try:
            return ValueRanges(lower, upper)
        except (TypeError, RuntimeError, AssertionError):
            # ValueRangeError, a RuntimeError, for empty ranges
            _fail(where, "not a value range", "lower <= upper", f"[{lower}, {upper}]")

    def source(self, d: SourceDesc, where: str) -> Any:
        try:
            found: Any = decode_source(d, memo=self._sources)
        except FormatError as error:
            raise _under(where, error) from None
        # Versions of torch name an element of a set differently.
        source = found
        while d.name != (name := name_of(found)):
            self._names[d.name] = name
            if d.base is None:
                break
            d, found = d.base, found.base
        return source

    def location(self, d: LocationDesc | None) -> Any:
        if id(d) not in self._locations:
            self._locations[id(d)] = decode_location(d)
        return self._locations[id(d)]

    def each(self, exprs: Iterable[ExprDesc], where: str) -> list[sympy.Basic]:
        return [self.expr(expr, f"{where}[{i}]") for i, expr in enumerate(exprs)]


def _python_number(number: sympy.Basic, where: str) -> Any:
    if isinstance(number, SingletonInt):
        nested: Any = number
        if type(nested._coeff) is not int:
            _fail(where, "not a size", "a nested int times a number", f"times {nested._coeff}")
        number_bits = int(nested._val).bit_length()
        if not 0 <= nested._val < MAX_NESTED_INT:
            _fail(where, "not a size", "a nested int of torch's", f"{number_bits} bits")
        reserve_nested_int(int(nested._val))
        # An instance of torch's Python class: as a key, one of the C++ class would not equal it.
        return make_nested_int(int(nested._val), nested._coeff)
    if not isinstance(number, sympy.Number):
        _fail(where, "not a size", "a number", type(number).__name__)
    return int(number) if isinstance(number, sympy.Integer) else float(number)


def _present(value: _T | None, where: str) -> _T:
    if value is None:
        _fail(where, "a value is missing", "one, since the symbol is a key", "none")
    return value


def _under(where: str, error: FormatError) -> FormatError:
    """The error with its path prefixed by ``where``."""
    error.where = where + (error.where or "$").removeprefix("$")
    return error


def _fail(where: str, what: str, expected: str, found: str) -> NoReturn:
    raise FormatError(what, where=where, expected=expected, found=found)
