"""Small random models of the architectures that users compile; nothing is downloaded.

The replaying process of the model tests must not import it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from program_zoo import Program

if TYPE_CHECKING:
    from collections.abc import Callable


def _ids(batch: int = 2, length: int = 7, vocab: int = 64) -> torch.Tensor:
    return torch.randint(0, vocab, (batch, length))


def llama() -> tuple[torch.nn.Module, dict[str, Any]]:
    """Llama with tied embeddings and grouped queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        use_cache=False,
    )
    ids = _ids()
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def mixtral() -> tuple[torch.nn.Module, dict[str, Any]]:
    """A mixture of four experts, two for each token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        use_cache=False,
    )
    ids = _ids()
    model = MixtralForCausalLM(config)
    # The default is an operator that transformers registers, which the other process has not.
    model.set_experts_implementation("batched_mm")
    return model, {"input_ids": ids, "labels": ids}


def gpt2() -> tuple[torch.nn.Module, dict[str, Any]]:
    """GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=64,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    ids = _ids()
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def bert() -> tuple[torch.nn.Module, dict[str, Any]]:
    """BERT with padding."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    ids = _ids()
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return BertForMaskedLM(config), {"input_ids": ids, "attention_mask": mask, "labels": ids}


def t5() -> tuple[torch.nn.Module, dict[str, Any]]:
    """T5, encoder and decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config), {"input_ids": _ids(), "labels": _ids(length=5)}


def vit() -> tuple[torch.nn.Module, dict[str, Any]]:
    """A vision transformer."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=16,
        patch_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=5,
    )
    return ViTForImageClassification(config), {
        "pixel_values": torch.randn(5, 3, 16, 16),
        "labels": torch.randint(0, 5, (5,)),
    }


def whisper() -> tuple[torch.nn.Module, dict[str, Any]]:
    """Whisper, encoder and decoder."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=64,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=12,
        max_target_positions=32,
        dropout=0.0,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(2, 8, 24),
        "labels": _ids(length=5),
    }


def mamba() -> tuple[torch.nn.Module, dict[str, Any]]:
    """Mamba, its scan written out in operators."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=64,
        hidden_size=16,
        state_size=4,
        num_hidden_layers=2,
        conv_kernel=4,
        use_cache=False,
    )
    ids = _ids()
    return MambaForCausalLM(config), {"input_ids": ids, "labels": ids}


def swin() -> tuple[torch.nn.Module, dict[str, Any]]:
    """A Swin transformer: windows of an image of any size, padded at each stage."""
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        drop_path_rate=0.0,
        num_labels=3,
    )
    return SwinForImageClassification(config), {
        "pixel_values": torch.randn(3, 3, 32, 32),
        "labels": torch.randint(0, 3, (3,)),
    }


MODELS: dict[str, Callable[[], tuple[torch.nn.Module, dict[str, Any]]]] = {
    "llama": llama,
    "mixtral": mixtral,
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "whisper": whisper,
    "mamba": mamba,
    "swin": swin,
}


def models() -> dict[str, Program]:
    """Each model as a program of dynamic sizes, in inference and in training."""

    def program(name: str, *, training: bool) -> Program:
        def make() -> tuple[Any, ...]:
            model, inputs = MODELS[name]()
            model.train(training)
            return (lambda inputs: model(**inputs)), (inputs,)

        return Program(
            name=f"model_{name}_{'training' if training else 'inference'}",
            sentence=str(MODELS[name].__doc__),
            make=make,
            options={"dynamic": True},
            grad=training,
        )

    both = [program(name, training=training) for name in MODELS for training in (False, True)]
    return {p.name: p for p in both}
