"""Owns the rounding bounds: how far the trainer's loss and gradient may be from the dense float64 ones, and the check.

Must not import the learner: the bounds follow from the dense computation alone, for any processor and any cut.

A bound is u x sqrt(roundings in sequence) x the effect of a rounding of relative size u, summed without signs, so that
terms that cancel in the loss do not shrink its bound. u is the unit roundoff of the dtype, eps / 2. The effect of n
roundings in sequence is at most gamma_n = n u / (1 - n u) (Higham, Accuracy and Stability of Numerical Algorithms,
2nd ed., 3.1), and a small multiple of sqrt(n) u if their signs are independent (Higham and Mary, SIAM J. Sci. Comput.
41, 2019, A2815). An inner product counts as one rounding: each processor sums it in its own lanes and blocks. The
bounds assume that layers do not amplify an error, which holds for small weights; large weights need other bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from services.contracts import BatchGroup
from services.settings import Recipe
from services.streams.delivery.payloads import SamplePayload
from tests.conformance import dense

LAYER_ROUNDINGS = 25
"""In sequence: two norms (4 each), two residual sums, the first product, rotation (2), scores and their scale, softmax
(3), two products, gate, SiLU (2), their product and the last product."""
HEAD_ROUNDINGS = 10
"""The last norm (4), the head, the temperature, log-sum-exp (3), the difference."""
TERM_ROUNDINGS = 10
"""From the log-prob of a token to its share of the loss: ratio, clip, correction, KL, entropy, weight."""
ROOM = {torch.float32: 2.0, torch.float64: 2000.0}
"""The small multiple. With AVX-512, with AVX2 and without either, float32 stays within a sixth of its bounds. In
float64, which is compared as exact, every fault is larger than even this bound."""
DRAWS = 8

Gradient = dict[str, Tensor]
Change = Callable[[list[list[Tensor]]], list[list[Tensor]]]
"""A fault: it changes the terms of tokens."""


class Bound(NamedTuple):
    """The bounds. `nats`: of a log-prob; `loss`: absolute; `gradient`: of |dg| / |g|."""

    nats: float
    loss: float
    gradient: float


class Exact(NamedTuple):
    """The loss of a mini-batch, and its gradient by parameter."""

    loss: float
    gradient: Gradient


@dataclass(frozen=True)
class Problem:
    """The function that one optimizer step minimises, in float64."""

    model: Any
    groups: Sequence[BatchGroup]
    payloads: dict[str, SamplePayload]
    recipe: Recipe
    proximal: dense.Proximal
    reference: Any = None

    @cached_property
    def policy(self) -> dense.PerToken:
        return dense.evaluated(self.model, self.groups, self.payloads, self.recipe.rollout.temperature)

    @cached_property
    def anchor(self) -> dense.PerToken | None:
        if self.reference is None:
            return None
        with torch.no_grad():
            return dense.evaluated(self.reference, self.groups, self.payloads, self.recipe.rollout.temperature)

    def terms(self, policy: dense.PerToken, recipe: Recipe | None = None) -> list[list[Tensor]]:
        return dense.terms(policy, self.groups, self.payloads, recipe or self.recipe, self.proximal, self.anchor)

    def exact(self, change: Change = lambda worth: worth, recipe: Recipe | None = None) -> Exact:
        """The loss and its gradient; with `change` or another `recipe`, those of a faulty computation."""
        loss = -dense.reduced(change(self.terms(self.policy, recipe)), self.recipe)
        return Exact(float(loss.detach()), self._gradient(loss))

    def _gradient(self, scalar: Tensor) -> Gradient:
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        return dict(zip(names, torch.autograd.grad(scalar, parameters, retain_graph=True), strict=True))

    def bound(self, dtype: torch.dtype) -> Bound:
        """How far a computation in `dtype` may be from `exact`.

        An error of the log-probs l changes the loss L by dL/dl times the error, and its gradient by dL/dl and d2L/dl2.
        """
        nats = self._nats(dtype)
        leaves = {key: tuple(values.detach().requires_grad_() for values in pair) for key, pair in self.policy.items()}
        flat = [leaf for pair in leaves.values() for leaf in pair]
        worth = self.terms(leaves)
        slopes = torch.autograd.grad(dense.reduced(worth, self.recipe), flat, create_graph=True, materialize_grads=True)
        bends = torch.autograd.grad(sum(slope.sum() for slope in slopes), flat, materialize_grads=True)
        # The term of a token depends on no other token, so the slopes of the sum of slopes are the curvatures.
        steep = [slope.detach().abs() for slope in slopes]
        loss = nats * sum(float(size.sum()) for size in steep) + self._of_the_sum(worth, dtype)
        shares = [size + bend.abs() for size, bend in zip(steep, bends, strict=True)]
        return Bound(nats, loss, nats * self._without_cancelling(shares) / length(self.exact().gradient))

    def _nats(self, dtype: torch.dtype) -> float:
        """The error of a log-prob: each rounding has an effect of u times the size of a logit.

        The largest |log-prob| is at least that size, because logits are spread around 0.
        """
        roundings = LAYER_ROUNDINGS * self.model.config.num_hidden_layers + HEAD_ROUNDINGS
        largest = max(float(logprobs.detach().abs().max()) for logprobs, _ in self.policy.values())
        return ROOM[dtype] * unit(dtype) * math.sqrt(roundings) * largest

    def _of_the_sum(self, worth: list[list[Tensor]], dtype: torch.dtype) -> float:
        """The error of summing the terms, pairwise (Higham, 4.2)."""
        summed = float(dense.reduced([[terms.detach().abs() for terms in group] for group in worth], self.recipe))
        tokens = sum(len(logprobs) for logprobs, _ in self.policy.values())
        return ROOM[dtype] * unit(dtype) * (TERM_ROUNDINGS + math.log2(tokens)) * summed

    def _without_cancelling(self, shares: Sequence[Tensor]) -> float:
        """The root of the summed squares of the gradients of all log-probs and entropies, each times its share.

        With a random sign for each token, the squared length of the sum has this square as its mean.
        """
        draw = torch.Generator().manual_seed(0)
        outputs = [output for pair in self.policy.values() for output in pair]
        squares = []
        for _ in range(DRAWS):
            signs = [torch.randint(0, 2, output.shape, generator=draw) * 2 - 1 for output in outputs]
            mixed = sum(
                (output * sign * share).sum() for output, sign, share in zip(outputs, signs, shares, strict=True)
            )
            squares.append(length(self._gradient(mixed)) ** 2)
        return math.sqrt(sum(squares) / DRAWS)

    @cached_property
    def responses(self) -> list[Gradient]:
        """The gradient of each response that counts. Their sum is that of `exact`."""
        count = sum(map(len, self.terms(self.policy)))
        return [self.exact(only(number)).gradient for number in range(count)]

    def order_bound(self, dtype: torch.dtype, additions: int) -> float:
        """How far two sums of the same gradients in `dtype`, in different orders, may be apart: of |dg| / |g|.

        Each addition rounds a partial sum, no element of which is larger than the sum of absolute values (Higham, 4.2).
        Both sums have as many roundings, of independent signs.
        """
        sizes = {name: sum(part[name].abs() for part in self.responses) for name in self.responses[0]}
        return unit(dtype) * math.sqrt(2 * additions) * length(sizes) / length(self.exact().gradient)

    def margin(self) -> float:
        """The smallest distance (nats) of a token to a bound of its clip or mask, or of a response to its cap."""
        algorithm = self.recipe.algorithm
        clips = [1 - algorithm.clip_low, 1 + algorithm.clip_high, *filter(None, [algorithm.dual_clip])]
        masks = [algorithm.icepop_low, algorithm.icepop_high] if self.recipe.correction == "icepop" else []
        caps = [algorithm.correction_cap] if self.recipe.correction == "truncated_is_sequence" else []
        distances = []
        for key, (logprobs, _) in self.policy.items():
            before = self.proximal(self.payloads[key], logprobs.detach())
            gap = before - dense.behaviour(self.payloads[key], before)
            for gaps, limits in ((logprobs.detach() - before, clips), (gap, masks)):
                distances += [float((gaps - math.log(limit)).abs().min()) for limit in limits]
            distances += [abs(float(gap.sum()) - math.log(limit)) / len(gap) for limit in caps]
        return min(distances)


def only(number: int) -> Change:
    """The change after which only one response, counted over all groups, has terms that are not 0."""

    def change(worth: list[list[Tensor]]) -> list[list[Tensor]]:
        places = [(group, response) for group, terms in enumerate(worth) for response in range(len(terms))]
        return [
            [terms * float((group, response) == places[number]) for response, terms in enumerate(responses)]
            for group, responses in enumerate(worth)
        ]

    return change


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def length(gradient: Gradient) -> float:
    return float(torch.cat([tensor.flatten() for tensor in gradient.values()]).norm())


def difference(found: Gradient, exact: Gradient) -> float:
    """|found - exact| / |exact| over all tensors."""
    return length({name: found[name].double() - tensor for name, tensor in exact.items()}) / length(exact)


def check(loss: float, gradient: Gradient, exact: Exact, bound: Bound) -> None:
    """Fail unless loss and gradient are within the rounding bound of the exact ones."""
    apart = difference(gradient, exact.gradient)
    print(f"|dL| = {abs(loss - exact.loss):.1e} of {bound.loss:.1e}, |dg| / |g| = {apart:.1e} of {bound.gradient:.1e}")
    assert loss == pytest.approx(exact.loss, rel=0.0, abs=bound.loss)
    assert apart <= bound.gradient
