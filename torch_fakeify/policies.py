"""By which policy the dims and numbers of a frontend's inputs get symbols.

Method: what ``_automatic_dynamic`` of ``torch/_dynamo/variables/builder.py`` (torch 2.13) does with
marks on a tensor, parameters, views, wrapper subclasses and jagged tensors, without the history of a
frame. The words are those of ``torch.fx.experimental.symbolic_shapes.DimDynamic``.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import torch

from . import _torch
from ._torch import DimDynamic, int_oo
from .desc import DimDynamicName, MarksDesc
from .errors import ShapeEnvError
from .marks import encode_marks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Dim", "Policy", "Wish", "context_of", "scalar_dim"]


@dataclasses.dataclass(frozen=True)
class Dim:
    """What a frontend wants of one dim of a tensor, or of a Python number.

    Attributes:
        kind: ``DYNAMIC`` for a symbol of its own, ``DUCK`` for one that it shares with equal sizes,
            ``UNBACKED`` for one without a hint, ``STATIC`` for the number that it is.
        min: the least value that is promised; ``None`` for none.
        max: the greatest.
        warn_only: whether the trace may turn a ``DYNAMIC`` one into a constant, or leave out some of
            its values. By default that is an error, as in ``torch.export``. Only 0 and 1 always
            become constants.
    """

    kind: DimDynamicName = "DYNAMIC"
    min: int | None = None
    max: int | None = None
    warn_only: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ShapeEnvError(
                "there is no such policy for a dim", expected=" | ".join(KINDS), found=self.kind
            )

    @property
    def constraint(self) -> Any:
        """The ``DimConstraint`` by which ``ShapeEnv.produce_guards`` finds a broken promise."""
        if self.kind != "DYNAMIC":
            return None
        if self.min is None and self.max is None:
            return _torch.RelaxedUnspecConstraint(warn_only=self.warn_only)
        lower = 0 if self.min is None else self.min
        upper: Any = int_oo if self.max is None else self.max
        bounds: Any = _torch.ValueRanges
        return _torch.StrictMinMaxConstraint(warn_only=self.warn_only, vr=bounds(lower, upper))


KINDS = tuple(kind for kind in get_args(DimDynamicName) if kind != "INFER_STRIDE")

Wish: TypeAlias = "Dim | DimDynamicName | Mapping[int, Dim | DimDynamicName]"
"""One `Dim` for a number or all dims of a tensor, or one for each dim by its index."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """How the inputs of a function become fake.

    The first that says something of a dim decides: ``named``, then the marks that
    ``torch._dynamo.mark_dynamic`` and its like left on the tensor, then ``dims`` or ``parameters``.

    Attributes:
        dims: of the dims of tensors.
        scalars: of Python integers, floats and booleans.
        parameters: of the dims of parameters, and of the buffers of modules.
        named: by the name of an argument (``"x"``) or the source of a part of one
            (``"L['xs'][0]"``). What is said of a wrapper subclass counts for its inner tensors too.
        marks: whether marks on tensors count.
        duck_shape: ``ShapeEnv``'s setting: whether equal ``DUCK`` sizes share a symbol.
        specialize_zero_one: ``ShapeEnv``'s setting: whether sizes of 0 and 1 are constants.
        prefer_deferred_runtime_asserts_over_guards: ``ShapeEnv``'s setting.
    """

    dims: DimDynamicName = "STATIC"
    scalars: DimDynamicName = "STATIC"
    parameters: DimDynamicName = "STATIC"
    named: Mapping[str, Wish] = dataclasses.field(default_factory=dict[str, Any])
    marks: bool = True
    duck_shape: bool = True
    specialize_zero_one: bool = True
    prefer_deferred_runtime_asserts_over_guards: bool = False

    def wish(self, name: str) -> Wish | None:
        """What is said of the source with this name."""
        found = self.named.get(name)
        if found is None and name.startswith("L['") and name.count("[") == 1:
            found = self.named.get(name[3:-2])
        return found

    def refuse_unknown(self, names: Iterable[str]) -> None:
        """Fail if something is said of what is no input.

        Raises:
            ShapeEnvError: a key of ``named`` is no source of an input.
        """
        known = set(names)
        for key in self.named:
            if key not in known and f"L[{key!r}]" not in known:
                raise ShapeEnvError(
                    "the policy names what is no input",
                    where=key,
                    expected=", ".join(sorted(known)) or "an input",
                    fix="Name an argument, or the source of a part of one: \"L['xs'][0]\"",
                )


# --- tensors --------------------------------------------------------------------------------------


def context_of(
    t: torch.Tensor, source: Any, policy: Policy, *, in_module: bool = False, wish: Any = None
) -> Any:
    """The symbolic context of a tensor, with those of its base and its inner tensors.

    Args:
        t: the tensor.
        source: where it is in the scope.
        policy: what the frontend wants.
        in_module: whether a module has it as a parameter or buffer.
        wish: what is said of the wrapper subclass that it is inside of.

    Raises:
        ShapeEnvError: the policy names a dim that the tensor does not have.
    """
    said = policy.wish(source.name)
    wish = wish if said is None else said
    in_module = in_module or isinstance(t, torch.nn.Parameter)
    dims = _dims(t, source, policy, wish, in_module=in_module)
    fields: dict[str, Any] = _fields(t, dims, policy)
    fields["tensor_source"] = source
    attr_source = _torch.dynamo_source().AttrSource
    base = t._base if t._is_view() else None
    if base is not None:
        base_source = attr_source(source, "_base")
        fields["view_base_context"] = context_of(base, base_source, policy, in_module=in_module)
    if not _torch.is_traceable_wrapper_subclass(t):
        return _torch.StatefulSymbolicContext(**fields)
    wrapper: Any = t
    inner = {name: getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]}
    fields["inner_contexts"] = {
        name: context_of(
            part,
            attr_source(source, name),
            policy,
            in_module=in_module,
            wish=wish if part.dim() == t.dim() else None,
        )
        for name, part in inner.items()
        if isinstance(part, torch.Tensor)
    }
    return _torch.SubclassSymbolicContext(**fields, track_outer_size_stride=not t.is_nested)


def _dims(
    t: torch.Tensor, source: Any, policy: Policy, wish: Wish | None, *, in_module: bool
) -> list[Dim]:
    marks = encode_marks(vars(t), where=source.name) if policy.marks else None
    default = _of(policy.parameters if in_module else policy.dims)
    dims = [_marked(marks, i) or default for i in range(t.dim())]
    if wish is not None:
        for i, dim in _by_dim(wish, t.dim(), source).items():
            dims[i] = dim
    for i, size in enumerate(t.size()):
        if isinstance(size, torch.SymInt) and size.node.is_nested_int():
            dims[i] = Dim("DYNAMIC", warn_only=True)
    return dims


def _of(wish: Dim | DimDynamicName) -> Dim:
    return wish if isinstance(wish, Dim) else Dim(wish)


def _by_dim(wish: Wish, ndim: int, source: Any) -> dict[int, Dim]:
    if isinstance(wish, (Dim, str)):
        return dict.fromkeys(range(ndim), _of(wish))
    found: dict[int, Dim] = {}
    for i, dim in wish.items():
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
    """What is marked on a tensor, in Dynamo's order of precedence."""
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
    """What is wanted of a Python number.

    Raises:
        ShapeEnvError: the policy names dims of it.
    """
    wish = policy.wish(source.name)
    if wish is None:
        # A constraint only where a frontend names the number: by default it may become constant.
        return dataclasses.replace(Dim(policy.scalars), warn_only=True)
    if not isinstance(wish, (Dim, str)):
        raise ShapeEnvError("a number has no dims", where=source.name, expected="a Dim")
    return _of(wish)
