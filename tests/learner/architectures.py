"""Owns tiny models of several architectures, in folders as they are published.

Must not be used outside tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 5e5,
}
_GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}

READ_DIRECTLY = {
    "llama": LlamaConfig(**_SIZES, rope_parameters=_LLAMA3),
    "qwen2": Qwen2Config(**_SIZES, tie_word_embeddings=False),
    "qwen2-tied": Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_SIZES, head_dim=16),
    "mistral": MistralConfig(**_SIZES, sliding_window=8),
    "gemma2": Gemma2Config(**_SIZES, head_dim=16),
    "gemma3": Gemma3TextConfig(**_SIZES, head_dim=16),
    "phi3": Phi3Config(**_SIZES),
    "gpt2": GPT2Config(**_GPT2, bos_token_id=1, eos_token_id=2),
}
CONVERTED = {
    "mixtral": MixtralConfig(**_SIZES, num_local_experts=4),
    "gpt-neox": GPTNeoXConfig(
        **{name: size for name, size in _SIZES.items() if name != "num_key_value_heads"}, tie_word_embeddings=False
    ),
}
"""transformers changes names or tensors of these when it loads them."""


def write_model(folder: Path, config: Any, dtype: torch.dtype, *, shard: str = "16KB") -> Path:
    """Write a model with random weights in `dtype`, in files of at most about `shard`."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder
