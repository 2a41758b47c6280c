"""The facts of a ``ShapeEnv`` as nodes of a graph, and from there into another ``ShapeEnv``.

A Python condition on a size leaves no tensor operator behind, so the graph alone does not tell what
it assumes. Here every assumption becomes an assertion over the graph's inputs, right after the
placeholders: a fresh ``ShapeEnv`` learns it when the graph runs, before the first tensor operator.
See `torch_fakeify.runtime_asserts` for what a graph computes itself.
"""

from __future__ import annotations

import operator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import sympy
import torch
from torch.fx.node import map_arg

from . import _torch
from .desc import StackDesc
from .errors import ShapeEnvError, UnsupportedValueError
from .expr_nodes import ASSERTS, ExprNodes, mark_of, strip_marked, value_of
from .guard_facts import Fact, assumed_facts, needed_facts
from .implied import conflict
from .sites import Site, SiteReader, find_sites
from .stacks import decode_stack, location_text, parse_stack

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["InsertedGuards", "insert_guards", "learn", "strip_guards"]

_aten: Any = torch.ops.aten
_ASSERT = _aten._assert_scalar.default
_TRUTH = operator.truth


class InsertedGuards(NamedTuple):
    """What became of the facts of a ``ShapeEnv``; each tuple has their text."""

    inserted: tuple[str, ...]
    """Asserted by nodes of the graph."""
    implied: tuple[str, ...]
    """Left out, since they follow from those inserted."""
    unreachable: tuple[str, ...]
    """About what no input of the graph holds. They stay in the ``ShapeEnv``, and so in the record
    of a capture."""


# --- insert ---------------------------------------------------------------------------------------


def insert_guards(
    gm: torch.fx.GraphModule, shape_env: Any, *, static: bool = False, minimal: bool = True
) -> InsertedGuards:
    """Assert what a ``ShapeEnv`` assumes of the graph's inputs, right after the placeholders.

    The nodes compute each condition from the inputs: from scalars first, then from sizes, strides
    and storage offsets of tensors and of the inner tensors of wrapper subclasses, and from
    ``item()``. A condition that follows from the others is left out. No guard is added to the
    environment. A second call first takes out what the first one inserted.

    Each node has a mark in ``meta["custom"]["torch_fakeify"]``: ``what`` it is (``range``,
    ``equality``, ``divisible``, ``guard``, ``exclusion`` or ``compute``) and the ``expr`` over the
    inputs; ``meta["stack_trace"]`` has the user's line that caused it.

    Args:
        gm: a graph with fake values in ``meta``, as Dynamo, AOTAutograd and ``make_fx`` make it.
        shape_env: the ``ShapeEnv`` of these values.
        static: also assert the sizes that are plain integers. A frontend checks them with the rest
            of the tensor, as it does dtypes, and a record has them as integers.
        minimal: leave out conditions that follow from the others. To find them takes most of the
            time.

    Raises:
        ShapeEnvError: an input has no fake value, or one of another ``ShapeEnv``.
    """
    strip_marked(gm, lambda what: what not in ASSERTS)
    graph = gm.graph
    nodes = ExprNodes(graph, shape_env)
    sites = find_sites(graph, shape_env)
    inserter = _Inserter(nodes, shape_env)
    with graph.inserting_before(_after_placeholders(graph)):
        others = inserter.bind(sites)
        facts = [
            inserter.reached(fact)
            for fact in assumed_facts(shape_env)
            if not inserter.is_computed(fact)
        ]
        reachable = [fact for fact in facts if inserter.can_reach(fact)]
        needed, implied = needed_facts(reachable, shape_env) if minimal else (reachable, [])
        ranges = [fact for fact in needed if fact.what == "range"]
        inserter.facts(ranges)
        inserter.equalities(others, static=static)
        inserter.facts([fact for fact in needed if fact.what != "range"])
    inserter.reader.drop_unused()
    gm.recompile()
    inserted = set(map(id, inserter.done))
    return InsertedGuards(
        inserted=tuple(inserter.texts),
        implied=tuple(nodes.text(fact.expr) for fact in implied),
        unreachable=tuple(
            dict.fromkeys(
                str(fact.expr) for fact in facts if id(fact) not in inserted and fact not in implied
            )
        ),
    )


