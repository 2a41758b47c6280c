"""Conditions over shape symbols as linear inequalities over products of atoms.

An *atom* is a symbol, a floor division, a maximum, or an uninterpreted function. A *polynomial*
maps products of atoms to coefficients. Torch's other integer functions are expressed by these:
``Mod(a, k)`` is ``a - k*floor(a/k)``, ``Min`` a negated ``Max``, ``CeilDiv`` a negated floor
division, ``ModularIndexing`` both. Equal atoms get equal ids, so expressions with one canonical form
are the same polynomial.

Semantics: integer symbols are integers, all others are real numbers (no rounding, no NaN);
``FloorDiv`` and ``Mod`` are Python's ``//`` and ``%``; divisors are not zero.
"""

from __future__ import annotations

from fractions import Fraction
from functools import reduce
from math import floor, gcd, lcm
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import sympy
from sympy.logic.boolalg import BooleanFalse, BooleanTrue
from typing_extensions import assert_never

from torch_fakeify.compat.torch_symbols import int_oo, sympy_functions

from .simplex import Mono, Number, Row

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

Poly: TypeAlias = dict[Mono, Number]
"""The coefficient of each product, none of them zero; the constant is under ``()``."""

Frozen: TypeAlias = tuple[tuple[Mono, Number], ...]
"""A polynomial as a sorted tuple."""

FLOOR = "floor"
MAX = "max"
QUOTIENT = "quotient"
"""A new integer symbol: the quotient of a division whose remainder is known."""

MAX_MONOS = 64
"""The most terms of a multiplied-out product; a larger product is one atom."""

MAX_DEGREE = 16
"""The highest exponent that is multiplied out; a higher power is one atom."""

_INFINITE = (sympy.oo, -sympy.oo, int_oo, -int_oo)


class TooLargeError(Exception):
    """Raised when a polynomial has more than `MAX_MONOS` terms; the question is then undecided."""


class Atom(NamedTuple):
    """An indeterminate of a polynomial."""

    head: Any
    """`FLOOR` (of numerator and denominator), `MAX`, `QUOTIENT`, a sympy function class, or a whole
    sympy expression: a symbol, or one whose arguments are not polynomials."""
    args: tuple[Frozen, ...]
    is_integer: bool
    symbols: frozenset[int]
    """The ids of the symbols and quotients in it, at any depth, itself included."""


class MonoProperties(NamedTuple):
    """Cached properties of a product of atoms."""

    symbols: frozenset[int]
    """The symbols and quotients of its atoms."""
    is_symbol: bool
    is_whole: bool


class Equal(NamedTuple):
    """``sum(factor * mono) == bound``; the first factor is positive."""

    coeffs: tuple[tuple[Mono, int], ...]
    bound: Number


class Either(NamedTuple):
    """At least one of these conjunctions holds."""

    options: tuple[tuple[Part, ...], ...]


Part: TypeAlias = Row | Equal | Either
"""A condition is a tuple of parts that all hold; ``()`` is true."""

FALSE = (Row((), -1),)
"""The condition that never holds."""


def add(a: Mapping[Mono, Number], b: Mapping[Mono, Number], factor: Number = 1) -> Poly:
    """``a + factor * b``."""
    total = dict(a)
    for mono, c in b.items():
        value = total.get(mono, 0) + c * factor
        if value:
            total[mono] = value
        else:
            total.pop(mono, None)
    return total


def multiply(a: Mapping[Mono, Number], b: Mapping[Mono, Number]) -> Poly:
    """``a * b``, multiplied out."""
    if len(a) * len(b) > MAX_MONOS:
        raise TooLargeError
    total: Poly = {}
    for m, c in a.items():
        for n, d in b.items():
            mono = tuple(sorted(m + n)) if m and n else m or n
            value = total.get(mono, 0) + c * d
            if value:
                total[mono] = value
            else:
                total.pop(mono, None)
    return total


def freeze(poly: Mapping[Mono, Number]) -> Frozen:
    """The polynomial as a sorted tuple."""
    return tuple(sorted(poly.items()))


