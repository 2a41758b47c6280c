"""Records of graphs by hand: malformed and hostile ones, devices, constants, what is refused."""

from __future__ import annotations

import copy
import os
import pathlib
import re
import subprocess
import sys

import msgspec
import pytest
import torch
from graph_checks import Rebuilder, check, check_same_graph, rebuild
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.proxy import _COPY_META_FIELDS

from torch_fakeify import codec, graph_meta
from torch_fakeify.desc import (
    DictValue,
    FrameDesc,
    FunctionValue,
    ListValue,
    NamedTupleValue,
    NodeValue,
    OpaqueValue,
    SliceValue,
    StackDesc,
    TensorValue,
    TorchConstValue,
    TupleValue,
    TypeValue,
)
from torch_fakeify.desc_graph import CallingDesc, GraphModuleDesc, NodeDesc
from torch_fakeify.describe import MetaTensorDescriber, describe_tensor
from torch_fakeify.errors import (
    FakeifyError,
    FormatError,
    LimitError,
    UnknownNameError,
    UnsupportedValueError,
)
from torch_fakeify.graph import encode_graph


def function(name, kind="function"):
    """A target by name."""
    return FunctionValue(kind=kind, name=name)


def node(op, name, target, *args, **kwargs):
    """One node's record; keyword arguments are those of the call."""
    return NodeDesc(op=op, name=name, target=target, args=args, kwargs=tuple(kwargs.items()))


X = node("placeholder", "x", "x")
RELU = node("call_function", "relu", function("torch.relu"), NodeValue(index=0))
OUT = node("output", "output", "output", TupleValue(items=(NodeValue(index=1),)))


def graph(*nodes, **fields):
    """A graph's record."""
    return GraphModuleDesc(nodes=nodes, **fields)


def calling(target, *args, **kwargs):
    """A graph of one call, between an input and the output."""
    call = NodeDesc(
        op="call_method" if isinstance(target, str) else "call_function",
        name="call",
        target=target,
        args=args,
        kwargs=tuple(kwargs.items()),
    )
    return graph(X, call, OUT)


def decode(desc, **kwargs):
    """The graph of a record in an empty mode."""
    return Rebuilder(None).decode(desc, **kwargs)


def test_a_graph_by_hand_runs():
    """The smallest record that computes something."""
    gm = decode(graph(X, RELU, OUT))
    (result,) = gm(torch.tensor([-1.0, 2.0]))
    assert result.tolist() == [0.0, 2.0]
    assert gm.code.strip() == (
        "def forward(self, x):\n    relu = torch.relu(x);  x = None\n    return (relu,)"
    )


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
        lambda t: graph(X, msgspec.structs.replace(RELU, name=t), OUT),
        lambda t: graph(X, msgspec.structs.replace(RELU, kwargs=((t, 1),)), OUT),
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
    """Names, targets, keywords, attributes: each ends in generated source text."""
    with pytest.raises(FakeifyError) as caught:
        decode(make(text))
    assert isinstance(caught.value, FormatError)
    assert caught.value.where is not None


@pytest.mark.parametrize("text", [CODE, "a b", "a;b", "a..b", ".a", "__class__", "a.__dict__", '"'])
@pytest.mark.parametrize("op", ["get_attr", "call_module"])
def test_paths_of_attributes_are_dotted_names(op, text):
    """Also where the module has an attribute of that name."""
    desc = graph(X, node(op, "a", text), OUT, submodules=((text, graph(X, RELU, OUT)),))
    with pytest.raises(FormatError):
        decode(desc)


def test_class_names_are_checked():
    """They are printed, and they end in files that users may run."""
    with pytest.raises(FormatError, match="not a class name"):
        decode(graph(X, RELU, OUT, class_name="A:\n  pass"))
    assert type(decode(graph(X, RELU, OUT, class_name="<lambda>"))).__name__ == "<lambda>"


def test_constants_are_printed_as_constants():
    """A hostile string stays a string in the generated code."""
    gm = decode(calling(function("torch.relu"), NodeValue(index=0), CODE, name=CODE))
    compile(gm.code, "generated", "exec")
    assert repr(CODE) in gm.code
    with pytest.raises(TypeError):
        gm(torch.ones(1))
    assert "FAKEIFY_CANARY" not in os.environ


