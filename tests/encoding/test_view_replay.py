"""View calls replayed on another base: order, arguments and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from view_zoo import JAGGED_VIEWS, Traced, aten, metadata, stub

from torch_fakeify.encoding.exprs import encode_expr
from torch_fakeify.encoding.views.replay import replay_view_calls
from torch_fakeify.encoding.views.schemas import bind, is_view_operator
from torch_fakeify.errors import ConvertError, FakeifyError, FormatError, UnknownNameError
from torch_fakeify.records.tensor import (
    ListValue,
    NestedIntDesc,
    SizeValue,
    SymDesc,
    SymValue,
    TensorValue,
    TupleValue,
    Value,
    ViewCallDesc,
)


def call(op: str, *args: Value, output: int | None = None, **kwargs: Value) -> ViewCallDesc:
    """Return the record of a call."""
    return ViewCallDesc(op=op, args=args, kwargs=tuple(kwargs.items()), output=output)


def run(*calls: ViewCallDesc, **callbacks: Any) -> torch.Tensor:
    """Replay the calls on a tensor of size (4, 6)."""
    return replay_view_calls(calls, torch.zeros(4, 6), where="t", **callbacks)


def refusal(cls: type[FakeifyError], *calls: ViewCallDesc, **callbacks: Any) -> str:
    """Return the text of the error that the calls raise."""
    with pytest.raises(FakeifyError) as caught:
        run(*calls, **callbacks)
    assert type(caught.value) is cls
    return str(caught.value)


# --- which operators are views --------------------------------------------------------------------


def test_every_view_operator_of_torch_is_accepted() -> None:
    """One operator with torch's property is none: it returns another tensor beside the view."""
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
    differ: set[str] = set()
    for name in names:
        packet, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(aten, packet), overload or "default", None)
        if op is not None and op.is_view != is_view_operator(op):
            differ.add(name)
    assert differ == {"aten::_unpack_dual"}


