"""Readable names of sources, symbols and inputs, as in the user's program.

Torch's names are ``L['self']._modules['fc']._parameters['weight']`` for the weight of a layer, with the
placeholder ``l_self_modules_fc_parameters_weight_``, and ``s18`` or ``L['x'].size()[0]`` for a size; the
readable ones are ``self.fc.weight`` and ``x.size(0)``.
"""

from __future__ import annotations

import hashlib
import keyword
import re
from typing import TYPE_CHECKING, Any

import msgspec

from torch_fakeify.records.fingerprint import COMMUTATIVE
from torch_fakeify.records.frame import FailureDesc, InputDesc
from torch_fakeify.records.graph import GraphModuleDesc
from torch_fakeify.records.rewrite import Rewriter
from torch_fakeify.records.shape_env import SymbolDesc
from torch_fakeify.records.symbol_names import with_symbols
from torch_fakeify.records.tensor import ApplyNode, ExprDesc, SymbolNode, SymDesc
from torch_fakeify.serialization.format import postorder

from .text import clip, expr_text, int_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch_fakeify.records.frame import CaptureDesc
    from torch_fakeify.records.graph import NodeDesc
    from torch_fakeify.records.tensor import ExprNode, IntLike

_LONGEST = 120
"""Most characters of a readable name that is shown."""
_COPY = re.compile(r"(.*?)(?:_\d+)?", re.DOTALL)
_TORCH_NAME = re.compile(r"\b(?:[a-zA-Z]+\d+|[A-Za-z]\w*_\w*)\b")
"""What may be torch's name of a symbol or placeholder in a message: no plain word."""

_ITEM = re.compile(r"\.(\d+)(?=[.\[]|$)")

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


def readable_name(entry: InputDesc | NodeDesc) -> str:
    """Return the name of an input or placeholder as in the user's program, else its own."""
    return entry.name if entry.source is None else readable_source(entry.source.name)


def renamed_symbols(expr: ExprDesc, name_of: Callable[[str], str]) -> ExprDesc:
    """Return an expression with other names of its symbols."""
    return with_symbols(expr, lambda symbol: SymbolNode(name_of(symbol.name), symbol.assumptions))


def readable_module(path: str) -> str:
    """Return the path of a module as in the user's program: ``self.blocks[0]`` for ``self.blocks.0``."""
    return _ITEM.sub(r"[\1]", readable_source(path))


class ReadableNames:
    """Readable names of the symbols of a frame.

    A symbol is named by its first source.

    Args:
        desc: the frame.
        longest: most characters of a name, for names that are shown and not compared.
        by_order: name a symbol without a source by its number among those, so that the names of two
            frames can be compared; else it has torch's name.
    """

    def __init__(
        self, desc: CaptureDesc, longest: int | None = None, *, by_order: bool = False
    ) -> None:
        self._names: dict[str, str] = {}
        unbacked = 0
        for symbol in desc.symbols:
            if symbol.sources:
                name = symbol.sources[0].name
                words = readable_source(name if longest is None else clip(name, 4 * longest))
            elif not by_order:
                words = symbol.name
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
        nodes = renamed_symbols(expr, self.symbol).nodes
        texts: list[str] = []
        sorted_args: list[tuple[int, ...]] = []
        for node in nodes:
            args = node.args if isinstance(node, ApplyNode) else ()
            if isinstance(node, ApplyNode) and node.function in COMMUTATIVE:
                args = tuple(sorted(args, key=texts.__getitem__))
            sorted_args.append(args)
            texts.append(_sort_key(node, [texts[at] for at in args]))
        order = postorder(len(nodes) - 1, sorted_args) if nodes else []
        place = {at: i for i, at in enumerate(order)}
        written = [
            ApplyNode(node.function, tuple([place[arg] for arg in sorted_args[at]]))
            if isinstance(node := nodes[at], ApplyNode)
            else node
            for at in order
        ]
        return ExprDesc(nodes=tuple(written))


def _sort_key(node: ExprNode, args: list[str]) -> str:
    """Return a key that differs for different nodes, of bounded length."""
    if not isinstance(node, ApplyNode):
        return repr(node)
    text = f"{node.function}({','.join(args)})"
    return text if len(text) <= 200 else hashlib.sha256(text.encode()).hexdigest()


