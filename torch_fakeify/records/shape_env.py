"""The records of a ``ShapeEnv``: frozen data, no torch object in any field.

`torch_fakeify.compat.attribute_policies` maps each attribute of a ``ShapeEnv`` to the fields here, or
gives the reason why it is not recorded. A reference to a symbol is an expression of one node.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias

from .record import Record
from .tensor import ExprDesc, SourceDesc, StackDesc

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class ShapeEnvSettingsDesc(Record, frozen=True):
    """A ``ShapeEnvSettings``: the policy of a ``ShapeEnv``, with torch's field names."""

    allow_scalar_outputs: bool
    allow_dynamic_output_shape_ops: bool
    assume_static_by_default: bool
    specialize_zero_one: bool
    duck_shape: bool
    prefer_deferred_runtime_asserts_over_guards: bool
    trace_asserts: bool


class LocationDesc(Record, frozen=True):
    """An ``SLoc``: the lines of the framework and of the user's code at which a fact was recorded.

    Each line is a stack of one frame if torch has a frame or the text of one, else text. Torch stores
    the user's frame as text, with a shortened ``file``.
    """

    user: StackDesc | None = None
    user_text: str | None = None
    framework: StackDesc | None = None
    framework_text: str | None = None


class SymbolDesc(Record, frozen=True):
    """The entries of a ``ShapeEnv`` for one symbol; a field is ``None`` where there is no entry."""

    name: str
    assumptions: tuple[tuple[str, bool], ...] = ()
    """Explicit assumptions, as in ``SymbolNode``."""
    sources: tuple[SourceDesc, ...] = ()
    """``var_to_sources``: the inputs whose value the symbol is, in torch's order of preference."""
    hint: ExprDesc | None = None
    """``backed_var_to_val``: the value at capture time, for backed symbols only."""
    hint_override: int | None = None
    """``var_to_hint_override``."""
    real_value: ExprDesc | None = None
    """``real_tensor_prop_unbacked_vals``: the value found by real tensor propagation."""
    lower: ExprDesc | None = None
    """Lower end of ``var_to_range``, inclusive."""
    upper: ExprDesc | None = None
    """Upper end of ``var_to_range``, inclusive."""
    lower_location: LocationDesc | None = None
    upper_location: LocationDesc | None = None
    stack: StackDesc | None = None
    """``var_to_stack``: where an unbacked symbol was allocated."""
    replacement_location: LocationDesc | None = None
    """``replacements_slocs``."""
    guard_count: int | None = None
    """``symbol_guard_counter``: number of guards that mention the symbol."""
    alloc_order: int | None = None
    """``unbacked_alloc_order``."""
    size_like: bool = False
    unbacked_input: bool = False
    """Whether it is an unbacked symbol of an input, not of data."""


class ReplacementDesc(Record, frozen=True):
    """A replacement ``symbol -> expr``."""

    symbol: ExprDesc
    expr: ExprDesc


class GuardDesc(Record, frozen=True):
    """A ``ShapeGuard``: a condition on the inputs that was assumed."""

    expr: ExprDesc
    location: LocationDesc | None = None
    size_oblivious: bool = False

    @property
    def user_stack(self) -> StackDesc | None:
        """The user's line that caused the guard."""
        return None if self.location is None else self.location.user


class RuntimeAssertDesc(Record, frozen=True):
    """A deferred runtime assert, filed under the last unbacked symbol that it needs."""

    symbol: ExprDesc | None
    expr: ExprDesc
    msg: str
    stack: StackDesc | None = None


class SpecializationDesc(Record, frozen=True):
    """A condition on a size that a specialized graph may assume.

    ``condition`` is the result of the user's function for ``symbol``, the symbol of the size.
    """

    source: SourceDesc
    symbol: ExprDesc
    condition: ExprDesc


class AssumptionDesc(Record, frozen=True):
    """An assumption of a shapes spec that waits for its free spec symbols to be bound."""

    free: tuple[ExprDesc, ...]
    condition: ExprDesc


TableName: TypeAlias = Literal[
    "backed_var_to_val",
    "deferred_runtime_asserts",
    "real_tensor_prop_unbacked_vals",
    "replacements_slocs",
    "symbol_guard_counter",
    "unbacked_alloc_order",
    "unbacked_inputs",
    "var_to_hint_override",
    "var_to_range",
    "var_to_range_sloc",
    "var_to_sources",
    "var_to_stack",
]
"""The attributes of a ``ShapeEnv`` that are dicts or sets by symbol, recorded in ``SymbolDesc``."""


