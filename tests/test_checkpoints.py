"""``checkpoint`` of a ``ShapeEnv``: exact rollback, and nothing outside of it that remembers."""

from __future__ import annotations

import collections
import copy
import functools
import gc
import pickle
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.source import LocalSource
from torch._guards import ShapeGuard
from torch._subclasses.fake_tensor import (
    FakeTensorMode,
    _DispatchCacheBypassEntry,
    _DispatchCacheValidEntry,
)
from torch.fx.experimental import _config as shapes_config
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatefulSymbolicContext,
    StatelessSymbolicContext,
)
from torch.utils._traceback import CapturedTraceback

import torch_fakeify as tfk
from torch_fakeify import env_watch
from torch_fakeify.checkpoints import clear_method_caches
from torch_fakeify.env_state import FLAT, Leap
from torch_fakeify.errors import ShapeEnvError

if TYPE_CHECKING:
    from collections.abc import Callable

DYNAMIC, DUCK, STATIC = DimDynamic.DYNAMIC, DimDynamic.DUCK, DimDynamic.STATIC
GONE = r"(was|were) made after the checkpoint, and the ShapeEnv was rolled back\. Make the tensor or the"


# --- helpers ------------------------------------------------------------------------------------------


def make_mode(**settings_: Any) -> FakeTensorMode:
    """A fake tensor mode with a new environment."""
    return FakeTensorMode(shape_env=ShapeEnv(**settings_))


def fake_of(mode: FakeTensorMode, name: str, *sizes: int, kind: DimDynamic = DYNAMIC) -> Any:
    """An input tensor whose sizes and strides have symbols."""
    context = StatelessSymbolicContext(
        dynamic_sizes=[kind] * len(sizes), dynamic_strides=[kind] * len(sizes)
    )
    real = torch.empty(sizes, device="meta")
    return mode.from_tensor(real, source=LocalSource(name), symbolic_context=context)


def int_of(env: Any, name: str, value: int) -> Any:
    """An input that is an int."""
    source = LocalSource(name)
    symbol = env.create_symbol(value, source, DYNAMIC)
    return env.create_symintnode(symbol, hint=value, source=source)


def exprs(env: Any) -> list[str]:
    """The guards as text."""
    return [str(guard.expr) for guard in env.guards]


class Photo:
    """Every object that an environment is made of, by identity, and what each contains."""

    def __init__(self, env: Any) -> None:
        self._alive: list[Any] = []
        self.shape = [(name, self.of(value)) for name, value in vars(env).items()]
        self.numbers = {name: v for name, v in vars(env).items() if isinstance(v, int)}

    def of(self, value: Any) -> Any:
        """An object and its contents."""
        self._alive.append(value)
        match value:
            case bool() | int() | str() | None:
                return value
            case dict():
                return type(value), id(value), [(self.of(k), self.of(v)) for k, v in value.items()]
            case set():
                return id(value), sorted(id(member) for member in value)
            case list() | tuple():
                return type(value), id(value), [self.of(member) for member in value]
            case symbolic_shapes.ValueRangesSLoc():
                return id(value), self.of(value.lower), self.of(value.upper)
            case symbolic_shapes.OrderedSet():
                return id(value), self.of(value._dict)
            case torch.fx.Graph():
                return id(value), [(self.of(n.meta), id(n), list(n.users)) for n in value.nodes]
            case symbolic_shapes.DimConstraints():
                return id(value), self.of(vars(value))
            case _ if type(value).__name__ == "TranslationValidator":
                return id(value), self.of(vars(value))
            case _:
                return id(value)

    def check(self, env: Any) -> None:
        """The environment is made of the same objects, each with the same contents."""
        now = Photo(env)
        for (name, then), (other, value) in zip(self.shape, now.shape, strict=True):
            assert other == name
            assert value == then, name


def photo_and_record(env: Any) -> Callable[[], None]:
    """Takes both, and gives what compares them with the environment later."""
    photo, record = Photo(env), tfk.snapshot(env)

    def check() -> None:
        photo.check(env)
        assert tfk.snapshot(env) == record

    return check


def learned(env: Any) -> dict[str, Any]:
    """Every attribute as text, but for objects that two equal environments do not share."""
    own = {"_version_counter", "_replacements_version_counter", "_expr_sym_node_id", "log"}
    own.add("_symop_cache")  # it is by versions
    found: dict[str, Any] = {}
    for name, value in vars(env).items():
        if name in own:
            continue
        if name in {"var_to_stack", "fake_tensor_cache", "specialization_stacks"}:
            value = len(value)
        elif name == "dim_constraints":
            value = value is None
        elif name == "events":
            # Others are recorded when an answer was not in a cache.
            value = [event.name for event in value if str(event.name).startswith("create_")]
        elif isinstance(value, set):
            value = sorted(map(repr, value))
        elif isinstance(value, dict):
            value = [(repr(k), repr(v)) for k, v in value.items()]
        else:
            value = repr(value)
        found[name] = value
    return found


# --- programs with detours ------------------------------------------------------------------------------


