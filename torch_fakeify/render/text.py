"""Expressions, values and tensors as text, without torch or sympy.

Work and output are linear in the size of a record, also for expressions with shared sub-expressions,
so a small file cannot produce a huge text. The results may contain any character of the record:
``escape`` makes a line safe to print.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from typing_extensions import assert_never

from torch_fakeify.records.devices import devices_of
from torch_fakeify.records.tensor import (
    ApplyNode,
    AtomNode,
    BytesValue,
    ComplexValue,
    DictValue,
    EllipsisValue,
    EnumValue,
    ExprDesc,
    ExprNode,
    ExprValue,
    FloatNode,
    FloatValue,
    FrameDesc,
    FunctionValue,
    IntLike,
    IntNode,
    ListValue,
    MetaTensorDesc,
    NamedTupleValue,
    NestedIntDesc,
    NodeValue,
    OpaqueValue,
    RangeValue,
    RationalNode,
    SetValue,
    SizeValue,
    SliceValue,
    SourceValue,
    StackDesc,
    SymbolNode,
    SymDesc,
    SymValue,
    TensorValue,
    TorchConstValue,
    TupleValue,
    TypeValue,
    Value,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch_fakeify.records.frame import CaptureDesc, FailureDesc, WorldDesc

_EXPANDED = 400
"""Most characters of an expression without named parts."""
_MESH_FIELDS = ("device_type", "layout", "dim_names")
_PART = 160
"""Characters above which a part of a longer expression is named."""
_DEPTH = 40
"""Most nested levels of a value."""
_FRAMEWORK = re.compile(r"(?:^|/(?:site|dist)-packages/)torch/")
_MAX_NDIM = 64
"""Most dims for which strides are compared with those of a contiguous tensor."""

_INFIX = {
    "Pow": (" ** ", 60),
    "PowByNatural": (" ** ", 60),
    "FloatPow": (" ** ", 60),
    "Mul": ("*", 50),
    "FloorDiv": ("//", 50),
    "CleanDiv": ("//", 50),
    "IntTrueDiv": (" / ", 50),
    "FloatTrueDiv": (" / ", 50),
    "Mod": (" % ", 50),
    "PythonMod": (" % ", 50),
    "Add": (" + ", 40),
    "LShift": (" << ", 35),
    "RShift": (" >> ", 35),
    "Equality": (" == ", 20),
    "Eq": (" == ", 20),
    "Unequality": (" != ", 20),
    "Ne": (" != ", 20),
    "StrictLessThan": (" < ", 20),
    "Lt": (" < ", 20),
    "LessThan": (" <= ", 20),
    "Le": (" <= ", 20),
    "StrictGreaterThan": (" > ", 20),
    "Gt": (" > ", 20),
    "GreaterThan": (" >= ", 20),
    "Ge": (" >= ", 20),
    "And": (" and ", 10),
    "Or": (" or ", 5),
}
_COMMUTATIVE = {"Mul", "Add", "And", "Or"}
_ATOM_PRECEDENCE = 100


def escape(text: str) -> str:
    """Return text with all characters that are not printable escaped.

    These include C0 and C1 control characters, line separators, bidirectional overrides, zero-width
    characters and lone surrogates.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "replace").decode("ascii")
        for char in text
    )


def clip(text: str, width: int) -> str:
    """Return ``text`` cut to ``width`` characters, with ``...`` at the cut."""
    return text if len(text) <= width else f"{text[: max(width - 3, 0)]}..."


def int_text(value: int) -> str:
    """Return an integer in decimal, or in hexadecimal if decimal conversion would be slow."""
    return str(value) if value.bit_length() <= 4096 else hex(value)


# --- expressions ------------------------------------------------------------------------------


def expr_text(expr: ExprDesc) -> str:
    """Return an expression as infix text, with long shared parts after ``where``.

    Time and length are linear in ``len(expr.nodes)``.
    """
    named = _parts_to_name(expr.nodes)
    texts: list[tuple[str, int]] = []
    parts: list[str] = []
    last = len(expr.nodes) - 1
    for index, expr_node in enumerate(expr.nodes):
        text, precedence = _expr_node_text(expr_node, texts)
        if index != last and (index in named or len(text) > _PART):
            parts.append(f"t{len(parts)} = {text}")
            text, precedence = f"t{len(parts) - 1}", _ATOM_PRECEDENCE
        texts.append((text, precedence))
    if not texts:
        return "?"
    where = f" where {'; '.join(parts)}" if parts else ""
    return texts[-1][0] + where


