"""Runs a feature of ``torch.compile`` with one backend and writes down all that can be seen of it.

A feature is a function of a `Run`: it compiles functions with ``run.compile`` and calls them with
``run.call``. What it sees is a list of plain facts, so that two backends are compared by ``==``.
"""

from __future__ import annotations

import re
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.code_context import code_context
from torch._dynamo.utils import counters
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import is_fake
from torch.utils import _pytree as pytree

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping

Backend = "str | Callable[..., Any]"

_NUMBERS = re.compile(
    r"0x[0-9a-f]+|\d{9,}|_c\d+\b|\bj\d+\b|___\w+(\(\d+)?|\baot\d+_|_[0-9a-f]{8}_[0-9a-f_]+"
)
"""Addresses, identities and unique names, which say nothing."""


_ONCE = "*(__import__('torch')"
"""Guards that Dynamo makes once in a process."""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One feature: what is done, and in which settings."""

    name: str
    sentence: str
    do: Callable[[Run], None]
    dynamo: Mapping[str, Any] = field(default_factory=dict)
    """Settings of Dynamo."""
    functorch: Mapping[str, Any] = field(default_factory=dict)
    """Settings of AOTAutograd."""
    inductor: Mapping[str, Any] = field(default_factory=dict)
    """Settings of inductor."""
    shapes: str = ""
    """Why the inputs that the inner backend is given have other symbols; then they are not compared."""
    warm: bool = False
    """Whether it runs once unseen: the first time, torch compiles parts of itself with it."""
    raises: bool = False
    """Whether torch's own error is what comes of it."""
    plain: bool = False
    """Whether plain pytest runs it; else the sweep does."""
    backends: tuple[str, ...] = ("aot_eager",)


FEATURES: dict[str, Feature] = {}

WITH_INDUCTOR = frozenset({
    "mutated", "overlap_after_disjoint", "metadata_changes_twice", "specialize_on", "checkpointed",
    "random_numbers", "compiled_in_compiled", "donated_buffers", "automatic_unbacked",
    "subclasses_that_are_no_wrappers", "deduplicated", "fullgraph",
})  # fmt: skip
"""Those that the sweep compiles with inductor too: each takes seconds of a C++ compiler."""


