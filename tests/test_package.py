"""The package as a user meets it: light to import, every public name there."""

from __future__ import annotations

import subprocess
import sys

import pytest

import torch_fakeify as tfk
from torch_fakeify import errors


def fresh(code: str) -> str:
    """What a new interpreter prints for ``code``; warnings are errors there too."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_light() -> None:
    """Importing the package brings neither torch nor sympy nor numpy."""
    heavy = "{'torch', 'sympy', 'numpy', 'msgspec'}"
    assert fresh(f"import sys, torch_fakeify; print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_errors_are_light() -> None:
    """Catching our errors does not cost an import of torch."""
    out = fresh(
        "import sys, torch_fakeify as t; t.FakeifyError, t.FormatError; print('torch' in sys.modules)"
    )
    assert out == "False"


@pytest.mark.parametrize("name", tfk.__all__)
def test_public_name_resolves(name: str) -> None:
    """Every name in ``__all__`` is there and says what it is."""
    value = getattr(tfk, name)
    if name != "__version__":
        assert value.__doc__


def test_unknown_name_is_an_attribute_error() -> None:
    """A name that does not exist fails as on any module."""
    with pytest.raises(AttributeError, match=r"^module 'torch_fakeify' has no attribute 'nope'$"):
        _ = tfk.nope


def test_dir_lists_the_public_names() -> None:
    """Completion shows the public names and nothing else."""
    assert dir(tfk) == sorted(tfk.__all__)


def test_one_base_for_all_errors() -> None:
    """Whoever catches ``FakeifyError`` catches all that the package raises on purpose."""
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    assert classes
    assert all(issubclass(cls, errors.FakeifyError) for cls in classes)


def test_error_text() -> None:
    """An error reads: where, what, expected, found, what to do."""
    error = errors.FakeifyError("bad", where="$.a", expected="1", found="2", fix="Use 1.")
    assert str(error) == "$.a: bad; expected 1; found 2. Use 1."
    assert str(errors.FakeifyError("bad")) == "bad"


def test_python_minus_m() -> None:
    """``python -m torch_fakeify`` is the command."""
    out = fresh(
        "import runpy, sys; sys.argv = ['torch-fakeify', '--version'];\n"
        "try: runpy.run_module('torch_fakeify', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0"
    )
    assert out == f"torch-fakeify {tfk.__version__}"
