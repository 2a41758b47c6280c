"""``frontend.Policy``: which dims and numbers get symbols, and broken promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_frontend import Jit

import torch_fakeify as tfk
from torch_fakeify import frontend
from torch_fakeify.frontend import Dim, Policy

if TYPE_CHECKING:
    from collections.abc import Callable
from frontend_cases import DYNAMIC, close, grown


def sizes_of(scope: dict[str, Any], policy: Policy | None = None) -> list[list[str]]:
    """Return the sizes of the fake tensors."""
    trace = frontend.Trace(frontend.describe(scope, policy))
    tensors = [t for t in trace.inputs if isinstance(t, torch.Tensor)]
    backed = {str(n): None for t in tensors for n in t.size() if str(n).startswith("s")}
    names = dict(zip(backed, "abcde", strict=False))
    return [[names.get(str(n), str(n)) for n in t.size()] for t in tensors]


def test_a_policy_selects_dynamic_dims() -> None:
    """By default all dims are static; the name of an argument or a source selects dynamic ones."""
    scope = {"x": grown(4, 6, 4), "more": [grown(4, 9)]}
    assert sizes_of(scope) == [["4", "6", "4"], ["4", "9"]]
    named: dict[str, Any] = {"x": {0: "DYNAMIC", -1: "DUCK"}, "L['more'][0]": {0: "UNBACKED"}}
    assert sizes_of(scope, Policy(named=named)) == [["a", "6", "b"], ["u0", "9"]]
    assert sizes_of(scope, Policy(named={"x": "DYNAMIC"})) == [["a", "b", "c"], ["4", "9"]]
    assert sizes_of({**scope, "n": 3}, Policy(named={"n": "STATIC"})) == sizes_of(scope)
    everything = Policy(dims="DYNAMIC", named={"x": "STATIC"})
    assert sizes_of(scope, everything) == [["4", "6", "4"], ["a", "b"]]


def test_the_policy_of_a_base_is_its_own() -> None:
    """The policy of a view does not apply to its base, also if the view comes first."""
    x = grown(4, 6)
    policy = Policy(named={"x": "DYNAMIC"})
    assert sizes_of({"view": x[1:], "x": x}, policy) == [["3", "6"], ["a", "b"]]
    assert sizes_of({"x": x, "view": x[1:]}, policy) == [["a", "b"], ["3", "6"]]


def test_duck_shapes_can_be_switched_off() -> None:
    """Equal sizes share a symbol only if they are ``DUCK`` and the setting is on."""
    scope = {"x": grown(4, 6), "y": grown(6, 4)}
    assert sizes_of(scope, Policy(dims="DUCK")) == [["a", "b"], ["b", "a"]]
    apart = [["a", "b"], ["c", "d"]]
    assert sizes_of(scope, Policy(dims="DUCK", duck_shape=False)) == apart
    assert sizes_of(scope, Policy(dims="DYNAMIC")) == apart


def test_zero_and_one_may_be_symbols() -> None:
    """``specialize_zero_one`` is the setting of the ``ShapeEnv``."""
    scope = {"x": grown(1, 4)}
    assert sizes_of(scope, Policy(dims="DYNAMIC")) == [["1", "a"]]
    free = Policy(dims="DYNAMIC", specialize_zero_one=False)
    assert sizes_of(scope, free) == [["a", "b"]]


def test_marks_on_a_tensor_set_its_policy() -> None:
    """Dynamo's marks apply, unless the policy names the dim or ignores marks."""
    mark = torch._dynamo
    x = grown(4, 5, 6, 7, 8)
    mark.mark_dynamic(x, 0, min=2, max=64)
    mark.mark_static(x, 1)
    mark.maybe_mark_dynamic(x, 2)
    mark.decorators.mark_unbacked(x, 3)
    assert sizes_of({"x": x}) == [["a", "5", "b", "u0", "8"]]
    assert sizes_of({"x": x}, Policy(named={"x": {0: "STATIC"}})) == [["4", "5", "a", "u0", "8"]]
    assert sizes_of({"x": x}, Policy(marks=False)) == [["4", "5", "6", "7", "8"]]
    guards = Jit(lambda x: x + 1).entry({"x": x}).guards
    assert [g.text for g in guards if "size()[0]" in g.text and "stride" not in g.text] == [
        "L['x'].size()[0] >= 2",
        "L['x'].size()[0] <= 64",
    ]


def test_unbacked_dims_have_bounds() -> None:
    """The bounds are those of a policy or of a mark."""
    x = grown(8)
    torch._dynamo.decorators.mark_unbacked(x, 0, min=3, max=9)
    for policy in (Policy(), Policy(named={"x": {0: Dim("UNBACKED", min=3, max=9)}})):
        guards = Jit(lambda x: x + 1, policy).entry({"x": x}).guards
        assert [t for t in (g.text for g in guards) if ">=" in t or "<=" in t] == [
            "L['x'].size()[0] >= 3",
            "L['x'].size()[0] <= 9",
        ]


