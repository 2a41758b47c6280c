"""``repropagate``: update the fake values of a graph after a pass has changed a part of it.

Torch's ``FakeTensorProp`` runs the whole graph, and each data-dependent node makes a new symbol;
inductor's ``FakeTensorUpdater`` (torch 2.13) runs only the users of changed values. `repropagate`
does that too, and a node that runs again has the same symbols as before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx.node import map_aggregate

from torch_fakeify.compat import torch_fakes, torch_graphs
from torch_fakeify.compat.arguments import check_graph, check_mode
from torch_fakeify.errors import ShapeEnvError
from torch_fakeify.replay.bindings import (
    PathEntry,
    expr_of,
    follow,
    noted_bindings,
    raw_path,
    visible_symbols,
)
from torch_fakeify.replay.lowering import attribute_of, value_key, value_of

from .allocations import RequestedSymbols, RunResult, number_like, run_with_symbols
from .fx_runs import (
    calls_of,
    fake_cache,
    is_lifted,
    mode_of,
    running_in,
    snapshot,
    tensor_metadata,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def repropagate(
    gm: torch.fx.GraphModule, changed: Iterable[torch.fx.Node], *, mode: Any = None
) -> tuple[torch.fx.Node, ...]:
    """Run the changed nodes of a graph again, and the users of nodes whose values change.

    Works in place and in the graph's ``ShapeEnv``. If the new value of a node has the same metadata,
    the old value with its symbols remains and the users do not run. So a data-dependent node runs only
    if it was changed or an input changed, and then binds the same symbols. A new node without a value
    gets one, with ``unbacked_bindings``.

    Args:
        gm: a graph with fake values in ``meta``.
        changed: nodes that a pass has inserted, or whose target or arguments it has changed.
        mode: the fake mode, if no value of the graph has one.

    Returns:
        The nodes whose values have changed, in order, including those of bodies.

    Raises:
        ShapeEnvError: a node no longer binds a symbol that it bound: see `transplant`.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(torch.sin, tracing_mode="symbolic")(torch.ones(4))
        >>> (sin,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
        >>> _ = tfk.repropagate(gm, [sin])
    """
    check_graph(gm)
    if mode is not None:
        check_mode(mode)
    mode = mode or mode_of([value_of(fx_node) for fx_node in gm.graph.nodes])
    if mode is None:
        raise ShapeEnvError(
            "the graph has no fake values",
            expected="fake tensors in meta, or a mode",
            fix="Pass mode=, or retrace the graph",
        )
    if mode.shape_env is None:
        raise ShapeEnvError("the mode has no ShapeEnv", fix="Make a FakeTensorMode with one")
    updater = _Updater(gm, mode, set(changed))
    with running_in(mode), fake_cache(mode, on=False):
        updater.run()
    return tuple(updater.updated)


class _Updater:
    def __init__(self, gm: torch.fx.GraphModule, mode: Any, changed: set[torch.fx.Node]) -> None:
        self._gm = gm
        self._mode = mode
        self._env = mode.shape_env
        self._key = value_key(gm.graph)
        self._changed = changed
        self._differs: set[torch.fx.Node] = set()
        self.updated: list[torch.fx.Node] = []

    def run(self) -> None:
        for fx_node in self._gm.graph.nodes:
            if fx_node.op in ("placeholder", "output"):
                if fx_node in self._changed and fx_node.op == "placeholder":
                    self._differs.add(fx_node)  # the pass has changed its value
                continue
            inputs = fx_node.all_input_nodes
            if fx_node in self._changed or not self._differs.isdisjoint(inputs):
                self._update(fx_node)

    def placeholders(self, values: Sequence[Any] | None) -> None:
        """Set the values of a body's placeholders to the arguments of its operator's call."""
        nodes = self._gm.graph.find_nodes(op="placeholder")
        if values is None or len(values) != len(nodes):
            return
        for fx_node, value in zip(nodes, values, strict=True):
            if isinstance(value, torch.Tensor) and not self._same(value_of(fx_node), value):
                fx_node.meta[self._key] = value
                self._changed.add(fx_node)
                self.updated.append(fx_node)

    # --- one node ---------------------------------------------------------------------------------

    def _update(self, fx_node: torch.fx.Node) -> None:
        old = value_of(fx_node)
        args, kwargs = map_aggregate((fx_node.args, fx_node.kwargs), self._argument)
        bodies = [
            leaf
            for leaf in torch_graphs.tree_leaves((args, kwargs))
            if isinstance(leaf, torch.fx.GraphModule)
        ]
        with calls_of(bodies) as called:
            result = run_with_symbols(
                self._env,
                lambda: self._target(fx_node, args, kwargs),
                (args, kwargs),
                lambda result: self._requested_symbols(fx_node, result),
            )
        for body in bodies:
            inner = _Updater(body, self._mode, set(self._changed))
            inner.placeholders(called.get(id(body)))
            inner.run()
            self.updated += [n for n in inner.updated if n not in self.updated]
        self._check(fx_node, result)
        if self._same(old, result.value) and (old is not None or not result.bound):
            return
        noted = snapshot(result.value) if self._key == "val" else result.value
        fx_node.meta[self._key] = noted
        if result.paths:
            fx_node.meta["unbacked_bindings"] = dict(result.paths)
        if "tensor_meta" in fx_node.meta:
            fx_node.meta["tensor_meta"] = tensor_metadata(result.value)
        self._differs.add(fx_node)
        self.updated.append(fx_node)

    def _argument(self, arg: Any) -> Any:
        if not isinstance(arg, torch.fx.Node):
            return arg
        if arg.op != "get_attr":
            return value_of(arg)
        value = attribute_of(self._gm, str(arg.target))
        if not isinstance(value, torch.Tensor) or is_lifted(arg):
            return value
        fake = value_of(arg)
        return fake if fake is not None else self._mode.from_tensor(value, static_shapes=True)

    def _target(self, fx_node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
        runner = torch.fx.Interpreter(self._gm)
        if fx_node.op == "get_attr":
            value = attribute_of(self._gm, str(fx_node.target))
            return self._mode.from_tensor(value, static_shapes=True)
        return getattr(runner, fx_node.op)(fx_node.target, args, kwargs)

    def _requested_symbols(
        self, fx_node: torch.fx.Node, result: RunResult
    ) -> RequestedSymbols | None:
        """The symbols of the old value, if the new one has new symbols in their places."""
        old = value_of(fx_node)
        if old is None or not result.bound:
            return None
        numbers: dict[tuple[PathEntry, ...], Any] = {}
        for _, path in visible_symbols(old):
            place = raw_path(path)
            numbers[place] = follow(old, place)
        sites = dict(noted_bindings(fx_node, self._env))
        for symbol, site in sites.items():
            place = raw_path(site.path)
            numbers[place] = number_like(follow(old, place), symbol, self._env)
        made = {raw_path(path) for path in result.bound.values()}
        return RequestedSymbols(numbers, frozenset(sites)) if made & numbers.keys() else None

    def _check(self, fx_node: torch.fx.Node, result: RunResult) -> None:
        for symbol, site in noted_bindings(fx_node, self._env):
            if symbol in result.bound:
                continue
            found = expr_of(follow(result.value, raw_path(site.path)))
            raise ShapeEnvError(
                "a binding site is gone",
                where=site.text,
                expected=f"the unbacked symbol {symbol}",
                found="nothing" if found is None else str(found),
                fix="Insert a new node for it, and transplant the old one to that",
            )

    # --- the same metadata ------------------------------------------------------------------------

    def _same(self, old: Any, new: Any) -> bool:
        if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
            return self._same_tensor(old, new)
        if isinstance(old, (tuple, list)) and isinstance(new, (tuple, list)):
            pairs: Any = zip(old, new, strict=False)  # pyright: ignore[reportUnknownArgumentType]
            return len(old) == len(new) and all(self._same(*pair) for pair in pairs)  # pyright: ignore[reportUnknownArgumentType]
        left, right = expr_of(old), expr_of(new)
        if left is None or right is None:
            return old is None and new is None
        return type(old) is type(new) and self._env.replace(left) == self._env.replace(right)

    def _same_tensor(self, old: torch.Tensor, new: torch.Tensor) -> bool:
        plain = ("dtype", "device", "layout", "requires_grad", "ndim")
        if type(old) is not type(new) or any(getattr(old, n) != getattr(new, n) for n in plain):
            return False
        if old.is_conj() != new.is_conj() or old.is_neg() != new.is_neg():
            return False
        parts: list[Any] = [(tuple(t.size()) for t in (old, new))]
        if old.layout is torch.strided:
            parts.append(tuple(t.stride()) for t in (old, new))
            parts.append(t.storage_offset() for t in (old, new))
        if not all(self._same(*part) for part in parts):
            return False
        if not torch_fakes.is_traceable_wrapper_subclass(old):
            return True
        wrappers: tuple[Any, Any] = (old, new)
        (left, context), (right, other) = [w.__tensor_flatten__() for w in wrappers]
        return (
            left == right
            and context == other
            and all(self._same(*(getattr(w, name) for w in wrappers)) for name in left)
        )
