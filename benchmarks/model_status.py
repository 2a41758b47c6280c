"""Which architectures compile: directly, through a handoff, with the drop-in, and from a record.

Run: ``python -m benchmarks.model_status [--out FILE] [--backend B] [--jobs N | --dask ADDRESS] [MODEL...]``;
it needs the ``model-status`` extra and a checkout. Each model is compiled with ``dynamic=True`` and called with
inputs of three sizes, in inference and in a training step, in a process of its own; then
``torch-fakeify replay`` compiles the frames that were recorded. JSON objects are written as soon as they
are there; what is in the file already is not run again. ``--table FILE`` prints the file as Markdown,
with what failed.

================ ===================================================================================
direct           results, and gradients, are those of the model without compilation
handoff          results, gradients, graphs, guards and facts are those of direct
drop-in          the same, with the describer and converter in place of torch's
recorded         frames that are recorded in a compilation of its own
replayed         those that compile, or fail as recorded, in a fresh process
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
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch._inductor.config

import torch_fakeify as tfk
from torch_fakeify.tools.worker.client import run_limited

from .checkout import ROOT, TESTS
from .status_models import NotBuiltError, architectures, built, libraries, tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Executor

    Job = tuple[str, Sequence[str], str]

MODES = ("inference", "training")
LIMIT = 600.0
ROW = '{"model": '
"""How lines of `status` begin; models may print others."""
CLOSE = {"rtol": 1e-3, "atol": 1e-4}
"""Of results with another order of sums."""


# --- one model, in a process of its own -------------------------------------------------------------


def status(name: str, modes: Sequence[str], backend: str, frames: Path) -> Iterator[dict[str, Any]]:
    """Compile one model in all ways but from a record; yield what was found in each mode.

    Args:
        name: of the architecture.
        modes: some of `MODES`.
        backend: compiles it.
        frames: where the records are written, in a folder for each mode.
    """
    known = {"model": name, "backend": backend}
    try:
        architecture = built(name)
    except NotBuiltError as error:
        yield from (known | {"mode": mode, "not built": str(error)} for mode in modes)
        return
    for mode in modes:
        found = _compiled(architecture, mode == "training", backend, frames / mode)
        yield known | {"mode": mode} | found


def _compiled(architecture: Any, training: bool, backend: str, frames: Path) -> dict[str, Any]:
    from compare import difference
    from compiled_programs import Model

    program = Model(model=architecture, training=training, dynamic=True)
    with tfk.recording(frames):  # the first compilation imports modules: it is not compared
        unlike = _unlike_eager(program, backend)
    direct = _observed(program, backend, direct=True)
    raised = [row[1:] for row in direct.seen if row[0].endswith("raised")]
    handoff = _observed(program, backend, direct=False)
    tfk.dropin.install()
    try:
        dropped_in = _observed(program, backend, direct=True)
    finally:
        tfk.dropin.uninstall()
    return {
        "graphs": len(direct.envs),
        "recompiles": direct.recompiles,
        "guards": sum(map(len, direct.guards)),
        "direct": f"{raised[0][0]}: {raised[0][1]}".partition("\n")[0] if raised else unlike,
        "handoff": difference(handoff, direct),
        "drop-in": difference(dropped_in, direct),
        "recorded": len(list(frames.rglob("*.fkf"))),
    }


def _observed(program: Any, backend: str, **options: Any) -> Any:
    """A run; the order of Dynamo's guards, in which two runs of torch alone may differ, is left out."""
    from observe import observed

    run = observed(program, backend, **options)
    run.seen = [(row[0], sorted(row[1])) if row[0] == "guards" else row for row in run.seen]
    return run


def _unlike_eager(program: Any, backend: str) -> str | None:
    """How results or gradients differ from those without compilation; ``None``: they do not."""
    expected = _results(program, None)
    try:
        found = _results(program, backend)
    except Exception as error:  # noqa: BLE001 - of torch
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    try:
        torch.testing.assert_close(found, expected, equal_nan=True, **CLOSE)
    except AssertionError as error:
        return str(error).partition("\n")[0]
    return None


