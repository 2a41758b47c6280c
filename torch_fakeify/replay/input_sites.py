"""The sites of a graph's inputs that hold symbols of a ``ShapeEnv``.

The sites are those that ``ShapeEnv.produce_guards`` tracks (torch 2.13): scalars, sizes, strides and
storage offsets of tensors and of the inner tensors of wrapper subclasses, and the ``item()`` of
tensors. A functorch wrapper has none: no operator reads its sizes outside its transform. For an input
that a frontend changed while tracing (``resize_``, ``transpose_``) the sites come from the sources of
the symbols instead of the fake tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import sympy
import torch

from torch_fakeify.compat import torch_dispatch, torch_dynamo, torch_fakes, torch_symbols
from torch_fakeify.encoding.sources import source_of
from torch_fakeify.errors import ShapeEnvError

from .lowering import value_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .lowering import ExprLowering, Operand

Property: TypeAlias = Literal["value", "as_int", "item", "size", "stride", "storage_offset"]

_aten: Any = torch.ops.aten

_ORDER: tuple[Property, ...] = ("value", "as_int", "size", "stride", "storage_offset", "item")


class Site(NamedTuple):
    """A number of one of a graph's inputs."""

    placeholder: torch.fx.Node
    path: tuple[str, ...]
    """Attributes that lead to an inner tensor of a wrapper subclass."""
    prop: Property
    """``value``: the input itself; ``as_int``: a boolean input as 0 or 1."""
    dim: int | None
    """The index of a size or stride."""
    expr: sympy.Basic
    """Its expression in the ``ShapeEnv``, before replacements."""

    @property
    def text(self) -> str:
        """The site as Python over the names of the graph's inputs."""
        tensor = ".".join((self.placeholder.name, *self.path))
        match self.prop:
            case "value":
                return tensor
            case "as_int":
                return f"int({tensor})"
            case "size" | "stride":
                return f"{tensor}.{self.prop}({self.dim})"
            case _:
                return f"{tensor}.{self.prop}()"


def find_sites(graph: torch.fx.Graph, shape_env: Any) -> list[Site]:
    """All sites of a graph's inputs: scalars first, then sizes, strides, offsets and items.

    Raises:
        ShapeEnvError: an input has no fake value, or one of another ``ShapeEnv``.
    """
    by_source = _sites_by_source(shape_env)
    sites: list[Site] = []
    for placeholder in graph.find_nodes(op="placeholder"):
        sites += _sites_of(placeholder, shape_env, by_source)
    return sorted(sites, key=lambda site: _ORDER.index(site.prop))


# --- by the values of the placeholders ----------------------------------------------------------


def _sites_of(
    placeholder: torch.fx.Node, env: Any, by_source: dict[str, list[_SourceSite]]
) -> list[Site]:
    value = value_of(placeholder)
    if value is None and not ({"val", "example_value"} & placeholder.meta.keys()):
        raise ShapeEnvError(
            "an input of the graph has no fake value",
            where=placeholder.name,
            expected='a value in meta["val"] or meta["example_value"]',
            fix="Trace the graph with fake tensors, or run torch.fx.passes.fake_tensor_prop",
        )
    source = source_of(placeholder)
    symbols = [] if source is None else by_source.get(source.name, [])
    if not isinstance(value, torch.Tensor):
        return [_checked(site, value, env) for site in _scalar_sites(placeholder, value)]
    if (
        torch_dispatch.is_functorch_wrapped(value)
        and torch_dispatch.peek_interpreter_stack() is None
    ):
        return []
    sites = list(_tensor_sites(placeholder, (), value, env))
    seen = {(site.prop, site.dim): site.expr for site in sites if not site.path}
    sourced = {(s.prop, s.dim): s.expr for s in symbols}
    # A size that was specialized before the input was made is an integer, but still equals the symbol.
    common = seen.keys() & sourced
    if any(env.replace(seen[key]) != env.replace(sourced[key]) for key in common):  # input changed
        sites = [site for site in sites if site.path]
        seen = {}
    sites = [
        site if site.path else site._replace(expr=sourced.get((site.prop, site.dim), site.expr))
        for site in sites
    ]
    extra = [s for s in symbols if (s.prop, s.dim) not in seen]
    return sites + [Site(placeholder, (), s.prop, s.dim, s.expr) for s in extra]


def _scalar_sites(placeholder: torch.fx.Node, value: Any) -> Iterator[Site]:
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        if (expr := _expr(value)) is not None:
            yield Site(placeholder, (), "value", None, expr)
    elif isinstance(value, torch.SymBool) and (expr := _expr(value)) is not None:
        yield Site(placeholder, (), "as_int", None, _as_int(expr))


def _as_int(condition: sympy.Basic) -> sympy.Basic:
    # Dynamo represents a SymBool input by an integer that is 0 or 1, and the boolean by `Eq(s, 1)`.
    if isinstance(condition, sympy.Eq) and condition.args[1] == 1:
        return condition.args[0]
    return sympy.Piecewise((1, condition), (0, True), evaluate=False)


