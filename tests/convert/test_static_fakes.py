"""Plain dense tensors of static shape and their views are what the walk of the builder makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from converted_checks import WalkConverter
from hypothesis import given
from strategies import DTYPES, Group, tensor_groups
from tensor_facts import facts, parts, relations, text
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from torch_fakeify.compat import torch_dispatch
from torch_fakeify.convert.converter import MetaConverter
from torch_fakeify.describe.describer import MetaTensorDescriber

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch_fakeify.records.tensor import MetaTensorDesc

pytestmark = pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor:UserWarning")


def warm(converter_of: type[MetaConverter] = MetaConverter) -> MetaConverter:
    """A converter that knows the devices: the first tensor of each goes the plain way."""
    converter = converter_of(FakeTensorMode())
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


@given(tensor_groups(marks=True, dtypes=DTYPES))
def test_both_ways_give_the_same_fakes(group: Group) -> None:
    """Attribute by attribute, whatever was converted before."""
    describer = MetaTensorDescriber()
    records = [describer.describe_tensor(t) for t in group]
    found = []
    for converter_of in (MetaConverter, WalkConverter):
        converter = warm(converter_of)
        found.append(everything([converter.from_desc(d) for d in records]))
    assert found[0] == found[1]


@pytest.fixture
def plain_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ids of the records that go the plain way."""
    calls: list[int] = []
    plain = MetaConverter._make

    def spy(self: Any, d: MetaTensorDesc, *args: Any) -> Any:
        calls.append(d.id)
        return plain(self, d, *args)

    monkeypatch.setattr(MetaConverter, "_make", spy)
    return calls


def models() -> Iterator[torch.Tensor]:
    """What models and their inputs consist of."""
    x, w = torch.empty(6, 4), torch.nn.Parameter(torch.empty(6, 4))
    yield from (x, w, torch.nn.Buffer(torch.empty(3)), torch.empty(2, device="meta"))
    yield from (x[1:], x.t(), x[2], x.view(-1), w[1:], w.t(), w.detach())
    with torch.no_grad():
        yield from (w[1:], w.view(3, 8))
    yield w.detach()[1:].requires_grad_()
    yield from (w * 2).chunk(2)


def test_what_models_consist_of_needs_no_walk(plain_calls: list[int]) -> None:
    """Leaves, views of leaves whether or not these require grad, and tensors with a history."""
    describer, converter = MetaTensorDescriber(), warm()
    plain_calls.clear()
    for t in models():
        converter.from_desc(describer.describe_tensor(t))
    assert plain_calls == []


@pytest.mark.parametrize(
    "change",
    [
        {"is_pinned": True},
        {"grad_dtype": "float16"},
        {"is_neg": True},
        {"nested_int": 0},
        {"creation_meta": "unheard of"},
        {"is_inference": True},
        {"dtype": "int32"},
        {"stride": (-1,)},
        {"size": (3, 1)},
        {"size": (2**63,)},
        {"is_leaf": False},
    ],
)
def test_what_is_not_plain_is_left_to_the_plain_way(
    change: dict[str, Any], plain_calls: list[int]
) -> None:
    """A view with something of note is made, or refused, as by the walk."""
    d = MetaTensorDescriber().describe_tensor(torch.empty(4)[1:])
    d = msgspec.structs.replace(d, **change)
    found = []
    for converter_of in (MetaConverter, WalkConverter):
        converter = warm(converter_of)
        plain_calls.clear()
        try:
            found.append(everything([converter.from_desc(d)]))
        except Exception as error:  # noqa: BLE001 - the same one is expected of both
            found.append(f"{type(error).__name__}: {error}")
        else:
            assert d.id in plain_calls
    assert found[0] == found[1]


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
    found: list[Any] = []
    for converter_of in (MetaConverter, WalkConverter):
        with torch.autograd._force_original_view_tracking(True):
            fake: Any = warm(converter_of).from_desc(d)
        with fake.fake_mode:
            again = fake._view_func_unsafe(torch.empty(4, 6))
        found.append((again.size(), again.stride(), again.storage_offset()))
    assert found == [((3, 3), (6, 2), 6)] * 2