SCHEMAS = {
    "(Tensor(a) x, Tensor y) -> Tensor(a)": True,
    "(Tensor(a) x) -> (Tensor(a), Tensor(a))": True,
    "(Tensor(a) x) -> (Tensor(a), Tensor)": False,
    "(Tensor(a) x) -> Tensor": False,
    "(Tensor x, Tensor(a) y) -> Tensor(a)": False,
    "(Tensor(a) x, Tensor(b) y) -> Tensor(b)": False,
    "(Tensor(a!) x) -> Tensor(a!)": False,
    "(Tensor(a) x, Tensor(b!) y) -> Tensor(a)": False,
    "(Tensor(a) x) -> ()": False,
    "() -> Tensor": False,
    "(Tensor(a)[] x) -> Tensor(a)": False,
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_the_schema_decides_what_is_a_view(schema: str) -> None:
    """Every result of a view operator aliases its first argument, and it writes nothing."""
    with torch.library._scoped_library("tfk_schemas", "DEF") as library:
        library.define(f"op{schema}")
        ops: Any = torch.ops
        is_view_operator.cache_clear()  # another operator has the same name
        assert is_view_operator(ops.tfk_schemas.op.default) == SCHEMAS[schema]


def test_an_operator_may_return_a_tuple() -> None:
    """A view operator may return a fixed number of tensors instead of a list."""
    with torch.library._scoped_library("tfk_halves", "DEF") as library:
        library.define("halves(Tensor(a) x) -> (Tensor(a), Tensor(a))")
        library.impl("halves", lambda x: (x[:1], x[1:]), "CompositeExplicitAutograd")
        assert run(call("tfk_halves.halves.default", output=1)).size() == (3, 6)


# --- order ----------------------------------------------------------------------------------------


def test_numbers_are_visited_before_tensors() -> None:
    """The C++ view function has this order, also if the operator with the tensors runs first."""
    t = JAGGED_VIEWS["view"]()
    traced = Traced(t)
    log: list[str] = []
    traced.replay(
        symint=lambda n: (log.append(f"int {n}"), n)[1],
        tensor=lambda part: (log.append(f"tensor {type(part).__name__}"), part)[1],
    )
    nested = f"int {t.size(1)}"
    assert log == ["int 3", nested, "int 2", "int 2", "tensor Tensor", "tensor NestedTensor"]
    ops = ["aten._nested_view_from_jagged.default", "aten.view.default"]
    assert [c.op for c in traced.calls] == ops


def test_arguments_are_replaced_before_an_operator_runs() -> None:
    """A number or tensor that cannot be replaced leaves the base unchanged."""

    def refuse(_: object) -> Any:
        raise ZeroDivisionError

    ran: list[object] = []
    with torch.library._scoped_library("tfk_replay", "DEF") as library:
        library.define("first(Tensor(a) x) -> Tensor(a)")
        library.impl("first", lambda x: (ran.append(x), x.view(-1))[1], "CompositeExplicitAutograd")
        first = call("tfk_replay.first.default")
        with pytest.raises(ZeroDivisionError):
            run(first, call("aten.select.int", 0, 1), symint=refuse)
        assert ran == []
        run(first, call("aten.select.int", 0, 1))
        assert len(ran) == 1


def test_replaced_arguments_are_used() -> None:
    """The operators get the results of the callbacks."""
    calls = (call("aten.slice.Tensor", 0, 1, 2), call("aten.view.default", ListValue(items=(6,))))
    assert run(*calls, symint=lambda n: {2: 3, 6: 12}.get(n, n)).size() == (12,)


def test_sizes_may_be_any_sequence() -> None:
    """The operator gets a list for a list, a tuple or a size."""
    for cls in (ListValue, TupleValue, SizeValue):
        assert run(call("aten.view.default", cls(items=(3, 8)))).size() == (3, 8)


def test_a_symbol_without_a_callback_is_replaced_by_its_hint() -> None:
    """A symbolic number of a fake tensor is the number that it was."""
    sympy: Any = pytest.importorskip("sympy")
    sym = SymDesc(expr=encode_expr(sympy.Symbol("s0", integer=True)), hint=3)
    sizes = ListValue(items=(SymValue(sym=sym), 8))
    assert run(call("aten.view.default", sizes)).size() == (3, 8)
    seen: list[object] = []
    run(
        call("aten.view.default", sizes), symint=lambda n: (seen.append(n), 3 if n is sym else n)[1]
    )
    assert seen == [sym, 8]


def test_torch_function_is_not_called() -> None:
    """The C++ view function calls operators below subclasses and modes of functions."""

    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: object, **__: object) -> Any:
            raise AssertionError

    base = torch.zeros(4, 6).as_subclass(Loud)
    t = replay_view_calls((call("aten.select.int", 0, 1),), base, where="t")
    with torch._C.DisableTorchFunction():
        assert t.size() == (6,)


# --- refusals -------------------------------------------------------------------------------------


