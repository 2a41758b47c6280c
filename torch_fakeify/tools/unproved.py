"""``show --unproved``: the conditions of a frame that do not follow from its other facts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_fakeify.discharge.advice import SymbolNames, advice_in
from torch_fakeify.discharge.known_facts import is_provable
from torch_fakeify.discharge.wording import condition_text
from torch_fakeify.prover.implication import redundant
from torch_fakeify.replay.facts import assumed_facts
from torch_fakeify.shape_env.restoring import restore

if TYPE_CHECKING:
    from torch_fakeify.records.frame import CaptureDesc

__all__ = ["Unproved", "unproved_of"]

_CONDITION = re.compile(r"data-dependent expression (.*?)(?:  ?\(|$)", re.MULTILINE)


class Unproved(NamedTuple):
    """Which runtime asserts of a frame follow from its other facts, and which do not."""

    open: tuple[str, ...]
    """The conditions that only a check at run time decides."""
    proved: tuple[str, ...]
    """Those that follow from the guards and the other asserts."""
    failed: str | None
    """The condition on which torch could not guard, if the frame failed for it."""
    advice: tuple[str, ...]
    """What the error says further, if it was recorded with `torch_fakeify.entailment`."""

    def lines(self) -> list[str]:
        """The text that ``show --unproved`` prints."""
        lines: list[str] = []
        if self.failed is not None:
            lines += ["It failed on a condition that does not follow:", f"  {self.failed}"]
            lines += [f"  {line}" for line in self.advice] or [
                "  Record it with TORCH_FAKEIFY_ENTAILMENT=1 to see what is known and which check would do"
            ]
        for title, texts in (
            ("Checked at run time, as the other facts do not give them:", self.open),
            ("Checked at run time, although they follow from the other facts:", self.proved),
        ):
            if texts:
                lines += [title, *(f"  {text}" for text in texts)]
        return lines or ["No condition is left to run time."]


def unproved_of(desc: CaptureDesc) -> Unproved:
    """Return the conditions of a frame that do not follow from its other facts."""
    message = "" if desc.failure is None else desc.failure.message
    found = _CONDITION.search(message)
    opened, proved = ([], []) if desc.shape_env is None else _asserts(restore(desc.shape_env))
    return Unproved(
        tuple(opened),
        tuple(proved),
        None if found is None else found[1],
        tuple(advice_in(message)),
    )


def _asserts(env: Any) -> tuple[list[str], list[str]]:
    """The runtime asserts that do not follow, and those that do."""
    asserts = list(
        dict.fromkeys(one.expr for group in env.deferred_runtime_asserts.values() for one in group)
    )
    inputs = env.backed_var_to_val.keys()
    assumed = [
        fact.expr
        for fact in assumed_facts(env)
        if fact.expr.free_symbols <= inputs and is_provable(env, fact.expr)
    ]
    provable = [expr for expr in asserts if is_provable(env, expr)]
    removable = [False] * len(assumed) + [True] * len(provable)
    implied = redundant([*assumed, *provable], removable=removable)
    follows = {provable[at - len(assumed)] for at in implied}
    names = SymbolNames(env, {})
    opened = [condition_text(expr, names) for expr in asserts if expr not in follows]
    return opened, [condition_text(expr, names) for expr in asserts if expr in follows]
