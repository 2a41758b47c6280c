"""Sizes, strides and storage offset of a record as integers or symbols of a ``ShapeEnv``.

Method: ``sym_sizes_strides_storage_offset`` of torch 2.13's ``MetaConverter``, over records. Torch
makes symbols of the integers of a real tensor by the policy. A fake tensor may have symbols of
another ``ShapeEnv``; each becomes one new symbol, so that shared symbols and expressions survive.
Torch's ``transfer_symbols_from_foreign_shape_env`` makes new symbols of the hints instead, which
unifies symbols of equal hints and loses expressions.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec
import sympy
import torch

from torch_fakeify.compat.torch_dynamo import dynamo_source
from torch_fakeify.compat.torch_symbols import (
    DimDynamic,
    ShapeEnv,
    SingletonInt,
    StatelessSymbolicContext,
    SymNode,
    ValueRanges,
    int_oo,
    is_float_symbol,
    make_nested_int,
    make_sym,
    narrow_range,
)
from torch_fakeify.encoding.exprs import decode_expr
from torch_fakeify.errors import ConvertError
from torch_fakeify.records.tensor import NestedIntDesc, SymDesc

from .size_symbols import FreshSizes, Geometry, is_symbol_creation_observed

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_fakeify.compat.torch_dynamo import Source
    from torch_fakeify.compat.torch_symbols import SymbolicContext
    from torch_fakeify.encoding.nested_ints import NestedInts
    from torch_fakeify.records.tensor import ExprDesc, IntLike, MetaTensorDesc, SymbolFactDesc

SymbolPolicy = Literal["fresh", "keep"]


class HasSymbols(Protocol):
    """A record with the facts of its symbols, all of one ``ShapeEnv``."""

    @property
    def symbols(self) -> tuple[SymbolFactDesc, ...]:
        """Facts of the ``ShapeEnv`` about its symbols."""
        ...


def concrete_int(n: IntLike, where: str) -> int:
    """The integer, or the hint of a symbolic size.

    Raises:
        ConvertError: it is symbolic and has no hint.
    """
    if isinstance(n, int):
        return n
    if isinstance(n, NestedIntDesc) or isinstance(n.hint, NestedIntDesc):
        raise ConvertError("a ragged size has no integer value", where=where, found="a nested int")
    if not isinstance(n.hint, int):
        raise ConvertError(
            "an unbacked size has no integer value",
            where=where,
            fix="Convert with a FakeTensorMode that has a ShapeEnv",
        )
    return n.hint


def is_symbolic(d: MetaTensorDesc) -> bool:
    """Whether a size, stride or the storage offset of the record is symbolic."""
    return not are_ints(*d.size, *d.stride, d.storage_offset)


def are_ints(*numbers: object) -> bool:
    """Whether all numbers are Python integers, none of them symbolic."""
    return _INT.issuperset(map(type, numbers))


_INT = frozenset((int,))


def with_strides(d: MetaTensorDesc) -> MetaTensorDesc:
    """The record of a sparse tensor with contiguous strides, which it has none of."""
    stride = [1] * d.ndim
    for dim in range(d.ndim - 1, 0, -1):
        n = d.size[dim]
        hint = n if isinstance(n, int) else n.hint if isinstance(n, SymDesc) else None
        stride[dim - 1] = stride[dim] * max(hint, 1) if isinstance(hint, int) else 1
    return msgspec.structs.replace(d, stride=tuple(stride), storage_offset=0)


def all_static(d: MetaTensorDesc) -> SymbolicContext:
    """The symbolic context in which every dim is static."""
    return StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.STATIC] * d.ndim,
        constraint_sizes=[None] * d.ndim,
        view_base_context=None if d.base is None else all_static(d.base),
    )


def _has_nested(d: MetaTensorDesc) -> bool:
    return any(isinstance(n, NestedIntDesc) for n in (*d.size, *d.stride, d.storage_offset))


class SizeMaker:
    """Makes the integers and symbols of one ``ShapeEnv`` for records.

    A symbol in two records becomes one symbol in the ``ShapeEnv``. Symbols of equal names from two
    environments are distinguished by the describer's id of each environment.
    """

    def __init__(
        self,
        shape_env: ShapeEnv,
        policy: SymbolPolicy,
        *,
        nested: NestedInts | None = None,
    ) -> None:
        self._env: Any = shape_env
        self._nested = nested
        self.fresh = None if policy == "keep" else FreshSizes(shape_env)
        self._policy = policy
        # By the describer's id of the symbols' ShapeEnv. Each with its creation token: after a
        # rollback another symbol may have its name.
        self._carried: dict[int, dict[sympy.Symbol, tuple[Any, object]]] = {}
        self._existing_envs: set[int] = set()
        # Expressions over backed symbols by the id of a record, with a strong reference to it.
        self._decoded: dict[int, tuple[ExprDesc, Any]] = {}
        self._caches_exprs = not is_symbol_creation_observed(shape_env)

    def geometry(
        self, d: MetaTensorDesc, source: Source, context: SymbolicContext | None
    ) -> Geometry:
        """The sizes, strides and storage offset of a record.

        Raises:
            ConvertError: a symbol of the record is not in the ShapeEnv (``"keep"``) or has no facts.
        """
        if self._uses_existing(d):
            return self.existing_geometry(d)
        if not is_symbolic(d):
            if d.is_fake and context is None:
                return Geometry(d.size, d.stride, d.storage_offset)  # type: ignore[arg-type]
            return self._by_policy(d, d.size, d.stride, d.storage_offset, source, context)
        if _has_nested(d):  # a jagged tensor, which was no fake
            number: Callable[[IntLike], Any] = self._live
        elif context is None or self._has_unbacked(d, context):
            return self._carry_over(d, source, context)
        else:
            number = partial(concrete_int, where=source.name)
        size, stride = tuple(map(number, d.size)), tuple(map(number, d.stride))
        return self._by_policy(d, size, stride, number(d.storage_offset), source, context)

    def _live(self, n: Any) -> Any:
        """A number or hint of a record; a nested int becomes one of this process."""
        if not isinstance(n, NestedIntDesc):
            return n
        assert self._nested is not None
        return self._nested.make(n)

    def use_symbols_of(self, env_id: int) -> None:
        """Leave the symbols of an environment unchanged, by the describer's id of it."""
        self._existing_envs.add(env_id)

    def cache_expression(self, d: ExprDesc, expr: sympy.Basic) -> None:
        """Cache the expression of a record, over symbols of this ``ShapeEnv``.

        Torch compares expressions often, which is slowest for two equal objects.
        """
        if self._caches_exprs:
            self._decoded[id(d)] = d, expr

    def _uses_existing(self, d: HasSymbols) -> bool:
        return self._policy == "keep" or (
            bool(d.symbols) and d.symbols[0].shape_env in self._existing_envs
        )

    def scalar(self, sym: SymDesc, d: HasSymbols, source: Source) -> Any:
        """A symbolic scalar of a fake tensor's record, such as its ``item()``.

        Args:
            sym: the scalar.
            d: the record with the facts of its symbols.
            source: of the tensor whose ``item()`` is the scalar.

        Raises:
            ConvertError: as `geometry`.
        """
        item_source = dynamo_source().CallMethodItemSource(source)
        expr = self.expression(decode_expr(sym.expr), d, item_source, where=source.name)
        if sym.kind == "float":
            return self._env.create_symfloatnode(expr, hint=sym.hint)
        if sym.kind == "bool":
            return self._env.create_symboolnode(expr)
        return self._env.create_symintnode(expr, hint=self._live(sym.hint))

    def expression(
        self, expr: Any, d: HasSymbols, source: Source | None = None, *, where: str = "expression"
    ) -> Any:
        """Replace the symbols of a record in an expression by those of the ``ShapeEnv``.

        Args:
            expr: the expression.
            d: the record with the facts of its symbols.
            source: of its value, if it is a symbol that no input has.
            where: names it in an error.

        Raises:
            ConvertError: as `geometry`.
        """
        if self._uses_existing(d):
            return self._check_existing(expr, where)
        return self._carry(expr, d, source)

    def carry(self, d: MetaTensorDesc, numbers: tuple[IntLike, ...]) -> tuple[Any, ...]:
        """Numbers of a record that have no source among the inputs, such as a storage's size.

        Raises:
            ConvertError: as `geometry`.
        """
        unknown = dynamo_source().ConstantSource(f"__fakeify_tensor{d.id}")

        def number(n: IntLike) -> Any:
            if not isinstance(n, SymDesc):
                return self._live(n)
            expr = self.expression(decode_expr(n.expr), d, unknown, where="storage")
            is_existing = self._uses_existing(d)
            hint = self._existing_hint(expr, n.hint) if is_existing else self._live(n.hint)
            return self._env.create_symintnode(expr, hint=hint)

        return tuple([number(n) for n in numbers])

    # --- by the policy --------------------------------------------------------------------------

    def _by_policy(
        self,
        d: MetaTensorDesc,
        size: tuple[Any, ...],
        stride: tuple[Any, ...],
        offset: Any,
        source: Source,
        context: SymbolicContext | None,
    ) -> Geometry:
        overrides = None if d.marks is None else dict(d.marks.hint_overrides)
        if self.fresh is not None and not overrides and are_ints(*size, *stride, offset):
            fresh = self.fresh.make(size, stride, offset, source, context)
            if fresh is not None:
                return fresh
        made = self._env._create_symbolic_sizes_strides_storage_offset(
            size,
            stride,
            offset,
            [False] * len(size),
            source,
            symbolic_context=context,
            hint_overrides=overrides,
        )
        return Geometry(*made)

    @staticmethod
    def _has_unbacked(d: MetaTensorDesc, context: SymbolicContext) -> bool:
        assert isinstance(context, StatelessSymbolicContext)
        return DimDynamic.UNBACKED in context.dynamic_sizes or any(
            isinstance(n, SymDesc) and n.hint is None
            for n in (*d.size, *d.stride, d.storage_offset)
        )

    # --- existing symbols -----------------------------------------------------------------------

    def existing_geometry(self, d: MetaTensorDesc) -> Geometry:
        """Sizes, strides and offset over the symbols of the record, which the ``ShapeEnv`` has.

        Raises:
            ConvertError: it has not.
        """
        if not is_symbolic(d):
            return Geometry(d.size, d.stride, d.storage_offset)  # type: ignore[arg-type]

        def existing(n: IntLike) -> Any:
            if isinstance(n, int):
                return n
            if isinstance(n, NestedIntDesc):
                return self._live(n)
            cached = self._decoded.get(id(n.expr))
            if cached is not None and type(n.hint) is int:
                return torch.SymInt(SymNode(cached[1], self._env, int, n.hint))
            expr = (
                cached[1] if cached else self._check_existing(decode_expr(n.expr), f"tensor {d.id}")
            )
            hint = self._existing_hint(expr, n.hint)
            if hint is None and not isinstance(expr, sympy.Integer):
                return make_sym("int", expr, self._env, None)
            made = self._env.create_symintnode(expr, hint=hint)
            if self._caches_exprs and isinstance(made, torch.SymInt) and made.node.hint is not None:
                # A symbol stays in its ShapeEnv, so the cached expression remains valid.
                self._decoded[id(n.expr)] = n.expr, expr
            return made

        return Geometry(
            tuple([existing(n) for n in d.size]),
            tuple([existing(n) for n in d.stride]),
            existing(d.storage_offset),
        )

    def _existing_hint(self, expr: Any, hint: Any) -> Any:
        if not isinstance(hint, NestedIntDesc):
            return hint
        # The ShapeEnv's own nested int of the symbol, so that others compare equal.
        symbols = {s: self._env.backed_var_to_val[s] for s in expr.free_symbols}
        nested = next((v for v in symbols.values() if isinstance(v, SingletonInt)), None)
        return self._live(hint) if nested is None else make_nested_int(int(nested._val), hint.coeff)

    def _check_existing(self, expr: Any, where: str) -> Any:
        for symbol in sorted(expr.free_symbols, key=str):
            if symbol not in self._env.var_to_range and symbol not in self._env.backed_var_to_val:
                raise ConvertError(
                    f"the symbol `{symbol}` is not in the ShapeEnv",
                    where=where,
                    expected="a ShapeEnv that was restored together with the record",
                    found=f"an expression over {symbol}",
                    fix='Convert with symbols="fresh", or restore the ShapeEnv of the record',
                )
        return expr

    # --- symbols of another ShapeEnv ------------------------------------------------------------

    def _carry_over(
        self, d: MetaTensorDesc, source: Source, context: SymbolicContext | None
    ) -> Geometry:
        """The record's sizes, strides and offset over new symbols of this ``ShapeEnv``."""
        sources = dynamo_source()
        prop, prop_source = sources.TensorProperty, sources.TensorPropertySource

        # Dims that are a symbol first: the symbol's source is then a plain size.
        parts: list[tuple[IntLike, Source, int | None]] = [
            (n, prop_source(source, prop.SIZE, i), i) for i, n in enumerate(d.size)
        ]
        parts += [(n, prop_source(source, prop.STRIDE, i), None) for i, n in enumerate(d.stride)]
        parts.append((d.storage_offset, prop_source(source, prop.STORAGE_OFFSET), None))
        exprs = [
            decode_expr(n.expr) if isinstance(n, SymDesc) else sympy.Integer(n) for n, _, _ in parts
        ]
        for expr, (_, part_source, dim) in zip(exprs, parts, strict=True):
            if isinstance(expr, sympy.Symbol):
                self._carry_symbol(expr, d, part_source, context, dim)
        made: list[Any] = []
        for expr, (n, part_source, dim) in zip(exprs, parts, strict=True):
            assert not isinstance(n, NestedIntDesc)
            hint = n if isinstance(n, int) else self._live(n.hint)
            new = self._carry(expr, d, part_source)
            out = self._env.create_symintnode(new, hint=hint, source=part_source)
            self._override_hint(d, dim, out)
            made.append(out)
        ndim = d.ndim
        return Geometry(tuple(made[:ndim]), tuple(made[ndim : 2 * ndim]), made[-1])

    def _override_hint(self, d: MetaTensorDesc, dim: int | None, n: Any) -> None:
        if dim is None or d.marks is None or isinstance(n, int):
            return
        override = dict(d.marks.hint_overrides).get(dim)
        if override is not None:
            self._env.var_to_hint_override[n.node.expr] = override

    def _carry(self, expr: Any, d: HasSymbols, source: Source | None) -> Any:
        """The expression over symbols of this ``ShapeEnv``, which makes missing ones."""
        if isinstance(expr, sympy.Symbol):
            return self._carry_symbol(expr, d, source, None, None)
        return expr.xreplace(
            {
                symbol: self._carry_symbol(symbol, d, None, None, None)
                for symbol in sorted(expr.free_symbols, key=str)
            }
        )

    def _carry_symbol(
        self,
        symbol: sympy.Symbol,
        d: HasSymbols,
        source: Source | None,
        context: SymbolicContext | None,
        dim: int | None,
    ) -> Any:
        """The symbol of this ``ShapeEnv`` for one of a record, made at first use.

        Args:
            symbol: of the record.
            d: the record with its facts.
            source: of the value; ``None`` where no input has it.
            context: the policy of the tensor.
            dim: with this size.
        """
        fact = next((fact for fact in d.symbols if fact.name == symbol.name), None)
        if fact is None:
            raise ConvertError(
                f"the record has no facts of the symbol `{symbol}`",
                where=None if source is None else source.name,
                expected="an entry in the record's `symbols`",
                found=", ".join(fact.name for fact in d.symbols) or "none",
            )
        carried = self._carried.setdefault(fact.shape_env, {})
        cached = carried.get(symbol)
        if cached is not None and cached[1] is self._creation_token(cached[0]):
            return cached[0]
        if source is None:
            # It is not a dim of this tensor, so no input has its value.
            source = self._unknown_source(symbol.name)
        unbacked = fact.hint is None
        if context is not None and dim is not None:
            assert isinstance(context, StatelessSymbolicContext)
            unbacked = unbacked or context.dynamic_sizes[dim] is DimDynamic.UNBACKED
        if unbacked:
            new = self._unbacked(symbol, source, context, dim, fact)
        else:
            ragged = isinstance(fact.hint, NestedIntDesc)
            new = self._env.create_symbol(
                self._live(fact.hint),
                source,
                # Other sizes of this nested int are the same symbol.
                dynamic_dim=DimDynamic.DUCK if ragged else DimDynamic.DYNAMIC,
                positive=True if symbol.is_positive else None,
                do_not_specialize_zero_one=fact.lower is None or fact.lower < 2,
            )
        carried[symbol] = new, self._creation_token(new)
        if fact.size_like:  # also of a backed symbol that replaced an unbacked one
            self._env.size_like.add(new)
        if isinstance(new, sympy.Symbol) and new in self._env.var_to_range:
            self._narrow(new, fact)
        return new

    def _creation_token(self, symbol: Any) -> object:
        """An object that identifies the creation of a symbol; ``None`` for a number."""
        sources = self._env.var_to_sources.get(symbol)
        return self._env.var_to_stack.get(symbol) if sources is None else sources

    def _unknown_source(self, name: str) -> Source:
        """A source with an unused name."""
        sources, prefix = dynamo_source(), f"__fakeify_{name}"
        for i in itertools.count():
            source = sources.ConstantSource(prefix if i == 0 else f"{prefix}_{i}")
            if source.name not in self._env.source_to_var:
                return source
        raise AssertionError

    def _unbacked(
        self,
        symbol: sympy.Symbol,
        source: Source,
        context: SymbolicContext | None,
        dim: int | None,
        fact: SymbolFactDesc,
    ) -> Any:
        if context is not None and dim is not None:
            # With the policy's shape ids and bounds.
            return self._env.create_symbol(
                fact.hint, source, dynamic_dim=DimDynamic.UNBACKED, symbolic_context=context
            )
        if is_float_symbol(symbol):
            new = self._env.create_unbacked_symfloat().node.expr
        else:
            new = self._env.create_unbacked_symint(source).node.expr
        if fact.size_like:
            self._env._constrain_range_for_size(new)
        self._env.unbacked_inputs.add(new)
        return new

    def _narrow(self, symbol: sympy.Symbol, fact: SymbolFactDesc) -> None:
        """Apply the recorded value range and hint override to a new symbol."""
        if self._env.var_to_range[symbol].is_int:
            lower = -int_oo if fact.lower is None else fact.lower
            upper = int_oo if fact.upper is None else fact.upper
            narrow_range(self._env, symbol, ValueRanges(lower, upper))
        if fact.hint_override is not None:
            self._env.var_to_hint_override[symbol] = fact.hint_override
