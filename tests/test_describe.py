"""Describing tensors: what the records say, ids, refusals, and that both paths agree."""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, Group, any_groups, tensor_groups
from torch._dynamo.source import LocalSource, RandomValueSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import torch_fakeify as tfk
from torch_fakeify import _torch
from torch_fakeify.desc import MarksDesc, SymbolFactDesc
from torch_fakeify.describe import MetaTensorDescriber
from torch_fakeify.refusals import _ALIAS_KEYS, _FAKE_KEYS, _PLAIN_KEYS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._guards import Source


@given(tensor_groups(marks=True, dtypes=DTYPES))
def test_both_paths_agree(group: Group) -> None:
    """The fast path gives the record that the plain path gives, or leaves the tensor to it."""
    describer = MetaTensorDescriber()
    for t in group:
        plain = describer._describe_any(t, "$")
        assert describer.describe_tensor(t) == plain
        assert describer._describe_plain(t, "$") in (plain, None)


@given(any_groups(marks=True))
@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested tensors")
def test_a_describer_without_the_fast_path_gives_the_same(group: Group) -> None:
    """Equal records with equal ids, whatever was seen before; each describer forgets the dead."""
    describers = [MetaTensorDescriber(), MetaTensorDescriber(fast=False)]
    for t in group * 2:
        fast, plain = (describer.describe_tensor(t) for describer in describers)
        assert fast == plain
    known = [{*d._tensors.entries} for d in describers]
    storages = [{*d._storages.entries} for d in describers]
    assert known[0] == known[1]
    assert storages[0] == storages[1]


