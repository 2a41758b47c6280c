"""The aliasing oracle: who shares what with whom, before and after.

Fake tensors have no data, so their storages and bases are compared. Materialized tensors do:
what is written through one of them is seen through exactly those through which it would be seen
among the originals.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import FLOATS, any_groups, tensor_groups
from tensor_facts import parts, relations
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_fakeify as tfk

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


@given(any_groups())
def test_fake_tensors_lie_to_one_another_as_the_originals(group: list[torch.Tensor]) -> None:
    """Same object, same storage, same base, and the one the base of the other, at every depth."""
    describer = tfk.MetaTensorDescriber()
    records = tfk.loads(tfk.dumps([describer.describe_tensor(t) for t in group]))
    converter = tfk.MetaConverter(FakeTensorMode())
    assert relations(parts([converter.from_desc(d) for d in records])) == relations(parts(group))


def materialized(group: list[torch.Tensor]) -> list[Any]:
    """Real tensors made of a capture of a graph with these inputs."""
    graph = torch.fx.Graph()
    for i in range(len(group)):
        graph.placeholder(f"x{i}")
    graph.output(())
    return tfk.capture(torch.fx.GraphModule({}, graph), group).materialize()


def contents(t: torch.Tensor) -> list[Any]:
    """The values of a tensor's elements."""
    return t.detach().resolve_conj().resolve_neg().flatten().tolist()


def write(t: torch.Tensor, value: int, grad_mode: bool) -> str:
    """Writes through a tensor; what torch says to it."""
    try:
        with torch.inference_mode(t.is_inference()), torch.set_grad_enabled(grad_mode):
            t.fill_(value)
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
        grad_mode = data.draw(st.booleans())
        said = write(group[i], i + 1, grad_mode)
        assert write(made[i], i + 1, grad_mode) == said
        assert [contents(t) for t in made] == [contents(t) for t in group]
