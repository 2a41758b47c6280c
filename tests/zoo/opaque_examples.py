"""Examples for the handoff: inputs that are neither tensors nor numbers.

Dynamo makes them inputs of a frame: objects of registered opaque types, such as a ``DeviceMesh``,
TorchBind objects, and what carries hooks into the backward.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from module_examples import example, variant
from subclass_zoo import one_process
from torch import nn
from torch._library.opaque_object import MemberType, get_opaque_type_name, register_opaque_type

from torch_fakeify.compat.torch_fakes import CustomClassBase

ROWS = (2, 5, 3)


# --- classes and operators ------------------------------------------------------------------------


class Scales(CustomClassBase):
    """Numbers that only an operator sees, and one that the trace may."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = list(numbers)
        self.used = 0

    @property
    def count(self) -> int:
        """How many."""
        return len(self.numbers)


class Label:
    """A constant that is passed in, compared by value."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Label) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return f"Label({self.text!r})", {"Label": Label}


register_opaque_type(
    Scales,
    typ="reference",
    guard_fn=lambda scales: [len(scales.numbers)],
    members={"count": MemberType.USE_REAL},
)
register_opaque_type(Label, typ="value", hoist=True)

_SCALES, _LABEL = get_opaque_type_name(Scales), get_opaque_type_name(Label)
_library = torch.library.Library("fakeify_opaque", "DEF")
_library.define(f"scale({_SCALES} s, Tensor x) -> Tensor")
_library.define(f"scale_backward({_SCALES} s, Tensor g) -> Tensor")
_library.define(f"named({_LABEL} label, Tensor x) -> Tensor")


def _scale(s: Scales, x: torch.Tensor) -> torch.Tensor:
    s.used += 1
    return x * sum(s.numbers)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.scales = inputs[0]


def _scale_gradient(ctx: Any, grad: torch.Tensor) -> Any:
    return None, torch.ops.fakeify_opaque.scale_backward(ctx.scales, grad)


_library.impl("scale", _scale, "CompositeExplicitAutograd")
_library.impl("scale_backward", _scale, "CompositeExplicitAutograd")
_library.impl("named", lambda label, x: x + len(label.text), "CompositeExplicitAutograd")
for _name in ("scale", "scale_backward", "named"):
    torch.library.register_fake(
        f"fakeify_opaque::{_name}", lambda _, x: torch.empty_like(x), lib=_library
    )
torch.library.register_autograd(
    "fakeify_opaque::scale", _scale_gradient, setup_context=_setup, lib=_library
)


# --- examples -------------------------------------------------------------------------------------


@example(grad=True)
def opaque_reference() -> tuple[Any, ...]:
    """An object that an operator reads, forward and backward; another one for each call."""

    def f(x: torch.Tensor, scales: Scales) -> torch.Tensor:
        return torch.ops.fakeify_opaque.scale(scales, x.sin()) * scales.count

    return f, *[
        (torch.randn(n, 3, requires_grad=True), Scales(*range(2, 2 + n))) for n in (2, 2, 3)
    ]


variant("opaque_reference_inductor", opaque_reference, backend="inductor")


@example(dynamic=True)
def opaque_value() -> tuple[Any, ...]:
    """A constant that is an input all the same, and one that is not among a module's attributes."""

    def f(x: torch.Tensor, label: Label) -> torch.Tensor:
        return torch.ops.fakeify_opaque.named(label, x) * x.shape[0]

    return f, *[(torch.randn(n, 3), Label("abc")) for n in ROWS]


