"""Fake tensors of another ``FakeTensorMode`` as fake tensors of this one.

Method: each tensor is described and converted, as a real one would be, by one describer and one
converter for all. So what was one tensor, storage, base or symbol is one again. Symbols go over
with their hints, value ranges and what else `desc.SymbolFactDesc` holds; sizes, strides and offsets
stay the expressions that they were, over the new symbols. Guards and runtime asserts stay where
they are (`snapshot` and `restore` carry those), and the target gets none.

Torch's own ``from_tensor`` for a tensor of another ``ShapeEnv``
(``transfer_symbols_from_foreign_shape_env``, torch 2.13) makes new symbols of the hints.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import sympy
import torch
from torch.fx.node import map_aggregate

from . import _torch
from .convert import MetaConverter
from .describe import MetaTensorDescriber
from .errors import ConvertError, FakeifyError, UnsupportedTensorError
from .exprs import decode_expr, encode_expr, encode_sym

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ._torch import FakeTensorMode
    from .desc import SymbolFactDesc, SymDesc

__all__ = ["Refakeifier", "refakeify"]

_T = TypeVar("_T")

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)

_NO_VALUES = frozenset({
    "stack_trace", "nn_module_stack", "fwd_nn_module_stack", "source_fn_stack",
    "fwd_source_fn_stack", "torch_fn", "from_node", "original_aten", "output_stack_traces",
})  # fmt: skip
"""Keys of a node's metadata that say where it comes from, not what it computes."""


def refakeify(tree: _T, mode: FakeTensorMode) -> _T:
    """The same structure with the fake tensors of other modes as fake tensors of ``mode``.

    Leaves (``torch.utils._pytree``) are taken so:

    - a fake tensor of ``mode``: as it is. A fake tensor of another mode, also inside a wrapper
      subclass, a functional tensor or a functorch wrapper: as a new one. With the ``ShapeEnv`` of
      ``mode``, its symbols stay; with another one, each becomes a new symbol; without, its sizes are
      the numbers that they are.
    - a symbolic scalar of another ``ShapeEnv``: over the same new symbols as the tensors' sizes.
    - a real tensor: as ``mode.from_tensor`` without a source and a policy makes it, so with a symbol
      for every dim.
    - a ``torch.fx.Graph`` or ``GraphModule``: as a copy, the tensors and scalars in the metadata and
      arguments of its nodes taken as above, and so in the graphs that it calls. Real tensors, such as
      its parameters, stay real and are shared with the original. Any other module is copied only as
      far as there is something to change in it.
    - all others: as they are.

    One tensor, storage or symbol stays one, of all the leaves together, and views stay views. In a
    mode without a ``ShapeEnv`` a symbol becomes its hint. What a fake tensor holds beside its
    metadata (a constant's value, the real tensor of ``propagate_real_tensors``, symbols remembered
    of ``nonzero()``) is not taken over. Nothing is shared with fakes that ``mode`` made before.

    Raises:
        ConvertError: an unbacked symbol for a mode that has no ``ShapeEnv``; or the mode cannot have
            such a tensor.
        UnsupportedTensorError: the tensor has a property that a record cannot hold; or the inner
            tensors of a subclass are of several modes.
    """
    return Refakeifier(mode).tree(tree)


class _Facts(NamedTuple):
    """What is known of the symbols of a scalar or of an expression."""

    symbols: tuple[SymbolFactDesc, ...]


