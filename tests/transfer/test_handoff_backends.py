"""Backwards and failing backends behave as without a handoff."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from functorch.compile import make_boxed_func
from handoff_runs import Asking, Faked
from observe import Run, env_of_frame
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.decorators import mark_unbacked
from torch._subclasses.fake_tensor import DataDependentOutputException

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Callable
from handoff_runs import both_ways, one

# --- backward ---------------------------------------------------------------------------------------


@torch.library.custom_op("fakeify_guards::branches", mutates_args=())
def branches(x: torch.Tensor) -> torch.Tensor:
    """Return a value whose gradient is twice or three times, depending on the size."""
    return x.clone()


branches.register_fake(torch.empty_like)


branches.register_autograd(
    lambda ctx, g: g * 2 if ctx.n > 10 else g * 3,
    setup_context=lambda ctx, inputs, output: setattr(ctx, "n", inputs[0].shape[0]),
)


@torch.library.custom_op("fakeify_guards::checks", mutates_args=())
def checks(x: torch.Tensor) -> torch.Tensor:
    """Return a value whose gradient is for at most ten elements."""
    return x.clone()


def at_most_ten(_ctx: Any, g: torch.Tensor) -> torch.Tensor:
    """Return the gradient, after a check."""
    torch._check(g.shape[0] <= 10, lambda: "at most ten")
    return g * 3


checks.register_fake(torch.empty_like)


checks.register_autograd(at_most_ten)


def gradients(run: Run, inputs: list[torch.Tensor]) -> list[float | str]:
    """Return the gradient for each input, or the error."""
    return [gradient(run, x.requires_grad_()) for x in inputs]


def gradient(run: Run, x: torch.Tensor) -> float | str:
    """Return the first element of the gradient, or the error."""
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
    """AOTAutograd evaluates the size in the joint graph's trace, in which no node of it remains."""
    for way in (lambda b: b, tfk.handoff):
        run = Run.of(branches, way(backend), dynamic=True)
        assert gradients(run, [torch.ones(n) for n in (5, 20, 7, 30)]) == [3, 2, 3, 2]
        assert run.guards == [
            ("2 <= L['args'][0].size()[0] and L['args'][0].size()[0] <= 10",),
            ("11 <= L['args'][0].size()[0]",),
        ]


def without_caches() -> Any:
    """Trace and lower every graph: a cached one has its asserts only in its code."""
    return torch._functorch.config.patch(enable_autograd_cache=False)


def without_hint(n: int) -> torch.Tensor:
    """Return a vector whose size is unbacked."""
    x = torch.ones(n)
    mark_unbacked(x, 0)
    return x


def picked(x: torch.Tensor) -> torch.Tensor:
    """Call the operator with a size from the data."""
    return checks(torch.masked_select(x, x > 0)).sin()


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.filterwarnings("ignore:Error detected in")
@pytest.mark.parametrize(
    ("fn", "make"),
    [(checks, torch.ones), (checks, without_hint), (picked, torch.ones)],
    ids=["backed", "unbacked input", "unbacked"],
)
def test_a_check_in_the_backward_is_made_as_without_a_handoff(
    backend: str, fn: Any, make: Any
) -> None:
    """A later input that violates it raises the same error, by a guard or in the graph."""
    found: list[Any] = []
    for way in (lambda b: b, tfk.handoff):
        options = {"dynamic": True} if make is torch.ones else {}
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), without_caches():
            run = Run.of(fn, way(backend), **options)
            found.append(
                (gradients(run, [make(n) for n in (5, 8, 20)]), run.asserts, run.explained)
            )
    assert found[0] == found[1]


def lazy_backend(asked: list[Any]) -> Any:
    """Return a backend whose backward evaluates a size once no guard can be added."""

    def backward(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        env = env_of_frame()
        if not env.frozen:
            raise RuntimeError("too early")
        g = next(x for x in inputs if isinstance(x, torch.Tensor))
        asked.append((bool(g.size(0) <= 10), env.counter["ignored_backward_guard"]))
        return make_boxed_func(gm.forward)

    return aot_autograd(fw_compiler=lambda gm, _: make_boxed_func(gm.forward), bw_compiler=backward)


def test_a_late_backward_adds_no_guard(caplog: pytest.LogCaptureFixture) -> None:
    """Dynamo has made the guards already: torch counts the question as ignored."""
    found: list[Any] = []
    with caplog.at_level(logging.CRITICAL, "torch._functorch._aot_autograd.graph_compile"):
        for way in (lambda b: b, tfk.handoff):
            asked: list[Any] = []
            run = Run.of(one, way(lazy_backend(asked)), dynamic=True)
            found.append((gradients(run, [torch.ones(8), torch.ones(20)]), asked, run.guards))
    assert found[0] == found[1]
    assert found[1][1] == [(True, 1)]


# --- backends that raise ----------------------------------------------------------------------------


class Failing:
    """A backend that fails until it has been called a number of times."""

    def __init__(self, error: Exception, times: int, asks: Callable[..., Any]) -> None:
        self.error = error
        self.times = times
        self.asking = Asking(asks)
        self.calls = 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """Ask and fail, or ask and compile."""
        made = self.asking(gm, inputs)
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return made


def failing_both_ways(error: Exception, times: int) -> list[Any]:
    """Return error or results, calls and guards of a failing backend, direct and by handoff."""
    found: list[Any] = []
    for way in (Faked, tfk.handoff):
        inner = Failing(error, times, lambda x: bool(x.size(0) <= 20))
        run = Run.of(lambda x: one(x).sin(), way(inner), dynamic=True)
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
def test_an_error_of_the_backend_has_its_effect_without_a_handoff(
    error: Exception, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The error itself causes a restart, a graph break or a failure, and no fact is propagated."""
    with caplog.at_level(logging.CRITICAL):
        direct, ours = failing_both_ways(error, times)
    assert ours == direct


def test_the_backend_may_catch_the_error_of_a_question() -> None:
    """An undecidable question adds no fact, and the next ones do."""

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
    assert ours.explained == direct.explained


@pytest.mark.filterwarnings("ignore")
def test_specializing_a_dynamic_dim_is_the_same_error(caplog: pytest.LogCaptureFixture) -> None:
    """The error has the same dim, size and location."""
    errors: list[str] = []
    with caplog.at_level(logging.CRITICAL):
        for way in (Faked, tfk.handoff):
            x = torch.zeros(8)
            torch._dynamo.mark_dynamic(x, 0)
            run = Run.of(one, way(Asking(lambda x: int(x.size(0)))))
            with pytest.raises(torch.fx.experimental.symbolic_shapes.ConstraintViolationError) as e:
                run(x)
            errors.append(str(e.value))
    assert errors[0] == errors[1]
    assert "8" in errors[0]


def test_dynamos_graph_is_not_changed() -> None:
    """After a backend that has failed, another one may be called with the graph."""

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

    run = Run.of(lambda x: one(x) if x.shape[0] > 3 else x, outer, dynamic=True)
    assert torch.equal(run(torch.zeros(4)), torch.ones(4))
