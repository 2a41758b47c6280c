"""Where a graph binds its unbacked symbols: which node, and how the number is read from its value.

Torch notes it in ``meta["unbacked_bindings"]``, as a path from the value of the node to the number
(``compute_unbacked_bindings``, torch 2.13). Where a graph has lost the note, the first node whose
value shows the symbol is taken.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import sympy
import torch

from . import _torch
from ._torch import SymT, symbol_is_type
from .expr_nodes import value_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from .expr_nodes import ExprNodes, Operand

__all__ = [
    "Binding",
    "Step",
    "atom_of",
    "divisors_of",
    "env_of",
    "expr_of",
    "find_bindings",
    "follow",
    "is_flag",
    "is_unbacked",
    "path_steps",
    "place_of",
    "read_binding",
    "renamed",
    "shown",
    "steps_text",
    "symbols_in",
]

Step: TypeAlias = tuple[Any, ...]
"""One step from a value to a part of it: what it is, and its argument if it has one."""

_aten: Any = torch.ops.aten


class Binding(NamedTuple):
    """The node that binds a symbol, and the steps from its value to the number."""

    fx_node: torch.fx.Node
    steps: tuple[Step, ...]

    @property
    def text(self) -> str:
        """As Python over the name of the node."""
        return steps_text(self.fx_node.name, self.steps)

    @property
    def is_flag(self) -> bool:
        """Whether the number is a boolean, as 0 or 1."""
        return bool(self.steps) and self.steps[-1] == ("as_int",)

    @property
    def unconverted(self) -> Binding:
        """The boolean itself."""
        return self._replace(steps=self.steps[:-1])


def is_unbacked(symbol: Any) -> bool:
    """Whether a symbol stands for a number that depends on data."""
    return symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT))


def renamed(symbol: Any, env: Any) -> Any:
    """The name by which a ``ShapeEnv`` knows an unbacked symbol since a retrace."""
    seen: set[Any] = set()
    while symbol in env.unbacked_renamings and symbol not in seen:
        seen.add(symbol)
        symbol = env.unbacked_renamings[symbol]
    return symbol


def find_bindings(
    graph: torch.fx.Graph, env: Any, wanted: Collection[sympy.Symbol]
) -> dict[sympy.Symbol, Binding]:
    """The binding sites of a graph by symbol, in the order of the nodes.

    Args:
        graph: with fake values in ``meta``.
        env: the ``ShapeEnv`` of these values.
        wanted: symbols to look for in the values of nodes if no node notes that it binds them.
    """
    found: dict[sympy.Symbol, Binding] = {}
    for fx_node in graph.nodes:
        notes: Mapping[Any, Any] = fx_node.meta.get("unbacked_bindings") or {}
        for symbol, path in notes.items():
            steps = path_steps(path)
            if steps is not None:
                found.setdefault(renamed(symbol, env), Binding(fx_node, steps))
    missing = set(wanted) - found.keys()
    if not missing:
        return found
    for fx_node in graph.nodes:
        if fx_node.op in ("placeholder", "output"):
            continue
        for seen, steps in shown(value_of(fx_node)):
            symbol = renamed(seen, env)
            if symbol in missing:
                missing.discard(symbol)
                if _may_bind(fx_node, symbol, env):
                    found[symbol] = Binding(fx_node, steps)
    order = {fx_node: i for i, fx_node in enumerate(graph.nodes)}
    return dict(sorted(found.items(), key=lambda item: order[item[1].fx_node]))


def _may_bind(fx_node: torch.fx.Node, symbol: sympy.Symbol, env: Any) -> bool:
    """Whether the first value that shows a symbol can be what the symbol was made for.

    A symbol that was replaced may be shown by what was computed of the replacement, after torch has
    taken out the node that bound it.
    """
    if symbol not in env.replacements:
        return True
    value = value_of(fx_node)
    numbers = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return isinstance(value, numbers) and not any(
        isinstance(value_of(arg), numbers) for arg in fx_node.all_input_nodes
    )


def path_steps(path: Iterable[Any]) -> tuple[Step, ...] | None:
    """Torch's path (``unbacked_bindings``) as steps; ``None`` if it has a key of an unknown class."""
    steps: list[Step] = []
    for key in path:
        match type(key).__name__:
            case "CallMethodKey":
                steps.append((key.name,))
            case "SequenceKey" if steps and steps[-1] in (("size",), ("stride",)):
                steps[-1] = (*steps[-1], key.idx)
            case "SequenceKey":
                steps.append(("getitem", key.idx))
            case "MappingKey":
                steps.append(("getitem", key.key))
            case "GetAttrKey":
                steps.append(("getattr", key.name))
            case "InnerTensorKey":
                steps.append(("getattr", key.inner_name))
            case "ConvertIntKey":
                steps.append(("as_int",))
            case "DivideByKey":
                steps.append(("divide", _divisor(key.divisor)))
            case _:
                return None
    known = all(step[0] in _NAMES and step not in (("size",), ("stride",)) for step in steps)
    return tuple(steps) if known else None


