"""Frames with device meshes, placements and process groups: recorded, rebuilt, run, transferred."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mesh_programs
import msgspec
import opaque_examples
import pytest
import subclass_zoo as zoo
import torch
import torch.distributed as dist
from captured_frames import captures_of
from places import GOLDEN, ZOO
from planting import plant
from processes import python
from torch._library.opaque_object import get_opaque_type_name, register_opaque_type
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

import torch_fakeify as tfk
from torch_fakeify.cli import main
from torch_fakeify.encoding.meshes import Meshes
from torch_fakeify.encoding.opaque_values import decode_constant, encode_constant
from torch_fakeify.errors import (
    CaptureError,
    ConvertError,
    FormatError,
    LimitError,
    UnknownNameError,
    UnsupportedValueError,
)
from torch_fakeify.frames.graph.codec import decode_graph
from torch_fakeify.frames.process_groups import needed_world
from torch_fakeify.records.frame import ProcessGroupDesc, WorldDesc
from torch_fakeify.records.rewrite import Rewriter
from torch_fakeify.records.tensor import DictValue, OpaqueValue, TupleValue
from torch_fakeify.render.text import value_text
from torch_fakeify.tools.worker.comparing import first_mismatch
from torch_fakeify.tools.worker.replies import Passed
from torch_fakeify.tools.worker.trials import EagerComparison

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Load = Callable[[str], tfk.Capture]

pytestmark = pytest.mark.usefixtures("warm_workers")


BACKENDS = """
def planted_triples(gm, inputs):
    for fx_node in gm.graph.nodes:
        if fx_node.op == "call_function" and "mul" in str(fx_node.target):
            fx_node.args = (fx_node.args[0], 3)
    gm.recompile()
    return gm
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The frames of all programs, recorded by another process."""
    made = tmp_path_factory.mktemp("frames")
    python(ZOO / "mesh_programs.py", made)
    return made


@pytest.fixture
def no_world() -> Iterator[None]:
    """Check that this process has no process groups before and after a test."""
    assert not dist.is_initialized()
    yield
    assert not dist.is_initialized()


@pytest.fixture
def load(folder: Path, no_world: None) -> Load:
    """Load the frame of a program, in a process without process groups."""
    return lambda name: tfk.Capture.load(folder / f"{name}.fkf")


# --- recorded and rebuilt -------------------------------------------------------------------------


@pytest.mark.parametrize("name", mesh_programs.NAMES)
def test_a_frame_is_rebuilt_without_process_groups(
    name: str, load: Load, folder: Path, tmp_path: Path
) -> None:
    """A frame is rebuilt, also in a fresh ``ShapeEnv``, and captured and saved as the same."""
    capture = load(name)
    capture.instantiate(fresh=True)
    instance = capture.instantiate()
    assert tfk.capture(instance.gm, instance.inputs).fingerprint() == capture.fingerprint()
    capture.save(tmp_path / "again.fkf")
    assert (tmp_path / "again.fkf").read_bytes() == (folder / f"{name}.fkf").read_bytes()


@pytest.mark.parametrize("name", mesh_programs.NAMES)
def test_a_frame_runs_in_a_fake_world(name: str, load: Load) -> None:
    """Eager and compiled results are equal, forward and backward."""
    capture = load(name)
    with capture.fake_world():
        beside = EagerComparison(capture, seed=0)
        eager = beside._run(beside._eager, beside._inputs({}))
        trainable = any(getattr(v, "requires_grad", False) for v in eager.values["forward"])
        assert trainable == bool(eager.values["backward"])
        compiled = capture.compile("aot_eager")
        assert beside.run(compiled, {}) == Passed("backward")


def test_a_fake_world_has_the_recorded_groups(load: Load) -> None:
    """A fake world has the size and the groups of the frame at the rank that it is made for."""
    capture = load("part").at_rank(zoo.RANK)
    world = capture.desc.world
    assert world is not None
    with capture.fake_world():
        assert (dist.get_rank(), dist.get_world_size()) == (zoo.RANK, zoo.WORLD)
        for group in world.groups:
            found = torch._C._distributed_c10d._resolve_process_group(group.name)  # pyright: ignore
            assert dist.get_process_group_ranks(found) == list(group.ranks)
        with capture.fake_world():  # the world exists already
            assert dist.is_initialized()
        mesh = next(v for v in capture.instantiate().inputs if not isinstance(v, torch.Tensor))
        assert mesh["tp"].get_group().size() == 2
        assert mesh["tp"].get_group().group_name in [group.name for group in world.groups]
        assert dist.new_group([0, 1]).group_name not in [group.name for group in world.groups]


def test_a_frame_without_groups_records_no_world(no_world: None) -> None:
    """A frame without groups records no world, also in a process that has process groups."""
    with zoo.fake_world():
        (capture,) = captures_of(lambda x: x.sin() + 1, (torch.randn(3),))
    assert capture.desc.world is None
    with capture.fake_world():
        assert not dist.is_initialized()


def test_an_old_file_gets_the_world_of_its_meshes(no_world: None) -> None:
    """The frame of an old file has DTensors and no record of process groups."""
    desc = tfk.Capture.load(GOLDEN / "distributed.fkf").desc
    assert desc.world is None
    world = needed_world(desc)
    assert world is not None
    assert (world.rank, world.size) == (zoo.RANK, zoo.WORLD)
    assert {group.ranks for group in world.groups} >= {(0, 1), (1, 3)}
    with tfk.Capture(desc).fake_world():
        assert dist.get_world_size() == zoo.WORLD


# --- where there are no process groups, or others -------------------------------------------------


def test_the_error_without_process_groups_explains_how_to_make_them(load: Load) -> None:
    """The error is raised when the frame is compiled, or when it is run."""
    capture = load("two_dims").at_rank(zoo.RANK)
    message = (
        r"the frame needs process groups, and this process has none; expected rank 1 of 4 with the "
        r"process groups .*init_device_mesh\(\"cpu\", \(2, 2\), mesh_dim_names=\('dp', 'tp'\)\).*"
        r"`with capture.fake_world\(\):`"
    )
    with pytest.raises(CaptureError, match=message):
        capture.compile("aot_eager")
    capture = load("collective_by_name")
    compiled = capture.compile("aot_eager")
    with pytest.raises(CaptureError, match="needs process groups, and this process has none"):
        compiled(*capture.materialize())


def test_other_process_groups_are_an_error(load: Load) -> None:
    """Process groups that do not fit the frame are not replaced."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    capture = load("from_local")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(CaptureError, match=r"expected rank 0 of 4 .*; found rank 0 of 2"):
            capture.compile("eager")
        with (
            pytest.raises(CaptureError, match="not initialized as the frame needs it"),
            capture.fake_world(),
        ):
            pass
        assert dist.get_world_size() == 2
    finally:
        dist.destroy_process_group()


