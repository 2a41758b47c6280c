"""Device meshes and placements: rebuilt without process groups, shared, and checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import subclass_zoo as zoo
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torch_fakeify.encoding.meshes import Meshes, encode_mesh
from torch_fakeify.encoding.subclass_context import ContextDecoder, ContextEncoder
from torch_fakeify.encoding.subclasses import context_decoder, decode_opaques, encode_subclass
from torch_fakeify.errors import ConvertError, FormatError, UnsupportedValueError
from torch_fakeify.records.tensor import DictValue, OpaqueValue, TupleValue, Value
from torch_fakeify.serialization import document

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


@pytest.fixture(scope="module")
def world() -> Generator[None]:
    """A fake world of four ranks."""
    with zoo.fake_world():
        yield


@pytest.fixture
def mesh(world: None) -> DeviceMesh:
    """A mesh of two by two with a flattened mesh."""
    made = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    made["dp", "tp"]._flatten("all")
    return made


def there_and_back(mesh: Any, meshes: Meshes | None = None) -> Any:
    """Encode and decode through bytes."""
    v = document.loads(document.dumps(encode_mesh(mesh, where="m")))
    return (meshes or Meshes()).decode(v, where="m")


def changed(mesh: Any, **fields: Value) -> OpaqueValue:
    """Return the record of a mesh with other fields; a field of ``...`` is removed."""
    v: Any = encode_mesh(mesh, where="m")
    items = {**dict(v.data.items), **fields}
    remaining = tuple((name, item) for name, item in items.items() if item is not ...)
    return OpaqueValue(kind="device_mesh", data=DictValue(items=remaining))


# --- meshes ---------------------------------------------------------------------------------------


def test_every_attribute_of_a_mesh_is_rebuilt(mesh: DeviceMesh) -> None:
    """A rebuilt mesh has the attributes of the original and is equal to it for torch."""
    for original in (mesh, mesh["tp"], mesh["dp"], mesh._flatten_mapping["all"]):
        found = there_and_back(original)
        assert found is not original
        assert found == original
        assert hash(found) == hash(original)
        assert vars(found).keys() == vars(original).keys()
        assert zoo.mesh_facts(found) == zoo.mesh_facts(original)
        assert torch.equal(found.mesh, original.mesh)
        assert found.get_coordinate() == original.get_coordinate()
        assert found.get_all_groups() == original.get_all_groups()
        assert found._root_mesh == original._root_mesh
        assert found._pg_registry == original._pg_registry
    part = there_and_back(mesh)["tp"]
    assert part == mesh["tp"]
    assert part._dim_group_names == mesh["tp"]._dim_group_names


@pytest.mark.parametrize("keeps", [True, False])
def test_the_order_of_ranks_is_rebuilt_or_refused(mesh: DeviceMesh, keeps: bool) -> None:
    """Only some versions of torch have meshes that preserve the order of their ranks."""
    record: Any = changed(mesh, keeps_rank_order=keeps)
    if not keeps or "_preserve_rank_order" in DeviceMesh.__annotations__:
        found = Meshes().decode(record, where="m")
        assert getattr(found, "_preserve_rank_order", False) is keeps
        again: Any = encode_mesh(found, where="m")
        defaults = {} if keeps else {"keeps_rank_order": False}  # which is not recorded
        assert {**dict(again.data.items), **defaults} == dict(record.data.items)
        return
    with pytest.raises(ConvertError) as caught:
        Meshes().decode(record, where="m")
    assert str(caught.value) == (
        "m: the device mesh preserves the order of its ranks, which this torch does not support; expected a "
        "torch whose DeviceMesh takes `preserve_rank_order`; found torch "
        f"{torch.__version__.partition('+')[0]}. Use the version that recorded it"
    )


def test_meshes_are_shared(mesh: DeviceMesh) -> None:
    """Equal records give one mesh, which is the root of its parts and of its flattened mesh."""
    meshes = Meshes()
    whole = there_and_back(mesh, meshes)
    part = there_and_back(mesh["tp"], meshes)
    flat = there_and_back(mesh._flatten_mapping["all"], meshes)
    assert there_and_back(mesh, meshes) is whole
    assert there_and_back(mesh["tp"], meshes) is part
    assert part._root_mesh is whole
    assert flat._root_mesh is whole
    assert flat is whole._flatten_mapping["all"]
    assert part._rank_map is whole._rank_map
    assert there_and_back(mesh) is not whole


def test_a_live_mesh_may_be_used_for_its_record(mesh: DeviceMesh) -> None:
    """In the writer's process a reader may use the mesh itself, and its root, also for DTensors."""
    meshes, part = Meshes(), mesh["tp"]
    meshes.register(part)
    assert there_and_back(part, meshes) is part
    assert there_and_back(mesh, meshes) is mesh
    t = distribute_tensor(torch.ones(4), mesh, [Shard(0), Replicate()])
    record = encode_subclass(t, zoo.describe, where="t")
    opaques = decode_opaques(record, context_decoder(record, meshes=meshes), where="t")
    assert opaques["device_mesh"] is mesh


