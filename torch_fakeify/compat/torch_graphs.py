"""Torch's private graphs: operators and functions by name, code generators, pytrees, metadata of nodes."""

# pyright: reportUnusedImport=false
# Other rooms import these names from here; a test finds the ones that none does.
from __future__ import annotations

import functools
import re
import sys
from contextlib import nullcontext
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from . import gate

gate.check_installed_torch()  # before anything private is asked for

from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket, _OpNamespace
from torch._ops import _higher_order_ops as _hop_table
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx.experimental import symbolic_shapes as _symbolic_shapes
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen
from torch.fx.graph import _PyTreeCodeGen as PyTreeCodeGen
from torch.fx.graph import _PyTreeInfo as PyTreeInfo
from torch.fx.traceback import preserve_node_meta
from torch.utils import _pytree as pytree
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_with_path,
    tree_structure,
    tree_unflatten,
)
from torch.utils._pytree import treespec_leaf as leaf_spec

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


def find_operator(namespace: str, op: str) -> OpOverloadPacket[Any, Any] | None:
    """Return the registered operator, or ``None``, without adding a namespace to ``torch.ops``."""
    if not torch._C._jit_get_schemas_for_operator(f"{namespace}::{op}"):
        return None
    found = getattr(torch.ops, namespace, None)
    packet = getattr(found, op, None) if isinstance(found, _OpNamespace) else None
    return packet if isinstance(packet, OpOverloadPacket) else None


TORCHS_NAMESPACES = frozenset(
    ["aten", "prims", "prim", "c10d", "_c10d_functional", "mkldnn", "quantized"]
)
"""Namespaces of torch: a missing operator in them belongs to another version."""


def operators_of(gm: torch.fx.GraphModule) -> list[tuple[str, OpOverloadPacket[Any, Any]]]:
    """Return the operators that a graph and its bodies call or pass on, with their names, each once."""
    graphs = [module.graph for module in gm.modules() if isinstance(module, torch.fx.GraphModule)]
    named: set[Any] = {fx_node.target for graph in graphs for fx_node in graph.nodes}
    for graph in graphs:
        for fx_node in graph.nodes:
            if isinstance(fx_node.target, HigherOrderOperator):
                named.update(arg for arg in fx_node.args if isinstance(arg, OpOverload))
    packets = [each.overloadpacket if isinstance(each, OpOverload) else each for each in named]
    found: dict[str, OpOverloadPacket[Any, Any]] = {
        packet._qualified_op_name.replace("::", ".", 1): packet
        for packet in packets
        if isinstance(packet, OpOverloadPacket)
    }
    return sorted(found.items())


def operator_modules(gm: torch.fx.GraphModule) -> tuple[tuple[str, str], ...]:
    """Return the operators outside of torch that a graph and its bodies call, with their modules."""
    names = [name for name, _ in operators_of(gm)]
    own = [name for name in names if name.partition(".")[0] not in TORCHS_NAMESPACES]
    found = ((name, module_of_operator(name)) for name in own)
    return tuple((name, module) for name, module in found if module is not None)


def module_of_operator(op: str) -> str | None:
    """Return the module that registered an operator, as far as torch records it.

    Torch knows the function of ``torch.library.custom_op``, and the file of a ``torch.library.Library``; a
    library in C++ is that of the imported package with the operator's namespace.

    Args:
        op: the operator, ``namespace.name``; ``None`` is returned for one that is not registered.
    """
    from torch._library.custom_ops import OPDEFS

    namespace, _, name = op.partition(".")
    made = OPDEFS.get(f"{namespace}::{name}")
    if made is not None:
        return str(made._init_fn.__module__)
    packet = find_operator(namespace, name)
    if packet is None:
        return None
    overload = packet.overloads()[0]
    dot = "" if overload == "default" else f".{overload}"
    text = torch._C._dispatch_dump(f"{namespace}::{name}{dot}")
    registered = re.search(r"^debug: registered at (.+):\d+$", text, re.MULTILINE)
    if registered is not None:
        for module_name, module in list(sys.modules.items()):
            if getattr(module, "__file__", None) == registered[1]:
                return None if module_name.partition(".")[0] == "torch" else module_name
    return namespace if namespace in sys.modules else None


def higher_order_operators() -> dict[str, HigherOrderOperator]:
    """Return the registered higher-order operators by name."""
    import_module("torch._higher_order_ops")  # registers torch's own, but for the next one
    import_module("torch._higher_order_ops.register_hook")
    return _hop_table


