"""A turn of the controller costs what is new, not what has been."""

from services.contracts import EvaluationRecord, Event, RunState
from services.settings import parse_recipe
from services.streams.keys import RunKeys
from services.streams.state import heartbeat as heartbeat_module
from services.streams.state.events import READ_AT_ONCE, EventLog
from services.streams.state.heartbeat import Heartbeat
from services.streams.state.runs import RunRecords
from tests.harness.small_run import recipe_document
from tests.services.controller.hand_cluster import controlled, evaluate, replica, until, until_state

TURNS = 6


async def append(redis, stream, *messages):
    async with redis.pipeline(transaction=False) as pipe:
        for message in messages:
            pipe.xadd(stream, {"m": message.model_dump_json()})
        await pipe.execute()


def evaluation(name, kind="held-out"):
    scores = {"prompts": 8, "samples_per_prompt": 2, "accuracy": 0.5, "standard_error": 0.1, "unknown": 0}
    return EvaluationRecord(name=name, set=kind, version=0, **scores)


async def cost(redis, cluster):
    """What some turns of a running run cost: calls of each command, and bytes of all replies, per turn."""
    await until(lambda: cluster.looks >= 3)
    await redis.config_resetstat()
    before = cluster.looks
    await until(lambda: cluster.looks >= before + TURNS)
    calls, stats = await redis.info("commandstats"), await redis.info("stats")
    turns = cluster.looks - before
    return {name.removeprefix("cmdstat_"): about["calls"] / turns for name, about in calls.items()}, (
        stats["total_net_output_bytes"] / turns
    )


async def test_a_turn_costs_the_same_beside_a_long_past(own_server, run_id, tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat_module, "HEARTBEAT_S", 3600.0)
    monkeypatch.setattr(heartbeat_module, "LAPSES_S", 3600.0)
    _, redis = own_server
    found = []
    for run, past in (("fresh", 0), ("old", 200)):
        records, keys = RunRecords(redis), RunKeys(run)
        for number in range(past):
            await records.create(f"ended-{number}", parse_recipe(recipe_document("/model")))
            await records.transition(f"ended-{number}", RunState.FAILED, "test")
        if past:
            event = Event(service="rollout", phase="rollout-joining", text="an example", at=1.0)
            await append(redis, keys.events, *[event] * 1000)
            await append(redis, keys.evaluations, *(evaluation(f"step-{number}") for number in range(READ_AT_ONCE - 1)))
        async with (
            controlled(redis, run, tmp_path) as (records, cluster),
            Heartbeat(redis, replica(run)),
        ):
            await until_state(records, run, RunState.RUNNING)
            found.append(await cost(redis, cluster))
    (_, fresh_bytes), (calls, old_bytes) = found
    assert calls["time"] < 1.5, "presences are read once per turn"
    assert old_bytes < 1.2 * fresh_bytes


async def test_evaluations_deleted_by_a_rewind_do_not_end_the_run(redis, run_id, tmp_path):
    keys = RunKeys(run_id)
    async with (
        controlled(redis, run_id, tmp_path, evaluation={"sets": [{"name": "b", "source": "jsonl", "path": "/b"}]}) as (
            records,
            cluster,
        ),
        Heartbeat(redis, replica(run_id)),
    ):
        await until_state(records, run_id, RunState.RUNNING)
        await records.set_paths(run_id, export_path="/exported")
        await evaluate(redis, run_id, "after", 0.5)
        await two_turns(cluster)
        [(entry, _)] = await redis.xrange(keys.evaluations)
        await redis.xdel(keys.evaluations, entry)
        await evaluate(redis, run_id, "after", 0.5, "b")
        await two_turns(cluster)
        await two_turns(cluster)
        assert (await records.get(run_id)).state is RunState.RUNNING, "the other set's evaluation was deleted"
        await evaluate(redis, run_id, "after", 0.75)
        await until_state(records, run_id, RunState.SUCCEEDED)


async def two_turns(cluster):
    before = cluster.looks
    await until(lambda: cluster.looks >= before + 2)


async def test_the_newest_events_are_read_from_the_end(redis, run_id):
    keys, log = RunKeys(run_id), EventLog(redis, RunKeys(run_id), "test")
    events = [Event(service="test", phase="test", text=str(number), at=1.0) for number in range(250)]
    await append(redis, keys.events, *events)
    await redis.xadd(keys.events, {"m": b"no event"})
    await append(redis, keys.events, events[0])
    assert [event.text for event in await log.last_events(3)] == ["249", "0"], "one of the last three is no event"
    assert [event.text for event in await log.last_events(3)] == ["248", "249", "0"]
    assert [event.text async for event in log.newest_events()] == ["0", *(str(249 - number) for number in range(250))]
    assert await redis.xlen(keys.dead) == 1
    for number in range(5):
        await redis.xadd(keys.events, {"m": b"no event %d" % number})
    assert [event.text for event in await log.last_events(3)] == ["0"], "the last three are no events"
    assert [event.text for event in await log.last_events(3)] == ["248", "249", "0"]
