"""A learner that was stopped, replaced and woken up: what it still writes is neither used nor lost."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from learner.archive import RunArchive
from services.storage.mirror import run_mirror
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog
from tests.harness.servers.s3_server import S3Server
from tests.learner.running import (
    Program,
    drain_ranks,
    end_ranks,
    put_batch,
    put_evaluation,
    start_programs,
    start_ranks,
    submit,
    until_event,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(torch|deepspeed)"),
    pytest.mark.filterwarnings("ignore::FutureWarning:(torch|deepspeed)"),
]
DEADLINE_S = 240.0
STOPS_ITSELF = """
import signal, threading
from learner.archive import RunArchive
from learner.checkpoint.manager import Checkpoints
from learner.service import LearnerService
from learner.training.process_group import end_with
from services.process.hosting import main
go_on = {cls}.{method}
def stop_first(*given, **named):
    if {when}:
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    return go_on(*given, **named)
{cls}.{method} = stop_first
end_with(lambda: main(lambda: LearnerService({{rank}}, {{world}}, '127.0.0.1', {{port}}), ['--run', {run!r}, '--redis', {url!r}]))
"""  # noqa: E501


async def until(condition: Any, what: str) -> None:
    ends = time.monotonic() + DEADLINE_S
    while not await condition():
        assert time.monotonic() < ends, f"{what} did not happen within {DEADLINE_S:g} s"
        await asyncio.sleep(0.05)


def start_stopping(cls: str, method: str, run: str, redis_url: str, node: Path, when: str = "True") -> list[Program]:
    """A learner that stops itself before a call of that method."""
    code = STOPS_ITSELF.format(cls=cls, method=method, when=when, run=run, url=redis_url)
    return start_programs(code, 1, [{"PENSTOCK_RUNS": str(node)}])


def is_stopped(process: Program) -> bool:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("stored", [False, True], ids=["folder", "store"])
async def test_a_learner_that_wakes_up_after_its_successor_committed(
    redis: Any, redis_url: str, run_id: str, tiny_model: Path, tmp_path: Path, request: Any, stored: bool
) -> None:
    """It is stopped before it archives step 3. Its successor trains and commits another batch of step 3."""
    if stored:
        assert isinstance(request.getfixturevalue("store"), S3Server)
    keys = RunKeys(run_id)
    nodes = [tmp_path / name for name in ("a", "b", "c")] if stored else [tmp_path / "shared"] * 3
    learner = {"checkpoint_every": 2, "checkpoints_kept": 2}
    await submit(redis, run_id, tiny_model, limits={"rollout_steps": 4}, learner=learner)
    event_log = EventLog(redis, keys, "test")

    async def steps() -> list[Any]:
        return [record for _, record in await event_log.steps()]

    async def committed(step: int) -> bool:
        return len(await steps()) >= step

    processes = start_stopping("RunArchive", "write_share", run_id, redis_url, nodes[0], "given[1].step == 3")
    [first] = processes
    try:
        for version in range(2):
            await put_batch(redis, keys, version)
        await until_event(redis, keys, "checkpoint")
        lost = await put_batch(redis, keys, 2)
        await until(lambda: asyncio.to_thread(is_stopped, first), "the first learner stops before it archives step 3")
        # The sampler reclaims the batch, and publishes another one of other groups.
        [(entry, _)] = (await redis.xrange(keys.batches))[-1:]
        await redis.xdel(keys.batches, entry)
        for group in lost.groups:
            await redis.hset(keys.group(group.group), "state", "kept")
        trained = await put_batch(redis, keys, 30, step=3)
        processes += start_ranks(run_id, redis_url, 1, [nodes[1]])
        await until(lambda: committed(3), "the second learner commits step 3")
        processes[1].kill()
        processes[1].wait(60)

        first.send_signal(signal.SIGCONT)
        assert await asyncio.to_thread(first.wait, 120) != 0
        assert "FencedError" in first.output()
        owner = (await steps())[0].owner
        late = f"step-000003.e0001-{owner}"
        assert len(list(nodes[0].rglob(f"{late}.*"))) == 2, "it finished its write"

        processes += start_ranks(run_id, redis_url, 1, [nodes[2]])
        await put_batch(redis, keys, 3)
        await put_evaluation(redis, keys)
        await until_exported(redis, keys)
        await drain_ranks(processes[2:])
    finally:
        end_ranks(processes)
    events = [event for _, event in await event_log.events()]
    [differs] = [event.text for event in events if event.phase == "archive-differs"]
    assert differs.startswith("step 3: its groups are not those of the committed step: v2g0")
    assert f"differs-{late}.json" in differs
    ready = [event.text for event in events if event.phase == "ready"]
    assert "at step 3, from the checkpoint of step 2 and 1 archived batches" in ready[-1]
    assert "(bit-identical to the committed one)" in ready[-1]
    records = await steps()
    assert [record.epoch for record in records] == [1, 1, 2, 3]
    assert records[2].groups == tuple(group.group for group in trained.groups)
    archive = RunArchive(nodes[2] / run_id)
    assert archive.trained() == {3: records[2].fence, 4: records[3].fence}
    assert len(list(archive.folder.glob(f"batches/differs-{late}.json"))) == 1


async def until_exported(redis: Any, keys: RunKeys) -> None:
    """Until the run is exported; the first two learners have failed."""
    event_log = EventLog(redis, keys, "test")

    async def exported() -> bool:
        return any(event.phase == "exported" for _, event in await event_log.events())

    await until(exported, "the export")


STEPS = 5
CASES = {
    # In its start, before anything is trained.
    "before its epoch is in the archive": ("RunArchive", "start", "True", 0),
    "before it clears up": ("Checkpoints", "clear_interrupted", "True", 0),
    "before it deletes later steps": ("RunArchive", "delete_after", "True", 0),
    # In its loop, in step 3.
    "before a record": ("RunArchive", "write_record", "given[1].step == 3", 3),
    "before it prunes": ("Checkpoints", "prune", "given[2] == 3", 3),
}
FIRST, CLEARS, DELETES, RECORD, PRUNES = CASES
KEPT, ONE_LOST, MORE_LOST = "", "5 learner-00000000", "1 learner-00000000"
"""The owner that Redis names once a failover has lost the epoch 6 of the learner that stops, and maybe earlier ones."""


@pytest.mark.parametrize(
    ("stop", "left", "stored"),
    [(stop, KEPT, False) for stop in CASES]
    + [(FIRST, ONE_LOST, False), (DELETES, ONE_LOST, False), (DELETES, MORE_LOST, False)]
    + [(stop, KEPT, True) for stop in (CLEARS, DELETES, PRUNES)],
)
async def test_a_woken_learner_takes_nothing_from_its_successor(
    redis: Any,
    redis_url: str,
    run_id: str,
    tiny_model: Path,
    tmp_path: Path,
    request: Any,
    stop: str,
    left: str,
    stored: bool,
) -> None:
    """It is stopped somewhere; its successor trains on; it wakes up and ends. A third one resumes what is there.

    `left`: the owner of the role that a failover left in Redis before the second one started; "" without a failover.
    """
    if stored:
        assert isinstance(request.getfixturevalue("store"), S3Server)
    keys = RunKeys(run_id)
    nodes = [tmp_path / name for name in ("a", "b", "c")] if stored else [tmp_path / "shared"] * 3
    learner = {"checkpoint_every": 1, "checkpoints_kept": 2}
    await submit(redis, run_id, tiny_model, limits={"rollout_steps": STEPS + 1}, learner=learner)
    event_log = EventLog(redis, keys, "test")
    await redis.set(keys.epoch("learner"), ONE_LOST)
    cls, method, when, trained = CASES[stop]
    processes = start_stopping(cls, method, run_id, redis_url, nodes[0], when)
    [first] = processes
    try:
        for version in range(trained):
            await put_batch(redis, keys, version)
        await until(lambda: asyncio.to_thread(is_stopped, first), f"the first learner stops {stop}")
        if left:
            await redis.set(keys.epoch("learner"), left)
        processes += start_ranks(run_id, redis_url, 1, [nodes[1]])
        for version in range(trained, STEPS):
            await put_batch(redis, keys, version)

        async def saved(step: int) -> bool:
            events = [event.text for _, event in await event_log.events() if event.phase == "checkpoint"]
            return any(f"step {step}:" in text for text in events)

        await until(lambda: saved(STEPS), f"the second learner writes the checkpoint of step {STEPS}")
        before = durable(run_id, nodes[1], stored)
        first.send_signal(signal.SIGCONT)

        async def went_on() -> bool:
            return first.poll() is not None or (stop == PRUNES and await saved(3))

        await until(went_on, "the first learner ends, or prunes and waits for a batch")
        if first.returncode is not None:
            # Redis had no committed policy when it started.
            expected = "has written here since" if stop == FIRST else "FencedError"
            assert expected in first.output()
        assert before <= durable(run_id, nodes[1], stored)
        processes[1].kill()
        processes[1].wait(60)
        processes += start_ranks(run_id, redis_url, 1, [nodes[2]])

        async def ready() -> list[str]:
            events = [event.text for _, event in await event_log.events() if event.phase == "ready"]
            return events[1 + bool(trained) :]

        await until(ready, "the third learner is ready")
    finally:
        end_ranks(processes)
    [text] = await ready()
    assert f"at step {STEPS}, from the checkpoint of step {STEPS} and 0 archived batches" in text
    assert "(bit-identical to the committed one)" in text
    records = [record for _, record in await event_log.steps()]
    archive = RunArchive(nodes[2] / run_id)
    assert [archive.record(step) for step in range(1, STEPS + 1)] == records
    assert not [event.text for _, event in await event_log.events() if event.phase == "archive-differs"]


def durable(run: str, node: Path, stored: bool) -> set[str]:
    """The files of the run's steps, where they are durable."""
    if stored:
        found = set(run_mirror(run).listed())
    else:
        found = {str(path.relative_to(node / run)) for path in (node / run).rglob("*") if path.is_file()}
    return {name for name in found if name.startswith(("batches/step", "records/", "checkpoints/step", "run"))}
