"""An attribute of a ``ShapeEnv`` in a form that two environments can be compared by."""

from __future__ import annotations

import collections
from typing import Any

from torch_fakeify.compat.attribute_policies import SHAPE_ENV_ATTRIBUTES

CARRIED = [name for name, a in SHAPE_ENV_ATTRIBUTES.items() if a.how == "carried"]


def comparable(name: str, value: Any) -> Any:
    """The value of one attribute: what torch compares by identity is text."""
    if name == "guards":
        return [(g.expr, str(g.sloc), g.size_oblivious) for g in value]
    if name == "deferred_runtime_asserts":
        return [
            (key, [(a.expr, a.msg, a.stack.format()) for a in group])
            for key, group in value.items()
        ]
    if name == "var_to_stack":
        return [(key, stack.format()) for key, stack in value.items()]
    if name == "specialization_stacks":
        # Without the columns of the traceback's carets, which a record of a stack has not.
        return [
            (key, [(f.filename, f.lineno, f.name, f.line) for f in stack])
            for key, stack in value.items()
        ]
    if name == "specializations":
        return [s.source for s in value]
    if name in ("var_to_range_sloc", "replacements_slocs"):
        return [(key, str(sloc)) for key, sloc in value.items()]
    if isinstance(value, collections.Counter):
        return dict(value)
    if isinstance(value, dict):
        return list(value.items())
    return value


def assert_same_attributes(env: Any, restored: Any) -> None:
    """Every carried attribute of a restored environment is the original's, and of its type."""
    for name in CARRIED:
        before, after = getattr(env, name), getattr(restored, name)
        assert comparable(name, after) == comparable(name, before), name
        assert type(after) is type(before), name
    by_name = getattr(
        env, "name_to_symbol", {}
    )  # derived from the symbols, in torches that have it
    assert getattr(restored, "name_to_symbol", {}) == by_name
