"""An unknown torch is accepted if the census has no findings, and otherwise refused by name."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from places import GOLDEN, ROOT
from processes import fresh
from torch._dynamo import source
from torch._guards import ShapeGuard
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import symbolic_shapes

import torch_fakeify as tfk
from torch_fakeify import cli
from torch_fakeify.compat import census as torch_census
from torch_fakeify.compat import gate
from torch_fakeify.compat.census import Census
from torch_fakeify.compat.known_fields import RECORD_FIELDS, SOURCE_FIELDS
from torch_fakeify.encoding.contexts import _FIELDS_OF_KIND
from torch_fakeify.encoding.sources import RENDERED_RAW
from torch_fakeify.records.shape_env import ShapeEnvSettingsDesc
from torch_fakeify.records.tensor import ContextDesc
from torch_fakeify.versions import SUPPORTED_TORCH, support_status, supported_torch_text

if TYPE_CHECKING:
    from pathlib import Path

# A torch of another version, played by the one that is here: text in front of a program.
NEWER = "import torch; torch.__version__ = '2.17.0.dev20270101+cpu'\n"
"""Nothing is unknown in it."""

PLANTED = """
import torch._functorch.aot_autograd
from torch.fx.experimental.symbolic_shapes import ShapeEnv
def planted(self, *args, known=ShapeEnv.__init__, **more):
    known(self, *args, **more)
    self.tempo = 3
ShapeEnv.__init__ = planted
del torch._logging._internal.LazyTraceHandler
"""
"""After `NEWER`: an attribute that no table has, and a private name that is gone."""

FINDINGS = (
    "torch._logging._internal.LazyTraceHandler: a name that is missing",
    "ShapeEnv.tempo: an attribute that no table has",
)
"""What the census says of `PLANTED`."""

OLDER = "import torch; torch.__version__ = '2.12.1'\n"


# --- which versions ---------------------------------------------------------------------------------


VERSIONS = {
    "known": "2.13.0 2.14.1+cu130 2.15.3 2.15 2.15.0.post2 2.15.0+rc1.of.somebody",
    "unknown": "2.15.0rc1 2.15.0a0+gitdeadbee 2.13.0a0+gitdeadbee 2.16.0.dev20260801+cpu 2.16.0.dev2026 "
    "2.16.0 2.130.0 3.13.0 main",
    "older": "2.12.1 2.12.0.dev20260101 2.2.0 1.15.0",
}


@pytest.mark.parametrize("standing", VERSIONS)
def test_the_status_of_a_version(standing: str) -> None:
    """The first two numbers decide; a pre-release is not the release."""
    for version in VERSIONS[standing].split():
        assert support_status(version) == standing, version
    assert support_status("") == "unknown"


def test_the_supported_releases_are_those_that_can_be_installed() -> None:
    """The requirement of the package has the same ends as the list."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'"torch>=(\d+)\.(\d+),<(\d+)\.(\d+)"', text)
    assert found is not None
    low, high = (int(found[1]), int(found[2])), (int(found[3]), int(found[4]))
    assert tuple((low[0], minor) for minor in range(low[1], high[1])) == SUPPORTED_TORCH
    assert low[0] == high[0]
    assert support_status(torch.__version__) == "known"


def refused(version: str) -> str:
    """Return the text of the refusal."""
    with pytest.raises(tfk.VersionError) as error:
        gate.check_torch_version(version)
    return str(error.value)


