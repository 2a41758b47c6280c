"""What tests of graphs share: capturing real ones, rebuilding them, comparing both."""

from __future__ import annotations

import difflib
from typing import Any

import msgspec
import torch
from quiet import quiet
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.sym_node import SymNode
from torch.utils import _pytree as pytree

from torch_fakeify.convert.converter import MetaConverter
from torch_fakeify.describe.describer import MetaTensorDescriber
from torch_fakeify.encoding.exprs import decode_expr
from torch_fakeify.frames.graph.codec import decode_graph, encode_graph
from torch_fakeify.records.graph import GraphModuleDesc, NodeDesc
from torch_fakeify.records.tensor import FunctionValue, NodeValue, TupleValue
from torch_fakeify.serialization import document
from torch_fakeify.shape_env.restoring import restore
from torch_fakeify.shape_env.snapshot import snapshot

PYTHON_TYPES = {"int": (torch.SymInt, int), "float": (torch.SymFloat, float),
                "bool": (torch.SymBool, bool)}  # fmt: skip


def graphs_of(gm):
    """A graph module and the graphs inside it."""
    return [m for m in gm.modules() if isinstance(m, torch.fx.GraphModule)]


def fake_mode_of(gm) -> FakeTensorMode | None:
    """The mode of the fake tensors in a graph's metadata."""
    for graph in graphs_of(gm):
        for fx_node in graph.graph.nodes:
            values = [fx_node.meta.get("example_value"), fx_node.meta.get("val")]
            for value in pytree.tree_leaves(values):
                if isinstance(value, FakeTensor):
                    return value.fake_mode
    return None


class TensorBuilder:
    """Decodes graphs in a fresh fake mode whose shape environment is a restored copy."""

    def __init__(self, shape_env: Any | None) -> None:
        self.shape_env = None if shape_env is None else restore(snapshot(shape_env))
        self.mode = FakeTensorMode(shape_env=self.shape_env, allow_non_fake_inputs=True)
        self.converter = MetaConverter(self.mode, symbols="keep")

    def sym(self, desc):
        """A symbolic scalar of the restored environment, also where it is a constant."""
        symbolic, plain = PYTHON_TYPES[desc.kind]
        expr = decode_expr(desc.expr)
        return symbolic(SymNode(expr, self.shape_env, plain, desc.hint))

    def decode(self, desc: GraphModuleDesc, **kwargs):
        """The graph of a record."""
        return decode_graph(desc, convert=self.converter.from_desc, sym=self.sym, **kwargs)


def rebuild(gm):
    """The record of a graph, and the graph that comes of it."""
    with unset_fake_temporarily():
        mode = fake_mode_of(gm)
        desc = encode_graph(gm, MetaTensorDescriber(), constants="small")
        record = document.loads(document.dumps(desc))
        assert record == desc
        rebuilt = TensorBuilder(None if mode is None else mode.shape_env).decode(record)
    return desc, rebuilt


def code_of(gm) -> str | None:
    """The generated code, or ``None`` where FX itself cannot print the graph's constants."""
    try:
        return gm.code
    except (SyntaxError, NameError):
        return None


def without_drops(desc: GraphModuleDesc) -> GraphModuleDesc:
    """The record as if nothing had been left out: what is encoded a second time has no drops."""
    return msgspec.structs.replace(
        desc,
        nodes=tuple(msgspec.structs.replace(n, dropped_meta=()) for n in desc.nodes),
        dropped_meta=(),
        submodules=tuple((name, without_drops(sub)) for name, sub in desc.submodules),
    )


def dropped(desc: GraphModuleDesc) -> set[str]:
    """Keys of metadata that a record names as left out, in all its graphs."""
    found = {key for fx_node in desc.nodes for key, _ in fx_node.dropped_meta}
    for _, sub in desc.submodules:
        found |= dropped(sub)
    return found


def check_same_graph(gm, rebuilt) -> None:
    """Node for node: names, targets, arguments with their types, users in order, metadata keys."""
    for a, b in zip(graphs_of(gm), graphs_of(rebuilt), strict=True):
        assert type(a).__name__ == type(b).__name__
        assert a.training == b.training
        assert vars(a).get("__name__") == vars(b).get("__name__")
        for x, y in zip(a.graph.nodes, b.graph.nodes, strict=True):
            assert (x.op, x.name, repr(x.type)) == (y.op, y.name, repr(y.type))
            if type(x.target).__module__ == "torch._dynamo.utils":
                assert repr(x.target) == repr(y.target)
            else:
                assert x.target == y.target
            assert repr((x.args, x.kwargs)) == repr((y.args, y.kwargs))
            assert _types((x.args, x.kwargs)) == _types((y.args, y.kwargs))
            assert [u.name for u in x.users] == [u.name for u in y.users]
            assert [n.name for n in x.all_input_nodes] == [n.name for n in y.all_input_nodes]
        b.graph.lint()


