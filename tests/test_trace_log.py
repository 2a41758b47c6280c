"""Structured trace logs, written by torch and by hand, and the records that are made of them."""

from __future__ import annotations

import dataclasses
import gzip
import json
import logging
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from tensor_strategies import quietly, tensor_groups
from torch._dynamo.source import ConstantSource
from torch._logging._internal import LazyTraceHandler, TorchLogsFormatter
from torch._subclasses import meta_utils
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.two_tensor import TwoTensor

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
from torch_fakeify.trace_log import CompileId, TraceLimits, from_trace_log

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch_fakeify.trace_log import TracedTensor, TraceGroup, TraceLog

# --- logs by torch --------------------------------------------------------------------------------


@contextmanager
def traced() -> Generator[Path]:
    """Has torch write a structured trace log, of the name that the path has afterwards."""
    logger = logging.getLogger("torch.__trace")
    logger.setLevel(logging.DEBUG)
    before = logger.handlers
    with tempfile.TemporaryDirectory() as directory:
        handler = LazyTraceHandler(directory)
        handler.setFormatter(TorchLogsFormatter(trace=True))
        logger.handlers = [handler]
        file = Path(directory) / "log"
        try:
            yield file
        finally:
            logger.handlers = before
            handler.close()
            for written in Path(directory).glob("dedicated_log_torch_trace_*.log"):
                written.rename(file)
            _KEPT[file] = file.read_bytes() if file.exists() else b""


_KEPT: dict[Path, bytes] = {}


def read_back(file: Path, directory: Path) -> TraceLog:
    """What is read from a log of `traced`."""
    path = directory / "log"
    path.write_bytes(_KEPT.pop(file))
    return tfk.from_trace_log(path)


def only_group(tensors: list[torch.Tensor], mode: FakeTensorMode | None = None) -> TraceGroup:
    """What a log says of tensors that one mode took, in this order."""
    mode = mode or FakeTensorMode()
    with traced() as file:
        for i, t in enumerate(tensors):
            quietly(_from_tensor, mode, t, ConstantSource(f"t{i}"))
    with tempfile.TemporaryDirectory() as directory:
        log = read_back(file, Path(directory))
    assert len(log.groups) == 1
    return log.groups[0]


def _from_tensor(mode: FakeTensorMode, t: torch.Tensor, source: ConstantSource) -> None:
    static = mode.shape_env is None
    mode.from_tensor(t, source=source, static_shapes=static, trace=True)


def one(t: torch.Tensor, mode: FakeTensorMode | None = None) -> TracedTensor:
    """What a log says of a tensor."""
    return only_group([t], mode).sources["t0"]


_NEVER = {lack.field for lack in NEVER_LOGGED} - {"marks"}
_LOGGED_MARKS = {"dynamic", "hint_overrides"}


class _Comparable:
    """Records without what no log has, under ids in the order in which they are seen."""

    def __init__(self) -> None:
        self.tensors: dict[int, int] = {}
        self.storages: dict[int, int] = {}

    def of(self, d: MetaTensorDesc | None) -> Any:
        if d is None:
            return None
        fields = {n: getattr(d, n) for n in d.__struct_fields__ if n not in _NEVER}
        fields["id"] = self.tensors.setdefault(d.id, len(self.tensors))
        if d.storage is not None:
            number = self.storages.setdefault(d.storage.id, len(self.storages))
            fields["storage"] = (number, d.storage.nbytes)
        for name in ("base", "grad"):
            fields[name] = self.of(getattr(d, name))
        marks = d.marks or MarksDesc()
        fields["marks"] = {name: getattr(marks, name) for name in _LOGGED_MARKS}
        return fields


# --- the main law ---------------------------------------------------------------------------------


@settings(max_examples=60)
@given(tensor_groups(marks=True, resize=False))
def test_a_log_says_what_describe_tensor_says(group: list[torch.Tensor]) -> None:
    """Field by field, up to what no log has; shared tensors and storages are shared in both."""
    found = only_group(group)
    describer = tfk.MetaTensorDescriber()
    ours, theirs = _Comparable(), _Comparable()
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
    comparables = _Comparable(), _Comparable()
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


