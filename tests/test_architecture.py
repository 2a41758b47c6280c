"""The rooms of the package and the rules for its files, checked on the sources."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import torch_fakeify as tfk
from torch_fakeify.compat import private_names as private_names_modules
from torch_fakeify.compat.census import TABLES
from torch_fakeify.compat.known_fields import ENUM_MEMBERS, RECORD_FIELDS, SOURCE_MODULES
from torch_fakeify.compat.private_names import DROPIN_SITES, private_names

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PACKAGE = ROOT / "torch_fakeify"
FILES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


@functools.cache
def tree_of(file: str) -> ast.Module:
    """Return the syntax tree of a file of the package."""
    return ast.parse((PACKAGE / file).read_text(encoding="utf-8"))


def imports_of(file: str) -> set[str]:
    """Return the modules that a file imports by an absolute name, also inside functions."""
    names: set[str] = set()
    for entry in ast.walk(tree_of(file)):
        if isinstance(entry, ast.Import):
            names.update(alias.name for alias in entry.names)
        elif isinstance(entry, ast.ImportFrom) and not entry.level:
            names.add(str(entry.module))
    return names


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the package in a folder."""
    pytest.importorskip("importlinter", reason="import-linter needs Python 3.11")
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    return subprocess.run(
        [*command, "--no-cache"], cwd=folder, capture_output=True, text=True, check=False
    )


def test_the_package_satisfies_the_contracts_of_the_rooms() -> None:
    """Imports go strictly down, rooms of one level are independent, and there are no cycles."""
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("file", "statement", "contract"),
    [
        ("records/tensor.py", "from torch_fakeify.convert import memo", "strictly down"),
        ("convert/memo.py", "from torch_fakeify.describe import ids", "share records alone"),
        ("frontend/guards.py", "from torch_fakeify.dropin import desc", "strictly down"),
        ("render/text.py", "import sympy", "need no torch"),
        ("prover/simplex.py", "from . import implication", "No cycles"),
    ],
)
def test_a_broken_contract_is_reported(
    file: str, statement: str, contract: str, tmp_path: Path
) -> None:
    """Each contract fails for an import that a file could have."""
    for path in PACKAGE.rglob("*.py"):
        copied = tmp_path / path.relative_to(ROOT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_bytes(path.read_bytes())
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    with (tmp_path / "torch_fakeify" / file).open("a", encoding="utf-8") as out:
        out.write(f"\n{statement}\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1
    broken = [line for line in done.stdout.splitlines() if " BROKEN" in line]
    assert any(contract in line for line in broken)


@pytest.mark.parametrize("file", FILES)
def test_no_file_runs_data(file: str) -> None:
    """No file unpickles data, evaluates text or parses expressions from text."""
    banned_imports = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    assert {name.partition(".")[0] for name in imports_of(file)} & banned_imports == set()
    banned_calls = {"eval", "exec", "compile", "__import__", "sympify", "parse_expr"}
    called = {
        entry.func.id
        for entry in ast.walk(tree_of(file))
        if isinstance(entry, ast.Call) and isinstance(entry.func, ast.Name)
    }
    assert called & banned_calls == set()


COMPUTED_IMPORTS = {
    "__init__.py": "the package's own table of names",
    "compat/private_names.py": "what the sources of `compat` name",
    "compat/torch_configs.py": "torch's modules of settings, a constant",
    "compat/backends.py": "what a user names with --import and --backend",
}


@pytest.mark.parametrize("file", FILES)
def test_no_module_is_imported_by_a_computed_name(file: str) -> None:
    """Only the listed files import a name that is not a literal."""
    if file in COMPUTED_IMPORTS:
        return
    for entry in ast.walk(tree_of(file)):
        if isinstance(entry, ast.Call) and ast.unparse(entry.func).endswith("import_module"):
            assert all(isinstance(arg, ast.Constant) for arg in entry.args), entry.lineno


def test_the_census_looks_up_only_what_compat_imports() -> None:
    """The sites of the drop-in are the only other private modules that the census looks up."""
    needed = [*private_names(), *(f"{site}." for site in DROPIN_SITES)]
    tables = [*TABLES, *RECORD_FIELDS, *ENUM_MEMBERS, *SOURCE_MODULES]
    modules = {name if name in SOURCE_MODULES else name.rpartition(".")[0] for name in tables}
    assert {m for m in modules if not any(f"{n}.".startswith(f"{m}.") for n in needed)} == set()


def test_every_private_name_of_torch_is_used() -> None:
    """No module of ``compat`` imports or defines a name that nothing uses."""
    defined: dict[str, set[str]] = {}
    used: set[str] = set()
    for module in private_names_modules.MODULES:
        tree = tree_of(f"compat/{module}.py")
        imports = [e for e in tree.body if isinstance(e, ast.ImportFrom) and not e.level]
        names = {
            a.asname or a.name
            for e in imports
            if str(e.module).startswith("torch.")
            for a in e.names
        }
        names |= {e.name for e in tree.body if isinstance(e, ast.FunctionDef)}
        defined[module] = names
        used |= {entry.id for entry in ast.walk(tree) if isinstance(entry, ast.Name)}
    for file in FILES:
        for entry in ast.walk(tree_of(file)):
            if (
                isinstance(entry, ast.ImportFrom)
                and str(entry.module).rpartition(".")[2] in defined
            ):
                used |= {alias.name for alias in entry.names}
            elif isinstance(entry, ast.Attribute) and ast.unparse(entry.value) in defined:
                used.add(entry.attr)
    assert {m: n - used for m, n in defined.items() if n - used} == {}


def test_no_module_has_the_name_of_a_public_function() -> None:
    """``tfk.capture`` is always the function: no import of a submodule can shadow it."""
    top = {file.partition("/")[0].removesuffix(".py") for file in FILES}
    assert set(tfk.__all__) & top == set()


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_small(file: str) -> None:
    """A file has at most 700 lines."""
    assert len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) <= 700


def test_a_file_of_the_tests_is_small() -> None:
    """A file of the tests has at most 600 lines."""
    lines = {path: path.read_text(encoding="utf-8").count("\n") for path in TESTS.rglob("*.py")}
    assert [str(path) for path, count in lines.items() if count > 600] == []


@pytest.mark.parametrize("file", FILES)
def test_no_handler_swallows_every_exception(file: str) -> None:
    """No handler of all exceptions has an empty body."""
    for entry in ast.walk(tree_of(file)):
        if not isinstance(entry, ast.ExceptHandler):
            continue
        broad = entry.type is None or ast.unparse(entry.type) in {"Exception", "BaseException"}
        empty = all(isinstance(statement, ast.Pass) for statement in entry.body)
        assert not (broad and empty), f"{file}:{entry.lineno}"
