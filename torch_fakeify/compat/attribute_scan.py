"""Find the attributes of the instances of a class in its source.

Live objects show the attributes that are set; the source also has those that only a rare configuration
sets.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import linecache
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from collections.abc import Iterator


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
    file = inspect.getsourcefile(cls)
    tree = None if file is None else _classes_of(file).get(cls.__qualname__)
    if tree is None:
        raise OSError(f"there is no source of {cls.__qualname__}")
    return tree


@functools.lru_cache(maxsize=8)
def _classes_of(file: str) -> dict[str, ast.ClassDef]:
    """Return the classes that a file defines, by qualified name."""
    found: dict[str, ast.ClassDef] = {}

    def walk(entry: ast.AST, prefix: str) -> None:
        for part in ast.iter_child_nodes(entry):
            if isinstance(part, ast.ClassDef):
                found.setdefault(f"{prefix}{part.name}", part)
                walk(part, f"{prefix}{part.name}.")
            elif isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
                walk(part, f"{prefix}{part.name}.<locals>.")
            elif isinstance(part, (ast.stmt, ast.ExceptHandler)):
                walk(part, prefix)

    walk(ast.parse("".join(linecache.getlines(file))), "")
    return found


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
