"""The verifier's service on a real server: what reaches a reward, what its verdict says, and what one hang delays."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

from prometheus_client import REGISTRY

from services.contracts import Lane, SandboxFault, Verdict
from services.settings import parse_recipe
from services.streams.keys import RunKeys
from services.streams.state.events import read_all
from services.streams.state.runs import RunRecords
from services.waits import steady_time
from tests.harness.hand_fleet import running, until
from tests.harness.small_run import recipe_document, service_context
from tests.services.driven import BODY, DrivenRun, publish_sample, sample_of
from verifier.service import VerifierService

ENDLESS = "a" * 60 + "b"
BACKTRACKING = {"pattern": "(a+)+$"}
FUNCTIONS = """
def told(messages, response, reference, metadata):
    said = messages[0]["role"], messages[0]["content"], response, reference, metadata
    return {"score": 0.25, "reason": " ".join(map(str, said))}

def failing(messages, response, reference, metadata):
    return response["no such key"]
"""


class Judged:
    """A run whose samples a verifier's replica judges."""

    def __init__(self, redis, run_id):
        self.redis, self.run_id, self.keys = redis, run_id, RunKeys(run_id)
        self.lane = self.keys.lane(Lane.TRAIN)

    async def publish(self, texts, verifier="pattern", reference=BACKTRACKING, group="g0"):
        run = await DrivenRun.open(self.redis, self.keys)
        task = await run.dispatched(group, len(texts))
        for index, text in enumerate(texts):
            sample = sample_of(self.keys, group, index).model_copy(
                update={"verifier": verifier, "reference": reference}
            )
            assert await publish_sample(
                run.transitions, Lane.TRAIN, task.lease, len(texts), sample, replace(BODY, text=text)
            )

    @asynccontextmanager
    async def replica(self, files=None, **sections):
        """A replica; gives its context and task."""
        document = recipe_document("/none", **sections)
        if files:
            await RunRecords(self.redis).create(self.run_id, parse_recipe(document), files)
        async with (
            service_context(self.redis, self.run_id, document, "verifier") as context,
            running(VerifierService().run(context)) as judging,
        ):
            yield context, judging

    async def verdicts(self, judging, count):
        async def all_there():
            return await self.redis.xlen(self.lane.verdicts) >= count

        await until(all_there, judging, f"{count} verdicts")
        found = [verdict for _, verdict in await read_all(self.redis, self.keys, self.lane.verdicts, Verdict)]
        return {(verdict.group, verdict.index): verdict for verdict in found}


async def test_a_slow_text_does_not_delay_those_around_it(redis, run_id):
    judged = Judged(redis, run_id)
    await judged.publish(["a", "b", ENDLESS, "a"])
    async with judged.replica(verifier={"timeout_s": 20.0, "processes": 1}) as (_, judging):
        verdicts = await judged.verdicts(judging, 3)
        labels = {"run": run_id, "fault": SandboxFault.TIMEOUT.value}
        assert not REGISTRY.get_sample_value("penstock_sandbox_faults_total", labels), "the slow text has its time-out"
    found = {index: verdict.outcome.value for (_, index), verdict in verdicts.items()}
    assert found == {0: "correct", 1: "wrong", 3: "correct"}


async def test_a_hang_does_not_stop_the_reading_of_samples(redis, run_id):
    judged = Judged(redis, run_id)
    await judged.publish([ENDLESS, ENDLESS])
    async with judged.replica(verifier={"timeout_s": 60.0, "processes": 1}) as (_, judging):
        await judged.publish(["a", "b"], group="g1")
        verdicts = await judged.verdicts(judging, 2)
        assert {group for group, _ in verdicts} == {"g1"}


async def test_time_between_two_evaluations_is_no_stall(redis, run_id):
    async with Judged(redis, run_id).replica(limits={"stall_timeout_s": 0.5}) as (context, judging):

        async def both_shown():
            return len(context.waits.current(steady_time())) == 2

        await until(both_shown, judging, "the waits for samples of both lanes")
        now = steady_time()
        stalled = {wait.name: wait.stalled(now) for wait in context.waits.current(now)}
    assert stalled == {"train-samples": True, "evaluation-samples": False}


