"""The doctor's report on this machine is true; ``test_gate.py`` has those on an unknown torch."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch

import torch_fakeify as tfk
from torch_fakeify import cli, dropin
from torch_fakeify.compat import private_names
from torch_fakeify.compat.attribute_policies import SYM_NODE_ATTRIBUTES
from torch_fakeify.compat.private_names import DROPIN_SITES
from torch_fakeify.tools import doctor


@pytest.fixture(scope="module")
def report() -> tfk.Diagnosis:
    """The report on this machine."""
    return tfk.doctor()


def test_a_supported_torch_has_no_findings(report: tfk.Diagnosis) -> None:
    """Under a supported torch nothing is refused and nothing is unknown."""
    assert (report.torch, report.refused, report.findings) == ("known", None, ())
    assert report.is_well
    assert sum(report.attributes["SymNode"].values()) <= len(SYM_NODE_ATTRIBUTES)


def test_the_versions_are_the_installed_ones(report: tfk.Diagnosis) -> None:
    """The report has the versions of the installed packages, torch's with its build's suffix."""
    assert report.versions["torch"] == torch.__version__
    assert report.versions["python"].startswith(platform.python_version())
    assert report.versions["torch_fakeify"] == f"{tfk.__version__}, writes format version 1"
    installed = {found.metadata["Name"].lower(): found.version for found in distributions()}
    for name, text in report.optional.items():
        assert text == installed.get(name, "not installed")


def test_the_sites_are_those_that_the_drop_in_replaces(report: tfk.Diagnosis) -> None:
    """The report lists exactly the sites that the drop-in replaces, and finds each of them."""
    assert [site.name for site in report.sites if site.found] == list(DROPIN_SITES)
    listed = {f"{place.module}.{place.attribute}" for place in dropin.replaced()}
    replaced = {name for name in listed if name.startswith("torch.")}
    assert {name for name in DROPIN_SITES if name.rpartition(".")[2].startswith("Meta")} == replaced


def test_a_missing_site_is_listed_as_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that torch does not have is listed as not found."""
    monkeypatch.setattr(private_names, "DROPIN_SITES", ("torch._dynamo.trace_rules.NOPE",))
    assert doctor._sites() == (doctor.DropinSite("torch._dynamo.trace_rules.NOPE", False),)


def test_the_report_lists_what_is_supported(report: tfk.Diagnosis) -> None:
    """The report has the answers of torch and the results of what was tried."""
    works = {entry.name: entry.works for entry in report.supported}
    assert works["torch.distributed"] == torch.distributed.is_available()
    assert works["CUDA"] == torch.cuda.is_available()
    tried = [e for e in report.supported if e.name.endswith(" tensors")]
    assert len(tried) == 3
    assert [(e.name, e.note) for e in tried if not e.works] == []
    assert works["drop-in"]
    assert all(entry.note and "\n" not in entry.note for entry in report.supported)


@pytest.mark.parametrize(
    ("compiler", "works", "note"),
    [
        (None, False, "there is no no-such-compiler; set CXX to another compiler"),
        ("exit 1", False, "cxx fails: status 1"),
        ("echo bad luck >&2; exit 3", False, "cxx fails: bad luck"),
        ("echo mine 1.0", True, "mine 1.0"),
    ],
)
def test_the_compiler_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str | None, works: bool, note: str
) -> None:
    """A compiler counts as working only if it builds a program."""
    path = tmp_path / "cxx"
    if compiler is not None:
        path.write_text(f"#!/bin/sh\n{compiler}\n")
        path.chmod(0o755)
    monkeypatch.setenv("CXX", "no-such-compiler" if compiler is None else str(path))
    assert doctor._compiler() == (works, note)


def test_a_probe_that_raises_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report has the exception of a failed probe in one line."""

    def fails() -> tuple[bool, str]:
        raise RuntimeError("first\nsecond")

    monkeypatch.setitem(doctor._WITH_TORCH, "CUDA", fails)
    found = {entry.name: entry for entry in doctor.probe_all(refused=None)}
    assert found["CUDA"] == doctor.Support("CUDA", False, "RuntimeError: first second")
    assert found["strided tensors"].works


def test_the_command_prints_the_report(
    report: tfk.Diagnosis, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report is printed as text and as JSON, with exit status 0 if nothing is wrong."""
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out == f"{report}\n"
    assert cli.main(["doctor", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data.pop("is_well") is True
    assert data["versions"] == report.versions
    assert data["sites"] == [{"name": name, "found": True} for name in DROPIN_SITES]
    assert set(data) == set(tfk.Diagnosis.__dataclass_fields__)


def test_the_report_names_no_folder_of_this_machine(report: tfk.Diagnosis) -> None:
    """The report has no path of this machine, so that it can be pasted into an issue."""
    assert str(Path(tfk.__file__).parent) not in str(report)
    assert f"{Path.home()}{os.sep}" not in str(report)
