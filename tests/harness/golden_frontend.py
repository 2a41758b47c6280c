"""The records of a frontend that a golden document holds: inputs, guards of every kind, policies."""

from __future__ import annotations

from typing import Any

import torch
from functorch import make_fx
from torch._dynamo.source import AttrSource, LocalSource
from torch.testing._internal.two_tensor import TwoTensor

from torch_fakeify import frontend
from torch_fakeify.frontend import Dim, Policy
from torch_fakeify.guards.checks import structure_of
from torch_fakeify.guards.conditions import check_guard
from torch_fakeify.guards.tensor_guards import tensor_guards

X, Y = LocalSource("x"), AttrSource(LocalSource("self"), "y")


def guards_of_checks() -> list[frontend.Guard]:
    """A guard of every named check that a trace of dense tensors has not."""
    sparse = torch.eye(3).to_sparse()
    return [
        check_guard("tree", [X], structure_of({"a": [torch.ones(1)], "b": 2})),
        check_guard("tree constants", [X], repr([2])),
        check_guard("length", [X], 3),
        *tensor_guards(X, sparse),
        *tensor_guards(Y, TwoTensor(torch.ones(2), torch.ones(2))),
        check_guard("not nan", [X], None),
        check_guard("same object", [X, Y], None),
        check_guard("other object", [X, Y], None),
        check_guard("separate objects", [X, Y], None),
        check_guard("same storage", [X, Y], None),
        check_guard("separate storages", [X, Y], None),
        check_guard("overlap", [X, Y], None, argument=1),
        check_guard("autocast", [], expected=True, argument="cpu"),
        check_guard("autocast dtype", [], torch.bfloat16, argument="cpu"),
        *(
            check_guard("constant", [X], value)
            for value in (None, True, -0.0, float("nan"), {1, 2})
        ),
    ]


def policies() -> list[Policy]:
    """Policies of every kind."""
    kinds: Any = ("DYNAMIC", "DUCK", "STATIC", "UNBACKED")
    found = [Policy(dims=kind, scalars=kind, parameters=kind) for kind in kinds]
    dims = {0: Dim("UNBACKED", min=2), 1: Dim("DUCK"), 2: Dim("STATIC")}
    named = {"x": dims, "n": Dim("DYNAMIC", max=8, warn_only=True)}
    last = Policy(
        named=named,
        marks=False,
        duck_shape=False,
        specialize_zero_one=False,
        prefer_deferred_runtime_asserts_over_guards=True,
    )
    return [*found, last]


def frontend_records() -> dict[str, Any]:
    """What the document holds."""
    model = torch.nn.Linear(3, 2)
    scope = {"model": model, "batch": [torch.randn(4, 3), torch.randn(4, 2)], "n": 5, "scale": 2.0}
    policy = Policy(dims="DUCK", named={"n": "DYNAMIC"})

    def loss(scope: dict[str, Any]) -> torch.Tensor:
        x, y = scope["batch"]
        return (scope["model"](x) - y).square().mean() * scope["scale"] * scope["n"]

    inputs = frontend.describe(scope, policy)
    trace = frontend.Trace(inputs)
    with trace:
        gm = make_fx(trace.flat(loss, scope))(*trace.inputs)
    trace.compile(gm, "eager")
    return {
        "inputs": inputs.desc,
        "guards": (trace.guards() + guards_of_checks()).desc,
        "policies": tuple(policy.desc for policy in policies()),
    }
