"""A frame as a script that builds its graph node by node and calls the backend, without Dynamo.

The backend gets what it gets from Dynamo: the recorded nodes under their names, bodies of higher-order
operators as graph modules, a ``ShapeEnv`` with the recorded symbols, ranges, guards and runtime
asserts, and the recorded fake value of each node.
"""

from __future__ import annotations

import re
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from torch_fakeify.encoding.exprs import decode_expr
from torch_fakeify.errors import UnsupportedValueError
from torch_fakeify.records.graph import VALUE_KEYS
from torch_fakeify.records.symbol_names import names_in
from torch_fakeify.records.tensor import (
    FloatValue,
    ListValue,
    NamedTupleValue,
    SizeValue,
    SymDesc,
    SymValue,
    TensorValue,
    TupleValue,
)
from torch_fakeify.replay.lowering import attribute_of
from torch_fakeify.tools.graph_edits import leaf_tensor
from torch_fakeify.tools.size_edits import is_strided_base, used_symbols
from torch_fakeify.tools.value_code import (
    ValueCode,
    expr_code,
    int_code,
    sizes_code,
    tuple_code,
    unsupported,
)

from .script_code import REAL, RESERVED, InputCode, filled, is_row_major

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch_fakeify.records.frame import CaptureDesc
    from torch_fakeify.records.graph import GraphModuleDesc, NodeDesc
    from torch_fakeify.records.shape_env import SymbolDesc
    from torch_fakeify.records.tensor import MetaTensorDesc, Value

_META_KEYS = (
    "ac_graph_id", "custom", "memory_budget", "partitioner_tag", "recompute",
    "user_visible_output_idxs", "_fx_runtime_assert_preserve",
)  # fmt: skip
"""Other metadata of nodes that compilers use."""
_WIDTH = 96


