"""Real (and fake) tensors -> records.

Method: what torch 2.13's ``MetaTensorDescriber`` reads, and what it leaves unsaid (retained
gradients, gradient dtype, Dynamo's marks, item memos), written without any torch object.

Not recorded, because nothing that reads a fake tensor depends on it: the data, the value of the
version counter, autograd hooks (they are code of the process), Python attributes other than
Dynamo's marks and those of ``nn.Buffer``, and of a fake tensor its data (``constant``,
``real_tensor``) and its memos of data-dependent sizes, which torch itself drops on a retrace.
Everything else that a record cannot hold is refused by name.
"""

from __future__ import annotations

import itertools
import math
import warnings
import weakref
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NoReturn

import sympy
import torch

from . import _torch
from ._torch import dispatch_keys, torch_function_depth
from .desc import MetaStorageDesc, MetaTensorDesc, SymDesc
from .errors import UnsupportedTensorError, UnsupportedValueError
from .exprs import encode_expr, encode_sym
from .marks import encode_marks
from .symbols import SymMemo

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ._torch import Source, SymbolicContext
    from .desc import ContextDesc, IntLike, MarksDesc, SourceDesc

__all__ = ["MetaTensorDescriber", "describe_tensor"]

_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter

_ITEM_DTYPES = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.float64})
"""Dtypes whose 0-dim CPU tensors get a symbol for ``item()`` from torch's ``from_tensor``."""

_PLAIN_KEYS = frozenset({
    "Undefined", "Dense", "CPU", "CUDA", "HIP", "MPS", "IPU", "XPU", "HPU", "VE", "MTIA", "MAIA",
    "PrivateUse1", "PrivateUse2", "PrivateUse3", "Meta", "ADInplaceOrView",
})  # fmt: skip
"""Dispatch keys of plain dense tensors, besides autograd's, autocast's and the alias keys."""

_ALIAS_KEYS = ("Autograd", "Autocast", "Composite", "StartOf", "EndOf", "FuncTorchBatchedDecomp")

_FAKE_KEYS = frozenset({"Python", "PythonTLSSnapshot"})
_BIT_KEYS = frozenset({"Conjugate", "Negative"})

_FAKE_ATTRIBUTES = frozenset(
    {"_fake_device", "_is_param", "constant", "dispatch_keys", "fake_mode", "pytype", "real_tensor"}
    | {
        f"_{name}_memo{part}"
        for name in ("item", "nested_int", "nonzero", "unique", "unique_consecutive")
        for part in ("", "_epoch", "_vc")
    }
)
"""Attributes of a fake tensor without a mark on it."""

_RARE_FAKE_ATTRIBUTES = ("pytype", "dispatch_keys", "_nested_int_memo", "_item_memo")

_NOT_PLAIN, _PLAIN, _PLAIN_INFERENCE = range(3)

_MAX_DEPTH = 64
"""How deep gradients of gradients and bases may nest before they are taken for a cycle."""


@lru_cache(maxsize=256)
def _key_names(raw_keys: int) -> frozenset[str]:
    keys = _torch.DispatchKeySet.from_raw_repr(raw_keys)
    return frozenset(
        name
        for name, key in _torch.DispatchKey.__members__.items()
        if keys.has(key) and not name.startswith(_ALIAS_KEYS)
    )


@lru_cache(maxsize=256)
def _kind_of_keys(raw_keys: int, *, fake: bool = False) -> int:
    """Whether a tensor with these dispatch keys is dense and has no bit or wrapper on it."""
    names = _key_names(raw_keys)
    if fake:
        names -= _FAKE_KEYS
    if "Dense" not in names or not names <= _PLAIN_KEYS:
        return _NOT_PLAIN
    return _PLAIN if "ADInplaceOrView" in names else _PLAIN_INFERENCE


@lru_cache(maxsize=256)
def _name(torch_constant: torch.dtype | torch.layout) -> str:
    return str(torch_constant).removeprefix("torch.")


