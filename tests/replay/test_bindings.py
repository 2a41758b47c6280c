"""The binding sites of unbacked symbols: nodes, and paths to the numbers in their values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from assert_frames import CASES, Frame, ones, raises, traced
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    CallMethodKey,
    DimDynamic,
    DivideByKey,
    InnerTensorKey,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import SequenceKey

import torch_fakeify as tfk
from torch_fakeify.replay.bindings import is_unbacked

if TYPE_CHECKING:
    from collections.abc import Callable


def test_a_missing_note_is_reconstructed() -> None:
    """Where ``unbacked_bindings`` is missing, the first value with a symbol binds it."""
    for name in ("nonzero", "product", "float", "unique", "bool"):
        fn, good, bad, why = CASES[name]
        gm, env = traced(fn, *good)
        for fx_node in gm.graph.nodes:
            fx_node.meta.pop("unbacked_bindings", None)
        if name == "bool":
            env.replacements.clear()
            env._update_version_counter()
        assert why.replace("int(_local_scalar_dense) == 1", "_local_scalar_dense") in (
            tfk.insert_runtime_asserts(gm, env).inserted
        )
        raises(gm, *bad)


# --- paths to symbols -----------------------------------------------------------------------------


def two_counts(x: torch.Tensor) -> Any:
    """Return a wrapper around tensors of data-dependent sizes."""
    n = x.nonzero()
    return TwoTensor(n, n)


def twice(x: torch.Tensor) -> list[Any]:
    """Return twice the number of nonzero elements, in a list."""
    n = x.nonzero()
    return [x, torch.cat([n, n])]


def scaled(x: torch.Tensor) -> torch.Tensor:
    """Return the number of nonzero elements times the size of the input."""
    return x.nonzero().expand(-1, x.shape[0]).reshape(-1)


SIZE_0 = (CallMethodKey("size"), SequenceKey(0))


def call_of(fn: Callable[..., Any], x: torch.Tensor, path: Callable[[Any], Any]) -> Frame:
    """Return a graph that calls one function, which binds ``u0`` at a path, at most 3."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    fake = mode.from_tensor(
        x,
        source=ConstantSource("x"),
        symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC]),
    )
    graph = torch.fx.Graph()
    (arg := graph.placeholder("x")).meta["val"] = fake
    fx_node = graph.call_function(fn, (arg,))
    with mode:
        value = fx_node.meta["val"] = fn(fake)
        (symbol,) = (s for s in env.var_to_range if is_unbacked(s))
        size = env.create_symintnode(symbol, hint=None)
        torch._check(size <= 3)
    fx_node.meta["unbacked_bindings"] = {symbol: path(value)}
    graph.output(fx_node)
    return Frame(torch.fx.GraphModule({}, graph), env)


@pytest.mark.parametrize(
    ("fn", "path", "text"),
    [
        (two_counts, lambda _: (InnerTensorKey("a"), *SIZE_0), "two_counts.a.size(0)"),
        (twice, lambda _: (SequenceKey(1), *SIZE_0, DivideByKey(2)), "(twice[1].size(0) // 2)"),
    ],
)
def test_every_path_is_followed(fn: Any, path: Any, text: str) -> None:
    """Paths lead through inner tensors, items of lists and divided sizes."""
    gm, env = call_of(fn, ones(1, 0, 1, 0), path)
    report = tfk.insert_runtime_asserts(gm, env)
    assert report.inserted == (f"{text} >= 0", f"{text} <= 3")
    gm(ones(1, 0, 1, 1))
    assert f"{text} <= 3" in raises(gm, torch.ones(4))
    gm.graph.lint()


def test_a_divisor_may_be_a_size() -> None:
    """A divisor that is a size is computed from the inputs."""

    def path(value: Any) -> Any:
        env = value.fake_mode.shape_env
        (symbol,) = env.backed_var_to_val
        return (*SIZE_0, DivideByKey(env.create_symintnode(symbol, hint=4)))

    gm, env = call_of(scaled, ones(1, 0, 1, 0), path)
    (symbol,) = env.backed_var_to_val
    (_, text) = tfk.insert_runtime_asserts(gm, env).inserted
    assert text == f"(scaled.size(0) // {symbol}) <= 3"
    gm(ones(1, 0, 1, 1))
    gm(ones(1, 0, 1, 1, 0, 0))
    raises(gm, ones(1, 1, 0, 0, 1, 1))