class DirectScript:
    """The parts of the script, as lines; ``gm`` is the rebuilt graph.

    Raises:
        UnsupportedValueError: a part of the frame has no text.
    """

    def __init__(self, desc: CaptureDesc, inputs: InputCode, gm: torch.fx.GraphModule) -> None:
        if desc.graph.calling is not None:
            raise unsupported("the graph has a structured calling convention", "$.graph", "")
        self._desc = desc
        self._values = ValueCode()
        self._inputs = inputs
        self._symbols = desc.symbols
        self._reserved = RESERVED | {s.name for s in self._symbols}
        self._functions: list[list[str]] = []
        self._names: set[str] = set()
        self._graph(desc.graph, gm, "frame", main=True)

    @property
    def imports(self) -> set[str]:
        """Import statements."""
        return {*self._values.imports, *_IMPORTS}

    def lines(self) -> Iterator[str]:
        """Write everything before the call of the backend."""
        rest = [*self._functions_and_inputs()]
        words = set(re.findall(r"\w+", "\n".join([*self._facts(), *rest])))
        symbols = [symbol for symbol in self._symbols if symbol.name in words]
        unknown = names_in(self._desc.graph) - {symbol.name for symbol in self._symbols}
        rest = [
            *map(self._symbol, symbols),
            *(f"{n} = mode.shape_env.create_unbacked_symint()" for n in sorted(unknown & words)),
            *self._facts(),
            *(line for symbol in symbols for line in self._range(symbol)),
            *rest,
        ]
        used: list[str] = []
        for name, text in reversed(_HELPERS.items()):
            if any(f"{name}(" in line for line in [*rest, *used]):
                used = [*text.splitlines(), "", "", *used]
        yield "mode = FakeTensorMode(shape_env=ShapeEnv())"
        yield from ("", "", *used) if used else ()
        yield from rest

    def _functions_and_inputs(self) -> Iterator[str]:
        yield from ("", "", *self._inputs.lines())
        for function in self._functions:
            yield from ("", "", *function)
        call = ", ".join(f"{name}={name}" for name in self._inputs.defaults)
        aot = self._desc.aot
        yield from (line.format(call) for line in _FAKE_INPUTS)
        if aot is None:
            yield from _COMPILED
        else:
            yield from (line.format(kind=aot.kind) for line in _COMPILED_BELOW)

    # --- the shape environment ---

    def _symbol(self, symbol: SymbolDesc) -> str:
        """Write a line that makes a symbol, without facts."""
        hint: Any = None if symbol.hint is None else decode_expr(symbol.hint)
        kind = dict(symbol.assumptions)
        if hint is None or not hint.is_number:
            made = "symint" if kind.get("integer") else "symfloat"
            return f"{symbol.name} = mode.shape_env.create_unbacked_{made}()"
        source = symbol.sources[0].name if symbol.sources else symbol.name
        if not hint.is_Integer:
            return f"{symbol.name} = size({source!r}, {float(hint)!r}, positive=None)"
        positive = "" if kind.get("positive") else ", positive=None"
        is_small = (_bounds(symbol)[0] or 0) < 2  # torch assumes that a dynamic dim is not
        small = ", zero_one=True" if is_small else ""
        return f"{symbol.name} = size({source!r}, {int(hint)}{positive}{small})"

    def _range(self, symbol: SymbolDesc) -> Iterator[str]:
        """Write the range of a symbol, unless it is the default of a dynamic dim."""
        low, high = _bounds(symbol)
        if (low, high) in ((None, None), (2, None)) or not dict(symbol.assumptions).get("integer"):
            return
        yield f"limit({symbol.name}, {low}, {high})"

    def _facts(self) -> Iterator[str]:
        """Write asserts that make the ``ShapeEnv`` learn the guards, and the runtime asserts."""
        env = self._desc.shape_env
        if env is None:
            return
        for guard in env.guards:
            yield f"assert {expr_code(guard.expr)}  # a guard"
        for replacement in env.replacements:
            if names_in(replacement.symbol) & used_symbols(self._desc):
                left, right = expr_code(replacement.symbol), expr_code(replacement.expr)
                yield f"torch._check({left} == {right})"
        for fact in env.runtime_asserts:
            yield f"torch._check({expr_code(fact.expr)})"

    # --- graphs ---

    def _graph(
        self, record: GraphModuleDesc, gm: torch.fx.GraphModule, name: str, *, main: bool = False
    ) -> None:
        """Write the function that makes a graph, after the functions of its bodies."""
        lines = ["module = torch.nn.Module()"]
        lines += self._members(record, gm, name)
        lines.append("graph = torch.fx.Graph()")
        scope = _Scope(self._values)
        if main:
            for at, entry in enumerate(self._desc.inputs):
                if entry.tensor is not None:
                    scope.note(entry.tensor, f"values[{at}]")
        at = 0
        for fx_node, node_record in zip(gm.graph.nodes, record.nodes, strict=True):
            lines += self._node(fx_node, node_record, scope, at if main else None)
            at += fx_node.op == "placeholder"
        class_name = "" if record.class_name == "GraphModule" else f", {record.class_name!r}"
        made = f"torch.fx.GraphModule(module, graph{class_name})"
        if record.function_name is None and record.training:
            lines.append(f"return {made}")
        else:
            lines.append(f"made = {made}")
            if record.function_name is not None:
                lines.append(f"made.__name__ = {record.function_name!r}")
            lines += [] if record.training else ["made.eval()"]
            lines.append("return made")
        self._functions.append(
            [f"def {name}({'values' if main else ''}):", *(f"    {line}" for line in lines)]
        )

    def _members(
        self, record: GraphModuleDesc, gm: torch.fx.GraphModule, name: str
    ) -> Iterator[str]:
        aliases, bodies = dict(record.submodule_aliases), dict(record.submodules)
        targets = read_attributes(gm)
        written: dict[int, str] = {}
        parents: set[str] = set(targets)
        for target in targets:
            value = attribute_of(gm, target)
            path, _, last = target.rpartition(".")
            for parent in accumulate(path.split("."), "{}.{}".format) if path else ():
                if parent not in parents:
                    parents.add(parent)
                    yield f"module.{parent} = torch.nn.Module()"
            if id(value) in written:
                yield f"module.{target} = module.{written[id(value)]}"
                continue
            written[id(value)] = target
            if isinstance(value, torch.fx.GraphModule):
                start = "make" if name == "frame" else name
                function = self._fresh(f"{start}_{target.replace('.', '_')}")
                self._graph(bodies[aliases.get(target, target)], value, function)
                yield f"module.{target} = {function}()"
            elif isinstance(value, torch.Tensor):
                yield member(last, value, f"module.{path}" if path else "module")
            else:
                yield f"module.{target} = {self._values.of(value, {}, target)}"

    def _fresh(self, name: str) -> str:
        while name in self._names:
            name += "_"
        self._names.add(name)
        return name

    def _node(
        self, fx_node: torch.fx.Node, record: NodeDesc, scope: _Scope,
        position: int | None,
    ) -> Iterator[str]:  # fmt: skip
        if fx_node.op == "output":
            returned = self._values.of(fx_node.args[0], scope.names, "the output")
            if fx_node.name == "output":
                yield f"graph.output({returned})"
            else:
                name = fx_node.name
                yield f"graph.create_node('output', 'output', ({returned},), name={name!r})"
            return
        name = fx_node.name
        while name in self._reserved or name in self._names:
            name += "_"
        scope.names[fx_node] = name
        function, args = self._call(fx_node, scope)
        line = f"{name} = {function}({', '.join(args)})"
        if len(line) <= _WIDTH:
            yield line
        else:
            yield from (f"{name} = {function}(", *(f"    {arg}," for arg in args), ")")
        meta = dict(record.meta)
        for key in VALUE_KEYS:
            if key not in meta:
                continue
            place = f'{name}.meta["{key}"]'
            if fx_node.op == "placeholder" and position is not None:
                text = f"values[{position}]"
                if isinstance(recorded := meta[key], TensorValue):
                    scope.note(recorded.tensor, text)
            else:
                text = scope.value(meta[key], place)
            yield (
                f"# {name} has a value of an unsupported kind"
                if text is None
                else (f"{place} = {text}")
            )
        yield from self._notes(fx_node, name, scope)

    def _notes(self, fx_node: torch.fx.Node, name: str, scope: _Scope) -> Iterator[str]:
        bindings = fx_node.meta.get("unbacked_bindings")
        if bindings:
            pairs = (
                f"{symbol}.node.expr: {self._values.of(path, {}, name)}"
                for symbol, path in bindings.items()
            )
            yield f'{name}.meta["unbacked_bindings"] = {{{", ".join(pairs)}}}'
        for key in _META_KEYS:
            if key not in fx_node.meta:
                continue
            try:
                text = self._values.of(fx_node.meta[key], scope.names, name)
            except UnsupportedValueError:
                yield f'# {name}.meta["{key}"] is unsupported'
                continue
            yield f'{name}.meta["{key}"] = {text}'

    def _call(self, fx_node: torch.fx.Node, scope: _Scope) -> tuple[str, list[str]]:
        """The function that adds a node to the graph, and its arguments."""

        def of(part: Any) -> str:
            return self._values.of(part, scope.names, fx_node.name)

        made = torch.fx.Graph().create_node(fx_node.op, fx_node.target, (), {})
        has_custom_name = made.name != fx_node.name  # not the name that FX would choose
        parts = [of(fx_node.target)]
        if fx_node.args or fx_node.kwargs:
            parts.append(of(tuple(fx_node.args)))
        if fx_node.kwargs:
            parts.append(of(dict(fx_node.kwargs)))
        name = [f"name={fx_node.name!r}"] if has_custom_name else []
        default = fx_node.op == "placeholder" and fx_node.args
        if fx_node.op == "call_function" or not (has_custom_name or default):
            return f"graph.{fx_node.op}", [*parts, *name]
        return "graph.create_node", [repr(fx_node.op), *parts, f"name={fx_node.name!r}"]