def _after_placeholders(graph: torch.fx.Graph) -> torch.fx.Node:
    for fx_node in graph.nodes:
        if fx_node.op != "placeholder":
            return fx_node
    raise ShapeEnvError(
        "the graph has no output", expected="an output node", fix="Call Graph.output first"
    )


class _Inserter:
    """One insertion at one place of a graph."""

    def __init__(self, nodes: ExprNodes, env: Any) -> None:
        self.nodes = nodes
        self.reader = SiteReader(nodes)
        self.env = env
        self.done: list[Fact] = []
        self.texts: list[str] = []
        self._first: dict[sympy.Basic, Site] = {}
        self._rank: dict[sympy.Basic, int] = {}
        self._texts: dict[sympy.Basic, str] = {}

    def bind(self, sites: Sequence[Site]) -> list[Site]:
        """Give each symbol the first site that holds it; returns the sites that are left."""
        others: list[Site] = []
        for site in sites:
            if isinstance(site.expr, sympy.Symbol) and site.expr not in self._first:
                self._hold(site.expr, site)
            else:
                others.append(site)
            if site.prop not in ("value", "as_int"):
                # Dynamo names a scalar input after its symbol; the size says more.
                self._texts.setdefault(site.expr, site.text)
        return others

    def _hold(self, symbol: sympy.Symbol, site: Site) -> None:
        self._rank[symbol] = len(self._first)
        self._first[symbol] = site

    def can_reach(self, fact: Fact) -> bool:
        """Whether inputs of the graph hold all symbols of a condition."""
        return fact.expr.free_symbols <= self._first.keys()

    def reached(self, fact: Fact) -> Fact:
        """The condition over symbols that inputs hold, if replacements make it one."""
        if self.can_reach(fact):
            return fact
        expr: Any = self.env.replace(fact.expr)
        replaced = fact._replace(expr=expr)
        tells = expr not in (sympy.true, sympy.false)
        return replaced if tells and self.can_reach(replaced) else fact

    def is_computed(self, fact: Fact) -> bool:
        """Whether the condition is about a number that the graph finds in its tensors' data."""
        return any(
            symbol not in self._first
            and symbol not in self.env.unbacked_inputs
            and symbol not in self.env.backed_var_to_val
            for symbol in fact.expr.free_symbols
        )

    def facts(self, facts: Sequence[Fact]) -> None:
        for fact in facts:
            self.state(fact)

    def equalities(self, sites: Sequence[Site], *, static: bool) -> None:
        """State what the sites that bind no symbol hold."""
        for site in sites:
            if isinstance(site.expr, sympy.Integer) and not static:
                continue
            if not site.expr.free_symbols <= self._first.keys():
                continue
            own = sympy.Symbol(site.text, integer=True)
            self._hold(own, site)
            location = self.env.replacements_slocs.get(site.expr)
            fact = Fact("equality", sympy.Eq(own, site.expr, evaluate=False), location)
            first = self._first.get(site.expr)
            same = first is not None and self._texts[site.expr] == site.text
            self.state(fact, f"{site.text} == {first.text}" if first and same else None)

    def state(self, fact: Fact, text: str | None = None) -> None:
        """Insert the nodes that assert a condition, unless no function computes it."""
        self.nodes.stack_trace = location_text(fact.location)
        for symbol in sorted(fact.expr.free_symbols, key=self._rank.__getitem__):
            if not self.nodes.is_bound(symbol):
                self._read(symbol)
        try:
            condition = self.nodes.compute(fact.expr)
        except UnsupportedValueError:
            return  # it is reported as not inserted
        text = text or self.nodes.text(fact.expr)
        mark = {"what": fact.what, "expr": text}
        if self._always_holds(fact, condition):
            # Else torch's ``dedupe_symints`` takes it for every other condition that is true by
            # now, such as ``item == 3``, which then is checked no more.
            condition = self.nodes.call(_TRUTH, (condition,), {**mark, "what": "compute"})
        self.nodes.call(_ASSERT, (condition, f"the graph assumes {text}"), mark)
        self.done.append(fact)
        self.texts.append(text)

    def _always_holds(self, fact: Fact, condition: Any) -> bool:
        """Whether the environment has made the condition a constant, on the inputs' sizes alone."""
        value = value_of(condition)
        if not isinstance(value, torch.SymBool) or value.node.expr != sympy.true:  # type: ignore[attr-defined]
            return False
        return all(
            self._first[symbol].prop != "item" and symbol not in self.env.unbacked_inputs
            for symbol in fact.expr.free_symbols
        )

    def _read(self, symbol: Any) -> None:
        site = self._first[symbol]
        self.nodes.bind(symbol, self.reader.read(site), self._texts.get(symbol, site.text))
        if site.prop == "as_int":  # a ShapeEnv learns more from the boolean itself
            self.nodes.know(sympy.Eq(symbol, 1), site.placeholder)


# --- learn ----------------------------------------------------------------------------------------


def learn(gm: torch.fx.GraphModule, fake_inputs: Sequence[Any]) -> int:
    """Tell a ``ShapeEnv`` what the inserted nodes assert of the graph's inputs.

    Only the nodes of `insert_guards` run, and of `insert_runtime_asserts` those that need nothing
    but inputs. A fact that the environment knows already adds nothing.

    Args:
        gm: a graph with guard nodes.
        fake_inputs: one for each placeholder: fake tensors of one mode, symbolic scalars of its
            ``ShapeEnv``, constants.

    Returns:
        How many assertions were run.

    Raises:
        ShapeEnvError: the inputs do not fit the graph, are not of one ``ShapeEnv``, or contradict
            an assertion; or two assertions contradict one another, and both are named. What was
            stated before that stays: see `checkpoint` for a way back.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    if len(placeholders) != len(fake_inputs):
        raise ShapeEnvError(
            "the inputs do not fit the graph",
            expected=f"{len(placeholders)} inputs, one for each placeholder",
            found=str(len(fake_inputs)),
        )
    mode, env = _home_of(fake_inputs)
    learner = _Learner(env, dict(zip(placeholders, fake_inputs, strict=True)))
    # A context that has the mode would end with ShapeEnv.cleanup, which forgets all stacks.
    pending = nullcontext() if env is None else env.ignore_fresh_unbacked_symbols()
    with _torch.tracing(_torch.TracingContext(None)), mode or nullcontext(), pending:
        for fx_node in gm.graph.nodes:
            if mark_of(fx_node) is not None:
                learner.run(fx_node)
    return learner.count


def _home_of(inputs: Sequence[Any]) -> tuple[Any | None, Any | None]:
    """The ``FakeTensorMode`` and the ``ShapeEnv`` of some inputs."""
    modes: dict[int, Any] = {}
    envs: dict[int, Any] = {}
    for value in inputs:
        mode = _torch.maybe_get_fake_mode(value) if isinstance(value, torch.Tensor) else None
        env = getattr(getattr(value, "node", None), "shape_env", None)
        if mode is not None:
            modes[id(mode)] = mode
            env = mode.shape_env
        if env is not None:
            envs[id(env)] = env
    if len(modes) > 1 or len(envs) > 1:
        raise ShapeEnvError(
            "the inputs are of several fake modes",
            expected="fake tensors of one FakeTensorMode and symbols of its ShapeEnv",
            found=f"{len(modes)} modes, {len(envs)} shape environments",
            fix="Bring them together: refakeify(inputs, mode)",
        )
    return next(iter(modes.values()), None), next(iter(envs.values()), None)


class _Learner:
    """Runs marked nodes on fake inputs."""

    def __init__(self, env: Any, values: dict[torch.fx.Node, Any]) -> None:
        self.env = env
        self.values = values
        self.count = 0
        self._stated: list[tuple[sympy.Basic, str]] = []

    def run(self, fx_node: torch.fx.Node) -> None:
        if any(arg not in self.values for arg in fx_node.all_input_nodes):
            return  # it needs what the graph computes
        args: Any = map_arg(fx_node.args, self.values.__getitem__)
        if fx_node.target is _ASSERT:
            self.count += 1
            with _torch.TracingContext.current_frame(_user_line(fx_node)):
                self.state(args[0], fx_node)
        elif fx_node.target is _TRUTH:
            self.values[fx_node] = args[0]  # the assertion states it
        else:
            target: Any = fx_node.target
            self.values[fx_node] = target(*args, **fx_node.kwargs)

    def state(self, condition: Any, fx_node: torch.fx.Node) -> None:
        text = (mark_of(fx_node) or {}).get("expr", fx_node.name)
        if not isinstance(condition, torch.SymBool):
            if not condition:
                raise self._contradiction(text, sympy.false)
            return
        sym_node: Any = condition.node
        expr = sym_node.expr
        if sym_node.hint is False or self.env._maybe_evaluate_static(expr) == sympy.false:
            raise self._contradiction(text, expr)
        if sym_node.hint is None:  # no number would give it away
            culprits = self._culprits(expr)
            if culprits:
                raise _conflicting(text, culprits)
        sym_node.expect_true("", 0)
        self._stated.append((expr, text))

    def _culprits(self, expr: sympy.Basic) -> list[str]:
        """The facts that a condition contradicts, the environment's own and those of the graph."""
        known: list[tuple[sympy.Basic, str]] = list(self._stated)
        if self.env is not None:
            known += [(fact.expr, str(fact.expr)) for fact in assumed_facts(self.env)]
            groups = self.env.deferred_runtime_asserts.values()
            known += [(one.expr, str(one.expr)) for group in groups for one in group]
        culprits = conflict([fact for fact, _ in known], expr) if known else None
        return [known[i][1] for i in culprits or ()]

    def _contradiction(self, text: str, expr: sympy.Basic) -> ShapeEnvError:
        """The error that names a fact and what it contradicts."""
        culprits = self._culprits(expr)
        if culprits:
            return _conflicting(text, culprits)
        values = {
            fx_node.name: str(value)
            for fx_node, value in self.values.items()
            if fx_node.op == "placeholder" and isinstance(value, (int, float, torch.SymInt))
        }
        return ShapeEnvError(
            "the inputs contradict what the graph assumes",
            where=text,
            expected=text,
            found=self._hints(expr, values),
            fix="Make the inputs of the frame that the graph was traced for",
        )

    def _hints(self, expr: sympy.Basic, values: Mapping[str, str]) -> str:
        if self.env is not None and expr.free_symbols:
            pairs = sorted((str(s), self.env.backed_var_to_val.get(s)) for s in expr.free_symbols)
            return ", ".join(f"{name} = {value}" for name, value in pairs)
        return ", ".join(f"{name} = {value}" for name, value in values.items()) or "it is false"


def _conflicting(text: str, culprits: Sequence[str]) -> ShapeEnvError:
    found = " and ".join(dict.fromkeys(culprits))
    return ShapeEnvError(
        "two facts contradict one another",
        where=text,
        expected=f"{text}, which the graph assumes",
        found=f"{found}, which the ShapeEnv knows",
        fix="Make the inputs of the frame that the graph was traced for",
    )


def _user_line(fx_node: torch.fx.Node) -> Any | None:
    text = fx_node.meta.get("stack_trace")
    desc = parse_stack(text, str) if isinstance(text, str) else None
    stack = decode_stack(desc) if isinstance(desc, StackDesc) else None
    return None if stack is None else stack.summary()[-1]


# --- strip ----------------------------------------------------------------------------------------


def strip_guards(gm: torch.fx.GraphModule) -> int:
    """Take out the nodes of `insert_guards` and `insert_runtime_asserts`, and nothing else.

    A marked node that another node has come to use stays. On a graph that was retraced from one with
    such nodes it works too; inputs that a compiler gave to it for them stay.

    Returns:
        How many nodes were taken out.
    """
    return strip_marked(gm, lambda _what: True)
