"""What must hold of every file, however hostile: a capture or one error of the package.

No other exception, no hang, no memory beyond a bound, no file written, no code run.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from hostile_mutator import CANARY

import torch_fakeify as tfk
from torch_fakeify.cli import _escape_json
from torch_fakeify.render.report.page import ListedFrame, folder_page, html_page
from torch_fakeify.render.show import show_lines
from torch_fakeify.render.summary import summary_lines
from torch_fakeify.serialization.document import dumps

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

SECONDS = 2.0
"""Of processor time, for one file and one step."""
MEMORY = 300 << 20
"""Bytes of address space beyond what the process has before the file."""
MADE = 1 << 20
"""Bytes of the tensors that are made of one file."""
LONGEST = 4000
"""Characters of an error."""

LARGEST = 100 << 20
"""Characters of a page."""

PACKAGE = str(Path(tfk.__file__).parent)

_WRITES = (
    *("os.chmod", "os.chown", "os.link", "os.mkdir", "os.mkfifo", "os.mknod", "os.remove"),
    *("os.rename", "os.rmdir", "os.symlink", "os.truncate", "os.utime", "os.setxattr"),
)
_RUNS = (
    *(CANARY, "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.putenv"),
    *("subprocess.Popen", "pickle.find_class", "code.__new__", "ctypes.dlopen", "os.chdir"),
    *("os.kill", "urllib.Request"),
)
_EVALUATES = (
    *("/msgspec/_utils.py", "/typing.py", "/dataclasses.py", "/collections/__init__.py"),
    "/torch/fx/operator_schemas.py",
)
"""Modules that evaluate the annotations of a class or of an operator that there is, or make one."""
_PREFIXES = ("shutil.", "tempfile.", "socket.", "pty.", "sqlite3.", "webbrowser.", "ftplib.")
_KNOWN = {*sys.stdlib_module_names, "torch", "torch_fakeify", "sympy", "mpmath", "numpy", "msgspec"}


class Hang(BaseException):
    """The time for one file is over."""


class Outcome(NamedTuple):
    """What became of one file."""

    word: str
    """``loaded``, ``refused`` or ``finding``."""
    kind: str = ""
    """The class of the error, and for a finding where it came from."""
    layer: str = ""
    """The module of the package that refused."""
    text: str = ""
    """The error, of a finding with its traceback."""


class Watch:
    """Listens to what the interpreter does while a file is read; one for the process."""

    def __init__(self) -> None:
        self.active = False
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.active and _is_bad(event, args):
            self.seen.append(f"{event} {str(args)[:200]}")

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """Listen, and bound time and memory."""
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        handler = signal.signal(signal.SIGPROF, _raise_hang)
        resource.setrlimit(resource.RLIMIT_AS, (address_space() + MEMORY, hard))
        self.active = True
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            self.active = False
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
            signal.signal(signal.SIGPROF, handler)


def _raise_hang(_number: int, _frame: object) -> None:
    raise Hang(f"more than {SECONDS} s of processor time")


def _is_bad(event: str, args: tuple[Any, ...]) -> bool:
    if event == "open":
        mode, flags = args[1], args[2]
        written = isinstance(mode, str) and any(letter in mode for letter in "wax+")
        return written or bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    if event == "import":
        return str(args[0]).partition(".")[0] not in _KNOWN
    if event in ("compile", "exec"):
        name = args[1] if event == "compile" else getattr(args[0], "co_filename", "")
        name = name.decode() if isinstance(name, bytes) else str(name)
        # FX compiles each graph; torch's and the standard library's modules are files.
        known = name.startswith(("<eval_with_key>", "<frozen ")) or name.endswith(".py")
        return not known and not sys._getframe(3).f_code.co_filename.endswith(_EVALUATES)
    return event in _WRITES or event in _RUNS or event.startswith(_PREFIXES)


def address_space() -> int:
    """Bytes of address space that the process has."""
    pages = Path("/proc/self/statm").read_text().split()[0]
    return int(pages) * resource.getpagesize()


def _load(path: Path) -> Any:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", tfk.TorchVersionWarning)
        capture = tfk.Capture.load(path)
    for text in (repr(capture), *(str(one.message) for one in told)):
        assert text.isprintable(), "a text is not printable"
        assert len(text) < LONGEST, "a text is long"
    return capture


def _show(capture: Any) -> None:
    for line in (*show_lines(capture.desc), *summary_lines(capture.desc, file="c", columns=80)):
        assert line.isprintable(), "a line of the page is not printable"


def _report(capture: Any) -> None:
    own = {"flow", "stacks"}
    _check_page(html_page(capture.desc), own)
    _check_page(folder_page("all", [ListedFrame("c", capture.desc)]), {f"f0-{e}" for e in own})


def _check_page(page: str, blocks: set[str]) -> None:
    """Check that a page has one script, one block of stacks and at most one picture's."""
    assert len(page) < LARGEST, "a page is large"
    data = [f'<script type="application/json" id="{name}">' for name in sorted(blocks)]
    found = re.findall("<script[^>]*>?", page, re.IGNORECASE)
    # A frame without a graph has no picture.
    assert found in ([*data, "<script>"], [data[1], "<script>"]), "a page has a script of another's"


