"""Converting records: law 2 (describe again) and law 3 (what torch's own from_tensor gives)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from converted_checks import UncachedConverter, assert_same, contexts, dynamic_mode, in_place
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import piped
from strategies import DTYPES, is_refusal_of_torch, tensor_groups, without_refusals_of_torch
from tensor_facts import relations
from torch._dynamo import decorators
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.meta_utils import assert_metadata_eq
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

import torch_fakeify as tfk
from torch_fakeify.convert.converter import MetaConverter
from torch_fakeify.describe.describer import MetaTensorDescriber

if TYPE_CHECKING:
    from torch.utils._sympy.value_ranges import ValueRanges

    from torch_fakeify.records.tensor import MetaTensorDesc

# torch's own describer asks for the gradient of non-leaves.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


def canonical(d: MetaTensorDesc) -> MetaTensorDesc:
    """The record without what a fake tensor of it cannot have: its numbers and its realness."""

    def part(d: MetaTensorDesc | None) -> MetaTensorDesc | None:
        return None if d is None else canonical(d)

    return msgspec.structs.replace(
        d,
        id=0,
        storage=msgspec.structs.replace(d.storage, id=0),
        is_fake=False,
        scalar_hint=None,
        item_memo=None,
        symbols=(),
        source=None,
        symbolic_context=None,
        base=part(d.base),
        grad=part(d.grad),
    )


def without_number(fake: Any) -> Any:
    """A fake without the value that a mode without symbols keeps, as of torch 2.14; records have none."""
    if isinstance(fake.item_memo, (int, float)):
        fake.item_memo = None
    return fake


@given(tensor_groups(resize=False, dtypes=DTYPES))
def test_static_fakes_equal_torchs(group: list[torch.Tensor]) -> None:
    """Law 3, static shapes: metadata, bases, gradients, aliasing and object identity."""
    mode = FakeTensorMode()
    with without_refusals_of_torch():
        theirs = [without_number(mode.from_tensor(t)) for t in group]
    describer = MetaTensorDescriber()
    converter = MetaConverter(FakeTensorMode())
    ours = [converter.from_desc(describer.describe_tensor(t)) for t in group]
    for a, b in zip(ours, theirs, strict=True):
        assert_same(a, b)
    for t, fake in zip(group, ours, strict=True):
        assert_metadata_eq(expect_equal, t, fake)
    assert relations(ours) == relations(theirs)
    assert [in_place(t) for t in ours] == [in_place(t) for t in theirs]


def expect_equal(a: object, b: object) -> None:
    """What torch's own comparison of metadata calls for each pair."""
    assert a == b


# --- symbolic shapes ----------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.data(), tensor_groups(resize=False), st.sampled_from([MetaConverter, UncachedConverter]))
def test_symbolic_fakes_equal_torchs(
    data: Any, group: list[torch.Tensor], converter_of: type[MetaConverter]
) -> None:
    """Law 3, symbolic shapes: sizes, strides, offsets, and the whole ShapeEnv after them."""
    sources = [LocalSource(f"x{i}") for i in range(len(group))]
    policies = [data.draw(contexts(t, source)) for t, source in zip(group, sources, strict=True)]
    describer = MetaTensorDescriber()
    records = [
        describer.describe_tensor(t, source=source, symbolic_context=policy)
        for t, source, policy in zip(group, sources, policies, strict=True)
    ]
    theirs_mode, ours_mode = dynamic_mode(), dynamic_mode()
    theirs: list[Any] = []
    try:
        for t, source, policy in zip(group, sources, policies, strict=True):
            theirs.append(theirs_mode.from_tensor(t, source=source, symbolic_context=policy))
    except RuntimeError as error:
        if is_refusal_of_torch(error):  # no dim is marked: it is a complex view
            assert len(convert_all(ours_mode, records, converter_of)) == len(group)
            return
        with pytest.raises((type(error), tfk.ConvertError)):
            convert_all(ours_mode, records, converter_of)
        return
    ours = convert_all(ours_mode, records, converter_of)
    for a, b in zip(ours, theirs, strict=True):
        assert_same(a, b)
    assert relations(ours) == relations(theirs)
    ours_mode.shape_env.check_equal(theirs_mode.shape_env)


