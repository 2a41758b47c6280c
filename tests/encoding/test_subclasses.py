"""Wrapper subclasses of torch and of users: records, rebuilding in another process, refusals."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import subclass_zoo as zoo
import torch
from places import IMPORTABLE
from subclass_zoo import describe, facts, rebuild
from torch._library.fake_class_registry import maybe_to_fake_obj
from torch._library.opaque_object import register_opaque_type
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.masked import masked_tensor
from torch.testing._internal.logging_tensor import LoggingTensor
from torch.testing._internal.two_tensor import TwoTensor

import torch_fakeify as tfk
from torch_fakeify.compat.torch_fakes import CustomClassBase
from torch_fakeify.encoding import subclass_registry
from torch_fakeify.encoding.subclasses import (
    Meshes,
    decode_context,
    decode_opaques,
    encode_subclass,
    register_subclass,
    subclass_of,
)
from torch_fakeify.errors import (
    FormatError,
    UnknownNameError,
    UnsupportedTensorError,
    UnsupportedValueError,
)
from torch_fakeify.records.tensor import OpaqueValue, SubclassDesc, TensorValue, TupleValue

if TYPE_CHECKING:
    from collections.abc import Generator

pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of MaskedTensors", "ignore:The PyTorch API of SparseSemiStructured"
)

TORCH = Path(torch.__file__).parent


class Holder(torch.Tensor):
    """A wrapper around one tensor with any context and any other attributes."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, context: Any = None, **attributes: Any) -> Any:
        """Make the outer tensor."""
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor, context: Any = None, **attributes: Any) -> None:
        self.inner = inner
        self.context = context
        self.attributes = list(attributes)
        vars(self).update(attributes)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner", *self.attributes], self.context

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner.pop("inner"), context, **inner)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


class Unlucky(torch.Tensor):
    """A wrapper that cannot be made again."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [], None


class Kind(enum.Enum):
    """An enumeration."""

    A = 1


class Handle(CustomClassBase):
    """An opaque object of a user."""

    def __init__(self, number: int) -> None:
        self.number = number


register_opaque_type(Handle, typ="reference")


@pytest.fixture
def registry() -> Generator[None]:
    """Remove what a test registers after it."""
    before = dict(subclass_registry._BY_NAME)
    yield
    subclass_registry._BY_NAME.clear()
    subclass_registry._BY_NAME.update(before)


@pytest.fixture(scope="module")
def dtensors() -> Generator[dict[str, Any]]:
    """DTensors in a fake world."""
    with zoo.fake_world():
        yield zoo.distributed()


def encode(t: torch.Tensor) -> SubclassDesc:
    """Return the record of a wrapper."""
    return encode_subclass(t, describe, where="t")


def holder(context: Any = None, **attributes: Any) -> Any:
    """Return a wrapper with that context."""
    return Holder(torch.ones(2), context, **attributes)


# --- torch's own -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", zoo.PLAIN)
def test_torchs_wrappers_round_trip(kind: str) -> None:
    """Each wrapper of torch is decoded with its metadata, and so are its parts."""
    t = zoo.PLAIN[kind]()
    desc = tfk.loads(tfk.dumps(describe(t)))
    assert facts(rebuild(desc, Meshes())) == facts(t)


def test_dtensors_round_trip(dtensors: dict[str, Any]) -> None:
    """DTensors of every placement and mesh are decoded."""
    meshes = Meshes()
    for kind, t in dtensors.items():
        desc = tfk.loads(tfk.dumps(describe(t)))
        assert facts(rebuild(desc, meshes)) == facts(t), kind


def fake_both_ways(t: Any) -> tuple[Any, Any]:
    """Return a wrapper of fake tensors by the original context and one by the decoded context."""
    attributes, context = t.__tensor_flatten__()
    record = encode(t)
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    real = {name: getattr(t, name) for name in attributes}
    inner = {
        name: mode.from_tensor(item) if isinstance(item, torch.Tensor) else item
        for name, item in real.items()
    }
    ours = inner | decode_opaques(record, where="t")
    decoded = decode_context(record, where="t")
    cls = type(t)
    with mode:
        expected = cls.__tensor_unflatten__(inner, context, t.shape, zoo_stride(t))
        found = cls.__tensor_unflatten__(ours, decoded, t.shape, zoo_stride(t))
    return found, expected


def zoo_stride(t: Any) -> Any:
    """Return the strides of a tensor that has some."""
    return t.stride() if zoo.is_strided(t) else ()


@pytest.mark.parametrize("kind", zoo.PLAIN)
def test_fake_tensors_by_the_decoded_context(kind: str) -> None:
    """``__tensor_unflatten__`` makes equal tensors of the decoded and the original context."""
    found, expected = fake_both_ways(zoo.PLAIN[kind]())
    assert facts(found) == facts(expected)


def test_fake_dtensors_by_the_decoded_context(dtensors: dict[str, Any]) -> None:
    """DTensors are equal too, with their mesh rebuilt."""
    for kind, t in dtensors.items():
        found, expected = fake_both_ways(t)
        assert facts(found) == facts(expected), kind


def test_every_wrapper_of_torch_is_in_the_zoo(dtensors: dict[str, Any]) -> None:
    """A wrapper class that a release of torch adds fails here."""
    known = [*(make() for make in zoo.PLAIN.values()), *dtensors.values()]
    bases = {base.__name__ for t in known for base in type(t).__mro__}
    found: set[str] = set()
    for path in TORCH.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "def __tensor_flatten__" in text:
            for part in re.split(r"^class (?=\w)", text, flags=re.MULTILINE)[1:]:
                if "def __tensor_flatten__" in part:
                    found.add(re.match(r"\w+", part)[0])
    assert found - bases == {"TraceableWrapperSubclass"}  # the protocol itself, for type checkers


READER = """
import json, sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
import torch_fakeify as tfk
from torch_fakeify.encoding.subclasses import Meshes
from subclass_zoo import facts, rebuild

