"""Events of tensors written by hand: fields, symbols and missing parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from trace_logs import (
    STORAGE,
    TENSOR,
    event,
    lacks_of,
    lines,
    write,
)

import torch_fakeify as tfk
from torch_fakeify.frames.trace_logs.events import (
    MissingField,
)
from torch_fakeify.records.tensor import (
    FunctorchDesc,
    MetaStorageDesc,
    MetaTensorDesc,
    OpaqueValue,
    SubclassDesc,
    SymDesc,
)

if TYPE_CHECKING:
    from pathlib import Path

from trace_logs import without_facts

# --- events by hand ---


def test_a_missing_field_has_torchs_default(tmp_path: Path) -> None:
    """A field that is not in the event has torch's default; for ``is_leaf`` that is false."""
    (group,) = tfk.from_trace_log(
        write(tmp_path, *lines({"is_leaf": False, "requires_grad": True}))
    ).groups
    assert group.records == (
        MetaTensorDesc(
            id=0,
            dtype="float32",
            device="cpu",
            size=(4,),
            stride=(1,),
            storage=MetaStorageDesc(id=0, nbytes=16),
            requires_grad=True,
            is_leaf=False,
        ),
    )


def test_a_field_of_another_torch_is_listed(tmp_path: Path) -> None:
    """A field that a newer torch writes is not dropped silently."""
    (group,) = tfk.from_trace_log(write(tmp_path, *lines({"is_new": [1]}))).groups
    assert group.tensors[0].lacks == (
        MissingField("is_new", "a field that is not known here", "[1]"),
    )
    path = write(tmp_path, event("describe_storage", {**STORAGE, "is_new": 1}))
    (group,) = tfk.from_trace_log(path).groups
    assert group.lacks == (
        MissingField("storages[0].is_new", "a field that is not known here", "1"),
    )


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
    """Sums and products of symbols and numbers are read."""
    (group,) = tfk.from_trace_log(write(tmp_path, *lines({"size": [text]}))).groups
    assert group.tensors[0].record is not None
    size = group.tensors[0].record.size[0]
    assert isinstance(size, SymDesc)
    assert (without_facts(size), size.hint, size.kind) == (expected, None, "int")


@pytest.mark.parametrize(
    "text",
    [
        "s77 +",
        "s77*",
        "s77 s78",
        "(s77",
        "s77)",
        "s77\n",
        "s77**s1",
        "s77**-1",
        "s77**1",
        "s77**100",
        "s77 + 9**9",
        "s77**2**2",
        "x",
        "4",
        "",
        "0*s1",
        "s1 - s1",
        "s1/2",
        "(s1//2)",
        "Mod(s1, 2)",
        "__import__('os').abort()",
        "s٣",
        "s1 + ٣",
        "s1 + 10000000000000000000000",
        "(" * 21 + "s1" + ")" * 21,
        "--s1",
        "s1*-2",
        "-" * 900 + "s1",
        "(((((2*s1)**99)**99)**99)**99)**99",
        " + ".join(["s1"] * 201),
    ],
)
def test_other_formulas_are_missing_fields(tmp_path: Path, text: str) -> None:
    """Text is never evaluated: a formula is listed and gives no record."""
    shown = text if len(text) <= 200 else text[:200] + "..."
    assert lacks_of(tmp_path, {"size": [text]}) == (
        MissingField("size[0]", "a formula that is not read back", shown),
    )


def test_symbols_without_facts_are_refused_by_a_converter(tmp_path: Path) -> None:
    """The kind and value of a symbol without facts are unknown."""
    (group,) = tfk.from_trace_log(write(tmp_path, *lines({"size": ["s7"]}))).groups
    with pytest.raises(tfk.ConvertError):
        tfk.MetaConverter(FakeTensorMode(shape_env=ShapeEnv())).from_desc(group.records[0])


def test_a_tensor_whose_part_has_no_record_has_none(tmp_path: Path) -> None:
    """A view of a base whose size is a formula is not converted."""
    found = lacks_of(
        tmp_path, {"size": ["s7//1"]}, {"id": 1, "is_view": True, "base": 0, "grad": 0}
    )
    assert found == (
        MissingField("base", "tensor 0 has no record"),
        MissingField("grad", "tensor 0 has no record"),
    )


def test_a_storage_whose_size_is_a_formula_has_no_record(tmp_path: Path) -> None:
    """Neither a storage whose size is a formula nor a tensor on it has a record."""
    path = write(
        tmp_path,
        event("describe_storage", {**STORAGE, "size": "4*(s7//2)"}),
        event("describe_tensor", TENSOR),
    )
    (group,) = tfk.from_trace_log(path).groups
    assert (group.storages, group.records) == ((), ())
    why = "a formula that is not read back"
    assert group.lacks == (MissingField("storages[0].nbytes", why, "4*(s7//2)"),)
    assert group.tensors[0].lacks == (MissingField("storage", "storage 0 has no record"),)


