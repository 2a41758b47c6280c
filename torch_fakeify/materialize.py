"""Real inputs from records: dtypes, strides, aliasing and guards as recorded, data made up."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import sympy
import torch

from . import _torch
from ._torch import nested_int_of_offsets
from .desc import ExprDesc, IntLike, MetaTensorDesc, NestedIntDesc, SymDesc, TorchConstValue
from .errors import CaptureError
from .exprs import decode_expr
from .materialize_kinds import make_mkldnn, make_sparse, make_view, make_wrapper, refuse_wrapped
from .meshes import Meshes
from .refusing import refusing
from .text import expr_text, int_text
from .values import decode_value

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .desc_env import ShapeEnvDesc
    from .desc_frame import CaptureDesc, InputDesc


def materialize(
    desc: CaptureDesc,
    *,
    seed: int = 0,
    sizes: Mapping[str, int] | None = None,
    device: str | torch.device | None = None,
    max_bytes: int | None = None,
) -> list[Any]:
    """Real inputs for a captured frame, in placeholder order.

    Floating point data of matrices is normal with variance ``1 / size[-1]``, of vectors uniform in
    [0, 1), so that sums, roots and logarithms stay finite; integers are 0 or 1, which are valid
    indices into every dim that torch did not specialize.

    Args:
        desc: the frame.
        seed: of the generator.
        sizes: values by symbol name or by source name; other symbols keep their hints.
        device: where to make the tensors; ``None`` means each one's recorded device.
        max_bytes: of all tensors together; ``None`` means the memory of this machine.

    Raises:
        CaptureError: unknown symbol, violated guard or range, a device that is not here, or more
            bytes than ``max_bytes``.
    """
    sizes = dict(sizes or {})
    with refusing("$.shape_env"):
        symbols = Symbols(desc.shape_env, sizes)
        if sizes:
            symbols.check_guards()
    maker = _Maker(symbols, seed, None if device is None else torch.device(device))
    inputs: list[Any] = []
    with refusing("$.inputs"):
        _check_bytes(maker.plan(desc.inputs), max_bytes)
        for i, entry in enumerate(desc.inputs):
            with refusing(f"$.inputs[{i}]"):
                inputs.append(maker.make_input(i, entry))
        maker.release_storages()
    return inputs


def _check_bytes(nbytes: int, most: int | None) -> None:
    most = _memory() if most is None else most
    if most is not None and nbytes > most:
        raise CaptureError(
            "the inputs are too large",
            expected=f"at most {most} bytes",
            found=int_text(nbytes),
            fix="Choose smaller sizes, or a larger `max_bytes` if there is room for them",
        )


def _memory() -> int | None:
    """Bytes of memory that this machine has, where the system tells."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


