"""``entails`` and ``why``: what follows from the facts of a ``ShapeEnv``, and from which of them."""

from __future__ import annotations

from typing import Any

import sympy
import torch

from torch_fakeify.compat.arguments import check_shape_env
from torch_fakeify.errors import ShapeEnvError

from .known_facts import KnownFact, is_provable, knowledge_of


def entails(shape_env: Any, expr: Any) -> bool | None:
    """Return whether a condition follows from what a ``ShapeEnv`` knows now.

    The facts are value ranges, replacements, divisibility, guards, and the deferred runtime asserts
    that are stated so far; hints are not facts. The environment is not changed. ``True`` and ``False``
    are proved, over the integers; ``None`` may be a failure of the search, or a condition about
    floats, which is not decided.

    Args:
        shape_env: the ``ShapeEnv``.
        expr: a ``torch.SymBool`` of it, or a sympy condition over its symbols.

    Returns:
        ``True`` if it follows, ``False`` if its negation follows, ``None`` if neither was proved. Both
        follow from facts that contradict each other; the answer is then ``True``.

    Raises:
        ShapeEnvError: not a ``ShapeEnv``, or not a condition.

    Example:
        >>> from torch.fx.experimental.symbolic_shapes import ShapeEnv
        >>> env = ShapeEnv()
        >>> u0, u1 = env.create_unbacked_symint(), env.create_unbacked_symint()
        >>> torch._check(u0 <= u1)
        >>> torch._check(u1 <= 16)
        >>> tfk.entails(env, u0 <= 20), tfk.entails(env, u0 > 16), tfk.entails(env, u0 >= 0)
        (True, False, None)
    """
    condition = _condition(shape_env, expr)
    if isinstance(condition, bool):
        return condition
    if not is_provable(shape_env, condition):
        return None
    return knowledge_of(shape_env).answer(shape_env, condition)


def why(shape_env: Any, expr: Any) -> list[KnownFact] | None:
    """Return the facts of a ``ShapeEnv`` from which a condition or its negation follows.

    The set is minimal: without any one of them `entails` would not find the proof. A fact has the
    user's line that stated it, where torch or `torch_fakeify.entailment` recorded one.

    Args:
        shape_env: the ``ShapeEnv``.
        expr: a ``torch.SymBool`` of it, or a sympy condition over its symbols.

    Returns:
        The facts in the order in which they became known to the prover; empty if the condition always
        holds or never; ``None`` where `entails` returns ``None``.

    Raises:
        ShapeEnvError: not a ``ShapeEnv``, or not a condition.

    Example:
        >>> from torch.fx.experimental.symbolic_shapes import ShapeEnv
        >>> env = ShapeEnv()
        >>> u0, u1 = env.create_unbacked_symint(), env.create_unbacked_symint()
        >>> torch._check(u0 <= u1)
        >>> torch._check(u1 <= 16)
        >>> [fact.text for fact in tfk.why(env, u0 <= 20)]
        ['u1 <= 16', 'u0 <= u1']
    """
    condition = _condition(shape_env, expr)
    if isinstance(condition, bool):
        return []
    answer = entails(shape_env, condition)
    if answer is None:
        return None
    return knowledge_of(shape_env).reasons(shape_env, condition, negated=not answer)


def _condition(shape_env: Any, expr: Any) -> Any:
    check_shape_env(shape_env)
    if isinstance(expr, bool):
        return expr
    if isinstance(expr, torch.SymBool):
        if expr.node.shape_env is not shape_env:
            raise ShapeEnvError("the condition is about symbols of another ShapeEnv")
        expr = expr.node.expr
    if expr in (sympy.true, sympy.false):
        return bool(expr)
    if not isinstance(expr, sympy.logic.boolalg.Boolean) or isinstance(expr, sympy.Symbol):
        raise ShapeEnvError(
            "not a condition", expected="SymBool or a sympy condition", found=str(expr)
        )
    return expr
