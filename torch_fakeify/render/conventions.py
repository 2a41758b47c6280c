"""What the inputs and outputs of a graph are that is no frame of Dynamo."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from torch_fakeify.records.tensor import ListValue, TupleValue

from .text import count_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch_fakeify.records.frame import AotGraphDesc, CaptureDesc, ExportDesc

_INPUTS = {
    "PARAMETER": "parameter",
    "BUFFER": "buffer",
    "CONSTANT_TENSOR": "constant",
    "TOKEN": "token",
    "USER_INPUT": "argument",
}
_OUTPUTS = {
    "LOSS_OUTPUT": "the loss",
    "BUFFER_MUTATION": "the new value of buffer",
    "PARAMETER_MUTATION": "the new value of parameter",
    "GRADIENT_TO_PARAMETER": "the gradient of parameter",
    "GRADIENT_TO_USER_INPUT": "the gradient of argument",
    "USER_INPUT_MUTATION": "the new value of argument",
}


def convention_rows(desc: CaptureDesc) -> list[tuple[str, str]]:
    """Return what the inputs and outputs are of an exported program or of a graph of AOTAutograd.

    Nothing for a frame of Dynamo, whose inputs have sources.
    """
    if desc.export is not None:
        return list(_of_export(desc.export))
    return [] if desc.aot is None else list(_of_aot(desc, desc.aot))


def _of_export(export: ExportDesc) -> Iterator[tuple[str, str]]:
    kinds = Counter(_INPUTS[each.kind] for each in export.inputs)
    yield "inputs", ", then ".join(count_text(n, kind) for kind, n in kinds.items()) or "none"
    changed = [
        f"{each.argument.name} is {_OUTPUTS[each.kind]} {each.target or ''}".rstrip()
        for each in export.outputs
        if each.kind in _OUTPUTS
    ]
    others = len(export.outputs) - len(changed)
    yield "outputs", "; ".join([*changed, count_text(others, "result")])


def _of_aot(desc: CaptureDesc, aot: AotGraphDesc) -> Iterator[tuple[str, str]]:
    tangents = sum(each.name.startswith("tangents_") for each in desc.inputs)
    first = "value" if aot.kind == "backward" else "argument"
    saved = " saved by the forward graph" if aot.kind == "backward" else ""
    text = f"{count_text(len(desc.inputs) - tangents, first)}{saved}"
    yield (
        "inputs",
        text + (f", then {count_text(tangents, 'gradient')} of results" if tangents else ""),
    )
    last = desc.graph.nodes[-1]
    returned = last.args[0] if last.op == "output" and last.args else None
    if aot.kind == "joint" and isinstance(returned, (TupleValue, ListValue)):
        gradients = len(returned.items) - aot.forward_outputs
        forward = count_text(aot.forward_outputs, "result")
        yield (
            "outputs",
            f"{forward} of the forward graph, then {count_text(gradients, 'gradient')} of arguments",
        )
