"""The census: torch's attributes compared with the tables, rebuilt objects with the originals."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from census_frames import dense, in_backend, jagged_input, jagged_inside, make_jagged
from processes import fresh
from torch._dynamo.source import LocalSource
from torch._functorch import config as functorch_config
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config as shapes_config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, TrackedFake
from torch.nested._internal import nested_tensor

import torch_fakeify as tfk
from torch_fakeify.compat.attribute_policies import (
    FAKE_MODE_ATTRIBUTES,
    SHAPE_ENV_ATTRIBUTES,
    SYM_NODE_ATTRIBUTES,
    TRACKED_FAKE_ATTRIBUTES,
    unknown_attributes,
)
from torch_fakeify.compat.census import attributes_in_source
from torch_fakeify.encoding.fake_modes import describe_fake_mode, make_fake_mode
from torch_fakeify.encoding.nested_ints import NestedInts
from torch_fakeify.records.frame import FakeModeDesc, InputDesc
from torch_fakeify.records.tensor import MetaTensorDesc, NestedIntDesc, SymDesc

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_fakeify.frames.instances import Instance

TABLES = {
    ShapeEnv: SHAPE_ENV_ATTRIBUTES,
    FakeTensorMode: FAKE_MODE_ATTRIBUTES,
    SymNode: SYM_NODE_ATTRIBUTES,
    TrackedFake: TRACKED_FAKE_ATTRIBUTES,
}


def names(cls: type, how: str) -> set[str]:
    """Return the attributes of one class that are recorded in one way."""
    return {name for name, attribute in TABLES[cls].items() if attribute.how == how}


# --- the tables and torch -----------------------------------------------------------------------


@pytest.mark.parametrize("cls", TABLES, ids=lambda cls: cls.__name__)
def test_the_tables_have_the_attributes_in_torchs_source(cls: type) -> None:
    """The table of a class lists every attribute that its source, or that of a base, assigns."""
    found = attributes_in_source(cls)
    assert found <= set(TABLES[cls])
    assert {name for name, known in TABLES[cls].items() if known.everywhere} <= found


@pytest.mark.parametrize("validation", [False, True])
def test_used_objects_have_no_other_attributes(validation: bool) -> None:
    """Neither modes nor symbolic scalars, whatever they are configured for and used for."""
    with (
        functorch_config.patch(fake_tensor_propagate_real_tensors=validation),
        torch._dynamo.config.patch(fake_tensor_cache_crosscheck_enabled=validation),
    ):
        mode = FakeTensorMode(shape_env=ShapeEnv(), export=validation)
        with mode, mode:
            torch.ones(2).nonzero()
            assert mode.enter_stack
    assert mode.stack
    mode.epoch += 1
    mode.reset_nt_tensor_id_counter()
    assert unknown_attributes(mode, FAKE_MODE_ATTRIBUTES) == []
    with shapes_config.patch(translation_validation=validation):
        env = ShapeEnv()
        symbol = env.create_symbol(5, LocalSource("n"))
        n = env.create_symintnode(symbol, hint=5, source=LocalSource("n"))
        u = env.create_unbacked_symint()
        torch._check(u == n)
        scalars = (n, u, n + u, n * 2.5, n > 3, env.create_unbacked_symfloat())
        for sym_node in (*(scalar.node for scalar in scalars), n.node.wrap_int(3)):
            assert sym_node.expr is not None
            assert unknown_attributes(sym_node, SYM_NODE_ATTRIBUTES) == []


def test_a_new_attribute_is_found() -> None:
    """The source and an instance show an attribute that a new torch adds in any way."""

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
def test_the_tables_and_the_records_have_the_same_fields(
    cls: type, record: Any, others: set[str]
) -> None:
    """Each recorded attribute names fields that exist, and every field is named."""
    named: set[str] = set()
    for name in names(cls, "carried"):
        named |= set(TABLES[cls][name].why.split(", "))
    inner = {field for field in named if field.startswith("tensor.")}
    assert {f.removeprefix("tensor.") for f in inner} <= set(MetaTensorDesc.__struct_fields__)
    assert named - inner == set(record.__struct_fields__) - others


# --- FakeTensorMode -----------------------------------------------------------------------------


def assert_same_mode(mode: FakeTensorMode, rebuilt: FakeTensorMode) -> None:
    """Check every recorded and derived attribute of a rebuilt mode."""
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


@pytest.mark.parametrize("dynamic", [True, False])
def test_the_mode_of_a_frame_is_rebuilt(dynamic: bool) -> None:
    """The mode that Dynamo passes to a backend is rebuilt with its settings."""

    def check(gm: Any, inputs: Any, capture: tfk.Capture, instance: Instance) -> None:
        mode = TracingContext.get().fake_mode
        assert_same_mode(mode, instance.fake_mode)
        assert not instance.fake_mode._allow_unsafe_data_ptr_access
        assert capture.desc.fake_mode == FakeModeDesc()

    in_backend(check, dense, torch.randn(5, 3), 7, dynamic=dynamic)


def raggedness(env: Any) -> dict[str, Any]:
    """Return the symbols of a ``ShapeEnv`` by the nested ints that they represent."""
    return {str(n): symbol for n, symbol in env.val_to_var.items() if isinstance(n, torch.SymInt)}


def test_a_retrace_gives_intermediates_their_nested_ints() -> None:
    """Counted from the recorded number, a jagged intermediate has the symbol that it had."""

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
    """Return the mode and the capture of a graph of ``torch.export``."""
    dims = {"x": {0: torch.export.Dim.DYNAMIC}, "n": None}

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
            return dense(x, n)

    program = torch.export.export(Module(), (torch.randn(5, 3), 7), dynamic_shapes=dims)
    placeholders = program.graph.find_nodes(op="placeholder")
    inputs = [n.meta["val"] for n in placeholders]
    return inputs[0].fake_mode, tfk.capture(program.graph_module, inputs)


def static_frame() -> tuple[FakeTensorMode, tfk.Capture]:
    """Return a graph of ``make_fx(..., tracing_mode="fake")`` with a size from data."""
    config = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(**config):
        gm = make_fx(lambda x: x.nonzero() + 1, tracing_mode="fake")(torch.ones(3, 4))
    (x,) = (n.meta["val"] for n in gm.graph.find_nodes(op="placeholder"))
    return x.fake_mode, tfk.capture(gm, [x])


def flipped_frame() -> tuple[FakeTensorMode, tfk.Capture]:
    """Return a frame of a mode whose recorded settings all differ from the default."""
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
    return mode, graph_of(mode)


def graph_of(mode: FakeTensorMode) -> tfk.Capture:
    """Return a capture with one input of a mode."""
    x = mode.from_tensor(torch.empty(3))
    return tfk.capture(make_fx(torch.sin)(torch.empty(3)), [x])


FRAMES: dict[Callable[[], tuple[FakeTensorMode, tfk.Capture]], set[str]] = {
    export_frame: {"export", "allow_non_fake_inputs"},
    static_frame: {"static_shapes"},
    flipped_frame: set(FakeModeDesc.__struct_fields__),
}
"""Frames, and the settings of their modes that differ from the default."""


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: frame.__name__)
def test_every_setting_of_a_mode_is_rebuilt(frame: Any) -> None:
    """The instance's mode has it; a static one with a ShapeEnv has symbols for unbacked sizes."""
    mode, capture = frame()
    fields, default = FakeModeDesc.__struct_fields__, FakeModeDesc()
    unlike = {f for f in fields if getattr(capture.desc.fake_mode, f) != getattr(default, f)}
    assert unlike >= FRAMES[frame]
    instance = capture.instantiate()
    assert_same_mode(mode, instance.fake_mode)
    if frame is static_frame:
        shapes = [n.meta["val"].shape for n in instance.gm.graph.nodes if n.op == "call_function"]
        assert [str(s) for s in shapes] == ["torch.Size([u0, 2])"] * 2
        assert instance.fake_mode.from_tensor(torch.empty(3, 4)).shape == (3, 4)


