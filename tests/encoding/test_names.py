"""Names of functions, operators and classes, and those that are refused."""

from __future__ import annotations

import builtins
import collections
import enum
import math
import operator
import subprocess
import sys
import types

import pytest
import torch
import torch._dynamo.trace_rules as trace_rules
import torch.nn.functional as F
from processes import fresh
from quiet import quiet
from torch._dynamo.utils import (
    numpy_method_wrapper,
    numpy_operator_wrapper,
    numpy_to_tensor_wrapper,
)

from torch_fakeify.compat.torch_graphs import (
    function_modules,
    higher_order_operators,
    late_function_modules,
)
from torch_fakeify.encoding import allowlist, names
from torch_fakeify.errors import FormatError, UnknownNameError, UnsupportedValueError
from torch_fakeify.records.tensor import FunctionValue

Point = collections.namedtuple("Point", "x y")


class Color(enum.Enum):
    """An enumeration of this module."""

    RED = 1


FUNCTIONS = {
    torch.relu: ("function", "torch.relu"),
    torch.conv2d: ("function", "torch.conv2d"),
    torch.einsum: ("function", "torch.einsum"),
    torch._VF.einsum: ("function", "torch._VF.einsum"),
    torch._VF.lstm: ("function", "torch.lstm"),
    F.relu: ("function", "torch.nn.functional.relu"),
    F.linear: ("function", "torch.nn.functional.linear"),
    F.scaled_dot_product_attention: (
        "function",
        "torch.nn.functional.scaled_dot_product_attention",
    ),
    torch._C._nn._upsample_bilinear2d_aa: ("function", "torch._C._nn._upsample_bilinear2d_aa"),
    torch.linalg.solve: ("function", "torch.linalg.solve"),
    torch.special.erf: ("function", "torch.special.erf"),
    torch.fft.fft: ("function", "torch.fft.fft"),
    torch.Tensor.add: ("function", "torch.Tensor.add"),
    torch.Tensor.__add__: ("function", "torch.Tensor.__add__"),
    torch.Tensor.norm: ("function", "torch.Tensor.norm"),
    torch.sym_sum: ("function", "torch.sym_sum"),
    torch.sym_not: ("function", "torch.sym_not"),
    torch._sym_sqrt: ("function", "torch._sym_sqrt"),
    torch._check: ("function", "torch._check"),
    torch.amp._enter_autocast: ("function", "torch.amp.autocast_mode._enter_autocast"),
    torch._C._set_grad_enabled: ("function", "torch._C._set_grad_enabled"),
    torch._C._functorch._add_batch_dim: ("function", "torch._C._functorch._add_batch_dim"),
    torch._functorch.predispatch._vmap_increment_nesting: (
        "function",
        "torch._functorch.predispatch._vmap_increment_nesting",
    ),
    operator.getitem: ("function", "operator.getitem"),
    math.floor: ("function", "math.floor"),
    getattr: ("function", "builtins.getattr"),
    max: ("function", "builtins.max"),
    int: ("class", "builtins.int"),
    torch.Size: ("class", "torch.Size"),
    torch.ops.aten.add.Tensor: ("op", "aten.add.Tensor"),
    torch.ops.aten.relu.default: ("op", "aten.relu.default"),
    torch.ops.aten.add: ("packet", "aten.add"),
    torch.ops.prims.add.default: ("op", "prims.add.default"),
    torch.ops.higher_order.cond: ("hop", "cond"),
    torch.ops.higher_order.flex_attention: ("hop", "flex_attention"),
}


@pytest.mark.parametrize(
    ("fn", "expected"), FUNCTIONS.items(), ids=[name for _, name in FUNCTIONS.values()]
)
def test_a_function_has_a_name_that_decodes_to_it(fn, expected):
    """Decoding returns the same object, and the name is the first one in the lists."""
    value = names.encode_function(fn)
    assert (value.kind, value.name) == expected
    assert names.decode_function(value) is fn


def test_dynamos_numpy_wrappers_are_rebuilt():
    """The wrappers of Dynamo are new objects of the same class and content."""
    import torch._numpy as tnp

    cases = (
        (numpy_to_tensor_wrapper(tnp.sum), "f", "torch._numpy.sum"),
        (numpy_method_wrapper("sum"), "method", "sum"),
        (numpy_operator_wrapper(operator.mul), "op", "operator.mul"),
    )
    for wrapper, field, name in cases:
        value = names.encode_function(wrapper)
        again = names.decode_function(value)
        assert value.name == name
        assert type(again) is type(wrapper)
        assert getattr(again, field) == getattr(wrapper, field)
        assert again.__name__ == wrapper.__name__