@torch._inductor.config.patch(fallback_random=True)
def _results(program: Any, backend: str | None) -> list[list[torch.Tensor]]:
    """Results and gradients of all calls.

    Random numbers of inductor are those of eager. A gradient that is ``None`` is zero: compiled code has one
    for each weight of its graph.
    """
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
        weights = model.parameters() if training else ()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in weights]
        results.append([t.detach().clone() for t in (*tensors, *gradients)])
    return results


# --- all of them ------------------------------------------------------------------------------------


def in_process(name: str, modes: Sequence[str], backend: str, limit: float) -> list[dict[str, Any]]:
    """Run `status` in a process of its own, and compile what it recorded in others.

    Args:
        name: of the architecture.
        modes: some of `MODES`.
        backend: compiles it.
        limit: seconds after which the process is killed.
    """
    with tempfile.TemporaryDirectory() as frames:
        rows = list(_in_process(name, modes, backend, Path(frames), limit))
        return [row | _replayed(row, Path(frames, row["mode"])) for row in rows]


def _in_process(
    name: str, modes: Sequence[str], backend: str, frames: Path, limit: float
) -> Iterator[dict[str, Any]]:
    one = json.dumps([name, list(modes), backend, str(frames)])
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *TESTS]),
    }
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as log:
        ending, code = run_limited(
            lambda: subprocess.Popen(
                [sys.executable, "-m", "benchmarks.model_status", "--one", one],
                stdout=out,
                stderr=log,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            ),
            timeout=limit,
        )
        out.seek(0)
        log.seek(0)
        rows = [json.loads(line) for line in out if line.startswith(ROW)]
        error = f"longer than {limit:g} s"
        if ending == "ended":
            what = f"status {code}" if code else "nothing was printed"
            error = " ".join([f"{what}:", *[line for line in log if line.strip()][-1:]]).strip()
    yield from rows
    for mode in modes:
        if mode not in {row["mode"] for row in rows}:
            yield {"model": name, "backend": backend, "mode": mode, "error": error}


def _replayed(row: dict[str, Any], frames: Path) -> dict[str, Any]:
    """How many of the recorded frames do in a fresh process what they did here, and why the others do not."""
    if not row.get("recorded"):
        return {"replayed": 0, "replay": None} if "recorded" in row else {}
    verdicts = frames / "replayed.jsonl"
    command = [sys.executable, "-m", "torch_fakeify", "replay", "--jobs", "1", "--jsonl"]
    done = subprocess.run(
        [*command, str(verdicts), str(frames)], capture_output=True, text=True, check=False
    )
    lines = verdicts.read_text().splitlines() if verdicts.exists() else []
    found = [json.loads(line) for line in lines]
    bad = [verdict for verdict in found if not verdict["holds"]]
    reason = None
    if bad:
        reason = f"{bad[0]['verdict']}: {' '.join(bad[0]['details'])}"
    elif len(found) < row["recorded"]:
        reason = f"no verdict: {(done.stderr or done.stdout)[-300:]}"
    return {"replayed": len(found) - len(bad), "replay": reason}


def run(
    jobs: Iterable[Job], executor: Executor, limit: float, *, window: int
) -> Iterator[dict[str, Any]]:
    """Yield what is found of each as soon as it is there.

    Args:
        jobs: architecture, modes and backend.
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
        for future in done:
            yield from future.result()


# --- the table --------------------------------------------------------------------------------------

COLUMNS = ("direct", "handoff", "drop-in")
COUNTS = ("graphs", "recompiles", "guards", "recorded", "replayed")


def table(versions: dict[str, str], rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield a table in Markdown for each backend and library, then what failed and what was not built.

    Args:
        versions: of the libraries.
        rows: see `merged`.
    """
    yield f"With {', '.join(f'{name} {version}' for name, version in versions.items())}."
    failures: list[str] = []
    not_built: dict[str, str] = {}
    tables: dict[tuple[str, str], dict[str, dict[str, dict[str, Any]]]] = {}
    for row in rows:
        model, backend = row["model"], row["backend"]
        if "not built" in row:
            not_built[model] = row["not built"]
            continue
        library, _, kind = model.partition(".")
        tables.setdefault((backend, library), {}).setdefault(kind, {})[row["mode"]] = row
        failures += [
            f"- {model}, {row['mode']}, {backend}, {name}: {row[name]}"
            for name in ("error", *COLUMNS, "replay")
            if row.get(name)
        ]
    for (backend, library), models in sorted(tables.items()):
        yield from ("", f"### {library}, {backend}", "")
        yield f"| {' | '.join(['model', *COLUMNS, *COUNTS])} |"
        yield "|---" * (1 + len(COLUMNS) + len(COUNTS)) + "|"
        for kind, by_mode in sorted(models.items()):
            cells = [_in_modes(by_mode, name, _verdict) for name in COLUMNS]
            cells += [_in_modes(by_mode, name, _count) for name in COUNTS]
            yield f"| {' | '.join([kind, *cells])} |"
    if failures:
        yield from ("", "### What failed", "", *sorted(failures))
    if not_built:
        yield from ("", "### Not built", "")
        yield from (f"- {model}: {reason}" for model, reason in sorted(not_built.items()))


