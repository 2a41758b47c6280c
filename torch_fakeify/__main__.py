"""``python -m torch_fakeify``: the command line."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Run a command and return its exit status, 130 if it is interrupted.

    An interrupted process exits here: CPython 3.11 would exit by the signal, not with the status, if
    Ctrl-C arrived in Python code that was called from C++, as on the import of torch.
    """
    try:
        from .cli import main as run

        status = run()
    except KeyboardInterrupt:
        print("torch-fakeify: interrupted", file=sys.stderr)  # noqa: T201
        status = 130
    if status > 128:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
