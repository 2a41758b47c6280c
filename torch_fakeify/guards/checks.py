"""The named checks: what is asked of the values of sources or of torch's global state, and how it is written."""

from __future__ import annotations

import copy
import functools
import math
import types
from typing import TYPE_CHECKING, Any

import msgspec
import sympy
import torch
from typing_extensions import override

from torch_fakeify.compat import torch_graphs, torch_symbols
from torch_fakeify.describe.describer import MetaTensorDescriber
from torch_fakeify.encoding import names
from torch_fakeify.encoding.exprs import encode_expr
from torch_fakeify.encoding.subclasses import encode_flattened
from torch_fakeify.encoding.values import decode_value, encode_value
from torch_fakeify.errors import FakeifyError, FormatError
from torch_fakeify.records.tensor import ListValue, SymDesc, SymValue, TupleValue, Value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch_fakeify.records.guards import CheckDesc

    from .scope import Reader


class Check:
    """What is asked of values, and its text.

    Args:
        ask: the answer from the argument, if there is one, and the values of the sources.
        text: the condition as Python text: ``{0}`` is the name of the first source, ``{names}`` are
            all of them, ``{expected}`` is the answer and ``{argument}`` the argument.
        sources: how many sources it has; ``None`` for any number.
        arguments: the type of its argument.
    """

    def __init__(
        self,
        ask: Callable[..., Any],
        text: str,
        *,
        sources: int | None = 1,
        arguments: type = types.NoneType,
    ) -> None:
        self.ask = ask
        self._text = text
        self._sources = sources
        self._arguments = arguments

    def bound(
        self, readers: Sequence[Reader], argument: Any, expected: Any
    ) -> Callable[[Any], bool]:
        """Return a function that is true for a scope whose values have the answer."""
        is_like = self.comparison(expected)
        ask = self.ask if argument is None else functools.partial(self.ask, argument)
        return lambda scope: is_like(ask(*[read(scope) for read in readers]))

    def comparison(self, expected: Any) -> Callable[[Any], bool]:
        """Return a function that is true for an answer like the expected one."""
        return lambda found: found == expected

    def text(self, names: Sequence[str], argument: Any, expected: Any) -> str:
        """Return the condition as Python text."""
        shown = self.shown(expected)
        return self._text.format(
            *names, names=", ".join(names), count=len(names), expected=shown, argument=argument
        )

    def shown(self, expected: Any) -> str:
        """Return the answer as Python text."""
        return value_text(expected)

    def encode(self, expected: Any, where: str) -> Value:
        """Return the record of the answer.

        Raises:
            UnsupportedValueError: it has none.
        """
        return encode_value(expected, where=where)

    def decode(self, record: Value, where: str) -> Any:
        """Return the answer of a record.

        Raises:
            FormatError: the record cannot be decoded.
        """
        return decode_value(record, where=where)

    def validate(self, desc: CheckDesc, where: str) -> None:
        """Check the number of sources and the type of the argument of a record.

        Raises:
            FormatError: they are not those of the check.
        """
        if self._sources is not None and len(desc.sources) != self._sources:
            raise FormatError(
                f"the check {desc.check!r} has another number of sources",
                where=f"{where}.sources",
                expected=str(self._sources),
                found=str(len(desc.sources)),
            )
        if type(desc.argument) is not self._arguments:
            raise FormatError(
                f"the check {desc.check!r} has another argument",
                where=f"{where}.argument",
                expected=self._arguments.__name__,
                found=type(desc.argument).__name__,
            )


class _Names(Check):
    """The names of the scope, in any order."""

    @override
    def bound(
        self, readers: Sequence[Reader], argument: Any, expected: Any
    ) -> Callable[[Any], bool]:
        wanted = frozenset(expected)
        return lambda scope: scope.keys() == wanted


class _Flag(Check):
    @override
    def comparison(self, expected: Any) -> Callable[[Any], bool]:
        return lambda found: found is expected


class _Type(Check):
    """The exact class of a value; by its name where the class is not imported."""

    @override
    def comparison(self, expected: Any) -> Callable[[Any], bool]:
        if isinstance(expected, str):
            return lambda found: type_text(found) == expected
        return lambda found: found is expected

    @override
    def shown(self, expected: Any) -> str:
        return expected if isinstance(expected, str) else type_text(expected)

    @override
    def encode(self, expected: Any, where: str) -> Value:
        return self.shown(expected)

    @override
    def decode(self, record: Value, where: str) -> Any:
        if not isinstance(record, str):
            raise FormatError(
                "a class is named by a text", where=where, found=type(record).__name__
            )
        return names.find_class(record) or record


