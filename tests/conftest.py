"""Settings for every test: hypothesis profiles."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Compiling inside a property test is slow on a busy machine and no sign of a fault: no deadlines.
settings.register_profile("fast", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("fast"), derandomize=True, print_blob=True)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "fast")
)
