"""The command line: what each command prints, with which exit status, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import unicodedata
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import torch_fakeify as tfk
from torch_fakeify import backend, cli
from torch_fakeify.child import run_capture
from torch_fakeify.desc import FunctionValue, StackDesc
from torch_fakeify.desc_frame import CaptureDesc, FailureDesc
from torch_fakeify.files import read_capture, write_capture
from torch_fakeify.isolation import Answer, ask, last_words
from torch_fakeify.page import show_lines, table_lines
from torch_fakeify.verdict import judge, masked, replay

SCRIPT = """
import sys

import torch

print("argv", sys.argv, __name__, __file__, sys.path[0], __spec__)


def mine(gm, inputs):
    return gm.forward


class Failing:
    def __call__(self, gm, inputs):
        raise ValueError(f"cannot compile {len(inputs)} inputs")


class Net(torch.nn.Module):
    def forward(self, x):
        if x.shape[0] > 3:
            return x.sin() + 1
        return x


@torch.compile(backend="eager")
def breaks(x):
    y = x + 1
    print("a graph break")
    return y * 2


x = torch.randn(4, 8)
torch.compile(lambda x: x + 1, backend="aot_eager")(x)
torch.compile(lambda x: x + 2, backend=mine)(x)
torch.compile(lambda x: x + 3, options={"max_fusion_size": 8})(x)
net = Net()
net.compile(backend="eager", dynamic=True)
net(x)
breaks(x)
torch.compile(lambda x: x + x.view(-1)[0], backend=Failing())(x)
"""
ROWS = 7


def fresh(*args: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-m", "torch_fakeify", *map(str, args)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(Path(tfk.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs the command in this process, in a directory."""

    def run(*args: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(cwd)
        torch._dynamo.reset()
        capsys.readouterr()
        status = cli.main([*map(str, args)])
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(args, status, out, err)

    return run


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    """The one error of a command that was refused."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert "torch_fakeify/" not in done.stderr, "a traceback of ours"
    lines = [line for line in done.stderr.splitlines() if line.startswith("torch-fakeify")]
    assert len(lines) == 1, done.stderr
    return lines[0].removeprefix("torch-fakeify: error: ")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """What ``run`` did with the script above; its captures are in ``captures`` beside it."""
    home = tmp_path_factory.mktemp("run")
    (home / "code").mkdir()
    (home / "code" / "script.py").write_text(SCRIPT)
    done = fresh("run", "code/script.py", "--out", "x", "-h", "b c", cwd=home)
    done.args = home
    return done


@pytest.fixture(scope="module")
def captures(recorded: subprocess.CompletedProcess[str]) -> list[Path]:
    """The files that ``run`` wrote, in order."""
    return sorted((Path(str(recorded.args)) / "captures").iterdir())


@pytest.fixture(scope="module")
def dynamic(captures: list[Path]) -> Path:
    """The capture of the module with a dynamic size and a guard."""
    return captures[3]


# --- run ----------------------------------------------------------------------------------------


def test_run_prints_a_table(recorded: subprocess.CompletedProcess[str]) -> None:
    """One row for each frame, whatever way the script asked for a compilation."""
    lines = recorded.stdout.splitlines()
    head = next(at for at, line in enumerate(lines) if line.startswith("file "))
    columns = "file function nodes inputs symbols guards asserts bytes ms result"
    assert lines[head].split() == columns.split()
    rows = [line.split(maxsplit=9) for line in lines[head + 1 :]]
    results = ["compiled"] * (ROWS - 1) + ["failed: ValueError: cannot compile 1 inputs"]
    results[4] += f"; the same frame as {rows[0][0]}"  # x + 1, in another function
    assert [row[-1] for row in rows] == results
    assert [row[1] for row in rows] == [
        "<lambda>", "<lambda>", "<lambda>", "forward", "breaks", rows[5][1], "<lambda>",
    ]  # fmt: skip
    assert all(int(cell) > 0 for row in rows for cell in (row[2], row[3], row[7]))
    assert int(rows[3][4]) >= 1, "symbols of the dynamic frame"
    assert int(rows[3][5]) >= 1, "guards of the dynamic frame"


def test_run_goes_on_to_the_script_s_own_end(
    recorded: subprocess.CompletedProcess[str],
) -> None:
    """A script that raises shows its own traceback, and the exit status is 1."""
    assert recorded.returncode == 1
    home = str(recorded.args)
    assert (
        f'Traceback (most recent call last):\n  File "{home}/code/script.py", line'
        in recorded.stderr
    )
    assert "ValueError: cannot compile 1 inputs" in recorded.stderr
    assert recorded.stderr.endswith("torch-fakeify: the script raised, exit status 1\n")
    assert "runpy" not in recorded.stderr


def test_run_starts_the_script_as_python_does(
    recorded: subprocess.CompletedProcess[str],
) -> None:
    """``sys.argv``, ``__name__``, ``__file__`` and ``sys.path[0]`` are those of a plain run."""
    home = Path(str(recorded.args))
    plain = subprocess.run(
        [sys.executable, home / "code" / "script.py", "--out", "x", "-h", "b c"],
        cwd=home, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert recorded.stdout.splitlines()[0] == plain.stdout.splitlines()[0]


def test_run_writes_the_files_of_its_table(
    recorded: subprocess.CompletedProcess[str], captures: list[Path]
) -> None:
    """Every row's file is there under its name, with its size, and nothing else is."""
    rows = [line.split() for line in recorded.stdout.splitlines() if ".fkf" in line]
    assert [(row[0], int(row[7])) for row in rows] == [
        (path.name, path.stat().st_size) for path in captures
    ]
    assert all(re.fullmatch(r"\d{3}-\w+-[0-9a-f]{8}\.fkf", path.name) for path in captures)


def test_run_records_a_failure(captures: list[Path]) -> None:
    """The frame whose backend raised has exception type, message and stack as text."""
    failure = read_capture(captures[-1]).failure
    assert failure is not None
    assert (failure.type, failure.message) == ("builtins.ValueError", "cannot compile 1 inputs")
    assert isinstance(failure.stack, StackDesc)
    assert failure.stack.frames[-1].code.startswith('raise ValueError(f"cannot compile')
    assert all(read_capture(path).failure is None for path in captures[:-1])


def test_run_names_backends(captures: list[Path]) -> None:
    """A capture tells which backend the script asked for, without a memory address."""
    names = [read_capture(path).backend for path in captures]
    assert names[:4] == ["aot_eager", "mine", "inductor", "eager"]
    assert names[-1] is not None
    assert "0x" not in names[-1]


def run_text(
    command: Command, tmp_path: Path, code: str, *options: str
) -> subprocess.CompletedProcess[str]:
    """Run a script of this text under ``run``."""
    (tmp_path / "s.py").write_text(code)
    return command("run", *options, "s.py", cwd=tmp_path)


def test_run_with_another_backend(command: Command, tmp_path: Path) -> None:
    """``--backend`` compiles every frame with that one; a good script ends with status 0."""
    code = (
        "import torch\n"
        "def bad(gm, inputs): raise ValueError\n"
        "torch.compile(lambda x: x + 1, backend=bad)(torch.ones(2))\n"
    )
    done = run_text(command, tmp_path, code, "--backend", "eager", "--out", "a/b")
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "a" / "b").iterdir()
    assert read_capture(path).backend == "eager"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise KeyError('no')", "found KeyError: 'no'"),
        ("import sys\nsys.exit(3)", "found exit status 3"),
        ("import sys\nsys.exit('go away')", "found go away"),
        ("x = = 1", "found SyntaxError: invalid syntax (s.py, line 1)"),
    ],
)
def test_run_of_a_script_that_ends_early(
    command: Command, tmp_path: Path, code: str, message: str
) -> None:
    """A script that fails before it compiles anything: one error, status 2, no file."""
    done = run_text(command, tmp_path, code)
    assert error_of(done) == (
        "s.py: the script ended before it compiled anything; "
        f"{message}. Run it without recording first"
    )
    assert list((tmp_path / "captures").iterdir()) == []


