"""How many multiplications sympy takes to multiply out the expressions of a document.

Torch expands each expression that it evaluates. A reader estimates the work from the written nodes,
before sympy gets them: at least as many terms as sympy will have, and little more for what torch writes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

from torch_fakeify.errors import TRUST, LimitError
from torch_fakeify.records.tensor import ApplyNode, IntNode, SymbolNode, SymDesc

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch_fakeify.records.tensor import ExprNode, IntLike, MetaTensorDesc

PRODUCTS_PER_ROW = 256
"""Multiplications that products of sums may take for each row, besides ``Limits.products``.

The expressions of a Swin transformer with dynamic image sizes take 44."""
_POWERS = frozenset({"Pow", "PowByNatural", "LShift"})
_CONDITIONS = frozenset({"Eq", "Ne", "Lt", "Le", "Gt", "Ge", "And", "Or", "Not"})
_DIVISIONS = frozenset({"FloorDiv", "CleanDiv"})
_REMAINDERS = frozenset({"Mod", "PythonMod"})
_ASSUMED = frozenset({("integer", True), ("positive", True), ("nonnegative", True)})
"""What torch assumes of a size. Of an even symbol, sympy halves a sum."""
_COEFFICIENT_BITS = 128
"""Bits of a coefficient that is counted with; a larger one may be any."""
_LONGEST = 64
"""Most factors of a power that is counted as a product."""


def check_products(
    tables: Mapping[str, Sequence[Any]],
    roots: Sequence[int | tuple[int, ...]],
    expr_ids: Mapping[int, int],
    products: int,
    where: str,
) -> None:
    """Refuse products of sums that are too large when expanded.

    Torch expands (``_fast_expand``) each expression that it evaluates, and the number of elements of
    each tensor. A product of twenty sums of two terms has a million terms.

    Args:
        tables: the rows by the name of their table.
        roots: of each expression the position of its root, or those of all its nodes.
        expr_ids: the position in ``roots`` by the ``id()`` of an expression in a tensor.
        products: multiplications that are allowed besides those for each row.
        where: the document.

    Raises:
        LimitError: it takes too many multiplications.
    """
    most = products + PRODUCTS_PER_ROW * (len(tables["nodes"]) + len(roots))
    positions = [root if isinstance(root, int) else root[-1] for root in roots]
    try:
        expanded = Expanded(tables["nodes"], most)
        total = sum([expanded.work[at] for at in positions])
        if total <= most:
            of_exprs = {key: expanded.polynomials[positions[at]] for key, at in expr_ids.items()}
            total += _size_products(tables["tensors"], of_exprs, expanded, most)
    except _TooManyError:
        total = most + 1
    if total > most:
        raise LimitError(
            "the products of sums are too large multiplied out",
            where=f"{where}.exprs",
            expected=f"at most {most} multiplications",
            fix=TRUST,
        )


_Monomial: TypeAlias = tuple[int, ...]
"""Sorted numbers of factors; a factor may occur more than once."""
_Polynomial: TypeAlias = "dict[_Monomial, int | None]"
"""Coefficients by monomial, ``None`` for any coefficient."""


class _TooManyError(Exception):
    """There are too many multiplications."""


class Expanded:
    """Expands expressions as torch does, to polynomials over opaque factors.

    The result of a function is a factor. Sympy may simplify a division by a number to the terms it
    divides, and some functions to one of their arguments: those terms are added. So a polynomial here
    has at least the terms of sympy's, and the multiplications are an upper bound.

    Args:
        nodes: arguments before what uses them.
        most: the number of multiplications after which `_TooManyError` is raised.
    """

    def __init__(self, nodes: Sequence[ExprNode], most: int) -> None:
        self.polynomials: list[_Polynomial] = []
        self.work: list[int] = []
        """For each node the multiplications of its tree, up to one more than ``most``."""
        self._left = most
        self._factors: dict[Any, int] = {}
        self._lasting: dict[int, bool] = {}
        """Factors that sympy does not change; whether it is a division."""
        self._single: list[bool] = []
        """Whether the terms of a node are those of the sum that is written."""
        for position, node in enumerate(nodes):
            before = self._left
            made = self._of_node(position, node, nodes)
            self.polynomials.append(made)
            args = node.args if isinstance(node, ApplyNode) else ()
            is_sum = isinstance(node, ApplyNode) and node.function == "Add"
            self._single.append(len(made) == 1 or (is_sum and all(self._single[at] for at in args)))
            work = before - self._left + sum([self.work[at] for at in args])
            self.work.append(min(work, most + 1))

    def product(self, factors: Iterable[_Polynomial]) -> _Polynomial:
        """Return a product, counting the terms before like terms are combined, as torch does.

        A factor that occurs more than once counts as a power, as sympy makes one.

        Raises:
            _TooManyError: it takes more multiplications than are left.
        """
        result: _Polynomial = {(): 1}
        sums: dict[int, int] = {}
        terms = 1
        for factor in factors:
            if len(factor) > 1:
                sums[id(factor)] = power = sums.get(id(factor), 0) + 1
                if power == 1:
                    terms *= len(factor)
                else:
                    more = _choices(len(factor), power, self._left + terms)
                    terms = terms // _choices(len(factor), power - 1, self._left + terms) * more
            if len(result) > 1 or len(factor) > 1:
                self._left -= max(terms, len(result) * len(factor))
            if self._left < 0:
                raise _TooManyError
            result = _multiplied(result, factor)
        return result

    def _of_node(self, position: int, node: ExprNode, nodes: Sequence[ExprNode]) -> _Polynomial:
        if isinstance(node, IntNode):
            return {(): node.value}
        if not isinstance(node, ApplyNode) or not node.args:
            factor = self._factor(position)
            if isinstance(node, SymbolNode) and _ASSUMED.issuperset(node.assumptions):
                self._lasting[factor] = False
            return {(factor,): 1}
        args = [self.polynomials[at] for at in node.args]
        if node.function == "Add":
            return _added(args)
        if node.function == "Mul":
            return self.product(args)
        factor = self._factor((node.function, *[frozenset(arg.items()) for arg in args]))
        if len(args) == 2:  # otherwise the file is refused where the expression is built
            other = nodes[node.args[1]]
            if node.function in _POWERS and isinstance(other, IntNode):
                if (power := self._power(node.function, args[0], other.value)) is not None:
                    return power
            elif node.function in _DIVISIONS | _REMAINDERS and self._single[node.args[0]]:
                is_division = node.function in _DIVISIONS
                if self._is_unchanged(*args, is_division=is_division):
                    self._lasting[factor] = is_division
                    return {(factor,): 1}
        return {**self._possible_terms(node, args), (factor,): 1}

    def _power(self, function: str, base: _Polynomial, exponent: int) -> _Polynomial | None:
        """Return a power multiplied out; of a sum its terms at least, ``None`` for another factor."""
        if function == "LShift":
            is_small = 0 <= exponent <= _COEFFICIENT_BITS
            return _multiplied(base, {(): 1 << exponent}) if is_small else None
        if len(base) == 1 and not 0 < len(next(iter(base))) * exponent <= _LONGEST:
            return None
        return self.product([base] * min(abs(exponent), self._left + 1))

    def _is_unchanged(self, base: _Polynomial, divisor: _Polynomial, *, is_division: bool) -> bool:
        """Whether sympy leaves a floor division or remainder as it is, because no factor is in all terms.

        So are those of the sizes of strided convolutions and of windows, nested as they are.
        """
        if len(divisor) != 1 or not (self._is_lasting(base) and self._is_lasting(divisor)):
            return False
        present = {monomial: n for monomial, n in base.items() if n}
        if not any(present):
            return False
        if is_division and len(present) == 1 == len(next(iter(present))):
            ((factor,),) = present
            if self._lasting[factor]:  # of a division: sympy multiplies the divisors
                return False
        ((by, n),) = divisor.items()
        assert n is not None
        if by:
            return n == 1 and any(set(by).isdisjoint(monomial) for monomial in present)
        if is_division:
            numbers = present.values()
            return n != 0 and math.gcd(n, *numbers) == 1 and all(m % n for m in numbers)
        return n > 1 and math.gcd(n, *[m for monomial, m in present.items() if monomial]) == 1

    def _is_lasting(self, polynomial: _Polynomial) -> bool:
        """Whether sympy changes no factor of a sum, so that it has these terms."""
        factors = {factor for monomial in polynomial for factor in monomial}
        return factors <= self._lasting.keys() and None not in polynomial.values()

    def _possible_terms(self, node: ApplyNode, args: list[_Polynomial]) -> _Polynomial:
        """Return the terms to which sympy may simplify the application of a function."""
        largest = max(args, key=len)
        if len(largest) == 1 or node.function in _CONDITIONS:
            return {}
        divisor = args[1].get(()) if len(args) == 2 and len(args[1]) == 1 else None
        if divisor and self._single[node.args[0]] and self._is_lasting(args[0]):
            if node.function in _REMAINDERS and divisor > 1:
                return {}
            if node.function in _DIVISIONS and abs(divisor) > 1:
                return {
                    monomial: n // divisor
                    for monomial, n in args[0].items()
                    if n is not None and n % divisor == 0
                }
        return dict.fromkeys(largest)

    def _factor(self, key: object) -> int:
        return self._factors.setdefault(key, len(self._factors))


def _added(terms: Iterable[_Polynomial]) -> _Polynomial:
    result: _Polynomial = {}
    for polynomial in terms:
        for monomial, n in polynomial.items():
            _put(result, monomial, n)
    return result


def _multiplied(a: _Polynomial, b: _Polynomial) -> _Polynomial:
    result: _Polynomial = {}
    for left, n in a.items():
        for right, m in b.items():
            product = None if n is None or m is None else n * m
            if product is not None and product.bit_length() > _COEFFICIENT_BITS:
                product = None
            _put(result, tuple(sorted(left + right)), product)
    return result


def _choices(terms: int, power: int, most: int) -> int:
    """Return the number of terms of a power of a sum, as a multiset coefficient."""
    few, many = sorted((terms - 1, power))
    result = 1
    for i in range(1, few + 1):
        result = result * (many + i) // i
        if result > most:
            break
    return result


def _put(result: _Polynomial, monomial: _Monomial, n: int | None) -> None:
    """Add a term to a sum; a term with coefficient zero remains."""
    coefficient = result.get(monomial, 0)
    result[monomial] = None if n is None or coefficient is None else coefficient + n


def _size_products(
    rows: Sequence[MetaTensorDesc],
    of_exprs: Mapping[int, _Polynomial],
    expanded: Expanded,
    most: int,
) -> int:
    """Return the multiplications for the elements and extents of tensors, each layout once."""
    total = 0
    seen: set[tuple[int, ...]] = set()
    same: set[tuple[int, int]] = set()  # by `id()` of parts, which rows reference
    one: _Polynomial = {(): 1}
    for row in rows:
        ids = id(row.size), id(row.stride)
        if ids in same:
            continue
        same.add(ids)
        layout = (*map(_expr_id, row.size), *map(_expr_id, row.stride))
        if not any(layout) or layout in seen:
            continue
        seen.add(layout)
        parts = [of_exprs.get(part, one) for part in layout]
        size, stride = parts[: len(row.size)], parts[len(row.size) :]
        elements = expanded.product(size)
        if len(elements) > max(map(len, size), default=1):
            total += len(elements) * len(size)
        # An extent is the sum over dims of (size - 1) * stride.
        pairs = zip(size, stride, strict=False)
        total += sum([(len(n) + 1) * len(step) for n, step in pairs if len(step) > 1])
        if total > most:
            break
    return total


def _expr_id(n: IntLike) -> int:
    return id(n.expr) if isinstance(n, SymDesc) else 0
