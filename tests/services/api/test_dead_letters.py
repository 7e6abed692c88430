"""Dead letters through the REST gateway."""

import math

import pytest

from services.contracts import DeadLetter, Lane, RunState
from services.streams.keys import RunKeys
from tests.services.api.submitting import submitted


async def add_letter(redis, run, group, reason):
    """Adds the dead letter of a task; returns its entry."""
    keys = RunKeys(run)
    letter = DeadLetter(
        stream=keys.lane(Lane.TRAIN).tasks,
        entry="1-0",
        reason=reason,
        deliveries=3,
        cause="deliveries",
        group=group,
        prompt="p",
        body='{"kind":"task"}' + " " * 1000,
        size=1015,
        at=5.0,
    )
    return (await redis.xadd(keys.dead, {"m": letter.model_dump_json()})).decode()


async def test_dead_letters_are_shown(api, redis, run_id):
    path = await submitted(api, redis, run_id, RunState.RUNNING)
    assert (await api.get(f"{path}/dead")).json() == []
    first = await add_letter(redis, run_id, "g0", "the replica died")
    second = await add_letter(redis, run_id, "g1", "r" * 2000)
    shown = (await api.get(f"{path}/dead")).json()
    assert [letter["entry"] for letter in shown] == [first, second]
    assert shown[0] == {
        "entry": first,
        "at": 5.0,
        "stream": RunKeys(run_id).lane(Lane.TRAIN).tasks,
        "cause": "deliveries",
        "reason": "the replica died",
        "deliveries": 3,
        "group": "g0",
        "prompt": "p",
        "size": 1015,
        "excerpt": '{"kind":"task"}' + " " * 485,
    }
    assert len(shown[1]["reason"]) == 500
    assert [letter["entry"] for letter in (await api.get(f"{path}/dead", params={"after": first})).json()] == [second]


@pytest.mark.parametrize("entry", ["abc", "1", "1-1-1", "9" * 30 + "-1"])
async def test_an_invalid_entry_is_named(api, redis, run_id, entry):
    path = await submitted(api, redis, run_id)
    rejected = await api.get(f"{path}/dead", params={"after": entry})
    assert (rejected.status_code, "after" in rejected.json()["detail"]) == (422, True)


@pytest.mark.parametrize("at", ["1e999", "-1", "1e300", "NaN"])
async def test_a_hostile_letter_is_shown(api, redis, run_id, at):
    path = await submitted(api, redis, run_id)
    body = '{"kind":"dead","stream":"\\u001b[2J","entry":"x","reason":"[red]","deliveries":1,"body":"","at":' + at + "}"
    await redis.xadd(RunKeys(run_id).dead, {"m": body}, id="18446744073709551615-1")
    answer = await api.get(f"{path}/dead")
    assert (answer.status_code, answer.json()[0]["entry"]) == (200, "18446744073709551615-1")
    assert 0 < answer.json()[0]["at"] < math.inf
