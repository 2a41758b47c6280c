"""``snapshot`` and ``restore`` of a ``ShapeEnv``: every attribute, specializations, compiled environments."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import sympy
import torch
from assert_frames import CONFIG
from env_attributes import CARRIED, assert_same_attributes, comparable
from full_env import DUCK, DYNAMIC, World, full_env, guards_of, used
from hypothesis import given, settings
from hypothesis import strategies as st
from observe import Run, env_of_frame
from processes import piped
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config as shapes_config
from torch.fx.experimental.symbolic_shapes import (
    ShapeEnv,
    ShapeEnvSettings,
    StatelessSymbolicContext,
    free_unbacked_symbols,
)

from torch_fakeify.compat.attribute_policies import SHAPE_ENV_ATTRIBUTES as ATTRIBUTES
from torch_fakeify.compat.census import attributes_in_source
from torch_fakeify.encoding.exprs import encode_expr
from torch_fakeify.errors import ShapeEnvError
from torch_fakeify.records.shape_env import (
    IMPLIED_KEYS,
    OrderDesc,
    ShapeEnvDesc,
    ShapeEnvSettingsDesc,
    SymbolDesc,
)
from torch_fakeify.records.tensor import (
    SymbolNode,
)
from torch_fakeify.serialization.document import dumps, loads
from torch_fakeify.shape_env.restoring import restore
from torch_fakeify.shape_env.snapshot import snapshot

if TYPE_CHECKING:
    from collections.abc import Callable


def dump(env: ShapeEnv) -> dict[str, str]:
    """Return every attribute of an environment as text, to compare it later."""
    return {name: repr(value) for name, value in vars(env).items()}


def check_laws(env: ShapeEnv) -> ShapeEnv:
    """Check law 4 for one environment, in memory and serialized; return the restored one."""
    before = dump(env)
    record = snapshot(env)
    assert dump(env) == before
    restored = restore(record)
    assert restored is not env
    assert snapshot(restored) == record
    assert loads(dumps(record)) == record
    return restored


# --- programs: what happens to an environment -------------------------------------------------------


KINDS = ("gt", "le", "eq", "is", "mod", "product", "floor", "max")


CONDITIONS = (st.sampled_from(KINDS), st.integers(0, 9), st.integers(0, 9), st.integers(-3, 12))


NAMES = st.sampled_from([f"x{i}" for i in range(40)])


ACTIONS = st.one_of(
    st.tuples(
        st.just("symbol"), NAMES, st.integers(2, 9) | st.just(1), st.sampled_from([DYNAMIC, DUCK])
    ),
    st.tuples(
        st.just("tensor"),
        NAMES,
        st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple),
        st.sampled_from([DYNAMIC, DUCK]),
    ),
    st.tuples(st.just("unspecified_float"), NAMES, st.floats(-4, 4)),
    st.tuples(st.just("unbacked"), st.sampled_from(["int", "float", "bool"])),
    st.tuples(st.just("size_like"), st.integers(0, 9)),
    st.tuples(st.sampled_from(["guard", "guard", "check"]), *CONDITIONS),
    st.tuples(st.sampled_from(["guard", "check", "check"]), *CONDITIONS),
)


PRELUDE = [
    ("symbol", "a", 4, DYNAMIC),
    ("symbol", "b", 4, DYNAMIC),
    ("tensor", "x", (4, 6), DUCK),
    ("unbacked", "int"),
    ("unbacked", "int"),
    ("size_like", 5),
]


PROGRAMS_OF_ACTIONS = st.tuples(
    st.sampled_from([PRELUDE, []]), st.lists(ACTIONS, min_size=1, max_size=14)
).map(lambda parts: parts[0] + parts[1])


PROBES = ACTIONS | st.tuples(st.just("simplify"), *CONDITIONS)


@given(
    settings_=st.fixed_dictionaries(
        {"specialize_zero_one": st.booleans(), "duck_shape": st.booleans()}
    ),
    program=PROGRAMS_OF_ACTIONS,
    probes=st.lists(PROBES, max_size=8),
)
@settings(deadline=None, max_examples=70)
def test_law_restored_environment_is_and_behaves_the_same(settings_, program, probes) -> None:
    """``snapshot(restore(s)) == s``, and later questions have the same answers and effects."""
    world = World(ShapeEnv(**settings_))
    for action in program:
        world.run(action)
    restored = check_laws(world.env)
    world.env.check_equal(restored)
    assert_same_attributes(world.env, restored)

    other = World(restored, list(world.pool))
    other.inputs = list(world.inputs)
    for probe in (
        *probes,
        ("symbol", "fresh", 5, DUCK),
        ("unbacked", "int"),
        ("unbacked", "float"),
    ):
        assert other.run(probe) == world.run(probe), probe
    world.env.check_equal(restored)
    assert_same_attributes(world.env, restored)
    assert guards_of(other) == guards_of(world)


# --- every attribute --------------------------------------------------------------------------------


def observed_attributes() -> set[str]:
    """Return the attributes of environments in every mode that torch has."""
    plain, events = used(ShapeEnv()), used(ShapeEnv(should_record_events=True))
    found = set(vars(ShapeEnv())) | set(vars(plain)) | set(vars(events))
    with shapes_config.patch(translation_validation=True):
        found |= set(vars(ShapeEnv()))
    return found


def test_every_attribute_of_a_shape_env_is_classified() -> None:
    """The table has the attributes of torch's environments in every mode."""
    found = observed_attributes()
    assert found <= set(ATTRIBUTES)
    assert {name for name, known in ATTRIBUTES.items() if known.everywhere} <= found
    assert attributes_in_source(ShapeEnv) <= set(ATTRIBUTES)


