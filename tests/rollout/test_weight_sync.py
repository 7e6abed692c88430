"""A tied model under weight syncs: afterwards vLLM's log-probs are those of transformers.

Also the other behaviour of a replica with a real engine. All tests share one engine, so each continues from the version
that the previous test left.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch

from learner.training.minibatches import PlannedSample, micro_batches
from learner.training.network.policy import inputs, load_policy
from rollout import service
from rollout.engine import Generation, PoisonedError, generation_of
from rollout.generation import ResponseGenerator
from rollout.prompts import ChatTokenizer
from rollout.tasks import GroupWorker, LeasedTask
from services.contracts import Cause, Lane, Prompt, Release, Sampling, Task
from services.streams.delivery.consumer import Consumer
from services.streams.delivery.payloads import SamplePayload, fetch, pack, unpack
from services.streams.state.group_state import GroupTransitions
from services.waits import cancel_and_wait
from tests.harness.free_ports import free_port
from tests.harness.small_run import recipe_document, service_context
from tests.rollout.hand_sampler import LEASE_S, HandSampler, leave_a_group_behind, task
from tests.rollout.handover import KEPT_TOKENS, handed_over
from tests.rollout.reference import ROUNDING, Policy, assert_written_by
from tests.rollout.replica import TOP_K, Replica, started_replica
from tests.rollout.sender import DYING, Sender, manifest_of, send_one_bucket_and_die
from tests.rollout.waiting import until

# The first test also waits for the engine, which takes minutes on a busy machine.
pytestmark = [
    pytest.mark.xdist_group("vllm"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
]

# Longer than three KV blocks, so that a stale prefix cache is detected.
PROMPT = [2, 4, *(7 + (31 * i) % 90 for i in range(98))]
WHOLE = 900
"""Tokens of a response that is handed over: a busy machine may draw hundreds between two looks of the test."""
SERVED = 20
"""The generation of the broadcast group in the test of the replica's loops; higher than those of the syncs."""


def sampling(tokens: int, seed: int | None = None) -> Sampling:
    return Sampling(temperature=1.0, top_p=1.0, max_new_tokens=tokens, seed=seed)


def from_nuclei(tokens: int, temperature: float = 1.0) -> Sampling:
    return Sampling(temperature=temperature, top_p=0.7, top_k=TOP_K, max_new_tokens=tokens)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Policy]:
    """Version v has the weights of seed v; the engine starts from version 0's folder."""
    root = tmp_path_factory.mktemp("policies")
    return {version: Policy(root / str(version), tied=True, seed=version) for version in range(8)}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def replica(
    redis_url: str, policies: dict[int, Policy], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Replica]:
    folder = tmp_path_factory.getbasetemp() / "start"
    Policy(folder, tied=True, seed=0)
    async with started_replica(redis_url, folder) as started:
        yield started


async def test_log_probs_follow_consecutive_versions(replica: Replica, policies: dict[int, Policy]) -> None:
    assert "lm_head.weight" not in policies[1].weights
    with pytest.raises(RuntimeError, match="'default'"):
        await replica.engine.generate(PROMPT, sampling(4), "unpublished")
    for version in (1, 2):  # both versions use one group: the second plan repeats the generation
        ack = await replica.sender.send(replica.sender.plan(1, version), policies[version].weights)
        assert (ack.phase, ack.version, ack.generation) == ("applied", version, 1), ack.detail
        assert 0 < ack.pause_s < 20
        assert replica.follower.version == version
        assert (replica.context.heartbeat.info.state, replica.context.heartbeat.info.version) == ("ready", version)
        for repeat in range(2):  # the second time from the prefix cache
            generation = await replica.engine.generate(PROMPT, sampling(40), f"{version}-{repeat}")
            assert [(s.version, s.start, s.end) for s in generation.spans] == [(version, 0, 40)]
            assert generation.finish_reason == "length"
            assert_written_by(policies, PROMPT, generation)
    difference = policies[1].logprobs(PROMPT, generation.response_ids) - generation.behaviour_logprobs
    assert np.abs(difference).max() > 1  # the versions differ enough for the comparison to be meaningful


@pytest.mark.parametrize("length", [3, 32, 33, 46, 64, 98])
async def test_a_group_computes_its_prompt_once(replica: Replica, policies: dict[int, Policy], length: int) -> None:
    """Except for the last token, and from whichever response came first; vLLM's blocks have 32 tokens."""
    prompt, wanted, names = PROMPT[1 : 1 + length], sampling(300), [f"once-{length}-{i}" for i in range(4)]
    outputs = await asyncio.gather(*(replica.engine._final_output(prompt, wanted, name, None) for name in names))
    assert sorted(output.num_cached_tokens for output in outputs)[1:] == [length - 1] * 3
    for name, output in zip(names, outputs, strict=True):
        assert_written_by(policies, prompt, generation_of(output.outputs[0], name, 128))


