"""Compare the fake values of a graph with what its operators return for real inputs.

A compiler plans by fake values: a fake kernel that is wrong about a size, a stride, a dtype or a shared
storage makes it compile wrong code, without an error. `check_fakes` runs the operators of a frame on
made-up inputs at sizes that its guards admit, in other processes, and finds the first operator whose
result is not as its fake value.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch_fakeify._atomic_write import check_not_input, check_writable
from torch_fakeify.errors import CaptureError
from torch_fakeify.frames.inputs.size_search import SizeSearch, choose_sizes
from torch_fakeify.records.tensor import FunctionValue
from torch_fakeify.render.code import node_stack, statement
from torch_fakeify.render.notebook import InNotebook
from torch_fakeify.render.readable_names import ReadableNames
from torch_fakeify.render.text import clip, user_line
from torch_fakeify.serialization.capture_file import read_capture
from torch_fakeify.serialization.container import Limits
from torch_fakeify.tools.capture_files import as_file, path_of
from torch_fakeify.tools.operator_script import (
    OperatorScript,
    script_of_call,
    write_operator_script,
)
from torch_fakeify.tools.replaying import count_alike
from torch_fakeify.tools.size_runs import BATCH, SizeRuns, extent
from torch_fakeify.tools.traced_graphs import capture_of_graph
from torch_fakeify.tools.worker.client import backend_request
from torch_fakeify.tools.worker.fork_server import ForkServer
from torch_fakeify.tools.worker.replies import (
    Crashed,
    FakesChecked,
    Here,
    Hung,
    OperatorCall,
    OutOfMemory,
    Parted,
    Raised,
    Refused,
    indented,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from torch_fakeify.records.frame import CaptureDesc
    from torch_fakeify.records.graph import NodeDesc
    from torch_fakeify.tools.capture_files import CaptureLike
    from torch_fakeify.tools.worker.replies import Answer, NodeDifference, SizeChecked

_ROUNDS = 12
"""Largest number of rounds in which the sizes of a difference are made small."""
_CRASHES = 3
"""Number of crashes after which no further sizes are tried."""
_SHOWN = 8
"""Most differences that are printed."""

Kind = Literal["differs", "crashes", "hangs", "out of memory"]


@dataclass(frozen=True)
class FakeDifference:
    """An operator of a frame whose real result is not as its fake value, at some sizes.

    Example:
        >>> tfk.FakeDifference(
        ...     {}, "crashes", "y", "my.op", "", "y = torch.ops.my.op(x)", text="SIGSEGV"
        ... ).lines()
        ['my.op, node y', '  y = torch.ops.my.op(x)', '  crashes: SIGSEGV']
    """

    sizes: dict[str, int]
    """Values by symbol name."""
    kind: Kind
    node: str
    """Name of the node in the graph."""
    operator: str
    line: str
    """The user's line; empty if it is not recorded."""
    statement: str
    """The call in the graph."""
    parts: tuple[Parted, ...] = ()
    """What the fake value has otherwise: size, stride, dtype, storage and so on."""
    text: str = ""
    """How the process ended, if it did."""

    position: int = field(default=-1, repr=False)
    """Among the nodes of the graph."""
    call: OperatorCall | None = field(default=None, repr=False)
    """The call, with which the operator can be called alone."""
    no_call: str = field(default="", repr=False)
    """Why there is no call."""

    def script(self, imports: Sequence[str] = ()) -> str:
        """Return a script of torch alone that calls the operator on real and on fake tensors.

        Args:
            imports: modules that register operators.

        Raises:
            CaptureError: the call has no text, or the operator ends the process.
        """
        if self.call is None:
            raise CaptureError(
                "there is no script", where=self.node, found=self.no_call or self.kind
            )
        return script_of_call(self.operator, self.parts, self.call, imports)

    def lines(self) -> list[str]:
        """Format the difference, without the sizes."""
        place = f" at {self.line}" if self.line else ""
        what = [str(part) for part in self.parts] or self.text.splitlines()
        if self.kind != "differs":
            what = [f"{self.kind}: {what[0] if what else ''}".rstrip(": "), *what[1:]]
        return [
            f"{self.operator}, node {self.node}{place}",
            f"  {self.statement}",
            *indented(what),
        ]


