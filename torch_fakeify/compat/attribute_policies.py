"""Serialization policies of the attributes of torch's objects from which a frame is rebuilt.

A table for each of ``ShapeEnv``, ``FakeTensorMode``, ``SymNode`` and ``TrackedFake``, of torch 2.13 to
2.15, has the policy of each attribute. Tests compare the tables with torch's classes, live and in
source, and rebuilt objects with the originals.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class AttributePolicy(NamedTuple):
    """The serialization policy of an attribute.

    ``carried`` in a field of a record, ``derived`` from carried fields or from the rebuilding process,
    or ``dropped`` because no result of the rebuilt object depends on it.
    """

    how: Literal["carried", "derived", "dropped"]
    why: str
    """The fields that carry it (one where `kind` is given), the origin of a derived one, or the reason it is dropped."""
    everywhere: bool = True
    """Whether all supported releases of torch have it, not only some."""
    kind: Literal["plain", "exprs", "pairs", "named"] | None = None
    """How an attribute of a ``ShapeEnv`` is recorded in its field, unless in a way of its own.

    ``plain``: the value; ``exprs``: a list of expressions; ``pairs`` and ``named``: a dictionary of
    expressions by expression, or by name of a source.
    """


def unknown_attributes(obj: object, table: Mapping[str, AttributePolicy]) -> list[str]:
    """Return the sorted names of the attributes of an object that a table lacks."""
    return sorted(set(vars(obj)) - set(table))


def _carried(
    fields: str, kind: Literal["plain", "exprs", "pairs", "named"] | None = None
) -> AttributePolicy:
    return AttributePolicy("carried", fields, kind=kind)


def _as_named(
    names: str, kind: Literal["plain", "exprs", "pairs", "named"] | None = None
) -> dict[str, AttributePolicy]:
    """Return the policies of attributes that fields of the same names carry."""
    return {name: _carried(name, kind) for name in names.split()}


def _each(names: str, policy: AttributePolicy) -> dict[str, AttributePolicy]:
    return dict.fromkeys(names.split(), policy)


def _derived(source: str) -> AttributePolicy:
    return AttributePolicy("derived", source)


def _dropped(reason: str) -> AttributePolicy:
    return AttributePolicy("dropped", reason)


def _in_some(attribute: AttributePolicy) -> AttributePolicy:
    return attribute._replace(everywhere=False)


_EVENTS = "records calls for torch's check of itself; a restored environment has no such history"
_VALIDATION = "translation validation checks one process's own run; it is off in a restored one"
_NOW = "what is going on in the recording process at this moment"
_PROCESS = "of the process, shared by all modes: a cache of results and its statistics"
_STACK_OF_MODES = "where the mode was entered; an instance's mode is not entered"
_SPEED = "only how soon an operator answers; as the configuration of the rebuilding process has it"

SHAPE_ENV_ATTRIBUTES: Mapping[str, AttributePolicy] = MappingProxyType(
    {
        **_as_named("settings guards unique_ids source_name_to_debug_name replacements divisible"),
        **_as_named("exclusion_constraints counter co_fields specializations"),
        **_as_named("axioms unbacked_renamings", "pairs"),
        **_as_named("source_to_var source_to_symbol", "named"),
        **_as_named("pending_fresh_unbacked_symbols ignorable_fresh_unbacked_symbols", "exprs"),
        **_as_named("unbacked_symfloat_counter unbacked_symint_counter trace_asserts", "plain"),
        **_as_named("num_deferred_runtime_asserts frozen runtime_asserts_frozen", "plain"),
        "backed_var_to_val": _carried("symbols.hint"),
        "real_tensor_prop_unbacked_vals": _carried("symbols.real_value"),
        "var_to_range": _carried("symbols.lower, symbols.upper"),
        "var_to_range_sloc": _carried("symbols.lower_location, symbols.upper_location"),
        "var_to_sources": _carried("symbols.sources"),
        "unbacked_inputs": _carried("symbols.unbacked_input"),
        "var_to_stack": _carried("symbols.stack"),
        "var_to_hint_override": _carried("symbols.hint_override, hint_overrides"),
        "replacements_slocs": _carried("symbols.replacement_location"),
        "size_like": _carried("symbols.size_like"),
        "val_to_var": _carried("duck_shapes"),
        "deferred_runtime_asserts": _carried("runtime_asserts"),
        "_error_on_new_guards": _carried("error_on_new_guards", "plain"),
        "symbol_guard_counter": _carried("symbols.guard_count"),
        "_version_counter": _carried("version_counter"),
        "_replacements_version_counter": _carried("replacements_version_counter"),
        "_resimplify_floor_div_axioms": _carried("resimplify_floor_div_axioms"),
        "unbacked_alloc_order": _carried("symbols.alloc_order"),
        "specialization_stacks": _carried("specialization_stacks"),  # without columns
        "_shape_id_to_unbacked_symbol": _carried("shape_ids", "named"),
        "_spec_symbol_to_compile_symbol": _carried("spec_symbols", "pairs"),
        "_shape_spec_pending_assumptions": _carried("pending_assumptions"),
        "_prev_cache_key": _derived("the lengths that it summarizes"),
        "log": _derived("torch's module logger"),
        "dim_constraints": _derived("guards; each produce_guards makes it anew"),
        "_equality_graph": _derived("runtime_asserts, on first use: a cache"),
        "_unbacked_replacements": _derived("runtime_asserts, on first use: a cache"),
        "name_to_symbol": _in_some(_derived("symbols.name")),
        "_symop_cache": _in_some(_dropped("a cache of operators' results, by the replacements")),
        "foreign_unbacked_symbol_cache": _in_some(
            _dropped("by the address of another environment, which only its own process has")
        ),
        "fake_tensor_cache": _dropped("a cache of operator outputs, keyed by live objects"),
        "tracked_fakes": _dropped("the frame's tensors, which a capture records; see _EVENTS"),
        "_expr_sym_node_id": _dropped("an address of the expression evaluated last, for the log"),
        **_each(
            "should_record_events check_recorded_events is_recording events", _dropped(_EVENTS)
        ),
        **_each(
            "_translation_validation_enabled validator graph name_to_node fx_node_cache",
            _dropped(_VALIDATION),
        ),
    }
)
"""Every attribute of a ``ShapeEnv``; the fields are those of ``ShapeEnvDesc``."""

FAKE_MODE_ATTRIBUTES: Mapping[str, AttributePolicy] = MappingProxyType(
    {
        **_as_named(
            """
            allow_fallback_kernels allow_non_fake_inputs static_shapes allow_scalar_outputs allow_meta
            nt_tensor_id_initial_count nt_tensor_id_counter
            """
        ),
        "_allow_unsafe_data_ptr_access": _carried("allow_unsafe_data_ptr_access"),
        "fake_tensor_converter": _carried("export"),  # its memo begins empty
        "shape_env": _derived("CaptureDesc.shape_env, which is restored first"),
        "_mode_key": _derived("a constant of torch"),
        "_stack_trace": _derived("where the mode is made: that of an instance in its own process"),
        "_stack": _derived("_stack_trace, as text, on first use"),
        "propagate_real_tensors": _dropped(
            "there are no real tensors to propagate; what they gave is in symbols.real_value"
        ),
        "epoch": _dropped("dates the memos of fake tensors; rebuilt ones are of the new mode's"),
        "in_kernel_invocation": _dropped(_NOW),
        "cache_enabled": _dropped(_SPEED),
        "cache_crosscheck_enabled": _dropped(_SPEED),
        **_each("cache cache_hits cache_misses cache_bypasses", _dropped(_PROCESS)),
        **_each(
            "enter_stack old_dispatch_mode_flags old_non_infra_dispatch_mode_flags old_without_ignore_compile_internals_dispatch_mode_flags",
            _dropped(_STACK_OF_MODES),
        ),
        "_dispatch_key": _derived("torch gives none to a FakeTensorMode"),
        "supports_higher_order_operators": _derived("a constant of the class"),
        "lift_fns": _derived("a constant of the class"),
        "_cpp_meta_supports_symint": _in_some(_derived("a constant of the class")),
        "_can_run_unsafe_fallback_allowed_namespaces": _derived("a constant of the class"),
        "_unbacked_special_fake_handling_ops": _derived("a constant of the class"),
    }
)
"""Every attribute of a ``FakeTensorMode``; the fields are those of ``FakeModeDesc``."""

SYM_NODE_ATTRIBUTES: Mapping[str, AttributePolicy] = MappingProxyType(
    {
        "_expr": _carried("expr"),  # with the replacements, except of an input
        "pytype": _carried("kind"),
        "_hint": _carried("hint"),
        "constant": _carried("constant"),
        "shape_env": _derived("the ShapeEnv that the frame is rebuilt in"),
        "_expr_cache": _derived("expr and the replacements of the ShapeEnv, on first use"),
        "_expr_ver": _derived("the version of the replacements in _expr_cache"),
        "_optimized_summation": _dropped(
            "which way an addition takes; every way gives the same expression"
        ),
        "fx_node": _dropped(_VALIDATION),
    }
)
"""Every attribute of a ``SymNode``; the fields are those of ``SymDesc``.

A size, stride or offset that is a number is recorded as the number, as torch makes no node for one.
"""

TRACKED_FAKE_ATTRIBUTES: Mapping[str, AttributePolicy] = MappingProxyType(
    {
        "fake": _carried("tensor, sym"),  # as it was when the frame began
        "source": _carried("source, tensor.source"),
        "symbolic_context": _carried("tensor.symbolic_context"),
    }
)
"""Every attribute of a ``TrackedFake``; the fields are those of ``InputDesc``.

The inner tensors of a subclass and the base of a view are tracked too: their record, source and
context are parts of the input's. A tracked tensor that is no input of the graph is not rebuilt; its
sizes are in ``ShapeEnvDesc.source_to_var`` by the names of their sources.
"""