def feature(**settings: Any) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Enter a function in the table of features."""

    def enter(do: Callable[[Run], None]) -> Callable[[Run], None]:
        name = do.__name__
        assert name not in FEATURES, name
        assert do.__doc__, name
        if name in WITH_INDUCTOR:
            settings.setdefault("backends", ("aot_eager", "inductor"))
        FEATURES[name] = Feature(name=name, sentence=do.__doc__, do=do, **settings)
        return do

    return enter


@dataclass
class Run:
    """What a feature does its work with, and what is seen of it."""

    name: str
    """The backend that compiles in the end."""
    direct: bool
    """Whether Dynamo calls it directly, or through a handoff."""
    seen: list[Any] = field(default_factory=list)
    other_symbols: bool = False
    compiled: int = 0
    """How many graphs the inner backend was given."""

    @property
    def backend(self) -> Any:
        """The backend for ``torch.compile``."""
        return self.wrapped(self.name)

    def wrapped(self, inner: Any) -> Any:
        """A backend that looks at what it is given, alone or behind a handoff."""
        spy = Spy(self, torch._dynamo.lookup_backend(inner))
        return spy if self.direct else tfk.handoff(spy)

    def compile(self, fn: Any, **options: Any) -> Any:
        """The function compiled with the backend."""
        return torch.compile(fn, backend=self.backend, **options)

    def call(
        self, fn: Callable[..., Any], *args: Any, of: Any = (), grad: bool = True, **kwargs: Any
    ) -> Any:
        """Call, note results and what became of the arguments, run the backward, note gradients.

        Args:
            fn: what is called.
            args: its arguments.
            of: a module or a tree of tensors whose changes are noted too.
            grad: whether a backward follows.
            kwargs: its named arguments.
        """
        torch.manual_seed(1)
        known = _tensors((args, kwargs, _state(of)))
        try:
            out = fn(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 -- the error is what is compared
            self.seen.append(("raised", type(error).__name__, _message(error)))
            self.note("arguments", known)
            return None
        self.note("results", pytree.tree_leaves(out), known)
        if grad:
            self.backward(out, known)
        return out

    def backward(self, out: Any, known: Iterable[torch.Tensor]) -> None:
        """Run the backward of all results, and note the gradients of all leaves."""
        roots = [t for t in _tensors(out) if t.requires_grad and t.grad_fn is not None]
        if not roots:
            return
        torch.manual_seed(2)
        try:
            torch.autograd.backward(roots, [_tangent(root) for root in roots])
        except Exception as error:  # noqa: BLE001 -- the error is what is compared
            self.seen.append(("backward raised", type(error).__name__, _message(error)))
            return
        grads = [t.grad for t in known if t.is_leaf and t.grad is not None]
        self.note("gradients", grads)

    def note(self, what: str, values: Iterable[Any], beside: Iterable[Any] = ()) -> None:
        """Write down values, how they alias one another, and how others that may have changed."""
        leaves = [*values, *beside]
        storages: dict[int, int] = {}
        objects: dict[int, int] = {}
        for leaf in leaves:
            objects.setdefault(id(leaf), len(objects))
        self.seen.append((what, [facts(leaf, objects, storages) for leaf in leaves]))


class Spy:
    """A backend that notes the graph and the inputs that another backend is given."""

    def __init__(self, run: Run, inner: Callable[..., Any]) -> None:
        self.run = run
        self.inner = inner
        self.__name__ = "Spy"

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        """Look, then compile."""
        run = self.run
        run.compiled += 1
        rows = [] if run.other_symbols else _inputs(gm, inputs)
        run.seen.append(("graph", _normal(gm.code), rows, _attached(gm)))
        return self.inner(gm, inputs, **kwargs)


_NOT_COMPARED = frozenset({
    "example_value",  # one on the way may belong to a transform that has ended: it is left out
    "mutation_region_id",  # AOTAutograd leaves it in its graph, which through a handoff is a copy
})  # fmt: skip


def _attached(gm: torch.fx.GraphModule) -> list[Any]:
    """What hangs on the graph and its nodes beside values: the names of it."""
    rows = [sorted(gm.meta), sorted(vars(gm)), sorted(gm._modules), sorted(gm._parameters)]
    kept = [(_normal(n.name), sorted(n.meta.keys() - _NOT_COMPARED)) for n in gm.graph.nodes]
    return [*rows, *kept]


def _inputs(gm: torch.fx.GraphModule, inputs: list[Any]) -> list[Any]:
    """What a backend is told of the inputs: as it makes them fake, if they are not."""
    context = TracingContext.try_get()
    mode = context.fake_mode if context is not None else None
    if mode is None:
        return []
    storages: dict[int, int] = {}
    rows: list[Any] = []
    alive: list[Any] = []  # else the next one has the address of the one before
    for value in inputs:
        if isinstance(value, list):  # of compiled autograd
            rows.append(len(value))
            continue
        if not isinstance(value, torch.Tensor):
            rows.append(_normal(repr(value)))
            continue
        fake = value
        if not is_fake(value):
            policy = context.tensor_to_context.get(value)
            source = None if policy is None else policy.tensor_source
            with mode:
                fake = mode.from_tensor(
                    value, symbolic_context=policy, source=source, trace=policy is None
                )
        alive.append(fake)
        rows.append(_described(fake, storages))
    return rows


def _described(t: torch.Tensor, storages: dict[int, int]) -> dict[str, Any]:
    """The metadata of a fake tensor, without its numbers."""
    row: dict[str, Any] = {
        "type": type(t).__name__,
        "dtype": str(t.dtype),
        "layout": str(t.layout),
        "requires_grad": t.requires_grad,
        "leaf": t.is_leaf,
        "view": t._is_view(),
        "inference": t.is_inference(),
        "conj": t.is_conj(),
        "neg": t.is_neg(),
        "size": str(tuple(t.size())),
    }
    if t.layout is torch.strided and not t.is_nested:
        row["strides"] = str(t.stride())
        row["offset"] = str(t.storage_offset())
        key = t.untyped_storage()._cdata if not _is_wrapper(t) else id(t)
        row["storage"] = storages.setdefault(key, len(storages))
    if t._base is not None:
        row["base"] = _described(t._base, storages)
    if t.is_leaf and t.grad is not None:
        row["grad"] = str(tuple(t.grad.size()))
    return row


def facts(leaf: Any, objects: dict[int, int], storages: dict[int, int]) -> Any:
    """All that can be seen of one value, comparable by ``==``."""
    if not isinstance(leaf, torch.Tensor):
        return (type(leaf).__name__, _normal(repr(leaf)))
    t = leaf
    base = t._base
    found: dict[str, Any] = {
        "same object as": objects[id(t)],
        "type": type(t).__name__,
        "dtype": str(t.dtype),
        "layout": str(t.layout),
        "size": tuple(t.size()) if not t.is_nested else _normal(str(t.shape)),
        "requires_grad": t.requires_grad,
        "leaf": t.is_leaf,
        "grad_fn": t.grad_fn is not None and _normal(type(t.grad_fn).__name__),
        "view": t._is_view(),
        "base": None if base is None else objects.get(id(base), "another"),
        "inference": t.is_inference(),
        "conj": t.is_conj(),
        "neg": t.is_neg(),
        "output number": t.output_nr,
        "version": None if t.is_inference() else t._version,
    }
    if t.layout is torch.strided and not t.is_nested:
        found["strides"] = t.stride()
        found["offset"] = t.storage_offset()
        if not _is_wrapper(t):
            storage = t.untyped_storage()
            found["storage"] = storages.setdefault(storage._cdata, len(storages))
            found["bytes"] = storage.nbytes()
    found["data"] = _data(t)
    return found


def _is_wrapper(t: torch.Tensor) -> bool:
    return torch.utils._python_dispatch.is_traceable_wrapper_subclass(t)


def _data(t: torch.Tensor) -> Any:
    """The numbers, so that NaN equals NaN and one bit of difference shows."""
    if _is_wrapper(t):
        attrs = t.__tensor_flatten__()[0]
        return [_data(getattr(t, attr)) for attr in attrs]
    with torch.no_grad():
        t = t.detach()
        if t.layout is not torch.strided:
            t = t.to_dense()
        t = t.resolve_conj().resolve_neg().contiguous()
        if t.numel() == 0 or t.untyped_storage().nbytes() == 0:
            return b""
        if t.is_floating_point():
            t = torch.where(t == 0, t.abs(), t) if t.dtype.itemsize > 1 else t
        return bytes(t.reshape(-1).view(torch.uint8).tolist())


def _tangent(root: torch.Tensor) -> torch.Tensor:
    return torch.randn_like(root.detach())


def _state(of: Any) -> Any:
    if isinstance(of, torch.nn.Module):
        return [*of.parameters(), *of.buffers()]
    return of


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _normal(text: str) -> str:
    return _NUMBERS.sub("*", text)


def _message(error: BaseException) -> str:
    """The first lines, without what is different each time."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return _normal("\n".join(lines[:2])).replace("handoff(Spy)", "Spy")