def test_every_setting_is_recorded() -> None:
    """The record of the settings has torch's fields."""
    fields = tuple(field.name for field in dataclasses.fields(ShapeEnvSettings))
    assert ShapeEnvSettingsDesc.__struct_fields__ == fields


def test_the_table_and_the_records_have_the_same_fields() -> None:
    """Each recorded attribute names fields that exist, and every field of a record is named."""
    named: set[str] = set()
    for attribute in ATTRIBUTES.values():
        if attribute.how == "carried":
            named |= set(attribute.why.split(", "))
    env_fields = set(ShapeEnvDesc.__struct_fields__) - {"symbols", "orders"}
    symbol_fields = {f"symbols.{f}" for f in SymbolDesc.__struct_fields__}
    assert named == env_fields | (symbol_fields - {"symbols.name", "symbols.assumptions"})


def test_every_table_of_symbols_has_implied_keys() -> None:
    """Default keys are defined for every table that a recorded order may name."""
    tables = set(
        msgspec.json.schema(OrderDesc)["$defs"]["OrderDesc"]["properties"]["table"]["enum"]
    )
    assert tables == {*IMPLIED_KEYS, "deferred_runtime_asserts"}


def test_raggedness_is_restored() -> None:
    """The nested int of a symbol finds that symbol, as in the original."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    first = mode.create_symbolic_nested_int(nt_tensor_id=7)
    restored = restore(snapshot(env))
    again = FakeTensorMode(shape_env=restored)
    assert again.create_symbolic_nested_int(nt_tensor_id=7).node.expr == first.node.expr
    assert again.create_symbolic_nested_int(nt_tensor_id=8).node.expr != first.node.expr
    assert again.nt_tensor_id_counter > 7


@pytest.mark.parametrize("name", CARRIED)
def test_each_recorded_attribute_is_restored(name: str) -> None:
    """In an environment where it differs from its default, each attribute is equal, in order."""
    env = full_env()
    default = comparable(name, getattr(ShapeEnv(), name))
    value = comparable(name, getattr(env, name))
    assert value != default, "the test's environment does not exercise the attribute"
    restored = getattr(check_laws(env), name)
    assert comparable(name, restored) == value
    assert type(restored) is type(getattr(env, name))


def test_a_restored_environment_has_torchs_attributes() -> None:
    """A restored environment has exactly the attributes of torch's own."""
    assert set(vars(restore(snapshot(ShapeEnv())))) == set(vars(ShapeEnv()))


