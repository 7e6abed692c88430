"""Owns the smallest faults in a loss that matter, each as a faulty variant of the dense computation.

Must not compare anything: the tests compare the trainer with a faulty computation, and the comparison must fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.conformance.rounding import Exact, Problem

Terms = list[list[Tensor]]


def token_off(problem: Problem) -> Exact:
    """The token with the median share of the loss counts 0.1 % too much, as if its advantage were off by that."""
    sizes = torch.cat([terms.detach().abs() for group in problem.terms(problem.policy) for terms in group])
    median = sizes.median()

    def faulty(terms: Tensor) -> Tensor:
        return torch.where(terms.detach().abs() == median, 1.001 * terms, terms)

    def change(worth: Terms) -> Terms:
        return [[faulty(terms) for terms in group] for group in worth]

    return problem.exact(change)


def uncounted(problem: Problem) -> Exact:
    """The normaliser omits one token of the longest response, or of the largest group if groups are averaged."""
    of_groups = problem.recipe.algorithm.reduction == "group_token"

    def change(worth: Terms) -> Terms:
        counts = [sum(map(len, group)) if of_groups else max(map(len, group)) for group in worth]
        most = max(counts)

        def faulty(terms: Tensor, count: int) -> Tensor:
            return terms * most / (most - 1) if count == most and (of_groups or len(terms) == most) else terms

        return [[faulty(terms, count) for terms in group] for count, group in zip(counts, worth, strict=True)]

    return problem.exact(change)


def counted_by_two_ranks(problem: Problem) -> Exact:
    """The response with the smallest share of the loss is weighted by 1 + 1 / (2 ranks)."""

    def size(terms: Tensor) -> float:
        return float(terms.detach().abs().sum())

    def change(worth: Terms) -> Terms:
        least = min(size(terms) for group in worth for terms in group)
        return [[1.5 * terms if size(terms) == least else terms for terms in group] for group in worth]

    return problem.exact(change)


def setting_off(**distances: float) -> Callable[[Problem], Exact]:
    """Settings of the recipe are off by these distances."""

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
    "clip-low-twice-off": setting_off(clip_low=2e-3),
    "clip-high-off": setting_off(clip_high=1e-3),
    "kl-off": setting_off(kl_coefficient=3e-4),
}
