"""Scripts of frames build any recorded graph as it was recorded, in the names of the program."""

from __future__ import annotations

import ast
import keyword
from typing import TYPE_CHECKING, Any

import pytest
import torch
from captured_frames import only_capture_of, recorded_frame
from places import GOLDEN
from planting import plant
from processes import fresh
from program_zoo import Program, programs
from screen_models import Decoder, Sizes

import torch_fakeify as tfk
from torch_fakeify.errors import FakeifyError
from torch_fakeify.records.graph import GraphModuleDesc
from torch_fakeify.records.rewrite import walk
from torch_fakeify.serialization.capture_file import read_capture
from torch_fakeify.tools.minify.failures import Failure
from torch_fakeify.tools.minify.repro_script import BackendCode, check_script, script_of
from torch_fakeify.tools.minify.script_code import RESERVED, with_identifiers

if TYPE_CHECKING:
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


@torch.compiler.nested_compile_region
def region(x: torch.Tensor) -> torch.Tensor:
    """Call one body twice."""
    return x.sin() * 2


def invoke_subgraph(x: torch.Tensor) -> torch.Tensor:
    """Call a region that Dynamo compiles once."""
    return region(region(x) * x.shape[0])


def hinted(x: torch.Tensor) -> torch.Tensor:
    """Use hints of the user and strict mode."""
    y = torch.ops.higher_order.hints_wrapper(lambda x: x.sin(), (x,), {}, hints={"fast": True})
    return torch._higher_order_ops.strict_mode(lambda y: y.exp(), (y,))


OWN = {
    fn.__name__: Program(
        name=fn.__name__, sentence="", make=lambda fn=fn: (fn, (torch.randn(8, 4),))
    )
    for fn in (setitem, slices, invoke_subgraph, hinted)
}
NAMES = (
    *OWN, "cond", "cond_on_a_size", "while_loop", "scan", "map_over_a_dim", "associative_scan",
    "flex_attention", "autograd_function", "autocast_inside", "no_grad_inside", "checkpointing", "vmap",
    "nonzero_arithmetic", "item_with_checks", "divisible", "branch_on_size", "shape_arithmetic",
)  # fmt: skip
"""Programs of the zoo too."""


def frame_of(name: str, folder: Path, *, dynamic: bool) -> Path:
    """Return the capture of a program's frame."""
    program = OWN.get(name) or programs()[name]
    with program.active():
        fn, args, *_ = program.make()
        return recorded_frame(folder, fn, *args, dynamic=dynamic, fullgraph=True)


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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_script_passes_what_was_recorded_to_its_backend(
    name: str, dynamic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes, names, arguments, values and facts are equal, and so are the graph's results."""
    capture = tfk.Capture.load(frame_of(name, tmp_path, dynamic=dynamic))
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


# --- names that are made of those of the program ---------------------------------------------------


def decoder() -> tfk.Capture:
    """A frame of a decoder of four blocks, with dynamic sizes."""
    return only_capture_of(Decoder(), torch.randint(0, 100, (2, 17)), dynamic=True)


def sizes() -> tfk.Capture:
    """A frame whose guards compare sizes, and that reads one from data."""
    y = torch.ones(5, dtype=torch.long)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        return only_capture_of(Sizes(), torch.randn(7, 8), y, 3, dynamic=True)


@pytest.mark.parametrize("capture_of", [decoder, sizes])
def test_inputs_have_valid_and_different_names(capture_of: object) -> None:
    """No name is a keyword, one of the script's own, or that of another node; the frame is the same."""
    desc = capture_of().desc  # type: ignore[operator]
    named = with_identifiers(desc)
    for graph in walk(named, GraphModuleDesc, inside=True):
        names = [fx_node.name for fx_node in graph.nodes]
        assert len(set(names)) == len(names)
    names = [entry.name for entry in named.inputs]
    assert all(name.isidentifier() and not keyword.iskeyword(name) for name in names)
    assert not RESERVED & {*names}
    gm, renamed = tfk.Capture(desc).instantiate().gm, tfk.Capture(named).instantiate().gm
    assert [n.name for n in gm.graph.nodes if n.op != "placeholder"] == [
        n.name for n in renamed.graph.nodes if n.op != "placeholder"
    ]


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("capture_of", [decoder, sizes])
def test_a_script_is_in_the_names_of_the_program(capture_of: object, direct: bool) -> None:
    """It has no placeholder of torch's, and is Python; with ``torch_names`` it has them all."""
    desc = capture_of().desc  # type: ignore[operator]
    text = script_of(desc, WRONG, BackendCode("eager"), direct=direct)
    names = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}
    assert "l_self_modules" not in text
    assert not {entry.name for entry in desc.inputs if entry.name.startswith("l_")} & names
    theirs = script_of(desc, WRONG, BackendCode("eager"), direct=direct, torch_names=True)
    assert "l_self_modules" in theirs


def test_the_guards_of_a_script_are_over_sizes_of_the_program() -> None:
    """A symbol is ``x_size_0`` in conditions."""
    text = script_of(sizes().desc, WRONG, BackendCode("eager"))
    assert "x_size_0 = x_1.size(0)" in text  # a node of the frame is `x`
    assert "if not (x_size_0 > 4):" in text


# --- run by plain Python --------------------------------------------------------------------------


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


def bug_no_gelu(gm, inputs):
    if any("gelu" in str(node.target) for node in gm.graph.nodes):
        raise NotImplementedError("no kernel for this one")
    return gm
'''
FAILURE = Failure("raises", "compile", "builtins.NotImplementedError", "no kernel for this one")


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name",
    [
        "cond_on_a_size",
        "setitem",
        *(
            pytest.param(n, marks=pytest.mark.long)
            for n in ("while_loop", "scan", "invoke_subgraph")
        ),
    ],
)
def test_a_script_fails_with_torch_and_its_backend_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script reproduces the failure in an empty folder, where this package cannot be imported."""
    path = frame_of(name, tmp_path / "frames", dynamic=True)
    plant(tmp_path / "planted", BACKEND, monkeypatch)
    text = script_of(read_capture(path), FAILURE, BackendCode("bug_sees_all"), direct=True)
    script = tmp_path / "script.py"
    script.write_text(text)
    outcome = check_script(script, FAILURE, timeout=240)
    assert outcome.fails, outcome.text
    script.write_text(text.replace("'bug_sees_all'", "'eager'"))
    fresh(script)


@pytest.mark.sweep
def test_a_script_that_dynamo_traces_fails_in_the_names_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script of a whole model, not minified, raises what its backend raises."""
    plant(tmp_path / "planted", BACKEND, monkeypatch)
    script = tmp_path / "script.py"
    script.write_text(script_of(decoder().desc, FAILURE, BackendCode("bug_no_gelu")))
    outcome = check_script(script, FAILURE, timeout=200)
    assert outcome.fails, outcome.text