def test_event_recording_and_validation_are_off_after_restore() -> None:
    """A restored environment has no history to check, under any configuration."""
    with shapes_config.patch(translation_validation=True):
        env = used(ShapeEnv())
        record = snapshot(env)
        restored = restore(record)
        assert not restored._translation_validation_enabled
        assert not restored.should_record_events
        assert not hasattr(restored, "validator")
        world = World(restored, [env.source_to_var["L['x'].size()[0]"]])
        assert world.run(("guard", "gt", 0, 0, 2)) == "True"
        assert world.run(("symbol", "new", 9, DUCK)).startswith("s")
    assert snapshot(restore(record)) == record


# --- specializations --------------------------------------------------------------------------------


def test_specializations_are_restored() -> None:
    """A condition to specialize on gives the same facts under torch's own patch."""
    env = ShapeEnv()
    context = StatelessSymbolicContext(
        dynamic_sizes=[DYNAMIC], specialize_on=[[lambda n: n % 8 == 0, lambda n: n == 16]]
    )
    mode = FakeTensorMode(shape_env=env)
    mode.from_tensor(torch.empty(16), source=LocalSource("x"), symbolic_context=context)
    restored = check_laws(env)
    symbol = env.source_to_var["L['x'].size()[0]"]
    for old, new in zip(env.specializations, restored.specializations, strict=True):
        answers = []
        for one, specialization in ((env, old), (restored, new)):
            with one.patch_source_specialization(specialization.source, specialization.check_fn):
                answers.append((one.simplify(sympy.Mod(symbol, 8) + symbol), dict(one.axioms)))
        assert answers[0] == answers[1]
    assert [s.check_fn(16) for s in restored.specializations] == [True, True]
    assert [s.check_fn(24) for s in restored.specializations] == [True, False]


def test_a_branching_condition_is_refused() -> None:
    """A condition that is no expression has no record."""
    env = ShapeEnv()
    context = StatelessSymbolicContext(
        dynamic_sizes=[DYNAMIC], specialize_on=[[lambda n: n > 3 and n < 9]]
    )
    mode = FakeTensorMode(shape_env=env)
    mode.from_tensor(torch.empty(16), source=LocalSource("x"), symbolic_context=context)
    symbol = env.source_to_var["L['x'].size()[0]"]
    with pytest.raises(ShapeEnvError) as info:
        snapshot(env)
    assert str(info.value) == (
        f"check_fn of {symbol}: a condition to specialize on cannot be written as an expression; "
        "expected one comparison of the size, such as `lambda n: n % 8 == 0`; found "
        "GuardOnDataDependentSymNode when it was called with a symbolic size"
    )
    assert env.guards == []


# --- environments of torch.compile ------------------------------------------------------------------


def branches(x, y, n):
    """Guard on conditions of every kind."""
    if x.shape[0] > 5:
        x = x + 1
    z = x.flatten() + y
    if n > 3:
        z = z * n
    return z, x.reshape(2, -1)


def data_dependent(x, y):
    """Use unbacked symbols, sizes from data and runtime asserts."""
    u = y.sum().int().item()
    torch._check(u >= 0)
    torch._check(u < y.shape[0])
    nonzero = torch.nonzero(x)
    return torch.zeros(u) + 1, nonzero.sum(0), y[:u]


def scalars(x, scale, n):
    """Use float and int inputs."""
    return x * scale + n


PROGRAMS = {
    "branches": (branches, lambda: (torch.randn(6, 7), torch.ones(42), 7)),
    "data_dependent": (data_dependent, lambda: (torch.randn(4), torch.ones(6) / 2)),
    "scalars": (scalars, lambda: (torch.randn(3), 2.5, 9)),
    "marked": (lambda x: x.sum() * x.shape[0], lambda: (marked(),)),
}


def marked() -> torch.Tensor:
    """Return a tensor with a bounded dynamic dim and an unbacked one."""
    x = torch.randn(6, 5)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
    torch._dynamo.decorators.mark_unbacked(x, 1)
    return x


