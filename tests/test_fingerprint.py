"""Fingerprints: equal for frames that are the same, different for frames that are not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torch_fakeify as tfk
from torch_fakeify.desc import ApplyNode, SymbolFactDesc, SymbolNode
from torch_fakeify.desc_env import SymbolDesc

if TYPE_CHECKING:
    from collections.abc import Callable

_TWO = torch.fx.symbolic_trace(lambda a, b: a + b)


def of(*inputs: Any) -> str:
    """The fingerprint of one graph on some inputs."""
    return tfk.capture(_TWO, inputs).fingerprint()


def _plain() -> torch.Tensor:
    return torch.zeros(4, 4)


def _shared() -> tuple[torch.Tensor, torch.Tensor]:
    x = _plain()
    return x, x.detach()


def _with_grad(dtype: torch.dtype) -> torch.Tensor:
    x = _plain().requires_grad_()
    x.grad_dtype = None
    x.grad = torch.zeros(4, 4, dtype=dtype)
    return x


def _any_grad() -> torch.Tensor:
    x = _plain().requires_grad_()
    x.grad_dtype = None
    return x


def _no_bytes() -> torch.Tensor:
    x = _plain()
    x.untyped_storage().resize_(0)
    return x


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return _plain()


def _no_grad_view() -> torch.Tensor:
    x = torch.zeros(5, 4, requires_grad=True)
    with torch.no_grad():
        return x[1:]


VARIANTS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "plain": lambda: (_plain(), _plain()),
    "dtype": lambda: (_plain().double(), _plain()),
    "device": lambda: (_plain().to("meta"), _plain()),
    "size": lambda: (torch.zeros(1, 4), _plain()),
    "stride": lambda: (_plain().t().contiguous().t(), _plain()),
    "offset": lambda: (torch.zeros(5, 4)[1:].detach(), _plain()),
    "storage": _shared,
    "twice": lambda: (_plain(),) * 2,
    "no bytes": lambda: (_no_bytes(), _plain()),
    "requires grad": lambda: (_plain().requires_grad_(), _plain()),
    "non-leaf": lambda: (_plain().requires_grad_() * 1, _plain()),
    "inference": lambda: (_inference(), _plain()),
    "conj": lambda: (_plain().cfloat().conj(), _plain()),
    "complex": lambda: (_plain().cfloat(), _plain()),
    "neg": lambda: (torch._neg_view(_plain()), _plain()),
    "parameter": lambda: (torch.nn.Parameter(_plain()), _plain()),
    "buffer": lambda: (torch.nn.Buffer(_plain()), _plain()),
    "view": lambda: (torch.zeros(5, 4)[1:], _plain()),
    "view of a leaf": lambda: (torch.zeros(5, 4, requires_grad=True)[1:], _plain()),
    "view under no_grad": lambda: (_no_grad_view(), _plain()),
    "gradient": lambda: (_with_grad(torch.float32), _plain()),
    "gradient of another dtype": lambda: (_with_grad(torch.float64), _plain()),
    "gradient of any dtype": lambda: (_any_grad(), _plain()),
    "number": lambda: (3, _plain()),
    "another number": lambda: (4, _plain()),
    "float": lambda: (3.0, _plain()),
    "bool": lambda: (True, _plain()),
    "int 1": lambda: (1, _plain()),
    "none": lambda: (None, _plain()),
    "text": lambda: ("3", _plain()),
}


def test_every_property_of_an_input_is_told() -> None:
    """No two variants of the inputs have one fingerprint, and each has its own again."""
    prints = {name: of(*make()) for name, make in VARIANTS.items()}
    same = {a: b for a in prints for b in prints if a < b and prints[a] == prints[b]}
    assert not same
    assert prints == {name: of(*make()) for name, make in VARIANTS.items()}


def traced(fn: Callable[..., Any], *tensors: torch.Tensor, **settings: Any) -> tfk.Capture:
    """A symbolic ATen capture."""
    env = ShapeEnv(**settings)
    mode = FakeTensorMode(shape_env=env)
    fakes = [mode.from_tensor(t, source=LocalSource(f"x{i}")) for i, t in enumerate(tensors)]
    return tfk.capture(make_fx(fn)(*fakes), fakes)


def _branch(limit: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x + 1 if x.shape[0] > limit else x


def renamed(part: Any, names: dict[str, str]) -> Any:
    """A record with other symbol names, and what sympy sorts by name in another order."""
    if isinstance(part, tuple):
        return tuple(renamed(item, names) for item in part)
    if not isinstance(part, msgspec.Struct):
        return part
    if isinstance(part, (SymbolNode, SymbolDesc, SymbolFactDesc)):
        part = msgspec.structs.replace(part, name=names[part.name])
    if isinstance(part, ApplyNode) and part.function in ("Add", "Mul", "Max", "Eq", "Ne"):
        part = msgspec.structs.replace(part, args=part.args[::-1])
    fields = {f: renamed(getattr(part, f), names) for f in part.__struct_fields__}
    return msgspec.structs.replace(part, **fields)


def test_symbol_names_do_not_matter() -> None:
    """Sums, products and comparisons that sympy sorts by name come out the same."""

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


def test_guards_hints_ranges_and_settings_are_told() -> None:
    """The same graph under another guard, hint, range or policy is another frame."""
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


def test_modes_and_constants_are_told() -> None:
    """The state of torch, data of constants and the position of an argument count."""
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


def test_constants_of_other_types_are_told() -> None:
    """Constants of one content and several types are several arguments."""
    prints: set[str] = set()
    constants = [[0, 1, 2], (0, 1, 2), slice(0, 1, 2), range(0, 1, 2)]
    for constant in constants:
        graph = torch.fx.Graph()
        graph.output(graph.call_function(torch.sum, (graph.placeholder("x"), constant)))
        gm = torch.fx.GraphModule(torch.nn.Module(), graph)
        prints.add(tfk.capture(gm, [_plain()]).fingerprint())
    assert len(prints) == len(constants)


def test_names_stacks_and_backends_do_not_matter() -> None:
    """Who recorded the frame, how FX named its nodes and how it failed is not the frame."""
    capture = tfk.capture(_TWO, [_plain(), _plain()])
    renamed = torch.fx.symbolic_trace(lambda first, second: first + second)
    assert tfk.capture(renamed, [_plain(), _plain()]).fingerprint() == capture.fingerprint()
    failed = capture.with_failure(ValueError("no"), backend="inductor")
    assert failed.fingerprint() == capture.fingerprint()


def test_the_order_of_guards_on_other_things_does_not_matter() -> None:
    """Symbols that only guards have are told apart by their sources."""
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
