"""The pytest plugin: a capture is a test, and pytest's options select, distribute and report it."""

from __future__ import annotations

import shutil
from xml.etree import ElementTree as ET

import pytest
from places import GOLDEN
from planting import plant
from processes import environment

pytest_plugins = ["pytester"]

NAMES = ("aliases", "program_failed", "tensor_detached", "tensor_strided")

BACKENDS = """
def planted_raises(gm, inputs):
    raise ValueError("no such kernel\\nof two lines")
"""

Run = "Callable[..., pytest.RunResult]"


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run pytest in a process of its own, in a folder with a corpus and a test beside it."""
    folder = pytester.mkdir("planted")
    plant(folder, BACKENDS, monkeypatch)
    info = folder / "plugin-1.dist-info"  # the entry point of the installed package
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    points = "[pytest11]\nfakeify = torch_fakeify.pytest_plugin\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    corpus = pytester.mkdir("corpus")
    (corpus / "build").mkdir()  # a name that pytest does not descend into
    for name in NAMES:
        shutil.copy(GOLDEN / f"{name}.fkf", corpus)
    shutil.copy(GOLDEN / "program_custom_op.fkf", corpus / "build")
    (corpus / "zero.fkf").write_text("no capture")
    pytester.makepyfile(test_other="def test_other(): pass")
    return pytester.runpytest_subprocess


def words(result: pytest.RunResult) -> dict[str, str]:
    """Return the word that ``-v`` prints for each test."""
    known = ("PASSED", "FAILED", "SKIPPED", "ERROR")
    lines = [line.split() for line in result.outlines if "::" in line]
    return {line[0]: line[1] for line in lines if len(line) > 1 and line[1] in known}


def test_every_capture_is_a_test(run: Run, pytester: pytest.Pytester) -> None:
    """Each capture has its verdict, without a traceback, also in JUnit XML."""
    options = ("-v", "-rs", "--fakeify-corpus", "corpus", "--junitxml=r.xml")
    result = run(*options, "--fakeify-backend", "planted_raises")
    assert words(result) == {
        "corpus/aliases.fkf::planted_raises": "FAILED",
        "corpus/build/program_custom_op.fkf::planted_raises": "FAILED",
        "corpus/program_failed.fkf::planted_raises": "PASSED",  # as it was recorded
        "corpus/tensor_detached.fkf::planted_raises": "FAILED",
        "corpus/tensor_strided.fkf::planted_raises": "SKIPPED",
        "corpus/zero.fkf::planted_raises": "ERROR",
    }
    text = result.stdout.str()
    start, end = (
        text.index(f"_ corpus/{name}.fkf with") for name in ("aliases", "build/program_custom_op")
    )
    assert [line for line in text[start:end].splitlines()[1:] if not line.startswith("__")] == [
        "does not compile",
        "    ValueError: no such kernel",
        "      of two lines",
        "  differs here:",
        "    the file has no settings, environment and devices on record",
    ]
    result.stdout.fnmatch_lines(
        [
            "bad file",
            "  */corpus/zero.fkf: not a capture file; expected a ZIP file; found *",
            "cannot be rebuilt",
            "*torch.ops.programs.scale is not registered in this process*",
            "*the same frame as corpus/tensor_detached.fkf::planted_raises",
        ]
    )
    assert "pytest_plugin.py" not in text
    (suite,) = ET.parse(pytester.path / "r.xml").getroot()
    counts = ("tests", "failures", "errors", "skipped")
    assert [suite.get(name) for name in counts] == ["6", "3", "1", "1"]


INI = "[pytest]\naddopts = --fakeify-corpus corpus --fakeify-backend eager"


@pytest.mark.sweep
def test_processes_share_the_captures(run: Run, pytester: pytest.Pytester) -> None:
    """Under pytest-xdist every process knows which capture is the first of its frame."""
    pytester.makeini(INI)
    result = run("-v", "-n", "2", "-rs")
    result.assert_outcomes(passed=3, failed=2, errors=1, skipped=1)
    assert "the same frame as corpus/tensor_detached.fkf::eager" in result.stdout.str()


@pytest.mark.sweep
def test_pytest_selects_captures(run: Run, pytester: pytest.Pytester) -> None:
    """A copy is compiled where its original is not selected, by name, last failure or path."""
    pytester.makeini(INI)
    result = run("-v", "-k", "strided or other or failed or zero")
    assert words(result) == {
        "corpus/program_failed.fkf::eager": "FAILED",
        "corpus/tensor_strided.fkf::eager": "PASSED",
        "corpus/zero.fkf::eager": "ERROR",
        "test_other.py::test_other": "PASSED",
    }
    result = run("--lf", "--collect-only", "-q")
    assert [line for line in result.outlines if "::" in line] == [
        "corpus/program_failed.fkf::eager",
        "corpus/zero.fkf::eager",
    ]
    result = run("corpus/program_failed.fkf::eager", "--co", "-q")
    assert [line for line in result.outlines if "::" in line] == [
        "corpus/program_failed.fkf::eager"
    ]


def test_a_missing_directory_is_an_error(run: Run) -> None:
    """A directory that does not exist is an error and not an empty success."""
    result = run("--fakeify-corpus", "nowhere")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --fakeify-corpus: no such directory: */nowhere"])


def test_without_its_option_the_plugin_collects_nothing(
    run: Run, pytester: pytest.Pytester
) -> None:
    """No capture is a test, and the plugin imports neither torch nor the rest of the package."""
    pytester.makeconftest(
        """
        import sys

        def pytest_unconfigure():
            ours = [name for name in sys.modules if name.startswith("torch")]
            print("imported", sorted(ours))
        """
    )
    result = run(".", "corpus")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["imported ['torch_fakeify', 'torch_fakeify._version', 'torch_fakeify.pytest_plugin']"]
    )