def _show_json(capture: Any) -> None:
    assert _escape_json(dumps(capture.desc).decode()).isprintable(), "the JSON is not printable"


def _with_stubs(capture: Any) -> None:
    """Rebuild a frame with stubs of operators that are not here, and call these as the graph does."""
    with capture.operator_stubs() as stubs:
        instance = capture.instantiate()
        names = {stub.operator for stub in stubs}
        with instance.active(), instance.fake_mode:
            for node in instance.gm.graph.nodes:
                if ".".join(str(node.target).split(".")[:2]) in names:
                    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), _value)
                    with contextlib.suppress(TypeError, RuntimeError, ValueError):
                        node.target(*args, **kwargs)


def _guards(instance: Any) -> None:
    """Write and read the guards of a frame, and ask them about no arguments, and about fake ones."""
    instance.check_inputs(instance.inputs)
    if all(each.source is not None for each in instance.desc.inputs):
        guards = tfk.frontend.Guards.loads(instance.guards.dumps())
        with contextlib.suppress(tfk.CaptureError):
            guards.failing({}, globals={})  # names what is missing


def _program(capture: Any) -> None:
    """Make an exported program again, with fake tensors."""
    if capture.desc.export is not None:
        capture.exported_program()


def _value(node: torch.fx.Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


STEPS: dict[str, tuple[Callable[[Any], Any], ...]] = {
    "load": (_show, _report),
    "instantiate": (
        _show,
        _show_json,
        lambda capture: capture.fingerprint(),
        lambda capture: capture.fingerprint("structure"),
        lambda capture: _guards(capture.instantiate()),
        _program,
        lambda capture: capture.at_rank(1),
    ),
    "fresh": (lambda capture: capture.instantiate(fresh=True),),
    "materialize": (lambda capture: capture.materialize(max_bytes=MADE),),
    "stubs": (_with_stubs,),
}
"""What is done with a capture that loads, by stage."""


def warm_up(path: Path, stage: str) -> None:
    """All that is done with a file, without bounds."""
    capture = _load(path)
    for step in STEPS[stage]:
        step(capture)


def examine(path: Path, stage: str, watch: Watch) -> Outcome:
    """What becomes of a file."""
    outcome, capture = _step(_load, path, watch)
    if capture is None:
        return outcome
    for step in STEPS[stage]:
        refused, _ = _step(step, capture, watch)
        if refused.word == "finding":
            return refused
        if refused.word == "refused":
            outcome = refused
    return outcome


def _step(step: Callable[[Any], Any], argument: Any, watch: Watch) -> tuple[Outcome, Any]:
    found, outcome = None, Outcome("loaded")
    watch.seen.clear()
    try:
        with watch.watching():
            try:
                found = step(argument)
            except tfk.FakeifyError as error:
                outcome = Outcome("refused", type(error).__name__, _layer(error), str(error))
                if error.what == "torch cannot rebuild the capture":
                    cause = error.__cause__ or error
                    outcome = outcome._replace(kind=f"{outcome.kind} for {_kind(cause)}")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - this is what is looked for
        outcome = Outcome("finding", _kind(error), text=_trace(error))
    if outcome.word != "finding" and watch.seen:
        outcome = Outcome("finding", watch.seen[0].split()[0], text="\n".join(watch.seen))
    if outcome.word == "refused" and len(outcome.text) > LONGEST:
        kind = f"an error of {len(outcome.text)} characters from {outcome.layer}"
        outcome = Outcome(
            "finding", kind.replace(str(len(outcome.text)), "many"), text=outcome.text
        )
    return outcome, found


def _layer(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [Path(frame.filename).stem for frame in frames if frame.filename.startswith(PACKAGE)]
    return own[-1] if own else "?"


def _kind(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(PACKAGE)]
    last = own[-1] if own else frames[-1]
    where = f"{Path(last.filename).name}:{last.name}"
    if isinstance(error, (Hang, RecursionError)):
        return f"{type(error).__name__} below {where}"
    deepest = frames[-1]
    return f"{type(error).__name__} below {where} at {Path(deepest.filename).name}:{deepest.name}"


def _trace(error: BaseException) -> str:
    lines = traceback.format_exception(type(error), error, error.__traceback__, limit=-12)
    return "".join(lines)[-6000:]
