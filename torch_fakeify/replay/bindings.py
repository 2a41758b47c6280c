"""The binding sites of unbacked symbols: a node, and the path from its value to the number.

Torch stores them in ``meta["unbacked_bindings"]`` (``compute_unbacked_bindings``, torch 2.13). Where
a graph has lost that entry, the first node with the symbol in its value is the binding site.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import sympy
import torch
from torch.types import py_sym_types

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

    The ``requested`` symbols are looked for in the values of nodes if no metadata has their binding.
    """
    found: dict[sympy.Symbol, Binding] = {}
    for fx_node in graph.nodes:
        for symbol, binding in noted_bindings(fx_node, env):
            found.setdefault(symbol, binding)
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


def noted_bindings(fx_node: torch.fx.Node, env: Any) -> Iterator[tuple[sympy.Symbol, Binding]]:
    """The binding sites in the metadata of a node, with their symbols."""
    notes: Mapping[Any, Any] = fx_node.meta.get("unbacked_bindings") or {}
    for symbol, torch_path in notes.items():
        path = decode_path(torch_path)
        if path is not None:
            yield canonical_symbol(symbol, env), Binding(fx_node, path)


def _may_bind(fx_node: torch.fx.Node, symbol: sympy.Symbol, env: Any) -> bool:
    """Whether the first node with a symbol in its value can be the one that binds it.

    A replaced symbol may occur in a value computed from the replacement, after torch has removed the
    node that bound it.
    """
    if symbol not in env.replacements:
        return True
    return isinstance(value_of(fx_node), py_sym_types) and not any(
        isinstance(value_of(arg), py_sym_types) for arg in fx_node.all_input_nodes
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
                n = key.divisor
                path.append(("divide", n.node.expr if isinstance(n, torch.SymInt) else n))
            case _:
                return None
    is_valid = all(entry[0] in _NAMES and entry not in (("size",), ("stride",)) for entry in path)
    return tuple(path) if is_valid else None


_ACCESSES: dict[str, tuple[str, Any]] = {
    "size": ("{}.size({})", _aten.sym_size.int),
    "stride": ("{}.stride({})", _aten.sym_stride.int),
    "storage_offset": ("{}.storage_offset()", _aten.sym_storage_offset.default),
    "item": ("{}.item()", _aten._local_scalar_dense.default),
    "getitem": ("{}[{!r}]", operator.getitem),
    "getattr": ("{}.{}", getattr),
    "as_int": ("int({})", torch.sym_ite),
    "divide": ("({} // {})", operator.floordiv),
}
"""By the kind of an access its Python text and the function of its node."""

_NAMES = _ACCESSES.keys() - {"item"}  # which torch has no path entry for


def visible_symbols(value: Any) -> Iterator[tuple[sympy.Symbol, tuple[PathEntry, ...]]]:
    """The unbacked symbols that occur in a value as whole numbers, with their paths."""
    if isinstance(value, (tuple, list)):
        for i, part in enumerate(value):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            for symbol, path in visible_symbols(part):
                yield symbol, (("getitem", i), *path)
    elif isinstance(value, torch.Tensor):
        for path, n in tensor_numbers(value):
            for symbol, rest in visible_symbols(n):
                yield symbol, (*path, *rest)
    elif isinstance(value, py_sym_types):
        expr = expr_of(value)
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


# --- numbers of values ------------------------------------------------------------------------------


def env_of(graph: torch.fx.Graph) -> Any:
    """The ``ShapeEnv`` of the values of a graph; ``None`` if no value has one."""
    for fx_node in graph.nodes:
        for leaf in torch_graphs.tree_leaves(value_of(fx_node)):
            env = env_or_none(leaf)
            if env is not None:
                return env
    return None


def env_or_none(value: Any) -> Any:
    """The ``ShapeEnv`` of a symbolic number or a fake tensor; ``None`` for other values."""
    owner = value.node if isinstance(value, py_sym_types) else mode_or_none(value)
    return getattr(owner, "shape_env", None)


def mode_or_none(value: Any) -> Any:
    """The ``FakeTensorMode`` of a tensor; ``None`` for other values."""
    return torch_fakes.maybe_get_fake_mode(value) if isinstance(value, torch.Tensor) else None


def expr_of(n: Any) -> sympy.Basic | None:
    """A number as an expression, without replacements; ``None`` for nested ints and other values."""
    if isinstance(n, (bool, int, float)):
        return sympy.sympify(n, strict=True)
    if not isinstance(n, py_sym_types):
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
        numbers = tensor_numbers(leaf) if isinstance(leaf, torch.Tensor) else [((), leaf)]
        for _, n in numbers:
            expr = expr_of(n) if not isinstance(n, (int, float)) else None
            if expr is not None:
                found.update(s for s in expr.free_symbols if is_unbacked(s))
    return found


def canonical_symbols_in(value: Any, env: Any) -> set[Any]:
    """The canonical symbols (`canonical_symbol`) of the unbacked symbols in a value."""
    return {canonical_symbol(symbol, env) for symbol in symbols_in(value)}


def tensor_numbers(t: torch.Tensor) -> Iterator[tuple[tuple[PathEntry, ...], Any]]:
    """The sizes, strides and offset of a tensor and its inner tensors, with their paths.

    An attribute of a wrapper subclass that is no tensor is given as it is.
    """
    for i, n in enumerate(t.size()):
        yield (("size", i),), n
    if t.layout is torch.strided:
        for i, n in enumerate(t.stride()):
            yield (("stride", i),), n
        yield (("storage_offset",),), t.storage_offset()
    if torch_fakes.is_traceable_wrapper_subclass(t):
        wrapper: Any = t
        for name in wrapper.__tensor_flatten__()[0]:
            inner = getattr(wrapper, name)
            parts = tensor_numbers(inner) if isinstance(inner, torch.Tensor) else [((), inner)]
            for path, n in parts:
                yield (("getattr", name), *path), n


# --- nodes ----------------------------------------------------------------------------------------


def read_path(
    lowering: ExprLowering,
    fx_node: torch.fx.Node,
    path: tuple[PathEntry, ...],
    made: dict[tuple[torch.fx.Node, tuple[PathEntry, ...]], torch.fx.Node],
) -> Operand:
    """Insert the nodes that read the part of a node's value at a path; returns the last one.

    The nodes that read parts already are ``made``, by node and path; the new ones are added. The
    lowering must be able to compute the divisors in the path.
    """
    operand = fx_node
    for end, entry in enumerate(path, 1):
        key = (fx_node, path[:end])
        if key not in made:
            target, args = _call_of(lowering, entry)
            mark = {"what": "compute", "expr": path_text(fx_node.name, path[:end])}
            made[key] = lowering.call(target, (operand, *args), mark)
        operand = made[key]
    return operand


def divisors_of(binding: Binding) -> Iterator[sympy.Basic]:
    """The symbolic divisors in the path of a binding."""
    for entry in binding.path:
        if entry[0] == "divide" and isinstance(entry[1], sympy.Basic):
            yield entry[1]


def _call_of(lowering: ExprLowering, entry: PathEntry) -> tuple[Any, tuple[Any, ...]]:
    kind, *args = entry
    if kind == "as_int":
        args = [1, 0]
    elif kind == "divide" and isinstance(args[0], sympy.Basic):
        args = [lowering.compute(args[0])]
    return _ACCESSES[kind][1], tuple(args)


def path_text(text: str, path: Iterable[PathEntry]) -> str:
    """The part of a value at a path, as Python."""
    for kind, *args in path:
        text = _ACCESSES[kind][0].format(text, *args)
    return text
