"""``doctor``: what is installed here, whether its torch is known, and what works.

It says what it can without torch, or with one that is refused.
"""

from __future__ import annotations

import platform
import warnings
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from . import __version__
from .container import VERSION
from .dropin_sites import DROPIN_SITES
from .errors import FakeifyError
from .probes import Support, package_version, probe_all
from .versions import TorchVersionWarning, known_torch_text, standing_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .torch_census import Census

__all__ = ["Diagnosis", "DropinSite", "doctor"]

_REQUIRED = ("sympy", "numpy", "msgspec")
_OPTIONAL = ("distributed", "pytest", "rich", "safetensors", "torchao", "transformers", "diffusers", "triton")  # fmt: skip
"""Packages that something here works with, if they are there."""
_NOT_INSTALLED = "not installed"


@dataclass(frozen=True)
class DropinSite:
    """A place of torch that the drop-in puts something of ours into."""

    name: str
    found: bool


@dataclass(frozen=True)
class Diagnosis:
    """What `doctor` has found. ``str()`` of it is the printed text."""

    versions: Mapping[str, str]
    """Of Python, the platform, this package, the format that it writes, torch and what is required."""
    optional: Mapping[str, str]
    """The versions of optional packages, or that they are not installed."""
    torch: Literal["known", "unknown", "older", "missing"]
    """How the version of torch stands to this release; ``missing``: there is none to import."""
    refused: str | None
    """Why what touches torch is refused or fails; ``None`` if it is not."""
    attributes: Mapping[str, Mapping[str, int]]
    """By class of torch: how many of its attributes are ``carried``, ``derived`` and ``dropped``."""
    names: int | None
    """Names of torch that this package needs; ``None`` if no census could be taken."""
    sources: int | None
    """Source classes of the torch that is here."""
    findings: tuple[str, ...]
    """What the census finds that is unknown or gone, a line each."""
    sites: tuple[DropinSite, ...]
    """Where the drop-in goes; empty without torch."""
    supported: tuple[Support, ...]
    """What works here, tried out."""

    @property
    def is_well(self) -> bool:
        """Whether nothing is unknown and nothing refused; the exit status of the command is 0 then."""
        return self.refused is None and not self.findings

    def as_json(self) -> dict[str, Any]:
        """All of it as plain data, and ``is_well``."""
        return {**asdict(self), "is_well": self.is_well}

    def lines(self) -> list[str]:
        """The report, line by line."""
        return [
            *_table("versions", self.versions.items()),
            "",
            *_table("optional", self.optional.items()),
            "",
            "torch",
            *(f"  {line}" for line in self._of_torch()),
            "",
            "census",
            *(f"  {line}" for line in self._of_census()),
            "",
            *_table("drop-in sites", ((s.name, _word(s.found)) for s in self.sites)),
            "",
            *_table("supported here", ((s.name, _supported(s)) for s in self.supported)),
        ]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _of_torch(self) -> Iterator[str]:
        match self.torch:
            case "known":
                yield f"known: this release is made for {known_torch_text()}"
            case "unknown":
                yield f"not known: this release is made for {known_torch_text()}"
            case "older":
                yield f"older than {known_torch_text()}"
            case "missing":
                yield "there is none that can be imported"
        yield "it is used" if self.refused is None else f"refused: {self.refused}"

    def _of_census(self) -> Iterator[str]:
        if self.names is None:
            yield "not taken"
            return
        for name, counts in self.attributes.items():
            ways = (f"{counts.get(how, 0)} {how}" for how in ("carried", "derived", "dropped"))
            yield f"{name}: {', '.join(ways)}"
        yield f"{self.sources} source classes"
        yield f"{self.names} names of torch that this package needs"
        if not self.findings:
            yield "nothing unknown"
            return
        yield f"unknown or gone: {len(self.findings)}"
        yield from (f"  {finding}" for finding in self.findings)


def doctor() -> Diagnosis:
    """Look at what is installed here and say whether it is known, and what works.

    The census is taken of any torch, also of a known one. It imports what a compilation would, tries
    a C++ compiler and rebuilds a few small tensors: some seconds. It never raises for what it finds.

    Returns:
        the report: ``print(doctor())``, or its fields.
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
    census, sites = (None, ()) if running is None else (_census(), _sites())
    return Diagnosis(
        versions=versions,
        optional={name: package_version(name) or _NOT_INSTALLED for name in _OPTIONAL},
        torch="missing" if running is None else standing_of(running),
        refused=refused,
        attributes={} if census is None else {k: dict(v) for k, v in census.attributes.items()},
        names=None if census is None else census.names,
        sources=None if census is None else census.sources,
        findings=() if census is None else census.findings,
        sites=sites,
        supported=probe_all(refused=None if refused is None else "refused, see above"),
    )


def _running_torch() -> tuple[str | None, str | None]:
    """The version of torch with its build suffix, or why there is none."""
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - a broken installation may end in any way
        return None, f"torch cannot be imported, {type(error).__name__}: {error}"
    return str(torch.__version__), None


def _refusal() -> str | None:
    """What comes of asking for the room that all others get torch from."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TorchVersionWarning)  # the report says it
            from . import _torch as room
    except FakeifyError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - whatever a torch without our names ends with
        return f"{type(error).__name__}: {error}"
    return None if room.torch_version() else "torch has no version"


def _census() -> Census | None:
    from .torch_census import take_census

    return take_census()


def _sites() -> tuple[DropinSite, ...]:
    from .private_names import is_there

    return tuple(DropinSite(name, is_there(name)) for name in DROPIN_SITES)


def _table(title: str, rows: Any) -> list[str]:
    found = [(name, text) for name, text in rows]
    width = max((len(name) for name, _ in found), default=0)
    return [title, *(f"  {name:{width}}  {text}" for name, text in found or [("none", "")])]


def _word(found: bool) -> str:
    return "found" if found else "not found"


def _supported(support: Support) -> str:
    return f"{'yes' if support.works else 'no '}  {support.note}"
