"""Events of tensors that torch wrote, or that are written by hand, and the records made of them."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from strategies import quietly, tensor_groups
from torch._dynamo.source import ConstantSource
from torch._subclasses import meta_utils
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.two_tensor import TwoTensor
from trace_logs import (
    STORAGE,
    TENSOR,
    Comparable,
    event,
    lacks_of,
    lines,
    one,
    only_group,
    write,
)

import torch_fakeify as tfk
from torch_fakeify.desc import (
    FunctionalDesc,
    FunctorchDesc,
    MarksDesc,
    MetaStorageDesc,
    MetaTensorDesc,
    NestedIntDesc,
    OpaqueValue,
    SparseDesc,
    SubclassDesc,
    SymDesc,
)
from torch_fakeify.exprs import decode_expr
from torch_fakeify.trace_events import (
    CARRIED,
    HIDDEN,
    NEVER_LOGGED,
    TEXT,
    Lack,
    SourceEvent,
    StorageEvent,
    TensorEvent,
)
from torch_fakeify.trace_log import CompileId

if TYPE_CHECKING:
    from pathlib import Path

    from torch_fakeify.trace_log import TraceGroup

# --- the main law ---------------------------------------------------------------------------------


@settings(max_examples=60)
@given(tensor_groups(marks=True, resize=False))
def test_a_log_says_what_describe_tensor_says(group: list[torch.Tensor]) -> None:
    """Field by field, up to what no log has; shared tensors and storages are shared in both."""
    found = only_group(group)
    describer = tfk.MetaTensorDescriber()
    ours, theirs = Comparable(), Comparable()
    for i, t in enumerate(group):
        expected = describer.describe_tensor(t)
        assert theirs.of(found.sources[f"t{i}"].record) == ours.of(expected)


@settings(max_examples=40)
@given(tensor_groups(resize=False))
def test_records_of_a_log_convert_to_what_torch_made(group: list[torch.Tensor]) -> None:
    """Sizes, strides, storages, bases, gradients: as those of the mode that wrote the log."""
    mode = FakeTensorMode()
    found = only_group(group, mode)
    converter = tfk.MetaConverter(FakeTensorMode())
    describers = tfk.MetaTensorDescriber(), tfk.MetaTensorDescriber()
    comparables = Comparable(), Comparable()
    kept = []
    for i, t in enumerate(group):
        record = found.sources[f"t{i}"].record
        assert record is not None
        pair = converter.from_desc(record), quietly(mode.from_tensor, t)
        kept.append(pair)
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
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds(kind: str) -> None:
    """What `describe_tensor` says, and of the tensor that is made of the record too."""
    t = quietly(KINDS[kind])
    found = one(t)
    assert found.record is not None
    assert found.lacks == ()
    expected = tfk.describe_tensor(t)
    assert Comparable().of(found.record) == Comparable().of(expected)
    fake = tfk.describe_tensor(tfk.MetaConverter(FakeTensorMode()).from_desc(found.record))
    assert Comparable("is_fake").of(fake) == Comparable("is_fake").of(expected)


def test_sharing_is_of_objects() -> None:
    """A base, a gradient and a storage are one record, however many tensors name them."""
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


def test_a_log_of_another_process(tmp_path: Path) -> None:
    """``TORCH_TRACE`` of a script: compilations apart, sources by name, the version of torch."""
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
    environment = {**os.environ, "TORCH_TRACE": str(tmp_path / "trace"), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(script)], check=True, env=environment)
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
    """Who wants it in guards gives it to a converter."""
    found = one(torch.zeros(4, 3))
    assert found.record is not None
    assert found.record.source is None
    env = ShapeEnv()
    converter = tfk.MetaConverter(FakeTensorMode(shape_env=env))
    converter.from_desc(found.record, source=ConstantSource(found.sources[0]))
    assert sorted(env.source_to_var) == ["t0.size()[0]", "t0.size()[1]"]


# --- kinds of tensors -----------------------------------------------------------------------------


def test_marks() -> None:
    """Dynamic dims and hint overrides are in a log, ranges are not, and that is said."""
    t = torch.zeros(4, 8, 2)
    torch._dynamo.mark_dynamic(t, 1, hint_override=6)
    torch._dynamo.mark_dynamic(t, 0)
    found = one(t)
    assert found.record is not None
    assert found.record.marks == MarksDesc(dynamic=(0, 1), hint_overrides=((1, 6),))
    assert found.lacks == (Lack("marks.dynamic_range", "torch writes no event of it"),)


@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_compressed(layout: str, index_dtype: torch.dtype) -> None:
    """Index dtype and block size are read off the components that the event names."""
    block = () if layout.startswith("cs") else (2, 3)
    dense = torch.ones(4, 6, 5).to(torch.float64)
    method = getattr(dense, f"to_sparse_{layout}")
    t = quietly(lambda: method(*([block] if block else []), dense_dim=1))
    names = (
        ("crow_indices", "col_indices") if layout[1:] == "sr" else ("ccol_indices", "row_indices")
    )
    indices = [getattr(t, name)().to(index_dtype) for name in names]
    make = torch.sparse_compressed_tensor
    t = quietly(lambda: make(*indices, t.values(), t.shape, layout=t.layout))
    group = only_group([t])
    found = group.sources["t0"]
    assert found.record is not None
    assert found.record.sparse == SparseDesc(
        sparse_dim=2,
        dense_dim=1,
        index_dtype=str(index_dtype).removeprefix("torch."),
        blocksize=block,
    )
    assert (found.record.layout, found.record.size) == (f"sparse_{layout}", (4, 6, 5))
    assert (found.record.stride, found.record.storage, found.lacks) == ((), None, ())
    components = [t for t in group.tensors if t is not found]
    assert [t.record.dtype for t in components if t.record] == [  # type: ignore[misc]
        *[str(index_dtype).removeprefix("torch.")] * 2,
        "float64",
    ]
    why = "torch describes the components of a sparse tensor without it"
    assert components[-1].lacks == (Lack("base", why),)


def test_subclass_without_context() -> None:
    """The inner tensors, shared, and a context that is known to be none."""
    inner = torch.zeros(2, 3)
    group = only_group([TwoTensor(inner, inner), inner])
    found, plain = group.sources["t0"], group.sources["t1"]
    assert found.record is not None
    assert plain.record is not None
    assert found.record.subclass == SubclassDesc(
        cls="torch.testing._internal.two_tensor.TwoTensor",
        tensors=(("a", plain.record), ("b", plain.record)),
    )
    assert found.record.subclass.tensors[0][1] is plain.record
    assert found.lacks == ()


def test_jagged() -> None:
    """Ragged sizes are nested ints; of context and view function there is only the text."""
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
    assert found.lacks[0] == Lack("subclass.context", "written as text alone", text)
    assert found.lacks[1][:2] == ("view_calls", "the view function is written as text")
    assert tfk.loads(tfk.dumps(found.record)) == found.record


def test_batched() -> None:
    """The wrapped tensor and the dim; the stack of interpreters is lacking."""
    groups: list[TraceGroup] = []

    def look(t: torch.Tensor) -> torch.Tensor:
        groups.append(only_group([t]))
        return t

    torch.func.vmap(look, in_dims=1)(torch.zeros(2, 3))
    found = groups[0].sources["t0"]
    assert found.record is not None
    assert found.record.functorch is not None
    assert found.record.functorch == FunctorchDesc(
        kind="batched", unwrapped=found.record.functorch.unwrapped, level=1, bdim=1
    )
    assert found.record.functorch.unwrapped.size == (2, 3)
    assert [lack.field for lack in found.lacks] == ["functorch.stack"]


def test_grad_wrapped() -> None:
    """A tensor of ``torch.func.grad``."""
    groups: list[TraceGroup] = []

    def look(t: torch.Tensor) -> torch.Tensor:
        groups.append(only_group([t]))
        return t.sum()

    torch.func.grad(look)(torch.zeros(3))
    found = groups[0].sources["t0"]
    assert found.record is not None
    assert found.record.functorch is not None
    assert (found.record.functorch.kind, found.record.functorch.level) == ("grad", 1)


def test_functional() -> None:
    """A functional tensor: which class it is, is not said."""
    t = torch._to_functional_tensor(torch.zeros(3))
    found = one(t)
    assert found.record is not None
    assert found.record.functional is not None
    assert found.record.functional == FunctionalDesc(unwrapped=found.record.functional.unwrapped)
    assert found.lacks == (Lack("functional.is_python", "torch writes no event of it"),)


def test_fake_tensor_with_symbols() -> None:
    """Symbols and formulas over them are carried, without hints and ranges."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = torch.zeros(5, 7)
    torch._dynamo.mark_dynamic(context, (0, 1))
    whole = mode.from_tensor(context, source=ConstantSource("x"))
    fake = whole[1:]
    rows, columns = (str(n) for n in whole.shape)
    found = one(fake, FakeTensorMode(shape_env=ShapeEnv()))
    expected = tfk.describe_tensor(fake)
    assert found.record is not None
    assert found.record.is_fake
    for ours, theirs in ((found.record, expected), (found.record.base, expected.base)):
        assert _numbers(ours) == _numbers(theirs)
    assert _numbers(found.record)[0] == f"{rows} - 1"
    why = "the hint, range and assumptions of its symbols"
    assert found.lacks == (
        Lack("size[0]", why, f"{rows} - 1"),
        Lack("size[1]", why, columns),
        Lack("stride[0]", why, columns),
        Lack("storage_offset", why, columns),
    )


