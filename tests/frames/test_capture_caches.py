"""Torch's caches of compiled code, for captures that several processes compile."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from processes import fresh

import torch_fakeify as tfk

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import json
import sys
import torch_fakeify as tfk
from torch._dynamo.utils import counters

fn = tfk.Capture.load(sys.argv[1]).compile("inductor")
print(json.dumps({**counters["aot_autograd"], **counters["inductor"]}))
"""


@pytest.mark.sweep
def test_another_process_finds_the_code_of_a_capture(tmp_path: Path) -> None:
    """In the cache of AOTAutograd, whose entry has the graphs and the code of inductor."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).relu().sum()

    with tfk.recording(tmp_path / "frames") as frames:
        args = torch.randn(5, 4), torch.randn(4, 3, requires_grad=True)
        torch.compile(fn, backend="eager", dynamic=True)(*args)
    settings = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "TORCHINDUCTOR_VEC_ISA_OK": "0",  # known without a compilation for each instruction set
    }
    found = [json.loads(fresh("-c", SCRIPT, frames.paths[0], **settings).stdout) for _ in range(2)]
    assert found[0]["autograd_cache_miss"] == 1
    assert found[1]["autograd_cache_hit"] == 1
    assert "fxgraph_cache_miss" not in found[1]
