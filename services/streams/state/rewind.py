"""Owns the rewind of a run to an older rollout step: what leaves the history, and what is drawn again.

Must not choose the step, nor the groups.

A rewind is many short calls, because Redis serves no other run during a call. Between two of them the run is
consistent: every group is counted once, and the last step record is that of the committed step. A rewind that was cut
off is started again from its beginning, which repeats nothing that was done.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from services.contracts import Event, Fence, Lane
from services.streams.connection.client import Redis
from services.streams.keys import EVALUATION_GROUP, RunKeys
from services.streams.retention import EVENTS_KEPT
from services.streams.state.ownership import RoleOwner
from services.streams.state.policy_history import groups_per_call

KEYS_PER_CALL, PROMPTS_PER_CALL = 500, 1000


@dataclass(frozen=True)
class ReopenedGroup:
    """A group that is drawn again, its prompt's id, and how many samples it may have."""

    name: str
    prompt: str
    samples: int


class Rewind(RoleOwner):
    """One rewind, by the owner of `role`. Every method may be repeated; all raise FencedError."""

    def __init__(self, redis: Redis, keys: RunKeys, role: str, fence: Fence, resumption: int) -> None:
        super().__init__(redis, keys, role, fence)
        self._streams = keys.lane(Lane.TRAIN)
        self._resumption = resumption

    async def start(self) -> bool:
        """Restart the streams; from now on no message in flight has an effect. False if the rewind was finished."""
        started = await self._call(
            "start_rewind",
            policy_key=self._keys.policy,
            queue_key=self._keys.queue,
            tasks_key=self._streams.tasks,
            samples_key=self._streams.samples,
            verdicts_key=self._streams.verdicts,
            batches_key=self._keys.batches,
            dead_key=self._keys.dead,
            resumption=self._resumption,
        )
        return bool(started)

    async def reopen(self, groups: Sequence[ReopenedGroup], step: int | None = None, entry: str = "") -> None:
        """Make groups pending again. `step`: the last step of the history, with its `entry`: all its groups are here.

        That step leaves the history together with its last groups.
        """
        size = groups_per_call(max((group.samples for group in groups), default=1))
        chunks = [groups[start : start + size] for start in range(0, len(groups), size)] or [[]]
        for chunk in chunks:
            leaves = step is not None and chunk is chunks[-1]
            await self._call(
                "reopen_groups",
                policy_key=self._keys.policy,
                counters_key=self._streams.counters,
                pending_key=self._streams.pending,
                steps_key=self._keys.steps,
                queue_key=self._keys.queue,
                unarchived_key=self._streams.unarchived,
                bare_key=self._streams.bare,
                released_key=self._streams.released,
                in_flight_key=self._streams.tokens_in_flight,
                step_tokens_key=self._keys.step_tokens,
                group_keys=[self._keys.group(group.name) for group in chunk],
                made_keys=[key for group in chunk for key in self._keys.made(group.name, group.samples)],
                step=step if leaves else "",
                step_entry=entry,
                group_list=[group.name for group in chunk],
                prompt_list=[group.prompt for group in chunk],
            )

    async def store_posteriors(self, posteriors: Mapping[str, str]) -> None:
        """Replace the sampler's posteriors, by prompt id."""
        left, first = iter(posteriors.items()), True
        while (chunk := list(islice(left, PROMPTS_PER_CALL))) or first:
            await self._call(
                "store_posteriors",
                posteriors_key=self._keys.posteriors,
                first=int(first),
                prompt_list=[prompt for prompt, _ in chunk],
                posterior_list=[posterior for _, posterior in chunk],
            )
            first = False

    async def finish(self, step: int, response_tokens: int | None, snapshots: Sequence[int], text: str) -> None:
        """End the rewind at `step`. `response_tokens` replaces the count unless None; `snapshots` of steps leave.

        An event with this text reports it.
        """
        event = Event(service="sampler", phase="rewound", text=text, at=time.time())
        await self._call(
            "finish_rewind",
            policy_key=self._keys.policy,
            counters_key=self._streams.counters,
            queue_key=self._keys.queue,
            events_key=self._keys.events,
            obsolete_keys=[self._keys.snapshot(obsolete) for obsolete in snapshots],
            resumption=self._resumption,
            step=step,
            response_tokens="" if response_tokens is None else response_tokens,
            event=event.model_dump_json(),
            events_kept=EVENTS_KEPT,
        )

    async def delete_evaluations(self, entries: Sequence[str], kept_tokens: int) -> None:
        """Delete these evaluation records, and everything in flight on the evaluation lane.

        `kept_tokens`: the response tokens of the evaluations that stay; those of all others are discarded.
        """
        lane = self._keys.lane(Lane.EVALUATION)
        streams = [lane.tasks, lane.samples, lane.verdicts]
        lists = [lane.pending, lane.released, lane.unarchived, lane.bare]
        await self._delete([*streams, *lists], entries, str(kept_tokens))
        # A sample whose payload stayed would count as published and never be drawn again. No other evaluation starts
        # meanwhile: the caller owns them.
        patterns = (self._keys.group, self._keys.partials, lambda group: self._keys.key(f"payload:{group}"))
        for pattern in [of_group(f"{EVALUATION_GROUP}*") for of_group in patterns]:
            leftovers = [key async for key in self._redis.scan_iter(pattern, KEYS_PER_CALL)]
            for start in range(0, len(leftovers), KEYS_PER_CALL):
                await self._delete(leftovers[start : start + KEYS_PER_CALL], [])

    async def _delete(self, lane_keys: Sequence[str | bytes], entries: Sequence[str], kept_tokens: str = "") -> None:
        lane = self._keys.lane(Lane.EVALUATION)
        await self._call(
            "delete_evaluations",
            evaluations_key=self._keys.evaluations,
            counters_key=lane.counters,
            in_flight_key=lane.tokens_in_flight,
            lane_keys=list(lane_keys),
            kept_tokens=kept_tokens,
            record_entry_list=list(entries),
        )