class _Constant(Check):
    """A constant: its type and value."""

    @override
    def comparison(self, expected: Any) -> Callable[[Any], bool]:
        cls = type(expected)
        if expected is None or cls is bool:
            return lambda found: found is expected
        if cls is float and math.isnan(expected):
            return lambda found: type(found) is float and math.isnan(found)
        if cls is float and expected == 0:  # the sign of a zero matters in a division
            sign = math.copysign(1.0, expected)
            return lambda found: _is_zero(found) and math.copysign(1.0, found) == sign
        value = copy.copy(expected)  # a set may change
        return lambda found: type(found) is cls and found == value

    @override
    def text(self, names: Sequence[str], argument: Any, expected: Any) -> str:
        (name,), cls = names, type(expected)
        if expected is None or cls is bool:
            return f"{name} is {expected}"
        if cls is float and math.isnan(expected):
            return f"type({name}) is float and math.isnan({name})"
        text = f"type({name}) is {type_text(cls)} and {name} == {value_text(expected)}"
        if cls is float and expected == 0:
            return f"{text} and math.copysign(1.0, {name}) == {math.copysign(1.0, expected)}"
        return text


class _Tree(Check):
    """The ``TreeSpec`` of a value; in another process its text, its classes and its contexts."""

    @override
    def comparison(self, expected: Any) -> Callable[[Any], bool]:
        if isinstance(expected, TupleValue):
            record = expected.items[1]
            return lambda found: found is not None and _spec_record(found, "") == record
        return lambda found: found == expected

    @override
    def shown(self, expected: Any) -> str:
        return repr(expected.items[0] if isinstance(expected, TupleValue) else str(expected))

    @override
    def encode(self, expected: Any, where: str) -> Value:
        if isinstance(expected, TupleValue):
            return expected
        return TupleValue(items=(str(expected), _spec_record(expected, where)))

    @override
    def decode(self, record: Value, where: str) -> Any:
        return _pair(record, "a structure is its text and its record", where)


class _Flatten(Check):
    """The inner tensors and the context of a wrapper subclass, compared as records.

    A symbol of the recorded context stands for any integer: its guards are others.
    """

    @override
    def comparison(self, expected: Any) -> Callable[[Any], bool]:
        return lambda found: _matches(expected, found)

    @override
    def shown(self, expected: Any) -> str:
        return _shown_record(expected)

    @override
    def encode(self, expected: Any, where: str) -> Value:
        return expected

    @override
    def decode(self, record: Value, where: str) -> Any:
        pair = _pair(record, "a flattened tensor is its attributes and its context", where)
        if not isinstance(pair.items[0], ListValue):
            raise FormatError(
                "attributes are a list", where=where, found=type(pair.items[0]).__name__
            )
        return pair


def _pair(record: Value, what: str, where: str) -> TupleValue:
    if not isinstance(record, TupleValue) or len(record.items) != 2:
        raise FormatError(what, where=where, found=type(record).__name__)
    return record


class _Holds(Check):
    @override
    def comparison(self, expected: Any) -> Callable[[Any], bool]:
        return bool


# --- texts ----------------------------------------------------------------------------------------


def type_text(cls: type) -> str:
    """Return the qualified name of a class."""
    if cls.__module__ == "builtins":
        return cls.__qualname__
    return f"{cls.__module__}.{cls.__qualname__}"


def value_text(value: Any) -> str:
    """Return a constant as Python source text."""
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, float) and math.isinf(value):
        return f"float({str(value)!r})"
    return repr(value)


def _shown_record(record: Any) -> str:
    attributes, context = record.items
    found = list(attributes.items)
    try:
        shown = repr(decode_value(context))
    except FakeifyError:
        shown = type(context).__name__
    return f"({found!r}, {shown})"


_ANY_INT = SymValue(sym=SymDesc(expr=encode_expr(sympy.Symbol("n", integer=True)), kind="int"))
"""Stands for a symbolic integer in a context."""


# --- answers --------------------------------------------------------------------------------------


def _is_zero(value: Any) -> bool:
    return type(value) is float and value == 0


def _spec_record(spec: Any, where: str) -> TupleValue:
    if spec.is_leaf():
        return TupleValue(items=("*", None))
    context = encode_value(spec.context, where=where)
    children = [_spec_record(child, where) for child in spec.children()]
    return TupleValue(items=(type_text(spec.type), context, *children))


def _matches(recorded: Any, found: Any) -> bool:
    """Return whether a record is another one, where a symbol stands for any integer."""
    if isinstance(recorded, SymValue):
        return isinstance(found, SymValue) or type(found) is int
    if type(recorded) is not type(found):
        return False
    if isinstance(recorded, msgspec.Struct):
        fields = recorded.__struct_fields__
        return all(_matches(getattr(recorded, f), getattr(found, f)) for f in fields)
    if isinstance(recorded, (tuple, list)):
        if len(recorded) != len(found):
            return False
        return all(_matches(a, b) for a, b in zip(recorded, found, strict=True))
    return recorded == found


def structure_of(value: Any) -> Any:
    """Return the ``TreeSpec`` of a value; ``None`` for one that its class cannot flatten."""
    try:
        return torch_graphs.tree_flatten(value)[1]
    except Exception:  # noqa: BLE001 - of the class
        return None


def constants_of(value: Any) -> str | None:
    """Return the leaves of a value that are not tensors, as text; ``None`` as `structure_of`."""
    try:
        leaves = torch_graphs.tree_flatten(value)[0]
    except Exception:  # noqa: BLE001 - of the class
        return None
    return repr([leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)])


