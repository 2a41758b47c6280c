"""A fresh instance of a frame can be compiled, and captured again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from fresh_checks import env_of
from program_runs import FAST, SLOW, recorded
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.source import LocalSource
from torch._dynamo.symbolic_convert import TensorifyState
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Callable
from fresh_frames import CASES, again, capture_of, case, facts_by_source, found_elsewhere

# --- compiling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("other_names", "symbolic_boolean")])
def test_a_fresh_instance_compiles(name: str) -> None:
    """AOTAutograd compiles it, and it gives the results of the restored instance."""
    capture = case(name)
    theirs = capture.instantiate().compile("aot_eager")(*inputs_of(name))
    ours = capture.instantiate(fresh=True).compile("aot_eager")(*inputs_of(name))
    for one, other in zip(ours, theirs, strict=True):
        values = [x.values() if getattr(x, "is_nested", False) else x for x in (one, other)]
        torch.testing.assert_close(*values, rtol=0, atol=0)


def inputs_of(name: str) -> list[Any]:
    """Return real inputs; numbers that a program reads from its data are those of the example."""
    sizes = {"unbacked": {"u0": 6, "u1": 6}, "marked": {"s77": 9}}.get(name)
    inputs = case(name).materialize(seed=3, sizes=sizes)
    numbers = {"item": [3], "products_of_items": [3, 4]}.get(name)
    if numbers is not None:
        tensor = next(
            x for x in inputs if isinstance(x, torch.Tensor) and not x.is_floating_point()
        )
        tensor.copy_(torch.tensor(numbers).reshape(tensor.shape))
    return inputs


def test_a_fresh_instance_can_be_trained() -> None:
    """The gradients of a fresh instance are eager's, at other sizes too."""
    linear = torch.nn.Linear(5, 3)
    capture = capture_of(lambda x: linear(x).relu().flatten(), (torch.randn(4, 5),), dynamic=True)
    compiled = capture.instantiate(fresh=True).compile("aot_eager")
    restored = env_of(capture.instantiate())
    rows = restored.source_to_var["L['x'].size()[0]"]
    inputs = capture.materialize(seed=1, sizes={str(rows): 9})
    weight, bias = sorted(
        (x for x in inputs if isinstance(x, torch.nn.Parameter)), key=lambda p: -p.dim()
    )
    (x,) = (i for i in inputs if isinstance(i, torch.Tensor) and not i.requires_grad)
    assert x.shape == (9, 5)
    (out,) = compiled(*inputs)
    expected = torch.nn.functional.linear(x, weight, bias).relu().flatten()
    ours = torch.autograd.grad(out.square().sum(), (weight, bias))
    theirs = torch.autograd.grad(expected.square().sum(), (weight, bias))
    assert all(torch.allclose(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_fresh_instance_restarts_with_a_float_as_a_constant() -> None:
    """A backend that asks for it gets a second fresh instance, with the constant in its graph."""
    instance = case("scalars").instantiate(fresh=True)
    environments: list[Any] = []

    def backend(gm: torch.fx.GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
        environments.append(instance.shape_env)
        if len(environments) == 1:
            (symbol,) = (s for s in env_of(instance).backed_var_to_val if str(s).startswith("zf"))
            TensorifyState.specialize(str(symbol))
            raise TensorifyScalarRestartAnalysis(restart_reason="a float")
        return gm.forward

    instance.compile(backend)
    assert list(instance.specialized.values()) == [2.5]
    first, second = environments
    assert first is not second
    assert [g.expr for g in first.guards] == [g.expr for g in second.guards]
    assert len(second.guards) == 2
    assert not instance.gm.graph.find_nodes(op="call_method", target="item")


def test_a_fresh_instance_can_be_on_another_device() -> None:
    """A frame recorded on an accelerator has the same facts on the CPU."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    rows = mode.from_tensor(torch.empty(8, 6), source=LocalSource("x")).shape[0]
    with mode:
        x = torch.empty((rows, 6), device="cuda:0")

    assert rows % 4 == 0
    capture = tfk.capture(torch.fx.symbolic_trace(lambda x: x.reshape(4, -1) + 1), [x])
    instance = capture.instantiate(device="cpu", fresh=True)
    assert instance.inputs[0].device.type == "cpu"
    assert list(facts_by_source(instance)) == ["Eq(Mod(L['x'].size()[0], 4), 0)"]
    (real,) = capture.materialize(device="cpu")
    assert torch.equal(instance.compile("eager")(real), real.reshape(4, -1) + 1)


@pytest.mark.parametrize("name", CASES)
def test_the_fingerprint_of_a_fresh_instance_is_stable(name: str) -> None:
    """Law 6: captured again and made fresh again, its fingerprint does not change any more.

    The first time it may: the fingerprint has the guards as they are written, and of guards that
    follow from others a fresh environment has none.
    """
    once = again(case(name).instantiate(fresh=True))
    if name in ("product", "twice", "nonzero", "scalars", "wrapper", "constant"):
        assert once.fingerprint() == case(name).fingerprint()
    assert again(once.instantiate(fresh=True)).fingerprint() == once.fingerprint()
    assert again(once.instantiate()).fingerprint() == once.fingerprint()


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.long)])
def test_every_program_is_the_same_frame_in_a_fresh_environment(
    slow: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each frame of the program zoo has equal facts, and equal results through AOTAutograd."""
    found = found_elsewhere(recorded(tmp_path_factory, slow=slow), "run")
    assert len(found) >= len(SLOW if slow else FAST)
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_facts_of_tensors_inside_a_transform_are_stated() -> None:
    """No operator outside the transform reads their sizes, so their facts are stated directly."""
    found: list[tfk.Capture] = []

    def body(x: Any, y: Any) -> Any:
        if x.shape[0] > 3:
            y = y * 2
        found.append(tfk.capture(torch.fx.symbolic_trace(lambda a, b: a + b.sin()), [x, y]))
        return (x * y).sum()

    mode = FakeTensorMode(shape_env=ShapeEnv())
    x, y = mode.from_tensor(torch.randn(3, 4)), mode.from_tensor(torch.randn(4))
    with mode:
        torch.func.vmap(torch.func.grad(body), in_dims=(0, None))(x, y)
    restored, fresh = found[0].instantiate(), found[0].instantiate(fresh=True)
    ranges = [
        {str(s): (str(r.lower), str(r.upper)) for s, r in env_of(i).var_to_range.items()}
        for i in (restored, fresh)
    ]
    assert ranges[0] == ranges[1]
    assert ("4", "int_oo") in ranges[0].values()
