"""A process that forks writers: each saves two captures to one path in turn, until it is killed.

``python save_server.py FIRST SECOND PATH``: a line on standard input starts a writer, whose process
number is written; the next line is read when it has ended.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from torch_fakeify._atomic_write import write_atomic


def save_forever(captures: list[bytes], path: str) -> NoReturn:
    """Save as ``Capture.save`` does, once there are bytes, until something ends the process."""
    while True:
        for data in captures:
            write_atomic(path, data)


def main(first: str, second: str, path: str) -> None:
    """Read both captures, and fork a writer for each line."""
    captures = [Path(first).read_bytes(), Path(second).read_bytes()]
    write_atomic(path, captures[0])
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # before there is a writer to interrupt
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                os.write(
                    1, b"%d\n" % os.getpid()
                )  # by itself: a fork forgets signals that come early
                save_forever(captures, path)
            finally:
                os._exit(1)
        os.waitpid(pid, 0)
        os.write(1, b"ended\n")


main(*sys.argv[1:])
