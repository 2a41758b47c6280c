"""A guard: a condition on arguments, as Python text, as a function and as a record.

The text is Python over ``L`` (the arguments), ``G`` (globals), ``torch`` and ``math``, in the form of
torch's guards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch_fakeify.encoding.sources import decode_source, encode_source
from torch_fakeify.errors import UnsupportedValueError
from torch_fakeify.records.guards import CheckDesc

from .checks import CHECKS
from .scope import reader_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import sympy

    from torch_fakeify.records.guards import CheckName, GuardDesc


class Guard(NamedTuple):
    """One condition on the arguments."""

    text: str
    """The condition as Python over ``L``."""
    holds: Callable[[Mapping[str, Any]], bool]
    """Whether the condition holds for a scope for which all earlier guards hold."""
    expr: sympy.Basic | None = None
    """For a condition on sizes: the condition over symbols with the names of sources."""
    location: Any = None
    """The ``SLoc`` of the traced code that caused it, if any."""
    encode: Callable[[], GuardDesc] | None = None
    """Makes its record; ``None`` for a guard that is a function of the frontend's own."""

    def __str__(self) -> str:
        return self.text if self.location is None else f"{self.text}  # {self.location}"

    @property
    def desc(self) -> GuardDesc:
        """The record of the guard.

        Raises:
            UnsupportedValueError: it is a function that the frontend added, or has a value without a
                record.
        """
        if self.encode is None:
            raise UnsupportedValueError(
                "a guard that is a function has no record",
                where=self.text,
                expected="a guard of torch_fakeify.frontend",
                fix="Check it in the process that loads the other guards, before them",
            )
        return self.encode()


# --- named checks ---------------------------------------------------------------------------------


def check_guard(
    name: CheckName, sources: Sequence[Any], expected: Any, argument: Any = None
) -> Guard:
    """Return the guard that a named check has the expected answer for the values of sources.

    Raises:
        UnsupportedValueError: a source leads to no argument.
    """
    check = CHECKS[name]
    readers = [reader_of(source) for source in sources]
    holds = check.bound(readers, argument, expected)
    text = check.text([source.name for source in sources], argument, expected)

    def encode() -> CheckDesc:
        return CheckDesc(
            check=name,
            sources=tuple(map(encode_source, sources)),
            argument=argument,
            expected=check.encode(expected, text),
        )

    return Guard(text, holds, encode=encode)


def decode_check(desc: CheckDesc, where: str) -> Guard:
    """Return the guard of the record at a path.

    Raises:
        FormatError: it cannot be decoded.
        UnsupportedValueError: a source leads to no argument.
    """
    check = CHECKS[desc.check]
    check.validate(desc, where)
    sources = [decode_source(d) for d in desc.sources]
    expected = check.decode(desc.expected, f"{where}.expected")
    return check_guard(desc.check, sources, expected, desc.argument)
