"""Captures of the graphs of AOTAutograd, and the compilers that get them again."""

from __future__ import annotations

import ast
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from processes import COMMAND, fresh
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

import torch_fakeify as tfk
from torch_fakeify.frames.capture_folders import CaptureFolder
from torch_fakeify.frames.dynamo_recorder import start_recording, stop_recording
from torch_fakeify.frames.process_recorder import ProcessRecorder
from torch_fakeify.render.diff import differences
from torch_fakeify.render.summary import convention_rows, summary_lines
from torch_fakeify.tools.minify.search import minify

if TYPE_CHECKING:
    from collections.abc import Callable

    from cli_runs import Command

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Compilers:
    """A backend on AOTAutograd that notes which of its compilers gets which graph."""

    def __init__(self, fails: str = "") -> None:
        self.seen: list[tuple[str, list[str], list[tuple[int, ...]]]] = []
        self.fails = fails

    def note(self, kind: str, gm: torch.fx.GraphModule, inputs: Any) -> None:
        """Note a call, or fail."""
        shapes = [tuple(map(int, v.shape)) for v in inputs if isinstance(v, torch.Tensor)]
        self.seen.append((kind, [node.name for node in gm.graph.nodes], shapes))
        if kind == self.fails:
            raise NotImplementedError(f"no {kind} here")

    def of(self, kind: str) -> Callable[..., Any]:
        """The compiler of graphs of a kind."""

        def compiler(gm: torch.fx.GraphModule, inputs: Any) -> Any:
            self.note(kind, gm, inputs)
            return make_boxed_func(gm.forward)

        return compiler

    def partition(self, gm: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        """The partitioner."""
        self.note("joint", gm, [*inputs[0], *inputs[1]])
        return min_cut_rematerialization_partition(gm, inputs, **options)

    def __call__(self, gm: torch.fx.GraphModule, inputs: Any) -> Any:
        """Compile a frame."""
        backend = aot_autograd(
            fw_compiler=self.of("forward"),
            bw_compiler=self.of("backward"),
            inference_compiler=self.of("inference"),
            partition_fn=self.partition,
        )
        return backend(gm, inputs)


def norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A normalization, whose number of rows is in its result."""
    return torch.nn.functional.layer_norm(x @ w, (4,)).relu() * x.shape[0] + b[0]


def mutated(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """It writes into an input."""
    b.add_(1)
    y = (x @ w).sin()
    return y * y.shape[0] + b.t()[0]


def views(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Its results are views of an input."""
    y = x.view(-1)[1:].unsqueeze(0)
    return y, x.t(), (w * b).cumsum(0), b[0]


def branches(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """It has subgraphs."""
    return torch.cond(b.sum() > 0, lambda x: (x @ w).cos(), lambda x: (x @ w).exp(), (x,))


FUNCTIONS = [norm, mutated, views, branches]


def inputs(*, grad: bool) -> list[torch.Tensor]:
    """Arguments of the functions."""
    x, w = torch.randn(3, 4, requires_grad=grad), torch.randn(4, 4, requires_grad=grad)
    return [x, w, torch.randn(4, 4)]


def called(compiled: Any, args: list[torch.Tensor]) -> None:
    """Call a compiled function, and its backward if there is one."""
    out = compiled(*args)
    out = out if isinstance(out, tuple) else (out,)
    total = sum(o.sum() for o in out if o.requires_grad)
    if isinstance(total, torch.Tensor):
        total.backward()


def recorded(function: Any, folder: Path, backend: Any, *, grad: bool, dynamic: bool) -> list[Path]:
    """The captures of one frame's graphs."""
    recorder = tfk.record(folder, backend, level="aot", on_error="raise")
    called(torch.compile(function, backend=recorder, dynamic=dynamic), inputs(grad=grad))
    assert all(frame.is_well for frame in recorder.frames)
    assert sorted(folder.iterdir()) == sorted(recorder.paths)
    return recorder.paths


# --- laws -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_same_compiler_gets_the_same_graph_again(
    function: Any, grad: bool, dynamic: bool, tmp_path: Path
) -> None:
    """From the file alone; of the kinds that AOTAutograd makes of the frame."""
    direct, again = Compilers(), Compilers()
    paths = recorded(function, tmp_path, direct, grad=grad, dynamic=dynamic)
    kinds: list[str] = []
    for capture in map(tfk.Capture.load, paths):
        kinds.append(capture.desc.aot.kind)  # type: ignore[union-attr]
        capture.compile(again)
        if kinds[-1] == "joint":
            assert [kind for kind, *_ in again.seen[-3:]] == ["joint", "forward", "backward"]
            del again.seen[-2:]
    assert kinds == [kind for kind, *_ in direct.seen]
    assert set(kinds) == ({"joint", "forward", "backward"} if grad else {"inference"})
    assert again.seen == direct.seen


@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.sweep)]
)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_compiled_graphs_give_what_the_graphs_give(
    function: Any, backend: str, tmp_path: Path
) -> None:
    """By any backend, at recorded sizes and at others; without autograd."""
    for grad in (True, False):
        folder = tmp_path / str(grad)
        for path in recorded(function, folder, Compilers(), grad=grad, dynamic=True):
            capture = tfk.Capture.load(path)
            compiled, graph = capture.compile(backend), capture.instantiate().gm
            sizes = {s.name: 7 for s in capture.desc.shape_env.symbols if s.hint == 3}  # type: ignore[union-attr]
            for chosen in ({}, sizes):
                args, same = (capture.materialize(seed=1, sizes=chosen) for _ in range(2))
                with torch.no_grad():
                    expected = graph(*args)
                found = compiled(*same)
                assert not any(getattr(value, "requires_grad", False) for value in found)
                torch.testing.assert_close([*found, *same], [*expected, *args])


