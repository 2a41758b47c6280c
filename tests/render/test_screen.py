"""What a person sees of a real model in a terminal of 80 columns: names of the program, one screen."""

from __future__ import annotations

import io
import re
import shlex
import sys
import time
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from captured_frames import only_capture_of
from screen_models import Decoder, Sizes

from torch_fakeify.records.frame import FailureDesc
from torch_fakeify.records.graph import GraphModuleDesc
from torch_fakeify.records.rewrite import walk
from torch_fakeify.render.readable_names import readable_frame, readable_text
from torch_fakeify.render.show import PARTS, section_lines, show_lines
from torch_fakeify.render.summary import summary_lines
from torch_fakeify.render.tables import fitted_table
from torch_fakeify.tools import terminal
from torch_fakeify.tools.parser import make_parser

if TYPE_CHECKING:
    from torch_fakeify.records.frame import CaptureDesc

COMMANDS = (
    "run", "show", "replay", "minify", "report", "issue", "fuzz", "fakes", "diff", "bisect", "doctor", "demo",
)  # fmt: skip
TORCH_NAME = re.compile(r"\bl_\w*_\b|_modules\b|_parameters\b|\bs\d+\b|\bzf\d+\b")
"""Torch's placeholders, paths of modules, and symbols of sizes and floats."""


def _step(model: Decoder) -> Any:
    """A training step, with its loss."""

    def loss(ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), y.flatten())

    return loss


@cache
def frame(name: str) -> CaptureDesc:
    """The frame of a model."""
    torch._dynamo.reset()
    ids = torch.randint(0, 100, (2, 17))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        match name:
            case "decoder":
                found = only_capture_of(Decoder(), ids, dynamic=True)
            case "step":
                found = only_capture_of(_step(Decoder()), ids, ids, dynamic=True)
            case "sizes":
                y = torch.ones(5, dtype=torch.long)
                found = only_capture_of(Sizes(), torch.randn(7, 8), y, 3, dynamic=True)
            case _:
                transformers = pytest.importorskip("transformers")
                config = transformers.LlamaConfig(
                    hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=2, vocab_size=100,
                )  # fmt: skip
                model = transformers.LlamaForCausalLM(config).model.layers[0].mlp
                found = only_capture_of(model, torch.randn(2, 3, 32), dynamic=True)
    return found.desc


MODELS = ["decoder", "step", "sizes", pytest.param("llama", marks=pytest.mark.models)]


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        """Return whether it is one."""
        return True


def printed(lines: list[str], monkeypatch: pytest.MonkeyPatch, out: io.StringIO) -> str:
    """Lines as a command prints them, in 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    terminal.print_lines(lines, out)
    return out.getvalue()


@pytest.mark.parametrize("name", MODELS)
def test_all_is_in_the_words_of_the_program(name: str) -> None:
    """No name of torch's is on the page, nor in any section; ``u0``, which the program lacks, is."""
    desc = frame(name)
    lines = [*summary_lines(desc, file="f.fkf"), *show_lines(desc), *section_lines(desc, PARTS)]
    texts = [line for line in lines if "Runtime assertion failed" not in line]  # text of torch
    assert [line for line in texts if TORCH_NAME.search(line)] == []


@pytest.mark.parametrize("name", MODELS)
def test_with_torch_names_each_name_is_torchs(name: str) -> None:
    """Placeholders, symbols and sources are as in the record."""
    desc = frame(name)
    text = "\n".join(show_lines(desc, torch_names=True))
    assert all(entry.name in text for entry in desc.inputs)
    assert desc.shape_env is not None
    assert all(symbol.name in text for symbol in desc.shape_env.symbols)


@pytest.mark.parametrize("name", MODELS)
def test_different_nodes_have_different_names(name: str) -> None:
    """In each graph, although the program uses a name twice and inputs have the names of arguments."""
    for graph in walk(readable_frame(frame(name)), GraphModuleDesc, inside=True):
        names = [fx_node.name for fx_node in graph.nodes]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", MODELS)
def test_a_small_model_fits_a_screen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page has at most 40 lines, and everything that is printed has at most 80 columns."""
    desc = frame(name)
    page = summary_lines(desc, file="captures/model/000-forward-7ab48560.fkf", columns=80)
    assert len(printed(page, monkeypatch, io.StringIO()).splitlines()) <= 40
    lines = [*page, *show_lines(desc), *section_lines(desc, PARTS)]
    text = printed(lines, monkeypatch, io.StringIO())
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert text.split() != []
    words = {word for line in lines for word in line.split()}
    assert {word for word in text.split() if word not in ("\\", "#")} <= words, "a word was divided"


def test_a_failure_is_first_and_in_the_words_of_the_program() -> None:
    """The message's names are replaced, and the command that comes next is ``minify``."""
    desc = frame("decoder")
    weight = "l_self_modules_blocks_modules_0_modules_qkv_parameters_weight_"
    symbol = next(e.name for e in desc.inputs if e.sym is not None)
    text = f"no kernel for linear(x, {weight}) of {symbol}"
    words = "no kernel for linear(x, self.blocks[0].qkv.weight) of ids.size(0)"
    assert readable_text(text, desc) == words
    failed = FailureDesc(type="builtins.ValueError", message=text, backend="mine")
    lines = summary_lines(msgspec.structs.replace(desc, failure=failed), file="a b.fkf")
    assert lines[0] == f"failed   ValueError: {words}"
    assert "  torch-fakeify minify 'a b.fkf'" in lines