def _parts_to_name(nodes: tuple[ExprNode, ...]) -> set[int]:
    """Return positions of shared function applications of an expression that is long as a tree."""
    lengths: list[int] = []
    uses: dict[int, int] = {}
    for expr_node in nodes:
        if isinstance(expr_node, ApplyNode):
            length = 4 + sum(lengths[arg] for arg in expr_node.args if arg < len(lengths))
            for arg in expr_node.args:
                uses[arg] = uses.get(arg, 0) + 1
        else:
            length = 4
        lengths.append(min(length, _EXPANDED + 1))
    if not lengths or lengths[-1] <= _EXPANDED:
        return set()
    return {
        index
        for index, count in uses.items()
        if count > 1 and index < len(nodes) and isinstance(nodes[index], ApplyNode)
    }


def _expr_node_text(expr_node: ExprNode, texts: list[tuple[str, int]]) -> tuple[str, int]:
    """Return text and precedence of a node, from the texts of its arguments."""
    match expr_node:
        case SymbolNode(name=name):
            return name, _ATOM_PRECEDENCE
        case IntNode(value=value):
            return int_text(value), _ATOM_PRECEDENCE if value >= 0 else 45
        case FloatNode():
            text = _float_text(expr_node)
            return text, 45 if text.startswith("-") else _ATOM_PRECEDENCE
        case RationalNode(numerator=numerator, denominator=denominator):
            return f"{int_text(numerator)}/{int_text(denominator)}", 45
        case AtomNode(name=name):
            return name, _ATOM_PRECEDENCE
        case ApplyNode(function=function, args=positions):
            args = [texts[at] if at < len(texts) else ("?", _ATOM_PRECEDENCE) for at in positions]
            return _apply_text(function, args)
        case _:
            assert_never(expr_node)


def _apply_text(function: str, args: list[tuple[str, int]]) -> tuple[str, int]:
    """Return text and precedence of a function: infix where there is an operator, else a call."""
    if function == "Not" and len(args) == 1:
        return f"not {_bracket(args[0], 16)}", 15
    if function == "Mul" and len(args) > 1 and args[0][0] == "-1":
        return "-" + "*".join(_bracket(arg, 51) for arg in args[1:]), 45
    if function not in _INFIX or len(args) < 2:
        return f"{function}({', '.join(text for text, _ in args)})", _ATOM_PRECEDENCE
    operator, precedence = _INFIX[function]
    if function in _COMMUTATIVE:
        # A negative or rational factor binds weaker than a product: only the first may stand bare.
        # `//` and `%` bind as a product does, from the left.
        inner = precedence + 1 if function == "Mul" else precedence
        rest = [_bracket(arg, inner) for arg in args[1:]]
        text = operator.join([_bracket(args[0], min(precedence, 45)), *rest])
        return text.replace(" + -", " - ") if function == "Add" else text, precedence
    text = operator.join(_bracket(arg, precedence + 1) for arg in args)
    return text, precedence


def _bracket(part: tuple[str, int], precedence: int) -> str:
    text, binding = part
    return text if binding >= precedence else f"({text})"


def _float_text(expr_node: FloatNode) -> str:
    try:
        value = math.ldexp(expr_node.mantissa, expr_node.exponent)
    except OverflowError:
        return f"{int_text(expr_node.mantissa)}*2**{int_text(expr_node.exponent)}"
    return repr(value)


def sym_text(sym: IntLike | float | None) -> str:
    """Return a size, stride, offset or other scalar as text."""
    if isinstance(sym, SymDesc):
        return expr_text(sym.expr)
    if isinstance(sym, NestedIntDesc):
        name = f"j{int_text(sym.id)}"
        return name if sym.coeff == 1 else f"{int_text(sym.coeff)}*{name}"
    if isinstance(sym, int) and not isinstance(sym, bool):
        return int_text(sym)
    return repr(sym)


# --- values -----------------------------------------------------------------------------------


