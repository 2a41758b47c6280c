"""Symbols for the sizes of real tensors by the common policies, without torch's detours.

``ShapeEnv.create_symbol`` of torch 2.13 renders log lines that nobody reads and proves that each new
symbol is greater than one, which its value range says. Here the same entries are made in the same
order; the first symbol of each ``ShapeEnv``, and whatever is unusual, is left to torch.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import sympy
import torch

from ._torch import (
    DimDynamic,
    ShapeEnv,
    StatefulSymbolicContext,
    StatelessSymbolicContext,
    SymNode,
    ValueRangesSLoc,
    dynamo_source,
    experimental_config,
    make_size_symbol,
    shape_events_log,
    trace_log,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._torch import Source, SymbolicContext

__all__ = ["FreshSizes", "symbols_are_watched"]

_STATIC, _DUCK, _DYNAMIC = DimDynamic.STATIC, DimDynamic.DUCK, DimDynamic.DYNAMIC
_INFER_STRIDE = DimDynamic.INFER_STRIDE
_Cache = dict[str, Any]


def symbols_are_watched(shape_env: Any) -> bool:
    """Whether somebody sees how a ``ShapeEnv`` makes symbols: a log, a trace, a checkpoint."""
    return (
        shape_env._translation_validation_enabled
        or (shape_env.should_record_events and not shape_env.is_recording)
        or experimental_config.backed_size_oblivious
        or bool(trace_log.handlers)
        or shape_env.log.isEnabledFor(logging.INFO)
        or shape_events_log.isEnabledFor(logging.DEBUG)
        or hasattr(ShapeEnv.create_symbol, "takes_notes")
    )


class FreshSizes:
    """Makes the symbols of one ``ShapeEnv``, equal to what torch's own code makes."""

    def __init__(self, shape_env: ShapeEnv) -> None:
        self._env: Any = shape_env
        self._lower_reason: Any = None
        """Why torch says that a size is at least two, once torch has made a symbol here."""
        self._has_example = False
        sources = dynamo_source()
        self._property_source: Any = sources.TensorPropertySource
        self._property: Any = sources.TensorProperty

    def make(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        storage_offset: int,
        source: Source,
        context: SymbolicContext | None,
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], Any] | None:
        """Sizes, strides and storage offset, or ``None`` where torch's own code has to make them.

        Method: ``ShapeEnv._create_symbolic_sizes_strides_storage_offset``, torch 2.13.
        """
        env = self._env
        ndim = len(size)
        if type(env) is not ShapeEnv or symbols_are_watched(env):
            return None
        cache: _Cache | None = None
        kinds: Sequence[DimDynamic] = (_DUCK,) * ndim
        if context is not None:
            if not _is_common(context, ndim):
                return None
            kinds = context.dynamic_sizes  # type: ignore[attr-defined]
            if type(context) is StatefulSymbolicContext:
                cache = context.shape_env_to_source_to_symbol_cache.setdefault(id(env), {})
                if cache:
                    return None  # made before: torch looks its symbols up
        rest = _STATIC if all(kind is _STATIC for kind in kinds) else _DUCK
        prop = self._property
        sizes = [
            self._expr(n, kind, source, prop.SIZE, i, cache)
            for i, (n, kind) in enumerate(zip(size, kinds, strict=True))
        ]
        strides = self._strides(size, stride, sizes, source, rest, cache)
        offset = self._expr(storage_offset, rest, source, prop.STORAGE_OFFSET, None, cache)
        return (
            tuple([self._wrap(expr, n) for expr, n in zip(sizes, size, strict=True)]),
            tuple([self._wrap(expr, n) for expr, n in zip(strides, stride, strict=True)]),
            self._wrap(offset, storage_offset),
        )

    def _strides(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        sizes: Sequence[Any],
        source: Source,
        kind: DimDynamic,
        cache: _Cache | None,
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
                factor, unit = products[value]
                made[i] = factor * unit
            else:
                made[i] = self._expr(value, kind, source, self._property.STRIDE, i, cache)
            products[size[i] * value] = sizes[i], made[i]
        return made

    def _expr(
        self,
        value: int,
        kind: DimDynamic,
        source: Source,
        prop: Any,
        index: int | None,
        cache: _Cache | None,
    ) -> Any:
        """The integer or the symbol for a number, as ``ShapeEnv.create_symbol`` chooses."""
        env = self._env
        if kind is _STATIC:
            out = sympy.Integer(value)
            if cache is not None:
                cache[self._property_source(source, prop, index).name] = out
            return out
        if value in (0, 1) and env.specialize_zero_one:
            return sympy.Integer(value)
        part = self._property_source(source, prop, index)
        duck = kind is _DUCK and env.duck_shape
        symbol = env.val_to_var.get(value) if duck else None
        if symbol is None:
            symbol = self._new_symbol(value, kind, part, duck)
        else:
            env.source_to_var[part.name] = symbol
            self._add_source(symbol, part)
        if cache is not None:
            cache[part.name] = symbol
        return symbol

    def _new_symbol(self, value: int, kind: DimDynamic, source: Any, duck: bool) -> Any:
        env = self._env
        if not self._has_example:
            symbol = env.create_symbol(value, source, dynamic_dim=kind)
            self._lower_reason = env.var_to_range_sloc[symbol].lower.framework_loc
            self._has_example = True
            return symbol
        here = env._get_sloc()
        symbol = make_size_symbol(env._generate_unique_id(source.name))
        env.source_to_var[source.name] = symbol
        env.backed_var_to_val[symbol] = sympy.Integer(value)
        env.var_to_sources[symbol] = []
        if duck:
            env.val_to_var[value] = symbol
        env.var_to_range[symbol] = env._default_value_range(False)
        reason = self._lower_reason
        lower = env._get_sloc(reason) if isinstance(reason, str) else env._get_sloc()
        env.var_to_range_sloc[symbol] = ValueRangesSLoc(lower, here)
        env.counter["create_symbol"] += 1
        self._add_source(symbol, source)
        return symbol

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


def _is_common(context: Any, ndim: int) -> bool:
    """Whether a symbolic context asks for nothing but which dims are dynamic."""
    kind = type(context)
    if kind is StatefulSymbolicContext:
        if context.excluded_sizes:
            return False
    elif kind is not StatelessSymbolicContext:
        return False
    if any(context.constraint_sizes) or any(context.constraint_strides):
        return False
    kinds, strides = context.dynamic_sizes, context.dynamic_strides
    if any(context.specialize_on) or not len(kinds) == len(strides) == ndim:
        return False
    if len(context.constraint_sizes) != ndim or len(context.constraint_strides) != ndim:
        return False
    for dim in kinds:
        if dim is not _DUCK and dim is not _DYNAMIC and dim is not _STATIC:
            return False
    return all(dim is _INFER_STRIDE for dim in strides)
