"""Settings for every test: hypothesis profiles, and nobody listening to torch."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Generator

# Compiling inside a property test is slow on a busy machine and no sign of a fault: no deadlines.
settings.register_profile("fast", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("fast"), derandomize=True, print_blob=True)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "fast")
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Workers get tests that follow one another, and so each fixture of a module is made once."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says of each sweep how many operators passed; its shards may have run in many processes."""
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
    """Pytest listens to every logger; torch's trace has no listener unless somebody asks for it."""
    logger = logging.getLogger("torch.__trace")
    handlers = logger.handlers
    logger.handlers = []
    try:
        return (yield)
    finally:
        logger.handlers = handlers
