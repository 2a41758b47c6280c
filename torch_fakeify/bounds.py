"""Bounds on what a document may ask of those that walk it as a tree.

A row that others refer to is written once, and what refers to each row twice is small as a graph
and larger than any memory as a tree. The codec is linear in the graph. But sympy and torch walk
every expression as a tree, and a converter makes the inner tensors of each wrapper anew.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

from .desc import ApplyNode, AtomNode, FloatNode, IntNode, RationalNode, SymbolNode, SymDesc
from .errors import TRUST, LimitError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .desc import ExprNode, IntLike, MetaTensorDesc
    from .desc_env import ShapeEnvDesc, SymbolDesc

__all__ = [
    "allowed_characters",
    "allowed_nodes",
    "check_count",
    "check_exponents",
    "check_numbers",
    "check_products",
    "check_tables",
    "check_tensors",
    "tree_nodes",
]

NODES_PER_ROW = 128
TENSORS_PER_ROW = 64
MAX_BITS = 1 << 18
"""Of a number that may come of an expression when sympy evaluates it, as it does on any occasion."""
_SYMBOL_BITS = 64
PRODUCTS = 10_000
"""Multiplications that the products of sums of a document may take, and for each row:"""
PRODUCTS_PER_ROW = 16
_POWERS = frozenset({"Pow", "PowByNatural", "LShift", "RoundDecimal"})
"""But ``FloatPow``: a float is as large as any other."""
_FACTORIALS = frozenset({"gamma", "loggamma"})
_GROWING = _POWERS | _FACTORIALS


def allowed_characters(size: int) -> int:
    """How long the names of sources may be together, in a document of ``size`` bytes.

    Each begins with that of the source below it: those of a deep module have 2 for each byte.
    """
    return 20_000_000 + 64 * size


def allowed_nodes(rows: int, most: int) -> int:
    """How many nodes the expressions of a document with so many rows may have together.

    A thousand prefix sums of a thousand sizes have 170 for each row.
    """
    return min(most, 200_000 + NODES_PER_ROW * rows)


def check_count(found: int, most: int, where: str) -> None:
    """Refuse expressions with more than ``most`` distinct nodes.

    Raises:
        LimitError: there are ``found``.
    """
    if found > most:
        raise LimitError(
            "the expressions have too many nodes",
            where=where,
            expected=f"at most {most}",
            found=str(found),
            fix=TRUST,
        )


def tree_nodes(
    args: Sequence[tuple[int, ...]], exprs: Sequence[int | tuple[int, ...]], most: int
) -> int:
    """The nodes of all expressions with their shared parts written out, up to ``most`` + 1.

    Args:
        args: positions of the arguments of each node, all of them earlier ones.
        exprs: the position of the root of each expression, or those of all its nodes.
        most: where to stop counting.
    """
    sizes: list[int] = []
    for positions in args:
        sizes.append(min(1 + sum([sizes[at] for at in positions]), most + 1))
    total = 0
    for expr in exprs:
        root = expr if isinstance(expr, int) else expr[-1] if expr else -1
        if 0 <= root < len(sizes):
            total += sizes[root]
    return min(total, most + 1)


def check_tables(tables: Mapping[str, Sequence[Any]], found: tuple[int, int], where: str) -> None:
    """Refuse tables that can be written, read and shown, but not walked.

    Args:
        tables: the rows by the name of their table.
        found: how many nodes the expressions have as trees, and how many they may have.
        where: the document.

    Raises:
        LimitError: they ask for too much.
    """
    nodes, most = found
    if nodes > most:
        raise LimitError(
            "the expressions are too large with their shared parts written out",
            where=f"{where}.exprs",
            expected=f"at most {most} nodes together",
        )
    check_numbers(tables["nodes"], f"{where}.nodes")
    check_tensors(tables["tensors"], f"{where}.tensors")


def check_numbers(nodes: Sequence[ExprNode], where: str) -> None:
    """Refuse a power, a factorial or a product that is too large to be evaluated.

    A symbol counts as 64 bits, and as an exponent it is taken to be small: see `check_exponents`.

    Args:
        nodes: arguments before what uses them.
        where: the table.

    Raises:
        LimitError: the value may have more than ``MAX_BITS`` bits.
    """
    bits: list[int] = []
    free: list[bool] = []
    for position, node in enumerate(nodes):
        if isinstance(node, ApplyNode):
            args = node.args
            free.append(any(free[at] for at in args))
            counts = [1 if free[at] else _magnitude(nodes[at], bits[at]) for at in args]
            bits.append(_bits(node, [bits[at] for at in args], counts))
        else:
            free.append(isinstance(node, SymbolNode))
            bits.append(_leaf_bits(node))
        if bits[-1] > MAX_BITS:
            raise _too_large(f"{where}[{position}]")


def _too_large(where: str) -> LimitError:
    return LimitError(
        "an expression has a value that is too large",
        where=where,
        expected=f"at most {MAX_BITS} bits",
    )


def check_exponents(nodes: Sequence[ExprNode], env: ShapeEnvDesc, where: str) -> None:
    """Refuse a power or a factorial that is too large with the recorded numbers in it.

    Args:
        nodes: arguments before what uses them.
        env: what knows hints, and ranges, for the symbols.
        where: the table.

    Raises:
        LimitError: the value may have more than ``MAX_BITS`` bits.
    """
    if not any(isinstance(node, ApplyNode) and node.function in _GROWING for node in nodes):
        return
    known = {symbol.name: _known_bits(symbol) for symbol in env.symbols}
    bits: list[int] = []
    for position, node in enumerate(nodes):
        if isinstance(node, ApplyNode):
            args = [bits[at] for at in node.args]
            counts = [_magnitude(nodes[at], bits[at]) for at in node.args]
            bits.append(_bits(node, args, counts))
        else:
            bits.append(
                known.get(node.name, 1) if isinstance(node, SymbolNode) else _leaf_bits(node)
            )
        if bits[-1] > MAX_BITS:
            raise _too_large(f"{where}[{position}]")


def _known_bits(symbol: SymbolDesc) -> int:
    """Of the largest number that a symbol may be given; ends of ranges that are infinite are none."""
    exprs = (symbol.hint, symbol.real_value, symbol.lower)
    roots = [expr.nodes[-1] for expr in exprs if expr is not None and expr.nodes]
    found = [_leaf_bits(root) for root in roots if not isinstance(root, AtomNode)]
    override = 0 if symbol.hint_override is None else symbol.hint_override.bit_length()
    return max(1, override, *found)


def _leaf_bits(node: ExprNode) -> int:
    if isinstance(node, IntNode):
        return node.value.bit_length()
    if isinstance(node, RationalNode):
        return node.numerator.bit_length() + node.denominator.bit_length()
    if isinstance(node, FloatNode):
        return node.mantissa.bit_length()
    return _SYMBOL_BITS


def _bits(node: ApplyNode, args: list[int], counts: list[int]) -> int:
    """About how many bits the value of an application has at most.

    Args:
        node: the application.
        args: the bits of its arguments.
        counts: what they are about, where that is how often something is multiplied.
    """
    if node.function == "Mul":
        return sum(args)
    if node.function in _POWERS and len(args) == 2:
        return args[0] + counts[1] if node.function == "LShift" else args[0] * counts[1]
    if node.function in _FACTORIALS and args:
        return args[0] * counts[0]
    return max(args, default=1) + len(args).bit_length()


def _magnitude(node: ExprNode, bits: int) -> int:
    """About what a number is at most."""
    if isinstance(node, IntNode):
        return max(abs(node.value), 1)
    if isinstance(node, RationalNode):
        return abs(node.numerator) // max(node.denominator, 1) + 1
    if isinstance(node, FloatNode):
        return 1  # evaluated as a float
    return 1 << min(bits, 64)


def check_products(
    tables: Mapping[str, Sequence[Any]], roots: Sequence[int | tuple[int, ...]], where: str
) -> None:
    """Refuse products of sums that are too large with their brackets multiplied out.

    Torch does that (``_fast_expand``) to each expression that it asks about, and to the number of
    elements of each tensor. Twenty sums of two terms in one product have a million of them.

    Args:
        tables: the rows by the name of their table.
        roots: of each expression the position of its root, or those of all its nodes.
        where: the document.

    Raises:
        LimitError: it takes too many multiplications.
    """
    most = PRODUCTS + PRODUCTS_PER_ROW * (len(tables["nodes"]) + len(roots))
    terms: list[int] = []
    work: list[int] = []
    for node in tables["nodes"]:
        if not isinstance(node, ApplyNode) or not node.args:
            terms.append(1)
            work.append(0)
            continue
        args = [terms[at] for at in node.args]
        found = min(_terms(node, args, tables["nodes"], most), most + 1)
        terms.append(found)
        multiplied = node.function != "Add" and found > max(args)
        own = found * len(args) if multiplied else 0
        work.append(min(own + sum([work[at] for at in node.args]), most + 1))
    positions = [root if isinstance(root, int) else root[-1] for root in roots]
    total = sum([work[at] for at in positions])
    if total <= most:
        known = {id(row): terms[at] for row, at in zip(tables["exprs"], positions, strict=True)}
        total += _of_sizes(tables["tensors"], known, most)
    if total > most:
        raise LimitError(
            "the products of sums are too large multiplied out",
            where=f"{where}.exprs",
            expected=f"at most {most} multiplications",
        )


def _terms(node: ApplyNode, args: list[int], nodes: Sequence[ExprNode], most: int) -> int:
    """How many terms the value of an application has at most, if it is a sum.

    A function may be found to be one of its arguments, as a maximum or a division by one is.
    """
    if node.function == "Add":
        return sum(args)
    if node.function == "Mul":
        return _product(args, most)
    if node.function in _POWERS and len(args) == 2 and args[0] > 1:
        exponent = nodes[node.args[1]]
        if isinstance(exponent, IntNode):
            return _choices(args[0], min(abs(exponent.value), most), most)
    return max(args)


def _product(numbers: list[int], most: int) -> int:
    result = 1
    for number in numbers:
        result = min(result * number, most + 1)
    return result


def _choices(terms: int, power: int, most: int) -> int:
    """The terms of a power of a sum: how many ways there are to choose so many factors."""
    few, many = sorted((terms - 1, power))
    result = 1
    for i in range(1, few + 1):
        result = result * (many + i) // i
        if result > most:
            break
    return result


def _of_sizes(rows: Sequence[MetaTensorDesc], terms: Mapping[int, int], most: int) -> int:
    """Multiplications for the numbers of elements and the extents of tensors, each layout once."""
    total = 0
    seen: set[tuple[int, ...]] = set()
    same: set[tuple[int, int]] = set()  # by ids of parts, which the rows keep alive
    for row in rows:
        ids = id(row.size), id(row.stride)
        if ids in same:
            continue
        same.add(ids)
        layout = (*map(_expr_id, row.size), *map(_expr_id, row.stride))
        if not any(layout) or layout in seen:
            continue
        seen.add(layout)
        counts = [terms.get(part, 1) for part in layout]
        size, stride = counts[: len(row.size)], counts[len(row.size) :]
        elements = _product(size, most)
        if elements > max(size, default=1):
            total += elements * len(size)
        # An extent is the sum of each size less one, times its stride.
        total += sum([(n + 1) * step for n, step in zip(size, stride, strict=False) if step > 1])
        if total > most:
            break
    return total


def _expr_id(n: IntLike) -> int:
    return id(n.expr) if isinstance(n, SymDesc) else 0


def check_tensors(rows: Sequence[MetaTensorDesc], where: str) -> None:
    """Refuse tensors that hold too many others, each counted as often as it is held.

    Args:
        rows: the records in the order of their table: each holds earlier ones.
        where: the table.

    Raises:
        LimitError: they hold too many.
    """
    most = 10_000 + TENSORS_PER_ROW * len(rows)
    weights: dict[int, int] = {}
    total = 0
    for position, row in enumerate(rows):
        weight = 1
        if _HELD(row) != _NOTHING_HELD:
            weight += sum([weights.get(id(part), 1) for part in _parts(row)])
            weights[id(row)] = weight
        total += weight
        if total > most:
            raise LimitError(
                "the tensors hold too many others, each counted as often as it is held",
                where=f"{where}[{position}]",
                expected=f"at most {most} together",
            )


_HELD = attrgetter("base", "grad", "subclass", "functorch", "functional")
_NOTHING_HELD = (None,) * 5


def _parts(row: MetaTensorDesc) -> Iterator[MetaTensorDesc]:
    if row.base is not None:
        yield row.base
    if row.grad is not None:
        yield row.grad
    if row.subclass is not None:
        for _, inner in row.subclass.tensors:
            yield inner
    for wrapper in (row.functorch, row.functional):
        if wrapper is not None:
            yield wrapper.unwrapped
