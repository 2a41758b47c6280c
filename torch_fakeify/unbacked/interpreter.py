"""The interpreter of `retrace`: runs a graph and its bodies and maps their symbols to new ones."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch.fx.node import map_aggregate
from torch.types import py_sym_types

from torch_fakeify.compat import (
    torch_fakes,
    torch_graphs,
    torch_symbols,
)
from torch_fakeify.errors import ShapeEnvError
from torch_fakeify.replay.bindings import (
    Binding,
    PathEntry,
    atom_of,
    canonical_symbol,
    canonical_symbols_in,
    expr_of,
    find_bindings,
    follow,
    is_flag,
    mode_or_none,
    path_text,
    raw_path,
    symbols_in,
    visible_symbols,
)
from torch_fakeify.replay.lowering import attribute_of, value_key, value_of
from torch_fakeify.transfer.refakeifier import refakeify

from .allocations import (
    AllocationLog,
    Memos,
    RequestedSymbols,
    RunResult,
    number_like,
    run_again,
    run_with_symbols,
)
from .facts import DeferredFacts
from .fx_runs import (
    calls_of,
    fake_cache,
    is_lifted,
    running_as,
    set_attribute,
    snapshot,
    tensor_metadata,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


def _copied(
    gm: torch.fx.GraphModule, done: dict[int, torch.fx.GraphModule]
) -> torch.fx.GraphModule:
    """Copies of a graph and its bodies with copied metadata, each one once."""
    if id(gm) in done:
        return done[id(gm)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Raw Sym", UserWarning)
        graph = copy.deepcopy(gm.graph)
    for new, old in zip(graph.nodes, gm.graph.nodes, strict=True):
        new.meta = dict(old.meta)
    made = torch.fx.GraphModule(gm, graph, type(gm).__name__)
    done[id(gm)] = made
    made.meta = dict(gm.meta)
    own = vars(made)
    own.update({name: value for name, value in vars(gm).items() if name not in own})
    for fx_node in graph.find_nodes(op="get_attr"):
        body = attribute_of(made, fx_node.target)
        if isinstance(body, torch.fx.GraphModule):
            set_attribute(made, fx_node.target, _copied(body, done))
    return made


# --- all graphs of one retrace --------------------------------------------------------------------


class RetraceRun:
    """The state of a retrace, shared by a graph and its bodies: symbols, facts, allocations."""

    def __init__(
        self,
        original: Any,
        mode: Any,
        *,
        allow_gone: bool,
        logs: Mapping[tuple[int, str], AllocationLog] | None = None,
    ) -> None:
        self.original = original
        self.mode = mode
        self.env = mode.shape_env
        self.allow_gone = allow_gone
        self.facts = DeferredFacts(original, self.env)
        self.bound: dict[Any, Any] = {}
        self.inputs: dict[Any, Any] = {}
        self.gone: dict[Any, Any] = {}
        self.bindings: dict[Any, str] = {}
        self.loops: set[Any] = set()
        """New symbols of the inputs of bodies."""
        self.logs: dict[tuple[int, str], AllocationLog] = {}
        """The allocations of each node, by graph number and node name."""
        self.earlier = logs
        """The allocations of an earlier run to replay; a tracer then makes the new graph."""
        self._numbers: dict[int, int] = {}
        self._within: list[int] = []
        self._homes: dict[Any, int] = {}
        """The number of the graph that binds each symbol; 0 is the outermost."""
        self._done: set[int] = set()
        self._attributes: dict[int, tuple[Any, Any]] = {}

    def copied(self, gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """A copy of the graph to run, whose nodes get new values."""
        done: dict[int, torch.fx.GraphModule] = {}
        made = _copied(gm, done)
        self._numbers = {id(copy): i for i, copy in enumerate(done.values())}
        return made

    def graph(self, gm: torch.fx.GraphModule, values: Sequence[Any]) -> Any:
        """Run one graph, store the new values in its nodes, and return its result."""
        self._done.add(id(gm))
        number = self._numbers[id(gm)]
        self._within.append(number)
        self._inputs(gm.graph.find_nodes(op="placeholder"), values)
        result = _Run(self, gm, number).run(*values, enable_io_processing=False)
        self._within.pop()
        return result

    def is_in_scope(self, old: Any) -> bool:
        """Whether the running graph has the new number for an old symbol.

        A symbol that a body binds is out of scope around it, though a memo may refer to it there (torch
        2.13 then has it in the value of an operator that does not bind it).
        """
        return old in self.facts.symbols and self._homes.get(old, 0) in self._within

    def name(self, symbol: Any) -> Any:
        """The canonical symbol for an old symbol after earlier retraces."""
        return symbol if self.original is None else canonical_symbol(symbol, self.original)

    # --- inputs -----------------------------------------------------------------------------------

    def _inputs(self, placeholders: Sequence[torch.fx.Node], values: Sequence[Any]) -> None:
        for placeholder, value in zip(placeholders, values, strict=True):
            if type(value) is torch_fakes.FakeTensor:
                self._remember_item(value_of(placeholder), value)
            for old, new in _pairs(value_of(placeholder), value):
                if isinstance(old, sympy.Symbol):
                    self._input(placeholder, self.name(old), new)
        self.facts.state()

    def _remember_item(self, old: Any, value: Any) -> None:
        """Preserve the ``item()`` memo of an input in the new epoch, if it is backed.

        A specialized one becomes its constant, since a copied input has no memo.
        """
        memo, old_memo = (getattr(t, "_item_memo", None) for t in (value, old))
        if memo is None and isinstance(old_memo, py_sym_types) and old_memo.node.hint is not None:
            final: Any = old_memo.node.expr
            memo = old_memo.node.pytype(final) if final.is_number else None
        if not isinstance(memo, py_sym_types) or memo.node.hint is not None:
            value.item_memo = memo

    def _input(self, placeholder: torch.fx.Node, old: sympy.Symbol, new: sympy.Basic) -> None:
        before = self.facts.symbols.get(old)
        if before is None:
            self.inputs[old] = new
            self.facts.bind(old, new)
        elif not self.is_in_scope(old):
            return  # of another body
        elif before != new and not self.env.evaluate_expr(sympy.Eq(before, new)):
            raise ShapeEnvError(
                "the inputs do not fit the graph",
                where=placeholder.name,
                expected=f"{before}, as another input has for {old}",
                found=str(new),
            )

    # --- binding sites ----------------------------------------------------------------------------

    def sites_of(self, graph: torch.fx.Graph) -> dict[torch.fx.Node, dict[Any, Binding]]:
        """The binding sites of a graph by node; its nodes must have their old values."""
        if self.original is None:
            return {}
        values = [value_of(fx_node) for fx_node in graph.nodes]
        known = self.original.replacements.keys() | self.inputs.keys()
        requested = canonical_symbols_in(values, self.original) - known
        sites: dict[torch.fx.Node, dict[Any, Binding]] = {}
        for symbol, site in find_bindings(graph, self.original, requested).items():
            if site.fx_node.op != "placeholder" and symbol not in self.facts.symbols:
                sites.setdefault(site.fx_node, {})[symbol] = site
        return sites

    def bind(self, old: Any, new: Any, site: str) -> None:
        """Bind a new symbol at a site; it is the counterpart of an old one, unless that is ``None``."""
        if new in self.bindings:
            raise ShapeEnvError(
                "one symbol would be bound twice",
                where=site,
                expected=f"a symbol of its own for {old}",
                found=f"{new}, which {self.bindings[new]} binds",
                fix="The nodes have become one computation: transplant the second one",
            )
        self.bindings[new] = site
        if old is not None:
            self.bound[old] = new
            self._homes[old] = self._within[-1]
            self.facts.bind(old, new)

    def mark_lost(self, old: Any, site: str, found: Any) -> None:
        """Record that a site has a number instead of a symbol, or raise an error."""
        expr = expr_of(found)
        if expr is None or not self.allow_gone:
            raise ShapeEnvError(
                "a binding site is gone",
                where=site,
                expected=f"an unbacked symbol, as {old} was",
                found="nothing" if expr is None else str(expr),
                fix="allow_gone=True takes what is there" if expr is not None else None,
            )
        self.gone[old] = expr
        self.facts.bind(old, expr)

    # --- values of the old environment ------------------------------------------------------------

    def scalar(self, n: Any) -> Any:
        """Convert an old symbolic number; ``None`` if it has a symbol without a counterpart."""
        expr = None if self.original is None else expr_of(n)
        if expr is None or n.node.shape_env is not self.original:
            return n
        new = self.facts.to_fresh(expr)
        if new is None:
            return None
        python_type = n.node.pytype
        if not new.free_symbols:
            return python_type(new)
        hints = self.env.backed_var_to_val
        backed = new.free_symbols <= hints.keys()
        hint = (
            python_type(new.xreplace({s: hints[s] for s in new.free_symbols})) if backed else None
        )
        return torch_symbols.make_sym(python_type.__name__, new, self.env, hint)

    def attribute(self, value: Any) -> Any:
        """Convert an attribute of a module: a tensor becomes a fake one, each one once."""
        if not isinstance(value, torch.Tensor) or mode_or_none(value) is self.mode:
            return value
        cached = self._attributes.get(id(value))
        if cached is None:
            if mode_or_none(value) is None:
                made = self.mode.from_tensor(value, static_shapes=True)
            else:
                made = refakeify(value, self.mode)
            cached = self._attributes[id(value)] = (value, made)
        return cached[1]

    # --- bodies of higher-order operators ---------------------------------------------------------

    def body(self, body: torch.fx.GraphModule, args: Sequence[Any] | None) -> None:
        """Run a body on the arguments of its operator's call, if any, and store the new values in it."""
        if id(body) in self._done:
            return
        placeholders = body.graph.find_nodes(op="placeholder")
        called = args if args is not None and len(args) == len(placeholders) else None
        if called is None and any(value_of(fx_node) is None for fx_node in placeholders):
            return  # its arguments are unknown
        values: list[Any] = []
        for i, placeholder in enumerate(placeholders):
            arg = None if called is None else called[i]
            values.append(self._body_input(placeholder, arg, called=called is not None))
        memos = Memos(values)
        self.graph(body, values)
        memos.restore()  # symbols of the body are out of scope outside

    def body_run(self, body: torch.fx.GraphModule, args: Sequence[Any]) -> Any:
        """Run a body that its operator traces; returns ``None`` if it was traced before."""
        if id(body) in self._done or len(args) != len(body.graph.find_nodes(op="placeholder")):
            return None
        with torch_graphs.preserve_node_meta():
            return self.graph(body, args)

    def _body_input(self, placeholder: torch.fx.Node, arg: Any, *, called: bool) -> Any:
        old = value_of(placeholder)
        if isinstance(old, py_sym_types):
            return self._body_scalar(placeholder, old)
        if called and (not isinstance(arg, torch.Tensor) or mode_or_none(arg) is self.mode):
            return arg
        if not isinstance(old, torch.Tensor):
            return old
        size, stride = [
            [
                self._body_scalar(placeholder, n) if isinstance(n, py_sym_types) else n
                for n in numbers
            ]
            for numbers in (old.size(), old.stride())
        ]
        if torch_fakes.is_traceable_wrapper_subclass(old) or old.layout is not torch.strided:
            raise ShapeEnvError(
                "no value for an input of a body that its operator does not run",
                where=placeholder.name,
                found=type(old).__name__,
            )
        return torch.empty_strided(size, stride, dtype=old.dtype, device=old.device)

    def _body_scalar(self, placeholder: torch.fx.Node, old: Any) -> Any:
        """Convert a symbolic input of a body; one of the body alone, such as a counter, gets a new symbol."""
        for symbol in symbols_in(old):
            name = self.name(symbol)
            if name in self.facts.symbols:
                continue
            is_float = isinstance(old, torch.SymFloat)
            with self.env.ignore_fresh_unbacked_symbols():
                env = self.env
                made = env.create_unbacked_symfloat() if is_float else env.create_unbacked_symint()
            self.bind(name, made.node.expr, placeholder.name)
            self.loops.add(made.node.expr)
        self.facts.state()
        return self.scalar(old)


