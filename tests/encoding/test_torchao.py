"""torchao's quantized tensors work by the general rules, without code for torchao."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torchao_zoo
from processes import piped
from subclass_zoo import describe, facts, rebuild
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_fakeify as tfk
from torch_fakeify.encoding.subclasses import Meshes, decode_context, encode_subclass
from torch_fakeify.errors import UnsupportedTensorError

if TYPE_CHECKING:
    from torch_fakeify.records.tensor import MetaTensorDesc

pytest.importorskip("torchao", reason="needs the `torchao` extra", exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def tensors() -> dict[str, Any]:
    """All tensors of torchao in the zoo."""
    return torchao_zoo.tensors()


def test_torchaos_tensors_round_trip(tensors: dict[str, Any]) -> None:
    """Metadata, inner tensors and context are equal."""
    for kind, t in tensors.items():
        desc: MetaTensorDesc = tfk.loads(tfk.dumps(describe(t)))
        assert facts(rebuild(desc, Meshes())) == facts(t), kind
        context = decode_context(desc.subclass, where="t")
        assert context == t.__tensor_flatten__()[1], kind


def test_fake_tensors_by_the_decoded_context(tensors: dict[str, Any]) -> None:
    """``__tensor_unflatten__`` makes the fake tensors that torch's ``from_tensor`` makes."""
    for kind, t in tensors.items():
        if kind == "BlockSparseTensor":
            continue  # torch has no fake one: as_strided lacks a kernel for its layout
        mode = FakeTensorMode()
        expected = mode.from_tensor(t)
        record = encode_subclass(t, describe, where="t")
        inner = {name: mode.from_tensor(getattr(t, name)) for name, _ in record.tensors}
        context = decode_context(record, where="t")
        with mode:
            found = type(t).__tensor_unflatten__(inner, context, t.shape, t.stride())
        assert facts(found) == facts(expected), kind


READER = """
import json, sys
import torch_fakeify as tfk
from torch_fakeify.encoding.subclasses import Meshes
from subclass_zoo import facts, rebuild

descs = tfk.loads(sys.stdin.buffer.read())
try:
    rebuild(descs["NF4Tensor"], Meshes())
except tfk.UnknownNameError as error:
    message = str(error)
import torchao_zoo
torchao_zoo.modules()
found = {kind: facts(rebuild(desc, Meshes())) for kind, desc in descs.items()}
print(json.dumps([message, found]))
"""


@pytest.mark.sweep
def test_torchaos_tensors_are_decoded_in_a_fresh_interpreter(
    tensors: dict[str, Any],
) -> None:
    """Without torchao imported the error contains the import; with it, all are decoded."""
    output = piped(READER, tfk.dumps({kind: describe(t) for kind, t in tensors.items()}))
    message, found = json.loads(output.splitlines()[-1])
    module = "torchao.quantization.quantize_.workflows.nf4.nf4_tensor"
    assert message == (
        f"t: the tensor subclass '{module}.NF4Tensor' is not known in this process. "
        f"Run `import {module}` first if you trust it."
    )
    assert found == {kind: facts(t) for kind, t in tensors.items()}


def test_a_function_in_the_context_is_refused() -> None:
    """A user's function has no record, and the error contains the fix."""
    module = "torchao.quantization.qat.affine_fake_quantized_tensor"
    with pytest.raises(UnsupportedTensorError) as error:
        describe(torchao_zoo.fake_quantized())
    assert str(error.value) == (
        f"t.context[0]: the context of {module}._AffineFakeQuantizedTensor cannot be encoded: a "
        "function cannot be recorded; expected an operator or a function of a listed torch module; "
        "found torchao_zoo.abs_of_all. Call torch_fakeify.register_subclass("
        "_AffineFakeQuantizedTensor, encode_ctx=..., decode_ctx=...) with functions from the "
        "context to plain data and back."
    )
