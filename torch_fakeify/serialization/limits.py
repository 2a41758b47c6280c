"""Limits on the expanded size of a document: what exceeds one is refused by a `LimitError`.

Rows are shared, so a small document can describe a graph that is larger than any memory as a tree.
The codec is linear in the graph, but sympy and torch walk every expression as a tree, and a converter
makes the inner tensors of each wrapper.
"""

from __future__ import annotations

import re
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch_fakeify.errors import FormatError, LimitError
from torch_fakeify.records.frame import DeviceInfoDesc, SettingDesc
from torch_fakeify.records.rewrite import parts_of
from torch_fakeify.records.tensor import (
    ApplyNode,
    AtomNode,
    DictValue,
    FloatNode,
    FloatValue,
    IntNode,
    ListValue,
    RationalNode,
    SymbolNode,
    TupleValue,
)

from .expansions import check_products
from .faults import check_limit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch_fakeify.records.fake_kernel import FakeKernelDesc
    from torch_fakeify.records.frame import OperatorDesc, SurroundingsDesc
    from torch_fakeify.records.shape_env import ShapeEnvDesc, SymbolDesc
    from torch_fakeify.records.tensor import ExprNode, MetaTensorDesc

NODES_PER_ROW = 128
TENSORS_PER_ROW = 64
MAX_BITS = 1 << 18
"""Most bits of a number that sympy may get when it evaluates an expression."""
_SYMBOL_BITS = 64
_POWERS = frozenset({"Pow", "PowByNatural", "LShift", "RoundDecimal"})
"""Without ``FloatPow``: all floats have one size."""
_FACTORIALS = frozenset({"gamma", "loggamma"})
_GROWING = _POWERS | _FACTORIALS

SETTINGS = 2000
"""Most settings, environment variables and other entries of a frame's surroundings, each. Torch has 860."""
SETTING_TEXT = 4096
"""Most characters of a text in the surroundings."""
SETTING_PARTS = 1000
"""Most parts of the value of a setting."""
SETTING_DEPTH = 8
"""Most levels of the value of a setting."""
SETTING_BITS = 64
"""Bits of an integer of a setting, with its sign."""


OPERATORS = 1000
"""Most operators outside of torch, with their overloads."""
SCHEMA_TEXT = 4096
"""Most characters of the schema of an operator."""
SCHEMA_DEPTH = 16
"""Most levels of its brackets."""
KERNEL_PARTS, KERNEL_DEPTH = 20_000, 100
"""Most parts of a fake kernel with their names and numbers, and the deepest nesting of them."""
KERNEL_NAME = 2000
"""Most characters of a name or message."""
_NAME = r"[A-Za-z_]\w*"
_SCHEMA = re.compile(rf"{_NAME}::{_NAME}(\.{_NAME})?\([ -~]*", re.ASCII)


def check_surroundings(desc: SurroundingsDesc, where: str) -> None:
    """Refuse surroundings that no process has: too large, or values that are not plain data.

    Raises:
        LimitError: there are too many entries, or a text or a value is too large.
        FormatError: the value of a setting or option is not plain data.
    """
    for name in desc.__struct_fields__:
        part, place = getattr(desc, name), f"{where}.{name}"
        if isinstance(part, tuple) and len(part) > SETTINGS:  # pyright: ignore[reportUnknownArgumentType]
            raise _too_much(place, f"at most {SETTINGS} entries")
        for at, row in enumerate(part if isinstance(part, tuple) else (part,)):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            _check_parts(row, f"{place}[{at}]")


_ROWS = (SettingDesc, DeviceInfoDesc)
_CONTAINERS = (ListValue, TupleValue, DictValue)


