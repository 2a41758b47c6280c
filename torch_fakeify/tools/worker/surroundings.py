"""How the surroundings of this process differ from those that a frame was recorded in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_fakeify.compat import torch_dynamo
from torch_fakeify.encoding.operators import other_schemas
from torch_fakeify.encoding.surroundings import describe_surroundings
from torch_fakeify.render.surroundings import machine_differences, setting_differences

from .replies import Here

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch_fakeify.encoding.settings import NotSet
    from torch_fakeify.records.frame import CaptureDesc, OperatorDesc


def here_of(
    desc: CaptureDesc,
    not_set: Iterable[NotSet],
    stubs: Iterable[OperatorDesc] = (),
    *,
    backend: str,
    device: str | None = None,
) -> Here:
    """Compare the surroundings of a frame with those of this process, in which its settings are set.

    Args:
        desc: the frame.
        not_set: its settings that are not set.
        stubs: its operators that have a stub.
        backend: the name of the backend that compiles it here.
        device: to which the frame is moved.
    """
    reasons = {each.setting: each.text for each in not_set}
    recorded = desc.surroundings
    differs: list[str] = []
    if desc.backend not in (None, backend):
        differs.append(_line("backend", desc.backend or "", backend))
    if recorded is None:
        running = torch_dynamo.torch_version()
        if desc.torch_version not in ("", running):
            differs.append(_line("torch", desc.torch_version, running))
        differs.append("the file has no settings, environment and devices on record")
    else:
        here = describe_surroundings(desc.graph, desc.inputs, start_devices=device is None)
        others = (*setting_differences(recorded, here), *machine_differences(recorded, here))
        options = {f"options.{name}" for name, _ in recorded.options} | {"mode"}
        differs += [_line(*each) for each in others if each.what not in {*reasons, *options}]
    if device is not None:
        differs.append(f"the device: moved to {device}")
    differs += other_schemas(desc.operators)
    return Here(tuple(reasons.values()), tuple(differs), tuple(map(_stub_line, stubs)))


def _stub_line(stub: OperatorDesc) -> str:
    gradient = "; its gradient is a stub too" if stub.autograd in ("formula", "composite") else ""
    return f"{stub.schema}{gradient}"


def _line(what: str, recorded: str, here: str) -> str:
    return f"{what}: {recorded} recorded, {here} here"
