"""A frame as a Python script that uses torch alone, for people who do not have this package.

The graph is a module, the inputs are synthetic, dynamic dims are marked, and guards are conditions of
the program; ``torch.compile`` traces it again. Where Dynamo would make a different graph (such as one
without an unused input) the script can call the backend itself, see `direct_script`. `check_script`
runs the script and checks that it fails like the frame.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torch_fakeify._atomic_write import write_atomic
from torch_fakeify.encoding.names import decode_function
from torch_fakeify.encoding.settings import options_to_pass, settings_to_set
from torch_fakeify.errors import FakeifyError, UnsupportedValueError
from torch_fakeify.frames.backend_choice import recorded_name
from torch_fakeify.frames.captures import Capture
from torch_fakeify.records.tensor import FunctionValue, SymDesc
from torch_fakeify.render.text import clip, escape, expr_text
from torch_fakeify.replay.lowering import attribute_of
from torch_fakeify.tools.value_code import ValueCode
from torch_fakeify.tools.worker.client import import_path, run_limited, without_recording
from torch_fakeify.tools.worker.replies import Ended

from .direct_script import DirectScript, member, read_attributes
from .failures import Outcome, masked_line, normalized_message
from .script_code import InputCode, ScriptSymbols, with_identifiers
from .script_stubs import stub_lines
from .script_worlds import ScriptWorld

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch_fakeify.records.frame import CaptureDesc, InputDesc, OperatorDesc
    from torch_fakeify.records.tensor import ExprDesc

    from .failures import Failure

_IMPORTS = {
    "device": "from torch import device",
    "inf": "from math import inf",
    "nan": "from math import nan",
    "NoneType": "NoneType = type(None)",
}


_DYNAMO = "torch._dynamo.config"
_OF_TRACING = (
    "assume_static_by_default", "automatic_dynamic_shapes", "disable", "dynamic_shapes",
    "force_nn_module_property_static_shapes", "force_parameter_static_shapes", "specialize_float",
    "specialize_int", "suppress_errors",
)  # fmt: skip
"""Settings by which Dynamo would trace the script to another frame, or hide its failure."""

_LOWER_VERSION = FunctionValue(
    kind="function", name="torch._dynamo.variables.builtin._lower_version_count_by_1"
)

START = 30.0
"""Seconds for a process to import torch."""
_RELEASES = re.compile(r";  (?:\w+ = )+None(?=$|  #)")
"""Code that FX writes to release values after their last use."""


def script_of(
    desc: CaptureDesc,
    failure: Failure,
    backend: BackendCode,
    *,
    seed: int = 0,
    sizes: Mapping[str, int] | None = None,
    direct: bool = False,
    torch_names: bool = False,
    trust: bool = False,
    stubs: Sequence[OperatorDesc] = (),
) -> str:
    """Write a script that compiles the frame with a backend and fails in the same way.

    It compiles at the recorded sizes and then runs at ``sizes``, by symbol name, if it fails only there.
    With ``direct`` it calls the backend without Dynamo; with ``torch_names`` the inputs keep their names,
    which else are made of those of the program; with ``trust`` it also has the settings that could run or
    write something. ``stubs`` are the operators that it defines as stubs.

    Raises:
        UnsupportedValueError: an input is of a kind that the script cannot make, or the graph calls
            a function that is not part of torch.
    """
    desc = desc if torch_names else with_identifiers(desc)
    inputs = InputCode(desc, seed, sizes or {})
    made = (_Direct if direct else _Script)(desc, failure, backend, inputs, trust)
    return made.text(stub_lines(desc, stubs))


class BackendCode(NamedTuple):
    """How a script gets its backend."""

    name: str
    """A registered name, or ``MODULE:ATTR``."""
    imports: tuple[str, ...] = ()
    """Modules that the script imports first."""

    def lines(self) -> list[str]:
        """Write the imports, from the folder in which the script is run."""
        module, colon, _ = self.name.partition(":")
        modules: list[str] = sorted({*self.imports, *((module,) if colon else ())})
        if not modules:
            return []
        names = ", ".join(modules)
        path = [f'sys.path.insert(0, "")  # run this in the folder of {names}, or change it']
        return ["import sys", "", *path, *(f"import {each}" for each in modules)]

    def expression(self) -> str:
        """Write what ``torch.compile`` takes as its backend."""
        module, colon, attribute = self.name.partition(":")
        return f"{module}.{attribute}" if colon else repr(self.name)


_FIRST = '"""A frame that fails with the backend'


