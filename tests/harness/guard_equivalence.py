"""Whether two sets of shape facts say the same.

Torch leaves a guard out when it can derive it from earlier ones, and its caches make that depend
on what was asked before; a fact is now a guard, now a range, now a replacement. So sets of facts
are compared by what they mean: each fact of one set must follow from the other set. z3 proves
that, or gives a counterexample, which counts when the expressions themselves confirm it. Where z3
does not know, a search over the domain looks for one (`guard_sampling`).

Integers are unbounded, floats finite (torch excludes NaN), ``ToFloat`` is exact (sizes are below
2**53). The variables may be the symbols of the environments or, for two environments that name
their symbols otherwise, the sources (`by_sources`).
"""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import sympy
import torch
import z3
from guard_sampling import names_in, search
from guard_terms import INFINITIES, Point, confirmed, nested_int, plain, variable
from guard_z3 import Z3Terms
from sympy.utilities.iterables import connected_components
from torch._dynamo import config as dynamo_config
from torch.fx.experimental.sym_node import SymNode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._sympy.singleton_int import SingletonInt

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

TIMEOUT_MS = 2000
SAMPLES = 200


# --- facts --------------------------------------------------------------------------------------


class Facts(NamedTuple):
    """Conditions that must hold, over plain variables."""

    exprs: tuple[sympy.Basic, ...]
    what: tuple[str, ...] = ()
    """What each one is, for a reader; all of them or none."""
    hints: tuple[tuple[str, int | float], ...] = ()
    """Values that variables have in an example."""

    def without(self, index: int) -> Facts:
        """All but one."""
        keep = [i for i in range(len(self.exprs)) if i != index]
        what = tuple(self.what[i] for i in keep) if self.what else ()
        return Facts(tuple(self.exprs[i] for i in keep), what, self.hints)


class Naming(dict[sympy.Symbol, sympy.Symbol]):
    """The variable of each symbol, and the equalities that the names bring with them."""

    def __init__(self) -> None:
        super().__init__()
        self.equalities: list[tuple[str, sympy.Basic]] = []
        """What it is (``duck shape``, ``input``), and the condition."""


def by_sources(
    shape_env: Any, *, inputs: Iterable[tuple[Any, Any]] = (), static: bool = False
) -> Naming:
    """Names each symbol by its first source; two environments then share their variables.

    Another source of the same symbol (duck shape) is a variable of its own, equal to the first.
    Symbols without a source (unbacked ones) keep their names.

    Args:
        shape_env: the environment.
        inputs: placeholders: the source, or its name, and the fake tensor or the number. Each of
            their sizes, strides, offsets and values equals its expression, as ``produce_guards``
            has it; of a wrapper subclass also those of its inner tensors.
        static: whether the sizes, strides and offsets that are plain numbers count, too.
            ``produce_guards`` leaves these to Dynamo's guards on tensors, unless asked.
    """
    naming = Naming()
    names: dict[sympy.Symbol, list[str]] = defaultdict(list)
    for symbol, sources in shape_env.var_to_sources.items():
        names[symbol] = [s.name for s in sources if not s.is_ephemeral()]
    for name, symbol in shape_env.source_to_var.items():
        if isinstance(symbol, sympy.Symbol) and not name.startswith("<ephemeral"):
            names[symbol].append(name)
    for symbol, found in names.items():
        distinct = list(dict.fromkeys(found))
        if not distinct:
            continue
        is_float = not symbol.is_integer
        naming[symbol] = first = variable(distinct[0], is_float=is_float)
        for name in distinct[1:]:
            naming.equalities.append(("duck shape", _eq(first, variable(name, is_float=is_float))))
    for source, value in inputs:
        name = source if isinstance(source, str) else source.name
        for property_name, number, always in _numbers(name, value):
            expr = plain(_expr_of(number), naming)
            if static or always or not expr.is_number:
                is_float = not expr.is_integer
                held = _eq(variable(property_name, is_float=is_float), expr)
                naming.equalities.append(("input", held))
    return naming


