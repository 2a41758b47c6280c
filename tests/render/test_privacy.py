"""Privacy: what a capture does not contain of the machine, and that the rest is listed."""

from __future__ import annotations

import os
import re
import zipfile
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from hostile_records import exchanged, places, texts
from hypothesis import example, given, settings
from hypothesis import strategies as st
from processes import COMMAND, PACKAGE, fresh
from torch.fx.experimental.proxy_tensor import make_fx

import torch_fakeify as tfk
from torch_fakeify import cli
from torch_fakeify.records import redact_paths
from torch_fakeify.records.tensor import FrameDesc, StackDesc
from torch_fakeify.render import privacy
from torch_fakeify.render.privacy import privacy_lines
from torch_fakeify.serialization.capture_file import encode_with_short_paths, read_capture

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Generator
    from pathlib import Path

USER = "alice_q7x"
HOST = "host-of-alice"
TOKEN = "tok-9f8e7d6c5b4a"

MODEL = """
import torch


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.secret_layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.secret_layer(x)
"""

SCRIPT = """
import os, socket, sys
from pathlib import Path

import torch
from torch.fx.traceback import annotate

HERE = str(Path(__file__).resolve().parent)
sys.path.insert(0, HERE)
from secretpkg.layers.block import Block

block = Block()
files = {f"{HERE}/weights/first.bin": torch.randn(4), f"{HERE}/other/first.bin": torch.randn(4)}


@torch.library.custom_op("mylib::load_like", mutates_args=())
def load_like(x: torch.Tensor, path: str) -> torch.Tensor:
    return x.clone()


@load_like.register_fake
def _(x, path):
    return torch.empty_like(x)


def secret_function(x, files, n):
    m = n.max().item()
    torch._check(m <= x.shape[0], lambda: f"the table in {HERE}/table.csv is too short")
    y = block(x) * files[HERE + "/weights/first.bin"] + files[HERE + "/other/first.bin"]
    if x.shape[0] > 3:  # see HOMEDIR/notes/guard.txt
        y = y + 1
    with annotate({"from": HERE + "/annotated.py"}):
        return load_like(y, HERE + "/data.bin") + m


def failing(gm, inputs):
    raise ValueError(
        f"cannot open {HERE}/cache/x.so nor C:\\\\\\\\Users\\\\\\\\{os.environ['USER']}\\\\\\\\y.dll "
        f"as {os.environ['USER']} on {socket.gethostname()} with {os.environ['SECRET_TOKEN']}"
    )


torch._dynamo.config.capture_scalar_outputs = True
args = torch.randn(6, 4), files, torch.tensor([2, 3])
torch.compile(secret_function, backend="eager", dynamic=True)(*args)
torch.compile(lambda x: x + 1, backend=failing)(torch.ones(3))
"""