def is_script(path: Path) -> bool:
    """Whether a file is a script written by `script_of`."""
    try:
        with path.open("rb") as file:
            return file.read(len(_FIRST)) == _FIRST.encode()
    except OSError:
        return False


class _Script:
    """A script in which Dynamo traces the frame again."""

    def __init__(
        self,
        desc: CaptureDesc,
        failure: Failure,
        backend: BackendCode,
        inputs: InputCode,
        trust: bool,
    ) -> None:
        self._desc = desc
        self._failure = failure
        self._backend = backend
        self._inputs = inputs
        self._imports = {"torch": "import torch"}
        """Lines by the name that they import."""
        self._config, not_set = settings_to_set(desc.surroundings, trust=trust)
        for name in _OF_TRACING:
            self._config.get(_DYNAMO, {}).pop(name, None)
        self._given, not_passed = options_to_pass(
            desc, recorded_name(desc, backend.name), trust=trust
        )
        self._not_set = (*not_set, *not_passed)
        self._binders = _binders(desc)
        self._symbols = ScriptSymbols(desc)
        self._lone = any(e.sym is not None and self._binder_of(e) is None for e in desc.inputs)
        # A symbol that is not a size of a tensor is an int of the program: make all ints dynamic.

    def text(self, stubs: Sequence[str] = ()) -> str:
        """Write the script; ``stubs`` are lines that define operators."""
        capture = Capture(self._desc)
        with capture.fake_world():
            self._instance = capture.instantiate()
            self._world = ScriptWorld(self._desc, self._instance)
            lines = [*self._frame(), *self._main()]
        imports = sorted({*self._imports.values()})
        math = ["import math"] if any("math." in line for line in lines) else []
        failure = "\n".join(self._failure.lines).replace("\\", "\\\\").replace('"""', "'''")
        head = [
            f"{_FIRST} {self._backend.name!r}.\n",
            f'{failure}\n\nRecorded with torch {self._desc.torch_version}.\n"""',
            "\n".join(["", *imports, *(f"import {m}" for m in self._config), *math]),
        ]
        parts = [*head, *self._backend.lines(), *self._world.lines(), *stubs, "", *lines]
        return "\n".join(parts) + "\n"

    def _frame(self) -> Iterator[str]:
        """Write the graph, the inputs, and the program around them."""
        gm = self._instance.gm
        self._bind_sizes(gm)
        yield ""
        yield from self._module("Frame", gm)
        yield from self._inputs.lines(
            lambda entry: self._binder_of(entry) is not None,
            lambda entry: _marks(entry, self._lone, self._symbols),
            self._world.input,
        )
        names = ", ".join(e.name for e in self._desc.inputs if self._binder_of(e) is None)
        yield from ("", "", f"def program({names}):")
        yield from (f"    {line}" for line in self._guards())
        yield from (f"    return frame({names})", "", "")

    # --- the graph ---

    def _bind_sizes(self, gm: torch.fx.GraphModule) -> None:
        """Write lines that read sizes from the tensors, as the program did."""
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
        return None if entry.sym is None else self._binders.get(entry.sym.expr)

    def _module(self, cls: str, gm: torch.fx.GraphModule) -> Iterator[str]:
        """Write a class whose ``forward`` is a graph, after the classes of the graph's bodies."""
        members: list[str] = []
        for name in read_attributes(gm):
            value = attribute_of(gm, name)
            flat = name.replace(".", "_")
            if isinstance(value, torch.fx.GraphModule):
                body = f"{cls}_{flat}"
                yield from self._module(body, value)
                members.append(f"self.{flat} = {body}()")
            elif isinstance(value, torch.Tensor):
                members.append(member(flat, value, "self"))
            else:
                members.append(f"self.{flat} = {value!r}")
        for fx_node in gm.graph.nodes:
            if fx_node.op in ("get_attr", "call_module"):
                fx_node.target = str(fx_node.target).replace(".", "_")
        _assign_data_again(gm.graph)
        code = gm.graph.python_code("self")
        for name, value in code.globals.items():
            if re.search(rf"\b{re.escape(name)}\b", code.src):  # FX lists some that are unused
                self._imports[name] = _import_of(name, value)
        yield f"class {cls}(torch.nn.Module):"
        if members:
            yield from ("    def __init__(self):", "        super().__init__()")
            yield from (f"        {line}" for line in members)
            yield ""
        lines = [self._world.code(line) for line in code.src.strip("\n").splitlines()]
        yield from (f"    {_RELEASES.sub('', line)}".rstrip() for line in lines if line.strip())
        yield from ("", "")

    # --- the program ---

    def _main(self) -> Iterator[str]:
        """Write the modes, the compilation, and the call of the compiled code."""
        yield from self._settings()
        yield from self._compile()
        if self._inputs.others:
            yield "compiled(*inputs())  # compile at these sizes; it fails at others"
        call = self._inputs.call
        if self._is_compared:
            yield "found, expected = [], []"
            yield from (line.replace("inputs()", call) for line in _COMPARED)
        else:
            yield f"compiled(*{call})"

    @property
    def _is_compared(self) -> bool:
        """Whether the frame fails when it runs or in the comparison, not in the compilation."""
        return self._failure.kind == "wrong" or self._failure.stage in ("forward", "backward")

    def _keywords(self) -> str:
        """Write the recorded ``mode`` and ``options`` as further arguments of a call."""
        values = ValueCode()
        return "".join(f", {k}={values.of(v, {}, k)}" for k, v in self._given.items())

    def _settings(self) -> Iterator[str]:
        """Write the settings of the compiler and the global state of torch that are not the default."""
        values = ValueCode()
        for module, changes in self._config.items():
            for name, value in changes.items():
                yield f"{module}.{name} = {values.of(value, {}, name)}"
        yield from (f"# not set: {escape(clip(each.text, 400))}" for each in self._not_set)
        modes = self._desc.modes
        warn = ", warn_only=True" if modes.deterministic_warn_only else ""
        dtype, precision = modes.default_dtype, modes.float32_matmul_precision
        lines = {
            "torch.set_grad_enabled(False)": not modes.grad_enabled,
            "torch.inference_mode().__enter__()": modes.inference_mode,
            f"torch.use_deterministic_algorithms(True{warn})": modes.deterministic,
            f"torch.set_default_dtype(torch.{dtype})": dtype != "float32",
            f"torch.set_float32_matmul_precision({precision!r})": precision != "highest",
        }
        yield from (line for line, is_needed in lines.items() if is_needed)
        for cast in modes.autocast:
            yield f"torch.set_autocast_dtype({cast.device_type!r}, torch.{cast.dtype})"
            yield f"torch.set_autocast_enabled({cast.device_type!r}, {cast.enabled})"
        if not modes.autocast_cache_enabled:
            yield "torch.set_autocast_cache_enabled(False)"

    def _compile(self) -> Iterator[str]:
        """Write the lines that make ``compiled`` and, for a comparison, ``eager``."""
        yield "frame = Frame()"
        env = self._desc.shape_env
        needed = {
            "capture_scalar_outputs": env is not None and env.settings.allow_scalar_outputs,
            "capture_dynamic_output_shape_ops": env is not None
            and env.settings.allow_dynamic_output_shape_ops,
        }
        for name, is_needed in needed.items():
            if is_needed and name not in self._config.get(_DYNAMO, {}):
                yield f"{_DYNAMO}.{name} = True"
        dynamic = ", dynamic=True" if self._lone else ""
        made = f"backend={self._backend.expression()}{self._keywords()}{dynamic}"
        yield f"compiled = torch.compile(program, {made})"
        if self._is_compared:
            yield "eager = frame"

    def _guards(self) -> Iterator[str]:
        """Write the frame's guards as conditions of the program."""
        bound = {
            self._symbols.text(expr): f"{tensor}.{method}({dim})"
            for expr, (tensor, method, dim) in self._binders.items()
        }
        used: set[str] = set()
        conditions: list[str] = []
        for guard in self._desc.guards:
            text = self._symbols.text(guard.expr)
            names = _names_in(text)
            if names is None or not names <= bound.keys():
                conditions.append(f"# guard: {text}")
                continue
            used |= names
            conditions += [f"if not ({text}):", "    raise AssertionError"]
        yield from (f"{name} = {bound[name]}" for name in sorted(used))
        yield from conditions