def test_a_compiled_frame_leaves_nothing_in_torchs_caches(load: Load) -> None:
    """Torch caches shardings by equal meshes, among them meshes that it traced with."""
    capture = load("from_local")
    with capture.fake_world():
        eager = capture.compile("eager")
        for _ in range(2):
            for function in (capture.compile("aot_eager"), eager):
                inputs = capture.materialize()
                assert type(function(*inputs)[0].device_mesh) is type(inputs[1])


def test_a_mesh_moves_with_the_tensors(load: Load) -> None:
    """A frame of an accelerator moves to the CPU with its meshes."""

    def on_cuda(part: Any) -> Any:
        if isinstance(part, OpaqueValue) and part.kind == "device_mesh":
            fields: Any = part.data
            items = tuple((k, "cuda" if k == "device_type" else v) for k, v in fields.items)
            return OpaqueValue(kind="device_mesh", data=DictValue(items=items))
        if type(part).__name__ == "MetaTensorDesc":
            return msgspec.structs.replace(part, device="cuda:0")
        return part

    for name in ("from_local", "two_dims"):
        desc = load(name).desc
        rewrite = Rewriter(on_cuda)
        capture = tfk.Capture(
            msgspec.structs.replace(desc, inputs=rewrite(desc.inputs), graph=rewrite(desc.graph))
        )
        instance = capture.instantiate("cpu")
        meshes = (*instance.inputs, *capture.materialize(device="cpu"))
        kinds = {getattr(v, "device_mesh", v) for v in meshes if hasattr(v, "device_type")}
        assert {mesh.device_type for mesh in kinds} == {"cpu"}
        with capture.fake_world():
            capture.compile("aot_eager", device="cpu")(*capture.materialize(device="cpu"))