class Session:
    """An environment and what a program has made in it: sizes, tensors, contexts."""

    def __init__(self, **settings_: Any) -> None:
        self.mode = make_mode(**settings_)
        self.env: Any = self.mode.shape_env
        self.reals = [torch.empty(sizes, device="meta") for sizes in ((4, 6), (6,), (4, 4), (9, 1))]
        self.numbers = torch.zeros(3, dtype=torch.int64)
        self.contexts = {
            i: StatefulSymbolicContext(
                dynamic_sizes=[DYNAMIC] * real.ndim,
                dynamic_strides=[DYNAMIC] * real.ndim,
                tensor_source=LocalSource(f"c{i}"),
                view_base_context=None,
            )
            for i, real in enumerate(self.reals)
        }
        self.pool: list[Any] = []
        self.fakes: list[Any] = []
        self.inputs: list[tuple[Any, Any]] = []

    def run(self, action: tuple[Any, ...]) -> str:
        """What an action gives, or which error it raises, as text."""
        name, *args = action
        try:
            return str(getattr(self, name)(*args))
        except (RuntimeError, ValueError, ZeroDivisionError, AssertionError) as error:
            return type(error).__name__

    def keep(self, value: Any) -> Any:
        """Put a size into the pool."""
        if isinstance(value, torch.SymInt):
            self.pool.append(value)
        return value

    def pick(self, i: int) -> Any:
        """A size of the pool."""
        return self.pool[i % len(self.pool)] if self.pool else 3

    # --- actions ---

    def number(self, i: int, value: int) -> str:
        """An input that is an int."""
        return str(self.keep(int_of(self.env, f"n{i}", value)))

    def tensor(self, i: int, stateful: bool) -> str:
        """An input that is a tensor."""
        i %= len(self.reals)
        context = self.contexts[i]
        if not stateful:
            context = StatelessSymbolicContext(dynamic_sizes=[DUCK] * self.reals[i].ndim)
        source = LocalSource(f"{'c' if stateful else 't'}{i}")
        fake = self.mode.from_tensor(self.reals[i], source=source, symbolic_context=context)
        self.fakes.append(fake)
        for size in (*fake.shape, *fake.stride()):
            self.keep(size)
        return f"{fake.shape} {fake.stride()}"

    def again(self, i: int) -> str:
        """A tensor made once more of the same context, in another mode."""
        i %= len(self.reals)
        mode = FakeTensorMode(shape_env=self.env)
        context = self.contexts[i]
        fake = mode.from_tensor(
            self.reals[i], source=LocalSource(f"c{i}"), symbolic_context=context
        )
        return f"{fake.shape} {fake.stride()}"

    def unbacked(self, kind: str) -> str:
        """A scalar of data."""
        return str(self.keep(getattr(self.env, f"create_unbacked_sym{kind}")()))

    def nonzero(self, i: int) -> str:
        """A size of data, which the tensor remembers."""
        if not self.fakes:
            return "none"
        with self.mode:
            found = torch.ops.aten.nonzero(self.fakes[i % len(self.fakes)])
        return str(self.keep(found.shape[0]))

    def item(self) -> str:
        """An int of data, which the tensor remembers."""
        with self.mode:
            fake = self.mode.from_tensor(self.numbers, static_shapes=True)
            return str(self.keep(fake.sum().item()))

    def contiguous(self, i: int) -> str:
        """How a tensor lies in memory, which C++ remembers."""
        return str(self.fakes[i % len(self.fakes)].is_contiguous()) if self.fakes else "none"

    def size_like(self, i: int) -> str:
        """A symbol is a size; torch does not ask for it of a number that has become a constant."""
        expr = self.pick(i).node.expr
        if isinstance(expr, sympy.Symbol):
            self.env._constrain_range_for_size(expr)
        return str(expr)

    def arithmetic(self, i: int, j: int, k: int) -> str:
        """Another size."""
        return str(self.keep(self.pick(i) * k + self.pick(j)))

    def guard(self, kind: str, i: int, j: int, k: int) -> str:
        """A branch."""
        return str(bool(self.condition(kind, i, j, k)))

    def check(self, kind: str, i: int, j: int, k: int) -> str:
        """A checked condition."""
        return str(torch._check(self.condition(kind, i, j, k)))

    def suppressed(self, kind: str, i: int, j: int, k: int) -> str:
        """A branch while guards are suppressed."""
        with self.env.suppress_guards():
            return self.guard(kind, i, j, k)

    def read(self, i: int) -> str:
        """What a size is now; the node remembers it."""
        return f"{self.pick(i)} {sympy.sympify(getattr(self.pick(i), 'node', None) and 1)}"

    def specialize(self, i: int) -> str:
        """A size as a constant."""
        return str(int(self.pick(i)))

    def freeze(self) -> str:
        """No more guards."""
        self.env.freeze()
        return "frozen"

    def produce(self) -> str:
        """The guards over all inputs."""
        sources = [s for symbol in self.env.var_to_sources.values() for s in symbol]
        symbols = [
            self.env.create_symintnode(symbol, hint=None)
            for symbol, known in self.env.var_to_sources.items()
            for _ in known
        ]
        return str([h.exprs for h in self.env.produce_guards_verbose(symbols, sources)])

    def condition(self, kind: str, i: int, j: int, k: int) -> Any:
        """A condition over two sizes and a number."""
        a, b = self.pick(i), self.pick(j)
        match kind:
            case "gt":
                return a > k
            case "le":
                return a <= b + k
            case "eq":
                return a == b
            case "is":
                return a == k
            case "mod":
                return a % (abs(k) + 2) == 0
            case "floor":
                return (a * 2 + b) // (abs(k) + 2) < 9
            case _:
                return torch.sym_max(a, b) >= torch.sym_min(b, k)


INDEX = st.integers(0, 9)
CONDITION = (
    st.sampled_from(["gt", "le", "eq", "is", "mod", "floor", "max"]),
    INDEX,
    INDEX,
    st.integers(-3, 12),
)
ACTION = st.one_of(
    st.tuples(st.just("number"), INDEX, st.integers(2, 9)),
    st.tuples(st.just("tensor"), INDEX, st.booleans()),
    st.tuples(st.sampled_from(["again", "nonzero", "contiguous", "size_like", "read"]), INDEX),
    st.tuples(st.just("unbacked"), st.sampled_from(["int", "int", "float", "bool"])),
    st.sampled_from([("item",), ("produce",), ("produce",), ("freeze",)]),
    st.tuples(st.just("arithmetic"), INDEX, INDEX, st.integers(1, 4)),
    st.tuples(st.sampled_from(["guard", "guard", "check", "suppressed"]), *CONDITION),
    st.tuples(st.sampled_from(["guard", "check"]), *CONDITION),
    st.tuples(st.just("specialize"), INDEX),
)
PRELUDE = [("tensor", 0, True), ("number", 0, 4), ("number", 1, 6), ("unbacked", "int")]


def blocks(inner: Any) -> Any:
    """A block that is rolled back, once or more, or kept."""
    steps = st.lists(inner, max_size=5)
    return st.one_of(
        st.tuples(st.just("detour"), st.lists(steps, min_size=1, max_size=2)),
        st.tuples(st.just("kept"), steps),
    )


STEP = st.one_of(ACTION, ACTION, blocks(st.one_of(ACTION, blocks(ACTION))))


def run_steps(session: Session, steps: list[Any], answers: list[str], *, detours: bool) -> None:
    """Runs a program; without detours its rolled back parts are left out."""
    for step in steps:
        if step[0] == "detour":
            run_detour(session, step[1], detours=detours)
        elif step[0] == "kept":
            point = tfk.checkpoint(session.env) if detours else None
            run_steps(session, step[1], answers, detours=detours)
            if point is not None and len(step[1]) % 2:
                point.commit()
            del point
        else:
            answers.append(session.run(step))


