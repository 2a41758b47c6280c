"""The only module that imports torch's private modules, and the place of version differences.

What is cheap stands at module level. ``torch._dynamo`` and ``torch._functorch.aot_autograd`` take
as long to import as a good part of torch itself, so they are reached through functions.
"""

# pyright: reportUnusedImport=false
# Other rooms import these names from here; a test finds the ones that none does.
from __future__ import annotations

import functools
import sys
import threading
from contextlib import contextmanager, nullcontext
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from . import torch_gate

torch_gate.check(torch.__version__)  # before anything private is asked for

import torch._subclasses.fake_impls as _fake_impls
import torch._subclasses.meta_utils as meta_utils
from torch._C import DispatchKey, DispatchKeySet, _is_view_replay_enabled
from torch._C._autograd import CreationMeta
from torch._dispatch.python import suspend_functionalization
from torch._functorch import config as _functorch_config
from torch._functorch.pyfunctorch import (
    temporarily_clear_interpreter_stack,
    temporarily_restore_interpreter_stack,
)
from torch._guards import (
    CompileContext,
    CompileId,
    ShapeGuard,
    SLoc,
    Source,
    StorageOverlap,
    TracingContext,
    compile_context,
    detect_fake_mode,
    tracing,
)
from torch._library.fake_class_registry import (
    FakeScriptObject,
    maybe_to_fake_obj,
    maybe_unwrap_fake_script_object,
)
from torch._logging._internal import LazyTraceHandler, trace_log, trace_structured
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket, _OpNamespace
from torch._ops import _higher_order_ops as _hop_table
from torch._prims_common import make_contiguous_strides_for
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorConfig,
    FakeTensorConverter,
    FakeTensorMode,
    SymNumberMemoDescriptor,
    in_kernel_invocation_manager,
    maybe_get_fake_mode,
    unset_fake_temporarily,
)
from torch._subclasses.meta_utils import MetaStorageDesc as TorchStorageDesc
from torch._subclasses.meta_utils import assert_eq, assert_metadata_eq, safe_grad
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx.experimental import _config as experimental_config
from torch.fx.experimental import symbolic_shapes as _symbolic_shapes
from torch.fx.experimental.proxy_tensor import make_fx, snapshot_fake
from torch.fx.experimental.recording import trace_shape_events_log as shape_events_log
from torch.fx.experimental.sym_node import _NO_HINT as NO_HINT
from torch.fx.experimental.sym_node import SymNode, sizes_strides_methods
from torch.fx.experimental.symbolic_shapes import (
    ConstraintViolationError,
    DimDynamic,
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
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen
from torch.fx.graph import _PyTreeCodeGen as PyTreeCodeGen
from torch.fx.graph import _PyTreeInfo as PyTreeInfo
from torch.fx.traceback import preserve_node_meta
from torch.utils._mode_utils import no_dispatch
from torch.utils._ordered_set import OrderedSet
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_with_path,
    tree_structure,
    tree_unflatten,
)
from torch.utils._pytree import treespec_leaf as leaf_spec
from torch.utils._sympy import functions as sympy_functions
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.singleton_int import SingletonInt
from torch.utils._sympy.symbol import SymT, make_symbol, symbol_is_type
from torch.utils._sympy.value_ranges import ValueRangeError, ValueRanges
from torch.utils._traceback import CapturedTraceback
from torch.utils.weak import WeakIdKeyDictionary

from .errors import CaptureError, ConvertError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager
    from pathlib import Path
    from types import ModuleType

_opaque: Any = import_module("torch._library.opaque_object")
is_custom_class_obj = getattr(_opaque, "is_custom_class_obj", None) or _opaque.is_opaque_value
CustomClassBase: Any = vars(meta_utils).get("CustomClassBase") or vars(meta_utils)["OpaqueBase"]
"""Of opaque objects; ``OpaqueBase`` in torch 2.13."""

