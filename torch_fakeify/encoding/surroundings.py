"""What decides a compilation besides the frame -> record: settings, environment, versions, devices."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
import typing
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from torch_fakeify.compat import torch_configs, torch_graphs
from torch_fakeify.records.frame import (
    ConfigModule,
    DeviceInfoDesc,
    InputDesc,
    SettingDesc,
    SurroundingsDesc,
)
from torch_fakeify.records.redact_paths import is_secret, short_message
from torch_fakeify.records.tensor import FunctionValue, Value
from torch_fakeify.serialization import limits

from .values import encode_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch_fakeify.records.frame import Paths
    from torch_fakeify.records.graph import GraphModuleDesc
    from torch_fakeify.records.tensor import MetaTensorDesc

CONFIG_MODULES: tuple[ConfigModule, ...] = typing.get_args(ConfigModule)
INDUCTOR: ConfigModule = "torch._inductor.config"

_CACHES = re.compile(r"(?:graph|local|remote|autograd|autotune)_cache|caching")
"""Settings of caches between compilations, which decide whether one takes place at all."""

_PREFIXES = ("TORCH", "TRITON_", "PYTORCH_")
_OTHER_VARIABLES = re.compile(
    r"TORCH_(?:FAKEIFY|LOGS|TRACE)|TORCH(?:ELASTIC|X|SERVE)_|.*_CACHE|TORCHINDUCTOR_WORKER"
)
"""Variables that do not decide a compilation, by the beginnings of their names.

Inductor itself sets the folders of its caches when it first compiles.
"""

_REMOVED = "<removed>"


def describe_surroundings(
    graph: GraphModuleDesc,
    inputs: Iterable[InputDesc],
    *,
    paths: Paths = "short",
    start_devices: bool = False,
) -> SurroundingsDesc:
    """Describe what decides a compilation in this thread, except for the options of ``torch.compile``.

    Args:
        graph: the frame's graph, whose operators' packages are listed.
        inputs: its inputs.
        paths: ``"full"`` leaves texts unchanged; ``"short"`` removes paths, the names of user and host,
            and secrets. The values of secret variables are removed in any case.
        start_devices: start the runtimes of the frame's devices. A runtime that was not started is not
            asked by default, as a frame of fake tensors does not start it.
    """
    left_out: list[str] = []
    settings = tuple(_settings(left_out, paths))
    return SurroundingsDesc(
        settings=settings,
        left_out=tuple(left_out),
        environment=tuple(_environment(paths)),
        python=platform.python_version(),
        system=platform.system(),
        machine=platform.machine(),
        devices=tuple(_devices(_devices_of(graph, inputs), start=start_devices)),
        versions=(("torch", str(torch.__version__)), *_versions("triton", "numpy")),
        packages=_packages(_homes(graph)),
    )


# --- settings -------------------------------------------------------------------------------------


def _settings(left_out: list[str], paths: Paths) -> Iterator[SettingDesc]:
    for module in CONFIG_MODULES:
        for name, value in torch_configs.changed_settings(module):
            if not _CACHES.search(name):
                yield from _setting(module, name, value, left_out, paths)


def _setting(
    module: ConfigModule,
    name: str,
    value: Any,
    left_out: list[str],
    paths: Paths,
    *,
    option: bool = False,
) -> Iterator[SettingDesc]:
    """Yield the record of a setting, or add its name to those without one."""
    plain = _plain(value, paths)
    if plain is None:
        left_out.append(f"{module}.{name}")
    else:
        yield SettingDesc(
            module=module, name=name, value=plain.value, option=option, redacted=plain.redacted
        )


def with_options(
    desc: SurroundingsDesc, given: Mapping[str, Any], *, of_inductor: bool, paths: Paths = "short"
) -> SurroundingsDesc:
    """Return the record with what ``torch.compile`` was given for a backend.

    Args:
        desc: the record.
        given: for inductor its settings, which ``mode`` and ``options`` amount to; else the keywords of
            the backend, of which ``mode`` and ``options`` are recorded.
        of_inductor: whether the backend is inductor.
        paths: as for `describe_surroundings`.
    """
    left_out = list(desc.left_out)
    if of_inductor:
        settings = [
            setting
            for name, value in given.items()
            for setting in _setting(INDUCTOR, name, value, left_out, paths, option=True)
        ]
        return msgspec.structs.replace(
            desc, settings=(*desc.settings, *settings), left_out=tuple(left_out)
        )
    options: list[tuple[str, Value]] = []
    for name, value in (given.get("options") or {}).items():
        plain = _plain(value, paths)
        if plain is None:
            left_out.append(f"options.{name}")
        else:
            options.append((str(name), plain.value))
    mode = given.get("mode")
    return msgspec.structs.replace(
        desc,
        mode=mode if isinstance(mode, str) else None,
        options=tuple(options),
        left_out=tuple(left_out),
    )


class _Plain(NamedTuple):
    """The record of plain data."""

    value: Value
    redacted: bool
    """Whether private parts were removed."""


class _NotPlainError(Exception):
    """Raised for a value that is not plain data, or too large."""


def _plain(value: Any, paths: Paths) -> _Plain | None:
    """Return the record of plain data without private parts; ``None`` for other values, and large ones."""
    clean: Callable[[str], str] = short_message if paths == "short" else str
    left = limits.SETTING_PARTS

    def part(value: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        kind = type(value)
        if left < 0 or depth > limits.SETTING_DEPTH:
            raise _NotPlainError
        if kind is str and len(value) <= limits.SETTING_TEXT:
            return clean(value)
        if value is None or kind in (bool, float):
            return value
        if kind is int and value.bit_length() < limits.SETTING_BITS:
            return value
        if kind in (list, tuple):
            return kind([part(item, depth + 1) for item in value])
        if kind is dict:
            return {part(k, depth + 1): part(v, depth + 1) for k, v in value.items()}
        raise _NotPlainError

    try:
        shown = part(value, 0)
    except _NotPlainError:
        return None
    return _Plain(encode_value(shown), repr(shown) != repr(value))


def _environment(paths: Paths) -> Iterator[tuple[str, str]]:
    for name, value in sorted(os.environ.items()):
        if not name.startswith(_PREFIXES) or _OTHER_VARIABLES.match(name):
            continue
        if is_secret(name) or len(value) > limits.SETTING_TEXT:
            yield name, _REMOVED
        else:
            yield name, value if paths == "full" else short_message(value)


# --- devices --------------------------------------------------------------------------------------


def _devices_of(graph: GraphModuleDesc, inputs: Iterable[InputDesc]) -> list[str]:
    """Return the devices of a frame's tensors, sorted."""
    tensors: list[MetaTensorDesc] = [tensor for _, tensor in graph.tensors]
    tensors += [entry.tensor for entry in inputs if entry.tensor is not None]
    return sorted({tensor.device for tensor in tensors})


