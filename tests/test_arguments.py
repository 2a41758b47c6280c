"""Public functions given an argument of the wrong class."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torch_fakeify as tfk
from torch_fakeify.tools.bisecting import bisect

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


RECORD = tfk.describe_tensor(torch.ones(2))
COMPILED = "frame.fkf"
SECONDS = "timeout: invalid value; expected seconds, above 0; found"
BYTES = "memory: invalid value; expected an integer of at least 1; found"
SEED = "seed: invalid value; expected an integer; found 'text'"
NAME = "not the name of a backend; expected str, None; found function"
LIST = "imports: invalid value; expected a list of texts, such as ['my_operators']; found"
CONSTANTS = "constants: invalid value; expected 'none' or 'small'; found"
PATHS = "paths: invalid value; expected 'short' or 'full'; found"
SOURCE = "not a source; expected Source; found"


def _captured() -> tfk.Capture:
    gm = _graph()
    return tfk.capture(gm, [_input(gm)])


def _converter(**options: Any) -> tfk.MetaConverter:
    return tfk.MetaConverter(FakeTensorMode(), **options)


OPTIONS: dict[str, tuple[Callable[..., object], dict[str, tuple[object, str]]]] = {
    "capture": (
        lambda **options: tfk.capture(_graph(), **options),
        {"constants": ("smal", f"{CONSTANTS} 'smal'"), "paths": (3, f"{PATHS} 3")},
    ),
    "record": (
        lambda **options: tfk.record("eager", **options),
        {
            "constants": (None, f"{CONSTANTS} None"),
            "paths": ("long", f"{PATHS} 'long'"),
            "level": ("fx", "level: invalid value; expected 'dynamo' or 'aot'; found 'fx'"),
            "on_error": (1, "on_error: invalid value; expected 'warn' or 'raise'; found 1"),
        },
    ),
    "MetaConverter": (
        _converter,
        {"symbols": ("kept", "symbols: invalid value; expected 'fresh' or 'keep'; found 'kept'")},
    ),
    "from_desc": (
        lambda **options: _converter().from_desc(RECORD, **options),
        {
            "source": ("x", f"{SOURCE} str"),
            "symbolic_context": ([1], "not a symbolic context; expected SymbolicContext"),
        },
    ),
    "describe_tensor": (
        lambda **options: tfk.describe_tensor(torch.ones(2), **options),
        {
            "source": ("x", f"{SOURCE} str"),
            "symbolic_context": (3, "not a symbolic context; expected SymbolicContext; found int"),
        },
    ),
    "retrace": (
        lambda **options: tfk.retrace((gm := _graph()), [_input(gm)], **options),
        {"mode": ("fake", f"{MODE}; found str")},
    ),
    "repropagate": (
        lambda **options: tfk.repropagate(_graph(), [], **options),
        {"mode": (3, f"{MODE}; found int")},
    ),
    "Capture.fingerprint": (
        lambda **options: _captured().fingerprint(**options),
        {"kind": (3, "kind: invalid value; expected 'content' or 'structure'; found 3")},
    ),
    "Capture.instantiate": (
        lambda **options: _captured().instantiate(**options),
        {"rank": (-1, "rank: invalid value; expected an integer of at least 0; found -1")},
    ),
    "Capture.load": (
        lambda **options: tfk.Capture.load(COMPILED, **options),
        {"limits": (3, "not limits of a reader; expected Limits, None; found int")},
    ),
    "Capture.save": (
        lambda **options: _captured().save("other.fkf", **options),
        {"limits": ("none", "not limits of a reader; expected Limits, None; found str")},
    ),
    "from_trace_log": (
        lambda **options: tfk.from_trace_log(COMPILED, **options),
        {"limits": (3, "not limits of a trace log; expected TraceLimits, None; found int")},
    ),
    "Limits": (
        tfk.Limits,
        {
            "products": ("many", "products: invalid value; expected an integer of at least 0"),
            "members": (-1, "members: invalid value; expected an integer of at least 0; found -1"),
            "ratio": (True, "ratio: invalid value; expected an integer of at least 0; found True"),
        },
    ),
    "loads": (
        lambda **options: tfk.loads(tfk.dumps(RECORD), **options),
        {
            "describer": (3, "not the name of a describer; expected str, None; found int"),
            "root": ("MetaTensorDesc", "not a class of records; expected type; found str"),
        },
    ),
    "replay_capture": (
        lambda **options: tfk.replay_capture(COMPILED, **options),
        {
            "backend": (_graph, f"{NAME}. A worker process finds it by name"),
            "imports": ("operators", f"{LIST} 'operators'"),
            "device": (torch.device("cpu"), "not the name of a device"),
            "timeout": (-1, f"{SECONDS} -1"),
            "memory": ("4G", f"{BYTES} '4G'"),
            "python": (3, "not the path of an interpreter; expected str, None; found int"),
        },
    ),
    "fuzz": (
        lambda **options: tfk.fuzz(COMPILED, **options),
        {
            "backend": (_graph, NAME),
            "imports": ([3], LIST),
            "runs": (2.5, "runs: invalid value; expected an integer of at least 1; found 2.5"),
            "seed": ("text", SEED),
            "timeout": (float("nan"), f"{SECONDS} nan"),
            "memory": (0, f"{BYTES} 0"),
        },
    ),
    "check_fakes": (
        lambda **options: tfk.check_fakes(COMPILED, **options),
        {"imports": ("operators", LIST), "seed": ("text", SEED), "timeout": ("1m", SECONDS)},
    ),
    "minify": (
        lambda **options: tfk.minify(COMPILED, **{"backend": "eager", **options}),
        {
            "backend": (_graph, NAME),
            "imports": (None, f"{LIST} None"),
            "device": (0, "not the name of a device; expected str, None; found int"),
            "seed": ("text", SEED),
            "jobs": (0, "jobs: invalid value; expected an integer of at least 1; found 0"),
            "timeout": (0, f"{SECONDS} 0"),
            "memory": (1.5, f"{BYTES} 1.5"),
        },
    ),
    "report": (
        lambda **options: tfk.report(COMPILED, "page.html", **options),
        {"timeout": (None, f"{SECONDS} None")},
    ),
    "run": (
        lambda **options: tfk.run(__file__, **options),
        {"args": ("--steps 3", "args: invalid value; expected a list of texts, such as [")},
    ),
    "bisect": (
        lambda **options: bisect(COMPILED, **options),
        {"pythons": ("python3.11", "pythons: invalid value; expected a list of texts")},
    ),
    "infer_fake": (
        lambda **options: tfk.infer_fake("aten::relu", [(torch.ones(2),)], **options),
        {
            "sizes": ("12", "not a list of sizes; expected tuple, list, range; found str"),
            "timeout": (-1.0, f"{SECONDS} -1.0"),
            "memory": (-1, f"{BYTES} -1"),
            "seed": ("text", SEED),
        },
    ),
    "inferring_fakes": (
        lambda **options: tfk.inferring_fakes(**options).__enter__(),
        {
            "sizes": ([-1], "sizes: invalid value; expected an integer of at least 0; found -1"),
            "timeout": (0, f"{SECONDS} 0"),
            "memory": ("4G", f"{BYTES} '4G'"),
        },
    ),
}


@pytest.mark.parametrize(
    ("function", "option"), [(name, option) for name in OPTIONS for option in OPTIONS[name][1]]
)
def test_an_option_that_cannot_be_is_refused_by_name(
    function: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is compiled, written, or taken for another value."""
    monkeypatch.chdir(tmp_path)
    _captured().save(COMPILED)
    call, options = OPTIONS[function]
    bad, message = options[option]
    with pytest.raises(tfk.FakeifyError) as caught:
        call(**{option: bad})
    assert str(caught.value).startswith(message)
    assert [file.name for file in tmp_path.iterdir()] == [COMPILED]


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
