"""Attributes of a ``GraphModule``: parameters, buffers, constants, nested graphs."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import TYPE_CHECKING, Any

import torch

from torch_fakeify.compat import torch_fakes, torch_graphs
from torch_fakeify.encoding import names
from torch_fakeify.errors import FormatError, UnsupportedValueError, class_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_fakeify.records.graph import GraphModuleDesc
    from torch_fakeify.records.tensor import MetaTensorDesc, Value

MAX_DATA = 4096
"""Largest size in bytes of a tensor whose data may be recorded."""


@dataclasses.dataclass
class ModuleAttributes:
    """The attributes of a module that a record contains, by dotted name."""

    modules: dict[str, torch.nn.Module] = dataclasses.field(default_factory=dict)
    graphs: dict[str, torch.fx.GraphModule] = dataclasses.field(default_factory=dict)
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    plain_tensors: list[str] = dataclasses.field(default_factory=list)
    transient_buffers: list[str] = dataclasses.field(default_factory=list)
    values: dict[str, Any] = dataclasses.field(default_factory=dict)


# --- read -----------------------------------------------------------------------------------------


def collect(gm: torch.fx.GraphModule, where: str) -> ModuleAttributes:
    """Collect everything registered on a module, and every attribute that its graph reads.

    Raises:
        UnsupportedValueError: the graph calls a module that is not itself a graph.
    """
    found = ModuleAttributes()
    _collect_module(gm, "", found)
    for i, fx_node in enumerate(gm.graph.nodes):
        if fx_node.op not in ("get_attr", "call_module"):
            continue  # the target may be an object of the user's program
        here, target = f"{where}.nodes[{i}].target", str(fx_node.target)
        if fx_node.op == "get_attr":
            _collect_attribute(gm, target, found, here)
        elif not (target in found.graphs or target in found.aliases):
            raise UnsupportedValueError(
                "the graph calls a module that is not a graph",
                where=here,
                found=f"{target}, a {class_name(type(found.modules.get(target)))}",
                fix="Trace through it, by torch.compile, make_fx or the graph_module of torch.export.export.",
            )
    return found


def _collect_module(module: torch.nn.Module, prefix: str, found: ModuleAttributes) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            found.tensors[prefix + name] = parameter
    for name, buffer in module._buffers.items():
        if buffer is None:
            continue
        found.tensors[prefix + name] = buffer
        if name in module._non_persistent_buffers_set:
            found.transient_buffers.append(prefix + name)
    for name, child in module._modules.items():
        path = prefix + name
        if isinstance(child, torch.fx.GraphModule):
            same_graph = [n for n, graph in found.graphs.items() if graph is child]
            if same_graph:
                found.aliases[path] = same_graph[0]
            else:
                found.graphs[path] = child
        elif child is not None:
            found.modules[path] = child
            _collect_module(child, f"{path}.", found)


def _collect_attribute(
    gm: torch.fx.GraphModule, target: str, found: ModuleAttributes, where: str
) -> None:
    if any(target in names for names in (found.tensors, found.graphs, found.aliases, found.values)):
        return
    try:
        owner: Any = operator.attrgetter(target)(gm)
    except AttributeError as error:
        raise UnsupportedValueError(
            "the graph reads an attribute that its module does not have",
            where=where,
            found=repr(target),
        ) from error
    if isinstance(owner, torch.Tensor):
        found.tensors[target] = owner
        found.plain_tensors.append(target)
    elif isinstance(owner, torch.nn.Module):
        raise UnsupportedValueError(
            "the graph reads a module that is not a graph",
            where=where,
            found=f"{target}, a {class_name(type(owner))}",
        )
    else:
        found.values[target] = owner


def read_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """The elements of small, real, dense tensors, by name, in row-major order.

    Left out are tensors that share a storage with another one: they would come back as tensors of
    their own.
    """
    data = {name: elements for name, t in tensors.items() if (elements := _read(t)) is not None}
    owners: dict[int, set[int]] = {}
    for name in data:
        owners.setdefault(_storage_id(tensors[name]), set()).add(id(tensors[name]))
    return {n: data[n] for n in data if len(owners[_storage_id(tensors[n])]) == 1}


def _storage_id(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _read(tensor: torch.Tensor) -> bytes | None:
    """Read the elements of a small, real, dense tensor in row-major order; ``None`` for any other."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return None
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    if tensor.numel() * tensor.element_size() > MAX_DATA:
        return None
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


# --- write ----------------------------------------------------------------------------------------


@functools.cache
def reserved() -> frozenset[str]:
    """Attributes of every module, which no record may replace."""
    return frozenset(dir(torch_graphs.LazyGraphModule(torch.nn.Module(), torch.fx.Graph())))


