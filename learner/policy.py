"""Owns the policy network as the learner sees it: rows of tokens in, log-probs of response tokens out.

Must not know ranks, optimizers or DeepSpeed.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from learner.algorithm.logprobs import token_logprobs
from learner.batches import MicroBatch, PlannedSample, micro_batches
from services.streams.payloads import SamplePayload

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Largest deviation in log-prob (nats) that rounding explains, by dtype of the weights."""


class Policy(nn.Module):
    """A Hugging Face causal LM whose forward pass ends in per-token log-probs, at a sampling temperature."""

    def __init__(self, causal_lm: Any, temperature: float) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.temperature = temperature

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None, source: Tensor, targets: Tensor,
        chunks: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Shapes as in MicroBatch; (log-probs, entropies), float32 [N] each. Only N hidden states meet the head."""
        output = self.causal_lm.base_model(
            input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask, use_cache=False
        )
        hidden = output.last_hidden_state
        wanted = hidden.reshape(-1, hidden.shape[-1]).index_select(0, source)
        return token_logprobs(wanted, targets, self.causal_lm.get_output_embeddings(), self.temperature, chunks)


def inputs(one: MicroBatch) -> dict[str, Any]:
    """What Policy.forward takes of a micro-batch."""
    return {
        "input_ids": one.input_ids, "position_ids": one.position_ids, "attention_mask": one.attention_mask,
        "source": one.source, "targets": one.targets, "chunks": one.chunks,
    }  # fmt: skip


def load_policy(folder: Path, dtype: str, temperature: float) -> Policy:
    """Load a Hugging Face folder on the CPU, without dropout, so that two passes over a token agree."""
    causal_lm = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], attn_implementation="sdpa")
    for module in causal_lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    causal_lm.config.use_cache = False
    return Policy(causal_lm, temperature)


@torch.no_grad()
def can_share_prompts(policy: Policy) -> bool:
    """Whether this architecture gives a response the same log-probs in a shared row as alone.

    Recurrent and sliding-window models do not. Raises ValueError if even plain rows differ from the model's own
    logits: then its head does more than a matrix product, and training would be wrong.
    """
    vocabulary = policy.causal_lm.get_input_embeddings().num_embeddings
    draw = np.random.default_rng(0)
    prompt = draw.integers(0, vocabulary, 5, dtype=np.int32)
    answers = [draw.integers(0, vocabulary, size, dtype=np.int32) for size in (3, 4)]
    expected = torch.cat([_reference(policy, prompt, answer) for answer in answers])
    payloads = {
        str(index): SamplePayload(prompt, answer, np.zeros(len(answer), np.float32), "", "stop", ())
        for index, answer in enumerate(answers)
    }
    share = [PlannedSample(key, "g", len(payload.response_ids), 1.0, 1.0) for key, payload in payloads.items()]
    deviations = {}
    for shared in (False, True):
        found = [policy(**inputs(one))[0] for one in micro_batches(share, payloads, 64, share_prompts=shared)]
        # Plain rows come longest first; put both layouts into one order before they are compared.
        deviations[shared] = float((torch.cat(found).sort().values - expected.sort().values).abs().max())
    tolerance = TOLERANCE[next(policy.parameters()).dtype]
    if not deviations[False] <= tolerance:
        name = type(policy.causal_lm).__name__
        raise ValueError(
            f"model: {name} is not accepted (log-probs differ from its own logits by {deviations[False]:.3g}); "
            "a causal LM whose logits are a linear head on its last hidden state is"
        )
    if not deviations[True] <= tolerance:
        log.info("responses do not share prompts: log-probs would differ by %.3g", deviations[True])
    return deviations[True] <= tolerance


def _reference(policy: Policy, prompt: np.ndarray, answer: np.ndarray) -> Tensor:
    ids = torch.from_numpy(np.concatenate([prompt, answer]).astype(np.int64)).unsqueeze(0)
    logits = policy.causal_lm(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    logprobs = torch.log_softmax(logits / policy.temperature, -1)
    return logprobs.gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)