class _Scope:
    """The variables of one function, and the tensors that they contain."""

    def __init__(self, values: ValueCode) -> None:
        self._values = values
        self.names: dict[Any, str] = {}
        """Variable names by node."""
        self._tensors: dict[int, str] = {}
        self._storages: dict[int, tuple[str, str]] = {}

    def note(self, tensor: MetaTensorDesc, place: str) -> None:
        """Register the expression for a tensor."""
        self._tensors.setdefault(tensor.id, place)
        if tensor.storage is not None and tensor.layout == "strided" and tensor.subclass is None:
            self._storages.setdefault(tensor.storage.id, (place, tensor.dtype))

    def value(self, value: Value, place: str) -> str | None:
        """Write the recorded fake value of a node; ``None`` if its kind is unsupported."""
        match value:
            case None | bool() | int() | str() | float():
                return self._values.of(value, {}, place)
            case FloatValue(text=text):
                return f'float("{text}")'
            case SymValue(sym=SymDesc() as sym):
                return expr_code(sym.expr)
            case TensorValue(tensor=tensor):
                return self._tensor(tensor, place)
            case (
                TupleValue(items=items)
                | ListValue(items=items)
                | SizeValue(items=items)
                | NamedTupleValue(items=items)
            ):
                parts = [self.value(item, f"{place}[{i}]") for i, item in enumerate(items)]
                if any(part is None for part in parts):
                    return None
                if isinstance(value, ListValue):
                    return f"[{', '.join(map(str, parts))}]"
                return tuple_code(map(str, parts))
            case _:
                return None

    def _tensor(self, tensor: MetaTensorDesc, place: str) -> str | None:
        if tensor.id in self._tensors:
            return self._tensors[tensor.id]
        batched = tensor.functorch
        if batched is not None and batched.kind == "batched" and not tensor.requires_grad:
            inside = _Scope(self._values)._tensor(batched.unwrapped, "")
            add = f"torch._C._functorch._add_batch_dim({inside}, {batched.bdim}, {batched.level})"
            return None if inside is None else add
        parts = (tensor.subclass, tensor.functorch, tensor.functional, tensor.nested_int)
        if tensor.layout != "strided" or any(part is not None for part in parts):
            return None
        if tensor.is_conj or tensor.is_neg:
            return None
        size = sizes_code(tensor.size)
        view_base = None if tensor.storage is None else self._storages.get(tensor.storage.id)
        self.note(tensor, place)
        grad = ", requires_grad=True" if tensor.requires_grad else ""
        if view_base is not None and view_base[1] == tensor.dtype:
            offset = int_code(tensor.storage_offset)
            return f"view({view_base[0]}, {size}, {sizes_code(tensor.stride)}, {offset}{grad})"
        dtype = "" if tensor.dtype == "float32" else f", dtype=torch.{tensor.dtype}"
        plain = leaf_tensor(tensor)
        dense = is_strided_base(plain) and is_row_major(plain)
        stride = "" if dense else f", stride={sizes_code(tensor.stride)}"
        device = "" if tensor.device in ("cpu", "") else f", device={tensor.device!r}"
        return f"fake({size}{stride}{dtype}{device}{grad})"


