"""The view function of a tensor -> records of view calls.

Method: ``Tensor._view_func_unsafe`` runs on the base again, and a dispatch mode records the view
operators with their arguments. It runs on the base itself, since only a tensor of the same class, with
the same inner tensors, is dispatched in the same way, and view operators neither read nor write data.
Side effects are suppressed: gradient mode, other modes, functorch's interpreters, guards of the base's
``ShapeEnv``, collectives of distributed tensors, and Dynamo's marks, which a nested tensor sets on the
tensors that it is made of.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torch_fakeify.compat import torch_dispatch, torch_fakes, torch_symbols
from torch_fakeify.encoding.marks import same_marks
from torch_fakeify.encoding.names import encode_operator
from torch_fakeify.encoding.values import encode_value
from torch_fakeify.errors import UnsupportedTensorError
from torch_fakeify.records.tensor import SymValue, TensorValue, Value, ViewCallDesc

from .eager_strides import EagerViews
from .schemas import gives_several, is_view_operator

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from contextlib import AbstractContextManager

    from torch_fakeify.records.tensor import IntLike, MetaTensorDesc


def trace_view_calls(
    t: torch.Tensor,
    *,
    part: Callable[[torch.Tensor], MetaTensorDesc],
    ints: Callable[[torch.SymInt], IntLike],
    where: str,
) -> tuple[ViewCallDesc, ...]:
    """The view operators that make a view from its base, in the order in which they run.

    A dense view of a dense base has no view function, but one ``as_strided``. In-place view operators
    such as ``t_`` do not change the view function, and operators of other packages have none: then an
    ``as_strided`` is appended, if it makes the tensor.

    ``part`` describes a tensor argument besides the base, and ``ints`` encodes a symbolic number or a
    nested int.

    Raises:
        UnsupportedTensorError: the tensor is not a view, or no view operators make it.
        UnsupportedValueError: an argument has no record.
    """
    with torch_dispatch.DisableTorchFunction():
        base = t._base if t._is_view() else None
        if base is None:
            raise UnsupportedTensorError(
                "the tensor is no view", where=where, expected="a tensor with a `_base`"
            )
        with _without_side_effects(t, base):
            chain = _chain_of(t, base, where)
        return tuple(_encode(step, part, ints, where) for step in chain)


class _Step(NamedTuple):
    """A recorded call of a view operator."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    output: int | None = None


_COLLECTIVES = frozenset({"c10d", "c10d_functional", "_c10d_functional"})
"""Namespaces of operators that communicate with other processes."""


class _SuppressCollectives(torch_dispatch.TorchDispatchMode):
    """Dispatch mode in which collectives inside a wrapper subclass return empty tensors.

    A slice of a DTensor along a sharded dim gathers it, but the other processes do not take part, and
    only the sizes matter.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Let a subclass handle the operator first; a collective returns tensors of its sizes."""
        if any(not issubclass(cls, torch_fakes.FakeTensor) for cls in types):
            return NotImplemented
        kwargs = {} if kwargs is None else kwargs
        if func.namespace not in _COLLECTIVES or types:
            return func(*args, **kwargs)
        with torch_fakes.FakeTensorMode(allow_non_fake_inputs=True):
            fakes: Any = func(*args, **kwargs)
        if isinstance(fakes, torch.Tensor):
            return _unfilled(fakes)
        return [_unfilled(fake) for fake in fakes]


def _unfilled(fake: torch.Tensor) -> torch.Tensor:
    size, stride = fake.size(), fake.stride()
    return torch.empty_strided(size, stride, dtype=fake.dtype, device=fake.device)


