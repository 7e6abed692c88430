"""Owns the loss as the papers write it: whole logits, log_softmax, one response at a time, means of means.

Must not import the learner, whose gradient is compared with it, or be used outside tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from services.contracts import BatchGroup
from services.settings import AlgorithmSettings, Recipe
from services.streams.delivery.payloads import SamplePayload

Proximal = Callable[[SamplePayload, Tensor], Tensor]
"""(payload, the policy's log-probs [n] without gradient) -> the proximal log-probs [n]."""

PerToken = dict[str, tuple[Tensor, Tensor]]
"""By payload key: (log-probs, entropies) of the n tokens of a response, [n] each."""


def load(folder: Path) -> Any:
    """Load the policy in `folder` in float64 throughout. The norm of Hugging Face, which rounds, is replaced."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, LlamaRMSNorm):
                norm = torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)
    return model


def own(payload: SamplePayload, current: Tensor) -> Tensor:
    """The current policy is the proximal one, as in the first optimizer step of a rollout step."""
    return current


def behaviour(payload: SamplePayload, current: Tensor) -> Tensor:
    """The log-probs with which the response was sampled."""
    return torch.from_numpy(payload.behaviour_logprobs).to(current.dtype)


def response(model: Any, payload: SamplePayload, temperature: float) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) of the n tokens of a response, [n] each: of its nuclei alone, if it has any."""
    prompt, answer = (torch.from_numpy(part.astype("int64")) for part in (payload.prompt_ids, payload.response_ids))
    logits = model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
    if payload.nuclei is not None:
        bounds = zip(payload.nuclei.offsets, payload.nuclei.offsets[1:], strict=False)
        found = [
            _of_nucleus(row / temperature, token, torch.from_numpy(payload.nuclei.ids[start:end].astype("int64")))
            for row, token, (start, end) in zip(logits, answer, bounds, strict=True)
        ]
        return torch.stack([logprob for logprob, _ in found]), torch.stack([entropy for _, entropy in found])
    distribution = torch.log_softmax(logits / temperature, -1)
    return distribution.gather(-1, answer[:, None])[:, 0], -(distribution.exp() * distribution).sum(-1)


def _of_nucleus(logits: Tensor, token: Tensor, nucleus: Tensor) -> tuple[Tensor, Tensor]:
    """p(token) / sum of p over the nucleus, and the entropy of that distribution."""
    probabilities = torch.softmax(logits, -1)
    inside = probabilities[nucleus]
    shares = inside / inside.sum()
    return torch.log(probabilities[token] / inside.sum()), -(shares * shares.log()).sum()


def _importance_weight(name: str, importance: Tensor, algorithm: AlgorithmSettings) -> Tensor:
    cap, low, high = algorithm.correction_cap, algorithm.icepop_low, algorithm.icepop_high
    weights = {
        "none": torch.ones_like(importance),
        "importance": importance,
        "truncated_is": importance.clamp(max=cap),
        "truncated_is_sequence": torch.ones_like(importance) * min(float(importance.prod()), cap),
        "icepop": torch.where((importance >= low) & (importance <= high), importance, 0.0),
    }
    return weights[name]


def _ratio(logprobs: Tensor, before: Tensor, name: str) -> Tensor:
    """The ratio of each token of a response: its own, or the geometric mean of all (GSPO Eq. 7, GSPO-token Eq. 14)."""
    own = torch.exp(logprobs - before)
    whole = own.prod() ** (1 / len(own)) * torch.ones_like(own)
    ratios = {"token": own, "sequence": whole, "sequence_token": whole.detach() * own / own.detach()}
    return ratios[name]


def _objective(logprobs: Tensor, ratio: Tensor, advantage: float, algorithm: AlgorithmSettings) -> Tensor:
    clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    if algorithm.clipping == "cispo":
        return clipped.detach() * advantage * logprobs
    found = torch.minimum(ratio * advantage, clipped * advantage)
    if algorithm.dual_clip is not None and advantage < 0:
        found = found.clamp(min=algorithm.dual_clip * advantage)
    return found


def _mean(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).mean()


def _reduce(name: str, groups: list[list[Tensor]], longest: int) -> Tensor:
    samples = [response for group in groups for response in group]
    reductions: dict[str, Callable[[], Tensor]] = {
        "token": lambda: torch.cat(samples).mean(),
        "group_token": lambda: _mean([torch.cat(group).mean() for group in groups]),
        "sample": lambda: _mean([response.mean() for response in samples]),
        "sequence_sum": lambda: _mean([response.sum() for response in samples]),
        "constant_length": lambda: _mean([response.sum() / longest for response in samples]),
    }
    return reductions[name]()


def evaluated(
    model: Any, groups: Sequence[BatchGroup], payloads: dict[str, SamplePayload], temperature: float
) -> PerToken:
    """The log-probs and entropies of every response that counts, according to `model`."""
    return {
        sample.payload: response(model, payloads[sample.payload], temperature)
        for group in groups
        for sample in group.samples
        if not sample.masked and sample.tokens
    }


def terms(
    policy: PerToken,
    groups: Sequence[BatchGroup],
    payloads: dict[str, SamplePayload],
    recipe: Recipe,
    proximal: Proximal,
    reference: PerToken | None = None,
) -> list[list[Tensor]]:
    """The term of each token before any mean: [n] per response that counts, in a list per group."""
    algorithm = recipe.algorithm
    counted = []
    for group in groups:
        worth = []
        for sample in group.samples:
            if sample.payload not in policy:
                continue
            payload = payloads[sample.payload]
            logprobs, entropy = policy[sample.payload]
            before = proximal(payload, logprobs.detach())
            importance = torch.exp(before - behaviour(payload, before))
            weight = _importance_weight(recipe.correction, importance, algorithm)
            ratio = _ratio(logprobs, before, algorithm.ratio)
            gain = weight * _objective(logprobs, ratio, sample.advantage, algorithm)
            if reference is not None:
                gap = reference[sample.payload][0].detach() - logprobs
                gain = gain - algorithm.kl_coefficient * (torch.exp(gap) - gap - 1)
            worth.append(gain + algorithm.entropy_coefficient * entropy)
        counted += [worth] if worth else []
    return counted


def reduced(worth: list[list[Tensor]], recipe: Recipe) -> Tensor:
    """Reduce the result of `terms` to a scalar, as the recipe says."""
    longest = recipe.algorithm.constant_length or recipe.rollout.max_new_tokens
    return _reduce(recipe.algorithm.reduction, worth, longest)


def loss(
    model: Any,
    groups: Sequence[BatchGroup],
    payloads: dict[str, SamplePayload],
    recipe: Recipe,
    proximal: Proximal,
    reference: Any = None,
) -> Tensor:
    """The scalar that one optimizer step minimises over `groups` (DAPO Eq. 8, as modified by each setting)."""
    temperature = recipe.rollout.temperature
    policy = evaluated(model, groups, payloads, temperature)
    anchor = None
    if reference is not None:
        with torch.no_grad():
            anchor = evaluated(reference, groups, payloads, temperature)
    return -reduced(terms(policy, groups, payloads, recipe, proximal, anchor), recipe)