def test_keys_of_structures_are_checked():
    """They stand between quotes in the generated code."""

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

MALFORMED = [
    (
        graph(X, node("call_function", "relu", function("torch.relu"), NodeValue(index=1)), OUT),
        "an FX node refers to none before it; expected a position below 1; found 1",
    ),
    (
        graph(X, node("call_function", "relu", function("torch.relu"), NodeValue(index=-1)), OUT),
        "an FX node refers to none before it; expected a position below 1; found -1",
    ),
    (graph(X, msgspec.structs.replace(RELU, name="x"), OUT), "two nodes have one name; found 'x'"),
    (
        graph(X, node("placeholder", "y", "x"), OUT),
        "$.nodes[1].target: two inputs have one name",
    ),
    (graph(OUT, X), "$.nodes[0]: an output is not the last node"),
    (graph(X, node("placeholder", "self_1", "self")), "not a placeholder; found 'self'"),
    (
        graph(X, node("call_function", "a", "torch.relu"), OUT),
        "$.nodes[1].target: not a function; found 'torch.relu'",
    ),
    (
        graph(X, node("call_method", "a", function("torch.relu")), OUT),
        "$.nodes[1].target: not a name; found FunctionValue",
    ),
    (calling("add_"), "$.nodes[1].args: a method has no object"),
    (graph(X, node("output", "o", "result", 1)), "$.nodes[1]: not an output; found 'result'"),
    (graph(X, node("output", "o", "output")), "$.nodes[1]: not an output; found 'output'"),
    (
        graph(X, node("get_attr", "w", "weight"), OUT),
        "$.nodes[1].target: the module has no such attribute; found 'weight'",
    ),
    (
        graph(X, node("call_module", "m", "sub"), OUT),
        "$.nodes[1].target: the module has no such submodule; found 'sub'",
    ),
    (
        calling(function("operator.add"), NodeValue(index=0)),
        "$.nodes[1].args: wrong number of arguments for operator.add",
    ),
    (
        calling(function("builtins.getattr"), "text", "shape"),
        "$.nodes[1].args: not the reading of an attribute",
    ),
    (
        calling(function("builtins.getattr"), NodeValue(index=0), NodeValue(index=0)),
        "$.nodes[1].args[1]: not the name of an attribute; found NodeValue(index=0)",
    ),
    (
        calling(function("torch.relu"), SliceValue(start=OpaqueValue(kind="x"))),
        "unknown kind of metadata; found 'x'",
    ),
    (
        graph(X, msgspec.structs.replace(RELU, users=(0,)), OUT),
        "$.nodes[1].users: not the users of the node",
    ),
    (
        graph(X, msgspec.structs.replace(RELU, users=(7,)), OUT),
        "$.nodes[1].users: not the users of the node",
    ),
    (
        graph(X, msgspec.structs.replace(RELU, type=1), OUT),
        "$.nodes[1].type: not an annotation; found 1",
    ),
    (
        graph(X, msgspec.structs.replace(RELU, meta=(("nonsense", 1),)), OUT),
        "$.nodes[1].meta[0]: not a metadata key; found 'nonsense'",
    ),
    (
        graph(X, msgspec.structs.replace(RELU, meta=(("grapharg", 1),)), OUT),
        "$.nodes[1].meta[0]: not a metadata key; found 'grapharg'",
    ),
    (
        graph(X, msgspec.structs.replace(RELU, meta=(("custom", 1),)), OUT),
        "$.nodes[1].meta[0]: metadata 'custom' has the wrong type; found int",
    ),
    (
        graph(X, msgspec.structs.replace(RELU, meta=(("seq_nr", 1), ("seq_nr", 1))), OUT),
        "$.nodes[1].meta[1]: not a metadata key; found 'seq_nr'",
    ),
    (
        graph(
            X,
            msgspec.structs.replace(
                RELU, meta=(("nn_module_stack", OpaqueValue(kind="shared", data=3)),)
            ),
            OUT,
        ),
        "$.nodes[1].meta[0]: no such shared value; found 3",
    ),
    (
        graph(
            X,
            msgspec.structs.replace(RELU, meta=(("seq_nr", OpaqueValue(kind="shared", data=0)),)),
            OUT,
            shared=(1,),
        ),
        "$.nodes[1].meta[0]: not a shared value; found 0",
    ),
    (
        graph(
            X,
            msgspec.structs.replace(RELU, meta=(("from_node", ListValue(items=(1,))),)),
            OUT,
        ),
        "$.nodes[1].meta[0]: not the provenance of a node",
    ),
    (
        graph(
            X,
            msgspec.structs.replace(
                RELU, meta=(("unbacked_bindings", DictValue(items=((1, 2),))),)
            ),
            OUT,
        ),
        "$.nodes[1].meta[0]: not a binding of an unbacked symbol",
    ),
    (
        graph(X, RELU, OUT, tensors=(("forward", LEAF),)),
        "$.tensors[0]: a name is taken; found 'forward'",
    ),
    (
        graph(X, RELU, OUT, tensors=(("_parameters", LEAF),)),
        "$.tensors[0]: a name is taken; found '_parameters'",
    ),
    (
        graph(X, RELU, OUT, tensors=(("w", LEAF), ("w", LEAF))),
        "$.tensors[1]: a name stands twice; found 'w'",
    ),
    (
        graph(X, RELU, OUT, submodules=(("s", graph(X, RELU, OUT)),), tensors=(("s.w", LEAF),)),
        "$.tensors[0]: a name leads into a graph; found 's.w'",
    ),
    (
        graph(X, RELU, OUT, submodule_aliases=(("a", "b"),)),
        "$.submodule_aliases[0]: no such submodule; found 'b'",
    ),
    (
        graph(X, RELU, OUT, tensors=(("w", LEAF),), tensor_data=(("w", b"abc"),)),
        "$.tensors[0]: data of the wrong length; expected 8 bytes; found 3",
    ),
    (
        graph(X, RELU, OUT, submodules=(("s", graph(OUT, X)),)),
        "$.submodules[0].nodes[0]: an output is not the last node",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("desc", "message"), MALFORMED, ids=[m[-60:] for _, m in MALFORMED])
def test_malformed_records_are_format_errors(desc, message):
    """Each thing that the types allow and a graph cannot be."""
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
    """As targets, methods, attributes and arguments."""
    with pytest.raises(UnknownNameError) as caught:
        decode(desc)
    assert caught.value.where is not None
    assert caught.value.where.startswith("$.nodes[1].")


def test_attributes_of_graphs_cannot_be_read():
    """A graph on the module is an object with methods: `getattr` must not reach them."""
    desc = graph(
        X,
        node("get_attr", "s", "sub"),
        node("call_function", "g", function("builtins.getattr"), NodeValue(index=1), "meta"),
        node("output", "output", "output", NodeValue(index=2)),
        submodules=(("sub", graph(X, RELU, OUT)),),
    )
    with pytest.raises(FormatError, match="an attribute of a graph is read"):
        decode(desc)


def test_nesting_of_graphs_is_bounded():
    """Before Python's stack is."""
    desc = graph(X, RELU, OUT)
    for _ in range(40):
        desc = graph(X, RELU, OUT, submodules=(("sub", desc),))
    with pytest.raises(LimitError, match="graphs are nested too deeply"):
        decode(desc)


def test_decoding_calls_nothing_that_is_named():
    """A graph whose only node would raise when called decodes quietly."""
    gm = decode(graph(node("call_function", "a", function("torch._assert"), False, "called"),
                      node("output", "output", "output", NodeValue(index=0))))  # fmt: skip
    with pytest.raises(AssertionError, match="called"):
        gm()


def test_a_graph_is_decoded_in_a_process_that_never_saw_its_code(tmp_path):
    """A fresh interpreter, from bytes alone."""
    gm = make_fx(lambda x: torch.relu(x).sum(0))(torch.ones(2, 3))
    desc = encode_graph(gm, MetaTensorDescriber())
    path = tmp_path / "graph"
    path.write_bytes(codec.dumps(desc))
    script = f"""
import sys, pathlib, torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_fakeify import codec
from torch_fakeify.convert import MetaConverter
from torch_fakeify.graph import decode_graph
mode = FakeTensorMode()
desc = codec.loads(pathlib.Path({str(path)!r}).read_bytes())
gm = decode_graph(desc, convert=MetaConverter(mode).from_desc, sym=None)
assert gm(torch.tensor([[1.0, -2.0], [3.0, 4.0]])).tolist() == [4.0, 4.0]
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- names, users, structure ----------------------------------------------------------------------


def test_names_that_fx_would_not_choose_are_kept():
    """After passes a graph's names depend on its history; the record has them as they are."""
    gm = torch.fx.symbolic_trace(lambda x, input, y=(1, 2.5): (x + input).relu() + y[0])  # noqa: A006
    names = {"x": "add_7", "add": "x", "relu": "torch", "add_1": "relu_1_1"}
    for fx_node in gm.graph.nodes:
        fx_node.name = names.get(fx_node.name, fx_node.name)
    gm.recompile()
    _, rebuilt = check(gm)
    assert next(iter(rebuilt.graph.nodes)).name == "add_7"
    assert rebuilt.code == gm.code
    new = rebuilt.graph.create_node("call_function", torch.relu, name="relu_1_1")
    assert new.name not in {n.name for n in gm.graph.nodes}


def test_the_order_of_users_is_kept():
    """It is the order in which uses were made, not graph order, after a pass has moved nodes."""
    gm = torch.fx.symbolic_trace(lambda x: (x.relu(), x.sin(), x.cos()))
    x = next(iter(gm.graph.nodes))
    relu, sin, cos = list(x.users)
    x.users.clear()
    x.users.update(dict.fromkeys([cos, relu, sin]))
    desc, rebuilt = rebuild(gm)
    assert desc.nodes[0].users == (3, 1, 2)
    assert [u.name for u in next(iter(rebuilt.graph.nodes)).users] == ["cos", "relu", "sin"]


def test_a_graph_used_under_two_names_is_one_graph():
    """Calling it changes the same module."""
    inner = torch.fx.symbolic_trace(lambda x: x.relu())
    root = torch.nn.Module()
    root.a, root.b = inner, inner
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_module("b", (graph.call_module("a", (x,)),)))
    desc, rebuilt = check(torch.fx.GraphModule(root, graph))
    assert desc.submodule_aliases == (("b", "a"),)
    assert rebuilt.a is rebuilt.b