assert "torch.testing._internal.two_tensor" not in sys.modules
meshes = Meshes()
descs = tfk.loads(Path(sys.argv[1]).read_bytes())
print(json.dumps({kind: facts(rebuild(desc, meshes)) for kind, desc in descs.items()}))
"""


def test_wrappers_are_decoded_in_a_fresh_interpreter(
    dtensors: dict[str, Any], tmp_path: Path
) -> None:
    """The process has no process group and has imported none of the classes."""
    kinds = {
        kind: make()
        for kind, make in zoo.PLAIN.items()
        if kind.startswith(("TwoTensor", "NestedTensor", "ComplexTensor", "AsyncCollective"))
    }
    kinds |= {kind: t for kind, t in dtensors.items() if kind != "LocalTensor"}
    path = tmp_path / "records"
    path.write_bytes(tfk.dumps({kind: describe(t) for kind, t in kinds.items()}))
    output = subprocess.check_output(
        [sys.executable, "-c", READER, path, Path(__file__).parent, *IMPORTABLE], text=True
    )
    assert json.loads(output) == {kind: facts(t) for kind, t in kinds.items()}


@pytest.mark.parametrize("make", [
    lambda: masked_tensor(torch.ones(2), torch.ones(2, dtype=torch.bool)),
    lambda: LoggingTensor(torch.ones(2)),
])  # fmt: skip
def test_wrappers_without_the_protocol_are_refused(make: Any) -> None:
    """A class that does not list its inner tensors is no traceable wrapper for torch either."""
    t = make()
    cls = f"{type(t).__module__}.{type(t).__name__}"
    with pytest.raises(UnsupportedTensorError) as error:
        encode(t)
    assert str(error.value) == (
        f"t: {cls} is no traceable wrapper subclass; expected __tensor_flatten__ and "
        "__tensor_unflatten__; found no __tensor_flatten__ and no __tensor_unflatten__. "
        "Define __tensor_flatten__ and __tensor_unflatten__ on the class."
    )


# --- encode ---------------------------------------------------------------------------------------


def test_the_caller_describes_inner_tensors() -> None:
    """The caller's function gets each inner tensor with its attribute, in order."""
    a, b = torch.ones(2), torch.ones(2)
    seen: list[tuple[torch.Tensor, str]] = []

    def part(t: torch.Tensor, attribute: str) -> Any:
        seen.append((t, attribute))
        return describe(t)

    record = encode_subclass(TwoTensor(b, a), part, where="t")
    assert [name for name, _ in record.tensors] == ["a", "b"]
    assert [attribute for _, attribute in seen] == ["a", "b"]
    assert seen[0][0] is b
    assert seen[1][0] is a
    assert record.cls == "torch.testing._internal.two_tensor.TwoTensor"
    assert record.context is None


