"""The census of ``SymNode``, ``TrackedFake`` and ``ShapeEnv``, attribute by attribute."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import sympy
import torch
from census_frames import dense, in_backend, jagged_input, make_jagged
from env_attributes import assert_same_attributes
from torch._dynamo.source import AttrSource, LocalSource
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import torch_fakeify as tfk
from torch_fakeify.encoding.contexts import encode_context
from torch_fakeify.encoding.exprs import check_sym, encode_sym
from torch_fakeify.encoding.sources import encode_source
from torch_fakeify.records.frame import InputDesc
from torch_fakeify.records.redact_paths import short_paths
from torch_fakeify.records.tensor import ExprDesc, IntNode, NestedIntDesc, SymDesc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch_fakeify.frames.instances import Instance

# --- SymNode ------------------------------------------------------------------------------------


def assert_same_node(sym_node: Any, rebuilt: Any, env: Any, *, as_made: bool = False) -> None:
    """Check every attribute of a rebuilt symbolic scalar.

    Args:
        sym_node: the original.
        rebuilt: its twin.
        env: the ``ShapeEnv`` of the twin.
        as_made: whether the twin's expression is the original's before replacements.
    """
    assert type(rebuilt) is type(sym_node)
    if not isinstance(sym_node, SymNode):
        assert str(rebuilt) == str(sym_node)
        return
    assert rebuilt._expr == (sym_node._expr if as_made else sym_node.expr)
    assert rebuilt.pytype is sym_node.pytype
    assert type(rebuilt._hint) is type(sym_node._hint)
    assert str(rebuilt._hint) == str(sym_node._hint)
    assert rebuilt.constant == sym_node.constant
    assert type(rebuilt.constant) is type(sym_node.constant)
    assert rebuilt.shape_env is env
    assert rebuilt.expr == sym_node.expr
    assert not rebuilt.fx_node
    if rebuilt._expr_cache is not None:
        assert rebuilt._expr_ver == env._replacements_version_counter
        assert rebuilt._expr_cache == sym_node.expr


def scalars_of(value: Any) -> list[Any]:
    """Return sizes, strides, offset and memo of a tensor and its parts, or the scalar itself."""
    if isinstance(value, (list, tuple)):
        return [scalar for part in value for scalar in scalars_of(part)]
    if not isinstance(value, torch.Tensor):
        return [value]
    if is_traceable_wrapper_subclass(value):
        inner = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
        return [*value.shape, *value.stride(), *scalars_of(inner)]
    memos = [value.item_memo, value.nested_int_memo] if isinstance(value, FakeTensor) else []
    return [*value.shape, *value.stride(), value.storage_offset(), *memos]


def pairs(original: Any, rebuilt: Any) -> Iterator[tuple[Any, Any]]:
    """Return pairs of the symbolic scalars of two values, after a check of the plain ones."""
    for before, after in zip(scalars_of(original), scalars_of(rebuilt), strict=True):
        if isinstance(original, torch.Tensor) and type(after) is int:
            # A constant size is a number: `create_symintnode` makes no node for it.
            assert type(before) is int or before.node.expr == after
            continue
        assert type(before) is type(after), (original, rebuilt)
        if isinstance(before, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            yield before.node, after.node
        else:
            assert before == after


def replaced(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Replace symbols by others, and one by a number."""
    torch._check(x.shape[0] == y.shape[0] * 2)
    torch._check(z.shape[0] == 5)
    return (x[: y.shape[0]] + y).sum() * z


def unbacked(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Use data as a size, also a number that equals an input's."""
    u, v = y.tolist()
    torch._check(u == x.shape[0])
    torch._check(v >= 2)
    return torch.zeros(u), torch.ones(v) * 2, torch.nonzero(x), x.sum() > 3


def sums(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """Use long sums of symbols as sizes."""
    return torch.ones(a.shape[0] + b.shape[0] + c.shape[0] + d.shape[0]) * torch.cat([a, b, c, d])


def scalars(x: torch.Tensor, scale: float, n: int) -> torch.Tensor:
    """Use float, int and bool scalars."""
    return x[1:, ::2] * scale + n * x.shape[0]


FRAMES: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]], set[str]]] = {
    "dense": (dense, lambda: (torch.randn(5, 3), 7), {"backed"}),
    "replaced": (
        replaced,
        lambda: (torch.randn(8), torch.randn(4), torch.randn(5)),
        {"backed", "backed, replaced"},
    ),
    "unbacked": (
        unbacked,
        lambda: (torch.randn(4), torch.tensor([4, 3])),
        {"backed", "unbacked", "unbacked, replaced"},
    ),
    "sums": (sums, lambda: tuple(map(torch.randn, (3, 4, 5, 6))), {"backed", "sum"}),
    "scalars": (scalars, lambda: (torch.randn(6, 9).t(), 2.5, 4), {"backed"}),
    "jagged": (jagged_input, lambda: (make_jagged(),), {"backed", "nested int"}),
}
"""Programs with arguments, and the kinds of symbolic scalars in them."""


