"""The symbol that torch has for the ``item()`` of a scalar tensor among the inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._torch import DimDynamic, dynamo_source

if TYPE_CHECKING:
    import torch

    from ._torch import Source, SymbolicContext
    from .desc import MetaTensorDesc

__all__ = ["tracked_item"]


def tracked_item(
    shape_env: Any,
    d: MetaTensorDesc,
    source: Source,
    context: SymbolicContext | None,
    *,
    keep: bool,
) -> torch.SymInt | torch.SymFloat | None:
    """What ``item()`` gives of the tensor of a record with a ``scalar_hint``; often ``None``.

    Method: ``FakeTensorConverter.from_real_tensor``, torch 2.13.

    Args:
        shape_env: where the symbol is, or is made.
        d: the record.
        source: of the tensor.
        context: the policy for the symbol.
        keep: whether to take the symbol that there is instead of a new one.
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