_device_name = lru_cache(maxsize=256)(str)
_nbytes = torch.UntypedStorage.nbytes


class _Numbers:
    """Numbers for objects by identity, which do not keep the objects alive.

    An entry goes away with its object, so a number is never given to another object, even if
    Python reuses the address. A Python wrapper that torch keeps for a tensor or storage which
    lives on in C++ keeps its address and its weak references, and so its number.
    """

    __slots__ = ("_count", "entries")

    def __init__(self) -> None:
        self.entries: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._count = itertools.count()

    def of(self, obj: Any) -> int:
        """The number of an object, a new one at first sight."""
        key = id(obj)
        entry = self.entries.get(key)
        if entry is not None and entry[0]() is obj:
            return entry[1]
        number = next(self._count)
        # The callback is `entries.pop(key, reference)`, in C: the reference is the default.
        self.entries[key] = (weakref.ref(obj, partial(self.entries.pop, key)), number)
        return number


class _StorageRecords:
    """The records of storages, with the numbers of `_Numbers`."""

    __slots__ = ("_count", "_syms", "entries")

    def __init__(self, syms: SymMemo) -> None:
        self.entries: dict[int, tuple[weakref.ref[Any], MetaStorageDesc]] = {}
        self._count = itertools.count()
        self._syms = syms

    def of(self, storage: torch.UntypedStorage) -> MetaStorageDesc:
        """The record of a storage, the same object until the storage is resized."""
        key = id(storage)
        nbytes: IntLike = storage.nbytes()
        if type(nbytes) is not int:
            nbytes = self._syms.encode_int(nbytes)
        entry = self.entries.get(key)
        if entry is not None and entry[0]() is storage:
            reference, known = entry
            if known.nbytes == nbytes:
                return known
            record = MetaStorageDesc(id=known.id, nbytes=nbytes)
        else:
            reference = weakref.ref(storage, partial(self.entries.pop, key))
            record = MetaStorageDesc(id=next(self._count), nbytes=nbytes)
        self.entries[key] = (reference, record)
        return record


