"""Owns the story of an ended group as the archive tells it: its prompt, its samples, why it was kept or dropped.

Must not know how it is stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from services.contracts import Lane, Outcome, Prompt, Value, VersionSpan


class ArchivedSample(Value):
    """One sample of a group; None and "" where it is not known.

    `outcome` to `rewards`: of its verdict, None without one. `reward`: after shaping; `advantage`, `masked`,
    `staleness`: as trained, for other judged training groups what they would have been (staleness: None). Times are
    Unix seconds. `text`: None if the payload was missing or damaged, or the archive could not be written for long.
    """

    index: int
    outcome: Outcome | None = None
    score: float | None = None
    reason: str = ""
    answer: str = ""
    rewards: dict[str, float] = Field(default_factory=dict)
    reward: float | None = None
    advantage: float | None = None
    masked: bool | None = None
    staleness: int | None = None
    prompt_tokens: int | None = None
    response_tokens: int | None = None
    truncated: bool | None = None
    mean_logprob: float | None = None
    oldest_version: int | None = None
    newest_version: int | None = None
    started_at: float | None = None
    finished_at: float | None = None
    replica: str = ""
    finish_reason: str = ""
    text: str | None = None
    spans: tuple[VersionSpan, ...] = ()


class ArchivedGroup(Value):
    """One attempt at a group, without its tokens.

    `resumption`: that of the run which last rewound it, so that it counts the attempts at a group that was reopened.
    `release`: trained, filtered, stale, dead or evaluated; `reason`: why, in a line. `evaluation` and `set`: "" for
    training groups. `step`: the rollout step that trained it, `optimizer_step` the number of the optimizer step in it,
    from 1 on, and `version` the policy version which it published; None for others, and where a group that was archived
    by an older release has no number. `staleness`: as trained. `archived_ms`: Unix milliseconds, one value per written
    file.
    """

    group: str
    lane: Lane
    resumption: int
    release: str
    reason: str = ""
    evaluation: str = ""
    set: str = ""
    step: int | None = None
    optimizer_step: int | None = None
    version: int | None = None
    staleness: int | None = None
    archived_ms: int
    prompt: Prompt | None = None
    samples: tuple[ArchivedSample, ...] = ()


class GroupStory(ArchivedGroup):
    """The whole story of one attempt. `attempts`: the resumptions of all archived attempts at this group, ascending.

    `prompt_ids`: those of the prompt, the same for all samples. `response_ids` and `behaviour_logprobs` (natural
    logarithms): one list per sample, in the order of `samples`; empty where the payload was not there.
    """

    attempts: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    response_ids: tuple[tuple[int, ...], ...] = ()
    behaviour_logprobs: tuple[tuple[float, ...], ...] = ()


def no_tokens() -> NDArray[Any]:
    """No token ids."""
    return np.zeros(0, np.int32)


@dataclass(frozen=True)
class GroupTokens:
    """The tokens of a group to be archived. prompt_ids: int32 [P]; per sample response_ids int32 [T], log-probs [T]."""

    prompt_ids: NDArray[Any] = field(default_factory=no_tokens)
    response_ids: tuple[NDArray[Any], ...] = ()
    behaviour_logprobs: tuple[NDArray[Any], ...] = ()


@dataclass(frozen=True)
class GroupRow:
    """What is written of one attempt at a group."""

    group: ArchivedGroup
    tokens: GroupTokens = field(default_factory=GroupTokens)
