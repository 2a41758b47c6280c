"""Frames for the tests of fresh instances."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import guard_frames
import sympy
import torch
from assert_frames import CONFIG
from captured_frames import captures_of
from fresh_checks import env_of, named
from processes import python
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.two_tensor import TwoTensor

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Callable


def capture_of(fn: Callable[..., Any], *calls: tuple[Any, ...], **options: Any) -> tfk.Capture:
    """The last frame of a function that Dynamo compiles for some calls."""
    with torch._dynamo.config.patch(**CONFIG):
        return captures_of(fn, *calls, **options)[-1]


# --- the frames -----------------------------------------------------------------------------------


def guarded(name: str) -> tfk.Capture:
    """A frame of the tests of guard nodes."""
    fn, args, _ = guard_frames.CASES[name]
    return capture_of(fn, args, dynamic=True)


def divisible_twice() -> tfk.Capture:
    """What was found out second says what was found out first."""

    def f(x: torch.Tensor) -> Any:
        return x.reshape(50, -1), x.reshape(100, -1), x[::2].reshape(25, -1)

    return capture_of(f, (torch.randn(2000),), dynamic=True)


def twice() -> tfk.Capture:
    """A guard that no range says."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y if 2 * x.shape[0] > 9 + y.shape[0] else x - y

    return capture_of(f, (torch.randn(17, 3), torch.randn(3)), dynamic=True)


def nonzero() -> tfk.Capture:
    """A computed size with a check, and three inputs that share a dim."""

    def f(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
        n = y.nonzero()
        torch._check(n.shape[0] <= x.shape[0], lambda: "too many")
        return n * 2, z + x

    return capture_of(f, (torch.randn(7), torch.ones(7), torch.ones(7)), dynamic=True)


def products_of_items() -> tfk.Capture:
    """Unbacked numbers whose product is a size."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b = y.tolist()
        torch._check(a * b == x.shape[0])
        return x.view(a, b)

    return capture_of(f, (torch.randn(12), torch.tensor([3, 4])), dynamic=True)


def scalars() -> tfk.Capture:
    """An integer, a float and a boolean among the inputs."""

    def f(x: torch.Tensor, n: int, s: float, b: bool) -> torch.Tensor:
        if n * x.shape[0] % 3 == 0 and s > 1.5:
            return x * n * s
        return x + s if b else x

    return capture_of(f, (torch.randn(6), 5, 2.5, True), dynamic=True)


def symbolic_boolean() -> tfk.Capture:
    """A boolean that is a symbol."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(torch.randn(4), source=LocalSource("x"))
    flag = env.create_symbol(1, LocalSource("b"), positive=None, do_not_specialize_zero_one=True)
    gm = torch.fx.symbolic_trace(lambda x, b: x + 1)
    return tfk.capture(gm, [x, env.create_symboolnode(sympy.Eq(flag, 1))])


def jagged() -> tfk.Capture:
    """Jagged nested tensors: nested ints, sizes of inner tensors."""
    a = torch.nested.nested_tensor([torch.randn(n, 5) for n in (2, 3, 4)], layout=torch.jagged)
    return capture_of(lambda a, b: (a * b).sin(), (a, a.clone()), dynamic=True)


def wrapper() -> tfk.Capture:
    """Wrapper subclasses with a guard on their size."""

    def f(t: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return (t @ u).sin() if t.shape[0] % 2 == 0 else t @ u

    t = TwoTensor(torch.randn(6, 4), torch.randn(6, 4))
    return capture_of(f, (t, TwoTensor(torch.randn(4, 3), torch.randn(4, 3))), dynamic=True)


def pruned() -> tfk.Capture:
    """Guards on a tensor and a number that are no inputs of the graph."""

    def f(x: torch.Tensor, y: torch.Tensor, n: int) -> torch.Tensor:
        if 2 * y.shape[0] > 9 + x.shape[0] and n % 3 == 2 and y.shape[1] % 4 == 0:
            return x + 1
        return x - 1

    return capture_of(f, (torch.randn(5), torch.randn(13, 8), 5), dynamic=True)


def view() -> tfk.Capture:
    """A view whose base is no input."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1) if x.shape[0] > 3 else x

    return capture_of(f, (torch.randn(10, 6)[2:, 1:],), dynamic=True)


def marked() -> tfk.Capture:
    """A range that the user gave, and a hint of its own."""
    x = torch.randn(9, 4)
    torch._dynamo.mark_dynamic(x, 0, min=8, max=64, hint_override=16)
    return capture_of(lambda x: x * 2, (x,))


def unbacked() -> tfk.Capture:
    """Sizes of inputs without hints, with bounds and a shared name."""
    x, y = torch.randn(6, 3), torch.randn(6)
    mark_unbacked(x, 0, min=2, max=99, shape_id="rows")
    mark_unbacked(y, 0, shape_id="rows")
    return capture_of(lambda x, y: (x.sum(1) + y, x.shape[0]), (x, y))


def automatic() -> tfk.Capture:
    """A size that became dynamic at the second call."""

    def f(x: torch.Tensor, n: int) -> torch.Tensor:
        return x + n if x.shape[0] > 4 else x

    return capture_of(f, (torch.randn(7, 3), 4), (torch.randn(9, 3), 6))


def other_names() -> tfk.Capture:
    """Symbols that a new environment would call otherwise, also one by the name of another."""
    env = ShapeEnv(duck_shape=False)
    env.unique_ids.add(77)  # what a new environment takes for x.size()[0]
    env.unbacked_symint_counter = 5
    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(torch.randn(6, 4), source=LocalSource("x"))
    names = (f"y{i}" for i in itertools.count())
    name = next(n for n in names if ShapeEnv()._generate_unique_id(f"L['{n}'].size()[0]") == 78)
    y = mode.from_tensor(torch.randn(8), source=LocalSource(name))

    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        n = y.nonzero()
        assert x.shape[0] + 3 > x.shape[1] + 2
        assert y.shape[0] % 4 == 0
        return n + 1, x.reshape(-1), x.shape[0] * y.shape[0]

    return tfk.capture(make_fx(f, tracing_mode="real")(x, y), [x, y])


CASES = {
    **{
        name: functools.partial(guarded, name)
        for name in ("product", "divisible", "branch", "strides", "item", "constant")
    },
    **{
        f.__name__: f
        for f in (
            divisible_twice, twice, nonzero, products_of_items, scalars, symbolic_boolean, jagged,
            wrapper, pruned, view, marked, unbacked, automatic, other_names,
        )
    },
}  # fmt: skip


@functools.cache
def case(name: str) -> tfk.Capture:
    """The capture of one frame, made once."""
    return CASES[name]()


def found_elsewhere(directory: Path, check: str) -> dict[str, list[str]]:
    """What a check finds in the captures of a directory in a fresh interpreter, by their names."""
    files = sorted(directory.glob("*.fkf"))
    found = json.loads(python("program_replay.py", check, *files).splitlines()[-1])
    return {Path(path).stem: differences for path, differences in found.items()}


# --- what is new ----------------------------------------------------------------------------------


def facts_by_source(instance: Any) -> dict[str, str]:
    """The guards over sources, and the user's line of each."""
    names = named(instance)
    return {
        str(guard.expr.xreplace(names)): (guard.sloc.maybe_user_loc or "").split("  #")[0]
        for guard in env_of(instance).guards
    }


# --- captured again -------------------------------------------------------------------------------


def again(instance: Any) -> tfk.Capture:
    """The capture of an instance."""
    with instance.active():
        return tfk.capture(instance.gm, instance.inputs)
