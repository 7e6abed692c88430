"""Owns the policy network of the learner: rows of tokens in, log-probs of response tokens out.

Must not know ranks, optimizers or DeepSpeed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from learner.algorithm.logprobs import token_logprobs
from learner.training.minibatches import SHARED_ROW_TOKENS, MicroBatch, micro_batches
from learner.training.network.attention import NAME, Rows, RowsAttended, attend
from learner.training.network.float64 import keep_float64
from learner.training.network.loading import Place, load_network, whole
from learner.training.shares import PlannedSample
from services.streams.delivery.payloads import SamplePayload

log = logging.getLogger(__name__)

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
CPU = torch.device("cpu")
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.25}
"""The largest deviation of a log-prob (nats) that rounding can explain, by the dtype of the weights."""
PROBE_TOKENS = 5
"""The shortest prompt with which an architecture is tried."""
PROBED_WINDOW = 8192
"""The longest window with which it is tried, because the trial needs the logits of as many tokens."""


class LogprobHead(nn.Module):
    """The output layer of a causal LM, from hidden states to log-probs.

    It is one module around all chunks, so that ZeRO 3 gathers the weight once per call. The layer is held by reference,
    not as a submodule: the model owns its parameters.
    """

    def __init__(self, layer: Any, temperature: float, *, entropy_gradient: bool, dtype: torch.dtype | None) -> None:
        """`dtype`: that of the multiplication, None for the layer's own."""
        super().__init__()
        self._layer = (layer,)
        self._dtype = dtype
        self.temperature = temperature
        self.entropy_gradient = entropy_gradient

    @property
    def gathered(self) -> tuple[nn.Parameter, ...]:
        """The parameters that each call needs whole."""
        return tuple(self._layer[0].parameters())

    def forward(self, hidden: Tensor, targets: Tensor, nuclei: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `token_logprobs`; hidden [N, H], targets int64 [N], nuclei int32 [N, longest] or None."""
        head, temperature = self._logits(), self.temperature
        return token_logprobs(hidden, targets, head, temperature, entropy_gradient=self.entropy_gradient, nuclei=nuclei)

    def _logits(self) -> Callable[[Tensor], Tensor]:
        """The map from hidden states to logits. Called as a module, the layer would release its weight with each."""
        layer, dtype = self._layer[0], self._dtype
        if dtype is None:
            forward: Callable[[Tensor], Tensor] = layer.forward
            return forward
        # Converted once for all chunks: their gradients add up in `dtype`, and are rounded to the weight's dtype once.
        weight, bias = layer.weight.to(dtype), None if layer.bias is None else layer.bias.to(dtype)
        return lambda hidden: nn.functional.linear(hidden.to(dtype), weight, bias)


class PolicyOutput(NamedTuple):
    """The result of a forward pass for N response tokens, [N] each, in `token_dtype`: nats, and values or None."""

    logprobs: Tensor
    entropies: Tensor
    values: Tensor | None


class ValueHead(nn.Linear):
    """A linear head that predicts the reward of a response at each of its tokens. Without an update it predicts 0."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(width, 1, bias=False, dtype=dtype, device=device)
        nn.init.zeros_(self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """The values [N] of hidden states [N, H]: float64 if these are, else float32."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return nn.functional.linear(hidden.to(wide), self.weight.to(wide)).squeeze(-1)


class PolicyModel(nn.Module):
    """A Hugging Face causal LM whose forward pass returns the log-probs of tokens at a sampling temperature.

    `entropy_gradient`: whether entropies carry gradient, for an entropy bonus. `head_dtype`: that in which the logits
    are computed, None for that of the weights.
    """

    def __init__(
        self,
        causal_lm: Any,
        temperature: float,
        *,
        entropy_gradient: bool = False,
        head_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self._own_attention: str = causal_lm.config._attn_implementation
        self.temperature = temperature
        self.value_head: ValueHead | None = None
        layer = causal_lm.get_output_embeddings()
        self.head = LogprobHead(layer, temperature, entropy_gradient=entropy_gradient, dtype=head_dtype)

    @property
    def token_dtype(self) -> torch.dtype:
        """The dtype of log-probs, entropies and the loss: float64 if the weights are, else float32."""
        return torch.promote_types(next(self.parameters()).dtype, torch.float32)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        rows: Rows | None,
        source: Tensor,
        targets: Tensor,
        nuclei: Tensor | None = None,
    ) -> PolicyOutput:
        """Run the network. The arguments have the shapes of MicroBatch.

        The heads run on the N hidden states of `source` only.
        """
        self.attend(in_rows=rows is not None)
        dtype = next(self.parameters()).dtype
        given = {} if rows is None else {"rows": RowsAttended.of(rows, dtype, input_ids.device)}
        output = self.causal_lm.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **given)
        hidden = output.last_hidden_state
        wanted = hidden.reshape(-1, hidden.shape[-1]).index_select(0, source)
        logprobs, entropies = self.head(wanted, targets, nuclei)
        return PolicyOutput(logprobs, entropies, None if self.value_head is None else self.value_head(wanted))

    def attend(self, *, in_rows: bool) -> bool:
        """Choose the attention of the next passes, and of their repetition in backward passes.

        In rows that lie end to end, or within each row of a batch. Returns whether the architecture can.
        """
        return attend(self.causal_lm, NAME if in_rows else self._own_attention)

    def add_value_head(self, device: torch.device) -> None:
        """Return values too from now on."""
        layer = self.causal_lm.get_output_embeddings()
        self.value_head = ValueHead(layer.in_features, layer.weight.dtype, device)


def inputs(batch: MicroBatch) -> dict[str, Any]:
    """The arguments of PolicyModel.forward for a micro-batch."""
    return {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "rows": batch.rows,
        "source": batch.source,
        "targets": batch.targets,
        "nuclei": None if batch.nuclei is None else batch.nuclei.to(batch.targets.device),
    }


def load_policy(
    folder: Path,
    dtype: str,
    temperature: float,
    *,
    entropy_gradient: bool = False,
    activation_checkpointing: bool = False,
    head_dtype: str | None = None,
    device: torch.device = CPU,
    place: Place | None = None,
) -> PolicyModel:
    """Load a Hugging Face folder to `device`, without dropout, so that two passes over a token agree.

    `head_dtype`: as in `model.head_dtype`. `place` says what this process keeps of each parameter, by default all of
    it; collective if `place` is. With `activation_checkpointing`, each layer keeps only its input and runs again in the
    backward pass. Raises ValueError for an architecture that does not support it.
    """
    causal_lm = load_network(folder, DTYPES[dtype], device, place or whole(device))
    _switch_off_dropout(causal_lm)
    if dtype == "float64":
        keep_float64(causal_lm)
    causal_lm.config.use_cache = False
    if activation_checkpointing:
        _checkpoint_activations(causal_lm)
    wide = None if head_dtype is None else torch.promote_types(DTYPES[dtype], DTYPES[head_dtype])
    return PolicyModel(causal_lm, temperature, entropy_gradient=entropy_gradient, head_dtype=wide)


def _switch_off_dropout(causal_lm: Any) -> None:
    for module in causal_lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # Many layers store a rate (attention_dropout, dropout, layerdrop) and call the dropout function themselves.
        rates = [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
        for name in rates:
            setattr(module, name, 0.0)


def _checkpoint_activations(causal_lm: Any) -> None:
    if not causal_lm.supports_gradient_checkpointing:
        raise ValueError(
            f"learner.activation_checkpointing: true is not valid for {type(causal_lm).__name__}, "
            "which does not support it: expected false"
        )
    # Reentrant checkpointing loses gradients if no input requires one, as with token ids.
    causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # Layers checkpoint only in training mode. Without dropout, the mode has no other effect.
    causal_lm.train()


@torch.no_grad()
def can_share_prompts(policy: PolicyModel) -> bool:
    """Whether this architecture gives a response the same log-probs in rows end to end as in a row of its own.

    Recurrent models do not, nor those whose attention is not that of transformers' interface. Raises ValueError if even
    padded rows differ from the model's own logits: then its head is more than a matrix product, and training would be
    wrong. At ZeRO stage 3 it is collective, and needs the policy's engine, which gathers parameters.
    """
    deviations = dict.fromkeys((False, True), 0.0)
    window = _window(policy.causal_lm.config)
    probed = {PROBE_TOKENS, PROBE_TOKENS + window} if window <= PROBED_WINDOW else {PROBE_TOKENS}
    for tokens in sorted(probed):
        for shared, deviation in _deviations(policy, tokens).items():
            deviations[shared] = max(deviations[shared], deviation)
    if window > PROBED_WINDOW:
        log.info("responses do not share prompt rows: a window of %d tokens is too long to be tried", window)
        deviations[True] = math.inf
    tolerance = TOLERANCE[next(policy.parameters()).dtype]
    if not deviations[False] <= tolerance:
        name = type(policy.causal_lm).__name__
        raise ValueError(
            f"model: {name} is not valid: "
            "expected a causal LM whose logits are a linear head on its last hidden state; "
            f"log-probs differ from its own logits by {deviations[False]:.3g}"
        )
    if not deviations[True] <= tolerance:
        log.info("responses do not share prompt rows: log-probs would differ by %.3g nats", deviations[True])
    return deviations[True] <= tolerance


def _deviations(policy: PolicyModel, tokens: int) -> dict[bool, float]:
    """The largest deviation from the model's own log-probs, in nats, of padded rows and of rows end to end.

    Two responses have one prompt of `tokens` tokens, and another has a short one.
    """
    vocabulary = policy.causal_lm.get_input_embeddings().num_embeddings
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, vocabulary, size, dtype=np.int32) for size in (tokens, PROBE_TOKENS - 1)]
    answers = [draw.integers(0, vocabulary, size, dtype=np.int32) for size in (3, 4, 6)]
    pairs = [(prompts[0], answers[0]), (prompts[0], answers[1]), (prompts[1], answers[2])]
    expected = torch.cat([_reference(policy, *pair) for pair in pairs])
    payloads = {
        str(index): SamplePayload(prompt, answer, np.zeros(len(answer), np.float32), "", "stop", ())
        for index, (prompt, answer) in enumerate(pairs)
    }
    share = [PlannedSample(key, "g", len(payload.response_ids), 1.0, 1.0) for key, payload in payloads.items()]
    budget, device = 4 * max(SHARED_ROW_TOKENS, tokens), next(policy.parameters()).device
    deviations = {False: math.inf, True: math.inf}
    for shared in (False, True)[: 1 + policy.attend(in_rows=True)]:
        batches = micro_batches(share, payloads, budget, share_prompts=shared)
        found = [policy(**inputs(batch.to(device, policy.token_dtype)))[0] for batch in batches]
        # Rows are sorted by length, so both layouts are brought into one order before the comparison.
        deviations[shared] = float((torch.cat(found).sort().values - expected.sort().values).abs().max())
    return deviations


def _window(config: Any) -> int:
    """The tokens that a layer attends to at most; 0 if that limits nothing."""
    longest = getattr(config, "max_position_embeddings", None) or math.inf
    windows = [getattr(config, name, None) or 0 for name in ("sliding_window", "attention_chunk_size")]
    return max((window for window in windows if window < longest), default=0)


def _reference(policy: PolicyModel, prompt: np.ndarray, answer: np.ndarray) -> Tensor:
    policy.attend(in_rows=False)
    device = next(policy.parameters()).device
    ids = torch.from_numpy(np.concatenate([prompt, answer]).astype(np.int64)).unsqueeze(0).to(device)
    logits = policy.causal_lm(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].to(policy.token_dtype)
    logprobs = torch.log_softmax(logits / policy.temperature, -1)
    return logprobs.gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)
