"""The guards of a graph in order: they are checked together, written and read as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from torch_fakeify.errors import CaptureError
from torch_fakeify.records.guards import CheckDesc, GuardsDesc
from torch_fakeify.serialization.document import Serializable

from .conditions import Guard, decode_check
from .scope import FIX, Scope
from .size_guards import decode_size_guard

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import sympy


class Guards(Sequence[Guard], Serializable[GuardsDesc]):
    """Conditions on the arguments, in order: each may assume that the earlier ones hold.

    `dumps` writes them as data, and `loads` reads them in another process, without running code.
    """

    _root = GuardsDesc

    def __init__(self, guards: Iterable[Guard]) -> None:
        self._guards = tuple(guards)

    @overload
    def __getitem__(self, index: int) -> Guard: ...
    @overload
    def __getitem__(self, index: slice) -> Guards: ...
    def __getitem__(self, index: int | slice) -> Guard | Guards:
        found = self._guards[index]
        return found if isinstance(found, Guard) else Guards(found)

    def __len__(self) -> int:
        return len(self._guards)

    def __add__(self, others: Iterable[Guard]) -> Guards:
        """These guards and others, such as the frontend's."""
        return Guards((*self._guards, *others))

    def __repr__(self) -> str:
        return f"<Guards: {len(self)}>"

    def __str__(self) -> str:
        return "\n".join(map(str, self._guards))

    def check(
        self,
        scope: Mapping[str, Any],
        *,
        globals: Mapping[str, Any] | None = None,  # noqa: A002
    ) -> bool:
        """Whether all guards hold for a scope.

        Args:
            scope: the arguments by name.
            globals: the globals of the function's module, for guards on them.

        Raises:
            CaptureError: a guard is on a value that is not there.
        """
        return self.failing(scope, globals=globals) is None

    def failing(
        self,
        scope: Mapping[str, Any],
        *,
        globals: Mapping[str, Any] | None = None,  # noqa: A002
    ) -> Guard | None:
        """The first guard that does not hold for a scope, or ``None``.

        Args:
            scope: as for `check`.
            globals: as for `check`.

        Raises:
            CaptureError: a guard is on a value that is not there.
        """
        seen = scope if isinstance(scope, Scope) else Scope(scope, globals)
        guard = None
        try:
            for guard in self._guards:
                if not guard.holds(seen):
                    return guard
        except (ArithmeticError, AttributeError):
            return guard  # a division by zero; the base of a tensor that is no view
        except LookupError as error:
            where = None if guard is None else guard.text
            raise CaptureError(
                "a guard is on a value that is not in the scope",
                where=where,
                found=f"{type(error).__name__}: {error}",
                fix=FIX,
            ) from error
        return None

    @property
    def exprs(self) -> tuple[sympy.Basic, ...]:
        """The conditions on sizes, over symbols with the names of sources."""
        return tuple(guard.expr for guard in self._guards if guard.expr is not None)

    # --- records ---

    @property
    def desc(self) -> GuardsDesc:
        """Their record.

        Raises:
            UnsupportedValueError: a guard is a function that the frontend added, or has a value without
                a record.
        """
        return GuardsDesc(guards=tuple(guard.desc for guard in self._guards))

    @classmethod
    def from_desc(cls, desc: GuardsDesc) -> Guards:
        """The guards of a record.

        A class that this process has not imported is compared by its name.

        Raises:
            FormatError: a record cannot be decoded.
        """
        made: list[Guard] = []
        for i, each in enumerate(desc.guards):
            decode: Any = decode_check if isinstance(each, CheckDesc) else decode_size_guard
            made.append(decode(each, f"$.guards[{i}]"))
        return cls(made)
