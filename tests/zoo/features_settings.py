"""Features: settings of torch, and how a backend is named, configured, wrapped and called."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch._functorch.config
from compiled_programs import feature
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config as shapes_config

import torch_fakeify as tfk

if TYPE_CHECKING:
    from observe import Run


def _work(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x.shape[0]).relu() @ torch.ones(2, 2)


def _leaf(n: int, m: int = 2) -> torch.Tensor:
    return torch.arange(float(m) * n).div(7).reshape(n, m).requires_grad_()


def _sizes(run: Run, c: Any, *more: int) -> None:
    for n in (3, 4, 5, *more):
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
    _sizes(run, c, 1)


@feature(dynamo={"enable_cpp_symbolic_shape_guards": True})
def shape_guards_in_cpp(run: Run) -> None:
    """Guards over sizes that are compiled by a C++ compiler."""
    c = run.compile(lambda x: _work(x) if x.shape[0] % 2 else x, dynamic=True)
    _sizes(run, c, 1)


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
    _sizes(run, run.compile(_work), 1)


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


# --- how a backend is named, configured, wrapped and called ---------------------------------------


@feature(plain=True)
def by_name(run: Run) -> None:
    """``backend="fakeify"`` is what ``backend="inductor"`` is; other names by ``handoff``."""
    name = run.name if run.direct else tfk.handoff(run.name)
    if run.name == "inductor" and not run.direct:
        name = "fakeify"
    _sizes(run, torch.compile(_work, backend=name))


@feature(backends=("inductor",))
def modes(run: Run) -> None:
    """``mode=`` as for inductor itself."""
    backend = "inductor" if run.direct else "fakeify"
    for mode in ("default", "reduce-overhead", "max-autotune-no-cudagraphs"):
        torch._dynamo.reset()
        run.call(torch.compile(_work, backend=backend, mode=mode), _leaf(3))


@feature(backends=("inductor",))
def options(run: Run) -> None:
    """``options=`` as for inductor itself: passes of the user's own, sizes of loops, C++ wrappers."""
    backend = "inductor" if run.direct else "fakeify"
    seen: list[int] = []

    def count(graph: torch.fx.Graph) -> None:
        seen.append(len(graph.nodes))

    for some in (
        {"max_fusion_size": 1},
        {"post_grad_custom_post_pass": count},
        {"joint_custom_pre_pass": count},
        {"cpp_wrapper": True},
        {"guard_filter_fn": torch.compiler.skip_guard_on_inbuilt_nn_modules_unsafe},
    ):
        torch._dynamo.reset()
        _sizes(run, torch.compile(_work, backend=backend, options=dict(some)))
    run.seen.append(("passes", seen))


@feature()
def options_of_a_callable(run: Run) -> None:
    """Options go to a backend that takes them."""

    def backend(gm: torch.fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        run.seen.append(("options", sorted(kwargs.items())))
        return torch._dynamo.lookup_backend(run.name)(gm, inputs)

    c = torch.compile(_work, backend=run.wrapped(backend), options={"level": 3})
    _sizes(run, c)


@feature()
def a_handoff_in_a_handoff(run: Run) -> None:
    """Two handoffs in one another."""
    backend = run.backend if run.direct else tfk.handoff(run.backend)

    def f(x: torch.Tensor) -> Any:
        y = torch.nn.functional.pad(x, (1, 1, 1, 1))
        x.detach().add_(1)
        return _work(x), y.view(-1), x.t()

    for dynamic in (None, True):
        torch._dynamo.reset()
        _sizes(run, torch.compile(f, backend=backend, dynamic=dynamic))


@feature(backends=("eager", "aot_eager_decomp_partition"))
def other_backends(run: Run) -> None:
    """Backends of torch's other than the two."""
    _sizes(run, run.compile(_work))


@feature(dynamo={"repro_after": "aot"})
def a_minifier_after_aot(run: Run) -> None:
    """``repro_after="aot"`` wraps the compilers inside of the backend."""
    _in_a_folder(run)


@feature(dynamo={"repro_after": "dynamo", "repro_level": 2}, backends=("aot_eager",), raises=True)
def a_minifier_after_dynamo(run: Run) -> None:
    """``repro_after="dynamo"`` wraps the backend; a failure leaves a script for the minifier."""
    _in_a_folder(run)


def _in_a_folder(run: Run) -> None:
    with tempfile.TemporaryDirectory() as folder, torch._dynamo.config.patch(debug_dir_root=folder):
        run.call(run.compile(_work, dynamic=True), torch.ones(3, 2))

        def fails(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            raise ValueError("no such kernel")

        torch._dynamo.reset()
        run.call(torch.compile(_work, backend=run.wrapped(fails)), torch.ones(3, 2))
        run.seen.append(("written", sorted(path.name for path in Path(folder).rglob("*.py"))))


@feature(dynamo={"debug_backend_override": ">0:eager"})
def overridden_for_one_graph(run: Run) -> None:
    """Another backend for the later graphs, by Dynamo's switch for bisecting."""

    def f(x: torch.Tensor) -> Any:
        y = _work(x)
        torch._dynamo.graph_break()
        return _work(y)

    _sizes(run, run.compile(f))


@feature(dynamo={"inline_invoke_subgraph": True})
def regions_inlined(run: Run) -> None:
    """Dynamo changes the graph right before it calls the backend."""

    @torch.compiler.nested_compile_region
    def block(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * x.shape[0]

    _sizes(run, run.compile(lambda x: block(block(x))))


@feature(dynamo={"use_graph_deduplication": True, "track_nodes_for_deduplication": True})
def deduplicated(run: Run) -> None:
    """Dynamo makes equal parts of the graph one subgraph."""

    def part(x: torch.Tensor) -> torch.Tensor:
        return ((x.sin() + 1) * 2).cos() @ torch.ones(2, 2)

    _sizes(run, run.compile(lambda x: part(part(part(x)))))


@feature(dynamo={"prefer_deferred_runtime_asserts_over_guards": True})
def asserts_instead_of_guards(run: Run) -> None:
    """Sizes are checked in the graph."""

    def f(x: torch.Tensor) -> Any:
        torch._check(x.shape[0] > 2)
        torch._check(x.shape[0] < 6)
        return x.view(-1, 2) + 1

    c = run.compile(f, dynamic=True)
    for n in (3, 4, 5, 6, 2):
        run.call(c, _leaf(n))


@feature(dynamo={"do_not_emit_runtime_asserts": True, "capture_scalar_outputs": True})
def asserts_left_out(run: Run) -> None:
    """Checks on data that Dynamo itself makes no nodes of."""

    def f(x: torch.Tensor) -> Any:
        n = x.max().item()
        torch._check(n > 1)
        return torch.ones(n)

    c = run.compile(f)
    for top in (3, 4, 1):
        run.call(c, torch.tensor([1, top]))


@feature(
    backends=("inductor",),
    functorch={"enable_autograd_cache": True, "bundled_autograd_cache": True},
    inductor={"fx_graph_cache": True},
)
def compiled_ahead(run: Run) -> None:
    """``aot_compile`` of a function, called, saved, and loaded again."""
    backend = "inductor" if run.direct else "fakeify"
    with torch.no_grad():
        ahead = torch.compile(_work, backend=backend, fullgraph=True).aot_compile(
            ((torch.ones(3, 2),), {})
        )
        run.call(ahead, torch.ones(3, 2))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "compiled.pt"
            ahead.save_compiled_function(str(path))
            with path.open("rb") as file:
                run.call(torch.compiler.load_compiled_function(file), torch.ones(3, 2))
