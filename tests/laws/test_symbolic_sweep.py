"""Symbolic tracing of every operator on inputs rebuilt from decoded records.

``make_fx(tracing_mode="symbolic")`` and AOTAutograd with dynamic shapes make their own fake inputs
by `FakeTensorMode.from_tensor`. A trace in which it is answered from records read from bytes has
the same graph, the same symbolic sizes at every node and the same facts in its `ShapeEnv` as
torch's own, or ends in the same exception.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from observed_values import first_difference
from quiet import quiet
from sweeps import Tally, call, op_infos
from tensor_facts import text
from torch._functorch.aot_autograd import aot_function
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx.experimental.symbolic_shapes import ShapeEnv

SHARDS = 12
SAMPLES = 1

_NUMBERING = (
    "a tensor without a source is named by a number, and its symbols after it: torch's is how many "
    "tensors the mode knows, results of operators among them"
)

LEFT_OUT: dict[str, str] = {
    "_unsafe_masked_index_aot_autograd": _NUMBERING,
    "_unsafe_masked_index_put_accumulate_aot_autograd": _NUMBERING,
}
"""Operators that may differ, with the way of tracing, and why."""


def answer_from_records() -> Any:
    """A patch: `FakeTensorMode.from_tensor` converts the tensor's record, read from bytes."""
    describer = tfk.MetaTensorDescriber()
    converters: dict[FakeTensorMode, Any] = {}

    def from_tensor(
        self: FakeTensorMode, t: torch.Tensor, *, source: Any = None, **rest: Any
    ) -> Any:
        assert not rest.pop("static_shapes", None)
        rest.pop("trace", None)
        record = tfk.loads(
            tfk.dumps(describer.describe_tensor(t, source=source, **rest)), describer="parent"
        )
        converter = converters.get(self)
        if converter is None:
            converter = converters[self] = tfk.MetaConverter(self)
        return converter.from_desc(record)

    return mock.patch.object(FakeTensorMode, "from_tensor", from_tensor)


def graph_facts(gm: torch.fx.GraphModule) -> list[Any]:
    """The code, and at every node the sizes, strides and dtype of its value in symbols."""
    found: list[Any] = [gm.code]
    for node in gm.graph.nodes:
        values = pytree.tree_leaves(node.meta.get("val"))
        found.append([node.name, node.op, *map(value_facts, values)])
    return found


def value_facts(value: Any) -> Any:
    """The metadata of a traced value; a symbolic scalar is its expression."""
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {text(value)}"
    strided = value.layout is torch.strided
    stride = text((value.stride(), value.storage_offset())) if strided else None
    return [text(value.size()), stride, str(value.dtype), str(value.device), str(value.layout)]


def env_facts(env: ShapeEnv) -> dict[str, Any]:
    """What the ShapeEnv knows at the end of a trace."""
    return {
        "guards": [str(guard.expr) for guard in env.guards],
        "values": {str(s): text(value) for s, value in env.backed_var_to_val.items()},
        "ranges": {str(s): str(bounds) for s, bounds in env.var_to_range.items()},
        "sources": {str(s): [x.name for x in found] for s, found in env.var_to_sources.items()},
        "replacements": {str(s): str(e) for s, e in env.replacements.items()},
        "divisible": sorted(map(str, env.divisible)),
        "asserts": {
            str(s): [str(a.expr) for a in found]
            for s, found in env.deferred_runtime_asserts.items()
        },
        "unbacked": str(env.unbacked_symint_counter),
    }


def by_make_fx(f: Callable[[Any], Any], tree: Any) -> list[Any]:
    """The trace of `make_fx`."""
    gm = make_fx(f, tracing_mode="symbolic")(tree)
    return [graph_facts(gm), env_facts(gm.shape_env)]


class _Traced(BaseException):
    """Ends AOTAutograd once it has traced: what it does with the graph is not asked."""


def by_aot_autograd(f: Callable[[Any], Any], tree: Any) -> list[Any]:
    """The joint graph of AOTAutograd, or the forward one where nothing requires grad."""
    found: list[Any] = []

    def stop(gm: torch.fx.GraphModule, inputs: Any, **_: Any) -> Any:
        mode = torch._guards.detect_fake_mode(inputs)
        assert mode is not None
        found.extend([graph_facts(gm), env_facts(mode.shape_env)])
        raise _Traced

    flat, spec = pytree.tree_flatten(tree)
    places = [i for i, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor)]

    def of_tensors(*tensors: torch.Tensor) -> Any:
        leaves = list(flat)
        for i, t in zip(places, tensors, strict=True):
            leaves[i] = t
        return f(pytree.tree_unflatten(leaves, spec))

    traced = aot_function(of_tensors, stop, stop, partition_fn=stop, dynamic=True)
    try:
        traced(*(flat[i] for i in places))
    except _Traced:
        return found
    return ["nothing was traced"]


WAYS: dict[str, Any] = {"make_fx": by_make_fx, "aot_autograd": by_aot_autograd}


def attempt(way: Callable[..., Any], f: Callable[[Any], Any], tree: Any) -> list[Any]:
    """What a way of tracing gives, or its exception."""
    torch.manual_seed(0)
    try:
        return way(f, tree)
    except Exception as error:  # noqa: BLE001 the exception is the result
        return [type(error).__name__, text(error)]


def compare(way: Callable[..., Any], f: Callable[[Any], Any], tree: Any) -> str | None:
    """Where the trace on rebuilt inputs differs from torch's own."""
    theirs = attempt(way, f, tree)
    with answer_from_records():
        ours = attempt(way, f, tree)
    return first_difference(ours, theirs)


def check(infos: list[Any], samples: int, way: str) -> Tally:
    """Compares the traces of operators in float32, on as many samples of each, spread over all."""
    tally = Tally(LEFT_OUT)
    for info in infos:
        if torch.float32 not in info.supported_dtypes("cpu"):
            continue
        grad = way == "aot_autograd" and info.supports_autograd
        with quiet():
            torch.manual_seed(0)
            pending = list(info.sample_inputs("cpu", torch.float32, requires_grad=grad))
            chosen = pending[:: max(1, len(pending) // samples)][:samples]
            found = next((d for s in chosen if (d := compare(WAYS[way], *call(info, s)))), None)
        tally.add(f"{info.formatted_name}_{way}", len(chosen), found)
    return tally


@pytest.mark.sweep
@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=() if way == "aot_autograd" else pytest.mark.long) for way in WAYS],
)
@pytest.mark.parametrize(
    "shard", [pytest.param(i, marks=pytest.mark.long if i % 6 else ()) for i in range(SHARDS)]
)
def test_traces(shard: int, way: str, record_property: Any) -> None:
    """A sample of every operator."""
    tally = check(op_infos()[shard::SHARDS], SAMPLES, way)
    tally.report(f"symbolic traces, {way}", record_property)


@pytest.mark.parametrize("way", WAYS)
def test_some_traces(way: str, record_property: Any) -> None:
    """One sample of every 40th operator."""
    check(op_infos()[::40], 1, way).report(f"symbolic traces, {way}, quick", record_property)


@pytest.mark.sweep
def test_every_exception_is_of_something_that_exists() -> None:
    """A name in the table of what is left out names an operator and a way of tracing."""
    names = {f"{info.formatted_name}_{way}" for info in op_infos() for way in WAYS}
    assert set(LEFT_OUT) <= names
