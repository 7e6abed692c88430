"""The verifier's service on a real server: a verdict does not wait for the texts after it."""

from dataclasses import replace

from prometheus_client import REGISTRY

from services.contracts import Lane, SandboxFault, Verdict
from services.streams.keys import RunKeys
from services.streams.state.events import read_all
from tests.harness.hand_fleet import running, until
from tests.harness.small_run import recipe_document, service_context
from tests.services.driven import BODY, DrivenRun, publish_sample, sample_of
from verifier.service import JUDGED_TOGETHER, VerifierService

ENDLESS = "a" * 60 + "b"


async def test_a_slow_text_does_not_delay_those_before_it(redis, run_id):
    keys = RunKeys(run_id)
    lane = keys.lane(Lane.TRAIN)
    run = await DrivenRun.open(redis, keys)
    texts = ["a", "b", ENDLESS, "a"]
    assert len(texts) <= JUDGED_TOGETHER
    task = await run.dispatched("g0", len(texts))
    for index, text in enumerate(texts):
        sample = sample_of(keys, "g0", index).model_copy(update={"reference": {"pattern": "(a+)+$"}})
        body = replace(BODY, text=text)
        assert await publish_sample(run.transitions, Lane.TRAIN, task.lease, len(texts), sample, body)
    document = recipe_document("/none", verifier={"timeout_s": 20.0})
    async with (
        service_context(redis, run_id, document, "verifier") as context,
        running(VerifierService().run(context)) as judging,
    ):

        async def some_verdicts():
            return await redis.xlen(lane.verdicts) > 0

        await until(some_verdicts, judging, "the first verdicts")
        labels = {"run": run_id, "fault": SandboxFault.TIMEOUT.value}
        assert not REGISTRY.get_sample_value("penstock_sandbox_faults_total", labels), "the slow text has its time-out"

        async def both_verdicts():
            return await redis.xlen(lane.verdicts) == 2

        await until(both_verdicts, judging, "the verdicts on the texts before the slow one")
        verdicts = [verdict for _, verdict in await read_all(redis, keys, lane.verdicts, Verdict)]
    assert [(verdict.index, verdict.outcome.value) for verdict in verdicts] == [(0, "correct"), (1, "wrong")]


async def test_verdicts_stay_with_their_samples_after_a_damaged_one(redis, run_id):
    keys = RunKeys(run_id)
    lane = keys.lane(Lane.TRAIN)
    run = await DrivenRun.open(redis, keys)
    texts = ["a", "b", "a"]
    task = await run.dispatched("g0", len(texts))
    for index, text in enumerate(texts):
        sample = sample_of(keys, "g0", index).model_copy(update={"reference": {"pattern": "a$"}})
        assert await publish_sample(
            run.transitions, Lane.TRAIN, task.lease, len(texts), sample, replace(BODY, text=text)
        )
    await redis.hset(keys.payload("g0", 0), "text", "b")
    async with (
        service_context(redis, run_id, recipe_document("/none"), "verifier") as context,
        running(VerifierService().run(context)) as judging,
    ):

        async def all_verdicts():
            return await redis.xlen(lane.verdicts) == len(texts)

        await until(all_verdicts, judging, "the verdicts on all samples")
        verdicts = [verdict for _, verdict in await read_all(redis, keys, lane.verdicts, Verdict)]
    assert {verdict.index: verdict.outcome.value for verdict in verdicts} == {0: "unknown", 1: "wrong", 2: "correct"}
    assert all(verdict.facts.payload == keys.payload("g0", verdict.index) for verdict in verdicts)
