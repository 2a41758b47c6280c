"""Records of graphs written by hand, among them malformed and hostile ones."""

from __future__ import annotations

import os

import msgspec
import pytest
import torch
from graph_checks import OUT, RELU, X, calling, decode, function, graph, node

from torch_fakeify.describe.describer import describe_tensor
from torch_fakeify.errors import (
    FakeifyError,
    FormatError,
    LimitError,
    UnknownNameError,
)
from torch_fakeify.records.graph import CallingDesc
from torch_fakeify.records.tensor import (
    DictValue,
    ListValue,
    NamedTupleValue,
    NodeValue,
    OpaqueValue,
    SliceValue,
    TupleValue,
    TypeValue,
)


def test_a_graph_written_by_hand_runs():
    """The smallest record that computes something is decoded and run."""
    gm = decode(graph(X, RELU, OUT))
    (result,) = gm(torch.tensor([-1.0, 2.0]))
    assert result.tolist() == [0.0, 2.0]
    assert gm.code.strip() == (
        "def forward(self, x):\n    relu = torch.relu(x);  x = None\n    return (relu,)"
    )
    # names of classes are printed, and end up in files that users may run
    assert type(decode(graph(X, RELU, OUT, class_name="<lambda>"))).__name__ == "<lambda>"


# --- injection ------------------------------------------------------------------------------------

CODE = "x): pass\nimport os; os.environ['FAKEIFY_CANARY'] = '1' #"
PARTS = [
    CODE,
    "a b",
    "a;b",
    "a\nb",
    "a=1",
    "a: 1",
    "é",
    "",
    "1a",
    "a.b",
    "lambda",
    "x)",
    "a#b",
    '"',
]


@pytest.mark.parametrize("text", PARTS)
@pytest.mark.parametrize(
    "make",
    [
        lambda t: graph(node("placeholder", t, "x"), OUT),
        lambda t: graph(node("placeholder", "x", t), OUT),
        lambda t: graph(node("placeholder", "x", "*" + t), OUT),
        lambda t: changed(name=t),
        lambda t: changed(kwargs=((t, 1),)),
        lambda t: calling(t, NodeValue(index=0)),
        lambda t: calling(function("builtins.getattr"), NodeValue(index=0), t),
        lambda t: calling(function(t, "numpy_method"), NodeValue(index=0)),
        lambda t: calling(function(f"torch.{t}"), NodeValue(index=0)),
        lambda t: calling(function(f"aten.{t}.default", "op"), NodeValue(index=0)),
        lambda t: graph(X, RELU, OUT, calling=CallingDesc(arguments=(t,))),
        lambda t: graph(X, RELU, OUT, function_name=t),
    ],
)  # fmt: skip
def test_text_that_could_be_code_is_refused_everywhere(make, text):
    """Names, targets, keywords and attributes, which end up in generated source, are checked."""
    with pytest.raises(FakeifyError) as caught:
        decode(make(text))
    assert isinstance(caught.value, FormatError)
    assert caught.value.where is not None


@pytest.mark.parametrize("text", [CODE, "a b", "a;b", "a..b", ".a", "__class__", "a.__dict__", '"'])
@pytest.mark.parametrize("op", ["get_attr", "call_module"])
def test_paths_of_attributes_are_dotted_names(op, text):
    """A path that is no dotted name is refused, although the module has that attribute."""
    desc = graph(X, node(op, "a", text), OUT, submodules=((text, graph(X, RELU, OUT)),))
    with pytest.raises(FormatError):
        decode(desc)


def test_constants_are_printed_as_constants():
    """A hostile string is a string in the generated code."""
    gm = decode(calling(function("torch.relu"), NodeValue(index=0), CODE, name=CODE))
    compile(gm.code, "generated", "exec")
    assert repr(CODE) in gm.code
    with pytest.raises(TypeError):
        gm(torch.ones(1))
    assert "FAKEIFY_CANARY" not in os.environ


