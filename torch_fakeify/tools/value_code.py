"""Python source of values of a graph: sizes, constants and functions.

What cannot be written raises ``UnsupportedValueError``; nothing is left out silently.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import math
import sys
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import torch

from torch_fakeify.encoding.exprs import encode_expr
from torch_fakeify.encoding.names import encode_function
from torch_fakeify.errors import FakeifyError, UnsupportedValueError, class_name
from torch_fakeify.records.symbol_names import names_in
from torch_fakeify.records.tensor import NestedIntDesc, SymDesc
from torch_fakeify.render.text import expr_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch_fakeify.records.tensor import ExprDesc, IntLike


def unsupported(what: str, where: str, found: str) -> UnsupportedValueError:
    """Make the error for a part of a frame that cannot be written."""
    return UnsupportedValueError(what, where=where, found=found, fix="Use the capture")


# --- sizes ----------------------------------------------------------------------------------------


def expr_code(expr: ExprDesc) -> str:
    """Write an expression over symbols as Python that works for ``int`` and ``SymInt``.

    Conditions are joined by ``&`` and ``|``, so that a ``ShapeEnv`` sees one condition.
    """
    text = expr_text(expr)
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise unsupported("a size is too long to be written out", "a size", text) from error
    symbols = {*names_in(expr), "true", "false"}
    for part in ast.walk(tree):
        if isinstance(part, ast.Name) and part.id not in {*symbols, *_FUNCTIONS}:
            raise unsupported("a size that Python does not compute as it stands", "a size", text)
    return ast.unparse(_Symbolic().visit(tree))


_FUNCTIONS = {
    "Max": "torch.sym_max",
    "Min": "torch.sym_min",
    "ToFloat": "torch.sym_float",
    "TruncToInt": "torch.sym_int",
    "Where": "torch.sym_ite",
    "RoundToInt": "round",
    "CeilToInt": "math.ceil",
    "FloorToInt": "math.floor",
    "Abs": "abs",
    "Identity": "",
    "OpaqueUnaryFn_sqrt": "torch.sym_sqrt",
    "Piecewise": "torch.sym_ite",
    "ExprCondPair": "",
}
"""Functions in expressions over sizes, and the Python that computes them."""


class _Symbolic(ast.NodeTransformer):
    """Replaces operators that need a truth value by operators with a symbolic result."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        values = [self.visit(value) for value in node.values]
        joined = values[0]
        for value in values[1:]:
            op = ast.BitAnd() if isinstance(node.op, ast.And) else ast.BitOr()
            joined = ast.BinOp(joined, op, value)
        return joined

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        operand = self.visit(node.operand)
        if isinstance(node.op, ast.Not):
            return ast.Call(_name("torch.sym_not"), [operand], [])
        return ast.UnaryOp(node.op, operand)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        truths = {"true": True, "false": False}
        return ast.Constant(truths[node.id]) if node.id in truths else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        args = [self.visit(arg) for arg in node.args]
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in ("Identity", "ExprCondPair"):
            return ast.Tuple(args, ast.Load()) if len(args) > 1 else args[0]
        if name == "Piecewise":
            pairs = [arg.elts for arg in args if isinstance(arg, ast.Tuple)]
            made = pairs[-1][0]  # whose condition is true
            for value, condition in reversed(pairs[:-1]):
                made = ast.Call(_name(_FUNCTIONS[name]), [condition, value, made], [])
            return made
        made = args[0]
        if name in ("Max", "Min"):  # torch's functions take two arguments
            for arg in args[1:]:
                made = ast.Call(_name(_FUNCTIONS[name]), [made, arg], [])
            return made
        return ast.Call(_name(_FUNCTIONS[name]), args, [])


def _name(dotted: str) -> ast.expr:
    return ast.parse(dotted, mode="eval").body


def int_code(n: IntLike) -> str:
    """Write a size, stride or offset as Python over symbols."""
    if isinstance(n, SymDesc):
        return expr_code(n.expr)
    if isinstance(n, NestedIntDesc):
        raise unsupported("a ragged size is no number", "a size", str(n))
    return str(n)


