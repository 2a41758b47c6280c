"""The golden corpus: files of every kind that were written once, and are read by every release."""

from __future__ import annotations

import re
import warnings
from typing import Any

import golden_text  # noqa: F401, it imports the classes of the corpus
import pytest
from golden_cases import NOT_FRESH, cases, documents
from golden_coverage import expected, observed
from torch._subclasses.fake_tensor import FakeTensor
from write_golden import ROOT, SUMS, document_text, sums, text_of

import torch_fakeify as tfk
from torch_fakeify.records.tensor import SymDesc
from torch_fakeify.serialization.capture_file import WRITERS, read_capture
from torch_fakeify.serialization.container import VERSION, Limits, read_container

# What torch says of its own prototypes when it makes such a tensor again.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of SparseSemiStructuredTensor", "ignore:Sparse .* support is in beta"
)

NAMES = sorted(path.stem for path in ROOT.glob("*.fkf"))
DOCUMENTS = sorted(path.stem for path in ROOT.glob("*.json"))

UNREACHABLE = {
    "ContextDesc.dynamic_strides = 'STATIC'": "torch refuses it",
    "ContextDesc.dynamic_strides = 'UNBACKED'": "torch refuses it",
}
"""What the types of records allow and nothing makes, and why."""

NEWER = {
    "dtype bcomplex32",
    "source ContextVarGetSource",
    "source ListReverseIteratorBackingListSource",
    "source UnwrapCollectiveTensorSource",
}
"""Of torch 2.14 and 2.15: no file has them that torch 2.13 can read."""


def load(name: str) -> tfk.Capture:
    """A file of the corpus, whatever torch wrote it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tfk.TorchVersionWarning)
        return tfk.Capture.load(ROOT / f"{name}.fkf")


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_file_means_what_it_meant(name: str) -> None:
    """Its page, its records and its instance are, word for word, those of the release that wrote it."""
    text, found = (ROOT / f"{name}.txt").read_text(encoding="utf-8"), text_of(name, load(name))
    if name == "sparse_mkldnn" and "is_mkldnn" in vars(FakeTensor):
        # As of torch 2.14 the fake is an mkldnn tensor itself, which the writer's could not be.
        text, found = (re.sub("(?m)^input .*$", "input", part) for part in (text, found))
    assert found == text


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_golden_document_means_what_it_meant(name: str) -> None:
    """Its guards and policies are those that were written, and are written as the same bytes."""
    data = (ROOT / f"{name}.json").read_bytes()
    records = tfk.loads(data)
    assert tfk.dumps(records) == data
    assert (ROOT / f"{name}.txt").read_text(encoding="utf-8") == document_text(records)


def numbers(instance: tfk.Instance) -> list[Any]:
    """The sizes of an instance's inputs with hints in place of symbols, which may have other names."""
    found: list[Any] = []
    for value in instance.inputs:
        sizes = value.shape if hasattr(value, "shape") else [value]
        found.append([n.node.hint if hasattr(n, "node") else n for n in sizes])
    return found


def in_an_environment() -> list[Any]:
    """The files whose frame has a ``ShapeEnv`` whose facts hold of its inputs."""
    return [
        pytest.param(name, marks=pytest.mark.sweep if name.startswith("model_") else ())
        for name in NAMES
        if name not in NOT_FRESH and read_capture(ROOT / f"{name}.fkf").shape_env is not None
    ]


@pytest.mark.parametrize("name", in_an_environment())
def test_a_golden_file_has_a_fresh_instance(name: str) -> None:
    """A ``ShapeEnv`` that learns the recorded facts ends with inputs of the same numbers."""
    capture = load(name)
    fresh = capture.instantiate(fresh=True)
    ragged = [isinstance(d.sym, SymDesc) and d.sym.hint is None for d in capture.desc.inputs]
    assert len(fresh.inputs) == len(capture.desc.inputs)
    if not any(ragged) and "jagged" not in name:
        assert str(numbers(fresh)) == str(numbers(capture.instantiate()))


def test_every_kind_is_in_the_corpus() -> None:
    """A record, field, function, source or other kind that the code has is in some golden file."""
    captures = [read_capture(ROOT / f"{name}.fkf") for name in NAMES]
    documents = [tfk.loads((ROOT / f"{name}.json").read_bytes()) for name in DOCUMENTS]
    found = observed([*captures, *(part for parts in documents for part in parts.values())])
    missing = expected() - found - set(UNREACHABLE) - NEWER
    assert not missing, "write a file with `python tests/harness/write_golden.py NAME` for: " + str(
        sorted(missing)
    )
    assert set(UNREACHABLE) <= expected() - found


def test_the_corpus_is_never_written_again() -> None:
    """Every file is there, and has the bytes that it had."""
    known = dict(reversed(line.split("  ")) for line in SUMS.read_text().splitlines())
    assert sums() == known


def test_every_case_has_its_two_files() -> None:
    """The script knows how each file came to be, and no file lacks its text."""
    stems = sorted([*cases(), *cases(), *documents(), *documents()])
    assert sorted(path.stem for path in ROOT.iterdir() if path != SUMS) == stems


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_file_is_written_as_it_was(name: str) -> None:
    """The form of a file is frozen, and a folder holds those of one format version."""
    manifest, members = read_container(ROOT / f"{name}.fkf")
    assert ROOT.name == f"v{manifest.version}"
    assert manifest.version <= VERSION
    if name != "process_groups":  # whose expressions were written in another order
        assert WRITERS[VERSION](read_capture(ROOT / f"{name}.fkf"), Limits()) == members
