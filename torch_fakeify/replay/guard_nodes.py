"""The facts of a ``ShapeEnv`` as guard nodes of a graph, and from there into another ``ShapeEnv``.

A Python condition on a size leaves no tensor operator in the graph, so the graph alone lacks its
assumptions. Here each becomes an assertion over the graph's inputs, directly after the placeholders,
which a fresh ``ShapeEnv`` assumes when the graph runs. `assert_nodes` inserts assertions about
numbers that the graph computes.
"""

from __future__ import annotations

import operator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import sympy
import torch
from torch.fx.node import map_arg

from torch_fakeify.compat import torch_dynamo
from torch_fakeify.compat.arguments import check_graph, check_shape_env, placeholders_of
from torch_fakeify.encoding.stacks import decode_stack, location_text, parse_stack
from torch_fakeify.errors import ShapeEnvError, UnsupportedValueError
from torch_fakeify.prover.implication import conflict
from torch_fakeify.records.tensor import StackDesc

from .bindings import env_or_none, mode_or_none, read_path
from .facts import Fact, assumed_facts, needed_facts, runtime_asserts
from .input_sites import Site, find_sites, site_texts
from .lowering import ASSERT_SCALAR, ASSERTS, ExprLowering, mark_of, strip_marked, value_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_TRUTH = operator.truth


class InsertedGuards(NamedTuple):
    """The facts of a ``ShapeEnv`` by outcome, each as text."""

    inserted: tuple[str, ...]
    """Asserted by nodes of the graph."""
    implied: tuple[str, ...]
    """Not inserted, since they follow from those inserted."""
    unreachable: tuple[str, ...]
    """Not inserted, since no input of the graph holds a symbol. They remain in the ``ShapeEnv`` and
    in the record of a capture."""


# --- insert ---------------------------------------------------------------------------------------


