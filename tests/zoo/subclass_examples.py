"""Examples for the handoff: parameters and inputs that are tensor subclasses, and DTensors."""

from __future__ import annotations

from typing import Any

import torch
from module_examples import example, variant
from subclass_zoo import fake_world, one_process
from torch import nn

# --- torchao and others ---------------------------------------------------------------------------


@example()
def torchao_weight_only() -> tuple[Any, ...]:
    """A torchao model whose linear weights are int8."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    m = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    quantize_(m, Int8WeightOnlyConfig(set_inductor_config=False))  # else caches are turned on
    return m, *[(torch.randn(n, 16),) for n in (3, 5, 2)]


@example()
def torchao_dynamic_activations() -> tuple[Any, ...]:
    """A torchao model that quantizes its activations too."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    m = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 32)).eval()
    quantize_(m, Int8DynamicActivationInt8WeightConfig(set_inductor_config=False))
    return m, *[(torch.randn(n, 32),) for n in (18, 20, 19)]


@example(grad=True)
def torchao_training() -> tuple[Any, ...]:
    """Training with int8 weights: the gradient is dense, the parameter is not."""
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training
    from torchao.quantization import quantize_

    m = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    quantize_(m, int8_weight_only_quantized_training())
    return m, *[(torch.randn(n, 16),) for n in (3, 5, 2)]


variant("torchao_weight_only_inductor", torchao_weight_only, backend="inductor")


def _two(a: torch.Tensor) -> Any:
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(a, a.clone() * 2)


def _linear_of(weight: torch.Tensor) -> nn.Module:
    m = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    m.weight = nn.Parameter(weight)
    return m


@example(grad=True)
def two_tensor_parameter() -> tuple[Any, ...]:
    """A parameter that is a wrapper of two tensors."""
    return _linear_of(_two(torch.randn(3, 4))), *[(torch.randn(n, 4),) for n in (2, 5, 3)]


@example(grad=True)
def nested_two_tensors() -> tuple[Any, ...]:
    """A parameter that is a wrapper of wrappers, and an input that is one."""
    weight = _two(torch.randn(3, 4))
    from torch.testing._internal.two_tensor import TwoTensor

    inner = TwoTensor(weight, _two(torch.randn(3, 4)))
    return _linear_of(inner), *[(_two(torch.randn(n, 4)),) for n in (2, 5, 3)]


@example(grad=True, dynamic=True)
def two_tensor_inputs() -> tuple[Any, ...]:
    """Wrappers as inputs, one of a wrapper of others, both dims dynamic."""

    def call(n: int) -> tuple[Any, ...]:
        x = _two(torch.randn(n, 6)).requires_grad_()
        return x, _two(_two(torch.randn(n, 6)))

    return (lambda x, y: (x * y).sum(0) + x.shape[0]), call(2), call(5), call(3)


variant("two_tensor_inputs_automatic", two_tensor_inputs, dynamic=None)
variant("two_tensor_parameter_inductor", two_tensor_parameter, backend="inductor")


