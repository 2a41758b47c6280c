"""A frame as a Python script that uses torch alone, for people who do not have this package.

The graph is a module, the inputs are made up, dims that were dynamic are marked so, and guards are
conditions of the program; ``torch.compile`` traces it again. Where Dynamo would make another graph of
it (one without an unused input, say) the script can call the backend itself, as Dynamo does. Whether it
fails as the frame does is for the one who asks to find out: `check_script` runs it.
"""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import tempfile
import types
from typing import TYPE_CHECKING, Any

import torch

from .desc import NestedIntDesc, SymDesc
from .errors import UnsupportedValueError
from .failures import essence, masked_line
from .frame import Capture
from .size_edits import contiguous, is_plain
from .storage_map import itemsize
from .text import expr_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .desc import IntLike, MetaTensorDesc
    from .desc_frame import CaptureDesc, InputDesc
    from .failures import Failure

__all__ = ["check_script", "script_of"]

_IMPORTS = {
    "device": "from torch import device",
    "inf": "from math import inf",
    "nan": "from math import nan",
    "NoneType": "NoneType = type(None)",
}


_RELEASES = re.compile(r";  (?:\w+ = )+None(?=$|  #)")
"""What FX writes to let go of values that nothing needs any more."""


def script_of(
    desc: CaptureDesc, failure: Failure, backend: str, *, seed: int = 0, direct: bool = False
) -> str:
    """The text of a script that compiles the frame with a backend, and fails as it does.

    Args:
        desc: the frame.
        failure: how it fails.
        backend: name of a Dynamo backend.
        seed: of the inputs' data.
        direct: call the backend without Dynamo.

    Raises:
        UnsupportedValueError: an input is of a kind that a few lines of torch do not make, or the
            graph calls what is no part of torch.
    """
    return _Script(desc, failure, backend, seed, direct).text()