def test_a_mesh_is_real_under_a_fake_mode(mesh: DeviceMesh) -> None:
    """The ranks of a rebuilt mesh are a real tensor, as those of the original are."""
    with FakeTensorMode():
        found = there_and_back(mesh)
    assert type(found._rank_map) is torch.Tensor
    assert found._rank_map.tolist() == [0, 1, 2, 3]


def test_no_process_group_is_made(mesh: DeviceMesh) -> None:
    """Names without a group stay names, and a group of another size is not used."""
    v = encode_mesh(mesh, where="m")
    groups = TupleValue(items=("no such group", "0"))  # "0" is the world of four ranks
    found = Meshes().decode(changed(mesh, groups=groups, flattened=...), where="m")
    assert found._dim_group_names == ["no such group", "0"]
    assert found._pg_registry == {}
    dist.destroy_process_group()
    try:
        found = Meshes().decode(v, where="m")
        assert found._dim_group_names == mesh._dim_group_names
        assert found._pg_registry == {}
        assert found._coordinate_on_dim == (0, 1)
        assert not dist.is_initialized()
    finally:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=zoo.RANK, world_size=zoo.WORLD)


@pytest.mark.parametrize(
    ("device", "ranks", "rank", "coordinate"),
    [("cuda", [[3, 1], [0, 2]], 2, (1, 1)), ("cpu", [0, 2], 1, None)],
)
def test_a_mesh_without_groups_has_none(
    world: None, device: str, ranks: Any, rank: int, coordinate: Any
) -> None:
    """A mesh that was made without a backend is rebuilt so; a rank outside of it has no coordinates."""
    original = DeviceMesh(device, ranks, _init_backend=False, _rank=rank)
    found = there_and_back(original)
    assert found == original
    assert vars(found).keys() == vars(original).keys()
    assert found._coordinate_on_dim == coordinate


def test_a_part_may_have_ranks_of_its_own(mesh: DeviceMesh) -> None:
    """The ranks of a part are recorded beside those of the root."""
    part = mesh["tp"]
    part._flatten_rank_map = (0, 1)
    part._rank_map = torch.tensor([0, 1], dtype=torch.int32)
    found = there_and_back(part)
    assert found == part
    assert torch.equal(found._rank_map, part._rank_map)


def noted(mesh: DeviceMesh) -> DeviceMesh:
    """Return it with an attribute that torch's meshes do not have."""
    mesh.note = 1
    return mesh


def flattened(mesh: DeviceMesh, other: DeviceMesh) -> DeviceMesh:
    """Return it with another one as a flattened mesh of it."""
    mesh._flatten_mapping["y"] = other
    return mesh


UNRECORDED: dict[str, Callable[[DeviceMesh], DeviceMesh]] = {
    "m: a device mesh has attributes that have no record; found note": noted,
    "m: a device mesh has no rank; expected a device type other than xla; found 'xla'": (
        lambda _: DeviceMesh("xla", [0, 1])
    ),
    "m: a mesh that is part of another has flattened meshes of its own": (
        lambda mesh: flattened(mesh["tp"], mesh["dp"])
    ),
    "m._flatten_mapping['y']: a flattened mesh is of another mesh": (
        lambda mesh: flattened(mesh, DeviceMesh("cpu", [0], _init_backend=False, _rank=0))
    ),
}


@pytest.mark.parametrize("message", UNRECORDED)
def test_meshes_without_a_record_are_refused(mesh: DeviceMesh, message: str) -> None:
    """Only a root has flattened meshes, and they are its own."""
    made = UNRECORDED[message](mesh)
    with pytest.raises(UnsupportedValueError) as error:
        encode_mesh(made, where="m")
    assert str(error.value) == message


