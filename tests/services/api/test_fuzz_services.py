"""Services among hostile messages, on a real server: a run still ends, and a verifier survives."""

import asyncio
import random
import re
from dataclasses import replace

import httpx
import pytest

from services.api.app import create_app
from services.contracts import Cause, Lane, Outcome, Verdict
from services.sampler.service import SamplerService
from services.settings import parse_recipe
from services.streams.delivery.consumer import Consumer
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog
from services.streams.state.group_counts import group_counts
from services.streams.state.group_state import GroupTransitions, RejectedMessageError
from services.streams.state.runs import RunRecords
from tests.harness.api_access import ACCESS, HEADERS
from tests.harness.hand_fleet import HandFleet, HandLearner, evaluated, running, until
from tests.harness.small_run import recipe_document, service_context
from tests.services.driven import (
    BODY,
    EVENT,
    LETTER,
    STATE,
    batch_of,
    publish_sample,
    put_stub_record,
    record_of,
    sample_of,
    task_of,
)
from tests.services.hostile import NESTED, VALUES, damaged
from verifier.service import VerifierService

ATTACKED = ("tasks", "samples", "verdicts", "dead", "events", "evaluations")


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    """The sampler's archive belongs to the test, not to the folder where the tests run."""
    monkeypatch.setenv("PENSTOCK_RUNS", str(tmp_path))


class SteadyFleet(HandFleet):
    """Dead-letters tasks that it cannot answer, as a replica does with a prompt that its template rejects."""

    async def answer(self, lane, delivery):
        tasks = self.keys.lane(lane).tasks
        consumer = Consumer(self.redis, self.keys, tasks, "rollout", "hand", type(delivery.message), 5.0, 3)
        try:
            await super().answer(lane, delivery)
            await consumer.ack(delivery.lease)
        except RejectedMessageError as error:
            await consumer.dead_letter(delivery, str(error), Cause.INVALID)
        except (KeyError, TypeError, AttributeError) as error:
            await consumer.dead_letter(delivery, f"no question of this test: {error!r}", Cause.REFUSED)


class Attacker:
    """Adds modified and unmodified copies of messages to their streams while it runs."""

    def __init__(self, redis, keys, seed):
        self.redis, self.keys = redis, keys
        self.random = random.Random(seed)
        self.sent = set()

    def streams(self):
        lanes = [self.keys.lane(lane) for lane in Lane]
        names = [getattr(lane, name) for lane in lanes for name in ATTACKED[:3]]
        return names + [getattr(self.keys, name) for name in ATTACKED[3:]]

    async def run(self):
        while True:
            for stream in self.streams():
                for entry, fields in await self.redis.xrevrange(stream, count=10):
                    if (stream, entry) not in self.sent:
                        await self.attack(stream, fields[b"m"])
            await asyncio.sleep(0.02)

    async def attack(self, stream, raw):
        sent = raw if self.random.random() < 0.2 else damaged(self.random.choice, raw)
        if sent.startswith(b'{"kind": "dead"') and b'"invalid"' not in sent:
            return  # a dead letter ends its group, whichever process wrote it
        self.sent.add((stream, await self.redis.xadd(stream, {"m": sent})))


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_a_run_ends_despite_hostile_messages(redis, run_id, seed, caplog):
    caplog.set_level("CRITICAL", "services.streams")
    document = recipe_document("/none", limits={"rollout_steps": 2})
    keys = RunKeys(run_id)
    fleet, attacker = SteadyFleet(redis, keys), Attacker(redis, keys, seed)
    learner = HandLearner(redis, keys, fleet)
    async with (
        service_context(redis, run_id, document, "sampler") as sampler,
        service_context(redis, run_id, document, "verifier") as verifier,
        running(
            SamplerService().run(sampler), VerifierService().run(verifier), fleet.run(), learner.run(), attacker.run()
        ) as tasks,
    ):
        await until(lambda: evaluated(redis, keys, "after"), tasks, "the last evaluation", deadline_s=150)
        counts = await group_counts(redis, keys)
        letters = await EventLog(redis, keys, "test").dead_letters()
    assert counts.reconciled, counts
    assert counts.trained == 8
    names = [group.group for batch in learner.batches for group in batch.groups]
    assert len(set(names)) == len(names) == 8
    assert len(attacker.sent) > 100
    invalid = {entry: letter for entry, letter in letters if letter.cause is Cause.INVALID}
    assert len(invalid) > 30
    own = {entry.decode() for stream, entry in attacker.sent if stream == keys.dead}  # may have any reason, or none
    assert all(letter.reason for entry, letter in invalid.items() if entry not in own)
    assert set(invalid) - own


