"""The describer's fast paths give the records of the general path."""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from converted_checks import GeneralDescriber
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, Group, any_groups, is_refusal_of_torch, tensor_groups
from torch._dynamo import decorators
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nested import nested_tensor_from_jagged
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import torch_fakeify as tfk
from torch_fakeify.describe.describer import MetaTensorDescriber

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@given(tensor_groups(marks=True, dtypes=DTYPES))
def test_both_paths_agree(group: Group) -> None:
    """The fast path gives the record that the plain path gives, or leaves the tensor to it."""
    describer = MetaTensorDescriber()
    for t in group:
        plain = describer._describe_general(t, "$")
        assert describer.describe_tensor(t) == plain
        assert describer._describe_plain(t, "$") in (plain, None)


@given(any_groups(marks=True))
@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested tensors")
def test_a_describer_without_the_fast_path_gives_the_same(group: Group) -> None:
    """Equal records with equal ids, whatever was seen before; each describer forgets the dead."""
    describers = [MetaTensorDescriber(), GeneralDescriber()]
    for t in group * 2:
        fast, plain = (describer.describe_tensor(t) for describer in describers)
        assert fast == plain
    known = [{*d._tensors.entries} for d in describers]
    storages = [{*d._storages.entries} for d in describers]
    assert known[0] == known[1]
    assert storages[0] == storages[1]


@given(any_groups(marks=True))
@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested tensors")
def test_describing_leaves_the_attributes_of_tensors_alone(group: Group) -> None:
    """Also those of the tensors that a nested tensor is made of, which torch marks when it makes a view."""
    tensors = [*group]
    tensors += [inner for t in group for inner in inner_tensors(t)]
    tensors += [t._base for t in tensors if t._is_view() and t._base is not None]
    before = [copy.deepcopy(marks_of(t)) for t in tensors]
    describer = MetaTensorDescriber()
    for t in group:
        describer.describe_tensor(t)
    assert [marks_of(t) for t in tensors] == before


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_describing_a_nested_tensor_leaves_its_values_alone() -> None:
    """Torch marks the values of a nested tensor again whenever it makes a view of them."""
    values = torch.ones(6, 1, 1)
    nested = nested_tensor_from_jagged(values, torch.tensor([0, 2, 4, 6]))
    values._dynamo_propagated_dynamic_indices = {2}
    decorators.mark_dynamic(values, 1)
    before = copy.deepcopy(marks_of(values))
    d = MetaTensorDescriber().describe_tensor(nested)
    assert d.base is not None
    assert d.base.marks is not None
    assert (d.base.marks.propagated_dynamic, d.base.marks.dynamic) == ((2,), (1,))
    assert marks_of(values) == before


