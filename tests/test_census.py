"""The census: torch's attributes against the tables, rebuilt objects against the originals."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import sympy
import torch
from env_attributes import assert_same_attributes
from torch._dynamo.source import AttrSource, LocalSource
from torch._functorch import config as functorch_config
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import _config as shapes_config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, TrackedFake
from torch.nested._internal import nested_tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import torch_fakeify as tfk
from torch_fakeify.attribute_scan import attributes_in_source
from torch_fakeify.census import (
    FAKE_MODE_ATTRIBUTES,
    SHAPE_ENV_ATTRIBUTES,
    SYM_NODE_ATTRIBUTES,
    TRACKED_FAKE_ATTRIBUTES,
    unknown_attributes,
)
from torch_fakeify.contexts import encode_context
from torch_fakeify.desc import ExprDesc, IntNode, MetaTensorDesc, NestedIntDesc, SymDesc
from torch_fakeify.desc_frame import FakeModeDesc, InputDesc
from torch_fakeify.exprs import check_sym, encode_sym
from torch_fakeify.fake_modes import describe_fake_mode, make_fake_mode
from torch_fakeify.nested_ints import NestedInts
from torch_fakeify.paths import short_paths
from torch_fakeify.sources import encode_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch_fakeify.frame import Instance

TABLES = {
    ShapeEnv: SHAPE_ENV_ATTRIBUTES,
    FakeTensorMode: FAKE_MODE_ATTRIBUTES,
    SymNode: SYM_NODE_ATTRIBUTES,
    TrackedFake: TRACKED_FAKE_ATTRIBUTES,
}


def names(cls: type, how: str) -> set[str]:
    """The attributes of one class that cross in one way."""
    return {name for name, attribute in TABLES[cls].items() if attribute.how == how}


# --- the tables and torch -----------------------------------------------------------------------


def used_modes() -> list[FakeTensorMode]:
    """Fake tensor modes of every configuration, after use."""
    modes = [
        FakeTensorMode(),
        FakeTensorMode(shape_env=ShapeEnv(), export=True, allow_non_fake_inputs=True),
        FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_fallback_kernels=False),
    ]
    with functorch_config.patch(fake_tensor_propagate_real_tensors=True):
        modes.append(FakeTensorMode(shape_env=ShapeEnv()))
    with torch._dynamo.config.patch(fake_tensor_cache_crosscheck_enabled=True):
        modes.append(FakeTensorMode())
    for mode in modes:
        with mode, mode:
            torch.empty(2, 3).nonzero if mode.shape_env is None else torch.ones(2).nonzero()
            assert mode.enter_stack
        assert mode.stack
        mode.epoch += 1
        mode.reset_nt_tensor_id_counter()
    return modes


def used_nodes() -> list[SymNode]:
    """Symbolic scalars of every kind, after use, also under translation validation."""
    found: list[SymNode] = []
    for validation in (False, True):
        with shapes_config.patch(translation_validation=validation):
            env = ShapeEnv()
            symbol = env.create_symbol(5, LocalSource("n"))
            n = env.create_symintnode(symbol, hint=5, source=LocalSource("n"))
            u = env.create_unbacked_symint()
            torch._check(u == n)
            nodes = [x.node for x in (n, u, n + u, n * 2.5, n > 3, env.create_unbacked_symfloat())]
            nodes.append(n.node.wrap_int(3))
            assert all(sym_node.expr is not None for sym_node in nodes)
            found += nodes
    return found


def live(cls: type) -> set[str]:
    """The attributes that instances have."""
    objects: list[Any] = used_modes() if cls is FakeTensorMode else used_nodes()
    return {name for obj in objects for name in vars(obj)}


@pytest.mark.parametrize("cls", TABLES, ids=lambda cls: cls.__name__)
def test_the_table_has_what_torchs_source_has(cls: type) -> None:
    """Every assignment to an attribute that the class or a base of it makes is in the table."""
    found = attributes_in_source(cls)
    assert found <= set(TABLES[cls])
    assert {name for name, known in TABLES[cls].items() if known.everywhere} <= found


@pytest.mark.parametrize("cls", [FakeTensorMode, SymNode], ids=lambda cls: cls.__name__)
def test_live_objects_have_what_the_table_has(cls: type) -> None:
    """No live object has more, and what none has is data of the class or never set."""
    never = {"_dispatch_key"}
    of_the_class = {name for base in cls.__mro__ for name in vars(base)}
    everywhere = {name for name, known in TABLES[cls].items() if known.everywhere}
    assert live(cls) - set(TABLES[cls]) == set()
    assert everywhere - live(cls) - of_the_class <= never


def test_a_new_attribute_is_noticed() -> None:
    """Each of the two ways sees an attribute that a new torch might add, however it is set."""

    class NewMode(FakeTensorMode):
        declared: int

        def configure(self) -> None:
            (self.one, (self.two, *_)) = 1, (2, 3)
            self.three: int = 3
            self.epoch += 1
            object.__setattr__(self, "four", 4)
            self.__dict__["five"] = 5

    class NewTrackedFake(TrackedFake):
        __slots__ = ("six",)

    added = {"declared", "one", "two", "three", "four", "five"}
    assert attributes_in_source(NewMode) - set(FAKE_MODE_ATTRIBUTES) == added
    assert attributes_in_source(NewTrackedFake) - set(TRACKED_FAKE_ATTRIBUTES) == {"six"}
    mode = NewMode()
    assert unknown_attributes(mode, FAKE_MODE_ATTRIBUTES) == []
    mode.configure()
    assert unknown_attributes(mode, FAKE_MODE_ATTRIBUTES) == sorted(added - {"declared"})


@pytest.mark.parametrize(
    ("cls", "record", "others"),
    [
        (FakeTensorMode, FakeModeDesc, set()),
        (SymNode, SymDesc, set()),
        (TrackedFake, InputDesc, {"name", "value"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_tables_and_records_name_the_same_fields(cls: type, record: Any, others: set[str]) -> None:
    """Each carried attribute names fields that exist, and no field is unnamed."""
    named: set[str] = set()
    for name in names(cls, "carried"):
        named |= set(TABLES[cls][name].why.split(", "))
    inner = {field for field in named if field.startswith("tensor.")}
    assert {f.removeprefix("tensor.") for f in inner} <= set(MetaTensorDesc.__struct_fields__)
    assert named - inner == set(record.__struct_fields__) - others


# --- FakeTensorMode -----------------------------------------------------------------------------


def assert_same_mode(mode: FakeTensorMode, rebuilt: FakeTensorMode) -> None:
    """Every carried and derived attribute of a rebuilt mode."""
    assert type(rebuilt) is FakeTensorMode
    assert unknown_attributes(rebuilt, FAKE_MODE_ATTRIBUTES) == []
    plain = names(FakeTensorMode, "carried") - {"fake_tensor_converter"}
    counts = {"nt_tensor_id_initial_count", "nt_tensor_id_counter"}
    if describe_fake_mode(mode).nt_tensor_id_counter is None:
        plain -= counts
        assert rebuilt.nt_tensor_id_counter == nested_tensor._tensor_id_counter
    for name in plain:
        assert getattr(rebuilt, name) == getattr(mode, name), name
    assert rebuilt.fake_tensor_converter.export == mode.fake_tensor_converter.export
    assert (rebuilt.shape_env is None) == (mode.shape_env is None)
    assert rebuilt.shape_env is None or rebuilt.shape_env is not mode.shape_env
    assert rebuilt._mode_key == mode._mode_key
    assert "test_census" in rebuilt.stack
    assert not rebuilt.propagate_real_tensors
    assert not rebuilt.fake_tensor_converter.meta_converter.copy_data
    assert not rebuilt.enter_stack
    assert not rebuilt.in_kernel_invocation


def dense(x: torch.Tensor, n: int) -> torch.Tensor:
    """A frame with guards."""
    return x.flatten() * n if x.shape[0] > 3 else x


def jagged_inside(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """A frame that makes a jagged tensor itself."""
    return torch.nested.nested_tensor_from_jagged(values, offsets) * 2


def jagged_input(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A frame with a jagged input."""
    return x * 2, x.offsets() + 1


