"""What a backend learns comes back: each kind of fact, as if there were no handoff."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import sympy
import torch
from functorch.compile import make_boxed_func
from guard_code import evaluate_code
from guard_runs import Asking, Faked, Run, env_of_frame
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.source import ConstantSource
from torch._guards import ShapeGuard
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import DimDynamic, RuntimeAssert, Specialization
from torch.utils._sympy.functions import Mod
from torch.utils._traceback import CapturedTraceback

import torch_fakeify as tfk
from torch_fakeify.census import SHAPE_ENV_ATTRIBUTES

if TYPE_CHECKING:
    from collections.abc import Callable


def one(x: torch.Tensor) -> torch.Tensor:
    """Adds one."""
    return x + 1


def each(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Adds one to each."""
    return [x + 1 for x in tensors]


def env_of(x: torch.Tensor) -> Any:
    """The environment of a size."""
    n: Any = x.size(0)
    return n.node.shape_env


def symbol(x: torch.Tensor, dim: int = 0) -> Any:
    """The expression of a size."""
    n: Any = x.size(dim)
    return n.node.expr


def tensors(*sizes: int) -> list[torch.Tensor]:
    """Vectors of such sizes, which are one symbol each."""
    made = [torch.zeros(n) for n in sizes]
    for x in made:
        torch._dynamo.maybe_mark_dynamic(x, 0)
    return made


def both_ways(fn: Any, asks: Any, *calls: list[Any], **options: Any) -> list[Run]:
    """A backend that asks, without a handoff and with it, called several times."""
    runs: list[Run] = []
    for way in (Faked, tfk.handoff):
        run = Run(fn, way(Asking(asks)), **options)
        for args in calls:
            run(*args)
        runs.append(run)
    return runs


# --- guards ---------------------------------------------------------------------------------------

# what is asked, two sizes that are met first, and two for which the answer is another one
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


@pytest.mark.sweep
def test_conditions_are_installed_as_without_a_handoff() -> None:
    """The same guards, word for word and with the same culprits; each one refuses other sizes."""

    def ask_all(*inputs: torch.Tensor) -> None:
        for i, (asks, _, _) in enumerate(QUESTIONS.values()):
            asks(*inputs[2 * i : 2 * i + 2])

    sizes = [n for _, first, _ in QUESTIONS.values() for n in first]
    with torch._dynamo.config.patch(assume_static_by_default=False), no_duck_shape():
        direct, ours = both_ways(each, ask_all, tensors(*sizes))
    assert ours.guards == direct.guards
    assert ours.told == direct.told
    (code,) = ours.guards
    assert evaluate_code(code, sample(sizes))
    for i, (what, (_, _, others)) in enumerate(QUESTIONS.items()):
        if what != "a constant":  # Dynamo checks it with the tensor
            changed = [*sizes[: 2 * i], *others, *sizes[2 * i + 2 :]]
            assert not evaluate_code(code, sample(changed)), what


def sample(sizes: list[int]) -> dict[str, int]:
    """The numbers that guards on some vectors look at."""
    names = (f"L['tensors'][{i}]" for i in range(len(sizes)))
    return {f"{name}.size()[0]": n for name, n in zip(names, sizes, strict=True)}


@pytest.mark.sweep
@pytest.mark.parametrize("what", QUESTIONS)
def test_a_condition_makes_dynamo_compile_again(what: str) -> None:
    """As often as without a handoff."""
    asks, first, then = QUESTIONS[what]
    with torch._dynamo.config.patch(assume_static_by_default=False):
        direct, ours = both_ways(each, asks, tensors(*first), tensors(*then))
    assert ours.guards == direct.guards
    assert (ours.count, direct.count) == (2, 2)


def no_duck_shape() -> Any:
    """Equal sizes are symbols of their own."""
    return torch.fx.experimental._config.patch(use_duck_shape=False)


# --- what is no guard -----------------------------------------------------------------------------


def tell(x: torch.Tensor, u: torch.Tensor, v: torch.Tensor) -> None:
    """Learns one fact of each kind, without a guard for any of them."""
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


