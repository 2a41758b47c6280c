"""Which architectures compile: directly, through a handoff, with the drop-in, and from a record.

Run: ``python -m benchmarks.model_status [--out FILE] [--backend B] [--jobs N | --dask ADDRESS] [MODEL...]``;
it needs the ``models`` extra and a checkout. Each model is compiled with ``dynamic=True`` and called with
inputs of three sizes, in inference and in a training step, each in a process of its own. A JSON object is
written for each as soon as it is there; those that are in the file already are not run again.
``--table FILE`` prints the file as Markdown.

================ ===================================================================================
direct           results, and gradients, are those of the model without compilation
handoff          results, gradients, graphs, guards and facts are those of direct
drop-in          the same, with the describer and converter in place of torch's
recorded         frames that were recorded while direct ran
replayed         those that a fresh process compiles
================ ===================================================================================
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import torch_fakeify as tfk

from .checkout import ROOT, TESTS
from .status_models import NotBuiltError, architectures, built, tensors_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from concurrent.futures import Executor

MODES = ("inference", "training")
LIMIT = 300.0
CLOSE = {"rtol": 1e-3, "atol": 1e-4}
"""Of results with another order of sums."""


# --- one model, in a process of its own -------------------------------------------------------------


def status(name: str, mode: str, backend: str) -> dict[str, Any]:
    """Compile one model in all ways.

    Args:
        name: of the architecture.
        mode: one of `MODES`.
        backend: compiles it.
    """
    from compare import difference
    from compiled_programs import Model

    found: dict[str, Any] = {"model": name, "mode": mode, "backend": backend}
    try:
        architecture = built(name)
    except NotBuiltError as error:
        return found | {"not built": str(error)}
    training = mode == "training"
    program = Model(model=architecture, training=training, dynamic=True, warm=True)  # type: ignore[arg-type]
    direct = _observed(program, backend, direct=True)
    raised = [row[1:] for row in direct.seen if row[0].endswith("raised")]
    found["graphs"] = len(direct.envs)
    found["recompiles"] = direct.recompiles
    found["guards"] = sum(map(len, direct.guards))
    found["direct"] = (
        f"{raised[0][0]}: {raised[0][1]}" if raised else _unlike_eager(program, backend)
    )
    handoff = _observed(program, backend, direct=False)
    found["handoff"] = difference(handoff, direct)
    tfk.dropin.install()
    try:
        found["drop-in"] = difference(_observed(program, backend, direct=True), direct)
    finally:
        tfk.dropin.uninstall()
    with tempfile.TemporaryDirectory() as folder:
        with tfk.recording(folder):
            _observed(program, backend, direct=True, record=False)
        found |= _replayed(Path(folder), backend)
    return found


def _observed(program: Any, backend: str, **options: Any) -> Any:
    """A run; the order of Dynamo's guards, in which two runs of torch alone may differ, is left out."""
    from observe import observed

    run = observed(program, backend, **options)
    run.seen = [(row[0], sorted(row[1])) if row[0] == "guards" else row for row in run.seen]
    return run


def _unlike_eager(program: Any, backend: str) -> str | None:
    """How results or gradients differ from those without compilation; ``None``: they do not."""
    sides = [_results(program, one) for one in (None, backend)]
    try:
        torch.testing.assert_close(*sides, equal_nan=True, **CLOSE)
    except AssertionError as error:
        return str(error).partition("\n")[0]
    return None


def _results(program: Any, backend: str | None) -> list[list[torch.Tensor]]:
    torch._dynamo.reset()
    architecture, training = program.model, program.training
    torch.manual_seed(0)
    model = architecture.make().train(training)
    compiled = model if backend is None else torch.compile(model, backend=backend, dynamic=True)
    results: list[list[torch.Tensor]] = []
    torch.manual_seed(0)
    for inputs in architecture.calls():
        model.zero_grad()
        torch.manual_seed(1)
        with torch.set_grad_enabled(training):
            tensors = [t for t in tensors_of(compiled(**inputs)) if t.is_floating_point()]
            if training:
                torch.stack([t.float().sum() for t in tensors if t.requires_grad]).sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results.append([t.detach().clone() for t in (*tensors, *gradients)])
    return results


def _replayed(folder: Path, backend: str) -> dict[str, Any]:
    """Replay what was recorded, in fresh processes."""
    files = sorted(folder.rglob("*.fkf"))
    rows = folder / "replayed.jsonl"
    command = ["replay", "--backend", backend, "--jobs", "1", "--jsonl", rows, folder]
    python = [sys.executable, "-m", "torch_fakeify"]
    done = subprocess.run(
        [*python, *map(str, command)], capture_output=True, text=True, check=False
    )
    verdicts = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
    bad = [row for row in verdicts if row.get("verdict") != "compiles"]
    if len(verdicts) < len(files) or bad:
        tail = str(bad[0]) if bad else (done.stderr or done.stdout)[-300:]
    else:
        tail = None
    return {"recorded": len(files), "replayed": len(verdicts) - len(bad), "replay": tail}


# --- all of them ------------------------------------------------------------------------------------


