"""``refakeify``: convert fake tensors of one ``FakeTensorMode`` to another.

Method: all tensors are described and converted, as real ones would be, by one describer and one
converter, so shared tensors, storages, bases and symbols remain shared. Symbols are converted with
their hints, value ranges and the other fields of `SymbolFactDesc`; sizes, strides and offsets are the
same expressions over the new symbols. Guards and runtime asserts are not transferred (`snapshot` and
`restore` do that).

Torch's ``from_tensor`` for a tensor of another ``ShapeEnv``
(``transfer_symbols_from_foreign_shape_env``, torch 2.13) makes new symbols from the hints instead.
"""

from __future__ import annotations

import copy
import dataclasses
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import sympy
import torch
from torch.fx.node import map_aggregate, map_arg

from torch_fakeify.compat import torch_dynamo, torch_fakes, torch_graphs, torch_symbols
from torch_fakeify.convert.converter import MetaConverter
from torch_fakeify.describe.describer import MetaTensorDescriber
from torch_fakeify.encoding.exprs import decode_expr, encode_expr, encode_sym
from torch_fakeify.encoding.nested_ints import is_nested_int
from torch_fakeify.errors import ConvertError, FakeifyError, UnsupportedTensorError
from torch_fakeify.records.symbol_names import rename_symbols

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch_fakeify.compat.torch_fakes import FakeTensorMode
    from torch_fakeify.records.frame import InputDesc
    from torch_fakeify.records.tensor import SymbolFactDesc, SymDesc

    from .fresh_env import FreshEnv

_T = TypeVar("_T")

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)

_NO_VALUES = frozenset({
    "stack_trace", "nn_module_stack", "fwd_nn_module_stack", "source_fn_stack",
    "fwd_source_fn_stack", "torch_fn", "from_node", "original_aten", "output_stack_traces",
})  # fmt: skip
"""Keys of a node's metadata that describe its origin, not its value."""


def refakeify(tree: _T, mode: FakeTensorMode) -> _T:
    """Convert the fake tensors of other modes in a structure to fake tensors of ``mode``.

    Leaves (``torch.utils._pytree``) are converted as follows:

    - a fake tensor of ``mode`` is returned unchanged. One of another mode, also inside a wrapper
      subclass, a functional tensor or a functorch wrapper, is converted: its symbols are the same if
      both modes have one ``ShapeEnv``, new symbols in a different ``ShapeEnv``, and hints in a mode
      without one.
    - a symbolic scalar of another ``ShapeEnv`` is over the same new symbols as the tensors' sizes.
    - a real tensor becomes the result of ``mode.from_tensor`` without a source and a policy, with a
      symbol for every dim.
    - a ``torch.fx.Graph`` or ``GraphModule`` is copied, with the tensors and scalars in the metadata
      and arguments of its nodes converted, also in the graphs that it calls. Real tensors, such as
      its parameters, are shared with the original. Of another module only the changed parts are
      copied.
    - all others are returned unchanged.

    A tensor, storage or symbol that several leaves share remains shared, and views remain views. The
    data that a fake tensor holds beside its metadata (a constant's value, the real tensor of
    ``propagate_real_tensors``, the memo of ``nonzero()``) is not transferred. Nothing is shared with
    fakes that ``mode`` made before.

    Raises:
        ConvertError: an unbacked symbol for a mode without a ``ShapeEnv``; or the mode cannot have
            such a tensor.
        UnsupportedTensorError: the tensor has a property that a record cannot hold; or the inner
            tensors of a subclass are of several modes.

    Example:
        >>> from torch._subclasses import FakeTensorMode
        >>> x, mode = FakeTensorMode().from_tensor(torch.ones(2)), FakeTensorMode()
        >>> tfk.refakeify([x], mode)[0].fake_mode is mode
        True
    """
    return Refakeifier(mode).tree(tree)


class _Facts(NamedTuple):
    """The symbols of a scalar or an expression, in the form of a tensor record's."""

    symbols: tuple[SymbolFactDesc, ...]


