"""Versions of the format and of torch: what is written for whom, and what a newer file meets."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from processes import COMMAND, fresh

import torch_fakeify as tfk
from torch_fakeify import cli
from torch_fakeify.records.tensor import (
    ApplyNode,
    ExprDesc,
    ExprValue,
    FunctionValue,
    IntNode,
    SourceDesc,
)
from torch_fakeify.render.show import show_lines
from torch_fakeify.serialization import capture_file, container
from torch_fakeify.serialization.container import VERSION, pack_container, read_container
from torch_fakeify.serialization.document import Encoder
from torch_fakeify.versions import PRODUCER, is_newer

if TYPE_CHECKING:
    from collections.abc import Callable

RUNNING = torch.__version__.partition("+")[0]
FUTURE = "torch_fakeify 99.1.0"
_WRITER = capture_file.WRITERS[1]


def members_of(desc: Any, limits: tfk.Limits | None = None) -> dict[str, bytes]:
    """Encode a frame as the writer of the first version does."""
    return _WRITER(desc, limits or tfk.Limits())


@pytest.fixture(scope="module")
def capture() -> tfk.Capture:
    """A small frame."""
    gm = torch.fx.symbolic_trace(lambda x: x.sin())
    return tfk.capture(gm, [torch.zeros(3)])


def written(path: Path, members: dict[str, bytes], *, producer: str = FUTURE, **more: Any) -> Path:
    """A file by another release."""
    path.write_bytes(pack_container(members, producer=producer, **more))
    return path


def refusal(action: Callable[[], object], kind: type[tfk.FakeifyError]) -> str:
    """The text of the error that an action ends with."""
    with pytest.raises(kind) as error:
        action()
    assert type(error.value) is kind
    return str(error.value)


# --- writing an older version --------------------------------------------------------------------


def test_the_newest_version_is_written_by_default(capture: tfk.Capture, tmp_path: Path) -> None:
    """To ask for the version that is written anyway changes nothing; each that is written is read."""
    assert max(capture_file.WRITERS) == VERSION
    capture.save(tmp_path / "a.fkf")
    capture.save(tmp_path / "b.fkf", version=VERSION)
    assert (tmp_path / "a.fkf").read_bytes() == (tmp_path / "b.fkf").read_bytes()
    for version in capture_file.WRITERS:
        capture.save(tmp_path / "a.fkf", version=version)
        manifest = read_container(tmp_path / "a.fkf").manifest
        assert manifest.version == version
        assert manifest.producer == f"torch_fakeify {tfk.__version__}"
        assert tfk.Capture.load(tmp_path / "a.fkf").desc == capture.desc


@pytest.mark.parametrize("version", [0, 2, -1, "1"])
def test_a_version_that_nobody_writes_is_refused(
    capture: tfk.Capture, tmp_path: Path, version: Any
) -> None:
    """The error names the versions that can be written, and no file is left."""
    expected = (
        "this release cannot write that format version; expected format version 1; "
        f"found {version!r}. Ask for another one, or write the file with a release that has it"
    )
    path = tmp_path / "a.fkf"
    assert refusal(lambda: capture.save(path, version=version), tfk.WriteError) == expected
    assert refusal(lambda: tfk.record(tmp_path, version=version), tfk.WriteError) == expected
    assert list(tmp_path.iterdir()) == []


def test_recording_writes_the_version_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer of the version is the one that is called, for failed frames too."""
    asked: list[int] = []

    def writer(desc: Any, limits: tfk.Limits) -> dict[str, bytes]:
        asked.append(1)
        return members_of(desc, limits)

    monkeypatch.setattr(capture_file, "WRITERS", {1: writer, 7: members_of})

    def failing(_gm: Any, _inputs: Any) -> Any:
        raise ValueError("no")

    torch._dynamo.reset()
    recorder = tfk.record(tmp_path, inner=failing, version=1)
    with pytest.raises(Exception, match="no"):
        torch.compile(lambda x: x + 1, backend=recorder)(torch.zeros(3))
    assert asked == [1, 1]


