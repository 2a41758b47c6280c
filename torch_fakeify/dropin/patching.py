"""Replace torch's describer and converter in every module that holds them, and undo it."""

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_fakeify._version import PACKAGE_DIR
from torch_fakeify.compat import torch_dynamo, torch_fakes, torch_symbols
from torch_fakeify.discharge.installing import entailment as prover

from .converter import MetaConverter
from .desc import MetaStorageDesc, MetaTensorDesc
from .describer import MetaTensorDescriber

if TYPE_CHECKING:
    from collections.abc import Generator

_PACKAGE = __name__.partition(".")[0]

_OURS = {
    "MetaConverter": MetaConverter,
    "MetaStorageDesc": MetaStorageDesc,
    "MetaTensorDesc": MetaTensorDesc,
    "MetaTensorDescriber": MetaTensorDescriber,
}
"""Our classes by the names of torch's in ``torch._subclasses.meta_utils``."""

_TORCHS: dict[str, Any] = {name: vars(torch_fakes.meta_utils)[name] for name in _OURS}


class Replaced(NamedTuple):
    """An attribute of a module that `install` replaces."""

    file: str
    """Of the module; empty if it has none."""
    module: str
    attribute: str


def is_installed() -> bool:
    """Whether torch has our classes now."""
    return vars(torch_fakes.meta_utils)["MetaConverter"] is MetaConverter


def install(*, entailment: bool = False) -> None:
    """Puts our classes wherever modules hold torch's; does nothing if they are there already.

    Args:
        entailment: also install `torch_fakeify.entailment`.
    """
    if entailment:
        prover.install()
    if is_installed():
        return
    for module, attribute, name in _holders(_TORCHS):
        module[attribute] = _OURS[name]
    torch_symbols.uninteresting_files().update(_files())
    torch_dynamo.skip_in_dynamo(PACKAGE_DIR)


def uninstall(*, entailment: bool = False) -> None:
    """Puts torch's classes back wherever modules hold ours; does nothing if none are there.

    Modes and converters made meanwhile retain ours.

    Args:
        entailment: also uninstall `torch_fakeify.entailment`.
    """
    if entailment:
        prover.uninstall()
    if not is_installed():
        return
    for module, attribute, name in _holders(_OURS):
        module[attribute] = _TORCHS[name]
    torch_symbols.uninteresting_files().difference_update(_files())
    torch_dynamo.skip_in_dynamo(PACKAGE_DIR, skip=False)


@contextmanager
def installed(*, entailment: bool = False) -> Generator[None, None, None]:
    """Replace torch's converter classes inside the block, and restore what was there before it.

    Args:
        entailment: also have `torch_fakeify.entailment` in effect inside the block.
    """
    before = is_installed()
    install()
    try:
        with prover() if entailment else nullcontext():
            yield
    finally:
        if not before:
            uninstall()


def replaced() -> list[Replaced]:
    """The attributes that hold our classes now, or would if `install` were called."""
    classes = _OURS if is_installed() else _TORCHS
    return sorted(
        Replaced(module.get("__file__") or "", module["__name__"], attribute)
        for module, attribute, _ in _holders(classes)
    )


def _holders(classes: dict[str, Any]) -> Generator[tuple[dict[str, Any], str, str], None, None]:
    """The namespaces of modules other than ours that hold one of these classes, and as what."""
    names = {id(cls): name for name, cls in classes.items()}
    for key, module in list(sys.modules.items()):
        if key.partition(".")[0] == _PACKAGE or not isinstance(module, type(sys)):
            continue
        space = vars(module)
        for attribute, value in list(space.items()):
            name = names.get(id(value))
            if name is not None:
                yield space, attribute, name


def _files() -> set[str]:
    """The files of this package, to be omitted from users' stacks."""
    return {str(path) for path in PACKAGE_DIR.rglob("*.py")}