def command(cwd: Path, home: Path, *args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command in a fresh interpreter with Alice's user name, host name and home."""
    site = home.parent / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(
        f"import platform, socket\nplatform.node = socket.gethostname = lambda: {HOST!r}\n"
    )
    return fresh(
        *COMMAND, *args, cwd=cwd, status=None, HOME=str(home), USER=USER, LOGNAME=USER,
        SECRET_TOKEN=TOKEN, HOSTNAME=HOST, PYTHONPATH=os.pathsep.join([str(site), PACKAGE]),
    )  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Alice's home with a project recorded twice: with the defaults, and with data and paths."""
    home = tmp_path_factory.mktemp("base") / USER
    project = home / "secret project"
    package = home / "project" / "secretpkg" / "layers"
    package.mkdir(parents=True)
    project.mkdir()
    (package / "__init__.py").write_text("")
    (package.parent / "__init__.py").write_text("")
    (package / "block.py").write_text(MODEL)
    (home / "project" / "train.py").write_text(SCRIPT.replace("HOMEDIR", str(home)))
    for name, flags in (("plain", ()), ("full", ("--with-data", "--with-paths"))):
        done = command(
            home.parent, home, "run", "--out", f"out/{name}", *flags, home / "project/train.py"
        )
        assert "secret_function" in done.stdout, done.stderr
        (home.parent / "out" / name / "train").rename(home.parent / name)
        assert len(list((home.parent / name).iterdir())) == 2, done.stdout + done.stderr
    return home


def members(folder: Path) -> list[tuple[str, str]]:
    """Return every member of every file of a folder, as text."""
    found: list[tuple[str, str]] = []
    for path in sorted(folder.glob("*.fkf")):
        with zipfile.ZipFile(path) as archive:
            found.extend(
                (n, archive.read(n).decode("utf-8", "replace")) for n in archive.namelist()
            )
            found.append((path.name, archive.comment.decode()))
    return found


def records(folder: Path) -> list[Any]:
    """Return the records of every file of a folder."""
    return [read_capture(path) for path in sorted(folder.glob("*.fkf"))]


def instantiated(record: Any) -> list[Any]:
    """Return the inputs of a frame, rebuilt with its operator registered."""
    with torch.library._scoped_library("mylib", "DEF") as library:
        library.define("load_like(Tensor x, str path) -> Tensor")
        return tfk.Capture(record).instantiate().inputs


@pytest.mark.sweep
def test_a_file_contains_nothing_of_the_machine(home: Path) -> None:
    """No member contains a home, user, host or secret of the environment, plain or escaped."""
    found = members(home.parent / "plain")
    assert len(found) > 6
    for name, text in found:
        for word in (
            USER,
            HOST,
            TOKEN,
            str(home),
            str(home.parent),
            "C:\\\\Users",
            "site-packages",
        ):
            assert word not in text, name


def test_no_text_is_an_absolute_path(home: Path) -> None:
    """Stacks, code, sources, messages, arguments and annotations are searched one by one."""
    for record in records(home.parent / "plain"):
        found = [
            (kind, text)
            for _, kind, text in texts(record)
            if re.search(redact_paths.ABSOLUTE, text)
        ]
        assert found == []


def test_files_are_named_relative_to_their_package(home: Path) -> None:
    """The shortened path still shows where in the project or the package a line is."""
    files = {
        text for record in records(home.parent / "plain") for _, kind, text in texts(record)
        if kind.endswith("FrameDesc.file")
    }  # fmt: skip
    assert "train.py" in files
    assert "secretpkg/layers/block.py" in files
    assert any(file.startswith("torch/") for file in files)


def test_two_shortened_names_stay_different(home: Path) -> None:
    """Two inputs whose names differ only in the folder stay two inputs."""
    (record, _) = records(home.parent / "plain")
    names = [entry.source.name for entry in record.inputs if entry.source is not None]
    assert len(names) == len(set(names))
    of_files = [name for name in names if name.startswith("L['files']")]
    assert len(of_files) == 2
    assert all(re.fullmatch(r"L\['files'\]\['\.\.\./first\.bin(~\d)?'\]", n) for n in of_files)
    assert instantiated(record)


def test_with_paths_records_full_paths(home: Path) -> None:
    """Stacks and messages are unchanged if full paths are requested."""
    text = "".join(text for _, text in members(home.parent / "full"))
    for word in (
        USER,
        HOST,
        str(home / "project" / "train.py"),
        f"{home}/project/weights/first.bin",
    ):
        assert word in text
    frame, failed = records(home.parent / "full")
    assert TOKEN in failed.failure.message
    assert instantiated(frame)


def test_short_and_full_paths_have_one_graph(home: Path) -> None:
    """Except for their texts, the frames with short and with full paths are equal."""
    plain, full = records(home.parent / "plain")[0], records(home.parent / "full")[0]
    assert [n.op for n in plain.graph.nodes] == [n.op for n in full.graph.nodes]
    renamed = [
        (a.name, b.name)
        for a, b in zip(plain.graph.nodes, full.graph.nodes, strict=True)
        if a.name != b.name
    ]
    assert len(renamed) == 2
    assert all("path" in a and USER in b for a, b in renamed)
    assert [e.name for e in plain.inputs] == [
        n.name for n in plain.graph.nodes if n.op == "placeholder"
    ]
    assert len(plain.shape_env.guards) == len(full.shape_env.guards)


def test_a_failure_is_reproduced_without_its_paths(home: Path) -> None:
    """The verdict compares messages as they are recorded."""
    from torch_fakeify.tools.replaying import masked

    plain, full = records(home.parent / "plain")[1], records(home.parent / "full")[1]
    assert plain.failure.message != full.failure.message
    message = f"cannot open {home}/cache/x12.so at 0x7f00 in /a/b/site-packages/torch/x.py"
    recorded = redact_paths.short_message(message)
    assert masked(recorded) == masked(message) == masked(message.replace("x12", "x7"))
    assert masked(recorded) != masked(message.replace("x12.so", "y.dll"))


def test_show_privacy_lists_texts_of_the_program(home: Path) -> None:
    """The kinds are files, functions, code, sources, names, arguments, notes and messages; torch is not needed."""
    file = min((home.parent / "plain").iterdir())
    code = (
        "import sys; from torch_fakeify.cli import main; main(sys.argv[1:]);"
        "assert 'torch' not in sys.modules and 'sympy' not in sys.modules"
    )
    done = fresh("-c", code, "show", "--privacy", file)
    sections = {part.split(" (")[0]: part for part in done.stdout.split("\n\n")}
    for heading, text in (
        ("files", "secretpkg/layers/block.py"),
        ("functions", "secret_function"),
        ("lines of code", "if x.shape[0] > 3:"),
        ("sources", "L['files']['.../first.bin"),
        ("node names", "l_x_"),
        ("constants", "data.bin"),
        ("operators and functions", "mylib.load_like.default"),
        ("notes", "secretpkg.layers.block.Block"),
        ("notes", "annotated.py"),
        ("messages", "torch/__init__.py"),
    ):
        assert text in sections[heading], heading
    assert "float32" not in done.stdout


def test_every_text_of_a_record_is_listed_or_torchs(home: Path) -> None:
    """A text of the user at any place of a record is listed."""
    marker = "Very Telling/Text"
    for record in records(home.parent / "plain"):
        for kind, path in places(record, 1):
            lines = privacy_lines(exchanged(record, path, lambda _: marker))
            assert any(marker in line for line in lines), kind


@pytest.mark.parametrize(
    "path", ["/home/bob/x/y.py", "in '/home/bob/x'", "a\n/home/bob/x\n", r"C:\\Users\\bob\\x.py"]
)
def test_no_place_has_an_absolute_path(home: Path, path: str) -> None:
    """A path in any text of a frame is found and shortened."""
    for record in records(home.parent / "plain"):
        for kind, place in places(record, 1):
            field = ".".join(kind.split(".")[-2:])
            if "ExprDesc" in kind or field in privacy._VOCABULARY | privacy._SYMBOLS:
                continue  # words and names that torch makes
            changed = exchanged(record, place, lambda _: path)
            made, _ = encode_with_short_paths(changed)
            left = [text for _, _, text in texts(made) if "bob" in text]
            assert left == [], kind
            assert made == redact_paths.redact_paths(changed), kind


@given(st.text(st.sampled_from("//\\\\ab1.:~'\"()[]\n\t é\u2028\x01"), min_size=3, max_size=14))
@settings(max_examples=1000, deadline=None)
@example("C:\\x")
@example("\\\\host\\share")
@example("a\n/b/c")
@example("\x01/b/c")
@example("file:///b")
@example("'/ 1/'")
@example('"/ 1/"')
def test_a_path_in_a_record_shows_in_its_json(text: str) -> None:
    """The search through JSON finds every text that would be shortened in a record."""
    stack = StackDesc(frames=(FrameDesc(file="a.py", line=1, function="f", code=text),))
    if redact_paths.short_paths(stack) is not stack:
        assert redact_paths.may_mention_path(msgspec.json.encode(stack))


def test_a_record_is_private_before_it_is_saved(tmp_path: Path) -> None:
    """What `desc` shows is what is saved, also after the backend's name was changed."""

    def private(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    gm = make_fx(private, tracing_mode="fake")(torch.ones(2))
    value = gm.graph.find_nodes(op="placeholder")[0].meta["val"]
    gm.graph.find_nodes(op="placeholder")[0].meta["stack_trace"] = "see '/home/bob/x/y.py'"
    made = [tfk.capture(gm, [value]) for _ in range(2)]
    looked, saved, whole = (*made[:2], tfk.capture(gm, [value], paths="full"))
    assert "bob" not in repr(looked.desc)
    assert "bob" in repr(whole.desc)
    for i, capture in enumerate((looked, saved)):
        capture.save(tmp_path / f"{i}.fkf")
        assert read_capture(tmp_path / f"{i}.fkf") == capture.desc == looked.desc


# --- the parts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("see /data/models/a.bin now", "see .../a.bin now"),
        ("'/data/models/a.bin'", "'.../a.bin'"),
        ("L['/data/x/w']", "L['.../w']"),
        ("/usr/lib/python3.11/json/decoder.py:10", "json/decoder.py:10"),
        ("/x/site-packages/torch/nn/functional.py", "torch/nn/functional.py"),
        ("file:///data/x.py", "file://.../x.py"),
        (r"C:\Users\bob\x.dll failed", ".../x.dll failed"),
        ("C:/Users/bob/x.dll", ".../x.dll"),
        (r"\\server\share\x.dll", ".../x.dll"),
        ("L['/data/my files/x.bin']", "L['.../x.bin']"),
        ('open "/data/my files/a b.bin" failed', 'open ".../a b.bin" failed'),
        ("/data/bob smith/x.bin", ".../x.bin"),
        ("/data/bob smith/of ours.bin", ".../of ours.bin"),
        ("/home/josé/été/ß.bin not found", ".../ß.bin not found"),
        ("/データ/ボブ/x", ".../x"),
        (r"in C:\Users\Bob Smith\x.dll at 3", "in .../x.dll at 3"),
        (r"'C:\\Users\\Bob Smith\\x.dll'", "'.../x.dll'"),
        ("C:/Users/Bob Smith/x.dll", ".../x.dll"),
        (r"D:\josé\x.dll", ".../x.dll"),
        (r"\\server\bob smith\x.dll is old", ".../x.dll is old"),
        ("file:///home/bob%20smith/x.py", "file://.../x.py"),
        ("'/'.join(a) + '/b'", "'/'.join(a) + '/b'"),
        ("/ 2 / 3", "/ 2 / 3"),
        ("http://example.org/a/b", "http://example.org/a/b"),
        ("a/b/c", "a/b/c"),
        ("x.shape[0]/y.shape[0]/2", "x.shape[0]/y.shape[0]/2"),
        ("(a)/b/c", "(a)/b/c"),
        ("s0 // 2 / 3", "s0 // 2 / 3"),
        ("i,j->ij", "i,j->ij"),
        ("a\\nb", "a\\nb"),
    ],
)
def test_absolute_paths_in_texts_are_shortened(text: str, short: str) -> None:
    """Network addresses and divisions are not taken for paths."""
    assert redact_paths.Shortener().text(text) == short


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Generator[Callable[[str | Path], None]]:
    """Gives this process another home."""

    def move(home: str | Path) -> None:
        redact_paths._home.cache_clear()
        redact_paths.short_path.cache_clear()
        monkeypatch.setenv("HOME", str(home))

    yield move
    monkeypatch.undo()
    redact_paths._home.cache_clear()
    redact_paths.short_path.cache_clear()