def test_structured_inputs_and_outputs_come_back():
    """make_fx of nested arguments: the graph takes and returns what the function did."""
    args = ({"w.0": torch.ones(2), "b": [torch.ones(2), None]}, (torch.ones(2),))
    gm = make_fx(lambda d, t: {"sum": d["w.0"] + t[0], "rest": (d["b"][0],)})(*args)
    desc, rebuilt = check(gm)
    assert desc.calling is not None
    assert str(rebuilt(*args)) == str(gm(*args))


def test_other_calling_conventions_are_refused():
    """Export's has graphs of its own; a transformed code is a function."""
    gm = torch.fx.symbolic_trace(lambda x: x.relu())
    gm.graph.on_generate_code(lambda old: lambda body: body)
    with pytest.raises(UnsupportedValueError, match="transformed by a function"):
        encode_graph(gm, MetaTensorDescriber())

    class Own(torch.fx.graph.CodeGen):
        pass

    gm.graph.set_codegen(Own())
    with pytest.raises(UnsupportedValueError) as caught:
        encode_graph(gm, MetaTensorDescriber())
    assert str(caught.value) == (
        "$: the graph has a calling convention of its own; expected torch.fx.graph.CodeGen; "
        "found Own. Flatten it: gm.graph.set_codegen(torch.fx.graph.CodeGen())."
    )


