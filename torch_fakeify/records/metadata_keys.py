"""The metadata of FX nodes and graphs that a record carries, and what it drops.

Tables list each metadata key of torch 2.13. A dropped entry that cannot be remade is named in
``dropped_meta``, and counted by `losses_of`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from .tensor import DictValue, FloatValue, ListValue, TorchConstValue, TupleValue

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .graph import GraphModuleDesc
    from .tensor import Value

Types: TypeAlias = "Mapping[str, type | tuple[type, ...]]"

CARRIED: Types = {
    # what a node computes
    "example_value": object,
    "val": object,
    "tensor_meta": object,
    "eager_input_vals": tuple,
    "arg_kwarg_vals": tuple,
    "unbacked_bindings": dict,
    "only_clone_these_tensors": (list, tuple),
    "original_output_strides": (list, tuple),
    # where it comes from
    "stack_trace": str,
    "nn_module_stack": dict,
    "fwd_nn_module_stack": (dict, type(None)),
    "source_fn_stack": list,
    "fwd_source_fn_stack": (list, type(None)),
    "torch_fn": tuple,
    "from_node": list,
    "original_aten": object,
    "desc": object,
    "output_stack_traces": (list, tuple),
    # instructions for a compiler
    "custom": dict,
    "recompute": object,
    "ac_graph_id": int,
    "partitioner_tag": str,
    "autograd_backward": bool,
    "is_gradient_acc": bool,
    "is_functional_regenerated": bool,
    "has_backward_hook": bool,
    "has_with_effects": bool,
    "seq_nr": int,
    "memory_budget": (int, float),
    "user_visible_output_idxs": (list, tuple, range),
    "saved_tensor_with_no_vc_check": bool,
    "should_fallback": bool,
    "steal_arg": bool,
    "is_static_input": bool,
    "aot_runtime_epilogue_input_mutation": bool,
    "user_cache_hash": str,
    "tensor_dict": dict,
    "_fx_runtime_assert_preserve": bool,
    "nested_region_config": object,
    "_checkpoint_context_fn": object,
    "local_map_kwargs": object,
}
"""Keys that a record carries, and the type that the value must have in a file."""

DROPPED: Mapping[str, str] = {
    "grapharg": "it holds the real input; its source is in the node's record",
    "creation_timestamp": "a count of Dynamo's tracer, which orders nodes only while it traces",
    "is_wrapped": "torch.fx.wrap rewrites a module's globals; the target is called all the same",
    "fake_result": "a copy of `val` that inductor remakes",
    "mutation_region_id": "remade by inductor's pattern matcher",
    "inductor_realize_to_strides": "remade by inductor",
    "dislike_padding": "remade by inductor",
    "low_precision_pointwise_barrier": "remade by inductor",
    "produced_by_chunker": "remade by inductor",
    "chunking": "remade by inductor",
    "fusion_meta": "remade by inductor",
    "cudagraph_annotation": "remade by inductor",
    "extern_semantic_key": "of inductor's log of kernels",
    "saved_for_offloading": "remade by the partitioner",
    "saved_for_quantization": "remade by the partitioner",
    "should_offload": "remade by the partitioner",
    "cpu_offload_reload_node": "remade by the partitioner",
    "original_device": "remade by the partitioner",
    "dequant_type": "remade by the partitioner",
    "is_backward": "remade by AOTAutograd",
    "type": "a copy of the annotation",
    "annotation": "of FX pattern matching",
    "symbol": "of the graph in which translation validation rebuilds guards",
    "broadcast": "of the gradual type checker",
    "buf_meta": "of drawings of graphs",
    "node_idx": "of the reinplacing pass, which remakes it",
    "view_of": "of the reinplacing pass, which remakes it",
    "concrete_value": "of the minifier, which remakes it",
    "original_size": "remade by activation offloading",
    "original_stride": "remade by activation offloading",
    "value": "of the streams pass, which remakes it",
    "quant_options": "remade by inductor",
    "extra_options": "of generated Triton calls",
    "_allow_mixed_dtype_folding": "remade by inductor",
}
"""Keys that are remade, or belong to one process or tool, and why: dropped without a report."""

PLAIN: Mapping[str, str] = {
    "quantization_annotation": "of export quantization",
    "quantization_tag": "of export quantization",
    "_numeric_debug_handle": "of export quantization",
    "target_dtype_info": "of FX quantization",
    "_observed_graph_module_attrs": "of FX quantization",
    "delegation_tag": "of ExecuTorch's partitioners",
}
"""Keys that a record carries, as it does unlisted ones, if their values are numbers, texts or containers."""

MODULE_CARRIED: Types = {
    "dynamo_flat_name_to_original_fqn": dict,
    "_checkpoint_context_fn": object,
    "locals_to_steal": list,
    "num_activations": int,
}
"""Keys of ``GraphModule.meta`` that a record carries."""

MODULE_DROPPED: Mapping[str, str] = {
    "dynamo_compile_id": "of one process; an instance gets its own",
    "backend_id": "random; of one process",
    "specialization": "a function of Dynamo's, for one of several graphs of a frame",
    "mutated_named_buffers": "remade by inductor",
    "partition_names": "of one splitting pass",
    "fake_mode": "of export; an instance has its own",
    "tracing_context": "of export; an instance has its own",
    "module_call_specs": "of export",
    "inline_constraints": "of export; the shape environment has them",
    "unflattened_module": "of export",
    "args": "of export's retracing passes",
}
"""Keys of ``GraphModule.meta`` that belong to one process or tool, and why: dropped without a report."""


@dataclass(frozen=True)
class Loss:
    """Metadata of a graph that its capture lacks."""

    graph: str
    """Dotted name of the body or submodule; empty for the graph of the frame."""
    key: str
    """The key in ``Node.meta`` or ``GraphModule.meta``."""
    reason: str
    count: int
    """Number of nodes, or 1 for the module itself."""


def losses_of(graph: GraphModuleDesc) -> tuple[Loss, ...]:
    """Return what the record of a graph and of nested graphs drops, in first-seen order."""
    found = Counter(
        (name, key, reason)
        for name, part in graph.named_graphs()
        for each in (part, *part.nodes)
        for key, reason in each.dropped_meta
    )
    return tuple([Loss(*where, count) for where, count in found.items()])


def is_plain(value: Value) -> bool:
    """Return whether a value consists of numbers, texts, torch's constants and containers of them."""
    if value is None or isinstance(value, (bool, int, float, str, FloatValue, TorchConstValue)):
        return True
    if isinstance(value, (TupleValue, ListValue)):
        return all(map(is_plain, value.items))
    if isinstance(value, DictValue):
        return all(isinstance(k, (str, int, float)) and is_plain(v) for k, v in value.items)
    return False
