"""References that stay in their group's task because they are large: what a rollout replica sends is judged alike."""

import json
from dataclasses import replace

from rollout.tasks import REPEATED_REFERENCE, LeasedTask
from services.contracts import Lane, Prompt, Verdict
from services.settings import parse_recipe
from services.streams.keys import RunKeys
from services.streams.state.events import read_all
from services.streams.state.runs import RunRecords
from tests.harness.hand_fleet import running, until
from tests.harness.small_run import recipe_document, service_context
from tests.services.driven import BODY, STATE, DrivenRun, task_of
from verifier.service import VerifierService

SEES = "python:./rewards.py:sees"
FILES = {
    "./rewards.py": """
def sees(messages, response, reference, metadata):
    reason = f"{messages[0]['content']}: {len(reference['tests'])} characters, {metadata['level']}"
    return {"score": 0.75, "correct": reference["answer"] in response, "reason": reason}
"""
}
REWARDS = {"pattern": "pattern", "python": SEES, "all": '{"all":["pattern","' + SEES + '"]}'}
"""By the start of a group's id."""
EXPECTED = {
    "pattern": [("correct", 1.0), ("wrong", 0.0)],
    "python": [("correct", 0.75), ("wrong", 0.75)],
    "all": [("correct", 0.75), ("wrong", 0.0)],
}
TEXTS = ["Answer: 7", "Answer: 8"]
SIZES = (1, REPEATED_REFERENCE, 100 * REPEATED_REFERENCE)
"""How long the part of a reference is that only `sees` looks at."""


async def publish(run, context, kind, size):
    """Publish responses as a rollout replica does; returns whether their messages leave the reference to the task."""
    reference = {"pattern": "7$", "answer": "7", "tests": "x" * size}
    asked, metadata = ({"role": "user", "content": "3 + 4"},), {"level": "easy"}
    prompt = Prompt(id="p0", messages=asked, verifier=REWARDS[kind], reference=reference, metadata=metadata)
    task = task_of(f"{kind}-{size}", len(TEXTS)).model_copy(update={"prompt": prompt})
    assert await run.sampler.dispatch(Lane.TRAIN, [task], STATE)
    consumer = run.rollout()
    [delivery] = await consumer.read(1, 1)
    leased = LeasedTask(context, Lane.TRAIN, consumer, run.transitions, delivery)
    payloads = [replace(BODY, text=text) for text in TEXTS]
    samples = [leased.sample(index, payload, 1.0) for index, payload in enumerate(payloads)]
    await leased.finish(list(zip(samples, payloads, strict=True)))
    left_to_task = len(json.dumps(reference)) > REPEATED_REFERENCE
    for sample in samples:
        assert (sample.reference_in_task, sample.reference) == (left_to_task, {} if left_to_task else reference)
    return left_to_task


async def test_references_of_any_size_are_judged_alike(redis, run_id):
    keys = RunKeys(run_id)
    data = {"source": "jsonl", "path": "none", "layout": "fields", "verifier": REWARDS["python"], "options": {}}
    document = recipe_document("/none", data=data, verifier={"rewards": {"other": "pattern"}, "processes": 1})
    await RunRecords(redis).create(run_id, parse_recipe(document), FILES)
    run = await DrivenRun.open(redis, keys, new=False)
    async with service_context(redis, run_id, document, "rollout") as context:
        large = [await publish(run, context, kind, size) for kind in REWARDS for size in SIZES]
    assert large == [False, True, True] * len(REWARDS)

    async def all_there():
        return await redis.xlen(keys.lane(Lane.TRAIN).verdicts) >= len(large) * len(TEXTS)

    async with (
        service_context(redis, run_id, document, "verifier") as context,
        running(VerifierService().run(context)) as judging,
    ):
        await until(all_there, judging, "the verdicts")
    found = await read_all(redis, keys, keys.lane(Lane.TRAIN).verdicts, Verdict)
    verdicts = {(verdict.group, verdict.index): verdict for _, verdict in found}
    for size in SIZES:
        for kind, expected in EXPECTED.items():
            of_group = [verdicts[f"{kind}-{size}", index] for index in range(len(TEXTS))]
            assert [(verdict.outcome.value, verdict.score) for verdict in of_group] == expected, of_group
        assert verdicts[f"python-{size}", 0].reason == f"3 + 4: {size} characters, easy"
