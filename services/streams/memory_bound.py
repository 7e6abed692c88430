"""Owns the bound on a run's memory in Redis, computed from its recipe: what it can hold at once, and its size.

Must not talk to Redis. tests/services/sampler/test_soak.py compares it with a server.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.contracts import Lane
from services.settings import Recipe
from services.streams.delivery.validation import LARGEST_LETTER
from services.streams.retention import DEAD_KEPT, EVENTS_KEPT, RELEASED_KEPT, WEIGHT_MESSAGES_KEPT

TEXT_BYTES = 8
"""Assumed bytes of text per token, on average over a prompt or response; English has about four."""
REFERENCE_BYTES = 4096
"""Assumed longest reference of a prompt, as JSON."""
EVALUATION_ENTRIES = 64
"""Entries that each stream of an evaluation may keep because an entry of an earlier evaluation is unacked."""
NODE = 4096
"""Bytes of a stream that Redis frees at once (stream-node-max-bytes): one remaining entry pins all of them."""
SLACK = 1.3
"""Overhead of Redis: dictionary and stream nodes, allocation classes, tables that grow by doubling."""

TASK, SAMPLE, VERDICT, HASH, PAYLOAD = 900, 900, 1500, 700, 900
"""Bytes beyond texts, references and tokens. A verdict's includes its answer (200 characters) and reason (300)."""
BATCH_SAMPLE, BATCH_GROUP, POSTERIOR, STEP, EVENT, PLAN, DROPPED = 330, 250, 220, 6000, 600, 1200, 150
ALWAYS = 2 * 2**20
"""The library, heartbeats, the record, counters."""


@dataclass(frozen=True)
class Footprint:
    """Bytes by purpose; and bytes per prompt of a file whose number of prompts the recipe does not set."""

    parts: dict[str, int]
    per_training_prompt: int
    per_held_out_prompt: int

    @property
    def total(self) -> int:
        """The bound, with the overhead of Redis."""
        return int(SLACK * sum(self.parts.values())) + ALWAYS


def longest_streams(recipe: Recipe, lane: Lane) -> dict[str, int]:
    """The length of each stream of a lane above which the trim also deletes acked entries after an unacked one.

    In training, the number of messages of all groups in flight: a stream is never longer than if none of these
    messages had been acked, and no shorter one loses entries early. After an evaluation only pinned entries are left.
    """
    if lane is Lane.EVALUATION:
        return dict.fromkeys(("tasks", "samples", "verdicts"), EVALUATION_ENTRIES)
    groups = recipe.limits.max_inflight_groups
    results = groups * recipe.algorithm.group_size
    return {"tasks": groups, "samples": results, "verdicts": results}


def footprint(recipe: Recipe) -> Footprint:
    """The most memory that a run of this recipe uses in Redis, as long as its checkpoints can be written.

    The streams of groups in flight count twice. Right after the sampler trimmed them they hold the unacked messages, or
    `longest_streams` if that is more: at most the messages of all groups in flight, each of which may be the last in
    its stream node. Until the next trim (the sampler's maintenance, every 2 s) the bound assumes that no more groups
    pass than may be in flight.
    """
    limits, learner = recipe.limits, recipe.learner
    group = _Group(recipe, recipe.algorithm.group_size, recipe.rollout.max_new_tokens)
    # While a checkpoint is being written, at most the steps until the next one are trained.
    uncovered = limits.groups_per_step * max(1, 2 * learner.checkpoint_every)
    batches = 1 + limits.max_staleness + max(1, 2 * learner.checkpoint_every)
    prompts = recipe.data.train or 0
    evaluation = max((_evaluation(recipe, prompts, samples) for prompts, samples in _sets(recipe)), default=0)
    letter = min(LARGEST_LETTER, group.task)
    messages = EVENTS_KEPT * EVENT + DEAD_KEPT * letter + 2 * WEIGHT_MESSAGES_KEPT * PLAN
    return Footprint(
        {
            "groups in flight": limits.max_inflight_groups * (group.hash + group.payloads),
            "trained groups that no checkpoint covers": uncovered * (group.hash + group.payloads),
            "streams of groups in flight": limits.max_inflight_groups * (group.pinned + group.messages),
            "batches and sampler snapshots": batches * (group.batch * limits.groups_per_step + prompts * POSTERIOR),
            "released groups": RELEASED_KEPT * group.hash,
            "evaluation": evaluation,
            "acked messages of earlier evaluations": EVALUATION_ENTRIES * _Group(recipe, 1, 0).pinned,
            "pass rates of prompts": prompts * POSTERIOR,
            "dropped prompts": prompts * DROPPED,
            "step records": limits.rollout_steps * (STEP + 120 * limits.groups_per_step),
            "events, dead letters, weight messages": messages,
        },
        int(SLACK * ((1 + batches) * POSTERIOR + DROPPED)),
        int(SLACK * _evaluation(recipe, 1, recipe.evaluation.samples)),
    )


class _Group:
    """Bytes of one group of `samples` responses of at most `new_tokens`."""

    def __init__(self, recipe: Recipe, samples: int, new_tokens: int) -> None:
        prompt, tokens = recipe.max_prompt_tokens, new_tokens
        self.task = TASK + prompt * TEXT_BYTES + REFERENCE_BYTES
        self.payloads = samples * (PAYLOAD + 4 * prompt + tokens * (4 + 4 + TEXT_BYTES))
        self.hash = HASH + self.task + samples * VERDICT
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


def _evaluation(recipe: Recipe, prompts: int, samples: int) -> int:
    group = _Group(recipe, samples, recipe.evaluation_new_tokens)
    return prompts * (group.hash + group.payloads + group.pinned)
