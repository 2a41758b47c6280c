"""Events of tensors that torch wrote, and the records made of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from processes import fresh
from strategies import quietly, tensor_groups, without_refusals_of_torch
from torch._dynamo.source import ConstantSource
from torch._subclasses import meta_utils
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.two_tensor import TwoTensor
from trace_logs import Comparable, one, only_group, without_facts

import torch_fakeify as tfk
from torch_fakeify.frames.trace_logs.events import (
    NEVER_LOGGED,
    MissingField,
    SourceEvent,
    StorageEvent,
    TensorEvent,
)
from torch_fakeify.frames.trace_logs.log import CompileId
from torch_fakeify.records.tensor import (
    FunctionalDesc,
    FunctorchDesc,
    MarksDesc,
    MetaTensorDesc,
    NestedIntDesc,
    OpaqueValue,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch_fakeify.frames.trace_logs.log import TracedTensor

# --- the main law ---------------------------------------------------------------------------------


@settings(max_examples=60)
@given(tensor_groups(marks=True, resize=False))
def test_a_log_has_the_records_of_describe_tensor(group: list[torch.Tensor]) -> None:
    """Fields that a log has are equal, and tensors and storages are shared alike."""
    with without_refusals_of_torch():
        found = only_group(group)
    describer = tfk.MetaTensorDescriber()
    ours, theirs = Comparable(), Comparable()
    for i, t in enumerate(group):
        expected = describer.describe_tensor(t)
        assert theirs.of(found.sources[f"t{i}"].record) == ours.of(expected)


@settings(max_examples=40)
@given(tensor_groups(resize=False))
def test_records_of_a_log_convert_to_what_torch_made(group: list[torch.Tensor]) -> None:
    """Sizes, strides, storages, bases and gradients are those of the mode that wrote the log."""
    mode = FakeTensorMode()
    with without_refusals_of_torch():
        found = only_group(group, mode)
    converter = tfk.MetaConverter(FakeTensorMode())
    describers = tfk.MetaTensorDescriber(), tfk.MetaTensorDescriber()
    comparables = Comparable(), Comparable()
    pairs = []  # alive, since converter and mode find the storages of the living
    for i, t in enumerate(group):
        record = found.sources[f"t{i}"].record
        assert record is not None
        pair = converter.from_desc(record), quietly(mode.from_tensor, t)
        pairs.append(pair)
        ours, theirs = (
            comparable.of(describer.describe_tensor(fake))
            for fake, describer, comparable in zip(pair, describers, comparables, strict=True)
        )
        assert ours == theirs


KINDS = {
    "coo": lambda: torch.eye(3).to_sparse(),
    "coo, hybrid": lambda: torch.ones(2, 3, 4).to_sparse(1),
    "coo, not coalesced": lambda: torch.sparse_coo_tensor(
        [[0, 0]], [1.0, 2.0], (3,), requires_grad=True
    ),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "csc": lambda: torch.ones(2, 3, 3).to_sparse_csc(),
    "bsr": lambda: torch.ones(4, 6).to_sparse_bsr((2, 3)),
    "bsc": lambda: torch.ones(4, 6, 5).to_sparse_bsc((2, 3), dense_dim=1),
    "mkldnn": lambda: torch.ones(2, 3).to_mkldnn(),
    "subclass": lambda: TwoTensor(torch.ones(2, 3), torch.ones(2, 3)),
    "parameter of a subclass": lambda: torch.nn.Parameter(
        TwoTensor(torch.ones(2, 3), torch.ones(2, 3))
    ),
    "subclass of subclasses": lambda: TwoTensor(
        TwoTensor(torch.ones(2), torch.ones(2)), TwoTensor(torch.ones(2), torch.ones(2))
    ),
    "conj of neg": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "meta": lambda: torch.ones(3, device="meta"),
    **{
        f"{layout}, short indices": lambda layout=layout: short_indices(layout)
        for layout in ("csr", "csc", "bsr", "bsc")
    },
}


def short_indices(layout: str) -> torch.Tensor:
    """Return a tensor of a compressed layout, with indices of 32 bits and a dense dim."""
    dense = torch.ones(4, 6, 5).to(torch.float64)
    block = () if layout.startswith("cs") else ((2, 3),)
    t = getattr(dense, f"to_sparse_{layout}")(*block, dense_dim=1)
    names = ("crow", "col") if layout[1:] == "sr" else ("ccol", "row")
    indices = [getattr(t, f"{name}_indices")().int() for name in names]
    return torch.sparse_compressed_tensor(*indices, t.values(), t.shape, layout=t.layout)


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_tensors_have_the_records_of_describe_tensor(kind: str) -> None:
    """The tensor that is made of the record has an equal event."""
    t = quietly(KINDS[kind])
    found = one(t)
    assert found.record is not None
    assert found.lacks == ()
    expected = tfk.MetaTensorDescriber().describe_tensor(t)
    assert Comparable().of(found.record) == Comparable().of(expected)
    fake = tfk.MetaTensorDescriber().describe_tensor(
        tfk.MetaConverter(FakeTensorMode()).from_desc(found.record)
    )
    assert Comparable("is_fake").of(fake) == Comparable("is_fake").of(expected)


def test_objects_are_shared_as_in_the_program() -> None:
    """A base, a gradient and a storage are one record for all tensors that refer to them."""
    base = torch.zeros(4, requires_grad=True)
    base.grad = torch.ones(4)
    group = only_group([base[1:], base[:2], base])
    views = [group.sources["t0"].record, group.sources["t1"].record]
    whole = group.sources["t2"].record
    assert whole is not None
    assert all(view is not None and view.base is whole for view in views)
    assert all(view is not None and view.storage is whole.storage for view in views)
    assert whole.storage in group.storages
    assert whole.grad is next(t.record for t in group.tensors if t.id == whole.grad.id)  # type: ignore[union-attr]
    assert tfk.loads(tfk.dumps(list(group.records))) == list(group.records)
    inner = torch.zeros(2, 3)
    group = only_group([TwoTensor(inner, inner), inner])
    wrapper, plain = group.records[-1], group.sources["t1"].record
    assert wrapper.subclass is not None
    assert all(part is plain for _, part in wrapper.subclass.tensors)


@pytest.mark.sweep
def test_a_log_of_another_process_is_read(tmp_path: Path) -> None:
    """``TORCH_TRACE`` of a script has its compilations, sources by name and torch's version."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "weight = torch.nn.Parameter(torch.zeros(4, 3))\n"
        "rows = torch.zeros(4, 6)\n"
        "@torch.compile(backend='eager')\n"
        "def f(x, y):\n"
        "    return x @ weight.t() + y\n"
        "f(torch.zeros(5, 3), rows[1:2, :4])\n"
        "f(torch.zeros(7, 3), rows[1:2, :4])\n"
    )
    fresh(script, TORCH_TRACE=str(tmp_path / "trace"), OMP_NUM_THREADS="1")
    (path,) = (tmp_path / "trace").iterdir()
    log = tfk.from_trace_log(path)
    assert log.torch_versions == (torch.__version__,)
    assert not log.truncated
    assert [group.compile_ids for group in log.groups] == [
        (CompileId(0, 0, 0),),
        (CompileId(0, 1, 0),),
    ]
    first, second = log.groups
    assert sorted(first.sources) == ["G['weight']", "L['x']", "L['y']"]
    assert [t.lacks for group in log.groups for t in group.tensors] == [()] * 8
    sizes = [group.sources["L['x']"].record.size for group in log.groups]  # type: ignore[union-attr]
    assert sizes == [(5, 3), (7, 3)]
    y = second.sources["L['y']"].record
    assert y is not None
    assert y.base is not None
    assert (y.size, y.stride, y.storage_offset, y.base.size) == ((1, 4), (6, 1), 6, (4, 6))
    weight = second.sources["G['weight']"].record
    assert weight is not None
    assert (weight.is_parameter, weight.requires_grad) == (True, True)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    converter = tfk.MetaConverter(mode)
    made = [converter.from_desc(t.record) for t in first.tensors if t.record is not None]
    assert [tuple(t.shape) for t in made] == [(4, 3), (5, 3), (4, 6), (1, 4)]


