"""Functorch's interpreters and wrappers: their records, and what is rebuilt from them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import given
from interpreter_programs import (
    OPS,
    PROGRAMS,
    VALUE_OPS,
    captured_tensor,
    outcome,
    rebuild,
    replayed,
    same,
    stack_of,
    told,
    torchs_fake,
)
from places import ZOO
from processes import python
from torch._C import _functorch as functorch
from torch._dispatch.python import suspend_functionalization
from torch._functorch.pyfunctorch import (
    retrieve_all_functorch_interpreters,
    temporarily_clear_interpreter_stack,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize, grad, vmap
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torch_fakeify as tfk
from torch_fakeify.encoding.exprs import encode_sym
from torch_fakeify.encoding.interpreters import Interpreters, encode_stack, make_interpreters
from torch_fakeify.errors import ConvertError
from torch_fakeify.records.tensor import FunctorchDesc, InterpreterDesc, MetaTensorDesc

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def inside(transform: Any, x: torch.Tensor, look: Callable[[torch.Tensor], Any]) -> Any:
    """Return the result of a function of the tensor inside a transform."""
    found: list[Any] = []

    def function(t: torch.Tensor) -> torch.Tensor:
        found.append(look(t))
        return t.sum()

    transform(function)(x)
    return found[0]


def described(transform: Any, x: torch.Tensor) -> MetaTensorDesc:
    """Return the record of the tensor inside a transform."""
    return inside(transform, x, tfk.describe_tensor)


# --- stacks and records ---------------------------------------------------------------------------


@st.composite
def stacks(draw: st.DrawFn) -> tuple[InterpreterDesc, ...]:
    """Draw any stack that transforms of functorch can make."""
    kinds = st.sampled_from(["vmap", "grad", "jvp", "functionalize"])
    found: list[InterpreterDesc] = []
    for level, kind in enumerate(draw(st.lists(kinds, max_size=6)), 1):
        fields: dict[str, Any] = {}
        if kind == "vmap":
            fields["batch_size"] = draw(st.one_of(st.integers(0, 9), st.integers(0, 2**62 - 1)))
            fields["randomness"] = draw(st.sampled_from(["error", "same", "different"]))
        elif kind == "functionalize":
            fields["add_back_views"] = draw(st.booleans())
        else:
            fields["grad_mode"] = draw(st.booleans())
            fields["inference_mode"] = draw(st.booleans())
        found.append(InterpreterDesc(kind=kind, level=level, **fields))  # type: ignore[arg-type]
    return tuple(found)


@given(stacks())
def test_a_rebuilt_stack_has_the_same_record(stack: tuple[InterpreterDesc, ...]) -> None:
    """``encode_stack(make_interpreters(s)) == s``, also after serialization."""
    layers = make_interpreters(stack, ints=same)
    assert len(layers) == len(stack)
    assert encode_stack(layers, ints=same) == stack
    inner, outer = (tfk.describe_tensor(torch.ones(3, 2)) for _ in range(2))
    wrapper = FunctorchDesc(kind="batched", unwrapped=inner, level=1, bdim=0, stack=stack)
    holder = msgspec.structs.replace(outer, functorch=wrapper)
    assert tfk.loads(tfk.dumps(holder)) == holder


@given(stacks())
def test_building_a_stack_does_not_change_the_process(stack: tuple[InterpreterDesc, ...]) -> None:
    """The active stack and the modes are the same before and after."""

    def state() -> Any:
        return (
            [i.get_state() for i in retrieve_all_functorch_interpreters()],
            torch.is_grad_enabled(),
            torch._C._is_fwd_grad_enabled(),
            torch.is_inference_mode_enabled(),
        )

    def look(_: torch.Tensor) -> None:
        before = state()
        make_interpreters(stack, ints=same)
        assert state() == before

    with torch.no_grad():
        inside(vmap, torch.ones(2), look)


def test_a_batch_size_may_be_symbolic() -> None:
    """A ``SymInt`` is encoded and decoded by the caller's functions."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
    x = mode.from_tensor(torch.ones(5, 3))

    def look(_: torch.Tensor) -> tuple[InterpreterDesc, ...]:
        with temporarily_clear_interpreter_stack() as layers:
            found = encode_stack(layers, ints=encode_sym)
            again = make_interpreters(found, ints=lambda n: x.shape[0])
            assert encode_stack(again, ints=encode_sym) == found
        # The recorded stack is the active one.
        interpreters = Interpreters()
        first, second = (interpreters.layers(found, ints=lambda n: x.shape[0]) for _ in range(2))
        assert first is not second
        assert not interpreters._made
        with interpreters.entered(found, ints=lambda n: x.shape[1]):
            (interpreter,) = retrieve_all_functorch_interpreters()
            assert interpreter.batch_size() is not x.shape[0]  # type: ignore[attr-defined]
            assert str(interpreter.batch_size()) == str(x.shape[1])  # type: ignore[attr-defined]
        assert list(interpreters._made) == [found]
        return found

    with mode:
        stack = inside(vmap, x, look)
    assert stack[0].batch_size == encode_sym(x.shape[0])


