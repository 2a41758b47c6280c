"""One trial of a frame: compiled, and if asked for run beside eager, forward and backward.

What a trial says is plain data: how far it came, and how it went wrong there. It judges numbers by
eager in double precision: compiled code is wrong where it differs from eager, and is farther than
eager from what double precision gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

from . import _torch
from .captures import capture
from .comparing import first_mismatch
from .errors import CaptureError
from .frame import Capture
from .repropagations import repropagate
from .telling import told

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .frame import Compiled

__all__ = ["BesideEager", "propagated", "run_trial"]

_FARTHER = 10.0
"""So many times eager's own distance from double precision is no fault of a compiler's."""


def run_trial(
    frame: Capture,
    backend: str,
    *,
    runs: bool,
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
    device: str | None = None,
) -> dict[str, Any]:
    """Compile a frame; then run it on made-up inputs and compare.

    Args:
        frame: the frame.
        backend: name of a Dynamo backend.
        runs: whether to run it.
        sizes: at which, by symbol name; other symbols have their hints.
        seed: of the data.
        device: where to put what was on an accelerator.

    Returns:
        ``outcome``: ``passed``, also where eager fails; ``wrong`` with a ``text``; ``failed`` with
        what `telling.told` says. ``stage`` is ``compile``, ``forward`` or ``backward``.
    """
    compiler_fn = _torch.resolve_backend(backend)
    instance = frame.instantiate(device)
    try:
        compiled = instance.compile(compiler_fn)
    except Exception as error:  # noqa: BLE001 - whatever a backend ends with is the answer
        return {"outcome": "failed", "stage": "compile", **told(error)}
    if not runs:
        return {"outcome": "passed", "stage": "compile"}
    return BesideEager(frame, seed=seed, device=device).run(compiled, sizes or {})


class BesideEager:
    """Compiled code of a frame, run on made-up inputs beside eager.

    Args:
        frame: the frame.
        seed: of the data.
        device: where to put what was on an accelerator.
    """

    def __init__(self, frame: Capture, *, seed: int, device: str | None = None) -> None:
        self._frame = frame
        self._seed = seed
        self._device = device
        self._eager = frame.compile("eager", device=device)
        self._double: torch.fx.GraphModule | None = None

    def run(self, compiled: Compiled, sizes: Mapping[str, int]) -> dict[str, Any]:
        """How compiled code does at some sizes, forward and backward; see `run_trial`."""
        try:
            expected = self._run(self._eager, self._inputs(sizes))
        except Exception:  # noqa: BLE001 - the program is wrong here, not the compiler
            return {"outcome": "passed", "stage": "forward"}
        found = _Run(self._inputs(sizes), self._grad_enabled)
        for stage, step in (("forward", found.forward), ("backward", found.backward)):
            try:
                step(compiled)
            except Exception as error:  # noqa: BLE001 - whatever the code raises is the answer
                return {"outcome": "failed", "stage": stage, **told(error)}
            text = self._judge(stage, found, expected, sizes)
            if text is not None:
                return {"outcome": "wrong", "stage": stage, "text": text}
        return {"outcome": "passed", "stage": "backward"}

    @property
    def _grad_enabled(self) -> bool:
        return self._frame.desc.modes.grad_enabled

    def _inputs(self, sizes: Mapping[str, int]) -> list[Any]:
        return self._frame.materialize(seed=self._seed, sizes=sizes, device=self._device)

    def _run(self, function: Compiled, inputs: Sequence[Any], *, seed: int = 0) -> _Run:
        run = _Run(inputs, self._grad_enabled, seed=seed)
        run.forward(function)
        run.backward(function)
        return run

    def _judge(
        self, stage: str, found: _Run, expected: _Run, sizes: Mapping[str, int]
    ) -> str | None:
        """How values are wrong, in words; ``None`` if they are as good as eager's."""
        text = first_mismatch(found.values[stage], expected.values[stage])
        if text is None:
            return None
        again = self._run(self._eager, self._inputs(sizes), seed=17)
        if first_mismatch(again.values["forward"], expected.values["forward"]) is not None:
            return None  # it draws random numbers, and a compiler draws others
        exact = self._exactly(sizes)
        if exact is None or len(exact.values[stage]) != len(expected.values[stage]):
            return text
        trio = (found.values[stage], expected.values[stage], exact.values[stage])
        return None if _as_good(*trio) else text

    def _exactly(self, sizes: Mapping[str, int]) -> _Run | None:
        """The frame run in eager mode and double precision, if it can be."""
        try:
            if self._double is None:
                self._double = _doubled(self._frame.instantiate(self._device).gm)
            return self._run(self._double, [_double(value) for value in self._inputs(sizes)])
        except Exception:  # noqa: BLE001 - a graph may insist on a dtype
            return None


