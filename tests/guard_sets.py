"""Whether two sets of guards say the same, for sets that are not the same text.

Torch leaves a guard out when it can derive it from earlier ones, and its caches make that depend
on what was asked before. Two processes may so write down different sets for the same facts.
"""

from __future__ import annotations

from typing import Any

import sympy
from torch.fx.experimental.validator import SympyToZ3, TranslationValidator


def not_implied(shape_env: Any, *, by: Any) -> list[str]:
    """The guards of one environment that do not follow from what another one knows; z3 decides.

    What an environment knows are its guards and its value ranges.
    """
    import z3

    guards = [guard.expr for guard in shape_env.guards]
    facts = [guard.expr for guard in by.guards]
    validator = TranslationValidator()
    convert = SympyToZ3(validator)
    symbols = {s for g in (*guards, *facts) for s in g.free_symbols}
    for symbol in sorted(symbols, key=str):
        validator.add_var(symbol, float if symbol.is_integer is False else int)
    solver = z3.Solver()
    solver.set("timeout", 5000)
    for symbol in symbols & set(by.var_to_range):
        bounds = by.var_to_range[symbol]
        variable = validator.z3var(symbol)
        if isinstance(bounds.lower, (sympy.Integer, sympy.Float)):
            solver.add(variable >= convert.run(bounds.lower))
        if isinstance(bounds.upper, (sympy.Integer, sympy.Float)):
            solver.add(variable <= convert.run(bounds.upper))
    for fact in facts:
        solver.add(validator.to_z3_boolean_expr(fact))
    lost: list[str] = []
    for guard in guards:
        solver.push()
        solver.add(z3.Not(validator.to_z3_boolean_expr(guard)), *validator._assertions)
        if solver.check() != z3.unsat:
            lost.append(str(guard))
        solver.pop()
    return lost