def facts_of(
    shape_env: Any,
    rename: Mapping[sympy.Symbol, sympy.Symbol] | None = None,
    *,
    asserts: bool = False,
) -> Facts:
    """What ``produce_guards`` would consult in an environment.

    The guards, and the exclusion guard of automatic dynamic shapes where it is on; the finite ends of
    value ranges; replacements; the expressions that are known to be zero.

    Args:
        shape_env: the environment.
        rename: the variables of its symbols, as `by_sources` gives them; by default a symbol is
            the variable of its own name.
        asserts: whether they include the deferred runtime asserts.
    """
    rename = {} if rename is None else rename
    found: dict[sympy.Basic, str] = {}

    def add(what: str, expr: sympy.Basic) -> None:
        if expr != sympy.true:
            found.setdefault(expr, what)

    for guard in shape_env.guards:
        add("guard", plain(guard.expr, rename))
    excluded = _exclusion(shape_env)
    if excluded is not None:
        add("exclusion", plain(excluded, rename))
    for symbol, bounds in shape_env.var_to_range.items():
        for end in _range_facts(symbol, bounds):
            add(f"range of {symbol}", plain(end, rename))
    for symbol, expr in shape_env.replacements.items():
        add(f"replacement of {symbol}", _eq(plain(symbol, rename), plain(expr, rename)))
    for expr in shape_env.divisible:
        add("divisible", _eq(plain(expr, rename), sympy.Integer(0)))
    if asserts:
        for deferred in shape_env.deferred_runtime_asserts.values():
            for one in deferred:
                add("runtime assert", plain(one.expr, rename))
    if isinstance(rename, Naming):
        for what, expr in rename.equalities:
            add(what, expr)
    hints = tuple(
        (plain(symbol, rename).name, float(value) if not symbol.is_integer else int(value))
        for symbol, value in shape_env.backed_var_to_val.items()
        if isinstance(value, (int, float, sympy.Integer, sympy.Float))
    )
    return Facts(tuple(found), tuple(found.values()), hints)


def _eq(left: sympy.Basic, right: sympy.Basic) -> sympy.Basic:
    return sympy.true if left == right else sympy.Eq(left, right, evaluate=False)


def _range_facts(symbol: sympy.Symbol, bounds: Any) -> list[sympy.Basic]:
    ends: list[sympy.Basic] = []
    if bounds.lower not in INFINITIES:
        ends.append(sympy.Le(bounds.lower, symbol, evaluate=False))
    if bounds.upper not in INFINITIES:
        ends.append(sympy.Le(symbol, bounds.upper, evaluate=False))
    return ends


def _exclusion(shape_env: Any) -> sympy.Basic | None:
    """The guard that keeps inputs of an older, more special graph away."""
    pairs = shape_env.exclusion_constraints
    if not (dynamo_config.automatic_dynamic_exclusion_guard and pairs):
        return None
    if dynamo_config.enable_compiler_collectives:
        return None
    if all(shape_env.backed_var_to_val.get(symbol) == value for symbol, value in pairs):
        return None
    unequal = [sympy.Ne(s, sympy.Integer(v), evaluate=False) for s, v in pairs]
    return unequal[0] if len(unequal) == 1 else sympy.Or(*unequal, evaluate=False)


def _numbers(name: str, value: Any) -> Iterable[tuple[str, Any, bool]]:
    """The numbers of an input: source, value, whether a plain number counts as well."""
    if not isinstance(value, torch.Tensor):
        if value is not None:
            yield name, value, True
        return
    for i, size in enumerate(value.size()):
        yield f"{name}.size()[{i}]", size, False
    if value.layout is torch.strided:
        for i, stride in enumerate(value.stride()):
            yield f"{name}.stride()[{i}]", stride, False
        yield f"{name}.storage_offset()", value.storage_offset(), False
    if is_traceable_wrapper_subclass(value):
        for attr in value.__tensor_flatten__()[0]:
            inner = getattr(value, attr)
            if isinstance(inner, torch.Tensor):
                yield from _numbers(f"{name}.{attr}", inner)


def _expr_of(number: Any) -> sympy.Basic:
    sym_node = getattr(number, "node", None)
    if sym_node is None:
        return sympy.sympify(number)
    if isinstance(sym_node, SymNode):
        return sympy.sympify(sym_node.expr)
    return nested_int(SingletonInt(sym_node.nested_int(), coeff=sym_node.nested_int_coeff()))


# --- the verdict --------------------------------------------------------------------------------

How = Literal["proved", "sampled", "differs", "undecided"]


class Difference(NamedTuple):
    """A fact of one set that does not follow from the other."""

    fact: sympy.Basic
    what: str
    counterexample: Point
    """Values for which the other set holds and the fact does not."""

    def __str__(self) -> str:
        at = ", ".join(f"{n} = {v}" for n, v in sorted(self.counterexample.items()))
        what = f" ({self.what})" if self.what else ""
        return f"{self.fact}{what}, not at {at or 'any point'}"


