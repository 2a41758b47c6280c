"""Records of a frame's inputs in their initial state.

Tracing may have changed the fake inputs (``resize_``, ``transpose_``, ``set_``), so the real tensors
are described instead, and their sizes get the symbols cached in the frontend's symbolic contexts (see
"Tensor Fakification and Symbol Caching" in torch's ``symbolic_shapes.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import sympy
import torch

from torch_fakeify.compat import torch_dispatch, torch_dynamo, torch_symbols
from torch_fakeify.encoding.exprs import encode_sym
from torch_fakeify.encoding.opaque_values import encode_constant
from torch_fakeify.encoding.sources import encode_source, source_of
from torch_fakeify.errors import CaptureError
from torch_fakeify.records.frame import InputDesc
from torch_fakeify.records.tensor import NestedIntDesc

from . import tensor_state
from .unsupported import name_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_fakeify.records.tensor import MetaTensorDesc

    from .describer import MetaTensorDescriber


def describe_inputs(
    placeholders: Sequence[torch.fx.Node],
    inputs: Sequence[Any],
    describer: MetaTensorDescriber,
    shape_env: Any | None,
) -> tuple[InputDesc, ...]:
    """Describe the inputs of a graph, each beside its placeholder.

    Args:
        placeholders: the graph's placeholders.
        inputs: real tensors or fake ones, symbolic scalars and constants, in the same order.
        describer: of the tensors.
        shape_env: the frame's ``ShapeEnv``, if it has one.

    Raises:
        CaptureError: an input does not match its placeholder.
        UnsupportedTensorError: an input has no record.
    """
    for fx_node, value in zip(placeholders, inputs, strict=True):
        _check_input(fx_node, value)
    tensor_to_context = getattr(torch_dynamo.TracingContext.try_get(), "tensor_to_context", {})
    # By id, since the caller holds the tensors: lookups in a weak dictionary are slow.
    by_id = {id(tensor): context for tensor, context in tensor_to_context.items()}
    contexts = [
        _context_of(fx_node, v, by_id) for fx_node, v in zip(placeholders, inputs, strict=True)
    ]
    rows = list(zip(placeholders, inputs, contexts, strict=True))
    described: dict[torch.fx.Node, InputDesc] = {}
    # Tensors first: the error of an unsupported tensor explains that of a scalar.
    rows.sort(key=lambda row: not isinstance(row[1], torch.Tensor))
    # Without this, torch looks up `__torch_function__` at each access to a parameter.
    with torch_dispatch.DisableTorchFunction():
        for fx_node, value, context in rows:
            described[fx_node] = _describe_input(fx_node, value, context, describer)
    symbolizer = _Symbolizer(shape_env, describer)

    def last(row: tuple[torch.fx.Node, Any, Any]) -> tuple[bool, bool]:
        # Torch makes each tensor once: an input that is also a part of another input may have the
        # symbols of the part. Bases come before views, which refer to the record with the policy.
        desc = described[row[0]].tensor
        return not symbolizer.has_symbols(row[2]), desc is not None and desc.is_view

    for fx_node, value, context in sorted(rows, key=last):
        symbolizer.add(described[fx_node], fx_node, value, context)
    return tuple(symbolizer.finished(described[fx_node]) for fx_node in placeholders)


INPUTS_FIX = "Pass the example inputs that the backend was called with"
_NO_VALUE: Any = object()
_SCALARS: dict[type, tuple[type, ...]] = {
    bool: (bool, torch.SymBool),
    int: (int, torch.SymInt),
    float: (float, torch.SymFloat, int, torch.SymInt),
    torch.SymBool: (bool, torch.SymBool),
    torch.SymInt: (int, torch.SymInt),
    torch.SymFloat: (float, torch.SymFloat, int, torch.SymInt),
    type(None): (type(None),),
}
"""Types of inputs allowed for a placeholder of a scalar type, or of ``None``."""


def traced_values(placeholders: Sequence[torch.fx.Node]) -> list[Any]:
    """The values in the metadata of a graph's placeholders, with which it was traced.

    Raises:
        CaptureError: a placeholder has none.
    """
    values = [_value_of(fx_node) for fx_node in placeholders]
    for fx_node, value in zip(placeholders, values, strict=True):
        if value is _NO_VALUE:
            raise CaptureError(
                "the placeholder has no value",
                where=f"placeholder `{fx_node.name}`",
                expected='`meta["val"]` or `meta["example_value"]`',
                found=", ".join(map(repr, fx_node.meta)) or "no metadata",
                fix="Pass the example inputs, or trace the graph with fake tensors",
            )
    return values


def _value_of(fx_node: torch.fx.Node) -> Any:
    """The value with which a placeholder was traced."""
    return fx_node.meta.get("val", fx_node.meta.get("example_value", _NO_VALUE))


def _check_input(fx_node: torch.fx.Node, value: Any) -> None:
    """Raise if the graph cannot have been traced with an input.

    Sizes, devices and classes of tensors may differ; also dtype and ndim where the frontend has
    changed the fake tensor, as ``unsqueeze_()`` does.
    """
    traced = _value_of(fx_node)
    if isinstance(traced, torch.Tensor):
        fits = isinstance(value, torch.Tensor)
        if fits and value is not traced and torch_dynamo.TracingContext.try_get() is None:
            changed = not traced.is_inference() and traced._version > 0
            fits = changed or (traced.dtype, traced.ndim) == (value.dtype, value.ndim)
    else:
        fits = isinstance(value, _SCALARS.get(type(traced), object))
        if isinstance(value, bool) and type(traced) in _SCALARS:
            fits = type(traced) in (bool, torch.SymBool)
    if not fits:
        raise CaptureError(
            "the input does not match its placeholder",
            where=f"placeholder `{fx_node.name}`",
            expected=_kind(traced),
            found=_kind(value),
            fix=INPUTS_FIX,
        )


def _kind(value: Any) -> str:
    """Short description of an input, for errors."""
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        return f"a tensor of {name_of(value.dtype)} with {value.ndim} dims"
    if type(value) in (bool, int, float):
        return f"the {type(value).__name__} {value}"
    name = type(value).__name__
    return f"a {name}" if type(value) in _SCALARS else f"an object of type {name}"


def _refakeify_input(value: torch.Tensor) -> torch.Tensor | None:
    """Make the initial fake of an input again, in the fake mode of the ``TracingContext``.

    Its symbols are those cached in the policy, with which the frontend traced.
    """
    context = torch_dynamo.TracingContext.try_get()
    if context is None or context.fake_mode is None or value not in context.tensor_to_context:
        return None
    policy: Any = context.tensor_to_context[value]
    with context.fake_mode as mode:
        return mode.from_tensor(
            value, symbolic_context=policy, source=policy.tensor_source, trace=False
        )


def initial_fakes(placeholders: Sequence[torch.fx.Node], inputs: Sequence[Any]) -> list[Any]:
    """The frontend's fake inputs with their initial sizes.

    Args:
        placeholders: the graph's placeholders, with the frontend's values in their metadata.
        inputs: the arguments of the backend.
    """
    return [
        _initial_fake(fx_node, value) for fx_node, value in zip(placeholders, inputs, strict=True)
    ]


def _initial_fake(fx_node: torch.fx.Node, value: Any) -> Any:
    traced = fx_node.meta.get("example_value")
    if isinstance(traced, torch.Tensor) and not _sizes_could_equal(traced, value):
        again = _refakeify_input(value)
        return traced if again is None else again
    return traced


def _sizes_could_equal(fake: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a fake tensor may still have the geometry of its real tensor."""
    if fake.is_nested or fake is value:
        return True
    if fake.ndim != value.ndim or not all(map(_could_equal, fake.size(), value.size())):
        return False
    if fake.layout is not torch.strided:
        return True
    return all(map(_could_equal, fake.stride(), value.stride())) and _could_equal(
        fake.storage_offset(), value.storage_offset()
    )