def test_the_caller_describes_tensors_in_the_context() -> None:
    """Tensors in a context have a path instead of an attribute, and a hook decodes them."""
    seen: list[str] = []

    def part(t: torch.Tensor, attribute: str) -> Any:
        seen.append(attribute)
        return describe(t)

    inside = torch.zeros(3)
    record = encode_subclass(holder({"k": [inside]}), part, where="t")
    assert seen == ["inner", "context['k'][0]"]
    found: Any = decode_context(record, where="t", tensors=lambda desc: (desc, 1))
    assert found == {"k": [(describe(inside), 1)]}
    with pytest.raises(FormatError, match=r"^t\.context\.items.*: a tensor has no meaning here$"):
        decode_context(record, where="t")


def test_the_caller_encodes_symbolic_integers() -> None:
    """The caller's hooks are used for symbolic integers at any depth."""
    n = ShapeEnv().create_unbacked_symint()
    mine = OpaqueValue(kind="mine")
    record = encode_subclass(
        holder((torch.Size([2, n]), {"n": n})),
        describe,
        where="t",
        ints=lambda obj: mine if isinstance(obj, torch.SymInt) else None,
    )
    found: Any = decode_context(
        record, where="t", ints=lambda v: n if v == mine else NotImplemented
    )
    assert isinstance(found[0], torch.Size)
    assert found[0][1] is n
    assert found[1]["n"] is n
    with pytest.raises(UnsupportedTensorError, match=r"^t\.context\[0\]\[1\]: the context of"):
        encode_subclass(holder((torch.Size([2, n]), n)), describe, where="t")


def test_a_class_without_unflatten_is_refused() -> None:
    """The error names a class that can be flattened but not unflattened."""
    with pytest.raises(UnsupportedTensorError) as error:
        encode(torch.ones(2).as_subclass(Unlucky))
    assert str(error.value) == (
        "t: test_subclasses.Unlucky is no traceable wrapper subclass; expected __tensor_flatten__ "
        "and __tensor_unflatten__; found no __tensor_unflatten__. "
        "Define __tensor_unflatten__ on the class."
    )


def test_a_context_that_cannot_be_encoded_is_refused() -> None:
    """The error contains the path of the tensor and into the context, the class and the fix."""
    with pytest.raises(UnsupportedTensorError) as error:
        encode(holder({"config": [1, torch.Generator()]}))
    assert str(error.value) == (
        "t.context['config'][1]: the context of test_subclasses.Holder cannot be encoded: a value "
        "has no record; expected a constant; found an object of torch._C.Generator. "
        "Call torch_fakeify.register_subclass(Holder, encode_ctx=..., decode_ctx=...) with "
        "functions from the context to plain data and back."
    )


def test_an_attribute_that_is_no_tensor_is_refused() -> None:
    """Torch traces tensors and opaque objects only, and any other attribute is refused."""
    with pytest.raises(UnsupportedTensorError) as error:
        encode(holder(scale=3))
    assert str(error.value) == (
        "t.scale: an inner attribute of test_subclasses.Holder is of no sort that torch traces; "
        "expected a tensor or an opaque object; found an object of builtins.int. "
        "Return it as part of the context of __tensor_flatten__."
    )


def test_an_enumeration_may_be_an_attribute() -> None:
    """A member of an enumeration is an opaque object for torch, and is recorded."""
    record = encode(holder(kind=Kind.A))
    assert decode_opaques(record, where="t") == {"kind": Kind.A}


