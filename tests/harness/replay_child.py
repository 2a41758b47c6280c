"""Process B of the law tests: ``python replay_child.py FILE...``; prints a verdict for each.

Has none of the programs: the facts come from the recorded nodes.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "zoo"))

import sys

from replay_checks import Tally, check_instance

import torch_fakeify as tfk


def main() -> None:
    """Learn from each capture in a new environment, and compare with the recorded one."""
    for path in sys.argv[1:]:
        tally = Tally()
        check_instance(tfk.Capture.load(path).instantiate(), tally)
        sys.stdout.write(f"{next(iter(tally))}\n")
    assert "shape_programs" not in sys.modules


if __name__ == "__main__":
    main()
