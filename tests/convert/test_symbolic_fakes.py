"""Tensors of one layout, made from a cache, are what torch makes of each."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from converted_checks import UncachedConverter
from hypothesis import given, settings
from hypothesis import strategies as st
from test_size_symbols import described, layout, state
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatefulSymbolicContext,
    StatelessSymbolicContext,
)
from torch.utils._python_dispatch import TorchDispatchMode

import torch_fakeify as tfk
from torch_fakeify.convert.converter import MetaConverter

if TYPE_CHECKING:
    from collections.abc import Sequence


def fakes_of(
    tensors: Sequence[torch.Tensor],
    env: ShapeEnv,
    dim: DimDynamic = DimDynamic.DUCK,
    converter_of: type[MetaConverter] = MetaConverter,
) -> list[Any]:
    """Fake tensors under the policy that every dim is of this kind."""
    converter = converter_of(FakeTensorMode(shape_env=env))
    describer = tfk.MetaTensorDescriber()
    return [
        converter.from_desc(
            describer.describe_tensor(
                t,
                source=LocalSource(f"x{i}"),
                symbolic_context=StatelessSymbolicContext(dynamic_sizes=[dim] * t.ndim),
            )
        )
        for i, t in enumerate(tensors)
    ]


def facts(env: ShapeEnv) -> list[Any]:
    """The tables of a ShapeEnv in the order of their entries."""
    tables = (
        "source_to_var",
        "backed_var_to_val",
        "val_to_var",
        "var_to_range",
        "var_to_sources",
        "symbol_guard_counter",
        "counter",
    )
    found: list[Any] = [list(getattr(env, name).items()) for name in tables]
    names = [[part.name for part in parts] for parts in env.var_to_sources.values()]
    return [*found, names, sorted(env.unique_ids), [str(guard.expr) for guard in env.guards]]


def attributes(fake: Any) -> list[Any]:
    """What is known of a fake tensor besides its geometry."""
    more = {name: value for name, value in vars(fake).items() if name != "fake_mode"}
    state = fake.requires_grad, fake.is_leaf, fake._version, fake._is_view(), fake.grad_fn
    return [layout(fake), type(fake), state, more, str(torch._C._dispatch_keys(fake))]


@settings(max_examples=60)
@given(described(), st.integers(1, 4), st.booleans())
def test_repeated_layouts_are_what_torch_makes(
    inputs: list[tuple[torch.Tensor, Any, Any]], times: int, parameters: bool
) -> None:
    """Records, plain and by the walk, and torch: fake tensors and all of the ShapeEnv."""
    repeated = []
    for n in range(times):
        for t, source, policy in inputs:
            t = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta")
            if parameters and t.dtype.is_floating_point:
                t = torch.nn.Parameter(t)
            kind, dims = type(policy), list(policy.dynamic_sizes)
            more = {} if kind is StatelessSymbolicContext else {"tensor_source": source}
            name = LocalSource(f"{source.name}{n}") if n else source
            repeated.append((t, name, lambda k=kind, d=dims, m=more: k(dynamic_sizes=d, **m)))
    describer = tfk.MetaTensorDescriber()
    records = [
        describer.describe_tensor(t, source=source, symbolic_context=policy())
        for t, source, policy in repeated
    ]
    envs, made = [], []
    for way in ("torch", UncachedConverter, MetaConverter):
        mode = FakeTensorMode(shape_env=ShapeEnv())
        if isinstance(way, str):
            fakes = [
                mode.from_tensor(t, source=source, symbolic_context=policy())
                for t, source, policy in repeated
            ]
        else:
            converter = way(mode)
            fakes = [converter.from_desc(d) for d in records]
        made.append([attributes(fake) for fake in fakes])
        envs.append(mode.shape_env)
    assert made[0] == made[1] == made[2]
    assert facts(envs[0]) == facts(envs[1]) == facts(envs[2])
    envs[0].check_equal(envs[2])
    assert state(envs[1]) == state(envs[2])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("ndim", [3, 4, 5])
@pytest.mark.parametrize("of_ones", [True, False])
@pytest.mark.parametrize("is_leaf", [True, False])
def test_strides_that_torchs_cache_of_operators_compares(
    ndim: int, of_ones: bool, is_leaf: bool
) -> None:
    """A history costs an operator; of 4 and 5 dims it asks whether channels are last."""
    sizes = [1] * ndim if of_ones else list(range(2, 2 + ndim))
    for strides in itertools.permutations(range(0, 2 * ndim, 2)):
        t = torch.empty_strided(sizes, strides, requires_grad=True)
        if not is_leaf:
            t = t.new_empty(()).requires_grad_().expand(t.shape).clone()
            t.data = torch.empty_strided(sizes, strides)
        theirs, ours = (FakeTensorMode(shape_env=ShapeEnv()) for _ in range(2))
        expected = theirs.from_tensor(t, source=LocalSource("x"))
        record = tfk.MetaTensorDescriber().describe_tensor(t, source=LocalSource("x"))
        fake = MetaConverter(ours).from_desc(record)
        assert (layout(fake), fake.is_leaf) == (layout(expected), is_leaf)
        assert facts(ours.shape_env) == facts(theirs.shape_env), (sizes, strides)


def test_each_has_nodes_a_storage_and_a_version_of_its_own() -> None:
    """Tracers tell tensors apart by the nodes of their sizes."""
    a, b, c = fakes_of([torch.empty(4, 5) for _ in range(5)], ShapeEnv())[2:]
    nodes = {id(n.node) for fake in (a, b, c) for n in (*fake.size(), fake.stride(0))}
    assert len(nodes) == 9
    assert b.size(0).node._value_eq(c.size(0).node)
    with b.fake_mode:
        b.add_(1)
    assert [a._version, b._version, c._version] == [0, 1, 0]
    b.untyped_storage().resize_(0)
    assert c.untyped_storage().nbytes() == 80


def test_a_trace_takes_sizes_of_the_tensor_that_is_asked() -> None:
    """As torch's own fake tensors do, though the other tensor has an equal size."""
    env = ShapeEnv()
    a, b, c = fakes_of([torch.empty(4, 5) for _ in range(5)], env)[2:]
    with b.fake_mode:
        gm = make_fx(lambda x, y: x.view(y.size(0) * y.size(1)), tracing_mode="real")(b, c)
    assert "sym_size.int(y_1, 0)" in gm.code
    del a


