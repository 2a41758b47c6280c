"""``frontend``: results of every class that torch's pytree knows, and tensors that are no inputs."""

from __future__ import annotations

import collections
import enum
from typing import TYPE_CHECKING, Any

import pytest
import torch
from functorch import make_fx
from small_frontend import Jit

import torch_fakeify as tfk
from torch_fakeify import frontend
from torch_fakeify.frontend import Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
from frontend_cases import grown
from frontend_values import (
    DYNAMIC,
    Batch,
    Deep,
    Frozen,
    Keyed,
    Keyless,
    Listed,
    Mode,
    Pair,
    Slotted,
)

# --- results ----------------------------------------------------------------------------------------


RESULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a shape": lambda x: (x + 1, x.shape, x.shape[1:]),
    "a shape alone": lambda x: x.shape,
    "numbers of a size": lambda x: [x.shape[0], x.shape[0] * 2, x.shape[0] / 2, x.shape[0] > 2],
    "constants": lambda x: (x.dtype, x.device, None, "s", 2.5, True, 1j, b"b", x.layout, x * 2),
    "nothing": lambda x: None,
    "no tensor": lambda x: {"a": [1, ("b",)]},
    "a nested one": lambda x: (x, {"a": [x + 1]}),
    "a view of an input": lambda x: x[1:],
    "a deque": lambda x: collections.deque([x + 1, 2], maxlen=3),
    "a dataclass": lambda x: Batch(x + 1, None, False, "n", Mode.MUL),
    "a frozen dataclass": lambda x: Frozen(Batch(x * 2), x.shape[0]),
    "own containers": lambda x: [Keyed(x, x + 1), Keyless(x + 2, 3, 4), Slotted(1, x), Deep(x, 1)],
    "a named tuple": lambda x: Pair(x + 1, Pair("a", x.shape)),
    "dictionaries": lambda x: [
        collections.OrderedDict(b=x, a=x + 1), collections.defaultdict(list, a=[x]),
        Listed(a=x + 1), {1: x, (2, None): x + 2},
    ],
    "results of torch": lambda x: [x.max(0), x.topk(1), torch.linalg.svd(x)],
    "an enumeration": lambda x: (x, Mode.ADD, slice(1, 2), range(3), {1, 2}),
}  # fmt: skip


