"""Valid captures of several kinds, as bytes: what hostile files are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import torch
from captured_frames import captures_of
from golden_exports import export_cases
from jagged_examples import jagged_attention
from program_zoo import Program, programs
from quiet import quiet
from subclass_zoo import fake_world
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.two_tensor import TwoTensor

import torch_fakeify as tfk
from torch_fakeify.records import fake_kernel as fk
from torch_fakeify.serialization.container import pack_container
from torch_fakeify.serialization.document import Encoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

FEW = ("shape_arithmetic", "base_and_view", "sparse", "cond", "item_with_checks", "two_tensors")
"""Enough for a short run."""

ZOO = (
    *("all_static", "shape_arithmetic", "divisible", "duck_shapes", "base_and_view"),
    *("views_that_require_grad", "complex_view_of_real", "conj_and_neg", "cond"),
    *("while_loop", "scan", "item_with_checks", "nonzero_arithmetic", "mark_unbacked"),
    *("mark_dynamic", "vmap", "autocast_inside", "inference_tensors", "float_arguments"),
    *("bool_none_and_str", "structured_arguments", "autograd_function", "numpy_code"),
    *("strides_and_offsets", "sub_byte_dtypes", "checkpointing", "parameter_views"),
    *("read_gradients", "no_tensor_inputs", "equal_by_guard", "custom_op", "kv_cache"),
)
"""Programs of the table of programs, of every kind."""


def pack(desc: Any) -> bytes:
    """The bytes of a capture file."""
    members = Encoder().add("capture", desc).members()
    return pack_container(members, producer="torch_fakeify 0.1", torch=desc.torch_version)


def seeds(names: Iterable[str] | None = None) -> dict[str, bytes]:
    """Captures by name; all of them, or those that are named."""
    wanted = [*ZOO, *_OTHERS] if names is None else list(names)
    return {name: pack(_capture(name).desc) for name in wanted}


def _capture(name: str) -> Any:
    if name in _OTHERS:
        return _OTHERS[name]()
    return _first_frame(programs()[name])


def _first_frame(program: Program) -> Any:
    with program.active():
        fn, *calls = program.make()
        return _compiled(fn, calls, **program.options)


def _compiled(fn: Callable[..., Any], calls: Iterable[tuple[Any, ...]], **options: Any) -> Any:
    torch.manual_seed(0)
    with quiet():
        return captures_of(fn, *calls, settings={"constants": "small"}, **options)[-1]


def _two_tensors() -> Any:
    def fn(x: Any, y: Any) -> Any:
        return (x * 2 + y).reshape(-1) if x.shape[0] > 2 else x

    x = TwoTensor(torch.randn(4, 3), torch.randn(4, 3))
    return _compiled(fn, [(x, TwoTensor(torch.randn(4, 3), torch.randn(4, 3)))], dynamic=True)


def _jagged() -> Any:
    fn, *calls = jagged_attention()
    return _compiled(fn, calls[:1], dynamic=True)


def _traced(fn: Callable[..., Any], args: Iterable[Any]) -> Any:
    """A graph that nobody ran, with fake inputs."""
    gm = torch.fx.symbolic_trace(fn)
    with quiet():
        mode = FakeTensorMode(shape_env=ShapeEnv())
        return tfk.capture(gm, [mode.from_tensor(arg) for arg in args])


def _sparse() -> Any:
    def fn(a: Any, b: Any, c: Any, d: Any) -> Any:
        return a.sin(), b.sum(), c + 1, d.t()

    with quiet():
        x = torch.eye(4)
        args = (x.to_sparse_csr(), x.to_sparse_bsr((2, 2)), x.to_sparse_coo(), x.to_mkldnn())
    return _traced(fn, args)


def _aten() -> Any:
    def fn(x: Any, y: Any) -> Any:
        z = torch.cat([x, y]) + torch.tensor([1.0, 2.0, 3.0])
        return z.view(-1, z.shape[1]) @ z.t(), z.sum().item()

    args = (torch.randn(4, 3), torch.randn(5, 3))
    gm: Any = make_fx(fn, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*args)
    fakes = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    return tfk.capture(gm, fakes, constants="small")


def _exported() -> Any:
    return export_cases()["exported_program"]()


def _failed() -> Any:
    try:
        raise ValueError("no such kernel\nof two lines")
    except ValueError as error:
        return _capture("duck_shapes").with_failure(error, backend="inductor", seconds=1.5)


def _functorch() -> Any:
    found: list[Any] = []

    def body(x: Any, y: Any) -> Any:
        found.append(tfk.capture(torch.fx.symbolic_trace(lambda a, b: a + b.sin()), [x, y]))
        return (x * y).sum()

    mode = FakeTensorMode(shape_env=ShapeEnv())
    x, y = mode.from_tensor(torch.randn(3, 4)), mode.from_tensor(torch.randn(4))
    with mode:
        torch.func.vmap(torch.func.grad(body), in_dims=(0, None))(x, y)
    return found[0]


def _gone() -> Any:
    """A frame with an operator that is no longer registered."""
    schema = "twice(Tensor x, SymInt by=2, *, str? mode=None) -> Tensor"
    with torch.library._scoped_library("gone", "DEF") as library:
        library.define(schema)
        library.impl("twice", lambda x, by=2, mode=None: torch.empty_like(x), "Meta")
        library.impl("twice", lambda x, by=2, mode=None: x * by, "CPU")
        return _compiled(
            lambda x: torch.ops.gone.twice(x, x.shape[0], mode="fast").cos(),
            [(torch.randn(3, 4),)],
            dynamic=True,
        )


def _gone_kinds() -> Any:
    """One with operators that return several tensors, lists, nothing, and write into arguments."""
    with torch.library._scoped_library("gone", "DEF") as library:
        library.define("pair(Tensor x, int[] dims, Scalar s) -> (Tensor, Tensor)")
        library.define("parts(Tensor x, ScalarType? dtype=None) -> Tensor[]")
        library.define("bump(Tensor(a!) x, float by) -> ()")
        for name, function in {
            "pair": lambda x, dims, s: (x.new_empty(x.shape[0], 2), x.new_empty(2, x.shape[1])),
            "parts": lambda x, dtype=None: [torch.empty_like(x), torch.empty_like(x)],
            "bump": lambda x, by: None,
        }.items():
            library.impl(name, function, "CompositeExplicitAutograd")

        def fn(x: Any) -> Any:
            y = x * 1
            torch.ops.gone.bump(y, 0.5)
            one, other = torch.ops.gone.pair(y, [1, 0], 3)
            return one.sum() + other.sum() + torch.ops.gone.parts(y)[1].sum()

        return _compiled(fn, [(torch.randn(3, 4),)], dynamic=True)


def _ranks() -> Any:
    """One with the name of a group in a call, which is another one on other ranks."""
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh

    with fake_world():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return _compiled(
            lambda x: functional.all_reduce(x.sin(), "sum", (mesh, 0)), [(torch.ones(2),)]
        )


def _gone_inferred() -> Any:
    """One with an operator whose fake kernel was inferred."""
    x, new = fk.Arg("x"), fk.Contiguous()
    half = fk.Binary("ceil", fk.Size(x, -1), fk.Number(fk.Arg("by")))
    size = fk.Concat((fk.Slice(fk.Shape(x), None, fk.Integer(-1)), fk.Items((half,))))
    long = fk.Case(fk.Rank(x), ((1, fk.Shape(x)), (2, size)))
    dtype = fk.DtypeTable(x, (("float32", "float64"), ("int64", "float64")))
    kernel = fk.FakeKernelDesc(
        operator="gone::halves",
        arguments=("x", "by"),
        checks=(fk.Check(condition=fk.Compared(">=", fk.Ndim(x), fk.Integer(1))),),
        results=(fk.NewTensor(long, new, dtype, fk.DeviceOf(x)),),
    )
    with torch.library._scoped_library("gone", "DEF") as library:
        library.define("halves(Tensor x, SymInt by) -> Tensor")
        library.impl(
            "halves",
            lambda x, by: x.new_empty(x.shape[0], -(-x.shape[1] // by), dtype=torch.float64),
            "CompositeExplicitAutograd",
        )
        frame = _compiled(
            lambda x: torch.ops.gone.halves(x, 2).cos(), [(torch.randn(3, 4),)], dynamic=True
        )
    operators = (msgspec.structs.replace(frame.desc.operators[0], fake=kernel),)
    return tfk.Capture(msgspec.structs.replace(frame.desc, operators=operators))


_OTHERS: dict[str, Callable[[], Any]] = {
    "two_tensors": _two_tensors,
    "jagged": _jagged,
    "sparse": _sparse,
    "aten": _aten,
    "exported": _exported,
    "failed": _failed,
    "functorch": _functorch,
    "gone": _gone,
    "gone_kinds": _gone_kinds,
    "gone_inferred": _gone_inferred,
    "ranks": _ranks,
}
