"""Symbols for the sizes of real tensors by the common policies, without torch's detours.

``ShapeEnv.create_symbol`` of torch 2.13 renders log lines that nobody reads and proves that each new
symbol is greater than one, which its value range says. Here the same entries are made in the same
order; whatever is unusual is left to torch.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import sympy
import torch

from ._torch import (
    DimDynamic,
    LazyTraceHandler,
    ShapeEnv,
    StatefulSymbolicContext,
    StatelessSymbolicContext,
    SymNode,
    TracingContext,
    ValueRangesSLoc,
    dynamo_source,
    experimental_config,
    make_size_symbol,
    note_symbol,
    shape_events_log,
    trace_log,
)
from .size_exprs import product, symbols_like

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._torch import Source, SymbolicContext

__all__ = [
    "Dims",
    "FreshGeometry",
    "FreshSizes",
    "Part",
    "common_dims",
    "reuse_is_watched",
    "symbols_are_watched",
]

_STATIC, _DUCK, _DYNAMIC = DimDynamic.STATIC, DimDynamic.DUCK, DimDynamic.DYNAMIC
_INFER_STRIDE = DimDynamic.INFER_STRIDE
Dims = tuple[DimDynamic, ...]
_Cache = dict[str, Any]
_new = object.__new__
_update: Any = dict.update
"""Also of a ``Counter``, which has an ``update`` of its own."""


def symbols_are_watched(shape_env: Any) -> bool:
    """Whether somebody sees how a ``ShapeEnv`` makes symbols: a log, a trace, a checkpoint."""
    return (
        reuse_is_watched(shape_env)
        or experimental_config.backed_size_oblivious
        or any(map(_writes, trace_log.handlers))
    )


def _writes(handler: logging.Handler) -> bool:
    """Whether a handler of torch's structured trace may write what it gets.

    Torch begins with one that, where nobody asked for a trace, only takes itself away when the first
    record comes. In a process that has compiled nothing yet it is still there.
    """
    return not (
        type(handler) is LazyTraceHandler
        and handler.root_dir is None
        and hasattr(torch.version, "git_version")
        and os.getenv("MAST_HPC_JOB_NAME") is None
    )


def reuse_is_watched(shape_env: Any) -> bool:
    """Whether somebody sees that a size of a ``ShapeEnv`` gets the symbol of an equal one."""
    return (
        shape_env._translation_validation_enabled
        or (shape_env.should_record_events and not shape_env.is_recording)
        or shape_env.log.isEnabledFor(logging.INFO)
        or shape_events_log.isEnabledFor(logging.DEBUG)
        or hasattr(ShapeEnv.create_symbol, "takes_notes")
    )


class Part(NamedTuple):
    """A size, stride or offset that torch was asked a symbol for."""

    prop: Any
    dim: int | None
    value: int
    symbol: Any
    """An integer where the policy says that it is static."""
    suffix: str
    """Of the name of its source, after that of the tensor's."""


class FreshGeometry(NamedTuple):
    """Sizes, strides and storage offset of a tensor, and which of them torch asks a symbol for."""

    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    storage_offset: Any
    parts: tuple[Part, ...]
    """In the order in which it asks; without those of 0 and 1."""
    exprs: tuple[Sequence[Any], Sequence[Any]]
    """Of the sizes and of the strides."""


class _Asked(NamedTuple):
    """What one tensor's symbols have in common."""

    source: Any
    cache: _Cache | None
    """Of a stateful context, by the name of a source."""
    parts: list[Part]
    slocs: list[tuple[Any, Any]]
    """Where the symbols of this tensor come from, once one was made."""


