"""A capture as text: the page, its records in full, and what they become in this process."""

from __future__ import annotations

import hashlib
import json
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from golden_coverage import fields
from tensor_facts import facts

from torch_fakeify.records.tensor import (
    ApplyNode,
    ExprDesc,
    ExprNode,
    IntNode,
    MetaStorageDesc,
    MetaTensorDesc,
    SourceDesc,
    StackDesc,
    SymbolNode,
)
from torch_fakeify.render.show import show_lines
from torch_fakeify.render.text import expr_text, place_text, stack_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch_fakeify import Capture, Instance

_KNOWN = (
    *("golden_subclass", "program_ops", "torch.distributed.tensor"),
    *("torch.distributed._functional_collectives", "torch.distributed._local_tensor"),
    *("torch._subclasses.complex_tensor", "torch.testing._internal.two_tensor"),
    *("torch.testing._internal.custom_tensor", "torch.testing._internal.subclasses"),
    *("torch.testing._internal.common_subclass", "torch.nested._internal.nested_tensor"),
)
"""Modules of classes and operators in the corpus: a reader finds those that are imported."""

for _name in _KNOWN:
    import_module(_name)

_OF_TORCH = ("keys", "grad_fn", "grad_dtype", "creation_meta", "is_inference")
"""Facts of a fake tensor that torch spells by release; the record has them in its own words."""


def page_text(capture: Capture) -> str:
    """What ``show`` prints."""
    return "\n".join(show_lines(capture.desc, torch_names=True)) + "\n"


def record_text(capture: Capture) -> str:
    """Every field of every record that is not at its default, each shared record once."""
    return "\n".join(_Dump().lines("capture", capture.desc, "")) + "\n"


def instance_text(instance: Instance, *, nodes: bool = True) -> str:
    """What an instance has: its inputs, its nodes, and what its ``ShapeEnv`` knows."""
    lines: list[str] = []
    for fx_node, value in zip(instance.gm.graph.nodes, instance.inputs, strict=False):
        lines.append(f"input {fx_node.name} = {_value(value)}")
    for name, module in instance.gm.named_modules():
        if isinstance(module, torch.fx.GraphModule):
            lines.append(f"graph {name or '(root)'}: {len(module.graph.nodes)} nodes")
            lines += map(_node, module.graph.nodes if nodes else ())
    env = instance.shape_env
    if env is not None:
        for symbol, bounds in sorted(env.var_to_range.items(), key=lambda row: str(row[0])):
            hint = env.backed_var_to_val.get(symbol)
            lines.append(f"symbol {symbol} = {hint} in [{bounds.lower}, {bounds.upper}]")
        lines += [f"replacement {a} = {b}" for a, b in env.replacements.items()]
        lines += [f"guard {guard.expr}" for guard in env.guards]
        for group in env.deferred_runtime_asserts.values():
            lines += [f"assert {entry.expr}" for entry in group]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return json.dumps(_plain(_facts(value)), ensure_ascii=False)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return f"{type(value).__name__} {value.node.expr}"
    return repr(value)


def _facts(t: torch.Tensor) -> dict[str, Any]:
    """The facts of a tensor; of one that a transform has wrapped, of the tensor inside."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor", UserWarning)
        return _facts_of(t)


def _facts_of(t: torch.Tensor) -> dict[str, Any]:
    functorch: Any = torch._C._functorch
    if functorch.is_functorch_wrapped_tensor(t):
        level, bdim = functorch.maybe_get_level(t), functorch.maybe_get_bdim(t)
        inside = _facts_of(functorch.get_unwrapped(t))
        return {"type": "wrapped", "level": level, "bdim": bdim, "unwrapped": inside}
    if torch._is_functional_tensor(t):
        return {"type": "functional", "unwrapped": _facts_of(torch._from_functional_tensor(t))}
    return facts(t)


def _plain(known: Any) -> Any:
    """Facts without those that are torch's own words, in an order of their own."""
    if isinstance(known, dict):
        return {k: _plain(v) for k, v in sorted(known.items()) if k not in _OF_TORCH}
    if isinstance(known, (list, tuple)):
        return [_plain(item) for item in known]
    return known if isinstance(known, (bool, int, type(None))) else str(known)