def kind_of(sym_node: Any) -> str:
    """Return the kind of a symbolic scalar, of which frames have some."""
    if sym_node.is_nested_int():
        return "nested int"
    if sym_node._optimized_summation:
        return "sum"
    kind = "unbacked" if sym_node._hint is None else "backed"
    return kind if sym_node.expr == sym_node._expr else f"{kind}, replaced"


@pytest.mark.parametrize("name", FRAMES)
def test_every_object_of_a_frame_is_rebuilt(name: str) -> None:
    """Scalars of inputs and of values in the graph, tracked tensors and the ShapeEnv are as recorded."""
    seen: set[str] = set()

    def check_pairs(original: Any, rebuilt: Any, env: Any, *, as_made: bool = False) -> None:
        for before, after in pairs(original, rebuilt):
            assert_same_node(before, after, env, as_made=as_made)
            seen.add(kind_of(before))

    def check(gm: Any, inputs: Any, capture: tfk.Capture, instance: Instance) -> None:
        env = instance.shape_env
        placeholders = gm.graph.find_nodes(op="placeholder")
        for fx_node, value in zip(placeholders, instance.inputs, strict=True):
            scalar = isinstance(value, (torch.SymInt, torch.SymFloat))
            check_pairs(fx_node.meta["example_value"], value, env, as_made=scalar)
        for fx_node, twin in zip(gm.graph.nodes, instance.gm.graph.nodes, strict=True):
            assert fx_node.name == twin.name
            check_pairs(fx_node.meta.get("example_value"), twin.meta.get("example_value"), env)
        for entry, fx_node in zip(capture.desc.inputs, placeholders, strict=True):
            assert entry.source == encode_source(fx_node.meta["grapharg"].source)
        check_tracked(instance)
        check_env(capture, instance)

    fn, args, kinds = FRAMES[name]
    in_backend(check, fn, *args())
    assert seen >= kinds


def check_tracked(instance: Instance) -> None:
    """Check that source, policy and metadata are the instance's."""
    tracked = TracingContext.get().fake_mode.shape_env.tracked_fakes
    assert tracked
    rebuilt = twins(instance)
    for entry in tracked:
        fake, context = rebuilt[entry.source.name]
        if isinstance(entry.fake, torch.SymFloat):
            fake = fake.item_memo  # Dynamo represents a float by a tensor
        is_tensor = isinstance(fake, torch.Tensor)
        for before, after in pairs(entry.fake, fake):
            assert_same_node(before, after, instance.shape_env, as_made=not is_tensor)
        if entry.symbolic_context is not None and is_tensor:
            assert (fake.dtype, fake.device) == (entry.fake.dtype, entry.fake.device)
            assert encode_context(context) == encode_context(entry.symbolic_context)


def check_env(capture: tfk.Capture, instance: Instance) -> None:
    """Check that a restored environment equals the original, and an instance's, up to shortened paths."""
    env = TracingContext.get().fake_mode.shape_env
    record = tfk.snapshot(env)
    assert_same_attributes(env, tfk.restore(record))
    assert_same_attributes(tfk.restore(capture.desc.shape_env), instance.shape_env)
    co_fields = capture.desc.shape_env.co_fields
    record = msgspec.structs.replace(short_paths(record), co_fields=co_fields)
    assert tfk.snapshot(instance.shape_env) == record == capture.desc.shape_env


def test_a_literal_is_rebuilt_as_one() -> None:
    """The node of a rebuilt literal has its ``constant``."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.empty(4), source=LocalSource("x"))
    gm = make_fx(torch.sin)(torch.empty(4))
    literals = [
        torch.SymInt(x.shape[0].node.wrap_int(3)),
        torch.SymFloat(x.shape[0].node.wrap_float(2.5)),
        torch.SymBool(x.shape[0].node.wrap_bool(True)),
    ]
    for fx_node in gm.graph.nodes:
        fx_node.meta["val"] = literals
    capture = tfk.capture(gm, [x])
    for loaded in (capture, tfk.Capture(tfk.loads(tfk.dumps(capture.desc)))):
        instance = loaded.instantiate()
        for fx_node in instance.gm.graph.nodes:
            for before, after in pairs(literals, fx_node.meta["val"]):
                assert before.constant is not None
                assert_same_node(before, after, instance.shape_env)


def test_a_literal_is_no_size_of_that_value() -> None:
    """The fingerprints of a literal and of a symbol with that value differ."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    gm = make_fx(torch.sin)(torch.empty(4))
    x = mode.from_tensor(torch.empty(4), source=LocalSource("x"))
    prints = set()
    for constant in (3, None):
        sym_node = SymNode(sympy.Integer(3), mode.shape_env, int, 3, constant=constant)
        capture = tfk.capture(gm, [x])
        entry = InputDesc(name="n", sym=encode_sym(torch.SymInt(sym_node)))
        desc = msgspec.structs.replace(capture.desc, inputs=(*capture.desc.inputs, entry))
        prints.add(tfk.Capture(desc).fingerprint())
    assert len(prints) == 2


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_rebuilt_sum_behaves_as_the_original(count: int) -> None:
    """Either path of an addition gives the same expression."""
    mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False))
    sizes = [
        mode.from_tensor(torch.empty(3 + i), source=LocalSource(f"x{i}")).shape[0] for i in range(8)
    ]
    total = sum(sizes[2:count], start=sizes[1])
    assert total.node._optimized_summation == (count > 2)
    with mode:
        x = torch.empty(total)
    instance = tfk.capture(make_fx(torch.sin)(torch.empty(4)), [x]).instantiate()
    again = instance.inputs[0].shape[0]
    env: Any = instance.shape_env
    for other in (sizes[0], sizes[7], sizes[1], sizes[5] + sizes[6], sizes[0] + sizes[7]):
        twin = env.create_symintnode(other.node.expr, hint=other.node.hint)
        for before, after in ((total + other, again + twin), (other + total, twin + again)):
            assert after.node.expr == before.node.expr
            assert after.node.expr.args == before.node.expr.args