REFUSALS: dict[type[FakeifyError], dict[str, ViewCallDesc]] = {
    UnknownNameError: {
        ": torch.ops.mypack.flat is not registered in this process. Import the module "
        "that registers the operators of 'mypack' (--import MODULE)": call("mypack.flat.default"),
        ": torch.ops.aten.t has no overload 'Tensor'; expected default": call("aten.t.Tensor"),
        ": torch.ops.aten.relu.default is no view operator; expected an operator whose "
        "result aliases the first argument by its schema; found aten::relu(Tensor self) "
        "-> Tensor": call("aten.relu.default"),
        ": torch.ops.aten.t_.default is no view operator; expected an operator whose "
        "result aliases the first argument by its schema; found aten::t_(Tensor(a!) self)"
        " -> Tensor(a!)": call("aten.t_.default"),
        ": torch.ops.aten.from_file.default is denied: it opens a file": call(
            "aten.from_file.default", "x"
        ),
    },
    FormatError: {
        ": not the name of an operator; expected namespace.name; found 'aten.t'": call("aten.t"),
        ": `output` does not fit aten.t.default; expected none: it gives one; found 0": call(
            "aten.t.default", output=0
        ),
        ": `output` does not fit aten.unbind.int; expected the position of one of its "
        "results; found None": call("aten.unbind.int"),
        ": `output` does not fit aten.unbind.int; expected the position of one of its "
        "results; found -1": call("aten.unbind.int", output=-1),
        ": too many arguments for aten.t.default; expected at most 0 after the tensor; "
        "found 1": call("aten.t.default", 1),
        ": not an argument of aten.t.default, or a repeated one; found 'dim'": call(
            "aten.t.default", dim=1
        ),
        ": not an argument of aten.t.default, or a repeated one; found 'self'": call(
            "aten.t.default", self=1
        ),
        ": not an argument of aten.select.int, or a repeated one; found 'dim'": call(
            "aten.select.int", 0, 1, dim=1
        ),
        ": an argument of aten.select.int is missing; expected 'index'": call("aten.select.int", 0),
        ".index: not a size; expected an integer; found bool": call("aten.select.int", 0, True),
        ".size[1]: not a size; expected an integer; found str": call(
            "aten.view.default", ListValue(items=(3, "8"))
        ),
        ".index: not a size; expected an integer; found TensorValue": call(
            "aten.select.int", 0, TensorValue(tensor=stub(1))
        ),
        ".dim: a value of this kind has no meaning here; expected a constant; found "
        "TensorValue": call("aten.select.int", TensorValue(tensor=stub(1)), 0),
        ".offsets: not a tensor; expected a tensor or none; found int": call(
            "aten._nested_view_from_jagged.default", 1, TensorValue(tensor=stub(1))
        ),
    },
    ConvertError: {
        ": aten.unbind.int gives too few tensors of this base; expected more than 4; found 4": call(
            "aten.unbind.int", output=4
        ),
        ".offsets: the view function holds a tensor, which needs `tensor`; found tensor 7": call(
            "aten._nested_view_from_jagged.default", *[TensorValue(tensor=stub(7))] * 2
        ),
        ".index: a symbol without a number needs `symint`": call(
            "aten.select.int", 0, SymValue(sym=NestedIntDesc(0))
        ),
        ": torch cannot run aten.view.default on this base; found shape '[5, 5]' is "
        "invalid for input of size 24": call("aten.view.default", ListValue(items=(5, 5))),
        ": torch cannot run aten.select.int on this base; found select(): index 9 out of "
        "range for tensor of size [4, 6] at dimension 0": call("aten.select.int", 0, 9),
    },
}


@pytest.mark.parametrize(
    ("cls", "text"), [(cls, text) for cls, texts in REFUSALS.items() for text in texts]
)
def test_wrong_view_calls_are_refused(cls: type[FakeifyError], text: str) -> None:
    """A wrong view call is refused, and the error contains the path of the argument."""
    record = REFUSALS[cls][text]
    assert refusal(cls, record) == f"t.view_calls[0]{text}"
    if cls is FormatError:  # of each call of a chain
        assert refusal(cls, call("aten.t.default"), record) == f"t.view_calls[1]{text}"


def test_torchs_errors_on_symbols_are_not_wrapped() -> None:
    """Callers catch torch's exceptions under symbolic sizes by type."""
    with pytest.raises(IndexError, match=r"^select\(\): index 9 out of range"):
        run(call("aten.select.int", 0, 9), symint=lambda n: n)


def test_arguments_are_in_the_order_of_the_schema() -> None:
    """Names and positions are equivalent, and only numbers get their default."""
    expected = [("dim", 0), ("end", 3), ("step", 1)]
    for args, kwargs in (((0,), {"end": 3}), ((), {"end": 3, "dim": 0})):
        bound = bind(aten.slice.Tensor, args, kwargs, where="t")
        assert [(argument.name, argument.value) for argument in bound] == expected
    assert metadata(run(call("aten.slice.Tensor", end=3))) == metadata(torch.zeros(4, 6)[:3])
