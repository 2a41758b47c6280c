"""Compiling in several threads: one at a time, under the lock that ``torch.compile`` takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from processes import fresh
from threads import in_threads
from torch._dynamo.convert_frame import compile_lock
from torch.fx.experimental.proxy_tensor import make_fx

import torch_fakeify as tfk

if TYPE_CHECKING:
    from pathlib import Path

POOL = """
import collections, sys
from concurrent.futures import ThreadPoolExecutor
import torch
import torch_fakeify as tfk
from torch.fx.experimental.proxy_tensor import make_fx

path, job = sys.argv[1:]
if job == "all":
    import torch._dynamo  # two ways into torch at once import it in a circle

def summed(out):
    out = out[0] if isinstance(out, (list, tuple)) else out
    out.sum().backward()

def capture(i):
    frame = tfk.Capture.load(path)
    summed(frame.compile("aot_eager")(*frame.materialize(seed=i)))

def frontend(i):
    scope = {"x": torch.ones(i % 5 + 2, 4, requires_grad=True), "y": torch.ones(4, 4)}
    trace = tfk.frontend.Trace(tfk.frontend.describe(scope))
    with trace:
        call = trace.flat(lambda s: (s["x"] @ s["y"]).relu().sum(1), scope)
        gm = make_fx(call)(*trace.inputs)
    summed(trace.compile(gm, "aot_eager")(scope))

def retrace(i):
    frame = tfk.Capture.load(path)
    gm, inputs = frame.instantiate().gm, frame.instantiate(fresh=True).inputs
    tfk.retrace(gm, inputs, decompositions={})

def compiled(i):
    x = torch.ones(i + 2, 4, requires_grad=True)
    summed(torch.compile(lambda x: (x * (i + 1)).sin(), backend=tfk.handoff("aot_eager"))(x))

kinds = {"capture": [capture], "frontend": [frontend], "retrace": [retrace],
         "all": [capture, retrace, compiled]}[job]
sys.setswitchinterval(1e-5)
with ThreadPoolExecutor(6) as pool:
    futures = [pool.submit(kinds[i % len(kinds)], i) for i in range(24)]