BAD_STACKS = {
    "interpreter 1 (grad): levels count from one, from the outside; expected 1; found 2": (
        InterpreterDesc(kind="grad", level=2, grad_mode=True),
    ),
    "interpreter 1 (vmap): the record does not have the fields of its kind; expected batch_size, "
    "randomness; found randomness": (InterpreterDesc(kind="vmap", level=1, randomness="same"),),
    "interpreter 2 (jvp): the record does not have the fields of its kind; expected grad_mode; "
    "found none": (
        InterpreterDesc(kind="grad", level=1, grad_mode=True),
        InterpreterDesc(kind="jvp", level=2),
    ),
    "interpreter 1 (functionalize): the record does not have the fields of its kind; expected "
    "add_back_views; found add_back_views, inference_mode": (
        InterpreterDesc(kind="functionalize", level=1, add_back_views=True, inference_mode=True),
    ),
    "interpreter 1 (vmap): a batch size is out of range; expected 0 to 2**63 - 1; found -1": (
        InterpreterDesc(kind="vmap", level=1, randomness="same", batch_size=-1),
    ),
}


@pytest.mark.parametrize("text", BAD_STACKS)
def test_an_impossible_stack_is_refused(text: str) -> None:
    """Levels, fields and sizes are checked before torch asserts them."""
    with pytest.raises(ConvertError) as error:
        make_interpreters(BAD_STACKS[text], ints=same)
    assert str(error.value) == text
    assert functorch.peek_interpreter_stack() is None


# --- inside real transforms -----------------------------------------------------------------------


class Seen(NamedTuple):
    """What was observed inside a transform."""

    described: Any
    record: MetaTensorDesc
    torchs: Any
    """The description of torch's own fake tensor, ``None`` where torch makes none."""
    rebuilt: Any
    real: dict[str, Any]
    """By operator, on the real tensor."""
    fake: dict[str, Any] | None
    """By operator, on torch's own fake tensor."""
    modes: tuple[bool, bool]


def look(name: str) -> Seen:
    """Run a program and observe its tensor inside the transform."""
    reals = {op: captured_tensor() for op in OPS}
    seen: list[Seen] = []

    def function(t: torch.Tensor) -> torch.Tensor:
        record = tfk.describe_tensor(t)
        torchs: Any = None
        fake: dict[str, Any] | None = None
        try:
            torchs = told(torchs_fake(FakeTensorMode(), t))
        except AssertionError:
            # Torch makes a leaf of a grad wrapper that is none, and then fails its own check.
            assert t.requires_grad
            assert not t.is_leaf
        else:
            fake = {op: on_torchs_fake(op, t, reals[op]) for op in OPS}
        rebuilt = told(rebuild(record, FakeTensorMode(), Interpreters()))
        real = {op: outcome(op, t, reals[op]) for op in OPS}
        modes = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
        seen.append(Seen(told(t), record, torchs, rebuilt, real, fake, modes))
        return t

    PROGRAMS[name](function)
    return seen[0]


def on_torchs_fake(op: str, t: torch.Tensor, captured: torch.Tensor) -> Any:
    """Return the result of an operator on the fake tensor that torch makes inside a transform."""
    mode = FakeTensorMode()
    with suspend_functionalization(), temporarily_clear_interpreter_stack():
        fake_captured = mode.from_tensor(captured)
    fake = torchs_fake(mode, t)
    with mode:
        return outcome(op, fake, fake_captured)


@pytest.fixture(scope="module")
def seen() -> dict[str, Seen]:
    """What was observed in every program."""
    return {name: look(name) for name in PROGRAMS}


