"""Whether a handoff compiles a program as the backend itself does: results, counts, guards.

A program is compiled twice, by the backend and through the handoff, and called with the same
inputs. What came of it is a `Run`; `difference` names the first thing that two of them differ in.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from guard_code import equivalent_code
from guard_equivalence import Facts, by_sources, equivalent, facts_of
from guard_terms import plain as plain_expr
from printed_guards import LINE, printed_guards
from torch._dynamo.utils import counters
from torch._guards import TracingContext
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

import torch_fakeify as tfk
from torch_fakeify.sources import source_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    import sympy

_PLAIN_GUARDS = {"enable_cpp_symbolic_shape_guards": False}
"""So that guards on shapes are Python, and no C++ compiler is called for them."""

_SHAPE = "+- LAMBDA_GUARD: "
"""Before a guard that belongs to no single input."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """What is compiled, and how it is called."""

    make: Callable[[], tuple[Any, ...]]
    """Gives the function or module and the arguments of each call."""
    grad: bool = False
    """Whether each call is followed by a backward."""
    backend: str = "aot_eager"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``torch.compile``."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings of Dynamo."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """What torch is in while it is made and called."""
    warm: bool = False
    """Whether torch has other guards when a process does it first, and so it is done once before."""


class Guards(NamedTuple):
    """What Dynamo checks before it runs the code that it made of one frame."""

    tree: tuple[str, ...]
    """All but the shapes, as Dynamo prints it."""
    shapes: frozenset[str]
    """Conditions on shapes, as Python."""


@dataclass(kw_only=True)
class Run:
    """What came of one compiled program."""

    results: list[Any] = field(default_factory=list)
    """Of each call: outputs, gradients, parameters and buffers afterwards, as plain data."""
    graphs: list[tuple[int, int]] = field(default_factory=list)
    """Of each graph that Dynamo made: how many nodes and inputs it has."""
    after: list[int] = field(default_factory=list)
    """How many graphs there were after each call: where it has grown, a call recompiled."""
    breaks: dict[str, int] = field(default_factory=dict)
    """Why Dynamo broke the graph, how often."""
    facts: list[Facts] = field(default_factory=list)
    """What Dynamo's ``ShapeEnv`` knew when each graph was compiled, over sources."""
    guards: list[Guards] = field(default_factory=list)
    """What Dynamo has installed in the end, of all frames."""


class _Observer:
    """Stands between Dynamo and a backend."""

    def __init__(self, backend: Any, run: Run) -> None:
        self._backend = (
            torch._dynamo.lookup_backend(backend) if isinstance(backend, str) else backend
        )
        self._run = run

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        mode = TracingContext.get().fake_mode
        assert mode is not None
        env: Any = mode.shape_env
        placeholders = gm.graph.find_nodes(op="placeholder")
        before = set(env.var_to_range)
        values = [(source_of(n), n.meta.get("example_value")) for n in placeholders]
        size = (len(gm.graph.nodes), len(placeholders))
        compiled = self._backend(gm, inputs, **kwargs)
        self._run.graphs.append(size)
        rows = [(s, v) for s, v in values if s and isinstance(v, (torch.Tensor, torch.SymInt))]
        self._run.facts.append(_known_of(before, env, rows))
        return compiled


def _known_of(symbols: set[sympy.Symbol], env: Any, rows: list[tuple[Any, Any]]) -> Facts:
    """What an environment knows of some symbols.

    A backend that traces again in Dynamo's environment makes symbols there for what the graph
    computes, and finds that they are Dynamo's. Through a handoff that takes place elsewhere.
    """
    naming = by_sources(env, inputs=rows)
    own = {symbol: env.replace(symbol) for symbol in env.var_to_range if symbol not in symbols}
    for symbol, replaced in own.items():
        if replaced in symbols:
            naming[symbol] = plain_expr(replaced, naming)
    unknown = {s.name for s in own if s not in naming}
    found = facts_of(env, naming, asserts=True)
    rows = [
        (expr, what)
        for expr, what in zip(found.exprs, found.what, strict=True)
        if not any(s.name in unknown for s in expr.free_symbols)
    ]
    return Facts(tuple(e for e, _ in rows), tuple(w for _, w in rows), found.hints)