def _could_equal(traced: Any, number: Any) -> bool:
    if isinstance(traced, int) and isinstance(number, int):
        return traced == number
    hint = number if isinstance(traced, int) else traced.node.hint
    return hint is None or not isinstance(number, int) or bool(hint == number)


def _describe_input(
    fx_node: torch.fx.Node, value: Any, context: Any | None, describer: MetaTensorDescriber
) -> InputDesc:
    source = source_of(fx_node)
    source_desc = None if source is None else encode_source(source)
    name = fx_node.name
    if isinstance(value, torch.Tensor):
        policy_source = getattr(context, "tensor_source", source)
        desc = describer.describe_tensor(value, source=policy_source, symbolic_context=context)
        return InputDesc(name=name, tensor=desc, source=source_desc)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return InputDesc(name=name, sym=encode_sym(value, replaced=False), source=source_desc)
    known_as = None if source_desc is None else source_desc.name
    record = encode_constant(value, f"$.inputs.{name}", known_as)
    return InputDesc(name=name, value=record, source=source_desc)


def _context_of(fx_node: torch.fx.Node, tensor: Any, contexts: Mapping[int, Any]) -> Any | None:
    if not isinstance(tensor, torch.Tensor):
        return None
    context = contexts.get(id(tensor))
    return getattr(fx_node, "_fakeify_context", None) if context is None else context


