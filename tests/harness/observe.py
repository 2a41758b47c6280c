"""What a user and a backend see of a program that ``torch.compile`` compiles.

Each `Run` is one execution of a program: what it returned and changed, the graphs its inner backend
was given, the guards that Dynamo installed and what Dynamo's ``ShapeEnv`` knew. `compare.difference`
compares two runs.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from guard_equivalence import Facts, Naming, by_sources, facts_of
from guard_terms import plain
from observed_values import (
    aot_graph,
    attached,
    error_message,
    inputs_of,
    lines_of_guards,
    tensors_in,
    values,
    without_numbers,
)
from quiet import quiet
from torch._dynamo import convert_frame
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.code_context import code_context
from torch._dynamo.guards import CheckFunctionManager
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.utils import counters
from torch._dynamo.variables.functions import get_pytree_SUPPORTED_NODES_source
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

import torch_fakeify as tfk
from torch_fakeify.encoding.sources import source_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    import sympy
    from compiled_programs import Program


_WITHOUT_SOURCE = "__meta_utils_unknown_tensor"


class Run:
    """One execution of a program, compiled by a backend or through a handoff to it.

    Attributes:
        name: the inner backend.
        direct: whether Dynamo calls the inner backend itself, and not a handoff to it.
        symbols: whether `seen` has the inner backend's inputs, AOTAutograd's graphs, and facts.
        record: whether `seen` is filled; if not, only the other attributes are.
        seen: what there was to see, in order: pairs of a kind and a value that ``==`` compares, or
            `Facts` for the kind ``facts``.
        guards: the guards on shapes that Dynamo installed, as Python; one tuple for each frame.
        explained: the same guards in words for a user, with the line that caused each.
        asserts: for each call of the backend the runtime asserts that were known after it: the
            condition, its message, the function that stated it.
        envs: Dynamo's ``ShapeEnv`` of each frame that the backend compiled.
        count: how often Dynamo called the backend, also where it raised.
        seconds: CPU time of all calls, of this process and of those that it waited for.
        in_backend: the part of it that Dynamo spent in the backend, with the handoff.
        in_inner: the part of that which the inner backend took.
    """

    def __init__(
        self, name: Any, program: Program | None = None, *, direct: bool = True, record: bool = True
    ) -> None:
        self.name = name
        self.direct = direct
        self.symbols = program is None or not program.other_symbols
        self.record = record
        self.seen: list[tuple[Any, ...]] = []
        self.guards: list[tuple[str, ...]] = []
        self.explained: list[tuple[str, ...]] = []
        self.asserts: list[list[tuple[Any, str, str]]] = []
        self.envs: list[Any] = []
        self.count = 0
        self.recompiles = 0
        self.seconds = self.in_backend = self.in_inner = 0.0
        self.compiled: Any = None

    @classmethod
    def of(cls, fn: Callable[..., Any], backend: Any, **options: Any) -> Run:
        """A function compiled with a backend as it is; calling the run calls the function."""
        torch._dynamo.reset()
        run = cls(backend, record=False)
        inner = backend_of(backend)
        # Dynamo's errors name the backend: without a name of its own it is the same for all.
        run.compiled = torch.compile(fn, backend=lambda gm, inputs: inner(gm, inputs), **options)
        return run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function that the run is of."""
        with self.watching():
            return self.compiled(*args, **kwargs)

    # --- what a program does ----------------------------------------------------------------------

    @property
    def backend(self) -> Any:
        """The backend for ``torch.compile``."""
        return self.wrapped(self.name)

    def wrapped(self, inner: Any) -> Any:
        """A backend whose inputs are recorded, alone or behind a handoff."""
        spy = Spy(self, inner)
        return spy if self.direct else tfk.handoff(spy)

    def compile(self, fn: Any, **options: Any) -> Any:
        """The function compiled with the backend."""
        return torch.compile(fn, backend=self.backend, **options)

    def call(
        self, fn: Callable[..., Any], *args: Any, of: Any = (), grad: bool = True, **kwargs: Any
    ) -> Any:
        """Call a function and record results, arguments afterwards and gradients, or the error.

        Args:
            fn: what is called.
            args: its arguments.
            of: a module or a tree of tensors whose changes are recorded too.
            grad: whether a backward follows.
            kwargs: its named arguments.
        """
        torch.manual_seed(1)
        known = tensors_in((args, kwargs, _state(of)))
        try:
            with self._timed("seconds"):
                out = fn(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 -- the error is what is compared
            self.seen.append(("raised", type(error).__name__, error_message(error)))
            self.note("arguments", known)
            return None
        leaves, structure = pytree.tree_flatten(out)
        self.note("results", leaves, known, without_numbers(str(structure)))
        if grad:
            self.backward(out, known)
        return out

    def backward(self, out: Any, known: Iterable[torch.Tensor]) -> None:
        """Run the backward of all results, and record the gradients of all leaves."""
        roots = [t for t in tensors_in(out) if t.requires_grad and t.grad_fn is not None]
        if not roots:
            return
        torch.manual_seed(2)
        try:
            with self._timed("seconds"):
                torch.autograd.backward(roots, [torch.randn_like(t.detach()) for t in roots])
        except Exception as error:  # noqa: BLE001 -- the error is what is compared
            self.seen.append(("backward raised", type(error).__name__, error_message(error)))
            return
        self.note("gradients", [t.grad if t.is_leaf else None for t in known])

    def note(
        self, what: str, found: Iterable[Any], beside: Iterable[Any] = (), structure: str = ""
    ) -> None:
        """Record values, how they alias one another, and others that may have changed."""
        if self.record:
            self.seen.append((what, structure, values([*found, *beside])))

    # --- what is seen of it -----------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Generator[None]:
        """Record what Dynamo asks of the backend, and the guards that it installs."""
        call, check = OutputGraph.call_user_compiler, CheckFunctionManager.__init__
        produce = ShapeEnv.produce_guards_verbose

        def called(output: Any, gm: torch.fx.GraphModule, *args: Any) -> Any:
            return self._called(partial(call, output, gm, *args), gm)

        def checked(manager: Any, *args: Any, **kwargs: Any) -> None:
            check(manager, *args, **kwargs)
            if self.record:
                self.seen.append(("guards", lines_of_guards(str(manager.guard_manager))))

        def produced(env: Any, *args: Any, **kwargs: Any) -> Any:
            parts = produce(env, *args, **kwargs)
            langs = kwargs.get("langs", ())
            if "verbose_python" in langs and any(env is known for known in self.envs):
                texts = dict(zip(langs, parts, strict=True))
                self.guards.append(tuple(texts["python"].exprs))
                self.explained.append(tuple(texts["verbose_python"].exprs))
            return parts

        with (
            mock.patch.object(OutputGraph, "call_user_compiler", called),
            mock.patch.object(CheckFunctionManager, "__init__", checked),
            mock.patch.object(ShapeEnv, "produce_guards_verbose", produced),
        ):
            yield

    def _called(self, call: Callable[[], Any], gm: torch.fx.GraphModule) -> Any:
        self.count += 1
        env = env_of_frame()
        before = set(() if env is None else env.var_to_range)
        placeholders = gm.graph.find_nodes(op="placeholder")
        rows = [(source_of(n), n.meta.get("example_value")) for n in placeholders]
        with self._timed("in_backend"):
            made = call()
        if env is None:
            return made
        self.envs.append(env)
        self.asserts.append(_asserts(env))  # later their stacks are gone
        if self.record:
            rows = [(s, v) for s, v in rows if s and isinstance(v, (torch.Tensor, torch.SymInt))]
            naming, unknown = _names(before, env, rows)
            asserts = [one for one in self.asserts[-1] if not unknown & one[0].free_symbols]
            # Without the functions: inductor empties the stacks of the environment it traces in.
            self.seen.append(("asserts", [(str(expr), text) for expr, text, _ in asserts]))
            if self.symbols:
                self.seen.append(("facts", _facts(env, naming, unknown)))
        return made

    @contextmanager
    def _timed(self, what: str) -> Generator[None]:
        start = cpu_seconds()
        try:
            yield
        finally:
            setattr(self, what, getattr(self, what) + cpu_seconds() - start)

    def finish(self) -> None:
        """Record what torch counted, and the state of its random numbers."""
        self.recompiles = sum(n - 1 for n in convert_frame.FRAME_COMPILE_COUNTER.values())
        found = {key: _counts(key) for key in sorted(counters)}
        self.seen.append(("calls of the backend", self.count))
        self.seen.append(("recompiles", self.recompiles))
        self.seen.append(("counters", {key: counts for key, counts in found.items() if counts}))
        self.seen.append(("random numbers", torch.get_rng_state().numpy().tobytes()))


class Spy:
    """A backend that records the graph and the inputs that another backend is given."""

    def __init__(self, run: Run, inner: Any) -> None:
        self.run = run
        self.inner = backend_of(inner)
        if inner == "aot_eager" and run.record and run.symbols:
            self.inner = partial(self.inner, fw_compiler=self._lowered, bw_compiler=self._lowered)
        self.__name__ = "Spy"

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        """Record, then compile."""
        run = self.run
        if run.record:
            rows = inputs_of(gm, inputs) if run.symbols else []
            run.seen.append(("graph", without_numbers(gm.code), rows, attached(gm)))
        with run._timed("in_inner"):
            return self.inner(gm, inputs, **kwargs)

    def _lowered(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.run.seen.append(("graph of AOTAutograd", aot_graph(gm)))
        return boxed_nop(gm, inputs)


def observed(program: Program, backend: Any, *, direct: bool, record: bool = True) -> Run:
    """Compile and run a program, as if torch had compiled nothing before.

    Args:
        program: what is compiled and called.
        backend: the inner backend.
        direct: whether Dynamo calls it itself, and not a handoff to it.
        record: whether values, graphs, guards and facts are recorded.
    """
    import torch._functorch.config
    import torch._inductor.config

    run = Run(backend, program, direct=direct, record=record)
    functorch = {"enable_autograd_cache": False, **program.functorch}
    inductor = {"fx_graph_cache": False, **program.inductor}
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(_one_thread())
        enter(quiet())
        enter(torch._dynamo.config.patch(**program.dynamo))
        enter(torch._functorch.config.patch(**functorch))
        enter(torch._inductor.config.patch(**inductor))
        if program.warm and direct:
            forget()
            with program.around():
                program.do(Run(backend))
        forget()
        enter(program.around())
        enter(run.watching())
        program.do(run)
        run.finish()
    torch._dynamo.reset()
    return run


def forget() -> None:
    """Reset what torch keeps of programs that it compiled before."""
    torch._dynamo.reset()
    code_context.clear()
    counters.clear()
    FakeTensorMode.cache_clear()
    get_pytree_SUPPORTED_NODES_source.cache_clear()  # its first call in a process adds a guard
    RemovableHandle.next_id = 0  # guards name hooks by it
    torch.manual_seed(0)


@contextmanager
def _one_thread() -> Generator[None]:
    """Sums over indices have the same order each time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def cpu_seconds() -> float:
    """CPU time of this process and of those that it has waited for."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def backend_of(backend: Any) -> Any:
    """A backend by name, or itself."""
    return torch._dynamo.lookup_backend(backend) if isinstance(backend, str) else backend


def env_of_frame() -> Any:
    """The ``ShapeEnv`` of the active ``TracingContext``."""
    mode = TracingContext.get().fake_mode
    assert mode is not None
    return mode.shape_env


def _state(of: Any) -> Any:
    return [*of.parameters(), *of.buffers()] if isinstance(of, torch.nn.Module) else of


def _counts(key: str) -> dict[str, int]:
    found: Counter[str] = Counter()
    for name, count in counters[key].items():
        text = without_numbers(str(name))  # addresses in them may differ
        if "Backend compiler `" in text:  # the name of the backend and its traceback follow
            text = text.partition("Developer debug context")[0].replace("handoff(Spy)", "Spy")
        found[text] += count
    return dict(found)


def _asserts(env: Any) -> list[tuple[Any, str, str]]:
    found: list[tuple[Any, str, str]] = []
    for group in env.deferred_runtime_asserts.values():
        for one in group:
            frames = [f.name for f in one.stack.summary() if "/torch/" not in f.filename]
            found.append((one.expr, one.msg, frames[-1] if frames else ""))
    return found


def _names(
    symbols: set[sympy.Symbol], env: Any, rows: list[tuple[Any, Any]]
) -> tuple[Naming, set[sympy.Symbol]]:
    """The variables of an environment's symbols, and the symbols that are a backend's own.

    A backend that traces again in Dynamo's environment makes symbols there for what the graph
    computes, and finds that they are Dynamo's. Through a handoff that takes place elsewhere.

    Args:
        symbols: the symbols that there were before the backend was called.
        env: the environment.
        rows: the sources of the graph's inputs, and their values.
    """
    naming = by_sources(env, inputs=rows)
    own = {symbol: env.replace(symbol) for symbol in env.var_to_range if symbol not in symbols}
    for symbol, replaced in own.items():
        if replaced in symbols:
            naming[symbol] = plain(replaced, naming)
    return naming, {symbol for symbol in own if symbol not in naming}


def _facts(env: Any, naming: Naming, unknown: set[sympy.Symbol]) -> Facts:
    """What an environment knows of the symbols that are not a backend's own.

    Own ones are also those of tensors without a source, which torch names as it makes them fake.
    """
    names = {symbol.name for symbol in unknown}
    found = facts_of(env, naming, asserts=True)
    known = [
        (expr, what)
        for expr, what in zip(found.exprs, found.what, strict=True)
        if not any(s.name in names or _WITHOUT_SOURCE in s.name for s in expr.free_symbols)
    ]
    return Facts(tuple(e for e, _ in known), tuple(w for _, w in known), found.hints)
