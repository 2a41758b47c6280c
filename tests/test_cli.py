"""The command line: what each command prints, with which exit status, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import unicodedata
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from cli_runs import Command, error_of
from processes import COMMAND, environment, fresh

import torch_fakeify as tfk
from torch_fakeify import cli
from torch_fakeify.records.frame import CaptureDesc, FailureDesc
from torch_fakeify.records.tensor import FunctionValue, StackDesc
from torch_fakeify.render.show import show_lines, table_lines
from torch_fakeify.serialization.capture_file import read_capture, write_capture
from torch_fakeify.tools.replaying import judge, masked, replay_capture
from torch_fakeify.tools.worker import main as worker
from torch_fakeify.tools.worker.client import ask, output_tail
from torch_fakeify.tools.worker.replies import Answer, Ended, Failed, Refused, Thrown

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


def test_show_imports_no_torch(dynamic: Path, tmp_path: Path) -> None:
    """``show`` and ``--help`` import neither torch nor sympy nor numpy."""
    code = (
        "import sys\n"
        "from torch_fakeify.cli import main\n"
        f"assert main(['show', {str(dynamic)!r}]) == 0\n"
        f"assert main(['show', '--json', {str(dynamic)!r}]) == 0\n"
        "try: main(['run', '--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "print(sorted({'torch', 'sympy', 'numpy'} & set(sys.modules)), file=sys.stderr)\n"
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
    command: Command, captures: list[Path], failing: Path, tmp_path: Path
) -> None:
    """A frame that failed and now compiles, or fails differently, has status 1."""
    done = command("replay", captures[-1], "--backend", "eager", cwd=tmp_path)
    assert done.returncode == 1
    assert re.match(r"not reproduced\n  with eager, torch .+\n  compiled in ", done.stdout)
    assert "  recorded:\n    ValueError: cannot compile 1 inputs\n" in done.stdout
    assert re.search(
        r"  differs here:\n    backend: <.*Failing object> recorded, eager here\n", done.stdout
    )
    desc = read_capture(failing)
    other = FailureDesc(type="builtins.KeyError", message="1")
    write_capture(tmp_path / "other.fkf", msgspec.structs.replace(desc, failure=other))
    verdict = replay_capture(tmp_path / "other.fkf", backend="aot_eager")
    assert (verdict.verdict, verdict.holds) == ("not reproduced", False)
    assert verdict.details[1:4] == ("recorded:", "  KeyError: 1", "now:")


@pytest.mark.sweep
def test_replay_reports_a_frame_that_no_longer_compiles(failing: Path, tmp_path: Path) -> None:
    """A frame that compiled when it was recorded and now fails has status 1."""
    desc = msgspec.structs.replace(read_capture(failing), failure=None)
    write_capture(tmp_path / "f.fkf", desc)
    verdict = replay_capture(tmp_path / "f.fkf", backend="aot_eager")
    assert (verdict.verdict, verdict.holds) == ("does not compile", False)


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


@pytest.mark.parametrize(
    ("answer", "word", "detail"),
    [
        (
            Answer(Ended("crashes", -9, ("x",))),
            "out of memory",
            "the process was killed from outside (SIGKILL), as when memory runs out",
        ),
        (Answer(Ended("crashes", 3)), "crashes", "the process ended with exit status 3"),
        (
            Answer(Failed(Thrown("builtins.MemoryError", "", memory=True, frames=()))),
            "out of memory",
            "  MemoryError: ",
        ),
    ],
)
def test_each_end_of_a_child_has_a_verdict(
    dynamic: Path, answer: Answer, word: str, detail: str
) -> None:
    """A crash, a hang and lack of memory of the child each have a verdict of their own."""
    verdict = judge(read_capture(dynamic), answer, timeout=1)
    assert (verdict.verdict, verdict.holds, verdict.details[0]) == (word, False, detail)


def test_the_last_lines_of_a_child_show_its_end() -> None:
    """The tail of a dead child's output has the lines that explain its end."""
    lines = [str(number) for number in range(30)]
    assert output_tail(lines) == tuple(lines[-12:])
    assert output_tail(lines[:3]) == ("0", "1", "2")
    lines[10] = "Fatal Python error: Aborted"
    assert output_tail(lines) == tuple(lines[6:18])


@pytest.mark.parametrize(
    ("kind", "message", "word"),
    [
        ("m.E", "s3 at 0x1", "reproduced"),
        ("m.E", "s4 at 0x2", "reproduced"),
        ("m.F", "s3 at 0x1", "not reproduced"),
        ("m.E", "u3 at 0x1", "not reproduced"),
    ],
)
def test_failures_are_compared_by_type_and_message(
    dynamic: Path, kind: str, message: str, word: str
) -> None:
    """Two failures are the same if type and message are, up to numbers and addresses."""
    failure = FailureDesc(type="m.E", message="s3 at 0x1")
    desc = msgspec.structs.replace(read_capture(dynamic), failure=failure)
    error = Thrown(kind, message, memory=False, frames=())
    verdict = judge(desc, Answer(Failed(error)), timeout=1)
    assert (verdict.verdict, verdict.holds) == (word, word == "reproduced")


