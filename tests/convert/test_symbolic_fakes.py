"""Symbolic fake tensors: cached layouts and own symbols give what torch makes of each tensor."""

from __future__ import annotations

import itertools
import logging
import re
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest
import torch
from converted_checks import UncachedConverter, dynamic_mode
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import AttrSource, EphemeralSource, LocalSource
from torch._guards import TracingContext, tracing
from torch._logging._internal import LazyTraceHandler, trace_log
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
from torch_fakeify.convert import meta_tensors, size_symbols
from torch_fakeify.convert.converter import MetaConverter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KINDS = [DimDynamic.DUCK, DimDynamic.DYNAMIC, DimDynamic.STATIC]
_OWN_FRAME = re.compile(
    r"""FrameDesc\(file='[^']*torch_fakeify[^']*', line=.*?, code=('[^']*'|"[^"]*")\)"""
)

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


class Input(NamedTuple):
    """A tensor with its source, and a function that makes its policy."""

    tensor: torch.Tensor
    source: Any
    policy: Callable[[], Any]


def inputs_of(
    tensors: Sequence[torch.Tensor], dim: DimDynamic = DimDynamic.DUCK, first: int = 0
) -> list[Input]:
    """Inputs under the policy that every dim is of this kind, also of bases."""

    def policy(t: torch.Tensor) -> Any:
        base = policy(t._base) if t._is_view() else None
        return StatelessSymbolicContext([dim] * t.ndim, view_base_context=base)

    return [
        Input(t, LocalSource(f"x{i}"), lambda t=t: policy(t)) for i, t in enumerate(tensors, first)
    ]


def records_of(inputs: Sequence[Input]) -> list[Any]:
    """The records of inputs, by one describer."""
    describer = tfk.MetaTensorDescriber()
    return [
        describer.describe_tensor(t, source=source, symbolic_context=policy())
        for t, source, policy in inputs
    ]


def fakes_of(tensors: Sequence[torch.Tensor], env: ShapeEnv | None = None) -> list[Any]:
    """Fake tensors of tensors by one converter, every dim dynamic."""
    converter = MetaConverter(FakeTensorMode(shape_env=env or ShapeEnv()))
    return [converter.from_desc(d) for d in records_of(inputs_of(tensors))]


def layout(t: torch.Tensor) -> tuple[Any, ...]:
    """Sizes, strides, offset and storage size as expressions."""
    numbers = (*t.size(), *t.stride(), t.storage_offset(), t.untyped_storage().nbytes())
    parts = [(n.node.expr, n.node.hint) if isinstance(n, torch.SymInt) else n for n in numbers]
    return (*parts, t.dtype, t.device, t.is_contiguous())


def facts(fake: Any) -> list[Any]:
    """What is known of a fake tensor, and of its base if it is a view."""
    attributes = {name: value for name, value in vars(fake).items() if name != "fake_mode"}
    state = fake.requires_grad, fake.is_leaf, fake._version, type(fake.grad_fn).__name__
    found = [layout(fake), type(fake), state, attributes, str(torch._C._dispatch_keys(fake))]
    if not fake._is_view():
        return found
    same = fake.untyped_storage()._cdata == fake._base.untyped_storage()._cdata
    return [*found, same, torch._C._autograd._get_creation_meta(fake), facts(fake._base)]


def nbytes(fake: torch.Tensor) -> Any:
    """The size of a storage as it was computed, without what the ShapeEnv learned afterwards."""
    n: Any = fake.untyped_storage().nbytes()
    return n if isinstance(n, int) else n.node._expr


def state(env: ShapeEnv) -> str:
    """Everything that is recorded of a ShapeEnv, without which line of this package made it."""
    return _OWN_FRAME.sub("", repr(tfk.snapshot(env)))


def env_facts(env: ShapeEnv) -> list[Any]:
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
    ids, guards = list(env.unique_ids), [str(guard.expr) for guard in env.guards]
    return [*found, names, ids, guards, [event.name for event in env.events]]


def by_torch(inputs: Sequence[Input]) -> tuple[ShapeEnv, list[Any]]:
    """What torch's ``from_tensor`` makes of inputs."""
    mode = dynamic_mode()
    fakes = [
        mode.from_tensor(t, source=source, symbolic_context=policy())
        for t, source, policy in inputs
    ]
    return mode.shape_env, fakes


