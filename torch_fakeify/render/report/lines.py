"""The user's lines of a report: its stacks, and the nodes of a line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_fakeify.render.code import node_stack
from torch_fakeify.render.nested_graphs import NodeAt
from torch_fakeify.render.text import clip, code_line, place_text

from .html import Html, tag

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch_fakeify.records.graph import GraphModuleDesc
    from torch_fakeify.records.tensor import FrameDesc, StackDesc

LONGEST = 400
"""Most characters of a line, name or path."""
_FRAMES = 400
"""Most entries of a stack, the innermost."""
_MATCHES = 20
"""Most lines to which a node is assigned."""


def node_id(node: NodeAt) -> str:
    """Return the id of a node's row on the page."""
    return f"n{node.graph}-{node.position}"


class Stacks:
    """Stacks by number, written once as data; the page's script shows one on request."""

    def __init__(self) -> None:
        self._frames: dict[FrameDesc, int] = {}
        self._numbers: dict[int, int] = {}
        self._alive: list[StackDesc] = []  # so that their id() stay valid
        self._stacks: list[list[int]] = []

    def data(self) -> dict[str, Any]:
        """Return all stacks for the page's script, entries outermost first."""
        frames = [
            [clip(f.file, LONGEST), f.line, clip(f.function, LONGEST), clip(code_line(f), LONGEST)]
            for f in self._frames
        ]
        return {"frames": frames, "stacks": self._stacks}

    def unfolding(self, frame: FrameDesc, stack: StackDesc, *more: str) -> Html:
        """A line of the user's that unfolds to its stack."""
        line = clip(place_text(frame), LONGEST)
        return tag(
            "details", tag("summary", line), *more, class_="place", data_stack=self._at(stack)
        )

    def _at(self, stack: StackDesc) -> int:
        number = self._numbers.get(id(stack))
        if number is None:
            number = self._numbers[id(stack)] = len(self._stacks)
            self._alive.append(stack)
            numbers = self._frames
            frames = stack.frames[-_FRAMES:]
            self._stacks.append([numbers.setdefault(frame, len(numbers)) for frame in frames])
        return number


class NodesOfLines:
    """The nodes whose stacks contain some lines.

    Files match by the ends of their paths, as torch shortens the file in the location of a guard.
    """

    def __init__(
        self, graphs: Sequence[GraphModuleDesc], frames: Iterable[FrameDesc | None]
    ) -> None:
        requested = {_key(frame) for frame in frames if frame is not None}
        self._found: dict[tuple[str, int, str], list[tuple[str, NodeAt]]] = {}
        matching: dict[int, tuple[StackDesc, list[FrameDesc]]] = {}
        for at, graph in enumerate(graphs if requested else ()):
            for position, fx_node in enumerate(graph.nodes):
                stack = node_stack(fx_node)
                if stack is None:
                    continue
                if id(stack) not in matching:
                    matches = {_key(f): f for f in stack.frames if _key(f) in requested}
                    matching[id(stack)] = stack, list(matches.values())[:_MATCHES]
                for frame in matching[id(stack)][1]:
                    self._found.setdefault(_key(frame), []).append(
                        (frame.file, NodeAt(at, position))
                    )

    def find(self, frame: FrameDesc | None) -> list[NodeAt]:
        """Return the nodes of a requested line, in order."""
        if frame is None:
            return []
        return [node for file, node in self._found.get(_key(frame), ()) if _fits(file, frame.file)]


def _key(frame: FrameDesc) -> tuple[str, int, str]:
    return frame.file.rpartition("/")[2], frame.line, frame.function


def _fits(path: str, shortened: str) -> bool:
    return path == shortened or path.endswith(f"/{shortened}")
