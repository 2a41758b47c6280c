"""New facts of a backend's ``ShapeEnv`` are propagated to Dynamo's: each kind of fact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import sympy
import torch
from guard_code import evaluate_code
from handoff_runs import Asking
from observe import Run
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.source import ConstantSource
from torch._guards import ShapeGuard
from torch.fx.experimental.symbolic_shapes import DimDynamic, RuntimeAssert, Specialization
from torch.utils._sympy.functions import Mod
from torch.utils._traceback import CapturedTraceback

import torch_fakeify as tfk
from torch_fakeify.compat.attribute_policies import SHAPE_ENV_ATTRIBUTES

if TYPE_CHECKING:
    from collections.abc import Callable
from handoff_runs import both_ways, each, one, symbol, tensors


def env_of(x: torch.Tensor) -> Any:
    """Return the environment of a size."""
    n: Any = x.size(0)
    return n.node.shape_env


# --- guards -----------------------------------------------------------------------------------------


# a condition, two sizes of the first call, and two for which the condition has another value
QUESTIONS: dict[str, tuple[Callable[..., Any], tuple[int, int], tuple[int, int]]] = {
    "a square": (lambda x, _: bool(x.size(0) ** 2 <= 4096), (8, 5), (65, 5)),
    "a constant": (lambda x, _: int(x.size(0)), (11, 13), (9, 13)),
    "a product": (lambda x, y: bool(x.size(0) * y.size(0) == 70), (7, 10), (7, 11)),
    "a multiple": (lambda x, y: bool(y.size(0) == 2 * x.size(0)), (14, 28), (14, 29)),
    "an equality": (lambda x, y: bool(x.size(0) == y.size(0)), (15, 15), (15, 16)),
    "a disequality": (lambda x, y: bool(x.size(0) == y.size(0)), (17, 18), (17, 17)),
    "divisibility": (lambda x, _: bool(x.size(0) % 4 == 0), (20, 21), (22, 21)),
    "a quotient": (lambda x, _: bool(x.size(0) // 4 == 6), (24, 25), (28, 25)),
    "a maximum": (
        lambda x, y: bool(torch.sym_max(x.size(0), y.size(0)) <= 99),
        (30, 31),
        (30, 100),
    ),
    "two at once": (
        lambda x, y: bool(x.size(0) > 5) and bool(y.size(0) % 3 == 0),
        (32, 33),
        (5, 33),
    ),
}


def test_conditions_are_installed_as_without_a_handoff() -> None:
    """The guards are equal in text and cause, and each one refuses other sizes."""

    def ask_all(*inputs: torch.Tensor) -> None:
        for i, (asks, _, _) in enumerate(QUESTIONS.values()):
            asks(*inputs[2 * i : 2 * i + 2])

    sizes = [n for _, first, _ in QUESTIONS.values() for n in first]
    with torch._dynamo.config.patch(assume_static_by_default=False), no_duck_shape():
        direct, ours = both_ways(each, ask_all, tensors(*sizes))
    assert ours.guards == direct.guards
    assert ours.explained == direct.explained
    (code,) = ours.guards
    assert evaluate_code(code, sample(sizes))
    for i, (what, (_, _, others)) in enumerate(QUESTIONS.items()):
        if what != "a constant":  # Dynamo checks it with the tensor
            changed = [*sizes[: 2 * i], *others, *sizes[2 * i + 2 :]]
            assert not evaluate_code(code, sample(changed)), what


def sample(sizes: list[int]) -> dict[str, int]:
    """Return the numbers that guards on some vectors use."""
    names = (f"L['tensors'][{i}]" for i in range(len(sizes)))
    return {f"{name}.size()[0]": n for name, n in zip(names, sizes, strict=True)}


def no_duck_shape() -> Any:
    """Give equal sizes different symbols."""
    return torch.fx.experimental._config.patch(use_duck_shape=False)


# --- facts that are no guards -----------------------------------------------------------------------


def assume(x: torch.Tensor, u: torch.Tensor, v: torch.Tensor) -> None:
    """Add one fact of each kind, without a guard for any of them."""
    env = env_of(x)
    a, b, c, d, e, f = (symbol(x, dim) for dim in range(6))
    env.constrain_symbol_range(a, compiler_min=4, compiler_max=100)
    env._set_replacement(b, 2 * c, "test")
    env._set_replacement(d, sympy.Integer(23), "test")
    env._add_divisible(Mod(e, 5))
    env.axioms.update(dict(env.get_implications(sympy.Le(f, 70))))
    env.var_to_hint_override[f] = 64
    env.exclusion_constraints.append((e, 40))
    env.size_like.add(symbol(u))
    torch._check(u.size(0) <= 5 * v.size(0), lambda: "at most five times")
    torch._check(v.size(0) >= 2)


def facts_of(run: Run) -> dict[str, Any]:
    """Return the facts that `assume` may add to the environment of a run, and their origin."""
    (env,) = run.envs
    return {
        "ranges": env.var_to_range,
        "range locations": {
            s: (str(at.lower), str(at.upper)) for s, at in env.var_to_range_sloc.items()
        },
        "replacements": env.replacements,
        "replacement locations": {s: str(at) for s, at in env.replacements_slocs.items()},
        "divisible": env.divisible,
        "axioms": env.axioms,
        "hint overrides": env.var_to_hint_override,
        "exclusions": env.exclusion_constraints,
        "size-like": env.size_like,
        "asserts": run.asserts,
        "guards": [guard.expr for guard in env.guards],
        "installed": run.explained,
    }


def assumed_inputs() -> list[torch.Tensor]:
    """Return tensors with six symbolic sizes, and two with sizes without hints."""
    x = torch.zeros(8, 22, 11, 23, 25, 64, 1)
    torch._dynamo.mark_dynamic(x, (0, 1, 2, 4, 5))
    torch._dynamo.maybe_mark_dynamic(x, 3)
    u, v = torch.zeros(6), torch.zeros(7)
    mark_unbacked(u, 0)
    mark_unbacked(v, 0)
    return [x, u, v]


def test_facts_without_guards_are_propagated() -> None:
    """Each attribute of Dynamo's environment is that of a backend without a handoff."""
    direct, ours = (facts_of(run) for run in both_ways(each, assume, assumed_inputs()))
    for what, value in direct.items():
        assert ours[what] == value, what
    assert len(direct["asserts"][0]) == 2