@pytest.mark.parametrize("name", PROGRAMS)
def test_rebuilt_wrappers_equal_the_described_ones(seen: dict[str, Seen], name: str) -> None:
    """Each wrapper has its kind, level, batch dim, sizes, strides and autograd metadata."""
    assert seen[name].rebuilt == seen[name].described


KNOWN_TO_DIFFER = {
    "vmap of requires_grad",  # torch drops requires_grad of the wrapped tensor
    "grad of grad",  # torch makes a leaf of the wrapped tensor
    "grad of vmap of grad",
    "grad in inference mode",  # torch drops that the wrapped tensor is an inference tensor
    "functionalize of vmap",  # torch takes the innermost level for that of a functional tensor
}
"""Programs where torch's fake tensor differs from the described one, and the rebuilt one does not."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_rebuilt_wrappers_equal_torchs(seen: dict[str, Seen], name: str) -> None:
    """The outermost wrapper equals torch's, and so do the inner ones, up to what torch drops."""
    torchs, rebuilt = seen[name].torchs, seen[name].rebuilt
    if torchs is None:
        assert not seen[name].record.is_leaf
        return
    assert rebuilt[0] == torchs[0]
    assert (rebuilt != torchs) == (name in KNOWN_TO_DIFFER)


def check_outcomes(seen: Seen, found: dict[str, Any]) -> None:
    """Check that operators give the real tensor's result, or the error of torch's fake tensor."""
    for op, real in seen.real.items():
        rebuilt = found[op]
        if not isinstance(real, str) and op not in VALUE_OPS:
            assert rebuilt == real, op
        elif seen.fake is not None:
            # A fake tensor has other messages for sizes that do not fit, and no data.
            assert rebuilt == seen.fake[op], op
        elif op not in VALUE_OPS:
            assert rebuilt.partition(":")[0] == real.partition(":")[0], op


@pytest.mark.parametrize("name", PROGRAMS)
def test_operators_agree_under_the_rebuilt_stack(seen: dict[str, Seen], name: str) -> None:
    """Outside of any transform, results have the same metadata and errors have the same text."""
    grad_mode, forward = seen[name].modes
    found = replayed(seen[name].record, grad_mode=grad_mode, forward=forward)
    check_outcomes(seen[name], found)


@pytest.mark.sweep
def test_operators_agree_in_another_process(seen: dict[str, Seen], tmp_path: Path) -> None:
    """A fresh interpreter computes the same results from the serialized records."""
    path = tmp_path / "records"
    chosen = {name: s for name, s in seen.items() if s.modes == (True, True)}
    assert len(chosen) > 15
    path.write_bytes(tfk.dumps({name: s.record for name, s in chosen.items()}))
    found = json.loads(python(ZOO / "interpreter_programs.py", path))
    assert found.keys() == chosen.keys()
    for name, s in chosen.items():
        check_outcomes(s, found[name])


# --- the stacks of a converter --------------------------------------------------------------------


def active() -> Any:
    """Return torch's description of the active stack."""
    return [interpreter.get_state() for interpreter in retrieve_all_functorch_interpreters()]


@pytest.mark.parametrize("transform", [grad, vmap, functionalize])
def test_wrappers_made_inside_a_transform_belong_to_it(transform: Any) -> None:
    """Wrappers have the active interpreters, and end with them, as torch's own fakes do.

    A wrapper that is made of the same record afterwards has a rebuilt stack.
    """
    interpreters, mode = Interpreters(), FakeTensorMode()

    def look(t: torch.Tensor) -> tuple[MetaTensorDesc, torch.Tensor, torch.Tensor]:
        record = tfk.describe_tensor(t)
        ours, torchs = rebuild(record, mode, interpreters), mode.from_tensor(t)
        assert told(ours) == told(torchs)
        assert told(ours.sin() + torchs) == told(torchs.sin() + torchs)
        return record, ours, torchs

    record, ours, torchs = inside(transform, torch.randn(3, 4), look)
    level = functorch.maybe_get_level(ours)
    assert level == functorch.maybe_get_level(torchs) == (-2 if transform is grad else 1)
    assert functorch.maybe_get_level(rebuild(record, FakeTensorMode(), interpreters)) == 1


