"""Unknown verdicts through the REST gateway."""

from services.contracts import Lane, RunState, UnknownVerdict
from services.streams.keys import RunKeys
from tests.services.api.submitting import submitted


async def add_verdict(redis, run, index, **fields):
    """Adds an unknown verdict; returns its entry."""
    given = {"group": "g0", "prompt": "p0", "reason": "it raised ZeroDivisionError", "excerpt": "the end", "at": 5.0}
    verdict = UnknownVerdict(lane=Lane.TRAIN, index=index, **(given | fields))
    return (await redis.xadd(RunKeys(run).unknown, {"m": verdict.model_dump_json()})).decode()


async def test_unknown_verdicts_are_shown(api, redis, run_id):
    path = await submitted(api, redis, run_id, RunState.RUNNING)
    assert (await api.get(f"{path}/unknown")).json() == []
    assert (await api.get(path)).json()["unknown_verdicts"] == []
    entries = [await add_verdict(redis, run_id, index) for index in range(7)]
    shown = (await api.get(f"{path}/unknown")).json()
    assert [verdict["entry"] for verdict in shown] == entries
    assert shown[0] == {
        "entry": entries[0],
        "at": 5.0,
        "lane": "train",
        "prompt": "p0",
        "group": "g0",
        "index": 0,
        "reason": "it raised ZeroDivisionError",
        "excerpt": "the end",
    }
    assert (await api.get(f"{path}/unknown", params={"after": entries[4]})).json() == shown[5:]
    assert (await api.get(path)).json()["unknown_verdicts"] == shown[2:]


async def test_an_invalid_entry_is_named(api, redis, run_id):
    path = await submitted(api, redis, run_id)
    rejected = await api.get(f"{path}/unknown", params={"after": "1"})
    assert (rejected.status_code, "after" in rejected.json()["detail"]) == (422, True)


async def test_a_hostile_verdict_is_shown_or_dead(api, redis, run_id):
    path = await submitted(api, redis, run_id, RunState.RUNNING)
    await add_verdict(redis, run_id, 0, reason="r" * 5000, excerpt="\x1b[2J" * 1000, prompt=None)
    body = '{"kind":"unknown-verdict","lane":"train","group":"g","index":1,"reason":"","at":1e999}'
    await redis.xadd(RunKeys(run_id).unknown, {"m": body})
    [shown] = (await api.get(f"{path}/unknown")).json()
    assert (len(shown["reason"]), len(shown["excerpt"]), shown["prompt"]) == (500, 500, None)
    assert [letter["cause"] for letter in (await api.get(f"{path}/dead")).json()] == ["invalid"]
