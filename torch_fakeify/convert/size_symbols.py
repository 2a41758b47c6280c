"""Fast creation of symbols for the sizes of real tensors, for common symbolic contexts.

``ShapeEnv.create_symbol`` of torch 2.13 renders log lines that are not printed, and proves that each
new symbol is greater than one, which its value range implies. Here the same entries are made in the
same order; other contexts and environments are left to torch.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import sympy
import torch

from torch_fakeify.compat.torch_dynamo import (
    LazyTraceHandler,
    TracingContext,
    dynamo_source,
    trace_log,
)
from torch_fakeify.compat.torch_symbols import (
    DimDynamic,
    ShapeEnv,
    StatefulSymbolicContext,
    StatelessSymbolicContext,
    SymNode,
    ValueRangesSLoc,
    experimental_config,
    make_size_symbol,
    register_symbol,
    shape_events_log,
)

if TYPE_CHECKING:
    from collections.abc import ItemsView, Sequence

    from torch_fakeify.compat.torch_dynamo import Source
    from torch_fakeify.compat.torch_symbols import SymbolicContext

_STATIC, _DUCK, _DYNAMIC = DimDynamic.STATIC, DimDynamic.DUCK, DimDynamic.DYNAMIC
_INFER_STRIDE = DimDynamic.INFER_STRIDE
Dims = tuple[DimDynamic, ...]
_Cache = dict[str, Any]
_new = object.__new__


def is_symbol_creation_observed(shape_env: Any) -> bool:
    """Whether a subclass, a log, a trace or a checkpoint sees how a ``ShapeEnv`` makes symbols."""
    return (
        type(shape_env) is not ShapeEnv
        or shape_env._translation_validation_enabled
        or (shape_env.should_record_events and not shape_env.is_recording)
        or shape_env.log.isEnabledFor(logging.INFO)
        or shape_events_log.isEnabledFor(logging.DEBUG)
        or hasattr(ShapeEnv.create_symbol, "takes_notes")
        or experimental_config.backed_size_oblivious
        or any(map(_writes, trace_log.handlers))
    )


def _writes(handler: logging.Handler) -> bool:
    """Whether a handler of torch's structured trace may write records.

    Torch's initial handler removes itself at the first record where no trace was requested; until
    something is compiled, it is still installed.
    """
    return not (
        type(handler) is LazyTraceHandler
        and handler.root_dir is None
        and hasattr(torch.version, "git_version")
        and os.getenv("MAST_HPC_JOB_NAME") is None
    )


class Geometry(NamedTuple):
    """Sizes, strides and storage offset in elements."""

    size: tuple[int | torch.SymInt, ...]
    stride: tuple[int | torch.SymInt, ...]
    storage_offset: int | torch.SymInt
    nbytes: dict[int, tuple[Any, int] | None] | None = None
    """Cache of the tensors of one layout: storage sizes in bytes, by the bytes of an element."""


class SizeEntry(NamedTuple):
    """A size, stride or offset for which a symbol was requested."""

    prop: Any
    dim: int | None
    value: int
    symbol: Any
    """A symbol, or an integer where the policy is static."""
    suffix: str
    """End of the name of its source, after the name of the tensor's source."""


class _Layout(NamedTuple):
    """Sizes, strides and storage offset that tensors of one policy share.

    Each is an integer, or an expression with its hint.
    """

    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    storage_offset: Any
    requests: tuple[SizeEntry, ...]
    """The requests for symbols in torch's order, without those of 0 and 1."""
    symbols: ItemsView[int, sympy.Symbol]
    """By their values."""
    version: int
    """Version of the ``ShapeEnv``'s replacements."""
    nbytes: dict[int, tuple[Any, int] | None]
    """As in `Geometry`."""


class _SymbolRequest(NamedTuple):
    """State shared by the requests for one tensor's symbols."""

    source: Any
    cache: _Cache | None
    """Of a stateful context, by the name of a source."""
    parts: list[SizeEntry]
    slocs: list[tuple[Any, Any]]
    """Source locations of this tensor's symbols, once one was made."""


