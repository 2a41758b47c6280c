"""``x.data = y`` in a compiled function: the function that Dynamo defines for it has a record.

Dynamo makes it anew inside one of its methods each time; it is known by its code, and made of that
when a graph is read. What has no record is refused with the user's line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from processes import fresh

import torch_fakeify as tfk
from torch_fakeify import cli
from torch_fakeify.encoding import names
from torch_fakeify.errors import UnknownNameError
from torch_fakeify.records.tensor import FunctionValue
from torch_fakeify.tools.minify.failures import Failure
from torch_fakeify.tools.minify.repro_script import BackendCode, script_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "warm_workers")

NAME = "torch._dynamo.variables.builtin._lower_version_count_by_1"


class Weight(torch.nn.Module):
    """A module that assigns to its parameter's data."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> Any:
        """Assign, and use the assigned parameter."""
        self.w.data = self.w.data * 2 + x.sum()
        return self.w * x


def assigned(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Assign data of another size."""
    z = x.sin()
    x.data = y
    return z, x * 2


def without_gradients(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Assign inside of ``no_grad``."""
    with torch.no_grad():
        x.data = y
    return x * y


def assigned_again(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Assign twice, at last the data of a view."""
    x.data = y + 1
    x.data = y[:2]
    return x * y.sum()


def ones(n: int = 4, *, grad: bool = False) -> torch.Tensor:
    """Return numbers from one."""
    return (torch.arange(float(n)) + 1).requires_grad_(grad)


PROGRAMS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "assigned": lambda: (assigned, ones(), ones()),
    "another_size": lambda: (assigned, ones(3), ones()),
    "assigned_again": lambda: (assigned_again, ones(), ones()),
    "without_gradients": lambda: (without_gradients, ones(), ones(grad=True)),
    "parameter": lambda: (Weight(), ones(3, grad=True)),
}


def results(name: str, backend: Any, *, dynamic: bool) -> list[Any]:
    """Return outputs, gradients, and the arguments afterwards with their versions."""
    torch._dynamo.reset()
    fn, *args = PROGRAMS[name]()
    leaves = [*args, *(fn.parameters() if isinstance(fn, torch.nn.Module) else ())]
    out = torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    outputs = [out] if isinstance(out, torch.Tensor) else list(out)
    if any(t.requires_grad for t in outputs):
        sum(t.sum() for t in outputs if t.requires_grad).backward()  # type: ignore[union-attr]
    grads = [t.grad.tolist() for t in leaves if t.grad is not None]
    return [[t.tolist() for t in (*outputs, *leaves)], grads, [t._version for t in leaves]]


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_assigned_data_is_recorded(name: str, dynamic: bool, tmp_path: Path) -> None:
    """Results, gradients and versions equal those of the backend alone, also through a handoff."""
    direct = results(name, "aot_eager", dynamic=dynamic)
    recorder = tfk.record(tmp_path, "aot_eager")
    assert results(name, recorder, dynamic=dynamic) == direct
    assert results(name, tfk.handoff(tfk.record(tmp_path, "aot_eager")), dynamic=dynamic) == direct


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_capture_of_assigned_data_computes_what_the_frame_does(name: str, tmp_path: Path) -> None:
    """Loaded, rebuilt, retraced, compiled and run, it is captured again with one fingerprint."""
    recorder = tfk.record(tmp_path, "eager")
    results(name, recorder, dynamic=True)
    capture = tfk.Capture.load(recorder.paths[0])
    targets = [n.target for n in capture.desc.graph.nodes if isinstance(n.target, FunctionValue)]
    assert NAME in [target.name for target in targets]
    instance = capture.instantiate()
    with instance.active():
        assert tfk.capture(instance.gm, instance.inputs).fingerprint() == capture.fingerprint()
    if name != "another_size":  # there the graph's input has its new size
        tfk.retrace(instance.gm, capture.instantiate(fresh=True).inputs)
    runs = []
    for backend in ("eager", "aot_eager"):
        inputs = capture.materialize()
        outputs = capture.compile(backend)(*inputs)
        values = [t for t in (*outputs, *inputs) if isinstance(t, torch.Tensor)]
        runs.append([t.tolist() for t in values])
    assert runs[0] == runs[1]


@pytest.mark.sweep
def test_tools_support_assigned_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`show` has the name, `replay` compiles the frame, and a minified script has the statement."""
    recorder = tfk.record(tmp_path, "eager")
    results("assigned", recorder, dynamic=True)
    path = str(recorder.paths[0])
    assert cli.main(["show", "--code", path]) == 0
    assert "_lower_version_count_by_1" in capsys.readouterr().out
    assert cli.main(["replay", path, "--backend", "aot_eager"]) == 0

    failure = Failure(kind="raises", stage="compile", type="RuntimeError", message="no")
    text = script_of(tfk.Capture.load(path).desc, failure, BackendCode("aot_eager"))
    assert "x.data = y" in text
    assert "fakeify" not in text
    script = tmp_path / "script.py"
    script.write_text(text)
    fresh(script, cwd=tmp_path)


def test_dynamos_nested_function_is_recognized_by_its_code() -> None:
    """Decoding makes one function of Dynamo's own code; a user may choose the name for another."""
    value = FunctionValue(kind="function", name=NAME)
    fn = names.decode_function(value)
    assert names.decode_function(value) is fn
    assert names.encode_function(fn) == value
    x = ones()
    x.add_(1)
    assert fn(x) is x
    assert x._version == 0

    def _lower_version_count_by_1(x: torch.Tensor) -> torch.Tensor:
        return x

    with pytest.raises(tfk.errors.UnsupportedValueError):
        names.encode_function(_lower_version_count_by_1)


@pytest.mark.parametrize("name", ["SetAttrBuiltinVariable", "_call_setattr", "unimplemented"])
def test_other_names_of_that_module_are_refused(name: str) -> None:
    """A file can reach only the one function in the list."""
    module = NAME.rpartition(".")[0]
    with pytest.raises(UnknownNameError):
        names.decode_function(FunctionValue(kind="function", name=f"{module}.{name}"))


@torch._dynamo.allow_in_graph
def opaque(x: torch.Tensor) -> torch.Tensor:
    """A function that Dynamo does not trace into."""
    return x * 3


class Opaque(torch.autograd.Function):
    """A function with a backward that Dynamo does not trace into."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Multiply by three."""
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Multiply the gradient by three."""
        return grad * 3


torch._dynamo.allow_in_graph(Opaque)


@pytest.mark.parametrize(
    ("fn", "message", "fix"),
    [
        (lambda x: opaque(x) + 1, "opaque", "register it as an operator"),
        (
            lambda x: Opaque.apply(x) + 1,
            "test_assigned_data.Opaque",
            "out of the compiled function",
        ),
    ],
)
def test_what_cannot_be_recorded_is_refused_with_the_users_line(
    fn: Any, message: str, fix: str, tmp_path: Path
) -> None:
    """The error contains the user's line, what it calls, and what to do."""
    with pytest.raises(Exception, match="cannot be recorded") as caught:
        torch.compile(fn, backend=tfk.record(tmp_path), fullgraph=True)(ones(grad=True))
    text = str(caught.value)
    assert "test_assigned_data.py:" in text
    assert message in text
    assert fix in text


def test_a_buffer_that_is_made_in_the_graph_is_recorded(tmp_path: Path) -> None:
    """Dynamo calls the class of the buffer in the graph."""
    recorder = tfk.record(tmp_path, "aot_eager")
    fn = torch.compile(lambda x: torch.nn.Buffer(x * 2) * x, backend=recorder, fullgraph=True)
    assert fn(ones()).tolist() == (ones() * ones() * 2).tolist()
    capture = tfk.Capture.load(recorder.paths[0])
    capture.compile("aot_eager")(*capture.materialize())
