"""Guards as code that ``produce_guards`` writes: read, evaluated, compared."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import sympy
import torch
from equivalence_checks import CONDITIONS, MEANINGS, OPAQUE, RANDOM_FACTS, fakes, points_for
from guard_code import code_facts, equivalent_code, evaluate_code, read_code
from guard_equivalence import Facts, by_sources, equivalent, facts_of
from guard_terms import Point, holds, python_function
from hypothesis import assume, given, settings
from torch._dynamo.source import LocalSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.functions import Where
from torch.utils._sympy.printers import PythonPrinter


def guards_of(question: Any = None, *, duck: bool = True) -> frozenset[str]:
    """Return the guards on two inputs after a question about their shapes."""
    shape_env = ShapeEnv(duck_shape=duck)
    made = fakes(shape_env, x=torch.zeros(8, 6), y=torch.zeros(48))
    if question is not None:
        assert question(made["x"].shape, made["y"].shape[0])
    return code_facts(shape_env, list(made.values()), list(made), ignore_static=False)


QUESTIONS: dict[str, Any] = {
    "inequality": lambda x, y: x[0] > 5,
    "sum": lambda x, y: 2 * x[0] + x[1] > 9,
    "product": lambda x, y: x[0] * x[1] == y,
    "Mod": lambda x, y: x[0] % 4 == 0,
    "FloorDiv": lambda x, y: y // 10 == 4,
    "Max": lambda x, y: torch.sym_max(x[0], x[1]) < 9,
    "range": lambda x, y: x[0] <= 20,
    "constant": lambda x, y: x[0] == 8,
    "true division": lambda x, y: x[0] / x[1] > 1.25,
    "truncation": lambda x, y: math.floor(y / 5) == 9,
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_guard_of_a_question_is_found_in_the_code(name: str) -> None:
    """What the code accepts is compared, and a difference has the text of its guard."""
    asked, without = guards_of(QUESTIONS[name]), guards_of()
    assert equivalent_code(asked, guards_of(QUESTIONS[name])).how == "proved"
    lost, new = equivalent_code(asked, without), equivalent_code(without, asked)
    assert lost.lost
    assert not lost.new
    assert all(d.what in asked for d in lost.lost)
    assert new.new
    assert not new.lost


def test_static_sizes_are_included_on_request() -> None:
    """``ignore_static=False`` adds the constants that Dynamo guards elsewhere."""
    shape_env = ShapeEnv()
    x = fakes(shape_env, x=torch.zeros(5))["x"]
    more = code_facts(shape_env, [x], ["x"], ignore_static=False)
    assert more - code_facts(shape_env, [x], ["x"]) == {
        "L['x'].stride()[0] == 1",
        "L['x'].storage_offset() == 0",
    }
    verdict = equivalent_code(more, code_facts(shape_env, [x], ["x"]))
    assert sorted(d.what for d in verdict.lost) == sorted(more - {"2 <= L['x'].size()[0]"})


def test_code_is_evaluated_for_the_numbers_of_inputs() -> None:
    """The code runs as in torch, with objects in place of the inputs."""
    code = guards_of(lambda x, y: x[0] * x[1] == y)
    sample: Point = {
        "L['x'].size()[0]": 3,
        "L['x'].size()[1]": 4,
        "L['x'].stride()[0]": 4,
        "L['x'].stride()[1]": 1,
        "L['x'].storage_offset()": 0,
        "L['y'].size()[0]": 12,
        "L['y'].stride()[0]": 1,
        "L['y'].storage_offset()": 0,
    }
    assert evaluate_code(code, sample)
    assert not evaluate_code(code, {**sample, "L['y'].size()[0]": 13})
    assert not evaluate_code(code, {**sample, "L['x'].stride()[0]": 3})
    assert evaluate_code(["a.b[0].c() % 3 == 1"], {"a.b[0]  .c( )": 4})
    assert not evaluate_code(["5 // L['n'] == 1"], {"L['n']": 0})
    with pytest.raises(TypeError):
        evaluate_code(["L['n'] > 1"], {})


def test_code_accepts_the_inputs_that_torch_accepts() -> None:
    """Sampled sizes of a real tensor are compared with ``evaluate_guards_for_args``."""
    shape_env = ShapeEnv()
    x = fakes(shape_env, t0=torch.zeros(8, 6))["t0"]
    assert (x.shape[0] + x.shape[1]) % 2 == 0
    assert x.shape[0] > x.shape[1]
    code = code_facts(shape_env, [x], [LocalSource("t0")])
    read = [python_function(e) for e in read_code(code).exprs]
    for rows, columns in itertools.product(range(12), repeat=2):
        real = torch.zeros(rows, columns)
        sample: Point = {f"L['t0'].size()[{i}]": n for i, n in enumerate(real.size())}
        sample |= {f"L['t0'].stride()[{i}]": n for i, n in enumerate(real.stride())}
        accepted = shape_env.evaluate_guards_for_args([x], [real])
        assert evaluate_code(code, sample) is accepted
        assert all(holds(f, sample) for f in read) is accepted


PRINTED = {**CONDITIONS, **MEANINGS, **OPAQUE}
# torch's Python printer has no text for these, or the sets that produce_guards makes have none
NOT_PRINTED = {
    *("sympy.Mod", "sympy.Max", "sympy.Min", "sign", "Where", "TruncToFloat", "LShift", "RShift"),
    *("Xor", "Nand", "Nor", "Implies", "ITE", "fraction", "dense", "Piecewise without a rest"),
    *("power of minus one", "PowByNatural of a negative", "LShift by a variable"),
    *("RShift by a variable", "below infinity", "log"),
}
NAMES = [name for name in PRINTED if name not in NOT_PRINTED]


@pytest.mark.parametrize("name", NAMES)
def test_code_that_torch_prints_is_read_as_it_runs(name: str) -> None:
    """Expression, printed code and read code have the same value at each point."""
    expr = PRINTED[name]
    symbols = sorted(expr.free_symbols, key=str)
    condition = expr if name in CONDITIONS else sympy.Ge(expr, 2, evaluate=False)
    assert condition not in (sympy.true, sympy.false)
    code = PythonPrinter().doprint(condition)
    marks = [f"not math.isnan({s})" for s in symbols if not s.is_integer]
    read = read_code([code, *marks])
    function, again = python_function(condition), [python_function(e) for e in read.exprs]
    for point in points_for(condition):
        expected = holds(function, point)
        assert all(holds(f, point) for f in again) is expected, (code, point)
        if name not in ("Or of an undefined", "FloatPow"):
            assert evaluate_code([code], point) is expected, (code, point)


@settings(max_examples=30)
@given(RANDOM_FACTS)
def test_random_code_is_read_as_it_runs(expr: Any) -> None:
    """Nested arithmetic that ``produce_guards`` may print is read with its value."""
    assume(not expr.has(Where))
    code = PythonPrinter().doprint(expr)
    read = [python_function(e) for e in read_code([code]).exprs]
    for point in points_for(expr)[::7]:
        expected = all(holds(f, point) for f in read)
        assert evaluate_code([code], point) is expected or "or" in code, (code, point)


def test_bounds_of_floats_are_compared() -> None:
    """The facts of the environment, and its code, which has the guard against NaN too."""

    def asked(limit: float) -> tuple[Facts, frozenset[str]]:
        shape_env = ShapeEnv()
        source = LocalSource("f")
        symbol = shape_env.create_symbol(2.5, source, DimDynamic.DYNAMIC, positive=None)
        f = shape_env.create_symfloatnode(symbol, hint=2.5, source=source)
        assert f > limit
        facts = facts_of(shape_env, by_sources(shape_env))
        return facts, code_facts(shape_env, [f], [source])

    for compare, wide, narrow in zip(
        (equivalent, equivalent_code), asked(1.25), asked(1.5), strict=True
    ):
        assert compare(narrow, narrow).how == "proved"
        verdict = compare(narrow, wide)
        assert [str(d.fact) for d in verdict.lost] == ["L['f'] > 1.5"]
        assert not verdict.new
        assert 1.25 < verdict.lost[0].counterexample["L['f']"] <= 1.5
    assert [d.what for d in verdict.lost] == ["L['f'] > 1.5"]
    only = ["not math.isnan(L['f'])"]
    (lost,) = equivalent_code(only, []).lost
    assert math.isnan(lost.counterexample["L['f']"])
    assert equivalent_code([*only, "L['f'] > 1.5"], ["L['f'] > 1.5"]).how == "proved"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("[1] == [2]", r"not a guard: \[1\]"),
        ("math.comb(L['x'], 2) > 1", "not a function of guards: math.comb"),
        ("f(L['x']) > 1", r"not a guard: f\(L\['x'\]\)|not a function of guards: f"),
    ],
)
def test_code_that_torch_does_not_write_is_refused(code: str, message: str) -> None:
    """Code that torch does not write is refused, and the error contains the code."""
    with pytest.raises(ValueError, match=message):
        read_code([code])
