"""State outside a ``ShapeEnv`` after a rollback: ``SymNode`` objects, memos, converters, contexts."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import (
    FakeTensorMode,
)
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import (
    ShapeEnv,
)

import torch_fakeify as tfk
from torch_fakeify.errors import ShapeEnvError
from torch_fakeify.shape_env.rollback import clear_method_caches

if TYPE_CHECKING:
    from collections.abc import Callable
from env_sessions import (
    DYNAMIC,
    GONE,
    exprs,
    fake_of,
    int_of,
    make_mode,
    photo_and_record,
    stateful,
)

# --- caches of a SymNode ----------------------------------------------------------------------------


def test_expressions_cached_at_an_unchanged_version_are_cleared() -> None:
    """``constrain_unify`` replaces a symbol without a new version, so nothing is cached at 0."""
    env: Any = make_mode().shape_env
    a, b, c, d = (int_of(env, name, 4) for name in "abcd")
    assert c == d
    sum_ = a + b
    cp = tfk.checkpoint(env)
    symbolic_shapes.constrain_unify(a, b)
    clear_method_caches(ShapeEnv)  # as a version of another environment does
    assert len(sum_.node.expr.free_symbols) == 1
    cp.rollback()
    assert len(sum_.node.expr.free_symbols) == 2


def test_new_nodes_over_older_symbols_can_be_used() -> None:
    """Only nodes with an abandoned symbol cannot be used."""
    env: Any = make_mode().shape_env
    a = int_of(env, "a", 4)
    cp = tfk.checkpoint(env)
    double = a * 2
    tensor = torch.empty(0)
    cp.rollback()
    del tensor
    assert double == a + a
    assert double > 7
    assert exprs(env) == [f"2*{a} > 7"]


# --- abandoned symbols ------------------------------------------------------------------------------


USES: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda gone, old: gone + old,
    "add to": lambda gone, old: old + gone,
    "constant": lambda gone, _: 1 + gone,
    "multiply": lambda gone, old: old * gone,
    "compare": lambda gone, old: gone == old,
    "compare with": lambda gone, old: old < gone,
    "max": lambda gone, old: torch.sym_max(old, gone),
    "negate": lambda gone, _: -gone,
    "bool": lambda gone, _: bool(gone),
    "int": lambda gone, _: int(gone),
    "float": lambda gone, _: torch.sym_float(gone),
    "index": lambda gone, _: range(9)[gone],
    "check": lambda gone, _: torch._check(gone > 2),
    "hint": lambda gone, _: gone.node.hint,
    "expression": lambda gone, _: gone.node.expr,
    "guarded": lambda gone, _: symbolic_shapes.guard_or_false(gone == 4),
    "known": lambda gone, _: symbolic_shapes.statically_known_true(gone == 4),
    "size-like": lambda gone, _: symbolic_shapes._constrain_range_for_size(gone),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_of_an_abandoned_symbol_is_an_error(use: str) -> None:
    """The next symbol has the same name, and torch would take the old one for it."""
    env: Any = make_mode().shape_env
    old = int_of(env, "a", 4)
    cp = tfk.checkpoint(env)
    abandoned = int_of(env, "b", 5)
    cp.rollback()
    again = int_of(env, "b", 9)
    assert again.node.expr == abandoned.node._expr
    with pytest.raises(ShapeEnvError) as caught:
        USES[use](abandoned, old)
    assert str(caught.value) == (
        f"the symbol {again} was made after the checkpoint, and the ShapeEnv was rolled back. "
        "Make the tensor or the size again"
    )
    assert exprs(env) == []


def test_an_abandoned_expression_names_all_its_symbols() -> None:
    """The error has the names of the abandoned symbols and not that of an older one."""
    env: Any = make_mode().shape_env
    old = int_of(env, "a", 4)
    cp = tfk.checkpoint(env)
    first, second = env.create_unbacked_symint(), env.create_unbacked_symint()
    sum_ = first + second + old
    cp.rollback()
    with pytest.raises(ShapeEnvError, match=r"^u0, u1 were made after the checkpoint, and"):
        sum_ + 1


def test_an_abandoned_size_can_be_printed() -> None:
    """A debugger shows the size with a note."""
    mode = make_mode()
    cp = tfk.checkpoint(mode.shape_env)
    fake = fake_of(mode, "x", 4)
    float_, bool_ = (
        mode.shape_env.create_unbacked_symfloat(),
        mode.shape_env.create_unbacked_symbool(),
    )
    text = str(fake.shape[0])
    cp.rollback()
    assert str(fake.shape[0]) == repr(fake.shape[0]) == f"{text} (rolled back)"
    assert str(fake.shape) == f"torch.Size([{text} (rolled back)])"
    assert repr(fake) == f"FakeTensor(..., device='meta', size=({text} (rolled back),))"
    assert (str(float_), str(bool_)) == ("zuf0 (rolled back)", "Eq(u0, 1) (rolled back)")
    assert "shape_env=<the symbol" in repr(fake.shape[0].node)
    copy.copy(fake.shape[0].node.shape_env)


@pytest.mark.parametrize(
    "use",
    [
        lambda gone, old: gone + 1,
        lambda gone, old: old + gone,
        lambda gone, old: gone.view(-1),
        lambda gone, old: gone.sum().item(),
        lambda gone, old: torch.ops.aten.nonzero(gone),
        lambda gone, old: gone.numel() > 4,
        lambda gone, old: gone.is_contiguous(),
    ],
)
def test_an_abandoned_tensor_is_an_error_to_use(use: Any) -> None:
    """A fake tensor of abandoned sizes raises; one of older sizes can be used."""
    mode = make_mode()
    old = fake_of(mode, "x", 4, 6)
    cp = tfk.checkpoint(mode.shape_env)
    abandoned = fake_of(mode, "y", 4, 6)
    fine = old * 2
    cp.rollback()
    with pytest.raises(ShapeEnvError, match=GONE), mode:
        use(abandoned, old)
    with mode:
        assert (fine + old).shape == old.shape


def test_other_environments_are_not_changed() -> None:
    """Symbols of another environment stay, although they have the same names."""
    env, other = (make_mode().shape_env for _ in range(2))
    old = int_of(other, "a", 4)
    cp = tfk.checkpoint(env)
    made = int_of(other, "b", 4)
    cp.rollback()
    assert old == made
    assert len(exprs(other)) == 1


# --- caches of other objects ------------------------------------------------------------------------


def fakes_by(way: str, mode: FakeTensorMode, real: torch.Tensor, name: str, context: Any) -> Any:
    """Return a fake tensor made by torch's converter or by ours."""
    if way == "torch":
        return mode.from_tensor(real, source=LocalSource(name), symbolic_context=context)
    desc = tfk.describe_tensor(real)
    converter = tfk.MetaConverter(mode)
    return converter.from_desc(desc, source=LocalSource(name), symbolic_context=context)


