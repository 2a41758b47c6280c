"""``repropagate``: the values of a graph brought up to date after a pass has changed a part of it.

Torch's ``FakeTensorProp`` runs the whole graph, and each data-dependent node makes a new symbol;
inductor's ``FakeTensorUpdater`` (torch 2.13) runs what uses a changed value. Here too, and a node
that runs again keeps the symbols that it had: no symbol is made where the graph has one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch.fx.node import map_aggregate

from . import _torch
from .allocations import Given, Wanted, run_for
from .binding_sites import (
    Step,
    expr_of,
    follow,
    path_steps,
    place_of,
    renamed,
    shown,
    steps_text,
)
from .errors import ShapeEnvError
from .expr_nodes import value_key, value_of
from .graph_runs import (
    attribute_of,
    calls_of,
    fake_cache,
    is_lifted,
    mode_of,
    snapshot,
    tensor_metadata,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["repropagate"]


def repropagate(
    gm: torch.fx.GraphModule, changed: Iterable[torch.fx.Node], *, mode: Any = None
) -> tuple[torch.fx.Node, ...]:
    """Run the changed nodes of a graph again, and what uses those whose value is another one now.

    In place and in the graph's own ``ShapeEnv``. A node whose new value has the same metadata keeps
    the old one, with its symbols, and what uses it does not run. So a data-dependent node runs only
    if it was changed or an input of it differs; then too it binds the symbols that it bound. A node
    without a value, as a pass has just inserted it, gets one, and a note of what it binds.

    Args:
        gm: a graph with fake values in ``meta``.
        changed: nodes whose target or arguments a pass has changed, or that it has inserted.
        mode: the fake mode, where no value of the graph has one.

    Returns:
        The nodes that have another value than before, in order, also those of bodies.

    Raises:
        ShapeEnvError: a node does not bind a symbol any more that it bound: see `transplant`.
    """
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
    mode.epoch += 1
    with mode, _torch.enable_python_dispatcher(), fake_cache(mode, on=False):
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
        self._sites: dict[torch.fx.Node, dict[Any, tuple[Step, ...]]] = {}
        for fx_node in gm.graph.nodes:
            for symbol, path in (fx_node.meta.get("unbacked_bindings") or {}).items():
                steps = path_steps(path)
                if fx_node.op != "placeholder" and steps is not None:
                    name = renamed(symbol, self._env)
                    self._sites.setdefault(fx_node, {})[name] = steps
        self.updated: list[torch.fx.Node] = []

    def run(self) -> None:
        """Bring the graph up to date."""
        for fx_node in self._gm.graph.nodes:
            if fx_node.op in ("placeholder", "output"):
                if fx_node in self._changed and fx_node.op == "placeholder":
                    self._differs.add(fx_node)  # a new value was put there
                continue
            inputs = fx_node.all_input_nodes
            if fx_node in self._changed or not self._differs.isdisjoint(inputs):
                self._update(fx_node)

    def placeholders(self, values: Sequence[Any] | None) -> None:
        """Take what the operator of this body calls it with."""
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
            for leaf in _torch.tree_leaves((args, kwargs))
            if isinstance(leaf, torch.fx.GraphModule)
        ]
        with calls_of(bodies) as called:
            given = run_for(
                self._env,
                lambda: self._target(fx_node, args, kwargs),
                (args, kwargs),
                lambda given: self._judge(fx_node, given),
            )
        for body in bodies:
            inner = _Updater(body, self._mode, set(self._changed))
            inner.placeholders(called.get(id(body)))
            inner.run()
            self.updated += [n for n in inner.updated if n not in self.updated]
        self._check(fx_node, given)
        if self._same(old, given.value) and (old is not None or not given.bound):
            return
        noted = snapshot(given.value) if self._key == "val" else given.value
        fx_node.meta[self._key] = noted
        if given.paths:
            fx_node.meta["unbacked_bindings"] = dict(given.paths)
        if "tensor_meta" in fx_node.meta:
            fx_node.meta["tensor_meta"] = tensor_metadata(given.value)
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
        known = value_of(arg)
        return known if known is not None else self._mode.from_tensor(value, static_shapes=True)

    def _target(self, fx_node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
        runner = torch.fx.Interpreter(self._gm)
        if fx_node.op == "get_attr":
            value = attribute_of(self._gm, str(fx_node.target))
            return self._mode.from_tensor(value, static_shapes=True)
        return getattr(runner, fx_node.op)(fx_node.target, args, kwargs)

    def _judge(self, fx_node: torch.fx.Node, given: Given) -> Wanted | None:
        """The numbers that the node had, wherever it would make new ones."""
        old = value_of(fx_node)
        if old is None or not given.bound:
            return None
        numbers: dict[tuple[Step, ...], Any] = {}
        for _, steps in shown(old):
            place = place_of(steps)
            numbers[place] = follow(old, place)
        sites = self._sites.get(fx_node, {})
        for symbol, steps in sites.items():
            place = place_of(steps)
            like = follow(old, place)
            numbers[place] = self._number(symbol, like)
        made = {place_of(steps) for steps in given.bound.values()}
        return Wanted(numbers, frozenset(sites)) if made & numbers.keys() else None

    def _number(self, symbol: Any, like: Any) -> Any:
        if isinstance(like, torch.SymBool):
            return _torch.make_sym("bool", sympy.Eq(symbol, 1), self._env, None)
        kind = "float" if isinstance(like, torch.SymFloat) else "int"
        return _torch.make_sym(kind, symbol, self._env, None)

    def _check(self, fx_node: torch.fx.Node, given: Given) -> None:
        """What the node bound, it binds still."""
        for symbol, steps in self._sites.get(fx_node, {}).items():
            if symbol in given.bound:
                continue
            found = expr_of(follow(given.value, place_of(steps)))
            raise ShapeEnvError(
                "a binding site is gone",
                where=steps_text(fx_node.name, steps),
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
        if not _torch.is_traceable_wrapper_subclass(old):
            return True
        wrappers: tuple[Any, Any] = (old, new)
        (left, context), (right, other) = [w.__tensor_flatten__() for w in wrappers]
        return (
            left == right
            and context == other
            and all(self._same(*(getattr(w, name) for w in wrappers)) for name in left)
        )
