"""The aliasing of tensors, compared with that of the originals.

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
from torch_fakeify.compat.torch_fakes import WHOLE_STORAGES

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


@given(any_groups())
def test_fake_tensors_alias_one_another_as_the_originals_do(group: list[torch.Tensor]) -> None:
    """Objects, storages, bases and parts are shared at every depth as among the originals.

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
    """Return real tensors made from a capture of a graph with these inputs."""
    graph = torch.fx.Graph()
    for i in range(len(group)):
        graph.placeholder(f"x{i}")
    graph.output(())
    return tfk.capture(torch.fx.GraphModule({}, graph), group).materialize()


def contents(t: torch.Tensor) -> list[Any]:
    """Return the values of a tensor's elements, without a check by autograd."""
    return t.data.resolve_conj().resolve_neg().flatten().tolist()


def write(t: torch.Tensor, value: int) -> str:
    """Write through a tensor, without autograd; return torch's error or ``written``."""
    try:
        t.data.fill_(value)
    except RuntimeError as error:
        return str(error)
    return "written"


def clear(t: torch.Tensor) -> None:
    """Set the elements of a tensor to zero, those of an expanded conjugate through its storage."""
    try:
        t.data.zero_()
    except RuntimeError:
        t.untyped_storage().fill_(0)


@given(st.data(), tensor_groups(resize=False, dtypes=(*FLOATS[:2], torch.complex64, torch.int64)))
def test_writes_are_seen_where_the_originals_are(data: Any, group: list[torch.Tensor]) -> None:
    """After a write through each tensor in turn, all tensors have the originals' values."""
    assume(all(t.device.type == "cpu" for t in group))
    made = materialized(group)
    for t in (*group, *made):
        clear(t)
    assert [contents(t) for t in made] == [contents(t) for t in group]
    for i in data.draw(st.permutations(range(len(group)))):
        assert write(made[i], i + 1) == write(group[i], i + 1)
        assert [contents(t) for t in made] == [contents(t) for t in group]


@pytest.mark.parametrize("grad", [True, False])
def test_in_place_operators_raise_as_on_the_originals(grad: bool) -> None:
    """Autograd refuses to write to a multi-output view, or to one made under ``no_grad``."""
    leaf = torch.ones(4, requires_grad=True)
    with torch.set_grad_enabled(grad):
        view = (leaf * 1).split(2)[0] if grad else leaf[:2]
    with pytest.raises(RuntimeError) as theirs:
        view.add_(1)
    (made,) = materialized([view])
    with pytest.raises(RuntimeError) as ours:
        made.add_(1)
    # A view of a dense tensor is made by `as_strided`, as in torch's own fake tensors.
    assert unnamed(ours) == unnamed(theirs)


def unnamed(error: pytest.ExceptionInfo[RuntimeError]) -> str:
    """Return the text of an error without the name of the operator that made the view."""
    return re.sub(r"^(Output \d+ of )\w+", r"\1_", str(error.value))
