"""`infer_fake`, `inferring_fakes` and ``run --infer-fakes`` as a user calls them."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from operators import OPERATORS
from processes import COMMAND, fresh
from torch._dynamo.testing import CompileCounterWithBackend

import torch_fakeify as tfk
from torch_fakeify.errors import FakeKernelError, UnknownNameError

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

Tensor = torch.Tensor


def op(name: str, **options: Any) -> Any:
    """Make a custom operator of a function; it is removed with the test's namespace."""
    return torch.library.custom_op(f"infer_tests::{name}", mutates_args=(), **options)


def test_a_trace_infers_what_it_needs() -> None:
    """One compilation serves all sizes, and a later call with another number of dims infers again."""
    pairs = OPERATORS["distances"].op

    def f(x: Tensor, y: Tensor) -> Tensor:
        return (pairs(x * 2, y) + 1).sum(-1)

    counter = CompileCounterWithBackend("aot_eager")
    with tfk.inferring_fakes() as fakes:
        compiled = torch.compile(f, backend=counter, dynamic=True, fullgraph=True)
        for n in (4, 5, 9):
            x, y = torch.randn(n, 3), torch.randn(n + 1, 3)
            torch.testing.assert_close(compiled(x, y), f(x, y))
        assert counter.frame_count == 1
        x, y = torch.randn(2, 4, 3), torch.randn(2, 5, 3)
        torch.testing.assert_close(compiled(x, y), f(x, y))
    assert list(fakes.kernels) == ["zoo_ops::distances"]
    assert "torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])" in fakes.source
    torch._dynamo.reset()
    with pytest.raises(Exception, match="fake impl"):
        torch.compile(f, backend="aot_eager", fullgraph=True)(x, y)


@pytest.mark.sweep
def test_a_registered_kernel_passes_opcheck() -> None:
    """Torch's own check of operators accepts it, for sizes that are formulas and that depend on data."""
    for name in ("projected", "found"):
        operator = OPERATORS[name]
        kernel = tfk.infer_fake(operator.op, operator.samples())
        opdef = operator.op
        before = opdef._abstract_fn
        try:
            kernel.register()
            for args in operator.others():
                result = torch.library.opcheck(opdef, args)
                assert set(result.values()) == {"SUCCESS"}
        finally:
            opdef._abstract_fn = before


def test_what_an_operator_refuses_is_checked() -> None:
    """Sizes that must be equal or divisible are checks of the kernel."""

    @op("grouped")
    def grouped(x: Tensor, y: Tensor, groups: int) -> Tensor:
        if x.shape[1] != y.shape[0] or x.shape[0] % groups:
            raise ValueError("these do not fit")
        return x.reshape(groups, -1).clone()

    kernel = tfk.infer_fake(grouped, [(torch.ones(4, 3), torch.ones(3), 2)])
    checks = kernel.source
    assert "torch._check(x.shape[1] == y.shape[0])" in checks
    assert "torch._check(x.shape[0] % groups == 0)" in checks
    assert "# else ValueError: these do not fit" in checks
    assert kernel.report.refused > 0


@pytest.mark.sweep
def test_a_crash_a_hang_and_memory_are_results() -> None:
    """The process of the caller lives on, and the report says what happened."""
    parent = os.getpid()

    @op("fragile")
    def fragile(x: Tensor) -> Tensor:
        assert os.getpid() != parent
        if x.shape[0] == 7:
            os.kill(os.getpid(), signal.SIGSEGV)
        if x.shape[0] == 5:
            time.sleep(60)
        if x.shape[0] == 8:
            torch.ones(1 << 27)
            time.sleep(60)
        return x.clone()

    kernel = tfk.infer_fake(fragile, [(torch.ones(4),)], timeout=2.0, memory=1 << 28)
    assert {text.partition(" ")[2] for text in kernel.report.ended} >= {
        "process ended: SIGSEGV",
        "ran longer than 2 s",
        "held more than 256 MiB",
    }
    assert kernel(torch.ones(9, device="meta")).shape == (9,)
    assert any("few calls" in text for text in kernel.report.guesses)


def test_an_operator_that_breaks_its_schema_is_refused() -> None:
    """It writes into an argument, or returns one, and its schema does not say so."""
    library = torch.library.Library("infer_tests", "FRAGMENT")
    library.define("writes(Tensor x) -> Tensor")
    library.impl("writes", lambda x: x.add_(1).clone(), "CPU")
    library.define("view(Tensor x) -> Tensor")
    library.impl("view", lambda x: x[1:], "CPU")
    with pytest.raises(FakeKernelError, match="no write into x"):
        tfk.infer_fake("infer_tests::writes", [(torch.ones(3),)])
    with pytest.raises(FakeKernelError, match="shares the storage of x"):
        tfk.infer_fake(torch.ops.infer_tests.view, [(torch.ones(3),)])


