"""The short way to symbolic sizes gives what torch's own way gives."""

from __future__ import annotations

import logging
import re
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from converted_checks import UncachedConverter
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.source import AttrSource, EphemeralSource, LocalSource
from torch._guards import TracingContext, tracing
from torch._logging._internal import LazyTraceHandler, trace_log
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatefulSymbolicContext,
    StatelessSymbolicContext,
)

import torch_fakeify as tfk
from torch_fakeify.convert import meta_tensors, size_symbols
from torch_fakeify.convert.converter import MetaConverter

if TYPE_CHECKING:
    import pytest

KINDS = [DimDynamic.DUCK, DimDynamic.DYNAMIC, DimDynamic.STATIC]
_OWN_FRAME = re.compile(
    r"""FrameDesc\(file='[^']*torch_fakeify[^']*', line=.*?, code=('[^']*'|"[^"]*")\)"""
)


@st.composite
def described(draw: Any) -> list[tuple[torch.Tensor, Any, Any]]:
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
        if draw(st.booleans()):
            policy: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
        else:
            policy = StatefulSymbolicContext(dynamic_sizes=kinds, tensor_source=source)
        found.append((t, source, policy))
    return found


def state(env: ShapeEnv) -> str:
    """Everything that is recorded of a ShapeEnv, without which line of this package made it."""
    return _OWN_FRAME.sub("", repr(tfk.snapshot(env)))


def layout(t: torch.Tensor) -> tuple[Any, ...]:
    """Sizes, strides, offset and storage size as expressions."""
    numbers = (*t.size(), *t.stride(), t.storage_offset(), t.untyped_storage().nbytes())
    parts = [(n.node.expr, n.node.hint) if isinstance(n, torch.SymInt) else n for n in numbers]
    return (*parts, t.dtype, t.device, t.is_contiguous())


@settings(max_examples=150)
@given(described())
def test_the_short_way_gives_what_the_plain_way_gives(
    inputs: list[tuple[torch.Tensor, Any, Any]],
) -> None:
    """Sizes, storages, and the whole ShapeEnv: with value ranges, reasons, sources and counters."""
    describer = tfk.MetaTensorDescriber()
    records = [
        describer.describe_tensor(t, source=source, symbolic_context=policy)
        for t, source, policy in inputs
    ]
    envs, made = [], []
    for converter_of in (UncachedConverter, MetaConverter):
        mode = FakeTensorMode(shape_env=ShapeEnv())
        converter = converter_of(mode)
        fakes = [converter.from_desc(d) for d in records]
        assert mode.shape_env.guards == []
        # Asking for contiguity may add guards: after it the two are still compared.
        made.append([layout(fake) for fake in fakes])
        envs.append(mode.shape_env)
    assert made[0] == made[1]
    envs[0].check_equal(envs[1])
    assert state(envs[0]) == state(envs[1])
    assert envs[0].counter == envs[1].counter
    assert envs[0].symbol_guard_counter == envs[1].symbol_guard_counter
    assert list(envs[0].unique_ids) == list(envs[1].unique_ids)
    assert list(envs[0].backed_var_to_val) == list(envs[1].backed_var_to_val)


def test_many_symbols_are_those_of_the_plain_way() -> None:
    """Also once the low numbers are taken, and after a rollback has given many back."""
    envs = []
    describer = tfk.MetaTensorDescriber()
    policy = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    records = [
        describer.describe_tensor(torch.empty(4, 5), source=LocalSource(f"x{i}"))
        for i in range(200)
    ]
    for converter_of in (UncachedConverter, MetaConverter):
        mode = FakeTensorMode(shape_env=ShapeEnv())
        converter = converter_of(mode)
        kept = [converter.from_desc(d, symbolic_context=policy) for d in records[:100]]
        before = tfk.checkpoint(mode.shape_env)
        for d in records[100:]:
            converter.from_desc(d, symbolic_context=policy)
        before.rollback()
        before.commit()
        kept += [converter.from_desc(d, symbolic_context=policy) for d in records[100:]]
        envs.append(mode.shape_env)
    assert envs[0].unique_ids == envs[1].unique_ids
    assert len(envs[0].backed_var_to_val) > 390
    assert list(envs[0].backed_var_to_val) == list(envs[1].backed_var_to_val)
    assert state(envs[0]) == state(envs[1])


def test_symbols_tell_the_users_line() -> None:
    """Of the tensor that was made while a frontend knew it, and of no other."""
    told = []
    for converter_of in (UncachedConverter, MetaConverter):
        mode = FakeTensorMode(shape_env=ShapeEnv())
        converter, describer = converter_of(mode), tfk.MetaTensorDescriber()
        policy = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
        for i, line in enumerate((None, 3, 4, None)):
            d = describer.describe_tensor(torch.empty(6, 7), source=LocalSource(f"x{i}"))
            with ExitStack() as stack:
                if line is not None:
                    stack.enter_context(tracing(TracingContext(mode)))
                    TracingContext.set_current_loc("theirs.py", line, "forward")
                converter.from_desc(d, symbolic_context=policy)
        slocs = mode.shape_env.var_to_range_sloc.values()
        told.append([(of.lower.maybe_user_loc, of.upper.maybe_user_loc) for of in slocs])
    assert told[0] == told[1]
    assert [lower is None for lower, _ in told[1]] == [True] * 2 + [False] * 4 + [True] * 2