def test_boxed_graphs_take_one_list():
    """As inductor's regional compilation leaves them."""
    from torch.fx.graph import _BoxedCodeGen

    gm = torch.fx.symbolic_trace(lambda x, y: x + y)
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    desc, rebuilt = check(gm)
    assert desc.calling == CallingDesc(boxed=True)
    assert rebuilt([torch.ones(1), torch.ones(1)]).item() == 2.0


def test_a_called_module_is_refused_by_name():
    """Its code would be needed."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

        def forward(self, x):
            return self.layer(x)

    with pytest.raises(UnsupportedValueError) as caught:
        encode_graph(torch.fx.symbolic_trace(Net()), MetaTensorDescriber())
    assert str(caught.value) == (
        "$.nodes[1].target: the graph calls a module that is not a graph; "
        "found layer, a torch.nn.modules.linear.Linear. Trace through it, "
        "by torch.compile, make_fx or the graph_module of torch.export.export."
    )


def test_a_user_function_in_a_graph_is_refused_with_its_node():
    """The path leads to the target."""
    gm = torch.fx.symbolic_trace(lambda x: x.relu())
    for fx_node in gm.graph.find_nodes(op="call_method", target="relu"):
        fx_node.op, fx_node.target = "call_function", test_boxed_graphs_take_one_list
    with pytest.raises(UnsupportedValueError) as caught:
        encode_graph(gm, MetaTensorDescriber())
    assert caught.value.where == "$.nodes[1].target"


# --- constants on the module ----------------------------------------------------------------------


class Holder(torch.nn.Module):
    """Every way in which a tensor may hang on a module."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).t(), requires_grad=False)
        self.register_buffer("kept", torch.tensor([True, False]))
        self.register_buffer("gone", torch.ones(2, dtype=torch.bfloat16), persistent=False)
        self.big = torch.nn.Parameter(torch.zeros(2000))

    def forward(self, x):
        """Use them all."""
        return x * self.w.sum() + self.kept + self.gone + self.big.sum()


