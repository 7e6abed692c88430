"""Counts of the data plane: Redis calls per group, calls per turn of the sampler, and messages per rollout step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from services.streams.state.events import EventLog
from services.streams.state.group_state import GroupTransitions
from services.streams.state.policy_history import read_policy
from tests.operation_counts.bounds import CountExceededError, check
from tests.operation_counts.counted_client import EMPTY, EVALUATION
from tests.operation_counts.pipeline import GROUPS, SAMPLES, Step, trained_step

pytestmark = pytest.mark.timeout(120)

BY_TIME = {
    *("heartbeat", "renew_lease", "trim", "read_together", "INFO", "TIME", "HGETALL heartbeats", "GET epoch"),
    *("XPENDING tasks", "XPENDING samples", "XPENDING verdicts"),
    *("XAUTOCLAIM tasks", "XAUTOCLAIM samples", "XAUTOCLAIM verdicts"),
    *("XLEN tasks", "XLEN samples", "XLEN verdicts", "SSCAN pending", "LLEN released"),
    *("XINFO GROUPS tasks", "XINFO GROUPS samples", "XINFO GROUPS verdicts"),
    *("LLEN unarchived", "LLEN unarchived-bare", "XRANGE dead"),
}
"""What services repeat every so many milliseconds, whatever the groups do."""
BY_TURN = {"EXISTS starved", "HGET record", "HMGET record", "HGETALL policy"}
"""What the sampler reads in each turn of its queue; a turn reads verdicts once, and waits for them."""


def work(calls: Counter[str], left_out: set[str]) -> int:
    """How many calls follow the groups: not those of a clock, of the evaluation, or for nothing."""
    return sum(
        count
        for name, count in calls.items()
        if name not in left_out and not name.endswith(EMPTY) and EVALUATION not in name
    )


def check_calls(step: Step) -> None:
    """Check what each service sends for a group."""
    for service, calls in step.calls.items():
        # The learner's stub reads the policy whenever it looks for replicas that join.
        left_out = BY_TIME | {"sampler": BY_TURN, "learner": {"HGETALL policy"}}.get(service, set())
        print(
            service,
            work(calls, left_out) / GROUPS,
            sorted((count, name) for name, count in calls.items() if name not in left_out),
        )
        check(f"Redis calls per group: {service}", work(calls, left_out) / GROUPS)


def check_turns(step: Step) -> None:
    """Check what a turn of the sampler's queue reads."""
    calls = step.calls["sampler"]
    turns = calls["XREADGROUP verdicts"] + calls[f"XREADGROUP verdicts{EMPTY}"]
    print(f"{turns} turns", {name: calls[name] for name in BY_TURN})
    check("Redis calls per turn of the sampler", sum(calls[name] for name in BY_TURN) / turns)


def check_messages(step: Step) -> None:
    """Check how many entries a step adds to all streams, over the responses in it."""
    print(step.entries)
    check("messages per response", step.entries.total() / (GROUPS * SAMPLES))


@pytest.fixture
async def counted(redis: Any, redis_url: str, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    async def step() -> Step:
        return await trained_step(redis, redis_url, run_id, tmp_path, monkeypatch)

    return step


async def test_a_step_sends_no_more_than_needed(counted: Any) -> None:
    step = await counted()
    check_calls(step)
    check_turns(step)
    check_messages(step)


async def test_operations_that_were_added_are_noticed(counted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command for each verdict in the verifier, a read of the policy in the sampler, and an event for each group."""
    publish, record = GroupTransitions.publish_verdicts, GroupTransitions.record_verdicts

    async def asking(self: Any, lane: Any, verdicts: Any) -> Any:
        for _, verdict in verdicts:
            await self._redis.hget(self._keys.group(verdict.group), "state")
        await EventLog(self._redis, self._keys, "verifier").write("verdict", "on a group")
        return await publish(self, lane, verdicts)

    async def reading(self: Any, *arguments: Any, **others: Any) -> Any:
        await read_policy(self._redis, self._keys)
        return await record(self, *arguments, **others)

    monkeypatch.setattr(GroupTransitions, "publish_verdicts", asking)
    monkeypatch.setattr(GroupTransitions, "record_verdicts", reading)
    step = await counted()
    for noticed, count in (
        (check_calls, "Redis calls per group: verifier"),
        (check_turns, "Redis calls per turn of the sampler"),
        (check_messages, "messages per response"),
    ):
        with pytest.raises(CountExceededError, match=count):
            noticed(step)