class _Script:
    def __init__(
        self, desc: CaptureDesc, failure: Failure, backend: str, seed: int, direct: bool
    ) -> None:
        self._direct = direct
        self._desc = desc
        self._failure = failure
        self._backend = backend
        self._seed = seed
        self._globals: dict[str, str] = {}
        self._binders = _binders(desc)
        self._lone = any(e.sym is not None and self._binder_of(e) is None for e in desc.inputs)
        # A symbol that no tensor shows is an int of the program: all ints are to be dynamic then.

    def text(self) -> str:
        """The script."""
        gm = Capture(self._desc).instantiate().gm
        self._bind_sizes(gm)
        frame = self._module("Frame", gm)
        made = [self._inputs(), self._main()]
        told = "\n".join(self._failure.lines).replace("\\", "\\\\").replace('"""', "'''")
        head = [
            f'"""The smallest frame that still fails with the backend {self._backend!r}.\n',
            f'{told}\n\nRecorded with torch {self._desc.torch_version}.\n"""',
            "\n".join(["", *sorted({"import torch", *self._globals.values()})]),
        ]
        return "\n".join([*head, "", "", *frame, *made]) + "\n"

    # --- the graph ---

    def _bind_sizes(self, gm: torch.fx.GraphModule) -> None:
        """Sizes are read off the tensors that have them, as the program did."""
        nodes = {n.name: n for n in gm.graph.find_nodes(op="placeholder")}
        last = list(nodes.values())[-1:]
        for entry in self._desc.inputs:
            binder = self._binder_of(entry)
            if binder is None:
                continue
            name, method, dim = binder
            fx_node = nodes[entry.name]
            with gm.graph.inserting_after(last[0]):
                size = gm.graph.call_method(method, (nodes[name], dim))
            fx_node.replace_all_uses_with(size)
            gm.graph.erase_node(fx_node)
            size._rename(entry.name)
        for fx_node in gm.graph.nodes:
            fx_node.type = None
            if fx_node.op == "placeholder":
                fx_node.target = fx_node.name
        gm.recompile()

    def _binder_of(self, entry: InputDesc) -> tuple[str, str, int] | None:
        if entry.sym is None:
            return None
        return self._binders.get(expr_text(entry.sym.expr))

    def _module(self, cls: str, gm: torch.fx.GraphModule) -> Iterator[str]:
        """A class whose ``forward`` is a graph, and before it those of the graph's bodies."""
        members: list[str] = []
        for name, value in _held(gm):
            flat = name.replace(".", "_")
            if isinstance(value, torch.fx.GraphModule):
                body = f"{cls}_{flat}"
                yield from self._module(body, value)
                members.append(f"self.{flat} = {body}()")
            elif isinstance(value, torch.Tensor):
                members.append(_member(flat, value))
            else:
                members.append(f"self.{flat} = {value!r}")
        for fx_node in gm.graph.nodes:
            if fx_node.op in ("get_attr", "call_module"):
                fx_node.target = str(fx_node.target).replace(".", "_")
        code = gm.graph.python_code("self")
        for name, value in code.globals.items():
            self._globals[name] = _import_of(name, value)
        yield f"class {cls}(torch.nn.Module):"
        if members:
            yield from ("    def __init__(self):", "        super().__init__()")
            yield from (f"        {line}" for line in members)
            yield ""
        lines = code.src.strip("\n").splitlines()
        yield from (f"    {_RELEASES.sub('', line)}".rstrip() for line in lines if line.strip())
        yield from ("", "")

    # --- the inputs ---

    def _inputs(self) -> str:
        lines = [f"    torch.manual_seed({self._seed})"]
        names: list[str] = []
        storages = _shared(self._desc)
        for number, (dtype, count) in storages.items():
            lines.append(f"    storage_{number} = {_filled(dtype, (count,))}")
        for entry in self._desc.inputs:
            if self._binder_of(entry) is not None:
                continue
            names.append(entry.name)
            lines.append(f"    {entry.name} = {self._input(entry, storages)}")
            lines.extend(f"    {line}" for line in _marks(entry, self._lone))
        lines.append(f"    return [{', '.join(names)}]")
        return "\n".join(["def inputs():", *lines, "", ""])

    def _input(self, entry: InputDesc, storages: dict[int, Any]) -> str:
        if entry.tensor is None:
            value: Any = entry.value if entry.sym is None else entry.sym.hint
            if isinstance(value, (int, float, bool, str, type(None))):
                return repr(value)
            raise _unsupported(entry, "a constant that is no number")
        tensor = entry.tensor
        storage = None if tensor.storage is None else tensor.storage.id
        plain = tensor.layout == "strided" and tensor.subclass is None
        if not plain or tensor.functorch is not None or tensor.functional is not None:
            raise _unsupported(entry, "not a plain strided tensor")
        if tensor.is_conj or tensor.is_neg:
            raise _unsupported(entry, "a conjugate or negative view")
        size, stride = _ints(tensor.size), _ints(tensor.stride)
        if storage in storages:
            offset = _int(tensor.storage_offset)
            text = f"storage_{storage}.as_strided({size}, {stride}, {offset})"
        elif is_plain(tensor) and not _is_row_major(tensor):
            empty = f"torch.empty_strided({size}, {stride}, dtype=torch.{tensor.dtype})"
            text = f"{empty}.copy_({_filled(tensor.dtype, size)})"
        else:
            text = _filled(tensor.dtype, size)
        if tensor.device not in ("cpu", ""):
            text = f"{text}.to({tensor.device!r})"
        if tensor.is_parameter:
            return f"torch.nn.Parameter({text}, requires_grad={tensor.requires_grad})"
        return f"{text}.requires_grad_()" if tensor.requires_grad else text

    # --- the program ---

    def _main(self) -> str:
        desc = self._desc
        lines = ["frame = Frame()"]
        env = desc.shape_env
        if env is not None and env.settings.allow_scalar_outputs:
            lines.append("torch._dynamo.config.capture_scalar_outputs = True")
        if env is not None and env.settings.allow_dynamic_output_shape_ops:
            lines.append("torch._dynamo.config.capture_dynamic_output_shape_ops = True")
        dynamic = ", dynamic=True" if self._lone else ""
        if not desc.modes.grad_enabled:
            lines.append("torch.set_grad_enabled(False)")
        guards = [*self._guards()]
        names = [e.name for e in desc.inputs if self._binder_of(e) is None]
        if self._direct:
            dims = {e.name: _dynamic_dims(e) for e in desc.inputs if _dynamic_dims(e)}
            lines += [f"dynamic = {dims!r}", *_DIRECT]
            lines.append(f"compiled = direct({self._backend!r}, frame, inputs())")
        else:
            lines.append(f"compiled = torch.compile(program, backend={self._backend!r}{dynamic})")
        program = [
            f"def program({', '.join(names)}):",
            *(f"    {line}" for line in guards),
            f"    return frame({', '.join(names)})",
            "",
            "",
        ]
        if self._failure.kind == "wrong" or self._failure.stage in ("forward", "backward"):
            lines += ["found, expected = [], []", *_COMPARED]
        else:
            lines.append("compiled(*inputs())")
        return "\n".join([*program, *lines])

    def _guards(self) -> Iterator[str]:
        """The frame's guards as conditions of the program."""
        env = self._desc.shape_env
        if env is None or not env.guards:
            return
        bound = {name: f"{t}.{method}({dim})" for name, (t, method, dim) in self._binders.items()}
        used: set[str] = set()
        conditions: list[str] = []
        for guard in env.guards:
            text = expr_text(guard.expr)
            names = _names_in(text)
            if names is None or not names <= bound.keys():
                conditions.append(f"# guard: {text}")
                continue
            used |= names
            conditions += [f"if not ({text}):", "    raise AssertionError"]
        yield from (f"{name} = {bound[name]}" for name in sorted(used))
        yield from conditions


