"""The binding sites of unbacked symbols: a node, and the path from its value to the number.

Torch stores them in ``meta["unbacked_bindings"]`` (``compute_unbacked_bindings``, torch 2.13). Where
a graph has lost that entry, the first node with the symbol in its value is the binding site.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import sympy
import torch

from torch_fakeify.compat import torch_fakes, torch_graphs
from torch_fakeify.compat.torch_symbols import SymT, symbol_is_type

from .lowering import value_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from .lowering import ExprLowering, Operand

PathEntry: TypeAlias = tuple[Any, ...]
"""One access to a part of a value: its kind, and an argument such as a dim or a key."""

_aten: Any = torch.ops.aten


class Binding(NamedTuple):
    """The node that binds a symbol, and the path from its value to the number."""

    fx_node: torch.fx.Node
    path: tuple[PathEntry, ...]

    @property
    def text(self) -> str:
        """The number as Python over the name of the node."""
        return path_text(self.fx_node.name, self.path)

    @property
    def is_flag(self) -> bool:
        """Whether the number is a boolean, as 0 or 1."""
        return bool(self.path) and self.path[-1] == ("as_int",)

    def number(self, value: Any, divisor: Callable[[Any], Any]) -> Any:
        """The number that the node's real value binds; ``None`` if there is none.

        Args:
            value: of the node.
            divisor: evaluates a divisor in the path; ``None`` or 0 if it has no value.
        """
        found = follow(value, raw_path(self.path))
        if isinstance(found, torch.Tensor):
            found = found.item()
        for entry in self.path:
            if entry[0] == "divide" and found is not None:
                by = divisor(sympy.sympify(entry[1], strict=True))
                found = None if not by else int(found) // int(by)
        return found

    @property
    def unconverted(self) -> Binding:
        """The binding of the boolean itself."""
        return self._replace(path=self.path[:-1])


def is_unbacked(symbol: Any) -> bool:
    """Whether a symbol is unbacked: its value depends on data."""
    return symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT))


def canonical_symbol(symbol: Any, env: Any) -> Any:
    """The symbol that a ``ShapeEnv`` uses for an unbacked symbol after renamings by retraces."""
    seen: set[Any] = set()
    while symbol in env.unbacked_renamings and symbol not in seen:
        seen.add(symbol)
        symbol = env.unbacked_renamings[symbol]
    return symbol


def find_bindings(
    graph: torch.fx.Graph, env: Any, requested: Collection[sympy.Symbol]
) -> dict[sympy.Symbol, Binding]:
    """The binding sites of a graph by symbol, in the order of the nodes.

    Args:
        graph: with fake values in ``meta``.
        env: the ``ShapeEnv`` of these values.
        requested: symbols to look for in the values of nodes if no metadata has their binding.
    """
    found: dict[sympy.Symbol, Binding] = {}
    for fx_node in graph.nodes:
        notes: Mapping[Any, Any] = fx_node.meta.get("unbacked_bindings") or {}
        for symbol, torch_path in notes.items():
            path = decode_path(torch_path)
            if path is not None:
                found.setdefault(canonical_symbol(symbol, env), Binding(fx_node, path))
    missing = set(requested) - found.keys()
    if not missing:
        return found
    for fx_node in graph.nodes:
        if fx_node.op in ("placeholder", "output"):
            continue
        for seen, path in visible_symbols(value_of(fx_node)):
            symbol = canonical_symbol(seen, env)
            if symbol in missing:
                missing.discard(symbol)
                if _may_bind(fx_node, symbol, env):
                    found[symbol] = Binding(fx_node, path)
    order = {fx_node: i for i, fx_node in enumerate(graph.nodes)}
    return dict(sorted(found.items(), key=lambda item: order[item[1].fx_node]))


def _may_bind(fx_node: torch.fx.Node, symbol: sympy.Symbol, env: Any) -> bool:
    """Whether the first node with a symbol in its value can be the one that binds it.

    A replaced symbol may occur in a value computed from the replacement, after torch has removed the
    node that bound it.
    """
    if symbol not in env.replacements:
        return True
    value = value_of(fx_node)
    numbers = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return isinstance(value, numbers) and not any(
        isinstance(value_of(arg), numbers) for arg in fx_node.all_input_nodes
    )


def decode_path(torch_path: Iterable[Any]) -> tuple[PathEntry, ...] | None:
    """Torch's path (``unbacked_bindings``) as path entries; ``None`` if it has a key of an unknown class."""
    path: list[PathEntry] = []
    for key in torch_path:
        match type(key).__name__:
            case "CallMethodKey":
                path.append((key.name,))
            case "SequenceKey" if path and path[-1] in (("size",), ("stride",)):
                path[-1] = (*path[-1], key.idx)
            case "SequenceKey":
                path.append(("getitem", key.idx))
            case "MappingKey":
                path.append(("getitem", key.key))
            case "GetAttrKey":
                path.append(("getattr", key.name))
            case "InnerTensorKey":
                path.append(("getattr", key.inner_name))
            case "ConvertIntKey":
                path.append(("as_int",))
            case "DivideByKey":
                path.append(("divide", _divisor(key.divisor)))
            case _:
                return None
    is_valid = all(entry[0] in _NAMES and entry not in (("size",), ("stride",)) for entry in path)
    return tuple(path) if is_valid else None


