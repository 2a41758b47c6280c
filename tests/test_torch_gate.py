"""A torch that this release does not know: let in when nothing is unknown, else refused by name."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from unknown_torch import FINDINGS, NEWER, OLDER, PLANTED, fresh

import torch_fakeify as tfk
from torch_fakeify import cli, torch_census, torch_gate
from torch_fakeify.contexts import _FIELDS_OF_KIND
from torch_fakeify.desc_env import ShapeEnvSettingsDesc
from torch_fakeify.known_fields import RECORD_FIELDS, SOURCE_FIELDS
from torch_fakeify.source_fields import RENDERED_RAW
from torch_fakeify.torch_census import Census
from torch_fakeify.versions import KNOWN_TORCH, known_torch_text, standing_of

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "v1"
NEWEST = KNOWN_TORCH[-1]

# --- which versions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "standing"),
    [
        ("2.13.0", "known"),
        ("2.14.1+cu130", "known"),
        ("2.15.3", "known"),
        ("2.15", "known"),
        ("2.15.0.post2", "known"),
        ("2.15.0+rc1.of.somebody", "known"),
        ("2.15.0rc1", "unknown"),
        ("2.15.0a0+gitdeadbee", "unknown"),
        ("2.13.0a0+gitdeadbee", "unknown"),
        ("2.16.0.dev20260801+cpu", "unknown"),
        ("2.16.0.dev2026", "unknown"),
        ("2.16.0", "unknown"),
        ("2.130.0", "unknown"),
        ("3.13.0", "unknown"),
        ("main", "unknown"),
        ("", "unknown"),
        ("2.12.1", "older"),
        ("2.12.0.dev20260101", "older"),
        ("2.2.0", "older"),
        ("1.15.0", "older"),
    ],
)
def test_how_a_version_stands(version: str, standing: str) -> None:
    """By the first two numbers; what comes before a release is none."""
    assert standing_of(version) == standing


def test_the_known_releases_are_those_that_can_be_installed() -> None:
    """The requirement of the package has the same ends as the list."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'"torch>=(\d+)\.(\d+),<(\d+)\.(\d+)"', text)
    assert found is not None
    low, high = (int(found[1]), int(found[2])), (int(found[3]), int(found[4]))
    assert tuple((low[0], minor) for minor in range(low[1], high[1])) == KNOWN_TORCH
    assert low[0] == high[0]
    assert standing_of(torch.__version__) == "known"


