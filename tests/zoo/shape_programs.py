"""Random programs of shape arithmetic, as hypothesis strategies.

A program is data: its arguments, a policy that says which of their sizes are dynamic, and lines.
It is made a line at a time, and each line runs at once on the real arguments, so that checks hold
and views have sizes that fit. `Program.function` is the program as a Python function, whose lines
torch finds like those of a file.
"""

from __future__ import annotations

import itertools
import linecache
import random
from contextlib import contextmanager
from textwrap import indent
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
from hypothesis import strategies as st
from quiet import quiet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Layout: TypeAlias = Literal["plain", "transposed", "offset", "padded", "stepped"]
Policy: TypeAlias = Literal["dynamic", "mark", "unbacked", "automatic"]

MAX_NUMEL = 4000
MAX_INT = 10**6
_LAYOUTS: tuple[Layout, ...] = ("plain", "plain", "transposed", "offset", "padded", "stepped")
_files = itertools.count()


# --- arguments ------------------------------------------------------------------------------------


class TensorArg(NamedTuple):
    """A tensor of random floats, or of given integers."""

    name: str
    size: tuple[int, ...]
    layout: Layout = "plain"
    data: tuple[int, ...] | None = None

    def make(self) -> torch.Tensor:
        """The tensor; the same one each time."""
        if self.data is not None:
            return torch.tensor(self.data).reshape(self.size)
        match self.layout:
            case "transposed":
                return self._random(*self.size[::-1]).permute(*range(len(self.size))[::-1])
            case "offset":
                return self._random(self.size[0] + 3, *self.size[1:])[2:-1]
            case "padded":
                return self._random(*self.size[:-1], self.size[-1] + 5)[..., : self.size[-1]]
            case "stepped":
                return self._random(*self.size[:-1], self.size[-1] * 2)[..., ::2]
            case _:
                return self._random(*self.size)

    def _random(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=torch.Generator().manual_seed(len(size)))


class ScalarArg(NamedTuple):
    """A Python number."""

    name: str
    value: int | float | bool

    def make(self) -> int | float | bool:
        """The number."""
        return self.value


Arg: TypeAlias = TensorArg | ScalarArg


# --- lines ----------------------------------------------------------------------------------------


def check(condition: str) -> str:
    """``torch._check`` of a condition that holds for the arguments."""
    return f"torch._check({condition})"


def branch(condition: str, then: str, otherwise: str) -> str:
    """A Python ``if`` that changes the number ``n``."""
    return f"if {condition}:\n    n = {then}\nelse:\n    n = {otherwise}"


class Program(NamedTuple):
    """A function, its arguments, and how it is to be traced."""

    args: tuple[Arg, ...]
    lines: tuple[str, ...]
    result: tuple[str, ...]
    policy: Policy = "dynamic"
    marked: tuple[tuple[str, int], ...] = ()
    """Dims that are marked; with ``automatic``, those that another call has had otherwise."""

    def source(self) -> str:
        """The function as Python."""
        names = ", ".join(arg.name for arg in self.args)
        body = indent("\n".join([*self.lines, f"return {', '.join(self.result)},"]), "    ")
        head = [f"def program({names}, warm=False):"]
        if self.policy == "automatic":
            tensors = [a.name for a in self.args if isinstance(a, TensorArg)]
            head += ["    if warm:", f"        return {' , '.join(f'{t} + 1' for t in tensors)},"]
        return "\n".join([*head, "    n = 0", body]) + "\n"

    def function(self) -> Callable[..., Any]:
        """The function; each call makes a new one."""
        name = f"<program {next(_files)}>"
        text = self.source()
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        scope: dict[str, Any] = {"torch": torch}
        exec(compile(text, name, "exec"), scope)
        return scope["program"]

    def inputs(self) -> list[Any]:
        """The arguments, marked as the policy wants it."""
        made = {arg.name: arg.make() for arg in self.args}
        mark = {
            "mark": torch._dynamo.maybe_mark_dynamic,
            "unbacked": torch._dynamo.decorators.mark_unbacked,
        }
        if self.policy in mark:
            for name, dim in self.marked:
                mark[self.policy](made[name], dim)
        return list(made.values())

    def other_inputs(self) -> list[Any]:
        """Arguments of other sizes in the marked dims, for the call before."""
        other: list[Any] = []
        for arg in self.args:
            if not isinstance(arg, TensorArg):
                other.append(arg.make())
                continue
            size = [n + 1 if (arg.name, d) in self.marked else n for d, n in enumerate(arg.size)]
            data = None if arg.data is None else (1,) * torch.Size(size).numel()
            other.append(arg._replace(size=tuple(size), data=data).make())
        return other

    def __repr__(self) -> str:
        """The arguments, then the function."""
        args = ", ".join(map(repr, self.args))
        return f"\n# {self.policy} {self.marked or ''}\n# {args}\n{self.source()}"


