"""Captures that one version of torch writes and another one reads.

Other versions take part where ``TORCH_FAKEIFY_PYTHONS`` has their interpreters, with the version that
each stands for: ``2.14=/there/bin/python:2.15=/elsewhere/bin/python``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import exchange
import msgspec
import pytest
import torch
from exchange import Row, readings, table, word_of
from exchange_features import FEATURES
from processes import python
from torch._dynamo.source import AttrSource, LocalSource, TensorProperty, TensorPropertySource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

import torch_fakeify as tfk
from torch_fakeify.records.shape_env import ShapeEnvDesc
from torch_fakeify.records.tensor import FunctionValue

if TYPE_CHECKING:
    from pathlib import Path

HERE = ".".join(torch.__version__.split(".")[:2])
PYTHONS = dict(
    entry.split("=", 1) for entry in os.environ.get("TORCH_FAKEIFY_PYTHONS", "").split(":") if entry
)
FEW = (
    *("program_shape_arithmetic", "program_cond", "program_custom_op", "program_mark_unbacked"),
    *("jagged_values_symbolic", "wrapper_with_a_registered_context", "expressions_torch"),
    *("distributed", "environment", "sources", "dtypes", "model_step_forward"),
)
"""Captures of many kinds that are read soon."""

needs_others = pytest.mark.skipif(
    not PYTHONS, reason="TORCH_FAKEIFY_PYTHONS names no interpreter with another version of torch"
)


def said_by(interpreter: str, folders: list[Path], file: Path) -> dict[str, Any]:
    """What an interpreter says of the captures in some folders."""
    python("exchange.py", "read", *folders, "--json", file, interpreter=interpreter)
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.sweep
def test_this_version_reads_what_it_writes(tmp_path: Path) -> None:
    """Frames of many kinds, those of its own included, are the same ones in another process."""
    names = [*FEW, *(f"feature_{name}" for name in FEATURES)]
    folder = tmp_path / HERE
    failed = exchange.write(folder, names)
    assert failed == {}
    rows = said_by(sys.executable, [folder], tmp_path / "read.json")["rows"]
    found = {row["name"]: (row["verdict"], row["again"]) for row in rows}
    assert found.keys() == set(names)
    # What the corpus has of these is no program.
    made_up = dict.fromkeys(("environment", "expressions_torch", "sources"), ("fails", "same"))
    groups = {"distributed": ("fails", "other")}  # there is no process group
    expected = dict.fromkeys(names, ("compiles", "same")) | made_up | groups
    assert found == expected


@needs_others
@pytest.mark.parametrize("all_of_them", [False, pytest.param(True, marks=pytest.mark.sweep)])
@pytest.mark.timeout(7200)
def test_other_versions_read_what_each_writes(tmp_path: Path, all_of_them: bool) -> None:
    """In each direction a capture does as at home, or is refused by name."""
    pythons = {HERE: sys.executable, **PYTHONS}
    names = () if all_of_them else (*FEW, "feature_*")
    for version, path in pythons.items():
        python("exchange.py", "write", tmp_path / version, *names, interpreter=path)
    folders = [tmp_path / version for version in pythons]
    said = [said_by(path, folders, tmp_path / f"{v}.json") for v, path in pythons.items()]
    assert {found["torch"].rpartition(".")[0] for found in said} == set(pythons)
    assert [r for r in readings(said) if r.word == "failure"] == [], "\n".join(table(said))


# --- the table ------------------------------------------------------------------------------------


def row(verdict: str, *, name: str = "a", folder: str = "old", **more: str) -> Row:
    """How a capture went."""
    return {"name": name, "folder": folder, "verdict": verdict, **more}


GOOD = row("compiles", again="same", run="same")
BAD = row("fails", again="same", error="RuntimeError")


@pytest.mark.parametrize(
    ("found", "home", "word"),
    [
        (GOOD, GOOD, "compiles"),
        (GOOD, BAD, "compiles"),
        (BAD, BAD, "as at home"),
        (BAD, GOOD, "failure"),
        (row("fails", again="same", error="ValueError"), BAD, "failure"),
        (row("refused", error="UnknownNameError"), GOOD, "refused"),
        (row("raises", error="AttributeError"), GOOD, "failure"),
        (GOOD | {"again": "other"}, GOOD, "failure"),
        (GOOD | {"again": "other"}, GOOD | {"again": "other"}, "compiles"),
        (GOOD | {"run": "crashes"}, GOOD, "failure"),
        (GOOD | {"run": "NotImplementedError"}, GOOD | {"run": "NotImplementedError"}, "compiles"),
        (BAD, None, "failure"),
    ],
)
def test_the_word_for_a_reading(found: Row, home: Row | None, word: str) -> None:
    """Whatever is neither as at home, nor good, nor refused by the package is a failure."""
    assert word_of(found, home) == word


def test_the_table() -> None:
    """A row for each writer, a column for each reader, models apart, and what went wrong below."""
    model = row("compiles", name="model_bert-1", again="same", run="same", writer="2.13.0")
    home = {"torch": "2.13.0", "rows": [{**GOOD, "writer": "2.13.0"}, model]}
    refused = row("refused", error="UnknownNameError", text="no\nsuch")
    raised = {**model, "verdict": "raises", "error": "KeyError", "text": "'x'"}
    assert table([home, {"torch": "2.14.1", "rows": [refused, raised]}]) == [
        "| written under \\ read under | 2.13.0 | 2.14.1 |",
        "|---|---|---|",
        "| old | 2 compile | 0 compile, 1 refused by name, **1 fail** |",
        "",
        "| model, written under \\ read under | 2.13.0 | 2.14.1 |",
        "|---|---|---|",
        "| bert, old | 1 compile | 0 compile, **1 fail** |",
        "",
        "failure: old -> 2.14.1: model_bert-1: raises, KeyError, 'x'",
        "refused: old -> 2.14.1: a: refused, UnknownNameError, no such",
    ]


# --- what versions say in other words -------------------------------------------------------------


def renamed(d: ShapeEnvDesc, old: str, new: str) -> ShapeEnvDesc:
    """The record as a torch would write it that has another text for some source."""
    text = msgspec.json.encode(msgspec.to_builtins(d)).decode()
    assert old in text
    return msgspec.convert(msgspec.json.decode(text.replace(old, new)), ShapeEnvDesc)


def test_sources_have_the_names_that_this_torch_gives_them() -> None:
    """By these, torch finds the symbol of a size again; the record may have a name of another torch's.

    An element of a set is ``list(L['s'])[0]`` in torch 2.13 and ``___set_getitem(L['s'], 0)`` in 2.15.
    """
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    source = AttrSource(LocalSource("s"), "w")
    mode.from_tensor(torch.zeros(4), source=source, symbolic_context=context)
    size = TensorPropertySource(source, TensorProperty.SIZE, 0).name
    written = renamed(tfk.snapshot(env), "L['s'].w", "first(L['s']).w")
    assert [name for name, _ in written.source_to_var] == ["first(L['s']).w.size()[0]"]
    found: Any = tfk.restore(written)
    assert found.source_to_var == env.source_to_var
    assert [s.name for sources in found.var_to_sources.values() for s in sources] == [size]
    assert tfk.snapshot(found) == tfk.snapshot(env)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"target": FunctionValue(kind="op", name="aten.new.default")},
            "$.nodes[1].target: torch.ops.aten.new is not registered in this process. Use the "
            "versions that wrote it",
        ),
        (
            {"kwargs": (("block_table", None),)},
            "$.nodes[1].kwargs: torch.ops.aten.alias.default has no argument 'block_table'; expected "
            "self. Use the versions that wrote it",
        ),
    ],
    ids=["operator", "argument"],
)
def test_an_operator_of_torchs_own_that_this_version_has_not(
    changed: dict[str, Any], said: str
) -> None:
    """No package would bring it: the error says which versions have it, and not to import any."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.alias.default, (x,)),))
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    desc = tfk.capture(gm, [FakeTensorMode().from_tensor(torch.zeros(3))]).desc
    nodes = tuple(
        msgspec.structs.replace(node, **changed) if node.op == "call_function" else node
        for node in desc.graph.nodes
    )
    graph_desc = msgspec.structs.replace(desc.graph, nodes=nodes)
    desc = msgspec.structs.replace(desc, graph=graph_desc, torch_version="2.99.0")
    with pytest.raises(tfk.UnknownNameError) as caught:
        tfk.Capture(desc).instantiate()
    running = torch.__version__.partition("+")[0]
    assert str(caught.value) == (
        f"{said}: an unknown release with torch 2.99.0 wrote the file, this is torch {running}"
    )


@pytest.mark.parametrize("inference", [False, True])
def test_the_fake_of_an_mkldnn_tensor(inference: bool) -> None:
    """It is one itself as of torch 2.14, ours and torch's; either is described as such a tensor."""
    with torch.inference_mode(inference):
        tensor = torch.ones(4, 3).to_mkldnn()
    record = tfk.MetaTensorDescriber().describe_tensor(tensor)
    assert record.layout == "_mkldnn"
    fake = tfk.MetaConverter(FakeTensorMode()).from_desc(record)
    theirs = FakeTensorMode().from_tensor(tensor)
    assert fake.layout == theirs.layout
    assert fake.is_mkldnn == theirs.is_mkldnn
    assert str(getattr(fake, "dispatch_keys", None)) == str(theirs.dispatch_keys)
    again = msgspec.structs.replace(record, is_fake=True)
    assert tfk.MetaTensorDescriber().describe_tensor(fake) == again
    if theirs.is_mkldnn:
        assert tfk.MetaTensorDescriber().describe_tensor(theirs) == again
