"""Captures that hold every member of the format's closed sets between them."""

from __future__ import annotations

import collections
import dataclasses
import functools
import operator
from typing import TYPE_CHECKING, Any

import msgspec
import sympy
import torch
from full_env import full_env
from golden_kernels import with_fake_kernels
from golden_tensors import frame_of, graph_over, symbolic
from source_examples import cases as source_cases
from source_examples import make as make_source
from sympy.functions.elementary.piecewise import ExprCondPair
from torch._dynamo.source import LocalSource
from torch._dynamo.utils import (
    numpy_method_wrapper,
    numpy_operator_wrapper,
    numpy_to_tensor_wrapper,
)
from torch._functorch._aot_autograd import descriptors
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    RelaxedUnspecConstraint,
    ShapeEnv,
    StatefulSymbolicContext,
    StatelessSymbolicContext,
    StrictMinMaxConstraint,
    SubclassSymbolicContext,
    SymIntSymbolicContext,
)
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.fx.passes.shape_prop import TensorMetadata
from torch.fx.traceback import NodeSource, NodeSourceAction
from torch.utils import _pytree as pytree
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.singleton_int import SingletonInt
from torch.utils._sympy.value_ranges import ValueRanges

import torch_fakeify as tfk
from torch_fakeify.compat.torch_graphs import PATH_KEYS, meta_dataclasses
from torch_fakeify.encoding import exprs
from torch_fakeify.encoding.surroundings import CONFIG_MODULES
from torch_fakeify.records.frame import (
    AotGraphDesc,
    AutocastDesc,
    DeviceInfoDesc,
    FailureDesc,
    FakeModeDesc,
    ModesDesc,
    OperatorDesc,
    SettingDesc,
    SurroundingsDesc,
)
from torch_fakeify.records.shape_env import IMPLIED_KEYS, LocationDesc, OrderDesc
from torch_fakeify.records.tensor import (
    DictValue,
    ExprDesc,
    FloatValue,
    ListValue,
    SymbolNode,
    TupleValue,
)
from torch_fakeify.shape_env.snapshot import snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

S0, S1 = sympy.symbols("s0 s1", positive=True, integer=True)
U0 = sympy.Symbol("u0", integer=True)