def _types(arg: Any) -> Any:
    if isinstance(arg, (list, tuple)):
        return type(arg), [_types(item) for item in arg]
    if isinstance(arg, dict):
        return type(arg), [(_types(k), _types(v)) for k, v in arg.items()]
    if isinstance(arg, slice):
        return slice, [_types(item) for item in (arg.start, arg.stop, arg.step)]
    return type(arg)


def difference(a: Any, b: Any, path: str = "$") -> str | None:
    """Where two records first differ, and how; ``None`` if they are equal."""
    if type(a) is not type(b):
        return f"{path}: {a!r} is not {b!r}"
    if isinstance(a, msgspec.Struct):
        # How a converter sizes its storages, and which symbols that takes, is a law of its own.
        fields = [f for f in a.__struct_fields__ if f not in ("nbytes", "symbols")]
        parts = [(f".{f}", getattr(a, f), getattr(b, f)) for f in fields]
    elif isinstance(a, tuple) and len(a) == len(b):
        parts = [(f"[{i}]", x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    else:
        return None if a == b else f"{path}: {a!r} is not {b!r}"
    found = (difference(x, y, path + suffix) for suffix, x, y in parts)
    return next((d for d in found if d is not None), None)


def printed(gm) -> str:
    """The readable form, with strides and devices."""
    return gm.print_readable(print_output=False, include_stride=True, include_device=True)


def check(gm) -> tuple[GraphModuleDesc, torch.fx.GraphModule]:
    """The laws of one graph: same nodes, same code, same printed form, same record again."""
    desc, rebuilt = rebuild(gm)
    check_same_graph(gm, rebuilt)
    code = code_of(gm)
    assert code is None or code == rebuilt.code
    assert dropped(desc) == set(), dropped(desc)
    problem = "\n".join(difflib.unified_diff(printed(gm).split("\n"), printed(rebuilt).split("\n")))
    assert not problem, problem
    with unset_fake_temporarily():
        again = encode_graph(rebuilt, MetaTensorDescriber(), constants="small")
    problem = difference(without_drops(desc), again)
    assert problem is None, problem
    return desc, rebuilt


class Frames:
    """Backends that check every graph, and compare every run of the original and the rebuilt."""

    def __init__(self, *, run: bool = True) -> None:
        self.run = run
        self.graphs: list[torch.fx.GraphModule] = []
        self.descs: list[GraphModuleDesc] = []
        self.runs = 0

    def _checked(self, gm):
        desc, rebuilt = check(gm)
        self.graphs.append(gm)
        self.descs.append(desc)
        return rebuilt

    def dynamo(self, gm, _example_inputs):
        """A Dynamo backend that runs the graph eagerly."""
        rebuilt = self._checked(gm)
        return lambda *args: self._both(gm, rebuilt, args)

    def _both(self, gm, rebuilt, args):
        copies = [a.clone() if isinstance(a, torch.Tensor) and not a.requires_grad else a
                  for a in args]  # fmt: skip
        state = torch.get_rng_state()
        expected = gm(*args)
        if self.run:
            torch.set_rng_state(state)
            with quiet():
                actual = rebuilt(*copies)
            torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
            self.runs += 1
        return expected

    def aot(self):
        """A Dynamo backend that checks AOTAutograd's forward and backward graphs."""

        def compiler(gm, _example_inputs):
            from functorch.compile import make_boxed_func

            rebuilt = self._checked(gm)
            return make_boxed_func(lambda *args: self._both(gm, rebuilt, args))

        return aot_autograd(fw_compiler=compiler, bw_compiler=compiler)


def compile_and_run(function, *args, backend, dynamic=None, backward=True):
    """Compile with a backend, run, and run backward if there is anything to."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(
        capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True
    ):
        out = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
        leaves = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        if backward and any(t.requires_grad for t in leaves):
            sum(t.sum() for t in leaves if t.requires_grad).backward()
    return out


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


def decode(desc, **kwargs):
    """The graph of a record in an empty mode."""
    return TensorBuilder(None).decode(desc, **kwargs)


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