@pytest.mark.parametrize("size", [(0,), (0, 3), (3, 0), (1,), (4, 3)])
def test_a_gradient_beside_a_hint_override_is_refused_by_name(size: tuple[int, ...]) -> None:
    """The override is of the tensor's dim alone, and torch itself refuses a gradient of other sizes."""
    t = torch.nn.Parameter(torch.empty(size))
    t.grad = torch.empty(size)
    decorators.mark_dynamic(t, 0, hint_override=6)
    source = LocalSource("x")
    with pytest.raises(RuntimeError, match="assign a gradient"):
        FakeTensorMode(shape_env=ShapeEnv()).from_tensor(t, source=source)
    record = tfk.describe_tensor(t, source=source)
    with pytest.raises(tfk.ConvertError, match=r"\(L\['x'\]\).* gradient.*hint override"):
        convert_all(dynamic_mode(), [record])
    t.grad = None
    convert_all(dynamic_mode(), [tfk.describe_tensor(t, source=source)])


def convert_all(
    mode: FakeTensorMode,
    records: list[MetaTensorDesc],
    converter_of: type[MetaConverter] = MetaConverter,
) -> list[Any]:
    """The fake tensors of records, in order, by one converter."""
    converter = converter_of(mode)
    return [converter.from_desc(d) for d in records]


@given(st.data(), tensor_groups(resize=False, marks=True))
@settings(max_examples=40)
def test_describing_a_symbolic_fake_gives_its_record(data: Any, group: list[torch.Tensor]) -> None:
    """Law 2, symbolic shapes: with hints in the place of symbols the record is the same."""
    sources = [LocalSource(f"x{i}") for i in range(len(group))]
    describer = MetaTensorDescriber()
    records = [
        describer.describe_tensor(t, source=s, symbolic_context=data.draw(backed_contexts(t)))
        for t, s in zip(group, sources, strict=True)
    ]
    unhinted = [without_hint_overrides(d) for d in records]
    fakes = convert_all(FakeTensorMode(shape_env=ShapeEnv()), unhinted)
    again = MetaTensorDescriber()
    for d, fake in zip(unhinted, fakes, strict=True):
        assert without_storage(hinted(again.describe_tensor(fake))) == without_storage(canonical(d))


@st.composite
def backed_contexts(draw: st.DrawFn, t: torch.Tensor) -> Any:
    """A policy under which every dim has a hint."""
    kinds = st.sampled_from((DimDynamic.DYNAMIC, DimDynamic.DUCK, DimDynamic.STATIC))
    return StatelessSymbolicContext(
        dynamic_sizes=[draw(kinds) for _ in range(t.ndim)],
        view_base_context=draw(backed_contexts(t._base)) if t._is_view() else None,
    )


def without_hint_overrides(d: MetaTensorDesc) -> MetaTensorDesc:
    """The record without hint overrides, which would take the hints' place."""
    marks = d.marks
    if marks is not None:
        marks = msgspec.structs.replace(marks, hint_overrides=())
    return msgspec.structs.replace(
        d,
        marks=marks,
        base=None if d.base is None else without_hint_overrides(d.base),
        grad=None if d.grad is None else without_hint_overrides(d.grad),
    )


def hinted(d: MetaTensorDesc) -> MetaTensorDesc:
    """The record with hints for symbols."""

    def n(n: Any) -> int:
        return n if isinstance(n, int) else n.hint

    d = canonical(d)
    return msgspec.structs.replace(
        d,
        size=tuple(map(n, d.size)),
        stride=tuple(map(n, d.stride)),
        storage_offset=n(d.storage_offset),
        base=None if d.base is None else hinted(d.base),
        grad=None if d.grad is None else hinted(d.grad),
    )


def without_storage(d: MetaTensorDesc) -> MetaTensorDesc:
    """The record without storages, whose sizes torch computes from symbolic sizes."""
    return msgspec.structs.replace(
        d,
        storage=None,
        base=None if d.base is None else without_storage(d.base),
        grad=None if d.grad is None else without_storage(d.grad),
    )


