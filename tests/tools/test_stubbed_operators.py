"""Frames with operators of the user's own, compiled in processes that have only the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from processes import COMMAND, fresh

from torch_fakeify.serialization.capture_file import read_capture

if TYPE_CHECKING:
    from cli_runs import Command

pytestmark = pytest.mark.usefixtures("warm_workers")

OPERATORS = """
import torch
from torch import Tensor


@torch.library.custom_op("moe::route", mutates_args=())
def route(x: Tensor, weight: Tensor, top: int = 2) -> tuple[Tensor, Tensor]:
    scores = x @ weight
    return scores.topk(top)[0], scores.topk(top)[1]


@route.register_fake
def _(x, weight, top=2):
    return x.new_empty(x.size(0), top), x.new_empty(x.size(0), top, dtype=torch.int64)


@torch.library.custom_op("moe::count", mutates_args=("counts",))
def count(ids: Tensor, counts: Tensor) -> None:
    counts.add_(ids.flatten().bincount(minlength=counts.numel()))


@torch.library.custom_op("moe::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    return x * 2


@scaled.register_fake
def _(x):
    return torch.empty_like(x)
"""
MODEL = """
import torch
import operators
import planted


def routed(x, weight, counts):
    scores, ids = torch.ops.moe.route(x, weight)
    torch.ops.moe.count(ids, counts)
    return scores.cos(), ids + 1


def refused(x):
    return torch.ops.moe.scaled(x.sin()) + 1


x, weight = torch.ones(6, 8), torch.ones(8, 4)
counts = torch.zeros(4, dtype=torch.int64)
torch.compile(routed, backend="aot_eager", dynamic=True)(x, weight, counts)
for function, args in ((routed, (x, weight, counts)), (refused, (x.clone().requires_grad_(),))):
    torch._dynamo.reset()
    backend = planted.compiler if function is routed else "aot_eager"
    try:
        torch.compile(function, backend=backend, dynamic=True)(*args)
    except Exception as error:
        print(type(error).__name__)
"""
PLANTED = """
from torch._dynamo.backends.common import aot_autograd


def inner(gm, inputs):
    for node in gm.graph.nodes:
        if "moe.route" in str(node.target):
            raise NotImplementedError(f"no route of {len(node.meta['val'])} results")
    return gm


def compiler(gm, inputs):
    return aot_autograd(fw_compiler=inner)(gm, inputs)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the captures and the planted backend, without the module of the operators."""
    home = tmp_path_factory.mktemp("home")
    for name, text in (("operators", OPERATORS), ("planted", PLANTED), ("model", MODEL)):
        (home / f"{name}.py").write_text(text)
    folder = tmp_path_factory.mktemp("empty")
    fresh(*COMMAND, "run", "--out", folder / "captures", "model.py", cwd=home, status=1)
    (folder / "planted.py").write_text(PLANTED)
    return folder


def _captures(folder: Path) -> list[Path]:
    return sorted((folder / "captures").glob("*/*.fkf"))


@pytest.mark.sweep
def test_a_corpus_compiles_without_the_library(command: Command, folder: Path) -> None:
    """Each verdict is that of the process with the library, and its details name the stubs."""
    done = command(
        "replay", "--jobs", "1", "--jsonl", "rows", "captures",
        "--import", "planted", "--all", cwd=folder,
    )  # fmt: skip
    lines = (folder / "rows").read_text().splitlines()
    rows = {Path(row["file"]).name[:3]: row for row in map(json.loads, lines)}
    ok, planted, refused = (rows[key] for key in sorted(rows))
    assert ok["verdict"] == "compiles", done.stdout + done.stderr
    assert ok["details"][-3:] == [
        "operators that are not here, as stubs:",
        "  moe::count(Tensor ids, Tensor(a1!) counts) -> ()",
        "  moe::route(Tensor x, Tensor weight, SymInt top=2) -> (Tensor, Tensor)",
    ]
    assert refused["verdict"] == "reproduced"
    assert "no autograd formula was registered" in refused["details"][0]
    assert "Use --backend planted:compiler" in planted["details"][0]
    assert done.returncode == 2


def test_a_planted_failure_is_reproduced_without_the_library(
    command: Command, folder: Path
) -> None:
    """The backend fails at the result of a stub as it failed at that of the operator."""
    path = _captures(folder)[1]
    done = command("replay", "--backend", "planted:compiler", path, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("reproduced\n")
    assert "NotImplementedError: no route of 2 results" in done.stdout
    assert "operators that are not here, as stubs:\n    moe::count" in done.stdout


@pytest.mark.sweep
@pytest.mark.long
def test_minify_defines_the_stub_in_its_script(command: Command, folder: Path) -> None:
    """Plain Python, without the library and without this package, fails in the same way."""
    path = _captures(folder)[1]
    done = command("minify", "--backend", "planted:compiler", path, "-o", "small.fkf", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "script: fails in the same way" in done.stdout
    assert "operators that are not here, as stubs:\n  moe::route" in done.stdout
    script = (folder / "small.py").read_text()
    assert 'custom_op("moe::route", mutates_args=[],' in script
    assert "torch_fakeify" not in script
    assert "moe::count" not in script
    assert read_capture(folder / "small.fkf").operators
    plain = fresh("small.py", cwd=folder, status=1)
    assert "NotImplementedError: no route of 2 results" in plain.stderr


@pytest.mark.sweep
@pytest.mark.parametrize(
    "words", [("fuzz", "--runs", "2"), ("minify", "--accuracy", "--no-script", "-o", "x.fkf")]
)
def test_what_runs_the_frame_refuses_by_name(
    command: Command, folder: Path, words: tuple[str, ...]
) -> None:
    """A stub has no code: the error says which operator is missing and what brings it."""
    done = command(*words, "--backend", "aot_eager", _captures(folder)[0], cwd=folder)
    assert done.returncode == 2, done.stdout + done.stderr
    assert (
        "torch.ops.moe.route is not registered in this process. Use --import operators"
        in done.stderr
    )


TRAIN = """
import torch
from transformers import MixtralConfig, MixtralForCausalLM

torch.manual_seed(0)
config = MixtralConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    max_position_embeddings=64, use_cache=False,
)
model = MixtralForCausalLM(config).train()
step = torch.compile(
    lambda ids: model(input_ids=ids, labels=ids).loss, dynamic=True, backend="aot_eager"
)
ids = torch.randint(0, 64, (2, 9))
step(ids).backward()
with torch.no_grad():
    model.eval()
    step(ids)
"""


@pytest.mark.sweep
@pytest.mark.parametrize("level", ["dynamo", "aot"])
@pytest.mark.long
def test_a_mixture_of_experts_compiles_without_transformers(
    level: str, tmp_path: Path, command: Command
) -> None:
    """Its experts are an operator of transformers; of AOTAutograd's graphs another one, in the backward."""
    pytest.importorskip("transformers", reason="needs transformers")
    (tmp_path / "train.py").write_text(TRAIN)
    fresh(*COMMAND, "run", "--level", level, "train.py", cwd=tmp_path)
    missing = tmp_path / "transformers"
    missing.mkdir()
    (missing / "__init__.py").write_text("raise ImportError('transformers is not installed')")
    arguments = ["replay", "--all", "--jobs", "1", "--jsonl", "rows", "captures"]
    done = command(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row["verdict"] for row in rows] == ["compiles"] * {"dynamo": 2, "aot": 4}[level]
    stubs = {line.split("(")[0].strip() for row in rows for line in row["details"] if "::" in line}
    forward = "transformers::grouped_mm_fallback"
    assert stubs == ({forward} if level == "dynamo" else {forward, f"{forward}_backward"})