_COMPARED = """\
for function, results in ((compiled, found), (frame, expected)):
    args = inputs()
    torch.manual_seed(0)
    outputs = function(*args)
    results += [*outputs, *args]
    outputs = [v for v in outputs if isinstance(v, torch.Tensor) and v.grad_fn is not None]
    leaves = [v for v in args if isinstance(v, torch.Tensor) and v.requires_grad and v.is_leaf]
    if outputs and leaves:
        weights = [torch.ones_like(v) for v in outputs]
        results += torch.autograd.grad(outputs, leaves, weights, allow_unused=True)
for one, other in zip(found, expected, strict=True):
    if isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3, equal_nan=True)
""".splitlines()


_DIRECT = """\

def direct(backend, frame, args):
    from torch._dynamo.backends.registry import lookup_backend
    from torch._dynamo.source import LocalSource
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic, ShapeEnv, StatelessSymbolicContext,
    )

    gm = torch.fx.symbolic_trace(frame)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    nodes, fakes = gm.graph.find_nodes(op="placeholder"), []
    for node, arg in zip(nodes, args, strict=True):
        if isinstance(arg, torch.Tensor):
            sizes = [
                DimDynamic.DYNAMIC if dim in dynamic.get(node.name, ()) else DimDynamic.STATIC
                for dim in range(arg.ndim)
            ]
            context = StatelessSymbolicContext(dynamic_sizes=sizes)
            source = LocalSource(node.name, is_input=True)
            arg = mode.from_tensor(arg, source=source, symbolic_context=context)
        fakes.append(arg)
    with mode:
        program(*fakes)  # its conditions are guards
        values = dict(zip(nodes, fakes, strict=True))
        for node in gm.graph.nodes:
            if node.op not in ("placeholder", "output", "get_attr"):
                values[node] = getattr(torch.fx.Interpreter(gm), node.op)(
                    node.target, *torch.fx.node.map_arg((node.args, node.kwargs), values.get)
                )
            node.meta["example_value"] = values.get(node)
    with tracing(TracingContext(mode)):
        return lookup_backend(backend)(gm, fakes)

""".splitlines()


# --- parts ----------------------------------------------------------------------------------------


def _binders(desc: CaptureDesc) -> dict[str, tuple[str, str, int]]:
    """Where each symbol is to be read: a tensor, ``size`` or ``stride``, and a dim."""
    found: dict[str, tuple[str, str, int]] = {}
    for method in ("size", "stride"):
        for entry in desc.inputs:
            for dim, n in enumerate(getattr(entry.tensor, method, ())):
                if isinstance(n, SymDesc) and len(n.expr.nodes) == 1:
                    found.setdefault(expr_text(n.expr), (entry.name, method, dim))
    return found


def _held(gm: torch.fx.GraphModule) -> Iterator[tuple[str, Any]]:
    """What the nodes of a graph read of its module, by dotted name."""
    names = dict.fromkeys(
        str(n.target) for n in gm.graph.nodes if n.op in ("get_attr", "call_module")
    )
    for name in names:
        value: Any = gm
        for part in name.split("."):
            value = getattr(value, part)
        yield name, value


