"""The steps of `minify` over the golden corpus: what they leave is a frame, and a smaller one."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

import torch_fakeify as tfk
from torch_fakeify.desc import ExprDesc, IntNode, MetaTensorDesc, SymDesc
from torch_fakeify.errors import FakeifyError
from torch_fakeify.files import read_capture
from torch_fakeify.graph_edits import inline_body, operations, remove_nodes
from torch_fakeify.materialize import Symbols
from torch_fakeify.reductions import STEPS, extent
from torch_fakeify.rewriting import parts_of
from torch_fakeify.size_edits import (
    bound_symbols,
    has_number,
    is_bound,
    names_in,
    rehint,
    resize,
    specialize,
    static_sizes,
    used_symbols,
)
from torch_fakeify.size_search import SizeSearch
from torch_fakeify.trials import propagated

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch_fakeify.desc_frame import CaptureDesc
    from torch_fakeify.reductions import Step

GOLDEN = Path(__file__).parent / "golden" / "v1"
EVERY = pytest.mark.parametrize("every", [12, pytest.param(3, marks=pytest.mark.sweep)])


@functools.cache
def golden() -> tuple[tuple[str, CaptureDesc], ...]:
    """All golden captures, by name."""
    return tuple((path.stem, read_capture(path)) for path in sorted(GOLDEN.glob("*.fkf")))


def corpus(every: int, step: Step | None = None) -> Iterator[tuple[str, CaptureDesc]]:
    """Golden captures that this machine can rebuild, and that have something for a step."""
    fit = [(name, desc) for name, desc in golden() if step is None or step.items(desc)]
    for name, desc in fit[::every]:
        try:
            tfk.Capture(desc).instantiate()
        except FakeifyError:
            continue  # a device or a class that is not here
        yield name, desc


def without(step: Step, desc: CaptureDesc) -> Iterator[CaptureDesc]:
    """The frame without all the items of a step, without one half and the other, and the last one."""
    items = list(step.items(desc))
    middle = len(items) // 2
    for some in (items, items[:middle], items[middle:], items[-1:]):
        made = step.without(desc, some) if some else None
        if made is not None and (is_bound(made) or not is_bound(desc)):
            yield made


def has_kinds(desc: CaptureDesc) -> bool:
    """Whether an input is more than a strided tensor."""
    tensors = parts_of(desc.inputs, MetaTensorDesc, inside=True)
    kinds = ("subclass", "nested_int", "functorch", "functional", "sparse")
    return any(getattr(t, kind) is not None for t in tensors for kind in kinds)


@EVERY
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_what_is_left_is_a_frame(step: Step, every: int) -> None:
    """It goes through a file and can be rebuilt, with an input for each placeholder."""
    made = 0
    for name, desc in corpus(every, step):
        for smaller in without(step, desc):
            made += 1
            again = tfk.loads(tfk.dumps(smaller))
            assert again == smaller, name
            try:
                instance = tfk.Capture(again).instantiate()
            except FakeifyError:
                if not has_kinds(smaller):
                    raise
                continue  # what is inside a subclass need not fit any more: such a frame is no candidate
            instance.gm.graph.lint()
            if extent(smaller) != extent(desc):
                assert extent(smaller) < extent(desc), name
    assert made, "the step never applied"


@EVERY
def test_a_frame_without_nodes_still_runs(every: int) -> None:
    """With each half of its operations gone, what is left compiles with eager and runs."""
    ran = 0
    for name, desc in corpus(every):
        nodes = operations(desc.graph)
        for some in (nodes[: len(nodes) // 2], nodes[len(nodes) // 2 :]):
            made = remove_nodes(desc, some)
            if made is None or not is_bound(made) or made.graph.without_data:
                continue
            kept = {n.name for n in made.graph.nodes} & {desc.graph.nodes[i].name for i in some}
            assert kept == {e.name for e in made.inputs} & kept, name  # inputs, in their place
            try:
                inputs = tfk.Capture(desc).materialize()
                tfk.Capture(desc).compile("eager")(*inputs)
            except Exception:  # noqa: BLE001 - the frame itself does not run on made-up data
                continue
            frame = tfk.Capture(made)
            with torch.set_grad_enabled(desc.modes.grad_enabled):
                frame.compile("eager")(*frame.materialize())
            ran += 1
    assert ran > 60 // every


def test_removed_nodes_become_inputs_with_their_value() -> None:
    """What the rest needs of them has the same dtype, sizes and strides, and is no view of another."""
    desc = read_capture(GOLDEN / "model_llama.fkf")
    nodes = operations(desc.graph)
    made = remove_nodes(desc, nodes[: len(nodes) // 2])
    assert made is not None
    old = {n.name: n for n in tfk.Capture(desc).instantiate().gm.graph.nodes}
    instance = tfk.Capture(made).instantiate()
    fresh = [e.name for e in made.inputs if e.name not in {e.name for e in desc.inputs}]
    assert fresh
    for entry, value in zip(made.inputs, instance.inputs, strict=True):
        if entry.name not in fresh or not isinstance(value, torch.Tensor):
            continue
        was: Any = old[entry.name].meta.get("example_value", old[entry.name].meta.get("val"))
        assert (value.dtype, str(value.shape)) == (was.dtype, str(was.shape))
        assert str(value.stride()) == str(was.stride())
        assert value._base is None
        assert value.is_leaf
    ids = [t.id for e in made.inputs if (t := e.tensor) is not None]
    assert len(set(ids)) == len(ids)


def test_a_body_in_the_place_of_its_call() -> None:
    """The frame computes the same, without the operator; then the other steps can get at its nodes."""
    desc = read_capture(GOLDEN / "program_checkpointing.fkf")
    (call,) = [i for i in operations(desc.graph) if inline_body(desc, i) is not None]
    made = inline_body(desc, call)
    assert made is not None
    assert not made.graph.submodules
    assert extent(made) < extent(desc)
    inputs = tfk.Capture(desc).materialize()
    results = [tfk.Capture(d).compile("eager")(*inputs) for d in (desc, made)]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


# --- sizes ----------------------------------------------------------------------------------------


@EVERY
def test_static_dims_are_what_the_example_had(every: int) -> None:
    """Without its symbols a frame has the sizes, and gives the values, that it had with them."""
    made = 0
    for name, desc in corpus(every):
        env = desc.shape_env
        symbols = [] if env is None else [s.name for s in env.symbols if has_number(s)]
        static = specialize(desc, symbols) if symbols else None
        if static is None:
            continue
        made += 1
        backed = set(symbols)
        assert not used_symbols(static) & backed, name
        assert not names_in(static.shape_env) & backed, name
        values = Symbols(env, {})
        left = {entry.name for entry in static.inputs}
        assert all(e.sym is not None for e in desc.inputs if e.name not in left), name
        kept = [entry for entry in desc.inputs if entry.name in left]
        for entry, was in zip(static.inputs, kept, strict=True):
            assert entry.name == was.name
            pairs = zip(
                parts_of(entry.tensor, MetaTensorDesc), parts_of(was.tensor, MetaTensorDesc),
                strict=True,
            )  # fmt: skip
            for tensor, before in pairs:
                for n, m in zip(tensor.size, before.size, strict=True):
                    if isinstance(m, SymDesc) and not names_in(m) - backed:
                        assert n == values.integer(m, name)
        tfk.Capture(static).instantiate()
        for entry, was in zip(static.inputs, kept, strict=True):
            assert names_in(entry.sym) or not names_in(was.sym), (name, entry.name)
    assert made > 100 // every


def test_a_guard_that_does_not_hold_forbids_a_static_dim(tmp_path: Path) -> None:
    """There is no such frame: the guard says more than 5, and the size is 3."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.shape[0] > 5 else x

    torch._dynamo.reset()
    torch.compile(program, backend=tfk.record(tmp_path), dynamic=True)(torch.ones(8))
    desc = read_capture(next(tmp_path.glob("*.fkf")))
    env = desc.shape_env
    assert env is not None
    (symbol,) = env.symbols
    assert specialize(desc, [symbol.name]) is not None
    lied = msgspec.structs.replace(symbol, hint=ExprDesc(nodes=(IntNode(3),)))
    facts = msgspec.structs.replace(env, symbols=(lied,))
    assert specialize(msgspec.structs.replace(desc, shape_env=facts), [symbol.name]) is None


