"""Owns the models of samples and of a group's story: what was generated, judged, kept or dropped, and trained.

Must not trust a text, which a model may have written.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from penstock_client.models.base import ApiModel


class WrittenSpan(ApiModel):
    """The tokens from `start` up to `end`, which a policy version wrote."""

    version: int
    start: int
    end: int


class KnownSample(ApiModel):
    """What is known of a sample; None and "" where it is not.

    `outcome` to `rewards`: of its verdict. `reward`: after shaping. Log-probs are natural logarithms.
    """

    index: int
    outcome: str | None = None
    score: float | None = None
    reason: str = ""
    answer: str = ""
    rewards: dict[str, float] = Field(default_factory=dict)
    reward: float | None = None
    advantage: float | None = None
    masked: bool | None = None
    staleness: int | None = None
    response_tokens: int | None = None
    truncated: bool | None = None
    mean_logprob: float | None = None
    replica: str = ""
    finish_reason: str = ""
    text: str | None = None
    spans: list[WrittenSpan] = Field(default_factory=list)


class SampleEntry(KnownSample):
    """A sample that a search found, and its group."""

    group: str
    lane: str = ""
    resumption: int = 0
    release: str = ""
    step: int | None = None
    version: int | None = None
    prompt_id: str | None = None
    versions: list[int] = Field(default_factory=list)


class SampleEntries(ApiModel):
    """A page of samples; `next`: the cursor of those behind it, None if there are no more.

    A page may be empty and have a cursor. `problems`: files of the archive that cannot be read.
    """

    samples: list[SampleEntry]
    next: str | None = None
    problems: list[str] = Field(default_factory=list)


class StoryToken(ApiModel):
    """A response token: its id, its text, its log-prob, and the policy version that wrote it."""

    id: int
    text: str | None = None
    logprob: float | None = None
    version: int | None = None


class ToldSample(KnownSample):
    """A sample in the story of its group."""

    tokens: list[StoryToken] = Field(default_factory=list)


class OptimizerFigures(ApiModel):
    """An optimizer step: its loss, the norm of its gradient before clipping, and whether it was applied."""

    loss: float | None = None
    gradient_norm: float | None = None
    applied: bool = True


class GroupAttempt(ApiModel):
    """One attempt at a group. `release`: None while it is in flight; `reason`: why it was kept or dropped.

    `optimizer_step`: which optimizer step of the rollout step `step` trained it, from 1 on; `optimizer`: what that was.
    """

    resumption: int = 0
    release: str | None = None
    reason: str = ""
    step: int | None = None
    version: int | None = None
    staleness: int | None = None
    optimizer_step: int | None = None
    optimizer: OptimizerFigures | None = None
    optimizer_steps: int | None = None
    learning_rate: float | None = None
    checkpoint: str | None = None
    samples: list[ToldSample] = Field(default_factory=list)


class PromptFigures(ApiModel):
    """The prompt of a group."""

    id: str
    messages: list[dict[str, Any]] = Field(default_factory=list)
    verifier: str = ""
    reference: Any = None


class GroupLineage(ApiModel):
    """The story of a group, its last attempt first. `problem`: what of it cannot be read."""

    group: str
    lane: str = ""
    release: str | None = None
    prompt: PromptFigures | None = None
    attempts: list[GroupAttempt] = Field(default_factory=list)
    problem: str | None = None
