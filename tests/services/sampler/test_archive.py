"""Groups that have ended are archived, whatever dies or fills up; what cannot be archived is reported."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from services.contracts import Lane, Outcome, Release
from services.sampler.archive import archivist as archiving
from services.sampler.archive.archivist import Archivist
from services.sampler.archive.rows import archived_row
from services.sampler.service import SamplerService
from services.sampler.watches.memory import RedisMemory
from services.settings import parse_recipe
from services.storage.groups.filters import SampleFilter
from services.storage.groups.parts import FOLDER, list_parts
from services.storage.groups.reader import GroupArchive
from services.storage.mirror import NO_MIRROR
from services.streams import unarchived
from services.streams.connection.functions import FencedError
from services.streams.delivery.payloads import pack, unpack
from services.streams.keys import RunKeys
from services.streams.memory_bound import archive_backlog, footprint
from services.streams.state.group_counts import group_counts
from services.streams.state.group_state import EVALUATED, GroupTransitions
from services.streams.state.rewind import ReopenedGroup, Rewind
from services.streams.unarchived import EndedGroup, Unarchived
from tests.harness.hand_fleet import HandFleet, HandLearner, evaluated, running, until
from tests.harness.small_run import recipe_document, service_context
from tests.services.driven import BODY, STATE, DrivenRun, sample_of, task_of
from verifier.service import VerifierService

pytestmark = pytest.mark.usefixtures("loaded_once")


class Archiving:
    """A driven run beside its archivist, which is called by hand, and a reader of the archive."""

    def __init__(self, run: DrivenRun, context: Any, folder: Any) -> None:
        self.run, self.context, self.folder = run, context, folder
        self.reader = GroupArchive(folder)
        self.archivist = self.next_archivist()

    def next_archivist(self) -> Archivist:
        archivist = Archivist(self.context, RedisMemory(self.context))
        archivist.open(self.run.sampler)
        return archivist

    @property
    def unarchived(self) -> Unarchived:
        return self.run.unarchived

    def rows(self) -> list[tuple[str, int, str]]:
        """All archived attempts: group, resumption, release."""
        found, cursor = {}, ""
        while cursor is not None:
            page = self.reader.search(SampleFilter(), cursor, 500)
            found |= {(sample.group, sample.resumption): sample.release for sample in page.samples}
            cursor = page.cursor
        return sorted((*attempt, release) for attempt, release in found.items())

    async def payloads(self) -> int:
        return len([key async for key in self.run.redis.scan_iter(match=self.run.keys.key("payload:*"))])

    async def events(self, phase: str) -> list[str]:
        return [event.text for _, event in await self.context.event_log.events() if event.phase == phase]


@pytest.fixture
async def driven(redis, run_id, runs):
    document = recipe_document("/none", algorithm={"group_size": 2}, limits={"max_inflight_groups": 8})
    async with service_context(redis, run_id, document, "sampler") as context:
        run = await DrivenRun.open(redis, context.keys, new=False)
        yield Archiving(run, context, runs / run_id)


@pytest.fixture
def full_disk(driven):
    """What is in the place of the archive's folder while nothing can be written there."""
    driven.folder.mkdir(parents=True, exist_ok=True)
    place = driven.folder / FOLDER
    place.write_text("")
    return place


async def test_the_archive_of_a_run_adds_up_to_its_counters(redis, run_id, runs):
    document = recipe_document("/none", limits={"rollout_steps": 3})
    keys = RunKeys(run_id)
    fleet = HandFleet(redis, keys)
    learner = HandLearner(redis, keys, fleet)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(VerifierService().run(verifier), fleet.run(), learner.run()) as tasks,
    ):
        sampling = asyncio.create_task(SamplerService().run(sampler))
        await until(lambda: evaluated(redis, keys, "after"), [*tasks, sampling], "the last evaluation")
        sampler.stopping.set()
        await asyncio.wait_for(sampling, 60)
        counts = await group_counts(redis, keys)
        evaluation = await group_counts(redis, keys, Lane.EVALUATION)
        waiting = await Unarchived(redis, keys, "sampler").backlog()
    reader = GroupArchive(runs / run_id)
    names, cursor = Counter(), ""
    while cursor is not None:
        page = reader.search(SampleFilter(), cursor, 500)
        for sample in page.samples:
            names[sample.group] += 1
        cursor = page.cursor
    stories = [story for name in names if (story := reader.find(name))]
    assert {lane: backlog.total for lane, backlog in waiting.items()} == dict.fromkeys(Lane, 0)
    for lane, counted in ((Lane.TRAIN, counts), (Lane.EVALUATION, evaluation)):
        archived = Counter(story.release for story in stories if story.lane is lane)
        ended = counted.model_dump(include={"trained", "filtered", "stale", "dead", "evaluated"})
        assert archived == +Counter(ended), lane
    left = [key async for key in redis.scan_iter(match=keys.key("payload:*"))]
    assert [key for key in left if await is_ended(redis, keys, key)] == []
    in_batch = {group.group: (batch.step, group) for batch in learner.batches for group in batch.groups}
    for story in stories:
        assert story.prompt is not None
        assert all(sample.text and len(ids) == 4 for sample, ids in zip(story.samples, story.response_ids, strict=True))
        if story.release == "trained":
            step, group = in_batch[story.group]
            assert (story.step, story.version, story.staleness) == (step, step, group.staleness)
            assert [sample.advantage for sample in story.samples] == [sample.advantage for sample in group.samples]
        elif story.release == "filtered":
            assert "no learning signal: of 4 verdicts 4 " in story.reason
            assert [sample.advantage for sample in story.samples] == [0.0] * 4
        elif story.lane is Lane.EVALUATION:
            assert (story.set, story.evaluation) in {("held-out", "before"), ("held-out", "after")}