@EVERY
def test_other_example_sizes_are_the_same_frame(every: int) -> None:
    """Its hints are those of torch at these sizes, its expressions are untouched."""
    made = 0
    for name, desc in corpus(every):
        search = SizeSearch(desc)
        for sizes in search.smaller(search.example, 2) if search.example else []:
            other = rehint(desc, sizes)
            if other is None:
                continue
            made += 1
            assert used_symbols(other) == used_symbols(desc)
            assert bound_symbols(other) == bound_symbols(desc)
            instance = tfk.Capture(other).instantiate()
            for entry, value in zip(other.inputs, instance.inputs, strict=True):
                if entry.tensor is None or not names_in(entry.tensor):
                    continue
                for n, m in zip(entry.tensor.size, value.shape, strict=True):
                    if isinstance(n, SymDesc):
                        values = m.node.shape_env.backed_var_to_val
                        assert n.hint == m.node.hint == m.node.expr.xreplace(values), name
    assert made > 20 // every


def test_smaller_static_sizes_are_propagated() -> None:
    """A weight's sizes, the constants that name them, and what is computed of them."""
    desc = read_capture(GOLDEN / "model_bert.fkf")
    tried = 0
    for old in static_sizes(desc):
        smaller = resize(desc, old, 4)
        if smaller is None:
            continue
        try:
            made = propagated(tfk.Capture(smaller), {old: 4}).desc
        except Exception:  # noqa: BLE001 - sizes that depend on one another
            continue
        tried += 1
        assert len(made.graph.nodes) == len(desc.graph.nodes)
        for entry, was in zip(made.inputs, desc.inputs, strict=True):
            if was.tensor is not None and entry.tensor is not None:
                expected = tuple(4 if n == old else n for n in was.tensor.size)
                assert [str(n) for n in entry.tensor.size] == [str(n) for n in expected]
        frame = tfk.Capture(made)
        with torch.set_grad_enabled(made.modes.grad_enabled):
            frame.compile("eager")(*frame.materialize())
    assert tried
