"""Owns the bound on a run's memory in Redis, computed from its recipe: what it can hold at once, and its size.

Must not talk to Redis. tests/services/sampler/test_soak.py compares it with a server.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.contracts import Lane, nucleus_limit
from services.settings import LimitsSettings, Recipe
from services.settings.rewards.files import MOST_BYTES, MOST_BYTES_TOGETHER
from services.streams.delivery.validation import LARGEST_LETTER
from services.streams.retention import (
    DEAD_KEPT,
    EVENTS_KEPT,
    RELEASED_KEPT,
    UNARCHIVED_KEPT,
    WEIGHT_MESSAGES_KEPT,
)

TEXT_BYTES = 8
"""Assumed bytes of text per token, on average over a prompt or response; English has about four."""
REFERENCE_BYTES = 4096
"""Assumed longest reference of a prompt, as JSON."""
LEAST_BACKLOG = 16
"""Groups that may wait for the archive with their payloads, in a run that may have as many in flight."""
EVALUATION_ENTRIES = 64
"""Entries that each stream of an evaluation may keep because an entry of an earlier evaluation is unacked."""
NODE = 4096
"""Bytes of a stream that Redis frees at once (stream-node-max-bytes): one remaining entry pins all of them."""
SLACK = 1.3
"""Overhead of Redis: dictionary and stream nodes, allocation classes, tables that grow by doubling."""

TASK, SAMPLE, VERDICT, HASH, PAYLOAD = 900, 900, 1500, 700, 900
"""Bytes beyond texts, references and tokens. A verdict's includes its answer (200 characters) and reason (300)."""
ENTRY_FIELD = 40
"""A field of a group's hash that names a stream entry: of its task, of each sample, of each verdict."""
BATCH_SAMPLE, BATCH_GROUP, POSTERIOR, STEP, EVENT, PLAN, DROPPED = 330, 250, 220, 6000, 600, 1200, 150
TOKENS = 150
"""A field of the ledger: the tokens of a group in flight, or of a committed step."""
STEP_GROUP, REOPENED = 120, 300
"""A group in a step record; and a group that a resume reopened: a small hash, and its place among the pending ones."""
ALWAYS = 2 * 2**20
"""The library, heartbeats, the record, counters."""


@dataclass(frozen=True)
class Footprint:
    """Bytes by purpose. `unsized`: bytes per prompt, by what has as many prompts as its file, which is not counted."""

    parts: dict[str, int]
    unsized: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """The bound, with the overhead of Redis."""
        return int(SLACK * sum(self.parts.values())) + ALWAYS


def longest_streams(recipe: Recipe, lane: Lane) -> dict[str, int]:
    """The length of each stream of a lane above which the trim also deletes acked entries after an unacked one.

    In training, as many as all groups in flight have messages in it. While a stream is no longer than that, acked
    entries after an unacked one stay. After an evaluation, only entries that an unacked one keeps are left.
    """
    if lane is Lane.EVALUATION:
        return dict.fromkeys(("tasks", "samples", "verdicts"), EVALUATION_ENTRIES)
    groups = recipe.limits.max_inflight_groups
    results = groups * recipe.algorithm.group_size
    return {"tasks": groups, "samples": results, "verdicts": results}