def _bounds(symbol: SymbolDesc) -> tuple[int | None, ...]:
    """The ends of the range of a symbol; ``None`` for one that is not an integer."""
    ends: list[Any] = [None if e is None else decode_expr(e) for e in (symbol.lower, symbol.upper)]
    return tuple(int(e) if e is not None and e.is_Integer else None for e in ends)


# --- parts of both scripts -----------------------------------------------------------------


def read_attributes(gm: torch.fx.GraphModule) -> list[str]:
    """Dotted names of the attributes that the nodes of a graph read."""
    nodes = (n for n in gm.graph.nodes if n.op in ("get_attr", "call_module"))
    return list(dict.fromkeys(str(n.target) for n in nodes))


def member(name: str, tensor: torch.Tensor, owner: str) -> str:
    """Write a line that sets a tensor of a module, with its recorded data if there is any."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    made = filled(dtype, str(tuple(map(int, tensor.shape))), tensor.ndim)
    if type(tensor) in REAL and tensor.layout is torch.strided and _has_numbers(tensor):
        made = f"torch.tensor({tensor.tolist()!r}, dtype={tensor.dtype})"
    if isinstance(tensor, torch.nn.Parameter):
        grad = tensor.requires_grad
        return f"{owner}.{name} = torch.nn.Parameter({made}, requires_grad={grad})"
    return f'{owner}.register_buffer("{name}", {made})'


def _has_numbers(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor can be written as numbers."""
    if tensor.device.type == "meta" or tensor.numel() > _MOST:
        return False
    if tensor.dtype.is_floating_point:
        return tensor.dtype.itemsize >= 2 and bool(tensor.isfinite().all())
    return not tensor.dtype.is_complex and tensor.dtype not in (torch.bits8, torch.bits16)


