"""Metadata of FX nodes: what is recorded, and what is dropped for which reason."""

from __future__ import annotations

import copy
import os
import pathlib
import re
from typing import Any

import msgspec
import pytest
import torch
from graph_checks import OUT, RELU, X, decode, function, graph, rebuild
from processes import fresh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.proxy import _COPY_META_FIELDS

import torch_fakeify as tfk
from torch_fakeify.describe.describer import MetaTensorDescriber
from torch_fakeify.frames.graph.codec import encode_graph
from torch_fakeify.records import metadata_keys
from torch_fakeify.records.metadata_keys import losses_of
from torch_fakeify.records.tensor import (
    DictValue,
    FrameDesc,
    ListValue,
    OpaqueValue,
    StackDesc,
    TupleValue,
)

# --- metadata -------------------------------------------------------------------------------------

NOT_OF_NODES = {
    # of inductor's kernel templates and of Triton
    "ACC_TYPE", "HOST_SIDE_TMA", "kpack", "matrix_instr_nonkdim", "waves_per_eu",
}  # fmt: skip
"""Keys of other dictionaries that are called `meta`."""


def test_every_metadata_key_of_torch_is_classified():
    """A key that a new torch writes fails here, until it is recorded or dropped with a reason."""
    root = pathlib.Path(torch.__file__).parent
    pattern = re.compile(r"\w\.meta(?:\[\s*|\.(?:get|pop|setdefault)\(\s*)['\"](\w+)['\"]")
    found = set(_COPY_META_FIELDS)
    for folder in ("fx", "_dynamo", "_functorch", "_higher_order_ops", "_subclasses", "_inductor",
                   "_export", "export", "_library", "utils"):  # fmt: skip
        for file in (root / folder).rglob("*.py"):
            found.update(pattern.findall(file.read_text()))
    known = {
        *metadata_keys.CARRIED, *metadata_keys.DROPPED, *metadata_keys.MODULE_CARRIED,
        *metadata_keys.MODULE_DROPPED, *metadata_keys.PLAIN,
    }  # fmt: skip
    assert found - known - NOT_OF_NODES == set()
    assert all(metadata_keys.DROPPED.values())
    assert not set(metadata_keys.CARRIED) & set(metadata_keys.DROPPED)


def traced():
    """A small graph whose metadata a test may fill."""
    gm = make_fx(lambda x: x.relu())(torch.ones(2))
    return gm, next(
        iter(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default))
    )


def test_unknown_and_unencodable_metadata_is_a_named_loss():
    """Neither fails a capture, and the record lists both."""
    gm, relu = traced()
    relu.meta.update(mine={1}, custom={"a": object()}, recompute=None, grapharg=object())
    desc, rebuilt = rebuild(gm)
    assert desc.nodes[1].dropped_meta == (
        ("mine", "not plain data: an object of builtins.set"),
        (
            "custom",
            "meta['custom']['a']: a value has no record; expected a constant; "
            "found an object of builtins.object",
        ),
    )
    again = list(rebuilt.graph.nodes)[1].meta
    assert not {"mine", "custom", "grapharg"} & set(again)
    assert again["recompute"] is None


PLAIN = {
    "delegation_tag": "tag0",
    "quantization_annotation": {"inputs": [1, 2.5, None, True, (1, "x")], "dtype": torch.float32},
    "device": torch.device("cuda:1"),
    "by number": {3: torch.channels_last, 1.5: float("-inf"), True: []},
}
"""Metadata that tools add, as plain data."""


