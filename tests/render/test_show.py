"""The text page of a capture: everything that a frame has, rendered from its record."""

from __future__ import annotations

import re
from typing import Any

import torch
from captured_frames import only_capture_of
from expecttest import assert_expected_inline

import torch_fakeify as tfk
from torch_fakeify.render.show import show_lines


def page_of(fn: Any, *args: Any, **options: Any) -> str:
    """Return the page of the only frame of ``fn``, without line numbers, versions and the machine."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        capture = only_capture_of(fn, *args, fullgraph=True, **options)
    lines = show_lines(tfk.loads(tfk.dumps(capture.desc)))
    text = re.sub(r"test_show\.py:\d+", "test_show.py:N", "\n".join(lines))
    text = re.sub(r"(?m)^  (?:Python|system|cpu|torch|triton|numpy) .*\n", "", text)
    return text.replace(f"torch {capture.desc.torch_version},", "torch HERE,")


def test_show_prints_shapes_guards_and_asserts() -> None:
    """Symbols have their sources, and guards and asserts the user's lines."""

    def take(x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        n = int(start.max().item())
        torch._check(n >= 0)
        small = n < x.shape[0]
        torch._check(small)
        if x.shape[1] % 4 == 0:
            return x[n:, None] * 2
        return x

    text = page_of(take, torch.randn(5, 8), torch.tensor([1, 2]), dynamic=True)
    assert_expected_inline(
        text,
        """\
frame     take
recorded  torch HERE, backend ?
graph     14 FX nodes, 5 inputs
result    not compiled

inputs (5)
  start.size(0)  int start.size(0), hint 2
  start          int64[start.size(0)]
  x.size(0)      int x.size(0), hint 5
  x.size(1)      int x.size(1), hint 8
  x              float32[x.size(0), x.size(1)]

symbols (4)
  start.size(0)  hint 2    [2, int_oo]
  u0             unbacked  [0, int_oo]  test_show.py:N in take: n = int(start.max().item())
  x.size(0)      hint 5    [2, int_oo]
  x.size(1)      hint 8    [2, int_oo]

divisible
  x.size(1) % 4 == 0

guards (1)
  x.size(1) % 4 == 0  test_show.py:N in take: if x.shape[1] % 4 == 0:

runtime asserts (2)
  0 <= u0         test_show.py:N in take: torch._check(n >= 0)
  u0 < x.size(0)  test_show.py:N in take: torch._check(small)

surroundings
  torch._dynamo.config.assume_static_by_default  False
  torch._dynamo.config.capture_scalar_outputs    True

code
  def forward(start, x):
      # test_show.py:N in take: n = int(start.max().item())
      max_1 = start.max()  # int64[]
      item = max_1.item()  # int u0
      # test_show.py:N in take: torch._check(n >= 0)
      ge = item >= 0  # bool u0 >= 0
      _assert_scalar_default = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u0 >= 0 on node 'ge'")
      # test_show.py:N in take: small = n < x.shape[0]
      lt = item < x.size(0)  # bool u0 < x.size(0)
      # test_show.py:N in take: torch._check(small)
      _assert_scalar_default_1 = torch.ops.aten._assert_scalar.default(lt, "Runtime assertion failed for expression u0 < s77 on node 'lt'")
      # test_show.py:N in take: return x[n:, None] * 2
      getitem_4 = x[item:, None]  # float32[x.size(0) - u0, 1, x.size(1)]
      mul = getitem_4 * 2  # float32[x.size(0) - u0, 1, x.size(1)]
      return (mul,)""",
    )


def test_modes_are_shown_where_they_differ() -> None:
    """Only modes that differ from torch's default are printed."""
    plain = page_of(lambda x: x + 1, torch.ones(2))
    assert "modes" not in plain
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        text = page_of(lambda x: x + 1, torch.ones(2))
    assert "modes\n  grad_enabled  False\n  autocast cpu  on, bfloat16\n" in text
