"""README.md and docs/: their examples print what they show, and the names in them exist."""

from __future__ import annotations

import doctest
import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch
from doc_blocks import PAGES, RUN, blocks_of, is_printed, page_folder
from places import ROOT

import torch_fakeify as tfk

if TYPE_CHECKING:
    from pathlib import Path

ROOMS = [path.parent.name for path in (ROOT / "torch_fakeify").glob("*/__init__.py")]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

texts_of_this_torch = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="the texts are those of torch 2.13"
)


def is_run(page: Path) -> bool:
    """Return whether a page has a block that runs."""
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    return any(b.kind in RUN and b.not_run is None and b.file is None for b in blocks)


SLOW = {"README", "quickstart", "command-line", "corpus-in-ci", "recompiles", "wrong-numbers"}
"""Pages with many commands, whose parts other tests have: `.ci/run` runs them."""


def pages_to_run() -> list[Any]:
    """Return the pages that have a block to run."""
    return [
        pytest.param(
            page,
            id=str(page.relative_to(ROOT)),
            marks=[pytest.mark.sweep] if page.stem in SLOW else [],
        )
        for page in PAGES
        if is_run(page)
    ]


@texts_of_this_torch
@pytest.mark.parametrize("page", pages_to_run())
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    """Python blocks, commands and examples print what the page shows."""
    with page_folder(tmp_path) as runner:
        for block in blocks_of(page.read_text(encoding="utf-8")):
            for expected, found in runner.run(block):
                assert is_printed(expected, found), f"{page.name}:{block.line}\n{found}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_has_a_kind(page: Path) -> None:
    """Each block of a page has one of the known kinds, so that none is code that nothing runs."""
    text = page.read_text(encoding="utf-8")
    assert len(re.findall(r"^```", text, re.MULTILINE)) == 2 * len([*blocks_of(text)])
    data = ("text", "toml", "yaml", "json", "{")
    for block in blocks_of(text):
        assert block.kind in RUN or block.not_run or block.file or block.kind.startswith(data)
    assert sum(block.not_run is not None for block in blocks_of(text)) <= 3


NAMES = [name for name in tfk.__all__ if name != "__version__"]


@texts_of_this_torch
@pytest.mark.parametrize("name", NAMES)
def test_the_examples_of_a_docstring_run(name: str, tmp_path: Path) -> None:
    """The examples of a public name and of its methods print what they show."""
    value = getattr(tfk, name)
    module = import_module(value.__module__)
    variables: dict[str, Any] = {"torch": torch, "tfk": tfk}
    failed: list[str] = []
    with page_folder(tmp_path):
        for example in doctest.DocTestFinder().find(value, name, module, globs=variables):
            doctest.DocTestRunner(optionflags=FLAGS).run(example, out=failed.append)
    assert not failed, "".join(failed)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("Error")])
def test_a_public_name_has_an_example(name: str) -> None:
    """Every public name except the errors has an example."""
    assert ">>> " in getattr(tfk, name).__doc__


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_name_in_a_page_exists(page: Path) -> None:
    """Names of the package (``tfk.x``) and of a room (``describe.describer.x``) can be resolved."""
    text = re.sub(r"\btfk\.(?=[a-z_]+\b)", "torch_fakeify.", page.read_text(encoding="utf-8"))
    rooms = "|".join(sorted(ROOMS))
    names = re.findall(r"\btorch_fakeify\.([A-Za-z_][\w.]*)", text)
    if page.name == "architecture.md":
        names += re.findall(rf"(?<![\w./])((?:{rooms})\.[a-z_]\w*[\w.]*)", text)
    for name in sorted(set(names)):
        find_name(name.rstrip("."))


def test_every_file_in_the_architecture_page_exists() -> None:
    """The page names files of the package and of the repository."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    files = re.findall(r"`([\w/]*/?[\w*]+\.py)`", text)
    assert len(files) > 15
    missing = [f for f in files if not [*ROOT.glob(f), *(ROOT / "torch_fakeify").glob(f)]]
    assert missing == []


def find_name(name: str) -> object:
    """Return the object that a dotted name of the package denotes; raise if there is none."""
    found: Any = tfk
    path = "torch_fakeify"
    for part in name.split("."):
        path = f"{path}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            found = import_module(path)
    return found
