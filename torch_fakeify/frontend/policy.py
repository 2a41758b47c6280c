"""Policies that decide which dims and numbers of a frontend's inputs get symbols.

Method: that of ``_automatic_dynamic`` in ``torch/_dynamo/variables/builder.py`` (torch 2.13) for marks
on tensors, parameters, views, wrapper subclasses and jagged tensors, without the history of a frame.
The kinds are those of ``torch.fx.experimental.symbolic_shapes.DimDynamic``.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import torch

from torch_fakeify.compat import torch_dynamo, torch_fakes, torch_symbols
from torch_fakeify.compat.torch_symbols import DimDynamic, int_oo
from torch_fakeify.encoding.marks import encode_marks
from torch_fakeify.errors import ShapeEnvError
from torch_fakeify.records.frontend import DimDesc, DimKind, NamedDimsDesc, PolicyDesc
from torch_fakeify.serialization.document import Serializable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch_fakeify.records.tensor import MarksDesc


@dataclasses.dataclass(frozen=True)
class Dim:
    """The policy of one dim of a tensor, or of a Python number.

    Attributes:
        kind: ``DYNAMIC`` for a separate symbol, ``DUCK`` for a symbol shared with equal sizes,
            ``UNBACKED`` for a symbol without a hint, ``STATIC`` for a constant.
        min: the promised lower bound; ``None`` for none.
        max: the promised upper bound; ``None`` for none.
        warn_only: whether the trace may specialize a ``DYNAMIC`` dim to a constant or a smaller range.
            By default that is an error, as in ``torch.export``. 0 and 1 always become constants.
    """

    kind: DimKind = "DYNAMIC"
    min: int | None = None
    max: int | None = None
    warn_only: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ShapeEnvError(
                "there is no such policy for a dim", expected=" | ".join(KINDS), found=self.kind
            )

    @property
    def desc(self) -> DimDesc:
        """The record of the policy."""
        return DimDesc(kind=self.kind, min=self.min, max=self.max, warn_only=self.warn_only)

    @classmethod
    def from_desc(cls, desc: DimDesc) -> Dim:
        """The policy of a record.

        Raises:
            ShapeEnvError: a dim cannot have this kind.
        """
        return cls(desc.kind, desc.min, desc.max, desc.warn_only)

    @property
    def constraint(self) -> Any:
        """The ``DimConstraint`` with which ``ShapeEnv.produce_guards`` checks the promise."""
        if self.kind != "DYNAMIC":
            return None
        if self.min is None and self.max is None:
            return torch_symbols.RelaxedUnspecConstraint(warn_only=self.warn_only)
        lower = 0 if self.min is None else self.min
        upper: Any = int_oo if self.max is None else self.max
        bounds: Any = torch_symbols.ValueRanges
        return torch_symbols.StrictMinMaxConstraint(
            warn_only=self.warn_only, vr=bounds(lower, upper)
        )


KINDS = get_args(DimKind)

DimSpec: TypeAlias = "Dim | DimKind | Mapping[int, Dim | DimKind]"
"""A `Dim` for a number or for all dims of a tensor, or one for each dim by its index."""


@dataclasses.dataclass(frozen=True)
class Policy(Serializable[PolicyDesc]):
    """Which dims and numbers of a function's inputs become symbolic.

    In order of precedence: ``named``, the marks of ``torch._dynamo.mark_dynamic`` and similar
    functions on the tensor, then ``dims`` or ``parameters``.

    Attributes:
        dims: the default for dims of tensors.
        scalars: the default for Python integers, floats and booleans.
        parameters: the default for dims of parameters, and of the buffers of modules.
        named: by the name of an argument (``"x"``) or the source of a part of one
            (``"L['xs'][0]"``). An entry for a wrapper subclass applies to its inner tensors too.
        marks: whether marks on tensors are used.
        duck_shape: ``ShapeEnv``'s setting: whether equal ``DUCK`` sizes share a symbol.
        specialize_zero_one: ``ShapeEnv``'s setting: whether sizes of 0 and 1 are constants.
        prefer_deferred_runtime_asserts_over_guards: ``ShapeEnv``'s setting.
    """

    _root = PolicyDesc

    dims: DimKind = "STATIC"
    scalars: DimKind = "STATIC"
    parameters: DimKind = "STATIC"
    named: Mapping[str, DimSpec] = dataclasses.field(default_factory=dict[str, Any])
    marks: bool = True
    duck_shape: bool = True
    specialize_zero_one: bool = True
    prefer_deferred_runtime_asserts_over_guards: bool = False

    @property
    def desc(self) -> PolicyDesc:
        """The record of the policy."""
        fields = {f: getattr(self, f) for f in PolicyDesc.__struct_fields__ if f != "named"}
        return PolicyDesc(named=tuple(_named(*item) for item in self.named.items()), **fields)

    @classmethod
    def from_desc(cls, desc: PolicyDesc) -> Policy:
        """The policy of a record.

        Raises:
            ShapeEnvError: a dim cannot have its kind.
        """
        fields: dict[str, Any] = {f: getattr(desc, f) for f in desc.__struct_fields__}
        fields["named"] = {
            each.name: {i: Dim.from_desc(dim) for i, dim in each.dims}
            if each.every is None
            else Dim.from_desc(each.every)
            for each in desc.named
        }
        return cls(**fields)

    def spec(self, name: str) -> DimSpec | None:
        """The entry of ``named`` for a source, by its name."""
        found = self.named.get(name)
        if found is None and name.startswith("L['") and name.count("[") == 1:
            found = self.named.get(name[3:-2])
        return found

    def refuse_unknown(self, names: Iterable[str]) -> None:
        """Check that ``named`` has only inputs.

        Raises:
            ShapeEnvError: a key of ``named`` is no source of an input.
        """
        inputs = set(names)
        for key in self.named:
            if key not in inputs and f"L[{key!r}]" not in inputs:
                raise ShapeEnvError(
                    "the policy names what is no input",
                    where=key,
                    expected=", ".join(sorted(inputs)) or "an input",
                    fix="Name an argument, or the source of a part of one: \"L['xs'][0]\"",
                )


def _named(name: str, spec: DimSpec) -> NamedDimsDesc:
    if isinstance(spec, (Dim, str)):
        return NamedDimsDesc(name=name, every=_of(spec).desc)
    return NamedDimsDesc(name=name, dims=tuple((i, _of(dim).desc) for i, dim in spec.items()))


# --- tensors --------------------------------------------------------------------------------------


def context_of(
    t: torch.Tensor, source: Any, policy: Policy, *, in_module: bool = False, spec: Any = None
) -> Any:
    """The symbolic context of a tensor, with those of its base and its inner tensors.

    The policy's entry for a wrapper subclass, ``spec``, also applies to its inner tensors.

    Raises:
        ShapeEnvError: the policy names a dim that the tensor does not have.
    """
    named = policy.spec(source.name)
    spec = spec if named is None else named
    in_module = in_module or isinstance(t, torch.nn.Parameter)
    dims = _dims(t, source, policy, spec, in_module=in_module)
    fields: dict[str, Any] = _fields(t, dims, policy)
    fields["tensor_source"] = source
    attr_source = torch_dynamo.dynamo_source().AttrSource
    base = t._base if t._is_view() else None
    if base is not None:
        base_source = attr_source(source, "_base")
        fields["view_base_context"] = context_of(base, base_source, policy, in_module=in_module)
    if not torch_fakes.is_traceable_wrapper_subclass(t):
        return torch_symbols.StatefulSymbolicContext(**fields)
    wrapper: Any = t
    inner = {name: getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]}
    fields["inner_contexts"] = {
        name: context_of(
            part,
            attr_source(source, name),
            policy,
            in_module=in_module,
            spec=spec if part.dim() == t.dim() else None,
        )
        for name, part in inner.items()
        if isinstance(part, torch.Tensor)
    }
    return torch_symbols.SubclassSymbolicContext(**fields, track_outer_size_stride=not t.is_nested)


def _dims(
    t: torch.Tensor, source: Any, policy: Policy, spec: DimSpec | None, *, in_module: bool
) -> list[Dim]:
    marks = encode_marks(vars(t), where=source.name) if policy.marks else None
    default = _of(policy.parameters if in_module else policy.dims)
    dims = [_marked(marks, i) or default for i in range(t.dim())]
    if spec is not None:
        for i, dim in _by_dim(spec, t.dim(), source).items():
            dims[i] = dim
    for i, size in enumerate(t.size()):
        if isinstance(size, torch.SymInt) and size.node.is_nested_int():
            dims[i] = Dim("DYNAMIC", warn_only=True)
    return dims


def _of(spec: Dim | DimKind) -> Dim:
    return spec if isinstance(spec, Dim) else Dim(spec)


def _by_dim(spec: DimSpec, ndim: int, source: Any) -> dict[int, Dim]:
    if isinstance(spec, (Dim, str)):
        return dict.fromkeys(range(ndim), _of(spec))
    found: dict[int, Dim] = {}
    for i, dim in spec.items():
        if not -ndim <= i < ndim:
            raise ShapeEnvError(
                "the policy names a dim that the tensor does not have",
                where=source.name,
                expected=f"a dim of {ndim}",
                found=str(i),
            )
        found[i] = _of(dim)
    return found


def _marked(marks: MarksDesc | None, i: int) -> Dim | None:
    """The policy of a dim by the marks on its tensor, in Dynamo's order of precedence."""
    if marks is None:
        return None
    if i in marks.unbacked:
        bounds = {dim: (low, high) for dim, low, high in marks.unbacked_bounds}
        return Dim("UNBACKED", *bounds.get(i, (None, None)))
    if i in marks.dynamic or i in marks.strict_unbacked:
        ranges = {dim: (low, high) for dim, low, high in marks.dynamic_range}
        return Dim("DYNAMIC", *ranges.get(i, (None, None)))
    if i in marks.weak_dynamic or i in marks.propagated_dynamic:
        return Dim("DYNAMIC", warn_only=True)
    return Dim("STATIC") if i in marks.static else None