def test_known_and_older_releases_take_no_census(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not even imported; an older one is refused, and the error has the supported versions."""
    monkeypatch.setitem(sys.modules, "torch_fakeify.compat.census", None)
    gate.check_torch_version(torch.__version__)
    assert gate.version_error("2.15.3") is None
    assert refused("2.12.1+cu126") == (
        f"this torch is too old for torch_fakeify; expected {supported_torch_text()}; found torch "
        "2.12.1+cu126. Upgrade torch. Commands without torch work: show, diff, report and doctor"
    )


@pytest.mark.parametrize(("count", "shown", "more"), [(1, 1, 0), (7, 7, 0), (8, 7, 1), (99, 7, 92)])
def test_a_long_list_of_findings_is_truncated(
    monkeypatch: pytest.MonkeyPatch, count: int, shown: int, more: int
) -> None:
    """The error has the number of the others, and the command that lists all."""
    findings = tuple(f"torch._{'x' * 150}.n{i}: a name that is missing" for i in range(count))
    monkeypatch.setattr(torch_census, "take_census", lambda: Census(1, {}, 1, findings))
    text = refused("2.16.0")
    assert text.count("torch._x") == shown
    assert (f", and {more} more. " in text) == (more > 0)
    assert "`torch-fakeify doctor` lists all" in text


# --- as a user sees them ---------------------------------------------------------------------------

WORKS = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch_fakeify as tfk
    tfk.describe_tensor; first = [w for w in caught if w.category is tfk.TorchVersionWarning]
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    t = torch.ones(2, 3).t()
    (record,) = tfk.loads(tfk.dumps([tfk.describe_tensor(t)]))
    fake = tfk.MetaConverter(FakeTensorMode(shape_env=ShapeEnv())).from_desc(record)
    assert (fake.shape, fake.stride()) == (t.shape, t.stride())
    seen = []
    def backend(gm, inputs):
        tfk.capture(gm, inputs).save(sys.argv[1])
        return gm
    torch.compile(lambda x: x.relu() if x.shape[0] >= 4 else x, backend=backend, dynamic=True)(torch.ones(5))
    capture = tfk.Capture.load(sys.argv[1])
    instance = capture.instantiate(fresh=True)
    assert [str(g.expr) for g in instance.shape_env.guards] == ["s77 >= 4"]
    assert tfk.capture(instance.gm, instance.inputs).fingerprint() == capture.fingerprint()
    assert capture.desc.torch_version == "2.17.0.dev20270101"
    report = tfk.doctor()
ours = [w for w in caught if w.category is tfk.TorchVersionWarning]
print(json.dumps([
    len(first), [[w.filename, str(w.message)] for w in ours],
    report.torch, report.is_well, report.findings, str(report),
]))
"""


@pytest.mark.sweep
def test_a_newer_torch_without_findings_works(tmp_path: Path) -> None:
    """There is one warning, at the line that first needs torch; tensors and a frame work."""
    out = fresh("-c", f"import json, sys\n{NEWER}{WORKS}", tmp_path / "a.fkf").stdout
    first, ours, standing, is_well, findings, text = json.loads(out)
    assert (first, standing, is_well, findings) == (1, "unknown", True, [])
    assert ours == [
        [
            "<string>",
            f"this is torch '2.17.0.dev20270101+cpu', and this release supports {supported_torch_text()}: the "
            "census finds nothing unknown, so it is used; torch-fakeify doctor has details",
        ]
    ]
    assert text.startswith(
        "All is well: nothing of torch 2.17.0.dev20270101 is unknown here, although this release is made "
        f"for {supported_torch_text()}.\n"
    )


REFUSES = """
import contextlib, io, json, sys, warnings
warnings.simplefilter("error")
import torch_fakeify as tfk
from torch_fakeify import cli
from torch_fakeify.render.diff import differences
from torch_fakeify.serialization.capture_file import read_capture
from torch_fakeify.render.report.page import html_page

a, b, out = sys.argv[1:]
def command(*args):
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        status = cli.main(args)
    return status, said.getvalue()
works, refused = [], {}
for name in [*tfk.__all__, "dropin", "frontend"] * 2:
    try:
        getattr(tfk, name)
        works.append(name)
    except tfk.VersionError as error:
        refused.setdefault(name, []).append(str(error))
for path in (a, b):
    assert html_page(read_capture(path))
assert differences(read_capture(a), read_capture(b))
report = tfk.doctor()
print(json.dumps([
    sorted(set(works)), refused,
    [command(*args)[0] for args in (["show", a], ["diff", a, a], ["diff", a, b], ["report", a, "-o", out])],
    [command(*args) for args in (["demo", "--check"], ["fuzz", a], ["minify", a])],
    command("doctor"), command("doctor", "--json"), str(report),
]))
"""


@pytest.mark.sweep
def test_a_newer_torch_with_findings_is_refused(tmp_path: Path) -> None:
    """Each use raises; commands without torch work, and the doctor lists all findings."""
    files = GOLDEN / "program_cond.fkf", GOLDEN / "program_failed.fkf", tmp_path / "a.html"
    out = fresh("-c", f"{NEWER}{PLANTED}{REFUSES}", *files).stdout
    works, refusals, light, heavy, printed, as_json, text = json.loads(out)
    assert "capture" in refusals
    assert set(works) == {
        *(name for name in tfk.__all__ if name.endswith(("Error", "Desc", "Warning"))),
        *("Diagnosis", "Limits", "__version__", "doctor", "dumps", "from_trace_log", "loads"),
        # These read files, or ask a process that refuses torch.
        *("diff", "FrameDiff", "report", "WrittenReport", "run", "ScriptReport"),
        *("replay_capture", "ReplayReport", "MinifyReport"),
    }
    assert set(works) | set(refusals) == {*tfk.__all__, "dropin", "frontend"}
    expected = (
        "this release of torch_fakeify does not support this torch, and the census finds names that no "
        f"table lists; expected {supported_torch_text()}; found torch 2.17.0.dev20270101+cpu with "
        f"{', '.join(FINDINGS)}. Upgrade torch_fakeify, or use a supported torch. "
        "`torch-fakeify doctor` lists all findings; commands without torch work: show, diff and report"
    )
    assert refusals == {name: [expected] * 2 for name in refusals}
    assert light == [0, 0, 1, 0]
    assert heavy == [[2, f"torch-fakeify: error: {expected}\n"]] * 3
    assert printed == [1, f"{text}\n"]
    assert (
        "  unknown or missing: 2\n" + "".join(f"    {line}\n" for line in FINDINGS) in f"{text}\n"
    )
    status, data = as_json
    assert status == 1
    assert json.loads(data)["findings"] == list(FINDINGS)
    assert json.loads(data)["refused"] == expected


@pytest.mark.sweep
def test_a_refusal_in_a_child_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``replay`` does not report a crash, and ``run`` does not start the script."""
    (tmp_path / "sitecustomize.py").write_text(OLDER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    capture = str(GOLDEN / "model_step_backward.fkf")
    for args in (["replay", capture], ["replay", "--jobs", "1", capture], ["run", capture]):
        assert cli.main(args) == 2
        out, error = capsys.readouterr()
        assert "this torch is too old for torch_fakeify; expected torch 2.13" in error
        assert out == ""


@pytest.mark.sweep
def test_a_warning_in_a_child_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parent process does not import torch and gets the warning from the child."""
    (tmp_path / "sitecustomize.py").write_text(NEWER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.warns(tfk.TorchVersionWarning, match=r"'2.17.0.dev20270101\+cpu'.*so it is used"):
        assert cli.main(["replay", "--backend", "eager", str(GOLDEN / "model_bert.fkf")]) == 0
    assert capsys.readouterr().out.startswith("compiles\n")


WITHOUT = """
import json, sys, warnings
sys.modules["torch"] = None
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch_fakeify as tfk
    from torch_fakeify import cli
assert cli.main(["show", sys.argv[1]]) == 0
print("--")
status = cli.main(["doctor"])
print(json.dumps([status, [str(w.message) for w in caught]]))
"""


def test_the_doctor_runs_without_torch() -> None:
    """The doctor reports what it can, and an import with the drop-in gives a warning."""
    out = fresh("-c", WITHOUT, GOLDEN / "program_cond.fkf", TORCH_FAKEIFY_DROPIN="1").stdout
    text, result = out.split("\n--\n")[1].rstrip().rsplit("\n", 1)
    status, caught = json.loads(result)
    assert status == 1
    missing = "import of torch halted; None in sys.modules"
    assert caught == [f"TORCH_FAKEIFY_DROPIN: it is not installed: {missing}"]
    assert (
        "There is no torch that can be imported; install torch 2.13, 2.14 or 2.15.\n"
        "  there is none that can be imported\n  refused: torch cannot be imported, " in text
    )
    assert re.search(r"\n  jagged tensors +refused, see above\n", text)
    assert re.search(r"\n  replay --dask +distributed ", text)


# --- the census --------------------------------------------------------------------------------------


def test_this_torch_has_no_findings() -> None:
    """Everything that the tables are compared with is in them."""
    census = torch_census.take_census()
    assert census.findings == ()
    assert set(census.attributes) == {"ShapeEnv", "FakeTensorMode", "SymNode", "TrackedFake"}
    assert all(sum(counts.values()) for counts in census.attributes.values())


def test_each_kind_of_change_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One census finds all of them, and each line begins with the name."""

    @dataclasses.dataclass(frozen=True)
    class WobbleSource(source.ChainedSource):
        pass

    @dataclasses.dataclass(frozen=True)
    class LocalSource(source.LocalSource):
        tempo: int = 3

    @dataclasses.dataclass(frozen=True)
    class StatelessSymbolicContext(symbolic_shapes.StatelessSymbolicContext):
        pitch: int = 3

    class TrackedFake(symbolic_shapes.TrackedFake):
        __slots__ = ("chord",)

    class NewMode(FakeTensorMode):
        def later(self) -> None:
            self.rest = 1

    def fails(self: object, *args: object, **more: object) -> None:
        raise TypeError("another constructor")

    kinds = enum.Enum("DimDynamic", "DYNAMIC DUCK STATIC UNBACKED INFER_STRIDE WOBBLE")
    NewMode.__name__ = "FakeTensorMode"
    for cls in (WobbleSource, LocalSource):
        cls.__module__ = source.__name__
        monkeypatch.setattr(source, cls.__name__, cls, raising=False)
    monkeypatch.setattr(symbolic_shapes, "StatelessSymbolicContext", StatelessSymbolicContext)
    monkeypatch.setattr(symbolic_shapes, "TrackedFake", TrackedFake)
    monkeypatch.setattr(symbolic_shapes, "DimDynamic", kinds)
    monkeypatch.setattr("torch._subclasses.fake_tensor.FakeTensorMode", NewMode)
    monkeypatch.setattr("torch.fx.experimental.sym_node.SymNode.__init__", fails)
    monkeypatch.setattr(ShapeGuard, "_fields", (*ShapeGuard._fields, "beat"))
    monkeypatch.delattr("torch._guards.compile_context")
    monkeypatch.delattr("torch.utils._sympy.value_ranges.ValueRanges")
    assert sorted(torch_census.take_census.__wrapped__().findings) == [
        "DimDynamic.WOBBLE: a member that no table has",
        "FakeTensorMode.rest: an attribute that no table has",
        "LocalSource.tempo: a field that no table has",
        "ShapeGuard.beat: a field that no table has",
        "StatelessSymbolicContext.pitch: a field that no table has",
        "SymNode: cannot be looked at, TypeError: another constructor",
        "TrackedFake.chord: an attribute that no table has",
        "WobbleSource: a source class that no table has",
        "torch._guards.compile_context: a name that is missing",
        "torch.utils._sympy.value_ranges.ValueRanges: a name that is missing",
    ]


def test_the_tables_have_the_fields_of_the_encoders() -> None:
    """The records of contexts, settings and sources have the fields of the tables."""
    sizes = {
        *("dynamic_sizes", "dynamic_strides", "constraint_sizes", "constraint_strides"),
        *("specialize_on", "view_base_context", "shape_ids", "unbacked_bounds"),
    }
    stateful = {*sizes, "tensor_source", "excluded_sizes"}
    cache = {"shape_env_to_source_to_symbol_cache"}
    assert {kind: {*fields} - cache for kind, fields in _FIELDS_OF_KIND.items()} == {
        "stateless": sizes,
        "stateful": stateful,
        "symint": {"constraint"},
        "subclass": {*stateful, "inner_contexts", "track_outer_size_stride"},
    }
    recorded = {"kind"}.union(*_FIELDS_OF_KIND.values()) - cache
    assert recorded == set(ContextDesc.__struct_fields__)
    assert RECORD_FIELDS["torch.fx.experimental.symbolic_shapes.ShapeEnvSettings"] == set(
        ShapeEnvSettingsDesc.__struct_fields__
    )
    assert all(field in SOURCE_FIELDS[name] for name, field in RENDERED_RAW)