class FreshSizes:
    """Makes symbols of one ``ShapeEnv``, equal to those that torch makes.

    Under a policy of duck sizes, the second tensor of a layout has the symbols of the first, with
    sources of its own.
    """

    def __init__(self, shape_env: ShapeEnv) -> None:
        self._env: Any = shape_env
        self._layouts: dict[Any, _Layout] = {}
        self._range: Any = None
        """Value range of every new symbol, once one was made."""
        self._own_slocs: tuple[Any, Any] | None = None
        """Source locations of its bounds without a ``TracingContext``."""
        self._ids = _UniqueIds(shape_env)
        sources = dynamo_source()
        self._property_source: Any = sources.TensorPropertySource
        self._property: Any = sources.TensorProperty

    def make(
        self,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        storage_offset: int,
        source: Source,
        context: SymbolicContext | None,
    ) -> Geometry | None:
        """Sizes, strides and storage offset, or ``None`` where torch has to make them.

        Method: ``ShapeEnv._create_symbolic_sizes_strides_storage_offset``, torch 2.13.
        """
        env, ndim = self._env, len(size)
        dims = (_DUCK,) * ndim if context is None else common_dims(context, ndim)
        if dims is None or is_symbol_creation_observed(env):
            return None
        cache: _Cache | None = None
        if type(context) is StatefulSymbolicContext:
            cache = context.shape_env_to_source_to_symbol_cache.setdefault(id(env), {})
            if cache:
                return None  # made before: torch looks its symbols up
        key = dims, size, stride, storage_offset
        layout = self._layouts.get(key)
        if (
            layout is not None
            and layout.version == env._replacements_version_counter
            and layout.symbols <= env.val_to_var.items()
        ):
            self._record_reuse(layout.requests, source, cache)
        else:
            layout = self._new_layout(size, stride, storage_offset, source, dims, cache)
            if _DYNAMIC not in dims:
                self._layouts[key] = layout
        number = self._number
        return Geometry(
            tuple([number(n) for n in layout.size]),
            tuple([number(n) for n in layout.stride]),
            number(layout.storage_offset),
            layout.nbytes,
        )

    def _number(self, n: Any) -> int | torch.SymInt:
        """An integer as it is, an expression with its hint as a new symbolic size."""
        return n if type(n) is int else torch.SymInt(SymNode(n[0], self._env, int, n[1]))

    def _new_layout(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        storage_offset: int,
        source: Source,
        dims: Dims,
        cache: _Cache | None,
    ) -> _Layout:
        rest = _STATIC if all(dim is _STATIC for dim in dims) else _DUCK
        prop = self._property
        request = _SymbolRequest(source, cache, [], [])
        sizes = [
            self._expr(n, kind, prop.SIZE, i, request)
            for i, (n, kind) in enumerate(zip(size, dims, strict=True))
        ]
        strides = self._strides(size, stride, sizes, rest, request)
        offset = self._expr(storage_offset, rest, prop.STORAGE_OFFSET, None, request)
        symbols = {part.value: part.symbol for part in request.parts if part.symbol.is_Symbol}
        return _Layout(
            tuple(map(_with_hint, sizes, size)),
            tuple(map(_with_hint, strides, stride)),
            _with_hint(offset, storage_offset),
            tuple(request.parts),
            symbols.items(),
            self._env._replacements_version_counter,
            {},
        )

    def _record_reuse(
        self, requests: tuple[SizeEntry, ...], source: Source, cache: _Cache | None
    ) -> None:
        """Record in the ``ShapeEnv`` that another tensor has the symbols of an earlier one.

        Args:
            requests: for the symbols of the earlier tensor.
            source: of the other tensor.
            cache: of a stateful context, by the name of a source.
        """
        for prop, dim, _, symbol, suffix in requests:
            part = self._part(source, prop, dim, suffix)
            if cache is not None:
                cache[part.name] = symbol
            if type(symbol) is sympy.Symbol:
                self._env.source_to_var[part.name] = symbol
                self._add_source(symbol, part)

    def _strides(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        sizes: Sequence[Any],
        kind: DimDynamic,
        request: _SymbolRequest,
    ) -> list[Any]:
        """Expressions of the strides, smallest first: a size times a stride where the hints agree."""
        made: list[Any] = [None] * len(size)
        products: dict[int, tuple[Any, Any]] = {}
        last = len(size) - 1
        for i in sorted(range(len(size)), key=lambda i: (stride[i], -i)):
            value = stride[i]
            follows = i != last and value == size[i + 1] * stride[i + 1]
            if value in (0, 1) and not follows:
                made[i] = sympy.Integer(value)
            elif value in products:
                made[i] = products[value][0] * products[value][1]
            else:
                made[i] = self._expr(value, kind, self._property.STRIDE, i, request)
            products[size[i] * value] = sizes[i], made[i]
        return made

    def _expr(
        self, value: int, kind: DimDynamic, prop: Any, index: int | None, request: _SymbolRequest
    ) -> Any:
        """The integer or symbol that ``ShapeEnv.create_symbol`` returns for a number."""
        env = self._env
        source, cache = request.source, request.cache
        if value in (0, 1) and kind is not _STATIC and env.specialize_zero_one:
            return sympy.Integer(value)
        suffix = _suffix(prop, index)
        if kind is _STATIC:
            out = sympy.Integer(value)
            if cache is not None:
                cache[source.name + suffix] = out
            request.parts.append(SizeEntry(prop, index, value, out, suffix))
            return out
        part = self._part(source, prop, index, suffix)
        duck = kind is _DUCK and env.duck_shape
        symbol = env.val_to_var.get(value) if duck else None
        if symbol is None:
            symbol = self._new_symbol(value, part, duck, request.slocs)
        else:
            env.source_to_var[part.name] = symbol
            self._add_source(symbol, part)
        if cache is not None:
            cache[part.name] = symbol
        request.parts.append(SizeEntry(prop, index, value, symbol, suffix))
        return symbol

    def _part(self, source: Any, prop: Any, index: int | None, suffix: str) -> Any:
        """The source of a size, stride or offset, with its name cached."""
        # Without the constructor, which takes most of the time for a size.
        part: Any = _new(self._property_source)
        fields = part.__dict__
        fields["base"] = source
        fields["prop"] = prop
        fields["idx"] = index
        fields["name"] = source.name + suffix
        return part

    def _new_symbol(self, value: int, source: Any, duck: bool, slocs: list[tuple[Any, Any]]) -> Any:
        env = self._env
        if self._range is None:
            self._range = _default_range(env.specialize_zero_one)
        if not slocs:
            slocs.append(self._slocs())
        symbol = make_size_symbol(self._ids.new(source.name))
        register_symbol(env, symbol)
        env.source_to_var[source.name] = symbol
        env.backed_var_to_val[symbol] = sympy.Integer(value)
        env.var_to_sources[symbol] = []
        if duck:
            env.val_to_var[value] = symbol
        env.var_to_range[symbol] = self._range
        env.var_to_range_sloc[symbol] = ValueRangesSLoc(*slocs[0])
        env.counter["create_symbol"] += 1
        self._add_source(symbol, source)
        return symbol

    def _slocs(self) -> tuple[Any, Any]:
        """Source locations of a symbol's bounds, with the user's line under a ``TracingContext``."""
        is_known = TracingContext.try_get() is not None
        if self._own_slocs is not None and not is_known:
            return self._own_slocs
        env = self._env
        reason = _lower_reason(env.specialize_zero_one)
        upper = env._get_sloc()
        found = env._get_sloc(reason) if isinstance(reason, str) else upper, upper
        if not is_known:
            self._own_slocs = found
        return found

    def _add_source(self, symbol: sympy.Symbol, source: Any) -> None:
        env = self._env
        sources = env.var_to_sources[symbol]
        sources.append(source)
        # A source that is not ephemeral comes first, since guards may refer to it.
        if sources[0].is_ephemeral() and not source.is_ephemeral():
            sources[0], sources[-1] = sources[-1], sources[0]
        env.symbol_guard_counter[symbol] = 0


