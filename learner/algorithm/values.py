"""Owns what a value head adds: the advantage of each token by GAE, and the clipped value loss.

Must not hold a network. The responses of a micro-batch follow each other, each whole, as in TokenData.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

WHITENING_FLOOR = 1e-8
"""Added to the variance of advantages."""


class Estimate(NamedTuple):
    """The start of a rollout step, [N] each, without gradient: the advantage of each token, and its return."""

    advantage: Tensor
    returns: Tensor


class ValueTerm(NamedTuple):
    """What the value loss of N tokens depends on, [N] each: `values` with gradient, the rest without.

    before: the values at the start of the rollout step. returns: those of `gae`.
    """

    values: Tensor
    before: Tensor
    returns: Tensor


class ValueLoss(NamedTuple):
    """The value loss of a micro-batch, a scalar, and the tokens [N] whose loss was clipped (bool)."""

    loss: Tensor
    clipped: Tensor


def gae(values: Tensor, reward: Tensor, sample: Tensor, discount: float, trace: float) -> Estimate:
    """Generalized advantage estimation (arXiv 1506.02438, Eq. 16) with one reward, at the last token of a response.

    A_t = sum over l of (discount x trace)^l x delta_(t+l), delta_t = r_t + discount x V_(t+1) - V_t, and V is 0 after
    the last token. values, reward: [N], where `reward` repeats that of the response; sample: int64 [N]. The returns are
    A + V. Computed in float64; the results have the dtype of `values`.

    Example: a response of two tokens with reward 1 and values 0.5 and 0.75, and one of one token. With discount 1 and
    trace 0.5, the deltas are 0.25 and 0.25, and A = 0.25 + 0.5 x 0.25:

    >>> values, reward = torch.tensor([0.5, 0.75, 0.25]), torch.tensor([1.0, 1.0, -1.0])
    >>> found = gae(values, reward, torch.tensor([0, 0, 1]), discount=1.0, trace=0.5)
    >>> found.advantage, found.returns
    (tensor([ 0.3750,  0.2500, -1.2500]), tensor([ 0.8750,  1.0000, -1.0000]))
    """
    exact = values.detach().double()
    follows = torch.zeros_like(sample, dtype=torch.bool)
    follows[:-1] = sample[:-1] == sample[1:]
    following = torch.zeros_like(exact)
    following[:-1] = exact[1:]
    last_reward = torch.where(follows, 0.0, reward.double())
    deltas = last_reward + discount * torch.where(follows, following, 0.0) - exact
    advantage = _discounted_sums(deltas, sample, discount * trace)
    return Estimate(advantage.to(values.dtype), (advantage + exact).to(values.dtype))


def _discounted_sums(terms: Tensor, sample: Tensor, factor: float) -> Tensor:
    """For each token, the sum of the `terms` [N] from it to the end of its response, each by its power of `factor`.

    The reach doubles in each round, so a response of T tokens takes log2(T) rounds instead of T.
    """
    found, reach, power = terms, 1, factor
    longest = int(torch.bincount(sample).max())
    while reach < longest:
        further = torch.zeros_like(found)
        further[:-reach] = torch.where(sample[:-reach] == sample[reach:], found[reach:], 0.0)
        found, reach, power = found + power * further, 2 * reach, power * power
    return found


def moments(advantage: Tensor, real: Tensor) -> Tensor:
    """float64 [3] on the CPU: count, sum and sum of squares of the advantages where `real` (bool [N]).

    They add up over micro-batches and ranks.
    """
    counted = advantage.detach().double()[real]
    return torch.stack([torch.full((), float(counted.numel())), counted.sum().cpu(), counted.square().sum().cpu()])


def whitened(advantage: Tensor, total: Tensor) -> Tensor:
    """(A - mean) / sqrt(variance + 1e-8), with the mean and the variance (n) of all tokens whose moments are `total`.

    >>> advantage = torch.tensor([1.0, 3.0])
    >>> whitened(advantage, moments(advantage, torch.tensor([True, True])))
    tensor([-1.,  1.])
    """
    count, summed, squares = (float(value) for value in total)
    mean = summed / max(count, 1.0)
    variance = max(squares / max(count, 1.0) - mean * mean, 0.0)
    return (advantage - mean) / math.sqrt(variance + WHITENING_FLOOR)


def value_loss(term: ValueTerm, weight: Tensor, clip: float) -> ValueLoss:
    """sum(weight x max((V - R)^2, (clip(V, V_before +- `clip`) - R)^2)) / 2, as in PPO's published code.

    `weight` [N] is that of TokenData, so the loss is reduced like the objective.

    Example: the return is 1. The first value moved from 0 to 0.5, away from its limit of 0.2, so that the larger error,
    that of the limit, counts: 0.8^2 / 2. The second moved by 0.1:

    >>> values, before, returns = torch.tensor([0.5, 0.6]), torch.tensor([0.0, 0.5]), torch.tensor([1.0, 1.0])
    >>> found = value_loss(ValueTerm(values, before, returns), torch.tensor([1.0, 1.0]), clip=0.2)
    >>> round(found.loss.item(), 4), found.clipped
    (0.4, tensor([ True, False]))
    """
    values, before, returns = term
    moved = values - before
    limited = torch.where(moved.abs() > clip, before + moved.clamp(-clip, clip), values)
    error, limited_error = (values - returns).square(), (limited - returns).square()
    loss = (weight * torch.maximum(error, limited_error)).sum() / 2
    return ValueLoss(loss, (limited_error > error) & (weight > 0))