REFERENCES = [
    *({name: value} for name in ("pattern", "answer", "entry") for value in VALUES),
    {},
    {"pattern": "(a+)+$"},
    {"pattern": "("},
    {"answer": "9" * 4000},
    {"answer": "\\frac{" * 200},
    {"answer": "10**10**10"},
    {"task": [], "entry": {"answer": 1}},
    {"task": "no_such_task", "entry": {"answer": "1"}},
    {"task": "chain_sum", "entry": {"answer": NESTED}},
    {"task": "chain_sum", "entry": 5},
    {"task": "../../etc", "entry": {"answer": ""}},
    {"x": 10**4000},
    {"x": float("nan")},
]
VERIFIERS = ["pattern", "math", "answer-line", "reasoning-gym", "", "no such verifier", "x" * 10_000, "\x00"]
BACKTRACKING = replace(BODY, text="a" * 40 + "!")


@pytest.mark.parametrize("references", [3, pytest.param(12, marks=pytest.mark.slow)])
async def test_a_verifier_survives_any_reference(redis, run_id, references):
    """Some references with every verifier: each sample gets a verdict, and no verdict is wrongly `correct`."""
    document = recipe_document("/none", verifier={"timeout_s": 2.0}, limits={"lease_s": 60.0})
    keys = RunKeys(run_id)
    chosen = random.Random(7)
    cases = [(name, reference) for name in VERIFIERS for reference in chosen.sample(REFERENCES, references)]
    cases.append(("pattern", {"pattern": "(a+)+$"}))
    await put_stub_record(redis, keys)
    sampler = await GroupTransitions.fenced(redis, keys, "sampler")
    transitions = GroupTransitions(redis, keys, "rollout")
    streams = keys.lane(Lane.TRAIN)
    tasks = Consumer(redis, keys, streams.tasks, "rollout", "r", type(task_of("g")), 60.0, 3)
    await tasks.open()
    assert await sampler.dispatch(Lane.TRAIN, [task_of("g0", len(cases))], STATE)
    [held] = await tasks.read(1, 1)
    for index, (name, reference) in enumerate(cases):
        sample = sample_of(keys, "g0", index).model_copy(update={"verifier": name, "reference": reference})
        assert await publish_sample(transitions, Lane.TRAIN, held.lease, len(cases), sample, BACKTRACKING)
    verdicts = Consumer(redis, keys, streams.verdicts, "sampler", "s", Verdict, 60.0, 3)
    await verdicts.open()
    judged = {}
    async with (
        service_context(redis, run_id, document, "verifier") as context,
        running(VerifierService().run(context)) as services,
    ):

        async def all_judged():
            for delivery in await verdicts.read(100, 0.1):
                judged[delivery.message.index] = delivery.message
            return len(judged) == len(cases)

        await until(all_judged, services, f"verdicts on {len(cases)} samples", deadline_s=200)
    for index, (name, reference) in enumerate(cases):
        verdict = judged[index]
        if name not in VERIFIERS[:4] or not known_to(name, reference):
            assert verdict.outcome is Outcome.UNKNOWN, (name, reference, verdict)
            assert verdict.reason
        assert verdict.score == float(verdict.outcome is Outcome.CORRECT)
    assert "no judgement within 2 s" in judged[len(cases) - 1].reason
    assert (await redis.xpending(streams.samples, "verifier"))["pending"] == 0
    assert await EventLog(redis, keys, "test").dead_letters() == []


def known_to(name, reference):
    """Whether the reference has the fields that the verifier needs, of any type."""
    needed = {"pattern": {"pattern"}, "math": {"answer"}, "answer-line": {"answer"}, "reasoning-gym": {"task", "entry"}}
    return needed[name] <= set(reference)


async def test_the_gateway_shows_a_run_with_values_outside_json(redis, run_id):
    """Well-formed entries with a value that JSON cannot represent."""
    keys = RunKeys(run_id)
    await RunRecords(redis).create(run_id, parse_recipe(recipe_document("/none")))
    raws = {
        keys.events: EVENT.model_dump_json(),
        keys.steps: record_of(batch_of(keys, 1, ["g0"]), 1).model_dump_json(),
        keys.dead: LETTER.model_dump_json(),
    }
    for stream, raw in raws.items():
        for value in ("NaN", "Infinity", "-1e308"):
            for field in ("at", "learning_finished_at"):
                await redis.xadd(stream, {"m": re.sub(rf'"{field}":[0-9.]+', f'"{field}":{value}', raw)})
    transport = httpx.ASGITransport(app=create_app(redis, ACCESS), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=HEADERS) as client:
        for path in ("", "/metrics", "/dead", "/waits"):
            answer = await client.get(f"/v1/runs/{run_id}{path}")
            assert answer.status_code == 200, (path, answer.text)
