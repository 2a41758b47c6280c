"""The sites of a graph's inputs that hold symbols of a ``ShapeEnv``.

The sites are those that ``ShapeEnv.produce_guards`` tracks (torch 2.13): scalars, sizes, strides and
storage offsets of tensors and of the inner tensors of wrapper subclasses, and the ``item()`` of
tensors. A functorch wrapper has none: no operator reads its sizes outside its transform. For an input
that a frontend changed while tracing (``resize_``, ``transpose_``) the sites come from the sources of
the symbols instead of the fake tensor.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import sympy
import torch
from torch.types import py_sym_types

from torch_fakeify.compat import torch_dispatch, torch_dynamo, torch_symbols
from torch_fakeify.encoding.sources import source_of
from torch_fakeify.errors import ShapeEnvError

from .bindings import PathEntry, env_or_none, expr_of, path_text, tensor_numbers
from .lowering import value_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_ORDER = ("value", "as_int", "size", "stride", "storage_offset", "item")


class Site(NamedTuple):
    """A number of one of a graph's inputs."""

    placeholder: torch.fx.Node
    path: tuple[PathEntry, ...]
    """The path from the input to the number, as in `Binding`; ``item`` is the number of a tensor."""
    expr: sympy.Basic
    """Its expression in the ``ShapeEnv``, before replacements."""

    @property
    def prop(self) -> str:
        """The last access of the path; ``value`` for the input itself."""
        return self.path[-1][0] if self.path else "value"

    @property
    def text(self) -> str:
        """The site as Python over the names of the graph's inputs."""
        return path_text(self.placeholder.name, self.path)


def find_sites(graph: torch.fx.Graph, shape_env: Any) -> list[Site]:
    """All sites of a graph's inputs: scalars first, then sizes, strides, offsets and items.

    Raises:
        ShapeEnvError: an input has no fake value, or one of another ``ShapeEnv``.
    """
    by_source = _numbers_by_source(shape_env)
    sites: list[Site] = []
    for placeholder in graph.find_nodes(op="placeholder"):
        sites += _sites_of(placeholder, shape_env, by_source)
    return sorted(sites, key=lambda site: _ORDER.index(site.prop))


def site_texts(sites: Sequence[Site]) -> dict[Any, str]:
    """The text of the first site of each expression, with numbers of tensors before scalar inputs.

    Dynamo names a scalar input after its symbol; the size is a better name.
    """
    ordered = sorted(sites, key=lambda site: site.prop in ("value", "as_int"))
    return {site.expr: site.text for site in reversed(ordered)}


# --- by the values of the placeholders ----------------------------------------------------------


def _sites_of(
    placeholder: torch.fx.Node, env: Any, by_source: Mapping[str, Sequence[_SourceNumber]]
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
        return list(_scalar_sites(placeholder, value, env))
    if (
        torch_dispatch.is_functorch_wrapped(value)
        and torch_dispatch.peek_interpreter_stack() is None
    ):
        return []
    sites = list(_tensor_sites(placeholder, value, env))
    seen = {site.path: site.expr for site in sites if len(site.path) == 1}
    sourced = dict(symbols)
    # A size that was specialized before the input was made is an integer, but still equals the symbol.
    common = seen.keys() & sourced
    if any(env.replace(seen[path]) != env.replace(sourced[path]) for path in common):
        sites = [site for site in sites if site.path not in seen]  # the input was changed
        seen = {}
    sites = [site._replace(expr=sourced.get(site.path, site.expr)) for site in sites]
    return sites + [Site(placeholder, path, expr) for path, expr in symbols if path not in seen]


def _scalar_sites(placeholder: torch.fx.Node, value: Any, env: Any) -> Iterator[Site]:
    expr = expr_of(value) if isinstance(value, py_sym_types) else None
    if expr is None:
        return
    if isinstance(value, torch.SymBool):
        yield _checked(Site(placeholder, (("as_int",),), _as_int(expr)), value, env)
    else:
        yield _checked(Site(placeholder, (), expr), value, env)


def _as_int(condition: sympy.Basic) -> sympy.Basic:
    # Dynamo represents a SymBool input by an integer that is 0 or 1, and the boolean by `Eq(s, 1)`.
    if isinstance(condition, sympy.Eq) and condition.args[1] == 1:
        return condition.args[0]
    return sympy.Piecewise((1, condition), (0, True), evaluate=False)


def _tensor_sites(placeholder: torch.fx.Node, t: torch.Tensor, env: Any) -> Iterator[Site]:
    numbers = [(path, n) for path, n in tensor_numbers(t) if path[-1][0] in _ORDER]
    memo = getattr(t, "item_memo", None) if t.ndim == 0 else None
    if type(memo) in (int, *py_sym_types):
        numbers.append(((("item",),), memo))
    for path, n in numbers:
        expr = expr_of(n)
        if expr is not None:
            yield _checked(Site(placeholder, path, expr), n, env)


def _checked(site: Site, value: Any, env: Any) -> Site:
    if env_or_none(value) not in (None, env):
        raise ShapeEnvError(
            "an input of the graph is of another ShapeEnv",
            where=site.text,
            expected="symbols of the ShapeEnv that was passed",
            found=str(site.expr),
            fix="Pass the ShapeEnv of the graph's fake tensors, or refakeify the graph first",
        )
    return site


# --- by the sources of the symbols --------------------------------------------------------------

_SourceNumber: TypeAlias = tuple[tuple[PathEntry, ...], sympy.Symbol]
"""The path from a tensor to a number, and the number's symbol."""


def _numbers_by_source(env: Any) -> dict[str, list[_SourceNumber]]:
    """The numbers of tensors that have symbols of a ``ShapeEnv``, by the names of the tensors' sources."""
    sources = torch_dynamo.dynamo_source()
    found: defaultdict[str, list[_SourceNumber]] = defaultdict(list)
    for symbol, group in env.var_to_sources.items():
        for source in group:
            match source:
                case sources.TensorPropertySource():
                    dim = () if source.idx is None else (source.idx,)
                    path = ((source.prop.name.lower(), *dim),)
                    found[source.base.name].append((path, symbol))
                case sources.CallMethodItemSource():
                    found[source.base.name].append(((("item",),), symbol))
                case _ if torch_symbols.is_float_symbol(symbol):
                    # Dynamo passes a Python float as a tensor of one element.
                    found[source.name].append(((("item",),), symbol))
                case _:
                    pass
    return found