def test_run_of_a_script_that_compiles_nothing(command: Command, tmp_path: Path) -> None:
    """A script that ends well without compiling anything is no success."""
    done = run_text(command, tmp_path, "print('hello')")
    assert (done.returncode, done.stdout) == (1, "hello\n")
    assert done.stderr == "torch-fakeify: the script compiled nothing\n"


def test_run_of_a_script_that_exits(command: Command, tmp_path: Path) -> None:
    """A script's own exit status is told; what it compiled until then is on record."""
    code = (
        "import sys, torch\n"
        "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2))\n"
        "sys.exit(7)\n"
    )
    done = run_text(command, tmp_path, code)
    assert done.returncode == 1
    assert done.stderr == "torch-fakeify: the script exited, exit status 7\n"
    assert len(list((tmp_path / "captures").iterdir())) == 1


def test_run_goes_on_where_a_frame_cannot_be_recorded(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame that has no record is told in the table; the script is not disturbed."""

    def refuse(gm: object, inputs: object, **options: object) -> None:
        raise tfk.UnsupportedTensorError("no record", where="x")

    monkeypatch.setattr(backend, "capture", refuse)
    code = "import torch\nprint(torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2)))\n"
    done = run_text(command, tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "tensor([2., 2.])"
    assert done.stdout.splitlines()[-1].endswith("compiled; not recorded: x: no record")
    assert list((tmp_path / "captures").iterdir()) == []


def test_run_leaves_the_interpreter_as_it_was(command: Command, tmp_path: Path) -> None:
    """``sys.argv``, ``sys.path`` and Dynamo are as before, also after a script that raised."""
    module = torch._dynamo.output_graph
    before = (sys.argv, list(sys.path), module.OutputGraph._call_user_compiler)
    run_text(command, tmp_path, "import sys\nsys.path.append('x')\nraise KeyError")
    assert (sys.argv, list(sys.path), module.OutputGraph._call_user_compiler) == before


def test_run_leaves_out_what_is_not_compiled(command: Command, tmp_path: Path) -> None:
    """A frame that a backend hands back to Python is no compilation: no row, no file."""
    code = (
        "import torch\n"
        "def skip(gm, inputs): raise torch._dynamo.exc.SkipFrame\n"
        "torch.compile(lambda x: x + 1, backend=skip)(torch.ones(2))\n"
        "torch.compile(lambda x: x + 2, backend='eager')(torch.ones(2))\n"
    )
    done = run_text(command, tmp_path, code)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "captures").iterdir()
    assert path.name.startswith("000-")
    assert len(done.stdout.splitlines()) == 2


def test_run_of_no_script(command: Command, tmp_path: Path) -> None:
    """A path without a script is refused by name."""
    done = command("run", "nothing.py", cwd=tmp_path)
    assert error_of(done) == "nothing.py: there is no such script. Check the path"
    assert not (tmp_path / "captures").exists()


def test_run_into_a_directory_that_cannot_be_written(command: Command, tmp_path: Path) -> None:
    """The directory is checked before the script starts."""
    (tmp_path / "file").write_text("keep me")
    done = run_text(command, tmp_path, "print('started')", "--out", "file")
    assert "the directory cannot be written" in error_of(done)
    assert done.stdout == ""
    assert (tmp_path / "file").read_text() == "keep me"


def test_run_with_a_backend_that_is_not(command: Command, tmp_path: Path) -> None:
    """A backend that is not registered is refused before the script starts."""
    done = run_text(command, tmp_path, "print('started')", "--backend", "nonesuch")
    assert error_of(done).startswith("there is no Dynamo backend 'nonesuch'; expected one of ")
    assert done.stdout == ""
    assert not (tmp_path / "captures").exists()


# --- show ---------------------------------------------------------------------------------------


def test_show(command: Command, dynamic: Path, tmp_path: Path) -> None:
    """The page has inputs, symbols with sources and ranges, guards with the user's line, code."""
    done = command("show", dynamic, cwd=tmp_path)
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
    """``show`` and ``--help`` answer without torch, sympy or numpy, which is why they are quick."""
    code = (
        "import sys\n"
        "from torch_fakeify.cli import main\n"
        f"assert main(['show', {str(dynamic)!r}]) == 0\n"
        f"assert main(['show', '--json', {str(dynamic)!r}]) == 0\n"
        "try: main(['run', '--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "print(sorted({'torch', 'sympy', 'numpy'} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stderr == "[]\n"


def test_show_json_is_the_record(command: Command, dynamic: Path, tmp_path: Path) -> None:
    """``--json`` prints what ``loads`` reads back to the same record."""
    done = command("show", "--json", dynamic, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert tfk.loads(done.stdout.strip().encode()) == read_capture(dynamic)


def test_show_of_a_failure(command: Command, captures: list[Path], tmp_path: Path) -> None:
    """The failure is shown with its stack."""
    text = command("show", captures[-1], cwd=tmp_path).stdout
    assert "result    failed: builtins.ValueError\n" in text
    assert "  builtins.ValueError\n    cannot compile 1 inputs\n  stack\n" in text


EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\u2028\r\nguards (0)"


def poisoned(value: Any) -> Any:
    """A record whose free texts all end in control characters."""
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
    """Whatever texts a file holds, each line of the page is printable and no line is forged."""
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
    """``--json`` is printable, too, and still means the same."""
    desc = msgspec.structs.replace(read_capture(captures[3]), frame=EVIL + "\U000e0001")
    write_capture(tmp_path / "evil.fkf", desc)
    done = command("show", "--json", tmp_path / "evil.fkf", cwd=tmp_path)
    assert done.stdout.strip().isprintable()
    assert tfk.loads(done.stdout.strip().encode()) == desc


def test_show_into_a_closed_pipe(dynamic: Path, tmp_path: Path) -> None:
    """``show FILE | true`` ends quietly."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "torch_fakeify", "show", dynamic],
        stdout=writer, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(tfk.__file__).parents[1])},
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_show_on_a_terminal_of_few_characters(dynamic: Path, tmp_path: Path) -> None:
    """A character that the terminal cannot show is escaped."""
    write_capture(tmp_path / "f.fkf", msgspec.structs.replace(read_capture(dynamic), frame="pré"))
    done = subprocess.run(
        [sys.executable, "-m", "torch_fakeify", "show", "f.fkf"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(tfk.__file__).parents[1]),
            "PYTHONIOENCODING": "ascii",
        },
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.startswith("frame     pr\\xe9\n")


# --- replay -------------------------------------------------------------------------------------


def with_bad_view(desc: CaptureDesc) -> CaptureDesc:
    """The frame with an operation that no backend can compile: a view of an impossible size."""
    nodes = tuple(
        msgspec.structs.replace(n, target="view", args=(n.args[0], 12345))
        if n.target == "sin"
        else n
        for n in desc.graph.nodes
    )
    return msgspec.structs.replace(desc, graph=msgspec.structs.replace(desc.graph, nodes=nodes))


@pytest.fixture(scope="module")
def failing(dynamic: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture that fails under ``aot_eager`` and has that failure on record."""
    capture = tfk.Capture(with_bad_view(read_capture(dynamic)))
    path = tmp_path_factory.mktemp("failing") / "failing.fkf"
    try:
        capture.compile("aot_eager")
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what gets recorded
        capture.with_failure(error, backend="aot_eager").save(path)
    return path


def test_replay_of_a_good_frame(command: Command, dynamic: Path, tmp_path: Path) -> None:
    """A frame without a failure on record compiles, and that is what it should do."""
    done = command("replay", dynamic, "--backend", "aot_eager", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"compiles\n  compiled in \d+ ms\n", done.stdout)


def test_replay_reproduces(command: Command, failing: Path, tmp_path: Path) -> None:
    """The same failure in a fresh interpreter: reproduced, status 0."""
    failure = read_capture(failing).failure
    assert failure is not None
    done = command("replay", failing, "--backend", "aot_eager", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "reproduced"
    assert lines[1].startswith(f"    {failure.type}: ")


def test_replay_does_not_reproduce(
    command: Command, captures: list[Path], failing: Path, tmp_path: Path
) -> None:
    """A frame that failed and compiles now, or fails otherwise, is not reproduced: status 1."""
    done = command("replay", captures[-1], "--backend", "eager", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith("not reproduced\n  compiled in ")
    assert done.stdout.endswith("  recorded:\n    builtins.ValueError: cannot compile 1 inputs\n")
    desc = read_capture(failing)
    other = FailureDesc(type="builtins.KeyError", message="1")
    write_capture(tmp_path / "other.fkf", msgspec.structs.replace(desc, failure=other))
    verdict = replay(tmp_path / "other.fkf", backend="aot_eager")
    assert (verdict.word, verdict.holds) == ("not reproduced", False)
    assert verdict.details[:3] == ("recorded:", "  builtins.KeyError: 1", "now:")


def test_replay_of_a_frame_that_no_longer_compiles(failing: Path, tmp_path: Path) -> None:
    """A frame that compiled when it was recorded and fails now: status 1."""
    desc = msgspec.structs.replace(read_capture(failing), failure=None)
    write_capture(tmp_path / "f.fkf", desc)
    verdict = replay(tmp_path / "f.fkf", backend="aot_eager")
    assert (verdict.word, verdict.holds) == ("does not compile", False)


def test_replay_that_hangs(command: Command, dynamic: Path, tmp_path: Path) -> None:
    """A compilation that takes longer than allowed is killed and told so."""
    done = command("replay", dynamic, "--timeout", "0.01", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith("hangs\n  killed after 0.01 s\n")


def test_replay_that_crashes(
    dynamic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compilation that ends by a signal is told by the signal's name, with its last words."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif '-m' in sys.orig_argv: print('last words', flush=True); os.abort()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    verdict = replay(dynamic, backend="eager")
    assert (verdict.word, verdict.holds) == ("crashes", False)
    assert verdict.details[0] == "the process was ended by SIGABRT"
    assert "last words" in verdict.details


@pytest.mark.parametrize(
    ("answer", "word", "detail"),
    [
        (
            Answer("crashed", {}, -9, ("x",)),
            "out of memory",
            "the process was killed from outside (SIGKILL), as when memory runs out",
        ),
        (Answer("exited", {}, 3, ()), "crashes", "the process ended with exit status 3"),
        (
            Answer(
                "replied",
                {
                    "outcome": "failed",
                    "type": "builtins.MemoryError",
                    "message": "",
                    "memory": True,
                },
                0,
                (),
            ),
            "out of memory",
            "  builtins.MemoryError: ",
        ),
    ],
)
def test_verdict_on_ends(dynamic: Path, answer: Answer, word: str, detail: str) -> None:
    """Each way in which a child can end has its verdict."""
    verdict = judge(read_capture(dynamic), answer, timeout=1)
    assert (verdict.word, verdict.holds, verdict.details[0]) == (word, False, detail)


def test_last_words() -> None:
    """What is kept of a dead child's output tells how it died."""
    lines = [str(number) for number in range(30)]
    assert last_words(lines) == tuple(lines[-12:])
    assert last_words(lines[:3]) == ("0", "1", "2")
    lines[10] = "Fatal Python error: Aborted"
    assert last_words(lines) == tuple(lines[6:18])


@pytest.mark.parametrize(
    ("kind", "message", "word"),
    [
        ("m.E", "s3 at 0x1", "reproduced"),
        ("m.E", "s4 at 0x2", "reproduced"),
        ("m.F", "s3 at 0x1", "not reproduced"),
        ("m.E", "u3 at 0x1", "not reproduced"),
    ],
)
def test_verdict_on_failures(dynamic: Path, kind: str, message: str, word: str) -> None:
    """A failure is the same if type and message are, but for numbers and addresses."""
    failure = FailureDesc(type="m.E", message="s3 at 0x1")
    desc = msgspec.structs.replace(read_capture(dynamic), failure=failure)
    reply = {"outcome": "failed", "type": kind, "message": message, "memory": False}
    verdict = judge(desc, Answer("replied", reply, 0, ()), timeout=1)
    assert (verdict.word, verdict.holds) == (word, word == "reproduced")


def test_masked_messages() -> None:
    """Numbers and addresses do not make two failures different."""
    assert masked("at 0x7f00 with s77 and 3.5") == masked("at 0xdead with s2 and 10.25")
    assert masked("a") != masked("b")


def test_a_child_knows_nothing_of_where_it_was_started(tmp_path: Path) -> None:
    """A file in the working directory cannot take the place of a module in the child."""
    (tmp_path / "json.py").write_text("raise SystemExit(66)")
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        answer = ask({"task": "compile", "file": "/nothing", "backend": "eager", "device": None},
                     timeout=100)  # fmt: skip
    finally:
        os.chdir(before)
    assert answer.ending == "replied"
    assert answer.reply["outcome"] == "refused"


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [[], ["nonesuch"], ["show"], ["replay"], ["run"],
                                  ["replay", "f", "--timeout", "0"]])  # fmt: skip
def test_bad_usage(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Bad usage is told on standard error, with status 2."""
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main(args)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: torch-fakeify")


def rewritten(path: Path, to: Path, member: str, change: Any) -> Path:
    """A copy of a ZIP file with one JSON member changed, by force: the checksums no longer fit."""
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
def test_not_a_capture(command: Command, name: str, tmp_path: Path) -> None:
    """A file that is no capture, and a file that is not there: one error each."""
    (tmp_path / "f.fkf").write_text("hello")
    assert error_of(command(name, "f.fkf", cwd=tmp_path)).startswith("f.fkf: ")
    assert error_of(command(name, "absent.fkf", cwd=tmp_path)).startswith("absent.fkf: ")
    (tmp_path / "d").mkdir()
    assert error_of(command(name, "d", cwd=tmp_path)).startswith("d: ")


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9, 0.999])
def test_truncated(command: Command, dynamic: Path, tmp_path: Path, keep: float) -> None:
    """A file that was cut anywhere is refused."""
    data = dynamic.read_bytes()
    (tmp_path / "f.fkf").write_bytes(data[: int(len(data) * keep)])
    assert error_of(command("show", "f.fkf", cwd=tmp_path)).startswith("f.fkf: ")


def test_another_version(command: Command, dynamic: Path, tmp_path: Path) -> None:
    """A file of a version to come is refused, and the version is told."""

    def change(manifest: dict[str, Any]) -> None:
        manifest["version"] = 99

    path = rewritten(dynamic, tmp_path / "f.fkf", "manifest.json", change)
    assert "99" in error_of(command("show", path, cwd=tmp_path))


def retargeted(path: Path, to: Path, target: FunctionValue) -> Path:
    """The capture with another function in place of its first called one."""
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
    ("kind", "name", "said"),
    [
        ("op", "nonesuch.op.default", "nonesuch"),
        ("op", "aten.nonesuch.default", "torch.ops.aten.nonesuch is not registered"),
        ("hop", "nonesuch", "nonesuch"),
        ("function", "os.system", "os.system"),
        ("function", "torch.load", "torch.load"),
        ("nonesuch", "torch.sin", "found 'nonesuch'"),
    ],
)
def test_unknown_and_forbidden_functions(
    command: Command, dynamic: Path, tmp_path: Path, kind: str, name: str, said: str
) -> None:
    """An operator that is not there, a function outside the allow-list: named and refused."""
    target = FunctionValue(kind=kind, name=name)
    path = retargeted(dynamic, tmp_path / "f.fkf", target)
    with pytest.raises(tfk.FormatError) as error:
        tfk.Capture.load(path).instantiate()
    assert error.value.where == "$.nodes[3].target"
    assert said in str(error.value)
    shown = command("show", path, cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert name in shown.stdout


@pytest.mark.parametrize(
    ("kind", "name"), [("op", "nonesuch.op.default"), ("function", "os.system")]
)
def test_replay_of_unknown_and_forbidden_functions(
    command: Command, dynamic: Path, tmp_path: Path, kind: str, name: str
) -> None:
    """What the fresh interpreter refuses is an error of the command, not a verdict."""
    path = retargeted(dynamic, tmp_path / "f.fkf", FunctionValue(kind=kind, name=name))
    done = command("replay", path, "--backend", "eager", cwd=tmp_path)
    assert error_of(done).startswith("$.nodes[3].target: ")
    assert done.stdout == ""


def test_replay_with_a_backend_that_is_not(command: Command, dynamic: Path, tmp_path: Path) -> None:
    """A backend that is not registered is bad usage."""
    done = command("replay", dynamic, "--backend", "nonesuch", cwd=tmp_path)
    assert error_of(done).startswith("there is no Dynamo backend 'nonesuch'")


# --- tables and the demo ------------------------------------------------------------------------


def test_table() -> None:
    """Columns are aligned, numbers to the right, the last one as wide as it likes."""
    rows = [("name", "n", "text"), ("a", "1,000", "x" * 70), ("bcdef", "2", "")]
    assert table_lines(rows) == [
        "name       n  text",
        "a      1,000  " + "x" * 70,
        "bcdef      2",
    ]


def test_demo(command: Command, tmp_path: Path) -> None:
    """The demo runs to its end: another process rebuilds the frame and agrees with eager."""
    done = command("demo", "--backend", "aot_eager", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("tensors", "storages", "symbols", "guards", "asserts", "bytes", "difference"):
        assert word in done.stdout
    pids = [int(pid) for pid in re.findall(r"in process (\d+)", done.stdout)]
    assert len(set(pids)) == 2
    assert "at most 0.0001, equal." in done.stdout


def test_the_child_tells_what_it_must_not_have(dynamic: Path) -> None:
    """The claim that the other process lacks the model's code is checked, not assumed."""
    request = {"file": str(dynamic), "backend": "eager", "sizes": [], "absent": ["torch.nn", "x"]}
    with pytest.raises(tfk.CaptureError, match=r"found torch\.nn$"):
        run_capture(request)
    assert run_capture({**request, "absent": ["x"]})["runs"] == []


def test_the_child_tells_a_difference(dynamic: Path) -> None:
    """The difference between compiled and eager is over outputs and inputs, and not always 0."""
    torch._dynamo.reset()

    @torch._dynamo.register_backend
    def off_by_a_half(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return lambda *args: tuple(out + 0.5 for out in gm(*args))

    request = {"file": str(dynamic), "backend": "off_by_a_half", "sizes": [{}], "absent": []}
    (run,) = run_capture(request)["runs"]
    assert run["difference"] == pytest.approx(0.5)


def test_a_file_that_asks_for_much_has_to_be_trusted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text that packs better than that of a frame, as a decompression bomb does."""
    text = tfk.capture(
        torch.fx.symbolic_trace(lambda x, note: x + 1), [torch.ones(2), "a" * (4 << 20)]
    )
    path = str(tmp_path / "much.fkf")
    text.save(path)
    for command in (["show"], ["replay", "--backend", "eager"], ["fuzz", "--backend", "eager"]):
        assert cli.main([*command, path]) == cli.BAD
        assert "`--trust` on the command line" in capsys.readouterr().err
        assert cli.main([*command, "--trust", path]) == cli.DONE
    assert cli.main(["diff", "--trust", path, path]) == cli.DONE
