"""Structured trace logs as files: what is skipped, separated and refused."""

from __future__ import annotations

import dataclasses
import gzip
from typing import TYPE_CHECKING

import pytest
from processes import fresh
from trace_logs import STORAGE, event, group_of, lines, message, write

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
    group = group_of(tmp_path, *lines({}), *lines({}))
    assert (len(group.tensors), len(group.storages), group.tensors[0].line) == (1, 1, 2)


@pytest.mark.parametrize("cut", [1, 20, 60, 90, 200, None])
def test_a_last_line_without_its_end_is_flagged(tmp_path: Path, cut: int | None) -> None:
    """It is read if it lacks only its line break, and skipped if it is truncated."""
    text = lines({}) if cut is None else [*lines({}), lines({"id": 1})[1][:cut]]
    log = tfk.from_trace_log(write(tmp_path, *text, end=""))
    assert (log.truncated, len(log.groups[0].tensors)) == (True, 1)


def test_a_gzip_file_is_read(tmp_path: Path) -> None:
    """A truncated one is read as far as it can be unpacked; one with damaged bytes is an error."""
    path = write(tmp_path, *lines({}))
    plain = tfk.from_trace_log(path)
    packed = bytearray(gzip.compress(path.read_bytes()))
    path.write_bytes(packed)
    assert tfk.from_trace_log(path) == plain
    path.write_bytes(packed[:-8])
    assert tfk.from_trace_log(path) == dataclasses.replace(plain, truncated=True)
    packed[-5] ^= 1
    path.write_bytes(packed)
    with pytest.raises(tfk.FormatError, match="the file cannot be read; found CRC check failed"):
        tfk.from_trace_log(path)


# --- bad logs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("none", "the file cannot be read; found No such file or directory"),
        ("", "the file cannot be read; found not a regular file"),
        ("log", "the file is empty"),
    ],
    ids=["missing", "directory", "empty"],
)
def test_a_path_that_has_no_log_is_an_error(tmp_path: Path, name: str, what: str) -> None:
    """No file, the directory of ``TORCH_TRACE``, and a file without an event."""
    (tmp_path / "log").touch()
    path = tmp_path / name
    with pytest.raises(tfk.FormatError) as error:
        tfk.from_trace_log(path)
    assert str(error.value) == f"{path}: {what}"