@pytest.mark.parametrize("way", ["torch", "ours"])
def test_symbols_in_contexts_are_removed(way: str) -> None:
    """A stateful context would return an abandoned symbol that the environment does not have."""
    env: Any = make_mode().shape_env
    real = torch.empty(4, 6)
    used, fresh = stateful("x", 2), stateful("y", 2)
    fakes_by(way, FakeTensorMode(shape_env=env), real, "x", used)
    tables = [dict(c.shape_env_to_source_to_symbol_cache.get(id(env), {})) for c in (used, fresh)]
    assert [len(table) for table in tables] == [2, 0]
    cp = tfk.checkpoint(env)
    table = used.shape_env_to_source_to_symbol_cache[id(env)]
    table_then = dict(table)
    for _ in range(2):
        made = fakes_by(way, FakeTensorMode(shape_env=env), real, "y", fresh)
        env.create_symbol(5, LocalSource("z"), DYNAMIC, symbolic_context=used)
        cp.rollback()
        assert fresh.shape_env_to_source_to_symbol_cache == {}
        assert used.shape_env_to_source_to_symbol_cache[id(env)] is table
        assert table == table_then
        assert not env.var_to_range.keys() & made.shape[0].node._expr.free_symbols
    again = fakes_by(way, FakeTensorMode(shape_env=env), real, "y", fresh)
    assert again.shape[0].node.expr in env.var_to_range
    assert again.shape[0] > 3


def test_memos_of_surviving_tensors_are_restored() -> None:
    """After a rollback ``nonzero`` and ``item`` allocate again, unless they had before it."""
    mode = make_mode()
    env: Any = mode.shape_env
    with mode:
        x, y = torch.empty(4), torch.empty(4)
        i, j = (torch.empty((), dtype=torch.int64) for _ in range(2))
        torch.nonzero(y)
        j.item()
        memos = [dict(vars(fake)) for fake in (x, y, i, j)]
        cp = tfk.checkpoint(env)
        for _ in range(2):
            sizes = [torch.nonzero(x).shape[0], torch.unique(x).shape[0], i.item()]
            assert [str(size) for size in sizes] == ["u2", "u3", "u4"]
            y.add_(1)
            assert str(torch.nonzero(y).shape[0]) == "u5"
            assert str(j.item()) == "u1"
            cp.rollback()
            assert [dict(vars(fake)) for fake in (x, y, i, j)] == memos
            assert env.unbacked_symint_counter == 2
        assert i.item().node.expr in env.var_to_range
        assert str(i.item()) == "u2"


def test_nested_ints_of_surviving_tensors_are_restored() -> None:
    """A nested int that offsets got since the checkpoint is removed."""
    mode = make_mode()
    with mode:
        offsets = torch.empty(4, dtype=torch.int64)
    cp = tfk.checkpoint(mode.shape_env)
    with mode:
        offsets.get_nested_int()
    assert offsets.nested_int_memo is not None
    cp.rollback()
    assert offsets.nested_int_memo is None


