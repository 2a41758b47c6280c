"""What a backend learns comes back: each kind of fact, as if there were no handoff."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import sympy
import torch
from functorch.compile import make_boxed_func
from guard_code import equivalent_code, evaluate_code
from guard_runs import Asking, Faked, Run, env_of_frame
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import DimDynamic
from torch.utils._sympy.functions import FloorDiv, Mod

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
        env._rename_unbacked_to(again.node.expr, n.node.expr)  # type: ignore[union-attr]
        torch._check(again <= 60, lambda: "sixty at most")
        env.constrain_symbol_range(n.node.expr, compiler_min=3, compiler_max=90)  # type: ignore[union-attr]

    x = torch.zeros(5)
    mark_unbacked(x, 0)
    direct, ours = both_ways(one, retrace, [x])
    assert ours.asserts[0] == direct.asserts[0]
    assert ours.guards == direct.guards == [("3 <= L['x'].size()[0] and L['x'].size()[0] <= 60",)]


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