class Symbols:
    """Values for the symbols of a frame.

    Args:
        env: the frame's shape environment, if it has one.
        sizes: chosen values by symbol name or source name.
    """

    def __init__(self, env: ShapeEnvDesc | None, sizes: Mapping[str, int]) -> None:
        self.env = env
        self.chosen = bool(sizes)
        self.values: dict[str, Any] = {}
        self.by_source: dict[str, str] = {}
        if env is None:
            if sizes:
                raise CaptureError(
                    "sizes were given for a frame without symbols",
                    found=", ".join(sorted(sizes)),
                    fix="Record the frame with dynamic=True",
                )
            return
        self._exprs: dict[ExprDesc, Any] = {}
        self._read(env, sizes)

    def _read(self, env: ShapeEnvDesc, sizes: Mapping[str, int]) -> None:
        for symbol in env.symbols:
            for source in symbol.sources:
                self.by_source[source.name] = symbol.name
        names = {symbol.name for symbol in env.symbols}
        unknown = [n for n in sizes if n not in names and n not in self.by_source]
        if unknown:
            raise CaptureError(
                "the frame has no such symbol",
                expected=f"one of {', '.join(sorted(names | set(self.by_source)))}",
                found=", ".join(unknown),
                fix="`torch-fakeify show FILE` lists the symbols",
            )
        chosen = {self.by_source.get(n, n): v for n, v in sizes.items()}
        for symbol in env.symbols:
            if symbol.name in chosen:
                self.values[symbol.name] = sympy.Integer(chosen[symbol.name])
            else:
                self.values[symbol.name] = self._default(symbol)

    def _default(self, symbol: Any) -> Any:
        if symbol.hint is not None:
            return self._decode(symbol.hint)
        if symbol.hint_override is not None:
            return sympy.Integer(symbol.hint_override)
        lower = None if symbol.lower is None else self._decode(symbol.lower)
        if lower is not None and lower.is_Integer:
            return sympy.Integer(max(2, int(lower)))
        return sympy.Integer(2)

    def _decode(self, expr: ExprDesc) -> Any:
        decoded = self._exprs.get(expr)
        if decoded is None:
            decoded = self._exprs[expr] = decode_expr(expr)
        return decoded

    def evaluate(self, expr: ExprDesc) -> Any:
        """The expression with every known symbol replaced by its value."""
        decoded = self._decode(expr)
        return decoded.xreplace(
            {s: self.values[s.name] for s in decoded.free_symbols if s.name in self.values}
        )

    def integer(self, value: IntLike, where: str) -> int:
        """A size, stride, offset or number of bytes as a number."""
        if isinstance(value, int):
            return value
        if isinstance(value, NestedIntDesc):
            raise CaptureError("a ragged size is no number", where=where, found=str(value))
        return int(self.scalar(value, where))

    def scalar(self, sym: SymDesc, where: str) -> Any:
        """A symbolic scalar as a Python number."""
        if not self.chosen and sym.hint is not None:
            return sym.hint
        result = self.evaluate(sym.expr)
        if result.free_symbols:
            raise CaptureError(
                "a size has a symbol without a value",
                where=where,
                found=expr_text(sym.expr),
                fix="Give it in sizes=",
            )
        if sym.kind == "int":
            return int(result)
        return float(result) if sym.kind == "float" else bool(result)

    def check_guards(self) -> None:
        """Raise if a value violates a range or a guard."""
        assert self.env is not None
        for symbol in self.env.symbols:
            value = self.values[symbol.name]
            for bound, text, holds in (
                (symbol.lower, ">=", lambda b, v: v >= b),
                (symbol.upper, "<=", lambda b, v: v <= b),
            ):
                if bound is not None and holds(self._decode(bound), value) == sympy.false:
                    raise self._violation(f"{symbol.name} {text} {expr_text(bound)}", None)
        for guard in self.env.guards:
            if self.evaluate(guard.expr) == sympy.false:
                raise self._violation(expr_text(guard.expr), guard)

    def _violation(self, text: str, guard: Any) -> CaptureError:
        values = ", ".join(f"{n}={v}" for n, v in sorted(self.values.items()) if n in text)
        return CaptureError(
            "the sizes violate what the frame was compiled for",
            where=_user_line(guard),
            expected=text,
            found=values,
            fix="Choose sizes that satisfy the guards; `torch-fakeify show FILE` lists them",
        )


def _user_line(guard: Any) -> str | None:
    stack = getattr(guard, "user_stack", None)
    if stack is None or not stack.frames:
        return None
    frame = stack.frames[-1]
    return f"{frame.file}:{frame.line}"


