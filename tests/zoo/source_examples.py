"""Instances of every class of sources that torch defines."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch._dynamo import source as S
from torch._guards import ChainedSource, Source

X = S.LocalSource("x", is_input=True)
KEY = S.ConstDictKeySource(X, 2)

# What the constructor of each class takes beside its base. A class that is not here fails the test.
ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "AttrSource": [{"member": "weight"}, {"member": "not an identifier"}],
    "CellContentsSource": [{"member": "cell_contents", "freevar_name": "free"}],
    "ConstDictKeySource": [{"index": 0}],
    "ConstantSource": [{"source_name": "sym_0"}],
    "ContextVarGetSource": [{}, {"has_default": True, "default_value": "a{}"}],  # as of torch 2.14
    "CurrentStreamSource": [{"device": torch.device("cuda", 1)}, {"device": torch.device("cpu")}],
    "DefaultsSource": [{"idx_key": 1}, {"idx_key": "key", "is_kw": True}],
    "DictGetItemSource": [{"index": "k"}, {"index": KEY}, {"index": True}, {"index": None}],
    "DictSubclassGetItemSource": [{"index": 1}, {"index": KEY}],
    "DynamicScalarSource": [{"is_int": True}],
    "EphemeralSource": [{}, {"desc": "view {}"}],
    "GenericAttrSource": [{"member": "m"}],
    "GetItemSource": [
        {"index": 1},
        {"index": True},
        {"index": "a{}b"},
        {"index": slice(1, None, 2)},
        {"index": X},
        {"index": torch.float32},
        {"index": (1, "a", None)},
    ],
    "GlobalSource": [{"global_name": "G"}],
    "GlobalWeakRefSource": [{"global_name": "G"}],
    "GradSource": [{}],
    "ImportSource": [{"module_name": "torch.nn"}],
    "IndexedSource": [{"idx": 3}],
    "ListGetItemSource": [{"index": 1}, {"index": slice(None, 2)}],
    "LocalCellSource": [{"local_name": "c"}],
    "LocalSource": [
        {"local_name": "x"},
        {"local_name": "x", "is_input": True, "dynamism": frozenset({"b", "a"})},
        {"local_name": "x", "dynamism": frozenset({("L['x']", (True, False)), ("L['y']", ())})},
        {
            "local_name": "args",
            "is_derefed_cell_contents": True,
            "is_varargs": True,
            "is_varkw": True,
        },
    ],
    "NonSerializableSetGetItemSource": [{"index": 0}],
    "ParamBufferSource": [{"member": "w"}],
    "RandomValueSource": [{"random_call_index": 2}],
    "SyntheticLocalSource": [{"local_name": "s"}],
    "TempLocalSource": [{"local_name": "t"}],
    "TensorPropertySource": [
        {"prop": S.TensorProperty.SIZE, "idx": 0},
        {"prop": S.TensorProperty.STRIDE, "idx": 1},
        {"prop": S.TensorProperty.STORAGE_OFFSET},
    ],
    "TorchFunctionModeStackSource": [{"ind": 0}],
    "TupleIteratorGetItemSource": [{"index": 1}],
    "UnspecializedParamBufferSource": [{"member": "w"}],
}


def source_classes() -> list[type[Any]]:
    """Every class of sources that torch defines."""
    found = [cls for cls in vars(S).values() if isinstance(cls, type) and issubclass(cls, Source)]
    return sorted(found, key=lambda cls: cls.__name__)


def make(cls: type[Any], arguments: dict[str, Any]) -> Source:
    """An instance; an ImportSource without the guard that it puts on the frame being compiled."""
    base = {"base": X} if issubclass(cls, ChainedSource) else {}
    if cls is not S.ImportSource:
        return cls(**base, **arguments)
    source = object.__new__(cls)
    for name, value in arguments.items():
        object.__setattr__(source, name, value)
    return source


def cases() -> dict[type[Any], list[dict[str, Any]]]:
    """Arguments for each class, one or more times; none for a class that is new in torch."""
    out: dict[type[Any], list[dict[str, Any]]] = {}
    for cls in source_classes():
        needed = [f.name for f in dataclasses.fields(cls) if f.init and f.name != "base"]
        out[cls] = ARGUMENTS.get(cls.__name__, [] if needed else [{}])
    return out
