"""The laws of tensor records over every kind of tensor, in one process and across two.

1. ``loads(dumps(x)) == x``, and what was one object is one object.
2. ``describe(convert(d)) == d``.
3. ``convert(d)`` equals what torch's own ``FakeTensorMode.from_tensor`` gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from hypothesis import Phase, given, settings
from record_facts import canonical, in_another_process, sharing
from strategies import KINDS, TwoTensor, any_groups, tensor_groups
from sweeps import difference
from tensor_facts import facts, parts, relations
from test_symbolic_sweep import env_facts
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import torch_fakeify as tfk
from torch_fakeify._torch import WHOLE_STORAGES

if TYPE_CHECKING:
    from torch_fakeify.desc import MetaTensorDesc

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


def described(group: list[torch.Tensor], *, sources: bool = False) -> list[MetaTensorDesc]:
    """The records of one describer."""
    describer = tfk.MetaTensorDescriber()
    return [
        describer.describe_tensor(t, source=LocalSource(f"x{i}") if sources else None)
        for i, t in enumerate(group)
    ]


def converted(records: list[MetaTensorDesc], mode: FakeTensorMode) -> list[torch.Tensor]:
    """The fake tensors of one converter, of records read from bytes."""
    converter = tfk.MetaConverter(mode)
    return [converter.from_desc(d) for d in tfk.loads(tfk.dumps(records))]


def as_data(records: list[Any]) -> Any:
    """Records as plain data, in which a difference can be located."""
    return msgspec.to_builtins(records, builtin_types=(bytes,))


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Equal facts, and equal relations, also among the tensors that belong to these.

    A wrapper inside another is made anew by torch, on a storage of its own; ours is on that of the
    original, which `test_aliasing.py` asks for.
    """
    found = difference([facts(t) for t in ours], [facts(t) for t in theirs])
    assert found is None, found
    inside = {id(p) for t in parts(theirs) if t.layout is torch.strided for p in inner_wrappers(t)}
    strict = [id(t) not in inside for t in parts(theirs)]
    pairs = [a and b for a in strict for b in strict]
    for is_strict, our, their in zip(
        pairs, relations(parts(ours)), relations(parts(theirs)), strict=True
    ):
        assert our == their or not is_strict


def inner_wrappers(t: torch.Tensor) -> list[torch.Tensor]:
    """The wrappers among the inner tensors of a wrapper."""
    if not is_traceable_wrapper_subclass(t):
        return []
    inner = [getattr(t, name) for name in t.__tensor_flatten__()[0]]
    return [part for part in inner if is_traceable_wrapper_subclass(part)]


@given(any_groups(marks=True))
def test_reading_gives_what_was_written(group: list[torch.Tensor]) -> None:
    """Law 1: the records are equal, and so is which of their parts are one object."""
    records = described(group)
    again = tfk.loads(tfk.dumps(records))
    assert again == records
    assert sharing(again) == sharing(records)
    assert tfk.dumps(again) == tfk.dumps(records)


@given(any_groups(marks=True))
def test_describing_a_fake_gives_its_record(group: list[torch.Tensor]) -> None:
    """Law 2, static shapes."""
    records = described(group)
    if loses_a_stride(group):
        with pytest.raises(RuntimeError, match="the view operators give"):
            converted(records, FakeTensorMode())
        return
    fakes = converted(records, FakeTensorMode())
    found = difference(as_data(canonical(described(fakes))), as_data(canonical(records)))
    assert found is None, found


def loses_a_stride(group: list[torch.Tensor]) -> bool:
    """Whether torch cannot rebuild an empty view: its fake ``view`` makes a stride of zero a one."""
    for t in group:
        if is_traceable_wrapper_subclass(t) and t._is_view() and t.numel() == 0:
            try:
                FakeTensorMode().from_tensor(t)
            except RuntimeError as error:
                return "Expected cond to be True" in str(error)
    return False


