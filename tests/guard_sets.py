"""Whether two sets of guards say the same, for sets that are not the same text.

Torch leaves a guard out when it can derive it from earlier ones, and its caches make that depend
on what was asked before. Two processes may so write down different sets for the same facts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sympy
from torch.fx.experimental.validator import SympyToZ3, TranslationValidator

if TYPE_CHECKING:
    from collections.abc import Iterable


def not_implied(
    shape_env: Any, guards: Iterable[sympy.Basic], by: Iterable[sympy.Basic]
) -> list[str]:
    """Those of the guards that do not follow from the others and the value ranges; z3 decides."""
    import z3

    guards, facts = list(guards), list(by)
    validator = TranslationValidator()
    convert = SympyToZ3(validator)
    symbols = {s for g in (*guards, *facts) for s in g.free_symbols}
    for symbol in sorted(symbols, key=str):
        validator.add_var(symbol, float if symbol.is_integer is False else int)
    solver = z3.Solver()
    solver.set("timeout", 5000)
    for symbol in symbols:
        bounds = shape_env.var_to_range.get(symbol)
        if bounds is None:
            continue
        variable = validator.z3var(symbol)
        if isinstance(bounds.lower, (sympy.Integer, sympy.Float)):
            solver.add(variable >= convert.run(bounds.lower))
        if isinstance(bounds.upper, (sympy.Integer, sympy.Float)):
            solver.add(variable <= convert.run(bounds.upper))
    for fact in facts:
        solver.add(validator.to_z3_boolean_expr(fact))
    solver.add(*validator._assertions)
    lost: list[str] = []
    for guard in guards:
        solver.push()
        solver.add(z3.Not(validator.to_z3_boolean_expr(guard)), *validator._assertions)
        if solver.check() != z3.unsat:
            lost.append(str(guard))
        solver.pop()
    return lost