class _Maker:
    """Makes tensors; one for each record, one storage for each storage record."""

    def __init__(self, symbols: Symbols, seed: int, device: torch.device | None) -> None:
        self.symbols = symbols
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[int, torch.Tensor] = {}
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.extents: dict[int, int] = {}
        self.released: list[torch.UntypedStorage] = []
        self.meshes = Meshes()
        self.offsets: dict[int, MetaTensorDesc] = {}

    def plan(self, inputs: tuple[InputDesc, ...]) -> int:
        """Find how many bytes each storage needs, over all tensors on it, and all together."""
        recorded: dict[int, int] = {}
        others = 0
        for entry in inputs:
            for desc in _with_parts(entry.tensor):
                if desc.nested_int is not None:
                    self.offsets[desc.nested_int] = desc
                if desc.subclass is not None:
                    continue
                if desc.layout != "strided":
                    others += self._elements(desc) * _dtype(desc).itemsize
                elif desc.storage is not None:
                    storage_id, nbytes = desc.storage.id, desc.storage.nbytes
                    needed = self._extent(desc)
                    self.extents[storage_id] = max(self.extents.get(storage_id, 0), needed)
                    recorded[storage_id] = nbytes if isinstance(nbytes, int) else 0
        return others + sum(max(n, recorded[at]) for at, n in self.extents.items())

    def _elements(self, desc: MetaTensorDesc) -> int:
        """Of a tensor without strides, which is made of a dense one."""
        return math.prod(self.symbols.integer(n, f"tensor {desc.id}") for n in desc.size)

    def _extent(self, desc: MetaTensorDesc) -> int:
        size, stride, offset = self._layout(desc)
        if 0 in size:
            return 0
        last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        return (last + 1) * _dtype(desc).itemsize

    def _layout(self, desc: MetaTensorDesc) -> tuple[list[int], list[int], int]:
        where = desc.source.name if desc.source is not None else f"tensor {desc.id}"
        size = [self.symbols.integer(n, where) for n in desc.size]
        stride = [self.symbols.integer(n, where) for n in desc.stride]
        return size, stride, self.symbols.integer(desc.storage_offset, where)

    def make_input(self, position: int, desc: InputDesc) -> Any:
        if desc.tensor is not None:
            return self.make(desc.tensor)
        if desc.sym is not None:
            if isinstance(desc.sym.hint, NestedIntDesc):
                return self._nested_int(desc.sym.hint, desc.name)
            return self.symbols.scalar(desc.sym, desc.name)
        return decode_value(desc.value, where=f"$.inputs[{position}].value")

    def _nested_int(self, n: NestedIntDesc, where: str) -> torch.SymInt:
        """The nested int of the offsets that were recorded with it."""
        offsets = self.offsets.get(n.id)
        if offsets is None:
            raise CaptureError(
                "no input has the offsets that a nested int stands for", where=where, found=str(n)
            )
        return nested_int_of_offsets(self.make(offsets)) * n.coeff

    def make(self, desc: MetaTensorDesc) -> torch.Tensor:
        done = self.tensors.get(desc.id)
        if done is not None:
            return done
        with torch.inference_mode() if desc.is_inference else nullcontext():
            if desc.base is None:
                tensor = self._make_root(desc)
            else:
                tensor = self._make_view(desc)
                creation_meta = getattr(_torch.CreationMeta, desc.creation_meta or "DEFAULT")
                _torch.set_creation_meta(tensor, creation_meta)
        if desc.is_conj:
            _torch.set_conj(tensor, True)
        if desc.is_neg:
            _torch.set_neg(tensor, True)
        if desc.grad is not None:
            tensor.grad = self.make(desc.grad)
        self.tensors[desc.id] = tensor
        return tensor

    def _make_root(self, desc: MetaTensorDesc) -> torch.Tensor:
        """A tensor that is no view."""
        with torch.no_grad():
            tensor = self._make_kind(desc)
        if desc.is_parameter:
            return torch.nn.Parameter(tensor, requires_grad=desc.requires_grad)
        if desc.is_buffer:
            tensor = torch.nn.Buffer(tensor, persistent=desc.persistent is not False)
        if desc.requires_grad and desc.is_leaf:
            return tensor.requires_grad_()
        if not desc.requires_grad:
            return tensor
        # A context may have said so already, of a leaf.
        return _with_history(tensor.requires_grad_(False))

    def _make_kind(self, desc: MetaTensorDesc) -> torch.Tensor:
        if desc.subclass is not None:
            return make_wrapper(self, desc)
        if desc.functorch is not None or desc.functional is not None:
            refuse_wrapped(desc)
        device = self._device(desc)
        if desc.layout == "strided":
            return self._make_plain(desc, device)
        where = f"tensor {desc.id}"
        size = [self.symbols.integer(n, where) for n in desc.size]
        if desc.layout == "_mkldnn":
            return make_mkldnn(self, desc, size, _dtype(desc))
        return make_sparse(self, desc, size, _dtype(desc), device)

    def _make_plain(self, desc: MetaTensorDesc, device: torch.device) -> torch.Tensor:
        size, stride, offset = self._layout(desc)
        tensor = torch.empty(0, dtype=_dtype(desc), device=device)
        tensor.set_(self._storage(desc, device), offset, size, stride)
        hint = self._scalar_hint(desc)
        if hint is not None:
            tensor.fill_(hint)
        return self._pinned(tensor) if desc.is_pinned else tensor

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        if torch.accelerator.is_available():
            return tensor.pin_memory()
        if self.device is not None:  # asked to be somewhere else
            return tensor
        raise CaptureError(
            "memory can be pinned only where there is an accelerator",
            expected="pinned memory",
            fix='Pass device="cpu"',
        )

    def _make_view(self, desc: MetaTensorDesc) -> torch.Tensor:
        assert desc.base is not None
        base = self.make(desc.base)
        if desc.is_leaf:
            with torch.no_grad():
                view = self._view_of(desc, base)
            # A view made under no_grad says that it requires grad, yet gets none: asking it to
            # would change that.
            return view if view.requires_grad == desc.requires_grad else view.requires_grad_()
        with torch.enable_grad():
            if desc.requires_grad and not base.requires_grad:
                with torch.no_grad():
                    base = base.view(base.shape)
                base.requires_grad_()
            return self._view_of(desc, base)

    def _view_of(self, desc: MetaTensorDesc, base: torch.Tensor) -> torch.Tensor:
        if desc.view_calls is not None:
            return make_view(self, desc, base)
        return _reinterpret(base, _dtype(desc)).as_strided(*self._layout(desc))

    def _storage(self, desc: MetaTensorDesc, device: torch.device) -> torch.UntypedStorage:
        if desc.storage is None:
            return self._fill(self._extent(desc), desc, device)
        done = self.storages.get(desc.storage.id)
        if done is not None:
            return done
        nbytes = desc.storage.nbytes
        if not isinstance(nbytes, int) or self.symbols.chosen:
            nbytes = 0 if nbytes == 0 else self.extents.get(desc.storage.id, self._extent(desc))
        storage = self._fill(nbytes, desc, device)
        if nbytes == 0:
            self.released.append(storage)
        self.storages[desc.storage.id] = storage
        return storage

    def number(self, n: Any, where: str) -> Any:
        """A size, or a symbolic scalar, as a number."""
        return n if isinstance(n, int) else self.symbols.scalar(n, where)

    def release_storages(self) -> None:
        """Take back the memory that torch gave to storages that had none, to put tensors on them."""
        for storage in self.released:
            storage.resize_(0)

    def _fill(
        self, nbytes: int, desc: MetaTensorDesc, device: torch.device
    ) -> torch.UntypedStorage:
        dtype = _dtype(desc)
        data = self.random(-(-nbytes // dtype.itemsize), dtype, desc)
        storage = data.to(device).untyped_storage()
        storage.resize_(nbytes)
        return storage

    def random(self, count: int, dtype: torch.dtype, desc: MetaTensorDesc) -> torch.Tensor:
        """A vector of made up data, on the CPU."""
        if dtype.is_complex:
            half = self.random(2 * count, dtype.to_real(), desc)
            return torch.view_as_complex(half.view(count, 2))
        if dtype.is_floating_point:
            if desc.ndim < 2:
                data = torch.rand(count, generator=self.generator)
            else:
                width = max(1, self.symbols.integer(desc.size[-1], "size[-1]"))
                data = torch.randn(count, generator=self.generator) / width**0.5
        else:
            data = torch.randint(0, 2, (count,), generator=self.generator, dtype=torch.uint8)
        try:
            return data.to(dtype)
        except RuntimeError:  # bits and sub-byte dtypes have no conversion: any bytes will do
            size = (count * dtype.itemsize,)
            return torch.randint(0, 2, size, generator=self.generator, dtype=torch.uint8).view(
                dtype
            )

    def _scalar_hint(self, desc: MetaTensorDesc) -> int | float | None:
        if desc.scalar_hint is None or desc.source is None:
            return desc.scalar_hint
        name = self.symbols.by_source.get(f"{desc.source.name}.item()")
        if name is None:
            return desc.scalar_hint
        value = self.symbols.values[name]
        return int(value) if value.is_Integer else float(value)

    def _device(self, desc: MetaTensorDesc) -> torch.device:
        device = torch.device(desc.device) if self.device is None else self.device
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise CaptureError(
                "this machine has no such device",
                where=desc.source.name if desc.source is not None else f"tensor {desc.id}",
                expected=str(device),
                found=str(error).partition("\n")[0],
                fix='Pass device="cpu"',
            ) from error
        return device


class _History(torch.autograd.Function):
    """The tensor itself, as the result of an operator on something that requires grad."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, _origin: torch.Tensor) -> torch.Tensor:
        """Mark the tensor as changed in place, which gives it a history."""
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:  # noqa: ARG004
        """Nothing flows on: the origin is made up."""
        return None, None


def _with_history(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, no leaf any more."""
    with torch.enable_grad():
        origin = torch.empty(0, device=tensor.device, requires_grad=True)
        history: Any = _History.apply(tensor, origin)
    return history


def _with_parts(desc: MetaTensorDesc | None) -> Iterator[MetaTensorDesc]:
    if desc is None:
        return
    yield desc
    yield from _with_parts(desc.base)
    yield from _with_parts(desc.grad)
    for _, part in () if desc.subclass is None else desc.subclass.tensors:
        yield from _with_parts(part)


def _dtype(desc: MetaTensorDesc) -> torch.dtype:
    dtype = decode_value(TorchConstValue(kind="dtype", name=desc.dtype), where="$.dtype")
    assert isinstance(dtype, torch.dtype)
    return dtype


def _reinterpret(base: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The base under another dtype, as the view that was recorded saw it."""
    if base.dtype == dtype:
        return base
    if base.is_complex() and base.dtype.to_real() == dtype:
        return torch.view_as_real(base)
    if dtype.is_complex and dtype.to_real() == base.dtype:
        return torch.view_as_complex(base)
    return base.view(dtype)
