"""Views of every sort by name, and what torch's view function and the replay of records visit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nested._internal.nested_tensor import (
    nested_view_from_values_offsets,
    nested_view_from_values_offsets_lengths,
)
from torch.testing._internal.two_tensor import TwoTensor

from torch_fakeify.encoding.views.replay import replay_view_calls
from torch_fakeify.encoding.views.trace import trace_view_calls
from torch_fakeify.records.tensor import MetaTensorDesc, NestedIntDesc

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_fakeify.records.tensor import IntLike, ViewCallDesc

aten: Any = torch.ops.aten


def two(*size: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> TwoTensor:
    """A wrapper subclass around two tensors."""
    return TwoTensor(torch.zeros(size, dtype=dtype), torch.ones(size, dtype=dtype)).requires_grad_(
        grad
    )


def jagged() -> Any:
    """A jagged tensor of size ``(3, j, 4)`` that is a view of its values."""
    return nested_view_from_values_offsets(torch.zeros(10, 4), torch.tensor([0, 3, 7, 10]))


# Views of a tensor of size (4, 6).
VIEWS: dict[str, Callable[[Any], Any]] = {
    "slice": lambda b: b[1:3],
    "slice without start": lambda b: aten.slice.Tensor(b, 0, None, 2),
    "slice, all defaults": lambda b: aten.slice.Tensor(b),
    "slice by names": lambda b: aten.slice.Tensor(b, end=3, step=2),
    "select": lambda b: b.select(0, -1),
    "view": lambda b: b.view(-1, 3),
    "reshape": lambda b: b.reshape(2, -1),
    "transpose": lambda b: b.mT,
    "t": lambda b: b.t(),
    "permute": lambda b: b.permute(1, 0),
    "unsqueeze": lambda b: b[:, None],
    "squeeze": lambda b: b.view(4, 1, 6, 1).squeeze(),
    "squeeze a dim": lambda b: b.view(4, 1, 6).squeeze(1),
    "squeeze dims": lambda b: b.view(4, 1, 6, 1).squeeze((1, 3)),
    "expand": lambda b: b.unsqueeze(0).expand(3, -1, 6),
    "expand, implicit": lambda b: aten.expand.default(b, (2, 4, 6), implicit=True),
    "as_strided": lambda b: b.as_strided((2, 2), (1, 2), 1),
    "as_strided without offset": lambda b: b.as_strided((2, 2), (1, 2)),
    "reshape_alias": lambda b: aten._reshape_alias(b, (6, 4), (4, 1)),
    "unfold": lambda b: b.unfold(0, 2, 1),
    "diagonal": lambda b: b.diagonal(),
    "diagonal of dims": lambda b: b.diagonal(1, 1, 0),
    "alias": lambda b: aten.alias(b),
    "split": lambda b: b.split(2)[1],
    "split of sizes": lambda b: b.split((1, 3))[1],
    "unbind": lambda b: b.unbind(1)[2],
    "chunk": lambda b: b.chunk(2)[1],
    "tensor_split": lambda b: b.tensor_split(2)[1],
    "narrow": lambda b: b.narrow(1, 2, 3),
    "chain": lambda b: b[1:].t().unsqueeze(0),
    "chain of outputs": lambda b: b.split(2)[1].unbind(1)[3][1:],
    "the same twice": lambda b: b[1:][1:][1:],
    "view_as_complex": lambda b: torch.view_as_complex(b.view(4, 3, 2)),
    "view_as_real": lambda b: torch.view_as_real(torch.view_as_complex(b.view(4, 3, 2)))[1:],
    "conj": lambda b: torch.view_as_complex(b.view(4, 3, 2)).conj()[1:],
    "imag": lambda b: torch.view_as_complex(b.view(4, 3, 2)).imag,
    "neg": lambda b: torch._neg_view(b)[1:],
    "of another dtype": lambda b: b.view(torch.float16)[1:],
    "of a view without gradients": lambda b: b[1:].detach()[1:],
    "made under no_grad": torch.no_grad()(lambda b: b[1:].view(-1)),
}

JAGGED_VIEWS: dict[str, Callable[[], Any]] = {
    "of values": jagged,
    "with lengths": lambda: nested_view_from_values_offsets_lengths(
        torch.zeros(10, 4), torch.tensor([0, 3, 7, 10]), torch.tensor([2, 3, 1])
    ),
    "with cached lengths": lambda: nested_view_from_values_offsets(
        torch.zeros(10, 4), torch.tensor([0, 3, 7, 10]), min_seqlen=3, max_seqlen=4
    ),
    "values": lambda: jagged().values(),
    "values, viewed": lambda: jagged().values().view(-1)[1:],
    "values of a tensor that is no view": lambda: jagged().detach().values(),
    "transpose": lambda: jagged().transpose(1, 2),
    "unsqueeze": lambda: jagged().unsqueeze(-1),
    "view": lambda: (lambda t: t.view(3, t.size(1), 2, 2))(jagged()),
    "expand": lambda: (lambda t: t.unsqueeze(-1).expand(3, t.size(1), 4, 5))(jagged()),
    "select": lambda: jagged().select(2, 1),
    "narrow": lambda: jagged().narrow(2, 1, 2),
    "split": lambda: jagged().split(2, -1)[1],
    "chunk": lambda: jagged().chunk(2, -1)[1],
    "unbind": lambda: jagged().unbind()[1],
}


class Traced:
    """The view calls of a tensor, and the objects that the records stand for."""

    def __init__(self, t: torch.Tensor) -> None:
        self.t = t
        self.tensors: list[torch.Tensor] = []
        self.nested: list[torch.SymInt] = []
        self.calls: tuple[ViewCallDesc, ...] = trace_view_calls(
            t, part=self._part, ints=self._int, where="t"
        )

    def _part(self, t: torch.Tensor) -> MetaTensorDesc:
        self.tensors.append(t)
        return stub(len(self.tensors) - 1)

    def _int(self, n: torch.SymInt) -> IntLike:
        self.nested.append(n)
        return NestedIntDesc(len(self.nested) - 1)

    def int_of(self, n: IntLike) -> Any:
        """The number that a record stands for."""
        return self.nested[n.id] if isinstance(n, NestedIntDesc) else n

    def replay(
        self,
        base: torch.Tensor | None = None,
        symint: Callable[[Any], Any] = lambda n: n,
        tensor: Callable[[Any], Any] = lambda t: t,
    ) -> torch.Tensor:
        """The view again, the visitors being given the objects and not the records."""
        found = self.t._base if base is None else base
        assert found is not None
        return replay_view_calls(
            self.calls,
            found,
            symint=lambda n: symint(self.int_of(n)),
            tensor=lambda d: tensor(self.tensors[d.id]),
            where="t",
        )


def stub(number: int) -> MetaTensorDesc:
    """A record that only has a number."""
    return MetaTensorDesc(id=number, dtype="float32", device="cpu", size=(), stride=())


def visited_by_torch(t: Any) -> tuple[list[Any], list[Any], Any]:
    """Numbers and tensors that the tensor's own view function hands out, and what it gives."""
    ints: list[Any] = []
    tensors: list[Any] = []
    result = t._view_func_unsafe(
        t._base, lambda n: (ints.append(n), n)[1], lambda part: (tensors.append(part), part)[1]
    )
    # A tensor that an operator was not given is visited too, as ``None``.
    return ints, [part for part in tensors if part is not None], result