class Refakeifier:
    """Takes tensors and scalars over to one mode, each once."""

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
        # By the id of what was taken over, which the entry keeps alive.
        self._done: dict[int, tuple[Any, Any]] = {}
        self._bound_by_nodes: set[sympy.Symbol] = set()
        if self._sizes is not None:
            self._sizes.keep_symbols_of(self._describer._syms.env_id(self._env))
            # No two symbols of the ShapeEnv get one source: each of an earlier call made this grow.
            self._first = len(self._env.source_to_var)

    def tree(self, tree: Any) -> Any:
        """The structure with its leaves taken over."""
        ignored = nullcontext() if self._env is None else self._env.ignore_fresh_unbacked_symbols()
        with ignored:  # no operator of this trace binds them
            made = _torch.tree_map_with_path(self._leaf_at, tree, is_leaf=_is_size)
        if self._env is not None:
            self._env.unbacked_inputs.difference_update(self._bound_by_nodes)
        return made

    def _leaf_at(self, path: tuple[Any, ...], leaf: Any) -> Any:
        try:
            return self._leaf(leaf, real_too=True)
        except FakeifyError as error:
            if path:
                here = f"leaf {_torch.keystr(path)}"
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
                return self._once(leaf, self._graph)
            case torch.nn.Module():
                return self._once(leaf, self._module)
            case _torch.FakeScriptObject():  # with fakes inside, if it stands for a TorchBind object
                return self._once(leaf, lambda o: _torch.maybe_to_fake_obj(self._mode, o.real_obj))
            case _:
                return leaf

    def _once(self, old: Any, make: Callable[[Any], Any]) -> Any:
        known = self._done.get(id(old))
        if known is None:
            known = self._done[id(old)] = (old, make(old))
        return known[1]

    # --- tensors and scalars ----------------------------------------------------------------------

    def _tensor(self, t: torch.Tensor, *, real_too: bool) -> torch.Tensor:
        try:
            mode = _torch.maybe_get_fake_mode(t)
        except AssertionError as error:
            raise UnsupportedTensorError(
                "the inner tensors of a wrapper subclass are of several fake modes",
                where=f"a {type(t).__name__}",
                fix="Make one of inner tensors of one mode",
            ) from error
        if mode is self._mode or (mode is None and not real_too):
            return t
        known = self._done.get(id(t))
        if known is not None:
            return known[1]
        made = self._made(t)
        self._done[id(t)] = (t, made)
        return made

    def _made(self, t: torch.Tensor) -> torch.Tensor:
        source = None
        if self._env is not None:
            name = f"__refakeify_{self._first}_{len(self._done)}"
            source = _torch.dynamo_source().ConstantSource(name)
        return self._converter.from_desc(self._describer.describe_tensor(t), source=source)

    def _scalar(self, n: Any) -> Any:
        sym_node = n.node
        if isinstance(n, torch.SymInt) and sym_node.is_nested_int():
            return self._converter._nested_ints.make(self._describer._syms.encode_int(n))  # pyright: ignore[reportArgumentType]
        env = getattr(sym_node, "shape_env", None)
        if env is None or env is self._env:
            return n
        sym = encode_sym(n)
        if self._sizes is None:
            if sym.hint is None:
                raise _no_value(sym_node.expr)
            return self._live_hint(sym)
        facts = _Facts(self._describer._syms.facts((n,)))
        expr = self._sizes.expression(decode_expr(sym.expr), facts)
        hint = self._live_hint(sym)
        return _torch.make_sym(sym.kind, expr, self._env, hint, constant=sym.constant)

    def _live_hint(self, sym: SymDesc) -> Any:
        if isinstance(sym.hint, tuple):
            return self._converter._nested_ints.make(sym.hint)
        return sym.hint

    def _expression(self, expr: Any, env: Any) -> Any:
        """A bare expression over symbols of a ``ShapeEnv``."""
        if env is None or env is self._env or not expr.free_symbols:
            return expr
        if self._sizes is None:
            raise _no_value(expr)
        facts = _Facts(self._describer._syms.facts_of_symbols(expr.free_symbols, env))
        return self._sizes.expression(decode_expr(encode_expr(expr)), facts)

    # --- graphs -----------------------------------------------------------------------------------

    def _module(self, module: torch.nn.Module) -> torch.nn.Module:
        """A module with new parts, or the module itself if all its parts stay."""
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
                state[name] = copy.copy(value)  # hooks that one gets are not for the other
        is_graph = isinstance(module, torch.fx.GraphModule)
        if not is_graph and not changed:
            return module
        made: Any = torch.nn.Module.__new__(type(module))
        if is_graph:
            made = torch.fx.GraphModule.__new__(type(module))  # of a class of its own
            type(made).__name__ = type(module).__name__
        if is_graph:
            graph = self._leaf(state.pop("_graph"), real_too=False)
            made.__dict__.update(state)
            made.graph = graph
        else:
            made.__dict__.update(state)
        return made

    def _graph(self, graph: torch.fx.Graph) -> torch.fx.Graph:
        env = self._env_of(graph)
        with warnings.catch_warnings():
            # Of a symbol among the arguments, which the original has too.
            warnings.filterwarnings("ignore", "Raw Sym", UserWarning)
            made = copy.deepcopy(graph)  # names, order, code generation; no metadata
        for fx_node, old in zip(made.nodes, graph.nodes, strict=True):
            fx_node.meta = self._meta(fx_node.meta, env)
            if hasattr(old, "_dynamo_source"):
                fx_node._dynamo_source = old._dynamo_source
            self._constants(fx_node)
        return made

    def _env_of(self, graph: torch.fx.Graph) -> Any:
        """The ``ShapeEnv`` that bare symbols in a graph's metadata are of."""
        return _env_of(graph)

    def _constants(self, fx_node: torch.fx.Node) -> None:
        """Takes over what a node has among its arguments."""
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
        """Metadata of a node, its symbols of ``env``."""
        return {key: self._entry(key, value, env) for key, value in meta.items()}

    def _entry(self, key: Any, value: Any, env: Any) -> Any:
        if key in _NO_VALUES:
            return value
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
            # What the node gives may have turned out to be another expression since.
            if symbol in env.replacements:
                self._env.replacements[new] = self._expression(env.replace(symbol), env)
            if symbol in env.unbacked_renamings:
                renamed = self._expression(env.unbacked_renamings[symbol], env)
                self._env.unbacked_renamings[new] = renamed
        return made

    def _value(self, value: Any, env: Any) -> Any:
        """A value in metadata: the same object if nothing in it changes."""
        if type(value) in _SINGLE:
            return self._leaf(value, real_too=False)
        leaves, spec = _torch.tree_flatten(value, is_leaf=_is_size)
        made = [self._part(leaf, env) for leaf in leaves]
        return value if _same(made, leaves) else _torch.tree_unflatten(made, spec)

    def _part(self, value: Any, env: Any) -> Any:
        match value:
            case sympy.Basic():
                return self._expression(value, env)
            case _torch.FakeTensorMode():
                return self._mode
            case set() | frozenset():
                made = [self._value(item, env) for item in value]
                return value if _same(made, value) else type(value)(made)
            case _torch.Source() | type():
                return value
            case _ if dataclasses.is_dataclass(value):
                return self._once(value, lambda old: self._dataclass(old, env))
            case _:
                return self._leaf(value, real_too=False)

    def _dataclass(self, value: Any, env: Any) -> Any:
        """One of the small dataclasses in metadata: Dynamo's ``GraphArg``, a path to a symbol."""
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


_SINGLE = frozenset({_torch.FakeTensor, torch.SymInt, str, int, bool, type(None)})
"""Classes of most values in metadata: leaves without a part."""


def _same(made: Any, old: Any) -> bool:
    return all(a is b for a, b in zip(made, old, strict=True))


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size)  # of which a pytree makes a tuple


def _no_value(expr: Any) -> ConvertError:
    return ConvertError(
        "an unbacked symbol has no value",
        expected="a symbol with a hint, or a FakeTensorMode with a ShapeEnv",
        found=str(expr),
        fix="Give refakeify a FakeTensorMode that has a ShapeEnv",
    )


def _env_of(graph: torch.fx.Graph) -> Any:
    """The ``ShapeEnv`` that the symbols in a graph's metadata are of, if there are any."""
    for fx_node in graph.nodes:
        for key in ("val", "example_value"):
            for leaf in _torch.tree_leaves(fx_node.meta.get(key)):
                if isinstance(leaf, _SYMBOLIC):
                    return getattr(leaf.node, "shape_env", None)
                mode = _torch.maybe_get_fake_mode(leaf)
                if mode is not None and mode.shape_env is not None:
                    return mode.shape_env
    return None
