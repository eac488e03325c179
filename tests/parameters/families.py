"""Small models of the families of transformers, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


Built = tuple[torch.nn.Module, dict[str, Any]]


def _text(kind: str, config: str, **sizes: Any) -> Callable[[Any], Built]:
    def build(hf: Any) -> Built:
        made = getattr(hf, config)(**sizes)
        tokens = torch.randint(3, made.vocab_size, (2, 12))
        return getattr(hf, kind)(made), {"input_ids": tokens, "labels": tokens}

    return build


def _vit(hf: Any) -> Built:
    sizes = {key: size for key, size in _SIZES.items() if key != "vocab_size"}
    config = hf.ViTConfig(**sizes, **_NO_DROPOUT, image_size=32, patch_size=8)
    inputs = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}
    return hf.ViTForImageClassification(config), inputs


def _whisper(hf: Any) -> Built:
    config = hf.WhisperConfig(
        vocab_size=96,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=16,
        max_source_positions=32,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        dropout=0.0,
        begin_suppress_tokens=None,
        suppress_tokens=None,
    )
    inputs = {
        "input_features": torch.randn(2, 16, 64),
        "labels": torch.randint(3, 96, (2, 12)),
    }
    return hf.WhisperForConditionalGeneration(config), inputs


FAMILIES: dict[str, Callable[[Any], Built]] = {
    "llama": _text("LlamaForCausalLM", "LlamaConfig", **_SIZES, num_key_value_heads=2),
    "gemma 2": _text(
        "Gemma2ForCausalLM", "Gemma2Config", **_SIZES, num_key_value_heads=2, head_dim=8
    ),
    "mixtral": _text(
        "MixtralForCausalLM", "MixtralConfig", **_SIZES, num_key_value_heads=2, num_local_experts=4
    ),
    "gpt 2": _text(
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=96,
        n_embd=32,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "t5": _text(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=96,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=3,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    ),
    "bert": _text("BertForMaskedLM", "BertConfig", **_SIZES, **_NO_DROPOUT),
    "mamba": _text(
        "MambaForCausalLM",
        "MambaConfig",
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=4,
        state_size=8,
    ),
    "mamba 2": _text(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=3,
        state_size=8,
        num_heads=8,
        head_dim=8,
        expand=2,
        n_groups=1,
        chunk_size=8,
    ),
    "qwen 3 moe": _text(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        **_SIZES,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
    "deepseek v3": _text(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        **_SIZES,
        moe_intermediate_size=32,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "vit": _vit,
    "whisper": _whisper,
}


def build(family: str) -> Built:
    """A model of *family* and inputs for it. Skips the test where transformers is not installed, and
    imports it only here: its models take seconds.
    """
    return FAMILIES[family](pytest.importorskip("transformers"))
