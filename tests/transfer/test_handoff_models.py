"""Real architectures behave through the handoff as without it.

Each model is compiled directly and through the handoff, and called with inputs of three sizes: the
first is compiled as it is, the second makes sizes dynamic, the third finds its graph there. Outputs,
gradients and buffers must be equal bit for bit, and the inner backend's and AOTAutograd's graphs,
guards with the user's line of each, runtime asserts and torch's counters the same.

Facts in Dynamo's own ``ShapeEnv`` are proved equivalent, not counted: its `guards` may be fewer
through the handoff, since a guard that follows from other facts is not stated again.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the `models` extra: pip install '.[models]'")
pytest.importorskip("diffusers", reason="needs the `models` extra: pip install '.[models]'")

from compare import check
from compiled_programs import Model
from model_zoo import MODELS

pytestmark = [pytest.mark.models, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]


def compare(name: str, backend: str = "aot_eager", **settings: Any) -> None:
    """Compile a model directly and through the handoff, and compare all that is seen of both."""
    found = check(Model(model=MODELS[name], **settings), backend)
    kinds = Counter(entry[0] for entry in found.seen)
    assert kinds["results"] == 3
    assert not kinds["raised"]
    assert not kinds["backward raised"]
    assert found.asserts


FEW = ("resnet",)
TRAINED = ("bert",)
"""The models that ``.ci/run`` trains, too."""
INFERRED = ("clip", "mixtral", "qwen3", "gemma2", "mamba", "unet_condition", "autoencoder")
"""Models whose forward alone the sweep compiles, which suffices to distinguish them."""
RECORDED = ("swin",)
"""Models that take many minutes here, and are recorded and read in `laws/test_models.py`."""


@pytest.mark.parametrize("name", FEW)
def test_a_model_is_trained_as_without_the_handoff(name: str) -> None:
    """A model with sizes that are computed and buffers that change."""
    compare(name, training=True)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in TRAINED else pytest.mark.long)
        for name in MODELS
        if name not in (*FEW, *INFERRED, *RECORDED)
    ],
)
def test_every_model_is_trained_as_without_the_handoff(name: str) -> None:
    """Forward and backward, sizes made dynamic by their changing."""
    compare(name, training=True)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name", [INFERRED[0], *(pytest.param(name, marks=pytest.mark.long) for name in INFERRED[1:])]
)
def test_models_infer_as_without_the_handoff(name: str) -> None:
    """Forward alone, without gradients."""
    compare(name, training=False)


@pytest.mark.sweep
@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3"])
def test_models_of_dynamic_sizes_are_trained_as_without_the_handoff(name: str) -> None:
    """Every size dynamic from the first compilation on."""
    compare(name, training=True, dynamic=True)


@pytest.mark.sweep
@pytest.mark.long
@pytest.mark.parametrize("name", ["bert"])
def test_inductor_runs_models_as_without_the_handoff(name: str) -> None:
    """Kernels of inductor, which makes guards of its own; nothing is found in its caches."""
    compare(name, "inductor", training=False, inductor={"force_disable_caches": True})
