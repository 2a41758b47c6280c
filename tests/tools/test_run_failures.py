"""After a failed run a block says frame, the user's line, error and the next command."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace
from write_golden import ROOT

from torch_fakeify.errors import NotFailingError, ScriptError
from torch_fakeify.frames.notes import FrameReport
from torch_fakeify.records.frame import FailureDesc
from torch_fakeify.records.tensor import FrameDesc, StackDesc
from torch_fakeify.render.data_dependent import KnownOf
from torch_fakeify.serialization.capture_file import read_capture, write_capture
from torch_fakeify.tools.minify import search
from torch_fakeify.tools.run_failures import HowCompiled, failure_lines, untraced_lines
from torch_fakeify.tools.run_script import ScriptReport

if TYPE_CHECKING:
    from cli_runs import Command

pytestmark = pytest.mark.usefixtures("warm_workers")

OUT = Path("captures/s")


def failed(number: int = 0, **parts: Any) -> FrameReport:
    """The report of a frame that failed."""
    path = OUT.absolute() / f"{number:03d}-f-00000000.fkf"
    given: dict[str, Any] = {"state": "failed", "failure": "ValueError: no", "backend": "acme"}
    return FrameReport("f", path, **{**given, **parts})


@pytest.mark.parametrize(
    ("parts", "how", "command"),
    [
        ({}, HowCompiled(), "minify"),
        ({"state": "not finished"}, HowCompiled(), "replay"),
        ({"backend_place": "lib.npu:comp"}, HowCompiled(), "minify --backend lib.npu:comp"),
        ({"backend_place": "lib.npu"}, HowCompiled(), "minify --import lib.npu"),
        ({"backend_place": "lib.npu:comp"}, HowCompiled("eager", ("ops",)), "minify --import ops --backend eager"),
    ],
)  # fmt: skip
def test_the_next_command_has_the_options_that_it_needs(
    parts: dict[str, Any], how: HowCompiled, command: str
) -> None:
    """Those of the run, and the place of a backend of one's own."""
    line = f"  next        torch-fakeify {command} captures/s/000-f-00000000.fkf"
    assert failure_lines([failed(**parts)], OUT, how)[-1] == line


def test_a_backend_of_the_script_itself_has_to_move() -> None:
    """The command has a placeholder for the module, and the line before it says what comes first."""
    frames = [failed(backend_place="__main__:mine", backend="mine")]
    assert failure_lines(frames, OUT, HowCompiled())[-2:] == [
        "  first       move the backend from the script into a module, which is MODULE below",
        "  next        torch-fakeify minify --backend MODULE:mine captures/s/000-f-00000000.fkf",
    ]
    with pytest.raises(ScriptError, match="Move it into a module that the script imports"):
        ScriptReport(frames).failing()


def test_the_first_failure_is_shown_and_others_are_named() -> None:
    """A failed frame comes before one that is not finished; frames without a file are left out."""
    good, lost = failed(0, state="compiled", failure=None), failed(9)
    lost.path = None
    hung = failed(1, state="not finished", failure="interrupted")
    defined, line = (str(Path("lib/a.py").absolute()), 3), (str(Path("s.py").absolute()), 1)
    frames = [good, lost, hung, failed(2, defined=defined, line=line), failed(3)]
    assert failure_lines(frames, OUT, HowCompiled()) == [
        "  frame       s/002-f-00000000.fkf: f, lib/a.py:3",
        "  your line   s.py:1",
        "  error       ValueError: no",
        "  next        torch-fakeify minify captures/s/002-f-00000000.fkf",
        "  failed too  s/003-f-00000000.fkf, s/001-f-00000000.fkf",
    ]
    assert failure_lines([good, lost], OUT, HowCompiled()) == []


def test_a_data_dependent_failure_of_a_backend_has_the_check(tmp_path: Path) -> None:
    """What the message in the capture says further stands below the error."""
    said = KnownOf(known=("n >= 0",), checks=("torch._check(n <= 8)  # at m.py:3",)).text()
    message = f"data-dependent expression u0 <= 8 (unhinted: u0 <= 8)\n{said}\n\nmore"
    desc = read_capture(ROOT / "program_failed.fkf")
    desc = replace(desc, failure=FailureDesc(type="E", message=message))
    write_capture(tmp_path / "f.fkf", desc)
    frame = failed(failure="E: data-dependent")
    frame.path = tmp_path / "f.fkf"
    assert failure_lines([frame], tmp_path, HowCompiled())[1:-1] == [
        "  error       E: data-dependent",
        "              known: n >= 0",
        "              It would follow with:",
        "              torch._check(n <= 8)  # at m.py:3",
    ]


