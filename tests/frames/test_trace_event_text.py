"""Events of tensors written by hand: fields, symbols and missing parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from trace_logs import STORAGE, TENSOR, event, group_of, lines, without_facts

import torch_fakeify as tfk
from torch_fakeify.frames.trace_logs.events import MissingField as M
from torch_fakeify.records.tensor import (
    FunctorchDesc,
    MetaStorageDesc,
    MetaTensorDesc,
    OpaqueValue,
    SubclassDesc,
    SymDesc,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NOT_READ = "a formula that is not read back"
UNKNOWN = "a field that is not known here"


def test_a_missing_field_has_torchs_default(tmp_path: Path) -> None:
    """A field that is not in the event has torch's default; for ``is_leaf`` that is false."""
    group = group_of(tmp_path, *lines({"is_leaf": False, "requires_grad": True}))
    storage = MetaStorageDesc(id=0, nbytes=16)
    record = MetaTensorDesc(
        id=0, dtype="float32", device="cpu", size=(4,), stride=(1,), storage=storage,
        requires_grad=True, is_leaf=False,
    )  # fmt: skip
    assert group.records == (record,)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s77", "s77"),
        ("u0", "u0"),
        ("3*s77", "3*s77"),
        ("s77*u0**2", "s77*u0**2"),
        ("12*s1*s77", "12*s1*s77"),
        ("s1*s1", "s1**2"),
        ("s77 + 1", "s77 + 1"),
        ("-s77 + 5", "5 - s77"),
        ("4*s44*(s93 - 1) + 4*s44", "4*s44*(s93 - 1) + 4*s44"),
        ("s1 - 2*(s2 - u3)*s4", "s1 - 2*s4*(s2 - u3)"),
        ("(s1 + 1)**2", "(s1 + 1)**2"),
    ],
)
def test_symbols_are_parsed(tmp_path: Path, text: str, expected: str) -> None:
    """Sums and products of symbols and numbers are read; a converter refuses them without facts."""
    (record,) = group_of(tmp_path, *lines({"size": [text]})).records
    (size,) = record.size
    assert isinstance(size, SymDesc)
    assert (without_facts(size), size.hint, size.kind) == (expected, None, "int")
    with pytest.raises(tfk.ConvertError):
        tfk.MetaConverter(FakeTensorMode(shape_env=ShapeEnv())).from_desc(record)


OTHER_FORMULAS = [
    "s77 +", "s77*", "s77 s78", "(s77", "s77)", "s77\n", "s77**s1", "s77**-1", "s77**1", "s77**100",
    "s77 + 9**9", "s77**2**2", "x", "4", "", "0*s1", "s1 - s1", "s1/2", "(s1//2)", "Mod(s1, 2)",
    "__import__('os').abort()", "s٣", "s1 + ٣", "s1 + 10000000000000000000000",
    "(" * 21 + "s1" + ")" * 21, "--s1", "s1*-2", "-" * 900 + "s1",
    "(((((2*s1)**99)**99)**99)**99)**99", " + ".join(["s1"] * 201), "x" * 1000,
]  # fmt: skip
"""Texts that are never evaluated: they are listed, to a bounded length, and give no record."""
BATCHED = {"is_functorch_wrapped": True, "unwrapped": 0, "id": 1, "is_batchedtensor": True, "bdim": 0}  # fmt: skip
LEGACY = {"is_functorch_wrapped": True, "unwrapped": 0, "id": 1, "is_legacy_batchedtensor": True}
GRAD = {"is_functorch_wrapped": True, "unwrapped": 0, "id": 1, "is_gradtrackingtensor": True}
STACK = M("functorch.stack", "written as text alone")
MESH = OpaqueValue(kind="trace_log_text", data="DeviceMesh()")
SUBCLASS = {"is_traceable_wrapper_subclass": True, "attrs": {}}
NO_CLASS = "the text is no name of a class"
BSR = {"layout": "torch.sparse_bsr", "sparse_dim": 1, "dense_dim": 0, "stride": None}
NO_BLOCKS = M("sparse.blocksize", "the values do not show it")
NO_INDICES = M("sparse.index_dtype", "the event names no indices")