def held():
    """A graph that reads them."""
    return torch.fx.symbolic_trace(Holder())


def test_data_is_left_out_unless_asked_for():
    """The record names what it does not have."""
    desc = encode_graph(held(), MetaTensorDescriber())
    assert desc.tensor_data == ()
    assert set(desc.without_data) == {name for name, _ in desc.tensors} == {
        "w", "big", "kept", "gone",
    }  # fmt: skip
    gm = decode(desc)
    assert [type(p).__name__ for p in gm.parameters()] == ["FakeTensor", "FakeTensor"] or all(
        isinstance(p, torch.nn.Parameter) for p in gm.parameters()
    )


def test_small_data_is_carried_when_asked_for():
    """Element for element, whatever the strides and the dtype; large tensors stay without."""
    gm = held()
    desc = encode_graph(gm, MetaTensorDescriber(), constants="small")
    assert desc.without_data == ("big",)
    rebuilt = decode(desc)
    assert torch.equal(rebuilt.w, gm.w)
    assert rebuilt.w.stride() == gm.w.stride()
    assert isinstance(rebuilt.w, torch.nn.Parameter)
    assert not rebuilt.w.requires_grad
    assert torch.equal(rebuilt.kept, gm.kept)
    assert torch.equal(rebuilt.gone, gm.gone)
    assert list(rebuilt.state_dict()) == list(gm.state_dict())
    check_same_graph(gm, rebuilt)


def test_training_flags_are_kept():
    """Of the graph, of graphs in it, and of the modules between."""
    gm = held().eval()
    assert not rebuild(gm)[1].training
    assert rebuild(gm.train())[1].training


def test_tensors_that_are_arguments_have_records():
    """FX allows a tensor as an argument, without a module to hold it."""
    gm = torch.fx.symbolic_trace(lambda x: x.relu())
    relu = next(iter(gm.graph.find_nodes(op="call_method", target="relu")))
    relu.args = (*relu.args, torch.ones(2))
    desc, rebuilt = rebuild(gm)
    assert isinstance(desc.nodes[1].args[1], TensorValue)
    assert list(rebuilt.graph.nodes)[1].args[1].shape == (2,)


# --- devices --------------------------------------------------------------------------------------

CUDA = TorchConstValue(kind="device", name="cuda:1")


def to_cpu(name):
    """Everything that is not on the CPU goes there."""
    return "cpu" if name.partition(":")[0] != "meta" else name