def test_a_tensor_without_strides_has_no_record(tmp_path: Path) -> None:
    """Nested tensors of C++ have no strides, so no record is made of them."""
    assert lacks_of(tmp_path, {"stride": None, "is_nested": True}) == (
        MissingField("stride", "the event has none"),
    )


@pytest.mark.parametrize("text", ["<class 'm.f.<locals>.C'>", "C", None])
def test_a_class_without_a_name_is_a_missing_field(tmp_path: Path, text: str | None) -> None:
    """A class may be local to a function, or print a text of its own."""
    fields = {"is_traceable_wrapper_subclass": True, "attrs": {}, "type": text}
    assert lacks_of(tmp_path, fields) == (
        MissingField("subclass.cls", "the text is no name of a class", text),
    )


def test_opaque_attributes_are_texts(tmp_path: Path) -> None:
    """Inner attributes that are no tensors are recorded as their texts."""
    fields = {
        "is_traceable_wrapper_subclass": True,
        "type": "<class 'm.C'>",
        "attrs": {},
        "opaque_attrs": {"mesh": "DeviceMesh()"},
    }
    (group,) = tfk.from_trace_log(write(tmp_path, *lines(fields))).groups
    (record,) = group.records
    assert record.subclass == SubclassDesc(
        cls="m.C", opaques=(("mesh", OpaqueValue(kind="trace_log_text", data="DeviceMesh()")),)
    )
    assert group.tensors[0].lacks == (
        MissingField("subclass.mesh", "written as text alone", "DeviceMesh()"),
    )


def test_a_level_that_is_no_number_is_a_missing_field(tmp_path: Path) -> None:
    """The level of a grad wrapper that outlived its transform is -2."""
    fields = {"is_functorch_wrapped": True, "unwrapped": 0, "id": 1, "level": "x"}
    stack = MissingField("functorch.stack", "written as text alone")
    assert lacks_of(tmp_path, {}, {**fields, "is_batchedtensor": True, "bdim": 0}) == (
        MissingField("functorch.level", "a text that is no number", "x"),
        stack,
    )
    assert lacks_of(tmp_path, {}, {**fields, "is_legacy_batchedtensor": True, "level": "1"}) == (
        MissingField("functorch", "a wrapper that is not known here"),
        stack,
    )
    assert lacks_of(tmp_path, {}, {**fields, "is_gradtrackingtensor": True, "level": None}) == (
        MissingField("functorch.level", "a text that is no number"),
        stack,
    )
    outlived = {**fields, "is_gradtrackingtensor": True, "level": "-2"}
    (group,) = tfk.from_trace_log(write(tmp_path, *lines({}, outlived))).groups
    assert group.records[1].functorch == FunctorchDesc(
        kind="grad", unwrapped=group.records[0], level=-2
    )


def test_a_wrapper_that_outlived_its_transform_has_an_empty_stack(tmp_path: Path) -> None:
    """An empty stack of interpreters is read from its text."""
    fields = {"is_functorch_wrapped": True, "is_batchedtensor": True, "unwrapped": 0, "bdim": 0}
    more = {"id": 1, "level": "1", "functorch_stack": "[]"}
    (group,) = tfk.from_trace_log(write(tmp_path, *lines({}, {**fields, **more}))).groups
    assert group.tensors[1].lacks == ()
    assert group.records[1].functorch == FunctorchDesc(
        kind="batched", unwrapped=group.records[0], level=1, bdim=0
    )


def test_missing_components_of_a_sparse_tensor_are_missing_fields(tmp_path: Path) -> None:
    """Indices are needed for the index dtype, values for the block size."""
    fields = {"layout": "torch.sparse_bsr", "sparse_dim": 1, "dense_dim": 0, "stride": None}
    assert lacks_of(tmp_path, fields) == (
        MissingField("sparse.index_dtype", "the event names no indices"),
        MissingField("sparse.blocksize", "the values do not show it"),
    )
    csr = {**fields, "layout": "torch.sparse_csr"}
    assert lacks_of(tmp_path, csr) == (
        MissingField("sparse.index_dtype", "the event names no indices"),
    )
    whole = {**fields, "id": 1, "crow_indices": 0, "values": 0}
    assert lacks_of(tmp_path, {}, whole) == (
        MissingField("sparse.blocksize", "the values do not show it"),
    )


def test_an_unwrapped_functional_tensor_may_be_missing(tmp_path: Path) -> None:
    """Torch writes tensors of xla so, whose functional tensors it does not unwrap."""
    assert lacks_of(tmp_path, {"is_functional": True}) == (
        MissingField("functional.unwrapped", "the event names none"),
        MissingField("functional.is_python", "torch writes no event of it"),
    )


def test_long_text_is_truncated(tmp_path: Path) -> None:
    """The text of a missing field is truncated to a bounded length."""
    (found,) = lacks_of(tmp_path, {"size": ["x" * 1000]})
    assert found.text == "x" * 200 + "..."
