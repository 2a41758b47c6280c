"""The worker program: compiles or runs one capture and writes a reply.

``python -m torch_fakeify.tools.worker.main REQUEST REPLY`` reads and writes JSON files; with
``--serve`` it is a server, see `serve`. The process has the capture file alone, neither the code nor
the weights of the model.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from torch_fakeify.errors import FakeifyError, VersionError

from .replies import Answer, Refused

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def main(argv: Sequence[str]) -> int:
    """Run the request and write the answer; that torch is refused is one, and no crash of the backend."""
    try:
        from .tasks import carry_out
    except VersionError as error:
        answer = Answer(Refused("VersionError", str(error)))
    else:
        answer = carry_out(json.loads(Path(argv[0]).read_text(encoding="utf-8")))
    # Texts may have surrogates and be of subclasses of `str`.
    text = json.dumps(msgspec.to_builtins(answer, enc_hook=str))
    Path(argv[1]).write_text(text, encoding="utf-8")
    return 0


def serve(directory: str | None = None, modules: Sequence[str] = ()) -> int:
    """Run the requests that arrive on standard input, each in a forked child.

    The modules are imported before the first fork, so that no child needs to; a child reports those that
    cannot be imported.

    Each line is a JSON object of paths: ``request`` and ``reply`` (see `main`), ``log`` for the child's
    output, and ``directory``, its working directory. The server writes the child's pid to standard
    output and, when the child has ended, its exit status (negative: a signal).
    """
    output = os.dup(1)
    os.dup2(2, 1)
    with suppress(FakeifyError):
        from .tasks import import_requested, resolve_backend

        resolve_backend("eager")  # imports what every child needs to find a backend
        import_requested(directory, modules)
    gc.collect()
    gc.freeze()  # so that children share these objects instead of copying their pages
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.close(output)
            _run_child(json.loads(line))
        os.write(output, b"%d\n" % pid)
        _kill_if_parent_exits(pid)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with suppress(ProcessLookupError):
            os.killpg(
                pid, signal.SIGKILL
            )  # its descendants; the pid is not reused before `waitpid`
        _, status = os.waitpid(pid, 0)
        os.write(output, b"%d\n" % os.waitstatus_to_exitcode(status))
    return 0


def _kill_if_parent_exits(pid: int) -> None:
    """Wait for a child; kill it if the parent of this process exits first.

    Only Linux can wait for both; elsewhere the function returns at once.
    """
    try:
        child = os.pidfd_open(pid)
    except (AttributeError, OSError):
        return
    poll = select.poll()
    poll.register(child, select.POLLIN)
    poll.register(0, 0)  # the end of standard input is always reported
    if child not in dict(poll.poll()):
        os.kill(pid, signal.SIGKILL)  # it may not lead a group yet, and is not reaped yet
    os.close(child)


def _run_child(job: Mapping[str, str]) -> NoReturn:
    status = 1
    try:
        os.setsid()
        os.chdir(job["directory"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        status = main([job["request"], job["reply"]])
    except BaseException:  # noqa: BLE001 - the child exits below
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        sys.exit(serve(*json.loads(sys.argv[2])))
    sys.exit(main(sys.argv[1:]))
