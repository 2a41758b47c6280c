"""Functions with arguments for tests of ``frontend``, and comparisons with eager."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
from torch.testing._internal.two_tensor import TwoTensor

from torch_fakeify.frontend import Guards, Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


DYNAMIC = Policy(dims="DYNAMIC", scalars="DYNAMIC")


DUCK = Policy(dims="DUCK", scalars="DYNAMIC")


def close(ours: Any, theirs: Any) -> None:
    """Fails if two results differ."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def grown(*sizes: int) -> torch.Tensor:
    """A tensor of these sizes, filled by position."""
    return torch.arange(math.prod(sizes), dtype=torch.float32).reshape(sizes) / 7


def branches(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Branches on sizes."""
    z = x.flatten() + y
    if x.shape[0] % 2 == 0:
        z = z * 2
    return z.relu() if 2 * x.shape[0] > 9 else z


class Case(NamedTuple):
    """A function and one list of arguments for each call, and how often it compiles."""

    fn: Callable[..., Any]
    calls: list[Callable[[], list[Any]]]
    count: int
    policy: Policy = DYNAMIC


def add_to_first(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Changes one argument and reads the other."""
    x.add_(1)
    return y * 2


def slices(*ranges: tuple[int, int], size: int = 12) -> Callable[[], list[Any]]:
    """Arguments that are slices of one tensor."""

    def make() -> list[Any]:
        base = grown(size)
        return [base[low:high] for low, high in ranges]

    return make


def same_twice() -> list[Any]:
    """One tensor in two arguments."""
    x = grown(5)
    return [x, x]


def base_and_view() -> list[Any]:
    """A tensor and a view of it."""
    x = grown(6)
    return [x, x.view(3, 2)[1]]


def two_tensors(rows: int) -> Callable[[], list[Any]]:
    """A wrapper subclass and a plain tensor."""
    return lambda: [TwoTensor(grown(rows, 3), grown(rows, 3) + 1), grown(3)]


def jagged(*lengths: int) -> Callable[[], list[Any]]:
    """Two jagged tensors of one raggedness."""

    def make() -> list[Any]:
        parts = [grown(length, 4) for length in lengths]
        t = torch.nested.nested_tensor(parts, layout=torch.jagged)
        return [t, t * 2]

    return make


def transposed(x: torch.Tensor) -> torch.Tensor:
    """Changes the sizes of its argument."""
    y = x * x.shape[0]
    x.t_()
    return y + x.t()


def nested(config: dict[str, Any], parts: tuple[Any, ...], name: str = "sum") -> Any:
    """Takes containers apart and gives back others."""
    x, (y, z) = parts
    out = x * config["scale"] + y[0]
    return {name: out, "sizes": (z.shape[0], None), "rest": [z.sum(), name]}


def containers(rows: int, scale: float = 2.0, name: str = "sum") -> Callable[[], list[Any]]:
    """Nested arguments."""
    return lambda: [
        {"scale": scale, "unused": torch.float64},
        (grown(rows, 3), ([grown(3)], grown(rows + 1))),
        name,
    ]


def checked(x: torch.Tensor, n: int) -> torch.Tensor:
    """Asserts what no guard can know."""
    torch._check(n <= x.shape[0])
    return x.sum() * n


UNBACKED = Policy(named={"x": {0: "UNBACKED"}, "n": "UNBACKED"})


CASES = {
    "disjoint slices, then overlapping ones": Case(
        add_to_first,
        [slices((0, 4), (6, 10)), slices((0, 3), (5, 10)), slices((0, 6), (4, 10))],
        2,
    ),
    "slices that reach to the end": Case(add_to_first, [slices((0, 6), (4, 8), size=8)], 1),
    "separate tensors, then slices of one": Case(
        add_to_first, [lambda: [grown(4), grown(5)], slices((0, 4), (0, 5))], 2
    ),
    "slices of one tensor, then separate ones": Case(
        add_to_first, [slices((0, 4), (0, 5)), lambda: [grown(4), grown(5)]], 2
    ),
    "one tensor twice, then two": Case(
        add_to_first, [same_twice, lambda: [grown(5), grown(5)], same_twice], 2
    ),
    "a tensor and its view": Case(lambda x, y: (y.mul_(2), x + 1)[1], [base_and_view] * 2, 1),
    "wrapper subclasses": Case(
        lambda t, y: t.sin() * t.shape[0] + y, [two_tensors(4), two_tensors(6)], 1,
        Policy(named={"t": {0: "DYNAMIC"}}),
    ),
    "a subclass, then a plain tensor": Case(
        lambda t, y: t.sin() + y, [two_tensors(4), lambda: [grown(4, 3), grown(3)]], 2
    ),
    "sizes that the function changes": Case(
        transposed, [lambda: [grown(3, 4)], lambda: [grown(5, 6)]], 1
    ),
    "integers": Case(
        lambda x, n: x[:n] * n, [lambda: [grown(9), 3], lambda: [grown(7), 5]], 1
    ),
    "constant integers": Case(
        lambda x, n: x * n, [lambda: [grown(9), 3], lambda: [grown(9), 5]], 2, Policy()
    ),
    "floats": Case(
        lambda x, f: x * f, [lambda: [grown(3), 2.5], lambda: [grown(3), -1.5]], 1
    ),
    "constant floats": Case(
        lambda x, f: x * f,
        [lambda: [grown(3), 0.0], lambda: [grown(3), -0.0], lambda: [grown(3), math.nan],
         lambda: [grown(3), math.nan], lambda: [grown(3), math.inf], lambda: [grown(3), 1]],
        5,
        Policy(),
    ),
    "booleans": Case(
        lambda x, flag: x * 2 if flag else x,
        [lambda: [grown(3), True], lambda: [grown(3), False], lambda: [grown(3), True]],
        2,
    ),
    "unbacked dims": Case(
        lambda x: x.sum(0) * x.shape[0],
        [lambda: [grown(4, 2)], lambda: [grown(1, 2)], lambda: [grown(0, 2)]],
        1,
        Policy(named={"x": {0: "UNBACKED"}}),
    ),
    "unbacked integers": Case(
        checked, [lambda: [grown(4), 4], lambda: [grown(1), 0], lambda: [grown(3), 1]], 1, UNBACKED
    ),
    "containers": Case(nested, [containers(4), containers(5), containers(5, 3.0)], 1, DUCK),
    "constants in containers": Case(
        nested, [containers(4), containers(4, name="total"), containers(4, 3.0)], 3, Policy()
    ),
    "a number that is an item": Case(
        lambda x, n: x * n.item() if n.item() < 9 else x,
        [lambda n=n: [grown(4), torch.tensor(n)] for n in (3, 5, 20, 30)],
        2,
    ),
    "sizes of the data": Case(
        lambda x: x[x > 1] * 2, [lambda: [grown(30)], lambda: [grown(3)]], 1
    ),
    "sizes of zero and one": Case(
        lambda x: x + 1, [lambda n=n: [grown(n)] for n in (4, 1, 0, 5)], 3
    ),
    "tensors that the function makes": Case(
        lambda x: x + torch.ones(x.shape[0]), [lambda: [grown(3)], lambda: [grown(5)]], 1
    ),
    "operators that C++ would specialize": Case(
        lambda x: torch.nn.functional.unfold(x, 2),
        [lambda: [grown(2, 3, 4, 5)], lambda: [grown(3, 2, 6, 4)]],
        1,
    ),
    "control flow": Case(
        lambda p, x: torch.cond(p, lambda x: x + x.shape[0], lambda x: x * 2, (x,)),
        [lambda: [torch.tensor(True), grown(4)], lambda: [torch.tensor(False), grown(5)]],
        1,
    ),
    "transforms": Case(
        lambda x: torch.vmap(torch.func.grad(lambda r: r.sin().sum()))(x),
        [lambda: [grown(3, 4)], lambda: [grown(5, 2)]],
        1,
    ),
    "jagged tensors": Case(
        lambda t, u: t.sin() * u, [jagged(3, 5), jagged(2, 4, 7)], 1, Policy(dims="DYNAMIC")
    ),
    "sparse tensors": Case(
        lambda x: x * 2,
        [lambda: [grown(4, 4).to_sparse()], lambda: [grown(5, 5).to_sparse()]],
        1,
        Policy(dims="DYNAMIC"),
    ),
}  # fmt: skip


FEW = frozenset({
    "disjoint slices, then overlapping ones", "separate tensors, then slices of one",
    "slices of one tensor, then separate ones", "one tensor twice, then two",
    "a tensor and its view", "a subclass, then a plain tensor", "sizes that the function changes",
    "integers", "operators that C++ would specialize", "unbacked integers", "containers",
    "arithmetic", "a specialized size", "tied weights and buffers",
})  # fmt: skip


def some(names: Iterable[str], few: frozenset[str] = FEW) -> list[Any]:
    """Parameters of a test, of which a plain run takes a few."""
    return [pytest.param(n, marks=() if n in few else pytest.mark.sweep, id=n) for n in names]


class Tied(torch.nn.Module):
    """Shares a weight between two layers and counts its calls in a buffer."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm = torch.nn.BatchNorm1d(4)
        self.scale = 3.0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both layers."""
        self.calls.add_(1)
        return self.norm(self.second(self.first(x).relu())) * self.scale


def call_module(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A function with a module among its arguments."""
    out = model(x)
    return (out[0] if isinstance(out, tuple) else out).square().sum()


def overlapping(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Those of some slices of one storage that share an element with another one."""
    spans = [range(t.storage_offset(), t.storage_offset() + t.numel()) for t in tensors]
    shared = [
        any(set(a) & set(b) for j, b in enumerate(spans) if j != i) for i, a in enumerate(spans)
    ]
    return [t for t, is_shared in zip(tensors, shared, strict=True) if is_shared]


def arithmetic(x: torch.Tensor, n: int) -> Any:
    """Conditions of several kinds on sizes and an integer."""
    out = x.sum(0)
    if n % 3 == 0 and x.shape[0] > n:
        out = out + 1
    if x.shape[0] * x.shape[1] != 50:
        out = out * 2
    return out.view(2, -1)


# --- forms of guards --------------------------------------------------------------------------------


def again(guards: Guards) -> Guards:
    """The guards after writing and reading; writing is stable."""
    data = guards.dumps()
    found = Guards.loads(data)
    assert found.dumps() == data
    return found


_NAMES = {"torch": torch, "math": math, **SYMPY_INTERP, "check_overlapping": lambda **groups: (
    {id(t) for t in groups["non_overlapping"]}.isdisjoint(
        id(t) for t in overlapping([*groups["overlapping"], *groups["non_overlapping"]])
    )
)}  # fmt: skip


def check_forms(
    guards: Guards, scopes: list[dict[str, Any]], names: Mapping[str, Any] | None = None
) -> int:
    """Text, function, expression and record agree for each scope, up to the first guard that fails.

    The bytes do not name the folder of torch, which another machine has elsewhere. A text with an
    enumeration is not Python.

    Returns:
        How many answers were compared.
    """
    names, read, compared = {**_NAMES, **(names or {})}, again(guards), 0
    assert str(read) == str(guards)
    assert read.exprs == guards.exprs
    assert torch.__path__[0] not in guards.dumps().decode()
    for scope in scopes:
        failing = guards.failing(scope)
        assert guards.check(scope) is (failing is None)
        assert str(read.failing(scope)) == str(failing)
        for guard in guards:
            holds = guard is not failing
            if "Mode." not in guard.text:
                assert eval(guard.text, {**names, "L": scope}) is holds, guard.text
            assert guard.expr is None or _by_expr(guard.expr, scope) in (holds, None), guard.text
            compared += 1
            if not holds:
                break
    return compared


def _by_expr(expr: Any, scope: dict[str, Any]) -> bool | None:
    values = {s: eval(s.name, {**_NAMES, "L": scope}) for s in expr.free_symbols}
    if any(isinstance(value, torch.SymInt) for value in values.values()):
        return None  # a ragged size is no number of sympy
    return bool(expr.xreplace(values))
