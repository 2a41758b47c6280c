"""Predicates of plain records: dense tensors with no special property besides their geometry."""

from __future__ import annotations

from operator import attrgetter

import msgspec

from .tensor import MetaTensorDesc

_IDENTITY = {"id", "dtype", "device", "size", "stride", "storage", "is_fake", "symbols"}
_POLICY = {"source", "symbolic_context", "marks"}
_AUTOGRAD = {"requires_grad", "is_leaf", "is_parameter", "is_buffer", "persistent"}
_OF_VIEWS = {"is_view", "storage_offset", "base", "creation_meta"}
_PLAIN = {
    field.name: field.default
    for field in msgspec.structs.fields(MetaTensorDesc)
    if field.name not in _IDENTITY | _POLICY | _AUTOGRAD
}
"""The fields in which plain tensors that are no views have the default, and these defaults."""
_PLAIN_VIEW = {name: value for name, value in _PLAIN.items() if name not in _OF_VIEWS}

# One call of C reads all fields.
_of_whole, _whole_values = attrgetter(*_PLAIN), tuple(_PLAIN.values())
_of_view, _view_values = attrgetter(*_PLAIN_VIEW), tuple(_PLAIN_VIEW.values())


def is_plain(d: MetaTensorDesc) -> bool:
    """Return whether a tensor has only a geometry and perhaps a base, a history or marks."""
    return _of_view(d) == _view_values


def is_plain_whole(d: MetaTensorDesc) -> bool:
    """Return whether a tensor is plain, no view, and at offset 0 of its storage."""
    return _of_whole(d) == _whole_values


def is_plain_input(d: MetaTensorDesc) -> bool:
    """Return whether a tensor is a real leaf that `is_plain_whole`, and no buffer."""
    return is_plain_whole(d) and d.is_leaf and not d.is_fake and not d.is_buffer
