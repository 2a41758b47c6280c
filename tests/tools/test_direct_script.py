"""Scripts that call a backend without Dynamo build any recorded graph as it was recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from captured_frames import recorded_frame
from places import GOLDEN
from planting import plant
from processes import fresh
from torch import _higher_order_ops as higher_order
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import torch_fakeify as tfk
from torch_fakeify.errors import FakeifyError
from torch_fakeify.serialization.capture_file import read_capture
from torch_fakeify.tools.minify.failures import Failure
from torch_fakeify.tools.minify.repro_script import BackendCode, check_script, script_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WRONG = Failure("wrong", "forward", message="output 0: 3 of 4 elements are off, by up to 1")


def setitem(x: torch.Tensor) -> torch.Tensor:
    """Assign items, slices and results of in-place operators."""
    y = x.clone()
    y[0] = 1
    y[:, 1:3] = x[:, 1:3] * 2
    y += 1
    return y.mul_(2)


def slices(x: torch.Tensor) -> torch.Tensor:
    """Slice by symbols and by other indices."""
    n = x.shape[0]
    return x[1 : n // 2, ...].sin() + x[: n // 2 - 1, None, ::1].reshape(-1, x.shape[1])


def cond(x: torch.Tensor) -> torch.Tensor:
    """Branch inside a branch, with a closure and a constant."""
    z = x.exp()

    def inner(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(
            x.max() > 1, lambda x: x.sin() * z, lambda x: x + torch.tensor([1.0]), (x,)
        )

    return torch.cond(x.sum() > 0, inner, lambda x: x.cos() * x.shape[0], (x,))


def while_loop(x: torch.Tensor) -> torch.Tensor:
    """Loop on a condition."""
    n = torch.tensor(3)
    done = higher_order.while_loop(
        lambda i, _: i > 0, lambda i, x: (i - 1, x.sin() * x.shape[0]), (n, x)
    )
    return done[1]


def scan(x: torch.Tensor) -> torch.Tensor:
    """Compute running sums."""
    return higher_order.scan(lambda c, row: (c + row, (c * row).sin()), x[0] * 0, x)[1]


def mapped(x: torch.Tensor) -> torch.Tensor:
    """Map a function over rows."""
    return higher_order.map(lambda row, y: row.sin() * y, x, x[0].clone())


def associative_scan(x: torch.Tensor) -> torch.Tensor:
    """Compute running products, whose values inside are batched."""
    return higher_order.associative_scan(lambda a, b: a * b, x, dim=0, combine_mode="generic")


@torch.compiler.nested_compile_region
def region(x: torch.Tensor) -> torch.Tensor:
    """Call one body twice."""
    return x.sin() * 2


def invoke_subgraph(x: torch.Tensor) -> torch.Tensor:
    """Call a region that Dynamo compiles once."""
    return region(region(x) * x.shape[0])


def attention(x: torch.Tensor) -> torch.Tensor:
    """Compute scores by a body."""
    q = x[None, None]
    return flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + (i - j))


class Cubed(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the cube."""
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Return a third of the cube's derivative."""
        return grad * ctx.saved_tensors[0] ** 2


def autograd_function(x: torch.Tensor) -> torch.Tensor:
    """Call a function with two bodies."""
    return Cubed.apply(x)


def modes(x: torch.Tensor) -> torch.Tensor:
    """Set grad mode and autocast."""
    with torch.no_grad():
        y = x.sin()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ y.t()


def checkpointed(x: torch.Tensor) -> torch.Tensor:
    """Recompute a body in the backward."""
    return checkpoint(lambda x: x.sin().exp() * x.shape[0], x, use_reentrant=False)


def hinted(x: torch.Tensor) -> torch.Tensor:
    """Use hints of the user and strict mode."""
    y = torch.ops.higher_order.hints_wrapper(lambda x: x.sin(), (x,), {}, hints={"fast": True})
    return higher_order.strict_mode(lambda y: y.exp(), (y,))


def vmapped(x: torch.Tensor) -> torch.Tensor:
    """Apply a transform, whose values are wrapped."""
    return torch.func.vmap(lambda row: row.sin() * 2)(x)


def from_data(x: torch.Tensor) -> torch.Tensor:
    """Compute with a number that is read from data."""
    y = x.nonzero()
    return y.float() * y.shape[0]


def guarded(x: torch.Tensor) -> torch.Tensor:
    """Branch on sizes."""
    return x.sin() if x.shape[0] % 4 == 0 and x.shape[1] > 3 else x


PROGRAMS = (
    setitem, slices, cond, while_loop, scan, mapped, associative_scan, invoke_subgraph, attention,
    autograd_function, modes, checkpointed, hinted, vmapped, from_data, guarded,
)  # fmt: skip


def frame_of(program: Callable[..., Any], folder: Path, *, dynamic: bool) -> Path:
    """Return the capture of a program's frame."""
    x = torch.randn(8, 4, requires_grad=program in (autograd_function, checkpointed))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        return recorded_frame(folder, program, x, dynamic=dynamic, fullgraph=True)


