"""Fingerprints: equal for equal frames, different for different ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import msgspec
import pytest
import torch
from frame_variants import VARIANTS, _plain, renamed
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torch_fakeify as tfk
from torch_fakeify.records.fingerprint import FingerprintKind

if TYPE_CHECKING:
    from collections.abc import Callable

_TWO = torch.fx.symbolic_trace(lambda a, b: a + b)


@pytest.mark.parametrize("kind", get_args(FingerprintKind))
def test_every_property_of_an_input_is_in_the_fingerprint(kind: FingerprintKind) -> None:
    """No two variants of the inputs have one fingerprint, and each has its own again."""
    prints, again = (
        {name: tfk.capture(_TWO, make()).fingerprint(kind) for name, make in VARIANTS.items()}
        for _ in range(2)
    )
    assert prints == again
    assert len(set(prints.values())) == len(prints)


def traced(fn: Callable[..., Any], *tensors: torch.Tensor, **settings: Any) -> tfk.Capture:
    """Return a symbolic ATen capture."""
    env = ShapeEnv(**settings)
    mode = FakeTensorMode(shape_env=env)
    fakes = [mode.from_tensor(t, source=LocalSource(f"x{i}")) for i, t in enumerate(tensors)]
    return tfk.capture(make_fx(fn)(*fakes), fakes)


def _branch(limit: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x + 1 if x.shape[0] > limit else x


def test_symbol_names_do_not_matter() -> None:
    """Sums, products and comparisons that sympy sorts by name have one record."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        n, m = x.shape[0], y.shape[0]
        assert n + m > 12
        assert n * m > 40
        return (x.new_zeros(n + m + n * m) + max(n, m)).sum() + y.sum()

    capture = traced(f, torch.zeros(5, 3), torch.zeros(9, 3))
    env = capture.desc.shape_env
    assert env is not None
    symbols = sorted(symbol.name for symbol in env.symbols)
    names = {name: f"s{100 - i}" for i, name in enumerate(symbols)}
    other = tfk.Capture(renamed(capture.desc, names))
    assert other.desc != capture.desc
    assert other.fingerprint() == capture.fingerprint()


def test_guards_hints_ranges_and_settings_are_in_the_fingerprint() -> None:
    """One graph under another guard, hint, range or policy is another frame."""
    x = torch.zeros(8, 3)
    base = traced(_branch(5), x)
    others = [
        traced(_branch(4), x),
        traced(_branch(5), torch.zeros(9, 3)),
        traced(_branch(5), x, duck_shape=False),
    ]
    assert [str(n.target) for n in base.desc.graph.nodes] == [
        str(n.target) for n in others[0].desc.graph.nodes
    ]
    env = base.desc.shape_env
    assert env is not None
    without = msgspec.structs.replace(base.desc, shape_env=msgspec.structs.replace(env, guards=()))
    others.append(tfk.Capture(without))
    narrowed = tuple(msgspec.structs.replace(s, upper=s.hint) for s in env.symbols)
    desc = msgspec.structs.replace(
        base.desc, shape_env=msgspec.structs.replace(env, symbols=narrowed)
    )
    others.append(tfk.Capture(desc))
    assert base.fingerprint() not in [other.fingerprint() for other in others]


def test_modes_and_constants_are_in_the_fingerprint() -> None:
    """The state of torch, data of constants and the position of an argument matter."""
    x = torch.zeros(3)

    def capture(fn: Callable[..., Any], **options: Any) -> str:
        return tfk.capture(make_fx(fn)(x), [x], **options).fingerprint()

    one, other = torch.arange(3.0), torch.arange(3.0) * 2
    prints = [
        capture(lambda x: x + one, constants="small"),
        capture(lambda x: x + other, constants="small"),
        capture(lambda x: x + one),
        capture(lambda x: x - 1),
        capture(lambda x: 1 - x),
        capture(lambda x: x - 1.5),
        capture(lambda x: torch.sub(x, 1, alpha=2)),
    ]
    with torch.no_grad():
        prints.append(capture(lambda x: x - 1))
    assert len(set(prints)) == len(prints)
    assert capture(lambda x: x + one) == capture(lambda x: x + other)


def test_types_of_constants_are_in_the_fingerprint() -> None:
    """Equal constants of several types are different arguments."""
    prints: set[str] = set()
    constants = [[0, 1, 2], (0, 1, 2), slice(0, 1, 2), range(0, 1, 2)]
    for constant in constants:
        graph = torch.fx.Graph()
        graph.output(graph.call_function(torch.sum, (graph.placeholder("x"), constant)))
        gm = torch.fx.GraphModule(torch.nn.Module(), graph)
        prints.add(tfk.capture(gm, [_plain()]).fingerprint())
    assert len(prints) == len(constants)


def test_names_stacks_and_backends_do_not_matter() -> None:
    """The recorder of the frame, the names of nodes and the recorded failure are left out."""
    capture = tfk.capture(_TWO, [_plain(), _plain()])
    renamed = torch.fx.symbolic_trace(lambda first, second: first + second)
    assert tfk.capture(renamed, [_plain(), _plain()]).fingerprint() == capture.fingerprint()
    failed = capture.with_failure(ValueError("no"), backend="inductor")
    assert failed.fingerprint() == capture.fingerprint()


def test_the_order_of_guards_on_other_things_does_not_matter() -> None:
    """Symbols that only guards have are distinguished by their sources."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    a, b = (
        mode.from_tensor(torch.zeros(n), source=LocalSource(name)).size(0)
        for n, name in ((5, "a"), (9, "b"))
    )
    assert a % 5 == 0
    assert b % 3 == 0
    desc = tfk.capture(_TWO, [mode.from_tensor(_plain())] * 2).desc
    assert desc.shape_env is not None
    guards = desc.shape_env.guards
    turned = msgspec.structs.replace(desc.shape_env, guards=guards[::-1])
    other = msgspec.structs.replace(desc, shape_env=turned)
    assert tfk.Capture(other).fingerprint() == tfk.Capture(desc).fingerprint()
    less = msgspec.structs.replace(desc.shape_env, guards=guards[:1])
    assert tfk.Capture(msgspec.structs.replace(desc, shape_env=less)).fingerprint() != (
        tfk.Capture(desc).fingerprint()
    )
