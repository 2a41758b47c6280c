"""The private names of torch that this package requires, found in the sources of ``compat``.

These are the names that its modules import, at module level or inside functions, and the attributes
that they read. A name is optional if its presence is tested by ``hasattr``, ``getattr`` with a
default, ``try`` or ``find_spec``.
"""

from __future__ import annotations

import ast
import functools
import re
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch_fakeify._version import PACKAGE_DIR

if TYPE_CHECKING:
    from collections.abc import Iterable

_UTILS = "torch._subclasses.meta_utils"

DROPIN_SITES = (
    f"{_UTILS}.MetaConverter",
    f"{_UTILS}.MetaStorageDesc",
    f"{_UTILS}.MetaTensorDesc",
    f"{_UTILS}.MetaTensorDescriber",
    "torch._subclasses.fake_tensor.MetaConverter",
    "torch.fx._graph_pickler.MetaConverter",
    "torch.fx._graph_pickler.MetaTensorDesc",
    "torch.fx._graph_pickler.MetaTensorDescriber",
    "torch.fx.experimental.symbolic_shapes.uninteresting_files",
    "torch._dynamo.trace_rules.SKIP_DIRS",
    "torch._dynamo.trace_rules._recompile_re",
)
"""Dotted names: replaced classes, and lists to which files and folders of this package are added.

`dropin` searches for references to torch's classes. This list serves to check a torch without that.
"""

_FOLDER = PACKAGE_DIR / "compat"
MODULES = (*sorted(path.stem for path in _FOLDER.glob("torch_*.py")), "backends")
"""The modules of ``compat`` that import torch's private names."""

_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_MISSING = object()
_DISTRIBUTED = ("torch.distributed.", "torch._C._distributed")


class MissingNameError(LookupError):
    """Torch lacks a name, or its module cannot be imported; the message is a finding."""


def import_torch_modules() -> None:
    """Import every module of this package that imports torch's private names."""
    for name in MODULES:
        import_module(f"torch_fakeify.compat.{name}")


@functools.cache
def private_names() -> tuple[str, ...]:
    """Return the sorted dotted names of torch that this package requires."""
    sources = ((_FOLDER / f"{name}.py").read_text(encoding="utf-8") for name in MODULES)
    return tuple(sorted({name for source in sources for name in required_names(source)}))


def required_names(source: str) -> tuple[str, ...]:
    """Return the sorted dotted names of torch that the source of a module requires."""
    tree = ast.parse(source)
    reader = _Reader(_probed_names(tree), _split(tree))
    reader.block(tree.body)
    return tuple(sorted(reader.names))


def find(dotted: str) -> Any:
    """Return the object with a dotted name in torch.

    Raises:
        MissingNameError: there is none, or its module cannot be imported.
    """
    done, found = "torch", _imported("torch")
    for part in dotted.split(".")[1:]:
        done = f"{done}.{part}"
        try:
            value = getattr(found, part, _MISSING)
        except Exception as error:  # a module may compute its attributes, and fail
            raise MissingNameError(
                f"{done}: cannot be read, {type(error).__name__}: {error}"
            ) from error
        if value is _MISSING and isinstance(found, type(ast)):
            value = _imported(done)
        if value is _MISSING:
            raise MissingNameError(f"{done}: a name that is missing")
        found = value
    return found


