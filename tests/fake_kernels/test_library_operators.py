"""Kernels that are inferred for operators of torchvision, transformers and torchao, beside the operators."""

from __future__ import annotations

import copy
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch
from inferred_checks import facts, fake_facts, is_like

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.sweep, pytest.mark.models]

_F8 = torch.float8_e4m3fn
_I8 = torch.int8


class Draw:
    """Makes the arguments of the operators."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, *size: int) -> torch.Tensor:
        """Return normal numbers."""
        return torch.randn(size, generator=self.generator)

    def scale(self, *size: int) -> torch.Tensor:
        """Return numbers that are not small."""
        return torch.rand(size, generator=self.generator) + 0.5

    def boxes(self, count: int) -> torch.Tensor:
        """Return boxes by their corners."""
        corner = torch.rand(count, 2, generator=self.generator) * 20
        return torch.cat([corner, corner + torch.rand(count, 2, generator=self.generator) + 1], 1)

    def regions(self, count: int, images: int) -> torch.Tensor:
        """Return boxes of images, with the number of the image."""
        image = torch.randint(images, (count, 1), generator=self.generator)
        return torch.cat([image.float(), self.boxes(count)], 1)

    def rotated(self, count: int) -> torch.Tensor:
        """Return boxes with an angle."""
        return torch.cat([self.boxes(count), self.scale(count, 1)], 1)

    def ends(self, rows: int, groups: int) -> torch.Tensor:
        """Return where each group of rows ends."""
        return torch.linspace(0, rows, groups + 1).round()[1:].to(torch.int32)

    def deformed(
        self,
        size: tuple[int, ...],
        out: int,
        kernel: tuple[int, int],
        steps: tuple[int, ...],
        groups: tuple[int, int],
    ) -> tuple[Any, ...]:
        """Return the arguments of a deformable convolution; ``steps`` are stride, padding and dilation."""
        (batch, channels, *image), (sh, sw, ph, pw, dh, dw) = size, steps
        high = (image[0] + 2 * ph - dh * (kernel[0] - 1) - 1) // sh + 1
        wide = (image[1] + 2 * pw - dw * (kernel[1] - 1) - 1) // sw + 1
        points = groups[1] * kernel[0] * kernel[1]
        return (
            self.normal(*size),
            self.normal(out, channels // groups[0], *kernel),
            self.normal(batch, 2 * points, high, wide),
            self.normal(batch, points, high, wide),
            self.normal(out),
            *steps,
            *groups,
            True,
        )


Calls = list[tuple[Any, ...]]

# For each operator two calls from which a kernel is inferred, and one of other sizes that is not shown.
OPERATORS: dict[str, Callable[[Draw], Calls]] = {
    "torchvision::nms": lambda d: [
        (d.boxes(12), d.scale(12), 0.5),
        (d.boxes(1), d.scale(1), 0.5),
        (d.boxes(31), d.scale(31), 0.2),
    ],
    "torchvision::roi_align": lambda d: [
        (d.normal(2, 3, 16, 18), d.regions(5, 2), 0.5, 4, 6, 2, True),
        (d.normal(1, 2, 9, 8), d.regions(1, 1), 1.0, 2, 3, -1, False),
        (d.normal(3, 7, 20, 14), d.regions(9, 3), 0.25, 7, 5, 0, False),
    ],
    "torchvision::roi_pool": lambda d: [
        (d.normal(2, 3, 16, 18), d.regions(5, 2), 0.5, 4, 6),
        (d.normal(1, 2, 9, 8), d.regions(1, 1), 1.0, 2, 3),
        (d.normal(3, 7, 20, 14), d.regions(9, 3), 0.25, 7, 5),
    ],
    "torchvision::ps_roi_align": lambda d: [
        (d.normal(2, 24, 16, 18), d.regions(5, 2), 0.5, 4, 6, 2),
        (d.normal(1, 12, 9, 8), d.regions(1, 1), 1.0, 2, 3, -1),
        (d.normal(3, 70, 20, 14), d.regions(9, 3), 0.25, 7, 5, 0),
    ],
    "torchvision::ps_roi_pool": lambda d: [
        (d.normal(2, 24, 16, 18), d.regions(5, 2), 0.5, 4, 6),
        (d.normal(1, 12, 9, 8), d.regions(1, 1), 1.0, 2, 3),
        (d.normal(3, 70, 20, 14), d.regions(9, 3), 0.25, 7, 5),
    ],
    "torchvision::deform_conv2d": lambda d: [
        d.deformed((2, 4, 10, 11), 6, (3, 3), (1, 1, 1, 1, 1, 1), (1, 1)),
        d.deformed((1, 4, 12, 9), 6, (3, 2), (2, 1, 1, 0, 1, 2), (2, 2)),
        d.deformed((3, 6, 15, 14), 9, (5, 3), (2, 3, 2, 1, 2, 1), (3, 3)),
    ],
    "torchvision::box_iou_rotated": lambda d: [
        (d.rotated(5), d.rotated(4)),
        (d.rotated(1), d.rotated(7)),
        (d.rotated(9), d.rotated(3)),
    ],
    "transformers::grouped_mm_fallback": lambda d: [
        (d.normal(12, 5), d.normal(3, 5, 7), d.ends(12, 3)),
        (d.normal(6, 4), d.normal(2, 4, 3), d.ends(6, 2)),
        (d.normal(20, 8), d.normal(4, 8, 6), d.ends(20, 4)),
    ],
    "transformers::grouped_mm_fallback_backward": lambda d: [
        (d.normal(12, 5), d.normal(3, 5, 7), d.ends(12, 3), d.normal(12, 7)),
        (d.normal(6, 4), d.normal(2, 4, 3), d.ends(6, 2), d.normal(6, 3)),
        (d.normal(20, 8), d.normal(4, 8, 6), d.ends(20, 4), d.normal(20, 6)),
    ],
    "torchao::quantize_affine": lambda d: [
        (d.normal(8, 12), [1, 12], d.scale(8), d.scale(8), _I8, -128, 127),
        (d.normal(6, 8), [1, 4], d.scale(6, 2), d.scale(6, 2), torch.uint8, 0, 255),
        (d.normal(10, 24), [1, 6], d.scale(10, 4), d.scale(10, 4), _I8, -128, 127),
    ],
    "torchao::choose_scale_float8": lambda d: [
        (d.normal(8, 12), [1, 12]),
        (d.normal(6, 8), [1, 4]),
        (d.normal(10, 24), [1, 6]),
    ],
    "torchao::quantize_affine_float8_non_decomposed": lambda d: [
        (d.normal(8, 12), d.scale(8, 1)),
        (d.normal(6, 8), d.scale(1, 1)),
        (d.normal(10, 24), d.scale(10, 1)),
    ],
    "torchao::dequantize_affine_float8_non_decomposed": lambda d: [
        (d.normal(8, 12).to(_F8), d.scale(8, 1)),
        (d.normal(6, 8).to(_F8), d.scale(1, 1)),
        (d.normal(10, 24).to(_F8), d.scale(10, 1)),
    ],
}

_MODULES = {
    "torchvision": "torchvision",
    "torchao": "torchao",
    "transformers": "transformers.integrations.moe",
}


@pytest.mark.parametrize("name", OPERATORS)
def test_a_kernel_is_right_at_sizes_that_it_was_not_inferred_from(name: str) -> None:
    """Metadata of the fake result is that of the real one, also by the source, and defaults are those of the schema."""
    library, _, short = name.partition("::")
    pytest.importorskip(library, reason=f"{library} is not installed")
    import_module(_MODULES[library])
    op = getattr(getattr(torch.ops, library), short).default
    *samples, other = OPERATORS[name](Draw())
    kernel = tfk.infer_fake(op, samples)
    found: dict[str, Any] = {}
    lines = [line for line in kernel.source.splitlines() if not line.startswith("@")]
    exec("\n".join(lines), found)
    for args in (*samples, other):
        real = facts(op(*copy.deepcopy(args)))
        assert is_like(fake_facts(kernel, args), real)
        assert is_like(fake_facts(found[short], args), real)
