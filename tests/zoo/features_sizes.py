"""Features: which sizes are symbolic, and who says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from compiled_programs import feature
from torch._dynamo import decorators

if TYPE_CHECKING:
    from observe import Run


def _work(x: torch.Tensor, y: torch.Tensor) -> Any:
    z = torch.cat([x, y]) @ torch.ones(x.shape[1], 2)
    return z * x.shape[0], x.reshape(-1)[: y.shape[0]]


def _pair(n: int, m: int = 3, k: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(float(n * m)).reshape(n, m).requires_grad_()
    return x, torch.ones(k, m)


@feature()
def automatic_true_and_false(run: Run) -> None:
    """The three ways of ``dynamic=``, over sizes that change, among them 0 and 1."""
    for dynamic in (None, True, False):
        torch._dynamo.reset()
        c = run.compile(_work, dynamic=dynamic)
        for n, m in ((4, 3), (5, 3), (6, 3), (1, 3), (2, 4), (0, 3)):
            run.call(c, *_pair(n, m))


@feature(dynamo={"assume_static_by_default": False})
def not_static_by_default(run: Run) -> None:
    """Sizes are symbolic from the first call on."""
    c = run.compile(_work)
    for n, m in ((4, 3), (5, 3), (1, 3), (2, 4)):
        run.call(c, *_pair(n, m))


@feature(dynamo={"automatic_dynamic_shapes": False})
def never_automatic(run: Run) -> None:
    """A change of size compiles another static graph."""
    c = run.compile(_work)
    for n in (4, 5, 6):
        run.call(c, *_pair(n))


@feature(dynamo={"automatic_dynamic_shapes_mark_as": "unbacked"})
def automatic_unbacked(run: Run) -> None:
    """A size that changes becomes an unbacked one."""
    c = run.compile(lambda x: x.sum() * 2 + x.shape[0])
    for n in (4, 5, 6, 1):
        run.call(c, torch.ones(n, 2, requires_grad=True))


@feature(dynamo={"specialize_int": True})
def specialized_ints(run: Run) -> None:
    """Ints are constants, sizes are not."""
    c = run.compile(lambda x, n: x * n)
    for n in (4, 5, 6):
        run.call(c, torch.ones(n), n)


@feature()
def hint_overrides(run: Run) -> None:
    """``mark_dynamic`` with a hint that is not the size."""
    c = run.compile(_work)
    for n in (4, 5, 6):
        x, y = _pair(n)
        decorators.mark_dynamic(x, 0, hint_override=100)
        run.call(c, x, y)


@feature(raises=True)
def a_mark_that_does_not_hold(run: Run) -> None:
    """A dim marked dynamic that the code makes constant is the same error."""

    def f(x: torch.Tensor) -> Any:
        return x.view(4, 3) + 1

    x = torch.ones(4, 3)
    decorators.mark_dynamic(x, 0)
    run.call(run.compile(f), x)


@feature()
def unbacked_that_differ(run: Run) -> None:
    """Two unbacked sizes with a check between them, kept and broken at run time."""

    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        torch._check(x.size(0) == 2 * y.size(0))
        return x.reshape(y.size(0), 2) + y[:, None]

    c = run.compile(f, fullgraph=True)
    for n, m in ((4, 2), (6, 3), (6, 2)):
        x, y = torch.arange(float(n)), torch.ones(m, requires_grad=True)
        decorators.mark_unbacked(x, 0)
        decorators.mark_unbacked(y, 0)
        run.call(c, x, y)


@feature(
    other_symbols="torch names the symbols of inputs without a policy by how many such it has seen, and with "
    "the handoff an environment has seen fewer"
)
def specialize_on(run: Run) -> None:
    """One graph for any size, and others that are compiled when a size is a special one."""
    c = run.compile(lambda x: (x * 2).sum(0) + x.shape[0])
    for n in (7, 8, 16, 9, 8):
        x = torch.arange(2.0 * n).reshape(n, 2).requires_grad_()
        decorators.mark_dynamic(x, 0, specialize_on=[lambda x0: x0 == 8, lambda x0: x0 == 16])
        run.call(c, x)


@feature()
def guards_of_the_backend(run: Run) -> None:
    """Sizes about which decompositions and kernels assume something: recompiles at the same calls."""

    def f(x: torch.Tensor) -> Any:
        y = torch.nn.functional.pad(x, (1, 1), mode="reflect")
        return torch.nn.functional.max_pool1d(y, 2, ceil_mode=True), x.flatten().unfold(0, 2, 2)

    c = run.compile(f, dynamic=True)
    for n in (8, 9, 16, 17, 4, 3):
        run.call(c, torch.arange(4.0 * n).reshape(1, 4, n).requires_grad_())


@feature()
def broadcasts_and_ones(run: Run) -> None:
    """Sizes that are one in some calls: broadcasting makes guards in the backend."""

    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        return (x + y).softmax(-1).expand(2, -1, -1), torch.atleast_3d(x)

    c = run.compile(f)
    for a, b in (
        ((3, 4), (3, 4)),
        ((3, 4), (1, 4)),
        ((5, 4), (5, 1)),
        ((1, 4), (6, 4)),
        ((5, 5), (5, 5)),
    ):
        run.call(c, torch.ones(a, requires_grad=True), torch.ones(b, requires_grad=True))


@feature(dynamo={"capture_scalar_outputs": True})
def a_broken_runtime_assert(run: Run) -> None:
    """A check on data that does not hold says at run time what it says directly."""

    def f(x: torch.Tensor) -> Any:
        n = x.max().item()
        torch._check(n >= 2)
        torch._check(n < 10, lambda: "fewer than ten")
        return torch.zeros(n) + 1

    c = run.compile(f, fullgraph=True)
    for values in ([1, 2, 3], [1, 1, 1], [20, 1, 1]):
        run.call(c, torch.tensor(values))


@feature()
def shapes_in_a_spec(run: Run) -> None:
    """``shapes_spec=`` of ``torch.compile``."""
    from torch.fx.experimental import dynamic_spec as spec

    c = run.compile(
        lambda x: (x + 1, x.shape[0] * 2),
        shapes_spec={"x": spec.TensorSpec([spec.ShapeVar("n"), None])}
        if hasattr(spec, "ShapeVar")
        else None,
    )
    for n in (3, 4, 5):
        run.call(c, torch.ones(n, 2))


@feature()
def recompile_limit(run: Run) -> None:
    """After the limit it runs eagerly, in both."""
    with torch._dynamo.config.patch(recompile_limit=2):
        c = run.compile(lambda x: x + 1)
        for dtype in (torch.float32, torch.float64, torch.int32, torch.int8):
            run.call(c, torch.ones(2, dtype=dtype))