def run_detour(session: Session, parts: list[list[Any]], *, detours: bool) -> None:
    """Runs the parts one after the other, each rolled back; checks that nothing is left of them."""
    if detours:
        check = photo_and_record(session.env)
        pool, fakes = list(session.pool), list(session.fakes)
        memos = [dict(vars(fake)) for fake in fakes]
        known = {str(symbol) for symbol in session.env.var_to_range}
        point = tfk.checkpoint(session.env)
        for part in parts:
            run_steps(session, part, [], detours=True)
            made = session.pool[len(pool) :]
            point.rollback()
            check()
            assert [dict(vars(fake)) for fake in fakes] == memos
            for size in made:
                check_survivor(session.env, size, known)
            point.rollback()  # asking for expressions is an event and may shorten replacements
            session.pool, session.fakes = list(pool), list(fakes)
    # Torch may forget what it has in these caches at any time; only then the two are comparable.
    clear_method_caches(ShapeEnv)
    # A rollback makes C++ forget of all tensors how they lie in memory: it does not tell of which it
    # found it out since.
    watch = env_watch._watch_of(session.env) or env_watch.Watch(session.env)
    watch._forget_layouts()
    for size in session.pool:
        assert size.node.expr == session.env.replace(size.node._expr)


def check_survivor(env: Any, size: Any, known: set[str]) -> None:
    """A size over known symbols is what the environment says it is; any other is an error."""
    if {str(symbol) for symbol in size.node._expr.free_symbols} <= known:
        assert size.node.expr == env.replace(size.node._expr)
        return
    with pytest.raises(ShapeEnvError, match=GONE):
        size.node.expr  # noqa: B018
    with pytest.raises(ShapeEnvError, match=GONE):
        bool(size > 2)


PROGRAMS = {
    "settings_": st.fixed_dictionaries(
        {"specialize_zero_one": st.booleans(), "should_record_events": st.booleans()}
    ),
    "program": st.lists(STEP, min_size=1, max_size=9),
    "last": st.lists(ACTION, max_size=4),
}


@given(**PROGRAMS)
@settings(max_examples=15)
def test_law_rollback_restores_every_attribute(settings_, program, last) -> None:
    """Each rollback is exact, and afterwards all is as if the detour had never been taken."""
    check_law(settings_, program, last)


@pytest.mark.sweep
@given(**PROGRAMS)
@settings(max_examples=100)
def test_law_rollback_sweep(settings_, program, last) -> None:
    """The same law, over many programs."""
    check_law(settings_, program, last)


UNCHANGING = (
    *(sympy.Basic, symbolic_shapes.ValueRanges, symbolic_shapes.SLoc, CapturedTraceback),
    *(int, str, ShapeGuard, _DispatchCacheValidEntry, _DispatchCacheBypassEntry),
)
"""Types whose objects nobody changes."""


def never_changes(entry: Any) -> bool:
    """Whether nobody changes an object or what is in it."""
    if isinstance(entry, tuple):
        return all(map(never_changes, entry))
    return isinstance(entry, (type, *UNCHANGING))


def check_law(settings_: dict[str, Any], program: list[Any], last: list[Any]) -> None:
    """Runs a program with its detours and without."""
    went, straight = Session(**settings_), Session(**settings_)
    steps = [*PRELUDE, *program, *last, ("number", 9, 5), ("unbacked", "int"), ("produce",)]
    for session, answers, detours in ((went, a := [], True), (straight, b := [], False)):
        run_steps(session, steps, answers, detours=detours)
    assert a == b
    for name in FLAT & vars(went.env).keys():  # not every torch has each
        value = getattr(went.env, name)
        entries = value.values() if isinstance(value, dict) else value
        assert all(map(never_changes, entries)), name
    now, expected = learned(went.env), learned(straight.env)
    assert {name: now[name] for name in now if now[name] != expected.get(name)} == {}
    assert now.keys() == expected.keys()
    assert not env_watch._watches


# --- what is restored ----------------------------------------------------------------------------------


def test_all_containers_are_restored_in_place() -> None:
    """Whoever holds a dict, a list or a set of the environment sees it rolled back."""
    env: Any = make_mode().shape_env
    n = int_of(env, "n", 4)
    assert n > 3
    env.deferred_runtime_asserts[None] = []
    env._equality_graph = {n.node.expr: symbolic_shapes.OrderedSet([n.node.expr])}
    env._shape_spec_pending_assumptions.append(({n.node.expr}, n.node.expr > 1))
    env.co_fields = collections.OrderedDict(a="1", b="2")
    check = photo_and_record(env)
    cp = tfk.checkpoint(env)

    symbol = n.node.expr
    env.var_to_sources[symbol].append(LocalSource("m"))
    env.var_to_range_sloc[symbol].upper = env.var_to_range_sloc[symbol].lower = None
    env.deferred_runtime_asserts[None].append(3)
    env._equality_graph[symbol].add(3)
    env._shape_spec_pending_assumptions[0][0].clear()
    env.co_fields.move_to_end("a")
    env.unbacked_inputs.add(3)
    env.guards.clear()
    env.var_to_range[symbol] = env.var_to_range.pop(symbol)
    env.unique_ids, env.size_like = {1}, {symbol}
    env.settings = None
    env.invented = 1
    del env.counter
    env.frozen = env.runtime_asserts_frozen = env._error_on_new_guards = True
    cp.rollback()
    check()
    assert not hasattr(env, "invented")


def test_the_order_of_keys_is_restored() -> None:
    """A key that was removed and put back is where it was; so is an attribute."""
    env: Any = make_mode().shape_env
    first, _ = int_of(env, "a", 4), int_of(env, "b", 5)
    check = photo_and_record(env)
    cp = tfk.checkpoint(env)
    symbol = first.node.expr
    env.var_to_range[symbol] = env.var_to_range.pop(symbol)
    guards = env.guards
    del env.guards
    env.guards = guards
    cp.rollback()
    check()


def test_what_torch_keeps_of_dim_constraints_is_restored() -> None:
    """The object that ``produce_guards`` leaves is changed by whoever solves it."""
    session = Session()
    for action in (*PRELUDE, ("guard", "gt", 0, 0, 3), ("guard", "mod", 1, 1, 0), ("produce",)):
        session.run(action)
    assert session.env.dim_constraints is not None
    check = photo_and_record(session.env)
    cp = tfk.checkpoint(session.env)
    session.env.dim_constraints._substitutions[sympy.Symbol("s9")] = sympy.Integer(3)
    session.env.dim_constraints.add(sympy.Mod(session.pool[0].node.expr, 2) > 0)
    cp.rollback()
    check()


def test_the_cache_of_fake_tensors_is_restored() -> None:
    """Outputs that the fake tensor mode remembers of abandoned sizes are gone."""
    mode = make_mode()
    x = fake_of(mode, "x", 4, 6)
    env: Any = mode.shape_env
    with mode:
        x + 1
        cache = env.fake_tensor_cache
        then = dict(cache)
        assert then
        cp = tfk.checkpoint(env)
        fake_of(mode, "y", 7, 5) * 2
        x.sum(0)
    assert len(cache) > len(then)
    cp.rollback()
    assert env.fake_tensor_cache is cache
    assert cache == then