def test_a_size_that_was_specialized_is_no_longer_symbolic() -> None:
    """What the ShapeEnv has learned since the prototype was made holds for the next tensor."""
    made = []
    for converter_of in (MetaConverter, UncachedConverter):
        env = ShapeEnv()
        describer = tfk.MetaTensorDescriber()
        converter = converter_of(FakeTensorMode(shape_env=env))
        fakes = []
        for i in range(6):
            if i == 4:
                assert fakes[0].size(0) == 4
            t = torch.empty(4, 5)
            d = describer.describe_tensor(t, source=LocalSource(f"x{i}"))
            fakes.append(converter.from_desc(d))
        made.append([*map(layout, fakes), *facts(env)])
    assert made[0] == made[1]


def test_symbols_that_were_rolled_back_are_made_anew() -> None:
    """A prototype whose symbols are gone is not used."""
    env = ShapeEnv()
    describer = tfk.MetaTensorDescriber()
    converter = MetaConverter(FakeTensorMode(shape_env=env))
    kept = [torch.empty(4, 5) for _ in range(3)]
    records = [
        describer.describe_tensor(t, source=LocalSource(f"x{i}")) for i, t in enumerate(kept)
    ]
    checkpoint = tfk.checkpoint(env)
    first = converter.from_desc(records[0])
    checkpoint.rollback()
    assert not env.source_to_var
    second, third = converter.from_desc(records[1]), converter.from_desc(records[2])
    assert [len(parts) for parts in env.var_to_sources.values()] == [2, 2]
    assert layout(second) == layout(third)
    assert sorted(env.source_to_var) == [f"L['x{i}'].size()[{j}]" for i in (1, 2) for j in (0, 1)]
    del first


@pytest.mark.parametrize("more", [{"should_record_events": True}, {"duck_shape": False}, {}])
def test_settings_of_the_shape_env(more: dict[str, Any]) -> None:
    """Events are recorded as ever, and without duck shapes no symbol is shared."""
    made = []
    for converter_of in (MetaConverter, UncachedConverter):
        env = ShapeEnv(**more)
        fakes = fakes_of([torch.empty(4, 5) for _ in range(4)], env, converter_of=converter_of)
        made.append([*map(layout, fakes), *facts(env), [event.name for event in env.events]])
    assert made[0] == made[1]


@pytest.mark.parametrize("dim", [DimDynamic.DYNAMIC, DimDynamic.STATIC])
def test_other_kinds_of_dims(dim: DimDynamic) -> None:
    """Dynamic dims get a symbol each; static ones are integers."""
    made = []
    for converter_of in (MetaConverter, UncachedConverter):
        env = ShapeEnv()
        fakes = fakes_of([torch.empty(4, 5) for _ in range(4)], env, dim, converter_of=converter_of)
        made.append([*map(layout, fakes), *facts(env)])
    assert made[0] == made[1]