def test_plain_metadata_round_trips_under_any_key():
    """Types and order are equal, on nodes, on the graph and in bodies of higher-order operators."""
    x = torch.ones(3)
    body = torch.fx.GraphModule(torch.nn.Module(), make_fx(torch.sin)(x).graph)
    gm, relu = traced()
    gm.add_submodule("body", body)
    with gm.graph.inserting_before(relu):
        gm.graph.get_attr("body")
    for part in (gm, body):
        part.meta.update(PLAIN)
        for fx_node in part.graph.nodes:
            fx_node.meta.update(PLAIN)
    desc, rebuilt = rebuild(gm)
    assert losses_of(desc) == ()
    for part in (rebuilt, rebuilt.body):
        assert repr({key: part.meta[key] for key in PLAIN}) == repr(PLAIN)
        for fx_node in part.graph.nodes:
            assert repr({key: fx_node.meta[key] for key in PLAIN}) == repr(PLAIN)


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("a", {1}, "not plain data: an object of builtins.set"),
        ("a", [{"b": (object(),)}], "not plain data: an object of builtins.object"),
        ("a", torch.ones(1), "not plain data: an object of torch.Tensor"),
        ("a", {(1,): 2}, "not plain data: a key that is an object of builtins.tuple"),
        ("a", "\ud800", "not plain data: a text that is no Unicode"),
        ("a", "x" * 70000, "more than 65536 parts or characters"),
        ("a", ENDLESS, "16 levels"),
        ("a", 1 << 5000, "not plain data: a number of many digits"),
        (5, 1, "the key is no text"),
        ("\ud800", 1, "the key is no text"),
    ],
)
def test_metadata_that_is_no_plain_data_is_counted_as_a_loss(key, value, reason):
    """Losses are counted by graph, key and reason, and the file can be written nevertheless."""
    gm, relu = traced()
    relu.meta[key] = gm.meta[key] = value
    desc = encode_graph(gm, MetaTensorDescriber())
    (loss,) = losses_of(desc)
    assert (loss.graph, loss.count) == ("", 2)
    assert reason in loss.reason
    assert tfk.loads(tfk.dumps(desc)) == desc


def test_metadata_that_torch_remakes_is_no_loss():
    """Keys that torch remakes are neither recorded nor counted, for any values."""
    gm, relu = traced()
    relu.meta.update(dict.fromkeys(metadata_keys.DROPPED, 1))
    gm.meta.update(dict.fromkeys(metadata_keys.MODULE_DROPPED, 1))
    desc = encode_graph(gm, MetaTensorDescriber())
    assert losses_of(desc) == ()
    recorded = {key for key, _ in (*desc.meta, *desc.nodes[1].meta)}
    assert not recorded & {*metadata_keys.DROPPED, *metadata_keys.MODULE_DROPPED}


def test_notes_of_compilers_come_back():
    """Enumerations, provenance, source functions, module stacks, annotations, gradient order."""
    from torch.fx.traceback import NodeSource, NodeSourceAction
    from torch.utils.checkpoint import CheckpointPolicy

    gm, relu = traced()
    relu.meta.update(
        recompute=CheckpointPolicy.PREFER_RECOMPUTE,
        ac_graph_id=3,
        seq_nr=107,
        partitioner_tag="is_backward",
        custom={"stage": 1, "flag": True, "name": "x"},
        nn_module_stack={"L__self___a": ("L['self'].a", torch.nn.Linear)},
        source_fn_stack=[("relu", torch.relu), ("a", torch.nn.Linear), ("f", test_notes_of_compilers_come_back)],
        from_node=[NodeSource(relu, "pass", NodeSourceAction.REPLACE)],
        torch_fn=("relu_1", "function.relu"),
    )  # fmt: skip
    next(iter(gm.graph.nodes)).meta["seq_nr"] = 100
    _, rebuilt = rebuild(gm)
    x, again, _ = rebuilt.graph.nodes
    assert again.meta["recompute"] is CheckpointPolicy.PREFER_RECOMPUTE
    assert again.meta["custom"] == relu.meta["custom"]
    assert again.meta["custom"]["flag"] is True
    assert again.meta["nn_module_stack"] == {
        "L__self___a": ("L['self'].a", "torch.nn.modules.linear.Linear")
    }
    assert again.meta["source_fn_stack"] == [
        ("relu", torch.relu),
        ("a", "torch.nn.modules.linear.Linear"),
        ("f", f"{__name__}.test_notes_of_compilers_come_back"),
    ]
    (source,) = again.meta["from_node"]
    assert (source.name, source.pass_name, source.action) == (
        "relu", "pass", [NodeSourceAction.REPLACE],
    )  # fmt: skip
    assert again.meta["torch_fn"] == ("relu_1", "function.relu")
    assert (x.meta["seq_nr"], again.meta["seq_nr"]) == (0, 7)


