"""Functorch's interpreters and wrappers: records of them, and what is rebuilt of the records."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
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
    stack_of,
    told,
)
from torch._C import _functorch as functorch
from torch._dispatch.python import suspend_functionalization
from torch._functorch.pyfunctorch import (
    retrieve_all_functorch_interpreters,
    temporarily_clear_interpreter_stack,
)
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.func import functionalize, grad, vmap
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torch_fakeify as tfk
from torch_fakeify.desc import InterpreterDesc, MetaTensorDesc
from torch_fakeify.errors import ConvertError
from torch_fakeify.exprs import encode_sym
from torch_fakeify.interpreters import Interpreters, encode_stack, make_interpreters
from torch_fakeify.wrapped import wrap_functional, wrap_functorch

if TYPE_CHECKING:
    from collections.abc import Generator


def same(n: Any) -> Any:
    """Batch sizes that are plain numbers stay what they are."""
    return n


# --- stacks and records ---------------------------------------------------------------------------


@st.composite
def stacks(draw: st.DrawFn) -> tuple[InterpreterDesc, ...]:
    """Any stack that transforms of functorch can make."""
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
    """``encode_stack(make_interpreters(s)) == s``, also after bytes."""
    layers = make_interpreters(stack, ints=same)
    assert len(layers) == len(stack)
    assert encode_stack(layers, ints=same) == stack
    holder = msgspec.structs.replace(
        tfk.describe_tensor(torch.ones(2)), functorch=functorch_record(stack)
    )
    assert tfk.loads(tfk.dumps(holder)) == holder


def functorch_record(stack: tuple[InterpreterDesc, ...]) -> Any:
    """The record of a wrapper with this stack."""
    from torch_fakeify.desc import FunctorchDesc

    inner = tfk.describe_tensor(torch.ones(3, 2))
    return FunctorchDesc(kind="batched", unwrapped=inner, level=1, bdim=0, stack=stack)


@given(stacks())
def test_building_leaves_the_process_as_it_was(stack: tuple[InterpreterDesc, ...]) -> None:
    """Neither the active stack nor a mode is another one afterwards."""

    def state() -> Any:
        return (
            [i.get_state() for i in retrieve_all_functorch_interpreters()],
            torch.is_grad_enabled(),
            torch._C._is_fwd_grad_enabled(),
            torch.is_inference_mode_enabled(),
        )

    before: list[Any] = []

    def inside(t: torch.Tensor) -> torch.Tensor:
        before.append(state())
        make_interpreters(stack, ints=same)
        assert state() == before[0]
        return t

    with torch.no_grad():
        vmap(inside)(torch.ones(2))
    assert before


def test_a_batch_size_may_be_symbolic() -> None:
    """A ``SymInt`` goes through the coders that the caller gives."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
    x = mode.from_tensor(torch.ones(5, 3))
    found: list[tuple[InterpreterDesc, ...]] = []

    def inside(t: torch.Tensor) -> torch.Tensor:
        with temporarily_clear_interpreter_stack() as layers:
            found.append(encode_stack(layers, ints=encode_sym))
            again = make_interpreters(found[0], ints=lambda n: x.shape[0])
            assert encode_stack(again, ints=encode_sym) == found[0]
        # The stack of the record is the active one.
        ints = Interpreters(lambda n: x.shape[0])
        assert ints.layers(found[0]) is not ints.layers(found[0])
        assert not ints._made
        other = Interpreters(lambda n: x.shape[0])
        other.layers(found[0], ints=lambda n: x.shape[1])
        with other.entered(found[0], ints=lambda n: x.shape[1]):
            (interpreter,) = retrieve_all_functorch_interpreters()
            assert interpreter.batch_size() is not x.shape[0]  # type: ignore[attr-defined]
            assert str(interpreter.batch_size()) == str(x.shape[1])  # type: ignore[attr-defined]
        assert list(other._made) == found
        return t

    with mode:
        vmap(inside)(x)
    (stack,) = found
    assert stack[0].batch_size == encode_sym(x.shape[0])