@given(any_groups(marks=True), tensor_groups(marks=True, dtypes=DTYPES))
@settings(max_examples=60)
@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor:UserWarning")  # torch's own
def test_a_describer_that_keeps_alive_gives_the_same(group: Group, plain: Group) -> None:
    """Equal records with equal ids, also of fake tensors, and of one that stands for another."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = [
        mode.from_tensor(t, source=LocalSource(f"x{i}"))
        for i, t in enumerate(filter(_has_its_item, plain))
    ]
    weak, strong = MetaTensorDescriber(), MetaTensorDescriber(keep_alive=True)
    for t in [*group, *fakes] * 2:
        assert weak.describe_tensor(t) == strong.describe_tensor(t)
    first, other = weak.describe_tensor(group[0]), torch.empty(3)
    weak.same(other, first)
    strong.same(other, first)
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


def test_the_fast_path_can_be_switched_off() -> None:
    """With ``fast=False`` no tensor takes it, bases and gradients neither."""
    describer = MetaTensorDescriber(fast=False)
    t = torch.empty(3, requires_grad=True)
    t.grad = torch.empty(3)
    describer._describe_plain = None  # type: ignore[assignment]
    assert describer.describe_tensor(t[1:]).base.grad is not None


def _has_its_item(t: torch.Tensor) -> bool:
    """Whether a scalar has the bytes that torch reads when it makes a fake tensor of it."""
    return t.dim() > 0 or t.untyped_storage().nbytes() >= (t.storage_offset() + 1) * t.itemsize


@given(tensor_groups(marks=True, dtypes=DTYPES), st.booleans())
@settings(max_examples=60)
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor:UserWarning")  # torch's own
def test_both_paths_agree_on_fake_tensors(group: Group, symbolic: bool) -> None:
    """The fast path gives the record of a fake tensor that the plain path gives."""
    mode = FakeTensorMode(shape_env=ShapeEnv() if symbolic else None)
    describer = MetaTensorDescriber()
    for i, t in enumerate(filter(_has_its_item, group)):
        f = mode.from_tensor(t, source=LocalSource(f"x{i}") if symbolic else None)
        plain = describer._describe_any(f, "$")
        assert describer.describe_tensor(f) == plain
        assert describer._describe_plain(f, "$") in (plain, None)


@given(tensor_groups(marks=True, dtypes=DTYPES), st.booleans())
@settings(max_examples=60)
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor:UserWarning")  # torch's own
def test_settled_fake_tensors_have_the_same_records(group: Group, two_envs: bool) -> None:
    """What tensors of one layout share is what each has alone, whosever ``ShapeEnv`` it is."""
    modes = [FakeTensorMode(shape_env=ShapeEnv()) for _ in range(1 + two_envs)]
    fakes = [
        mode.from_tensor(t, source=LocalSource(f"x{i}"))
        for mode in modes
        for i, t in enumerate(filter(_has_its_item, group))
    ]
    fast, plain = MetaTensorDescriber(), MetaTensorDescriber(fast=False)
    with fast.settled(), plain.settled():
        for f in fakes * 2:
            assert fast.describe_tensor(f) == plain.describe_tensor(f)


def test_settled_fake_tensors_share_what_is_equal() -> None:
    """A tensor has one record, and tensors of one layout one record of their sizes."""
    describer = MetaTensorDescriber()
    mode = FakeTensorMode(shape_env=ShapeEnv())
    t = mode.from_tensor(torch.empty(3, 4), source=LocalSource("x"))
    with mode:
        other, view = t + 1, t[1:]
    with describer.settled():
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
    with describer.settled():
        before = describer.describe_tensor(t)
    torch._check(t.size(0) <= 7)
    env.evaluate_expr(t.size(0).node.expr >= 3)
    with describer.settled():
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
    fast, plain = MetaTensorDescriber(), MetaTensorDescriber(fast=False)
    for i, t in enumerate(tensors):
        policy = context if t.ndim else None
        records = [
            describer.describe_tensor(t, source=LocalSource(f"x{i}"), symbolic_context=policy)
            for describer in (fast, plain)
        ]
        assert records[0] == records[1]
        assert records[0].source is not None
        assert records[0].scalar_hint == (None if t.ndim else 5)
        assert fast._describe_plain(t, "$") is not None


def test_the_fast_path_takes_fake_tensors() -> None:
    """What node metadata consists of goes the fast way: symbolic, views, results of operators."""
    describer = MetaTensorDescriber()
    mode = FakeTensorMode(shape_env=ShapeEnv())
    t = mode.from_tensor(torch.empty(3, 4), source=LocalSource("x"))
    with mode:
        w = mode.from_tensor(torch.nn.Parameter(torch.empty(3)), source=LocalSource("w"))
        for each in (t, t[1:], t + 1, torch.nn.Parameter(t), (t @ t.t()).sum(), w * 2, w[1:]):
            plain = describer._describe_any(each, "$")
            assert describer._describe_plain(each, "$") == plain


def test_the_fast_path_takes_parameters_plain_tensors_and_views() -> None:
    """What models consist of goes the fast way."""
    describer = MetaTensorDescriber()
    t = torch.empty(3, 4)
    p = torch.nn.Parameter(t)
    for each in (t, t[1:], p, p[1:], p * 2, torch.nn.Buffer(t), t.to("meta")):
        assert describer._describe_plain(each, "$") is not None


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
    }


_CALLS: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "below autograd": torch._C._AutoDispatchBelowAutograd,
    "autocast": lambda: torch.autocast("cpu"),
    "dual level": torch.autograd.forward_ad.dual_level,
    "no dispatch": torch._C._DisableTorchDispatch,
    "fake mode": FakeTensorMode,
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
        fast, plain = MetaTensorDescriber(), MetaTensorDescriber(fast=False)
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
    assert {*refused} <= {"nested", "zero"}


def test_a_describer_remembers_so_many_layouts() -> None:
    """A describer that lives long does not grow by the sizes that it meets."""
    describer = MetaTensorDescriber()
    for n in range(20_000):
        describer.describe_tensor(torch.empty(n, device="meta"))
    assert max(len(known) for known in describer._known.of_class.values()) <= 4096
    assert len(describer._sizes) <= 4096


# --- ids ----------------------------------------------------------------------------------------


def test_ids_are_stable_and_shared() -> None:
    """The same tensor or storage has the same id, in whatever tensor it is met."""
    describer = MetaTensorDescriber()
    base = torch.empty(4, 4)
    view, again = describer.describe_tensor(base[1:]), describer.describe_tensor(base)
    assert view.base == again
    assert view.base.storage is view.storage is again.storage
    assert describer.describe_tensor(base).id == again.id
    assert describer.describe_storage(base.untyped_storage()) is again.storage


def test_describing_keeps_nothing_alive() -> None:
    """A describer holds weak references, and forgets what died."""
    describer = MetaTensorDescriber()
    t = torch.empty(4)
    describer.describe_tensor(t[:2])
    tensor, storage = weakref.ref(t), weakref.ref(t.untyped_storage())
    del t
    gc.collect()
    assert tensor() is None
    assert storage() is None
    assert not describer._tensors.entries
    assert not describer._storages.entries


def test_ids_of_the_dead_are_not_given_again() -> None:
    """20,000 tensors one after another, most of them at the same address, all have ids of their own."""
    describer = MetaTensorDescriber()
    kept = torch.empty(2)
    first = describer.describe_tensor(kept)
    seen, storages, addresses = {first.id}, {first.storage.id}, set()
    for _ in range(20_000):
        t = torch.empty(1)
        addresses.add(id(t))
        d = describer.describe_tensor(t)
        seen.add(d.id)
        storages.add(d.storage.id)
    assert len(seen) == len(storages) == 20_001
    assert len(addresses) < 1_000
    assert describer.describe_tensor(kept) == first
    del t
    assert len(describer._tensors.entries) == len(describer._storages.entries) == 1


def test_ids_survive_the_python_wrapper() -> None:
    """A tensor and a storage that only C++ holds for a while come back with their ids."""
    describer = MetaTensorDescriber()
    x = torch.empty(3, requires_grad=True)
    x.grad = torch.empty(3)
    d = describer.describe_tensor(x)
    gc.collect()
    [torch.empty(3) for _ in range(100)]
    assert describer.describe_tensor(x.grad) == d.grad
    base = torch.empty(4)
    view = base[1:]
    d = describer.describe_tensor(base)
    del base
    gc.collect()
    assert describer.describe_tensor(view._base) == d


def test_a_resurrected_tensor_is_not_taken_for_another() -> None:
    """A tensor saved by its finalizer's cycle gets a new id or keeps its own, never another's."""
    describer = MetaTensorDescriber()
    saved = []

    class Saver:
        def __init__(self, t: torch.Tensor) -> None:
            self.t = t

        def __del__(self) -> None:
            saved.append(self.t)

    t = torch.empty(1)
    t.saver = Saver(t)
    old = describer.describe_tensor(t).id
    other = torch.empty(1)
    other_id = describer.describe_tensor(other).id
    del t
    gc.collect()
    (t,) = saved
    new = describer.describe_tensor(t).id
    assert new == describer.describe_tensor(t).id
    assert new != other_id
    assert new >= old


@pytest.mark.parametrize("keep_alive", [False, True])
def test_a_storage_that_changes_its_size_keeps_its_id(keep_alive: bool) -> None:
    """Resizing a storage changes its record and not its number."""
    describer = MetaTensorDescriber(keep_alive=keep_alive)
    t = torch.empty(4)
    before = describer.describe_tensor(t).storage
    t.untyped_storage().resize_(0)
    after = describer.describe_tensor(t).storage
    assert (before.id, before.nbytes, after.nbytes) == (after.id, 16, 0)


# --- what the records say -----------------------------------------------------------------------


def test_gradients_nest() -> None:
    """Gradients are recorded with their own gradients and gradient dtype."""
    x = torch.empty(3, requires_grad=True)
    x.grad_dtype = None
    y = torch.empty(3, requires_grad=True)
    y.grad = torch.empty(3, 1)[:, 0].requires_grad_()
    assert tfk.describe_tensor(x).grad_dtype == "any"
    d = tfk.describe_tensor(y)
    assert (d.grad.is_view, d.grad.requires_grad, d.grad.stride, d.grad_dtype) == (
        True,
        True,
        (1,),
        None,
    )


def test_marks_are_carried_in_full() -> None:
    """Everything that Dynamo's `mark_*` leave on a tensor is in the record."""
    decorators = torch._dynamo.decorators
    t = torch.empty(8, 8, 8, 8, 8)
    # In this order: each forgets some of what the other left, and this keeps most.
    decorators.mark_unbacked(t, 1, shape_id="batch", min=1, hint_override=5)
    decorators.mark_dynamic(t, 0, min=2, max=64, hint_override=9, specialize_on=[lambda n: n == 8])
    decorators.mark_unbacked(t, 2, strict=True)
    decorators.maybe_mark_dynamic(t, 3)
    decorators.mark_static(t, 4)
    decorators.mark_static_address(t, guard=True)
    marks = tfk.describe_tensor(t).marks
    assert marks == MarksDesc(
        dynamic=(0,),
        dynamic_range=((0, 2, 64),),
        weak_dynamic=(3,),
        static=(4,),
        unbacked=(1,),
        strict_unbacked=(2,),
        unbacked_bounds=((1, 1, None),),
        shape_ids=((1, "batch"),),
        hint_overrides=((0, 9),),
        specialize_on=marks.specialize_on,
        static_input_type="guarded",
    )
    ((dim, (condition,)),) = marks.specialize_on
    assert dim == 0
    assert condition.nodes[-1].function == "Eq"


