"""``handoff``: run a compiler backend in a fresh ``ShapeEnv``, whose new facts are propagated back.

Dynamo calls a backend with the ``ShapeEnv`` that it traced with. Here the inputs are described and
rebuilt in a fresh ``ShapeEnv`` with the same facts (`fresh_env.FreshEnv.copy_facts`), and the backend
runs with these. Each guard, value range, replacement, divisibility and runtime assert that it adds is
then stated in Dynamo's environment (`feedback`), from which Dynamo makes the guards of the frame.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from torch_fakeify.compat import torch_dynamo, torch_symbols
from torch_fakeify.compat.arguments import placeholders_of
from torch_fakeify.compat.backends import backend_name, check_backend, compiler_of, reset_backend
from torch_fakeify.convert.converter import MetaConverter
from torch_fakeify.describe.describer import MetaTensorDescriber
from torch_fakeify.describe.inputs import INPUTS_FIX, describe_inputs, initial_fakes
from torch_fakeify.discharge.installing import entailment as asking_the_prover
from torch_fakeify.encoding.exprs import decode_expr
from torch_fakeify.encoding.fake_modes import describe_fake_mode, make_fake_mode
from torch_fakeify.encoding.meshes import Meshes
from torch_fakeify.encoding.sources import source_of
from torch_fakeify.errors import CaptureError
from torch_fakeify.records.symbol_names import rename_symbols

from .feedback import facts_of, propagate_new_facts
from .fresh_env import FreshEnv
from .refakeifier import GraphValues

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from torch_fakeify.records.frame import InputDesc

_LOCAL = frozenset({"fake_mode", "tensor_to_context"})
"""Attributes that the backend's ``TracingContext`` does not share with Dynamo's."""


class FlattenedInputs:
    """The inputs of a graph as rows: one for each placeholder, or for each item of a list.

    Compiled autograd passes the tensors of a backward to a graph as one list, which the graph empties.
    Dynamo has a policy and a fake tensor for each item, and a node that reads it from the list.

    Attributes:
        placeholders: one for each row: that of the graph, or a new one for an item of a list.

    Args:
        gm: the graph.
        inputs: its inputs.

    Raises:
        CaptureError: not a graph, or another number of inputs than of placeholders.
    """

    def __init__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
        placeholders = placeholders_of(gm, inputs, CaptureError, fix=INPUTS_FIX)
        self.placeholders: list[torch.fx.Node] = []
        self._lengths: list[int | None] = []
        apart = torch.fx.Graph()
        for fx_node, value in zip(placeholders, inputs, strict=True):
            is_list = isinstance(value, list)
            self._lengths.append(len(value) if is_list else None)
            self.placeholders += _items(fx_node, len(value), apart) if is_list else [fx_node]

    def rows(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs with each list replaced by its items."""
        rows: list[Any] = []
        for value, length in zip(inputs, self._lengths, strict=True):
            rows += [value] if length is None else value
        return rows

    def inputs(self, rows: Sequence[Any]) -> list[Any]:
        """The inputs as the graph takes them: the inverse of `rows`."""
        left = iter(rows)
        return [
            next(left) if length is None else [next(left) for _ in range(length)]
            for length in self._lengths
        ]


def _items(fx_node: torch.fx.Node, length: int, apart: torch.fx.Graph) -> list[torch.fx.Node]:
    """Placeholders for the items of a list, with the sources and fake values of the items."""
    source = source_of(fx_node)
    made: list[torch.fx.Node] = []
    for i in range(length):
        item: Any = apart.placeholder(f"{fx_node.name}_{i}")
        if source is not None:
            item._dynamo_source = torch_dynamo.dynamo_source().GetItemSource(source, i)
        made.append(item)
    for user in fx_node.users:
        if user.op == "call_function" and user.args[0] is fx_node and type(user.args[1]) is int:
            made[user.args[1]].meta["example_value"] = user.meta.get("example_value")
    return made