@example(grad=True)
def torchao_qlora() -> tuple[Any, ...]:
    """A frozen NF4 weight with a low-rank adapter."""
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(to_nf4(torch.randn(64, 64), 32, 2), requires_grad=False)
            self.a, self.b = (nn.Parameter(torch.randn(shape)) for shape in ((2, 64), (64, 2)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return linear_nf4(x, self.weight) + x @ self.a.t() @ self.b.t()

    return Adapted(), *[(torch.randn(n, 64),) for n in (2, 5, 3)]


@example(grad=True)
def torchao_float8() -> tuple[Any, ...]:
    """Training in emulated float8."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    m = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
    convert_to_float8_training(m, config=Float8LinearConfig(emulate=True))
    return m, *[(torch.randn(n, 32, requires_grad=True),) for n in (16, 32, 48)]


@example(grad=True, dynamic=True)
def tied_two_tensors() -> tuple[Any, ...]:
    """One wrapper is the weight of two layers."""
    first = _linear_of(_two(torch.randn(4, 4)))
    second = nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second), *[(torch.randn(n, 4),) for n in (2, 5, 3)]


@example(dynamic=True)
def two_tensors_changed() -> tuple[Any, ...]:
    """A wrapper that is changed in place, and views of wrappers given back."""

    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        x.mul_(y.shape[0])
        return x.t(), y[0]

    return f, *[(_two(torch.randn(n, 4)), _two(torch.randn(n + 1, 3))) for n in (2, 5, 3)]


variant("two_tensors_changed_automatic", two_tensors_changed, dynamic=None)

# --- distributed ----------------------------------------------------------------------------------


def _mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))


@example(grad=True, around=one_process, warm=True)
def dtensor_linear() -> tuple[Any, ...]:
    """Two linear layers, sharded by columns and by rows, in training."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    m = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    parallelize_module(m, _mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return m, *[(torch.randn(n, 4),) for n in (2, 5, 3)]


@example(around=one_process)
def dtensor_inputs() -> tuple[Any, ...]:
    """Distributed inputs, redistributed inside."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = _mesh()

    def f(x: Any, y: Any) -> Any:
        z = (x @ y.t()).redistribute(mesh, [Replicate()])
        return z.relu(), z.to_local() + 1

    calls = [
        (
            distribute_tensor(torch.randn(n, 4), mesh, [Shard(0)]),
            distribute_tensor(torch.randn(n + 1, 4), mesh, [Replicate()]),
        )
        for n in (2, 5, 3)
    ]
    return f, *calls


@example(grad=True, around=one_process)
def dtensor_made_inside() -> tuple[Any, ...]:
    """A DTensor made in the graph: the mesh is an input of the frame."""
    from torch.distributed.tensor import DTensor, Shard

    m = nn.Linear(4, 4)

    def f(x: torch.Tensor, mesh: Any) -> torch.Tensor:
        return DTensor.from_local(m(x), mesh, [Shard(0)]).full_tensor().sin()

    f.module = m  # type: ignore[attr-defined]
    mesh = _mesh()
    return f, *[(torch.randn(n, 4), mesh) for n in (2, 5, 3)]


@example(around=one_process)
def collectives() -> tuple[Any, ...]:
    """Functional collectives over a process group that is passed in."""
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as functional

    group = dist.group.WORLD

    def f(x: torch.Tensor, group: Any) -> Any:
        return functional.all_reduce(x, "sum", group) + 1, functional.all_gather_tensor(x, 0, group)

    return f, *[(torch.randn(n, 4), group) for n in (2, 5, 3)]


@example(around=one_process, dynamic=True)
def dtensor_dynamic() -> tuple[Any, ...]:
    """A DTensor with dynamic sizes on a mesh of two dims."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))

    def f(x: Any) -> Any:
        return (x * x.shape[0]).redistribute(mesh, [Replicate(), Replicate()]).sin()

    return f, *[
        (distribute_tensor(torch.randn(n, 4), mesh, [Shard(0), Shard(1)]),) for n in (2, 5, 3)
    ]


variant("dtensor_linear_inductor", dtensor_linear, backend="inductor")
variant("dtensor_inputs_inductor", dtensor_inputs, backend="inductor")


@example(
    grad=True,
    around=fake_world,
    warm=True,
    dynamic=True,
    implied_guards="A guard that follows from those on the sizes is not stated again.",
)
def dtensor_shards() -> tuple[Any, ...]:
    """Shards on a mesh of two by two: sizes of the whole are twice those of a part."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def f(x: torch.Tensor, mesh: Any) -> torch.Tensor:
        d = DTensor.from_local(x, mesh, [Shard(0), Replicate()])
        return (d * d.shape[0]).redistribute(mesh, [Replicate(), Shard(1)]).to_local().sin()

    return f, *[(torch.randn(n, 4, requires_grad=True), mesh) for n in (2, 6, 3)]


@example(around=one_process, warm=True)
def dtensor_adam() -> tuple[Any, ...]:
    """A step of Adam on distributed parameters."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = _mesh()

    def distributed(*size: int) -> Any:
        return distribute_tensor(torch.randn(size), mesh, [Shard(0)])

    params = [nn.Parameter(distributed(n, 3)) for n in (2, 3)]
    optimizer = torch.optim.Adam(params, lr=0.1, foreach=True)

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.params = nn.ParameterList(params)

        def forward(self, grads: list[Any]) -> Any:
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad
            optimizer.step()
            return [optimizer.state[p]["exp_avg"] for p in params]

    return Step(), *[([distributed(*p.shape) for p in params],) for _ in range(3)]


@example(grad=True, around=one_process, warm=True, dynamic=True)
def data_parallel() -> tuple[Any, ...]:
    """``DistributedDataParallel``: Dynamo gives the backend one graph for each bucket of gradients."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(512, 512) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            return self.c(self.b(y) * x.shape[0] + y).sum(0)

    m = nn.parallel.DistributedDataParallel(Layers(), bucket_cap_mb=1)
    return m, *[(torch.randn(n, 512),) for n in (2, 5, 3)]


variant("data_parallel_static", data_parallel, dynamic=False)