def archive_backlog(recipe: Recipe) -> int:
    """How many ended groups may wait for the archive with their payloads, beside limits.max_inflight_groups in flight.

    At least those of a batch, which end together, and a few, because they are archived a few at once.
    """
    limits = recipe.limits
    few = min(LEAST_BACKLOG, limits.max_inflight_groups)
    return max(limits.groups_per_step, limits.max_inflight_groups // 4, few)


def footprint(recipe: Recipe) -> Footprint:
    """The most memory that a run of this recipe uses in Redis.

    A batch leaves once its step is archived and committed, while the groups that replace its own are in flight already.
    The sampler's snapshot of that step stays until the next one. Groups that have ended keep their payloads until they
    are in the archive of groups: of training groups, only `archive_backlog` more than may be in flight; of an
    evaluation, all. Where the archive cannot be written, some wait without payloads. What is kept of a half-drawn
    response takes no more than its payload, which replaces it.

    The streams of groups in flight count twice. Right after the sampler trimmed them they hold the unacked messages, or
    `longest_streams` if that is more: at most the messages of all groups in flight, each of which may be the last in
    its stream node. Until the next trim (the sampler's maintenance, every 2 s) the bound assumes that no more groups
    pass than may be in flight, and that no more are released.
    """
    limits = recipe.limits
    top_k = recipe.rollout.top_k
    nucleus = 0 if top_k is None else 4 + 4 * nucleus_limit(top_k)
    group = _Group(recipe, recipe.algorithm.group_size, recipe.rollout.max_new_tokens, nucleus)
    batches = 2 + limits.max_staleness
    prompts = recipe.data.train or 0
    evaluation = max((_evaluation(recipe, prompts, samples) for prompts, samples in _sets(recipe)), default=0)
    letter = min(LARGEST_LETTER, group.task)
    messages = EVENTS_KEPT * EVENT + DEAD_KEPT * letter + 2 * WEIGHT_MESSAGES_KEPT * PLAN
    return Footprint(
        {
            "groups in flight": limits.max_inflight_groups * (group.hash + group.payloads),
            "trained groups in release": limits.groups_per_step * (group.hash + group.payloads),
            "groups that wait for the archive": archive_backlog(recipe) * (group.hash + group.payloads + group.batch),
            "groups that wait for the archive without payloads": UNARCHIVED_KEPT * (group.hash + group.batch),
            "streams of groups in flight": limits.max_inflight_groups * (group.pinned + group.messages),
            "batches": batches * group.batch * limits.groups_per_step,
            "sampler snapshots": (batches + 1) * prompts * POSTERIOR,
            "released groups": (RELEASED_KEPT + limits.max_inflight_groups) * group.hash,
            "evaluation": evaluation,
            "acked messages of earlier evaluations": EVALUATION_ENTRIES * _Group(recipe, 1, 0).pinned,
            "pass rates of prompts": prompts * POSTERIOR,
            "dropped prompts": prompts * DROPPED,
            "step records, or their groups that a resume reopened": _history(limits),
            "events, dead letters, weight messages": messages,
            "files of rewards": min(MOST_BYTES_TOGETHER, MOST_BYTES * len(recipe.reward_files)),
        },
        _unsized(recipe, batches),
    )


def most_inflight_groups(recipe: Recipe, memory: int) -> int | None:
    """The largest valid limits.max_inflight_groups, up to the recipe's own, with which its bound is at most `memory`.

    None if there is none.
    """

    def total(groups: int) -> int:
        limits = recipe.limits.model_copy(update={"max_inflight_groups": groups})
        return footprint(recipe.model_copy(update={"limits": limits})).total

    valid = range(recipe.least_inflight_groups, recipe.limits.max_inflight_groups + 1)
    fitting = bisect_right(valid, memory, key=total)
    return valid[fitting - 1] if fitting else None


def with_prompts(recipe: Recipe, train: int | None, sets: Mapping[str, int]) -> Recipe:
    """The recipe with the numbers of prompts that were loaded: of training prompts, and of evaluation.sets by name."""
    data = recipe.data.model_copy(update={"train": train})
    sized = tuple(entry.model_copy(update={"prompts": sets[entry.name]}) for entry in recipe.evaluation.sets)
    evaluation = recipe.evaluation.model_copy(update={"sets": sized})
    return recipe.model_copy(update={"data": data, "evaluation": evaluation})


def evaluated_prompt(recipe: Recipe, samples: int) -> int:
    """The most memory that one prompt in evaluation takes, with `samples` responses; with the overhead of Redis."""
    return int(SLACK * _evaluation(recipe, 1, samples))


class _Group:
    """Bytes of one group of `samples` responses of at most `new_tokens`. `nucleus`: those of the nucleus of a token."""

    def __init__(self, recipe: Recipe, samples: int, new_tokens: int, nucleus: int = 0) -> None:
        prompt, tokens = recipe.max_prompt_tokens, new_tokens
        self.task = TASK + prompt * TEXT_BYTES + REFERENCE_BYTES
        self.payloads = samples * (PAYLOAD + 4 * prompt + tokens * (4 + 4 + nucleus + TEXT_BYTES))
        self.hash = HASH + TOKENS + self.task + samples * VERDICT + (1 + 2 * samples) * ENTRY_FIELD
        messages = [self.task] + samples * [SAMPLE + REFERENCE_BYTES, VERDICT]
        self.messages = sum(messages)
        # When all messages around it were deleted, a message pins the whole node that it is in.
        self.pinned = sum(max(NODE, size) for size in messages)
        self.batch = BATCH_GROUP + samples * BATCH_SAMPLE


def _sets(recipe: Recipe) -> list[tuple[int, int]]:
    """Every evaluated set whose size is known: its prompts, and the samples per prompt."""
    own = [(recipe.data.held_out, recipe.evaluation.samples)] if recipe.data.held_out else []
    sized = [extra for extra in recipe.evaluation.sets if extra.prompts]
    return own + [(extra.prompts or 0, extra.samples or recipe.evaluation.samples) for extra in sized]


def _history(limits: LimitsSettings) -> int:
    """A rollout step has its record, or its groups are reopened; of one step, both may be there."""
    groups = limits.groups_per_step
    return limits.rollout_steps * (TOKENS + max(STEP + STEP_GROUP * groups, REOPENED * groups)) + REOPENED * groups


def _unsized(recipe: Recipe, batches: int) -> dict[str, int]:
    found = {}
    if recipe.data.train is None:
        found["training prompt in the file"] = int(SLACK * ((2 + batches) * POSTERIOR + DROPPED))
    whole = [entry.samples or recipe.evaluation.samples for entry in recipe.evaluation.sets if entry.prompts is None]
    if whole:
        found["prompt of a set evaluated in full"] = evaluated_prompt(recipe, max(whole))
    return found


def _evaluation(recipe: Recipe, prompts: int, samples: int) -> int:
    group = _Group(recipe, samples, recipe.evaluation_new_tokens)
    return prompts * (group.hash + group.payloads + group.pinned)
