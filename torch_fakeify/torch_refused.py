"""What ``child.py`` answers where torch is of a version that is refused: that, to whatever is asked.

Without it the parent would take the end of the child for a crash of the backend.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .errors import VersionError

__all__ = ["answer_refusal"]


def answer_refusal(error: VersionError, arguments: Sequence[str]) -> int:
    """Answer one request, or with ``--serve`` all of them, as ``child.main`` and ``child.serve`` would.

    Args:
        error: the refusal.
        arguments: of the command line.
    """
    reply = json.dumps({"outcome": "refused", "error": "VersionError", "message": str(error)})
    if list(arguments) != ["--serve"]:
        Path(arguments[1]).write_text(reply, encoding="utf-8")
        return 0
    said = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        Path(json.loads(line)["answered"]).write_text(reply, encoding="utf-8")
        # The process that answers is this one, and its exit status is none yet: all is well.
        os.write(said, b"%d\n0\n" % os.getpid())
    return 0