def test_keys_of_structures_are_checked():
    """Keys of structures are between quotes in the generated code."""

    def spec(key):
        leaf = OpaqueValue(
            kind="TreeSpec",
            data=TupleValue(items=("dict", ListValue(items=(key,)), TupleValue(items=(None,)))),
        )
        return CallingDesc(arguments=("a",), in_spec=leaf)

    decode(graph(X, RELU, OUT, calling=spec("layer.0.weight")))
    for key in ("a'b", "a\\", "a\nb", "é", 1, None):
        with pytest.raises(FormatError):
            decode(graph(X, RELU, OUT, calling=spec(key)))


# --- malformed ------------------------------------------------------------------------------------

LEAF = describe_tensor(torch.ones(2))


def changed(**fields):
    """A graph of an input, a call of relu with other fields, and the output."""
    return graph(X, msgspec.structs.replace(RELU, **fields), OUT)


def annotated(*meta):
    """Such a graph with metadata of the call."""
    return changed(meta=meta)


def relu(*args):
    """Such a graph with other arguments of the call."""
    return changed(args=args)


SHARED = OpaqueValue(kind="shared", data=0)
MALFORMED = [
    (relu(NodeValue(index=1)),
     "an FX node refers to none before it; expected a position below 1; found 1"),
    (relu(NodeValue(index=-1)),
     "an FX node refers to none before it; expected a position below 1; found -1"),
    (changed(name="x"), "two nodes have one name; found 'x'"),
    (graph(X, node("placeholder", "y", "x"), OUT), "$.nodes[1].target: two inputs have one name"),
    (graph(OUT, X), "$.nodes[0]: an output is not the last node"),
    (graph(X, node("placeholder", "self_1", "self")), "not a placeholder; found 'self'"),
    (changed(target="torch.relu"), "$.nodes[1].target: not a function; found 'torch.relu'"),
    (changed(op="call_method"), "$.nodes[1].target: not a name; found FunctionValue"),
    (calling("add_"), "$.nodes[1].args: a method has no object"),
    (graph(X, node("output", "o", "result", 1)), "$.nodes[1]: not an output; found 'result'"),
    (graph(X, node("output", "o", "output")), "$.nodes[1]: not an output; found 'output'"),
    (changed(op="get_attr", target="weight"),
     "$.nodes[1].target: the module has no such attribute; found 'weight'"),
    (changed(op="call_module", target="sub"),
     "$.nodes[1].target: the module has no such submodule; found 'sub'"),
    (calling(function("operator.add"), NodeValue(index=0)),
     "$.nodes[1].args: wrong number of arguments for operator.add"),
    (calling(function("builtins.getattr"), "text", "shape"),
     "$.nodes[1].args: not the reading of an attribute"),
    (calling(function("builtins.getattr"), NodeValue(index=0), NodeValue(index=0)),
     "$.nodes[1].args[1]: not the name of an attribute; found NodeValue(index=0)"),
    (graph(X, node("get_attr", "s", "sub"),
           node("call_function", "g", function("builtins.getattr"), NodeValue(index=1), "meta"),
           OUT, submodules=(("sub", graph(X, RELU, OUT)),)),
     "$.nodes[2].args[0]: an attribute of a graph is read"),
    (relu(SliceValue(start=OpaqueValue(kind="x"))), "unknown kind of metadata; found 'x'"),
    (changed(users=(0,)), "$.nodes[1].users: not the users of the node"),
    (changed(users=(7,)), "$.nodes[1].users: not the users of the node"),
    (changed(type=1), "$.nodes[1].type: not an annotation; found 1"),
    (annotated(("nonsense", NodeValue(index=0))),
     "$.nodes[1].meta[0]: not a metadata key; found 'nonsense'"),
    (annotated(("grapharg", 1)), "$.nodes[1].meta[0]: not a metadata key; found 'grapharg'"),
    (annotated(("custom", 1)),
     "$.nodes[1].meta[0]: metadata 'custom' has the wrong type; found int"),
    (annotated(("seq_nr", 1), ("seq_nr", 1)),
     "$.nodes[1].meta[1]: not a metadata key; found 'seq_nr'"),
    (annotated(("nn_module_stack", SHARED)), "$.nodes[1].meta[0]: no such shared value; found 0"),
    (annotated(("seq_nr", SHARED)), "$.nodes[1].meta[0]: not a shared value; found 0"),
    (annotated(("from_node", ListValue(items=(1,)))),
     "$.nodes[1].meta[0]: not the provenance of a node"),
    (annotated(("unbacked_bindings", DictValue(items=((1, 2),)))),
     "$.nodes[1].meta[0]: not a binding of an unbacked symbol"),
    (graph(X, RELU, OUT, tensors=(("forward", LEAF),)),
     "$.tensors[0]: a name is taken; found 'forward'"),
    (graph(X, RELU, OUT, tensors=(("_parameters", LEAF),)),
     "$.tensors[0]: a name is taken; found '_parameters'"),
    (graph(X, RELU, OUT, tensors=(("w", LEAF), ("w", LEAF))),
     "$.tensors[1]: a name occurs twice; found 'w'"),
    (graph(X, RELU, OUT, submodules=(("s", graph(X, RELU, OUT)),), tensors=(("s.w", LEAF),)),
     "$.tensors[0]: a name leads into a graph; found 's.w'"),
    (graph(X, RELU, OUT, submodule_aliases=(("a", "b"),)),
     "$.submodule_aliases[0]: no such submodule; found 'b'"),
    (graph(X, RELU, OUT, tensors=(("w", LEAF),), tensor_data=(("w", b"abc"),)),
     "$.tensors[0]: data of the wrong length; expected 8 bytes; found 3"),
    (graph(X, RELU, OUT, submodules=(("s", graph(OUT, X)),)),
     "$.submodules[0].nodes[0]: an output is not the last node"),
    (graph(X, RELU, OUT, class_name="A:\n  pass"), "$: not a class name; found 'A:\\n  pass'"),
]  # fmt: skip