async def is_ended(redis, keys, payload: bytes) -> bool:
    name = payload.decode().removeprefix(keys.key("payload:")).rpartition(":")[0]
    return await redis.hexists(keys.group(name), "archive")


async def test_each_end_of_a_group_is_told_with_its_reason(driven):
    run = driven.run
    await run.learner.release_batch(await run.trained(1, "g1"))
    await run.decided("g2", "filtered")
    await run.decided("g3", "kept")
    await run.sampler.release(Lane.TRAIN, "g3", Release.STALE, 2, "too old")
    task = await run.dispatched("g4")
    assert await run.publish(task.lease, sample_of(run.keys, "g4", 0))
    await run.sampler.release(Lane.TRAIN, "g4", Release.DEAD, 2, "a letter")
    assert await driven.payloads() == 7
    assert await driven.archivist.drain()
    assert await driven.payloads() == 0
    stories = {name: driven.reader.find(name) for name in ("g1", "g2", "g3", "g4")}
    told = {name: (story.release, story.reason, len(story.samples)) for name, story in stories.items()}
    assert told == {
        "g1": ("trained", "of 2 verdicts 2 correct", 2),
        "g2": ("filtered", "no learning signal: of 2 verdicts 2 correct; scores from 1 to 1", 2),
        "g3": ("stale", "too old", 2),
        "g4": ("dead", "a letter", 1),
    }
    g1, g4 = stories["g1"], stories["g4"]
    assert (g1.step, g1.version, g1.staleness) == (1, 0, 1)
    assert [(one.reward, one.advantage, one.masked, one.staleness) for one in g1.samples] == [(1.0, 1.0, False, 0)] * 2
    assert g1.response_ids == ((8, 9), (8, 9))
    assert g1.prompt_ids == (5, 6, 7)
    assert (g4.samples[0].text, g4.samples[0].outcome, g4.samples[0].spans) == (BODY.text, None, BODY.spans)
    assert [row[2] for row in driven.rows()] == ["trained", "filtered", "stale", "dead"]


async def test_a_crash_between_file_and_redis_loses_nothing(driven, monkeypatch):
    await driven.run.decided("g1", "filtered")

    async def dies(*arguments: Any, **others: Any) -> int:
        raise ConnectionAbortedError("the process died")

    with monkeypatch.context() as patched:
        patched.setattr(Unarchived, "take", dies)
        with pytest.raises(ConnectionAbortedError):
            await driven.archivist.drain()
    assert driven.reader.find("g1") is not None
    assert await driven.payloads() == 2
    await driven.run.decided("g2", "filtered")
    assert await driven.next_archivist().drain()
    assert await driven.payloads() == 0
    assert driven.rows() == [("g1", 0, "filtered"), ("g2", 0, "filtered")]
    assert len(driven.reader.search(SampleFilter(), "", 100).samples) == 4, "the row that is there twice counts once"


async def test_a_previous_sampler_takes_nothing_off(driven):
    await driven.run.decided("g1", "filtered")
    previous = driven.archivist
    driven.run.sampler = await GroupTransitions.fenced(driven.run.redis, driven.run.keys, "sampler")
    with pytest.raises(FencedError):
        await previous.drain()
    assert await driven.payloads() == 2
    assert await driven.next_archivist().drain()
    assert driven.rows() == [("g1", 0, "filtered")]