class FreshSizes:
    """Makes the symbols of one ``ShapeEnv``, equal to what torch's own code makes."""

    def __init__(self, shape_env: ShapeEnv) -> None:
        self._env: Any = shape_env
        self._range: Any = None
        """Of every symbol, once one was made."""
        self._own_slocs: tuple[Any, Any] | None = None
        """Where its bounds come from while there is no ``TracingContext``."""
        self._ids = _UniqueIds(shape_env)
        sources = dynamo_source()
        self._property_source: Any = sources.TensorPropertySource
        self._property: Any = sources.TensorProperty
        self._lasting: dict[int, Any] = {}
        """First sources of symbols that are known to last, by ``id``."""

    def make(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        storage_offset: int,
        source: Source,
        context: SymbolicContext | None,
    ) -> FreshGeometry | None:
        """Sizes, strides and storage offset, or ``None`` where torch's own code has to make them.

        Method: ``ShapeEnv._create_symbolic_sizes_strides_storage_offset``, torch 2.13.
        """
        ndim = len(size)
        dims = (_DUCK,) * ndim if context is None else common_dims(context, ndim)
        if dims is None:
            return None
        return self.make_dims(size, stride, storage_offset, source, dims, context)

    def make_dims(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        storage_offset: int,
        source: Source,
        dims: Dims,
        context: object,
    ) -> FreshGeometry | None:
        """The same where the context asks for no more than which dims are dynamic.

        Args:
            size: the sizes.
            stride: the strides.
            storage_offset: the storage offset.
            source: of the tensor.
            dims: which of them are dynamic.
            context: keeps the symbols if it is stateful.
        """
        env = self._env
        if type(env) is not ShapeEnv or symbols_are_watched(env):
            return None
        cache = self.cache_of(context)
        if cache:
            return None  # made before: torch looks its symbols up
        rest = _STATIC if all(dim is _STATIC for dim in dims) else _DUCK
        remember_name(source)
        prop = self._property
        asked = _Asked(source, cache, [], [])
        sizes = [
            self._expr(n, kind, prop.SIZE, i, asked)
            for i, (n, kind) in enumerate(zip(size, dims, strict=True))
        ]
        strides = self._strides(size, stride, sizes, rest, asked)
        offset = self._expr(storage_offset, rest, prop.STORAGE_OFFSET, None, asked)
        return FreshGeometry(
            tuple([self._wrap(expr, n) for expr, n in zip(sizes, size, strict=True)]),
            tuple([self._wrap(expr, n) for expr, n in zip(strides, stride, strict=True)]),
            self._wrap(offset, storage_offset),
            tuple(asked.parts),
            (sizes, strides),
        )

    def cache_of(self, context: Any) -> _Cache | None:
        """Where a stateful context keeps symbols of this environment, by the name of a source.

        For symbols that nobody watches: a checkpoint notes what a context had before it got this.
        """
        if type(context) is not StatefulSymbolicContext:
            return None
        return context.shape_env_to_source_to_symbol_cache.setdefault(id(self._env), {})

    def again(
        self,
        parts: tuple[Part, ...],
        symbolic: tuple[Part, ...],
        counts: dict[Any, int],
        source: Source,
        cache: dict[str, Any] | None,
    ) -> None:
        """What the ``ShapeEnv`` notes of another tensor with these symbols.

        Args:
            parts: of the first tensor.
            symbolic: those of them that are symbols.
            counts: a zero for each of the symbols.
            source: of the other tensor.
            cache: of a stateful context, by the name of a source.
        """
        env = self._env
        symbol_of, sources_of = env.source_to_var, env.var_to_sources
        lasting, cls = self._lasting, self._property_source
        lasts = not source.is_ephemeral()
        source_name = source.__dict__.get("name")
        if source_name is None:
            remember_name(source)
            source_name = source.name
        if cache is not None:
            for each in parts:
                cache[source_name + each.suffix] = each.symbol
        for prop, dim, _, symbol, suffix in symbolic:
            # As `_part`, in place.
            part: Any = _new(cls)
            fields = part.__dict__
            fields["base"] = source
            fields["prop"] = prop
            fields["idx"] = dim
            fields["name"] = name = source_name + suffix
            symbol_of[name] = symbol
            known = sources_of[symbol]
            known.append(part)
            if lasts and id(first := known[0]) not in lasting:
                if first.is_ephemeral():
                    known[0], known[-1] = part, first
                else:
                    lasting[id(first)] = first
        # From one dictionary to another no symbol is asked for its hash.
        _update(env.symbol_guard_counter, counts)

    def _strides(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        sizes: Sequence[Any],
        kind: DimDynamic,
        asked: _Asked,
    ) -> list[Any]:
        """From the smallest stride on, each is a size times a stride where the numbers agree."""
        made: list[Any] = [None] * len(size)
        products: dict[int, tuple[Any, Any]] = {}
        last = len(size) - 1
        for i in sorted(range(len(size)), key=lambda i: (stride[i], -i)):
            value = stride[i]
            follows = i != last and value == size[i + 1] * stride[i + 1]
            if value in (0, 1) and not follows:
                made[i] = sympy.Integer(value)
            elif value in products:
                made[i] = product(*products[value])
            else:
                made[i] = self._expr(value, kind, self._property.STRIDE, i, asked)
            products[size[i] * value] = sizes[i], made[i]
        return made

    def _expr(
        self, value: int, kind: DimDynamic, prop: Any, index: int | None, asked: _Asked
    ) -> Any:
        """The integer or the symbol for a number, as ``ShapeEnv.create_symbol`` chooses."""
        env = self._env
        source, cache = asked.source, asked.cache
        if value in (0, 1) and kind is not _STATIC and env.specialize_zero_one:
            return sympy.Integer(value)
        suffix = _suffix(prop, index)
        if kind is _STATIC:
            out = sympy.Integer(value)
            if cache is not None:
                cache[source.name + suffix] = out
            asked.parts.append(Part(prop, index, value, out, suffix))
            return out
        part = self._part(source, prop, index, suffix)
        duck = kind is _DUCK and env.duck_shape
        symbol = env.val_to_var.get(value) if duck else None
        if symbol is None:
            symbol = self._new_symbol(value, part, duck, asked.slocs)
        else:
            env.source_to_var[part.name] = symbol
            self._add_source(symbol, part)
        if cache is not None:
            cache[part.name] = symbol
        asked.parts.append(Part(prop, index, value, symbol, suffix))
        return symbol

    def _part(self, source: Any, prop: Any, index: int | None, suffix: str) -> Any:
        """The source of a size, stride or offset, which knows its name."""
        # Without the constructor, which takes longest of all that is done for a size.
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
        symbol = _symbol(self._ids.new(source.name))
        note_symbol(env, symbol)
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
        """Where the bounds of a symbol come from: these lines, and the user's where he is known."""
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
        known = env.var_to_sources[symbol]
        known.append(source)
        # A source that lasts stands first: guards may be on it.
        if known[0].is_ephemeral() and not source.is_ephemeral():
            known[0], known[-1] = known[-1], known[0]
        env.symbol_guard_counter[symbol] = 0

    def _wrap(self, expr: Any, hint: int) -> Any:
        if isinstance(expr, sympy.Integer):
            return int(expr)
        return torch.SymInt(SymNode(expr, self._env, int, hint))


