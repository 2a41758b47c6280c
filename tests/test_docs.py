"""README.md and docs/: their examples print what they show, and the names in them exist."""

from __future__ import annotations

import doctest
import re
import tempfile
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from call_paths import NAME, Arrow, arrows_of, calls_of, find_name, first_missing
from doc_blocks import PAGES, RUN, blocks_of, is_printed, page_folder
from places import ROOT
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from view_zoo import two

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("warm_workers")

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

texts_of_this_torch = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="the texts are those of torch 2.13"
)


def is_run(page: Path) -> bool:
    """Return whether a page has a block that runs."""
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    return any(b.kind in RUN and b.not_run is None and b.file is None for b in blocks)


SLOW = {
    *("README", "quickstart", "command-line", "corpus-in-ci", "recompiles", "wrong-numbers"),
    *("your-own-backend", "trace-logs", "tools", "wrong-fake-kernels", "ranks"),
}
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
STARTING = {
    *("run", "replay_capture", "minify", "fuzz", "ScriptReport", "ReplayReport", "MinifyReport"),
    *("FuzzReport", "check_fakes", "FakesReport", "infer_fake"),
}
"""Names whose examples start processes."""


@texts_of_this_torch
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.sweep] if name in STARTING else []) for name in NAMES],
)
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
    names = re.findall(r"\btorch_fakeify\.([A-Za-z_][\w.]*)", text)
    if page.name == "architecture.md":
        names += NAME.findall(text)
    for name in sorted(set(names)):
        find_name(name.rstrip("."))


def test_every_file_in_the_architecture_page_exists() -> None:
    """The page names files of the package and of the repository."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    files = re.findall(r"`([\w/]*/?[\w*]+\.py)`", text)
    assert len(files) > 15
    missing = [f for f in files if not [*ROOT.glob(f), *(ROOT / "torch_fakeify").glob(f)]]
    assert missing == []


# --- the drawings of the architecture page --------------------------------------------------------


def path_of_a_tensor() -> None:
    """Describe a view of a tensor subclass, write and read its record, and convert it."""
    record = tfk.MetaTensorDescriber().describe_tensor(two(4, 6)[1:3])
    (loaded,) = tfk.loads(tfk.dumps([record]))
    tfk.MetaConverter(FakeTensorMode()).from_desc(loaded)


def path_of_a_frame() -> None:
    """Record a frame, and compile it again from its file."""
    with tempfile.TemporaryDirectory() as folder:
        backend = tfk.record(folder, "eager")
        torch.compile(lambda x: x * x.shape[0], backend=backend, dynamic=True)(torch.ones(3))
        (path,) = Path(folder).glob("*.fkf")
        tfk.Capture.load(path).instantiate().compile("eager")


def path_of_a_guard_node() -> None:
    """Insert guards as nodes, and learn from them that a size of another environment is wrong."""
    gm = make_fx(lambda x: x[1:] if x.shape[0] < 9 else x, tracing_mode="symbolic")(torch.ones(4))
    (placeholder,) = gm.graph.find_nodes(op="placeholder")
    tfk.insert_guards(gm, placeholder.meta["val"].fake_mode.shape_env)
    other = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.ones(9))
    with pytest.raises(tfk.ShapeEnvError):
        tfk.learn(gm, [other])


def path_of_a_handoff() -> None:
    """Compile a frame by a backend that assumes something about a size."""

    def backend(gm: Any, inputs: Any) -> Any:
        assert next(x for x in inputs if isinstance(x, torch.Tensor)).shape[0] > 2
        return gm.forward

    torch.compile(torch.sin, backend=tfk.handoff(backend), dynamic=True)(torch.ones(4))


PATHS = [path_of_a_tensor, path_of_a_frame, path_of_a_guard_node, path_of_a_handoff]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
DRAWINGS = [block.text for block in blocks_of(PAGE) if "-->|" in block.text]


@pytest.mark.parametrize(("path", "drawing"), [*zip(PATHS, DRAWINGS, strict=True)])
def test_every_arrow_of_a_drawing_is_a_call(path: Callable[[], None], drawing: str) -> None:
    """The path calls what the arrows name, from the rooms where they begin, in their order."""
    torch._dynamo.reset()
    arrows = arrows_of(drawing)
    assert len(arrows) >= 8
    assert first_missing(arrows, calls_of(path)) is None


def test_an_arrow_that_is_no_call_is_found() -> None:
    """A drawing with another function, another caller or another order does not pass."""
    torch._dynamo.reset()
    arrows, calls = arrows_of(DRAWINGS[3]), calls_of(path_of_a_handoff)
    at = next(i for i, arrow in enumerate(arrows) if arrow.callee.endswith("FreshEnv.copy_facts"))
    copied = arrows[at]
    other_function = Arrow("transfer", "transfer.fresh_env.FreshEnv.derive_facts")
    other_caller = Arrow("frames", copied.callee)
    for wrong in (other_function, other_caller):
        assert first_missing([*arrows[:at], wrong, *arrows[at + 1 :]], calls) == wrong
    assert first_missing([*arrows[at + 1 :], copied], calls) == copied
