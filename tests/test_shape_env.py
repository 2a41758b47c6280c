"""``snapshot`` and ``restore`` of a ``ShapeEnv``."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import traceback
from typing import Any

import msgspec
import pytest
import sympy
import torch
from env_attributes import CARRIED, assert_same_attributes, comparable
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.source import LocalSource, TensorProperty, TensorPropertySource
from torch._guards import ShapeGuard, SLoc, TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config as shapes_config
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    ShapeEnvSettings,
    StatelessSymbolicContext,
    free_unbacked_symbols,
)
from torch.nested._internal.nested_int import NestedIntNode
from torch.utils._sympy.singleton_int import SingletonInt
from torch.utils._sympy.value_ranges import ValueRanges
from torch.utils._traceback import CapturedTraceback

from torch_fakeify.attribute_scan import attributes_in_source
from torch_fakeify.codec import dumps, loads
from torch_fakeify.desc import ApplyNode, ExprDesc, FrameDesc, IntNode, StackDesc, SymbolNode
from torch_fakeify.desc_env import (
    IMPLIED_KEYS,
    OrderDesc,
    ShapeEnvDesc,
    ShapeEnvSettingsDesc,
    SymbolDesc,
)
from torch_fakeify.errors import FormatError, ShapeEnvError, UnknownNameError
from torch_fakeify.exprs import encode_expr
from torch_fakeify.shape_env import ATTRIBUTES, decode_stack, encode_stack, restore, snapshot
from torch_fakeify.stacks import decode_location, encode_location

DYNAMIC, DUCK = DimDynamic.DYNAMIC, DimDynamic.DUCK


def dump(env: ShapeEnv) -> dict[str, str]:
    """Every attribute of an environment as text, to see whether it was changed."""
    return {name: repr(value) for name, value in vars(env).items()}


def check_laws(env: ShapeEnv) -> ShapeEnv:
    """Law 4 for one environment, in memory and over bytes; gives the restored one."""
    before = dump(env)
    record = snapshot(env)
    assert dump(env) == before
    restored = restore(record)
    assert restored is not env
    assert snapshot(restored) == record
    assert loads(dumps(record)) == record
    return restored


# --- programs: what happens to an environment -----------------------------------------------------


class World:
    """An environment and the symbolic scalars that a program has made in it."""

    def __init__(self, env: ShapeEnv, pool: list[sympy.Expr] | None = None) -> None:
        self.env = env
        self.mode = FakeTensorMode(shape_env=env)
        self.pool: list[sympy.Expr] = pool or []
        self.inputs: list[tuple[Any, sympy.Expr]] = []

    def sym(self, expr: sympy.Expr) -> Any:
        """A symbolic int of this environment."""
        return self.env.create_symintnode(expr, hint=None)

    def add(self, value: Any) -> str:
        """Put a symbolic int into the pool."""
        if isinstance(value, torch.SymInt):
            self.pool.append(value.node.expr)
        return str(value)

    def run(self, action: tuple[Any, ...]) -> str:
        """What an action gives, or which error it raises, as text."""
        try:
            return str(getattr(self, action[0])(*action[1:]))
        except (RuntimeError, ValueError, ZeroDivisionError, AssertionError) as error:
            return type(error).__name__

    # --- actions ---

    def symbol(self, name: str, value: int, dynamic: DimDynamic) -> str:
        """An input that is an int."""
        source = LocalSource(name)
        symbol = self.env.create_symbol(value, source, dynamic)
        self.inputs.append((source, symbol))
        return self.add(self.env.create_symintnode(symbol, hint=value))

    def tensor(self, name: str, sizes: tuple[int, ...], dynamic: DimDynamic) -> str:
        """An input that is a tensor."""
        source = LocalSource(name)
        context = StatelessSymbolicContext(dynamic_sizes=[dynamic] * len(sizes))
        fake = self.mode.from_tensor(
            torch.empty(sizes, device="meta"), source=source, symbolic_context=context
        )
        for i, size in enumerate(fake.shape):
            if isinstance(size, torch.SymInt):
                self.inputs.append(
                    (TensorPropertySource(source, TensorProperty.SIZE, i), size.node.expr)
                )
                self.add(size)
        return str(fake.shape)

    def unspecified_float(self, name: str, value: float) -> str:
        """An input that is a float."""
        source = LocalSource(name)
        return str(self.env.create_unspecified_symbol(value, source, DYNAMIC))

    def unbacked(self) -> str:
        """An int of data."""
        return self.add(self.env.create_unbacked_symint())

    def unbacked_float(self) -> str:
        """A float of data."""
        return str(self.env.create_unbacked_symfloat())

    def unbacked_bool(self) -> str:
        """A bool of data."""
        return str(self.env.create_unbacked_symbool())

    def size_like(self, i: int) -> str:
        """An unbacked symbol is a size."""
        size = self.pick(i)
        if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
            self.env._constrain_range_for_size(size.node.expr)
        return str(size)

    def guard(self, kind: str, i: int, j: int, k: int) -> str:
        """A branch on a condition."""
        return str(bool(self.condition(kind, i, j, k)))

    def check(self, kind: str, i: int, j: int, k: int) -> str:
        """A checked condition."""
        return str(torch._check(self.condition(kind, i, j, k)))

    def simplify(self, kind: str, i: int, j: int, k: int) -> str:
        """What is known without guarding."""
        condition = self.condition(kind, i, j, k)
        if isinstance(condition, bool):
            return str(condition)
        expr = condition.node.expr
        return f"{self.env.simplify(expr)} {self.env._maybe_evaluate_static(expr)}"

    def pick(self, i: int) -> Any:
        """A scalar of the pool."""
        return self.sym(self.pool[i % len(self.pool)]) if self.pool else 2

    def condition(self, kind: str, i: int, j: int, k: int) -> Any:
        """A condition over two scalars of the pool and a number."""
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
            case "product":
                return a * b != k
            case "floor":
                return (a * 2 + b) // (abs(k) + 2) < 9
            case _:
                return torch.sym_max(a, b) >= torch.sym_min(b, k)


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
    st.sampled_from([("unbacked",), ("unbacked_float",), ("unbacked_bool",)]),
    st.tuples(st.just("size_like"), st.integers(0, 9)),
    st.tuples(st.sampled_from(["guard", "guard", "check"]), *CONDITIONS),
    st.tuples(st.sampled_from(["guard", "check", "check"]), *CONDITIONS),
)
PRELUDE = [
    ("symbol", "a", 4, DYNAMIC),
    ("symbol", "b", 4, DYNAMIC),
    ("tensor", "x", (4, 6), DUCK),
    ("unbacked",),
    ("unbacked",),
    ("size_like", 5),
]
PROGRAMS_OF_ACTIONS = st.tuples(
    st.sampled_from([PRELUDE, []]), st.lists(ACTIONS, min_size=1, max_size=14)
).map(lambda parts: parts[0] + parts[1])
PROBES = ACTIONS | st.tuples(st.just("simplify"), *CONDITIONS)


def guards_of(world: World) -> list[list[str]] | str:
    """The guards of an environment over its inputs, in Python and with the lines of code."""
    symbols = [world.sym(symbol) for _, symbol in world.inputs]
    sources = [source for source, _ in world.inputs]
    try:
        helpers = world.env.produce_guards_verbose(symbols, sources)
    except (AssertionError, RuntimeError) as error:
        return type(error).__name__
    return [helper.exprs for helper in helpers]


@given(
    settings_=st.fixed_dictionaries(
        {"specialize_zero_one": st.booleans(), "duck_shape": st.booleans()}
    ),
    program=PROGRAMS_OF_ACTIONS,
    probes=st.lists(PROBES, max_size=8),
)
@settings(deadline=None, max_examples=70)
def test_law_restored_environment_is_and_behaves_the_same(settings_, program, probes) -> None:
    """``snapshot(restore(s)) == s``, and whatever is asked next gets the same answers and effects."""
    world = World(ShapeEnv(**settings_))
    for action in program:
        world.run(action)
    restored = check_laws(world.env)
    world.env.check_equal(restored)
    assert_same_attributes(world.env, restored)

    other = World(restored, list(world.pool))
    other.inputs = list(world.inputs)
    for probe in (*probes, ("symbol", "fresh", 5, DUCK), ("unbacked",), ("unbacked_float",)):
        assert other.run(probe) == world.run(probe), probe
    world.env.check_equal(restored)
    assert_same_attributes(world.env, restored)
    assert guards_of(other) == guards_of(world)


# --- every attribute --------------------------------------------------------------------------------


def used(env: ShapeEnv) -> ShapeEnv:
    """The environment after guards, asserts, replacements, ranges and produced guards."""
    world = World(env)
    for action in (
        ("tensor", "x", (4, 6), DUCK),
        ("symbol", "n", 7, DYNAMIC),
        ("unbacked",),
        ("guard", "gt", 0, 0, 3),
        ("guard", "mod", 1, 1, 0),
        ("guard", "is", 2, 0, 7),
        ("size_like", 3),
        ("check", "le", 3, 0, 0),
    ):
        world.run(action)
    guards_of(world)
    env._maybe_evaluate_static(world.pool[0] + world.pool[3] > 4)
    world.sym(world.pool[0]).node.expr  # noqa: B018 - fills a cache
    return env


def observed_attributes() -> set[str]:
    """The attributes of environments in every mode that torch has."""
    plain, events = used(ShapeEnv()), used(ShapeEnv(should_record_events=True))
    found = set(vars(ShapeEnv())) | set(vars(plain)) | set(vars(events))
    with shapes_config.patch(translation_validation=True):
        found |= set(vars(ShapeEnv()))
    return found


def test_every_attribute_of_a_shape_env_is_classified() -> None:
    """The table has the attributes that torch's environments have, in every mode."""
    found = observed_attributes()
    assert found <= set(ATTRIBUTES)
    assert {name for name, known in ATTRIBUTES.items() if known.everywhere} <= found
    assert attributes_in_source(ShapeEnv) <= set(ATTRIBUTES)


