"""The learner with a real Redis: it trains batches, publishes versions, records steps and exports a model."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from learner.archive import RunArchive
from learner.checkpoint.manager import Checkpoints
from learner.recovery.start import batch_digest
from learner.service import LearnerService
from services.contracts import BEFORE, Lane
from services.metrics.tables import STEP_METRICS
from services.process.hosting import ServiceThread
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog
from services.streams.state.group_counts import group_counts
from services.streams.state.heartbeat import live_processes
from services.streams.state.policy_history import read_policy
from services.streams.state.runs import RunRecords
from services.waits import cancel_and_wait
from tests.learner.receiver import Receiver
from tests.learner.running import (
    Program,
    drain_ranks,
    end_ranks,
    put_batch,
    put_evaluation,
    start_ranks,
    stop,
    submit,
    train_run,
    until_event,
    until_step,
)

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(torch|deepspeed)"),
    pytest.mark.filterwarnings("ignore::FutureWarning:(torch|deepspeed)"),
]


async def test_a_run_from_the_initial_weights_to_the_export(
    redis: Any, redis_url: str, run_id: str, tiny_model: Path, runs_folder: Path
) -> None:
    keys = RunKeys(run_id)
    template = runs_folder.with_name("template.jinja")
    template.write_text("{{ messages[0]['content'] }}")
    await submit(
        redis,
        run_id,
        tiny_model,
        limits={"rollout_steps": 2},
        learner={"gradient_clip": 0.5, "checkpoint_every": 10},
        model={"chat_template": str(template)},
    )
    thread = ServiceThread(LearnerService(), run_id, redis_url)
    replica = Receiver(redis, run_id, "replica")
    receiving = asyncio.create_task(replica.run())
    try:
        await until_event(redis, keys, "ready")
        initial = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
        async with asyncio.timeout(120):
            await replica.received.wait()
        assert all(torch.equal(tensor, initial[name]) for name, tensor in replica.weights.items())
        assert "lm_head.weight" not in replica.weights
        for version in range(2):
            batch = await put_batch(redis, keys, version)
            if version == 0:  # published twice, must be trained once; no batch is read after the last step
                await redis.xadd(keys.batches, {"m": batch.model_dump_json()})
        await until_event(redis, keys, "awaiting-evaluation")
        await put_evaluation(redis, keys, name=BEFORE)
        await asyncio.sleep(2.5)  # two polls of the learner: the earlier evaluation must not start the export
        assert not (runs_folder / run_id / "export").exists()
        evaluation = await put_evaluation(redis, keys)
        folder = Path((await until_event(redis, keys, "exported")).rpartition(" is in ")[2])
    finally:
        await stop(thread)
        await cancel_and_wait(receiving)
    await check_records(redis, keys)
    assert replica.version == 2
    assert folder == runs_folder / run_id / "export"
    assert (await RunRecords(redis).get(run_id)).export_path == str(folder)
    check_export(folder, replica, initial)
    assert json.loads((folder / "evaluation.json").read_text()) == [evaluation.model_dump(mode="json")]
    check_archive(runs_folder / run_id, [step for _, step in await EventLog(redis, keys, "test").steps()])


async def check_records(redis: Any, keys: RunKeys) -> None:
    steps = [step for _, step in await EventLog(redis, keys, "test").steps()]
    assert [(step.step, step.version, step.optimizer_steps, len(step.groups)) for step in steps] == [
        (1, 1, 2, 4),
        (2, 2, 2, 4),
    ]
    assert (await read_policy(redis, keys)).version == 2
    metrics = steps[0].metrics
    assert metrics["accuracy"] == 0.25
    assert metrics["learning_rate"] == 1e-3
    assert metrics["zero_advantage_share"] == 0.0
    assert set(metrics) <= set(STEP_METRICS)
    assert 0 < metrics["mean_token_probability"] < 1
    assert metrics["learning_seconds"] <= steps[0].learning_finished_at - steps[0].learning_started_at
    counts = await group_counts(redis, keys)
    assert (counts.trained, counts.pending, counts.reconciled) == (8, 0, True)
    assert [step.staleness for step in steps] == [(0, 0, 0, 0)] * 2
    assert [step.optimizer_step_of for step in steps] == [(1, 1, 2, 2)] * 2
    assert await redis.hget(keys.group("v1g2"), "optimizer_step") == b"2"
    assert steps[0].prompts == tuple(f"prompt of v0g{index}" for index in range(4))
    # All of it is in the archive; no checkpoint is needed.
    assert await redis.xlen(keys.batches) == 0
    assert await redis.exists(keys.payload("v0g0", 0)) == 1, "it stays until the sampler has archived the group"
    waiting = await redis.lrange(keys.lane(Lane.TRAIN).unarchived, 0, -1)
    assert sorted(waiting) == sorted(keys.group(name).encode() for step in steps for name in step.groups)
    assert await redis.hget(keys.group("v0g0"), "state") == b"trained"
    ends = time.monotonic() + 15
    while left := await live_processes(redis, keys.run):  # a heartbeat that was not deleted expires
        assert time.monotonic() < ends, f"still announced: {left}"
        await asyncio.sleep(0.1)


def check_archive(folder: Path, steps: list[Any]) -> None:
    archive = RunArchive(folder)
    assert list(archive.trained()) == [1, 2]
    assert [archive.record(step) for step in (1, 2)] == steps
    facts = archive.facts()
    assert (facts.run, facts.ranks, facts.recipe.limits.rollout_steps) == (folder.name, 1, 2)
    keys = {sample.payload for group in archive.batch(2, steps[1].fence).groups for sample in group.samples}
    assert archive.share(2, 0, steps[1].fence).keys() == keys
    assert Checkpoints(archive).complete() == []


def check_export(folder: Path, replica: Receiver, initial: dict[str, torch.Tensor]) -> None:
    exported, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = exported.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in replica.weights.items())
    assert exported.lm_head.weight is exported.model.embed_tokens.weight
    moved = max(float((tensor - initial[name]).abs().max()) for name, tensor in replica.weights.items())
    # Four AdamW steps at 1e-3 without decay move a weight by at most 4e-3.
    assert 1e-3 < moved < 4.1e-3
    assert AutoTokenizer.from_pretrained(folder).chat_template == "{{ messages[0]['content'] }}"
    assert exported.generation_config.eos_token_id == 3


async def test_a_restarted_learner_trains_the_waiting_batch(
    redis: Any, redis_url: str, run_id: str, tiny_model: Path
) -> None:
    keys = RunKeys(run_id)
    await submit(redis, run_id, tiny_model, limits={"rollout_steps": 2, "max_staleness": 0})
    # A previous learner published other weights for this step, so this learner's weights become version 1.
    await redis.hset(keys.policy, mapping={"version": 0, "step": 0, "weights": "other bits", "announced": 0})
    await put_batch(redis, keys, 0)
    thread = ServiceThread(LearnerService(), run_id, redis_url)
    receiving = asyncio.create_task(Receiver(redis, run_id, "replica").run())
    try:
        await until_step(redis, keys, 1)
    finally:
        await stop(thread)
        await cancel_and_wait(receiving)
    [(_, record)] = await EventLog(redis, keys, "test").steps()
    assert (record.step, record.version, set(record.staleness)) == (1, 2, {0}), "a publication ages no sample"
    policy = await read_policy(redis, keys)
    assert policy is not None
    assert policy.version_steps == {1: 0, 2: 1}


async def test_damaged_payloads_are_left_out_and_reported(
    redis: Any, redis_url: str, run_id: str, tiny_model: Path, runs_folder: Path
) -> None:
    keys = RunKeys(run_id)
    await submit(redis, run_id, tiny_model, limits={"rollout_steps": 1})
    batch = await put_batch(redis, keys, 0)
    gone, damaged = batch.groups[1].samples[2].payload, batch.groups[3].samples[0].payload
    await redis.delete(gone)
    logprobs = bytearray(await redis.hget(damaged, "behaviour_logprobs"))
    logprobs[1] ^= 0x40
    await redis.hset(damaged, "behaviour_logprobs", bytes(logprobs))
    await put_evaluation(redis, keys)
    thread = ServiceThread(LearnerService(), run_id, redis_url)
    try:
        await until_event(redis, keys, "exported")
    finally:
        await stop(thread)
    text = await until_event(redis, keys, "payload-damaged")
    assert gone in text
    assert f"{damaged} is missing or damaged: ValueError('its checksum does not match')" in text
    archive = RunArchive(runs_folder / run_id)
    archived = archive.batch(1, archive.trained()[1])
    masked = {sample.payload for group in archived.groups for sample in group.samples if sample.masked}
    assert masked == {gone, damaged}
    counts = await group_counts(redis, keys)
    assert (counts.trained, counts.reconciled) == (4, True)
    steps = [step for _, step in await EventLog(redis, keys, "test").steps()]
    left = [sample.tokens for group in batch.groups for sample in group.samples if sample.payload not in masked]
    assert steps[0].metrics["trained_tokens"] == sum(left)
    assert steps[0].batch_digest == batch_digest(archived), "that of the batch with these masks"


async def test_the_export_waits_for_the_last_evaluation_of_every_set(
    redis: Any, redis_url: str, run_id: str, tiny_model: Path, runs_folder: Path
) -> None:
    keys = RunKeys(run_id)
    sums = {"name": "sums", "task": "chain_sum", "prompts": 4}
    await submit(
        redis,
        run_id,
        tiny_model,
        limits={"rollout_steps": 1},
        data={"held_out": 0},
        evaluation={"sets": [sums]},
    )
    thread = ServiceThread(LearnerService(), run_id, redis_url)
    try:
        await put_batch(redis, keys, 0)
        assert "sums" in await until_event(redis, keys, "awaiting-evaluation")
        await put_evaluation(redis, keys)  # of the held-out split, which this run does not have
        await asyncio.sleep(2.5)
        assert not (runs_folder / run_id / "export").exists()
        await put_evaluation(redis, keys, "sums")
        await until_event(redis, keys, "exported")
    finally:
        await stop(thread)


async def test_records_of_an_earlier_run_with_the_same_id_fail(
    redis: Any, redis_url: str, run_id: str, tiny_model: Path
) -> None:
    await submit(redis, run_id, tiny_model, limits={"rollout_steps": 1})
    await train_run(redis, redis_url, run_id, 1)
    await redis.delete(*await redis.keys(RunKeys(run_id).key("*")))
    await submit(redis, run_id, tiny_model, limits={"rollout_steps": 1})
    thread = ServiceThread(LearnerService(), run_id, redis_url)
    await asyncio.to_thread(thread._thread.join, 240)
    assert "holds 1 records and checkpoints, but Redis has no committed policy of the run" in str(thread.error)
    assert "move the folder away" in str(thread.error)
    assert "restore the data of Redis and resume the run" in str(thread.error)


@pytest.fixture
def two_ranks(redis_url: str, run_id: str) -> Iterator[Any]:
    """Start both ranks of a learner as processes."""
    processes: list[Program] = []

    def begin() -> list[Program]:
        processes.extend(start_ranks(run_id, redis_url, 2))
        return processes

    yield begin
    end_ranks(processes)


@pytest.mark.slow
async def test_two_ranks_train_together_and_stop_together(
    redis: Any, run_id: str, tiny_model: Path, two_ranks: Any
) -> None:
    keys = RunKeys(run_id)
    await submit(
        redis,
        run_id,
        tiny_model,
        limits={"rollout_steps": 1},
        learner={"ranks": 2, "zero_stage": 3},
    )
    await put_batch(redis, keys, 0)
    published = sum(await response_tokens(redis, keys))
    processes = two_ranks()
    await put_evaluation(redis, keys)
    await until_event(redis, keys, "exported")
    steps = [step for _, step in await EventLog(redis, keys, "test").steps()]
    assert [(step.version, step.optimizer_steps) for step in steps] == [(1, 2)]
    assert steps[0].metrics["trained_tokens"] == float(published)
    await drain_ranks(processes)


async def response_tokens(redis: Any, keys: RunKeys) -> list[int]:
    names = [(f"v0g{group}", index) for group in range(4) for index in range(4)]
    return [len(await redis.hget(keys.payload(group, index), "response_ids")) // 4 for group, index in names]


async def test_log_probs_that_differ_are_reported(redis: Any, redis_url: str, run_id: str, tiny_model: Path) -> None:
    keys = RunKeys(run_id)
    await submit(redis, run_id, tiny_model)
    learner = ServiceThread(LearnerService(), run_id, redis_url)
    try:
        await put_batch(redis, keys, 0, replica="rollout-x")
        text = await until_event(redis, keys, "logprobs-differ")
        assert text.startswith("step 1: log-probs of policy version 0 differ from the learner's: rollout-x by ")
        assert "nats on 79 tokens; limits.max_logprob_difference is 0.001" in text
        await until_step(redis, keys, 1)
        [(_, step)] = await EventLog(redis, keys, "test").steps()
        assert step.metrics["logprob_off_replicas"] == 1
    finally:
        await stop(learner)