def _tensor_sites(
    placeholder: torch.fx.Node, path: tuple[str, ...], t: torch.Tensor, env: Any
) -> Iterator[Site]:
    def site(prop: Property, dim: int | None, n: Any) -> Iterator[Site]:
        expr = _expr(n)
        if expr is not None:
            yield _checked(Site(placeholder, path, prop, dim, expr), n, env)

    for dim, n in enumerate(t.size()):
        yield from site("size", dim, n)
    if t.layout is torch.strided:
        for dim, n in enumerate(t.stride()):
            yield from site("stride", dim, n)
        yield from site("storage_offset", None, t.storage_offset())
    if t.ndim == 0 and not path:
        yield from site("item", None, getattr(t, "item_memo", None))
    if torch_fakes.is_traceable_wrapper_subclass(t):
        wrapper: Any = t
        for name in wrapper.__tensor_flatten__()[0]:
            inner = getattr(wrapper, name)
            if isinstance(inner, torch.Tensor):
                yield from _tensor_sites(placeholder, (*path, name), inner, env)


def _expr(n: Any) -> sympy.Basic | None:
    """The expression of a number without replacements; ``None`` for a nested int."""
    if type(n) is int:
        return sympy.Integer(n)
    if not isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return None
    expr = getattr(n.node, "_expr", None)  # a nested int has none
    return expr if isinstance(expr, sympy.Basic) else None


def _checked(site: Site, value: Any, env: Any) -> Site:
    owner = getattr(getattr(value, "node", None), "shape_env", None)
    if owner is not None and owner is not env:
        raise ShapeEnvError(
            "an input of the graph is of another ShapeEnv",
            where=site.text,
            expected="symbols of the ShapeEnv that was passed",
            found=str(site.expr),
            fix="Pass the ShapeEnv of the graph's fake tensors, or refakeify the graph first",
        )
    return site


# --- by the sources of the symbols --------------------------------------------------------------


class _SourceSite(NamedTuple):
    prop: Property
    dim: int | None
    expr: sympy.Symbol


def _sites_by_source(env: Any) -> dict[str, list[_SourceSite]]:
    """The sites of the symbols of a ``ShapeEnv``, by the names of the tensors' sources."""
    sources = torch_dynamo.dynamo_source()
    prop = sources.TensorProperty
    names: dict[Any, Property] = {
        prop.SIZE: "size",
        prop.STRIDE: "stride",
        prop.STORAGE_OFFSET: "storage_offset",
    }
    found: dict[str, list[_SourceSite]] = {}
    for symbol, group in env.var_to_sources.items():
        for source in group:
            match source:
                case sources.TensorPropertySource():
                    site = _SourceSite(names[source.prop], source.idx, symbol)
                    found.setdefault(source.base.name, []).append(site)
                case sources.CallMethodItemSource():
                    found.setdefault(source.base.name, []).append(_SourceSite("item", None, symbol))
                case _ if torch_symbols.is_float_symbol(symbol):
                    # Dynamo passes a Python float as a tensor of one element.
                    found.setdefault(source.name, []).append(_SourceSite("item", None, symbol))
                case _:
                    pass
    return found


# --- nodes ----------------------------------------------------------------------------------------


class SiteReader:
    """Inserts the nodes that read sites; each inner tensor is read once."""

    def __init__(self, lowering: ExprLowering) -> None:
        self._lowering = lowering
        self._tensors: dict[tuple[torch.fx.Node, tuple[str, ...]], torch.fx.Node] = {}
        self._made: list[torch.fx.Node] = []

    def read(self, site: Site) -> Operand:
        """Insert the nodes that read a site; returns the last one."""
        mark = {"what": "compute", "expr": site.text}
        tensor = self._inner(site.placeholder, site.path)
        match site.prop:
            case "value":
                return tensor
            case "as_int":
                return self._call(torch.sym_ite, (tensor, 1, 0), mark)
            case "size":
                return self._call(_aten.sym_size.int, (tensor, site.dim), mark)
            case "stride":
                return self._call(_aten.sym_stride.int, (tensor, site.dim), mark)
            case "storage_offset":
                return self._call(_aten.sym_storage_offset.default, (tensor,), mark)
            case "item":
                return self._call(_aten._local_scalar_dense.default, (tensor,), mark)

    def _inner(self, placeholder: torch.fx.Node, path: tuple[str, ...]) -> torch.fx.Node:
        if not path:
            return placeholder
        cached = self._tensors.get((placeholder, path))
        if cached is None:
            outer = self._inner(placeholder, path[:-1])
            text = ".".join((placeholder.name, *path))
            mark = {"what": "compute", "expr": text}
            cached = self._call(getattr, (outer, path[-1]), mark)
            self._tensors[placeholder, path] = cached
        return cached

    def _call(self, target: Any, args: tuple[Any, ...], mark: Mapping[str, str]) -> torch.fx.Node:
        fx_node = self._lowering.call(target, args, mark)
        self._made.append(fx_node)
        return fx_node

    def drop_unused(self) -> None:
        """Remove the nodes that no inserted condition uses."""
        for fx_node in reversed(self._made):
            if not fx_node.users:
                self._lowering.graph.erase_node(fx_node)
