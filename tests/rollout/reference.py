"""Owns the rollout tests' reference: Hugging Face transformers' log-probs of the same tokens.

Must not be used outside tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

from rollout.engine import Generation
from services.streams.delivery.nucleus import Nuclei
from tests.harness.tiny_model import write_tiny_model

ROUNDING = 3e-4
"""Nats. In float32 a log-prob of this model differs from its float64 value by up to 4e-5, on 2,000 tokens with AVX-512,
with AVX2 and without either. Engine and reference may each differ by that much; the rest is margin."""


class Policy:
    """One version's weights, as the learner publishes them and as transformers evaluates them."""

    def __init__(self, folder: Path, *, tied: bool, seed: int) -> None:
        self.folder = folder
        self.model = LlamaForCausalLM.from_pretrained(
            write_tiny_model(folder, tied=tied, seed=seed, scale=0.2), dtype=torch.float32
        ).eval()

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The weights by Hugging Face name, in model order, without a tied head."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def logprobs(
        self, prompt: list[int], response: NDArray[np.int32], nuclei: Nuclei | None = None
    ) -> NDArray[np.float32]:
        """log p(token) at temperature 1 for every response token; among its nucleus, if it was drawn from one."""
        ids = torch.tensor([[*prompt, *response.tolist()]])
        with torch.no_grad():
            logits = self.model(ids).logits[0, len(prompt) - 1 : -1]
        if nuclei is not None:
            outside = torch.ones_like(logits, dtype=torch.bool)
            position = np.repeat(np.arange(len(response)), np.diff(nuclei.offsets))
            outside[torch.from_numpy(position), torch.from_numpy(nuclei.ids).long()] = False
            logits = logits.masked_fill(outside, -torch.inf)
        rows = torch.log_softmax(logits, -1)
        found: NDArray[np.float32] = rows.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
        return found


def assert_written_by(policies: dict[int, Policy], prompt: list[int], generation: Generation) -> None:
    """Assert that every span's log-probs are those of its version, except for rounding."""
    for span in generation.spans:
        whole = policies[span.version].logprobs(prompt, generation.response_ids, generation.nuclei)
        expected = whole[span.start : span.end]
        found = generation.behaviour_logprobs[span.start : span.end]
        np.testing.assert_allclose(found, expected, atol=ROUNDING, rtol=0, err_msg=f"span {span}")