INCOMPLETE: dict[str, tuple[list[dict[str, Any]], list[M]]] = {
    **{
        f"formula {i}": (
            [{"size": [text]}],
            [M("size[0]", NOT_READ, text if len(text) <= 200 else text[:200] + "...")],
        )
        for i, text in enumerate(OTHER_FORMULAS)
    },
    "parts without records": (
        [{"size": ["s7//1"]}, {"id": 1, "is_view": True, "base": 0, "grad": 0}],
        [M("base", "tensor 0 has no record"), M("grad", "tensor 0 has no record")],
    ),
    "nested tensor of C++": (
        [{"stride": None, "is_nested": True}],
        [M("stride", "the event has none")],
    ),
    **{
        f"class {text}": ([{**SUBCLASS, "type": text}], [M("subclass.cls", NO_CLASS, text)])
        for text in ("<class 'm.f.<locals>.C'>", "C", None)
    },
    "no level": (
        [{}, {**BATCHED, "level": "x"}],
        [M("functorch.level", "a text that is no number", "x"), STACK],
    ),
    "no text of a level": (
        [{}, {**GRAD, "level": None}],
        [M("functorch.level", "a text that is no number"), STACK],
    ),
    "unknown wrapper": (
        [{}, {**LEGACY, "level": "1"}],
        [M("functorch", "a wrapper that is not known here"), STACK],
    ),
    "bsr without parts": ([BSR], [NO_INDICES, NO_BLOCKS]),
    "csr without parts": ([{**BSR, "layout": "torch.sparse_csr"}], [NO_INDICES]),
    "bsr of a vector": ([{}, {**BSR, "id": 1, "crow_indices": 0, "values": 0}], [NO_BLOCKS]),
    "functional tensor of xla, which torch does not unwrap": (
        [{"is_functional": True}],
        [
            M("functional.unwrapped", "the event names none"),
            M("functional.is_python", "torch writes no event of it"),
        ],
    ),
}


@pytest.mark.parametrize("case", INCOMPLETE)
def test_an_incomplete_event_has_no_record(case: str, tmp_path: Path) -> None:
    """What is missing is listed by field, with why and the text in the log."""
    tensors, lacks = INCOMPLETE[case]
    found = group_of(tmp_path, *lines(*tensors)).tensors[-1]
    assert found.record is None
    assert found.lacks == tuple(lacks)


COMPLETE: dict[str, tuple[list[dict[str, Any]], str, Callable[[Any], Any], list[M]]] = {
    "field of a newer torch": (
        [{"is_new": [1]}],
        "id",
        lambda _: 0,
        [M("is_new", UNKNOWN, "[1]")],
    ),
    "opaque attribute": (
        [{**SUBCLASS, "type": "<class 'm.C'>", "opaque_attrs": {"mesh": "DeviceMesh()"}}],
        "subclass",
        lambda _: SubclassDesc(cls="m.C", opaques=(("mesh", MESH),)),
        [M("subclass.mesh", "written as text alone", "DeviceMesh()")],
    ),
    "grad wrapper that outlived its transform": (
        [{}, {**GRAD, "level": "-2"}],
        "functorch",
        lambda inner: FunctorchDesc(kind="grad", unwrapped=inner, level=-2),
        [STACK],
    ),
    "empty stack of a batched tensor": (
        [{}, {**BATCHED, "level": "1", "functorch_stack": "[]"}],
        "functorch",
        lambda inner: FunctorchDesc(kind="batched", unwrapped=inner, level=1, bdim=0),
        [],
    ),
}


@pytest.mark.parametrize("case", COMPLETE)
def test_an_event_with_missing_parts_may_have_a_record(case: str, tmp_path: Path) -> None:
    """Nothing is dropped silently: what the record cannot have is listed."""
    tensors, field, expected, lacks = COMPLETE[case]
    group = group_of(tmp_path, *lines(*tensors))
    assert getattr(group.records[-1], field) == expected(group.records[0])
    assert group.tensors[-1].lacks == tuple(lacks)


def test_storages_may_lack_fields(tmp_path: Path) -> None:
    """A field that is not known is listed; without a size neither the storage nor a tensor has a record."""
    group = group_of(tmp_path, event("describe_storage", {**STORAGE, "is_new": 1}))
    assert group.lacks == (M("storages[0].is_new", UNKNOWN, "1"),)
    formula = event("describe_storage", {**STORAGE, "size": "4*(s7//2)"})
    group = group_of(tmp_path, formula, event("describe_tensor", TENSOR))
    assert (group.storages, group.records) == ((), ())
    assert group.lacks == (M("storages[0].nbytes", NOT_READ, "4*(s7//2)"),)
    assert group.tensors[0].lacks == (M("storage", "storage 0 has no record"),)
