"""Real inputs from records: layout, aliasing, autograd state, sizes and guards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from captured_frames import only_capture_of
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import CallMethodKey, DivideByKey, ShapeEnv
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import SequenceKey

import torch_fakeify as tfk
from torch_fakeify.describe.describer import MetaTensorDescriber

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch_fakeify.records.tensor import MetaTensorDesc


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def identity_of(x: torch.Tensor) -> tfk.Capture:
    """Return the capture of a graph that returns its input."""
    return tfk.capture(torch.fx.symbolic_trace(lambda x: x), [x])


@pytest.mark.parametrize("aliased", [True, False])
def test_a_tensor_with_a_history_takes_gradients(aliased: bool) -> None:
    """The gradient of a materialized non-leaf has its shape, and so has that of a view of it."""
    y = torch.randn(3, 4, requires_grad=True) * 2
    gm = torch.fx.symbolic_trace(lambda a, b: a * b)
    a, b = tfk.capture(gm, [y, y[1] if aliased else torch.randn(4)]).materialize()
    assert a.grad_fn is not None
    (grad,) = torch.autograd.grad((a * b.detach()).sum(), a)
    assert torch.equal(grad, b.detach().expand(3, 4))
    if aliased:
        assert b._base is a
        (grad,) = torch.autograd.grad(b.sum(), a)
        assert grad.sum() == 4


@pytest.mark.parametrize("sizes", [None, {"L['x'].size()[0]": 5}])
def test_a_storage_without_bytes_has_none_at_other_sizes(sizes: dict[str, int] | None) -> None:
    """Memory that had been freed when the frame was recorded is not allocated."""
    x = torch.randn(3, 4)
    x.untyped_storage().resize_(0)
    capture = only_capture_of(
        lambda x, y: (torch.empty_like(x), y), x, torch.randn(3), dynamic=True
    )
    tensors = [t for t in capture.materialize(sizes=sizes) if isinstance(t, torch.Tensor)]
    assert tensors[0].shape == (5 if sizes else 3, 4)
    assert tensors[0].untyped_storage().nbytes() == 0


def test_aliasing_is_recorded() -> None:
    """A write through one materialized alias shows where a write to the original's would."""
    base = torch.zeros(4, 4)
    originals = [base, base[1], base.t(), torch.zeros(4, 4)]
    gm = torch.fx.symbolic_trace(lambda a, b, c, d: a)
    made = tfk.capture(gm, originals).materialize()
    for tensors in (originals, made):
        tensors[1].fill_(7)
    assert [bool((m[..., 1, :] == 7).all()) if m.dim() == 2 else True for m in made[:1]] == [True]
    assert torch.equal(made[2][:, 1], torch.full((4,), 7.0))
    assert not (made[3] == 7).any()


def test_the_same_seed_gives_the_same_data() -> None:
    """Data of materialized inputs is a function of the seed alone."""
    capture = identity_of(torch.randn(3, 4))
    assert torch.equal(capture.materialize(seed=3)[0], capture.materialize(seed=3)[0])
    assert not torch.equal(capture.materialize(seed=3)[0], capture.materialize(seed=4)[0])