class MetaTensorDescriber:
    """Describes tensors and storages, giving each a number that is stable for its life.

    A describer holds weak references only. Records of one describer belong together: equal ids
    mean the same tensor or storage.
    """

    def __init__(self) -> None:
        self._tensors = _Numbers()
        self._syms = SymMemo()
        self._storages = _StorageRecords(self._syms)
        self._can_pin = torch.accelerator.is_available()

    def describe_storage(self, s: torch.UntypedStorage) -> MetaStorageDesc:
        """The record of an untyped storage: the same object as long as its size stays."""
        return self._storages.of(s)

    def describe_tensor(
        self,
        t: torch.Tensor,
        *,
        source: Source | None = None,
        symbolic_context: SymbolicContext | None = None,
    ) -> MetaTensorDesc:
        """The record of a tensor.

        Args:
            t: any strided tensor, real or fake.
            source: where the compiled function finds the tensor; travels with the record.
            symbolic_context: by which policy its dims get symbols; travels with the record.

        Raises:
            UnsupportedTensorError: the tensor has a property that a record cannot hold.
        """
        if source is None and symbolic_context is None:
            d = self._describe_plain(t, "$")
            if d is not None:
                return d
        return self._describe_any(t, "$", source, symbolic_context)

    # --- the fast path --------------------------------------------------------------------------

    def _describe_plain(self, t: torch.Tensor, path: str) -> MetaTensorDesc | None:
        """The record of a plain dense leaf, or ``None`` for all others.

        Equal to what `_describe_any` gives: one query of the dispatch keys answers what that asks
        in two dozen calls.
        """
        cls = type(t)
        if cls is _torch.FakeTensor:
            return self._describe_plain_fake(t, path)
        if (cls is not _Tensor and cls is not _Parameter) or torch_function_depth():
            return None
        kind = _kind_of_keys(dispatch_keys(t).raw_repr())
        if kind == _NOT_PLAIN or self._can_pin or _forward_ad_level() >= 0:
            return None
        requires_grad = t.requires_grad
        base = t._base if t._is_view() else None
        offset: Any = t.storage_offset()
        if requires_grad and not t.is_leaf:
            return None
        dtype = t.dtype
        attributes = t.__dict__
        grad = t.grad
        grad_dtype = t.grad_dtype
        if (
            kind == _PLAIN
            and base is None
            and grad is None
            and grad_dtype is dtype
            and not attributes
        ):
            # Each field given costs time, also one that is at its default.
            return MetaTensorDesc(
                id=self._tensors.of(t),
                dtype=_name(dtype),
                device=_device_name(t.device),
                size=tuple(t.size()),
                stride=t.stride(),
                storage_offset=offset,
                storage=self._storages.of(t.untyped_storage()),
                requires_grad=requires_grad,
                is_parameter=cls is _Parameter,
            )
        return MetaTensorDesc(
            id=self._tensors.of(t),
            dtype=_name(dtype),
            device=_device_name(t.device),
            size=tuple(t.size()),
            stride=t.stride(),
            storage_offset=offset,
            storage=self._storages.of(t.untyped_storage()),
            requires_grad=requires_grad,
            is_inference=kind == _PLAIN_INFERENCE and not _torch.inference_hidden(),
            is_parameter=cls is _Parameter or bool(attributes and attributes.get("_is_param")),
            is_buffer=bool(attributes and attributes.get("_is_buffer", False)),
            persistent=_persistent(attributes) if attributes else None,
            is_view=base is not None,
            base=None if base is None else self._describe_part(base, f"{path}.base"),
            creation_meta=None if base is None else _torch.get_creation_meta(t).name,
            grad=None if grad is None else self._describe_part(grad, f"{path}.grad"),
            grad_dtype=None if grad_dtype is dtype else _grad_dtype_name(grad_dtype),
            marks=self._marks(t, attributes, path) if attributes else None,
        )

    def _describe_plain_fake(self, t: Any, path: str) -> MetaTensorDesc | None:
        """The record of a fake tensor of a plain dense leaf, or ``None`` for all others."""
        kind = _kind_of_keys(dispatch_keys(t).raw_repr(), fake=True)
        attributes = t.__dict__
        if (
            kind == _NOT_PLAIN
            or torch_function_depth()
            or not attributes.keys() <= _FAKE_ATTRIBUTES
            or any(attributes.get(name) is not None for name in _RARE_FAKE_ATTRIBUTES)
        ):
            return None
        requires_grad = t.requires_grad
        if requires_grad and not t.is_leaf:
            return None
        base = t._base if t._is_view() else None
        grad = t.grad
        if grad is not None or t.grad_dtype is not t.dtype:
            return None
        encode_int = self._syms.encode_int
        sizes, strides, raw_offset = t.size(), t.stride(), t.storage_offset()
        raw_storage = t.untyped_storage()
        try:
            size = tuple([n if type(n) is int else encode_int(n) for n in sizes])
            stride = tuple([n if type(n) is int else encode_int(n) for n in strides])
            offset = encode_int(raw_offset)
            storage = self._storages.of(raw_storage)
        except UnsupportedValueError:
            return None  # the plain path names the tensor
        symbols = self._syms.facts_of_records(
            (*size, *stride, offset, storage.nbytes),
            itertools.chain(sizes, strides, (raw_offset,), map(_nbytes, (raw_storage,))),
        )
        return MetaTensorDesc(
            id=self._tensors.of(t),
            dtype=_name(t.dtype),
            device=_device_name(t.device),
            size=size,
            stride=stride,
            storage_offset=offset,
            storage=storage,
            requires_grad=requires_grad,
            is_inference=kind == _PLAIN_INFERENCE and not _torch.inference_hidden(),
            is_parameter=bool(attributes.get("_is_param", False)),
            is_view=base is not None,
            base=None if base is None else self._describe_part(base, f"{path}.base"),
            creation_meta=None if base is None else _torch.get_creation_meta(t).name,
            is_fake=True,
            symbols=symbols,
        )

    def _describe_part(self, t: torch.Tensor, path: str) -> MetaTensorDesc:
        """The record of a base or gradient."""
        d = None if path.count(".") > _MAX_DEPTH else self._describe_plain(t, path)
        return self._describe_any(t, path, None, None) if d is None else d

    # --- the plain path -------------------------------------------------------------------------

    def _describe_any(
        self,
        t: torch.Tensor,
        path: str,
        source: Source | None,
        symbolic_context: SymbolicContext | None,
    ) -> MetaTensorDesc:
        source_record, context_record = _encode_policy(source, symbolic_context)
        # What a __torch_function__ mode or subclass says is not what the tensor is.
        with _torch.DisableTorchFunction():
            where = _Where(self, t, path, source)
            _refuse_unsupported(t, where, self._can_pin)
            is_fake = isinstance(t, _torch.FakeTensor)
            is_leaf = _is_leaf(t)
            base = t._base if t._is_view() else None
            grad = t.grad if is_leaf or t.retains_grad else _stray_grad(t)
            attributes = t.__dict__
            try:
                encode_int = self._syms.encode_int
                size = tuple([encode_int(n) for n in t.size()])
                stride = tuple([encode_int(n) for n in t.stride()])
                storage_offset = encode_int(t.storage_offset())
                storage = self.describe_storage(t.untyped_storage())
                item_memo = _item_memo(t) if is_fake else None
            except UnsupportedValueError as error:
                where.refuse("size", error.what, error.found, error.fix)
            grad_dtype = t.grad_dtype if is_leaf else t.dtype
            return MetaTensorDesc(
                id=self._tensors.of(t),
                dtype=_name(t.dtype),
                device=_device_name(t.device),
                size=size,
                stride=stride,
                storage_offset=storage_offset,
                storage=storage,
                layout=_name(t.layout),
                requires_grad=t.requires_grad,
                is_leaf=is_leaf,
                is_inference=t.is_inference() and not _torch.inference_hidden(),
                is_conj=t.is_conj(),
                is_neg=t.is_neg(),
                is_parameter=isinstance(t, _Parameter),
                is_buffer=bool(attributes.get("_is_buffer", False)),
                persistent=_persistent(attributes),
                is_view=base is not None,
                base=None if base is None else self._describe_part(base, f"{path}.base"),
                creation_meta=None if base is None else _torch.get_creation_meta(t).name,
                grad=None if grad is None else self._describe_part(grad, f"{path}.grad"),
                grad_dtype=None if grad_dtype is t.dtype else _grad_dtype_name(grad_dtype),
                retains_grad=not is_leaf and t.retains_grad,
                is_fake=is_fake,
                scalar_hint=_scalar_hint(t, source, storage),
                item_memo=item_memo,
                symbols=self._syms.facts(_sizes_of(t)) if is_fake else (),
                marks=self._marks(t, attributes, path),
                source=source_record,
                symbolic_context=context_record,
            )

    def _marks(self, t: torch.Tensor, attributes: Mapping[str, Any], path: str) -> MarksDesc | None:
        try:
            return encode_marks(attributes)
        except UnsupportedTensorError as error:
            error.where = str(_Where(self, t, path, None))
            raise