class _Symbolizer:
    """Replaces the sizes in records of real tensors by the symbols of a ``ShapeEnv``.

    In a wrapper subclass the inner tensors get symbols too; a wrapper inside another one has no
    symbols for its outer sizes.
    """

    def __init__(self, shape_env: Any | None, describer: MetaTensorDescriber) -> None:
        self.shape_env = shape_env
        self.describer = describer
        self.done: dict[int, MetaTensorDesc] = {}

    def add(self, entry: InputDesc, fx_node: torch.fx.Node, value: Any, context: Any) -> None:
        """Symbolize the record of an input for which the frontend has made symbols."""
        if self.shape_env is None or entry.tensor is None or entry.tensor.is_fake:
            return
        source = getattr(context, "tensor_source", None)
        if source is None:
            return
        own = source_of(fx_node)
        if own is not None and f"{own.name}.size()[0]" in self._names(context):
            source = own  # the policy has another source if it is the base of a later view
        desc = self.symbolize(entry.tensor, source, context)
        if desc.source is None:  # it was described as a part of another input
            of = entry.tensor
            policy = {"source": of.source, "symbolic_context": of.symbolic_context}
            desc = msgspec.structs.replace(desc, **policy)
        if desc.subclass is not None or desc.view_calls is not None:
            fake = _initial_fake(fx_node, value)
            if isinstance(fake, torch.Tensor):
                self._alias_ids(fake, entry.tensor)
                desc = _with_numbers_of(self.describer.describe_tensor(fake), desc)
        self.done[desc.id] = desc

    def has_symbols(self, context: Any) -> bool:
        """Whether a policy has cached symbols."""
        return bool(self._names(context))

    def _names(self, context: Any) -> Mapping[str, Any]:
        """The symbols cached in a policy, by the name of their source."""
        cache: Mapping[int, Any] = getattr(context, "shape_env_to_source_to_symbol_cache", {})
        return cache.get(id(self.shape_env)) or {}

    def finished(self, entry: InputDesc) -> InputDesc:
        """The input with the symbolized record of its tensor."""
        tensor = None if entry.tensor is None else self.done.get(entry.tensor.id)
        return entry if tensor is None else msgspec.structs.replace(entry, tensor=tensor)

    def symbolize(
        self, desc: MetaTensorDesc, source: Any, context: Any | None, *, inside: bool = False
    ) -> MetaTensorDesc:
        """The record with symbols for its sizes and those of its parts, by the policy's cache.

        Method: ``ShapeEnv._create_symbolic_sizes_strides_storage_offset``, which looks up cached
        symbols by source and makes none; the exclusion constraints that it appends are removed.

        Args:
            desc: the record of a real tensor.
            source: of the tensor.
            context: its policy.
            inside: whether the tensor is an inner tensor of a wrapper.
        """
        done = self.done.get(desc.id)
        if done is not None:
            return done
        env: Any = self.shape_env
        attr_source = torch_dynamo.dynamo_source().AttrSource
        changes: dict[str, Any] = {}
        # In torch's order: an inner tensor that is also the base has the symbols of the base.
        if desc.base is not None:
            base_context = None if context is None else context.view_base_context
            changes["base"] = self.symbolize(desc.base, attr_source(source, "_base"), base_context)
        sized = not (inside and desc.subclass is not None)
        if sized and not _is_static(context, env):
            hint_overrides = dict(desc.marks.hint_overrides) if desc.marks is not None else {}
            exclusions = len(env.exclusion_constraints)
            size, stride, offset = env._create_symbolic_sizes_strides_storage_offset(
                tuple(map(_live, desc.size)),
                tuple(map(_live, desc.stride)),
                desc.storage_offset,
                [False] * desc.ndim,
                source,
                symbolic_context=context,
                hint_overrides=hint_overrides,
            )
            # Torch appends these at each lookup of the symbols.
            del env.exclusion_constraints[exclusions:]
            encode_int = self.describer._syms.encode_int
            changes["size"] = tuple(encode_int(s) for s in size)
            changes["stride"] = tuple(encode_int(s) for s in stride)
            changes["storage_offset"] = encode_int(offset)
        if desc.subclass is not None:
            inner = [
                (name, self.symbolize(part, attr_source(source, name), of, inside=True))
                for name, part in desc.subclass.tensors
                for of in [getattr(context, "inner_contexts", {}).get(name)]
            ]
            changes["subclass"] = msgspec.structs.replace(desc.subclass, tensors=tuple(inner))
        if desc.grad is not None:
            changes["grad"] = self.symbolize(desc.grad, attr_source(source, "grad"), context)
        if changes:
            desc = msgspec.structs.replace(desc, **changes)
        self.done[desc.id] = desc
        return desc

    def _alias_ids(self, fake: torch.Tensor, began: MetaTensorDesc) -> None:
        """Give the frontend's fake of a wrapper and its parts the ids of the real tensor's record.

        A fake that tracing has changed gets an id of its own.
        """
        if fake.ndim != began.ndim or str(fake.dtype) != f"torch.{began.dtype}":
            return
        if not all(map(_could_equal, fake.size(), began.size)):
            return
        self.describer.alias(fake, began, storage=True)
        base, grad = tensor_state.base_of(fake), tensor_state.grad_without_warning(fake)
        if base is not None and began.base is not None:
            self._alias_ids(base, began.base)
        if grad is not None and began.grad is not None:
            self._alias_ids(grad, began.grad)
        for name, part in () if began.subclass is None else began.subclass.tensors:
            inner = getattr(fake, name, None)
            if isinstance(inner, torch.Tensor):
                self._alias_ids(inner, part)