def test_errors_name_what_is_wrong() -> None:
    """One error each, with what was expected."""
    same = OPERATORS["same"].op
    with pytest.raises(UnknownNameError, match="namespace::name"):
        tfk.infer_fake("no_such::operator", [])
    with pytest.raises(FakeKernelError, match="no samples"):
        tfk.infer_fake(same, [])
    with pytest.raises(FakeKernelError, match=r"Write \(x,\)"):
        tfk.infer_fake(same, [torch.ones(3)])
    with pytest.raises(FakeKernelError, match="do not fit"):
        tfk.infer_fake(same, [(torch.ones(3), 4)])

    @op("refuses")
    def refuses(x: Tensor) -> Tensor:
        raise ValueError("never")

    with pytest.raises(FakeKernelError, match=r"refuses every sample.*never"):
        tfk.infer_fake(refuses, [(torch.ones(3),)])

    @op("random_rank")
    def random_rank(x: Tensor) -> Tensor:
        return x.sum() if x.sum() > 0 else x.clone()

    with pytest.raises(FakeKernelError, match="depends on data"):
        tfk.infer_fake(random_rank, [(torch.randn(3),)])


def test_a_call_unlike_the_samples_is_refused_by_the_kernel() -> None:
    """A kernel does not guess: what no sample shows is an error that names it."""

    @op("by_mode")
    def by_mode(x: Tensor, mode: str) -> Tensor:
        return x.clone() if mode == "all" else x.sum()

    kernel = tfk.infer_fake(by_mode, [(torch.ones(3), "all"), (torch.ones(3), "sum")])
    assert kernel(torch.ones(5, device="meta"), "all").shape == (5,)
    with pytest.raises(FakeKernelError, match="mode is mean, which was not seen"):
        kernel(torch.ones(5, device="meta"), "mean")


def test_random_results_are_recognized() -> None:
    """Equal calls that give different data are reported."""
    dropped, same = OPERATORS["dropped"], OPERATORS["same"]
    assert tfk.infer_fake(dropped.op, dropped.samples()).report.is_random
    assert not tfk.infer_fake(same.op, same.samples()).report.is_random


PROGRAM = """
import sys
import torch

@torch.library.custom_op("program::pairs", mutates_args=())
def pairs(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cdist(x, y)

def f(x, y):
    return pairs(x * 2, y).relu()

compiled = torch.compile(f, backend=sys.argv[1], fullgraph=True, dynamic=True)
for n in (5, 8):
    x, y = torch.randn(n, 3), torch.randn(n + 1, 3)
    torch.testing.assert_close(compiled(x, y), f(x, y))
"""


def command(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run the program through the command line."""
    (folder / "program.py").write_text(PROGRAM)
    return fresh(*COMMAND, "run", *args, cwd=folder, status=None)


@pytest.mark.sweep
def test_one_flag_compiles_an_operator_without_a_fake_kernel(tmp_path: Path) -> None:
    """Without it the advice names it; with it the program runs, and the kernel is a module to import.

    The frame is then compiled dynamically where the operator is not, by the formula in the file, also
    for another number of dims than the recorded one.
    """
    failed = command(tmp_path, "program.py", "aot_eager")
    assert failed.returncode == 1
    assert "Run it with --infer-fakes" in failed.stderr
    done = command(tmp_path, "--infer-fakes", "program.py", "aot_eager")
    assert done.returncode == 0, done.stderr
    assert "program::pairs: agrees with" in done.stdout
    (written,) = tmp_path.glob("captures/*/fake_kernels.py")
    assert '@torch.library.register_fake("program::pairs")' in written.read_text()
    (frame,) = tmp_path.glob("captures/*/*.fkf")
    capture = tfk.Capture.load(frame)
    with capture.operator_stubs() as stubs:
        assert [each.operator for each in stubs] == ["program.pairs"]
        capture.compile("aot_eager")
        found = torch.ops.program.pairs(
            torch.ones(4, 6, 3, device="meta"), torch.ones(5, 3, device="meta")
        )
        assert found.shape == (4, 6, 5)


@pytest.mark.sweep
def test_one_flag_compiles_it_by_inductor(tmp_path: Path) -> None:
    """The same through inductor."""
    done = command(tmp_path, "--infer-fakes", "program.py", "inductor")
    assert done.returncode == 0, done.stderr
