"""A pytest plugin: ``pytest --fakeify-corpus DIR`` collects each capture below a directory as a test.

Without the option it does and imports nothing. Captures of equal frames are compiled once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch_fakeify.corpus.jobs import Job
    from torch_fakeify.records.frame import CaptureDesc

_OPTION = "--fakeify-corpus"
_KEYS = "fakeify_keys"
"""The key by which pytest-xdist workers get the frame keys from the controller."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, whose names begin with ``--fakeify-``."""
    group = parser.getgroup("fakeify", "captures of torch.compile frames (torch_fakeify)")
    group.addoption(
        _OPTION,
        action="append",
        default=[],
        metavar="DIR",
        help="make each capture (*.fkf) in DIR and below a test: it passes if it compiles, or fails as "
        "it was recorded. Alone on the command line, there are no other tests; may be repeated",
    )
    group.addoption(
        "--fakeify-backend",
        metavar="NAME|MODULE:ATTR",
        help="that compiles the captures; default: the recorded one of each",
    )
    group.addoption(
        "--fakeify-import",
        action="append",
        default=[],
        metavar="MODULE",
        help="import it first, as one that registers a backend or operators; may be repeated",
    )
    group.addoption("--fakeify-device", metavar="D", help="put what was on an accelerator there")
    group.addoption(
        "--fakeify-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds for one capture; default: 600",
    )
    group.addoption(
        "--fakeify-memory",
        type=int,
        metavar="MIB",
        help="that one compilation may hold; default: a part of what is free",
    )
    group.addoption(
        "--fakeify-trust",
        action="store_true",
        help="read files that ask for more than captures of their size need",
    )
    group.addoption(
        "--fakeify-all",
        action="store_true",
        help="compile every capture, also several of one frame",
    )


@dataclass
class _Corpus:
    """The values of the options, and the captures found."""

    job: Job
    every: bool
    files: set[Path]
    folders: set[Path]
    """Directories that have captures in them or below."""
    keys: dict[str, str] = field(default_factory=dict[str, str])
    """By file, a key that is equal for captures of equal frames."""

    def keys_of(self, files: Iterable[Path]) -> dict[str, str]:
        from torch_fakeify.corpus.runner import read_keyed

        from .errors import FormatError

        for file in files:
            if str(file) not in self.keys:
                try:
                    key = repr(read_keyed(file, self.job)[1])
                except FormatError:
                    key = ""
                self.keys[str(file)] = key
        return self.keys


_CORPUS = pytest.StashKey[_Corpus]()