def _fields(t: Any, dims: list[Dim], policy: Policy) -> dict[str, Any]:
    unbacked = {
        i: (dim.min, dim.max)
        for i, dim in enumerate(dims)
        if dim.kind == "UNBACKED" and (dim.min, dim.max) != (None, None)
    }
    marks = vars(t) if policy.marks else {}
    specialize_on = marks.get("_specialize_on", {})
    return {
        "dynamic_sizes": [DimDynamic[dim.kind] for dim in dims],
        "dynamic_strides": [DimDynamic.INFER_STRIDE] * len(dims),
        "constraint_sizes": [dim.constraint for dim in dims],
        "constraint_strides": [None] * len(dims),
        "specialize_on": [specialize_on.get(i, []) for i in range(len(dims))],
        "shape_ids": marks.get("_dynamo_shape_ids"),
        "unbacked_bounds": unbacked or None,
    }


# --- numbers --------------------------------------------------------------------------------------


def scalar_dim(source: Any, policy: Policy) -> Dim:
    """The policy of a Python number.

    Raises:
        ShapeEnvError: the policy names dims of it.
    """
    spec = policy.spec(source.name)
    if spec is None:
        # Only a named number has a constraint: by default it may be specialized.
        return dataclasses.replace(Dim(policy.scalars), warn_only=True)
    if not isinstance(spec, (Dim, str)):
        raise ShapeEnvError("a number has no dims", where=source.name, expected="a Dim")
    return _of(spec)