def _sized(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 5:
        return x @ y
    return x


def test_other_sizes_are_made_on_request() -> None:
    """A symbol is set by its name or by a source; strides and shared dims follow."""
    capture = only_capture_of(_sized, torch.randn(7, 3), torch.randn(3, 7), dynamic=True)
    inputs = capture.materialize(sizes={"L['x'].size()[0]": 9})
    x, y = (i for i in inputs if isinstance(i, torch.Tensor))
    assert x.shape == (9, 3)
    assert y.shape == (3, 9)
    assert y.stride() == (9, 1)
    (out,) = capture.compile("aot_eager")(*inputs)
    assert torch.allclose(out, x @ y)


def test_the_memory_limit_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each storage counts once; a tensor without one counts by its elements."""
    x = torch.zeros(10, 10)
    fakes = map(FakeTensorMode().from_tensor, (x, x.t(), torch.eye(5).to_sparse_coo()))
    capture = tfk.capture(torch.fx.symbolic_trace(lambda x, y, z: (x + y, z)), list(fakes))
    assert len(capture.materialize(max_bytes=500)) == 3
    with pytest.raises(tfk.CaptureError, match="expected at most 499 bytes; found 500"):
        capture.materialize(max_bytes=499)
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PAGE_SIZE": 7}.get(name, 70))
    with pytest.raises(tfk.CaptureError, match="expected at most 490 bytes; found 500"):
        capture.materialize()


def test_a_missing_device_is_refused() -> None:
    """The error contains the device and what to pass instead."""
    with FakeTensorMode():
        x = torch.empty(3, device="cuda:0")
    capture = identity_of(x)
    with pytest.raises(tfk.CaptureError, match="this machine has no such device"):
        capture.materialize()
    assert capture.materialize(device="cpu")[0].device.type == "cpu"


# --- kinds of tensors ---------------------------------------------------------------------------


def two(*size: int) -> TwoTensor:
    """Return a wrapper subclass."""
    return TwoTensor(torch.randn(*size), torch.randn(*size))


def jagged(**kwargs: Any) -> torch.Tensor:
    """Return a jagged tensor of lengths 2, 4 and 3."""
    rows = [torch.randn(n, 5) for n in (2, 4, 3)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, **kwargs)


def leaf() -> torch.Tensor:
    """Return a leaf that requires grad."""
    return torch.randn(4, 4, requires_grad=True)


def without(mode: Any, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return a tensor made in inference mode or without gradients."""
    with mode():
        return make()


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.randn(3, 4),
    "transposed": lambda: torch.randn(3, 4).t(),
    "expanded": lambda: torch.randn(3, 1).expand(3, 5),
    "view": lambda: torch.randn(6, 8)[1:, ::2],
    "view of view": lambda: torch.randn(6, 8)[1:].view(-1)[3:],
    "leaf": leaf,
    "view of leaf": lambda: leaf()[:2],
    "view without grad": lambda: without(torch.no_grad, lambda: leaf()[1:]),
    "non-leaf": lambda: leaf() * 2,
    "view of non-leaf": lambda: (leaf() * 2)[1:],
    "parameter": lambda: torch.nn.Parameter(torch.randn(3)),
    "integer": lambda: torch.randint(0, 9, (3, 3)),
    "boolean": lambda: torch.rand(3) > 0.5,
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "real view": lambda: torch.view_as_real(torch.randn(3, dtype=torch.complex64)),
    "half": lambda: torch.randn(3).half(),
    "float8": lambda: torch.randn(4).to(torch.float8_e4m3fn),
    "scalar": lambda: torch.randn(()),
    "empty": lambda: torch.empty(0, 3),
    "float4": lambda: torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "bits": lambda: torch.zeros(4, dtype=torch.uint8).view(torch.bits8),
    "inference": lambda: without(torch.inference_mode, lambda: torch.randn(3)),
    "coo": lambda: torch.randn(4, 6).to_sparse(),
    "coo, hybrid": lambda: torch.randn(4, 6, 3).to_sparse(2),
    "coo, only dense dims": lambda: torch.sparse_coo_tensor(
        torch.zeros((0, 1), dtype=torch.int64), torch.ones(1, 3), (3,), is_coalesced=True
    ),
    "coo, not coalesced": lambda: torch.sparse_coo_tensor([[0, 0], [1, 1]], torch.ones(2), (3, 4)),
    "coo, empty": lambda: torch.zeros(0, 3).to_sparse(),
    "coo, integers": lambda: torch.ones(3, 4, dtype=torch.int8).to_sparse(),
    "coo, complex leaf": lambda: torch.ones(3, 4, dtype=torch.cfloat).to_sparse().requires_grad_(),
    "coo, history": lambda: torch.randn(4, 6).to_sparse().requires_grad_() * 2,
    "csr": lambda: torch.randn(4, 6).to_sparse_csr(),
    "csr, batches and dense dims": lambda: torch.randn(2, 4, 6, 3).to_sparse_csr(dense_dim=1),
    "csr, short indices": lambda: torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2], dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.ones(2),
        (2, 3),
    ),
    "csc": lambda: torch.randn(4, 6).to_sparse_csc(),
    "bsr": lambda: torch.randn(2, 4, 6, 3).to_sparse_bsr((2, 3), dense_dim=1),
    "bsc": lambda: torch.randn(4, 6).to_sparse_bsc((2, 3)),
    "mkldnn": lambda: torch.randn(4, 6).to_mkldnn(),
    "wrapper": lambda: two(3, 4),
    "wrapper, parameter": lambda: torch.nn.Parameter(two(3, 4)),
    "wrapper, history": lambda: two(3, 4).requires_grad_() * 2,
    "wrapper of wrappers": lambda: TwoTensor(two(3, 4), two(3, 4)),
    "wrapper, view": lambda: two(3, 4)[1:].t(),
    "wrapper, view with grad": lambda: two(3, 4).requires_grad_()[1:].t(),
    "jagged": jagged,
    "jagged, leaf": lambda: jagged(requires_grad=True),
    "jagged, history": lambda: jagged(requires_grad=True) * 2,
    "jagged, view": lambda: jagged(requires_grad=True).transpose(1, 2),
    "view of jagged": lambda: jagged().values(),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tensor_is_made_as_recorded(kind: str) -> None:
    """The record of a made tensor is the record it was made of, without marks."""
    original = KINDS[kind]()
    (made,) = identity_of(original).materialize()
    records = [without_marks(MetaTensorDescriber().describe_tensor(t)) for t in (made, original)]
    assert tfk.dumps(records[0]) == tfk.dumps(records[1])