def assert_as_torch(inputs: Sequence[Input]) -> None:
    """Fake tensors and the whole ShapeEnv, with and without caches, equal torch's."""
    env, fakes = by_torch(inputs)
    # Asking for contiguity may add guards.
    expected = [*map(facts, fakes)], env_facts(env)
    envs = []
    for converter_of in (UncachedConverter, MetaConverter):
        mode = dynamic_mode()
        converter = converter_of(mode)
        made = [converter.from_desc(d) for d in records_of(inputs)]
        assert ([*map(facts, made)], env_facts(mode.shape_env)) == expected
        envs.append(mode.shape_env)
    envs[0].check_equal(env)
    envs[1].check_equal(env)
    assert state(envs[0]) == state(envs[1])


@st.composite
def described(draw: Any) -> list[Input]:
    """Tensors of few sizes, so that many are equal, each with its source and policy."""
    found = []
    for i in range(draw(st.integers(1, 5))):
        size = draw(st.lists(st.sampled_from([0, 1, 2, 3, 6]), max_size=3))
        dtype = draw(st.sampled_from([torch.float32, torch.int8, torch.float64]))
        t = torch.empty(size, dtype=dtype, device="meta")
        if draw(st.booleans()) and t.ndim > 1:
            t = torch.empty_strided(size, draw(st.permutations(t.stride())), device="meta")
        source: Any = LocalSource(f"x{i}")
        if draw(st.booleans()):
            source = AttrSource(EphemeralSource(f"e{i}"), "inner")
        kinds = draw(st.lists(st.sampled_from(KINDS), min_size=t.ndim, max_size=t.ndim))
        found.append(Input(t, source, draw(policies_of(kinds, source))))
    return found


def policies_of(kinds: list[DimDynamic], source: Any) -> Any:
    """Functions that make a stateless or a stateful policy."""
    return st.sampled_from([
        lambda: StatelessSymbolicContext(dynamic_sizes=kinds),
        lambda: StatefulSymbolicContext(dynamic_sizes=kinds, tensor_source=source),
    ])  # fmt: skip


@settings(max_examples=100)
@given(described(), st.integers(1, 4), st.booleans())
def test_repeated_layouts_are_what_torch_makes(
    inputs: list[Input], times: int, parameters: bool
) -> None:
    """Tensors of sizes and policies that were there before, each with a source of its own."""
    repeated = []
    for n, (t, source, policy) in itertools.product(range(times), inputs):
        t = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta")
        if parameters and t.dtype.is_floating_point:
            t = torch.nn.Parameter(t)
        repeated.append(Input(t, LocalSource(f"{source.name}{n}") if n else source, policy))
    assert_as_torch(repeated)


VIEWS: list[Any] = [
    lambda t: t[1:],
    lambda t: t.t(),
    lambda t: t[:, 2],
    lambda t: t.unsqueeze(1).expand(4, 3, 5),
    lambda t: t.view(-1),
    lambda t: t.detach(),
    lambda t: t[2:2],
]


@pytest.mark.parametrize("way", range(len(VIEWS)))
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("base_grad", [False, True])
def test_views_are_what_torch_makes(way: int, grad: bool, base_grad: bool) -> None:
    """Views of bases of one layout, that require grad, have a history, or neither."""
    with torch.set_grad_enabled(grad):
        views = [VIEWS[way](torch.empty(4, 5, requires_grad=base_grad)) for _ in range(5)]
    inputs = inputs_of(views)
    assert_as_torch(inputs)
    for around in (torch.no_grad, torch.enable_grad):
        converter = MetaConverter(dynamic_mode())
        with around():
            before = torch.is_grad_enabled()
            fakes: list[Any] = [converter.from_desc(d) for d in records_of(inputs)]
            assert torch.is_grad_enabled() == before
        assert [*map(facts, fakes)] == [*map(facts, by_torch(inputs)[1])]


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
        theirs, ours = dynamic_mode(), dynamic_mode()
        expected = theirs.from_tensor(t, source=LocalSource("x"))
        fake = MetaConverter(ours).from_desc(tfk.describe_tensor(t, source=LocalSource("x")))
        assert (layout(fake), fake.is_leaf) == (layout(expected), is_leaf)
        assert env_facts(ours.shape_env) == env_facts(theirs.shape_env), (sizes, strides)


