"""Wrapper subclasses of torch and of users: records, rebuilding in another process, refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import subclass_zoo as zoo
import torch
from holder_classes import Handle, Holder, Kind, Unlucky, encode, holder
from processes import piped
from subclass_zoo import describe, facts, rebuild
from torch._library.fake_class_registry import maybe_to_fake_obj
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.masked import masked_tensor
from torch.testing._internal.logging_tensor import LoggingTensor
from torch.testing._internal.two_tensor import TwoTensor

import torch_fakeify as tfk
from torch_fakeify.encoding.subclasses import (
    Meshes,
    context_decoder,
    decode_context,
    decode_opaques,
    encode_subclass,
)
from torch_fakeify.errors import (
    FormatError,
    UnsupportedTensorError,
)
from torch_fakeify.records.tensor import OpaqueValue

if TYPE_CHECKING:
    from collections.abc import Generator

pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of MaskedTensors", "ignore:The PyTorch API of SparseSemiStructured"
)

TORCH = Path(torch.__file__).parent


@pytest.fixture(scope="module")
def dtensors() -> Generator[dict[str, Any]]:
    """DTensors in a fake world."""
    with zoo.fake_world():
        yield zoo.distributed()


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
import torch_fakeify as tfk
from torch_fakeify.encoding.subclasses import Meshes
from subclass_zoo import facts, rebuild

assert "torch.testing._internal.two_tensor" not in sys.modules
meshes = Meshes()
descs = tfk.loads(sys.stdin.buffer.read())
print(json.dumps({kind: facts(rebuild(desc, meshes)) for kind, desc in descs.items()}))
"""


@pytest.mark.sweep
def test_wrappers_are_decoded_in_a_fresh_interpreter(
    dtensors: dict[str, Any],
) -> None:
    """The process has no process group and has imported none of the classes."""
    kinds = {
        kind: make()
        for kind, make in zoo.PLAIN.items()
        if kind.startswith(("TwoTensor", "NestedTensor", "ComplexTensor", "AsyncCollective"))
    }
    kinds |= {kind: t for kind, t in dtensors.items() if kind != "LocalTensor"}
    data = tfk.dumps({kind: describe(t) for kind, t in kinds.items()})
    assert json.loads(piped(READER, data)) == {kind: facts(t) for kind, t in kinds.items()}


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
    found: Any = decode_context(
        record, context_decoder(record, tensors=lambda desc: (desc, 1)), where="t"
    )
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
    decoder = context_decoder(record, ints=lambda v: n if v == mine else NotImplemented)
    found: Any = decode_context(record, decoder, where="t")
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
        "t: holder_classes.Unlucky is no traceable wrapper subclass; expected __tensor_flatten__ "
        "and __tensor_unflatten__; found no __tensor_unflatten__. "
        "Define __tensor_unflatten__ on the class."
    )


def test_a_context_that_cannot_be_encoded_is_refused() -> None:
    """The error contains the path of the tensor and into the context, the class and the fix."""
    with pytest.raises(UnsupportedTensorError) as error:
        encode(holder({"config": [1, torch.Generator()]}))
    assert str(error.value) == (
        "t.context['config'][1]: the context of holder_classes.Holder cannot be encoded: a value "
        "has no record; expected a constant; found an object of torch._C.Generator. "
        "Call torch_fakeify.register_subclass(Holder, encode_ctx=..., decode_ctx=...) with "
        "functions from the context to plain data and back."
    )


def test_an_attribute_that_is_no_tensor_is_refused() -> None:
    """Torch traces tensors and opaque objects only, and any other attribute is refused."""
    with pytest.raises(UnsupportedTensorError) as error:
        encode(holder(scale=3))
    assert str(error.value) == (
        "t.scale: an inner attribute of holder_classes.Holder is of no sort that torch traces; "
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
        "t.handle: an opaque attribute of holder_classes.Holder cannot be encoded: a value has no "
        "record; expected a constant; found an object of holder_classes.Handle. "
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
