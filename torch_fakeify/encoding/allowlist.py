"""Allow-lists and deny-lists of functions, operators and methods."""

from __future__ import annotations

import functools
from types import CodeType, FunctionType, ModuleType


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


WHOLE = (
    "math",
    "torch.nn.functional",
    "torch.functional",
    "torch.foreach",
    "torch.linalg",
    "torch.fft",
    "torch.special",
    "torch.sparse",
    "torch.nested",
    "torch.signal.windows.windows",
    "torch.masked._ops",
    "torch.nn.grad",
    "torch.nested._internal.nested_tensor",
    "torch._C._nn",
    "torch._C._linalg",
    "torch._C._fft",
    "torch._C._special",
    "torch._C._sparse",
    "torch._C._nested",
    "torch._C._functorch",
    "torch._functorch.predispatch",
    "torch._lowrank",
    "torch._linalg_utils",
    "torch._lobpcg",
    "torch.nn.init",
    "torch._refs",
    "torch._prims",
    "torch._numpy",
    "torch._numpy.linalg",
    "torch._numpy.fft",
    "torch._numpy.random",
)
"""Modules of pure tensor arithmetic: each function defined in one of them is allowed."""

LISTED = {
    "builtins": (
        "abs all any divmod getattr hasattr isinstance issubclass len max min pow round sorted sum"
    ),
    "operator": (
        "abs add and_ concat contains countOf delitem eq floordiv ge getitem gt iadd iand iconcat "
        "ifloordiv ilshift imatmul imod imul index indexOf inv invert ior ipow irshift is_ is_not "
        "isub itruediv ixor le length_hint lshift lt matmul mod mul ne neg not_ or_ pos pow rshift "
        "setitem sub truediv truth xor"
    ),
    "torch": (
        "_as_tensor_fullprec _assert _check _check_index _check_is_size _check_not_implemented "
        "_check_tensor_all _check_tensor_all_with _check_type _check_value _check_with "
        "_constrain_as_size _freeze_functional_tensor _from_functional_tensor "
        "_functionalize_commit_update _functionalize_sync _functionalize_replace "
        "_is_functional_tensor _mirror_autograd_meta_to _segment_reduce _sym_acos _sym_asin "
        "_sym_atan _sym_cos _sym_cosh _sym_log2 _sym_sin _sym_sinh _sym_sqrt _sym_tan _sym_tanh "
        "_sync _to_functional_tensor are_deterministic_algorithms_enabled "
        "autocast_decrement_nesting autocast_increment_nesting broadcast_shapes "
        "clear_autocast_cache cond eig get_autocast_dtype get_default_device get_default_dtype "
        "get_float32_matmul_precision get_num_threads get_rng_state initial_seed "
        "is_autocast_cache_enabled is_autocast_enabled is_grad_enabled is_inference_mode_enabled "
        "is_storage is_tensor lobpcg lstsq lu manual_seed matrix_rank pca_lowrank seed "
        "set_autocast_cache_enabled set_autocast_dtype set_autocast_enabled set_rng_state solve "
        "svd_lowrank sym_float sym_fresh_size sym_int sym_ite sym_max sym_min sym_not sym_sqrt "
        "sym_sum symeig unique unravel_index vmap while_loop"
    ),
    "torch.amp.autocast_mode": "_cast _enter_autocast _exit_autocast is_autocast_available",
    "torch.autograd": "grad",
    "torch.autograd.forward_ad": "_maybe_load_decompositions enter_dual_level exit_dual_level make_dual unpack_dual",
    "torch.random": "get_rng_state initial_seed manual_seed seed set_rng_state",
    "torch.cuda": (
        "current_device current_stream default_stream device_count is_available set_device "
        "set_stream synchronize _exchange_device _maybe_exchange_device _set_stream_by_id"
    ),
    "torch.xpu": "current_device current_stream device_count is_available set_stream synchronize",
    "torch.cpu": "current_device current_stream device_count is_available synchronize",
    "torch._utils": "_flatten_dense_tensors _unflatten_dense_tensors",
    "torch.nn.modules.activation": "_is_make_fx_tracing",
    "torch.cuda.random": "get_rng_state initial_seed manual_seed manual_seed_all set_rng_state",
    "torch.accelerator": (
        "current_accelerator current_device_index current_stream device_count is_available "
        "set_device_index set_stream synchronize"
    ),
    "torch._C": (
        "_enter_dual_level _exit_dual_level _get_default_device _is_alias_of _is_fwd_grad_enabled "
        "_set_conj _set_fwd_grad_enabled _set_grad_enabled _set_neg _set_deterministic_algorithms "
        "_set_multithreading_enabled _vmapmode_decrement_nesting _vmapmode_increment_nesting "
        "_set_sdp_use_cudnn _set_sdp_use_flash _set_sdp_use_math _set_sdp_use_mem_efficient "
        "_set_sdp_use_overrideable _select_conv_backend "
        "_functionalization_reapply_views_tls _to_functionality_key "
        "_infer_size _log_api_usage_once _set_float32_matmul_precision"
    ),
    "torch._C._autograd": (
        "_get_data_attr _pop_saved_tensors_default_hooks _saved_tensors_hooks_disable "
        "_saved_tensors_hooks_enable _unsafe_set_version_counter"
    ),
    "torch.autograd.graph": "increment_version",
    "torch.autograd.grad_mode": "_enter_inference_mode _exit_inference_mode",
    "torch._functorch.vmap": (
        "_add_batch_dim _as_tuple _broadcast_to_and_flatten _create_batched_inputs "
        "_maybe_remove_batch_dim _process_batched_inputs _remove_batch_dim _unwrap_batched "
        "_validate_and_get_batch_size _vmap_decrement_nesting _vmap_increment_nesting "
        "lazy_load_decompositions unwrap_batched wrap_batched"
    ),
    "torch._functorch.eager_transforms": (
        "_any_differentiable _as_tuple _assert_wrapped_functional _autograd_grad "
        "_create_differentiable _func_decrement_nesting _func_increment_nesting "
        "_grad_decrement_nesting _grad_increment_nesting _is_differentiable "
        "_jvp_decrement_nesting _jvp_increment_nesting _maybe_unwrap_functional_tensor "
        "_maybe_wrap_functional_tensor _set_tensor_requires_grad _undo_create_differentiable "
        "_unwrap_all_tensors_from_functional _unwrap_for_grad _unwrap_functional_tensor "
        "_wrap_all_tensors _wrap_all_tensors_to_functional _wrap_for_grad "
        "_wrap_functional_tensor _wrap_tensor_for_grad enter_jvp_nesting exit_jvp_nesting "
        "safe_unpack_dual set_inplace_requires_grad_allowed"
    ),
    "torch.fx.experimental.symbolic_shapes": (
        "_constrain_range_for_size cast_symbool_to_symint_guardless constrain_range "
        "constrain_unify expect_true guard_bool guard_float guard_int guard_or_false "
        "guard_or_true guard_scalar guard_size_oblivious has_static_value statically_known_false "
        "statically_known_true sym_and sym_eq sym_or"
    ),
    "torch.distributed._functional_collectives": (
        "all_gather_tensor all_reduce all_to_all_single broadcast reduce_scatter_tensor wait_tensor"
    ),
    "torch.distributed.tensor.DTensor": "from_local",
    "torch._dynamo.external_utils": (
        "call_accumulate_grad untyped_storage_size unwrap_maybe_dynamic_int"
    ),
    "torch._dynamo.utils": "numpy_attr_wrapper to_fake_tensor",
    "torch._dynamo.variables.builtin": "_lower_version_count_by_1",
}
"""Other modules: the functions in them that graphs call."""