def make_jagged() -> torch.Tensor:
    """A jagged tensor of three rows."""
    return torch.nested.nested_tensor_from_jagged(torch.randn(6, 5), torch.tensor([0, 2, 3, 6]))


def in_backend(
    check: Callable[..., None], fn: Callable[..., Any], *args: Any, dynamic: bool = True
) -> None:
    """Call ``check`` with a frame, its inputs, its capture and an instance, inside a backend."""
    calls: list[int] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        capture = tfk.capture(gm, inputs)
        check(gm, inputs, capture, capture.instantiate())
        calls.append(1)
        return gm.forward

    torch._dynamo.reset()
    config = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(specialize_float=False, **config):
        torch.compile(fn, backend=backend, dynamic=dynamic)(*args)
    torch._dynamo.reset()
    assert calls == [1]


@pytest.mark.parametrize("dynamic", [True, False])
def test_the_mode_of_a_frame(dynamic: bool) -> None:
    """The mode that Dynamo gives to a backend is rebuilt with its settings."""

    def check(gm: Any, inputs: Any, capture: tfk.Capture, instance: Instance) -> None:
        mode = TracingContext.get().fake_mode
        assert_same_mode(mode, instance.fake_mode)
        assert not instance.fake_mode._allow_unsafe_data_ptr_access
        assert capture.desc.fake_mode == FakeModeDesc()

    in_backend(check, dense, torch.randn(5, 3), 7, dynamic=dynamic)


