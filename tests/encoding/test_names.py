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
    "function": """
        torch.relu torch.conv2d torch.einsum torch._VF.einsum torch.nn.functional.relu torch.nn.functional.linear
        torch.nn.functional.scaled_dot_product_attention torch._C._nn._upsample_bilinear2d_aa
        torch.linalg.solve torch.special.erf torch.fft.fft torch.Tensor.add torch.Tensor.__add__
        torch.Tensor.norm torch.sym_sum torch.sym_not torch._sym_sqrt torch._check
        torch._C._set_grad_enabled torch._C._functorch._add_batch_dim
        torch._functorch.predispatch._vmap_increment_nesting operator.getitem math.floor
        builtins.getattr builtins.max
    """,
    "class": "builtins.int torch.Size",
    "op": "aten.add.Tensor aten.relu.default prims.add.default",
    "packet": "aten.add",
    "hop": "cond flex_attention",
}
HOMES = {"op": torch.ops, "packet": torch.ops, "hop": torch.ops.higher_order}
MODULES = types.SimpleNamespace(torch=torch, operator=operator, math=math, builtins=builtins)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, listed in FUNCTIONS.items() for name in listed.split()],
)
def test_a_function_has_a_name_that_decodes_to_it(kind, name):
    """Decoding returns the same object."""
    fn = operator.attrgetter(name)(HOMES.get(kind, MODULES))
    value = names.encode_function(fn)
    assert (value.kind, value.name) == (kind, name)
    assert names.decode_function(value) is fn


def test_of_several_names_the_first_in_the_lists_is_recorded():
    """Torch has some functions in several modules."""
    assert names.encode_function(torch._VF.lstm).name == "torch.lstm"
    enter = names.encode_function(torch.amp._enter_autocast)
    assert enter.name == "torch.amp.autocast_mode._enter_autocast"


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


# Why no function of a module is in a list that Dynamo may put into a graph, or only the listed ones.
NOT_LISTED = {
    "bindings that configure, inspect or script": "torch._C",
    "of complex constants, which Dynamo folds": "cmath",
    "questions about the machine": """
        torch._C._cpu torch._C._cudnn torch.backends.cpu torch.backends.mkl torch.backends.mps
        torch.backends.openmp torch.cpu torch.cuda torch.cuda._utils torch.cuda.amp.common torch.xpu
        torch.xpu._utils
    """,
    "settings of the process": """
        torch torch.__future__ torch.backends torch.backends.cuda torch.backends.cudnn
        torch.backends.mkldnn torch.backends.quantized
    """,
    "streams and devices, without a build at hand": """
        torch._C._dynamo.utils torch.mtia torch.mps
    """,
    "profiling and logging": """
        torch._C._itt torch._C._verbose torch.cuda.nvtx torch.cuda.profiler torch.mps.profiler
    """,
    "TorchScript and compiled code": """
        torch._C._jit_tree_views torch._C._te torch.cuda.graphs torch.cuda.jiterator
    """,
    "inlined by Dynamo": """
        torch._compile torch._functorch.apis torch._functorch.eager_transforms torch._functorch.utils
        torch.autograd torch.autograd.forward_ad torch.autograd.function torch.autograd.functional
        torch.functional torch.nn.functional torch.nn.modules.utils torch.nn.parameter
    """,
    "changes modules": """
        torch._functorch.batch_norm_replacement torch._functorch.deprecated
        torch.fx.experimental.const_fold torch.quantization
    """,
    "tracing, and implementations of operators": """
        torch._guards torch.fx.experimental.proxy_tensor torch._higher_order_ops.map
        torch._higher_order_ops.out_dtype torch._higher_order_ops.utils
    """,
    "reads or writes files": "torch._utils torch._weights_only_unpickler torch.cuda._memory_viz",
    "decorators, context managers, hooks and methods of objects": """
        torch.amp.autocast_mode torch.amp.grad_scaler torch.autograd.graph
        torch.cuda.amp.autocast_mode torch.random torch.sparse.semi_structured
    """,
    "the allocator, communication and threads": """
        torch.cuda.memory torch.cuda.nccl torch.futures torch.xpu.memory
    """,
    "states of all devices": "torch.cuda.random torch.xpu.random",
    "helpers and registration": """
        torch.masked._ops torch.nested._internal.nested_tensor torch.nn torch.nn._reduction
        torch.nn.grad torch.return_types torch.signal.windows.windows torch.sparse
    """,
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
    for listed in NOT_LISTED.values():
        for module in listed.split():
            missing.pop(module, None)
    assert missing == {}
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


REFUSED = {
    "function": """
        builtins.eval builtins.exec builtins.open builtins.__import__ builtins.compile builtins.setattr
        builtins.globals operator.attrgetter operator.methodcaller operator.call os.system
        subprocess.Popen socket.socket pickle.loads importlib.import_module torch.load torch.save
        torch.from_file torch.compile torch.fork torch.import_ir_module torch.hub.load torch.jit.load
        torch.ops.load_library torch.utils.cpp_extension.load torch.serialization.load
        torch.nn.functional.importlib.import_module torch.nn.functional.boolean_dispatch
        torch.functional.torch.load torch.Tensor.share_memory_ torch.Tensor.__reduce_ex__
        torch.Tensor.__class__ torch.Tensor.apply_ torch._C._jit_pass_inline torch.get_device_module
        torch._import_dotted_name torch.__getattr__ numpy.load torch._numpy.np.load
        torch._VF.from_file torch._VF.__class__ math.__loader__.load_module sys.exit . torch.
        torch.relu.__globals__
    """,
    "op": "aten.from_file.default aten.save.default debugprims.load_tensor.default",
    "packet": "aten.from_file",
    "hop": "call_torchbind triton_kernel_wrapper_mutation nothing",
    "class": "subprocess.Popen builtins.type",
    "numpy": "torch.relu torch._numpy.__builtins__",
    "numpy_method": "__class__ tofile",
    "numpy_operator": "torch.load",
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, listed in REFUSED.items() for name in listed.split()]
)
def test_names_outside_the_lists_are_refused(kind, name):
    """Functions that reach files, network, processes or code are refused, and unknown ones."""
    with pytest.raises(UnknownNameError):
        names.decode_function(FunctionValue(kind=kind, name=name))


