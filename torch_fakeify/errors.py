"""Every exception of the package.

One base class, one shape of message: where, what was expected, what was found, what to do.
"""

from __future__ import annotations

TRUST = "If you trust it, read it with higher `limits`, or `--trust` on the command line"
"""What to do where a file asks for more than a reader allows."""


class FakeifyError(Exception):
    """Base of every error that this package raises on purpose.

    Args:
        what: the sentence that names the problem.
        where: a path, a source or a ``$.path`` into a record.
        expected: what would have been right.
        found: what was there.
        fix: what the reader can do next.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: str | None = None,
        found: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.expected = expected
        self.found = found
        self.fix = fix
        super().__init__(what)

    def __str__(self) -> str:
        what = _clip(self.what)
        text = what if self.where is None else f"{_clip(self.where)}: {what}"
        if self.expected is not None:
            text += f"; expected {_clip(self.expected)}"
        if self.found is not None:
            text += f"; found {_clip(self.found)}"
        if self.fix is not None:
            text += f". {self.fix}"
        return _printable(text)


def _printable(text: str) -> str:
    """The text with escapes for what a terminal would act on: a message may quote a file."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape", "replace").decode()
        for c in text
    )


_LONGEST = 800
"""Characters of one part of an error that are shown: a file may hold names of any length."""


def _clip(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


class UnsupportedTensorError(FakeifyError):
    """A tensor has a property that a record cannot carry (yet); nothing is dropped in silence."""


class UnsupportedValueError(FakeifyError):
    """A constant, expression, source or graph target has no record."""


class ConvertError(FakeifyError):
    """A record is well-formed but no fake tensor can be made from it here."""


class FormatError(FakeifyError):
    """Bytes or a file are not what the format says: not a capture, truncated, ill-typed."""


class VersionError(FormatError):
    """A file needs a format version or a feature, or torch is a version, that is not known here."""


class LimitError(FormatError):
    """A file asks for more members, bytes, depth or records than a reader allows."""


class UnknownNameError(FormatError):
    """A file names an operator, function, class or source that is not known or not allowed here."""


class ShapeEnvError(FakeifyError):
    """A shape environment cannot be snapshotted or restored."""


class CaptureError(FakeifyError):
    """A frame cannot be captured, instantiated, compiled or materialized."""


class NotFailingError(CaptureError):
    """A frame was to fail, and does not, or not in the same way each time."""


class WriteError(FakeifyError):
    """An output file or directory cannot be written; what was there before is untouched."""


class ScriptError(FakeifyError):
    """A user's script ended before anything was compiled."""