def test_every_listed_name_exists_and_round_trips():
    """No entry of the lists is misspelt or missing in torch, and each decodes to its function."""
    modules = {**function_modules(), **late_function_modules(dtensor=True)}
    newer = {"torch.foreach"} - set(modules)  # of torch 2.15 and later
    assert (set(allowlist.WHOLE) | set(allowlist.LISTED)) - newer <= set(modules)
    for module, listed in allowlist.LISTED.items():
        for name in listed.split():
            fn = names.decode_function(FunctionValue(kind="function", name=f"{module}.{name}"))
            assert names.decode_function(names.encode_function(fn)) is fn


# Modules whose functions Dynamo may put into a graph, and why none of them is in a list.
NOT_LISTED = {
    "torch._C": "bindings that configure, inspect or script; the few that graphs call are listed",
    "cmath": "of complex constants, which Dynamo folds",
    "torch._C._cpu": "questions about the machine",
    "torch._C._cudnn": "questions about the library",
    "torch._C._dynamo.utils": "streams of the process",
    "torch._C._itt": "profiling",
    "torch._C._jit_tree_views": "TorchScript",
    "torch._C._te": "TorchScript",
    "torch._C._verbose": "logging",
    "torch": "settings of the process and Python helpers; what graphs call is listed",
    "torch.mtia": "streams of a device without a build at hand",
    "torch.__future__": "settings of the process",
    "torch._compile": "Dynamo",
    "torch._functorch.apis": "inlined by Dynamo",
    "torch._functorch.batch_norm_replacement": "changes modules",
    "torch._functorch.deprecated": "changes modules",
    "torch._functorch.eager_transforms": "checks, inlined by Dynamo",
    "torch._functorch.utils": "inlined by Dynamo",
    "torch._guards": "tracing state",
    "torch._higher_order_ops.map": "implementations of the operator",
    "torch._higher_order_ops.out_dtype": "implementations of the operator",
    "torch._higher_order_ops.utils": "implementations of operators",
    "torch._utils": "loading and saving; what graphs call is listed",
    "torch._weights_only_unpickler": "reads files",
    "torch.amp.autocast_mode": "decorators",
    "torch.amp.grad_scaler": "a Python object's method",
    "torch.autograd": "inlined by Dynamo; what graphs call is listed",
    "torch.autograd.forward_ad": "inlined by Dynamo",
    "torch.autograd.function": "inlined by Dynamo",
    "torch.autograd.functional": "inlined by Dynamo",
    "torch.autograd.graph": "hooks",
    "torch.backends": "settings of the process",
    "torch.backends.cpu": "questions about the machine",
    "torch.backends.cuda": "settings of the process",
    "torch.backends.cudnn": "settings of the process",
    "torch.backends.mkl": "questions about the machine",
    "torch.backends.mkldnn": "settings of the process",
    "torch.backends.mps": "questions about the machine",
    "torch.backends.openmp": "questions about the machine",
    "torch.backends.quantized": "settings of the process",
    "torch.cpu": "questions about the machine",
    "torch.cuda": "questions about the machine; what graphs call is listed",
    "torch.cuda._memory_viz": "writes files",
    "torch.cuda._utils": "questions about the machine",
    "torch.cuda.amp.autocast_mode": "decorators",
    "torch.cuda.amp.common": "questions about the machine",
    "torch.cuda.graphs": "CUDA graphs",
    "torch.cuda.jiterator": "compiles code",
    "torch.cuda.memory": "the allocator",
    "torch.cuda.nccl": "communication",
    "torch.cuda.nvtx": "profiling",
    "torch.cuda.profiler": "profiling",
    "torch.cuda.random": "states of all devices",
    "torch.functional": "inlined by Dynamo",
    "torch.futures": "threads",
    "torch.fx.experimental.const_fold": "changes modules",
    "torch.fx.experimental.proxy_tensor": "tracing",
    "torch.masked._ops": "helpers",
    "torch.mps": "the device",
    "torch.mps.profiler": "profiling",
    "torch.nested._internal.nested_tensor": "helpers",
    "torch.nn": "helpers",
    "torch.nn._reduction": "helpers, constant-folded",
    "torch.nn.functional": "checks, inlined by Dynamo",
    "torch.nn.grad": "helpers",
    "torch.nn.modules.utils": "helpers, inlined by Dynamo",
    "torch.nn.parameter": "inlined by Dynamo",
    "torch.quantization": "a training loop",
    "torch.random": "context managers",
    "torch.return_types": "registration",
    "torch.signal.windows.windows": "helpers",
    "torch.sparse": "a test helper",
    "torch.sparse.semi_structured": "a tensor subclass",
    "torch.xpu": "questions about the machine; what graphs call is listed",
    "torch.xpu._utils": "questions about the machine",
    "torch.xpu.memory": "the allocator",
    "torch.xpu.random": "states of all devices",
}


