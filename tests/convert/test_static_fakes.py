"""Plain dense tensors of static shape and their views, below any mode or transform."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from tensor_facts import facts, parts, relations, text
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from torch_fakeify.compat import torch_dispatch
from torch_fakeify.convert.converter import MetaConverter
from torch_fakeify.describe.describer import MetaTensorDescriber
from torch_fakeify.errors import ConvertError

pytestmark = pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor:UserWarning")


def warm() -> MetaConverter:
    """A converter that made a tensor of each device before."""
    converter = MetaConverter(FakeTensorMode())
    describer = MetaTensorDescriber()
    for i, device in enumerate(("cpu", "meta")):
        d = describer.describe_tensor(torch.empty(1, device=device))
        storage = msgspec.structs.replace(d.storage, id=-1 - i)
        converter.from_desc(msgspec.structs.replace(d, id=-1 - i, storage=storage))
    return converter


def attributes(fake: Any) -> dict[str, str]:
    """The Python attributes of a fake tensor as text, but for its mode."""
    return {name: text(value) for name, value in vars(fake).items() if name != "fake_mode"}


def everything(fakes: list[Any]) -> list[Any]:
    """All that can be asked of fakes and their parts, and how these lie to one another."""
    everyone = parts(fakes)
    return [
        [facts(t) for t in fakes],
        [attributes(t) for t in everyone],
        [t.is_inference() or t._version for t in everyone],
        [None if t.grad_fn is None else dict.fromkeys(dir(t.grad_fn)) for t in everyone],
        relations(everyone),
    ]


@pytest.mark.parametrize(
    ("change", "attribute"),
    [
        ({"is_pinned": True}, ("_fakeify_lacks", ("strided", True))),
        ({"grad_dtype": "float16"}, ("grad_dtype", torch.float16)),
        ({"dtype": "int32"}, ("dtype", torch.int32)),
        ({"is_inference": True}, ("requires_grad", False)),
    ],
)
def test_a_view_has_the_recorded_attribute(
    change: dict[str, Any], attribute: tuple[str, Any]
) -> None:
    """A view of a plain base with one property of its own."""
    d = MetaTensorDescriber().describe_tensor(torch.empty(4)[1:])
    fake = warm().from_desc(msgspec.structs.replace(d, **change))
    assert getattr(fake, attribute[0]) == attribute[1]


def test_a_view_has_the_recorded_nested_int() -> None:
    """The nested int of offsets."""
    d = MetaTensorDescriber().describe_tensor(torch.empty(4)[1:])
    fake = warm().from_desc(msgspec.structs.replace(d, nested_int=0))
    assert fake.nested_int_memo.node.is_nested_int()


def test_a_view_has_the_recorded_bit() -> None:
    """The bit of a lazy negation."""
    d = MetaTensorDescriber().describe_tensor(torch.empty(4)[1:])
    fake = warm().from_desc(msgspec.structs.replace(d, is_neg=True))
    assert fake.is_neg()
    assert not fake._base.is_neg()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"creation_meta": "unheard of"}, "the creation meta of the view is not known"),
        ({"stride": (-1,)}, "a size is out of range"),
        ({"size": (3, 1)}, "sizes and strides differ in number"),
        ({"size": (2**63,)}, "a size is out of range"),
        ({"is_leaf": False}, "a tensor that is no leaf requires grad"),
    ],
)
def test_an_impossible_view_is_refused(change: dict[str, Any], problem: str) -> None:
    """The error says which property cannot be."""
    d = MetaTensorDescriber().describe_tensor(torch.empty(4)[1:])
    with pytest.raises(ConvertError, match=problem):
        warm().from_desc(msgspec.structs.replace(d, **change))


class _Passing(TorchFunctionMode):
    """Sees each function that is called, and changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_what_is_active_around_a_call_changes_nothing() -> None:
    """Grad, inference and other modes, transforms and excluded keys; all is as before afterwards."""
    describer = MetaTensorDescriber()
    w = torch.nn.Parameter(torch.empty(2, 3))
    records = [describer.describe_tensor(t) for t in (w[1:], w[:1], torch.empty(4)[1:])]
    converters = [warm() for _ in range(9)]
    plain = everything([converters[0].from_desc(d) for d in records])

    def check(*_: Any) -> torch.Tensor:
        converter = converters.pop()
        before = torch.is_grad_enabled(), len(_get_current_dispatch_mode_stack())
        fakes = [converter.from_desc(d) for d in records]
        assert (torch.is_grad_enabled(), len(_get_current_dispatch_mode_stack())) == before
        made.append(fakes)
        return torch.zeros(())

    made: list[Any] = []
    with FakeTensorMode():
        check()
    with torch.inference_mode():
        check()
    with torch.no_grad(), torch.device("meta"):
        check()
    torch.vmap(lambda x: (check(), x)[1])(torch.zeros(2))
    torch.func.functionalize(lambda x: (check(), x)[1])(torch.zeros(2))
    for key in (
        torch_dispatch.DispatchKey.ADInplaceOrView,
        torch_dispatch.DispatchKey.AutogradFunctionality,
    ):
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)
        try:
            check()
        finally:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    with _Passing():
        check()
    assert [everything(fakes) for fakes in made] == [plain] * 8


def test_a_view_that_is_made_again_by_its_operator_is() -> None:
    """Where autograd notes how to make a view again, that is by its own sizes and strides."""
    base = torch.empty(4, 6)
    d = MetaTensorDescriber().describe_tensor(base[1:, ::2])
    with torch.autograd._force_original_view_tracking(True):
        fake: Any = warm().from_desc(d)
    with fake.fake_mode:
        again = fake._view_func_unsafe(torch.empty(4, 6))
    assert (again.size(), again.stride(), again.storage_offset()) == ((3, 3), (6, 2), 6)