def test_coo() -> None:
    """A COO tensor needs none of its components."""
    t = torch.eye(3).to_sparse()
    found = one(t)
    assert found.record == MetaTensorDesc(
        id=0,
        dtype="float32",
        device="cpu",
        size=(3, 3),
        stride=(),
        layout="sparse_coo",
        sparse=SparseDesc(sparse_dim=2, dense_dim=0, is_coalesced=True),
    )
    assert found.lacks == ()


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


def test_mkldnn() -> None:
    """Sizes and strides without a storage."""
    t = torch.zeros(2, 3).to_mkldnn()
    found = one(t)
    assert found.record == tfk.describe_tensor(t)
    assert (found.record.storage, found.lacks) == (None, ())


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


# --- logs by hand ---------------------------------------------------------------------------------

TENSOR = {
    "id": 0,
    "describer_id": 0,
    "ndim": 1,
    "dtype": "torch.float32",
    "device": "device(type='cpu')",
    "size": [4],
    "stride": [1],
    "storage": 0,
    "is_leaf": True,
    "dynamo_hint_overrides": {},
}
STORAGE = {"id": 0, "describer_id": 0, "size": 16}


def event(name: str, content: Any, process: int = 7, **rest: Any) -> str:
    """A line of a log."""
    prefix = f"V1121 13:44:20.941000 {process} torch/_subclasses/meta_utils.py:514] "
    return prefix + json.dumps({name: content, **rest})


def lines(*tensors: dict[str, Any], **rest: Any) -> list[str]:
    """A storage and tensors that are as `TENSOR` but for some fields."""
    events = [event("describe_storage", STORAGE, **rest)]
    return events + [event("describe_tensor", {**TENSOR, **t}, **rest) for t in tensors]


def write(directory: Path, *text: str, end: str = "\n") -> Path:
    """A log of these lines."""
    path = directory / "log"
    path.write_text("\n".join(text) + end)
    return path


def lacks_of(directory: Path, *tensors: dict[str, Any]) -> tuple[Lack, ...]:
    """What the event of the last tensor lacks, which has no record."""
    (group,) = tfk.from_trace_log(write(directory, *lines(*tensors))).groups
    assert group.tensors[-1].record is None
    return group.tensors[-1].lacks


def message(directory: Path, *text: str, **limits: int) -> str:
    """The error for a log, without its path."""
    path = write(directory, *text)
    with pytest.raises(tfk.FormatError) as error:
        from_trace_log(path, limits=TraceLimits(**limits))
    return str(error.value).replace(str(path), "LOG")


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


def test_other_events_and_payloads_are_passed_over(tmp_path: Path) -> None:
    """A payload may look like an event; of other events nothing is read."""
    source = {"id": 0, "describer_id": 0, "source": "L['x']"}
    path = write(
        tmp_path,
        event("str", ["a", 0]),
        event("artifact", {"name": "graph"}, has_payload="0"),
        "\t" + event("describe_tensor", "no tensor"),
        "\t",
        *lines({"device": "device(type='cuda', index=1)"}, frame_id=1),
        event("describe_source", source, frame_id=1),
        event("describe_source", {**source, "source": "L['y']"}, frame_id=1),
        event("describe_source", source, frame_id=1),
    )
    log = tfk.from_trace_log(path)
    (group,) = log.groups
    (found,) = group.tensors
    assert (found.sources, found.line, found.compile_id) == (
        ("L['x']", "L['y']"),
        6,
        CompileId(frame_id=1),
    )
    assert found.record is not None
    assert found.record.device == "cuda:1"
    assert (log.torch_versions, log.truncated) == ((), False)


