"""One trial of a frame: compile it and, if requested, compare it with eager, forward and backward.

Compiled code is wrong where it differs from eager and its distance from a float64 reference is more
than `_ERROR_RATIO` times that of eager.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

from torch_fakeify.compat import torch_graphs
from torch_fakeify.errors import CaptureError
from torch_fakeify.frames.captures import Capture
from torch_fakeify.frames.recording import capture
from torch_fakeify.render.readable_names import readable_name
from torch_fakeify.unbacked.repropagation import repropagate

from .comparing import first_mismatch, is_distributed
from .exceptions import failed, first_line, thrown
from .replies import Failed, NotCompared, Passed, Wrong

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_fakeify.compat.backends import Compiled, Compiler

_ERROR_RATIO = 10.0
"""Accepted error of compiled code, as a multiple of eager's error, both against float64."""


def run_trial(
    frame: Capture,
    compiler_fn: Compiler,
    *,
    runs: bool,
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
    device: str | None = None,
) -> Passed | Failed | Wrong | NotCompared:
    """Compile a frame; if it ``runs``, run it on synthetic inputs and compare it with eager.

    It runs at ``sizes`` by symbol name; other symbols have their hints. It is not compared if no inputs can
    be made, eager raises, or its results are random.
    """
    instance = frame.instantiate(device)
    try:
        compiled = instance.compile(compiler_fn)
    except Exception as error:  # noqa: BLE001 - any failure of a backend is a result
        return failed(error)
    if not runs:
        return Passed("compile")
    return EagerComparison(frame, seed=seed, device=device).run(compiled, sizes or {})


class EagerComparison:
    """Compares compiled code of a frame with eager, on synthetic inputs.

    The inputs' data is made from ``seed``. What was on an accelerator is put on ``device``, if it is given.
    """

    def __init__(self, frame: Capture, *, seed: int, device: str | None = None) -> None:
        self._frame = frame
        self._seed = seed
        self._device = device
        self._grad_enabled = frame.desc.modes.grad_enabled
        self._eager = frame.instantiate(device).compile("eager")
        self._double: torch.fx.GraphModule | None = None

    def run(
        self, compiled: Compiled, sizes: Mapping[str, int]
    ) -> Passed | Failed | Wrong | NotCompared:
        """Run the compiled code at some sizes, forward and backward, and return the result of `run_trial`."""
        try:
            inputs = [self._inputs(sizes) for _ in range(2)]
        except Exception as error:  # noqa: BLE001 - without inputs there is no comparison
            return NotCompared(f"no inputs: {first_line(error)}")
        expected = _Run(self._eager, inputs[0], self._grad_enabled)
        try:
            expected.forward()
        except Exception as error:  # noqa: BLE001 - the program fails, not the compiler
            return NotCompared(f"eager raised {first_line(error)}")
        stages: list[Literal["forward", "backward"]] = ["forward"]
        with suppress(Exception):  # the program may have no gradient
            expected.backward()
            stages.append("backward")
        found = _Run(compiled, inputs[1], self._grad_enabled)
        for stage in stages:
            try:
                (found.forward if stage == "forward" else found.backward)()
            except Exception as error:  # noqa: BLE001 - any exception of compiled code is a result
                return Failed(thrown(error), stage)
            reply = self._judge(stage, found, expected, sizes)
            if reply is not None:
                return reply
        return Passed(stages[-1])

    def _inputs(self, sizes: Mapping[str, int]) -> list[Any]:
        return self._frame.materialize(seed=self._seed, sizes=sizes, device=self._device)

    def _run(self, function: Compiled, inputs: Sequence[Any], *, seed: int = 0) -> _Run:
        run = _Run(function, inputs, self._grad_enabled, seed=seed)
        run.forward()
        run.backward()
        return run

    def _judge(
        self,
        stage: Literal["forward", "backward"],
        found: _Run,
        expected: _Run,
        sizes: Mapping[str, int],
    ) -> Wrong | NotCompared | None:
        """Return the reply for values that are less accurate than eager's; ``None`` if they are not.

        Values that change with eager's seed are random and are not compared.
        """
        a, b = found.values[stage], expected.values[stage]
        if len(a) != len(b):
            return Wrong(stage, f"{found.count} results, not {expected.count}")
        names = self._names(stage, expected)
        if first_mismatch(a, b, names) is None:
            return None
        again = self._run(self._eager, self._inputs(sizes), seed=17).values[stage]
        same = [at for at in range(len(b)) if first_mismatch([again[at]], [b[at]]) is None]
        mine, eager = ([values[at] for at in same] for values in (a, b))
        text = first_mismatch(mine, eager, [names[at] for at in same])
        if text is None:
            every = (
                stage == "forward" and expected.count and all(at >= expected.count for at in same)
            )
            return NotCompared("eager draws random numbers") if every else None
        exact = self._float64_reference(sizes)
        if exact is None or len(exact.values[stage]) != len(b):
            return Wrong(stage, text)
        right = [exact.values[stage][at] for at in same]
        return None if _is_as_accurate(mine, eager, right) else Wrong(stage, text)

    def _names(self, stage: str, run: _Run) -> list[str]:
        inputs = [*map(readable_name, self._frame.desc.inputs)]
        if stage == "backward":
            return [f"gradient of `{inputs[at]}`" for at in run.differentiated]
        outputs = [f"output {i}" for i in range(run.count)]
        return outputs + [f"input `{name}` after the call" for name in inputs]

    def _float64_reference(self, sizes: Mapping[str, int]) -> _Run | None:
        """Run the frame eagerly in float64; ``None`` if the graph does not allow it."""
        try:
            if self._double is None:
                self._double = _doubled(self._frame.instantiate(self._device).gm)
            return self._run(self._double, [_double(value) for value in self._inputs(sizes)])
        except Exception:  # noqa: BLE001 - a graph may require a dtype
            return None


