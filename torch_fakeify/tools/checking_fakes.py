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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from torch_fakeify._atomic_write import check_not_input, check_writable
from torch_fakeify.compat import torch_dynamo, torch_fakes, torch_symbols
from torch_fakeify.compat.aot_compilers import flat_copy
from torch_fakeify.compat.arguments import placeholders_of
from torch_fakeify.errors import CaptureError
from torch_fakeify.frames.inputs.size_search import choose_sizes
from torch_fakeify.frames.recording import capture as capture_graph
from torch_fakeify.records.tensor import FunctionValue
from torch_fakeify.render.code import node_stack, statement
from torch_fakeify.render.text import clip, count_text, user_line
from torch_fakeify.replay.lowering import attribute_of, value_of
from torch_fakeify.tools.capture_files import path_of
from torch_fakeify.tools.minify.failures import Failure
from torch_fakeify.tools.minify.repro_script import CheckedScript, write_and_check
from torch_fakeify.tools.operator_script import script_of_call
from torch_fakeify.tools.size_runs import SizeRuns, SizesReport, extent, size_runs
from torch_fakeify.tools.worker.replies import FakesChecked, OperatorCall, Parted, indented
from torch_fakeify.unbacked.repropagation import repropagate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch_fakeify.frames.captures import Capture
    from torch_fakeify.records.frame import CaptureDesc
    from torch_fakeify.records.graph import NodeDesc
    from torch_fakeify.tools.capture_files import CaptureLike
    from torch_fakeify.tools.worker.replies import Outcome

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
class FakesReport(SizesReport):
    """The result of comparing the operators of a frame with their fake values.

    Example:
        >>> found = tfk.check_fakes(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(2)])
        >>> found.operators, found.differences
        (1, ())
    """

    operators: int = 0
    """Largest number of operators that were compared at one of the sizes."""
    differences: tuple[FakeDifference, ...] = ()
    """In the order of the graph, each operator once, with the smallest sizes that were found."""

    script: Path | None = None
    """The script that calls the first of the operators alone; ``None`` if there is none."""
    script_state: str = ""
    """Whether the script fails, or why there is none."""
    torch: str = ""
    """The version of torch that ran the operators."""

    def lines(self) -> list[str]:
        """Format the report."""
        compiler = f"torch {self.torch}" if self.torch else ""
        notes = self._notes("not compared to the end", compiler, every=not self.differences)
        if not self.operators and not self.differences:
            return [f"{self._tried}, no operator was compared", *notes]
        count = len(self.differences)
        compared = f"{self._tried}, {count_text(self.operators, 'operator')} compared"
        if not count:
            return [f"{compared}: all are as their fake values{self._so_far}", *notes]
        found = "differs from its fake value" if count == 1 else "differ from their fake values"
        first, *others = self.differences
        shown = [
            line
            for each in others[: _SHOWN - 1]
            for line in (f"also at {self.describe(each)}:", *indented(each.lines()))
        ]
        script = f"  {self.script or 'script'}: {self.script_state}"
        return [
            f"{compared}: {count} {found}{self._so_far}",
            f"first at {self.describe(first)}:",
            *indented(first.lines()),
            *([script] if self.script_state else []),
            *shown,
            *([f"and {count - _SHOWN} more"] if count > _SHOWN else []),
            *notes,
        ]

    def describe(self, difference: FakeDifference) -> str:
        """Return the sizes of a difference in one line, by readable names."""
        return self._described(difference.sizes, "the recorded sizes")


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
    capture: Any = graph
    if hasattr(graph, "graph") and hasattr(graph, "recompile"):
        capture = _capture_of_graph(capture, inputs)
    elif inputs is not None:
        raise CaptureError("a capture has its inputs", where="inputs", fix="Pass the capture alone")
    with size_runs(
        capture, "eager", imports, runs=runs, seed=seed, device=device, timeout=timeout,
        memory=memory, trust=trust,
    ) as sizes_run:  # fmt: skip
        desc = sizes_run.desc
        if script is not None:  # before the search, which takes a while
            check_not_input(script, path_of(capture) or sizes_run.path)
            check_writable(script)
        requested = None if sizes is None else [_chosen(desc, each) for each in sizes]
        found = _Search(sizes_run)
        try:
            found.run(requested, runs, progress or (lambda _text: None))
        except KeyboardInterrupt:
            sizes_run.interrupted = True
    differences = found.differences
    first = next((each for each in differences if each.kind == "differs"), None)
    written = CheckedScript(None, None, "")
    if first is not None and script is not None and not sizes_run.interrupted:
        if first.call is None:
            written = CheckedScript(None, None, f"none: {first.no_call}")
        else:
            of_operator = [name for each, name in desc.operator_modules if each == first.operator]
            text = first.script(modules := (*imports, *of_operator))
            written = write_and_check(
                Path(script),
                text,
                Failure("wrong", "forward"),
                timeout=timeout,
                imports=bool(modules),
                fails="real and fake results differ in it, too",
            )
    return FakesReport(
        **sizes_run.results(),
        operators=found.operators,
        differences=tuple(differences),
        script=written.path,
        script_state=written.state,
        torch=sizes_run.torch or "",
    )