def compile_env(name: str, check: Callable[[ShapeEnv], None]) -> None:
    """Call ``check`` with the environment of a backend's frame."""
    fn, make = PROGRAMS[name]

    def backend(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
        check(env_of_frame())
        return gm.forward

    with torch._dynamo.config.patch(**CONFIG):
        run = Run.of(fn, backend, dynamic=name != "marked")
        run(*make())
    assert run.count == 1


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_environment_of_a_compiled_function_is_restored(name: str) -> None:
    """Laws, torch's own comparison and the guards with their lines hold inside a backend."""

    def check(env: ShapeEnv) -> None:
        restored = check_laws(env)
        env.check_equal(restored)
        assert_same_attributes(env, restored)
        tracked = env.tracked_fakes
        arguments = ([t.fake for t in tracked], [t.source for t in tracked])
        contexts = [t.symbolic_context for t in tracked]
        texts = [
            [
                helper.exprs
                for helper in one.produce_guards_verbose(*arguments, input_contexts=contexts)
            ]
            for one in (env, restored)
        ]
        assert texts[0] == texts[1]
        assert name != "branches" or any("if x.shape[0] > 5" in t for t in texts[1][1])
        for symbol, stack in restored.var_to_stack.items():
            assert stack.format() == env.var_to_stack[symbol].format()
            assert any("test_snapshot" in entry for entry in stack.format())
        assert [str(restored.create_unbacked_symint()) for _ in range(2)] == [
            str(env.create_unbacked_symint()) for _ in range(2)
        ]

    compile_env(name, check)


@pytest.mark.sweep
def test_another_process_prints_the_users_lines() -> None:
    """A fresh interpreter restores guards, lines and asserts from bytes."""
    written: list[tuple[bytes, list[str]]] = []

    def check(env: ShapeEnv) -> None:
        lines = [f"{g.expr} {g.sloc}" for g in env.guards]
        lines += [f"{s} {a.expr}" for s, g in env.deferred_runtime_asserts.items() for a in g]
        lines += [f"{s} {v}" for s, v in env.var_to_range.items()]
        written.append((dumps(snapshot(env)), lines))

    compile_env("branches", check)
    compile_env("data_dependent", check)
    script = (
        "import sys\n"
        "from torch_fakeify.serialization.document import dumps, loads\n"
        "from torch_fakeify import restore, snapshot\n"
        "data = sys.stdin.buffer.read()\n"
        "env = restore(loads(data))\n"
        "assert dumps(snapshot(env)) == data\n"
        "for g in env.guards: print(g.expr, g.sloc)\n"
        "for s, group in env.deferred_runtime_asserts.items():\n"
        "    for a in group: print(s, a.expr)\n"
        "for s, v in env.var_to_range.items(): print(s, v)\n"
    )
    for data, lines in written:
        assert piped(script, data).decode().splitlines() == lines


def test_a_data_dependent_error_has_the_stack_of_its_symbol() -> None:
    """Torch's error for an undecidable condition has the restored stack of the allocation."""
    env = ShapeEnv()
    env.create_unbacked_symint()
    restored = restore(snapshot(env))
    (symbol,) = restored.var_to_stack
    assert free_unbacked_symbols(symbol) == {symbol}
    assert "create_unbacked_symint" in "".join(restored.var_to_stack[symbol].format())
    with pytest.raises(RuntimeError, match="Could not guard on data-dependent expression u0 > 3"):
        bool(restored.create_symintnode(symbol, hint=None) > 3)


def test_the_size_of_a_record_is_linear_in_the_guards() -> None:
    """An environment of many guards has a record of linear size."""
    sizes = []
    for count in (20, 200):
        world = World(ShapeEnv(duck_shape=False))
        for i in range(count):
            world.run(("symbol", f"x{i}", 50 + i, DYNAMIC))
            world.run(("guard", "gt", i, i, 7))
            assert len(world.env.guards) == i + 1
        sizes.append(len(dumps(snapshot(world.env))))
    assert sizes[1] < 12 * sizes[0]


def test_the_expression_of_a_symbol_is_its_record() -> None:
    """The name and assumptions of a SymbolDesc are those of its expression."""
    record = snapshot(used(ShapeEnv()))
    for symbol in record.symbols:
        node = SymbolNode(symbol.name, symbol.assumptions)
        expr = sympy.Symbol(symbol.name, **dict(symbol.assumptions))
        assert encode_expr(expr).nodes == (node,)
