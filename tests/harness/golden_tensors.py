"""One capture for each kind of tensor: as it is, and as a fake with symbolic sizes where it has one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from captured_frames import captures_of
from golden_coverage import dtypes
from msgspec.structs import replace
from quiet import quiet
from subclass_zoo import PLAIN, distributed, fake_world
from torch._dynamo import decorators
from torch._dynamo.source import LocalSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    RelaxedUnspecConstraint,
    ShapeEnv,
    StatelessSymbolicContext,
)
from view_zoo import JAGGED_VIEWS, VIEWS, two

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def graph_over(values: Sequence[Any], names: Sequence[str]) -> Any:
    """A graph that gives its inputs back, each with its source."""
    graph = torch.fx.Graph()
    for name in names:
        fx_node: Any = graph.placeholder(name)
        fx_node._dynamo_source = LocalSource(name, is_input=True)
    graph.output(tuple(graph.nodes))
    assert len(values) == len(names)
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def frame_of(values: Sequence[Any], names: Sequence[str]) -> Any:
    """The capture of a graph that gives its inputs back."""
    return tfk.capture(graph_over(values, names), values)


def symbolic(t: torch.Tensor) -> Any:
    """The capture of a tensor's fake with symbolic sizes."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    source = LocalSource("x", is_input=True)
    return frame_of([mode.from_tensor(t, source=source, symbolic_context=_dynamic(t))], ["x"])


def may_be_symbolic(t: Any) -> bool:
    """Whether torch itself makes symbols for the sizes of such a tensor."""
    if t.layout not in (torch.strided, torch.jagged, torch.sparse_coo):
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(t) or torch._is_functional_tensor(t):
        return False
    return not t.is_inference()


def _dynamic(t: torch.Tensor) -> Any:
    """Every dim of a plain tensor dynamic; torch's own policy for the others."""
    if type(t) not in (torch.Tensor, torch.nn.Parameter) or t._is_view():
        return None
    if t.layout is not torch.strided:
        return None
    return StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DYNAMIC] * t.ndim,
        constraint_sizes=[RelaxedUnspecConstraint(warn_only=False)] * t.ndim,
    )


# --- plain tensors ------------------------------------------------------------------------------


def _leaf() -> torch.Tensor:
    return torch.zeros(4, 6, requires_grad=True)


def _with_grad() -> torch.Tensor:
    t = _leaf()
    t.grad = torch.ones(4, 6)
    return t


def _non_leaf() -> torch.Tensor:
    t = _leaf() * 2
    t.retain_grad()
    return t


def _grad_dtype() -> torch.Tensor:
    t = _leaf()
    t.grad_dtype = torch.float64
    return t


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(4, 6)


def _emptied() -> torch.Tensor:
    t = torch.zeros(4, 6)
    t.untyped_storage().resize_(0)
    return t


def marked() -> torch.Tensor:
    """A tensor with a mark of each kind."""
    t = torch.empty(8, 8, 8, 8, 8)
    # In this order: each forgets some of what the other left, and this keeps most.
    decorators.mark_unbacked(t, 1, shape_id="batch", min=1, hint_override=5)
    decorators.mark_dynamic(t, 0, min=2, max=64, hint_override=9, specialize_on=[lambda n: n == 8])
    decorators.mark_unbacked(t, 2, strict=True)
    decorators.maybe_mark_dynamic(t, 3)
    decorators.mark_static(t, 4)
    decorators.mark_static_address(t, guard=True)
    return t


def _on(device: str) -> torch.Tensor:
    """A fake tensor, as the device need not be there."""
    with FakeTensorMode(shape_env=ShapeEnv()):
        return torch.empty(4, 6, device=device)


