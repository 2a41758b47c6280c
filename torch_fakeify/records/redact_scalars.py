"""Redact the values of 0-dim tensors that a frame does not need.

Torch tracks ``item()`` of every 0-dim ``int64`` and ``float64`` tensor on the CPU as a symbol, even
without a call, and the symbol's hint is the tensor's element. Where no guard, size or value of a graph
has the symbol, the element is replaced by another number with the same sign that is also 0, 1, less
than 1 or more: the decomposition of an operator may depend on that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from .shape_env import OrderDesc, ShapeEnvDesc, SymbolDesc
from .tensor import (
    AtomNode,
    ExprDesc,
    FloatNode,
    IntNode,
    MetaTensorDesc,
    SymbolFactDesc,
    SymbolNode,
    SymDesc,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .frame import CaptureDesc

ITEM = "CallMethodItemSource"
"""Class name of the source of a symbol that is the element of a tensor."""
_NAMES = frozenset({"source_to_var", "source_to_symbol", "symbols"})
"""Fields of a ``ShapeEnvDesc`` that also list unused symbols."""


def redact_scalars(desc: CaptureDesc) -> CaptureDesc:
    """Return the frame with the unneeded elements of 0-dim tensors replaced.

    Unchanged parts are shared; a frame without such tensors is returned itself.
    """
    hinted = any(entry.tensor is not None and _has_hint(entry.tensor) for entry in desc.inputs)
    tracked = {symbol.name: symbol for symbol in desc.symbols if _is_item(symbol)}
    if not hinted and not tracked:
        return desc
    if tracked:
        used = _Used(frozenset(tracked))
        used.visit(desc)
        tracked = {name: s for name, s in tracked.items() if name not in used.names and _is_free(s)}
    sources = {source.name: symbol.name for symbol in desc.symbols for source in symbol.sources}
    return _Redactor(frozenset(tracked), sources).visit(desc)


def redacted_value(value: float) -> int | float:
    """Return a number of the same sign and type: 0, 1, 0.5 or 2."""
    if value in (0, 1, -1):
        return value
    size = 2 if abs(value) > 1 else 0.5
    return type(value)(-size if value < 0 else size)


def _has_hint(tensor: MetaTensorDesc) -> bool:
    return any(part.scalar_hint is not None for part in (tensor, tensor.base) if part is not None)


def _is_item(symbol: SymbolDesc) -> bool:
    return symbol.hint is not None and any(source.cls == ITEM for source in symbol.sources)


def _is_free(symbol: SymbolDesc) -> bool:
    """Return whether a symbol may have any hint: it is unbounded, and the hint is a number."""
    ends = (symbol.lower, symbol.upper)
    is_number = symbol.hint is not None and isinstance(symbol.hint.nodes[-1], (IntNode, FloatNode))
    return is_number and all(end is None or isinstance(end.nodes[-1], AtomNode) for end in ends)


class _Used:
    """Finds the symbols in the expressions of a record, outside of lists of all symbols."""

    def __init__(self, names: frozenset[str]) -> None:
        self._tracked = names
        self.names: set[str] = set()
        self._done: dict[int, Any] = {}

    def visit(self, value: Any) -> None:
        if not isinstance(value, (tuple, msgspec.Struct)) or id(value) in self._done:
            return
        self._done[id(value)] = value
        if isinstance(value, tuple):
            for item in value:  # pyright: ignore[reportUnknownVariableType]
                self.visit(item)
        elif isinstance(value, ExprDesc):
            self.names.update(
                n.name for n in value.nodes if isinstance(n, SymbolNode) and n.name in self._tracked
            )
        else:
            for part in _parts(value):
                self.visit(part)


def _parts(value: msgspec.Struct) -> Iterator[Any]:
    """Yield the fields of a record whose expressions the frame needs."""
    if isinstance(value, OrderDesc):
        return
    for name in value.__struct_fields__:
        part = getattr(value, name)
        if isinstance(value, MetaTensorDesc) and name == "item_memo" and _symbol_of(part):
            continue
        if isinstance(value, ShapeEnvDesc) and name in _NAMES:
            if name == "symbols":
                yield from ((s.lower, s.upper, s.real_value) for s in value.symbols)
            continue
        yield part


def _symbol_of(sym: SymDesc | None) -> str | None:
    """Return the name of a scalar that is a symbol, else ``None``."""
    root = None if sym is None else sym.expr.nodes[-1]
    return root.name if isinstance(root, SymbolNode) else None


class _Redactor:
    """Replaces the hints of some symbols in a record."""

    def __init__(self, names: frozenset[str], sources: dict[str, str]) -> None:
        self._names = names
        self._sources = sources
        self._done: dict[int, tuple[Any, Any]] = {}

    def visit(self, value: Any) -> Any:
        if not isinstance(value, (tuple, msgspec.Struct)) or isinstance(value, ExprDesc):
            return value
        done = self._done.get(id(value))
        if done is not None:
            return done[1]
        if type(value) is tuple:
            items = [self.visit(item) for item in value]
            changed = any(a is not b for a, b in zip(items, value, strict=True))
            result: Any = tuple(items) if changed else value
        elif isinstance(value, msgspec.Struct):
            result = self._struct(value)
        else:
            return value  # a named tuple of numbers
        self._done[id(value)] = (value, result)
        return result

    def _struct(self, value: msgspec.Struct) -> Any:
        changed: dict[str, Any] = {}
        for name in value.__struct_fields__:
            part = getattr(value, name)
            new = self.visit(part)
            if new is not part:
                changed[name] = new
        changed.update(self._hints(value))
        return msgspec.structs.replace(value, **changed) if changed else value

    def _hints(self, value: msgspec.Struct) -> dict[str, Any]:
        if isinstance(value, MetaTensorDesc):
            return self._tensor_changes(value)
        if isinstance(value, SymDesc) and _symbol_of(value) in self._names:
            return {"hint": _redacted_hint(value.hint)}
        if isinstance(value, SymbolFactDesc) and value.name in self._names:
            return {"hint": _redacted_hint(value.hint)}
        if isinstance(value, SymbolDesc) and value.name in self._names and value.hint is not None:
            return {"hint": _redacted_expr(value.hint)}
        return {}

    def _tensor_changes(self, value: MetaTensorDesc) -> dict[str, Any]:
        source = value.source
        if value.scalar_hint is None or source is None or source.cls == "FloatTensorSource":
            return {}  # FloatTensorSource: a Python float as a tensor
        name = self._sources.get(f"{source.name}.item()")
        if name is not None and name not in self._names:
            return {}
        return {"scalar_hint": redacted_value(value.scalar_hint)}


def _redacted_hint(hint: Any) -> Any:
    return (
        redacted_value(hint)
        if isinstance(hint, (int, float)) and not isinstance(hint, bool)
        else hint
    )


def _redacted_expr(expr: ExprDesc) -> ExprDesc:
    root = expr.nodes[-1]
    if isinstance(root, IntNode):
        return ExprDesc(nodes=(IntNode(int(redacted_value(root.value))),))
    assert isinstance(root, FloatNode)
    # Only magnitude and sign decide the replacement.
    value = root.mantissa * 2.0 ** max(min(root.exponent, 900), -900)
    mantissa, exponent = _binary(float(redacted_value(value)))
    return ExprDesc(nodes=(FloatNode(mantissa, exponent, root.precision),))


def _binary(value: float) -> tuple[int, int]:
    """Return the mantissa (odd or 0) and exponent of 0 or a power of two, as in sympy."""
    sign = -1 if value < 0 else 1
    return {0.0: (0, 0), 0.5: (sign, -1), 1.0: (sign, 0), 2.0: (sign, 1)}[abs(value)]
