"""No secrets: what a capture does not hold of the machine that made it, and what it says it holds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from hostile_records import exchanged, places, texts
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import torch_fakeify as tfk
from torch_fakeify import cli, paths, privacy, scalars
from torch_fakeify.desc import FloatNode, FrameDesc, StackDesc
from torch_fakeify.files import private_members, read_capture
from torch_fakeify.page import show_lines
from torch_fakeify.privacy import privacy_lines

if TYPE_CHECKING:
    from collections.abc import Callable

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
    """Run the command in a fresh interpreter, on a machine of Alice's."""
    code = (
        f"import platform, socket; platform.node = socket.gethostname = lambda: {HOST!r};"
        "from torch_fakeify.cli import main; raise SystemExit(main())"
    )
    env = {
        **os.environ, "HOME": str(home), "USER": USER, "LOGNAME": USER, "SECRET_TOKEN": TOKEN,
        "HOSTNAME": HOST, "PYTHONPATH": str(Path(tfk.__file__).parents[1]),
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Alice's home, with a project in it that was recorded twice: as it is, and with everything."""
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
        done = command(home.parent, home, "run", "--out", name, *flags, home / "project/train.py")
        assert "secret_function" in done.stdout, done.stderr
        assert len(list((home.parent / name).iterdir())) == 2, done.stdout + done.stderr
    return home


def members(folder: Path) -> list[tuple[str, str]]:
    """Every member of every file of a folder, as text."""
    found: list[tuple[str, str]] = []
    for path in sorted(folder.glob("*.fkf")):
        with zipfile.ZipFile(path) as archive:
            found.extend(
                (n, archive.read(n).decode("utf-8", "replace")) for n in archive.namelist()
            )
            found.append((path.name, archive.comment.decode()))
    return found


def records(folder: Path) -> list[Any]:
    """The records of every file of a folder."""
    return [read_capture(path) for path in sorted(folder.glob("*.fkf"))]


def instantiated(record: Any) -> list[Any]:
    """The inputs of a frame, rebuilt where its operator is known."""
    with torch.library._scoped_library("mylib", "DEF") as library:
        library.define("load_like(Tensor x, str path) -> Tensor")
        return tfk.Capture(record).instantiate().inputs


def test_nothing_of_the_machine_is_in_a_file(home: Path) -> None:
    """No home, user, host or value of the environment in any member, escaped or not."""
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
    """Stacks, code, sources, messages, arguments, annotations: searched one by one."""
    for record in records(home.parent / "plain"):
        found = [(kind, text) for _, kind, text in texts(record) if re.search(paths.ABSOLUTE, text)]
        assert found == []


def test_files_are_named_from_their_package_on(home: Path) -> None:
    """What is left tells where in the project or the package a line is."""
    files = {
        text for record in records(home.parent / "plain") for _, kind, text in texts(record)
        if kind.endswith("FrameDesc.file")
    }  # fmt: skip
    assert "train.py" in files
    assert "secretpkg/layers/block.py" in files
    assert any(file.startswith("torch/") for file in files)


def test_two_paths_stay_two(home: Path) -> None:
    """Two inputs whose names differ in the folder alone are two inputs still."""
    (record, _) = records(home.parent / "plain")
    names = [entry.source.name for entry in record.inputs if entry.source is not None]
    assert len(names) == len(set(names))
    of_files = [name for name in names if name.startswith("L['files']")]
    assert len(of_files) == 2
    assert all(re.fullmatch(r"L\['files'\]\['\.\.\./first\.bin(~\d)?'\]", n) for n in of_files)
    assert instantiated(record)


def test_with_paths_keeps_them(home: Path) -> None:
    """Whoever asks gets stacks and messages as they were."""
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


def test_both_have_one_graph(home: Path) -> None:
    """Paths are no part of what is computed: but for the texts, the frames are one."""
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
    from torch_fakeify.verdict import masked

    plain, full = records(home.parent / "plain")[1], records(home.parent / "full")[1]
    assert plain.failure.message != full.failure.message
    message = f"cannot open {home}/cache/x12.so at 0x7f00 in /a/b/site-packages/torch/x.py"
    recorded = paths.short_message(message)
    assert masked(recorded) == masked(message) == masked(message.replace("x12", "x7"))
    assert masked(recorded) != masked(message.replace("x12.so", "y.dll"))


def test_show_privacy_lists_what_is_of_the_program(home: Path) -> None:
    """By what it is: files, functions, code, sources, names, arguments, notes, messages."""
    file = min((home.parent / "plain").iterdir())
    done = command(home, home, "show", "--privacy", file)
    assert done.returncode == 0, done.stderr
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
        everything = done.stdout
        assert text in everything, (heading, text)
        assert text in sections[heading], heading
    assert "float32" not in done.stdout


def test_show_privacy_imports_no_torch(home: Path) -> None:
    """It answers at once, also where there is no torch."""
    file = min((home.parent / "plain").iterdir())
    code = (
        "import sys; from torch_fakeify.cli import main; main(sys.argv[1:]);"
        "assert 'torch' not in sys.modules and 'sympy' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "show", "--privacy", file],
        env={**os.environ, "PYTHONPATH": str(Path(tfk.__file__).parents[1])},
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def _kinds(record: Any) -> list[tuple[str, Any]]:
    return places(record, 1)


def test_every_text_is_listed_or_a_word_of_torchs(home: Path) -> None:
    """A telling text in any place of a record is listed: none is forgotten."""
    marker = "Very Telling/Text"
    for record in records(home.parent / "plain"):
        for kind, path in _kinds(record):
            lines = privacy_lines(exchanged(record, path, lambda _: marker))
            assert any(marker in line for line in lines), kind


@pytest.mark.parametrize(
    "path", ["/home/bob/x/y.py", "in '/home/bob/x'", "a\n/home/bob/x\n", r"C:\\Users\\bob\\x.py"]
)
def test_no_place_keeps_an_absolute_path(home: Path, path: str) -> None:
    """In whatever text of a frame a path is put, it is found and shortened."""
    for record in records(home.parent / "plain"):
        for kind, place in _kinds(record):
            field = ".".join(kind.split(".")[-2:])
            if "ExprDesc" in kind or field in privacy._VOCABULARY | privacy._SYMBOLS:
                continue  # words and names of torch's making
            changed = exchanged(record, place, lambda _: path)
            made, _ = private_members(changed)
            left = [text for _, _, text in texts(made) if "bob" in text]
            assert left == [], kind
            assert made == paths.without_paths(changed), kind


def test_a_frame_without_paths_is_itself(home: Path) -> None:
    """And none of it is made anew."""
    for record in records(home.parent / "plain"):
        assert paths.short_paths(record) is record
        assert paths.without_paths(record) == record


@given(st.text(st.sampled_from("//\\\\ab1.:~'\"()[]\n\t é\u2028\x01"), min_size=3, max_size=14))
@settings(max_examples=1000, deadline=None)
@example("C:\\x")
@example("\\\\host\\share")
@example("a\n/b/c")
@example("\x01/b/c")
@example("file:///b")
@example("'/ 1/'")
@example('"/ 1/"')
def test_a_path_shows_in_what_is_written(text: str) -> None:
    """A search through JSON finds whatever would be shortened in a record."""
    stack = StackDesc(frames=(FrameDesc(file="a.py", line=1, function="f", code=text),))
    if paths.short_paths(stack) is not stack:
        assert paths.may_mention_path(msgspec.json.encode(stack))


def test_a_record_is_private_before_it_is_saved(tmp_path: Path) -> None:
    """Whether it is looked at, saved, or given a backend's name first; and it is what is saved."""

    def private(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    gm = make_fx(private, tracing_mode="fake")(torch.ones(2))
    value = gm.graph.find_nodes(op="placeholder")[0].meta["val"]
    gm.graph.find_nodes(op="placeholder")[0].meta["stack_trace"] = "see '/home/bob/x/y.py'"
    made = [tfk.capture(gm, [value]) for _ in range(4)]
    looked, saved, named, whole = (*made[:3], tfk.capture(gm, [value], paths="full"))
    assert "bob" not in repr(looked.desc)
    assert "bob" in repr(whole.desc)
    named = named.with_backend("eager").with_backend(None)
    for i, capture in enumerate((looked, saved, named)):
        capture.save(tmp_path / f"{i}.fkf")
        assert read_capture(tmp_path / f"{i}.fkf") == capture.desc == looked.desc


EVIL = (
    "\x1b]0;owned\x07", "\x1b[2J", "\x9b2J", "\u202eabc", "<script>alert(1)</script>",
    "\"><img src=x onerror=alert(1)>", "javascript:alert(1)", "a\nguards (9)\nb", "a\r\nguards (9)",
    "\x00", "\u2028guards (9)\u2029", "\u200b\u2066", "\ud800", "`$(touch PWNED)`", "%n%s", "a\x85b",
)  # fmt: skip


@pytest.mark.parametrize("lines_of", [show_lines, privacy_lines], ids=["show", "privacy"])
def test_no_text_of_a_file_controls_a_terminal(home: Path, lines_of: Callable[..., Any]) -> None:
    """Each kind of text, exchanged for control sequences: every line is printable, none is forged."""
    failed = records(home.parent / "plain")[1]
    for record in (*records(home.parent / "plain"), failed):
        for kind, path in _kinds(record):
            for evil in EVIL:
                for line in lines_of(exchanged(record, path, lambda _, text=evil: text)):
                    assert line.isprintable(), (kind, evil)
                    assert (
                        not line.startswith(("guards (9)", "b"))
                        or "code" in line
                        or "backend" in line
                    )


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
def test_paths_in_texts_are_shortened(text: str, short: str) -> None:
    """Absolute paths alone: not addresses of the network, nor divisions."""
    assert paths.Shortener().text(text) == short


def test_the_home_itself_is_a_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last part of a home is the name of a user."""
    paths._home.cache_clear()
    monkeypatch.setenv("HOME", f"/some/where/{USER}")
    try:
        assert paths.Shortener().text(f"in /some/where/{USER}") == "in ~"
        assert paths.Shortener().text(f"in /mnt/x/{USER}") == "in ~"
    finally:
        paths._home.cache_clear()


@pytest.mark.parametrize("folder", ["Alice von Q7x", "alice,q7x (work)", "álice {q7x}"])
def test_a_home_may_have_any_name(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blanks and brackets end no path that begins with the user's own folder."""
    paths._home.cache_clear()
    monkeypatch.setenv("HOME", f"/home/{folder}")
    try:
        shorten = paths.Shortener().text
        assert shorten(f"no /home/{folder}/a/b.bin there") == "no .../b.bin there"
        assert shorten(f"see /home/{folder}, please") == "see ~, please"
        assert shorten(f"see /home/{folder}s/x now").endswith("x now")
        assert paths.short_message(f"at /home/{folder}/x.bin, line 3") == "at .../x.bin, line 3"
    finally:
        paths._home.cache_clear()


def test_a_file_of_windows_is_its_last_part() -> None:
    """On another system, whatever its folders are called."""
    paths.short_path.cache_clear()
    for file in (r"C:\Users\Bob Smith\my file.py", r"\\server\of bob\my file.py"):
        assert paths.short_path(file) == "my file.py"


def test_a_working_directory_above_the_homes_is_no_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From there on a path would begin with a user's name."""
    paths._home.cache_clear()
    paths.short_path.cache_clear()
    monkeypatch.setenv("HOME", str(tmp_path / USER))
    monkeypatch.chdir(tmp_path)
    try:
        assert paths.short_path(str(tmp_path / USER / "work" / "x.py")) == "x.py"
        (tmp_path / USER).mkdir()
        monkeypatch.chdir(tmp_path / USER)
        paths.short_path.cache_clear()
        assert paths.short_path(str(tmp_path / USER / "work" / "x.py")) == "work/x.py"
    finally:
        paths._home.cache_clear()
        paths.short_path.cache_clear()


def test_unchanged_parts_are_shared() -> None:
    """A record without paths is itself, and one part stays one part."""
    frame = FrameDesc(file="a.py", line=1, function="f", code="x")
    plain = (StackDesc(frames=(frame,)), "text", 3)
    assert paths.short_paths(plain) is plain
    private = StackDesc(frames=(msgspec.structs.replace(frame, code="open('/a/b/c')"),))
    both = paths.short_paths((private, private))
    assert both[0] is both[1]
    assert both[0].frames[0].code == "open('.../c')"


def test_secrets_of_the_environment_are_no_part_of_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Values of variables whose names say so, names of user and host; whole words alone."""
    monkeypatch.setenv("MY_API_KEY", "sk-abcdef")
    monkeypatch.setenv("SHORT_TOKEN", "abc")
    monkeypatch.setattr("platform.node", lambda: "node17")
    monkeypatch.setattr("getpass.getuser", lambda: "bob")
    message = "sk-abcdef abc at node17, node171 of bob, bobcat"
    assert paths.short_message(message) == "<MY_API_KEY> abc at <host>, node171 of <user>, bobcat"


def test_help_says_what_the_flags_add(capsys: pytest.CaptureFixture[str]) -> None:
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


# --- elements of inputs ---------------------------------------------------------------------------

NUMBER, FRACTION = 123456789, 0.8172635


def scalar_frame(fn: Callable[..., Any], **options: Any) -> Any:
    """The record of a frame whose inputs have two 0-dim tensors."""
    found: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        found.append(tfk.capture(gm, inputs, **options).desc)
        return gm.forward

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        args = torch.tensor(NUMBER), torch.tensor(FRACTION, dtype=torch.float64)
        torch.compile(fn, backend=backend, dynamic=True)(torch.ones(5, 4), *args)
    (desc,) = found
    return desc


def numbers_of(value: Any) -> set[float]:
    """Every number in a record."""
    if isinstance(value, FloatNode):
        return {value.mantissa * 2.0**value.exponent}
    if isinstance(value, (int, float)):
        return {value}
    if isinstance(value, msgspec.Struct):
        value = [getattr(value, name) for name in value.__struct_fields__]
    parts: Any = value if isinstance(value, (tuple, list)) else ()
    return set[float]().union(*map(numbers_of, parts))


def test_elements_that_nothing_asks_for_are_not_recorded() -> None:
    """Torch tracks each 0-dim tensor as a symbol, whose hint is its element."""

    def unasked(x: Any, n: Any, f: Any) -> Any:
        return x[:, 1:] * n + f

    plain, kept = scalar_frame(unasked), scalar_frame(unasked, constants="small")
    assert numbers_of(plain) & {NUMBER, FRACTION} == set()
    assert numbers_of(kept) >= {NUMBER, FRACTION}
    assert [s.name for s in plain.shape_env.symbols] == [s.name for s in kept.shape_env.symbols]
    assert plain.shape_env.guards == kept.shape_env.guards
    for capture in map(tfk.Capture, (plain, kept)):
        for instance in (capture.instantiate(), capture.instantiate(fresh=True)):
            again = tfk.capture(instance.gm, instance.inputs, constants="small")
            assert again.fingerprint() == capture.fingerprint()
    x, n, f = tfk.Capture(plain).materialize()[-3:]
    assert (x.shape, n.item(), f.item()) == ((5, 4), 2, 0.5)


def test_elements_that_a_frame_asks_for_are_hints() -> None:
    """A guard holds for the element alone, and a graph that takes it out goes on with it."""
    desc = scalar_frame(lambda x, n, f: x * n.item() + f if n.item() > 7 else x)
    assert numbers_of(desc) & {NUMBER, FRACTION} == {NUMBER}
    assert tfk.Capture(desc).instantiate()
    lines = privacy_lines(desc)
    assert lines[lines.index("data (2)") + 1 :][:2] == [
        "  L['n'].item() = 123456789",
        "  L['f'].item() = 0.5",
    ]


@pytest.mark.parametrize(
    ("value", "other"),
    [(0, 0), (1, 1), (-1, -1), (7, 2), (-7, -2), (0.0, 0.0), (1.0, 1.0), (0.3, 0.5), (-9.5, -2.0)],
)
def test_an_element_is_exchanged_for_its_like(value: float, other: float) -> None:
    """Sign and size are what an operator may ask about; done again it changes nothing."""
    assert scalars.like(value) == other == scalars.like(other)
    assert type(scalars.like(value)) is type(value)


def test_with_data_records_small_constants(tmp_path: Path) -> None:
    """The elements of what a graph itself holds, and only when asked for."""
    table = torch.tensor([7.25, 1.5])
    gm = make_fx(lambda x: x + table)(torch.ones(2))
    for constants in ("none", "small"):
        recorder = tfk.record(tmp_path / constants, constants=constants)  # pyright: ignore[reportArgumentType]
        recorder(gm, [torch.ones(2)])
        (desc,) = records(tmp_path / constants)
        assert bool(desc.graph.tensor_data) == (constants == "small")
        assert any("8 bytes" in line for line in privacy_lines(desc)) == (constants == "small")
