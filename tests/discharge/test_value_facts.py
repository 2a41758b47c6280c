"""What operators guarantee about the numbers in their results: true of eager results, while nothing writes to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_operator_facts import fake_of
from torch._higher_order_ops.while_loop import while_loop
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_fakeify as tfk
from torch_fakeify.discharge.operator_facts import operator_facts
from torch_fakeify.discharge.value_facts import VALUE_RANGES

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx.experimental.symbolic_shapes import ShapeEnv

aten = torch.ops.aten

CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "argmax": lambda x: x.argmax(),
    "argmin of rows": lambda x: x.argmin(dim=-1),
    "argmax of columns": lambda x: x.argmax(dim=0, keepdim=True),
    "max": lambda x: x.max(dim=0).indices,
    "min": lambda x: x.min(dim=-1)[1],
    "median": lambda x: x.median(dim=0).indices,
    "mode": lambda x: x.mode(dim=-1).indices,
    "topk": lambda x: x.topk(1, dim=0).indices,
    "kthvalue": lambda x: x.kthvalue(1).indices,
    "sort": lambda x: x.sort(dim=0).indices,
    "argsort": lambda x: x.argsort(dim=0, stable=True),
    "nonzero": lambda x: x.nonzero(),
    "searchsorted": lambda x: torch.searchsorted(x, x),
    "searchsorted of a number": lambda x: torch.searchsorted(x[0], 1, right=True),
    "bucketize": lambda x: torch.bucketize(x, x.flatten()),
    "bucketize of a number": lambda x: torch.bucketize(1, x.flatten()),
    "count_nonzero": lambda x: x.count_nonzero(),
    "count_nonzero of rows": lambda x: x.count_nonzero(dim=(0,)),
    "sum of a mask": lambda x: (x > 1).sum(),
    "sum of a mask's rows": lambda x: (x > 1).sum(dim=-1),
    "cumsum of a mask": lambda x: (x > 1).cumsum(dim=0),
    "bincount": lambda x: torch.bincount(x.flatten(), minlength=2),
    "inverse of unique": lambda x: torch.unique(x, return_inverse=True)[1],
    "counts of unique": lambda x: torch.unique(x, return_counts=True)[1],
    "randperm": lambda x: torch.randperm(x.shape[0]),
    "randint": lambda x: torch.randint(x.shape[0], (5,)),
    "randint of two": lambda x: torch.randint(-1, x.shape[0], (5,)),
    "clamp": lambda x: x.clamp(1, x.shape[0]),
    "clamp from below": lambda x: x.argmax(dim=0).clamp(min=2),
    "clamp from above": lambda x: x.argmax(dim=0).clamp(max=1),
    "limits that contradict": lambda x: x.clamp(9, 1),
    "clone of a view": lambda x: x.argsort(dim=0).flatten()[:3].clone(),
    "values of a sort": lambda x: x.argsort(dim=0).sort(dim=0).values,
    "greatest of a column": lambda x: x.argsort(dim=0).amax(),
    "greatest": lambda x: x.argsort(dim=0).max(),
    "cat": lambda x: torch.cat([x.argsort(dim=0), x.clamp(3, 5)]),
    "stack": lambda x: torch.stack([x.argmax(), x.argmin()]),
    "int32 of searchsorted": lambda x: torch.searchsorted(x, x, out_int32=True),
    "int32 of a number's": lambda x: torch.searchsorted(x[0], 1, out_int32=True),
    "int32 of bucketize": lambda x: torch.bucketize(x, x.flatten(), out_int32=True).flip(0),
    "int64 of an int32": lambda x: torch.bucketize(x, x.flatten(), out_int32=True).long(),
    "clamped int32": lambda x: x.int().clamp(1, 4) + 1,
    "int32 of small numbers": lambda x: x.clamp(1, 4).int(),
    "remainder": lambda x: x % 3,
    "remainder of negative numbers": lambda x: (x - 5) % 3,
    "remainder by a size": lambda x: (x - 3) % x.shape[0],
    "twice": lambda x: x.argsort(dim=0) * 2,
    "product": lambda x: x.argsort(dim=0) * (x % 5),
    "sum": lambda x: x.argsort(dim=0) * 3 + x % 3,
    "difference": lambda x: x.argsort(dim=0) - x.argsort(dim=1),
    "one more": lambda x: x.argsort(dim=0) + 1,
    "three less": lambda x: x.argsort(dim=0) - 3,
    "chosen rows": lambda x: x.argsort(dim=0)[x[:, 0] > 0],
    "gathered": lambda x: x.argsort(dim=0).gather(0, x.argsort(dim=0)),
    "repeated": lambda x: x.argsort(dim=0).flip(0).roll(1, 0).repeat(2, 1),
    "taken": lambda x: x.argsort(dim=0).take(x.flatten().argsort()),
    "selected": lambda x: x.argsort(dim=0).index_select(0, x[:, 0].argsort()),
}


def facts_about_a_number(
    call: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor
) -> tuple[Any, list[Any], ShapeEnv]:
    """Return the symbol of one number of a result with the facts about it."""
    fake, env = fake_of(tensor)
    with tfk.entailment(), fake.fake_mode:
        symbol = call(fake).flatten()[0].item().node.expr
        return symbol, [fact for fact in operator_facts(env) if symbol in fact.free_symbols], env


@pytest.mark.parametrize("name", CALLS)
@given(data=st.data())
@settings(max_examples=3)
def test_a_fact_holds_for_all_eager_numbers(name: str, data: st.DataObject) -> None:
    """Each number of the result is in the range that is stated for one of them."""
    shape = (data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4)))
    tensor = torch.randint(0, data.draw(st.integers(1, 9)), shape)
    real = CALLS[name](tensor)
    if real.numel() == 0:
        return
    symbol, facts, env = facts_about_a_number(CALLS[name], tensor)
    assert facts
    values = {s: int(value) for s, value in env.backed_var_to_val.items()}
    for fact in facts:
        for unknown in fact.free_symbols - values.keys() - {symbol}:  # found by unique
            values[unknown] = len(tensor.unique())
        for number in real.flatten().tolist():
            assert fact.xreplace({**values, symbol: sympy.Integer(number)}) == sympy.true, fact


WRAPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "int32, one more": lambda x: x.int().clamp(0, 2**31 - 1) + 1,
    "int32 of positions, one more": lambda x: torch.searchsorted(x, x, out_int32=True) + 1,
    "int32 of a large position": lambda x: x.argmax().int(),
    "int32 of a sum": lambda x: (x > 1).sum(dtype=torch.int32),
    "int32, limits": lambda x: x.int().clamp(0, x.shape[0]),
    "int64, one more": lambda x: x.clamp(0, 2**63 - 1) + 1,
    "limits by sizes, one more": lambda x: x.clamp(0, x.shape[0]) + 1,
    "product of positions": lambda x: x.argmax() * x.argmin(),
    "large factor": lambda x: x.argmax() * 2**12,
    "int16": lambda x: x.clamp(0, 4).short(),
}


@pytest.mark.parametrize("name", WRAPS)
def test_numbers_that_may_wrap_around_have_no_range(name: str) -> None:
    """Nothing is stated of a result that may be larger than its dtype can hold."""
    assert facts_about_a_number(WRAPS[name], torch.arange(6).reshape(3, 2))[1] == []


def test_a_remainder_by_a_number_that_may_be_zero_has_no_range() -> None:
    """Not every device refuses to divide by zero."""
    fake, env = fake_of(torch.arange(5))
    with tfk.entailment(), fake.fake_mode:
        count = fake.nonzero().shape[0]
        assert tfk.entails(env, (fake % count)[0].item() < count) is None


def test_each_operator_has_a_case() -> None:
    """Each operator of the table is called by a case."""
    called: set[Any] = set()

    class Calls(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            called.add(func)
            return func(*args, **(kwargs or {}))

    for call in CALLS.values():
        with Calls():
            call(torch.arange(6).reshape(3, 2))
    untouched = {op for op in VALUE_RANGES if op not in called}
    assert untouched == {
        aten._unique.default,  # which torch.unique does not call
        aten.lift_fresh_copy.default,  # of a constant under functionalization
        aten.min.default,
        aten.amin.default,
    }


class OfOneTensor(HigherOrderOperator):
    """An operator of higher order with one argument."""

    def __call__(self, tensor: torch.Tensor) -> Any:
        """Call it."""
        return super().__call__(tensor)


def operator_by(name: str, fake: Callable[[torch.Tensor], Any]) -> OfOneTensor:
    """Return an operator of higher order by what it does with a fake tensor."""
    made = OfOneTensor(name)
    made.py_impl(FakeTensorMode)(lambda mode, tensor: fake(tensor))
    made.fallthrough(torch._C.DispatchKey.AutogradCPU)
    return made


def _by_data(at: torch.Tensor) -> None:
    at.data = torch.full((), 90)


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda at: at.add_(9),
    "to a view": lambda at: at.view(1)[:1].unsqueeze(0).mul_(9),
    "out": lambda at: torch.add(at, 9, out=at),
    "copy": lambda at: at.copy_(torch.full((), 90)),
    "set": lambda at: at.set_(torch.full((), 90)),
    "index": lambda at: at.view(1).__setitem__(0, 90),
    "data": _by_data,
    "bits": lambda at: at.view(1).view(torch.int32),
    "operator of higher order": operator_by("torch_fakeify_tests_writes", lambda at: None),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_to_has_no_range(name: str) -> None:
    """After a write of any kind nothing is stated; before it something was."""
    fake, env = fake_of(torch.arange(5))
    with tfk.entailment(), fake.fake_mode:
        known, written = fake.argmax(), fake.argmax()
        WRITES[name](written)
        assert tfk.entails(env, known.item() < fake.shape[0]) is True
        assert tfk.entails(env, written.item() < fake.shape[0]) is None


def test_the_result_of_a_body_has_no_range() -> None:
    """What an operator of higher order returns may come from another branch or iteration."""
    fake, env = fake_of(torch.arange(5))
    chooses = operator_by("torch_fakeify_tests_chooses", torch.argmax)
    with tfk.entailment(), fake.fake_mode:
        assert tfk.entails(env, chooses(fake).item() < fake.shape[0]) is None


def compiled(function: Callable[..., Any]) -> Any:
    """Return a function compiled with entailment, sizes and numbers from data."""
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", dynamic=True, fullgraph=True)


@pytest.fixture
def numbers_from_data() -> Any:
    """Read numbers of tensors inside of a graph, with entailment."""
    with tfk.entailment(), torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield


@pytest.mark.usefixtures("numbers_from_data")
def test_the_body_of_a_loop_does_not_know_the_first_value() -> None:
    """The example with which a body is traced is that of the first iteration, not of all."""

    def loop(x: torch.Tensor) -> Any:
        def body(i: torch.Tensor, at: torch.Tensor) -> Any:
            is_inside = at.item() < x.shape[0]
            return i + 1, (at + 1 if is_inside else at)

        return while_loop(
            lambda i, at: i < 9, body, (torch.zeros((), dtype=torch.int64), x.argmax())
        )

    with pytest.raises(Exception, match="data-dependent"):
        compiled(loop)(torch.arange(5.0))


@pytest.mark.usefixtures("numbers_from_data")
def test_the_result_of_one_branch_is_not_that_of_both() -> None:
    """What one branch of a ``cond`` returns has a range that the other's has not."""

    def either(x: torch.Tensor) -> Any:
        at = torch.cond(x.sum() > 3, lambda: x.argmax(), lambda: x.argmax() + 90)
        return x + 1 if at.item() < x.shape[0] else x

    with pytest.raises(Exception, match="data-dependent"):
        compiled(either)(torch.arange(5.0))
