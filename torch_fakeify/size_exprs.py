"""Sympy expressions of strides and storage sizes, put together as sympy itself would leave them.

Sympy finds out by many checks what it is given. Products of plain symbols and sums of them need none:
their coefficients are added up, and their parts put into sympy's order.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import sympy
from sympy.core.basic import Basic

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["product", "storage_size"]

_Factors = tuple[Any, ...]
"""Of a product without its coefficient, in sympy's order."""

_Symbol, _Integer, _Add, _Mul = sympy.Symbol, sympy.Integer, sympy.Add, sympy.Mul
_ONE, _MINUS_ONE = sympy.Integer(1), sympy.Integer(-1)
_ORDER: Any = functools.cmp_to_key(Basic.compare)


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
