"""Search of input data with which a frame runs: runtime asserts hold and indices are in bounds.

The part of the graph that reads numbers from data, asserts or indexes by data runs eagerly on synthetic
inputs, and the numbers are compared with the facts. While a fact is violated, the data of the inputs it
depends on is changed (see `data_moves`); a change is accepted if it reduces the distance (search-based
test generation by branch distance, Korel, 1990). The search is incomplete and its number of runs is
bounded.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import sympy
import torch

from torch_fakeify.encoding.modes import preserve_modes
from torch_fakeify.errors import CaptureError
from torch_fakeify.frames.graph.writing import may_write
from torch_fakeify.records.rewrite import walk
from torch_fakeify.records.symbol_names import names_in
from torch_fakeify.records.tensor import (
    FunctionValue,
    MetaTensorDesc,
    NodeValue,
    SymDesc,
    TensorValue,
)
from torch_fakeify.render.code import node_stack
from torch_fakeify.render.text import user_line
from torch_fakeify.replay.bindings import Binding, find_bindings
from torch_fakeify.replay.lowering import value_of

from .data_moves import changed, fill
from .requirements import Fact, asserts_of, data_symbols, guards_of, ranges_of
from .symbol_values import substituted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from torch_fakeify.records.frame import CaptureDesc
    from torch_fakeify.records.graph import NodeDesc

    from .size_search import Chosen
    from .symbol_values import Symbols

_TRIES = 500
"""Largest number of runs of a small graph."""
_WORK = 30_000
"""Largest number of FX nodes that are run, unless that is fewer than `_FEWEST` runs."""
_ELEMENTS = 10_000
"""Number of input elements that count as one node."""
_FEWEST = 40
_WHOLE = ("int", "uint", "bool")
_KICKS = 6
"""Number of restarts of the search with random data."""
_ASSERTS = ("_assert_scalar", "_assert_async", "_check", "_assert", "sym_constrain_range")
_INDEXING = frozenset(
    {
        "embedding", "embedding_bag", "gather", "index_select", "take", "take_along_dim", "one_hot",
        "index", "index_put", "index_put_", "index_add", "index_add_", "index_copy",
        "index_copy_", "index_fill", "index_fill_", "scatter", "scatter_", "scatter_add",
        "scatter_add_", "scatter_reduce", "scatter_reduce_", "getitem", "setitem", "bincount",
        "nll_loss", "nll_loss_forward", "cross_entropy", "repeat_interleave", "_embedding_bag",
    }
)  # fmt: skip
"""Operators that raise for a number out of bounds among the elements of a tensor."""
_MOVING = frozenset(
    {
        "view", "reshape", "flatten", "contiguous", "unsqueeze", "squeeze", "expand", "transpose",
        "permute", "t", "to", "long", "clone", "slice", "select", "getitem", "pad", "alias",
        "detach", "_to_copy", "constant_pad_nd", "unflatten", "chunk", "split", "expand_as", "view_as",
    }
)  # fmt: skip
"""Operators whose result has the elements of their arguments, or padding such as -100."""


# --- which nodes ----------------------------------------------------------------------------------


def reads_data(desc: CaptureDesc, symbols: Symbols) -> list[str]:
    """Names of the FX nodes that check input data, index by it, or read a number from it."""
    nodes = desc.graph.nodes
    is_from_whole: list[bool | None] = []
    """Whether the input tensors that a node is computed from are of integers; ``None`` if there are none."""
    is_input_data: list[bool] = []
    """Whether the elements of a node are those of an input."""
    found: list[str] = []
    for at, fx_node in enumerate(nodes):
        args = {v.index for v in walk((fx_node.args, fx_node.kwargs), NodeValue) if v.index < at}
        tensors = [i for i in args if is_from_whole[i] is not None]
        from_whole = all(is_from_whole[i] for i in tensors) if tensors else None
        if fx_node.op == "placeholder" and any(isinstance(v, TensorValue) for _, v in fx_node.meta):
            from_whole = _is_whole(fx_node)
        is_from_whole.append(from_whole)
        name = _short_name(fx_node)
        moved = name in _MOVING and all(is_input_data[i] for i in args if _is_whole(nodes[i]))
        is_input_data.append(fx_node.op == "placeholder" or moved)
        if fx_node.op in ("placeholder", "output", "get_attr"):
            continue
        binds = any(key == "unbacked_bindings" for key, _ in fx_node.meta)
        if binds or _is_assert(name):
            found.append(fx_node.name)
        elif name in _INDEXING and any(is_from_whole[i] and _is_whole(nodes[i]) for i in args):
            direct = all(is_input_data[i] for i in args if _is_whole(nodes[i]))
            sizes = [n for i in args if (t := _tensor_of(nodes[i])) for n in t.size]
            smallest = min((_size(n, symbols) for n in sizes), default=2)
            if name == "one_hot" or not direct or smallest < 2:
                found.append(fx_node.name)
    return found


def _short_name(fx_node: NodeDesc) -> str:
    """``embedding`` of ``aten.embedding.default`` and of ``torch.nn.functional.embedding``."""
    target = fx_node.target
    if not isinstance(target, FunctionValue):
        return str(target)
    parts = target.name.split(".")
    return parts[-2] if target.kind == "op" and len(parts) > 2 else parts[-1]


def _is_assert(name: str) -> bool:
    return name.removeprefix("_functional").startswith(_ASSERTS) or name.startswith("_check")


def _is_whole(fx_node: NodeDesc) -> bool:
    """Whether the value of a node is a tensor of integers or booleans."""
    tensor = _tensor_of(fx_node)
    return tensor is not None and tensor.dtype.startswith(_WHOLE)


def _tensor_of(fx_node: NodeDesc) -> MetaTensorDesc | None:
    """The record of a node's value, if it is a tensor."""
    return fx_node.value.tensor if isinstance(fx_node.value, TensorValue) else None


