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
from observed_values import first_difference
from processes import piped
from record_facts import canonical, converted, described, sharing
from strategies import KINDS, TwoTensor, any_groups, is_refusal_of_torch, tensor_groups
from tensor_facts import facts, parts, relations
from test_symbolic_sweep import env_facts
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import torch_fakeify as tfk
from torch_fakeify.compat.torch_fakes import WHOLE_STORAGES

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_fakeify.records.tensor import MetaTensorDesc

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


def as_data(records: list[Any]) -> Any:
    """Records as plain data, in which a difference can be located."""
    return msgspec.to_builtins(records, builtin_types=(bytes,))


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Equal facts, and equal relations, also among the tensors that belong to these.

    A wrapper inside another is made anew by torch, on a storage of its own; ours is on that of the
    original, which `test_aliasing.py` asks for.
    """
    found = first_difference([facts(t) for t in ours], [facts(t) for t in theirs])
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
    assert_described_again(group)


def assert_described_again(group: list[torch.Tensor]) -> None:
    """The records of the fake tensors of the records are these records."""
    records = described(group)
    fakes = converted(records, FakeTensorMode())
    found = first_difference(as_data(canonical(described(fakes))), as_data(canonical(records)))
    assert found is None, found


def loses_a_stride(group: list[torch.Tensor]) -> bool:
    """Whether torch refuses a wrapper's view, as its fake ``view`` gives other strides than ATen's."""
    return any(
        is_traceable_wrapper_subclass(t)
        and t._is_view()
        and t.layout is not torch.jagged
        and not {0, 1}.isdisjoint(t._base.size())
        and fails_torchs_check(t)
        for t in group
    )


def fails_torchs_check(t: torch.Tensor) -> bool:
    """Whether torch refuses a tensor because sizes, strides or offset of its view are others."""
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
    except (RuntimeError, AssertionError) as error:  # the latter of a wrapper's own constructor
        if is_fault_of_torch(error, group):
            assert_described_again(group)
            return
        with pytest.raises((RuntimeError, tfk.ConvertError)):
            converted(described(group), FakeTensorMode())
        return
    ours = converted(described(group), FakeTensorMode())
    assert_same(ours, theirs)


def is_fault_of_torch(error: Exception, group: list[torch.Tensor]) -> bool:
    """Whether torch has no fake tensors for a group of which a converter makes some."""
    known = casts_twice(group) or loses_a_stride(group) or hides_grad(group)
    return known or is_refusal_of_torch(error)


def casts_twice(group: list[torch.Tensor]) -> bool:
    """Whether torch makes the base of a wrapper's view complex or real, and runs the cast again."""
    return any(
        is_traceable_wrapper_subclass(t) and t._is_view() and t.is_complex() != t._base.is_complex()
        for t in parts(group)
    )


def hides_grad(group: list[torch.Tensor]) -> bool:
    """Whether a wrapper that does not require grad has an inner tensor that does: torch asserts."""
    return any(
        is_traceable_wrapper_subclass(t)
        and not t.requires_grad
        and any(getattr(t, name).requires_grad for name in t.__tensor_flatten__()[0])
        for t in parts(group)
    )


@pytest.mark.parametrize("after", [False, True])
def test_a_wrapper_without_grad_may_have_inner_tensors_with_it(after: bool) -> None:
    """Torch's ``from_tensor`` fails with an assertion; the record and the fake have both."""
    inner = torch.ones(3, requires_grad=not after)
    t = TwoTensor(inner, inner).requires_grad_(False)
    inner.requires_grad = True
    assert hides_grad([t])
    assert_described_again([t])
    (fake,) = converted(described([t]), FakeTensorMode())
    assert not fake.requires_grad
    assert fake.a.requires_grad


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


def test_a_wrapper_that_its_own_class_refuses_is_refused() -> None:
    """One part requires grad since the wrapper was made: its constructor takes no such parts any more."""
    part = torch.ones(3)
    t = TwoTensor(part, torch.ones(3))
    part.requires_grad_()
    with pytest.raises(AssertionError):
        FakeTensorMode().from_tensor(t)
    with pytest.raises(tfk.ConvertError, match="requires_grad"):
        converted(described([t]), FakeTensorMode())


