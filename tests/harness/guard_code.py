"""Whether two sets of guards say the same as the Python code that ``produce_guards`` writes.

The code is read into facts over its sources (``L['x'].size()[0]``), which `guard_equivalence`
compares. Its own evaluation, with stand-ins that have sizes, strides and offsets, must agree.
"""

from __future__ import annotations

import ast
import math
from typing import TYPE_CHECKING, Any

import sympy
from guard_equivalence import Difference, Facts, Verdict, equivalent
from guard_terms import Point, variable
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
from torch.utils._sympy import functions as torch_functions

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def code_facts(
    shape_env: Any,
    placeholders: Sequence[Any],
    sources: Sequence[Any],
    *,
    input_contexts: Sequence[Any] | None = None,
    ignore_static: bool = True,
) -> frozenset[str]:
    """The guards of an environment, as ``produce_guards`` writes them for these inputs."""
    contexts = None if input_contexts is None else list(input_contexts)
    return frozenset(
        shape_env.produce_guards(
            list(placeholders), list(sources), input_contexts=contexts, ignore_static=ignore_static
        )
    )


# --- evaluate -----------------------------------------------------------------------------------


class _Stub:
    """What a source leads to: other stand-ins, and in the end a number of the sample."""

    def __init__(self, path: str, sample: Point) -> None:
        self._path = path
        self._sample = sample

    def _at(self, path: str) -> Any:
        return self._sample[path] if path in self._sample else _Stub(path, self._sample)

    def __getitem__(self, key: object) -> Any:
        return self._at(f"{self._path}[{key!r}]")

    def __getattr__(self, name: str) -> Any:
        return self._at(f"{self._path}.{name}")

    def __call__(self) -> Any:
        return self._at(f"{self._path}()")


class _Names(dict[str, Any]):
    """The names of a guard's scope, each a stand-in."""

    def __init__(self, sample: Point) -> None:
        super().__init__()
        self.sample = sample

    def __missing__(self, name: str) -> Any:
        if name in _GLOBALS or name.endswith("__"):
            raise KeyError(name)
        return self.sample[name] if name in self.sample else _Stub(name, self.sample)


_GLOBALS: dict[str, Any] = {
    **SYMPY_INTERP,
    **{f.__name__: f for f in (max, min, abs, round, int, float, bool)},
}


def evaluate_code(code: Iterable[str], sample: Point) -> bool:
    """Whether every guard holds for the numbers of some inputs.

    Args:
        code: guards as ``produce_guards`` writes them.
        sample: the numbers, by their sources, such as ``L['x'].size()[0]``.

    Raises:
        TypeError: a guard needs a number that the sample does not have.
    """
    names = _Names({ast.unparse(ast.parse(k, mode="eval")): v for k, v in sample.items()})
    try:
        return all(eval(text, dict(_GLOBALS), names) for text in code)
    except (ArithmeticError, ValueError):
        return False


# --- read ---------------------------------------------------------------------------------------


def read_code(code: Iterable[str]) -> Facts:
    """The facts that guards in Python state, over their sources.

    A source is a float if the code says that it is not NaN or compares it with a float.

    Raises:
        ValueError: the code has something that torch does not write.
    """
    texts = sorted(code)
    trees = [ast.parse(text, mode="eval").body for text in texts]
    floats = {name for tree in trees for name in _float_sources(tree)}
    reader = _Reader(floats)
    facts = dict(zip(map(reader.read, trees), texts, strict=True))
    facts.pop(sympy.true, None)
    return Facts(tuple(facts), tuple(facts.values()))


def equivalent_code(a: Iterable[str], b: Iterable[str]) -> Verdict:
    """Whether two sets of guards accept the same inputs.

    Raises:
        AssertionError: the code itself, evaluated at a counterexample, does not bear it out.
    """
    a, b = list(a), list(b)
    floats = {n for t in (*a, *b) for n in _float_sources(ast.parse(t, mode="eval").body)}
    marks = [f"not math.isnan({name})" for name in sorted(floats)]
    verdict = equivalent(read_code([*a, *marks]), read_code([*b, *marks]))
    lost, new = _nan_differences(a, b), _nan_differences(b, a)
    if lost or new:
        verdict = verdict._replace(
            how="differs", lost=(*verdict.lost, *lost), new=(*verdict.new, *new)
        )
    for differences, lacking in ((verdict.lost, b), (verdict.new, a)):
        for difference in differences:
            point = _filled(difference.counterexample, [*a, *b])
            known = [t for t in lacking if _sources(t) <= set(difference.counterexample)]
            if evaluate_code([difference.what], point) or not evaluate_code(known, point):
                raise AssertionError(f"the code does not say so: {difference}")
    return verdict


def _nan_differences(a: list[str], b: list[str]) -> list[Difference]:
    """Guards against NaN of one set, where the other one has nothing that refuses a NaN."""
    compared = {name for text in b if "isnan" not in text for name in _sources(text)}
    lost: list[Difference] = []
    for text in sorted(set(a) - set(b)):
        names = _float_sources(ast.parse(text, mode="eval").body) if "isnan" in text else set()
        lost += [Difference(sympy.false, text, {n: math.nan}) for n in names - compared]
    return lost


def _filled(point: Point, code: Iterable[str]) -> Point:
    return {**{name: 2 for text in code for name in _sources(text)}, **point}


def _sources(code: str) -> set[str]:
    found: set[str] = set()
    _Reader(set(), found).read(ast.parse(code, mode="eval").body)
    return found


