"""Captures: made inside Dynamo backends and elsewhere, rebuilt in fresh state, compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from captured_frames import only_capture_of
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torch_fakeify as tfk
from torch_fakeify.render.show import loss_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_an_instance_has_a_new_fake_mode_and_a_new_shape_env() -> None:
    """Two instances share nothing: neither the mode, nor the environment, nor the graph."""
    capture = only_capture_of(lambda x: x * 2, torch.randn(4, 5), dynamic=True)
    first, second = capture.instantiate(), capture.instantiate()
    assert first.fake_mode is not second.fake_mode
    assert first.shape_env is not second.shape_env
    assert first.gm is not second.gm
    fakes = [x for x in first.inputs if isinstance(x, FakeTensor)]
    assert fakes
    assert all(f.fake_mode is first.fake_mode for f in fakes)


def test_a_frame_is_recorded_as_before_tracing() -> None:
    """Changes that tracing makes to the metadata of its own fake inputs are not recorded."""
    captures: list[tfk.Capture] = []

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        (fake,) = (n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder"))
        fake.transpose_(0, 1)
        fake.unsqueeze_(0)
        assert tuple(fake.shape) == (1, 4, 3)
        captures.append(tfk.capture(gm, inputs))
        fake.squeeze_(0)
        fake.transpose_(0, 1)
        return gm.forward

    torch.compile(torch.sin, backend=backend, dynamic=False)(torch.randn(3, 4))
    (entry,) = captures[0].desc.inputs
    assert entry.tensor is not None
    assert entry.tensor.size == (3, 4)
    (rebuilt,) = captures[0].instantiate().inputs
    assert tuple(rebuilt.shape) == (3, 4)


def test_symbols_of_an_instance_are_those_of_the_recorded_frame() -> None:
    """Sizes, strides and hints of the rebuilt inputs print as Dynamo's own do."""
    layouts: list[list[str]] = []

    def layout(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{tuple(value.shape)} {value.stride()} {value.storage_offset()}"
        return str(value)

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        placeholders = gm.graph.find_nodes(op="placeholder")
        rebuilt = tfk.capture(gm, inputs).instantiate().inputs
        layouts.append([layout(fx_node.meta["example_value"]) for fx_node in placeholders])
        layouts.append([layout(value) for value in rebuilt])
        return gm.forward

    x = torch.randn(6, 8, 2)[:, 1:5]
    torch.compile(lambda x, y: (x * y).sum(), backend=backend, dynamic=True)(x, torch.randn(4, 2))
    assert layouts[0] == layouts[1]


def test_a_scalar_input_that_tracing_specialized_stays_a_symbol() -> None:
    """The inputs of the frame are those that it had before tracing."""
    capture = only_capture_of(
        lambda x, n: x * n if n == 5 else x, torch.randn(7, 3), 5, dynamic=True
    )
    syms = [entry.sym for entry in capture.desc.inputs if entry.sym is not None]
    assert 5 in [sym.hint for sym in syms]
    assert {type(sym.expr.nodes[-1]).__name__ for sym in syms} == {"SymbolNode"}


def test_an_instance_has_the_policies_and_marks_of_its_inputs() -> None:
    """A backend finds the symbolic contexts and static addresses where it would in Dynamo."""
    y = torch.randn(3)
    torch._dynamo.mark_static_address(y)
    capture = only_capture_of(lambda x, y: (x * y).sum(0), torch.randn(7, 3), y, dynamic=True)
    instance = capture.instantiate()
    tensors = [x for x in instance.inputs if isinstance(x, torch.Tensor)]
    assert all(x in instance.tracing_context.tensor_to_context for x in tensors)
    marks = [
        fx_node.meta["tensor_dict"]["_dynamo_static_input_type"]
        for fx_node in instance.gm.graph.find_nodes(op="placeholder")
        if "_dynamo_static_input_type" in fx_node.meta.get("tensor_dict", {})
    ]
    assert marks == ["unguarded"]


def test_an_instance_has_the_settings_of_its_fake_mode() -> None:
    """A rebuilt mode allows what the recorded mode allowed."""
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    for settings in ({}, {"allow_non_fake_inputs": True}, {"export": True}):
        mode = FakeTensorMode(**settings)
        rebuilt = tfk.capture(gm, [mode.from_tensor(torch.zeros(2))]).instantiate().fake_mode
        assert rebuilt.allow_non_fake_inputs == mode.allow_non_fake_inputs
        assert rebuilt.fake_tensor_converter.export == mode.fake_tensor_converter.export


def test_capturing_changes_no_environment() -> None:
    """Guards, symbols, and the sizes that automatic dynamic shapes exclude are as before a capture."""
    excluded: list[Any] = []

    def state() -> tuple[Any, ...]:
        env = torch._guards.TracingContext.get().fake_mode.shape_env
        return (
            [str(g.expr) for g in env.guards],
            dict(env.var_to_range),
            dict(env.replacements),
            set(env.unique_ids),
            env.unbacked_symint_counter,
            list(env.exclusion_constraints),
        )

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        before = state()
        tfk.capture(gm, inputs)
        assert state() == before
        excluded.extend(before[-1])
        return gm.forward

    x = torch.randn(6, 6, 6).transpose(0, 2)
    torch.compile(lambda x: x[1:].relu(), backend=backend, dynamic=True)(x)
    with torch._dynamo.config.patch(automatic_dynamic_exclusion_guard=True):
        compiled = torch.compile(lambda x: x + 1, backend=backend)
        for n in (4, 7, 9):
            compiled(torch.zeros(n))
    assert excluded


@pytest.mark.parametrize("symbolic", [True, False])
def test_a_make_fx_graph_is_captured_with_fake_inputs(symbolic: bool) -> None:
    """An ATen graph and fake inputs of one mode make a capture outside Dynamo."""
    mode = FakeTensorMode(shape_env=ShapeEnv() if symbolic else None)
    x = mode.from_tensor(torch.randn(4, 6), static_shapes=not symbolic)
    gm = make_fx(lambda x: x.t() @ x)(x)
    capture = tfk.capture(gm, [x])
    real = capture.materialize()
    (entry,) = capture.desc.inputs
    assert entry.tensor is not None
    assert entry.tensor.is_fake
    assert torch.equal(capture.compile("eager")(*real), real[0].t() @ real[0])


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (
            lambda: only_capture_of(torch.sin, torch.randn(3)).instantiate({"cuda:0": "cpu"}),
            "cannot move tensors from a device that the capture does not use; expected one of cpu; "
            "found cuda:0. Name only recorded devices",
        ),
        (
            lambda: only_capture_of(torch.sin, torch.randn(3)).compile("nope"),
            "there is no Dynamo backend 'nope'; expected one of ",
        ),
        (
            lambda: tfk.capture(torch.fx.symbolic_trace(lambda a, b: a + b), [torch.randn(2)]),
            "the inputs do not fit the graph; expected 2 inputs, one for each placeholder; found 1. "
            "Pass the example inputs that the backend was called with",
        ),
    ],
    ids=["device", "backend", "inputs"],
)
def test_what_does_not_fit_is_refused(refused: Callable[[], Any], message: str) -> None:
    """The error lists the recorded devices, the registered backends, or counts the inputs."""
    with pytest.raises(tfk.CaptureError) as info:
        refused()
    assert str(info.value).startswith(message)


