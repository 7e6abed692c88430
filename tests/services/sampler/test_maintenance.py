"""The sampler's maintenance keeps leases running when the server's clock is set back."""

import asyncio

from services.contracts import Lane
from services.sampler.queue.maintenance import Maintenance
from services.streams.keys import RunKeys
from tests.harness.small_run import recipe_document, service_context
from tests.services.driven import STATE, DrivenRun, set_clock_back, task_of

LEASE_S = 0.3


async def test_leases_of_the_dead_lapse_although_the_clock_went_back(redis, run_id):
    run = await DrivenRun.open(redis, RunKeys(run_id), LEASE_S)
    await run.sampler.dispatch(Lane.TRAIN, [task_of("g0")], STATE)
    [lost] = await run.rollout("r0").read(1, 1)
    await set_clock_back(redis, lost.lease.stream, 3600)
    document = recipe_document("/none", limits={"lease_s": LEASE_S})
    async with service_context(redis, run_id, document, "sampler") as context:
        maintenance = Maintenance(context)
        async with asyncio.timeout(60):
            found = []
            while not found:
                await maintenance._maintain()
                found = await run.rollout("r1").read(1, 0.1)
    assert [(delivery.message.group, delivery.deliveries) for delivery in found] == [("g0", 2)]
