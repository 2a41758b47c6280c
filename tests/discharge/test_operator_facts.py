"""What operators guarantee about the sizes of their results: true of eager results, and forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import torch_fakeify as tfk
from torch_fakeify.discharge.operator_facts import SIZE_FACTS, operator_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

aten = torch.ops.aten

CALLS: dict[str, tuple[Any, Callable[[torch.Tensor], Any]]] = {
    "nonzero": (aten.nonzero.default, lambda x: x.nonzero()),
    "masked_select": (aten.masked_select.default, lambda x: torch.masked_select(x, x > 1)),
    "masked_select of rows": (
        aten.masked_select.default,
        lambda x: torch.masked_select(x, x.new_ones(x.shape[-1], dtype=torch.bool)),
    ),
    "masked_select of one number": (
        aten.masked_select.default,
        lambda x: torch.masked_select(x.new_ones(()), x > 1),
    ),
    "index by a mask": (aten.nonzero.default, lambda x: x[x > 1]),
    "unique": (aten._unique2.default, lambda x: torch.unique(x)),
    "_unique": (aten._unique.default, lambda x: aten._unique(x, True, True)[0]),
    "unique of rows": (aten.unique_dim.default, lambda x: torch.unique(x, dim=0)),
    "unique_consecutive": (
        aten.unique_consecutive.default,
        lambda x: torch.unique_consecutive(x),
    ),
    "unique_consecutive of rows": (
        aten.unique_consecutive.default,
        lambda x: torch.unique_consecutive(x, dim=0),
    ),
}


def fake_of(tensor: torch.Tensor, env: ShapeEnv | None = None) -> tuple[torch.Tensor, ShapeEnv]:
    """Return a fake tensor with dynamic sizes, and its environment, which is a new one by default."""
    env = env or ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * tensor.dim())
    fake = mode.from_tensor(tensor, source=ConstantSource("x"), symbolic_context=context)
    return fake, env


def facts_of(call: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> tuple[ShapeEnv, Any]:
    """Return the environment after a call with a fake tensor, and the fake result."""
    fake, env = fake_of(tensor)
    with tfk.entailment(), fake.fake_mode:
        return env, call(fake)


def values_of(env: ShapeEnv, fake: Sequence[Any], real: Sequence[int]) -> dict[Any, int]:
    """Return the values of the symbols: hints, and the sizes of a real result."""
    values = {symbol: int(value) for symbol, value in env.backed_var_to_val.items()}
    for size, value in zip(fake, real, strict=True):
        if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
            values[size.node.expr] = value
    return values


@pytest.mark.parametrize("name", CALLS)
@given(data=st.data())
@settings(max_examples=5)
def test_a_fact_holds_for_eager_results(name: str, data: st.DataObject) -> None:
    """The facts of an operator are true of the sizes of its result, also for tensors without elements."""
    operator, call = CALLS[name]
    shape = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    if "rows" in name and 0 in shape:
        return  # torch refuses some of these
    numbers = torch.randint(0, data.draw(st.integers(1, 4)), tuple(shape))
    env, fake = facts_of(call, numbers)
    real = call(numbers)
    values = values_of(env, fake.shape, real.shape)
    assert operator in SIZE_FACTS
    for fact in operator_facts(env):
        known = {symbol: values[symbol] for symbol in fact.free_symbols}
        assert fact.xreplace(known) == sympy.true, (fact, known)


@pytest.mark.parametrize("name", CALLS)
def test_an_operator_states_a_fact(name: str) -> None:
    """Each operator states at least one fact, which torch alone does not know."""
    _, call = CALLS[name]
    env, fake = facts_of(call, torch.arange(6).reshape(3, 2))
    count = next(size for size in fake.shape if isinstance(size.node.expr, sympy.Symbol))
    assert [*operator_facts(env)]
    fact = next(iter(operator_facts(env)))
    assert count.node.expr in fact.free_symbols or name == "index by a mask"
    assert [known.origin for known in tfk.why(env, fact)] == ["operator"]


def test_without_it_nothing_is_stated() -> None:
    """Outside of a block operators state what torch states."""
    fake, env = fake_of(torch.arange(6).reshape(3, 2))
    with fake.fake_mode:
        found = fake.nonzero()
    assert not [*operator_facts(env)]
    assert tfk.entails(env, found.shape[0] <= fake.numel()) is None


def test_a_fact_that_is_rolled_back_is_forgotten() -> None:
    """A symbol of the same name after a rollback has no facts of the old one."""
    fake, env = fake_of(torch.arange(6).reshape(3, 2))
    with tfk.entailment(), fake.fake_mode:
        point = tfk.checkpoint(env)
        found = fake.nonzero()
        assert tfk.entails(env, found.shape[0] <= fake.numel()) is True
        point.rollback()
        other = env.create_unbacked_symint()
        assert str(other) == "u0"
        assert tfk.entails(env, other <= fake.numel()) is None
