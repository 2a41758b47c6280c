"""Public functions given an argument of the wrong class."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def _graph() -> Any:
    return make_fx(lambda x: x[1:], tracing_mode="symbolic")(torch.ones(4))


def _input(gm: Any) -> Any:
    return gm.graph.find_nodes(op="placeholder")[0].meta["val"]


def _env() -> Any:
    return _input(_graph()).fake_mode.shape_env


ENV = "not a shape environment; expected ShapeEnv"
GRAPH = "not a graph; expected GraphModule"
MODE = "not a fake mode; expected FakeTensorMode"
INPUTS = "not a list of inputs; expected Collection"
CAPTURE = "that is no capture; expected a Capture, or the path of its file"
BACKEND = "not a backend; expected a name that Dynamo knows, MODULE:ATTR, or a function"

CALLS: dict[str, tuple[Callable[[Any], object], str]] = {
    "snapshot": (tfk.snapshot, ENV),
    "checkpoint": (tfk.checkpoint, ENV),
    "entails": (lambda bad: tfk.entails(bad, True), ENV),
    "why": (lambda bad: tfk.why(bad, True), ENV),
    "insert_guards": (lambda bad: tfk.insert_guards(_graph(), bad), ENV),
    "insert_runtime_asserts": (lambda bad: tfk.insert_runtime_asserts(_graph(), bad), ENV),
    "insert_guards, graph": (lambda bad: tfk.insert_guards(bad, _env()), GRAPH),
    "insert_runtime_asserts, graph": (lambda bad: tfk.insert_runtime_asserts(bad, _env()), GRAPH),
    "strip_guards": (tfk.strip_guards, GRAPH),
    "learn": (lambda bad: tfk.learn(bad, []), GRAPH),
    "learn, inputs": (lambda bad: tfk.learn(_graph(), bad), INPUTS),
    "retrace": (lambda bad: tfk.retrace(bad, []), GRAPH),
    "retrace, inputs": (lambda bad: tfk.retrace(_graph(), bad), INPUTS),
    "repropagate": (lambda bad: tfk.repropagate(bad, []), GRAPH),
    "transplant": (lambda bad: tfk.transplant(bad, bad, None), GRAPH),
    "check_bindings": (tfk.check_bindings, GRAPH),
    "capture": (tfk.capture, GRAPH),
    "MetaConverter": (tfk.MetaConverter, MODE),
    "refakeify": (lambda bad: tfk.refakeify([_input(_graph())], bad), MODE),
    "describe_tensor": (tfk.describe_tensor, "expected a torch.Tensor"),
    "restore": (tfk.restore, "not the record of a shape environment; expected ShapeEnvDesc"),
    "loads": (tfk.loads, "not data of torch_fakeify; expected bytes, bytearray, memoryview"),
    "diff": (lambda bad: tfk.diff(bad, bad), CAPTURE),
    "fuzz": (tfk.fuzz, CAPTURE),
    "minify": (lambda bad: tfk.minify(bad, backend="eager"), CAPTURE),
    "replay_capture": (tfk.replay_capture, CAPTURE),
    "report": (lambda bad: tfk.report(bad, "page.html"), CAPTURE),
    "check_fakes": (tfk.check_fakes, CAPTURE),
    "handoff": (tfk.handoff, BACKEND),
}


@pytest.mark.parametrize("bad", [None, 3, object()], ids=["None", "int", "object"])
@pytest.mark.parametrize("function", CALLS)
def test_an_argument_of_the_wrong_class_is_refused_by_name(
    function: str, bad: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what was expected and what was given, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    call, message = CALLS[function]
    with pytest.raises(tfk.FakeifyError) as caught:
        call(bad)
    assert message in str(caught.value)
    assert re.search(rf"found {type(bad).__name__.removesuffix('Type')}", str(caught.value))
    assert not list(tmp_path.iterdir())


def test_a_mode_of_static_shapes_has_no_facts_to_insert() -> None:
    """``mode.shape_env`` is ``None`` there, and the error says why."""
    with pytest.raises(tfk.ShapeEnvError, match="without shape_env= has none") as caught:
        tfk.insert_guards(_graph(), FakeTensorMode().shape_env)
    assert str(caught.value).startswith(ENV)


def test_a_handoff_refuses_another_number_of_inputs() -> None:
    """A backend around it that drops or adds an input gets an error of this package."""
    errors: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        for wrong in (inputs[:-1], [*inputs, inputs[0]]):
            with pytest.raises(tfk.CaptureError) as caught:
                tfk.handoff("eager")(gm, wrong)
            errors.append(str(caught.value))
        return gm.forward

    torch.compile(lambda x, y: x + y, backend=backend)(torch.ones(3), torch.ones(3))
    assert [text.partition(". ")[0] for text in errors] == [
        f"the inputs do not fit the graph; expected 2 inputs, one for each placeholder; found {n}"
        for n in (1, 3)
    ]