def compiled(program: Program, backend: Callable[..., Any]) -> Any:
    """Run a program under ``torch.compile``; what it gives.

    The backend sees every frame of it, but not of the call before that ``automatic`` makes.
    """
    torch._dynamo.reset()
    on = False

    def switched(gm: Any, inputs: Any) -> Any:
        return backend(gm, inputs) if on else gm.forward

    dynamic = True if program.policy == "dynamic" else None
    with tracing_config():
        fn = torch.compile(program.function(), backend=switched, dynamic=dynamic)
        if program.policy == "automatic":
            fn(*program.other_inputs(), warm=True)
        on = True
        return fn(*program.inputs())


@contextmanager
def tracing_config() -> Iterator[None]:
    """Data-dependent numbers in the graph, floats as symbols."""
    options = {
        "capture_scalar_outputs": True,
        "capture_dynamic_output_shape_ops": True,
        "specialize_float": False,
        "assume_static_by_default": True,
    }
    with torch._dynamo.config.patch(options), quiet():
        yield


# --- strategies -----------------------------------------------------------------------------------


class _Maker:
    """Draws one program."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.scope: dict[str, Any] = {"torch": torch, "n": 0}
        self.lines: list[str] = []
        self.tensors: list[str] = []
        self.ints: list[str] = []
        self.floats: list[str] = []
        self.bools: list[str] = []
        self.indices: list[str] = []
        self.data: set[str] = set()
        """Texts of numbers that only the data or the unbacked inputs tell."""
        self.unbacked: set[str] = set()
        """Names of tensors that have such sizes."""
        self.count = itertools.count()

    def pick(self, items: Any) -> Any:
        return self.draw(st.sampled_from(list(items)))

    def value(self, text: str) -> Any:
        return eval(text, self.scope)

    def add(self, line: str) -> bool:
        """Append a line if it runs on the arguments."""
        before = dict(self.scope)
        try:
            exec(line, self.scope)
        except (RuntimeError, IndexError, ArithmeticError, ValueError, TypeError):
            self.scope = before
            return False
        made = [v for k, v in self.scope.items() if v is not before.get(k)]
        large = any(isinstance(v, torch.Tensor) and v.numel() > MAX_NUMEL for v in made)
        if large or abs(self.scope["n"]) > MAX_INT:
            self.scope = before
            return False
        self.lines.append(line)
        return True

    # --- arguments ---

    def args(self) -> tuple[Arg, ...]:
        draw = self.draw
        pool = draw(st.lists(st.sampled_from((2, 3, 4, 5, 6, 7, 8, 12)), min_size=2, max_size=3))
        pool = [*pool, *pool, pool[0] * pool[1], 1]
        made: list[Arg] = []
        for name in "xyzw"[: draw(st.sampled_from((1, 2, 2, 3, 4)))]:
            size = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=3))
            if torch.Size(size).numel() > 600:
                size = size[:1]
            layout = self.pick(_LAYOUTS)
            made.append(TensorArg(name, tuple(size), layout))
            self.tensors.append(name)
        numbers = [2, 3, 5, *pool[:2]]
        for tensor in made:
            if isinstance(tensor, TensorArg):
                numbers += [*tensor.size, torch.Size(tensor.size).numel()]
        for name in ("i", "j")[: draw(st.sampled_from((0, 0, 1, 1, 2)))]:
            count = draw(st.sampled_from((0, 0, 1, 2, 2, 3)))
            data = tuple(self.pick(numbers) for _ in range(max(count, 1)))
            made.append(TensorArg(name, (count,) if count else (), "plain", data))
            self.indices.append(name)
        for name in ("a", "b")[: draw(st.sampled_from((0, 0, 1, 2)))]:
            made.append(ScalarArg(name, self.pick([*numbers, -3, 0, 40])))
            self.ints.append(name)
        if draw(st.sampled_from((False, False, True))):
            made.append(ScalarArg("f", self.pick((0.5, 2.5, -1.25, 8.0))))
            self.floats.append("f")
        if draw(st.sampled_from((False, False, False, True))):
            made.append(ScalarArg("flag", draw(st.booleans())))
            self.bools.append("flag")
        self.scope.update({arg.name: arg.make() for arg in made})
        return tuple(made)

    def mark(self, args: tuple[Arg, ...], policy: Policy) -> tuple[tuple[str, int], ...]:
        dims = [
            (arg.name, d)
            for arg in args
            if isinstance(arg, TensorArg) and (arg.data is None or policy != "unbacked")
            for d, n in enumerate(arg.size)
            if n > 1 or policy == "automatic"
        ]
        if policy == "dynamic" or not dims:
            return ()
        most = 2 if policy == "unbacked" else len(dims)
        marked = self.draw(st.lists(st.sampled_from(dims), min_size=1, max_size=most, unique=True))
        if policy == "unbacked":
            self.unbacked = {name for name, _ in marked}
            self.data |= {f"{name}.size({d})" for name, d in marked}
        return tuple(sorted(marked))

    # --- numbers ---

    def known(self) -> list[str]:
        """Numbers that the arguments tell without their data."""
        found = list(self.ints)
        for name in self.tensors:
            if name in self.unbacked:
                dims = range(self.scope[name].ndim)
                found += [s for d in dims if (s := f"{name}.size({d})") not in self.data]
                continue
            for d in range(self.scope[name].ndim):
                found += [f"{name}.size({d})", f"{name}.shape[{d}]", f"{name}.stride({d})"]
            found += [f"{name}.numel()", f"{name}.storage_offset()"]
        return found or ["1"]

    def number(self, atoms: list[str], depth: int = 2) -> str:
        """Arithmetic over some numbers."""
        draw = self.draw
        kind = draw(st.integers(0, 9)) if depth else 0
        if kind < 3:
            return self.pick(atoms)
        left = self.number(atoms, depth - 1)
        if kind < 5:
            op = self.pick("+-*")
            return f"({left} {op} {draw(st.integers(1, 6))})"
        if kind < 7:
            return f"({left} {self.pick(('//', '%'))} {draw(st.integers(2, 6))})"
        right = self.number(atoms, depth - 1)
        if kind < 9:
            return f"({left} {self.pick('+-**')} {right})"
        op = self.pick(("min", "max", "//", "%"))
        if op in ("min", "max"):
            return f"{op}({left}, {right})"
        sizes = [a for a in atoms if ".size(" in a and self.value(a) > 0]
        return f"({left} {op} {self.pick(sizes)})" if sizes else left

    def condition(self, atoms: list[str], *, wanted: bool | None = None) -> str:
        """A comparison of numbers; of the truth value that is wanted."""
        if self.floats and wanted is None and self.draw(st.integers(0, 4)) == 0:
            return (
                f"{self.floats[0]} {self.pick(('<', '>', '<=', '>='))} {self.pick((0.5, 1.5, 2.5))}"
            )
        if self.bools and wanted is None and self.draw(st.integers(0, 5)) == 0:
            return self.bools[0]
        left = self.number(atoms)
        if self.draw(st.integers(0, 3)) == 0:
            k = self.draw(st.integers(2, 5))
            texts = [
                f"{left} % {k} == 0",
                f"{left} % {k} != 0",
                f"{left} % {k} == {self.value(left) % k}",
            ]
        else:
            right = self.number(atoms) if self.draw(st.booleans()) else str(self._near(left))
            texts = [f"{left} {op} {right}" for op in ("<", "<=", "==", "!=", ">", ">=")]
        if wanted is not None:
            texts = [t for t in texts if bool(self.value(t)) is wanted]
        return self.pick(texts)

    def _near(self, text: str) -> int:
        return self.value(text) + self.draw(st.sampled_from((-3, -1, 0, 0, 1, 2)))

    # --- lines ---

    def branch(self) -> None:
        atoms = self.known()
        condition = self.condition(atoms)
        if self.draw(st.integers(0, 4)) == 0:
            word = self.pick(("and", "or"))
            condition = f"{condition} {word} {self.condition(atoms)}"
        then, otherwise = self.number(atoms, 1), self.number(atoms, 1)
        self.add(branch(condition, f"n + {then}", f"n - {otherwise}"))

    def check(self) -> None:
        self.add(check(self.condition(self.known(), wanted=True)))

    def data_check(self) -> None:
        data = sorted(self.data)
        if not data:
            self.data_number()
            data = sorted(self.data)
        if not data:
            return
        atoms = [*data, *data, *self.known()] if self.draw(st.booleans()) else data
        self.add(check(self.condition(atoms, wanted=True)))

    def specialise(self) -> None:
        atom = self.pick(self.known())
        self.add(f"n = n + len(range({atom}))")

    def data_number(self) -> None:
        """A number from the data of a tensor, or a tensor of such a size."""
        kind = self.draw(st.integers(0, 4))
        k = next(self.count)
        dense = [t for t in self.tensors if t not in self.unbacked]
        if kind < 2 and self.indices:
            index = self.pick(self.indices)
            count = self.scope[index].numel()
            if self.scope[index].ndim == 0:
                self._data_name(f"u{k}", f"{index}.item()")
            elif kind == 0 and count > 1:
                names = [f"u{k}_{i}" for i in range(count)]
                if self.add(f"{', '.join(names)} = {index}.tolist()"):
                    self.data |= set(names)
            else:
                self._data_name(f"u{k}", f"{index}.{self.pick(('max', 'sum', 'min'))}().item()")
        elif dense:
            x = self.pick(dense)
            made = self.pick((f"({x} > 0).nonzero()", f"torch.masked_select({x}, {x} < 0.5)"))
            if self.add(f"m{k} = {made}"):
                self.data.add(f"m{k}.size(0)")
                self.unbacked.add(f"m{k}")

    def _data_name(self, name: str, value: str) -> None:
        if self.add(f"{name} = {value}"):
            self.data.add(name)

    def data_op(self) -> None:
        """A tensor operator that has a size from the data."""
        names = [d for d in sorted(self.data) if "." not in d]
        if not names:
            return self.data_check()
        u = self.pick(names)
        dense = [t for t in self.tensors if t not in self.unbacked]
        x = self.pick(dense or self.tensors)
        value = self.value(u)
        kind = self.draw(st.integers(0, 2))
        pairs = [
            (p, q)
            for p in names
            for q in names
            if dense and p != q and self.value(p) * self.value(q) == self.scope[x].numel()
        ]
        t = f"t{next(self.count)}"
        if pairs and value:
            p, q = self.pick(pairs)
            self.add(check(f"{p} * {q} == {x}.numel()"))
            made = f"{x}.reshape({p}, {q})"
        elif kind == 0 and 0 <= value <= self.scope[x].size(0):
            self.add(check(f"{u} >= 0"))
            self.add(check(f"{u} <= {x}.size(0)"))
            made = f"{x}.narrow(0, 0, {u})"
        elif 0 <= value < 200:
            self.add(check(f"{u} >= 0"))
            made = f"torch.zeros({u})"
        else:
            return None
        if self.add(f"{t} = {made}"):
            self.unbacked.add(t)
            self.tensors.append(t)
        return None

    def op(self) -> None:
        """A tensor operator that may add guards."""
        tensors = [t for t in self.tensors if t not in self.unbacked]
        if not tensors:
            return
        x, y = self.pick(tensors), self.pick(tensors)
        one, two = self.scope[x], self.scope[y]
        texts = [
            f"{x}.flatten()",
            f"{x}.unsqueeze(0).expand({self.number(self.known(), 1)}, *{x}.shape)",
        ]
        texts += [f"{x}[{self.draw(st.integers(0, 3))}:]", f"{x}[..., ::2]", f"{x}.chunk(2)[0]"]
        divisors = [k for k in (2, 3, 4, 5, 6) if one.numel() % k == 0]
        if divisors:
            k = self.pick(divisors)
            texts += [f"{x}.reshape({k}, -1)"] * 2 + [f"{x}.reshape({x}.numel() // {k}, {k})"]
        if x != y:
            texts += [f"{x} + {y}"] * 3 * (one.shape == two.shape)
            texts += [f"{x}.flatten() + {y}.flatten()"] * 3 * (one.numel() == two.numel())
            texts += [f"{x} + {y}"] * 2
            texts += [f"torch.cat([{x}, {y}], {d})" for d in range(one.ndim)]
            texts += [f"{x} @ {y}", f"{x}.reshape({y}.shape)"]
        if one.ndim > 1:
            texts += [
                f"{x}.view({x}.size(0) * {x}.size(1), *{x}.shape[2:])",
                f"{x}.transpose(0, 1)",
            ]
        if one.ndim == 1:
            texts += [f"{x}.narrow(0, 1, {self.number(self.known(), 1)})"]
        texts += [f"torch.zeros({self.number(self.known(), 1)})"]
        t = f"t{next(self.count)}"
        if self.add(f"{t} = {self.pick(texts)}") and self.scope[t].numel():
            self.tensors.append(t)


@st.composite
def programs(
    draw: Any,
    *,
    policies: tuple[Policy, ...] = ("dynamic", "dynamic", "mark", "automatic", "unbacked"),
) -> Program:
    """Programs over one to four tensors."""
    maker = _Maker(draw)
    args = maker.args()
    policy = draw(st.sampled_from(policies))
    marked = maker.mark(args, policy)
    if policy != "dynamic" and not marked:
        policy = "dynamic"
    kinds = (
        [maker.branch] * 4 + [maker.check] * 3 + [maker.op] * 4 + [maker.data_check] * 2
        + [maker.data_op] + [maker.specialise]
    )  # fmt: skip
    for _ in range(draw(st.integers(1, 7))):
        maker.pick(kinds)()
    own = {arg.name for arg in args}
    made = [t for t in maker.tensors if t not in own]
    sums = [
        f"{t} + 1"
        for t in dict.fromkeys([*[a.name for a in args if isinstance(a, TensorArg)], *made])
    ]
    return Program(args, tuple(maker.lines), (*sums, "n"), policy, marked)


def variations(program: Program, count: int) -> Iterator[dict[str, Any]]:
    """Arguments with one or two other sizes or numbers; the same ones each time."""
    for i in range(count):
        rng = random.Random(i)
        args: list[Arg] = list(program.args)
        for _ in range(1 + i % 2):
            at = rng.randrange(len(args))
            args[at] = _varied(args[at], rng)
        yield {**{arg.name: arg.make() for arg in args}, "warm": False}


def _varied(arg: Arg, rng: random.Random) -> Arg:
    if isinstance(arg, ScalarArg):
        if isinstance(arg.value, bool):
            return arg
        return arg._replace(value=arg.value + rng.choice((-2, -1, 1, 2, 7)))
    if not arg.size:
        return arg
    dim = rng.randrange(len(arg.size))
    size = list(arg.size)
    size[dim] = rng.choice((size[dim] + 1, max(size[dim] - 1, 0), size[dim] * 2, size[dim] + 6, 1))
    data = None if arg.data is None else (2,) * torch.Size(size).numel()
    layout = rng.choice((arg.layout, arg.layout, "plain"))
    return arg._replace(size=tuple(size), data=data, layout=layout)
