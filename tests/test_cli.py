"""The command line: what each command prints, with which exit status, and what it refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from cli_runs import Command, error_of
from processes import COMMAND, environment, fresh

import torch_fakeify as tfk
from torch_fakeify import cli
from torch_fakeify.records.tensor import FunctionValue, StackDesc
from torch_fakeify.render.show import show_lines, table_lines
from torch_fakeify.serialization.capture_file import read_capture, write_capture
from torch_fakeify.tools.replaying import replay_capture
from torch_fakeify.tools.worker import tasks
from torch_fakeify.tools.worker.client import ask
from torch_fakeify.tools.worker.replies import Refused

if TYPE_CHECKING:
    from torch_fakeify.records.frame import CaptureDesc

pytestmark = pytest.mark.usefixtures("warm_workers")

# --- show ---------------------------------------------------------------------------------------


def test_show_prints_the_parts_of_a_frame(command: Command, dynamic: Path, tmp_path: Path) -> None:
    """With ``--all --torch-names``: inputs, symbols with sources and ranges, guards, code."""
    done = command("show", "--all", "--torch-names", dynamic, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    text = done.stdout
    assert re.search(r"^inputs \(\d\)\n", text, re.MULTILINE)
    assert re.search(r"l_x_ +float32\[s\d+, s\d+\] +L\['x'\]", text)
    assert re.search(r"s\d+ +hint 4 +\[4, int_oo\] +L\['x'\]\.size\(\)\[0\]", text)
    assert re.search(r"s\d+ > 3 +script\.py:\d+ in forward: if x\.shape\[0\] > 3:", text)
    assert re.search(r"  def forward\(.*\):\n", text)
    assert "    sin = l_x_.sin()" in text
    assert "# script.py:" in text


def test_what_needs_no_torch_does_not_import_it(dynamic: Path, tmp_path: Path) -> None:
    """``show`` of files and directories, ``--help``, and all about a corpus but the compilations."""
    code = (
        "import sys\n"
        "from torch_fakeify import pytest_plugin\n"
        "from torch_fakeify.cli import main\n"
        "from torch_fakeify.corpus import command\n"
        "from torch_fakeify.corpus.jobs import Job\n"
        "from torch_fakeify.corpus.runner import read_keyed\n"
        "from torch_fakeify.tools.capture_files import find_captures\n"
        f"for args in ([], ['--json'], ['--all']): assert main(['show', *args, {str(dynamic)!r}]) == 0\n"
        f"assert main(['show', {str(dynamic.parent)!r}]) == 0\n"
        f"for file in find_captures([{str(dynamic.parent)!r}]): read_keyed(file.path, Job('compile', None))\n"
        "try: main(['run', '--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "print(sorted({'torch', 'sympy', 'numpy', 'distributed', 'rich'} & {*sys.modules}), file=sys.stderr)\n"
    )
    assert fresh("-c", code).stderr == "[]\n"


def test_show_json_is_the_record(command: Command, dynamic: Path, tmp_path: Path) -> None:
    """``--json`` prints a record that ``loads`` reads as an equal one."""
    done = command("show", "--json", dynamic, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert tfk.loads(done.stdout.strip().encode()) == read_capture(dynamic)


def test_show_prints_a_failure_with_its_stack(
    command: Command, captures: list[Path], tmp_path: Path
) -> None:
    """The page of a failed frame has the exception's message and stack."""
    text = command("show", "--all", captures[-1], cwd=tmp_path).stdout
    assert "result    failed: builtins.ValueError\n" in text
    assert "  builtins.ValueError\n    cannot compile 1 inputs\n  stack\n" in text


EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\u2028\r\nguards (0)"


def poisoned(value: Any) -> Any:
    """Return a record whose free texts all end in control characters."""
    if isinstance(value, StackDesc):
        frames = tuple(
            msgspec.structs.replace(f, file=f.file + EVIL, function=EVIL, code=f.code + EVIL)
            for f in value.frames
        )
        return msgspec.structs.replace(value, frames=frames)
    if isinstance(value, tuple):
        return tuple(map(poisoned, value))
    if not isinstance(value, msgspec.Struct):
        return value
    changes = {name: poisoned(getattr(value, name)) for name in value.__struct_fields__}
    for name in ("name", "message", "frame", "backend", "msg", "user_text", "function"):
        if isinstance(changes.get(name), str):
            changes[name] += EVIL
    return (
        type(value)(*changes.values())
        if value.__struct_config__.array_like
        else type(value)(**changes)
    )


