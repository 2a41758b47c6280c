"""Surroundings decide whether a frame fails: recorded, set again in fresh processes, named in verdicts."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from planting import plant
from processes import COMMAND, fresh

import torch_fakeify as tfk
from torch_fakeify.cli import main
from torch_fakeify.records.frame import SettingDesc, SurroundingsDesc
from torch_fakeify.render.surroundings import machine_differences, setting_differences
from torch_fakeify.serialization.capture_file import read_capture, write_capture
from torch_fakeify.tools.fuzzing import fuzz
from torch_fakeify.tools.minify.search import minify
from torch_fakeify.tools.replaying import replay_capture

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("warm_workers")

INDUCTOR = "torch._inductor.config"
FUNCTORCH = "torch._functorch.config"

BACKENDS = '''
import sys


def picky(gm, inputs):
    """Fail under settings of each module, and tell them."""
    import torch
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    if inductor.freezing or inductor.fallback_random or functorch.activation_memory_budget < 1:
        found = inductor.freezing, inductor.fallback_random, functorch.activation_memory_budget
        raise RuntimeError(f"cannot compile with {found}")
    if inductor.cpp.cxx[-1] == "no-such-compiler":
        raise RuntimeError("cannot compile with this compiler")
    return gm.forward


def optional(gm, inputs, mode=None, options=None):
    """Fail with an option of its own."""
    if options:
        raise RuntimeError(f"an option {sorted(options)}")
    return gm.forward


def dies(gm, inputs):
    """End the process without a word."""
    import os
    os._exit(7)
'''

SCRIPT = """
import torch
import torch._functorch.config, torch._inductor.config

SETTINGS

def program(x):
    return x.sin() + 1

torch.compile(program, BACKEND)(torch.ones(4, 3, requires_grad=True))
"""


@pytest.fixture(scope="module", autouse=True)
def _planted(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """Put the backends where every process finds them."""
    with pytest.MonkeyPatch.context() as patch:
        plant(tmp_path_factory.mktemp("planted") / "here", BACKENDS, patch)
        yield


def recorded(
    folder: Path, settings: str, backend: str = 'backend="picky"', **environment: str
) -> Path:
    """Run a script that compiles one frame under settings, with ``run``; return the capture."""
    script = folder / "s.py"
    script.write_text(SCRIPT.replace("SETTINGS", settings).replace("BACKEND", backend))
    fresh(*COMMAND, "run", "--out", "out", "s.py", cwd=folder, status=None, **environment)
    (path,) = (folder / "out" / "s").glob("*.fkf")
    return path


def surroundings_of(path: Path) -> SurroundingsDesc:
    """The recorded surroundings."""
    found = read_capture(path).surroundings
    assert found is not None
    return found


def settings_of(path: Path) -> dict[str, Any]:
    """The recorded settings by their dotted names."""
    return {f"{s.module}.{s.name}": s.value for s in surroundings_of(path).settings}


# --- settings that decide -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value", "backend"),
    [
        pytest.param(f"{INDUCTOR}.freezing", True, "picky", marks=pytest.mark.long),
        (f"{INDUCTOR}.fallback_random", True, "picky"),
        (f"{FUNCTORCH}.activation_memory_budget", 0.5, "picky"),
        # Torch refuses it where its partitioner reads it.
        (f"{FUNCTORCH}.activation_memory_budget", 7.5, "aot_eager_decomp_partition"),
    ],
)
@pytest.mark.sweep
def test_a_setting_that_decides_a_failure_is_set_again(
    tmp_path: Path, setting: str, value: Any, backend: str
) -> None:
    """A frame that fails under a setting fails in a fresh process, and passes without the setting."""
    path = recorded(tmp_path, f"{setting} = {value}", f'backend="{backend}"')
    assert settings_of(path) == {setting: value}
    verdict = replay_capture(path, backend=backend)
    assert (verdict.verdict, verdict.holds) == ("reproduced", True), verdict
    assert "not set here:" not in verdict.details
    desc = read_capture(path)
    assert desc.failure is not None
    assert str(value) in desc.failure.message
    write_capture(path, msgspec.structs.replace(desc, surroundings=SurroundingsDesc()))
    verdict = replay_capture(path, backend=backend)
    assert verdict.verdict == "not reproduced"
    assert "differs here:" in verdict.details


@pytest.mark.sweep
def test_settings_of_torch_compile_are_set_for_inductor(tmp_path: Path) -> None:
    """``mode`` and ``options`` arrive as settings; a real inductor fails in a fresh process by one."""
    given = 'mode=None, options={"max_autotune": True, "_raise_error_for_testing": True}'
    path = recorded(tmp_path, "", given)
    failure = read_capture(path).failure
    assert failure is not None
    assert "AssertionError" in failure.type + failure.message
    assert all(setting.option for setting in surroundings_of(path).settings)
    assert settings_of(path) == {
        f"{INDUCTOR}.max_autotune": True, f"{INDUCTOR}._raise_error_for_testing": True
    }  # fmt: skip
    assert replay_capture(path, backend="inductor").verdict == "reproduced"
    assert replay_capture(path, backend="aot_eager").verdict == "not reproduced"


@pytest.mark.sweep
def test_minify_and_its_script_set_the_settings(tmp_path: Path) -> None:
    """The smaller frame has them, and the script fails when plain Python runs it."""
    path = recorded(tmp_path, f"{FUNCTORCH}.activation_memory_budget = 0.5")
    report = minify(path, tmp_path / "small.fkf", backend="picky", timeout=60.0)
    assert report.holds, report.lines()
    assert report.script is not None
    text = report.script.read_text()
    assert "import torch._functorch.config\n" in text
    assert "torch._functorch.config.activation_memory_budget = 0.5\n" in text
    assert settings_of(tmp_path / "small.fkf") == settings_of(path)


@pytest.mark.sweep
def test_fuzz_and_capture_compile_set_the_settings(tmp_path: Path) -> None:
    """Sizes are run under the settings; in Python torch's own are back afterwards."""
    path = recorded(tmp_path, f"{INDUCTOR}.fallback_random = True")
    with pytest.raises(tfk.CaptureError, match="cannot compile with"):
        fuzz(path, backend="picky")
    seen: list[bool] = []

    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        seen.append(torch._inductor.config.fallback_random)
        return gm.forward

    capture = tfk.Capture.load(path)
    capture.compile(backend)
    with pytest.raises(ZeroDivisionError):
        capture.compile(lambda *_: 1 / 0)
    assert seen == [True]
    assert torch._inductor.config.fallback_random is False
    with capture.settings() as not_set:
        assert torch._inductor.config.fallback_random is True
    assert not_set == ()