def test_the_name_of_a_source_may_name_symbols() -> None:
    """A caller that needs the source in guards passes it to the converter."""
    found = one(torch.zeros(4, 3))
    assert found.record is not None
    assert found.record.source is None
    env = ShapeEnv()
    converter = tfk.MetaConverter(FakeTensorMode(shape_env=env))
    converter.from_desc(found.record, source=ConstantSource(found.sources[0]))
    assert sorted(env.source_to_var) == ["t0.size()[0]", "t0.size()[1]"]


# --- kinds of tensors -----------------------------------------------------------------------------


def test_marks_are_read() -> None:
    """Dynamic dims and hint overrides are in a log; the missing ranges are listed."""
    t = torch.zeros(4, 8, 2)
    torch._dynamo.mark_dynamic(t, 1, hint_override=6)
    torch._dynamo.mark_dynamic(t, 0)
    found = one(t)
    assert found.record is not None
    assert found.record.marks == MarksDesc(dynamic=(0, 1), hint_overrides=((1, 6),))
    assert found.lacks == (MissingField("marks.dynamic_range", "torch writes no event of it"),)


def test_components_of_compressed_layouts_are_read() -> None:
    """They have records of their own, the values without the tensor that torch views them in."""
    group = only_group([quietly(short_indices, "bsr")])
    *indices, values = (t for t in group.tensors if t is not group.sources["t0"])
    assert [t.record.dtype for t in indices if t.record] == ["int32", "int32"]
    assert values.record is not None
    assert values.record.dtype == "float64"
    why = "torch describes the components of a sparse tensor without it"
    assert values.lacks == (MissingField("base", why),)