def _numbers(d: MetaTensorDesc | None) -> list[Any]:
    assert d is not None
    assert d.storage is not None
    numbers = (*d.size, *d.stride, d.storage_offset, d.storage.nbytes)
    return [_without_facts(n) for n in numbers]


def _without_facts(n: Any) -> Any:
    if not isinstance(n, SymDesc):
        return n
    return str(decode_expr(n.expr))


# --- the tables -----------------------------------------------------------------------------------


def test_every_field_of_torch_is_classified() -> None:
    """A field that a release of torch adds is carried, text or hidden, or this fails."""
    fields = {f.name for f in dataclasses.fields(meta_utils.MetaTensorDesc)}
    assert CARRIED.keys() | TEXT.keys() | HIDDEN == fields
    assert not CARRIED.keys() & TEXT.keys()
    assert not (CARRIED.keys() | TEXT.keys()) & HIDDEN
    assert (TEXT.keys() - {"opaque_attrs"}) | HIDDEN <= meta_utils.MetaTensorDesc._UNSERIALIZABLE
    storage = {f.name for f in dataclasses.fields(meta_utils.MetaStorageDesc)}
    assert storage == {"id", "size", "data"}


def test_every_field_of_a_record_is_classified() -> None:
    """A field that a record gets is carried by logs or said to be lacking."""
    known = set(CARRIED.values()) | set(TEXT.values()) | {lack.field for lack in NEVER_LOGGED}
    assert known == set(MetaTensorDesc.__struct_fields__)