# --- the tools, in processes of their own ---------------------------------------------------------


@pytest.mark.sweep
def test_fuzz_and_minify_use_a_fake_world(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A planted bug is found and minified, and the script fails in plain Python."""
    plant(tmp_path / "planted", BACKENDS, monkeypatch)
    frame = str(folder / "mesh_argument.fkf")
    assert main(["fuzz", frame, "--backend", "planted_triples"]) == 1
    assert "wrong" in capsys.readouterr().out
    output = tmp_path / "small.fkf"
    assert (
        main(["minify", frame, "--backend", "planted_triples", "--accuracy", "-o", str(output)])
        == 0
    )
    assert "script: fails in the same way" in capsys.readouterr().out
    script = output.with_suffix(".py").read_text(encoding="utf-8")
    assert "# This process is rank 0 of 4: the backend is fake" in script
    assert main(["replay", frame, "--backend", "aot_eager"]) == 0


def test_show_prints_meshes_and_placements(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ranks, the mesh and the placements are printed in the program's notation."""
    assert main(["show", "--all", str(folder / "two_dims.fkf")]) == 0
    shown = capsys.readouterr().out
    assert "rank 0 of 4, process groups '1', '3'" in shown
    assert "DeviceMesh('cpu', dp=2, tp=2)" in shown
    assert "[Replicate(), Shard(0)]" in shown


def test_frames_of_other_ranks_differ(load: Load) -> None:
    """Frames of two ranks differ, and `diff` prints the ranks."""
    capture = load("collective_by_name")
    other = capture.at_rank(1)
    from torch_fakeify.render.diff import differences

    texts = [str(found) for found in differences(capture.desc, other.desc)]
    assert any("rank 0 of 4" in text and "rank 1 of 4" in text for text in texts)


# --- the handoff ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["replicate_to_shard", "partial_to_replicate", "mlp_on_a_part"])
def test_the_handoff_passes_the_meshes_of_the_program(name: str, no_world: None) -> None:
    """The backend gets the program's own meshes, which torch's caches contain."""
    with zoo.fake_world():
        function, args = mesh_programs.programs()[name]
        found: list[list[Any]] = []
        for backend in ("aot_eager", tfk.handoff("aot_eager")):
            torch._dynamo.reset()
            args[0].grad = None
            out = torch.compile(function, backend=backend)(*args)
            getattr(out, "to_local", lambda out=out: out)().sum().backward()
            found.append([out, args[0].grad])
        assert first_mismatch(found[1], found[0]) is None


# --- values ---------------------------------------------------------------------------------------


def there_and_back(obj: object) -> Any:
    """Encode and decode through bytes."""
    v = tfk.loads(tfk.dumps(encode_constant(obj, "$")))
    return decode_constant(v, "$", Meshes())


def test_values_of_every_kind_round_trip(no_world: None) -> None:
    """Placements, a mesh, a spec and its metadata are equal, alone and in containers."""
    with zoo.fake_world():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        meta = TensorMeta(torch.Size([8, 4]), (4, 1), torch.float32)
        spec = DTensorSpec(mesh, (Shard(0), Replicate()), meta)
        for value in (
            *(Shard(1), Replicate(), Partial("avg"), _StridedShard(0, split_factor=2)),
            *(mesh, mesh["tp"], meta, spec),
        ):
            assert there_and_back(value) == value
            assert there_and_back([{"a": (value, 1)}]) == [{"a": (value, 1)}]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Shard(-1), "Shard(-1)"),
        (Replicate(), "Replicate()"),
        (Partial("max"), "Partial('max')"),
        (_StridedShard(0, split_factor=2), "_StridedShard(0, 2)"),
    ],
)
def test_a_placement_is_printed_as_in_a_program(value: Any, text: str) -> None:
    """The text of a placement is the one in the program's source."""
    assert value_text(encode_constant(value, "$")) == text


