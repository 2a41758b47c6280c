"""Symbols for the ``item()`` of 0-dim inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_fakeify.compat.torch_dynamo import dynamo_source
from torch_fakeify.compat.torch_symbols import DimDynamic

if TYPE_CHECKING:
    import torch

    from torch_fakeify.compat.torch_dynamo import Source
    from torch_fakeify.compat.torch_symbols import SymbolicContext
    from torch_fakeify.records.tensor import MetaTensorDesc


def tracked_item(
    shape_env: Any,
    d: MetaTensorDesc,
    source: Source,
    context: SymbolicContext | None,
    *,
    keep: bool,
) -> torch.SymInt | torch.SymFloat | None:
    """The symbolic ``item()`` of an input whose record has a ``scalar_hint``, or ``None``.

    Method: ``FakeTensorConverter.from_real_tensor``, torch 2.13.

    Args:
        shape_env: of the symbol.
        d: the record.
        source: of the tensor.
        context: the policy for the symbol.
        keep: whether to use the existing symbol instead of a new one.
    """
    sources = dynamo_source()
    if d.scalar_hint is None or isinstance(source, sources.RandomValueSource):
        return None
    is_float = d.dtype == "float64"
    value = float(d.scalar_hint) if is_float else int(d.scalar_hint)
    if isinstance(source, sources.FloatTensorSource):
        item_source: Any = source.base  # type: ignore[attr-defined]
    else:
        item_source = sources.CallMethodItemSource(source)
    if keep:
        # A frontend that did not track the scalar has no symbol for it.
        symbol = shape_env.source_to_var.get(item_source.name)
        if symbol is None:
            return None
    else:
        symbol = shape_env.create_unspecified_symbol(
            value, source=item_source, dynamic_dim=DimDynamic.DYNAMIC, symbolic_context=context
        )
    if is_float:
        return shape_env.create_symfloatnode(symbol, hint=value, source=item_source)
    if d.dtype == "int64":
        return shape_env.create_symintnode(symbol, hint=value, source=item_source)
    return None
