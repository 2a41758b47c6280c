"""Arguments of an operator as plain data, from which tensors with made-up data are built."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from .evaluating import contiguous_strides, dtype_named, ordered_strides, torch_name
from .observed import NamedValue, Outcome, TensorFacts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_MOST_ELEMENTS = 1 << 22


class TensorSpec(msgspec.Struct, frozen=True, tag="tensor"):
    """A tensor to be made; sizes, strides and offset in elements."""

    size: tuple[int, ...]
    dtype: str
    device: str = "cpu"
    order: tuple[int, ...] | None = None
    """Dense in this order of dims, from the outermost in memory; ``None`` for contiguous."""
    spread: int | None = None
    """A dim whose elements lie two apart, in a larger tensor; the storage offset is then not 0."""
    low: float = 0.0
    """Smallest number of the sample; also of the data."""
    high: float = 1.0
    is_normal: bool = True
    """Whether its data are normally distributed, not between the two."""
    is_sorted: bool = False
    fill: float | None = None
    """The one number that all elements have."""


class CallSpec(msgspec.Struct, frozen=True):
    """A call of an operator: its arguments by name, the seed of their data, and that of the operator."""

    args: dict[str, Any]
    seed: int = 0
    noise: int = 0


def spec_of(value: Any) -> Any:
    """Return the specification of an argument.

    Args:
        value: a real or fake tensor, a list of such, a number, a dtype, ...
    """
    if isinstance(value, torch.Tensor):
        return _tensor_spec(value)
    if isinstance(value, (list, tuple)):
        return [spec_of(each) for each in value]
    if isinstance(value, torch.SymInt):
        return _hint(value)
    if isinstance(value, (torch.SymFloat, torch.SymBool)):
        found = value.node.hint
        return float(found or 1.0) if isinstance(value, torch.SymFloat) else bool(found)
    return _named(value)


def _hint(size: Any) -> int:
    if isinstance(size, int):
        return size
    hint = size.node.hint if size.node.has_hint() else None
    return 4 if hint is None else int(hint)


def _tensor_spec(value: torch.Tensor) -> TensorSpec:
    size = tuple(map(_hint, value.shape))
    dtype = torch_name(value.dtype)
    order = None
    if value.layout is torch.strided:
        stride = tuple(map(_hint, value.stride()))
        dims = sorted(range(len(size)), key=lambda dim: (-stride[dim], dim))
        dense = ordered_strides(size, dims)
        if dims != list(range(len(size))) and dense == stride:
            order = tuple(dims)
    made = TensorSpec(size, dtype, str(value.device), order)
    if _has_data(value):
        return _with_data(made, value.detach())
    if not value.dtype.is_floating_point and not value.dtype.is_complex:
        return msgspec.structs.replace(made, is_normal=False, high=2.0)
    return made


def _has_data(value: torch.Tensor) -> bool:
    from torch_fakeify.compat.torch_fakes import FakeTensor

    return not isinstance(value, FakeTensor) and value.device.type != "meta" and value.numel() > 0


def _with_data(made: TensorSpec, value: torch.Tensor) -> TensorSpec:
    if value.dtype.is_complex or value.dtype is torch.bool or value.layout is not torch.strided:
        return msgspec.structs.replace(made, is_normal=value.dtype is not torch.bool)
    numbers = value.double().flatten()
    if not bool(torch.isfinite(numbers).all()):
        return made
    low, high = float(numbers.min()), float(numbers.max())
    is_sorted = value.ndim == 1 and len(numbers) > 2 and bool((numbers[1:] >= numbers[:-1]).all())
    is_normal = value.dtype.is_floating_point and low < 0
    return msgspec.structs.replace(
        made, low=low, high=high, is_normal=is_normal, is_sorted=is_sorted and low < high
    )


def _named(value: Any) -> Any:
    for kind in (torch.dtype, torch.layout, torch.memory_format):
        if isinstance(value, kind):
            return NamedValue(kind.__name__, torch_name(value))
    if isinstance(value, torch.device):
        return NamedValue("device", str(value))
    return value


def built(spec: Any, generator: torch.Generator) -> Any:
    """Return the argument of a specification, with data of a random generator."""
    if isinstance(spec, TensorSpec):
        return _built_tensor(spec, generator)
    if isinstance(spec, (list, tuple)):
        return [built(each, generator) for each in spec]
    if isinstance(spec, NamedValue):
        return torch.device(spec.name) if spec.kind == "device" else getattr(torch, spec.name)
    return spec


def _built_tensor(spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    dtype = dtype_named(spec.dtype)
    dims = range(len(spec.size))
    # The order of a dim of size 1 is no order: kernels for CPU and meta differ in what they make of it.
    is_plain = 1 in spec.size
    if spec.spread is not None and spec.spread in dims and not is_plain:
        at = spec.spread
        outer = tuple(2 * n + 1 if dim == at else n for dim, n in enumerate(spec.size))
        store = torch.empty(outer, dtype=dtype, device=spec.device)
        picked = [slice(1, None, 2) if dim == at else slice(None) for dim in dims]
        found = store[tuple(picked)]
    else:
        stride = (
            contiguous_strides(spec.size)
            if is_plain or spec.order is None or len(spec.order) != len(spec.size)
            else ordered_strides(spec.size, spec.order)
        )
        found = torch.empty_strided(spec.size, stride, dtype=dtype, device=spec.device)
    found.copy_(_data(spec, generator))
    return found


def _data(spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    dtype = dtype_named(spec.dtype)
    if spec.fill is not None:
        return torch.full(spec.size, spec.fill).to(dtype)
    if dtype is torch.bool:
        share = torch.rand((), generator=generator)
        return torch.rand(spec.size, generator=generator) < share
    if dtype.is_complex:
        return torch.randn(spec.size, generator=generator, dtype=torch.complex128).to(dtype)
    if spec.is_normal and dtype.is_floating_point:
        return torch.randn(spec.size, generator=generator, dtype=torch.float64).to(dtype)
    if dtype.is_floating_point:
        found = torch.rand(spec.size, generator=generator, dtype=torch.float64)
        found = spec.low + (spec.high - spec.low) * found
    else:
        low, high = int(spec.low), int(spec.high)
        found = torch.randint(low, max(high, low) + 1, spec.size, generator=generator)
    if spec.is_sorted and len(spec.size) == 1 and spec.size[0]:
        found = found.sort().values
        found[0], found[-1] = spec.low, spec.high
    return found.to(dtype)


def elements(spec: Any) -> int:
    """Return the number of elements of the tensors of an argument."""
    if isinstance(spec, TensorSpec):
        count = 1
        for size in spec.size:
            count *= max(size, 1)
        return count
    return sum(map(elements, spec)) if isinstance(spec, (list, tuple)) else 0


def facts_of(
    value: Any, arguments: Sequence[tuple[tuple[str, int | None], torch.Tensor]] = ()
) -> Any:
    """Return an argument or a result as observed data.

    Args:
        value: a tensor, a list, a number, a dtype, ...
        arguments: for results, the tensors whose storage they may share.
    """
    if isinstance(value, torch.Tensor):
        return _tensor_facts(value, arguments)
    if isinstance(value, (list, tuple)):
        return [facts_of(each, arguments) for each in value]
    return _named(value)


def _tensor_facts(
    value: torch.Tensor, arguments: Sequence[tuple[tuple[str, int | None], torch.Tensor]]
) -> TensorFacts:
    dtype, device = torch_name(value.dtype), str(value.device)
    layout = torch_name(value.layout)
    if value.layout is not torch.strided:
        return TensorFacts(tuple(value.shape), (), 0, dtype, device, layout)
    shares, is_argument = None, False
    for where, argument in arguments:
        if argument is value:
            shares, is_argument = where, True
            break
        if shares is None and argument.layout is torch.strided and _is_shared(argument, value):
            shares = where
    return TensorFacts(
        tuple(value.shape), tuple(value.stride()), value.storage_offset(), dtype, device,
        shares=shares, is_argument=is_argument,
    )  # fmt: skip


def _is_shared(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def tensors_of(args: Mapping[str, Any]) -> Iterator[tuple[tuple[str, int | None], torch.Tensor]]:
    """Yield the tensors among arguments, with their names and positions in lists."""
    for name, value in args.items():
        if isinstance(value, torch.Tensor):
            yield (name, None), value
        elif isinstance(value, (list, tuple)):
            for at, each in enumerate(value):
                if isinstance(each, torch.Tensor):
                    yield (name, at), each


def passed(schema: Any, args: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments by name as positional ones and keywords."""
    given = [(each.name, each.kwarg_only) for each in schema.arguments if each.name in args]
    return (
        [args[name] for name, is_keyword in given if not is_keyword],
        {name: args[name] for name, is_keyword in given if is_keyword},
    )


