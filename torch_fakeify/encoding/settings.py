"""Recorded settings -> torch's: which of them a file may set, and the context that sets them.

A file may set numbers, truth values and words, of settings that neither run a program nor write, import
or connect. Everything else is set only for a file that is trusted.
"""

from __future__ import annotations

import re
import types
import typing
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from torch_fakeify.compat import torch_configs
from torch_fakeify.errors import FormatError
from torch_fakeify.records.rewrite import walk
from torch_fakeify.records.tensor import DictValue, FloatValue, ListValue, Value

from .values import decode_value

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch_fakeify.compat.torch_configs import KnownSetting
    from torch_fakeify.records.frame import CaptureDesc, SettingDesc, SurroundingsDesc

_UNSAFE = re.compile(
    r"""
    ^(?:trace|aot_inductor|aot_inductor_mode|halide|test_configs|autoheuristic_collect|lookup_table)\.
    | ^(?:debug|compile_threads)$
    | (?:^|[._])(?:save|store|dump|draw|upload|download|export|visualize|log|repro|replay_record)_
    | (?:^|[._])(?:cmd|command|compiler|worker|subproc|remote|hook|override|logging|dump|profile
        |profiler|profiling|cprofile|proton|objgraph|progress|runner|pgo|dir|logpath)(?=$|[._])
    | (?:^|[._])(?:cxx|cc|exe|path|home|root|file|filename|url|lib|libs|library|log|output|backend
        |custom_pre_pass|custom_post_pass|custom_pass|fn|class)$
    | (?<!fake_tensor_)cach(?:e|ing)
    | ^pipeline_max_autotune
    """,
    re.VERBOSE,
)
"""Names of settings that may make torch run a program, write, import, connect, or read a file."""

_WORDS = re.compile(r"[A-Za-z0-9_]+(?:,[A-Za-z0-9_]+)*")
"""A text that is no path, flag or expression, such as ``ATEN,TRITON``."""


class NotSet(typing.NamedTuple):
    """A recorded setting that is not set here."""

    setting: str
    """Its dotted name."""
    reason: str
    trustable: bool = False
    """Whether it is set for a file that is trusted."""

    @property
    def text(self) -> str:
        """The setting and the reason in one line."""
        return f"{self.setting}: {self.reason}{'; --trust sets it' if self.trustable else ''}"


def settings_to_set(
    desc: SurroundingsDesc | None, *, trust: bool = False
) -> tuple[dict[str, dict[str, Any]], tuple[NotSet, ...]]:
    """Return the values to set, by module and name, and the settings that are not set.

    With ``trust`` also what may run or write something is set.
    """
    values: dict[str, dict[str, Any]] = {}
    not_set: dict[str, NotSet] = {}
    for setting in () if desc is None else desc.settings:
        dotted = f"{setting.module}.{setting.name}"
        not_set.pop(dotted, None)  # of two the option counts
        values.get(setting.module, {}).pop(setting.name, None)
        refused = _refusal(setting, dotted, trust=trust)
        if refused is not None:
            not_set[dotted] = refused
        else:
            values.setdefault(setting.module, {})[setting.name] = _plain_value(setting.value)
    if desc is not None:
        for name in desc.left_out:
            not_set.setdefault(
                name, NotSet(name, "its value is not on record, as it is no plain data")
            )
    return values, tuple(not_set.values())


@contextmanager
def with_settings(
    desc: SurroundingsDesc | None, *, trust: bool = False
) -> Generator[tuple[NotSet, ...], None, None]:
    """Set the recorded settings in this thread and restore torch's at the end of the block.

    Yields the settings that are not set, as of `settings_to_set`.
    """
    values, not_set = settings_to_set(desc, trust=trust)
    with torch_configs.settings_set(values) as overridden:
        reason = "a variable of the environment here sets it"
        yield *not_set, *(NotSet(f"{module}.{name}", reason) for module, name in overridden)


def options_to_pass(
    desc: CaptureDesc, backend: str, *, trust: bool = False
) -> tuple[dict[str, Any], tuple[NotSet, ...]]:
    """Return the recorded ``mode`` and ``options`` as keywords for a backend, and those not to pass.

    A backend gets them if it has the recorded one's name and the file is trusted, as their meaning to a
    backend other than inductor is unknown. The options of inductor are settings.
    """
    found = desc.surroundings
    if found is None:
        return {}, ()
    is_same = backend == desc.backend
    if is_same and trust:
        given: dict[str, Any] = {"mode": found.mode} if found.mode else {}
        if found.options:
            given["options"] = {name: _plain_value(value) for name, value in found.options}
        return given, ()
    why = "a backend may run or write something" if is_same else "it is of another backend"
    names = [*(["mode"] if found.mode else []), *(f"options.{name}" for name, _ in found.options)]
    return {}, tuple(NotSet(name, why, trustable=is_same) for name in names)


def _refusal(setting: SettingDesc, dotted: str, *, trust: bool) -> NotSet | None:
    """Return why a setting is not set; ``None`` if it is."""
    found = torch_configs.find_setting(setting.module, setting.name)
    if found is None:
        return NotSet(dotted, "this torch has no such setting")
    if setting.redacted:
        return NotSet(dotted, "its value is not on record, as it had private parts")
    if trust:
        return None
    if _UNSAFE.search(setting.name):
        return NotSet(dotted, "it could run or write something", trustable=True)
    if not _is_safe(_plain_value(setting.value), found):
        return NotSet(dotted, "a value of this kind is not set from a file", trustable=True)
    return None


def _plain_value(value: Value) -> Any:
    """Return the plain data of a record.

    Raises:
        FormatError: it is of another kind, which no file has.
    """
    if any(part.immutable for part in walk(value, (ListValue, DictValue), inside=True)):
        raise FormatError("the value of a setting is not plain data", where="$.surroundings")

    def refuse(part: Value) -> Any:
        if isinstance(part, FloatValue):
            return NotImplemented
        raise FormatError("the value of a setting is not plain data", where="$.surroundings")

    return decode_value(value, where="$.surroundings", hook=refuse)


def _is_safe(value: Any, found: KnownSetting) -> bool:
    """Whether a value is of the kind of a setting, and contains no text but words of torch's."""
    kinds, words = _declared(found.hint)
    default = found.default
    kind = type(value)
    if any(kind is type(word) and value == word for word in words):
        return True
    if kind is str:
        is_word = isinstance(default, str) and _WORDS.fullmatch(default)
        return bool(is_word and _WORDS.fullmatch(value))
    if kind in (list, tuple):
        return (kind is type(default) or kind in kinds) and _is_numeric(value)
    if kind is dict:
        fits = isinstance(default, dict) and value.keys() <= default.keys()
        return fits and all(map(_is_numeric, value.values()))
    if kind is int and (float in kinds or type(default) is float):
        return True
    return kind is type(default) or kind in kinds


def _declared(hint: Any) -> tuple[set[Any], list[Any]]:
    """Return the types and the literal values that a type hint allows."""
    kinds: set[Any] = set()
    words: list[Any] = []
    pending = [hint]
    while pending:
        part = pending.pop()
        origin = typing.get_origin(part)
        if origin is Literal:
            words += typing.get_args(part)
        elif origin in (typing.Union, types.UnionType):
            pending += typing.get_args(part)
        else:
            kinds.add(origin or part)
    return kinds, words


def _is_numeric(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_numeric, value))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return value is None or isinstance(value, (bool, int, float))
