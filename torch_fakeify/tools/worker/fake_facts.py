"""Comparison of a real value with a fake one whose sizes have symbols."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import sympy
import torch

from torch_fakeify.compat import torch_dispatch, torch_fakes, torch_graphs
from torch_fakeify.replay.bindings import canonical_symbol, expr_of

from .replies import Parted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch_fakeify.frames.graph.writing import LastWrites
    from torch_fakeify.replay.bindings import Binding

_NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
_RELATIVE = 1e-6
"""Accepted relative difference of floats, as that of a Python float and its symbol."""


class Numbers:
    """Values of symbols, given as sympy numbers by name, and the numbers that expressions over them have."""

    def __init__(self, env: Any, values: Mapping[str, Any]) -> None:
        self._env = env
        self._values = {n: v for n, v in values.items() if not n.startswith(("u", "zuf"))}
        self._bound: set[str] = set()

    def of(self, n: Any) -> Any:
        """Return the Python number; ``None`` if a symbol has no value, as a ragged size."""
        if isinstance(n, (bool, int, float)):
            return n
        expr: Any = expr_of(n)
        if expr is None:
            return None
        try:
            found = self._evaluated(expr)
            return self._evaluated(n.node.expr) if found is None else found
        except (ArithmeticError, AssertionError, AttributeError, TypeError, ValueError):
            return None

    def _evaluated(self, expr: Any) -> Any:
        known = {
            s: self._values[name]
            for s in expr.free_symbols
            if (name := self._name(s)) in self._values
        }
        value = expr.xreplace(known)
        if value in (sympy.true, sympy.false):
            return bool(value)
        if value.free_symbols or not value.is_number:
            return None
        return int(value) if value.is_Integer else float(value)

    def _name(self, symbol: Any) -> str:
        return symbol.name if self._env is None else canonical_symbol(symbol, self._env).name

    def bind_input(self, fake: Any, real: Any) -> None:
        """Take the values of symbols that are sizes of an input, or an input itself."""
        pairs: list[tuple[Any, Any]] = [(fake, real)]
        if isinstance(fake, torch.Tensor) and isinstance(real, torch.Tensor):
            pairs = [*zip(fake.shape, real.shape, strict=False)]
            if _is_plain(fake) and _is_plain(real):
                pairs += zip(fake.stride(), real.stride(), strict=False)
                pairs.append((fake.storage_offset(), real.storage_offset()))
        for n, value in pairs:
            expr: Any = None if isinstance(n, (bool, int, float)) else expr_of(n)
            if isinstance(expr, sympy.Symbol) and isinstance(value, (int, float)):
                name = self._name(expr)
                if name not in self._bound:
                    self._bound.add(name)
                    self._values[name] = sympy.sympify(value, strict=True)

    def bind(self, bindings: Iterable[tuple[Any, Binding]], real: Any) -> Iterator[Parted]:
        """Take the values of the symbols that a node binds; yield the facts that they violate."""
        for symbol, binding in bindings:
            value = binding.number(real, self._evaluated)
            if not isinstance(value, (int, float)):
                continue
            number = int(value) if isinstance(value, bool) else value
            self._values[self._name(symbol)] = sympy.sympify(number, strict=True)
            bounds = self._env.var_to_range.get(symbol)
            if bounds is not None and math.isfinite(number) and number not in bounds:
                known = f"{bounds.lower} to {bounds.upper}"
                yield Parted("", f"range of {symbol}", known, str(number))


class Comparison:
    """Compares values in the order of the nodes, and the storages that they share with earlier ones."""

    def __init__(self, numbers: Numbers, writes: LastWrites) -> None:
        self._numbers = numbers
        self._writes = writes
        self._fake_owners: dict[int, str] = {}
        self._real_owners: dict[int, str] = {}
        self._equal: dict[str, str] = {}
        """Names of storages that are one storage in the real run alone, by that of the fake one."""
        self._alive: list[Any] = []
        """The real values: an address is that of one storage."""

    def parts(self, fake: Any, real: Any, at: int, name: str, part: str = "") -> Iterator[Parted]:
        """Yield how the result of a node at this moment differs from its fake value.

        ``at`` is the position of the node, ``part`` says in the text which part of the result it is.
        """
        if isinstance(fake, torch.Tensor):
            if isinstance(real, torch.Tensor):
                yield from self._tensor(fake, real, at, name, part)
            elif not isinstance(real, _NUMBERS):
                yield Parted(part, "type", "a tensor", _type(real))
        elif isinstance(fake, _NUMBERS):
            yield from self._number(fake, real, part)
        elif isinstance(fake, (tuple, list)):
            fakes: Any = fake
            if not isinstance(real, (tuple, list)):
                yield Parted(part, "type", _type(fakes), _type(real))
                return
            reals: Any = real
            if len(fakes) != len(reals):
                yield Parted(part, "length", str(len(fakes)), str(len(reals)))
                return
            for i, (a, b) in enumerate(zip(fakes, reals, strict=True)):
                yield from self.parts(a, b, at, name, f"{part}[{i}]")
        elif fake is None and isinstance(real, (torch.Tensor, *_NUMBERS)):
            yield Parted(part, "type", "None", _type(real))

    def allow_sharing(self, fake: Any, real: Any) -> None:
        """Take the storages of a real value as those of its fake value, for the nodes that follow."""
        if isinstance(fake, torch.Tensor) and isinstance(real, torch.Tensor):
            ours = self._fake_owners.get(fake.untyped_storage()._cdata)
            theirs = self._real_owners.get(real.untyped_storage()._cdata)
            if ours is not None and theirs is not None:
                self._equal[ours] = self._equal.get(theirs, theirs)

    def _number(self, fake: Any, real: Any, part: str) -> Iterator[Parted]:
        if isinstance(real, torch.Tensor) or not isinstance(real, (bool, int, float)):
            yield Parted(part, "type", _type(fake), _type(real))
            return
        value = self._numbers.of(fake)
        if value is None or _same_number(value, real):
            return
        yield Parted(part, "number", str(value), str(real))

    def _tensor(
        self, fake: torch.Tensor, real: torch.Tensor, at: int, name: str, part: str
    ) -> Iterator[Parted]:
        self._alive.append(real)
        if fake.dtype != real.dtype:
            yield Parted(part, "dtype", str(fake.dtype), str(real.dtype))
        if fake.device.type != real.device.type:
            yield Parted(part, "device", fake.device.type, real.device.type)
        if fake.layout != real.layout:
            yield Parted(part, "layout", str(fake.layout), str(real.layout))
        keys = storages_of(fake)
        if any(self._writes.changed_after(at, key) for key in keys):
            return  # the record has the layout after a later node has changed it
        yield from self._layout(fake, real, part)
        if not (_is_plain(fake) and _is_plain(real)):
            return
        if fake.is_conj() != real.is_conj() or fake.is_neg() != real.is_neg():
            yield Parted(part, "conjugate or negative bit", _bits(fake), _bits(real))
        written = any(self._writes.written_after(at, key) for key in keys)
        if fake.requires_grad != real.requires_grad and not written:
            yield Parted(part, "requires_grad", str(fake.requires_grad), str(real.requires_grad))
        yield from self._storage(fake, real, name, part)

    def _layout(self, fake: torch.Tensor, real: torch.Tensor, part: str) -> Iterator[Parted]:
        if fake.ndim != real.ndim:
            yield Parted(part, "ndim", str(fake.ndim), str(real.ndim))
            return
        sizes = [self._numbers.of(n) for n in fake.shape]
        if _differ(sizes, list(real.shape)):
            yield Parted(part, "size", _list(sizes), _list(real.shape))
            return
        if not (_is_plain(fake) and _is_plain(real)):
            return
        strides = [self._numbers.of(n) for n in fake.stride()]
        counts = [n > 1 and 0 not in real.shape for n in real.shape]
        if _differ(_chosen(strides, counts), _chosen(real.stride(), counts)):
            yield Parted(part, "stride", _list(strides), _list(real.stride()))
        offset = self._numbers.of(fake.storage_offset())
        if real.numel() and _differ([offset], [real.storage_offset()]):
            yield Parted(part, "storage offset", str(offset), str(real.storage_offset()))

    def _storage(
        self, fake: torch.Tensor, real: torch.Tensor, name: str, part: str
    ) -> Iterator[Parted]:
        """Compare whose storage it is, and the bytes of one that is new."""
        label = f"{name}{part}"
        ours = self._fake_owners.setdefault(fake.untyped_storage()._cdata, label)
        theirs = self._real_owners.setdefault(real.untyped_storage()._cdata, label)
        ours, theirs = self._equal.get(ours, ours), self._equal.get(theirs, theirs)
        if ours != theirs:
            yield Parted(part, "storage", _owner(ours, label), _owner(theirs, label))
            return
        if ours != label or not real.numel():
            return
        nbytes = self._numbers.of(fake.untyped_storage().nbytes())
        if _differ([nbytes], [real.untyped_storage().nbytes()]):
            yield Parted(part, "storage bytes", str(nbytes), str(real.untyped_storage().nbytes()))


def storages_of(value: Any) -> list[int]:
    """Return a key of the storage of each plain tensor in a value."""
    tensors = (leaf for leaf in torch_graphs.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return [t.untyped_storage()._cdata for t in tensors if _is_plain(t)]


def _is_plain(t: torch.Tensor) -> bool:
    """Return whether a tensor is strided, no wrapper subclass, and of no functorch transform."""
    if t.layout is not torch.strided or t.is_nested:
        return False
    if torch_fakes.is_traceable_wrapper_subclass(t) or torch_dispatch.is_functorch_wrapped(t):
        return False
    try:
        t.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a wrapper of a transform that was left
        return False
    return True


def _owner(owner: str, label: str) -> str:
    return "its own" if owner == label else f"that of {owner}"


def _differ(fake: Iterable[Any], real: Iterable[Any]) -> bool:
    """Return whether known numbers are not the real ones, which may be ragged sizes."""
    return any(
        a is not None and isinstance(b, int) and not isinstance(b, torch.SymInt) and a != b
        for a, b in zip(fake, real, strict=True)
    )


def _chosen(numbers: Iterable[Any], counts: Iterable[bool]) -> list[Any]:
    return [n for n, counted in zip(numbers, counts, strict=True) if counted]


def _same_number(a: Any, b: Any) -> bool:
    if isinstance(a, float) or isinstance(b, float):
        return (a != a and b != b) or math.isclose(a, b, rel_tol=_RELATIVE)
    return bool(a == b)


def _list(numbers: Iterable[Any]) -> str:
    return f"[{', '.join('?' if n is None else str(n) for n in numbers)}]"


def _bits(t: torch.Tensor) -> str:
    found = [name for name, bit in (("conj", t.is_conj()), ("neg", t.is_neg())) if bit]
    return " and ".join(found) or "none"


def _type(value: Any) -> str:
    names = {torch.SymInt: "int", torch.SymFloat: "float", torch.SymBool: "bool"}
    if isinstance(value, torch.Tensor):
        return "a tensor"
    return names.get(type(value), type(value).__name__)
