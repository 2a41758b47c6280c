"""The numbering of records, and the detection of different records with one id.

An id identifies a tensor or storage among those of one describer, and so do the numbers of nested ints
and environments. Records of two describers must not be mixed. `have_two_describers` detects that for
records that were described, loaded or unpickled; `find_clash` finds two different tensors with one id in
any records.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from typing import Any, NamedTuple

import msgspec

from .tensor import IdOwner, MetaStorageDesc, MetaTensorDesc, Numbered, SymDesc, owner_of


class Numbering(IdOwner):
    """Counters of tensors, storages, nested ints and environments.

    Each describer has its own; all calls of `describe_tensor` in a process share one. A record refers
    to it (`owner_of`). No lock is needed: ``itertools.count`` is atomic, and a forked child continues
    with a copy.
    """

    __slots__ = ("_env_count", "_envs", "nested_ints", "storages", "tensors")

    def __init__(self) -> None:
        super().__init__()
        self.tensors = itertools.count()
        self.storages = itertools.count()
        self.nested_ints = itertools.count()
        self._env_count = itertools.count()
        self._envs: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def env_id(self, env: object) -> int:
        """Return the number of a ``ShapeEnv``, in first-seen order; it is never reused."""
        number = self._envs.get(env)
        if number is None:
            number = self._envs.setdefault(env, next(self._env_count))
        return number


_named_owners: weakref.WeakValueDictionary[str, IdOwner] = weakref.WeakValueDictionary()


def owner_of_document(describer: str | None) -> IdOwner:
    """Return the owner of the records in a document: one for all whose describer has one name."""
    if describer is None:
        return IdOwner(_OF_A_DOCUMENT)
    return _named_owners.setdefault(describer, IdOwner(f"of describer {describer!r}"))


class Clash(NamedTuple):
    """The text of an error about two records with one id that describe different objects."""

    what: str
    first: str
    """The record that came first."""
    found: str
    """The other one."""
    fix: str = ""
    """What to do, beside what the place of the error advises."""


_NESTED = ("base", "grad", "subclass", "functorch", "functional", "view_calls")
"""Fields of a tensor's record that may contain records of other tensors."""
_nested, _NOTHING = operator.attrgetter(*_NESTED), (None,) * len(_NESTED)
_NOT_OF_THE_TENSOR = ("is_fake", "marks", "scalar_hint", "source", "symbolic_context", "symbols")
"""Fields of the conversion policy, or of the environment's state, that may differ for one tensor.

A frame may contain a tensor as a real input and, in the values of its nodes, as its fake tensor.
"""
_OF_A_DOCUMENT = "of a document"
"""The origin of a document whose describer has no name."""
_NAME_DESCRIBER = "; if one describer made both, name it: `loads(data, describer=...)`"
_SHOWN = ("dtype", "size", "device")
"""Fields that an error shows of each record."""
_OF_THE_TENSOR = tuple(
    [name for name in MetaTensorDesc.__struct_fields__ if name not in _NOT_OF_THE_TENSOR]
)


