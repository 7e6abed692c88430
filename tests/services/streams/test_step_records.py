"""The record of one rollout step among many: found whatever the times between steps are, and after a rewind."""

import pytest

from services.contracts import StepRecord
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog, read_step

TIMES = ("generation_started_at", "generation_finished_at", "learning_started_at", "learning_finished_at")
FIRST_MS = 1_700_000_000_000
GAPS_MS = {
    "even": lambda number: 10_000 * number,
    "at once": lambda number: 0,
    "two per millisecond": lambda number: number // 2,
    "a pause in between": lambda number: number + (86_400_000 if number > 20 else 0),
    "ever longer": lambda number: number**4,
}


@pytest.fixture
def keys(run_id):
    return RunKeys(run_id)


async def add(redis, keys, step, time_ms, body=None):
    """A step's record as if it had been committed then."""
    times = dict.fromkeys(TIMES, 1.0)
    record = StepRecord(step=step, version=step, optimizer_steps=1, groups=("g",), metrics={}, **times)
    await redis.xadd(keys.steps, {"m": body or record.model_dump_json()}, id=f"{time_ms}-*")


@pytest.mark.parametrize("gaps", GAPS_MS)
async def test_each_step_is_found_and_no_other(redis, keys, gaps):
    for last in range(41):
        if last:
            await add(redis, keys, last, FIRST_MS + GAPS_MS[gaps](last))
        if 4 < last < 40:
            continue
        for step in range(last + 3):
            found = await read_step(redis, keys, step)
            assert (found and found.step) == (step if 1 <= step <= last else None), (step, last)


async def test_steps_that_are_missing_or_invalid(redis, keys):
    """Records that were trimmed, as of a run from before them; an invalid one becomes a dead letter once."""
    for step in range(5, 30):
        if step % 3 and step != 20:
            await add(redis, keys, step, FIRST_MS + 1000 * step)
    await add(redis, keys, 0, FIRST_MS + 1000 * 31, body="{}")
    present = {step for step in range(40) if await read_step(redis, keys, step)}
    assert present == {step for step in range(5, 30) if step % 3 and step != 20}
    assert len(await EventLog(redis, keys, "test").dead_letters()) == 1


async def test_the_cost_grows_with_the_logarithm(redis, keys, monkeypatch):
    for step in range(1, 1001):
        await add(redis, keys, step, FIRST_MS + 30_000 * step)
    calls = []
    execute = redis.execute_command

    async def counted(*arguments, **options):
        calls.append(arguments[0])
        return await execute(*arguments, **options)

    monkeypatch.setattr(redis, "execute_command", counted)
    assert (await read_step(redis, keys, 7)).step == 7
    assert len(calls) < 20
