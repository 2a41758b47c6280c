"""``frontend``: arguments of every class that pytree knows, and functions that change them."""

from __future__ import annotations

import collections
import copy
import functools
import threading
import types
from typing import TYPE_CHECKING, Any, NamedTuple

import frontend_values
import numpy as np
import pytest
import torch
from small_frontend import Jit
from torch.utils import _pytree as pytree

import torch_fakeify as tfk
from torch_fakeify import frontend
from torch_fakeify.frontend import Policy

if TYPE_CHECKING:
    from collections.abc import Callable
from frontend_cases import check_forms, grown
from frontend_values import (
    DYNAMIC,
    Batch,
    Broken,
    Computed,
    Deep,
    Frozen,
    Keyed,
    Keyless,
    Listed,
    Mode,
    Pair,
    Slotted,
)


class Plain:
    """A class that is not registered as a pytree node."""

    def __init__(self, x: Any) -> None:
        self.x = x


# --- arguments --------------------------------------------------------------------------------------


def use_batch(b: Batch) -> Any:
    """Read every field of a batch."""
    out = b.x * 2 if b.flag else b.x
    out = out if b.y is None else out + b.y
    return out.sum() if b.name == "sum" else (out + 1 if b.mode is Mode.ADD else out * 3)


def use_deque(q: Any) -> Any:
    """Add the first and the last item, which may be one tensor."""
    return q[0] + q[-1] * len(q)


class Case(NamedTuple):
    """A function, makers of its argument, which of these compile, and sources of its tensors."""

    fn: Callable[[Any], Any]
    makers: list[Callable[[], Any]]
    compiles: list[bool]
    sources: list[str]