def test_an_alias_of_a_wrapper_may_require_grad() -> None:
    """The alias is a view and a leaf, its base requires no grad."""
    t = TwoTensor(torch.ones(3), torch.ones(3))
    group = [t.view_as(t).requires_grad_()]
    assert_same(
        converted(described(group), FakeTensorMode()), [FakeTensorMode().from_tensor(group[0])]
    )


LOST: dict[str, tuple[tuple[int, ...], tuple[int, ...], Any]] = {
    "nothing in it": ((0, 3, 1, 0), (2, 2, 2, 6), lambda t: t.view_as(t)),
    "expanded": ((0, 3), (1, 0), lambda t: t.view_as(t)),
    "one row of many": ((1, 3), (7, 1), lambda t: t.view_as(t)),
    "a dim between": ((4, 1, 3), (6, 2, 2), lambda t: t.unflatten(0, (-1, 1))),
    "flat": ((1, 1), (5, 9), lambda t: t.flatten()),
    "and on": ((1, 3), (7, 1), lambda t: t.view_as(t).transpose(0, 1)),
    "of one that requires grad": (
        (1, 1), (5, 9), lambda t: t.transpose(0, 1).requires_grad_().transpose(0, 1)
    ),
    "twice, with grad": ((1, 1), (5, 9), lambda t: t.view_as(t).requires_grad_().transpose(0, 1)),
    "nothing in it, with grad": ((0, 3), (2, 2), lambda t: t.view_as(t).requires_grad_().view_as(t)),
}  # fmt: skip
"""Views of wrappers of which torch's ``view`` on fake tensors has other strides than on real ones."""


def lost(name: str, *, nested: bool = False) -> torch.Tensor:
    """One of them."""
    size, stride, view = LOST[name]
    t = TwoTensor(*(torch.empty_strided(size, stride) for _ in range(2)))
    if nested:
        t = TwoTensor(t, TwoTensor(*(torch.empty_strided(size, stride) for _ in range(2))))
    return view(t)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", LOST)
def test_a_wrappers_view_has_the_strides_that_torchs_fake_view_loses(
    name: str, nested: bool
) -> None:
    """All that can be asked of the fake tensor is what can be asked of the real one's record."""
    t = lost(name, nested=nested)
    assert_described_again([t, t._base])
    fake, base = converted(described([t, t._base]), FakeTensorMode())
    assert fake.stride() == t.stride()
    assert fake._base is base
    assert base.stride() == t._base.stride()


@pytest.mark.parametrize("name", LOST)
def test_a_wrappers_view_has_those_strides_over_symbols(name: str) -> None:
    """Sizes and strides are symbols with the right hints, and no fact is known that is not so."""
    t = lost(name)
    env = ShapeEnv()
    fake = converted(described([t], sources=True), FakeTensorMode(shape_env=env))[0]
    assert tuple(map(hint, fake.stride())) == t.stride()
    sizes = zip(fake.size(), t.size(), strict=True)
    assert all(isinstance(n, torch.SymInt) for n, real in sizes if real > 1)
    assert all(env.evaluate_expr(guard.expr) for guard in env.guards)


def hint(n: Any) -> int:
    """A number, or that behind a symbol."""
    return n if isinstance(n, int) else n.node.hint


def test_what_a_program_made_of_fake_tensors_keeps_its_strides() -> None:
    """Where the fake ``view`` itself ran, the record and what is made of it have its strides."""
    mode = FakeTensorMode()
    with mode:
        t = TwoTensor(*(torch.empty_strided((1, 3), (7, 1)) for _ in range(2)))
        view = t.view_as(t)
    record = tfk.describe_tensor(view)
    assert record.stride == (7, 1)
    assert [call.op for call in record.view_calls] == ["aten.view.default"]
    assert tfk.MetaConverter(FakeTensorMode()).from_desc(record).stride() == (7, 1)


