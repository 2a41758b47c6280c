"""Helpers of the tests of sources."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torch_fakeify.records.tensor import (
    SourceDesc,
)

if TYPE_CHECKING:
    from torch._guards import Source


def shown(source: Source) -> str:
    """The ``repr`` of a source, without the order of a frozenset, which is not a property of it."""
    return re.sub(
        r"frozenset\(\{(.*?)\}\)",
        lambda m: f"frozenset({sorted(m[1].split(', '))})",
        repr(source),
    )


LOCAL = SourceDesc(cls="LocalSource", name="L['x']", fields=(("local_name", "x"),))
