"""Graphs with numbers from their data, and what tests ask of them and their environments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.traceback import preserve_node_meta

import torch_fakeify as tfk
from torch_fakeify.replay.bindings import is_unbacked

if TYPE_CHECKING:
    from collections.abc import Callable

    import sympy
    from torch.utils._sympy.value_ranges import ValueRanges

aten: Any = torch.ops.aten
ASSERT = aten._assert_scalar.default
SIZE = aten.sym_constrain_range_for_size.default

CONFIG = {
    "capture_scalar_outputs": True,
    "capture_dynamic_output_shape_ops": True,
    "specialize_float": False,
}


class Frame(NamedTuple):
    """A graph and the environment of its values."""

    gm: torch.fx.GraphModule
    env: ShapeEnv


def traced(fn: Callable[..., Any], *args: Any, env: ShapeEnv | None = None) -> Frame:
    """A graph of ATen operators, in which ``torch._check`` leaves no node."""
    env = env or ShapeEnv()
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    fakes = [
        mode.from_tensor(
            arg.clone(),
            source=ConstantSource(f"arg{i}"),
            symbolic_context=StatelessSymbolicContext([DimDynamic.DUCK] * arg.ndim),
        )
        for i, arg in enumerate(args)
    ]
    with mode:
        return Frame(make_fx(fn)(*fakes), env)


class FrameList(list[Frame]):
    """The frames of a Dynamo backend, in their order."""

    inputs: tuple[Any, ...] = ()
    """Those of the last call."""

    def backend(self, gm: torch.fx.GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
        """Enter a frame and run it eagerly."""
        mode = TracingContext.get().fake_mode
        assert mode is not None
        assert mode.shape_env is not None
        self.append(Frame(gm, mode.shape_env))

        def call(*real: Any) -> Any:
            self.inputs = real
            return gm.forward(*real)

        return call


def dynamo_frames(
    fn: Callable[..., Any], *args: Any, dynamic: bool | None = True, **settings: Any
) -> FrameList:
    """What a Dynamo backend sees of a function, with settings of Dynamo."""
    frames = FrameList()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(**CONFIG, **settings):
        torch.compile(fn, backend=frames.backend, dynamic=dynamic)(*args)
    return frames


def dynamo_frame(
    fn: Callable[..., Any], *args: Any, torch_pass: bool = False, dynamic: bool = True
) -> Frame:
    """The last frame of a function, with or without the nodes of torch's own pass."""
    asserts = {"do_not_emit_runtime_asserts": not torch_pass}
    return dynamo_frames(fn, *args, dynamic=dynamic, **asserts)[-1]


def everything(graph: torch.fx.Graph) -> list[Any]:
    """All of a graph that a pass could change."""
    return [
        (n.op, n.name, n.target, n.args, n.kwargs, tuple(n.users), dict(n.meta))
        for n in graph.nodes
    ]


def fresh_inputs(gm: torch.fx.GraphModule) -> tuple[FakeTensorMode, list[Any]]:
    """The fakes of a graph's inputs in a mode with an environment of their own."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    values = [
        n.meta.get("example_value", n.meta.get("val"))
        for n in gm.graph.find_nodes(op="placeholder")
    ]
    return mode, tfk.refakeify(values, mode)


def retraced(gm: torch.fx.GraphModule) -> Frame:
    """A graph traced from another one under a fresh environment."""
    mode, inputs = fresh_inputs(gm)
    assert mode.shape_env is not None
    with mode, preserve_node_meta():
        again = make_fx(lambda *args: torch.fx.Interpreter(gm).run(*args))(*inputs)
    return Frame(again, mode.shape_env)


def unbacked_of(env: ShapeEnv) -> dict[str, ValueRanges[Any]]:
    """The ranges of the symbols without a hint, in the order in which they were made."""
    return {str(s): r for s, r in env.var_to_range.items() if is_unbacked(s)}


def asserts_of(env: ShapeEnv) -> list[sympy.Basic]:
    """All deferred runtime asserts of an environment."""
    return [ra.expr for group in env.deferred_runtime_asserts.values() for ra in group]


def raises(fn: Callable[..., Any], *args: Any) -> str:
    """What a call says when it refuses its data."""
    with pytest.raises(RuntimeError) as error:
        fn(*args)
    return str(error.value)


def calls(gm: torch.fx.GraphModule) -> list[Any]:
    """What the nodes of a graph call, whatever they are called."""
    return [(n.op, n.target, len(n.args), n.kwargs) for n in gm.graph.nodes]


T = torch.tensor

# --- programs -------------------------------------------------------------------------------------


def nonzero_of_three(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
    """Three inputs share a size, which bounds one from the data."""
    n = y.nonzero()
    torch._check(n.shape[0] <= x.shape[0] - 2)
    return n, z + x


def product(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """A view by sizes from the data."""
    a, b = n.tolist()
    torch._check(a >= 0)
    torch._check(b >= 0)
    torch._check(a * b == x.shape[0])
    return x.view(a, b)


def three(n: torch.Tensor) -> torch.Tensor:
    """A number that must be 3."""
    z = n.sum().item()
    torch._check(z == 3)
    return torch.zeros(z)


def same_as_size(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """A number that must be an input's size."""
    k = n.sum().item()
    torch._check(k == x.shape[0])
    return x * k