# Torch has jagged tensors under symbolic shapes alone.
@given(any_groups(kinds=tuple(kind for kind in KINDS if kind != "jagged")))
def test_static_fakes_equal_torchs(group: list[torch.Tensor]) -> None:
    """Law 3, static shapes: all that can be asked of the tensors and of what belongs to them."""
    mode = FakeTensorMode()
    try:
        theirs = [mode.from_tensor(t) for t in group]
    except RuntimeError:
        if not casts_twice(group):
            with pytest.raises(RuntimeError):
                converted(described(group), FakeTensorMode())
        return
    ours = converted(described(group), FakeTensorMode())
    assert_same(ours, theirs)


def casts_twice(group: list[torch.Tensor]) -> bool:
    """Whether torch makes the base of a wrapper's view complex or real, and runs the cast again."""
    return any(
        is_traceable_wrapper_subclass(t) and t._is_view() and t.is_complex() != t._base.is_complex()
        for t in parts(group)
    )


def test_a_detached_wrapper_is_on_the_storage_of_its_origin_where_torchs_is() -> None:
    """Wrappers have storages without bytes; up to torch 2.13 fake ones share them as real ones do."""
    t = TwoTensor(torch.ones(3), torch.ones(3))
    group = [t, t.detach()]
    mode = FakeTensorMode()
    for fakes in (
        [mode.from_tensor(t) for t in group],
        converted(described(group), FakeTensorMode()),
    ):
        first, second = (fake.untyped_storage()._cdata for fake in fakes)
        assert (first == second) is not WHOLE_STORAGES


def test_an_alias_of_a_wrapper_may_require_grad() -> None:
    """The alias is a view and a leaf, its base requires no grad."""
    t = TwoTensor(torch.ones(3), torch.ones(3))
    group = [t.view_as(t).requires_grad_()]
    assert_same(
        converted(described(group), FakeTensorMode()), [FakeTensorMode().from_tensor(group[0])]
    )


@settings(max_examples=50)
@given(any_groups())
def test_symbolic_fakes_equal_torchs(group: list[torch.Tensor]) -> None:
    """Law 3, symbolic shapes: the tensors, and what the ShapeEnv knows after them."""
    their_mode, our_mode = (FakeTensorMode(shape_env=ShapeEnv()) for _ in range(2))
    theirs: list[Any] = []
    try:
        for i, t in enumerate(group):
            theirs.append(their_mode.from_tensor(t, source=LocalSource(f"x{i}")))
    except Exception as error:  # noqa: BLE001 torch itself cannot: neither can we
        if casts_twice(group):
            converted(described(group, sources=True), our_mode)
            return
        with pytest.raises((type(error), tfk.FakeifyError)):
            converted(described(group, sources=True), our_mode)
        return
    ours = converted(described(group, sources=True), our_mode)
    assert_same(ours, theirs)
    found = difference(env_facts(our_mode.shape_env), env_facts(their_mode.shape_env))
    assert found is None, found


# --- two processes --------------------------------------------------------------------------------

REBUILD = """
import sys
import torch_fakeify as tfk
from record_facts import canonical
from strategies import TwoTensor  # the reader has imported the classes
from test_laws import converted, described
from torch._subclasses.fake_tensor import FakeTensorMode

groups = tfk.loads(sys.stdin.buffer.read())
again = [canonical(described(converted(records, FakeTensorMode()))) for records in groups]
sys.stdout.buffer.write(tfk.dumps(again))
"""


def test_another_process_describes_the_same() -> None:
    """Law 1 and 2 across processes: what a fresh interpreter rebuilds and describes is byte-equal."""
    groups: list[list[MetaTensorDesc]] = []

    @settings(max_examples=60, phases=[Phase.generate], database=None)
    @given(any_groups(marks=True) | tensor_groups(marks=True))
    def collect(group: list[torch.Tensor]) -> None:
        groups.append(described(group))

    collect()
    assert len(groups) > 30
    expected = [canonical(records) for records in groups]
    found = in_another_process(REBUILD, tfk.dumps(groups))
    for one, other in zip(tfk.loads(found), expected, strict=True):
        assert list(one) == list(other)  # says which record differs
    assert found == tfk.dumps(expected)
