"""Guards, inputs and policies are written as data and read in another process, where they decide alike."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from frontend_cases import CASES, DUCK, DYNAMIC, Tied, again, call_module, grown, some
from functorch import make_fx
from processes import piped
from small_frontend import Jit
from torch._dynamo.source import AttrSource, LocalSource

import torch_fakeify as tfk
from torch_fakeify import frontend
from torch_fakeify.frontend import Dim, Guard, Guards, Policy
from torch_fakeify.guards.conditions import check_guard
from torch_fakeify.records.guards import CheckDesc, GuardsDesc, SizeGuardDesc

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

X, Y = LocalSource("x"), AttrSource(LocalSource("x"), "y")


# --- they decide alike ------------------------------------------------------------------------------


@pytest.mark.sweep
def test_a_module_is_known_in_another_process(tmp_path: Path) -> None:
    """The guards of a module hold there for another instance, and fail for one in another mode."""
    fn = Jit(call_module, DUCK, "eager")
    guards = fn.entry(fn.scope(Tied(), grown(5, 4))).guards
    path = tmp_path / "entry.guards"
    path.write_bytes(guards.dumps())
    code = f"""
from frontend_cases import Tied, grown
from torch_fakeify.frontend import Guards
guards = Guards.loads(open({str(path)!r}, "rb").read())
model = Tied()
print(guards.check({{"model": model, "x": grown(7, 4)}}))
print(guards.failing({{"model": model.eval(), "x": grown(7, 4)}}))
print(guards.failing({{"model": model.train(), "x": grown(7, 4).double()}}))
"""
    assert piped(code).decode().splitlines() == [
        "True",
        "L['model'].training is True",
        "L['x'].dtype == torch.float32",
    ]


@pytest.mark.parametrize(
    ("make", "same", "other"),
    [
        (lambda: {"a": [1], "b": (2,)}, {"a": [1], "b": (2,)}, {"a": [1], "c": (2,)}),
        (lambda: float("nan"), float("nan"), 0.0),
        (lambda: -0.0, -0.0, 0.0),
        (lambda: float("inf"), float("inf"), float("-inf")),
        (lambda: 1, 1, True),
        (lambda: None, None, 0),
        (lambda: torch.float16, torch.float16, torch.bfloat16),
        (lambda: torch.device("cuda", 1), torch.device("cuda", 1), torch.device("cuda", 0)),
        (lambda: "ä'\n", "ä'\n", "ä"),
        (lambda: {1, 2}, {2, 1}, {1}),
        (lambda: slice(1, None), slice(1, None), slice(0, None)),
        (lambda: b"\x00", b"\x00", "\x00"),
        (lambda: 1 + 2j, 1 + 2j, 1 - 2j),
        (lambda: torch.Size([2]), torch.Size([2]), (2,)),
    ],
)
def test_constants_decide_alike(make: Callable[[], Any], same: Any, other: Any) -> None:
    """Constants of every kind with their types, and containers of them."""
    guards = Guards(frontend.describe({"c": make()}).guards)
    for found in (guards, again(guards)):
        assert found.failing({"c": copy.deepcopy(same)}) is None
        assert found.failing({"c": other}) is not None
        assert found.failing({"c": same, "d": 1}) is not None


def test_a_class_that_is_not_imported_is_known_by_its_name() -> None:
    """Another class of that name is taken for it then, one of another name is not."""
    guard = check_guard("type", [X], Tied)
    desc = msgspec.structs.replace(guard.desc, expected="some.module.Layer")
    read = Guards.from_desc(GuardsDesc(guards=(desc,)))
    assert read[0].text == "type(L['x']) is some.module.Layer"
    layer = type("Layer", (), {"__module__": "some.module"})
    assert read.check({"x": layer()})
    assert not read.check({"x": Tied()})


def test_wrapper_subclasses_decide_alike() -> None:
    """Inner tensors, and contexts that are compared as records."""
    from torch.testing._internal.two_tensor import TwoTensor

    def two(*size: int) -> TwoTensor:
        return TwoTensor(torch.ones(size), torch.ones(size))

    fn = Jit(lambda x: x + 1, DYNAMIC, "eager")
    guards = fn.entry({"x": two(3, 4)}).guards
    read = again(guards)
    assert read.check({"x": two(5, 6)})
    assert str(read.failing({"x": torch.ones(5, 6)})) == (
        "type(L['x']) is torch.testing._internal.two_tensor.TwoTensor"
    )
    wrong = TwoTensor(torch.ones(3, 4).double(), torch.ones(3, 4).double())
    assert str(read.failing({"x": wrong})) == "L['x'].dtype == torch.float32"


def test_two_sparse_tensors_are_not_one() -> None:
    """Tensors without a storage of their own are told apart by identity."""

    def sparse() -> torch.Tensor:
        return torch.eye(3).to_sparse()

    guards = frontend.describe({"a": sparse(), "b": sparse()}).guards
    one = sparse()
    for found in (guards, again(guards)):
        assert found.check({"a": sparse(), "b": sparse()})
        failing = found.failing({"a": one, "b": one})
        assert str(failing) == "len({id(t) for t in (L['a'], L['b'])}) == 2"


def test_a_guard_of_the_frontend_has_no_record() -> None:
    """It is named, and the others can be written without it."""
    own = Guard("L['x'].shape[0] < 9", lambda scope: scope["x"].shape[0] < 9)
    guards = frontend.describe({"x": torch.ones(2)}).guards
    with pytest.raises(
        tfk.UnsupportedValueError, match=r"L\['x'\].shape\[0\] < 9: .* has no record"
    ):
        (guards + [own]).dumps()  # noqa: RUF005
    assert len(again(guards)) == len(guards)


# --- inputs and policies ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", some(CASES))
def test_a_trace_needs_records_alone(name: str) -> None:
    """A trace of inputs that were written and read gives the graph and the guards of the arguments' own."""
    case = CASES[name]
    scope = Jit(case.fn).scope(*case.calls[0]())

    def call(scope: dict[str, Any]) -> Any:
        return case.fn(**scope)

    found: list[tuple[str, str]] = []
    inputs = frontend.describe(scope, case.policy)
    data = inputs.dumps()
    read = frontend.Inputs.loads(data)
    assert read.dumps() == data
    assert read.records == inputs.records
    for each in (inputs, read):
        trace = frontend.Trace(each)
        with trace:
            gm = make_fx(trace.flat(call, scope))(*trace.inputs)
        found.append((gm.code, str(trace.guards())))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "policy",
    [
        Policy(),
        DUCK,
        DYNAMIC,
        Policy(dims="UNBACKED", scalars="DYNAMIC", marks=False, duck_shape=False),
        Policy(
            named={"x": {0: Dim(min=2, max=8), -1: "STATIC"}, "n": Dim("UNBACKED", warn_only=True)}
        ),
        Policy(named={"x": "DUCK"}, specialize_zero_one=False),
    ],
)
def test_policies_are_data(policy: Policy) -> None:
    """A policy that was written and read decides alike; short forms become whole ones."""
    read = Policy.loads(policy.dumps())
    assert read.desc == policy.desc
    assert read.dumps() == policy.dumps()
    assert read.named.keys() == policy.named.keys()
    scope = {"x": torch.ones(4, 4), "n": 3}
    if all(name in scope for name in policy.named):
        ours = frontend.describe(scope, policy).records
        assert frontend.describe(scope, read).records == ours


