"""Caches of the drop-in, and the features built on them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from dropin_kinds import (
    KINDS,
    OURS,
    both,
    told,
    two,
)
from torch._dynamo.source import LocalSource
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    FakeTensorMode,
)
from torch.fx import _graph_pickler
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from torch_fakeify import dropin

# torch's own describer asks for the gradient of non-leaves.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]


def test_memos_are_weak() -> None:
    """The converter keeps neither what it was given nor what it made; numbers stay with tensors."""

    def make() -> Any:
        converter = FakeTensorMode().fake_tensor_converter.meta_converter
        mode_callback = converter._identity_callable
        x, y = torch.empty(3), torch.empty(4)
        fakes = [converter(x, callback=mode_callback), converter(y, callback=mode_callback)]
        storage = weakref.ref(fakes[1].untyped_storage())
        describer = converter.describer
        counts = [len(converter.tensor_memo), len(converter.storage_memo)]
        ids = [describer.get_tensor_id(x), describer.get_tensor_id(y)]
        assert x in describer.lookup_tensor
        assert x.untyped_storage() in describer.lookup_storage
        del fakes[1]
        gc.collect()
        counts += [len(converter.tensor_memo), len(converter.storage_memo), storage() is None]
        del y
        gc.collect()
        counts += [len(describer.lookup_tensor), len(describer.lookup_storage)]
        describer.lookup_tensor.clear()
        assert describer.get_tensor_id(x) == 2
        assert converter(x) is not fakes[0]
        return counts, ids, describer.next_tensor_id, describer.next_storage_id

    ours, theirs = both(make)
    assert ours == theirs


@pytest.mark.parametrize("symbolic", [False, True])
def test_modes_die_at_once(symbolic: bool) -> None:
    """A mode without fake tensors is freed by its last reference: nothing goes around in a circle."""

    def make() -> bool:
        mode = FakeTensorMode(shape_env=ShapeEnv() if symbolic else None)
        made = [mode.from_tensor(t) for t in (torch.empty(3, 4), torch.nn.Parameter(torch.ones(2)))]
        gone = weakref.ref(mode)
        gc.disable()
        try:
            del made, mode
            return gone() is None
        finally:
            gc.enable()

    ours, theirs = both(make)
    assert ours == theirs


def test_debug_traces_are_kept() -> None:
    """With torch's switch for debugging on, fakes say where they were made."""

    def make() -> bool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fake_tensor.FakeTensorConfig, "debug", True)
            return hasattr(FakeTensorMode().from_tensor(torch.empty(3)), "_debug_trace")

    assert both(make) == (True, True)


def test_meta_device_is_asked_of_the_mode() -> None:
    """Whether a mode takes tensors on the device ``meta`` is the mode's to say."""

    def make() -> Any:
        mode = FakeTensorMode()
        mode.allow_meta = True
        assert mode.from_tensor(torch.empty(3, device="meta")).device.type == "meta"
        mode.allow_meta = False
        mode.from_tensor(torch.empty(3, device="meta"))

    ours, theirs = both(make)
    assert (
        ours
        == theirs
        == ("AssertionError: device.type must not be 'meta' when allow_meta is False")
    )


def test_memos_can_be_set() -> None:
    """What is put into the memos stands for the tensor and the storage."""
    converter = OURS["MetaConverter"]()
    x, mine = torch.empty(3), torch.empty(3, device="meta")
    d = converter.describer.describe_tensor(x)
    assert converter.get_tensor_memo(d) is converter.get_storage_memo(d.storage) is None
    converter.set_storage_memo(d.storage, mine.untyped_storage())
    made = converter(x)
    assert made.untyped_storage() is mine.untyped_storage()
    converter.set_tensor_memo(d, mine)
    assert converter(x) is mine
    assert converter.meta_storage(d.storage, lambda m: m()) is mine.untyped_storage()


def test_graph_pickler() -> None:
    """GraphPickler writes and reads fake tensors, static and symbolic, and views of one another."""

    def make() -> Any:
        mode = FakeTensorMode(shape_env=ShapeEnv())
        x = mode.from_tensor(torch.empty(6, 4), source=LocalSource("x"))
        data = _graph_pickler.GraphPickler.dumps([x, x, mode.from_tensor(torch.empty(3, 1).cos())])
        other = FakeTensorMode(shape_env=ShapeEnv())
        loaded = _graph_pickler.GraphPickler.loads(data, other)
        assert loaded[0] is loaded[1]
        assert loaded[0].fake_mode is other
        return [told(t) for t in loaded]

    ours, theirs = both(make)
    assert ours == theirs


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(
    "kind", ["view", "grad", "conj", "imag", "csr", "bsc", "two steps", "multi"]
)
def test_graph_pickler_with_parts(kind: str, symbolic: bool) -> None:
    """Under the drop-in GraphPickler takes fakes with parts that are fakes, as not every torch does."""

    def mode() -> FakeTensorMode:
        return FakeTensorMode(shape_env=ShapeEnv() if symbolic else None)

    pickler = _graph_pickler.GraphPickler
    with dropin.installed():
        here, there = mode(), mode()
        fake = here.from_tensor(KINDS[kind](), source=LocalSource("x"))
        data = pickler.dumps([here.shape_env, fake])
        loaded: Any = pickler.loads(data, there)[1]
    assert told(loaded) == told(fake)
    parts = [loaded, loaded._base, loaded.grad if loaded.is_leaf else None]
    assert {part.fake_mode for part in parts if part is not None} == {there}
    if symbolic and kind == "view":
        assert loaded.shape[0].node.shape_env is there.shape_env
    here, there = mode(), mode()
    plain = here.from_tensor(KINDS[kind](), source=LocalSource("x"))
    try:
        data = pickler.dumps([here.shape_env, plain])
    except AttributeError:  # as of torch 2.13: the parts cannot be pickled
        return
    theirs: Any = pickler.loads(data, there)[1]
    assert told(theirs) == told(loaded)


def test_compiling_gives_the_same_guards() -> None:
    """Dynamo and AOTAutograd under the drop-in trace the same graph under the same guards."""

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.t()[1:] @ y if x.shape[0] > 3 else x

    def make() -> Any:
        torch._dynamo.reset()
        seen: list[str] = []

        def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            mode = torch._guards.detect_fake_mode(inputs)
            converter = mode.fake_tensor_converter.meta_converter
            seen.append(str(dropin.is_installed() == isinstance(converter, OURS["MetaConverter"])))
            seen.append(gm.print_readable(print_output=False))
            seen.extend(f"{g.expr} {g.sloc}" for g in mode.shape_env.guards)
            return gm.forward

        x = torch.randn(6, 5, requires_grad=True)
        torch.compile(f, backend=backend, dynamic=True)(x, x[:, 1:].detach())
        return seen

    ours, theirs = both(make)
    assert ours == theirs
    assert ours[0] == "True"


def test_contexts_must_fit() -> None:
    """A symbolic context of the wrong class is refused as torch refuses it."""
    stateless = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)

    def make() -> Any:
        mode = FakeTensorMode(shape_env=ShapeEnv())
        mode.from_tensor(two(3, 4), source=LocalSource("x"), symbolic_context=stateless)

    ours, theirs = both(make)
    assert ours == theirs
    assert ours.startswith("AssertionError: Expected SubclassSymbolicContext or None")
