"""The package for its users: import cost, public names, errors."""

from __future__ import annotations

import ast
import copy
import json
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from processes import fresh

import torch_fakeify as tfk
from torch_fakeify import errors

if TYPE_CHECKING:
    from collections.abc import Callable

ERRORS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, Exception)
]


def printed(code: str) -> str:
    """Return what a new interpreter prints for ``code``; warnings are errors."""
    return fresh("-W", "error", "-c", code).stdout.strip()


def test_import_is_light() -> None:
    """The package and its errors import neither torch nor sympy nor numpy."""
    code = "import sys, torch_fakeify as t; t.FakeifyError, t.FormatError"
    heavy = "{'torch', 'sympy', 'numpy', 'msgspec'}"
    assert printed(f"{code}; print(sorted({heavy} & set(sys.modules)))") == "[]"


@pytest.mark.parametrize("name", tfk.__all__)
def test_public_names_resolve(name: str) -> None:
    """Every name in ``__all__`` exists and has a docstring."""
    value = getattr(tfk, name)
    if name != "__version__":
        assert value.__doc__


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("errors", "FormatError"),
        ("frontend", "Trace"),
        pytest.param("cli", "main", marks=pytest.mark.sweep),
        pytest.param("corpus", "replay_all", marks=pytest.mark.sweep),
        pytest.param("dropin", "install", marks=pytest.mark.sweep),
        pytest.param("pytest_plugin", "pytest_addoption", marks=pytest.mark.sweep),
    ],
)
def test_public_modules_need_no_import_of_their_own(module: str, name: str) -> None:
    """An import of the package alone is enough, in a process that has imported nothing else."""
    assert printed(f"import torch_fakeify as t; print(t.{module}.{name}.__name__)") == name


def test_every_error_is_public_and_of_one_base() -> None:
    """An error can be caught without an import of the module that defines it."""
    assert {cls.__name__ for cls in ERRORS} <= set(tfk.__all__)
    assert all(getattr(tfk, cls.__name__) is cls for cls in ERRORS)
    assert all(issubclass(cls, errors.FakeifyError) for cls in ERRORS)


@pytest.mark.sweep
def test_a_star_import_brings_every_public_name() -> None:
    """A star import brings functions and classes, but no modules with names such as ``errors``."""
    code = (
        "from torch_fakeify import *; import torch_fakeify as t; print(set(t.__all__) - set(dir()))"
    )
    assert printed(code) == "set()"


def test_a_type_checker_finds_every_public_name_and_no_other(tmp_path: Path) -> None:
    """Names and modules have known types, without an import of a submodule; a misspelled one is an error."""
    pytest.importorskip("pyright", reason="needs the `dev` extra: pip install '.[dev]'")
    names = [*tfk.__all__, "cli.main", "pytest_plugin.pytest_addoption", "corpus.replay_all"]
    names += ["dropin.install", "errors.FormatError", "frontend.Trace", "nothing", "capturee"]
    lines = ["import torch_fakeify as tfk", "print(tfk.__all__)"]
    lines += [f"print(tfk.{name})" for name in names]
    lines.append("from torch_fakeify import Captured")
    (tmp_path / "user.py").write_text("\n".join(lines))
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    found = json.loads(done.stdout)["generalDiagnostics"]
    errors_at = {each["range"]["start"]["line"] for each in found}
    assert {lines[at] for at in errors_at} == {
        "print(tfk.nothing)",
        "print(tfk.capturee)",
        "from torch_fakeify import Captured",
    }


def test_unknown_name_is_an_attribute_error() -> None:
    """An unknown name of the package raises ``AttributeError``, as on any module."""
    with pytest.raises(AttributeError, match=r"^module 'torch_fakeify' has no attribute 'nope'$"):
        _ = tfk.nope


def test_dir_lists_the_public_names() -> None:
    """``dir`` has the public names and modules, which are those that type checkers see."""
    modules = ["cli", "corpus", "dropin", "errors", "frontend", "pytest_plugin"]
    assert dir(tfk) == sorted([*tfk.__all__, *modules])
    tree = ast.parse(Path(str(tfk.__file__)).read_text(encoding="utf-8"))
    imports = [entry for entry in ast.walk(tree) if isinstance(entry, ast.ImportFrom)]
    assert {a.asname for entry in imports for a in entry.names if a.asname} == {*dir(tfk)}


def raised(cls: type[errors.FakeifyError]) -> errors.FakeifyError:
    """Return an error with every part."""
    return cls("bad", where="$.a", expected="1", found="2", fix="Use 1.")


def fail_in_worker(name: str) -> None:
    """Raise an error in another process."""
    raise raised(getattr(errors, name))


def made_without_its_constructor(error: Exception) -> Exception:
    """As Dask's unpickler makes an error in another process."""
    found = type(error).__new__(type(error), *error.args)
    vars(found).update(vars(error))
    return found


@pytest.mark.parametrize("cls", ERRORS)
@pytest.mark.parametrize(
    "again",
    [
        copy.copy,
        copy.deepcopy,
        lambda e: pickle.loads(pickle.dumps(e)),  # noqa: S301
        made_without_its_constructor,
    ],
)
def test_a_copied_error_has_all_its_parts(
    cls: type[errors.FakeifyError], again: Callable[[Any], Any]
) -> None:
    """A copied or unpickled error has the parts and the text of the original."""
    found = again(raised(cls))
    assert type(found) is cls
    assert vars(found) == vars(raised(cls))
    assert str(found) == "$.a: bad; expected 1; found 2. Use 1."


def test_an_error_of_a_worker_reaches_the_caller_unchanged() -> None:
    """A process pool raises the error with its parts."""
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
        pytest.raises(errors.LimitError, match=r"^\$\.a: bad; expected 1; found 2\. Use 1\.$"),
    ):
        pool.submit(fail_in_worker, "LimitError").result()


def test_the_text_of_an_error_has_its_parts_in_order() -> None:
    """The order is: where, what, expected, found, what to do."""
    error = errors.FakeifyError("bad", where="$.a", expected="1", found="2", fix="Use 1.")
    assert str(error) == "$.a: bad; expected 1; found 2. Use 1."
    assert str(errors.FakeifyError("bad")) == "bad"


def test_python_minus_m_is_the_command() -> None:
    """``python -m torch_fakeify`` runs the command line."""
    out = printed(
        "import runpy, sys; sys.argv = ['torch-fakeify', '--version'];\n"
        "try: runpy.run_module('torch_fakeify', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0"
    )
    assert out == f"torch-fakeify {tfk.__version__}"
