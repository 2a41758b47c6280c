"""Capture files: a frame's record in a container, read and written without torch."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from .codec import Decoder, Encoder
from .container import VERSION, Limits, read_container, write_container
from .desc import TensorValue
from .desc_frame import CaptureDesc
from .errors import FormatError, LimitError, UnsupportedValueError, WriteError
from .paths import may_mention_path, short_paths, without_paths
from .versions import PRODUCER, is_newer, refusal_of_newer

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from .desc import MetaTensorDesc, SourceDesc
    from .desc_graph import GraphModuleDesc

_MEMBER = "capture"


def _members_of_version_1(desc: CaptureDesc) -> dict[str, bytes]:
    return Encoder().prepare(*_shared_by(desc)).add(_MEMBER, desc).members()


def _shared_by(desc: CaptureDesc) -> tuple[list[SourceDesc], list[MetaTensorDesc]]:
    """Nearly all sources and tensors of a frame, in the order in which it refers to them first."""
    sources: dict[int, SourceDesc | None] = {}
    tensors: dict[int, MetaTensorDesc] = {}

    def add(tensor: MetaTensorDesc) -> None:
        if id(tensor) in tensors:
            return
        chain = [tensor]
        while chain[-1].base is not None and id(chain[-1].base) not in tensors:
            chain.append(chain[-1].base)
        for link in reversed(chain):
            tensors[id(link)] = link
            sources[id(link.source)] = link.source
            if link.symbolic_context is not None:
                source = link.symbolic_context.tensor_source
                sources[id(source)] = source

    for fx_node in desc.graph.nodes:
        sources[id(fx_node.source)] = fx_node.source
        for _, value in fx_node.meta:
            if type(value) is TensorValue:
                add(value.tensor)
    for entry in desc.inputs:
        if entry.tensor is not None:
            add(entry.tensor)
        sources[id(entry.source)] = entry.source
    sources.update([(id(source), source) for _, source in desc.parameter_sources])
    return [source for source in sources.values() if source is not None], list(tensors.values())


WRITERS: Mapping[int, Callable[[CaptureDesc], dict[str, bytes]]] = MappingProxyType(
    {1: _members_of_version_1}
)
"""What makes a file's members of a record, by format version.

An older version's writer says a record in the words of that version, and refuses by name, with a
``WriteError``, what that version has no words for.
"""


class CaptureFile(NamedTuple):
    """What a capture file holds, and who wrote it."""

    desc: CaptureDesc
    producer: str
    """The release of this package, as ``torch_fakeify 0.1.0``."""


def check_version(version: int) -> None:
    """Refuse a format version that this release does not write.

    Raises:
        WriteError: there is no writer for it.
    """
    if version not in WRITERS:
        known = ", ".join(map(str, sorted(WRITERS)))
        raise WriteError(
            "this release cannot write that format version",
            expected=f"one of {known}" if len(WRITERS) > 1 else f"format version {known}",
            found=repr(version),
            fix="Ask for another one, or write the file with a release that has it",
        )


def private_members(desc: CaptureDesc) -> tuple[CaptureDesc, dict[str, bytes] | None]:
    """The frame with every absolute path in its texts shortened, and the members of its file.

    Most frames have none but in the stacks of their shape environment. In the text that is to be
    written this shows soonest. There are no members where the record had to be searched itself.
    """
    if not _has_data(desc.graph):  # which may look like anything
        short = msgspec.structs.replace(desc, shape_env=short_paths(desc.shape_env))
        # What cannot be written is told when it is.
        with contextlib.suppress(UnsupportedValueError, LimitError):
            members = WRITERS[VERSION](short)
            if not any(map(may_mention_path, members.values())):
                return short, members
    return without_paths(desc), None


def _has_data(graph: GraphModuleDesc) -> bool:
    return bool(graph.tensor_data) or any(_has_data(sub) for _, sub in graph.submodules)


def write_capture(
    path: str | os.PathLike[str],
    desc: CaptureDesc,
    *,
    version: int = VERSION,
    members: dict[str, bytes] | None = None,
) -> int:
    """Write a capture file, whole or not at all, and return its size in bytes.

    Args:
        path: where.
        desc: the frame.
        version: of the format, for a reader that knows no later one.
        members: of the frame in the newest version, if they are known.

    Raises:
        WriteError: the file cannot be written, or not in this version; what was there before is
            untouched.
    """
    check_version(version)
    if members is None or version != VERSION:
        members = WRITERS[version](desc)
    return write_container(
        path, members, version=version, producer=PRODUCER, torch=desc.torch_version
    )


def read_capture(path: str | os.PathLike[str], *, limits: Limits | None = None) -> CaptureDesc:
    """Read a capture file. Runs no code of the file and imports no torch.

    Args:
        path: the file.
        limits: what it may ask for.

    Raises:
        FormatError: no such file, not a capture, truncated, or ill-typed.
        VersionError: a newer release wrote it, with what is not known here.
        LimitError: it asks for more than ``limits`` allow.
    """
    return read_file(path, limits=limits).desc


def read_file(path: str | os.PathLike[str], *, limits: Limits | None = None) -> CaptureFile:
    """As ``read_capture``, with the release that wrote the file."""
    limits = limits or Limits()
    manifest, members = read_container(path, limits=limits)
    try:
        decoder = Decoder(members, limits.expr_nodes)
        del members["tables.json"]  # read, and large
        desc = decoder.get(_MEMBER, CaptureDesc)
        if desc.shape_env is not None:  # nothing else asks about expressions
            decoder.check_frame(desc.shape_env)
        return CaptureFile(desc, manifest.producer)
    except LimitError:
        raise
    except FormatError as error:
        if not is_newer(manifest.producer):
            raise
        raise refusal_of_newer(
            error, str(Path(path)), producer=manifest.producer, torch=manifest.torch
        ) from error
