"""Frames with what not every version of torch has: operators, sources, dtypes, operators with bodies.

Each says of itself whether the running torch has it, by the thing itself and not by a version.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from captured_frames import captures_of
from golden_tensors import frame_of
from quiet import quiet
from torch._dynamo import source as sources

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Callable

_SWITCH = "torch._higher_order_ops.switch"


def _compiled(fn: Callable[..., Any], *args: Any) -> Any:
    """The one frame of a function, with dynamic sizes."""
    return captures_of(fn, args, dynamic=True, fullgraph=True)[-1]


def _switch() -> Any:
    """A branch that data choose among three."""
    branches = (torch.sin, torch.cos, lambda x: x + 1)
    function: Any = import_module(_SWITCH).switch
    return _compiled(lambda i, x: function(i, branches, (x,)), torch.tensor(1), torch.ones(4, 3))


def _polar() -> Any:
    """A polar decomposition, which 2.13 has not."""
    function: Any = torch.linalg.polar
    return _compiled(lambda x: function(x @ x.mT + 1), torch.randn(4, 3))


def _foreach() -> Any:
    """A function of ``torch.foreach``."""
    module: Any = torch.foreach
    return _compiled(lambda x, y: module.abs([x, y]), torch.randn(4, 3), torch.randn(4))


def _cholesky() -> Any:
    """``torch.cholesky``, of which only ``torch.linalg.cholesky`` is left after 2.13."""
    return _compiled(lambda x: torch.cholesky(x @ x.mT + torch.eye(4)), torch.randn(4, 3))


def _qr() -> Any:
    """``torch.qr``, of which only ``torch.linalg.qr`` is left after 2.13."""
    return _compiled(lambda x: torch.qr(x + 1).R, torch.randn(4, 3))


def _bcomplex32() -> Any:
    """A tensor of complex numbers of two bfloat16 each."""
    with quiet():
        return frame_of([torch.zeros(3, dtype=torch.bcomplex32)], ["x"])


def _philox_randint() -> Any:
    """Random numbers of a key."""
    key = torch.tensor([1, 2], dtype=torch.uint64)
    function: Any = torch.ops.aten._philox_randint.default
    return _compiled(lambda x, key: function(x, key, 0, 9), torch.zeros(4, dtype=torch.int64), key)


def _sourced(name: str) -> Any:
    """A tensor that comes from where only some versions look."""
    cls: Any = getattr(sources, name)
    frame = _compiled(lambda x: x + 1, torch.ones(4, 3))
    instance = frame.instantiate()
    *_, fx_node = instance.gm.graph.find_nodes(op="placeholder")  # the others are its sizes
    fx_node._dynamo_source = cls(fx_node._dynamo_source)
    with instance.active():
        return tfk.capture(instance.gm, instance.inputs)


_ALL: dict[str, tuple[bool, Callable[[], Any]]] = {
    "switch": (find_spec(_SWITCH) is not None, _switch),
    "polar": (hasattr(torch.linalg, "polar"), _polar),
    "foreach": (hasattr(torch, "foreach"), _foreach),
    "cholesky": (hasattr(torch._C._VariableFunctions, "cholesky"), _cholesky),
    "qr": (hasattr(torch._C._VariableFunctions, "qr"), _qr),
    "bcomplex32": (hasattr(torch, "bcomplex32"), _bcomplex32),
    "philox_randint": (hasattr(torch.ops.aten, "_philox_randint"), _philox_randint),
    **{
        name: (hasattr(sources, name), lambda name=name: _sourced(name))
        for name in (
            "ContextVarGetSource",
            "UnwrapCollectiveTensorSource",
            "ListReverseIteratorBackingListSource",
        )
    },
}

FEATURES = {name: make for name, (here, make) in _ALL.items() if here}
"""What makes the frames that the running torch can have, by name."""