def test_a_size_oblivious_guard_stays_one() -> None:
    """Torch leaves out other guards depending on it."""

    def ask(x: torch.Tensor) -> None:
        n = symbol(x)
        env_of(x).evaluate_expr(sympy.Ne(n, 3 * n - 20), size_oblivious=True)
        env_of(x).evaluate_expr(sympy.Ne(n, 3 * n - 40))

    found = [
        [(guard.expr, guard.size_oblivious) for guard in run.envs[0].guards]
        for run in both_ways(one, ask, tensors(8), dynamic=True)
    ]
    assert found[0] == found[1]
    assert [large for _, large in found[1]] == [True, False]


def test_a_size_to_specialize_on_is_propagated() -> None:
    """Dynamo calls the backend again for inputs of that size."""

    def ask(x: torch.Tensor) -> None:
        if isinstance(x.size(0), torch.SymInt) and not env_of(x).frozen:
            env = env_of(x)
            (source,) = env.var_to_sources[symbol(x)]
            env.specializations.add(Specialization(source, lambda n: n == 8))

    direct, ours = both_ways(one, ask, tensors(7), tensors(8), tensors(8), dynamic=True)
    assert (ours.count, direct.count) == (2, 2)
    assert len(ours.guards) == 1


# --- symbols of one side ----------------------------------------------------------------------------


def constant_of(x: torch.Tensor, n: int) -> Any:
    """Make a symbol of the backend: a size of a constant in the graph."""
    env = env_of(x)
    source = ConstantSource(f"__constant_{n}")
    made = env.create_symbol(n, source, dynamic_dim=DimDynamic.DYNAMIC)
    return env.create_symintnode(made, hint=n, source=source)


