"""A corpus on a Dask cluster: a real scheduler, two worker processes, one of them killed."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from places import GOLDEN
from planting import plant
from processes import environment, is_there, until

from torch_fakeify import cli
from torch_fakeify.corpus import dask_cluster
from torch_fakeify.corpus.results import read_rows

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

FILES = ("aliases", "boxed", "callables", "contexts", "dtypes", "program_failed", "tensor_strided")

BACKEND = '''
import os
import time
from pathlib import Path


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def planted_waits(gm, inputs):
    """The first one to begin says which worker it is of, and then does not end."""
    folder = Path(os.environ["PLANTED_FOLDER"])
    with (folder / "log").open("a") as log:
        log.write("begun\\n")
    try:
        with (folder / "new").open("x") as file:
            file.write(f"{os.getpid()} {parent_of(os.getppid())}")
    except FileExistsError:
        return gm
    (folder / "new").rename(folder / "waits")
    (folder / "new").touch()
    while True:
        time.sleep(1)
'''


def start(module: str, *args: str) -> subprocess.Popen[bytes]:
    """Start a program in a process of its own."""
    command = [sys.executable, "-m", module, *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


Cluster = tuple[str, dict[int, "subprocess.Popen[bytes]"]]


def ended(*processes: subprocess.Popen[bytes]) -> None:
    """End programs, and wait until they have ended."""
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


LOCAL = ("--host", "127.0.0.1", "--no-dashboard")


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[str]:
    """The address of a scheduler without workers; workers started from here find the backend."""
    folder = tmp_path / "planted"
    folder.mkdir()
    plant(folder, BACKEND, monkeypatch)
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    monkeypatch.setenv("PLANTED_FOLDER", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    where = tmp_path / "scheduler.json"
    file = ("--scheduler-file", str(where))
    process = start("distributed.cli.dask_scheduler", *LOCAL, "--port", "0", *file)
    try:
        until(lambda: where.exists() and where.stat().st_size > 0, process)
        yield json.loads(where.read_text())["address"]
    finally:
        ended(process)


@pytest.fixture
def cluster(scheduler: str) -> Generator[Cluster]:
    """The address of a scheduler and the ids of its two worker processes."""
    one = ("--no-nanny", "--nthreads", "1", "--memory-limit", "0")
    worker = ("distributed.cli.dask_worker", scheduler, *LOCAL, *one)
    workers = [start(*worker) for _ in range(2)]
    try:
        yield scheduler, {worker.pid: worker for worker in workers}
    finally:
        ended(*workers)


@pytest.mark.sweep
def test_a_killed_worker_loses_no_capture(cluster: Cluster, tmp_path: Path) -> None:
    """The other worker compiles its capture, and the rows are complete, in order and right."""
    address, workers = cluster
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name in FILES:
        shutil.copy(GOLDEN / f"{name}.fkf", corpus)
    shutil.copy(GOLDEN / "tensor_detached.fkf", corpus)
    (corpus / "bad.fkf").write_text("no capture")
    outputs = ("--jsonl", "r.jsonl", "--junit", "r.xml")
    command = ("replay", "corpus", "--backend", "planted_waits", "--dask", address, *outputs)
    run = start("torch_fakeify", *command)
    try:
        until((tmp_path / "waits").exists, run)
        child, worker = map(int, (tmp_path / "waits").read_text().split())
        workers[worker].send_signal(signal.SIGKILL)
        out, _ = run.communicate()
    finally:
        ended(run)
    assert run.returncode == 2, out.decode()  # the corpus has a bad file
    rows = {row.file.removesuffix(".fkf"): row for row in read_rows(tmp_path / "r.jsonl")}
    assert list(rows) == sorted([*FILES, "bad", "tensor_detached"])
    assert len(read_rows(tmp_path / "r.jsonl")) == len(rows)
    words = {name: row.verdict for name, row in rows.items()}
    assert words.pop("bad") == "bad file"
    assert words.pop("program_failed") == "not reproduced"
    assert set(words.values()) == {"compiles"}
    assert rows["tensor_strided"].same_as == "tensor_detached.fkf"
    begun = (tmp_path / "log").read_text().count("begun")
    assert begun >= len(FILES) + 1, "the one that was cut off has begun twice"
    until(lambda: not is_there(child))


@pytest.mark.parametrize(
    ("address", "error"),
    [
        ("tcp://127.0.0.1:1", "tcp://127.0.0.1:1: there is no Dask scheduler"),
        ("no address", "no address: there is no Dask scheduler"),
    ],
)
def test_an_address_without_a_scheduler_is_an_error(
    address: str,
    error: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is compiled, and the message contains the address."""
    monkeypatch.setattr(dask_cluster, "_CONNECTING", 0.2)
    assert cli.main(["replay", str(GOLDEN), "--dask", address]) == 2
    assert error in capsys.readouterr().err


def test_a_cluster_without_workers_is_an_error(
    scheduler: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message contains the command that starts one."""
    monkeypatch.setattr(dask_cluster, "_JOINING", 0.2)
    assert cli.main(["replay", str(GOLDEN), "--dask", scheduler]) == 2
    assert f"Start some: dask worker {scheduler}" in capsys.readouterr().err


def test_a_missing_dask_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Dask the option is refused, and the message names the extra to install."""
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert cli.main(["replay", str(GOLDEN), "--dask", "tcp://h:1"]) == 2
    assert "pip install 'torch_fakeify[dask]'" in capsys.readouterr().err