class InputNames:
    """Readable names of the placeholders of a frame, but those that are reserved.

    As ``identifiers`` they are valid in Python: ``self_fc_weight`` for ``self.fc.weight``.
    """

    def __init__(
        self, desc: CaptureDesc, *, identifiers: bool = False, reserved: Iterable[str] = ()
    ) -> None:
        unnamed = (entry.name for entry in desc.inputs if entry.source is None)
        used = dict.fromkeys([*reserved, *unnamed], 0)
        self.by_torch_name: dict[str, str] = {}
        """The readable names by placeholder, of those that have a source."""
        for entry in desc.inputs:
            if entry.source is not None:
                words = readable_source(clip(entry.source.name, 4 * _LONGEST))
                words = identifier(words) if identifiers else clip(words, _LONGEST)
                self.by_torch_name[entry.name] = _fresh(words, used)

    def of(self, graph: GraphModuleDesc) -> list[str]:
        """Return the readable names of the nodes of a graph, in order.

        A placeholder of a nested graph is named as the input of the frame of which it is a copy. Another
        node with the name of an input gets a number.
        """
        used: dict[str, int] = {}
        inputs = {
            at: _fresh(self._placeholder(fx_node.name), used)
            for at, fx_node in enumerate(graph.nodes)
            if fx_node.op == "placeholder"
        }
        return [
            inputs[at] if at in inputs else _fresh(fx_node.name, used)
            for at, fx_node in enumerate(graph.nodes)
        ]

    def _placeholder(self, name: str) -> str:
        copied = _COPY.fullmatch(name)
        return self.by_torch_name.get(name) or self.by_torch_name.get(
            copied[1] if copied else name, name
        )


def identifier(words: str) -> str:
    """Return a valid identifier of Python that resembles a name."""
    name = re.sub(r"\W+", "_", words, flags=re.ASCII).strip("_")[:_LONGEST]
    return f"_{name}" if not name or name[0].isdigit() or keyword.iskeyword(name) else name


def _fresh(name: str, used: dict[str, int]) -> str:
    found = name
    while found in used:
        used[name] += 1
        found = f"{name}_{used[name]}"
    used[found] = 0
    return found


def readable_text(text: str, desc: CaptureDesc) -> str:
    """Return a message about a frame with readable names in place of torch's."""
    return _readable_text(text, ReadableNames(desc, _LONGEST), InputNames(desc))


def _readable_text(text: str, symbols: ReadableNames, inputs: InputNames) -> str:
    return _TORCH_NAME.sub(
        lambda found: inputs.by_torch_name.get(found[0]) or symbols.symbol(found[0]), text
    )


def readable_frame(desc: CaptureDesc) -> CaptureDesc:
    """Return a frame for printing, with readable names of symbols, inputs and sources.

    It has no meaning beyond its text: its symbols and nodes have names that torch refuses. The source of
    an input is left out, as it is its name.
    """
    words = ReadableNames(desc, _LONGEST)
    inputs = InputNames(desc)

    def changed(part: Any) -> Any:
        match part:
            case ExprDesc():
                return renamed_symbols(part, words.symbol)
            case SymbolDesc():
                sources = tuple(
                    msgspec.structs.replace(s, name=readable_source(clip(s.name, 4 * _LONGEST)))
                    for s in part.sources
                )
                return msgspec.structs.replace(part, name=words.symbol(part.name), sources=sources)
            case GraphModuleDesc():
                names = inputs.of(part)
                nodes = [
                    node if node.name == name else msgspec.structs.replace(node, name=name)
                    for node, name in zip(part.nodes, names, strict=True)
                ]
                return msgspec.structs.replace(part, nodes=tuple(nodes))
            case InputDesc() if part.source is not None:
                name = inputs.by_torch_name[part.name]
                return msgspec.structs.replace(part, name=name, source=None)
            case FailureDesc():
                message = _readable_text(part.message, words, inputs)
                return msgspec.structs.replace(part, message=message)
            case _:
                return part

    return Rewriter(changed)(desc)
