"""What every script of the benchmarks does: arguments, progress, the table or JSON."""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import platform
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from .table import Row, as_data, print_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from multiprocessing.connection import Connection

__all__ = ["ROUNDS", "alone", "main", "show"]

ROUNDS = 5


def main(
    doc: str | None,
    rows: Callable[..., Iterable[Row]],
    *,
    counts: bool = False,
    child: Callable[[str], None] | None = None,
) -> None:
    """Run one script as a program.

    Args:
        doc: its docstring.
        rows: gives its lines, for a number of rounds and, as a keyword, counts of tensors.
        counts: whether it takes these.
        child: what it does in a process of its own, for an argument: see `memory.measured`.
    """
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    if counts:
        parser.add_argument("--counts", type=int, nargs="+", help="of tensors")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if child is not None and args.child is not None:
        child(args.child)
        return
    some = {"counts": args.counts} if counts and args.counts else {}
    assert parser.prog
    show({parser.prog: lambda rounds: rows(rounds, **some)}, args.rounds, as_json=args.json)


def alone(module: str) -> Callable[[int], Iterator[Row]]:
    """What gives the lines of a script of this folder from a process of its own, as they come."""

    def rows(rounds: int) -> Iterator[Row]:
        spawning = multiprocessing.get_context("spawn")
        lines, sender = spawning.Pipe(duplex=False)
        process = spawning.Process(target=_send, args=(module, rounds, sender))
        process.start()
        sender.close()
        try:
            while True:
                yield lines.recv()
        except EOFError:
            process.join()
        finally:
            process.kill()
        if process.exitcode:
            raise SystemExit(f"{module} ended with status {process.exitcode}")

    return rows


def _send(module: str, rounds: int, sender: Connection) -> None:
    _settle()
    script: Any = importlib.import_module(f".{module}", __package__)
    for row in script.rows(rounds):
        sender.send(row)


def _settle() -> None:
    """One thread, and no warnings among the lines."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def show(
    scripts: Mapping[str, Callable[[int], Iterable[Row]]], rounds: int, *, as_json: bool
) -> list[Row]:
    """Run scripts one after the other and print their lines; a terminal shows which one runs.

    Args:
        scripts: for each name what gives its lines.
        rounds: how often each side of a line runs.
        as_json: print one JSON object at the end in place of the table.
    """
    _settle()
    about: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rounds": rounds,
    }
    console = Console(stderr=True)
    with console.status("") as status:
        start = time.monotonic()

        def lines() -> Iterator[Row]:
            for number, (name, rows) in enumerate(scripts.items(), 1):
                at = f"{number} of {len(scripts)}"
                status.update(f"{name} ({at})")
                for made, row in enumerate(rows(rounds), 1):
                    seconds = time.monotonic() - start
                    status.update(f"{name} ({at}, line {made}, {seconds:.0f} s)")
                    yield row

        if as_json:
            found = list(lines())
            print(json.dumps({**about, "lines": list(as_data(found))}, indent=1))
            return found
        print(", ".join(f"{name} {value}" for name, value in about.items()))
        found = print_rows(lines())
    met = [row.met for row in found if row.met is not None]
    if met:
        print(f"{sum(met)} of {len(met)} lines with a budget meet it")
    return found
