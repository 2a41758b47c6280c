"""Every feature of ``torch.compile`` and every program behaves through the handoff as without it.

Compared are the inner backend's graphs and inputs, AOTAutograd's graphs, guards, runtime asserts and
facts of Dynamo's ``ShapeEnv``, results with their strides, offsets, aliases and autograd state, the
arguments afterwards, gradients, errors, and torch's counters.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from compare import check
from compiled_programs import FEATURES, Feature
from program_zoo import Program, programs

import torch_fakeify as tfk

for _module in ("settings", "inputs", "sizes", "code", "autograd"):
    import_module(f"features_{_module}")  # enters its features in the table


OF_ALL = frozenset({
    "graph", "graph of AOTAutograd", "guards", "facts", "asserts",
    "calls of the backend", "recompiles", "counters", "random numbers",
})  # fmt: skip
"""What is seen of every program, whether its calls raise or not."""

COMPILED = ("mutated", "specialize_on", "donated_buffers")
"""Those of the features with several backends that ``.ci/run`` compiles with inductor, too."""


def _cases(*, plain: bool) -> list[Any]:
    return [
        pytest.param(
            name,
            backend,
            id=f"{name}-{backend}",
            marks=pytest.mark.long if _is_long(name, backend) else (),
        )
        for name, one in FEATURES.items()
        for backend in one.backends
        if plain == (one.plain and backend == "aot_eager")
    ]


def _is_long(name: str, backend: str) -> bool:
    several = "aot_eager" in FEATURES[name].backends
    return backend == "inductor" and several and name not in COMPILED


def _compare(one: Feature, backend: str) -> None:
    kinds = {entry[0] for entry in check(one, backend).seen} - OF_ALL
    assert kinds
    assert (kinds <= {"raised", "arguments", "written"}) == one.raises


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "backend"), _cases(plain=True))
def test_a_feature_behaves_as_without_the_handoff(name: str, backend: str) -> None:
    """With and without the handoff, everything that can be seen is equal."""
    _compare(FEATURES[name], backend)


def test_an_unknown_mode_is_refused_by_torch() -> None:
    """The first call raises torch's own error."""
    torch._dynamo.reset()
    fn = torch.compile(lambda x: x + 1, backend="fakeify", mode="no such mode")
    with pytest.raises(Exception, match="Unrecognized mode=no such mode"):
        fn(torch.ones(2))


def test_a_backend_that_runs_the_graph_on_data_is_refused_by_torch() -> None:
    """While a handoff compiles a graph, its inputs are fake."""
    torch._dynamo.reset()
    backend = tfk.handoff("pre_dispatch_eager")
    fn = torch.compile(lambda x: x @ torch.ones(2, 2), backend=backend)
    with pytest.raises(Exception, match="Please convert all Tensors to FakeTensors first"):
        fn(torch.ones(2, 2))


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "backend"), _cases(plain=False))
def test_every_feature_behaves_as_without_the_handoff(name: str, backend: str) -> None:
    """With and without the handoff, everything that can be seen is equal."""
    _compare(FEATURES[name], backend)


# --- programs -------------------------------------------------------------------------------------

FEW = frozenset({
    "nonzero", "unique", "tolist", "item_with_checks", "float_item", "float_arguments",
    "overlapping_mutated_dynamic", "shape_arithmetic",
})  # fmt: skip
"""The programs that plain pytest compiles, with their own setting."""

ASSERTED_AGAIN = frozenset({"item_equals_input_size"})
"""AOTAutograd states their asserts in Dynamo's environment anew; through a handoff, in its own."""

OTHER_SYMBOLS = dict.fromkeys(
    ("base_and_view", "mutated_non_leaf", "non_leaf"),
    "the handoff knows that sizes of a base and of a view of it are equal",
)
"""Why inputs have other symbols, with symbols from the start."""


def _programs() -> list[Any]:
    """The programs, with sizes that become dynamic when they change, and that are so from the start.

    Slow ones, and those that are static, have their own setting only.
    """
    return [
        pytest.param(
            replace(
                one,
                options={**one.options, "dynamic": dynamic},
                other_symbols=OTHER_SYMBOLS.get(one.name, "") if dynamic else "",
            ),
            id=f"{one.name}-{dynamic}",
            marks=()
            if one.name in FEW and dynamic == own
            else (pytest.mark.sweep, *[pytest.mark.long] * one.slow),
        )
        for one in programs().values()
        for own in [one.options.get("dynamic")]
        for dynamic in ((own,) if one.slow or own is False else (None, True))
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", _programs())
def test_a_program_behaves_as_without_the_handoff(program: Program) -> None:
    """With and without the handoff, everything that can be seen is equal, and no call raises."""
    without = {"asserts"} if program.name in ASSERTED_AGAIN else ()
    seen = check(program, program.compiled, without=without).seen
    assert not {"raised", "backward raised"} & {entry[0] for entry in seen}
