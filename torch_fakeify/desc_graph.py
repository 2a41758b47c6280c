"""The records of FX graphs.

A graph is a list of nodes; a node refers to another one by its position (``NodeValue``), always to
an earlier one. Names in these records end in Python source text when torch compiles a
``GraphModule``, so the decoder takes identifiers only.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from .desc import MetaTensorDesc, Record, SourceDesc, StackDesc, Value

Opcode: TypeAlias = Literal[
    "placeholder", "get_attr", "call_function", "call_method", "call_module", "output"
]


class NodeDesc(Record, frozen=True):
    """One FX node."""

    op: Opcode
    name: str
    target: Value
    """A ``FunctionValue`` for ``call_function``, else a string."""
    args: tuple[Value, ...] = ()
    """For a placeholder its default, if it has one."""
    kwargs: tuple[tuple[str, Value], ...] = ()
    type: Value = None
    """The annotation, if it is a class: a ``TypeValue``."""
    users: tuple[int, ...] | None = None
    """Positions of the users in the order of ``Node.users``; ``None`` if that is graph order."""
    source: SourceDesc | None = None
    """Of a placeholder of Dynamo's: where the input comes from."""
    stack: StackDesc | None = None
    """``meta["stack_trace"]``, if it has the form that ``traceback`` prints."""
    meta: tuple[tuple[str, Value], ...] = ()
    """The other carried entries of ``Node.meta``, in their order; see ``graph_meta.py``."""
    dropped_meta: tuple[tuple[str, str], ...] = ()
    """Entries that are neither carried nor known to be needless: ``(key, reason)``."""


class CallingDesc(Record, frozen=True):
    """How a graph's generated function takes its inputs, if not one by one."""

    boxed: bool = False
    """As one list."""
    arguments: tuple[str, ...] = ()
    """Names of the structured arguments."""
    in_spec: Value = None
    """Their structure: a leaf is ``None``, a container an ``OpaqueValue`` of kind ``TreeSpec``."""
    out_spec: Value = None
    """The structure of the output in a ``TupleValue`` of one item; ``None`` if it is flat."""


class GraphModuleDesc(Record, frozen=True):
    """A ``torch.fx.GraphModule``: its graph, and what hangs on the module."""

    nodes: tuple[NodeDesc, ...]
    class_name: str = "GraphModule"
    function_name: str | None = None
    """The attribute ``__name__``, which Dynamo gives to bodies of higher-order operators."""
    training: bool = True
    calling: CallingDesc | None = None
    """``None`` if the generated function takes its inputs one by one."""
    force_dynamic: bool = False
    """The attribute ``torchdynamo_force_dynamic``."""
    modules: tuple[tuple[str, bool], ...] = ()
    """Plain modules that only hold others: dotted name and training flag."""
    submodules: tuple[tuple[str, GraphModuleDesc], ...] = ()
    """Graphs on the module by dotted name: bodies of higher-order operators, called submodules."""
    submodule_aliases: tuple[tuple[str, str], ...] = ()
    """Further names of a graph in ``submodules``: ``(name, name in submodules)``."""
    tensors: tuple[tuple[str, MetaTensorDesc], ...] = ()
    """Parameters, buffers and tensor constants by dotted name."""
    plain_tensors: tuple[str, ...] = ()
    """Those of ``tensors`` that are plain attributes, registered neither as parameter nor buffer."""
    transient_buffers: tuple[str, ...] = ()
    """Those of ``tensors`` that are buffers which no ``state_dict`` holds."""
    tensor_data: tuple[tuple[str, bytes], ...] = ()
    """Data of small constants, if asked for: elements in row-major order, little-endian."""
    values: tuple[tuple[str, Value], ...] = ()
    """Constants other than tensors that ``get_attr`` reads, by dotted name."""
    meta: tuple[tuple[str, Value], ...] = ()
    """The carried entries of ``GraphModule.meta``."""
    dropped_meta: tuple[tuple[str, str], ...] = ()
    """As in ``NodeDesc``, of the module."""
    shared: tuple[Value, ...] = ()
    """Values that stand in the metadata of many nodes, there as ``OpaqueValue(kind="shared")``."""

    @property
    def without_data(self) -> tuple[str, ...]:
        """Names of the real tensors whose elements the record does not have."""
        known = {name for name, _ in self.tensor_data}
        return tuple(n for n, t in self.tensors if not t.is_fake and n not in known)