def flattened(t: Any) -> Value:
    """Return the record of ``__tensor_flatten__``: a tuple of the attributes and the context."""
    describer = MetaTensorDescriber()
    attributes, context = encode_flattened(
        t,
        where=type_text(type(t)),
        ints=lambda item: _ANY_INT if isinstance(item, torch.SymInt) else None,
        tensors=lambda inner, _: describer.describe_tensor(inner),
    )
    return TupleValue(items=(ListValue(items=attributes), context))


def storage_of(t: torch.Tensor) -> int:
    """Return what identifies the storage of a tensor."""
    return t.untyped_storage()._cdata


def _no_overlap(first: int, *tensors: torch.Tensor) -> bool:
    """Return whether no tensor after the first ones, by their count, overlaps with another one."""
    found = torch_symbols.compute_overlapping_tensors(list(tensors), symbolic=False)
    return all(i < first for i in found)


class _Overlap(_Holds):
    """AOTAutograd's assumption about the overlap of tensors in one storage.

    Method: ``StorageOverlap`` of ``torch/_guards.py`` (torch 2.13).
    """

    @override
    def text(self, names: Sequence[str], argument: Any, expected: Any) -> str:
        one, other = ", ".join(names[:argument]), ", ".join(names[argument:])
        return f"check_overlapping(overlapping=[{one}], non_overlapping=[{other}])"


def _state(ask: Callable[..., Any], text: str, arguments: type = types.NoneType) -> Check:
    return Check(ask, f"torch.{text} == {{expected}}", sources=0, arguments=arguments)


_TREE = "torch.utils._pytree"

CHECKS: Mapping[str, Check] = types.MappingProxyType(
    {
        "names": _Names(len, "sorted(L) == {expected}", sources=0),
        "type": _Type(type, "type({0}) is {expected}"),
        "constant": _Constant(lambda value: value, ""),
        "keys": Check(list, "list({0}) == {expected}"),
        "length": Check(len, "len({0}) == {expected}"),
        "tree": _Tree(structure_of, f"str({_TREE}.tree_structure({{0}})) == {{expected}}"),
        "tree constants": Check(
            constants_of,
            f"repr([x for x in {_TREE}.tree_leaves({{0}}) if not isinstance(x, torch.Tensor)])"
            " == {expected}",
        ),
        "dtype": Check(lambda t: t.dtype, "{0}.dtype == {expected}"),
        "device": Check(lambda t: t.device, "{0}.device == {expected}"),
        "layout": Check(lambda t: t.layout, "{0}.layout == {expected}"),
        "ndim": Check(lambda t: t.ndim, "{0}.ndim == {expected}"),
        "requires_grad": _Flag(lambda t: t.requires_grad, "{0}.requires_grad is {expected}"),
        "is_inference": _Flag(torch.Tensor.is_inference, "{0}.is_inference() is {expected}"),
        "is_conj": _Flag(torch.Tensor.is_conj, "{0}.is_conj() is {expected}"),
        "is_neg": _Flag(torch.Tensor.is_neg, "{0}.is_neg() is {expected}"),
        "sparse_dim": Check(torch.Tensor.sparse_dim, "{0}.sparse_dim() == {expected}"),
        "dense_dim": Check(torch.Tensor.dense_dim, "{0}.dense_dim() == {expected}"),
        "flatten": _Flatten(flattened, "{0}.__tensor_flatten__() == {expected}"),
        "not nan": _Holds(lambda number: not math.isnan(number), "not math.isnan({0})"),
        "same object": _Holds(lambda a, b: a is b, "{0} is {1}", sources=2),
        "other object": _Holds(lambda a, b: a is not b, "{0} is not {1}", sources=2),
        "separate objects": _Holds(
            lambda *values: len(set(map(id, values))) == len(values),
            "len({{id(t) for t in ({names})}}) == {count}",
            sources=None,
        ),
        "same storage": _Holds(
            lambda a, b: storage_of(a) == storage_of(b),
            "{0}.untyped_storage()._cdata == {1}.untyped_storage()._cdata",
            sources=2,
        ),
        "separate storages": _Holds(
            lambda *tensors: len(set(map(storage_of, tensors))) == len(tensors),
            "len({{t.untyped_storage()._cdata for t in ({names})}}) == {count}",
            sources=None,
        ),
        "overlap": _Overlap(_no_overlap, "", sources=None, arguments=int),
        "grad mode": _state(torch.is_grad_enabled, "is_grad_enabled()"),
        "inference mode": _state(torch.is_inference_mode_enabled, "is_inference_mode_enabled()"),
        "default dtype": _state(torch.get_default_dtype, "get_default_dtype()"),
        "deterministic": _state(
            torch.are_deterministic_algorithms_enabled, "are_deterministic_algorithms_enabled()"
        ),
        "matmul precision": _state(
            torch.get_float32_matmul_precision, "get_float32_matmul_precision()"
        ),
        "autocast": _state(torch.is_autocast_enabled, "is_autocast_enabled({argument!r})", str),
        "autocast dtype": _state(torch.get_autocast_dtype, "get_autocast_dtype({argument!r})", str),
    }
)
"""All checks by their names in records."""