def raggedness(env: Any) -> dict[str, Any]:
    """The symbols of a ``ShapeEnv`` by the nested ints that they stand for."""
    return {str(n): symbol for n, symbol in env.val_to_var.items() if isinstance(n, torch.SymInt)}


def test_a_retrace_finds_the_raggedness_of_intermediates_again() -> None:
    """Counted on from the recorded number, a jagged intermediate has the symbol that it had."""

    def check(gm: Any, inputs: Any, capture: tfk.Capture, instance: Instance) -> None:
        mode = TracingContext.get().fake_mode
        assert_same_mode(mode, instance.fake_mode)
        recorded = raggedness(mode.shape_env)
        assert f"j{mode.nt_tensor_id_initial_count}" in recorded
        before = raggedness(instance.shape_env)
        assert recorded.items() <= before.items()
        instance.compile("aot_eager")
        assert raggedness(instance.shape_env) == before
        assert instance.fake_mode.nt_tensor_id_initial_count == mode.nt_tensor_id_initial_count

    make_jagged()
    in_backend(check, jagged_inside, torch.randn(6, 5), torch.tensor([0, 2, 3, 6]))


def export_frame() -> tuple[FakeTensorMode, tfk.Capture]:
    """The mode and the capture of a graph that ``torch.export`` made."""
    dims = {"x": {0: torch.export.Dim.DYNAMIC}, "n": None}

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
            return dense(x, n)

    program = torch.export.export(Module(), (torch.randn(5, 3), 7), dynamic_shapes=dims)
    placeholders = program.graph.find_nodes(op="placeholder")
    inputs = [n.meta["val"] for n in placeholders]
    return inputs[0].fake_mode, tfk.capture(program.graph_module, inputs)


def test_the_mode_of_an_exported_program() -> None:
    """Export's mode takes real tensors as inputs and tracks no scalars."""
    mode, capture = export_frame()
    assert capture.desc.fake_mode.export
    assert capture.desc.fake_mode.allow_non_fake_inputs
    assert_same_mode(mode, capture.instantiate().fake_mode)


def static_frame() -> tuple[FakeTensorMode, tfk.Capture]:
    """A graph of ``make_fx(..., tracing_mode="fake")`` with a size of data in it."""
    config = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(**config):
        gm = make_fx(lambda x: x.nonzero() + 1, tracing_mode="fake")(torch.ones(3, 4))
    (x,) = (n.meta["val"] for n in gm.graph.find_nodes(op="placeholder"))
    return x.fake_mode, tfk.capture(gm, [x])


