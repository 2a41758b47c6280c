"""Torch's modules of compiler settings, such as ``torch._inductor.config``.

They are instances of ``torch.utils._config_module.ConfigModule``. An override is of one thread.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{3,}")
"""The name of an environment variable."""


class KnownSetting(NamedTuple):
    """A setting that this torch has."""

    default: Any
    hint: Any
    """The declared type."""


class OwnSetting:
    """The base of values that this package gives to settings for a block; they are not recorded.

    Torch copies its settings and prints them as code: the copy is the same object, and the code ``None``.
    """

    def __deepcopy__(self, _memo: object) -> OwnSetting:
        return self

    def __repr__(self) -> str:
        return "None"


def changed_settings(module: str) -> Iterator[tuple[str, Any]]:
    """Yield the settings of this thread that are not torch's defaults, in torch's order.

    A default that torch read from an environment variable counts as changed.
    """
    config = import_module(module)
    changed: dict[str, Any] = config._get_dict(skip_default=True)
    from_environment = {
        name for name, variables in _variables(module).items() if variables & os.environ.keys()
    }
    for name, entry in config._config.items():
        if name in from_environment and entry.alias is None:
            yield name, getattr(config, name)
        elif isinstance(changed.get(name), OwnSetting):
            continue
        elif name in changed and not _equal(changed[name], entry.default):
            yield name, changed[name]


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b


@functools.cache
def _variables(module: str) -> dict[str, set[str]]:
    """Map settings to the environment variables that the expressions of their defaults name."""
    found: dict[str, set[str]] = {}
    try:
        tree = ast.parse(inspect.getsource(import_module(module)))
    except (OSError, SyntaxError):  # torch without its sources
        return found
    _read_variables(tree.body, "", found)
    return found


def _read_variables(body: Sequence[ast.stmt], prefix: str, found: dict[str, set[str]]) -> None:
    for statement in body:
        match statement:
            case ast.ClassDef(name=name):
                _read_variables(statement.body, f"{prefix}{name}.", found)
            case (
                ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                | ast.Assign(targets=[ast.Name(id=name)], value=value)
            ):
                texts = [part.value for part in ast.walk(value) if isinstance(part, ast.Constant)]
                found[f"{prefix}{name}"] = {
                    text for text in texts if isinstance(text, str) and _VARIABLE.fullmatch(text)
                }
            case _:
                pass


def find_setting(module: str, name: str) -> KnownSetting | None:
    """Return a setting; ``None`` if this torch has none of that name, or only as another name of one."""
    entry = import_module(module)._config.get(name)
    if entry is None or entry.alias is not None:
        return None
    return KnownSetting(entry.default, entry.value_type)


@contextmanager
def settings_set(
    values: Mapping[str, Mapping[str, Any]],
) -> Generator[tuple[tuple[str, str], ...], None, None]:
    """Set settings of this thread, by module and name; they are restored at the end of the block.

    Yields the module and name of each setting that an environment variable of this process overrides.
    """
    with ExitStack() as stack:
        for module, changes in values.items():
            stack.enter_context(import_module(module).patch(dict(changes)))
        yield tuple(
            (module, name)
            for module, changes in values.items()
            for name, value in changes.items()
            if getattr(import_module(module), name) != value
        )
