"""Arguments of operators by their schemas."""

from __future__ import annotations

import torch

import torch_fakeify as tfk
from torch_fakeify.encoding.operators import bound_arguments


def test_defaults_are_values_not_torchs_numbers_of_them() -> None:
    """A schema has a dtype, layout and memory format as a number; a call that leaves them out means the former."""
    schema = torch._C.parse_schema(
        "away::make(Tensor x, int n=6, bool flag=True, ScalarType dtype=float, ScalarType? other=float, "
        "MemoryFormat form=2, Layout layout=strided, ScalarType? none=None) -> Tensor"
    )
    found = bound_arguments(schema, ["x"], {})
    assert found == {
        "x": "x",
        "n": 6,
        "flag": True,
        "dtype": torch.float32,
        "other": torch.float32,
        "form": torch.channels_last,
        "layout": torch.strided,
        "none": None,
    }


def test_each_dtype_is_found_by_its_number() -> None:
    """The number that a schema has for a dtype is the one of this dtype."""
    for name in ("uint8", "int64", "float16", "float64", "bool", "bfloat16", "float8_e4m3fn"):
        dtype = getattr(torch, name)
        with torch.library._scoped_library("away", "FRAGMENT") as library:
            made = torch.library.infer_schema(_converted(dtype), mutates_args=())
            library.define(f"converted{made}")
            schema = torch.ops.away.converted.default._schema
        found = bound_arguments(schema, [torch.ones(2)], {})
        assert found is not None
        assert found["dtype"] == dtype


def _converted(default: torch.dtype) -> object:
    def converted(x: torch.Tensor, dtype: torch.dtype = default) -> torch.Tensor:
        return x.to(dtype)

    converted.__annotations__ = {
        "x": torch.Tensor,
        "dtype": torch.dtype,
        "return": torch.Tensor,
    }
    return converted


def test_the_source_of_a_kernel_has_the_default_as_a_dtype() -> None:
    """Without the argument, the function returns what the operator does."""

    @torch.library.custom_op("defaults::converted", mutates_args=())
    def converted(x: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return x.to(dtype, copy=True)

    kernel = tfk.infer_fake(converted, [(torch.ones(2, 3),), (torch.ones(4), torch.int32)])
    assert "def converted(x, dtype=torch.float64):" in kernel.source
    kernel.register()
    compiled = torch.compile(converted, backend="aot_eager", fullgraph=True)
    assert compiled(torch.ones(3)).dtype == torch.float64
