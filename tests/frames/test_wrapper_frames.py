"""Frames with a wrapper subclass beside Python numbers: through the handoff, and as captures.

Dynamo's own fake of a number does not know any more, once it has traced, which symbol its ``item()``
is. So such a frame is described from its real inputs, as all others are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from compare import check
from compiled_programs import Example
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.two_tensor import TwoTensor
from wrapper_examples import NUMBERS, USES, around, calls, cases, two

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("fresh_dynamo"),
]

_CASES = pytest.mark.parametrize(("wrapper", "use", "dynamic"), cases())


@_CASES
def test_the_handoff_supports_a_number_beside_a_wrapper(
    wrapper: str, use: str, dynamic: bool | None
) -> None:
    """Results, graphs, recompiles and guards are those of the direct backend."""
    if wrapper == "int8":
        pytest.importorskip("torchao", reason="needs the `torchao` extra", exc_type=ImportError)
    check(
        Example(
            make=lambda: (USES[use], *calls(wrapper)),
            options={"dynamic": dynamic, "fullgraph": True},
            around=lambda: around(wrapper),
        )
    )


@_CASES
def test_a_capture_of_a_number_beside_a_wrapper_round_trips(
    wrapper: str, use: str, dynamic: bool | None, tmp_path: Path
) -> None:
    """Captures of three calls are instantiated, compiled and run; captured again each has one fingerprint."""
    if wrapper == "int8":
        pytest.importorskip("torchao", reason="needs the `torchao` extra", exc_type=ImportError)
    with around(wrapper):
        recorder = tfk.record(tmp_path, "eager")
        fn = torch.compile(USES[use], backend=recorder, dynamic=dynamic, fullgraph=True)
        for args in calls(wrapper):
            fn(*args)
        assert recorder.paths
        for path in recorder.paths:
            capture = tfk.Capture.load(path)
            instance = capture.instantiate()
            with instance.active():
                again = tfk.capture(instance.gm, instance.inputs)
            assert again.fingerprint() == capture.fingerprint()
            capture.instantiate(fresh=True).compile("aot_eager")
            capture.compile("aot_eager")(*capture.materialize())


# --- what is described ----------------------------------------------------------------------------


def _one(fn: Callable[..., Any], *args: Any, **options: Any) -> tuple[tfk.Capture, int]:
    """Return the capture of the only frame, and how many symbols it adds to the environment."""
    found: list[tuple[tfk.Capture, int]] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        context = torch._guards.TracingContext.get()
        assert context.fake_mode is not None
        env: Any = context.fake_mode.shape_env
        before = len(env.var_to_range)
        found.append((tfk.capture(gm, inputs), len(env.var_to_range) - before))
        return gm.forward

    torch.compile(fn, backend=backend, **options)(*args)
    (frame,) = found
    return frame


def test_a_frame_with_a_wrapper_is_described_from_its_real_tensors() -> None:
    """No record has the flag of a fake tensor, and the number has its value."""
    w, q, s = two(3), torch.randn(1, 2, 3, 4), NUMBERS[0]
    capture, made = _one(lambda w, q, s: (w * 2, q * s), w, q, s, dynamic=True)
    tensors = [entry.tensor for entry in capture.desc.inputs if entry.tensor is not None]
    assert not any(d.is_fake for d in tensors)
    assert [d.scalar_hint for d in tensors if d.scalar_hint is not None] == [s]
    assert made == 0


SHARED: dict[str, Callable[[torch.Tensor], tuple[Any, ...]]] = {
    "base and view": lambda a: (a, a[1:]),
    "view and base": lambda a: (a[1:], a),
    "wrapper and inner tensor": lambda a: (_of(a), a),
    "inner tensor and wrapper": lambda a: (a, _of(a)),
    "inner views and their base": lambda a: (_of(a[1:]), a),
    "jagged and its values": lambda a: (_jagged(a), a),
    "values and what is jagged of them": lambda a: (a, _jagged(a)),
}


def _of(a: torch.Tensor) -> Any:
    return TwoTensor(a, a)


def _jagged(a: torch.Tensor) -> Any:
    return torch.nested.nested_tensor_from_jagged(a, torch.tensor([0, 2, a.shape[0]]))


@pytest.mark.parametrize("dynamic", [True, pytest.param(None, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("name", SHARED)
def test_inputs_that_share_a_tensor_make_no_symbols(name: str, dynamic: bool | None) -> None:
    """A tensor that is an input and a part of another one is made once, with the same symbols."""
    a = torch.randn(6, 4)
    args = SHARED[name](a)
    if dynamic is None:
        for t in args:
            if type(t) is torch.Tensor:
                torch._dynamo.mark_dynamic(t, 0)
    capture, made = _one(lambda *args: [a + 1 for a in args], *args, dynamic=dynamic)
    assert made == 0
    inputs = capture.instantiate().inputs
    parts = [p for x in inputs for p in _parts(x)]
    assert len({p.untyped_storage()._cdata for p in parts}) == len(
        {p.untyped_storage()._cdata for x in args for p in _parts(x)}
    )


def _parts(t: Any) -> list[torch.Tensor]:
    """Return the plain tensors that it is made of."""
    if not isinstance(t, torch.Tensor):
        return []
    if isinstance(t, FakeTensor) or not hasattr(t, "__tensor_flatten__"):
        return [t]
    return [p for name in t.__tensor_flatten__()[0] for p in _parts(getattr(t, name))]
