"""``TORCH_FAKEIFY_RECORD``: a process and its children record what they compile, unchanged."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from processes import fresh

from torch_fakeify.corpus.listing import list_captures
from torch_fakeify.frames import process_recorder
from torch_fakeify.frames.capture_folders import CaptureFolder
from torch_fakeify.frames.dynamo_recorder import start_recording, stop_recording
from torch_fakeify.frames.process_recorder import ProcessRecorder
from torch_fakeify.serialization.capture_file import read_capture

if TYPE_CHECKING:
    from pathlib import Path

VARIABLE = "TORCH_FAKEIFY_RECORD"


def functions(folder: Path) -> list[list[str]]:
    """The names of the frames that each process recorded, sorted."""
    return sorted(
        [str(read_capture(path).frame) for path in sorted(process.iterdir())]
        for process in folder.iterdir()
    )


# --- whole programs -------------------------------------------------------------------------------

POOL = """
import multiprocessing, sys, torch
from concurrent.futures import ProcessPoolExecutor

def mine(gm, inputs):
    return gm.forward

def parent(x):
    return x + 1

def child(x):
    return x * 2

def work(n):
    return torch.compile(child, backend="eager")(torch.full((2,), n)).tolist()

if __name__ == "__main__":
    torch.compile(parent, backend=mine)(torch.ones(2))
    with ProcessPoolExecutor(1, multiprocessing.get_context(sys.argv[1])) as pool:
        print(list(pool.map(work, [3])))
"""


@pytest.mark.sweep
@pytest.mark.parametrize(
    "method",
    [
        "spawn",
        pytest.param("fork", marks=pytest.mark.long),
        pytest.param("forkserver", marks=pytest.mark.long),
    ],
)
def test_a_pool_of_processes_is_recorded(tmp_path: Path, method: str) -> None:
    """Parent and child have folders of their own, with their own backends; the program is unchanged."""
    (tmp_path / "pool.py").write_text(POOL)
    done = fresh("-W", "error", "pool.py", method, cwd=tmp_path, **{VARIABLE: "out/deep"})
    assert (done.stdout, done.stderr) == ("[[6, 6]]\n", "")
    out = tmp_path / "out" / "deep"
    assert functions(out) == [["child"], ["parent"]]
    assert all(process.name.isdecimal() for process in out.iterdir())
    listing = list_captures(str(out))
    assert not listing.errors
    assert sorted(row[1] for row in listing.rows) == ["child", "parent"]
    backends = {read_capture(path).backend for path in out.rglob("*.fkf")}
    assert backends == {"mine", "eager"}


PROGRAMS = {
    "torchrun": (  # the launcher has no folder
        "torch",
        "ranks.py",
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "y = torch.compile(lambda x: x.sin() * 2, backend='eager')(torch.ones(2))\n"
        "dist.all_reduce(y)\n"
        "dist.barrier()\n"
        "import os\n"
        "os._exit(0)\n",  # gloo's threads may abort a process that ends by itself
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "ranks.py"],
        [["<lambda>"], ["<lambda>"]],
    ),
    "pytest -n 2": (
        "xdist",
        "test_model.py",
        "import pytest, time, torch\n"
        "@pytest.mark.parametrize('n', range(2))\n"
        "def test_it(n):\n"
        "    torch.compile(lambda x: x + n, backend='eager')(torch.ones(2))\n"
        "    time.sleep(3)\n",  # so that the other worker takes the other test
        ["-m", "pytest", "-q", "-n", "2", "--dist", "each", "-p", "no:cacheprovider"],
        [["<lambda>"] * 2] * 2,
    ),
    "dask": (  # scheduler and client have none
        "distributed",
        "cluster.py",
        "from distributed import Client, LocalCluster\n"
        "def work(n):\n"
        "    import torch\n"
        "    return torch.compile(lambda x: x + n, backend='eager')(torch.ones(2)).tolist()\n"
        "if __name__ == '__main__':\n"
        "    with LocalCluster(n_workers=1, processes=True, dashboard_address=None) as cluster:\n"
        "        with Client(cluster) as client:\n"
        "            assert client.submit(work, 2).result() == [3.0, 3.0]\n",
        ["cluster.py"],
        [["<lambda>"]],
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_workers_of_a_program_are_recorded(tmp_path: Path, name: str) -> None:
    """Each process that compiles has a folder: ranks that communicate, workers of tests and of a cluster."""
    needed, file, text, run, expected = PROGRAMS[name]
    pytest.importorskip(needed)
    (tmp_path / file).write_text(text)
    fresh(*run, cwd=tmp_path, **{VARIABLE: "out"})
    assert functions(tmp_path / "out") == expected


def test_a_program_that_compiles_nothing_leaves_nothing(tmp_path: Path) -> None:
    """It imports nothing of this package for it, and nothing is printed."""
    code = (
        "import sys, torch; torch.ones(2).sin()\n"
        "print([name for name in sys.modules if name.startswith('torch_fakeify')])"
    )
    done = fresh("-c", code, cwd=tmp_path, **{VARIABLE: "out"})
    assert (done.stdout, done.stderr) == ("['torch_fakeify_autoload']\n", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.sweep
def test_a_directory_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    """The program continues, also where it treats warnings as errors."""
    (tmp_path / "file").write_text("")
    code = (
        "import torch\n"
        "for n in range(2):\n"
        "    print(torch.compile(lambda x: x + n, backend='eager')(torch.ones(1)).item())\n"
    )
    done = fresh("-W", "error", "-c", code, cwd=tmp_path, **{VARIABLE: "file/x"})
    assert done.stdout == "1.0\n2.0\n"
    assert re.fullmatch(
        r"torch-fakeify: warning: nothing is recorded in process \d+: \S+/file/x: the directory cannot be "
        r"written; found Not a directory\. Choose another directory\n",
        done.stderr,
    )


@pytest.mark.sweep
def test_commands_are_not_recorded(tmp_path: Path) -> None:
    """``replay`` compiles what is recorded already, and ``run`` has its own directory."""
    (tmp_path / "s.py").write_text(
        "import torch\ntorch.compile(lambda x: x + 1, backend='eager')(torch.ones(1))\n"
    )
    fresh("-m", "torch_fakeify", "run", "s.py", cwd=tmp_path, **{VARIABLE: "out"})
    fresh("-m", "torch_fakeify", "replay", "captures", cwd=tmp_path, **{VARIABLE: "out"})
    assert not (tmp_path / "out").exists()
    assert len(list((tmp_path / "captures" / "s").iterdir())) == 1


# --- the settings ---------------------------------------------------------------------------------


def compiled_by(recorder: ProcessRecorder, *numbers: int, backend: Any = "eager") -> None:
    """Compile a frame for each number while the recorder is active."""
    start_recording(recorder)
    try:
        for number in numbers:
            torch._dynamo.reset()
            torch.compile(lambda x, n=number: x + n, backend=backend)(torch.ones(2))
    finally:
        stop_recording(recorder)


def test_a_filter_selects_by_file_and_function(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is searched in ``FILE:FUNCTION``; no folder is made for other frames."""
    here = re.compile(r"test_process_recording\.py:<lambda>$")
    compiled_by(ProcessRecorder(CaptureFolder(tmp_path / "a"), pattern=here), 1)
    compiled_by(ProcessRecorder(CaptureFolder(tmp_path / "b"), pattern=re.compile("forward")), 1)
    assert functions(tmp_path / "a") == [["<lambda>"]]
    assert not (tmp_path / "b").exists()
    assert capsys.readouterr().err == ""


