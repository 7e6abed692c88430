"""Owns the tests of the unknown verdicts that users read: which are noted, how many, and what stays of a run.

Must not repeat the verifier's tests.
"""

from __future__ import annotations

from typing import Any

import pytest

from services.contracts import Closing, Lane, Outcome
from services.streams.keys import RunKeys
from services.streams.retention import UNKNOWN_KEPT
from services.streams.state.ended.cleanup import erase
from services.streams.state.rewards import unknown
from services.streams.state.rewards.unknown import JudgedResponse, UnknownVerdicts, last_unknown, unknown_verdicts
from tests.services.driven import put_stub_record, sample_of, task_of, verdict_on


@pytest.fixture
async def keys(redis: Any, run_id: str) -> RunKeys:
    keys = RunKeys(run_id)
    await put_stub_record(redis, keys)
    await redis.hset(keys.group("g0"), "task", task_of("g0").model_dump_json())
    return keys


def judged(
    keys: RunKeys, index: int, outcome: Outcome = Outcome.UNKNOWN, *, group: str = "g0", text: str = "x"
) -> JudgedResponse:
    verdict = verdict_on(sample_of(keys, group, index), outcome)
    return JudgedResponse(verdict.model_copy(update={"reason": f"reason {index}"}), text)


async def test_unknown_verdicts_are_noted_with_prompt(redis: Any, keys: RunKeys) -> None:
    long = "a" * 500 + "the end"
    others = [judged(keys, 0, Outcome.WRONG), judged(keys, 1, Outcome.CORRECT)]
    gone = judged(keys, 3, group="gone", text="")
    await UnknownVerdicts(redis, keys).note(Lane.EVALUATION, [*others, judged(keys, 2, text=long), gone])
    (first, noted), (_, other) = await unknown_verdicts(redis, keys)
    assert (noted.lane, noted.group, noted.index, noted.reason) == (Lane.EVALUATION, "g0", 2, "reason 2")
    assert noted.prompt == task_of("g0").prompt.id
    assert (len(noted.excerpt), noted.excerpt[-7:]) == (200, "the end")
    assert (other.prompt, other.excerpt) == (None, "")
    assert [found for _, found in await unknown_verdicts(redis, keys, first)] == [other]
    assert [found for _, found in await last_unknown(redis, keys, 1)] == [other]


async def test_nothing_is_noted_without_an_unknown_one(redis: Any, keys: RunKeys) -> None:
    await UnknownVerdicts(redis, keys).note(Lane.TRAIN, [judged(keys, 0, Outcome.WRONG)])
    assert not await redis.exists(keys.unknown)


async def test_a_process_notes_a_few_per_second(redis: Any, keys: RunKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(unknown.time, "monotonic", lambda: now[0])
    notes = UnknownVerdicts(redis, keys)
    many = [judged(keys, index) for index in range(30)]
    await notes.note(Lane.TRAIN, many)
    await notes.note(Lane.TRAIN, many)
    assert await redis.xlen(keys.unknown) == unknown.NOTED_AT_ONCE
    now[0] += unknown.EVERY_S
    await notes.note(Lane.TRAIN, many[10:])
    assert [found.index for _, found in await last_unknown(redis, keys, 2)] == [12, 13]


async def test_only_the_last_are_kept(redis: Any, keys: RunKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unknown, "EVERY_S", 0.0)
    notes = UnknownVerdicts(redis, keys)
    for index in range(300):
        await notes.note(Lane.TRAIN, [judged(keys, index)])
    assert UNKNOWN_KEPT <= await redis.xlen(keys.unknown) <= 3 * UNKNOWN_KEPT
    assert (await last_unknown(redis, keys, 1))[0][1].index == 299


async def test_a_deleted_run_gets_none_and_an_expired_keeps(redis: Any, keys: RunKeys) -> None:
    await UnknownVerdicts(redis, keys).note(Lane.TRAIN, [judged(keys, 0)])
    await redis.hset(keys.record, "closing", Closing.EXPIRING.value)
    assert await erase(redis, keys, Closing.EXPIRING)
    assert len(await unknown_verdicts(redis, keys)) == 1
    await redis.unlink(keys.record, keys.unknown)
    await UnknownVerdicts(redis, keys).note(Lane.TRAIN, [judged(keys, 0)])
    assert not await redis.exists(keys.unknown)