class Refakeifier:
    """Converts tensors and scalars to one mode, each once."""

    def __init__(
        self,
        mode: FakeTensorMode,
        describer: MetaTensorDescriber | None = None,
        converter: MetaConverter | None = None,
    ) -> None:
        self._mode = mode
        self._describer = describer or MetaTensorDescriber()
        self._converter = converter or MetaConverter(mode)
        self._sizes = self._converter._sizes
        self._env: Any = None if self._sizes is None else mode.shape_env
        # By the id of the original object, to which the entry refers.
        self._done: dict[int, tuple[Any, Any]] = {}
        self._numbers: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        """Scalars by kind, constant, hint and the ids of expression and environment, with these two."""
        self._bound_by_nodes: set[sympy.Symbol] = set()
        if self._sizes is not None:
            self._sizes.use_symbols_of(self._describer._syms.env_id(self._env))
            # Makes sources unique: the symbols of each earlier call increased this number.
            self._first = len(self._env.source_to_var)

    def tree(self, tree: Any) -> Any:
        """A structure with its leaves converted."""
        ignored = nullcontext() if self._env is None else self._env.ignore_fresh_unbacked_symbols()
        with ignored:  # no operator of this trace binds them
            made = torch_graphs.tree_map_with_path(self._leaf_at, tree, is_leaf=_is_size)
        if self._env is not None:
            self._env.unbacked_inputs.difference_update(self._bound_by_nodes)
        return made

    def _leaf_at(self, path: tuple[Any, ...], leaf: Any) -> Any:
        try:
            return self._leaf(leaf, real_too=True)
        except FakeifyError as error:
            if path:
                here = f"leaf {torch_graphs.keystr(path)}"
                error.where = here if error.where is None else f"{here}, {error.where}"
            raise

    def _leaf(self, leaf: Any, *, real_too: bool) -> Any:
        match leaf:
            case torch.Tensor():
                return self._tensor(leaf, real_too=real_too)
            case torch.SymInt() | torch.SymFloat() | torch.SymBool():
                return self._scalar(leaf)
            case torch.Size():
                sizes = [self._leaf(n, real_too=real_too) for n in leaf]
                return leaf if _same(sizes, leaf) else torch.Size(sizes)
            case slice():
                ends = (leaf.start, leaf.stop, leaf.step)
                made = [self._leaf(n, real_too=real_too) for n in ends]
                return leaf if _same(made, ends) else slice(*made)
            case torch.fx.Graph():
                return self._memoized(leaf, self._graph)
            case torch.nn.Module():
                return self._memoized(leaf, self._module)
            case torch_fakes.FakeScriptObject():  # a fake of a TorchBind object may contain fakes
                return self._memoized(
                    leaf, lambda o: torch_fakes.maybe_to_fake_obj(self._mode, o.real_obj)
                )
            case _:
                return leaf

    def _memoized(self, old: Any, make: Callable[[Any], Any]) -> Any:
        cached = self._done.get(id(old))
        if cached is None:
            cached = self._done[id(old)] = (old, make(old))
        return cached[1]

    # --- tensors and scalars ----------------------------------------------------------------------

    def _tensor(self, t: torch.Tensor, *, real_too: bool) -> torch.Tensor:
        try:
            is_plain = type(t) is torch_fakes.FakeTensor
            mode = t.fake_mode if is_plain else torch_fakes.maybe_get_fake_mode(t)
        except AssertionError as error:
            raise UnsupportedTensorError(
                "the inner tensors of a wrapper subclass are of several fake modes",
                where=f"a {type(t).__name__}",
                fix="Make one of inner tensors of one mode",
            ) from error
        if mode is self._mode or (mode is None and not real_too):
            return t
        return self._memoized(t, self._made)

    def _made(self, t: torch.Tensor) -> torch.Tensor:
        d = self._describer.describe_tensor(t)
        source = None
        if self._env is not None:
            name = f"__refakeify_{self._first}_{len(self._done)}"
            source = torch_dynamo.dynamo_source().ConstantSource(name)
        return self._converter.from_desc(d, source=source)

    def _scalar(self, n: Any) -> Any:
        sym_node = n.node
        if isinstance(n, torch.SymInt) and sym_node.is_nested_int():
            return self._converter._nested_ints.make(self._describer._syms.encode_int(n))  # pyright: ignore[reportArgumentType]
        env = getattr(sym_node, "shape_env", None)
        if env is None or env is self._env:
            return n
        hint = sym_node.hint
        if not self._converter.shares_sizes or is_nested_int(hint):
            return self._made_scalar(n)
        expr = sym_node.expr
        key = (id(expr), id(env), hint, sym_node.pytype, sym_node.constant)
        cached = self._numbers.get(key)
        if cached is None:
            cached = self._numbers[key] = ((expr, env), self._made_scalar(n))
        return cached[1]

    def _made_scalar(self, n: Any) -> Any:
        sym_node = n.node
        sym = encode_sym(n)
        if self._sizes is None:
            if sym.hint is None:
                raise _no_value(sym_node.expr)
            return self._live_hint(sym)
        facts = _Facts(self._describer._syms.facts((n,)))
        expr = self._sizes.expression(decode_expr(sym.expr), facts)
        hint = self._live_hint(sym)
        return torch_symbols.make_sym(sym.kind, expr, self._env, hint, constant=sym.constant)

    def _live_hint(self, sym: SymDesc) -> Any:
        if isinstance(sym.hint, tuple):
            return self._converter._nested_ints.make(sym.hint)
        return sym.hint

    def _expression(self, expr: Any, env: Any) -> Any:
        if env is None or env is self._env or not expr.free_symbols:
            return expr
        if self._sizes is None:
            raise _no_value(expr)
        facts = _Facts(self._describer._syms.facts_of_symbols(expr.free_symbols, env))
        return self._sizes.expression(decode_expr(encode_expr(expr)), facts)

    # --- graphs -----------------------------------------------------------------------------------

    def _module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Convert a module; returns the module itself if no part of it changes."""
        state: dict[str, Any] = dict(module.__dict__)
        changed = False
        for name, value in module.__dict__.items():
            if name in ("_parameters", "_buffers", "_modules"):
                value = {k: self._leaf(part, real_too=False) for k, part in value.items()}
                changed |= not _same(value.values(), state[name].values())
                state[name] = value
            elif name == "meta" and isinstance(module, torch.fx.GraphModule):
                state[name] = self._meta(value, None)
            elif isinstance(value, (torch.Tensor, *_SYMBOLIC)):
                state[name] = self._leaf(value, real_too=False)
                changed |= state[name] is not value
            elif isinstance(value, (dict, list, set)):
                state[name] = copy.copy(value)  # hooks are not shared
        is_graph = isinstance(module, torch.fx.GraphModule)
        if not is_graph and not changed:
            return module
        base: Any = torch.fx.GraphModule if is_graph else torch.nn.Module
        made: Any = base.__new__(type(module))
        graph = self._leaf(state.pop("_graph"), real_too=False) if is_graph else None
        made.__dict__.update(state)
        if is_graph:
            type(made).__name__ = type(module).__name__  # each graph module has a class of its own
            made.graph = graph
        return made

    def _graph(self, graph: torch.fx.Graph) -> torch.fx.Graph:
        with self._describer.assume_unchanged():
            return self._copied(graph)

    def _copied(self, graph: torch.fx.Graph) -> torch.fx.Graph:
        env = self._env_of(graph)
        made: Any = torch.fx.Graph(tracer_cls=graph._tracer_cls)  # type: ignore[attr-defined]
        made._codegen = copy.deepcopy(graph._codegen)  # type: ignore[attr-defined]
        nodes: dict[torch.fx.Node, torch.fx.Node] = {}
        for old in graph.nodes:
            nodes[old] = fx_node = made.create_node(
                old.op, old.target, name=old.name, type_expr=old.type
            )
            # `create_node` warns of symbolic scalars among arguments, after a look at each.
            for name in ("args", "kwargs"):
                if arguments := getattr(old, name):
                    object.__setattr__(fx_node, name, map_arg(arguments, nodes.__getitem__))
            self._converter.shares_sizes = fx_node.op != "placeholder"
            fx_node.meta.update(self._meta(old.meta, env))
            if hasattr(old, "_dynamo_source"):
                fx_node._dynamo_source = old._dynamo_source
            self._constants(fx_node)
        self._converter.shares_sizes = False
        return made

    def _env_of(self, graph: torch.fx.Graph) -> Any:
        """The ``ShapeEnv`` of the symbols in a graph's metadata, if there are any."""
        for fx_node in graph.nodes:
            for key in ("val", "example_value"):
                for leaf in torch_graphs.tree_leaves(fx_node.meta.get(key)):
                    if isinstance(leaf, _SYMBOLIC):
                        return getattr(leaf.node, "shape_env", None)
                    mode = torch_fakes.maybe_get_fake_mode(leaf)
                    if mode is not None and mode.shape_env is not None:
                        return mode.shape_env
        return None

    def _constants(self, fx_node: torch.fx.Node) -> None:
        """Convert the tensors and scalars among a node's arguments, in place."""
        if not fx_node.kwargs and _NO_TENSORS.issuperset(map(type, fx_node.args)):
            return
        changed = False

        def constant(value: Any) -> Any:
            nonlocal changed
            if isinstance(value, torch.fx.Node):
                return value
            made = self._leaf(value, real_too=False)
            changed |= made is not value
            return made

        args: Any = map_aggregate((fx_node.args, fx_node.kwargs), constant)
        if changed:
            fx_node.args, fx_node.kwargs = args

    def _meta(self, meta: Mapping[Any, Any], env: Any) -> dict[Any, Any]:
        """Convert the metadata of a node, whose bare symbols are of ``env``."""
        return {
            key: value if key in _NO_VALUES else self._entry(key, value, env)
            for key, value in meta.items()
        }

    def _entry(self, key: Any, value: Any, env: Any) -> Any:
        if key == "unbacked_bindings" and isinstance(value, dict):
            return self._bindings(value, env)
        return self._value(value, env)

    def _bindings(self, bindings: dict[Any, Any], env: Any) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        for symbol, path in bindings.items():
            new = self._expression(symbol, env)
            made[new] = self._value(path, env)
            if env is None or env is self._env:
                continue
            if symbol not in env.unbacked_inputs:
                self._bound_by_nodes.add(new)
            # A later fact may have replaced the symbol.
            if symbol in env.replacements:
                self._env.replacements[new] = self._expression(env.replace(symbol), env)
            if symbol in env.unbacked_renamings:
                renamed = self._expression(env.unbacked_renamings[symbol], env)
                self._env.unbacked_renamings[new] = renamed
        return made

    def _value(self, value: Any, env: Any) -> Any:
        """Convert a value in metadata; returns the same object if nothing in it changes."""
        kind = type(value)
        if kind is torch_fakes.FakeTensor:
            return self._tensor(value, real_too=False)
        if kind in _CONSTANTS:
            return value
        leaves, spec = torch_graphs.tree_flatten(value, is_leaf=_is_size)
        made = [leaf if type(leaf) in _CONSTANTS else self._part(leaf, env) for leaf in leaves]
        return value if _same(made, leaves) else torch_graphs.tree_unflatten(made, spec)

    def _part(self, value: Any, env: Any) -> Any:
        match value:
            case sympy.Basic():
                return self._expression(value, env)
            case torch_fakes.FakeTensorMode():
                return self._mode
            case set() | frozenset():
                made = [self._value(item, env) for item in value]
                return value if _same(made, value) else type(value)(made)
            case torch_dynamo.Source() | type():
                return value
            case _ if dataclasses.is_dataclass(value):
                return self._memoized(value, lambda old: self._dataclass(old, env))
            case _:
                return self._leaf(value, real_too=False)

    def _dataclass(self, value: Any, env: Any) -> Any:
        """Convert a dataclass in metadata, such as Dynamo's ``GraphArg`` or a path to a symbol."""
        changes: dict[str, Any] = {}
        for field in dataclasses.fields(value):
            old = getattr(value, field.name, None)
            new = self._value(old, env)
            if new is not old:
                changes[field.name] = new
        if not changes:
            return value
        made = copy.copy(value)
        for name, new in changes.items():
            object.__setattr__(made, name, new)  # also of a frozen one
        return made


