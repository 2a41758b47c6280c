"""The supported fields of torch's source classes and records, and the members of its enumerations.

The source classes share one encoder (`encoding.sources`); each record has its own. The tables are the
union over the supported releases of torch: a file that names one which the running release lacks is
refused. A field is added only after a review of its use in torch, above all whether torch inserts it
into Python source (`encoding.sources.RENDERED_RAW`).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def _split(table: dict[str, str]) -> Mapping[str, frozenset[str]]:
    return MappingProxyType({name: frozenset(fields.split()) for name, fields in table.items()})


SOURCE_MODULES = ("torch._dynamo.source", "torch._guards")
"""The modules in which torch defines source classes."""

SOURCE_FIELDS = _split(
    {
        "AttrProxySource": "base",
        "AttrSource": "base member",
        "BackwardStateSource": "",
        "CallFunctionNoArgsSource": "base",
        "CallMethodItemSource": "base",
        "CellContentsSource": "base member freevar_name",
        "ChainedSource": "base",
        "ClosureSource": "base",
        "CodeSource": "base",
        "ConstDictKeySource": "base index",
        "ConstantSource": "source_name",
        "ContextVarGetSource": "base has_default default_value",
        "ConvertIntSource": "base",
        "CurrentStreamSource": "device",
        "DataclassFieldsSource": "base",
        "DefaultsSource": "base idx_key is_kw field _name",
        "DictGetItemSource": "base index",
        "DictSubclassGetItemSource": "base index",
        "DynamicScalarSource": "base is_int",
        "EphemeralSource": "desc",
        "FSDPNNModuleSource": "base",
        "FlattenScriptObjectSource": "base",
        "FloatTensorSource": "base",
        "GenericAttrSource": "base member",
        "GetItemSource": "base index index_is_slice",
        "GlobalSource": "global_name",
        "GlobalStateSource": "",
        "GlobalWeakRefSource": "global_name",
        "GradSource": "base member",
        "ImportSource": "module_name",
        "IndexedSource": "base idx",
        "ListGetItemSource": "base index index_is_slice",
        "ListReverseIteratorBackingListSource": "base",
        "LocalCellSource": "local_name",
        "LocalSource": "local_name is_input dynamism is_derefed_cell_contents is_varargs is_varkw",
        "NNModuleSource": "base",
        "NamedTupleFieldsSource": "base",
        "NegateSource": "base",
        "NonSerializableSetGetItemSource": "base index",
        "NumpyTensorSource": "base",
        "OptimizerSource": "base",
        "ParamBufferSource": "base member",
        "RandomValueSource": "random_call_index",
        "ScriptObjectQualifiedNameSource": "base",
        "ShapeEnvSource": "",
        "SkipGuardSource": "base",
        "Source": "",
        "SubclassAttrListSource": "base",
        "SyntheticLocalSource": "local_name",
        "TempLocalSource": "local_name",
        "TensorPropertySource": "base prop idx",
        "TorchFunctionModeStackSource": "ind",
        "TupleIteratorGetItemSource": "base index index_is_slice",
        "TypeDictSource": "base",
        "TypeMROSource": "base",
        "TypeSource": "base",
        "UnspecializedBuiltinNNModuleSource": "base",
        "UnspecializedNNModuleSource": "base",
        "UnspecializedParamBufferSource": "base member",
        "UnwrapCollectiveTensorSource": "base",
        "WeakRefCallSource": "base",
    }
)
"""The fields of each ``Source`` class of `SOURCE_MODULES`, by class name."""

_SHAPES = "torch.fx.experimental.symbolic_shapes"
_SIZES = """
    dynamic_sizes dynamic_strides constraint_sizes constraint_strides specialize_on view_base_context
    shape_ids unbacked_bounds
"""
_STATEFUL = f"{_SIZES} tensor_source excluded_sizes shape_env_to_source_to_symbol_cache"

RECORD_FIELDS = _split(
    {
        f"{_SHAPES}.StatelessSymbolicContext": _SIZES,
        f"{_SHAPES}.StatefulSymbolicContext": _STATEFUL,
        f"{_SHAPES}.SubclassSymbolicContext": f"{_STATEFUL} inner_contexts track_outer_size_stride",
        f"{_SHAPES}.SymIntSymbolicContext": "constraint",
        f"{_SHAPES}.StrictMinMaxConstraint": "warn_only vr",
        f"{_SHAPES}.RelaxedUnspecConstraint": "warn_only",
        f"{_SHAPES}.ShapeEnvSettings": """
            allow_scalar_outputs allow_dynamic_output_shape_ops assume_static_by_default
            specialize_zero_one duck_shape prefer_deferred_runtime_asserts_over_guards trace_asserts
        """,
        f"{_SHAPES}.RuntimeAssert": "expr msg stack",
        f"{_SHAPES}.Specialization": "source check_fn",
        f"{_SHAPES}.ValueRangesSLoc": "lower upper",
        "torch.utils._sympy.value_ranges.ValueRanges": "lower upper is_bool is_int is_float",
        "torch._guards.SLoc": "framework_loc maybe_user_loc",
        "torch._guards.ShapeGuard": "expr sloc size_oblivious",
        "torch._guards.StorageOverlap": "overlapping_sources non_overlapping_sources",
        "torch._guards.CompileId": "frame_id frame_compile_id compiled_autograd_id",
        "torch._subclasses.meta_utils.MetaStorageDesc": "id size data",
        "torch._subclasses.meta_utils.MetaTensorDesc": """
            id ndim dtype device size dynamo_dynamic_indices dynamo_hint_overrides layout is_inference
            is_leaf requires_grad is_sparse is_mkldnn is_functorch_wrapped is_batchedtensor
            is_legacy_batchedtensor is_gradtrackingtensor is_view is_nested nested_int
            is_traceable_wrapper_subclass is_functional is_conj is_neg is_parameter stride
            storage_offset storage sparse_dim dense_dim is_coalesced crow_indices col_indices
            ccol_indices row_indices values unwrapped bdim base attrs opaque_attrs creation_meta grad
            ctx type fake_mode view_func level current_level functorch_stack autograd_meta_from data
        """,
    }
)
"""The fields of dataclasses and named tuples, also those that are not recorded (caches, data)."""

ENUM_MEMBERS = _split(
    {
        f"{_SHAPES}.DimDynamic": "DYNAMIC DUCK STATIC UNBACKED INFER_STRIDE",
        "torch._dynamo.source.TensorProperty": "SIZE STRIDE STORAGE_OFFSET",
        "torch._C._autograd.CreationMeta": """
            DEFAULT IN_CUSTOM_FUNCTION MULTI_OUTPUT_NODE NO_GRAD_MODE INFERENCE_MODE
        """,
    }
)
"""The members of enumerations, which are recorded by name."""