def test_functions_that_dynamo_may_call_are_listed_or_have_a_reason():
    """A new torch with a new module of in-graph functions fails here."""
    missing = {}
    found = 0
    for rules in (
        trace_rules.torch_c_binding_in_graph_functions,
        trace_rules.torch_non_c_binding_in_graph_functions,
    ):
        for name in rules:
            fn = trace_rules.load_object(name)
            if fn is None:
                continue
            try:
                assert names.decode_function(names.encode_function(fn)) is fn
                found += 1
            except UnsupportedValueError:
                missing.setdefault(name.rpartition(".")[0], []).append(name)
    assert not {m: n for m, n in missing.items() if m not in NOT_LISTED}
    assert found > 1450


NOT_IN_GRAPHS = [
    *(f"Tensor.{name}" for name in (
        "__array__", "__array_wrap__", "__deepcopy__", "__dlpack__", "__dlpack_device__",
        "__format__", "__reduce_ex__", "__repr__", "__setstate__", "apply_", "map2_", "map_",
        "module_load", "register_hook", "register_post_accumulate_grad_hook", "share_memory_",
        "storage", "storage_type",
    )),
    "torch.autocast",
]  # fmt: skip
"""Overridable functions without a name, none of which can be in a graph."""


def test_every_tensor_function_of_torch_has_a_name():
    """Every function of `torch` and `torch.Tensor` that a subclass can override has a name."""
    from torch.overrides import get_overridable_functions

    with quiet():
        overridable = get_overridable_functions()
    lost = []
    for namespace, functions in overridable.items():
        for fn in functions:
            if not isinstance(
                getattr(fn, "__self__", None), (property, types.GetSetDescriptorType)
            ):
                try:
                    assert names.decode_function(names.encode_function(fn)) is fn
                except UnsupportedValueError:
                    lost.append(f"{getattr(namespace, '__name__', namespace)}.{fn.__name__}")
    assert sorted(set(lost)) == NOT_IN_GRAPHS


def test_higher_order_operators_are_found_or_denied_by_name():
    """Each one that torch registers is in one of the two lists."""
    for name, hop in higher_order_operators().items():
        if name in allowlist.DENIED_HIGHER_ORDER:
            with pytest.raises(UnsupportedValueError, match="is denied"):
                names.encode_function(hop)
        else:
            value = names.encode_function(hop)
            assert names.decode_function(value) is hop


HOSTILE = [
    "builtins.eval",
    "builtins.exec",
    "builtins.open",
    "builtins.__import__",
    "builtins.compile",
    "builtins.setattr",
    "builtins.globals",
    "operator.attrgetter",
    "operator.methodcaller",
    "operator.call",
    "os.system",
    "subprocess.Popen",
    "socket.socket",
    "pickle.loads",
    "importlib.import_module",
    "torch.load",
    "torch.save",
    "torch.from_file",
    "torch.compile",
    "torch.fork",
    "torch.import_ir_module",
    "torch.hub.load",
    "torch.jit.load",
    "torch.ops.load_library",
    "torch.utils.cpp_extension.load",
    "torch.serialization.load",
    "torch.nn.functional.importlib.import_module",
    "torch.nn.functional.boolean_dispatch",
    "torch.functional.torch.load",
    "torch.Tensor.share_memory_",
    "torch.Tensor.__reduce_ex__",
    "torch.Tensor.__class__",
    "torch.Tensor.apply_",
    "torch._C._jit_pass_inline",
    "torch.get_device_module",
    "torch._import_dotted_name",
    "torch.__getattr__",
    "numpy.load",
    "torch._numpy.np.load",
    "torch._VF.from_file",
    "torch._VF.__class__",
    "math.__loader__.load_module",
    "sys.exit",
    "",
    ".",
    "torch.",
    "torch.relu.__globals__",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_outside_the_lists_are_refused(name):
    """Functions that reach files, network, processes or code are refused, and unknown ones."""
    with pytest.raises(UnknownNameError):
        names.decode_function(FunctionValue(kind="function", name=name))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("op", "aten.from_file.default"),
        ("op", "aten.save.default"),
        ("packet", "aten.from_file"),
        ("op", "debugprims.load_tensor.default"),
        ("hop", "call_torchbind"),
        ("hop", "triton_kernel_wrapper_mutation"),
        ("hop", "nothing"),
        ("class", "subprocess.Popen"),
        ("class", "builtins.type"),
        ("numpy", "torch.relu"),
        ("numpy", "torch._numpy.__builtins__"),
        ("numpy_method", "__class__"),
        ("numpy_method", "tofile"),
        ("numpy_operator", "torch.load"),
    ],
)
def test_every_kind_has_its_own_deny_list(kind, name):
    """Denied operators, classes that may not be called, and unknown NumPy functions are refused."""
    with pytest.raises(UnknownNameError):
        names.decode_function(FunctionValue(kind=kind, name=name))