def test_parameters_have_a_policy_of_their_own() -> None:
    """Parameters and buffers, of modules and as arguments, have a default of their own."""
    model = torch.nn.BatchNorm1d(4)
    scope = {"m": model, "w": torch.nn.Parameter(grown(5)), "x": grown(6)}
    assert sizes_of(scope, Policy(dims="DYNAMIC")) == [*[["4"]] * 4, [], ["5"], ["a"]]
    both = Policy(dims="DYNAMIC", parameters="DUCK")
    found = sizes_of(scope, both)
    assert found[0] == found[3] != ["4"]
    assert found[5] != ["5"]


def test_numbers_become_symbols() -> None:
    """The policy makes all numbers dynamic, or those that it names."""
    scope = {"n": 5, "m": 7, "f": 2.5, "b": True}
    trace = frontend.Trace(frontend.describe(scope, Policy(scalars="DYNAMIC")))
    assert [type(value) for value in trace.inputs] == [
        torch.SymInt, torch.SymInt, torch.SymFloat, torch.SymBool,
    ]  # fmt: skip
    (flag,) = trace.inputs[3].node.expr.free_symbols
    bounds = trace.shape_env.var_to_range[flag]
    assert (bounds.lower, bounds.upper) == (0, 1)
    some = Policy(named={"n": Dim("UNBACKED", min=0, max=9), "m": Dim(min=2, max=50)})
    trace = frontend.Trace(frontend.describe(scope, some))
    assert [str(value) for value in trace.inputs] == ["u0", str(trace.inputs[1].node.expr)]
    # As for unbacked dims of inputs in torch: no operator binds them.
    assert list(trace.shape_env.unbacked_inputs) == [trace.inputs[0].node.expr]
    bounds = [trace.shape_env.bound_sympy(value.node.expr) for value in trace.inputs]
    assert [(b.lower, b.upper) for b in bounds] == [(0, 9), (2, 50)]


BROKEN: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "a constant": (
        lambda x: x.reshape(4, 3),
        "DYNAMIC",
        "You marked L['x'].size()[0] as dynamic but your code specialized it to be a constant (4)",
    ),
    "a part of the range": (
        lambda x: x + 1 if x.shape[0] < 10 else x,
        Dim(min=2, max=64),
        "Not all values of L['x'].size()[0] = L['x'].size()[0] in the specified range"
        " L['x'].size()[0] <= 64 satisfy the generated guard"
        " 2 <= L['x'].size()[0] and L['x'].size()[0] <= 9",
    ),
    "not all of its multiples": (
        lambda x: x + 1 if x.shape[0] % 2 == 0 else x,
        Dim(min=2, max=64),
        "Not all values of L['x'].size()[0] = L['x'].size()[0] in the specified range"
        " L['x'].size()[0] <= 64 satisfy the generated guard (L['x'].size()[0] % 2) == 0",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_promise_is_an_error(what: str) -> None:
    """As in ``torch.export``, a dim that the policy requires to be dynamic is not a constant."""
    fn, wish, found = BROKEN[what]
    with pytest.raises(tfk.ShapeEnvError) as info:
        Jit(fn, Policy(named={"x": {0: wish}}))(grown(4, 3))
    assert str(info.value) == (
        f"the trace has broken a promise of the policy; found {found}. "
        "Make the dim STATIC, or allow it with Dim(..., warn_only=True)"
    )
    dims = {0: Dim(wish, warn_only=True) if isinstance(wish, str) else
            Dim(wish.kind, wish.min, wish.max, warn_only=True)}  # fmt: skip
    close(Jit(fn, Policy(named={"x": dims}))(grown(4, 3)), fn(grown(4, 3)))


def test_a_number_that_is_named_dynamic_may_not_be_a_constant() -> None:
    """A number that is dynamic by default may become a constant."""
    fn = Jit(lambda x, n: x + 1 if n == 5 else x, DYNAMIC)
    close(fn(grown(4), 5), grown(4) + 1)
    named = Policy(named={"n": "DYNAMIC"})
    with pytest.raises(
        tfk.ShapeEnvError,
        match=r"L\['n'\] as dynamic but your code specialized it to be a constant \(5\)",
    ):
        Jit(fn.fn, named)(grown(4), 5)


def test_a_broken_promise_is_found_before_the_backend_is_called() -> None:
    """A backend may take long, so the promise is checked before."""
    calls: list[Any] = []
    with pytest.raises(tfk.ShapeEnvError):
        Jit(lambda x: x.reshape(4, 3), DYNAMIC, lambda *args: calls.append(args))(grown(4, 3))
    assert calls == []


def test_a_promise_that_the_backend_breaks_is_an_error() -> None:
    """The backend may not specialize what the trace may not."""

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        int(inputs[-1].size(0))
        return gm.forward

    with pytest.raises(tfk.ShapeEnvError, match="specialized it to be a constant \\(4\\)"):
        Jit(lambda x: x + 1, DYNAMIC, backend)(grown(4))
