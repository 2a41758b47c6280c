"""Python source of the inputs of a frame, and the names of a script, which are made of those of the program.

Parts that cannot be written raise ``UnsupportedValueError``; nothing is left out silently.
"""

from __future__ import annotations

import builtins
import re
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from torch_fakeify.encoding.exprs import encode_expr
from torch_fakeify.errors import FakeifyError
from torch_fakeify.frames.captures import Capture
from torch_fakeify.frames.inputs.requirements import data_symbols
from torch_fakeify.frames.inputs.symbol_values import Symbols
from torch_fakeify.records.aliasing import itemsize
from torch_fakeify.records.frame import InputDesc
from torch_fakeify.records.graph import GraphModuleDesc
from torch_fakeify.records.rewrite import Rewriter, walk
from torch_fakeify.records.symbol_names import lone_symbol, names_in
from torch_fakeify.records.tensor import SymbolNode, SymDesc
from torch_fakeify.render.readable_names import (
    InputNames,
    ReadableNames,
    identifier,
    renamed_symbols,
)
from torch_fakeify.render.text import expr_text
from torch_fakeify.tools.size_edits import (
    contiguous,
    extent_hint,
    is_strided_base,
    shared_storages,
    size_expr,
    size_hint,
)
from torch_fakeify.tools.value_code import expr_code, int_code, sizes_code, unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch_fakeify.records.frame import CaptureDesc
    from torch_fakeify.records.tensor import ExprDesc, MetaTensorDesc
    from torch_fakeify.tools.worker.replies import TensorArgument

_SUB_BYTE = re.compile(r"(float4|u?int[1-7]\b|bits(8|\dx))")


def filled(dtype: str, size: str, ndim: int = 2) -> str:
    """Write random data like that of `materialize`: integers are 0 or 1, which are valid indices.

    ``size`` is the text of a tuple of length ``ndim``, ``dtype`` is without ``torch.``.
    """
    random = "rand" if ndim < 2 else "randn"
    if _SUB_BYTE.match(dtype):
        return f"torch.randint(0, 2, {size}, dtype=torch.uint8).view(torch.{dtype})"
    if dtype.startswith(("float", "bfloat", "complex")):
        if dtype.startswith("float8"):
            return f"torch.{random}({size}).to(torch.{dtype})"
        argument = f", dtype=torch.{dtype}" if dtype != "float32" else ""
        return f"torch.{random}({size}{argument})"
    if dtype.startswith(("int", "uint", "bool")):
        return f"torch.randint(0, 2, {size}).to(torch.{dtype})"
    return f"torch.zeros({size}, dtype=torch.{dtype})"


