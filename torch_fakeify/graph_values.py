"""The fake values that a frontend left in a graph, over the symbols of a fresh environment.

Dynamo notes at each node what it computes, as fakes of the mode that it traced with. A backend reads
them (inductor's passes before autograd do), and through them the old ``ShapeEnv``. Here each is
described and converted like the inputs, by their describer and their converter: a view of an input
is a view of the new input, and nothing is computed again.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from . import _torch
from .errors import FakeifyError
from .exprs import encode_sym
from .renaming import rename_symbols
from .transfer import Refakeifier

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .convert import MetaConverter
    from .desc_frame import InputDesc
    from .describe import MetaTensorDescriber
    from .fresh_env import FreshEnv

__all__ = ["GraphValues"]


class GraphValues(Refakeifier):
    """Takes the metadata of a graph over to a fresh environment.

    Args:
        describer: of the inputs.
        converter: made the inputs.
        fresh: the environment of the inputs.
    """

    def __init__(
        self, describer: MetaTensorDescriber, converter: MetaConverter, fresh: FreshEnv
    ) -> None:
        super().__init__(converter.mode, describer, converter)
        self._fresh = fresh
        self._shared = 0
        """How many of the describer's expressions the converter knows."""
        self._share_expressions()

    def stand_for(
        self, values: Sequence[Any], records: Sequence[InputDesc], inputs: Sequence[Any]
    ) -> None:
        """Let the frontend's fakes of the inputs be the new inputs.

        A fake that tracing has resized or transposed is none: nodes behind that have what it became.

        Args:
            values: the frontend's fakes.
            records: the inputs, over the symbols of ``values``.
            inputs: the same over the new symbols.
        """
        for value, record, made in zip(values, records, inputs, strict=True):
            began = record.tensor
            if began is None or not isinstance(value, torch.Tensor):
                continue
            now = self._describer.describe_tensor(value)
            if (now.size, now.stride, now.storage_offset) == (
                began.size,
                began.stride,
                began.storage_offset,
            ):
                self._describer.same(value, began)
                self._done[id(value)] = (value, made)

    def graph_module(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> torch.fx.GraphModule:
        """A copy of a graph, and of the graphs that it calls, with the new values; weights are shared.

        A value that has no record is left out: that of a functorch wrapper whose level is over.
        """
        quiet = self._env.suppress_guards(), self._env.ignore_fresh_unbacked_symbols()
        with quiet[0], quiet[1], self._describer.settled():
            made: Any = self._module(gm)
        for fx_node, value in zip(made.graph.find_nodes(op="placeholder"), inputs, strict=True):
            fx_node.meta.pop("val", None)
            if not isinstance(fx_node.meta.get("example_value"), _torch.FakeScriptObject):
                fx_node.meta["example_value"] = value
        return made

    def _env_of(self, graph: torch.fx.Graph) -> Any:  # noqa: ARG002
        return None  # all symbols are of the environment that the fresh one was made from

    def _meta(self, meta: Mapping[Any, Any], env: Any) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        for key, value in meta.items():
            with suppress(FakeifyError):
                made[key] = self._entry(key, value, env)
        return made

    def _bindings(self, bindings: dict[Any, Any], env: Any) -> dict[Any, Any]:  # noqa: ARG002
        return {self._fresh.over_new(symbol): path for symbol, path in bindings.items()}

    # --- by record, over the new names ------------------------------------------------------------

    def _made(self, t: torch.Tensor) -> torch.Tensor:
        d = self._describer.describe_tensor(t)
        self._share_expressions()
        return self._converter.from_desc(rename_symbols(d, self._fresh.names))

    def _share_expressions(self) -> None:
        """Let expressions over the same symbols be the same objects on both sides."""
        assert self._sizes is not None
        if self._fresh.has_other_names:
            return
        for expr, desc in self._describer._syms.expressions(self._shared):  # pyright: ignore[reportPrivateUsage]
            self._sizes.know(desc, expr)
            self._shared += 1

    def _scalar(self, n: Any) -> Any:
        if isinstance(n, torch.SymInt) and n.node.is_nested_int():
            return n
        env = getattr(n.node, "shape_env", None)
        if env is None or env is self._env:
            return n
        sym = encode_sym(n)
        expr = self._expression(n.node.expr, env)
        return _torch.make_sym(sym.kind, expr, self._env, sym.hint, constant=sym.constant)

    def _expression(self, expr: Any, env: Any) -> Any:  # noqa: ARG002
        return self._fresh.over_new(expr)
