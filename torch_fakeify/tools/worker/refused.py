"""Replies of a worker whose version of torch is refused.

Without it the parent would take the end of the child for a crash of the backend.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

from .replies import Answer, Refused, write_answer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_fakeify.errors import VersionError


def answer_refusal(error: VersionError, arguments: Sequence[str]) -> int:
    """Write the refusal as the reply of one request, or with ``--serve`` of every request.

    Args:
        error: why torch is refused.
        arguments: of the command line.
    """
    answer = Answer(Refused("VersionError", str(error)))
    if arguments[0] != "--serve":
        write_answer(arguments[1], answer)
        return 0
    output = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        write_answer(json.loads(line)["reply"], answer)
        # No child is forked: report this process, with exit status 0.
        os.write(output, b"%d\n0\n" % os.getpid())
    return 0