def first_difference(runs: SizeRuns, sizes: Mapping[str, int]) -> FakeDifference | None:
    """Return the first operator of a frame that differs from its fake value at some sizes, if any.

    A frame that cannot be run has none.
    """
    try:
        found = _Search(runs).run_batch([dict(sizes)], Counter())
    except CaptureError:
        return None
    return min(found, key=lambda each: each.position, default=None)


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
    """Compares the operators of a frame at batches of sizes; what was found until now."""

    def __init__(self, runs: SizeRuns) -> None:
        self._runs = runs
        self._nodes = runs.desc.graph.nodes
        self._found: dict[int, FakeDifference] = {}
        self._crashes = 0
        self.operators = 0

    @property
    def differences(self) -> list[FakeDifference]:
        """The differences in the order of the graph."""
        return [self._found[at] for at in sorted(self._found)]

    def run(
        self,
        sizes: Sequence[dict[str, int]] | None,
        most: int,
        progress: Callable[[str], None],
    ) -> None:
        """Try sizes, then make those of the first difference small."""
        runs = self._runs
        for batch in runs.batches(sizes, most):
            self._add(self.run_batch(batch, runs.not_compared))
            runs.tried += len(batch)
            count = len(self._found)
            progress(f"{runs.tried} of at most {most} sizes tried, {count} operators differ")
            if self._crashes >= _CRASHES:
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
            smaller = self._runs.smaller(self._found[first.position].sizes)
            found = self.run_batch(smaller, Counter())
            same = [each for each in found if each.position == first.position]
            if not any(each.kind == "differs" for each in same):
                return
            self._add(each for each in found if each.position >= first.position)

    def run_batch(
        self, batch: Sequence[dict[str, int]], not_compared: Counter[str]
    ) -> list[FakeDifference]:
        """Run a batch of sizes; count in ``not_compared`` why operators were not compared.

        Where an operator ends the process, the other sizes of the batch run again without it.
        """
        if not batch or self._crashes >= _CRASHES:
            return []
        outcome, running = self._ask(batch)
        if not isinstance(outcome, FakesChecked):
            return self._ended(batch, running, *self._runs.ended(outcome), not_compared)
        self.operators = max(self.operators, *(result.compared for result in outcome.results))
        not_compared.update(r.not_compared for r in outcome.results if r.not_compared)
        return [
            FakeDifference(
                sizes,
                "differs",
                **self._place(each.position),
                parts=each.parts,
                call=each.call,
                no_call=each.no_call,
            )
            for sizes, result in zip(batch, outcome.results, strict=True)
            for each in result.differences
        ]

    def _ask(self, batch: Sequence[dict[str, int]]) -> tuple[Outcome, tuple[int, str] | None]:
        """Return the outcome, and which sizes and node ran last."""
        with tempfile.TemporaryDirectory(prefix="torch-fakeify-") as folder:
            path = Path(folder) / "running"
            answer = self._runs.ask(batch, task="fakes", backend="eager", running=str(path))
            try:
                at, name = json.loads(path.read_bytes())
            except (OSError, ValueError):
                return answer.outcome, None
            return answer.outcome, (at, name)

    def _place(self, position: int) -> dict[str, Any]:
        fx_node = self._nodes[position]
        names = tuple(each.name for each in self._nodes)
        return {
            "node": fx_node.name,
            "operator": _operator(fx_node),
            "line": user_line(node_stack(fx_node)),
            "statement": clip(statement(fx_node, names), 300),
            "position": position,
        }

    def _ended(
        self,
        batch: Sequence[dict[str, int]],
        running: tuple[int, str] | None,
        kind: Kind,
        lines: Sequence[str],
        not_compared: Counter[str],
    ) -> list[FakeDifference]:
        """Return what ended the process, and the differences at the other sizes of the batch."""
        self._crashes += 1
        nodes = {each.name: at for at, each in enumerate(self._nodes)}
        if running is None or running[1] not in nodes:
            raise self._runs.cannot_run(kind, "; ".join(lines))
        at, name = running
        found = FakeDifference(batch[at], kind, **self._place(nodes[name]), text="\n".join(lines))
        others = [*batch[:at], *batch[at + 1 :]]
        return [found, *self.run_batch(others, not_compared)]


