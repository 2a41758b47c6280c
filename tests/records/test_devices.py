"""Frames recorded on accelerators, moved to the CPU of a machine that has none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torch_fakeify as tfk
from torch_fakeify.records.devices import DeviceMap
from torch_fakeify.records.frame import AutocastDesc

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    # Torch warns about a CUDA autocast region where there is no CUDA.
    pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda':UserWarning"),
    pytest.mark.filterwarnings("ignore:CUDA is not available:UserWarning"),
]


def fake(*size: int, device: str = "cuda:0") -> torch.Tensor:
    """Return a fake tensor on a device that this machine lacks."""
    with FakeTensorMode(shape_env=ShapeEnv()):
        return torch.empty(*size, device=device)


def hand_made(build: Any, device: str = "cuda:0") -> tfk.Capture:
    """Return a capture of a graph of one input, as Dynamo makes it on a machine with the device."""
    graph = torch.fx.Graph()
    graph.output((build(graph, graph.placeholder("x")),))
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    return tfk.capture(gm, [fake(4, 4, device=device)])


def call(graph: torch.fx.Graph, function: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
    """Call a function, or a method if it is a name."""
    if isinstance(function, str):
        return graph.call_method(function, args, kwargs)
    return graph.call_function(function, args, kwargs)


def autocast(dtype: torch.dtype) -> Any:
    """Return a matrix product in a CUDA autocast region."""

    def build(g: torch.fx.Graph, x: torch.fx.Node) -> Any:
        mode = call(g, torch.amp.autocast_mode._enter_autocast, "cuda", dtype, True, None)
        y = call(g, torch.mm, x, x)
        call(g, torch.amp.autocast_mode._exit_autocast, mode)
        return y

    return build


def after(function: Any, *args: Any) -> Any:
    """Make a call whose result is not used, and another call after it."""

    def build(g: torch.fx.Graph, x: torch.fx.Node) -> Any:
        call(g, function, *args)
        return call(g, torch.add, x, 1)

    return build


def plus(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Add to the input what a factory makes."""
    return lambda g, x: call(g, torch.add, x, call(g, function, *args, **kwargs))