NO_LITERAL = (
    "$.constant: not a literal; expected a number that is also the hint; found IntNode(value=3)"
)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hint": 4, "constant": True}, NO_LITERAL),
        ({"constant": True}, NO_LITERAL),
        ({"hint": 3.0}, "$.hint: a hint of another kind; expected int; found 3.0"),
        ({"hint": True}, "$.hint: a hint of another kind; expected int; found True"),
        ({"hint": 3, "kind": "bool"}, "$.hint: a hint of another kind; expected bool; found 3"),
        (
            {"hint": NestedIntDesc(1), "kind": "float"},
            "$.hint: a hint of another kind; expected float; found a nested int",
        ),
    ],
)
def test_a_contradictory_scalar_is_refused(fields: Any, message: str) -> None:
    """A literal is its hint, and a hint has the scalar's kind."""
    with pytest.raises(tfk.FormatError) as info:
        check_sym(SymDesc(expr=ExprDesc(nodes=(IntNode(3),)), **fields))
    assert str(info.value) == message


def test_a_damaged_scalar_of_a_capture_is_refused() -> None:
    """An instance checks the scalars that it makes, and refuses a damaged one."""
    captures: list[tfk.Capture] = []
    in_backend(lambda *frame: captures.append(frame[2]), dense, torch.randn(5, 3), 7)
    desc = captures[0].desc
    damaged = tuple(
        entry
        if entry.sym is None
        else msgspec.structs.replace(entry, sym=msgspec.structs.replace(entry.sym, constant=True))
        for entry in desc.inputs
    )
    with pytest.raises(tfk.FormatError, match=r"^\$\.constant: not a literal"):
        tfk.Capture(msgspec.structs.replace(desc, inputs=damaged)).instantiate()


# --- TrackedFake --------------------------------------------------------------------------------


def twins(instance: Instance) -> dict[str, tuple[Any, Any]]:
    """Return inputs of an instance and their parts, with their policies, by source name."""
    found: dict[str, tuple[Any, Any]] = {}
    contexts = instance.tracing_context.tensor_to_context
    placeholders = instance.gm.graph.find_nodes(op="placeholder")

    def add(source: Any, value: Any, context: Any) -> None:
        found[source.name] = (value, context)
        if not isinstance(value, torch.Tensor):
            return
        if value._base is not None:
            add(AttrSource(source, "_base"), value._base, getattr(context, "view_base_context", 0))
        if is_traceable_wrapper_subclass(value):
            for name in value.__tensor_flatten__()[0]:
                inner = getattr(context, "inner_contexts", {}).get(name)
                add(AttrSource(source, name), getattr(value, name), inner)

    for fx_node, value in zip(placeholders, instance.inputs, strict=True):
        add(fx_node._dynamo_source, value, contexts.get(value) if torch.is_tensor(value) else None)
    return found


def test_a_tracked_tensor_that_is_no_input_has_its_sizes() -> None:
    """The sizes of a tensor that the graph does not use are found by their sources' names."""

    def sized(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] == y.shape[0] else x * 3

    def check(gm: Any, inputs: Any, capture: tfk.Capture, instance: Instance) -> None:
        env = TracingContext.get().fake_mode.shape_env
        tracked = {t.source.name: t.fake for t in env.tracked_fakes}
        assert "L['y']" in tracked
        assert "L['y']" not in twins(instance)
        rebuilt_env: Any = instance.shape_env
        for i, size in enumerate(tracked["L['y']"].shape):
            symbol = rebuilt_env.source_to_var[f"L['y'].size()[{i}]"]
            assert rebuilt_env.simplify(symbol) == size.node.expr

    in_backend(check, sized, torch.randn(4, 3), torch.randn(4, 7))
