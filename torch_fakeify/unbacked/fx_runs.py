"""Helpers to run the nodes of a graph on fake tensors: modes, attributes, calls of bodies."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.passes.shape_prop import _extract_tensor_metadata

from torch_fakeify.compat import torch_dispatch, torch_dynamo, torch_fakes, torch_graphs
from torch_fakeify.encoding.modes import preserve_modes
from torch_fakeify.errors import ShapeEnvError
from torch_fakeify.replay.bindings import mode_or_none

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

_aten: Any = torch.ops.aten

LIFTS = frozenset({_aten.lift_fresh.default, _aten.lift_fresh_copy.default})
"""Operators that lift a constant into a trace; for a real tensor they record its value."""


def mode_of(values: Any) -> Any:
    """The ``FakeTensorMode`` of a pytree of values; ``None`` if they have none.

    Raises:
        ShapeEnvError: the values are of several modes.
    """
    modes = {
        id(m): m for v in torch_graphs.tree_leaves(values) if (m := mode_or_none(v)) is not None
    }
    if len(modes) > 1:
        raise ShapeEnvError(
            "the inputs are of several fake modes",
            expected="fake tensors of one FakeTensorMode",
            found=f"{len(modes)} modes",
            fix="Bring them together: refakeify(inputs, mode)",
        )
    return next(iter(modes.values()), None)


def is_lifted(fx_node: torch.fx.Node) -> bool:
    """Whether a ``get_attr`` node reads a lifted constant of the trace."""
    return bool(fx_node.users) and all(user.target in LIFTS for user in fx_node.users)


def set_attribute(module: Any, target: str, value: Any) -> None:
    """Set the attribute at a dotted path."""
    *path, name = target.split(".")
    for part in path:
        module = getattr(module, part)
    setattr(module, name, value)


def tensor_metadata(value: Any) -> Any:
    """``meta["tensor_meta"]`` of a value, in the form of torch's passes."""

    def of_leaf(leaf: Any) -> Any:
        return _extract_tensor_metadata(leaf) if isinstance(leaf, torch.Tensor) else None

    return torch_graphs.tree_map(of_leaf, value)


@contextmanager
def running_in(mode: Any) -> Generator[None, None, None]:
    """Activate a fake mode in a new epoch, which invalidates the memos of earlier runs.

    Holds the compile lock: torch's state for the running node is global.
    """
    with torch_dynamo.compiling(), preserve_modes():
        mode.epoch += 1
        with mode, torch_dispatch.enable_python_dispatcher():
            yield


@contextmanager
def fake_cache(mode: Any, *, on: bool) -> Generator[None, None, None]:
    """Disable a mode's cache of results inside, unless ``on``; a disabled cache remains disabled."""
    before = mode.cache_enabled
    mode.cache_enabled = before and on
    try:
        yield
    finally:
        mode.cache_enabled = before


def snapshot(value: Any) -> Any:
    """Copies of fake tensors with their current metadata, which later operators may change in place."""
    return torch_graphs.tree_map(
        lambda leaf: torch_fakes.snapshot_fake(leaf) if isinstance(leaf, torch.Tensor) else leaf,
        value,
    )


@contextmanager
def calls_of(
    bodies: Sequence[torch.fx.GraphModule],
) -> Generator[dict[int, tuple[Any, ...]], None, None]:
    """Record the arguments of the first call of each graph, by the graph's ``id``."""
    called: dict[int, tuple[Any, ...]] = {}

    def note(body: torch.fx.GraphModule, args: tuple[Any, ...]) -> None:
        called.setdefault(id(body), args)

    with running_as(bodies, note):
        yield called


@contextmanager
def running_as(
    bodies: Sequence[torch.fx.GraphModule], run: Callable[[torch.fx.GraphModule, Any], Any]
) -> Generator[None, None, None]:
    """Run graphs by a function inside; if it returns ``None``, their own forward runs."""

    def call(body: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = run(body, args)
        return forward(*args, **kwargs) if result is None else result

    for body in bodies:
        vars(body)["forward"] = partial(call, body, body.forward)
    try:
        yield
    finally:
        for body in bodies:
            vars(body).pop("forward", None)
