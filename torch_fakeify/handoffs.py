"""The handoff: a compiler backend gets a fresh ``ShapeEnv``, and what it learns there comes back.

Dynamo hands a backend a new ``FakeTensorMode`` with the ``ShapeEnv`` that it traced with. Here the
inputs are described, rebuilt in a ``ShapeEnv`` that knows the facts (`fresh_env.FreshEnv.adopt`), and
the backend runs with these. Symbols of both environments correspond by source, so each guard, value
range, replacement, divisibility and runtime assert that the backend adds is stated in Dynamo's own
environment, from which Dynamo then makes the guards of the frame.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from . import _torch
from .backend import backend_name
from .convert import MetaConverter
from .describe import MetaTensorDescriber
from .errors import CaptureError
from .exprs import decode_expr
from .fake_modes import describe_fake_mode, make_fake_mode
from .frame_inputs import describe_inputs, fakes_at_the_beginning
from .fresh_env import FreshEnv
from .graph_values import GraphValues
from .learned import Knowledge, state_learned
from .listed_inputs import ListedInputs
from .renaming import rename_symbols

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from .desc_frame import InputDesc

__all__ = ["Handoff", "fakeify", "handed_over", "handoff"]

_OWN = frozenset({"fake_mode", "tensor_to_context"})
"""What a context does not share with the one that Dynamo has."""


class Handoff:
    """A Dynamo backend that gives another one a fresh fake mode with a fresh ``ShapeEnv``."""

    def __init__(self, inner: str | Callable[..., Any] = "inductor") -> None:
        self.inner = inner
        self.__name__ = f"handoff({backend_name(inner)})"

    def __eq__(self, other: object) -> bool:
        """Equal backends share what Dynamo has compiled."""
        return isinstance(other, Handoff) and self.inner == other.inner

    def __hash__(self) -> int:
        return hash((Handoff, self.__name__))

    def reset(self) -> None:
        """What ``torch._dynamo.reset`` does with a backend."""
        reset = getattr(_torch.resolve_backend(self.inner), "reset", None)
        if reset is not None:
            reset()

    def _compiler(self, kwargs: dict[str, Any]) -> Callable[..., Any]:
        """The inner backend. Inductor gets ``mode`` and ``options`` as ``torch.compile`` gives them."""
        if self.inner == "inductor" and kwargs.keys() & {"mode", "options"}:
            return _torch.inductor_with(kwargs.pop("mode", None), kwargs.pop("options", None))
        return _torch.resolve_backend(self.inner)

    def __call__(
        self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Any:
        """Compile one frame with the inner backend.

        Raises:
            CaptureError: no frame is being traced, or an input cannot be rebuilt.
            ShapeEnvError: the backend assumed something that has no place in Dynamo's environment.
        """
        context = _torch.TracingContext.try_get()
        if context is None or context.fake_mode is None or context.fake_mode.shape_env is None:
            raise CaptureError(
                "a handoff takes place where Dynamo calls a backend",
                expected="a TracingContext with a fake mode and a ShapeEnv",
                found="none",
                fix="Use it as torch.compile(f, backend=torch_fakeify.handoff(...))",
            )
        inner = self._compiler(kwargs)
        if context.fake_mode.shape_env.frozen or context.fake_mode.propagate_real_tensors:
            # A graph for one special size (`specialize_on`), compiled when that size is met: the
            # inputs have no policies, and no guard is installed any more. Or data is propagated,
            # of which records hold none.
            return inner(gm, example_inputs, **kwargs)
        listed = ListedInputs(gm, example_inputs)
        rows = listed.rows(example_inputs)
        values = fakes_at_the_beginning(listed.placeholders, rows)
        # A graph has done with what a class of the user's does; backends see plain tensors.
        describer = MetaTensorDescriber(keep_nested_ints=True, lose_classes=True)
        env = context.fake_mode.shape_env
        records = describe_inputs(
            listed.placeholders, [x if _has_record(x) else None for x in rows], describer, env
        )
        lending = handed_over(gm, records, values, rows, context, describer, listed)
        with lending as (lent, inputs):
            rows.clear()  # they are described: no real tensor is kept for the backend
            return inner(lent, inputs, **kwargs)


def handoff(inner: str | Callable[..., Any] = "inductor") -> Handoff:
    """A Dynamo backend: ``torch.compile(f, backend=handoff("inductor"))``.

    Args:
        inner: the backend that compiles, by name or callable.
    """
    return Handoff(inner)


fakeify = Handoff("inductor")
"""The backend that Dynamo finds under this name."""


@contextmanager
def handed_over(
    gm: torch.fx.GraphModule,
    records: Sequence[InputDesc],
    values: Sequence[Any],
    example_inputs: Sequence[Any],
    context: Any,
    describer: MetaTensorDescriber,
    listed: ListedInputs | None = None,
    *,
    share_sizes: bool = False,
) -> Generator[tuple[torch.fx.GraphModule, list[Any]], None, None]:
    """Around a backend: gives it fresh state, and what it has learned comes back at the end.

    The state is the graph and its inputs: a copy, with the fake values of the fresh environment in
    its metadata; weights are shared.

    Args:
        gm: the graph, in which nothing changes.
        records: the inputs as they were when the frame began, over the symbols of the frontend.
        values: the frontend's own fake values of the inputs.
        example_inputs: what the context knows the inputs by; constants are taken from here.
        context: the frontend's ``TracingContext``. Inside, another one is active.
        describer: of the records.
        listed: the lists among the graph's inputs; records, values and example inputs are its rows.
        share_sizes: whether an input that is the size of a tensor becomes the very object that the
            tensor has. Dynamo's are as Dynamo has them.

    Raises:
        ShapeEnvError: the facts contradict one another, or the backend assumed something that has
            no place in the frontend's environment.
    """
    listed = listed or ListedInputs(gm, example_inputs)
    fresh, mode, lent, inputs = _rebuilt(
        gm, records, values, example_inputs, context.fake_mode, describer, listed, share_sizes
    )
    describer.forget()
    before = Knowledge.of(fresh.env)
    own = _context(context, mode, zip(example_inputs, inputs, strict=True))
    with _torch.tracing(own):
        try:
            yield lent, listed.inputs(inputs)
        finally:  # also of a backend that asks Dynamo to trace again
            _share(own, context)
            _forget_inputs(lent)
        state_learned(fresh, context.fake_mode.shape_env, before)
    fresh.finish()


def _forget_inputs(gm: torch.fx.GraphModule) -> None:
    """Without what refers to the real inputs, as Dynamo leaves its own graph: a backend keeps it."""
    for fx_node in gm.graph.find_nodes(op="placeholder"):
        fx_node.meta.pop("grapharg", None)


# --- there ----------------------------------------------------------------------------------------


def _rebuilt(
    gm: torch.fx.GraphModule,
    records: Sequence[InputDesc],
    values: Sequence[Any],
    example_inputs: Sequence[Any],
    mode: Any,
    describer: MetaTensorDescriber,
    listed: ListedInputs,
    share_sizes: bool,
) -> tuple[FreshEnv, Any, torch.fx.GraphModule, list[Any]]:
    """Graph and inputs in a fresh mode, whose environment knows what that of the mode does."""
    fresh = FreshEnv(mode.shape_env)
    fresh.adopt()
    new_mode = make_fake_mode(describe_fake_mode(mode), fresh.env)
    converter = MetaConverter(new_mode, symbols="keep", keep_nested_ints=True)
    moved = GraphValues(describer, converter, fresh)
    renamed = rename_symbols(tuple(records), fresh.names)
    with fresh.env.suppress_guards():  # torch asks about sizes when a tensor is made
        inputs = [
            _input(converter, fresh, record, value)
            for record, value in zip(renamed, example_inputs, strict=True)
        ]
    if share_sizes:
        inputs = _sharing_sizes(inputs)
    moved.stand_for(values, records, inputs)
    return fresh, new_mode, moved.graph_module(gm, listed.inputs(inputs)), inputs


def _input(converter: MetaConverter, fresh: FreshEnv, record: InputDesc, value: Any) -> Any:
    if record.tensor is not None:
        return converter.from_desc(record.tensor)
    if record.sym is not None:
        sym = record.sym
        expr = decode_expr(sym.expr)
        return _torch.make_sym(sym.kind, expr, fresh.env, sym.hint, constant=sym.constant)
    return value


def _sharing_sizes(inputs: list[Any]) -> list[Any]:
    """The inputs, of which a number that is the size of a tensor is that very object.

    As of torch 2.15 AOTAutograd adds to the offset of a view of a shared storage: a trace that does
    not know the offset by the object looks for its symbol, and finds the sum, which asks for it again.
    """
    wanted = {value.node._expr for value in inputs if isinstance(value, torch.SymInt)}
    if not wanted:
        return inputs
    held: dict[Any, Any] = {}
    for value in inputs:
        if not isinstance(value, torch.Tensor):
            continue
        sizes = list(value.shape)
        if value.layout is torch.strided and not value.is_nested:
            sizes += [*value.stride(), value.storage_offset()]
        for size in sizes:
            if isinstance(size, torch.SymInt) and size.node._expr in wanted:
                held.setdefault(size.node._expr, size)
    return [
        held.get(value.node._expr, value) if isinstance(value, torch.SymInt) else value
        for value in inputs
    ]


def _has_record(value: Any) -> bool:
    """Whether it is rebuilt: any other input, such as a ``DeviceMesh``, is passed on as it is."""
    return isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))


def _context(context: Any, mode: Any, inputs: Any) -> Any:
    """A context for the backend. It keeps it for a backward that is compiled later."""
    own = _torch.TracingContext(mode)
    _share(context, own)
    for value, fake in inputs:
        if isinstance(value, torch.Tensor) and value in context.tensor_to_context:
            own.tensor_to_context[fake] = context.tensor_to_context[value]
    return own


def _share(source: Any, target: Any) -> None:
    for name, value in vars(source).items():
        if name not in _OWN:
            setattr(target, name, value)