def value_text(value: Value, *, names: tuple[str, ...] = (), depth: int = 0) -> str:
    """Return a constant as Python-like text, ``...`` where it is nested in more than 40 others.

    ``names`` are those of the FX nodes of the enclosing graph, by position.
    """
    if depth > _DEPTH:
        return "..."

    def items(parts: Iterable[Value]) -> str:
        return ", ".join(value_text(part, names=names, depth=depth + 1) for part in parts)

    match value:
        case None | bool() | str():
            return repr(value)
        case int():
            return int_text(value)
        case NodeValue(index=index):
            return names[index] if 0 <= index < len(names) else f"%{index}"
        case TypeValue(name=name) | FunctionValue(name=name):
            return name
        case float():
            return repr(value)
        case FloatValue(text=text):
            return f'float("{text}")'
        case ComplexValue(real=real, imag=imag):
            return f"complex({items((real, imag))})"
        case BytesValue(data=data):
            return repr(data)
        case EllipsisValue():
            return "..."
        case TupleValue(items=parts):
            return f"({items(parts)},)" if len(parts) == 1 else f"({items(parts)})"
        case ListValue(items=parts):
            return f"[{items(parts)}]"
        case SizeValue(items=parts):
            return f"torch.Size([{items(parts)}])"
        case SetValue(items=parts, frozen=frozen):
            return f"{'frozenset' if frozen else 'set'}([{items(parts)}])"
        case DictValue(items=pairs):
            return (
                "{" + ", ".join(f"{items((key,))}: {items((part,))}" for key, part in pairs) + "}"
            )
        case SliceValue(start=start, stop=stop, step=step):
            return f"slice({items((start, stop, step))})"
        case RangeValue(start=start, stop=stop, step=step):
            return f"range({items((start, stop, step))})"
        case TorchConstValue(kind="device", name=name):
            return f"device({name!r})"
        case TorchConstValue(name=name):
            return f"torch.{name}"
        case EnumValue(cls=cls, name=name):
            return f"{cls}.{name}"
        case NamedTupleValue(cls=cls, items=parts):
            return f"{cls}({items(parts)})"
        case SymValue(sym=sym):
            return sym_text(sym)
        case ExprValue(expr=expr):
            return expr_text(expr)
        case TensorValue(tensor=tensor):
            return f"<tensor {tensor_text(tensor)}>"
        case SourceValue(source=source):
            return source.name
        case OpaqueValue(kind="device_mesh", data=DictValue(items=fields)):
            return _mesh_text(fields)
        case OpaqueValue(
            kind="placement", data=TupleValue(items=(str(kind), DictValue(items=fields)))
        ):
            return f"{kind}({', '.join(items((part,)) for _, part in fields if part is not None)})"
        case OpaqueValue(kind="process_group", data=str(name)):
            return f"ProcessGroup({name!r})"
        case OpaqueValue(kind=kind, data=data):
            return f"<{kind}>" if data is None else f"<{kind} {items((data,))}>"
        case _:
            assert_never(value)


def _mesh_text(fields: tuple[tuple[Value, Value], ...]) -> str:
    """Return a device mesh as text: type of device, sizes and names of dims."""
    kind, *tuples = [next((v for k, v in fields if k == name), None) for name in _MESH_FIELDS]
    axes, named = (v.items if isinstance(v, TupleValue) else () for v in tuples)
    dims: list[str] = []
    for i, axis in enumerate(axes):
        shape = axis.items[0] if isinstance(axis, TupleValue) and axis.items else None
        sizes = shape.items if isinstance(shape, TupleValue) else ()
        size = "x".join(int_text(n) for n in sizes if isinstance(n, int))
        name = named[i] if i < len(named) else None
        dims.append(f"{name}={size}" if isinstance(name, str) else size)
    return f"DeviceMesh({', '.join([repr(kind) if isinstance(kind, str) else '?', *dims])})"


def world_text(world: WorldDesc) -> str:
    """Return rank, world size and process groups of a frame in one line."""
    names = ", ".join(repr(group.name) for group in world.groups)
    many = "process group" if len(world.groups) == 1 else "process groups"
    return f"rank {int_text(world.rank)} of {int_text(world.size)}, {many} {names}"


def shape_text(tensor: MetaTensorDesc) -> str:
    """Return dtype and sizes, such as ``float32[s0, 16]``."""
    return f"{tensor.dtype}[{', '.join(sym_text(size) for size in tensor.size)}]"


def tensor_text(tensor: MetaTensorDesc) -> str:
    """Return a tensor in one line: dtype, sizes, and all differences from a plain CPU tensor."""
    words = [shape_text(tensor), *_kind_words(tensor)]
    if tensor.device != "cpu":
        words.append(tensor.device)
    if tensor.layout != "strided":
        words.append(tensor.layout.removeprefix("_"))
    elif not _is_contiguous(tensor):
        words.append(f"stride ({', '.join(sym_text(stride) for stride in tensor.stride)})")
    if tensor.storage_offset != 0:
        words.append(f"offset {sym_text(tensor.storage_offset)}")
    flags = {
        "parameter": tensor.is_parameter,
        "buffer": tensor.is_buffer,
        "requires_grad": tensor.requires_grad and not tensor.is_parameter,
        "non-leaf": not tensor.is_leaf,
        "inference": tensor.is_inference,
        "conj": tensor.is_conj,
        "neg": tensor.is_neg,
        "has grad": tensor.grad is not None,
        "pinned": tensor.is_pinned,
    }
    words.extend(word for word, is_set in flags.items() if is_set)
    return " ".join(words)


