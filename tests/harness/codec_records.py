"""Records with which the codec is tested."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_fakeify.records.tensor import (
    ContextDesc,
    ExprDesc,
    MarksDesc,
    MetaStorageDesc,
    MetaTensorDesc,
    SourceDesc,
    SymbolFactDesc,
    SymbolNode,
    SymDesc,
    TupleValue,
)
from torch_fakeify.serialization import format as wire_format

if TYPE_CHECKING:
    from torch_fakeify.records.record import Record

RECORD_TYPES: list[type[Record]] = sorted(wire_format.RECORD_TYPES, key=lambda cls: cls.__name__)
X = SymbolNode("x", (("integer", True),))


def tensor(**fields: Any) -> MetaTensorDesc:
    """A tensor record with what matters to a test."""
    defaults = {"id": 0, "dtype": "float32", "device": "cpu", "size": (), "stride": ()}
    return MetaTensorDesc(**{**defaults, **fields})


def chain_of_sources(length: int) -> SourceDesc:
    """A source over its base over its base."""
    source = SourceDesc(cls="LocalSource", name="0", fields=(("local_name", "x"),))
    for i in range(1, length):
        source = SourceDesc(cls="TypeSource", name=str(i), base=source)
    return source


def nested_tuples(depth: int) -> TupleValue:
    """A value inside a value."""
    value = TupleValue(items=())
    for _ in range(depth - 1):
        value = TupleValue(items=(value,))
    return value


_EXPR = ExprDesc(nodes=(X,))


def similar_tensors(count: int = 5) -> list[MetaTensorDesc]:
    """Tensors as a model has them: few layouts, each on a storage of its own, with policies."""
    size, facts = (SymDesc(expr=_EXPR, hint=3), 8), (SymbolFactDesc(name="x", hint=3),)
    nbytes, base = SymDesc(expr=_EXPR, hint=96), chain_of_sources(3)
    found: list[MetaTensorDesc] = []
    for i in range(count):
        source = SourceDesc(cls="AttrSource", name=f"{base.name}.w{i}", base=base)
        context = ContextDesc(kind="stateful", dynamic_sizes=("DUCK", "STATIC"), tensor_source=base)
        found.append(
            tensor(
                id=10 * i,
                size=size,
                stride=(8, 1),
                storage=MetaStorageDesc(id=i, nbytes=nbytes),
                symbols=facts,
                source=source,
                symbolic_context=context,
                marks=MarksDesc(static_input_type="unguarded"),
            )
        )
        found.append(
            tensor(
                id=10 * i + 1, size=(4,), stride=(1,), is_view=True, base=found[-1], is_fake=True
            )
        )
        found.append(tensor(id=10 * i + 2, storage=MetaStorageDesc(id=i + 99, nbytes=4)))
    return found
