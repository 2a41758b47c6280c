"""Which tensors of a frame lie on which storage, and on which bytes of it, without torch.

Symbolic sizes count as their hints; what has no hint has no place.
"""

from __future__ import annotations

import re
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from .desc import SymDesc

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .desc import IntLike, MetaStorageDesc, MetaTensorDesc
    from .desc_frame import CaptureDesc
    from .desc_graph import GraphModuleDesc

__all__ = ["Place", "Placed", "Shared", "place_of", "storages"]

_RUNS = 64
"""Runs of bytes that are told apart; a tensor of more is given as one."""
_NAMES = 12
"""Names of one tensor, and what is said to be inside it."""
_DEPTH = 16
"""Tensors inside one another that are looked at."""
_BITS = re.compile(r"[a-z]+?(\d+)")
_NO_DIGITS = {"bool": 1, "float": 4, "double": 8, "half": 2, "long": 8, "int": 4, "short": 2}


class Place(NamedTuple):
    """Where in its storage a tensor lies."""

    begin: int
    """The first byte."""
    end: int
    """One past the last byte; ``begin`` if there is no element."""
    runs: tuple[tuple[int, int], ...]
    """The bytes in between that are elements, as ``(begin, end)`` in order."""
    whole: bool
    """Whether ``runs`` tells all gaps; past 64 runs they are not told apart."""


class Placed(NamedTuple):
    """A tensor on a storage."""

    tensor: MetaTensorDesc
    names: tuple[str, ...]
    """What it is called: inputs, attributes of the graph, or where it was found."""
    place: Place | None
    """``None`` where a size has no hint."""
    depth: int
    """How many bases it has on this storage: 0 for what is no view."""
    base: str | None
    """The name of its base."""