def _kind_words(tensor: MetaTensorDesc) -> list[str]:
    """Return the words for subclass, functorch wrapper and sparse layout of a tensor."""
    words: list[str] = []
    if tensor.subclass is not None:
        parts = ", ".join(escape(name) for name, _ in tensor.subclass.tensors)
        words.append(f"{escape(tensor.subclass.cls.rpartition('.')[2])}({parts})")
    if tensor.functorch is not None:
        words.append(f"{tensor.functorch.kind} at level {int_text(tensor.functorch.level)}")
    if tensor.functional is not None:
        words.append("functional")
    sparse = tensor.sparse
    if sparse is not None and sparse.is_coalesced:
        words.append("coalesced")
    if sparse is not None and sparse.blocksize:
        words.append(f"blocks {'x'.join(int_text(n) for n in sparse.blocksize)}")
    return words


def _is_contiguous(tensor: MetaTensorDesc) -> bool:
    """Return whether the strides are contiguous; symbolic ones are compared as text."""
    if tensor.ndim > _MAX_NDIM or len(tensor.stride) != tensor.ndim:
        return False
    factors: list[str] = []
    for size, stride in zip(reversed(tensor.size), reversed(tensor.stride), strict=True):
        if size == 1:
            continue
        if sym_text(stride) != _product(factors):
            return False
        factors.append(sym_text(size))
    return True


def _product(factors: list[str]) -> str:
    """Return a product as ``expr_text`` does: the number, then sorted symbols."""
    number = 1
    symbols: list[str] = []
    for factor in factors:
        if factor.isdecimal():
            number *= int(factor)
        else:
            symbols.append(factor)
    words = ([] if number == 1 and symbols else [str(number)]) + sorted(symbols)
    return "*".join(words)


def stack_lines(stack: StackDesc) -> list[str]:
    """Return a stack in Python's format, outermost entry first."""
    lines: list[str] = []
    for frame in stack.frames:
        lines.append(f'File "{frame.file}", line {frame.line}, in {frame.function}')
        if frame.code:
            lines.append(f"  {code_line(frame)}")
    return lines


def count_text(number: int, thing: str) -> str:
    """Return a number with what is counted, in the plural unless it is one."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def level_text(desc: CaptureDesc) -> str:
    """Say whether a capture is what Dynamo gives to a backend, an exported program, or which graph of AOTAutograd."""
    if desc.export is not None:
        return "exported program"
    return "frame of Dynamo" if desc.aot is None else f"{desc.aot.kind} graph of AOTAutograd"


def result_text(desc: CaptureDesc, *, qualified: bool = False) -> str:
    """Return the result of compiling a frame in one line; ``qualified`` as for `failure_text`."""
    if desc.failure is not None:
        return f"failed: {failure_text(desc.failure, qualified=qualified)}"
    return desc.state or "compiled"


def compiler_text(
    desc: CaptureDesc, torch: str | None, backend: str | None, device: str | None = None
) -> str:
    """Return which backend, torch and devices a result is of, in one line.

    ``torch`` is the version that compiled the frame; backend and device are those that were requested.
    """
    version = "" if torch is None else f", torch {torch.partition('+')[0]}"
    devices = ", ".join(devices_of(desc, device)) or "no device"
    return clip(f"with {backend or desc.backend_name}{version}, {devices}", 200)


def class_text(qualified: str) -> str:
    """Return the name of an exception's class as Python prints it: one of Python itself without module."""
    return qualified.removeprefix("builtins.")


def failure_text(failure: FailureDesc, *, qualified: bool = False) -> str:
    """Return how a backend failed: the exception's class, or how its process ended.

    If it is ``qualified``, a class of Python itself has its module, too.
    """
    if failure.kind == "raises":
        return failure.type if qualified else class_text(failure.type)
    return death_text(failure.type) if failure.kind == "crashes" else failure.kind


def death_text(how: str) -> str:
    """Return how a process ended, from the name of a signal or ``exit status N``."""
    return f"killed by {how}" if how.startswith(("SIG", "signal ")) else f"ended with {how}"


def user_line(stack: StackDesc | None) -> str:
    """Return the user's innermost entry of a stack in one line, empty without a stack."""
    frame = user_frame(stack)
    return "" if frame is None else place_text(frame)


def user_frame(stack: StackDesc | None) -> FrameDesc | None:
    """Return the innermost entry of a stack that is not in torch, else the innermost entry."""
    if stack is None or not stack.frames:
        return None
    user = (frame for frame in reversed(stack.frames) if not _FRAMEWORK.search(frame.file))
    return next(user, stack.frames[-1])


def place_text(frame: FrameDesc) -> str:
    """Return file, line, function and code in one line, the file without its directories."""
    place = f"{frame.file.rpartition('/')[2]}:{frame.line} in {frame.function}"
    return f"{place}: {code_line(frame)}" if frame.code else place


def code_line(frame: FrameDesc) -> str:
    """Return the line of code, without the marks that Python prints below it."""
    return frame.code.partition("\n")[0]
