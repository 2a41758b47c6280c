"""What a data-dependent error says further: what is known, and which check would do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sympy
import torch

from torch_fakeify._user_lines import calling_locals
from torch_fakeify.compat.torch_dynamo import traced_locals
from torch_fakeify.prover.polynomials import AtomTable
from torch_fakeify.render.data_dependent import KnownOf
from torch_fakeify.render.readable_names import readable_source

from .abduction import weakest_checks
from .known_facts import KnownFact, condition_text, is_provable, knowledge_of
from .lines import current_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

MAX_SHOWN = 12
"""The most facts that a message shows."""

_SIZE = re.compile(r"\.(size|stride)\((\d+)\)")


def _distinct(facts: Iterable[KnownFact]) -> Iterator[KnownFact]:
    """Facts without those that say the same as an earlier one, such as a range and its assert."""
    table, seen = AtomTable(), set[Any]()
    for fact in facts:
        parts = table.condition(fact.expr)
        if parts and parts not in seen:
            seen.add(parts)
            yield fact


def advice_text(env: Any, condition: Any) -> str:
    """Return what is added to the message of a data-dependent error; empty if there is nothing to say."""
    if not isinstance(condition, sympy.logic.boolalg.Boolean) or not is_provable(env, condition):
        return ""
    near = knowledge_of(env).around(env, condition)
    facts = [fact.expr for fact in near]
    hints = {
        symbol: env.backed_var_to_val[symbol]
        for fact in (condition, *facts)
        for symbol in fact.free_symbols & env.backed_var_to_val.keys()
    }
    known = [*_distinct(f for f in near if f.expr.free_symbols & condition.free_symbols)]
    names = SymbolNames(env, traced_locals() or calling_locals())
    line = current_line()
    place = "" if line is None else f"  # at {_short(line)}"

    def calls(wanted: Any) -> tuple[str, ...]:
        checks = weakest_checks(facts, wanted, hints)
        return tuple(f"torch._check({condition_text(check, names)}){place}" for check in checks)

    symbols: list[Any] = sorted(condition.free_symbols, key=str)
    return KnownOf(
        known=tuple(_fact_text(fact, names) for fact in known[:MAX_SHOWN]),
        more=max(0, len(known) - MAX_SHOWN),
        nothing="" if known else ", ".join(map(names, symbols)),
        checks=calls(condition),
        opposite=calls(sympy.Not(condition)),
        unnamed=", ".join(str(s) for s in symbols if names(s) == str(s)),
    ).text()


def _fact_text(fact: KnownFact, names: SymbolNames) -> str:
    where = "" if fact.line is None else f"  # {_short(fact.line)}"
    return f"{condition_text(fact.expr, names)}{where}"


def _short(line: str) -> str:
    """A line with the last part of its path, and code of several lines as one."""
    path, colon, rest = " ".join(line.split()).partition(":")
    return f"{Path(path).name}{colon}{rest}"


class SymbolNames:
    """The user's names of symbols: local variables that hold them, else sources of inputs."""

    def __init__(self, env: Any, variables: Mapping[str, Any]) -> None:
        self._env = env
        self._found: dict[Any, str] = {}
        for name, value in variables.items():
            if isinstance(value, torch.SymInt):
                self._found.setdefault(value.node.expr, name)
        for name, value in variables.items():
            if isinstance(value, torch.Tensor):
                for dim, size in enumerate(value.shape):
                    if isinstance(size, torch.SymInt):
                        self._found.setdefault(size.node.expr, f"{name}.shape[{dim}]")

    def __call__(self, symbol: sympy.Symbol) -> str:
        """Return the text of a symbol."""
        found = self._found.get(symbol)
        if found is not None:
            return found
        sources = self._env.var_to_sources.get(symbol)
        if not sources:
            return str(symbol)
        return _SIZE.sub(_as_attribute, readable_source(sources[0].name))


def _as_attribute(found: re.Match[str]) -> str:
    return f".{'shape' if found[1] == 'size' else 'stride()'}[{found[2]}]"