def _with_hint(expr: Any, hint: int) -> Any:
    return int(expr) if isinstance(expr, sympy.Integer) else (expr, hint)


_suffixes: dict[tuple[int, int | None], str] = {}
"""Cache by the ``id`` of the property, since the hash of an enum is computed in Python."""


def _suffix(prop: Any, index: int | None) -> str:
    """End of the name of a size's, stride's or offset's source, after the tensor's name."""
    key = id(prop), index
    found = _suffixes.get(key)
    if found is None:
        sources = dynamo_source()
        example = sources.ConstantSource("x")
        name: str = sources.TensorPropertySource(example, prop, index).name
        found = _suffixes[key] = name.removeprefix(example.name)
    return found


class _UniqueIds:
    """The numbers in the names of a ``ShapeEnv``'s symbols, found without testing each used one.

    Torch starts at a hash of the source's name below 100 and takes the next unused number, so that
    numbers from 100 on are used in order.
    """

    def __init__(self, shape_env: ShapeEnv) -> None:
        self._env: Any = shape_env
        self._free = _STARTS

    def new(self, source_name: str) -> int:
        """A new number, equal to that of ``ShapeEnv._generate_unique_id``."""
        taken: set[int] = self._env.unique_ids
        found = int.from_bytes(hashlib.sha256(source_name.encode()).digest(), "big") % _STARTS
        if found in taken:
            if taken.issuperset(_FROM[found]):
                found = self._first_free(taken)
            else:
                while found in taken:
                    found += 1
        taken.add(found)
        return found

    def _first_free(self, taken: set[int]) -> int:
        free = self._free
        if free > _STARTS and free - 1 not in taken:  # a rollback gave numbers back
            free = _STARTS
        while free in taken:
            free += 1
        self._free = free
        return free