def test_every_setting_is_carried() -> None:
    """The record of the settings has torch's fields."""
    fields = tuple(field.name for field in dataclasses.fields(ShapeEnvSettings))
    assert ShapeEnvSettingsDesc.__struct_fields__ == fields


def test_table_and_records_name_the_same_fields() -> None:
    """Each carried attribute names fields that exist, and no field of a record is unnamed."""
    named: set[str] = set()
    for attribute in ATTRIBUTES.values():
        if attribute.how == "carried":
            named |= set(attribute.why.split(", "))
    env_fields = set(ShapeEnvDesc.__struct_fields__) - {"symbols", "orders"}
    symbol_fields = {f"symbols.{f}" for f in SymbolDesc.__struct_fields__}
    assert named == env_fields | (symbol_fields - {"symbols.name", "symbols.assumptions"})


def test_every_attribute_spread_over_symbols_has_its_order() -> None:
    """What a table's keys are by default is defined for every table that an order may name."""
    tables = set(
        msgspec.json.schema(OrderDesc)["$defs"]["OrderDesc"]["properties"]["table"]["enum"]
    )
    assert tables == {*IMPLIED_KEYS, "deferred_runtime_asserts"}


def test_a_restored_environment_knows_raggedness_again() -> None:
    """The nested int that a symbol stands for finds that symbol, as in the original."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    first = mode.create_symbolic_nested_int(nt_tensor_id=7)
    restored = restore(snapshot(env))
    again = FakeTensorMode(shape_env=restored)
    assert again.create_symbolic_nested_int(nt_tensor_id=7).node.expr == first.node.expr
    assert again.create_symbolic_nested_int(nt_tensor_id=8).node.expr != first.node.expr
    assert again.nt_tensor_id_counter > 7


S0 = sympy.Symbol("s0", positive=True, integer=True)
S1 = sympy.Symbol("s1", positive=True, integer=True)
U0, U1 = sympy.symbols("u0 u1", integer=True)
ZUF0 = sympy.Symbol("zuf0")


def full_env() -> ShapeEnv:
    """An environment in which every carried attribute differs from a new one's."""
    env = ShapeEnv(
        allow_scalar_outputs=False,
        specialize_zero_one=False,
        duck_shape=False,
        trace_asserts=True,
        co_fields={"co_name": "f", "co_firstlineno": 3},
    )
    used(env)
    source = LocalSource("q")
    sloc = SLoc("by hand", None)
    env.var_to_range[S0] = ValueRanges(2, 9)
    env.var_to_sources[S0] = [source]
    env.backed_var_to_val[S0] = sympy.Integer(4)
    env.var_to_stack[U1] = CapturedTraceback.extract()
    env.var_to_range[U1] = ValueRanges(0, 5)
    env.real_tensor_prop_unbacked_vals[U1] = sympy.Integer(3)
    env.unbacked_inputs.add(U1)
    env.var_to_hint_override[U1] = 12
    env.var_to_hint_override[U0 + 1] = 13
    env.source_name_to_debug_name["L['q']"] = "q"
    env.source_to_symbol["L['q']"] = S0
    env.replacements[S1] = S0 * 2
    env.replacements_slocs[S1] = sloc
    env.unbacked_renamings[U0] = U1
    env.divisible.add(sympy.Mod(S0, 4))
    env.exclusion_constraints.append((S0, 7))
    env.size_like.add(U1)
    env.guards.append(ShapeGuard(sympy.Gt(S0, 3), sloc, True))
    env.val_to_var[4] = S0
    env.val_to_var[2.5] = sympy.Symbol("zf1", real=True)
    env.val_to_var[torch.SymInt(NestedIntNode(3, 1))] = S1
    env.unbacked_symfloat_counter = 4
    env.deferred_runtime_asserts[None] = []
    env.frozen = env.runtime_asserts_frozen = env._error_on_new_guards = True
    env.ignorable_fresh_unbacked_symbols.append(U1)
    env._version_counter = 41
    env._replacements_version_counter = 42
    env.unbacked_alloc_order.update({U1: 1, U0: 0})
    env.specialization_stacks[source] = traceback.extract_stack()[-2:]
    env._shape_id_to_unbacked_symbol["batch"] = U1
    env._spec_symbol_to_compile_symbol[sympy.Symbol("a#0", integer=True)] = U1
    env._shape_spec_pending_assumptions.append(({U0, U1}, sympy.Gt(U0, U1)))
    context = StatelessSymbolicContext(
        dynamic_sizes=[DYNAMIC], specialize_on=[[lambda n: n % 8 == 0, lambda n: n == 16]]
    )
    env.frozen, frozen = False, env.frozen
    env._error_on_new_guards = False
    FakeTensorMode(shape_env=env).from_tensor(
        torch.empty(16), source=LocalSource("sp"), symbolic_context=context
    )
    env.frozen = env._error_on_new_guards = frozen
    # What the version counter would have noticed.
    env._prev_cache_key = env._get_key()
    env._resimplify_floor_div_axioms = False
    env.settings = dataclasses.replace(env.settings, assume_static_by_default=True)
    return env


