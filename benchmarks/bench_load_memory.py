"""The most memory that loading a capture of 100 MB takes, in processes of their own.

Run: ``python -m benchmarks.bench_load_memory [--rounds N]``. A file gets that large by the data of
small constants (random, so that it does not compress), or by records: a graph of very many nodes,
whose JSON is measured then, since it compresses by far. Figures are the growth of the peak of
resident memory over that of a process with the same imports; beside them stands the size of what is
read: bytes of the file, or of the JSON in it.
"""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

import torch_fakeify as tfk
from torch_fakeify.records.graph import NodeDesc
from torch_fakeify.records.tensor import FunctionValue, NodeValue, TensorValue

from .memory import high_water, measured
from .run import main
from .table import Figure, Row, at_most

if TYPE_CHECKING:
    from collections.abc import Iterator

MEGA = 2**20
SIZE = 100 * MEGA
ITEM = 4096
"""Bytes of the largest constant whose data a capture has."""
DATA = at_most(3)
RECORDS = at_most(10)
"""Records are objects of Python: less than 1 GB for 100 MB."""


def rows(rounds: int) -> Iterator[Row]:
    """A line for data and one for records."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "frame.fkf")
        with_data(path)
        yield _row("data of constants", path, path.stat().st_size, rounds)._replace(budget=DATA)
        with_nodes(path)
        with zipfile.ZipFile(path) as archive:
            size = sum(info.file_size for info in archive.infolist())
        yield _row("records, as JSON", path, size, rounds)._replace(budget=RECORDS)


def _row(what: str, path: Path, size: int, rounds: int) -> Row:
    grown = [
        measured("bench_load_memory", str(path))[0] - measured("bench_load_memory", "")[0]
        for _ in range(min(rounds, 3))
    ]
    read = Figure((size / MEGA,) * len(grown))
    return Row(f"load {what}: read, peak", "MB", read, Figure(tuple(n / MEGA for n in grown)))


def _frame() -> tfk.Capture:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.relu, (x,)),))
    fake = torch._subclasses.FakeTensorMode().from_tensor(torch.empty(2, 3))
    x.meta["example_value"] = fake
    return tfk.capture(torch.fx.GraphModule(torch.nn.Module(), graph), [fake])


def with_data(path: Path) -> None:
    """Write a capture whose graph holds constants with 100 MB of data."""
    desc = _frame().desc
    constant = tfk.describe_tensor(torch.empty(ITEM, dtype=torch.uint8))
    data = torch.randint(0, 256, (SIZE // ITEM, ITEM), dtype=torch.uint8).numpy()
    tensors = [
        msgspec.structs.replace(
            constant, id=1000 + i, storage=tfk.MetaStorageDesc(id=1000 + i, nbytes=ITEM)
        )
        for i in range(len(data))
    ]
    graph = msgspec.structs.replace(
        desc.graph,
        tensors=tuple((f"c{i}", tensor) for i, tensor in enumerate(tensors)),
        plain_tensors=tuple(f"c{i}" for i in range(len(data))),
        tensor_data=tuple((f"c{i}", row.tobytes()) for i, row in enumerate(data)),
    )
    tfk.Capture(msgspec.structs.replace(desc, graph=graph)).save(path, limits=tfk.Limits.none())


def with_nodes(path: Path) -> None:
    """Write a capture with 100 MB of JSON: nodes, each with a result of its own."""
    desc = _frame().desc
    (first, *_) = desc.graph.nodes
    result = desc.inputs[0].tensor
    assert result is not None
    target = FunctionValue(kind="function", name="torch.relu")
    nodes = [first]
    for i in range(1, SIZE // 430):
        storage = tfk.MetaStorageDesc(id=1000 + i, nbytes=24)
        tensor = msgspec.structs.replace(result, id=1000 + i, storage=storage)
        nodes.append(
            NodeDesc(
                op="call_function",
                name=f"relu_{i}",
                target=target,
                args=(NodeValue(index=i - 1),),
                meta=(("example_value", TensorValue(tensor=tensor)),),
            )
        )
    nodes.append(
        NodeDesc(
            op="output", name="output", target="output", args=(NodeValue(index=len(nodes) - 1),)
        )
    )
    graph = msgspec.structs.replace(desc.graph, nodes=tuple(nodes))
    tfk.Capture(msgspec.structs.replace(desc, graph=graph)).save(path, limits=tfk.Limits.none())


def _load(path: str) -> None:
    loaded = tfk.Capture.load(path, limits=tfk.Limits.none()) if path else None
    print(high_water())
    del loaded


if __name__ == "__main__":
    main(__doc__, rows, child=_load)