def _check_parts(row: Any, where: str) -> None:
    """Check one entry of the surroundings."""
    left = SETTING_PARTS + len(getattr(row, "__struct_fields__", ()))
    pending: list[tuple[Any, int]] = [(row, 0)]
    while pending:
        value, depth = pending.pop()
        kind = type(value)
        left -= kind not in (tuple, *_ROWS)
        if left < 0 or depth > 3 * SETTING_DEPTH:
            raise _too_much(where, f"at most {SETTING_PARTS} parts and {SETTING_DEPTH} levels")
        if kind is str and len(value) > SETTING_TEXT:
            raise _too_much(where, f"texts of at most {SETTING_TEXT} characters")
        if kind is int and value.bit_length() >= SETTING_BITS:
            raise _too_much(where, f"integers of {SETTING_BITS} bits")
        if kind is tuple:
            pending += [(item, depth + 1) for item in value]
        elif kind is DictValue and any(isinstance(key, _CONTAINERS) for key, _ in value.items):
            raise _not_plain(where)
        elif kind in _CONTAINERS:
            pending.append((value.items, depth + 1))
        elif kind in _ROWS:
            pending += [(part, depth) for part in parts_of(value)]
        elif kind not in _SCALARS:
            raise _not_plain(where)


_SCALARS = frozenset({type(None), bool, int, float, str, FloatValue})


def _not_plain(where: str) -> FormatError:
    return FormatError(
        "the value of a setting is not plain data",
        where=where,
        expected="scalars, and lists, tuples and dictionaries of scalars",
    )


def _too_much(where: str, expected: str) -> LimitError:
    return LimitError("the surroundings are too large", where=where, expected=expected)


def check_operators(operators: Sequence[OperatorDesc], where: str) -> None:
    """Refuse schemas of operators that are too many, too long, or do not begin with a name.

    The rest of a schema is for torch to parse.

    Raises:
        LimitError: there are too many, or one is too long.
        FormatError: one is not the text of a schema.
    """
    check_limit(len(operators), OPERATORS, "too many operators", where)
    for at, operator in enumerate(operators):
        place = f"{where}[{at}]"
        longest = max(len(operator.schema), *map(len, operator.tags), len(operator.tags))
        what = "the schema of an operator is too long"
        check_limit(longest, SCHEMA_TEXT, what, place, " characters")
        if _SCHEMA.fullmatch(operator.schema) is None:
            raise FormatError(
                "not the schema of an operator",
                where=f"{place}.schema",
                expected="namespace::name(arguments) -> results",
                found=operator.schema,
            )
        depth, what = _nesting(operator.schema), "the schema of an operator is nested too deeply"
        # Torch's parser is recursive.
        check_limit(depth, SCHEMA_DEPTH, what, f"{place}.schema", " levels of parentheses")
        if operator.fake is not None:
            _check_kernel(operator.fake, f"{place}.fake")


def _check_kernel(kernel: FakeKernelDesc, where: str) -> None:
    """Refuse a fake kernel with too many or too deeply nested formulas, or with numbers of more than 64 bits."""
    left = KERNEL_PARTS
    todo: list[tuple[Any, int]] = [(kernel, 0)]
    while todo:
        part, depth = todo.pop()
        if isinstance(part, int) and not -(1 << 63) <= part < 1 << 63:
            raise LimitError(
                "a number of a fake kernel is too large", where=where, expected="at most 64 bits"
            )
        if isinstance(part, str):
            what = "a name of a fake kernel is too long"
            check_limit(len(part), KERNEL_NAME, what, where, " characters")
        left -= 1
        if left < 0 or depth > KERNEL_DEPTH:
            raise LimitError(
                "a fake kernel is too large",
                where=where,
                expected=f"at most {KERNEL_PARTS} parts, at most {KERNEL_DEPTH} deep",
            )
        todo += [(item, depth + 1) for item in parts_of(part)]


def _nesting(text: str) -> int:
    """Return how many brackets are open at most."""
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def allowed_characters(size: int) -> int:
    """Return how many characters the names of sources may have, in a document of ``size`` bytes.

    A name contains that of its base; those of a deep module have 2 characters for each byte.
    """
    return 20_000_000 + 64 * size


def allowed_nodes(rows: int, most: int) -> int:
    """Return how many nodes the expressions of a document with ``rows`` rows may have, at most ``most``.

    A thousand prefix sums of a thousand sizes have 170 nodes for each row.
    """
    return min(most, 200_000 + NODES_PER_ROW * rows)