def test_the_line_is_that_of_the_node_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the message names nodes of one line of the program; a library's line is not the user's."""
    desc = read_capture(ROOT / "program_failed.fkf")
    nodes = [each for each in desc.graph.nodes if each.op == "call_function"][:2]
    packages = tmp_path / "site-packages"
    (packages / "layers").mkdir(parents=True)
    (packages / "layers" / "act.py").touch()
    monkeypatch.syspath_prepend(packages)
    monkeypatch.chdir(tmp_path)
    own = FrameDesc("model.py", 7, "forward", "return act(x)\n       ^^^^^^")
    other, library = replace(own, line=9), FrameDesc("layers/act.py", 3, "act", "return x.sin()")
    called = (str(Path("s.py").absolute()), 1)

    def line(message: str, *stacks: tuple[FrameDesc, ...]) -> str:
        found = dict(zip((node.name for node in nodes), stacks, strict=False))
        changed = tuple(
            replace(each, stack=StackDesc(frames=found[each.name])) if each.name in found else each
            for each in desc.graph.nodes
        )
        failure = FailureDesc(type="E", message=message)
        graph = replace(desc.graph, nodes=changed)
        frame = failed(line=called)
        frame.path = tmp_path / "frame.fkf"
        write_capture(frame.path, replace(desc, graph=graph, failure=failure))
        return failure_lines([frame], tmp_path, HowCompiled())[1].removeprefix("  your line   ")

    first, second = (f"%{node.name}" for node in nodes)
    assert line(f"no code for {first}", (other, own)) == "model.py:7: return act(x)"
    assert line(f"no code for {first}", (own, library)) == "model.py:7: return act(x)"
    both = f"no code for {first} and {second}"
    assert line(both, (own, library), (other, own)) == "model.py:7: return act(x)"
    assert line(both, (own,), (other,)) == "s.py:1"
    assert line(both, (own,), (library,)) == "s.py:1"
    assert line("no code", (own,)) == "s.py:1"


ADVICE = ["known: n >= 0", "It would follow with:", "torch._check(n <= 8)  # at s.py:3"]


@pytest.mark.parametrize(
    ("cls", "error", "advice", "next_step"),
    [
        ("InternalTorchDynamoError", "E: no", [], "Run it with TORCHDYNAMO_VERBOSE=1 for Dynamo's own stack"),
        ("UserError", "Could not guard on data-dependent expression u0 <= 8", [], "Run it with TORCH_FAKEIFY_ENTAILMENT=1: "),
        ("UserError", "Could not guard on data-dependent expression u0 <= 8", ADVICE, "Add the check that holds before that line"),
    ],
)  # fmt: skip
def test_a_failure_of_dynamo_has_advice_of_its_kind(
    cls: str, error: str, advice: list[str], next_step: str
) -> None:
    """What was recorded before is counted; with entailment there are the known facts and the checks."""
    found = {"classes": [cls], "error": error, "explanation": "", "line": None, "advice": advice}
    *lines, last = untraced_lines(found, [failed()], OUT)
    assert lines == [
        "  frame       none: torch.compile failed before it called a backend",
        f"  error       {error}",
        *(f"              {line}" for line in advice),
        "  recorded    1 capture in captures/s until then",
    ]
    assert last.startswith(f"  next        {next_step}")


LIB = """
import torch

@torch.library.custom_op("shop::buy", mutates_args=())
def buy(x: torch.Tensor) -> torch.Tensor:
    return x.clone()

@buy.register_fake
def _(x):
    raise RuntimeError("no price")

def step(x):
    return buy(x + 1)

def branch(x):
    if x.sum() > 0:
        return x
    return -x

class Picky(torch.fx.Interpreter):
    def call_function(self, target, args, kwargs):
        if target.__name__ == "mul":
            raise ValueError("no mul")
        return super().call_function(target, args, kwargs)

def mine(gm, inputs):
    return Picky(gm).run(*inputs)

def grow(x):
    y = x + 1
    return y * 2