INNER = {
    # what the version counter does when `x.data = y` is assigned
    "torch._dynamo.variables.builtin": "_lower_version_count_by_1",
}
"""Functions among those of `LISTED` that a module defines inside a method."""


@functools.cache
def functions_inside(module: ModuleType) -> dict[str, FunctionType]:
    """The functions that a module of `INNER` defines inside methods of its classes, by name.

    Such a function has no resolvable name. It is made here from its code, a constant of the method, and
    the module's globals.
    """
    found: dict[str, FunctionType] = {}
    inner = INNER.get(module.__name__, "").split()
    classes = [cls for cls in vars(module).values() if isinstance(cls, type)] if inner else []
    for method in (method for cls in classes for method in vars(cls).values()):
        for code in method.__code__.co_consts if isinstance(method, FunctionType) else ():
            if isinstance(code, CodeType) and code.co_name in inner and not code.co_freevars:
                made = found[code.co_name] = FunctionType(code, vars(module))
                made.__qualname__ = f"{method.__qualname__}.<locals>.{code.co_name}"
    return found


HELPERS = {
    # they make functions of functions, or change functions
    "torch._lobpcg": "LOBPCG_call_tracker LOBPCG_call_tracker_orig",
    "torch._numpy.fft": "normalizer upcast",
    "torch._numpy.linalg": "linalg_errors normalizer",
    "torch._numpy.random": "array_or_scalar deco_stream normalizer use_numpy_random",
    "torch._prims": "backwards_not_supported register_debug_prims register_rng_prims",
    "torch._refs": ("elementwise_unary_scalar_wrapper handle_noncontiguous_outputs out_wrapper"),
    "torch.masked._ops": "_apply_docstring_templates _generate_docstring",
    "torch.nn.init": "_make_deprecate",
    "torch.signal.windows.windows": "_add_docstr _window_function_checks",
    "torch.sparse": "as_sparse_gradcheck",
    # they change what the process does from then on, and no graph of torch's calls them
    "torch._numpy": "set_default_dtype",
    "torch._C._functorch": (
        "_set_dynamic_layer_keys_included _set_vmap_fallback_enabled "
        "_set_vmap_fallback_warning_enabled pop_dynamic_layer_stack "
        "pop_dynamic_layer_stack_and_undo_to_depth push_dynamic_layer_stack tls_set_vmap_excluded"
    ),
}
"""Functions of the modules in `WHOLE` that graphs must not call."""

