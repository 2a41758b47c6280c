"""The value of a placeholder in a captured frame is the frame's input, unless tracing has changed it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from quiet import quiet
from tensor_facts import facts
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torch_fakeify as tfk
from torch_fakeify.records.tensor import TensorValue

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def captured(
    f: Callable[..., Any],
    *args: Any,
    dynamic: bool | None = False,
    change: Callable[[torch.Tensor], Any] | None = None,
) -> tfk.Capture:
    """The one frame that Dynamo gives to a backend; ``change`` is done to the value of its input."""
    found: list[tfk.Capture] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        if change is not None:
            (fx_node,) = gm.graph.find_nodes(op="placeholder")
            fake = fx_node.meta["example_value"]
            with fake.fake_mode:
                change(fake)
        found.append(tfk.capture(gm, inputs))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(f, backend=backend, dynamic=dynamic)(*args)
    (capture,) = found
    return capture


def shared(capture: tfk.Capture) -> dict[str, bool]:
    """By the name of each tensor input, whether its placeholder's value has the same record."""
    found: dict[str, bool] = {}
    for fx_node, entry in zip(capture.desc.graph.nodes, capture.desc.inputs, strict=False):
        if entry.tensor is not None:
            value = dict(fx_node.meta)["example_value"]
            assert isinstance(value, TensorValue)
            found[entry.source.name if entry.source else entry.name] = value.tensor is entry.tensor
    return found


