"""Records of fake tensors that stand for plain dense tensors or for dense views of such.

Most tensors of a graph have the layout of another one, and many stand in the metadata of several
nodes or are the base of views. While nobody changes anything (`settled`), each tensor is read once,
and tensors of one layout share the records of their sizes, so that these are written once too.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
import torch

from . import _torch, facts
from ._torch import SymNode, dispatch_keys, torch_function_depth
from .desc import MetaTensorDesc
from .errors import UnsupportedValueError
from .plain_fakes import is_plain_input
from .refusals import NOT_PLAIN, PLAIN_INFERENCE, device_name, kind_of_keys, name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from .desc import IntLike, SymbolFactDesc
    from .identities import KeptNumbers, KeptRecords, StorageRecords, TensorNumbers
    from .symbols import SymMemo

__all__ = ["DENSE", "FakeRecords", "creation_meta"]

DENSE = (torch.Tensor, torch.nn.Parameter, _torch.FakeTensor)
"""Classes of which none is a wrapper subclass."""

_ATTRIBUTES = frozenset(
    {"_fake_device", "_is_param", "constant", "dispatch_keys", "fake_mode", "pytype", "real_tensor"}
    | {
        f"_{name}_memo{part}"
        for name in ("item", "nested_int", "nonzero", "unique", "unique_consecutive")
        for part in ("", "_epoch", "_vc")
    }
)
"""Attributes of a fake tensor without a mark on it."""

_CREATION_METAS = {member.value: name for name, member in _torch.CreationMeta.__members__.items()}
"""The names by number: torch looks for the name among all members each time."""


def creation_meta(t: torch.Tensor) -> str:
    """The name of how a view came to be."""
    return _CREATION_METAS[_torch.get_creation_meta(t).value]


@lru_cache(maxsize=256)
def _kind(raw_keys: int) -> int:
    return kind_of_keys(raw_keys, fake=True)


_are_ints = frozenset({int}).issuperset


class _FakeLayout(NamedTuple):
    """The records of the numbers of a fake tensor, and of the symbols in them."""

    size: tuple[IntLike, ...]
    stride: tuple[IntLike, ...]
    storage_offset: IntLike
    nbytes: IntLike
    symbols: tuple[SymbolFactDesc, ...]


_Facts: TypeAlias = tuple[
    int, torch.dtype, _FakeLayout, torch.UntypedStorage, bool, bool, bool, "torch.Tensor | None"
]
"""What is to be known of a plain fake tensor: its kind, dtype, layout and storage, whether it
requires a gradient, is a leaf or a parameter, and its base."""


class _FakeLayouts:
    """The layouts of fake tensors, each made once, as long as no ``ShapeEnv`` changes.

    A number is known by an int: itself, or below zero the place of its record among those of
    symbolic ones. None of a tensor's numbers is below zero.
    """

    def __init__(self, syms: SymMemo) -> None:
        self._syms = syms
        self._records: list[IntLike] = []
        # By the id of a ``SymNode``, and by the ids of its expression and environment and its hint.
        self._by_node: dict[int, int] = {}
        self._by_expr: dict[tuple[int, int, int | None], int] = {}
        self._by_record: dict[tuple[IntLike, int], int] = {}
        self._alive: list[Any] = []
        """What the ids are of."""
        self._layouts: dict[tuple[int, ...], _FakeLayout] = {}
        self._tuples: dict[tuple[int, ...], tuple[IntLike, ...]] = {}

    def of(self, sizes: Any, strides: Any, offset: Any, nbytes: Any) -> _FakeLayout:
        """The layout of a tensor of these sizes and strides.

        Raises:
            UnsupportedValueError: a number has no record.
        """
        key = numbers = (*sizes, *strides, offset, nbytes)
        if not _are_ints(map(type, numbers)):
            known = self._by_node
            key = tuple([
                n if type(n) is int else known.get(id(n.node)) or self._number(n) for n in numbers
            ])  # fmt: skip
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = self._layout(key, len(sizes), numbers)
        return layout

    def _layout(self, key: tuple[int, ...], ndim: int, numbers: Iterable[Any]) -> _FakeLayout:
        records = tuple([n if n >= 0 else self._records[-1 - n] for n in key])
        return _FakeLayout(
            size=self._tuples.setdefault(key[:ndim], records[:ndim]),
            stride=self._tuples.setdefault(key[ndim:-2], records[ndim:-2]),
            storage_offset=records[-2],
            nbytes=records[-1],
            symbols=self._syms.facts_of_records(records, numbers),
        )

    def _number(self, n: Any) -> int:
        """The number of a symbolic size at first sight."""
        sym_node = n.node
        env = getattr(sym_node, "shape_env", None)
        key = None
        if type(sym_node) is SymNode:
            hint = sym_node._hint
            if hint is None or type(hint) is int:
                # What the environment knows settles what an expression has become.
                key = (id(sym_node._expr), id(env), hint)
        number = None if key is None else self._by_expr.get(key)
        if number is None:
            number = self._number_of_record(self._syms.encode_int(n), env)
            if key is not None:
                self._by_expr[key] = number
        self._by_node[id(sym_node)] = number
        self._alive.append(sym_node)
        return number

    def _number_of_record(self, record: IntLike, env: Any) -> int:
        if type(record) is int and record >= 0:
            return record
        number = self._by_record.setdefault((record, id(env)), -1 - len(self._records))
        if -1 - number == len(self._records):
            self._records.append(record)
        return number


class FakeRecords:
    """Describes fake tensors the fast way.

    Args:
        tensors: gives the ids of tensors.
        storages: gives the records of storages.
        syms: gives the records of symbolic sizes.
    """

    def __init__(
        self,
        tensors: TensorNumbers | KeptNumbers,
        storages: StorageRecords | KeptRecords,
        syms: SymMemo,
    ) -> None:
        self._tensors = tensors
        self._storages = storages
        self._syms = syms
        # Inside of `settled`; records by the id of a tensor, which the entry keeps alive.
        self._layouts: _FakeLayouts | None = None
        self._known: dict[int, tuple[Any, MetaTensorDesc]] = {}
        self._examples: dict[tuple[Any, ...], MetaTensorDesc] = {}

    @contextmanager
    def settled(self) -> Generator[None, None, None]:
        """Inside, nobody changes a tensor or a ``ShapeEnv``: each is asked once."""
        # Torch looks for a `__torch_function__` each time that a fake tensor is asked something.
        with self._syms.settled(), _torch.DisableTorchFunction():
            self._layouts = _FakeLayouts(self._syms)
            try:
                yield
            finally:
                self._layouts = None
                self._known.clear()
                self._examples.clear()

    def of(
        self, t: Any, path: str, part: Callable[[torch.Tensor, str], MetaTensorDesc]
    ) -> MetaTensorDesc | None:
        """The record of a fake tensor, or ``None`` where the plain path is needed.

        Args:
            t: the tensor.
            path: where it stands in what is described.
            part: describes its base, whose path is given.
        """
        known = self._known.get(id(t))
        if known is not None:
            return known[1]
        d = self._describe(t, path, part)
        if d is not None and self._layouts is not None:
            self._known[id(t)] = (t, d)
        return d

    def adopt(self, inputs: Iterable[tuple[Any, Any, MetaTensorDesc]]) -> None:
        """Let the fakes of a frame's inputs have the records of these, inside of `settled`.

        A fake that tracing has changed since it was made stays a tensor of its own.

        Args:
            inputs: for each a frontend's value for it, what it is, and its record.
        """
        same: list[tuple[Any, torch.UntypedStorage, MetaTensorDesc]] = []
        pairs: set[tuple[int, int]] = set()
        for t, value, d in inputs:
            if type(t) is not _torch.FakeTensor:
                continue
            if t is value:
                self._known[id(t)] = (t, d)
                continue
            found = self._read(t)
            if found is not None and _is_as_it_began(t, found, d):
                assert d.storage is not None
                same.append((t, found[3], d))
                pairs.add((id(found[3]), d.storage.id))
        # A storage of the fakes for each of the inputs: another one came by way of ``x.data = y``.
        of_fakes, of_inputs = Counter([fake for fake, _ in pairs]), Counter([d for _, d in pairs])
        for t, storage, d in same:
            assert d.storage is not None
            if of_fakes[id(storage)] == of_inputs[d.storage.id] == 1:
                self._storages.give(storage, d.storage)
                self._known[id(t)] = (t, d)

    def _describe(
        self, t: Any, path: str, part: Callable[[torch.Tensor, str], MetaTensorDesc]
    ) -> MetaTensorDesc | None:
        found = self._read(t)
        if found is None:
            return None
        kind, dtype, layout, storage, requires_grad, is_leaf, is_parameter, base = found
        number = self._tensors.of(t)
        storage_record = self._storages.of_size(storage, layout.nbytes)
        key = (kind, dtype, id(layout), t.device, requires_grad, is_leaf, is_parameter)
        example = self._examples.get(key) if base is None else None
        if example is not None:
            return msgspec.structs.replace(example, id=number, storage=storage_record)
        d = MetaTensorDesc(
            id=number,
            dtype=name_of(dtype),
            device=device_name(t.device),
            size=layout.size,
            stride=layout.stride,
            storage_offset=layout.storage_offset,
            storage=storage_record,
            requires_grad=requires_grad,
            is_leaf=is_leaf,
            is_inference=kind == PLAIN_INFERENCE and not _torch.inference_hidden(),
            is_parameter=is_parameter,
            is_view=base is not None,
            base=None if base is None else part(base, f"{path}.base"),
            creation_meta=None if base is None else creation_meta(t),
            is_fake=True,
            symbols=layout.symbols,
        )
        if base is None and self._layouts is not None:
            self._examples[key] = d
        return d

    def _read(self, t: Any) -> _Facts | None:
        """What a record says of a plain fake tensor; ``None`` for any other."""
        attributes = t.__dict__
        attribute = attributes.get
        kind = _kind(dispatch_keys(t).raw_repr())
        if (
            kind == NOT_PLAIN
            or torch_function_depth()
            or not attributes.keys() <= _ATTRIBUTES
            or attribute("pytype") is not None
            or attribute("dispatch_keys") is not None
            or attribute("_nested_int_memo") is not None
            or attribute("_item_memo") is not None
        ):
            return None
        requires_grad = t.requires_grad
        base = t._base
        if base is not None and type(base) not in DENSE:
            return None
        dtype = t.dtype
        is_leaf = not requires_grad or facts.is_leaf(t)
        if (t.grad_dtype is not dtype) if is_leaf else t.retains_grad:
            return None
        if (t.grad if is_leaf else facts.shown_grad(t)) is not None:
            return None
        storage = t.untyped_storage()
        layouts = self._layouts or _FakeLayouts(self._syms)
        try:
            layout = layouts.of(t.size(), t.stride(), t.storage_offset(), storage.nbytes())
        except UnsupportedValueError:
            return None  # the plain path names the tensor
        is_parameter = bool(attribute("_is_param", False))
        return kind, dtype, layout, storage, requires_grad, is_leaf, is_parameter, base


def _is_as_it_began(t: Any, found: _Facts, d: MetaTensorDesc) -> bool:
    """Whether a fake tensor is what a converter makes of the record of an input."""
    kind, dtype, layout, _, requires_grad, is_leaf, is_parameter, base = found
    storage = d.storage
    return (
        kind != PLAIN_INFERENCE
        and base is None
        and t._version == 0  # what changes its storage or data counts there
        and storage is not None
        and is_plain_input(d)
        and d.requires_grad is requires_grad
        and d.is_leaf is is_leaf
        and d.is_parameter is is_parameter
        and d.dtype == name_of(dtype)
        and d.device == device_name(t.device)
        and d.size == layout.size
        and d.stride == layout.stride
        and layout.storage_offset == 0
        and storage.nbytes == layout.nbytes
    )
