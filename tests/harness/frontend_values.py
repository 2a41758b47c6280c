"""Classes of arguments and results for tests of ``frontend``."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from torch_fakeify.frontend import Policy

DYNAMIC = Policy(dims="DYNAMIC")


class Mode(enum.Enum):
    """A constant."""

    ADD = 1
    MUL = 2


class Pair(NamedTuple):
    """A named tuple."""

    first: Any
    second: Any


@dataclasses.dataclass
class Batch:
    """Registered as a dataclass, whose `mode` is no part of the tree."""

    x: Any
    y: Any = None
    flag: bool = True
    name: str = "sum"
    mode: Mode = Mode.ADD


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Cannot be changed."""

    batch: Batch
    scale: Any


class Keyed:
    """Registered with keys."""

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


class Keyless:
    """Registered without keys."""

    def __init__(self, a: Any, b: Any, power: int = 2) -> None:
        self.a, self.b, self.power = a, b, power


class Slotted:
    """Has no ``__dict__``."""

    __slots__ = ("a", "b")

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


class Deep:
    """Has its tensors in a dictionary of lists, of which its keys say nothing."""

    def __init__(self, *parts: Any) -> None:
        self.held = {"parts": list(parts)}
        self.kind = "deep"


class Computed:
    """Has no tensor that stays the same."""

    def __init__(self, t: torch.Tensor) -> None:
        self.array = t.numpy()


class Broken:
    """Cannot be flattened."""


class Listed(dict[str, Any]):
    """A dictionary of its own class."""


def register() -> None:
    """Registers the classes; torch keeps them for good."""
    key = pytree.GetAttrKey
    pytree.register_dataclass(
        Batch, drop_field_names=["mode"], field_names=["x", "y", "flag", "name"]
    )
    pytree.register_dataclass(Frozen)
    for cls in (Keyed, Slotted):
        pytree.register_pytree_node(
            cls,
            lambda o: ([o.a, o.b], None),
            lambda parts, _, cls=cls: cls(*parts),
            flatten_with_keys_fn=lambda o: ([(key("a"), o.a), (key("b"), o.b)], None),
        )
    pytree.register_pytree_node(
        Keyless, lambda o: ([o.a, o.b], o.power), lambda parts, power: Keyless(*parts, power)
    )
    pytree.register_pytree_node(
        Deep, lambda o: (o.held["parts"], None), lambda parts, _: Deep(*parts)
    )
    pytree.register_pytree_node(
        Computed, lambda o: ([torch.from_numpy(o.array)], None), lambda parts, _: Computed(*parts)
    )
    pytree.register_pytree_node(Broken, lambda o: 1 / 0, lambda parts, _: Broken())


register()