@example(around=one_process)
def device_mesh() -> tuple[Any, ...]:
    """A mesh that is passed in and asked for its sizes."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))

    def f(x: torch.Tensor, mesh: Any) -> torch.Tensor:
        return x * mesh.size() + mesh.get_local_rank("tp") + mesh.ndim

    return f, *[(torch.randn(n, 3), mesh) for n in ROWS]


@example(around=one_process)
def process_group_of_a_mesh() -> tuple[Any, ...]:
    """The process group of a part of a mesh that is passed in."""
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))

    def f(x: torch.Tensor, mesh: Any) -> torch.Tensor:
        return functional.all_reduce(x.sin(), "sum", mesh["tp"].get_group())

    return f, *[(torch.randn(n, 3), mesh) for n in ROWS]


@example(around=one_process)
def process_group() -> tuple[Any, ...]:
    """A process group that is passed in, asked, and handed to a collective."""
    import torch.distributed as dist

    def f(x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x * group.size() + group.rank()
        dist.all_reduce(x, group=group)
        return x

    group = dist.group.WORLD
    return f, *[(torch.randn(n, 3), group) for n in ROWS]


def load_torchbind_classes() -> None:
    """Torch's classes for tests; a build of torch need not have them."""
    from torch.testing._internal.torchbind_impls import init_torchbind_implementations

    try:
        init_torchbind_implementations()
    except OSError as error:
        if "torchbind_test" not in str(error):
            raise
        pytest.skip(f"this build of torch comes without its TorchBind classes: {error}")


@example()
def torchbind_queue() -> tuple[Any, ...]:
    """A TorchBind object with tensors inside."""
    load_torchbind_classes()
    queue = torch.classes._TorchScriptTesting._TensorQueue(torch.zeros(3))
    queue.push(torch.ones(3, 3))

    def f(x: torch.Tensor, queue: Any) -> torch.Tensor:
        torch.ops._TorchScriptTesting.queue_push(queue, x.sin())
        return torch.ops._TorchScriptTesting.queue_pop(queue) + queue.size()

    return f, *[(torch.randn(3, 3), queue) for _ in ROWS]


@example(dynamic=True)
def torchbind_attribute() -> tuple[Any, ...]:
    """A TorchBind object of a module."""
    load_torchbind_classes()

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.foo = torch.classes._TorchScriptTesting._Foo(2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops._TorchScriptTesting.takes_foo(self.foo, x) + self.foo.add_tensor(x)

    return Module(), *[(torch.randn(n, 3),) for n in ROWS]


@example()
def generator() -> tuple[Any, ...]:
    """A generator of random numbers that is passed in."""

    def f(x: torch.Tensor, g: torch.Generator) -> torch.Tensor:
        return torch.rand(x.shape, generator=g) + x

    g = torch.Generator().manual_seed(3)
    return f, *[(torch.randn(n, 3), g) for n in ROWS]


def _compiled_backward() -> Any:
    from torch._dynamo import compiled_autograd

    return compiled_autograd._enable(torch.compile(backend="eager"))


@example(grad=True, around=_compiled_backward)
def tensor_hook() -> tuple[Any, ...]:
    """A hook on an intermediate result: an input carries it into the compiled backward."""

    def f(x: torch.Tensor, by: int) -> torch.Tensor:
        y = x.sin()
        y.register_hook(lambda grad: grad * by)
        return y * 2

    return f, *[(torch.randn(n, 3, requires_grad=True), 3) for n in ROWS]


@example(grad=True, warm=True)
def leaf_function() -> tuple[Any, ...]:
    """A function that is not traced, with a module: it is an attribute of the graph."""
    m = nn.Linear(3, 3)

    @torch._dynamo.decorators.leaf_function
    def layer(module: nn.Module, x: torch.Tensor) -> Any:
        return (module(x).relu(),)

    @layer.register_fake
    def _(module: nn.Module, x: torch.Tensor) -> Any:
        return (module(x),)

    def f(x: torch.Tensor) -> torch.Tensor:
        return layer(m, x)[0] * x.shape[0]

    f.module = m  # type: ignore[attr-defined]
    return f, *[(torch.randn(n, 3, requires_grad=True),) for n in ROWS]


@example(grad=True)
def opaque_attribute() -> tuple[Any, ...]:
    """An object of a module, and the same one twice among the arguments."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = Scales(2.0, 3.0)
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor, others: list[Scales]) -> torch.Tensor:
            x = self.linear(x)
            for scales in (self.scales, *others):
                x = torch.ops.fakeify_opaque.scale(scales, x)
            return x

    more = Scales(0.5)
    return Scaled(), *[(torch.randn(n, 3), [more, Scales(1.0), more]) for n in ROWS]


variant("opaque_get_attr", opaque_attribute, dynamo={"install_free_tensors": True})
