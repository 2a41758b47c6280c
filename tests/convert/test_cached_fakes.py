"""Fake tensors of a layout that was made before equal those whose layout is made anew."""

from __future__ import annotations

import msgspec
import pytest
import torch
from converted_checks import UncachedConverter
from hypothesis import given
from hypothesis import strategies as st
from tensor_facts import facts, relations
from torch._dynamo.source import ConstantSource, LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatefulSymbolicContext,
    StatelessSymbolicContext,
)

import torch_fakeify as tfk
from torch_fakeify.convert.converter import MetaConverter
from torch_fakeify.convert.meta_tensors import ValueLayouts

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def results(sizes, dtypes):
    """Fake tensors as the operators of a graph give them, several of each layout."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    x, y = (
        mode.from_tensor(
            torch.empty(sizes, requires_grad=name == "y"),
            source=ConstantSource(name),
            symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC] * 2),
        )
        for name in "xy"
    )
    assert isinstance(x.size(0), torch.SymInt)
    with mode:
        made = []
        for dtype in dtypes:
            made += [x.to(dtype) + 1, x.t().contiguous().to(dtype) + 1, x.new_empty(3, dtype=dtype)]
            made += [y.to(dtype) * 2, y.t().contiguous().to(dtype) * 2]
        made += [x, y, x.t(), x[1:], y.detach(), x + 1, x.flatten() + 1, torch.empty(0), y * 2]
        made += [torch.nn.Parameter(x + 1), torch.empty(2).expand(3, 2) + 0]
    return env, made


@given(
    sizes=st.tuples(st.integers(2, 5), st.integers(2, 5)),
    dtypes=st.lists(st.sampled_from([torch.float32, torch.int64, torch.complex64]), max_size=4),
)
def test_known_and_new_layouts_give_equal_tensors(sizes, dtypes):
    """Attribute by attribute, in their relations, and in the state of the `ShapeEnv`."""
    env, made = results(sizes, dtypes)
    describer = tfk.MetaTensorDescriber()
    records = tfk.loads(tfk.dumps([describer.describe_tensor(t) for t in made]))
    found = []
    for converter_of in (MetaConverter, UncachedConverter):
        again = tfk.restore(tfk.snapshot(env))
        mode = FakeTensorMode(shape_env=again)
        converter = converter_of(mode, symbols="keep")
        fakes = [converter.from_desc(d) for d in records]
        found.append((list(map(facts, fakes)), relations(fakes), tfk.snapshot(again)))
        assert [t.fake_mode for t in fakes] == [mode] * len(fakes)
        redescriber = tfk.MetaTensorDescriber()
        assert [redescriber.describe_tensor(t).symbols for t in fakes] == [
            d.symbols for d in records
        ]
    assert found[0] == found[1]


def test_a_layout_is_made_once(monkeypatch):
    """The second tensor of a layout asks torch for no symbolic arithmetic."""
    env, made = results((3, 4), [torch.float32] * 3)
    describer = tfk.MetaTensorDescriber()
    records = [describer.describe_tensor(t) for t in made]
    converter = tfk.MetaConverter(FakeTensorMode(shape_env=env), symbols="keep")
    found = []
    find = ValueLayouts.find
    monkeypatch.setattr(
        ValueLayouts, "find", lambda self, d: found.append(find(self, d)) or found[-1]
    )
    fakes = [converter.from_desc(d) for d in records]
    assert sum(layout is not None for layout in found) >= 6
    storages = [t.untyped_storage()._cdata for t in fakes if not t._is_view()]
    assert len(set(storages)) == len(storages) - 1  # `y.detach()` is on that of `y`


@pytest.mark.parametrize(
    "change",
    [
        {"is_conj": True, "dtype": "complex64"},
        {"is_neg": True},
        {"is_buffer": True},
        {"is_pinned": True},
        {"grad_dtype": "any"},
        {"requires_grad": True},
        {"is_parameter": True, "requires_grad": True},
        {"requires_grad": True, "is_leaf": False},
        {"requires_grad": True, "is_leaf": False, "retains_grad": True},
        {"is_inference": True},
        {"marks": tfk.MetaTensorDescriber().describe_tensor(torch.empty(2)).marks},
    ],
)
def test_what_a_layout_does_not_say_is_kept(change):
    """A tensor like another one but for one property has that property."""
    env, made = results((3, 4), [])
    describer = tfk.MetaTensorDescriber()
    with made[0].fake_mode:
        first, second = (describer.describe_tensor(t) for t in (made[5], made[0] * 2))
    assert first.size == second.size
    second = msgspec.structs.replace(second, **change)
    if second.dtype != first.dtype:
        first = msgspec.structs.replace(first, dtype=second.dtype)
    both = []
    for converter_of in (MetaConverter, UncachedConverter):
        mode = FakeTensorMode(shape_env=tfk.restore(tfk.snapshot(env)))
        converter = converter_of(mode, symbols="keep")
        kept = converter.from_desc(first)
        made_again = converter.from_desc(second)
        both.append((facts(kept), facts(made_again), sorted(vars(made_again))))
    assert both[0] == both[1]


@pytest.mark.parametrize("field", ["size", "stride", "storage"])
def test_a_damaged_record_is_refused_all_the_same(field):
    """What the layout of a sound record says is not taken for another one's."""
    env, made = results((3, 4), [])
    describer = tfk.MetaTensorDescriber()
    with made[0].fake_mode:
        first, second = (describer.describe_tensor(t) for t in (made[5], made[0] * 2))
    damaged = {
        "size": {"size": (*second.size, 5)},
        "stride": {"stride": (-1, 1)},
        "storage": {"storage": None},
    }[field]
    converter = tfk.MetaConverter(FakeTensorMode(shape_env=env), symbols="keep")
    keep = [converter.from_desc(first), converter.from_desc(second)]
    bad = msgspec.structs.replace(second, id=second.id + 1000, **damaged)
    with pytest.raises(tfk.ConvertError):
        converter.from_desc(bad)
    assert len(keep) == 2


