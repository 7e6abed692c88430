"""Owns the advantages of responses: a table of estimators over one group's rewards.

Must not clip, mask or normalise across groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean

STD_FLOOR = 1e-6  # added to the standard deviation, as in the published code (verl)


def _centred(rewards: Sequence[float]) -> list[float]:
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def _scaled(rewards: Sequence[float], degrees: int) -> list[float]:
    centred = _centred(rewards)
    variance = sum(value * value for value in centred) / max(1, len(rewards) - degrees)
    return [value / (math.sqrt(variance) + STD_FLOOR) for value in centred]


def group_std(rewards: Sequence[float]) -> list[float]:
    """(R - mean) / (std + 1e-6) with the unbiased (n - 1) estimator, as the published code computes it."""
    return _scaled(rewards, degrees=1)


def group_std_biased(rewards: Sequence[float]) -> list[float]:
    """(R - mean) / (std + 1e-6) with the biased (n) estimator."""
    return _scaled(rewards, degrees=0)


def group_mean(rewards: Sequence[float]) -> list[float]:
    """R - mean: no division by the standard deviation (Dr. GRPO, arXiv 2503.20783)."""
    return _centred(rewards)


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """R_i - mean of the other rewards (RLOO, arXiv 2402.14740); 0 for the only response of a group."""
    if len(rewards) < 2:
        return [0.0] * len(rewards)
    total = math.fsum(rewards)
    return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]


def gae(rewards: Sequence[float]) -> list[float]:
    """The rewards themselves: the learner computes one advantage per token from them and its value head (PPO)."""
    return list(rewards)


ADVANTAGES: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "group_std": group_std,
    "group_std_biased": group_std_biased,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "gae": gae,
}
"""By algorithm.advantage: one or more known rewards -> as many advantages; a single reward gets 0, but for `gae`."""


def advantages(estimator: str, rewards: Sequence[float | None]) -> list[float]:
    """One advantage per response. Unknown rewards (None) are not part of the statistics and get 0."""
    known = [reward for reward in rewards if reward is not None]
    values = iter(ADVANTAGES[estimator](known) if known else [])
    return [0.0 if reward is None else next(values) for reward in rewards]