def with_args(rows: Iterable[Any]) -> Any:
    """The capture of a graph that has each of some values among its arguments."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    for value in rows:
        graph.call_function(torch.ops.aten.alias.default, (x, value))
    graph.output((x,))
    return tfk.capture(torch.fx.GraphModule(torch.nn.Module(), graph), [torch.zeros(3)])


# --- expressions --------------------------------------------------------------------------------


def application(name: str) -> sympy.Basic:
    """An application of a function, unevaluated, to as many arguments as it needs."""
    if name == exprs._SINGLETON_INT:
        return SingletonInt(3, coeff=2)
    head = exprs.HEADS[name]
    count = max(head.low, 1)
    args: list[sympy.Basic] = [S0 * i + U0 for i in range(1, count + 1)]
    if head.domain == "bool":
        args = [sympy.Gt(S0, i + 7) for i in range(count)]
    elif head.domain == "pair":
        return ExprCondPair(S0, sympy.Gt(S0, 7))
    elif head.domain == "pieces":
        args = [application("ExprCondPair"), ExprCondPair(U0, sympy.true)]
    return exprs._apply(head, args)


def _sympy_functions() -> Any:
    names = [name for name, head in exprs.HEADS.items() if head.cls.__module__.startswith("sympy")]
    return with_args(application(name) for name in names if name != "ExprCondPair")


def _torch_functions() -> Any:
    names = [n for n, head in exprs.HEADS.items() if not head.cls.__module__.startswith("sympy")]
    return with_args(application(name) for name in (*names, exprs._SINGLETON_INT))


def _atoms() -> Any:
    numbers = (sympy.Integer(2) ** 70, sympy.Rational(-3, 7), sympy.Float("0.1", 40), int_oo)
    symbols = (sympy.Symbol("p"), sympy.Symbol("q", positive=True, real=True, commutative=True))
    return with_args((*exprs._ATOMS.values(), *numbers, *symbols))


def _shared_parts() -> Any:
    expr: Any = S0 + U0
    for _ in range(5):
        expr = sympy.Add(sympy.Mul(expr, expr, evaluate=False), S1, evaluate=False)
    return with_args([expr])


# --- sources and contexts -----------------------------------------------------------------------


def _sources() -> Any:
    found = [make_source(cls, args) for cls, rows in source_cases().items() for args in rows]
    names = [f"p{i}" for i in range(len(found))]
    gm = graph_over(names, names)
    for fx_node, source in zip(gm.graph.find_nodes(op="placeholder"), found, strict=True):
        fx_node._dynamo_source = source
    return tfk.capture(gm, list(range(len(found))))


def _contexts() -> Any:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    dims = list(DimDynamic)
    strides = [DimDynamic.INFER_STRIDE] * 3 + [DimDynamic.DYNAMIC, DimDynamic.DUCK]
    strict = StrictMinMaxConstraint(warn_only=True, vr=ValueRanges(2, 8))
    stateless = StatelessSymbolicContext(
        dynamic_sizes=dims,
        dynamic_strides=strides,
        constraint_sizes=[strict, RelaxedUnspecConstraint(warn_only=False), None, None, None],
        constraint_strides=[None, strict, None, None, None],
        specialize_on=[[lambda n: n == 8, lambda n: n % 16 == 0], [], [], [], []],
        shape_ids={3: "batch"},
        unbacked_bounds={3: (2, None)},
    )
    source = LocalSource("x", is_input=True)
    stateful = StatefulSymbolicContext(
        dynamic_sizes=[DimDynamic.DYNAMIC] * 2,
        view_base_context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.STATIC]),
        tensor_source=source,
        excluded_sizes=(None, 4),
    )
    subclass = SubclassSymbolicContext(
        dynamic_sizes=[DimDynamic.DYNAMIC] * 2,
        tensor_source=source,
        inner_contexts={"a": StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DUCK]), "b": None},
        track_outer_size_stride=False,
    )
    symint = SymIntSymbolicContext(constraint=strict)
    found = (stateless, stateful, subclass, symint)
    names = [f"t{i}" for i in range(len(found))]
    gm = graph_over(names, names)
    for fx_node, context in zip(gm.graph.find_nodes(op="placeholder"), found, strict=True):
        fx_node._fakeify_context = context
    with mode:
        return tfk.capture(gm, [torch.empty(4, 4) for _ in found])


# --- values -------------------------------------------------------------------------------------


def _values() -> Any:
    inf = float("inf")
    plain = (None, True, 7, 2**70, 2.5, "text\n", inf, -inf, float("nan"), 1j, complex(inf, -inf))
    containers = (
        (1, (2,)), [1, 2], immutable_list([1]), immutable_dict({"a": 1}), {"a": 1, 2: None},
        {1, 2}, frozenset({3}), slice(1, None, 2), slice(None, 5), range(1, 9, 2), ..., b"bytes",
        torch.Size([2, 3]),
    )  # fmt: skip
    of_torch = (
        torch.float8_e4m3fn, torch.device("cuda:1"), torch.strided, torch.channels_last,
        torch.per_tensor_affine, torch.ops.aten.add.Tensor,
    )  # fmt: skip
    classes = (torch.return_types.sort((torch.zeros(2), torch.zeros(2))),)
    sources = (LocalSource("y"),)
    return with_args((*plain, *containers, *of_torch, *classes, *sources))


def _callables() -> Any:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    body = graph.get_attr("body")
    for target, args in (
        (torch.ops.aten.sin.default, (x,)),
        (torch.ops.aten.add, (x, x)),
        (torch.ops.higher_order.cond, (True, body, body, (x,))),
        (torch.nn.functional.relu, (x,)),
        (torch.Size, ([2],)),
        (numpy_to_tensor_wrapper(torch._numpy.sin), (x,)),
        (numpy_method_wrapper("sum"), (x,)),
        (numpy_operator_wrapper(operator.add), (x, x)),
    ):
        graph.call_function(target, args)
    graph.call_method("sin", (x,), {})
    graph.call_module("plain.body", (x,))
    graph.output((x,), type_expr=torch.Tensor)
    inner = torch.fx.Graph()
    inner.output((inner.placeholder("y"),))
    root = torch.nn.Module()
    root.body = torch.fx.GraphModule(torch.nn.Module(), inner)
    root.plain = torch.nn.Module()
    root.plain.body = root.body
    return tfk.capture(torch.fx.GraphModule(root, graph), [torch.zeros(3)])


def _instances(names: Iterable[str]) -> list[Any]:
    """One of each class that stands in the metadata of nodes."""
    plain: dict[Any, Any] = {
        str: "name",
        int: 3,
        "str": "name",
        "IntLikeType": 2,
        descriptors.AOTInput: descriptors.PlainAOTInput(0),
        descriptors.DifferentiableAOTInput: descriptors.PlainAOTInput(0),
        descriptors.DifferentiableAOTOutput: descriptors.PlainAOTOutput(1),
        descriptors.AOTOutput: descriptors.PlainAOTOutput(1),
        "AOTOutput": descriptors.PlainAOTOutput(1),
    }
    changed = {"CallMethodKey": "item", "GetAttrKey": "values", "MappingKey": "key"}
    found: list[Any] = []
    for name in names:
        cls = meta_dataclasses()[name]
        fields = {
            f.name: changed[name] if name in changed else plain[f.type]
            for f in dataclasses.fields(cls)
        }
        found.append(cls(**fields))
    return found


def _notes() -> Any:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    action = [NodeSourceAction.CREATE]
    origin = NodeSource(x, "a pass", action)
    for note in _instances(name for name in meta_dataclasses() if name not in PATH_KEYS):
        fx_node = graph.call_function(torch.ops.aten.alias.default, (x,))
        fx_node.meta.update(desc=note, from_node=[origin], custom={"a": [1, 2]})
    for i, key in enumerate(_instances(PATH_KEYS)):
        fx_node = graph.call_function(torch.ops.aten.alias.default, (x,))
        bound = sympy.Symbol(f"u{i}", integer=True)
        fx_node.meta.update(unbacked_bindings={bound: (key,)}, unheard_of=1)
    fx_node.meta.update(custom={"a list": immutable_list([1]), "a dict": immutable_dict({"a": 1})})
    graph.output((x,))
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    gm.meta.update(num_activations=3, unheard_of=2)
    return tfk.capture(gm, [torch.zeros(3)])


def _structured() -> Any:
    """Arguments and results in every container."""
    leaf = torch.zeros(2)
    tree = {
        "a list": [leaf],
        "tuple": (leaf,),
        "ordered": collections.OrderedDict(x=leaf),
        "immutable": immutable_list([leaf]),
        "immutable dict": immutable_dict(y=leaf),
        "named": TensorMetadata(*[leaf] * 7),
    }
    leaves, spec = pytree.tree_flatten(((tree,), {}))
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(len(leaves))]
    graph.output(tuple(inputs))
    out = pytree.tree_structure(tuple(leaves))
    info = torch.fx.graph._PyTreeInfo(["tree"], spec, out)
    graph.set_codegen(torch.fx.graph._PyTreeCodeGen(info))
    return tfk.capture(torch.fx.GraphModule(torch.nn.Module(), graph), leaves)


def _boxed() -> Any:
    gm = graph_over([1], ["x"])
    gm.graph.set_codegen(torch.fx.graph._BoxedCodeGen())
    return tfk.capture(gm, [torch.zeros(3)])


def _module() -> Any:
    """Everything that hangs on a module."""
    root: Any = torch.nn.Module()
    root.weight = torch.nn.Parameter(torch.zeros(2, 3))
    root.register_buffer("kept", torch.ones(2))
    root.register_buffer("transient", torch.arange(3), persistent=False)
    root.constant = torch.tensor([1.0, 2.0])
    root.number = 7
    inner = torch.fx.Graph()
    inner.output((inner.placeholder("y"),))
    root.body = root.again = torch.fx.GraphModule(torch.nn.Module(), inner)
    root.body.__name__ = "body"
    root.holder = torch.nn.Module().eval()
    root.holder.bias = torch.nn.Parameter(torch.zeros(2))
    graph = torch.fx.Graph()
    x = graph.placeholder("x", default_value=3)
    names = ("weight", "kept", "transient", "constant", "number", "holder.bias")
    read = [graph.get_attr(name) for name in names]
    first = graph.call_module("body", (x,))
    second = graph.call_module("again", (first,))
    third = graph.call_function(torch.ops.aten.add.Tensor, (x, second), {"alpha": 2})
    fourth = graph.call_function(torch.ops.aten.add.Tensor, (x, third))
    x._users = dict.fromkeys((fourth, third, first))
    graph.output((*read, third, fourth))
    gm: Any = torch.fx.GraphModule(root, graph, "Named").eval()
    del gm._buffers["constant"]
    gm.constant = torch.tensor([1.0, 2.0])
    gm.register_buffer("transient", torch.arange(3), persistent=False)
    gm.torchdynamo_force_dynamic = True
    gm._param_name_to_source = {"weight": LocalSource("weight")}
    return tfk.capture(gm, [torch.zeros(3)], constants="small")


# --- the shape environment and the settings -----------------------------------------------------


def _environment() -> Any:
    return _over(snapshot(full_env()))


def _over(env: Any) -> Any:
    """A frame in an environment."""
    desc = frame_of([torch.zeros(3)], ["x"]).desc
    return tfk.Capture(msgspec.structs.replace(desc, shape_env=env))


def _orders() -> Any:
    """Every attribute of an environment in an order of its own."""
    env = snapshot(full_env())
    orders: list[OrderDesc] = []
    for table, implied in IMPLIED_KEYS.items():
        keys = [
            ExprDesc(nodes=(SymbolNode(s.name, s.assumptions),)) for s in env.symbols if implied(s)
        ]
        orders.append(OrderDesc(table=table, keys=tuple(reversed(keys))))
    kept = [order for order in env.orders if order.table == "deferred_runtime_asserts"]
    first, *guards = env.guards
    location = LocationDesc(user_text="a line of the user's", framework_text="a line of torch")
    guards = (msgspec.structs.replace(first, location=location), *guards)
    fields = (("a", "text"), ("b", 1), ("c", 2.5), ("d", True), ("e", None))
    return _over(
        msgspec.structs.replace(
            env,
            orders=(*orders, *kept),
            guards=guards,
            co_fields=fields,
            pending_fresh_unbacked_symbols=env.ignorable_fresh_unbacked_symbols,
        )
    )


def _settings() -> Any:
    modes = ModesDesc(
        grad_enabled=False,
        inference_mode=True,
        autocast=(AutocastDesc(device_type="cuda", enabled=True, dtype="bfloat16"),),
        autocast_cache_enabled=False,
        deterministic=True,
        deterministic_warn_only=True,
        default_dtype="float64",
        float32_matmul_precision="medium",
    )
    fake_mode = FakeModeDesc(
        allow_fallback_kernels=False,
        allow_non_fake_inputs=True,
        export=True,
        static_shapes=True,
        allow_scalar_outputs=True,
        allow_meta=False,
        allow_unsafe_data_ptr_access=True,
        nt_tensor_id_initial_count=3,
        nt_tensor_id_counter=5,
    )
    desc = frame_of([torch.zeros(3)], ["x"]).desc
    return tfk.Capture(msgspec.structs.replace(desc, modes=modes, fake_mode=fake_mode))


def _scalars() -> Any:
    """Symbolic numbers of every kind as inputs."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    x = mode.from_tensor(torch.zeros(4, 6), source=LocalSource("x"), symbolic_context=context)
    with mode:
        u = env.create_unbacked_symint()
        torch._check(u >= 2)
        torch._check(u <= x.shape[0] * 3)
        f = env.create_unspecified_symbol(2.5, LocalSource("f"), DimDynamic.DYNAMIC)
        one = torch.tensor(7)
        two = torch.tensor(2.5, dtype=torch.float64)
        items = [mode.from_tensor(t, source=LocalSource(n)) for n, t in (("i", one), ("d", two))]
        for item in items:
            item.item()
    half = env.create_symfloatnode(f, hint=2.5, source=LocalSource("f"))
    literal = torch.SymInt(x.shape[0].node.wrap_int(3))
    values = [x, x.shape[0] * 2, u, half, x.shape[0] > 3, literal, *items]
    return frame_of(values, ["x", "n", "u", "f", "b", "c", "i", "d"])


