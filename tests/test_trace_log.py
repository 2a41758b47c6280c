"""Structured trace logs as files: what is passed over, kept apart, refused."""

from __future__ import annotations

import dataclasses
import gzip
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from trace_logs import (
    STORAGE,
    event,
    lines,
    message,
    write,
)

import torch_fakeify as tfk
from torch_fakeify.desc import (
    MetaStorageDesc,
)
from torch_fakeify.trace_log import CompileId, TraceLimits, from_trace_log

if TYPE_CHECKING:
    from pathlib import Path


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


def test_results_do_not_change(tmp_path: Path) -> None:
    """What was read is data: a log, its groups and their tensors are frozen."""
    log = tfk.from_trace_log(write(tmp_path, *lines({})))
    for part in (log, log.groups[0], log.groups[0].tensors[0]):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, "lacks", ())  # noqa: B010
