"""How a request to a worker ended: the reply that the worker wrote, or how its process ended without one.

Nothing here imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from .limits import signal_name

if TYPE_CHECKING:
    from collections.abc import Iterable

Stage: TypeAlias = Literal["compile", "forward", "backward"]


class Thrown(msgspec.Struct, frozen=True):
    """An exception that was raised in a worker."""

    type: str
    """Qualified name of its class."""
    message: str
    memory: bool
    """Whether memory ran out."""
    frames: tuple[str, ...]
    """The innermost frames of the traceback, the innermost last."""


# --- replies --------------------------------------------------------------------------------------


class Found(msgspec.Struct, frozen=True, tag="found"):
    """The requested backend exists."""


class Compiled(msgspec.Struct, frozen=True, tag="compiled"):
    """The frame compiles."""

    milliseconds: float
    run: float | None = None
    """Milliseconds of a call of the compiled code, the median of several, if it was timed."""
    not_run: str = ""
    """Why it was not timed although that was requested."""


class Passed(msgspec.Struct, frozen=True, tag="passed"):
    """The frame compiles and, if it was run, agrees with eager."""

    stage: Stage
    """The last stage that was checked."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The backend or the compiled code raised."""

    error: Thrown
    stage: Stage = "compile"


class Wrong(msgspec.Struct, frozen=True, tag="wrong"):
    """The compiled code differs from eager."""

    stage: Stage
    text: str


class NotCompared(msgspec.Struct, frozen=True, tag="not compared"):
    """The frame compiles, and could not be compared with eager."""

    text: str
    """The reason."""


class Compared(msgspec.Struct, frozen=True, tag="compared"):
    """The frame compiles, and was run at several sizes."""

    results: list[Passed | Failed | Wrong | NotCompared]
    """One for each of the sizes."""


class Ran(msgspec.Struct, frozen=True, tag="ran"):
    """The frame was compiled, run at several sizes and timed."""

    load: float
    """Milliseconds, as is ``compile``."""
    compile: float
    runs: list[dict[str, Any]]
    """For each of the sizes: shapes of the ``outputs``, milliseconds of ``eager``, of the ``first`` and the
    ``next`` compiled call, and ``difference``, the largest absolute one."""


class Parted(msgspec.Struct, frozen=True):
    """A part of an operator's result that its fake value has otherwise."""

    part: str
    """Empty for the result itself, ``[1]`` for an item of it."""
    what: str
    """Such as ``size`` or ``dtype``."""
    fake: str
    real: str

    def __str__(self) -> str:
        name = f"{self.what} of result{self.part}" if self.part else self.what
        return f"{name}: fake {self.fake}, real {self.real}"


class TensorArgument(msgspec.Struct, frozen=True):
    """A tensor that an operator was called with."""

    name: str
    dtype: str
    """Without ``torch.``, as is ``layout``."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: int
    """Equal for tensors that share a storage."""
    elements: int
    """Number of elements in its storage."""
    device: str
    requires_grad: bool = False
    is_parameter: bool = False
    numbers: Any = None
    """Its elements as nested lists, if they are few and whole numbers."""
    low: int = 0
    """The smallest of its elements, if they are whole numbers."""
    high: int = 1


class OperatorCall(msgspec.Struct, frozen=True):
    """One call of an operator, with which it can be called again."""

    text: str
    """The call, as Python over the names of the tensors."""
    imports: tuple[str, ...]
    """Lines that the call needs before it."""
    tensors: tuple[TensorArgument, ...]


class NodeDifference(msgspec.Struct, frozen=True):
    """A node whose real result is not as its fake value, although its arguments are."""

    position: int
    """Among the nodes of the graph."""
    parts: tuple[Parted, ...]
    call: OperatorCall | None
    no_call: str = ""
    """Why there is no call."""


class SizeChecked(msgspec.Struct, frozen=True):
    """The comparison of all nodes with their fake values at some sizes."""

    compared: int
    """Number of nodes that were compared."""
    differences: tuple[NodeDifference, ...] = ()
    not_compared: str = ""
    """Why some nodes were not run, such as an exception."""


class FakesChecked(msgspec.Struct, frozen=True, tag="fakes checked"):
    """The nodes of a frame were run and compared with their fake values."""

    results: list[SizeChecked]
    """One for each of the sizes."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The frame cannot be rebuilt here, or there is no such backend."""

    error: str
    """Name of the class of errors."""
    message: str


class Raised(msgspec.Struct, frozen=True, tag="raised"):
    """The worker raised outside of the backend and the compiled code."""

    error: Thrown

    @property
    def message(self) -> str:
        """The message of the exception."""
        return self.error.message


Reply: TypeAlias = (
    Found
    | Compiled
    | Passed
    | Failed
    | Wrong
    | NotCompared
    | Compared
    | FakesChecked
    | Ran
    | Refused
    | Raised
)


# --- ends without a reply -------------------------------------------------------------------------


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The process ended without a reply: by itself, from outside, or as it was killed at a limit."""

    kind: Literal["hangs", "out of memory", "crashes"]
    """At its limit of time, at its limit of memory, or neither."""
    status: int = 0
    """The exit status of one that crashed; a negative number is the signal that ended it."""
    tail: tuple[str, ...] = ()
    """The end of its output, see `client.output_tail`."""

    @property
    def how(self) -> str:
        """The name of the signal, ``exit status N``, or the limit."""
        if self.kind != "crashes":
            return f"killed at its limit of {'time' if self.kind == 'hangs' else 'memory'}"
        return signal_name(self.status) if self.status < 0 else f"exit status {self.status}"


Outcome: TypeAlias = Reply | Ended


class Here(msgspec.Struct, frozen=True):
    """How the surroundings of a worker differ from the recorded ones, as lines."""

    not_set: tuple[str, ...] = ()
    """Recorded settings that are not set, with the reasons."""
    differs: tuple[str, ...] = ()
    """Everything else: other settings, environment, Python, devices, versions, schemas of operators."""
    stubs: tuple[str, ...] = ()
    """The operators that are not here and have a stub."""

    def lines(self, *, every: bool) -> list[str]:
        """Format the settings that are not set, the stubs and, with ``every``, what else differs."""
        found = ["not set here:", *indented(self.not_set)] if self.not_set else []
        if self.stubs:
            found += ["operators that are not here, as stubs:", *indented(self.stubs)]
        if every and self.differs:
            found += ["differs here:", *indented(self.differs)]
        return found


def indented(texts: Iterable[str]) -> list[str]:
    """Return lines with two spaces before each."""
    return [f"  {text}" for text in texts]


class Answer(msgspec.Struct, frozen=True):
    """How a request ended, and in which process."""

    outcome: Outcome
    torch: str | None = None
    """Its version of torch; ``None`` without a reply."""
    pid: int | None = None
    here: Here | None = None
    """``None`` if the process had not loaded the frame."""