def test_a_note_about_a_missing_operator_does_not_stop_a_reader():
    """The operator that a node was decomposed from need not be registered for a reader."""
    name = "nosuchlib.op.default"
    desc = graph(
        X,
        msgspec.structs.replace(
            RELU,
            meta=(
                ("original_aten", function(name, "op")),
                ("source_fn_stack", ListValue(items=(TupleValue(items=("a", function(name, "op"))),))),
            ),
        ),
        OUT,
    )  # fmt: skip
    relu = list(decode(desc).graph.nodes)[1]
    assert relu.meta == {"original_aten": name, "source_fn_stack": [("a", name)]}


def test_shared_metadata_is_stored_once_and_decoded_apart():
    """A pass that changes one node's stack does not change another's."""
    gm, _relu = traced()
    stack = {"a": ("L['self']", torch.nn.Linear)}
    for fx_node in gm.graph.nodes:
        fx_node.meta["nn_module_stack"] = dict(stack)
    desc, rebuilt = rebuild(gm)
    assert len(desc.shared) == 1
    first, second, _ = rebuilt.graph.nodes
    first.meta["nn_module_stack"]["b"] = 1
    assert "b" not in second.meta["nn_module_stack"]


def _path(name, cls=torch.nn.Linear):
    return {"a": (f"L['{name}']", cls)}


METADATA = [
    *[{key: _path(*entry)} for key in ("nn_module_stack", "fwd_nn_module_stack")
      for entry in (("x",), ("y",), ("x", torch.nn.ReLU))],
    {"nn_module_stack": {"b": ("L['x']", torch.nn.Linear)}},
    {"nn_module_stack": {**_path("x"), "b": ("L['x']", torch.nn.Linear)}},
    {"nn_module_stack": {"b": ("L['x']", torch.nn.Linear), **_path("x")}},
    {"nn_module_stack": {}},
    {"nn_module_stack": {"a": ("x", 1)}},
    {"nn_module_stack": {"a": ("x", True)}},
    {"nn_module_stack": {"a": ["x", [1]]}},
    *[{key: fns} for key in ("source_fn_stack", "fwd_source_fn_stack")
      for fns in ([("f", torch.relu)], [("g", torch.relu)], [("f", torch.sin)], [("f", "relu")],
                  [("f", torch.relu), ("f", torch.sin)], [("f", torch.sin), ("f", torch.relu)],
                  [], [("f", 1)], [("f", True)], [(1, torch.relu)], [(True, torch.relu)], [1], [True],
                  [["f", torch.relu]])],
    *[{"tensor_dict": attributes}
      for attributes in ({}, {"_dynamo_static_input_type": "guarded"}, {"mine": "guarded"},
                         {"_dynamo_static_input_type": "unguarded"}, {"mine": "guarded", "a": 1},
                         {"_dynamo_static_input_type": 1}, {"_dynamo_static_input_type": True})],
    {"stack_trace": "text"},
    {"stack_trace": "other text"},
    {"custom": {"a": 1}},
    {"custom": {"a": True}},
]  # fmt: skip
"""Metadata of one node each; nodes with equal parts share one record of a part."""


def _meta_alone(gm):
    """Return the record of each node's metadata, encoded alone."""
    desc = encode_graph(gm, MetaTensorDescriber())
    return [
        (
            [
                (
                    key,
                    desc.shared[v.data] if isinstance(v, OpaqueValue) and v.kind == "shared" else v,
                )
                for key, v in fx_node.meta
            ],
            fx_node.dropped_meta,
        )
        for fx_node in desc.nodes
    ]


