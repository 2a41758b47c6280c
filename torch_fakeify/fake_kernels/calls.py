"""Arguments of a call by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_fakeify.errors import FakeKernelError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["bound"]


def bound(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, with the defaults of a schema.

    Raises:
        FakeKernelError: they do not fit the schema.
    """
    positional = [each.name for each in schema.arguments if not each.kwarg_only]
    names = [each.name for each in schema.arguments]
    given = dict(zip(positional, args, strict=False))
    twice = given.keys() & kwargs.keys()
    unknown = [name for name in kwargs if name not in names]
    if len(args) > len(positional) or twice or unknown:
        raise _misfit(schema, f"{len(args)} arguments, and {', '.join(kwargs) or 'no keywords'}")
    given.update(kwargs)
    for each in schema.arguments:
        if each.name not in given:
            if not each.has_default_value():
                raise _misfit(schema, f"no {each.name}")
            given[each.name] = each.default_value
    return {name: given[name] for name in names}


def _misfit(schema: Any, found: str) -> FakeKernelError:
    return FakeKernelError(
        f"the arguments do not fit the operator {schema.name}", expected=str(schema), found=found
    )