def test_a_known_release_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The census is not even imported."""
    monkeypatch.setitem(sys.modules, "torch_fakeify.torch_census", None)
    torch_gate.check(torch.__version__)
    assert torch_gate.refusal_of("2.15.3") is None


def refused(version: str) -> str:
    """The text of the refusal."""
    with pytest.raises(tfk.VersionError) as error:
        torch_gate.check(version)
    return str(error.value)


def test_an_older_torch_is_refused_without_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """The versions that would do are named."""
    monkeypatch.setitem(sys.modules, "torch_fakeify.torch_census", None)
    assert refused("2.12.1+cu126") == (
        f"this torch is too old for torch_fakeify; expected {known_torch_text()}; found torch "
        "2.12.1+cu126. Upgrade torch. What needs none works: show, diff, report and doctor"
    )


@pytest.mark.parametrize(("count", "shown", "more"), [(1, 1, 0), (7, 7, 0), (8, 7, 1), (99, 7, 92)])
def test_a_long_list_is_clipped(
    monkeypatch: pytest.MonkeyPatch, count: int, shown: int, more: int
) -> None:
    """It says how many more there are, and where all of them stand; none is so long that it hides others."""
    findings = tuple(f"torch._{'x' * 150}.n{i}: a name that is gone" for i in range(count))
    monkeypatch.setattr(torch_census, "take_census", lambda: Census(1, {}, 1, findings))
    text = refused("2.16.0")
    assert text.count("torch._x") == shown
    assert (f", and {more} more. " in text) == (more > 0)
    assert "`torch-fakeify doctor` lists all" in text


# --- as a user meets them ---------------------------------------------------------------------------

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


def test_a_newer_torch_in_which_nothing_is_unknown_works(tmp_path: Path) -> None:
    """One warning, at the line that first needed torch; tensors and a frame make their way."""
    out = fresh(f"import json, sys\n{NEWER}{WORKS}", tmp_path / "a.fkf")
    first, ours, standing, is_well, findings, text = json.loads(out)
    assert (first, standing, is_well, findings) == (1, "unknown", True, [])
    assert ours == [
        [
            "<string>",
            f"this is torch '2.17.0.dev20270101+cpu', and this release knows {known_torch_text()}: the "
            "census finds nothing unknown in it, so it is used; torch-fakeify doctor says more",
        ]
    ]
    assert f"\n  not known: this release is made for {known_torch_text()}\n  it is used\n" in text


REFUSES = """
import contextlib, io, json, sys, warnings
warnings.simplefilter("error")
import torch_fakeify as tfk
from torch_fakeify import cli
from torch_fakeify.diff import differences
from torch_fakeify.files import read_capture
from torch_fakeify.report import html_page

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
    [command(*args) for args in (["demo"], ["run", a], ["fuzz", a], ["minify", a])],
    command("doctor"), command("doctor", "--json"), str(report),
]))
"""


def test_a_newer_torch_in_which_something_is_unknown_is_refused(tmp_path: Path) -> None:
    """Each time, by the list; what needs no torch works, and the doctor has the whole list."""
    files = GOLDEN / "program_cond.fkf", GOLDEN / "program_failed.fkf", tmp_path / "a.html"
    out = fresh(f"{NEWER}{PLANTED}{REFUSES}", *files)
    works, refusals, light, heavy, printed, as_json, text = json.loads(out)
    assert "capture" in refusals
    assert set(works) == {
        *(name for name in tfk.__all__ if name.endswith(("Error", "Desc", "Warning"))),
        *("Diagnosis", "Limits", "__version__", "doctor", "dumps", "from_trace_log", "loads"),
    }
    assert set(works) | set(refusals) == {*tfk.__all__, "dropin", "frontend"}
    expected = (
        "this torch is not one that this release of torch_fakeify knows, and the census finds what no "
        f"table has; expected {known_torch_text()}; found torch 2.17.0.dev20270101+cpu with "
        f"{', '.join(FINDINGS)}. Upgrade torch_fakeify, or use a torch that it knows. "
        "`torch-fakeify doctor` lists all; what needs no torch works: show, diff and report"
    )
    assert refusals == {name: [expected] * 2 for name in refusals}
    assert light == [0, 0, 1, 0]
    assert heavy == [[2, f"torch-fakeify: error: {expected}\n"]] * 4
    assert printed == [1, f"{text}\n"]
    assert "  unknown or gone: 2\n" + "".join(f"    {line}\n" for line in FINDINGS) in text
    status, data = as_json
    assert status == 1
    assert json.loads(data)["findings"] == list(FINDINGS)
    assert json.loads(data)["refused"] == expected


def test_what_asks_a_child_says_why_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``replay`` does not call it a crash, of one capture or of many."""
    (tmp_path / "sitecustomize.py").write_text(OLDER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    capture = str(GOLDEN / "model_step_backward.fkf")
    for args in (["replay", capture], ["replay", "--jobs", "1", capture]):
        assert cli.main(args) == 2
        out, error = capsys.readouterr()
        assert "this torch is too old for torch_fakeify; expected torch 2.13" in error
        assert out == ""


def test_what_asks_a_child_warns_of_an_unknown_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process that asks imports no torch: it hears of it from the child."""
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


def test_without_torch() -> None:
    """The doctor says what it can; a drop-in that was asked for is a warning, no end of the import."""
    out = fresh(WITHOUT, GOLDEN / "program_cond.fkf", TORCH_FAKEIFY_DROPIN="1")
    text, told = out.split("\n--\n")[1].rstrip().rsplit("\n", 1)
    status, caught = json.loads(told)
    assert status == 1
    assert caught == [
        "TORCH_FAKEIFY_DROPIN: it is not installed: " + missing for missing in MISSING
    ]
    assert (
        "\ntorch\n  there is none that can be imported\n  refused: torch cannot be imported, "
        in text
    )
    assert "\ncensus\n  not taken\n" in text
    assert re.search(r"\n  jagged tensors +no   refused, see above\n", text)
    assert re.search(r"\n  replay --dask +(yes|no )  distributed ", text)


MISSING = ["import of torch halted; None in sys.modules"]


# --- the census --------------------------------------------------------------------------------------


def test_nothing_of_this_torch_is_unknown() -> None:
    """All that the tables are held against is in them."""
    census = torch_census.take_census()
    assert census.findings == ()
    assert set(census.attributes) == {"ShapeEnv", "FakeTensorMode", "SymNode", "TrackedFake"}
    assert all(sum(counts.values()) for counts in census.attributes.values())


def test_each_kind_of_change_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """All in one pass, each a line that begins with its name."""
    import dataclasses
    import enum

    from torch._dynamo import source
    from torch._guards import ShapeGuard
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental import symbolic_shapes

    @dataclasses.dataclass(frozen=True)
    class WobbleSource(source.ChainedSource):
        pass

    WobbleSource.__module__ = source.__name__

    @dataclasses.dataclass(frozen=True)
    class LocalSource(source.LocalSource):
        tempo: int = 3

    LocalSource.__module__ = source.__name__

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
    monkeypatch.setattr(source, "WobbleSource", WobbleSource, raising=False)
    monkeypatch.setattr(source, "LocalSource", LocalSource)
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
        "torch._guards.compile_context: a name that is gone",
        "torch.utils._sympy.value_ranges.ValueRanges: a name that is gone",
    ]


def test_the_tables_have_what_the_encoders_have() -> None:
    """Of contexts, settings and sources, whose encoders have lists of fields of their own."""
    shapes = "torch.fx.experimental.symbolic_shapes"
    for kind, fields in _FIELDS_OF_KIND.items():
        name = {"symint": "SymInt"}.get(kind, kind.capitalize())
        known = RECORD_FIELDS[f"{shapes}.{name}SymbolicContext"]
        assert known - {"shape_env_to_source_to_symbol_cache"} == set(fields)
    assert RECORD_FIELDS[f"{shapes}.ShapeEnvSettings"] == set(
        ShapeEnvSettingsDesc.__struct_fields__
    )
    assert all(field in SOURCE_FIELDS[name] for name, field in RENDERED_RAW)