@pytest.mark.parametrize(("desc", "message"), MALFORMED, ids=[m[-60:] for _, m in MALFORMED])
def test_malformed_records_are_format_errors(desc, message):
    """A record that its types allow but that is no graph is refused."""
    with pytest.raises(FormatError) as caught:
        decode(desc)
    assert str(caught.value).endswith(message)


DENIED = [
    calling(function("torch.load"), "file"),
    calling(function("builtins.eval"), "1"),
    calling(function("nosuch.op.default", "op")),
    calling("share_memory_", NodeValue(index=0)),
    calling("__class__", NodeValue(index=0)),
    calling("to_folder", NodeValue(index=0), "/tmp/folder"),
    calling(function("builtins.getattr"), NodeValue(index=0), "__class__"),
    calling(function("torch.relu"), TypeValue(name="subprocess.Popen")),
    calling(function("torch.relu"), function("os.system")),
    calling(function("torch.relu"), NamedTupleValue(cls="nosuch.Named", items=())),
]


@pytest.mark.parametrize("desc", DENIED, ids=lambda d: repr(d.nodes[1].target)[:60])
def test_names_outside_the_lists_are_unknown_names(desc):
    """Targets, methods, attributes and arguments are checked."""
    with pytest.raises(UnknownNameError) as caught:
        decode(desc)
    assert caught.value.where is not None
    assert caught.value.where.startswith("$.nodes[1].")


def test_nesting_of_graphs_is_bounded():
    """A nested record is refused before Python's stack overflows."""
    desc = graph(X, RELU, OUT)
    for _ in range(40):
        desc = graph(X, RELU, OUT, submodules=(("sub", desc),))
    with pytest.raises(LimitError, match="graphs are nested too deeply"):
        decode(desc)


def test_decoding_calls_no_named_function():
    """A graph whose only node raises when called is decoded without an error."""
    gm = decode(graph(node("call_function", "a", function("torch._assert"), False, "called"),
                      node("output", "output", "output", NodeValue(index=0))))  # fmt: skip
    with pytest.raises(AssertionError, match="called"):
        gm()