def describe_tensor(
    t: torch.Tensor,
    *,
    source: Source | None = None,
    symbolic_context: SymbolicContext | None = None,
) -> MetaTensorDesc:
    """The record of one tensor, by a describer of its own: see `MetaTensorDescriber`."""
    describer = MetaTensorDescriber()
    try:
        return describer.describe_tensor(t, source=source, symbolic_context=symbolic_context)
    finally:
        # The entries' callbacks refer to their table; without them there is no cycle to collect.
        describer._tensors.entries.clear()
        describer._storages.entries.clear()


# --- refusals -----------------------------------------------------------------------------------


class _Where:
    """Names a tensor for an error: its source or number, its size, and the part of it."""

    __slots__ = ("_describer", "_path", "_source", "_t")

    def __init__(
        self, describer: MetaTensorDescriber, t: torch.Tensor, path: str, source: Source | None
    ) -> None:
        self._describer = describer
        self._t = t
        self._path = path
        self._source = source

    def __str__(self) -> str:
        t: Any = self._t
        if not isinstance(t, _Tensor):
            return self._path
        number = self._describer._tensors.of(t)
        name = f"tensor {number}" if self._source is None else f"{self._source.name}"
        # C++ nested tensors have no size.
        size = "" if t.is_nested else f" of size {tuple(t.size())}"
        return f"{name}{size}" if self._path == "$" else f"{name}{size}, {self._path}"

    def refuse(self, field: str, expected: str, found: object, fix: str | None) -> NoReturn:
        raise UnsupportedTensorError(
            f"`{field}` cannot be recorded",
            where=str(self),
            expected=expected,
            found=str(found),
            fix=fix,
        )


