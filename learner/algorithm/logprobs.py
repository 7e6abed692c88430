"""Owns the step from hidden states to the log-probs and entropies of tokens, in bounded memory.

Must not hold [tokens, vocabulary] for more than one chunk, in the forward or the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 512
"""Tokens whose logits exist at the same time. Counted in tokens, not in bytes: the logits of 512 tokens take less
memory than the gradient of the head if hidden states are wider than 512, for any vocabulary."""

BLOCK = {"cpu": 1 << 18, "cuda": 1 << 23}
"""Logits that are turned into probabilities at once: on a CPU as many as its caches hold, on a GPU enough to keep it
busy. It has no effect on the result."""


class _Distribution(torch.autograd.Function):
    """The log-prob of each target and the entropy of each row, in the memory of the logits.

    Autograd's own operations would each read and write [tokens, vocabulary], about twenty times in both passes. Here
    the logits are overwritten by the probabilities, a block of rows at a time, and these by the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        chosen, entropy = logits.new_empty(len(logits)), logits.new_empty(len(logits))
        keep = ctx.needs_input_grad[0]
        for part, terms in _blocks(logits):
            scores = logits[part].div_(temperature)
            scores.sub_(scores.amax(-1, keepdim=True)).clamp_(min=torch.finfo(scores.dtype).min)
            torch.exp(scores, out=terms)
            total = terms.sum(-1)
            normaliser = total.log()
            chosen[part] = scores.gather(-1, targets[part].unsqueeze(-1)).squeeze(-1) - normaliser
            # H = log Z - E[score]. Padding has the lowest finite score, because 0 x -inf has no value.
            entropy[part] = normaliser - scores.mul_(terms).sum(-1) / total
            if keep:
                torch.div(terms, total.unsqueeze(-1), out=scores)
        ctx.temperature, ctx.entropy_gradient = temperature, entropy_gradient
        if keep:
            ctx.save_for_backward(logits, targets, entropy)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """With p the probabilities, d chosen / d z = onehot - p and d entropy / d z = -p (log p + entropy)."""
        gradient, targets, entropy = ctx.saved_tensors
        of_chosen, of_entropy = (given / ctx.temperature for given in gradients)
        factor = of_chosen + of_entropy * entropy if ctx.entropy_gradient else of_chosen
        for part, terms in _blocks(gradient):
            shares = gradient[part]
            if ctx.entropy_gradient:
                torch.xlogy(shares, shares, out=terms).mul_(of_entropy[part].unsqueeze(-1))
            shares.mul_(factor[part].neg().unsqueeze(-1))
            if ctx.entropy_gradient:
                shares.sub_(terms)
        gradient.scatter_add_(-1, targets.unsqueeze(-1), of_chosen.unsqueeze(-1))
        return gradient, None, None, None


def _blocks(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Cut [N, vocabulary] into blocks of rows, each with memory of its size that the caller may overwrite."""
    rows = max(1, BLOCK.get(logits.device.type, BLOCK["cuda"]) // max(1, logits.shape[-1]))
    memory = torch.empty_like(logits[:rows])
    for start in range(0, len(logits), rows):
        part = slice(start, min(start + rows, len(logits)))
        yield part, memory[: part.stop - start]


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
        logits = logits.gather(-1, nuclei.clamp(min=0).long()).masked_fill(nuclei < 0, -torch.inf)
    elif logits.untyped_storage().data_ptr() == hidden.untyped_storage().data_ptr():
        logits = logits.clone()  # they are the caller's, and must not be overwritten
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    chosen, entropy = _Distribution.apply(logits, targets, temperature, entropy_gradient)  # type: ignore[no-untyped-call]
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
    backward pass again for all chunks but the last, whose probabilities are kept: the backward pass starts with them.
    `head` must not keep its result for its own backward pass, as a matrix product does not.

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
    within = repeat(None) if nuclei is None else torch.split(nuclei, CHUNK_TOKENS)
    chunks = list(zip(torch.split(hidden, CHUNK_TOKENS), torch.split(targets, CHUNK_TOKENS), within, strict=False))
    parts = []
    for number, (states, wanted, part) in enumerate(chunks, start=1):
        arguments = (states, wanted, head, temperature, entropy_gradient, part)
        if torch.is_grad_enabled() and number < len(chunks):
            parts.append(checkpoint(_of_chunk, *arguments, use_reentrant=False))
        else:
            parts.append(_of_chunk(*arguments))
    return torch.cat([chosen for chosen, _ in parts]), torch.cat([entropy for _, entropy in parts])
