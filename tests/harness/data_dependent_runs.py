"""Compile the data-dependent programs with torch alone and with entailment, and compare with Python.

python tests/harness/data_dependent_runs.py            # the table, by aot_eager
python tests/harness/data_dependent_runs.py --kind slicing --backend inductor
"""

from __future__ import annotations

import argparse
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import data_dependent
import torch
from data_dependent import PROGRAMS, Program
from quiet import quiet

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_CHECKS = "It would follow with:\n"


class Verdict(NamedTuple):
    """What a compilation says of a program."""

    state: str
    """``compiles``, ``open`` (a data-dependent condition), ``fails`` (anything else), ``wrong``."""
    detail: str = ""
    """For ``open`` with entailment the first check that is suggested; else the error's first line."""


def settings() -> Any:
    """Return Dynamo's settings under which sizes and numbers come from data."""
    return torch._dynamo.config.patch(
        capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True
    )


def verdict(program: Program, *, entailment: bool, backend: str = "aot_eager") -> Verdict:
    """Compile a program, run it on its inputs, and see that it refuses the wrong one.

    Args:
        program: the program.
        entailment: whether the prover is asked.
        backend: the backend of ``torch.compile``.
    """
    torch._dynamo.reset()
    block = tfk.entailment() if entailment else nullcontext()
    with block, settings(), quiet():
        compiled = torch.compile(program.function, backend=backend, dynamic=True, fullgraph=True)
        for at, arguments in enumerate(program.inputs()):
            wanted = program.function(*(argument.clone() for argument in arguments))
            try:
                found = compiled(*(argument.clone() for argument in arguments))
            except Exception as error:  # noqa: BLE001 - any failure is a verdict
                return _failure(error)
            if not _equal(found, wanted):
                return Verdict("wrong", f"other results for input {at}")
        if program.wrong is not None:
            arguments = program.wrong()
            for function in (program.function, compiled):
                if not _refuses(function, arguments):
                    return Verdict("wrong", f"{function} takes the wrong input")
    return Verdict("compiles")


def _refuses(function: Any, arguments: tuple[Any, ...]) -> bool:
    try:
        function(*(argument.clone() for argument in arguments))
    except (RuntimeError, AssertionError, IndexError):
        return True
    return False


def _failure(error: Exception) -> Verdict:
    text = str(error)
    if "data-dependent expression" not in text:
        return Verdict("fails", f"{type(error).__name__}: {text.partition(chr(10))[0]}")
    _, heading, rest = text.partition(_CHECKS)
    if not heading:
        _, _, rest = text.partition("data-dependent expression ")
        return Verdict("open", rest.partition(" (unhinted")[0])
    return Verdict("open", rest.strip().partition("  # at")[0].partition("\n")[0])


def _equal(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, (tuple, list)):
        return all(_equal(*pair) for pair in zip(found, wanted, strict=True))
    return found.shape == wanted.shape and torch.allclose(found, wanted)


def verdicts(kind: str | None, backend: str) -> Iterator[tuple[Program, Verdict, Verdict]]:
    """Yield the programs of a kind with both verdicts."""
    for program in PROGRAMS.values():
        if kind in (None, program.kind):
            alone = verdict(program, entailment=False, backend=backend)
            yield program, alone, verdict(program, entailment=True, backend=backend)


def table(rows: Iterable[tuple[str, tuple[str, str, str]]]) -> list[str]:
    """Return the rows of the table in docs/entailment.md.

    Args:
        rows: name, and what `VERDICTS` has of it.
    """
    lines = [
        "| program | what follows, or does not | torch | with entailment |",
        "|---|---|---|---|",
    ]
    for name, (alone, ours, check) in rows:
        program = PROGRAMS[name]
        about = (program.function.__doc__ or "").strip().rstrip(".").replace("|", "or")
        result = f"open: `{check}`" if check else ours
        lines.append(f"| {program.kind}: `{name}` | {about} | {alone} | {result} |")
    return lines


def main() -> int:
    """Print the table and counts; the exit status is 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=sorted({program.kind for program in PROGRAMS.values()}))
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--write", action="store_true", help="write zoo/data_dependent/verdicts.py")
    options = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    found: dict[str, tuple[str, str, str]] = {}
    for program, alone, ours in verdicts(options.kind, options.backend):
        counts[alone.state, ours.state] += 1
        found[program.name] = (alone.state, ours.state, ours.detail)
        if ours.state in ("wrong", "fails") or alone.state in ("wrong", "fails"):
            print(f"{program.name}: {alone} {ours}")
    print("\n".join(table(found.items())))
    for (first, second), count in sorted(counts.items()):
        print(f"{count:>4}  torch {first}, with entailment {second}")
    if options.write:
        lines = [f"    {name!r}: {value!r},\n" for name, value in found.items()]
        head = '"""What torch says of each program, what it says with entailment, and the check it suggests."""\n'
        body = f"{head}\nVERDICTS: dict[str, tuple[str, str, str]] = {{\n{''.join(lines)}}}\n"
        (Path(data_dependent.__file__).parent / "verdicts.py").write_text(body, encoding="utf-8")
    return 1 if any("wrong" in pair for pair in counts) else 0


if __name__ == "__main__":
    raise SystemExit(main())