def _divisor(n: Any) -> Any:
    """A symbolic divisor as its expression."""
    return n.node.expr if isinstance(n, torch.SymInt) else n


_NAMES = frozenset({"size", "stride", "storage_offset", "getitem", "getattr", "as_int", "divide"})


def shown(value: Any) -> Iterator[tuple[sympy.Symbol, tuple[Step, ...]]]:
    """The unbacked symbols that a value shows as they are."""
    if isinstance(value, (tuple, list)):
        for i, part in enumerate(value):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            for symbol, steps in shown(part):
                yield symbol, (("getitem", i), *steps)
    elif isinstance(value, torch.Tensor):
        yield from _shown_by_tensor(value)
    elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        expr = getattr(value.node, "_expr", None)
        if is_flag(expr):
            yield expr.args[0], (("as_int",),)  # type: ignore[union-attr]
        elif isinstance(expr, sympy.Symbol) and is_unbacked(expr):
            yield expr, ()


def is_flag(expr: Any) -> bool:
    """Whether an expression is that of an unbacked boolean: ``Eq(u0, 1)``."""
    return (
        isinstance(expr, sympy.Eq)
        and isinstance(expr.args[0], sympy.Symbol)
        and expr.args[1] == 1
        and is_unbacked(expr.args[0])
    )


def _shown_by_tensor(t: torch.Tensor) -> Iterator[tuple[sympy.Symbol, tuple[Step, ...]]]:
    sized: list[tuple[Step, Any]] = [(("size", i), n) for i, n in enumerate(t.size())]
    if t.layout is torch.strided:
        sized += [(("stride", i), n) for i, n in enumerate(t.stride())]
        sized.append((("storage_offset",), t.storage_offset()))
    for step, n in sized:
        for symbol, steps in shown(n):
            yield symbol, (step, *steps)
    if _torch.is_traceable_wrapper_subclass(t):
        wrapper: Any = t
        for name in wrapper.__tensor_flatten__()[0]:
            for symbol, steps in shown(getattr(wrapper, name)):
                yield symbol, (("getattr", name), *steps)


# --- numbers of values ------------------------------------------------------------------------------


def env_of(graph: torch.fx.Graph) -> Any:
    """The ``ShapeEnv`` of the values of a graph; ``None`` if they are of none."""
    for fx_node in graph.nodes:
        for leaf in _torch.tree_leaves(value_of(fx_node)):
            if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                env = getattr(leaf.node, "shape_env", None)
            elif isinstance(leaf, torch.Tensor):
                mode = _torch.maybe_get_fake_mode(leaf)
                env = None if mode is None else mode.shape_env
            else:
                continue
            if env is not None:
                return env
    return None


def expr_of(n: Any) -> sympy.Basic | None:
    """A number as an expression, without replacements; ``None`` of a nested int and of no number."""
    if isinstance(n, (bool, int, float)):
        return sympy.sympify(n, strict=True)
    if not isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return None
    expr = getattr(n.node, "_expr", None)
    return expr if isinstance(expr, sympy.Basic) else None


def atom_of(expr: Any) -> sympy.Symbol | None:
    """The one unbacked symbol that a number shows: as it is, as a flag, or times what is backed."""
    if isinstance(expr, sympy.Symbol):
        return expr if is_unbacked(expr) else None
    if is_flag(expr):
        return expr.args[0]
    if isinstance(expr, sympy.Mul) and len(expr.args) == 2:
        symbols = [arg for arg in expr.args if isinstance(arg, sympy.Symbol)]
        atoms = [arg for arg in symbols if is_unbacked(arg)]
        plain = all(isinstance(arg, (sympy.Symbol, sympy.Integer)) for arg in expr.args)
        return atoms[0] if plain and len(atoms) == 1 else None
    return None