def both_same(n: torch.Tensor) -> torch.Tensor:
    """Two numbers that must be equal."""
    a, b = n.tolist()
    torch._check(a == b)
    return n * a * b


def positive_float(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """A float from the data."""
    f = s.sum().item()
    torch._check(f > 0.5)
    return x * f


def must_be_true(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A boolean from the data."""
    torch._check(b.any().item())
    return x + 1


def bounded(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """A number with a range."""
    k = n.sum().item()
    torch._check(k >= 2)
    torch._check(k <= 10)
    return x * k


def masked(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """As many as a mask has."""
    y = x.masked_select(m)
    torch._check(y.shape[0] <= 3)
    return y


def distinct(x: torch.Tensor) -> Any:
    """A tuple of tensors, of which the sizes of all are one."""
    values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
    torch._check(counts.shape[0] <= 2)
    return values, inverse, counts


def repeated(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """As often as the data says."""
    y = x.repeat_interleave(n)
    torch._check(y.shape[0] == 2 * x.shape[0])
    return y


def split(x: torch.Tensor, n: torch.Tensor) -> Any:
    """Parts of sizes from the data."""
    a, b = n.tolist()
    torch._check(a >= 0)
    torch._check(b >= 0)
    torch._check(a + b == x.shape[0])
    return torch.split(x, [a, b])


def advised(x: torch.Tensor) -> torch.Tensor:
    """A number from the data that torch was told to be a size, without a node for it."""
    k: Any = x.sum().item()
    torch.fx.experimental.symbolic_shapes._constrain_range_for_size(k)
    return x * k


def ones(*data: float) -> torch.Tensor:
    """A vector of floats."""
    return torch.tensor(data)


Case = tuple["Callable[..., Any]", tuple[Any, ...], tuple[Any, ...], str]
V4, V6 = torch.arange(4.0), torch.arange(6.0)
PLACE = "torch/__init__.py:"
CASES: dict[str, Case] = {
    "nonzero": (
        nonzero_of_three, (V4, ones(1, 0, 0, 1), V4), (V4, ones(1, 1, 1, 0), V4),
        "nonzero.size(0) + 2 <= x_1.size(0)",
    ),
    "product": (
        product, (V6, T([2, 3])), (V6, T([2, 4])),
        "_local_scalar_dense*_local_scalar_dense_1 == x_1.size(0)",
    ),
    "constant": (three, (T([1, 2]),), (T([2, 2]),), "_local_scalar_dense == 3"),
    "input": (
        same_as_size, (V4, T([1, 3])), (V4, T([1, 4])), "_local_scalar_dense == x_1.size(0)",
    ),
    "same": (both_same, (T([2, 2]),), (T([2, 3]),), "_local_scalar_dense == _local_scalar_dense_1"),
    "float": (positive_float, (V4, ones(1.0)), (V4, ones(0.25)), "0.5 < _local_scalar_dense"),
    "bool": (must_be_true, (V4, T([True])), (V4, T([False])), "_local_scalar_dense"),
    "lower": (bounded, (V4, T([3])), (V4, T([1])), "2 <= _local_scalar_dense"),
    "upper": (bounded, (V4, T([3])), (V4, T([11])), "_local_scalar_dense <= 10"),
    "masked": (masked, (V4, V4 > 0), (V4, V4 >= 0), "masked_select.size(0) <= 3"),
    "unique": (distinct, (T([1, 1, 2]),), (T([1, 2, 3]),), "_unique2[0].size(0) <= 2"),
    "repeat": (
        repeated, (V4, T([1, 3, 4, 0])), (V4, T([1, 3, 4, 1])),
        "repeat_interleave.size(0) == 2*x_1.size(0)",
    ),
    "split": (
        split, (V6, T([2, 4])), (V6, T([2, 3])),
        "_local_scalar_dense + _local_scalar_dense_1 == x_1.size(0)",
    ),
}  # fmt: skip
