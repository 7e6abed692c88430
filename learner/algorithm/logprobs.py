"""Owns the step from hidden states to per-token log-probs and entropies, in bounded memory.

Must not hold [tokens, vocabulary] for more than one chunk, neither forward nor backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 256
"""Tokens whose logits exist at once. A number of tokens, not of bytes: logits of 256 tokens take less than the head's
own gradient wherever hidden states are wider than 256, whatever the vocabulary."""


def _of_chunk(
    hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor], temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    logits = head(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    normaliser = torch.logsumexp(logits, dim=-1)
    chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - normaliser
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # H = log Z - E[logit], without a second [tokens, vocabulary] of log-probs.
        entropy = normaliser - (torch.softmax(logits, dim=-1) * logits).sum(-1)
    return chosen, entropy


def chunks_for(tokens: int) -> int:
    """How many chunks keep each at CHUNK_TOKENS or fewer; at least one."""
    return max(1, -(-tokens // CHUNK_TOKENS))


def token_logprobs(
    hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor], temperature: float = 1.0,
    chunks: int | None = None, *, entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Log-probability of each target and entropy of its distribution, softmax(head(hidden) / temperature).

    hidden [N, H]; targets [N] int64; head maps [n, H] to logits [n, vocabulary]. Returns two [N], natural logarithms:
    float64 where the logits are, else float32; the first with gradient, the second only with `entropy_gradient`.
    A chunk's logits are computed again in the backward pass. `chunks` fixes how often `head` is called, also with no
    rows: where weights are partitioned over ranks (ZeRO-3) each call is a collective, and every rank must make as many.
    """
    chunks = chunks or chunks_for(targets.numel())
    parts = []
    for rows, wanted in zip(hidden.tensor_split(chunks), targets.tensor_split(chunks), strict=True):
        if torch.is_grad_enabled():
            parts.append(checkpoint(_of_chunk, rows, wanted, head, temperature, entropy_gradient, use_reentrant=False))
        else:
            parts.append(_of_chunk(rows, wanted, head, temperature, entropy_gradient))
    return torch.cat([chosen for chosen, _ in parts]), torch.cat([entropy for _, entropy in parts])
