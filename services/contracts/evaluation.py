"""Owns the record of an evaluation, the result of one of its prompts, and the names of evaluations.

Must not compute a score.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.contracts.base import Count, Message, Value

BEFORE, AFTER, ALONE = "before", "after", "evaluation"
"""Names of evaluations: of the initial policy, of the last version, and of a run that only evaluates."""


class PassAt(Value):
    """pass@k: the probability that any of k answers is correct, over prompts; Chen et al., arXiv 2107.03374."""

    k: int
    value: float
    standard_error: float


class PromptResult(Value):
    """What the sampler keeps of a judged prompt until its evaluation ends; its size does not depend on the responses.

    `average`, `majority`, `passes` (pass@k by the k of the record), `score` (the mean of the known verdicts): None or
    empty if no verdict is known. `rewards`: the mean of each named reward. `response_tokens`: of all responses
    together.
    """

    average: float | None
    majority: float | None
    passes: tuple[float, ...]
    score: float | None = None
    rewards: dict[str, float] = Field(default_factory=dict)
    responses: Count
    unknown: Count
    response_tokens: int
    truncated: Count
    oldest_version: int
    newest_version: int


class EvaluationRecord(Message):
    """sampler -> readers of the run: the scores of one held-out set; standard errors are over prompts.

    `name` says when ("before", "step-5", "after"), `set` which set. `version` is the oldest policy version that
    answered, `newest_version` the newest. `accuracy` is avg@k, `majority` maj@k, k = `samples_per_prompt`. `score` is
    the mean score, `rewards` that of each named reward; None and empty in records of older releases, or without a known
    verdict. `unknown` verdicts count nowhere; `dropped` prompts got no answer (too long, or dead-lettered).
    `response_tokens`: of all responses together; 0 in records of older releases.
    """

    kind: Literal["evaluation"] = "evaluation"
    name: str
    set: str = "held-out"
    version: int
    newest_version: int | None = None
    prompts: int
    samples_per_prompt: int
    temperature: float = 1.0
    top_p: float = 1.0
    accuracy: float
    standard_error: float
    pass_at: tuple[PassAt, ...] = ()
    majority: float | None = None
    majority_standard_error: float | None = None
    score: float | None = None
    score_standard_error: float | None = None
    rewards: dict[str, float] = Field(default_factory=dict)
    response_length: float | None = None
    response_tokens: int = 0
    truncated_share: float | None = None
    unknown: int
    dropped: int = 0
    at: float = 0.0