def _node(fx_node: torch.fx.Node) -> str:
    target = fx_node.target
    name = target if isinstance(target, str) else torch.typename(target)
    if isinstance(target, torch._ops.OpOverload):
        name = str(target)
    value = fx_node.meta.get("example_value", fx_node.meta.get("val"))
    shape = f" {value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
    args = ", ".join(str(arg) for arg in fx_node.all_input_nodes)
    return f"  {fx_node.op} {fx_node.name} = {name}({args}){shape}"


class _Dump:
    """Writes records as an outline."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, Any]] = {}

    def lines(self, name: str, value: Any, indent: str) -> Iterator[str]:
        """The lines of a value that stands under a name."""
        if isinstance(value, ExprDesc):
            yield f"{indent}{name}: {expr_text(value)}  <- {'; '.join(map(_expr_node, value.nodes))}"
        elif isinstance(value, StackDesc):
            yield f"{indent}{name}: {_stack(value)}"
        elif type(value) is tuple and value and not _is_flat(value):
            parts = [
                line
                for i, item in enumerate(value)
                for line in self.lines(f"[{i}]", item, f"{indent}  ")
            ]
            yield from _short(f"{indent}{name}:", parts, indent)
        elif hasattr(type(value), "__struct_fields__") or hasattr(value, "_fields"):
            yield from self._record(name, value, indent)
        else:
            yield f"{indent}{name}: {value!r}"

    def _record(self, name: str, value: Any, indent: str) -> Iterator[str]:
        label = type(value).__name__
        if isinstance(value, (MetaTensorDesc, MetaStorageDesc, SourceDesc)):
            if id(value) in self.seen:
                yield f"{indent}{name}: the {label} #{self.seen[id(value)][0]}"
                return
            self.seen[id(value)] = len(self.seen), value
            label += f" #{self.seen[id(value)][0]}"
        parts: list[str] = []
        for field, _, default in fields(type(value)):
            item = getattr(value, field)
            if item is not default and not (type(item) is type(default) and item == default):
                parts += self.lines(field, item, f"{indent}  ")
        yield from _short(f"{indent}{name}: {label}", parts, indent)


def _short(head: str, parts: list[str], indent: str) -> list[str]:
    """A head and its parts; on one line where they are short and have no parts of their own."""
    words = [part.removeprefix(f"{indent}  ") for part in parts]
    nested = any(word.startswith(" ") for word in words)
    if nested or len(head) + sum(map(len, words)) > _WIDTH:
        return [head, *parts]
    return [f"{head}({', '.join(words)})"]


_WIDTH = 140
"""Characters up to which a record stands on one line."""


def _is_flat(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_flat, value))
    return isinstance(value, (str, int, float, bytes, type(None)))


def _stack(stack: StackDesc) -> str:
    """The innermost frame, and a digest of all of them."""
    text = "\n".join(stack_lines(stack))
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    last = f", last {place_text(stack.frames[-1])!r}" if stack.frames else ""
    return f"{len(stack.frames)} frames {digest}{last}"


def _expr_node(entry: ExprNode) -> str:
    match entry:
        case SymbolNode(name=name, assumptions=assumptions):
            return f"{name}{{{' '.join(k if v else f'not {k}' for k, v in assumptions)}}}"
        case IntNode(value=value):
            return str(value)
        case ApplyNode(function=function, args=args):
            return f"{function}({', '.join(f'#{arg}' for arg in args)})"
        case _:
            words = [str(getattr(entry, field)) for field in entry.__struct_fields__]
            return f"{type(entry).__name__.removesuffix('Node').lower()}({', '.join(words)})"
