"""Describing tensors: what the records say, ids, refusals, and that both paths agree."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from converted_checks import GeneralDescriber
from golden_tensors import marked
from quiet import quiet
from torch._dynamo.source import LocalSource, RandomValueSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torch_fakeify as tfk
from torch_fakeify.compat import torch_dispatch
from torch_fakeify.describe.describer import MetaTensorDescriber
from torch_fakeify.describe.unsupported import _ALIAS_KEYS, _FAKE_KEYS, _PLAIN_KEYS
from torch_fakeify.records.tensor import MarksDesc, SymbolFactDesc

if TYPE_CHECKING:
    from torch._guards import Source


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
    marks = tfk.describe_tensor(marked()).marks
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

    from torch_fakeify.encoding import marks

    source = inspect.getsource(torch._dynamo.decorators)
    found = set(re.findall(r"\bt\.(_\w*(?:dynamo|specialize)\w*)\b", source))
    # Of a module class, and a misspelling in a `hasattr` of torch's.
    found -= {"_dynamo_marked_static", "_specialized_on"}
    known = {*marks._INDICES, *marks._OTHERS, marks._FLAG}
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
    d = MetaTensorDescriber().describe_tensor(fake)
    assert (d.is_fake, [n.hint for n in d.size], d.stride[0].hint) == (True, [3, 5], 5)
    assert d.symbols == tuple(
        SymbolFactDesc(name=str(n), hint=n.node.hint, lower=2) for n in sorted(fake.shape, key=str)
    )
    facts = MetaTensorDescriber().describe_tensor(unbacked)
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
    describer = MetaTensorDescriber()
    plain = describer.describe_tensor(t)
    with Liar():
        assert describer.describe_tensor(t) == plain


# --- refusals -----------------------------------------------------------------------------------


class Tagged(torch.Tensor):
    """A subclass that is no wrapper."""


class HalfFlat(torch.Tensor):
    """A wrapper subclass that cannot be made again."""

    def __tensor_flatten__(self):
        return [], None


def quantized() -> torch.Tensor:
    """A per-tensor quantized tensor."""
    with quiet():
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
            " FakeTensor or a traceable wrapper subclass; found test_describer.Tagged. Describe it"
            " as a plain tensor: t.as_subclass(torch.Tensor)",
        ),
        (
            lambda: torch.zeros(2).as_subclass(HalfFlat),
            "tensor 0 of size (2,): `type` cannot be recorded; expected both __tensor_flatten__"
            " and __tensor_unflatten__; found test_describer.HalfFlat. Give HalfFlat a"
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
        MetaTensorDescriber().describe_tensor(make())
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
        MetaTensorDescriber().describe_tensor(t)
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
        MetaTensorDescriber().describe_tensor(x)
    tagged = torch.zeros(2).as_subclass(Tagged)
    with pytest.raises(tfk.UnsupportedTensorError, match=r"^L\['x'\] of size \(2,\): "):
        MetaTensorDescriber().describe_tensor(tagged, source=LocalSource("x"))


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
    for name in torch_dispatch.DispatchKey.__members__:
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
    fast, slow = MetaTensorDescriber(), GeneralDescriber()
    with fast.assume_unchanged():
        found = [fast.describe_tensor(t) for t in fakes]
    assert found == [slow.describe_tensor(t) for t in fakes]
    assert len({msgspec.structs.replace(d, id=0, storage=None, base=None) for d in found}) == 9