def test_this_process_configuration_does_not_affect_an_instance() -> None:
    """For any configuration of this process, the settings are those of the record."""
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


@pytest.mark.sweep
def test_modes_are_rebuilt_in_another_process(tmp_path: Any) -> None:
    """A fresh interpreter has the settings from the files alone."""
    frames = [frame() for frame in FRAMES]

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
    done = fresh("-c", script, attributes, *paths)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for (mode, capture), line in zip(frames, lines, strict=True):
        expected = {name: getattr(mode, name) for name in names(FakeTensorMode, "carried")}
        expected["fake_tensor_converter"] = mode.fake_tensor_converter.export
        if capture.desc.fake_mode.nt_tensor_id_counter is None:
            for counts in (expected, line):
                del counts["nt_tensor_id_counter"], counts["nt_tensor_id_initial_count"]
        assert line == expected
    assert frames[-1][1].desc.fake_mode.nt_tensor_id_counter is not None


class OwnMode(FakeTensorMode):
    """A class whose attributes would be lost."""


def newer_mode() -> FakeTensorMode:
    """Return a mode with state that the table does not have."""
    mode = FakeTensorMode()
    mode.new_in_some_torch = True
    return mode


REFUSED = {
    f"a fake tensor mode of a class of its own; expected FakeTensorMode; found {__name__}.OwnMode. "
    "Capture with inputs of a plain FakeTensorMode": OwnMode,
    "the FakeTensorMode has an attribute that a record does not know; expected the attributes of torch's "
    "FakeTensorMode; found new_in_some_torch. Remove the attribute, or use a version of torch_fakeify for "
    "this torch": newer_mode,
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_mode_with_more_than_a_record_has_is_refused(message: str) -> None:
    """State is not dropped, and the error names it."""
    with pytest.raises(tfk.CaptureError) as info:
        graph_of(REFUSED[message]())
    assert str(info.value) == message


@pytest.mark.parametrize(
    "counts", [(3, None), (None, 3), (-1, 3), (4, 3), (0, 1 << 48), (1 << 70, 1 << 70)]
)
def test_numbers_that_are_no_nested_ints_are_refused(counts: tuple[Any, Any]) -> None:
    """A file cannot set torch's counters outside of their range."""
    desc = FakeModeDesc(nt_tensor_id_initial_count=counts[0], nt_tensor_id_counter=counts[1])
    with pytest.raises(tfk.FormatError) as info:
        make_fake_mode(desc, None)
    assert str(info.value) == (
        "$.fake_mode: numbers of nested ints that torch does not give; expected 0 <= "
        "nt_tensor_id_initial_count <= nt_tensor_id_counter < 281474976710656, or neither; found "
        f"{counts[0]} and {counts[1]}"
    )


def test_a_nested_int_outside_the_range_is_refused() -> None:
    """A record cannot set the process's counter outside of its range."""
    for number in (1 << 48, -1):
        with pytest.raises(tfk.FormatError) as info:
            NestedInts(FakeTensorMode(), keep=True).make(NestedIntDesc(number))
        assert str(info.value) == (
            "a nested int that torch does not give; expected a number below 281474976710656; "
            f"found {number}"
        )
    assert nested_tensor._tensor_id_counter < 1 << 48