def test_jagged_tensors_are_read() -> None:
    """Ragged sizes are nested ints; the context and the view function are texts."""
    parts = [torch.ones(2, 3), torch.ones(4, 3)]
    t = torch.nested.nested_tensor(parts, layout=torch.jagged)
    group = only_group([t], FakeTensorMode(shape_env=ShapeEnv()))
    found = group.sources["t0"]
    assert found.record is not None
    number = next(t.record.nested_int for t in group.tensors if t.record and t.record.nested_int)
    assert found.record.size == (2, NestedIntDesc(number), 3)
    assert found.record.stride == (NestedIntDesc(number, 3), 3, 1)
    assert found.record.layout == "jagged"
    assert found.record.base is not None
    assert found.record.base.size == (6, 3)
    assert found.record.subclass is not None
    text = "{'requires_grad': False, 'ragged_idx': 1}"
    assert found.record.subclass.context == OpaqueValue(kind="trace_log_text", data=text)
    assert [name for name, _ in found.record.subclass.tensors][:2] == ["_values", "_offsets"]
    assert found.lacks[0] == MissingField("subclass.context", "written as text alone", text)
    assert found.lacks[1][:2] == ("view_calls", "the view function is written as text")
    assert tfk.loads(tfk.dumps(found.record)) == found.record


@pytest.mark.parametrize(
    ("transform", "kind", "bdim"),
    [(lambda f: torch.func.vmap(f, in_dims=1), "batched", 1), (torch.func.grad, "grad", None)],
    ids=["batched", "grad"],
)
def test_tensors_in_a_transform_are_read(transform: Any, kind: Any, bdim: int | None) -> None:
    """The wrapped tensor, level and dim are recorded; the stack of interpreters is missing."""
    found: list[TracedTensor] = []

    def look(t: torch.Tensor) -> torch.Tensor:
        found.append(one(t))
        return t.sum()

    transform(look)(torch.zeros(2, 3))
    record = found[0].record
    assert record is not None
    assert record.functorch is not None
    unwrapped = record.functorch.unwrapped
    assert record.functorch == FunctorchDesc(kind=kind, unwrapped=unwrapped, level=1, bdim=bdim)
    assert unwrapped.size == (2, 3)
    assert [lack.field for lack in found[0].lacks] == ["functorch.stack"]


def test_functional_tensors_are_read() -> None:
    """Which class of functional tensor it is, is a missing field."""
    found = one(torch._to_functional_tensor(torch.zeros(3)))
    assert found.record is not None
    assert found.record.functional is not None
    assert found.record.functional == FunctionalDesc(unwrapped=found.record.functional.unwrapped)
    assert found.lacks == (MissingField("functional.is_python", "torch writes no event of it"),)