# --- caches of methods ------------------------------------------------------------------------------------


def all_method_caches() -> dict[str, Any]:
    """Every ``lru_cache`` inside the functions of ``ShapeEnv``, however it is wrapped."""
    found: dict[str, Any] = {}
    for name, method in vars(ShapeEnv).items():
        todo, seen = [method], set()
        while todo:
            part = todo.pop()
            if id(part) in seen:
                continue
            seen.add(id(part))
            if isinstance(part, functools._lru_cache_wrapper):
                found[name] = part
            todo.append(getattr(part, "__wrapped__", None))
            todo += [c.cell_contents for c in getattr(part, "__closure__", None) or ()]
    return found


def test_every_method_cache_is_cleared() -> None:
    """All methods of ``ShapeEnv`` that remember answers forget them at a rollback."""
    caches = all_method_caches()
    assert len(caches) >= 15
    assert {"_inner_evaluate_expr", "replace", "size_hint", "constrain_symbol_range"} <= set(caches)
    session = Session()
    for action in (*PRELUDE, ("guard", "gt", 0, 0, 3), ("check", "le", 0, 3, 4)):
        session.run(action)
    with_entries = {name for name, cache in caches.items() if cache.cache_info().currsize}
    assert {"_inner_evaluate_expr", "replace"} <= with_entries
    tfk.checkpoint(session.env).rollback()
    assert {name: cache.cache_info().currsize for name, cache in caches.items()} == dict.fromkeys(
        caches, 0
    )
    assert set(clear_method_caches(ShapeEnv)) == set(caches)


def test_a_guard_is_added_again_after_a_rollback() -> None:
    """A cached answer of the abandoned branch would be given without its guard."""
    env: Any = make_mode().shape_env
    n = int_of(env, "n", 4)
    cp = tfk.checkpoint(env)
    assert n > 3
    assert exprs(env) == [f"{n} > 3"]
    cp.rollback()
    assert exprs(env) == []
    assert n > 3
    assert exprs(env) == [f"{n} > 3"]


def test_a_runtime_assert_is_added_again_after_a_rollback() -> None:
    """So would a deferred assert be, and a range."""
    env: Any = make_mode().shape_env
    n, u = int_of(env, "n", 4), env.create_unbacked_symint()
    cp = tfk.checkpoint(env)
    for _ in range(2):
        torch._check(u <= n)
        env._constrain_range_for_size(u.node.expr)
        assert [str(a.expr) for group in env.deferred_runtime_asserts.values() for a in group] == [
            f"u0 <= {n}"
        ]
        assert str(env.var_to_range[u.node.expr].lower) == "0"
        assert env.size_like
        cp.rollback()
        assert env.var_to_range[u.node.expr].lower < 0


def test_version_numbers_of_the_abandoned_branch_do_not_come_back() -> None:
    """Caches compare version numbers: one that comes twice would give the other state's answer."""
    env: Any = make_mode().shape_env
    a, b, c = (int_of(env, name, 4) for name in "abc")
    cp = tfk.checkpoint(env)
    then = env._version_counter, env._replacements_version_counter
    assert a == b
    abandoned = env._version_counter, env._replacements_version_counter
    assert abandoned == (1, 1)
    cp.rollback()
    assert (env._version_counter, env._replacements_version_counter) == then == (0, 0)
    assert b == c
    assert (env._version_counter, env._replacements_version_counter) == (2, 2)
    cp.rollback()
    assert a == c
    assert (env._version_counter, env._replacements_version_counter) == (3, 3)


def test_versions_leap_over_those_of_dropped_checkpoints() -> None:
    """A later checkpoint knows what an earlier one had used up."""
    env: Any = make_mode().shape_env
    a, b, c = (int_of(env, name, 4) for name in "abc")
    cp = tfk.checkpoint(env)
    assert a == b
    assert a == c
    cp.rollback()
    del cp
    cp = tfk.checkpoint(env)
    cp.rollback()
    assert env._replacements_version_counter == 0
    assert a == b
    assert env._replacements_version_counter == 3


@pytest.mark.parametrize(
    "clone",
    [copy.copy, copy.deepcopy, lambda n: pickle.loads(pickle.dumps(n))],  # noqa: S301
)
def test_a_leap_is_an_int(clone: Any) -> None:
    """It is equal to its number, also copied, and counts on where it should."""
    leap = clone(Leap(3, 8))
    assert leap == 3
    assert hash(leap) == hash(3)
    assert (repr(leap), f"{leap}") == ("3", "3")
    assert (leap + 1, leap + 2, leap + 0, leap - 1) == (8, 9, 3, 2)
    assert type(leap + 1) is int


def test_a_rolled_back_environment_can_be_written_and_copied() -> None:
    """Its record has plain numbers, and ``deepcopy`` keeps the distance to used ones."""
    env: Any = make_mode().shape_env
    a, b = int_of(env, "a", 4), int_of(env, "b", 4)
    cp = tfk.checkpoint(env)
    assert a == b
    cp.rollback()
    record = tfk.snapshot(env)
    assert type(record.version_counter) is type(record.replacements_version_counter) is int
    assert tfk.loads(tfk.dumps(record)) == record
    assert copy.deepcopy(env)._replacements_version_counter + 1 == 2


# --- what a SymNode remembers ---------------------------------------------------------------------------


def test_the_expression_that_a_node_remembers_is_forgotten() -> None:
    """``SymNode.expr`` is remembered by version; the abandoned branch's must not be current again."""
    env: Any = make_mode().shape_env
    a, b, c = (int_of(env, name, 4) for name in "abc")
    cp = tfk.checkpoint(env)
    assert a == b
    abandoned = {str(size) for size in (a, b, c)}
    assert len(abandoned) == 2
    cp.rollback()
    assert len({str(size) for size in (a, b, c)}) == 3
    assert b == c
    assert [size.node.expr for size in (a, b, c)] == [
        env.replace(size.node._expr) for size in (a, b, c)
    ]
    assert str(a) != str(b)


def test_what_a_node_remembers_of_an_unversioned_change_is_forgotten() -> None:
    """``constrain_unify`` replaces a symbol without a new version; at version 0 nothing is kept."""
    env: Any = make_mode().shape_env
    a, b, c, d = (int_of(env, name, 4) for name in "abcd")
    assert c == d
    sum_ = a + b
    cp = tfk.checkpoint(env)
    symbolic_shapes.constrain_unify(a, b)
    clear_method_caches(ShapeEnv)  # as another environment's version does
    assert len(sum_.node.expr.free_symbols) == 1
    cp.rollback()
    assert len(sum_.node.expr.free_symbols) == 2


