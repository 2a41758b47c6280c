"""The inputs of a frame as they were when it began.

Tracing may have changed the fake inputs (``resize_``, ``transpose_``, ``set_``), so they are not
looked at. The real tensors are described, and their sizes get the symbols that the frontend's
symbolic contexts remember (see "Tensor Fakification and Symbol Caching" in torch's
``symbolic_shapes.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import sympy
import torch

from . import _torch, facts
from .desc_frame import InputDesc
from .errors import CaptureError
from .exprs import encode_sym
from .fake_records import DENSE
from .sources import encode_source, source_of
from .values import encode_value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .desc import IntLike, MetaTensorDesc
    from .describe import MetaTensorDescriber


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
        describer: gives the ids.
        shape_env: the frame's ``ShapeEnv``, if it has one.

    Raises:
        CaptureError: the numbers of placeholders and inputs differ.
        UnsupportedTensorError: an input has no record.
    """
    if len(placeholders) != len(inputs):
        raise CaptureError(
            "the inputs do not fit the graph",
            expected=f"{len(placeholders)} inputs, one for each placeholder",
            found=f"{len(inputs)}",
            fix="Pass the example inputs that the backend was called with",
        )
    known = getattr(_torch.TracingContext.try_get(), "tensor_to_context", {})
    # By id of tensors that the caller keeps alive: a look into a weak dictionary takes long.
    by_id = {id(tensor): context for tensor, context in known.items()}
    contexts = [
        _context_of(fx_node, v, by_id) for fx_node, v in zip(placeholders, inputs, strict=True)
    ]
    if any(map(_is_wrapper, inputs)):
        inputs = [_fake_of(fx_node, v) for fx_node, v in zip(placeholders, inputs, strict=True)]
    rows = list(zip(placeholders, inputs, contexts, strict=True))
    described: dict[torch.fx.Node, InputDesc] = {}
    # Tensors first: a tensor that cannot be recorded explains a scalar that cannot be.
    rows.sort(key=lambda row: not isinstance(row[1], torch.Tensor))
    # Torch looks for a `__torch_function__` each time that a parameter is asked something.
    with _torch.DisableTorchFunction():
        for fx_node, value, context in rows:
            described[fx_node] = _describe_input(fx_node, value, context, describer)
    symbolizer = _Symbolizer(shape_env, describer._syms.encode_int)
    # Bases before views: the record that a view refers to is then the one with the policy.
    for entry, context in sorted(
        ((described[fx_node], context) for fx_node, _, context in rows),
        key=lambda row: row[0].tensor is not None and row[0].tensor.is_view,
    ):
        symbolizer.add(entry, context)
    return tuple(symbolizer.finished(described[fx_node]) for fx_node in placeholders)


def _is_wrapper(value: Any) -> bool:
    """Whether it is a wrapper subclass, or a view of one."""
    if not isinstance(value, torch.Tensor):
        return False
    base = facts.base_of(value)
    if base is None and type(value) in DENSE:
        return False
    return facts.needs_view_calls(value, value if base is None else base)


def _fake_of(fx_node: torch.fx.Node, value: Any) -> Any:
    """The fake tensor by which a frontend knows an input; else the input itself.

    The view operators of a wrapper are told with its symbols only by the fake, and one frame's
    tensors are told all alike, so that what they share shows.
    """
    if not isinstance(value, torch.Tensor) or _torch.maybe_get_fake_mode(value) is not None:
        return value
    fake = fx_node.meta.get("example_value")
    if not isinstance(fake, torch.Tensor):
        return value
    if _has_sizes_of(fake, value) and _is_as_differentiable(fake, value):
        return fake
    again = _fake_again(value)
    return fake if again is None else again


def _fake_again(value: torch.Tensor) -> torch.Tensor | None:
    """A fake tensor as when the frame began: in the mode that the frontend made for a backend.

    Its symbols are those that the frontend traced with, which the policy remembers.
    """
    context = _torch.TracingContext.try_get()
    if context is None or context.fake_mode is None or value not in context.tensor_to_context:
        return None
    policy: Any = context.tensor_to_context[value]
    with context.fake_mode as mode:
        return mode.from_tensor(
            value, symbolic_context=policy, source=policy.tensor_source, trace=False
        )


def fakes_at_the_beginning(
    placeholders: Sequence[torch.fx.Node], inputs: Sequence[Any]
) -> list[Any]:
    """The values by which a frontend knows the inputs, with the sizes that these had at first.

    Args:
        placeholders: the graph's placeholders, with the frontend's values in their metadata.
        inputs: what the backend is called with.
    """
    values: list[Any] = []
    for fx_node, value in zip(placeholders, inputs, strict=True):
        known = fx_node.meta.get("example_value")
        if isinstance(known, torch.Tensor) and not _has_sizes_of(known, value):
            again = _fake_again(value)
            known = known if again is None else again
        values.append(known)
    return values