def test_describers_processes_and_ranks_are_kept_apart(tmp_path: Path) -> None:
    """Ids are those of one describer of one process."""
    text = [
        *lines({}, frame_id=0, frame_compile_id=1, attempt=2),
        *lines({}, rank=1),
        *lines({}, process=8),
        event("describe_storage", {**STORAGE, "describer_id": 3, "size": 99}),
        event("describe_storage", {**STORAGE, "id": 1}, compiled_autograd_id=4),
    ]
    log = tfk.from_trace_log(write(tmp_path, *text))
    assert [(g.process, g.rank, g.describer_id, g.compile_ids) for g in log.groups] == [
        (7, None, 0, (CompileId(0, 1, 2, None), CompileId(None, None, None, 4))),
        (7, 1, 0, (CompileId(),)),
        (8, None, 0, (CompileId(),)),
        (7, None, 3, (CompileId(),)),
    ]
    assert log.groups[3].storages == (MetaStorageDesc(id=0, nbytes=99),)


def test_a_joined_log_may_repeat_itself(tmp_path: Path) -> None:
    """The same event twice says nothing new."""
    (group,) = tfk.from_trace_log(write(tmp_path, *lines({}), *lines({}))).groups
    assert (len(group.tensors), len(group.storages), group.tensors[0].line) == (1, 1, 2)


@pytest.mark.parametrize("cut", [1, 20, 60, 90, 200])
def test_a_truncated_last_line(tmp_path: Path, cut: int) -> None:
    """A line that is cut off is not read; the log says that it is truncated."""
    text = lines({}, {"id": 1})
    path = write(tmp_path, *text[:2], text[2][:cut], end="")
    log = tfk.from_trace_log(path)
    assert (log.truncated, len(log.groups[0].tensors)) == (True, 1)


def test_a_last_line_without_its_end(tmp_path: Path) -> None:
    """What is whole but for the end of the line is read."""
    log = tfk.from_trace_log(write(tmp_path, *lines({}), end=""))
    assert (log.truncated, len(log.groups[0].tensors)) == (True, 1)


def test_gzip(tmp_path: Path) -> None:
    """A packed log is unpacked on the way, as far as it goes."""
    path = write(tmp_path, *lines({}))
    plain = tfk.from_trace_log(path)
    packed = gzip.compress(path.read_bytes())
    path.write_bytes(packed)
    assert tfk.from_trace_log(path) == plain
    path.write_bytes(packed[:-8])
    assert tfk.from_trace_log(path) == dataclasses.replace(plain, truncated=True)


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


def test_long_text_is_cut(tmp_path: Path) -> None:
    """What is shown of a text does not grow with it."""
    (found,) = lacks_of(tmp_path, {"size": ["x" * 1000]})
    assert found.text == "x" * 200 + "..."


# --- bad logs -------------------------------------------------------------------------------------


def test_no_file(tmp_path: Path) -> None:
    """There is nothing at the path."""
    with pytest.raises(tfk.FormatError) as error:
        tfk.from_trace_log(tmp_path / "none")
    expected = f"{tmp_path}/none: the file cannot be read; found No such file or directory"
    assert str(error.value) == expected


def test_directory(tmp_path: Path) -> None:
    """The directory of ``TORCH_TRACE`` is no log."""
    with pytest.raises(tfk.FormatError) as error:
        tfk.from_trace_log(tmp_path)
    assert str(error.value) == f"{tmp_path}: the file cannot be read; found not a regular file"


def test_damaged_gzip(tmp_path: Path) -> None:
    """Packed bytes that are wrong."""
    path = write(tmp_path, *lines({}))
    packed = bytearray(gzip.compress(path.read_bytes()))
    packed[-5] ^= 1
    path.write_bytes(packed)
    with pytest.raises(tfk.FormatError, match="the file cannot be read; found CRC check failed"):
        tfk.from_trace_log(path)


def test_empty_file(tmp_path: Path) -> None:
    """A log begins with an event."""
    path = tmp_path / "log"
    path.touch()
    with pytest.raises(tfk.FormatError) as error:
        tfk.from_trace_log(path)
    assert str(error.value) == f"{path}: the file is empty"