COUNTED = ("stats", "frames", "graph_break", "unimplemented", "recompile_limit", "aot_autograd")


@contextmanager
def _guards(run: Run) -> Generator[None]:
    """Note the guards of each frame."""
    from torch._dynamo import guards

    plain = guards.CheckFunctionManager.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        manager = self.guard_manager
        if not manager.code_parts:
            manager.populate_code_parts_for_debugging()
        parts = {_normal(part) for part in manager.code_parts}
        run.seen.append(("guards", sorted(p for p in parts if not p.startswith(_ONCE))))

    guards.CheckFunctionManager.__init__ = init
    try:
        yield
    finally:
        guards.CheckFunctionManager.__init__ = plain


def observed(one: Feature, name: str, *, direct: bool) -> list[Any]:
    """All that is seen of a feature with a backend."""
    import torch._functorch.config
    import torch._inductor.config

    torch._dynamo.reset()
    code_context.clear()
    counters.clear()
    torch.manual_seed(0)
    run = Run(name, direct, other_symbols=bool(one.shapes))
    with ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(**one.dynamo))
        stack.enter_context(
            torch._functorch.config.patch(**{"enable_autograd_cache": False, **one.functorch})
        )
        stack.enter_context(
            torch._inductor.config.patch(**{"fx_graph_cache": False, **one.inductor})
        )
        if one.warm and direct:
            one.do(Run(name, direct))
            torch._dynamo.reset()
            counters.clear()
            torch.manual_seed(0)
        stack.enter_context(_guards(run))
        one.do(run)
    run.seen.append(("graphs", run.compiled))
    run.seen.append(("counters", {key: _counts(key) for key in COUNTED}))
    torch._dynamo.reset()
    return run.seen


def _counts(key: str) -> dict[str, int]:
    found: Counter[str] = Counter()
    for name, count in counters[key].items():
        found[_normal(str(name))] += count  # addresses in them may differ
    return dict(found)
