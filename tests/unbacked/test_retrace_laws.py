"""Law 8 (one symbol for each binding site) through other tracers and in sweeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from assert_frames import (
    CASES,
    Frame,
    FrameList,
    dynamo_frame,
    fresh_inputs,
    traced,
)
from hypothesis import HealthCheck, Phase, assume, given, settings
from shape_programs import Program, compiled, programs
from torch._decomp import core_aten_decompositions
from torch._dynamo.source import ConstantSource
from torch._functorch.aot_autograd import aot_export_module
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils._pytree import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Callable

from retrace_checks import PROGRAMS, bound_by, law_8, unbacked_in

# --- other tracers ----------------------------------------------------------------------------------


def through_functionalize(fn: Callable[..., Any], args: tuple[Any, ...]) -> torch.fx.GraphModule:
    """Trace under functionalization."""
    return traced(torch.func.functionalize(fn), *args).gm


def through_aot(fn: Callable[..., Any], args: tuple[Any, ...]) -> torch.fx.GraphModule:
    """Return AOTAutograd's graph, with decompositions."""

    class Program(torch.nn.Module):
        def forward(self, *args: Any) -> Any:
            out = fn(*args)
            return tuple(out) if isinstance(out, (tuple, list)) else (out,)

    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    fakes = [
        mode.from_tensor(
            arg,
            source=ConstantSource(f"arg{i}"),
            symbolic_context=StatelessSymbolicContext([DimDynamic.DUCK] * arg.ndim),
        )
        for i, arg in enumerate(args)
    ]
    with mode:
        gm, _ = aot_export_module(
            Program(), fakes, trace_joint=False, decompositions=core_aten_decompositions()
        )
    return gm


def through_make_fx(fn: Callable[..., Any], args: tuple[Any, ...]) -> torch.fx.GraphModule:
    """Run Dynamo's graph by an interpreter under ``make_fx`` in a fresh environment."""
    gm, _ = dynamo_frame(fn, *args)
    mode, inputs = fresh_inputs(gm)
    with mode:
        return make_fx(lambda *args: torch.fx.Interpreter(gm).run(*args))(*inputs)


@pytest.mark.parametrize(
    ("name", "through"),
    [
        ("memoized", through_aot),
        *(
            pytest.param(name, through, marks=pytest.mark.sweep)
            for name in ("memoized", "distinct")
            for through in (through_functionalize, through_make_fx, through_aot)
        ),
    ],
)
def test_retraced_graphs_of_other_tracers_have_their_symbols(
    name: str, through: Callable[..., Any]
) -> None:
    """Torch's pipelines bind as many symbols as the program has, and so does a retrace."""
    fn, args, count = PROGRAMS[name]
    gm = through(fn, args)
    assert len(bound_by(gm)) == count
    law_8(gm)
    law_8(gm, decompositions={})


# --- sweeps -----------------------------------------------------------------------------------------


def frames_of(program: Program) -> list[Frame]:
    """Return the graphs that a Dynamo backend gets from a program."""
    frames = FrameList()
    compiled(program, frames.backend)
    return frames


@pytest.mark.sweep
@settings(
    max_examples=25, deadline=None, phases=[Phase.generate], suppress_health_check=HealthCheck
)
@given(programs(policies=("dynamic", "dynamic", "mark", "unbacked")))
def test_law_8_holds_for_random_programs(program: Program) -> None:
    """Law 8 holds for random programs that read numbers from their data."""
    text = program.source()
    assume("nonzero" in text or "item" in text or "tolist" in text or "masked" in text)
    for gm, _ in frames_of(program):
        law_8(gm)


NO_DATA_FOR_ATEN = {"jagged", "split"}
"""Programs of which ``make_fx`` alone takes no size from the data."""


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("of", "name"),
    [("dynamo", name) for name in (*CASES, *PROGRAMS)]
    + [("aten", name) for name in (*CASES, *PROGRAMS) if name not in NO_DATA_FOR_ATEN],
)
def test_law_8_holds_for_all_cases(of: str, name: str) -> None:
    """Graphs of Dynamo, of ``make_fx`` and of a retrace are retraced."""
    fn, args = CASES[name][:2] if name in CASES else PROGRAMS[name][:2]
    gm, _ = (dynamo_frame if of == "dynamo" else traced)(fn, *args)
    result, _ = law_8(gm)
    law_8(result.gm)


DATA_OPS = {
    "NumpyNMSCustomOp", "NumpyNonzeroCustomOp", "argwhere", "bincount", "combinations", "item",
    "masked_select", "nonzero", "unique", "unique_consecutive",
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:`create_unbacked_symint` is deprecated:FutureWarning")
def test_law_8_holds_for_operators() -> None:
    """Every operator in torch's tables that reads a number from data is retraced on its samples."""
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.custom_op_db import custom_op_db

    done: set[str] = set()
    for op in (*op_db, *custom_op_db):
        if op.name not in DATA_OPS:
            continue
        kinds = (torch.float32, torch.int64, torch.bool)
        dtype = next(d for d in kinds if d in op.supported_dtypes("cpu"))
        for sample in list(op.sample_inputs("cpu", dtype))[:4]:
            leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
            places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

            def fn(*args: Any, op: Any = op, leaves: Any = leaves, spec: Any = spec) -> Any:
                own = list(leaves)
                for i, arg in zip(
                    (i for i, leaf in enumerate(own) if isinstance(leaf, torch.Tensor)),
                    args,
                    strict=True,
                ):
                    own[i] = arg
                first, rest, options = tree_unflatten(own, spec)
                return op(first, *rest, **options)

            gm, env = traced(fn, *(leaves[i] for i in places))
            if unbacked_in(env):
                law_8(gm)
                if op.name not in done:
                    law_8(gm, decompositions=core_aten_decompositions())
                done.add(op.name)
    assert done == DATA_OPS
