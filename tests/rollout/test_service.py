"""The whole service on a real server: tasks in, samples out, takeover of a dead replica's group, a clean stop.

test_weight_sync.py tests its loops on an engine that is already started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio

from rollout.prompts import ChatTokenizer
from rollout.service import RolloutService
from services.contracts import Cause, Lane, Release, Sample
from services.process.hosting import ServiceThread
from services.streams.connection.client import connect
from services.streams.delivery.consumer import tail
from services.streams.delivery.payloads import fetch
from services.streams.state.events import EventLog
from services.streams.state.group_state import GroupTransitions
from services.streams.state.heartbeat import live_processes
from services.streams.state.runs import RunRecords
from tests.harness.process_trees import alive
from tests.harness.small_run import recipe_document, service_context
from tests.rollout.hand_sampler import LEASE_S, HandSampler, leave_a_group_behind, present, task
from tests.rollout.reference import ROUNDING, Policy
from tests.rollout.sender import Sender
from tests.rollout.waiting import until

# Two engines: the service's, and one that is killed.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("vllm"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
]


@dataclass
class Fleet(HandSampler):
    """One hosted replica, with the learner's and the sampler's side."""

    service: ServiceThread
    policy: Policy
    folder: Path


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def fleet(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    folder = tmp_path_factory.mktemp("service")
    policy = Policy(folder, tied=True, seed=5)
    redis = await connect(redis_url)
    document = recipe_document(folder, limits={"lease_s": LEASE_S})
    async with service_context(redis, f"service-{uuid.uuid4().hex[:8]}", document, "learner") as context:
        run = context.record.id
        await RunRecords(redis).set_paths(run, model_path=str(folder))
        transitions = await GroupTransitions.fenced(redis, context.keys, "sampler")
        await leave_a_group_behind(context, transitions)
        service = ServiceThread(RolloutService(), run, redis_url)
        try:
            yield Fleet(context, transitions, service, policy, folder)
        finally:
            service.stop(60)
    await redis.aclose()


async def test_a_joining_replica_works_only_with_a_published_version(fleet: Fleet) -> None:
    await fleet.transitions.dispatch(Lane.TRAIN, [task("g0")], None)
    joiner = await present(fleet.context.redis, fleet.context.record.id, "joining")
    await asyncio.sleep(0.6)
    assert await fleet.context.redis.xlen(fleet.context.keys.lane(Lane.TRAIN).samples) == 1  # the dead replica's
    sender = Sender(fleet.context, joiner.id)
    ack = await sender.send(sender.plan(1, 0), fleet.policy.weights)
    assert (ack.phase, ack.member) == ("applied", joiner.id), ack.detail
    ready = await present(fleet.context.redis, fleet.context.record.id, "ready")
    assert (ready.version, ready.workers) == (0, 1)

    samples = await fleet.samples(Lane.TRAIN, "g0", 4)
    assert [sample.index for sample in samples] == [0, 1, 2, 3]
    whole, damaged = await fetch(fleet.context.redis, [sample.facts.payload for sample in samples])
    bodies = list(whole.values())
    assert damaged == {}
    tokenizer = ChatTokenizer(str(fleet.folder), 240)
    expected_prompt = tokenizer.prompt_ids(task("g0").prompt).tolist()
    assert expected_prompt[:2] == [2, 4]  # <bos><user>
    for sample, body in zip(samples, bodies, strict=True):
        assert body.prompt_ids.tolist() == expected_prompt
        assert body.text == tokenizer.text(body.response_ids)
        assert (3 in body.response_ids.tolist()) == (body.finish_reason == "stop")
        assert 3 not in body.response_ids.tolist()[:-1]
        assert [(s.version, s.start, s.end) for s in body.spans] == [(0, 0, len(body.response_ids))]
        expected = fleet.policy.logprobs(expected_prompt, body.response_ids)
        np.testing.assert_allclose(body.behaviour_logprobs, expected, atol=ROUNDING, rtol=0)
        facts = sample.facts
        assert (sample.verifier, sample.reference) == ("pattern", {"a": 2})
        assert (facts.prompt_tokens, facts.response_tokens) == (len(expected_prompt), len(body.response_ids))
        assert facts.truncated == (body.finish_reason == "length")
        assert facts.mean_logprob == pytest.approx(float(expected.mean()), abs=ROUNDING)
        assert (facts.oldest_version, facts.newest_version) == (0, 0)
        assert facts.started_at < facts.finished_at <= time.time()
    # Responses that end with their first token are equal.
    longer = [tuple(body.response_ids.tolist()) for body in bodies if len(body.response_ids) > 1]
    assert len(set(longer)) == len(longer) > 1


async def test_the_evaluation_lane_has_its_own_streams(fleet: Fleet) -> None:
    await fleet.transitions.dispatch(Lane.EVALUATION, [task("e0", samples=2)], None)
    assert len(await fleet.samples(Lane.EVALUATION, "e0", 2)) == 2
    entries = await tail(fleet.context.redis, fleet.context.keys.lane(Lane.TRAIN).samples, "0-0", 1000)
    assert "e0" not in {Sample.model_validate_json(body).group for _, body in entries}


async def test_a_dead_replicas_group_is_completed_not_repeated(fleet: Fleet) -> None:
    await fleet.samples(Lane.TRAIN, "dead", 4)
    await until(fleet.all_acked, 60)
    samples = await fleet.samples(Lane.TRAIN, "dead", 4)
    assert [sample.index for sample in samples] == [0, 1, 2, 3]
    whole, _ = await fetch(fleet.context.redis, [sample.facts.payload for sample in samples])
    texts = [body.text for body in whole.values()]
    assert texts[1] == "left"
    assert "left" not in (texts[0], texts[2], texts[3])


async def test_a_released_group_is_acked_without_work(fleet: Fleet) -> None:
    context = fleet.context
    stream = context.keys.lane(Lane.TRAIN).tasks
    await fleet.transitions.dispatch(Lane.TRAIN, [task("r0")], None)
    assert await fleet.transitions.release(Lane.TRAIN, "r0", Release.STALE, 4)
    before = await context.redis.xlen(context.keys.lane(Lane.TRAIN).samples)
    await context.redis.xadd(stream, {"m": task("r0").model_dump_json()})  # delivered again
    await until(fleet.all_acked, 60)
    assert await context.redis.xlen(context.keys.lane(Lane.TRAIN).samples) == before


async def test_a_prompt_that_is_too_long_is_a_dead_letter(fleet: Fleet) -> None:
    await fleet.transitions.dispatch(Lane.TRAIN, [task("long", text="7" * 300)], None)
    event_log = EventLog(fleet.context.redis, fleet.context.keys, "test")
    [(_, letter)] = await until(event_log.dead_letters, 60)
    assert (letter.group, letter.prompt, letter.cause) == ("long", "7" * 8, Cause.TOO_LONG)
    assert "303 tokens is not valid: expected at most 240" in letter.reason
    await until(fleet.all_acked, 60)
    assert fleet.service.alive


def engine_processes(pid: int) -> list[psutil.Process]:
    """The processes of vLLM below `pid`. Other children may end meanwhile."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie too
            if "VLLM" in "".join(child.cmdline()):
                found.append(child)
    return found