def run_call(op: Any, spec: CallSpec) -> Outcome:
    """Run an operator on made-up arguments and return what it gave."""
    schema = op._schema
    generator = torch.Generator().manual_seed(spec.seed)
    if sum(map(elements, spec.args.values())) > _MOST_ELEMENTS:
        return Outcome(error="the arguments are too large")
    try:
        args = {name: built(value, generator) for name, value in spec.args.items()}
    except Exception as error:  # noqa: BLE001 - such arguments cannot be made
        return Outcome(error=f"the arguments cannot be made: {error}")
    tensors = list(tensors_of(args))
    passed_args = {name: facts_of(value) for name, value in args.items()}
    written = {
        each.name for each in schema.arguments if each.alias_info and each.alias_info.is_write
    }
    before = [
        (where, tensor, tensor.clone()) for where, tensor in tensors if where[0] not in written
    ]
    positional, keywords = passed(schema, args)
    torch.manual_seed(spec.noise)
    try:
        with torch.no_grad():
            found = op(*positional, **keywords)
    except Exception as error:  # noqa: BLE001 - any exception is a result
        lines = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {lines[0] if lines else ''}"
        return Outcome(passed_args, error=text)
    count = len(schema.returns)
    results = [] if count == 0 else [found] if count == 1 else list(found)
    changed = [where[0] for where, tensor, old in before if not _is_equal(tensor, old)]
    return Outcome(
        passed_args,
        [facts_of(each, tensors) for each in results],
        written=sorted(set(changed)),
        values=_digest(results),
    )


def _is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout is not torch.strided:
        return True
    same = torch.equal(a, b)
    return same or bool(((a == b) | ((a != a) & (b != b))).all())


def _digest(results: Sequence[Any]) -> str:
    """Return a digest of the data of results, the same for equal data."""
    state = hashlib.sha256()
    for each in results:
        for value in each if isinstance(each, (list, tuple)) else [each]:
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                plain = value.detach().resolve_conj().resolve_neg().cpu()
                flat = plain.clone(memory_format=torch.contiguous_format).view(-1)
                state.update(flat.view(torch.uint8).numpy().tobytes())
            else:
                state.update(repr(value).encode())
    return state.hexdigest()[:16]