class Handoff:
    """A Dynamo backend that runs another one with a fresh fake mode and a fresh ``ShapeEnv``."""

    def __init__(
        self, inner: str | Callable[..., Any] = "inductor", *, entailment: bool = False
    ) -> None:
        check_backend(inner)
        self.inner = inner
        self.entailment = entailment
        asking = ", entailment=True" if entailment else ""
        self.__name__ = f"handoff({backend_name(inner)}{asking})"

    def __repr__(self) -> str:
        return f"<{self.__name__}>"

    def __eq__(self, other: object) -> bool:
        """Whether two handoffs have equal inner backends, and so share Dynamo's compiled code."""
        return (
            isinstance(other, Handoff)
            and self.inner == other.inner
            and self.entailment == other.entailment
        )

    def __hash__(self) -> int:
        return hash((Handoff, self.__name__))

    def reset(self) -> None:
        """Reset the inner backend, as ``torch._dynamo.reset`` does."""
        reset_backend(self.inner)

    def __call__(
        self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Any:
        """Compile one frame with the inner backend.

        Raises:
            CaptureError: no frame is being traced, or an input cannot be rebuilt.
            ShapeEnvError: the backend assumed a fact that cannot be stated in Dynamo's environment.
        """
        context = torch_dynamo.TracingContext.try_get()
        if context is None or context.fake_mode is None or context.fake_mode.shape_env is None:
            raise CaptureError(
                "a handoff takes place where Dynamo calls a backend",
                expected="a TracingContext with a fake mode and a ShapeEnv",
                found="none",
                fix="Use it as torch.compile(f, backend=torch_fakeify.handoff(...))",
            )
        inner = compiler_of(self.inner, kwargs)
        if context.fake_mode.shape_env.frozen or context.fake_mode.propagate_real_tensors:
            # A graph for one size (`specialize_on`), compiled late: its inputs have no policies, and
            # no guards are installed. Or real data is propagated, which records do not hold.
            return inner(gm, example_inputs, **kwargs)
        flattened = FlattenedInputs(gm, example_inputs)
        rows = flattened.rows(example_inputs)
        values = initial_fakes(flattened.placeholders, rows)
        # Dynamo has traced through the user's tensor subclasses: backends get ordinary tensors.
        describer = MetaTensorDescriber(keep_nested_ints=True, strip_subclasses=True)
        env = context.fake_mode.shape_env
        records = describe_inputs(
            flattened.placeholders, [x if _has_record(x) else None for x in rows], describer, env
        )
        state = fresh_backend_state(gm, records, values, rows, context, describer, flattened)
        asking = asking_the_prover() if self.entailment else nullcontext()
        with asking, state as (handoff_graph, inputs):
            rows.clear()  # no reference to a real tensor remains while the backend runs
            return inner(handoff_graph, inputs, **kwargs)


def handoff(inner: str | Callable[..., Any] = "inductor", *, entailment: bool = False) -> Handoff:
    """A Dynamo backend: ``torch.compile(f, backend=handoff("inductor"))``.

    Args:
        inner: the backend that compiles, by name or callable.
        entailment: run it inside `torch_fakeify.entailment`, so that it adds no guard that follows.

    Example:
        >>> torch.compile(torch.sin, backend=tfk.handoff("eager"))(torch.zeros(2))
        tensor([0., 0.])
    """
    return Handoff(inner, entailment=entailment)


fakeify = Handoff("inductor")
"""The backend that Dynamo finds under this name."""


@contextmanager
def fresh_backend_state(
    gm: torch.fx.GraphModule,
    records: Sequence[InputDesc],
    values: Sequence[Any],
    example_inputs: Sequence[Any],
    context: Any,
    describer: MetaTensorDescriber,
    flattened: FlattenedInputs | None = None,
    *,
    share_sizes: bool = False,
) -> Generator[tuple[torch.fx.GraphModule, list[Any]], None, None]:
    """Yield a graph and inputs of a fresh ``ShapeEnv`` to a backend; propagate its new facts at the end.

    The graph is a copy with fake values of the fresh environment in its metadata; weights are shared.

    Args:
        gm: the graph, which is not changed.
        records: the inputs at the start of the frame, over the symbols of the frontend.
        values: the frontend's fake values of the inputs.
        example_inputs: the keys of ``context.tensor_to_context``; constants are taken from here.
        context: the frontend's ``TracingContext``; the backend runs in another one.
        describer: the describer of the records.
        flattened: the graph's inputs with lists flattened; records, values and example inputs are its
            rows.
        share_sizes: whether an input that is the size of a tensor becomes the ``SymInt`` object of
            that tensor.

    Raises:
        ShapeEnvError: the facts contradict each other, or the backend assumed a fact that cannot be
            stated in the frontend's environment.
    """
    flattened = flattened or FlattenedInputs(gm, example_inputs)
    fresh = FreshEnv(context.fake_mode.shape_env)
    fresh.copy_facts()
    mode = make_fake_mode(describe_fake_mode(context.fake_mode), fresh.env)
    meshes = Meshes()
    # Equal meshes are distinct to torch: use those of the program.
    meshes.register_all(example_inputs)
    converter = MetaConverter(mode, symbols="keep", keep_nested_ints=True, meshes=meshes)
    moved = GraphValues(describer, converter, fresh)
    renamed = rename_symbols(tuple(records), fresh.names)
    with fresh.env.suppress_guards():  # torch asks about sizes when a tensor is made
        inputs = [
            _input(converter, fresh, record, value)
            for record, value in zip(renamed, example_inputs, strict=True)
        ]
    if share_sizes:
        inputs = _with_shared_sizes(inputs)
    moved.map_inputs(values, records, inputs)
    handoff_graph = moved.graph_module(gm, flattened.inputs(inputs))
    describer.forget()
    del converter, moved, meshes, renamed  # which refer to tensors of the frame
    before = facts_of(fresh.env)
    backend_context = _context(context, mode, fresh, list(zip(example_inputs, inputs, strict=True)))
    with torch_dynamo.tracing(backend_context):
        try:
            yield handoff_graph, flattened.inputs(inputs)
        finally:  # also of a backend that asks Dynamo to trace again
            _share(backend_context, context)
            _drop_others(backend_context.tensor_to_context, inputs)
            for fx_node in handoff_graph.graph.find_nodes(op="placeholder"):
                fx_node.meta.pop("grapharg", None)  # as Dynamo does: a backend may store the graph
        propagate_new_facts(fresh, context.fake_mode.shape_env, before)
    fresh.freeze()


def _input(converter: MetaConverter, fresh: FreshEnv, record: InputDesc, value: Any) -> Any:
    if record.tensor is not None:
        return converter.from_desc(record.tensor)
    if record.sym is not None:
        sym = record.sym
        expr = decode_expr(sym.expr)
        return torch_symbols.make_sym(sym.kind, expr, fresh.env, sym.hint, constant=sym.constant)
    return value


def _with_shared_sizes(inputs: list[Any]) -> list[Any]:
    """Replace symbolic inputs by the ``SymInt`` object of the tensor whose size they are.

    As of torch 2.15 AOTAutograd adds to the offset of a view of a shared storage: a trace that does
    not have the offset's object looks for its symbol and finds the sum, which depends on it again.
    """
    requested = {value.node._expr for value in inputs if isinstance(value, torch.SymInt)}
    if not requested:
        return inputs
    held: dict[Any, Any] = {}
    for value in inputs:
        if not isinstance(value, torch.Tensor):
            continue
        sizes = list(value.shape)
        if value.layout is torch.strided and not value.is_nested:
            sizes += [*value.stride(), value.storage_offset()]
        for size in sizes:
            if isinstance(size, torch.SymInt) and size.node._expr in requested:
                held.setdefault(size.node._expr, size)
    return [
        held.get(value.node._expr, value) if isinstance(value, torch.SymInt) else value
        for value in inputs
    ]


def _has_record(value: Any) -> bool:
    """Whether an input is rebuilt; others, such as a ``DeviceMesh``, are passed on unchanged."""
    return isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))


def _context(context: Any, mode: Any, fresh: FreshEnv, inputs: Sequence[tuple[Any, Any]]) -> Any:
    """The ``TracingContext`` for the backend, which may store it for a later backward.

    A backend makes the tensors that the graph holds fake by their policies.
    """
    made = torch_dynamo.TracingContext(mode)
    _share(context, made)
    fakes = {id(value): fake for value, fake in inputs}
    for value, policy in context.tensor_to_context.items():
        if id(value) in fakes:
            made.tensor_to_context[fakes[id(value)]] = policy
        else:
            made.tensor_to_context[value] = fresh.policy(policy)
    return made


def _drop_others(policies: Any, inputs: Sequence[Any]) -> None:
    """Drop the policies of real tensors, since torch cannot swap tensors with weak references."""
    kept = set(map(id, inputs))
    for value in [*policies]:
        if id(value) not in kept:
            del policies[value]


def _share(source: Any, target: Any) -> None:
    for name, value in vars(source).items():
        if name not in _LOCAL:
            setattr(target, name, value)