def _divisor(n: Any) -> Any:
    """A symbolic divisor as its expression."""
    return n.node.expr if isinstance(n, torch.SymInt) else n


_NAMES = frozenset({"size", "stride", "storage_offset", "getitem", "getattr", "as_int", "divide"})


def visible_symbols(value: Any) -> Iterator[tuple[sympy.Symbol, tuple[PathEntry, ...]]]:
    """The unbacked symbols that occur in a value as whole numbers, with their paths."""
    if isinstance(value, (tuple, list)):
        for i, part in enumerate(value):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            for symbol, path in visible_symbols(part):
                yield symbol, (("getitem", i), *path)
    elif isinstance(value, torch.Tensor):
        yield from _visible_in_tensor(value)
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


def _visible_in_tensor(t: torch.Tensor) -> Iterator[tuple[sympy.Symbol, tuple[PathEntry, ...]]]:
    sized: list[tuple[PathEntry, Any]] = [(("size", i), n) for i, n in enumerate(t.size())]
    if t.layout is torch.strided:
        sized += [(("stride", i), n) for i, n in enumerate(t.stride())]
        sized.append((("storage_offset",), t.storage_offset()))
    for entry, n in sized:
        for symbol, path in visible_symbols(n):
            yield symbol, (entry, *path)
    if torch_fakes.is_traceable_wrapper_subclass(t):
        wrapper: Any = t
        for name in wrapper.__tensor_flatten__()[0]:
            for symbol, path in visible_symbols(getattr(wrapper, name)):
                yield symbol, (("getattr", name), *path)


# --- numbers of values ------------------------------------------------------------------------------


def env_of(graph: torch.fx.Graph) -> Any:
    """The ``ShapeEnv`` of the values of a graph; ``None`` if no value has one."""
    for fx_node in graph.nodes:
        for leaf in torch_graphs.tree_leaves(value_of(fx_node)):
            if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                env = getattr(leaf.node, "shape_env", None)
            elif isinstance(leaf, torch.Tensor):
                mode = torch_fakes.maybe_get_fake_mode(leaf)
                env = None if mode is None else mode.shape_env
            else:
                continue
            if env is not None:
                return env
    return None


def expr_of(n: Any) -> sympy.Basic | None:
    """A number as an expression, without replacements; ``None`` for nested ints and other values."""
    if isinstance(n, (bool, int, float)):
        return sympy.sympify(n, strict=True)
    if not isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return None
    expr = getattr(n.node, "_expr", None)
    return expr if isinstance(expr, sympy.Basic) else None


def atom_of(expr: Any) -> sympy.Symbol | None:
    """The single unbacked symbol of a number: alone, as a flag, or times a backed symbol or integer."""
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


def raw_path(path: tuple[PathEntry, ...]) -> tuple[PathEntry, ...]:
    """A path without its conversions and divisions: to the number in the value."""
    while path and path[-1][0] in ("as_int", "divide"):
        path = path[:-1]
    return path


def follow(value: Any, path: Iterable[PathEntry]) -> Any:
    """The part of a value at a path, without conversions and divisions; ``None`` if there is none."""
    for entry in path:
        value = _part(value, entry)
        if value is None:
            return None
    return value


def _part(value: Any, entry: PathEntry) -> Any:
    match entry:
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
    """All unbacked symbols that occur in the numbers of a value, without replacements."""
    found: set[Any] = set()
    for leaf in torch_graphs.tree_leaves(value):
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
    if torch_fakes.is_traceable_wrapper_subclass(t):
        wrapper: Any = t
        for name in wrapper.__tensor_flatten__()[0]:
            inner = getattr(wrapper, name)
            if isinstance(inner, torch.Tensor):
                yield from _numbers_of(inner)
            else:
                yield inner


# --- nodes ----------------------------------------------------------------------------------------


def read_binding(lowering: ExprLowering, binding: Binding) -> Operand:
    """Insert the nodes that read a binding; a divisor must be computable at the insertion point."""
    operand: Operand = binding.fx_node
    text = binding.fx_node.name
    for entry in binding.path:
        text = _access_text(text, entry)
        target, args = _call_of(lowering, entry)
        operand = lowering.call(target, (operand, *args), {"what": "compute", "expr": text})
    return operand


def divisors_of(binding: Binding) -> Iterator[sympy.Basic]:
    """The symbolic divisors in the path of a binding."""
    for entry in binding.path:
        if entry[0] == "divide" and isinstance(entry[1], sympy.Basic):
            yield entry[1]


def _call_of(lowering: ExprLowering, entry: PathEntry) -> tuple[Any, tuple[Any, ...]]:
    match entry:
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
            return operator.floordiv, (lowering.compute(divisor) if is_expr else divisor,)
        case _:
            raise AssertionError(entry)


def path_text(text: str, path: Iterable[PathEntry]) -> str:
    """The part of a value at a path, as Python."""
    for entry in path:
        text = _access_text(text, entry)
    return text


def _access_text(text: str, entry: PathEntry) -> str:
    match entry:
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
            return f"({text} // {entry[1]})"