@pytest.mark.parametrize("backwards", [False, True])
def test_metadata_of_many_nodes_is_encoded_as_of_each_alone(backwards):
    """Neither shared parts nor the order of the nodes matter."""
    metas = METADATA[::-1] if backwards else METADATA
    together, alone = torch.fx.Graph(), []
    for i, meta in enumerate(metas * 2):
        together.placeholder(f"x{i}").meta.update(copy.deepcopy(meta))
        graph = torch.fx.Graph()
        graph.placeholder("x").meta.update(meta)
        graph.output(())
        alone += _meta_alone(torch.fx.GraphModule(torch.nn.Module(), graph))[:1]
    together.output(())
    found = _meta_alone(torch.fx.GraphModule(torch.nn.Module(), together))[:-1]
    assert list(map(repr, found)) == list(map(repr, alone))


def test_metadata_of_modules_is_not_classified_as_of_nodes():
    """A key that nodes may have is unknown on a module, also if a node has it."""
    gm, relu = traced()
    classified = {"stack_trace": "text", "nn_module_stack": _path("x"), "tensor_dict": {}}
    relu.meta.update(classified)
    gm.meta.update(classified)
    desc = encode_graph(gm, MetaTensorDescriber())
    assert desc.meta == (("stack_trace", "text"), ("tensor_dict", DictValue(items=())))
    (lost,) = desc.dropped_meta
    assert lost == ("nn_module_stack", "not plain data: an object of builtins.type")


STACKS = [
    '  File "a.py", line 3, in f\n    x = 1\n',
    '  File "a.py", line 3, in f\n  File "b c.py", line 40, in <module>\n    y()\n',
    '  File "a.py", line 3, in f\n    x\n    ^\n',
    '  File "a.py", line 3, in f\n    g(\n    ~^\n        x)\n  File "b.py", line 4, in g\n    y\n',
]
NOT_STACKS = [
    "",
    "text",
    '  File "a.py", line 3, in f\n    x\n  [Previous line repeated 2 more times]\n',
    'File "a.py", line 3, in f\n',
]


@pytest.mark.parametrize("text", STACKS + NOT_STACKS)
def test_stack_traces_round_trip_exactly(text):
    """A stack is recorded as frames where `traceback` printed it, as text otherwise."""
    gm, relu = traced()
    relu.meta["stack_trace"] = text
    desc, rebuilt = rebuild(gm)
    assert (desc.nodes[1].stack is not None) == (text in STACKS)
    assert list(rebuilt.graph.nodes)[1].meta["stack_trace"] == text


def test_file_names_can_be_shortened():
    """A caller's function shortens file names, in frames and in text."""
    gm, relu = traced()
    relu.meta["stack_trace"] = STACKS[0].replace("a.py", "/home/me/a.py")
    gm.graph.output_node().meta["stack_trace"] = 'File "/home/me/b.py", line 1, in f'
    desc = encode_graph(gm, MetaTensorDescriber(), file_name=os.path.basename)
    assert desc.nodes[1].stack == StackDesc(
        frames=(FrameDesc(file="a.py", line=3, function="f", code="x = 1"),)
    )
    assert ("stack_trace", 'File "b.py", line 1, in f') in desc.nodes[2].meta


@pytest.mark.sweep
def test_records_do_not_depend_on_the_process():
    """Two interpreters with other addresses and counters write the same bytes."""
    script = """
import sys, torch
from torch_fakeify.serialization import document
from torch_fakeify.describe.describer import MetaTensorDescriber
from torch_fakeify.frames.graph.codec import encode_graph
from torch_fakeify.records.metadata_keys import losses_of
junk = [torch.ones(1, requires_grad=True).sin() for _ in range(int(sys.argv[1]))]
def backend(gm, _):
    from torch._dynamo.backends.common import aot_autograd
    from functorch.compile import make_boxed_func
    def show(g, _):
        sys.stdout.write(document.dumps(encode_graph(g, MetaTensorDescriber())).hex())
        return make_boxed_func(g.forward)
    sys.stdout.write(document.dumps(encode_graph(gm, MetaTensorDescriber())).hex())
    return aot_autograd(fw_compiler=show)(gm, _)
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
torch.compile(model, backend=backend)(torch.ones(2, 2)).sum().backward()
"""
    outputs = [
        fresh("-W", "ignore", "-c", script, count, PYTHONHASHSEED=count).stdout
        for count in ("3", "50")
    ]
    assert outputs[0]
    assert outputs[0] == outputs[1]