def in_process(name: str, mode: str, backend: str, limit: float) -> dict[str, Any]:
    """Run `status` in a process of its own, for at most some seconds.

    Args:
        name: of the architecture.
        mode: one of `MODES`.
        backend: compiles it.
        limit: seconds after which the process is killed.
    """
    known = {"model": name, "mode": mode, "backend": backend}
    command = [sys.executable, "-m", "benchmarks.model_status", "--one", name, mode, backend]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *TESTS]),
    }
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=limit,
            cwd=ROOT,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return known | {"error": f"longer than {limit:g} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        return known | {"error": f"status {done.returncode}: {' '.join(last)}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def run(
    jobs: Iterable[tuple[str, str, str]], executor: Executor, limit: float, *, window: int
) -> Iterator[dict[str, Any]]:
    """Yield the status of each as soon as it is there.

    Args:
        jobs: architecture, mode and backend.
        executor: runs `in_process`.
        limit: seconds for each.
        window: how many are submitted at a time.
    """
    left, pending = iter(jobs), set[Any]()
    while True:
        while len(pending) < window and (job := next(left, None)) is not None:
            pending.add(executor.submit(in_process, *job, limit))
        if not pending:
            return
        done, pending = wait(pending, return_when=FIRST_COMPLETED)
        yield from (future.result() for future in done)


# --- the table --------------------------------------------------------------------------------------

COLUMNS = ("direct", "handoff", "drop-in")


def table(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table in Markdown, and after it what failed."""
    failures: list[str] = []
    left_out: list[str] = []
    yield "| model | mode | direct | handoff | drop-in | graphs | recompiles | guards | recorded | replayed |"
    yield "|---" * 10 + "|"
    for row in sorted(rows, key=lambda row: (row["model"], row["backend"], row["mode"])):
        what = f"{row['model']}, {row['mode']}, {row['backend']}"
        if "not built" in row:
            left_out.append(f"- {row['model']}: {row['not built']}")
            continue
        if "error" in row:
            failures.append(f"- {what}: {row['error']}")
            yield f"| {row['model']} | {row['mode']} | error |" + " |" * 7
            continue
        bad = [name for name in (*COLUMNS, "replay") if row[name] is not None]
        failures += [f"- {what}, {name}: {row[name]}" for name in bad]
        cells = ["equal" if row[name] is None else "no" for name in COLUMNS]
        counts = [
            str(row[name]) for name in ("graphs", "recompiles", "guards", "recorded", "replayed")
        ]
        yield f"| {' | '.join([row['model'], row['mode'], *cells, *counts])} |"
    yield from ("", *failures, "", *dict.fromkeys(left_out))


def main() -> None:
    """Run what is not in the file yet, or print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: all")
    parser.add_argument("--out", type=Path, default=Path("model_status.jsonl"))
    parser.add_argument("--backend", default="aot_eager", help="default: %(default)s")
    parser.add_argument("--mode", choices=MODES, help="default: both")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds; default: %(default)s")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    where.add_argument(
        "--dask", metavar="ADDRESS", help="of a scheduler, with workers in this checkout"
    )
    parser.add_argument("--table", type=Path, metavar="FILE", help="print a file as Markdown")
    parser.add_argument(
        "--one", nargs=3, metavar=("MODEL", "MODE", "BACKEND"), help=argparse.SUPPRESS
    )
    args = parser.parse_args()
    if args.one:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        print(json.dumps(status(*args.one)))
        return
    if args.table:
        print("\n".join(table(map(json.loads, args.table.read_text().splitlines()))))
        return
    names = args.models or architectures()
    if unknown := sorted({*names} - {*architectures()}):
        parser.error(f"no such architecture: {', '.join(unknown)}")
    modes = [args.mode] if args.mode else MODES
    rows = map(json.loads, args.out.read_text().splitlines()) if args.out.exists() else ()
    known = {(row["model"], row["mode"], row["backend"]) for row in rows}
    jobs = [
        job for name in names for mode in modes if (job := (name, mode, args.backend)) not in known
    ]
    with args.out.open("a") as out:
        for row in run_on(args, jobs):
            print(json.dumps(row), file=out, flush=True)
            print(*_short(row), flush=True)


def run_on(args: argparse.Namespace, jobs: list[tuple[str, str, str]]) -> Iterator[dict[str, Any]]:
    """Run jobs on this machine or on a cluster.

    Args:
        args: of the command.
        jobs: see `run`.
    """
    if args.dask:
        from torch_fakeify.corpus.dask_cluster import dask_cluster

        with dask_cluster(args.dask) as cluster:
            yield from run(jobs, cluster.executor, args.limit, window=cluster.window)
    else:
        with ThreadPoolExecutor(args.jobs) as threads:
            yield from run(jobs, threads, args.limit, window=args.jobs)


def _short(row: dict[str, Any]) -> Iterator[str]:
    yield row["model"]
    yield row["mode"]
    reasons = (f"{name}: {row[name]}" for name in ("not built", "error") if name in row)
    reasons = [
        *reasons,
        *(f"{name}: {row[name]}" for name in (*COLUMNS, "replay") if row.get(name)),
    ]
    yield "; ".join(reasons)[:200] or "equal"


if __name__ == "__main__":
    main()
