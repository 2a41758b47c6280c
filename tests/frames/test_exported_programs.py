"""Programs of ``torch.export``: captured, made again elsewhere, and compiled."""

from __future__ import annotations

import copy
import io
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import sympy
import torch
from msgspec.structs import replace
from processes import fresh
from torch import nn
from torch.export import Dim, ExportedProgram, export

import torch_fakeify as tfk
from torch_fakeify.cli import main
from torch_fakeify.encoding.exprs import encode_expr
from torch_fakeify.records.tensor import SourceDesc

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch_fakeify.records.frame import CaptureDesc


class Layers(nn.Module):
    """Has parameters, persistent and other buffers, constants, and changes a buffer and an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("other", torch.ones(4), persistent=False)
        self.constant = torch.full((4,), 2.0)

    def forward(self, x: torch.Tensor, d: dict[str, Any], *, k: int = 2) -> Any:
        """A dict of a tensor and a size."""
        self.count.add_(1)
        x.add_(1)
        bias = torch.tensor([1.0, 2.0, 3.0, 4.0]) + self.constant + self.other
        return {"y": self.linear(x) * k + bias + d["z"].sum(), "n": x.shape[0]}


class Tied(nn.Module):
    """Has one weight twice, and modules in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.layers[1].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both layers."""
        return self.layers[1](self.layers[0](x).relu())


class Calls(nn.Module):
    """Takes a tuple and a list, and returns a nested result."""

    def forward(self, pair: tuple[torch.Tensor, list[torch.Tensor]], s: float) -> Any:
        """A tuple with a list and a dict in it."""
        left, (right,) = pair
        return (left + right * s, [left - right, {"both": left}])


class Chooses(nn.Module):
    """Has a higher-order operator whose branches are graphs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One of two branches."""
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


class Selects(nn.Module):
    """Has a size that depends on data, and a runtime assert about it."""

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> Any:
        """The first rows, and the positions that are not zero."""
        size = n.item()
        torch._check(size >= 1)
        torch._check(size <= x.shape[0])
        return x[:size] * 2, x.nonzero()


def numbers(*size: int) -> torch.Tensor:
    """A tensor filled by position."""
    return torch.arange(float(torch.Size(size).numel())).reshape(size) - 3


class Case(NamedTuple):
    """A program with calls that it takes, and calls that it refuses."""

    module: Callable[[], nn.Module]
    args: Callable[[], tuple[Any, ...]]
    shapes: Any
    kwargs: dict[str, Any] | None = None
    calls: tuple[Callable[[], tuple[Any, ...]], ...] = ()
    refused: tuple[Callable[[], tuple[Any, ...]], ...] = ()
    kept: tuple[str, ...] = ()
    """Modules that keep their calling conventions."""


CASES = {
    "layers": Case(
        Layers,
        lambda: (numbers(6, 4), {"z": torch.ones(3)}),
        {"x": {0: Dim("b", min=3, max=64)}, "d": {"z": {0: Dim.DYNAMIC}}, "k": None},
        {"k": 2},
        calls=(lambda: (numbers(5, 4), {"z": torch.ones(7)}),),
        refused=(
            lambda: (numbers(65, 4), {"z": torch.ones(7)}),
            lambda: (numbers(5, 5), {"z": torch.ones(7)}),
        ),
    ),
    "tied": Case(
        Tied,
        lambda: (numbers(2, 3),),
        {"x": {0: Dim.AUTO}},
        calls=(lambda: (numbers(7, 3),),),
        refused=(lambda: (numbers(7, 4),),),
    ),
    "kept": Case(
        Tied,
        lambda: (numbers(2, 3),),
        None,
        calls=(lambda: (numbers(2, 3) * 2,),),
        kept=("layers.0",),
    ),
    "derived": Case(
        lambda: nn.ReLU(),
        lambda: (numbers(6, 4),),
        ({0: 2 * Dim("half", min=1, max=8)},),
        calls=(lambda: (numbers(8, 4),),),
        refused=(lambda: (numbers(18, 4),),),
    ),
    "structured": Case(
        Calls,
        lambda: ((numbers(4), [numbers(4)]), 2.5),
        None,
        calls=(lambda: ((numbers(4), [numbers(4) * 2]), 2.5),),
        refused=(lambda: ((numbers(5), [numbers(5)]), 2.5),),
    ),
    "branches": Case(
        Chooses,
        lambda: (numbers(6),),
        {"x": {0: Dim.AUTO}},
        calls=(lambda: (numbers(9),), lambda: (-numbers(9),)),
    ),
    "data": Case(
        Selects,
        lambda: (numbers(6), torch.tensor(4)),
        {"x": {0: Dim.AUTO}, "n": None},
        calls=(lambda: (numbers(9), torch.tensor(2)),),
        refused=(lambda: (numbers(3), torch.tensor(7)),),
    ),
}


def exported(name: str, level: str = "training") -> ExportedProgram:
    """The program of a case, as exported or as decomposed."""
    case = CASES[name]
    torch.manual_seed(0)
    program = export(
        case.module(),
        case.args(),
        case.kwargs,
        dynamic_shapes=case.shapes,
        strict=bool(case.kept),
        preserve_module_call_signature=case.kept,
    )
    return program if level == "training" else program.run_decompositions()


def through_a_file(capture: tfk.Capture, folder: Path) -> tfk.Capture:
    """The capture after it was saved and read."""
    capture.save(folder / "program.fkf")
    return tfk.Capture.load(folder / "program.fkf")


def outcome(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Result, changed arguments and buffers of a call, or its error as text."""
    try:
        result = module(*args, **(kwargs or {}))
    except (AssertionError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return result, args, dict(module.named_buffers())


def assert_same(found: Any, expected: Any) -> None:
    """Compare outcomes."""
    one, structure = torch.utils._pytree.tree_flatten(found)
    other, expected_structure = torch.utils._pytree.tree_flatten(expected)
    assert structure == expected_structure
    for a, b in zip(one, other, strict=True):
        assert type(a) is type(b)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


# --- a program, a capture, a program --------------------------------------------------------------


@pytest.mark.parametrize("level", ["training", "decomposed"])
@pytest.mark.parametrize("name", CASES)
def test_a_program_is_made_again(name: str, level: str, tmp_path: Path) -> None:
    """Its graph, signature, ranges, guards and calls are those of the program that was exported."""
    case, program = CASES[name], exported(name, level)
    capture = through_a_file(tfk.capture(program), tmp_path)
    again = capture.exported_program(program.state_dict, program.constants)
    assert str(again.graph) == str(program.graph)
    assert again.graph_signature == program.graph_signature
    assert again.range_constraints == program.range_constraints
    assert again.dialect == program.dialect
    assert again.module_call_graph == program.module_call_graph
    signatures = {entry.fqn: entry.signature for entry in again.module_call_graph}
    assert all(signatures[name] is not None for name in case.kept)
    for make in (case.args, *case.calls, *case.refused):
        one, other = copy.deepcopy(program).module(), copy.deepcopy(again).module()
        expected = outcome(one, make(), case.kwargs)
        assert_same(outcome(other, make(), case.kwargs), expected)
        assert isinstance(expected, str) == (make in case.refused)


@pytest.mark.parametrize("name", ["layers", "tied", "branches"])
def test_it_can_be_saved_decomposed_and_unflattened(name: str, tmp_path: Path) -> None:
    """Torch does with it what it does with the program itself."""
    case, program = CASES[name], exported(name)
    capture = through_a_file(tfk.capture(program), tmp_path)
    again = capture.exported_program(program.state_dict, program.constants)
    torch.export.save(again, tmp_path / "again.pt2")
    loaded = torch.export.load(tmp_path / "again.pt2")
    make = case.calls[0]
    expected = outcome(copy.deepcopy(program).module(), make(), case.kwargs)
    assert_same(outcome(loaded.module(), make(), case.kwargs), expected)
    functional = again.run_decompositions()
    assert str(functional.graph_signature) == str(exported(name, "decomposed").graph_signature)
    flat = torch.export.unflatten(again)(*make(), **(case.kwargs or {}))
    assert_same(flat, expected[0])


SCRIPT = """
import sys
import torch
import torch_fakeify as tfk

capture = tfk.Capture.load(sys.argv[1])
program = capture.exported_program()
print(type(program).__name__, program.dialect, len(program.state_dict))
weight = program.state_dict["linear.weight"]
print(isinstance(weight, torch.nn.Parameter), program.example_inputs[0][0].device)
functional = program.run_decompositions()
print([spec.kind.name for spec in functional.graph_signature.output_specs])
out = capture.compile("aot_eager")(*capture.materialize(sizes={"x.size(0)": 5}))
print(len(out), tuple(out[0].shape), "Layers" in globals())
"""


@pytest.mark.sweep
def test_another_process_needs_neither_module_nor_weights(tmp_path: Path) -> None:
    """It has the program with fake tensors, transforms it, and compiles and runs its graph."""
    tfk.capture(exported("layers"), constants="small").save(tmp_path / "program.fkf")
    found = fresh("-c", SCRIPT, tmp_path / "program.fkf", cwd=tmp_path)
    assert found.stdout.splitlines() == [
        "ExportedProgram TRAINING 3",
        "True meta",
        "['BUFFER_MUTATION', 'USER_INPUT_MUTATION', 'USER_OUTPUT', 'USER_OUTPUT']",
        "2 (5, 4) False",
    ]


def test_show_says_what_inputs_and_outputs_are(capsys: Any, tmp_path: Path) -> None:
    """Of the graph of a program without mutations, whose new values are its first outputs."""
    tfk.capture(exported("layers", "decomposed")).save(tmp_path / "program.fkf")
    assert main(["show", str(tmp_path / "program.fkf")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(", exported program")
    assert lines[3:5] == [
        "inputs     2 parameters, then 2 buffers, then 2 constants, then 3 arguments",
        "outputs    add is the new value of buffer count; add_4 is the new value of argument x; 2 results",
    ]


def test_constants_are_recorded_by_choice(tmp_path: Path) -> None:
    """With their data a program needs the ``state_dict`` and other buffers alone."""
    program = exported("layers")
    small = through_a_file(tfk.capture(program, constants="small"), tmp_path)
    others = {"other": program.constants["other"]}
    again = small.exported_program(program.state_dict, others)
    case = CASES["layers"]
    expected = outcome(copy.deepcopy(program).module(), case.args(), case.kwargs)
    assert_same(outcome(again.module(), case.args(), case.kwargs), expected)
    assert tfk.capture(program).desc.export.constants == ()  # type: ignore[union-attr]
    with pytest.raises(
        tfk.CaptureError, match="not in constants; expected lifted_tensor_0; found other"
    ):
        tfk.capture(program).exported_program(program.state_dict, others)


# --- by sources -----------------------------------------------------------------------------------


def test_inputs_are_bound_to_the_module_and_the_arguments() -> None:
    """Weights and buffers by the names that they have in the module, arguments by theirs."""
    program = exported("layers")
    capture = tfk.capture(program)
    module, x, z = program.module(), numbers(5, 4), torch.ones(2)
    scope = {"self": module, "x": x, "d": {"z": z}, "k": 2}
    values = capture.bind(scope)
    assert values[0] is module.linear.weight
    assert values[2] is module.count
    assert values[-3] is x
    assert values[-2] is z
    assert capture.check({**scope, "x": numbers(65, 4)}) is not None
    assert capture.check({**scope, "k": 3}) is not None
    with pytest.raises(tfk.CaptureError, match=r"expected L\['d'\]\['z'\]"):
        capture.bind({**scope, "d": {}})
    expected = copy.deepcopy(program).module()(x.clone(), {"z": z}, k=2)
    found = capture.compile("eager")(*values)
    assert torch.equal(found[0], expected["y"])


class Counts(nn.Module):
    """Has one buffer twice, and changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.zeros(3))
        self.register_buffer("b", self.a)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The argument and both buffers."""
        self.a.add_(1)
        return x + self.a + self.b


def saved_and_loaded(program: ExportedProgram) -> ExportedProgram:
    """Return what ``torch.export.load`` reads."""
    file = io.BytesIO()
    torch.export.save(program, file)
    return torch.export.load(io.BytesIO(file.getvalue()))


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize(
    ("shares", "x", "part", "level"),
    [
        (Counts, numbers(3), "b", "training"),
        (Tied, numbers(2, 3), "layers.1.weight", "training"),
        (Tied, numbers(2, 3), "layers.1.weight", "decomposed"),
    ],
)
def test_what_two_modules_share_is_one_tensor(
    shares: Any, x: torch.Tensor, part: str, level: str, is_read: bool
) -> None:
    """Also where the program writes into it.

    ``torch.export`` has two fake tensors of a weight, which share a storage until the program is saved.
    """
    program = export(shares(), (x.clone(),))
    program = program if level == "training" else program.run_decompositions()
    program = saved_and_loaded(program) if is_read else program
    capture, module = tfk.capture(program), program.module()
    expected = copy.deepcopy(module)(x)
    values = capture.bind({"self": module, "x": x})
    if shares is Tied:  # tensors that a graph writes into are separate without their sources
        assert capture.instantiate().check_inputs(values) is None
    (found,) = capture.compile("aot_eager")(*values)
    torch.testing.assert_close(found, expected)
    # The graph reads one of them for both: with two tensors it would be wrong in silence.
    other = shares()
    owner, _, name = part.rpartition(".")
    tensor = other.get_submodule(owner).__getattr__(name)
    setattr(other.get_submodule(owner), name, type(tensor)(tensor.detach().clone()))
    with pytest.raises(tfk.CaptureError, match=r"not like those(.*)untyped_storage\(\)"):
        capture.bind({"self": other, "x": x})


@pytest.mark.parametrize("writes", [False, True])
def test_what_a_program_takes_for_separate(writes: bool) -> None:
    """One argument may be given twice, unless the program writes into it."""

    class Adds(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (x.add_(y) if writes else x + y) * y

    program, x = export(Adds(), (numbers(4), numbers(4))), numbers(4)
    capture = tfk.capture(program)
    assert (capture.check({"x": x, "y": x}) is None) != writes
    args = numbers(4), numbers(4)
    (found,) = capture.compile("aot_eager")(*capture.bind(dict(zip("xy", args, strict=True))))
    assert torch.equal(found, Adds()(numbers(4), numbers(4)))


class Both(nn.Module):
    """Has two arguments whose sizes are tied."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Their sum."""
        return x.sum() + y.sum()


def test_sizes_that_are_tied_by_a_dim_of_no_argument_are_guarded() -> None:
    """What the module refuses is refused, and an odd size, which the dim excludes."""
    half = Dim("half", min=2, max=8)
    shapes = {"x": {0: 2 * half}, "y": {0: 2 * half - 1}}
    program = export(Both(), (numbers(8, 3), numbers(7)), dynamic_shapes=shapes)
    capture, module = tfk.capture(program), program.module()
    instance = capture.instantiate()
    for n in range(2, 20):
        for m in range(n - 2, n + 1):
            args = numbers(n, 3), numbers(m)
            is_taken = not isinstance(outcome(module, args, None), str) and n % 2 == 0
            found = capture.check(dict(zip("xy", args, strict=True)))
            assert (found is None) == is_taken, (n, m)
            assert (instance.check_inputs(args) is None) == is_taken, (n, m)
    read = tfk.frontend.Guards.loads(instance.guards.dumps())
    assert str(read) == str(instance.guards)


# --- its module -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_module_of_a_program_is_captured_with_its_guards(name: str, tmp_path: Path) -> None:
    """Its guards are nodes: compiled code refuses what the module refuses, with the same message.

    The module itself is unchanged.
    """
    case, program = CASES[name], exported(name)
    module = program.module()
    before = str(module.graph)
    capture = through_a_file(tfk.capture(module, constants="small"), tmp_path)
    assert str(module.graph) == before
    flatten = torch.utils._pytree.tree_leaves
    for make in (case.args, *case.calls, *case.refused):
        expected = outcome(copy.deepcopy(program).module(), make(), case.kwargs)
        compiled = capture.compile("eager")
        inputs = flatten((make(), case.kwargs or {}))
        if isinstance(expected, str):
            with pytest.raises((AssertionError, RuntimeError)) as caught:
                compiled(*inputs)
            assert str(caught.value) == expected.partition(": ")[2]
        else:
            assert_same(list(compiled(*inputs)), flatten(expected[0]))


# --- what cannot be -------------------------------------------------------------------------------


def changed(desc: CaptureDesc, **fields: Any) -> CaptureDesc:
    """The frame with other fields of its program."""
    return replace(desc, export=replace(desc.export, **fields))


def test_a_frame_that_is_no_program_is_refused() -> None:
    """The error says how one gets a program."""
    capture = tfk.capture(torch.fx.symbolic_trace(nn.ReLU()), [torch.ones(2)])
    with pytest.raises(tfk.CaptureError, match="not an exported program; expected a capture of"):
        capture.exported_program()


def test_a_missing_weight_is_named() -> None:
    """Not given are the others, so it is no program without data."""
    program = exported("tied")
    weights = {"layers.0.weight": program.state_dict["layers.0.weight"]}
    with pytest.raises(tfk.CaptureError, match=r"not in state_dict; expected layers\.0\.bias"):
        tfk.capture(program).exported_program(weights)
    plain = {name: torch.ones(3, 3) for name in program.state_dict}
    with pytest.raises(tfk.CaptureError, match="torch refuses the exported program") as caught:
        tfk.capture(program).exported_program(plain)
    assert "Pass the state_dict" in str(caught.value)


class Point:
    """A class that torch.export knows, and that a record does not."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def test_a_structure_without_a_record_is_refused_where_it_is_needed() -> None:
    """The graph of such a program compiles all the same."""
    if Point not in torch.utils._pytree.SUPPORTED_NODES:
        torch.utils._pytree.register_pytree_node(
            Point,
            lambda p: ([p.x], None),
            lambda c, _: Point(*c),
            serialized_type_name="tests.Point",
        )

    class Makes(nn.Module):
        def forward(self, x: torch.Tensor) -> Point:
            """A point."""
            return Point(x + 1)

    capture = tfk.capture(export(Makes(), (torch.ones(2),)))
    assert capture.compile("eager")(torch.ones(2))[0].tolist() == [2, 2]
    with pytest.raises(tfk.CaptureError, match="a structure without a record"):
        capture.exported_program()


def test_a_dialect_of_a_library_that_is_not_imported_is_named() -> None:
    """As ExecuTorch's."""
    capture = tfk.Capture(changed(tfk.capture(exported("tied")).desc, dialects=("EDGE",)))
    with pytest.raises(tfk.UnknownNameError, match="'EDGE'"):
        capture.exported_program()


def hostile_source(desc: CaptureDesc) -> CaptureDesc:
    """A key that would end the text in which torch puts it, and be code."""
    key = "\"+__import__('os').system('echo run')+\""
    base = SourceDesc(cls="LocalSource", name="L['x']", fields=(("local_name", "x"),))
    item = SourceDesc(
        cls="DictGetItemSource", name=f"L['x'][{key!r}]", base=base, fields=(("index", key),)
    )
    symbols = tuple(replace(s, sources=(item, *s.sources)) for s in desc.symbols)
    return replace(desc, shape_env=replace(desc.shape_env, symbols=symbols))


def hostile_argument(desc: CaptureDesc) -> CaptureDesc:
    """An argument whose name is code."""
    first, *others = desc.export.modules  # type: ignore[union-attr]
    calling = replace(first.calling, arguments=("x=print('run')",))
    return changed(desc, modules=(replace(first, calling=calling), *others))


HOSTILE: dict[str, Callable[[CaptureDesc, Any], CaptureDesc]] = {
    "a parameter that would replace the class": lambda desc, inputs: changed(
        desc, inputs=(replace(inputs[0], target="__class__"), *inputs[1:])
    ),
    "another graph": lambda desc, inputs: changed(desc, inputs=inputs[1:]),
    "a source": lambda desc, _: hostile_source(desc),
    "an argument": lambda desc, _: hostile_argument(desc),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_program_is_refused(change: Any, tmp_path: Path, capfd: Any) -> None:
    """With one error that says where, and without code of the file."""
    desc = tfk.capture(exported("tied")).desc
    assert desc.export is not None
    capture = tfk.Capture(change(desc, desc.export.inputs))
    with pytest.raises(tfk.FormatError):
        through_a_file(capture, tmp_path).exported_program()
    assert capfd.readouterr().out == ""


def test_facts_that_torch_cannot_compare_are_one_error() -> None:
    """Guards of a frame in which a size is replaced by a truth value."""
    desc = tfk.capture(exported("derived")).desc
    replacements = tuple(replace(r, expr=encode_expr(sympy.true)) for r in desc.replacements)
    env = replace(desc.shape_env, replacements=replacements)
    instance = tfk.Capture(replace(desc, shape_env=env)).instantiate()
    with pytest.raises(tfk.CaptureError, match=r"\$\.shape_env: torch cannot rebuild"):
        instance.check_inputs(instance.inputs)
