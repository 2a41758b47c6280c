"""Structure of recorded graphs: names, users, calling conventions, constants, devices."""

from __future__ import annotations

import pytest
import torch
from graph_checks import calling, check, check_same_graph, decode, function, rebuild
from torch.fx.experimental.proxy_tensor import make_fx

from torch_fakeify.describe.describer import MetaTensorDescriber
from torch_fakeify.errors import (
    FormatError,
    UnsupportedValueError,
)
from torch_fakeify.frames.graph.codec import encode_graph
from torch_fakeify.records.graph import CallingDesc
from torch_fakeify.records.tensor import (
    ListValue,
    NodeValue,
    TensorValue,
    TorchConstValue,
)

# --- names, users, structure ----------------------------------------------------------------------


def test_names_that_fx_would_not_choose_are_recorded():
    """After passes a graph's names depend on its history; the record has the actual ones."""
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


def test_the_order_of_users_is_recorded():
    """Users have the order in which uses were made, which after a pass may not be graph order."""
    gm = torch.fx.symbolic_trace(lambda x: (x.relu(), x.sin(), x.cos()))
    x = next(iter(gm.graph.nodes))
    relu, sin, cos = list(x.users)
    x.users.clear()
    x.users.update(dict.fromkeys([cos, relu, sin]))
    desc, rebuilt = rebuild(gm)
    assert desc.nodes[0].users == (3, 1, 2)
    assert [u.name for u in next(iter(rebuilt.graph.nodes)).users] == ["cos", "relu", "sin"]


def test_a_graph_used_under_two_names_is_one_graph():
    """Both names call the same module after decoding."""
    inner = torch.fx.symbolic_trace(lambda x: x.relu())
    root = torch.nn.Module()
    root.a, root.b = inner, inner
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_module("b", (graph.call_module("a", (x,)),)))
    desc, rebuilt = check(torch.fx.GraphModule(root, graph))
    assert desc.submodule_aliases == (("b", "a"),)
    assert rebuilt.a is rebuilt.b


def test_structured_inputs_and_outputs_round_trip():
    """A graph of ``make_fx`` with nested arguments takes and returns what the function did."""
    args = ({"w.0": torch.ones(2), "b": [torch.ones(2), None]}, (torch.ones(2),))
    gm = make_fx(lambda d, t: {"sum": d["w.0"] + t[0], "rest": (d["b"][0],)})(*args)
    desc, rebuilt = check(gm)
    assert desc.calling is not None
    assert str(rebuilt(*args)) == str(gm(*args))


class Own(torch.fx.graph.CodeGen):
    """A calling convention of its own."""


def _transformed(graph):
    graph.on_generate_code(lambda _: lambda body: body)


def _user_function(graph):
    (relu,) = graph.find_nodes(op="call_method", target="relu")
    relu.op, relu.target = "call_function", _transformed


class Unprintable:
    """A function of the user whose text cannot be had."""

    __name__ = "unprintable"

    def __call__(self, x):
        """Return the argument."""
        return x

    def __repr__(self):
        raise RuntimeError("no text")


def _user_object(graph):
    (relu,) = graph.find_nodes(op="call_method", target="relu")
    relu.op, relu.target = "call_function", Unprintable()


def _called_module(graph):
    with graph.inserting_before(graph.output_node()):
        graph.call_module("layer")


