"""What this package takes from torch's private modules, read from the source of ``_torch.py``.

No table repeats what stands there: the names are those of its imports, at module level and inside
functions, and of the attributes that it reads of them. Where it asks torch by ``hasattr``, ``getattr``
with a default, ``try`` or ``find_spec`` whether there is something, that may be missing.
"""

from __future__ import annotations

import ast
import functools
import re
import warnings
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["GoneError", "find", "gone_names", "is_there", "private_names", "used_names"]

_SOURCE = Path(__file__).with_name("_torch.py")
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_MISSING = object()
_DISTRIBUTED = ("torch.distributed.", "torch._C._distributed")


class GoneError(LookupError):
    """Torch has nothing of a name, or what has it cannot be imported; the text is a finding."""


@functools.cache
def private_names() -> tuple[str, ...]:
    """The dotted names of torch that ``_torch.py`` needs, sorted."""
    return used_names(_SOURCE.read_text(encoding="utf-8"))


def used_names(source: str) -> tuple[str, ...]:
    """The dotted names of torch that a module cannot do without, sorted.

    Args:
        source: of the module.
    """
    tree = ast.parse(source)
    reader = _Reader(_asked_for(tree), _split(tree))
    reader.block(tree.body, {})
    return tuple(sorted(reader.names))


def find(dotted: str) -> Any:
    """What has a dotted name in torch.

    Raises:
        GoneError: there is none, or a module that has it cannot be imported.
    """
    done, found = "torch", _imported("torch")
    for part in dotted.split(".")[1:]:
        done = f"{done}.{part}"
        try:
            value = getattr(found, part, _MISSING)
        except Exception as error:  # a module may compute its attributes, and fail
            raise GoneError(f"{done}: cannot be read, {type(error).__name__}: {error}") from error
        if value is _MISSING and isinstance(found, type(ast)):
            value = _imported(done)
        if value is _MISSING:
            raise GoneError(f"{done}: a name that is gone")
        found = value
    return found


