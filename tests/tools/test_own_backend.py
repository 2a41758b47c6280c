"""A backend and operators in a module of the user's own, from `run` to the script that `minify` writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from processes import fresh

from torch_fakeify.errors import CaptureError
from torch_fakeify.serialization.capture_file import read_capture, write_capture
from torch_fakeify.tools.replaying import replay_capture

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from cli_runs import Command

pytestmark = pytest.mark.usefixtures("warm_workers")

MODULE = """
import torch

library = torch.library.Library("chip", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: x * 2, "CPU")
library.impl("twice", torch.empty_like, "Meta")


@torch.library.custom_op("chip::thrice", mutates_args=())
def thrice(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@thrice.register_fake
def _(x):
    return torch.empty_like(x)


def compiler(gm, inputs):
    if any(node.target == "cos" for node in gm.graph.nodes):
        raise NotImplementedError("no cos")
    return gm.forward


class Compilers:
    wrong = staticmethod(lambda gm, inputs: lambda *args: [x + 1 for x in gm(*args)])


not_callable = 3
"""
MODEL = """
import torch
import parts.chip


def wave(x):
    return torch.ops.chip.thrice(torch.ops.chip.twice(x)).cos() + 1


torch.compile(wave, backend=parts.chip.compiler, dynamic=True)(torch.ones(4, 5))
"""


_INSTALLED = (
    "-c", "import sys; sys.path.remove(''); from torch_fakeify.cli import main; sys.exit(main())",
)  # fmt: skip
"""The command as it is installed: the working directory is not on its path."""


def _command(
    *args: str | Path, cwd: Path, executable: tuple[str, ...] = _INSTALLED
) -> subprocess.CompletedProcess[str]:
    """Run a command in a fresh process."""
    return fresh(*executable, *args, cwd=cwd, status=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the module in a package, the script, and the captures of the script."""
    folder = tmp_path_factory.mktemp("a folder")
    (folder / "parts").mkdir()
    (folder / "parts" / "chip.py").write_text(MODULE)
    (folder / "model.py").write_text(MODEL)
    done = _command("run", "model.py", cwd=folder)
    assert "NotImplementedError: no cos" in done.stderr
    return folder


@pytest.fixture
def capture(folder: Path) -> Path:
    """The capture of the script's frame."""
    (path,) = (folder / "captures" / "model").glob("*wave-????????.fkf")
    return path


@pytest.mark.sweep
def test_a_capture_names_the_modules_of_backend_and_operators(
    command: Command, folder: Path, capture: Path
) -> None:
    """They are where the user has them; `show` prints the place of the backend."""
    desc = read_capture(capture)
    assert (desc.backend, desc.backend_place) == ("compiler", "parts.chip:compiler")
    assert desc.operator_modules == (("chip.thrice", "parts.chip"), ("chip.twice", "parts.chip"))
    shown = command("show", capture, cwd=folder).stdout
    assert "compiler, which is parts.chip:compiler" in shown
    texts = command("show", "--privacy", capture, cwd=folder).stdout
    assert "  parts.chip:compiler" in texts.splitlines()


@pytest.mark.parametrize(
    ("options", "status", "found"),
    [
        ([], 2, "Use --backend parts.chip:compiler, or --import parts.chip if"),
        (["--backend", "parts.chip:compiler"], 0, "reproduced\n  with parts.chip:compiler, torch "),
        (["--backend", "eager"], 1, "operators that are not here, as stubs:\n    chip::thrice"),
        pytest.param(["--backend", "eager", "--import", "parts.chip"], 1, "not reproduced\n  with eager, ", marks=pytest.mark.sweep),
        pytest.param(["--backend", "parts.chip:nothing"], 2, "the module 'parts.chip' has no backend 'nothing'", marks=pytest.mark.sweep),
        pytest.param(["--backend", "parts.chip:not_callable"], 2, "parts.chip:not_callable is no backend", marks=pytest.mark.sweep),
        pytest.param(["--backend", "parts.chop:compiler"], 2, "the module 'parts.chop' cannot be imported", marks=pytest.mark.sweep),
    ],
    ids=["recorded", "own", "missing module", "other", "no attribute", "no function", "no module"],
)  # fmt: skip
def test_replay_compiles_with_an_own_backend(
    command: Command, folder: Path, capture: Path, options: list[str], status: int, found: str
) -> None:
    """The backend that is named compiles; where something is missing, the error has the option that brings it."""
    done = command("replay", capture, *options, cwd=folder)
    assert found in done.stdout + done.stderr
    assert done.returncode == status


@pytest.mark.sweep
def test_what_minify_writes_is_run_by_plain_python(
    command: Command, folder: Path, capture: Path, tmp_path: Path
) -> None:
    """The script imports the user's module from the folder in which it is run."""
    output = tmp_path / "small.fkf"
    done = command("minify", capture, "--backend", "parts.chip:compiler", "-o", output, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "script: fails in the same way" in done.stdout
    script = output.with_suffix(".py")
    assert "import parts.chip\n" in script.read_text()
    assert "torch_fakeify" not in script.read_text()
    plain = _command(script, cwd=folder, executable=())
    assert "NotImplementedError: no cos" in plain.stderr
    assert read_capture(output).backend_place == "parts.chip:compiler"


@pytest.mark.long
@pytest.mark.sweep
def test_every_process_of_a_command_has_the_module(
    command: Command, folder: Path, capture: Path
) -> None:
    """Batches of sizes, workers of a corpus and tests of the plugin import what the options name."""
    own = ["--backend", "parts.chip:compiler"]
    wrong = command(
        "fuzz", capture, "--backend", "parts.chip:Compilers.wrong", "--runs", "3", cwd=folder
    )
    assert wrong.returncode == 1, wrong.stdout + wrong.stderr
    assert "with parts.chip:Compilers.wrong, torch " in wrong.stdout
    assert command("fuzz", capture, "--runs", "3", cwd=folder).returncode == 2
    corpus = command("replay", "--jobs", "2", "captures", *own, cwd=folder)
    assert (corpus.returncode, "with parts.chip:compiler" in corpus.stdout) == (0, True)
    recorded = command("replay", "--jobs", "2", "captures", cwd=folder)
    assert recorded.returncode == 2
    assert "Use --backend parts.chip:compiler" in recorded.stdout
    tests = ["--fakeify-corpus", "captures", "--fakeify-backend", "parts.chip:compiler"]
    plugin = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    done = _command(*tests, cwd=folder, executable=plugin)
    assert done.returncode == 0, done.stdout + done.stderr
    other = ["--fakeify-corpus", "captures", "--fakeify-backend", "eager"]
    assert (
        "not reproduced"
        in _command(*other, "--fakeify-import", "parts.chip", cwd=folder, executable=plugin).stdout
    )
    demo = command("demo", "--check", "--backend", "parts.chip:compiler", cwd=folder)
    assert demo.returncode == 0, demo.stdout + demo.stderr


@pytest.mark.sweep
def test_run_compiles_with_an_own_backend(command: Command, folder: Path, tmp_path: Path) -> None:
    """The module is imported before the script, which need not know it."""
    script = tmp_path / "plain.py"
    script.write_text("import torch\ntorch.compile(lambda x: x.cos())(torch.ones(3))\n")
    done = command(
        "run", "--out", tmp_path / "out", "--backend", "parts.chip:compiler", script, cwd=folder
    )
    assert done.returncode == 1
    assert "failed: NotImplementedError" in done.stdout
    for options, found in (
        (["--backend", "parts.chip:nothing"], "has no backend 'nothing'"),
        (["--import", "parts.chop"], "'parts.chop' cannot be imported"),
    ):
        refused = command("run", "--out", tmp_path / "none", *options, script, cwd=folder)
        assert refused.returncode == 2
        assert found in refused.stderr
        assert not list(tmp_path.glob("none/*"))


@pytest.mark.sweep
def test_a_file_imports_nothing_that_it_names(
    command: Command, capture: Path, tmp_path: Path
) -> None:
    """A backend in the form MODULE:ATTR, or a place, is no request of the user's."""
    marker = tmp_path / "imported"
    (tmp_path / "trap.py").write_text(
        f"open({str(marker)!r}, 'w')\ndef run(gm, inputs): return gm.forward\n"
    )
    desc = read_capture(capture)
    for backend in ("trap:run", "trap"):
        hostile = msgspec.structs.replace(
            desc,
            backend=backend,
            backend_place="trap:run",
            operator_modules=(("chip.twice", "trap"), ("chip.thrice", "trap")),
        )
        write_capture(tmp_path / "hostile.fkf", hostile)
        done = command("replay", "hostile.fkf", cwd=tmp_path)
        assert done.returncode == 2
        assert "--backend trap:run" in done.stderr
    assert not marker.exists()


@pytest.mark.sweep
def test_a_backend_of_the_script_itself_is_refused_by_name(
    command: Command, tmp_path: Path
) -> None:
    """There is no module to import: the error says to make one."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "def mine(gm, inputs): raise ValueError('no')\n"
        "try: torch.compile(lambda x: x + 1, backend=mine)(torch.ones(2))\n"
        "except Exception: pass\n"
    )
    command("run", "script.py", cwd=tmp_path)
    (path,) = (tmp_path / "captures" / "script").iterdir()
    assert read_capture(path).backend_place == "__main__:mine"
    with pytest.raises(CaptureError, match="itself defines it: move it to a module"):
        replay_capture(path)


@pytest.mark.sweep
def test_an_entry_point_and_a_decorator_may_register_one_backend(tmp_path: Path) -> None:
    """Torch registers what the entry point loads a second time, and would end with an assertion."""
    (tmp_path / "twice_named.py").write_text(
        "from torch._dynamo import register_backend\n"
        "@register_backend\n"
        "def twice_named(gm, inputs): return gm.forward\n"
    )
    info = tmp_path / "twice_named-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: twice_named\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[torch_dynamo_backends]\ntwice_named = twice_named:twice_named\n"
    )
    program = (
        "import sys, torch; sys.path.insert(0, '.'); import torch_fakeify as tfk\n"
        "gm = torch.fx.symbolic_trace(torch.nn.ReLU())\n"
        "fn = tfk.capture(gm, [torch.ones(2)]).compile('twice_named')\n"
        "print(fn(torch.tensor([-1.0, 1.0])))\n"
    )
    done = _command("-c", program, cwd=tmp_path, executable=())
    assert done.stdout == "tensor([0., 1.])\n", done.stderr