def told(run: Run) -> dict[str, Any]:
    """What the environment of a run knows that `tell` may have told it, and from where."""
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
        "installed": run.told,
    }


def frame_of_tell() -> list[torch.Tensor]:
    """Six sizes that are symbols, and two that have no hints."""
    x = torch.zeros(8, 22, 11, 23, 25, 64, 1)
    torch._dynamo.mark_dynamic(x, (0, 1, 2, 4, 5))
    torch._dynamo.maybe_mark_dynamic(x, 3)
    u, v = torch.zeros(6), torch.zeros(7)
    mark_unbacked(u, 0)
    mark_unbacked(v, 0)
    return [x, u, v]


def test_facts_without_guards_come_back_whole() -> None:
    """Each attribute of Dynamo's environment is what it is if the backend has told it itself."""
    direct, ours = (told(run) for run in both_ways(each, tell, frame_of_tell()))
    for what, value in direct.items():
        assert ours[what] == value, what
    assert len(direct["asserts"][0]) == 2


def test_a_guard_that_takes_sizes_for_large_stays_one() -> None:
    """Torch decides by it which guards it can leave out."""

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


def test_a_size_to_specialize_on_is_dynamos_too() -> None:
    """Dynamo calls the backend again for inputs of that size."""

    def ask(x: torch.Tensor) -> None:
        if isinstance(x.size(0), torch.SymInt) and not env_of(x).frozen:
            env = env_of(x)
            (source,) = env.var_to_sources[symbol(x)]
            env.specializations.add(Specialization(source, lambda n: n == 8))

    direct, ours = both_ways(one, ask, tensors(7), tensors(8), tensors(8), dynamic=True)
    assert (ours.count, direct.count) == (2, 2)
    assert len(ours.guards) == 1


# --- symbols of one side --------------------------------------------------------------------------


def constant_of(x: torch.Tensor, n: int) -> Any:
    """A symbol of the backend alone: a size of something that the graph itself holds."""
    env = env_of(x)
    source = ConstantSource(f"__constant_{n}")
    made = env.create_symbol(n, source, dynamic_dim=DimDynamic.DYNAMIC)
    return env.create_symintnode(made, hint=n, source=source)


def test_what_is_said_of_a_constant_of_the_backend_is_said_of_its_value() -> None:
    """Without a handoff torch loses these guards, or fails to print them."""

    def ask(*x: torch.Tensor) -> None:
        c = [constant_of(t, n) for t, n in zip(x, (50, 60, 7, 90), strict=True)]
        assert x[0].size(0) == c[0]
        assert x[1].size(0) <= c[1]
        assert x[2].size(0) % c[2] == 0
        env_of(x[3])._set_replacement(symbol(x[3]), c[3].node.expr, "test")

    run = Run(each, tfk.handoff(Asking(ask)), dynamic=True)
    run(*tensors(50, 51, 49, 90))
    (env,) = run.envs
    by_size = {int(n): env.replace(s) for s, n in env.backed_var_to_val.items()}
    assert (by_size[50], by_size[90]) == (50, 90)
    assert sorted(run.guards[0]) == [
        "(L['tensors'][2].size()[0] % 7) == 0",
        "2 <= L['tensors'][1].size()[0] and L['tensors'][1].size()[0] <= 60",
        "2 <= L['tensors'][2].size()[0]",
    ]


def test_what_is_said_of_a_retraced_number_is_said_of_the_number() -> None:
    """A symbol that a retrace makes for a number of the graph goes back under the number's name."""

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


def test_what_only_the_backend_computes_stays_there() -> None:
    """A runtime assert about a number that Dynamo's graph does not have is no fact of Dynamo's."""

    def check(x: torch.Tensor) -> None:
        env = env_of(x)
        with env.ignore_fresh_unbacked_symbols():
            own = env.create_unbacked_symint()
        torch._check(x.size(0) <= 2 * own, lambda: "twice at most")
        torch._check(x.size(0) <= 40)

    run = Run(one, tfk.handoff(Asking(check)), dynamic=True)
    run(torch.zeros(5))
    assert run.asserts == [[]]
    assert run.guards == [("2 <= L['x'].size()[0] and L['x'].size()[0] <= 40",)]