_MOST = 1024
"""Largest number of elements that are written as numbers."""


# --- text -----------------------------------------------------------------------------------------


_IMPORTS = """\
from torch._dynamo.backends.registry import lookup_backend
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
""".splitlines()

_HELPERS = {
    "size": """\
def size(source, hint, positive=True, zero_one=False):
    \"\"\"A number that the program is called with, as a symbol.\"\"\"
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    env, source = mode.shape_env, ConstantSource(source)
    symbol = env.create_symbol(
        hint, source, DimDynamic.DYNAMIC, positive=positive, do_not_specialize_zero_one=zero_one
    )
    make = env.create_symfloatnode if isinstance(hint, float) else env.create_symintnode
    return make(symbol, hint=hint, source=source)""",
    "limit": """\
def limit(number, low, high):
    from torch.utils._sympy.numbers import int_oo

    low, high = -int_oo if low is None else low, int_oo if high is None else high
    mode.shape_env.constrain_symbol_range(
        number.node._expr, compiler_min=low, compiler_max=high
    )""",
    "fake": """\
def fake(size, stride=None, dtype=torch.float32, device="cpu", requires_grad=False):
    \"\"\"The value of a node while it is compiled.\"\"\"
    with mode:
        if stride is None:
            made = torch.empty(size, dtype=dtype, device=device)
        else:
            made = torch.empty_strided(size, stride, dtype=dtype, device=device)
        return made.requires_grad_(requires_grad)""",
    "view": """\
def view(tensor, size, stride, offset, requires_grad=False):
    \"\"\"One in the memory of another one.\"\"\"
    with mode:
        made = torch.as_strided(tensor, size, stride, offset)
        return made.requires_grad_() if requires_grad else made.detach()""",
}
"""Functions that the script contains if it calls them."""

_FAKE_INPUTS = """\


def fake_inputs():
    with mode:
        return inputs({})


def compiled_by(backend, **options):""".splitlines()

_COMPILED = """\
    \"\"\"Call a backend as Dynamo does.\"\"\"
    values = fake_inputs()
    with tracing(TracingContext(mode)):
        found = lookup_backend(backend) if isinstance(backend, str) else backend
        return found(frame(values), values, **options)""".splitlines()

_COMPILED_BELOW = """\
    \"\"\"Call the compiler that a backend gives to AOTAutograd for {kind} graphs.\"\"\"
    from types import SimpleNamespace

    from torch._functorch import aot_autograd

    values, made = fake_inputs(), []

    def traced(stack, function, args, descs, config, fake_mode, env):
        stack.enter_context(fake_mode)
        return SimpleNamespace(fw_metadata=SimpleNamespace())

    def compile_graph(state, capture, partition, forward, backward=None, inference=None):
        backward, inference = backward or forward, inference or forward
        with torch.no_grad():
            made.append({kind}(frame(values), values))
        return made[0], None

    aot_autograd.create_aot_state = traced
    aot_autograd.aot_stage1_graph_capture = lambda *args: None
    aot_autograd.aot_stage2_compile = compile_graph
    aot_autograd.should_use_local_autograd_cache = lambda: False
    aot_autograd.should_use_remote_autograd_cache = lambda: False
    with tracing(TracingContext(mode)):
        found = lookup_backend(backend) if isinstance(backend, str) else backend
        made.append(found(frame(values), values, **options))

    def run(*args):
        with torch.no_grad():
            boxed = getattr(made[0], "_boxed_call", False)
            return made[0](list(args)) if boxed else made[0](*args)

    return run""".splitlines()
"""What AOTAutograd traces is not compiled: the backend's compiler gets the recorded graph."""