def run(example: Example, backend: Any) -> Run:
    """Compile and call a program, made anew from one seed."""
    found = Run()
    observer = _Observer(backend, found)
    torch._dynamo.reset()
    counters.clear()
    RemovableHandle.next_id = 0  # guards name hooks by it
    torch.manual_seed(0)
    with ExitStack() as stack:
        stack.enter_context(_one_thread())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(torch._dynamo.config.patch(**_PLAIN_GUARDS, **example.config))
        stack.enter_context(torch.set_grad_enabled(example.grad))
        stack.enter_context(example.around())
        fn, *calls = example.make()
        compiled = torch.compile(fn, backend=observer, **example.options)
        leaves = _leaves(fn)
        for args in calls:
            torch.manual_seed(1)
            inputs = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
            out = compiled(*args)
            found.results.append(plain(out))
            if example.grad:
                found.results.append(_gradients(out, [*leaves, *inputs]))
            found.results.append(plain([*leaves, *inputs]))
            found.after.append(len(found.graphs))
        found.results.append(torch.get_rng_state().tolist())
    found.breaks = dict(counters["graph_break"])
    found.guards = [_guards_of(text) for text in printed_guards()]
    return found


@contextmanager
def _one_thread() -> Generator[None]:
    """Sums over indices have the same order each time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _guards_of(text: str) -> Guards:
    lines = [line.partition(LINE)[0].rstrip() for line in text.splitlines()]
    shapes = [line.removeprefix(_SHAPE) for line in lines if line.startswith(_SHAPE)]
    return Guards(tuple(line for line in lines if not line.startswith(_SHAPE)), frozenset(shapes))


def _leaves(fn: Any) -> list[torch.Tensor]:
    module = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "module", None)
    return [] if module is None else [*module.parameters(), *module.buffers()]


def _gradients(out: Any, leaves: list[torch.Tensor]) -> Any:
    """The gradients of a fixed functional of the outputs, all of them equally not plain sums."""
    loss: Any = 0
    for i, tensor in enumerate(pytree.tree_leaves(out)):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            loss = loss + (i + 1) * _total(tensor)
    for leaf in leaves:
        leaf.grad = None
    if isinstance(loss, torch.Tensor):
        loss.backward()
    grads = [leaf.grad for leaf in leaves if leaf.requires_grad and leaf.is_leaf]
    return plain(grads)


def _total(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_nested:
        tensor = tensor.values()
    total = tensor.float().cos().sum()
    full = getattr(total, "full_tensor", None)
    return total if full is None else full()


# --- plain data -----------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Metadata and bits of all tensors in a tree, as data that ``==`` compares."""
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return repr(value)


def _tensor(tensor: torch.Tensor) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "class": type(tensor).__name__,
        "dtype": str(tensor.dtype),
        "requires_grad": tensor.requires_grad,
    }
    tensor = tensor.detach()
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        facts |= {name: plain(getattr(tensor, name)) for name in names}
        if tensor.is_nested:
            return facts
        facts["context"] = repr(context)
    facts |= {"size": list(tensor.shape), "stride": list(tensor.stride())}
    if not is_traceable_wrapper_subclass(tensor):
        facts["bits"] = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return facts


# --- comparison -----------------------------------------------------------------------------------


def difference(ours: Run, theirs: Run) -> str | None:
    """The first thing in which two runs differ."""
    found = _difference(ours.results, theirs.results)
    if found is not None:
        return f"results{found}"
    for what in ("graphs", "after", "breaks"):
        if getattr(ours, what) != getattr(theirs, what):
            return f"{what}: {getattr(ours, what)} instead of {getattr(theirs, what)}"
    if len(ours.guards) != len(theirs.guards):
        return f"{len(ours.guards)} sets of guards instead of {len(theirs.guards)}"
    for i, (a, b) in enumerate(zip(ours.guards, theirs.guards, strict=True)):
        if a.tree != b.tree:
            return f"guards[{i}]: more {_less(a.tree, b.tree)}, less {_less(b.tree, a.tree)}"
        if a.shapes != b.shapes and not (verdict := equivalent_code(b.shapes, a.shapes)):
            return f"guards[{i}] on shapes: {verdict}"
    for i, (a, b) in enumerate(zip(ours.facts, theirs.facts, strict=True)):
        verdict = equivalent(b, a)
        if not verdict:
            return f"facts[{i}]: {verdict}"
    return None


def _difference(a: Any, b: Any, where: str = "") -> str | None:
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        pairs = [(a[key], b[key], f"{where}.{key}") for key in a]
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = [(x, y, f"{where}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True))]
    elif a == b:
        return None
    else:
        return f"{where}: {str(a)[:200]} instead of {str(b)[:200]}"
    return next((d for pair in pairs if (d := _difference(*pair)) is not None), None)


def _less(a: tuple[str, ...], b: tuple[str, ...]) -> list[str]:
    return [line for line in a if line not in b]


def check(example: Example) -> Run:
    """Compare the handoff to a backend with the backend itself; returns the latter's run."""
    if example.warm:
        run(example, example.backend)
    theirs = run(example, example.backend)
    ours = run(example, tfk.handoff(example.backend))
    found = difference(ours, theirs)
    assert found is None, found
    return theirs
