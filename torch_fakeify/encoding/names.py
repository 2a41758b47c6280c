"""Names of functions, operators and classes: the allow-lists.

A record never holds a callable, only a kind and a dotted name. Encoding finds a name by which
decoding gives the *same* object, and refuses what has none. Decoding looks names up in the closed
lists of this file: operators among those registered, functions among the listed modules (which
this package imports itself, never because of a file), classes among the basic ones and those
that the process has already imported. Attributes are read from a module's or class's ``__dict__``,
so that no module-level ``__getattr__`` runs.

Kinds of ``FunctionValue``: ``op`` (``aten.add.Tensor``), ``packet`` (``aten.add``), ``hop``
(``cond``), ``function`` (``torch.nn.functional.relu``, ``operator.add``, ``torch.Tensor.add``),
``class`` (``torch.Size``), and the wrappers by which Dynamo traces NumPy: ``numpy``
(``torch._numpy.sum``), ``numpy_method`` (``sum``) and ``numpy_operator`` (``operator.add``).
"""

from __future__ import annotations

import builtins
import enum
import functools
import keyword
import re
import sys
from operator import attrgetter
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    WrapperDescriptorType,
)
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy
import torch

from torch_fakeify.compat import torch_dynamo, torch_graphs
from torch_fakeify.errors import FormatError, UnknownNameError, UnsupportedValueError
from torch_fakeify.records.tensor import FunctionValue