def inner_tensors(t: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors in a wrapper subclass."""
    if not is_traceable_wrapper_subclass(t):
        return []
    return [getattr(t, name) for name in t.__tensor_flatten__()[0]]


def marks_of(t: torch.Tensor) -> dict[str, Any]:
    """Return the attributes by which Dynamo marks dims."""
    return {n: v for n, v in vars(t).items() if "dynamo" in n and isinstance(v, (set, dict, bool))}


@given(any_groups(marks=True), tensor_groups(marks=True, dtypes=DTYPES))
@settings(max_examples=60)
@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor:UserWarning")  # torch's own
def test_a_describer_that_keeps_alive_gives_the_same(group: Group, plain: Group) -> None:
    """Equal records with equal ids, also of fake tensors, and of one that stands for another."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = torchs_fakes(mode, plain)
    weak, strong = MetaTensorDescriber(), MetaTensorDescriber(keep_alive=True)
    for t in [*group, *fakes] * 2:
        assert weak.describe_tensor(t) == strong.describe_tensor(t)
    first, other = weak.describe_tensor(group[0]), torch.empty(3)
    weak.alias(other, first)
    strong.alias(other, first)
    assert weak.describe_tensor(other) == strong.describe_tensor(other)
    assert weak.describe_tensor(other).id == first.id


def test_what_is_kept_alive_is_so_until_it_is_forgotten() -> None:
    """Then it goes at once, and what comes again gets new numbers."""
    describer = MetaTensorDescriber(keep_alive=True)
    t, still_there = torch.empty(3), torch.empty(4)
    before, tensor = describer.describe_tensor(still_there), weakref.ref(t)
    storage = weakref.ref(t.untyped_storage())
    number = describer.describe_tensor(t).id
    del t
    assert tensor() is not None
    assert storage() is not None
    assert describer.describe_tensor(tensor()).id == number
    describer.forget()
    assert tensor() is storage() is None
    after = describer.describe_tensor(still_there)
    assert before.id < number < after.id
    assert after.storage.id > before.storage.id


def torchs_fakes(mode: FakeTensorMode, group: Group) -> list[torch.Tensor]:
    """The fake tensors that torch's own ``from_tensor`` makes of a group, which refuses some tensors."""
    fakes = []
    for i, t in enumerate(group):
        if t.dim() == 0 and t.untyped_storage().nbytes() < (t.storage_offset() + 1) * t.itemsize:
            continue  # torch would read the bytes of the scalar, which is outside of its storage
        try:
            fakes.append(
                mode.from_tensor(t, source=LocalSource(f"x{i}") if mode.shape_env else None)
            )
        except RuntimeError as error:
            if not is_refusal_of_torch(error):
                raise
    return fakes


@given(tensor_groups(marks=True, dtypes=DTYPES), st.booleans())
@settings(max_examples=60)
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor:UserWarning")  # torch's own
def test_both_paths_agree_on_fake_tensors(group: Group, symbolic: bool) -> None:
    """The fast path gives the record of a fake tensor that the plain path gives."""
    mode = FakeTensorMode(shape_env=ShapeEnv() if symbolic else None)
    describer = MetaTensorDescriber()
    for f in torchs_fakes(mode, group):
        plain = describer._describe_general(f, "$")
        assert describer.describe_tensor(f) == plain
        assert describer._describe_plain(f, "$") in (plain, None)


@given(tensor_groups(marks=True, dtypes=DTYPES), st.booleans())
@settings(max_examples=60)
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor:UserWarning")  # torch's own
def test_settled_fake_tensors_have_the_same_records(group: Group, two_envs: bool) -> None:
    """What tensors of one layout share is what each has alone, whosever ``ShapeEnv`` it is."""
    modes = [FakeTensorMode(shape_env=ShapeEnv()) for _ in range(1 + two_envs)]
    fakes = [fake for mode in modes for fake in torchs_fakes(mode, group)]
    fast, plain = MetaTensorDescriber(), GeneralDescriber()
    with fast.assume_unchanged(), plain.assume_unchanged():
        for f in fakes * 2:
            assert fast.describe_tensor(f) == plain.describe_tensor(f)


def test_settled_fake_tensors_share_what_is_equal() -> None:
    """A tensor has one record, and tensors of one layout one record of their sizes."""
    describer = MetaTensorDescriber()
    mode = FakeTensorMode(shape_env=ShapeEnv())
    t = mode.from_tensor(torch.empty(3, 4), source=LocalSource("x"))
    with mode:
        other, view = t + 1, t[1:]
    with describer.assume_unchanged():
        d, e, v = map(describer.describe_tensor, (t, other, view))
        assert describer.describe_tensor(t) is d is v.base
        assert e is not d
        assert e.size is d.size
        assert e.stride is d.stride
        assert e.symbols is d.symbols


def test_nothing_is_settled_for_ever() -> None:
    """What a ``ShapeEnv`` learned since shows in the next record."""
    describer = MetaTensorDescriber()
    env = ShapeEnv()
    t = FakeTensorMode(shape_env=env).from_tensor(torch.empty(3), source=LocalSource("x"))
    with describer.assume_unchanged():
        before = describer.describe_tensor(t)
    torch._check(t.size(0) <= 7)
    env.evaluate_expr(t.size(0).node.expr >= 3)
    with describer.assume_unchanged():
        inside = describer.describe_tensor(t)
    for after in (inside, describer.describe_tensor(t)):
        assert after.symbols[0].lower == 3
        assert after.symbols[0].upper == 7
    assert before.symbols[0].upper != 7


def test_a_policy_does_not_change_the_path() -> None:
    """With a source and a context the fast path gives what the plain path gives, hints included."""
    marked = torch.empty(3, 4)
    torch._dynamo.mark_dynamic(marked, 0)
    static = torch.nn.Parameter(torch.empty(3, 4))
    torch._dynamo.mark_static_address(static)
    buffer = torch.nn.Buffer(torch.empty(3, 4), persistent=False)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.STATIC] * 2)
    tensors = [torch.empty(3, 4), marked, static, buffer, static[1:], torch.tensor(5)] * 2
    fast, plain = MetaTensorDescriber(), GeneralDescriber()
    for i, t in enumerate(tensors):
        policy = context if t.ndim else None
        records = [
            describer.describe_tensor(t, source=LocalSource(f"x{i}"), symbolic_context=policy)
            for describer in (fast, plain)
        ]
        assert records[0] == records[1]
        assert records[0].source is not None
        assert records[0].scalar_hint == (None if t.ndim else 5)
        if t.is_leaf and t.ndim:
            assert fast._describe_plain(t, "$") is not None