errors = collections.Counter(str(f.exception())[:200] for f in futures if f.exception())
print(dict(errors))
sys.exit(bool(errors))
"""


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def recorded(folder: Path) -> Path:
    """A frame with a backward."""
    recorder = tfk.record(folder, "aot_eager")

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.layer_norm(x @ y, (4,)).relu() * x.shape[0]).sum(1)

    x, y = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4)
    torch.compile(f, backend=recorder, dynamic=True)(x, y)
    return recorder.paths[0]


@pytest.mark.parametrize(
    "job",
    ["all", *(pytest.param(n, marks=pytest.mark.long) for n in ("capture", "frontend", "retrace"))],
)
@pytest.mark.sweep
def test_a_pool_of_six_threads(job: str, tmp_path: Path) -> None:
    """Of 24 frames none fails, with their backward, in a process that has compiled nothing yet.

    A trace of a frontend is not among functions of ``torch.compile``: see the next test.
    """
    path = recorded(tmp_path)
    fresh("-c", POOL, path, job, cwd=tmp_path, OMP_NUM_THREADS="1")


def test_torch_refuses_compiled_functions_while_another_thread_traces() -> None:
    """``make_fx`` outside a compile stops other threads, without this package too (docs/limits)."""
    compiled = torch.compile(lambda x: x * 3, backend="eager")

    def traced(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(RuntimeError, match="using FX to symbolically trace"):
            in_threads(lambda _: compiled(torch.ones(2)))
        return x + 1

    make_fx(traced)(torch.ones(2))


def _is_held() -> bool:
    """Whether another thread cannot take the lock now."""

    def attempt(_: int) -> bool:
        got = compile_lock.acquire(blocking=False)
        if got:
            compile_lock.release()
        return got

    return in_threads(attempt) == [False]


def looking(seen: list[tuple[bool, bool]]) -> Any:
    """A backend that notes whether the lock is held, and whether torch says that it compiles."""

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append((_is_held(), torch.compiler.is_compiling()))
        return gm.forward

    return backend


def test_a_backend_is_called_as_dynamo_calls_it(tmp_path: Path) -> None:
    """With the lock, and where ``torch.compiler.is_compiling`` says so; afterwards neither."""
    seen: list[tuple[bool, bool]] = []
    backend = looking(seen)
    path = recorded(tmp_path)
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    tfk.Capture.load(path).compile(backend)
    scope = {"x": torch.ones(3)}
    trace = tfk.frontend.Trace(tfk.frontend.describe(scope))
    with trace:
        assert _is_held()
        gm = make_fx(trace.flat(lambda s: s["x"] + 1, scope))(*trace.inputs)
    trace.compile(gm, backend)
    assert seen == [(True, True)] * 3
    assert not _is_held()
    assert not torch.compiler.is_compiling()


@pytest.mark.parametrize("job", ["retrace", "compile"])
def test_compiled_functions_are_called_while_another_thread_traces(
    job: str, tmp_path: Path
) -> None:
    """Torch refuses them during a trace outside a compile: its flag of a trace is global."""
    compiled = torch.compile(lambda x: x * 3, backend="eager")
    compiled(torch.ones(2))
    called: list[Any] = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        called.extend(in_threads(lambda _: compiled(torch.ones(2)).tolist()))
        return x.clamp(min=0)

    frame = tfk.Capture.load(recorded(tmp_path))
    if job == "retrace":
        table = {torch.ops.aten.relu.default: traced}
        gm, inputs = frame.instantiate().gm, frame.instantiate(fresh=True).inputs
        tfk.retrace(gm, inputs, decompositions=table)
    else:

        def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
            make_fx(traced)(torch.ones(2))
            return gm.forward

        frame.compile(backend)
    assert called == [[3, 3]]


def test_compiled_code_runs_without_the_lock(tmp_path: Path) -> None:
    """What a backend gives may wait for another thread that compiles."""
    frame = tfk.Capture.load(recorded(tmp_path))
    held: list[bool] = []
    compiled = frame.compile(lambda gm, _: lambda *args: (held.append(_is_held()), gm(*args))[1])
    compiled(*frame.materialize())
    assert held == [False]


def test_a_backend_that_fails_leaves_no_lock(tmp_path: Path) -> None:
    """Another thread can compile then."""

    def fails(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        tfk.Capture.load(recorded(tmp_path)).compile(fails)
    assert not _is_held()


def test_a_backend_may_compile_a_capture(tmp_path: Path) -> None:
    """The lock is reentrant: ``torch.compile`` holds it when it calls a backend."""
    path = recorded(tmp_path)

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        tfk.Capture.load(path).compile("eager")
        return gm.forward

    assert torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2)).tolist() == [2, 2]


def test_no_two_frames_get_one_number(tmp_path: Path) -> None:
    """A recorder that threads call by themselves numbers its files one after the other."""
    frame = tfk.Capture.load(recorded(tmp_path / "one"))
    recorder = tfk.record(tmp_path / "many", "eager")
    instances = [frame.instantiate() for _ in range(12)]

    def call(number: int) -> None:
        with instances[number].active():
            recorder(instances[number].gm, instances[number].inputs)

    in_threads(call, len(instances))
    assert sorted(p.name[:3] for p in recorder.paths) == [f"{n:03d}" for n in range(12)]
    assert len(list((tmp_path / "many").glob("*.fkf"))) == 12


def test_made_up_inputs_are_the_same_in_all_threads(tmp_path: Path) -> None:
    """The seed is of a generator of its own: what other threads draw changes nothing."""
    frame = tfk.Capture.load(recorded(tmp_path))

    def make(_: int) -> list[Any]:
        torch.randn(7)
        return [t.tolist() for t in frame.materialize(seed=3) if isinstance(t, torch.Tensor)]

    found = in_threads(make, 8)
    assert all(each == found[0] for each in found)


def test_a_rollback_with_a_leaf_that_requires_grad() -> None:
    """C++ finds out anew how it lies in memory; autograd is not asked."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    leaf = mode.from_tensor(torch.ones(3, 4, requires_grad=True), symbolic_context=context)
    checkpoint = tfk.checkpoint(mode.shape_env)
    assert leaf.shape[0] > 2
    checkpoint.rollback()
    assert not mode.shape_env.guards  # type: ignore[union-attr]
    assert leaf.requires_grad
    assert leaf._version == 0