def _size(n: Any, symbols: Symbols) -> int:
    """Evaluate a size; 0 if it has no value."""
    number = symbols.evaluate(n.expr) if isinstance(n, SymDesc) else n
    return int(number) if isinstance(number, (int, sympy.Integer)) else 0


# --- the search -----------------------------------------------------------------------------------


class _Trial(NamedTuple):
    """The result of one run."""

    cost: tuple[int, float]
    """Number of FX nodes that were not reached, and the distance to the facts."""
    data: dict[int, torch.Tensor]
    """The elements of changed inputs, by position."""
    values: dict[str, Any]
    """The numbers that the graph read, by symbol."""
    violated: list[Fact]
    blamed: list[torch.fx.Node]
    """The nodes at which a fact is violated or an operator raises."""
    error: Exception | None


class DataSearch:
    """Searches data for the inputs of one frame.

    ``chosen`` are preferred values of symbols from data. ``make`` makes the inputs at some positions on the
    CPU, deterministically; others are ``None``. ``gm`` is the graph on the CPU, of which the nodes of
    `reads_data` are run.
    """

    def __init__(
        self,
        desc: CaptureDesc,
        symbols: Symbols,
        chosen: Chosen | None,
        make: Callable[[Collection[int]], list[Any]],
        gm: torch.fx.GraphModule,
        names: Iterable[str],
    ) -> None:
        self._desc = desc
        self._symbols = symbols
        self._make = make
        self._gm = gm
        requested = frozenset[str]() if chosen is None else chosen.requested
        self._aims = {} if chosen is None else dict(chosen.data)
        self._requested = {n: value for n, value in self._aims.items() if n in requested}
        self._data = data_symbols(desc)
        self._placeholders = gm.graph.find_nodes(op="placeholder")
        self._bindings = _bindings(gm, self._data)
        self._nodes = _needed(gm, set(names), self._bindings)
        self._last_use = _last_uses(self._nodes)
        self._scalars = _scalars(desc, symbols)
        free = {n for n in self._scalars.values() if n not in requested} - _symbols_of_sizes(desc)
        self._fixed_scalars = {at for at, name in self._scalars.items() if name not in free}
        """Positions of the scalar inputs whose value must not change."""
        self._facts = list(_facts(desc, self._data, self._requested, free))
        self._names = [sorted(s.name for s in fact.expr.free_symbols) for fact in self._facts]
        self._generator = torch.Generator().manual_seed(0)
        self._seeded = self._generator.get_state()
        self._distances: dict[tuple[Any, ...], float] = {}
        sources = _sources(self._nodes)
        self._read = {at for at, n in enumerate(self._placeholders) if n in sources}
        self._read |= self._scalars.keys()  # guards may use them without a node that reads them
        """Positions of the inputs that the nodes read."""
        tensors = [tensor for at in self._read if (tensor := desc.inputs[at].tensor) is not None]
        elements = sum(math.prod(_size(n, symbols) for n in t.size) for t in tensors)
        work = max(1, len(self._nodes) + elements // _ELEMENTS)
        self._left = max(_FEWEST, min(_TRIES, _WORK // work))

    def data(self) -> dict[int, torch.Tensor]:
        """Search data and return the elements of the inputs to change, by position.

        Raises:
            CaptureError: no data was found with which the runtime asserts hold and the requested
                symbols have their values.
        """
        unknown = sorted(self._requested.keys() - self._bindings.keys())
        if unknown:
            raise CaptureError(
                "no node of the graph binds the symbol",
                where=", ".join(unknown),
                fix="Make the inputs' data yourself",
            )
        best = self._climb()
        if best.violated or (
            best.error is not None and self._requested.keys() - best.values.keys()
        ):
            raise self._refusal(best)
        return best.data

    def _climb(self) -> _Trial:
        best = now = self._run({})
        for kick in range(_KICKS):
            while now.cost != (0, 0.0) and self._left > 0 and not self._is_hopeless(now):
                better = self._improved(now)
                if better is None:
                    break
                now = better
            best = min(best, now, key=lambda trial: trial.cost)
            if best.cost == (0, 0.0) or self._left <= 0 or self._is_hopeless(now):
                break
            now = self._run(self._kicked(best, 4**kick))
        return best

    def _is_hopeless(self, now: _Trial) -> bool:
        """Whether no change of data can help."""
        variables = self._variables(now)
        if now.error is None or now.violated:
            return not variables
        tensors = (self._desc.inputs[at].tensor for at in variables)
        return not any(t is not None and t.dtype.startswith(_WHOLE) for t in tensors)

    def _improved(self, now: _Trial) -> _Trial | None:
        """The first trial with a lower cost; ``None`` if there is none."""
        for data in self._changes(now):
            if self._left <= 0:
                return None
            trial = self._run(data)
            if trial.cost < now.cost:
                return trial
        return None

    def _changes(self, now: _Trial) -> Iterator[dict[int, torch.Tensor]]:
        inputs = self._make(self._read)
        fill(inputs, now.data)
        aims, steps = self._numbers(now)
        for at in self._variables(now):
            for made in changed(inputs[at].detach(), aims, steps, self._generator):
                yield {**now.data, at: made}

    def _kicked(self, best: _Trial, factor: int) -> dict[int, torch.Tensor]:
        """Random data, up to ``factor`` times the aims."""
        inputs = self._make(self._read)
        data = dict(best.data)
        aims, _ = self._numbers(best)
        high = factor * max([3, *aims]) + 1
        for at in self._variables(best):
            t = inputs[at].detach()
            drawn = torch.randint(0, min(high, 1 << 20), t.shape, generator=self._generator)
            data[at] = (drawn % 2 if t.dtype == torch.bool else drawn).to(t.dtype)
        return data

    def _numbers(self, now: _Trial) -> tuple[list[int], list[int]]:
        """Target values, and differences of current numbers from their targets."""
        aims: list[int] = []
        steps: list[int] = []
        names = {s.name for fact in now.violated for s in fact.expr.free_symbols}
        for name in sorted(names & self._data.keys() & self._aims.keys()):
            aims.append(self._aims[name])
            found = now.values.get(name)
            if found is not None and found == found:
                steps.append(math.ceil(self._aims[name] - float(found)))
        values = self._symbol_values(now.values)
        steps += [math.ceil(_distance(fact.expr, values)) for fact in now.violated]
        near = [number for fact in now.violated for number in _constants(fact.expr)]
        near += _literals(_closure(now.blamed))
        aims += [number + step for number in near for step in (0, 1, -1)]
        if now.error is not None:
            aims += [0, 1, 2, 3, 5, 8]
            for fx_node in now.blamed:
                aims += self._sizes_at(_sources([fx_node]))
        aims += [0, 1, 2, 4, 8, 16, 32, 64]
        steps += [*(-step for step in steps), 1, -1]
        small = [n for n in dict.fromkeys(aims) if abs(n) < 1 << 31]
        return small[:32], [s for s in dict.fromkeys(steps) if s and abs(s) < 1 << 31][:10]

    def _sizes_at(self, sources: set[torch.fx.Node]) -> Iterator[int]:
        """Sizes minus one of inputs."""
        for entry, placeholder in zip(self._desc.inputs, self._placeholders, strict=True):
            if entry.tensor is not None and placeholder in sources:
                for n in entry.tensor.size:
                    yield max(_size(n, self._symbols) - 1, 0)

    def _variables(self, trial: _Trial) -> list[int]:
        """Positions of the inputs that the blamed nodes depend on, integers first."""
        sources = _sources(trial.blamed)
        found: list[tuple[int, int]] = []
        for at, entry in enumerate(self._desc.inputs):
            tensor = entry.tensor
            if tensor is None or self._placeholders[at] not in sources:
                continue
            if tensor.layout != "strided" or tensor.subclass is not None:
                continue
            if at in self._fixed_scalars or tensor.dtype.startswith("complex"):
                continue
            found.append((not tensor.dtype.startswith(_WHOLE), at))
        return [at for _, at in sorted(found)]

    # --- one run ---

    def _run(self, data: dict[int, torch.Tensor]) -> _Trial:
        """Run the needed nodes of the graph, and compare the numbers with the facts."""
        self._left -= 1
        inputs = self._make(self._read)
        fill(inputs, data)
        values: dict[str, Any] = {
            name: inputs[at].detach().item()
            for at, name in self._scalars.items()
            if at not in self._fixed_scalars
        }
        runner = torch.fx.Interpreter(self._gm, garbage_collect_values=False)
        failed: list[torch.fx.Node] = []
        error: Exception | None = None
        missing = 0
        with preserve_modes(), torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.set_rng_state(self._seeded)  # faster than `manual_seed`
            runner.env.update(zip(self._placeholders, inputs, strict=True))
            for at, fx_node in enumerate(self._nodes):
                try:
                    runner.env[fx_node] = _value(runner, fx_node, failed)
                    self._observe(fx_node, runner.env[fx_node], values)
                except Exception as raised:  # noqa: BLE001 - data may make any operator raise
                    error, missing = raised, len(self._nodes) - at
                    break
                for done in self._last_use.get(fx_node, ()):
                    runner.env.pop(done, None)
        symbols = self._symbol_values(values)
        violated: list[Fact] = []
        blamed = list(failed)
        total = 0.0
        for fact, names in zip(self._facts, self._names, strict=True):
            key = (fact.expr, *[symbols.get(name) for name in names])
            distance = self._distances.get(key)
            if distance is None:
                distance = self._distances[key] = _distance(fact.expr, symbols)
            if distance > 0:
                violated.append(fact)
                total += math.log1p(distance)
                blamed += [self._bindings[n].fx_node for n in names if n in self._bindings]
        if failed and not violated:
            total += float(len(failed))
            records = {n.name: n for n in self._desc.graph.nodes}
            for fx_node in failed:
                line = user_line(node_stack(records[fx_node.name])) or None
                texts = [arg for arg in fx_node.args if isinstance(arg, str)]
                text = texts[0] if texts else f"that `{fx_node}` holds"
                violated.append(Fact(sympy.false, text, line))
        if error is not None:
            blamed.append(self._nodes[len(self._nodes) - missing])
        return _Trial((missing, total), data, values, violated, blamed, error)

    def _observe(self, fx_node: torch.fx.Node, value: Any, values: dict[str, Any]) -> None:
        for name, binding in self._bindings.items():
            if binding.fx_node is fx_node and name not in values:
                sizes = self._symbol_values({})
                found = binding.number(value, lambda n, sizes=sizes: substituted(n, sizes))
                if found is not None:
                    values[name] = int(found) if isinstance(found, bool) else found

    def _symbol_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        sizes = {n: v for n, v in self._symbols.values.items() if n not in self._data}
        return {**sizes, **{n: _number(v) for n, v in values.items()}}

    def _refusal(self, best: _Trial) -> CaptureError:
        found = ", ".join(f"{n} = {v}" for n, v in sorted(best.values.items()) if n in self._data)
        if best.error is not None:
            found += f"{'; ' if found else ''}{type(best.error).__name__}: {best.error}"
        requested = [f"{n} = {v}" for n, v in sorted(self._requested.items())]
        missing = [
            f"{n} = {v}" for n, v in sorted(self._requested.items()) if best.values.get(n) != v
        ]
        first = best.violated[0] if best.violated else None
        what = "no data was found with which the runtime asserts of the frame hold"
        if missing:
            what = f"no data was found with which {', '.join(requested)}"
        return CaptureError(
            what,
            where=None if first is None else first.line,
            expected=None if first is None else first.text,
            found=found or None,
            fix="Try other sizes, or make the inputs' data yourself",
        )


# --- helpers --------------------------------------------------------------------------------------


def _bindings(gm: torch.fx.GraphModule, data: Mapping[str, Any]) -> dict[str, Binding]:
    env = SimpleNamespace(unbacked_renamings={})  # a recorded graph has no renamed symbols
    return {
        str(symbol): binding
        for symbol, binding in find_bindings(gm.graph, env, ()).items()
        if str(symbol) in data and binding.fx_node.op != "placeholder"
    }


def _needed(
    gm: torch.fx.GraphModule, names: set[str], bindings: Mapping[str, Binding]
) -> list[torch.fx.Node]:
    """The nodes to run, in order: ``names``, their inputs, and nodes that write into these.

    Also included are nodes that enter and leave autocast, functorch transforms and the like.
    """
    order = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    requested = {n for n in order if n.name in names} | {b.fx_node for b in bindings.values()}
    end = max((order.index(n) for n in requested), default=0)
    requested |= _state_changes(order[:end])
    sources: dict[torch.fx.Node, frozenset[torch.fx.Node]] = {}
    for fx_node in gm.graph.nodes:
        if fx_node.op == "placeholder":
            sources[fx_node] = frozenset({fx_node})
        else:
            sources[fx_node] = frozenset().union(*(sources[a] for a in fx_node.all_input_nodes))
    writes = [n for n in order if may_write(n)]
    while True:
        needed = _closure(requested)
        touched = {p for n in needed for p in sources[n]}
        last = max((order.index(n) for n in requested), default=-1) if writes else -1
        more = {
            n for n in writes if n not in needed and sources[n] & touched and order.index(n) < last
        }
        if not more:
            return [n for n in order if n in needed]
        requested |= more


def _state_changes(order: Iterable[torch.fx.Node]) -> set[torch.fx.Node]:
    """The nodes that are called for their side effect: they take no tensor and return ``None``."""
    found: set[torch.fx.Node] = set()
    for fx_node in order:
        values = [value_of(n) for n in (fx_node, *(fx_node.all_input_nodes))]
        tensors = any(isinstance(v, torch.Tensor) for v in values)
        if fx_node.op == "call_function" and values[0] is None and not tensors:
            found.add(fx_node)
    return found


def _closure(requested: Iterable[torch.fx.Node]) -> set[torch.fx.Node]:
    found: set[torch.fx.Node] = set()
    todo = list(requested)
    while todo:
        fx_node = todo.pop()
        if fx_node not in found:
            found.add(fx_node)
            todo.extend(fx_node.all_input_nodes)
    return found


def _last_uses(nodes: list[torch.fx.Node]) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    """The nodes whose values are used last by each node."""
    last: dict[torch.fx.Node, torch.fx.Node] = {}
    for fx_node in nodes:
        for arg in (*fx_node.all_input_nodes, fx_node):
            if arg.op != "placeholder":
                last[arg] = fx_node
    found: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for arg, fx_node in last.items():
        found.setdefault(fx_node, []).append(arg)
    return found


def _sources(fx_nodes: Iterable[torch.fx.Node]) -> set[torch.fx.Node]:
    return {n for n in _closure(fx_nodes) if n.op == "placeholder"}


def _value(runner: Any, fx_node: torch.fx.Node, failed: list[torch.fx.Node]) -> Any:
    """Run a node; a failing assert is appended to ``failed`` instead of raising."""
    name = str(getattr(fx_node.target, "__name__", fx_node.target)).partition(".")[0]
    if fx_node.op != "call_function" or not _is_assert(name):
        return runner.run_node(fx_node)
    args, _ = runner.fetch_args_kwargs_from_env(fx_node)
    if name.startswith("sym_constrain_range") or not args:
        return None  # its range is a fact
    if not bool(args[0]):
        failed.append(fx_node)
    return args[1] if name.startswith("_functional_assert") and len(args) > 2 else None


def _scalars(desc: CaptureDesc, symbols: Symbols) -> dict[int, str]:
    """Names of the symbols of 0-dim inputs, by position."""
    found: dict[int, str] = {}
    for at, entry in enumerate(desc.inputs):
        if entry.tensor is not None and entry.tensor.source is not None:
            name = symbols.by_source.get(f"{entry.tensor.source.name}.item()")
            if name is not None and entry.tensor.layout == "strided" and not entry.tensor.size:
                found[at] = name
    return found


def _symbols_of_sizes(desc: CaptureDesc) -> set[str]:
    """Names of the symbols in sizes of inputs and in replacements."""
    tensors = list(walk(desc.inputs, MetaTensorDesc))
    numbers = [(t.size, t.stride, t.storage_offset) for t in tensors]
    scalars = [entry.sym for entry in desc.inputs if entry.sym is not None]
    return names_in((numbers, scalars, desc.replacements))


def _facts(
    desc: CaptureDesc, data: Mapping[str, Any], requested: Mapping[str, int], free: Collection[str]
) -> Iterator[Fact]:
    """The facts: requested values, runtime asserts, and ranges and guards of symbols from data."""
    for guard in guards_of(desc) if free else ():
        if not {s.name for s in guard.expr.free_symbols}.isdisjoint(free):
            yield guard
    for name, value in requested.items():
        yield Fact(sympy.Eq(sympy.Symbol(name, integer=True), value), f"{name} = {value}")
    yield from asserts_of(desc)
    yield from (fact for s, fact in ranges_of(desc) if s.name in data or s.name in free)


def _number(value: Any) -> Any:
    return sympy.Integer(value) if isinstance(value, int) else sympy.sympify(value, strict=True)


def _distance(expr: Any, by_name: Mapping[str, Any]) -> float:
    """Branch distance of a condition; 0 if it holds or has unbound symbols."""
    try:
        if substituted(expr, by_name) != sympy.false:
            return 0.0
        if isinstance(expr, sympy.And):
            return sum(_distance(arg, by_name) for arg in expr.args)
        if isinstance(expr, sympy.Or):
            return min(_distance(arg, by_name) for arg in expr.args)
        if getattr(expr, "is_Relational", False) and not isinstance(expr, sympy.Ne):
            sides: Any = expr
            lhs, rhs = substituted(sides.lhs, by_name), substituted(sides.rhs, by_name)
            gap = abs(float(lhs) - float(rhs))
            return gap if gap > 0 else 1.0
    except (ArithmeticError, AssertionError, TypeError, ValueError):  # torch asserts
        pass
    return 1.0


def _literals(fx_nodes: Iterable[torch.fx.Node]) -> list[int]:
    """Integers near the numbers among the arguments of nodes."""
    found: set[int] = set()
    for fx_node in fx_nodes:
        for arg in (*fx_node.args, *fx_node.kwargs.values()):
            if isinstance(arg, (int, float)) and not isinstance(arg, bool) and abs(arg) < 1 << 31:
                found.add(math.ceil(arg))
    return sorted(found)


def _constants(expr: Any) -> list[int]:
    """Integers near the numbers in a condition."""
    numbers = (n for n in expr.atoms(sympy.Number) if n.is_finite)
    return sorted(math.ceil(float(n)) for n in numbers if abs(n) < 1 << 31)
