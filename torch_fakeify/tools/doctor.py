"""The command ``doctor``: installed versions, support for this torch, and working features.

It also runs without torch, or with a torch that is refused.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch_fakeify._version import __version__
from torch_fakeify.errors import FakeifyError
from torch_fakeify.render.notebook import InNotebook
from torch_fakeify.serialization.container import VERSION
from torch_fakeify.tools.worker.limits import can_count_memory
from torch_fakeify.versions import TorchVersionWarning, support_status, supported_torch_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_REQUIRED = ("sympy", "numpy", "msgspec")
_OPTIONAL = ("distributed", "pytest", "rich", "safetensors", "torchao", "transformers", "diffusers", "triton")  # fmt: skip
"""Packages that are used if they are installed."""
_NOT_INSTALLED = "not installed"
_COMPILING = 60.0
"""Seconds for a run of the C++ compiler."""


@dataclass(frozen=True)
class Support:
    """Whether one feature works here."""

    name: str
    works: bool
    note: str
    """A version, a device, or why the feature does not work."""


@dataclass(frozen=True)
class DropinSite:
    """An attribute of torch that the drop-in replaces."""

    name: str
    found: bool


@dataclass(frozen=True)
class Diagnosis(InNotebook):
    """The result of `doctor`. ``str()`` of it is the printed text.

    Example:
        >>> print(tfk.doctor())  # doctest: +SKIP
    """

    versions: Mapping[str, str]
    """Versions of Python, the platform, this package, its file format, torch and the required packages."""
    optional: Mapping[str, str]
    """Version of each optional package, or ``not installed``."""
    torch: Literal["known", "unknown", "older", "missing"]
    """Support of this release for the version of torch; ``missing`` if torch cannot be imported."""
    refused: str | None
    """Why the modules that use torch cannot be imported; ``None`` if they can."""
    attributes: Mapping[str, Mapping[str, int]]
    """By class of torch, the number of attributes that are ``carried``, ``derived`` and ``dropped``."""
    names: int | None
    """Number of torch's names that this package needs; ``None`` without a census."""
    sources: int | None
    """Number of source classes in this torch."""
    findings: tuple[str, ...]
    """Attributes and names that are unknown or missing in this torch, a line each."""
    sites: tuple[DropinSite, ...]
    """Attributes that the drop-in replaces; empty without torch."""
    supported: tuple[Support, ...]
    """Result of each probe."""

    @property
    def is_well(self) -> bool:
        """Whether torch is usable and the census has no findings; then the command exits with 0."""
        return self.refused is None and not self.findings

    def as_json(self) -> dict[str, Any]:
        """All fields and ``is_well`` as a JSON object."""
        return {**asdict(self), "is_well": self.is_well}

    def lines(self, *, every: bool = False) -> list[str]:
        """Format the report: what works here, then what is installed.

        Args:
            every: also what the census found, and the sites of the drop-in.
        """
        works = [(s.name, s.note) for s in self.supported if s.works]
        fails = [(s.name, s.note) for s in self.supported if not s.works]
        lines = [
            self._verdict(),
            *([] if self.is_well else [f"  {line}" for line in self._of_torch()]),
            "",
            *_table("works here", works),
            "",
            *_table("does not work here", fails),
            "",
            *_table("installed", [*self.versions.items(), *self.optional.items()]),
        ]
        if self.findings or every:
            lines += ["", "census of torch", *(f"  {line}" for line in self._of_census())]
        if every:
            sites = ((s.name, "found" if s.found else "not found") for s in self.sites)
            lines += ["", *_table("drop-in sites", sites)]
        return lines

    def _verdict(self) -> str:
        torch = self.versions["torch"].partition("+")[0]
        if self.is_well and self.torch == "unknown":
            return (
                f"All is well: nothing of torch {torch} is unknown here, although this release is made "
                f"for {supported_torch_text()}."
            )
        if self.is_well:
            return f"All is well: this release knows torch {torch}."
        if self.torch == "missing":
            return f"There is no torch that can be imported; install {supported_torch_text()}."
        if self.refused is not None:
            return f"Torch {torch} is refused; install {supported_torch_text()}."
        return f"Torch {torch} has what this release does not know, see the census below."

    def _of_torch(self) -> Iterator[str]:
        supported = supported_torch_text()
        yield {
            "known": f"known: this release is made for {supported}",
            "unknown": f"not known: this release is made for {supported}",
            "older": f"older than {supported}",
            "missing": "there is none that can be imported",
        }[self.torch]
        yield "it is used" if self.refused is None else f"refused: {self.refused}"

    def _of_census(self) -> Iterator[str]:
        if self.names is None:
            yield "not taken"
            return
        for name, counts in self.attributes.items():
            counted = (f"{counts.get(how, 0)} {how}" for how in ("carried", "derived", "dropped"))
            yield f"{name}: {', '.join(counted)}"
        yield f"{self.sources} source classes"
        yield f"{self.names} names of torch that this package needs"
        if not self.findings:
            yield "nothing unknown"
            return
        yield f"unknown or missing: {len(self.findings)}"
        yield from (f"  {finding}" for finding in self.findings)


