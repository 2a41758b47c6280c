"""A describer and a converter without shortcuts for plain tensors, to compare with."""

from __future__ import annotations

from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    ShapeEnv,
)

from torch_fakeify.convert.converter import MetaConverter
from torch_fakeify.describe.describer import MetaTensorDescriber


class GeneralDescriber(MetaTensorDescriber):
    """Describes every tensor as one that is not plain."""

    def _describe_plain(self, *_: Any) -> None:
        return None


class UncachedConverter(MetaConverter):
    """Makes every layout anew, and every symbol by torch's ``ShapeEnv``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self._sizes is not None:
            self._sizes.fresh = None

    def _known_layout(self, *_: Any) -> None:
        return None


def dynamic_mode() -> FakeTensorMode:
    """A mode with a fresh ShapeEnv."""
    return FakeTensorMode(shape_env=ShapeEnv())
