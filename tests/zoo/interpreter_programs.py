"""Transforms of functorch, operators inside them, and what can be told of their results.

Also run as a script: it reads records, runs every operator on what it makes of them, and prints.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from quiet import quiet
from torch._C import _functorch as functorch
from torch._dispatch.python import suspend_functionalization
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize, grad, jvp, vmap

import torch_fakeify as tfk
from torch_fakeify.convert.wrappers import wrap_functorch
from torch_fakeify.encoding.interpreters import Interpreters
from torch_fakeify.records.tensor import FunctorchDesc, MetaTensorDesc

if TYPE_CHECKING:
    from collections.abc import Callable

Probe = Any
X = (4, 4, 4)


def _x() -> torch.Tensor:
    return torch.randn(X)


def _no_grad(program: Callable[[Probe], Any]) -> Callable[[Probe], Any]:
    def run(f: Probe) -> Any:
        with torch.no_grad():
            return program(f)

    return run


def _jvp(f: Probe, x: torch.Tensor) -> Any:
    """In ``jvp``, on a tensor of its level that is no dual tensor."""
    one = torch.ones(())
    return jvp(lambda t: (f(torch.ones_like(t) * x.detach().clone()), t)[1], (one,), (one,))


def _inference(f: Probe) -> Any:
    with torch.inference_mode():
        return grad(lambda t: f(t).sum())(_x())


PROGRAMS: dict[str, Callable[[Probe], Any]] = {
    "vmap": lambda f: vmap(f)(_x()),
    "vmap, in_dims=2": lambda f: vmap(f, in_dims=2)(_x()),
    "vmap, randomness=same": lambda f: vmap(f, randomness="same")(_x()),
    "vmap, randomness=different": lambda f: vmap(f, randomness="different")(_x()),
    "vmap of vmap": lambda f: vmap(vmap(f, in_dims=1, randomness="different"))(_x()),
    "vmap of a result": lambda f: vmap(lambda t: f(t.exp().t()))(_x()),
    "vmap of requires_grad": lambda f: vmap(f)(_x().requires_grad_()),
    "grad": lambda f: grad(lambda t: f(t).sum())(_x()),
    "grad under no_grad": _no_grad(lambda f: grad(lambda t: f(t).sum())(_x())),
    "grad in inference mode": _inference,
    "grad of a captured tensor": lambda f: grad(
        lambda t: (f(torch.ones_like(t, requires_grad=False).exp()), t.sum())[1]
    )(_x()),
    "grad of a result": lambda f: grad(lambda t: f(t.sin()).sum())(_x()),
    "grad of grad": lambda f: grad(lambda s: grad(lambda t: f(t).sum())(s.cos()).sum())(_x()),
    "grad of grad, outer": lambda f: grad(
        lambda s: grad(lambda t: (f(s), t.sum())[1])(s.cos()).sum()
    )(_x()),
    "grad of grad under no_grad": lambda f: grad(
        lambda s: (_no_grad(lambda p: grad(lambda t: p(t).sum())(s.cos()))(f), s.sum())[1]
    )(_x()),
    "vmap of grad": lambda f: vmap(grad(lambda t: f(t).sum()))(_x()),
    "grad of vmap": lambda f: grad(lambda t: vmap(f)(t).sum())(_x()),
    "jvp": lambda f: _jvp(f, _x()),
    "jvp without forward grad": lambda f: _forward_grad_off(lambda: _jvp(f, _x())),
    "jvp of vmap": lambda f: _jvp(lambda t: vmap(f)(t), _x()),
    "vmap of jvp": lambda f: vmap(lambda t: (_jvp(f, t), t)[1])(_x()),
    "functionalize": lambda f: functionalize(f)(_x()),
    "functionalize views": lambda f: functionalize(f, remove="mutations_and_views")(_x()),
    "vmap of functionalize": lambda f: vmap(functionalize(f))(_x()),
    "functionalize of vmap": lambda f: functionalize(vmap(f))(_x()),
    "grad of vmap of grad": lambda f: grad(
        lambda t: vmap(lambda s: grad(lambda r: f(r).sum())(s * s))(t).sum()
    )(_x()),
}
"""Each runs a function inside transforms. The function is given a tensor and returns one."""


def _forward_grad_off(program: Callable[[], Any]) -> Any:
    forward_ad: Any = torch.autograd.forward_ad
    with forward_ad._set_fwd_grad_enabled(False):
        return program()


def _add_(t: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    s = t.clone()
    return s.add_(c)


OPS: dict[str, Callable[[Any, Any], Any]] = {
    "sin": lambda t, c: t.sin(),
    "add": lambda t, c: t + c,
    "matmul": lambda t, c: c @ t.unsqueeze(-1) if t.dim() == 1 else t @ c,
    "sum": lambda t, c: t.sum(0),
    "transpose": lambda t, c: t.unsqueeze(-1).transpose(0, -1),
    "reshape": lambda t, c: t.reshape(-1)[1:],
    "detach": lambda t, c: t.detach(),
    "in place": lambda t, c: _add_(t, 1.0),
    "in place, from a batch": lambda t, c: c.detach().clone().add_(t),
    "in place on a captured tensor": lambda t, c: c.detach().add_(1),
    "captured alone": lambda t, c: c * 2,
    "rand": lambda t, c: torch.rand(2, device="cpu"),
    "rand_like": lambda t, c: torch.rand_like(t),
    "dropout": lambda t, c: torch.nn.functional.dropout(t, 0.5, training=True),
    "item": lambda t, c: t.sum().item(),
    "branch": lambda t, c: t if t.sum() > 0 else -t,
    "nonzero": lambda t, c: t.nonzero(),
    "requires_grad_": lambda t, c: t.clone().requires_grad_(),
    "no_grad": lambda t, c: torch.no_grad()(lambda: t * c)(),
    "vmap": lambda t, c: vmap(torch.sin)(t),
    "vmap, randomness": lambda t, c: vmap(torch.rand_like, randomness="different")(t),
    "grad": lambda t, c: grad(lambda s: (s * s).sum())(t),
    "jvp": lambda t, c: jvp(torch.sin, (t.clone(),), (t.clone(),)),
    "several": lambda t, c: t.unbind(0),
    "autograd.grad": lambda t, c: torch.autograd.grad((t * t).sum(), t, create_graph=True),
}
"""On a tensor and one that it captures, of size (4, 4)."""

VALUE_OPS = frozenset({"item", "branch", "nonzero"})
"""Those that need data, which a fake tensor does not have; ``vmap`` refuses them before that."""


def told(t: Any) -> Any:
    """What can be told of a result, wrapper by wrapper, as plain data."""
    if isinstance(t, (tuple, list)):
        return [told(part) for part in t]
    if not isinstance(t, torch.Tensor):
        return type(t).__name__
    levels: list[Any] = []
    while True:
        batched = functorch.is_batchedtensor(t)
        wrapped = functorch.is_functorch_wrapped_tensor(t)
        kind = "plain"
        if wrapped:
            kind = "batched" if batched else "functional"
            kind = "grad" if functorch.is_gradtrackingtensor(t) else kind
        levels.append({
            "kind": kind,
            "level": functorch.maybe_get_level(t),
            "bdim": functorch.maybe_get_bdim(t) if batched else None,
            "size": list(t.size()),
            "stride": list(t.stride()),
            "dtype": str(t.dtype),
            "device": str(t.device),
            "requires_grad": t.requires_grad,
            "is_leaf": t.is_leaf,
            "is_inference": t.is_inference(),
        })  # fmt: skip
        if not wrapped:
            return levels
        if kind == "functional":
            t = functorch._unwrap_functional_tensor(t, True)
        else:
            t = functorch.get_unwrapped(t)


def outcome(op: str, t: torch.Tensor, captured: torch.Tensor) -> Any:
    """What an operator gives, or the first line of its error."""
    try:
        return told(OPS[op](t, captured))
    except Exception as error:  # noqa: BLE001, any: it is compared
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def captured_tensor() -> torch.Tensor:
    """What the operators capture; its ``requires_grad`` shows the grad mode of the outermost."""
    return torch.ones(4, 4, requires_grad=True)


def rebuild(d: MetaTensorDesc, mode: FakeTensorMode, interpreters: Interpreters) -> Any:
    """A fake tensor of the record of a wrapped tensor, and of its wrappers."""
    conv = tfk.MetaConverter(mode)

    def make(d: MetaTensorDesc) -> Any:
        if d.functorch is None:
            return conv.from_desc(d)
        wrapper = d.functorch
        with torch.inference_mode(d.is_inference):
            return wrap_functorch(
                make(wrapper.unwrapped),
                kind=wrapper.kind,
                level=wrapper.level,
                bdim=wrapper.bdim,
                layers=interpreters.layers(wrapper.stack),
                requires_grad=d.requires_grad,
                is_leaf=d.is_leaf,
                where=f"tensor {d.id}",
            )

    with suspend_functionalization(), interpreters.cleared():
        return make(d)


def stack_of(d: MetaTensorDesc) -> Any:
    """The stack that a wrapped tensor's record names."""
    assert isinstance(d.functorch, FunctorchDesc)
    return d.functorch.stack


def replayed(d: MetaTensorDesc, *, grad_mode: bool = True, forward: bool = True) -> dict[str, Any]:
    """What every operator gives on the fake tensor of a record, under the record's stack."""
    forward_ad: Any = torch.autograd.forward_ad
    mode = FakeTensorMode()
    interpreters = Interpreters()
    found: dict[str, Any] = {}
    for op in OPS:
        captured = mode.from_tensor(captured_tensor())
        t = rebuild(d, mode, interpreters)
        with (
            interpreters.entered(stack_of(d)),
            mode,
            torch.set_grad_enabled(grad_mode),
            forward_ad._set_fwd_grad_enabled(forward),
        ):
            found[op] = outcome(op, t, captured)
    return found


def same(n: Any) -> Any:
    """Batch sizes that are plain numbers stay what they are."""
    return n


def torchs_fake(mode: FakeTensorMode, t: torch.Tensor) -> Any:
    """Torch's own fake tensor; without its warning about the gradients of non-leaves."""
    with quiet():
        return mode.from_tensor(t)


if __name__ == "__main__":
    records = tfk.loads(Path(sys.argv[1]).read_bytes())
    sys.stdout.write(json.dumps({name: replayed(d) for name, d in records.items()}))
