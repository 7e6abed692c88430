"""Owns the comparison of the learner's log-probs with the engines', on tokens for which both used the same weights.

Must not decide which tokens those are, nor which difference is too large. Rounding alone separates the two there, so a
larger difference means that an engine holds other weights than it reports, or computes another distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from learner.algorithm.ratios import BINS, histogram, log_ratio, percentile

OFF = 0.01
"""A token is off if the ratio of its two probabilities differs from 1 by more than this."""
SUMS = ("tokens", "difference", "off")
NOT_COMPARED = -1
"""In place of a replica's index: a token that other weights have sampled, or a filler."""


class ReplicaDifference(NamedTuple):
    """The tokens of one replica that were compared, and the mean absolute difference of their log-probs (nats)."""

    tokens: int
    mean: float


class EngineComparison:
    """The differences of one rollout step, added up over micro-batches and ranks, by `replicas`: who sampled."""

    def __init__(self, replicas: Sequence[str]) -> None:
        self._replicas = tuple(replicas)
        self._sums = torch.zeros(len(self._replicas), len(SUMS), dtype=torch.float64)
        self._histogram = torch.zeros(BINS, dtype=torch.int64)

    @torch.no_grad()
    def add(self, logprobs: Tensor, behaviour: Tensor, replica: Tensor) -> None:
        """Add the tokens of a micro-batch.

        logprobs, behaviour: the learner's and the engines', [N], nats. replica: int64 [N], the index of the replica
        that sampled each token, or NOT_COMPARED. Tokens whose difference is not finite are left out: their optimizer
        step is skipped and reported.

        Example: two tokens of replica a, one with probability 0.5 on one side and 0.4 on the other; b has none:

        >>> comparison = EngineComparison(["a", "b"])
        >>> learner, engine = torch.tensor([0.5, 0.25, 0.9]).log(), torch.tensor([0.4, 0.25, 0.1]).log()
        >>> comparison.add(learner, engine, torch.tensor([0, 0, NOT_COMPARED]))
        >>> {name: round(value, 4) for name, value in comparison.metrics().items() if name != "logprob_difference_p99"}
        {'compared_tokens': 2.0, 'logprob_difference_mean': 0.1116, 'logprob_off_share': 0.5}
        >>> {name: round(found.mean, 4) for name, found in comparison.by_replica().items()}
        {'a': 0.1116}
        """
        learner, engine = logprobs.detach().double(), behaviour.double()
        counted = (replica != NOT_COMPARED) & (learner - engine).isfinite()
        gap = log_ratio(learner, engine)
        size, where = gap[counted].abs(), replica[counted]
        off = (torch.exp(gap[counted]) - 1).abs() > OFF
        columns = torch.stack([torch.ones_like(size), size, off.double()], dim=1)
        self._sums += torch.zeros_like(self._sums, device=gap.device).index_add(0, where, columns).cpu()
        self._histogram += histogram(size)

    def reduce(self, all_reduce: Callable[[Tensor], Tensor]) -> None:
        """Add the other ranks' tokens, with `all_reduce` of a CPU tensor, in place. Collective."""
        together = all_reduce(torch.cat([self._sums.flatten(), self._histogram.double()]))
        self._sums = together[: self._sums.numel()].reshape(self._sums.shape)
        self._histogram = together[self._sums.numel() :].long()

    def metrics(self) -> dict[str, float]:
        """The metrics of the rollout step. Without a compared token only their number, because nothing was measured."""
        tokens, difference, off = self._sums.sum(0).tolist()
        if not tokens:
            return {"compared_tokens": 0.0}
        return {
            "compared_tokens": tokens,
            "logprob_difference_mean": difference / tokens,
            "logprob_difference_p99": percentile(self._histogram, 0.99),
            "logprob_off_share": off / tokens,
        }

    def by_replica(self) -> dict[str, ReplicaDifference]:
        """The difference of each replica that sampled a compared token. Of several replicas ("") none is to blame."""
        rows = zip(self._replicas, self._sums.tolist(), strict=True)
        return {
            name: ReplicaDifference(int(tokens), total / tokens) for name, (tokens, total, _) in rows if name and tokens
        }