@pytest.mark.sweep
def test_the_graphs_are_on_record_although_the_caches_have_them(tmp_path: Path) -> None:
    """AOTAutograd's cache would compile without handing over a graph."""
    for number in range(2):
        torch._dynamo.reset()
        paths = recorded(norm, tmp_path / str(number), "inductor", grad=True, dynamic=False)
        assert len(paths) == 3


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["joint", "forward", "backward", "inference"])
def test_a_failure_is_in_the_graph_whose_compiler_failed(kind: str, tmp_path: Path) -> None:
    """The frame itself is not on record then, and the graph fails again."""
    recorder = tfk.record(tmp_path, Compilers(kind), level="aot")
    with pytest.raises(Exception, match=f"no {kind} here"):
        called(torch.compile(norm, backend=recorder), inputs(grad=kind != "inference"))
    assert {Path(str(f.line and f.line[0])).name for f in recorder.frames} == {Path(__file__).name}
    captures = [tfk.Capture.load(path) for path in recorder.paths]
    failed = [c for c in captures if c.desc.failure is not None]
    assert [c.desc.aot.kind for c in failed] == [kind]  # type: ignore[union-attr]
    assert failed[0].desc.failure.message == f"no {kind} here"  # type: ignore[union-attr]
    assert all(c.desc.aot is not None for c in captures)
    with pytest.raises(NotImplementedError, match=f"no {kind} here"):
        failed[0].compile(Compilers(kind))


def untraceable(gm: torch.fx.GraphModule, args: Any) -> Any:
    """A backend whose frame fails before AOTAutograd has a graph."""

    def refuse(*_: Any) -> Any:
        raise RuntimeError("no decomposition")

    table = {torch.ops.aten.relu.default: refuse}
    return aot_autograd(fw_compiler=Compilers().of("forward"), decompositions=table)(gm, args)


@pytest.mark.parametrize("backend", ["eager", untraceable])
def test_a_frame_without_such_graphs_is_recorded_itself(backend: Any, tmp_path: Path) -> None:
    """With its failure, if it has one."""
    recorder = tfk.record(tmp_path, backend, level="aot")
    fails = backend is untraceable
    with pytest.raises(Exception, match="no decomposition") if fails else nullcontext():
        torch.compile(norm, backend=recorder)(*inputs(grad=False))
    (path,) = recorder.paths
    desc = tfk.Capture.load(path).desc
    assert desc.aot is None
    assert (desc.failure is not None) == fails


def test_kinds_are_different_frames(tmp_path: Path) -> None:
    """In fingerprints and differences."""
    path = recorded(norm, tmp_path, "aot_eager", grad=False, dynamic=False)[0]
    capture = tfk.Capture.load(path)
    other = tfk.Capture(msgspec.structs.replace(capture.desc, aot=None))
    assert capture.fingerprint() != other.fingerprint()
    assert "frame      norm, inference graph of AOTAutograd" in summary_lines(capture.desc)
    (difference,) = differences(capture.desc, other.desc)
    assert difference.text == "level: inference graph of AOTAutograd against frame of Dynamo"


