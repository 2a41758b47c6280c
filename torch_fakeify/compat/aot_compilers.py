"""The compilers that a backend gives to AOTAutograd, and the graphs that they get.

The hooks are functions of ``torch._functorch.aot_autograd`` of torch 2.13, through which every backend on
AOTAutograd passes: ``aot_module_simplified``, ``aot_module`` and the compile of an exported joint graph.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from torch_fakeify.errors import CaptureError

from . import torch_dispatch, torch_dynamo

if TYPE_CHECKING:
    from .backends import Compiled, Compiler

AotKind = Literal["joint", "forward", "backward", "inference"]


class AotGraph(NamedTuple):
    """A graph that AOTAutograd gives to a compiler or, as the joint graph, to the partitioner."""

    kind: AotKind
    gm: torch.fx.GraphModule
    inputs: list[Any]
    """Fake tensors and symbolic scalars, one for each placeholder."""
    forward_outputs: int = 0
    """Only of a joint graph: how many of its outputs are those of the forward graph."""


Watcher = Callable[[AotGraph, Callable[[], Any]], Any]


@contextmanager
def watch_aot_graphs(watch: Watcher) -> Generator[None, None, None]:
    """Within the block, call a function for each graph that AOTAutograd hands over.

    AOTAutograd's cache is not used within the block: it would hand over no graph. The backward of a frame
    that is compiled in the block may be compiled later, by the first call of it.

    Args:
        watch: gets the graph and a function that compiles it, and returns that function's result.
    """
    module: Any = torch_dynamo.aot_autograd()
    compile_graphs = module.aot_stage2_compile

    def watched(state: Any, traced: Any, *given: Any) -> Any:
        own = _compilers(*given)

        def compiler(kind: AotKind) -> Compiler:
            compile_graph: Compiler = getattr(own, kind)

            def compile_watched(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
                return watch(AotGraph(kind, gm, list(inputs)), lambda: compile_graph(gm, inputs))

            return compile_watched

        def partition(gm: torch.fx.GraphModule, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            def call() -> Any:
                return own.partition(gm, inputs, *args, **kwargs)

            if inputs is not traced.updated_flat_args:  # the body of a higher-order operator
                return call()
            flat = [value for part in inputs for value in part]
            return watch(AotGraph("joint", gm, flat, kwargs["num_fwd_outputs"]), call)

        return compile_graphs(
            state,
            traced,
            partition,
            *(compiler(kind) for kind in ("forward", "backward", "inference")),
        )

    with _replaced(module, aot_stage2_compile=watched, **_NO_CACHE):
        yield


def compile_aot_graph(backend: Compiler, graph: AotGraph) -> Compiled:
    """Compile a graph by the compiler that a Dynamo backend gives to AOTAutograd for graphs of its kind.

    A joint graph is partitioned by the backend's partitioner, and both parts are compiled. A backend that
    does not call AOTAutograd compiles the graph itself. The backend gets a copy of the graph, which is
    not traced. The result is a function of the graph's inputs, which runs without autograd.

    Raises:
        CaptureError: the backend calls AOTAutograd more than once, for parts of the graph.
    """
    module: Any = torch_dynamo.aot_autograd()
    compiled: list[Compiled] = []

    def state(
        stack: Any, _function: Any, _args: Any, _descs: Any, _config: Any, mode: Any, _env: Any
    ) -> Any:
        stack.enter_context(mode)
        stack.enter_context(torch_dispatch.enable_python_dispatcher())
        return SimpleNamespace(fw_metadata=SimpleNamespace())

    def compile_graph(_state: Any, _traced: Any, *given: Any) -> Any:
        if compiled:
            raise CaptureError(
                f"the backend compiles the {graph.kind} graph in parts",
                expected="one call of AOTAutograd",
                fix="Record the frame at Dynamo's level",
            )
        made = _compilers(*given).compile(graph)
        compiled.append(made)
        return (lambda args: made(*args)), None

    copy, inputs = flat_copy(graph.gm), graph.inputs
    if graph.kind == "joint":
        inputs = inputs[: _drop_backward(copy, graph.forward_outputs)]
    replaced = _replaced(
        module,
        create_aot_state=state,
        aot_stage1_graph_capture=lambda *_: None,
        aot_stage2_compile=compile_graph,
        **_NO_CACHE,
    )
    with replaced:
        result = backend(copy, inputs)
    if not compiled and graph.kind == "joint":
        return compile_again(backend, graph)
    return _without_autograd(compiled[0] if compiled else result)


def compile_again(backend: Compiler, graph: AotGraph) -> Compiled:
    """Compile a copy of a graph by a Dynamo backend that traces it again, as a graph without a backward.

    The result is a function of the graph's inputs, which runs without autograd.
    """
    with torch.no_grad():
        return _without_autograd(backend(flat_copy(graph.gm), graph.inputs))


def flat_copy(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return a copy of a graph that takes one argument for each placeholder and returns a tuple.

    The ``forward`` of a joint graph takes nested arguments.
    """
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return torch.fx.GraphModule(gm, graph)


