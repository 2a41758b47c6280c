"""The storages of a frame, and the byte ranges of the tensors on them, without torch.

Symbolic sizes count as their hints; a tensor with a size without a hint has no range.
"""

from __future__ import annotations

import re
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from .tensor import SymDesc

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .frame import CaptureDesc
    from .tensor import IntLike, MetaStorageDesc, MetaTensorDesc

_RUNS = 64
"""Most runs of bytes of a tensor; one with more counts as a single run."""
_NAMES = 12
"""Most names of one tensor."""
_DEPTH = 16
"""Most levels of nested tensors that are visited."""
_BITS = re.compile(r"[a-z]+?(\d+)")
_NO_DIGITS = {"bool": 1, "float": 4, "double": 8, "half": 2, "long": 8, "int": 4, "short": 2}


class StorageRange(NamedTuple):
    """The byte range of a tensor in its storage."""

    begin: int
    """The first byte."""
    end: int
    """One past the last byte; ``begin`` if there is no element."""
    runs: tuple[tuple[int, int], ...]
    """The bytes of elements in that range, as ``(begin, end)`` in order."""
    whole: bool
    """Whether ``runs`` is exact; more than 64 runs become one."""


class TensorPlacement(NamedTuple):
    """A tensor on a storage."""

    tensor: MetaTensorDesc
    names: tuple[str, ...]
    """Names of inputs and graph attributes; else its position in another tensor."""
    place: StorageRange | None
    """``None`` where a size has no hint."""
    depth: int
    """Number of bases it has on this storage: 0 if it is no view."""
    base: str | None
    """The name of its base."""


class StorageGroup(NamedTuple):
    """A storage and the tensors on it, bases before their views."""

    storage: MetaStorageDesc
    nbytes: int | None
    """Size at the hints; ``None`` without a hint."""
    tensors: tuple[TensorPlacement, ...]

    @property
    def is_plain(self) -> bool:
        """Whether one tensor, which is no view, covers the whole storage."""
        if len(self.tensors) != 1:
            return False
        (only,) = self.tensors
        if only.tensor.is_view or len(only.names) != 1 or only.place is None:
            return False
        return only.place.runs == (((0, self.nbytes),) if self.nbytes else ())


def storages(desc: CaptureDesc) -> list[StorageGroup]:
    """Return the storages of a frame in the order of its inputs."""
    named = _Tensors()
    for name, tensor in _named(desc):
        named.add(name, tensor)
    found: dict[int, tuple[MetaStorageDesc, list[MetaTensorDesc]]] = {}
    for tensor in named.tensors.values():
        if tensor.storage is not None:
            found.setdefault(tensor.storage.id, (tensor.storage, []))[1].append(tensor)
    return [
        StorageGroup(storage, hint_of(storage.nbytes), tuple(_in_order(group, named.names)))
        for storage, group in found.values()
    ]


def _named(desc: CaptureDesc) -> Iterator[tuple[str, MetaTensorDesc]]:
    for entry in desc.inputs:
        if entry.tensor is not None:
            yield entry.name, entry.tensor
    for prefix, graph in desc.graph.named_graphs("self"):
        for name, tensor in graph.tensors:
            yield f"{prefix}.{name}", tensor


class _Tensors:
    """The tensors of a frame and their names, by id."""

    def __init__(self) -> None:
        self.tensors: dict[int, MetaTensorDesc] = {}
        self.names: dict[int, list[str]] = {}
        self._unnamed: set[int] = set()
        """Ids of tensors that have no name but their position in another tensor."""

    def add(self, name: str, tensor: MetaTensorDesc) -> None:
        """Add a named tensor, and the tensors inside it."""
        names = self.names.setdefault(tensor.id, [])
        if tensor.id in self._unnamed:
            self._unnamed.discard(tensor.id)
            names.clear()
        if len(names) < _NAMES and name not in names:
            names.append(name)
        if tensor.id not in self.tensors:
            self._add_parts(name, tensor, 0)

    def _add_parts(self, name: str, tensor: MetaTensorDesc, depth: int) -> None:
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
                self._add_parts(found, part, depth + 1)


def _in_order(
    group: Sequence[MetaTensorDesc], names: dict[int, list[str]]
) -> Iterator[TensorPlacement]:
    """Yield each base before its views, else in the order of ``group``."""
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
        yield TensorPlacement(tensor, tuple(names[tensor.id]), storage_range(tensor), depth, base)
        todo.extend((view, depth + 1) for view in reversed(views.get(tensor.id, ())))


# --- bytes --------------------------------------------------------------------------------------


def hint_of(n: IntLike) -> int | None:
    """Return a size as a number, the hint of a symbolic one."""
    value = n.hint if isinstance(n, SymDesc) else n
    return value if isinstance(value, int) and value >= 0 else None


def itemsize(dtype: str) -> int:
    """Return the bytes of an element, by torch's name of the dtype.

    No element is smaller than a byte: those of ``uint4`` and ``float4_e2m1fn_x2`` take one.
    """
    found = _BITS.match(dtype)
    bits = int(found[1]) if found else 8 * _NO_DIGITS.get(dtype, 1)
    return min(max(bits // 8, 1), 16)


def storage_range(tensor: MetaTensorDesc) -> StorageRange | None:
    """Return the byte range of a tensor at the hints; ``None`` where a size has none."""
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
        return StorageRange(begin, begin, (), True)
    end = (offset + sum((n - 1) * step for step, n in dims) + 1) * unit
    starts, length = _runs(dims)
    if starts is None:
        return StorageRange(begin, end, ((begin, end),), False)
    runs: list[tuple[int, int]] = []
    for start in sorted(starts):
        first, last = begin + start * unit, begin + (start + length) * unit
        if runs and first <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(runs[-1][1], last))
        else:
            runs.append((first, last))
    return StorageRange(begin, end, tuple(runs), True)


def _runs(dims: Sequence[tuple[int, int]]) -> tuple[set[int] | None, int]:
    """Return the starts of runs of elements and the length of one; ``None`` for too many runs."""
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