def _symbol_facts() -> Any:
    """A fake tensor of another environment, of which all was known that can be."""
    desc = symbolic(torch.zeros(4, 6)).desc
    facts = [{"shape_env": 1, "size_like": True, "upper": 64, "hint_override": 9}, {"hint": 2.5}]
    (entry,) = desc.inputs
    symbols = tuple(
        msgspec.structs.replace(symbol, **changes)
        for symbol, changes in zip(entry.tensor.symbols, facts, strict=True)
    )
    tensor = msgspec.structs.replace(entry.tensor, symbols=symbols)
    entry = msgspec.structs.replace(entry, tensor=tensor)
    return tfk.Capture(msgspec.structs.replace(desc, inputs=(entry,)))


def _in_state(state: Any) -> Any:
    """A frame that no backend has compiled."""
    return with_args([1]).with_state(state)


def _ended(kind: Any, how: str, message: str) -> Any:
    """A frame whose backend did not return."""
    failure = FailureDesc(type=how, message=message, backend="mine", kind=kind)
    desc = with_args([1]).with_state(None).desc
    return tfk.Capture(msgspec.structs.replace(desc, failure=failure, backend="mine"))


def _own_backend() -> Any:
    """A frame with the places of its backend and operators."""
    desc = msgspec.structs.replace(
        with_args([1]).with_state(None).desc,
        backend="compiler",
        backend_place="npu.backend:compiler",
        operator_modules=(("npu.twice", "npu.operators"),),
    )
    return tfk.Capture(desc)