PLAIN_TENSORS: dict[str, Callable[[], Any]] = {
    "strided": lambda: torch.zeros(4, 6),
    "strided with gaps": lambda: torch.empty_strided((4, 6), (16, 2)),
    "channels last": lambda: torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.zeros(4, 1).expand(4, 6),
    "0-dim": lambda: torch.tensor(2.5, dtype=torch.float64),
    "0-dim integer": lambda: torch.tensor(7),
    "empty": lambda: torch.zeros(4, 0, 6),
    "without bytes": _emptied,
    "large": lambda: torch.empty(1 << 20, 1 << 20, device="meta"),
    "leaf": _leaf,
    "with a gradient": _with_grad,
    "with a gradient of another dtype": _grad_dtype,
    "non-leaf": _non_leaf,
    "parameter": lambda: torch.nn.Parameter(torch.zeros(4, 6)),
    "parameter without gradient": lambda: torch.nn.Parameter(torch.zeros(4), requires_grad=False),
    "buffer": lambda: torch.nn.Buffer(torch.zeros(4, 6)),
    "transient buffer": lambda: torch.nn.Buffer(torch.zeros(4, 6), persistent=False),
    "inference": _inference,
    "detached": lambda: _leaf().detach(),
    "marked": marked,
    "meta": lambda: torch.empty(4, 6, device="meta"),
}

SPARSE: dict[str, Callable[[], Any]] = {
    "coo": lambda: torch.eye(4).to_sparse(),
    "coo, hybrid and not coalesced": lambda: torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 2]]), torch.ones(3, 5), (4, 5)
    ),
    "coo with gradient": lambda: torch.eye(4).to_sparse().requires_grad_(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "csr with int32 indices": lambda: torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2], dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.ones(2),
        (2, 2),
    ),
    "csc": lambda: torch.eye(4).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 1)),
    "csr batched": lambda: torch.eye(4).repeat(3, 1, 1).to_sparse_csr(),
    "mkldnn": lambda: torch.eye(4).to_mkldnn(),
}


def _registered() -> Any:
    from golden_subclass import Factor, Scaled

    return Scaled(torch.zeros(2, 3), Factor(0.5))


def _dataclass_context() -> Any:
    from golden_subclass import Tagged, Tags

    return Tagged(torch.zeros(2, 3), Tags(torch.float16, ("a", 1)))


def _object_in_context() -> Any:
    from golden_subclass import Label, Tagged

    return Tagged(torch.zeros(2, 3), ("label", Label("red")))


WRAPPERS: dict[str, Callable[[], Any]] = {
    **PLAIN,
    "with a registered context": _registered,
    "with a dataclass for a context": _dataclass_context,
    "with an object in its context": _object_in_context,
    "view of a TwoTensor": lambda: two(4, 6, grad=True)[1:].t(),
    "view of a TwoTensor's part": lambda: two(4, 6).a.split(2)[1],
}


# --- tensors that are something only inside of a transform --------------------------------------


def _inside(transform: Callable[[Callable[[Any], Any]], Any]) -> Callable[[], Any]:
    """The capture that is made of what a transform gives to the function."""

    def make() -> Any:
        found: list[Any] = []

        def body(x: Any) -> Any:
            found.append(frame_of([x], ["x"]))
            return x.sin().sum()

        mode = FakeTensorMode(shape_env=ShapeEnv())
        x = mode.from_tensor(torch.zeros(3, 4), source=LocalSource("x"))
        with mode:
            transform(body)(x)
        return found[-1]

    return make


def _functional() -> Any:
    x = torch._to_functional_tensor(torch.zeros(3, 4))
    return frame_of([x], ["x"])


def _python_functional() -> Any:
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    with FunctionalTensorMode():
        x = FunctionalTensor.to_functional(torch.zeros(3, 4))
    return frame_of([x], ["x"])


func: Any = torch.func

TRANSFORMS: dict[str, Callable[[], Any]] = {
    "vmap": _inside(lambda f: func.vmap(f)),
    "vmap with random numbers": _inside(lambda f: func.vmap(f, in_dims=1, randomness="different")),
    "vmap with the same random numbers": _inside(lambda f: func.vmap(f, randomness="same")),
    "grad": _inside(lambda f: func.grad(f)),
    "grad in inference mode": torch.inference_mode()(_inside(lambda f: func.grad(f))),
    "vmap of grad": _inside(lambda f: func.vmap(func.grad(f))),
    "vmap in jvp": _inside(
        lambda f: lambda x: func.jvp(lambda _: func.vmap(f)(x), (torch.ones(2),), (torch.ones(2),))
    ),
    "functionalize": _inside(lambda f: func.functionalize(f)),
    "functionalize without views": _inside(
        lambda f: func.functionalize(f, remove="mutations_and_views")
    ),
    "functional": _functional,
    "FunctionalTensor": _python_functional,
}


# --- the table ----------------------------------------------------------------------------------


