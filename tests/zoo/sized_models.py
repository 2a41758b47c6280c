"""Small random models of many architectures, each with inputs of three sizes; nothing is downloaded.

The handoff's tests and its benchmark compile them. Dropout is on where the default has it: results are
compared with one seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Inputs = dict[str, Any]

SIZES = ((2, 7), (3, 9), (4, 12))
"""Batch and length. The first is compiled as it is, the second makes both dynamic."""
IMAGES = ((2, 16), (3, 24), (4, 32))
"""Batch, height and width."""
VOCABULARY = 64


class SizedModel(NamedTuple):
    """How to make a model and its inputs."""

    make: Callable[[], torch.nn.Module]
    inputs: Callable[[int, int], Inputs]
    """From a batch size and a length."""
    sizes: tuple[tuple[int, int], ...] = SIZES

    def calls(self) -> list[Inputs]:
        """The inputs of three calls."""
        return [self.inputs(*size) for size in self.sizes]


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


# --- transformers ---------------------------------------------------------------------------------

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


def llama() -> torch.nn.Module:
    """Llama with tied embeddings and grouped queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_DECODER, tie_word_embeddings=True))


def mixtral() -> torch.nn.Module:
    """A mixture of four experts, two for each token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**_DECODER, num_local_experts=4, num_experts_per_tok=2))


def qwen3() -> torch.nn.Module:
    """Qwen 3: queries and keys are normalized."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_DECODER, head_dim=4))


def gemma2() -> torch.nn.Module:
    """Gemma 2: a layer with a sliding window, one without, and soft caps."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = {**_DECODER, "num_hidden_layers": 2, "head_dim": 4, "sliding_window": 4}
    return Gemma2ForCausalLM(Gemma2Config(**config, attn_implementation="eager"))


def gpt2() -> torch.nn.Module:
    """GPT-2 with dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=1, n_head=4, use_cache=False
        )
    )


def mamba() -> torch.nn.Module:
    """Mamba: its scan is a Python loop over the length."""
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(
        MambaConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            state_size=4,
            num_hidden_layers=1,
            conv_kernel=4,
            use_cache=False,
        )
    )


def bert() -> torch.nn.Module:
    """BERT with padding and dropout."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(**_ENCODER, vocab_size=VOCABULARY, max_position_embeddings=64)
    )


def deberta() -> torch.nn.Module:
    """DeBERTa 2: attention by relative positions."""
    from transformers import DebertaV2Config, DebertaV2ForMaskedLM

    return DebertaV2ForMaskedLM(
        DebertaV2Config(
            **_ENCODER,
            vocab_size=VOCABULARY,
            max_position_embeddings=64,
            relative_attention=True,
            position_buckets=8,
            pos_att_type=["p2c", "c2p"],
        )
    )


def t5() -> torch.nn.Module:
    """T5, encoder and decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=4,
            d_ff=24,
            num_layers=1,
            num_heads=4,
            decoder_start_token_id=0,
            use_cache=False,
        )
    )


def whisper() -> torch.nn.Module:
    """Whisper, encoder and decoder."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=VOCABULARY,
            num_mel_bins=8,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            max_source_positions=12,
            max_target_positions=32,
            use_cache=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    )


def wav2vec2() -> torch.nn.Module:
    """Wav2Vec2: convolutions over sound, and a loss over alignments."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    return Wav2Vec2ForCTC(
        Wav2Vec2Config(
            **_ENCODER,
            vocab_size=VOCABULARY,
            conv_dim=(16, 16),
            conv_stride=(5, 2),
            conv_kernel=(10, 3),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            apply_spec_augment=False,
            layerdrop=0.0,
        )
    )


def vit() -> torch.nn.Module:
    """A vision transformer; its position embeddings are interpolated."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(**_ENCODER, image_size=16, patch_size=4, num_labels=5)
    )


def clip() -> torch.nn.Module:
    """CLIP: a text and an image encoder, compared."""
    from transformers import CLIPConfig, CLIPModel

    text = {**_ENCODER, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "eos_token_id": 2}
    image = {**_ENCODER, "image_size": 16, "patch_size": 8}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=image, projection_dim=8))


def resnet() -> torch.nn.Module:
    """A ResNet: batch norms, whose buffers training changes."""
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5
        )
    )


def convnext() -> torch.nn.Module:
    """ConvNeXt."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return ConvNextForImageClassification(
        ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=5)
    )