def tuple_code(items: Iterable[str]) -> str:
    """Write a tuple of expressions."""
    found = list(items)
    return f"({found[0]},)" if len(found) == 1 else f"({', '.join(found)})"


def sizes_code(sizes: Iterable[IntLike]) -> str:
    """Write sizes or strides as a tuple."""
    return tuple_code(map(int_code, sizes))


# --- functions and constants ----------------------------------------------------------------------


class ValueCode:
    """Writes constants and functions, and collects the imports that they need."""

    def __init__(self) -> None:
        self.imports: set[str] = {"import torch"}

    def of(self, value: Any, names: Mapping[Any, str], where: str) -> str:
        """Write an argument of a node, or a value in its metadata.

        ``names`` has the variables that hold nodes, ``where`` names the node in errors.

        Raises:
            UnsupportedValueError: there is no text for it.
        """

        def of(part: Any) -> str:
            return self.of(part, names, where)

        match value:
            case torch.fx.Node():
                return names[value]
            case enum.Enum():
                return f"{self._qualified(type(value), where)}.{value.name}"
            case float() if not math.isfinite(value):
                return f'float("{value}")'
            case None | bool() | int() | float() | complex() | str() | bytes() | range():
                return repr(value)
            case EllipsisType():
                return "..."
            case slice():
                return f"slice({of(value.start)}, {of(value.stop)}, {of(value.step)})"
            case torch.Size():
                return f"torch.Size({of(tuple(value))})"
            case tuple() if hasattr(value, "_fields"):
                return f"{self._qualified(type(value), where)}{tuple_code(map(of, value))}"
            case tuple():
                return tuple_code(map(of, value))
            case list():
                return f"[{', '.join(map(of, value))}]"
            case dict():
                return "{" + ", ".join(f"{of(k)}: {of(v)}" for k, v in value.items()) + "}"
            case set() | frozenset():
                return f"{type(value).__name__}([{', '.join(sorted(map(of, value)))}])"
            case torch.dtype() | torch.layout() | torch.memory_format():
                return str(value)
            case torch.device():
                return f"torch.device({str(value)!r})"
            case torch.SymInt() | torch.SymFloat() | torch.SymBool():
                return expr_code(encode_expr(value.node.expr))
            case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
                fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
                arguments = ", ".join(f"{name}={of(part)}" for name, part in fields)
                return f"{self._qualified(type(value), where)}({arguments})"
            case _ if callable(value):
                return self.function(value, where)
            case _:
                raise unsupported(_NO_TEXT, where, class_name(type(value)))

    def function(self, function: Any, where: str) -> str:
        """Write the name of a function, operator or class."""
        try:
            found = encode_function(function)
        except FakeifyError:
            found = None
        if found is None:
            raise unsupported("the graph calls what a script cannot import", where, repr(function))
        match found.kind:
            case "op" | "packet":
                return f"torch.ops.{found.name}"
            case "hop":
                self.imports.add(f"import {type(function).__module__}")  # the import registers it
                return f"torch.ops.higher_order.{found.name}"
            case "function" | "class":
                return self._dotted(found.name, where)
            case _:
                wrapped = repr(found.name)
                if found.kind != "numpy_method":
                    wrapped = self._dotted(found.name, where)
                kind = "to_tensor" if found.kind == "numpy" else found.kind.removeprefix("numpy_")
                self.imports.add("import torch._dynamo.utils")
                return f"torch._dynamo.utils.numpy_{kind}_wrapper({wrapped})"

    def _qualified(self, cls: type, where: str) -> str:
        if "." in cls.__qualname__ or "<" in cls.__qualname__:
            raise unsupported(_NO_TEXT, where, class_name(cls))
        return self._dotted(f"{cls.__module__}.{cls.__name__}", where)

    def _dotted(self, name: str, where: str) -> str:
        """Write a dotted name and import its module."""
        if name.startswith("builtins."):
            return name.removeprefix("builtins.")
        parts = name.split(".")
        modules = [".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1)]
        module = next((m for m in modules if m in sys.modules), None)
        if module is None:
            raise unsupported("the graph calls what a script cannot import", where, name)
        self.imports.add(f"import {module}")
        return name


_NO_TEXT = "the graph holds what a script cannot write"