def test_nodes_made_since_over_older_symbols_stay_usable() -> None:
    """Only what mentions a symbol that is gone is gone."""
    env: Any = make_mode().shape_env
    a = int_of(env, "a", 4)
    cp = tfk.checkpoint(env)
    double = a * 2
    tensor = torch.empty(0)
    cp.rollback()
    del tensor
    assert double == a + a
    assert double > 7
    assert exprs(env) == [f"2*{a} > 7"]


# --- abandoned symbols --------------------------------------------------------------------------------------


USES: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda gone, old: gone + old,
    "add to": lambda gone, old: old + gone,
    "constant": lambda gone, _: 1 + gone,
    "multiply": lambda gone, old: old * gone,
    "compare": lambda gone, old: gone == old,
    "compare with": lambda gone, old: old < gone,
    "max": lambda gone, old: torch.sym_max(old, gone),
    "negate": lambda gone, _: -gone,
    "bool": lambda gone, _: bool(gone),
    "int": lambda gone, _: int(gone),
    "float": lambda gone, _: torch.sym_float(gone),
    "index": lambda gone, _: range(9)[gone],
    "check": lambda gone, _: torch._check(gone > 2),
    "hint": lambda gone, _: gone.node.hint,
    "expression": lambda gone, _: gone.node.expr,
    "guarded": lambda gone, _: symbolic_shapes.guard_or_false(gone == 4),
    "known": lambda gone, _: symbolic_shapes.statically_known_true(gone == 4),
    "size-like": lambda gone, _: symbolic_shapes._constrain_range_for_size(gone),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_of_an_abandoned_symbol_is_an_error(use: str) -> None:
    """Though the next symbol gets the same name, so that torch would take it for that one."""
    env: Any = make_mode().shape_env
    old = int_of(env, "a", 4)
    cp = tfk.checkpoint(env)
    gone = int_of(env, "b", 5)
    cp.rollback()
    again = int_of(env, "b", 9)
    assert again.node.expr == gone.node._expr
    with pytest.raises(ShapeEnvError) as caught:
        USES[use](gone, old)
    assert str(caught.value) == (
        f"the symbol {again} was made after the checkpoint, and the ShapeEnv was rolled back. "
        "Make the tensor or the size again"
    )
    assert exprs(env) == []


def test_an_abandoned_expression_names_all_its_symbols() -> None:
    """Two symbols are two names; an older one among them is none."""
    env: Any = make_mode().shape_env
    old = int_of(env, "a", 4)
    cp = tfk.checkpoint(env)
    first, second = env.create_unbacked_symint(), env.create_unbacked_symint()
    sum_ = first + second + old
    cp.rollback()
    with pytest.raises(ShapeEnvError, match=r"^u0, u1 were made after the checkpoint, and"):
        sum_ + 1


def test_an_abandoned_size_can_be_printed() -> None:
    """A debugger shows what it was."""
    mode = make_mode()
    cp = tfk.checkpoint(mode.shape_env)
    fake = fake_of(mode, "x", 4)
    float_, bool_ = (
        mode.shape_env.create_unbacked_symfloat(),
        mode.shape_env.create_unbacked_symbool(),
    )
    text = str(fake.shape[0])
    cp.rollback()
    assert str(fake.shape[0]) == repr(fake.shape[0]) == f"{text} (rolled back)"
    assert str(fake.shape) == f"torch.Size([{text} (rolled back)])"
    assert repr(fake) == f"FakeTensor(..., device='meta', size=({text} (rolled back),))"
    assert (str(float_), str(bool_)) == ("zuf0 (rolled back)", "Eq(u0, 1) (rolled back)")
    assert "shape_env=<the symbol" in repr(fake.shape[0].node)
    copy.copy(fake.shape[0].node.shape_env)


@pytest.mark.parametrize(
    "use",
    [
        lambda gone, old: gone + 1,
        lambda gone, old: old + gone,
        lambda gone, old: gone.view(-1),
        lambda gone, old: gone.sum().item(),
        lambda gone, old: torch.ops.aten.nonzero(gone),
        lambda gone, old: gone.numel() > 4,
        lambda gone, old: gone.is_contiguous(),
    ],
)
def test_an_abandoned_tensor_is_an_error_to_use(use: Any) -> None:
    """A fake tensor of abandoned sizes says so; one of older sizes goes on."""
    mode = make_mode()
    old = fake_of(mode, "x", 4, 6)
    cp = tfk.checkpoint(mode.shape_env)
    gone = fake_of(mode, "y", 4, 6)
    fine = old * 2
    cp.rollback()
    with pytest.raises(ShapeEnvError, match=GONE), mode:
        use(gone, old)
    with mode:
        assert (fine + old).shape == old.shape


def test_other_environments_are_not_touched() -> None:
    """Symbols of another environment stay, though they have the same names."""
    env, other = (make_mode().shape_env for _ in range(2))
    old = int_of(other, "a", 4)
    cp = tfk.checkpoint(env)
    made = int_of(other, "b", 4)
    cp.rollback()
    assert old == made
    assert len(exprs(other)) == 1


# --- what others remember --------------------------------------------------------------------------------


def stateful(name: str, ndim: int) -> StatefulSymbolicContext:
    """A context that remembers the symbols of its tensor."""
    return StatefulSymbolicContext(
        dynamic_sizes=[DYNAMIC] * ndim, tensor_source=LocalSource(name), view_base_context=None
    )


def fakes_by(way: str, mode: FakeTensorMode, real: torch.Tensor, name: str, context: Any) -> Any:
    """A fake tensor made by torch's converter or by ours."""
    if way == "torch":
        return mode.from_tensor(real, source=LocalSource(name), symbolic_context=context)
    desc = tfk.describe_tensor(real)
    converter = tfk.MetaConverter(mode)
    return converter.from_desc(desc, source=LocalSource(name), symbolic_context=context)


