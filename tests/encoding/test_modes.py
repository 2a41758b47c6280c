"""Torch's global state at compile time, recorded and applied."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torch_fakeify as tfk
from torch_fakeify.encoding.modes import apply_modes, describe_modes, preserve_modes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


@contextlib.contextmanager
def setting(apply: Callable[[Any], None], value: Any, before: Any) -> Generator[None, None, None]:
    """Apply a global setting for a while."""
    apply(value)
    try:
        yield
    finally:
        apply(before)


def _deterministic(mode: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])


STATES: dict[str, tuple[Callable[[], Any], Any]] = {
    "grad_enabled": (torch.no_grad, False),
    "inference_mode": (torch.inference_mode, True),
    "default_dtype": (
        lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
        "float64",
    ),
    "float32_matmul_precision": (
        lambda: setting(torch.set_float32_matmul_precision, "medium", "highest"),
        "medium",
    ),
    "deterministic": (lambda: setting(_deterministic, (True, False), (False, False)), True),
    "deterministic_warn_only": (
        lambda: setting(_deterministic, (True, True), (False, False)),
        True,
    ),
    "autocast_cache_enabled": (
        lambda: setting(torch.set_autocast_cache_enabled, False, True),
        False,
    ),
}


@pytest.mark.parametrize("field", STATES)
def test_a_state_is_recorded_applied_and_undone(field: str) -> None:
    """A recorded state is restored on entry, and the state before on exit, in any state of the process."""
    enter, value = STATES[field]
    default = describe_modes()
    with enter():
        inside = describe_modes()
        with apply_modes(default):
            assert describe_modes() == default
        assert describe_modes() == inside
    assert getattr(inside, field) == value != getattr(default, field)
    assert describe_modes() == default
    with apply_modes(inside):
        assert describe_modes() == inside
    assert describe_modes() == default


@pytest.mark.parametrize("enabled", [True, False])
def test_autocast_is_recorded_and_applied(enabled: bool) -> None:
    """The flag and dtype of autocast are recorded for a device type with another state."""
    assert describe_modes().autocast == ()
    with torch.autocast("cpu", dtype=torch.float16, enabled=enabled):
        inside = describe_modes()
    (autocast,) = inside.autocast
    assert (autocast.device_type, autocast.enabled, autocast.dtype) == ("cpu", enabled, "float16")
    with apply_modes(inside):
        assert torch.is_autocast_enabled("cpu") == enabled
        assert torch.get_autocast_dtype("cpu") == torch.float16
    assert describe_modes().autocast == ()


def test_the_state_is_undone_when_the_body_raises() -> None:
    """A backend that raises does not change torch's state, nor does a record with an unknown dtype."""
    with torch.no_grad(), torch.autocast("cpu"):
        inside = describe_modes()
    before = describe_modes()
    with pytest.raises(ZeroDivisionError), apply_modes(inside):
        raise ZeroDivisionError
    assert describe_modes() == before
    damaged = msgspec.structs.replace(before, default_dtype="save")
    with pytest.raises(tfk.FakeifyError, match=r"modes\.default_dtype"), apply_modes(damaged):
        pass
    assert describe_modes() == before


def entering(x: torch.Tensor) -> torch.Tensor:
    """Enter what a graph can enter by a node, and raise before it is exited."""
    torch._C._functorch._vmap_increment_nesting(3, "error")
    torch._C._autograd._saved_tensors_hooks_disable("not here")
    torch._C._functorch.set_inplace_requires_grad_allowed(True)
    torch.set_autocast_enabled("cpu", True)
    torch._C._set_grad_enabled(False)
    raise ValueError("in between")


def test_modes_of_a_graph_are_exited_when_a_node_raises() -> None:
    """A frame that is compiled, retraced, or run exits the modes that its graph has entered."""
    depth = torch._C._functorch.get_dynamic_layer_stack_depth
    before = describe_modes()
    with pytest.raises(ValueError, match="in between"), preserve_modes():
        entering(torch.ones(3))
    assert depth() == 0
    assert torch._C._autograd._saved_tensors_hooks_is_enabled()
    assert not torch._C._functorch.get_inplace_requires_grad_allowed()
    assert describe_modes() == before

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch._C._functorch._vmap_increment_nesting, (3, "error"))
    graph.output((graph.call_function(torch.reshape, (x, (7,))),))
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x.meta["example_value"] = mode.from_tensor(torch.ones(3))
    other = FakeTensorMode(shape_env=ShapeEnv())
    with pytest.raises(Exception, match="is invalid for input of size"):
        tfk.retrace(gm, tfk.refakeify([x.meta["example_value"]], other))
    assert depth() == 0
    capture = tfk.capture(gm, [x.meta["example_value"]])

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return entering(inputs[0])

    with pytest.raises(ValueError, match="in between"):
        capture.compile(backend)
    assert depth() == 0
    assert torch._C._autograd._saved_tensors_hooks_is_enabled()
    assert describe_modes() == before
