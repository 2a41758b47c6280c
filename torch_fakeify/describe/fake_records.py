"""Fast path for records of plain dense fake tensors and dense views of these.

Most tensors of a graph share their layout with others, and many are in the metadata of several nodes
or the base of views. Inside `assume_unchanged`, each tensor is read once, and tensors of one layout
share the records of their sizes, which are then serialized once.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
import torch

from torch_fakeify.compat import torch_dispatch, torch_fakes
from torch_fakeify.compat.torch_dispatch import dispatch_keys, torch_function_depth
from torch_fakeify.compat.torch_symbols import SymNode
from torch_fakeify.errors import UnsupportedValueError
from torch_fakeify.records.predicates import is_plain_input
from torch_fakeify.records.tensor import MetaTensorDesc

from . import tensor_state
from .unsupported import NOT_PLAIN, PLAIN_INFERENCE, device_name, kind_of_keys, name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from torch_fakeify.records.tensor import IntLike, SymbolFactDesc

    from .ids import StorageRecords, TensorIds
    from .sym_encoder import SymEncoder

DENSE = (torch.Tensor, torch.nn.Parameter, torch_fakes.FakeTensor)
"""Tensor classes that are not wrapper subclasses."""

_ATTRIBUTES = frozenset(
    {"_fake_device", "_is_param", "constant", "dispatch_keys", "fake_mode", "pytype", "real_tensor"}
    | {
        f"_{name}_memo{part}"
        for name in ("item", "nested_int", "nonzero", "unique", "unique_consecutive")
        for part in ("", "_epoch", "_vc")
    }
)
"""Attributes of a fake tensor without marks."""

_CREATION_METAS = {
    member.value: name for name, member in torch_dispatch.CreationMeta.__members__.items()
}
"""Names by value; torch searches all members for a name."""


def creation_meta(t: torch.Tensor) -> str:
    """The name of a view's ``CreationMeta``."""
    return _CREATION_METAS[torch_dispatch.get_creation_meta(t).value]


@lru_cache(maxsize=256)
def _kind(raw_keys: int) -> int:
    return kind_of_keys(raw_keys, fake=True)


_are_ints = frozenset({int}).issuperset


class _FakeLayout(NamedTuple):
    """Records of a fake tensor's sizes, strides, offset, storage size and symbols."""

    size: tuple[IntLike, ...]
    stride: tuple[IntLike, ...]
    storage_offset: IntLike
    nbytes: IntLike
    symbols: tuple[SymbolFactDesc, ...]


_FakeState: TypeAlias = tuple[
    int, torch.dtype, _FakeLayout, torch.UntypedStorage, bool, bool, bool, "torch.Tensor | None"
]
"""Kind, dtype, layout and storage of a plain fake tensor, whether it requires grad, is a leaf and is
a parameter, and its base."""


