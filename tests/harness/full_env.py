"""A ``ShapeEnv`` in which every carried attribute differs from a new one's."""

from __future__ import annotations

import dataclasses
import traceback
from typing import Any

import sympy
import torch
from env_sessions import Actions
from torch._dynamo.source import LocalSource, TensorProperty, TensorPropertySource
from torch._guards import ShapeGuard, SLoc
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nested._internal.nested_int import NestedIntNode
from torch.utils._sympy.value_ranges import ValueRanges
from torch.utils._traceback import CapturedTraceback

DYNAMIC, DUCK = DimDynamic.DYNAMIC, DimDynamic.DUCK


class World(Actions):
    """An environment and the expressions of the sizes that a program has made, for any copy of it."""

    def __init__(self, env: ShapeEnv, pool: list[sympy.Expr] | None = None) -> None:
        self.env = env
        self.mode = FakeTensorMode(shape_env=env)
        self.pool = pool or []
        self.inputs: list[tuple[Any, sympy.Expr]] = []

    def sym(self, expr: sympy.Expr) -> Any:
        """A symbolic int of this environment."""
        return self.env.create_symintnode(expr, hint=None)

    def keep(self, value: Any) -> Any:
        """Put the expression of a size into the pool."""
        if isinstance(value, torch.SymInt):
            self.pool.append(value.node.expr)
        return value

    def pick(self, i: int) -> Any:
        """A size of the pool."""
        return self.sym(self.pool[i % len(self.pool)]) if self.pool else 2

    # --- actions ---

    def symbol(self, name: str, value: int, dynamic: DimDynamic) -> str:
        """An input that is an int."""
        source = LocalSource(name)
        symbol = self.env.create_symbol(value, source, dynamic)
        self.inputs.append((source, symbol))
        return str(self.keep(self.env.create_symintnode(symbol, hint=value)))

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
                self.keep(size)
        return str(fake.shape)

    def unspecified_float(self, name: str, value: float) -> str:
        """An input that is a float."""
        source = LocalSource(name)
        return str(self.env.create_unspecified_symbol(value, source, DYNAMIC))

    def simplify(self, kind: str, i: int, j: int, k: int) -> str:
        """What is known without guarding."""
        condition = self.condition(kind, i, j, k)
        if isinstance(condition, bool):
            return str(condition)
        expr = condition.node.expr
        return f"{self.env.simplify(expr)} {self.env._maybe_evaluate_static(expr)}"


def guards_of(world: World) -> list[list[str]] | str:
    """The guards of an environment over its inputs, in Python and with the lines of code."""
    symbols = [world.sym(symbol) for _, symbol in world.inputs]
    sources = [source for source, _ in world.inputs]
    try:
        helpers = world.env.produce_guards_verbose(symbols, sources)
    except (AssertionError, RuntimeError) as error:
        return type(error).__name__
    return [helper.exprs for helper in helpers]


def used(env: ShapeEnv) -> ShapeEnv:
    """The environment after guards, asserts, replacements, ranges and produced guards."""
    world = World(env)
    for action in (
        ("tensor", "x", (4, 6), DUCK),
        ("symbol", "n", 7, DYNAMIC),
        ("unbacked", "int"),
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


S0 = sympy.Symbol("s0", positive=True, integer=True)


S1 = sympy.Symbol("s1", positive=True, integer=True)


U0, U1 = sympy.symbols("u0 u1", integer=True)


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