@pytest.mark.parametrize("way", ["torch", "ours"])
def test_contexts_forget_the_symbols_that_they_remember(way: str) -> None:
    """A stateful context would hand out an abandoned symbol that the environment does not know."""
    env: Any = make_mode().shape_env
    real = torch.empty(4, 6)
    known, fresh = stateful("x", 2), stateful("y", 2)
    fakes_by(way, FakeTensorMode(shape_env=env), real, "x", known)
    tables = [dict(c.shape_env_to_source_to_symbol_cache.get(id(env), {})) for c in (known, fresh)]
    assert [len(table) for table in tables] == [2, 0]
    cp = tfk.checkpoint(env)
    table = known.shape_env_to_source_to_symbol_cache[id(env)]
    table_then = dict(table)
    for _ in range(2):
        made = fakes_by(way, FakeTensorMode(shape_env=env), real, "y", fresh)
        env.create_symbol(5, LocalSource("z"), DYNAMIC, symbolic_context=known)
        cp.rollback()
        assert fresh.shape_env_to_source_to_symbol_cache == {}
        assert known.shape_env_to_source_to_symbol_cache[id(env)] is table
        assert table == table_then
        assert not env.var_to_range.keys() & made.shape[0].node._expr.free_symbols
    again = fakes_by(way, FakeTensorMode(shape_env=env), real, "y", fresh)
    assert again.shape[0].node.expr in env.var_to_range
    assert again.shape[0] > 3


def test_memos_of_surviving_tensors_are_restored() -> None:
    """After a rollback ``nonzero`` and ``item`` allocate anew, unless they had before it."""
    mode = make_mode()
    env: Any = mode.shape_env
    with mode:
        x, y = torch.empty(4), torch.empty(4)
        i, j = (torch.empty((), dtype=torch.int64) for _ in range(2))
        torch.nonzero(y)
        j.item()
        memos = [dict(vars(fake)) for fake in (x, y, i, j)]
        cp = tfk.checkpoint(env)
        for _ in range(2):
            sizes = [torch.nonzero(x).shape[0], torch.unique(x).shape[0], i.item()]
            assert [str(size) for size in sizes] == ["u2", "u3", "u4"]
            y.add_(1)
            assert str(torch.nonzero(y).shape[0]) == "u5"
            assert str(j.item()) == "u1"
            cp.rollback()
            assert [dict(vars(fake)) for fake in (x, y, i, j)] == memos
            assert env.unbacked_symint_counter == 2
        assert i.item().node.expr in env.var_to_range
        assert str(i.item()) == "u2"


def test_nested_ints_of_surviving_tensors_are_restored() -> None:
    """The nested int of offsets that was made since is forgotten."""
    mode = make_mode()
    with mode:
        offsets = torch.empty(4, dtype=torch.int64)
    cp = tfk.checkpoint(mode.shape_env)
    with mode:
        offsets.get_nested_int()
    assert offsets.nested_int_memo is not None
    cp.rollback()
    assert offsets.nested_int_memo is None


def test_converters_forget_tensors_and_storages_made_since() -> None:
    """The same real tensor gets a new fake one, whose sources the environment knows."""
    mode = make_mode()
    env: Any = mode.shape_env
    reals = {name: torch.empty(4, 6) for name in "abcd"}
    source = {name: LocalSource(name) for name in reals}
    old = mode.from_tensor(reals["a"], source=source["a"])
    cp = tfk.checkpoint(env)
    assert len(env.var_to_sources[old.shape[0].node.expr]) == 1
    gone = mode.from_tensor(reals["b"], source=source["b"])
    view = mode.from_tensor(reals["c"].view(24), source=source["c"])
    same = mode.from_tensor(reals["a"].T, source=source["d"])
    assert same.untyped_storage()._cdata == old.untyped_storage()._cdata
    sources = env.var_to_sources[old.shape[0].node.expr]
    assert len(sources) > 2
    cp.rollback()
    memo = mode.fake_tensor_converter.meta_converter
    assert [*memo.tensor_memo.values()] == [old]
    assert len(memo.storage_memo) == 1
    assert mode.from_tensor(reals["a"], source=source["a"]) is old
    again = mode.from_tensor(reals["b"], source=source["b"])
    assert again is not gone
    assert [s.name for s in sources] == ["L['a'].size()[0]", "L['b'].size()[0]"]
    assert again.untyped_storage().nbytes() == old.untyped_storage().nbytes()
    del view


def test_layouts_that_were_asked_for_since_are_asked_for_again() -> None:
    """C++ remembers that a tensor is contiguous; the guard that says so was rolled back."""
    mode = make_mode()
    env: Any = mode.shape_env
    x = fake_of(mode, "x", 4, 6)
    frozen = (tuple(map(str, x.shape)), tuple(map(str, x.stride())), x._version)
    alias = x.detach()
    assert exprs(env) == []
    for _ in range(2):
        cp = tfk.checkpoint(env)
        check = photo_and_record(env)
        assert x.is_contiguous()
        assert alias.is_contiguous()
        assert len(exprs(env)) == 1
        cp.rollback()
        check()
        assert (tuple(map(str, x.shape)), tuple(map(str, x.stride())), x._version) == frozen
    assert x.is_contiguous()
    assert len(exprs(env)) == 1


def test_abandoned_tensors_do_not_hinder_a_later_rollback() -> None:
    """Their layouts are nobody's any more."""
    mode = make_mode()
    x = fake_of(mode, "x", 4, 6)
    cp = tfk.checkpoint(mode.shape_env)
    gone = fake_of(mode, "y", 7, 5)
    cp.rollback()
    assert x.is_contiguous()
    cp.rollback()
    assert exprs(mode.shape_env) == []
    assert "rolled back" in str(gone.shape)


def test_forgetting_a_layout_makes_no_size_a_constant() -> None:
    """What a size is known to be at an inner checkpoint, an outer one may take back."""
    mode = make_mode()
    env: Any = mode.shape_env
    x = fake_of(mode, "x", 4, 6)
    rows, columns, step = (str(part) for part in (*x.shape, x.stride()[0]))
    outer = tfk.checkpoint(env)
    assert x.shape[1] == 6
    inner = tfk.checkpoint(env)
    assert x.is_contiguous()
    assert exprs(env) == [f"Eq({columns}, 6)", f"Eq({step}, 6)"]
    inner.rollback()
    assert x.is_contiguous()
    assert exprs(env) == [f"Eq({columns}, 6)", f"Eq({step}, 6)"]
    outer.rollback()
    assert (str(x.shape), str(x.stride())) == (f"torch.Size([{rows}, {columns}])", f"({step}, 1)")
    assert x.is_contiguous()
    assert exprs(env) == [f"Eq({step}, {columns})"]