def test_the_object_behind_torchs_stand_in_is_recorded(dtensors: dict[str, Any]) -> None:
    """Torch traces with a stand-in for an opaque object."""
    mesh = dtensors["sharded"].device_mesh
    stand_in = maybe_to_fake_obj(FakeTensorMode(), mesh)
    assert type(stand_in) is not type(mesh)
    assert decode_opaques(encode(holder(mesh=stand_in)), where="t") == {"mesh": mesh}


def test_an_unregistered_opaque_object_is_refused() -> None:
    """The fix in the error names the class of the object."""
    with pytest.raises(UnsupportedTensorError) as error:
        encode(holder(handle=Handle(3)))
    assert str(error.value) == (
        "t.handle: an opaque attribute of test_subclasses.Holder cannot be encoded: a value has no "
        "record; expected a constant; found an object of test_subclasses.Handle. "
        "Call torch_fakeify.register_subclass(Handle, encode_ctx=..., decode_ctx=...) with "
        "functions from the object to plain data and back."
    )


def test_a_class_that_nobody_can_find() -> None:
    """A class local to a function has no name for a reader."""

    class Local(Holder):
        pass

    name = "test_subclasses.test_a_class_that_nobody_can_find.<locals>.Local"
    with pytest.raises(UnsupportedTensorError) as error:
        encode(Local(torch.ones(2)))
    assert str(error.value) == (
        f"t: the tensor subclass {name} cannot be found by its name. Define it at the top level of "
        "a module, or call torch_fakeify.register_subclass(Local) in writer and reader."
    )


# --- registration ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("registry")
def test_registered_functions_encode_and_decode_the_context() -> None:
    """The record has plain data, of which the reader's function makes the context."""
    generator = torch.Generator()
    register_subclass(
        Holder,
        encode_ctx=lambda ctx: {"seed": ctx.initial_seed()},
        decode_ctx=lambda data: ("seed", data["seed"]),
    )
    generator.manual_seed(7)
    record = tfk.loads(tfk.dumps(encode(holder(generator))))
    assert decode_context(record, where="t") == ("seed", 7)


@pytest.mark.usefixtures("registry")
def test_a_reader_without_the_registration_gets_an_error() -> None:
    """The data of a registered function is not taken for the context itself."""
    register_subclass(Holder, encode_ctx=lambda ctx: [ctx], decode_ctx=lambda data: data[0])
    record = encode(holder(3))
    assert decode_context(record, where="t") == 3
    register_subclass(Holder)
    with pytest.raises(UnknownNameError) as error:
        decode_context(record, where="t")
    assert str(error.value) == (
        "t.context: the context of test_subclasses.Holder was written by a registered function. "
        "Call torch_fakeify.register_subclass(Holder, encode_ctx=..., decode_ctx=...) first, as "
        "the writer did."
    )


@pytest.mark.usefixtures("registry")
def test_a_context_recorded_before_the_registration_is_read() -> None:
    """The registered function is not called for a context that was recorded without it."""
    record = encode(holder(3))
    register_subclass(Holder, encode_ctx=lambda ctx: [ctx], decode_ctx=lambda data: data[0])
    assert decode_context(record, where="t") == 3


@pytest.mark.usefixtures("registry")
def test_registering_again_replaces_the_functions() -> None:
    """A second registration of a class replaces the functions of the first."""
    register_subclass(Holder, encode_ctx=lambda ctx: 1, decode_ctx=lambda data: data)
    register_subclass(Holder, encode_ctx=lambda ctx: 2, decode_ctx=lambda data: data)
    assert decode_context(encode(holder()), where="t") == 2


@pytest.mark.usefixtures("registry")
def test_a_registration_is_not_inherited() -> None:
    """A class does not inherit a registration, since its context may be another one."""

    @register_subclass
    class Derived(Holder):
        pass

    register_subclass(Holder, encode_ctx=lambda ctx: 1, decode_ctx=lambda data: data)
    assert decode_context(encode(Derived(torch.ones(2), "own")), where="t") == "own"