def test_a_limit_ends_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Later frames are compiled without a capture, with one warning."""
    compiled_by(ProcessRecorder(CaptureFolder(tmp_path), limit=2), 1, 2, 3, 4)
    assert functions(tmp_path) == [["<lambda>"] * 2]
    assert capsys.readouterr().err == (
        f"torch-fakeify: warning: process {os.getpid()} has recorded 2 frames, as many as "
        "TORCH_FAKEIFY_RECORD_LIMIT says; later frames are not recorded\n"
    )


def test_a_frame_that_is_left_out_leaves_no_folder(tmp_path: Path) -> None:
    """A backend that returns the frame to Python leaves neither a file nor a folder."""

    def skip(gm: Any, inputs: Any) -> Any:
        raise torch._dynamo.exc.SkipFrame

    compiled_by(ProcessRecorder(CaptureFolder(tmp_path / "new")), 1, backend=skip)
    assert not (tmp_path / "new").exists()


def test_the_folder_of_another_process_of_that_number_is_not_used(tmp_path: Path) -> None:
    """A machine may reuse a number, and containers have the same ones."""
    (tmp_path / str(os.getpid())).mkdir()
    compiled_by(ProcessRecorder(CaptureFolder(tmp_path)), 1)
    assert list((tmp_path / str(os.getpid())).iterdir()) == []
    assert len(list((tmp_path / f"{os.getpid()}-2").iterdir())) == 1


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("FILTER", "(", "expected a regular expression; found '(': missing ), unterminated"),
        ("LIMIT", "0", "expected a positive number; found '0'"),
        ("LIMIT", "many", "expected a positive number; found 'many'"),
    ],
)
def test_a_setting_that_cannot_be_used_is_a_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    value: str,
    text: str,
) -> None:
    """Nothing is recorded, and the program continues."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "out"))
    monkeypatch.setenv(f"{VARIABLE}_{name}", value)
    process_recorder.record_from_environment()
    err = capsys.readouterr().err
    assert err.startswith(
        f"torch-fakeify: warning: nothing is recorded in process {os.getpid()}: {VARIABLE}_{name} cannot be used"
    )
    assert text in err