def place_of(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps to the number as the value has it, without conversion and division."""
    while steps and steps[-1][0] in ("as_int", "divide"):
        steps = steps[:-1]
    return steps


def follow(value: Any, steps: Iterable[Step]) -> Any:
    """The part of a value that steps lead to; ``None`` if they lead nowhere.

    What a value is converted to or divided by is not followed.
    """
    for step in steps:
        value = _part(value, step)
        if value is None:
            return None
    return value


def _part(value: Any, step: Step) -> Any:
    match step:
        case ("size" | "stride" as name, dim) if isinstance(value, torch.Tensor):
            return getattr(value, name)(dim) if dim < value.ndim else None
        case ("storage_offset",) if isinstance(value, torch.Tensor):
            return value.storage_offset()
        case ("getitem", key) if isinstance(value, (tuple, list)):
            items: Any = value
            return items[key] if isinstance(key, int) and key < len(items) else None
        case ("getitem", key) if isinstance(value, dict):
            table: Any = value
            return table.get(key)
        case ("getattr", name):
            return getattr(value, name, None)
        case ("as_int" | "divide", *_):
            return value
        case _:
            return None


def symbols_in(value: Any) -> set[sympy.Symbol]:
    """All unbacked symbols in the numbers of a value, without replacements."""
    found: set[Any] = set()
    for leaf in _torch.tree_leaves(value):
        numbers = _numbers_of(leaf) if isinstance(leaf, torch.Tensor) else (leaf,)
        for n in numbers:
            expr = expr_of(n) if not isinstance(n, (int, float)) else None
            if expr is not None:
                found.update(s for s in expr.free_symbols if is_unbacked(s))
    return found


def _numbers_of(t: torch.Tensor) -> Iterator[Any]:
    yield from t.size()
    if t.layout is torch.strided:
        yield from t.stride()
        yield t.storage_offset()
    if _torch.is_traceable_wrapper_subclass(t):
        wrapper: Any = t
        for name in wrapper.__tensor_flatten__()[0]:
            inner = getattr(wrapper, name)
            if isinstance(inner, torch.Tensor):
                yield from _numbers_of(inner)
            else:
                yield inner


# --- nodes ----------------------------------------------------------------------------------------


def read_binding(nodes: ExprNodes, binding: Binding) -> Operand:
    """The node that has the number, at the insertion point; a divisor must be computable there."""
    operand: Operand = binding.fx_node
    text = binding.fx_node.name
    for step in binding.steps:
        text = _told(text, step)
        target, args = _call_of(nodes, step)
        operand = nodes.call(target, (operand, *args), {"what": "compute", "expr": text})
    return operand


def divisors_of(binding: Binding) -> Iterator[sympy.Basic]:
    """What the value of the node must be divided by, where that is no integer."""
    for step in binding.steps:
        if step[0] == "divide" and isinstance(step[1], sympy.Basic):
            yield step[1]


def _call_of(nodes: ExprNodes, step: Step) -> tuple[Any, tuple[Any, ...]]:
    match step:
        case ("size", dim):
            return _aten.sym_size.int, (dim,)
        case ("stride", dim):
            return _aten.sym_stride.int, (dim,)
        case ("storage_offset",):
            return _aten.sym_storage_offset.default, ()
        case ("getitem", index):
            return operator.getitem, (index,)
        case ("getattr", name):
            return getattr, (name,)
        case ("as_int",):
            return torch.sym_ite, (1, 0)
        case (_, divisor):
            is_expr = isinstance(divisor, sympy.Basic)
            return operator.floordiv, (nodes.compute(divisor) if is_expr else divisor,)
        case _:
            raise AssertionError(step)


def steps_text(text: str, steps: Iterable[Step]) -> str:
    """The part of a value as Python, over how a person calls the value."""
    for step in steps:
        text = _told(text, step)
    return text


def _told(text: str, step: Step) -> str:
    match step:
        case ("size" | "stride" as name, dim):
            return f"{text}.{name}({dim})"
        case ("storage_offset",):
            return f"{text}.storage_offset()"
        case ("getitem", index):
            return f"{text}[{index!r}]"
        case ("getattr", name):
            return f"{text}.{name}"
        case ("as_int",):
            return f"int({text})"
        case _:
            return f"({text} // {step[1]})"