@pytest.mark.parametrize("folder", [USER, "Alice von Q7x", "alice,q7x (work)", "álice {q7x}"])
def test_a_home_may_have_any_name(folder: str, moved: Callable[[str | Path], None]) -> None:
    """Blanks and brackets do not end a path that begins with the user's own folder, whose name is a tilde."""
    moved(f"/home/{folder}")
    shorten = redact_paths.Shortener().text
    assert shorten(f"no /home/{folder}/a/b.bin there") == "no .../b.bin there"
    assert shorten(f"see /home/{folder}, please") == "see ~, please"
    assert shorten(f"see /home/{folder}s/x now").endswith("x now")
    assert folder != USER or redact_paths.Shortener().text(f"in /mnt/x/{folder}") == "in ~"
    assert redact_paths.short_message(f"at /home/{folder}/x.bin, line 3") == "at .../x.bin, line 3"


def test_a_working_directory_above_the_homes_is_no_project(
    tmp_path: Path, moved: Callable[[str | Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path relative to it would begin with a user's name."""
    home = tmp_path / USER
    home.mkdir()
    for here, short in ((tmp_path, "x.py"), (home, "work/x.py")):
        moved(home)
        monkeypatch.chdir(here)
        assert redact_paths.short_path(str(home / "work" / "x.py")) == short


def test_a_file_of_windows_is_shortened_to_its_last_part() -> None:
    """A file of another system has its last part as its name."""
    redact_paths.short_path.cache_clear()
    for file in (r"C:\Users\Bob Smith\my file.py", r"\\server\of bob\my file.py"):
        assert redact_paths.short_path(file) == "my file.py"


def test_unchanged_parts_are_shared(home: Path) -> None:
    """A record without paths is not copied, and a part that occurs twice stays one object."""
    for record in records(home.parent / "plain"):
        assert redact_paths.short_paths(record) is record
        assert redact_paths.redact_paths(record) == record
    frame = FrameDesc(file="a.py", line=1, function="f", code="x")
    plain = (StackDesc(frames=(frame,)), "text", 3)
    assert redact_paths.short_paths(plain) is plain
    private = StackDesc(frames=(msgspec.structs.replace(frame, code="open('/a/b/c')"),))
    both = redact_paths.short_paths((private, private))
    assert both[0] is both[1]
    assert both[0].frames[0].code == "open('.../c')"


def test_secrets_of_the_environment_are_removed_from_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Values of variables with secret names, user names and host names are replaced as words."""
    monkeypatch.setenv("MY_API_KEY", "sk-abcdef")
    monkeypatch.setenv("SHORT_TOKEN", "abc")
    monkeypatch.setattr("platform.node", lambda: "node17")
    monkeypatch.setattr("getpass.getuser", lambda: "bob")
    message = "sk-abcdef abc at node17, node171 of bob, bobcat"
    assert (
        redact_paths.short_message(message)
        == "<MY_API_KEY> abc at <host>, node171 of <user>, bobcat"
    )


def test_help_explains_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    """``run --help`` names data and paths, ``show --help`` the list."""
    for command_name, words in (
        ("run", ("--with-data", "elements of tensors", "4096 bytes", "--with-paths", "absolute")),
        ("show", ("--privacy", "every text")),
    ):
        with pytest.raises(SystemExit):
            cli.main([command_name, "--help"])
        text = re.sub(r"\s+", " ", capsys.readouterr().out)
        for word in words:
            assert word in text