DENIED_KEYWORDS = {
    "builtins.max": "key",
    "builtins.min": "key",
    "builtins.sorted": "key",
}
"""Arguments that a listed function calls."""

CALLS_ARGUMENTS = frozenset({
    "torch.cond", "torch.vmap", "torch.while_loop",
    "torch.nn.functional.triplet_margin_with_distance_loss",
})  # fmt: skip
"""Functions that call their arguments, like all higher-order operators."""

NUMPY_MODULES = ("torch._numpy", "torch._numpy.linalg", "torch._numpy.fft", "torch._numpy.random")

NUMPY_ATTRIBUTES = _words("T dtype flags flat imag itemsize nbytes ndim real shape size strides")
"""Data attributes of arrays."""

DENIED_OPERATORS = {
    "aten._print": "it prints text of the file",
    "aten.from_file": "it opens a file",
    "aten.warn": "it prints text of the file",
    "aten.save": "it writes a file",
    "aten.load": "it reads a file",
    "debugprims.load_tensor": "it reads a file",
    "image.read_file": "it reads a file",
    "image.write_file": "it writes a file",
    "inductor._alloc_from_pool": "it reads raw memory",
    "inductor._reinterpret_tensor": "it reads raw memory",
    "mkldnn.data_ptr": "it returns an address",
    "symm_mem._rendezvous": "it opens connections",
}
"""Operators that access other processes or memory outside of a tensor."""

DENIED_NAMESPACES = {
    "sox": "it reads and writes files",
    "torchaudio_sox": "it reads and writes files",
    "quant_logger": "it writes files",
    "torchcodec_ns": "it reads and writes files",
}

PRIM_OPERATORS = _words(
    "NumToTensor TupleUnpack abs data device dtype grad is_cpu is_cuda is_ipu is_maia is_meta "
    "is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse is_sparse_csr is_vulkan is_xla "
    "is_xpu itemsize layout max min name nbytes requires_grad tolist type"
)
"""Allowed operators of TorchScript (``prim``), of which others call Python or other machines."""

DENIED_HIGHER_ORDER = {
    "aoti_call_delegate": "it calls a compiled library",
    "call_torchbind": "it calls methods of a script object",
    "custom_function_call": "it calls an autograd.Function of the user's code",
    "dynamo_bypassing_wrapper": "it calls a function of the user's code",
    "executorch_call_delegate": "it calls a compiled library",
    "flat_apply": "it calls a function of the user's code",
    "inductor_compiled_code": "it calls compiled code",
    "inline_asm_elementwise": "it runs assembly of the file",
    "invoke_leaf_function": "it calls a function of the user's code",
    "print": "it prints text of the file",
    "trace_wrapped": "it calls a function of the user's code",
    "triton_kernel_wrapper_functional": "its kernel lives in a table of the process",
    "triton_kernel_wrapper_mutation": "its kernel lives in a table of the process",
}

