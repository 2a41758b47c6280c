"""Parts of records that the tests of trace events compare."""

from __future__ import annotations

from typing import Any

from torch_fakeify.encoding.exprs import decode_expr
from torch_fakeify.records.tensor import (
    SymDesc,
)


def without_facts(n: Any) -> Any:
    """A size, or the text of its expression without hints and ranges."""
    if not isinstance(n, SymDesc):
        return n
    return str(decode_expr(n.expr))
