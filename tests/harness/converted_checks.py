"""What is compared of tensors that a converter made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from tensor_facts import own_facts, parts
from torch._dynamo.source import AttrSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    RelaxedUnspecConstraint,
    ShapeEnv,
    StatefulSymbolicContext,
    StatelessSymbolicContext,
    StrictMinMaxConstraint,
)
from torch.utils._sympy.value_ranges import ValueRanges

from torch_fakeify.convert.converter import MetaConverter
from torch_fakeify.describe.describer import MetaTensorDescriber

if TYPE_CHECKING:
    import torch

OURS_ONLY = {"_dynamo", "_specialize_on", "_has_dynamo", "_is_buffer", "persistent", "_is_param"}


def facts(t: torch.Tensor) -> dict[str, Any]:
    """All that can be asked of a fake tensor, without its base and gradient."""
    view = t._is_view()
    state = {
        name: value if name.endswith("_memo") else None
        for name, value in vars(t).items()
        if not name.startswith(tuple(OURS_ONLY))
    }
    return own_facts(t) | {
        "class": type(t),
        "empty": str(t.untyped_storage().nbytes()) == "0",
        "state": {name: str(value) for name, value in state.items()},
        "shares_base_storage": view and t._base.untyped_storage() is t.untyped_storage(),
    }


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Both fake tensors answer every question alike, and so do their bases and gradients."""
    assert [*map(facts, parts([ours]))] == [*map(facts, parts([theirs]))]


def in_place(t: torch.Tensor) -> str:
    """What an in-place operator on the tensor says, or the versions of it and its base."""
    try:
        t.unsqueeze_(0)
    except (RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    if t.is_inference():
        return "inference"
    # torch's own conversion may have written to the tensor before; only a base's count is shared.
    return str(t._base is not None and t._version == t._base._version)


@st.composite
def contexts(draw: st.DrawFn, t: torch.Tensor, source: Any) -> Any:
    """A policy for the tensor's dims as Dynamo may make it, or none."""
    kind = draw(st.sampled_from(("none", "stateless", "stateful", "all")))
    if kind == "none":
        return None
    dims = [
        draw(st.sampled_from((DimDynamic.DYNAMIC, DimDynamic.DUCK, DimDynamic.STATIC)))
        if kind != "all"
        else DimDynamic.DYNAMIC
        for _ in range(t.ndim)
    ]
    constraints: list[Any] = [None] * t.ndim
    bounds: dict[int, Any] = {}
    for i, n in enumerate(t.shape):
        choice = draw(st.integers(0, 7))
        if choice == 0 and n >= 2:
            constraints[i] = RelaxedUnspecConstraint(warn_only=True)
        elif choice == 1 and n >= 2:
            constraints[i] = StrictMinMaxConstraint(warn_only=False, vr=ValueRanges(2, 64))
        elif choice == 2 and not t._is_view():
            dims[i] = DimDynamic.UNBACKED
            bounds[i] = (0, draw(st.sampled_from((None, 100))))
    base = None
    if t._is_view():
        base = draw(contexts(t._base, AttrSource(source, "_base")))
    more = {"tensor_source": source} if kind == "stateful" else {}
    return (StatefulSymbolicContext if more else StatelessSymbolicContext)(
        dynamic_sizes=dims,
        constraint_sizes=constraints,
        view_base_context=base,
        unbacked_bounds=bounds or None,
        **more,
    )


class GeneralDescriber(MetaTensorDescriber):
    """Describes every tensor as one that is not plain."""

    def _describe_plain(self, *_: Any) -> None:
        return None


class UncachedConverter(MetaConverter):
    """Makes every layout anew, and every symbol by torch's ``ShapeEnv``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self._sizes is not None:
            self._sizes.fresh = None

    def _known_layout(self, *_: Any) -> None:
        return None


def dynamic_mode() -> FakeTensorMode:
    """A mode with a fresh ShapeEnv."""
    return FakeTensorMode(shape_env=ShapeEnv())