def _member(name: str, tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    made = _filled(dtype, tuple(map(int, tensor.shape)))
    if isinstance(tensor, torch.nn.Parameter):
        return f"self.{name} = torch.nn.Parameter({made}, requires_grad={tensor.requires_grad})"
    return f'self.register_buffer("{name}", {made})'


def _shared(desc: CaptureDesc) -> dict[int, tuple[str, int]]:
    """Storages that several inputs have, by id: dtype and number of elements."""
    found: dict[int, tuple[str, int]] = {}
    seen: set[int] = set()
    for entry in desc.inputs:
        tensor = entry.tensor
        if tensor is None or tensor.storage is None:
            continue
        identity = tensor.storage.id
        if identity in seen or tensor.base is not None:
            nbytes = _int(tensor.storage.nbytes)
            count = nbytes // itemsize(tensor.dtype)
            found.setdefault(identity, (tensor.dtype, count))
        seen.add(identity)
    return found


def _filled(dtype: str, size: tuple[int, ...]) -> str:
    """Data of the kind that `materialize` makes: integers are 0 or 1, which are valid indices."""
    if dtype.startswith(("float", "bfloat", "complex")):
        known = f", dtype=torch.{dtype}" if dtype != "float32" else ""
        if dtype.startswith("float8"):
            return f"torch.randn({size}).to(torch.{dtype})"
        return f"torch.randn({size}{known})"
    if dtype.startswith(("int", "uint", "bool")):
        return f"torch.randint(0, 2, {size}).to(torch.{dtype})"
    return f"torch.zeros({size}, dtype=torch.{dtype})"


def _marks(entry: InputDesc, static_too: bool) -> Iterator[str]:
    tensor = entry.tensor
    if tensor is None:
        return
    for dim, n in enumerate(tensor.size):
        if isinstance(n, SymDesc):
            yield f"torch._dynamo.mark_dynamic({entry.name}, {dim})  # {expr_text(n.expr)}"
        elif static_too:
            yield f"torch._dynamo.mark_static({entry.name}, {dim})"


def _dynamic_dims(entry: InputDesc) -> tuple[int, ...]:
    sizes = () if entry.tensor is None else entry.tensor.size
    return tuple(dim for dim, n in enumerate(sizes) if isinstance(n, SymDesc))


def _names_in(text: str) -> set[str] | None:
    """The names in a condition, if it is one that Python computes as it stands."""
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:
        return None
    if any(isinstance(part, (ast.Call, ast.Attribute)) for part in ast.walk(tree)):
        return None
    return {part.id for part in ast.walk(tree) if isinstance(part, ast.Name)}


def _import_of(name: str, value: Any) -> str:
    if name in _IMPORTS:
        return _IMPORTS[name]
    if isinstance(value, types.ModuleType):
        if name == value.__name__:
            return f"import {name}"
        return f"import {value.__name__} as {name}"
    module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not module or not qualname.isidentifier():
        raise UnsupportedValueError(
            "the graph uses what a script cannot import", found=name, fix="Use the capture"
        )
    return f"from {module} import {qualname} as {name}"


def _unsupported(entry: InputDesc, found: str) -> UnsupportedValueError:
    return UnsupportedValueError(
        "a few lines of torch do not make this input",
        where=entry.name,
        expected="a strided tensor or a number",
        found=found,
        fix="Use the capture",
    )


def _int(n: IntLike) -> int:
    if isinstance(n, int):
        return n
    if isinstance(n, NestedIntDesc):
        raise UnsupportedValueError("a ragged size is no number", fix="Use the capture")
    return n.hint if isinstance(n.hint, int) else 2


def _is_row_major(tensor: MetaTensorDesc) -> bool:
    row_major = contiguous(tensor)
    return row_major is None or _ints(row_major.stride) == _ints(tensor.stride)


def _ints(numbers: tuple[IntLike, ...]) -> tuple[int, ...]:
    return tuple(map(_int, numbers))


# --- whether it does ------------------------------------------------------------------------------


def check_script(path: Path, failure: Failure, *, timeout: float) -> str | None:
    """Run a script in an interpreter of its own; what it did instead, if it did not fail so."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    with tempfile.TemporaryDirectory(prefix="torch-fakeify-") as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-X", "faulthandler", str(path.absolute())],
                capture_output=True,
                cwd=folder,
                env=environment,
                timeout=timeout,
                check=False,
                text=True,
                errors="replace",
            )
        except subprocess.TimeoutExpired:
            return None if failure.kind == "hangs" else f"it runs for more than {timeout:g} s"
    if _is_so(done, failure):
        return None
    last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
    return "it ends well" if done.returncode == 0 else f"it ends with: {last}"


def _is_so(done: subprocess.CompletedProcess[str], failure: Failure) -> bool:
    match failure.kind:
        case "raises":
            said = [masked_line(line) for line in done.stderr.splitlines()]
            name = failure.type.rpartition(".")[2]
            told = essence(f"{name}: {failure.message}")[:1]
            return done.returncode != 0 and all(any(t in line for line in said) for t in told)
        case "wrong":
            return done.returncode != 0 and "AssertionError" in done.stderr
        case "crashes" if done.returncode < 0:
            return signal.Signals(-done.returncode).name == failure.type
        case "crashes":
            return f"exit status {done.returncode}" == failure.type
        case _:
            return False
