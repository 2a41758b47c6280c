"""Records of tensors and fake tensors of records, and what is compared of records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from torch._dynamo.source import LocalSource

import torch_fakeify as tfk
from torch_fakeify.compat.torch_fakes import WHOLE_STORAGES
from torch_fakeify.records.tensor import MetaStorageDesc, MetaTensorDesc, NestedIntDesc

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

NOT_OF_FAKES: dict[str, Any] = {
    "is_fake": False,
    "scalar_hint": None,
    "item_memo": None,
    "symbols": (),
    "source": None,
    "symbolic_context": None,
}


def canonical(records: Sequence[MetaTensorDesc]) -> list[Any]:
    """The records with their numbers counted anew in the order of sight, so that sharing stays."""
    numbers: dict[tuple[str, int], int] = {}
    done: dict[int, Any] = {}

    def number(kind: str, old: int) -> int:
        return numbers.setdefault((kind, old), len(numbers))

    def rewrite(value: Any) -> Any:
        if isinstance(value, NestedIntDesc):
            return NestedIntDesc(number("nested int", value.id), value.coeff)
        if isinstance(value, tuple):
            return tuple(map(rewrite, value))
        if not isinstance(value, msgspec.Struct):
            return value
        if id(value) not in done:
            done[id(value)] = rewrite_struct(value)
        return done[id(value)]

    def rewrite_struct(value: Any) -> Any:
        changed = dict(NOT_OF_FAKES) if isinstance(value, MetaTensorDesc) else {}
        if WHOLE_STORAGES and isinstance(value, MetaTensorDesc) and value.subclass is not None:
            changed["storage"] = None  # as of torch 2.14 a fake wrapper shares none
        if isinstance(value, MetaTensorDesc):
            changed["id"] = number("tensor", value.id)
            if value.nested_int is not None:
                changed["nested_int"] = number("nested int", value.nested_int)
        elif isinstance(value, MetaStorageDesc):
            changed["id"] = number("storage", value.id)
        for name in value.__struct_fields__:
            if name not in changed:
                changed[name] = rewrite(getattr(value, name))
        return msgspec.structs.replace(value, **changed)

    return [rewrite(record) for record in records]


def sharing(records: Sequence[Any]) -> list[list[str]]:
    """Where in the records one object stands more than once, as lists of paths."""
    places: dict[int, list[str]] = {}

    def visit(value: Any, path: str) -> None:
        if isinstance(value, (MetaTensorDesc, MetaStorageDesc)):
            found = places.setdefault(id(value), [])
            found.append(path)
            if len(found) > 1:
                return
        if isinstance(value, msgspec.Struct):
            for name in value.__struct_fields__:
                visit(getattr(value, name), f"{path}.{name}")
        elif isinstance(value, (tuple, list)):
            for i, item in enumerate(value):
                visit(item, f"{path}[{i}]")

    visit(list(records), "$")
    return sorted(found for found in places.values() if len(found) > 1)


def described(group: Sequence[torch.Tensor], *, sources: bool = False) -> list[MetaTensorDesc]:
    """The records of one describer."""
    describer = tfk.MetaTensorDescriber()
    return [
        describer.describe_tensor(t, source=LocalSource(f"x{i}") if sources else None)
        for i, t in enumerate(group)
    ]


def converted(records: list[MetaTensorDesc], mode: FakeTensorMode) -> list[torch.Tensor]:
    """The fake tensors of one converter, of records read from bytes."""
    converter = tfk.MetaConverter(mode)
    return [converter.from_desc(d) for d in tfk.loads(tfk.dumps(records))]
