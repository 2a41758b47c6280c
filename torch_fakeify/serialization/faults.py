"""Errors: internal ones that collect their path on the way out, and those of limits."""

from __future__ import annotations

from torch_fakeify.errors import FakeifyError, LimitError


class Fault(ValueError):  # noqa: N818 - never leaves the package
    """An internal error to which each level adds its part of the path.

    It is a ``ValueError``, so that msgspec adds the path when a hook raises it.

    Args:
        what: as for ``FakeifyError``, like ``expected``, ``found`` and ``fix``.
        kind: the public error to raise; by default the caller of `error` decides.
    """

    def __init__(
        self,
        what: str,
        expected: str | None = None,
        found: str | None = None,
        *,
        kind: type[FakeifyError] | None = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what, self.expected, self.found = what, expected, found
        self.kind, self.fix = kind, fix
        self.path: list[str] = []

    def at(self, part: str) -> Fault:
        """Put ``part`` before the path."""
        self.path.append(part)
        return self

    def error(self, where: str, kind: type[FakeifyError]) -> FakeifyError:
        """Return the public error at ``where`` and this path."""
        where += "".join(reversed(self.path))
        return (self.kind or kind)(
            self.what, where=where, expected=self.expected, found=self.found, fix=self.fix
        )


def check_limit(
    found: int, most: int, what: str, where: str, unit: str = "", *, fix: str | None = None
) -> None:
    """Raise a ``LimitError`` if a number is above a limit.

    ``fix`` is for limits that a reader can raise; only then the number is shown. ``unit`` is put after the limit.
    """
    if found > most:
        shown = None if fix is None else str(found)
        raise LimitError(what, where=where, expected=f"at most {most}{unit}", found=shown, fix=fix)
