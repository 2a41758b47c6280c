"""Symbols, strides and storage sizes, put together as sympy itself would leave them.

Sympy finds out by many checks what it is given. Products of plain symbols and sums of them need none:
their coefficients are added up, and their parts put into sympy's order.
"""

from __future__ import annotations

import functools
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import sympy
from sympy.core.basic import Basic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["product", "storage_size", "symbols_like"]

_Factors = tuple[Any, ...]
"""Of a product without its coefficient, in sympy's order."""

_Symbol, _Integer, _Add, _Mul = sympy.Symbol, sympy.Integer, sympy.Add, sympy.Mul
_ONE, _MINUS_ONE = sympy.Integer(1), sympy.Integer(-1)
_new = object.__new__
_ORDER: Any = functools.cmp_to_key(Basic.compare)


def symbols_like(example: sympy.Symbol) -> Callable[[str], sympy.Symbol] | None:
    """What makes symbols of other names and the same assumptions, which are worked out once.

    They equal those that sympy makes, but are not the same objects: sympy does not see them. ``None``
    where this sympy keeps more in a symbol than its name and assumptions.
    """
    kind = type(example)
    slots = [slot for base in kind.__mro__ for slot in getattr(base, "__slots__", ())]
    if set(slots) != {
        "name",
        "_assumptions",
        "_assumptions0",
        "_assumptions_orig",
        "_args",
        "_mhash",
    }:
        return None
    common: Any = attrgetter("_assumptions", "_assumptions0", "_assumptions_orig")(example)

    def make(name: str) -> Any:
        symbol: Any = _new(kind)
        symbol.name = name
        symbol._assumptions, symbol._assumptions0, symbol._assumptions_orig = common
        symbol._args = ()
        symbol._mhash = None
        return symbol

    return make


def product(a: Any, b: Any) -> Any:
    """``a * b`` of sizes and strides."""
    if b is _ONE:
        return a
    if a is _ONE:
        return b
    first, second = _split(a), _split(b)
    if first is None or second is None or any(part in first[1] for part in second[1]):
        return a * b
    coefficient = first[0] * second[0]
    return _times(coefficient, _sorted((*first[1], *second[1]))) if coefficient else a * b


def storage_size(sizes: Sequence[Any], strides: Sequence[Any], itemsize: int) -> Any | None:
    """How many bytes such a layout takes, as sympy gives it where the dims are gone through in turn.

    ``None`` for layouts of other parts than numbers, symbols and products of symbols.
    """
    constant = 1
    terms: dict[_Factors, int] = {}
    for n, step in zip(sizes, strides, strict=True):
        split = (step, ()) if type(step) is int else _split(step)
        if split is None:
            return None
        coefficient, factors = split
        if type(n) is int:
            coefficient *= n - 1
        elif type(n) is not _Symbol:
            return None
        elif factors:
            factors = (*factors, _add((_MINUS_ONE, n)))  # sums come last
        else:
            constant -= coefficient
            factors = (n,)
        if not factors:
            constant += coefficient
        elif coefficient:
            terms[factors] = terms.get(factors, 0) + coefficient
    parts = [_times(count * itemsize, factors) for factors, count in terms.items() if count]
    if len(parts) > 1:
        parts.sort(key=_ORDER)
    if constant:
        parts.insert(0, _Integer(constant * itemsize))
    return _add(tuple(parts)) if len(parts) > 1 else parts[0] if parts else _Integer(0)


def _split(expr: Any) -> tuple[int, _Factors] | None:
    """The coefficient and the factors of a product of symbols, each of which occurs once."""
    kind = type(expr)
    if kind is _Symbol:
        return 1, (expr,)
    if kind is _Mul:
        args = expr.args
        coefficient, factors = (int(args[0]), args[1:]) if args[0].is_Integer else (1, args)
        return (coefficient, factors) if all(type(part) is _Symbol for part in factors) else None
    return (int(expr), ()) if isinstance(expr, _Integer) else None


def _sorted(factors: _Factors) -> _Factors:
    return tuple(sorted(factors, key=_ORDER)) if len(factors) > 1 else factors


def _times(coefficient: int, factors: _Factors) -> Any:
    if coefficient != 1:
        factors = (_Integer(coefficient), *factors)
    return factors[0] if len(factors) == 1 else _made(_Mul, factors)


def _add(parts: _Factors) -> Any:
    return _made(_Add, parts)


def _made(kind: Any, parts: _Factors) -> Any:
    return kind._from_args(parts, True)