@dataclass(frozen=True)
class FakesReport(InNotebook):
    """The result of comparing the operators of a frame with their fake values.

    Example:
        >>> found = tfk.check_fakes(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(2)])
        >>> found.operators, found.differences
        (1, ())
    """

    words: dict[str, str] = field(repr=False)
    """Readable names of the symbols."""
    tried: int = 0
    """Number of sizes."""
    operators: int = 0
    """Largest number of operators that were compared at one of the sizes."""
    differences: tuple[FakeDifference, ...] = ()
    """In the order of the graph, each operator once, with the smallest sizes that were found."""
    interrupted: bool = False
    """Whether Ctrl-C ended the search; the report has the results until then."""
    not_compared: Counter[str] = field(default_factory=Counter[str])
    """Number of sizes at which some operators were not compared, by reason."""
    is_static: bool = False
    """Whether the frame has no dynamic sizes, so that only the recorded ones were tried."""

    script: Path | None = None
    """The script that calls the first of the operators alone; ``None`` if there is none."""
    script_state: str = ""
    """Whether the script fails, or why there is none."""
    torch: str = ""
    """The version of torch that ran the operators."""
    here: Here | None = None
    """How the surroundings of the runs differ from the recorded ones."""

    def lines(self) -> list[str]:
        """Format the report."""
        sizes = f"{self.tried} size{'' if self.tried == 1 else 's'} tried"
        reasons = [
            f"{n} not compared to the end: {why}"
            for why, n in count_alike(self.not_compared).most_common(4)
        ]
        static = ["the frame has no dynamic sizes: only the recorded one was tried"]
        notes = [*reasons, *(static if self.is_static else [])]
        notes += [f"torch {self.torch}"] if self.torch else []
        notes += [] if self.here is None else self.here.lines(every=not self.differences)
        if not self.operators and not self.differences:
            return [f"{sizes}, no operator was compared", *notes]
        so_far = " so far" if self.interrupted else ""
        count = len(self.differences)
        compared = f"{self.operators} operator{'' if self.operators == 1 else 's'} compared"
        if not count:
            return [f"{sizes}, {compared}: all are as their fake values{so_far}", *notes]
        found = "differs from its fake value" if count == 1 else "differ from their fake values"
        first, *others = self.differences
        state = []
        if self.script_state:
            state = [f"  {self.script or 'script'}: {self.script_state}"]
        return [
            f"{sizes}, {compared}: {count} {found}{so_far}",
            f"first at {self.describe(first)}:",
            *indented(first.lines()),
            *state,
            *chain.from_iterable(
                (f"also at {self.describe(each)}:", *indented(each.lines()))
                for each in others[: _SHOWN - 1]
            ),
            *([f"and {count - _SHOWN} more"] if count > _SHOWN else []),
            *notes,
        ]

    def describe(self, difference: FakeDifference) -> str:
        """Return the sizes of a difference in one line, by readable names."""
        named = (f"{self.words[name]} = {n}" for name, n in difference.sizes.items())
        return ", ".join(named) or "the recorded sizes"


