"""Probes of what works on this machine; each tries the feature itself on a small case."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_fakeify.tools.worker.limits import can_count_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_COMPILING = 60.0
"""Seconds for a run of the C++ compiler."""


@dataclass(frozen=True)
class Support:
    """Whether one feature works here."""

    name: str
    works: bool
    note: str
    """A version, a device, or why the feature does not work."""


def package_version(name: str) -> str | None:
    """The version of an installed distribution, without importing it; ``None`` if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def probe_all(*, refused: str | None) -> tuple[Support, ...]:
    """Run all probes, in the order in which they are printed; takes seconds.

    ``refused`` says why torch cannot be used; ``None`` if it can.
    """
    found = [
        _tried(name, probe) if refused is None else Support(name, False, refused)
        for name, probe in _WITH_TORCH.items()
    ]
    return (*found, *(_tried(name, probe) for name, probe in _WITHOUT_TORCH.items()))


def _tried(name: str, probe: Callable[[], tuple[bool, str]]) -> Support:
    try:
        return Support(name, *probe())
    except Exception as error:  # noqa: BLE001 - any exception is a result
        return Support(name, False, _one_line(f"{type(error).__name__}: {error}"))


def _one_line(text: str) -> str:
    return " ".join(text.split())


# --- with torch ------------------------------------------------------------------------------------


def _rebuilt(kind: str) -> tuple[bool, str]:
    """Rebuild a tensor as a fake tensor from the bytes of its record."""
    import torch

    from torch_fakeify.compat import torch_fakes, torch_symbols
    from torch_fakeify.convert.converter import MetaConverter
    from torch_fakeify.describe.describer import describe_tensor
    from torch_fakeify.serialization.document import dumps, loads

    match kind:
        case "sparse":
            t = torch.ones(2, 3).to_sparse()
        case "jagged":
            t = torch.nested.nested_tensor(
                [torch.ones(1, 2), torch.ones(2, 2)], layout=torch.jagged
            )
        case _:
            t = torch.ones(2, 3).t()
    (record,) = loads(dumps([describe_tensor(t)]))
    fake = MetaConverter(torch_fakes.FakeTensorMode(shape_env=torch_symbols.ShapeEnv())).from_desc(
        record
    )
    works = fake.dtype == t.dtype and fake.ndim == t.ndim and fake.layout == t.layout
    return works, "described, serialized, read and rebuilt"


def _distributed() -> tuple[bool, str]:
    import torch

    distributed: Any = torch.distributed
    if not distributed.is_available():
        return False, "this build of torch has none"
    backends = [
        name for name in ("gloo", "nccl", "mpi") if getattr(distributed, f"is_{name}_available")()
    ]
    return True, ", ".join(backends) or "no backend"


def _cuda() -> tuple[bool, str]:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return True, ", ".join(names)
    built: Any = torch.version
    build = f"CUDA {built.cuda}" if built.cuda else built.hip and f"ROCm {built.hip}"
    return False, f"no device; torch is built for {build}" if build else "torch is built without"


def _triton() -> tuple[bool, str]:
    import torch

    found = package_version("triton") or package_version("pytorch-triton-xpu")
    there = torch.cuda.is_available() or torch.xpu.is_available()
    text = "triton is not installed" if found is None else f"triton {found}"
    return found is not None and there, text if there else f"{text}, no device"


def _other_accelerator() -> tuple[bool, str]:
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    return device is not None and device.type != "cuda", "none" if device is None else device.type


def _drop_in() -> tuple[bool, str]:
    from torch_fakeify import dropin

    count = len({place for place in dropin.replaced() if place.module.startswith("torch.")})
    state = "installed" if dropin.is_installed() else "not installed"
    return count > 0, f"{count} classes in modules of torch; {state}"


_WITH_TORCH: Mapping[str, Callable[[], tuple[bool, str]]] = {
    "strided tensors": lambda: _rebuilt("strided"),
    "sparse tensors": lambda: _rebuilt("sparse"),
    "jagged tensors": lambda: _rebuilt("jagged"),
    "drop-in": _drop_in,
    "torch.distributed": _distributed,
    "CUDA": _cuda,
    "inductor on a GPU": _triton,
    "other accelerator": _other_accelerator,
}

# --- without ---------------------------------------------------------------------------------------


def _compiler() -> tuple[bool, str]:
    """Build a file with inductor's C++ compiler: ``CXX``, else the platform's default."""
    default = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    name = os.environ.get("CXX") or default
    path = shutil.which(name)
    if path is None:
        return False, f"there is no {name}; set CXX to another compiler"
    name = Path(path).name  # the folder is this machine's
    if Path(path).stem.lower() == "cl":
        return True, name
    with tempfile.TemporaryDirectory(prefix="torch-fakeify-") as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text("#include <cmath>\ndouble f(double x) { return std::exp(x); }\n")
        done = subprocess.run(
            [path, "-shared", "-fPIC", "-o", str(source.with_suffix(".so")), str(source)],
            capture_output=True,
            text=True,
            timeout=_COMPILING,
            check=False,
        )
    if done.returncode:
        return False, _one_line(f"{name} fails: {done.stderr or f'status {done.returncode}'}")
    shown = subprocess.run(
        [path, "--version"], capture_output=True, text=True, timeout=_COMPILING, check=False
    )
    return True, _one_line(shown.stdout.partition("\n")[0]) or name


def _installed(package: str, extra: str | None = None) -> Callable[[], tuple[bool, str]]:
    def probe() -> tuple[bool, str]:
        found = package_version(package)
        if found is not None:
            return True, f"{package} {found}"
        hint = f"; pip install 'torch_fakeify[{extra}]'" if extra else ""
        return False, f"{package} is not installed{hint}"

    return probe


def _works(works: bool, yes: str, no: str) -> tuple[bool, str]:
    return works, yes if works else no


_WITHOUT_TORCH: Mapping[str, Callable[[], tuple[bool, str]]] = {
    "inductor on the CPU": _compiler,
    "replay of a corpus": lambda: _works(
        hasattr(os, "fork"), "os.fork is there", "there is no os.fork"
    ),
    "replay --memory": lambda: _works(
        can_count_memory(), "/proc is there", "the memory of a process is counted on Linux alone"
    ),
    "replay --dask": _installed("distributed", "dask"),
    "colours, progress bars": _installed("rich", "rich"),
    "shell completion": _installed("shtab", "completion"),
    "pytest plugin": _installed("pytest", "pytest"),
}