BAD_STACKS = {
    "interpreter 1 (grad): levels count from one, from the outside; expected 1; found 2": (
        InterpreterDesc(kind="grad", level=2, grad_mode=True),
    ),
    "interpreter 1 (vmap): the record has not the fields of its kind; expected batch_size, "
    "randomness; found randomness": (InterpreterDesc(kind="vmap", level=1, randomness="same"),),
    "interpreter 2 (jvp): the record has not the fields of its kind; expected grad_mode; "
    "found none": (
        InterpreterDesc(kind="grad", level=1, grad_mode=True),
        InterpreterDesc(kind="jvp", level=2),
    ),
    "interpreter 1 (functionalize): the record has not the fields of its kind; expected "
    "add_back_views; found add_back_views, inference_mode": (
        InterpreterDesc(kind="functionalize", level=1, add_back_views=True, inference_mode=True),
    ),
    "interpreter 1 (vmap): a batch size is out of range; expected 0 to 2**63 - 1; found -1": (
        InterpreterDesc(kind="vmap", level=1, randomness="same", batch_size=-1),
    ),
}


@pytest.mark.parametrize("text", BAD_STACKS)
def test_a_stack_that_no_transforms_make_is_refused(text: str) -> None:
    """Levels, fields and sizes are checked before torch asserts on them."""
    with pytest.raises(ConvertError) as error:
        make_interpreters(BAD_STACKS[text], ints=same)
    assert str(error.value) == text
    assert functorch.peek_interpreter_stack() is None


# --- inside real transforms -----------------------------------------------------------------------


class Seen(NamedTuple):
    """What was seen inside a transform."""

    told: Any
    record: MetaTensorDesc
    torchs: Any
    """What is told of torch's own fake tensor, ``None`` where torch makes none."""
    rebuilt: Any
    real: dict[str, Any]
    """By operator, on the real tensor."""
    fake: dict[str, Any] | None
    """By operator, on torch's own fake tensor."""
    modes: tuple[bool, bool]


def look(name: str) -> Seen:
    """Runs a program and looks at its tensor from the inside."""
    seen: list[Seen] = []
    reals = {op: captured_tensor() for op in OPS}

    def inside(t: torch.Tensor) -> torch.Tensor:
        record = tfk.describe_tensor(t)
        torchs: Any = None
        fake: dict[str, Any] | None = None
        try:
            torchs = told(torchs_fake(FakeTensorMode(), t))
        except AssertionError:
            # Torch makes a leaf of a grad wrapper that is none, and then finds that it did.
            assert t.requires_grad
            assert not t.is_leaf
        else:
            fake = {op: on_torchs_fake(op, t, reals[op]) for op in OPS}
        mode = FakeTensorMode()
        rebuilt = told(rebuild(record, mode, Interpreters(same)))
        real = {op: outcome(op, t, reals[op]) for op in OPS}
        modes = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
        seen.append(Seen(told(t), record, torchs, rebuilt, real, fake, modes))
        return t

    PROGRAMS[name](inside)
    return seen[0]


def torchs_fake(mode: FakeTensorMode, t: torch.Tensor) -> Any:
    """Torch's own fake tensor; without its warning about the gradients of non-leaves."""
    with warnings.catch_warnings(action="ignore"):
        return mode.from_tensor(t)


def on_torchs_fake(op: str, t: torch.Tensor, captured: torch.Tensor) -> Any:
    """What an operator gives on the fake tensor that torch makes inside a transform."""
    mode = FakeTensorMode()
    with suspend_functionalization(), temporarily_clear_interpreter_stack():
        fake_captured = mode.from_tensor(captured)
    fake = torchs_fake(mode, t)
    with mode:
        return outcome(op, fake, fake_captured)


@pytest.fixture(scope="module")
def seen() -> dict[str, Seen]:
    """What was seen in every program."""
    with quiet():
        return {name: look(name) for name in PROGRAMS}


