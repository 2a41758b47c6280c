"""Comparison of two results of one computation, up to rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_TOLERANCE = {
    torch.float64: 1e-6,
    torch.complex128: 1e-6,
    torch.float32: 1e-3,
    torch.complex64: 1e-3,
    torch.float16: 2e-2,
    torch.bfloat16: 5e-2,
}
"""Largest absolute difference, relative to the largest expected number or 1. The order of a sum usually
causes less, an element from a wrong position more."""


def first_mismatch(
    found: Sequence[Any], expected: Sequence[Any], names: Sequence[str] | None = None
) -> str | None:
    """Describe the first difference of two lists of tensors and numbers; ``None`` if they are equal.

    The text has the ``names`` of the results, by default ``result 0`` and so on.
    """
    if len(found) != len(expected):
        return f"{len(found)} results, not {len(expected)}"
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        text = _mismatch(a, b)
        if text is not None:
            return f"{names[i] if names else f'result {i}'}: {text}"
    return None


def is_distributed(value: Any) -> bool:
    """Whether a value is a ``DTensor``."""
    cls = type(value)
    return cls.__name__ == "DTensor" and cls.__module__.startswith("torch.distributed.")


def _mismatch(a: Any, b: Any) -> str | None:
    if (a is None) != (b is None):
        return "nothing, where eager has a value" if a is None else "a value, where eager has none"
    if is_distributed(a) and is_distributed(b):
        if a.placements != b.placements or a.device_mesh != b.device_mesh:
            return f"{a.placements} on {a.device_mesh}, not {b.placements} on {b.device_mesh}"
        # Operators on a DTensor communicate, which not all of them support.
        a, b = a.detach().to_local(), b.detach().to_local()
    if not isinstance(b, torch.Tensor) or not isinstance(a, torch.Tensor):
        same = type(a) is type(b) and (a == b or (a != a and b != b))
        return None if same else f"{a}, not {b}"
    for what in ("shape", "dtype", "device", "layout"):
        one, other = getattr(a, what), getattr(b, what)
        if one != other:
            return f"{what} {_plain(one)}, not {_plain(other)}"
    if a.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if type(a) is not torch.Tensor or not a.numel():
        a, b = torch.as_tensor(a.detach()), torch.as_tensor(b.detach())
    if not (a.is_floating_point() or a.is_complex()):
        wrong = int((a != b).sum())
        return f"{wrong} of {a.numel()} elements differ" if wrong else None
    return _off(a.detach(), b.detach())


def _off(a: torch.Tensor, b: torch.Tensor) -> str | None:
    wide = torch.complex128 if a.is_complex() else torch.float64
    tolerance = _TOLERANCE.get(a.dtype, 0.25)
    a, b = a.to(wide), b.to(wide)
    if not torch.equal(torch.isfinite(a), torch.isfinite(b)):
        return "other elements are infinite or NaN"
    finite = torch.isfinite(b)
    difference = (a[finite] - b[finite]).abs()
    if not difference.numel():
        return None
    scale = max(1.0, float(b[finite].abs().max()))
    largest = float(difference.max())
    if largest <= tolerance * scale:
        return None
    wrong = int((difference > tolerance * scale).sum())
    return f"{wrong} of {a.numel()} elements are off, by up to {largest:.3g}"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, torch.Size) else value