@pytest.mark.usefixtures("registry")
def test_registration_works_as_a_decorator() -> None:
    """The decorator may have functions, and registers also a class local to a function."""

    @register_subclass
    class Plain(Holder):
        pass

    @register_subclass(encode_ctx=str, decode_ctx=int)
    class Other(Holder):
        pass

    plain, other = encode(Plain(torch.ones(2), 5)), encode(Other(torch.ones(2), 5))
    assert subclass_of(plain, where="t") is Plain
    assert subclass_of(other, where="t") is Other
    assert decode_context(other, where="t") == 5
    assert other.context == OpaqueValue(kind="registered", data="5")


@pytest.mark.usefixtures("registry")
def test_a_class_inside_contexts_can_be_registered() -> None:
    """The registered functions encode its instances in contexts and in opaque attributes."""
    register_subclass(Handle, encode_ctx=lambda handle: handle.number, decode_ctx=Handle)
    record = encode(holder([Handle(4)], handle=Handle(3)))
    context: Any = decode_context(record, where="t")
    opaques: Any = decode_opaques(record, where="t")
    assert context[0].number == 4
    assert opaques["handle"].number == 3
    subclass_registry._BY_NAME.clear()
    with pytest.raises(UnknownNameError) as error:
        decode_opaques(record, where="t")
    assert str(error.value) == (
        "t.handle: the class 'test_subclasses.Handle' is not registered in this process. "
        "Call torch_fakeify.register_subclass(Handle, encode_ctx=..., decode_ctx=...) first, as "
        "the writer did."
    )


@pytest.mark.usefixtures("registry")
def test_a_tensor_class_is_not_decoded_inside_a_context() -> None:
    """A file cannot call the function of a tensor class's context on other data."""
    register_subclass(Holder, encode_ctx=lambda ctx: ctx, decode_ctx=lambda data: data)
    data = TupleValue(items=("test_subclasses.Holder", 3))
    record = SubclassDesc(
        cls="test_subclasses.Holder", context=OpaqueValue(kind="object", data=data)
    )
    with pytest.raises(UnknownNameError, match=r"'test_subclasses\.Holder' is not registered"):
        decode_context(record, where="t")