def test_facts_on_a_constant_of_the_backend_are_on_its_value() -> None:
    """Without a handoff torch loses these guards, or fails to print them."""

    def ask(*x: torch.Tensor) -> None:
        c = [constant_of(t, n) for t, n in zip(x, (50, 60, 7, 90), strict=True)]
        assert x[0].size(0) == c[0]
        assert x[1].size(0) <= c[1]
        assert x[2].size(0) % c[2] == 0
        env_of(x[3])._set_replacement(symbol(x[3]), c[3].node.expr, "test")

    run = Run.of(each, tfk.handoff(Asking(ask)), dynamic=True)
    run(*tensors(50, 51, 49, 90))
    (env,) = run.envs
    by_size = {int(n): env.replace(s) for s, n in env.backed_var_to_val.items()}
    assert (by_size[50], by_size[90]) == (50, 90)
    assert sorted(run.guards[0]) == [
        "(L['tensors'][2].size()[0] % 7) == 0",
        "2 <= L['tensors'][1].size()[0] and L['tensors'][1].size()[0] <= 60",
        "2 <= L['tensors'][2].size()[0]",
    ]


def test_facts_on_a_retraced_number_are_on_the_number() -> None:
    """A symbol that a retrace makes for a number of the graph is renamed to the number's symbol."""

    def retrace(x: torch.Tensor) -> None:
        env, n = env_of(x), x.size(0)
        with env.ignore_fresh_unbacked_symbols():
            again = env.create_unbacked_symint()
        torch._check(again <= 80, lambda: "eighty at most")
        env._rename_unbacked_to(again.node.expr, symbol(x))
        torch._check(again <= 60, lambda: "sixty at most")
        env.constrain_symbol_range(symbol(x), compiler_min=3, compiler_max=90)
        assert isinstance(n, torch.SymInt)

    x = torch.zeros(5)
    mark_unbacked(x, 0)
    direct, ours = both_ways(one, retrace, [x])
    assert ours.guards == direct.guards == [("3 <= L['x'].size()[0] and L['x'].size()[0] <= 60",)]
    (asserts,) = ours.asserts
    assert [(str(expr), where) for expr, _, where in asserts] == [
        ("u0 <= 80", "retrace"),
        ("u0 <= 60", "retrace"),
    ]


def test_facts_on_a_number_of_the_backend_are_not_propagated() -> None:
    """Dynamo's graph does not have the number of the runtime assert."""

    def check(x: torch.Tensor) -> None:
        env = env_of(x)
        with env.ignore_fresh_unbacked_symbols():
            own = env.create_unbacked_symint()
        torch._check(x.size(0) <= 2 * own, lambda: "twice at most")
        torch._check(x.size(0) <= 40)

    run = Run.of(one, tfk.handoff(Asking(check)), dynamic=True)
    run(torch.zeros(5))
    assert run.asserts == [[]]
    assert run.guards == [("2 <= L['x'].size()[0] and L['x'].size()[0] <= 40",)]


# --- contradictions ---------------------------------------------------------------------------------


def wrong_guard(_: torch.Tensor, x: torch.Tensor) -> None:
    """Add a guard that does not hold."""
    env = env_of(x)
    env.guards.append(ShapeGuard(symbol(x) > 1000, env._get_sloc(), False))


def wrong_assert(u: torch.Tensor, _: torch.Tensor) -> None:
    """Add an assert that contradicts a check of the frame."""
    env, n = env_of(u), symbol(u)
    one = RuntimeAssert(n > 1000, "a thousand", CapturedTraceback.extract())
    env.deferred_runtime_asserts.setdefault(n, []).append(one)


def wrong_replacement(_: torch.Tensor, x: torch.Tensor) -> None:
    """Add a replacement of an expression by one that never equals it."""
    env = env_of(x)
    replace(env, env.source_to_var["L['x'].size()[1]"], symbol(x, 2) + 1000)


def replace(env: Any, old: Any, new: Any) -> None:
    """Replace a symbol without a check of its bounds."""
    env.replacements[old] = new
    env._version_counter += 1