def test_view_operators_that_give_another_tensor_are_refused_by_name() -> None:
    """The error says of which tensor, what was expected, and what they gave."""
    record = tfk.MetaTensorDescriber().describe_tensor(lost("one row of many"))
    record = msgspec.structs.replace(record, view_calls=())
    message = (
        r"tensor 0: the view operators give a tensor of other sizes, strides or offset; "
        r"expected \(3, 1\); found \(7, 1\)"
    )
    with pytest.raises(tfk.ConvertError, match=message):
        tfk.MetaConverter(FakeTensorMode()).from_desc(record)


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
        if is_fault_of_torch(error, group):
            converted(described(group, sources=True), our_mode)
            return
        with pytest.raises((type(error), tfk.FakeifyError)):
            converted(described(group, sources=True), our_mode)
        return
    ours = converted(described(group, sources=True), our_mode)
    assert_same(ours, theirs)
    assert_same_env(our_mode, their_mode, in_two_steps=any(map(is_view_in_two_steps, parts(group))))


def is_view_in_two_steps(t: Any) -> bool:
    """Whether a view that requires grad was made of another view, whose base does not.

    Of a wrapper's such view torch makes an alias of the base, and then all views; if the first one is
    of the whole, the record has the others alone, since the converter makes the alias.
    """
    return t._is_view() and not t.is_leaf and t.requires_grad and not t._base.requires_grad


def assert_same_env(ours: FakeTensorMode, theirs: FakeTensorMode, *, in_two_steps: bool) -> None:
    """Equal facts; of views in two steps not how often a size of theirs was asked for."""
    pair = [env_facts(mode.shape_env) for mode in (ours, theirs)]
    if in_two_steps:
        for facts_of_env in pair:
            for sources in facts_of_env["sources"].values():
                sources[:] = [name for name in sources if not name.startswith("<ephemeral")]
    found = first_difference(*pair)
    assert found is None, found


VIEWS_OF_ALL: dict[str, Callable[[Any], Any]] = {
    "view": lambda t: t.view(t.shape),
    "slice": lambda t: t[:],
    "alias": torch.ops.aten.alias.default,
}


@pytest.mark.parametrize("view", VIEWS_OF_ALL)
@pytest.mark.parametrize("second", ["view", "rows", "column"])
def test_a_view_of_a_view_of_all_that_requires_grad_is_what_torch_makes(
    view: str, second: str
) -> None:
    """And its record is that of its fake tensor, however often it is made."""
    base = TwoTensor(torch.ones(4, 3), torch.ones(4, 3))
    whole = VIEWS_OF_ALL[view](base).requires_grad_()
    t = {"view": whole.view(12), "rows": whole[1:], "column": whole.select(1, 2)}[second]
    assert_described_again([t])
    their_mode, our_mode = (FakeTensorMode(shape_env=ShapeEnv()) for _ in range(2))
    theirs = their_mode.from_tensor(t, source=LocalSource("x0"))
    ours = converted(described([t], sources=True), our_mode)
    assert_same(ours, [theirs])
    assert_same_env(our_mode, their_mode, in_two_steps=True)


# --- two processes --------------------------------------------------------------------------------

REBUILD = """
import sys
import msgspec
import torch_fakeify as tfk
from record_facts import canonical, converted, described
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor  # the reader has imported the classes

groups = map(tfk.loads, msgspec.msgpack.decode(sys.stdin.buffer.read()))
again = [canonical(described(converted(records, FakeTensorMode()))) for records in groups]
sys.stdout.buffer.write(msgspec.msgpack.encode(list(map(tfk.dumps, again))))
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
    written = msgspec.msgpack.encode(list(map(tfk.dumps, groups)))
    found = msgspec.msgpack.decode(piped(REBUILD, written))
    for one, other in zip(map(tfk.loads, found), expected, strict=True):
        assert list(one) == list(other)  # says which record differs
    assert found == list(map(tfk.dumps, expected))
