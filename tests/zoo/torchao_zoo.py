"""Quantized tensors of torchao, made by hand: no kernel and no GPU is needed for that."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from quiet import quiet

QUANTIZED = torch.int8


def modules() -> dict[str, Any]:
    """The modules that define the classes, by their last name."""
    names = [
        "torchao.float8.float8_training_tensor",
        "torchao.float8.fsdp_utils",
        "torchao.float8.inference",
        "torchao.optim.subclass_4bit",
        "torchao.optim.subclass_8bit",
        "torchao.optim.subclass_fp8",
        "torchao.prototype.dtypes.uintx.uintx_utils",
        "torchao.prototype.mx_formats.mx_tensor",
        "torchao.prototype.mx_formats.nvfp4_tensor",
        "torchao.prototype.quant_logger.quant_logger",
        "torchao.prototype.quantized_training.int8",
        "torchao.prototype.quantized_training.bitnet",
        "torchao.prototype.quantized_training.int8_mixed_precision",
        "torchao.quantization",
        "torchao.quantization.qat.affine_fake_quantized_tensor",
        "torchao.quantization.quantize_.workflows.float8.float8_tensor",
        "torchao.quantization.quantize_.workflows.int8.int8_tensor",
        "torchao.quantization.quantize_.workflows.nf4.nf4_tensor",
        "torchao.sparsity.blocksparse",
    ]
    with quiet():
        return {name.rpartition(".")[2]: importlib.import_module(name) for name in names}


def tensors() -> dict[str, Any]:
    """One or more of each class."""
    ao = modules()
    q = ao["quantization"]
    weight = torch.ones(64, 128, dtype=torch.bfloat16)
    packed = torch.zeros(64, 64, dtype=torch.uint8)
    scale, column = torch.ones(4, 64), torch.ones(64, 1)
    eights = torch.zeros(64, 128, dtype=QUANTIZED)
    float8 = weight.to(torch.float8_e4m3fn)
    kwargs8 = ao["int8_tensor"].QuantizeTensorToInt8Kwargs(granularity=q.PerRow())
    kwargs_f8 = ao["float8_tensor"].QuantizeTensorToFloat8Kwargs(
        granularity=q.PerRow(), mm_config=ao["inference"].Float8MMConfig(use_fast_accum=True)
    )
    size = torch.Size([64, 128])
    training = ao["float8_training_tensor"]
    mixed = ao["int8_mixed_precision"]
    return {
        "Float8Tensor": q.Float8Tensor(float8, column, [1, 128], dtype=torch.bfloat16),
        "Float8Tensor with activations": q.Float8Tensor(
            float8, column, [1, 128], kwargs_f8.mm_config, kwargs_f8, dtype=torch.bfloat16
        ),
        "Int8Tensor": q.Int8Tensor(
            eights, column, [1, 128], torch.bfloat16, act_quant_kwargs=kwargs8, reduce_range=True
        ),
        "Int8Tensor with scales": q.Int8Tensor(
            eights, column, [1, 128], torch.bfloat16, column.clone(), torch.ones(1)
        ),
        "Int4Tensor": q.Int4Tensor(packed, scale, scale.clone(), [1, 32], size),
        "Int4Tensor with activations": q.Int4Tensor(
            packed, scale, scale.clone(), [1, 32], size, torch.ones(128), torch.bfloat16
        ),
        "Int4PlainInt32Tensor": q.Int4PlainInt32Tensor(
            torch.zeros(64, 16, dtype=torch.int32), scale, scale.clone(), [1, 32], size
        ),
        "Int4PreshuffledTensor": q.Int4PreshuffledTensor(packed, scale, [1, 32], [64, 128], scale),
        "Int4TilePackedTo4dTensor": q.Int4TilePackedTo4dTensor(
            torch.zeros(8, 1, 32, 4, dtype=torch.int32), torch.ones(4, 64, 2), [1, 32], size
        ),
        "IntxUnpackedToInt8Tensor": q.IntxUnpackedToInt8Tensor(
            eights, column, column.to(QUANTIZED), torch.int4, (1, 128), torch.bfloat16, None
        ),
        "NF4Tensor": ao["nf4_tensor"].to_nf4(torch.ones(64, 128), 32, 4),
        "Float8TrainingTensor": training.Float8TrainingTensor(
            float8, torch.ones(()), torch.bfloat16, training.LinearMMConfig(),
            training.GemmInputRole.WEIGHT,
        ),
        "WeightWithDynamicFloat8CastTensor": ao["fsdp_utils"].WeightWithDynamicFloat8CastTensor(
            weight, training.LinearMMConfig(), torch.float8_e4m3fn
        ),
        "OptimState8bit": ao["subclass_8bit"].OptimState8bit.zeros((512,)),
        "OptimState4bit": ao["subclass_4bit"].OptimState4bit.zeros((2, 256)),
        "OptimStateFp8": ao["subclass_fp8"].OptimStateFp8.zeros((512,)),
        "UintxTensor": ao["uintx_utils"].to_uintx(
            torch.zeros(64, 128, dtype=torch.uint8), torch.uint3, -1
        ),
        "MXTensor": ao["mx_tensor"].MXTensor.to_mx(weight, torch.float8_e4m3fn, 32),
        "NVFP4Tensor": ao["nvfp4_tensor"].NVFP4Tensor.to_nvfp4(weight),
        "Int8QuantizedTrainingLinearWeight": (
            ao["int8"].Int8QuantizedTrainingLinearWeight.from_float(weight)
        ),
        "Int8MixedPrecisionTrainingLinearWeight": mixed.Int8MixedPrecisionTrainingLinearWeight(
            weight, mixed.Int8MixedPrecisionTrainingConfig(grad_input=False)
        ),
        "BitNetTrainingLinearWeight": ao["bitnet"].BitNetTrainingLinearWeight(weight),
        "ActivationLoggingTensor": ao["quant_logger"].ActivationLoggingTensor(weight, "layer.0"),
        "BlockSparseTensor": ao["blocksparse"].BlockSparseTensor.from_dense(torch.ones(64, 64), 32),
    }  # fmt: skip


def fake_quantized() -> Any:
    """A tensor whose context is a function of its own: it has no record."""
    module = modules()["affine_fake_quantized_tensor"]
    return module._AffineFakeQuantizedTensor(torch.ones(2, 2), abs_of_all)


def abs_of_all(t: torch.Tensor) -> torch.Tensor:
    """A function of this file."""
    return t.abs()
