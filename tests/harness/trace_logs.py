"""Structured trace logs for tests, written by torch and by hand."""

from __future__ import annotations

import json
import logging
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from strategies import quietly
from torch._dynamo.source import ConstantSource
from torch._logging._internal import LazyTraceHandler, TorchLogsFormatter
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_fakeify as tfk
from torch_fakeify.encoding.exprs import decode_expr
from torch_fakeify.frames.trace_logs.events import NEVER_LOGGED
from torch_fakeify.frames.trace_logs.log import TraceLimits, from_trace_log
from torch_fakeify.records.tensor import MarksDesc, MetaTensorDesc, SymDesc

if TYPE_CHECKING:
    from collections.abc import Generator

    import torch

    from torch_fakeify.frames.trace_logs.log import TracedTensor, TraceGroup

# --- logs by torch --------------------------------------------------------------------------------


@contextmanager
def traced(path: Path) -> Generator[None]:
    """Has torch write a structured trace log at this path."""
    logger = logging.getLogger("torch.__trace")
    logger.setLevel(logging.DEBUG)
    before = logger.handlers
    handler = LazyTraceHandler(str(path.parent / "trace"))
    handler.setFormatter(TorchLogsFormatter(trace=True))
    logger.handlers = [handler]
    try:
        yield
    finally:
        logger.handlers = before
        handler.close()
    (written,) = (path.parent / "trace").iterdir()
    written.rename(path)


def only_group(tensors: list[torch.Tensor], mode: FakeTensorMode | None = None) -> TraceGroup:
    """What a log says of tensors that one mode took, in this order."""
    mode = mode or FakeTensorMode()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "log"
        with traced(path):
            for i, t in enumerate(tensors):
                quietly(_from_tensor, mode, t, ConstantSource(f"t{i}"))
        log = tfk.from_trace_log(path)
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


class Comparable:
    """Records without what no log has, under ids in the order in which they are seen."""

    def __init__(self, *without: str) -> None:
        self.without = without
        self.tensors: dict[int, int] = {}
        self.storages: dict[int, int] = {}

    def of(self, d: MetaTensorDesc | None) -> Any:
        """A record as plain data."""
        if d is None:
            return None
        fields = {
            n: getattr(d, n) for n in d.__struct_fields__ if n not in {*_NEVER, *self.without}
        }
        fields["id"] = self.tensors.setdefault(d.id, len(self.tensors))
        if d.storage is not None:
            number = self.storages.setdefault(d.storage.id, len(self.storages))
            fields["storage"] = (number, d.storage.nbytes)
        for name in ("base", "grad"):
            fields[name] = self.of(getattr(d, name))
        if d.subclass is not None:
            fields["subclass"] = (
                d.subclass.cls,
                d.subclass.context,
                [(name, self.of(part)) for name, part in d.subclass.tensors],
            )
        marks = d.marks or MarksDesc()
        fields["marks"] = {name: getattr(marks, name) for name in _LOGGED_MARKS}
        return fields


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


def group_of(directory: Path, *text: str) -> TraceGroup:
    """The only group of a log of these lines."""
    (group,) = tfk.from_trace_log(write(directory, *text)).groups
    return group


def message(directory: Path, *text: str, **limits: int) -> str:
    """The error for a log, without its path."""
    path = write(directory, *text)
    with pytest.raises(tfk.FormatError) as error:
        from_trace_log(path, limits=TraceLimits(**limits))
    return str(error.value).replace(str(path), "LOG")


def without_facts(n: Any) -> Any:
    """A size, or the text of its expression without hints and ranges."""
    if not isinstance(n, SymDesc):
        return n
    return str(decode_expr(n.expr))
