"""The names in a script: identifiers that are made of the names of the program."""

from __future__ import annotations

import ast
import keyword

import pytest
import torch
from captured_frames import only_capture_of
from screen_models import Decoder, Sizes

from torch_fakeify.frames.captures import Capture
from torch_fakeify.records.graph import GraphModuleDesc
from torch_fakeify.records.rewrite import walk
from torch_fakeify.tools.minify.failures import Failure
from torch_fakeify.tools.minify.repro_script import BackendCode, script_of
from torch_fakeify.tools.minify.script_code import RESERVED, with_identifiers

FAILURE = Failure("raises", "compile", "builtins.NotImplementedError", "no kernel for gelu")


def decoder() -> Capture:
    """A frame of a decoder of four blocks, with dynamic sizes."""
    return only_capture_of(Decoder(), torch.randint(0, 100, (2, 17)), dynamic=True)


def sizes() -> Capture:
    """A frame whose guards compare sizes, and that reads one from data."""
    y = torch.ones(5, dtype=torch.long)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        return only_capture_of(Sizes(), torch.randn(7, 8), y, 3, dynamic=True)


@pytest.mark.parametrize("capture_of", [decoder, sizes])
def test_inputs_have_valid_and_different_names(capture_of: object) -> None:
    """No name is a keyword, one of the script's own, or that of another node; the frame is the same."""
    desc = capture_of().desc  # type: ignore[operator]
    named = with_identifiers(desc)
    for graph in walk(named, GraphModuleDesc, inside=True):
        names = [fx_node.name for fx_node in graph.nodes]
        assert len(set(names)) == len(names)
    names = [entry.name for entry in named.inputs]
    assert all(name.isidentifier() and not keyword.iskeyword(name) for name in names)
    assert not RESERVED & {*names}
    gm, renamed = Capture(desc).instantiate().gm, Capture(named).instantiate().gm
    assert [n.name for n in gm.graph.nodes if n.op != "placeholder"] == [
        n.name for n in renamed.graph.nodes if n.op != "placeholder"
    ]


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("capture_of", [decoder, sizes])
def test_a_script_is_in_the_names_of_the_program(capture_of: object, direct: bool) -> None:
    """It has no placeholder of torch's, and is Python; with ``torch_names`` it has them all."""
    desc = capture_of().desc  # type: ignore[operator]
    text = script_of(desc, FAILURE, BackendCode("eager"), direct=direct)
    names = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}
    assert "l_self_modules" not in text
    assert not {entry.name for entry in desc.inputs if entry.name.startswith("l_")} & names
    theirs = script_of(desc, FAILURE, BackendCode("eager"), direct=direct, torch_names=True)
    assert "l_self_modules" in theirs


def test_the_guards_of_a_script_are_over_sizes_of_the_program() -> None:
    """A symbol is ``x_size_0`` in conditions."""
    text = script_of(sizes().desc, FAILURE, BackendCode("eager"))
    assert "x_size_0 = x_1.size(0)" in text  # a node of the frame is `x`
    assert "if not (x_size_0 > 4):" in text