def assert_same(a: Any, b: Any) -> None:
    """Fail if two results differ in a class, a constant or a tensor."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    elif isinstance(a, (list, tuple, collections.deque)):
        assert len(a) == len(b)
        assert getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        assert_same(list(a.values()), list(b.values()))
        assert getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
    elif isinstance(a, Slotted):
        assert_same([a.a, a.b], [b.a, b.b])
    elif type(a).__module__ in (__name__, "frontend_values") and not isinstance(a, enum.Enum):
        assert_same(vars(a), vars(b))
    else:
        assert a == b


@pytest.mark.parametrize("policy", [Policy(), DYNAMIC], ids=["static", "dynamic"])
@pytest.mark.parametrize("what", RESULTS)
def test_a_result_of_any_class(what: str, policy: Policy) -> None:
    """Classes and constants are those of eager, also at other sizes."""
    fn = RESULTS[what]
    jit = Jit(lambda x: fn(x), policy)
    for rows in (4, 5):
        assert_same(jit(grown(rows, 3)), fn(grown(rows, 3)))


def test_a_tensor_that_is_returned_twice_is_one_object() -> None:
    """A tensor that is returned twice is one object, and a returned input is the input itself."""

    def fn(x: torch.Tensor) -> Any:
        y = x + 1
        return y, [y, {"a": y}], x

    x = grown(3)
    first, (second, inner), back = Jit(fn, DYNAMIC)(x)
    assert first is second is inner["a"]
    assert back is x


def test_gradients_pass_through_containers() -> None:
    """Gradients flow from a part of the result to a part of an argument."""
    jit = Jit(lambda b: Batch(b.x.sin(), b.x * b.y), DYNAMIC)
    x, y = grown(3).requires_grad_(), grown(3)
    out = jit(Batch(x, y))
    (ours,) = torch.autograd.grad((out.x + out.y).sum(), x)
    torch.testing.assert_close(ours, x.cos() + y)


# --- tensors that are no input ----------------------------------------------------------------------


WEIGHT = torch.ones(3)


TABLE = [torch.ones(2), {"k": torch.ones(3)}]


class Holder:
    """An object whose attributes, and those of its class, are tensors."""

    shared = torch.ones(3)

    def __init__(self) -> None:
        self.own = torch.ones(3)

    def method(self, x: torch.Tensor) -> torch.Tensor:
        """Read both."""
        return x + self.own


HOLDER = Holder()


def reads_global(x: torch.Tensor) -> torch.Tensor:
    """Read a global of this module."""
    return x + WEIGHT


def reads_default(x: torch.Tensor, w: torch.Tensor = torch.ones(3)) -> torch.Tensor:  # noqa: B008
    """Read a default value."""
    return x * w


class Masked(torch.nn.Module):
    """A module with a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.ones(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Read it."""
        return x * self.mask


def closures() -> dict[str, tuple[Callable[..., Any], str, str]]:
    """Return functions that read tensors, with the names of these, and the variable."""
    weight, layer = torch.ones(3), torch.nn.Sequential(torch.nn.Linear(3, 3))
    masked = Masked()

    def outer(x: torch.Tensor) -> torch.Tensor:
        return x + weight

    return {
        "a nonlocal": (outer, "weight (closed over in outer())", "weight"),
        "a global": (reads_global, "WEIGHT (a global in reads_global())", "WEIGHT"),
        "in a list": (
            lambda x: x + TABLE[1]["k"], "TABLE[1]['k'] (a global in <lambda>)", "TABLE",
        ),
        "a default": (
            lambda x: reads_default(x), "w (an argument in reads_default())", "w",
        ),
        "an attribute": (lambda x: x + HOLDER.own, "HOLDER.own (a global in <lambda>)", "HOLDER"),
        "an attribute of a class": (
            lambda x: x + HOLDER.shared, "HOLDER.shared (a global in <lambda>)", "HOLDER",
        ),
        "a method": (HOLDER.method, "self.own (an argument in method())", "self"),
        "a module": (
            lambda x: layer(x), "layer.0.weight (closed over in <lambda>)", "layer",
        ),
        "an attribute of a module": (
            lambda x: masked(x), "self.mask (an argument in forward())", "self",
        ),
        "under vmap": (
            lambda x: torch.vmap(lambda r: r * weight)(x.expand(2, 3)),
            "weight (closed over in <lambda>)", "weight",
        ),
        "in place": (lambda x: weight.mul_(x), "weight (closed over in <lambda>)", "weight"),
        "alone": (lambda x: weight.sum(), "weight (closed over in <lambda>)", "weight"),
        "its number": (lambda x: x * weight[0].item(), "weight (closed over in <lambda>)", "weight"),
    }  # fmt: skip


@pytest.mark.parametrize("what", closures())
def test_a_tensor_that_is_no_input_is_refused(what: str) -> None:
    """The error contains where it is read, what it is and what to do."""
    fn, name, variable = closures()[what]
    with pytest.raises(tfk.UnsupportedValueError) as error:
        Jit(lambda x: fn(x), DYNAMIC, "eager")(grown(3))
    kind = "a parameter of size (3, 3)" if what == "a module" else "a tensor of size (3,)"
    assert str(error.value) == (
        f"{name}: the function uses a tensor that is no input; found {kind}, torch.float32, on cpu."
        f" Give `{variable}` a name in the scope that is described, and have the function take it"
        " from there"
    )
    assert torch.equal(WEIGHT, torch.ones(3))


def test_a_real_tensor_in_the_result_is_refused() -> None:
    """A real tensor in the result would be a constant of the graph."""
    with pytest.raises(
        tfk.UnsupportedValueError, match=r"^the result\[1\]\['w'\]: the function uses a tensor that"
    ):
        Jit(lambda x: (x, {"w": WEIGHT}), DYNAMIC, "eager")(grown(3))


def test_a_result_with_keys_of_another_class_is_refused() -> None:
    """The error names the place and says which keys a dictionary may have."""
    with pytest.raises(
        tfk.UnsupportedValueError, match=r"^the result\[0\].*or use keys that are texts or numbers"
    ):
        Jit(lambda x: [{frozenset("a"): x}], DYNAMIC, "eager")(grown(3))


def test_the_error_for_a_tensor_without_a_name_describes_it() -> None:
    """The error contains its sizes, dtype and device."""
    trace = frontend.Trace(frontend.describe({"x": grown(3)}))
    tensors = map(torch.ones, [3])
    with pytest.raises(tfk.UnsupportedValueError) as error, trace:
        make_fx(lambda x: torch.add(x, *_once(tensors)))(*trace.inputs)
    assert str(error.value) == (
        "the function uses a tensor that is no input; found a tensor of size (3,), torch.float32,"
        " on cpu. Give it a name in the scope that is described, and have the function take it"
        " from there"
    )


def _once(tensors: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    with torch._C._DisableTorchDispatch():
        yield from [t + 0 for t in tensors]


def test_errors_of_the_function_are_not_changed() -> None:
    """An error that the function raises reaches the caller."""

    def fails(x: torch.Tensor) -> Any:
        raise AssertionError("mine")

    with pytest.raises(AssertionError, match=r"^mine$"):
        Jit(fails, DYNAMIC, "eager")(grown(3))
