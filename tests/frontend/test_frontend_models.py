"""``frontend`` with the classes of transformers: outputs and caches as arguments and results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from processes import fresh
from small_frontend import Jit

import torch_fakeify as tfk
from torch_fakeify import frontend
from torch_fakeify.frontend import Policy

transformers: Any = pytest.importorskip(
    "transformers", reason="needs the `models` extra: pip install '.[models]'"
)

from transformers.integrations.executorch import (  # noqa: E402
    register_dynamic_cache_export_support,
)
from transformers.modeling_outputs import BaseModelOutput  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.models, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

DYNAMIC = Policy(dims="DYNAMIC")


@pytest.fixture(scope="module")
def cache_class() -> Iterator[Any]:
    """``DynamicCache``, registered as a pytree node."""
    register_dynamic_cache_export_support()
    return transformers.DynamicCache


def cache_of(length: int, layers: int = 2) -> Any:
    """Return a cache with a number of tokens."""
    made = torch.Generator().manual_seed(length)
    return transformers.DynamicCache(
        [
            tuple(torch.randn(1, 2, length, 4, generator=made) for _ in range(2))
            for _ in range(layers)
        ]
    )


def states(cache: Any) -> list[torch.Tensor]:
    """Return the tensors of a cache."""
    return [t for layer in cache.layers for t in (layer.keys, layer.values)]


@pytest.mark.sweep
def test_a_cache_that_is_not_registered_is_refused() -> None:
    """The error for an argument and for a result explains how to register it."""
    code = """
import warnings; warnings.simplefilter("ignore")
import torch, torch_fakeify as tfk
from transformers import DynamicCache
cache = DynamicCache([(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))])
try:
    tfk.frontend.describe({"cache": cache})
except tfk.UnsupportedValueError as error:
    print(error)
"""
    done = fresh("-c", code)
    assert done.stdout.startswith("L['cache']: a value of the scope is neither an input nor")
    assert done.stdout.rstrip().endswith(
        "found transformers.cache_utils.DynamicCache. Register it first, by "
        "transformers.integrations.executorch.register_dynamic_cache_export_support()"
    )


def test_a_model_output_may_be_an_argument() -> None:
    """The attributes of a model output are inputs; which of them are None is guarded."""

    def fn(out: Any) -> torch.Tensor:
        more = 1 if out.hidden_states is None else out.hidden_states[0] + out["hidden_states"][-1]
        return out.last_hidden_state * 2 + more

    def made(n: int, count: int) -> Any:
        x = torch.arange(float(n))
        return BaseModelOutput(last_hidden_state=x, hidden_states=(x,) * count or None)

    jit = Jit(fn, DYNAMIC)
    for n, layers, compiles in ((3, 0, 1), (4, 0, 1), (3, 1, 2), (3, 2, 3), (5, 2, 3)):
        torch.testing.assert_close(jit(made(n, layers)), fn(made(n, layers)))
        assert jit.count == compiles
    inputs = frontend.describe({"out": made(3, 1)})
    assert [one.source.name for one in inputs] == ["L['out'].last_hidden_state"]


@pytest.mark.usefixtures("cache_class")
def test_a_cache_may_be_an_argument() -> None:
    """The keys and values of its layers are inputs; the number of layers is guarded."""

    def fn(cache: Any) -> torch.Tensor:
        return sum(states(cache)) * cache.get_seq_length()

    inputs = frontend.describe({"cache": cache_of(3)})
    assert [one.source.name for one in inputs] == [
        f"L['cache'].layers[{i}].{name}" for i in (0, 1) for name in ("keys", "values")
    ]
    jit = Jit(fn, DYNAMIC)
    for length, layers, compiles in ((3, 2, 1), (5, 2, 1), (3, 3, 2), (3, 1, 3), (6, 2, 3)):
        found = jit(cache_of(length, layers))
        torch.testing.assert_close(found, fn(cache_of(length, layers)))
        assert jit.count == compiles


@pytest.mark.usefixtures("cache_class")
def test_a_cache_that_a_function_extends_is_extended() -> None:
    """The argument afterwards and the cache in the result equal eager's."""

    def fn(cache: Any, x: torch.Tensor) -> Any:
        keys, values = cache.update(x, x + 1, 0)
        return BaseModelOutput(last_hidden_state=keys @ values.mT), cache

    jit = Jit(fn, DYNAMIC)
    ours, theirs = cache_of(3), cache_of(3)
    for length in (2, 4):
        x = torch.randn(1, 2, length, 4)
        found, expected = jit(ours, x), fn(theirs, x)
        assert type(found[0]) is type(expected[0])
        assert type(found[1]) is type(expected[1])
        torch.testing.assert_close(found[0].last_hidden_state, expected[0].last_hidden_state)
        torch.testing.assert_close(states(found[1]), states(expected[1]))
        torch.testing.assert_close(states(ours), states(theirs))


def test_an_empty_cache_that_a_function_fills_is_refused(cache_class: Any) -> None:
    """An empty cache that a function fills is refused, since the argument would stay empty."""
    cache = cache_class()
    jit = Jit(lambda cache, x: cache.update(x, x, 0)[0], DYNAMIC, "eager")
    with pytest.raises(tfk.UnsupportedValueError, match="the function changes what is in an arg"):
        jit(cache, torch.ones(1, 2, 3, 4))
    assert cache.layers == []


def test_a_decoder_uses_a_cache(cache_class: Any) -> None:
    """The output of a decoder has the logits and a new cache, which the next call takes."""
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    name = (
        "cache"
        if "cache" in transformers.modeling_outputs.CausalLMOutputWithPast.__dataclass_fields__
        else "past_key_values"
    )

    def first(model: Any, ids: torch.Tensor) -> Any:
        return model(input_ids=ids, use_cache=True)

    def step(model: Any, ids: torch.Tensor, cache: Any) -> Any:
        return model(input_ids=ids, use_cache=True, **{name: cache})

    ids = torch.arange(5)[None]
    with torch.no_grad():
        ours, theirs = Jit(first)(model, ids), first(model, ids)
        assert type(ours) is type(theirs)
        torch.testing.assert_close(ours.logits, theirs.logits)
        jit = Jit(step)
        for token in (6, 7):
            more = torch.tensor([[token]])
            ours = jit(model, more, ours[name])
            theirs = step(model, more, theirs[name])
            torch.testing.assert_close(ours.logits, theirs.logits)
            torch.testing.assert_close(states(ours[name]), states(theirs[name]))
            assert type(ours[name]) is cache_class