def test_a_mode_of_static_shapes_that_has_a_shape_env() -> None:
    """It stays one, and its unbacked sizes stay symbols."""
    mode, capture = static_frame()
    assert mode.static_shapes
    assert mode.shape_env is not None
    instance = capture.instantiate()
    assert_same_mode(mode, instance.fake_mode)
    shapes = [n.meta["val"].shape for n in instance.gm.graph.nodes if n.op == "call_function"]
    assert [str(s) for s in shapes] == ["torch.Size([u0, 2])"] * 2
    assert instance.fake_mode.from_tensor(torch.empty(3, 4)).shape == (3, 4)


def flipped_mode() -> FakeTensorMode:
    """A mode of which every setting that is carried is not the default."""
    with functorch_config.patch(fake_tensor_allow_meta=False):
        mode = FakeTensorMode(
            shape_env=ShapeEnv(),
            allow_fallback_kernels=False,
            allow_non_fake_inputs=True,
            static_shapes=True,
            export=True,
        )
    mode.allow_scalar_outputs = True
    mode.nt_tensor_id_initial_count, mode.nt_tensor_id_counter = 7, 9
    mode.shape_env.create_symbol(torch.SymInt(nested_tensor.NestedIntNode(5, 1)), LocalSource("j"))
    return mode


def graph_of(mode: FakeTensorMode) -> tfk.Capture:
    """A capture with one input of a mode."""
    x = mode.from_tensor(torch.empty(3))
    return tfk.capture(make_fx(torch.sin)(torch.empty(3)), [x])


def test_every_setting_of_a_mode_crosses() -> None:
    """No setting of the flipped mode is the default, and each one is in the instance's."""
    mode = flipped_mode()
    capture = graph_of(mode)
    default = FakeModeDesc()
    for field in FakeModeDesc.__struct_fields__:
        unlike = getattr(capture.desc.fake_mode, field) != getattr(default, field)
        assert unlike, field
    assert_same_mode(mode, capture.instantiate().fake_mode)


def test_this_process_configuration_does_not_reach_an_instance() -> None:
    """The settings are the record's, whatever torch is told here."""
    with functorch_config.patch(
        fake_tensor_allow_meta=False,
        fake_tensor_allow_unsafe_data_ptr_access=True,
        fake_tensor_propagate_real_tensors=True,
    ):
        mode = make_fake_mode(FakeModeDesc(), None)
    assert mode.allow_meta
    assert not mode._allow_unsafe_data_ptr_access
    assert not mode.propagate_real_tensors
    assert not mode.fake_tensor_converter.meta_converter.copy_data


def settings_of(mode: Any) -> dict[str, Any]:
    """The carried settings of a mode as plain data."""
    found = {n: getattr(mode, n) for n in sorted(names(FakeTensorMode, "carried"))}
    return {**found, "fake_tensor_converter": mode.fake_tensor_converter.export}


def test_the_modes_of_captures_in_another_process(tmp_path: Any) -> None:
    """A fresh interpreter gives the same settings, from the files alone."""
    frames = [export_frame(), static_frame(), (mode := flipped_mode(), graph_of(mode))]

    def check(gm: Any, inputs: Any, capture: tfk.Capture, instance: Instance) -> None:
        frames.append((TracingContext.get().fake_mode, capture))

    make_jagged()
    in_backend(check, jagged_input, make_jagged())
    for i, (_, capture) in enumerate(frames):
        capture.save(tmp_path / f"{i}.fkf")
    script = (
        "import json, sys\n"
        "import torch_fakeify as tfk\n"
        "for path in sys.argv[2:]:\n"
        "    mode = tfk.Capture.load(path).instantiate().fake_mode\n"
        "    found = {n: getattr(mode, n) for n in json.loads(sys.argv[1])}\n"
        "    found['fake_tensor_converter'] = mode.fake_tensor_converter.export\n"
        "    print(json.dumps(found))\n"
    )
    attributes = json.dumps(sorted(names(FakeTensorMode, "carried")))
    paths = [str(tmp_path / f"{i}.fkf") for i in range(len(frames))]
    done = subprocess.run(
        [sys.executable, "-c", script, attributes, *paths], capture_output=True, check=True
    )
    lines = [json.loads(line) for line in done.stdout.decode().splitlines()]
    for (mode, capture), line in zip(frames, lines, strict=True):
        expected = settings_of(mode)
        if capture.desc.fake_mode.nt_tensor_id_counter is None:
            for counts in (expected, line):
                del counts["nt_tensor_id_counter"], counts["nt_tensor_id_initial_count"]
        assert line == expected
    assert frames[-1][1].desc.fake_mode.nt_tensor_id_counter is not None


