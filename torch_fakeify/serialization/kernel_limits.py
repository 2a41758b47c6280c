"""Limits on a fake kernel of a file, which is evaluated part by part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from torch_fakeify.errors import LimitError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_fakeify.records.fake_kernel import FakeKernelDesc

__all__ = ["KERNEL_DEPTH", "KERNEL_PARTS", "check_kernel"]

KERNEL_PARTS, KERNEL_DEPTH = 20_000, 100
"""Most parts of a fake kernel with their names and numbers, and the deepest nesting of them."""
_NAME = 2000
"""Most characters of a name or message."""


def check_kernel(kernel: FakeKernelDesc, where: str) -> None:
    """Refuse a fake kernel with too many or too deeply nested formulas, or with numbers of more than 64 bits.

    Raises:
        LimitError: it has.
    """
    left = KERNEL_PARTS
    todo: list[tuple[Any, int]] = [(kernel, 0)]
    while todo:
        part, depth = todo.pop()
        if isinstance(part, int) and not -(1 << 63) <= part < 1 << 63:
            raise LimitError(
                "a number of a fake kernel is too large", where=where, expected="at most 64 bits"
            )
        if isinstance(part, str) and len(part) > _NAME:
            raise LimitError(
                "a name of a fake kernel is too long",
                where=where,
                expected=f"at most {_NAME} characters",
            )
        items: Sequence[Any] = ()
        if isinstance(part, msgspec.Struct):
            items = [getattr(part, name) for name in part.__struct_fields__]
        elif isinstance(part, tuple):
            items = part
        left -= 1
        if left < 0 or depth > KERNEL_DEPTH:
            raise LimitError(
                "a fake kernel is too large",
                where=where,
                expected=f"at most {KERNEL_PARTS} parts, at most {KERNEL_DEPTH} deep",
            )
        todo += [(item, depth + 1) for item in items]