def visited_by_us(traced: Traced) -> tuple[list[Any], list[Any], Any]:
    """Numbers and tensors that the replay of the records hands out, and what it gives."""
    ints: list[Any] = []
    tensors: list[Any] = []
    result = traced.replay(
        symint=lambda n: (ints.append(n), n)[1], tensor=lambda part: (tensors.append(part), part)[1]
    )
    return ints, tensors, result


def metadata(t: Any) -> tuple[Any, ...]:
    """All that a view has of its own, and the same of its inner tensors."""
    inner: list[Any] = []
    for name in t.__tensor_flatten__()[0] if hasattr(t, "__tensor_flatten__") else ():
        part = getattr(t, name)
        # Others are such as the mesh of a DTensor.
        inner.append((name, metadata(part) if isinstance(part, torch.Tensor) else part))
    strides = (t.stride(), t.storage_offset())
    bits = (t.is_conj(), t.is_neg())
    return (type(t), t.dtype, t.device, t.layout, t.size(), strides, bits, inner)


def trace(t: Any) -> tuple[ViewCallDesc, ...]:
    """The calls of a view whose operators were given no tensors and no symbols."""

    def none(_: object) -> Any:
        raise AssertionError

    return trace_view_calls(t, part=none, ints=none, where="t")


def check(t: Any) -> None:
    """The replay visits what torch's view function visits, in its order, and gives the same."""
    traced = Traced(t)
    expected_ints, expected_tensors, expected = visited_by_torch(t)
    ints, tensors, result = visited_by_us(traced)
    # Nested ints are compared by text: torch wraps each into a new object.
    assert list(map(str, ints)) == list(map(str, expected_ints))
    assert [id(part) for part in tensors] == [id(part) for part in expected_tensors]
    assert metadata(result) == metadata(expected) == metadata(t)


class Reshape(torch.autograd.Function):
    """A view made in an autograd function."""

    @staticmethod
    def forward(_: Any, x: Any) -> Any:
        """Flattens."""
        return x.view(-1)

    @staticmethod
    def backward(_: Any, g: Any) -> Any:
        """Shapes back."""
        return g.view(4, 6)
