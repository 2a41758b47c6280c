"""Views of plain dense tensors, and conversion below any mode or transform."""

from __future__ import annotations

from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from tensor_facts import facts, parts, relations, text
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from torch_fakeify.compat import torch_dispatch
from torch_fakeify.convert.converter import MetaConverter
from torch_fakeify.describe.describer import MetaTensorDescriber
from torch_fakeify.errors import ConvertError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor:UserWarning")


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
    ("change", "attribute", "expected"),
    [
        ({"is_pinned": True}, "_fakeify_lacks", ("strided", True)),
        ({"grad_dtype": "float16"}, "grad_dtype", torch.float16),
        ({"dtype": "int32"}, "dtype", torch.int32),
        ({"is_inference": True}, "requires_grad", False),
        ({"nested_int": 0}, "nested_int_memo.node.is_nested_int", True),
        ({"is_neg": True}, "is_neg", True),
        ({"is_neg": True}, "_base.is_neg", False),
    ],
)
def test_a_view_has_the_recorded_attribute(
    change: dict[str, Any], attribute: str, expected: Any
) -> None:
    """A view of a plain base with one property of its own."""
    d = MetaTensorDescriber().describe_tensor(torch.empty(4)[1:])
    found = attrgetter(attribute)(
        MetaConverter(FakeTensorMode()).from_desc(msgspec.structs.replace(d, **change))
    )
    assert (found() if callable(found) else found) == expected


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
        MetaConverter(FakeTensorMode()).from_desc(msgspec.structs.replace(d, **change))


class _Passing(TorchFunctionMode):
    """Sees each function that is called, and changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def excluded(key: Any) -> Iterator[None]:
    """A dispatch key is excluded inside, and still is at the end."""
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)
    try:
        yield
        assert torch_dispatch.key_excluded(key)
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)


def inside(context: Callable[[], Any]) -> Callable[[Callable[[Any], Any]], Any]:
    """Call a function inside a context."""

    def call(function: Callable[[Any], Any]) -> None:
        with context():
            function(None)

    return call


CALLS: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    "a fake mode": inside(FakeTensorMode),
    "inference mode": inside(torch.inference_mode),
    "no_grad": inside(torch.no_grad),
    "a default device": inside(lambda: torch.device("meta")),
    "a function mode": inside(_Passing),
    "views untracked": inside(lambda: excluded(torch_dispatch.DispatchKey.ADInplaceOrView)),
    "no autograd": inside(lambda: excluded(torch_dispatch.DispatchKey.AutogradFunctionality)),
    "vmap": lambda f: torch.vmap(f)(torch.zeros(2)),
    "functionalize": lambda f: torch.func.functionalize(f)(torch.zeros(2)),
}


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_what_is_active_around_a_call_changes_nothing(name: str, symbolic: bool) -> None:
    """Modes, transforms and excluded keys; all is as before afterwards."""
    describer = MetaTensorDescriber()
    w = torch.nn.Parameter(torch.empty(2, 3))
    tensors = w[1:], w[:1], torch.empty(4)[1:], torch.empty(4, 5), torch.empty(4, 5)
    records = [
        describer.describe_tensor(t, source=LocalSource(f"x{i}")) for i, t in enumerate(tensors)
    ]
    made: list[Any] = []

    def convert(x: Any) -> Any:
        converter = MetaConverter(FakeTensorMode(shape_env=ShapeEnv() if symbolic else None))
        before = torch.is_grad_enabled(), len(_get_current_dispatch_mode_stack())
        made.append([converter.from_desc(d) for d in records])
        assert (torch.is_grad_enabled(), len(_get_current_dispatch_mode_stack())) == before
        return x

    convert(None)
    CALLS[name](convert)
    plain, within = map(everything, made)
    assert within == plain


def test_a_view_that_is_made_again_by_its_operator_is() -> None:
    """Where autograd notes how to make a view again, that is by its own sizes and strides."""
    base = torch.empty(4, 6)
    d = MetaTensorDescriber().describe_tensor(base[1:, ::2])
    with torch.autograd._force_original_view_tracking(True):
        fake: Any = MetaConverter(FakeTensorMode()).from_desc(d)
    with fake.fake_mode:
        again = fake._view_func_unsafe(torch.empty(4, 6))
    assert (again.size(), again.stride(), again.storage_offset()) == ((3, 3), (6, 2), 6)