@pytest.mark.parametrize("converter_of", [MetaConverter, UncachedConverter])
@pytest.mark.parametrize("view", [lambda t: t[1:], lambda t: t.t(), lambda t: t.chunk(2, 1)[1]])
@pytest.mark.parametrize("kind", [DimDynamic.DYNAMIC, DimDynamic.UNBACKED])
def test_bases_of_views_get_symbols_as_torchs(
    kind: DimDynamic, view: Any, converter_of: type[MetaConverter]
) -> None:
    """The symbols of a base have its source, and unbacked ones await no binding."""
    base = torch.empty(6, 8)
    t, source = view(base), LocalSource("x")
    context = StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DYNAMIC] * 2,
        view_base_context=StatelessSymbolicContext(dynamic_sizes=[kind] * 2),
    )
    theirs, ours = dynamic_mode(), dynamic_mode()
    a = theirs.from_tensor(t, source=source, symbolic_context=context)
    d = tfk.describe_tensor(t, source=source, symbolic_context=context)
    b = converter_of(ours).from_desc(d)
    assert_same(b, a)
    ours.shape_env.check_equal(theirs.shape_env)
    assert ours.shape_env.pending_fresh_unbacked_symbols == []
    named = {s.name for found in ours.shape_env.var_to_sources.values() for s in found}
    assert kind is DimDynamic.UNBACKED or "L['x']._base.size()[0]" in named


def view_that_requires_grad() -> torch.Tensor:
    """A view of a view that was made to require grad, of a base that does not."""
    return torch.empty(2, 3).view(3, 2).requires_grad_()[1:]


UNUSUAL_VIEWS: dict[str, Any] = {
    "of a view that requires grad": view_that_requires_grad,
    "real": lambda: torch.view_as_real(torch.empty(3, dtype=torch.complex64)),
    "complex": lambda: torch.view_as_complex(torch.empty(3, 2)),
    "complex of a part": lambda: torch.view_as_complex(torch.empty(3)[:2]),
    "wider": lambda: torch.empty(2, 8, dtype=torch.uint8).view(torch.float64),
    "wider of a part": lambda: torch.empty(13, dtype=torch.uint8)[:8].view(torch.float64),
    "narrower": lambda: torch.empty(3, 4).view(torch.int16),
    "imaginary part": lambda: torch.empty(3, dtype=torch.complex64).conj().imag,
    "conjugate": lambda: torch.empty(3, 2, dtype=torch.complex64).mT.conj(),
    # Torch compares the strides of four and five dims with those of channels last.
    "real of four dims": lambda: torch.view_as_real(
        torch.empty_strided((2, 1, 1, 3), (7, 4, 7, 7), dtype=torch.complex64)
    ),
    "real of no elements": lambda: torch.view_as_real(
        torch.empty_strided((0, 1, 0, 1), (0, 2, 0, 4), dtype=torch.complex64)
    ),
    "of five dims that requires grad": lambda: (
        torch.empty_strided((3, 3, 1, 3, 3), (20, 7, 2, 4, 20))
        .view(3, 3, 1, 3, 3)
        .requires_grad_()[None]
    ),
}


@pytest.mark.parametrize("converter_of", [MetaConverter, UncachedConverter])
@pytest.mark.parametrize("symbolic", [True, False])
@pytest.mark.parametrize("name", UNUSUAL_VIEWS)
def test_unusual_views(name: str, symbolic: bool, converter_of: type[MetaConverter]) -> None:
    """Views by other ways than one `as_strided`, also where torch's own conversion fails."""
    t = UNUSUAL_VIEWS[name]()
    make = dynamic_mode if symbolic else FakeTensorMode
    source, theirs, ours = LocalSource("x"), make(), make()
    d = tfk.describe_tensor(t, source=source)
    fake = converter_of(ours).from_desc(d)
    try:
        expected = theirs.from_tensor(t, source=source)
    except RuntimeError:
        assert "part" in name
    else:
        assert_same(fake, expected)
        if symbolic:
            ours.shape_env.check_equal(theirs.shape_env)
    assert without_storage(hinted(tfk.describe_tensor(fake))) == without_storage(canonical(d))


def test_gradients_flow_through_a_rebuilt_view() -> None:
    """Autograd's record of a view and its leaf is sound: a backward gives the leaf a gradient."""
    p = torch.nn.Parameter(torch.empty(3, 4))
    describer, mode = MetaTensorDescriber(), FakeTensorMode()
    converter = MetaConverter(mode)
    leaf = converter.from_desc(describer.describe_tensor(p))
    view = converter.from_desc(describer.describe_tensor(p.t()))
    with mode:
        view.sum().backward()
    assert leaf.grad.shape == (3, 4)