class _Direct(_Script):
    """A script that calls the backend itself."""

    def _frame(self) -> Iterator[str]:
        made = DirectScript(self._desc, self._inputs, self._instance.gm)
        self._imports |= dict(zip(made.imports, made.imports, strict=True))
        yield from (*made.lines(), "", "")

    def _compile(self) -> Iterator[str]:
        yield f"compiled = compiled_by({self._backend.expression()}{self._keywords()})"
        if self._is_compared:
            yield "eager = frame(fake_inputs())"


_COMPARED = """\
for function, results in ((compiled, found), (eager, expected)):
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
    else:
        assert one == other, f"{one}, not {other}"
""".splitlines()


# --- parts ----------------------------------------------------------------------------------------


def _binders(desc: CaptureDesc) -> dict[ExprDesc, tuple[str, str, int]]:
    """Map each symbol to where it is read: a tensor, ``size`` or ``stride``, and a dim."""
    found: dict[ExprDesc, tuple[str, str, int]] = {}
    for method in ("size", "stride"):
        for entry in desc.inputs:
            for dim, n in enumerate(getattr(entry.tensor, method, ())):
                if isinstance(n, SymDesc) and len(n.expr.nodes) == 1:
                    found.setdefault(n.expr, (entry.name, method, dim))
    return found


