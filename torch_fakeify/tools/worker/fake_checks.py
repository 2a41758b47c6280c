"""Run the nodes of a frame on real inputs and compare each result with its fake value.

The recorded fake value of a node has symbols, which are replaced by the sizes of the real inputs; an
unbacked symbol is replaced by the number in the real result of the node that binds it. A node whose
arguments differ from their fake values is not compared: what it returns follows from them.
"""

from __future__ import annotations

import json
import keyword
import re
from typing import IO, TYPE_CHECKING, Any

import torch
from torch.fx.node import map_aggregate, map_arg

from torch_fakeify.compat.torch_graphs import OpOverload
from torch_fakeify.encoding.modes import apply_modes
from torch_fakeify.errors import CaptureError, FakeifyError
from torch_fakeify.frames.graph.writing import LastWrites, may_write
from torch_fakeify.frames.inputs.materializing import materialize
from torch_fakeify.frames.inputs.symbol_values import Symbols
from torch_fakeify.render.code import node_stack
from torch_fakeify.render.readable_names import readable_name
from torch_fakeify.render.text import user_line
from torch_fakeify.replay.bindings import find_bindings
from torch_fakeify.replay.lowering import value_of
from torch_fakeify.tools.value_code import ValueCode, unsupported

from .exceptions import first_line
from .fake_facts import Comparison, Numbers, storages_of
from .replies import NodeDifference, OperatorCall, Parted, SizeChecked, TensorArgument

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch_fakeify.frames.captures import Capture

# Such operators return a part of a larger tensor: the losses one number in the storage of all of them.
_PARTS = (
    "mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy",
    "_embedding_bag_forward_only", "fold", "hann_window", "hamming_window", "blackman_window",
    "bartlett_window", "kaiser_window",
)  # fmt: skip
# Dropout returns its argument outside of training, its fake kernel a copy
# (``torch._decomp.decompositions.dropout``, torch 2.13).
_KNOWN = {"dropout": "storage", **dict.fromkeys(_PARTS, "storage bytes")}
"""What no backend has to care for of torch's own operators and their fake kernels, by the name of the function."""
_MOST = 64
"""Most whole numbers of a tensor that are written out in a call."""
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_WORDS = frozenset(
    ["torch", "call", "arguments", "facts", "inputs", "mode", "fakes", "sys", "operator", "math"]
)
"""Names that a script of a call has."""
_NO_TEXT = "a call that a script cannot write"


class FakeChecks:
    """Compares the nodes of a frame with their fake values, at given sizes.

    The arguments are as for `trials.EagerComparison`.

    Raises:
        CaptureError: the graph has tensors whose data was not recorded.
    """

    def __init__(self, frame: Capture, *, seed: int, device: str | None = None) -> None:
        if frame.desc.graph.without_data:
            raise CaptureError(
                "the graph holds tensors whose data is not in the capture",
                found=", ".join(frame.desc.graph.without_data),
                fix='Record it with capture(..., constants="small")',
            )
        self._frame = frame
        self._seed = seed
        self._device = device
        instance = frame.instantiate(device)
        self.gm = instance.gm
        self._env = instance.shape_env
        self.nodes = list(self.gm.graph.nodes)
        self.placeholders = self.gm.graph.find_nodes(op="placeholder")
        fakes: dict[torch.fx.Node, Any] = {n: value_of(n) for n in self.nodes}
        for fx_node, value in zip(self.placeholders, instance.inputs, strict=True):
            if fakes[fx_node] is None:  # the fake tensor of the trace shares its storage with views
                fakes[fx_node] = value
        self.fakes = fakes
        self.writes = LastWrites(self.nodes, lambda n: storages_of(fakes.get(n)))
        self.bindings: dict[torch.fx.Node, list[tuple[Any, Any]]] = {}
        """Symbols that a node binds, each with where its value is in the result."""
        if self._env is not None:
            for symbol, binding in find_bindings(self.gm.graph, self._env, ()).items():
                self.bindings.setdefault(binding.fx_node, []).append((symbol, binding))

    def run(self, sizes: Mapping[str, int], at: int, running: IO[bytes]) -> SizeChecked:
        """Run the nodes at some sizes, by symbol name, until one raises.

        The node that runs is written to a file, with the position of the sizes in the request.
        """
        _write_running(running, at, "")
        try:
            inputs = self._inputs(sizes)
        except Exception as error:  # noqa: BLE001 - without inputs there is no comparison
            return SizeChecked(0, not_compared=f"no inputs: {first_line(error)}")
        numbers = Numbers(self._env, Symbols(self._frame.desc.shape_env, sizes).values)
        note = ""
        run = _Run(self, numbers)
        torch.manual_seed(self._seed)
        with apply_modes(self._frame.desc.modes):
            run.bind_inputs(inputs, [*map(readable_name, self._frame.desc.inputs)])
            for fx_node in self.nodes:
                if fx_node.op in ("placeholder", "output"):
                    continue
                _write_running(running, at, fx_node.name)
                try:
                    run.node(fx_node)
                except Exception as error:  # noqa: BLE001 - data may make any operator raise
                    note = f"{fx_node.name} raised {first_line(error)}"
                    break
        return SizeChecked(run.compared, tuple(run.differences), note)

    def _inputs(self, sizes: Mapping[str, int]) -> list[Any]:
        """Return real inputs, whose data may violate a runtime assert of a fake kernel alone."""
        try:
            return self._frame.materialize(seed=self._seed, sizes=sizes, device=self._device)
        except CaptureError as error:
            if not self.bindings or not self._is_of_fake(error):
                raise
        return materialize(self._frame.desc, seed=self._seed, sizes=sizes, device=self._device)

    def _is_of_fake(self, unmet: CaptureError) -> bool:
        """Return whether a runtime assert is that of a fake kernel, not of the program: it has the line of the call."""
        nodes = self._frame.desc.graph.nodes
        lines = {user_line(node_stack(nodes[self.nodes.index(n)])) for n in self.bindings}
        return unmet.where is None or unmet.where in lines