def test_a_stateful_context_remembers_the_symbols() -> None:
    """Under the names of the sources, as torch puts them there."""
    caches = []
    for converter_of in (MetaConverter, UncachedConverter):
        env = ShapeEnv()
        describer = tfk.MetaTensorDescriber()
        converter = converter_of(FakeTensorMode(shape_env=env))
        for i in range(3):
            t, source = torch.empty(4, 5), LocalSource(f"x{i}")
            dims = [DimDynamic.DUCK, DimDynamic.STATIC]
            policy = StatefulSymbolicContext(dynamic_sizes=dims, tensor_source=source)
            d = describer.describe_tensor(t, source=source)
            converter.from_desc(d, symbolic_context=policy)
        caches.append(list(policy.shape_env_to_source_to_symbol_cache.values()))
    assert caches[0] == caches[1]
    assert caches[0][0]


def test_two_converters_of_one_shape_env_share_its_symbols() -> None:
    """Each has prototypes of its own over the same symbols."""
    env = ShapeEnv()
    one = fakes_of([torch.empty(4, 5) for _ in range(2)], env)
    other = fakes_of([torch.empty(4, 5) for _ in range(2)], env)
    assert {str(fake.size(0)) for fake in (*one, *other)} == {str(one[0].size(0))}
    assert len(env.backed_var_to_val) == 2


def test_modes_around_the_call_see_nothing() -> None:
    """Neither a dispatch mode nor one of torch functions."""
    seen: list[Any] = []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    tensors = [torch.empty(4, 5) for _ in range(4)]
    with Dispatch():
        inside = fakes_of(tensors, ShapeEnv())
    assert not seen
    with torch.device("cpu"):
        within = fakes_of(tensors, ShapeEnv())
    assert [*map(attributes, inside)] == [*map(attributes, within)]