def _assign(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Assign ``x.data = y``, which Dynamo records as two nodes that it cannot trace again."""
    x.data = y
    return x


_assign.__module__ = "data"  # FX names it data__assign in the script


def _assign_data_again(graph: torch.fx.Graph) -> None:
    """Replace ``set_`` and the node that lowers the version counter by the statement ``x.data = y``."""
    for fx_node in graph.find_nodes(op="call_function", target=decode_function(_LOWER_VERSION)):
        replaced: Any = fx_node.args[0]
        if replaced.target is not torch.Tensor.set_:
            continue
        with graph.inserting_before(replaced):
            made = graph.call_function(_assign, replaced.args)
        graph.erase_node(fx_node)
        replaced.replace_all_uses_with(made)
        graph.erase_node(replaced)


def _marks(entry: InputDesc, static_too: bool, symbols: ScriptSymbols) -> Iterator[str]:
    tensor = entry.tensor
    if tensor is None:
        return
    for dim, n in enumerate(tensor.size):
        if isinstance(n, SymDesc):
            text = expr_text(n.expr)
            mark = "decorators.mark_unbacked" if text.startswith("u") else "mark_dynamic"
            yield f"torch._dynamo.{mark}({entry.name}, {dim})  # {symbols.text(n.expr)}"
        elif static_too:
            yield f"torch._dynamo.mark_static({entry.name}, {dim})"


def _names_in(text: str) -> set[str] | None:
    """The names in a condition; ``None`` if it is not valid Python."""
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
    if value is _assign:
        return f"def {name}(x, y):\n    x.data = y\n    return x\n"
    module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not module or not qualname.isidentifier():
        raise UnsupportedValueError(
            "the graph uses what a script cannot import", found=name, fix="Use the capture"
        )
    return f"from {module} import {qualname} as {name}"


# --- check ------------------------------------------------------------------------------


def check_script(path: Path, failure: Failure, *, timeout: float, imports: bool = False) -> Outcome:
    """Run a script in a fresh interpreter, and check that it fails in the same way.

    It runs in an empty folder; one that ``imports`` modules runs in the current one. ``timeout`` is
    in seconds, without the time to import torch.
    """
    timeout += START
    environment = {k: v for k, v in without_recording().items() if k != "PYTHONSAFEPATH"}
    environment["PYTHONPATH"] = os.pathsep.join(import_path())
    command = [sys.executable, "-X", "faulthandler", str(path.absolute())]
    with tempfile.TemporaryDirectory(prefix="torch-fakeify-") as empty, \
            tempfile.TemporaryFile() as output:  # fmt: skip
        ending, status = run_limited(
            lambda: subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
                cwd=Path.cwd() if imports else empty,
                env=environment,
                start_new_session=True,
            ),
            timeout=timeout,
        )
        output.seek(0)
        stderr = output.read().decode(errors="replace")
    if ending != "ended":
        fails = True if failure.kind == "hangs" else None
        return Outcome(fails, f"it runs for more than {timeout:g} s")
    if _matches_failure(status, stderr, failure):
        return Outcome(True, "fails in the same way")
    last = (stderr.strip().splitlines() or ["nothing"])[-1]
    return Outcome(False, "it succeeds" if status == 0 else f"it ends with: {last}")


def _matches_failure(status: int, stderr: str, failure: Failure) -> bool:
    match failure.kind:
        case "raises":
            output = [masked_line(line) for line in stderr.splitlines()]
            name = failure.type.rpartition(".")[2]
            expected = normalized_message(f"{name}: {failure.message}")[:1]
            return status != 0 and all(any(t in line for line in output) for t in expected)
        case "wrong":
            return status != 0 and "AssertionError" in stderr
        case "crashes":
            return Ended("crashes", status).how == failure.type
        case _:
            return False


class CheckedScript(NamedTuple):
    """A script that was written and run."""

    path: Path | None
    """``None`` if the frame cannot be written as a script."""
    outcome: Outcome | None
    """Whether it fails as the frame does; ``None`` if there is no script."""
    state: str
    """The same in words, or why there is no script."""


def write_and_check(
    path: Path,
    text: str,
    failure: Failure,
    *,
    timeout: float,
    imports: bool,
    fails: str = "fails in the same way",
) -> CheckedScript:
    """Write a script and check it with `check_script`; ``fails`` is the state of one that fails."""
    write_atomic(path, text.encode())
    outcome = check_script(path, failure, timeout=timeout, imports=imports)
    return CheckedScript(path, outcome, fails if outcome.fails else outcome.text)


def write_checked_script(
    path: Path,
    desc: CaptureDesc,
    failure: Failure,
    backend: BackendCode,
    *,
    timeout: float,
    stubs: bool = False,
    **options: Any,
) -> CheckedScript:
    """Write a script that Dynamo traces; if it does not fail like the frame, one that calls the backend itself.

    Dynamo cannot trace to a graph of AOTAutograd. The names in it are made of those of the program; where
    only torch's own names fail like the frame, it has these. ``timeout`` are the seconds to compile and
    run the frame once. With ``stubs`` the script defines stubs of the operators that this process lacks.
    """
    found = CheckedScript(None, None, "")
    ways = ((False, False), (True, False), (True, True))
    for direct, torch_names in ways if desc.aot is None else ways[1:]:
        try:
            with Capture(desc).operator_stubs() as missing:
                defined = missing if stubs else ()
                text = script_of(
                    desc, failure, backend, direct=direct, torch_names=torch_names, stubs=defined,
                    **options,
                )  # fmt: skip
        except FakeifyError as error:
            return found if found.path is not None else CheckedScript(None, None, f"none: {error}")
        imports = bool(backend.lines())
        found = write_and_check(path, text, failure, timeout=timeout, imports=imports)
        if found.outcome is not None and found.outcome.fails:
            break
    return found
