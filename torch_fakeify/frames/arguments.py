"""A frame's inputs by their sources: the values in a scope, and the guards under which the graph may be used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torch_fakeify.compat import torch_dynamo, torch_symbols
from torch_fakeify.encoding.modes import apply_modes
from torch_fakeify.encoding.names import decode_function
from torch_fakeify.encoding.sources import decode_source
from torch_fakeify.errors import CaptureError, UnknownNameError, wrap_torch_errors
from torch_fakeify.frames.graph.writing import target_may_write
from torch_fakeify.guards.conditions import check_guard
from torch_fakeify.guards.guard_list import Guards
from torch_fakeify.guards.scope import read
from torch_fakeify.guards.size_guards import numbers_of, shape_guards
from torch_fakeify.guards.tensor_guards import (
    alias_guards,
    constant_guard,
    mode_guards,
    tensor_guards,
)
from torch_fakeify.records.tensor import FunctionValue

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch_fakeify.guards.conditions import Guard
    from torch_fakeify.guards.scope import Scope
    from torch_fakeify.guards.tensor_guards import Aliasing
    from torch_fakeify.records.frame import CaptureDesc, InputDesc, ModesDesc
    from torch_fakeify.records.tensor import SourceDesc, Value

_CONSTANTS = (bool, int, float, str, type(None))
"""Types of inputs whose value is guarded."""
_NUMBERS = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
"""The Python type of a symbolic number."""


def sources_of(desc: CaptureDesc) -> list[Any]:
    """Return the sources of the inputs, in the order of the placeholders.

    Raises:
        CaptureError: an input has none.
    """
    found: list[Any] = []
    for position, each in enumerate(desc.inputs):
        if each.source is None:
            raise CaptureError(
                "an input of the frame has no source",
                where=f"input {position}, {each.name}",
                expected="an argument of a function that Dynamo or a frontend traced",
                found="a graph of AOTAutograd"
                if desc.aot is not None
                else "a graph without sources",
                fix="Pass the inputs in the order of capture.inputs; Instance.check_inputs checks them",
            )
        found.append(decode_source(_value_source(each, each.source)))
    return found


def _value_source(desc: InputDesc, source: SourceDesc) -> SourceDesc:
    """Return the source of what the graph gets: Dynamo passes a float as a tensor, under the float's source."""
    found = None if desc.tensor is None else desc.tensor.source
    return source if found is None or found.cls != "FloatTensorSource" else found


def bind(desc: CaptureDesc, scope: Scope) -> list[Any]:
    """Return the values of the inputs in a scope, in the order of the placeholders.

    Raises:
        CaptureError: an input has no source, or the scope lacks a value that the frame had.
        UnsupportedValueError: a source leads to no argument or global.
    """
    for pair in same_objects(desc):
        for source in pair:
            read(source, scope)
    return [read(source, scope) for source in sources_of(desc)]


def aliasing_of(desc: CaptureDesc) -> Aliasing:
    """What the graph of a frame assumes of tensors that are one object or share a storage."""
    if desc.export is None:
        return "objects"
    nodes = [n for graph in desc.graph.graphs() for n in graph.nodes if n.op == "call_function"]
    return "storages" if any(map(_may_write, {n.target for n in nodes})) else "shared"


def _may_write(target: Value) -> bool:
    try:
        return not isinstance(target, FunctionValue) or target_may_write(decode_function(target))
    except UnknownNameError:  # of a library that is not imported
        return True


class FrameGuards:
    """The conditions under which a graph may be used, as its ``ShapeEnv`` has them at the time.

    Args:
        records: of the inputs, in the order of ``inputs`` and ``sources``.
        inputs: the fake inputs.
        same_objects: pairs of sources at which one object must be; of an exported program one storage.
        whole: whether the sources are all that the facts of the ``ShapeEnv`` are about.
        aliasing: what the graph assumes of tensors that are one object or share a storage.
    """

    def __init__(
        self,
        records: Sequence[InputDesc],
        inputs: Sequence[Any],
        sources: Sequence[Any],
        same_objects: Sequence[tuple[Any, Any]],
        shape_env: Any | None,
        modes: ModesDesc,
        *,
        whole: bool,
        aliasing: Aliasing,
    ) -> None:
        rows = list(zip(sources, inputs, strict=True))
        with apply_modes(modes):
            found = list(mode_guards(hidden=True))
        tensors = [(source, value) for source, value in rows if isinstance(value, torch.Tensor)]
        for (source, value), record in zip(rows, records, strict=True):
            found += _number_type(source, value)
            if isinstance(value, _CONSTANTS):  # what traced the graph may have made it part of that
                found.append(constant_guard(source, value))
            if isinstance(value, torch.Tensor):
                found += tensor_guards(source, value, record.tensor)
        same = "same object" if aliasing == "objects" else "same storage"
        found += [check_guard(same, pair, None) for pair in same_objects]
        self._before = found
        if aliasing != "objects":  # fake tensors of a loaded program do not share their storages
            shared = {source.name for source, _ in same_objects}
            tensors = [pair for pair in tensors if pair[0].name not in shared]
        self._after = list(alias_guards(tensors, aliasing))
        self._numbers = [
            number
            for source, value in rows
            if isinstance(value, torch.Tensor) or type(value) in _NUMBERS
            for number in numbers_of(source, value)
        ]
        self._shape_env = shape_env
        self._whole = whole
        self._state: object = None
        self._guards: Guards | None = None

    def guards(self) -> Guards:
        """Return them; those of the backend are among them once it has compiled."""
        env, state = self._shape_env, None
        if env is not None:
            state = len(env.guards), int(env._version_counter), dict(env.var_to_range)
        if self._guards is None or state != self._state:
            facts = torch_symbols.ShapeEnv() if env is None else env
            with wrap_torch_errors("$.shape_env"):
                sizes = list(shape_guards(facts, self._numbers, whole=self._whole))
            self._guards, self._state = Guards([*self._before, *sizes, *self._after]), state
        return self._guards


def _number_type(source: Any, value: Any) -> Iterator[Guard]:
    """Return the guard on the type of a Python number that is an input, also as a tensor of a float."""
    sources = torch_dynamo.dynamo_source()
    if isinstance(source, sources.FloatTensorSource):
        yield check_guard("type", [source.base], float)
    elif type(value) in _NUMBERS and not isinstance(
        source,  # these are numbers of another value
        (
            sources.TensorPropertySource,
            sources.CallMethodItemSource,
            sources.ConvertIntSource,
            sources.DynamicScalarSource,
        ),
    ):
        yield check_guard("type", [source], _NUMBERS[type(value)])


def same_objects(desc: CaptureDesc) -> list[tuple[Any, Any]]:
    """Return the pairs of sources at which the frame had one object."""
    return [(decode_source(one), decode_source(other)) for one, other in desc.same_objects]
