"""Every operator and module of torch's databases, on inputs rebuilt from decoded records.

The rebuilt inputs equal torch's own fake tensors of the same inputs, and the operator gives on
them what it gives on torch's: results of the same metadata, or the same exception.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from observed_values import first_difference, tensors_in
from quiet import quiet
from record_facts import converted, described
from sweeps import Tally, call, dtypes_of, op_infos, samples_of, swap
from tensor_facts import facts, outcome, parts, relations, text
from torch._subclasses.fake_tensor import FakeTensorMode

if TYPE_CHECKING:
    from collections.abc import Callable

SHARDS = 24
SAMPLES = 10

LEFT_OUT: dict[str, str] = {}
"""Operators with dtype, and modules with mode, that may differ, and why."""


def run(f: Callable[[Any], Any], tree: Any, inputs: list[torch.Tensor], mode: Any) -> list[Any]:
    """What a function gives in a mode: facts and relations of the results, or the exception."""
    try:
        with mode:
            out = f(tree)
    except Exception as error:  # noqa: BLE001 the exception is the result
        return [type(error).__name__, text(error)]
    return [outcome(out), relations(parts(inputs + tensors_in(out)))]


def compare(f: Callable[[Any], Any], tree: Any) -> str | None:
    """Where the function's inputs or results differ from torch's."""
    real = tensors_in(tree)
    their_mode, our_mode = FakeTensorMode(), FakeTensorMode()
    # A result that torch remembers from the one would be given to the other.
    their_mode.cache_enabled = our_mode.cache_enabled = False
    theirs = [their_mode.from_tensor(t) for t in real]
    ours = converted(described(real), our_mode)
    found = first_difference([facts(t) for t in ours], [facts(t) for t in theirs], "inputs")
    if found is None and relations(parts(ours)) != relations(parts(theirs)):
        found = "inputs: other aliases"
    if found is not None:
        return found
    return first_difference(
        run(f, swap(tree, real, ours), ours, our_mode),
        run(f, swap(tree, real, theirs), theirs, their_mode),
        "result",
    )


def check_ops(infos: list[Any], samples: int | None = None) -> Tally:
    """Compares every sample of operators, or as many of each, spread over all."""
    tally = Tally(LEFT_OUT)
    for info in infos:
        for dtype in dtypes_of(info):
            with quiet():
                pending = list(samples_of(info, dtype))
                step = 1 if samples is None else max(1, len(pending) // samples)
                chosen = pending[::step]
                found = next((d for s in chosen if (d := compare(*call(info, s)))), None)
            name = f"{info.formatted_name}_{str(dtype).removeprefix('torch.')}"
            tally.add(name, len(chosen), found)
    return tally


@pytest.mark.sweep
@pytest.mark.parametrize(
    "shard", [pytest.param(i, marks=pytest.mark.long if i % 8 else ()) for i in range(SHARDS)]
)
def test_operators(shard: int, record_property: Any) -> None:
    """Samples of every operator, in a float, an integer and a complex dtype."""
    check_ops(op_infos()[shard::SHARDS], SAMPLES).report("operators", record_property)


def test_some_operators(record_property: Any) -> None:
    """A few samples of every 25th operator."""
    check_ops(op_infos()[::25], 3).report("operators, quick", record_property)


# --- modules --------------------------------------------------------------------------------------


def module_cases(info: Any) -> list[tuple[str, Any, Any]]:
    """Modules with their forward inputs: name, module, ``(args, kwargs)``."""
    found: list[tuple[str, Any, Any]] = []
    for training in (True, False) if info.train_and_eval_differ else (True,):
        torch.manual_seed(0)
        for case in info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
        ):
            if case.forward_input is None:
                continue
            construct, forward = case.constructor_input, case.forward_input
            module = info.module_cls(*construct.args, **construct.kwargs).to(torch.float32)
            module.train(training)
            if info.is_lazy:  # its parameters are made at the first call
                module(*forward.args, **forward.kwargs)
            name = f"{info.formatted_name}_{'train' if training else 'eval'}"
            found.append((name, module, (forward.args, forward.kwargs)))
    return found


def compare_module(module: Any, inputs: Any) -> str | None:
    """Where a module with rebuilt parameters, buffers and inputs differs from torch's."""
    state = dict(module.named_parameters()) | dict(module.named_buffers())

    def f(tree: Any) -> Any:
        return torch.func.functional_call(module, tree[0], *tree[1:])

    return compare(f, (state, *inputs))


def check_modules(infos: list[Any], samples: int | None = None) -> Tally:
    """Compares every sample of modules, or as many of each."""
    tally = Tally(LEFT_OUT)
    for info in infos:
        with quiet():
            cases = module_cases(info)
            for name in sorted({name for name, _, _ in cases}):
                mine = [case[1:] for case in cases if case[0] == name][:samples]
                found = next((d for case in mine if (d := compare_module(*case))), None)
                tally.add(name, len(mine), found)
    return tally


def module_infos() -> list[Any]:
    """Every module of ``module_db``."""
    from torch.testing._internal.common_modules import module_db

    return list(module_db)


@pytest.mark.sweep
@pytest.mark.parametrize("shard", range(4))
def test_modules(shard: int, record_property: Any) -> None:
    """Samples of every module, in training and in evaluation where these differ."""
    check_modules(module_infos()[shard::4], SAMPLES // 2).report("modules", record_property)


def test_some_modules(record_property: Any) -> None:
    """A few samples of every 12th module."""
    check_modules(module_infos()[::12], 3).report("modules, quick", record_property)


@pytest.mark.sweep
def test_every_exception_is_of_something_that_exists() -> None:
    """A name in the table of what is left out names an operator and dtype, or a module."""
    names = {
        f"{info.formatted_name}_{str(dtype).removeprefix('torch.')}"
        for info in op_infos()
        for dtype in dtypes_of(info)
    }
    with quiet():
        names |= {name for info in module_infos() for name, _, _ in module_cases(info)}
    assert set(LEFT_OUT) <= names
