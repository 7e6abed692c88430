"""Owns how kept groups become a batch: staleness, advantages, and what the window since the last batch looked like.

Must not do I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from services.contracts import Batch, BatchGroup, BatchSample, Outcome, Release, SamplerState, Verdict
from services.sampler.advantage.advantages import advantages
from services.sampler.advantage.filtering import KEPT
from services.sampler.advantage.rewards import Ramp, reward
from services.sampler.backpressure import staleness
from services.sampler.groups import Group
from services.settings import Recipe

SCREENED = "screened out"


def shaped_reward(recipe: Recipe, verdict: Verdict) -> float | None:
    """The verdict's reward under this recipe; None for an unknown outcome."""
    overlong = recipe.algorithm.overlong
    ramp = Ramp(recipe.rollout.max_new_tokens, recipe.overlong_cache, overlong.factor)
    punishment = (overlong.shape, ramp) if overlong.punishment else None
    return reward(verdict.outcome, verdict.facts.response_tokens, punishment)


def batch_group(recipe: Recipe, name: str, group: Group, version: int) -> BatchGroup:
    """A kept group with its advantages, as the policy `version` will consume it.

    A masked sample (unknown, or truncated under overlong filtering) leaves the loss, not the group's statistics.
    """
    rewards = [shaped_reward(recipe, verdict) for verdict in group.in_order]
    credit = advantages(recipe.algorithm.advantage, rewards)
    samples = [
        BatchSample(
            payload=verdict.facts.payload,
            tokens=verdict.facts.response_tokens,
            advantage=advantage,
            reward=earned if earned is not None else 0.0,
            correct=verdict.outcome is Outcome.CORRECT,
            masked=earned is None or (recipe.algorithm.overlong.filtering and verdict.facts.truncated),
            staleness=staleness(version, verdict.facts.oldest_version),
        )
        for verdict, earned, advantage in zip(group.in_order, rewards, credit, strict=True)
    ]
    return BatchGroup(
        group=name,
        samples=tuple(samples),
        prompt=group.task.prompt.id,
        staleness=staleness(version, group.oldest_version),
    )


def make_batch(
    recipe: Recipe, step: int, version: int, groups: dict[str, Group], state: SamplerState, metrics: dict[str, float],
    *, last: bool = False, snapshot: str = "",
) -> Batch:  # fmt: skip
    """The batch of rollout step `step`, to be consumed at `version`.

    `rollout_tokens_per_trained_token`: response tokens judged since the last batch, over those of this one that enter
    the loss; dynamic sampling's price.
    """
    made = tuple(batch_group(recipe, name, group, version) for name, group in groups.items())
    facts = [verdict.facts for group in groups.values() for verdict in group.verdicts.values()]
    ages = [sample.staleness for group in made for sample in group.samples]
    trained = sum(sample.tokens for group in made for sample in group.samples if not sample.masked)
    if trained:
        metrics = {**metrics, "rollout_tokens_per_trained_token": metrics["response_tokens"] / trained}
    return Batch(
        step=step,
        version=version,
        groups=made,
        sampler_state=state,
        sampling_metrics={**metrics, "staleness_mean": fmean(ages), "staleness_max": float(max(ages))},
        generation_started_at=min(one.started_at for one in facts),
        generation_finished_at=max(one.finished_at for one in facts),
        last=last,
        snapshot=snapshot,
    )


class Window:
    """What was sampled since the last batch, before any filtering: the policy's own accuracy, not the batch's."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._verdicts: list[Verdict] = []
        self._endings: Counter[str] = Counter()
        self._correct: Counter[int] = Counter()

    def judged(self, group: Group, decision: str) -> None:
        """Take in a judged group and how it goes on; one whose screen ended it is not part of the histogram."""
        self._verdicts += group.in_order
        self._endings[decision] += 1
        if group.task.stop is not None:
            self._endings[SCREENED] += 1
            return
        self._correct[sum(outcome is Outcome.CORRECT for outcome in group.outcomes)] += 1

    def released(self, release: Release) -> None:
        """Take in a group that was dropped later, or without verdicts."""
        self._endings[release.value] += 1

    @property
    def histogram(self) -> str:
        """How many of the judged groups had how many correct answers, in words."""
        size = self._recipe.algorithm.group_size
        counts = ", ".join(f"{self._correct[n]} with {n}" for n in range(size + 1))
        return f"groups by correct answers of {size}: {counts}"

    def metrics(self) -> dict[str, float]:
        """Means over the window; `tokens_per_second`: response tokens, over the time from first start to last end.

        Batches may follow each other at once: a window in which nothing was judged has no means, rather than zeros.
        """
        known = [verdict for verdict in self._verdicts if verdict.outcome is not Outcome.UNKNOWN]
        rewards = [earned for verdict in known if (earned := shaped_reward(self._recipe, verdict)) is not None]
        lengths = [verdict.facts.response_tokens for verdict in self._verdicts]
        size = self._recipe.algorithm.group_size
        histogram = {f"groups_with_{n}_of_{size}_correct": float(self._correct[n]) for n in range(size + 1)}
        means: dict[str, Sequence[float]] = {
            "accuracy": [verdict.outcome is Outcome.CORRECT for verdict in known],
            "reward": rewards,
            "response_length": lengths,
            "truncated_share": [verdict.facts.truncated for verdict in self._verdicts],
            "tokens_per_second": [sum(lengths) / max(self._seconds(), 1e-9)] if lengths else [],
        }
        return {
            **{name: fmean(values) for name, values in means.items() if values},
            "response_tokens": float(sum(lengths)),
            "unknown_verdicts": float(len(self._verdicts) - len(known)),
            "groups_kept": float(self._endings[KEPT]),
            "groups_filtered": float(self._endings[Release.FILTERED.value]),
            "groups_stale": float(self._endings[Release.STALE.value]),
            "groups_dead": float(self._endings[Release.DEAD.value]),
            "groups_screened_out": float(self._endings[SCREENED]),
            **histogram,
        }

    def _seconds(self) -> float:
        """From the first sample's start to the last one's end."""
        facts = [verdict.facts for verdict in self._verdicts]
        return max(one.finished_at for one in facts) - min(one.started_at for one in facts)
