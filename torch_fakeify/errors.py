"""Every exception of the package.

One base class, one shape of message: where, what was expected, what was found, what to do. Where an error is
also one of Python's, it derives from that too: ``ValueError``, ``KeyError`` or ``FileNotFoundError``.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence


def class_name(cls: type) -> str:
    """Return the qualified name of a class, as errors and records have it."""
    return f"{cls.__module__}.{cls.__qualname__}"


TRUST = "If you trust it, read it with higher `limits`, or `--trust` on the command line"
"""The remedy for a file that exceeds the limits of a reader."""


class FakeifyError(Exception):
    r"""Base of every error that this package raises on purpose.

    Args:
        what: a sentence about the problem.
        where: a path, a source or a ``$.path`` into a record.
        expected: a correct value.
        found: the actual value.
        fix: a remedy.

    Example:
        >>> print(tfk.FakeifyError("bad", where="$.a", expected="1", found="2", fix="Use 1"))
        $.a: bad; expected 1; found 2. Use 1

        >>> print(tfk.FakeifyError("bad", found="2\n3", fix="Use 1"))
        bad; found 2
        3
        Use 1
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
            text += f"\n{self.fix}" if "\n" in text else f". {self.fix}"
        return _printable(text)


def _printable(text: str) -> str:
    """Return the text with control characters escaped, as a message may quote an untrusted file."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape", "replace").decode()
        for c in text
    )


_LONGEST = 800
"""Most characters of a part of an error, as a file may contain names of any length."""


def _clip(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def check_type(
    value: object,
    kind: type | tuple[type, ...],
    what: str,
    error: type[FakeifyError],
    *,
    fix: str | None = None,
) -> None:
    """Raise an error unless an argument is an instance of a class; ``what`` names it, such as ``a graph``."""
    if isinstance(value, kind):
        return
    kinds = kind if isinstance(kind, tuple) else (kind,)
    classes = (*kinds, type(value))
    names = ["None" if each is type(None) else each.__qualname__ for each in classes]
    raise error(f"not {what}", expected=", ".join(names[:-1]), found=names[-1], fix=fix)


def check_choice(
    value: object, choices: Sequence[str], where: str, error: type[FakeifyError]
) -> None:
    """Raise an error unless an argument, whose name is ``where``, is one of some words."""
    if isinstance(value, str) and value in choices:
        return
    raise error(
        "invalid value", where=where, expected=" or ".join(map(repr, choices)), found=repr(value)
    )


def check_texts(value: object, where: str, error: type[FakeifyError], *, such_as: str) -> None:
    """Raise an error unless an argument is a list of texts; one text is a sequence of characters."""
    if isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value):  # pyright: ignore[reportUnknownVariableType]
        return
    raise error(
        "invalid value",
        where=where,
        expected=f"a list of texts, such as {such_as}",
        found=repr(value),
    )


def check_integer(
    value: object, where: str, error: type[FakeifyError], *, least: int | None = None
) -> None:
    """Raise an error unless an argument is an integer of at least ``least``, and no ``bool``."""
    if isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least):
        return
    expected = "an integer" if least is None else f"an integer of at least {least}"
    raise error("invalid value", where=where, expected=expected, found=repr(value))


class UnsupportedTensorError(FakeifyError, ValueError):
    """A tensor has a property that a record cannot represent (yet).

    Example:
        >>> class Tagged(torch.Tensor): ...
        >>> tfk.describe_tensor(torch.ones(2).as_subclass(Tagged))
        Traceback (most recent call last):
        torch_fakeify.errors.UnsupportedTensorError: ...
    """


class UnsupportedValueError(FakeifyError, ValueError):
    """A constant, expression, source or graph target has no record.

    Example:
        >>> tfk.dumps([torch.ones(2)])
        Traceback (most recent call last):
        torch_fakeify.errors.UnsupportedValueError: ...
    """


class ConvertError(FakeifyError):
    """A record is well-formed but no fake tensor can be made from it here.

    Example:
        >>> from torch._subclasses import FakeTensorMode
        >>> converter = tfk.MetaConverter(FakeTensorMode())
        >>> fake = converter.from_desc(tfk.MetaTensorDescriber().describe_tensor(torch.ones(2)))
        >>> converter.from_desc(tfk.MetaTensorDescriber().describe_tensor(torch.ones(3)))
        Traceback (most recent call last):
        torch_fakeify.errors.ConvertError: ...
    """


class FormatError(FakeifyError, ValueError):
    """Bytes or a file do not have the format: not a capture, truncated, ill-typed.

    Example:
        >>> tfk.loads(b"text")
        Traceback (most recent call last):
        torch_fakeify.errors.FormatError: ...
    """


class VersionError(FormatError):
    """A file needs an unsupported format version or feature, or torch has an unsupported version."""


class LimitError(FormatError):
    """A file has more members, bytes, depth or records than a reader allows.

    Example:
        >>> size = tfk.capture(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(2)]).save(
        ...     "frame.fkf"
        ... )
        >>> tfk.Capture.load("frame.fkf", limits=tfk.Limits(member_bytes=1))
        Traceback (most recent call last):
        torch_fakeify.errors.LimitError: ...
    """


class MissingFileError(FormatError, FileNotFoundError):
    """There is no file of that name.

    Example:
        >>> try:
        ...     tfk.Capture.load("nowhere.fkf")
        ... except FileNotFoundError as error:
        ...     print(type(error).__name__)
        MissingFileError
    """

    # That of ValueError cannot make it; unpicklers that skip the constructor call it by the class.
    __new__ = FileNotFoundError.__new__


class UnknownNameError(FormatError, KeyError):
    """A file names an operator, function, class or source that is missing or not allowed."""


class ShapeEnvError(FakeifyError):
    """A shape environment cannot be snapshotted or restored.

    Example:
        >>> tfk.learn(torch.fx.symbolic_trace(torch.nn.ReLU()), [])
        Traceback (most recent call last):
        torch_fakeify.errors.ShapeEnvError: the inputs do not fit the graph; ...
    """


class CaptureError(FakeifyError):
    """A frame cannot be captured, instantiated, compiled or materialized.

    Example:
        >>> tfk.capture(torch.fx.symbolic_trace(torch.nn.ReLU()), [])
        Traceback (most recent call last):
        torch_fakeify.errors.CaptureError: ...
    """


class StubError(CaptureError):
    """An operator that is not here cannot have a stub, or its stub cannot do what it is called for."""


class FakeKernelError(FakeifyError):
    """No fake kernel can be inferred for an operator, or an inferred one does not know such a call."""


class NotFailingError(CaptureError):
    """A frame that should fail does not, or not in the same way each time."""


class WriteError(FakeifyError):
    """An output file or directory cannot be written; an existing file is unchanged.

    Example:
        >>> capture = tfk.capture(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(2)])
        >>> capture.save("frame.fkf", version=99)
        Traceback (most recent call last):
        torch_fakeify.errors.WriteError: this release cannot write that format version; ...
    """


class ScriptError(FakeifyError):
    """A user's script ended before anything was compiled."""


class MissingScriptError(ScriptError, FileNotFoundError):
    """There is no script of that name.

    Example:
        >>> try:
        ...     tfk.run("nowhere.py")
        ... except FileNotFoundError as error:
        ...     print(error)
        nowhere.py: there is no such script. Check the path
    """


@contextmanager
def wrap_torch_errors(where: str) -> Generator[None, None, None]:
    """Raise `CaptureError` from any exception of torch or a tensor subclass.

    Records are checked when they are decoded. Values that only torch can check make its code fail with
    exceptions of any type.
    """
    try:
        yield
    except (FakeifyError, MemoryError):
        raise
    except Exception as error:
        raise CaptureError(
            "torch cannot rebuild the capture",
            where=where,
            found=f"{type(error).__name__}: {error}",
            fix="The file is damaged, or made for another version of torch",
        ) from error