# --- bad documents ----------------------------------------------------------------------------------


def _changed(desc: Any, **fields: Any) -> bytes:
    return tfk.dumps(GuardsDesc(guards=(msgspec.structs.replace(desc, **fields),)))


_DTYPE = check_guard("dtype", [X], torch.float32).desc
_TYPE = check_guard("type", [X], int).desc
_STATE = check_guard("autocast", [], expected=True, argument="cpu").desc


def _size_guard() -> SizeGuardDesc:
    guards = Jit(lambda x: x + 1, DYNAMIC, "eager").entry({"x": grown(3)}).guards
    return next(d for d in guards.desc.guards if isinstance(d, SizeGuardDesc) and d.sources)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: b"", "the data is truncated"),
        (
            lambda: tfk.dumps([1]),
            r"\$.root: the document holds something else; expected GuardsDesc; found list",
        ),
        (lambda: _changed(_DTYPE, sources=()), r"\$.guards\[0\].sources: .* expected 1; found 0"),
        (
            lambda: _changed(_DTYPE, argument=1),
            r"\$.guards\[0\].argument: .* expected NoneType; found int",
        ),
        (lambda: _changed(_STATE, argument=None), r"\$.guards\[0\].argument: .* expected str"),
        (
            lambda: _changed(_TYPE, expected=3),
            r"\$.guards\[0\].expected: a class is named by a text",
        ),
        (
            lambda: tfk.dumps(
                GuardsDesc(guards=(CheckDesc(check="tree", sources=_DTYPE.sources),))
            ),
            r"\$.guards\[0\].expected: a structure",
        ),
        (
            lambda: tfk.dumps(
                GuardsDesc(guards=(CheckDesc(check="flatten", sources=_DTYPE.sources),))
            ),
            r"\$.guards\[0\].expected: a flattened tensor",
        ),
        (
            lambda: _changed(_size_guard(), sources=()),
            r"\$.guards\[0\].expr: the symbols of a condition are not those of its sources",
        ),
        (lambda: _dumped(_DTYPE).replace(b'"dtype"', b'"dtypo"', 1), "dtypo"),
    ],
)
def test_a_bad_document_is_one_error(data: Callable[[], bytes], message: str) -> None:
    """What, where, what was expected and what was found; nothing of it is run."""
    with pytest.raises(tfk.FormatError, match=message):
        Guards.loads(data())


def _dumped(desc: Any) -> bytes:
    return tfk.dumps(GuardsDesc(guards=(desc,)))


def test_a_number_that_is_too_large_is_refused() -> None:
    """A power that would take all memory is not computed."""
    import sympy

    from torch_fakeify.encoding.exprs import encode_expr
    from torch_fakeify.encoding.sources import encode_source

    symbol = sympy.Symbol("L['x']", integer=True)
    large = sympy.Eq(symbol, sympy.Pow(symbol, 10**9, evaluate=False), evaluate=False)
    desc = SizeGuardDesc(expr=encode_expr(large), sources=(encode_source(X),))
    with pytest.raises(tfk.LimitError):
        Guards.loads(_dumped(desc))


def test_a_source_that_runs_code_is_refused() -> None:
    """A call of a function of the scope is no way to a value."""
    from torch._dynamo.source import CallFunctionNoArgsSource

    from torch_fakeify.encoding.sources import encode_source

    desc = msgspec.structs.replace(_DTYPE, sources=(encode_source(CallFunctionNoArgsSource(X)),))
    with pytest.raises(tfk.UnsupportedValueError, match="a source that leads to no argument"):
        Guards.loads(_dumped(desc))
