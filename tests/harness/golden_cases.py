"""What the golden corpus holds: a capture of every kind, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hostile_seeds
import torch
from captured_frames import captures_of
from golden_exports import export_cases
from golden_frontend import frontend_records
from golden_records import record_cases
from golden_tensors import tensor_cases
from model_zoo import replayable
from quiet import quiet

import torch_fakeify as tfk

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAMS = (
    *hostile_seeds.ZOO,
    *("two_tensors", "jagged", "sparse", "aten", "failed", "functorch"),
    *("mark_unbacked_shared", "static_address", "float_item", "tolist", "nested_compile"),
    *("outputs_of_every_kind", "automatic_dynamic", "module_hooks", "item_equals_input_size"),
)
"""What is recorded of the table of programs and of the kinds beside it."""

MODEL_NAMES = ("llama", "gpt2", "bert", "vit", "mamba")

_MADE_UP = "its facts are made up, and do not hold of its input"
_BATCHED = "torch has no batching rule for `sym_size`, by which the facts are learned"

NOT_FRESH = {
    "environment": _MADE_UP,
    "environment_orders": _MADE_UP,
    "program_functorch": _BATCHED,
    "transform_vmap": _BATCHED,
    "transform_vmap_in_jvp": _BATCHED,
    "transform_vmap_of_grad": _BATCHED,
    "transform_vmap_with_random_numbers": _BATCHED,
    "transform_vmap_with_the_same_random_numbers": _BATCHED,
}
"""What has no instance in a fresh ``ShapeEnv``, and why."""


def cases() -> dict[str, Callable[[], Any]]:
    """The maker of each capture by name."""
    found = dict(tensor_cases())
    found.update(record_cases())
    found.update(export_cases())
    for name in PROGRAMS:
        found[f"program_{name}"] = lambda name=name: hostile_seeds._capture(name)
    found["one_tensor_at_two_sources"] = _one_tensor_at_two_sources
    for name in MODEL_NAMES:
        found[f"model_{name}"] = lambda name=name: _model(name)
    found["model_step_forward"] = lambda: _training_step()[0]
    found["model_step_backward"] = lambda: _training_step()[1]
    return found


def _one_tensor_at_two_sources() -> tfk.Capture:
    """A frame that Dynamo traced for one tensor as both arguments, and for one module at two attributes."""

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.second = torch.nn.Linear(3, 3)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.first(x) + self.second(y)

    x = torch.ones(2, 3)
    with torch.no_grad():
        return captures_of(Tied(), (x, x), dynamic=True)[0]


def documents() -> dict[str, Callable[[], Any]]:
    """The maker of what each document holds, by its name: records that are in no capture."""
    return {"frontend": frontend_records}


def _model(name: str) -> Any:
    """The largest frame of a model in inference, with dynamic sizes."""
    return max(model_frames(name), key=lambda capture: len(capture.desc.graph.nodes))


def model_frames(name: str) -> list[tfk.Capture]:
    """The frames of a model in inference, with dynamic sizes."""
    torch.manual_seed(0)
    model, inputs = replayable(name)
    with quiet(), torch.no_grad():
        return captures_of(model.eval(), inputs, dynamic=True)


def _training_step() -> list[Any]:
    """What AOTAutograd makes of a small model: a forward and a backward graph of ATen operators."""
    from torch._dynamo.backends.common import aot_autograd

    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 2)]
    found: list[Any] = []

    def compiler(gm: Any, example_inputs: Any) -> Any:
        found.append(tfk.capture(gm, example_inputs))
        return gm.forward

    torch._dynamo.reset()
    with quiet():
        backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
        model = torch.compile(torch.nn.Sequential(*layers), backend=backend, dynamic=True)
        model(torch.randn(3, 4)).sum().backward()
    torch._dynamo.reset()
    return found
