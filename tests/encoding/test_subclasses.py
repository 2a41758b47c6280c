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
from torch.testing._internal.two_tensor import TwoTensor

import torch_fakeify as tfk
from torch_fakeify.encoding.subclasses import (
    Meshes,
    context_decoder,
    decode_context,
    decode_opaques,
    encode_subclass,
)
from torch_fakeify.errors import FormatError, UnsupportedTensorError
from torch_fakeify.records.tensor import OpaqueValue

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

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
    stride = t.stride() if zoo.is_strided(t) else ()
    with mode:
        expected = type(t).__tensor_unflatten__(inner, context, t.shape, stride)
        found = type(t).__tensor_unflatten__(ours, decoded, t.shape, stride)
    return found, expected


def check(t: Any, meshes: Meshes) -> None:
    """Check that a wrapper and its parts are decoded, and that the decoded context makes equal fakes."""
    desc = tfk.loads(tfk.dumps(describe(t)))
    assert facts(rebuild(desc, meshes)) == facts(t)
    found, expected = fake_both_ways(t)
    assert facts(found) == facts(expected)


@pytest.mark.parametrize("kind", zoo.PLAIN)
def test_torchs_wrappers_round_trip(kind: str) -> None:
    """Each wrapper of torch is decoded with its metadata."""
    check(zoo.PLAIN[kind](), Meshes())


def test_dtensors_round_trip(dtensors: dict[str, Any]) -> None:
    """DTensors of every placement and mesh are decoded, with their meshes."""
    meshes = Meshes()
    for t in dtensors.values():
        check(t, meshes)


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


PROTOCOL = (
    "is no traceable wrapper subclass; expected __tensor_flatten__ and __tensor_unflatten__; found"
)


class Outer:
    """A class is local to it."""

    @staticmethod
    def make() -> Any:
        """Return a tensor of a class that has no name for a reader."""

        class Local(Holder):
            pass

        return Local(torch.ones(2))


REFUSED: dict[str, Callable[[], Any]] = {
    # Torch does not trace these either.
    f"t: torch.masked.maskedtensor.core.MaskedTensor {PROTOCOL} no __tensor_flatten__ and no "
    "__tensor_unflatten__. Define __tensor_flatten__ and __tensor_unflatten__ on the class.": (
        lambda: masked_tensor(torch.ones(2), torch.ones(2, dtype=torch.bool))
    ),
    f"t: holder_classes.Unlucky {PROTOCOL} no __tensor_unflatten__. Define __tensor_unflatten__ on the "
    "class.": lambda: torch.ones(2).as_subclass(Unlucky),
    "t.context['config'][1]: the context of holder_classes.Holder cannot be encoded: a value has no "
    "record; expected a constant; found an object of torch._C.Generator. Call "
    "torch_fakeify.register_subclass(Holder, encode_ctx=..., decode_ctx=...) with functions from the "
    "context to plain data and back.": lambda: holder({"config": [1, torch.Generator()]}),
    "t.scale: an inner attribute of holder_classes.Holder is of no sort that torch traces; expected a "
    "tensor or an opaque object; found an object of builtins.int. Return it as part of the context of "
    "__tensor_flatten__.": lambda: holder(scale=3),
    "t.handle: an opaque attribute of holder_classes.Holder cannot be encoded: a value has no record; "
    "expected a constant; found an object of holder_classes.Handle. Call "
    "torch_fakeify.register_subclass(Handle, encode_ctx=..., decode_ctx=...) with functions from the "
    "object to plain data and back.": lambda: holder(handle=Handle(3)),
    "t: the tensor subclass test_subclasses.Outer.make.<locals>.Local cannot be found by its name. Define "
    "it at the top level of a module, or call torch_fakeify.register_subclass(Local) in writer and "
    "reader.": Outer.make,
}


@pytest.mark.parametrize("message", REFUSED)
def test_wrappers_without_a_record_are_refused(message: str) -> None:
    """The error contains the path, the class and the fix."""
    with pytest.raises(UnsupportedTensorError) as error:
        encode(REFUSED[message]())
    assert str(error.value) == message


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