@contextmanager
def quiet() -> Generator[None, None, None]:
    """Torch logs every error of a meta function."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


@pytest.mark.parametrize("name", PROGRAMS)
def test_rebuilt_wrappers_are_what_was_described(seen: dict[str, Seen], name: str) -> None:
    """Each wrapper has its kind, level, batch dim, sizes, strides and autograd metadata."""
    assert seen[name].rebuilt == seen[name].told


KNOWN_TO_DIFFER = {
    "vmap of requires_grad",  # torch drops requires_grad of what is wrapped
    "grad of grad",  # torch makes a leaf of what is wrapped
    "grad of vmap of grad",
    "grad in inference mode",  # torch drops that what is wrapped is an inference tensor
    "functionalize of vmap",  # torch takes the innermost level for a functional tensor's
}
"""Programs where torch's fake tensor is not what was described; ours is."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_rebuilt_wrappers_are_what_torch_makes(seen: dict[str, Seen], name: str) -> None:
    """The outermost wrapper is as torch makes it, and all are but for what torch drops."""
    torchs, rebuilt = seen[name].torchs, seen[name].rebuilt
    if torchs is None:
        assert not seen[name].record.is_leaf
        return
    assert rebuilt[0] == torchs[0]
    assert (rebuilt != torchs) == (name in KNOWN_TO_DIFFER)


def check_outcomes(seen: Seen, found: dict[str, Any]) -> None:
    """Operators give what they give on the real tensor; or fail, as on torch's own fake tensor."""
    for op, real in seen.real.items():
        rebuilt = found[op]
        if not isinstance(real, str) and op not in VALUE_OPS:
            assert rebuilt == real, op
        elif seen.fake is not None:
            # A fake tensor has other words for sizes that do not fit, and no data.
            assert rebuilt == seen.fake[op], op
        elif op not in VALUE_OPS:
            assert rebuilt.partition(":")[0] == real.partition(":")[0], op


@pytest.mark.parametrize("name", PROGRAMS)
def test_operators_under_the_rebuilt_stack(seen: dict[str, Seen], name: str) -> None:
    """Outside of any transform, results have the same metadata and errors are the same."""
    grad_mode, forward = seen[name].modes
    with quiet():
        check_outcomes(
            seen[name], replayed(seen[name].record, grad_mode=grad_mode, forward=forward)
        )