@pytest.mark.usefixtures("registry")
def test_dataclasses_of_registered_packages_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registration means that its package is trusted."""
    module = types.ModuleType("third")
    third: Any = module
    third.Config = dataclasses.make_dataclass("Config", [("number", int)])
    third.Config.__module__ = "third"
    third.Other = types.new_class("Other", (Holder,))
    third.Other.__module__ = "third"
    monkeypatch.setitem(sys.modules, "third", module)
    with pytest.raises(UnsupportedTensorError, match="of another package than the tensor subclass"):
        encode(holder(third.Config(3)))
    register_subclass(third.Other)
    assert decode_context(encode(holder(third.Config(3))), where="t") == third.Config(3)


@pytest.mark.usefixtures("registry")
def test_wrong_registrations_are_refused() -> None:
    """One function alone, none for another class, and a tensor class without the protocol fail."""
    with pytest.raises(UnsupportedValueError) as alone:
        register_subclass(Holder, encode_ctx=str)
    with pytest.raises(UnsupportedValueError) as none:
        register_subclass(Handle)
    with pytest.raises(UnsupportedTensorError) as half:
        register_subclass(Unlucky)
    assert str(alone.value) == (
        "test_subclasses.Holder: a class is registered with one function alone; expected both "
        "encode_ctx and decode_ctx, or neither"
    )
    assert str(none.value) == (
        "test_subclasses.Handle: a class that is no tensor class is registered without functions; "
        "expected encode_ctx and decode_ctx"
    )
    assert half.value.found == "no __tensor_unflatten__"


def test_register_subclass_is_public() -> None:
    """``torch_fakeify.register_subclass`` is this function."""
    assert tfk.register_subclass is register_subclass


# --- decode ---------------------------------------------------------------------------------------


def test_a_class_that_is_not_imported_is_refused() -> None:
    """The error contains the class and its import, and nothing is imported."""
    record = SubclassDesc(cls="some_package.tensors.Packed")
    with pytest.raises(UnknownNameError) as error:
        subclass_of(record, where="t")
    assert str(error.value) == (
        "t: the tensor subclass 'some_package.tensors.Packed' is not known in this process. "
        "Run `import some_package.tensors` first if you trust it."
    )


@pytest.mark.parametrize("name", ["__main__.Mine", "m.f.<locals>.Mine", "Mine"])
def test_a_class_that_cannot_be_imported_is_refused(name: str) -> None:
    """A class that cannot be imported is refused, and the fix in the error is to register it."""
    with pytest.raises(UnknownNameError) as error:
        subclass_of(SubclassDesc(cls=name), where="t")
    assert str(error.value) == (
        f"t: the tensor subclass {name!r} is not known in this process. "
        "Define it and call torch_fakeify.register_subclass(Mine) first."
    )


@pytest.mark.parametrize("name", [
    "subprocess.Popen", "torch.Tensor", "torch.nn.Parameter", "test_subclasses.Unlucky",
    "test_subclasses.Handle", "builtins.type", "torch._subclasses.fake_tensor.FakeTensor",
])  # fmt: skip
def test_a_class_that_is_no_wrapper_is_refused(name: str) -> None:
    """A file cannot call ``__tensor_unflatten__`` on anything else."""
    with pytest.raises(UnknownNameError) as error:
        subclass_of(SubclassDesc(cls=name), where="t")
    assert str(error.value) == (
        f"t: the class {name!r} is no traceable wrapper subclass; expected a tensor subclass with "
        "__tensor_flatten__ and __tensor_unflatten__"
    )


def test_decoding_imports_nothing(tmp_path: Path) -> None:
    """A module on the path is not imported because a record names it."""
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    code = """
        import sys
        sys.path.insert(0, sys.argv[1])
        from torch_fakeify.records.tensor import DictValue, OpaqueValue, SubclassDesc, TupleValue
        from torch_fakeify.errors import UnknownNameError
        from torch_fakeify.encoding.subclasses import decode_context, subclass_of

        context = OpaqueValue(
            kind="dataclass", data=TupleValue(items=("trap.C", DictValue(items=())))
        )
        record = SubclassDesc(cls="trap.C", context=context)
        for read in (subclass_of, decode_context):
            try:
                read(record, where="t")
            except UnknownNameError as error:
                assert error.fix == "Run `import trap` first if you trust it.", error
            else:
                raise SystemExit("read")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), tmp_path], check=True)


def test_an_attribute_that_occurs_twice_is_refused() -> None:
    """An inner attribute is a tensor or an opaque object, and occurs once."""
    tensors = (("a", describe(torch.ones(1))),)
    for opaques in ((("a", None),), (("b", None), ("b", None))):
        record = SubclassDesc(
            cls="test_subclasses.Holder", tensors=tensors if opaques[0][0] == "a" else (),
            opaques=opaques,
        )  # fmt: skip
        with pytest.raises(FormatError, match=r"^t\.[ab]: an inner attribute stands twice$"):
            decode_opaques(record, where="t")


@pytest.mark.parametrize("value", [
    OpaqueValue(kind="registered", data=None),
    OpaqueValue(kind="TreeSpec"),
    OpaqueValue(kind="dataclass", data=TupleValue(items=())),
    OpaqueValue(kind="object", data=3),
])  # fmt: skip
def test_values_without_a_meaning_are_refused(value: OpaqueValue) -> None:
    """Kinds of other modules, and kinds of contexts with wrong contents, are refused."""
    record = SubclassDesc(cls="test_subclasses.Holder", context=TupleValue(items=(value,)))
    with pytest.raises(FormatError, match=r"a value of this kind has no meaning here; found '"):
        decode_context(record, where="t")


def test_tensors_in_opaque_attributes_are_decoded_by_the_hook() -> None:
    """The reader's hook for tensors is called there too."""
    desc = describe(torch.ones(1))
    record = SubclassDesc(cls="test_subclasses.Holder", opaques=(("a", TensorValue(tensor=desc)),))
    assert decode_opaques(record, where="t", tensors=lambda found: found) == {"a": desc}
