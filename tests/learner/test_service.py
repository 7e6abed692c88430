"""The learner as a service, with a real server: batches in, versions and step records out, an export that loads."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from learner.service import LearnerService
from services.contracts import Batch, BatchGroup, BatchSample, Lane, SamplerState
from services.settings import parse_recipe
from services.shell import ServiceThread
from services.streams.effects import group_counts
from services.streams.journal import Journal
from services.streams.keys import RunKeys
from services.streams.payloads import SamplePayload, pack
from services.streams.presence import live_processes
from services.streams.records import RunRecords
from tests.conftest import recipe_document
from tests.learner.receiver import Receiver

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(torch|deepspeed)"),
    pytest.mark.filterwarnings("ignore::FutureWarning:(torch|deepspeed)"),
]


@pytest.fixture(autouse=True)
def runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("PENSTOCK_HOST", "127.0.0.1")
    return tmp_path / "runs"


async def submit(redis: Any, run: str, model: Path, **sections: dict[str, Any]) -> None:
    records = RunRecords(redis)
    await records.create(run, parse_recipe(recipe_document(model, **sections)))
    await records.set_paths(run, model_path=str(model))


async def put_batch(redis: Any, keys: RunKeys, version: int) -> Batch:
    """Four groups of four responses, as the sampler leaves them: payloads stored, groups batched and pending."""
    draw = np.random.default_rng(version)
    groups = []
    for name in (f"v{version}g{index}" for index in range(4)):
        samples = []
        prompt = draw.integers(0, 107, 8, dtype=np.int32)
        for index, advantage in enumerate((1.5, -0.5, -0.5, -0.5)):
            tokens = int(draw.integers(2, 9))
            payload = SamplePayload(
                prompt, draw.integers(0, 107, tokens, dtype=np.int32), np.full(tokens, -4.5, np.float32), "", "stop", ()
            )
            await redis.hset(keys.payload(name, index), mapping=pack(payload))
            samples.append(BatchSample(
                payload=keys.payload(name, index), tokens=tokens, advantage=advantage, reward=1.0, correct=index == 0,
                masked=False, staleness=0,
            ))  # fmt: skip
        await redis.hset(keys.group(name), "state", "batched")
        await redis.sadd(keys.lane(Lane.TRAIN).pending, name)
        await redis.hincrby(keys.lane(Lane.TRAIN).counters, "dispatched", 1)
        groups.append(BatchGroup(group=name, samples=tuple(samples)))
    batch = Batch(
        step=version, version=version, groups=tuple(groups), sampler_state=SamplerState(cursor=0, next_group=0),
        sampling_metrics={"accuracy": 0.25}, generation_started_at=1.0, generation_finished_at=2.0,
    )  # fmt: skip
    await redis.xadd(keys.batches, {"m": batch.model_dump_json()})
    return batch


async def until_event(redis: Any, keys: RunKeys, phase: str, deadline_s: float = 90.0) -> str:
    ends = time.monotonic() + deadline_s
    while True:
        events = [event for _, event in await Journal(redis, keys, "test").events()]
        found = [event.text for event in events if event.phase == phase]
        if found:
            return found[0]
        assert time.monotonic() < ends, f"no event {phase!r} within {deadline_s} s, but {events}"
        assert not any(event.phase == "service-failed" for event in events), events
        await asyncio.sleep(0.1)


async def stop(thread: ServiceThread) -> None:
    assert await asyncio.to_thread(thread.stop, 20.0), "the learner did not drain within 20 s"
    assert thread.error is None, thread.error


async def test_a_run_from_the_initial_weights_to_the_export(
    redis: Any, redis_url: str, run_id: str, tiny_model: Path, runs_folder: Path
) -> None:
    keys = RunKeys(run_id)
    await submit(redis, run_id, tiny_model, limits={"rollout_steps": 2}, learner={"gradient_clip": 0.5})
    thread = ServiceThread(LearnerService(), run_id, redis_url)
    replica = Receiver(redis, run_id, "replica")
    receiving = asyncio.create_task(replica.run())
    try:
        await until_event(redis, keys, "ready")
        initial = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
        async with asyncio.timeout(30):
            await replica.received.wait()
        assert all(torch.equal(tensor, initial[name]) for name, tensor in replica.weights.items())
        assert "lm_head.weight" not in replica.weights
        for version in range(2):
            batch = await put_batch(redis, keys, version)
            await redis.xadd(keys.batches, {"m": batch.model_dump_json()})  # published twice, to be learned once
        folder = Path((await until_event(redis, keys, "exported")).rpartition(" is in ")[2])
    finally:
        await stop(thread)
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
    await check_records(redis, keys)
    assert replica.version == 2
    assert folder == runs_folder / run_id / "export"
    assert (await RunRecords(redis).get(run_id)).export_path == str(folder)
    check_export(folder, replica, initial)


async def check_records(redis: Any, keys: RunKeys) -> None:
    steps = [step for _, step in await Journal(redis, keys, "test").steps()]
    assert [(step.step, step.version, step.optimizer_steps, len(step.groups)) for step in steps] == [
        (0, 1, 2, 4), (1, 2, 2, 4),
    ]  # fmt: skip
    assert await Journal(redis, keys, "test").policy_version() == 2
    metrics = steps[0].metrics
    assert metrics["accuracy"] == 0.25
    assert metrics["learning_rate"] == 1e-3
    assert metrics["zero_advantage_share"] == 0.0
    assert 0 < metrics["mean_token_probability"] < 1
    assert metrics["learning_seconds"] <= steps[0].learning_finished_at - steps[0].learning_started_at
    counts = await group_counts(redis, keys)
    assert (counts.trained, counts.pending, counts.reconciled) == (8, 0, True)
    assert (await redis.xpending(keys.batches, "learner"))["pending"] == 0
    assert await redis.ttl(keys.group("v0g0")) > 0
    assert await live_processes(redis, keys.run) == []


def check_export(folder: Path, replica: Receiver, initial: dict[str, torch.Tensor]) -> None:
    exported, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = exported.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in replica.weights.items())
    assert exported.lm_head.weight is exported.model.embed_tokens.weight
    moved = max(float((tensor - initial[name]).abs().max()) for name, tensor in replica.weights.items())
    # Four AdamW steps at 1e-3 without decay move a weight by at most 4e-3.
    assert 1e-3 < moved < 4.1e-3
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert exported.generation_config.eos_token_id == 3


async def test_a_missing_payload_fails_the_learner_and_leaves_the_batch(
    redis: Any, redis_url: str, run_id: str, tiny_model: Path
) -> None:
    keys = RunKeys(run_id)
    await submit(redis, run_id, tiny_model)
    batch = await put_batch(redis, keys, 0)
    gone = batch.groups[1].samples[2].payload
    await redis.delete(gone)
    thread = ServiceThread(LearnerService(), run_id, redis_url)
    try:
        ends = time.monotonic() + 60
        while thread.alive:
            assert time.monotonic() < ends, "the learner went on without a payload"
            await asyncio.sleep(0.1)
    finally:
        thread.stop(20)
    assert gone in str(thread.error)
    events = [event.text for _, event in await Journal(redis, keys, "test").events() if event.phase == "service-failed"]
    assert len(events) == 1
    assert "PayloadMissingError" in events[0]
    assert (await redis.xpending(keys.batches, "learner"))["pending"] == 1
    assert (await group_counts(redis, keys)).trained == 0


async def test_a_run_whose_weights_are_lost_is_refused(
    redis: Any, redis_url: str, run_id: str, tiny_model: Path
) -> None:
    keys = RunKeys(run_id)
    await submit(redis, run_id, tiny_model)
    await redis.set(keys.version, 3)
    thread = ServiceThread(LearnerService(), run_id, redis_url)
    await asyncio.to_thread(thread._thread.join, 60)
    assert "policy version 3" in str(thread.error)


@pytest.fixture
def two_ranks(redis_url: str, run_id: str, tmp_path: Path) -> Iterator[Any]:
    """Starts both ranks of a learner as processes of their own."""
    processes: list[subprocess.Popen[str]] = []

    def begin() -> list[subprocess.Popen[str]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(2):
            code = (
                "import sys; from learner.service import LearnerService; from services.shell import main; "
                f"sys.exit(main(lambda: LearnerService({rank}, 2, '127.0.0.1', {port}), "
                f"['--run', '{run_id}', '--redis', '{redis_url}']))"
            )
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            processes.append(subprocess.Popen(
                [sys.executable, "-c", code], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                text=True,
            ))  # fmt: skip
        return processes

    yield begin
    for process in processes:
        process.kill()
        process.communicate(timeout=10)


async def test_two_ranks_learn_together_and_stop_together(
    redis: Any, run_id: str, tiny_model: Path, two_ranks: Any
) -> None:
    keys = RunKeys(run_id)
    await submit(
        redis, run_id, tiny_model, limits={"rollout_steps": 1}, learner={"ranks": 2, "zero_stage": 3},
    )  # fmt: skip
    processes = two_ranks()
    await put_batch(redis, keys, 0)
    await until_event(redis, keys, "exported", 120)
    steps = [step for _, step in await Journal(redis, keys, "test").steps()]
    assert [(step.version, step.optimizer_steps) for step in steps] == [(1, 2)]
    assert steps[0].metrics["trained_tokens"] == float(sum(await response_tokens(redis, keys)))
    for process in processes:
        process.terminate()
    for process in processes:
        _, errors = await asyncio.to_thread(process.communicate, None, 20)
        assert process.returncode == 0, errors


async def response_tokens(redis: Any, keys: RunKeys) -> list[int]:
    names = [(f"v0g{group}", index) for group in range(4) for index in range(4)]
    return [len(await redis.hget(keys.payload(group, index), "response_ids")) // 4 for group, index in names]