class _Run:
    """One run of a graph."""

    def __init__(self, checks: FakeChecks, numbers: Numbers) -> None:
        self._checks = checks
        self._positions = {n: at for at, n in enumerate(checks.nodes)}
        self._numbers = numbers
        self._comparison = Comparison(numbers, checks.writes)
        self._runner = torch.fx.Interpreter(checks.gm, garbage_collect_values=False)
        self._differs: set[torch.fx.Node] = set()
        """Nodes that differ from their fake values, or depend on such nodes."""
        self.differences: list[NodeDifference] = []
        self.compared = 0

    def bind_inputs(self, inputs: Sequence[Any], names: Sequence[str]) -> None:
        """Bind the symbols to the sizes of the inputs."""
        nodes, fakes = self._checks.placeholders, self._checks.fakes
        self._runner.env.update(zip(nodes, inputs, strict=True))
        for fx_node, real in zip(nodes, inputs, strict=True):
            self._numbers.bind_input(fakes[fx_node], real)
        for fx_node, real, name in zip(nodes, inputs, names, strict=True):
            if list(self._comparison.parts(fakes[fx_node], real, self._positions[fx_node], name)):
                self._differs.add(fx_node)  # a later node shall not be blamed

    def node(self, fx_node: torch.fx.Node) -> None:
        """Run a node and compare its result."""
        call = self._call(fx_node) if may_write(fx_node) else None
        real = self._runner.env[fx_node] = self._runner.run_node(fx_node)
        fake = self._checks.fakes.get(fx_node)
        follows = not self._differs.isdisjoint(fx_node.all_input_nodes)
        violated = list(self._numbers.bind(self._checks.bindings.get(fx_node, ()), real))
        at = self._positions[fx_node]
        if follows or (fake is None and real is not None):
            if follows:
                self._differs.add(fx_node)
            return
        found = [*self._comparison.parts(fake, real, at, fx_node.name), *violated]
        self.compared += fx_node.op != "get_attr"
        parts = _without_known(fx_node, found)
        if not parts:
            if found:
                self._comparison.allow_sharing(fake, real)
            return
        self._differs.add(fx_node)
        if may_write(fx_node):  # into its arguments
            self._differs.update(fx_node.all_input_nodes)
        self.differences.append(NodeDifference(at, tuple(parts), *(call or self._call(fx_node))))

    def _call(self, fx_node: torch.fx.Node) -> tuple[OperatorCall | None, str]:
        try:
            return call_of(fx_node, self._runner.env), ""
        except FakeifyError as error:
            return None, str(error)


