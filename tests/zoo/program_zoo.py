"""The table of small programs: what users of ``torch.compile`` do, one thing a program.

A program is a function decorated with `program`. Its docstring is the sentence that describes it;
it returns the function to compile and the tuples of arguments to call it with.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

ROOMS = ("zoo_modules", "zoo_tensors", "zoo_code", "zoo_inputs", "zoo_sizes")
"""The modules that hold the programs."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """One program: how it is made, how it is compiled, what is expected."""

    name: str
    sentence: str
    make: Callable[[], tuple[Any, ...]]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``torch.compile``."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings of Dynamo while it is recorded."""
    grad: bool = False
    """Whether it runs with gradients, which are then compared too."""
    backend: str = "aot_eager"
    """The backend that the reader compiles with."""
    compiled: str = "aot_eager"
    """The backend that the writer compiles with, which may add guards."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """What torch is in while the program is made and called."""
    frames: int = 1
    """How many frames Dynamo compiles."""
    implied_guards: str = ""
    """Why guards replayed are equivalent to those recorded, and not the same."""
    ops: bool = False
    """Whether the reader needs ``program_ops``."""
    refused: str | None = None
    """What the error says that recording ends with; ``None`` if it records."""
    slow: bool = False
    """Run by the sweep only."""

    @contextmanager
    def active(self) -> Generator[None]:
        """The settings and what torch is in while the program is made and called."""
        with (
            torch._dynamo.config.patch(**self.config),
            torch.set_grad_enabled(self.grad),
            self.around(),
        ):
            yield


PROGRAMS: dict[str, Program] = {}


def program(**settings: Any) -> Callable[[Callable[[], tuple[Any, ...]]], Any]:
    """Enter a function in the table; the settings are `Program`'s fields, or ``dynamic``."""
    if "dynamic" in settings:
        settings["options"] = {"dynamic": settings.pop("dynamic")}

    def enter(make: Callable[[], tuple[Any, ...]]) -> Any:
        name = make.__name__
        assert name not in PROGRAMS, name
        assert make.__doc__, name
        PROGRAMS[name] = Program(name=name, sentence=make.__doc__, make=make, **settings)
        return make

    return enter


def programs() -> dict[str, Program]:
    """All programs by name."""
    for room in ROOMS:
        import_module(room)
    return PROGRAMS
