"""Structured trace logs as files: what is skipped, separated and refused."""

from __future__ import annotations

import dataclasses
import gzip
from typing import TYPE_CHECKING, Any

import pytest
from processes import fresh
from trace_logs import (
    STORAGE,
    event,
    lines,
    message,
    write,
)

import torch_fakeify as tfk
from torch_fakeify.frames.trace_logs.log import CompileId, TraceLimits, from_trace_log
from torch_fakeify.records.tensor import MetaStorageDesc

if TYPE_CHECKING:
    from pathlib import Path


def test_other_events_and_payloads_are_skipped(tmp_path: Path) -> None:
    """A payload may look like an event, and other events are not read."""
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


def test_describers_processes_and_ranks_are_separate(tmp_path: Path) -> None:
    """An id is unique within one describer of one process."""
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
    """A second copy of an event in a log changes nothing."""
    (group,) = tfk.from_trace_log(write(tmp_path, *lines({}), *lines({}))).groups
    assert (len(group.tensors), len(group.storages), group.tensors[0].line) == (1, 1, 2)


@pytest.mark.parametrize("cut", [1, 20, 60, 90, 200])
def test_a_truncated_last_line_is_skipped(tmp_path: Path, cut: int) -> None:
    """A last line that is truncated is skipped, and the log has a flag for it."""
    text = lines({}, {"id": 1})
    path = write(tmp_path, *text[:2], text[2][:cut], end="")
    log = tfk.from_trace_log(path)
    assert (log.truncated, len(log.groups[0].tensors)) == (True, 1)


def test_a_last_line_without_its_end_is_read(tmp_path: Path) -> None:
    """A last line that lacks only its line break is read."""
    log = tfk.from_trace_log(write(tmp_path, *lines({}), end=""))
    assert (log.truncated, len(log.groups[0].tensors)) == (True, 1)


def test_a_gzip_file_is_read(tmp_path: Path) -> None:
    """A truncated one is read as far as it can be unpacked."""
    path = write(tmp_path, *lines({}))
    plain = tfk.from_trace_log(path)
    packed = gzip.compress(path.read_bytes())
    path.write_bytes(packed)
    assert tfk.from_trace_log(path) == plain
    path.write_bytes(packed[:-8])
    assert tfk.from_trace_log(path) == dataclasses.replace(plain, truncated=True)


# --- bad logs -------------------------------------------------------------------------------------


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    """A file that does not exist is an error that contains the path."""
    with pytest.raises(tfk.FormatError) as error:
        tfk.from_trace_log(tmp_path / "none")
    expected = f"{tmp_path}/none: the file cannot be read; found No such file or directory"
    assert str(error.value) == expected


def test_a_directory_is_an_error(tmp_path: Path) -> None:
    """The directory of ``TORCH_TRACE`` is not a log."""
    with pytest.raises(tfk.FormatError) as error:
        tfk.from_trace_log(tmp_path)
    assert str(error.value) == f"{tmp_path}: the file cannot be read; found not a regular file"


def test_damaged_gzip_is_an_error(tmp_path: Path) -> None:
    """A file whose compressed bytes are damaged is an error."""
    path = write(tmp_path, *lines({}))
    packed = bytearray(gzip.compress(path.read_bytes()))
    packed[-5] ^= 1
    path.write_bytes(packed)
    with pytest.raises(tfk.FormatError, match="the file cannot be read; found CRC check failed"):
        tfk.from_trace_log(path)


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    """A log begins with an event, so an empty file is an error."""
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
def test_a_file_that_is_no_log_is_refused(tmp_path: Path, first: str) -> None:
    """Text that is no log, also that of ``TORCH_LOGS``, is refused."""
    assert message(tmp_path, first, *lines({})) == (
        "LOG: not a structured trace log of torch; expected a prefix such as "
        f"`V1231 23:59:59.000000 42 torch/file.py:1] {{`; found {first[:60]!a}. "
        "Use a file written by TORCH_TRACE; TORCH_LOGS and TORCH_LOGS_OUT write another format"
    )