def test_a_size_of_one_that_is_a_symbol_stays_one() -> None:
    """A symbol that was not specialized to 0 or 1 elsewhere is not here either."""
    mode = FakeTensorMode(shape_env=ShapeEnv(specialize_zero_one=False))
    fake = mode.from_tensor(torch.empty(1, 3), source=LocalSource("x"))
    d = tfk.describe_tensor(fake)
    again = MetaConverter(dynamic_mode()).from_desc(d)
    assert [n.node.hint for n in again.shape] == [1, 3]


def test_plain_tensors_without_a_source_are_named_as_torch_names_them() -> None:
    """Symbols of unnamed tensors have torch's names."""
    theirs, ours = dynamic_mode(), dynamic_mode()
    converter = MetaConverter(ours)
    kept = []
    for t in (torch.empty(3, 4), torch.empty(4, 5), torch.empty(0, 1, 7)):
        kept.append(theirs.from_tensor(t))
        kept.append(converter.from_desc(tfk.describe_tensor(t, source=None)))
        assert str(kept[-1].shape) == str(kept[-2].shape)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float64, torch.float32])
def test_item_symbols_equal_torchs(dtype: torch.dtype) -> None:
    """`item()` of a scalar input is the symbol that torch makes; a stale one is forgotten."""
    t, source = torch.tensor(3, dtype=dtype), LocalSource("n")
    theirs, ours = dynamic_mode(), dynamic_mode()
    a = theirs.from_tensor(t, source=source)
    b = MetaConverter(ours).from_desc(tfk.describe_tensor(t, source=source))
    assert str(a.item_memo) == str(b.item_memo)
    ours.shape_env.check_equal(theirs.shape_env)
    if dtype in (torch.int64, torch.float64):
        with ours:
            assert str(b.item()) == str(b.item_memo)
        with ours, torch.no_grad():
            b.add_(1)
        assert b.item_memo is None or dtype is torch.float64


def test_hint_overrides_reach_the_shape_env() -> None:
    """A marked hint is the hint of the symbol, as in torch's from_tensor."""
    t, source = torch.empty(8, 3), LocalSource("x")
    torch._dynamo.mark_dynamic(t, 0, hint_override=100)
    theirs, ours = dynamic_mode(), dynamic_mode()
    a = theirs.from_tensor(t, source=source)
    b = MetaConverter(ours).from_desc(tfk.describe_tensor(t, source=source))
    assert str(a.shape) == str(b.shape)
    assert a.shape[0].node.hint == b.shape[0].node.hint == 100
    ours.shape_env.check_equal(theirs.shape_env)


def test_marks_are_put_back_so_that_dynamo_reads_them() -> None:
    """The fake tensor has the attributes, not only a record that says so."""
    t = torch.empty(8, 8, 8)
    torch._dynamo.mark_dynamic(t, 0, min=2, max=9, specialize_on=[lambda n: n % 4 == 0])
    torch._dynamo.decorators.mark_unbacked(t, 1, min=1)
    torch._dynamo.mark_static_address(t)
    fake = MetaConverter(FakeTensorMode()).from_desc(tfk.describe_tensor(t))
    names = sorted(name for name in vars(t) if name != "_specialize_on")
    for name in names:
        assert getattr(fake, name) == getattr(t, name), name
    # mark_unbacked forgets the dim that mark_dynamic put there.
    assert fake._specialize_on.keys() >= t._specialize_on.keys()


def test_a_condition_to_specialize_on_is_a_function_again() -> None:
    """The lambda's record, called with a size, says what the lambda said."""
    t = torch.empty(8)
    torch._dynamo.mark_dynamic(t, 0, specialize_on=[lambda n: n % 4 == 0])
    fake = MetaConverter(FakeTensorMode()).from_desc(tfk.describe_tensor(t))
    (condition,) = fake._specialize_on[0]
    assert [bool(condition(n)) for n in (7, 8)] == [False, True]
    size = dynamic_mode().from_tensor(t, source=LocalSource("x")).shape[0]
    assert str(condition(size).node.expr) == f"Eq(Mod({size}, 4), 0)"