def test_every_mark_attribute_of_dynamo_is_known() -> None:
    """No function of `torch._dynamo.decorators` sets an attribute that is not handled."""
    import inspect
    import re

    from torch_fakeify import marks

    source = inspect.getsource(torch._dynamo.decorators)
    found = set(re.findall(r"\bt\.(_\w*(?:dynamo|specialize)\w*)\b", source))
    # Of a module class, and a misspelling in a `hasattr` of torch's.
    found -= {"_dynamo_marked_static", "_specialized_on"}
    known = set(marks._INDICES) | marks._OTHERS
    assert found <= known
    assert known - found == {"_dynamo_propagated_dynamic_indices"}


def test_item_values_are_recorded_only_where_torch_tracks_them() -> None:
    """0-dim CPU integers and doubles with a source have the value of `item()`."""
    source = LocalSource("x")

    def hint(t: torch.Tensor, s: Source = source) -> int | float | None:
        return tfk.describe_tensor(t, source=s).scalar_hint

    assert hint(torch.tensor(7)) == 7
    assert hint(torch.tensor(2.5, dtype=torch.float64)) == 2.5
    assert hint(torch.tensor(2.5)) is None
    assert hint(torch.tensor([7])) is None
    assert hint(torch.tensor(float("nan"), dtype=torch.float64)) is None
    assert hint(torch.tensor(7), RandomValueSource(0)) is None
    assert tfk.describe_tensor(torch.tensor(7)).scalar_hint is None
    empty = torch.tensor(7)
    empty.untyped_storage().resize_(0)
    assert hint(empty) is None