def layout(*pairs: tuple[tuple[int, ...], ...]) -> dict[str, Value]:
    """Return the field with a layout of sizes and strides."""
    axes = [TupleValue(items=tuple(TupleValue(items=part) for part in pair)) for pair in pairs]
    return {"layout": TupleValue(items=tuple(axes))}


BIG = 10**6
UNFIT = ".layout: the layout of a device mesh does not fit its ranks; expected"

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"rank": ...}, ": a device mesh has no rank"),
    ({"ranks": ...}, ": a device mesh has no ranks"),
    ({"device_type": "toaster"}, ": not a device type; found 'toaster'"),
    ({"device_type": 3}, ".device_type: not a string; found int"),
    ({"rank": -1}, ".rank: not a rank or a size; expected an integer below 2**31"),
    ({"rank": True}, ".rank: not a rank or a size; expected an integer below 2**31"),
    (
        {"ranks": TupleValue(items=(2**31,))},
        ".ranks: not a rank or a size; expected an integer below 2**31",
    ),
    ({"shiny": 1}, ": no such field of a device mesh; found shiny"),
    ({"keeps_rank_order": 1}, ".keeps_rank_order: not a boolean"),
    ({"ranks": 3}, ".ranks: not a tuple; found int"),
    (
        layout(((BIG, BIG), (1, 1))),
        f"{UNFIT} at most 4 devices; found 1000000 x 1000000",
    ),
    (
        layout(((0,), (1,)), ((BIG,), (1,))),
        f"{UNFIT} at most 4 devices; found 0 x 1000000",
    ),
    (
        layout(((2,), (1,)), ((2,), (1,))),
        f"{UNFIT} no overlap, at most 4 devices; found _MeshLayout(axes=(_FlatLayout(shape=(2,), stride=(1,)), "
        "_FlatLayout(shape=(2,), stride=(1,))))",
    ),
    (
        layout(((2,), (8,)), ((2,), (1,))),
        f"{UNFIT} no overlap, at most 4 devices; found _MeshLayout(axes=(_FlatLayout(shape=(2,), stride=(8,)), "
        "_FlatLayout(shape=(2,), stride=(1,))))",
    ),
    (layout(((2,), (2, 1)), ((2,), (1,))), ".layout: not sizes and strides"),
    (
        layout(((4,),)),
        ".layout: not sizes and strides",
    ),
    (
        {"dim_names": TupleValue(items=("dp",))},
        ": wrong number of dim_names for a device mesh; expected 2; found 1",
    ),
    ({"dim_names": TupleValue(items=("dp", 3))}, ".dim_names: not a string; found int"),
    (
        {"groups": TupleValue(items=("0",) * 3)},
        ": wrong number of groups for a device mesh; expected 2; found 3",
    ),
    (
        {"ranks": TupleValue(items=(1, 1, 2, 3)), "flattened": ...},
        ": not a device mesh: rank_coords.size(0) must be 0 or 1, got 2",
    ),
    ({"root": 3}, ".root: not a device mesh"),
    ({"flattened": 3}, ".flattened: not the fields of a device mesh"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_records_that_are_no_mesh_are_refused(
    mesh: DeviceMesh, fields: dict[str, Any], message: str
) -> None:
    """The error has the path, and nothing large is allocated before."""
    with pytest.raises(FormatError) as error:
        Meshes().decode(changed(mesh, **fields), where="m")
    assert str(error.value) == f"m{message}"


def test_a_root_of_a_root_is_refused(mesh: DeviceMesh) -> None:
    """A mesh has one root, and a record in which a root has a root is refused."""
    inner = changed(mesh, root=encode_mesh(mesh, where="m"))
    with pytest.raises(FormatError) as error:
        Meshes().decode(changed(mesh, root=inner), where="m")
    assert str(error.value) == "m.root: the root of a device mesh has a root"


# --- placements -----------------------------------------------------------------------------------


def value_there_and_back(obj: Any) -> Any:
    """Encode and decode through bytes, as a part of a context."""
    v = document.loads(document.dumps(ContextEncoder("torch").encode(obj, "c")))
    return ContextDecoder("torch").decode(v, "c")


@pytest.mark.parametrize("placement", [
    Shard(2), Shard(-1), Replicate(), Partial(), Partial("avg"), _StridedShard(1, split_factor=4),
], ids=repr)  # fmt: skip
def test_placements_round_trip(placement: Any) -> None:
    """Each placement is decoded equal and of its class."""
    found = value_there_and_back(placement)
    assert found == placement
    assert type(found) is type(placement)
    assert repr(found) == repr(placement)


def test_a_masked_placement_round_trips() -> None:
    """The mask of a placement is a tensor, which the caller encodes."""
    mask = _MaskPartial("avg", offset_shape=torch.Size([2, 3]), offset_dim=1)
    found = value_there_and_back(mask)
    assert repr(found) == repr(mask)
    assert vars(found) == vars(mask)
    mask.mask_buffer.materialize_mask(torch.ones(2, dtype=torch.bool))
    paths: list[str] = []

    def describe(t: torch.Tensor, where: str) -> Any:
        paths.append(where)
        return zoo.describe(t)

    v = ContextEncoder("torch", tensors=describe).encode(mask, "c")
    assert paths == ["c.mask_buffer.data"]
    found = ContextDecoder("torch", tensors=lambda desc: desc.dtype).decode(v, "c")
    assert (found.mask_buffer.data, found.mask_buffer.refcount) == ("bool", 1)


def test_a_symbolic_split_factor_round_trips() -> None:
    """A symbolic split factor stays symbolic, and rebuilding it adds no guard."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    n = mode.from_tensor(torch.empty(6), static_shapes=False).shape[0]
    assert isinstance(n, torch.SymInt)
    original = _StridedShard(0, split_factor=6)
    original._symbolic_split_factor = n
    assert not env.guards
    mine = OpaqueValue(kind="mine")
    encoder = ContextEncoder("torch", lambda o: mine if isinstance(o, torch.SymInt) else None)
    decoder = ContextDecoder("torch", lambda v: n if v == mine else NotImplemented)
    found: Any = decoder.decode(encoder.encode(original, "c"), "c")
    assert found.split_factor is n
    assert found._split_factor_int() == 6
    assert not env.guards


def test_a_whole_spec_round_trips(mesh: DeviceMesh) -> None:
    """A ``DTensorSpec`` in the context of a user's subclass is recorded without its cached hash."""
    spec = DTensorSpec(
        mesh,
        (Shard(0), Replicate()),
        tensor_meta=TensorMeta(torch.Size([4, 2]), (2, 1), torch.float32),
    )
    v = ContextEncoder("torch").encode(spec, "c")
    hash(spec)
    assert ContextEncoder("torch").encode(spec, "c") == v
    assert spec._hash is not None
    found = value_there_and_back(spec)
    assert found == spec
    assert found._hash is None
    assert vars(found).keys() == vars(spec).keys()
    assert hash(found) == hash(spec)


def test_placements_without_a_record_are_refused() -> None:
    """A placement with other attributes, or of a class derived from torch's, is refused."""
    marked = Shard(0)
    marked.note = 1

    class Mine(Shard):
        pass

    for p, what in ((marked, "a placement has additional"), (Mine(0), "a value has no record")):
        with pytest.raises(UnsupportedValueError, match=f"^c: {what}"):
            ContextEncoder("torch").encode(p, "c")


def placement(kind: Value, **fields: Value) -> OpaqueValue:
    """Return a placement as a file might have it."""
    data = TupleValue(items=(kind, DictValue(items=tuple(fields.items()))))
    return OpaqueValue(kind="placement", data=data)


@pytest.mark.parametrize(("v", "message"), [
    (placement("Popen"), "c: not a placement"),
    (placement(3), "c: not a placement"),
    (OpaqueValue(kind="placement"), "c: not a placement"),
    (placement("Shard"), "c: wrong fields of the placement Shard; expected dim; found none"),
    (placement("Replicate", dim=1),
     "c: wrong fields of the placement Replicate; expected none; found dim"),
    (placement("Shard", dim="x"), "c: wrong fields of the placement Shard"),
])  # fmt: skip
def test_records_that_are_no_placement_are_refused(v: OpaqueValue, message: str) -> None:
    """A record that is no placement is refused, and the error contains the path."""
    with pytest.raises(FormatError) as error:
        ContextDecoder("torch").decode(v, "c")
    assert str(error.value) == message
