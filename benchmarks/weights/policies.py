"""Owns the policies that are published: the shapes of a Llama, with random weights in float32.

Must not train. Only names and shapes matter to a broadcast, so no model is downloaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "vocab_size": 107,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "SmolLM2-135M": {
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1_536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "1 GB": {
        "vocab_size": 49_152,
        "hidden_size": 1_024,
        "intermediate_size": 2_816,
        "num_hidden_layers": 17,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
}
"""By name. The second is that of the model on Hugging Face, 538 MB; the third has 1.0 * 10^9 bytes."""


def config_of(name: str) -> LlamaConfig:
    """The configuration of a policy with tied embeddings."""
    return LlamaConfig(
        **SHAPES[name],
        max_position_embeddings=2_048,
        tie_word_embeddings=True,
        bos_token_id=2,
        eos_token_id=3,
        pad_token_id=0,
        dtype="float32",
    )


def flat(sizes: Sequence[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One float32 tensor of zeros, whose memory is touched, and its parts of so many elements each."""
    whole = torch.full((sum(sizes),), 0.0)
    return whole, list(torch.split(whole, list(sizes)))


class Policy:
    """Stands in for a trainer, of which a snapshot reads names and parameters.

    memory: float32 [size / 4], all parameters one after the other. size: in bytes.
    """

    def __init__(self, name: str) -> None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config_of(name))
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.memory, parts = flat([shape.numel() for shape in shapes.values()])
        self._parameters = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        self.size = self.memory.nbytes

    @property
    def causal_lm(self) -> Policy:
        """The model: itself."""
        return self

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters in model order, tied ones once."""
        return iter(self._parameters.items())

    @contextmanager
    def gathered(self, parameters: list[Any]) -> Iterator[None]:
        """They are whole."""
        yield

    def train(self, version: int) -> None:
        """Change every weight, as a training step does."""
        self.memory.uniform_(-0.1, 0.1, generator=torch.Generator().manual_seed(version))

    @property
    def sum(self) -> int:
        """What `sum_of` returns for the same weights."""
        return sum_of(self.memory)


def sum_of(memory: torch.Tensor) -> int:
    """The sum of float32 [n], n even, read as int64: equal for equal weights."""
    return int(memory.view(torch.int64).sum())