class Verdict(NamedTuple):
    """What a comparison of two sets of facts came to."""

    how: How
    """``proved`` equivalent; ``sampled``: not proved in full, and no counterexample found;
    ``undecided``: as before, but the search came to no point where the other facts hold, so that
    it says nothing; ``differs``."""
    lost: tuple[Difference, ...] = ()
    """Facts of the first set that do not follow from the second."""
    new: tuple[Difference, ...] = ()
    """Facts of the second set that do not follow from the first."""
    open: tuple[str, ...] = ()
    """Facts that were sampled, are undecided, or follow from a contradiction, and why."""

    def __bool__(self) -> bool:
        """Whether the sets are taken for equivalent."""
        return self.how in ("proved", "sampled")

    def __str__(self) -> str:
        lines = [self.how]
        lines += [f"  lost: {d}" for d in self.lost]
        lines += [f"  new: {d}" for d in self.new]
        lines += [f"  open: {text}" for text in self.open]
        return "\n".join(lines)


def equivalent(
    a: Facts, b: Facts, *, timeout_ms: int = TIMEOUT_MS, samples: int = SAMPLES
) -> Verdict:
    """Whether each fact of either set follows from the other set.

    Args:
        a: the facts as they should be.
        b: the facts as they are.
        timeout_ms: how long z3 may think about one fact, in milliseconds.
        samples: how many starts a search for a counterexample makes.
    """
    hints = {**dict(b.hints), **dict(a.hints)}
    a, b = _plain_facts(a, b)
    lost, left_open, one = _missing(a, b, hints, timeout_ms, samples)
    new, right_open, two = _missing(b, a, hints, timeout_ms, samples)
    how: How = "proved"
    if lost or new:
        how = "differs"
    elif "undecided" in (one, two):
        how = "undecided"
    elif "sampled" in (one, two):
        how = "sampled"
    return Verdict(how, tuple(lost), tuple(new), (*left_open, *right_open))


def assert_equivalent(a: Facts, b: Facts, *, samples: int = SAMPLES) -> Verdict:
    """The verdict on two equivalent sets.

    Raises:
        AssertionError: the sets differ, or nothing is known about a fact.
    """
    verdict = equivalent(a, b, samples=samples)
    if not verdict:
        raise AssertionError(f"the facts are not the same: {verdict}")
    return verdict


def _plain_facts(*sets: Facts) -> list[Facts]:
    """The sets over plain variables, every fact with a label.

    Raises:
        ValueError: a name stands for an integer here and for a float there.
    """
    done = [
        Facts(tuple(plain(e, {}) for e in one.exprs), one.what or ("",) * len(one.exprs))
        for one in sets
    ]
    kinds: dict[str, sympy.Basic] = {}
    for symbol in (s for one in done for expr in one.exprs for s in expr.free_symbols):
        if kinds.setdefault(str(symbol), symbol) != symbol:
            raise ValueError(f"{symbol} is an integer in one fact and a float in another")
    return done


# --- one direction ------------------------------------------------------------------------------


def _missing(
    facts: Facts, known: Facts, hints: dict[str, int | float], timeout_ms: int, samples: int
) -> tuple[list[Difference], list[str], How]:
    """The facts that do not follow from the known ones; what stayed open; the weakest answer."""
    prover = _Prover(known.exprs, hints, timeout_ms, samples)
    given = set(known.exprs)
    differences: list[Difference] = []
    unproved: list[str] = []
    weakest: How = "proved"
    for expr, what in zip(facts.exprs, facts.what, strict=True):
        if expr in given:
            continue
        how, counterexample, why = prover.ask(expr)
        if counterexample is not None:
            differences.append(Difference(expr, what, counterexample))
        elif why:
            unproved.append(f"{expr}{f' ({what})' if what else ''}: {how}, {why}")
            weakest = max(weakest, how, key=("proved", "sampled", "undecided").index)
    return differences, unproved, weakest


