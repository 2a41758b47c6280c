"""Functorch's stack of interpreters <-> records.

A transform of functorch (``vmap``, ``grad``, ``jvp``, ``functionalize``) pushes an interpreter while
its function runs, and the tensors in the function are wrappers of that interpreter's level. A level
is a position: torch takes the interpreter of level n only as the n-th from the outside. So a stack
that is pushed anew in the order of its records has the same levels.

Not recorded: grad wrappers die with their interpreter. Rebuilt interpreters do not end, so their
wrappers stay alive.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch

from torch_fakeify.compat import torch_dispatch
from torch_fakeify.compat.torch_dispatch import functorch
from torch_fakeify.errors import ConvertError
from torch_fakeify.records.tensor import InterpreterDesc

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from typing import Literal

    from torch_fakeify.records.tensor import IntLike

_MAX_LEVELS = 64
"""Maximum number of levels in a stack; pushing them takes quadratic time."""

_KINDS = {
    functorch.TransformType.Vmap: "vmap",
    functorch.TransformType.Grad: "grad",
    functorch.TransformType.Jvp: "jvp",
    functorch.TransformType.Functionalize: "functionalize",
}

_RANDOMNESS = {
    functorch.RandomnessType.Error: "error",
    functorch.RandomnessType.Same: "same",
    functorch.RandomnessType.Different: "different",
}

_NEEDED = {
    "vmap": ("batch_size", "randomness"),
    "grad": ("grad_mode",),
    "jvp": ("grad_mode",),
    "functionalize": ("add_back_views",),
}
"""Fields of each kind of interpreter besides kind and level."""


# --- interpreters -> records ----------------------------------------------------------------------


def encode_stack(
    layers: Sequence[Any], *, ints: Callable[[Any], IntLike]
) -> tuple[InterpreterDesc, ...]:
    """The records of a stack, outermost first.

    Args:
        layers: innermost first, as ``temporarily_clear_interpreter_stack`` yields them.
        ints: encodes a batch size, an ``int`` or ``SymInt``.
    """
    if not layers:
        return ()
    # Torch has no API for a single layer, only for the interpreters of the active stack.
    with _pushed(layers):
        interpreters: list[Any] = functorch.get_interpreter_stack()
    return tuple(_encode(interpreter, ints) for interpreter in interpreters)


def _encode(interpreter: Any, ints: Callable[[Any], IntLike]) -> InterpreterDesc:
    kind, level = _KINDS[interpreter.key()], interpreter.level()
    if kind == "vmap":
        vmap = functorch.CVmapInterpreterPtr(interpreter)
        randomness = cast("Any", _RANDOMNESS[vmap.randomness()])
        return InterpreterDesc(
            kind="vmap", level=level, batch_size=ints(vmap.batchSize()), randomness=randomness
        )
    if kind == "functionalize":
        flag = functorch.CFunctionalizeInterpreterPtr(interpreter).functionalizeAddBackViews()
        return InterpreterDesc(kind="functionalize", level=level, add_back_views=flag)
    # The (forward) grad mode and the inference mode outside; the pointer classes have only the first.
    states = msgspec.json.decode(interpreter.serialize())["meta"]
    state = states.get("Grad") or states["Jvp"]
    grad_mode = state["prevGradMode" if "Grad" in states else "prevFwdGradMode"]
    inference_mode = state.get("prevInferenceMode", False)
    grad_kind: Literal["grad", "jvp"] = "grad" if kind == "grad" else "jvp"
    return InterpreterDesc(
        kind=grad_kind, level=level, grad_mode=grad_mode, inference_mode=inference_mode
    )


# --- records -> interpreters ----------------------------------------------------------------------


def make_interpreters(
    stack: Sequence[InterpreterDesc], outer: Sequence[Any] = (), *, ints: Callable[[IntLike], Any]
) -> list[Any]:
    """Make the layers of a stack without pushing them.

    Args:
        stack: outermost first.
        outer: existing layers for its outer levels, innermost first.
        ints: decodes a batch size to an ``int`` or ``SymInt``.

    Returns:
        Layers, innermost first, for ``temporarily_restore_interpreter_stack`` on an empty stack.

    Raises:
        ConvertError: the stack is invalid.
    """
    if len(stack) > _MAX_LEVELS:
        raise ConvertError(
            "too many transforms inside one another",
            expected=f"at most {_MAX_LEVELS}",
            found=str(len(stack)),
        )
    for position, record in enumerate(stack, 1):
        _check(record, position)
    made: list[Any] = []
    with _pushed(outer):
        depth = len(outer)
        try:
            for record in stack[depth:]:
                _push(record, ints)
                depth += 1
        finally:
            # Popped without ending the layers, which would end their grad wrappers.
            made.extend(functorch.pop_dynamic_layer_stack() for _ in range(depth - len(outer)))
    return [*made, *outer]


def _push(record: InterpreterDesc, ints: Callable[[IntLike], Any]) -> None:
    if record.kind == "vmap":
        batch_size = None if record.batch_size is None else ints(record.batch_size)
        functorch._vmap_increment_nesting(batch_size, record.randomness)
    elif record.kind == "functionalize":
        functorch._func_increment_nesting(record.add_back_views)
    else:
        grad_mode = bool(record.grad_mode)
        # Inference mode sets both grad modes, so it comes first.
        with torch.inference_mode(record.inference_mode):
            if record.kind == "grad":
                with torch.set_grad_enabled(grad_mode):
                    functorch._grad_increment_nesting()
            else:
                with torch_dispatch.set_forward_grad(grad_mode):
                    functorch._jvp_increment_nesting()


def _check(record: InterpreterDesc, position: int) -> None:
    where = f"interpreter {position} ({record.kind})"
    if record.level != position:
        raise ConvertError(
            "levels count from one, from the outside",
            where=where,
            expected=str(position),
            found=str(record.level),
        )
    fields = {"batch_size", "randomness", "grad_mode", "add_back_views"}
    found = {name for name in fields if getattr(record, name) is not None}
    needed = set(_NEEDED[record.kind])
    if found != needed or (record.inference_mode and "grad_mode" not in needed):
        raise ConvertError(
            "the record does not have the fields of its kind",
            where=where,
            expected=", ".join(sorted(needed)),
            found=", ".join(
                sorted(found | ({"inference_mode"} if record.inference_mode else set()))
            )
            or "none",
        )
    if isinstance(record.batch_size, int) and not 0 <= record.batch_size < 2**63:
        raise ConvertError(
            "a batch size is out of range",
            where=where,
            expected="0 to 2**63 - 1",
            found=str(record.batch_size),
        )


# --- the stacks of a converter --------------------------------------------------------------------


def _unchanged(n: IntLike) -> Any:
    return n


class Interpreters:
    """The interpreters of the functorch wrappers of one converter.

    If the active stack begins with the recorded one, its interpreters are used, so that wrappers made
    inside a transform can be used in it and end with it, as with ``FakeTensorMode.from_tensor``.
    Otherwise a stack is rebuilt, once for each record. ``ints`` of the methods decodes a batch size to an
    ``int`` or ``SymInt``.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[InterpreterDesc, ...], Any] = {}
        """The innermost layer of each stack."""
        self._outside: tuple[list[Any], list[Any]] | None = None
        """The stack suspended by `cleared`: interpreters outermost first, layers innermost first."""

    @contextmanager
    def cleared(self) -> Generator[None, None, None]:
        """Suspend the active stack; `layers` still finds its interpreters."""
        interpreters: list[Any] = functorch.get_interpreter_stack() or []
        before = self._outside
        with torch_dispatch.temporarily_clear_interpreter_stack() as layers:
            # Inside another `cleared` nothing is active, and the first one's stack counts.
            if interpreters or before is None:
                self._outside = (interpreters, layers)
            try:
                yield
            finally:
                self._outside = before

    def layers(
        self, stack: tuple[InterpreterDesc, ...], *, ints: Callable[[IntLike], Any] = _unchanged
    ) -> list[Any]:
        """The layers of a recorded stack, innermost first.

        Raises:
            ConvertError: see `make_interpreters`.
        """
        with self.cleared():
            assert self._outside is not None
            interpreters, layers = self._outside
            if _begins(interpreters, stack, ints):
                return layers[len(layers) - len(stack) :]
            cached = self._cached(stack)
            made = make_interpreters(stack, cached, ints=ints)
        for depth in range(len(cached) + 1, len(stack) + 1):
            self._made[stack[:depth]] = made[len(stack) - depth]
        return made

    @contextmanager
    def entered(
        self, stack: tuple[InterpreterDesc, ...], *, ints: Callable[[IntLike], Any] = _unchanged
    ) -> Generator[None, None, None]:
        """Activate a recorded stack, unless the active one begins with it.

        Grad mode, forward grad mode and fake mode are unchanged.

        Raises:
            ConvertError: see `make_interpreters`.
        """
        if _begins(functorch.get_interpreter_stack() or [], stack, ints):
            yield
            return
        with _pushed(self.layers(stack, ints=ints)):
            yield

    def _cached(self, stack: tuple[InterpreterDesc, ...]) -> list[Any]:
        """The cached layers of the outer levels."""
        found: list[Any] = []
        for depth in range(1, len(stack) + 1):
            layer = self._made.get(stack[:depth])
            if layer is None:
                break
            found.append(layer)
        return found[::-1]