async def test_log_probs_are_the_same_with_more_threads(
    replica: Replica, policies: dict[int, Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine looks at the cores between two decoding steps; only then does the number of threads change."""
    monkeypatch.setattr("rollout.engine.LOOK_S", 0.01)
    looking = asyncio.create_task(replica.engine.use_spare_cores(1, 2))
    try:
        found = await asyncio.gather(*(replica.engine.generate(PROMPT, sampling(40), f"look-{i}") for i in range(8)))
        assert await replica.engine.call_workers("use_spare_cores", 1, 2) in ([1], [2])
        assert await replica.engine.call_workers("set_threads", 2) == [2]
        found.append(await replica.engine.generate(PROMPT, sampling(40), "two"))
        assert await replica.engine.call_workers("set_threads", 1) == [1]
        found.append(await replica.engine.generate(PROMPT, sampling(40), "one"))
    finally:
        await cancel_and_wait(looking)
    for generation in found:
        assert_written_by(policies, PROMPT, generation)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_the_learner_s_log_probs_of_nuclei_are_the_engine_s(
    replica: Replica, policies: dict[int, Policy], temperature: float
) -> None:
    """Four responses of one group, through the payload's stored form, as the learner packs them into rows."""
    drawn = [replica.engine.generate(PROMPT, from_nuclei(60, temperature), f"{temperature}-{i}") for i in range(4)]
    prompt, payloads, share = np.array(PROMPT, np.int32), {}, []
    for index, found in enumerate(await asyncio.gather(*drawn)):
        key = str(index)
        body = SamplePayload(
            prompt, found.response_ids, found.behaviour_logprobs, "", "length", found.spans, found.nuclei
        )
        payloads[key] = unpack(key, {name.encode(): value for name, value in pack(body).items()})
        share.append(PlannedSample(key, "g", 60, 1.0, 1.0))
    [batch] = micro_batches(share, payloads, 4096, share_prompts=True)
    policy = load_policy(policies[replica.follower.version or 0].folder, "float32", temperature)
    with torch.no_grad():
        learned = policy(**inputs(batch))[0]
        over_vocabulary = policy(**inputs(replace(batch, nuclei=None)))[0]
    np.testing.assert_allclose(learned.numpy(), batch.data.behaviour.numpy(), atol=ROUNDING / temperature, rtol=0)
    assert float((learned - over_vocabulary).mean()) > 0.1, "over the vocabulary, every ratio would be too small"
    assert batch.nuclei is not None
    assert 1 < batch.nuclei.shape[1] <= TOP_K


async def sync_amid(replica: Replica, version: int, policies: dict[int, Policy], acked: asyncio.Event) -> None:
    """Sync the weights while requests run, and set `acked` once the sync is acknowledged."""
    await asyncio.sleep(0.5)
    try:
        ack = await replica.sender.send(replica.sender.plan(2, version), policies[version].weights)
    finally:
        acked.set()
    assert ack.phase == "applied", ack.detail


async def test_running_requests_continue_with_the_new_weights(replica: Replica, policies: dict[int, Policy]) -> None:
    acked = asyncio.Event()

    async def stream(i: int) -> list[Generation]:
        """Send one request after the other, so that some run when the weights arrive, however late.

        Their lengths differ, so that not all end at once. The first stream draws its tokens from nuclei.
        """
        drawn: list[Generation] = []
        while not acked.is_set():
            wanted = from_nuclei(700) if i == 0 else sampling(700 - 60 * i)
            # Two with one prompt, whose KV blocks the second copies from the first, with the weights of that moment.
            names = [f"r{i}-{len(drawn)}-{j}" for j in range(2)]
            drawn += await asyncio.gather(*(replica.engine.generate(PROMPT[: 50 + i], wanted, name) for name in names))
        return drawn

    streams = [asyncio.create_task(stream(i)) for i in range(3)]
    await sync_amid(replica, 3, policies, acked)
    seen, changed = [], False
    for i, drawn in enumerate(await asyncio.gather(*streams)):
        for generation in drawn:
            assert (generation.nuclei is not None) == (i == 0)
            seen.append([span.version for span in generation.spans])
            assert generation.spans[-1].end == 700 - 60 * i
            assert_written_by(policies, PROMPT[: 50 + i], generation)
            changed = changed or (i == 0 and seen[-1] == [2, 3])
    assert changed, "weights arrived while tokens were drawn from nuclei"
    assert [2, 3] in seen
    assert all(versions in ([2], [2, 3], [3]) for versions in seen), seen


async def test_on_policy_samples_are_generated_by_one_version(
    replica: Replica, policies: dict[int, Policy], caplog: pytest.LogCaptureFixture
) -> None:
    context, acked = replica.context, asyncio.Event()
    caplog.set_level(logging.INFO, "rollout.generation")
    model = context.record.recipe.model
    assert model.path is not None
    tokenizer = ChatTokenizer(model.path, context.record.recipe.max_prompt_tokens)
    worker = GroupWorker(ResponseGenerator(replica.engine, tokenizer, model.max_model_len))
    prompt = Prompt(id="p", messages=({"role": "user", "content": "1 + 1"},), verifier="pattern", reference={})
    transitions = await GroupTransitions.fenced(context.redis, context.keys, "sampler")
    replica_transitions = GroupTransitions(context.redis, context.keys, "rollout")
    consumer = Consumer(
        context.redis, context.keys, context.keys.lane(Lane.TRAIN).tasks, "rollout", "me", Task, 30.0, 3
    )
    await consumer.open()

    async def work() -> list[str]:
        """Generate one group after the other, so that one is in flight when the weights arrive, however late."""
        payloads: list[str] = []
        while not acked.is_set():
            task = Task(group=f"g{len(payloads)}", prompt=prompt, samples=2, sampling=sampling(600))
            assert await transitions.dispatch(Lane.TRAIN, [task], None)
            [delivery] = await consumer.read(1, 20.0)
            await worker.work(LeasedTask(context, Lane.TRAIN, consumer, replica_transitions, delivery))
            payloads += [context.keys.payload(task.group, index) for index in range(2)]
        return payloads

    working = asyncio.create_task(work())
    await sync_amid(replica, 4, policies, acked)
    payloads = await working
    whole, damaged = await fetch(context.redis, payloads)
    assert (len(whole), damaged) == (len(payloads), {})
    assert "is mixed-version and is generated again" in caplog.text
    found = [[(span.version, span.start, span.end) for span in body.spans] for body in whole.values()]
    assert [(4, 0, 600)] in found
    assert all(spans in ([(3, 0, 600)], [(4, 0, 600)]) for spans in found), found


@pytest.mark.parametrize("top_k", [None, TOP_K])
async def test_a_replica_goes_on_from_what_another_drew(
    replica: Replica, policies: dict[int, Policy], top_k: int | None
) -> None:
    """The log-probs of both parts are those of the policy that the responses' versions name."""
    wanted = from_nuclei(WHOLE) if top_k else sampling(WHOLE)
    kept, found = await handed_over(replica, f"handed-{top_k}", wanted)
    assert all(KEPT_TOKENS <= tokens < WHOLE for tokens in kept)
    for prompt, generation in found:
        assert [(span.version, span.end) for span in generation.spans] == [(replica.follower.version, WHOLE)]
        assert (generation.nuclei is not None) == bool(top_k)
        assert_written_by(policies, prompt, generation)


async def test_a_sender_that_dies_leaves_the_old_weights_intact(replica: Replica, policies: dict[int, Policy]) -> None:
    manifest = manifest_of(policies[5].weights)
    assert len(manifest.buckets) > 2
    port = free_port()
    first = sum(np.prod(entry.shape) * 4 for entry in manifest.buckets[0])
    dying = multiprocessing.get_context("spawn").Process(target=send_one_bucket_and_die, args=(port, int(first)))
    dying.start()
    await replica.sender.announce(replica.sender.plan(DYING, 5, timeout_s=90.0, port=port), manifest)
    ack = await replica.sender.ack(120)  # the sender's process imports torch first
    assert (ack.phase, ack.generation) == ("failed", DYING)
    await asyncio.to_thread(dying.join, 60)
    assert dying.exitcode == 9
    assert (replica.context.heartbeat.info.state, replica.follower.version) == ("ready", 4)
    generation = await replica.engine.generate(PROMPT, sampling(30), "after-death")
    assert generation.spans[0].version == 4
    assert_written_by(policies, PROMPT, generation)
    ack = await replica.sender.send(replica.sender.plan(4, 5), policies[5].weights)
    assert ack.phase == "applied", ack.detail
    assert_written_by(policies, PROMPT, await replica.engine.generate(PROMPT, sampling(30), "after-repair"))


async def test_a_wrong_checksum_is_rejected(replica: Replica, policies: dict[int, Policy]) -> None:
    ack = await replica.sender.send(replica.sender.plan(5, 6), policies[6].weights, corruption=1)
    assert ack.phase == "failed"
    assert "checksums of buckets [0]" in ack.detail
    generation = await replica.engine.generate(PROMPT, sampling(30), "refused")
    assert generation.spans[0].version == 5
    assert_written_by(policies, PROMPT, generation)


async def test_a_newer_plan_interrupts_an_older_one(replica: Replica, policies: dict[int, Policy]) -> None:
    await replica.sender.announce(replica.sender.plan(6, 6, timeout_s=120.0), manifest_of(policies[6].weights))

    async def followed() -> bool:
        return replica.follower._generation == 6

    await until(followed, 60)
    async with asyncio.timeout(60):
        superseded = await replica.sender.send(replica.sender.plan(7, 6), policies[6].weights)
        applied = await replica.sender.ack()
    assert (superseded.phase, superseded.generation) == ("failed", 6)
    assert (applied.phase, applied.generation, applied.version) == ("applied", 7, 6)
    assert_written_by(policies, PROMPT, await replica.engine.generate(PROMPT, sampling(30), "newer"))


async def test_a_previous_learners_plan_is_not_followed(replica: Replica, policies: dict[int, Policy]) -> None:
    manifest = manifest_of(policies[7].weights)
    await replica.sender.announce(replica.sender.plan(2, 9), manifest)
    await replica.context.redis.xadd(replica.context.keys.weight_plans, {"m": "not a plan"})
    [(_, letter)] = await until(replica.context.event_log.dead_letters, 60)
    with pytest.raises(TimeoutError):
        await replica.sender.ack(1.0)
    assert replica.follower.version == 6
    assert letter.reason.startswith("not a valid WeightPlan")


async def test_a_version_is_applied_once_and_no_older_one_after_it(
    replica: Replica, policies: dict[int, Policy]
) -> None:
    again = await replica.sender.send(replica.sender.plan(7, 6), policies[7].weights)
    assert (again.phase, again.pause_s) == ("applied", 0.0)
    await replica.sender.announce(replica.sender.plan(8, 2), manifest_of(policies[2].weights))
    older = await replica.sender.ack()
    assert older.phase == "failed"
    assert "version 2 is older than the version in use, 6" in older.detail
    assert_written_by(policies, PROMPT, await replica.engine.generate(PROMPT, sampling(30), "same"))


async def test_a_seed_repeats_a_response(replica: Replica) -> None:
    first, second, other = [
        await replica.engine.generate(PROMPT, sampling(20), f"seed{i}", seed) for i, seed in enumerate((11, 11, 12))
    ]
    assert first.response_ids.tolist() == second.response_ids.tolist() != other.response_ids.tolist()


async def first_samples(sampler: HandSampler, sender: Sender, policy: Policy, model: Path) -> None:
    """No sample is generated before the first version; then complete samples of that version."""
    keys, redis = sampler.context.keys, sampler.context.redis
    await sampler.transitions.dispatch(Lane.TRAIN, [task("g0")], None)
    await asyncio.sleep(0.6)
    assert await redis.xlen(keys.lane(Lane.TRAIN).samples) == 1  # the dead replica's
    ack = await sender.send(sender.plan(SERVED, 7), policy.weights)
    assert ack.phase == "applied", ack.detail
    samples = await sampler.samples(Lane.TRAIN, "g0", 4)
    assert [sample.index for sample in samples] == [0, 1, 2, 3]
    whole, damaged = await fetch(redis, [sample.facts.payload for sample in samples])
    assert (len(whole), damaged) == (4, {})
    prompt_ids = ChatTokenizer(str(model), 240).prompt_ids(task("g0").prompt).tolist()
    for sample, body in zip(samples, whole.values(), strict=True):
        assert body.prompt_ids.tolist() == prompt_ids
        assert [(s.version, s.start, s.end) for s in body.spans] == [(7, 0, 40)]
        drawn = Generation(body.response_ids, body.behaviour_logprobs, body.spans, body.finish_reason)
        assert_written_by({7: policy}, prompt_ids, drawn)
        facts = sample.facts
        assert (sample.verifier, sample.reference) == ("pattern", {"a": 2})
        assert (facts.prompt_tokens, facts.response_tokens, facts.truncated) == (len(prompt_ids), 40, True)
        assert facts.mean_logprob == pytest.approx(float(np.mean(body.behaviour_logprobs)), abs=1e-4)
        assert (facts.oldest_version, facts.newest_version) == (7, 7)
    assert len({tuple(body.response_ids.tolist()) for body in whole.values()}) == 4


async def other_tasks(sampler: HandSampler) -> None:
    """Tasks of an evaluation, of a dead replica and of a released group, and a task whose prompt is too long."""
    context, transitions = sampler.context, sampler.transitions
    streams = context.keys.lane(Lane.TRAIN)
    await transitions.dispatch(Lane.EVALUATION, [task("e0", samples=2)], None)
    assert len(await sampler.samples(Lane.EVALUATION, "e0", 2)) == 2
    samples = await sampler.samples(Lane.TRAIN, "dead", 4)
    await until(sampler.all_acked, 60)
    assert [sample.index for sample in samples] == [0, 1, 2, 3]
    whole, _ = await fetch(context.redis, [sample.facts.payload for sample in samples])
    assert [body.text == "left" for body in whole.values()] == [False, True, False, False]
    await transitions.dispatch(Lane.TRAIN, [task("long", text="7" * 300)], None)
    [(_, letter)] = await until(context.event_log.dead_letters, 60)
    assert (letter.group, letter.cause) == ("long", Cause.TOO_LONG)
    await transitions.dispatch(Lane.TRAIN, [task("r0")], None)
    assert await transitions.release(Lane.TRAIN, "r0", Release.STALE, 4)
    before = await context.redis.xlen(streams.samples)
    await context.redis.xadd(streams.tasks, {"m": task("r0").model_dump_json()})  # delivered again
    await until(sampler.all_acked, 60)
    assert await context.redis.xlen(streams.samples) == before, "a released group must be acked without work"
    assert {sample.group for sample in await sampler.all_samples(Lane.TRAIN)} <= {"g0", "dead", "r0"}


async def test_a_replicas_loops_serve_both_lanes(
    replica: Replica,
    policies: dict[int, Policy],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The service with this engine, in a separate run; test_service.py covers the engine's start and stop."""
    model, looks, look = tmp_path_factory.getbasetemp() / "start", [], replica.engine.use_spare_cores

    async def noted(least: int, most: int) -> None:
        looks.append((least, most))
        await look(least, most)

    monkeypatch.setattr(replica.engine, "use_spare_cores", noted)
    document = recipe_document(model, limits={"lease_s": LEASE_S}, rollout={"max_threads": 2})
    redis = replica.context.redis
    async with service_context(redis, f"serves-{uuid.uuid4().hex[:8]}", document, "rollout") as context:
        sampler = HandSampler(context, await GroupTransitions.fenced(redis, context.keys, "sampler"))
        await leave_a_group_behind(context, sampler.transitions)
        await context.heartbeat.update(state="joining")
        worker = GroupWorker(ResponseGenerator(replica.engine, ChatTokenizer(str(model), 240), 256))
        serving = asyncio.create_task(service.Replica(context, replica.engine, worker).run())
        try:
            await first_samples(sampler, Sender(context, context.heartbeat.info.id), policies[7], model)
            await other_tasks(sampler)
            await sampler.transitions.dispatch(Lane.TRAIN, [task("last")], None)
            await until(sampler.all_delivered, 60)
            context.stopping.set()
            await asyncio.wait_for(serving, 60)
        finally:
            await cancel_and_wait(serving)
        assert context.heartbeat.info.state == "draining"
        assert len(await sampler.samples(Lane.TRAIN, "last", 4)) == 4, "the group in flight must be finished"
        assert await sampler.all_acked()
        assert looks == [(1, 2)]


async def test_an_incomplete_policy_poisons_the_replica(replica: Replica, policies: dict[int, Policy]) -> None:
    incomplete = {name: tensor for name, tensor in policies[0].weights.items() if name != "model.norm.weight"}
    ack = await replica.sender.send(replica.sender.plan(SERVED + 1, 9), incomplete)
    assert ack.phase == "failed"
    assert "model.norm.weight" in ack.detail
    assert replica.context.heartbeat.info.state == "poisoned"
    with pytest.raises(PoisonedError, match="applying version 9 failed"):
        await asyncio.wait_for(replica.following, 60)


async def test_the_death_of_the_engine_is_detected(replica: Replica) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    replica.engine.check()
    for child in psutil.Process().children(recursive=True):
        if "VLLM::EngineCore" in "".join(child.cmdline()):
            os.kill(child.pid, signal.SIGKILL)

    async def detected() -> bool:
        try:
            replica.engine.check()
        except EngineDeadError:
            return True
        return False

    assert await until(detected, 60)
