"""Owns how samples are shown, and the story of a group: prompt, attempts, verdicts, step, checkpoint.

Must not read Redis or a file.
"""

from __future__ import annotations

from pydantic import BaseModel

from services.contracts import Lane, OptimizerStepRecord, Prompt
from services.storage.groups.filters import FoundSample
from services.storage.groups.story import ArchivedSample


class SampleView(FoundSample):
    """A sample of a group that has ended. `versions`: the policy versions that wrote its tokens."""

    versions: list[int]


class SampleList(BaseModel):
    """Samples that match, and the cursor for `after`; `next` null: there are no more.

    One request reads a bounded part of the archive: a page may be empty and have a cursor. `problems`: files of the
    archive that cannot be read, which were left out.
    """

    samples: list[SampleView]
    next: str | None
    problems: list[str]


class TokenView(BaseModel):
    """A response token: its id, its text (null: the tokenizer is not here), its log-prob (nats), who wrote it.

    A character of several tokens is with its last one; the others have "".
    """

    id: int
    text: str | None
    logprob: float
    version: int | None


class StorySample(ArchivedSample):
    """A sample in its group's story. `tokens`: empty where the archive has none."""

    tokens: list[TokenView]


class AttemptView(BaseModel):
    """One attempt at a group; a rewind of the run makes another one. `resumption`: that of the run.

    `release`: null while the group is in flight. `step` trained it, `version` is the policy that the step published.
    `optimizer_step`: the number of the optimizer step in it that trained the group, from 1 on, null where an older
    release archived it; `optimizer`: what that one was. `optimizer_steps` were applied in `step`, at `learning_rate`.
    `checkpoint`: the first one that holds the step.
    """

    resumption: int = 0
    release: str | None = None
    reason: str
    step: int | None = None
    version: int | None = None
    staleness: int | None = None
    optimizer_step: int | None = None
    optimizer: OptimizerStepRecord | None = None
    optimizer_steps: int | None = None
    learning_rate: float | None = None
    checkpoint: str | None = None
    samples: list[StorySample]


class GroupView(BaseModel):
    """The story of a group, its last attempt first. `problem`: what of it cannot be read, null if all can."""

    group: str
    lane: Lane
    release: str | None
    prompt: Prompt | None
    attempts: list[AttemptView]
    problem: str | None
