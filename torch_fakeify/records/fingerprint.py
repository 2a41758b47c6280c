"""Hashes of a frame that do not depend on symbol names, ids, stacks or policies.

The record is walked once, depth first. Symbols and ids are numbered in first-seen order, inputs
first; the arguments of commutative functions, the guards and the ranges are sorted after that, as
sympy orders them by name.
"""

from __future__ import annotations

import hashlib
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import msgspec
from typing_extensions import override

from torch_fakeify.errors import CaptureError, check_choice

from .symbol_names import names_in
from .tensor import (
    AtomNode,
    ExprDesc,
    ExprValue,
    FloatNode,
    FunctionValue,
    IntNode,
    MetaTensorDesc,
    NestedIntDesc,
    NodeValue,
    RationalNode,
    SourceDesc,
    StackDesc,
    SymbolNode,
    SymDesc,
    SymValue,
    TensorValue,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from .frame import CaptureDesc, InputDesc
    from .graph import GraphModuleDesc, NodeDesc
    from .shape_env import ShapeEnvDesc

COMMUTATIVE = frozenset(
    {"Add", "Mul", "And", "Or", "Xor", "Min", "Max", "Eq", "Ne", "Equality", "Unequality"}
)
"""Functions whose argument order depends on the names of symbols."""

_PLAIN = frozenset({type(None), bool, int, float, str})

_flags = attrgetter(
    "requires_grad", "is_leaf", "is_inference", "is_conj", "is_neg", "is_parameter", "is_buffer",
    "creation_meta", "grad_dtype",
)  # fmt: skip

_ASSERTS = frozenset({"aten._assert_scalar.default", "torch._check", "torch._assert_scalar"})


FingerprintKind: TypeAlias = Literal["content", "structure"]
"""``structure``: without the sources of inputs and the names of the graph's attributes."""


def fingerprint(desc: CaptureDesc, kind: FingerprintKind = "content") -> str:
    """Return the SHA-256 of the frame's canonical form, in hexadecimal."""
    form = canonical_form(desc, kind)
    return hashlib.sha256(msgspec.json.encode(form, order="deterministic")).hexdigest()


def compile_key(desc: CaptureDesc, kind: FingerprintKind = "content") -> str:
    """Return a key of what is compiled: the fingerprint, and a hash of the settings if there are any.

    One graph under two configs of the compiler is two frames.
    """
    found = desc.surroundings
    if found is None or not (found.settings or found.options or found.mode or found.left_out):
        return fingerprint(desc, kind)
    # Of a setting that is set globally and given to `torch.compile` the latter counts.
    settings = {(s.module, s.name): s.value for s in found.settings}
    form = [sorted(settings.items(), key=lambda item: item[0]), sorted(found.left_out)]
    text = msgspec.json.encode([form, found.mode, found.options], order="deterministic")
    return f"{fingerprint(desc, kind)}+{hashlib.sha256(text).hexdigest()[:16]}"


def canonical_form(desc: CaptureDesc, kind: FingerprintKind = "content") -> dict[str, Any]:
    """Return the content that is hashed, as JSON-like data that is equal for equal frames.

    Raises:
        CaptureError: there is no such kind.
    """
    check_choice(kind, get_args(FingerprintKind), "kind", CaptureError)
    canonical = _Canonical() if kind == "content" else _Structure()
    aot = {} if desc.aot is None else {"aot": [desc.aot.kind, desc.aot.forward_outputs]}
    return {
        "inputs": [canonical.input(entry) for entry in desc.inputs],
        "graph": canonical.graph(desc.graph),
        "modes": canonical.value(desc.modes),
        "shape_env": canonical.shape_env(desc.shape_env),
        **aot,
    }


class _Canonical:
    def __init__(self) -> None:
        self.symbols: dict[str, str] = {}
        self.tensors: dict[int, int] = {}
        self.storages: dict[int, int] = {}
        self.exprs: dict[ExprDesc, Any] = {}
        self.nested: dict[int, int] = {}

    # --- expressions ---

    def symbol(self, name: str) -> str:
        prefix = name.rstrip("0123456789")
        return self.symbols.setdefault(name, f"{prefix}#{len(self.symbols)}")

    def expr(self, desc: ExprDesc) -> Any:
        """Return a hash of the expression, whose size does not depend on sharing."""
        done = self.exprs.get(desc)
        if done is not None:
            return done
        forms: list[str] = []
        for expr_node in desc.nodes:
            match expr_node:
                case SymbolNode(name=name):
                    form = self.symbol(name)
                case IntNode(value=value):
                    form = str(value)
                case FloatNode() | RationalNode() | AtomNode():
                    form = msgspec.json.encode(expr_node).decode()
                case _:
                    args = [forms[i] for i in expr_node.args]
                    if expr_node.function in COMMUTATIVE:
                        args.sort()
                    form = f"{expr_node.function}({','.join(args)})"
            if len(form) > 64:
                form = hashlib.sha256(form.encode()).hexdigest()
            forms.append(form)
        self.exprs[desc] = forms[-1]
        return forms[-1]

    def sym(self, desc: SymDesc) -> Any:
        form = [self.expr(desc.expr), desc.kind, self.number(desc.hint)]
        return [*form, "constant"] if desc.constant else form

    def number(self, value: Any) -> Any:
        if isinstance(value, SymDesc):
            return self.sym(value)
        if isinstance(value, NestedIntDesc):
            return ["nested", self.nested.setdefault(value.id, len(self.nested)), value.coeff]
        return value

    # --- tensors ---

    def tensor(self, desc: MetaTensorDesc) -> Any:
        number = self.tensors.get(desc.id)
        if number is not None:
            return {"tensor": number}
        self.tensors[desc.id] = len(self.tensors)
        storage = desc.storage
        return {
            "dtype": desc.dtype,
            "device": desc.device,
            "layout": desc.layout,
            "size": [self.number(n) for n in desc.size],
            "stride": [self.number(n) for n in desc.stride],
            "storage_offset": self.number(desc.storage_offset),
            "storage": None
            if storage is None
            else self.storages.setdefault(storage.id, len(self.storages)),
            "no_bytes": storage is not None and storage.nbytes == 0,
            "flags": list(_flags(desc)),
            "base": None if desc.base is None else self.tensor(desc.base),
            "grad": None if desc.grad is None else self.tensor(desc.grad),
            "kind": [
                self.value(part)
                for part in (
                    desc.view_calls,
                    desc.sparse,
                    desc.subclass,
                    desc.functorch,
                    desc.functional,
                    None if desc.nested_int is None else NestedIntDesc(desc.nested_int),
                    desc.is_pinned,
                )
            ],
        }

    def source(self, desc: SourceDesc | None) -> Any:
        return None if desc is None else desc.name

    def input(self, desc: InputDesc) -> Any:
        source = self.source(desc.source)
        if desc.tensor is not None:
            return [source, self.tensor(desc.tensor)]
        if desc.sym is not None:
            return [source, self.sym(desc.sym)]
        return [source, self.value(desc.value)]

    # --- graphs ---

    def graph(self, desc: GraphModuleDesc) -> Any:
        name_of = self.attribute_names(desc)
        return {
            "nodes": [self.fx_node(n, name_of) for n in desc.nodes],
            "submodules": [[name_of(name), self.graph(sub)] for name, sub in desc.submodules],
            "tensors": [[name_of(name), self.tensor(t)] for name, t in desc.tensors],
            "data": [
                [name_of(name), hashlib.sha256(data).hexdigest()] for name, data in desc.tensor_data
            ],
            "values": [[name_of(name), self.value(value)] for name, value in desc.values],
        }

    def attribute_names(self, _desc: GraphModuleDesc) -> Callable[[str], Any]:
        """Return what stands for the name of an attribute of a graph."""
        return str

    def fx_node(self, desc: NodeDesc, name_of: Callable[[str], Any]) -> Any:
        target = None if desc.op in ("placeholder", "output") else self.value(desc.target)
        if desc.op in ("get_attr", "call_module") and isinstance(target, str):
            target = name_of(target)
        args = desc.args
        if isinstance(desc.target, FunctionValue) and desc.target.name in _ASSERTS:
            args = args[:1]  # messages name symbols and nodes
        return [desc.op, target, self.value(args), self.value(desc.kwargs)]

    def value(self, value: Any) -> Any:
        """Return the form of a constant or record inside a graph."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is tuple or kind is list:
            return [self.value(item) for item in value]
        match value:
            case NodeValue():  # most often
                return ["node", value.index]
            case NestedIntDesc():
                return self.number(value)
            case SymDesc():
                return self.sym(value)
            case SymValue():
                return self.number(value.sym)
            case MetaTensorDesc():
                return self.tensor(value)
            case ExprValue():
                return self.expr(value.expr)
            case TensorValue():
                return self.tensor(value.tensor)
            case SourceDesc():
                return self.source(value)
            case StackDesc():
                return None
            case msgspec.Struct():
                fields = [self.value(getattr(value, f)) for f in value.__struct_fields__]
                return [value.__struct_config__.tag, *fields]
            case _:
                return value

    # --- shape environments ---

    def shape_env(self, env: Any) -> Any:
        if env is None:
            return None
        guards = self.guards(env)
        ranges = [
            [self.symbol(s.name), self._bound(s.lower), self._bound(s.upper)]
            for s in env.symbols
            if s.name in self.symbols and "@" not in self.symbols[s.name]
        ]
        return {
            "ranges": sorted(ranges),
            "guards": guards,
            "settings": self.value(env.settings),
        }

    def guards(self, env: ShapeEnvDesc) -> list[Any]:
        # Symbols that no input or node has are named by their source, not numbered.
        for s in env.symbols:
            if s.name not in self.symbols and s.sources:
                self.symbols[s.name] = f"{s.name.rstrip('0123456789')}@{s.sources[0].name}"
        return sorted({self.expr(g.expr) for g in env.guards})

    def _bound(self, bound: ExprDesc | None) -> Any:
        return "" if bound is None else self.expr(bound)


class _Structure(_Canonical):
    """Without sources and names: equal layers of a model, and equal pieces of a graph, are equal."""

    @override
    def source(self, desc: SourceDesc | None) -> Any:
        return None

    @override
    def attribute_names(self, desc: GraphModuleDesc) -> Callable[[str], Any]:
        """Number the attributes in the order of their use; those without a use come last, as recorded."""
        same = dict(desc.submodule_aliases)
        numbers: dict[str, int] = {}
        used = [n.target for n in desc.nodes if n.op in ("get_attr", "call_module")]
        unused = [
            name for table in (desc.submodules, desc.tensors, desc.values) for name, _ in table
        ]
        for name in (*used, *unused):
            if isinstance(name, str):
                numbers.setdefault(same.get(name, name), len(numbers))
        return lambda name: numbers.get(same.get(name, name), name)

    @override
    def guards(self, env: ShapeEnvDesc) -> list[Any]:
        """Return the guards of the numbered symbols, and of those that guards connect with them."""
        waiting = [(g.expr, names_in(g.expr)) for g in env.guards]
        found: list[ExprDesc] = []
        while True:
            near = [row for row in waiting if not row[1].isdisjoint(self.symbols)]
            if not near:
                return sorted({self.expr(expr) for expr in found})
            waiting = [row for row in waiting if row[1].isdisjoint(self.symbols)]
            for expr, _ in near:
                self.expr(expr)  # numbers its symbols
                found.append(expr)