async def test_each_attempt_at_a_reopened_group_is_archived(driven):
    run = driven.run
    await run.learner.release_batch(await run.trained(1, "g1"))
    assert await driven.archivist.drain()
    rewind = Rewind(run.redis, run.keys, "sampler", run.sampler.fence, 1)
    assert await rewind.start()
    [(entry, _)] = await driven.context.event_log.steps()
    await rewind.reopen([ReopenedGroup("g1", "p0", 2)], 1, entry)
    await rewind.finish(0, None, [], "rewound")
    for consumer in (run.rollout(), run.verifier(), run.judge()):
        await consumer.open()
    await run.decided("g1", "filtered")
    assert await driven.archivist.drain()
    assert driven.rows() == [("g1", 0, "trained"), ("g1", 1, "filtered")]
    assert driven.reader.find("g1").attempts == (0, 1)
    assert await run.counts() == {"dispatched": 1, "filtered": 1}


async def test_a_full_disk_is_told_and_costs_the_oldest_responses(driven, full_disk, monkeypatch):
    monkeypatch.setattr(archiving, "POLL_S", 0.02)
    monkeypatch.setattr(archiving, "PART_S", 0.05)
    monkeypatch.setattr(archiving, "RETRY_S", 0.1)
    backlog = archive_backlog(driven.context.record.recipe)
    assert backlog == 8
    for number in range(6):
        await driven.run.decided(f"g{number}", "filtered")
    async with running(driven.archivist.run()) as tasks:
        await until(lambda: driven.events("archive-failed"), tasks, "the report")
        assert await driven.archivist.room(2) == 8 + backlog - 2 - 6, "dispatching is held back first"
        assert await driven.events("archive-incomplete") == []
        for number in range(6, 12):
            await driven.run.decided(f"g{number}", "filtered")
        monkeypatch.setattr(archiving, "PATIENCE_S", 0.3)
        await until(lambda: driven.events("archive-incomplete"), tasks, "the loss", 20)
        waiting = (await driven.unarchived.backlog())[Lane.TRAIN]
        assert (waiting.whole, waiting.bare) == (backlog // 2, 8)
        assert await driven.payloads() == 2 * waiting.whole
        full_disk.unlink()
        await until(lambda: driven.events("archive-resumed"), tasks, "the archive")
        await until(lambda: nothing_waits(driven), tasks, "all groups in the archive")
    assert await driven.events("archive-incomplete") == [
        "8 ended groups of lane train lost their responses in Redis before they were archived"
    ]
    assert len(await driven.events("archive-failed")) == 1, "one outage is one event"
    assert [row[0] for row in driven.rows()] == sorted(f"g{number}" for number in range(12))
    bare, whole = driven.reader.find("g0"), driven.reader.find("g11")
    assert [(one.text, one.outcome, one.reward) for one in bare.samples] == [(None, Outcome.CORRECT, 1.0)] * 2
    assert [(one.text, one.outcome, one.reward) for one in whole.samples] == [(BODY.text, Outcome.CORRECT, 1.0)] * 2
    assert await driven.run.counts() == {"dispatched": 12, "filtered": 12}


async def nothing_waits(driven) -> bool:
    return all(backlog.total == 0 for backlog in (await driven.unarchived.backlog()).values())


async def test_groups_that_wait_too_long_are_abandoned(driven, monkeypatch):
    monkeypatch.setattr(unarchived, "UNARCHIVED_KEPT", 3)
    for number in range(5):
        await driven.run.decided(f"g{number}", "filtered")
    assert await driven.unarchived.strip(Lane.TRAIN, 4) == (4, 1)
    assert await driven.unarchived.names(Lane.TRAIN, 9, bare=True) == ["g1", "g2", "g3"]
    assert await driven.archivist.drain()
    assert [row[0] for row in driven.rows()] == ["g1", "g2", "g3", "g4"]
    counters = await driven.run.redis.hmget(driven.run.streams.counters, "abandoned", "archived")
    assert counters == [b"1", b"4"]


async def test_a_drain_ends_while_nothing_can_be_written(driven, full_disk, monkeypatch):
    await driven.run.decided("g1", "filtered")
    assert not await driven.archivist.drain(deadline_s=0.0)
    assert await driven.payloads() == 2
    full_disk.unlink()
    assert await driven.archivist.drain(deadline_s=0.0)
    assert driven.rows() == [("g1", 0, "filtered")]


@pytest.mark.parametrize(("archive", "expected"), [("trained", ["g1"]), ("none", [])])
async def test_a_recipe_may_archive_less(redis, run_id, runs, archive, expected):
    document = recipe_document("/none", algorithm={"group_size": 2}, limits={"archive": archive})
    async with service_context(redis, run_id, document, "sampler") as context:
        driven = Archiving(await DrivenRun.open(redis, context.keys, new=False), context, runs / run_id)
        await driven.run.learner.release_batch(await driven.run.trained(1, "g1"))
        await driven.run.decided("g2", "filtered")
        assert await driven.archivist.drain()
        assert [row[0] for row in driven.rows()] == expected
        assert await driven.payloads() == 0


async def test_what_is_damaged_does_not_stop_the_archive(driven):
    run = driven.run
    for name in ("g1", "g2", "g3"):
        await run.decided(name, "filtered")
    await run.redis.hset(run.keys.payload("g1", 0), "text", "changed")
    await run.redis.delete(run.keys.payload("g1", 1))
    await run.redis.hset(run.keys.group("g2"), mapping={"task": "{", "verdict:0": "[]"})
    await run.redis.delete(run.keys.group("g3"))
    await run.redis.rpush(run.streams.unarchived, run.keys.group("../../x"))
    assert await driven.archivist.drain()
    assert [one.text for one in driven.reader.find("g1").samples] == [None, None]
    assert driven.reader.find("g2").prompt is None
    assert [one.text for one in driven.reader.find("g2").samples] == [BODY.text] * 2
    assert driven.reader.find("g3") is None
    assert await nothing_waits(driven)
    assert len(list_parts(driven.folder, NO_MIRROR)) == 1


async def test_an_evaluated_group_leaves_once_recorded_and_archived(driven, full_disk):
    """Its hash has to stay while it waits, although its evaluation has its record."""
    run, keys = driven.run, driven.run.keys
    name = "e.held-out.step-2.000001"
    await run.sampler.dispatch(Lane.EVALUATION, [task_of(name)], STATE)
    await run.sampler.record_verdicts(Lane.EVALUATION, name, [], EVALUATED, result="{}")
    await run.sampler.delete_evaluated([name])
    assert await run.state(name) == "evaluated"
    full_disk.unlink()
    assert await driven.archivist.drain()
    assert await run.state(name) is None
    story = driven.reader.find(name)
    assert (story.set, story.evaluation, story.release) == ("held-out", "step-2", "evaluated")
    assert await run.redis.llen(keys.lane(Lane.EVALUATION).released) == 0


async def test_files_hold_several_groups_and_are_merged(driven, monkeypatch):
    monkeypatch.setattr(archiving, "MOST_BYTES", 200)
    for number in range(20):
        await driven.run.decided(f"g{number:02}", "filtered")
    assert await driven.archivist.drain()
    before = len(list_parts(driven.folder, NO_MIRROR))
    assert 2 < before < 20
    monkeypatch.setattr("services.storage.groups.merging.TOGETHER", before)
    async with running(driven.archivist.merge()) as tasks:

        async def merged() -> bool:
            return len(list_parts(driven.folder, NO_MIRROR)) == 1

        await until(merged, tasks, "the merge")
    assert len(driven.rows()) == 20


def test_a_row_of_a_run_with_nuclei_has_its_text():
    """Its payload is read without the nuclei, which the checksum covers."""
    document = recipe_document("/none", rollout={"top_k": 20, "max_new_tokens": 16, "max_sequences": 32})
    fields = {name.encode(): value for name, value in pack(BODY).items()} | {b"crc": b"1"}
    with pytest.raises(LookupError):
        unpack("a key", fields)
    for changed, text in (({}, BODY.text), ({b"text": b"other"}, None), ({b"behaviour_logprobs": b""}, None)):
        ended = EndedGroup("g1", {b"state": b"dead", b"samples": b"1"}, {0: {**fields, **changed}})
        row = archived_row(parse_recipe(document), Lane.TRAIN, 0, ended, 1)
        assert [one.text for one in row.group.samples] == ([text] if text else [])


def test_groups_that_wait_are_part_of_the_memory_plan():
    plans = [
        footprint(parse_recipe(recipe_document("/none", limits={"max_inflight_groups": groups}))).parts
        for groups in (32, 128)
    ]
    waiting = [plan["groups that wait for the archive"] for plan in plans]
    assert waiting[1] == 2 * waiting[0], "a quarter of those in flight, and at least 16"
    assert all(plan["groups that wait for the archive without payloads"] > 0 for plan in plans)


async def test_the_clock_may_go_back(driven, monkeypatch):
    await driven.run.decided("g1", "filtered")
    assert await driven.archivist.drain()
    monkeypatch.setattr(archiving.time, "time_ns", lambda: 10**9)
    await driven.run.decided("g2", "filtered")
    assert await driven.next_archivist().drain()
    first, second = list_parts(driven.folder, NO_MIRROR)
    assert second.at_ms == first.at_ms + 1
