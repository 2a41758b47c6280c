"""The user's line is found in stacks that go through torch, this package and libraries."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from torch_fakeify._user_lines import calling_line, line_of_message, own_line
from torch_fakeify._version import PACKAGE_DIR

MINE, LIBRARY = "/home/me/model.py", "/x/lib/python3/site-packages/lib/blocks.py"
TORCH = f"{Path(torch.__file__).parent}/nn/modules/module.py"


def test_the_users_own_line_comes_before_that_of_a_library() -> None:
    """Torch, this package and the standard library are never the user's."""
    others = [(TORCH, 1), (f"{PACKAGE_DIR}/cli.py", 2), (contextlib.__file__, 3)]
    others += [("<frozen runpy>", 4), ("<eval_with_key>.5", 5)]
    assert own_line([(MINE, 6), (MINE, 7), (LIBRARY, 8), *others]) == (MINE, 7)
    assert own_line([(LIBRARY, 7), (LIBRARY, 8), *others]) == (LIBRARY, 8)
    assert own_line(others) is None
    assert own_line([("<string>", 1), *others]) == ("<string>", 1)


def test_the_line_of_a_call_is_in_this_file() -> None:
    """It is the innermost line, below frames of torch and the standard library."""
    with contextlib.ExitStack() as stack, torch.no_grad():
        stack.callback(lambda: None)
        found = calling_line()
    assert found is not None
    assert Path(found[0]) == Path(__file__)
    assert "found = calling_line()" in Path(__file__).read_text().splitlines()[found[1] - 1]


def test_a_line_is_read_from_the_stack_in_a_message() -> None:
    """Only the stack after the words counts."""
    stack = f'  File "{MINE}", line 3, in f\n    x + 1\n  File "{TORCH}", line 4, in g\n'
    text = f'  File "/home/me/other.py", line 1, in h\n\nfrom user code:\n{stack}'
    assert line_of_message(text, "from user code:") == (MINE, 3)
    assert line_of_message(text, "Original traceback:") is None
