"""`walk` visits every part of a record once, in the order of its fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from places import GOLDEN

from torch_fakeify.records.graph import GraphModuleDesc
from torch_fakeify.records.rewrite import walk
from torch_fakeify.records.tensor import (
    ExprDesc,
    FloatValue,
    MetaTensorDesc,
    NodeValue,
    OpaqueValue,
    SourceDesc,
    StackDesc,
)
from torch_fakeify.serialization.capture_file import read_capture

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = (
    MetaTensorDesc, GraphModuleDesc, ExprDesc, OpaqueValue, SourceDesc, StackDesc, str, int, type(None),
    (int, float, FloatValue, NodeValue),
)  # fmt: skip


def parts_of(part: Any, seen: set[int]) -> Iterator[tuple[Any, list[Any]]]:
    """Yield each part once, outermost first, with what it is inside of."""
    pending: list[tuple[Any, list[Any]]] = [(part, [])]
    while pending:
        one, outside = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one, outside
        inside: list[Any] = []
        if isinstance(one, tuple):
            inside = [*one]
        elif isinstance(one, msgspec.Struct) and not isinstance(one, (SourceDesc, StackDesc)):
            inside = [getattr(one, name) for name in one.__struct_fields__]
        pending += [(each, [*outside, one]) for each in reversed(inside)]


@pytest.mark.parametrize("name", ["model_bert", "program_failed", "wrapper_NestedTensor"])
def test_walk_yields_the_parts_of_a_type(name: str) -> None:
    """All of them, in order, also booleans as integers; with ``inside`` those in others of them."""
    path = next(iter(sorted(GOLDEN.glob(f"{name}*.fkf"))), None)
    assert path is not None
    desc = read_capture(path)
    for kind in KINDS:
        found = [part for part, _ in parts_of(desc, set()) if isinstance(part, kind)]
        assert list(map(id, walk(desc, kind, inside=True))) == list(map(id, found))
        outer = {id(part) for part in walk(desc, kind)}
        assert outer <= set(map(id, found))
        for part, outside in parts_of(desc, set()):
            if isinstance(part, kind) and id(part) not in outer:
                assert any(isinstance(each, kind) for each in outside)
