"""Torch's global state at compile time, recorded and applied."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

import torch_fakeify as tfk
from torch_fakeify.modes import apply_modes, describe_modes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


@contextlib.contextmanager
def setting(apply: Callable[[Any], None], value: Any, before: Any) -> Generator[None, None, None]:
    """A global setting for a while."""
    apply(value)
    try:
        yield
    finally:
        apply(before)


def _deterministic(mode: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])


STATES: dict[str, tuple[Callable[[], Any], Callable[[], Any], str, Any]] = {
    "no_grad": (torch.no_grad, torch.is_grad_enabled, "grad_enabled", False),
    "inference": (torch.inference_mode, torch.is_inference_mode_enabled, "inference_mode", True),
    "default_dtype": (
        lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
        lambda: str(torch.get_default_dtype()).removeprefix("torch."),
        "default_dtype",
        "float64",
    ),
    "precision": (
        lambda: setting(torch.set_float32_matmul_precision, "medium", "highest"),
        torch.get_float32_matmul_precision,
        "float32_matmul_precision",
        "medium",
    ),
    "deterministic": (
        lambda: setting(_deterministic, (True, False), (False, False)),
        torch.are_deterministic_algorithms_enabled,
        "deterministic",
        True,
    ),
    "warn_only": (
        lambda: setting(_deterministic, (True, True), (False, False)),
        torch.is_deterministic_algorithms_warn_only_enabled,
        "deterministic_warn_only",
        True,
    ),
    "autocast_cache": (
        lambda: setting(torch.set_autocast_cache_enabled, False, True),
        torch.is_autocast_cache_enabled,
        "autocast_cache_enabled",
        False,
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_is_recorded_applied_and_undone(name: str) -> None:
    """What was recorded in a state brings torch back into it, and out of it again."""
    enter, read, field, value = STATES[name]
    outside = describe_modes()
    with enter():
        inside = describe_modes()
    assert getattr(inside, field) == value
    assert getattr(outside, field) != value
    assert describe_modes() == outside
    with apply_modes(inside):
        assert read() == value
        assert describe_modes() == inside
    assert describe_modes() == outside


@pytest.mark.parametrize("name", STATES)
def test_a_default_state_is_applied_inside_another(name: str) -> None:
    """A frame recorded in torch's default state is compiled in it, whatever the state around."""
    enter, _, field, value = STATES[name]
    default = describe_modes()
    with enter():
        around = describe_modes()
        with apply_modes(default):
            assert getattr(describe_modes(), field) != value
        assert describe_modes() == around


@pytest.mark.parametrize("enabled", [True, False])
def test_autocast_is_recorded_and_applied(enabled: bool) -> None:
    """Whether it is on and its dtype, for a device type whose state is not the default."""
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
    """A backend that raises leaves torch as it was."""
    with torch.no_grad(), torch.autocast("cpu"):
        inside = describe_modes()
    before = describe_modes()
    with pytest.raises(ZeroDivisionError), apply_modes(inside):
        raise ZeroDivisionError
    assert describe_modes() == before


def test_a_dtype_that_is_none_is_refused() -> None:
    """A damaged file is refused by the place of the fault, and torch stays as it was."""
    import msgspec

    before = describe_modes()
    damaged = msgspec.structs.replace(before, default_dtype="save")
    with pytest.raises(tfk.FakeifyError, match=r"modes\.default_dtype"), apply_modes(damaged):
        pass
    assert describe_modes() == before