def _of_aot(kind: Any) -> Any:
    """A graph of AOTAutograd."""
    desc = with_args([1]).with_state(None).desc
    aot = AotGraphDesc(kind=kind, forward_outputs=1 if kind == "joint" else 0)
    return tfk.Capture(msgspec.structs.replace(desc, aot=aot))


def _own_operators() -> Any:
    """A frame with the schemas of operators, of every kind of gradient."""
    rows: tuple[tuple[str, Any], ...] = (
        ("npu::bump(Tensor(a!) x, float by, *, ScalarType? dtype=None) -> ()", None),
        ("npu::split(Tensor x, SymInt[] sizes) -> Tensor[]", "composite"),
        ("npu::twice(Tensor x) -> Tensor", "formula"),
        ("npu::twice.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", "refused"),
    )
    operators = tuple(OperatorDesc(schema=schema, autograd=kind) for schema, kind in rows)
    tagged = msgspec.structs.replace(operators[0], tags=("cudagraph_unsafe", "pt2_compliant_tag"))
    desc = with_args([1]).with_state(None).desc
    return tfk.Capture(msgspec.structs.replace(desc, operators=(tagged, *operators[1:])))


def _surroundings() -> Any:
    """A frame of another machine, whose compiler had settings of every module and kind."""
    dynamo, inductor, functorch, fx = CONFIG_MODULES
    settings = (
        SettingDesc(module=dynamo, name="capture_scalar_outputs", value=True),
        SettingDesc(module=inductor, name="max_autotune_gemm_backends", value="ATEN"),
        SettingDesc(module=inductor, name="realize_opcount_threshold"),
        SettingDesc(module=inductor, name="debug_dir_root", value=".../debug", redacted=True),
        SettingDesc(module=functorch, name="activation_memory_budget", value=0.25),
        SettingDesc(module=fx, name="translation_validation_timeout", value=7),
        SettingDesc(
            module=inductor,
            name="cpp.cxx",
            value=TupleValue(items=(None, ListValue(items=("g++",)))),
            option=True,
        ),
        SettingDesc(
            module=inductor,
            name="fx_passes_numeric_check",
            value=DictValue(items=(("precision", FloatValue(text="inf")),)),
            option=True,
        ),
    )
    found = SurroundingsDesc(
        settings=settings,
        left_out=("torch._inductor.config.joint_custom_pre_pass", "options.hook"),
        mode="fast",
        options=(("level", 3),),
        environment=(("TORCHINDUCTOR_MAX_AUTOTUNE", "1"), ("TRITON_CACHE_MANAGER", "...")),
        python="3.12.4",
        system="Linux",
        machine="aarch64",
        devices=(
            DeviceInfoDesc(device="cpu", capability="SVE256"),
            DeviceInfoDesc(device="cuda:0", name="NVIDIA H100", capability="9.0"),
        ),
        versions=(("torch", "2.13.0+cu130"), ("triton", "3.7.1"), ("numpy", "2.4.6")),
        packages=(("torchao", "0.15.0"),),
    )
    desc = with_args([1]).with_state(None, seconds=12.5).desc
    return tfk.Capture(msgspec.structs.replace(desc, surroundings=found, backend="mine"))