def test_sizes_that_were_replaced_are_replaced_in_storages() -> None:
    """Once a guard has made two symbols one, storages are of that one, as in the plain way."""
    made = []
    for converter_of in (UncachedConverter, MetaConverter):
        mode = FakeTensorMode(shape_env=ShapeEnv())
        converter, describer = converter_of(mode), tfk.MetaTensorDescriber()
        fakes = []
        for i, kind in enumerate((DimDynamic.DYNAMIC, DimDynamic.DUCK, DimDynamic.DUCK)):
            t = torch.empty([6] * (i + 1))
            d = describer.describe_tensor(t, source=LocalSource(f"x{i}"))
            policy = StatelessSymbolicContext(dynamic_sizes=[kind] * t.ndim)
            fakes.append(converter.from_desc(d, symbolic_context=policy))
            assert fakes[0].size(0) == fakes[-1].size(0)
        assert mode.shape_env.replacements
        made.append((layout(fakes[-1]), fakes[-1].untyped_storage().nbytes().node._expr))
        made[-1] += (state(mode.shape_env),)
    assert made[0] == made[1]


def make_two(mode: FakeTensorMode, converter_of: type[MetaConverter] = MetaConverter) -> list[Any]:
    """Two tensors of other sizes under the policy that every dim is dynamic."""
    converter, describer = converter_of(mode), tfk.MetaTensorDescriber()
    found = []
    for i, t in enumerate([torch.empty(4, 5), torch.empty(6, 7)]):
        policy = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DUCK] * 2)
        d = describer.describe_tensor(t, source=LocalSource(f"x{i}"))
        found.append(converter.from_desc(d, symbolic_context=policy))
    return found


def test_the_short_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch makes no symbol, but for one example in a process, and no meta tensor."""
    make_two(FakeTensorMode(shape_env=ShapeEnv()))
    calls = []
    plain = ShapeEnv.create_symbol
    monkeypatch.setattr(
        ShapeEnv, "create_symbol", lambda *args, **more: calls.append(1) or plain(*args, **more)
    )
    monkeypatch.setattr(meta_tensors, "empty_strided", None)
    make_two(FakeTensorMode(shape_env=ShapeEnv()))
    assert not calls


def test_logs_tell_of_every_symbol(caplog: pytest.LogCaptureFixture) -> None:
    """Somebody who reads torch's log of symbols sees them all."""
    with caplog.at_level(logging.INFO, "torch.fx.experimental.symbolic_shapes"):
        make_two(FakeTensorMode(shape_env=ShapeEnv()))
    assert sum("create_symbol" in record.getMessage() for record in caplog.records) == 4


def test_a_recorded_shape_env_sees_every_event() -> None:
    """A ShapeEnv that records its events has torch's own, to be replayed."""
    events = []
    for converter_of in (UncachedConverter, MetaConverter):
        mode = FakeTensorMode(shape_env=ShapeEnv(should_record_events=True))
        make_two(mode, converter_of=converter_of)
        events.append([event.name for event in mode.shape_env.events])
    assert events[0] == events[1] != []


def test_symbols_of_a_stateful_context_are_found_again() -> None:
    """The context remembers the symbols, and a second mode on the ShapeEnv gets the same."""
    env = ShapeEnv()
    t, source = torch.empty(4, 5), LocalSource("x")
    policy = StatefulSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2, tensor_source=source)
    d = tfk.describe_tensor(t, source=source)
    a, b = (
        MetaConverter(FakeTensorMode(shape_env=env)).from_desc(d, symbolic_context=policy)
        for _ in range(2)
    )
    assert layout(a) == layout(b)
    assert len(env.backed_var_to_val) == 2


def test_a_tensor_of_a_known_layout_has_a_storage_of_its_own() -> None:
    """Equal layouts share what is known of them, not their storages."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    converter = MetaConverter(mode)
    policy = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DUCK] * 2)
    describer = tfk.MetaTensorDescriber()
    kept = [torch.empty(4, 5), torch.empty(4, 5)]
    a, b = (
        converter.from_desc(
            describer.describe_tensor(t, source=LocalSource(f"x{i}")), symbolic_context=policy
        )
        for i, t in enumerate(kept)
    )
    assert a.untyped_storage()._cdata != b.untyped_storage()._cdata
    a.untyped_storage().resize_(0)
    assert b.untyped_storage().nbytes() == 80
    with mode:
        assert (a.t() @ b).shape == (5, 5)


def test_shape_env_subclasses_take_the_plain_way() -> None:
    """What a subclass does in ``create_symbol`` is done."""

    class Counting(ShapeEnv):
        calls = 0

        def create_symbol(self, *args: Any, **more: Any) -> Any:
            Counting.calls += 1
            return super().create_symbol(*args, **more)

    make_two(FakeTensorMode(shape_env=Counting()))
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
