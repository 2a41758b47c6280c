"""Sessions of a ``ShapeEnv``: actions on one, and copies of its state to compare after a rollback."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatefulSymbolicContext,
    StatelessSymbolicContext,
)

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Callable


DYNAMIC, DUCK, STATIC = DimDynamic.DYNAMIC, DimDynamic.DUCK, DimDynamic.STATIC


GONE = r"(was|were) made after the checkpoint, and the ShapeEnv was rolled back\. Make the tensor or the"


def make_mode(**settings_: Any) -> FakeTensorMode:
    """A fake tensor mode with a new environment."""
    return FakeTensorMode(shape_env=ShapeEnv(**settings_))


def fake_of(mode: FakeTensorMode, name: str, *sizes: int) -> Any:
    """An input tensor whose sizes and strides have symbols."""
    context = StatelessSymbolicContext(
        dynamic_sizes=[DYNAMIC] * len(sizes), dynamic_strides=[DYNAMIC] * len(sizes)
    )
    real = torch.empty(sizes, device="meta")
    return mode.from_tensor(real, source=LocalSource(name), symbolic_context=context)


def int_of(env: Any, name: str, value: int) -> Any:
    """An input that is an int."""
    source = LocalSource(name)
    symbol = env.create_symbol(value, source, DYNAMIC)
    return env.create_symintnode(symbol, hint=value, source=source)


def exprs(env: Any) -> list[str]:
    """The guards as text."""
    return [str(guard.expr) for guard in env.guards]


def condition(kind: str, a: Any, b: Any, k: int) -> Any:
    """A condition of a kind over two numbers, which may be symbolic, and a constant."""
    match kind:
        case "gt":
            return a > k
        case "le":
            return a <= b + k
        case "eq":
            return a == b
        case "is":
            return a == k
        case "mod":
            return a % (abs(k) + 2) == 0
        case "product":
            return a * b != k
        case "floor":
            return (a * 2 + b) // (abs(k) + 2) < 9
        case _:
            return torch.sym_max(a, b) >= torch.sym_min(b, k)


class Photo:
    """Every object that an environment is made of, by identity, and what each contains."""

    def __init__(self, env: Any) -> None:
        self._alive: list[Any] = []
        self.shape = [(name, self.of(value)) for name, value in vars(env).items()]
        self.numbers = {name: v for name, v in vars(env).items() if isinstance(v, int)}

    def of(self, value: Any) -> Any:
        """An object and its contents."""
        self._alive.append(value)
        match value:
            case bool() | int() | str() | None:
                return value
            case dict():
                return type(value), id(value), [(self.of(k), self.of(v)) for k, v in value.items()]
            case set():
                return id(value), sorted(id(member) for member in value)
            case list() | tuple():
                return type(value), id(value), [self.of(member) for member in value]
            case symbolic_shapes.ValueRangesSLoc():
                return id(value), self.of(value.lower), self.of(value.upper)
            case symbolic_shapes.OrderedSet():
                return id(value), self.of(value._dict)
            case torch.fx.Graph():
                return id(value), [(self.of(n.meta), id(n), list(n.users)) for n in value.nodes]
            case symbolic_shapes.DimConstraints():
                return id(value), self.of(vars(value))
            case _ if type(value).__name__ == "TranslationValidator":
                return id(value), self.of(vars(value))
            case _:
                return id(value)

    def check(self, env: Any) -> None:
        """The environment is made of the same objects, each with the same contents."""
        now = Photo(env)
        for (name, then), (other, value) in zip(self.shape, now.shape, strict=True):
            assert other == name
            assert value == then, name


def photo_and_record(env: Any) -> Callable[[], None]:
    """Takes both, and gives what compares them with the environment later."""
    photo, record = Photo(env), tfk.snapshot(env)

    def check() -> None:
        photo.check(env)
        assert tfk.snapshot(env) == record

    return check


class Actions:
    """What a program does to an environment, by names of actions, and the sizes that it has."""

    env: Any
    pool: list[Any]

    def run(self, action: tuple[Any, ...]) -> str:
        """What an action gives, or which error it raises, as text."""
        name, *args = action
        try:
            return str(getattr(self, name)(*args))
        except (RuntimeError, ValueError, ZeroDivisionError, AssertionError) as error:
            return type(error).__name__

    def keep(self, value: Any) -> Any:
        """Put a size into the pool."""
        if isinstance(value, torch.SymInt):
            self.pool.append(value)
        return value

    def pick(self, i: int) -> Any:
        """A size of the pool."""
        return self.pool[i % len(self.pool)] if self.pool else 3

    # --- actions ---

    def unbacked(self, kind: str) -> str:
        """A scalar of data."""
        return str(self.keep(getattr(self.env, f"create_unbacked_sym{kind}")()))

    def size_like(self, i: int) -> str:
        """A symbol is a size; torch does not ask for it of a number that has become a constant."""
        size = self.pick(i)
        if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
            self.env._constrain_range_for_size(size.node.expr)
        return str(size)

    def guard(self, kind: str, i: int, j: int, k: int) -> str:
        """A branch."""
        return str(bool(self.condition(kind, i, j, k)))

    def check(self, kind: str, i: int, j: int, k: int) -> str:
        """A checked condition."""
        return str(torch._check(self.condition(kind, i, j, k)))

    def condition(self, kind: str, i: int, j: int, k: int) -> Any:
        """A condition over two sizes and a number."""
        return condition(kind, self.pick(i), self.pick(j), k)


class Session(Actions):
    """An environment and what a program has made in it: sizes, tensors, contexts."""

    def __init__(self, **settings_: Any) -> None:
        self.mode = make_mode(**settings_)
        self.env: Any = self.mode.shape_env
        self.reals = [torch.empty(sizes, device="meta") for sizes in ((4, 6), (6,), (4, 4), (9, 1))]
        self.numbers = torch.zeros(3, dtype=torch.int64)
        self.contexts = {
            i: StatefulSymbolicContext(
                dynamic_sizes=[DYNAMIC] * real.ndim,
                dynamic_strides=[DYNAMIC] * real.ndim,
                tensor_source=LocalSource(f"c{i}"),
                view_base_context=None,
            )
            for i, real in enumerate(self.reals)
        }
        self.pool: list[Any] = []
        self.fakes: list[Any] = []
        self.inputs: list[tuple[Any, Any]] = []

    # --- actions ---

    def number(self, i: int, value: int) -> str:
        """An input that is an int."""
        return str(self.keep(int_of(self.env, f"n{i}", value)))

    def tensor(self, i: int, stateful: bool) -> str:
        """An input that is a tensor."""
        i %= len(self.reals)
        context = self.contexts[i]
        if not stateful:
            context = StatelessSymbolicContext(dynamic_sizes=[DUCK] * self.reals[i].ndim)
        source = LocalSource(f"{'c' if stateful else 't'}{i}")
        fake = self.mode.from_tensor(self.reals[i], source=source, symbolic_context=context)
        self.fakes.append(fake)
        for size in (*fake.shape, *fake.stride()):
            self.keep(size)
        return f"{fake.shape} {fake.stride()}"

    def again(self, i: int) -> str:
        """A tensor made once more of the same context, in another mode."""
        i %= len(self.reals)
        mode = FakeTensorMode(shape_env=self.env)
        context = self.contexts[i]
        fake = mode.from_tensor(
            self.reals[i], source=LocalSource(f"c{i}"), symbolic_context=context
        )
        return f"{fake.shape} {fake.stride()}"

    def nonzero(self, i: int) -> str:
        """A size of data, which the tensor remembers."""
        if not self.fakes:
            return "none"
        with self.mode:
            found = torch.ops.aten.nonzero(self.fakes[i % len(self.fakes)])
        return str(self.keep(found.shape[0]))

    def item(self) -> str:
        """An int of data, which the tensor remembers."""
        with self.mode:
            fake = self.mode.from_tensor(self.numbers, static_shapes=True)
            return str(self.keep(fake.sum().item()))

    def contiguous(self, i: int) -> str:
        """How a tensor lies in memory, which C++ remembers."""
        return str(self.fakes[i % len(self.fakes)].is_contiguous()) if self.fakes else "none"

    def arithmetic(self, i: int, j: int, k: int) -> str:
        """Another size."""
        return str(self.keep(self.pick(i) * k + self.pick(j)))

    def suppressed(self, kind: str, i: int, j: int, k: int) -> str:
        """A branch while guards are suppressed."""
        with self.env.suppress_guards():
            return self.guard(kind, i, j, k)

    def read(self, i: int) -> str:
        """What a size is now; the node remembers it."""
        return f"{self.pick(i)} {sympy.sympify(getattr(self.pick(i), 'node', None) and 1)}"

    def specialize(self, i: int) -> str:
        """A size as a constant."""
        return str(int(self.pick(i)))

    def freeze(self) -> str:
        """No more guards."""
        self.env.freeze()
        return "frozen"

    def produce(self) -> str:
        """The guards over all inputs."""
        sources = [s for symbol in self.env.var_to_sources.values() for s in symbol]
        symbols = [
            self.env.create_symintnode(symbol, hint=None)
            for symbol, known in self.env.var_to_sources.items()
            for _ in known
        ]
        return str([h.exprs for h in self.env.produce_guards_verbose(symbols, sources)])


PRELUDE = [("tensor", 0, True), ("number", 0, 4), ("number", 1, 6), ("unbacked", "int")]


def stateful(name: str, ndim: int) -> StatefulSymbolicContext:
    """A context that remembers the symbols of its tensor."""
    return StatefulSymbolicContext(
        dynamic_sizes=[DYNAMIC] * ndim, tensor_source=LocalSource(name), view_base_context=None
    )
