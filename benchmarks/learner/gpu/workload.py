"""Owns what the benchmark trains: Qwen2.5's shapes with random weights, and rollout steps of random tokens.

Must not measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from services.contracts import Batch, BatchGroup, BatchSample
from services.settings import Recipe, parse_recipe
from services.streams.delivery.payloads import SamplePayload
from tests.harness.batches import batch_with


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen2 model with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    intermediate: int
    vocabulary: int

    @property
    def config(self) -> Qwen2Config:
        """The configuration in transformers."""
        return Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            max_position_embeddings=32768,
            tie_word_embeddings=True,
            dtype="bfloat16",
        )

    def reduced(self, layers: int | None, hidden: int | None, vocabulary: int | None) -> Shape:
        """With fewer layers, narrower ones or fewer words; None keeps a size."""
        found = replace(self, layers=layers or self.layers, vocabulary=vocabulary or self.vocabulary)
        if hidden is None:
            return found
        heads = max(1, hidden // (self.hidden // self.heads))
        return replace(
            found,
            hidden=hidden,
            heads=heads,
            key_value_heads=min(heads, self.key_value_heads),
            intermediate=self.intermediate * hidden // self.hidden,
        )


SHAPES = {
    "0.5b": Shape(896, 24, 14, 2, 4864, 151_936),
    "1.5b": Shape(1536, 28, 12, 2, 8960, 151_936),
}
"""From config.json of huggingface.co/Qwen/Qwen2.5-0.5B and of Qwen2.5-1.5B."""


@dataclass(frozen=True)
class Load:
    """A rollout step of one optimizer step: groups of responses, tokens of each prompt and of each response."""

    groups: int
    size: int
    prompt: int
    response: int

    @property
    def rows(self) -> int:
        """The number of responses."""
        return self.groups * self.size

    @property
    def row_tokens(self) -> int:
        """The input tokens of a response with its prompt; the last token predicts nothing."""
        return self.prompt + self.response - 1


def write_model(folder: Path, shape: Shape, device: torch.device) -> Path:
    """Create the model with random weights on `device`, and write it to `folder`. Drawing on the CPU takes minutes."""
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(shape.config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return folder


def recipe(folder: Path, load: Load, *, stage: int, micro_batch_tokens: int, checkpointing: bool) -> Recipe:
    """The recipe of a learner in bfloat16 with one rank."""
    return parse_recipe(
        {
            "name": "bench-gpu",
            "model": {"path": str(folder), "max_model_len": load.prompt + load.response},
            "rollout": {"max_new_tokens": load.response},
            "algorithm": {"group_size": load.size},
            "learner": {
                "dtype": "bfloat16",
                "zero_stage": stage,
                "micro_batch_tokens": micro_batch_tokens,
                "mini_batch_groups": load.groups,
                "activation_checkpointing": checkpointing,
                "threads": torch.get_num_threads(),
            },
            "limits": {"rollout_steps": 1, "groups_per_step": load.groups, "max_inflight_groups": 2 * load.groups},
        }
    )


def rollout_step(load: Load, vocabulary: int) -> tuple[Batch, dict[str, SamplePayload]]:
    """Random tokens, with random advantages."""
    return drawn_step([[load.response] * load.size] * load.groups, load.prompt, vocabulary)


def drawn_step(
    lengths: Sequence[Sequence[int]], prompt_tokens: int, vocabulary: int, seed: int = 0
) -> tuple[Batch, dict[str, SamplePayload]]:
    """Groups of random responses of these `lengths` (tokens), with random prompts and advantages."""
    draw, payloads, groups = np.random.default_rng(seed), {}, []
    for group, members in enumerate(lengths):
        prompt, samples = draw.integers(0, vocabulary, prompt_tokens, dtype=np.int32), []
        for index, tokens in enumerate(members):
            key = f"{group}:{index}"
            ids = draw.integers(0, vocabulary, tokens, dtype=np.int32)
            behaviour = np.full(tokens, -np.log(vocabulary), np.float32)
            payloads[key] = SamplePayload(prompt, ids, behaviour, "", "length", ())
            samples.append(
                BatchSample(
                    payload=key,
                    tokens=tokens,
                    advantage=float(draw.normal()),
                    reward=1.0,
                    correct=True,
                    masked=False,
                    staleness=0,
                )
            )
        groups.append(BatchGroup(group=f"g{group}", samples=tuple(samples), prompt_tokens=prompt_tokens))
    return batch_with(groups), payloads
