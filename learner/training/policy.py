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
from learner.training.float64 import keep_float64
from learner.training.minibatches import MicroBatch, PlannedSample, micro_batches
from services.streams.delivery.payloads import SamplePayload

log = logging.getLogger(__name__)

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Largest deviation in log-prob (nats) that rounding explains, by dtype of the weights."""


class PolicyModel(nn.Module):
    """A Hugging Face causal LM whose forward pass ends in per-token log-probs, at a sampling temperature.

    `entropy_gradient`: whether entropies carry gradient, for a bonus; it costs a second [tokens, vocabulary] per chunk.
    """

    def __init__(self, causal_lm: Any, temperature: float, *, entropy_gradient: bool = False) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.temperature = temperature
        self.entropy_gradient = entropy_gradient

    @property
    def token_dtype(self) -> torch.dtype:
        """Of log-probs, entropies and the loss: float64 where the weights are, else float32."""
        return torch.promote_types(next(self.parameters()).dtype, torch.float32)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None, source: Tensor, targets: Tensor,
        chunks: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Shapes as in MicroBatch; (log-probs, entropies), [N] in `token_dtype`. Only N hidden states meet the head."""
        output = self.causal_lm.base_model(
            input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask, use_cache=False
        )
        hidden = output.last_hidden_state
        wanted = hidden.reshape(-1, hidden.shape[-1]).index_select(0, source)
        return token_logprobs(
            wanted, targets, self.causal_lm.get_output_embeddings(), self.temperature, chunks,
            entropy_gradient=self.entropy_gradient,
        )  # fmt: skip


def inputs(one: MicroBatch) -> dict[str, Any]:
    """What PolicyModel.forward takes of a micro-batch."""
    return {
        "input_ids": one.input_ids, "position_ids": one.position_ids, "attention_mask": one.attention_mask,
        "source": one.source, "targets": one.targets, "chunks": one.chunks,
    }  # fmt: skip


def load_policy(
    folder: Path, dtype: str, temperature: float, *, entropy_gradient: bool = False,
    activation_checkpointing: bool = False,
) -> PolicyModel:  # fmt: skip
    """Load a Hugging Face folder on the CPU, without dropout, so that two passes over a token agree.

    With `activation_checkpointing` each layer keeps only its input and runs again in the backward pass. Raises
    ValueError for an architecture that cannot.
    """
    causal_lm = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], attn_implementation="sdpa")
    _switch_off_dropout(causal_lm)
    if dtype == "float64":
        keep_float64(causal_lm)
    causal_lm.config.use_cache = False
    if activation_checkpointing:
        _checkpoint_activations(causal_lm)
    return PolicyModel(causal_lm, temperature, entropy_gradient=entropy_gradient)


def _switch_off_dropout(causal_lm: Any) -> None:
    for module in causal_lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # Many layers keep a rate (attention_dropout, dropout, layerdrop) and call the function themselves.
        rates = [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
        for name in rates:
            setattr(module, name, 0.0)


def _checkpoint_activations(causal_lm: Any) -> None:
    if not causal_lm.supports_gradient_checkpointing:
        raise ValueError(
            f"learner.activation_checkpointing: true is not accepted for {type(causal_lm).__name__}, "
            "which does not support it; false is"
        )
    # The reentrant kind loses gradients where no input requires one, as with token ids.
    causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # Layers checkpoint only in training mode; without dropout it changes nothing else.
    causal_lm.train()


@torch.no_grad()
def can_share_prompts(policy: PolicyModel) -> bool:
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


def _reference(policy: PolicyModel, prompt: np.ndarray, answer: np.ndarray) -> Tensor:
    ids = torch.from_numpy(np.concatenate([prompt, answer]).astype(np.int64)).unsqueeze(0)
    logits = policy.causal_lm(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].to(policy.token_dtype)
    logprobs = torch.log_softmax(logits / policy.temperature, -1)
    return logprobs.gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)
