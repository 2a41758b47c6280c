"""Features: settings of torch that change what a backend is given, and where it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch._functorch.config
from compiled_programs import feature
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config as shapes_config

if TYPE_CHECKING:
    from observe import Run


def _work(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x.shape[0]).relu() @ torch.ones(2, 2)


def _leaf(n: int, m: int = 2) -> torch.Tensor:
    return torch.arange(float(m) * n).div(7).reshape(n, m).requires_grad_()


def _sizes(run: Run, c: Any) -> None:
    for n in (3, 4, 5, 1):
        run.call(c, _leaf(n))


@feature(functorch={"force_non_lazy_backward_lowering": True})
def backward_at_once(run: Run) -> None:
    """The backward is compiled with the forward, so that its guards count too."""

    def f(x: torch.Tensor) -> Any:
        y = torch.nn.functional.pad(x, (1, 1), mode="reflect")
        return torch.nn.functional.max_pool1d(y, 2), x.unfold(0, 2, 2)

    c = run.compile(f, dynamic=True)
    for n in (4, 5, 8):
        run.call(c, _leaf(n, 4))


@feature()
def shapes_settings(run: Run) -> None:
    """No duck shapes, sizes like unbacked ones, no guards where they can be avoided."""
    for some in (
        {"use_duck_shape": False},
        {"backed_size_oblivious": True},
        {"aggressive_guard_free_semantics": 1},
        {"skip_dtype_check_in_meta_registrations": True},
        {"print_specializations": True},
        {"translation_validation": True},
    ):
        torch._dynamo.reset()
        with shapes_config.patch(**some):
            run.seen.append(("settings", sorted(some)))
            c = run.compile(lambda x, y: (x + y, x.reshape(-1)), dynamic=True)
            for n, m in ((3, 3), (4, 5), (1, 3), (3, 1)):
                run.call(c, _leaf(n, m), _leaf(n, m))


@feature()
def sources_in_the_configuration(run: Run) -> None:
    """Dynamic and unbacked inputs by their names."""
    sources = {"dynamic_sources": "L['x']", "unbacked_sources": "L['y']"}
    with torch.compiler.config.patch(**sources):
        c = run.compile(lambda x, y: (x * 2, y.sum(0), y * 2))
        for n in (3, 4):
            run.call(c, _leaf(n), _leaf(n + 2))


@feature(
    dynamo={"force_parameter_static_shapes": False, "force_nn_module_property_static_shapes": False}
)
def parameters_of_any_size(run: Run) -> None:
    """Sizes of parameters and ints of modules are symbolic."""

    class Scaled(torch.nn.Module):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(n, n)
            self.n = n

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.n

    for n in (2, 3, 4):
        m = Scaled(n)
        run.call(run.compile(m), _leaf(3, n), of=m)


@feature(
    functorch={"fake_tensor_propagate_real_tensors": True}, dynamo={"capture_scalar_outputs": True}
)
def real_tensors_propagated(run: Run) -> None:
    """Data decides branches while it is traced."""

    def f(x: torch.Tensor, n: torch.Tensor) -> Any:
        k = n.item()
        y = torch.ones(k, 3)
        z = torch.nn.functional.pad(y, (1, 1)).view(-1, 5)
        return z + x[:k].reshape(k, 1).expand(k, 5) if k > 2 else x * 3

    c = run.compile(f)
    for k in (3, 4):
        run.call(c, torch.ones(5), torch.tensor(k))


@feature()
def fake_inputs(run: Run) -> None:
    """A compiled function that is called with fake tensors, under their mode and outside of it."""
    for env in (False, True):
        torch._dynamo.reset()
        shape_env = torch.fx.experimental.symbolic_shapes.ShapeEnv() if env else None
        mode = FakeTensorMode(shape_env=shape_env)
        x = mode.from_tensor(torch.ones(3, 2), static_shapes=True)
        c = run.compile(lambda x: x.sin() * x.shape[0])
        for inside in (False, True):
            try:
                if inside:
                    with mode:
                        out = c(x)
                else:
                    out = c(x)
            except Exception as error:  # noqa: BLE001 -- the error is what is compared
                run.seen.append(("raised", type(error).__name__, str(error)[:80]))
                continue
            run.seen.append((type(out).__name__, tuple(out.shape), out.stride()))


@feature()
def meta_inputs(run: Run) -> None:
    """Tensors of the meta device."""
    c = run.compile(lambda x: x.sin() * x.shape[0])
    for n in (3, 4):
        out = c(torch.ones(n, 2, device="meta"))
        run.seen.append((str(out.device), tuple(out.shape)))


@feature()
def generators(run: Run) -> None:
    """Random numbers of a generator of the user's."""
    generator = torch.Generator().manual_seed(3)
    c = run.compile(lambda x: x + torch.rand(x.shape[0], 2, generator=generator))
    _sizes(run, c)


@feature(dynamo={"enable_cpp_symbolic_shape_guards": True})
def shape_guards_in_cpp(run: Run) -> None:
    """Guards over sizes that are compiled by a C++ compiler."""
    c = run.compile(lambda x: _work(x) if x.shape[0] % 2 else x, dynamic=True)
    _sizes(run, c)


@feature()
def captured_by_others(run: Run) -> None:
    """A compiled function traced by ``make_fx`` and called under a dispatch mode."""
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils.flop_counter import FlopCounterMode

    c = run.compile(_work)
    run.call(c, _leaf(3))
    with FlopCounterMode(display=False) as flops:
        run.call(c, _leaf(3))
        run.call(c, _leaf(5))
    run.seen.append(("flops", flops.get_total_flops()))
    try:
        run.seen.append(("traced", make_fx(c)(torch.ones(3, 2)).code))
    except Exception as error:  # noqa: BLE001 -- the error is what is compared
        run.seen.append((type(error).__name__, str(error)[:80]))


@feature(dynamo={"caching_precompile": True}, backends=("inductor",))
def precompiled(run: Run) -> None:
    """Dynamo's package of a compiled function, which keeps what the backend returned."""
    _sizes(run, run.compile(_work))


@feature()
def tensors_in_closures_and_globals(run: Run) -> None:
    """Tensors that are no arguments: of closures, of globals, of lists, new ones in between."""
    _GLOBAL.grad = None
    box = [torch.ones(2, 2)]

    def f(x: torch.Tensor) -> Any:
        box[0].add_(1)
        return x @ box[0] + _GLOBAL

    c = run.compile(f)
    for n in (3, 4):
        run.call(c, _leaf(n), of=[box[0], _GLOBAL])
        box[0] = torch.ones(2, 2) * n


_GLOBAL = torch.ones(2, requires_grad=True)
