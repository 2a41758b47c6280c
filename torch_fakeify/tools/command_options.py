"""Options that several commands have, and the types of their values."""

from __future__ import annotations

import argparse
from typing import Any

from torch_fakeify.errors import FakeifyError


def add_backend(command: argparse.ArgumentParser, default: str) -> None:
    """Add ``--backend`` and ``--import`` to a command; ``default`` is the text about a command without them."""
    command.add_argument(
        "--backend",
        type=_backend,
        metavar="NAME|MODULE:ATTR",
        help=f"a Dynamo backend by its registered name, or a function of a module; {default}",
    )
    add_imports(command)


def add_imports(command: argparse.ArgumentParser) -> None:
    """Add ``--import`` to a command."""
    command.add_argument(
        "--import",
        action="append",
        type=_module,
        default=[],
        dest="imports",
        metavar="MODULE",
        help="import it first, as one that registers a backend or operators; may be repeated. It is looked "
        "for in the current folder first",
    )


def compile_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options by which a command compiles a capture, as keywords of `replay_capture`."""
    names = ("backend", "imports", "device", "timeout", "memory", "trust")
    return {name: getattr(args, name) for name in names}


def _backend(text: str) -> str:
    module, colon, attribute = text.partition(":")
    if colon:
        _check_dotted(text, module, attribute)
    return text


def _module(text: str) -> str:
    _check_dotted(text, text)
    return text


def _check_dotted(text: str, *names: str) -> None:
    is_file = names[0].endswith(".py")
    if is_file or not all(part.isidentifier() for name in names for part in name.split(".")):
        expected = "a module" if len(names) == 1 else "MODULE:ATTR"
        raise argparse.ArgumentTypeError(
            f"must be {expected}, in dotted names, not a file; found {text!r}"
        )


def seconds(text: str) -> float:
    """Return a positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds; found {text!r}")
    return value


def mebibytes(text: str) -> int:
    """Return the bytes of a positive number of MiB."""
    return _positive(text, "must be a positive number of MiB") << 20


def count(text: str) -> int:
    """Return a number of at least 1."""
    return _positive(text, "must be at least 1")


def _positive(text: str, expected: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{expected}; found {text!r}")
    return value


def sizes(text: str) -> dict[str, int]:
    """Return sizes by name, from ``NAME=N,...`` or from the file of ``fuzz --save``."""
    from torch_fakeify.frames.inputs.size_names import parse_sizes

    try:
        return parse_sizes(text)
    except FakeifyError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