@pytest.mark.parametrize("name", CARRIED)
def test_each_carried_attribute_crosses(name: str) -> None:
    """One attribute at a time, order included, on an environment where it is not the default."""
    env = full_env()
    default = comparable(name, getattr(ShapeEnv(), name))
    value = comparable(name, getattr(env, name))
    assert value != default, "the test's environment does not exercise the attribute"
    restored = getattr(check_laws(env), name)
    assert comparable(name, restored) == value
    assert type(restored) is type(getattr(env, name))


def test_restored_environment_has_torchs_attributes() -> None:
    """Nothing is missing from a restored environment, and nothing is added."""
    assert set(vars(restore(snapshot(ShapeEnv())))) == set(vars(ShapeEnv()))


def test_event_recording_and_validation_are_off_after_restore() -> None:
    """A restored environment has no history to check, whatever the configuration says."""
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


def test_specialization_asks_the_same_after_restore() -> None:
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


def test_branching_condition_is_refused_by_name() -> None:
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


# --- what is refused --------------------------------------------------------------------------------


def test_unknown_attribute_is_refused_by_name() -> None:
    """State that the table does not know is not dropped."""
    env = ShapeEnv()
    env.new_in_some_torch = {}
    with pytest.raises(ShapeEnvError) as info:
        snapshot(env)
    assert str(info.value) == (
        "the ShapeEnv has an attribute that a snapshot does not know; expected the attributes of "
        "torch's ShapeEnv; found new_in_some_torch. Remove the attribute, or use a version "
        "of torch_fakeify for this torch."
    )