async def test_a_replica_that_is_stopped_judges_what_it_has_read(redis, run_id):
    judged = Judged(redis, run_id)
    await judged.publish([ENDLESS, "a"])
    async with judged.replica(verifier={"timeout_s": 2.0}) as (context, judging):
        await judged.verdicts(judging, 1)
        context.stopping.set()
        async with asyncio.timeout(60):
            await asyncio.gather(*judging)
        verdicts = await judged.verdicts(judging, 2)
    assert (verdicts["g0", 0].outcome, verdicts["g0", 1].outcome) == ("unknown", "correct")
    assert verdicts["g0", 0].reason == "no judgement within 2 s of CPU time"


async def test_verdicts_stay_with_their_samples_after_a_damaged_one(redis, run_id):
    judged = Judged(redis, run_id)
    await judged.publish(["a", "b", "a"], reference={"pattern": "a$"})
    await redis.hset(judged.keys.payload("g0", 0), "text", "b")
    async with judged.replica() as (_, judging):
        verdicts = await judged.verdicts(judging, 3)
    found = {index: verdict.outcome.value for (_, index), verdict in verdicts.items()}
    assert found == {0: "unknown", 1: "wrong", 2: "correct"}
    assert all(verdict.facts.payload == judged.keys.payload("g0", verdict.index) for verdict in verdicts.values())


async def test_an_unknown_verifier_is_unknown_with_a_reason(redis, run_id):
    judged = Judged(redis, run_id)
    for group, verifier in (("g0", "no such"), ("g1", "mine"), ("g2", "{"), ("g3", "pattern")):
        await judged.publish(["a", "b"], verifier, group=group)
    async with judged.replica() as (_, judging):
        verdicts = await judged.verdicts(judging, 8)
    for group, value in (("g0", "'no such'"), ("g1", "'mine'"), ("g2", "'{'")):
        assert verdicts[group, 0].outcome == "unknown"
        assert verdicts[group, 0].reason.startswith(f"verifier: {value} is not valid: expected")
    assert verdicts["g3", 0].outcome == "correct"
    assert verdicts["g3", 0].reason == "the pattern matches 'a'"


async def test_prompt_and_metadata_reach_a_function_of_the_users(redis, run_id):
    judged = Judged(redis, run_id)
    verifier = "python:./rewards.py:told"
    await judged.publish(["x", "y"], verifier, {"answer": 7})
    await judged.publish(["x", "y"], "python:./rewards.py:failing", {"answer": 7}, group="g1")
    files = {"./rewards.py": FUNCTIONS}
    async with judged.replica(files, verifier={"rewards": {"mine": verifier}}) as (_, judging):
        verdicts = await judged.verdicts(judging, 4)
    told, failed = verdicts["g0", 1], verdicts["g1", 0]
    assert (told.outcome, told.score, told.reason) == ("wrong", 0.25, "user 1 + 1 y 7 {}")
    assert failed.outcome == "unknown"
    assert failed.reason.endswith("(rewards.py, line 7)"), failed.reason


async def test_a_combined_reward_gives_the_score_of_each_part(redis, run_id):
    judged = Judged(redis, run_id)
    verifier = '{"weighted":[{"name":"form","verifier":"pattern","weight":3},{"name":"sum","verifier":"math"}]}'
    await judged.publish([r"\boxed{2}", r"\boxed{3}", "none"], verifier, {"pattern": "box", "answer": "2"})
    async with judged.replica() as (_, judging):
        verdicts = await judged.verdicts(judging, 3)
    scores = {index: (verdict.score, verdict.rewards) for (_, index), verdict in verdicts.items()}
    assert scores == {
        0: (1.0, {"form": 1.0, "sum": 1.0}),
        1: (0.75, {"form": 1.0, "sum": 0.0}),
        2: (0.0, {"form": 0.0, "sum": 0.0}),
    }
    assert verdicts["g0", 1].outcome == "correct", "the first part decides"
    assert "sum wrong (0)" in verdicts["g0", 1].reason