def _imported(module: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of a module are for who imports it to use it
            return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module and not module.startswith(f"{error.name}."):
            raise GoneError(f"{module}: cannot be imported, {error}") from error
        raise GoneError(f"{module}: a name that is gone") from error
    except Exception as error:  # whatever a module of another torch ends with
        text = f"{type(error).__name__}: {error}"
        raise GoneError(f"{module}: cannot be imported, {text}") from error


def is_there(dotted: str) -> bool:
    """Whether torch has something of a dotted name."""
    try:
        find(dotted)
    except GoneError:
        return False
    return True


def gone_names(names: Iterable[str]) -> list[str]:
    """A line for each of these dotted names of torch that is not there, or for what it lies in.

    What belongs to ``torch.distributed`` may be missing where torch is built without it.
    """
    found: dict[str, None] = {}
    available = "torch.distributed.is_available"
    optional = _DISTRIBUTED if is_there(available) and not find(available)() else ()
    for name in names:
        if name.startswith(optional):
            continue
        try:
            find(name)
        except GoneError as error:
            found[str(error)] = None
    return list(found)


# --- reading ---------------------------------------------------------------------------------------


def _asked_for(tree: ast.Module) -> frozenset[str]:
    """The names that the module asks torch for before it takes them."""
    return frozenset(
        argument.value
        for entry in ast.walk(tree)
        if isinstance(entry, ast.Call) and _is_probe(entry)
        for argument in entry.args[:2]
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    )


def _split(tree: ast.Module) -> frozenset[str]:
    """The variables with lists of names as one string."""
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


class _Reader:
    """Walks a module; a scope knows which dotted names of torch its own names stand for."""

    def __init__(self, optional: frozenset[str], lists: frozenset[str]) -> None:
        self.names: set[str] = set()
        self._optional = optional
        self._lists = lists

    def block(self, body: Iterable[ast.stmt], scope: dict[str, str]) -> None:
        inner: list[ast.FunctionDef | ast.ClassDef] = []
        for statement in body:
            self._statement(statement, scope, inner)
        for definition in inner:  # they run later, and know what the whole module has
            known = dict(scope)
            if isinstance(definition, ast.FunctionDef):
                for argument in ast.walk(definition.args):
                    if isinstance(argument, ast.arg):
                        known.pop(argument.arg, None)
            self.block(definition.body, known)

    def _statement(
        self,
        statement: ast.stmt,
        scope: dict[str, str],
        inner: list[ast.FunctionDef | ast.ClassDef],
    ) -> None:
        match statement:
            case ast.Import() | ast.ImportFrom():
                self._import(statement, scope)
            case ast.FunctionDef() | ast.ClassDef():
                parts = [*statement.decorator_list]
                if isinstance(statement, ast.FunctionDef):
                    parts += [*statement.args.defaults, *filter(None, statement.args.kw_defaults)]
                self._expressions(parts, scope)
                inner.append(statement)
            case ast.Expr(value=ast.Constant()):  # a docstring
                pass
            case ast.If() if ast.unparse(statement.test).endswith("TYPE_CHECKING"):
                pass
            case ast.If() if _asks(statement.test):
                pass
            case ast.Try() if _may_fail(statement):
                pass
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._bind(name, value, scope)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                self._bind(name, value, scope)
            case ast.AnnAssign(value=None):  # annotations are not evaluated
                pass
            case _:
                self._parts(statement, scope, inner)

    def _parts(
        self,
        statement: ast.AST,
        scope: dict[str, str],
        inner: list[ast.FunctionDef | ast.ClassDef],
    ) -> None:
        for part in ast.iter_child_nodes(statement):
            if isinstance(part, ast.stmt):
                self._statement(part, scope, inner)
            elif isinstance(part, ast.expr):
                self._expressions([part], scope)
            else:  # handlers, items of `with`, cases
                self._parts(part, scope, inner)

    def _import(self, statement: ast.Import | ast.ImportFrom, scope: dict[str, str]) -> None:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                if self._is_torchs(alias.name):
                    self._need(alias.name)
                    bound = alias.name if alias.asname else "torch"
                    scope[alias.asname or "torch"] = bound
        elif statement.level == 0 and self._is_torchs(statement.module or ""):
            for alias in statement.names:
                dotted = f"{statement.module}.{alias.name}"
                self._need(dotted)
                scope[alias.asname or alias.name] = dotted

    @staticmethod
    def _is_torchs(module: str) -> bool:
        return module.partition(".")[0] == "torch"

    def _need(self, dotted: str) -> None:
        """Note a name, as far as nothing asks first whether it is there."""
        parts = dotted.split(".")
        asked = (at for at, part in enumerate(parts) if part in self._optional)
        kept = ".".join(parts[: next(asked, len(parts))])
        if dotted not in self._optional and kept != "torch":
            self.names.add(kept)

    def _bind(self, name: str, value: ast.expr, scope: dict[str, str]) -> None:
        self._expressions([value], scope)
        if name in self._lists and isinstance(value, ast.Constant):
            self._listed(str(value.value).split())
        dotted = self._dotted(value, scope)
        if dotted is None:
            scope.pop(name, None)
        else:
            scope[name] = dotted

    def _expressions(self, parts: Iterable[ast.expr], scope: dict[str, str]) -> None:
        for part in parts:
            for entry in self._outermost(part):
                dotted = self._dotted(entry, scope)
                if dotted is not None:
                    self._need(dotted)
                elif isinstance(entry, ast.Constant):
                    self._listed([str(entry.value)])
                elif not _is_probe(entry):
                    self._expressions(_expressions_in(entry), scope)

    def _listed(self, words: list[str]) -> None:
        """Names that a string has and nothing else: one, or a list of them in a variable."""
        if all(_DOTTED.fullmatch(word) for word in words):
            for word in filter(self._is_torchs, words):
                self._need(word)

    @staticmethod
    def _outermost(part: ast.expr) -> Iterator[ast.expr]:
        """The expression, unless what it is depends on what torch is asked."""
        if isinstance(part, ast.IfExp):
            depends = _asks(part.test)
        else:
            depends = isinstance(part, ast.BoolOp) and any(map(_asks, part.values))
        if not depends:
            yield part

    def _dotted(self, entry: ast.expr, scope: dict[str, str]) -> str | None:
        """The dotted name of torch that an expression is, if it is one."""
        match entry:
            case ast.Name(id=name):
                return scope.get(name)
            case ast.Attribute(value=value, attr=attr):
                outer = self._dotted(value, scope)
                return None if outer is None else f"{outer}.{attr}"
            case ast.Call(args=[ast.Constant(value=str() as module)]) if ast.unparse(
                entry.func
            ) == "import_module" and self._is_torchs(module):
                return module
            case _:
                return None


def _expressions_in(entry: ast.AST) -> Iterator[ast.expr]:
    """The expressions right below another, also through arguments and comprehensions."""
    for part in ast.iter_child_nodes(entry):
        if isinstance(part, ast.expr):
            yield part
        elif isinstance(part, (ast.keyword, ast.comprehension)):
            yield from _expressions_in(part)