def _begins(
    interpreters: Sequence[Any],
    stack: tuple[InterpreterDesc, ...],
    ints: Callable[[IntLike], Any],
) -> bool:
    """Whether a live stack begins with the recorded one."""
    return len(stack) <= len(interpreters) and all(
        _is_recorded(interpreter, record, ints)
        for interpreter, record in zip(interpreters, stack, strict=False)
    )


def _is_recorded(interpreter: Any, record: InterpreterDesc, ints: Callable[[IntLike], Any]) -> bool:
    found = _encode(interpreter, _unchanged)
    if not isinstance(found.batch_size, torch.SymInt):
        return found == record
    if record.batch_size is None or isinstance(record.batch_size, int):
        return False
    live: Any = found.batch_size.node
    made: Any = getattr(ints(record.batch_size), "node", None)
    return (
        msgspec.structs.replace(found, batch_size=record.batch_size) == record
        and made is not None
        and (made.shape_env, made.expr) == (live.shape_env, live.expr)
    )


@contextmanager
def _pushed(layers: Sequence[Any]) -> Generator[None, None, None]:
    """Inside, exactly these layers are active."""
    with (
        torch_dispatch.temporarily_clear_interpreter_stack(),
        torch_dispatch.temporarily_restore_interpreter_stack(list(layers)),
    ):
        yield
