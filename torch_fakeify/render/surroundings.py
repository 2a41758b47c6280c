"""What decides a compilation besides the frame, as text: the record, and the differences of two records."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .text import clip, value_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch_fakeify.records.frame import CaptureDesc, SurroundingsDesc

_WIDEST = 400
_DEFAULT = "the default"
_NOT_PLAIN = "not on record"
_NONE = "none"


class Other(NamedTuple):
    """A part in which two surroundings differ."""

    what: str
    a: str
    b: str


def surrounding_rows(desc: CaptureDesc) -> Iterator[tuple[str, str]]:
    """Yield the surroundings of a frame as pairs: settings, environment, machine, versions, time."""
    found = desc.surroundings
    if found is not None:
        for setting in found.settings:
            text = clip(value_text(setting.value), _WIDEST)
            notes = [
                *(["given to torch.compile"] if setting.option else []),
                *(["private parts removed"] if setting.redacted else []),
            ]
            yield f"{setting.module}.{setting.name}", ", ".join([text, *notes])
        yield from ((name, _NOT_PLAIN) for name in found.left_out)
        yield from _backend_options(found).items()
        yield from _environment(found).items()
        yield from _machine(found).items()
    if desc.compile_seconds is not None:
        yield "compile time", seconds_text(desc.compile_seconds)


def setting_texts(desc: CaptureDesc) -> Iterator[str]:
    """Yield each setting of the compiler that was not torch's default, without the module of torch."""
    found = desc.surroundings
    if found is not None:
        for setting in found.settings:
            yield f"{setting.name} = {clip(value_text(setting.value), _WIDEST)}"
        yield from (f"{name}: {_NOT_PLAIN}" for name in found.left_out)
        others = {**_backend_options(found), **_environment(found)}
        yield from (f"{name} = {text}" for name, text in others.items())


def machine_text(desc: CaptureDesc) -> Iterator[str]:
    """Yield Python, system, devices and compile time of a frame."""
    found = desc.surroundings
    if found is not None:
        if found.python:
            yield f"Python {found.python}"
        yield f"{found.system} {found.machine}".strip()
        for device in found.devices:
            yield ", ".join(filter(None, (device.name or device.device, device.capability)))
    if desc.compile_seconds:
        yield f"compiled in {seconds_text(desc.compile_seconds)}"


def seconds_text(seconds: float) -> str:
    """Return a time with its unit."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def setting_differences(a: SurroundingsDesc | None, b: SurroundingsDesc | None) -> Iterator[Other]:
    """Yield the settings and options that differ; with them one graph is two frames.

    Nothing is known of a frame without a record.
    """
    if a is None or b is None:
        return
    yield from _differences(_settings(a), _settings(b), _DEFAULT)
    yield from _differences(_backend_options(a), _backend_options(b), _NONE)


def machine_differences(a: SurroundingsDesc | None, b: SurroundingsDesc | None) -> Iterator[Other]:
    """Yield what else differs: environment, Python, system, devices, versions."""
    if a is None or b is None:
        return
    yield from _differences(_environment(a), _environment(b), "not set")
    yield from _differences(_machine(a), _machine(b), _NONE)


def _differences(a: Mapping[str, str], b: Mapping[str, str], missing: str) -> Iterator[Other]:
    for name in {**a, **b}:
        one, other = a.get(name, missing), b.get(name, missing)
        if one != other:
            yield Other(name, one, other)


def _settings(desc: SurroundingsDesc) -> dict[str, str]:
    """Return the values in effect: an option of ``torch.compile`` is stronger than what is set globally."""
    found = {f"{s.module}.{s.name}": clip(value_text(s.value), _WIDEST) for s in desc.settings}
    return {**found, **dict.fromkeys(desc.left_out, _NOT_PLAIN)}


def _backend_options(desc: SurroundingsDesc) -> dict[str, str]:
    found = {} if desc.mode is None else {"mode": repr(clip(desc.mode, _WIDEST))}
    found.update({f"options.{k}": clip(value_text(v), _WIDEST) for k, v in desc.options})
    return found


def _environment(desc: SurroundingsDesc) -> dict[str, str]:
    return {f"${name}": clip(value, _WIDEST) for name, value in desc.environment}


def _machine(desc: SurroundingsDesc) -> dict[str, str]:
    found = {"Python": desc.python, "system": f"{desc.system} {desc.machine}".strip()}
    for device in desc.devices:
        found[device.device] = ", ".join(filter(None, (device.name, device.capability))) or "there"
    found.update(desc.versions)
    found.update(desc.packages)
    return {name: text for name, text in found.items() if text}
