"""Settings for every test: hypothesis profiles, the processes' environment, no trace listeners."""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Generator

if sys.version_info[:3] == (3, 13, 0):  # torch warns of it, also in processes that tests start
    os.environ["PYTHONWARNINGS"] = "ignore:Guards may run slower on Python 3.13.0:RuntimeWarning"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a job in the background does
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # children that a test starts react to Ctrl-C

# xdist sets it, and readline behind the back of Python: commands print in the width that it says.
os.environ.pop("COLUMNS", None)
os.unsetenv("COLUMNS")

from cli_runs import captures, command, dynamic, fresh_dynamo, recorded  # noqa: F401
from warm_workers import _idle_interpreters, cold_worker, warm_workers  # noqa: F401

# Compiling inside a property test is slow on a busy machine, which is no fault: no deadlines.
settings.register_profile(
    "fast",
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
    print_blob=True,
)
settings.register_profile(
    "random",
    settings.get_profile("fast"),
    max_examples=100,
    derandomize=False,
    database=None,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker consecutive tests, so that each fixture of a module is made once."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many operators passed in each sweep, whose shards may run in several processes."""
    sweeps: dict[str, list[float]] = {}
    for reports in terminalreporter.stats.values():
        called = (report for report in reports if getattr(report, "when", None) == "call")
        for report in called:
            for _, (name, *counts) in (p for p in report.user_properties if p[0] == "sweep"):
                sums = sweeps.get(name, [0] * 4)
                found = [*counts, report.duration]
                sweeps[name] = [a + b for a, b in zip(sums, found, strict=True)]
    for name, (passed, total, samples, seconds) in sorted(sweeps.items()):
        counts = f"{passed} / {total} passed ({samples} samples, {seconds:.0f} s)"
        terminalreporter.write_line(f"sweep: {name}: {counts}")


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call() -> Generator[None]:
    """Detach pytest's handlers from torch's trace logger, which has none by default."""
    logger = logging.getLogger("torch.__trace")
    handlers = logger.handlers
    logger.handlers = []
    try:
        return (yield)
    finally:
        logger.handlers = handlers


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Fail a test that leaves transforms of functorch active, not the tests that follow it."""
    yield
    torch = sys.modules.get("torch")
    left = torch._C._functorch.get_dynamic_layer_stack_depth() if torch else 0
    for _ in range(left):
        torch._C._functorch.pop_dynamic_layer_stack()
    assert not left, f"{item.nodeid} left {left} functorch transforms entered"