def test_a_fake_tensor_is_recorded_with_what_its_shape_env_knows() -> None:
    """Sizes are expressions with hints; the record has ranges, and describing adds no guard."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = mode.from_tensor(torch.empty(3, 5), source=LocalSource("x"))
    with mode:
        unbacked = torch.nonzero(fake[0])
    d = tfk.describe_tensor(fake)
    assert (d.is_fake, [n.hint for n in d.size], d.stride[0].hint) == (True, [3, 5], 5)
    assert d.symbols == tuple(
        SymbolFactDesc(name=str(n), hint=n.node.hint, lower=2) for n in sorted(fake.shape, key=str)
    )
    facts = tfk.describe_tensor(unbacked)
    (count,) = (fact for fact in facts.symbols if fact.name.startswith("u"))
    assert (count.hint, count.lower, count.size_like) == (None, 0, True)
    assert facts.size[0].hint is None
    assert mode.shape_env.guards == []


def test_devices_that_this_machine_lacks() -> None:
    """A fake tensor's device is recorded by its name."""
    for device in ("cuda:1", "xpu:0", "mps:0", "hpu:3"):
        with FakeTensorMode():
            fake = torch.empty(2, device=device)
        assert tfk.describe_tensor(fake).device == device


def test_a_torch_function_mode_is_not_asked() -> None:
    """What a mode says of a tensor does not reach the record."""

    class Liar(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    t = torch.empty(3, requires_grad=True)[1:]
    plain = tfk.describe_tensor(t)
    with Liar():
        assert tfk.describe_tensor(t) == plain


# --- refusals -----------------------------------------------------------------------------------


class Tagged(torch.Tensor):
    """A subclass that is no wrapper."""


class HalfFlat(torch.Tensor):
    """A wrapper subclass that cannot be made again."""

    def __tensor_flatten__(self):
        return [], None


def quantized() -> torch.Tensor:
    """A per-tensor quantized tensor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8)


def functional() -> torch.Tensor:
    """A C++ functional tensor."""
    return torch._to_functional_tensor(torch.zeros(2))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            quantized,
            "tensor 0 of size (2,): `qscheme` cannot be recorded; expected no quantized dtype;"
            " found qint8. Describe its int_repr()",
        ),
        (
            lambda: torch._efficientzerotensor(2),
            "tensor 0 of size (2,): `dispatch keys` cannot be recorded; expected a plain dense"
            " tensor; found ZeroTensor. Describe its clone()",
        ),
        (
            lambda: torch.zeros(2).as_subclass(Tagged),
            "tensor 0 of size (2,): `type` cannot be recorded; expected Tensor, Parameter,"
            " FakeTensor or a traceable wrapper subclass; found test_describe.Tagged. Describe it"
            " as a plain tensor: t.as_subclass(torch.Tensor)",
        ),
        (
            lambda: torch.zeros(2).as_subclass(HalfFlat),
            "tensor 0 of size (2,): `type` cannot be recorded; expected both __tensor_flatten__"
            " and __tensor_unflatten__; found test_describe.HalfFlat. Give HalfFlat a"
            " `__tensor_unflatten__`",
        ),
        (
            lambda: functional()[1:],
            "tensor 0 of size (1,): `base` cannot be recorded; expected no view inside functorch or"
            " functionalization; found a view. Describe the tensor of which it is a view, or its"
            " clone()",
        ),
        (
            lambda: 3,
            "$: `type` cannot be recorded; expected a torch.Tensor; found int",
        ),
    ],
)
def test_what_a_record_cannot_hold_is_refused(make, message) -> None:
    """Each kind that torch cannot make a faithful fake of is refused by name, with a remedy."""
    with pytest.raises(tfk.UnsupportedTensorError) as error:
        tfk.describe_tensor(make())
    assert str(error.value) == message


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_strided_nested_tensors_are_refused() -> None:
    """Torch has no fake of a nested tensor with strides; a jagged one it has."""
    strided = torch.nested.nested_tensor([torch.zeros(1)])
    with pytest.raises(tfk.UnsupportedTensorError, match=r"`layout` cannot.*found nested"):
        tfk.describe_tensor(strided)


def test_dual_tensors_are_refused() -> None:
    """A forward-mode tangent is no part of a record; a tensor without one is recorded there."""
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.zeros(2), torch.zeros(2))
        with pytest.raises(tfk.UnsupportedTensorError, match="`tangent` cannot be recorded"):
            tfk.describe_tensor(dual)
        assert tfk.describe_tensor(torch.zeros(2)).size == (2,)


def test_an_unknown_dynamo_attribute_is_refused() -> None:
    """An attribute in Dynamo's name space may be a policy; it is not dropped."""
    t = torch.zeros(2)
    t._dynamo_of_tomorrow = {0}
    with pytest.raises(tfk.UnsupportedTensorError) as error:
        tfk.describe_tensor(t)
    assert str(error.value) == (
        "tensor 0 of size (2,): the tensor attribute `_dynamo_of_tomorrow` has no record; found"
        " _dynamo_of_tomorrow = {0}. Delete the attribute, or describe a detached alias of the"
        " tensor"
    )


def test_a_condition_that_branches_is_refused() -> None:
    """A `specialize_on` function has to be one expression of the size."""
    t = torch.zeros(2)
    torch._dynamo.mark_dynamic(t, 0, specialize_on=[lambda n: n > 2 and n < 5])
    with pytest.raises(tfk.UnsupportedTensorError, match="cannot be written as an expression"):
        tfk.describe_tensor(t)


@pytest.mark.parametrize("fake", [False, True])
def test_a_dense_view_of_a_wrapper_has_its_view_operators(fake: bool) -> None:
    """The values of a jagged tensor are a dense view whose base is none, and convert as such."""
    nested = torch.nested.nested_tensor([torch.ones(3, 5), torch.ones(4, 5)], layout=torch.jagged)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    values = ((mode.from_tensor(nested) if fake else nested) * 2).values()
    d = tfk.describe_tensor(values)
    assert d.view_calls is not None
    assert [call.op for call in d.view_calls] == ["aten._nested_get_values.default"]
    made = tfk.MetaConverter(FakeTensorMode(shape_env=ShapeEnv())).from_desc(d)
    assert made._base is not None
    assert type(made._base) is type(nested)


def test_the_error_names_the_part_and_the_source() -> None:
    """A refused base or gradient is found by its path, an input by its source."""
    x = torch.zeros(2, requires_grad=True)
    x.grad = torch.zeros(2).as_subclass(Tagged)
    with pytest.raises(tfk.UnsupportedTensorError, match=r"^tensor 1 of size \(2,\), \$\.grad: "):
        tfk.describe_tensor(x)
    tagged = torch.zeros(2).as_subclass(Tagged)
    with pytest.raises(tfk.UnsupportedTensorError, match=r"^L\['x'\] of size \(2,\): "):
        tfk.describe_tensor(tagged, source=LocalSource("x"))


def test_gradients_in_a_cycle_are_refused() -> None:
    """Two tensors that are each other's gradient have no finite record."""
    x, y = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    x.grad, y.grad = y, x
    with pytest.raises(tfk.UnsupportedTensorError, match="`grad` cannot be recorded"):
        tfk.describe_tensor(x)
    x.grad = None


def test_every_dispatch_key_is_classified() -> None:
    """A key that torch adds is refused until somebody decides what it means."""
    known = _PLAIN_KEYS | _FAKE_KEYS | {"Conjugate", "Negative"}
    refused = (
        "Sparse", "Quantized", "NestedTensor", "FuncTorch", "Functionalize", "ZeroTensor", "XLA",
        "Lazy", "BackendSelect", "PythonDispatcher", "PreDispatch",
    )  # fmt: skip
    for name in _torch.DispatchKey.__members__:
        assert name in known or name.startswith((*_ALIAS_KEYS, *refused)), name


def test_symbolic_sizes_that_a_transform_wraps() -> None:
    """A batched tensor is a plain one by its class, and its sizes are symbols, which have no hash."""
    describer = MetaTensorDescriber()
    mode = FakeTensorMode(shape_env=ShapeEnv())
    found: list[Any] = []
    with mode:
        torch.func.vmap(lambda x: found.append(describer.describe_tensor(x)) or x)(
            mode.from_tensor(torch.randn(3, 4))
        )
    assert found[0].functorch is not None
    assert found[0].functorch.kind == "batched"


def test_fakes_of_one_layout_differ_where_they_differ() -> None:
    """While nobody changes anything, each has the record that it has alone."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        plain = torch.empty(2, 3)
        fakes = [
            plain,
            torch.empty(2, 3),
            torch.empty(2, 3, dtype=torch.int32),
            torch.empty(2, 3, device="meta"),
            torch.empty(2, 3, device="cuda"),
            torch.empty(2, 3, requires_grad=True),
            torch.empty(2, 3, requires_grad=True) * 2,
            plain.view(2, 3),
            plain.view(2, 3),
            torch.empty(2, 3),
        ]
        with torch.inference_mode():
            fakes.append(torch.empty(2, 3))
    fakes.append(mode.from_tensor(torch.nn.Parameter(torch.ones(2, 3))))
    fast, slow = MetaTensorDescriber(), MetaTensorDescriber(fast=False)
    with fast.settled():
        found = [fast.describe_tensor(t) for t in fakes]
    assert found == [slow.describe_tensor(t) for t in fakes]
    assert len({msgspec.structs.replace(d, id=0, storage=None, base=None) for d in found}) == 9