def test_events_have_torchs_fields_and_defaults() -> None:
    """What an event does not say is at the default of torch's field."""
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


# --- events by hand ---


def test_no_default_is_taken_for_another(tmp_path: Path) -> None:
    """A field that is not written is at torch's default: a tensor is then no leaf."""
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


def test_a_field_of_another_torch_is_named(tmp_path: Path) -> None:
    """What a newer torch writes is not dropped in silence."""
    (group,) = tfk.from_trace_log(write(tmp_path, *lines({"is_new": [1]}))).groups
    assert group.tensors[0].lacks == (Lack("is_new", "a field that is not known here", "[1]"),)
    path = write(tmp_path, event("describe_storage", {**STORAGE, "is_new": 1}))
    (group,) = tfk.from_trace_log(path).groups
    assert group.lacks == (Lack("storages[0].is_new", "a field that is not known here", "1"),)


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
def test_symbols_in_text(tmp_path: Path, text: str, expected: str) -> None:
    """Sums and products of symbols and numbers are read token by token."""
    (group,) = tfk.from_trace_log(write(tmp_path, *lines({"size": [text]}))).groups
    assert group.tensors[0].record is not None
    size = group.tensors[0].record.size[0]
    assert isinstance(size, SymDesc)
    assert (_without_facts(size), size.hint, size.kind) == (expected, None, "int")


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
        " + ".join(["s1"] * 201),
    ],
)
def test_other_formulas_are_lacking(tmp_path: Path, text: str) -> None:
    """Text is never evaluated: a formula gives no record and is named."""
    shown = text if len(text) <= 200 else text[:200] + "..."
    assert lacks_of(tmp_path, {"size": [text]}) == (
        Lack("size[0]", "a formula that is not read back", shown),
    )


def test_symbols_without_facts_are_refused_by_a_converter(tmp_path: Path) -> None:
    """Nobody says what the symbol is."""
    (group,) = tfk.from_trace_log(write(tmp_path, *lines({"size": ["s7"]}))).groups
    with pytest.raises(tfk.ConvertError):
        tfk.MetaConverter(FakeTensorMode(shape_env=ShapeEnv())).from_desc(group.records[0])


def test_what_needs_a_part_without_record_has_none(tmp_path: Path) -> None:
    """A view of a base whose size is a formula."""
    found = lacks_of(
        tmp_path, {"size": ["s7//1"]}, {"id": 1, "is_view": True, "base": 0, "grad": 0}
    )
    assert found == (
        Lack("base", "tensor 0 has no record"),
        Lack("grad", "tensor 0 has no record"),
    )