def _plain(text: str) -> str:
    """Print a number as Python does, also one of sympy's."""
    try:
        return repr(round(float(text), 9))
    except ValueError:
        return text


def nodes_of(gm: torch.fx.GraphModule, path: str = "") -> list[tuple[Any, ...]]:
    """Return what a backend sees of each node, those of bodies included."""
    found: list[tuple[Any, ...]] = []
    for node in gm.graph.nodes:
        values = [
            (
                tuple(map(str, v.shape)),
                tuple(map(str, v.stride())),
                v.dtype,
                v.device,
                v.requires_grad,
            )
            if isinstance(v, torch.Tensor)
            else _plain(str(v))
            for key in ("example_value", "val")
            for v in torch.utils._pytree.tree_leaves(node.meta.get(key))
        ]
        target = (
            node.target if isinstance(node.target, str) else str(node.target).partition(" at ")[0]
        )
        bound = str(node.meta.get("unbacked_bindings"))
        found.append(
            (path, node.op, node.name, target, str(node.args), str(node.kwargs), values, bound)
        )
        if node.op == "get_attr" and isinstance(
            body := getattr(gm, str(node.target), None), type(gm)
        ):
            found += nodes_of(body, f"{path}.{node.name}")
    return found


def run(text: str, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.fx.GraphModule, list[Any]]:
    """Return what a script passes to its backend, which is eager."""
    calls: list[Any] = []

    def eager(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        calls.append((gm, inputs))
        return gm

    # The script sets what the frame needs; the patch takes it back.
    settings = torch._dynamo.config.patch(
        {"capture_dynamic_output_shape_ops": False, "capture_scalar_outputs": False}
    )
    with settings, monkeypatch.context() as patch:
        registry = "torch._dynamo.backends.registry.lookup_backend"
        patch.setattr(registry, lambda _: eager)
        try:
            exec(compile(text, "script", "exec"), {"__name__": "__script__"})
        finally:
            torch.set_grad_enabled(True)
    return calls[0]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_script_passes_what_was_recorded_to_its_backend(
    program: Any, dynamic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes, names, arguments, values and facts are equal, and so are the graph's results."""
    capture = tfk.Capture.load(frame_of(program, tmp_path, dynamic=dynamic))
    text = script_of(capture.desc, WRONG, BackendCode("eager"), direct=True, torch_names=True)
    assert "fakeify" not in text
    gm, inputs = run(text, monkeypatch)
    instance = capture.instantiate()
    assert nodes_of(gm) == nodes_of(instance.gm)
    assert [str(getattr(v, "shape", v)) for v in inputs] == [
        str(getattr(v, "shape", v)) for v in instance.inputs
    ]
    if instance.shape_env is not None:
        env = next(v for v in inputs if isinstance(v, torch.Tensor)).fake_mode.shape_env
        facts = [{str(guard.expr) for guard in e.guards} for e in (env, instance.shape_env)]
        assert facts[0] >= facts[1]


def test_golden_frames_have_scripts_or_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each golden program has a script with the same graph, or a reason why it has none."""
    failure = Failure("raises", "compile", "builtins.ValueError", "no")
    refused: list[str] = []
    for path in sorted(GOLDEN.glob("program_*.fkf"))[::4]:
        capture = tfk.Capture(read_capture(path))
        try:
            text = script_of(
                capture.desc, failure, BackendCode("eager"), direct=True, torch_names=True
            )
        except FakeifyError as error:
            refused.append(f"{path.stem}: {error}")
            continue
        text = text.replace("\ncompiled(*inputs())", "")  # not every one of them runs on any data
        gm, _ = run(text, monkeypatch)
        names = [[node[:4] for node in nodes_of(g)] for g in (gm, capture.instantiate().gm)]
        assert names[0] == names[1], path.stem
    assert all("Use the capture" in each for each in refused)
    assert len(refused) < 5


BACKEND = '''
import torch


def bug_sees_all(gm, inputs):
    """It looks at the value of every node, and has no kernel for one operator."""
    seen = []
    for module in gm.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                if node.op == "call_function" and "sin" not in str(node.target):
                    seen.append(node.meta.get("example_value"))
    raise NotImplementedError("no kernel for this one")
'''


@pytest.mark.sweep
@pytest.mark.parametrize(
    "program",
    [
        cond,
        setitem,
        *(pytest.param(p, marks=pytest.mark.long) for p in (while_loop, scan, invoke_subgraph)),
    ],
)
def test_a_script_fails_with_torch_and_its_backend_alone(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script reproduces the failure in an empty folder, where this package cannot be imported."""
    path = frame_of(program, tmp_path / "frames", dynamic=True)
    plant(tmp_path / "planted", BACKEND, monkeypatch)
    failure = Failure("raises", "compile", "builtins.NotImplementedError", "no kernel for this one")
    text = script_of(read_capture(path), failure, BackendCode("bug_sees_all"), direct=True)
    script = tmp_path / "script.py"
    script.write_text(text)
    outcome = check_script(script, failure, timeout=240)
    assert outcome.fails, outcome.text
    script.write_text(text.replace("'bug_sees_all'", "'eager'"))
    fresh(script)
