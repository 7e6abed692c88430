"""What a replica loads before it is ready, among it the functions that rows of the data name."""

import asyncio
import json
import logging

import pytest

from services.sampler.data import DataError
from services.sampler.service import SamplerService
from services.settings import parse_recipe
from services.streams.keys import RunKeys
from services.streams.state.rewards.row_functions import read_row_functions, write_row_functions
from services.streams.state.runs import RunRecords
from tests.harness.hand_fleet import running, until
from tests.harness.small_run import recipe_document, service_context
from verifier.preloading import preloaded
from verifier.sandbox.pool import SandboxError
from verifier.service import VerifierService

ROWS = ["math", "answer-line", "pattern", "reasoning-gym"]
SCORE = "python:./rewards.py:score"
FILES = {"./rewards.py": "def score(prompt, response, reference, metadata):\n    return True\n"}


def document(path="rows.jsonl", patience_s=60.0, **verifier):
    """A recipe whose rows may name functions of ./rewards.py."""
    data = {"source": "jsonl", "path": str(path), "train": 8, "held_out": 2, "options": {}}
    limits = {"startup_timeout_s": patience_s}
    return recipe_document("/none", data=data, limits=limits, verifier={"files": ["./rewards.py"]} | verifier)


async def submitted(redis, run_id, recipe):
    await RunRecords(redis).create(run_id, parse_recipe(recipe), FILES)
    return recipe


async def texts(context):
    return [reward.text for reward in await preloaded(context)]


async def test_functions_of_rows_follow_the_recipes_rewards(redis, run_id):
    recipe = document(rewards={"mine": {"all": ["math", "python:./rewards.py:own", {"python": "./rewards.py:score"}]}})
    await submitted(redis, run_id, recipe)
    async with service_context(redis, run_id, recipe, "verifier") as context:
        await write_row_functions(redis, context.keys, ["python:./rewards.py:old"])
        await write_row_functions(redis, context.keys, [SCORE, "python:./rewards.py:more"])
        found = await texts(context)
    assert found == ["math", "python:./rewards.py:own", SCORE, *ROWS[1:], "python:./rewards.py:more"]


@pytest.mark.parametrize(
    "changes",
    [
        {"verifier": {}},
        {"verifier": {"files": ["./words.txt"]}},
        {"data": {"source": "jsonl", "path": "x", "layout": "fields", "options": {}}},
    ],
)
async def test_nothing_is_waited_for_without_such_rows(redis, run_id, changes):
    async with service_context(redis, run_id, document() | changes, "verifier") as context:
        async with asyncio.timeout(10):
            found = await texts(context)
    assert found == (["math"] if "data" in changes else ROWS)


async def test_the_loading_of_the_data_is_a_wait(redis, run_id):
    recipe = await submitted(redis, run_id, document(patience_s=77.0))
    async with service_context(redis, run_id, recipe, "verifier") as context:

        async def waits():
            return context.waits.current(float("inf"))

        async with running(preloaded(context)) as loading:
            await until(waits, loading, "the wait")
            [wait] = await waits()
            assert (wait.name, wait.deadline_s) == ("row-functions", 77.0)
            context.stopping.set()
            async with asyncio.timeout(30):
                [found] = await asyncio.gather(*loading)
    assert [reward.text for reward in found] == ROWS


async def test_data_that_is_late_does_not_stop_a_replica(redis, run_id, caplog):
    recipe = await submitted(redis, run_id, document(patience_s=0.1))
    async with service_context(redis, run_id, recipe, "verifier") as context:
        with caplog.at_level(logging.WARNING):
            assert await texts(context) == ROWS
    assert "functions that rows name are not loaded in advance" in caplog.text


def rows(path, *rewards):
    """A file of twelve rows that name these rewards in turn."""
    named = [(f"{number}?", rewards[number % len(rewards)]) for number in range(12)]
    lines = [{"question": question, "verifier": reward, "reference": {"answer": "1"}} for question, reward in named]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


async def test_the_sampler_writes_what_rows_name(redis, run_id, tmp_path):
    path = rows(tmp_path / "rows.jsonl", SCORE, "math", {"all": ["math", SCORE]})
    recipe = await submitted(redis, run_id, document(path))

    async def written():
        return await read_row_functions(redis, RunKeys(run_id)) is not None

    async with (
        service_context(redis, run_id, recipe, "sampler") as context,
        running(SamplerService().run(context)) as sampling,
    ):
        await until(written, sampling, "the functions")
    assert await read_row_functions(redis, RunKeys(run_id)) == (SCORE,)


@pytest.mark.parametrize("steps", [3, 0])
async def test_the_sampler_refuses_a_function_that_is_not_there(redis, run_id, tmp_path, steps):
    recipe = document(rows(tmp_path / "rows.jsonl", SCORE, "python:./rewards.py:gone"))
    recipe["limits"]["rollout_steps"] = steps
    await submitted(redis, run_id, recipe)
    refused = r"rows\.jsonl' row 2: field 'verifier': 'python:\./rewards\.py:gone' is not valid: .* it has 'score'$"
    async with service_context(redis, run_id, recipe, "sampler") as context:
        with pytest.raises(DataError, match=refused):
            await SamplerService().run(context)
        assert await read_row_functions(redis, context.keys) is None


async def test_a_replica_is_not_ready_before_the_functions_are(redis, run_id):
    recipe = await submitted(redis, run_id, document())
    async with service_context(redis, run_id, recipe, "verifier") as context:

        async def waits():
            return [wait.name for wait in context.waits.current(float("inf"))]

        async def ready():
            return context.heartbeat.info.state == "ready"

        async with running(VerifierService().run(context)) as judging:
            await until(waits, judging, "the wait for the data")
            assert (await waits(), await ready()) == (["row-functions"], False)
            await write_row_functions(redis, context.keys, [SCORE])
            await until(ready, judging, "the replica to be ready")


async def test_a_function_of_rows_that_does_not_load_ends_the_start(redis, run_id):
    recipe = await submitted(redis, run_id, document())
    async with service_context(redis, run_id, recipe, "verifier") as context:
        await write_row_functions(redis, context.keys, ["python:./rewards.py:gone"])
        with pytest.raises(SandboxError, match=r"python:\./rewards\.py:gone: .*gone is not a function"):
            await VerifierService().run(context)
        assert context.heartbeat.info.state != "ready"