def _devices(names: Iterable[str], *, start: bool) -> Iterator[DeviceInfoDesc]:
    """Describe the CPU, and the accelerators of a frame that this process has."""
    cpu: Any = torch.backends.cpu
    yield DeviceInfoDesc(device="cpu", capability=cpu.get_cpu_capability())
    for name in names:
        kind, _, number = name.partition(":")
        module: Any = getattr(torch, kind, None)
        started: Any = getattr(module, "is_initialized", None)
        if kind in ("cpu", "meta") or started is None or not module.is_available():
            continue
        if start or started():
            yield _accelerator(name, module, int(number or 0))


def _accelerator(name: str, module: Any, number: int) -> DeviceInfoDesc:
    try:
        found = str(module.get_device_name(number))
    except (AttributeError, AssertionError, RuntimeError):  # it has fewer, or no names
        return DeviceInfoDesc(device=name)
    capability: Any = getattr(module, "get_device_capability", None)
    version = capability(number) if capability is not None else ()
    text = ".".join(map(str, version)) if isinstance(version, tuple) else ""  # pyright: ignore[reportUnknownArgumentType]
    return DeviceInfoDesc(device=name, name=found, capability=text)


# --- versions -------------------------------------------------------------------------------------


def _versions(*names: str) -> tuple[tuple[str, str], ...]:
    found = ((name, _version(name)) for name in names)
    return tuple((name, version) for name, version in found if version is not None)


@functools.cache
def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def with_packages(desc: SurroundingsDesc, modules: Iterable[str]) -> SurroundingsDesc:
    """Return the record with the distributions of further modules, such as that of a backend."""
    found = dict([*desc.packages, *_packages(modules)])
    return msgspec.structs.replace(desc, packages=tuple(sorted(found.items())))


def _packages(modules: Iterable[str]) -> tuple[tuple[str, str], ...]:
    roots = {module.partition(".")[0] for module in modules}
    names = roots - {"", "torch", "__main__", "torch_fakeify"}  # which registers stubs of operators
    if not names:
        return ()
    distributions = _distributions()
    own = {dist for name in names for dist in distributions.get(name, ())}
    return _versions(*sorted(own - {"torch"}))


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


_OPERATORS = frozenset({"op", "packet"})


def _homes(graph: GraphModuleDesc) -> set[str]:
    """Return the modules that registered the custom operators of a graph, as far as that is known."""
    found: set[str] = set()
    nodes = (fx_node for each in graph.graphs() for fx_node in each.nodes)
    targets = (fx_node.target for fx_node in nodes)
    for name in (t.name for t in targets if isinstance(t, FunctionValue) and t.kind in _OPERATORS):
        namespace, op, *_ = name.split(".")
        if namespace not in torch_graphs.TORCHS_NAMESPACES:
            found |= {namespace, torch_graphs.module_of_operator(f"{namespace}.{op}") or ""}
    return found