def check_fakes(
    graph: CaptureLike | torch.fx.GraphModule,
    inputs: Sequence[Any] | None = None,
    *,
    sizes: Sequence[Mapping[str, int]] | None = None,
    runs: int = 20,
    script: str | Path | None = None,
    imports: Sequence[str] = (),
    seed: int = 0,
    device: str | None = None,
    timeout: float = 600.0,
    memory: int | None = None,
    trust: bool = False,
    progress: Callable[[str], None] | None = None,
) -> FakesReport:
    """Run the operators of a frame at sizes that its guards admit, and compare them with their fake values.

    They run on made-up inputs in other processes. Compared are sizes, strides, storage offset, dtype,
    device, layout, ``requires_grad``, which earlier tensor the storage is of, the bytes of a new storage,
    and the values of Python numbers; strides of dims of size 1 and of empty tensors do not count. A
    number that depends on data is that of the real result, and must be in its range. An operator whose
    arguments already differ from their fake values is not compared. Ctrl-C ends the search.

    Args:
        graph: a capture, the path of its file, or a graph.
        inputs: of a graph, real tensors or fake ones; by default the fake values of its placeholders. A
            graph without fake values is traced with all sizes of the inputs dynamic.
        sizes: values by name, as ``x.size(0)``; others stay as recorded. By default they are searched.
        runs: largest number of sizes to search, at least 1.
        script: where to write a script of torch alone that calls the first operator that differs; it is
            run once.
        imports: modules that each process imports first, as those that register operators.
        seed: of the sizes and of the inputs' data.
        device: where to put what was on an accelerator.
        timeout: seconds for each batch of 20 sizes.
        memory: bytes that a process may hold; ``None`` for no limit.
        trust: read the file without limits, and set also the settings that could run or write something.
        progress: called with what was tried so far, after each batch.

    Raises:
        MissingFileError: there is no such file.
        FormatError: the file is no capture.
        CaptureError: the frame cannot be run, as it has tensors without recorded data, or ``runs`` is
            less than 1.
        WriteError: the script cannot be written.

    Example:
        >>> graph = torch.fx.symbolic_trace(torch.nn.ReLU())
        >>> print(tfk.check_fakes(graph, [torch.ones(2, 3)], runs=3).lines()[0])
        3 sizes tried, 1 operator compared: all are as their fake values
    """
    if runs < 1:
        raise CaptureError(
            "there are no sizes to try", where="runs", expected="1 or more", found=str(runs)
        )
    capture: Any = graph
    if hasattr(graph, "graph") and hasattr(graph, "recompile"):
        capture = capture_of_graph(capture, inputs)
    elif inputs is not None:
        raise CaptureError("a capture has its inputs", where="inputs", fix="Pass the capture alone")
    source = path_of(capture)
    with as_file(capture) as path, ForkServer() as server:
        desc = read_capture(path, limits=Limits.none() if trust else None)
        if script is not None:  # before the search, which takes a while
            check_not_input(script, path if source is None else source)
            check_writable(script)
        requested = None if sizes is None else [_chosen(desc, each) for each in sizes]
        where = str(source or desc.frame or "frame")
        request = {
            **backend_request("eager", imports),
            "seed": seed,
            "device": device,
            "trust": trust,
            "trust_settings": trust,
        }
        sizes_run = SizeRuns(server, path, request, timeout=timeout, memory=memory, where=where)
        runner = _Runner(sizes_run, desc)
        search = SizeSearch(desc, seed=seed)
        found = _Search(search, runner)
        try:
            found.run(requested, runs, progress or (lambda _text: None))
        except KeyboardInterrupt:
            found.interrupted = True
    words = ReadableNames(desc)
    env = desc.shape_env
    differences = found.differences
    first = next((each for each in differences if each.kind == "differs"), None)
    written = OperatorScript(None, "")
    if first is not None and script is not None and not found.interrupted:
        written = write_operator_script(
            Path(script),
            first.operator,
            first.parts,
            first.call,
            first.no_call,
            imports=(*imports, *_modules_of(desc, first.operator)),
            timeout=timeout,
        )
    return FakesReport(
        {s.name: words.symbol(s.name) for s in (() if env is None else env.symbols)},
        tried=found.tried,
        operators=runner.operators,
        differences=tuple(differences),
        interrupted=found.interrupted,
        not_compared=found.not_compared,
        is_static=not search.example,
        script=written.path,
        script_state=written.state,
        torch=sizes_run.torch or "",
        here=sizes_run.here,
    )


def first_difference(
    runs: SizeRuns, desc: CaptureDesc, sizes: Mapping[str, int]
) -> FakeDifference | None:
    """Return the first operator of a frame that differs from its fake value at some sizes, if any.

    A frame that cannot be run has none.

    Args:
        runs: asks the processes.
        desc: the frame.
        sizes: values by symbol name.
    """
    try:
        found = _Runner(runs, desc).differences([dict(sizes)], Counter())
    except CaptureError:
        return None
    return min(found, key=lambda each: each.position, default=None)


def _modules_of(desc: CaptureDesc, operator: str) -> list[str]:
    """Return the module that registered an operator, if it is on record."""
    return [module for name, module in desc.operator_modules if name == operator]


def _operator(fx_node: NodeDesc) -> str:
    """Return what a node calls; of an operator without its overload."""
    target = fx_node.target
    if not isinstance(target, FunctionValue):
        return str(target)
    return target.name.rpartition(".")[0] if target.kind == "op" else target.name


