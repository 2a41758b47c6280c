"""Arguments of a call by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_fakeify.encoding.operators import bound_arguments
from torch_fakeify.errors import FakeKernelError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def bound(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, with the defaults of a schema.

    Raises:
        FakeKernelError: they do not fit the schema.
    """
    found = bound_arguments(schema, args, kwargs)
    if found is None:
        raise FakeKernelError(
            f"the arguments do not fit the operator {schema.name}",
            expected=str(schema),
            found=f"{len(args)} arguments, and {', '.join(kwargs) or 'no keywords'}",
        )
    return found