def _quietly(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    with quiet():
        return make()


def _plain(name: str) -> str:
    """A file name."""
    return "_".join("".join(c if c.isalnum() else " " for c in name).split())


Case = tuple[str, "Callable[[], Any]"]


def _real(name: str, make: Callable[[], Any]) -> Case:
    return _plain(name), lambda: _quietly(lambda: frame_of([make()], ["x"]))


def _symbolic(name: str, make: Callable[[], Any]) -> Case:
    return _plain(f"{name} symbolic"), lambda: _quietly(lambda: symbolic(make()))


def tensor_cases() -> Iterator[Case]:
    """Name and maker of each capture."""
    for group, table in (
        ("tensor", PLAIN_TENSORS),
        ("jagged", JAGGED_VIEWS),
        ("sparse", SPARSE),
        ("wrapper", WRAPPERS),
    ):
        for name, make in table.items():
            yield _real(f"{group} {name}", make)
            if may_be_symbolic(_quietly(make)):
                yield _symbolic(f"{group} {name}", make)
    for name, view in VIEWS.items():
        of_leaf = lambda view=view: view(torch.zeros(4, 6, requires_grad=True))  # noqa: E731
        of_wrapper = lambda view=view: view(two(4, 6))  # noqa: E731
        yield (_real if name in NUMBERS_ONLY else _symbolic)(f"view {name}", of_leaf)
        yield (_symbolic if name in WRAPPER_SYMBOLS else _real)(f"wrapper view {name}", of_wrapper)
    for name, make in TRANSFORMS.items():
        yield _plain(f"transform {name}"), lambda make=make: _quietly(make)
    for device in ("cuda:1", "xpu", "mps"):
        yield _real(f"device {device}", lambda device=device: _on(device))
    yield "pinned", _pinned
    yield "dtypes", lambda: _quietly(_all_dtypes)
    yield "aliases", lambda: _quietly(_aliases)
    yield "distributed", lambda: _quietly(_distributed)
    yield "process_groups", lambda: _quietly(_process_groups)
    yield "process_groups_of_a_rank", lambda: _quietly(_process_groups_of_a_rank)


NUMBERS_ONLY = ("view_as_complex", "conj")
"""Views of which torch makes no fake with symbolic sizes: their last size must be 2."""


WRAPPER_SYMBOLS = ("slice", "select", "reshape", "expand", "as_strided", "split", "chain")
"""Views of a wrapper subclass that are recorded with symbolic sizes; the files are large."""


def _pinned() -> Any:
    """The record of a tensor that only a machine with an accelerator makes."""
    desc = frame_of([torch.zeros(3)], ["x"]).desc
    (entry,) = desc.inputs
    entry = replace(entry, tensor=replace(entry.tensor, is_pinned=True))
    return tfk.Capture(replace(desc, inputs=(entry,)))


def _all_dtypes() -> Any:
    tensors = {name: torch.empty(4, 6, dtype=dtype) for name, dtype in dtypes().items()}
    return frame_of(list(tensors.values()), [f"t_{name}" for name in tensors])


def _aliases() -> Any:
    base = torch.zeros(4, 6)
    tied = torch.nn.Parameter(torch.zeros(3))
    other = torch.empty(0).set_(base.untyped_storage(), 3, (2, 2), (6, 1))
    tensors = [base, base[1:], base.t(), other, tied, tied]
    return frame_of(tensors, ["base", "rows", "transposed", "other", "tied", "tied_again"])


def _process_groups() -> Any:
    """A mesh as an input, a part of it, and placements in the graph."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def f(x: torch.Tensor, mesh: Any) -> Any:
        whole = DTensor.from_local(x, mesh["tp"], [Shard(0)]).redistribute(placements=[Replicate()])
        return whole.to_local().sin()

    with fake_world():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return captures_of(f, (torch.zeros(2, 3), mesh), dynamic=True)[0]


def _process_groups_of_a_rank() -> Any:
    """A group along a dim of a mesh, and a number of the rank, which the program asks for."""
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh

    with fake_world():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return captures_of(
            lambda x: functional.all_reduce(x * dist.get_rank(), "sum", (mesh, 0)),
            (torch.zeros(2, 3),),
        )[0]


def _distributed() -> Any:
    with fake_world():
        tensors = distributed()
        names = ["".join(c if c.isalnum() else "_" for c in name) for name in tensors]
        return frame_of(list(tensors.values()), names)