def test_something_else_is_no_shape_env() -> None:
    """Snapshot wants torch's own class."""
    with pytest.raises(ShapeEnvError) as info:
        snapshot(3)
    assert str(info.value) == "not a shape environment; expected ShapeEnv; found int"


def test_entry_of_a_wrong_type_is_refused() -> None:
    """An entry that torch never makes is named."""
    env = ShapeEnv()
    env.exclusion_constraints.append((S0, "7"))
    with pytest.raises(ShapeEnvError) as info:
        snapshot(env)
    assert str(info.value) == (
        "an entry of `exclusion_constraints` that a snapshot does not know; expected int; "
        "found str '7'"
    )
    env = ShapeEnv()
    env.var_to_range[S0 + 1] = ValueRanges(0, 1)
    with pytest.raises(ShapeEnvError) as info:
        snapshot(env)
    assert str(info.value) == (
        "an entry of the ShapeEnv is not about a symbol; expected a sympy.Symbol; found s0 + 1"
    )


SETTINGS = snapshot(ShapeEnv()).settings
ONE, THREE = ExprDesc(nodes=(IntNode(1),)), ExprDesc(nodes=(IntNode(3),))
X = ExprDesc(nodes=(SymbolNode("x", ()),))
BAD = ExprDesc(nodes=(SymbolNode("x", ()), ApplyNode("system", (0,))))


