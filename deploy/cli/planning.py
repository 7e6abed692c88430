"""Owns the estimate of what a recipe needs beside memory: checkpoints, balance of ranks, time per rollout step.

Must not measure: throughputs are given by the caller, and every formula names its source. The estimates that are also
checked before a run starts are in learner/model/memory.py and learner/model/fit.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from learner.model.fit import replica_memory, sync_bytes
from learner.model.memory import BYTES, learner_memory
from learner.model.shape import ModelShape
from services.settings import Recipe, resource_requests


@dataclass(frozen=True)
class Throughput:
    """Throughputs that the caller gives: tokens per second of one replica and of one rank, link in bytes per second.

    `survival`: share of groups that dynamic sampling keeps; `response_tokens`: mean response length.
    """

    generation: float
    learning: float
    link: float
    survival: float
    response_tokens: float


def checkpoint_bytes(recipe: Recipe, shape: ModelShape) -> float:
    """Bytes of one checkpoint over all ranks: master weights and Adam's two moments, at least 4 bytes per value.

    While it is written, the ranks together use the same amount of host memory.
    """
    return float(3 * max(4, BYTES[recipe.learner.dtype]) * shape.parameters)


def booked_gpus(recipe: Recipe) -> float:
    """The GPUs that a run reserves from its start to its end, for fleet and learner."""
    booked = resource_requests(recipe, recipe.rollout.replicas)
    return sum(process.gpus for processes in booked.values() for process in processes)


def rank_balance(recipe: Recipe, response_tokens: float) -> float:
    """The mean work of a learner rank divided by the largest, over one mini-batch; in (0, 1].

    Only an example is known: response lengths are drawn from exponential distributions, one per group, whose own means
    are exponential too, with mean `response_tokens`; no response is longer than rollout.max_new_tokens.
    """
    from learner.training.minibatches import longest_shared_row
    from learner.training.shares import PlannedSample, distribute

    draw, longest = Random(0), recipe.rollout.max_new_tokens

    def responses(group: str) -> list[PlannedSample]:
        mean = draw.expovariate(1 / response_tokens)
        lengths = (min(longest, 1 + int(draw.expovariate(1 / mean))) for _ in range(recipe.algorithm.group_size))
        return [PlannedSample("", group, tokens, 0.0, 1.0) for tokens in lengths]

    groups = {f"g{number}": responses(f"g{number}") for number in range(recipe.learner.mini_batch_groups)}
    row_tokens = longest_shared_row(recipe.learner.micro_batch_tokens, share_prompts=True)
    prompt_tokens = dict.fromkeys(groups, recipe.max_prompt_tokens // 4)
    return distribute(groups, prompt_tokens, recipe.learner.ranks, row_tokens).balance


def plan_figures(recipe: Recipe, shape: ModelShape, stated: Throughput, price: float | None) -> dict[str, Any]:
    """What `penstock plan` shows, as figures: sizes in bytes, times in seconds; `cost` in the currency of `price`."""
    from services.streams.memory_bound import footprint

    need, time = footprint(recipe.at_most), step_time(recipe, shape, stated)
    hours = booked_gpus(recipe) * time.total * recipe.limits.rollout_steps / 3600
    return {
        "model": {"name": shape.name, "parameters": shape.parameters, "layers": shape.layers},
        "learner_rank": {f"stage_{stage}": asdict(learner_memory(recipe, shape, stage)) for stage in range(4)},
        "checkpoint": checkpoint_bytes(recipe, shape),
        "replica": asdict(replica_memory(recipe, shape)),
        "redis": {"parts": dict(need.parts), "total": need.total, "unsized": dict(need.unsized)},
        "weight_sync": sync_bytes(recipe, shape),
        "rank_balance": rank_balance(recipe, stated.response_tokens),
        "step": asdict(time),
        "gpus": booked_gpus(recipe),
        "gpu_hours": hours,
        "cost": None if price is None else hours * price,
    }


@dataclass(frozen=True)
class StepTime:
    """Seconds of one rollout step, and its tokens. Generation and learning overlap if staleness is allowed."""

    sampled_tokens: float
    trained_tokens: float
    generating: float
    learning: float
    syncing: float
    total: float


def step_time(recipe: Recipe, shape: ModelShape, stated: Throughput) -> StepTime:
    """Time of one rollout step at the given throughputs; filtered groups are generated as well."""
    groups, size = recipe.limits.groups_per_step, recipe.algorithm.group_size
    trained = groups * size * stated.response_tokens
    kept = stated.survival if recipe.algorithm.dynamic_sampling.enabled else 1.0
    sampled = trained / kept
    generating = sampled / (stated.generation * recipe.rollout.replicas)
    learning = trained / (stated.learning * recipe.learner.ranks)
    syncing = sync_bytes(recipe, shape) / stated.link
    overlap = recipe.limits.max_staleness > 0
    # Generation continues while the broadcast is staged, but the learner waits for it.
    total = max(generating, learning + syncing) if overlap else generating + learning + syncing
    return StepTime(sampled, trained, generating, learning, syncing, total)