def doctor() -> Diagnosis:
    """Inspect the installation: versions, support for this torch, and working features.

    Takes a census of torch, imports what a compilation imports, tries a C++ compiler and rebuilds a
    few small tensors; this takes some seconds. Problems are in the result; none of them raises.

    Returns:
        The report: ``print(doctor())``, or its fields.

    Example:
        >>> tfk.doctor().versions["torch"] == torch.__version__
        True
    """
    running, missing = _running_torch()
    versions = {
        "torch_fakeify": f"{__version__}, writes format version {VERSION}",
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
        "torch": running or package_version("torch") or _NOT_INSTALLED,
        **{name: package_version(name) or _NOT_INSTALLED for name in _REQUIRED},
    }
    refused = missing if running is None else _refusal()
    census, sites = None, ()
    if running is not None:
        from torch_fakeify.compat.census import take_census

        census, sites = take_census(), _sites()
    return Diagnosis(
        versions=versions,
        optional={name: package_version(name) or _NOT_INSTALLED for name in _OPTIONAL},
        torch="missing" if running is None else support_status(running),
        refused=refused,
        attributes={} if census is None else {k: dict(v) for k, v in census.attributes.items()},
        names=None if census is None else census.names,
        sources=None if census is None else census.sources,
        findings=() if census is None else census.findings,
        sites=sites,
        supported=probe_all(refused=None if refused is None else "refused, see above"),
    )


def _running_torch() -> tuple[str | None, str | None]:
    """The version of torch with its build suffix and ``None``, or ``None`` and why it cannot be imported."""
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - a broken installation may raise anything
        return None, f"torch cannot be imported, {type(error).__name__}: {error}"
    return str(torch.__version__), None


def _refusal() -> str | None:
    """Why the modules that use torch's private names cannot be imported; ``None`` if they can."""
    from torch_fakeify.compat.private_names import import_torch_modules

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TorchVersionWarning)  # it is in the report
            import_torch_modules()
    except FakeifyError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - a torch without these names may raise anything
        return f"{type(error).__name__}: {error}"
    return None


def _sites() -> tuple[DropinSite, ...]:
    from torch_fakeify.compat.private_names import DROPIN_SITES, name_exists

    return tuple(DropinSite(name, name_exists(name)) for name in DROPIN_SITES)


def _table(title: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    found = [*rows] or [("none", "")]
    width = max(len(name) for name, _ in found)
    return [title, *(f"  {name:{width}}  {text}" for name, text in found)]


# --- probes of what works here: each tries the feature itself on a small case ----------------------------


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


_WITHOUT_TORCH: Mapping[str, Callable[[], tuple[bool, str]]] = {
    "inductor on the CPU": _compiler,
    "replay of a corpus": lambda: (
        (True, "os.fork is there") if hasattr(os, "fork") else (False, "there is no os.fork")
    ),
    "replay --memory": lambda: (
        (True, "/proc is there")
        if can_count_memory()
        else (False, "the memory of a process is counted on Linux alone")
    ),
    "replay --dask": _installed("distributed", "dask"),
    "colours, progress bars": _installed("rich", "rich"),
    "shell completion": _installed("shtab", "completion"),
    "pytest plugin": _installed("pytest", "pytest"),
}