class _Compilers(NamedTuple):
    partition: Callable[..., Any]
    forward: Compiler
    backward: Compiler
    inference: Compiler

    def compile(self, graph: AotGraph) -> Compiled:
        if graph.kind == "joint":
            return self._joint(graph)
        grad: AbstractContextManager[Any] = (
            nullcontext() if graph.kind == "inference" else torch.no_grad()
        )
        with grad, torch_dispatch.disable_autocast():
            return _unboxed(getattr(self, graph.kind)(graph.gm, graph.inputs))

    def _joint(self, graph: AotGraph) -> Compiled:
        names = _names(graph.gm)
        primals = _count_primals(names)
        inputs = graph.inputs[:primals], graph.inputs[primals:]
        count = graph.forward_outputs
        forward, backward = self.partition(
            graph.gm, inputs, num_fwd_outputs=count, static_lifetime_input_indices=[]
        )
        parts = [
            AotGraph("forward", forward, _values(forward)),
            AotGraph("backward", backward, _values(backward)),
        ]
        first, second = (_names(part.gm) for part in parts)
        output: Any = forward.graph.output_node()
        outputs = [getattr(value, "name", "") for value in output.args[0]]
        run_forward, run_backward = (self.compile(part) for part in parts)

        def run(*values: Any) -> tuple[Any, ...]:
            known = dict(zip(names, values, strict=True))
            results = list(run_forward(*(known[name] for name in first)))
            known.update(zip(outputs[count:], results[count:], strict=True))
            return (*results[:count], *run_backward(*(known[name] for name in second)))

        return run


def _compilers(
    partition: Callable[..., Any],
    forward: Compiler,
    backward: Compiler | None = None,
    inference: Compiler | None = None,
) -> _Compilers:
    """Return what a backend gives to AOTAutograd, as `aot_stage2_compile` takes it."""
    return _Compilers(partition, forward, backward or forward, inference or forward)


def _count_primals(names: Sequence[str]) -> int:
    """Return how many inputs of a joint graph are those of the forward graph, the first ones."""
    return sum(not name.startswith("tangents") for name in names)


def _drop_backward(gm: torch.fx.GraphModule, outputs: int) -> int:
    """Reduce a joint graph to the outputs of its forward graph, and return how many inputs are left."""
    output: Any = gm.graph.output_node()
    output.args = (output.args[0][:outputs],)
    gm.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    placeholders = gm.graph.find_nodes(op="placeholder")
    primals = _count_primals(_names(gm))
    for node in reversed(placeholders[primals:]):
        gm.graph.erase_node(node)
    gm.recompile()
    return primals


def _names(gm: torch.fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.find_nodes(op="placeholder")]


def _values(gm: torch.fx.GraphModule) -> list[Any]:
    return [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]


def _unboxed(compiled: Any) -> Compiled:
    if getattr(compiled, "_boxed_call", False):
        return lambda *args: compiled(list(args))
    return compiled


def _without_autograd(compiled: Compiled) -> Compiled:
    def run(*args: Any) -> Any:
        with torch.no_grad():
            return compiled(*args)

    return run


_NO_CACHE: dict[str, Callable[..., Any]] = {
    "should_use_local_autograd_cache": lambda: False,
    "should_use_remote_autograd_cache": lambda: False,
}


@contextmanager
def _replaced(module: Any, **functions: Callable[..., Any]) -> Generator[None, None, None]:
    """Replace functions of a module within the block, which holds the lock of ``torch.compile``."""
    before = {name: getattr(module, name) for name in functions}
    for name, function in functions.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)