def record_cases() -> dict[str, Callable[[], Any]]:
    """Name and maker of each capture."""
    return {
        "expressions_sympy": _sympy_functions,
        "expressions_torch": _torch_functions,
        "expressions_atoms": _atoms,
        "expressions_shared": _shared_parts,
        "sources": _sources,
        "contexts": _contexts,
        "values": _values,
        "callables": _callables,
        "notes": _notes,
        "structured": _structured,
        "boxed": _boxed,
        "module": _module,
        "environment": _environment,
        "environment_orders": _orders,
        "settings": _settings,
        "scalars": _scalars,
        "symbol_facts": _symbol_facts,
        "own_backend": _own_backend,
        **{
            f"aot_{kind}": functools.partial(_of_aot, kind)
            for kind in ("joint", "forward", "backward", "inference")
        },
        "operators": _own_operators,
        "fake_kernels": lambda: with_fake_kernels(with_args([1]).with_state(None).desc),
        "surroundings": _surroundings,
        "state_not_compiled": lambda: _in_state("not compiled"),
        "state_not_finished": lambda: _in_state("not finished"),
        "failure_crash": lambda: _ended("crashes", "SIGSEGV", "Segmentation fault"),
        "failure_exit": lambda: _ended("crashes", "exit status 3", ""),
        "failure_hang": lambda: _ended("hangs", "", ""),
        "failure_memory": lambda: _ended("out of memory", "", ""),
    }
