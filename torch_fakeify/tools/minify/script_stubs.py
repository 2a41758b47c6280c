"""Stubs of operators in a script of a frame: their schemas, and fake results by the recorded calls."""

from __future__ import annotations

import keyword
from typing import TYPE_CHECKING, Any

import torch

from torch_fakeify.compat import torch_symbols
from torch_fakeify.compat.torch_library import default_of
from torch_fakeify.encoding.operators import bound_arguments, decode_schema, written_argument
from torch_fakeify.frames.operator_calls import calls_of, range_of
from torch_fakeify.records.rewrite import walk
from torch_fakeify.records.symbol_names import lone_symbol
from torch_fakeify.records.tensor import (
    ListValue,
    SizeValue,
    SymDesc,
    SymValue,
    TensorValue,
    TupleValue,
    Value,
)
from torch_fakeify.tools.size_edits import size_expr
from torch_fakeify.tools.value_code import (
    ValueCode,
    int_code,
    sizes_code,
    tuple_code,
    unsupported,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch_fakeify.frames.operator_calls import OperatorCall
    from torch_fakeify.records.frame import CaptureDesc, OperatorDesc
    from torch_fakeify.records.tensor import IntLike, MetaTensorDesc

_HEAD = """\

# These operators were not there when this was written: what follows has their schemas and the sizes
# of their results, enough to compile. For the operators themselves import their library instead.
""".splitlines()

_GRADIENT = """\
gradients = torch.library.Library("stub", "FRAGMENT")
gradients.define("gradients(Tensor?[] grads, Tensor[] inputs) -> Tensor[]")


@torch.library.register_fake("stub::gradients", lib=gradients)
def _(grads, inputs):
    return [torch.empty_like(x) for x in inputs]


def has_gradient(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def setup_stub(ctx, inputs, output):
    ctx.save_for_backward(*(x for x in inputs if has_gradient(x)))
    ctx.differentiable = [has_gradient(x) for x in inputs]


def backward_stub(ctx, *grads):
    found = iter(torch.ops.stub.gradients(list(grads), list(ctx.saved_tensors)))
    return tuple(next(found) if given else None for given in ctx.differentiable)


""".splitlines()


def stub_lines(desc: CaptureDesc, stubs: Sequence[OperatorDesc]) -> list[str]:
    """Write the definitions of stubs; none for no stubs.

    Raises:
        UnsupportedValueError: the result of a stub has no formula that can be written out.
    """
    called = [each for each in stubs if calls_of(desc.graph, each.operator)]
    if not called:
        return []
    lines = list(_HEAD)
    defined = [each for each in called if each.autograd != "refused"]
    namespaces = sorted({each.operator.partition(".")[0] for each in defined})
    lines += ["stubs = {}"] if defined else []
    lines += [f'stubs["{n}"] = torch.library.Library("{n}", "FRAGMENT")' for n in namespaces]
    if any(each.autograd in ("formula", "composite") for each in called):
        lines += ["", *_GRADIENT]
    for each in called:
        lines += _Stub(desc, each).lines()
    return lines


class _Stub:
    def __init__(self, desc: CaptureDesc, operator: OperatorDesc) -> None:
        self._desc = desc
        self._operator = operator
        self._schema: Any = decode_schema(operator, "$.operators")
        self._arguments: list[Any] = list(self._schema.arguments)
        self._name = operator.schema.partition("(")[0]
        self._values = ValueCode()

    def lines(self) -> Iterator[str]:
        namespace, _, rest = self._operator.schema.partition("::")
        library = f'stubs["{namespace}"]'
        members = torch.Tag.__members__
        named = [f"torch.Tag.{tag}" for tag in self._operator.tags if tag in members]
        tags = tuple_code(named)
        if self._operator.autograd == "refused":
            yield from self._custom_operator(rest, tags)
        else:
            yield f"{library}.define({rest!r}, tags={tags})"
            yield from ("", "", f'@torch.library.register_fake("{self._name}", lib={library})')
        yield f"def _({self._parameters()}):"
        bodies = {tuple(self._body(call, given)): given for call, given in self._calls()}
        if not bodies:
            raise unsupported("an operator has no result on record", self._name, "")
        *others, last = bodies
        for body in others:
            conditions = " and ".join(_conditions(bodies[body]))
            yield f"    if {conditions or 'True'}:"
            yield from (f"        {line}" for line in body)
        yield from (f"    {line}" for line in last)
        yield from ("", "")
        if self._operator.autograd in ("formula", "composite"):
            is_flat = all(a.type.kind() != "ListType" and not a.kwarg_only for a in self._arguments)
            if not is_flat or any(r.type.kind() == "ListType" for r in self._schema.returns):
                raise unsupported("a gradient of lists of tensors", self._name, "")
            yield "torch.library.register_autograd("
            yield f'    "{self._name}", backward_stub, setup_context=setup_stub, lib={library}'
            yield from (")", "", "")

    def _custom_operator(self, schema: str, tags: str) -> Iterator[str]:
        """Write the head of an operator of ``torch.library.custom_op``, which refuses gradients."""
        written = [
            a.name for a in self._arguments if a.alias_info is not None and a.alias_info.is_write
        ]
        yield from ("", "", f'@torch.library.custom_op("{self._name}", mutates_args={written!r},')
        yield f"                         schema={schema[schema.index('(') :]!r}, tags={tags})"
        yield from ("def stub(*args, **kwargs):", '    raise NotImplementedError("a stub")', "", "")
        yield "@stub.register_fake"

    def _parameters(self) -> str:
        texts: list[str] = []
        has_star = has_default = False
        for argument in self._arguments:
            if keyword.iskeyword(argument.name):
                raise unsupported("an argument's name is a keyword", self._name, argument.name)
            if argument.kwarg_only and not has_star:
                texts.append("*")
                has_star, has_default = True, False
            has_default = has_default or argument.has_default_value()
            default = self._values.of(default_of(argument), {}, self._name) if has_default else ""
            texts.append(f"{argument.name}={default}" if has_default else argument.name)
        return ", ".join(texts)

    def _calls(self) -> Iterator[tuple[OperatorCall, Mapping[str, Any]]]:
        """Yield the recorded calls with their arguments by name."""
        for call in calls_of(self._desc.graph, self._operator.operator):
            given = bound_arguments(self._schema, call.args, call.kwargs)
            if given is not None and (call.has_result or not self._schema.returns):
                yield call, given

    # --- one call ---

    def _body(self, call: OperatorCall, given: Mapping[str, Any]) -> Iterator[str]:
        """Write the lines that bind the symbols and return the result."""
        bound: dict[str | None, str] = {}
        for argument, value in given.items():
            for number, text in _places(value, argument):
                bound.setdefault(lone_symbol(number), text)
        result = self._result(call.result)
        symbols = _symbols_of(call.result)
        names = {argument.name for argument in self._arguments}
        for name, expr in sorted(symbols.items()):
            if name in names:
                raise unsupported("an argument has the name of a symbol", self._name, name)
            if name in bound:
                yield f"{name} = {bound[name]}"
            elif torch_symbols.is_unbacked(expr):
                low, high = range_of(self._desc, name)
                yield f"{name} = torch.library.get_ctx().new_dynamic_size(min={low}, max={high})"
            else:
                raise unsupported(
                    "a size does not follow from those of arguments", self._name, name
                )
        yield f"return {result}"

    def _result(self, value: Value) -> str:
        count = len(self._schema.returns)
        if count == 0:
            return "None"
        if count == 1:
            return self._returned(value, 0)
        items = getattr(value, "items", ())
        return tuple_code(self._returned(item, at) for at, item in enumerate(items))

    def _returned(self, value: Value, position: int) -> str:
        argument = written_argument(self._schema, position)
        return self._part(value) if argument is None else argument

    def _part(self, value: Value) -> str:
        match value:
            case TensorValue(tensor=tensor):
                return self._tensor(tensor)
            case SymValue(sym=SymDesc(kind="int") as sym):
                return int_code(sym)
            case ListValue(items=items) | TupleValue(items=items):
                return f"[{', '.join(map(self._part, items))}]"
            case None | bool() | int() | float():
                return repr(value)
            case _:
                raise unsupported("a result of a stub", self._name, type(value).__name__)

    def _tensor(self, d: MetaTensorDesc) -> str:
        if d.layout != "strided" or d.subclass is not None:
            raise unsupported("a result of a stub", self._name, d.layout)
        sizes = f"{sizes_code(d.size)}, {sizes_code(d.stride)}"
        tensors = (a.name for a in self._arguments if str(a.type) == "Tensor")
        first = next(tensors, None)
        device = f"{first}.device" if first else repr(d.device)
        return f"torch.empty_strided({sizes}, dtype=torch.{d.dtype}, device={device})"


def _places(value: Any, text: str) -> Iterator[tuple[IntLike, str]]:
    """Yield the sizes and integers in an argument, with the code for each."""
    match value:
        case TensorValue(tensor=tensor):
            yield from ((n, f"{text}.size({dim})") for dim, n in enumerate(tensor.size))
        case SymValue(sym=SymDesc(kind="int") as sym):
            yield sym, text
        case ListValue(items=items) | TupleValue(items=items) | SizeValue(items=items):
            for at, item in enumerate(items):
                yield from _places(item, f"{text}[{at}]")
        case _:
            return


def _conditions(given: Mapping[str, Any]) -> Iterator[str]:
    """Write what distinguishes the arguments of a call from those of others."""
    for name, value in given.items():
        if isinstance(value, TensorValue):
            tensor = value.tensor
            yield f"{name}.dim() == {tensor.ndim}"
            yield f"{name}.dtype == torch.{tensor.dtype}"
            sizes = enumerate(tensor.size)
            yield from (f"{name}.size({d}) == {n}" for d, n in sizes if isinstance(n, int))
        elif type(value) in (int, bool, str):
            yield f"{name} == {value!r}"


def _symbols_of(value: Any) -> dict[str, Any]:
    """Return the symbols of the sizes and strides of a result, by name."""
    numbers: list[IntLike] = []
    for part in walk(value, (TensorValue, SymDesc)):
        is_tensor = isinstance(part, TensorValue)
        numbers += (*part.tensor.size, *part.tensor.stride) if is_tensor else (part,)
    return {symbol.name: symbol for n in numbers for symbol in size_expr(n).free_symbols}
