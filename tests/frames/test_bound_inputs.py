"""The inputs of a frame by their sources: `Capture.bind`, `check`, and `Instance.check_inputs`."""

from __future__ import annotations

import inspect
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from captured_frames import captures_of
from functorch import make_fx
from program_zoo import programs
from quiet import quiet
from torch.testing._internal.two_tensor import TwoTensor

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Mapping

# --- over the table of programs ---------------------------------------------------------------------

_AFTER_A_BREAK = "its frame is the rest of the function after a graph break"
NOT_FRAMES_OF_THE_FUNCTION = {
    "custom_op_dynamic_output": _AFTER_A_BREAK,
    "data_swapped": _AFTER_A_BREAK,
    "metadata_in_place": _AFTER_A_BREAK,
    **{
        name: "it has several frames" for name, program in programs().items() if program.frames != 1
    },
}
"""Programs of which no frame is that of the whole function, and why."""


def scope_of(fn: Any, args: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments and closure variables of a call by name, and the function's globals."""
    function = fn.forward if isinstance(fn, torch.nn.Module) else fn
    bound = inspect.signature(function).bind(*args)
    bound.apply_defaults()
    scope = dict(bound.arguments)
    plain = getattr(function, "__func__", function)
    if plain is not function:
        scope[next(iter(inspect.signature(plain).parameters))] = function.__self__
    if isinstance(fn, torch.nn.Module):
        scope |= {
            "fn": fn,
            "args": args,
            "kwargs": {},
        }  # of the wrapper by which Dynamo calls torch's
    nonlocals = inspect.getclosurevars(plain).nonlocals
    for value in nonlocals.values():
        if isinstance(value, torch.optim.Optimizer):
            scope["self"] = value  # of the frame of its `step`
    return {**nonlocals, **scope}, plain.__globals__


def is_same(found: Any, wanted: Any) -> bool:
    """Return whether a value is the input that the backend got.

    A number or array that is made a tensor is a new one each time, of the same elements.
    """
    if isinstance(wanted, torch.Tensor):
        is_made = wanted.dim() == 0 or found.data_ptr() == wanted.data_ptr()
        return found is wanted or (is_made and torch.equal(found, wanted))
    if isinstance(wanted, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return type(found) is int if not wanted.node.has_hint() else found == wanted.node.hint
    return found is wanted or found == wanted


@pytest.mark.parametrize("name", sorted(programs().keys() - NOT_FRAMES_OF_THE_FUNCTION.keys()))
def test_the_inputs_of_a_program_are_bound(name: str) -> None:
    """Arguments and weights by source are the inputs that the backend got, and the guards hold for them.

    For a later call that Dynamo does not compile anew, some frame's guards hold.
    """
    program = programs()[name]
    found: list[tuple[tfk.Capture, list[Any], Any]] = []
    with program.active(), quiet():
        fn, *calls = program.make()
        scope: dict[str, Any] = {}
        names: dict[str, Any] = {}

        def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            capture = tfk.capture(gm, inputs)
            bound = capture.bind(scope, globals=names, check=False)
            found.append((capture, [list(inputs), bound], capture.check(scope, globals=names)))
            return gm.forward

        torch._dynamo.reset()
        compiled = torch.compile(fn, backend=backend, **program.options)
        for args in calls:
            scope, names = scope_of(fn, args)
            admitted = any(c.check(scope, globals=names) is None for c, _, _ in found)
            before = len(found)
            compiled(*args)
            assert admitted or len(found) > before
    assert found
    for capture, (wanted, bound), failing in found:
        assert failing is None, str(failing)
        assert len(bound) == len(wanted) == len(capture.inputs)
        assert all(map(is_same, bound, wanted))


# --- what a scope may lack --------------------------------------------------------------------------

TABLE = torch.arange(5.0)


class Layers(torch.nn.Module):
    """Reads weights, a buffer, a global, a closure variable, numbers and a nested argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)])
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Any, extra: Mapping[str, list[Any]], n: int, factor: float) -> Any:
        """Return a tensor of the size of ``x``."""
        for layer in self.layers:
            x = layer(x) * self.scale
        return x * factor + extra["y"][0] + TABLE.sum() * n


def arguments(rows: int = 3, **changes: Any) -> dict[str, Any]:
    """Return the arguments of a call without ``self``."""
    x = torch.randn(rows, 4)
    return {"x": x, "extra": {"y": [torch.randn(4)]}, "n": 3, "factor": 0.5, **changes}


@pytest.fixture(name="frame", scope="module")
def _frame() -> tuple[Layers, tfk.Capture]:
    model = Layers()
    given = arguments()
    (capture,) = captures_of(model, tuple(given.values()), dynamic=True)
    return model, capture


def test_own_arguments_run(frame: tuple[Layers, tfk.Capture]) -> None:
    """Other sizes, numbers and weights than recorded give what the module gives."""
    _, capture = frame
    fn = capture.compile("aot_eager")
    other = Layers()
    given = arguments(7, n=5, factor=-1.5)
    inputs = capture.bind({"self": other, **given}, globals=globals())
    torch.testing.assert_close(fn(*inputs)[0], other(**given))


@pytest.mark.parametrize(
    ("change", "guard"),
    [
        ({"x": torch.randn(1, 4)}, "L['x'].size()[0] >= 2"),
        ({"x": torch.randn(3, 4, dtype=torch.float64)}, "L['x'].dtype == torch.float32"),
        ({"x": torch.randn(3, 4, device="meta")}, "L['x'].device == torch.device('cpu')"),
        ({"x": torch.randn(3, 4).to_sparse()}, "L['x'].layout == torch.strided"),
        ({"x": torch.randn(3, 2, 4)}, "L['x'].ndim == 2"),
        ({"x": torch.randn(3, 5)}, "L['x'].size()[1] == 4"),
        ({"x": torch.randn(4, 3).t()}, "L['x'].stride()[0] == 4"),
        ({"x": torch.randn(12)[4:].view(2, 4)}, "L['x'].storage_offset() == 0"),
        ({"x": torch.randn(3, 4, requires_grad=True)}, "L['x'].requires_grad is False"),
        ({"x": torch.nn.Parameter(torch.randn(3, 4))}, "type(L['x']) is torch.Tensor"),
        ({"n": 2.0}, "type(L['n']) is int"),
        ({"factor": 2}, "type(L['factor']) is float"),
        ({"factor": float("nan")}, "not math.isnan(___as_tensor(L['factor']).item())"),
        ({"x": (both := torch.randn(4, 4)), "extra": {"y": [both[0]]}}, "untyped_storage()"),
    ],
)
def test_the_first_guard_that_fails_is_named(
    frame: tuple[Layers, tfk.Capture], change: dict[str, Any], guard: str
) -> None:
    """By `check` as a guard, by `bind` as an error, which ``check=False`` leaves out."""
    model, capture = frame
    scope = {"self": model, **arguments(**change)}
    found = capture.check(scope, globals=globals())
    assert found is not None
    assert guard in found.text
    with pytest.raises(
        tfk.CaptureError, match="not like those that the frame was recorded with"
    ) as e:
        capture.bind(scope, globals=globals())
    assert found.text in str(e.value)
    assert len(capture.bind(scope, globals=globals(), check=False)) == len(capture.inputs)


def test_global_state_is_guarded(frame: tuple[Layers, tfk.Capture]) -> None:
    """A frame with gradients is not one for ``no_grad``, nor one under autocast."""
    model, capture = frame
    scope = {"self": model, **arguments()}
    assert capture.check(scope, globals=globals()) is None
    with torch.no_grad():
        assert str(capture.check(scope, globals=globals())) == "torch.is_grad_enabled() == True"
    with torch.autocast("cpu"):
        found = capture.check(scope, globals=globals())
    assert str(found) == "torch.is_autocast_enabled('cpu') == False"


LACKS = object()


@pytest.mark.parametrize(
    ("change", "names", "missing", "found"),
    [
        ({"self": LACKS}, globals(), "L['self']", "'x', 'extra', 'n', 'factor'"),
        ({"x": LACKS}, globals(), "L['x']", "'self', 'extra', 'n', 'factor'"),
        ({"extra": LACKS}, globals(), "L['extra']", "'self', 'x', 'n', 'factor'"),
        ({"extra": {"y": []}}, globals(), "L['extra']['y'][0]", "IndexError"),
        ({"self": torch.nn.Linear(4, 4)}, globals(), "L['self']._modules['layers']", "KeyError"),
        ({}, None, "G['TABLE']", "no globals"),
        ({}, {"x": 1}, "G['TABLE']", "1 globals without it"),
    ],
)
def test_what_is_missing_is_named(
    frame: tuple[Layers, tfk.Capture], change: Any, names: Any, missing: str, found: str
) -> None:
    """The error has the name, what there is, and where it belongs; of a container the first such part."""
    model, capture = frame
    scope = {"self": model, **arguments(**change)}
    scope = {name: value for name, value in scope.items() if value is not LACKS}
    for ask in (capture.bind, capture.check):
        with pytest.raises(tfk.CaptureError) as error:
            ask(scope, globals=names)
        assert error.value.expected == missing
        assert str(error.value.found).startswith(found)


def test_a_scope_that_is_no_mapping_is_refused(frame: tuple[Layers, tfk.Capture]) -> None:
    """Positional arguments, or a module in place of its globals, are one error that says what is taken."""
    _, capture = frame
    for ask in (capture.bind, capture.check):
        with pytest.raises(tfk.CaptureError, match=r"the scope is no mapping .* found list"):
            ask([torch.ones(3)])  # pyright: ignore[reportArgumentType]
        with pytest.raises(tfk.CaptureError, match=r"the globals is no mapping .* found module"):
            ask(arguments(), globals=torch)  # pyright: ignore[reportArgumentType]


def test_a_graph_without_sources_says_so() -> None:
    """Its inputs can be checked in their order instead."""
    capture = tfk.capture(torch.fx.symbolic_trace(lambda x: x + 1), [torch.ones(3)])
    with pytest.raises(tfk.CaptureError, match="Pass the inputs in the order of"):
        capture.bind({"x": torch.ones(3)})
    instance = capture.instantiate()
    assert instance.check_inputs([torch.zeros(3)]) is None
    assert str(instance.check_inputs([torch.zeros(4)])) == "L['x'].size()[0] == 3"
    with pytest.raises(tfk.CaptureError, match="expected 1; found 2"):
        instance.check_inputs([torch.zeros(3), 1])


def test_a_random_number_is_no_argument() -> None:
    """What the program draws while it runs is refused by name."""
    (capture,) = captures_of(lambda x: x * random.randint(2, 9), (torch.ones(3),), dynamic=True)
    with pytest.raises(
        tfk.UnsupportedValueError, match="random_value_0: a source that leads to no"
    ):
        capture.bind({"x": torch.ones(3)}, globals=globals())


def test_a_module_of_torch_has_the_scope_of_its_wrapper() -> None:
    """Dynamo compiles a wrapper around it, which the error says."""
    model, x = torch.nn.GRUCell(3, 4), torch.randn(2, 3)
    with torch.no_grad():
        (capture,) = captures_of(model, (x,))
        with pytest.raises(tfk.CaptureError, match=r'pass \{"fn": module, "args": '):
            capture.bind({"self": model, "input": x})
        capture.bind({"fn": model, "args": (x,), "kwargs": {}})


# --- identity ---------------------------------------------------------------------------------------


def write(a: Any, b: Any) -> torch.Tensor:
    """Write into one argument, and use both."""
    return a.add_(1) * b


def add(a: Any, b: Any) -> torch.Tensor:
    """Use both arguments."""
    return a + b


class Two(torch.nn.Module):
    """Two modules, or one at two attributes."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.second = self.first if tied else torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call both."""
        return self.second(self.first(x))


X, Y, BASE, ZEROS = torch.ones(4), torch.ones(4), torch.arange(8.0), torch.zeros(8)
WRAPPER = TwoTensor(torch.ones(4), torch.ones(4))


@pytest.mark.parametrize(
    ("fn", "recorded", "fitting", "other", "guard"),
    [
        (write, (X, X), {"a": Y, "b": Y}, {"a": X, "b": Y}, "L['b'] is L['a']"),
        (write, (X, Y), {"a": Y, "b": X}, {"a": X, "b": X}, ""),
        (
            Two(tied=True),
            (torch.ones(2, 3),),
            {"self": Two(tied=True), "x": torch.ones(2, 3)},
            {"self": Two(tied=False), "x": torch.ones(2, 3)},
            "L['self']._modules['first'] is L['self']._modules['second']",
        ),
        (
            add,
            (BASE[:4], BASE[:4]),
            {"a": ZEROS[:4], "b": ZEROS[:4]},
            {"a": X, "b": Y},
            "untyped_storage()",
        ),
        (add, (X, Y), {"a": Y, "b": X}, {"a": BASE[:4], "b": BASE[:4]}, "untyped_storage()"),
        (
            add,
            (WRAPPER, WRAPPER.clone()),
            {"a": WRAPPER.clone(), "b": WRAPPER},
            {"a": WRAPPER, "b": WRAPPER},
            "len({id(t) for t in (L['a'], L['b'])}) == 2",
        ),
    ],
    ids=["one tensor", "two tensors", "one module", "one storage", "two storages", "two wrappers"],
)
def test_identity_is_guarded(
    fn: Any, recorded: Any, fitting: dict[str, Any], other: dict[str, Any], guard: str
) -> None:
    """What is one object in a frame must be one, and what is two must not: tensors, modules, storages."""
    (capture,) = captures_of(fn, recorded, dynamic=False)
    assert capture.check(fitting) is None
    found = capture.check(other)
    assert found is not None
    assert guard in str(found)
    if guard == "L['b'] is L['a']":
        with pytest.raises(tfk.CaptureError, match=r"expected L\['b'\]"):
            capture.bind({"a": X})


def test_a_constant_that_a_trace_took_in_is_checked() -> None:
    """``make_fx`` makes a number part of the graph, and leaves an input for it."""
    gm = make_fx(lambda x, n: x * n)(torch.ones(3), 2)
    instance = tfk.capture(gm, [torch.ones(3), 2]).instantiate()
    assert instance.check_inputs([torch.ones(3), 2]) is None
    found = instance.check_inputs([torch.ones(3), 5])
    assert str(found) == "type(L['n_1']) is int and L['n_1'] == 2"


# --- numbers and arrays -----------------------------------------------------------------------------


def test_numbers_and_arrays_become_tensors() -> None:
    """A float that Dynamo passes as a tensor, and numpy's arrays and scalars, by their own source."""

    def fn(x: torch.Tensor, factor: float, array: Any, scalar: Any) -> torch.Tensor:
        return x * factor + torch.as_tensor(array).sum() + scalar

    (capture,) = captures_of(fn, (torch.ones(3), 0.5, np.ones(4), np.float32(2.0)), dynamic=True)
    scope = {"x": torch.ones(5), "factor": 1.25, "array": np.arange(6.0), "scalar": np.float32(3.0)}
    inputs = capture.bind(scope)
    torch.testing.assert_close(capture.compile("eager")(*inputs)[0], fn(**scope))
    found = capture.check({**scope, "array": np.arange(6, dtype=np.int32)})
    assert str(found) == "___from_numpy(L['array']).dtype == torch.float64"


# --- after a backend --------------------------------------------------------------------------------


def test_guards_of_the_backend_are_checked() -> None:
    """What a backend assumes while it compiles is among the guards of the instance, not of the capture."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        (t,) = (value for value in inputs if isinstance(value, torch.Tensor))
        assert t.shape[0] % 4 == 0
        t.t_()
        return gm.forward

    (capture,) = captures_of(fn, (torch.ones(8, 3),), dynamic=True)
    instance = capture.instantiate()
    six, twelve = {"x": torch.ones(6, 3)}, {"x": torch.ones(12, 3)}
    assert instance.check(six) is None
    instance.compile(backend)
    assert instance.check(twelve) is None
    found = instance.check(six)
    assert found is not None
    assert "L['x'].size()[0]" in found.text
    assert instance.check_inputs(instance.bind(twelve)) is None
    assert instance.check_inputs(instance.bind(six, check=False)) is not None
    assert capture.check(six) is None


def test_devices_are_those_of_the_instance() -> None:
    """A frame moved to another device takes its arguments there."""
    (capture,) = captures_of(lambda x: x + 1, (torch.ones(3),))
    moved = capture.instantiate("meta")
    assert moved.check({"x": torch.ones(3, device="meta")}) is None
    assert str(moved.check({"x": torch.ones(3)})) == "L['x'].device == torch.device('meta')"


def test_guards_leave_the_process_as_data(frame: tuple[Layers, tfk.Capture]) -> None:
    """The guards of a frame are written and read, with the same texts and answers."""
    model, capture = frame
    guards = capture.instantiate().guards
    again = tfk.frontend.Guards.loads(guards.dumps())
    assert str(again) == str(guards)
    scope = {"self": model, **arguments()}
    with pytest.raises(
        tfk.CaptureError, match=r"KeyError: 'TABLE'.* the globals of the function's module"
    ):
        again.failing(scope)
    failing = again.failing({**scope, "x": torch.ones(1, 4)}, globals=globals())
    assert str(failing) == str(capture.check({**scope, "x": torch.ones(1, 4)}, globals=globals()))
