"""Ten planted bugs, made small by torch's minifier and by ``torch-fakeify minify``.

Run: ``python -m benchmarks.minifiers [BUG...]``; it needs a checkout: the bugs and the model are those of the
tests. Each tool gets the same program and the same backend, and 300 s; sizes are symbols only where the
bug needs it, because torch's minifier loses most frames that have any. Torch's is used as
documented: ``TORCHDYNAMO_REPRO_AFTER=dynamo`` with level 2, for wrong numbers level 4, then the launcher that
it writes. A bug counts as found if what the tool leaves (of torch's: ``repro.py``, else the smallest
checkpoint) fails in the same way when it is run; the size is the number of operations in it. Times
are of the whole way from the program to the result, imports included.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.table import Table

from .checkout import ROOT, TESTS

if TYPE_CHECKING:
    from planted_bugs import Bug

LIMIT = 300.0
MARKS = {
    "bug_rejects_op": "no kernel for softmax",
    "bug_rejects_pattern": "has no schedule",
    "bug_segfaults": "",
    "bug_hangs": "",
    "bug_miscompiles": "",
    "bug_wrong_gradient": "",
    "bug_raises_when_run": "lane 33 of 32",
    "bug_dynamic_only": "cannot tile rows",
    "bug_aliased_only": "overlap",
    "bug_guard_only": "cannot print",
}
"""The message of the bug, if it has one."""

PROGRAM = """
import sys
import torch
from planted_bugs import example

model, inputs = example()
backend, dynamic = sys.argv[1], True if sys.argv[2] == "dynamic" else None
if len(sys.argv) > 3:
    import torch_fakeify
    backend = torch_fakeify.record(sys.argv[3])
outputs = torch.compile(model, backend=backend, dynamic=dynamic)(*inputs)
if len(sys.argv) <= 3:
    outputs[0].sum().backward()
"""


class Result(NamedTuple):
    """What a tool made of a bug."""

    found: bool
    operations: int | None
    seconds: float
    note: str = ""


def run(
    *command: str, folder: Path, limit: float = LIMIT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python; a run that takes too long ends with status 124."""
    try:
        return subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env={**os.environ, **environment},
            timeout=limit,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", "")


def ours(bug: Bug, folder: Path, program: list[str]) -> Result:
    """`torch-fakeify minify` on a capture of the frame."""
    start = time.monotonic()
    run(*program, str(folder / "captures"), folder=folder)
    (capture,) = (folder / "captures").glob("*.fkf")
    extra = ["--accuracy"] if bug.accuracy else []
    extra += ["--timeout", "5"] if bug.backend == "bug_hangs" else []
    command = ["-m", "torch_fakeify", "minify", str(capture), "--backend", bug.backend, *extra]
    done = run(*command, "-o", str(folder / "small.fkf"), folder=folder)
    seconds = time.monotonic() - start
    found = re.search(r"operations: \d+ -> (\d+)", done.stdout)
    if done.returncode != 0 or found is None:
        return Result(False, None, seconds, (done.stderr.strip().splitlines() or [""])[-1][:60])
    same = "script: fails in the same way" in done.stdout
    return Result(True, int(found[1]), seconds, "" if same else "no script")


def torchs(bug: Bug, folder: Path, program: list[str]) -> Result:
    """Torch's minifier, from the program."""
    start = time.monotonic()
    level = "4" if bug.accuracy and not MARKS[bug.backend] else "2"
    environment = {
        "TORCHDYNAMO_REPRO_AFTER": "dynamo",
        "TORCHDYNAMO_REPRO_LEVEL": level,
        "TORCH_COMPILE_DEBUG_DIR": str(folder),
    }
    limit = 30.0 if bug.backend == "bug_hangs" else LIMIT
    run(*program, folder=folder, limit=limit, **environment)
    launchers = sorted(folder.rglob("minifier_launcher.py"))
    if not launchers:
        return Result(False, None, time.monotonic() - start, "no launcher is written")
    run(str(launchers[0]), folder=launchers[0].parent, limit=limit)
    seconds = time.monotonic() - start
    home = launchers[0].parent
    repro = [*home.rglob("repro.py"), *folder.rglob("repro.py")][:1]
    checkpoints = sorted(home.rglob("minified_*_nodes.py"), key=_operations)
    for path in [*repro, *checkpoints]:
        if _fails(path, bug.backend, bug.accuracy):
            return Result(True, _operations(path), seconds, "" if path in repro else "checkpoint")
    return Result(False, None, seconds, "what is left does not fail" if repro else "nothing left")


def _operations(path: Path) -> int:
    """How many operations the graph in a script of torch's has."""
    text = path.read_text()
    body = re.search(r"def forward\(self.*?\n(.*?)\n *return", text, re.DOTALL)
    lines = body[1].splitlines() if body else []
    taken = re.compile(r"^\s*\w+ = \w+(;.*)?$")  # an argument by another name
    return sum(1 for line in lines if "=" in line and not taken.match(line))


def _fails(path: Path, bug: str, accuracy: bool) -> bool:
    """Whether a script of torch's fails as the program did."""
    done = run(str(path), folder=path.parent, limit=60.0)
    if bug == "bug_segfaults":
        return done.returncode < 0
    if bug == "bug_hangs":
        return done.returncode == 124
    if MARKS[bug]:
        return done.returncode != 0 and MARKS[bug] in done.stderr
    return accuracy and done.returncode != 0 and "AccuracyError" in done.stderr


def main() -> None:
    """Print the table."""
    sys.path[:0] = TESTS
    from planted_bugs import BACKENDS, BUGS
    from planting import plant_in

    parser = argparse.ArgumentParser(prog="python -m benchmarks.minifiers", description=__doc__)
    parser.add_argument("bugs", nargs="*", metavar="BUG", help=", ".join(b.backend for b in BUGS))
    chosen = parser.parse_args().bugs
    table = Table("bug", "torch: found", "operations", "s", "ours: found", "operations", "s")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        paths = [plant_in(root / "plant", BACKENDS), *TESTS, str(ROOT)]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        program = root / "program.py"
        program.write_text(PROGRAM)
        for bug in BUGS:
            if chosen and bug.backend not in chosen:
                continue
            cells = [bug.backend.removeprefix("bug_").replace("_", " ")]
            for tool in (torchs, ours):
                folder = root / f"{bug.backend}-{tool.__name__}"
                folder.mkdir()
                how = "dynamic" if bug.dynamic else "static"
                result = tool(bug, folder, [str(program), bug.backend, how])
                shutil.rmtree(folder)
                word = "yes" if result.found else "no"
                cells.append(f"{word} ({result.note})" if result.note else word)
                cells.append("-" if result.operations is None else str(result.operations))
                cells.append(f"{result.seconds:.0f}")
            print(" | ".join(cells), flush=True)
            table.add_row(*cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