def test_operators_in_another_process(seen: dict[str, Seen], tmp_path: Path) -> None:
    """The same from bytes in a fresh interpreter."""
    path = tmp_path / "records"
    chosen = {name: s for name, s in seen.items() if s.modes == (True, True)}
    assert len(chosen) > 15
    path.write_bytes(tfk.dumps({name: s.record for name, s in chosen.items()}))
    script = Path(__file__).with_name("interpreter_programs.py")
    run = subprocess.run(
        [sys.executable, str(script), str(path)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found.keys() == chosen.keys()
    for name, s in chosen.items():
        check_outcomes(s, found[name])


# --- the stacks of a converter --------------------------------------------------------------------


def described(transform: Any, x: torch.Tensor) -> MetaTensorDesc:
    """The record of the tensor inside a transform."""
    found: list[MetaTensorDesc] = []

    def inside(t: torch.Tensor) -> torch.Tensor:
        found.append(tfk.describe_tensor(t))
        return t.sum()

    transform(inside)(x)
    return found[0]


def active() -> Any:
    """What torch says of the active stack."""
    return [interpreter.get_state() for interpreter in retrieve_all_functorch_interpreters()]


@pytest.mark.parametrize("transform", [grad, vmap, functionalize])
def test_what_is_made_inside_the_transform_is_usable_there(transform: Any) -> None:
    """Wrappers belong to the active interpreters, and end with them, as torch's own fakes do."""
    kept: list[torch.Tensor] = []

    def inside(t: torch.Tensor) -> torch.Tensor:
        mode = FakeTensorMode()
        interpreters = Interpreters(same)
        ours, torchs = rebuild(tfk.describe_tensor(t), mode, interpreters), mode.from_tensor(t)
        assert told(ours) == told(torchs)
        assert told(ours.sin() + torchs) == told(torchs.sin() + torchs)
        kept.extend((ours, torchs))
        return t.sum()

    transform(inside)(torch.randn(3, 4))
    ours, torchs = kept
    level = functorch.maybe_get_level(ours)
    assert level == functorch.maybe_get_level(torchs) == (-2 if transform is grad else 1)


def test_wrappers_end_with_their_own_transform() -> None:
    """Also what is made of an outer tensor's record while a transform further in is active."""
    kept: list[torch.Tensor] = []

    def outer(s: torch.Tensor) -> torch.Tensor:
        d = tfk.describe_tensor(s)

        def inner(t: torch.Tensor) -> torch.Tensor:
            kept.append(rebuild(d, FakeTensorMode(), Interpreters(same)))
            return t.sum()

        grad(inner)(s.cos())
        assert functorch.maybe_get_level(kept[0]) == 1
        return s.sum()

    grad(outer)(torch.randn(3))
    assert functorch.maybe_get_level(kept[0]) == -2


def test_ended_interpreters_are_not_taken() -> None:
    """What is made after a transform belongs to a rebuilt stack."""
    interpreters = Interpreters(same)
    records: list[MetaTensorDesc] = []

    def inside(t: torch.Tensor) -> torch.Tensor:
        records.append(tfk.describe_tensor(t))
        rebuild(records[0], FakeTensorMode(), interpreters)
        return t.sum()

    grad(inside)(torch.randn(3))
    made = rebuild(records[0], FakeTensorMode(), interpreters)
    assert functorch.maybe_get_level(made) == 1


def test_wrappers_of_a_rebuilt_stack_stay_alive() -> None:
    """A stack may be entered again: what ends a transform does not come from a record."""
    d = described(grad, torch.randn(3))
    mode, interpreters = FakeTensorMode(), Interpreters(same)
    t = rebuild(d, mode, interpreters)
    for _ in range(2):
        with interpreters.entered(stack_of(d)):
            (slope,) = torch.autograd.grad((t * t).sum(), t, create_graph=True)
            assert told(slope)[0]["level"] == 1
        assert active() == []
        assert functorch.maybe_get_level(t) == 1


def test_entering_an_active_stack_changes_nothing() -> None:
    """Also when transforms further in are active; another stack gives way until the end."""
    d = described(vmap, torch.randn(3, 4))
    other = described(lambda f: grad(lambda t: vmap(f)(t).sum()), torch.randn(3, 4))
    interpreters = Interpreters(same)
    states: list[Any] = []

    def inside(t: torch.Tensor) -> torch.Tensor:
        before = active()
        with interpreters.entered(stack_of(d)):
            states.append((before, active()))
        with interpreters.entered(stack_of(other)):
            states.append(active())
        assert active() == before
        return t.sum()

    vmap(inside)(torch.randn(3, 4))
    vmap(grad(inside))(torch.randn(3, 4))
    assert states[0][0] == states[0][1] == [("Vmap", 1, "error")]
    assert states[2][0] == states[2][1] == [("Vmap", 1, "error"), ("Grad", 2, True)]
    assert states[1] == states[3] == [("Grad", 1, True), ("Vmap", 2, "error")]


@pytest.mark.parametrize(
    "changes",
    [{"batch_size": 4}, {"randomness": "same"}, {"kind": "functionalize"}],
    ids=["batch size", "randomness", "kind"],
)
def test_a_stack_that_differs_is_another_one(changes: dict[str, Any]) -> None:
    """An active interpreter is taken only for a record that is equal in every field."""
    (record,) = stack_of(described(vmap, torch.randn(3, 4)))
    if "kind" in changes:
        record = InterpreterDesc(kind="functionalize", level=1, add_back_views=True)
    else:
        record = msgspec.structs.replace(record, **changes)
    interpreters = Interpreters(same)

    def inside(t: torch.Tensor) -> torch.Tensor:
        with interpreters.entered((record,)):
            with temporarily_clear_interpreter_stack() as layers:
                pass
            assert encode_stack(layers, ints=same) == (record,)
        return t

    vmap(inside)(torch.randn(3, 4))
    assert list(interpreters._made) == [(record,)]


def test_records_of_one_transform_share_its_interpreter() -> None:
    """Levels that two stacks have in common are built once."""
    outer = stack_of(described(grad, torch.randn(3)))
    inner = stack_of(described(lambda f: grad(grad(f)), torch.tensor(1.0)))
    assert inner[:1] == outer
    interpreters = Interpreters(same)
    (layer,) = interpreters.layers(outer)
    first, second = interpreters.layers(inner), interpreters.layers(inner)
    assert first[-1] is layer
    assert [a is b for a, b in zip(first, second, strict=True)] == [True, True]


def test_a_rebuilt_tensor_has_the_same_record_under_its_stack() -> None:
    """``describe(convert(d)) == d``, apart from ids and that it is fake."""
    d = described(lambda f: vmap(grad(f)), torch.randn(3, 4, requires_grad=True))
    mode, interpreters = FakeTensorMode(), Interpreters(same)
    t = rebuild(d, mode, interpreters)
    with interpreters.entered(stack_of(d)):
        again = tfk.describe_tensor(t)

    def plain(d: MetaTensorDesc) -> MetaTensorDesc:
        wrapper = d.functorch
        if wrapper is not None:
            wrapper = msgspec.structs.replace(wrapper, unwrapped=plain(wrapper.unwrapped))
        return msgspec.structs.replace(d, id=0, is_fake=False, storage=None, functorch=wrapper)

    assert plain(again) == plain(d)


# --- wrappers -------------------------------------------------------------------------------------


def leaked(transform: Any, x: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """A tensor and a result that outlived their transform."""
    found: list[torch.Tensor] = []

    def inside(t: torch.Tensor) -> torch.Tensor:
        found.extend((t, t.sin()))
        return t.sum()

    transform(inside, **options)(x)
    return found


@pytest.mark.parametrize("index", [0, 1], ids=["leaf", "result"])
def test_a_dead_grad_wrapper_is_what_torch_makes_of_it(index: int) -> None:
    """It is gone: what it wrapped requires grad as the wrapper did."""
    t = leaked(grad, torch.randn(3))[index]
    level = functorch.maybe_get_level(t)
    assert level == -2
    mode = FakeTensorMode()
    fake = mode.from_tensor(torch.empty(3))
    made = wrap(fake, kind="grad", level=level, requires_grad=t.requires_grad, is_leaf=t.is_leaf)
    torchs = torchs_fake(mode, t)
    assert made is fake
    assert type(torchs) is FakeTensor
    assert told(made) == told(torchs)
    assert made.requires_grad


@pytest.mark.parametrize("index", [0, 1], ids=["input", "result"])
def test_a_batched_tensor_may_outlive_its_transform(index: int) -> None:
    """It keeps its level, and torch wraps it again without any interpreter."""
    t = leaked(vmap, torch.randn(4, 3), in_dims=1)[index]
    d = tfk.describe_tensor(t)
    mode = FakeTensorMode()
    made = rebuild(d, mode, Interpreters(same))
    assert told(made) == told(t) == told(mode.from_tensor(t))


def test_a_functional_tensor_of_functorch_keeps_its_own_level() -> None:
    """Torch takes the level of the innermost transform, which need not be its own."""
    levels: list[int] = []

    def inside(t: torch.Tensor) -> torch.Tensor:
        def further_in(s: torch.Tensor) -> torch.Tensor:
            d = tfk.describe_tensor(t)
            assert d.functorch is not None
            made = rebuild(d, FakeTensorMode(), Interpreters(same))
            torchs = FakeTensorMode().from_tensor(t)
            levels.extend(functorch.maybe_get_level(u) for u in (t, made, torchs))
            return s

        return vmap(further_in)(t + 0)

    functionalize(inside)(torch.randn(3))
    assert levels == [1, 1, 2]


def wrap(unwrapped: torch.Tensor, **fields: Any) -> Any:
    """A wrapper with these fields and defaults for others."""
    given: dict[str, Any] = {
        "kind": "batched",
        "level": 1,
        "bdim": 0,
        "layers": (),
        "requires_grad": False,
        "is_leaf": True,
        "where": "tensor 7",
    }
    return wrap_functorch(unwrapped, **(given | fields))


BAD_WRAPPERS = {
    "the level of a functorch wrapper does not fit; expected 1 to 63; found 0": {"level": 0},
    "the level of a functorch wrapper does not fit; expected 1 to 63; found 64": {"level": 64},
    "the level of a functorch wrapper does not fit; expected 1 to 63; found -2": {"level": -2},
    "the level of a functorch wrapper does not fit; expected 1 to 0; found 1": {"kind": "grad"},
    "the level of a functorch wrapper does not fit; expected 1 to 63; found -1": {
        "kind": "functional",
        "level": -1,
    },
    "the batch dim is no dim of the wrapped tensor; expected 0 to 1; found 2": {"bdim": 2},
    "the batch dim is no dim of the wrapped tensor; expected 0 to 1; found -1": {"bdim": -1},
    "the batch dim is no dim of the wrapped tensor; expected 0 to 1; found None": {"bdim": None},
    "a functional wrapper of functorch requires no grad; expected kind grad or batched; "
    "found functional": {"kind": "functional", "requires_grad": True},
}


@pytest.mark.parametrize("text", BAD_WRAPPERS)
def test_a_wrapper_that_torch_would_assert_on_is_refused(text: str) -> None:
    """Levels and batch dims come from a file and are checked."""
    with pytest.raises(ConvertError) as error:
        wrap(torch.ones(2, 3), **BAD_WRAPPERS[text])
    assert str(error.value) == f"tensor 7: {text}"


def test_levels_grow_outwards() -> None:
    """A wrapper is of a later level than what it wraps."""
    inner = wrap(torch.ones(2, 3), level=2)
    with pytest.raises(ConvertError, match="expected 3 to 63; found 2"):
        wrap(inner, level=2)
    assert functorch.maybe_get_level(wrap(inner, level=3)) == 3


# --- functional tensors ---------------------------------------------------------------------------


def functional(requires_grad: bool, history: bool) -> torch.Tensor:
    """A functional tensor of C++, as AOTAutograd makes one of an input."""
    x = torch.randn(3, 4)
    made = torch._to_functional_tensor(x)
    if requires_grad and not history:
        return made.requires_grad_()
    if requires_grad:
        torch._mirror_autograd_meta_to(x.requires_grad_(), made)
    return made


@pytest.mark.parametrize("history", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_functional_tensors(requires_grad: bool, history: bool) -> None:
    """Autograd metadata comes from the record; torch cannot make the leaf that requires grad."""
    t = functional(requires_grad, history)
    d = tfk.describe_tensor(t)
    assert d.functional is not None
    mode = FakeTensorMode()
    made = wrap_functional(
        tfk.MetaConverter(mode).from_desc(d.functional.unwrapped),
        is_python=False,
        requires_grad=d.requires_grad,
        is_leaf=d.is_leaf,
    )
    assert torch._is_functional_tensor(made)
    assert type(torch._from_functional_tensor(made)) is FakeTensor
    assert told(made) == told(t)
    if t.requires_grad and t.is_leaf:
        with pytest.raises(AssertionError):
            mode.from_tensor(t)
    else:
        torchs = torchs_fake(mode, t)
        assert told(made) == told(torchs)
        assert type(made.grad_fn) is type(torchs.grad_fn)


@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_functional_tensors_of_the_python_class(requires_grad: bool, is_leaf: bool) -> None:
    """Operators work on it under a mode of the caller's."""
    fake = FakeTensorMode().from_tensor(torch.randn(3, 4))
    made = wrap_functional(
        fake, is_python=True, requires_grad=requires_grad, is_leaf=is_leaf or not requires_grad
    )
    assert type(made) is FunctionalTensor
    assert torch._from_functional_tensor(made.elem) is fake
    assert made.requires_grad == requires_grad
    assert made.is_leaf == (is_leaf or not requires_grad)
    with FunctionalTensorMode():
        out = made.sin()
    assert type(out) is FunctionalTensor
    assert out.requires_grad == requires_grad
