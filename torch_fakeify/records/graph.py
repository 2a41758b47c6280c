"""The records of FX graphs.

A graph is a list of nodes. A node refers to an earlier node by its position (``NodeValue``). Names in
these records become Python source when torch compiles a ``GraphModule``, so the decoder accepts only
identifiers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from .record import Record
from .tensor import MetaTensorDesc, SourceDesc, StackDesc, Value

if TYPE_CHECKING:
    from collections.abc import Iterator

Opcode: TypeAlias = Literal[
    "placeholder", "get_attr", "call_function", "call_method", "call_module", "output"
]

VALUE_KEYS = ("example_value", "val")
"""The keys of a node's value in its metadata; such a value is never a shared one."""


class NodeDesc(Record, frozen=True):
    """One FX node."""

    op: Opcode
    name: str
    target: Value
    """A ``FunctionValue`` for ``call_function``, else a string."""
    args: tuple[Value, ...] = ()
    """Of a placeholder, its default value, if it has one."""
    kwargs: tuple[tuple[str, Value], ...] = ()
    type: Value = None
    """The annotation, if it is a class: a ``TypeValue``."""
    users: tuple[int, ...] | None = None
    """Positions of the users in the order of ``Node.users``; ``None`` if that is graph order."""
    source: SourceDesc | None = None
    """The source of the input, of a placeholder made by Dynamo."""
    stack: StackDesc | None = None
    """``meta["stack_trace"]``, if it has the format of ``traceback``."""
    meta: tuple[tuple[str, Value], ...] = ()
    """The other carried entries of ``Node.meta``, in their order; see `metadata_keys`."""
    dropped_meta: tuple[tuple[str, str], ...] = ()
    """Entries that are neither carried nor listed as needless: ``(key, reason)``."""

    @property
    def value(self) -> Value:
        """The recorded value; ``None`` if there is none."""
        return next((value for key, value in self.meta if key in VALUE_KEYS), None)


class CallingDesc(Record, frozen=True):
    """The calling convention of a graph's generated function, if inputs are not separate arguments."""

    boxed: bool = False
    """Whether the inputs are one list."""
    arguments: tuple[str, ...] = ()
    """Names of the structured arguments."""
    in_spec: Value = None
    """The structure of the arguments: a leaf is ``None``, a container an ``OpaqueValue`` ``TreeSpec``."""
    out_spec: Value = None
    """The structure of the output, in a ``TupleValue`` of one item; ``None`` if it is flat."""


class GraphModuleDesc(Record, frozen=True):
    """A ``torch.fx.GraphModule``: its graph, attributes, parameters, buffers and submodules."""

    nodes: tuple[NodeDesc, ...]
    class_name: str = "GraphModule"
    function_name: str | None = None
    """The attribute ``__name__``, which Dynamo gives to bodies of higher-order operators."""
    training: bool = True
    calling: CallingDesc | None = None
    """``None`` if each input is an argument of the generated function."""
    force_dynamic: bool = False
    """The attribute ``torchdynamo_force_dynamic``."""
    modules: tuple[tuple[str, bool], ...] = ()
    """Modules that only contain others: dotted name and training flag."""
    submodules: tuple[tuple[str, GraphModuleDesc], ...] = ()
    """Graphs on the module by dotted name: bodies of higher-order operators, called submodules."""
    submodule_aliases: tuple[tuple[str, str], ...] = ()
    """Further names of a graph in ``submodules``: ``(name, name in submodules)``."""
    tensors: tuple[tuple[str, MetaTensorDesc], ...] = ()
    """Parameters, buffers and tensor constants by dotted name."""
    plain_tensors: tuple[str, ...] = ()
    """Names in ``tensors`` that are registered neither as parameter nor as buffer."""
    transient_buffers: tuple[str, ...] = ()
    """Names in ``tensors`` of buffers that no ``state_dict`` contains."""
    tensor_data: tuple[tuple[str, bytes], ...] = ()
    """Optional data of small constants: elements in row-major order, little-endian."""
    values: tuple[tuple[str, Value], ...] = ()
    """Constants other than tensors that ``get_attr`` reads, by dotted name."""
    meta: tuple[tuple[str, Value], ...] = ()
    """The carried entries of ``GraphModule.meta``."""
    dropped_meta: tuple[tuple[str, str], ...] = ()
    """Entries of ``GraphModule.meta`` that are neither carried nor needless: ``(key, reason)``."""
    shared: tuple[Value, ...] = ()
    """Values that many nodes' metadata share, referenced as ``OpaqueValue(kind="shared")``."""

    def graphs(self) -> Iterator[GraphModuleDesc]:
        """Return the graph and its nested graphs, each before its own."""
        return (graph for _, graph in self.named_graphs())

    def named_graphs(self, name: str = "") -> Iterator[tuple[str, GraphModuleDesc]]:
        """Yield what `graphs` has, with dotted names that begin with the ``name`` of this graph."""
        yield name, self
        for part, body in self.submodules:
            yield from body.named_graphs(f"{name}.{part}" if name else part)

    @property
    def without_data(self) -> tuple[str, ...]:
        """Names of the real tensors whose elements are not recorded."""
        present = {name for name, _ in self.tensor_data}
        return tuple(n for n, t in self.tensors if not t.is_fake and n not in present)