class _Run:
    """One call of a frame, and of its backward pass.

    Attributes:
        values: by ``forward`` outputs and inputs, because a frame may write into its inputs; by
            ``backward`` the gradients of the inputs that have one.
    """

    def __init__(self, inputs: Sequence[Any], grad_enabled: bool, *, seed: int = 0) -> None:
        self._inputs = inputs
        self._grad_enabled = grad_enabled
        self._seed = seed
        self._outputs: list[Any] = []
        self.values: dict[str, list[Any]] = {"forward": [], "backward": []}

    def forward(self, function: Compiled) -> None:
        """Call it."""
        torch.manual_seed(self._seed)
        with torch.set_grad_enabled(self._grad_enabled):
            self._outputs = list(function(*self._inputs))
        self.values["forward"] = [*self._outputs, *self._inputs]

    def backward(self, _function: Compiled) -> None:
        """Go back through what the call made."""
        outputs = [v for v in self._outputs if _differentiable(v) and not v.is_leaf]
        inputs = [v for v in self._inputs if _differentiable(v) and v.is_leaf]
        if not outputs or not inputs:
            return
        torch.manual_seed(1)
        weights = [_weights(v) for v in outputs]
        grads: tuple[Any, ...] = torch.autograd.grad(outputs, inputs, weights, allow_unused=True)
        self.values["backward"] = [g for g in grads if g is not None]


def _differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _weights(value: torch.Tensor) -> torch.Tensor:
    """The same numbers in every precision."""
    made = torch.rand(value.shape, dtype=torch.float32, device="cpu")
    return made.to(device=value.device, dtype=value.dtype)


def _as_good(found: list[Any], expected: list[Any], exact: list[Any]) -> bool:
    """Whether values are hardly farther from the exact ones than eager's."""
    for a, b, c in zip(found, expected, exact, strict=True):
        if first_mismatch([a], [b]) is None:
            continue
        tensors = (a, b, c)
        if not all(isinstance(t, torch.Tensor) and t.layout == torch.strided for t in tensors):
            return False
        if a.shape != b.shape or b.shape != c.shape or not (a.is_floating_point() and a.numel()):
            return False
        mine, eager = ((t.detach().double() - c.detach().double()).abs().max() for t in (a, b))
        if not bool(mine <= _FARTHER * eager):
            return False
    return True


_SINGLE = frozenset({torch.float16, torch.bfloat16, torch.float32})
_TO_SINGLE = frozenset({"half", "bfloat16", "float"})


def _double(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.dtype not in _SINGLE:
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


def _doubled(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A graph that computes in double precision; its own tensors are converted in place."""
    for module in gm.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for fx_node in module.graph.nodes:
            if fx_node.op == "call_method" and fx_node.target in _TO_SINGLE:
                fx_node.target = "double"
            fx_node.args = _torch.tree_map(_double_dtype, fx_node.args)
            fx_node.kwargs = _torch.tree_map(_double_dtype, fx_node.kwargs)
        module.recompile()
    return gm.double()


def _double_dtype(arg: Any) -> Any:
    return torch.float64 if isinstance(arg, torch.dtype) and arg in _SINGLE else arg


# --- other static sizes ---------------------------------------------------------------------------


def propagated(frame: Capture, constants: Mapping[int, int]) -> Capture:
    """The frame with the values of its graph computed again from its inputs.

    Args:
        frame: a frame whose inputs are not those any more that its graph was recorded with.
        constants: integers to put in the place of others among the arguments of nodes.

    Raises:
        CaptureError: the frame has no ``ShapeEnv``.
    """
    instance = frame.instantiate()
    if instance.shape_env is None:
        raise CaptureError("the frame has no shape environment", fix="Its sizes stay as they are")
    gm = instance.gm
    for fx_node, value in zip(gm.graph.find_nodes(op="placeholder"), instance.inputs, strict=True):
        if isinstance(value, torch.Tensor):
            fx_node.meta["example_value" if "example_value" in fx_node.meta else "val"] = value
    for fx_node in gm.graph.nodes:
        if fx_node.op not in ("placeholder", "output", "get_attr"):
            fx_node.args = _torch.tree_map(_changer(constants), fx_node.args)
            fx_node.kwargs = _torch.tree_map(_changer(constants), fx_node.kwargs)
    gm.recompile()
    desc = frame.desc
    data: Literal["small", "none"] = "small" if desc.graph.tensor_data else "none"
    with instance.active():
        repropagate(gm, gm.graph.nodes, mode=instance.fake_mode)
        made = capture(gm, instance.inputs, constants=data).desc
    kept = {name: getattr(desc, name) for name in ("failure", "backend", "frame")}
    return Capture(msgspec.structs.replace(made, **kept))


def _changer(constants: Mapping[int, int]) -> Callable[[Any], Any]:
    return lambda arg: constants.get(arg, arg) if type(arg) is int else arg