_INT, _FLOAT, _BOOL = (torch.SymInt, int), (torch.SymFloat, float), (torch.SymBool, bool)
_SYM_TYPES = {"int": _INT, "float": _FLOAT, "bool": _BOOL}


def torch_version() -> str:
    """The installed torch's version, without the local build suffix."""
    return torch.__version__.partition("+")[0]


def dynamo() -> ModuleType:
    """``torch._dynamo``, imported on first use."""
    return import_module("torch._dynamo")


def dynamo_config_patch(**changes: Any) -> AbstractContextManager[Any]:
    """``torch._dynamo.config.patch``."""
    config: Any = dynamo().config
    return config.patch(**changes)


def dynamo_source() -> ModuleType:
    """``torch._dynamo.source``, imported on first use."""
    return import_module("torch._dynamo.source")


def functorch_config_patch(**changes: Any) -> AbstractContextManager[Any]:
    """``torch._functorch.config.patch``."""
    return _functorch_config.patch(**changes)


def resolve_backend(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """The Dynamo backend of that name, or the callable itself.

    Raises:
        CaptureError: no backend has that name.
    """
    if not isinstance(backend, str):
        return backend
    from torch._dynamo.backends.registry import list_backends, lookup_backend
    from torch._dynamo.exc import InvalidBackend

    try:
        return lookup_backend(backend)
    except InvalidBackend as error:
        raise CaptureError(
            f"there is no Dynamo backend {backend!r}",
            expected=f"one of {', '.join(sorted(list_backends(exclude_tags=())))}, or a callable",
            fix="Import the package that registers it first",
        ) from error


def inductor_with(mode: str | None, options: dict[str, Any] | None) -> Callable[..., Any]:
    """Inductor with a mode or options of ``torch.compile``."""
    return torch._TorchCompileInductorWrapper(mode, options, None)


def dynamo_control_flow() -> tuple[type[BaseException], ...]:
    """Exceptions by which a backend steers Dynamo; they are not failures."""
    from torch._dynamo.exc import RestartAnalysis, SkipFrame, TensorifyScalarRestartAnalysis

    return (RestartAnalysis, SkipFrame, TensorifyScalarRestartAnalysis)


# --- functions, operators and classes by name (names.py) -------------------------------------------


def find_operator(namespace: str, op: str) -> OpOverloadPacket[Any, Any] | None:
    """The registered operator, or ``None``; asking for a missing one leaves no trace in torch.ops."""
    if not torch._C._jit_get_schemas_for_operator(f"{namespace}::{op}"):
        return None
    found = getattr(torch.ops, namespace, None)
    packet = getattr(found, op, None) if isinstance(found, _OpNamespace) else None
    return packet if isinstance(packet, OpOverloadPacket) else None


def higher_order_operators() -> dict[str, HigherOrderOperator]:
    """The registered higher-order operators by name."""
    import_module("torch._higher_order_ops")  # registers torch's own, but for the next one
    import_module("torch._higher_order_ops.register_hook")
    return _hop_table


def variable_functions() -> Any:
    """The class that holds torch's C++ functions (``torch._C._VariableFunctions``)."""
    c: Any = torch._C
    return c._VariableFunctions


_FUNCTION_MODULES = """
    builtins math operator torch torch.nn.functional torch.nn.init torch.functional torch.linalg
    torch.fft torch.special torch.sparse torch.nested torch.signal.windows.windows torch.masked._ops
    torch.nested._internal.nested_tensor torch.nn.grad torch.nn.modules.activation torch._utils
    torch.xpu torch.cpu torch.random torch.cuda torch.cuda.random torch.accelerator torch.autograd
    torch.autograd.forward_ad torch.autograd.grad_mode torch.autograd.graph torch.amp.autocast_mode
    torch._lowrank torch._linalg_utils torch._lobpcg torch._refs torch._prims
    torch._functorch.eager_transforms torch._functorch.predispatch torch._functorch.vmap
"""


@functools.cache
def function_modules() -> dict[str, ModuleType]:
    """The modules that graphs call functions of, as far as they are cheap to import."""
    import torch.nested._internal.nested_tensor  # the others are there by now

    c: Any = torch._C
    modules = [
        *(sys.modules[name] for name in _FUNCTION_MODULES.split()),
        _symbolic_shapes, *filter(None, [getattr(torch, "foreach", None)]),  # as of torch 2.15
        c, c._nn, c._linalg, c._fft, c._special, c._sparse, c._nested, c._functorch, c._autograd,
    ]  # fmt: skip
    return {module.__name__: module for module in modules}


@functools.cache
def late_function_modules() -> dict[str, ModuleType]:
    """More of them, which are slow to import: Dynamo's helpers and the NumPy that it traces."""
    import torch._dynamo.external_utils as external_utils
    import torch._numpy.fft
    from torch._dynamo import utils

    numpy = torch._numpy
    modules: list[Any] = [external_utils, utils, numpy, numpy.fft, numpy.linalg, numpy.random]
    if torch.distributed.is_available():
        modules.append(import_module("torch.distributed._functional_collectives"))
    return {module.__name__: module for module in modules}


class NumpyWrappers(NamedTuple):
    """The classes of the callables by which Dynamo traces NumPy."""

    function: type[Any]
    method: type[Any]
    operator: type[Any]


def numpy_wrappers() -> NumpyWrappers:
    """``numpy_to_tensor_wrapper``, ``numpy_method_wrapper`` and ``numpy_operator_wrapper``."""
    from torch._dynamo import utils

    return NumpyWrappers(
        utils.numpy_to_tensor_wrapper, utils.numpy_method_wrapper, utils.numpy_operator_wrapper
    )


# --- tensors (describe.py, convert.py) -------------------------------------------------------------

_c: Any = torch._C

dispatch_keys = _c._dispatch_keys
dispatch_key_of = _c._dispatch_key_parse
torch_function_depth = _c._len_torch_function_stack
DisableTorchFunction = _c.DisableTorchFunction
no_dispatch_guard = _c._DisableTorchDispatch
"""While an instance of it lives, no Python dispatch happens: what is made is not fake."""
functorch = _c._functorch
"""The bindings of functorch: its interpreters and the wrappers that belong to them."""
is_functorch_wrapped = _c._functorch.is_functorch_wrapped_tensor
functorch_is_legacy_batched = _c._functorch.is_legacy_batchedtensor
peek_interpreter_stack = _c._functorch.peek_interpreter_stack
is_batched = _c._functorch.is_batchedtensor
is_gradtracking = _c._functorch.is_gradtrackingtensor
get_unwrapped = _c._functorch.get_unwrapped
get_level = _c._functorch.maybe_get_level
DEAD_LEVEL = -2
"""What `get_level` says of a grad wrapper that outlived its transform."""
get_bdim = _c._functorch.maybe_get_bdim


def likeness(t: torch.Tensor) -> Callable[[torch.Tensor], bool]:
    """Tells in one call of C whether a tensor has this one's class, keys, dtype, device, geometry."""
    return _c._dynamo.guards.TensorGuards(t, dynamic_dims_sizes=[], dynamic_dims_strides=[]).check


def unwrap_functional(t: torch.Tensor) -> torch.Tensor:
    """What a functional tensor of functorch has inside, brought up to date."""
    return _c._functorch._unwrap_functional_tensor(t, _c._functionalization_reapply_views_tls())


def functorch_level() -> int:
    """The innermost level of functorch's interpreters."""
    return _c._functorch.current_level()


def set_forward_grad(mode: bool) -> AbstractContextManager[Any]:
    """Switches forward-mode AD on or off inside."""
    forward_ad: Any = torch.autograd.forward_ad
    return forward_ad._set_fwd_grad_enabled(mode)


def functional_tensor(elem: torch.Tensor) -> Any:
    """The Python class ``FunctionalTensor`` around a functional tensor of C++, without history."""
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    mode = _c._get_dispatch_mode(_c._TorchDispatchModeKey.FUNCTIONAL)
    return FunctionalTensor(elem, FunctionalTensorMode() if mode is None else mode)


get_creation_meta = _c._autograd._get_creation_meta
set_creation_meta = _c._autograd._set_creation_meta
set_conj = _c._set_conj
set_neg = _c._set_neg
throw_on_data_ptr = _c._set_throw_on_mutable_data_ptr
warn_on_data_ptr = _c._set_warn_deprecated_on_mutable_data_ptr
push_dispatch_mode = _c._push_on_torch_dispatch_stack
pop_dispatch_mode = _c._pop_torch_dispatch_stack
key_excluded = _c._dispatch_tls_is_dispatch_key_excluded
set_key_excluded = _c._dispatch_tls_set_dispatch_key_excluded
set_grad_enabled = _c._set_grad_enabled
dispatch_modes_active = _c._len_torch_dispatch_stack
without_keys = _c.ExcludeDispatchKeyGuard
DelayedError = _c._functions.DelayedError
enable_python_dispatcher = _c._EnablePythonDispatcher
empty_strided = _c._VariableFunctions.empty_strided
make_subclass: Any = torch.Tensor._make_subclass
make_wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass

key_included = _c._dispatch_tls_is_dispatch_key_included
functionalize_included = functools.partial(key_included, DispatchKey.Functionalize)
"""Whether functionalization is active in this thread."""


def inference_hidden() -> bool:
    """Whether torch asked that inference tensors be taken for normal ones (Dynamo does)."""
    return getattr(meta_utils.tls, "disable_inference_mode", False)


def dim_range_class() -> Any:
    """``torch._dynamo.decorators._DimRange``, what ``mark_dynamic`` puts on a tensor."""
    return import_module("torch._dynamo.decorators")._DimRange


def no_fake_mode() -> AbstractContextManager[Any]:
    """Tensors made inside are real, even while a ``FakeTensorMode`` is active."""
    return unset_fake_temporarily()


# --- structures of inputs and outputs (graph_calling.py) -------------------------------------------


def tree_type(cls: type) -> type:
    """What a ``TreeSpec`` of a named tuple has as its type."""
    fields = [0] * field_count(cls)
    example: Any = tuple.__new__(cls, fields) if hasattr(cls, "_fields") else cls(fields)
    return tree_structure(example).type


def field_count(cls: Any) -> int:
    """How many fields a named tuple class or one of ``torch.return_types`` has."""
    return cls.n_sequence_fields if hasattr(cls, "n_sequence_fields") else len(cls._fields)


# --- notes in the metadata of FX nodes (graph_meta.py) ---------------------------------------------

_KEYS = "Sequence Mapping GetAttr ConvertInt CallMethod InnerTensor DivideBy"
PATH_KEYS = tuple(f"{name}Key" for name in _KEYS.split())
"""The classes of which paths to unbacked symbols are made."""


@functools.cache
def note_classes() -> dict[str, type[Any]]:
    """The dataclasses that stand in node metadata, by name: paths, and AOTAutograd's descriptors."""
    from torch._functorch._aot_autograd import descriptors
    from torch.fx.experimental import symbolic_shapes
    from torch.utils import _pytree

    # The class of ``meta["tensor_meta"]``: readers find imported classes only.
    import_module("torch.fx.passes.shape_prop")
    found: dict[str, type[Any]] = {
        cls.__name__: cls
        for cls in vars(descriptors).values()
        if isinstance(cls, type)
        and issubclass(cls, (descriptors.AOTInput, descriptors.AOTOutput))
        and cls.__module__ == descriptors.__name__
    }
    for name in PATH_KEYS:
        home = _pytree if hasattr(_pytree, name) else symbolic_shapes
        found[name] = getattr(home, name)
    return found


@contextmanager
def scalar_specializations() -> Generator[tuple[type[BaseException], set[str]], None, None]:
    """How the pass that turns Python floats into tensors asks for another attempt.

    It raises the exception that this yields, after it has put the names of the float symbols that
    must be constants into the set that this yields; the set lasts until the end of the block.
    """
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import TensorifyState

    before = set(TensorifyState.force_specializations)
    try:
        yield TensorifyScalarRestartAnalysis, TensorifyState.force_specializations
    finally:
        TensorifyState.clear()
        for name in before:
            TensorifyState.specialize(name)


def unvalidated_shape_env(**options: Any) -> Any:
    """A new ``ShapeEnv`` that records no events and does no translation validation."""
    env: Any = ShapeEnv(should_record_events=False, **options)
    env._translation_validation_enabled = False
    for name in ("validator", "graph", "name_to_node"):
        vars(env).pop(name, None)
    return env


def around_body(operator: Any) -> AbstractContextManager[Any]:
    """What torch runs the bodies of a higher-order operator in."""
    if not getattr(operator, "__name__", "").startswith("flex_attention"):
        return nullcontext()
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


def make_sym(kind: str, expr: Any, shape_env: Any, hint: Any, *, constant: bool = False) -> Any:
    """A symbolic scalar over an expression, also over one that the ``ShapeEnv`` has specialized.

    Args:
        kind: ``"int"``, ``"float"`` or ``"bool"``.
        expr: over symbols that the ``ShapeEnv`` has.
        shape_env: the ``ShapeEnv``.
        hint: its value now, ``None`` if it depends on data or did when it was made.
        constant: whether it is a literal.
    """
    sym_type, python_type = _SYM_TYPES[kind]
    if hint is None:
        # Else torch would look for one, and find it where data turned out to be a size.
        return sym_type(SymNode(expr, shape_env, python_type, NO_HINT))
    hint = make_nested_int(*hint) if isinstance(hint, tuple) else hint  # a nested int's record
    literal = hint if constant else None
    return sym_type(SymNode(expr, shape_env, python_type, hint, constant=literal))


# --- symbols (fresh_sizes.py) -----------------------------------------------------------------------


def make_nested_int(number: int, coeff: int) -> torch.SymInt:
    """The nested int that torch gave this number, times a coefficient."""
    from torch.nested._internal.nested_int import NestedIntNode

    return torch.SymInt(NestedIntNode(number, coeff))  # pyright: ignore[reportArgumentType]


def reserve_nested_int(number: int) -> None:
    """Keeps jagged tensors that this process makes from here on from getting the number."""
    counters: Any = import_module("torch.nested._internal.nested_tensor")
    counters._tensor_id_counter = max(counters._tensor_id_counter, number + 1)


def nested_int_of_offsets(offsets: torch.Tensor) -> torch.SymInt:
    """The nested int of real offsets (or lengths), a new one at first sight."""
    counters: Any = import_module("torch.nested._internal.nested_tensor")
    return counters.get_tensor_symint(offsets)


def new_nested_int(mode: Any) -> int:
    """A number that no nested int of this process has, nor one of the mode's intermediates."""
    counters: Any = import_module("torch.nested._internal.nested_tensor")
    number = max(counters._tensor_id_counter, mode.nt_tensor_id_counter)
    counters._tensor_id_counter = mode.nt_tensor_id_counter = number + 1
    return number


def make_size_symbol(number: int) -> Any:
    """The symbol that a ``ShapeEnv`` makes for a size that is at least one."""
    return make_symbol(SymT.SIZE, number, positive=True, integer=True)


def note_symbol(shape_env: Any, symbol: Any) -> None:
    """Enters a new symbol where a ``ShapeEnv`` finds symbols by their names, as of torch 2.15."""
    if (by_name := getattr(shape_env, "name_to_symbol", None)) is not None:
        by_name[symbol.name] = symbol


def is_float_symbol(symbol: Any) -> bool:
    """Whether the symbol stands for a float, backed or not."""
    return symbol_is_type(symbol, (SymT.FLOAT, SymT.UNBACKED_FLOAT))


def layout_methods() -> list[str]:
    """Methods of ``SymNode`` by which C++ finds out how a tensor lies in memory, which it keeps."""
    guards = "guard_bool", "guard_or_false", "guard_or_true", "guard_size_oblivious", "expect_true"
    return [*guards, *sizes_strides_methods]


def forget_layouts(fakes: list[Any]) -> None:
    """Lets C++ find out anew how fake tensors lie in memory; their versions stay."""
    keys = DispatchKeySet(DispatchKey.ADInplaceOrView)
    with disable_current_modes(), DisableTorchFunction(), _c._ExcludeDispatchKeyGuard(keys):
        for fake in fakes:
            with in_kernel_invocation_manager(fake.fake_mode):
                fake.as_strided_(fake.size(), fake.stride(), fake.storage_offset())


# --- wrapper subclasses (subclasses.py, meshes.py) --------------------------------------------------

unwrap_script_object: Callable[[Any], Any] = maybe_unwrap_fake_script_object
"""The object behind the stand-in that torch traces with, or the object itself."""


def own_subclass(name: str) -> type | None:
    """One of torch's own traceable wrapper subclasses by its qualified name, else ``None``.

    They are imported here, since a reader's program need not know that a file has them.
    """
    distributed = torch.distributed.is_available()
    match name:
        case "torch.nested._internal.nested_tensor.NestedTensor":
            return import_module("torch.nested._internal.nested_tensor").NestedTensor
        case "torch.distributed.tensor.DTensor" if distributed:
            return import_module("torch.distributed.tensor").DTensor
        case "torch.distributed._functional_collectives.AsyncCollectiveTensor" if distributed:
            home = import_module("torch.distributed._functional_collectives")
            return home.AsyncCollectiveTensor
        case "torch._subclasses.complex_tensor.ComplexTensor":
            return import_module("torch._subclasses.complex_tensor").ComplexTensor
        case "torch.testing._internal.two_tensor.TwoTensor":
            return import_module("torch.testing._internal.two_tensor").TwoTensor
        case _:
            return None


class DeviceMeshes(NamedTuple):
    """Torch's classes and functions around ``DeviceMesh``."""

    device_mesh: Any
    mesh_layout: Any
    flat_layout: Any
    placements: ModuleType
    """``torch.distributed.tensor.placement_types``"""
    find_group: Callable[[str], Any]
    """The process group of that name in this process, or ``None``."""
    thread_id: Callable[[], int | None]
    """What a mesh made in this thread has as its ``_thread_id``."""
    may_keep_order: bool
    """Whether a mesh may keep the order of its ranks, as of torch 2.15."""


@functools.cache
def device_meshes() -> DeviceMeshes:
    """They are imported on first use.

    Raises:
        ConvertError: this build of torch has no ``torch.distributed``.
    """
    if not torch.distributed.is_available():
        raise ConvertError("this build of torch has no torch.distributed")
    import torch.distributed.tensor.placement_types as placements
    from torch._C._distributed_c10d import _resolve_process_group
    from torch.distributed._mesh_layout import _FlatLayout, _MeshLayout
    from torch.distributed.device_mesh import DeviceMesh

    def find_group(name: str) -> Any:
        try:
            return _resolve_process_group(cast("Any", name))
        except RuntimeError:
            return None

    def thread_id() -> int | None:
        distributed: Any = torch.distributed
        is_threaded = distributed.is_initialized() and distributed.get_backend() == "threaded"
        return threading.get_ident() if is_threaded else None

    classes = DeviceMesh, _MeshLayout, _FlatLayout
    may_keep_order = "_preserve_rank_order" in DeviceMesh.__annotations__
    return DeviceMeshes(*classes, placements, find_group, thread_id, may_keep_order)


# --- the drop-in (dropin.py) ------------------------------------------------------------------------

_functions: Any = torch
add_batch_dim = _c._functorch._add_batch_dim
wrap_functional = _c._functorch._wrap_functional_tensor
wrap_for_grad = _c._functorch._wrap_for_grad
disable_functorch = _c._DisableFuncTorch
is_functional: Any = _functions._is_functional_tensor
is_functional_base: Any = _functions._is_functional_tensor_base
to_functional: Any = _functions._to_functional_tensor
from_functional: Any = _functions._from_functional_tensor
sync_functional: Any = _functions._sync
mirror_autograd_meta: Any = _functions._mirror_autograd_meta_to
view_func_of = meta_utils.ViewFunc.from_tensor
"""Torch's own classes of view functions serve as they are: they only call a function."""
clone_real_storage: Any = getattr(meta_utils, "_clone_real_storage_from_tensor", None)
"""A copy of the storage of a tensor, of a fake one the storage of its real tensor."""
compute_stride: Any = getattr(_fake_impls, "_compute_stride", lambda *_: None)
WHOLE_STORAGES = clone_real_storage is not None
"""Whether torch's converter, as of 2.14, makes storages whole.

A storage that is known by a tensor of only a part of it is made as large as it is, and a real copy
has all its bytes; a wrapper subclass has no storage to share, its inner tensors have.
"""
without_functional: Any = getattr(meta_utils, "_unwrap_python_functional_tensor", lambda t: t)
"""What a ``FunctionalTensor`` has inside, where torch's describer looks there for the data."""


def transfer_symbols(env: Any, geometry: Any, source: Any, context: Any, overrides: Any) -> Any:
    """Sizes, strides and storage offset of a fake tensor of another ``ShapeEnv`` in this one.

    In torch 2.13 it takes the hints for unbacked sizes; later they are the other environment's.
    """
    transfer = env.transfer_symbols_from_foreign_shape_env
    takes_hints = "hint_overrides" in signature(transfer).parameters
    options = {"hint_overrides": overrides} if takes_hints else {}
    return transfer(*geometry, source, symbolic_context=context, **options)


def custom_view_func(t: torch.Tensor) -> Any:
    """The view function of a tensor that is no fake."""
    return meta_utils._CustomViewFunc(t._view_func_unsafe)


def next_describer_id() -> int:
    """A number for a describer, which no other has, torch's own included."""
    number = meta_utils.DESCRIBER_NEXT_ID
    meta_utils.DESCRIBER_NEXT_ID = type(number)(number + 1)
    return number


def python_dispatch_excluded() -> bool:
    """Whether dispatch to Python is off, so that operators would miss the fake tensor mode."""
    return _c._dispatch_tls_local_exclude_set().has(_c.DispatchKey.Python)


def unimplemented(gb_type: str, context: str) -> None:
    """Ends what Dynamo traces here, by its own exception."""
    exc: Any = import_module("torch._dynamo.exc")
    exc.unimplemented(
        gb_type=gb_type, context=context, explanation="This is not supported.", hints=[]
    )


def uninteresting_files() -> set[str]:
    """The files that torch leaves out of users' stacks: the set itself, not a copy."""
    return _symbolic_shapes.uninteresting_files()


def skip_in_dynamo(folder: Path) -> None:
    """Dynamo traces nothing of the files in a folder."""
    rules: Any = import_module("torch._dynamo.trace_rules")
    rules.SKIP_DIRS.append(f"{folder.as_posix()}/")
    rules._recompile_re()


def trace_in_dynamo_again(folder: Path) -> None:
    """Takes `skip_in_dynamo` back."""
    rules: Any = import_module("torch._dynamo.trace_rules")
    rules.SKIP_DIRS.remove(f"{folder.as_posix()}/")
    rules._recompile_re()


# --- other frontends (frontend.py) ------------------------------------------------------------------

is_dense_and_non_overlapping = _symbolic_shapes._eval_is_non_overlapping_and_dense_flat
ShapeGuardPrinter = _symbolic_shapes.ShapeGuardPythonPrinter
compute_overlapping_tensors = _c._dynamo.guards.compute_overlapping_tensors


def aot_autograd() -> ModuleType:
    """``torch._functorch.aot_autograd``, imported on first use."""
    return import_module("torch._functorch.aot_autograd")