class InputCode:
    """Writes the inputs of a frame as a function ``inputs`` of its sizes.

    ``seed`` is that of the data; ``sizes``, by symbol name, are those at which the frame fails, where they
    are not as recorded.
    """

    def __init__(self, desc: CaptureDesc, seed: int, sizes: Mapping[str, int]) -> None:
        self._desc = desc
        self._seed = seed
        symbols = {symbol.name: symbol for symbol in desc.symbols}
        requested = {name: n for name, n in sizes.items() if name in symbols}
        values = Symbols(desc.shape_env, {}).values
        used = names_in(tuple((e.tensor, e.sym) for e in desc.inputs))
        self.defaults: dict[str, Any] = {}
        """Values of the inputs' symbols, by name."""
        for name, symbol in symbols.items():
            if name in used:
                value = requested.get(name, values[name]) if symbol.hint is None else values[name]
                self.defaults[name] = _number(value, name)
        self.others = {name: n for name, n in requested.items() if self.defaults.get(name, n) != n}
        """Sizes at which the frame fails, where they differ from those of the compilation."""
        self._storages = _shared(desc)
        self._numbers = _written_out(desc, seed, sizes)

    @property
    def call(self) -> str:
        """The call of ``inputs`` at the sizes at which the frame fails."""
        return f"inputs({', '.join(f'{name}={n}' for name, n in self.others.items())})"

    def lines(
        self,
        left_out: Callable[[InputDesc], bool] = lambda _: False,
        marks: Callable[[InputDesc], Iterable[str]] = lambda _: (),
        made: Callable[[InputDesc], str | None] = lambda _: None,
    ) -> Iterator[str]:
        """Write the function, without the inputs to be ``left_out``, with ``marks`` after each input.

        ``made`` returns the expression for an input such as a ``DTensor``, ``None`` for the default.
        """
        params = [f"{name}={value!r}" for name, value in self.defaults.items()]
        yield f"def inputs({', '.join(params)}):"
        yield f"    torch.manual_seed({self._seed})"
        names: list[str] = []
        taken = {*self.defaults, "torch"}
        for number, (dtype, count) in self._storages.items():
            yield f"    storage_{number} = {filled(dtype, f'({count},)', 1)}"
        for entry in self._desc.inputs:
            if left_out(entry):
                continue
            text = made(entry)
            if entry.tensor is None:
                names.append(text or self._scalar(entry))
                continue
            name = entry.name if entry.name not in taken else f"{entry.name}_"
            names.append(name)
            yield f"    {name} = {text or self._tensor(entry, entry.tensor)}"
            yield from (f"    {line}" for line in marks(entry))
        yield f"    return [{', '.join(names)}]"

    def _scalar(self, entry: InputDesc) -> str:
        if entry.sym is not None:
            return expr_code(entry.sym.expr)
        if isinstance(entry.value, (int, float, bool, str, type(None))):
            return repr(entry.value)
        raise unsupported(_NO_INPUT, entry.name, "a constant that is no number")

    def _tensor(self, entry: InputDesc, tensor: MetaTensorDesc) -> str:
        storage = None if tensor.storage is None else tensor.storage.id
        plain = tensor.layout == "strided" and tensor.subclass is None
        if not plain or tensor.functorch is not None or tensor.functional is not None:
            raise unsupported(_NO_INPUT, entry.name, "not a plain strided tensor")
        if tensor.is_conj or tensor.is_neg:
            raise unsupported(_NO_INPUT, entry.name, "a conjugate or negative view")
        size, stride = sizes_code(tensor.size), sizes_code(tensor.stride)
        data = self._numbers.get(entry.name) or filled(tensor.dtype, size, tensor.ndim)
        if storage is not None and storage in self._storages:
            offset = int_code(tensor.storage_offset)
            is_same = self._storages[storage][0] == tensor.dtype
            of_dtype = "" if is_same else f".view(torch.{tensor.dtype})"
            text = f"storage_{storage}{of_dtype}.as_strided({size}, {stride}, {offset})"
        elif is_strided_base(tensor) and not is_row_major(tensor):
            text = (
                f"torch.empty_strided({size}, {stride}, dtype=torch.{tensor.dtype}).copy_({data})"
            )
        else:
            text = data
        if tensor.device not in ("cpu", ""):
            text = f"{text}.to({tensor.device!r})"
        return with_gradient(text, tensor)


def with_gradient(data: str, tensor: MetaTensorDesc | TensorArgument) -> str:
    """Write the leaf of autograd that a tensor is, with some data."""
    if tensor.is_parameter:
        return f"torch.nn.Parameter({data}, requires_grad={tensor.requires_grad})"
    return f"{data}.requires_grad_()" if tensor.requires_grad else data


_MOST = 64


def _written_out(desc: CaptureDesc, seed: int, sizes: Mapping[str, int]) -> dict[str, str]:
    """Data of small inputs, by name, if the program may read sizes from it or index by it."""
    try:
        made = Capture(desc).materialize(seed, sizes=dict(sizes), device="cpu")
    except FakeifyError:
        return {}  # random data suffices
    found: dict[str, str] = {}
    is_read = bool(data_symbols(desc))
    for entry, value in zip(desc.inputs, made, strict=True):
        if type(value) not in REAL:
            continue
        if names_in((entry.tensor and entry.tensor.size,)) or value.layout is not torch.strided:
            continue
        if value.dtype.is_floating_point and value.dtype.itemsize > 1:
            written = is_read or value.ndim == 0
        else:
            written = value.dtype in _INTEGERS
        if value.numel() <= _MOST and written:
            found[entry.name] = f"torch.tensor({value.tolist()!r}, dtype={value.dtype})"
    return found


REAL = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})

_NO_INPUT = "a few lines of torch do not make this input"


def is_row_major(tensor: MetaTensorDesc) -> bool:
    """Whether ``torch.empty`` of a tensor's size has the strides of the tensor."""
    for n in tensor.size[1:]:
        name = lone_symbol(n)
        if isinstance(n, SymDesc) and (name is None or name.startswith("u")):
            return False  # torch's strides may be over Max(1, n)
    row_major = contiguous(tensor)
    return row_major is None or sizes_code(row_major.stride) == sizes_code(tensor.stride)