async def test_a_stop_keeps_what_is_drawn_and_leaves_nothing_behind(fleet: Fleet) -> None:
    """The task is returned, unless all of its responses ended within a moment."""
    engine = engine_processes(os.getpid())
    assert len(engine) == 1  # EngineCore, which is its own worker on one processor
    await fleet.transitions.dispatch(Lane.TRAIN, [task("last", tokens=200)], None)
    await until(fleet.all_delivered, 60)
    assert await asyncio.to_thread(fleet.service.stop, 90)
    assert fleet.service.error is None
    keys, redis = fleet.context.keys, fleet.context.redis
    published = {sample.index for sample in await fleet.all_samples(Lane.TRAIN) if sample.group == "last"}
    kept = {
        int(name.split(b":")[1]) for name in await redis.hkeys(keys.partials("last")) if name.startswith(b"tokens:")
    }
    assert published | kept <= {0, 1, 2, 3}
    assert not published & kept
    leases = await redis.xpending_range(keys.lane(Lane.TRAIN).tasks, "rollout", "-", "+", 10)
    assert [lease["consumer"] for lease in leases] == ([b"returned"] if len(published) < 4 else [])
    assert await live_processes(fleet.context.redis, fleet.context.record.id) == [fleet.context.heartbeat.info]
    _, left = await asyncio.to_thread(psutil.wait_procs, engine, 60)
    assert not left


async def test_the_engine_of_a_killed_replica_ends(fleet: Fleet, redis_url: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollout", "--run", fleet.context.record.id, "--redis", redis_url
    )
    try:
        await present(fleet.context.redis, fleet.context.record.id, "joining", pid=process.pid)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(engine_processes(process.pid)) == 1
    finally:
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()

    async def ended() -> bool:
        return not any(alive(child) for child in children)

    await until(ended, 60)