def test_new_tensors_and_storages_are_removed_from_converters() -> None:
    """A real tensor gets a new fake one, with sources in the environment."""
    mode = make_mode()
    env: Any = mode.shape_env
    reals = {name: torch.empty(4, 6) for name in "abcd"}
    source = {name: LocalSource(name) for name in reals}
    old = mode.from_tensor(reals["a"], source=source["a"])
    cp = tfk.checkpoint(env)
    assert len(env.var_to_sources[old.shape[0].node.expr]) == 1
    abandoned = mode.from_tensor(reals["b"], source=source["b"])
    view = mode.from_tensor(reals["c"].view(24), source=source["c"])
    same = mode.from_tensor(reals["a"].T, source=source["d"])
    assert same.untyped_storage()._cdata == old.untyped_storage()._cdata
    sources = env.var_to_sources[old.shape[0].node.expr]
    assert len(sources) > 2
    cp.rollback()
    memo = mode.fake_tensor_converter.meta_converter
    assert [*memo.tensor_memo.values()] == [old]
    assert len(memo.storage_memo) == 1
    assert mode.from_tensor(reals["a"], source=source["a"]) is old
    again = mode.from_tensor(reals["b"], source=source["b"])
    assert again is not abandoned
    assert [s.name for s in sources] == ["L['a'].size()[0]", "L['b'].size()[0]"]
    assert again.untyped_storage().nbytes() == old.untyped_storage().nbytes()
    del view


def test_layouts_are_computed_again_after_a_rollback() -> None:
    """C++ caches that a tensor is contiguous, whose guard was rolled back."""
    mode = make_mode()
    env: Any = mode.shape_env
    x = fake_of(mode, "x", 4, 6)
    frozen = (tuple(map(str, x.shape)), tuple(map(str, x.stride())), x._version)
    alias = x.detach()
    assert exprs(env) == []
    for _ in range(2):
        cp = tfk.checkpoint(env)
        check = photo_and_record(env)
        assert x.is_contiguous()
        assert alias.is_contiguous()
        assert len(exprs(env)) == 1
        cp.rollback()
        check()
        assert (tuple(map(str, x.shape)), tuple(map(str, x.stride())), x._version) == frozen
    assert x.is_contiguous()
    assert len(exprs(env)) == 1


def test_abandoned_tensors_do_not_hinder_a_later_rollback() -> None:
    """The layouts of abandoned tensors are not reset."""
    mode = make_mode()
    x = fake_of(mode, "x", 4, 6)
    cp = tfk.checkpoint(mode.shape_env)
    abandoned = fake_of(mode, "y", 7, 5)
    cp.rollback()
    assert x.is_contiguous()
    cp.rollback()
    assert exprs(mode.shape_env) == []
    assert "rolled back" in str(abandoned.shape)


def test_resetting_a_layout_makes_no_size_a_constant() -> None:
    """A constant size at an inner checkpoint may be symbolic again at an outer one."""
    mode = make_mode()
    env: Any = mode.shape_env
    x = fake_of(mode, "x", 4, 6)
    rows, columns, step = (str(part) for part in (*x.shape, x.stride()[0]))
    outer = tfk.checkpoint(env)
    assert x.shape[1] == 6
    inner = tfk.checkpoint(env)
    assert x.is_contiguous()
    assert exprs(env) == [f"Eq({columns}, 6)", f"Eq({step}, 6)"]
    inner.rollback()
    assert x.is_contiguous()
    assert exprs(env) == [f"Eq({columns}, 6)", f"Eq({step}, 6)"]
    outer.rollback()
    assert (str(x.shape), str(x.stride())) == (f"torch.Size([{rows}, {columns}])", f"({step}, 1)")
    assert x.is_contiguous()
    assert exprs(env) == [f"Eq({step}, {columns})"]


@pytest.mark.parametrize(
    "make",
    [
        lambda mode: torch.empty(4, 6).nonzero(),
        lambda mode: fake_of(mode, "q", 5, 7).t(),
        lambda mode: fake_of(mode, "q", 5, 7)[1:, 2:],
        lambda mode: fake_of(mode, "q", 5, 7).requires_grad_(),
        lambda mode: fake_of(mode, "q", 5, 7).new_empty(()),
        lambda mode: torch.empty(mode.shape_env.create_unbacked_symint(), 3).as_strided((2,), (2,)),
        lambda mode: fake_of(mode, "q", 5, 7).expand(3, -1, -1),
    ],
)
def test_resetting_a_layout_changes_nothing_else(make: Any) -> None:
    """Sizes, strides, offset, version and gradient are equal, and no fact is added."""
    mode = make_mode()
    env: Any = mode.shape_env
    with mode:
        made = make(mode)
    check = photo_and_record(env)
    cp = tfk.checkpoint(env)

    def facts() -> list[str]:
        layout = made.shape, made.stride(), made.storage_offset(), made._version
        return [str(part) for part in (*layout, made.requires_grad, made.is_leaf, made._is_view())]

    before = facts()
    x = fake_of(mode, "x", 4, 6)
    x.is_contiguous()
    cp.rollback()
    check()
    assert facts() == before
