"""What `replay` says of the end of a worker, beside what is on record."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from places import GOLDEN

import torch_fakeify as tfk
from torch_fakeify.records.frame import FailureDesc
from torch_fakeify.serialization.capture_file import read_capture
from torch_fakeify.tools.replaying import judge, masked
from torch_fakeify.tools.worker.client import output_tail
from torch_fakeify.tools.worker.replies import Answer, Compiled, Ended, Failed, Thrown


def raised(kind: str, message: str, *, memory: bool = False) -> Failed:
    """The reply for an exception of the backend."""
    return Failed(Thrown(kind, message, memory=memory, frames=()))


CRASH = ("crashes", "SIGSEGV", "Segmentation fault")
KILLED = ("crashes", "SIGKILL", "Killed")
LEFT = ("crashes", "exit status 3", "")
RAISED = ("raises", "m.E", "s3 at 0x1")
FAILED = raised("builtins.ValueError", "no")
INTERRUPTED = raised("builtins.KeyboardInterrupt", "")


@pytest.mark.parametrize(
    ("recorded", "outcome", "word", "first"),
    [
        (CRASH, Ended("crashes", -11), "reproduced", "the process was ended by SIGSEGV"),
        (CRASH, Ended("crashes", -6), "not reproduced", "the process was ended by SIGABRT"),
        (CRASH, Ended("crashes", 3), "not reproduced", "the process ended with exit status 3"),
        (CRASH, Ended("hangs"), "hangs", "killed after 5 s"),
        (CRASH, Ended("out of memory"), "out of memory", "killed at more than 0 MiB"),
        (CRASH, Ended("crashes", -9), "out of memory", "the process was killed from outside"),
        (KILLED, Ended("crashes", -9), "reproduced", "the process was killed from outside"),
        (KILLED, Ended("out of memory"), "reproduced", "killed at more than"),
        (LEFT, Ended("crashes", 3), "reproduced", "the process ended with exit status 3"),
        (LEFT, Ended("crashes", 4), "not reproduced", "the process ended with exit status 4"),
        (("hangs", "", ""), Ended("hangs"), "reproduced", "killed after 5 s"),
        (("hangs", "", ""), Ended("crashes", -11), "crashes", "the process was ended by SIGSEGV"),
        (("out of memory", "", ""), Ended("out of memory"), "reproduced", "killed at more than"),
        (("out of memory", "", ""), Ended("crashes", -9), "reproduced", "the process was killed"),
        (RAISED, raised("m.E", "s3 at 0x1"), "reproduced", "  m.E: s3 at 0x1"),
        (RAISED, raised("m.E", "s4 at 0x2"), "reproduced", "  m.E: s4 at 0x2"),
        (RAISED, raised("m.F", "s3 at 0x1"), "not reproduced", "recorded:"),
        (RAISED, raised("m.E", "u3 at 0x1"), "not reproduced", "recorded:"),
        ("not finished", Ended("crashes", -11), "reproduced", "the process was ended by SIGSEGV"),
        ("not finished", Ended("hangs"), "reproduced", "killed after 5 s"),
        ("not finished", Ended("crashes", 0), "reproduced", "the process ended with exit status 0"),
        ("not finished", Compiled(1.0), "not reproduced", "compiled in 1 ms"),
        ("not finished", FAILED, "not reproduced", "recorded:"),
        ("not finished", INTERRUPTED, "reproduced", "  KeyboardInterrupt"),
        (None, INTERRUPTED, "does not compile", "  KeyboardInterrupt"),
        ("not compiled", Ended("crashes", -11), "crashes", "the process was ended by SIGSEGV"),
        ("not compiled", Compiled(1.0), "compiles", "compiled in 1 ms"),
        ("not compiled", FAILED, "does not compile", "  ValueError: no"),
        (None, Ended("crashes", -11), "crashes", "the process was ended by SIGSEGV"),
        (
            None,
            Ended("crashes", -9, ("x",)),
            "out of memory",
            "the process was killed from outside (SIGKILL), as when memory runs out",
        ),
        (None, raised("builtins.MemoryError", "", memory=True), "out of memory", "  MemoryError: "),
    ],
)
def test_each_outcome_has_a_verdict(recorded: Any, outcome: Any, word: str, first: str) -> None:
    """Failures are one if type and message are, up to numbers and addresses, or signal or status."""
    desc = tfk.Capture(read_capture(GOLDEN / "aliases.fkf")).with_state(None).desc
    if isinstance(recorded, tuple):
        kind, how, message = recorded
        failure = FailureDesc(kind=kind, type=how, message=message)
        desc = msgspec.structs.replace(desc, failure=failure)
    else:
        desc = tfk.Capture(desc).with_state(recorded).desc
    verdict = judge(desc, Answer(outcome), timeout=5.0)
    assert (verdict.verdict, verdict.holds) == (word, word in ("reproduced", "compiles"))
    assert verdict.details[0].startswith(first)
    is_on_record = recorded not in (None, "not compiled")
    assert ("recorded:" in verdict.details) == (is_on_record and word != "reproduced")


def test_numbers_and_addresses_are_masked() -> None:
    """Messages that differ in numbers and addresses are equal once masked."""
    assert masked("at 0x7f00 with s77 and 3.5") == masked("at 0xdead with s2 and 10.25")
    assert masked("a") != masked("b")


def test_the_last_lines_of_a_child_show_its_end() -> None:
    """The tail of a dead child's output has the lines that explain its end."""
    lines = [str(number) for number in range(30)]
    assert output_tail(lines) == tuple(lines[-12:])
    assert output_tail(lines[:3]) == ("0", "1", "2")
    lines[10] = "Fatal Python error: Aborted"
    assert output_tail(lines) == tuple(lines[6:18])