def _float_sources(tree: ast.expr) -> set[str]:
    found: set[str] = set()
    for item in ast.walk(tree):
        if isinstance(item, ast.Call) and ast.unparse(item.func) == "math.isnan":
            found.add(ast.unparse(item.args[0]))
        if isinstance(item, ast.Compare):
            sides = [item.left, *item.comparators]
            if any(isinstance(s, ast.Constant) and type(s.value) is float for s in sides):
                found |= {ast.unparse(s) for s in sides if _is_source(s)}
    return found


def _is_source(item: ast.expr) -> bool:
    """Whether it is a name with attributes, items and calls without arguments behind it."""
    while True:
        match item:
            case ast.Attribute(value=inner) | ast.Subscript(value=inner):
                item = inner
            case ast.Call(func=inner, args=[], keywords=[]):
                item = inner
            case ast.Name(id=name):
                return name not in _GLOBALS
            case _:
                return False


class _Reader:
    def __init__(self, floats: set[str], sources: set[str] | None = None) -> None:
        self.floats = floats
        self.sources = set() if sources is None else sources

    def read(self, item: ast.expr) -> Any:
        if _is_source(item):
            name = ast.unparse(item)
            self.sources.add(name)
            return variable(name, is_float=name in self.floats)
        match item:
            case ast.Constant(value=bool(value)):
                return sympy.true if value else sympy.false
            case ast.Constant(value=int(value)):
                return sympy.Integer(value)
            case ast.Constant(value=float(value)):
                return sympy.Float(value)
            case ast.Attribute() if ast.unparse(item) == "math.inf":
                return sympy.oo
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._minus(self.read(operand))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return sympy.Not(self.read(operand), evaluate=False)
            case ast.BoolOp(op=op, values=values):
                cls: Any = sympy.And if isinstance(op, ast.And) else sympy.Or
                return cls(*map(self.read, values), evaluate=False)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                parts = [self.read(part) for part in (test, body, orelse)]
                return torch_functions.Where(*parts, evaluate=False)
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                return self._compare([left, *comparators], ops)
            case ast.BinOp(left=left, op=op, right=right):
                return self._binary(op, self.read(left), self.read(right))
            case ast.Call(func=func, args=args, keywords=[]):
                return self._call(ast.unparse(func), args)
            case _:
                raise ValueError(f"not a guard: {ast.unparse(item)}")

    def _minus(self, value: Any) -> Any:
        return -value if value.is_number else sympy.Mul(-1, value, evaluate=False)

    def _compare(self, parts: list[ast.expr], ops: list[ast.cmpop]) -> Any:
        values = [self.read(part) for part in parts]
        relations = [
            _COMPARE[type(op)](left, right, evaluate=False)
            for left, op, right in zip(values, ops, values[1:], strict=False)
        ]
        return relations[0] if len(relations) == 1 else sympy.And(*relations, evaluate=False)

    def _binary(self, op: ast.operator, left: Any, right: Any) -> Any:
        ints = bool(left.is_integer and right.is_integer)
        if isinstance(op, ast.Sub):
            return sympy.Add(left, self._minus(right), evaluate=False)
        if isinstance(op, ast.Div):
            cls = torch_functions.IntTrueDiv if ints else torch_functions.FloatTrueDiv
        elif isinstance(op, ast.Pow):
            cls = torch_functions.PowByNatural if ints else torch_functions.FloatPow
        else:
            cls = _BINARY[type(op)]
        return cls(left, right, evaluate=False)

    def _call(self, name: str, args: list[ast.expr]) -> Any:
        if name == "math.isnan":
            return sympy.false  # torch does not specialize on it: no float input is NaN
        values = [self.read(arg) for arg in args]
        cls = _CALLED.get(name) or getattr(
            torch_functions, f"OpaqueUnaryFn_{name.removeprefix('math.')}", None
        )
        if cls is None:
            raise ValueError(f"not a function of guards: {name}")
        if name == "round" and len(values) == 2:
            cls = torch_functions.RoundDecimal
        return cls(*values, evaluate=False)


_COMPARE: dict[type, Any] = {
    ast.Eq: sympy.Eq,
    ast.NotEq: sympy.Ne,
    ast.Lt: sympy.Lt,
    ast.LtE: sympy.Le,
    ast.Gt: sympy.Gt,
    ast.GtE: sympy.Ge,
}
_BINARY: dict[type, Any] = {
    ast.Add: sympy.Add,
    ast.Mult: sympy.Mul,
    ast.FloorDiv: torch_functions.FloorDiv,
    ast.Mod: torch_functions.PythonMod,
    ast.BitAnd: torch_functions.BitwiseFn_bitwise_and,
    ast.BitOr: torch_functions.BitwiseFn_bitwise_or,
    ast.BitXor: torch_functions.BitwiseFn_bitwise_xor,
    ast.LShift: torch_functions.LShift,
    ast.RShift: torch_functions.RShift,
}
_CALLED: dict[str, Any] = {
    "max": torch_functions.Max,
    "min": torch_functions.Min,
    "abs": sympy.Abs,
    "round": torch_functions.RoundToInt,
    "math.floor": torch_functions.FloorToInt,
    "math.ceil": torch_functions.CeilToInt,
    "math.trunc": torch_functions.TruncToInt,
    "torch.sym_max": torch_functions.Max,
    "torch.sym_min": torch_functions.Min,
    "torch.sym_float": torch_functions.ToFloat,
    "torch._sym_sqrt": torch_functions.OpaqueUnaryFn_sqrt,
    "IsNonOverlappingAndDenseIndicator": torch_functions.IsNonOverlappingAndDenseIndicator,
}