@pytest.mark.parametrize(
    "first",
    [
        "hello",
        "\tpayload",
        "{}",
        "V1121 13:44:20.941000 7 torch/a.py:1] [0/0] [__graph_code] x",
        "",
    ],
)
def test_not_a_log(tmp_path: Path, first: str) -> None:
    """Other text, also what ``TORCH_LOGS`` writes."""
    assert message(tmp_path, first, *lines({})) == (
        "LOG: not a structured trace log of torch; expected a prefix such as "
        f"`V1231 23:59:59.000000 42 torch/file.py:1] {{`; found {first[:60]!a}. "
        "Give a file that TORCH_TRACE wrote; TORCH_LOGS and TORCH_LOGS_OUT write other text"
    )


def test_a_line_that_is_no_event(tmp_path: Path) -> None:
    """After the first line: with its number."""
    assert message(tmp_path, *lines({}), "\x1b[31mhello", *lines({})) == (
        "LOG line 3: neither an event nor a line of a payload; expected a prefix such as "
        r"`V1231 23:59:59.000000 42 torch/file.py:1] {`; found '\x1b[31mhello'"
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"id": "0"}, "$.describe_tensor.id: a value has the wrong type; expected int; found str"),
        ({"id": -1}, "$.describe_tensor.id: a value is out of range; expected int >= 0"),
        (
            {"size": [4.5]},
            "$.describe_tensor.size[0]: a value has the wrong type; "
            "expected int | str; found float",
        ),
        (
            {"dtype": "float32"},
            ": `dtype` is not written as torch writes it; "
            "expected text like torch.float32; found 'float32'",
        ),
        (
            {"layout": "strided"},
            ": `layout` is not written as torch writes it; "
            "expected text like torch.strided; found 'strided'",
        ),
        (
            {"device": "cpu"},
            ": `device` is not written as torch writes it; "
            "expected text like device(type='cuda', index=0); found 'cpu'",
        ),
        (
            {"creation_meta": "DEFAULT"},
            ": `creation_meta` is not written as torch writes it; "
            "expected text like CreationMeta.DEFAULT; found 'DEFAULT'",
        ),
        (
            {"ndim": 2},
            ": `ndim` contradicts the sizes or strides; expected 2; found 1 sizes, 1 strides",
        ),
        (
            {"layout": "torch.sparse_coo"},
            ": a sparse tensor without `sparse_dim` or `dense_dim`; found sparse_coo",
        ),
    ],
)
def test_malformed_tensor(tmp_path: Path, fields: dict[str, Any], expected: str) -> None:
    """The line, the path in the event, and what is wrong."""
    separator = "" if expected.startswith(":") else " "
    assert message(tmp_path, *lines(fields)) == f"LOG line 2{separator}{expected}"


def test_a_missing_field(tmp_path: Path) -> None:
    """What torch always writes has to be there."""
    assert message(tmp_path, event("describe_storage", {"id": 0, "describer_id": 0})) == (
        "LOG line 1 $.describe_storage: object missing required field `size`"
    )


def test_an_event_that_is_no_json(tmp_path: Path) -> None:
    """In the middle of a log, a line that is cut off is an error."""
    cut = lines({})[0][:-3]
    assert message(tmp_path, cut, *lines({})) == "LOG line 1 $: the data is truncated"


def test_a_key_that_occurs_twice(tmp_path: Path) -> None:
    """No reader may choose."""
    text = lines({})[0].replace('"size": 16', '"size": 16, "size": 17')
    expected = "LOG line 1 $: the key 'size' occurs twice in one object"
    assert message(tmp_path, text) == expected


def test_references_to_what_is_not_there(tmp_path: Path) -> None:
    """A base, a storage or the tensor of a source has its event before."""
    fix = "The beginning of the log may be missing, or be in that of the process which forked"
    what = "names as `{}` what the log does not describe before; expected an event of"
    assert message(tmp_path, *lines({"is_view": True, "base": 5})) == (
        f"LOG line 2: tensor 0 {what.format('base')} tensor 5 of describer 0. {fix}"
    )
    assert message(tmp_path, *lines({"storage": 5})) == (
        f"LOG line 2: tensor 0 {what.format('storage')} storage 5 of describer 0. {fix}"
    )
    source = {"id": 5, "describer_id": 0, "source": "L['x']"}
    assert message(tmp_path, event("describe_source", source)) == (
        f"LOG line 1: the source \"L['x']\" {what.format('id')} tensor 5 of describer 0. {fix}"
    )
    assert message(tmp_path, *lines({"grad": 0})) == (
        f"LOG line 2: tensor 0 {what.format('grad')} tensor 0 of describer 0. {fix}"
    )


