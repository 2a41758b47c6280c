"""One run of a model through ``torch.compile``: what it gave, and what Dynamo made of it."""

from __future__ import annotations

import copy
import resource
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from guard_equivalence import Facts, by_sources, facts_of
from printed_guards import printed_guards
from torch._dynamo import convert_frame
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.variables.functions import get_pytree_SUPPORTED_NODES_source
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Callable

    from sized_models import SizedModel


@dataclass
class Run:
    """What came of all calls of one model."""

    results: list[list[torch.Tensor]] = field(default_factory=list)
    """Of each call: outputs and, in training, gradients and buffers."""
    traced: list[str] = field(default_factory=list)
    """Of ``aot_eager``: the graphs that AOTAutograd makes, forward and backward, with the metadata
    of what each node computes. Nodes have numbers: their names count nodes that are gone, too."""
    envs: list[Any] = field(default_factory=list)
    """Dynamo's own environment of each graph, in the order of compilation."""
    guards: list[str] = field(default_factory=list)
    """The guards of each compiled frame as Dynamo prints them."""
    counters: dict[str, dict[str, int]] = field(default_factory=dict)
    """All of Dynamo's counters."""
    recompiles: int = 0
    """Compilations of frames that had been compiled before."""
    seconds: float = 0.0
    """CPU time of all calls: of this process, and of those that it started and waited for."""
    in_backend: float = 0.0
    """What of it was spent in the backend that Dynamo called."""
    in_inner: float = 0.0
    """What of that was spent in the one that compiled; less only through a handoff."""

    @property
    def graphs(self) -> int:
        """Graphs that a backend compiled."""
        return len(self.envs)

    @property
    def shape_guards(self) -> int:
        """Guards in the environments of all graphs."""
        return sum(len(env.guards) for env in self.envs)

    @property
    def asserts(self) -> int:
        """Runtime asserts in the environments of all graphs."""
        groups = (g for env in self.envs for g in env.deferred_runtime_asserts.values())
        return sum(map(len, groups))

    def facts(self) -> list[Facts]:
        """What each environment knows, over sources."""
        return [facts_of(env, by_sources(env), asserts=True) for env in self.envs]


def _watched(inner: Callable[..., Any], done: Run, *, handoff: bool) -> Callable[..., Any]:
    """A backend that calls another one, maybe through a handoff, and writes down what it saw."""

    def compiling(gm: torch.fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        start = cpu_seconds()
        try:
            return inner(gm, inputs, **kwargs)
        finally:
            done.in_inner += cpu_seconds() - start

    backend = tfk.handoff(compiling) if handoff else compiling

    def called(gm: torch.fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        mode = TracingContext.get().fake_mode
        assert mode is not None
        start = cpu_seconds()
        try:
            compiled = backend(gm, inputs, **kwargs)
        finally:
            done.in_backend += cpu_seconds() - start
        done.envs.append(mode.shape_env)  # not of one that asks Dynamo to trace again
        return compiled

    return called


def cpu_seconds() -> float:
    """CPU time of this process and of those that it has waited for."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def _aot_eager(graphs: list[str]) -> Callable[..., Any]:
    """``aot_eager``, which writes down its graphs."""

    def compiler(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(_text(gm))
        return boxed_nop(gm, inputs)

    backend = torch._dynamo.lookup_backend("aot_eager")
    return partial(backend, fw_compiler=compiler, bw_compiler=compiler)


def _text(gm: torch.fx.GraphModule) -> str:
    numbers = {fx_node: f"%{i}" for i, fx_node in enumerate(gm.graph.nodes)}
    lines = [_text(part) for part in gm.children() if isinstance(part, torch.fx.GraphModule)]
    for fx_node, number in numbers.items():
        args = torch.fx.map_arg((fx_node.args, fx_node.kwargs), numbers.__getitem__)
        value = pytree.tree_map_only(torch.Tensor, _metadata, fx_node.meta.get("val"))
        lines.append(f"{number} = {fx_node.op} {fx_node.target} {args} -> {value}")
    return "\n".join(lines)


def _metadata(t: torch.Tensor) -> str:
    return f"{t.dtype}{tuple(t.size())} at {t.stride()} from {t.storage_offset()}"


def run(
    model: SizedModel,
    inner: str,
    *,
    handoff: bool,
    training: bool,
    dynamic: bool | None = None,
    keep: bool = True,
) -> Run:
    """All calls of a model, compiled anew.

    Args:
        model: which.
        inner: a Dynamo backend by its name.
        handoff: whether it is called through ``tfk.handoff``.
        training: with gradients and a backward pass; else without both.
        dynamic: as of ``torch.compile``; by default a size becomes dynamic when it changes.
        keep: results, graphs and guards, which takes time that is not counted.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    FakeTensorMode.cache_clear()
    get_pytree_SUPPORTED_NODES_source.cache_clear()  # its first call in a process adds a guard
    torch.manual_seed(0)
    module = model.make().train(training)
    calls = model.calls()
    with torch.no_grad():
        module(**calls[0])  # libraries import modules and ask for versions in their first call
    done = Run()
    backend: Any = torch._dynamo.lookup_backend(inner)
    if keep and inner == "aot_eager":
        backend = _aot_eager(done.traced)
    backend = _watched(backend, done, handoff=handoff)
    compiled = torch.compile(module, backend=backend, dynamic=dynamic)
    for inputs in calls:
        torch.manual_seed(1)
        start = cpu_seconds()
        found = _call(module, compiled, inputs, training=training)
        done.seconds += cpu_seconds() - start
        if keep:
            done.results.append([x.detach().clone() for x in found])
    done.counters = copy.deepcopy({k: dict(v) for k, v in torch._dynamo.utils.counters.items()})
    done.recompiles = sum(n - 1 for n in convert_frame.FRAME_COMPILE_COUNTER.values())
    if keep:
        done.guards = printed_guards()
    torch._dynamo.reset()
    return done


def _call(
    module: torch.nn.Module,
    compiled: Callable[..., Any],
    inputs: dict[str, Any],
    *,
    training: bool,
) -> list[torch.Tensor]:
    with torch.set_grad_enabled(training):
        outputs = _tensors(compiled(**inputs))
    if not training:
        return outputs
    module.zero_grad()
    loss = sum((x.double().cos().sum() for x in outputs if x.requires_grad), torch.zeros(()))
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    return [*outputs, *grads, *module.buffers()]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