def find_clash(first: MetaTensorDesc, d: MetaTensorDesc, *, deep: bool = True) -> Clash | None:
    """Return why two records with one id cannot describe one tensor, or ``None`` if they can.

    They cannot if they differ in a property of the tensor, its storage, base, gradient or inner
    tensors.

    Args:
        first: the record that came first.
        d: the other one.
        deep: compare nested records, and sizes as expressions; else their ids, and the hints of sizes,
            as a frame may contain a tensor both with and without symbols. The size of a storage is
            always compared by hints.
    """
    if first is d or _are_equal(first, d):
        return None
    pending: list[tuple[Any, Any, str]] = [(first, d, "")]
    seen: set[tuple[int, int]] = set()
    while pending:
        a, b, path = pending.pop()
        if a is b or (id(a), id(b)) in seen:
            continue
        if not deep and _may_be_one_size(a, b):
            continue
        if type(a) is not type(b):
            return _differ(first, d, path, a, b)
        if isinstance(a, (MetaTensorDesc, MetaStorageDesc)):
            if a.id != b.id:
                return _differ(first, d, f"{path}.id", a.id, b.id)
            if path and isinstance(a, MetaTensorDesc) and not deep:
                continue
            if isinstance(a, MetaStorageDesc) and find_storage_clash(a, b) is None:
                continue
        if isinstance(a, tuple):
            if len(a) != len(b):
                return _differ(first, d, path, a, b)
            parts = [(x, y, f"{path}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True))]
        elif isinstance(a, msgspec.Struct):
            fields = _OF_THE_TENSOR if isinstance(a, MetaTensorDesc) else a.__struct_fields__
            parts = [(getattr(a, f), getattr(b, f), f"{path}.{f}") for f in fields]
        elif a == b or (a != a and b != b):
            continue
        else:
            return _differ(first, d, path, a, b)
        seen.add((id(a), id(b)))
        pending.extend(reversed(parts))
    return None


def find_storage_clash(first: MetaStorageDesc, storage: MetaStorageDesc) -> Clash | None:
    """Return why two records with one id cannot describe one storage, or ``None`` if they can."""
    if first is storage:
        return None
    a, b = first.nbytes, storage.nbytes
    if a != b and not _may_be_one_size(a, b):
        what = "two different storages have the same id"
        return Clash(what, _bytes(first), _bytes(storage))
    return None


def _may_be_one_size(a: Any, b: Any) -> bool:
    """Return whether two numbers, one of them symbolic, may be equal; always without hints."""
    if not isinstance(a, SymDesc) and not isinstance(b, SymDesc):
        return False
    if not isinstance(a, (int, SymDesc)) or not isinstance(b, (int, SymDesc)):
        return False
    hints = [n.hint if isinstance(n, SymDesc) else n for n in (a, b)]
    return None in hints or hints[0] == hints[1]


def have_two_describers(a: Numbered, b: Numbered) -> bool:
    """Return whether two records are of two describers, or of two documents that may be."""
    ours, theirs = owner_of(a), owner_of(b)
    return ours is not theirs and ours is not None and theirs is not None


def two_describers_clash(first: Numbered, found: Numbered) -> Clash:
    """Return the text of an error about two records of two describers."""
    texts = _named(first), _named(found)
    owners = owner_of(first), owner_of(found)
    if all(owner is not None and owner.origin == _OF_A_DOCUMENT for owner in owners):
        what = "the records were loaded from two documents, maybe of two describers"
        return Clash(what, *texts, fix=_NAME_DESCRIBER)
    return Clash("the records are of two describers", *texts)


def _are_equal(first: MetaTensorDesc, d: MetaTensorDesc) -> bool:
    """Return whether two records without nested records are equal.

    Shared nested records would make ``==`` exponential.
    """
    if first.source is not d.source or first.symbolic_context is not d.symbolic_context:
        return False
    return _nested(first) == _NOTHING and first == d


def _differ(first: MetaTensorDesc, d: MetaTensorDesc, path: str, a: Any, b: Any) -> Clash:
    what = "two different records have the same id"
    path = path.removeprefix(".")
    if path.partition("[")[0] in _SHOWN:
        return Clash(what, _shown(first), _shown(d))
    return Clash(
        what,
        f"{_shown(first)}, {path} {_text(a)}",
        f"{_shown(d)}, {path} {_text(b)}",
    )


def _shown(d: MetaTensorDesc) -> str:
    name = "" if d.source is None else f"{d.source.name}: "
    return f"{name}{d.dtype} of size {_text(d.size)} on {d.device}"


def _named(record: Numbered) -> str:
    owner = owner_of(record)
    of = "" if owner is None or not owner.origin else f" {owner.origin}"
    if isinstance(record, MetaTensorDesc):
        return f"tensor {record.id}{of}, {_shown(record)}"
    assert isinstance(record, MetaStorageDesc)
    return f"storage {record.id}{of} of {_bytes(record)}"


def _bytes(storage: MetaStorageDesc) -> str:
    return f"{_text(storage.nbytes)} bytes"


def _text(value: Any) -> str:
    """Return a value as a short text."""
    if value is None:
        return "none"
    if isinstance(value, (str, int, float)):
        return str(value)
    if isinstance(value, tuple):
        comma = "," if len(value) == 1 else ""
        return f"({', '.join(map(_text, value))}{comma})"
    if isinstance(value, MetaTensorDesc):
        return f"tensor {value.id}"
    hint = getattr(value, "hint", None)
    return type(value).__name__ if hint is None else f"a symbolic {_text(hint)}"