def _with_group(x: torch.Tensor, group: Any) -> torch.Tensor:
    return x * group.size()


@pytest.fixture
def group_operator() -> Iterator[Callable[..., Any]]:
    """Register an operator that takes a process group."""
    with torch.library._scoped_library("fakeify_groups", "DEF") as library:
        init_device_mesh  # noqa: B018 - its module registers the opaque types
        torch.distributed.device_mesh._register_distributed_opaque_types()
        kind = get_opaque_type_name(dist.ProcessGroup)
        library.define(f"scale(Tensor x, {kind} group) -> Tensor")
        library.impl("scale", _with_group, "CompositeExplicitAutograd")
        torch.library.register_fake(
            "fakeify_groups::scale", lambda x, group: torch.empty_like(x), lib=library
        )
        yield torch.ops.fakeify_groups.scale


def test_a_process_group_is_an_input(group_operator: Any, no_world: None) -> None:
    """A process group is recorded by its name, and found by name in a world that has it."""
    with zoo.fake_world():
        group = dist.new_group([1, 3])
        (capture,) = captures_of(lambda x, group: group_operator(x, group), (torch.ones(2), group))
        name = group.group_name
    assert capture.desc.world == WorldDesc(
        rank=1, size=4, groups=(ProcessGroupDesc(name=name, ranks=(1, 3)),)
    )
    assert value_text(capture.desc.inputs[1].value) == f"ProcessGroup({name!r})"
    with pytest.raises(ConvertError, match=r"no process group of that name.*fake_world"):
        capture.instantiate()
    with capture.fake_world():
        (result,) = capture.compile("aot_eager")(*capture.materialize())
    assert result.shape == (2,)


# --- what has no record ---------------------------------------------------------------------------


def compiled_with(function: Any, *args: Any) -> Any:
    """Return the capture of a call's frame."""
    found: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        try:
            found.append(tfk.capture(gm, inputs))
        except UnsupportedValueError as error:
            found.append(error)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*args)
    return found[0]


def test_an_object_of_a_users_opaque_type_is_refused_by_name() -> None:
    """The error contains the input, its source, its type and what to do."""
    function, args, *_ = opaque_examples.opaque_reference()
    error = compiled_with(function, *args)
    assert str(error) == (
        "$.inputs.l_scales_ (L['scales']): an object of an opaque type has no record; found an "
        "object of opaque_examples.Scales. Call torch_fakeify.register_subclass(Scales, "
        "encode_ctx=..., decode_ctx=...) with functions from the object to plain data and back."
    )


def test_a_registered_class_has_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """An input of the class is encoded by the functions that were registered for it."""
    from torch_fakeify.encoding import subclass_registry

    monkeypatch.setattr(subclass_registry, "_BY_NAME", {})
    scales = opaque_examples.Scales
    tfk.register_subclass(
        scales, encode_ctx=lambda s: list(s.numbers), decode_ctx=lambda numbers: scales(*numbers)
    )
    function, args, *_ = opaque_examples.opaque_reference()
    capture = compiled_with(function, *args)
    made = capture.materialize()
    assert [v.numbers for v in made if isinstance(v, scales)] == [args[1].numbers]
    (result,) = capture.compile("aot_eager")(*made)
    assert result.shape == args[0].shape
    monkeypatch.setattr(subclass_registry, "_BY_NAME", {})
    with pytest.raises(UnknownNameError, match="register_subclass"):
        capture.instantiate()


def test_a_script_object_is_refused_by_name() -> None:
    """The error contains the name of its TorchScript class."""
    function, args, *_ = opaque_examples.torchbind_attribute()
    error = compiled_with(function, *args)
    assert isinstance(error, UnsupportedValueError)
    text = str(error)
    assert text.startswith("$.inputs.l_self_foo (L['self'].foo): an object of an opaque type has")
    assert "_TorchScriptTesting._Foo" in text
    assert "Call its methods outside the compiled function" in text


