"""Registration of wrapper subclasses, and what decoding refuses."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch
from holder_classes import Handle, Holder, Unlucky, encode, holder
from processes import fresh
from subclass_zoo import describe

import torch_fakeify as tfk
from torch_fakeify.encoding import subclass_registry
from torch_fakeify.encoding.subclasses import (
    context_decoder,
    decode_context,
    decode_opaques,
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
    from pathlib import Path


@pytest.fixture
def registry() -> Generator[None]:
    """Remove what a test registers after it."""
    before = dict(subclass_registry._BY_NAME)
    yield
    subclass_registry._BY_NAME.clear()
    subclass_registry._BY_NAME.update(before)


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
        "t.context: the context of holder_classes.Holder was written by a registered function. "
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
def test_a_registration_is_of_one_class_and_can_be_replaced() -> None:
    """A class does not inherit it, since its context may be another one."""

    @register_subclass
    class Derived(Holder):
        pass

    for number in (1, 2):
        register_subclass(Holder, encode_ctx=lambda ctx, n=number: n, decode_ctx=lambda data: data)
    assert decode_context(encode(holder()), where="t") == 2
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
        "t.handle: the class 'holder_classes.Handle' is not registered in this process. "
        "Call torch_fakeify.register_subclass(Handle, encode_ctx=..., decode_ctx=...) first, as "
        "the writer did."
    )


@pytest.mark.usefixtures("registry")
def test_a_tensor_class_is_not_decoded_inside_a_context() -> None:
    """A file cannot call the function of a tensor class's context on other data."""
    register_subclass(Holder, encode_ctx=lambda ctx: ctx, decode_ctx=lambda data: data)
    data = TupleValue(items=("holder_classes.Holder", 3))
    record = SubclassDesc(
        cls="holder_classes.Holder", context=OpaqueValue(kind="object", data=data)
    )
    with pytest.raises(UnknownNameError, match=r"'holder_classes\.Holder' is not registered"):
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


WRONG = {
    "holder_classes.Holder: a class is registered with one function alone; expected both encode_ctx and "
    "decode_ctx, or neither": (Holder, {"encode_ctx": str}),
    "holder_classes.Handle: a class that is no tensor class is registered without functions; expected "
    "encode_ctx and decode_ctx": (Handle, {}),
    "holder_classes.Unlucky: holder_classes.Unlucky is no traceable wrapper subclass; expected "
    "__tensor_flatten__ and __tensor_unflatten__; found no __tensor_unflatten__. Define "
    "__tensor_unflatten__ on the class.": (Unlucky, {}),
}


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("message", WRONG)
def test_wrong_registrations_are_refused(message: str) -> None:
    """One function alone, none for another class, and a tensor class without the protocol fail."""
    cls, functions = WRONG[message]
    with pytest.raises((UnsupportedValueError, UnsupportedTensorError)) as error:
        tfk.register_subclass(cls, **functions)
    assert str(error.value) == message


# --- decode ---------------------------------------------------------------------------------------


UNKNOWN = {
    "some_package.tensors.Packed": "Run `import some_package.tensors` first if you trust it.",
    **dict.fromkeys(
        ["__main__.Mine", "m.f.<locals>.Mine", "Mine"],
        "Define it and call torch_fakeify.register_subclass(Mine) first.",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_class_that_is_not_imported_is_refused(name: str) -> None:
    """The error contains the class and its import, or how to register it."""
    with pytest.raises(UnknownNameError) as error:
        subclass_of(SubclassDesc(cls=name), where="t")
    assert str(error.value) == (
        f"t: the tensor subclass {name!r} is not known in this process. {UNKNOWN[name]}"
    )


NO_WRAPPERS = """
    subprocess.Popen torch.Tensor torch.nn.Parameter holder_classes.Unlucky holder_classes.Handle
    builtins.type torch._subclasses.fake_tensor.FakeTensor
"""


@pytest.mark.parametrize("name", NO_WRAPPERS.split())
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
        from torch_fakeify.encoding.names import decode_class, decode_function
        from torch_fakeify.encoding.subclasses import decode_context, subclass_of
        from torch_fakeify.errors import UnknownNameError
        from torch_fakeify.records.tensor import (
            DictValue, FunctionValue, OpaqueValue, SubclassDesc, TupleValue
        )

        context = OpaqueValue(
            kind="dataclass", data=TupleValue(items=("trap.C", DictValue(items=())))
        )
        record = SubclassDesc(cls="trap.C", context=context)
        function = FunctionValue(kind="function", name="trap.f")
        for read in (
            lambda: subclass_of(record, where="t"),
            lambda: decode_context(record, where="t"),
            lambda: decode_class("trap.C"),
            lambda: decode_function(function),
        ):
            try:
                read()
            except UnknownNameError as error:
                assert error.fix in (None, "Run `import trap` first if you trust it."), error
            else:
                raise SystemExit("read")
    """
    fresh("-c", textwrap.dedent(code), tmp_path)


def test_an_attribute_that_occurs_twice_is_refused() -> None:
    """An inner attribute is a tensor or an opaque object, and occurs once."""
    tensors = (("a", describe(torch.ones(1))),)
    for opaques in ((("a", None),), (("b", None), ("b", None))):
        record = SubclassDesc(cls="holder_classes.Holder", tensors=tensors, opaques=opaques)
        with pytest.raises(FormatError, match=r"^t\.[ab]: an inner attribute occurs twice$"):
            decode_opaques(record, where="t")


@pytest.mark.parametrize("value", [
    OpaqueValue(kind="registered", data=None),
    OpaqueValue(kind="TreeSpec"),
    OpaqueValue(kind="dataclass", data=TupleValue(items=())),
    OpaqueValue(kind="object", data=3),
])  # fmt: skip
def test_values_without_a_meaning_are_refused(value: OpaqueValue) -> None:
    """Kinds of other modules, and kinds of contexts with wrong contents, are refused."""
    record = SubclassDesc(cls="holder_classes.Holder", context=TupleValue(items=(value,)))
    with pytest.raises(FormatError, match=r"a value of this kind has no meaning here; found '"):
        decode_context(record, where="t")


def test_tensors_in_opaque_attributes_are_decoded_by_the_hook() -> None:
    """The reader's hook for tensors is called there too."""
    desc = describe(torch.ones(1))
    record = SubclassDesc(cls="holder_classes.Holder", opaques=(("a", TensorValue(tensor=desc)),))
    decoder = context_decoder(record, tensors=lambda found: found)
    assert decode_opaques(record, decoder, where="t") == {"a": desc}