def sized_graph() -> tuple[torch.fx.GraphModule, list[Any]]:
    """Return a graph of a tensor and a size, and the values that it was traced with."""
    gm = make_fx(lambda x, n: x.float() + n, tracing_mode="symbolic")(torch.ones(3, 2), 5)
    return gm, [fx_node.meta["val"] for fx_node in gm.graph.find_nodes(op="placeholder")]


@pytest.mark.parametrize(
    ("at", "value", "found"),
    [
        (0, None, "expected a tensor of float32 with 2 dims; found None"),
        (0, 3, "found the int 3"),
        (0, torch.ones(3), "found a tensor of float32 with 1 dims"),
        (0, torch.ones(3, 2, dtype=torch.int8), "found a tensor of int8 with 2 dims"),
        (1, torch.ones(2), "expected a SymInt; found a tensor of float32 with 1 dims"),
        (1, None, "expected a SymInt; found None"),
        (1, True, "found the bool True"),
        (1, 2.5, "found the float 2.5"),
    ],
)
def test_an_input_of_another_kind_is_refused(at: int, value: Any, found: str) -> None:
    """The error contains the placeholder, what it expects, and what was passed."""
    gm, inputs = sized_graph()
    inputs[at] = value
    with pytest.raises(tfk.CaptureError) as error:
        tfk.capture(gm, inputs)
    assert str(error.value).startswith(
        f"placeholder `{('x_1', 'n_1')[at]}`: the input does not match"
    )
    assert found in str(error.value)


