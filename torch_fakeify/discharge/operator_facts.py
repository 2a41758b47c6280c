"""Facts that operators guarantee about the sizes and numbers of their results."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import sympy

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["operator_facts", "state_operator_fact"]

_stated: weakref.WeakKeyDictionary[Any, dict[sympy.Basic, None]] = weakref.WeakKeyDictionary()
"""The operator facts of each environment; one that its ``axioms`` lack was rolled back."""


def state_operator_fact(env: Any, expr: sympy.Basic) -> None:
    """State a condition that always holds: torch looks it up among its axioms, and no check is added.

    A rollback of the environment removes it, as it is in a table of the environment.
    """
    if expr in (sympy.true, sympy.false):
        return
    env.axioms.update(dict(env.get_implications(expr)))
    env.axioms[expr] = sympy.true
    _stated.setdefault(env, {})[expr] = None


def operator_facts(env: Any) -> Iterator[sympy.Basic]:
    """Yield the conditions that operators guarantee in an environment."""
    for expr in tuple(_stated.get(env, ())):
        if env.axioms.get(expr) == sympy.true:
            yield expr
        else:
            del _stated[env][expr]
