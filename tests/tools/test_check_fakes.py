"""The operators of a frame beside their fake values: planted faults are found, right graphs have none."""

from __future__ import annotations

import io
import itertools
import os
import re
import sys
from typing import TYPE_CHECKING, Any

import planted_fakes  # noqa: F401 - registers operators
import pytest
import torch
from captured_frames import only_capture_of
from cli_runs import Command, error_of
from operators import OPERATORS
from places import GOLDEN, ZOO
from processes import COMMAND, fresh
from torch.fx.experimental.proxy_tensor import make_fx

import torch_fakeify as tfk
from torch_fakeify.frames.inputs.size_search import SizeSearch, choose_sizes
from torch_fakeify.tools.worker.fake_checks import FakeChecks

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch_fakeify.tools.checking_fakes import FakeDifference, FakesReport
    from torch_fakeify.tools.worker.replies import SizeChecked

pytestmark = pytest.mark.usefixtures("warm_workers")

IMPORTS = ["planted_fakes"]
planted = torch.ops.planted


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Generator[None]:
    """Child processes can import the modules of the zoo."""
    paths = [str(ZOO), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        yield


def frame_of(function: Callable[..., Any], *args: Any) -> tfk.Capture:
    """Record the frame of a function with dynamic sizes."""
    with torch._dynamo.config.patch(
        capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True
    ):
        torch._dynamo.reset()
        found: list[tfk.Capture] = []

        def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
            found.append(tfk.capture(gm, inputs))
            return lambda *_: sys.exit("the frame is recorded, not run")

        with pytest.raises(SystemExit):
            torch.compile(function, backend=backend, dynamic=True, fullgraph=True)(*args)
    (frame,) = found
    return frame


def check(function: Callable[..., Any], *args: Any, **options: Any) -> FakesReport:
    """Check the frame of a function with dynamic sizes."""
    frame = frame_of(function, *args)
    return tfk.check_fakes(frame, imports=IMPORTS, runs=options.pop("runs", 6), **options)


def checked_here(
    frame: tfk.Capture, sizes: Sequence[Mapping[str, int]] | None = None, *, runs: int = 1
) -> Iterator[SizeChecked]:
    """Check a frame in this process, as the child processes do."""
    checks = FakeChecks(frame, seed=0)
    searched = itertools.islice(SizeSearch(frame.desc), runs)
    for each in searched if sizes is None else (choose_sizes(frame.desc, n).sizes for n in sizes):
        yield checks.run(each, 0, io.BytesIO())


def only(report: FakesReport) -> FakeDifference:
    """The only difference of a report."""
    (found,) = report.differences
    return found


def run(*args: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a fresh process that has the zoo, and not this package, on its path."""
    return fresh(*args, status=None, PYTHONPATH=str(ZOO))


# --- planted faults -------------------------------------------------------------------------------


FAULTS: dict[str, tuple[str, str]] = {
    "stride": ("stride", r"fake \[(\d+), 1\], real \[1, \d+\]"),
    "dtype": ("dtype", r"fake torch.float32, real torch.float64"),
    "odd": ("size", r"fake \[(\d+), \d+\], real \[(\d+), \d+\]"),
    "alias": ("storage", r"fake its own, real that of y"),
    "storage": ("storage bytes", r"fake (\d+), real \d+"),
    "offset": ("storage offset", r"fake 0, real \d+"),
    "ndim": ("ndim", r"fake 1, real 0"),
    "length": ("length", r"fake 2, real 1"),
    "second": ("dtype", r"fake torch.float32, real torch.int64"),
    "clear_": ("dtype", r"fake torch.float32, real torch.int32"),
}


def faulty(x: torch.Tensor) -> Any:
    """Call each operator with a fault on a result that is right, and something on what it returns."""
    y = planted.right(x * 2)
    z = planted.right(x)
    return (
        planted.stride(y).reshape(-1),
        planted.dtype(y) + 1,
        planted.odd(y).t() * 2,
        planted.alias(y).view(-1),
        planted.storage(y) + 1,
        planted.offset(y) + 1,
        planted.ndim(y) + 1,
        planted.length(y)[0],
        planted.second(y)[1] + 1,
        planted.clear_(z) * 3,
    )


@pytest.fixture(scope="module")
def faults(_importable: None) -> FakesReport:
    """The report on `faulty`."""
    return check(faulty, torch.ones(8, 4), runs=8)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_at_its_operator(name: str, faults: FakesReport) -> None:
    """The node that differs is the planted one, not what is before it or follows from it."""
    assert sorted(each.operator for each in faults.differences) == sorted(
        f"planted.{name}" for name in FAULTS
    )
    (found,) = [each for each in faults.differences if each.operator == f"planted.{name}"]
    what, text = FAULTS[name]
    assert found.kind == "differs"
    assert f"in faulty: planted.{name}(" in found.line
    assert found.parts[0].what == what
    assert re.fullmatch(f"{what}(?: of result\\[1\\])?: {text}", str(found.parts[0]))


RUNNER = """
import pathlib, runpy, sys
for name in sorted(pathlib.Path(sys.argv[1]).glob("*.py")):
    try:
        runpy.run_path(str(name))
    except AssertionError as error:
        print("\\n" + name.stem, error)
"""


@pytest.mark.sweep
def test_each_script_fails_with_an_assertion(faults: FakesReport, tmp_path: Path) -> None:
    """Torch alone has the difference, too: each script runs in a process without this package."""
    for each in faults.differences:
        (tmp_path / f"{each.node}.py").write_text(each.script(IMPORTS))
        assert "torch_fakeify" not in each.script(IMPORTS)
        lying = each.script(IMPORTS).replace(each.operator, "planted.right")
        (tmp_path / f"{each.node}_right.py").write_text(lying)
    done = run("-c", RUNNER, str(tmp_path))
    assert done.returncode == 0, done.stderr
    failed = [line.split()[0] for line in done.stdout.splitlines() if "fake and real" in line]
    assert sorted(failed) == sorted(each.node for each in faults.differences)


@pytest.mark.sweep
def test_a_fault_at_odd_sizes_is_found_from_even_ones_and_made_small(tmp_path: Path) -> None:
    """The recorded size is right; the smallest odd one is reported, with a script that was run."""
    script = tmp_path / "call.py"
    report = check(lambda x: planted.odd(x).sin(), torch.ones(8, 4), script=script)
    assert report.describe(only(report)) == "x.size(0) = 5, x.size(1) = 2"
    assert str(only(report).parts[0]) == "size: fake [2, 2], real [3, 2]"
    assert report.script == script
    assert report.script_state == "real and fake results differ in it, too"
    assert f"  {script}: {report.script_state}" in report.lines()
    done = run(str(script))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "AssertionError: fake and real results differ"


@pytest.mark.sweep
def test_requested_sizes_are_the_only_ones() -> None:
    """At even sizes the operator is as its fake kernel, at an odd one it is not; names are those of the program."""
    frame = frame_of(lambda x: planted.odd(x).sin(), torch.ones(8, 4))
    even = list(checked_here(frame, [{"x.size(0)": n} for n in (4, 6, 16)]))
    assert [(each.compared, each.differences) for each in even] == [(2, ())] * 3
    report = tfk.check_fakes(frame, imports=IMPORTS, sizes=[{"x.size(0)": 9}])
    assert report.tried == 1
    assert report.describe(only(report)) == "x.size(0) = 9, x.size(1) = 4"


@pytest.mark.parametrize(("shape", "count"), [((0, 4), 0), ((1, 4), 0), ((5, 1), 0), ((5, 4), 1)])
def test_strides_that_do_not_matter_are_not_compared(shape: tuple[int, ...], count: int) -> None:
    """Strides of dims of size 1, and those of empty tensors, may differ."""
    frame = tfk.capture(make_fx(planted.stride, tracing_mode="fake")(torch.ones(shape)))
    (found,) = checked_here(frame)
    assert (found.compared, len(found.differences)) == (1, count)


def test_a_python_number_is_compared() -> None:
    """An operator that returns an integer."""
    frame = tfk.capture(
        make_fx(lambda x: x * planted.number(x), tracing_mode="symbolic")(torch.ones(4, 3))
    )
    (found,) = checked_here(frame)
    assert [str(part) for each in found.differences for part in each.parts] == [
        "number: fake 8, real 4"
    ]


# --- ends of processes ----------------------------------------------------------------------------


def test_a_crash_names_the_operator_and_the_sizes() -> None:
    """The other sizes of the batch are compared."""
    report = check(lambda x: planted.crashes(x).cos(), torch.ones(5, 4), runs=20)
    found = only(report)
    assert (found.kind, found.operator) == ("crashes", "planted.crashes")
    assert 7 in found.sizes.values()
    assert found.text.startswith("SIGSEGV")
    assert report.operators == 2
    assert report.script is None


@pytest.mark.sweep
def test_a_hang_is_reported_as_such() -> None:
    """An operator that does not return is killed at the limit of time."""
    requested = [{"x.size(0)": n} for n in (5, 7, 9)]
    report = check(lambda x: planted.hangs(x), torch.ones(5, 4), sizes=requested, timeout=6.0)
    assert (only(report).kind, only(report).operator) == ("hangs", "planted.hangs")
    assert report.tried == 3


@pytest.mark.sweep
def test_an_operator_that_raises_is_not_compared() -> None:
    """It refuses its arguments, which is no fault of its fake kernel; it is said with the node."""
    requested = [{"x.size(0)": n} for n in (5, 7)]
    report = check(lambda x: planted.raises(x).cos(), torch.ones(5, 4), sizes=requested)
    assert report.differences == ()
    assert dict(report.not_compared) == {"raises raised ValueError: not this size": 1}
    assert "1 not compared to the end: raises raised ValueError: not this size" in report.lines()


# --- data-dependent operators ---------------------------------------------------------------------


def test_a_size_from_data_is_that_of_the_real_result() -> None:
    """An unbacked symbol has the number of the node that binds it, also in what follows."""
    frame = frame_of(lambda x: planted.rows(x).t() * 2, torch.ones(5, 4))
    (found,) = checked_here(frame)
    assert found.differences == ()
    assert found.compared >= 3


@pytest.mark.sweep
def test_faults_beside_a_size_from_data_are_found(tmp_path: Path) -> None:
    """A dtype that is wrong, and a range that the number is not in; a script compares symbols by their real numbers."""

    def program(x: torch.Tensor) -> Any:
        return planted.rows_in_float64(x) * 2, planted.few_rows(x) + 1

    script = tmp_path / "call.py"
    report = check(program, torch.ones(5, 4), script=script)
    dtype, bound = report.differences
    assert str(dtype.parts[0]) == "dtype: fake torch.float32, real torch.float64"
    assert bound.operator == "planted.few_rows"
    assert re.fullmatch(r"range of u1: fake 0 to 3, real \d+", str(bound.parts[0]))
    assert run(str(script)).returncode == 1
    script.write_text(bound.script(IMPORTS))
    assert run(str(script)).stderr.endswith("fake and real results differ\n")
    script.write_text(dtype.script(IMPORTS).replace("rows_in_float64", "rows"))
    right = run(str(script))
    assert right.returncode == 0, right.stderr


def test_a_range_that_the_program_asserts_is_no_fault() -> None:
    """Where no data satisfies ``torch._check`` there are no inputs, and it is said."""

    def program(x: torch.Tensor) -> torch.Tensor:
        rows = planted.rows(x.expand(8, 4))
        torch._check(rows.shape[0] == 3)
        return rows + 1

    frame = frame_of(program, torch.ones(1, 4))
    (found,) = checked_here(frame)
    assert (found.differences, found.compared) == ((), 0)
    assert (
        "no data was found with which the runtime asserts of the frame hold" in found.not_compared
    )


# --- right graphs ---------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_a_true_fake_kernel_has_no_difference(name: str) -> None:
    """The operators of the zoo with their true fake kernels, at all sizes that their guards admit."""
    operator = OPERATORS[name]
    with operator.with_true_fake():
        frame = frame_of(operator.op, *operator.samples()[0])
        for found in checked_here(frame, runs=5):
            assert found.differences == ()
            assert found.compared or found.not_compared


@pytest.mark.parametrize("name", ["model_llama", "model_bert", "program_item_with_checks"])
def test_a_real_frame_has_no_difference(name: str) -> None:
    """Recorded frames with models, and with sizes from data."""
    for found in checked_here(tfk.Capture.load(GOLDEN / f"{name}.fkf"), runs=3):
        assert (found.differences, found.not_compared) == ((), "")
        assert found.compared >= 3


# --- graphs ---------------------------------------------------------------------------------------


class Windows(torch.nn.Module):
    """A module with a planted fault behind a layer with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call the planted operator."""
        return planted.odd(torch.relu(self.layer.weight @ x.t()).t()) + 1


def test_a_graph_without_fake_values_is_traced_with_dynamic_sizes() -> None:
    """Its own nodes get no metadata, and the sizes are searched."""
    gm = torch.fx.symbolic_trace(Windows())
    before = [dict(n.meta) for n in gm.graph.nodes]
    report = tfk.check_fakes(gm, [torch.ones(8, 4)], imports=IMPORTS, runs=6)
    assert only(report).operator == "planted.odd"
    assert [dict(n.meta) for n in gm.graph.nodes] == before


@pytest.mark.sweep
def test_a_graph_with_fake_values_needs_no_inputs() -> None:
    """The fake values of its placeholders are its inputs; those of the caller are not written."""
    x = torch.ones(4, 3)
    gm = make_fx(planted.clear_, tracing_mode="symbolic")(x.clone())
    for inputs in (None, [x]):
        report = tfk.check_fakes(gm, inputs, imports=IMPORTS, runs=2)
        assert only(report).operator == "planted.clear_"
        assert only(report).parts[0].what == "dtype"
    assert bool((x == 1).all())


RELU = torch.fx.symbolic_trace(torch.nn.ReLU())
ONES = torch.ones(2)


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "error"),
    [
        ([RELU], {}, tfk.CaptureError, r"^inputs: the graph has no fake values"),
        ([RELU, [ONES, ONES]], {}, tfk.CaptureError, "expected 1 inputs, one for each placeholder; found 2"),
        ([GOLDEN / "model_bert.fkf", []], {}, tfk.CaptureError, "^inputs: a capture has its inputs"),
        ([RELU, [ONES]], {"runs": 0}, tfk.CaptureError, "^runs: invalid value; expected an integer of at least 1"),
        (["none.fkf"], {}, tfk.MissingFileError, "none.fkf"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(
    arguments: list[Any], options: dict[str, Any], kind: Any, error: str
) -> None:
    """A graph without fake values needs inputs, one for each placeholder; a capture has its own."""
    with pytest.raises(kind, match=error):
        tfk.check_fakes(*arguments, **options)


# --- the report -----------------------------------------------------------------------------------


def test_the_report_is_for_people(faults: FakesReport) -> None:
    """The line of the user, the call, and what fake and real value are; then the other operators."""
    first, at, place, call, what, *rest = faults.lines()
    assert re.fullmatch(
        r"8 sizes tried, \d+ operators compared: 10 differ from their fake values", first
    )
    assert at.startswith("first at x.size(0) = ")
    assert re.fullmatch(r"  planted.stride, node stride at .*test_check_fakes.py:\d+ in .*", place)
    assert call == "    stride = torch.ops.planted.stride(y)"
    assert re.fullmatch(r"    stride: fake \[\d+, 1\], real \[1, \d+\]", what)
    assert sum(line.startswith("also at ") for line in rest) == 7
    assert "and 2 more" in rest


# --- the command line -----------------------------------------------------------------------------


PROGRAM = """
import planted_fakes, torch

torch.compile(lambda x: torch.ops.planted.odd(x) + 1, backend="eager", dynamic=True)(torch.ones(8, 4))
torch.compile(lambda x: x.sin(), backend="eager", dynamic=True)(torch.ones(8, 4))


@torch.compile(backend="aot_eager", dynamic=True)
def written(x):
    y = x * 2
    torch.ops.planted.alias(y).add_(1)
    return y


written(torch.ones(8, 4))
"""


@pytest.fixture(scope="module")
def recorded_faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a program's captures."""
    home = tmp_path_factory.mktemp("faults")
    (home / "program.py").write_text(f"import sys\nsys.path.insert(0, {str(ZOO)!r})\n{PROGRAM}")
    fresh(*COMMAND, "run", "program.py", cwd=home, status=None)
    return home


@pytest.mark.sweep
def test_the_command_writes_a_script_and_exits_with_1(
    command: Command, recorded_faults: Path
) -> None:
    """The first capture has the planted fault; the script beside it was run."""
    file, *_ = sorted((recorded_faults / "captures" / "program").iterdir())
    name = str(file.relative_to(recorded_faults))
    done = command("fakes", "--import", "planted_fakes", name, cwd=recorded_faults)
    assert done.returncode == 1, done.stdout + done.stderr
    script = file.with_suffix(".fakes.py")
    assert f"  {name.removesuffix('.fkf')}.fakes.py: real and fake results differ in it, too" in (
        done.stdout.splitlines()
    )
    script.unlink()


@pytest.mark.sweep
def test_the_command_exits_with_0_and_with_2(
    recorded_faults: Path, tmp_path: Path, command: Command
) -> None:
    """A frame that is right; one without operators; one whose operators are not there; a file that is none."""
    first, second, *_ = sorted((recorded_faults / "captures" / "program").glob("*.fkf"))
    right = command("fakes", "--runs", "3", second, cwd=tmp_path)
    assert (right.returncode, right.stderr) == (0, "")
    assert "3 sizes tried, 1 operator compared: all are as their fake values" in right.stdout
    assert list(second.parent.glob("*.py")) == []
    gm = make_fx(lambda x: x, tracing_mode="symbolic")(torch.ones(3))
    tfk.capture(gm).save(tmp_path / "empty.fkf")
    nothing = command("fakes", "empty.fkf", cwd=tmp_path)
    assert nothing.returncode == 2
    assert "no operator was compared" in nothing.stdout
    for name in (first, "none.fkf"):
        error_of(command("fakes", name, cwd=tmp_path))


# --- fuzz -----------------------------------------------------------------------------------------


def test_fuzz_names_the_operator_that_differs(recorded_faults: Path) -> None:
    """Code that was planned by a wrong fake kernel fails; one line says which operator it is."""
    *_, file = sorted((recorded_faults / "captures" / "program").glob("*.fkf"))
    report = tfk.fuzz(file, imports=IMPORTS, runs=3)
    assert report.smallest is not None
    assert report.fake is not None
    assert report.fake.operator == "planted.alias"
    (line,) = [each for each in report.lines() if "fake value" in each]
    assert line.startswith(
        "  planted.alias differs from its fake value there: storage: fake its own, real "
    )


@pytest.mark.sweep
def test_fuzz_says_nothing_of_fake_values_that_are_right(tmp_path: Path) -> None:
    """A backend that is wrong with right fake kernels has no such line."""
    (tmp_path / "wrong_backend.py").write_text(
        "def compiler(gm, inputs):\n    return lambda *a: [x + 1 for x in gm(*a)]\n"
    )
    frame = only_capture_of(lambda x: x.sin(), torch.ones(3, 4), dynamic=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        report = tfk.fuzz(frame, backend="wrong_backend:compiler", runs=2)
    assert report.smallest is not None
    assert report.fake is None