@pytest.mark.parametrize(
    "make",
    [
        lambda mode: torch.empty(4, 6).nonzero(),
        lambda mode: fake_of(mode, "q", 5, 7).t(),
        lambda mode: fake_of(mode, "q", 5, 7)[1:, 2:],
        lambda mode: fake_of(mode, "q", 5, 7).requires_grad_(),
        lambda mode: fake_of(mode, "q", 5, 7).new_empty(()),
        lambda mode: torch.empty(mode.shape_env.create_unbacked_symint(), 3).as_strided((2,), (2,)),
        lambda mode: fake_of(mode, "q", 5, 7).expand(3, -1, -1),
    ],
)
def test_forgetting_a_layout_asks_nothing_and_changes_nothing(make: Any) -> None:
    """Sizes, strides, offset, version and gradient stay, and the environment learns nothing."""
    mode = make_mode()
    env: Any = mode.shape_env
    with mode:
        made = make(mode)
    check = photo_and_record(env)
    cp = tfk.checkpoint(env)

    def facts() -> list[str]:
        layout = made.shape, made.stride(), made.storage_offset(), made._version
        return [str(part) for part in (*layout, made.requires_grad, made.is_leaf, made._is_view())]

    before = facts()
    x = fake_of(mode, "x", 4, 6)
    x.is_contiguous()
    cp.rollback()
    check()
    assert facts() == before


# --- nesting and ends -----------------------------------------------------------------------------------


def test_checkpoints_nest() -> None:
    """An inner one may be rolled back or committed; the outer one rolls back all of it."""
    env: Any = make_mode().shape_env
    n = int_of(env, "n", 9)
    outer = tfk.checkpoint(env)
    assert n > 3
    inner = tfk.checkpoint(env)
    assert n > 4
    inner.rollback()
    assert exprs(env) == [f"{n} > 3"]
    assert n > 5
    inner.commit()
    assert exprs(env) == [f"{n} > 3", f"{n} > 5"]
    outer.rollback()
    assert exprs(env) == []
    assert n > 6
    outer.rollback()
    assert exprs(env) == []


def test_an_outer_rollback_ends_the_inner_checkpoints() -> None:
    """There is nothing left to return to."""
    env: Any = make_mode().shape_env
    outer, inner = tfk.checkpoint(env), tfk.checkpoint(env)
    outer.rollback()
    with pytest.raises(ShapeEnvError) as caught:
        inner.rollback()
    assert str(caught.value) == (
        "this checkpoint has ended: an older checkpoint of the same ShapeEnv was rolled back. "
        "Make a new checkpoint where you want to return to"
    )
    assert repr(inner) == (
        "<Checkpoint, ended: an older checkpoint of the same ShapeEnv was rolled back>"
    )
    inner.commit()
    outer.rollback()
    assert repr(outer) == "<Checkpoint>"


def test_an_inner_checkpoint_outlives_its_outer_one() -> None:
    """Committing or dropping the older one leaves the younger one's state to return to."""
    mode = make_mode()
    env: Any = mode.shape_env
    n = int_of(env, "n", 9)
    with mode:
        x = torch.empty(3)
        outer = tfk.checkpoint(env)
        torch.nonzero(x)
        memo = x._nonzero_memo
        assert n > 3
        inner = tfk.checkpoint(env)
        assert n > 4
        x.add_(1)
        torch.nonzero(x)
        outer.commit()
        inner.rollback()
        assert exprs(env) == [f"{n} > 3"]
        assert x._nonzero_memo is memo
        assert str(memo + 1) == "u0 + 1"
    with pytest.raises(ShapeEnvError, match="ended: it was committed"):
        outer.rollback()


def test_with_keeps_what_a_block_does() -> None:
    """Without an exception the work stays; the checkpoint ends with the block."""
    env: Any = make_mode().shape_env
    n = int_of(env, "n", 9)
    with tfk.checkpoint(env) as cp:
        assert n > 3
        cp.rollback()
        assert n > 4
    assert exprs(env) == [f"{n} > 4"]
    with pytest.raises(ShapeEnvError, match="ended: its block was left"):
        cp.rollback()


def test_with_rolls_back_on_an_exception() -> None:
    """The exception goes on; also where an older checkpoint has been rolled back inside."""
    env: Any = make_mode().shape_env
    n = int_of(env, "n", 9)

    def block(work: Callable[[], Any], limit: int) -> None:
        with tfk.checkpoint(env):
            work()
            assert n > limit
            raise KeyError

    with pytest.raises(KeyError):
        block(lambda: None, 3)
    assert exprs(env) == []
    outer = tfk.checkpoint(env)
    with pytest.raises(KeyError):
        block(outer.rollback, 4)
    assert exprs(env) == [f"{n} > 4"]


@pytest.mark.parametrize("end", ["drop", "commit", "rollback"])
def test_nothing_is_left_of_a_checkpoint(end: str) -> None:
    """Torch's methods are its own again and what was saved is free, without garbage collection."""
    gc.collect()  # checkpoints of other tests, in the tracebacks of their errors
    own = [SymNode.__init__, ShapeEnv.create_symbol, SymNode.guard_bool]
    mode = make_mode()
    gc.disable()
    try:
        cp = tfk.checkpoint(mode.shape_env)
        assert SymNode.__init__ is not own[0]
        fake = fake_of(mode, "x", 4, 6)
        fake.is_contiguous()
        int_of(mode.shape_env, "n", 4)
        refs = [weakref.ref(cp), weakref.ref(cp._state), weakref.ref(cp._line.watch)]
        if end == "rollback":
            cp.rollback()
        elif end == "commit":
            cp.commit()
            assert [ref() for ref in refs[1:]] == [None, None]
        del cp
        assert [ref() for ref in refs] == [None] * 3
    finally:
        gc.enable()
    assert [SymNode.__init__, ShapeEnv.create_symbol, SymNode.guard_bool] == own
    assert not env_watch._watches


def test_notes_that_nobody_needs_are_dropped() -> None:
    """The notes of an ended checkpoint go when the next one is made."""
    mode = make_mode()
    env: Any = mode.shape_env
    with mode:
        x = torch.empty(3)
        outer = tfk.checkpoint(env)
        torch.nonzero(x)
        inner = tfk.checkpoint(env)
        x.add_(1)
        torch.nonzero(x)
        watch = inner._line.watch
        assert len(watch._undo) == 4
        outer.commit()
        assert len(watch._undo) == 2
        inner.rollback()
        assert len(watch._undo) == 0


def test_guards_name_the_line_that_asks_for_them() -> None:
    """The wrappers of a living checkpoint are not taken for it."""
    mode = make_mode()
    x = fake_of(mode, "x", 4, 6)
    cp = tfk.checkpoint(mode.shape_env)
    assert x.shape[0] > 3
    assert x.is_contiguous()
    y = fake_of(mode, "y", 7)
    env: Any = mode.shape_env
    slocs = [guard.sloc for guard in env.guards]
    slocs += [env.var_to_range_sloc[y.shape[0].node.expr].upper]
    assert len(slocs) == 3
    for sloc in slocs:
        assert "env_watch" not in str(sloc.framework_loc)
    assert all("test_checkpoints" in str(sloc.framework_loc) for sloc in slocs[:2])
    cp.rollback()


