"""The table of small programs: what users of ``torch.compile`` do, one thing a program.

A program is a function decorated with `program`. Its docstring is the sentence that describes it;
it returns the function to compile and the tuples of arguments to call it with.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from compiled_programs import Example

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

ROOMS = ("zoo_modules", "zoo_tensors", "zoo_code", "zoo_inputs", "zoo_sizes")
"""The modules that hold the programs."""


@dataclass(frozen=True, kw_only=True)
class Program(Example):
    """One program: how it is made, how it is compiled, what is expected.

    The reader compiles it with `backend`.
    """

    name: str
    sentence: str
    compiled: str = "aot_eager"
    """The backend that the writer compiles with, which may add guards."""
    frames: int = 1
    """How many frames Dynamo compiles."""
    ops: bool = False
    """Whether the reader needs ``program_ops``."""
    slow: bool = False
    """Run by the sweep only."""

    @contextmanager
    def active(self) -> Generator[None]:
        """The settings and what torch is in while the program is made and called."""
        with (
            torch._dynamo.config.patch(**self.dynamo),
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


def of_sizes(
    *makes: Callable[[int], Any], sizes: tuple[int, ...] = (6, 9)
) -> list[tuple[Any, ...]]:
    """The arguments of calls, each of a size."""
    return [tuple(make(n) for make in makes) for n in sizes]


def programs() -> dict[str, Program]:
    """All programs by name."""
    for room in ROOMS:
        import_module(room)
    return PROGRAMS
