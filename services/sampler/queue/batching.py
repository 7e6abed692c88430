"""Owns how kept groups become a batch: staleness, advantages, and the sampling metrics since the last batch.

Must not do I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from services.contracts import (
    Batch,
    BatchGroup,
    BatchSample,
    CommittedPolicy,
    Outcome,
    Release,
    SamplerState,
    Verdict,
    reward_metric,
)
from services.sampler.advantage.advantages import advantages
from services.sampler.advantage.filtering import KEPT
from services.sampler.advantage.rewards import Ramp, reward
from services.sampler.backpressure import staleness
from services.sampler.evaluation.scores import by_name
from services.sampler.groups import Group
from services.sampler.selection.order import shuffled
from services.settings import Recipe

SCREENED = "screened out"


def shaped_reward(recipe: Recipe, verdict: Verdict) -> float | None:
    """The verdict's reward under this recipe; None for an unknown outcome."""
    overlong = recipe.algorithm.overlong
    ramp = Ramp(recipe.rollout.max_new_tokens, recipe.overlong_cache, overlong.factor)
    punishment = (overlong.shape, ramp) if overlong.punishment else None
    rule, tokens = recipe.algorithm.reward, verdict.facts.response_tokens
    return reward(rule, verdict.outcome, verdict.score, tokens, punishment)


def batch_group(recipe: Recipe, name: str, group: Group, step: int, version_steps: Mapping[int, int]) -> BatchGroup:
    """A kept group with its advantages and its staleness in the batch of rollout step `step`.

    A masked sample (unknown, or truncated under overlong filtering) is left out of the loss, not of the group's
    statistics.
    """
    rewards = [shaped_reward(recipe, verdict) for verdict in group.in_order]
    values = advantages(recipe.algorithm.advantage, rewards)
    samples = [
        BatchSample(
            payload=verdict.facts.payload,
            tokens=verdict.facts.response_tokens,
            advantage=advantage,
            reward=earned if earned is not None else 0.0,
            correct=verdict.outcome is Outcome.CORRECT,
            masked=earned is None or (recipe.algorithm.overlong.filtering and verdict.facts.truncated),
            staleness=staleness(step - 1, version_steps[verdict.facts.oldest_version]),
            replica=verdict.facts.replica,
        )
        for verdict, earned, advantage in zip(group.in_order, rewards, values, strict=True)
    ]
    return BatchGroup(
        group=name,
        samples=tuple(samples),
        prompt=group.task.prompt.id,
        staleness=max(sample.staleness for sample in samples),
        prompt_tokens=group.in_order[0].facts.prompt_tokens,
    )


def make_batch(
    recipe: Recipe,
    step: int,
    policy: CommittedPolicy,
    groups: dict[str, Group],
    state: SamplerState,
    metrics: dict[str, float],
    *,
    last: bool = False,
    snapshot: str = "",
) -> Batch:
    """The batch of rollout step `step`, its groups shuffled.

    `policy`: the committed one; `metrics`: see Window.metrics. Adds the metric `rollout_tokens_per_trained_token`, the
    cost of dynamic sampling: response tokens judged since the last batch per token of this batch that enters the loss.
    """
    names = shuffled(groups, recipe.seed, step)
    batch_groups = tuple(batch_group(recipe, name, groups[name], step, policy.version_steps) for name in names)
    facts = [verdict.facts for group in groups.values() for verdict in group.verdicts.values()]
    stalenesses = [sample.staleness for group in batch_groups for sample in group.samples]
    trained = sum(sample.tokens for group in batch_groups for sample in group.samples if not sample.masked)
    if trained:
        metrics = {**metrics, "rollout_tokens_per_trained_token": metrics["response_tokens"] / trained}
    return Batch(
        step=step,
        version=policy.version + step - 1 - policy.step,
        groups=batch_groups,
        sampler_state=state,
        sampling_metrics={**metrics, "staleness_mean": fmean(stalenesses), "staleness_max": float(max(stalenesses))},
        generation_started_at=min(sample.started_at for sample in facts),
        generation_finished_at=max(sample.finished_at for sample in facts),
        last=last,
        snapshot=snapshot,
    )


class Window:
    """What was sampled since the last batch, before filtering: the accuracy of the policy, not of the batch."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._verdicts: list[Verdict] = []
        self._decisions: Counter[str] = Counter()
        self._correct: Counter[int] = Counter()

    def judged(self, group: Group, decision: str) -> None:
        """Add a judged group and its decision. A group that screening ended is not part of the histogram."""
        self._verdicts += group.in_order
        self._decisions[decision] += 1
        if group.task.stop is not None:
            self._decisions[SCREENED] += 1
            return
        self._correct[sum(outcome is Outcome.CORRECT for outcome in group.outcomes)] += 1

    def released(self, release: Release) -> None:
        """Add a group that was released after it was kept, or before it was judged."""
        self._decisions[release.value] += 1

    @property
    def histogram(self) -> str:
        """The number of judged groups per number of correct answers, as text."""
        size = self._recipe.algorithm.group_size
        counts = ", ".join(f"{self._correct[n]} with {n}" for n in range(size + 1))
        return f"groups by correct answers of {size}: {counts}"

    def metrics(self) -> dict[str, float]:
        """Means and counts over the window. `tokens_per_second`: response tokens per second, first start to last end.

        A window may be empty, when one batch follows another at once: then means are absent, not zero.
        """
        known = [verdict for verdict in self._verdicts if verdict.outcome is not Outcome.UNKNOWN]
        rewards = [earned for verdict in known if (earned := shaped_reward(self._recipe, verdict)) is not None]
        lengths = [verdict.facts.response_tokens for verdict in self._verdicts]
        size = self._recipe.algorithm.group_size
        histogram = {f"groups_with_{n}_of_{size}_correct": float(self._correct[n]) for n in range(size + 1)}
        named = by_name(verdict.rewards for verdict in self._verdicts)
        means: dict[str, Sequence[float]] = {
            "accuracy": [verdict.outcome is Outcome.CORRECT for verdict in known],
            "reward": rewards,
            "score": [verdict.score for verdict in known],
            "response_length": lengths,
            "truncated_share": [verdict.facts.truncated for verdict in self._verdicts],
            "tokens_per_second": [sum(lengths) / max(self._seconds(), 1e-9)] if lengths else [],
        }
        return {
            **{name: fmean(values) for name, values in means.items() if values},
            **{reward_metric(name): mean for name, mean in named.items()},
            "response_tokens": float(sum(lengths)),
            "unknown_verdicts": float(len(self._verdicts) - len(known)),
            "groups_kept": float(self._decisions[KEPT]),
            "groups_filtered": float(self._decisions[Release.FILTERED.value]),
            "groups_stale": float(self._decisions[Release.STALE.value]),
            "groups_dead": float(self._decisions[Release.DEAD.value]),
            "groups_screened_out": float(self._decisions[SCREENED]),
            **histogram,
        }

    def _seconds(self) -> float:
        """Seconds from the start of the first sample to the end of the last one."""
        facts = [verdict.facts for verdict in self._verdicts]
        return max(sample.finished_at for sample in facts) - min(sample.started_at for sample in facts)