def test_what_is_no_environment_is_refused() -> None:
    """The error names what was found."""
    with pytest.raises(ShapeEnvError) as caught:
        tfk.checkpoint(make_mode())
    assert str(caught.value) == ("not a shape environment; expected ShapeEnv; found FakeTensorMode")


# --- event recording and translation validation ---------------------------------------------------------------


def test_a_recorded_call_cannot_be_interrupted() -> None:
    """A rollback in the middle of a recorded call would take away its event."""
    env: Any = ShapeEnv(should_record_events=True)
    cp = tfk.checkpoint(env)
    with env._recording():
        with pytest.raises(ShapeEnvError, match="is recording a call"):
            cp.rollback()
        with pytest.raises(ShapeEnvError, match="is recording a call"):
            tfk.checkpoint(env)


def validated() -> Session:
    """A session whose environment is validated by z3 and checked against its events."""
    session = Session()
    for action in (
        ("number", 0, 4),
        ("number", 1, 6),
        ("unbacked", "int"),
        ("guard", "gt", 0, 0, 3),
        ("check", "le", 2, 0, 6),
    ):
        session.run(action)
    assert session.env._translation_validation_enabled
    return session


def test_validation_and_events_are_rolled_back() -> None:
    """The graph, its names, z3's formulas and the events; validation then passes without them."""
    with shapes_config.patch(
        translation_validation=True,
        check_shape_env_recorded_events=True,
        translation_validation_timeout=1000,  # ms
    ):
        session, straight = validated(), validated()
        env = session.env
        check = photo_and_record(env)
        events, names = list(env.events), dict(vars(env.graph._graph_namespace))
        names = copy.copy({name: copy.copy(value) for name, value in names.items()})
        cp = tfk.checkpoint(env)
        pool = list(session.pool)
        for _ in range(2):
            for action in (
                ("guard", "gt", 1, 1, 2),
                ("arithmetic", 0, 1, 2),
                ("number", 5, 8),
                ("guard", "is", 1, 1, 6),
            ):
                session.run(action)
            assert len(env.events) > len(events)
            assert len(env.validator._target_exprs) > len(straight.env.validator._target_exprs)
            assert len(env.graph.nodes) > len(straight.env.graph.nodes)
            env.graph.inserting_before(next(iter(env.graph.nodes)))
            env.graph.output_node().meta["added"] = 1
            cp.rollback()
            check()
            assert env.events == events
            assert dict(vars(env.graph._graph_namespace)) == names
            session.pool = list(pool)
            env.graph.lint()
        for each in (session, straight):
            each.run(("guard", "gt", 0, 0, 2))
            each.run(("guard", "mod", 1, 1, 0))
        assert str(env.graph) == str(straight.env.graph)
        assert list(env.name_to_node) == list(straight.env.name_to_node)
        assert session.run(("produce",)) == straight.run(("produce",))


def test_a_node_whose_fx_node_is_rolled_back_is_an_error_to_use() -> None:
    """Validation needs the FX node; one of the same expression that was there before is fine."""
    with shapes_config.patch(translation_validation=True):
        session = validated()
        n = session.pool[0]
        before = n * 3
        cp = tfk.checkpoint(session.env)
        made, same = n * 2, n * 3
        cp.rollback()
        with pytest.raises(ShapeEnvError) as caught:
            made + 1
        assert str(caught.value) == (
            "an FX node of the translation validation was made after the checkpoint, and the "
            "ShapeEnv was rolled back. Make the tensor or the size again"
        )
        assert before + same > 3


def test_a_validation_graph_that_lost_nodes_is_refused() -> None:
    """An erased FX node cannot be brought back; nothing is rolled back then."""
    with shapes_config.patch(translation_validation=True):
        session = validated()
        last = [fx_node for fx_node in session.env.graph.nodes if not fx_node.users][-2]
        cp = tfk.checkpoint(session.env)
        session.run(("guard", "gt", 1, 1, 2))
        session.env.graph.erase_node(last)
        check = photo_and_record(session.env)
        with pytest.raises(ShapeEnvError) as caught:
            cp.rollback()
        assert str(caught.value) == (
            "cannot roll back the graph of the translation validation; expected the FX nodes that "
            f"it had at the checkpoint, in their order; found FX node {last.name} erased"
        )
        check()


# --- the hole that this closes ------------------------------------------------------------------------------


def test_speculation_leaves_no_guards() -> None:
    """A branch is traced, given up and another one traced: only the other one's guards remain."""

    def first(x: Any, y: Any) -> Any:
        if x.shape[0] == y.shape[0] and x.shape[1] % 2 == 0:
            return torch.nonzero(x.reshape(-1, 2) + 1)
        return x

    def second(x: Any, y: Any) -> Any:
        return x + 1 if x.shape[0] > 3 else y

    def guards(speculate: bool) -> list[str]:
        mode = make_mode()
        env: Any = mode.shape_env
        x, y = fake_of(mode, "x", 4, 6), fake_of(mode, "y", 4, 6)
        if speculate:
            with mode, tfk.checkpoint(env) as cp:
                first(x, y)
                assert len(env.guards) > 1
                cp.rollback()
        with mode:
            second(x, y)
        sources = [LocalSource("x"), LocalSource("y")]
        return env.produce_guards_verbose([x, y], sources)[0].exprs

    straight = guards(speculate=False)
    assert guards(speculate=True) == straight
    assert any("3 < L['x'].size()[0]" in guard or "4 <= L['x']" in guard for guard in straight)


def test_a_converter_makes_the_symbols_of_a_record_again() -> None:
    """Two records over one symbol: the second one, converted after a rollback, gets a new symbol."""
    other: Any = make_mode()
    x = fake_of(other, "x", 4, 6)
    describer = tfk.MetaTensorDescriber()
    first, second = describer.describe_tensor(x), describer.describe_tensor(x + 1)
    mode = make_mode()
    env: Any = mode.shape_env
    converter = tfk.MetaConverter(mode)
    with tfk.checkpoint(env) as cp:
        converter.from_desc(first, source=LocalSource("x"))
        cp.rollback()
        fake_of(mode, "y", 9, 9)
        made = converter.from_desc(second, source=LocalSource("z"))
        sizes = [size.node.expr for size in made.size()]
        assert [env.backed_var_to_val[symbol] for symbol in sizes] == [4, 6]
        assert [env.var_to_sources[symbol][0].name for symbol in sizes] == [
            "L['z'].size()[0]",
            "L['z'].size()[1]",
        ]