# --- with and without caches ----------------------------------------------------------------------


def specialized(convert: Callable[[Input], Any], env: ShapeEnv) -> list[Any]:
    """A size became a number after tensors of its layout were made; others have it, too."""
    inputs = inputs_of([*(torch.empty(4, 5) for _ in range(6)), torch.empty(5, 4, 5)])
    fakes = [convert(each) for each in inputs[:4]]
    assert fakes[0].size(0) == 4
    assert env.replacements
    return fakes + [convert(each) for each in inputs[4:]]


def replaced(convert: Callable[[Input], Any], env: ShapeEnv) -> list[Any]:
    """A guard made two symbols one before the storages of the next tensors."""
    fakes: list[Any] = []
    for i, kind in enumerate((DimDynamic.DYNAMIC, DimDynamic.DUCK, DimDynamic.DUCK)):
        fakes += map(convert, inputs_of([torch.empty([6] * (i + 1))], kind, first=i))
        assert fakes[0].size(0) == fakes[-1].size(0)
    assert env.replacements
    return fakes


def rolled_back(convert: Callable[[Input], Any], env: ShapeEnv) -> list[Any]:
    """Numbers above the first hundred, and those that a rollback has given back."""
    inputs = inputs_of([torch.empty(4, 5) for _ in range(200)], DimDynamic.DYNAMIC)
    fakes = [convert(each) for each in inputs[:100]]
    before = tfk.checkpoint(env)
    gone = [convert(each) for each in inputs[100:]]
    before.rollback()
    before.commit()
    assert len(gone) == 100
    again = [Input(t.clone(), source, policy) for t, source, policy in inputs[100:]]
    fakes += [convert(each) for each in again]
    assert len(env.backed_var_to_val) > 390
    return fakes


def duck_rolled_back(convert: Callable[[Input], Any], env: ShapeEnv) -> list[Any]:
    """The symbols of a cached layout are gone."""
    inputs = inputs_of([torch.empty(4, 5) for _ in range(3)])
    checkpoint = tfk.checkpoint(env)
    first = convert(inputs[0])
    checkpoint.rollback()
    assert first is not None
    assert not env.source_to_var
    fakes = [convert(each) for each in inputs[1:]]
    assert [len(parts) for parts in env.var_to_sources.values()] == [2, 2]
    assert layout(fakes[0]) == layout(fakes[1])
    return fakes


def with_lines(convert: Callable[[Input], Any], env: ShapeEnv) -> list[Any]:
    """The user's line of the tensors that were made in a ``TracingContext``, and of no other."""
    fakes = []
    inputs = inputs_of([torch.empty(6, 7) for _ in range(4)], DimDynamic.DYNAMIC)
    for each, line in zip(inputs, (None, 3, 4, None), strict=True):
        with ExitStack() as stack:
            if line is not None:
                stack.enter_context(tracing(TracingContext(FakeTensorMode(shape_env=env))))
                TracingContext.set_current_loc("theirs.py", line, "forward")
            fakes.append(convert(each))
    lines = [sloc.lower.maybe_user_loc for sloc in env.var_to_range_sloc.values()]
    assert [line is None for line in lines] == [True] * 2 + [False] * 4 + [True] * 2
    return fakes


def stateful(convert: Callable[[Input], Any], env: ShapeEnv) -> list[Any]:
    """The cache of a stateful policy is filled by the names of the sources."""
    fakes, caches = [], []
    for i in range(3):
        source, dims = LocalSource(f"x{i}"), [DimDynamic.DUCK, DimDynamic.STATIC]
        policy = StatefulSymbolicContext(dynamic_sizes=dims, tensor_source=source)
        fakes.append(convert(Input(torch.empty(4, 5), source, lambda policy=policy: policy)))
        caches.append(policy.shape_env_to_source_to_symbol_cache[id(env)])
    assert all(caches)
    return [*fakes, caches]