_STARTS = 100
_FROM = [frozenset(range(start, _STARTS)) for start in range(_STARTS)]
"""The numbers below 100 from each start on."""


@functools.cache
def _default_range(specialize_zero_one: bool) -> Any:
    """Value range of every new symbol."""
    env: Any = ShapeEnv(specialize_zero_one=specialize_zero_one)
    return env._default_value_range(False)


@functools.cache
def _lower_reason(specialize_zero_one: bool) -> Any:
    """Source location of the lower bound of an example's value range; no text if it has no reason."""
    env: Any = ShapeEnv(specialize_zero_one=specialize_zero_one)
    symbol = env.create_symbol(2, dynamo_source().ConstantSource("x"))
    return env.var_to_range_sloc[symbol].lower.framework_loc


def common_dims(context: Any, ndim: int) -> Dims | None:
    """Policies of the dims, or ``None`` if a symbolic context has other settings too."""
    kind = type(context)
    if kind is StatefulSymbolicContext:
        if context.excluded_sizes:
            return None
    elif kind is not StatelessSymbolicContext:
        return None
    if any(context.constraint_sizes) or any(context.constraint_strides):
        return None
    kinds, strides = context.dynamic_sizes, context.dynamic_strides
    if any(context.specialize_on) or not len(kinds) == len(strides) == ndim:
        return None
    if len(context.constraint_sizes) != ndim or len(context.constraint_strides) != ndim:
        return None
    if kinds.count(_DUCK) + kinds.count(_DYNAMIC) + kinds.count(_STATIC) != ndim:
        return None
    return tuple(kinds) if strides.count(_INFER_STRIDE) == ndim else None
