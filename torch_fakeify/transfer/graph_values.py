"""Converts the fake values in a graph's metadata to the symbols of a fresh environment.

Dynamo stores the value of each node as a fake tensor of the mode that it traced with. A backend reads
them (as inductor's passes before autograd do), and through them the original ``ShapeEnv``. Here each
is described and converted by the describer and converter of the inputs: a view of an input is a view
of the new input, and no operator runs again.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from torch_fakeify.compat import torch_fakes, torch_symbols
from torch_fakeify.encoding.exprs import encode_sym
from torch_fakeify.errors import FakeifyError
from torch_fakeify.records.rename import rename_symbols

from .refakeifier import NO_VALUES, Refakeifier

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_fakeify.convert.converter import MetaConverter
    from torch_fakeify.describe.describer import MetaTensorDescriber
    from torch_fakeify.records.frame import InputDesc

    from .fresh_env import FreshEnv


class GraphValues(Refakeifier):
    """Converts the metadata of a graph to a fresh environment.

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
                made[key] = value if key in NO_VALUES else self._entry(key, value, env)
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
