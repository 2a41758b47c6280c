"""Wrappers of functorch and of functionalization."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreter_programs import (
    rebuild,
    told,
    torchs_fake,
)
from torch._C import _functorch as functorch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.func import functionalize, grad, vmap

import torch_fakeify as tfk
from torch_fakeify.convert.wrappers import wrap_functional, wrap_functorch
from torch_fakeify.encoding.interpreters import Interpreters
from torch_fakeify.errors import ConvertError


def leaked(transform: Any, x: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """A tensor and a result that outlived their transform."""
    found: list[torch.Tensor] = []

    def inside(t: torch.Tensor) -> torch.Tensor:
        found.extend((t, t.sin()))
        return t.sum()

    transform(inside, **options)(x)
    return found


@pytest.mark.parametrize("index", [0, 1], ids=["leaf", "result"])
def test_a_dead_grad_wrapper_is_what_torch_makes_of_it(index: int) -> None:
    """It is gone: what it wrapped requires grad as the wrapper did."""
    t = leaked(grad, torch.randn(3))[index]
    level = functorch.maybe_get_level(t)
    assert level == -2
    mode = FakeTensorMode()
    fake = mode.from_tensor(torch.empty(3))
    made = wrap(fake, kind="grad", level=level, requires_grad=t.requires_grad, is_leaf=t.is_leaf)
    torchs = torchs_fake(mode, t)
    assert made is fake
    assert type(torchs) is FakeTensor
    assert told(made) == told(torchs)
    assert made.requires_grad


@pytest.mark.parametrize("index", [0, 1], ids=["input", "result"])
def test_a_batched_tensor_may_outlive_its_transform(index: int) -> None:
    """It keeps its level, and torch wraps it again without any interpreter."""
    t = leaked(vmap, torch.randn(4, 3), in_dims=1)[index]
    d = tfk.describe_tensor(t)
    mode = FakeTensorMode()
    made = rebuild(d, mode, Interpreters())
    assert told(made) == told(t) == told(mode.from_tensor(t))


def test_a_functional_tensor_of_functorch_keeps_its_own_level() -> None:
    """Torch takes the level of the innermost transform, which need not be its own."""
    levels: list[int] = []

    def inside(t: torch.Tensor) -> torch.Tensor:
        def further_in(s: torch.Tensor) -> torch.Tensor:
            d = tfk.describe_tensor(t)
            assert d.functorch is not None
            made = rebuild(d, FakeTensorMode(), Interpreters())
            torchs = FakeTensorMode().from_tensor(t)
            levels.extend(functorch.maybe_get_level(u) for u in (t, made, torchs))
            return s

        return vmap(further_in)(t + 0)

    functionalize(inside)(torch.randn(3))
    assert levels == [1, 1, 2]


def wrap(unwrapped: torch.Tensor, **fields: Any) -> Any:
    """A wrapper with these fields and defaults for others."""
    given: dict[str, Any] = {
        "kind": "batched",
        "level": 1,
        "bdim": 0,
        "layers": (),
        "requires_grad": False,
        "is_leaf": True,
        "where": "tensor 7",
    }
    return wrap_functorch(unwrapped, **(given | fields))


BAD_WRAPPERS = {
    "the level of a functorch wrapper does not fit; expected 1 to 63; found 0": {"level": 0},
    "the level of a functorch wrapper does not fit; expected 1 to 63; found 64": {"level": 64},
    "the level of a functorch wrapper does not fit; expected 1 to 63; found -2": {"level": -2},
    "the level of a functorch wrapper does not fit; expected 1 to 0; found 1": {"kind": "grad"},
    "the level of a functorch wrapper does not fit; expected 1 to 63; found -1": {
        "kind": "functional",
        "level": -1,
    },
    "the batch dim is no dim of the wrapped tensor; expected 0 to 1; found 2": {"bdim": 2},
    "the batch dim is no dim of the wrapped tensor; expected 0 to 1; found -1": {"bdim": -1},
    "the batch dim is no dim of the wrapped tensor; expected 0 to 1; found None": {"bdim": None},
    "a functional wrapper of functorch requires no grad; expected kind grad or batched; "
    "found functional": {"kind": "functional", "requires_grad": True},
}


@pytest.mark.parametrize("text", BAD_WRAPPERS)
def test_a_wrapper_that_torch_would_assert_on_is_refused(text: str) -> None:
    """Levels and batch dims come from a file and are checked."""
    with pytest.raises(ConvertError) as error:
        wrap(torch.ones(2, 3), **BAD_WRAPPERS[text])
    assert str(error.value) == f"tensor 7: {text}"


def test_levels_grow_outwards() -> None:
    """A wrapper is of a later level than what it wraps."""
    inner = wrap(torch.ones(2, 3), level=2)
    with pytest.raises(ConvertError, match="expected 3 to 63; found 2"):
        wrap(inner, level=2)
    assert functorch.maybe_get_level(wrap(inner, level=3)) == 3


def functional(requires_grad: bool, history: bool) -> torch.Tensor:
    """A functional tensor of C++, as AOTAutograd makes one of an input."""
    x = torch.randn(3, 4)
    made = torch._to_functional_tensor(x)
    if requires_grad and not history:
        return made.requires_grad_()
    if requires_grad:
        torch._mirror_autograd_meta_to(x.requires_grad_(), made)
    return made


@pytest.mark.parametrize("history", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_functional_tensors(requires_grad: bool, history: bool) -> None:
    """Autograd metadata comes from the record; torch cannot make the leaf that requires grad."""
    t = functional(requires_grad, history)
    d = tfk.describe_tensor(t)
    assert d.functional is not None
    mode = FakeTensorMode()
    made = wrap_functional(
        tfk.MetaConverter(mode).from_desc(d.functional.unwrapped),
        is_python=False,
        requires_grad=d.requires_grad,
        is_leaf=d.is_leaf,
    )
    assert torch._is_functional_tensor(made)
    assert type(torch._from_functional_tensor(made)) is FakeTensor
    assert told(made) == told(t)
    if t.requires_grad and t.is_leaf:
        with pytest.raises(AssertionError):
            mode.from_tensor(t)
    else:
        torchs = torchs_fake(mode, t)
        assert told(made) == told(torchs)
        assert type(made.grad_fn) is type(torchs.grad_fn)


@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_functional_tensors_of_the_python_class(requires_grad: bool, is_leaf: bool) -> None:
    """Operators work on it under a mode of the caller's."""
    fake = FakeTensorMode().from_tensor(torch.randn(3, 4))
    made = wrap_functional(
        fake, is_python=True, requires_grad=requires_grad, is_leaf=is_leaf or not requires_grad
    )
    assert type(made) is FunctionalTensor
    assert torch._from_functional_tensor(made.elem) is fake
    assert made.requires_grad == requires_grad
    assert made.is_leaf == (is_leaf or not requires_grad)
    with FunctionalTensorMode():
        out = made.sin()
    assert type(out) is FunctionalTensor
    assert out.requires_grad == requires_grad