def without_marks(d: MetaTensorDesc) -> MetaTensorDesc:
    """Return the record, and those of its base and inner tensors, without Dynamo's marks."""
    subclass = d.subclass
    if subclass is not None:
        parts = tuple((name, without_marks(part)) for name, part in subclass.tensors)
        subclass = msgspec.structs.replace(subclass, tensors=parts)
    base = None if d.base is None else without_marks(d.base)
    return msgspec.structs.replace(d, marks=None, base=base, subclass=subclass)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_made_jagged_tensors_can_be_computed_with() -> None:
    """Offsets start at zero, end with the values, and have the recorded minimum and maximum."""
    (made,) = identity_of(jagged()).materialize()
    lengths = made.offsets().diff()
    assert made.offsets()[0] == 0
    assert made.offsets()[-1] == made.values().shape[0] == 9
    assert (lengths.min(), lengths.max()) == (2, 4)
    assert made.sum().isfinite()


FRAMES: dict[str, Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "wrapper": lambda: (lambda x: x * 2 + 1, (two(3, 4),)),
    "wrapper, parameter": lambda: (torch.sin, (torch.nn.Parameter(two(3, 4)),)),
    # With dynamic=True torch itself fails on such an input.
    "wrapper, view, static": lambda: (torch.cos, (two(4, 4)[1:],)),
    "jagged": lambda: (lambda x: x * 2, (jagged(),)),
    "two jagged on the same offsets": lambda: _two_jagged(),
}


def _two_jagged() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    x = jagged(requires_grad=True)
    return (lambda x, y: (x * 2 + y).sin()), (x, x.detach() * 3)


def test_a_size_that_an_input_binds_by_a_quotient_can_be_requested() -> None:
    """An input of ``4 * u0`` elements binds ``u0``, which is then no number that the graph computes."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        count = mode.shape_env.create_unbacked_symint()
        torch._check(count >= 2)
        x = torch.empty(4 * count)
    graph = torch.fx.Graph()
    placeholder = graph.placeholder("x")
    path = (CallMethodKey("size"), SequenceKey(0), DivideByKey(4))
    placeholder.meta.update(val=x, unbacked_bindings={count.node.expr: path})
    result = graph.call_function(torch.ops.aten.sin.default, (placeholder,))
    result.meta["val"] = x
    graph.output((result,))
    capture = tfk.capture(torch.fx.GraphModule({}, graph), [x])
    (made,) = capture.materialize(sizes={str(count.node.expr): 3})
    assert made.shape == (12,)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", FRAMES)
def test_frames_with_wrapper_subclasses_replay(kind: str, tmp_path: Path) -> None:
    """The compiled file gives the function's results on made-up inputs."""
    fn, args = FRAMES[kind]()
    capture = only_capture_of(fn, *args, dynamic="static" not in kind)
    capture.save(tmp_path / "x.fkf")
    loaded = tfk.Capture.load(tmp_path / "x.fkf")
    assert loaded.fingerprint() == capture.fingerprint()
    inputs = loaded.materialize(seed=0)
    (out,) = loaded.compile("aot_eager")(*inputs)
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    expected = fn(*tensors)
    assert type(out) is type(expected)
    for name in expected.__tensor_flatten__()[0]:
        torch.testing.assert_close(getattr(out, name), getattr(expected, name))