DENIED_FUNCTIONS = {
    "builtins.__import__": "it runs code",
    "builtins.breakpoint": "it runs code",
    "builtins.compile": "it runs code",
    "builtins.eval": "it runs code",
    "builtins.exec": "it runs code",
    "builtins.input": "it reads from the terminal",
    "builtins.open": "it opens a file",
    "operator.attrgetter": "it reads unchecked attributes",
    "operator.call": "it calls any object",
    "operator.methodcaller": "it calls unchecked methods",
    "torch._from_blob": "it reads raw memory",
    "torch._print": "it prints text of the file",
    "torch.compile": "it runs code",
    "torch.fork": "it starts a thread",
    "torch.from_file": "it opens a file",
    "torch.frombuffer": "it reads raw memory",
    "torch.import_ir_module": "it reads a file",
    "torch.import_ir_module_from_buffer": "it loads code",
    "torch.jit.load": "it loads code",
    "torch.jit.save": "it writes a file",
    "torch.load": "it reads a file",
    "torch.ops.import_module": "it imports a module",
    "torch.ops.load_library": "it loads a library",
    "torch.save": "it writes a file",
}
"""Well-known functions that are always refused, with the reason for the error."""

DENIED_PREFIXES = {
    "os.": "it acts on the operating system",
    "subprocess.": "it starts processes",
    "socket.": "it uses the network",
    "shutil.": "it acts on files",
    "pickle.": "it loads code",
    "importlib.": "it imports modules",
    "numpy.": "only NumPy functions that torch traces (torch._numpy) can be in a graph",
    "torch.distributed.launch": "it starts processes",
    "torch.hub.": "it uses the network",
    "torch.multiprocessing.": "it starts processes",
    "torch.serialization.": "it reads and writes files",
    "torch.utils.cpp_extension.": "it builds and loads code",
    "torch.utils.data.": "it starts processes",
    "torch.utils.model_zoo.": "it uses the network",
    "torch.package.": "it loads code",
}


def denial(name: str) -> str | None:
    """Why the function of this dotted name is refused, if it is."""
    if name in DENIED_FUNCTIONS:
        return DENIED_FUNCTIONS[name]
    for prefix, reason in DENIED_PREFIXES.items():
        if name.startswith(prefix):
            return reason
    return None


DENIED_MEMBERS = _words(
    "apply_ code compile dump dumps evaluate_guards_expression fake_mode from_buffer from_file "
    "func_globals get_source grad_fn graph_module load_state_dict map2_ map_ module_load node "
    "owning_module print_readable python_code register_hook register_post_accumulate_grad_hook "
    "shape_env share_memory share_memory_ storage storage_type to_folder tofile typed_storage "
    "untyped_storage write_file _typed_storage _write_file _set_from_file _new_with_file "
    "_backward_hooks _grad_fn _post_accumulate_grad_hooks _python_dispatch _view_func "
    "_view_func_unsafe _rev_view_func_unsafe _share_fd_cpu_ _share_filename_cpu_ _new_shared_fd_cpu _new_shared_filename_cpu "
    "_reduce_ex_internal _codegen _tracer_cls"
)
"""Methods and attributes that reach files, shared memory, code or the state of a trace."""

STORAGE_READS = frozenset({"untyped_storage"})
"""Storages are read by graphs that resize them; what a storage can do is in `DENIED_MEMBERS`."""

DENIED_MEMBER_PREFIXES = ("__", "f_", "gi_", "cr_", "ag_", "tb_", "co_", "func_")
"""Dunders, and attributes of Python's frames, generators, tracebacks and code objects."""

DUNDERS = frozenset(
    f"__{name}__"
    for name in _words(
        "abs add and bool ceil complex contains div divmod eq float floor floordiv ge getitem gt iadd iand "
        "ifloordiv ilshift imatmul imod imul index int invert ior ipow irshift isub itruediv ixor "
        "le len long lshift lt matmul mod mul ne neg nonzero or pos pow radd rand rdivmod reversed rfloordiv rlshift "
        "rmatmul rmod rmul ror round rpow rrshift rshift rsub rtruediv rxor setitem sub truediv "
        "trunc xor"
    )
)

OTHER_METHODS = _words(
    # of streams, events and generators, and of symbolic numbers
    "record_event wait_event wait_stream record wait query synchronize elapsed_time manual_seed "
    "get_state set_state initial_seed is_integer as_integer_ratio bit_length keys values items "
    "get append extend index count "
    # of device meshes
    "get_group get_local_rank get_coordinate get_rank"
)
