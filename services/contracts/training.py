"""Owns the messages between sampler and learner: batches, and the records of rollout steps.

Must not hold tokens; payloads are claim checks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import AliasChoices, Field, Json

from services.contracts.base import Message, Value
from services.contracts.groups import GroupCounts
from services.contracts.ownership import Fence

REWARD_METRIC = "reward_"
"""How the step metrics of named rewards begin."""


class BatchSample(Value):
    """One response of a batch: its claim check, response tokens, advantage, and whether its loss is masked.

    `staleness`: the rollout steps between the policy of its oldest token and the policy that trains it. `replica`: the
    process that sampled it ("" if several did, and in batches of older releases).
    """

    payload: str
    tokens: int
    advantage: float
    reward: float
    correct: bool
    masked: bool
    staleness: int
    replica: str = ""


class BatchGroup(Value):
    """A whole group, which is never split between mini-batches. `prompt`: the id of its prompt.

    `prompt_tokens`: the length of that prompt (0 in batches of older releases). `staleness`: that of its most stale
    sample.
    """

    group: str
    samples: tuple[BatchSample, ...]
    prompt: str = ""
    staleness: int = Field(default=0, validation_alias=AliasChoices("staleness", "lag"))
    prompt_tokens: int = 0


class SamplerState(Value):
    """The sampler's position when it published a batch or dispatched a group: enough to continue drawing from there.

    `generation_batches` counts those that were dispatched whole for the batch that is being filled (refill
    `generation_batches`). `cursor`, `scan` and `draws` belong to the prompt selection.
    """

    cursor: int
    next_group: int
    generation_batches: int = 0
    scan: int = 0
    draws: int = 0


class SamplerSnapshot(Message):
    """sampler -> checkpoints: the sampler's state when it published the batch of `step`; stored by claim check.

    `queue`: the ids of the groups that had been dispatched and were neither released nor batched. `posteriors`: by
    prompt id, the pass rate's posterior in the selection's own notation. `response_tokens`: the number judged by then,
    which limits.response_tokens limits; None in snapshots of older releases.
    """

    kind: Literal["sampler-snapshot"] = "sampler-snapshot"
    step: int
    state: SamplerState
    counts: GroupCounts
    queue: tuple[str, ...] = ()
    posteriors: dict[str, str] = Field(default_factory=dict)
    response_tokens: int | None = None


class Batch(Message):
    """sampler -> learner: the groups of one rollout step, `last`: none follows.

    `version`: the policy version that the sampler expected to train it; a restarted learner may publish others.
    `snapshot` is the key of the sampler's snapshot, which a checkpoint that covers this step contains.
    """

    kind: Literal["batch"] = "batch"
    step: int
    version: int
    groups: tuple[BatchGroup, ...]
    sampler_state: SamplerState
    sampling_metrics: dict[str, float]
    generation_started_at: float
    generation_finished_at: float
    last: bool = False
    snapshot: str = ""


class OptimizerStepRecord(Value):
    """One optimizer step: loss, gradient norm before clipping, and whether it was applied.

    Both are None where they are not finite; such a step is skipped.
    """

    loss: float | None
    gradient_norm: float | None
    applied: bool


def reward_metric(name: str) -> str:
    """The step metric of the reward called `name`. Names have no underscore, so no two of them have the same metric."""
    return REWARD_METRIC + name.replace("-", "_")


def reward_names(metrics: Iterable[str]) -> list[str]:
    """The names of the rewards that have a metric among these step metrics, sorted."""
    return sorted(
        name.removeprefix(REWARD_METRIC).replace("_", "-") for name in metrics if name.startswith(REWARD_METRIC)
    )


class StepRecord(Message):
    """learner -> readers of the run: the record of one rollout step, and the policy version that it published.

    `prompts` and `staleness` belong to `groups`, one each: the prompt's id, and the rollout steps between the policy of
    the group's oldest token and the one that trained it (versions in records of older releases). `weights` is the
    digest of the version's weights, `batch_digest` that of the batch as it was archived. `epoch` and `owner`: of the
    learner that trained it, which names the files of its batch. Records of older releases have 0 and "" instead.
    `learning_rate`: learner.learning_rate as it was then, before any warm-up; None in records of older releases.
    `optimizer_step_of`: for each of `groups` the number of the optimizer step that trained it, from 1 on; None if its
    mini-batch had no response to train. () in records of older releases.
    """

    kind: Literal["step"] = "step"
    step: int
    version: int
    optimizer_steps: int
    groups: tuple[str, ...]
    metrics: dict[str, float]
    optimizer: tuple[OptimizerStepRecord, ...] = ()
    generation_started_at: float
    generation_finished_at: float
    learning_started_at: float
    learning_finished_at: float
    prompts: tuple[str, ...] = ()
    staleness: tuple[int, ...] = Field(default=(), validation_alias=AliasChoices("staleness", "lags"))
    weights: str = ""
    batch_digest: str = ""
    epoch: int = 0
    owner: str = ""
    learning_rate: float | None = None
    optimizer_step_of: tuple[int | None, ...] = ()

    @property
    def fence(self) -> Fence:
        """The fence of the learner that trained the step."""
        return Fence(self.epoch, self.owner)


class CommittedPolicy(Value):
    """A run's committed policy: rollout step `step` of its weight history, published as `version`; see `StepRecord`.

    Versions count publications and are never reused; after a rewind they are higher than the steps. `announced` is the
    highest version that a broadcast may have carried, committed or not. `version_steps`: the rollout step whose weights
    each recent version carries; a version that it lacks is too stale to train. `resumption`: the number of the
    resumption that last rewound the run to an older step; `rewinding`: whether a rewind has started and not finished.
    """

    version: int
    step: int
    weights: str = ""
    announced: int = 0
    version_steps: Json[dict[int, int]] = Field(default_factory=dict)
    resumption: int = 0
    rewinding: bool = False

    def step_of(self, version: int) -> int:
        """The rollout step of a policy version.

        One that `version_steps` lacks counts as the newest older one there, else as the oldest; without any, as the
        committed one.
        """
        known = self.version_steps
        before = [step for other, step in known.items() if other <= version]
        return max(before, default=min(known.values(), default=self.step))