def test_a_mode_of_another_class_is_refused() -> None:
    """What a subclass adds would be lost."""

    class OwnMode(FakeTensorMode):
        pass

    with pytest.raises(tfk.CaptureError) as info:
        graph_of(OwnMode())
    assert str(info.value) == (
        "a fake tensor mode of a class of its own; expected FakeTensorMode; found "
        f"{OwnMode.__module__}.{OwnMode.__qualname__}. Capture with inputs of a plain "
        "FakeTensorMode"
    )


def test_an_unknown_attribute_of_a_mode_is_refused_by_name() -> None:
    """State that the table does not know is not dropped."""
    mode = FakeTensorMode()
    mode.new_in_some_torch = True
    with pytest.raises(tfk.CaptureError) as info:
        graph_of(mode)
    assert str(info.value) == (
        "the FakeTensorMode has an attribute that a record does not know; expected the attributes "
        "of torch's FakeTensorMode; found new_in_some_torch. Remove the attribute, or use a "
        "version of torch_fakeify for this torch"
    )


@pytest.mark.parametrize(
    "counts", [(3, None), (None, 3), (-1, 3), (4, 3), (0, 1 << 48), (1 << 70, 1 << 70)]
)
def test_numbers_that_are_no_nested_ints_are_refused(counts: tuple[Any, Any]) -> None:
    """A file cannot move torch's counters out of their range."""
    desc = FakeModeDesc(nt_tensor_id_initial_count=counts[0], nt_tensor_id_counter=counts[1])
    with pytest.raises(tfk.FormatError) as info:
        make_fake_mode(desc, None)
    assert str(info.value) == (
        "$.fake_mode: numbers of nested ints that torch does not give; expected 0 <= "
        "nt_tensor_id_initial_count <= nt_tensor_id_counter < 281474976710656, or neither; found "
        f"{counts[0]} and {counts[1]}"
    )


def test_a_kept_nested_int_is_one_of_torchs() -> None:
    """A record cannot move the process's counter out of its range."""
    for number in (1 << 48, -1):
        with pytest.raises(tfk.FormatError) as info:
            NestedInts(FakeTensorMode(), keep=True).make(NestedIntDesc(number))
        assert str(info.value) == (
            "a nested int that torch does not give; expected a number below 281474976710656; "
            f"found {number}"
        )
    assert nested_tensor._tensor_id_counter < 1 << 48


# --- SymNode ------------------------------------------------------------------------------------


def assert_same_node(sym_node: Any, rebuilt: Any, env: Any, *, as_made: bool = False) -> None:
    """Every attribute of a rebuilt symbolic scalar.

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
    """The sizes, strides, offset and memo of a tensor and of its parts, or the scalar itself."""
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
    """Symbolic scalars of two values beside one another; the plain ones are equal."""
    for before, after in zip(scalars_of(original), scalars_of(rebuilt), strict=True):
        if isinstance(original, torch.Tensor) and type(after) is int:
            # A size that is a number is that number: `create_symintnode` makes no node for it.
            assert type(before) is int or before.node.expr == after
            continue
        assert type(before) is type(after), (original, rebuilt)
        if isinstance(before, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            yield before.node, after.node
        else:
            assert before == after


def replaced(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Symbols that others replace, and one that a number does."""
    torch._check(x.shape[0] == y.shape[0] * 2)
    torch._check(z.shape[0] == 5)
    return (x[: y.shape[0]] + y).sum() * z


