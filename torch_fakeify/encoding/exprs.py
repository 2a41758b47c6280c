"""Sympy expressions as flat graphs, and back, over a closed table of functions.

An ``ExprDesc`` lists distinct sub-expressions once, arguments before what uses them. Both
directions are iterative, with time and space linear in the number of distinct sub-expressions, also for
deep and heavily shared expressions.

Decoding never evaluates: an unevaluated ``2*(a + b)`` stays unevaluated, and
``encode_expr(decode_expr(d)) == d``. No text is parsed.
"""

from __future__ import annotations

import functools
import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeAlias, cast

import sympy
import torch
from sympy.core.assumptions import _assume_rules
from sympy.core.function import Application
from sympy.core.logic import fuzzy_and
from sympy.core.operations import AssocOp, LatticeOp
from sympy.functions.elementary.piecewise import ExprCondPair
from sympy.logic.boolalg import Boolean
from typing_extensions import assert_never

from torch_fakeify.compat.torch_symbols import SingletonInt, SymNode, int_oo, sympy_functions
from torch_fakeify.errors import FormatError, UnknownNameError, UnsupportedValueError
from torch_fakeify.records.tensor import (
    ApplyNode,
    AtomNode,
    ExprDesc,
    ExprNode,
    FloatNode,
    IntLike,
    IntNode,
    NestedIntDesc,
    RationalNode,
    SymbolNode,
    SymDesc,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_INT_BITS = 1 << 16
"""Integers of more bits are refused: arithmetic on them would take a reader's memory."""

MAX_FLOAT_EXPONENT = 1 << 20
"""Floats with a binary exponent beyond this are refused: ``int()`` of them takes memory."""

MAX_FLOAT_PRECISION = 1 << 16
"""Floats of more bits are refused."""

MAX_ARITY = 1 << 20
"""Maximum number of arguments of a sub-expression."""

_SINGLETON_INT = "SingletonInt"

Domain: TypeAlias = Literal["any", "expr", "bool", "pair", "pieces"]


class Head(NamedTuple):
    """A supported function: its class, number of arguments and their domain."""

    name: str
    cls: type[sympy.Basic]
    low: int
    high: int
    domain: Domain


_Rows: TypeAlias = tuple[tuple[str, int, int, Domain], ...]
"""Names of functions with the same smallest and largest number of arguments and the same domain."""

# sympy's own classes. Names are sympy's spelling in an expression; a name that torch's functions
# take over (``Mod``, ``Min``, ``Max``) is prefixed.
_SYMPY_HEADS: _Rows = (
    ("Add Mul", 2, MAX_ARITY, "expr"),
    ("Pow", 2, 2, "expr"),
    ("sympy.Mod", 2, 2, "any"),
    ("sympy.Min sympy.Max", 2, MAX_ARITY, "expr"),
    ("Eq Ne", 2, 2, "any"),
    ("Lt Le Gt Ge", 2, 2, "expr"),
    ("And Or", 2, MAX_ARITY, "bool"),
    ("Not", 1, 1, "bool"),
    ("Xor Nand Nor", 2, MAX_ARITY, "bool"),
    ("Implies", 2, 2, "bool"),
    ("ITE", 3, 3, "bool"),
    ("ExprCondPair", 2, 2, "pair"),
    ("Piecewise", 1, MAX_ARITY, "pieces"),
    ("Abs sign floor ceiling frac re im conjugate exp", 1, 1, "any"),
    ("log", 1, 2, "any"),
    ("sin cos tan cot sec csc asin acos atan", 1, 1, "any"),
    ("atan2", 2, 2, "any"),
    ("sinh cosh tanh asinh acosh atanh gamma loggamma erf", 1, 1, "any"),
)

# Every class of torch.utils._sympy.functions.
_TORCH_HEADS: _Rows = (
    ("FloorDiv CleanDiv CeilDiv", 2, 2, "any"),
    ("ModularIndexing Where", 3, 3, "any"),
    ("PythonMod Mod", 2, 2, "any"),
    ("CeilToInt FloorToInt TruncToInt TruncToFloat RoundToInt", 1, 1, "any"),
    ("RoundDecimal", 2, 2, "any"),
    ("ToFloat", 1, 1, "any"),
    ("LShift RShift", 2, 2, "any"),
    ("Max Min", 2, MAX_ARITY, "any"),
    ("PowByNatural FloatPow FloatTrueDiv IntTrueDiv", 2, 2, "any"),
    ("IsNonOverlappingAndDenseIndicator", 0, MAX_ARITY, "any"),
    ("Identity OpaqueUnaryFn_sqrt OpaqueUnaryFn_cos OpaqueUnaryFn_cosh", 1, 1, "any"),
    ("OpaqueUnaryFn_sin OpaqueUnaryFn_sinh OpaqueUnaryFn_tan OpaqueUnaryFn_tanh", 1, 1, "any"),
    ("OpaqueUnaryFn_asin OpaqueUnaryFn_acos OpaqueUnaryFn_atan OpaqueUnaryFn_exp", 1, 1, "any"),
    ("OpaqueUnaryFn_log OpaqueUnaryFn_asinh OpaqueUnaryFn_log2", 1, 1, "any"),
    ("BitwiseFn_bitwise_and BitwiseFn_bitwise_or BitwiseFn_bitwise_xor", 2, 2, "any"),
)

_ATOMS: Mapping[str, sympy.Basic] = MappingProxyType(
    {
        "true": sympy.true,
        "false": sympy.false,
        "oo": sympy.oo,
        "-oo": sympy.S.NegativeInfinity,
        "int_oo": int_oo,
        "-int_oo": sympy.S.NegativeIntInfinity,
        "zoo": sympy.zoo,
        "nan": sympy.nan,
        "pi": sympy.pi,
        "E": sympy.E,
        "I": sympy.I,
        "EulerGamma": sympy.EulerGamma,
        "GoldenRatio": sympy.GoldenRatio,
        "Catalan": sympy.Catalan,
    }
)


@functools.cache
def _nargs(head: Head) -> Any:
    """The ``nargs`` that sympy sets on an application, or ``None``."""
    cls, low = head.cls, head.low
    # Min, Max and Piecewise skip the constructor that sets it.
    skips = (sympy.Min, sympy.Max, sympy_functions.MinMaxBase, sympy.Piecewise)
    if not issubclass(cls, Application) or issubclass(cls, skips):
        return None
    # Equal for all applications of a class, so one example is enough.
    specimen: Any = (
        cls(*sympy.symbols("x y"))
        if issubclass(cls, LatticeOp)
        else Application.__new__(cls, *sympy.symbols(f"x:{low}"), evaluate=False)
    )
    return specimen.nargs


def _heads() -> dict[str, Head]:
    found: dict[str, Head] = {}
    for module, rows in ((sympy, _SYMPY_HEADS), (sympy_functions, _TORCH_HEADS)):
        for names, low, high, domain in rows:
            for name in names.split():
                short = name.removeprefix("sympy.")
                cls = ExprCondPair if name == "ExprCondPair" else getattr(module, short)
                found[name] = Head(name, cls, low, high, domain)
    return found


HEADS: Mapping[str, Head] = MappingProxyType(_heads())
"""The closed table of functions by the name that a record has for them."""

_HEAD_OF: Mapping[type, Head] = MappingProxyType({head.cls: head for head in HEADS.values()})
_ATOM_OF: Mapping[type, str] = MappingProxyType({type(v): k for k, v in _ATOMS.items()})


# --- encode -----------------------------------------------------------------------------------


def encode_expr(expr: sympy.Basic) -> ExprDesc:
    """The record of a sympy expression.

    Linear in the number of distinct sub-expression objects; equal sub-expressions become one
    node. Does not evaluate, hash or compare the expression.

    Raises:
        UnsupportedValueError: a sub-expression is of a class outside the closed table, a
            ``Dummy``, or a number beyond the limits of this module.
    """
    if not isinstance(expr, sympy.Basic):
        raise UnsupportedValueError(
            "not a sympy expression", expected="sympy.Basic", found=_class_name(expr)
        )
    if isinstance(expr, (sympy.Symbol, sympy.Integer)):
        return ExprDesc(nodes=(_encode_one(expr, ()),))  # most are, and have no parts
    nodes: list[ExprNode] = []
    position: dict[ExprNode, int] = {}
    done: dict[int, int] = {}
    # Holds the objects made by ``args``, so that no id in ``done`` is reused.
    children: dict[int, tuple[sympy.Basic, ...]] = {}
    stack: list[sympy.Basic] = [expr]
    while stack:
        item = stack[-1]
        key = id(item)
        if key in done:
            stack.pop()
            continue
        args = children.get(key)
        if args is None:
            args = children[key] = _arguments(item)
            missing = [arg for arg in reversed(args) if id(arg) not in done]
            if missing:
                stack.extend(missing)
                continue
        stack.pop()
        record = _encode_one(item, tuple(done[id(arg)] for arg in args))
        at = position.get(record)
        if at is None:
            at = position[record] = len(nodes)
            nodes.append(record)
        done[key] = at
    return ExprDesc(nodes=tuple(nodes))


def _arguments(item: sympy.Basic) -> tuple[sympy.Basic, ...]:
    if isinstance(item, SingletonInt):
        nested: Any = item
        return (sympy.Integer(nested._val), sympy.sympify(nested._coeff, strict=True))
    # Not ``args``, which some classes sort anew; equality and hash go by ``_args``.
    args: tuple[sympy.Basic, ...] = item._args
    head = _HEAD_OF.get(type(item))
    if head is not None:
        problem = _problem(head, args)
        if problem is not None:
            raise UnsupportedValueError(
                f"a malformed application of {head.name}", expected=problem[0], found=problem[1]
            )
    return args


def _encode_one(item: sympy.Basic, args: tuple[int, ...]) -> ExprNode:
    cls = type(item)
    if cls is sympy.Symbol:
        symbol = cast("sympy.Symbol", item)
        # commutative=True is every symbol's default; spelling it out changes nothing.
        explicit = {k: v for k, v in symbol._assumptions_orig.items() if (k, v) != _COMMUTATIVE}
        return SymbolNode(symbol.name, tuple(sorted(explicit.items())))
    head = _HEAD_OF.get(cls)
    if head is not None:
        return ApplyNode(head.name, args)
    atom = _ATOM_OF.get(cls)
    if atom is not None:
        return AtomNode(atom)
    if isinstance(item, sympy.Integer):
        return IntNode(_bounded(item.p))
    if isinstance(item, sympy.Rational):
        return RationalNode(_bounded(item.p), _bounded(item.q))
    if isinstance(item, sympy.Float):
        sign, mantissa, exponent, _ = item._mpf_
        record = FloatNode(int(-mantissa if sign else mantissa), int(exponent), int(item._prec))
        problem = _float_problem(record)
        if problem is not None:
            raise UnsupportedValueError("a float out of range", expected=problem, found=str(record))
        return record
    if isinstance(item, SingletonInt):
        return ApplyNode(_SINGLETON_INT, args)
    raise UnsupportedValueError(
        "an expression that a record cannot hold",
        expected="a symbol, number or function that torch's symbolic shapes use",
        found=f"{_class_name(item)} ({_short(item)})",
        fix="Rewrite it with the functions of sympy or torch.utils._sympy.functions.",
    )


_COMMUTATIVE = ("commutative", True)


def _bounded(value: int) -> int:
    if value.bit_length() > MAX_INT_BITS:
        raise UnsupportedValueError(
            "an integer too large for a record",
            expected=f"at most {MAX_INT_BITS} bits",
            found=f"{value.bit_length()} bits",
        )
    return int(value)


def _class_name(obj: object) -> str:
    # An undefined function, Function("f"), is a class of no module.
    module = type(obj).__module__ or "undefined"
    return f"{module}.{type(obj).__qualname__}"


def _short(item: sympy.Basic) -> str:
    text = getattr(item, "name", None)
    return str(text) if text is not None else f"{len(item.args)} arguments"


# --- decode -----------------------------------------------------------------------------------


def decode_expr(d: ExprDesc) -> sympy.Basic:
    """The sympy expression of a record, built part by part without evaluation.

    Raises:
        FormatError: the record is malformed (with its ``$.nodes[i]``): no nodes, a reference to
            a later node, a wrong number or kind of arguments, an ill-typed or oversized number,
            a node that occurs twice or is never used.
        UnknownNameError: a function, constant or assumption that is not in the closed table.
    """
    if not d.nodes:
        _fail("$.nodes", "an expression without nodes", "at least one node", "none")
    if len(d.nodes) == 1 and isinstance(d.nodes[0], (SymbolNode, IntNode)):
        return _decode_one(d.nodes[0], [], "$.nodes[0]")
    built: list[sympy.Basic] = []
    used: set[int] = set()
    seen: set[ExprNode] = set()
    for i, record in enumerate(d.nodes):
        where = f"$.nodes[{i}]"
        expr = _decode_one(record, built, where)
        if record in seen:
            _fail(where, "a node occurs twice", "distinct nodes", _show(record))
        seen.add(record)
        if isinstance(record, ApplyNode):
            used.update(record.args)
        built.append(expr)
    unused = next((i for i in range(len(built) - 1) if i not in used), None)
    if unused is not None:
        _fail(f"$.nodes[{unused}]", "a node is never used", "an argument of a later node", "none")
    last = built[-1]
    if isinstance(last, ExprCondPair):
        _fail(f"$.nodes[{len(built) - 1}]", "not an expression", "an expression", "ExprCondPair")
    return last


def _decode_one(record: ExprNode, built: list[sympy.Basic], where: str) -> sympy.Basic:
    match record:
        case SymbolNode():
            return _decode_symbol(record, where)
        case IntNode():
            return sympy.Integer(_checked_int(record.value, where))
        case FloatNode():
            return _decode_float(record, where)
        case RationalNode(numerator, denominator):
            p, q = _checked_int(numerator, where), _checked_int(denominator, where)
            if q < 2 or math.gcd(p, q) != 1:
                lowest = "lowest terms, denominator above 1"
                _fail(where, "a malformed fraction", lowest, _show(record))
            return sympy.Rational(p, q)
        case AtomNode(name):
            if name in _ATOMS:
                return _ATOMS[name]
            raise UnknownNameError(
                "an unknown constant",
                where=where,
                expected=f"one of {', '.join(_ATOMS)}",
                found=repr(name),
            )
        case ApplyNode():
            return _decode_apply(record, built, where)
        case _:
            assert_never(record)


def _decode_symbol(record: SymbolNode, where: str) -> sympy.Symbol:
    if type(record.name) is not str or not record.name or not record.name.isprintable():
        # Torch logs it as it is.
        _fail(where, "a symbol without a name", "a printable text, not empty", repr(record.name))
    names = [name for name, _ in record.assumptions]
    if names != sorted(set(names)):
        _fail(where, "assumptions out of order", "sorted distinct names", ", ".join(names))
    for name, value in record.assumptions:
        if name not in _assume_rules.defined_facts:
            raise UnknownNameError("an unknown assumption", where=where, found=repr(name))
        if type(value) is not bool:
            _fail(where, f"assumption {name!r} is not a boolean", "true or false", repr(value))
        if (name, value) == _COMMUTATIVE:
            _fail(where, "an assumption that holds by default", "no 'commutative'", "true")
    # As torch asks for it: sympy then gives the object that torch has.
    assumptions = sorted(record.assumptions, key=lambda assumption: assumption[0] != "positive")
    try:
        return sympy.Symbol(record.name, **dict(assumptions))
    except ValueError:
        # InconsistentAssumptions is a ValueError
        _fail(where, "assumptions contradict each other", "consistent ones", ", ".join(names))


def _decode_float(record: FloatNode, where: str) -> sympy.Float:
    for value in (record.mantissa, record.exponent, record.precision):
        _checked_int(value, where)
    problem = _float_problem(record)
    if problem is not None:
        _fail(where, "a malformed float", problem, _show(record))
    mantissa = abs(record.mantissa)
    sign = int(record.mantissa < 0)
    mpf = (sign, sympy.Integer(mantissa).p, record.exponent, mantissa.bit_length())
    return cast("sympy.Float", sympy.Float._new(mpf, record.precision, zero=False))


def _float_problem(record: FloatNode) -> str | None:
    if not 1 <= record.precision <= MAX_FLOAT_PRECISION:
        return f"a precision of 1 to {MAX_FLOAT_PRECISION} bits"
    if abs(record.exponent) > MAX_FLOAT_EXPONENT:
        return f"an exponent within {MAX_FLOAT_EXPONENT}"
    if record.mantissa == 0:
        return None if record.exponent == 0 else "an exponent of 0 with a mantissa of 0"
    if record.mantissa % 2 == 0:
        return "an odd mantissa"
    if record.mantissa.bit_length() > record.precision:
        return "a mantissa of no more bits than the precision"
    return None


def _decode_apply(record: ApplyNode, built: list[sympy.Basic], where: str) -> sympy.Basic:
    args: list[sympy.Basic] = []
    for arg in record.args:
        if type(arg) is not int or not 0 <= arg < len(built):
            _fail(where, "a bad reference", "the position of an earlier node", repr(arg))
        args.append(built[arg])
    if record.function == _SINGLETON_INT:
        return _decode_singleton(args, where)
    head = HEADS.get(record.function)
    if head is None:
        raise UnknownNameError(
            "an unknown function",
            where=where,
            expected="a function of sympy or torch.utils._sympy.functions",
            found=repr(record.function),
            fix="Read the file with the version that wrote it, or a later one.",
        )
    problem = _problem(head, args)
    if problem is None and issubclass(head.cls, LatticeOp) and len(set(record.args)) != len(args):
        problem = ("distinct arguments", "an argument twice")
    if problem is not None:
        _fail(where, f"a malformed application of {head.name}", *problem)
    return _apply(head, args)


def _decode_singleton(args: list[sympy.Basic], where: str) -> sympy.Basic:
    if len(args) != 2 or not isinstance(args[0], sympy.Integer):
        _fail(where, "a malformed SingletonInt", "a value and a coefficient", _count(len(args)))
    coeff: Any = args[1]
    # int() only for looks: arithmetic and comparison are the same with sympy's Integer.
    return SingletonInt(
        int(args[0]), coeff=int(coeff) if isinstance(coeff, sympy.Integer) else coeff
    )


def _apply(head: Head, args: list[sympy.Basic]) -> sympy.Basic:
    """Build ``head.cls(*args, evaluate=False)`` without sympy's cache and reordering.

    The cache compares by value, which takes exponential time for shared sub-expressions.
    """
    cls = head.cls
    expr: Any = sympy.Basic.__new__(cls, *args)
    if issubclass(cls, LatticeOp):
        expr._argset = frozenset(args)
        if issubclass(cls, sympy_functions.MinMaxBase):
            expr.unique_summations_symbols = _unique_summands(args)
    elif issubclass(cls, (AssocOp, sympy.Pow)):
        expr.is_commutative = fuzzy_and(arg.is_commutative for arg in args)
    elif cls is sympy.Xor:
        expr._argset = frozenset(args)
    nargs = _nargs(head)
    if nargs is not None:
        expr.nargs = nargs
    # The hash is computed from those of the arguments and cached. Computed here, where the arguments
    # have theirs, it never recurses deeply.
    hash(expr)
    return expr


def _unique_summands(args: list[sympy.Basic]) -> set[sympy.Basic] | None:
    # torch stores the symbols of a Max or Min of sums `a + b` of distinct symbols.
    symbols: list[sympy.Basic] = []
    for arg in args:
        if not (isinstance(arg, sympy.Add) and len(arg.args) == 2):
            return None
        symbols.extend(cast("tuple[sympy.Basic, ...]", arg.args))
    if not all(isinstance(symbol, sympy.Symbol) for symbol in symbols):
        return None
    unique = set(symbols)
    return unique if len(unique) == len(symbols) else None


_DOMAINS: Mapping[Domain, tuple[type, str]] = MappingProxyType(
    {
        "any": (sympy.Basic, "an expression"),
        "expr": (sympy.Expr, "a number"),
        "bool": (Boolean, "a condition"),
        "pair": (Boolean, "a condition"),
        "pieces": (ExprCondPair, "ExprCondPair arguments"),
    }
)
"""The class of the arguments, and what an error calls them; of a pair only the second one."""


def _problem(head: Head, args: Sequence[sympy.Basic]) -> tuple[str, str] | None:
    """What is expected of the arguments of a function and what is found, if that differs."""
    if not head.low <= len(args) <= head.high:
        least = "" if head.low == head.high else f"{head.low} to "
        return least + _count(head.high), _count(len(args))
    if head.domain != "pieces" and any(isinstance(a, ExprCondPair) for a in args):
        return "an expression", "ExprCondPair"
    cls, expected = _DOMAINS[head.domain]
    checked = args[1:] if head.domain == "pair" else args
    wrong = next((a for a in checked if not isinstance(a, cls)), None)
    return None if wrong is None else (expected, _class_name(wrong))


def _checked_int(value: object, where: str) -> int:
    if type(value) is not int:
        _fail(where, "an ill-typed number", "an integer", repr(value))
    if value.bit_length() > MAX_INT_BITS:
        _fail(
            where,
            "an integer too large",
            f"at most {MAX_INT_BITS} bits",
            f"{value.bit_length()} bits",
        )
    return value


def _count(count: int) -> str:
    return "1 argument" if count == 1 else f"{count} arguments"


def _show(record: ExprNode) -> str:
    text = repr(record)
    return text if len(text) <= 120 else text[:117] + "..."


def _fail(where: str, what: str, expected: str, found: str) -> NoReturn:
    raise FormatError(what, where=where, expected=expected, found=found)


# --- symbolic scalars ---------------------------------------------------------------------------


Kind: TypeAlias = Literal["int", "float", "bool"]
_KINDS: Mapping[type, Kind] = MappingProxyType(
    {torch.SymInt: "int", torch.SymFloat: "float", torch.SymBool: "bool"}
)


def encode_sym(
    s: torch.SymInt | torch.SymFloat | torch.SymBool, *, replaced: bool = True
) -> SymDesc:
    """The record of a symbolic scalar: its expression and its hint.

    Adds no guard. The hint is ``None`` for an expression over unbacked symbols. An input that was
    specialized stays symbolic if the replacements of its ``ShapeEnv`` are not applied.

    Raises:
        UnsupportedValueError: a nested int, a scalar that has no expression, or a hint that is
            not finite.
    """
    kind: Kind | None = next((kind for cls, kind in _KINDS.items() if isinstance(s, cls)), None)
    if kind is None:
        raise UnsupportedValueError(
            "not a symbolic scalar", expected="SymInt, SymFloat or SymBool", found=_class_name(s)
        )
    sym_node: Any = s.node
    if sym_node.is_nested_int() and not isinstance(sym_node, SymNode):
        raise UnsupportedValueError(
            "a nested int cannot be recorded",
            found=str(s),
            fix="Pass the components of the jagged nested tensor instead.",
        )
    expr = getattr(sym_node, "expr" if replaced else "_expr", None)
    if expr is None:
        raise UnsupportedValueError(
            "a symbolic scalar without an expression", found=_class_name(sym_node)
        )
    hint = cast("Any", sym_node.hint)
    if isinstance(hint, torch.SymInt) and hint.node.is_nested_int():
        nested: Any = hint.node
        hint = NestedIntDesc(int(nested.nested_int()), int(nested.nested_int_coeff()))
    if isinstance(hint, float) and not math.isfinite(hint):
        raise UnsupportedValueError("a hint that is not finite", where=str(s), found=repr(hint))
    return SymDesc(
        expr=encode_expr(sympy.sympify(expr, strict=True)),
        kind=kind,
        hint=hint,  # pyright: ignore[reportArgumentType]
        constant=getattr(sym_node, "constant", None) is not None,
    )


def check_sym(d: SymDesc) -> None:
    """Check that the fields of a symbolic scalar's record are consistent.

    Raises:
        FormatError: the hint is not of its kind, or a literal differs from its hint.
    """
    if d.hint is not None and not isinstance(d.hint, NestedIntDesc):
        if type(d.hint).__name__ != d.kind:
            _fail("$.hint", "a hint of another kind", d.kind, repr(d.hint))
    elif d.hint is not None and d.kind != "int":
        _fail("$.hint", "a hint of another kind", d.kind, "a nested int")
    if not d.constant:
        return
    expr = decode_expr(d.expr)
    if not isinstance(d.hint, (int, float)) or expr != sympy.sympify(d.hint, strict=True):
        _fail(
            "$.constant", "not a literal", "a number that is also the hint", _show(d.expr.nodes[-1])
        )


def encode_int(s: int | torch.SymInt) -> IntLike:
    """Return an ``int`` unchanged, or the record of a ``SymInt``.

    A ``SymInt`` with a constant expression becomes that constant, as in ``create_symintnode``.

    Raises:
        UnsupportedValueError: see `encode_sym`.
    """
    if isinstance(s, int):
        return int(s)
    record = encode_sym(s)
    last = record.expr.nodes[-1]
    return last.value if isinstance(last, IntNode) else record
