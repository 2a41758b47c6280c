"""Fuzz the reader of capture files.

``python tests/harness/fuzz_captures.py --engine atheris|hypothesis --inputs N [--seed S]
[--stage load|instantiate|fresh|materialize|stubs] [--out DIRECTORY]``

``hypothesis`` changes valid captures by their structure. ``atheris`` does the same and keeps what
reaches new code of the package (it needs the extra ``fuzz``). Every input is checked as
``hostile_checks`` says; the process that reads them is a child, so that it may die. Findings are
saved as ``NUMBER.fkf``, made small, beside ``NUMBER.txt``. Exit status 1 if there is one.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "zoo"))

import argparse
import collections
import faulthandler
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STAGES = ("load", "instantiate", "fresh", "materialize", "stubs")
_GONE = {"gone", "gone_kinds", "gone_inferred"}
REFUSED = {"instantiate": _GONE, "fresh": _GONE, "materialize": {"functorch", *_GONE}}
"""Captures that a stage refuses: of operators that are not here; a tensor inside a transform."""
SLICE = 20_000
"""Inputs of one child: what torch and sympy keep for each does not grow for ever."""
DEADLY = 120
"""Seconds of real time for a hundred inputs, after which a child that hangs in C dies."""


def main() -> int:
    """Run an engine in children until enough inputs were tried."""
    args = _arguments()
    out = Path(args.out or tempfile.mkdtemp(prefix="fuzz-captures-"))
    out.mkdir(parents=True, exist_ok=True)
    if args.child:
        return _child(args, out)
    start = time.perf_counter()
    _write_seeds(out)
    total = _Tally()
    number = failed = 0
    memory = Path("/dev/shm")  # where a file is written in no time
    current = (memory if memory.is_dir() else out) / f"fuzz-captures-{os.getpid()}.fkf"
    while total.inputs < args.inputs and failed < 20:
        count = min(SLICE, args.inputs - total.inputs)
        command = [sys.executable, *_options(), __file__, "--child", "--engine", args.engine]
        command += ["--inputs", str(count), "--seed", str(args.seed + number)]
        command += ["--stage", args.stage, "--out", str(out), "--current", str(current)]
        log = out / "child.log"
        with log.open("wb") as file:
            status = subprocess.run(command, stdout=file, stderr=file, check=False).returncode
        tally = out / "tally.json"
        part = _Tally(**json.loads(tally.read_text())) if tally.exists() else _Tally()
        tally.unlink(missing_ok=True)
        total.add(part)
        if status:
            failed += 1
            text = f"status {status}\n{log.read_text(errors='replace')[-6000:]}"
            if current.exists():
                _save(out, total, f"the child died, status {status}", current.read_bytes(), text)
            else:
                print(text)
            if not part.inputs:
                break  # it does not even take the seeds
        number += 1
    current.unlink(missing_ok=True)
    print("\n".join(total.lines(time.perf_counter() - start)))
    print(f"in {out}")
    return 1 if total.findings or failed else 0


def _options() -> list[str]:
    return [f"-X{name}" for name in sys._xoptions] + ["-W" + option for option in sys.warnoptions]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fuzz the reader of capture files.")
    parser.add_argument("--engine", choices=("hypothesis", "atheris"), default="hypothesis")
    parser.add_argument("--inputs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stage", choices=STAGES, default="load")
    parser.add_argument("--out", help="default: a new temporary directory")
    parser.add_argument("--current", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


class _Tally:
    """What became of the inputs."""

    def __init__(
        self,
        inputs: int = 0,
        loaded: int = 0,
        refused: dict[str, int] | None = None,
        findings: dict[str, int] | None = None,
    ) -> None:
        self.inputs, self.loaded = inputs, loaded
        self.refused = collections.Counter(refused or {})
        self.findings = collections.Counter(findings or {})

    def add(self, other: _Tally) -> None:
        """Count another part of the same run."""
        self.inputs += other.inputs
        self.loaded += other.loaded
        self.refused.update(other.refused)
        self.findings.update(other.findings)

    def lines(self, seconds: float) -> list[str]:
        """The report."""
        rate = self.inputs / max(seconds, 1e-9)
        lines = [f"{self.inputs} inputs in {seconds:.0f} s ({rate:.0f} a second)"]
        lines += [f"{self.loaded:8} taken as a capture"]
        lines += [f"{count:8} refused by {name}" for name, count in self.refused.most_common()]
        lines += [f"{count:8} FINDING {name}" for name, count in self.findings.most_common()]
        return lines if self.findings else [*lines, "no findings"]


def _write_seeds(out: Path) -> None:
    folder = out / "seeds"
    if folder.exists():
        return
    import hostile_seeds

    folder.mkdir()
    for name, data in hostile_seeds.seeds().items():
        (folder / f"{name}.fkf").write_bytes(data)


def _save(out: Path, tally: _Tally, kind: str, data: bytes, text: str) -> None:
    tally.findings[kind] += 1
    name = hashlib.sha256(kind.encode()).hexdigest()[:8]
    if not (out / f"{name}.fkf").exists():
        (out / f"{name}.fkf").write_bytes(data)
        (out / f"{name}.txt").write_text(f"{kind}\n\n{text}\n")


# --- the child --------------------------------------------------------------------------------------


class _Target:
    """Takes one input after the other."""

    def __init__(self, args: argparse.Namespace, out: Path) -> None:
        import hostile_checks
        import program_ops  # noqa: F401 - operators that a capture names

        self.args, self.out, self.checks = args, out, hostile_checks
        self.tally = _Tally()
        self.path: Path = args.current
        self.watch = hostile_checks.Watch()
        without = REFUSED.get(args.stage, set[str]())
        paths = [path for path in sorted((out / "seeds").iterdir()) if path.stem not in without]
        if args.stage == "stubs":
            for path in paths:  # a changed file may have a view, a sparse tensor or the like
                if path.stem not in _GONE:
                    hostile_checks.warm_up(path, "instantiate")
            paths = [path for path in paths if path.stem in _GONE]
        self.seeds = [path.read_bytes() for path in paths]
        for seed in self.seeds:
            self.path.write_bytes(seed)
            hostile_checks.warm_up(self.path, args.stage)  # what is imported on first use is so now
            outcome = self.examine(seed)
            assert outcome.word == "loaded", outcome
        faulthandler.enable()

    def examine(self, data: bytes) -> Any:
        """What becomes of an input."""
        self.path.write_bytes(data)
        return self.checks.examine(self.path, self.args.stage, self.watch)

    def take(self, data: bytes) -> None:
        """Examine an input and count what became of it."""
        tally = self.tally
        if tally.inputs % 100 == 0:  # it costs more than most inputs
            faulthandler.dump_traceback_later(DEADLY, exit=True)
        outcome = self.examine(data)
        tally.inputs += 1
        if outcome.word == "loaded":
            tally.loaded += 1
        elif outcome.word == "refused":
            tally.refused[f"{outcome.layer}: {outcome.kind}"] += 1
        else:
            self._keep(data, outcome)
        if tally.inputs % 200 == 0:
            self.write()

    def _keep(self, data: bytes, outcome: Any) -> None:
        from hostile_mutator import minimize

        small = data
        if outcome.kind not in self.tally.findings:
            faulthandler.dump_traceback_later(10 * DEADLY, exit=True)
            slow = outcome.kind.startswith(("Hang", "MemoryError"))
            small = minimize(
                data, lambda d: self.examine(d).kind == outcome.kind, 20 if slow else 300
            )
        _save(self.out, self.tally, outcome.kind, small, outcome.text)

    def write(self) -> None:
        """Leave the tally where the parent finds it."""
        fields = {name: getattr(self.tally, name) for name in vars(self.tally)}
        (self.out / "tally.json").write_text(json.dumps(fields))


def _child(args: argparse.Namespace, out: Path) -> int:
    if args.engine == "atheris":
        _run_atheris(args, out)
    else:
        _run_hypothesis(args, out)
    return 0


def _run_hypothesis(args: argparse.Namespace, out: Path) -> None:
    from hostile_mutator import Mutator
    from hypothesis import HealthCheck, Phase, given, seed, settings
    from hypothesis import strategies as st

    target = _Target(args, out)
    number = 0
    while target.tally.inputs < args.inputs:
        # In runs of their own: hypothesis remembers all that a run has tried.
        @seed(args.seed * 1_000_003 + number)
        @settings(
            max_examples=min(1000, args.inputs - target.tally.inputs),
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(st.sampled_from(target.seeds), st.randoms(use_true_random=False))
        def one(data: bytes, choices: random.Random) -> None:
            target.take(Mutator(choices, target.seeds).mutate(data))

        one()
        number += 1
    target.write()


def _run_atheris(args: argparse.Namespace, out: Path) -> None:
    import atheris
    import torch  # noqa: F401 - not instrumented

    with atheris.instrument_imports(include=["torch_fakeify"]):
        target = _Target(args, out)
        from hostile_files import unpack
        from hostile_mutator import Mutator
    corpus = out / "corpus"
    corpus.mkdir(exist_ok=True)

    def mutate(data: bytes, max_size: int, number: int) -> bytes:
        choices = random.Random(number)
        if choices.randrange(50) == 0:
            return atheris.Mutate(data, max_size)
        if choices.randrange(8) == 0 or (unpack(data) is None and choices.randrange(4)):
            data = choices.choice(target.seeds)
        return Mutator(choices, target.seeds).mutate(data)[:max_size]

    def test(data: bytes) -> None:
        target.take(data)
        if target.tally.inputs >= args.inputs:
            target.write()
            os._exit(0)  # libFuzzer leaves in no other way that keeps the status

    flags = [
        f"-seed={args.seed + 1}",
        "-rss_limit_mb=0",
        "-timeout=600",
        "-len_control=0",
        "-mutate_depth=1",
    ]
    flags += ["-max_len=4000000", f"-artifact_prefix={out}/", "-use_value_profile=0"]
    folders = [str(corpus), str(out / "seeds")]
    atheris.Setup([sys.argv[0], *flags, *folders], test, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