def test_the_fast_path_takes_fake_tensors() -> None:
    """What node metadata consists of goes the fast way: symbolic, views, results of operators."""
    describer = MetaTensorDescriber()
    mode = FakeTensorMode(shape_env=ShapeEnv())
    t = mode.from_tensor(torch.empty(3, 4), source=LocalSource("x"))
    with mode:
        w = mode.from_tensor(torch.nn.Parameter(torch.empty(3)), source=LocalSource("w"))
        for each in (t, t[1:], t + 1, torch.nn.Parameter(t), (t @ t.t()).sum(), w * 2, w[1:]):
            plain = describer._describe_general(each, "$")
            assert describer._describe_plain(each, "$") == plain


def test_the_fast_path_takes_parameters_plain_tensors_and_views() -> None:
    """What models consist of goes the fast way."""
    describer = MetaTensorDescriber()
    t = torch.empty(3, 4)
    p = torch.nn.Parameter(t)
    for each in (t, t[1:], p, p.detach()[1:], torch.nn.Buffer(t), t.to("meta")):
        describer.forget()
        d = describer.describe_tensor(each)
        assert describer._describe_plain(each, "$") == d


def _alike() -> dict[str, Callable[[], torch.Tensor]]:
    """Tensors of one size, each unlike a plain one in something."""

    def grown(t: torch.Tensor) -> torch.Tensor:
        t.requires_grad_().grad = torch.ones(4, 4)
        return t

    def of_grad_dtype(t: torch.Tensor) -> torch.Tensor:
        t.requires_grad_().grad_dtype = torch.float64
        return t

    def inferred() -> torch.Tensor:
        with torch.inference_mode():
            return torch.empty(4, 4)

    def seen_in_inference() -> torch.Tensor:
        base = torch.empty(4, 4, requires_grad=True)
        with torch.inference_mode():
            return base.view(4, 4)

    def marked(t: torch.Tensor) -> torch.Tensor:
        torch._dynamo.mark_dynamic(t, 0)
        return t

    e = functools.partial(torch.empty, 4, 4)
    return {
        "plain": e,
        "leaf": functools.partial(e, requires_grad=True),
        "non-leaf": lambda: e(requires_grad=True) * 2,
        "transposed": lambda: e().t(),
        "offset": lambda: torch.empty(5, 4)[1:],
        "view of a leaf": lambda: e(requires_grad=True).view(4, 4),
        "detached": lambda: e(requires_grad=True).detach(),
        "expanded": lambda: torch.empty(4).expand(4, 4),
        "double": lambda: e(dtype=torch.float64),
        "int": lambda: e(dtype=torch.int64),
        "complex": lambda: e(dtype=torch.complex64),
        "conj": lambda: e(dtype=torch.complex64).conj(),
        "negative": lambda: e(dtype=torch.complex64).conj().imag,
        "zero": lambda: torch._efficientzerotensor(4, 4),
        "meta": lambda: e(device="meta"),
        "sparse": lambda: e().to_sparse(),
        "view of sparse": lambda: torch.ones(4, 4).to_sparse(1).values(),
        "inference": inferred,
        "view by inference": seen_in_inference,
        "parameter": lambda: torch.nn.Parameter(e()),
        "parameter without": lambda: torch.nn.Parameter(e(), requires_grad=False),
        "buffer": lambda: torch.nn.Buffer(e()),
        "grad": lambda: grown(e()),
        "grad dtype": lambda: of_grad_dtype(e()),
        "marked": lambda: marked(e()),
        "nested": lambda: torch.nested.nested_tensor([torch.empty(4)] * 4),
        "fake": lambda: FakeTensorMode().from_tensor(e()),
        "functional": lambda: torch._to_functional_tensor(e()),
    }


