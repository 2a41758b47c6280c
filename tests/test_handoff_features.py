"""Every feature of ``torch.compile`` gives through the handoff what it gives without.

Compared is all that can be seen: the graphs and the inputs that the inner backend is given, guards,
results with their strides, offsets, aliases and autograd state, what became of the arguments, the
gradients, errors, and Dynamo's counters of graphs, breaks and recompiles.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from feature_runs import FEATURES, Feature, observed

import torch_fakeify as tfk

ROOMS = (
    "features_settings",
    "features_inputs",
    "features_sizes",
    "features_code",
    "features_autograd",
    "features_compile",
)
"""The modules that hold the features."""

for _room in ROOMS:
    import_module(_room)


COMPILED = ("mutated", "specialize_on", "donated_buffers")
"""The features of all backends that ``.ci/run`` compiles with inductor, too."""


def is_long(one: Feature, name: str) -> bool:
    """Whether ``.ci/run`` has no room for it."""
    return name == "inductor" and "aot_eager" in one.backends and one.name not in COMPILED


def _cases(*, plain: bool) -> list[Any]:
    return [
        pytest.param(
            one, name, id=f"{one.name}-{name}", marks=pytest.mark.long if is_long(one, name) else ()
        )
        for one in FEATURES.values()
        for name in one.backends
        if plain == (one.plain and name == "aot_eager")
    ]


def _compare(one: Feature, name: str) -> None:
    direct, ours = (observed(one, name, direct=direct) for direct in (True, False))
    for theirs, mine in zip(direct, ours, strict=False):
        assert mine == theirs
    assert len(ours) == len(direct)
    told = {entry[0] for entry in direct} - {"graph", "guards", "graphs", "counters"}
    assert told
    assert (told <= {"raised", "arguments", "written"}) == one.raises


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("one", "name"), _cases(plain=True))
def test_a_feature_is_the_same(one: Feature, name: str) -> None:
    """With and without the handoff, everything that can be seen is equal."""
    _compare(one, name)


def test_a_mode_that_there_is_not() -> None:
    """Torch's own error, at the first call: a mode for another backend is not read before."""
    torch._dynamo.reset()
    fn = torch.compile(lambda x: x + 1, backend="fakeify", mode="no such mode")
    with pytest.raises(Exception, match="Unrecognized mode=no such mode"):
        fn(torch.ones(2))


def test_a_backend_that_runs_the_graph_on_data() -> None:
    """It is refused by torch: through a handoff there is no data while a graph is compiled."""
    torch._dynamo.reset()
    backend = tfk.handoff("pre_dispatch_eager")
    fn = torch.compile(lambda x: x @ torch.ones(2, 2), backend=backend)
    with pytest.raises(Exception, match="Please convert all Tensors to FakeTensors first"):
        fn(torch.ones(2, 2))


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("one", "name"), _cases(plain=False))
def test_every_feature_is_the_same(one: Feature, name: str) -> None:
    """With and without the handoff, everything that can be seen is equal."""
    _compare(one, name)