def test_fake_tensors_with_symbols_are_read() -> None:
    """Symbols and formulas over them are recorded, without hints and ranges."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = torch.zeros(5, 7)
    torch._dynamo.mark_dynamic(context, (0, 1))
    whole = mode.from_tensor(context, source=ConstantSource("x"))
    fake = whole[1:]
    rows, columns = (str(n) for n in whole.shape)
    found = one(fake, FakeTensorMode(shape_env=ShapeEnv()))
    expected = tfk.MetaTensorDescriber().describe_tensor(fake)
    assert found.record is not None
    assert found.record.is_fake
    for ours, theirs in ((found.record, expected), (found.record.base, expected.base)):
        assert _numbers(ours) == _numbers(theirs)
    assert _numbers(found.record)[0] == f"{rows} - 1"
    why = "the hint, range and assumptions of its symbols"
    assert found.lacks == (
        MissingField("size[0]", why, f"{rows} - 1"),
        MissingField("size[1]", why, columns),
        MissingField("stride[0]", why, columns),
        MissingField("storage_offset", why, columns),
    )


def _numbers(d: MetaTensorDesc | None) -> list[Any]:
    assert d is not None
    assert d.storage is not None
    numbers = (*d.size, *d.stride, d.storage_offset, d.storage.nbytes)
    return [without_facts(n) for n in numbers]


# --- the tables -----------------------------------------------------------------------------------

SAME = (
    "base creation_meta device dtype grad id is_conj is_inference is_leaf is_neg is_parameter is_view "
    "layout nested_int requires_grad size storage storage_offset stride"
)
CARRIED = {name: name for name in SAME.split()} | {
    name: field
    for field, names in {
        "functorch": "bdim current_level is_batchedtensor is_functorch_wrapped is_gradtrackingtensor "
        "is_legacy_batchedtensor level unwrapped",
        "functional": "is_functional",
        "is_fake": "fake_mode",
        "layout": "is_mkldnn is_nested is_sparse",
        "marks": "dynamo_dynamic_indices dynamo_hint_overrides",
        "size": "ndim",
        "sparse": "ccol_indices col_indices crow_indices dense_dim is_coalesced row_indices sparse_dim "
        "values",
        "subclass": "attrs is_traceable_wrapper_subclass type",
    }.items()
    for name in names.split()
}
"""Fields of torch's ``MetaTensorDesc`` that an event carries, and the field of the record."""

TEXT = {
    "ctx": "subclass",
    "functorch_stack": "functorch",
    "opaque_attrs": "subclass",
    "view_func": "view_calls",
}
"""Fields that an event has only as unparsable text, with the field of the record."""

HIDDEN = frozenset({"autograd_meta_from", "data"})
"""Fields that an event only marks as set; records do not have them."""


def test_every_field_of_torch_is_classified() -> None:
    """A field that torch adds fails here, until it is read, kept as text or hidden."""
    fields = {f.name for f in dataclasses.fields(meta_utils.MetaTensorDesc)}
    assert CARRIED.keys() | TEXT.keys() | HIDDEN == fields
    assert not CARRIED.keys() & TEXT.keys()
    assert not (CARRIED.keys() | TEXT.keys()) & HIDDEN
    assert (TEXT.keys() - {"opaque_attrs"}) | HIDDEN <= meta_utils.MetaTensorDesc._UNSERIALIZABLE
    storage = {f.name for f in dataclasses.fields(meta_utils.MetaStorageDesc)}
    assert storage == {"id", "size", "data"}


def test_every_field_of_a_record_is_classified() -> None:
    """A field that is added to a record fails here, until a log has it or it is missing by name."""
    known = set(CARRIED.values()) | set(TEXT.values()) | {lack.field for lack in NEVER_LOGGED}
    assert known == set(MetaTensorDesc.__struct_fields__)


def test_events_have_torchs_fields_and_defaults() -> None:
    """A field that is not in an event has the default of torch's field."""
    fields = {f.name: f.default for f in dataclasses.fields(meta_utils.MetaTensorDesc)}
    event = {f.name: f for f in msgspec.structs.fields(TensorEvent)}
    assert event.keys() == fields.keys() | {"describer_id"}
    for name, default in fields.items():
        if default is dataclasses.MISSING:
            assert event[name].required == (not name.startswith("dynamo_"))
        else:
            expected = "torch.strided" if name == "layout" else default
            assert event[name].default == expected
    assert set(StorageEvent.__struct_fields__) == {"id", "describer_id", "size"}
    assert set(SourceEvent.__struct_fields__) == {"id", "describer_id", "source"}