@pytest.mark.parametrize(
    "name", ["aten", "aten.add", "aten.add.Tensor.x", "a b.c.d", "..", "é.b.c"]
)
def test_malformed_operator_names_are_format_errors(name):
    """A name of an operator that has not three identifiers is a format error."""
    with pytest.raises(FormatError):
        names.decode_function(FunctionValue(kind="op", name=name))


def test_an_unregistered_operator_is_named_with_its_package():
    """The error contains the import, and the lookup leaves no empty namespace behind."""
    with pytest.raises(UnknownNameError) as caught:
        names.decode_function(FunctionValue(kind="op", name="nosuchlib.op.default"), where="$.x")
    assert str(caught.value) == (
        "$.x: torch.ops.nosuchlib.op is not registered in this process. "
        "Import the module that registers the operators of 'nosuchlib' (--import MODULE)"
    )
    assert "nosuchlib" not in vars(torch.ops)


def test_an_unknown_overload_lists_the_known_ones():
    """A torch with other overloads gives another error than a missing operator."""
    with pytest.raises(
        UnknownNameError, match=r"no overload 'Foo'; expected Scalar, Scalar_out, Tensor"
    ):
        names.decode_function(FunctionValue(kind="op", name="aten.add.Foo"))


def test_an_unknown_kind_is_a_format_error():
    """The kinds of names are a closed set, and any other kind is a format error."""
    with pytest.raises(FormatError) as caught:
        names.decode_function(FunctionValue(kind="eval", name="1"))
    assert str(caught.value) == "$: unknown kind of function; found 'eval'"


def user_function(x):
    """A function of this module."""
    return x


def test_a_users_function_is_refused_with_a_fix():
    """A user's function, whose module a reader could not import, is refused with a fix."""
    with pytest.raises(UnsupportedValueError) as caught:
        names.encode_function(user_function, where="$.nodes[3].target")
    assert str(caught.value) == (
        "$.nodes[3].target: a function cannot be recorded; expected an operator or a function of "
        f"a listed torch module; found {__name__}.user_function. "
        "If it is yours, register it as an operator with torch.library.custom_op."
    )


def test_dangerous_functions_are_refused_when_encoding():
    """A function that opens files cannot be written to a capture."""
    for fn in (torch.load, torch.save, torch.compile, eval, open, torch.from_file, exec):
        with pytest.raises(UnsupportedValueError):
            names.encode_function(fn)


def test_user_operators_are_found_once_registered():
    """Operators of any namespace are found in the registry alone."""
    with torch.library._scoped_library("fakeify_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        op = torch.ops.fakeify_test.twice.default
        value = names.encode_function(op)
        assert value == FunctionValue(kind="op", name="fakeify_test.twice.default")
        assert names.decode_function(value) is op


def test_decoding_imports_nothing_that_a_file_names():
    """A function or class of a module that is not imported stays unknown and is not imported."""
    script = """
import sys
from torch_fakeify.encoding import names
from torch_fakeify.records.tensor import FunctionValue
from torch_fakeify.errors import UnknownNameError
for call in (
    lambda: names.decode_class("xmlrpc.client.Fault"),
    lambda: names.decode_class("xmlrpc.client.MultiCall"),
    lambda: names.decode_function(FunctionValue(kind="function", name="xmlrpc.client.dumps")),
):
    try:
        call()
        raise SystemExit("found")
    except UnknownNameError:
        pass
assert "xmlrpc" not in sys.modules
"""
    fresh("-c", script)


# --- members --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["add_", "__add__", "__getitem__", "view", "t", "record_event", "untyped_storage"]
)
def test_methods_of_tensors_are_allowed(name):
    """Methods of tensors, streams and numbers are allowed, and the arithmetic dunders."""
    assert names.check_method(name, where="$") == name


