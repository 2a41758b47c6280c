"""Redact the values of 0-dim tensors that a frame does not need.

Torch tracks ``item()`` of every 0-dim ``int64`` and ``float64`` tensor on the CPU as a symbol, even
without a call, and the symbol's hint is the tensor's element. Where no guard, size or value of a graph
has the symbol, the element is replaced by another number with the same sign that is also 0, 1, less
than 1 or more: the decomposition of an operator may depend on that.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from .rewrite import Rewriter
from .shape_env import SymbolDesc
from .symbol_names import lone_symbol, names_in
from .tensor import (
    AtomNode,
    ExprDesc,
    FloatNode,
    IntNode,
    MetaTensorDesc,
    SymbolFactDesc,
    SymDesc,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from .frame import CaptureDesc

ITEM = "CallMethodItemSource"
"""Class name of the source of a symbol that is the element of a tensor."""


def redact_scalars(desc: CaptureDesc) -> CaptureDesc:
    """Return the frame with the unneeded elements of 0-dim tensors replaced.

    Unchanged parts are shared; a frame without such tensors is returned itself.
    """
    hinted = any(entry.tensor is not None and _has_hint(entry.tensor) for entry in desc.inputs)
    tracked = {symbol.name: symbol for symbol in desc.symbols if _is_item(symbol)}
    if not hinted and not tracked:
        return desc
    if tracked:
        used = _used_symbols(desc)
        tracked = {name: s for name, s in tracked.items() if name not in used and _is_free(s)}
    sources = {source.name: symbol.name for symbol in desc.symbols for source in symbol.sources}
    return Rewriter(partial(_redacted, names=tracked.keys(), sources=sources))(desc)


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


def _used_symbols(desc: CaptureDesc) -> set[str]:
    """Return the names of the symbols that the frame needs, which lists of all symbols do not show."""
    env = desc.shape_env
    assert env is not None
    without_items = Rewriter(
        lambda part: (
            msgspec.structs.replace(part, item_memo=None)
            if isinstance(part, MetaTensorDesc) and lone_symbol(part.item_memo)
            else part
        )
    )
    lists = dict.fromkeys(("orders", "source_to_var", "source_to_symbol", "symbols"), ())
    facts = msgspec.structs.replace(env, **lists)
    needed = without_items(msgspec.structs.replace(desc, shape_env=facts))
    return names_in((needed, tuple([(s.lower, s.upper, s.real_value) for s in env.symbols])))


def _redacted(value: Any, *, names: Collection[str], sources: Mapping[str, str]) -> Any:
    """Return a part of a record with its hint replaced if it is that of a symbol of ``names``."""
    match value:
        case MetaTensorDesc():
            source = value.source
            if value.scalar_hint is None or source is None or source.cls == "FloatTensorSource":
                return value  # FloatTensorSource: a Python float as a tensor
            name = sources.get(f"{source.name}.item()")
            if name is not None and name not in names:
                return value
            return msgspec.structs.replace(value, scalar_hint=redacted_value(value.scalar_hint))
        case SymDesc() if lone_symbol(value) in names:
            return msgspec.structs.replace(value, hint=_redacted_hint(value.hint))
        case SymbolFactDesc() if value.name in names:
            return msgspec.structs.replace(value, hint=_redacted_hint(value.hint))
        case SymbolDesc() if value.name in names and value.hint is not None:
            return msgspec.structs.replace(value, hint=_redacted_expr(value.hint))
        case _:
            return value


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
