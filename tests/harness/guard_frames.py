"""Frames of ``torch.compile`` with facts, and fresh inputs for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from assert_frames import dynamo_frames
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    SubclassSymbolicContext,
)
from torch.testing._internal.two_tensor import TwoTensor

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Callable


class Frame(NamedTuple):
    """What a Dynamo backend saw, and real inputs for its graph."""

    gm: torch.fx.GraphModule
    env: ShapeEnv
    inputs: tuple[Any, ...]


def frame_of(fn: Callable[..., Any], *args: Any, dynamic: bool | None = True) -> Frame:
    """The last frame of a function, compiled by Dynamo."""
    frames = dynamo_frames(fn, *args, dynamic=dynamic)
    return Frame(*frames[-1], frames.inputs)


def new_inputs(frame: Frame, env: ShapeEnv) -> list[Any]:
    """Fakes of a frame's real inputs, every number a symbol of its own."""
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    made: list[Any] = []
    for fx_node, value in zip(
        frame.gm.graph.find_nodes(op="placeholder"), frame.inputs, strict=True
    ):
        source = LocalSource(fx_node.name)
        if isinstance(value, torch.Tensor):
            made.append(
                mode.from_tensor(value, source=source, symbolic_context=free_context(value))
            )
        elif isinstance(value, int):
            made.append(env.create_unspecified_symint_and_symbol(value, source, DimDynamic.DYNAMIC))
        else:
            made.append(value)
    return made


def free_context(t: torch.Tensor) -> StatelessSymbolicContext[..., Any]:
    """The policy that every size and stride is a symbol of its own."""
    sizes = [DimDynamic.DYNAMIC] * t.ndim
    if not isinstance(t, TwoTensor):
        return StatelessSymbolicContext(dynamic_sizes=sizes, dynamic_strides=sizes)
    inner = {name: free_context(getattr(t, name)) for name in ("a", "b")}
    return SubclassSymbolicContext(
        dynamic_sizes=sizes, dynamic_strides=sizes, tensor_source=LocalSource("t"),
        inner_contexts=inner,
    )  # fmt: skip


def env_after_learn(frame: Frame) -> tuple[ShapeEnv, list[Any]]:
    """A fresh environment after `learn` of the graph of a frame."""
    env = ShapeEnv(specialize_zero_one=False, duck_shape=False)
    inputs = new_inputs(frame, env)
    tfk.learn(frame.gm, inputs)
    return env, inputs


def over_flatten(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Needs that one size is a product of two others."""
    return x.flatten() + y


def over_reshape(x: torch.Tensor) -> torch.Tensor:
    """Needs that a size is divisible."""
    return x.reshape(100, -1)


def over_branch(x: torch.Tensor) -> torch.Tensor:
    """Branches on a size."""
    return x + 1 if x.shape[0] > 5 else x - 1


def over_twice(x: torch.Tensor) -> torch.Tensor:
    """Branches on a multiple of a size."""
    return x + 1 if 2 * x.shape[0] > 9 else x - 1


def over_strides(x: torch.Tensor) -> torch.Tensor:
    """Branches on a stride and on the storage offset."""
    return x + 1 if x.stride(0) * 2 > x.size(1) and x.storage_offset() > 2 else x - 1


def over_number(x: torch.Tensor, n: int) -> torch.Tensor:
    """Branches on a size and a number."""
    return x * n if n * x.shape[0] % 3 == 0 else x + n


def over_float(x: torch.Tensor, s: float) -> torch.Tensor:
    """Branches on a float."""
    return x * s if s > 1.5 else x


def over_item(x: torch.Tensor) -> torch.Tensor:
    """Checks what a tensor's only element is."""
    z = x.item()
    torch._check(z == 3)
    return torch.zeros(z)


def over_max(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Branches on the larger of two sizes."""
    return (x + 1 if torch.sym_max(x.shape[0], y.shape[0]) // 2 > 3 else x), y + 1


def over_constant(x: torch.Tensor) -> torch.Tensor:
    """Specializes on a size."""
    return x + 1 if x.shape[0] == 7 else x


STRIDED = torch.randn(100)[5:].as_strided((4, 5), (13, 2), 7)


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[str]]] = {
    "product": (
        over_flatten,
        (torch.randn(3, 4), torch.randn(12)),
        [
            "l_x_.size(0) >= 2",
            "l_x_.size(1) >= 2",
            "l_x_.size(0) == s77",
            "l_x_.size(1) == s27",
            "l_x_.stride(0) == l_x_.size(1)",
            "l_y_.size(0) == l_x_.size(0)*l_x_.size(1)",
        ],
    ),
    "divisible": (
        over_reshape,
        (torch.randn(2000),),
        ["l_x_.size(0) >= 2", "l_x_.size(0) == s77", "l_x_.size(0) % 100 == 0"],
    ),
    "branch": (over_branch, (torch.randn(7),), ["l_x_.size(0) >= 6", "l_x_.size(0) == s77"]),
    "twice": (
        over_twice,
        (torch.randn(7),),
        ["l_x_.size(0) >= 2", "l_x_.size(0) == s77", "2*l_x_.size(0) > 9"],
    ),
    "strides": (
        over_strides,
        (STRIDED,),
        [
            "l_x_.size(0) >= 2",
            "l_x_.size(1) >= 2",
            "l_x_.stride(1) >= 2",
            "l_x_.storage_offset() >= 3",
            "l_x_.size(0) == s77",
            "l_x_.size(1) == s27",
            "l_x_.stride(0) == s7",
            "l_x_.stride(1) == s89",
            "l_x_.storage_offset() == s84",
            "2*l_x_.stride(0) > l_x_.size(1)",
            "l_x_.stride(1) != l_x_.stride(0)",
            "l_x_.stride(0) >= l_x_.stride(1)",
        ],
    ),
    "number": (
        over_number,
        (torch.randn(7), 6),
        ["l_x_.size(0) >= 2", "l_x_.size(0) == s77", "(l_n_*l_x_.size(0)) % 3 == 0"],
    ),
    "float": (
        over_float,
        (torch.randn(7), 2.5),
        ["l_x_.size(0) >= 2", "l_x_.size(0) == s77", "l_s_.item() > 1.5"],
    ),
    "item": (over_item, (torch.tensor(3),), ["l_x_.item() == 3"]),
    "max": (
        over_max,
        (torch.randn(9), torch.randn(4)),
        [
            "l_x_.size(0) >= 2",
            "l_y_.size(0) >= 2",
            "l_x_.size(0) == s77",
            "l_y_.size(0) == s17",
            "Max(l_x_.size(0), l_y_.size(0))//2 > 3",
        ],
    ),
    "constant": (over_constant, (torch.randn(7),), ["l_x_.size(0) == 7"]),
}
