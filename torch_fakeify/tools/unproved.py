"""``show --unproved``: the conditions of a frame that do not follow from its other facts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch_fakeify.discharge.advice import SymbolNames
from torch_fakeify.discharge.known_facts import condition_text, is_provable
from torch_fakeify.prover.implication import redundant
from torch_fakeify.render.data_dependent import advice_in, failed_condition
from torch_fakeify.render.report.environment import UNKNOWN, Conditions
from torch_fakeify.replay.facts import assumed_facts
from torch_fakeify.shape_env.restoring import restore

if TYPE_CHECKING:
    from torch_fakeify.records.frame import CaptureDesc


class Unproved(NamedTuple):
    """Which runtime asserts of a frame follow from its other facts, and which do not."""

    conditions: Conditions
    failed: str | None
    """The condition on which torch could not guard, if the frame failed for it."""
    advice: tuple[str, ...]
    """What the error says further, if it was recorded with `torch_fakeify.entailment`."""

    def lines(self) -> list[str]:
        """The text that ``show --unproved`` prints."""
        lines: list[str] = []
        if self.failed is not None:
            lines += ["It failed on a condition that does not follow:", f"  {self.failed}"]
            lines += [f"  {line}" for line in self.advice] or [f"  {UNKNOWN}"]
        for title, texts in self.conditions.titled():
            lines += [f"{title}:", *(f"  {text}" for text in texts)]
        return lines or ["No condition is left to run time."]


def unproved_of(desc: CaptureDesc) -> Unproved:
    """Return the conditions of a frame that do not follow from its other facts."""
    message = "" if desc.failure is None else desc.failure.message
    advice = tuple(advice_in(message))
    return Unproved(runtime_conditions(desc), failed_condition(message), advice)


def runtime_conditions(desc: CaptureDesc) -> Conditions:
    """Return the runtime asserts of a frame: those that do not follow, and those that do."""
    if desc.shape_env is None:
        return Conditions()
    env: Any = restore(desc.shape_env)
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
    return Conditions(
        tuple(condition_text(expr, names) for expr in asserts if expr not in follows),
        tuple(condition_text(expr, names) for expr in asserts if expr in follows),
    )