# --- diffusers ------------------------------------------------------------------------------------

_BLOCK: dict[str, Any] = {"block_out_channels": (8,), "norm_num_groups": 4}
_TRANSFORMER: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_layers": 1,
    "sample_size": 32,
    "patch_size": 2,
    "in_channels": 4,
}


def unet() -> torch.nn.Module:
    """A UNet with attention."""
    from diffusers import UNet2DModel

    return UNet2DModel(
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        down_block_types=("AttnDownBlock2D",),
        up_block_types=("AttnUpBlock2D",),
        mid_block_type=None,
        attention_head_dim=8,
        **_BLOCK,
    )


def unet_condition() -> torch.nn.Module:
    """A UNet that looks at a text."""
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
        mid_block_type=None,
        cross_attention_dim=8,
        attention_head_dim=8,
        **_BLOCK,
    )


def autoencoder() -> torch.nn.Module:
    """A variational autoencoder."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=4,
        block_out_channels=(8, 16),
        norm_num_groups=4,
    )


def dit() -> torch.nn.Module:
    """A diffusion transformer with classes."""
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(**_TRANSFORMER, num_embeds_ada_norm=10)


def pixart() -> torch.nn.Module:
    """PixArt: a diffusion transformer that looks at a text."""
    from diffusers import PixArtTransformer2DModel

    return PixArtTransformer2DModel(
        **_TRANSFORMER, cross_attention_dim=16, caption_channels=8, use_additional_conditions=False
    )


def sd3() -> torch.nn.Module:
    """The transformer of Stable Diffusion 3: image and text attend to each other."""
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        **_TRANSFORMER,
        joint_attention_dim=8,
        caption_projection_dim=16,
        pooled_projection_dim=8,
        out_channels=4,
        pos_embed_max_size=32,
    )


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
    """The same for the transformers, which have another name for the image."""
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


TRANSFORMERS: dict[str, SizedModel] = {
    "llama": SizedModel(llama, _labelled),
    "mixtral": SizedModel(mixtral, _labelled),
    "qwen3": SizedModel(qwen3, _padded),
    "gemma2": SizedModel(gemma2, _labelled),
    "gpt2": SizedModel(gpt2, _labelled),
    "mamba": SizedModel(mamba, _labelled, ((2, 3), (3, 4), (4, 5))),
    "bert": SizedModel(bert, _padded),
    "deberta": SizedModel(deberta, _padded),
    "t5": SizedModel(t5, _translated),
    "whisper": SizedModel(whisper, _spectrum),
    "wav2vec2": SizedModel(wav2vec2, _sound),
    "vit": SizedModel(vit, _interpolated, IMAGES),
    "clip": SizedModel(clip, _texts_and_images),
    "resnet": SizedModel(resnet, _images, IMAGES),
    "convnext": SizedModel(convnext, _images, IMAGES),
}
DIFFUSERS: dict[str, SizedModel] = {
    "unet": SizedModel(unet, _noisy(3), IMAGES),
    "unet_condition": SizedModel(unet_condition, _noisy(4, encoder_hidden_states=_text), IMAGES),
    "autoencoder": SizedModel(autoencoder, _encoded, IMAGES),
    "dit": SizedModel(
        dit, _latents(class_labels=lambda batch: torch.randint(0, 10, (batch,))), IMAGES
    ),
    "pixart": SizedModel(pixart, _latents(encoder_hidden_states=_text), IMAGES),
    "sd3": SizedModel(
        sd3,
        _latents(
            encoder_hidden_states=_text, pooled_projections=lambda batch: torch.randn(batch, 8)
        ),
        IMAGES,
    ),
}
MODELS: dict[str, SizedModel] = {**TRANSFORMERS, **DIFFUSERS}
