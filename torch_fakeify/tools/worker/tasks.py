"""What a worker process carries out: it compiles or runs one capture. The process has nothing else of the model."""

from __future__ import annotations

import atexit
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from torch_fakeify.compat.backends import import_modules, resolve_backend
from torch_fakeify.compat.torch_configs import settings_set
from torch_fakeify.compat.torch_dynamo import torch_version
from torch_fakeify.encoding.operators import other_schemas
from torch_fakeify.encoding.surroundings import describe_surroundings
from torch_fakeify.errors import CaptureError, FakeifyError
from torch_fakeify.frames.backend_choice import recorded_name, with_options
from torch_fakeify.frames.captures import Capture
from torch_fakeify.render.surroundings import machine_differences, setting_differences
from torch_fakeify.serialization.container import Limits

from .exceptions import failed, thrown
from .replies import (
    Answer,
    Compared,
    Compiled,
    Failed,
    FakesChecked,
    Found,
    Here,
    Raised,
    Ran,
    Refused,
    Reply,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch_fakeify.encoding.settings import NotSet
    from torch_fakeify.records.frame import CaptureDesc, OperatorDesc

_WORLDS = ExitStack()
"""Fake process groups, active until the process exits."""
_SETTINGS = ExitStack()
"""The settings of a frame, until the process exits."""
atexit.register(_SETTINGS.close)


def _load(request: Mapping[str, Any]) -> tuple[Capture, Callable[..., Any]]:
    """Load the capture of a request and find its backend.

    For the rest of the process the recorded settings are set, and the frame has the fake process groups
    that it needs, and stubs for operators that are not here. How this process differs from the recorded
    one is written to a file at once, as the process may crash.

    Args:
        request: ``file``, ``backend``; ``here``, the file to write; ``trust`` lifts the limits on the file,
            and unless ``trust_settings`` says otherwise sets also what could run or write something;
            ``device`` is named if it is another one; ``stubs``: whether operators that are not here get
            stubs, for frames that are compiled only.
    """
    trust = bool(request.get("trust_settings", request.get("trust")))
    limits = Limits.none() if request.get("trust") else None
    capture = Capture.load(request["file"], limits=limits)
    compiler_fn, not_passed = with_options(capture.desc, request["backend"], trust=trust)
    _WORLDS.enter_context(capture.fake_world())
    stubs = _SETTINGS.enter_context(capture.operator_stubs()) if request.get("stubs") else ()
    not_set = (*_SETTINGS.enter_context(capture.settings(trust=trust)), *not_passed)
    if "here" in request:
        here = _here_of(request, capture.desc, not_set, stubs)
        Path(request["here"]).write_bytes(msgspec.json.encode(here))
    return capture, compiler_fn


def _here_of(
    request: Mapping[str, Any],
    desc: CaptureDesc,
    not_set: Iterable[NotSet],
    stubs: Iterable[OperatorDesc],
) -> Here:
    """Compare the surroundings of a frame with those of this process, in which its settings are set."""
    backend, device = recorded_name(desc, request["backend"]), request.get("device")
    reasons = {each.setting: each.text for each in not_set}
    recorded = desc.surroundings
    differs: list[str] = []
    if desc.backend not in (None, backend):
        differs.append(_differing("backend", desc.backend or "", backend))
    if recorded is None:
        running = torch_version()
        if desc.torch_version not in ("", running):
            differs.append(_differing("torch", desc.torch_version, running))
        differs.append("the file has no settings, environment and devices on record")
    else:
        here = describe_surroundings(desc.graph, desc.inputs, start_devices=device is None)
        others = (*setting_differences(recorded, here), *machine_differences(recorded, here))
        options = {f"options.{name}" for name, _ in recorded.options} | {"mode"}
        differs += [_differing(*each) for each in others if each.what not in {*reasons, *options}]
    if device is not None:
        differs.append(f"the device: moved to {device}")
    differs += other_schemas(desc.operators)
    return Here(tuple(reasons.values()), tuple(differs), tuple(map(_stub_line, stubs)))


def _stub_line(stub: OperatorDesc) -> str:
    gradient = "; its gradient is a stub too" if stub.autograd in ("formula", "composite") else ""
    return f"{stub.schema}{gradient}"


def _differing(what: str, recorded: str, here: str) -> str:
    return f"{what}: {recorded} recorded, {here} here"


def compile_capture(request: Mapping[str, Any]) -> Reply:
    """Rebuild a frame and compile it.

    Args:
        request: ``device`` (or ``None``), and as for `_load`; ``time``: whether to time the compiled code;
            ``backward``: whether AOTAutograd compiles the backward now, not at the first call of it.
    """
    capture, compiler_fn = _load(request)
    if request.get("backward"):
        now = {"torch._functorch.config": {"force_non_lazy_backward_lowering": True}}
        _SETTINGS.enter_context(settings_set(now))
    instance = capture.instantiate(request["device"])
    started = time.perf_counter()
    try:
        compiled = instance.compile(compiler_fn)
    except BaseException as error:  # noqa: BLE001 - any failure of a backend is a result
        return failed(error)
    took = _milliseconds(started)
    if not request.get("time"):
        return Compiled(took)
    try:
        return Compiled(took, _time_calls(capture, compiled, request["device"]))
    except Exception as error:  # noqa: BLE001 - what cannot be run has no time
        return Compiled(took, not_run=f"{type(error).__name__}: {error}")


_CALLS = 9


def _time_calls(capture: Capture, compiled: Callable[..., Any], device: str | None) -> float:
    """Return the median time of a call on synthetic inputs, in milliseconds, after one that is not counted."""
    times: list[float] = []
    with torch.set_grad_enabled(capture.desc.modes.grad_enabled):
        for _ in range(_CALLS + 1):
            inputs = capture.materialize(seed=0, device=device)
            _synchronize()
            started = time.perf_counter()
            compiled(*inputs)
            _synchronize()
            times.append(_milliseconds(started))
    return sorted(times[1:])[_CALLS // 2]


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def run_capture(request: Mapping[str, Any]) -> Reply:
    """Compile a frame, run it on synthetic inputs at several sizes, and compare it with eager.

    Args:
        request: ``file``, ``backend``; ``sizes``: a list of maps from symbol name to value;
            ``absent``: names of modules that this process must not import.
    """
    started = time.perf_counter()
    capture, compiler_fn = _load(request)
    instance = capture.instantiate()
    load = _milliseconds(started)
    started = time.perf_counter()
    compiled = instance.compile(compiler_fn)
    compiling = _milliseconds(started)
    eager = capture.instantiate().compile("eager")
    runs = [_run_once(capture, compiled, eager, sizes) for sizes in request["sizes"]]
    present = sorted(set(request["absent"]) & set(sys.modules))
    if present:
        raise CaptureError(
            "the process has imported modules that it must not have",
            expected="only the capture file",
            found=", ".join(present),
        )
    return Ran(load, compiling, runs)


def _run_once(
    capture: Capture,
    compiled: Callable[..., Any],
    eager: Callable[..., Any],
    sizes: Mapping[str, int],
) -> dict[str, Any]:
    """Run a frame at some sizes; the difference is over outputs and inputs, since it may write into them."""
    inputs = [capture.materialize(seed=0, sizes=sizes) for _ in range(3)]
    with torch.set_grad_enabled(capture.desc.modes.grad_enabled):
        expected, eager_time = _timed(eager, inputs[0])
        found, first_time = _timed(compiled, inputs[1])
        _, next_time = _timed(compiled, inputs[2])
    pairs = zip([*expected, *inputs[0]], [*found, *inputs[1]], strict=True)
    return {
        "outputs": [list(value.shape) for value in expected if isinstance(value, torch.Tensor)],
        "eager": eager_time,
        "first": first_time,
        "next": next_time,
        "difference": max((_difference(a, b) for a, b in pairs), default=0.0),
    }


def run_sizes(request: Mapping[str, Any]) -> Reply:
    """Compile a frame once, run it at several sizes, and compare it with eager.

    Args:
        request: as for `_load`; ``seed`` of the data; ``sizes``: maps from symbol name to value.
    """
    from .trials import EagerComparison  # lazy: replay does not need it

    capture, compiler_fn = _load(request)
    try:
        compiled = capture.instantiate().compile(compiler_fn)
    except Exception as error:  # noqa: BLE001 - any failure of a backend is a result
        return Failed(thrown(error))
    comparison = EagerComparison(capture, seed=request["seed"])
    return Compared([comparison.run(compiled, sizes) for sizes in request["sizes"]])


def check_fakes(request: Mapping[str, Any]) -> Reply:
    """Run the nodes of a frame at several sizes, and compare the results with the fake values.

    Args:
        request: ``file``, ``backend``, ``seed``; ``device``, if not the recorded ones; ``sizes``: maps from
            symbol name to value; ``running``: the file to which the position of the sizes and the name of
            the node that runs are written.
    """
    from .fake_checks import FakeChecks  # lazy: replay does not need it

    capture, _ = _load(request)
    checks = FakeChecks(capture, seed=request["seed"], device=request.get("device"))
    with Path(request["running"]).open("wb", buffering=0) as running:
        return FakesChecked(
            [checks.run(sizes, at, running) for at, sizes in enumerate(request["sizes"])]
        )


def _timed(function: Callable[..., Any], args: Sequence[Any]) -> tuple[list[Any], float]:
    started = time.perf_counter()
    result = function(*args)
    return list(result), _milliseconds(started)


def _difference(a: Any, b: Any) -> float:
    if not isinstance(a, torch.Tensor):
        return 0.0 if a == b else float("inf")
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    return float((a.detach().double() - b.detach().double()).abs().max())


def _milliseconds(started: float) -> float:
    return (time.perf_counter() - started) * 1e3


def find_backend(request: Mapping[str, Any]) -> Reply:
    """Check that a backend exists, unless it is the recorded one of each frame; an unknown name is refused."""
    if request["backend"] is not None:
        resolve_backend(request["backend"])
    return Found()


def try_capture(request: Mapping[str, Any]) -> Reply:
    """Compile a frame and, if requested, run it; see `trials.run_trial`.

    Args:
        request: ``file``, ``backend``, ``seed``, ``device`` (or ``None``), ``runs``: whether to run it,
            ``sizes``: at which, by symbol name; optional ``constants``: replacements for integers of
            the graph, whose values are then propagated again, and ``saved``: the file for that frame.
    """
    from .trials import propagated, run_trial  # lazy: replay does not need it

    capture, compiler_fn = _load(request)
    if request.get("constants") is not None:
        constants = {int(old): new for old, new in request["constants"].items()}
        propagated(capture, constants).save(request["saved"], limits=Limits.none())
        capture = Capture.load(request["saved"], limits=Limits.none())
    return run_trial(
        capture,
        compiler_fn,
        runs=request["runs"],
        sizes=request["sizes"],
        seed=request["seed"],
        device=request["device"],
    )


def import_requested(directory: str | None, modules: Sequence[str]) -> None:
    """Import modules, with a directory in front of ``sys.path``."""
    if directory is not None and directory not in sys.path:
        sys.path.insert(0, directory)
    import_modules(modules)


_TASKS: Mapping[str, Callable[[Mapping[str, Any]], Reply]] = {
    "backend": find_backend,
    "compile": compile_capture,
    "run": run_capture,
    "sizes": run_sizes,
    "fakes": check_fakes,
    "try": try_capture,
}


def carry_out(request: Mapping[str, Any]) -> Answer:
    """Carry out a request; an exception becomes a reply.

    The modules that the request names in ``imports`` are imported first, with its ``directory`` in front
    of ``sys.path``.
    """
    try:
        import_requested(request.get("directory"), request.get("imports", ()))
        reply = _TASKS[request["task"]](request)
    except FakeifyError as error:
        reply = Refused(type(error).__name__, str(error))
    except Exception as error:  # noqa: BLE001 - any exception is a result
        reply = Raised(thrown(error))
    return Answer(reply, torch.__version__, os.getpid())
