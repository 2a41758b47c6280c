"""Elements of 0-dim inputs that a frame does not need are replaced in its record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from captured_frames import captures_of
from torch.fx.experimental.proxy_tensor import make_fx

import torch_fakeify as tfk
from torch_fakeify.records import redact_scalars
from torch_fakeify.records.rewrite import walk
from torch_fakeify.records.tensor import FloatNode
from torch_fakeify.render.privacy import privacy_lines
from torch_fakeify.serialization.capture_file import read_capture

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# --- elements of inputs ---------------------------------------------------------------------------

NUMBER, FRACTION = 123456789, 0.8172635


def scalar_frame(fn: Callable[..., Any], **options: Any) -> Any:
    """Return the record of a frame whose inputs have two 0-dim tensors."""
    args = torch.ones(5, 4), torch.tensor(NUMBER), torch.tensor(FRACTION, dtype=torch.float64)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        (capture,) = captures_of(fn, args, settings=options, dynamic=True)
    return capture.desc


def numbers_of(record: Any) -> set[float]:
    """Return every number in a record."""
    parts = walk(record, (int, float, FloatNode), inside=True)
    floats = ((n.mantissa * 2.0**n.exponent) if isinstance(n, FloatNode) else n for n in parts)
    return set(floats)


def test_unused_elements_are_not_recorded() -> None:
    """Torch tracks each 0-dim tensor as a symbol, whose hint is its element."""

    def unasked(x: Any, n: Any, f: Any) -> Any:
        return x[:, 1:] * n + f

    plain, full = scalar_frame(unasked), scalar_frame(unasked, constants="small")
    assert numbers_of(plain) & {NUMBER, FRACTION} == set()
    assert numbers_of(full) >= {NUMBER, FRACTION}
    assert [s.name for s in plain.shape_env.symbols] == [s.name for s in full.shape_env.symbols]
    assert plain.shape_env.guards == full.shape_env.guards
    for capture in map(tfk.Capture, (plain, full)):
        for instance in (capture.instantiate(), capture.instantiate(fresh=True)):
            again = tfk.capture(instance.gm, instance.inputs, constants="small")
            assert again.fingerprint() == capture.fingerprint()
    x, n, f = tfk.Capture(plain).materialize()[-3:]
    assert (x.shape, n.item(), f.item()) == ((5, 4), 2, 0.5)


def test_used_elements_are_recorded_as_hints() -> None:
    """An element that a guard or the graph uses is recorded."""
    desc = scalar_frame(lambda x, n, f: x * n.item() + f if n.item() > 7 else x)
    assert numbers_of(desc) & {NUMBER, FRACTION} == {NUMBER}
    assert tfk.Capture(desc).instantiate()
    lines = privacy_lines(desc)
    assert lines[lines.index("data (2)") + 1 :][:2] == [
        "  L['n'].item() = 123456789",
        "  L['f'].item() = 0.5",
    ]


@pytest.mark.parametrize(
    ("value", "other"),
    [(0, 0), (1, 1), (-1, -1), (7, 2), (-7, -2), (0.0, 0.0), (1.0, 1.0), (0.3, 0.5), (-9.5, -2.0)],
)
def test_an_element_is_replaced_by_one_of_its_sign_and_size(value: float, other: float) -> None:
    """An operator may depend on these, and a second replacement changes nothing."""
    assert redact_scalars.redacted_value(value) == other == redact_scalars.redacted_value(other)
    assert type(redact_scalars.redacted_value(value)) is type(value)


def test_with_data_records_small_constants(tmp_path: Path) -> None:
    """The elements of a graph's constants are recorded on request only."""
    table = torch.tensor([7.25, 1.5])
    gm = make_fx(lambda x: x + table)(torch.ones(2))
    for constants in ("none", "small"):
        recorder = tfk.record(tmp_path / constants, constants=constants)  # pyright: ignore[reportArgumentType]
        recorder(gm, [torch.ones(2)])
        (desc,) = map(read_capture, sorted((tmp_path / constants).glob("*.fkf")))
        assert bool(desc.graph.tensor_data) == (constants == "small")
        assert any("8 bytes" in line for line in privacy_lines(desc)) == (constants == "small")