def _chosen(desc: CaptureDesc, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return values by symbol with the requested ones, which may be by readable names."""
    found = choose_sizes(desc, sizes)
    return found.sizes | {n: value for n, value in found.data.items() if n in found.requested}


class _Search:
    """What was found until now; it is updated after each batch."""

    def __init__(self, search: SizeSearch, runner: _Runner) -> None:
        self._sizes = search
        self._runner = runner
        self._found: dict[int, FakeDifference] = {}
        self.tried = 0
        self.not_compared = Counter[str]()
        self.interrupted = False

    @property
    def differences(self) -> list[FakeDifference]:
        """The differences in the order of the graph."""
        return [self._found[at] for at in sorted(self._found)]

    def run(
        self,
        sizes: Sequence[dict[str, int]] | None,
        runs: int,
        progress: Callable[[str], None],
    ) -> None:
        """Try sizes, then make those of the first difference small."""
        found = iter(islice(self._sizes, runs) if sizes is None else sizes)
        found = chain([next(found, {})], found)  # as recorded, where no others are found
        while batch := list(islice(found, BATCH)):
            self._add(self._runner.differences(batch, self.not_compared))
            self.tried += len(batch)
            count = len(self._found)
            progress(f"{self.tried} of at most {runs} sizes tried, {count} operators differ")
            if self._runner.crashes >= _CRASHES:
                break
        if sizes is None and self._found:
            self._shrink(progress)

    def _add(self, differences: Iterable[FakeDifference]) -> None:
        for each in differences:
            old = self._found.get(each.position)
            if old is None or extent(each.sizes) < extent(old.sizes):
                self._found[each.position] = each

    def _shrink(self, progress: Callable[[str], None]) -> None:
        first = self.differences[0]
        if first.kind != "differs":
            return
        for round_ in range(_ROUNDS):
            progress(f"making the sizes small, round {round_ + 1}")
            smaller = self._sizes.smaller(self._found[first.position].sizes, BATCH)
            found = self._runner.differences(smaller, Counter())
            same = [each for each in found if each.position == first.position]
            if not any(each.kind == "differs" for each in same):
                return
            self._add(each for each in found if each.position >= first.position)


class _Runner:
    """Compares the operators of a frame at batches of sizes.

    Args:
        runs: asks the processes.
        desc: the frame.
    """

    def __init__(self, runs: SizeRuns, desc: CaptureDesc) -> None:
        self._runs = runs
        self._desc = desc
        self.operators = 0
        self.crashes = 0

    def differences(
        self, batch: Sequence[dict[str, int]], not_compared: Counter[str]
    ) -> list[FakeDifference]:
        """Run a batch of sizes; count in ``not_compared`` why operators were not compared.

        Where an operator ends the process, the other sizes of the batch run again without it.
        """
        if not batch or self.crashes >= _CRASHES:
            return []
        answer, running = self._ask(batch)
        match answer.outcome:
            case FakesChecked(results=results):
                pairs = zip(batch, results, strict=True)
                return [each for pair in pairs for each in self._of(*pair, not_compared)]
            case Refused(error=kind, message=message):
                raise self._runs.cannot_run(kind, message)
            case Raised(error=error):
                raise self._runs.cannot_run(error.type, error.message)
            case Hung(tail=tail):
                texts = [f"killed after {self._runs.timeout:g} s", *tail]
                return self._ended(batch, running, "hangs", texts, not_compared)
            case OutOfMemory(tail=tail):
                return self._ended(batch, running, "out of memory", tail, not_compared)
            case Crashed(how=how, tail=tail):
                return self._ended(batch, running, "crashes", [how, *tail], not_compared)
            case outcome:
                raise AssertionError(f"no reply to a batch of sizes: {outcome}")

    def _ask(self, batch: Sequence[dict[str, int]]) -> tuple[Answer, tuple[int, str] | None]:
        """Return the answer, and which sizes and node ran last."""
        with tempfile.TemporaryDirectory(prefix="torch-fakeify-") as folder:
            path = Path(folder) / "running"
            answer = self._runs.ask(batch, task="fakes", backend="eager", running=str(path))
            try:
                at, name = json.loads(path.read_bytes())
            except (OSError, ValueError):
                return answer, None
            return answer, (at, name)

    def _of(
        self, sizes: dict[str, int], result: SizeChecked, not_compared: Counter[str]
    ) -> list[FakeDifference]:
        self.operators = max(self.operators, result.compared)
        if result.not_compared:
            not_compared[result.not_compared] += 1
        return [self._difference(sizes, each) for each in result.differences]

    def _difference(self, sizes: dict[str, int], found: NodeDifference) -> FakeDifference:
        return FakeDifference(
            sizes,
            "differs",
            **self._place(found.position),
            parts=found.parts,
            call=found.call,
            no_call=found.no_call,
        )

    def _place(self, position: int) -> dict[str, Any]:
        """Return what is on record of a node."""
        fx_node = self._desc.graph.nodes[position]
        names = tuple(each.name for each in self._desc.graph.nodes)
        stack = node_stack(fx_node)
        return {
            "node": fx_node.name,
            "operator": _operator(fx_node),
            "line": user_line(stack),
            "statement": clip(statement(fx_node, names), 300),
            "position": position,
        }

    def _ended(
        self,
        batch: Sequence[dict[str, int]],
        running: tuple[int, str] | None,
        kind: Kind,
        texts: Iterable[str],
        not_compared: Counter[str],
    ) -> list[FakeDifference]:
        """Return what ended the process, and the differences at the other sizes of the batch."""
        self.crashes += 1
        nodes = {each.name: at for at, each in enumerate(self._desc.graph.nodes)}
        if running is None or running[1] not in nodes:
            raise self._runs.cannot_run(kind, "; ".join(texts))
        at, name = running
        text = "\n".join(texts)
        found = FakeDifference(batch[at], kind, **self._place(nodes[name]), text=text)
        others = [*batch[:at], *batch[at + 1 :]]
        return [found, *self.differences(others, not_compared)]