from .allowlist import (
    DENIED_FUNCTIONS,
    DENIED_HIGHER_ORDER,
    DENIED_MEMBER_PREFIXES,
    DENIED_MEMBERS,
    DENIED_NAMESPACES,
    DENIED_OPERATORS,
    DUNDERS,
    HELPERS,
    LISTED,
    NUMPY_ATTRIBUTES,
    NUMPY_MODULES,
    OTHER_METHODS,
    PRIM_OPERATORS,
    STORAGE_READS,
    WHOLE,
    denial,
    functions_inside,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import ModuleType

    from torch_fakeify.compat.torch_graphs import OpOverload


def _classes(module: ModuleType, names: str) -> dict[str, type]:
    """Return classes of a module by their dotted names."""
    return {f"{module.__name__}.{name}": attrgetter(name)(module) for name in names.split()}


_CALLABLE_CLASSES = {
    **_classes(builtins, "bool complex dict float int list range set slice str tuple"),
    **_classes(torch, "Event Generator Size Stream cuda.Event cuda.Stream device"),
    **_classes(torch, "nn.Buffer nn.Parameter"),
}

_BASIC_CLASSES = {
    **_CALLABLE_CLASSES,
    **_classes(builtins, "bytes frozenset object type"),
    **_classes(torch, "SymBool SymFloat SymInt dtype finfo iinfo layout memory_format"),
    "builtins.NoneType": type(None),
    "builtins.ellipsis": type(...),
}

_PART = re.compile(r"[A-Za-z0-9_]+")

_FUNCTION_TYPES = (BuiltinFunctionType, FunctionType)
_METHOD_TYPES = (MethodDescriptorType, WrapperDescriptorType, FunctionType)
CALLABLES = (
    *_FUNCTION_TYPES,
    *_METHOD_TYPES,
    torch_graphs.OpOverload,
    torch_graphs.OpOverloadPacket,
    torch_graphs.HigherOrderOperator,
)
"""Classes of what `encode_function` names, besides classes."""


# --- names that end in generated code or are read as attributes ------------------------------------


def is_identifier(name: str) -> bool:
    """Whether a name is an ASCII Python identifier and not a keyword."""
    return name.isidentifier() and name.isascii() and not keyword.iskeyword(name)


def check_identifier(name: str, *, where: str) -> str:
    """Return the name if it is an ASCII Python identifier and not a keyword; else raise ``FormatError``."""
    if is_identifier(name):
        return name
    raise FormatError(
        "a name is not an identifier", where=where, expected="letters, digits, _", found=repr(name)
    )


def check_path(name: str, *, where: str) -> str:
    """Return the name if it is a dotted path of attributes, whose parts may be numbers."""
    parts = name.split(".")
    if all(_PART.fullmatch(part) and not part.startswith("__") for part in parts):
        return name
    raise FormatError(
        "not a dotted name", where=where, expected="letters, digits, _ and dots", found=repr(name)
    )


def check_method(name: str, *, where: str) -> str:
    """Return the name if a graph may call a method of that name.

    Allowed are the methods of ``torch.Tensor`` and of its imported subclasses, and a few of
    streams, generators and numbers; of the dunders only arithmetic and indexing.

    Raises:
        UnknownNameError: otherwise.
    """
    check_identifier(name, where=where)
    if name in DUNDERS or name in OTHER_METHODS or name in STORAGE_READS:
        return name
    if not _is_plain_member(name):
        raise UnknownNameError(f"the method {name!r} is not allowed in a graph", where=where)
    if any(hasattr_static(cls, name) for cls in _tensor_classes()):
        return name
    raise UnknownNameError(
        f"no tensor class has a method {name!r}",
        where=where,
        fix="Import the tensor subclass that defines it first.",
    )


def check_attribute(name: str, *, where: str, inner: Iterable[str] = ()) -> str:
    """Return the name if a graph may read an attribute of that name with ``getattr``.

    Allowed are the data attributes of tensors, devices, dtypes, streams and the tuples that operators
    return, and the ``inner`` tensors of a wrapper subclass. Others could lead to the state of the trace,
    and from there to functions that evaluate text.

    Raises:
        UnknownNameError: otherwise.
    """
    check_identifier(name, where=where)
    if _is_plain_member(name):
        if name in inner or name in _data_attributes():
            return name
        if any(isinstance(vars(cls).get(name), _DATA) for cls in _tensor_classes()):
            return name
    raise UnknownNameError(f"the attribute {name!r} may not be read by a graph", where=where)


_DATA = (property, GetSetDescriptorType, MemberDescriptorType)


@functools.cache
def _data_attributes() -> frozenset[str]:
    """Data attributes of other values in graphs, and of ``torch.Tensor``'s bases."""
    tuples = [cls for cls in vars(torch.return_types).values() if isinstance(cls, type)]
    classes = [
        *torch.Tensor.__mro__, torch.Size, torch.device, torch.dtype, torch.finfo, torch.iinfo,
        torch.Generator, *torch.Stream.__mro__, *torch.Event.__mro__, *torch.cuda.Stream.__mro__,
        complex, int, range, slice, *tuples,
    ]  # fmt: skip
    found = {n for cls in classes for n, item in vars(cls).items() if isinstance(item, _DATA)}
    return NUMPY_ATTRIBUTES | found


def _is_plain_member(name: str) -> bool:
    return not (name in DENIED_MEMBERS or name.startswith(DENIED_MEMBER_PREFIXES))


_INTERNAL = ("torch._subclasses.", "torch.distributed._shard.")
"""Modules whose tensor classes never occur in a graph: fake and functional tensors, and shards."""


def _tensor_classes() -> Iterator[type]:
    pending: list[type] = [torch.Tensor]
    seen: set[type] = set()
    while pending:
        cls = pending.pop()
        if cls not in seen:
            seen.add(cls)
            if not cls.__module__.startswith(_INTERNAL):
                yield cls
            pending.extend(cls.__subclasses__())


def hasattr_static(cls: type, name: str) -> bool:
    """Whether a class or one of its bases defines the name; no descriptor or metaclass runs."""
    return any(name in vars(base) for base in cls.__mro__)


_ADVICE = "If it is yours, register it as an operator with torch.library.custom_op."
_OF_TORCH = "It is torch's own: take what calls it out of the compiled function."

# --- functions ------------------------------------------------------------------------------------


def _advice(fn: object) -> str | None:
    if not isinstance(fn, FunctionType):
        return None
    return _OF_TORCH if fn.__module__.startswith("torch.") else _ADVICE


def encode_function(fn: object, *, where: str = "$") -> FunctionValue:
    """The name of an operator, a listed function or a callable class.

    Raises:
        UnsupportedValueError: the object has no name that a reader can resolve.
    """
    value = _find_name(fn, where)
    if value is None:
        raise UnsupportedValueError(
            "a function cannot be recorded",
            where=where,
            expected="an operator or a function of a listed torch module",
            found=_describe_callable(fn),
            fix=_advice(fn),
        )
    return value


def decode_function(v: FunctionValue, *, where: str = "$") -> Callable[..., Any]:
    """The operator, function or class of that name.

    Raises:
        UnknownNameError: it is not registered, not on a list, or denied.
    """
    match v.kind:
        case "op" | "packet":
            return _operator(v.kind, v.name, where)
        case "hop":
            return _higher_order(v.name, where)
        case "function":
            return _function(v.name, where)
        case "class":
            if v.name in _CALLABLE_CLASSES:
                return _CALLABLE_CLASSES[v.name]
            raise UnknownNameError(f"the class {v.name!r} may not be called", where=where)
        case "numpy":
            if v.name.rpartition(".")[0] not in NUMPY_MODULES:
                raise UnknownNameError(f"{v.name!r} is not a function of torch._numpy", where=where)
            return torch_dynamo.numpy_wrappers().function(_function(v.name, where))
        case "numpy_method":
            return torch_dynamo.numpy_wrappers().method(_check_numpy_method(v.name, where))
        case "numpy_operator":
            if not v.name.startswith(("operator.", "builtins.")):
                raise UnknownNameError(f"{v.name!r} is not a Python operator", where=where)
            return torch_dynamo.numpy_wrappers().operator(_function(v.name, where))
        case _:
            raise FormatError("unknown kind of function", where=where, found=repr(v.kind))


def _check_numpy_method(name: str, where: str) -> str:
    """Raise for a method that the arrays traced by Dynamo do not have."""
    check_identifier(name, where=where)
    array = torch_graphs.late_function_modules()["torch._numpy"].ndarray
    if name in DUNDERS or (_is_plain_member(name) and hasattr_static(array, name)):
        return name
    raise UnknownNameError(f"{name!r} is not a method of an array of torch._numpy", where=where)


def _find_name(fn: object, where: str) -> FunctionValue | None:
    if isinstance(fn, torch_graphs.OpOverload):
        return _verified("op", encode_operator(fn).name, fn, where)
    if isinstance(fn, torch_graphs.OpOverloadPacket):
        return _verified("packet", fn._qualified_op_name.replace("::", "."), fn, where)
    if isinstance(fn, torch_graphs.HigherOrderOperator):
        return _verified("hop", fn.name(), fn, where)
    if isinstance(fn, type):
        found = [name for name, cls in _CALLABLE_CLASSES.items() if cls is fn]
        return FunctionValue(kind="class", name=found[0]) if found else None
    if isinstance(fn, (*_FUNCTION_TYPES, *_METHOD_TYPES)):
        key = id(_identity(fn))
        found = _index().get(key)
        module = getattr(fn, "__module__", None) or ""
        if found is None and module.startswith(
            ("torch._dynamo", "torch._numpy", "torch.distributed")
        ):
            found = _late_index(dtensor=module.startswith("torch.distributed.tensor")).get(key)
        return FunctionValue(kind="function", name=found[1]) if found else None
    return _find_numpy(fn, where)


def _find_numpy(fn: object, where: str) -> FunctionValue | None:
    # Dynamo makes a new wrapper for each call: it is the same when class and content are.
    if type(fn).__module__ != "torch._dynamo.utils":
        return None
    wrappers = torch_dynamo.numpy_wrappers()
    if isinstance(fn, wrappers.method):
        method = _check_numpy_method(getattr(fn, "method"), where)  # noqa: B009
        return FunctionValue(kind="numpy_method", name=method)
    for cls, kind, field in (
        (wrappers.function, "numpy", "f"),
        (wrappers.operator, "numpy_operator", "op"),
    ):
        if isinstance(fn, cls):
            return FunctionValue(kind=kind, name=encode_function(getattr(fn, field)).name)
    return None


def encode_operator(op: OpOverload[..., Any]) -> FunctionValue:
    """The name of an operator, without a check that it resolves to this object."""
    schema = op._schema
    overload = schema.overload_name or "default"
    return FunctionValue(kind="op", name=f"{schema.name.replace('::', '.')}.{overload}")


def _verified(kind: str, name: str, fn: object, where: str) -> FunctionValue | None:
    value = FunctionValue(kind=kind, name=name)
    try:
        found = decode_function(value, where=where)
    except UnknownNameError as error:
        raise UnsupportedValueError(
            "a function cannot be recorded", where=where, found=name, fix=f"{error}."
        ) from error
    return value if found is fn else None


def _describe_callable(fn: object) -> str:
    module = getattr(fn, "__module__", None)
    name = getattr(fn, "__qualname__", None)
    if isinstance(module, str) and isinstance(name, str):
        reason = denial(f"{module}.{name}")
        held = [cell.cell_contents for cell in getattr(fn, "__closure__", None) or ()]
        about = [f" of {c.__module__}.{c.__qualname__}" for c in held if isinstance(c, type)]
        return f"{module}.{name}" + "".join(about) + (f" ({reason})" if reason else "")
    return f"an object of {type(fn).__module__}.{type(fn).__qualname__}"


def _identity(fn: object) -> object:
    # A function inside another one is made anew each time: what stays is its code.
    if isinstance(fn, FunctionType) and "<locals>" in fn.__qualname__ and not fn.__closure__:
        return fn.__code__
    return fn


_Index: TypeAlias = dict[int, tuple[object, str]]
"""Functions, by ``id``, and their preferred (first listed) names."""


@functools.cache
def _index() -> _Index:
    return _names_of(torch_graphs.function_modules())


@functools.cache
def _late_index(*, dtensor: bool) -> _Index:
    return _names_of(torch_graphs.late_function_modules(dtensor=dtensor))


def _names_of(modules: dict[str, Any]) -> _Index:
    names: _Index = {}

    def add(fn: object, name: str) -> None:
        kept = _identity(fn)
        names.setdefault(id(kept), (kept, name))

    for module_name in ("torch", *WHOLE, *LISTED):
        if module_name in modules:
            for name, fn in _listed(module_name, modules[module_name]):
                add(fn, f"{module_name}.{name}")
    if "torch" in modules:
        for cls in torch.Tensor.__mro__[:2]:
            for name, fn in vars(cls).items():
                if isinstance(fn, _METHOD_TYPES) and _is_tensor_method(name):
                    add(getattr(torch.Tensor, name), f"torch.Tensor.{name}")
        # The C++ functions under the names that torch.functional took over.
        for name in dir(torch_graphs.variable_functions()):
            fn = getattr(torch_graphs.variable_functions(), name)
            if isinstance(fn, BuiltinFunctionType) and _is_variable_function(name):
                add(fn, f"torch._VF.{name}")
    return names


def _is_tensor_method(name: str) -> bool:
    return name in DUNDERS or name in STORAGE_READS or _is_plain_member(name)


def _is_variable_function(name: str) -> bool:
    return not name.startswith("__") and f"torch.{name}" not in DENIED_FUNCTIONS


def _listed(module_name: str, module: Any) -> Iterator[tuple[str, Any]]:
    for name, fn in sorted({**vars(module), **functions_inside(module)}.items()):
        if _is_listed(module_name, name, fn):
            yield name, fn


def _is_listed(module_name: str, name: str, fn: object) -> bool:
    if not isinstance(fn, (*_FUNCTION_TYPES, torch_graphs.OpOverloadPacket)):
        return False
    if name.startswith("__") or denial(f"{module_name}.{name}") is not None:
        return False
    if name in HELPERS.get(module_name, "").split():
        return False
    if name in LISTED.get(module_name, "").split():
        return True
    if module_name == "torch":
        # torch.functional's functions and the C++ ones; Python ones of torch itself are listed.
        home = getattr(fn, "__module__", None)
        is_cpp = getattr(torch_graphs.variable_functions(), name, None) is fn
        return is_cpp or home == "torch.functional"
    return module_name in WHOLE and _is_at_home(module_name, name, fn)


def _is_at_home(module_name: str, name: str, fn: object) -> bool:
    home = getattr(fn, "__module__", None) or ""
    if home == "torch":
        return getattr(torch_graphs.variable_functions(), getattr(fn, "__name__", ""), None) is fn
    if module_name.startswith(("torch._numpy", "torch._refs", "torch._prims")):
        # Their functions are wrapped: decorators of these packages, and NumPy names.
        return home.startswith(("torch._numpy", "torch._refs", "torch._prims")) and name[0] != "_"
    return home in WHOLE


def _function(name: str, where: str) -> Callable[..., Any]:
    reason = denial(name)
    if reason is not None:
        raise UnknownNameError(f"{name!r} is denied: {reason}", where=where)
    module_name, _, attribute = name.rpartition(".")
    if module_name == "torch.Tensor":
        method = getattr(torch.Tensor, attribute, None) if _is_tensor_method(attribute) else None
        if isinstance(method, _METHOD_TYPES):
            return method
        raise UnknownNameError(f"{name!r} may not be called by a graph", where=where)
    if module_name == "torch._VF":
        found = getattr(torch_graphs.variable_functions(), attribute, None)
        if isinstance(found, BuiltinFunctionType) and _is_variable_function(attribute):
            return found
        raise UnknownNameError(f"torch has no function {attribute!r}", where=where)
    if module_name not in LISTED and module_name not in WHOLE:
        raise UnknownNameError(
            f"{name!r} is not in a module whose functions a graph may call", where=where
        )
    modules = torch_graphs.function_modules()
    if module_name not in modules:
        modules = torch_graphs.late_function_modules(dtensor=module_name.endswith(".DTensor"))
    module = modules.get(module_name)
    fn = None if module is None else {**functions_inside(module), **vars(module)}.get(attribute)
    if fn is None or not _is_listed(module_name, attribute, fn):
        raise UnknownNameError(f"{name!r} is not a function that a graph may call", where=where)
    return fn


# --- operators -----------------------------------------------------------------------------------


def _operator(kind: str, name: str, where: str) -> Any:
    parts = name.split(".")
    if len(parts) != (3 if kind == "op" else 2):
        raise FormatError(
            "not the name of an operator", where=where, expected="namespace.name", found=repr(name)
        )
    for part in parts:
        if not (part.isidentifier() and part.isascii()):
            raise FormatError("not the name of an operator", where=where, found=repr(name))
    namespace, op = parts[:2]
    if f"{namespace}.{op}" in DENIED_OPERATORS:
        reason = DENIED_OPERATORS[f"{namespace}.{op}"]
        raise UnknownNameError(f"torch.ops.{name} is denied: {reason}", where=where)
    reason = DENIED_NAMESPACES.get(namespace)
    if namespace == "prim" and op not in PRIM_OPERATORS:
        reason = "it is an operator of TorchScript's interpreter"
    if reason is not None:
        raise UnknownNameError(f"torch.ops.{name} is denied: {reason}", where=where)
    packet = torch_graphs.find_operator(namespace, op)
    if packet is None:
        raise UnknownNameError(
            f"torch.ops.{namespace}.{op} is not registered in this process",
            where=where,
            fix=None  # another version of torch has it
            if namespace in torch_graphs.TORCHS_NAMESPACES
            else f"Import the module that registers the operators of {namespace!r} (--import MODULE)",
        )
    if kind == "packet":
        return packet
    if parts[2] not in packet.overloads():
        raise UnknownNameError(
            f"torch.ops.{namespace}.{op} has no overload {parts[2]!r}",
            where=where,
            expected=", ".join(sorted(packet.overloads())),
        )
    return getattr(packet, parts[2])


@functools.lru_cache(maxsize=4096)
def _argument_names(op: OpOverload[..., Any]) -> frozenset[str]:
    return frozenset(argument.name for argument in op._schema.arguments)


def check_keywords(op: OpOverload[..., Any], keywords: Iterable[str], *, where: str) -> None:
    """Whether an operator has arguments of these names: versions of torch add some, and rename.

    Raises:
        UnknownNameError: there is none of a name.
    """
    arguments = _argument_names(op)
    for name in keywords:
        if name not in arguments:
            raise UnknownNameError(
                f"torch.ops.{op} has no argument {name!r}",
                where=where,
                expected=", ".join(sorted(arguments)),
            )


def _higher_order(name: str, where: str) -> Any:
    if name in DENIED_HIGHER_ORDER:
        reason = DENIED_HIGHER_ORDER[name]
        raise UnknownNameError(f"torch.ops.higher_order.{name} is denied: {reason}", where=where)
    hop = torch_graphs.higher_order_operators().get(name)
    if hop is None:
        raise UnknownNameError(
            f"torch.ops.higher_order.{name} is not registered in this process",
            where=where,
            fix="Import the package that defines this higher-order operator first.",
        )
    return hop


# --- classes -------------------------------------------------------------------------------------


def encode_class(cls: type, *, where: str = "$") -> str:
    """The qualified name of a class that :func:`decode_class` finds again.

    Raises:
        UnsupportedValueError: it is local to a function, shadowed, or of no allowed sort.
    """
    for name, basic in _BASIC_CLASSES.items():
        if basic is cls:
            return name
    name = f"{cls.__module__}.{cls.__qualname__}"
    if find_class(name) is not cls:
        # C++ enumerations have another name in their module.
        for alias, found in vars(sys.modules.get(cls.__module__, object)).items():
            if found is cls:
                name = f"{cls.__module__}.{alias}"
    if find_class(name) is not cls or not _is_value_class(cls):
        raise UnsupportedValueError(
            "a class cannot be recorded",
            where=where,
            expected="a basic type, or an importable tensor, enum or named tuple class",
            found=name,
        )
    return name


def decode_class(name: str, *, where: str = "$") -> type:
    """The class of that name: a basic one, or a tensor, enum or named tuple class.

    Only classes that this process has already imported are found.

    Raises:
        UnknownNameError: there is no such class here, or it is of no allowed sort.
    """
    if name in _BASIC_CLASSES:
        return _BASIC_CLASSES[name]
    cls = known_class(name, where=where)
    if not _is_value_class(cls):
        raise UnknownNameError(
            f"the class {name!r} is no tensor, enum or named tuple class", where=where
        )
    return cls


def known_class(name: str, *, where: str) -> type:
    """The class of that name, of any kind, as of `find_class`.

    Raises:
        UnknownNameError: this process has imported none.
    """
    cls = find_class(name)
    if cls is None:
        module = name.rpartition(".")[0]
        raise UnknownNameError(
            f"the class {name!r} is not known in this process",
            where=where,
            fix=f"Run `import {module}` first if you trust it." if _is_dotted(module) else None,
        )
    return cls


def _is_dotted(name: str) -> bool:
    return name.isascii() and all(part.isidentifier() for part in name.split("."))


def find_class(name: str) -> type | None:
    """The class of that name, if this process has already imported it.

    It may be of any kind: the caller checks which ones a file may name.
    """
    if not _is_dotted(name):
        return None
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        found: object = sys.modules.get(".".join(parts[:cut]))
        if found is None:
            continue
        for part in parts[cut:]:
            found = vars(found).get(part) if hasattr(found, "__dict__") else None
        return found if isinstance(found, type) else None
    return None


def _is_value_class(cls: type) -> bool:
    return (
        is_record_tuple(cls)
        or issubclass(cls, (torch.Tensor, enum.Enum, numpy.generic, torch.UntypedStorage))
        or is_pybind_enum(cls)
        or (issubclass(cls, torch.autograd.Function) and cls.__module__.startswith("torch."))
    )


def is_pybind_enum(cls: type) -> bool:
    """Whether a class is one of torch's C++ enumerations."""
    return type(cls).__name__ == "pybind11_type" and "__members__" in vars(cls)


def is_record_tuple(cls: type) -> bool:
    """Whether a class is a named tuple or one of ``torch.return_types``."""
    return issubclass(cls, tuple) and (
        hasattr_static(cls, "_fields")
        or (hasattr_static(cls, "n_sequence_fields") and cls.__module__ == "torch.return_types")
    )
