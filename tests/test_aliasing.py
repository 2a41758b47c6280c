"""The aliasing oracle: who shares what with whom, before and after.

Fake tensors have no data, so their storages and bases are compared. Materialized tensors do:
what is written through one of them is seen through exactly those through which it would be seen
among the originals.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import FLOATS, any_groups, tensor_groups
from tensor_facts import parts, relations
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import torch_fakeify as tfk
from torch_fakeify._torch import WHOLE_STORAGES

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


@given(any_groups())
def test_fake_tensors_lie_to_one_another_as_the_originals(group: list[torch.Tensor]) -> None:
    """Same object, same storage, same base, and the one the base of the other, at every depth.

    As of torch 2.14 fake wrappers share storages with their views alone.
    """
    describer = tfk.MetaTensorDescriber()
    records = tfk.loads(tfk.dumps([describer.describe_tensor(t) for t in group]))
    converter = tfk.MetaConverter(FakeTensorMode())
    fakes = parts([converter.from_desc(d) for d in records])
    originals = parts(group)
    for (a, b), found, expected in zip(
        itertools.product(originals, repeat=2), relations(fakes), relations(originals), strict=True
    ):
        if found != expected:
            assert WHOLE_STORAGES
            assert is_traceable_wrapper_subclass(a)
            assert is_traceable_wrapper_subclass(b)
            assert a._base is not b
            assert b._base is not a
            assert found == (expected[0], False, *expected[2:])


def materialized(group: list[torch.Tensor]) -> list[Any]:
    """Real tensors made of a capture of a graph with these inputs."""
    graph = torch.fx.Graph()
    for i in range(len(group)):
        graph.placeholder(f"x{i}")
    graph.output(())
    return tfk.capture(torch.fx.GraphModule({}, graph), group).materialize()


def contents(t: torch.Tensor) -> list[Any]:
    """The values of a tensor's elements, whatever autograd thinks of who wrote them."""
    return t.data.resolve_conj().resolve_neg().flatten().tolist()


def write(t: torch.Tensor, value: int) -> str:
    """Writes through a tensor, past autograd; what torch says to it."""
    try:
        t.data.fill_(value)
    except RuntimeError as error:
        return str(error)
    return "written"


@given(st.data(), tensor_groups(resize=False, dtypes=(*FLOATS[:2], torch.complex64, torch.int64)))
def test_writes_are_seen_where_the_originals_are(data: Any, group: list[torch.Tensor]) -> None:
    """Each tensor is written to in turn; all tensors are read after each write."""
    assume(all(t.device.type == "cpu" for t in group))
    made = materialized(group)
    for t in (*group, *made):
        t.data.zero_()
    assert [contents(t) for t in made] == [contents(t) for t in group]
    for i in data.draw(st.permutations(range(len(group)))):
        assert write(made[i], i + 1) == write(group[i], i + 1)
        assert [contents(t) for t in made] == [contents(t) for t in group]


@pytest.mark.parametrize("grad", [True, False])
def test_in_place_operators_err_as_on_the_originals(grad: bool) -> None:
    """Autograd refuses to write to a multi-output view, or to one made under ``no_grad``."""
    leaf = torch.ones(4, requires_grad=True)
    with torch.set_grad_enabled(grad):
        view = (leaf * 1).split(2)[0] if grad else leaf[:2]
    with pytest.raises(RuntimeError) as said:
        view.add_(1)
    (made,) = materialized([view])
    with pytest.raises(RuntimeError) as ours:
        made.add_(1)
    # A view of a dense tensor is made by `as_strided`, here as in torch's own fakes.
    assert unnamed(ours) == unnamed(said)


def unnamed(error: pytest.ExceptionInfo[RuntimeError]) -> str:
    """The text of an error without the name of the operator that made the view."""
    return re.sub(r"^(Output \d+ of )\w+", r"\1_", str(error.value))