def test_inputs_may_differ_in_what_a_graph_leaves_open() -> None:
    """Real tensors of other sizes and classes are accepted, and a number for a symbol."""
    gm, (x, _) = sized_graph()
    for inputs in ([torch.ones(7, 2), 4], [torch.nn.Parameter(torch.ones(3, 2)), 4], [x, 4]):
        assert len(tfk.capture(gm, inputs).desc.inputs) == 2


def test_the_default_inputs_are_those_that_the_graph_was_traced_with() -> None:
    """In graphs of make_fx and of Dynamo; the error names a placeholder that has no value."""
    gm, inputs = sized_graph()
    assert tfk.capture(gm).desc == tfk.capture(gm, inputs).desc
    traced = only_capture_of(lambda x, n: x * n, torch.ones(4), 3, dynamic=True).instantiate().gm
    assert [entry.name for entry in tfk.capture(traced).desc.inputs if entry.tensor is not None]
    gm = torch.fx.symbolic_trace(lambda x, y: x + y)
    (first, _) = gm.graph.find_nodes(op="placeholder")
    first.meta["val"] = torch.ones(2)
    with pytest.raises(tfk.CaptureError, match="placeholder `y`: the placeholder has no value"):
        tfk.capture(gm)


def test_losses_of_a_capture_are_counted(tmp_path: Path) -> None:
    """`Capture.losses` and ``show`` list them, before and after saving; plain data is recorded."""
    gm, inputs = sized_graph()
    for fx_node in gm.graph.nodes:
        fx_node.meta.update(tag="a", path="/home/somebody/notes.txt", mine=object())
    gm.meta["tag"] = [1, "b"]
    capture = tfk.capture(gm, inputs)
    capture.save(tmp_path / "a.fkf")
    for one_of in (capture, tfk.Capture.load(tmp_path / "a.fkf")):
        (loss,) = one_of.losses
        assert (loss.graph, loss.key, loss.count) == ("", "mine", len(gm.graph.nodes))
        assert f"{loss.count} times" in "\n".join(loss_lines(one_of.desc))
        again = one_of.instantiate().gm
        assert again.meta["tag"] == [1, "b"]
        assert {fx_node.meta["tag"] for fx_node in again.graph.nodes} == {"a"}
        assert {fx_node.meta["path"] for fx_node in again.graph.nodes} == {".../notes.txt"}


@pytest.mark.parametrize("dynamic", [False, True])
def test_sizes_of_a_held_tensor_that_were_symbols_are_counted_as_lost(dynamic: bool) -> None:
    """The record has the sizes as numbers, which is a loss where the frame had symbols."""
    held = torch.arange(3.0)
    torch._dynamo.mark_static_address(held, guard=True)
    capture = only_capture_of(lambda x: held.sum() * x, torch.ones(4), dynamic=dynamic)
    ((name, record),) = capture.desc.graph.tensors
    assert record.size == (3,)
    assert [loss.key for loss in capture.losses] == [name] * dynamic


def test_no_grad_and_autocast_are_recorded_and_applied() -> None:
    """A frame that was compiled under ``no_grad`` and autocast is compiled under them again."""
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        capture = only_capture_of(torch.nn.Linear(5, 3), torch.randn(4, 5))
    assert not capture.desc.modes.grad_enabled
    seen: list[tuple[bool, bool]] = []

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return gm.forward

    capture.compile(backend)
    assert seen == [(False, True)]
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_asserts_on_unbacked_symbols_are_recorded(tmp_path: Path) -> None:
    """A data-dependent ``item()`` with a check compiles again and is still checked at runtime."""

    def f(x: torch.Tensor) -> torch.Tensor:
        n = x.sum().item()
        torch._check(n >= 2)
        torch._check(n <= 6)
        return torch.zeros(n) + 1

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        capture = only_capture_of(f, torch.tensor([1, 2]))
    capture.save(tmp_path / "u.fkf")
    compiled = tfk.Capture.load(tmp_path / "u.fkf").compile("aot_eager")
    assert torch.equal(compiled(torch.tensor([1, 2]))[0], torch.ones(3))
    with pytest.raises(RuntimeError):
        compiled(torch.tensor([5, 6]))


def test_record_calls_its_inner_backend(tmp_path: Path) -> None:
    """A recorded function computes what it did, and each frame has one file, in order."""

    def f(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()

    x = torch.randn(3)
    assert torch.equal(torch.compile(f, backend=tfk.record(tmp_path))(x), f(x))
    names = sorted(p.name for p in tmp_path.glob("*.fkf"))
    assert [n[:3] for n in names] == ["000", "001"]
    assert names[0].startswith("000-f-")