@pytest.mark.parametrize("device", ["cuda:1", "cuda:0", "xpu:0", "mps:0", "hpu:2", "meta"])
def test_devices_that_this_machine_lacks(device: str) -> None:
    """A record from another machine's device rebuilds here, views and gradients included."""
    d = tfk.describe_tensor(torch.nn.Parameter(torch.empty(4, 4)).t())
    d = with_device(d, device)
    fake = MetaConverter(FakeTensorMode()).from_desc(d)
    assert fake.device == fake._base.device == torch.device(device)
    with fake.fake_mode, torch.no_grad():
        assert (fake @ fake).device == torch.device(device)
    assert canonical(tfk.describe_tensor(fake)) == canonical(d)


def with_device(d: MetaTensorDesc, device: str) -> MetaTensorDesc:
    """The record with another device."""
    base = None if d.base is None else with_device(d.base, device)
    return msgspec.structs.replace(d, device=device, base=base)


def test_history_is_there_and_not_to_be_run() -> None:
    """A non-leaf's stand-in is a non-leaf; backward through it is an error that says why."""
    x = torch.empty(3, requires_grad=True)
    mode = FakeTensorMode()
    fake = MetaConverter(mode).from_desc(tfk.describe_tensor(x * 2))
    with mode, pytest.raises(RuntimeError, match="Tried to backward"):
        fake.sum().backward()


# --- records of fake tensors --------------------------------------------------------------------


def traced() -> tuple[FakeTensorMode, list[torch.Tensor]]:
    """Fake tensors with shared symbols, formulas, and an unbacked size."""
    mode = dynamic_mode()
    x = mode.from_tensor(torch.empty(3, 5), source=LocalSource("x"))
    y = mode.from_tensor(torch.empty(5, 7), source=LocalSource("y"))
    with mode:
        product = x @ y
        flat = torch.cat([x, x]).flatten()
        picked = torch.nonzero(product)
        return mode, [x, y, product, flat, picked, x.t(), picked.t()]


def test_records_of_fakes_keep_their_symbols() -> None:
    """With "keep" and the same ShapeEnv, the sizes are the very same expressions."""
    mode, fakes = traced()
    describer = MetaTensorDescriber()
    records = [describer.describe_tensor(t) for t in fakes]
    other = FakeTensorMode(shape_env=mode.shape_env)
    converter = MetaConverter(other, symbols="keep")
    guards = len(mode.shape_env.guards)
    for t, d in zip(fakes, records, strict=True):
        again = converter.from_desc(d)
        assert str((again.shape, again.stride(), again.storage_offset())) == str(
            (t.shape, t.stride(), t.storage_offset())
        )
        assert [getattr(n, "node", None) and n.node.hint for n in again.shape] == [
            getattr(n, "node", None) and n.node.hint for n in t.shape
        ]
        assert without_storage(hinted(tfk.describe_tensor(again))) == without_storage(hinted(d))
    assert len(mode.shape_env.guards) == guards


def test_an_unknown_symbol_is_named() -> None:
    """With "keep", a ShapeEnv that lacks a symbol of the record is an error."""
    _, fakes = traced()
    d = MetaTensorDescriber().describe_tensor(fakes[0])
    symbol = str(fakes[0].shape[0])
    with pytest.raises(tfk.ConvertError) as error:
        MetaConverter(dynamic_mode(), symbols="keep").from_desc(d)
    assert str(error.value) == (
        f"tensor 0: the symbol `{symbol}` is not in the ShapeEnv; expected a ShapeEnv that was"
        f" restored together with the record; found an expression over {symbol}. Convert with"
        ' symbols="fresh", or restore the ShapeEnv of the record'
    )