def insert_guards(
    gm: torch.fx.GraphModule, shape_env: Any, *, static: bool = False, minimal: bool = True
) -> InsertedGuards:
    """Insert the facts of a ``ShapeEnv`` about the graph's inputs, directly after the placeholders.

    The nodes compute each condition from the inputs: from scalars first, then from sizes, strides
    and storage offsets of tensors and of the inner tensors of wrapper subclasses, and from
    ``item()``. A condition that follows from others is not inserted. The environment is not changed.
    A second call first removes the nodes of the first one.

    Each node has a mark in ``meta["custom"]["torch_fakeify"]``: ``what`` it is (``range``,
    ``equality``, ``divisible``, ``guard``, ``exclusion`` or ``compute``) and the ``expr`` over the
    inputs; ``meta["stack_trace"]`` is the user's line that caused the fact.

    Args:
        gm: a graph with fake values in ``meta``, as Dynamo, AOTAutograd and ``make_fx`` make it.
        shape_env: the ``ShapeEnv`` of these values.
        static: also assert the static sizes. A frontend checks them with the rest of the tensor, such
            as its dtype, and a record has them as integers.
        minimal: omit conditions that follow from others; finding them takes two fifths of the time.

    Raises:
        ShapeEnvError: an input has no fake value, or one of another ``ShapeEnv``.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda x: x[1:], tracing_mode="symbolic")(torch.ones(4))
        >>> x = gm.graph.find_nodes(op="placeholder")[0].meta["val"]
        >>> tfk.insert_guards(gm, x.fake_mode.shape_env).inserted
        ('x_1.size(0) >= 3',)
    """
    check_graph(gm)
    check_shape_env(shape_env)
    strip_marked(gm, lambda what: what not in ASSERTS)
    graph = gm.graph
    lowering = ExprLowering(graph, shape_env)
    sites = find_sites(graph, shape_env)
    inserter = _Inserter(lowering, shape_env)
    with graph.inserting_before(_after_placeholders(graph)):
        others = inserter.bind(sites)
        facts = [
            inserter.reached(fact)
            for fact in assumed_facts(shape_env)
            if not inserter.is_computed(fact)
        ]
        reachable = [fact for fact in facts if inserter.can_reach(fact)]
        needed, implied = needed_facts(reachable, shape_env) if minimal else (reachable, [])
        ranges = sum(fact.what == "range" for fact in needed)  # they come first
        for fact in needed[:ranges]:
            inserter.state(fact)
        inserter.equalities(others, static=static)
        for fact in needed[ranges:]:
            inserter.state(fact)
    inserter.drop_unused()
    gm.recompile()
    inserted = set(map(id, inserter.done))
    return InsertedGuards(
        inserted=tuple(inserter.texts),
        implied=tuple(lowering.text(fact.expr) for fact in implied),
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
    """Inserts assertions at one place of a graph."""

    def __init__(self, lowering: ExprLowering, env: Any) -> None:
        self.lowering = lowering
        self.env = env
        self.done: list[Fact] = []
        self.texts: list[str] = []
        self._first: dict[sympy.Basic, Site] = {}
        self._rank: dict[sympy.Basic, int] = {}
        self._texts: dict[sympy.Basic, str] = {}
        self._reads: dict[Any, torch.fx.Node] = {}

    def bind(self, sites: Sequence[Site]) -> list[Site]:
        """Assign each symbol the first site that holds it; returns the other sites."""
        others: list[Site] = []
        for site in sites:
            if isinstance(site.expr, sympy.Symbol) and site.expr not in self._first:
                self._hold(site.expr, site)
            else:
                others.append(site)
        self._texts = site_texts(sites)
        return others

    def _hold(self, symbol: sympy.Symbol, site: Site) -> None:
        self._rank[symbol] = len(self._first)
        self._first[symbol] = site

    def can_reach(self, fact: Fact) -> bool:
        return fact.expr.free_symbols <= self._first.keys()

    def reached(self, fact: Fact) -> Fact:
        """The fact over symbols that inputs hold, if replacements allow it; else the fact itself."""
        if self.can_reach(fact):
            return fact
        expr: Any = self.env.replace(fact.expr)
        replaced = fact._replace(expr=expr)
        is_open = expr not in (sympy.true, sympy.false)
        return replaced if is_open and self.can_reach(replaced) else fact

    def is_computed(self, fact: Fact) -> bool:
        """Whether a condition is about an unbacked symbol that the graph itself binds."""
        return any(
            symbol not in self._first
            and symbol not in self.env.unbacked_inputs
            and symbol not in self.env.backed_var_to_val
            for symbol in fact.expr.free_symbols
        )

    def equalities(self, sites: Sequence[Site], *, static: bool) -> None:
        """State for each site that binds no symbol the expression that it equals."""
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
        """Insert the nodes that assert a condition, unless no graph function computes it."""
        self.lowering.stack_trace = location_text(fact.location)
        for symbol in sorted(fact.expr.free_symbols, key=self._rank.__getitem__):
            if not self.lowering.is_bound(symbol):
                self._read(symbol)
        try:
            condition = self.lowering.compute(fact.expr, is_evaluated=_is_evaluated(fact))
        except UnsupportedValueError:
            return  # it is reported as not inserted
        text = text or self.lowering.text(fact.expr)
        mark = {"what": fact.what, "expr": text}
        if self._always_holds(fact, condition):
            # Otherwise torch's ``dedupe_symints`` would merge it with other conditions that are true
            # by now, such as ``item == 3``, which would then not be checked.
            condition = self.lowering.call(_TRUTH, (condition,), {**mark, "what": "compute"})
        self.lowering.call(ASSERT_SCALAR, (condition, f"the graph assumes {text}"), mark)
        self.done.append(fact)
        self.texts.append(text)

    def _always_holds(self, fact: Fact, condition: Any) -> bool:
        """Whether the environment has made a condition on the inputs' sizes a constant."""
        value = value_of(condition)
        if not isinstance(value, torch.SymBool) or value.node.expr != sympy.true:  # type: ignore[attr-defined]
            return False
        return all(
            self._first[symbol].prop != "item" and symbol not in self.env.unbacked_inputs
            for symbol in fact.expr.free_symbols
        )

    def _read(self, symbol: Any) -> None:
        site = self._first[symbol]
        operand = read_path(self.lowering, site.placeholder, site.path, self._reads)
        self.lowering.bind(symbol, operand)
        self.lowering.name(symbol, self._texts.get(symbol, site.text))
        if site.prop == "as_int":  # a ShapeEnv derives more facts from the boolean itself
            self.lowering.bind(sympy.Eq(symbol, 1), site.placeholder)

    def drop_unused(self) -> None:
        """Remove the nodes that read sites for conditions that could not be computed."""
        for fx_node in reversed(self._reads.values()):
            if not fx_node.users:
                self.lowering.graph.erase_node(fx_node)


def _is_evaluated(fact: Fact) -> bool:
    """Whether sympy, asked to evaluate a condition, would return it as it is.

    So it does of a range whose bound the sign of its symbol, all that sympy knows of it, doesn't decide.
    """
    symbol, expr = fact.symbol, fact.expr
    if symbol is None:
        return fact.what == "guard"
    if not isinstance(expr, (sympy.Ge, sympy.Le)) or expr.lhs != symbol:
        return False  # an environment has replaced the symbol
    bound: Any = expr.rhs
    return bool(symbol.is_integer and symbol.is_positive and bound.is_Integer and bound > 1)


# --- learn ----------------------------------------------------------------------------------------


def learn(gm: torch.fx.GraphModule, fake_inputs: Sequence[Any]) -> int:
    """State the assertions of a graph's inserted nodes in the ``ShapeEnv`` of fake inputs.

    Only the nodes of `insert_guards` run, and those of `insert_runtime_asserts` that need only inputs.
    A fact that the environment has already adds nothing.

    Args:
        gm: a graph with guard nodes.
        fake_inputs: one for each placeholder: fake tensors of one mode, symbolic scalars of its
            ``ShapeEnv``, constants.

    Returns:
        How many assertions were run.

    Raises:
        ShapeEnvError: the inputs do not fit the graph, are not of one ``ShapeEnv``, or contradict an
            assertion; or two assertions contradict each other, and both are named. Facts stated
            before the error remain: `checkpoint` can roll them back.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda x: x[1:], tracing_mode="symbolic")(torch.ones(4))
        >>> x = gm.graph.find_nodes(op="placeholder")[0].meta["val"]
        >>> _ = tfk.insert_guards(gm, x.fake_mode.shape_env)
        >>> tfk.learn(gm, [x])
        1
    """
    placeholders = placeholders_of(gm, fake_inputs)
    mode, env = _home_of(fake_inputs)
    learner = _Learner(env, dict(zip(placeholders, fake_inputs, strict=True)))
    # A context with the mode would end with ShapeEnv.cleanup, which drops all stacks.
    pending = nullcontext() if env is None else env.ignore_fresh_unbacked_symbols()
    with torch_dynamo.tracing(torch_dynamo.TracingContext(None)), mode or nullcontext(), pending:
        for fx_node in gm.graph.nodes:
            if mark_of(fx_node) is not None:
                learner.run(fx_node)
    return learner.count


def _home_of(inputs: Sequence[Any]) -> tuple[Any | None, Any | None]:
    modes, envs = (
        {id(owner): owner for owner in map(owner_of, inputs) if owner is not None}
        for owner_of in (mode_or_none, env_or_none)
    )
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
            return  # it needs a number that the graph computes
        args: Any = map_arg(fx_node.args, self.values.__getitem__)
        if fx_node.target is ASSERT_SCALAR:
            self.count += 1
            with torch_dynamo.TracingContext.current_frame(_user_line(fx_node)):
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
        if sym_node.hint is None:  # no hint can contradict it
            culprits = self._culprits(expr)
            if culprits:
                raise _conflicting(text, culprits)
        sym_node.expect_true("", 0)
        self._stated.append((expr, text))

    def _culprits(self, expr: sympy.Basic) -> list[str]:
        """The texts of the facts, of the environment and of the graph, that contradict a condition."""
        facts: list[tuple[sympy.Basic, str]] = list(self._stated)
        if self.env is not None:
            facts += [(fact.expr, str(fact.expr)) for fact in assumed_facts(self.env)]
            facts += [(one.expr, str(one.expr)) for one in runtime_asserts(self.env)]
        culprits = conflict([fact for fact, _ in facts], expr) if facts else None
        return [facts[i][1] for i in culprits or ()]

    def _contradiction(self, text: str, expr: sympy.Basic) -> ShapeEnvError:
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
    """Remove the nodes of `insert_guards` and `insert_runtime_asserts`, also from retraced graphs.

    A marked node that other nodes use remains, and so do inputs that a compiler added for such nodes.

    Returns:
        How many nodes were removed.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda x: x[1:], tracing_mode="symbolic")(torch.ones(4))
        >>> x = gm.graph.find_nodes(op="placeholder")[0].meta["val"]
        >>> _ = tfk.insert_guards(gm, x.fake_mode.shape_env)
        >>> tfk.strip_guards(gm) > 0, tfk.strip_guards(gm)
        (True, 0)
    """
    check_graph(gm)
    return strip_marked(gm, lambda _what: True)
