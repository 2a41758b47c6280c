"""Small random models of many architectures, each with inputs of three sizes; nothing is downloaded.

They are recorded and replayed, compiled with and without a handoff, and measured. Dropout is on where
the default has it, unless a model is made without. A process that replays them must not import this.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from program_zoo import Program

if TYPE_CHECKING:
    from collections.abc import Callable

    Inputs = dict[str, Any]

SIZES = ((2, 7), (3, 9), (4, 12))
"""Batch and length. The first is compiled as it is, the second makes both dynamic."""
IMAGES = ((2, 16), (5, 24), (4, 32))
"""Batch, height and width."""
VOCABULARY = 64
_LAYERS = frozenset(
    {"num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"}
)
"""Settings that are the number of layers."""


class SizedModel(NamedTuple):
    """How to make a model and its inputs."""

    name: str
    """The class of the model in its library: ``"transformers.BertForMaskedLM"``."""
    config: dict[str, Any]
    """Settings of its configuration."""
    inputs: Callable[[int, int], Inputs]
    """From a batch size and a length."""
    sizes: tuple[tuple[int, int], ...] = SIZES

    def make(self, *, layers: int = 1, dropout: bool = True) -> torch.nn.Module:
        """Return the model, its weights random."""
        library, _, name = self.name.partition(".")
        cls: Any = getattr(import_module(library), name)
        config = {k: max(layers, v) if k in _LAYERS else v for k, v in self.config.items()}
        if library == "diffusers":
            return cls(**config)
        made = cls.config_class(**config)
        if not dropout:
            for key, value in vars(made).items():
                if "drop" in key and isinstance(value, float):
                    setattr(made, key, 0.0)
        return cls(made)

    def calls(self) -> list[Inputs]:
        """The inputs of three calls."""
        return [self.inputs(*size) for size in self.sizes]


# --- inputs ---------------------------------------------------------------------------------------


def _ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def _labelled(batch: int, length: int) -> Inputs:
    ids = _ids(batch, length)
    return {"input_ids": ids, "labels": ids}


def _padded(batch: int, length: int) -> Inputs:
    ids = _ids(batch, length)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def _translated(batch: int, length: int) -> Inputs:
    return {"input_ids": _ids(batch, length), "labels": _ids(batch, length - 2)}


def _images(batch: int, width: int) -> Inputs:
    return {
        "pixel_values": torch.randn(batch, 3, width, width),
        "labels": torch.randint(0, 5, (batch,)),
    }


def _noisy(channels: int, **more: Callable[[int], torch.Tensor]) -> Callable[[int, int], Inputs]:
    """Inputs of a diffusion model: an image, a time step, and what it is conditioned on."""

    def inputs(batch: int, width: int) -> Inputs:
        return {
            "sample": torch.randn(batch, channels, width, width),
            "timestep": torch.randint(0, 1000, (batch,)),
            **{name: make(batch) for name, make in more.items()},
        }

    return inputs


def _text(batch: int) -> torch.Tensor:
    return torch.randn(batch, 5, 8)


def _latents(**more: Callable[[int], torch.Tensor]) -> Callable[[int, int], Inputs]:
    """Inputs of a diffusion transformer, whose image has another name."""
    noisy = _noisy(4, **more)

    def inputs(batch: int, width: int) -> Inputs:
        found = noisy(batch, width)
        return {"hidden_states": found.pop("sample"), **found}

    return inputs


def _sound(batch: int, length: int) -> Inputs:
    return {"input_values": torch.randn(batch, 50 * length), "labels": _ids(batch, 3)}


def _spectrum(batch: int, length: int) -> Inputs:
    return {"input_features": torch.randn(batch, 8, 24), "labels": _ids(batch, length)}


def _interpolated(batch: int, width: int) -> Inputs:
    return {**_images(batch, width), "interpolate_pos_encoding": True}


def _texts_and_images(batch: int, length: int) -> Inputs:
    ids = _ids(batch, length)
    return {"input_ids": ids, "pixel_values": torch.randn(batch, 3, 16, 16), "return_loss": True}


def _encoded(batch: int, width: int) -> Inputs:
    # It can draw from what it encodes, by `randn` of symbolic sizes and a generator: Dynamo of
    # torch 2.13 fails on that.
    return {"sample": torch.randn(batch, 3, width, width), "sample_posterior": False}


# --- configurations -------------------------------------------------------------------------------

_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
}
_ENCODER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
_TEXT_ENCODER = {**_ENCODER, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
_LABELS = {"num_labels": 5}

TRANSFORMERS: dict[str, SizedModel] = {
    # Tied embeddings and grouped queries.
    "llama": SizedModel(
        "transformers.LlamaForCausalLM", {**_DECODER, "tie_word_embeddings": True}, _labelled
    ),
    # A mixture of four experts, two for each token.
    "mixtral": SizedModel(
        "transformers.MixtralForCausalLM",
        {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
        _labelled,
    ),
    # Queries and keys are normalized.
    "qwen3": SizedModel("transformers.Qwen3ForCausalLM", {**_DECODER, "head_dim": 4}, _padded),
    # A layer with a sliding window, one without, and soft caps.
    "gemma2": SizedModel(
        "transformers.Gemma2ForCausalLM",
        {
            **_DECODER,
            "num_hidden_layers": 2,
            "head_dim": 4,
            "sliding_window": 4,
            "attn_implementation": "eager",
        },
        _labelled,
    ),
    "gpt2": SizedModel(
        "transformers.GPT2LMHeadModel",
        {
            "vocab_size": VOCABULARY,
            "n_positions": 64,
            "n_embd": 16,
            "n_layer": 1,
            "n_head": 4,
            "use_cache": False,
        },
        _labelled,
    ),
    # Its scan is a Python loop over the length.
    "mamba": SizedModel(
        "transformers.MambaForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 8,
            "state_size": 4,
            "num_hidden_layers": 1,
            "conv_kernel": 4,
            "use_cache": False,
        },
        _labelled,
        ((2, 3), (3, 4), (4, 5)),
    ),
    "bert": SizedModel("transformers.BertForMaskedLM", _TEXT_ENCODER, _padded),
    # Attention by relative positions.
    "deberta": SizedModel(
        "transformers.DebertaV2ForMaskedLM",
        {
            **_TEXT_ENCODER,
            "relative_attention": True,
            "position_buckets": 8,
            "pos_att_type": ["p2c", "c2p"],
        },
        _padded,
    ),
    # An encoder and a decoder.
    "t5": SizedModel(
        "transformers.T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "d_kv": 4,
            "d_ff": 24,
            "num_layers": 1,
            "num_heads": 4,
            "decoder_start_token_id": 0,
            "use_cache": False,
        },
        _translated,
    ),
    # An encoder of sound and a decoder.
    "whisper": SizedModel(
        "transformers.WhisperForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "num_mel_bins": 8,
            "d_model": 16,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "max_source_positions": 12,
            "max_target_positions": 32,
            "use_cache": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        _spectrum,
    ),
    # Convolutions over sound, and a loss over alignments.
    "wav2vec2": SizedModel(
        "transformers.Wav2Vec2ForCTC",
        {
            **_ENCODER,
            "vocab_size": VOCABULARY,
            "conv_dim": (16, 16),
            "conv_stride": (5, 2),
            "conv_kernel": (10, 3),
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "apply_spec_augment": False,
            "layerdrop": 0.0,
        },
        _sound,
    ),
    # Its position embeddings are interpolated.
    "vit": SizedModel(
        "transformers.ViTForImageClassification",
        {**_ENCODER, **_LABELS, "image_size": 16, "patch_size": 4},
        _interpolated,
        IMAGES,
    ),
    # Windows of an image of any size, padded at each stage.
    "swin": SizedModel(
        "transformers.SwinForImageClassification",
        {
            **_LABELS,
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        _images,
        IMAGES,
    ),
    # A text and an image encoder, compared.
    "clip": SizedModel(
        "transformers.CLIPModel",
        {
            "text_config": {**_TEXT_ENCODER, "eos_token_id": 2},
            "vision_config": {**_ENCODER, "image_size": 16, "patch_size": 8},
            "projection_dim": 8,
        },
        _texts_and_images,
    ),
    # Batch norms, whose buffers training changes.
    "resnet": SizedModel(
        "transformers.ResNetForImageClassification",
        {
            **_LABELS,
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "layer_type": "basic",
        },
        _images,
        IMAGES,
    ),
    "convnext": SizedModel(
        "transformers.ConvNextForImageClassification",
        {**_LABELS, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
        _images,
        IMAGES,
    ),
}

_BLOCK: dict[str, Any] = {"block_out_channels": (8,), "norm_num_groups": 4}
_TRANSFORMER: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_layers": 1,
    "sample_size": 32,
    "patch_size": 2,
    "in_channels": 4,
}

DIFFUSERS: dict[str, SizedModel] = {
    # Attention in its blocks.
    "unet": SizedModel(
        "diffusers.UNet2DModel",
        {
            **_BLOCK,
            "in_channels": 3,
            "out_channels": 3,
            "layers_per_block": 1,
            "down_block_types": ("AttnDownBlock2D",),
            "up_block_types": ("AttnUpBlock2D",),
            "mid_block_type": None,
            "attention_head_dim": 8,
        },
        _noisy(3),
        IMAGES,
    ),
    # Attends to a text.
    "unet_condition": SizedModel(
        "diffusers.UNet2DConditionModel",
        {
            **_BLOCK,
            "layers_per_block": 1,
            "down_block_types": ("CrossAttnDownBlock2D",),
            "up_block_types": ("CrossAttnUpBlock2D",),
            "mid_block_type": None,
            "cross_attention_dim": 8,
            "attention_head_dim": 8,
        },
        _noisy(4, encoder_hidden_states=_text),
        IMAGES,
    ),
    "autoencoder": SizedModel(
        "diffusers.AutoencoderKL",
        {
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "layers_per_block": 1,
            "latent_channels": 4,
            "block_out_channels": (8, 16),
            "norm_num_groups": 4,
        },
        _encoded,
        IMAGES,
    ),
    # With classes.
    "dit": SizedModel(
        "diffusers.DiTTransformer2DModel",
        {**_TRANSFORMER, "num_embeds_ada_norm": 10},
        _latents(class_labels=lambda batch: torch.randint(0, 10, (batch,))),
        IMAGES,
    ),
    # Attends to a text.
    "pixart": SizedModel(
        "diffusers.PixArtTransformer2DModel",
        {
            **_TRANSFORMER,
            "cross_attention_dim": 16,
            "caption_channels": 8,
            "use_additional_conditions": False,
        },
        _latents(encoder_hidden_states=_text),
        IMAGES,
    ),
    # Image and text attend to each other.
    "sd3": SizedModel(
        "diffusers.SD3Transformer2DModel",
        {
            **_TRANSFORMER,
            "joint_attention_dim": 8,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 8,
            "out_channels": 4,
            "pos_embed_max_size": 32,
        },
        _latents(
            encoder_hidden_states=_text, pooled_projections=lambda batch: torch.randn(batch, 8)
        ),
        IMAGES,
    ),
}
MODELS: dict[str, SizedModel] = {**TRANSFORMERS, **DIFFUSERS}


# --- programs -------------------------------------------------------------------------------------


def replayable(name: str) -> tuple[torch.nn.Module, Inputs]:
    """A model of two layers without dropout and its inputs, whose graph needs none of its code."""
    model = MODELS[name].make(layers=2, dropout=False)
    if name == "mixtral":
        # The default is an operator that transformers registers.
        model.set_experts_implementation("batched_mm")
    return model, MODELS[name].calls()[1]


def models() -> dict[str, Program]:
    """Each model of transformers as a program of dynamic sizes, in inference and in training."""

    def program(name: str, *, training: bool) -> Program:
        def make() -> tuple[Any, ...]:
            model, inputs = replayable(name)
            model.train(training)
            return (lambda inputs: model(**inputs)), (inputs,)

        return Program(
            name=f"model_{name}_{'training' if training else 'inference'}",
            sentence=MODELS[name].name,
            make=make,
            options={"dynamic": True},
            grad=training,
        )

    both = [program(name, training=training) for name in TRANSFORMERS for training in (False, True)]
    return {p.name: p for p in both}