def test_numbers_and_addresses_are_masked() -> None:
    """Messages that differ in numbers and addresses are equal once masked."""
    assert masked("at 0x7f00 with s77 and 3.5") == masked("at 0xdead with s2 and 10.25")
    assert masked("a") != masked("b")


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


@pytest.mark.parametrize("args", [[], ["nonesuch"], ["show"], ["replay"], ["run"],
                                  ["replay", "f", "--timeout", "0"]])  # fmt: skip
def test_bad_usage_has_status_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Bad usage prints an error on standard error and has exit status 2."""
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main(args)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: torch-fakeify")


def rewritten(path: Path, to: Path, member: str, change: Any) -> Path:
    """Return a copy of a ZIP file with one JSON member changed, so that its checksum is wrong."""
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(to, "w") as target:
        for info in source.infolist():
            data = source.read(info)
            if info.filename == member:
                document = json.loads(data)
                change(document)
                data = json.dumps(document).encode()
            target.writestr(info.filename, data)
    return to


@pytest.mark.parametrize("name", ["show", "replay"])
def test_a_file_that_is_no_capture_is_refused(command: Command, name: str, tmp_path: Path) -> None:
    """A file that is no capture and a missing file give one error each."""
    (tmp_path / "f.fkf").write_text("hello")
    assert error_of(command(name, "f.fkf", cwd=tmp_path)).startswith("f.fkf: ")
    assert error_of(command(name, "absent.fkf", cwd=tmp_path)).startswith("absent.fkf: ")
    (tmp_path / "d").mkdir()
    assert error_of(command(name, "d", cwd=tmp_path)).startswith("d: ")


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_refused(
    command: Command, dynamic: Path, tmp_path: Path, fraction: float
) -> None:
    """A file that is cut at any position is refused."""
    data = dynamic.read_bytes()
    (tmp_path / "f.fkf").write_bytes(data[: int(len(data) * fraction)])
    assert error_of(command("show", "f.fkf", cwd=tmp_path)).startswith("f.fkf: ")


def test_a_future_format_version_is_refused(
    command: Command, dynamic: Path, tmp_path: Path
) -> None:
    """A file of a future format version is refused, and the error contains the version."""

    def change(manifest: dict[str, Any]) -> None:
        manifest["version"] = 99

    path = rewritten(dynamic, tmp_path / "f.fkf", "manifest.json", change)
    assert "99" in error_of(command("show", path, cwd=tmp_path))


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
def test_show_refuses_unknown_and_forbidden_functions(
    command: Command, dynamic: Path, tmp_path: Path, kind: str, name: str, fragment: str
) -> None:
    """An unknown operator and a function outside the allow-list are refused by name."""
    target = FunctionValue(kind=kind, name=name)
    path = retargeted(dynamic, tmp_path / "f.fkf", target)
    with pytest.raises(tfk.FormatError) as error:
        tfk.Capture.load(path).instantiate()
    assert error.value.where == "$.nodes[3].target"
    assert fragment in str(error.value)
    shown = command("show", "--code", path, cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert name in shown.stdout


@pytest.mark.parametrize(
    ("kind", "name"), [("op", "nonesuch.op.default"), ("function", "os.system")]
)
def test_replay_refuses_unknown_and_forbidden_functions(
    command: Command, dynamic: Path, tmp_path: Path, kind: str, name: str
) -> None:
    """What the fresh interpreter refuses is an error of the command, not a verdict."""
    path = retargeted(dynamic, tmp_path / "f.fkf", FunctionValue(kind=kind, name=name))
    done = command("replay", path, "--backend", "eager", cwd=tmp_path)
    assert error_of(done).startswith("$.nodes[3].target: ")
    assert done.stdout == ""


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
    with worker._SETTINGS:  # which a worker sets until it exits
        with pytest.raises(tfk.CaptureError, match=r"found torch\.nn$"):
            worker.run_capture(request)
        assert worker.run_capture({**request, "absent": ["x"]}).runs == []


def test_the_child_of_the_demo_reports_a_difference(dynamic: Path) -> None:
    """The difference between compiled and eager results is reported."""
    torch._dynamo.reset()

    @torch._dynamo.register_backend
    def off_by_a_half(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return lambda *args: tuple(out + 0.5 for out in gm(*args))

    request = {"file": str(dynamic), "backend": "off_by_a_half", "sizes": [{}], "absent": []}
    with worker._SETTINGS:
        (run,) = worker.run_capture(request).runs
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


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["fuzz", "--runs", "x"], "argument --runs: must be at least 1; found 'x'"),
        (["fuzz", "--runs", "-1"], "argument --runs: must be at least 1; found '-1'"),
        (["replay", "--jobs", "2.5"], "argument --jobs: must be at least 1; found '2.5'"),
        (["minify", "--timeout", "soon"], "must be a positive number of seconds; found 'soon'"),
        (["minify", "--timeout", "nan"], "must be a positive number of seconds; found 'nan'"),
        (["replay", "--memory", "1G"], "must be a positive number of MiB; found '1G'"),
    ],
)
def test_a_number_that_is_none_is_reported_with_what_is_expected(
    options: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error has the option, what it takes and what was given; no name of a function."""
    with pytest.raises(SystemExit, match="2"):
        cli.main([options[0], "frame.fkf", *options[1:]])
    assert error in capsys.readouterr().err