def test_records_of_fakes_get_fresh_symbols_that_relate_as_the_old_ones() -> None:
    """With "fresh", shared symbols stay shared, formulas formulas, unbacked unbacked."""
    _, fakes = traced()
    describer = MetaTensorDescriber()
    records = [describer.describe_tensor(t) for t in fakes]
    mode = dynamic_mode()
    converter = MetaConverter(mode)
    x, y, product, flat, picked, xt, _ = [converter.from_desc(d) for d in records]

    def expr(n: Any) -> Any:
        return n.node.expr

    s0, s1, s2 = expr(x.shape[0]), expr(x.shape[1]), expr(y.shape[1])
    assert len({s0, s1, s2}) == 3
    assert expr(y.shape[0]) == s1
    assert (expr(product.shape[0]), expr(product.shape[1])) == (s0, s2)
    assert expr(flat.shape[0]) == 2 * s0 * s1
    assert expr(xt.stride()[1]) == s1
    assert xt._base is x
    u0 = expr(picked.shape[0])
    assert u0.name.startswith("u")
    assert picked.stride()[1].node.expr == u0
    assert mode.shape_env.var_to_range[u0] == traced_range(fakes[4])
    assert u0 in mode.shape_env.size_like
    assert [n.node.hint for n in x.shape] == [3, 5]
    assert mode.shape_env.guards == []


def traced_range(t: torch.Tensor) -> ValueRanges:
    """The value range of a fake tensor's first size."""
    sym_node = t.shape[0].node
    return sym_node.shape_env.var_to_range[sym_node.expr]


def test_records_of_symbolic_fakes_have_hints_for_a_static_mode() -> None:
    """Without a ShapeEnv the hints are the sizes, and a size without one is an error."""
    _, fakes = traced()
    describer = MetaTensorDescriber()
    converter = MetaConverter(FakeTensorMode())
    assert converter.from_desc(describer.describe_tensor(fakes[3])).shape == (30,)
    with pytest.raises(tfk.ConvertError, match="an unbacked size has no integer value"):
        converter.from_desc(describer.describe_tensor(fakes[4]))


def test_the_policy_of_a_fakes_record_is_followed() -> None:
    """A fake tensor's record with source and context gives symbols by them, from the hints."""
    _, fakes = traced()
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.STATIC, DimDynamic.DYNAMIC])
    d = tfk.describe_tensor(fakes[0], source=LocalSource("x"), symbolic_context=context)
    mode = dynamic_mode()
    fake = MetaConverter(mode).from_desc(d)
    assert fake.shape[0] == 3
    assert isinstance(fake.shape[1], torch.SymInt)
    (source,) = mode.shape_env.var_to_sources[fake.shape[1].node.expr]
    assert source.name == "L['x'].size()[1]"


# --- across processes ---------------------------------------------------------------------------

CHILD = """
import sys
import torch_fakeify as tfk
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch_fakeify.convert.converter import MetaConverter
from torch_fakeify.describe.describer import MetaTensorDescriber

records = tfk.loads(sys.stdin.buffer.read())
for mode in (FakeTensorMode(), FakeTensorMode(shape_env=ShapeEnv())):
    converter = MetaConverter(mode)
    fakes = [converter.from_desc(d) for d in records]
    print([[str(tuple(t.shape)), str(t.device), t._is_view(), t.is_leaf] for t in fakes])
    print([[a.untyped_storage() is b.untyped_storage(), a._base is b] for a in fakes for b in fakes])
"""


def test_a_fresh_process_rebuilds_what_was_described_here() -> None:
    """Bytes alone carry the tensors: the other interpreter gives the same fakes.

    The first is a view on a device that this machine lacks: nothing has prepared torch for it.
    """
    away = torch.nn.Parameter(torch.empty(4, 4)).t()
    p = torch.nn.Parameter(torch.empty(6, 4))
    p.grad = torch.empty(6, 4)
    group = [away, p, p.t(), p.split(2)[1], p * 2, p.detach(), torch.tensor(3), torch.empty(0, 2)]
    describer = MetaTensorDescriber()
    records = [
        describer.describe_tensor(t, source=LocalSource(f"x{i}")) for i, t in enumerate(group)
    ]
    records[0] = with_device(records[0], "cuda:0")
    lines = piped(CHILD, tfk.dumps(records)).decode().splitlines()
    for mode in (FakeTensorMode(), dynamic_mode()):
        fakes = convert_all(mode, records)
        assert lines.pop(0) == str(
            [[str(tuple(t.shape)), str(t.device), t._is_view(), t.is_leaf] for t in fakes]
        )
        assert lines.pop(0) == str(
            [
                [a.untyped_storage() is b.untyped_storage(), a._base is b]
                for a in fakes
                for b in fakes
            ]
        )