CALLS: dict[str, tuple[Any, Callable[[torch.Tensor], torch.Tensor]]] = {
    "cuda": (lambda g, x: call(g, "cuda", x), lambda x: x),
    "cuda of an index": (lambda g, x: call(g, "cuda", x, 0), lambda x: x),
    "cuda that does not block": (lambda g, x: call(g, "cuda", x, None, True), lambda x: x),
    "to a name": (lambda g, x: call(g, "to", x, "cuda"), lambda x: x),
    "to an index": (lambda g, x: call(g, "to", x, 0), lambda x: x),
    "to a dtype and a device": (
        lambda g, x: call(g, "to", x, dtype=torch.float64, device=torch.device("cuda")),
        lambda x: x.double(),
    ),
    "cpu": (lambda g, x: call(g, "cpu", x), lambda x: x),
    "type by name": (
        lambda g, x: call(g, "type", x, "torch.cuda.DoubleTensor"),
        torch.Tensor.double,
    ),
    "factory, device": (plus(torch.ones, 4, 4, device=torch.device("cuda", 0)), lambda x: x + 1),
    "factory, name": (plus(torch.ones, 4, 4, device="cuda"), lambda x: x + 1),
    "factory, index": (plus(torch.arange, 4, device=0), lambda x: x + torch.arange(4)),
    "factory method, index": (
        lambda g, x: call(g, "new_ones", x, (4, 4), device=0),
        torch.ones_like,
    ),
    "autocast": (autocast(torch.bfloat16), lambda x: x.bfloat16() @ x.bfloat16()),
    "autocast to half": (autocast(torch.float16), lambda x: x.half() @ x.half()),
    "synchronize": (after(torch.cuda.synchronize), lambda x: x + 1),
    "current device": (after(torch.cuda.current_device), lambda x: x + 1),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", CALLS)
def test_every_name_of_a_device_moves_to_the_cpu(kind: str, backend: str) -> None:
    """Every name of CUDA in a graph gives the same results on a machine without CUDA."""
    torch._dynamo.reset()
    build, expected = CALLS[kind]
    capture = hand_made(build)
    inputs = capture.materialize(device="cpu")
    (out,) = capture.compile(backend, device="cpu")(*inputs)
    torch.testing.assert_close(out, expected(*inputs))


def test_devices_that_only_the_graph_names_move_too() -> None:
    """One target is used for every accelerator of the frame, also for one without inputs."""
    x = fake(4, device="cuda:1")
    with x.fake_mode:
        gm = make_fx(lambda x: (x.to("cuda:0") + torch.arange(4, device="cuda:0")).cpu())(x)
    capture = tfk.capture(gm, [x])
    inputs = capture.materialize(device="cpu")
    out = capture.compile("eager", device="cpu")(*inputs)
    assert torch.equal(out, inputs[0] + torch.arange(4))


def test_only_the_cuda_part_of_a_cpu_graph_moves() -> None:
    """CPU inputs stay on the CPU when the graph names an accelerator."""
    x = fake(4, device="cpu")
    with x.fake_mode:
        gm = make_fx(lambda x: x.to("cuda:0") + 1)(x)
    instance = tfk.capture(gm, [x]).instantiate("xpu:1")
    assert instance.inputs[0].device == torch.device("cpu")
    (copy,) = instance.gm.graph.find_nodes(
        op="call_function", target=torch.ops.aten._to_copy.default
    )
    assert copy.kwargs["device"] == torch.device("xpu:1")
    assert copy.meta["val"].device == torch.device("xpu:1")


def test_a_mapping_moves_only_what_it_names() -> None:
    """Other devices stay, and a device without an index follows the first of its type."""
    x = fake(4, device="cuda:1")
    with x.fake_mode:
        gm = make_fx(lambda x: x.to("cuda:0") + 1)(x)
    instance = tfk.capture(gm, [x]).instantiate({"cuda:1": "xpu:3"})
    assert instance.inputs[0].device == torch.device("xpu:3")
    (copy,) = instance.gm.graph.find_nodes(
        op="call_function", target=torch.ops.aten._to_copy.default
    )
    assert copy.kwargs["device"] == torch.device("cuda:0")
    retarget = DeviceMap({"cuda:1": "xpu:3"})
    assert [retarget.device(d) for d in ("cuda", "cuda:0", "cpu")] == ["xpu:3", "cuda:0", "cpu"]


def test_a_cpu_frame_moves_to_an_accelerator() -> None:
    """If no accelerator was recorded, the tensors of the CPU are moved."""
    capture = tfk.capture(torch.fx.symbolic_trace(lambda x: x + 1), [torch.randn(3)])
    assert capture.instantiate("cuda:1").inputs[0].device == torch.device("cuda:1")
    assert capture.instantiate("cpu").inputs[0].device == torch.device("cpu")


def test_bases_and_gradients_move_with_their_tensors() -> None:
    """A view of an input stays a view of it, and a parameter has its gradient on its device."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        w = torch.nn.Parameter(torch.empty(4, 4, device="cuda:0"))
        w.grad = torch.empty(4, 4, device="cuda:0")
        base = torch.empty(8, 8, device="cuda:0")
    gm = torch.fx.symbolic_trace(lambda w, v, b: w.sum() + v + b)
    moved, view, other = tfk.capture(gm, [w, base.narrow(0, 1, 4), base]).instantiate("cpu").inputs
    assert moved.grad.device == torch.device("cpu")
    assert view._base is other
    assert other.device == torch.device("cpu")


def test_a_shared_record_moves_once() -> None:
    """A record that two tensors share is one record after the move."""
    record = tfk.describe_tensor(torch.zeros(3))
    retarget = DeviceMap({"cpu": "cuda:0"})
    assert retarget.tensor(record) is retarget.tensor(record)
    assert retarget.tensor(record).device == "cuda:0"
    assert DeviceMap({}).tensor(record) is record


def test_a_call_without_a_counterpart_is_refused() -> None:
    """The error contains the function and the new type of device."""
    capture = hand_made(after(torch.cuda._exchange_device, 1))
    with pytest.raises(tfk.ConvertError) as info:
        capture.instantiate("cpu")
    assert str(info.value) == (
        "$.nodes[1]: torch.cuda._exchange_device has no counterpart for 'cpu'. "
        "Instantiate the frame on the recorded devices"
    )


def test_autocast_around_the_frame_moves_with_its_device() -> None:
    """A frame compiled under CUDA autocast is compiled under that of the CPU if it moves there."""
    capture = hand_made(lambda g, x: call(g, torch.mm, x, x))
    cuda = AutocastDesc(device_type="cuda", enabled=True, dtype="bfloat16")
    modes = msgspec.structs.replace(capture.desc.modes, autocast=(cuda,))
    capture = tfk.Capture(msgspec.structs.replace(capture.desc, modes=modes))
    with capture.instantiate("cpu").active():
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    with capture.instantiate().active():
        assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cuda")