REFUSED = {
    "code": (_transformed, "$: the graph's code is transformed by a function"),
    "convention": (
        lambda graph: graph.set_codegen(Own()),
        "$: the graph has a calling convention of its own; expected torch.fx.graph.CodeGen; "
        "found Own. Flatten it: gm.graph.set_codegen(torch.fx.graph.CodeGen()).",
    ),
    "module": (
        _called_module,
        "$.nodes[2].target: the graph calls a module that is not a graph; "
        "found layer, a torch.nn.modules.linear.Linear. Trace through it, "
        "by torch.compile, make_fx or the graph_module of torch.export.export.",
    ),
    "user function": (_user_function, "$.nodes[1].target: "),
    "user object": (_user_object, "$.nodes[1].target: "),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_record_is_refused(name):
    """Code of the user, which a reader lacks; the error leads to the node."""
    change, message = REFUSED[name]
    gm = torch.fx.symbolic_trace(lambda x: x.relu())
    gm.layer = torch.nn.Linear(2, 2)
    change(gm.graph)
    with pytest.raises(UnsupportedValueError) as caught:
        encode_graph(gm, MetaTensorDescriber())
    assert str(caught.value).startswith(message)


def test_boxed_graphs_take_one_list():
    """Graphs of inductor's regional compilation take their inputs as a list."""
    from torch.fx.graph import _BoxedCodeGen

    gm = torch.fx.symbolic_trace(lambda x, y: x + y)
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    desc, rebuilt = check(gm)
    assert desc.calling == CallingDesc(boxed=True)
    assert rebuilt([torch.ones(1), torch.ones(1)]).item() == 2.0


# --- constants on the module ----------------------------------------------------------------------


class Holder(torch.nn.Module):
    """A module with tensors of every kind of attribute."""

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
    """Return a graph that reads them."""
    return torch.fx.symbolic_trace(Holder())


def test_data_is_recorded_only_on_request():
    """Without a request tensors are recorded without data, and the record lists them."""
    desc = encode_graph(held(), MetaTensorDescriber())
    assert desc.tensor_data == ()
    assert set(desc.without_data) == {name for name, _ in desc.tensors} == {
        "w", "big", "kept", "gone",
    }  # fmt: skip
    gm = decode(desc)
    assert [type(p).__name__ for p in gm.parameters()] == ["FakeTensor", "FakeTensor"] or all(
        isinstance(p, torch.nn.Parameter) for p in gm.parameters()
    )


def test_small_data_is_recorded_on_request():
    """Elements of any strides and dtype are equal; large tensors have no data."""
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


def test_training_flags_are_recorded():
    """The flags are those of the graph, of graphs inside it, and of the modules between."""
    gm = held().eval()
    assert not rebuild(gm)[1].training
    assert rebuild(gm.train())[1].training


def test_tensors_that_are_arguments_have_records():
    """FX allows a tensor as an argument, without a module that holds it."""
    gm = torch.fx.symbolic_trace(lambda x: x.relu())
    relu = next(iter(gm.graph.find_nodes(op="call_method", target="relu")))
    relu.args = (*relu.args, torch.ones(2))
    desc, rebuilt = rebuild(gm)
    assert isinstance(desc.nodes[1].args[1], TensorValue)
    assert list(rebuilt.graph.nodes)[1].args[1].shape == (2,)


# --- devices --------------------------------------------------------------------------------------

CUDA = TorchConstValue(kind="device", name="cuda:1")


def to_cpu(name):
    """Map every device but the CPU to the CPU."""
    return "cpu" if name.partition(":")[0] != "meta" else name


MOVED = [
    (calling("to", NodeValue(index=0), CUDA, non_blocking=True),
     "x.to(device(type='cpu'), non_blocking = True)"),
    (calling("cuda", NodeValue(index=0), CUDA, True), "x.to(device(type='cpu'), non_blocking = True)"),
    (calling(function("torch.tensor"), ListValue(items=(CUDA,))), "torch.tensor([device(type='cpu')])"),
    (calling(function("torch.zeros"), 2, device="cuda"), "torch.zeros(2, device = 'cpu')"),
    (calling("add", NodeValue(index=0), "cuda"), "x.add('cuda')"),
]  # fmt: skip


@pytest.mark.parametrize(("desc", "code"), MOVED, ids=[c for _, c in MOVED])
def test_devices_of_calls_move(desc, code):
    """Inside lists too, with the other arguments; ``tests/records/test_devices.py`` runs such calls."""
    assert f"call = {code}" in decode(desc, retarget=to_cpu).code


def test_devices_stay_without_a_map():
    """Methods that are named after a device are not changed either."""
    assert "x.cuda()" in decode(calling("cuda", NodeValue(index=0))).code
    assert "x.cuda()" in decode(calling("cuda", NodeValue(index=0)), retarget=lambda n: n).code


def test_a_map_to_no_device_is_an_error():
    """The new name is checked before anything is built with it."""
    with pytest.raises(FormatError, match="not a device; found 'gpu'"):
        decode(calling(function("torch.zeros"), 2, device=CUDA), retarget=lambda _: "gpu")