def _refuse_unsupported(t: torch.Tensor, where: _Where, can_pin: bool) -> None:
    """Raises for whatever a record does not hold, naming the field and the remedy."""
    if not isinstance(t, _Tensor):
        where.refuse("type", "a torch.Tensor", type(t).__name__, None)
    if where._path.count(".") > _MAX_DEPTH:
        where.refuse("grad", "gradients that end", f"more than {_MAX_DEPTH} levels", None)
    cls = type(t)
    is_fake = isinstance(t, _torch.FakeTensor)
    if _torch.is_traceable_wrapper_subclass(t):
        fix = "Describe its inner tensors (__tensor_flatten__) one by one"
        where.refuse("type", "no wrapper subclass", _class_name(cls), fix)
    names = _key_names(dispatch_keys(t).raw_repr())
    if _torch.is_functorch_wrapped(t) or _torch.functorch_is_legacy_batched(t):
        where.refuse("level", "a tensor outside functorch", "a functorch wrapper", "Unwrap it")
    if "Functionalize" in names:
        fix = "Describe torch._from_functional_tensor of it"
        where.refuse("functional", "no functional tensor", "a functional tensor", fix)
    if t.is_quantized:
        where.refuse("qscheme", "no quantized dtype", _name(t.dtype), "Describe its int_repr()")
    if t.is_nested:
        where.refuse("layout", "strided", "nested", "Describe its components (unbind())")
    if t.layout is not torch.strided:
        fix = "Describe its components, such as indices and values, or its to_dense()"
        where.refuse("layout", "strided", _name(t.layout), fix)
    if not (cls is _Tensor or cls is _Parameter or is_fake):
        fix = "Describe it as a plain tensor: t.as_subclass(torch.Tensor)"
        where.refuse("type", "Tensor, Parameter or FakeTensor", _class_name(cls), fix)
    if t.device.type in ("xla", "lazy"):
        where.refuse("device", "a device that runs eagerly", t.device, "Move it to the CPU")
    unusual = names - _PLAIN_KEYS - _BIT_KEYS
    if is_fake:
        unusual -= _FAKE_KEYS
    if unusual:
        found = ", ".join(sorted(unusual))
        where.refuse("dispatch keys", "a plain dense tensor", found, "Describe its clone()")
    if not is_fake and _forward_ad_level() >= 0 and _has_tangent(t):
        fix = "Describe the primal and the tangent of unpack_dual one by one"
        where.refuse("tangent", "no forward-mode AD", "a dual tensor", fix)
    if can_pin and not is_fake and _is_pinned(t):
        fix = "Describe it before pin_memory(), or its clone()"
        where.refuse("pin_memory", "memory that is not pinned", "pinned memory", fix)
    if is_fake:
        _refuse_unsupported_fake(t, where)


