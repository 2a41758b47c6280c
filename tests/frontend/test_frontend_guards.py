"""Guards of a trace: their texts, functions and expressions agree, and equal those of Dynamo."""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import pytest
import torch
from guard_code import equivalent_code
from observe import Run
from small_frontend import Jit
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torch_fakeify import frontend
from torch_fakeify.frontend import Policy

if TYPE_CHECKING:
    from collections.abc import Callable
from frontend_cases import (
    CASES,
    DUCK,
    DYNAMIC,
    FEW,
    Tied,
    arithmetic,
    branches,
    call_module,
    check_forms,
    close,
    grown,
    some,
    two_tensors,
)

# --- modules and gradients --------------------------------------------------------------------------


def test_a_module_is_guarded_by_its_class_state_and_parts() -> None:
    """Another module of the class passes; another mode, configuration or part fails."""
    fn = Jit(call_module, DUCK, "eager")
    x = grown(5, 4)
    model = Tied()
    for change, count in (
        (lambda: None, 1),
        (lambda: model.load_state_dict(Tied().state_dict()), 1),
        (model.eval, 2),
        (lambda: setattr(model, "scale", 4.0), 3),
        (lambda: model.requires_grad_(requires_grad=False), 4),
        (lambda: setattr(model, "second", torch.nn.Identity()), 5),
    ):
        change()
        torch.testing.assert_close(fn(model, x), call_module(copy.deepcopy(model), x))
        assert fn.count == count
    assert fn.entries[0].guards.check(fn.scope(Tied(), x))


def test_inference_and_training_have_two_graphs() -> None:
    """Grad mode and the ``requires_grad`` of the argument are guarded."""
    fn = Jit(lambda x: x.sin(), DYNAMIC)
    x = grown(4).requires_grad_()
    assert fn(x).requires_grad
    with torch.no_grad():
        assert not fn(x).requires_grad
    assert not fn(x.detach()).requires_grad
    assert fn.missed[1:] == [
        ["torch.is_grad_enabled() == True"],
        ["L['x'].requires_grad is True", "torch.is_grad_enabled() == False"],
    ]


def test_bits_of_a_tensor_are_guarded() -> None:
    """The conjugate and negative bits are guarded, and whether it is an inference tensor."""
    fn = Jit(lambda x: x * 2, DYNAMIC, "eager")
    x = torch.complex(grown(4), grown(4))
    with torch.inference_mode():
        inferred = x * 1
    for t in (x, x.conj(), inferred, x.conj().imag):
        entry = fn.entry({"x": t})
        close(entry.run({"x": t}), t * 2)
    assert [missed[0] for missed in fn.missed[1:]] == [
        "L['x'].is_conj() is False",
        "L['x'].is_inference() is False",
        "L['x'].dtype == torch.complex64",
    ]


def test_a_graph_for_a_view_is_not_used_for_other_tensors() -> None:
    """A guard on the base of a view fails for a tensor without a base."""
    fn = Jit(lambda x: x + 1, DYNAMIC, "eager")
    for x in (grown(12)[:5], grown(5)):
        close(fn(x), x + 1)
    assert fn.missed[1] == ["L['x']._base.size()[0] >= 2"]


def test_autocast_is_guarded() -> None:
    """A graph that was traced under autocast is used only for calls under the same autocast."""
    fn = Jit(lambda x: x @ x, DYNAMIC)
    x = grown(4, 4)
    for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16):
        with torch.autocast("cpu", enabled=dtype is torch.bfloat16):
            assert fn(x).dtype is dtype
    assert fn.count == 2


# --- text, function, expression and record ------------------------------------------------------------------


AGREE = FEW | {"constant floats"}


@pytest.mark.parametrize("name", some(CASES, AGREE))
def test_text_function_expression_and_record_agree(name: str) -> None:
    """The forms of a guard agree on every call, up to the first guard that fails."""
    case = CASES[name]
    fn = Jit(case.fn, case.policy, "aot_eager")
    scopes = [fn.scope(*make()) for make in case.calls]
    for make in case.calls:
        fn.entry(fn.scope(*make()))
    compared = sum(check_forms(entry.guards, scopes) for entry in fn.entries)
    assert compared > 10 * len(scopes)


def test_expressions_are_over_sources() -> None:
    """Symbols are named after sources, so that two traces can be compared."""
    guards = Jit(branches, DUCK, "eager").entry({"x": grown(6, 5), "y": grown(30)}).guards
    assert {str(s) for expr in guards.exprs for s in expr.free_symbols} == {
        "L['x'].size()[0]", "L['x'].size()[1]", "L['x'].stride()[0]", "L['x'].stride()[1]",
        "L['x'].storage_offset()", "L['y'].size()[0]", "L['y'].stride()[0]",
        "L['y'].storage_offset()",
    }  # fmt: skip
    (guard,) = (g for g in guards if g.text == "2*L['x'].size()[0] > 9")
    assert "frontend_cases.py" in str(guard)
    assert "in branches" in str(guard)