def nested(number: int, coeff: sympy.Basic | int) -> ExprDesc:
    """The record of a nested int."""
    return encode_expr(SingletonInt(number, coeff=coeff))


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        (
            {"symbols": (SymbolDesc(name="x"), SymbolDesc(name="x"))},
            FormatError,
            "$.symbols[1]: a symbol occurs twice; expected distinct symbols; found x",
        ),
        (
            {"symbols": (SymbolDesc(name="x", lower=THREE, upper=ONE),)},
            FormatError,
            "$.symbols[0]: not a value range; expected lower <= upper; found [3, 1]",
        ),
        (
            {"symbols": (SymbolDesc(name="x", lower=ONE),)},
            FormatError,
            "$.symbols[0].upper: a value is missing; expected one, since the symbol is a key; "
            "found none",
        ),
        (
            {"symbols": (SymbolDesc(name="x", hint=X),)},
            FormatError,
            "$.symbols[0].hint: not a number; expected a number; found Symbol",
        ),
        (
            {"axioms": ((X, BAD),)},
            UnknownNameError,
            "$.axioms[0][1].nodes[1]: an unknown function; expected a function of sympy or "
            "torch.utils._sympy.functions; found 'system'. Read the file with the version that "
            "wrote it, or a later one.",
        ),
        (
            {"source_to_var": (("L['x']", BAD),)},
            UnknownNameError,
            "$.source_to_var[0][1].nodes[1]: an unknown function; expected a function of sympy or "
            "torch.utils._sympy.functions; found 'system'. Read the file with the version that "
            "wrote it, or a later one.",
        ),
        (
            {"duck_shapes": ((ONE, ONE),)},
            FormatError,
            "$.duck_shapes[0][1]: not a symbol; expected a symbol; found One",
        ),
        (
            {"duck_shapes": ((nested(1 << 70, 1), X),)},
            FormatError,
            "$.duck_shapes[0][0]: not a size; expected a nested int of torch's; found 71 bits",
        ),
        (
            {"duck_shapes": ((nested(3, sympy.Symbol("x")), X),)},
            FormatError,
            "$.duck_shapes[0][0]: not a size; expected a nested int times a number; found times x",
        ),
        (
            {"orders": (OrderDesc(table="var_to_range", keys=(X,)),)},
            FormatError,
            "$.orders[0].keys: not keys of symbols; expected symbols of this record, each once; "
            "found var_to_range",
        ),
        (
            {
                "symbols": (SymbolDesc(name="x", guard_count=1),),
                "orders": (OrderDesc(table="symbol_guard_counter", keys=()),),
            },
            FormatError,
            "$.orders[0].keys: keys are missing; expected every symbol that has a value; "
            "found symbol_guard_counter",
        ),
        (
            {
                "symbols": (SymbolDesc(name="x"),),
                "orders": (OrderDesc(table="symbol_guard_counter", keys=(X,)),),
            },
            FormatError,
            "$.symbols[0].guard_count: a value is missing; expected one, since the symbol is a "
            "key; found none",
        ),
    ],
)
def test_malformed_record_names_its_place(fields, kind, message: str) -> None:
    """A record that contradicts itself is refused with its path."""
    with pytest.raises(FormatError) as info:
        restore(ShapeEnvDesc(settings=SETTINGS, **fields))
    assert type(info.value) is kind
    assert str(info.value) == message


