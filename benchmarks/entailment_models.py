"""Guards, recompiles and compile time of each model, without and with ``tfk.entailment``.

Run: ``python -m benchmarks.entailment_models [--json] [--training] [MODEL...]``; it needs the ``models``
extra, and a checkout: the models are those of the tests. Each is compiled anew, by aot_eager or ``--backend``, with
``dynamic=True`` and called with inputs of three sizes.

``guards`` are those in the environments of its frames, ``installed`` the ones on sizes that Dynamo
checks at entry, ``asserts`` the runtime asserts. ``asked`` counts the questions to the prover,
``slowest`` is the longest of them, and ``own`` is the CPU time in the code of entailment as a part of
the compile time with it: the answers, the facts about operators and the lines of the user. A model
whose compilation takes longer than ``--limit`` seconds is an error.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import time
import warnings
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
from sympy.core.cache import clear_cache

import torch_fakeify as tfk

from .checkout import import_from_tests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

OWN = ("_answer", "note_values", "forget_values", "state_facts_of", "note_line", "advice_text")
"""The functions that the methods of torch call with entailment."""

COUNTS = ("guards", "installed", "asserts", "recompiles")


class Counts(NamedTuple):
    """One compilation of a model."""

    graphs: int
    guards: int
    installed: int
    asserts: int
    recompiles: int
    seconds: float
    """CPU time of the calls."""
    error: str | None
    """What was raised, if something was."""


class Compared(NamedTuple):
    """A model without and with entailment."""

    model: str
    without: Counts
    ours: Counts
    asked: int
    """Questions to the prover."""
    slowest: float
    """Milliseconds of the slowest."""
    own: float
    """The time in the code of entailment, as a part of the compile time."""


class _TooLong(BaseException):
    """Raised in a compilation that takes too long; torch handles any `Exception`."""


def _stop(*_: Any) -> None:
    raise _TooLong


class _Clock:
    """How often functions were called, and the CPU time in them, of nested calls once.

    Not counted are collections of garbage that begin in a call, which are of all that was allocated
    before, and the time that the clock itself takes, as measured with a function that does nothing.
    """

    def __init__(self) -> None:
        self.seconds, self.calls, self.slowest, self._depth = 0.0, 0, 0.0, 0
        self._collecting, self._begun = 0.0, 0.0
        self._empty = 0.0

    def calibrate(self) -> None:
        """Measure what the clock counts for a function that does nothing."""
        nothing, count = self.around(lambda: None, is_question=False), 20_000
        for _ in range(count):
            nothing()
        self._empty, self.seconds = self.seconds / count, 0.0

    def collected(self, phase: str, _info: Any) -> None:
        """Note the time of a collection; a callback of ``gc``."""
        if phase == "start":
            self._begun = time.thread_time()
        else:
            self._collecting += time.thread_time() - self._begun

    def around(self, function: Callable[..., Any], *, is_question: bool) -> Callable[..., Any]:
        """Return the function with its time measured."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return function(*args, **kwargs)
            self._depth += 1
            collecting, start = self._collecting, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.thread_time() - start - (self._collecting - collecting)
                seconds -= self._empty
                self._depth -= 1
                self.seconds += seconds
                if is_question:
                    self.calls += 1
                    self.slowest = max(self.slowest, seconds)

        return timed


def compiled(
    name: str, *, training: bool, limit: float = 0.0, backend: str = "aot_eager"
) -> Counts:
    """Compile a model anew and count.

    Args:
        name: of the model.
        training: with a backward pass.
        limit: CPU seconds after which it is stopped; 0 for none.
        backend: compiles it.
    """
    from compiled_programs import Model
    from model_zoo import MODELS
    from observe import observed

    clear_cache()
    gc.collect()
    program = Model(model=MODELS[name], training=training, dynamic=True)
    signal.signal(signal.SIGVTALRM, _stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit, 1.0)  # again: a callback may ignore it
    try:
        run = observed(program, backend, direct=True, record=False)
    except _TooLong:
        return Counts(0, 0, 0, 0, 0, limit, f"longer than {limit:g} s")
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    raised = [row for row in run.seen if row[0].endswith("raised")]
    return Counts(
        len(run.envs),
        sum(len(env.guards) for env in run.envs),
        sum(map(len, run.guards)),
        sum(map(len, run.asserts)),
        run.recompiles,
        run.seconds,
        f"{raised[0][1]}: {raised[0][2]}" if raised else None,
    )


def compared(names: Iterable[str], **options: Any) -> Iterator[Compared]:
    """Compile each model without and with entailment; each time the other way begins.

    Args:
        names: of the models.
        options: of `compiled`.
    """
    from torch_fakeify.discharge import installing

    for number, name in enumerate(names):
        found: dict[bool, Counts] = {}
        clock = _Clock()
        clock.calibrate()
        for with_it in (False, True) if number % 2 else (True, False):
            with ExitStack() as stack:
                if with_it:
                    gc.callbacks.append(clock.collected)
                    stack.callback(gc.callbacks.remove, clock.collected)
                    for each in OWN:
                        timed = clock.around(getattr(installing, each), is_question=each == OWN[0])
                        stack.enter_context(mock.patch.object(installing, each, timed))
                    stack.enter_context(tfk.entailment())
                found[with_it] = compiled(name, **options)
        yield Compared(
            name,
            found[False],
            found[True],
            clock.calls,
            clock.slowest * 1e3,
            clock.seconds / found[True].seconds,
        )


def line(row: Compared) -> str:
    """Return a line of the table in Markdown."""
    pairs = [f"{getattr(row.without, what)}, {getattr(row.ours, what)}" for what in COUNTS]
    errors = [one.error for one in (row.without, row.ours)]
    if any(errors):
        return f"| {row.model}: {errors[0]}, {errors[1]} |"
    cells = [row.model, *pairs, str(row.asked), f"{row.slowest:.1f} ms", f"{row.own:.2%}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table, a line as soon as it is there, or a JSON object for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="default: all")
    parser.add_argument("--json", action="store_true", help="print JSON lines, not a table")
    parser.add_argument("--training", action="store_true", help="with a backward pass")
    parser.add_argument("--limit", type=float, default=60.0, help="default: %(default)s")
    parser.add_argument("--backend", default="aot_eager", help="default: %(default)s")
    args = parser.parse_args()
    options = {"training": args.training, "limit": args.limit, "backend": args.backend}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    import_from_tests()
    from model_zoo import MODELS

    head = ("model", *COUNTS, "asked", "slowest", "own")
    if not args.json:
        print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    for row in compared(args.models or MODELS, **options):
        if args.json:
            data = row._asdict() | {"without": row.without._asdict(), "ours": row.ours._asdict()}
            print(json.dumps(data), flush=True)
        else:
            print(line(row), flush=True)


if __name__ == "__main__":
    main()