PREFIX = "expected a prefix such as `V1231 23:59:59.000000 42 torch/file.py:1] {`"
NO_LOGS = ["hello", "\tpayload", "{}", "V1121 13:44:20.941000 7 torch/a.py:1] [0/0] [__graph_code] x", ""]  # fmt: skip
MALFORMED = [
    ({"id": "0"}, " $.describe_tensor.id: a value has the wrong type; expected int; found str"),
    ({"id": -1}, " $.describe_tensor.id: a value is out of range; expected int >= 0"),
    (
        {"size": [4.5]},
        " $.describe_tensor.size[0]: a value has the wrong type; expected int | str; found float",
    ),
    *(
        (
            {field: found},
            f": `{field}` is not written as torch writes it; "
            f"expected text like {expected}; found {found!r}",
        )
        for field, found, expected in (
            ("dtype", "float32", "torch.float32"),
            ("layout", "strided", "torch.strided"),
            ("device", "cpu", "device(type='cuda', index=0)"),
            ("creation_meta", "DEFAULT", "CreationMeta.DEFAULT"),
        )
    ),
    (
        {"ndim": 2},
        ": `ndim` contradicts the sizes or strides; expected 2; found 1 sizes, 1 strides",
    ),
    (
        {"layout": "torch.sparse_coo"},
        ": a sparse tensor without `sparse_dim` or `dense_dim`; found sparse_coo",
    ),
]
"""Fields of a tensor, and the error after the number of the line."""
MISSING = "refers as `{}` to something that is not described before; expected an event of {} of describer 0. The beginning of the log may be missing, or be in that of the process which forked"
TWICE = "of describer 0 is described twice, and differently; expected the description in line {}. If logs of several runs were joined, read them one by one"
UNKNOWN_SOURCE = {"id": 5, "describer_id": 0, "source": "L['x']"}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        *(
            (
                [first, *lines({})],
                f": not a structured trace log of torch; {PREFIX}; found {first[:60]!a}. Use a file "
                "written by TORCH_TRACE; TORCH_LOGS and TORCH_LOGS_OUT write another format",
            )
            for first in NO_LOGS
        ),
        (
            [*lines({}), "\x1b[31mhello", *lines({})],
            f" line 3: neither an event nor a line of a payload; {PREFIX}; "
            r"found '\x1b[31mhello'",
        ),
        *((lines(fields), f" line 2{error}") for fields, error in MALFORMED),
        (
            [event("describe_storage", {"id": 0, "describer_id": 0})],
            " line 1 $.describe_storage: object missing required field `size`",
        ),
        # in the middle of a log a truncated line is an error
        ([lines({})[0][:-3], *lines({})], " line 1 $: the data is truncated"),
        (
            [lines({})[0].replace('"size": 16', '"size": 16, "size": 17')],
            " line 1 $.describe_storage: the key 'size' occurs twice in one object",
        ),
        (
            lines({"is_view": True, "base": 5}),
            f" line 2: tensor 0 {MISSING.format('base', 'tensor 5')}",
        ),
        (lines({"storage": 5}), f" line 2: tensor 0 {MISSING.format('storage', 'storage 5')}"),
        (lines({"grad": 0}), f" line 2: tensor 0 {MISSING.format('grad', 'tensor 0')}"),
        (
            [event("describe_source", UNKNOWN_SOURCE)],
            f" line 1: the source \"L['x']\" {MISSING.format('id', 'tensor 5')}",
        ),
        (lines({}, {"requires_grad": True}), f" line 3: tensor 0 {TWICE.format(2)}"),
        (
            [*lines({}), event("describe_storage", {**STORAGE, "size": 17})],
            f" line 3: storage 0 {TWICE.format(1)}",
        ),
        (
            [lines({})[0][:-1] + ', "stack": ' + "[1," * 1000 + "2" + "]" * 1000 + "}"],
            " line 1: JSON is nested deeper than 400 levels",
        ),
    ],
    ids=range(25),
)
def test_a_bad_log_is_refused(tmp_path: Path, text: list[str], error: str) -> None:
    """The error contains the line, the path in the event, and what is wrong."""
    assert message(tmp_path, *text) == f"LOG{error}"


# --- limits ---------------------------------------------------------------------------------------


def test_limits_hold(tmp_path: Path) -> None:
    """Each bound allows its value and nothing beyond it."""
    text = lines({})
    path = write(tmp_path, *text)
    events, length = sum(len(line.partition("] ")[2]) for line in text), path.stat().st_size
    much = "LOG line 2: the log describes too much; expected at most {} events of {} bytes in all"
    for most, limits, error in (
        ({"events": 2}, {"events": 1}, much.format(1, 256 << 20)),
        ({"event_bytes": events}, {"event_bytes": events - 1}, much.format(10**6, events - 1)),
        (
            {"text_bytes": length},
            {"text_bytes": length - 1},
            f"LOG: the log is too long; expected at most {length - 1} bytes",
        ),
    ):
        assert from_trace_log(path, limits=TraceLimits(**most)).groups
        assert message(tmp_path, *text, **limits) == error


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
    """Gradients of gradients are bounded."""
    chain = [{}, *({"id": i, "grad": i - 1} for i in range(1, 65))]
    assert len(group_of(tmp_path, *lines(*chain)).records) == 65
    assert message(tmp_path, *lines(*chain, {"id": 65, "grad": 64})) == (
        "LOG line 67: tensors are nested too deep; expected at most 64 levels"
    )


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