def test_generators_and_events_are_refused_by_name() -> None:
    """Generators and events may be constants of a graph that was made by other code."""
    for value, advice in (
        (torch.Generator(), "Seed the default generator"),
        (torch.Event("cpu"), "outside"),  # where torch is built for GPUs, a stream needs a driver
    ):
        with pytest.raises(UnsupportedValueError, match=advice):
            encode_constant(value, "$")


class Tag:
    """A constant that Dynamo writes into the graph."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tag)

    def __hash__(self) -> int:
        return 1

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return "Tag()", {"Tag": Tag}


def test_an_opaque_constant_in_a_graph_is_refused_by_name() -> None:
    """An opaque constant is refused, and the error contains the node that has it."""
    register_opaque_type(Tag, typ="value")
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.add, (x, 1)), Tag()))
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    with pytest.raises(UnsupportedValueError, match=r"\$\.nodes\[2\].*Tag.*register_subclass"):
        tfk.capture(gm, [torch.ones(2)])


# --- hostile records ------------------------------------------------------------------------------

NAME = ProcessGroupDesc(name="1")
BAD_WORLDS: dict[str, tuple[WorldDesc, str]] = {
    "too many ranks": (WorldDesc(rank=0, size=10**9), "at most 131072 ranks"),
    "too many groups": (WorldDesc(rank=0, size=2, groups=(NAME,) * 2000), "found 2 and 2000"),
    "a rank outside": (WorldDesc(rank=4, size=4), "the rank is not in the world"),
    "no ranks": (WorldDesc(rank=0, size=0), "the rank is not in the world"),
    "one name twice": (
        WorldDesc(rank=0, size=2, groups=(NAME,) * 2),
        r"\$\.world\.groups\[1\]\.name",
    ),
    **{
        case: (
            WorldDesc(rank=0, size=4, groups=(ProcessGroupDesc(name="1", ranks=ranks),)),
            r"\$\.world\.groups\[0\]\.ranks: not the ranks of a process group of this rank",
        )
        for case, ranks in {
            "a group without the rank": (1, 2),
            "a rank twice": (0, 0),
            "a rank that there is not": (0, 9),
        }.items()
    },
}


@pytest.mark.parametrize("case", BAD_WORLDS)
def test_an_impossible_world_is_refused(case: str, load: Load) -> None:
    """The record is checked before a process group is made."""
    world, message = BAD_WORLDS[case]
    capture = tfk.Capture(msgspec.structs.replace(load("from_local").desc, world=world))
    kind = LimitError if case.startswith("too many") else FormatError
    with pytest.raises(kind, match=message), capture.fake_world():
        pass


@pytest.mark.parametrize(
    "data",
    [
        TupleValue(
            items=("torch.distributed.tensor._dtensor_spec.TensorMeta", DictValue(items=()))
        ),
        TupleValue(items=("os.system", DictValue(items=()))),
        TupleValue(items=("torch._dynamo.output_graph.FakeRootModule", DictValue(items=()))),
        "os.system",
        None,
    ],
)
def test_a_graph_has_no_other_objects(data: Any) -> None:
    """Of dataclasses only the spec of a DTensor is allowed in a graph."""
    for kind in ("dataclass", "object"):
        v = OpaqueValue(kind=kind, data=data)
        with pytest.raises(FormatError):
            decode_constant(v, "$", Meshes())
    graph = tfk.Capture.load(GOLDEN / "process_groups.fkf").desc.graph
    nodes = list(graph.nodes)
    nodes[-1] = msgspec.structs.replace(nodes[-1], args=(OpaqueValue(kind="dataclass", data=data),))
    with pytest.raises(FormatError):
        decode_graph(
            msgspec.structs.replace(graph, nodes=tuple(nodes)),
            convert=lambda _: torch.ones(1),
            sym=lambda _: 2,
        )