def test_inputs_and_parameters_are_the_values_of_their_placeholders(tmp_path: Path) -> None:
    """In the record, in the file, and in what is made of it."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU())
    capture = captured(model, torch.randn(3, 4))
    assert list(shared(capture).values()) == [True] * 3
    assert list(shared(captured(model, torch.randn(3, 4), dynamic=True)).values()) == [
        True,
        True,
        False,
    ]
    capture.save(tmp_path / "frame.fkf")
    instance = tfk.Capture.load(tmp_path / "frame.fkf").instantiate()
    placeholders = instance.gm.graph.find_nodes(op="placeholder")
    for fx_node, value in zip(placeholders, instance.inputs, strict=True):
        if isinstance(value, torch.Tensor):
            assert fx_node.meta["example_value"] is value


def test_views_in_the_graph_are_views_of_the_inputs() -> None:
    """The storage of an input is one storage, whoever has it."""
    instance = captured(lambda x: (x[1:], x.t()), torch.randn(3, 4)).instantiate()
    (x,) = [value for value in instance.inputs if isinstance(value, torch.Tensor)]
    views = [n.meta["example_value"] for n in instance.gm.graph.nodes if n.op.startswith("call_")]
    found = [v for v in views if isinstance(v, torch.Tensor)]
    assert len(found) == 2
    assert all(v._base is x for v in found)
    assert all(v.untyped_storage() is x.untyped_storage() for v in found)


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "resized": lambda x: x.resize_(2, 2),
    "transposed": lambda x: x.t_(),
    "filled": lambda x: x.fill_(1),
    "on another storage": lambda x: x.set_(torch.ones(4, 4)),
    "with other bytes": lambda x: x.untyped_storage().resize_(0),
    "asked for a gradient": lambda x: x.requires_grad_(),
    "with a gradient": lambda x: setattr(x, "grad", torch.ones(4, 4)),
    "of another class": lambda x: setattr(x, "_is_param", True),
    "with other strides": lambda x: setattr(x, "data", torch.ones(4, 4).t()),
    "of another dtype": lambda x: setattr(x, "data", torch.ones(4, 4, dtype=torch.double)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_input_that_tracing_changes_has_a_value_of_its_own(
    change: Callable[[torch.Tensor], Any],
) -> None:
    """The input is as it was when the frame began, the value as tracing left it."""
    capture = captured(lambda x: x + 1, torch.ones(4, 4), change=change)
    assert list(shared(capture).values()) == [False]
    instance = capture.instantiate()
    (x,) = instance.inputs
    assert tuple(x.shape) == (4, 4)
    assert x.stride() == (4, 1)
    assert x.untyped_storage().nbytes() == 64
    assert not x.requires_grad
    (fx_node,) = instance.gm.graph.find_nodes(op="placeholder")
    assert fx_node.meta["example_value"] is not x


def test_an_input_that_tracing_leaves_alone_has_none() -> None:
    """What the changes above are held against."""
    capture = captured(lambda x: x + 1, torch.ones(4, 4), change=lambda x: x.sin())
    assert list(shared(capture).values()) == [True]


def test_views_among_the_inputs_keep_values_of_their_own_on_the_storage_of_the_base() -> None:
    """Aliasing is told alike for inputs and for values."""
    x = torch.randn(6, 4)
    capture = captured(lambda x, y: x.sin() + y.cos().sum(), x, x[2:4])
    assert list(shared(capture).values()) == [True, False]
    (first, second) = capture.desc.inputs
    value = dict(capture.desc.graph.nodes[1].meta)["example_value"]
    assert isinstance(value, TensorValue)
    assert first.tensor is not None
    assert second.tensor is not None
    assert value.tensor.storage is first.tensor.storage is second.tensor.storage
    assert value.tensor.base is first.tensor
    instance = capture.instantiate()
    values = [
        n.meta["example_value"]
        for n in instance.gm.graph.find_nodes(op="placeholder")
        if isinstance(n.meta["example_value"], torch.Tensor)
    ]
    inputs = [value for value in instance.inputs if isinstance(value, torch.Tensor)]
    one, other = (t.untyped_storage() for t in values)
    assert one is other
    assert one is inputs[0].untyped_storage()


@pytest.mark.parametrize("of", ["first", "second"])
def test_inputs_whose_values_have_come_to_share_a_storage_keep_values_of_their_own(of: str) -> None:
    """As ``x.data = y`` leaves them, which counts as no change of ``x``."""
    records: list[tfk.Capture] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        x, y = (n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder"))
        changed, other = (x, y) if of == "first" else (y, x)
        changed.data = other
        assert changed._version == 0
        records.append(tfk.capture(gm, inputs))
        return gm.forward

    torch._dynamo.reset()
    f = torch.compile(lambda x, y: x + y, backend=backend, dynamic=False)
    f(torch.ones(4, 4), torch.ones(4, 4))
    assert list(shared(records[0]).values()) == [False, False]


def test_fakes_that_are_the_inputs_are_recorded_once() -> None:
    """As ``make_fx`` leaves them: one row, which has the policy."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.randn(3, 4))
    gm = make_fx(lambda x: x.sin(), tracing_mode="symbolic")(x)
    (fx_node,) = gm.graph.find_nodes(op="placeholder")
    capture = tfk.capture(gm, [fx_node.meta["val"]])
    value = dict(capture.desc.graph.nodes[0].meta)["val"]
    assert isinstance(value, TensorValue)
    assert value.tensor is capture.desc.inputs[0].tensor


def test_the_fingerprint_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame whose values are tensors of their own is the same frame."""
    model = torch.nn.Linear(4, 5)
    x = torch.randn(3, 4)
    with_inputs = captured(model, x)
    monkeypatch.setattr(tfk.MetaTensorDescriber, "register_inputs", lambda self, inputs: None)
    alone = captured(model, x)
    assert not any(shared(alone).values())
    assert alone.fingerprint() == with_inputs.fingerprint()
    assert with_inputs.instantiate().gm.code == alone.instantiate().gm.code


def test_values_are_what_they_would_be_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that can be asked of the value of a placeholder and of a result, marks aside."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Flatten(0))
    x = torch.randn(3, 4)
    with_inputs = captured(model, x).instantiate()
    monkeypatch.setattr(tfk.MetaTensorDescriber, "register_inputs", lambda self, inputs: None)
    alone = captured(model, x).instantiate()
    for ours, theirs in zip(with_inputs.gm.graph.nodes, alone.gm.graph.nodes, strict=True):
        values = [n.meta.get("example_value") for n in (ours, theirs)]
        if isinstance(values[0], torch.Tensor):
            with quiet():  # of the gradients of results
                one, other = map(facts, values)
            assert one == other