def unbacked(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Data that is a size, also one that turns out to be an input's."""
    u, v = y.tolist()
    torch._check(u == x.shape[0])
    torch._check(v >= 2)
    return torch.zeros(u), torch.ones(v) * 2, torch.nonzero(x), x.sum() > 3


def sums(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """Sizes that are long sums of symbols."""
    return torch.ones(a.shape[0] + b.shape[0] + c.shape[0] + d.shape[0]) * torch.cat([a, b, c, d])


def scalars(x: torch.Tensor, scale: float, n: int) -> torch.Tensor:
    """Float, int and bool scalars."""
    return x[1:, ::2] * scale + n * x.shape[0]


def frames() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Programs by what they exercise."""
    randn = torch.randn
    return {
        "dense": (dense, (randn(5, 3), 7)),
        "replaced": (replaced, (randn(8), randn(4), randn(5))),
        "unbacked": (unbacked, (randn(4), torch.tensor([4, 3]))),
        "sums": (sums, (randn(3), randn(4), randn(5), randn(6))),
        "scalars": (scalars, (randn(6, 9).t(), 2.5, 4)),
        "jagged": (jagged_input, (make_jagged(),)),
    }


FRAMES = ("dense", "replaced", "unbacked", "sums", "scalars", "jagged")


@pytest.mark.parametrize("name", FRAMES)
def test_every_symbolic_scalar_of_a_frame(name: str) -> None:
    """Those of inputs and of all values in the graph's metadata are rebuilt with what they were."""
    seen: set[str] = set()

    def check(gm: Any, inputs: Any, capture: tfk.Capture, instance: Instance) -> None:
        env = instance.shape_env
        for fx_node, twin, value in zip(
            gm.graph.find_nodes(op="placeholder"),
            instance.gm.graph.find_nodes(op="placeholder"),
            instance.inputs,
            strict=True,
        ):
            assert fx_node.name == twin.name
            scalar = isinstance(value, (torch.SymInt, torch.SymFloat))
            for before, after in pairs(fx_node.meta["example_value"], value):
                assert_same_node(before, after, env, as_made=scalar)
                seen.add(kind_of(before))
        for fx_node, twin in zip(gm.graph.nodes, instance.gm.graph.nodes, strict=True):
            for before, after in pairs(
                fx_node.meta.get("example_value"), twin.meta.get("example_value")
            ):
                assert_same_node(before, after, env)
                seen.add(kind_of(before))

    def kind_of(sym_node: Any) -> str:
        if sym_node.is_nested_int():
            return "nested int"
        if sym_node._optimized_summation:
            return "sum"
        if sym_node._hint is None:
            return "unbacked" if sym_node.expr == sym_node._expr else "unbacked, replaced"
        return "backed" if sym_node.expr == sym_node._expr else "backed, replaced"

    fn, args = frames()[name]
    in_backend(check, fn, *args)
    assert (
        seen
        >= {
            "dense": {"backed"},
            "replaced": {"backed", "backed, replaced"},
            "unbacked": {"backed", "unbacked", "unbacked, replaced"},
            "sums": {"backed", "sum"},
            "scalars": {"backed"},
            "jagged": {"backed", "nested int"},
        }[name]
    )


def test_a_literal_stays_one() -> None:
    """The node of a number that the program wrote out keeps ``constant``."""
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
    """The fingerprint tells a number that the program wrote from a symbol's that is one."""
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
def test_a_sum_goes_on_as_the_original_does(count: int) -> None:
    """Which way an addition takes shows in no result: the expressions are the very same."""
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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hint": 4, "constant": True}, "$.constant: not a literal; expected a number that is "
         "also the hint; found IntNode(value=3)"),
        ({"constant": True}, "$.constant: not a literal; expected a number that is also the hint; "
         "found IntNode(value=3)"),
        ({"hint": 3.0}, "$.hint: a hint of another kind; expected int; found 3.0"),
        ({"hint": True}, "$.hint: a hint of another kind; expected int; found True"),
        ({"hint": 3, "kind": "bool"}, "$.hint: a hint of another kind; expected bool; found 3"),
    ],
)  # fmt: skip
def test_a_scalar_that_contradicts_itself_is_refused(fields: Any, message: str) -> None:
    """A literal is its hint, and a hint is of the scalar's kind."""
    with pytest.raises(tfk.FormatError) as info:
        check_sym(SymDesc(expr=ExprDesc(nodes=(IntNode(3),)), **fields))
    assert str(info.value).startswith(message)