@pytest.mark.sweep
def test_the_command_refuses_a_version_before_the_script_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``run --format-version`` is for a version that can be written."""
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('it ran')")
    args = ["run", "--out", str(tmp_path / "out"), "--format-version", "99", str(script)]
    assert cli.main(args) == 2
    assert "cannot write that format version; expected format version 1; found 99" in (
        capsys.readouterr().err
    )


# --- reading a newer one --------------------------------------------------------------------------


def test_a_newer_format_version_is_named(capture: tfk.Capture, tmp_path: Path) -> None:
    """The error says which version it is, who wrote it, and what to do."""
    path = written(tmp_path / "a.fkf", members_of(capture.desc), version=2, torch="3.1.0")
    assert refusal(lambda: tfk.Capture.load(path), tfk.VersionError) == (
        f"{path}:manifest.json: a newer version of torch_fakeify wrote this file; expected format "
        "version 1; found format version 2, written by torch_fakeify 99.1.0 with torch 3.1.0. "
        "Upgrade torch_fakeify, or have the writer save it with version=1"
    )


def test_features_of_a_newer_version_are_named(
    capture: tfk.Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the file needs beside its version is in the error too, and alone where that is all."""
    members, known = members_of(capture.desc), container.FEATURES
    monkeypatch.setattr(container, "FEATURES", frozenset({"data", "shards", "quanta"}))
    features = ["shards", "quanta"]
    one = written(tmp_path / "a.fkf", members, version=2, features=features)
    two = written(tmp_path / "b.fkf", members, features=features)
    monkeypatch.setattr(container, "FEATURES", known)
    assert "found format version 2 and the features quanta, shards, written by" in refusal(
        lambda: tfk.Capture.load(one), tfk.VersionError
    )
    assert refusal(lambda: tfk.Capture.load(two), tfk.VersionError) == (
        f"{two}:manifest.json: the file needs a feature that this version does not support; expected "
        f"data; found quanta, shards, written by {FUTURE}. Upgrade torch_fakeify"
    )