# --- backward -------------------------------------------------------------------------------------


@torch.library.custom_op("fakeify_guards::branches", mutates_args=())
def branches(x: torch.Tensor) -> torch.Tensor:
    """Its gradient is twice or three times, by the size."""
    return x.clone()


branches.register_fake(torch.empty_like)
branches.register_autograd(
    lambda ctx, g: g * 2 if ctx.n > 10 else g * 3,
    setup_context=lambda ctx, inputs, output: setattr(ctx, "n", inputs[0].shape[0]),
)


@torch.library.custom_op("fakeify_guards::checks", mutates_args=())
def checks(x: torch.Tensor) -> torch.Tensor:
    """Its gradient is for at most ten elements."""
    return x.clone()


def at_most_ten(_ctx: Any, g: torch.Tensor) -> torch.Tensor:
    """The gradient."""
    torch._check(g.shape[0] <= 10, lambda: "at most ten")
    return g * 3


checks.register_fake(torch.empty_like)
checks.register_autograd(at_most_ten)


def gradients(run: Run, inputs: list[torch.Tensor]) -> list[float | str]:
    """The gradient for each input, or the error."""
    return [gradient(run, x.requires_grad_()) for x in inputs]


def gradient(run: Run, x: torch.Tensor) -> float | str:
    """The first element of the gradient, or the error."""
    try:
        run(x).sum().backward()
    except (RuntimeError, AssertionError) as error:
        return str(error).split("\n")[0]
    assert x.grad is not None
    return x.grad[0].item()


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.sweep)]
)
def test_a_backward_that_branches_on_a_size_is_right_for_later_sizes(backend: str) -> None:
    """The question is asked while AOTAutograd traces the joint graph, and no node is left of it."""
    for way in (lambda b: b, tfk.handoff):
        run = Run(branches, way(backend), dynamic=True)
        assert gradients(run, [torch.ones(n) for n in (5, 20, 7, 30)]) == [3, 2, 3, 2]
        assert run.guards == [
            ("2 <= L['args'][0].size()[0] and L['args'][0].size()[0] <= 10",),
            ("11 <= L['args'][0].size()[0]",),
        ]


def without_caches() -> Any:
    """Every graph is traced and lowered: a cached one has its asserts in its code alone."""
    return torch._functorch.config.patch(enable_autograd_cache=False)


def without_hint(n: int) -> torch.Tensor:
    """A vector whose size is unbacked."""
    x = torch.ones(n)
    mark_unbacked(x, 0)
    return x


def picked(x: torch.Tensor) -> torch.Tensor:
    """A size that the data tells goes through the operator."""
    return checks(torch.masked_select(x, x > 0)).sin()


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.filterwarnings("ignore:Error detected in")
@pytest.mark.parametrize(
    ("fn", "make"),
    [(checks, torch.ones), (checks, without_hint), (picked, torch.ones)],
    ids=["backed", "unbacked input", "unbacked"],
)
def test_a_check_of_the_backward_is_made_as_without_a_handoff(
    backend: str, fn: Any, make: Any
) -> None:
    """A later input that violates it gets the same error, from a guard or from the graph."""
    found: list[Any] = []
    for way in (lambda b: b, tfk.handoff):
        options = {"dynamic": True} if make is torch.ones else {}
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), without_caches():
            run = Run(fn, way(backend), **options)
            found.append((gradients(run, [make(n) for n in (5, 8, 20)]), run.asserts, run.told))
    assert found[0] == found[1]


