"""Torch's private symbolic shapes: ``ShapeEnv``, ``SymNode``, contexts, nested ints, sympy functions."""

# pyright: reportUnusedImport=false
# Other rooms import these names from here; a test finds the ones that none does.
from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from . import gate

gate.check_installed_torch()  # before anything private is asked for

from torch._guards import ShapeGuard, SLoc
from torch.fx.experimental import _config as experimental_config
from torch.fx.experimental import symbolic_shapes as _symbolic_shapes
from torch.fx.experimental.recording import trace_shape_events_log as shape_events_log
from torch.fx.experimental.sym_node import _NO_HINT as NO_HINT
from torch.fx.experimental.sym_node import SymNode, sizes_strides_methods
from torch.fx.experimental.symbolic_shapes import (
    ConstraintViolationError,
    DimDynamic,
    GuardOnDataDependentSymNode,
    RelaxedUnspecConstraint,
    RuntimeAssert,
    ShapeEnv,
    Specialization,
    StatefulSymbolicContext,
    StatelessSymbolicContext,
    StrictMinMaxConstraint,
    SubclassSymbolicContext,
    SymbolicContext,
    SymIntSymbolicContext,
    ValueRangesSLoc,
    canonicalize_bool_expr,
    guard_or_false,
    is_symbolic,
    sym_eq,
)
from torch.fx.experimental.symbolic_shapes import (
    _free_unbacked_symbols_with_path as free_unbacked_symbols_with_path,
)
from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy import functions as sympy_functions
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.singleton_int import SingletonInt
from torch.utils._sympy.symbol import SymT, make_symbol, symbol_is_type
from torch.utils._sympy.value_ranges import ValueRangeError, ValueRanges
from torch.utils._traceback import CapturedTraceback, format_frame

_INT, _FLOAT, _BOOL = (torch.SymInt, int), (torch.SymFloat, float), (torch.SymBool, bool)
_SYM_TYPES = {"int": _INT, "float": _FLOAT, "bool": _BOOL}
_c: Any = torch._C


def unvalidated_shape_env(**options: Any) -> Any:
    """Return a new ``ShapeEnv`` that records no events and does no translation validation."""
    env: Any = ShapeEnv(should_record_events=False, **options)
    env._translation_validation_enabled = False
    for name in ("validator", "graph", "name_to_node"):
        vars(env).pop(name, None)
    return env


def make_sym(kind: str, expr: Any, shape_env: Any, hint: Any, *, constant: bool = False) -> Any:
    """Return a symbolic scalar over an expression, even if the ``ShapeEnv`` has specialized it.

    Args:
        kind: ``"int"``, ``"float"`` or ``"bool"``.
        expr: an expression over symbols of the ``ShapeEnv``.
        shape_env: the ``ShapeEnv``.
        hint: its value, ``None`` if it was data-dependent when it was made.
        constant: whether it is a literal.
    """
    sym_type, python_type = _SYM_TYPES[kind]
    if hint is None:
        # Else torch would compute a hint where an unbacked symbol was replaced by a size.
        return sym_type(SymNode(expr, shape_env, python_type, NO_HINT))
    hint = make_nested_int(*hint) if isinstance(hint, tuple) else hint  # a nested int's record
    literal = hint if constant else None
    return sym_type(SymNode(expr, shape_env, python_type, hint, constant=literal))


def make_nested_int(number: int, coeff: int) -> torch.SymInt:
    """Return the nested int of a number, times a coefficient."""
    from torch.nested._internal.nested_int import NestedIntNode

    return torch.SymInt(NestedIntNode(number, coeff))  # pyright: ignore[reportArgumentType]


def reserve_nested_int(number: int) -> None:
    """Reserve a number: later jagged tensors of this process do not get it."""
    counters: Any = import_module("torch.nested._internal.nested_tensor")
    counters._tensor_id_counter = max(counters._tensor_id_counter, number + 1)


def nested_int_of_offsets(offsets: torch.Tensor) -> torch.SymInt:
    """Return the nested int of real offsets (or lengths), a new one for new offsets."""
    counters: Any = import_module("torch.nested._internal.nested_tensor")
    return counters.get_tensor_symint(offsets)


def new_nested_int(mode: Any) -> int:
    """Return an unused number, both in this process and among the mode's intermediates."""
    counters: Any = import_module("torch.nested._internal.nested_tensor")
    number = max(counters._tensor_id_counter, mode.nt_tensor_id_counter)
    counters._tensor_id_counter = mode.nt_tensor_id_counter = number + 1
    return number


def make_size_symbol(number: int) -> Any:
    """Return the symbol that a ``ShapeEnv`` makes for a size of at least one."""
    return make_symbol(SymT.SIZE, number, positive=True, integer=True)


def register_symbol(shape_env: Any, symbol: Any) -> None:
    """Add a new symbol to the ``ShapeEnv``'s table by name, which exists since torch 2.15."""
    if (by_name := getattr(shape_env, "name_to_symbol", None)) is not None:
        by_name[symbol.name] = symbol


def is_float_symbol(symbol: Any) -> bool:
    """Return whether a symbol represents a float, backed or unbacked."""
    return symbol_is_type(symbol, (SymT.FLOAT, SymT.UNBACKED_FLOAT))


def is_unbacked(symbol: Any) -> bool:
    """Return whether a symbol represents an unbacked integer."""
    return symbol_is_type(symbol, SymT.UNBACKED_INT)


def layout_methods() -> list[str]:
    """Return the methods of ``SymNode`` by which C++ computes and caches memory layouts."""
    guards = "guard_bool", "guard_or_false", "guard_or_true", "guard_size_oblivious", "expect_true"
    return [*guards, *sizes_strides_methods]


def uninteresting_files() -> set[str]:
    """Return the set of files that torch omits from users' stacks: the set itself, not a copy."""
    return _symbolic_shapes.uninteresting_files()


is_dense_and_non_overlapping = _symbolic_shapes._eval_is_non_overlapping_and_dense_flat
ShapeGuardPrinter = _symbolic_shapes.ShapeGuardPythonPrinter
compute_overlapping_tensors = _c._dynamo.guards.compute_overlapping_tensors


def narrow_range(env: Any, symbol: Any, bounds: Any) -> None:
    """Narrow a symbol to the value range that it has in another ``ShapeEnv``.

    Torch refuses an upper bound below 2 for a size-like symbol, but such a symbol exists if it became
    size-like later, as for ``nonzero`` of one element.
    """
    size_like = symbol in env.size_like
    env.size_like.discard(symbol)
    env._update_var_to_range(symbol, bounds)
    if size_like:
        env.size_like.add(symbol)