@pytest.mark.parametrize(
    "name",
    ["__class__", "__reduce__", "__init_subclass__", "share_memory_", "from_file", "to_folder",
     "_write_file", "apply_", "nosuchmethod", "system", "gi_frame", "storage"],
)  # fmt: skip
def test_other_methods_are_refused(name):
    """Methods that lead to classes, reach files or call functions are refused, and unknown ones."""
    with pytest.raises(UnknownNameError):
        names.check_method(name, where="$")


@pytest.mark.parametrize("name", ["__class__", "__globals__", "f_globals", "to_folder", "_codegen"])
def test_attributes_that_lead_out_of_the_graph_are_refused(name):
    """No attribute reaches Python's internals or a graph's code."""
    with pytest.raises(UnknownNameError):
        names.check_attribute(name, where="$")


@pytest.mark.parametrize("name", ["", "a b", "a.b", "1", "lambda", "a;b", "a\nb", "é", "x)"])
def test_identifiers_are_plain(name):
    """Text that is no identifier could be code where FX prints it."""
    with pytest.raises(FormatError):
        names.check_identifier(name, where="$")


# --- classes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cls",
    [int, bool, type(None), torch.Tensor, torch.nn.Parameter, torch.dtype, torch.SymInt, Point,
     Color, torch.return_types.max, torch.nn.attention.SDPBackend, torch.UntypedStorage],
)  # fmt: skip
def test_classes_of_values_round_trip(cls):
    """Basic types, tensor, enum and named tuple classes have names."""
    assert names.decode_class(names.encode_class(cls)) is cls


def test_other_classes_are_refused():
    """A class that graphs have no use for is refused."""
    with pytest.raises(UnknownNameError, match="is no tensor, enum or named tuple class"):
        names.decode_class("subprocess.Popen")
    with pytest.raises(UnsupportedValueError, match="a class cannot be recorded"):
        names.encode_class(subprocess.Popen)


def test_a_local_class_is_refused():
    """A class local to a function is refused, since a reader could not find it."""

    class Local(enum.Enum):
        A = 1

    with pytest.raises(UnsupportedValueError, match="importable"):
        names.encode_class(Local)


def test_the_error_for_an_unknown_class_contains_the_import():
    """The reader decides whether to trust the module."""
    with pytest.raises(UnknownNameError) as caught:
        names.decode_class("nosuch.module.Tensor", where="$.a")
    assert str(caught.value) == (
        "$.a: the class 'nosuch.module.Tensor' is not known in this process. "
        "Run `import nosuch.module` first if you trust it."
    )


@pytest.mark.parametrize(
    "name", ["", ".", "a b", "os.system", "torch.nn", "torch.Tensor.__class__"]
)
def test_names_of_no_class_are_refused(name):
    """Modules, functions and paths that need a descriptor are refused."""
    with pytest.raises(UnknownNameError):
        names.decode_class(name)


def test_lookup_of_a_class_runs_no_module_getattr():
    """Lazy modules import on attribute access, so only their dictionaries are read."""
    calls = []
    module = types.ModuleType("lazy_module_of_a_test")
    module.__getattr__ = calls.append
    sys.modules[module.__name__] = module
    try:
        with pytest.raises(UnknownNameError):
            names.decode_class(f"{module.__name__}.Anything")
    finally:
        del sys.modules[module.__name__]
    assert calls == []


def test_builtins_on_the_list_are_harmless():
    """No builtin of the list runs code, reaches files or reads arbitrary attributes."""
    allowed = set(allowlist.LISTED["builtins"].split())
    dangerous = {"eval", "exec", "open", "compile", "__import__", "input", "breakpoint", "globals",
                 "locals", "vars", "dir", "setattr", "delattr", "type", "super", "print", "memoryview",
                 "map", "filter", "iter", "next", "callable", "classmethod", "property", "exit",
                 "quit", "help"}  # fmt: skip
    assert not allowed & dangerous
    assert all(hasattr(builtins, name) for name in allowed)