def lazy_backend(asked: list[Any]) -> Any:
    """Its backward asks about a size, but fails as long as questions would become guards."""

    def backward(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        env = env_of_frame()
        if not env.frozen:
            raise RuntimeError("too early")
        g = next(x for x in inputs if isinstance(x, torch.Tensor))
        asked.append((bool(g.size(0) <= 10), env.counter["ignored_backward_guard"]))
        return make_boxed_func(gm.forward)

    return aot_autograd(fw_compiler=lambda gm, _: make_boxed_func(gm.forward), bw_compiler=backward)


def test_a_backward_that_is_compiled_late_guards_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Dynamo has made the guards by then: torch ignores the question, and notes that it did."""
    found: list[Any] = []
    with caplog.at_level(logging.CRITICAL, "torch._functorch._aot_autograd.graph_compile"):
        for way in (lambda b: b, tfk.handoff):
            asked: list[Any] = []
            run = Run(one, way(lazy_backend(asked)), dynamic=True)
            found.append((gradients(run, [torch.ones(8), torch.ones(20)]), asked, run.guards))
    assert found[0] == found[1]
    assert found[1][1] == [(True, 1)]


# --- storages -------------------------------------------------------------------------------------


def test_inputs_that_overlap_after_disjoint_ones() -> None:
    """The guard on their storage is AOTAutograd's, and no condition of a ``ShapeEnv``."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x + y

    found: list[Any] = []
    for way in (lambda b: b, tfk.handoff):
        run, results = Run(f, way("aot_eager"), dynamic=True), []
        for at in (4, 5, 2, 0):
            base = torch.arange(12.0)
            results.append(run(base[:4], base[at : at + 4]).tolist())
        found.append((results, run.count, run.guards))
    assert found[0] == found[1]
    expected = [torch.arange(12.0) for _ in range(4)]
    for base in expected:
        base[:4] *= 2
    at = (4, 5, 2, 0)
    assert found[1][0] == [
        (b[:4] + b[i : i + 4]).tolist() for b, i in zip(expected, at, strict=True)
    ]
    assert found[1][1] > 2


# --- backends that raise --------------------------------------------------------------------------


class Failing:
    """A backend that fails until it has been called a number of times."""

    def __init__(self, error: Exception, times: int, asks: Callable[..., Any]) -> None:
        self.error = error
        self.times = times
        self.asking = Asking(asks)
        self.calls = 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """Asks and fails, or asks and compiles."""
        made = self.asking(gm, inputs)
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return made


def failing_both_ways(error: Exception, times: int) -> list[Any]:
    """The error or the results, calls and guards of a backend that fails, direct and handed over."""
    found: list[Any] = []
    for way in (Faked, tfk.handoff):
        inner = Failing(error, times, lambda x: bool(x.size(0) <= 20))
        run = Run(lambda x: one(x).sin(), way(inner), dynamic=True)
        try:
            result: Any = [run(torch.zeros(n)).shape for n in (8, 9)]
        except Exception as caught:  # noqa: BLE001 - it is the result
            inside = getattr(caught, "inner_exception", None)
            result = (type(caught), str(caught).split("\n")[:2], inside is error)
        found.append((result, inner.calls, run.count, run.guards))
    return found


@pytest.mark.parametrize(
    ("error", "times"),
    [
        (torch._dynamo.exc.TensorifyScalarRestartAnalysis(restart_reason="test"), 1),
        (DataDependentOutputException(torch.ops.aten.item.default), 1),
        (ValueError("no such luck"), 1),
        (IndexError("too far"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
@pytest.mark.filterwarnings("ignore")
def test_an_error_of_the_backend_does_what_it_does_without_a_handoff(
    error: Exception, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A restart, a graph break or a failure, by the error itself; nothing half learned is kept."""
    with caplog.at_level(logging.CRITICAL):
        direct, ours = failing_both_ways(error, times)
    assert ours == direct


@pytest.mark.sweep
def test_floats_that_become_constants() -> None:
    """AOTAutograd asks Dynamo to trace again, with the float that it could not use as a constant."""

    def f(x: torch.Tensor, s: float) -> torch.Tensor:
        return x.reshape(-1) * 2 if s > 2 else torch.full((2,), s) * x.sum()

    found: list[Any] = []
    for way in (lambda b: b, tfk.handoff):
        with torch._dynamo.config.patch(specialize_float=False):
            run = Run(f, way("aot_eager"), dynamic=True)
            results = [run(torch.ones(4), s).tolist() for s in (2.5, 3.5, 1.5, 1.25)]
            found.append((results, run.count, run.guards))
    assert found[0] == found[1]
    assert found[0][0] == [[2.0] * 4, [2.0] * 4, [6.0, 6.0], [5.0, 5.0]]


def test_a_question_whose_error_the_backend_catches() -> None:
    """A question that has no answer leaves nothing behind, and the next ones count."""

    def ask(x: torch.Tensor) -> None:
        with pytest.raises(torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode):
            bool(x.size(0) > 7)
        with pytest.raises(RuntimeError, match="no such size"):
            torch._check(x.size(1) == 5, lambda: "no such size")
        bool(x.size(1) % 3 == 0)

    x = torch.zeros(8, 9)
    mark_unbacked(x, 0)
    torch._dynamo.mark_dynamic(x, 1)
    direct, ours = both_ways(one, ask, [x])
    assert ours.guards == direct.guards
    assert ours.told == direct.told


@pytest.mark.filterwarnings("ignore")
def test_specializing_a_dim_that_is_marked_dynamic(caplog: pytest.LogCaptureFixture) -> None:
    """The user is told the same: which dim, which size, and where."""
    errors: list[str] = []
    with caplog.at_level(logging.CRITICAL):
        for way in (Faked, tfk.handoff):
            x = torch.zeros(8)
            torch._dynamo.mark_dynamic(x, 0)
            run = Run(one, way(Asking(lambda x: int(x.size(0)))))
            with pytest.raises(torch.fx.experimental.symbolic_shapes.ConstraintViolationError) as e:
                run(x)
            errors.append(str(e.value))
    assert errors[0] == errors[1]
    assert "8" in errors[0]


def test_a_backend_is_called_again_with_the_same_graph() -> None:
    """As for sizes that a dim is specialized on: Dynamo's graph is as it was."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * y[: x.shape[0]]).sum() + x.shape[0]

    counts: list[int] = []
    for way in (lambda b: b, tfk.handoff):
        run = Run(f, way("aot_eager"))
        for n in (7, 8, 9, 8, 16):
            x = torch.arange(n).float()
            torch._dynamo.mark_dynamic(
                x, 0, specialize_on=[lambda s: s == 8, lambda s: s % 16 == 0]
            )
            assert run(x, torch.ones(20)).item() == n * (n - 1) / 2 + n
        counts.append(run.count)
    assert counts == [3, 3]


def test_dynamos_graph_is_as_it_was() -> None:
    """Also after a backend that has failed: another one may be called with it."""

    def outer(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        before = gm.code, [dict(fx_node.meta) for fx_node in gm.graph.nodes]
        with pytest.raises(ValueError, match="not today"):
            tfk.handoff(Failing(ValueError("not today"), 1, lambda x: bool(x.size(0) < 99)))(
                gm, inputs
            )
        after = gm.code, [dict(fx_node.meta) for fx_node in gm.graph.nodes]
        assert after[0] == before[0]
        assert all(
            a.keys() == b.keys() and all(a[key] is b[key] for key in a)
            for a, b in zip(after[1], before[1], strict=True)
        )
        return gm.forward

    run = Run(lambda x: one(x) if x.shape[0] > 3 else x, outer, dynamic=True)
    assert torch.equal(run(torch.zeros(4)), torch.ones(4))


# --- what contradicts -----------------------------------------------------------------------------


def wrong_guard(_: torch.Tensor, x: torch.Tensor) -> None:
    """Notes a guard that does not hold."""
    env = env_of(x)
    env.guards.append(ShapeGuard(symbol(x) > 1000, env._get_sloc(), False))


def wrong_assert(u: torch.Tensor, _: torch.Tensor) -> None:
    """Notes an assert that contradicts what the frame has checked."""
    env, n = env_of(u), symbol(u)
    one = RuntimeAssert(n > 1000, "a thousand", CapturedTraceback.extract())
    env.deferred_runtime_asserts.setdefault(n, []).append(one)


def wrong_replacement(_: torch.Tensor, x: torch.Tensor) -> None:
    """Says that an expression is another one that it never is."""
    env = env_of(x)
    replace(env, env.source_to_var["L['x'].size()[1]"], symbol(x, 2) + 1000)


def replace(env: Any, old: Any, new: Any) -> None:
    """Replace a symbol without a look at its bounds."""
    env.replacements[old] = new
    env._version_counter += 1


@pytest.mark.parametrize(
    ("tell", "text"),
    [
        (wrong_guard, r"s\d+ > 1000"),
        (wrong_assert, r"u0 > 1000"),
        (wrong_replacement, r"Eq\(s\d+, .*1000"),
    ],
)
def test_an_assumption_that_does_not_hold_is_an_error(tell: Any, text: str) -> None:
    """Else Dynamo's guards would let the frame's own inputs fail."""

    def f(x: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch._check(u.size(0) <= 60)
        torch._check(x.size(1) == 2 * x.size(0))
        return x + 1, u + 1

    x, u = torch.zeros(4, 8, 3), torch.zeros(6)
    torch._dynamo.mark_dynamic(x, (0, 1, 2))
    mark_unbacked(u, 0)
    with pytest.raises(Exception, match=rf"{text}.*: a backend assumed what does not hold"):
        Run(f, tfk.handoff(Asking(tell)))(x, u)


@pytest.mark.parametrize("dim", [0, 1], ids=["with wider bounds", "replaced already"])
def test_an_equality_that_becomes_no_replacement_is_a_guard(dim: int) -> None:
    """Torch replaces a symbol by one expression only, and by none of wider bounds."""

    def f(x: torch.Tensor) -> torch.Tensor:
        torch._check(x.size(1) == 2 * x.size(0))
        return x + 1

    def tell(x: torch.Tensor) -> None:
        env = env_of(x)
        replaced = env.source_to_var[f"L['x'].size()[{dim}]"]
        replace(env, replaced, (dim + 1) * (3 * symbol(x, 2) - 5))

    x = torch.zeros(4, 8, 3)
    torch._dynamo.mark_dynamic(x, (0, 1, 2))
    run = Run(f, tfk.handoff(Asking(tell)))
    run(x)
    for sizes, accepted in (((4, 8, 3), True), ((4, 8, 4), False), ((7, 14, 4), True)):
        numbers = {f"L['x'].size()[{i}]": n for i, n in enumerate(sizes)}
        strides = {
            "L['x'].stride()[0]": sizes[1] * sizes[2],
            "L['x'].stride()[1]": sizes[2],
        }
        assert evaluate_code(run.guards[0], {**numbers, **strides}) is accepted


# --- the class ------------------------------------------------------------------------------------

COMES_BACK = {
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
"""What Dynamo says when it makes the inputs of a frame; its symbols are not made by a backend."""

OF_SYMBOLS = {
    "ignorable_fresh_unbacked_symbols", "name_to_symbol", "pending_fresh_unbacked_symbols",
    "real_tensor_prop_unbacked_vals", "unbacked_alloc_order", "unbacked_renamings",
    "unbacked_symfloat_counter", "unbacked_symint_counter", "unique_ids", "var_to_stack",
}  # fmt: skip
"""What concerns the symbols of a backend's own graphs: facts about them go by what they stand for."""

ITS_OWN = {
    "_equality_graph", "_error_on_new_guards", "_expr_sym_node_id", "_prev_cache_key",
    "_replacements_version_counter", "_resimplify_floor_div_axioms",
    "_symop_cache", "_translation_validation_enabled", "_unbacked_replacements", "_version_counter",
    "check_recorded_events", "counter", "dim_constraints", "events", "fake_tensor_cache",
    "foreign_unbacked_symbol_cache", "frozen", "fx_node_cache", "graph", "is_recording", "log", "name_to_node", "runtime_asserts_frozen",
    "should_record_events", "symbol_guard_counter", "tracked_fakes", "validator",
}  # fmt: skip
"""Caches, counters, histories, and whether it still learns."""


def test_every_attribute_of_a_shape_env_is_looked_at() -> None:
    """One that torch adds must be put into a group."""
    groups = [COMES_BACK, OF_INPUTS, OF_SYMBOLS, ITS_OWN]
    assert sum(map(len, groups)) == len(set().union(*groups))
    assert set().union(*groups) == set(SHAPE_ENV_ATTRIBUTES)