def test_a_newer_manifest_may_have_any_form(
    capture: tfk.Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a newer version the manifest's format, version and features alone are as they are now."""
    real = msgspec.json.encode

    def encode(value: Any, **more: Any) -> bytes:
        if isinstance(value, container.Manifest):
            value = {**msgspec.to_builtins(value), "producer": {"name": "x"}, "members": 7}
        return real(value, **more)

    monkeypatch.setattr(container.msgspec.json, "encode", encode)
    path = written(tmp_path / "a.fkf", members_of(capture.desc), version=2)
    monkeypatch.undo()
    assert "found format version 2, written by an unknown release." in refusal(
        lambda: tfk.Capture.load(path), tfk.VersionError
    )


UNKNOWN: dict[str, tuple[str, tuple[str | int, ...], Any, str]] = {
    "field": (
        *("capture", ("body", "tempo"), 3),
        "capture.json $.body: object contains unknown field `tempo`",
    ),
    "record": (
        *("capture", ("name",), "ScoreDesc"),
        "capture.json $.name: no such record type; found 'ScoreDesc'",
    ),
    "value": (
        *("capture", ("body", "inputs", 0, "value"), {"type": "quaternion", "re": 1}),
        "capture.json $.body.inputs[0].value.type: invalid value 'quaternion'",
    ),
    "table": (
        *("tables", ("meshes",), []),
        "tables.json $: object contains unknown field `meshes`",
    ),
    "expression": (
        *("tables", ("nodes",), [["lambda", 1]]),
        "tables.json $.nodes[0][0]: invalid value 'lambda'",
    ),
    "version of the tables": ("tables", ("version",), 2, "found version 2"),
}
"""By what a newer release adds: the member, the place in it, what is there, and the error."""


@pytest.mark.parametrize("kind", UNKNOWN)
@pytest.mark.parametrize(
    "producer", [FUTURE, PRODUCER, "", "torch_fakeify 0.0.9", "somebody else 99.0"]
)
def test_what_a_newer_release_adds_is_refused_by_name(
    capture: tfk.Capture, tmp_path: Path, kind: str, producer: str
) -> None:
    """In a file of this format version by a newer release, what is unknown is named, and who wrote it.

    Nobody is told to upgrade for a file that this release, or an older one, is said to have made.
    """
    member, (*outer, last), value, named = UNKNOWN[kind]
    members = members_of(capture.desc)
    tree = inside = json.loads(members[f"{member}.json"])
    for step in outer:
        inside = inside[step]
    inside[last] = value
    members[f"{member}.json"] = json.dumps(tree).encode()
    path = written(tmp_path / "a.fkf", members, producer=producer, torch="3.1.0")
    with pytest.raises(tfk.FormatError) as error:
        tfk.Capture.load(path)
    text = str(error.value)
    assert named in text
    if producer != FUTURE:
        assert "written by" not in text
        return
    assert type(error.value) is tfk.VersionError
    start = f"{path}: a newer version of torch_fakeify wrote this file, and this one cannot read it"
    assert text.startswith(f"{start}; expected content that {PRODUCER} supports; found ")
    assert text.endswith(f"(written by {FUTURE} with torch 3.1.0). Upgrade torch_fakeify")


def with_arg(desc: Any, arg: Any) -> Any:
    """The record with an argument for its operator."""
    first, second, *rest = desc.graph.nodes
    second = msgspec.structs.replace(second, args=(*second.args, arg))
    graph = msgspec.structs.replace(desc.graph, nodes=(first, second, *rest))
    return msgspec.structs.replace(desc, graph=graph)


def with_source(desc: Any, source: SourceDesc) -> Any:
    """The record with a source for its input."""
    (entry,) = desc.inputs
    return msgspec.structs.replace(desc, inputs=(msgspec.structs.replace(entry, source=source),))


NAMES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "function": (
        lambda d: with_arg(
            d, ExprValue(expr=ExprDesc(nodes=(IntNode(3), ApplyNode("Wobble", (0,)))))
        ),
        "an unknown function; expected a function of sympy or torch.utils._sympy.functions; "
        "found 'Wobble'",
    ),
    "source": (
        lambda d: with_source(d, SourceDesc(cls="WobbleSource", name="L['x']")),
        "no such source class; expected a class of torch._dynamo.source; found WobbleSource",
    ),
    "operator": (
        lambda d: with_arg(d, FunctionValue(kind="op", name="aten.wobble.default")),
        "torch.ops.aten.wobble",
    ),
}


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize(
    ("producer", "recorded"),
    [(FUTURE, RUNNING), (PRODUCER, "3.1.0"), (FUTURE, "3.1.0"), (PRODUCER, RUNNING)],
)
def test_a_name_that_is_not_known_here_is_refused_with_its_writer(
    capture: tfk.Capture, tmp_path: Path, kind: str, producer: str, recorded: str
) -> None:
    """Such a file can be shown; an instance says what is unknown, and of whom, unless that is this release."""
    change, named = NAMES[kind]
    desc = msgspec.structs.replace(change(capture.desc), torch_version=recorded)
    path = written(tmp_path / "a.fkf", members_of(desc), producer=producer, torch=recorded)
    lines = [*show_lines(desc), *show_lines(desc, torch_names=True)]
    assert any("wobble" in line.lower() or "L['x']" in line for line in lines)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tfk.TorchVersionWarning)
        loaded = tfk.Capture.load(path)
    text = refusal(loaded.instantiate, tfk.UnknownNameError)
    assert named in text
    writer = f": {producer} with torch {recorded} wrote the file, this is torch {RUNNING}"
    if (producer, recorded) == (PRODUCER, RUNNING):
        assert "wrote the file" not in text
    else:
        assert text.endswith(writer)


