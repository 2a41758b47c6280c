"""The census of the installed torch: what it has that no table of this package lists.

`attribute_policies` and `known_fields` list what is supported, `private_names` what is required. The
census compares them with torch's classes: live objects, which show the attributes that are set, sources,
which also have those that only a rare configuration sets, and fields. A finding is a short line
that begins with the unknown or missing name.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import linecache
from collections import Counter
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from .attribute_policies import (
    FAKE_MODE_ATTRIBUTES,
    SHAPE_ENV_ATTRIBUTES,
    SYM_NODE_ATTRIBUTES,
    TRACKED_FAKE_ATTRIBUTES,
)
from .known_fields import ENUM_MEMBERS, RECORD_FIELDS, SOURCE_FIELDS, SOURCE_MODULES
from .private_names import MissingNameError, find, missing_names, private_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .attribute_policies import AttributePolicy

_SHAPES = "torch.fx.experimental.symbolic_shapes"

TABLES: Mapping[str, Mapping[str, AttributePolicy]] = MappingProxyType(
    {
        f"{_SHAPES}.ShapeEnv": SHAPE_ENV_ATTRIBUTES,
        "torch._subclasses.fake_tensor.FakeTensorMode": FAKE_MODE_ATTRIBUTES,
        "torch.fx.experimental.sym_node.SymNode": SYM_NODE_ATTRIBUTES,
        f"{_SHAPES}.TrackedFake": TRACKED_FAKE_ATTRIBUTES,
    }
)
"""The tables of attributes by the dotted name of the class."""


class Census(NamedTuple):
    """Counts of the supported parts of the installed torch, and findings about all others."""

    names: int
    """Number of private names that this package requires."""
    attributes: Mapping[str, Mapping[str, int]]
    """By class, how many of its attributes are ``carried``, ``derived`` and ``dropped``."""
    sources: int
    """Number of source classes in torch."""
    findings: tuple[str, ...]
    """A line for each thing that no table lists, or that is missing."""


@functools.cache
def take_census() -> Census:
    """Compare all tables with torch; this imports as much as a compilation, and takes seconds."""
    needed = private_names()
    findings = missing_names(needed)
    attributes: dict[str, Mapping[str, int]] = {}
    for dotted, table in TABLES.items():
        here = set[str]()
        findings += _checked(_new_attributes, dotted, table, here)
        counts = Counter(table[name].how for name in here & set(table))
        attributes[_last(dotted)] = MappingProxyType(counts)
    classes = _source_classes()
    for name, cls in classes.items():
        if name in SOURCE_FIELDS:
            findings += _new_fields(cls, SOURCE_FIELDS[name])
        else:
            findings.append(f"{name}: a source class that no table has")
    for dotted, fields in RECORD_FIELDS.items():
        findings += _checked(lambda d, f: _new_fields(find(d), f), dotted, fields)
    for dotted, members in ENUM_MEMBERS.items():
        findings += _checked(_new_members, dotted, members)
    return Census(
        len(needed), MappingProxyType(attributes), len(classes), tuple(dict.fromkeys(findings))
    )


def _last(dotted: str) -> str:
    return dotted.rpartition(".")[2]


def _checked(look: Callable[..., Iterator[str]], dotted: str, *tables: Any) -> list[str]:
    """Return the findings of a check of a name; its failure is a finding too."""
    try:
        return list(look(dotted, *tables))
    except MissingNameError as error:
        return [str(error)]
    except Exception as error:  # noqa: BLE001 - another torch may raise anything
        return [f"{_last(dotted)}: cannot be looked at, {type(error).__name__}: {error}"]


# --- attributes ------------------------------------------------------------------------------------


def _new_attributes(
    dotted: str, table: Mapping[str, AttributePolicy], here: set[str]
) -> Iterator[str]:
    """Yield the attributes that a table lacks, and add all attributes to ``here``."""
    cls = find(dotted)
    live = _instance(cls, _last(dotted))
    here |= set(getattr(live, "__dict__", ())) | set(getattr(cls, "__slots__", ()))
    with suppress(OSError):  # an installation without sources
        here |= attributes_in_source(cls)
    for name in sorted(here - set(table)):
        yield f"{cls.__name__}.{name}: an attribute that no table has"


def _instance(cls: Any, name: str) -> Any:
    """Return an instance of a class of `TABLES`."""
    if name == "TrackedFake":
        return cls(2, find("torch._dynamo.source.LocalSource")("x"), None)
    if name == "ShapeEnv":
        return cls()
    env = find(f"{_SHAPES}.ShapeEnv")()
    if name == "FakeTensorMode":
        return cls(shape_env=env)
    symbols = find("torch.utils._sympy.symbol")
    symbol = symbols.make_symbol(symbols.SymT.SIZE, 0, positive=True, integer=True)
    return cls(symbol, env, int, 2)


def attributes_in_source(cls: type) -> set[str]:
    """Return the names of attributes that a class and its bases set on instances or define as data.

    A computed name is listed as ``computed: `` and its expression.

    Raises:
        OSError: the source is not available.
    """
    found: set[str] = set()
    for base in cls.__mro__:
        if base is object:
            continue
        tree = _class_tree(base)
        found |= set(_set_in_methods(tree)) | set(_declared(tree, base))
    if dataclasses.is_dataclass(cls):
        found |= {field.name for field in dataclasses.fields(cls)}
    return found | set(getattr(cls, "__slots__", ()))


def _class_tree(cls: type) -> ast.ClassDef:
    """Return the syntax tree of a class; unlike ``inspect.getsource``, each file is parsed once."""
    file, name = inspect.getsourcefile(cls), cls.__qualname__.rpartition(".")[2]
    for entry in [] if file is None else ast.walk(_tree_of(file)):
        if isinstance(entry, ast.ClassDef) and entry.name == name:
            return entry
    raise OSError(f"there is no source of {cls.__qualname__}")


@functools.lru_cache(maxsize=8)
def _tree_of(file: str) -> ast.Module:
    return ast.parse("".join(linecache.getlines(file)))


def _set_in_methods(tree: ast.ClassDef) -> Iterator[str]:
    """Yield the names assigned to ``self``, by any kind of assignment."""
    for entry in ast.walk(tree):
        if isinstance(entry, ast.Attribute) and isinstance(entry.ctx, (ast.Store, ast.Del)):
            if _is_self(entry.value):
                yield entry.attr
        elif isinstance(entry, ast.Subscript) and isinstance(entry.ctx, ast.Store):
            if ast.unparse(entry.value) in ("self.__dict__", "vars(self)"):
                yield _constant(entry.slice)
        elif _is_setattr(entry) and _is_self(entry.args[0]):
            yield _constant(entry.args[1])


def _is_setattr(entry: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(entry, ast.Call) and ast.unparse(entry.func).endswith(
        ("setattr", "__setattr__")
    )


def _is_self(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and target.id == "self"


def _constant(name: ast.expr) -> str:
    return str(name.value) if isinstance(name, ast.Constant) else f"computed: {ast.unparse(name)}"


def _declared(tree: ast.ClassDef, cls: type) -> Iterator[str]:
    """Yield the names in a class body that are data: no method, no property."""
    for entry in tree.body:
        targets: list[Any] = []
        if isinstance(entry, ast.AnnAssign):
            targets = [entry.target]
        elif isinstance(entry, ast.Assign):
            targets = entry.targets
        for name in (t.id for t in targets if isinstance(t, ast.Name)):
            value = vars(cls).get(name)
            if not name.startswith("__") and not callable(value) and not hasattr(value, "__set__"):
                yield name


# --- fields ----------------------------------------------------------------------------------------


def _source_classes() -> dict[str, type[Any]]:
    """Return torch's source classes by name; empty if a required name is missing."""
    try:
        spaces = [vars(find(module)) for module in SOURCE_MODULES]
        base = find("torch._guards.Source")
    except MissingNameError:
        return {}
    return {
        cls.__name__: cls
        for space in spaces
        for cls in space.values()
        if isinstance(cls, type) and issubclass(cls, base) and cls.__module__ in SOURCE_MODULES
    }


def _new_fields(cls: type[Any], listed: frozenset[str]) -> Iterator[str]:
    if dataclasses.is_dataclass(cls):
        fields = [field.name for field in dataclasses.fields(cls)]
    else:
        fields = list(getattr(cls, "_fields", ()))
    for field in fields:
        if field not in listed:
            yield f"{cls.__name__}.{field}: a field that no table has"


def _new_members(dotted: str, listed: frozenset[str]) -> Iterator[str]:
    for member in find(dotted).__members__:
        if member not in listed:
            yield f"{_last(dotted)}.{member}: a member that no table has"