# --- graphs -------------------------------------------------------------------------------------


def _capture_of_graph(gm: torch.fx.GraphModule, inputs: Sequence[Any] | None) -> Capture:
    """Return the capture of a graph whose nodes have fake values, or get those of some inputs.

    The inputs are real or fake; ``None`` stands for the fake values of the placeholders. Where the nodes
    have no fake values, all sizes of real tensors become symbols.

    Raises:
        CaptureError: there are neither fake values nor inputs.
    """
    nodes = _nodes_of(gm) or gm.graph.find_nodes(op="placeholder")
    if any(value_of(fx_node) is not None for fx_node in nodes):
        is_traced = inputs is not None and torch_dynamo.detect_fake_mode(list(inputs)) is not None
        # Real inputs have no symbols, except where Dynamo has just traced them.
        return capture_graph(gm, inputs if is_traced else None, constants="small")
    if inputs is None:
        raise CaptureError(
            "the graph has no fake values", where="inputs", fix="Pass inputs for its placeholders"
        )
    copy = flat_copy(gm)
    placeholders = placeholders_of(copy, inputs, CaptureError)
    mode = torch_dynamo.detect_fake_mode(list(inputs))
    if mode is None:
        env = torch_symbols.ShapeEnv()
        mode = torch_fakes.FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    fakes = [_fake(mode, n.name, v) for n, v in zip(placeholders, inputs, strict=True)]
    for fx_node, value in zip(placeholders, fakes, strict=True):
        fx_node.meta["val"] = value
    for fx_node in copy.graph.find_nodes(op="get_attr"):
        value = attribute_of(copy, str(fx_node.target))
        if isinstance(value, torch.Tensor):  # with the ``requires_grad`` of a parameter
            fx_node.meta["val"] = mode.from_tensor(value, static_shapes=True)
    repropagate(copy, [n for n in _nodes_of(copy) if "val" not in n.meta], mode=mode)
    with torch.no_grad():  # as `repropagate` makes the values
        return capture_graph(copy, fakes, constants="small")


def _nodes_of(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Return the nodes of a graph whose values follow from those of its placeholders."""
    return [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]


def _fake(mode: Any, name: str, value: Any) -> Any:
    """Return a fake tensor whose sizes are symbols; other values are unchanged."""
    if not isinstance(value, torch.Tensor) or isinstance(value, torch_fakes.FakeTensor):
        return value
    dims = [torch_symbols.DimDynamic.DYNAMIC] * value.ndim
    context = torch_symbols.StatelessSymbolicContext(dims)
    source = torch_dynamo.dynamo_source().LocalSource(name, is_input=True)
    return mode.from_tensor(value, source=source, symbolic_context=context)
