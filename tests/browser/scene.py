"""Owns what the page's quick tests look at: runs with a history, in a real Redis, behind a real gateway.

Must not stand in for a run: tests/browser/test_whole_run.py trains one.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from services.api.server import serve_api
from services.contracts import EvaluationRecord, PassAt, RunState, StepRecord
from services.settings import parse_recipe
from services.streams.connection.client import Redis, connect
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog, append_message
from services.streams.state.runs import RunRecords
from tests.harness.api_access import ACCESS, HEADERS
from tests.harness.free_ports import free_port
from tests.harness.small_run import recipe_document

STEPS, SIZE = 12, 4
READY_S = 30


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
    return StepRecord(step=step, version=step, optimizer_steps=2, groups=("g",), metrics=metrics, **times)


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


async def fill(redis: Redis) -> list[str]:
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
    return names


@contextmanager
def gateway(redis_url: str) -> Iterator[str]:
    """A gateway over filled runs, in a thread of its own, because Playwright's thread has a loop; its address."""
    port, loop, stopping = free_port(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        redis = await connect(redis_url)
        try:
            await fill(redis)
            await serve_api(redis, ACCESS, "127.0.0.1", port, stopping)
        finally:
            await redis.aclose()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        finally:
            loop.close()

    thread = threading.Thread(target=run, name="gateway", daemon=True)
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