def test_show_says_what_inputs_and_outputs_are(tmp_path: Path) -> None:
    """In the order of AOTAutograd: arguments and gradients of results, results and gradients of arguments."""
    paths = recorded(norm, tmp_path, "aot_eager", grad=True, dynamic=False)
    rows = [convention_rows(tfk.Capture.load(path).desc) for path in paths]
    joint, forward, ((what, text),) = rows
    assert joint == [
        ("inputs", "3 arguments, then 1 gradient of results"),
        ("outputs", "1 result of the forward graph, then 3 gradients of arguments"),
    ]
    assert forward == [("inputs", "3 arguments")]
    assert what == "inputs"
    assert text.endswith("values saved by the forward graph, then 1 gradient of results")


def test_wrong_levels_are_refused(tmp_path: Path) -> None:
    """With what is expected."""
    with pytest.raises(tfk.CaptureError, match="'dynamo' or 'aot'"):
        tfk.record(tmp_path, level="joint")  # type: ignore[arg-type]


def test_a_limit_counts_frames_not_graphs(tmp_path: Path) -> None:
    """All graphs of the first frame are on record, and none of the second one."""
    recorder = ProcessRecorder(CaptureFolder(tmp_path), level="aot", limit=1)
    start_recording(recorder)
    try:
        for function in (norm, views):
            called(torch.compile(function, backend="aot_eager"), inputs(grad=True))
    finally:
        stop_recording(recorder)
    assert [frame.title for frame in recorder.frames] == [
        "norm (joint)", "norm (forward)", "norm (backward)"
    ]  # fmt: skip


# --- commands -------------------------------------------------------------------------------------

CHIP = """
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func


def forward(gm, inputs):
    return make_boxed_func(gm.forward)


def backward(gm, inputs):
    if any(node.target is torch.ops.aten.cos.default for node in gm.graph.nodes):
        raise NotImplementedError("no cosine")
    return forward(gm, inputs)


def compiler(gm, inputs):
    return aot_autograd(fw_compiler=forward, bw_compiler=backward)(gm, inputs)
"""
MODEL = """
import torch
from chip import compiler

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
step = torch.compile(lambda x: model(x).sin().sum(), backend=compiler)
step(torch.randn(3, 4)).backward()
"""


@pytest.mark.sweep
@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize("way", ["run", pytest.param("environment", marks=pytest.mark.long)])
def test_a_failure_of_the_backward_from_run_to_a_script(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """Recorded, replayed by the backend's own compiler, minified to a script of torch alone."""
    (tmp_path / "chip.py").write_text(CHIP)
    (tmp_path / "model.py").write_text(MODEL)
    if way == "run":
        done = fresh(*COMMAND, "run", "--level", "aot", "model.py", cwd=tmp_path, status=1)
        assert "<lambda> (backward)" in done.stdout
    else:
        monkeypatch.setenv("TORCH_FAKEIFY_RECORD", "captures")
        monkeypatch.setenv("TORCH_FAKEIFY_RECORD_LEVEL", "aot")
        fresh("model.py", cwd=tmp_path, status=None)
        monkeypatch.delenv("TORCH_FAKEIFY_RECORD")
    (path,) = tmp_path.glob("captures/*/*backward*.fkf")
    assert len([*path.parent.iterdir()]) == 3
    own = ("--backend", "chip:compiler")
    replayed = command("replay", path, *own, cwd=tmp_path)
    assert (replayed.returncode, replayed.stdout.split("\n")[0]) == (0, "reproduced")
    (joint,) = tmp_path.glob("captures/*/*joint*.fkf")
    with pytest.raises(tfk.CaptureError, match="a joint graph cannot be minified"):
        minify(joint, tmp_path / "joint.fkf")
    minified = command("minify", path, *own, "-o", "small.fkf", cwd=tmp_path)
    assert minified.returncode == 0, minified.stdout + minified.stderr
    assert "fails in the same way" in minified.stdout
    script = tmp_path / "small.py"
    names = {n.name for n in ast.walk(ast.parse(script.read_text())) if isinstance(n, ast.alias)}
    assert "torch_fakeify" not in names
    done = fresh("small.py", cwd=tmp_path, status=1)
    assert "NotImplementedError: no cosine" in done.stderr
