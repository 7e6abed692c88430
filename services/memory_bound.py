"""Owns the bound on a run's memory in Redis, computed from its recipe: what can be there at once, and how large it is.

Must not talk to Redis. tests/services/test_soak.py holds it against a server.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.contracts import Lane
from services.settings import Recipe
from services.streams.delivery.validation import LARGEST_LETTER
from services.streams.retention import (
    DEAD_KEPT,
    EVENTS_KEPT,
    REDRIVEN_KEPT,
    REDRIVEN_PENDING,
    RELEASED_KEPT,
    WEIGHT_MESSAGES_KEPT,
)

TEXT_BYTES = 8
"""Assumed bytes of text of a token, on average over a prompt or response; English has about four."""
REFERENCE_BYTES = 4096
"""Assumed longest reference of a prompt, as JSON."""
EVALUATION_ENTRIES = 64
"""Entries that each stream of an evaluation may keep because one of an earlier evaluation is unacked."""
NODE = 4096
"""Bytes that Redis frees at once of a stream (stream-node-max-bytes): one entry that is left holds on to them."""
SLACK = 1.3
"""Redis' own share: dictionary and stream nodes, allocation classes, tables that grow by doubling."""

TASK, SAMPLE, VERDICT, HASH, PAYLOAD = 900, 900, 1500, 700, 900
"""Bytes beyond texts, references and tokens. A verdict's includes its answer (200 characters) and reason (300)."""
BATCH_SAMPLE, BATCH_GROUP, POSTERIOR, STEP, EVENT, PLAN, NAMES = 330, 250, 220, 6000, 600, 1200, 300
ALWAYS = 2 * 2**20
"""The library, heartbeat, the record, counters."""


@dataclass(frozen=True)
class Footprint:
    """Bytes by what takes them; and those of each prompt of a file that the recipe takes whole, without its number."""

    parts: dict[str, int]
    per_training_prompt: int
    per_held_out_prompt: int

    @property
    def total(self) -> int:
        """The bound, with Redis' own share."""
        return int(SLACK * sum(self.parts.values())) + ALWAYS


def groups_under_way(recipe: Recipe) -> int:
    """The most training groups that are pending at once: those that the sampler has slots for, and redriven ones."""
    return recipe.limits.max_inflight_groups + REDRIVEN_PENDING


def longest_streams(recipe: Recipe, lane: Lane) -> dict[str, int]:
    """Entries from which on a lane's tasks, samples and verdicts lose what was acked behind an unacked one.

    In training as many as all groups under way have, so that nothing goes early and a stream is no longer than if none
    of it had been acked. An evaluation has its own end, at which nothing of it is left but what something pins.
    """
    if lane is Lane.EVALUATION:
        return dict.fromkeys(("tasks", "samples", "verdicts"), EVALUATION_ENTRIES)
    groups = groups_under_way(recipe)
    results = groups * recipe.algorithm.group_size
    return {"tasks": groups, "samples": results, "verdicts": results}


def footprint(recipe: Recipe) -> Footprint:
    """The most that a run of this recipe has in Redis, while its checkpoints can be written.

    The streams of groups under way count twice. Right after the sampler has trimmed them they hold what is unacked, or
    `longest_streams` where that is more: at most the messages of all groups under way, each of which may be the last
    in its stream node. Until it trims again (sampler.housekeeping, every 2 s) no more groups are taken to pass than
    may be under way.
    """
    limits, learner = recipe.limits, recipe.learner
    group = _Group(recipe, recipe.algorithm.group_size, recipe.rollout.max_new_tokens)
    # While one checkpoint is written, no more steps are trained than lead to the next.
    uncovered = limits.groups_per_step * max(1, 2 * learner.checkpoint_every)
    batches = 1 + limits.max_staleness + max(1, 2 * learner.checkpoint_every)
    prompts = recipe.data.train or 0
    evaluation = max((_evaluation(recipe, prompts, samples) for prompts, samples in _sets(recipe)), default=0)
    letter = min(LARGEST_LETTER, group.task)
    return Footprint(
        {
            "groups under way": groups_under_way(recipe) * (group.hash + group.payloads),
            "trained groups that no checkpoint covers": uncovered * (group.hash + group.payloads),
            "streams of groups under way": groups_under_way(recipe) * (group.pinned + group.messages),
            "batches and sampler snapshots": batches * (group.batch * limits.groups_per_step + prompts * POSTERIOR),
            "released groups": RELEASED_KEPT * group.hash,
            "evaluation": evaluation,
            "acked messages of earlier evaluations": EVALUATION_ENTRIES * _Group(recipe, 1, 0).pinned,
            "pass rates of prompts": prompts * POSTERIOR,
            "step records": limits.rollout_steps * (STEP + 120 * limits.groups_per_step),
            "events, dead letters, weight messages": (
                EVENTS_KEPT * EVENT + DEAD_KEPT * letter + 2 * WEIGHT_MESSAGES_KEPT * PLAN
                + (2 * REDRIVEN_KEPT + REDRIVEN_PENDING) * NAMES
            ),
        },
        int(SLACK * (1 + batches) * POSTERIOR),
        int(SLACK * _evaluation(recipe, 1, recipe.evaluation.samples)),
    )  # fmt: skip


class _Group:
    """Bytes of one group of `samples` responses of at most `new_tokens`."""

    def __init__(self, recipe: Recipe, samples: int, new_tokens: int) -> None:
        prompt, tokens = recipe.max_prompt_tokens, new_tokens
        self.task = TASK + prompt * TEXT_BYTES + REFERENCE_BYTES
        self.payloads = samples * (PAYLOAD + 4 * prompt + tokens * (4 + 4 + TEXT_BYTES))
        self.hash = HASH + self.task + samples * VERDICT
        messages = [self.task] + samples * [SAMPLE + REFERENCE_BYTES, VERDICT]
        self.messages = sum(messages)
        # While everything around it was dropped, a message takes the node that it is in.
        self.pinned = sum(max(NODE, one) for one in messages)
        self.batch = BATCH_GROUP + samples * BATCH_SAMPLE


def _sets(recipe: Recipe) -> list[tuple[int, int]]:
    """Every evaluated set whose size is known: its prompts, and samples of each."""
    own = [(recipe.data.held_out, recipe.evaluation.samples)] if recipe.data.held_out else []
    return own + [
        (one.prompts, one.samples or recipe.evaluation.samples) for one in recipe.evaluation.sets if one.prompts
    ]  # fmt: skip


def _evaluation(recipe: Recipe, prompts: int, samples: int) -> int:
    group = _Group(recipe, samples, recipe.evaluation_new_tokens)
    return prompts * (group.hash + group.payloads + group.pinned)