def _shared(desc: CaptureDesc) -> dict[int, tuple[str, str]]:
    """Dtype and number of elements of the storages that several inputs share, by id."""
    tensors = [entry.tensor for entry in desc.inputs if entry.tensor is not None]
    stored = [(t.storage.id, t) for t in tensors if t.storage is not None]
    shared = shared_storages(desc)
    found: dict[int, tuple[str, str]] = {}
    for identity, tensor in stored:
        if identity in found or (identity not in shared and tensor.base is None):
            continue
        extents = [
            _extent(t) for other, t in stored if other == identity and t.dtype == tensor.dtype
        ]
        assert tensor.storage is not None
        nbytes = tensor.storage.nbytes
        recorded = size_hint(nbytes, 2) // itemsize(tensor.dtype)
        hint, extent = max(extents, key=lambda each: each[0])
        symbolic = any(names_in((t.size, t.stride)) for other, t in stored if other == identity)
        found[identity] = tensor.dtype, extent if symbolic else str(max(hint, recorded))
    return found


def _extent(tensor: MetaTensorDesc) -> tuple[int, str]:
    """Elements from the start of the storage to the end of a tensor: at the recorded sizes, and as code."""
    expr = size_expr(1) + size_expr(tensor.storage_offset)
    for n, step in zip(tensor.size, tensor.stride, strict=True):
        expr += (size_expr(n) - 1) * size_expr(step)
    return extent_hint(tensor, 2), expr_code(encode_expr(expr.expand()))


def _number(value: Any, where: str) -> Any:
    if isinstance(value, int):
        return value
    if not value.is_number:
        raise unsupported("a ragged size is no number", where, str(value))
    return int(value) if value.is_Integer else float(value)


# --- names --------------------------------------------------------------------------------

RESERVED = frozenset({
    "args", "backend", "backward", "compiled", "compiled_by", "decorators", "device", "dist", "dynamic",
    "eager", "expected", "fake", "fake_inputs", "found", "frame", "function", "graph", "inf", "inputs",
    "leaves", "limit", "made", "math", "mode", "module", "nan", "one", "options", "other", "outputs",
    "program", "results", "self", "size", "sys", "torch", "unbacked", "values", "view", "weights",
    *dir(builtins),
})  # fmt: skip
"""Names that a script itself uses; variables for nodes avoid them."""


def with_identifiers(desc: CaptureDesc) -> CaptureDesc:
    """Return a frame whose inputs have the names of the program: ``self_fc_weight`` for ``self.fc.weight``.

    A frame with a structured calling convention stays as it is, as its arguments have names.
    """
    if desc.graph.calling is not None:
        return desc
    graphs: list[GraphModuleDesc] = list(walk(desc, GraphModuleDesc, inside=True))
    nodes = {n.name for graph in graphs for n in graph.nodes if n.op != "placeholder"}
    symbols = (s.name for s in desc.symbols)
    names = InputNames(desc, identifiers=True, reserved={*RESERVED, *nodes, *symbols})

    def changed(part: Any) -> Any:
        match part:
            case InputDesc() if part.name in names.by_torch_name:
                return msgspec.structs.replace(part, name=names.by_torch_name[part.name])
            case GraphModuleDesc():
                nodes = [*part.nodes]
                for at, name in enumerate(names.of(part)):
                    if nodes[at].op == "placeholder" and nodes[at].name != name:
                        nodes[at] = msgspec.structs.replace(nodes[at], name=name, target=name)
                return msgspec.structs.replace(part, nodes=tuple(nodes))
            case _:
                return part

    return Rewriter(changed)(desc)


class ScriptSymbols:
    """The names of symbols in a script, such as ``x_size_0``."""

    def __init__(self, desc: CaptureDesc) -> None:
        words = ReadableNames(desc)
        inputs = {e.sym.expr.nodes[-1]: e.name for e in desc.inputs if e.sym is not None}
        used = {*RESERVED, *(entry.name for entry in desc.inputs)}
        self._names: dict[str, str] = {}
        for symbol in desc.symbols:
            node = SymbolNode(symbol.name, symbol.assumptions)
            name = inputs.get(node)  # the variable that is the symbol
            if name is None:
                name = identifier(words.symbol(symbol.name))
                name = symbol.name if name in used else name
                used.add(name)
            self._names[symbol.name] = name

    def text(self, expr: ExprDesc) -> str:
        """Return an expression as text."""
        return expr_text(renamed_symbols(expr, lambda name: self._names.get(name, name)))