def attach(
    gm: torch.fx.GraphModule,
    d: GraphModuleDesc,
    where: str,
    *,
    convert: Callable[[MetaTensorDesc], torch.Tensor],
    decode_graph: Callable[[GraphModuleDesc, str], torch.fx.GraphModule],
    decode_constant: Callable[[Value, str], Any],
) -> None:
    """Attach the attributes of a record to a new module.

    Raises:
        FormatError: a name is malformed, reserved or not unique; an alias has no graph.
    """
    seen: set[str] = set()

    def add(name: str, value: Any, where: str, table: str | None = None) -> torch.nn.Module:
        """Add an attribute to the module that it belongs to, and return that."""
        owner, last = _locate(gm, name, seen, where)
        (vars(owner) if table is None else getattr(owner, table))[last] = value
        return owner

    for i, (name, training) in enumerate(d.modules):
        module = torch.nn.Module()
        module.training = training
        add(name, module, f"{where}.modules[{i}]", "_modules")
    graphs: dict[str, torch.fx.GraphModule] = {}
    for i, (name, sub) in enumerate(d.submodules):
        here = f"{where}.submodules[{i}]"
        graphs[name] = decode_graph(sub, here)
        add(name, graphs[name], here, "_modules")
    for i, (name, other) in enumerate(d.submodule_aliases):
        here = f"{where}.submodule_aliases[{i}]"
        if other not in graphs:
            raise FormatError("no such submodule", where=here, found=repr(other))
        add(name, graphs[other], here, "_modules")
    data = dict(d.tensor_data)
    real: dict[int, torch.Tensor] = {}
    for i, (name, desc) in enumerate(d.tensors):
        here = f"{where}.tensors[{i}]"
        tensor = convert(desc)
        if name in data:
            if desc.id not in real:
                real[desc.id] = fill(tensor, desc, data[name], here)
            tensor = real[desc.id]
        if name in d.plain_tensors:
            add(name, tensor, here)
        elif desc.is_parameter:
            add(name, tensor, here, "_parameters")
        else:
            owner = add(name, tensor, here, "_buffers")
            if name in d.transient_buffers:
                owner._non_persistent_buffers_set.add(name.rpartition(".")[2])
    for _, desc in d.tensors:
        if desc.grad is not None and desc.id in real:
            # A gradient without data stays fake: it may be one of the frame's inputs.
            real[desc.id].grad = real[desc.grad.id] if desc.grad.id in real else convert(desc.grad)
    for i, (name, value) in enumerate(d.values):
        here = f"{where}.values[{i}]"
        add(name, decode_constant(value, here), here)


def _locate(
    gm: torch.fx.GraphModule, name: str, seen: set[str], where: str
) -> tuple[torch.nn.Module, str]:
    """The module that a new attribute belongs to, and the last part of its name."""
    names.check_path(name, where=where)
    if name in seen:
        raise FormatError("a name occurs twice", where=where, found=repr(name))
    seen.add(name)
    *path, last = name.split(".")
    owner: torch.nn.Module = gm
    for part in path:
        if part not in owner._modules:
            # The record has no module of this name: use an empty one.
            _check_free(owner, part, name, where)
            owner._modules[part] = torch.nn.Module()
        child = owner._modules[part]
        if child is None or isinstance(child, torch.fx.GraphModule):
            raise FormatError("a name leads into a graph", where=where, found=repr(name))
        owner = child
    _check_free(owner, last, name, where)
    return owner, last


def _check_free(owner: torch.nn.Module, part: str, name: str, where: str) -> None:
    taken = (vars(owner), owner._parameters, owner._buffers, owner._modules)
    if part in reserved() or any(part in found for found in taken):
        raise FormatError("a name is taken", where=where, found=repr(name))


def fill(tensor: torch.Tensor, desc: MetaTensorDesc, data: bytes, where: str) -> torch.Tensor:
    """Make a real tensor with recorded data; return the fake one if it is not strided on the CPU."""
    size = tuple(n for n in desc.size if isinstance(n, int))
    stride = tuple(n for n in desc.stride if isinstance(n, int))
    if tensor.device.type != "cpu" or (size, stride) != (desc.size, desc.stride):
        return tensor
    nbytes = math.prod(size) * tensor.element_size()
    if len(data) != nbytes or nbytes > MAX_DATA:
        raise FormatError(
            "data of the wrong length",
            where=where,
            expected=f"{nbytes} bytes",
            found=str(len(data)),
        )
    with torch_fakes.no_fake_mode():
        real = torch.empty_strided(size, stride, dtype=tensor.dtype)
        if nbytes:
            flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            real.copy_(flat.view(tensor.dtype).reshape(size))
        if desc.is_parameter:
            return torch.nn.Parameter(real, requires_grad=desc.requires_grad)
        return real.requires_grad_(desc.requires_grad) if desc.is_leaf else real
