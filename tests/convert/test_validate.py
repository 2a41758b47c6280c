"""Records that no tensor can have."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from converted_checks import UncachedConverter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    StatelessSymbolicContext,
)

import torch_fakeify as tfk
from torch_fakeify.compat import torch_dynamo
from torch_fakeify.convert.converter import MetaConverter
from torch_fakeify.describe.describer import MetaTensorDescriber

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"size": (2, 3, 4)},
            "tensor 0: sizes and strides differ in number; expected 3 strides; found 2",
        ),
        (
            {"size": (-1, 3)},
            "tensor 0: a size is out of range; expected 0 to 2**63 - 1; found -1",
        ),
        (
            {"stride": (2**64, 1)},
            f"tensor 0: a size is out of range; expected 0 to 2**63 - 1; found {2**64}",
        ),
        (
            {"dtype": "float7"},
            f"tensor 0: torch {torch_dynamo.torch_version()} knows no dtype `float7`",
        ),
        ({"dtype": "nn"}, f"tensor 0: torch {torch_dynamo.torch_version()} knows no dtype `nn`"),
        (
            {"device": "abacus:0"},
            f"tensor 0: torch {torch_dynamo.torch_version()} knows no device `abacus:0`",
        ),
        (
            {"layout": "sparse_xyz"},
            "tensor 0: the layout is not handled; expected strided, sparse_coo, _mkldnn, "
            "sparse_csr, sparse_csc, sparse_bsr, sparse_bsc; found sparse_xyz",
        ),
        (
            {"layout": "sparse_coo"},
            "tensor 0: a sparse layout and what a sparse tensor has belong together; "
            "expected `sparse` of a sparse layout only; found sparse_coo",
        ),
        ({"is_view": True}, "tensor 0: a view and a base belong together"),
        ({"is_leaf": False}, "tensor 0: a tensor that is no leaf requires grad"),
        ({"storage": None}, "tensor 0: a strided tensor has a storage; found none"),
    ],
)
def test_unsound_records_are_refused(change: dict[str, Any], message: str) -> None:
    """A record that no tensor gave is an error that says what is wrong, from both paths."""
    d = msgspec.structs.replace(MetaTensorDescriber().describe_tensor(torch.empty(2, 3)), **change)
    for converter_of in (MetaConverter, UncachedConverter):
        converter = converter_of(FakeTensorMode())
        converter.from_desc(
            msgspec.structs.replace(MetaTensorDescriber().describe_tensor(torch.empty(1)), id=99)
        )
        with pytest.raises(tfk.ConvertError) as error:
            converter.from_desc(d)
        assert str(error.value) == message


def test_sizes_that_torch_refuses_are_a_convert_error() -> None:
    """Overflow inside torch is reported as the record's fault."""
    d = MetaTensorDescriber().describe_tensor(torch.empty(2, 3))
    d = msgspec.structs.replace(d, size=(2**62, 2**62), stride=(2**62, 1))
    with pytest.raises(tfk.ConvertError, match=r"^tensor 0: torch makes no tensor of these sizes"):
        MetaConverter(FakeTensorMode()).from_desc(d)


def test_a_static_mode_takes_no_symbolic_context() -> None:
    """An explicit policy that cannot be followed is an error."""
    d = tfk.describe_tensor(torch.empty(2))
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    with pytest.raises(tfk.ConvertError, match="static shapes takes no symbolic context"):
        MetaConverter(FakeTensorMode()).from_desc(d, symbolic_context=context)