def pytest_configure(config: pytest.Config) -> None:
    """Find the captures, and add their directories to the places that pytest collects."""
    option: Any = config.option
    if not option.fakeify_corpus:
        return
    from torch_fakeify.corpus.jobs import Job
    from torch_fakeify.tools.capture_files import find_captures

    from .errors import FormatError

    roots = [_absolute(config, path) for path in option.fakeify_corpus]
    for root in roots:
        if not root.is_dir():
            raise pytest.UsageError(f"{_OPTION}: no such directory: {root}")
    try:
        found = [file.path for root in roots for file in find_captures([root])]
    except FormatError as error:
        raise pytest.UsageError(f"{_OPTION}: {error}") from error
    worker: dict[str, Any] = getattr(config, "workerinput", {})
    memory: int | None = option.fakeify_memory
    job = Job.compiling(
        option.fakeify_backend,
        option.fakeify_import,
        device=option.fakeify_device,
        timeout=option.fakeify_timeout,
        memory=None if memory is None else memory << 20,
        share=worker.get("workercount", 1),
        trust=option.fakeify_trust,
    )
    folders = {folder for file in found for folder in file.parents}
    corpus = _Corpus(job, option.fakeify_all, set(found), folders)
    corpus.keys.update(worker.get(_KEYS, {}))
    config.stash[_CORPUS] = corpus
    if not worker:  # the controller passes the places to a worker
        config.args[:] = _places(config, roots)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the interpreter in which captures are compiled."""
    if config.stash.get(_CORPUS, None) is not None:
        from torch_fakeify.corpus.jobs import end_server

        end_server()


def _places(config: pytest.Config, roots: list[Path]) -> list[str]:
    """Return the places to collect; a corpus of which a part is requested is not added as a whole."""
    explicit = config.args_source is pytest.Config.ArgsSource.ARGS
    typed = any(str(arg).startswith(_OPTION) for arg in config.invocation_params.args)
    places = [] if typed and not explicit else config.args
    listed = [_absolute(config, place.partition("::")[0]) for place in places]
    more = [
        str(root)
        for root in roots
        if not any(root.is_relative_to(path) or path.is_relative_to(root) for path in listed)
    ]
    return [*places, *more]


def _absolute(config: pytest.Config, path: str) -> Path:
    """Return the absolute path as pytest does, without resolving links."""
    return Path(os.path.abspath(config.invocation_params.dir / path))  # noqa: PTH100


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Pass the frame keys to a worker of pytest-xdist, so that each capture is read once."""
    corpus = node.config.stash.get(_CORPUS, None)
    if corpus is not None and not corpus.every:
        node.workerinput[_KEYS] = corpus.keys_of(sorted(corpus.files))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect all directories of a corpus, of any name, unless pytest ignores some."""
    corpus = config.stash.get(_CORPUS, None)
    if corpus is None or config.getoption("ignore") or config.getoption("ignore_glob"):
        return None
    return False if collection_path in corpus.folders else None


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect a capture of a corpus as a file of tests."""
    corpus = parent.config.stash.get(_CORPUS, None)
    if corpus is None or file_path not in corpus.files:
        return None
    return CaptureFile.from_parent(parent, path=file_path)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Skip a capture whose frame equals that of another selected capture."""
    corpus = session.config.stash.get(_CORPUS, None)
    if corpus is None or corpus.every:
        return
    items = [item for item in session.items if isinstance(item, CaptureItem)]
    keys = corpus.keys_of(item.path for item in items)
    first: dict[str, CaptureItem] = {}
    for item in items:
        key = keys[str(item.path)]
        if key and (other := first.setdefault(key, item)) is not item:
            item.add_marker(pytest.mark.skip(reason=f"the same frame as {other.nodeid}"))


class CaptureFile(pytest.File):
    """A capture as a file with one test."""

    def collect(self) -> Iterable[pytest.Item]:
        """Yield the test, named after the backend."""
        yield CaptureItem.from_parent(
            self, name=self.config.stash[_CORPUS].job.backend or "recorded"
        )


class CaptureItem(pytest.Item):
    """The compilation of a capture in a separate process."""

    _desc: CaptureDesc | None = None

    def setup(self) -> None:
        """Read the capture; a bad file is an error, not a failure of the backend."""
        from torch_fakeify.serialization.capture_file import read_capture

        from .errors import FormatError

        problem = ""
        try:
            self._desc = read_capture(self.path, limits=self.config.stash[_CORPUS].job.limits)
        except FormatError as error:
            problem = str(error)
        if problem:
            pytest.fail(f"bad file\n  {problem}", pytrace=False)

    def runtest(self) -> None:
        """Compile it; the failure is the verdict, without a traceback."""
        from dataclasses import replace

        from torch_fakeify.corpus.jobs import carry_out
        from torch_fakeify.corpus.runner import frame_key, result_row

        job = self.config.stash[_CORPUS].job
        desc, self._desc = self._desc, None
        assert desc is not None
        done = carry_out(replace(job, file=str(self.path)))
        row = result_row(self.nodeid, desc, frame_key(desc, job.backend), job, done)
        self.user_properties.append(("verdict", row.verdict))
        if not row.holds:
            text = "\n".join([row.verdict, *(f"  {line}" for line in row.details)])
            pytest.fail(text, pytrace=False)

    def reportinfo(self) -> tuple[Path, int, str]:
        """Return the location of the capture."""
        place = self.nodeid.removesuffix(f"::{self.name}")
        return self.path, 0, f"{place} with {self.name}"
