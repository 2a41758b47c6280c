"""Captures of exported programs: a real one, and one whose signature has inputs and outputs of every kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import msgspec
import torch
from torch.export import Dim, export

import torch_fakeify as tfk
from torch_fakeify.records.frame import (
    ExportArgumentDesc,
    ExportDesc,
    ExportInputDesc,
    ExportModuleDesc,
    ExportOutputDesc,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class _Program(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor, d: dict[str, Any], *, k: int = 2) -> Any:
        self.count.add_(1)
        bias = torch.tensor([1.0, 2.0]) + self.scratch
        return {"y": self.linear(x) * k + bias, "sum": [x + d["z"]]}


def _exported() -> tfk.Capture:
    torch.manual_seed(0)
    args = torch.ones(4, 3), {"z": torch.ones(())}
    shapes = {"x": {0: 2 * Dim("half", max=8)}, "d": {"z": None}, "k": None}
    program = export(_Program(), args, {"k": 2}, dynamic_shapes=shapes)
    return tfk.capture(program.run_decompositions(), constants="small")


def _every_kind() -> tfk.Capture:
    capture = _exported()
    found = capture.desc.export
    assert found is not None
    arguments = tuple(_arguments())
    inputs = tuple(
        ExportInputDesc(kind=kind, argument=ExportArgumentDesc(kind="token", name=f"token_{i}"))
        for i, kind in enumerate(_kinds(ExportInputDesc))
    )
    outputs = tuple(
        ExportOutputDesc(kind=kind, argument=arguments[i % len(arguments)], target=f"target_{i}")
        for i, kind in enumerate(_kinds(ExportOutputDesc))
    )
    module = ExportModuleDesc(
        name="linear", has_signature=True, inputs=arguments, outputs=arguments
    )
    whole = ExportDesc(
        inputs=(*found.inputs, *inputs),
        outputs=(*found.outputs, *outputs),
        modules=(*found.modules, module),
        ranges=found.ranges,
        dialects=("ATEN", "EDGE"),
        constants=found.constants,
    )
    return tfk.Capture(msgspec.structs.replace(capture.desc, export=whole))


def _kinds(record: type[msgspec.Struct]) -> tuple[Any, ...]:
    (field,) = (f for f in msgspec.structs.fields(record) if f.name == "kind")
    return get_args(field.type)


def _arguments() -> Iterator[ExportArgumentDesc]:
    for kind in _kinds(ExportArgumentDesc):
        yield ExportArgumentDesc(
            kind=kind, name=f"a_{kind}", value=1.5 if kind == "constant" else None
        )


def export_cases() -> dict[str, Callable[[], tfk.Capture]]:
    """Name and maker of each capture."""
    return {"exported_program": _exported, "exported_program_of_every_kind": _every_kind}