def test_a_damaged_scalar_of_a_capture_is_refused() -> None:
    """An instance checks the scalars that it makes."""
    captures: list[tfk.Capture] = []

    def check(gm: Any, inputs: Any, capture: tfk.Capture, instance: Instance) -> None:
        captures.append(capture)

    in_backend(check, dense, torch.randn(5, 3), 7)
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
    """The inputs of an instance and their parts, with their policies, by the names of sources."""
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


@pytest.mark.parametrize("name", FRAMES)
def test_every_tracked_fake_of_a_frame(name: str) -> None:
    """Source, policy and metadata are the instance's; a tensor that is no input has its symbols."""

    def check(gm: Any, inputs: Any, capture: tfk.Capture, instance: Instance) -> None:
        tracked = TracingContext.get().fake_mode.shape_env.tracked_fakes
        assert tracked
        rebuilt = twins(instance)
        for entry in tracked:
            fake, context = rebuilt[entry.source.name]
            if isinstance(entry.fake, torch.SymFloat):
                fake = fake.item_memo  # Dynamo passes a float as a tensor
            for before, after in pairs(entry.fake, fake):
                scalar = not isinstance(fake, torch.Tensor)
                assert_same_node(before, after, instance.shape_env, as_made=scalar)
            if entry.symbolic_context is None or not isinstance(fake, torch.Tensor):
                continue
            assert fake.dtype == entry.fake.dtype
            assert fake.device == entry.fake.device
            assert encode_context(context) == encode_context(entry.symbolic_context)
        for entry, fx_node in zip(
            capture.desc.inputs, gm.graph.find_nodes(op="placeholder"), strict=True
        ):
            assert entry.source == encode_source(fx_node.meta["grapharg"].source)

    fn, args = frames()[name]
    in_backend(check, fn, *args)


def test_a_tracked_tensor_that_is_no_input_keeps_its_sizes() -> None:
    """The sizes of a tensor that the graph does not use are known by their sources' names."""

    def sized(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] == y.shape[0] else x * 3

    def check(gm: Any, inputs: Any, capture: tfk.Capture, instance: Instance) -> None:
        env = TracingContext.get().fake_mode.shape_env
        tracked = {t.source.name: t.fake for t in env.tracked_fakes}
        assert "L['y']" in tracked
        assert "L['y']" not in twins(instance)
        known: Any = instance.shape_env
        for i, size in enumerate(tracked["L['y']"].shape):
            symbol = known.source_to_var[f"L['y'].size()[{i}]"]
            assert known.simplify(symbol) == size.node.expr

    in_backend(check, sized, torch.randn(4, 3), torch.randn(4, 7))


# --- ShapeEnv -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FRAMES)
def test_the_environment_of_a_frame_attribute_by_attribute(name: str) -> None:
    """Restored it is the original; in an instance it is that too, but for shortened paths."""

    def check(gm: Any, inputs: Any, capture: tfk.Capture, instance: Instance) -> None:
        env = TracingContext.get().fake_mode.shape_env
        record = tfk.snapshot(env)
        assert_same_attributes(env, tfk.restore(record))
        assert_same_attributes(tfk.restore(capture.desc.shape_env), instance.shape_env)
        co_fields = capture.desc.shape_env.co_fields
        record = msgspec.structs.replace(short_paths(record), co_fields=co_fields)
        assert tfk.snapshot(instance.shape_env) == record == capture.desc.shape_env

    fn, args = frames()[name]
    in_backend(check, fn, *args)