class _Log(torch_dispatch.TorchDispatchMode):
    """Dispatch mode that records view operators and their results.

    Args:
        eager: whether fake tensors get the strides of real ones; see `EagerViews`.
    """

    def __init__(self, *, eager: bool) -> None:
        super().__init__()
        self.steps: list[_Step] = []
        self._inside: Callable[[], AbstractContextManager[Any]] = (
            EagerViews if eager else nullcontext
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator; the mode is off inside, so operators on inner tensors are not recorded."""
        kwargs = {} if kwargs is None else kwargs
        with _SuppressCollectives(), self._inside(), same_marks((*args, *kwargs.values())):
            result = func(*args, **kwargs)
        if is_view_operator(func):
            self.steps.append(_Step(func, args, kwargs, result))
        return result

    def chain(self, base: torch.Tensor, result: Any) -> list[_Step] | None:
        """The calls that made the result from the base; ``None`` if there are none."""
        found: list[_Step] = []
        for step in reversed(self.steps):
            several = gives_several(step.op)
            results = step.result if several else (step.result,)
            output = next((i for i, tensor in enumerate(results) if tensor is result), None)
            if output is not None:
                found.append(step._replace(output=output if several else None))
                result = step.args[0]
        return found[::-1] if result is base else None


# --- running the view function -----------------------------------------------------------------


def _chain_of(t: Any, base: torch.Tensor, where: str) -> list[_Step]:
    chain: list[_Step] | None = []
    result = base
    cause: Exception | None = None
    found = "a tensor that differs from it"
    is_fake = torch_fakes.maybe_get_fake_mode(t) is not None
    try:
        # A fake tensor was made by operators on fake tensors, or from the record of a real one.
        for eager in (False, True) if is_fake else (False,):
            log = _Log(eager=eager)
            with log:
                result = t._view_func_unsafe(base)
            chain = log.chain(base, result)
            if chain is not None and _same_metadata(result, t):
                return chain
    except (RuntimeError, TypeError) as error:
        # A view function of torch that only raises, or a class without the operator.
        cause = error
        sentence = str(error).partition("\n")[0].partition(". ")[0]
        found = f"{type(error).__name__}: {sentence}"
    step = None if chain is None else _as_strided(result, t)
    if chain is not None and step is not None:
        return [*chain, step]
    raise UnsupportedTensorError(
        "the view function does not make the tensor",
        where=where,
        expected="view operators that make it from its base",
        found=found,
        fix="Describe its clone(), which is not a view",
    ) from cause


def _as_strided(before: torch.Tensor, t: torch.Tensor) -> _Step | None:
    """An ``as_strided`` that makes the tensor from another one on the same storage, or ``None``."""
    if t.layout is not torch.strided:
        return None
    op = torch.ops.aten.as_strided.default
    args = (before, list(t.size()), list(t.stride()), t.storage_offset())
    try:
        with _SuppressCollectives():
            result = op(*args)
    except (RuntimeError, TypeError):
        return None  # the class has no such operator
    return _Step(op, args, {}, result) if _same_metadata(result, t) else None


@contextmanager
def _without_side_effects(t: torch.Tensor, base: torch.Tensor) -> Generator[None, None, None]:
    """Suppress active modes and side effects of operators on the base."""
    with ExitStack() as stack:
        stack.enter_context(torch_dispatch.disable_current_modes())
        if torch_dispatch.functionalize_included():
            stack.enter_context(torch_dispatch.suspend_functionalization())
        if torch_dispatch.peek_interpreter_stack() is not None:
            stack.enter_context(torch_dispatch.temporarily_clear_interpreter_stack())
        if torch.is_inference_mode_enabled() != base.is_inference():
            stack.enter_context(torch.inference_mode(base.is_inference()))
        stack.enter_context(torch.no_grad())
        for env in _shape_envs(t, base):
            stack.enter_context(env.suppress_guards())
        yield


def _shape_envs(*tensors: torch.Tensor) -> list[Any]:
    found: dict[int, Any] = {}
    todo = list(tensors)
    while todo:
        t: Any = todo.pop()
        if isinstance(t, torch_fakes.FakeTensor):
            env = t.fake_mode.shape_env
            if env is not None:
                found[id(env)] = env
        todo.extend(inner for _, inner in _inner(t))
    return list(found.values())


def _inner(t: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The inner tensors of a wrapper subclass, by attribute; none of other tensors."""
    if not torch_fakes.is_traceable_wrapper_subclass(t):
        return
    attributes: Any = t.__tensor_flatten__()[0]
    for attribute in attributes:
        inner = getattr(t, attribute)
        if isinstance(inner, torch.Tensor):
            yield attribute, inner


# --- comparing ---------------------------------------------------------------------------------


def _same_metadata(a: Any, b: Any) -> bool:
    """Whether two tensors and their inner tensors have equal metadata."""
    wraps = torch_fakes.is_traceable_wrapper_subclass(
        a
    ) or torch_fakes.is_traceable_wrapper_subclass(b)
    if wraps and type(a) is not type(b):
        return False  # other subclasses get their class from __torch_function__, which is off
    facts_a, facts_b = _metadata(a), _metadata(b)
    if facts_a[0] != facts_b[0] or len(facts_a[1]) != len(facts_b[1]):
        return False
    if not all(_same_number(x, y) for x, y in zip(facts_a[1], facts_b[1], strict=True)):
        return False
    inner_b = dict(_inner(b))
    # Jagged tensors get some inner tensors at first access.
    return all(
        _same_metadata(inner, inner_b[attribute])
        for attribute, inner in _inner(a)
        if attribute in inner_b
    )


def _metadata(t: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    constants = (t.dtype, t.device, t.layout, t.is_conj(), t.is_neg(), t.dim())
    numbers: tuple[Any, ...] = tuple(t.size())
    if t.layout is torch.strided:
        numbers += (*t.stride(), t.storage_offset())
    return constants, numbers


def _same_number(a: Any, b: Any) -> bool:
    if type(a) is int and type(b) is int:
        return a == b
    coefficients = (_nested_int_coeff(a), _nested_int_coeff(b))
    if coefficients != (None, None):
        # An operator may make new offsets, and with them a new nested int.
        return coefficients[0] == coefficients[1]
    return bool(torch_symbols.guard_or_false(a == b))


def _nested_int_coeff(n: Any) -> int | None:
    if type(n) is int or not n.node.is_nested_int():
        return None
    if not isinstance(n.node, torch_symbols.SymNode):
        return n.node.nested_int_coeff()
    nested: Any = n.node.hint  # of a fake jagged tensor it is a symbol with this hint
    return nested.node.nested_int_coeff()


# --- records -----------------------------------------------------------------------------------


def _encode(
    step: _Step,
    part: Callable[[torch.Tensor], MetaTensorDesc],
    ints: Callable[[torch.SymInt], IntLike],
    where: str,
) -> ViewCallDesc:
    op = encode_operator(step.op).name

    def hook(obj: object) -> Value | None:
        if isinstance(obj, torch.Tensor):
            return TensorValue(tensor=part(obj))
        if isinstance(obj, torch.SymInt):
            n = ints(obj)
            return n if isinstance(n, int) else SymValue(sym=n)
        return None

    place = f"{where}.{op}"
    return ViewCallDesc(
        op=op,
        args=tuple(
            encode_value(value, where=f"{place}[{i}]", hook=hook)
            for i, value in enumerate(step.args[1:])
        ),
        kwargs=tuple(
            (name, encode_value(value, where=f"{place}.{name}", hook=hook))
            for name, value in sorted(step.kwargs.items())
        ),
        output=step.output,
    )