@pytest.mark.parametrize(
    ("producer", "newer"),
    [
        (PRODUCER, False),
        ("torch_fakeify 0.1", False),
        ("torch_fakeify 0.1.0", False),
        ("torch_fakeify 0.1.1", True),
        ("torch_fakeify 0.2.0.dev1", True),
        ("torch_fakeify 0.10", True),
        ("torch_fakeify 1.0rc1", True),
        ("torch_fakeify 0.0.99", False),
        ("torch_fakeify", False),
        ("torch_fakeify x", False),
        ("other 9.9", False),
        ("", False),
        (f"torch_fakeify {'9' * 5000}", True),
    ],
)
def test_releases_are_compared_by_number(
    monkeypatch: pytest.MonkeyPatch, producer: str, newer: bool
) -> None:
    """What is no release of this package is not newer."""
    monkeypatch.setattr("torch_fakeify.versions.PRODUCER", "torch_fakeify 0.1.0")
    assert is_newer(PRODUCER if producer == PRODUCER else producer) is newer


# --- another torch --------------------------------------------------------------------------------


def of_torch(capture: tfk.Capture, version: str, path: Path) -> Path:
    """The frame as another torch would have recorded it."""
    tfk.Capture(msgspec.structs.replace(capture.desc, torch_version=version)).save(path)
    return path


def test_another_torch_warns_once(capture: tfk.Capture, tmp_path: Path) -> None:
    """Loading warns with a category of its own at the caller's line; an instance adds no second one."""
    path = of_torch(capture, "2.11.0", tmp_path / "a.fkf")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        loaded = tfk.Capture.load(path)
        loaded.instantiate()
        loaded.instantiate(fresh=True)
        loaded.materialize()
    (warning,) = found
    assert warning.category is tfk.TorchVersionWarning
    assert Path(warning.filename) == Path(__file__)
    assert str(warning.message) == (
        f"the capture was recorded with torch '2.11.0', and this is torch {RUNNING!r}: operators, "
        "classes and what torch makes of them may differ"
    )


@pytest.mark.parametrize("version", [RUNNING, ""])
def test_the_same_torch_does_not_warn(capture: tfk.Capture, tmp_path: Path, version: str) -> None:
    """Nor does one that is not known."""
    tfk.Capture.load(of_torch(capture, version, tmp_path / "a.fkf")).instantiate()


def test_a_build_is_no_version(capture: tfk.Capture) -> None:
    """A capture of a machine with CUDA is read without a warning on one without."""
    assert capture.desc.torch_version == torch.__version__.partition("+")[0]


def test_show_says_which_torch_and_does_not_warn(capture: tfk.Capture, tmp_path: Path) -> None:
    """``show`` does not import torch, so it has nothing to compare with."""
    path = of_torch(capture, "2.11.0", tmp_path / "a.fkf")
    done = fresh("-W", "error", *COMMAND, "show", path)
    assert "recorded   torch 2.11.0, " in done.stdout
    assert done.stderr == ""


def test_what_a_version_says_of_itself_is_escaped(capture: tfk.Capture, tmp_path: Path) -> None:
    """A file's versions are text of a file: they send nothing to a terminal."""
    evil = "torch_fakeify 99\x1b]0;x\x07"
    path = written(tmp_path / "a.fkf", Encoder().members(), version=2, producer=evil, torch="\x1b")
    text = refusal(lambda: tfk.Capture.load(path), tfk.VersionError)
    assert text.isprintable()
    with pytest.warns(tfk.TorchVersionWarning) as found:
        tfk.Capture.load(of_torch(capture, "\x1b]0;x\x07", tmp_path / "b.fkf"))
    assert str(found[0].message).isprintable()