@contextlib.contextmanager
def _functionalized() -> Iterator[None]:
    torch._enable_functionalization(reapply_views=True)
    try:
        yield
    finally:
        torch._disable_functionalization()


_CALLS: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "below autograd": torch._C._AutoDispatchBelowAutograd,
    "autocast": lambda: torch.autocast("cpu"),
    "dual level": torch.autograd.forward_ad.dual_level,
    "no dispatch": torch._C._DisableTorchDispatch,
    "fake mode": FakeTensorMode,
    "functionalized": _functionalized,
}


def _record_or_refusal(describer: MetaTensorDescriber, t: torch.Tensor) -> Any:
    try:
        return describer.describe_tensor(t)
    except tfk.UnsupportedTensorError as error:
        return type(error)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("around_first", _CALLS)
@pytest.mark.parametrize("around", _CALLS)
def test_a_layout_that_is_known_is_told_from_all_others(around_first: str, around: str) -> None:
    """Whatever was described first, where it was, and where the next one of the size is met."""
    tensors = {name: make() for name, make in _alike().items()}
    refused = []
    for first in tensors.values():
        fast, plain = MetaTensorDescriber(), GeneralDescriber()
        with _CALLS[around_first]():
            for describer in (fast, plain):
                with contextlib.suppress(tfk.UnsupportedTensorError):
                    describer.describe_tensor(first)
        with _CALLS[around]():
            for name, t in tensors.items():
                expected = _record_or_refusal(plain, t)
                if isinstance(expected, type):
                    refused.append(name)
                assert _record_or_refusal(fast, t) == expected, name
                assert _record_or_refusal(fast, t) == expected, name
    assert {*refused} <= {"nested", "zero", "view of sparse"}


def test_symbolic_sizes_without_a_mode_are_no_known_layout() -> None:
    """Sizes, strides or the offset of a tensor that is not fake; symbols have no hash."""
    n = ShapeEnv().create_unbacked_symint()
    whole = torch.empty(10, device="meta")
    for t in (
        torch.empty(n, 3, device="meta"),
        torch.empty_strided((2, 3), (n, 1), device="meta"),
        whole.as_strided((2, 3), (3, 1), n),
    ):
        describer = MetaTensorDescriber()
        describer.describe_tensor(torch.empty(2, 3, device="meta"))
        plain = describer._describe_general(t, "$")
        for _ in range(2):
            assert describer.describe_tensor(t) == plain
        assert tfk.loads(tfk.dumps([plain])) == [plain]


def test_a_describer_remembers_so_many_layouts() -> None:
    """A describer that lives long does not grow by the sizes that it meets."""
    describer = MetaTensorDescriber()
    for n in range(20_000):
        describer.describe_tensor(torch.empty(n, device="meta"))
    assert max(len(known) for known in describer._layouts.of_class.values()) <= 4096