MOVED = [
    (calling(function("torch.zeros"), 2, device=CUDA), "torch.zeros(2, device = device(type='cpu'))"),
    (calling(function("torch.zeros"), 2, device="cuda"), "torch.zeros(2, device = 'cpu')"),
    (calling("to", NodeValue(index=0), "cuda:1"), "x.to('cpu')"),
    (calling("to", NodeValue(index=0), CUDA, non_blocking=True),
     "x.to(device(type='cpu'), non_blocking = True)"),
    (calling("cuda", NodeValue(index=0)), "x.to(device(type='cpu'))"),
    (calling("cuda", NodeValue(index=0), 1), "x.to(device(type='cpu'))"),
    (calling("cuda", NodeValue(index=0), CUDA, True), "x.to(device(type='cpu'), non_blocking = True)"),
    (calling(function("torch.amp.autocast_mode._enter_autocast"), "cuda", None, True, None),
     "torch.amp.autocast_mode._enter_autocast('cpu', None, True, None)"),
    (calling(function("torch.tensor"), ListValue(items=(CUDA,))), "torch.tensor([device(type='cpu')])"),
    (calling("add", NodeValue(index=0), "cuda"), "x.add('cuda')"),
]  # fmt: skip


@pytest.mark.parametrize(("desc", "code"), MOVED, ids=[c for _, c in MOVED])
def test_devices_of_calls_move(desc, code):
    """Constants, strings where a device is meant, and methods that are named after a device."""
    assert f"call = {code}" in decode(desc, retarget=to_cpu).code


def test_devices_stay_without_a_map():
    """And methods stay methods."""
    assert "x.cuda()" in decode(calling("cuda", NodeValue(index=0))).code
    assert "x.cuda()" in decode(calling("cuda", NodeValue(index=0)), retarget=lambda n: n).code


def test_a_map_to_no_device_is_an_error():
    """The new name is checked before anything is built with it."""
    with pytest.raises(FormatError, match="not a device; found 'gpu'"):
        decode(calling(function("torch.zeros"), 2, device=CUDA), retarget=lambda _: "gpu")


# --- metadata -------------------------------------------------------------------------------------

NOT_OF_NODES = {
    # of inductor's kernel templates and of Triton
    "ACC_TYPE", "HOST_SIDE_TMA", "kpack", "matrix_instr_nonkdim", "waves_per_eu",
}  # fmt: skip
"""Keys of other things that are called `meta`."""


def test_every_metadata_key_of_torch_is_classified():
    """A torch that writes a new key makes this fail: it is carried, or it is dropped and why."""
    root = pathlib.Path(torch.__file__).parent
    pattern = re.compile(r"\w\.meta(?:\[\s*|\.(?:get|pop|setdefault)\(\s*)['\"](\w+)['\"]")
    found = set(_COPY_META_FIELDS)
    for folder in ("fx", "_dynamo", "_functorch", "_higher_order_ops", "_subclasses", "_inductor",
                   "_export", "export", "_library", "utils"):  # fmt: skip
        for file in (root / folder).rglob("*.py"):
            found.update(pattern.findall(file.read_text()))
    known = {
        *graph_meta.CARRIED, *graph_meta.DROPPED, *graph_meta.MODULE_CARRIED,
        *graph_meta.MODULE_DROPPED,
    }  # fmt: skip
    assert found - known - NOT_OF_NODES == set()
    assert all(graph_meta.DROPPED.values())
    assert not set(graph_meta.CARRIED) & set(graph_meta.DROPPED)


def traced():
    """A small graph whose metadata a test may fill."""
    gm = make_fx(lambda x: x.relu())(torch.ones(2))
    return gm, next(
        iter(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default))
    )


def test_unknown_and_unencodable_metadata_is_named():
    """Neither fails a capture; both can be read in the record."""
    gm, relu = traced()
    relu.meta.update(mine=1, custom={"a": object()}, recompute=None, grapharg=object())
    desc, rebuilt = rebuild(gm)
    assert desc.nodes[1].dropped_meta == (
        ("mine", "unknown to this version"),
        (
            "custom",
            "meta['custom']['a']: a value has no record; expected a constant; "
            "found an object of builtins.object",
        ),
    )
    again = list(rebuilt.graph.nodes)[1].meta
    assert not {"mine", "custom", "grapharg"} & set(again)
    assert again["recompute"] is None