def _pairs(old: Any, new: Any) -> Iterator[tuple[sympy.Basic, sympy.Basic]]:
    """The pairs of symbolic numbers at the same places of two values."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        yield from _pairs(tuple(old.size()), tuple(new.size()))
        if old.layout is torch.strided and new.layout is torch.strided:
            yield from _pairs(tuple(old.stride()), tuple(new.stride()))
            yield from _pairs(old.storage_offset(), new.storage_offset())
        memo, other = (getattr(t, "_item_memo", None) for t in (old, new))
        if isinstance(memo, py_sym_types) and memo.node.hint is not None:
            yield from _pairs(memo, other)
        if torch_fakes.is_traceable_wrapper_subclass(old) and type(old) is type(new):
            wrappers: tuple[Any, Any] = (old, new)
            for name in wrappers[0].__tensor_flatten__()[0]:
                yield from _pairs(*(getattr(w, name) for w in wrappers))
    elif isinstance(old, (tuple, list)) and isinstance(new, (tuple, list)):
        items: Any = zip(old, new, strict=False)  # pyright: ignore[reportUnknownArgumentType]
        for pair in items:
            yield from _pairs(*pair)
    elif isinstance(old, py_sym_types):
        left, right = expr_of(old), expr_of(new)
        if left is None or right is None:
            return
        if is_flag(left) and is_flag(right):
            left, right = left.args[0], right.args[0]
        yield left, right


# --- one graph ------------------------------------------------------------------------------------


class _Run(torch.fx.Interpreter):
    """Runs one graph and stores each new value in its node."""

    def __init__(self, owner: RetraceRun, gm: torch.fx.GraphModule, number: int) -> None:
        super().__init__(gm)
        self._owner = owner
        self._number = number
        self._gm = gm
        self._key = value_key(gm.graph)
        self._sites = owner.sites_of(gm.graph)
        self._values: dict[torch.fx.Node, Any] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        with self._set_current_node(n):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            args, kwargs = map_aggregate((args, kwargs), self._constant)
            if n.op in ("placeholder", "output"):
                result = getattr(self, n.op)(n.target, args, kwargs)
                self._note(n, result, None)
            elif n.op == "get_attr":
                result = self._attribute(n)
            else:
                result = self._call(n, args, kwargs)
        if any(isinstance(a, py_sym_types) for a in torch_graphs.tree_leaves((n.args, n.kwargs))):
            n.args, n.kwargs = map_aggregate((n.args, n.kwargs), self._constant)
        return result

    def _constant(self, value: Any) -> Any:
        if not isinstance(value, py_sym_types):
            return value
        new = self._owner.scalar(value)
        if new is None:
            raise ShapeEnvError(
                "an argument is a number that nothing before it binds", where=str(value)
            )
        return new

    def _attribute(self, n: torch.fx.Node) -> Any:
        value = self.fetch_attr(str(n.target))
        fake = self._owner.attribute(value)
        if isinstance(value, torch.Tensor) and mode_or_none(value) not in (None, self._owner.mode):
            set_attribute(self._gm, str(n.target), fake)
        if isinstance(value, torch.Tensor):
            self._note(n, fake, None)
        return value if is_lifted(n) else fake  # lifting records the value of a real constant

    # --- calls ------------------------------------------------------------------------------------

    def _call(self, n: torch.fx.Node, args: Any, kwargs: Any) -> Any:
        owner = self._owner
        values = torch_graphs.tree_leaves((args, kwargs))
        bodies = [v for v in values if isinstance(v, torch.fx.GraphModule)]
        checked = not bodies and bool(n in self._sites or symbols_in(value_of(n)))

        def target() -> Any:
            # A cached result would run no body and allocate no symbols.
            with fake_cache(owner.mode, on=not (bodies or checked)):
                return self._target(n, args, kwargs)

        key = (self._number, n.name)
        if owner.earlier is not None:
            log = owner.earlier.get(key)
            if log is None:
                return target()
            with running_as(bodies, owner.body_run), torch_graphs.preserve_node_meta(not bodies):
                result = run_again(owner.env, target, (args, kwargs), log, owner.bindings)
            self._bind(n, result)
            return result.value
        with calls_of(bodies) as called:
            request = (lambda result: self._requested_symbols(n, result)) if checked else None
            result = run_with_symbols(owner.env, target, (args, kwargs), request)
        self._bind(n, result)
        if result.log.numbers or bodies:
            owner.logs[key] = result.log
        for body in bodies:
            with torch_graphs.around_body(n.target):
                owner.body(body, called.get(id(body)))
        self._note(n, result.value, result.paths)
        return result.value

    def _target(self, n: torch.fx.Node, args: Any, kwargs: Any) -> Any:
        if n.op != "call_module":
            return getattr(self, n.op)(n.target, args, kwargs)
        module = self.fetch_attr(str(n.target))
        state = {
            name: self._owner.attribute(t)
            for name, t in (*module.named_parameters(), *module.named_buffers())
        }
        return torch.func.functional_call(module, state, args, kwargs)

    def _sites_at(self, n: torch.fx.Node) -> dict[Any, Binding]:
        """The binding sites of a node without symbols in scope already: a pass may reorder nodes."""
        is_in_scope = self._owner.is_in_scope
        return {s: site for s, site in self._sites.get(n, {}).items() if not is_in_scope(s)}

    def _requested_symbols(self, n: torch.fx.Node, result: RunResult) -> RequestedSymbols | None:
        """The symbols that the result should have by the old value; ``None`` if it has them."""
        owner, old = self._owner, value_of(n)
        sites = self._sites_at(n)
        if old is None:
            return None
        requested: dict[tuple[PathEntry, ...], Any] = {}
        for symbol, path in visible_symbols(old):
            name = owner.name(symbol)
            if name not in sites and owner.is_in_scope(name):
                place = raw_path(path)
                requested[place] = number_like(
                    follow(old, place), owner.facts.symbols[name], owner.env
                )
        bound = {raw_path(path) for path in result.bound.values()}
        expected = {raw_path(site.path) for site in sites.values()}
        if requested.keys() & bound:
            return RequestedSymbols(requested)  # it would make a symbol for a number that has one
        for place in expected - bound:
            atom = atom_of(expr_of(follow(result.value, place)))
            if atom is not None:
                return RequestedSymbols(requested)  # a memo has the symbol of another site
        if sites or not requested or not bound.isdisjoint(expected):
            return None
        return None if self._agrees(result.value, requested) else RequestedSymbols(requested)

    def _agrees(self, value: Any, requested: Mapping[tuple[PathEntry, ...], Any]) -> bool:
        """Whether a value has the requested numbers, where it has unbacked symbols."""
        env = self._owner.env
        for place, number in requested.items():
            atom = atom_of(expr_of(follow(value, place)))
            right = atom_of(expr_of(number))
            if None not in (atom, right) and env.replace(atom) != env.replace(right):
                return False
        return True

    def _bind(self, n: torch.fx.Node, result: RunResult) -> None:
        owner = self._owner
        sites = self._sites_at(n)
        places = {raw_path(site.path): symbol for symbol, site in sites.items()}
        for new, path in result.bound.items():
            place = raw_path(path)
            symbol = places.get(place) or self._old_at(n, place)
            text = path_text(n.name, path)
            if symbol in sites or (symbol is not None and symbol not in owner.facts.symbols):
                owner.bind(symbol, new, text)
                sites.pop(symbol, None)
            elif value_of(n) is not None and (symbol is None or owner.is_in_scope(symbol)):
                raise ShapeEnvError(
                    "a node finds a number in its data that it did not find before",
                    where=text,
                    expected=str(expr_of(follow(value_of(n), place))),
                    found=str(new),
                    fix="The inputs are not those of the frame that the graph was traced for",
                )
            else:
                owner.bind(None, new, text)
        for symbol, site in sites.items():
            self._missing(symbol, site, result)
        owner.facts.state()

    def _old_at(self, n: torch.fx.Node, place: tuple[PathEntry, ...]) -> Any:
        atom = atom_of(expr_of(follow(value_of(n), place)))
        return None if atom is None else self._owner.name(atom)

    def _missing(self, symbol: Any, site: Binding, result: RunResult) -> None:
        found = follow(result.value, raw_path(site.path))
        atom = atom_of(expr_of(found))
        if atom is not None and atom in self._owner.bindings:
            self._owner.bind(symbol, atom, site.text)  # raises an error that names the other site
        else:
            self._owner.mark_lost(symbol, site.text, found)

    # --- metadata ---------------------------------------------------------------------------------

    def _note(self, n: torch.fx.Node, value: Any, paths: Mapping[Any, Any] | None) -> None:
        if self._owner.earlier is not None:
            return  # the tracer stores new values, and the old ones are still needed
        meta = n.meta
        self._values[n] = value
        noted = snapshot(value) if self._key == "val" and n.op != "placeholder" else value
        for key in ("val", "example_value"):
            if key in meta or (key == self._key and value is not None and n.op != "output"):
                meta[key] = noted
        notes: Mapping[Any, Any] = meta.pop("unbacked_bindings", None) or {}
        if paths:
            meta["unbacked_bindings"] = dict(paths)
        elif n.op == "placeholder" and notes:
            meta["unbacked_bindings"] = {
                self._owner.facts.symbols.get(self._owner.name(s), s): p for s, p in notes.items()
            }
        for key in ("eager_input_vals", "arg_kwarg_vals"):
            if key in meta:
                meta[key] = map_aggregate((n.args, n.kwargs), self._argument)
        if "tensor_meta" in meta:
            meta["tensor_meta"] = tensor_metadata(value)
        if "grapharg" in meta:
            meta["grapharg"] = arg = copy.copy(meta["grapharg"])
            if getattr(arg, "fake_tensor", None) is not None:
                arg.fake_tensor = value
        for key in [k for k, v in meta.items() if self._is_old(v)]:
            meta[key] = torch_graphs.tree_map(self._to_fresh, meta[key])
            if self._is_old(meta[key]):
                del meta[key]

    def _argument(self, value: Any) -> Any:
        return self._values.get(value) if isinstance(value, torch.fx.Node) else value

    def _is_old(self, value: Any) -> bool:
        return any(
            leaf.node.shape_env is self._owner.original
            if isinstance(leaf, py_sym_types) and hasattr(leaf.node, "shape_env")
            else mode_or_none(leaf) not in (None, self._owner.mode)
            for leaf in torch_graphs.tree_leaves(value)
        )

    def _to_fresh(self, leaf: Any) -> Any:
        if isinstance(leaf, py_sym_types):
            new = self._owner.scalar(leaf)
            return leaf if new is None else new
        return leaf