def test_one_id_with_two_contents(tmp_path: Path) -> None:
    """A describer writes each tensor and storage once."""
    fix = "If logs of several runs were joined, read them one by one"
    assert message(tmp_path, *lines({}, {"requires_grad": True})) == (
        "LOG line 3: tensor 0 of describer 0 is described twice, and differently; "
        f"expected what line 2 says. {fix}"
    )
    other = event("describe_storage", {**STORAGE, "size": 17})
    assert message(tmp_path, *lines({}), other) == (
        "LOG line 3: storage 0 of describer 0 is described twice, and differently; "
        f"expected what line 1 says. {fix}"
    )


# --- limits ---------------------------------------------------------------------------------------


def test_limits(tmp_path: Path) -> None:
    """Each bound, at and beyond it."""
    text = lines({})
    assert message(tmp_path, *text, events=1) == (
        "LOG line 2: the log describes too much; "
        "expected at most 1 events of 268435456 bytes in all"
    )
    size = sum(len(line.partition("] ")[2]) for line in text)
    path = write(tmp_path, *text)
    assert from_trace_log(path, limits=TraceLimits(events=2, event_bytes=size)).groups
    assert message(tmp_path, *text, event_bytes=size - 1) == (
        f"LOG line 2: the log describes too much; "
        f"expected at most 1000000 events of {size - 1} bytes in all"
    )
    size = path.stat().st_size
    assert from_trace_log(path, limits=TraceLimits(text_bytes=size)).groups
    expected = f"LOG: the log is too long; expected at most {size - 1} bytes"
    assert message(tmp_path, *text, text_bytes=size - 1) == expected


def test_long_lines(tmp_path: Path) -> None:
    """A long line of an event is refused before it is read; any other is passed over."""
    long = lines({"view_func": "x" * 200_000})
    assert message(tmp_path, *long, line_bytes=100_000) == (
        "LOG line 2: the line of an event is too long; expected at most 100000 bytes"
    )
    other = event("artifact", "y" * 200_000), "\t" + "x" * 200_000
    limits = TraceLimits(line_bytes=100_000)
    (group,) = from_trace_log(write(tmp_path, *other, *lines({})), limits=limits).groups
    assert group.tensors[0].line == 4
    assert from_trace_log(write(tmp_path, *long)).groups
    assert message(tmp_path, *other, text_bytes=100_000) == (
        "LOG: the log is too long; expected at most 100000 bytes"
    )


def test_depth(tmp_path: Path) -> None:
    """Gradients of gradients, and JSON inside JSON."""
    chain = [{}, *({"id": i, "grad": i - 1} for i in range(1, 65))]
    assert len(tfk.from_trace_log(write(tmp_path, *lines(*chain))).groups[0].records) == 65
    assert message(tmp_path, *lines(*chain, {"id": 65, "grad": 64})) == (
        "LOG line 67: tensors are nested too deep; expected at most 64 levels"
    )
    nested = lines({})[0][:-1] + ', "stack": ' + "[1," * 1000 + "2" + "]" * 1000 + "}"
    expected = "LOG line 1: JSON is nested deeper than 400 levels"
    assert message(tmp_path, nested) == expected


def test_no_torch_is_imported(tmp_path: Path) -> None:
    """A log without symbols is read where there is no torch."""
    path = write(tmp_path, *lines({}))
    code = (
        "import sys, torch_fakeify as tfk\n"
        f"assert tfk.from_trace_log({str(path)!r}).groups[0].records\n"
        "assert 'torch' not in sys.modules and 'sympy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
