"""Owns the messages that services exchange: frozen pydantic models, one per stream entry.

Must not import any engine, Redis, or another package of this project.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, computed_field

SCHEMA_VERSION: Literal[1] = 1


class Lane(StrEnum):
    """Which flow a group belongs to; each lane has streams, counters and slots of its own."""

    TRAIN = "train"
    EVALUATION = "evaluation"


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


class Value(BaseModel):
    """An immutable part of a message. Unknown fields are ignored, so that old readers survive new writers."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Message(Value):
    """A stream entry. `kind` names the type on the wire; `schema_version` changes only incompatibly."""

    kind: str
    schema_version: Literal[1] = SCHEMA_VERSION


class Prompt(Value):
    """One question and what its verifier needs to judge an answer."""

    id: str
    messages: tuple[dict[str, str], ...]
    verifier: str
    reference: dict[str, Any]


class Sampling(Value):
    """How a response is drawn: softmax temperature, nucleus mass, and the longest response in tokens."""

    temperature: float
    top_p: float
    max_new_tokens: int
    seed: int | None = None


class Task(Message):
    """sampler -> rollout: one group of `samples` responses to draw for one prompt."""

    kind: Literal["task"] = "task"
    group: str
    prompt: Prompt
    samples: int
    sampling: Sampling


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
    prompt_tokens: int
    response_tokens: int
    truncated: bool
    mean_logprob: float
    oldest_version: int
    newest_version: int
    started_at: float
    finished_at: float


class Sample(Message):
    """rollout -> verifier: one response, by claim check, with what is needed to judge it."""

    kind: Literal["sample"] = "sample"
    group: str
    index: int
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
    index: int
    outcome: Outcome
    score: float
    reason: str = ""
    answer: str = ""
    facts: SampleFacts


class BatchSample(Value):
    """One response of a batch: its claim check, response tokens, advantage, and whether its loss is masked.

    `staleness` = the version that consumes it - the version of its oldest token.
    """

    payload: str
    tokens: int
    advantage: float
    reward: float
    correct: bool
    masked: bool
    staleness: int


class BatchGroup(Value):
    """A whole group; it is never split."""

    group: str
    samples: tuple[BatchSample, ...]


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


class SamplerState(Value):
    """Where the sampler stood when it published a batch or dispatched a group: enough to go on from there.

    `generation_batches` counts those drawn for the batch that is being filled (refill `generation_batches`); one that
    its sampler's death cut short counts too.
    """

    cursor: int
    next_group: int
    generation_batches: int = 0


class Batch(Message):
    """sampler -> learner: the groups of one rollout step, to be consumed at policy `version`; none follows `last`."""

    kind: Literal["batch"] = "batch"
    step: int
    version: int
    groups: tuple[BatchGroup, ...]
    sampler_state: SamplerState
    sampling_metrics: dict[str, float]
    generation_started_at: float
    generation_finished_at: float
    last: bool = False


class OptimizerStepRecord(Value):
    """One optimizer step: loss, gradient norm before clipping, and whether it was applied.

    Both are None where they are not finite; such a step is skipped.
    """

    loss: float | None
    gradient_norm: float | None
    applied: bool


class StepRecord(Message):
    """learner -> everyone: what one rollout step did and the policy version it published."""

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


BEFORE, AFTER, ALONE = "before", "after", "evaluation"
"""Names of evaluations: of the initial policy, of the last version, and of a run that only evaluates."""


class PassAt(Value):
    """pass@k: the probability that at least one of k answers is right, over prompts; Chen et al., arXiv 2107.03374."""

    k: int
    value: float
    standard_error: float


class EvaluationRecord(Message):
    """sampler -> everyone: how one held-out set was answered; standard errors are over prompts.

    `name` says when ("before", "step-5", "after"), `set` what. `version` is the oldest policy version that answered,
    `newest_version` the newest. `accuracy` is avg@k, `majority` maj@k, k = `samples_per_prompt`. `unknown` verdicts
    count nowhere; `dropped` prompts got no answer (too long, or given up).
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
    response_length: float | None = None
    truncated_share: float | None = None
    unknown: int
    dropped: int = 0
    at: float = 0.0


class Event(Message):
    """Any service -> people: something worth a line in the run's log."""

    kind: Literal["event"] = "event"
    service: str
    phase: str
    text: str
    at: float


class Cause(StrEnum):
    """Why a message was given up. `too-long` and `refused` (by the chat template) are faults of the prompt itself."""

    TOO_LONG = "too-long"
    REFUSED = "refused"
    DELIVERIES = "deliveries"
    INVALID = "invalid"
    UNSTATED = "unstated"


class DeadLetter(Message):
    """A consumer -> sampler and people: a message given up, with the reason; `prompt` is the id of a task's prompt."""

    kind: Literal["dead"] = "dead"
    stream: str
    entry: str
    reason: str
    deliveries: int
    cause: Cause = Cause.UNSTATED
    group: str | None = None
    prompt: str | None = None
    body: str


class TensorEntry(Value):
    """One tensor of a policy: Hugging Face name, shape, and torch dtype name ('float32')."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class WeightManifest(Value):
    """The order in which a policy's tensors travel, cut into buckets of whole tensors."""

    buckets: tuple[tuple[TensorEntry, ...], ...]


class WeightPlan(Message):
    """learner -> fleet: join broadcast group `generation` at host:port and receive `version`.

    `members` maps a replica's process id to the rank of its first worker; rank 0 is the learner.
    """

    kind: Literal["weight-plan"] = "weight-plan"
    generation: int
    version: int
    host: str
    port: int
    world: int
    members: dict[str, int]
    timeout_s: float


class WeightAck(Message):
    """fleet -> learner: how far one replica got with one plan."""

    kind: Literal["weight-ack"] = "weight-ack"
    member: str
    generation: int
    version: int
    phase: Literal["applied", "failed"]
    detail: str = ""
    staging_s: float = 0.0
    pause_s: float = 0.0


class RunState(StrEnum):
    """A run's life: queued -> starting -> running -> succeeded | failed | cancelled."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether no further change can follow."""
        return self in RunState._ended()

    @classmethod
    def _ended(cls) -> frozenset[RunState]:
        return frozenset({cls.SUCCEEDED, cls.FAILED, cls.CANCELLED})


class Transition(Value):
    """One change of a run's state: when (Unix seconds) and why."""

    state: RunState
    at: float
    reason: str


class ProcessInfo(Value):
    """A live process as it announces itself; `metrics` is host:port of its /metrics page."""

    id: str
    service: str
    run: str | None
    host: str
    pid: int
    metrics: str
    state: str = "starting"
    version: int | None = None
    workers: int = 1
    started_at: float = 0.0