def test_the_python_dispatcher_sees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks up how an alias is made."""
    alias: Any = torch.ops.aten.alias.default
    asked: list[Any] = []
    plain = alias._get_dispatch
    monkeypatch.setattr(alias, "_get_dispatch", lambda key: asked.append(key) or plain(key))
    tensors = [torch.empty(4, 5) for _ in range(4)]
    with enable_python_dispatcher():
        alias._dispatch_cache.clear()
        torch.empty(3, device="meta")[...]
        assert asked
        asked.clear()
        alias._dispatch_cache.clear()
        fakes_of(tensors, ShapeEnv())
    assert not asked


def test_keys_that_are_excluded_stay_excluded() -> None:
    """Those of the caller, and no others."""
    key = torch._C.DispatchKey.ADInplaceOrView
    tensors = [torch.empty(4, 5) for _ in range(4)]
    for excluded in (False, True):
        was = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, excluded)
        try:
            fakes_of(tensors, ShapeEnv())
            assert torch._C._dispatch_tls_is_dispatch_key_excluded(key) == excluded
        finally:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, was)


def test_a_bad_record_is_refused_as_ever() -> None:
    """A second tensor whose storage is out of range is refused though its layout is known."""
    env = ShapeEnv()
    describer = tfk.MetaTensorDescriber()
    converter = MetaConverter(FakeTensorMode(shape_env=env))
    kept = [torch.empty(4, 5) for _ in range(2)]
    a, b = (describer.describe_tensor(t, source=LocalSource(f"x{i}")) for i, t in enumerate(kept))
    converter.from_desc(a)
    import msgspec

    bad = msgspec.structs.replace(b, storage=msgspec.structs.replace(b.storage, nbytes=-1))
    with pytest.raises(tfk.ConvertError, match="a size is out of range"):
        converter.from_desc(bad)


VIEWS: list[Any] = [
    lambda t: t[1:],
    lambda t: t.t(),
    lambda t: t[:, 2],
    lambda t: t.unsqueeze(1).expand(4, 3, 5),
    lambda t: t.view(-1),
    lambda t: t.detach(),
    lambda t: t[2:2],
]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("way", range(len(VIEWS)))
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("base_grad", [False, True])
def test_views_are_what_torch_makes(way: int, grad: bool, base_grad: bool) -> None:
    """Views of bases of one layout, that require grad, have a history, or neither."""
    inputs = []
    for i in range(5):
        base = torch.empty(4, 5, requires_grad=base_grad)
        with torch.set_grad_enabled(grad):
            t = VIEWS[way](base)
        dims = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DUCK] * 2)
        policy = StatelessSymbolicContext(
            dynamic_sizes=[DimDynamic.DUCK] * t.ndim,
            view_base_context=dims if t._is_view() else None,
        )
        inputs.append((t, LocalSource(f"x{i}"), policy))
    describer = tfk.MetaTensorDescriber()
    records = [
        describer.describe_tensor(t, source=source, symbolic_context=policy)
        for t, source, policy in inputs
    ]
    found = []
    for way in ("torch", UncachedConverter, MetaConverter):
        mode = FakeTensorMode(shape_env=ShapeEnv())
        if isinstance(way, str):
            fakes: list[Any] = [
                mode.from_tensor(t, source=source, symbolic_context=policy)
                for t, source, policy in inputs
            ]
        else:
            converter = way(mode)
            fakes = [converter.from_desc(d) for d in records]
        guards = facts(mode.shape_env)
        found.append([guards])
        for fake in fakes:
            base = fake._base
            known = [type(fake.grad_fn).__name__, fake._version, fake._is_view(), layout(fake)]
            found[-1].append(known)
            if base is not None:
                same = fake.untyped_storage()._cdata == base.untyped_storage()._cdata
                meta = torch._C._autograd._get_creation_meta(fake)
                found[-1].append([same, meta, base.requires_grad, base.is_leaf, layout(base)])
    assert found[0] == found[1]
    assert found[1] == found[2]


def _view_records(count: int, **more: Any) -> tuple[list[torch.Tensor], list[Any]]:
    """Tensors of one layout that are views, and their records."""
    describer = tfk.MetaTensorDescriber()
    kept = [torch.empty(4, 5, **more).detach()[1:] for _ in range(count)]
    return kept, [
        describer.describe_tensor(t, source=LocalSource(f"x{i}")) for i, t in enumerate(kept)
    ]


@pytest.mark.parametrize("around", ["no_grad", "grad"])
@pytest.mark.parametrize("base_grad", [False, True])
@pytest.mark.parametrize("made_in", ["no_grad", "grad"])
def test_views_like_others_note_what_grad_mode_theirs_were_made_in(
    around: str, base_grad: bool, made_in: str
) -> None:
    """Not that of the call, which stays as it is."""
    tensors = []
    for _ in range(4):
        base = torch.empty(4, 5, requires_grad=base_grad)
        with torch.set_grad_enabled(made_in == "grad" and not base_grad):
            tensors.append(base[1:])
    describer = tfk.MetaTensorDescriber()
    records = [
        describer.describe_tensor(t, source=LocalSource(f"x{i}")) for i, t in enumerate(tensors)
    ]
    found = []
    for converter_of in (UncachedConverter, MetaConverter):
        converter = converter_of(FakeTensorMode(shape_env=ShapeEnv()))
        with torch.set_grad_enabled(around == "grad"):
            fakes: list[Any] = [converter.from_desc(d) for d in records]
            assert torch.is_grad_enabled() == (around == "grad")
        metas = [torch._C._autograd._get_creation_meta(fake) for fake in fakes]
        states = [(f.requires_grad, f.is_leaf, f.grad_fn, f._base.requires_grad) for f in fakes]
        found.append([metas, states])
    assert found[0] == found[1]
    names = [torch._C._autograd._get_creation_meta(t) for t in tensors]
    assert found[1][0] == names


def test_modes_around_a_view_like_another_one_see_nothing() -> None:
    """Neither of its base nor of itself, and they stay where they are."""
    seen: list[Any] = []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    _, records = _view_records(4)
    converter = MetaConverter(FakeTensorMode(shape_env=ShapeEnv()))
    fakes: list[Any] = [converter.from_desc(d) for d in records[:2]]
    with Dispatch():
        fakes += [converter.from_desc(d) for d in records[2:]]
        assert not seen
        torch.empty(1)
        assert seen
    assert all(attributes(fake) == attributes(fakes[0]) for fake in fakes)
    assert all(layout(fake._base) == layout(fakes[0]._base) for fake in fakes)


def test_a_bad_view_like_another_one_is_refused_as_ever() -> None:
    """Its storage is not part of what is known of the layout, nor of the base that there is."""
    import msgspec

    describer = tfk.MetaTensorDescriber()
    base = torch.empty(4, 5)
    tensors = [base[1:] for _ in range(4)]
    records = [
        describer.describe_tensor(t, source=LocalSource(f"x{i}")) for i, t in enumerate(tensors)
    ]
    converter = MetaConverter(FakeTensorMode(shape_env=ShapeEnv()))
    kept = [converter.from_desc(d) for d in records[:3]]
    assert len({id(fake._base) for fake in kept}) == 1
    d = records[3]
    storage = msgspec.structs.replace(d.storage, nbytes=-1)
    bad = msgspec.structs.replace(
        d, storage=storage, base=msgspec.structs.replace(d.base, storage=storage)
    )
    with pytest.raises(tfk.ConvertError, match="a size is out of range"):
        converter.from_desc(bad)