def test_wrappers_end_with_their_own_transform() -> None:
    """A wrapper made of an outer tensor's record inside an inner transform ends with the outer."""

    def look(s: torch.Tensor) -> torch.Tensor:
        d = tfk.describe_tensor(s)
        made = inside(grad, s.cos(), lambda _: rebuild(d, FakeTensorMode(), Interpreters()))
        assert functorch.maybe_get_level(made) == 1
        return made

    assert functorch.maybe_get_level(inside(grad, torch.randn(3), look)) == -2


def test_wrappers_of_a_rebuilt_stack_do_not_end() -> None:
    """A rebuilt stack may be entered again: no transform ends it."""
    d = described(grad, torch.randn(3))
    mode, interpreters = FakeTensorMode(), Interpreters()
    t = rebuild(d, mode, interpreters)
    for _ in range(2):
        with interpreters.entered(stack_of(d)):
            (slope,) = torch.autograd.grad((t * t).sum(), t, create_graph=True)
            assert told(slope)[0]["level"] == 1
        assert active() == []
        assert functorch.maybe_get_level(t) == 1


def test_entering_an_active_stack_changes_nothing() -> None:
    """Entering the active stack has no effect, also in further transforms; another replaces it."""
    d = described(vmap, torch.randn(3, 4))
    other = described(lambda f: grad(lambda t: vmap(f)(t).sum()), torch.randn(3, 4))
    interpreters = Interpreters()

    def look(_: torch.Tensor) -> Any:
        before = active()
        with interpreters.entered(stack_of(d)):
            same = active()
        with interpreters.entered(stack_of(other)):
            replaced = active()
        assert active() == before == same
        return before, replaced

    once, replaced = inside(vmap, torch.randn(3, 4), look)
    assert once == [("Vmap", 1, "error")]
    assert replaced == [("Grad", 1, True), ("Vmap", 2, "error")]
    twice, again = inside(lambda f: vmap(grad(f)), torch.randn(3, 4), look)
    assert twice == [("Vmap", 1, "error"), ("Grad", 2, True)]
    assert again == replaced


UNEQUAL = {
    "batch size": InterpreterDesc(kind="vmap", level=1, batch_size=4, randomness="error"),
    "randomness": InterpreterDesc(kind="vmap", level=1, batch_size=3, randomness="same"),
    "kind": InterpreterDesc(kind="functionalize", level=1, add_back_views=True),
}


@pytest.mark.parametrize("field", UNEQUAL)
def test_an_unequal_stack_is_not_the_active_one(field: str) -> None:
    """An active interpreter is used only for a record that is equal in every field."""
    stack = (UNEQUAL[field],)
    interpreters = Interpreters()

    def look(_: torch.Tensor) -> None:
        with interpreters.entered(stack), temporarily_clear_interpreter_stack() as layers:
            assert encode_stack(layers, ints=same) == stack

    inside(vmap, torch.randn(3, 4), look)
    assert list(interpreters._made) == [stack]


def test_records_of_one_transform_share_its_interpreter() -> None:
    """A level that two stacks have in common is built once."""
    outer = stack_of(described(grad, torch.randn(3)))
    inner = stack_of(described(lambda f: grad(grad(f)), torch.tensor(1.0)))
    assert inner[:1] == outer
    interpreters = Interpreters()
    (layer,) = interpreters.layers(outer)
    first, second = interpreters.layers(inner), interpreters.layers(inner)
    assert first[-1] is layer
    assert [a is b for a, b in zip(first, second, strict=True)] == [True, True]


def test_a_rebuilt_tensor_has_the_same_record_under_its_stack() -> None:
    """``describe(convert(d)) == d``, apart from ids and the flag of a fake tensor."""
    d = described(lambda f: vmap(grad(f)), torch.randn(3, 4, requires_grad=True))
    mode, interpreters = FakeTensorMode(), Interpreters()
    t = rebuild(d, mode, interpreters)
    with interpreters.entered(stack_of(d)):
        again = tfk.describe_tensor(t)

    def plain(d: MetaTensorDesc) -> MetaTensorDesc:
        wrapper = d.functorch
        if wrapper is not None:
            wrapper = msgspec.structs.replace(wrapper, unwrapped=plain(wrapper.unwrapped))
        return msgspec.structs.replace(d, id=0, is_fake=False, storage=None, functorch=wrapper)

    assert plain(again) == plain(d)