@pytest.mark.parametrize(
    "name", ["", "aten", "aten.add", "aten.add.Tensor.x", "a b.c.d", "..", "é.b.c"]
)
def test_malformed_names_are_refused(name):
    """A name of an operator that has not three identifiers is a format error."""
    with pytest.raises(FormatError):
        names.decode_function(FunctionValue(kind="op", name=name))
    with pytest.raises(UnknownNameError):
        names.decode_function(FunctionValue(kind="function", name=name))


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


# --- members --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["add_", "__add__", "__getitem__", "view", "t", "record_event", "untyped_storage"]
)
def test_methods_of_tensors_are_allowed(name):
    """Methods of tensors, streams and numbers are allowed, and the arithmetic dunders."""
    assert names.check_method(name, where="$") == name


MEMBERS = {
    names.check_method: """
        __class__ __reduce__ __init_subclass__ share_memory_ from_file to_folder _write_file apply_
        nosuchmethod system gi_frame storage
    """,
    names.check_attribute: "__class__ __globals__ f_globals to_folder _codegen",
}


@pytest.mark.parametrize(
    ("check", "name"),
    [(check, name) for check, listed in MEMBERS.items() for name in listed.split()],
)
def test_members_that_lead_out_of_the_graph_are_refused(check, name):
    """Those that reach Python's internals, files or code or call functions, and unknown ones."""
    with pytest.raises(UnknownNameError):
        check(name, where="$")


@pytest.mark.parametrize("name", ["", "a b", "a.b", "1", "lambda", "a;b", "a\nb", "é", "x)"])
def test_identifiers_are_plain(name):
    """Text that is no identifier could be code where FX prints it."""
    for check in (names.check_identifier, names.check_method, names.check_attribute):
        with pytest.raises(FormatError):
            check(name, where="$")


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
    """A class that graphs have no use for is refused, and one that a reader could not find."""

    class Local(enum.Enum):
        A = 1

    with pytest.raises(UnknownNameError, match="is no tensor, enum or named tuple class"):
        names.decode_class("subprocess.Popen")
    for cls in (subprocess.Popen, Local):
        with pytest.raises(UnsupportedValueError, match=r"a class cannot be recorded.*importable"):
            names.encode_class(cls)


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