class _FakeLayouts:
    """Cache of the layouts of fake tensors, valid while no ``ShapeEnv`` changes.

    In a key, an integer is itself and a symbolic number ``-1 - i`` with the index of its record; the
    numbers of a tensor are never negative.
    """

    def __init__(self, syms: SymEncoder) -> None:
        self._syms = syms
        self._records: list[IntLike] = []
        # By the id of a ``SymNode``, and by the ids of its expression and environment and its hint.
        self._by_node: dict[int, int] = {}
        self._by_expr: dict[tuple[int, int, int | None], int] = {}
        self._by_record: dict[tuple[IntLike, int], int] = {}
        self._alive: list[Any] = []
        """Strong references to the nodes whose ids are keys."""
        self._layouts: dict[tuple[int, ...], _FakeLayout] = {}
        self._tuples: dict[tuple[int, ...], tuple[IntLike, ...]] = {}

    def of(self, sizes: Any, strides: Any, offset: Any, nbytes: Any) -> _FakeLayout:
        """The layout of a tensor.

        Args:
            sizes: of the tensor.
            strides: of the tensor.
            offset: of the tensor, in elements.
            nbytes: of its storage.

        Raises:
            UnsupportedValueError: a number has no record.
        """
        key = numbers = (*sizes, *strides, offset, nbytes)
        if not _are_ints(map(type, numbers)):
            cached = self._by_node
            key = tuple([
                n if type(n) is int else cached.get(id(n.node)) or self._number(n) for n in numbers
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
        """The key of a symbolic number that is not cached."""
        sym_node = n.node
        env = getattr(sym_node, "shape_env", None)
        key = None
        if type(sym_node) is SymNode:
            hint = sym_node._hint
            if hint is None or type(hint) is int:
                # The environment determines the replacements in the expression.
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
    """Describes plain dense fake tensors.

    Args:
        tensors: ids of tensors.
        storages: records of storages.
        syms: encoder of symbolic sizes.
    """

    def __init__(
        self,
        tensors: TensorIds,
        storages: StorageRecords,
        syms: SymEncoder,
    ) -> None:
        self._tensors = tensors
        self._storages = storages
        self._syms = syms
        # Inside `assume_unchanged`: records by the id of a tensor, with a strong reference to it.
        self._layouts: _FakeLayouts | None = None
        self._cached: dict[int, tuple[Any, MetaTensorDesc]] = {}
        self._examples: dict[tuple[Any, ...], MetaTensorDesc] = {}

    @contextmanager
    def assume_unchanged(self) -> Generator[None, None, None]:
        """Enter a context in which no fake tensor or ``ShapeEnv`` changes, so that caches stay valid.

        Contexts may be nested.
        """
        if self._layouts is not None:
            yield
            return
        # Without this, torch looks up `__torch_function__` at each access to a fake tensor.
        with self._syms.assume_unchanged(), torch_dispatch.DisableTorchFunction():
            self._layouts = _FakeLayouts(self._syms)
            try:
                yield
            finally:
                self._layouts = None
                self._cached.clear()
                self._examples.clear()

    def of(
        self, t: Any, path: str, part: Callable[[torch.Tensor, str], MetaTensorDesc]
    ) -> MetaTensorDesc | None:
        """The record of a fake tensor, or ``None`` for the general path.

        Args:
            t: the tensor.
            path: of the tensor in the described one.
            part: describes its base, from the base and its path.
        """
        cached = self._cached.get(id(t))
        if cached is not None:
            return cached[1]
        d = self._describe(t, path, part)
        if d is not None and self._layouts is not None:
            self._cached[id(t)] = (t, d)
        return d

    def register_inputs(self, inputs: Iterable[tuple[Any, Any, MetaTensorDesc]]) -> None:
        """Give the fakes of a frame's inputs the records of the inputs, inside `assume_unchanged`.

        A fake that tracing has changed gets a record of its own.

        Args:
            inputs: for each input its fake, the tensor, and the tensor's record.
        """
        same: list[tuple[Any, torch.UntypedStorage, MetaTensorDesc]] = []
        pairs: set[tuple[int, int]] = set()
        for t, value, d in inputs:
            if type(t) is not torch_fakes.FakeTensor:
                continue
            if t is value:
                self._cached[id(t)] = (t, d)
                continue
            found = self._read(t)
            if found is not None and _matches_record(t, found, d):
                assert d.storage is not None
                same.append((t, found[3], d))
                pairs.add((id(found[3]), d.storage.id))
        # Only storages that correspond one to one: ``x.data = y`` may have replaced one.
        of_fakes, of_inputs = Counter([fake for fake, _ in pairs]), Counter([d for _, d in pairs])
        for t, storage, d in same:
            assert d.storage is not None
            if of_fakes[id(storage)] == of_inputs[d.storage.id] == 1:
                self._storages.alias(storage, d.storage)
                self._cached[id(t)] = (t, d)

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
            is_inference=kind == PLAIN_INFERENCE and not torch_fakes.inference_hidden(),
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

    def _read(self, t: Any) -> _FakeState | None:
        """The recorded state of a plain fake tensor; ``None`` for any other."""
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
        is_leaf = not requires_grad or tensor_state.is_leaf(t)
        if (t.grad_dtype is not dtype) if is_leaf else t.retains_grad:
            return None
        if (t.grad if is_leaf else tensor_state.grad_without_warning(t)) is not None:
            return None
        storage = t.untyped_storage()
        layouts = self._layouts or _FakeLayouts(self._syms)
        try:
            layout = layouts.of(t.size(), t.stride(), t.storage_offset(), storage.nbytes())
        except UnsupportedValueError:
            return None  # the error of the general path names the tensor
        is_parameter = bool(attribute("_is_param", False))
        return kind, dtype, layout, storage, requires_grad, is_leaf, is_parameter, base


def _matches_record(t: Any, found: _FakeState, d: MetaTensorDesc) -> bool:
    """Whether a fake tensor equals the one that a converter makes from the record of an input."""
    kind, dtype, layout, _, requires_grad, is_leaf, is_parameter, base = found
    storage = d.storage
    return (
        kind != PLAIN_INFERENCE
        and base is None
        and t._version == 0  # changes of its storage or data increment it
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