# --- stacks -----------------------------------------------------------------------------------------


def test_stack_reads_the_same_after_a_round_trip() -> None:
    """Summary, formatted text and the line of code survive; cleanup forgets them."""
    stack = CapturedTraceback.extract()
    expected = stack.format()
    record = encode_stack(stack)
    assert record.frames[-1].code == "stack = CapturedTraceback.extract()"
    again = decode_stack(record)
    assert isinstance(again, CapturedTraceback)
    assert again.format() == expected
    assert again.summary() == stack.summary()
    assert encode_stack(again) == record
    assert encode_stack(again.summary()) == record
    again.cleanup()
    stack.cleanup()
    assert again.format() == stack.format() == []
    assert encode_stack(again) == encode_stack(stack)


def test_restored_stack_does_not_read_files() -> None:
    """The line of code is the recorded one, whatever the file of that name says here."""
    frame = FrameDesc(file=__file__, line=1, function="f", code="recorded = True")
    (entry,) = decode_stack(StackDesc(frames=(frame,))).format()
    assert entry == f'  File "{__file__}", line 1, in f\n    recorded = True\n'


def test_no_stack_is_none() -> None:
    """``None`` stays ``None`` on both sides."""
    assert encode_stack(None) is None
    assert decode_stack(None) is None


@pytest.mark.parametrize(
    "location",
    [
        SLoc(None, None),
        SLoc("reason of the framework", None),
        SLoc(traceback.FrameSummary("/a/b.py", 3, "g"), "y = x + 1  # m.py:7 in f"),
        SLoc(None, "None  # m.py:7 in f"),
        SLoc(None, "x  # y  # m.py:007 in f"),
        SLoc(None, "no location at all"),
        SLoc(None, "a  # b  # dir # x/m.py:7 in f in g"),
    ],
    ids=repr,
)
def test_location_prints_the_same(location: SLoc) -> None:
    """Whatever torch put into an SLoc, it prints the same after a round trip."""
    record = encode_location(location)
    again = decode_location(record)
    assert str(again) == str(location)
    assert again.maybe_user_loc == location.maybe_user_loc
    assert encode_location(again) == record


def test_location_knows_the_users_line() -> None:
    """The user's frame is a frame, not only text."""
    frame = encode_location(SLoc(None, "y = x + 1  # m.py:7 in f")).user.frames[0]
    assert (frame.file, frame.line, frame.function, frame.code) == ("m.py", 7, "f", "y = x + 1")


def test_equal_parts_are_one_object_in_the_record() -> None:
    """Expressions, stacks and locations that the environment shares, the record shares."""
    env = ShapeEnv()
    env.create_unbacked_symint()
    (symbol,) = snapshot(env).symbols
    assert symbol.lower_location is symbol.upper_location
    record = snapshot(used(env))
    found: dict[ExprDesc, int] = {}
    for key, value in record.axioms:
        for expr in (key, value):
            assert found.setdefault(expr, id(expr)) == id(expr)


# --- environments of torch.compile ------------------------------------------------------------------


def branches(x, y, n):
    """Guards of every kind."""
    if x.shape[0] > 5:
        x = x + 1
    z = x.flatten() + y
    if n > 3:
        z = z * n
    return z, x.reshape(2, -1)


def data_dependent(x, y):
    """Unbacked symbols, sizes of data and runtime asserts."""
    u = y.sum().int().item()
    torch._check(u >= 0)
    torch._check(u < y.shape[0])
    nonzero = torch.nonzero(x)
    return torch.zeros(u) + 1, nonzero.sum(0), y[:u]


