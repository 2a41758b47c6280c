"""Readable names of sources and symbols, as in the user's program.

Torch's names are ``L['self']._modules['fc']._parameters['weight']`` for the weight of a layer, ``s18``
or ``L['x'].size()[0]`` for a size; the readable ones are ``self.fc.weight`` and ``x.size(0)``.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

from torch_fakeify.records.fingerprint import COMMUTATIVE
from torch_fakeify.records.tensor import ApplyNode, ExprDesc, SymbolNode, SymDesc

from .text import clip, expr_text, int_text

if TYPE_CHECKING:
    from torch_fakeify.records.frame import CaptureDesc
    from torch_fakeify.records.tensor import IntLike

__all__ = ["ReadableNames", "readable_source"]

_REWRITES = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"^[LG]\['(\w+)'\]", r"\1"),
        (r"\._modules\['(\d+)'\]", r"[\1]"),
        (r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1"),
        (r"\.(size|stride)\(\)\[(\d+)\]", r".\1(\2)"),
    )
)


def readable_source(name: str) -> str:
    """Return a source's name as in the user's program, where it is a path of attributes and items."""
    for pattern, words in _REWRITES:
        name = pattern.sub(words, name)
    return name


class ReadableNames:
    """Readable names of the symbols of a frame.

    A symbol is named by its first source; one without a source, which is unbacked, by its number
    among those.

    Args:
        desc: the frame.
        longest: most characters of a name, for names that are shown and not compared.
    """

    def __init__(self, desc: CaptureDesc, longest: int | None = None) -> None:
        self._names: dict[str, str] = {}
        unbacked = 0
        for symbol in desc.shape_env.symbols if desc.shape_env is not None else ():
            if symbol.sources:
                name = symbol.sources[0].name
                words = readable_source(name if longest is None else clip(name, 4 * longest))
            else:
                words = f"{symbol.name.rstrip('0123456789')}{unbacked}"
                unbacked += 1
            self._names[symbol.name] = words if longest is None else clip(words, longest)

    def symbol(self, name: str) -> str:
        """Return the name of a symbol."""
        return self._names.get(name, name)

    def expr(self, expr: ExprDesc) -> str:
        """Return an expression as text that does not depend on torch's names of symbols."""
        return expr_text(self._renamed(expr))

    def number(self, n: IntLike) -> str:
        """Return a size or stride as text."""
        if isinstance(n, SymDesc):
            return self.expr(n.expr)
        return int_text(n) if isinstance(n, int) else f"a nested int of {n.id}"

    def _renamed(self, expr: ExprDesc) -> ExprDesc:
        nodes = [
            SymbolNode(self.symbol(node.name), node.assumptions)
            if isinstance(node, SymbolNode)
            else node
            for node in expr.nodes
        ]
        if not nodes:
            return expr
        order: list[int] = []  # of the rewritten nodes
        place: dict[int, int] = {}
        texts: list[str] = []
        for node in nodes:
            texts.append(_sort_key(node, texts))
        stack = [len(nodes) - 1]
        while stack:
            at = stack[-1]
            node = nodes[at]
            args = _sorted_args(node, texts) if isinstance(node, ApplyNode) else ()
            pending = [arg for arg in args if arg not in place]
            if pending and at not in place:
                stack.extend(reversed(pending))
                continue
            stack.pop()
            if at not in place:
                place[at] = len(order)
                order.append(at)
        written = [nodes[at] for at in order]
        for i, at in enumerate(order):
            node = nodes[at]
            if isinstance(node, ApplyNode):
                args = tuple([place[arg] for arg in _sorted_args(node, texts)])
                written[i] = ApplyNode(node.function, args)
        return ExprDesc(nodes=tuple(written))


def _sort_key(node: object, texts: list[str]) -> str:
    """Return a key that differs for different nodes, of bounded length."""
    if isinstance(node, ApplyNode):
        args = [texts[at] for at in node.args]
        if node.function in COMMUTATIVE:
            args.sort()
        text = f"{node.function}({','.join(args)})"
        return text if len(text) <= 200 else hashlib.sha256(text.encode()).hexdigest()
    return repr(node)


def _sorted_args(node: ApplyNode, texts: list[str]) -> tuple[int, ...]:
    if node.function in COMMUTATIVE:
        return tuple(sorted(node.args, key=lambda at: texts[at]))
    return node.args
