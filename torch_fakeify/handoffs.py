"""The handoff: a compiler backend gets a fresh ``ShapeEnv``, and what it learns there comes back.

Dynamo hands a backend a new ``FakeTensorMode`` with the ``ShapeEnv`` that it traced with. Here the
inputs are described, rebuilt in a ``ShapeEnv`` that has learned the facts (`fresh_env.FreshEnv`), and
the backend runs with these. Symbols of both environments correspond by source, so each guard, value
range, replacement, divisibility and runtime assert that the backend adds is stated in Dynamo's own
environment, from which Dynamo then makes the guards of the frame.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import sympy
import torch

from . import _torch
from .backend import backend_name
from .convert import MetaConverter
from .describe import MetaTensorDescriber
from .errors import CaptureError, ShapeEnvError
from .expr_nodes import strip_marked
from .exprs import decode_expr, encode_expr
from .fake_modes import describe_fake_mode, make_fake_mode
from .frame_inputs import describe_inputs
from .fresh_env import FreshEnv, caused_by
from .renaming import rename_symbols
from .sizes import narrow_range

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from .desc import SymbolNode
    from .desc_frame import InputDesc

__all__ = ["Handoff", "fakeify", "handed_over", "handoff"]

_OWN = frozenset({"fake_mode", "tensor_to_context"})
"""What a context does not share with the one that Dynamo has."""


class Handoff:
    """A Dynamo backend that gives another one a fresh fake mode with a fresh ``ShapeEnv``."""

    def __init__(self, inner: str | Callable[..., Any] = "inductor") -> None:
        self.inner = inner
        self.__name__ = f"handoff({backend_name(inner)})"

    def __call__(
        self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Any:
        """Compile one frame with the inner backend.

        Raises:
            CaptureError: no frame is being traced, or an input cannot be rebuilt.
            ShapeEnvError: the backend assumed something that has no place in Dynamo's environment.
        """
        context = _torch.TracingContext.try_get()
        if context is None or context.fake_mode is None or context.fake_mode.shape_env is None:
            raise CaptureError(
                "a handoff takes place where Dynamo calls a backend",
                expected="a TracingContext with a fake mode and a ShapeEnv",
                found="none",
                fix="Use it as torch.compile(f, backend=torch_fakeify.handoff(...))",
            )
        inner = _torch.resolve_backend(self.inner)
        placeholders = gm.graph.find_nodes(op="placeholder")
        values = [fx_node.meta.get("example_value") for fx_node in placeholders]
        describer = MetaTensorDescriber(keep_nested_ints=True)
        env = context.fake_mode.shape_env
        records = describe_inputs(placeholders, example_inputs, describer, env)
        with handed_over(gm, records, values, example_inputs, context) as inputs:
            return inner(gm, inputs, **kwargs)


def handoff(inner: str | Callable[..., Any] = "inductor") -> Handoff:
    """A Dynamo backend: ``torch.compile(f, backend=handoff("inductor"))``.

    Args:
        inner: the backend that compiles, by name or callable.
    """
    return Handoff(inner)


fakeify = Handoff("inductor")
"""The backend that Dynamo finds under this name."""


@contextmanager
def handed_over(
    gm: torch.fx.GraphModule,
    records: Sequence[InputDesc],
    values: Sequence[Any],
    example_inputs: Sequence[Any],
    context: Any,
) -> Generator[list[Any], None, None]:
    """Around a backend: gives it inputs in fresh state; what it has learned comes back at the end.

    Args:
        gm: the graph. Its placeholders get the fresh inputs as their values.
        records: the inputs as they were when the frame began, over the symbols of the frontend.
        values: the frontend's own fake values of the inputs.
        example_inputs: what the context knows the inputs by; constants are taken from here.
        context: the frontend's ``TracingContext``. Inside, another one is active.

    Raises:
        ShapeEnvError: the facts contradict one another, or the backend assumed something that has
            no place in the frontend's environment.
    """
    fresh, mode, inputs = _rebuilt(gm, records, values, example_inputs, context.fake_mode)
    before = _Knowledge.of(fresh.env)
    own = _context(context, mode, zip(example_inputs, inputs, strict=True))
    with _torch.tracing(own):
        try:
            yield inputs
        finally:  # also of a backend that asks Dynamo to trace again
            _share(own, context)
        _Return(fresh, context.fake_mode.shape_env).all_since(before)


# --- there ----------------------------------------------------------------------------------------


def _rebuilt(
    gm: torch.fx.GraphModule,
    records: Sequence[InputDesc],
    values: Sequence[Any],
    example_inputs: Sequence[Any],
    mode: Any,
) -> tuple[FreshEnv, Any, list[Any]]:
    """The inputs in a fresh mode, whose environment knows what that of the mode does."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    fresh = FreshEnv(mode.shape_env)
    new_mode = make_fake_mode(describe_fake_mode(mode), fresh.env)
    converter = MetaConverter(new_mode, symbols="keep", keep_nested_ints=True)
    renamed = rename_symbols(tuple(records), fresh.names)
    with fresh.env.suppress_guards():  # torch asks about sizes when a tensor is made
        inputs = [
            _input(converter, fresh, record, value)
            for record, value in zip(renamed, example_inputs, strict=True)
        ]
    fresh.learn(gm, values, inputs)
    strip_marked(gm, lambda _: True)
    for fx_node, value in zip(placeholders, inputs, strict=True):
        fx_node.meta.pop("val", None)
        fx_node.meta["example_value"] = value
    _rename_bindings(gm, fresh)
    return fresh, new_mode, inputs


