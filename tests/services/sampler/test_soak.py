"""A run's memory in Redis stays below the bound that its recipe gives, however long it runs."""

import asyncio
import itertools
from collections import Counter
from functools import partial
from statistics import median

import numpy as np
import pytest

from services.contracts import Lane, VersionSpan
from services.sampler.queue.maintenance import Maintenance
from services.sampler.service import SamplerService
from services.settings import parse_recipe
from services.streams.connection.client import connect
from services.streams.delivery.consumer import tail
from services.streams.delivery.payloads import SamplePayload
from services.streams.keys import RunKeys
from services.streams.memory_bound import archive_backlog, footprint, longest_streams
from services.streams.state.group_counts import group_counts
from services.streams.state.group_state import trim_released
from tests.harness.hand_fleet import HandFleet, HandLearner, evaluated, running, until
from tests.harness.servers.redis_servers import embedded_server
from tests.harness.small_run import recipe_document, service_context
from tests.services.driven import DrivenRun
from verifier.service import VerifierService

PROMPT_TOKENS, NEW_TOKENS, STEPS = 96, 160, 72


class Longest(HandFleet):
    """Answers with the longest responses that the recipe allows."""

    def payload(self, text):
        return SamplePayload(
            np.zeros(PROMPT_TOKENS, np.int32),
            np.zeros(NEW_TOKENS, np.int32),
            np.zeros(NEW_TOKENS, np.float32),
            text.ljust(8 * NEW_TOKENS, " "),
            "length",
            (VersionSpan(version=self.version, start=0, end=NEW_TOKENS),),
        )


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_memory_stays_below_the_bound_of_the_recipe(run_id, monkeypatch):
    # As many released groups as the first half of the run has, so that both halves hold as many.
    monkeypatch.setattr("services.sampler.queue.maintenance.trim_released", partial(trim_released, kept=64))
    document = recipe_document(
        "/none",
        model={"max_model_len": PROMPT_TOKENS + NEW_TOKENS},
        rollout={"max_new_tokens": NEW_TOKENS},
        limits={"rollout_steps": STEPS, "max_inflight_groups": 24},
        algorithm={"group_size": 8},
    )
    bound = footprint(parse_recipe(document))
    keys, used, payloads = RunKeys(run_id), [], []
    with embedded_server() as server:
        redis = await connect(f"redis://127.0.0.1:{server.port}/0")
        before = (await redis.info("memory"))["used_memory"]
        fleet = Longest(redis, keys)
        learner = HandLearner(redis, keys, fleet)

        async def measure():
            while True:
                used.append((await redis.info("memory"))["used_memory"] - before)
                payloads.append(sum([1 async for _ in redis.scan_iter(keys.key("payload:*"), 1000)]))
                await asyncio.sleep(0.2)

        async with (
            service_context(redis, run_id, document, "sampler") as sampler,
            service_context(redis, run_id, document, "verifier") as verifier,
            running(
                SamplerService().run(sampler), VerifierService().run(verifier), fleet.run(), learner.run(), measure()
            ) as tasks,
        ):
            await until(lambda: evaluated(redis, keys, "after"), tasks, "the last evaluation", deadline_s=180)
            counts = await group_counts(redis, keys)
            streams = [
                await redis.xlen(getattr(keys.lane(lane), name))
                for lane, name in itertools.product(Lane, ("tasks", "samples", "verdicts"))
            ]
        await redis.aclose()
    assert counts.reconciled, counts
    assert counts.trained == 4 * STEPS
    half = len(payloads) // 2
    earlier, later = max(used[:half]), median(used[half:])
    print(f"bound {bound.total:,} bytes, peak {max(used):,} bytes; {earlier:,} bytes at first, then {later:,}")
    assert max(used) < bound.total
    # The bound may be far above the use and hide a leak, so the parts that can leak are also checked alone.
    assert max(payloads[half:]) <= (24 + 4 + archive_backlog(parse_recipe(document))) * 8
    assert later < 1.05 * earlier, "0.9 without a leak, 1.2 if the hashes of released groups stay"
    # A stream holds what is in flight and what passed since its last trim; with a leak it would hold everything.
    assert max(streams) < 8 * counts.dispatched / 4, (streams, counts)


@pytest.mark.parametrize("passing", [80, pytest.param(400, marks=pytest.mark.slow)])
async def test_slow_groups_do_not_keep_finished_ones_in_memory(own_server, run_id, passing):
    """A task, samples and verdicts of slow groups stay under lease while hundreds of other groups finish."""
    inflight = 8
    limits = {"max_inflight_groups": inflight, "groups_per_step": 2}
    document = recipe_document("/none", algorithm={"group_size": 2}, limits=limits)
    recipe = parse_recipe(document)
    _, redis = own_server
    keys = RunKeys(run_id)
    run = await DrivenRun.open(redis, keys)
    longest = longest_streams(recipe, Lane.TRAIN)
    seen, after, used, lengths = Counter(), {}, [], {name: [] for name in longest}
    async with service_context(redis, run_id, document, "sampler") as context:
        maintenance = Maintenance(context)
        slow = [await run.dispatched("slow-task"), *await run.published("slow-sample"), *await run.judged("slow")]
        for number in range(passing):
            await run.decided(f"g{number}", "filtered")
            if number % inflight < inflight - 1:
                continue  # between two measurements, as many groups finish as may be in flight
            used.append(0)
            for name in longest:
                stream = getattr(run.streams, name)
                used[-1] += await redis.memory_usage(stream, samples=0)
                entries = await tail(redis, stream, after.get(name, "0-0"))
                seen[name] += len(entries)
                after[name] = entries[-1][0]
            await maintenance._maintain()
            for name in longest:
                lengths[name].append(await redis.xlen(getattr(run.streams, name)))
    assert {name: max(measured) for name, measured in lengths.items()} == longest
    assert max(used) < footprint(recipe).parts["streams of groups in flight"]
    groups = passing + 3
    assert seen == {"tasks": groups, "samples": 2 * (groups - 1), "verdicts": 2 * (groups - 2)}, "a tail misses nothing"
    assert len(slow) == 5
    for lease in (delivery.lease for delivery in slow):
        assert len(await redis.xrange(lease.stream, lease.entry, lease.entry)) == 1
        assert len(await redis.xpending_range(lease.stream, lease.consumer_group, lease.entry, lease.entry, 1)) == 1


def test_every_setting_that_takes_memory_raises_the_bound():
    def total(**sections):
        return footprint(parse_recipe(recipe_document("/none", **sections))).total

    least = total()
    for more in (
        {"limits": {"max_inflight_groups": 64}},
        {"algorithm": {"group_size": 8}},
        {"limits": {"groups_per_step": 8}},
        {"limits": {"max_staleness": 3}},
        {"model": {"max_model_len": 512}},
        {"data": {"held_out": 64}},
        {"data": {"train": 64}},
        {"limits": {"rollout_steps": 100}},
        {"evaluation": {"samples": 4}},
    ):
        assert total(**more) > least, more