@pytest.mark.sweep
@pytest.mark.long
def test_a_setting_by_a_variable_is_a_setting(tmp_path: Path) -> None:
    """What torch reads from the environment is recorded with its value, and set without the variable."""
    path = recorded(tmp_path, "", 'backend="picky"', TORCHINDUCTOR_FREEZING="1")
    assert settings_of(path) == {f"{INDUCTOR}.freezing": True}
    assert surroundings_of(path).environment == (("TORCHINDUCTOR_FREEZING", "1"),)
    assert "TORCHINDUCTOR_FREEZING" not in os.environ
    assert replay_capture(path, backend="picky").verdict == "reproduced"


# --- what is not set from a file ------------------------------------------------------------------


@pytest.mark.sweep
def test_a_compiler_is_set_for_a_trusted_file_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``cpp.cxx`` names a program: the verdict names it, and ``--trust`` sets it."""
    path = recorded(tmp_path, f'{INDUCTOR}.cpp.cxx = ("no-such-compiler",)')
    assert read_capture(path).failure is not None
    assert main(["replay", "--backend", "picky", str(path)]) == 1
    text = capsys.readouterr().out
    assert text.startswith("not reproduced\n")
    name = f"{INDUCTOR}.cpp.cxx: it could run or write something; --trust sets it"
    assert f"  not set here:\n    {name}\n" in text
    assert main(["replay", "--backend", "picky", "--trust", str(path)]) == 0
    assert capsys.readouterr().out.startswith("reproduced\n")
    seen: list[Any] = []

    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        seen.append(torch._inductor.config.cpp.cxx)
        return gm.forward

    with pytest.warns(tfk.SettingsWarning, match=r"cpp\.cxx: it could run or write something"):
        tfk.Capture.load(path).compile(backend)
    tfk.Capture.load(path).compile(backend, trust=True)
    assert seen == [torch._inductor.config.cpp.cxx, ("no-such-compiler",)]


@pytest.mark.sweep
@pytest.mark.long
def test_options_of_a_backend_of_ones_own_are_passed_to_it_if_trusted(tmp_path: Path) -> None:
    """Nobody knows their meaning; another backend never gets them."""
    path = recorded(tmp_path, "", 'backend="optional", options={"level": 3}')
    assert surroundings_of(path).options == (("level", 3),)
    verdict = replay_capture(path, backend="optional")
    assert verdict.verdict == "not reproduced"
    assert any("options.level: a backend may run or write" in line for line in verdict.details)
    assert replay_capture(path, backend="optional", trust=True).verdict == "reproduced"
    verdict = replay_capture(path, backend="eager", trust=True)
    assert any("options.level: it is of another backend" in line for line in verdict.details)


@pytest.mark.sweep
@pytest.mark.long
def test_a_setting_that_this_torch_lacks_is_named(tmp_path: Path) -> None:
    """Also where the file is trusted, and where the process dies."""
    path = recorded(tmp_path, f"{INDUCTOR}.fallback_random = True")
    more = SettingDesc(module="torch._inductor.config", name="of_torch_9", value=1)
    found = msgspec.structs.replace(
        surroundings_of(path), settings=(more,), python="9.9.9", versions=(("torch", "9.9"),)
    )
    write_capture(path, msgspec.structs.replace(read_capture(path), surroundings=found))
    for backend in ("eager", "dies"):
        details = replay_capture(path, backend=backend, trust=True).details
        lines = [line.strip() for line in details]
        assert f"{INDUCTOR}.of_torch_9: this torch has no such setting" in lines
        assert f"Python: 9.9.9 recorded, {sys.version.split()[0]} here" in lines
        assert f"torch: 9.9 recorded, {torch.__version__} here" in lines


@pytest.mark.sweep
@pytest.mark.long
def test_not_reproduced_says_that_nothing_differs(tmp_path: Path) -> None:
    """The reader knows that the cause is not on record."""
    path = recorded(tmp_path, f"{INDUCTOR}.freezing = True")
    assert (
        replay_capture(path, backend="eager").details[-1] == "  backend: picky recorded, eager here"
    )
    write_capture(path, msgspec.structs.replace(read_capture(path), backend="eager"))
    assert replay_capture(path).details[-1] == "nothing that is on record differs here"


# --- two frames -----------------------------------------------------------------------------------


@pytest.mark.sweep
def test_one_graph_under_two_configs_is_two_frames(tmp_path: Path) -> None:
    """`diff` and the recompile report of `run` name the settings, and a corpus compiles both."""
    (tmp_path / "s.py").write_text(
        "import torch\nimport torch._functorch.config as config\n"
        "def program(x):\n    return x.sin() + 1\n"
        "for budget in (1.0, 0.5):\n"
        "    config.activation_memory_budget = budget\n"
        '    torch.compile(program, backend="eager")(torch.ones(3))\n'
        "    torch._dynamo.reset()\n"
    )
    done = fresh(*COMMAND, "run", "--out", "out", "s.py", cwd=tmp_path)
    named = f"{FUNCTORCH}.activation_memory_budget: the default against 0.5"
    assert named in done.stdout
    assert "the same frame" not in done.stdout
    files = sorted(map(str, (tmp_path / "out" / "s").iterdir()))
    done = fresh(*COMMAND, "diff", *files, cwd=tmp_path, status=1)
    assert done.stdout == f"compiler settings\n  {named}\n"
    corpus = ["replay", "out", "--backend", "eager", "--jsonl", "rows.jsonl"]
    fresh(*COMMAND, *corpus, cwd=tmp_path)
    rows = list(map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines()))
    assert [row.get("same_as") for row in rows] == [None, None]


def test_another_machine_makes_no_other_frame() -> None:
    """Python and devices are named, without being differences of the frame."""
    a, b = SurroundingsDesc(python="3.11.1"), SurroundingsDesc(python="3.12.1")
    assert list(setting_differences(a, b)) == []
    assert list(machine_differences(a, b)) == [("Python", "3.11.1", "3.12.1")]