@pytest.mark.parametrize("options", [{}, {"should_record_events": True}, {"duck_shape": False}])
@pytest.mark.parametrize(
    "steps", [specialized, replaced, rolled_back, duck_rolled_back, with_lines, stateful]
)
def test_caches_change_nothing(
    steps: Callable[[Callable[[Input], Any], ShapeEnv], list[Any]], options: dict[str, Any]
) -> None:
    """Tensors, and the ShapeEnv with its events, where something happens between two tensors."""
    if steps is duck_rolled_back and "duck_shape" in options:
        steps = rolled_back
    found = []
    for converter_of in (UncachedConverter, MetaConverter):
        env = ShapeEnv(**options)
        converter, describer = (
            converter_of(FakeTensorMode(shape_env=env)),
            tfk.MetaTensorDescriber(),
        )

        def convert(each: Input, converter: Any = converter, describer: Any = describer) -> Any:
            d = describer.describe_tensor(each.tensor, source=each.source)
            return converter.from_desc(d, symbolic_context=each.policy())

        made = steps(convert, env)
        fakes = [[nbytes(t), facts(t)] if isinstance(t, torch.Tensor) else t for t in made]
        found.append([fakes, env_facts(env), state(env)])
    assert found[0] == found[1]


# --- one tensor beside another --------------------------------------------------------------------


def test_each_has_nodes_a_storage_and_a_version_of_its_own() -> None:
    """Tracers tell tensors apart by the nodes of their sizes."""
    a, b, c = fakes_of([torch.empty(4, 5) for _ in range(5)])[2:]
    nodes = {id(n.node) for fake in (a, b, c) for n in (*fake.size(), fake.stride(0))}
    assert len(nodes) == 9
    assert b.size(0).node._value_eq(c.size(0).node)
    with b.fake_mode:
        b.add_(1)
        assert (a.t() @ b).shape == (5, 5)
    assert [a._version, b._version, c._version] == [0, 1, 0]
    b.untyped_storage().resize_(0)
    assert c.untyped_storage().nbytes() == 80


def test_a_trace_takes_sizes_of_the_tensor_that_is_asked() -> None:
    """As torch's own fake tensors do, though the other tensor has an equal size."""
    a, b, c = fakes_of([torch.empty(4, 5) for _ in range(5)])[2:]
    with b.fake_mode:
        gm = make_fx(lambda x, y: x.view(y.size(0) * y.size(1)), tracing_mode="real")(b, c)
    assert "sym_size.int(y_1, 0)" in gm.code
    del a


def test_converters_of_one_shape_env_share_its_symbols() -> None:
    """Those of equal sizes, and those that a stateful policy has cached."""
    env = ShapeEnv()
    one, other = (fakes_of([torch.empty(4, 5) for _ in range(2)], env) for _ in range(2))
    assert {str(fake.size(0)) for fake in (*one, *other)} == {str(one[0].size(0))}
    t, source = torch.empty(4, 5), LocalSource("x")
    policy = StatefulSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2, tensor_source=source)
    d = tfk.describe_tensor(t, source=source)
    a, b = (
        MetaConverter(FakeTensorMode(shape_env=env)).from_desc(d, symbolic_context=policy)
        for _ in range(2)
    )
    assert layout(a) == layout(b)
    assert len(env.backed_var_to_val) == 4


@pytest.mark.parametrize("view", [False, True])
def test_a_bad_record_of_a_known_layout_is_refused(view: bool) -> None:
    """Its storage is not part of what is known of the layout, nor of a base that there is."""
    base = torch.empty(4, 5)
    *good, d = records_of(inputs_of([base[1:] if view else torch.empty(4, 5) for _ in range(4)]))
    converter = MetaConverter(dynamic_mode())
    made = [converter.from_desc(each) for each in good]
    storage = msgspec.structs.replace(d.storage, nbytes=-1)
    bad = msgspec.structs.replace(d, storage=storage)
    if view:
        assert len({id(fake._base) for fake in made}) == 1
        bad = msgspec.structs.replace(bad, base=msgspec.structs.replace(d.base, storage=storage))
    with pytest.raises(tfk.ConvertError, match="a size is out of range"):
        converter.from_desc(bad)