def _in_modes(
    by_mode: dict[str, dict[str, Any]], name: str, text: Callable[[dict[str, Any], str], str]
) -> str:
    """A cell: the text of both modes, once if they are equal."""
    texts = [text(by_mode[mode], name) for mode in MODES if mode in by_mode]
    return ", ".join(dict.fromkeys(texts) if len(by_mode) == len(MODES) else texts)


def _verdict(row: dict[str, Any], name: str) -> str:
    if "error" in row:
        return "error"
    return "equal" if row[name] is None else "no"


def _count(row: dict[str, Any], name: str) -> str:
    return str(row.get(name, ""))


def merged(lines: Iterable[str]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return the objects of a file by model, mode and backend; the last one of each.

    Args:
        lines: of the file, without the first one, which has the versions.
    """
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in map(json.loads, lines):
        rows[row["model"], row["mode"], row["backend"]] = row
    return rows


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
    parser.add_argument("--versions", action="store_true", help="print the first line of a file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        name, modes, backend, frames = json.loads(args.one)
        for row in status(name, modes, backend, Path(frames)):
            print(json.dumps(row), flush=True)
        return
    if args.table:
        versions, *lines = args.table.read_text().splitlines()
        print("\n".join(table(json.loads(versions), merged(lines).values())))
        return
    if args.versions:
        print(json.dumps(libraries()))
        return
    known = architectures()
    names = args.models or known
    if unknown := sorted({*names} - {*known}):
        parser.error(f"no such architecture: {', '.join(unknown)}")
    versions = json.dumps(libraries())
    if not args.out.exists():
        args.out.write_text(versions + "\n")
    first, *lines = args.out.read_text().splitlines()
    if first != versions:
        parser.error(
            f"{args.out} was made with {first}, and these are {versions}: take another --out"
        )
    rows = merged(lines)
    with args.out.open("a") as out:
        for row in found_by(args, names, rows):
            print(json.dumps(row), file=out, flush=True)
            print(*_short(row), flush=True)


def found_by(
    args: argparse.Namespace, names: Sequence[str], rows: dict[tuple[str, str, str], dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Run on this machine or on a cluster what is not known yet.

    Args:
        args: of the command.
        names: of the architectures.
        rows: what is known, see `merged`.
    """
    modes = [args.mode] if args.mode else MODES
    jobs: list[Job] = [
        (name, left, args.backend)
        for name in names
        if (left := [mode for mode in modes if (name, mode, args.backend) not in rows])
    ]
    with ExitStack() as stack:
        executor: Executor
        if args.dask:
            from torch_fakeify.corpus.dask_cluster import dask_cluster

            cluster = stack.enter_context(dask_cluster(args.dask))
            executor, window = cluster.executor, cluster.window
        else:
            executor, window = stack.enter_context(ThreadPoolExecutor(args.jobs)), args.jobs
        yield from run(jobs, executor, args.limit, window=window)


def _short(row: dict[str, Any]) -> Iterator[str]:
    yield row["model"]
    yield row["mode"]
    names = ("not built", "error", *COLUMNS, "replay")
    reasons = [f"{name}: {row[name]}" for name in names if row.get(name)]
    yield "; ".join(reasons)[:200] or "equal"


if __name__ == "__main__":
    main()