def test_a_storage_whose_size_is_a_formula(tmp_path: Path) -> None:
    """It has no record, nor has a tensor on it."""
    path = write(
        tmp_path,
        event("describe_storage", {**STORAGE, "size": "4*(s7//2)"}),
        event("describe_tensor", TENSOR),
    )
    (group,) = tfk.from_trace_log(path).groups
    assert (group.storages, group.records) == ((), ())
    why = "a formula that is not read back"
    assert group.lacks == (Lack("storages[0].nbytes", why, "4*(s7//2)"),)
    assert group.tensors[0].lacks == (Lack("storage", "storage 0 has no record"),)


def test_a_tensor_without_strides(tmp_path: Path) -> None:
    """A nested tensor of C++: there is no record without strides."""
    assert lacks_of(tmp_path, {"stride": None, "is_nested": True}) == (
        Lack("stride", "the event has none"),
    )


@pytest.mark.parametrize("text", ["<class 'm.f.<locals>.C'>", "C", None])
def test_a_class_that_has_no_name(tmp_path: Path, text: str | None) -> None:
    """A class in a function, or with a text of its own."""
    fields = {"is_traceable_wrapper_subclass": True, "attrs": {}, "type": text}
    assert lacks_of(tmp_path, fields) == (
        Lack("subclass.cls", "the text is no name of a class", text),
    )


def test_opaque_attributes(tmp_path: Path) -> None:
    """Inner attributes that are no tensors: a text stands for each."""
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
        Lack("subclass.mesh", "written as text alone", "DeviceMesh()"),
    )


def test_a_level_that_is_no_number(tmp_path: Path) -> None:
    """A wrapper is of a level; that of a grad wrapper which outlived its transform is -2."""
    fields = {"is_functorch_wrapped": True, "unwrapped": 0, "id": 1, "level": "x"}
    stack = Lack("functorch.stack", "written as text alone")
    assert lacks_of(tmp_path, {}, {**fields, "is_batchedtensor": True, "bdim": 0}) == (
        Lack("functorch.level", "a text that is no number", "x"),
        stack,
    )
    assert lacks_of(tmp_path, {}, {**fields, "is_legacy_batchedtensor": True, "level": "1"}) == (
        Lack("functorch", "a wrapper that is not known here"),
        stack,
    )
    assert lacks_of(tmp_path, {}, {**fields, "is_gradtrackingtensor": True, "level": None}) == (
        Lack("functorch.level", "a text that is no number"),
        stack,
    )
    outlived = {**fields, "is_gradtrackingtensor": True, "level": "-2"}
    (group,) = tfk.from_trace_log(write(tmp_path, *lines({}, outlived))).groups
    assert group.records[1].functorch == FunctorchDesc(
        kind="grad", unwrapped=group.records[0], level=-2
    )


def test_a_wrapper_that_outlived_its_transform(tmp_path: Path) -> None:
    """An empty stack of interpreters is known from its text."""
    fields = {"is_functorch_wrapped": True, "is_batchedtensor": True, "unwrapped": 0, "bdim": 0}
    more = {"id": 1, "level": "1", "functorch_stack": "[]"}
    (group,) = tfk.from_trace_log(write(tmp_path, *lines({}, {**fields, **more}))).groups
    assert group.tensors[1].lacks == ()
    assert group.records[1].functorch == FunctorchDesc(
        kind="batched", unwrapped=group.records[0], level=1, bdim=0
    )


def test_sparse_without_components(tmp_path: Path) -> None:
    """Without indices there is no index dtype, without values no size of a block."""
    fields = {"layout": "torch.sparse_bsr", "sparse_dim": 1, "dense_dim": 0, "stride": None}
    assert lacks_of(tmp_path, fields) == (
        Lack("sparse.index_dtype", "the event names no indices"),
        Lack("sparse.blocksize", "the values do not show it"),
    )
    csr = {**fields, "layout": "torch.sparse_csr"}
    assert lacks_of(tmp_path, csr) == (Lack("sparse.index_dtype", "the event names no indices"),)
    whole = {**fields, "id": 1, "crow_indices": 0, "values": 0}
    assert lacks_of(tmp_path, {}, whole) == (Lack("sparse.blocksize", "the values do not show it"),)


def test_functional_without_unwrapped(tmp_path: Path) -> None:
    """As torch writes tensors of xla, whose functional tensors it does not unwrap."""
    assert lacks_of(tmp_path, {"is_functional": True}) == (
        Lack("functional.unwrapped", "the event names none"),
        Lack("functional.is_python", "torch writes no event of it"),
    )


def test_long_text_is_cut(tmp_path: Path) -> None:
    """What is shown of a text does not grow with it."""
    (found,) = lacks_of(tmp_path, {"size": ["x" * 1000]})
    assert found.text == "x" * 200 + "..."
