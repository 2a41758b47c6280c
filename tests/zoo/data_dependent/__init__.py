"""Programs whose sizes come from data, after the kinds of reports in public trackers.

Each program is a function with inputs on which it runs, and one that it refuses. `verdicts` has what
torch alone says of each, what torch says with entailment, and the check that its error suggests.
"""

from __future__ import annotations

from . import batching, branching, joining, quantities, shaping, slicing  # noqa: F401
from .program import PROGRAMS as PROGRAMS
from .program import Program as Program
