"""Real architectures through ``handoff``: what the direct backend gives and what Dynamo guards on.

Each model is compiled directly and through the handoff, and called with inputs of three sizes: the
first is compiled as it is, the second makes sizes dynamic, the third finds its graph there. Both ways
must come to the same outputs, gradients and buffers bit for bit, the same graphs out of AOTAutograd,
the same counters of Dynamo (graphs, breaks and their reasons), the same compilations, runtime asserts
and guards as Dynamo prints them, with the line of code that each comes from.

Facts in Dynamo's own environment are proved equivalent, not counted: its `guards` may be fewer
through the handoff, since what follows from other facts is not stated again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch._inductor.config
from guard_equivalence import assert_equivalent

pytest.importorskip("transformers", reason="needs the `models` extra: pip install '.[models]'")
pytest.importorskip("diffusers", reason="needs the `models` extra: pip install '.[models]'")

from compile_runs import Run, run
from sized_models import MODELS

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.models, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums over several threads need not be the same twice."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check(name: str, inner: str, *, training: bool, dynamic: bool | None = None) -> None:
    """Compile a model both ways and compare all that came of it."""
    direct, ours = (
        run(MODELS[name], inner, handoff=handoff, training=training, dynamic=dynamic)
        for handoff in (False, True)
    )
    assert direct.graphs > 0
    same_results(ours, direct)
    assert ours.traced == direct.traced
    assert ours.counters == direct.counters
    assert ours.recompiles == direct.recompiles
    assert ours.guards == direct.guards
    assert ours.asserts == direct.asserts
    for one, other in zip(ours.facts(), direct.facts(), strict=True):
        assert assert_equivalent(other, one).how == "proved"


def same_results(ours: Run, direct: Run) -> None:
    """Fails if a result of a call differs in one bit."""
    assert len(ours.results) == len(direct.results) == 3
    for found, expected in zip(ours.results, direct.results, strict=True):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


FEW = ("resnet",)
TRAINED = ("bert",)
"""Those that ``.ci/run`` trains, too."""
INFERRED = ("clip", "mixtral", "qwen3", "gemma2", "mamba", "unet_condition", "autoencoder")
"""Of these the sweep compiles the forward alone, which is enough to tell them from the others."""


@pytest.mark.parametrize("name", FEW)
def test_a_model_is_trained_as_without_the_handoff(name: str) -> None:
    """A model with sizes that are computed and buffers that change."""
    check(name, "aot_eager", training=True)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in TRAINED else pytest.mark.long)
        for name in MODELS
        if name not in (*FEW, *INFERRED)
    ],
)
def test_every_model_is_trained_as_without_the_handoff(name: str) -> None:
    """Forward and backward, sizes made dynamic by their changing."""
    check(name, "aot_eager", training=True)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name", [INFERRED[0], *(pytest.param(name, marks=pytest.mark.long) for name in INFERRED[1:])]
)
def test_models_infer_as_without_the_handoff(name: str) -> None:
    """Forward alone, without gradients."""
    check(name, "aot_eager", training=False)


@pytest.mark.sweep
@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3"])
def test_models_of_dynamic_sizes_are_trained_as_without_the_handoff(name: str) -> None:
    """Every size dynamic from the first compilation on."""
    check(name, "aot_eager", training=True, dynamic=True)


@pytest.mark.sweep
@pytest.mark.long
@pytest.mark.parametrize("name", ["bert"])
def test_inductor_runs_models_as_without_the_handoff(name: str) -> None:
    """Kernels of inductor, which makes guards of its own; nothing is found in its caches."""
    with torch._inductor.config.patch(force_disable_caches=True):
        check(name, "inductor", training=False)
