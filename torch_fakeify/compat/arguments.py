"""Checks of the arguments of public functions, so that one of the wrong class gets an error that says so."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from torch_fakeify.errors import FakeifyError, ShapeEnvError, check_type

from .torch_dynamo import Source
from .torch_fakes import FakeTensorMode
from .torch_symbols import ShapeEnv, SymbolicContext


def check_shape_env(value: object) -> None:
    """Raise ``ShapeEnvError`` unless an argument is a ``ShapeEnv``."""
    static = "A FakeTensorMode without shape_env= has none, and assumes nothing about sizes"
    check_type(value, ShapeEnv, "a shape environment", ShapeEnvError, fix=None if value else static)


def check_graph(value: object, error: type[FakeifyError] = ShapeEnvError) -> None:
    """Raise an error unless an argument is a ``torch.fx.GraphModule``."""
    check_type(value, torch.fx.GraphModule, "a graph", error)


def check_mode(value: object, error: type[FakeifyError] = ShapeEnvError) -> None:
    """Raise an error unless an argument is a ``FakeTensorMode``."""
    check_type(value, FakeTensorMode, "a fake mode", error)


def check_policy(source: object, context: object, error: type[FakeifyError]) -> None:
    """Raise an error unless a tensor's source and symbolic context, where given, are torch's."""
    if source is not None:
        named = "To name an argument x, give torch._dynamo.source.LocalSource('x')"
        check_type(source, Source, "a source", error, fix=named)
    if context is not None:
        check_type(context, SymbolicContext, "a symbolic context", error)


def placeholders_of(
    gm: torch.fx.GraphModule,
    inputs: Collection[Any],
    error: type[FakeifyError] = ShapeEnvError,
    *,
    fix: str | None = None,
) -> list[torch.fx.Node]:
    """Return the placeholders of a graph; raise an error unless there is an input for each.

    ``fix`` is a remedy for another number of inputs.
    """
    check_graph(gm, error)
    placeholders = list(gm.graph.find_nodes(op="placeholder"))
    check_type(inputs, Collection, "a list of inputs", error)
    if len(placeholders) != len(inputs):
        raise error(
            "the inputs do not fit the graph",
            expected=f"{len(placeholders)} inputs, one for each placeholder",
            found=str(len(inputs)),
            fix=fix,
        )
    return placeholders
