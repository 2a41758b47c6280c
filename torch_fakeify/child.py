"""The program of a fresh interpreter: compiles one capture and tells how it went.

``python -m torch_fakeify.child REQUEST REPLY``: both are JSON files; with ``--serve`` instead of them
it does so again and again, see `serve`. The process knows the capture
file and nothing else; in particular it has neither the code nor the weights of the model.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from .container import Limits
from .errors import CaptureError, FakeifyError, VersionError
from .torch_refused import answer_refusal

try:
    import torch

    from . import _torch
    from .frame import Capture
    from .telling import told
except VersionError as error:
    if __name__ != "__main__":
        raise
    sys.exit(answer_refusal(error, sys.argv[1:]))

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Reply: TypeAlias = dict[str, Any]


def _load(request: Mapping[str, Any]) -> Capture:
    """The capture that a request is about, without limits if it is trusted."""
    return Capture.load(request["file"], limits=Limits.none() if request.get("trust") else None)


def compile_capture(request: Mapping[str, Any]) -> Reply:
    """Rebuild a frame and compile it.

    Args:
        request: ``file``, ``backend`` and ``device`` (or ``None``); ``trust`` if it is to have no
            limits, here as everywhere.

    Returns:
        ``outcome``: ``compiled``; or ``failed`` with what `telling.told` says of the backend's exception.
    """
    compiler_fn = _torch.resolve_backend(request["backend"])
    instance = _load(request).instantiate(request["device"])
    started = time.perf_counter()
    try:
        instance.compile(compiler_fn)
    except BaseException as error:  # noqa: BLE001 - whatever a backend ends with is the answer
        return {"outcome": "failed", **told(error)}
    return {"outcome": "compiled", "milliseconds": _milliseconds(started)}


def run_capture(request: Mapping[str, Any]) -> Reply:
    """Compile a frame and run it on made-up inputs at several sizes, beside eager.

    Args:
        request: ``file``, ``backend``; ``sizes``: a list of maps from symbol name to value;
            ``absent``: names of modules that this process must not have.

    Returns:
        ``outcome``: ``ran``, with ``load``, ``compile`` (milliseconds) and ``runs``: one for each
        entry of ``sizes`` with the inputs' ``shapes``, milliseconds of ``eager``, of the
        ``first`` and the ``next`` call compiled, and ``difference``, the largest absolute one over
        outputs and inputs, because a frame may write into its inputs.
    """
    started = time.perf_counter()
    capture = _load(request)
    instance = capture.instantiate()
    load = _milliseconds(started)
    started = time.perf_counter()
    compiled = instance.compile(request["backend"])
    compiling = _milliseconds(started)
    eager = capture.compile("eager")
    runs = [_run_once(capture, compiled, eager, sizes) for sizes in request["sizes"]]
    present = sorted(set(request["absent"]) & set(sys.modules))
    if present:
        raise CaptureError(
            "the process has what it must not have",
            expected="only the capture file",
            found=", ".join(present),
        )
    return {"outcome": "ran", "load": load, "compile": compiling, "runs": runs}


def _run_once(
    capture: Capture,
    compiled: Callable[..., Any],
    eager: Callable[..., Any],
    sizes: Mapping[str, int],
) -> Reply:
    inputs = [capture.materialize(seed=0, sizes=sizes) for _ in range(3)]
    modes = torch.set_grad_enabled(capture.desc.modes.grad_enabled)
    with modes:
        expected, eager_time = _timed(eager, inputs[0])
        found, first_time = _timed(compiled, inputs[1])
        _, next_time = _timed(compiled, inputs[2])
    pairs = zip([*expected, *inputs[0]], [*found, *inputs[1]], strict=True)
    return {
        "shapes": {
            entry.name: list(value.shape)
            for entry, value in zip(capture.desc.inputs, inputs[0], strict=True)
            if isinstance(value, torch.Tensor)
        },
        "outputs": [list(value.shape) for value in expected if isinstance(value, torch.Tensor)],
        "eager": eager_time,
        "first": first_time,
        "next": next_time,
        "difference": max((_difference(a, b) for a, b in pairs), default=0.0),
    }


def run_sizes(request: Mapping[str, Any]) -> Reply:
    """Compile a frame once and run it at several sizes, beside eager.

    Args:
        request: ``file``, ``backend``, ``seed``; ``sizes``: a list of maps from symbol name to value.

    Returns:
        ``outcome``: ``ran``, with ``results``: for each entry of ``sizes`` a word and a text. The word
        is ``same``, ``wrong`` or ``raises``; an error of eager's too is the same.
        ``failed``, as `compile_capture`, if the frame does not compile.
    """
    from .trials import BesideEager  # what it takes is not loaded to replay a frame

    capture = _load(request)
    try:
        compiled = capture.compile(request["backend"])
    except Exception as error:  # noqa: BLE001 - whatever a backend ends with is the answer
        return {"outcome": "failed", **told(error)}
    beside = BesideEager(capture, seed=request["seed"])
    return {
        "outcome": "ran",
        "results": [_in_words(beside.run(compiled, sizes)) for sizes in request["sizes"]],
    }


def _in_words(trial: Mapping[str, Any]) -> tuple[str, str]:
    where = "in the backward pass: " if trial["stage"] == "backward" else ""
    match trial["outcome"]:
        case "passed":
            return "same", ""
        case "wrong":
            return "wrong", where + trial["text"]
        case _:
            return "raises", f"{where}{trial['type']}: {trial['message']}"


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
    """Find a backend.

    Args:
        request: ``backend``, its name.

    Returns:
        ``outcome``: ``found``; a name that is none is refused.
    """
    _torch.resolve_backend(request["backend"])
    return {"outcome": "found"}


def try_capture(request: Mapping[str, Any]) -> Reply:
    """Compile a frame, and run it if that is asked for; see `trials.run_trial`.

    Args:
        request: ``file``, ``backend``, ``seed``, ``device`` (or ``None``), ``runs``: whether to run it, and ``sizes`` to run it
            at by symbol name; ``constants``, if the values in the graph are to be computed again before
            anything else, with these in the place of others, and ``saved``: where the frame goes then.
    """
    from .trials import propagated, run_trial  # what it takes is not loaded to replay a frame

    capture = _load(request)
    if request.get("constants") is not None:
        constants = {int(old): new for old, new in request["constants"].items()}
        propagated(capture, constants).save(request["saved"])
        capture = Capture.load(request["saved"])
    return run_trial(
        capture,
        request["backend"],
        runs=request["runs"],
        sizes=request["sizes"],
        seed=request["seed"],
        device=request["device"],
    )


_TASKS: Mapping[str, Callable[[Mapping[str, Any]], Reply]] = {
    "none": dict,
    "backend": find_backend,
    "compile": compile_capture,
    "run": run_capture,
    "sizes": run_sizes,
    "try": try_capture,
}


def main(argv: Sequence[str]) -> int:
    """Carry out the request and write the reply; an exception is a reply, too."""
    request = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    try:
        reply = {"pid": os.getpid(), "torch": torch.__version__, **_TASKS[request["task"]](request)}
    except FakeifyError as error:
        reply = {"outcome": "refused", "error": type(error).__name__, "message": str(error)}
    except Exception as error:  # noqa: BLE001 - whoever asked wants to know which
        reply = {"outcome": "raised", **told(error)}
    Path(argv[1]).write_text(json.dumps(reply), encoding="utf-8")
    return 0


def serve() -> int:
    """Carry out what comes in on standard input, each in a forked child.

    A line there is a JSON object of paths: ``asked`` and ``answered`` are those of `main`, ``log`` gets
    what the child prints, ``directory`` is where it runs. The answers on standard output are the
    child's process number and, when it has ended, its exit status, negative a signal.
    """
    said = os.dup(1)
    os.dup2(2, 1)
    _torch.resolve_backend("eager")  # imports what every child needs to find a backend
    gc.collect()
    gc.freeze()  # a child's collector leaves alone, and so shares, what is there by now
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.close(said)
            _carry_out(json.loads(line))
        os.write(said, b"%d\n" % pid)
        _end_with_whoever_asks(pid)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what it leaves behind, while its number is its own
        _, status = os.waitpid(pid, 0)
        os.write(said, b"%d\n" % os.waitstatus_to_exitcode(status))
    return 0


def _end_with_whoever_asks(pid: int) -> None:
    """Wait for a child, and kill it if nobody is there any more to be told how it ends.

    Only Linux has a way to wait for both; elsewhere its answer comes too late.
    """
    try:
        child = os.pidfd_open(pid)
    except (AttributeError, OSError):
        return
    poll = select.poll()
    poll.register(child, select.POLLIN)
    poll.register(0, 0)  # that the other end of a pipe is closed is told unasked
    if child not in dict(poll.poll()):
        os.kill(
            pid, signal.SIGKILL
        )  # it may have no group yet; it is not waited for, so it is there
    os.close(child)


def _carry_out(job: Mapping[str, str]) -> NoReturn:
    """What the forked child does: it never comes back."""
    status = 1
    try:
        os.setsid()
        os.chdir(job["directory"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        status = main([job["asked"], job["answered"]])
    except BaseException:  # noqa: BLE001 - nobody is there to catch it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(serve() if sys.argv[1:] == ["--serve"] else main(sys.argv[1:]))
