"""Dead letters through the REST gateway."""

import math

import pytest

from services.contracts import (
    DeadLetter,
    Lane,
    Prompt,
    Release,
    RunState,
    Sampling,
    Task,
)
from services.streams.keys import RunKeys
from services.streams.state.group_state import GroupTransitions
from tests.services.api.submitting import submitted


async def dead_letter(redis, run, group, **fields):
    """A dead letter of a dispatched task, whose group the sampler has ended."""
    keys = RunKeys(run)
    prompt = Prompt(id="p", messages=(), verifier="pattern", reference={})
    sampling = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=8)
    transitions = await GroupTransitions.fenced(redis, keys, "test")
    task = Task(group=group, prompt=prompt, samples=2, sampling=sampling)
    await transitions.dispatch(Lane.TRAIN, [task], None)
    await transitions.release(Lane.TRAIN, group, Release.DEAD, 2)
    body = task.model_dump_json()
    values = {
        "reason": "the replica died",
        "deliveries": 3,
        "cause": "deliveries",
        "size": len(body),
        "at": 5.0,
    } | fields
    letter = DeadLetter(stream=keys.lane(Lane.TRAIN).tasks, entry="1-0", group=group, prompt="p", body=body, **values)
    return (await redis.xadd(keys.dead, {"m": letter.model_dump_json()})).decode()


async def test_dead_letters_are_shown_and_redriven(api, redis, run_id):
    path = await submitted(api, redis, run_id, RunState.RUNNING)
    assert (await api.get(f"{path}/dead")).json() == []
    first = await dead_letter(redis, run_id, "g0")
    second = await dead_letter(redis, run_id, "g1", reason="r" * 2000)
    shown = (await api.get(f"{path}/dead")).json()
    assert [letter["entry"] for letter in shown] == [first, second]
    assert shown[0]["excerpt"].startswith('{"kind":"task"')
    expected = {
        "at": 5.0,
        "cause": "deliveries",
        "reason": "the replica died",
        "deliveries": 3,
        "group": "g0",
        "prompt": "p",
        "redriven": None,
    }
    assert {name: shown[0][name] for name in expected} == expected
    assert len(shown[1]["reason"]) == 500
    assert [letter["entry"] for letter in (await api.get(f"{path}/dead", params={"after": first})).json()] == [second]
    done = await api.post(f"{path}/dead/{first}/redrive")
    assert (done.status_code, done.json()["redriven"]) == (200, "g0-r1")
    again = await api.post(f"{path}/dead/{first}/redrive")
    assert (again.status_code, again.json()["detail"]) == (409, "its group was requeued before, as g0-r1")
    [attempt] = (await api.post(f"{path}/dead/redrive")).json()
    assert (attempt["entry"], attempt["group"], attempt["redriven"]) == (second, "g1", "g1-r1")
    assert [letter["redriven"] for letter in (await api.get(f"{path}/dead")).json()] == ["g0-r1", "g1-r1"]
    view = (await api.get(path)).json()
    assert (view["groups"]["dispatched"], view["groups"]["dead"], view["groups"]["pending"]) == (4, 2, 2)
    assert view["groups"]["reconciled"]
    assert [event["phase"] for event in view["events"]] == ["redriven", "redriven"]


@pytest.mark.parametrize("entry", ["abc", "1", "1-1-1", "9" * 30 + "-1"])
async def test_an_unknown_letter_is_named(api, redis, run_id, entry):
    path = await submitted(api, redis, run_id)
    rejected = await api.post(f"{path}/dead/{entry}/redrive")
    assert (rejected.status_code, "entry" in rejected.json()["detail"]) == (422, True)
    assert (await api.get(f"{path}/dead", params={"after": entry})).status_code == 422
    assert (await api.post(f"{path}/dead/1-1/redrive")).status_code == 404


@pytest.mark.parametrize(("state", "hint"), [("failed", "; resume it first"), ("succeeded", "")])
async def test_nothing_is_redriven_in_an_ended_run(api, redis, run_id, state, hint):
    path = await submitted(api, redis, run_id, RunState(state))
    entry = await dead_letter(redis, run_id, "g0")
    for route in (f"{path}/dead/redrive", f"{path}/dead/{entry}/redrive"):
        rejected = await api.post(route)
        expected = (409, f"run {run_id!r} has ended: it is {state}{hint}")
        assert (rejected.status_code, rejected.json()["detail"]) == expected
    assert (await api.get(f"{path}/dead")).json()[0]["redriven"] is None


@pytest.mark.parametrize("at", ["1e999", "-1", "1e300", "NaN"])
async def test_a_hostile_letter_is_shown(api, redis, run_id, at):
    path = await submitted(api, redis, run_id)
    body = '{"kind":"dead","stream":"\\u001b[2J","entry":"x","reason":"[red]","deliveries":1,"body":"","at":' + at + "}"
    await redis.xadd(RunKeys(run_id).dead, {"m": body}, id="18446744073709551615-1")
    answer = await api.get(f"{path}/dead")
    assert (answer.status_code, answer.json()[0]["entry"]) == (200, "18446744073709551615-1")
    assert 0 < answer.json()[0]["at"] < math.inf
