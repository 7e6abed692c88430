"""Owns the smallest faults that matter in a loss, each planted into the dense computation of it.

Must not be caught here: the tests that compare with the dense computation plant one, and must refuse it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.conformance.rounding import Exact, Problem

Terms = list[list[Tensor]]


def token_off(problem: Problem) -> Exact:
    """The token whose share of the loss is the median one counts 0.1 % too much, as with its advantage off by that."""
    sizes = torch.cat([one.detach().abs() for group in problem.terms(problem.policy) for one in group])
    median = sizes.median()

    def change(worth: Terms) -> Terms:
        return [[torch.where(one.detach().abs() == median, 1.001 * one, one) for one in group] for group in worth]

    return problem.exact(change)


def uncounted(problem: Problem) -> Exact:
    """A token of the longest response, or of the largest group where groups are averaged, is not in the normaliser."""
    of_groups = problem.recipe.algorithm.reduction == "group_token"

    def change(worth: Terms) -> Terms:
        counts = [sum(map(len, group)) if of_groups else max(map(len, group)) for group in worth]
        most = max(counts)
        return [
            [one * most / (most - 1) if count == most and (of_groups or len(one) == most) else one for one in group]
            for count, group in zip(counts, worth, strict=True)
        ]

    return problem.exact(change)


def counted_by_two_ranks(problem: Problem) -> Exact:
    """The micro-batch that matters least, a single response, is weighted by 1 + 1 / (2 ranks)."""

    def change(worth: Terms) -> Terms:
        least = min(float(one.detach().abs().sum()) for group in worth for one in group)
        return [[1.5 * one if float(one.detach().abs().sum()) == least else one for one in group] for group in worth]

    return problem.exact(change)


def setting_off(**distances: float) -> Callable[[Problem], Exact]:
    """Numbers of the recipe are off by so much."""

    def faulty(problem: Problem) -> Exact:
        algorithm = problem.recipe.algorithm
        update: dict[str, Any] = {name: getattr(algorithm, name) + off for name, off in distances.items()}
        recipe = problem.recipe.model_copy(update={"algorithm": algorithm.model_copy(update=update)})
        return problem.exact(recipe=recipe)

    return faulty


FAULTS: dict[str, Callable[[Problem], Exact]] = {
    "token-off": token_off,
    "uncounted": uncounted,
    "counted-by-two-ranks": counted_by_two_ranks,
    "clip-low-off": setting_off(clip_low=1e-3),
    "clip-high-off": setting_off(clip_high=1e-3),
    "kl-off": setting_off(kl_coefficient=3e-4),
}