_suffixes: dict[tuple[int, int | None], str] = {}
"""By the ``id`` of the property: an enum finds its name or hash in Python."""


def _suffix(prop: Any, index: int | None) -> str:
    """What torch adds to the name of a tensor for that of a size, stride or offset."""
    key = id(prop), index
    found = _suffixes.get(key)
    if found is None:
        sources = dynamo_source()
        example = sources.ConstantSource("x")
        name: str = sources.TensorPropertySource(example, prop, index).name
        found = _suffixes[key] = name.removeprefix(example.name)
    return found


def remember_name(source: Any) -> None:
    """Find the name of a source without the lock that ``cached_property`` takes before Python 3.12."""
    known = source.__dict__
    if "name" in known:
        return
    if "base" in known:
        remember_name(known["base"])
    cls = type(source)
    for attribute in ("_name_template", "name"):
        found = getattr(cls, attribute)
        if type(found) is functools.cached_property and attribute not in known:
            known[attribute] = found.func(source)


_MOST_SHARED = 300
"""So many symbols are sympy's own: it keeps the thousand that it made last, and expressions over them,
and equal ones of two environments should be one object in it. Beyond that they would only push one
another out."""

_EXAMPLE = make_size_symbol(_MOST_SHARED)
_unshared = symbols_like(_EXAMPLE)
_PREFIX = _EXAMPLE.name.removesuffix(str(_MOST_SHARED))


def _symbol(number: int) -> Any:
    if number < _MOST_SHARED or _unshared is None:
        return make_size_symbol(number)
    return _unshared(f"{_PREFIX}{number}")


class _UniqueIds:
    """The numbers in the names of a ``ShapeEnv``'s symbols, found without trying each that is taken.

    Torch starts at a number below 100 that the source's name gives, and takes the next that is free.
    So those from 100 on are taken in order, and the first free one of them only moves up.
    """

    def __init__(self, shape_env: ShapeEnv) -> None:
        self._env: Any = shape_env
        self._free = _STARTS

    def new(self, source_name: str) -> int:
        """As ``ShapeEnv._generate_unique_id``."""
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
"""The numbers below 100 that are tried from each on."""


@functools.cache
def _default_range(specialize_zero_one: bool) -> Any:
    """Of every new symbol."""
    env: Any = ShapeEnv(specialize_zero_one=specialize_zero_one)
    return env._default_value_range(False)


@functools.cache
def _lower_reason(specialize_zero_one: bool) -> Any:
    """Why torch says that a size is at least two, as it says it of an example; no text if it does not."""
    env: Any = ShapeEnv(specialize_zero_one=specialize_zero_one)
    symbol = env.create_symbol(2, dynamo_source().ConstantSource("x"))
    return env.var_to_range_sloc[symbol].lower.framework_loc


def common_dims(context: Any, ndim: int) -> Dims | None:
    """Which dims are dynamic, if that is all that a symbolic context asks for."""
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
    for dim in kinds:
        if dim is not _DUCK and dim is not _DYNAMIC and dim is not _STATIC:
            return None
    return tuple(kinds) if all(dim is _INFER_STRIDE for dim in strides) else None
