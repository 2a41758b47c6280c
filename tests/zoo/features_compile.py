"""Features: how a backend is named, configured, wrapped and called."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from compiled_programs import feature

import torch_fakeify as tfk

if TYPE_CHECKING:
    from observe import Run


def _work(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x.shape[0]).relu() @ torch.ones(2, 2)


def _leaf(n: int) -> torch.Tensor:
    return torch.arange(2.0 * n).reshape(n, 2).requires_grad_()


def _sizes(run: Run, c: Any) -> None:
    for n in (3, 4, 5):
        run.call(c, _leaf(n))


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
