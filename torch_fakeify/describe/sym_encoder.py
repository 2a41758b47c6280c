"""Encoder of symbolic sizes with caches.

A frame's tensors share a few expressions: each expression object is encoded once, and equal sizes are
one record. The records equal those of `exprs.encode_int`.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import sympy
import torch

from torch_fakeify.compat.torch_symbols import SingletonInt, make_nested_int
from torch_fakeify.encoding.exprs import encode_expr, encode_int, encode_sym
from torch_fakeify.encoding.nested_ints import NestedIntNumbers, is_nested_int
from torch_fakeify.records.id_owners import Numbering
from torch_fakeify.records.tensor import IntNode, SymbolFactDesc, SymDesc, SymValue

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from torch_fakeify.compat.torch_symbols import ShapeEnv
    from torch_fakeify.records.tensor import ExprDesc, IntLike, NestedIntDesc, Value

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class SymEncoder:
    """Encodes sizes and the facts of their symbols.

    Expressions are cached; facts are read again each time, since the ``ShapeEnv`` may have changed,
    except inside `assume_unchanged`.
    """

    def __init__(
        self, *, keep_nested_ints: bool = False, numbering: Numbering | None = None
    ) -> None:
        self.numbering = numbering or Numbering()
        # By the id of an expression, with a strong reference to it.
        self._exprs: dict[int, tuple[Any, ExprDesc]] = {}
        self._ints: dict[tuple[int, int | NestedIntDesc | None], IntLike] = {}
        self._nested = NestedIntNumbers(self.numbering.nested_ints, keep=keep_nested_ints)
        self._symbols: dict[int, tuple[Any, tuple[sympy.Symbol, ...]]] = {}
        # By the ids of records in `_ints`.
        self._symbols_of_record: dict[int, tuple[sympy.Symbol, ...]] = {}
        self._groups: dict[tuple[int, ...], tuple[sympy.Symbol, ...]] = {}
        self._equal_groups: dict[tuple[sympy.Symbol, ...], tuple[sympy.Symbol, ...]] = {}
        self._facts: dict[sympy.Symbol, tuple[tuple[Any, ...], SymbolFactDesc]] = {}
        # Inside `assume_unchanged`: records by the id of a ``SymNode``, with a strong reference to it,
        # and facts by the ids of a ``ShapeEnv`` and of a tuple in ``_groups``.
        self._stable_ints: dict[int, tuple[Any, IntLike]] | None = None
        self._stable_facts: dict[tuple[Any, ...], tuple[SymbolFactDesc, ...]] | None = None

    @contextmanager
    def assume_unchanged(self) -> Generator[None, None, None]:
        """Enter a context in which no ``ShapeEnv`` changes, so that facts are cached."""
        self._stable_ints, self._stable_facts = {}, {}
        try:
            yield
        finally:
            self._stable_ints = self._stable_facts = None

    def encode_int(self, n: int | torch.SymInt) -> IntLike:
        """The record of an integer, one object for each expression object and hint.

        Raises:
            UnsupportedValueError: see `exprs.encode_int`.
        """
        if type(n) is int:
            return n
        if type(n) is not torch.SymInt:
            return encode_int(n)
        sym_node: Any = n.node
        if self._stable_ints is None:
            return self._encode_int(n, sym_node)
        entry = self._stable_ints.get(id(sym_node))
        if entry is None:
            entry = self._stable_ints[id(sym_node)] = (sym_node, self._encode_int(n, sym_node))
        return entry[1]

    def _encode_int(self, n: torch.SymInt, sym_node: Any) -> IntLike:
        if is_nested_int(n):
            return self._nested.encode(n)
        expr: Any = getattr(sym_node, "expr", None)
        hint = sym_node.hint
        if is_nested_int(hint):
            hint = self._nested.encode(hint)
        elif not isinstance(expr, sympy.Basic) or not (hint is None or type(hint) is int):
            return encode_int(n)
        key = (id(expr), hint)
        cached = self._ints.get(key)
        if cached is None:
            desc = self._encode_expr(expr)
            last = desc.nodes[-1]
            constant = isinstance(last, IntNode)
            cached = last.value if constant else SymDesc(expr=desc, kind="int", hint=hint)
            self._ints[key] = cached
            self._symbols_of_record[id(cached)] = self._symbols_of(expr)
        return cached

    def encode_value(self, obj: object) -> Value:
        """The record of a symbolic scalar or nested int; ``None`` for other objects.

        A hook of `values.encode_value`.
        """
        if isinstance(obj, torch.SymInt):
            n = self.encode_int(obj)
            return n if type(n) is int else SymValue(sym=n)  # type: ignore[arg-type]
        if isinstance(obj, (torch.SymFloat, torch.SymBool)):
            return SymValue(sym=encode_sym(obj))
        return None

    def nested_number(self, n: Any) -> int:
        """The recorded number of a nested int, or of a symbol with a nested int as hint."""
        return self._nested.encode(n if is_nested_int(n) else n.node.hint).id

    def env_id(self, env: ShapeEnv) -> int:
        """The id of a ``ShapeEnv``; see `Numbering.env_id`."""
        return self.numbering.env_id(env)

    def facts_of_records(
        self, records: Iterable[IntLike], sizes: Iterable[Any]
    ) -> tuple[SymbolFactDesc, ...]:
        """Facts of the symbols in one tensor's numbers, from their records.

        Args:
            records: returned by `encode_int`.
            sizes: the numbers.
        """
        key = tuple([id(record) for record in records if type(record) is not int])
        if not key:
            return ()
        symbols = self._groups.get(key)
        if symbols is None:
            if not self._symbols_of_record.keys() >= set(key):
                return self.facts(sizes)
            found = {symbol for part in key for symbol in self._symbols_of_record[part]}
            symbols = tuple(sorted(found, key=_name))
            symbols = self._groups[key] = self._equal_groups.setdefault(symbols, symbols)
        sym_node: Any = next(n for n in sizes if type(n) is not int).node
        env = sym_node.shape_env
        if self._stable_facts is None:
            return tuple([self._fact(symbol, env) for symbol in symbols])
        facts = self._stable_facts.get((id(env), id(symbols)))
        if facts is None:
            facts = tuple([self._fact(symbol, env) for symbol in symbols])
            self._stable_facts[id(env), id(symbols)] = facts
        return facts

    def expressions(self, first: int) -> Iterable[tuple[sympy.Basic, ExprDesc]]:
        """The encoded expression objects and their records, in the order of encoding.

        Args:
            first: index of the first one to return.
        """
        return itertools.islice(self._exprs.values(), first, None)

    def _encode_expr(self, expr: sympy.Basic) -> ExprDesc:
        entry = self._exprs.get(id(expr))
        if entry is None:
            entry = self._exprs[id(expr)] = (expr, encode_expr(expr))
        return entry[1]

    def facts(self, sizes: Iterable[Any]) -> tuple[SymbolFactDesc, ...]:
        """Facts of the symbols in some sizes, sorted by name."""
        envs: dict[sympy.Symbol, Any] = {}
        seen: set[int] = set()
        for n in sizes:
            if type(n) is int or not isinstance(n, _SYMBOLIC) or is_nested_int(n):
                continue
            sym_node: Any = n.node
            expr = sym_node.expr
            if id(expr) not in seen:
                seen.add(id(expr))
                for symbol in self._symbols_of(expr):
                    envs[symbol] = sym_node.shape_env
        symbols = sorted(envs, key=_name) if len(envs) > 1 else envs
        return tuple(self._fact(symbol, envs[symbol]) for symbol in symbols)

    def facts_of_symbols(
        self, symbols: Iterable[sympy.Symbol], env: ShapeEnv
    ) -> tuple[SymbolFactDesc, ...]:
        """Facts of a ``ShapeEnv`` about symbols, sorted by name."""
        return tuple(self._fact(symbol, env) for symbol in sorted(symbols, key=_name))

    def _symbols_of(self, expr: Any) -> tuple[sympy.Symbol, ...]:
        entry = self._symbols.get(id(expr))
        if entry is None:
            entry = self._symbols[id(expr)] = (expr, tuple(expr.free_symbols))
        return entry[1]

    def _fact(self, symbol: sympy.Symbol, env: ShapeEnv) -> SymbolFactDesc:
        state: tuple[Any, ...] = (
            self.env_id(env),
            env.var_to_range.get(symbol),
            env.backed_var_to_val.get(symbol),
            env.var_to_hint_override.get(symbol),
            symbol in env.size_like,
        )
        cached = self._facts.get(symbol)
        if cached is None or any(a is not b for a, b in zip(cached[0], state, strict=True)):
            cached = self._facts[symbol] = (state, self._symbol_fact(symbol, *state))
        return cached[1]

    def _symbol_fact(
        self,
        symbol: sympy.Symbol,
        env_id: int,
        value_range: Any,
        hint: Any,
        hint_override: Any,
        size_like: bool,
    ) -> SymbolFactDesc:
        lower: Any = None if value_range is None else value_range.lower
        upper: Any = None if value_range is None else value_range.upper
        if isinstance(hint, SingletonInt):
            hint = self._nested.encode(make_nested_int(int(hint._val), 1))
        elif hint is not None:
            hint = int(hint) if hint.is_Integer else float(hint)
        return SymbolFactDesc(
            name=symbol.name,
            shape_env=env_id,
            hint=hint,
            lower=int(lower) if isinstance(lower, sympy.Integer) else None,
            upper=int(upper) if isinstance(upper, sympy.Integer) else None,
            size_like=size_like,
            hint_override=hint_override,
        )


def _name(symbol: sympy.Symbol) -> str:
    return str(symbol.name)
