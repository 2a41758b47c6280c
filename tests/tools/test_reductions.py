"""Reductions of `minify` over the golden corpus: each leaves a smaller frame."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from captured_frames import recorded_frame
from places import GOLDEN

import torch_fakeify as tfk
from torch_fakeify.encoding.modes import preserve_modes
from torch_fakeify.errors import FakeifyError
from torch_fakeify.frames.inputs.materializing import Symbols
from torch_fakeify.frames.inputs.size_search import SizeSearch
from torch_fakeify.records.rewrite import walk
from torch_fakeify.records.symbol_names import has_number, names_in
from torch_fakeify.records.tensor import ExprDesc, IntNode, MetaTensorDesc, NodeValue, SymDesc
from torch_fakeify.render.nested_graphs import used_nodes
from torch_fakeify.serialization.capture_file import read_capture
from torch_fakeify.tools.graph_edits import (
    inline_body,
    operations,
    remove_nodes,
    replace_nodes,
)
from torch_fakeify.tools.minify.reductions import REDUCTIONS, extent
from torch_fakeify.tools.size_edits import (
    bound_symbols,
    is_bound,
    rehint,
    resize,
    specialize,
    static_sizes,
    used_symbols,
)
from torch_fakeify.tools.worker.trials import propagated

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch_fakeify.records.frame import CaptureDesc
    from torch_fakeify.records.graph import GraphModuleDesc
    from torch_fakeify.tools.minify.reductions import Reduction

EVERY = pytest.mark.parametrize("every", [12, pytest.param(3, marks=pytest.mark.sweep)])


@functools.cache
def golden() -> tuple[tuple[str, CaptureDesc], ...]:
    """Return all golden captures by name."""
    return tuple((path.stem, read_capture(path)) for path in sorted(GOLDEN.glob("*.fkf")))


def corpus(every: int, step: Reduction | None = None) -> Iterator[tuple[str, CaptureDesc]]:
    """Return golden captures that this machine can rebuild and that a reduction applies to."""
    fit = [(name, desc) for name, desc in golden() if step is None or step.items(desc)]
    for name, desc in fit[::every]:
        try:
            tfk.Capture(desc).instantiate()
        except FakeifyError:
            continue  # a device or a class that this machine does not have
        yield name, desc


def without(step: Reduction, desc: CaptureDesc) -> Iterator[CaptureDesc]:
    """Yield the frame without all items of a reduction, without each half, and without the last."""
    items = list(step.items(desc))
    middle = len(items) // 2
    for some in (items, items[:middle], items[middle:], items[-1:]):
        made = step.without(desc, some) if some else None
        if made is not None and (is_bound(made) or not is_bound(desc)):
            yield made


def has_kinds(desc: CaptureDesc) -> bool:
    """Return whether an input is more than a strided tensor."""
    tensors = walk(desc.inputs, MetaTensorDesc, inside=True)
    kinds = ("subclass", "nested_int", "functorch", "functional", "sparse")
    return any(getattr(t, kind) is not None for t in tensors for kind in kinds)


@EVERY
@pytest.mark.parametrize("step", REDUCTIONS, ids=lambda step: step.name)
def test_a_reduced_frame_can_be_saved_and_rebuilt(step: Reduction, every: int) -> None:
    """Every placeholder of a reduced frame still has an input."""
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
                continue  # parts of a subclass may no longer fit together: such a frame is no candidate
            instance.gm.graph.lint()
            if extent(smaller) != extent(desc):
                assert extent(smaller) < extent(desc), name
    assert made, "the step never applied"


@EVERY
def test_a_frame_without_half_of_its_operations_runs(every: int) -> None:
    """The remaining half compiles with eager and runs."""
    ran = 0
    for name, desc in corpus(every):
        nodes = operations(desc.graph)
        for some in (nodes[: len(nodes) // 2], nodes[len(nodes) // 2 :]):
            made = remove_nodes(desc, some)
            if made is None or not is_bound(made) or made.graph.without_data:
                continue
            shared = {n.name for n in made.graph.nodes} & {desc.graph.nodes[i].name for i in some}
            assert shared == {e.name for e in made.inputs} & shared, (
                name
            )  # inputs that replace nodes
            try:
                inputs = tfk.Capture(desc).materialize()
                tfk.Capture(desc).compile("eager")(*inputs)
            except Exception:  # noqa: BLE001 - the frame itself does not run on made-up data
                continue
            frame = tfk.Capture(made)
            # One half may enter a transform of functorch that the other half exits.
            with preserve_modes(), torch.set_grad_enabled(desc.modes.grad_enabled):
                frame.compile("eager")(*frame.materialize())
            ran += 1
    assert ran > 60 // every


def test_removed_nodes_become_inputs_with_their_values() -> None:
    """A new input has the dtype, sizes and strides of its node and is no view of another one."""
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


def test_a_body_is_inlined_at_its_call() -> None:
    """The frame computes the same without the operator, and its nodes can be reduced further."""
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
def test_static_dims_have_the_sizes_of_the_example(every: int) -> None:
    """A frame without its symbols has the sizes and results that it had with them."""
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
        entries = [entry for entry in desc.inputs if entry.name in left]
        for entry, was in zip(static.inputs, entries, strict=True):
            assert entry.name == was.name
            assert names_in(entry.sym) or not names_in(was.sym), (name, entry.name)
            tensors = (walk(each.tensor, MetaTensorDesc) for each in (entry, was))
            for tensor, before in zip(*tensors, strict=True):
                for n, m in zip(tensor.size, before.size, strict=True):
                    if isinstance(m, SymDesc) and not names_in(m) - backed:
                        assert n == values.integer(m, name)
        tfk.Capture(static).instantiate()
    assert made >= 100 // every


def test_a_violated_guard_forbids_a_static_dim(tmp_path: Path) -> None:
    """A size of 3 that a guard requires to be more than 5 gives no frame."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.shape[0] > 5 else x

    desc = read_capture(recorded_frame(tmp_path, program, torch.ones(8), dynamic=True))
    env = desc.shape_env
    assert env is not None
    (symbol,) = env.symbols
    assert specialize(desc, [symbol.name]) is not None
    lied = msgspec.structs.replace(symbol, hint=ExprDesc(nodes=(IntNode(3),)))
    facts = msgspec.structs.replace(env, symbols=(lied,))
    assert specialize(msgspec.structs.replace(desc, shape_env=facts), [symbol.name]) is None