def _input(converter: MetaConverter, fresh: FreshEnv, record: InputDesc, value: Any) -> Any:
    if record.tensor is not None:
        return converter.from_desc(record.tensor)
    if record.sym is not None:
        sym = record.sym
        expr = decode_expr(sym.expr)
        return _torch.make_sym(sym.kind, expr, fresh.env, sym.hint, constant=sym.constant)
    return value


def _rename_bindings(gm: torch.fx.GraphModule, fresh: FreshEnv) -> None:
    """What a retrace looks for at a node: the unbacked symbols that the node binds."""
    for fx_node in gm.graph.nodes:
        bindings = fx_node.meta.get("unbacked_bindings")
        if bindings:
            fx_node.meta["unbacked_bindings"] = {
                fresh.over_new(symbol): path for symbol, path in bindings.items()
            }


def _context(context: Any, mode: Any, inputs: Any) -> Any:
    """A context for the backend. It keeps it for a backward that is compiled later."""
    own = _torch.TracingContext(mode)
    _share(context, own)
    for value, fake in inputs:
        if isinstance(value, torch.Tensor) and value in context.tensor_to_context:
            own.tensor_to_context[fake] = context.tensor_to_context[value]
    return own


def _share(source: Any, target: Any) -> None:
    for name, value in vars(source).items():
        if name not in _OWN:
            setattr(target, name, value)


# --- and back -------------------------------------------------------------------------------------


class _Knowledge(NamedTuple):
    """How much a ``ShapeEnv`` knew at one moment."""

    guards: int
    ranges: dict[sympy.Symbol, Any]
    replacements: dict[sympy.Symbol, Any]
    divisible: frozenset[Any]
    asserts: dict[Any, int]

    @classmethod
    def of(cls, env: Any) -> _Knowledge:
        return cls(
            len(env.guards),
            dict(env.var_to_range),
            dict(env.replacements),
            frozenset(env.divisible),
            {symbol: len(group) for symbol, group in env.deferred_runtime_asserts.items()},
        )


class _Return:
    """States in one environment what another one has learned."""

    def __init__(self, fresh: FreshEnv, known: Any) -> None:
        self._env = fresh.env
        self._known = known
        self._names: dict[SymbolNode, SymbolNode] = {new: old for old, new in fresh.names.items()}
        self._symbols = {new: old for old, new in fresh.symbols.items()}

    def all_since(self, before: _Knowledge) -> None:
        """Conditions first: where the ranges that they imply are known, nobody notes them."""
        env, known = self._env, self._known
        for guard in env.guards[before.guards :]:
            self._guard(guard)
        for symbol, group in list(env.deferred_runtime_asserts.items()):
            for one in group[before.asserts.get(symbol, 0) :]:
                self._assert(one)
        for symbol, bounds in env.var_to_range.items():
            old = self._symbols.get(symbol)
            if old is None or old not in known.var_to_range:
                continue
            if bounds != before.ranges.get(symbol):
                narrow_range(known, old, bounds)
        for symbol in env.replacements.keys() & self._symbols.keys():
            if symbol not in before.replacements:
                self._replacement(symbol)
        for part in sorted(env.divisible - before.divisible, key=str):
            if part.free_symbols <= self._symbols.keys():
                known._add_divisible(self._over_old(part))

    def _over_old(self, expr: Any) -> Any:
        # As a record: `xreplace` would evaluate what torch has left unevaluated.
        return decode_expr(rename_symbols(encode_expr(expr), self._names))

    def _guard(self, guard: Any) -> None:
        expr = guard.expr
        if not expr.free_symbols <= self._symbols.keys():
            expr = self._without_own(expr)
        if expr == sympy.true:
            return
        with caused_by(self._known, guard.sloc):
            holds = self._known.evaluate_expr(self._over_old(expr))
        if holds != sympy.true:
            raise ShapeEnvError(
                "a backend assumed what does not hold for the frame",
                where=str(guard.expr),
                found=str(holds),
                fix="Report this with a capture of the frame",
            )

    def _without_own(self, expr: Any) -> Any:
        """A condition without the symbols that only the fresh environment has.

        Such a symbol stands for a size of what the graph itself holds, which is always the same.
        """
        expr = self._env.replace(expr)
        own = expr.free_symbols - self._symbols.keys()
        hints = {symbol: self._env.backed_var_to_val.get(symbol) for symbol in own}
        if None in hints.values():
            raise ShapeEnvError(
                "a backend assumed something of a number that Dynamo does not know",
                where=str(expr),
                expected="symbols of the frame's inputs",
                found=", ".join(sorted(map(str, own))),
                fix="Compile without the handoff, and report this with a capture of the frame",
            )
        return expr.xreplace(hints)

    def _replacement(self, symbol: Any) -> None:
        expr = self._env.replace(symbol)
        old = self._symbols[symbol]
        if not expr.free_symbols <= self._symbols.keys() or old in self._known.replacements:
            return
        expr = self._over_old(expr)
        if self._known.replace(expr) != self._known.replace(old):
            self._known._set_replacement(old, expr, "handoff")

    def _assert(self, one: Any) -> None:
        """One that needs what the backend's own graph computes is checked by that graph."""
        if one.expr.free_symbols <= self._symbols.keys():
            self._known.guard_or_defer_runtime_assert(self._over_old(one.expr), one.msg)