def variable_functions() -> Any:
    """Return ``torch._C._VariableFunctions``, the class of torch's C++ functions."""
    c: Any = torch._C
    return c._VariableFunctions


_FUNCTION_MODULES = """
    builtins math operator torch torch.nn.functional torch.nn.init torch.functional torch.linalg
    torch.fft torch.special torch.sparse torch.nested torch.signal.windows.windows torch.masked._ops
    torch.nested._internal.nested_tensor torch.nn.grad torch.nn.modules.activation torch._utils
    torch.xpu torch.cpu torch.random torch.cuda torch.cuda.random torch.accelerator torch.autograd
    torch.autograd.forward_ad torch.autograd.grad_mode torch.autograd.graph torch.amp.autocast_mode
    torch._lowrank torch._linalg_utils torch._lobpcg torch._refs torch._prims
    torch._functorch.eager_transforms torch._functorch.predispatch torch._functorch.vmap
"""


@functools.cache
def function_modules() -> dict[str, ModuleType]:
    """Return the modules whose functions graphs call and that are fast to import, by name."""
    import torch.nested._internal.nested_tensor  # the others are there by now

    c: Any = torch._C
    modules = [
        *(sys.modules[name] for name in _FUNCTION_MODULES.split()),
        _symbolic_shapes, *filter(None, [getattr(torch, "foreach", None)]),  # as of torch 2.15
        c, c._nn, c._linalg, c._fft, c._special, c._sparse, c._nested, c._functorch, c._autograd,
    ]  # fmt: skip
    return {module.__name__: module for module in modules}


@functools.cache
def late_function_modules(*, dtensor: bool = False) -> dict[str, Any]:
    """Return further such modules that are slow to import: of Dynamo, its NumPy, and DTensor."""
    import torch._numpy.fft
    from torch._dynamo import external_utils, utils
    from torch._dynamo.variables import builtin

    numpy = torch._numpy
    modules: Any = [utils, external_utils, builtin, numpy, numpy.fft, numpy.linalg, numpy.random]
    if torch.distributed.is_available():
        modules.append(import_module("torch.distributed._functional_collectives"))
    found = {module.__name__: module for module in modules}
    if dtensor and torch.distributed.is_available():
        cls = import_module("torch.distributed.tensor").DTensor
        found["torch.distributed.tensor.DTensor"] = methods = ModuleType("DTensor")
        vars(methods)["from_local"] = cls.from_local
    return found


def tree_type(cls: type) -> type:
    """Return the ``TreeSpec.type`` of a named tuple."""
    fields = [0] * field_count(cls)
    example: Any = tuple.__new__(cls, fields) if hasattr(cls, "_fields") else cls(fields)
    return tree_structure(example).type


def field_count(cls: Any) -> int:
    """Return the number of fields of a named tuple class or one of ``torch.return_types``."""
    return cls.n_sequence_fields if hasattr(cls, "n_sequence_fields") else len(cls._fields)


_KEYS = "Sequence Mapping GetAttr ConvertInt CallMethod InnerTensor DivideBy"

PATH_KEYS = tuple(f"{name}Key" for name in _KEYS.split())
"""The classes of the entries of paths to unbacked symbols."""


@functools.cache
def meta_dataclasses() -> dict[str, type[Any]]:
    """Return the dataclasses of node metadata by name: path entries and AOTAutograd's descriptors."""
    from torch._functorch._aot_autograd import descriptors
    from torch.fx.experimental import symbolic_shapes

    # The class of ``meta["tensor_meta"]``: readers find imported classes only.
    import_module("torch.fx.passes.shape_prop")
    found: dict[str, type[Any]] = {
        cls.__name__: cls
        for cls in vars(descriptors).values()
        if isinstance(cls, type)
        and issubclass(cls, (descriptors.AOTInput, descriptors.AOTOutput))
        and cls.__module__ == descriptors.__name__
    }
    for name in PATH_KEYS:
        home = pytree if hasattr(pytree, name) else symbolic_shapes
        found[name] = getattr(home, name)
    return found


def around_body(operator: Any) -> AbstractContextManager[Any]:
    """Return the context in which torch runs the bodies of a higher-order operator."""
    if not getattr(operator, "__name__", "").startswith("flex_attention"):
        return nullcontext()
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()