def _with_numbers_of(fake: MetaTensorDesc, desc: MetaTensorDesc) -> MetaTensorDesc:
    """The record of a wrapper, or of a view of one, with the numbers of the frontend's fake.

    Policies do not cache the symbols in the arguments of view operators, in the sizes of a view's inner
    tensors and in the context of a subclass.

    Args:
        fake: the record of the fake; its parts have other ids where they are not the real tensor's.
        desc: the record of the real tensor.
    """
    if fake.id != desc.id:
        return desc
    changes: dict[str, Any] = {
        name: getattr(fake, name) for name in ("size", "stride", "storage_offset", "view_calls")
    }
    if desc.base is not None and fake.base is not None:
        changes["base"] = _with_numbers_of(fake.base, desc.base)
    if desc.subclass is not None and fake.subclass is not None:
        parts = dict(fake.subclass.tensors)
        tensors = [
            (name, _with_numbers_of(parts[name], part) if name in parts else part)
            for name, part in desc.subclass.tensors
        ]
        changes["subclass"] = msgspec.structs.replace(
            desc.subclass, context=fake.subclass.context, tensors=tuple(tensors)
        )
    return msgspec.structs.replace(desc, **changes)


def _live(n: Any) -> Any:
    """The number, or the nested int for its record."""
    return torch_symbols.make_nested_int(n.id, n.coeff) if isinstance(n, NestedIntDesc) else n


def _is_static(context: Any | None, shape_env: Any) -> bool:
    """Whether a policy is static in all dims.

    Dynamo wraps a NumPy array twice: the second policy is static but has cached the symbols of the
    first, so it does not count as static.
    """
    if context is None:
        return False
    cache = getattr(context, "shape_env_to_source_to_symbol_cache", {})
    if any([isinstance(expr, sympy.Symbol) for expr in cache.get(id(shape_env), {}).values()]):  # noqa: C419 - a list is faster
        return False
    sizes = context.dynamic_sizes
    return sizes.count(torch_symbols.DimDynamic.STATIC) == len(sizes) and not any(
        context.constraint_sizes
    )