def _has_sizes_of(fake: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a fake tensor still is as large as the tensor that it stands for."""
    if fake.is_nested or fake is value:
        return True
    if fake.ndim != value.ndim or not all(map(_may_be, fake.size(), value.size())):
        return False
    if fake.layout is not torch.strided:
        return True
    return all(map(_may_be, fake.stride(), value.stride())) and _may_be(
        fake.storage_offset(), value.storage_offset()
    )


def _is_as_differentiable(fake: torch.Tensor, value: torch.Tensor) -> bool:
    now, then = ((t.requires_grad, facts.is_leaf(t)) for t in (fake, value))
    return now == then


def _may_be(known: Any, number: Any) -> bool:
    if isinstance(known, int) and isinstance(number, int):
        return known == number
    hint = number if isinstance(known, int) else known.node.hint
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
    return InputDesc(
        name=name, value=encode_value(value, where=f"$.inputs.{name}"), source=source_desc
    )


def _context_of(fx_node: torch.fx.Node, tensor: Any, known: Mapping[int, Any]) -> Any | None:
    if not isinstance(tensor, torch.Tensor):
        return None
    context = known.get(id(tensor))
    return getattr(fx_node, "_fakeify_context", None) if context is None else context


class _Symbolizer:
    """Puts the symbols that a ``ShapeEnv`` gave to a tensor's sizes into its record."""

    def __init__(self, shape_env: Any | None, encode_int: Callable[[Any], IntLike]) -> None:
        self.shape_env = shape_env
        self.encode_int = encode_int
        self.done: dict[int, MetaTensorDesc] = {}

    def add(self, entry: InputDesc, context: Any | None) -> None:
        """Symbolize the record of one input, if a frontend has made symbols for it."""
        if entry.tensor is None or entry.tensor.is_fake:
            return
        source = getattr(context, "tensor_source", None)
        if source is not None:
            self.symbolize(entry.tensor, source, context)

    def finished(self, entry: InputDesc) -> InputDesc:
        """The input with the symbolized record of its tensor."""
        tensor = None if entry.tensor is None else self.done.get(entry.tensor.id)
        return entry if tensor is None else msgspec.structs.replace(entry, tensor=tensor)

    def symbolize(self, desc: MetaTensorDesc, source: Any, context: Any | None) -> MetaTensorDesc:
        if self.shape_env is None:
            return desc
        done = self.done.get(desc.id)
        if done is not None:
            return done
        changes: dict[str, Any] = {}
        if not _is_static(context, self.shape_env):
            hint_overrides = dict(desc.marks.hint_overrides) if desc.marks is not None else {}
            exclusions = len(self.shape_env.exclusion_constraints)
            size, stride, offset = self.shape_env._create_symbolic_sizes_strides_storage_offset(
                desc.size,
                desc.stride,
                desc.storage_offset,
                [False] * desc.ndim,
                source,
                symbolic_context=context,
                hint_overrides=hint_overrides,
            )
            # Torch notes these again each time that it looks the symbols up.
            del self.shape_env.exclusion_constraints[exclusions:]
            changes["size"] = tuple(self.encode_int(s) for s in size)
            changes["stride"] = tuple(self.encode_int(s) for s in stride)
            changes["storage_offset"] = self.encode_int(offset)
        if desc.base is None and desc.grad is None and not changes:
            self.done[desc.id] = desc
            return desc
        attr_source = _torch.dynamo_source().AttrSource
        if desc.base is not None:
            base_context = None if context is None else context.view_base_context
            changes["base"] = self.symbolize(desc.base, attr_source(source, "_base"), base_context)
        if desc.grad is not None:
            changes["grad"] = self.symbolize(desc.grad, attr_source(source, "grad"), context)
        if changes:
            desc = msgspec.structs.replace(desc, **changes)
        self.done[desc.id] = desc
        return desc


def _is_static(context: Any | None, shape_env: Any) -> bool:
    """Whether a policy leaves every dim as it is.

    Dynamo wraps a NumPy array twice: the second policy is static, but the first one made symbols,
    and the second one remembers them.
    """
    if context is None:
        return False
    cache = getattr(context, "shape_env_to_source_to_symbol_cache", {})
    if any([isinstance(expr, sympy.Symbol) for expr in cache.get(id(shape_env), {}).values()]):  # noqa: C419 - a list is faster
        return False
    sizes = context.dynamic_sizes
    return sizes.count(_torch.DimDynamic.STATIC) == len(sizes) and not any(context.constraint_sizes)