def _write_running(file: IO[bytes], at: int, name: str) -> None:
    """Replace the content of the file; it is there after a crash."""
    file.seek(0)
    file.write(json.dumps([at, name]).encode())
    file.truncate()


def _without_known(fx_node: torch.fx.Node, parts: Iterable[Parted]) -> list[Parted]:
    """Return the parts of a difference that are not known of a function of torch."""
    target: Any = fx_node.target
    if isinstance(target, OpOverload):
        name = target._schema.name.removeprefix("aten::")
    else:
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return [part for part in parts if part.what != _KNOWN.get(name)]


# --- the call of a node as Python, with records of the tensors that it gets -----------------------------


def call_of(fx_node: torch.fx.Node, values: Mapping[torch.fx.Node, Any]) -> OperatorCall:
    """Return the call of a node that calls a function or a method, for real values of its arguments.

    Raises:
        UnsupportedValueError: the function or an argument has no text.
    """
    where = fx_node.name
    tensors = _Tensors(where)
    code = ValueCode()

    def text(arg: Any) -> str:
        named = map_arg(arg, lambda n: tensors.named(values[n], n.name))
        return code.of(named, tensors.names, where)

    args = [text(arg) for arg in fx_node.args]
    kwargs = [f"{name}={text(arg)}" for name, arg in fx_node.kwargs.items()]
    if fx_node.op == "call_method":
        first, *rest = args
        called = f"{first}.{fx_node.target}({', '.join([*rest, *kwargs])})"
    elif fx_node.op == "call_function":
        called = f"{code.function(fx_node.target, where)}({', '.join([*args, *kwargs])})"
    else:
        raise unsupported(_NO_TEXT, where, fx_node.op)
    return OperatorCall(called, tuple(sorted(code.imports)), tuple(tensors.found))


class _Tensors:
    """Names the tensors of a call, and collects records of them."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._graph = torch.fx.Graph()
        self._nodes: dict[int, torch.fx.Node] = {}
        self._storages: dict[int, int] = {}
        self.names: dict[torch.fx.Node, str] = {}
        """By the nodes that stand for the tensors."""
        self.found: list[TensorArgument] = []

    def named(self, value: Any, name: str) -> Any:
        """Return a value with a node in place of each tensor."""
        return map_aggregate(
            value, lambda part: self._node(part, name) if isinstance(part, torch.Tensor) else part
        )

    def _node(self, t: torch.Tensor, name: str) -> torch.fx.Node:
        done = self._nodes.get(id(t))
        if done is not None:
            return done
        if type(t) not in _PLAIN or t.layout is not torch.strided or t.is_conj() or t.is_neg():
            raise unsupported(_NO_TEXT, self._where, f"{type(t).__qualname__} of {t.layout}")
        fx_node = self._nodes[id(t)] = self._graph.placeholder(name)
        name = self.names[fx_node] = _identifier(name, self.names.values())
        storage = t.untyped_storage()
        number = self._storages.setdefault(storage._cdata, len(self._storages))
        numbers, low, high = _whole_numbers(t)
        self.found.append(
            TensorArgument(
                name,
                str(t.dtype).removeprefix("torch."),
                tuple(t.shape),
                tuple(t.stride()),
                int(t.storage_offset()),
                number,
                storage.nbytes() // t.element_size(),
                str(t.device),
                requires_grad=t.requires_grad,
                is_parameter=isinstance(t, torch.nn.Parameter),
                numbers=numbers,
                low=low,
                high=high,
            )
        )
        return fx_node


def _whole_numbers(t: torch.Tensor) -> tuple[Any, int, int]:
    """Return the elements of a tensor of integers, if they are few, and the smallest and largest."""
    try:
        if t.dtype.is_floating_point or t.dtype.is_complex or not t.numel():
            return None, 0, 1
        whole = t.detach().to("cpu", torch.int64)
        low, high = int(whole.min()), int(whole.max())
    except (RuntimeError, NotImplementedError):  # a dtype of bits
        return None, 0, 1
    return (whole.tolist() if t.numel() <= _MOST else None), low, high


def _identifier(name: str, taken: Iterable[str]) -> str:
    name = re.sub(r"\W", "_", name)
    if not name.isidentifier() or keyword.iskeyword(name) or name in _WORDS:
        name = f"{name}_" if name.isidentifier() else f"x_{name}"
    while name in taken:
        name += "_"
    return name