def test_a_line_that_is_no_event_is_refused(tmp_path: Path) -> None:
    """A line that is no event is refused, and the error contains its number."""
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
def test_a_malformed_tensor_is_refused(
    tmp_path: Path, fields: dict[str, Any], expected: str
) -> None:
    """The error contains the line, the path in the event, and what is wrong."""
    separator = "" if expected.startswith(":") else " "
    assert message(tmp_path, *lines(fields)) == f"LOG line 2{separator}{expected}"


def test_a_missing_field_is_an_error(tmp_path: Path) -> None:
    """A field that torch always writes is required in an event."""
    assert message(tmp_path, event("describe_storage", {"id": 0, "describer_id": 0})) == (
        "LOG line 1 $.describe_storage: object missing required field `size`"
    )


def test_an_event_that_is_no_json_is_refused(tmp_path: Path) -> None:
    """In the middle of a log a truncated line is an error."""
    cut = lines({})[0][:-3]
    assert message(tmp_path, cut, *lines({})) == "LOG line 1 $: the data is truncated"


def test_a_key_that_occurs_twice_is_an_error(tmp_path: Path) -> None:
    """A key that occurs twice is an error, since no reader may choose one of the values."""
    text = lines({})[0].replace('"size": 16', '"size": 16, "size": 17')
    expected = "LOG line 1 $.describe_storage: the key 'size' occurs twice in one object"
    assert message(tmp_path, text) == expected


def test_references_to_missing_events_are_errors(tmp_path: Path) -> None:
    """The events of a base, a storage and a source's tensor come first."""
    fix = "The beginning of the log may be missing, or be in that of the process which forked"
    what = "refers as `{}` to something that is not described before; expected an event of"
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


def test_one_id_with_two_contents_is_an_error(tmp_path: Path) -> None:
    """A describer writes each tensor and storage once."""
    fix = "If logs of several runs were joined, read them one by one"
    assert message(tmp_path, *lines({}, {"requires_grad": True})) == (
        "LOG line 3: tensor 0 of describer 0 is described twice, and differently; "
        f"expected the description in line 2. {fix}"
    )
    other = event("describe_storage", {**STORAGE, "size": 17})
    assert message(tmp_path, *lines({}), other) == (
        "LOG line 3: storage 0 of describer 0 is described twice, and differently; "
        f"expected the description in line 1. {fix}"
    )


# --- limits ---------------------------------------------------------------------------------------


def test_limits_hold(tmp_path: Path) -> None:
    """Each bound allows its value and nothing beyond it."""
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


def test_long_lines_of_events_are_refused(tmp_path: Path) -> None:
    """The length is checked before the line is read; other long lines are skipped."""
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


def test_the_depth_is_limited(tmp_path: Path) -> None:
    """Gradients of gradients and nested JSON are bounded."""
    chain = [{}, *({"id": i, "grad": i - 1} for i in range(1, 65))]
    assert len(tfk.from_trace_log(write(tmp_path, *lines(*chain))).groups[0].records) == 65
    assert message(tmp_path, *lines(*chain, {"id": 65, "grad": 64})) == (
        "LOG line 67: tensors are nested too deep; expected at most 64 levels"
    )
    nested = lines({})[0][:-1] + ', "stack": ' + "[1," * 1000 + "2" + "]" * 1000 + "}"
    expected = "LOG line 1: JSON is nested deeper than 400 levels"
    assert message(tmp_path, nested) == expected


def test_reading_a_log_imports_no_torch(tmp_path: Path) -> None:
    """A log without symbols can be read where torch is not installed."""
    path = write(tmp_path, *lines({}))
    code = (
        "import sys, torch_fakeify as tfk\n"
        f"assert tfk.from_trace_log({str(path)!r}).groups[0].records\n"
        "assert 'torch' not in sys.modules and 'sympy' not in sys.modules\n"
    )
    fresh("-c", code)


def test_results_are_frozen(tmp_path: Path) -> None:
    """A log, its groups and their tensors cannot be changed."""
    log = tfk.from_trace_log(write(tmp_path, *lines({})))
    for part in (log, log.groups[0], log.groups[0].tensors[0]):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, "lacks", ())  # noqa: B010
