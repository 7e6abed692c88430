"""Owns what the page's quick tests look at: runs with a history, in a real Redis, behind a real gateway.

Must not stand in for a run: tests/browser/test_whole_run.py trains one.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from services.api.access.roles import EVERY_PROJECT, Principal, Role
from services.api.access.tokens import TokenAccess, local_principal, token_digest
from services.api.server import serve_api
from services.contracts import (
    EvaluationRecord,
    Lane,
    OptimizerStepRecord,
    Outcome,
    PassAt,
    Prompt,
    RunState,
    StepRecord,
    VersionSpan,
)
from services.settings import parse_recipe
from services.storage.groups.parts import write_part
from services.storage.groups.story import ArchivedGroup, ArchivedSample, GroupRow, GroupTokens
from services.storage.mirror import NO_MIRROR
from services.streams.connection.client import Redis, connect
from services.streams.keys import RunKeys
from services.streams.runs.ledger import BUSY, GPU_MS, IDLE, LedgerWriter, charged_field
from services.streams.state.events import EventLog, append_message
from services.streams.state.ownership import become_owner
from services.streams.state.run_record import DEFAULT_PROJECT
from services.streams.state.runs import OWNER, RunRecords
from tests.harness.api_access import HEADERS, TOKEN
from tests.harness.free_ports import free_port
from tests.harness.small_run import recipe_document

STEPS, SIZE = 12, 4
READY_S = 30
GROUP, GROUP_STEP = "g00000021", 7
VIEWER = "token-of-a-viewer"
ACCESS = TokenAccess(
    {
        token_digest(TOKEN): local_principal(),
        token_digest(VIEWER): Principal("viewer", {EVERY_PROJECT: Role.VIEWER}),
    }
)


def step_record(step: int) -> StepRecord:
    """A rollout step whose metrics change as those of a run that learns."""
    learned = 1 - math.exp(-step / 5)
    counts = {f"groups_with_{n}_of_{SIZE}_correct": float(round(6 * learned**n) + n % 2) for n in range(SIZE + 1)}
    metrics = {
        "accuracy": 0.2 + 0.6 * learned,
        "reward": -0.6 + 1.2 * learned,
        "score": 0.2 + 0.6 * learned,
        "entropy": 1.8 - learned,
        "mean_token_probability": 0.4 + 0.4 * learned,
        "response_length": 14 - 4 * learned,
        "truncated_share": 0.2 * (1 - learned),
        "clip_high_share": 0.01 + 0.01 * (step % 3),
        "clip_low_share": 0.005,
        "staleness_mean": 0.5,
        "staleness_max": 1.0,
        "logprob_difference_mean": 1e-6,
        "logprob_difference_p99": 4e-6,
        "effective_sample_size": 0.97,
        "gradient_norm": 2.5 - learned,
        "tokens_per_second": 90.0 + step,
        "groups_kept": 4.0,
        "groups_filtered": 6.0 - 3 * learned,
        "groups_stale": float(step % 2),
        "groups_dead": 0.0,
        **counts,
    }
    times = {"generation_started_at": 1.0, "generation_finished_at": 2.0}
    times |= {"learning_started_at": 2.0, "learning_finished_at": 3.0}
    optimizer = tuple(OptimizerStepRecord(loss=loss, gradient_norm=1.75, applied=True) for loss in (0.5, 0.25))
    return StepRecord(
        step=step, version=step, optimizer_steps=2, groups=("g",), metrics=metrics, optimizer=optimizer, **times
    )


def evaluation_record(name: str, version: int, accuracy: float) -> EvaluationRecord:
    """The scores of the held-out set at a version."""
    return EvaluationRecord(
        name=name,
        version=version,
        prompts=8,
        samples_per_prompt=2,
        accuracy=accuracy,
        standard_error=0.05,
        pass_at=(PassAt(k=1, value=accuracy, standard_error=0.05), PassAt(k=2, value=0.9, standard_error=0.04)),
        majority=accuracy,
        majority_standard_error=0.05,
        unknown=0,
    )


def archived_group() -> GroupRow:
    """A group with a correct and a wrong sample, which the second optimizer step of its rollout step trained."""
    texts = ("1 + 5 = 6", "The answer is 1.")
    samples = tuple(
        ArchivedSample(
            index=index,
            outcome=Outcome.WRONG if index else Outcome.CORRECT,
            score=1.0 - index,
            answer="16"[1 - index],
            reward=-1.0 if index else 1.0,
            advantage=-0.87 if index else 0.87,
            response_tokens=5,
            mean_logprob=-0.4,
            replica="rollout-1",
            finish_reason="stop",
            text=text,
            spans=(VersionSpan(version=5, start=0, end=3), VersionSpan(version=6, start=3, end=5)),
        )
        for index, text in enumerate(texts)
    )
    prompt = Prompt(
        id="p000004",
        messages=({"role": "user", "content": "What is 1 + 5?"},),
        verifier="math",
        reference={"answer": "6"},
    )
    group = ArchivedGroup(
        group=GROUP,
        lane=Lane.TRAIN,
        resumption=0,
        release="trained",
        reason="of 2 verdicts 1 correct, 1 wrong",
        step=GROUP_STEP,
        optimizer_step=2,
        version=GROUP_STEP,
        staleness=1,
        archived_ms=1,
        prompt=prompt,
        samples=samples,
    )
    ids = tuple(np.arange(5, dtype=np.int32) for _ in samples)
    return GroupRow(group, GroupTokens(np.array([7], np.int32), ids, tuple(-each / 4.0 for each in ids)))


async def charge(redis: Redis, keys: RunKeys) -> None:
    """A ledger that closes: of 1,000 tokens 700 were trained and 200 filtered; the fleet was busy for an hour."""
    lane = keys.lane(Lane.TRAIN)
    used = {"tokens_generated": 1000, "tokens_trained": 700, "tokens_filtered": 200}
    await redis.hset(lane.counters, mapping=used)
    await redis.hset(lane.tokens_in_flight, GROUP, 100)
    writer = LedgerWriter(redis, keys, await become_owner(redis, keys, OWNER), DEFAULT_PROJECT)
    hours = {"rollout": (BUSY, 1.0), "learner": (IDLE, 0.5)}
    amounts = {charged_field(name, state, GPU_MS): round(part * 3_600_000) for name, (state, part) in hours.items()}
    await writer.charge(time.time(), amounts)


async def fill(redis: Redis, runs: Path) -> list[str]:
    """Three runs: one that runs and has a history, one that is queued, one that failed; their ids."""
    records = RunRecords(redis)
    names = [f"browser-{word}" for word in ("running", "queued", "failed")]
    for name in names:
        await records.create(name, parse_recipe(recipe_document("/model")))
    running, _, failed = names
    for state, reason in ((RunState.STARTING, "placing services"), (RunState.RUNNING, "the fleet is ready")):
        await records.transition(running, state, reason)
    await records.transition(failed, RunState.FAILED, "no progress for 600 s (limits.stall_timeout_s)")
    keys = RunKeys(running)
    log = EventLog(redis, keys, "controller")
    await log.write("starting-services", "sampler, verifier, rollout, learner")
    for step in range(1, STEPS + 1):
        await append_message(redis, keys, keys.steps, step_record(step), 0)
    for name, version, accuracy in (("before", 0, 0.22), ("step-10", 10, 0.7)):
        await append_message(redis, keys, keys.evaluations, evaluation_record(name, version, accuracy), 0)
    await log.write("service-ready", "rollout <b>not markup</b>")
    write_part(runs / running, NO_MIRROR, [archived_group()])
    await redis.set(keys.checkpoints, "[10]")
    await charge(redis, keys)
    return names


@contextmanager
def gateway(redis_url: str) -> Iterator[str]:
    """A gateway over filled runs, in a thread of its own, because Playwright's thread has a loop; its address."""
    port, loop, stopping = free_port(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        redis = await connect(redis_url)
        try:
            await fill(redis, Path(runs))
            await serve_api(redis, ACCESS, "127.0.0.1", port, stopping)
        finally:
            await redis.aclose()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        finally:
            loop.close()

    thread = threading.Thread(target=run, name="gateway", daemon=True)
    with tempfile.TemporaryDirectory() as runs, pytest.MonkeyPatch.context() as patched:
        patched.setenv("PENSTOCK_RUNS", runs)
        thread.start()
        address, ends = f"http://127.0.0.1:{port}", time.monotonic() + READY_S
        try:
            while not _answers(address):
                assert thread.is_alive(), "the gateway has ended"
                assert time.monotonic() < ends, f"the gateway did not answer within {READY_S} s"
                time.sleep(0.05)
            yield address
        finally:
            loop.call_soon_threadsafe(stopping.set)
            thread.join(READY_S)


def _answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/readyz", timeout=5, headers=HEADERS).status_code == 200
    except httpx.HTTPError:
        return False