@pytest.mark.parametrize("which", [3, -1])
def test_show_cannot_send_control_sequences(captures: list[Path], which: int) -> None:
    """Each line of the page is printable and none is forged, for any texts in a file."""
    honest = read_capture(captures[which])
    lines = show_lines(poisoned(honest))
    assert {unicodedata.category(char) for line in lines for char in line}.isdisjoint(
        {"Cc", "Cf", "Cs", "Zl", "Zp"}
    )
    assert not any(line == "guards (0)" for line in lines)
    assert any(r"\x1b]0;owned" in line for line in lines)


def test_json_cannot_send_control_sequences(
    command: Command, captures: list[Path], tmp_path: Path
) -> None:
    """``--json`` is printable, too, and is read as the same record."""
    desc = msgspec.structs.replace(read_capture(captures[3]), frame=EVIL + "\U000e0001")
    write_capture(tmp_path / "evil.fkf", desc)
    done = command("show", "--json", tmp_path / "evil.fkf", cwd=tmp_path)
    assert done.stdout.strip().isprintable()
    assert tfk.loads(done.stdout.strip().encode()) == desc


def test_show_into_a_closed_pipe_ends_silently(dynamic: Path, tmp_path: Path) -> None:
    """``show FILE | true``, whose reader ends at once, prints no error."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, *COMMAND, "show", dynamic], env=environment(),
        stdout=writer, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_show_escapes_what_the_terminal_cannot_encode(dynamic: Path, tmp_path: Path) -> None:
    """A character that is not in the terminal's encoding is escaped."""
    write_capture(tmp_path / "f.fkf", msgspec.structs.replace(read_capture(dynamic), frame="pré"))
    done = fresh(*COMMAND, "show", "f.fkf", cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert done.stderr == ""
    assert done.stdout.split("\n")[0].split() == ["frame", "pr\\xe9"]


# --- replay -------------------------------------------------------------------------------------


def with_bad_view(desc: CaptureDesc) -> CaptureDesc:
    """Return the frame with an operation that no backend can compile: a view of a wrong size."""
    nodes = tuple(
        msgspec.structs.replace(n, target="view", args=(n.args[0], 12345))
        if n.target == "sin"
        else n
        for n in desc.graph.nodes
    )
    return msgspec.structs.replace(desc, graph=msgspec.structs.replace(desc.graph, nodes=nodes))


@pytest.fixture(scope="module")
def failing(dynamic: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture that fails under ``aot_eager`` and has that failure as its recorded one."""
    capture = tfk.Capture(with_bad_view(read_capture(dynamic)))
    path = tmp_path_factory.mktemp("failing") / "failing.fkf"
    try:
        capture.compile("aot_eager")
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what gets recorded
        capture.with_failure(error, backend="aot_eager").save(path)
    return path


@pytest.mark.usefixtures("cold_worker")
def test_replay_of_a_good_frame_succeeds(command: Command, dynamic: Path, tmp_path: Path) -> None:
    """A frame without a recorded failure that compiles has status 0."""
    done = command("replay", dynamic, "--backend", "aot_eager", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(
        rf"compiles\n  with aot_eager, torch {re.escape(torch.__version__.partition('+')[0])}, cpu\n  compiled in \d+ ms\n",
        done.stdout,
    )


def test_replay_reproduces_a_failure(command: Command, failing: Path, tmp_path: Path) -> None:
    """The same failure in a fresh interpreter is reproduced, with status 0."""
    failure = read_capture(failing).failure
    assert failure is not None
    done = command("replay", failing, "--backend", "aot_eager", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "reproduced"
    assert lines[1].startswith("  with aot_eager, torch ")
    assert lines[2].startswith(f"    {failure.type.removeprefix('builtins.')}: ")


@pytest.mark.sweep
def test_replay_reports_a_failure_that_is_not_reproduced(
    command: Command, captures: list[Path], tmp_path: Path
) -> None:
    """A frame that failed and now compiles has status 1."""
    done = command("replay", captures[-1], "--backend", "eager", cwd=tmp_path)
    assert done.returncode == 1
    assert re.match(r"not reproduced\n  with eager, torch .+\n  compiled in ", done.stdout)
    assert "  recorded:\n    ValueError: cannot compile 1 inputs\n" in done.stdout
    assert re.search(
        r"  differs here:\n    backend: <.*Failing object> recorded, eager here\n", done.stdout
    )


@pytest.mark.usefixtures("cold_worker")
def test_replay_kills_a_compilation_that_hangs(
    command: Command, dynamic: Path, tmp_path: Path
) -> None:
    """A compilation that exceeds the timeout is killed and reported as hanging."""
    done = command("replay", dynamic, "--timeout", "0.01", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.endswith(f"\nnext\n  torch-fakeify minify --timeout 0.01 {dynamic}\n")
    assert done.stdout.splitlines()[:3] == ["hangs", "  with eager, cpu", "  killed after 0.01 s"]


@pytest.mark.usefixtures("cold_worker")
def test_replay_reports_a_crash(
    dynamic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict names the signal and has the last output of the child."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif '-m' in sys.orig_argv: print('last words', flush=True); os.abort()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    verdict = replay_capture(dynamic, backend="eager")
    assert (verdict.verdict, verdict.holds) == ("crashes", False)
    assert verdict.details[1] == "the process was ended by SIGABRT"
    assert "last words" in verdict.details


def test_a_child_does_not_import_from_the_working_directory(tmp_path: Path) -> None:
    """A file in the working directory does not replace a module in the child."""
    (tmp_path / "json.py").write_text("raise SystemExit(66)")
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        answer = ask({"task": "compile", "file": "/nothing", "backend": "eager", "device": None},
                     timeout=100)  # fmt: skip
    finally:
        os.chdir(before)
    assert isinstance(answer.outcome, Refused)


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ("", "the following arguments are required: COMMAND"),
        ("nonesuch", "invalid choice: 'nonesuch'"),
        ("show", "the following arguments are required: FILE|DIR"),
        ("replay", "the following arguments are required: FILE|DIR"),
        ("run", "the following arguments are required: SCRIPT"),
        ("replay f --timeout 0", "must be a positive number of seconds; found '0'"),
        ("minify f --timeout soon", "must be a positive number of seconds; found 'soon'"),
        ("minify f --timeout nan", "must be a positive number of seconds; found 'nan'"),
        ("fuzz f --runs x", "argument --runs: must be at least 1; found 'x'"),
        ("fuzz f --runs 0", "argument --runs: must be at least 1; found '0'"),
        ("fuzz f --runs -1", "argument --runs: must be at least 1; found '-1'"),
        ("replay f --jobs 2.5", "argument --jobs: must be at least 1; found '2.5'"),
        ("replay f --jobs 0", "must be at least 1; found '0'"),
        ("replay f --memory 1G", "must be a positive number of MiB; found '1G'"),
        ("replay f --tolerance 0.5", "must be a ratio of at least 1; found '0.5'"),
        ("replay f --tolerance 2", "--tolerance compares several --python"),
        ("replay f --resume", "--resume needs --jsonl"),
        ("replay f --dask tcp://h:1 --jobs 2", "--jobs is of this machine"),
        ("bisect --python a f", "--python is needed at least twice"),
        ("demo --backend inductor", "are for --check"),
        ("replay f --backend parts/chip.py:compiler", "must be MODULE:ATTR, in dotted names"),
        ("replay f --import chip.py", "must be a module, in dotted names"),
    ],
)
def test_bad_usage_has_status_2(args: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error has the option, what it takes and what was given, before anything is compiled."""
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main(args.split())
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: torch-fakeify")
    assert error in " ".join(err.split())


def retargeted(path: Path, to: Path, target: FunctionValue) -> Path:
    """Return the capture with another function in place of its first called one."""
    desc = read_capture(path)
    called = next(n for n in desc.graph.nodes if n.op in {"call_function", "call_method"})
    nodes = tuple(
        msgspec.structs.replace(n, op="call_function", target=target) if n is called else n
        for n in desc.graph.nodes
    )
    write_capture(
        to, msgspec.structs.replace(desc, graph=msgspec.structs.replace(desc.graph, nodes=nodes))
    )
    return to


@pytest.mark.parametrize(
    ("kind", "name", "fragment"),
    [
        ("op", "nonesuch.op.default", "nonesuch"),
        ("op", "aten.nonesuch.default", "torch.ops.aten.nonesuch is not registered"),
        ("hop", "nonesuch", "nonesuch"),
        ("function", "os.system", "os.system"),
        ("function", "torch.load", "torch.load"),
        ("nonesuch", "torch.sin", "found 'nonesuch'"),
    ],
)
def test_unknown_and_forbidden_functions_are_shown_and_not_replayed(
    command: Command, dynamic: Path, tmp_path: Path, kind: str, name: str, fragment: str
) -> None:
    """What the fresh interpreter refuses is an error of the command, with its place, not a verdict."""
    path = retargeted(dynamic, tmp_path / "f.fkf", FunctionValue(kind=kind, name=name))
    shown = command("show", "--code", path, cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert name in shown.stdout
    done = command("replay", path, "--backend", "eager", cwd=tmp_path)
    assert done.stdout == ""
    error = error_of(done)
    assert error.startswith("$.nodes[3].target: ")
    assert fragment in error


def test_replay_refuses_an_unknown_backend(command: Command, dynamic: Path, tmp_path: Path) -> None:
    """A backend that is not registered is bad usage."""
    done = command("replay", dynamic, "--backend", "nonesuch", cwd=tmp_path)
    assert error_of(done).startswith("there is no Dynamo backend 'nonesuch'")


# --- tables and the demo ------------------------------------------------------------------------


def test_table_aligns_its_columns() -> None:
    """Numbers are aligned to the right, and the last column is not padded."""
    rows = [("name", "n", "text"), ("a", "1,000", "x" * 70), ("bcdef", "2", "")]
    assert table_lines(rows) == [
        "name       n  text",
        "a      1,000  " + "x" * 70,
        "bcdef      2",
    ]


@pytest.mark.sweep
def test_demo_rebuilds_the_frame_in_another_process(command: Command, tmp_path: Path) -> None:
    """The demo ends with status 0 and its two processes agree with eager."""
    done = command("demo", "--check", "--backend", "aot_eager", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("tensors", "storages", "symbols", "guards", "asserts", "bytes", "difference"):
        assert word in done.stdout
    pids = [int(pid) for pid in re.findall(r"in process (\d+)", done.stdout)]
    assert len(set(pids)) == 2
    assert "at most 0.0001, equal." in done.stdout


def test_the_child_of_the_demo_reports_modules_that_it_must_not_have(dynamic: Path) -> None:
    """The demo checks that the other process has not imported the model's code."""
    request = {"file": str(dynamic), "backend": "eager", "sizes": [], "absent": ["torch.nn", "x"]}
    with tasks._SETTINGS:  # which a worker sets until it exits
        with pytest.raises(tfk.CaptureError, match=r"found torch\.nn$"):
            tasks.run_capture(request)
        assert tasks.run_capture({**request, "absent": ["x"]}).runs == []


def test_the_child_of_the_demo_reports_a_difference(dynamic: Path) -> None:
    """The difference between compiled and eager results is reported."""
    torch._dynamo.reset()

    @torch._dynamo.register_backend
    def off_by_a_half(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return lambda *args: tuple(out + 0.5 for out in gm(*args))

    request = {"file": str(dynamic), "backend": "off_by_a_half", "sizes": [{}], "absent": []}
    with tasks._SETTINGS:
        (run,) = tasks.run_capture(request).runs
    assert run["difference"] == pytest.approx(0.5)


@pytest.mark.sweep
def test_a_file_that_needs_much_memory_must_be_trusted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text that compresses better than that of a frame is refused without ``--trust``."""
    text = tfk.capture(
        torch.fx.symbolic_trace(lambda x, note: x + 1), [torch.ones(2), "a" * (4 << 20)]
    )
    path = str(tmp_path / "much.fkf")
    with pytest.raises(tfk.WriteError, match="could not be read again"):
        text.save(path)
    text.save(path, limits=tfk.Limits.none())
    for command in (["show"], ["replay", "--backend", "eager"], ["fuzz", "--backend", "eager"]):
        assert cli.main([*command, path]) == cli.BAD
        assert "`--trust` on the command line" in capsys.readouterr().err
        assert cli.main([*command, "--trust", path]) == cli.DONE
    assert cli.main(["diff", "--trust", path, path]) == cli.DONE