class GraphValues(Refakeifier):
    """Converts the metadata of a graph to a fresh environment, by the describer and converter of its inputs.

    Dynamo stores the value of each node as a fake tensor of the mode that it traced with. A backend reads
    them (as inductor's passes before autograd do), and through them the original ``ShapeEnv``. Here a view
    of an input becomes a view of the new input, and no operator runs again.

    Args:
        describer: the describer of the inputs.
        converter: the converter of the inputs.
        fresh: the environment of the new inputs.
    """

    def __init__(
        self, describer: MetaTensorDescriber, converter: MetaConverter, fresh: FreshEnv
    ) -> None:
        super().__init__(converter.mode, describer, converter)
        converter.has_alias_fakes = True
        self._fresh = fresh
        self._shared = 0
        """How many of the describer's expressions the converter has."""
        self._share_expressions()

    def map_inputs(
        self, values: Sequence[Any], records: Sequence[InputDesc], inputs: Sequence[Any]
    ) -> None:
        """Map the frontend's fakes of the inputs to the new inputs.

        A fake that tracing has resized or transposed is not mapped: its nodes have the changed value.

        Args:
            values: the frontend's fakes.
            records: the inputs over the symbols of ``values``.
            inputs: the inputs over the new symbols.
        """
        for value, record, made in zip(values, records, inputs, strict=True):
            initial = record.tensor
            if initial is None or not isinstance(value, torch.Tensor):
                continue
            now = self._describer.describe_tensor(value)
            if (now.size, now.stride, now.storage_offset) == (
                initial.size,
                initial.stride,
                initial.storage_offset,
            ):
                self._describer.alias(value, initial)
                self._done[id(value)] = (value, made)

    def graph_module(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> torch.fx.GraphModule:
        """A copy of a graph and its bodies with the new values; weights are shared.

        A value without a record is omitted: a functorch wrapper whose level has ended.
        """
        quiet = self._env.suppress_guards(), self._env.ignore_fresh_unbacked_symbols()
        with quiet[0], quiet[1], self._describer.assume_unchanged():
            made: Any = self._module(gm)
        for fx_node, value in zip(made.graph.find_nodes(op="placeholder"), inputs, strict=True):
            fx_node.meta.pop("val", None)
            if not isinstance(fx_node.meta.get("example_value"), torch_fakes.FakeScriptObject):
                fx_node.meta["example_value"] = value
        return made

    def _env_of(self, graph: torch.fx.Graph) -> Any:  # noqa: ARG002
        return None  # all symbols are of the original environment

    def _meta(self, meta: Mapping[Any, Any], env: Any) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        for key, value in meta.items():
            with suppress(FakeifyError):
                made[key] = value if key in _NO_VALUES else self._entry(key, value, env)
        return made

    def _bindings(self, bindings: dict[Any, Any], env: Any) -> dict[Any, Any]:  # noqa: ARG002
        return {self._fresh.to_fresh(symbol): path for symbol, path in bindings.items()}

    # --- conversion by records --------------------------------------------------------------------

    def _made(self, t: torch.Tensor) -> torch.Tensor:
        d = self._describer.describe_tensor(t)
        self._share_expressions()
        return self._converter.from_desc(rename_symbols(d, self._fresh.names))

    def _share_expressions(self) -> None:
        """Add the describer's expression objects to the converter's cache, if all names are equal."""
        assert self._sizes is not None
        if self._fresh.has_other_names:
            return
        for expr, desc in self._describer._syms.expressions(self._shared):  # pyright: ignore[reportPrivateUsage]
            self._sizes.cache_expression(desc, expr)
            self._shared += 1

    def _scalar(self, n: Any) -> Any:
        if isinstance(n, torch.SymInt) and n.node.is_nested_int():
            return n
        env = getattr(n.node, "shape_env", None)
        if env is None or env is self._env:
            return n
        sym = encode_sym(n)
        expr = self._expression(n.node.expr, env)
        return torch_symbols.make_sym(sym.kind, expr, self._env, sym.hint, constant=sym.constant)

    def _expression(self, expr: Any, env: Any) -> Any:  # noqa: ARG002
        return self._fresh.to_fresh(expr)


_CONSTANTS = frozenset({str, int, float, bool, type(None), torch.dtype})
"""Classes of most leaves that have nothing to convert."""

_NO_TENSORS = _CONSTANTS | {torch.fx.Node}
"""Classes of most arguments of nodes, which have nothing to convert."""


def _same(made: Any, old: Any) -> bool:
    return all(a is b for a, b in zip(made, old, strict=True))


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size)  # which a pytree would convert to a tuple


def _no_value(expr: Any) -> ConvertError:
    return ConvertError(
        "an unbacked symbol has no value",
        expected="a symbol with a hint, or a FakeTensorMode with a ShapeEnv",
        found=str(expr),
        fix="Give refakeify a FakeTensorMode that has a ShapeEnv",
    )
