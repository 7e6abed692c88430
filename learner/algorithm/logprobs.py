"""Owns the step from hidden states to the log-probs and entropies of tokens, in bounded memory.

Must not hold [tokens, vocabulary] for more than one chunk, in the forward or the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 256
"""Tokens whose logits exist at the same time. Counted in tokens, not in bytes: the logits of 256 tokens take less
memory than the gradient of the head if hidden states are wider than 256, for any vocabulary."""


def _of_chunk(
    hidden: Tensor,
    targets: Tensor,
    head: Callable[[Tensor], Tensor],
    temperature: float,
    entropy_gradient: bool,
    nuclei: Tensor | None,
) -> tuple[Tensor, Tensor]:
    logits = head(hidden)
    if nuclei is not None:
        targets = (nuclei == targets.unsqueeze(-1)).int().argmax(-1)
        logits = logits.gather(-1, nuclei.clamp(min=0).long())
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    inside = logits if nuclei is None else logits.masked_fill(nuclei < 0, -torch.inf)
    normaliser = torch.logsumexp(inside, dim=-1)
    chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - normaliser
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # H = log Z - E[logit], without a second [tokens, vocabulary] of log-probs. Padding has probability 0, and its
        # finite logits are multiplied, because 0 x -inf has no value.
        entropy = normaliser - (torch.softmax(inside, dim=-1) * logits).sum(-1)
    return chosen, entropy


def token_logprobs(
    hidden: Tensor,
    targets: Tensor,
    head: Callable[[Tensor], Tensor],
    temperature: float = 1.0,
    *,
    entropy_gradient: bool = False,
    nuclei: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The log-prob of each target and the entropy of its distribution, softmax(head(hidden) / temperature).

    hidden: [N, H]. targets: int64 [N]. head: maps [n, H] to logits [n, vocabulary].
    Returns two tensors [N] in nats, float64 if the logits are, else float32. The log-probs carry gradient; the
    entropies do only with `entropy_gradient`. `head` is called for at most CHUNK_TOKENS rows at a time, and in the
    backward pass again.

    `nuclei`: int32 [N, longest], the tokens that each target was drawn from, itself among them, padded with -1. The
    distributions are then renormalised to them. None: the whole vocabulary.

    Example: the logits 0 and ln 3 of two words. At temperature 1 their probabilities are 1/4 and 3/4, and the entropy
    is (1/4) ln 4 + (3/4) ln (4/3) = 0.5623. At temperature 0.5 the logits become 0 and ln 9, so the second word
    has probability 9/10:

    >>> hidden = torch.tensor([[0.0, 3.0], [0.0, 3.0]])
    >>> hidden[:, 1] = hidden[:, 1].log()
    >>> logprobs, entropies = token_logprobs(hidden, torch.tensor([0, 1]), head=torch.nn.Identity())
    >>> logprobs.exp(), entropies
    (tensor([0.2500, 0.7500]), tensor([0.5623, 0.5623]))
    >>> cooler, _ = token_logprobs(hidden, torch.tensor([0, 1]), head=torch.nn.Identity(), temperature=0.5)
    >>> cooler.exp()
    tensor([0.1000, 0.9000])
    """
    rows = zip(torch.split(hidden, CHUNK_TOKENS), torch.split(targets, CHUNK_TOKENS), strict=True)
    within = repeat(None) if nuclei is None else torch.split(nuclei, CHUNK_TOKENS)
    parts = []
    for (states, wanted), part in zip(rows, within, strict=False):
        arguments = (states, wanted, head, temperature, entropy_gradient, part)
        if torch.is_grad_enabled():
            parts.append(checkpoint(_of_chunk, *arguments, use_reentrant=False))
        else:
            parts.append(_of_chunk(*arguments))
    return torch.cat([chosen for chosen, _ in parts]), torch.cat([entropy for _, entropy in parts])