IMPLIED_KEYS: Mapping[TableName, Callable[[SymbolDesc], bool]] = MappingProxyType(
    {
        "backed_var_to_val": lambda s: s.hint is not None,
        "real_tensor_prop_unbacked_vals": lambda s: s.real_value is not None,
        "replacements_slocs": lambda s: s.replacement_location is not None,
        "symbol_guard_counter": lambda s: s.guard_count is not None,
        "unbacked_alloc_order": lambda s: s.alloc_order is not None,
        "unbacked_inputs": lambda s: s.unbacked_input,
        "var_to_hint_override": lambda s: s.hint_override is not None,
        "var_to_range": lambda s: s.lower is not None,
        "var_to_range_sloc": lambda s: s.lower_location is not None,
        "var_to_sources": lambda s: bool(s.sources),
        "var_to_stack": lambda s: s.stack is not None,
    }
)
"""Whether a symbol is a key of an attribute, unless an ``OrderDesc`` lists the keys."""


class OrderDesc(Record, frozen=True):
    """The keys of one attribute, if they differ in order or number from those of ``symbols``."""

    table: TableName
    keys: tuple[ExprDesc | None, ...]


class ShapeEnvDesc(Record, frozen=True):
    """The state of a ``ShapeEnv``: everything that determines its further behaviour.

    Example:
        >>> from torch.fx.experimental.symbolic_shapes import ShapeEnv
        >>> tfk.snapshot(ShapeEnv()).symbols
        ()
    """

    settings: ShapeEnvSettingsDesc
    symbols: tuple[SymbolDesc, ...] = ()
    orders: tuple[OrderDesc, ...] = ()
    replacements: tuple[ReplacementDesc, ...] = ()
    unbacked_renamings: tuple[tuple[ExprDesc, ExprDesc], ...] = ()
    divisible: tuple[ExprDesc, ...] = ()
    """Expressions ``a % b`` that are 0, sorted."""
    axioms: tuple[tuple[ExprDesc, ExprDesc], ...] = ()
    """Conditions and their truth values."""
    guards: tuple[GuardDesc, ...] = ()
    runtime_asserts: tuple[RuntimeAssertDesc, ...] = ()
    """``deferred_runtime_asserts``, grouped by symbol, in torch's order."""
    hint_overrides: tuple[tuple[ExprDesc, int], ...] = ()
    """Entries of ``var_to_hint_override`` whose key is not a symbol."""
    duck_shapes: tuple[tuple[ExprDesc, ExprDesc], ...] = ()
    """``val_to_var``: a number and the symbol that every duck-shaped size of that value gets.
    A nested int is a ``SingletonInt``."""
    source_to_var: tuple[tuple[str, ExprDesc], ...] = ()
    source_to_symbol: tuple[tuple[str, ExprDesc], ...] = ()
    source_name_to_debug_name: tuple[tuple[str, str], ...] = ()
    unique_ids: tuple[int, ...] = ()
    """Numbers that names of new symbols must not use, sorted."""
    unbacked_symint_counter: int = 0
    unbacked_symfloat_counter: int = 0
    num_deferred_runtime_asserts: int = 0
    version_counter: int = 0
    replacements_version_counter: int = 0
    counter: tuple[tuple[str, int], ...] = ()
    """torch's statistics: symbols created, guards ignored."""
    pending_fresh_unbacked_symbols: tuple[ExprDesc, ...] = ()
    ignorable_fresh_unbacked_symbols: tuple[ExprDesc, ...] = ()
    exclusion_constraints: tuple[tuple[ExprDesc, int], ...] = ()
    specializations: tuple[SpecializationDesc, ...] = ()
    specialization_stacks: tuple[tuple[SourceDesc, StackDesc | None], ...] = ()
    shape_ids: tuple[tuple[str, ExprDesc], ...] = ()
    """``_shape_id_to_unbacked_symbol``."""
    spec_symbols: tuple[tuple[ExprDesc, ExprDesc], ...] = ()
    """``_spec_symbol_to_compile_symbol``."""
    pending_assumptions: tuple[AssumptionDesc, ...] = ()
    """``_shape_spec_pending_assumptions``."""
    frozen: bool = False
    runtime_asserts_frozen: bool = False
    error_on_new_guards: bool = False
    resimplify_floor_div_axioms: bool = True
    trace_asserts: bool = False
    co_fields: tuple[tuple[str, str | int | float | bool | None], ...] = ()
    """Names of the code object being compiled, for torch's log."""