class _Prover:
    """Known facts, split into groups that share no variable, and z3's solvers for these."""

    def __init__(
        self,
        known: Sequence[sympy.Basic],
        hints: dict[str, int | float],
        timeout_ms: int,
        samples: int,
    ) -> None:
        self.hints = hints
        self.timeout_ms = timeout_ms
        self.samples = samples
        self.float_terms = Z3Terms()
        self.real_terms = Z3Terms(real_floats=True)
        self.groups = _Groups(known)
        self.solvers: dict[tuple[frozenset[int], bool], z3.Solver] = {}
        self.satisfiable: tuple[bool | None] | None = None

    def ask(self, fact: sympy.Basic) -> tuple[How, Point | None, str]:
        """Whether a fact follows; if not, where; if unknown, why."""
        members = self.groups.of(fact)
        known = self.groups.facts(members)
        result, first = self._query(fact, members, known, self.float_terms)
        if result == z3.unsat:
            return "proved", None, ""
        satisfiable = self._satisfiable()
        if satisfiable is False:
            return "proved", None, "the other facts contradict each other"
        if satisfiable is None:
            return "undecided", None, "nothing is known to make the other facts hold"
        starts = [first] if first is not None else []
        if first is not None and self._confirmed(first, fact, known):
            return "differs", first, ""
        why = "z3 does not know" if result == z3.unknown else "z3's counterexample is none"
        if self.float_terms.rounds:
            result, second = self._query(fact, members, known, self.real_terms)
            if second is not None:
                starts.append(second)
            if result == z3.unsat:
                why = "proved over the real numbers"
        found = search(known, fact, hints=self.hints, start=starts, tries=self.samples)
        if found.point is not None and not self._confirmed(found.point, fact, known):
            return "undecided", None, f"{why}; Python and sympy are at odds at {found.point}"
        if found.point is not None:
            return "differs", found.point, ""
        if not found.domain:
            return "undecided", None, f"{why}, and no point was found where the others hold"
        return "sampled", None, f"{why}; {found.domain} points hold"

    def _query(
        self, fact: sympy.Basic, members: frozenset[int], known: list[sympy.Basic], terms: Z3Terms
    ) -> tuple[Any, Point | None]:
        solver = self.solvers.get((members, terms.real_floats))
        if solver is None:
            solver = self._solver(known, terms)
            self.solvers[members, terms.real_floats] = solver
        denied = z3.Not(terms.fact(fact))
        solver.push()
        solver.add(denied)
        result = solver.check()
        model = solver.model() if result == z3.sat else None
        solver.pop()
        if result == z3.unknown:
            # What z3 does with one query alone is stronger on products than what it does step by
            # step.
            solver = self._solver(known, terms)
            solver.add(denied)
            result = solver.check()
            model = solver.model() if result == z3.sat else None
        return result, None if model is None else _point(model, [fact, *known], terms)

    def _solver(self, known: list[sympy.Basic], terms: Z3Terms) -> z3.Solver:
        solver = z3.Solver()
        solver.set("timeout", self.timeout_ms)
        solver.add(*(terms.fact(expr) for expr in known))
        return solver

    def _satisfiable(self) -> bool | None:
        """Whether the known facts hold anywhere; from facts that do not, everything follows."""
        if self.satisfiable is None:
            answers = [self._group_satisfiable(group) for group in self.groups.members.values()]
            somewhere = None if None in answers else True
            self.satisfiable = (False if False in answers else somewhere,)
        return self.satisfiable[0]

    def _group_satisfiable(self, known: list[sympy.Basic]) -> bool | None:
        solver = self._solver(known, self.float_terms)
        result = solver.check()
        if result == z3.unsat:
            return False
        starts: list[Point] = []
        if result == z3.sat:
            starts.append(_point(solver.model(), known, self.float_terms))
            if self._confirmed(starts[0], sympy.false, known):
                return True
        found = search(known, sympy.false, hints=self.hints, start=starts, tries=self.samples)
        return True if found.point is not None else None

    def _confirmed(self, point: Point, fact: sympy.Basic, known: list[sympy.Basic]) -> bool:
        """Whether the expressions themselves say that the point is a counterexample."""
        return confirmed(fact, point) is False and all(confirmed(e, point) is True for e in known)


def _point(model: z3.ModelRef, exprs: Sequence[sympy.Basic], terms: Z3Terms) -> Point:
    point: Point = {}
    for symbol in sorted({s for e in exprs for s in e.free_symbols}, key=str):
        value = model.eval(terms.var(symbol), model_completion=True)
        if z3.is_int_value(value):
            point[symbol.name] = value.as_long()
            continue
        if z3.is_algebraic_value(value):
            value = value.approx(20)
        point[symbol.name] = float(Fraction(value.numerator_as_long(), value.denominator_as_long()))
    return point


class _Groups:
    """Facts that share variables, directly or through others, belong together."""

    def __init__(self, exprs: Sequence[sympy.Basic]) -> None:
        names = [names_in(expr) for expr in exprs]
        edges = [(found[0], name) for found in names for name in found]
        parts = connected_components((sorted({name for _, name in edges}), edges))
        self.ids = {name: at for at, part in enumerate(parts) for name in part}
        self.members: dict[int, list[sympy.Basic]] = defaultdict(list)
        for expr, found in zip(exprs, names, strict=True):
            self.members[self.ids[found[0]] if found else -1].append(expr)

    def of(self, fact: sympy.Basic) -> frozenset[int]:
        """The groups that have to do with a fact."""
        return frozenset(self.ids[name] for name in names_in(fact) if name in self.ids)

    def facts(self, groups: frozenset[int]) -> list[sympy.Basic]:
        """The facts of some groups."""
        return [expr for group in sorted(groups) for expr in self.members[group]]