def scalars(x, scale, n):
    """Float and int inputs."""
    return x * scale + n


PROGRAMS = {
    "branches": (branches, lambda: (torch.randn(6, 7), torch.ones(42), 7)),
    "data_dependent": (data_dependent, lambda: (torch.randn(4), torch.ones(6) / 2)),
    "scalars": (scalars, lambda: (torch.randn(3), 2.5, 9)),
    "marked": (lambda x: x.sum() * x.shape[0], lambda: (marked(),)),
}


def marked() -> torch.Tensor:
    """A tensor with a bounded dynamic dim and an unbacked one."""
    x = torch.randn(6, 5)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
    torch._dynamo.decorators.mark_unbacked(x, 1)
    return x


def compile_env(name: str, check) -> None:
    """Call ``check`` with the environment that Dynamo gives to a backend."""
    fn, make = PROGRAMS[name]
    calls: list[str] = []

    def backend(gm, example_inputs):
        calls.append(name)
        check(TracingContext.get().fake_mode.shape_env)
        return gm.forward

    torch._dynamo.reset()
    config = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    try:
        with torch._dynamo.config.patch(specialize_float=False, **config):
            torch.compile(fn, backend=backend, dynamic=name != "marked")(*make())
    finally:
        torch._dynamo.reset()
    assert calls == [name]


@pytest.mark.parametrize("name", PROGRAMS)
def test_environment_of_a_compiled_function(name: str) -> None:
    """Laws, torch's own comparison and the guards with their lines, inside a backend."""

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
            assert any("test_shape_env" in entry for entry in stack.format())
        assert [str(restored.create_unbacked_symint()) for _ in range(2)] == [
            str(env.create_unbacked_symint()) for _ in range(2)
        ]

    compile_env(name, check)


def test_restored_elsewhere_it_prints_the_users_lines() -> None:
    """A fresh interpreter restores the bytes and knows guards, lines and asserts."""
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
        "from torch_fakeify.codec import dumps, loads\n"
        "from torch_fakeify.shape_env import restore, snapshot\n"
        "data = sys.stdin.buffer.read()\n"
        "env = restore(loads(data))\n"
        "assert dumps(snapshot(env)) == data\n"
        "for g in env.guards: print(g.expr, g.sloc)\n"
        "for s, group in env.deferred_runtime_asserts.items():\n"
        "    for a in group: print(s, a.expr)\n"
        "for s, v in env.var_to_range.items(): print(s, v)\n"
    )
    for data, lines in written:
        done = subprocess.run(
            [sys.executable, "-c", script], input=data, capture_output=True, check=True
        )
        assert done.stdout.decode().splitlines() == lines


def test_data_dependent_error_names_the_allocation() -> None:
    """Torch's error for an undecidable condition formats the restored stack of the symbol."""
    env = ShapeEnv()
    env.create_unbacked_symint()
    restored = restore(snapshot(env))
    (symbol,) = restored.var_to_stack
    assert free_unbacked_symbols(symbol) == {symbol}
    assert "create_unbacked_symint" in "".join(restored.var_to_stack[symbol].format())
    with pytest.raises(RuntimeError, match="Could not guard on data-dependent expression u0 > 3"):
        bool(restored.create_symintnode(symbol, hint=None) > 3)


def test_cost_grows_with_the_number_of_guards_only() -> None:
    """Many guards make one record of linear size."""
    sizes = []
    for count in (20, 200):
        world = World(ShapeEnv(duck_shape=False))
        for i in range(count):
            world.run(("symbol", f"x{i}", 50 + i, DYNAMIC))
            world.run(("guard", "gt", i, i, 7))
            assert len(world.env.guards) == i + 1
        sizes.append(len(dumps(snapshot(world.env))))
    assert sizes[1] < 12 * sizes[0]


def test_expr_of_a_symbol_is_its_record() -> None:
    """A SymbolDesc's name and assumptions are those of its expression."""
    record = snapshot(used(ShapeEnv()))
    for symbol in record.symbols:
        node = SymbolNode(symbol.name, symbol.assumptions)
        expr = sympy.Symbol(symbol.name, **dict(symbol.assumptions))
        assert encode_expr(expr).nodes == (node,)
