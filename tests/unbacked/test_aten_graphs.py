"""Captures outside Dynamo: graphs of ``make_fx`` and AOTAutograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def through_a_file(capture: tfk.Capture, directory: Path) -> tfk.Capture:
    """Return an instance of the loaded capture, after a check that it equals the saved one."""
    capture.save(directory / "c.fkf")
    loaded = tfk.Capture.load(directory / "c.fkf")
    assert loaded.desc == capture.desc
    instance = loaded.instantiate()
    with instance.active():
        again = tfk.capture(instance.gm, instance.inputs, constants="small")
    assert again.fingerprint() == capture.fingerprint()
    return loaded


def _f(x: torch.Tensor, y: torch.Tensor) -> Any:
    y = y.clone()
    y[0] = 1
    return (x @ y).relu().sum(0) * x.shape[0] + torch.arange(3), x.t()


def _nonzero(x: torch.Tensor, y: torch.Tensor) -> Any:
    return x.nonzero() * 2, y[y[0] > 0]


@pytest.mark.parametrize(
    ("function", "tracing_mode"),
    [(_f, "real"), (_f, "fake"), (_f, "symbolic"), (_nonzero, "symbolic")],
)
def test_make_fx_graphs_compile_from_their_captures(
    function: Any, tracing_mode: str, tmp_path: Path
) -> None:
    """For real, fake and symbolic tracing, and sizes from data, it computes the function's result."""
    x, y = torch.randn(4, 6), torch.randn(6, 6 if function is _nonzero else 3)
    gm = make_fx(function, tracing_mode=tracing_mode)(x, y)
    fakes = [fx_node.meta["val"] for fx_node in gm.graph.find_nodes(op="placeholder")]
    inputs = [x, y] if tracing_mode == "real" else fakes
    capture = through_a_file(tfk.capture(gm, inputs, constants="small"), tmp_path)
    for backend in ("eager", "aot_eager"):
        made = capture.materialize()
        for ours, theirs in zip(capture.compile(backend)(*made), function(*made), strict=True):
            torch.testing.assert_close(ours, theirs)


def aot_graphs(model: nn.Module, x: torch.Tensor, *, dynamic: bool) -> list[Any]:
    """Return captures of forward and backward of one training step, with inputs and results."""
    rows: list[Any] = []

    def compiler(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        capture = tfk.capture(gm, inputs, constants="small")

        def run(args: list[Any]) -> Any:
            real = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
            torch.manual_seed(0)
            results = gm.forward(*args)
            args.clear()
            rows.append((capture, real, results))
            return results

        run._boxed_call = True  # pyright: ignore
        return run

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    torch.compile(model, backend=backend, dynamic=dynamic)(x).sum().backward()
    return rows


@pytest.mark.parametrize("dynamic", [True, False])
def test_forward_and_backward_graphs_of_aotautograd_round_trip(
    dynamic: bool, tmp_path: Path
) -> None:
    """From their captures both graphs compute what they computed in the training step."""
    model = nn.Sequential(
        nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.GELU(), nn.Dropout(0.3), nn.Flatten()
    )
    rows = aot_graphs(model, torch.randn(5, 3, 8), dynamic=dynamic)
    assert len(rows) == 2
    for capture, inputs, expected in rows:
        loaded = through_a_file(capture, tmp_path)
        torch.manual_seed(0)
        results = loaded.compile("eager")(*inputs)
        for ours, theirs in zip(results, expected, strict=True):
            if isinstance(theirs, torch.Tensor):
                torch.testing.assert_close(ours, theirs)
            else:
                assert ours == theirs


def test_constants_that_share_a_storage_have_no_data() -> None:
    """Two constants that are views of one tensor are recorded without data and still compile."""
    whole = torch.zeros(2, 2)
    part, alone = whole[0], torch.ones(2)
    x = torch.zeros(2)
    gm = make_fx(lambda x: (x + whole + part + alone,))(x)
    capture = tfk.capture(gm, [x], constants="small")
    assert capture.desc.graph.without_data == ("_tensor_constant0", "_tensor_constant1")
    with pytest.raises(tfk.CaptureError, match="found _tensor_constant0, _tensor_constant1"):
        capture.compile("aot_eager")(x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_tensors_without_a_record_are_refused() -> None:
    """A tensor without a record is refused, and the error contains the tensor and the field."""
    x = torch.nested.nested_tensor([torch.ones(2, 3)])
    with pytest.raises(tfk.UnsupportedTensorError) as info:
        tfk.capture(torch.fx.symbolic_trace(lambda x: x * 2), [x])
    message = str(info.value)
    assert message.startswith("tensor 0")
    assert "`layout` cannot be recorded; expected " in message


def test_record_reports_what_cannot_be_recorded(tmp_path: Path) -> None:
    """On request the program ends with an error that names input and field; no file is left."""
    x = Opaque(torch.randn(3))
    recorder = tfk.record(tmp_path, on_error="raise")
    compiled = torch.compile(lambda x: x * 2, backend=recorder)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as info:
        compiled(x)
    error = info.value.inner_exception
    assert isinstance(error, tfk.UnsupportedTensorError)
    assert str(error) == (
        "L['x'] of size (3,).context: the context of test_aten_graphs.Opaque cannot be encoded: a "
        "value has no record; expected a constant; found an object of builtins.object. Call "
        "torch_fakeify.register_subclass(Opaque, encode_ctx=..., decode_ctx=...) with functions "
        "from the context to plain data and back."
    )
    assert not list(tmp_path.iterdir())


class Opaque(torch.Tensor):
    """A wrapper subclass whose context is any object."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        """Make a tensor without memory of its own."""
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["inner"], object()

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], context: Any, size: Any, stride: Any) -> Any:
        return Opaque(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [a.inner if isinstance(a, Opaque) else a for a in args]
        return Opaque(func(*args, **(kwargs or {})))