class _Run:
    """One call of a frame and its backward pass.

    Attributes:
        values: ``forward``: outputs and inputs (a frame may write into them); ``backward``: the
            gradients of the inputs, ``None`` for an input without one.
    """

    differentiated: Sequence[int] = ()
    """Positions of the inputs that have gradients."""

    def __init__(
        self, function: Compiled, inputs: Sequence[Any], grad_enabled: bool, *, seed: int = 0
    ) -> None:
        self._function = function
        self._inputs = inputs
        self._grad_enabled = grad_enabled
        self._seed = seed
        self._outputs: list[Any] = []
        self.values: dict[str, list[Any]] = {"forward": [], "backward": []}

    @property
    def count(self) -> int:
        """Number of outputs."""
        return len(self._outputs)

    def forward(self) -> None:
        """Call the function on the inputs."""
        torch.manual_seed(self._seed)
        with torch.set_grad_enabled(self._grad_enabled):
            self._outputs = list(self._function(*self._inputs))
        self.values["forward"] = [*self._outputs, *self._inputs]

    def backward(self) -> None:
        """Run the backward pass of the outputs."""
        outputs = [v for v in self._outputs if _differentiable(v) and not v.is_leaf]
        leaves = [at for at, v in enumerate(self._inputs) if _differentiable(v) and v.is_leaf]
        if not outputs or not leaves:
            return
        self.differentiated = leaves
        inputs = [self._inputs[at] for at in leaves]
        torch.manual_seed(1)
        weights = [_weights(v) for v in outputs]
        grads: tuple[Any, ...] = torch.autograd.grad(outputs, inputs, weights, allow_unused=True)
        self.values["backward"] = list(grads)


def _differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _weights(value: torch.Tensor) -> torch.Tensor:
    """Random weights of the shape of a value, equal in every precision."""
    if is_distributed(value):
        whole: Any = value.detach()
        mesh, placements = whole.device_mesh, whole.placements
        geometry = {"shape": whole.shape, "stride": whole.stride()}
        return whole.from_local(_weights(whole.to_local()), mesh, placements, **geometry)
    made = torch.rand(value.shape, dtype=torch.float32, device="cpu")
    return made.to(device=value.device, dtype=value.dtype)


def _is_as_accurate(found: list[Any], expected: list[Any], exact: list[Any]) -> bool:
    """Whether the errors of values are at most `_ERROR_RATIO` times those of eager's."""
    for a, b, c in zip(found, expected, exact, strict=True):
        if first_mismatch([a], [b]) is None:
            continue
        tensors = (a, b, c)
        if not all(isinstance(t, torch.Tensor) and t.layout == torch.strided for t in tensors):
            return False
        if a.shape != b.shape or b.shape != c.shape or not (a.is_floating_point() and a.numel()):
            return False
        mine, eager = ((t.detach().double() - c.detach().double()).abs().max() for t in (a, b))
        if not bool(mine <= _ERROR_RATIO * eager):
            return False
    return True


_SINGLE = frozenset({torch.float16, torch.bfloat16, torch.float32})
_TO_SINGLE = frozenset({"half", "bfloat16", "float"})


def _double(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.dtype not in _SINGLE:
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


def _doubled(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Convert a graph to float64, in place, with the tensors that it holds."""
    for module in gm.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for fx_node in module.graph.nodes:
            if fx_node.op == "call_method" and fx_node.target in _TO_SINGLE:
                fx_node.target = "double"
            fx_node.args = torch_graphs.tree_map(_double_dtype, fx_node.args)
            fx_node.kwargs = torch_graphs.tree_map(_double_dtype, fx_node.kwargs)
        module.recompile()
    return gm.double()


def _double_dtype(arg: Any) -> Any:
    return torch.float64 if isinstance(arg, torch.dtype) and arg in _SINGLE else arg


# --- other static sizes ---------------------------------------------------------------------------


def propagated(frame: Capture, constants: Mapping[int, int]) -> Capture:
    """Recompute the values in the graph of a frame whose inputs were changed after recording.

    Integers among the arguments of nodes are replaced by ``constants``.

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

    def changed(arg: Any) -> Any:
        return constants.get(arg, arg) if type(arg) is int else arg

    for fx_node in gm.graph.nodes:
        if fx_node.op not in ("placeholder", "output", "get_attr"):
            fx_node.args = torch_graphs.tree_map(changed, fx_node.args)
            fx_node.kwargs = torch_graphs.tree_map(changed, fx_node.kwargs)
    gm.recompile()
    desc = frame.desc
    data: Literal["small", "none"] = "small" if desc.graph.tensor_data else "none"
    with instance.active():
        repropagate(gm, gm.graph.nodes, mode=instance.fake_mode)
        made = capture(gm, instance.inputs, constants=data).desc
    names = (
        *("failure", "backend", "backend_place", "frame", "state", "world"),
        *("surroundings", "compile_seconds", "operator_modules", "operators", "aot"),
    )
    unchanged = {name: getattr(desc, name) for name in names}
    return Capture(msgspec.structs.replace(made, **unchanged))