class AtomTable:
    """A table of atoms by id; reads, rewrites and canonicalizes polynomials over them."""

    def __init__(self) -> None:
        self.atoms: list[Atom] = []
        self._ids: dict[tuple[Any, tuple[Frozen, ...]], int] = {}
        self._facts: dict[Mono, MonoProperties] = {}
        self._read: dict[sympy.Basic, Poly] = {}

    # --- atoms ---------------------------------------------------------------------------------

    def atom(self, head: Any, args: tuple[Frozen, ...], is_integer: bool) -> Poly:
        """The polynomial of one atom."""
        key = (head, args)
        found = self._ids.get(key)
        if found is None:
            found = self._ids[key] = len(self.atoms)
            symbols = frozenset[int]().union(*(self.symbols_of(arg) for arg in args))
            if isinstance(head, sympy.Symbol) or head is QUOTIENT:
                symbols = frozenset({found})
            self.atoms.append(Atom(head, args, is_integer, symbols))
            if isinstance(head, sympy.Basic) and not symbols:
                inner = sorted(head.free_symbols, key=str)
                symbols = frozenset(next(iter(self.read(s)))[0] for s in inner)
                self.atoms[found] = Atom(head, args, is_integer, symbols)
        return {(found,): 1}

    def symbols_of(self, poly: Iterable[tuple[Mono, Number]]) -> set[int]:
        """The ids of the symbols and quotients of a polynomial, at any depth."""
        return set[int]().union(*(self.properties_of(mono).symbols for mono, _ in poly))

    def is_symbol(self, mono: Mono) -> bool:
        """Whether a product is a single symbol or quotient."""
        return self.properties_of(mono).is_symbol

    def is_whole(self, mono: Mono) -> bool:
        """Whether all values of a product are integers."""
        return self.properties_of(mono).is_whole

    def properties_of(self, mono: Mono) -> MonoProperties:
        """The cached properties of a product."""
        found = self._facts.get(mono)
        if found is None:
            atoms = [self.atoms[a] for a in mono]
            symbols = frozenset[int]().union(*(atom.symbols for atom in atoms))
            is_symbol = len(mono) == 1 and symbols == frozenset(mono)
            is_whole = all(atom.is_integer for atom in atoms)
            found = self._facts[mono] = MonoProperties(symbols, is_symbol, is_whole)
        return found

    def inside(self, mono: Mono) -> list[Mono]:
        """The variables of the lemmas about a function or a product: itself and its arguments.

        Only one level deep. Empty for a symbol.
        """
        if self.is_symbol(mono):
            return []
        found = [mono, *((a,) for a in mono if len(mono) > 1)]
        found.extend(m for a in mono for arg in self.atoms[a].args for m, _ in arg if m)
        return found

    def _all_whole(self, poly: Mapping[Mono, Number]) -> bool:
        return all(type(c) is int and self.is_whole(m) for m, c in poly.items())

    # --- canonical functions -------------------------------------------------------------------

    def floor_div(self, a: Poly, b: Poly) -> Poly:
        """``a // b`` without its whole part: ``(5*x + y + 9) // 4`` is ``x + 2 + (x + y + 1) // 4``."""
        if not (self._all_whole(a) and self._all_whole(b)):
            return self.atom(FLOOR, (freeze(a), freeze(b)), True)
        if b.keys() != {()}:
            return self._floor_by_terms(a, b)
        k = b[()]
        assert type(k) is int
        if k < 0:
            a, k = add({}, a, -1), -k
        out: Poly = {}
        rest: Poly = {}
        for mono, c in a.items():
            sign = 1 if c > 0 else -1
            whole, left = divmod(int(c) * sign, k)
            if mono and whole:
                out[mono] = whole * sign
            if mono and left:
                rest[mono] = left * sign
        constant = a.get((), 0)
        whole = constant // k
        if whole:
            out = add(out, {(): whole})
        constant -= whole * k
        if not rest:
            return out
        if len(rest) == 1:
            ((mono, c),) = rest.items()
            inner = self.atoms[mono[0]]
            if c == 1 and len(mono) == 1 and inner.head is FLOOR and len(inner.args[1]) == 1:
                divisor, by = inner.args[1][0]
                if divisor == ():  # ((n // by) + constant) // k
                    lifted = add(dict(inner.args[0]), {(): by * constant} if constant else {})
                    return add(out, self.floor_div(lifted, {(): by * k}))
        shared = gcd(k, *(int(c) for c in rest.values()))
        numerator: Poly = {m: c // shared for m, c in rest.items()}
        if constant // shared:
            numerator[()] = constant // shared
        return add(out, self.atom(FLOOR, (freeze(numerator), (((), k // shared),)), True))

    def _floor_by_terms(self, a: Poly, b: Poly) -> Poly:
        if len(b) != 1:
            return self.atom(FLOOR, (freeze(a), freeze(b)), True)
        ((divisor, by),) = b.items()
        out: Poly = {}
        rest: Poly = {}
        for mono, c in a.items():
            left = _without(mono, divisor)
            if left is None or c % by:
                rest[mono] = c
            else:
                out[left] = c // by
        if not rest:
            return out
        return add(out, self.atom(FLOOR, (freeze(rest), freeze(b)), True))

    def mod(self, a: Poly, b: Poly) -> Poly:
        """``a % b``."""
        return add(a, multiply(b, self.floor_div(a, b)), -1)

    def maximum(self, options: Iterable[Poly]) -> Poly:
        """The maximum of polynomials; of two that differ by a constant, the larger one remains."""
        largest: dict[Frozen, Number] = {}
        for option in options:
            shape = freeze({m: c for m, c in option.items() if m})
            value = option.get((), 0)
            largest[shape] = max(largest.get(shape, value), value)
        parts = sorted(freeze({**dict(s), **({(): v} if v else {})}) for s, v in largest.items())
        if len(parts) == 1:
            return dict(parts[0])
        whole = all(self._all_whole(dict(part)) for part in parts)
        return self.atom(MAX, tuple(parts), whole)

    def power(self, base: Poly, exponent: int) -> Poly:
        """``base ** exponent``, multiplied out."""
        if exponent > MAX_DEGREE:
            raise TooLargeError
        return reduce(multiply, [base] * exponent, {(): 1})

    # --- rewriting -----------------------------------------------------------------------------

    def replace(self, poly: Mapping[Mono, Number], symbol: int, by: Poly) -> Poly:
        """A polynomial with a symbol substituted by another polynomial, at every depth."""
        total: Poly = {}
        for mono, c in poly.items():
            if symbol not in self.properties_of(mono).symbols:
                total = add(total, {mono: c})
                continue
            image: Poly = {(): c}
            for a in mono:
                image = multiply(image, self._replace_atom(a, symbol, by))
            total = add(total, image)
        return total

    def _replace_atom(self, at: int, symbol: int, by: Poly) -> Poly:
        atom = self.atoms[at]
        if at == symbol:
            return by
        if symbol not in atom.symbols or not atom.args:
            return {(at,): 1}
        args = [self.replace(dict(arg), symbol, by) for arg in atom.args]
        if atom.head is FLOOR:
            return self.floor_div(*args)
        if atom.head is MAX:
            return self.maximum(args)
        return self.atom(atom.head, tuple(freeze(arg) for arg in args), atom.is_integer)

    # --- reading -------------------------------------------------------------------------------

    def read(self, expr: Any) -> Poly:
        """The polynomial of a sympy expression."""
        found = self._read.get(expr)
        if found is None:
            try:
                found = self._read_new(expr)
            except TooLargeError:
                found = self.atom(expr, (), expr.is_integer is True)
            self._read[expr] = found
        return found

    def _read_new(self, expr: Any) -> Poly:
        functions: Any = sympy_functions
        if expr.is_Symbol:
            return self.atom(expr, (), expr.is_integer is True)
        if expr.is_Number:
            return (
                _constant(expr) if expr.is_Rational or expr.is_Float else self.atom(expr, (), False)
            )
        if expr.is_Add:
            return reduce(add, map(self.read, expr.args), {})
        if expr.is_Mul:
            return reduce(multiply, map(self.read, expr.args), {(): 1})
        args: list[Any] = list(expr.args)
        match expr:
            case sympy.Pow() | functions.PowByNatural() if args[1].is_Integer and args[1] >= 0:
                return self.power(self.read(args[0]), int(args[1]))
            case functions.FloorDiv():
                return self.floor_div(self.read(args[0]), self.read(args[1]))
            case functions.CeilDiv():
                negated = add({}, self.read(args[0]), -1)
                return add({}, self.floor_div(negated, self.read(args[1])), -1)
            case functions.Mod() | functions.PythonMod() | sympy.Mod():
                return self.mod(self.read(args[0]), self.read(args[1]))
            case functions.ModularIndexing():
                whole = self.floor_div(self.read(args[0]), self.read(args[1]))
                return self.mod(whole, self.read(args[2]))
            case functions.Max() | sympy.Max():
                return self.maximum([self.read(arg) for arg in args])
            case functions.Min() | sympy.Min():
                negated = self.maximum([add({}, self.read(arg), -1) for arg in args])
                return add({}, negated, -1)
            case sympy.Abs() if args[0].is_extended_real:
                inner = self.read(args[0])
                return self.maximum([inner, add({}, inner, -1)])
            case functions.Identity():
                return self.read(args[0])
            case _:
                is_plain = args and all(isinstance(arg, sympy.Expr) for arg in args)
                heads = tuple(freeze(self.read(arg)) for arg in args) if is_plain else ()
                head = type(expr) if is_plain else expr
                return self.atom(head, heads, expr.is_integer is True)

    def condition(self, expr: Any, negated: bool = False) -> tuple[Part, ...]:
        """The parts of a sympy condition, or of its negation."""
        match expr:
            case bool() | BooleanTrue() | BooleanFalse():
                return FALSE if bool(expr) == negated else ()
            case sympy.Not():
                return self.condition(expr.args[0], not negated)
            case sympy.And() | sympy.Or():
                options = [self.condition(arg, negated) for arg in expr.args]
                if isinstance(expr, sympy.And) != negated:
                    return tuple(part for option in options for part in option)
                return either(options)
            case sympy.Implies():
                left, right = expr.args
                parts = [self.condition(left, not negated), self.condition(right, negated)]
                return (*parts[0], *parts[1]) if negated else either(parts)
            case sympy.Rel() if _compares_numbers(expr):
                return self._relation(expr.negated if negated else expr)
            case _:
                # An uninterpreted condition: an integer that is 1 if it holds and 0 if not.
                truth = self.atom(expr, (), True)
                return self.equal(add(truth, {} if negated else {(): -1}))

    def _relation(self, expr: Any) -> tuple[Part, ...]:
        if any(side in _INFINITE for side in expr.args):
            return self._beyond_all(expr)
        difference = add(self.read(expr.lhs), self.read(expr.rhs), -1)
        match expr:
            case sympy.Eq():
                return self.equal(difference)
            case sympy.Ne():
                opposite = add({}, difference, -1)
                return either([self.row(difference, True), self.row(opposite, True)])
            case sympy.Le() | sympy.Lt():
                return self.row(difference, isinstance(expr, sympy.Lt))
            case _:
                return self.row(add({}, difference, -1), isinstance(expr, sympy.Gt))

    def _beyond_all(self, expr: Any) -> tuple[Part, ...]:
        # Symbols are finite. Sympy decides about two infinities, and about one in an expression.
        left, right = expr.args
        if left in _INFINITE and right in _INFINITE:
            return self.equal(add(self.atom(expr, (), True), {(): -1}))
        if isinstance(expr, (sympy.Eq, sympy.Ne)):
            return FALSE if isinstance(expr, sympy.Eq) else ()
        is_up = (right if right in _INFINITE else left) in (sympy.oo, int_oo)
        left_is_less = is_up == (right in _INFINITE)
        return () if left_is_less == isinstance(expr, (sympy.Lt, sympy.Le)) else FALSE

    # --- canonical inequalities ----------------------------------------------------------------

    def row(self, poly: Mapping[Mono, Number], strict: bool) -> tuple[Part, ...]:
        """``poly <= 0``, or ``< 0`` if strict; over integers with the bound rounded down."""
        bound = -poly.get((), 0)
        coeffs, scale = _primitive(poly)
        if not coeffs:
            return () if bound > 0 or (bound == 0 and not strict) else FALSE
        bound = bound * scale
        if all(self.is_whole(mono) for mono, _ in coeffs):
            bound = floor(bound) - (1 if strict and bound == floor(bound) else 0)
            strict = False
        return (Row(coeffs, bound, strict),)

    def equal(self, poly: Mapping[Mono, Number]) -> tuple[Part, ...]:
        """``poly == 0``; `FALSE` if divisibility excludes all integer solutions."""
        bound = -poly.get((), 0)
        coeffs, scale = _primitive(poly)
        if not coeffs:
            return FALSE if bound else ()
        if coeffs[0][1] < 0:
            coeffs, scale = tuple((m, -c) for m, c in coeffs), -scale
        bound = bound * scale
        if all(self.is_whole(mono) for mono, _ in coeffs):
            if bound != floor(bound):
                return FALSE
            bound = floor(bound)
        return (Equal(coeffs, bound),)


def rows_of(part: Part) -> tuple[Row, ...]:
    """The inequalities that a part is equivalent to; none for a disjunction."""
    match part:
        case Row():
            return (part,)
        case Equal(coeffs, bound):
            return (Row(coeffs, bound), Row(tuple((m, -c) for m, c in coeffs), -bound))
        case Either():
            return ()
        case _:
            assert_never(part)


def all_rows(part: Part) -> Iterator[Row]:
    """The rows of a part; for a disjunction those of all its options."""
    yield from rows_of(part)
    if isinstance(part, Either):
        for option in part.options:
            for inner in option:
                yield from all_rows(inner)


def either(options: list[tuple[Part, ...]]) -> tuple[Part, ...]:
    """The parts of a disjunction."""
    if () in options:
        return ()
    alive = [option for option in dict.fromkeys(options) if option != FALSE]
    if not alive:
        return FALSE
    return alive[0] if len(alive) == 1 else (Either(tuple(alive)),)


def options_of(parts: tuple[Part, ...]) -> tuple[tuple[Part, ...], ...]:
    """The conjunctions of which a condition requires one."""
    lone = parts[0] if len(parts) == 1 else None
    return lone.options if isinstance(lone, Either) else (parts,)


def _compares_numbers(expr: Any) -> bool:
    return all(isinstance(side, sympy.Expr) and side is not sympy.nan for side in expr.args)


def _constant(number: Any) -> Poly:
    if number.is_Float:  # a sign, an odd integer and a power of two: exact
        sign, mantissa, exponent, _ = number._mpf_
        value = Fraction(int(mantissa)) * Fraction(2) ** exponent * (-1 if sign else 1)
    else:
        value = Fraction(int(number.p), int(number.q))
    whole: Number = value.numerator if value.denominator == 1 else value
    return {(): whole} if whole else {}


def _without(mono: Mono, divisor: Mono) -> Mono | None:
    left = list(mono)
    for a in divisor:
        if a not in left:
            return None
        left.remove(a)
    return tuple(left)


def _primitive(poly: Mapping[Mono, Number]) -> tuple[tuple[tuple[Mono, int], ...], Number]:
    """The products with coprime integer coefficients in the same ratio, and the scale."""
    factors = [c for m, c in poly.items() if m]
    if not factors:
        return (), 1
    common = lcm(*(c.denominator for c in factors))
    shared = gcd(*(int(c * common) for c in factors))
    scale = 1 if common == shared else Fraction(common, shared)
    coeffs = tuple(sorted((m, int(c * scale)) for m, c in poly.items() if m))
    return coeffs, scale
