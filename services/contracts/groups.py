"""Owns the messages of one group's way from prompt to verdict.

Must not hold a rule: what is kept and what is dropped is the sampler's.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, computed_field

from services.contracts.base import Count, Finite, Message, Value


class Outcome(StrEnum):
    """What a verifier says of a response. `unknown` (time-out, crash) is never trained as wrong."""

    CORRECT = "correct"
    WRONG = "wrong"
    UNKNOWN = "unknown"


class Release(StrEnum):
    """How a group ended. dispatched = trained + filtered + stale + dead + pending, at any moment."""

    TRAINED = "trained"
    FILTERED = "filtered"
    STALE = "stale"
    DEAD = "dead"


class Prompt(Value):
    """One question and what its verifier needs to judge an answer."""

    id: str
    messages: tuple[dict[str, str], ...]
    verifier: str
    reference: dict[str, Any]


class Sampling(Value):
    """How a response is drawn: softmax temperature, nucleus mass, and the longest response in tokens."""

    temperature: Annotated[float, Field(gt=0, le=100)]
    top_p: Annotated[float, Field(gt=0, le=1)]
    max_new_tokens: Annotated[int, Field(gt=0, lt=2**31)]
    seed: Count | None = None


class Task(Message):
    """sampler -> rollout: one group of `samples` responses to draw for one prompt.

    With `stop` only the samples [0, stop) are drawn: the screen of a group that may not be worth the rest. Another task
    of the same group asks for all.
    """

    kind: Literal["task"] = "task"
    group: str
    prompt: Prompt
    samples: Annotated[int, Field(gt=0, le=4096)]
    sampling: Sampling
    stop: Annotated[int, Field(gt=0, le=4096)] | None = None

    @property
    def wanted(self) -> int:
        """How many samples the group has once this task is done."""
        return self.samples if self.stop is None else min(self.stop, self.samples)


class VersionSpan(Value):
    """Response tokens [start, end) were written by policy `version`."""

    version: int
    start: int
    end: int


class SampleFacts(Value):
    """What the control flow needs of a sample, so that it never touches the payload's arrays.

    `payload` is the claim check: the Redis key that holds tokens, behaviour log-probs and text.
    Times are Unix seconds.
    """

    payload: str
    prompt_tokens: Count
    response_tokens: Count
    truncated: bool
    mean_logprob: Finite
    oldest_version: Count
    newest_version: Count
    started_at: Finite
    finished_at: Finite


class Sample(Message):
    """rollout -> verifier: one response, by claim check, with what is needed to judge it."""

    kind: Literal["sample"] = "sample"
    group: str
    index: Count
    verifier: str
    reference: dict[str, Any]
    facts: SampleFacts


class Verdict(Message):
    """verifier -> sampler: what the verifier found. `score` is in [0, 1]; `reason` explains an `unknown`.

    `answer`: what the verifier took for the response's answer, in a normal form so that equal answers are equal
    strings; empty when it found none. maj@k votes with it.
    """

    kind: Literal["verdict"] = "verdict"
    group: str
    index: Count
    outcome: Outcome
    score: Annotated[float, Field(ge=0, le=1)]
    reason: str = ""
    answer: str = ""
    facts: SampleFacts


class GroupCounts(Value):
    """A run's group counters at one moment."""

    dispatched: int = 0
    trained: int = 0
    filtered: int = 0
    stale: int = 0
    dead: int = 0
    pending: int = 0

    @computed_field  # type: ignore[prop-decorator]  # the form pydantic documents
    @property
    def reconciled(self) -> bool:
        """Whether every dispatched group is accounted for."""
        ended = self.trained + self.filtered + self.stale + self.dead
        return self.dispatched == ended + self.pending