def test_a_frontend_can_add_guards() -> None:
    """Guards are a sequence to which a frontend adds conditions of its own."""
    guards = Jit(lambda x: x + 1, DYNAMIC, "eager").entry({"x": grown(3)}).guards
    own = frontend.Guard("L['x'].sum() < 100", lambda scope: bool(scope["x"].sum() < 100))
    more = guards + [own]  # noqa: RUF005
    assert len(more) == len(guards) + 1
    assert more.failing({"x": grown(3) + 1000}) is own
    assert str(more).endswith("L['x'].sum() < 100")


# --- Dynamo's guards --------------------------------------------------------------------------------


class Same(NamedTuple):
    """A function that both frontends can trace under one policy."""

    fn: Callable[..., Any]
    args: Callable[[], list[Any]]
    policy: Policy
    dynamic: bool | None = None
    """The argument ``dynamic`` of ``torch.compile``."""
    backend: str = "aot_eager"


def marked(*marks: tuple[str, int]) -> Callable[[], list[Any]]:
    """Return a maker of a tensor with marks."""

    def make() -> list[Any]:
        x = grown(8, 6)
        for mark, dim in marks:
            getattr(torch._dynamo.decorators, mark)(x, dim)
        return [x]

    return make


SAME = {
    "branches": Same(branches, lambda: [grown(6, 5), grown(30)], DUCK, dynamic=True),
    "arithmetic": Same(arithmetic, lambda: [grown(8, 6), 3], DUCK, dynamic=True),
    "equal sizes": Same(lambda x, y: x @ y, lambda: [grown(4, 6), grown(6, 4)], DUCK, dynamic=True),
    "broadcast": Same(lambda x, y: x + y, lambda: [grown(4, 6), grown(1, 6)], DUCK, dynamic=True),
    "a specialized size": Same(
        lambda x: x + 1 if int(x.shape[0]) == 8 else x, lambda: [grown(8, 6)], DUCK, dynamic=True
    ),
    "strides": Same(lambda x: x * 2, lambda: [grown(6, 8).t()[1:, ::2]], DUCK, dynamic=True),
    "marks": Same(
        lambda x: x.view(-1) * 2 if x.shape[1] > 4 else x, marked(("mark_dynamic", 1)), Policy()
    ),
    "weak marks": Same(
        lambda x: x.view(4, 2, -1), marked(("maybe_mark_dynamic", 0), ("maybe_mark_dynamic", 1)),
        Policy(),
    ),
    "unbacked marks": Same(lambda x: x.sum(1) + x.shape[0], marked(("mark_unbacked", 0)), Policy()),
    "wrapper subclasses": Same(
        lambda t, y: t * t.shape[0] + y, two_tensors(4), DUCK, dynamic=True
    ),
}  # fmt: skip


def dynamos_guards(fn: Callable[..., Any], args: list[Any], **options: Any) -> list[str]:
    """Return the guards on shapes that Dynamo installs, with those on constant sizes."""
    produce = ShapeEnv.produce_guards_verbose
    found: list[str] = []

    def noted(env: Any, *args: Any, **kwargs: Any) -> Any:
        whole = {**kwargs, "ignore_static": False, "langs": ("python",)}
        texts = produce(env, *args, **whole)[0].exprs
        # No frontend guards those of the bases of views.
        found.extend(t for t in texts if not re.fullmatch(r".*\._base\S* == \d+", t))
        return produce(env, *args, **kwargs)

    with mock.patch.object(ShapeEnv, "produce_guards_verbose", noted):
        Run.of(fn, options.pop("backend"), **options).compiled(*args)
    return found


@pytest.mark.parametrize("name", some(SAME))
def test_guards_are_those_of_dynamo(name: str) -> None:
    """For one function and one policy, each guard follows from the guards of the other frontend."""
    case = SAME[name]
    theirs = dynamos_guards(case.fn, case.args(), dynamic=case.dynamic, backend=case.backend)
    fn = Jit(case.fn, case.policy, case.backend)
    entry = fn.entry(fn.scope(*case.args()))
    ours = [guard.text for guard in entry.guards if guard.expr is not None]
    assert theirs
    verdict = equivalent_code(theirs, ours)
    assert verdict.how == "proved", str(verdict)