@EVERY
def test_other_example_sizes_give_the_same_frame(every: int) -> None:
    """The hints are torch's hints at these sizes, and the expressions are unchanged."""
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
                        value = m.node.expr.xreplace(values)
                        assert n.hint == m.node.hint, name
                        assert n.hint == (value if value.is_number else None), name
    assert made > 20 // every


def test_smaller_static_sizes_are_propagated() -> None:
    """A weight's sizes change, and so do constants with them and values computed from them."""
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


def loose(desc: GraphModuleDesc) -> list[str]:
    """Return the attributes of a graph's module, or of a body's, that no node reads."""
    used = {at for fx_node in desc.nodes for at in used_nodes(fx_node)}
    read = {n.target for i, n in enumerate(desc.nodes) if n.op == "get_attr" and i in used}
    names = [n.name for i, n in enumerate(desc.nodes) if n.op == "get_attr" and i not in used]
    names += [
        name for name, _ in (*desc.submodules, *desc.tensors, *desc.values) if name not in read
    ]
    return names + [name for _, body in desc.submodules for name in loose(body)]


def branches(x: torch.Tensor) -> torch.Tensor:
    """Branch inside a branch, with a constant."""

    def inner(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.max() > 1, lambda x: x.sin(), lambda x: x + torch.tensor([1.0]), (x,))

    y = torch.cond(x.sum() > 0, inner, lambda x: x.cos(), (x,))
    return y.exp() + torch.tensor([2.0])


def loops(x: torch.Tensor) -> torch.Tensor:
    """Loop on a condition that returns a single value, not a tuple."""
    loop = torch._higher_order_ops.while_loop
    (y,) = loop(lambda x: x.sum() < 9, lambda x: (x.exp(),), (x,))
    return y.exp()


@pytest.mark.parametrize("program", [branches, loops])
def test_bodies_and_constants_are_removed_with_their_last_user(
    tmp_path: Path, program: Any
) -> None:
    """No single operation leaves an unused attribute when it is removed, also in an inner body."""
    desc = read_capture(recorded_frame(tmp_path, program, torch.ones(3), fullgraph=True))
    assert not loose(desc.graph)
    for i in operations(desc.graph):
        if desc.graph.nodes[i].op == "get_attr":
            continue
        for made in (remove_nodes(desc, {i}), replace_nodes(desc, {i: NodeValue(index=0)})):
            if made is not None:
                assert not loose(made.graph), desc.graph.nodes[i].name
    (step,) = (step for step in REDUCTIONS if step.name == "nodes of bodies")
    for item in step.items(desc):
        made = step.without(desc, [item])
        assert made is not None
        assert not loose(made.graph), item