def tree_nodes(
    args: Sequence[tuple[int, ...]], exprs: Sequence[int | tuple[int, ...]], most: int
) -> int:
    """Return the number of nodes of all expressions as trees, up to ``most`` + 1.

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
    """Refuse tables that are too large for sympy, torch or a converter.

    Args:
        tables: the rows by the name of their table.
        found: how many nodes the expressions have as trees, and how many they may have.
        where: the document.
    """
    what = "the expressions are too large with their shared parts written out"
    check_limit(*found, what, f"{where}.exprs", " nodes together")
    check_numbers(tables["nodes"], f"{where}.nodes")
    check_tensors(tables["tensors"], f"{where}.tensors")


def check_exponents(nodes: Sequence[ExprNode], symbols: Iterable[SymbolDesc], where: str) -> None:
    """Refuse a power or a factorial that is too large at the recorded hints and ranges.

    Args:
        nodes: as for `check_numbers`.
        symbols: have the hints and ranges; a symbol that is not among them counts as a small number.
        where: the table.
    """
    if any(isinstance(node, ApplyNode) and node.function in _GROWING for node in nodes):
        check_numbers(nodes, where, {symbol.name: _hint_bits(symbol) for symbol in symbols})


def check_numbers(
    nodes: Sequence[ExprNode], where: str, known: Mapping[str, int] | None = None
) -> None:
    """Refuse a power, a factorial or a product that is too large to be evaluated.

    Args:
        nodes: arguments before what uses them.
        where: the table.
        known: bits of symbols by name. Without it a symbol counts as 64 bits, but as a small exponent:
            `check_exponents` checks those.
    """
    bits: list[int] = []
    free: list[bool] = []
    """Whether a symbol without a value is in an expression."""
    for position, expr_node in enumerate(nodes):
        if isinstance(expr_node, ApplyNode):
            args = expr_node.args
            free.append(any(free[at] for at in args))
            counts = [1 if free[at] else _magnitude(nodes[at], bits[at]) for at in args]
            bits.append(_bits(expr_node, [bits[at] for at in args], counts))
        else:
            is_symbol = isinstance(expr_node, SymbolNode)
            free.append(is_symbol and known is None)
            bits.append(
                _leaf_bits(expr_node)
                if known is None or not is_symbol
                else known.get(expr_node.name, 1)
            )
        if bits[-1] > MAX_BITS:
            what = "an expression has a value that is too large"
            check_limit(bits[-1], MAX_BITS, what, f"{where}[{position}]", " bits")


def _hint_bits(symbol: SymbolDesc) -> int:
    """Return the bits of a symbol's largest recorded value; infinite bounds do not count."""
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
    """Return about how many bits the value of an application has at most.

    Args:
        node: the application.
        args: the bits of its arguments.
        counts: about their values, for exponents and factorials.
    """
    if node.function == "Mul":
        return sum(args)
    if node.function in _POWERS and len(args) == 2:
        return args[0] + counts[1] if node.function == "LShift" else args[0] * counts[1]
    if node.function in _FACTORIALS and args:
        return args[0] * counts[0]
    return max(args, default=1) + len(args).bit_length()


def _magnitude(node: ExprNode, bits: int) -> int:
    """Return about the largest absolute value of a number."""
    if isinstance(node, IntNode):
        return max(abs(node.value), 1)
    if isinstance(node, RationalNode):
        return abs(node.numerator) // max(node.denominator, 1) + 1
    if isinstance(node, FloatNode):
        return 1  # evaluated as a float
    return 1 << min(bits, 64)


def check_frame(
    tables: Mapping[str, Sequence[Any]],
    roots: Sequence[int | tuple[int, ...]],
    expr_ids: Mapping[int, int],
    env: ShapeEnvDesc,
    products: int,
    where: str,
) -> None:
    """Refuse expressions that are too large for a ``ShapeEnv``, multiplied out or at its hints and ranges.

    Other arguments are those of `check_products`.
    """
    check_products(tables, roots, expr_ids, products, where)
    check_exponents(tables["nodes"], env.symbols, f"{where}.nodes")


def check_tensors(rows: Sequence[MetaTensorDesc], where: str) -> None:
    """Refuse tensors that contain too many others, each counted as often as it occurs.

    Args:
        rows: the records in the order of their table: each refers to earlier ones.
        where: the table.
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
            what = "the tensors hold too many others, each counted as often as it is held"
            check_limit(total, most, what, f"{where}[{position}]", " together")


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