def test_notes_of_compilers_come_back():
    """Enumerations, provenance, source functions, module stacks, annotations, gradients' order."""
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
        source_fn_stack=[("relu", torch.relu), ("a", torch.nn.Linear), ("f", test_boxed_graphs_take_one_list)],
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
        ("f", f"{__name__}.test_boxed_graphs_take_one_list"),
    ]
    (source,) = again.meta["from_node"]
    assert (source.name, source.pass_name, source.action) == (
        "relu", "pass", [NodeSourceAction.REPLACE],
    )  # fmt: skip
    assert again.meta["torch_fn"] == ("relu_1", "function.relu")
    assert (x.meta["seq_nr"], again.meta["seq_nr"]) == (0, 7)


def test_a_note_about_a_missing_operator_does_not_stop_a_reader():
    """What a node was decomposed from need not be registered where the graph is read."""
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


def test_shared_metadata_is_stored_once_and_not_aliased():
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
"""Of one node each. Of some of it nodes that have the same share one record."""


def _meta_alone(gm):
    """The records of the metadata of each node, what is shared in its place."""
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
def test_metadata_of_many_nodes_is_that_of_each_alone(backwards):
    """Whatever nodes have in common, and in whatever order they come."""
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


def test_metadata_of_modules_is_not_that_of_nodes():
    """What a node may have is unknown on a module, whoever had it before."""
    gm, relu = traced()
    known = {"stack_trace": "text", "nn_module_stack": _path("x"), "tensor_dict": {}}
    relu.meta.update(known)
    gm.meta.update(known)
    desc = encode_graph(gm, MetaTensorDescriber())
    assert desc.meta == ()
    assert desc.dropped_meta == tuple((key, "unknown to this version") for key in known)


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
def test_stack_traces_come_back_letter_for_letter(text):
    """As frames where `traceback` printed them, as text otherwise."""
    gm, relu = traced()
    relu.meta["stack_trace"] = text
    desc, rebuilt = rebuild(gm)
    assert (desc.nodes[1].stack is not None) == (text in STACKS)
    assert list(rebuilt.graph.nodes)[1].meta["stack_trace"] == text


def test_file_names_can_be_shortened():
    """In frames and in text."""
    gm, relu = traced()
    relu.meta["stack_trace"] = STACKS[0].replace("a.py", "/home/me/a.py")
    gm.graph.output_node().meta["stack_trace"] = 'File "/home/me/b.py", line 1, in f'
    desc = encode_graph(gm, MetaTensorDescriber(), file_name=os.path.basename)
    assert desc.nodes[1].stack == StackDesc(
        frames=(FrameDesc(file="a.py", line=3, function="f", code="x = 1"),)
    )
    assert ("stack_trace", 'File "b.py", line 1, in f') in desc.nodes[2].meta


def test_records_do_not_depend_on_the_process():
    """Two interpreters with other addresses and counters write the same bytes."""
    script = """
import sys, torch
from torch_fakeify import codec
from torch_fakeify.describe import MetaTensorDescriber
from torch_fakeify.graph import encode_graph
junk = [torch.ones(1, requires_grad=True).sin() for _ in range(int(sys.argv[1]))]
def backend(gm, _):
    from torch._dynamo.backends.common import aot_autograd
    from functorch.compile import make_boxed_func
    def show(g, _):
        sys.stdout.write(codec.dumps(encode_graph(g, MetaTensorDescriber())).hex())
        return make_boxed_func(g.forward)
    sys.stdout.write(codec.dumps(encode_graph(gm, MetaTensorDescriber())).hex())
    return aot_autograd(fw_compiler=show)(gm, _)
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
torch.compile(model, backend=backend)(torch.ones(2, 2)).sum().backward()
"""
    outputs = [
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, count],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": count},
        ).stdout
        for count in ("3", "50")
    ]
    assert outputs[0]
    assert outputs[0] == outputs[1]