def _imported(module: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the module is only inspected
            return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module and not module.startswith(f"{error.name}."):
            raise MissingNameError(f"{module}: cannot be imported, {error}") from error
        raise MissingNameError(f"{module}: a name that is missing") from error
    except Exception as error:  # any error of a module of another torch
        text = f"{type(error).__name__}: {error}"
        raise MissingNameError(f"{module}: cannot be imported, {text}") from error


def name_exists(dotted: str) -> bool:
    """Return whether torch has an object with a dotted name."""
    try:
        find(dotted)
    except MissingNameError:
        return False
    return True


def missing_names(names: Iterable[str]) -> list[str]:
    """Return a line for each missing name, or for the first missing part of it.

    Names of ``torch.distributed`` are optional if torch is built without it.
    """
    found: dict[str, None] = {}
    available = "torch.distributed.is_available"
    optional = _DISTRIBUTED if name_exists(available) and not find(available)() else ()
    for name in names:
        if name.startswith(optional):
            continue
        try:
            find(name)
        except MissingNameError as error:
            found[str(error)] = None
    return list(found)


# --- reading ---------------------------------------------------------------------------------------


def _probed_names(tree: ast.Module) -> frozenset[str]:
    """Return the names whose presence the module tests."""
    return frozenset(
        argument.value
        for entry in ast.walk(tree)
        if isinstance(entry, ast.Call) and _is_probe(entry)
        for argument in entry.args[:2]
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    )


def _split(tree: ast.Module) -> frozenset[str]:
    """Return the variables that contain lists of names as one string."""
    return frozenset(
        entry.value.id
        for entry in ast.walk(tree)
        if isinstance(entry, ast.Attribute) and entry.attr == "split"
        if isinstance(entry.value, ast.Name)
    )


def _is_probe(entry: ast.AST) -> bool:
    if not isinstance(entry, ast.Call):
        return False
    name = ast.unparse(entry.func).rpartition(".")[2]
    return name in ("hasattr", "find_spec") or (name == "getattr" and len(entry.args) == 3)


def _asks(entry: ast.AST) -> bool:
    return any(_is_probe(part) for part in ast.walk(entry))


def _may_fail(entry: ast.Try) -> bool:
    caught = " ".join(ast.unparse(handler.type or entry) for handler in entry.handlers)
    return any(name in caught for name in ("ImportError", "ModuleNotFoundError", "AttributeError"))


class _Reader(ast.NodeVisitor):
    """Collects required names; `scope` maps variables to dotted names of torch."""

    def __init__(self, optional: frozenset[str], lists: frozenset[str]) -> None:
        self.names: set[str] = set()
        self.scope: dict[str, str] = {}
        self._optional = optional
        self._lists = lists
        self._inner: list[ast.FunctionDef | ast.ClassDef] = []

    def block(self, body: Iterable[ast.stmt]) -> None:
        """Read statements, then the definitions among them: they run later, with all names."""
        outer, self._inner = self._inner, []
        for statement in body:
            self.visit(statement)
        inner, self._inner = self._inner, outer
        scope = self.scope
        for definition in inner:
            self.scope = dict(scope)
            if isinstance(definition, ast.FunctionDef):
                for argument in ast.walk(definition.args):
                    if isinstance(argument, ast.arg):
                        self.scope.pop(argument.arg, None)
            self.block(definition.body)
        self.scope = scope

    def visit(self, statement: ast.AST, /) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Read a statement, or an expression, unless it depends on a test for an optional name."""
        match statement:
            case ast.Import():
                for alias in filter(lambda alias: _is_in_torch(alias.name), statement.names):
                    self._require(alias.name)
                    self.scope[alias.asname or "torch"] = alias.name if alias.asname else "torch"
            case ast.ImportFrom(module=str() as module, level=0) if _is_in_torch(module):
                for alias in statement.names:
                    self._require(f"{module}.{alias.name}")
                    self.scope[alias.asname or alias.name] = f"{module}.{alias.name}"
            case ast.FunctionDef() | ast.ClassDef():
                parts = [*statement.decorator_list]
                if isinstance(statement, ast.FunctionDef):
                    parts += [*statement.args.defaults, *filter(None, statement.args.kw_defaults)]
                for part in parts:
                    self.visit(part)
                self._inner.append(statement)
            case ast.Expr(value=ast.Constant()):  # a docstring
                pass
            case ast.If() if ast.unparse(statement.test).endswith("TYPE_CHECKING"):
                pass
            case ast.If(test=test) | ast.IfExp(test=test) if _asks(test):
                pass
            case ast.BoolOp(values=values) if any(map(_asks, values)):
                pass
            case ast.Try() if _may_fail(statement):
                pass
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._bind(name, value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                self._bind(name, value)
            case ast.AnnAssign(value=None):  # annotations are not evaluated
                pass
            case ast.Constant(value=value):
                self._listed([str(value)])
            case ast.expr() if dotted := self._dotted(statement):
                self._require(dotted)
            case ast.Call() if _is_probe(statement):
                pass
            case _:
                self.generic_visit(statement)

    def _require(self, dotted: str) -> None:
        """Add a name, up to its first optional part."""
        parts = dotted.split(".")
        asked = (at for at, part in enumerate(parts) if part in self._optional)
        required = ".".join(parts[: next(asked, len(parts))])
        if dotted not in self._optional and required != "torch":
            self.names.add(required)

    def _bind(self, name: str, value: ast.expr) -> None:
        self.visit(value)
        if name in self._lists and isinstance(value, ast.Constant):
            self._listed(str(value.value).split())
        dotted = self._dotted(value)
        if dotted is None:
            self.scope.pop(name, None)
        else:
            self.scope[name] = dotted

    def _listed(self, words: list[str]) -> None:
        """Add the names of a string that consists of names only."""
        if all(_DOTTED.fullmatch(word) for word in words):
            for word in filter(_is_in_torch, words):
                self._require(word)

    def _dotted(self, entry: ast.expr) -> str | None:
        """Return the dotted name of torch that an expression refers to, else ``None``."""
        match entry:
            case ast.Name(id=name):
                return self.scope.get(name)
            case ast.Attribute(value=value, attr=attr):
                outer = self._dotted(value)
                return None if outer is None else f"{outer}.{attr}"
            case ast.Call(args=[ast.Constant(value=str() as module)]) if ast.unparse(
                entry.func
            ) == "import_module" and _is_in_torch(module):
                return module
            case _:
                return None


def _is_in_torch(module: str) -> bool:
    return module.partition(".")[0] == "torch"