def test_the_storage_of_another_tensor_is_no_part_of_a_layout():
    """A tensor on a storage of its own fills it, also if one like it was on a larger one."""
    env, made = results((3, 4), [])
    describer = tfk.MetaTensorDescriber()
    with made[0].fake_mode:
        first, other = (describer.describe_tensor(t) for t in (made[5], made[0] * 2))
    row = {"size": first.size[1:], "stride": first.stride[1:]}
    shared = msgspec.structs.replace(other, id=100, storage=first.storage, **row)
    storage = msgspec.structs.replace(first.storage, id=101)
    alone = msgspec.structs.replace(other, id=102, storage=storage, **row)
    both = []
    for converter_of in (MetaConverter, UncachedConverter):
        mode = FakeTensorMode(shape_env=tfk.restore(tfk.snapshot(env)))
        converter = converter_of(mode, symbols="keep")
        fakes = [converter.from_desc(d) for d in (first, shared, alone)]
        both.append([facts(t) for t in fakes])
    assert both[0] == both[1]


def test_the_number_of_a_scalar_input_keeps_its_symbol():
    """Converting an input without dims sets the symbol of its ``item()``, and adds nothing else."""
    t = torch.tensor(2.5, dtype=torch.float64)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    expected = mode.from_tensor(t, source=LocalSource("s"))
    before = tfk.snapshot(mode.shape_env)
    converter = tfk.MetaConverter(mode, symbols="keep")
    fake = converter.from_desc(tfk.describe_tensor(t, source=LocalSource("s")))
    assert expected.item_memo is not None
    assert str(fake.item_memo) == str(expected.item_memo)
    assert tfk.snapshot(mode.shape_env) == before


def test_equal_contexts_with_caches_are_not_one():
    """Two tensors of one source and equal policies, whose bases have stateful contexts."""
    converter = tfk.MetaConverter(FakeTensorMode(shape_env=ShapeEnv()))
    describer = tfk.MetaTensorDescriber()
    bases = []
    for count in (6, 8):
        base = StatefulSymbolicContext([DimDynamic.DYNAMIC], tensor_source=LocalSource("base"))
        context = StatelessSymbolicContext([DimDynamic.DYNAMIC], view_base_context=base)
        view = torch.empty(count)[1:5]
        d = describer.describe_tensor(view, source=LocalSource("x"), symbolic_context=context)
        bases.append(converter.from_desc(d)._base.size(0))
    assert str(bases[0]) != str(bases[1])
    assert [n.node.hint for n in bases] == [6, 8]