"""

GOOD = "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2))\n"


def write_script(folder: Path, code: str) -> None:
    """Write the script ``s.py``, and its module."""
    (folder / "lib.py").write_text(LIB)
    (folder / "s.py").write_text(f"import torch\nimport lib\n{code}")


def run_of(command: Command, tmp_path: Path, code: str) -> tuple[int, list[str]]:
    """The exit status of a run, and the block with the last line."""
    write_script(tmp_path, code)
    done = command("run", "s.py", cwd=tmp_path)
    lines = done.stderr.splitlines()
    at = max(n for n, line in enumerate(lines) if line.startswith("  frame  "))
    return done.returncode, lines[at:]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("code", "line", "error", "more", "recorded", "next_step"),
    [
        (
            f"{GOOD}torch.compile(lib.branch, backend='eager', fullgraph=True)(torch.ones(2))\n",
            "lib.py:16: if x.sum() > 0:", "Unsupported: ", "", "1 capture in captures/s",
            "Change that line, or compile without fullgraph=True",
        ),
        (
            "torch.compile(lib.step, backend='eager', fullgraph=True)(torch.ones(2))\n",
            "lib.py:13: return buy(x + 1)", "TorchRuntimeError: ", "shop.buy.*no price", "nothing",
            "Correct that operator's fake kernel",
        ),
    ],
    ids=["graph break", "fake kernel"],
)  # fmt: skip
def test_a_frame_that_is_not_traced_is_told(
    command: Command, tmp_path: Path, code: str, line: str, error: str, more: str, recorded: str,
    next_step: str,
) -> None:  # fmt: skip
    """There is no capture of it: the block has the line, the error, and what was recorded before."""
    status, lines = run_of(command, tmp_path, code)
    assert status == 1
    assert lines[0] == "  frame       none: torch.compile failed before it called a backend"
    assert lines[1] == f"  your line   {line}"
    assert lines[2].startswith(f"  error       {error}")
    assert re.search(more, lines[3])
    assert f"  recorded    {recorded} until then" in lines
    assert lines[-2].startswith(f"  next        {next_step}")
    assert lines[-1] == "torch-fakeify: the script raised, exit status 1"
    assert (tmp_path / "captures").exists() == (recorded != "nothing")


@pytest.mark.sweep
def test_the_line_is_that_of_the_node_that_fails(command: Command, tmp_path: Path) -> None:
    """Torch's interpreters append the node's stack to an error; the command names the module."""
    code = "torch.compile(lib.grow, backend=lib.mine)(torch.ones(3))\n"
    status, lines = run_of(command, tmp_path, code)
    assert status == 1
    name = lines[0].split()[1].rstrip(":")
    assert lines == [
        f"  frame       {name}: grow, lib.py:29",
        "  your line   lib.py:31: return y * 2",
        "  error       ValueError: no mul",
        f"  next        torch-fakeify minify --backend lib:mine captures/{name}",
        "torch-fakeify: the script raised, exit status 1",
    ]


def test_a_script_is_recorded_and_its_failing_frame_minified(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``minify SCRIPT ARGS`` passes the capture and its backend on to the search."""
    asked: list[dict[str, Any]] = []

    def minify(file: str, output: Path, **options: Any) -> Any:
        asked.append({"file": file, "output": output, **options})
        raise NotFailingError("stop here")

    monkeypatch.setattr(search, "minify", minify)
    code = f"{GOOD}import sys\nassert sys.argv[1:] == ['--up', 'x']\n"
    write_script(tmp_path, code + "torch.compile(lib.grow, backend=lib.mine)(torch.ones(3))\n")
    done = command("minify", "--seed", "5", "s.py", "--", "--up", "x", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith("torch-fakeify: stop here\n")
    (found,) = asked
    path = Path(found["file"])
    assert path.match("captures/s/001-grow-*.fkf")
    assert found["output"] is None  # beside the capture
    assert (found["backend"], found["imports"], found["seed"]) == ("lib:mine", [], 5)


@pytest.mark.sweep
def test_run_minifies(command: Command, tmp_path: Path) -> None:
    """``run --minify`` writes the small capture and its script."""
    write_script(tmp_path, "torch.compile(lib.grow, backend=lib.mine)(torch.ones(3))\n")
    done = command("run", "--minify", "s.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "raises: ValueError: no mul" in done.stdout
    assert sorted(path.name.split(".", 1)[1] for path in (tmp_path / "captures" / "s").iterdir()) == [
        "fkf", "min.fkf", "min.py",
    ]  # fmt: skip


@pytest.mark.sweep
def test_a_script_without_a_failing_frame_is_not_minified(command: Command, tmp_path: Path) -> None:
    """The exit status is 1; a backend of the script itself is an error with what to do."""
    write_script(tmp_path, GOOD)
    done = command("minify", "s.py", cwd=tmp_path)
    message = "torch-fakeify: no recorded frame failed: there is nothing to minify\n"
    assert (done.returncode, done.stderr) == (1, message)