@pytest.mark.parametrize(
    ("assume", "text"),
    [
        (wrong_guard, r"s\d+ > 1000"),
        (wrong_assert, r"u0 > 1000"),
        (wrong_replacement, r"Eq\(s\d+, .*1000"),
    ],
)
def test_an_assumption_that_does_not_hold_is_an_error(assume: Any, text: str) -> None:
    """Dynamo's guards would refuse the frame's own inputs."""

    def f(x: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch._check(u.size(0) <= 60)
        torch._check(x.size(1) == 2 * x.size(0))
        return x + 1, u + 1

    x, u = torch.zeros(4, 8, 3), torch.zeros(6)
    torch._dynamo.mark_dynamic(x, (0, 1, 2))
    mark_unbacked(u, 0)
    with pytest.raises(Exception, match=rf"{text}.*: a backend assumed what does not hold"):
        Run.of(f, tfk.handoff(Asking(assume)))(x, u)


@pytest.mark.parametrize("dim", [0, 1], ids=["with wider bounds", "replaced already"])
def test_an_equality_that_becomes_no_replacement_is_a_guard(dim: int) -> None:
    """Torch has one replacement for a symbol, and none with wider bounds."""

    def f(x: torch.Tensor) -> torch.Tensor:
        torch._check(x.size(1) == 2 * x.size(0))
        return x + 1

    def assume(x: torch.Tensor) -> None:
        env = env_of(x)
        replaced = env.source_to_var[f"L['x'].size()[{dim}]"]
        replace(env, replaced, (dim + 1) * (3 * symbol(x, 2) - 5))

    x = torch.zeros(4, 8, 3)
    torch._dynamo.mark_dynamic(x, (0, 1, 2))
    run = Run.of(f, tfk.handoff(Asking(assume)))
    run(x)
    for sizes, accepted in (((4, 8, 3), True), ((4, 8, 4), False), ((7, 14, 4), True)):
        numbers = {f"L['x'].size()[{i}]": n for i, n in enumerate(sizes)}
        strides = {
            "L['x'].stride()[0]": sizes[1] * sizes[2],
            "L['x'].stride()[1]": sizes[2],
        }
        assert evaluate_code(run.guards[0], {**numbers, **strides}) is accepted


# --- attributes of a ShapeEnv -----------------------------------------------------------------------


PROPAGATED = {
    "axioms", "deferred_runtime_asserts", "divisible", "exclusion_constraints", "guards",
    "num_deferred_runtime_asserts", "replacements", "replacements_slocs", "size_like",
    "specialization_stacks", "specializations", "var_to_hint_override", "var_to_range",
    "var_to_range_sloc",
}  # fmt: skip
"""Attributes of a ``ShapeEnv`` that a backend may add to."""


OF_INPUTS = {
    "_shape_id_to_unbacked_symbol", "_shape_spec_pending_assumptions",
    "_spec_symbol_to_compile_symbol", "backed_var_to_val", "co_fields", "settings",
    "source_name_to_debug_name", "source_to_symbol", "source_to_var", "trace_asserts",
    "unbacked_inputs", "val_to_var", "var_to_sources",
}  # fmt: skip
"""What Dynamo sets when it makes the inputs of a frame, whose symbols no backend makes."""


OF_SYMBOLS = {
    "ignorable_fresh_unbacked_symbols", "name_to_symbol", "pending_fresh_unbacked_symbols",
    "real_tensor_prop_unbacked_vals", "unbacked_alloc_order", "unbacked_renamings",
    "unbacked_symfloat_counter", "unbacked_symint_counter", "unique_ids", "var_to_stack",
}  # fmt: skip
"""Attributes of the symbols of a backend's own graphs, whose facts are renamed to Dynamo's symbols."""


ITS_OWN = {
    "_equality_graph", "_error_on_new_guards", "_expr_sym_node_id", "_prev_cache_key",
    "_replacements_version_counter", "_resimplify_floor_div_axioms",
    "_symop_cache", "_translation_validation_enabled", "_unbacked_replacements", "_version_counter",
    "check_recorded_events", "counter", "dim_constraints", "events", "fake_tensor_cache",
    "foreign_unbacked_symbol_cache", "frozen", "fx_node_cache", "graph", "is_recording", "log", "name_to_node", "runtime_asserts_frozen",
    "should_record_events", "symbol_guard_counter", "tracked_fakes", "validator",
}  # fmt: skip
"""Caches, counters, histories, and whether facts can still be added."""


def test_every_attribute_of_a_shape_env_is_classified() -> None:
    """An attribute that torch adds fails here, until it is in a group."""
    groups = [PROPAGATED, OF_INPUTS, OF_SYMBOLS, ITS_OWN]
    assert sum(map(len, groups)) == len(set().union(*groups))
    assert set().union(*groups) == set(SHAPE_ENV_ATTRIBUTES)