class Shared(NamedTuple):
    """A storage and the tensors on it, bases before their views."""

    storage: MetaStorageDesc
    nbytes: int | None
    """At the hints."""
    tensors: tuple[Placed, ...]

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing to see: one tensor, which is no view, on all of it."""
        if len(self.tensors) != 1:
            return False
        (only,) = self.tensors
        if only.tensor.is_view or len(only.names) != 1 or only.place is None:
            return False
        return only.place.runs == (((0, self.nbytes),) if self.nbytes else ())


def storages(desc: CaptureDesc) -> list[Shared]:
    """The storages of a frame in the order of its inputs."""
    known = _Tensors()
    for name, tensor in _named(desc):
        known.note(name, tensor)
    found: dict[int, tuple[MetaStorageDesc, list[MetaTensorDesc]]] = {}
    for tensor in known.tensors.values():
        if tensor.storage is not None:
            found.setdefault(tensor.storage.id, (tensor.storage, []))[1].append(tensor)
    return [
        Shared(storage, hint_of(storage.nbytes), tuple(_in_order(group, known.names)))
        for storage, group in found.values()
    ]


def _named(desc: CaptureDesc) -> Iterator[tuple[str, MetaTensorDesc]]:
    for entry in desc.inputs:
        if entry.tensor is not None:
            yield entry.name, entry.tensor
    yield from _attributes(desc.graph, "self")


def _attributes(graph: GraphModuleDesc, prefix: str) -> Iterator[tuple[str, MetaTensorDesc]]:
    for name, tensor in graph.tensors:
        yield f"{prefix}.{name}", tensor
    for name, inner in graph.submodules:
        yield from _attributes(inner, f"{prefix}.{name}")


class _Tensors:
    """The tensors of a frame by id, and what they are called."""

    def __init__(self) -> None:
        self.tensors: dict[int, MetaTensorDesc] = {}
        self.names: dict[int, list[str]] = {}
        self._unnamed: set[int] = set()
        """Tensors that are called by where they were found, until they have a name."""

    def note(self, name: str, tensor: MetaTensorDesc) -> None:
        """Note a tensor that has a name, and those inside it."""
        names = self.names.setdefault(tensor.id, [])
        if tensor.id in self._unnamed:
            self._unnamed.discard(tensor.id)
            names.clear()
        if len(names) < _NAMES and name not in names:
            names.append(name)
        if tensor.id not in self.tensors:
            self._look_into(name, tensor, 0)

    def _look_into(self, name: str, tensor: MetaTensorDesc, depth: int) -> None:
        self.tensors[tensor.id] = tensor
        inside = [(f"{name}.grad", tensor.grad)]
        if tensor.base is not None:
            inside.insert(0, (f"base of {name}", tensor.base))
        if tensor.subclass is not None:
            inside.extend((f"{name}.{key}", part) for key, part in tensor.subclass.tensors)
        if tensor.functorch is not None:
            inside.append((f"{name}, unwrapped", tensor.functorch.unwrapped))
        if tensor.functional is not None:
            inside.append((f"{name}, unwrapped", tensor.functional.unwrapped))
        for found, part in inside:
            if part is not None and part.id not in self.tensors and depth < _DEPTH:
                self.names[part.id] = [found]
                self._unnamed.add(part.id)
                self._look_into(found, part, depth + 1)


def _in_order(group: Sequence[MetaTensorDesc], names: dict[int, list[str]]) -> Iterator[Placed]:
    """Each base before its views, else in the order seen."""
    here = {tensor.id for tensor in group}
    views: dict[int, list[MetaTensorDesc]] = {}
    roots: list[MetaTensorDesc] = []
    for tensor in group:
        if tensor.base is not None and tensor.base.id in here and tensor.base.id != tensor.id:
            views.setdefault(tensor.base.id, []).append(tensor)
        else:
            roots.append(tensor)
    todo = [(tensor, 0) for tensor in reversed(roots)]
    while todo:
        tensor, depth = todo.pop()
        base = None if tensor.base is None else names.get(tensor.base.id, ["?"])[0]
        yield Placed(tensor, tuple(names[tensor.id]), place_of(tensor), depth, base)
        todo.extend((view, depth + 1) for view in reversed(views.get(tensor.id, ())))


# --- bytes --------------------------------------------------------------------------------------


def hint_of(n: IntLike) -> int | None:
    """A size as a number, by its hint where it is symbolic."""
    value = n.hint if isinstance(n, SymDesc) else n
    return value if isinstance(value, int) and value >= 0 else None


def itemsize(dtype: str) -> int:
    """Bytes of an element, by torch's name of the dtype.

    Torch has no elements of less than a byte: those of ``uint4`` or ``float4_e2m1fn_x2`` take one.
    """
    found = _BITS.match(dtype)
    bits = int(found[1]) if found else 8 * _NO_DIGITS.get(dtype, 1)
    return min(max(bits // 8, 1), 16)


def place_of(tensor: MetaTensorDesc) -> Place | None:
    """Where a tensor lies in its storage, at the hints."""
    offset = hint_of(tensor.storage_offset)
    dims: list[tuple[int, int]] = []
    for size, stride in zip(tensor.size, tensor.stride, strict=False):
        n, step = hint_of(size), hint_of(stride)
        if n is None or step is None:
            return None
        dims.append((step, n))
    if offset is None or len(dims) != len(tensor.size):
        return None
    unit = itemsize(tensor.dtype)
    begin = offset * unit
    if any(n == 0 for _, n in dims):
        return Place(begin, begin, (), True)
    end = (offset + sum((n - 1) * step for step, n in dims) + 1) * unit
    starts, length = _runs(dims)
    if starts is None:
        return Place(begin, end, ((begin, end),), False)
    runs: list[tuple[int, int]] = []
    for start in sorted(starts):
        first, last = begin + start * unit, begin + (start + length) * unit
        if runs and first <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(runs[-1][1], last))
        else:
            runs.append((first, last))
    return Place(begin, end, tuple(runs), True)


def _runs(dims: Sequence[tuple[int, int]]) -> tuple[set[int] | None, int]:
    """Where runs of elements begin, and how long one is; ``None`` for too many of them."""
    length = 1
    outer: list[tuple[int, int]] = []
    for step, n in sorted(dim for dim in dims if dim[0] and dim[1] > 1):
        if step <= length and not outer:
            length = (n - 1) * step + length
        else:
            outer.append((step, n))
    count = 1
    for _, n in outer:
        count *= n
        if count > _RUNS:
            return None, length
    ranges = [[step * i for i in range(n)] for step, n in outer]
    return {sum(steps) for steps in product(*ranges)}, length
