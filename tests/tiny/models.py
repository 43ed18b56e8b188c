"""Random small models of many architectures, and one small tree, for tests."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

VOCAB = 320
WINDOW = 6

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

# name -> (config class, what it changes in BASE)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-rope-scaling": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral-window": ("MistralConfig", {"sliding_window": WINDOW}),
    "phi3": ("Phi3Config", {}),
    "phi": (
        "PhiConfig",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "gemma": ("GemmaConfig", {}),
    "gemma2": ("Gemma2Config", {"sliding_window": WINDOW, "layer_types": MIXED, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": WINDOW, "layer_types": MIXED, "query_pre_attn_scalar": 16}),
    "olmo2": ("Olmo2Config", {}),
    "granite": ("GraniteConfig", {"attention_multiplier": 0.2, "logits_scaling": 3.0, "residual_multiplier": 0.5}),
    "smollm3": ("SmolLM3Config", {}),
    "cohere": ("CohereConfig", {}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": WINDOW}),
    "stablelm": ("StableLmConfig", {}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}),
    "opt": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}),
}
_OWN_SIZES = {"gpt2": ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")}

# A tree with branches at two depths; the path to node 4 does not start with the first rows.
PARENTS = (-1, 0, 0, 1, 2, 4)


def tiny_config(name: str, **changes: Any) -> Any:
    """Config of a random small model."""
    kind, own = ARCHITECTURES[name]
    values = {key: value for key, value in BASE.items() if key not in _OWN_SIZES.get(name, ())}
    return getattr(transformers, kind)(**{**values, **own, **changes})


def tiny_model(name: str, seed: int = 0, **changes: Any) -> nn.Module:
    """A random small model in float32, in eval mode, with weights large enough that attention matters."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        tiny_config(name, **changes), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.15)
            elif parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
