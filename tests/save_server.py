"""A process that forks writers: each saves two captures to one path in turn, until it is killed.

``python save_server.py FIRST SECOND PATH``: a line on standard input starts a writer, whose process
number is written; the next line is read when it has ended.
"""

from __future__ import annotations

import os
import signal
import sys

from torch_fakeify.files import read_capture, write_capture


def save_forever(descs: list[object], path: str) -> None:
    """Save, until something ends the process."""
    while True:
        for desc in descs:
            write_capture(path, desc)  # type: ignore[arg-type]


def main(first: str, second: str, path: str) -> None:
    """Read both captures, and fork a writer for each line."""
    descs: list[object] = [read_capture(first), read_capture(second)]
    for desc in descs:
        write_capture(path, desc)  # type: ignore[arg-type]  # everything is imported and compiled
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                save_forever(descs, path)
            finally:
                os._exit(1)
        os.write(1, b"%d\n" % pid)
        os.waitpid(pid, 0)
        os.write(1, b"ended\n")


main(*sys.argv[1:])