def _refuse_unsupported_fake(t: Any, where: _Where) -> None:
    if t.pytype is not None and t.pytype is not _Tensor:
        where.refuse("pytype", "a fake of a plain tensor", _class_name(t.pytype), None)
    if t.dispatch_keys is not None:
        where.refuse("dispatch_keys", "none of its own", t.dispatch_keys, None)
    if t.nested_int_memo is not None:
        fix = "Describe the components of the jagged nested tensor without the nested int"
        where.refuse("nested_int_memo", "no nested int", t.nested_int_memo, fix)


def _is_pinned(t: torch.Tensor) -> bool:
    guard = _torch.no_dispatch_guard()
    try:
        return t.device.type == "cpu" and t.is_pinned()
    finally:
        del guard


def _forward_ad_level() -> int:
    return _forward_ad._current_level


_forward_ad: Any = torch.autograd.forward_ad


def _has_tangent(t: torch.Tensor) -> bool:
    return _forward_ad.unpack_dual(t).tangent is not None


def _class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


# --- fields -------------------------------------------------------------------------------------


def _is_leaf(t: torch.Tensor) -> bool:
    try:
        return t.is_leaf
    except RuntimeError:  # of a tensor whose history inference mode forbids to regenerate
        return False


def _stray_grad(t: torch.Tensor) -> torch.Tensor | None:
    """The gradient that somebody assigned to a non-leaf; torch warns where there is none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor", UserWarning)
        return t.grad


def _persistent(attributes: Mapping[str, Any]) -> bool | None:
    if not attributes.get("_is_buffer", False) or "persistent" not in attributes:
        return None
    return bool(attributes["persistent"])


def _grad_dtype_name(dtype: torch.dtype | None) -> str:
    return "any" if dtype is None else _name(dtype)


def _encode_policy(
    source: Source | None, symbolic_context: SymbolicContext | None
) -> tuple[SourceDesc | None, ContextDesc | None]:
    if source is None and symbolic_context is None:
        return None, None
    from .sources import encode_context, encode_source

    return (
        None if source is None else encode_source(source),
        None if symbolic_context is None else encode_context(symbolic_context),
    )


def _scalar_hint(
    t: torch.Tensor, source: Source | None, storage: MetaStorageDesc
) -> int | float | None:
    """The value of ``item()`` where torch's ``from_tensor`` makes a symbol for it, else ``None``.

    Method: the conditions of ``FakeTensorConverter.from_real_tensor``, torch 2.13.
    """
    if source is None or type(t) is not _Tensor or t.dim() or t.dtype not in _ITEM_DTYPES:
        return None
    if t.device.type != "cpu" or isinstance(source, _torch.dynamo_source().RandomValueSource):
        return None
    needed = (t.storage_offset() + 1) * t.itemsize
    if not isinstance(storage.nbytes, int) or storage.nbytes < needed:
        return None
    guard = _torch.no_dispatch_guard()
    try:
        value = t.item()
    finally:
        del guard
    return value if math.isfinite(value) else None


def _item_memo(t: Any) -> SymDesc | None:
    memo = t.item_memo
    if memo is None:
        return None
    if isinstance(memo, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return encode_sym(memo)
    kind = "bool" if isinstance(memo, bool) else "int" if isinstance(memo, int) else "float"
    return SymDesc(expr=encode_expr(sympy.sympify(memo, strict=True)), kind=kind, hint=memo)


def _sizes_of(t: Any) -> tuple[Any, ...]:
    """Every number of a fake tensor that may be symbolic."""
    return (*t.size(), *t.stride(), t.storage_offset(), t.untyped_storage().nbytes(), t.item_memo)
