"""Compares two runs of a program: with a backend itself, and through a handoff to it."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from guard_code import equivalent_code
from guard_equivalence import equivalent
from observe import Run, observed
from observed_values import first_difference, split_guards

if TYPE_CHECKING:
    from compiled_programs import Program


def check(program: Program, backend: Any = "aot_eager", *, without: Any = ()) -> Run:
    """Compare a handoff to a backend with the backend itself, without some kinds of what is seen.

    Returns:
        the run of the backend itself.
    """
    theirs, ours = (observed(program, backend, direct=direct) for direct in (True, False))
    for run in (theirs, ours):
        run.seen = [entry for entry in run.seen if entry[0] not in without]
        if program.other_symbols:  # with them their reasons, which stand behind a guard
            run.seen = [_without_reasons(entry) for entry in run.seen]
    found = difference(ours, theirs, implied=bool(program.implied_guards))
    assert found is None, found
    return theirs


def _without_reasons(entry: Any) -> Any:
    if entry[0] != "guards":
        return entry
    return (entry[0], [text.partition("@#")[0] for text in entry[1]], *entry[2:])


def difference(ours: Run, theirs: Run, *, implied: bool = False) -> str | None:
    """The first thing in which two runs differ.

    Args:
        ours: one run.
        theirs: the run that it should equal.
        implied: whether guards on shapes need only be equivalent, and not the same text.
    """
    for i, (a, b) in enumerate(zip_longest(ours.seen, theirs.seen, fillvalue=("nothing",))):
        where = f"{a[0]}[{i}]"
        if a[0] != b[0]:
            return f"{where}: instead of {b[0]}"
        if a[0] == "facts":
            verdict = equivalent(b[1], a[1])
            found = None if verdict.how == "proved" else f": {verdict}"
        elif a[0] == "guards":
            found = _guards(a[1], b[1], implied=implied)
        else:
            found = first_difference(list(a), list(b))
        if found is not None:
            return f"{where}{found}"
    return None


def _guards(ours: list[str], theirs: list[str], *, implied: bool) -> str | None:
    if implied:
        (ours, our_code), (theirs, their_code) = map(_with_identity, (ours, theirs))
        if our_code != their_code and not (verdict := equivalent_code(their_code, our_code)):
            return f" on shapes: {verdict}"
    if ours == theirs:
        return None
    more, less = ([x for x in a if x not in b] for a, b in ((ours, theirs), (theirs, ours)))
    return f": more {more}, less {less}"


def _with_identity(guards: list[str]) -> tuple[list[str], list[str]]:
    """Guards whose texts are compared, those on one object among them, and the code of all others."""
    texts, code = split_guards(guards)
    return [*texts, *(c for c in code if " is " in c)], [c for c in code if " is " not in c]