CASES = {
    "a deque": Case(
        use_deque,
        [
            lambda: collections.deque([grown(3), grown(3)]),
            lambda: collections.deque([grown(4), grown(4) + 1]),
            lambda: collections.deque([grown(3)]),
            lambda: collections.deque([grown(3), grown(3)], maxlen=4),
        ],
        [True, False, True, True],
        ["L['v'][0]", "L['v'][1]"],
    ),
    "a dataclass": Case(
        use_batch,
        [
            lambda: Batch(grown(3)),
            lambda: Batch(grown(5)),
            lambda: Batch(grown(3), grown(3)),
            lambda: Batch(grown(3), flag=False),
            lambda: Batch(grown(3), name="other"),
            lambda: Batch(grown(3), name="other", mode=Mode.MUL),
            lambda: Batch(grown(7), name="other", mode=Mode.MUL),
        ],
        [True, False, True, True, True, True, False],
        ["L['v'].x"],
    ),
    "a frozen dataclass": Case(
        lambda f: f.batch.x * f.scale,
        [
            lambda: Frozen(Batch(grown(3)), grown(1)),
            lambda: Frozen(Batch(grown(4)), grown(1)),
            lambda: Frozen(Batch(grown(4)), 2.0),
            lambda: Frozen(Batch(grown(4)), 3.0),
        ],
        [True, False, True, True],
        ["L['v'].batch.x", "L['v'].scale"],
    ),
    "keys": Case(
        lambda o: o.a + o.b,
        [lambda: Keyed(grown(3), grown(3)), lambda: Keyed(grown(2), grown(2)),
         lambda: Keyed(grown(2), 4)],
        [True, False, True],
        ["L['v'].a", "L['v'].b"],
    ),
    "slots": Case(
        lambda o: o.a + o.b,
        [lambda: Slotted(grown(3), grown(3)), lambda: Slotted(grown(2), grown(2))],
        [True, False],
        ["L['v'].a", "L['v'].b"],
    ),
    "no keys": Case(
        lambda o: o.a**o.power + o.b,
        [
            lambda: Keyless(grown(3), grown(3)),
            lambda: Keyless(grown(2), grown(2)),
            lambda: Keyless(grown(2), grown(2), power=3),
            lambda: Keyless(grown(2), 5),
            lambda: Keyless(grown(2), 6),
        ],
        [True, False, True, True, True],
        ["L['v'].a", "L['v'].b"],
    ),
    "tensors deep inside": Case(
        lambda o: sum(o.held["parts"]) * (2 if o.kind == "deep" else 3),
        [
            lambda: Deep(grown(3), grown(3)),
            lambda: Deep(grown(2), grown(2)),
            lambda: Deep(grown(3), grown(3), grown(3)),
            lambda: Deep(grown(3), 5),
            lambda: Deep(grown(3), 6),
        ],
        [True, False, True, True, True],
        ["L['v'].held['parts'][0]", "L['v'].held['parts'][1]"],
    ),
    "a dictionary of its own class": Case(
        lambda d: d["a"] * 2 if type(d) is Listed else d["a"],
        [lambda: Listed(a=grown(3)), lambda: Listed(a=grown(4)), lambda: {"a": grown(3)},
         lambda: Listed(b=1, a=grown(3))],
        [True, False, True, True],
        ["L['v']['a']"],
    ),
    "a result of torch": Case(
        lambda r: r.values + r.indices,
        [lambda: grown(3, 2).max(0), lambda: grown(5, 4).max(0)],
        [True, False],
        ["L['v'][0]", "L['v'][1]"],
    ),
    "keys of several types": Case(
        lambda d: sum(d.values()),
        [lambda: {None: grown(3), (1, "a"): grown(3), 2.5: grown(3), torch.int8: grown(3)}] * 2,
        [True, False],
        ["L['v'][None]", "L['v'][(1, 'a')]", "L['v'][2.5]", "L['v'][torch.int8]"],
    ),
    "all of them in one another": Case(
        lambda v: v[0].a.x + v[0].b["d"][0].second * v[1].held["parts"][0].batch.x,
        [lambda n=n: (
            Keyed(Batch(grown(n)), collections.OrderedDict(
                d=collections.deque([Pair(None, grown(n))]))),
            Deep(Frozen(Batch(grown(n)), 1)),
        ) for n in (3, 4)],
        [True, False],
        ["L['v'][0].a.x", "L['v'][0].b['d'][0].second", "L['v'][1].held['parts'][0].batch.x"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CASES)
def test_an_argument_of_any_class(what: str) -> None:
    """Results equal eager's, and another structure or constant compiles again."""
    case = CASES[what]
    jit = Jit(lambda v: case.fn(v), DYNAMIC, "eager")
    for make, compiles in zip(case.makers, case.compiles, strict=True):
        count = jit.count
        torch.testing.assert_close(jit(make()), case.fn(make()), rtol=0, atol=0)
        assert (jit.count - count == 1) is compiles


@pytest.mark.parametrize("what", CASES)
def test_sources_evaluate_to_the_tensors(what: str) -> None:
    """Each source is Python that gives its tensor in the scope, and the scope is not changed."""
    case = CASES[what]
    value = case.makers[0]()
    before = copy.deepcopy(value)
    inputs = frontend.describe({"v": value}, DYNAMIC)
    names = [one.source.name for one in inputs]
    assert names == case.sources
    found = [eval(name, {"torch": torch, "L": {"v": value}}) for name in names]
    assert all(isinstance(t, torch.Tensor) for t in found)
    assert [tuple(t.shape) for t in found] == [one.record.tensor.size for one in inputs]
    fakes = frontend.Trace(inputs, sizes_as_inputs=False).inputs
    filled = inputs.filled({"v": value}, fakes)
    assert type(filled["v"]) is type(value)
    assert all(
        eval(name, {"torch": torch, "L": filled}) is fake
        for name, fake in zip(names, fakes, strict=True)
    )
    for name, t in zip(names, found, strict=True):
        assert torch.equal(t, eval(name, {"torch": torch, "L": {"v": before}}))


@pytest.mark.parametrize("what", CASES)
def test_the_forms_of_guards_agree(what: str) -> None:
    """Text, function, expression and record agree for each argument and entry."""
    case = CASES[what]
    jit = Jit(lambda v: case.fn(v), DYNAMIC, "eager")
    scopes = [{"v": make()} for make in case.makers]
    for scope in scopes:
        jit.entry(scope)
    names = {"collections": collections, "frontend_values": frontend_values}
    assert all(check_forms(entry.guards, scopes, names) for entry in jit.entries)


def test_a_policy_may_name_attributes() -> None:
    """A policy may name a part of an argument by its source."""
    policy = Policy(named={"L['b'].x": {0: "DYNAMIC"}, "L['q'][1]": {0: "DYNAMIC"}})
    scope = {"b": Batch(grown(3)), "q": collections.deque([grown(3), grown(4)])}
    trace = frontend.Trace(frontend.describe(scope, policy), sizes_as_inputs=False)
    assert [str(t.size(0)).startswith("s") for t in trace.inputs] == [True, False, True]


def test_an_object_in_two_arguments_is_one_object() -> None:
    """A tensor in two containers is one input, and a container in two places is one container."""
    t = grown(3)
    batch = Batch(t, t)
    scope = {"a": batch, "b": [batch, Keyed(t, 1)]}
    inputs = frontend.describe(scope)
    assert len(inputs) == 1
    filled = inputs.filled(scope, [None])
    assert filled["a"] is filled["b"][0]
    assert filled["a"].x is filled["b"][1].a is None


# --- what a function puts into its arguments --------------------------------------------------------


def put(cell: Any, x: torch.Tensor) -> torch.Tensor:
    """Put another tensor and another number into an argument."""
    cell.a = torch.cat([cell.a, x])
    cell.b = cell.b + 1
    return cell.a.sum()


@pytest.mark.parametrize("cls", [Keyed, Slotted, Keyless])
def test_what_a_function_puts_into_an_argument_is_there_afterwards(cls: Any) -> None:
    """The argument is that of eager afterwards, and is not changed while it is traced."""
    jit = Jit(put, DYNAMIC)
    ours, theirs = cls(grown(3), 1), cls(grown(3), 1)
    for n in (2, 3):
        torch.testing.assert_close(jit(ours, grown(n)), put(theirs, grown(n)))
        torch.testing.assert_close(ours.a, theirs.a)
        assert ours.b == theirs.b


def test_lists_dictionaries_and_modules_are_changed_as_in_eager() -> None:
    """A function may change them by item, and the buffers and numbers of a module."""

    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(()))
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total = self.total + x.sum()
            self.calls += 1
            return x + self.total

    def fn(xs: list[Any], d: dict[str, Any], module: Counter) -> torch.Tensor:
        xs[0], xs[1] = xs[1], xs[0] + 1
        d["last"] = module(xs[0])
        return d["last"].sum()

    jit = Jit(fn, DYNAMIC)
    ours, theirs = (([grown(2), grown(3)], {"last": grown(1)}, Counter()) for _ in range(2))
    for _ in range(2):
        torch.testing.assert_close(jit(*ours), fn(*theirs))
        torch.testing.assert_close(ours[:2], theirs[:2])
        torch.testing.assert_close(ours[2].total, theirs[2].total)
        assert ours[2].calls == theirs[2].calls


CHANGES: dict[str, tuple[Callable[[Any], Any], Callable[[], Any], str]] = {
    "a longer list": (lambda v: v.append(v[0] + 1), lambda: [grown(3)], "L['v'][1]"),
    "a shorter list": (lambda v: v.pop(), lambda: [grown(3), grown(3)], "L['v'][1]"),
    "another key": (lambda v: v.update(b=1), lambda: {"a": grown(3)}, "L['v']['b']"),
    "a longer deque": (
        lambda v: v.append(v[0]), lambda: collections.deque([grown(3)]), "L['v'][1]",
    ),
    "another container": (
        lambda v: setattr(v, "x", [v.x]), lambda: Batch(grown(3)), "L['v'].x",
    ),
    "deep inside": (
        lambda v: v.held["parts"].append(v.held["parts"][0] * 2), lambda: Deep(grown(3)),
        "L['v'].held['parts'][1]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_a_function_that_changes_the_structure_of_an_argument_is_refused(what: str) -> None:
    """A compiled function would not make the change, and the argument is not changed either."""
    change, make, where = CHANGES[what]
    value = make()
    with pytest.raises(tfk.UnsupportedValueError) as error:
        Jit(lambda v: change(v), DYNAMIC, "eager")(value)
    text = str(error.value)
    assert text.startswith(f"{where}: the function changes what is in an argument; ")
    assert text.endswith("Return it, and change the argument after the call")
    assert pytree.tree_structure(value) == pytree.tree_structure(make())


# --- odd values -------------------------------------------------------------------------------------


CONSTANTS: dict[str, Callable[[], Any]] = {
    "a set": lambda: {1, 2}, "a slice": lambda: slice(1, 2), "complex": lambda: 1 + 2j,
    "bytes": lambda: b"ab", "a size": lambda: torch.Size([1, 2]), "a range": lambda: range(3),
    "a dtype": lambda: torch.int8, "a function": lambda: torch.sin, "an enumeration": lambda: Mode.ADD,
    "a sparse tensor": lambda: torch.eye(3).to_sparse(), "a large number": lambda: 10**30,
    "a list of parameters": lambda: torch.nn.ParameterList([grown(3)]),
    "a packed sequence": lambda: torch.nn.utils.rnn.pack_sequence([grown(3)]),
    "a counter": lambda: collections.Counter("aab"),
}  # fmt: skip


@pytest.mark.parametrize("what", CONSTANTS)
def test_unusual_arguments_work_and_are_guarded(what: str) -> None:
    """Another call with an equal argument compiles nothing."""
    jit = Jit(lambda v, x: x + 1, DYNAMIC, "eager")
    for _ in range(2):
        torch.testing.assert_close(jit(CONSTANTS[what](), grown(3)), grown(3) + 1)
    assert jit.count == 1


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "an array": (lambda: np.ones(3), "numpy.ndarray. Give torch.from_numpy of it"),
    "a scalar of numpy": (lambda: np.float32(2), "numpy.float32. Give torch.from_numpy of it"),
    "a generator": (lambda: (i for i in range(2)), "register_pytree_node"),
    "a set of tensors": (lambda: {grown(3)}, "found builtins.set"),
    "a partial": (lambda: functools.partial(abs), "found functools.partial"),
    "a lambda": (lambda: lambda x: x, "found builtins.function"),
    "an object": (lambda: Plain(grown(3)), "Plain. Give what the function reads of it as names"),
    "a lock": (threading.Lock, "found _thread.lock"),
    "a view of memory": (lambda: memoryview(b"a"), "found builtins.memoryview"),
    "a proxy": (lambda: types.MappingProxyType({"a": grown(3)}), "found builtins.mappingproxy"),
    "a namespace": (lambda: types.SimpleNamespace(a=grown(3)), "found types.SimpleNamespace"),
    "TorchScript": (
        lambda: torch.jit.trace(torch.nn.Linear(3, 3), grown(3)),
        "compiled already; found TopLevelTracedModule. Give the module that it was made from",
    ),
    "an old nested tensor": (
        lambda: torch.nested.nested_tensor([grown(2), grown(3)]), "nested",
    ),
    "a storage": (lambda: grown(3).untyped_storage(), "found torch.storage.UntypedStorage"),
    "a key of an odd type": (lambda: {Mode.ADD: grown(3)}, "keys that are texts or numbers"),
    "a subclass of list": (lambda: type("Own", (list,), {})([grown(3)]), "Own. Give"),
    "an array in a dataclass": (lambda: Batch(np.ones(3)), "L['v'].x: a value of the scope"),
    "tensors that are computed": (
        lambda: Computed(grown(3)),
        "no attribute or item leads to leaf 0 of a value; found frontend_values.Computed. "
        "Register the class with torch.utils._pytree.register_pytree_node(..., "
        "flatten_with_keys_fn=...), with keys that lead to each part of it",
    ),
    "what cannot be flattened": (
        Broken,
        "a value cannot be flattened; found frontend_values.Broken: ZeroDivisionError: "
        "division by zero",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors", "ignore::DeprecationWarning"
)
@pytest.mark.parametrize("what", REFUSED)
def test_a_value_that_is_no_argument_is_refused(what: str) -> None:
    """The error contains the name of the argument, its class, and what to do."""
    make, text = REFUSED[what]
    with pytest.raises(tfk.FakeifyError) as error:
        Jit(lambda v, x: x + 1, DYNAMIC, "eager")(make(), grown(3))
    assert str(error.value).startswith("L['v']")
    assert text in str(error.value)


def test_a_value_that_contains_itself_is_refused() -> None:
    """A value that contains itself could not be walked through in finite time."""
    plain: list[Any] = []
    plain.append(plain)
    loop: Any = collections.deque()
    loop.append(loop)
    for value, where in ((plain, r"L\['v'\]\[0\]"), (loop, r"L\['v'\]")):
        with pytest.raises(tfk.UnsupportedValueError, match=f"^{where}: a value contains itself"):
            frontend.describe({"v": value})
    with pytest.raises(tfk.UnsupportedValueError, match=r"^the result: a value contains itself"):
        Jit(lambda x: loop, DYNAMIC, "eager")(grown(3))


@pytest.mark.parametrize(
    ("make", "how"),
    [(lambda x: [Plain(x)], "register_pytree_node"), (lambda x: [np.ones(2)], "from_numpy")],
)
def test_a_value_that_is_no_result_is_refused(make: Callable[[Any], Any], how: str) -> None:
    """The error contains its place in the result, and what to do."""
    with pytest.raises(tfk.UnsupportedValueError) as error:
        Jit(make, DYNAMIC, "eager")(grown(3))
    assert str(error.value).startswith("the result[0]: a value has no record")
    assert how in str(error.value)