# --- who watches ----------------------------------------------------------------------------------


class Watching(TorchDispatchMode):
    """Notes each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_and_the_python_dispatcher_see_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No operator runs and nobody looks up how an alias is made, of the first and of later ones."""
    alias: Any = torch.ops.aten.alias.default
    asked: list[Any] = []
    plain = alias._get_dispatch
    monkeypatch.setattr(alias, "_get_dispatch", lambda key: asked.append(key) or plain(key))
    tensors = [t for _ in range(3) for t in (torch.empty(4, 5), torch.empty(4, 5).detach()[1:])]
    with enable_python_dispatcher():
        alias._dispatch_cache.clear()
        torch.empty(3, device="meta")[...]
        assert asked
        asked.clear()
        alias._dispatch_cache.clear()
        within = fakes_of(tensors)
    assert not asked
    records, converter = records_of(inputs_of(tensors)), MetaConverter(dynamic_mode())
    with Watching() as mode:
        inside = [converter.from_desc(d) for d in records]
        assert not mode.seen
        torch.empty(1)
        assert mode.seen
    assert [*map(facts, inside)] == [*map(facts, within)]


def test_the_cached_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch makes no symbol, but for one example in a process, and no meta tensor."""
    tensors = [torch.empty(4, 5), torch.empty(6, 7)]
    fakes_of(tensors)
    monkeypatch.setattr(ShapeEnv, "create_symbol", None)
    monkeypatch.setattr(meta_tensors, "empty_strided", None)
    assert len(fakes_of(tensors)) == 2


def test_logs_tell_of_every_symbol(caplog: pytest.LogCaptureFixture) -> None:
    """Somebody who reads torch's log of symbols sees them all."""
    with caplog.at_level(logging.INFO, "torch.fx.experimental.symbolic_shapes"):
        fakes_of([torch.empty(4, 5), torch.empty(6, 7)])
    assert sum("create_symbol" in record.getMessage() for record in caplog.records) == 4


def test_subclasses_of_the_shape_env_make_their_symbols() -> None:
    """What a subclass does in ``create_symbol`` is done."""

    class Counting(ShapeEnv):
        calls = 0

        def create_symbol(self, *args: Any, **more: Any) -> Any:
            Counting.calls += 1
            return super().create_symbol(*args, **more)

    fakes_of([torch.empty(4, 5), torch.empty(6, 7)], Counting())
    assert Counting.calls == 6
    assert size_symbols.FreshSizes(Counting()).make((4,), (1,), 0, LocalSource("x"), None) is None


def test_a_trace_that_nobody_asked_for_watches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own handler is there until the first record; one that writes is another matter."""
    env = ShapeEnv()
    idle, writes = LazyTraceHandler(None), LazyTraceHandler("/somewhere")
    for handlers, watched in (([], False), ([idle], False), ([idle, writes], True)):
        monkeypatch.setattr(trace_log, "handlers", handlers)
        assert size_symbols.is_symbol_creation_observed(env) is watched
    monkeypatch.setattr(trace_log, "handlers", [idle])
    monkeypatch.setenv("MAST_HPC_JOB_NAME", "job")
    assert size_symbols.is_symbol_creation_observed(env)
    monkeypatch.setattr(trace_log, "handlers", [logging.StreamHandler()])
    monkeypatch.delenv("MAST_HPC_JOB_NAME")
    assert size_symbols.is_symbol_creation_observed(env)


@given(st.lists(st.integers(0, 5), max_size=6))
def test_numbers_that_were_given_back_are_given_again(rollbacks: list[int]) -> None:
    """As torch numbers symbols, also when a ``ShapeEnv`` goes back to what it had before."""
    theirs, ours = ShapeEnv(), ShapeEnv()
    ids = size_symbols._UniqueIds(ours)
    kept: list[set[int]] = []
    for turn, back in enumerate(rollbacks):
        kept.append(set(ours.unique_ids))
        names = [f"L['x{turn}'].size()[{i}]" for i in range(70)]
        assert [ids.new(name) for name in names] == list(map(theirs._generate_unique_id, names))
        if back < len(kept):
            theirs.unique_ids, ours.unique_ids = set(kept[back]), set(kept[back])