def test_many_constants_are_counted() -> None:
    """The floats of the layers are no symbols to read, and their guards are one line."""
    lines = summary_lines(frame("decoder"))
    assert any(re.fullmatch(r"symbols \(2\), and \d+ float constants", line) for line in lines)
    assert sum("eps ==" in line for line in lines) <= 1


def test_parameters_of_one_number_are_counted_as_parameters() -> None:
    """A float attribute is passed as such a tensor too, but is no parameter."""
    desc = frame("decoder")
    inputs = list(desc.inputs)
    parameters = [
        at for at, e in enumerate(inputs) if e.tensor is not None and e.tensor.is_parameter
    ]
    for at in parameters:
        number = msgspec.structs.replace(inputs[at].tensor, dtype="float64", size=(), stride=())
        inputs[at] = msgspec.structs.replace(inputs[at], tensor=number)
    lines = summary_lines(msgspec.structs.replace(desc, inputs=tuple(inputs)))
    (tensors,) = [line for line in lines if line.startswith("tensors")]
    assert f" {len(parameters)} parameters" in tensors


# --- the terminal ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb"), (None, "pipe"), (None, "no rich")]
)
def test_there_are_no_escape_codes(
    name: str | None, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``NO_COLOR``, in a pipe, on a dumb terminal and without rich; else there are colours."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    lines = summary_lines(frame("sizes"))
    assert "\x1b[" in printed(lines, monkeypatch, Terminal())
    if name is not None:
        monkeypatch.setenv(name, value)
    if value == "no rich":
        monkeypatch.setitem(sys.modules, "rich.console", None)
    out = io.StringIO() if value == "pipe" else Terminal()
    assert "\x1b" not in printed(lines, monkeypatch, out)


def test_a_pipe_has_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal and ``COLUMNS`` there is no width: a reader gets each line as it is."""
    monkeypatch.delenv("COLUMNS", raising=False)
    out = io.StringIO()
    terminal.print_lines(["word " * 100], out)
    assert out.getvalue() == f"{'word ' * 100}\n"


def test_a_long_command_can_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines end with backslashes, so that a shell reads what one line would have been."""
    command = (
        f"torch-fakeify minify --backend my.own.module:backend '{'a b ' * 5}' {'path/' * 12}f.fkf"
    )
    text = printed([f"  next        {command}"], monkeypatch, io.StringIO())
    assert len(text.splitlines()) > 1
    assert all(line.endswith("\\") for line in text.splitlines()[:-1])
    assert shlex.split(text.replace("\\\n", "")) == ["next", *shlex.split(command)]


def test_a_status_is_shown_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal the last line says what goes on, without control sequences; in a pipe nothing does."""
    monkeypatch.setattr(terminal, "_FIRST", 0.01)
    monkeypatch.setattr(terminal, "_INTERVAL", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    out, pipe = Terminal(), io.StringIO()
    for stream in (out, pipe):
        with terminal.status("compiling", stream) as say:
            time.sleep(0.1)
            say("running")
            time.sleep(0.1)
    written = out.getvalue()
    assert "compiling, 0 s" in written
    assert "running, 0 s" in written
    assert "\x1b" not in written
    assert written.rpartition("\r")[0].rpartition("\r")[2].strip() == ""
    assert pipe.getvalue() == ""


def test_a_wide_table_is_wrapped_at_its_words() -> None:
    """The result of a frame is in lines of its own column; file names keep their line."""
    rows = [("file", "result"), ("some/file.fkf", "failed: SomeLongError; not recorded: no room")]
    assert fitted_table(rows, 40) == [
        "file           result",
        "some/file.fkf  failed: SomeLongError;",
        "               not recorded: no room",
    ]
    assert fitted_table(rows, None) == [
        "file           result",
        "some/file.fkf  failed: SomeLongError; not recorded: no room",
    ]


# --- help -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_an_example_and_its_statuses(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The help has a sentence, an example, the meaning of each argument and exit status, in 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    parser = make_parser(dict.fromkeys(COMMANDS, lambda _args: 0))
    with pytest.raises(SystemExit) as end:
        parser.parse_args([name, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(rf"^Examples?:\n  torch-fakeify {name}\b", text, re.MULTILINE)
    assert re.search(r"^Exit status: 0 ", text, re.MULTILINE)
    statuses = " ".join(text.rpartition("Exit status:")[2].split())
    assert all(re.search(rf"(?:^|; ){number} ", statuses) for number in (0, 2, 130))
    positional = text.partition("positional arguments:\n")[2].partition("\n\n")[0]
    assert all(len(line.split()) > 1 for line in positional.splitlines())


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_a_shell_gets_its_completion(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The script knows the commands and their options."""
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit) as end:
        make_parser(dict.fromkeys(COMMANDS, lambda _args: 0)).parse_args(
            ["--print-completion", shell]
        )
    assert end.value.code in (0, None)
    text = capsys.readouterr().out
    assert "torch-fakeify" in text
    assert "torch-names" in text


def test_completion_without_its_package_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as end:
        make_parser(dict.fromkeys(COMMANDS, lambda _args: 0)).parse_args(
            ["--print-completion", "zsh"]
        )
    assert end.value.code == 2
    assert "pip install 'torch_fakeify[completion]'" in capsys.readouterr().err
