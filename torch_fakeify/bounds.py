"""Bounds on what a document may ask of those that walk it as a tree.

A row that others refer to is written once, and what refers to each row twice is small as a graph
and larger than any memory as a tree. The codec is linear in the graph. But sympy and torch walk
every expression as a tree, and a converter makes the inner tensors of each wrapper anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .desc import ApplyNode, FloatNode, IntNode, RationalNode, SymbolNode
from .errors import LimitError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .desc import ExprNode, MetaTensorDesc

__all__ = [
    "allowed_characters",
    "allowed_nodes",
    "check_numbers",
    "check_tables",
    "check_tensors",
    "tree_nodes",
]

NODES_PER_ROW = 128
TENSORS_PER_ROW = 64
MAX_BITS = 1 << 18
"""Of a number that may come of an expression when sympy evaluates it, as it does on any occasion."""
_SYMBOL_BITS = 64
_POWERS = frozenset({"Pow", "PowByNatural", "FloatPow", "LShift", "RoundDecimal"})
_FACTORIALS = frozenset({"gamma", "loggamma"})


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

    A symbol counts as 64 bits, and as an exponent it is taken to be small.

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
            bits.append(_bits(node, [bits[at] for at in args], [free[at] for at in args], nodes))
        else:
            free.append(isinstance(node, SymbolNode))
            bits.append(_leaf_bits(node))
        if bits[-1] > MAX_BITS:
            raise LimitError(
                "an expression has a value that is too large",
                where=f"{where}[{position}]",
                expected=f"at most {MAX_BITS} bits",
            )


def _leaf_bits(node: ExprNode) -> int:
    if isinstance(node, IntNode):
        return node.value.bit_length()
    if isinstance(node, RationalNode):
        return node.numerator.bit_length() + node.denominator.bit_length()
    if isinstance(node, FloatNode):
        return node.mantissa.bit_length()
    return _SYMBOL_BITS


def _bits(node: ApplyNode, args: list[int], free: list[bool], nodes: Sequence[ExprNode]) -> int:
    """About how many bits the value of an application has at most."""
    if node.function == "Mul":
        return sum(args)
    if node.function in _POWERS and len(args) == 2:
        times = 1 if free[1] else _magnitude(nodes[node.args[1]], args[1])
        return args[0] + times if node.function == "LShift" else args[0] * times
    if node.function in _FACTORIALS and args and not free[0]:
        return args[0] * _magnitude(nodes[node.args[0]], args[0])
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
        weight = 1 + sum([weights.get(id(part), 1) for part in _parts(row)])
        weights[id(row)] = weight
        total += weight
        if total > most:
            raise LimitError(
                "the tensors hold too many others, each counted as often as it is held",
                where=f"{where}[{position}]",
                expected=f"at most {most} together",
            )


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
