"""A run's story: pages of it, and streams that follow it, over a real socket."""

import asyncio
import json
import logging

import httpx
import pytest

from services.api.access.tokens import TokenAccess, local_principal, token_digest
from services.api.server import serve_api
from services.api.streams import hub as hubs
from services.api.streams import sending
from services.api.streams.run_events import StoryCursor
from services.contracts import EvaluationRecord, RunState, StepRecord
from services.settings import Recipe
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog
from services.streams.state.runs import RunRecords
from tests.harness.api_access import ACCESS, HEADERS, TOKEN
from tests.harness.free_ports import free_port
from tests.harness.small_run import recipe_document

STREAM = {**HEADERS, "accept": "text/event-stream"}
DEADLINE_S = 20.0
FORGED = "\x1b[31m\U0001f600\r\ndata: forged\u2028\x85\x1c\x00\n\nevent: end\n\n"
"""Would end a line, or an event, if it were sent as it is."""


def step_of(number):
    times = dict.fromkeys(
        ("generation_started_at", "generation_finished_at", "learning_started_at", "learning_finished_at"), 1.0
    )
    return StepRecord(
        step=number,
        version=number,
        optimizer_steps=1,
        groups=("g",),
        metrics={"accuracy": number / 10},
        **times,
    )


def evaluation_of(name):
    return EvaluationRecord(
        name=name, set="held-out", version=1, newest_version=1, prompts=2, samples_per_prompt=1, temperature=1.0,
        top_p=1.0, accuracy=0.5, standard_error=0.1, pass_at=(), majority=None, majority_standard_error=None,
        response_length=3.0, truncated_share=0.0, unknown=0, dropped=0,
    )  # fmt: skip


class Told:
    """A run whose story the test writes."""

    def __init__(self, redis, run):
        self.redis, self.run, self.keys = redis, run, RunKeys(run)
        self.log = EventLog(redis, self.keys, "controller")
        self.records = RunRecords(redis)

    async def create(self):
        await self.records.create(self.run, Recipe.model_validate(recipe_document("/none")))
        return self

    async def step(self, number):
        await self.redis.xadd(self.keys.steps, {"m": step_of(number).model_dump_json()})

    async def evaluation(self, name):
        await self.redis.xadd(self.keys.evaluations, {"m": evaluation_of(name).model_dump_json()})

    async def end(self):
        await self.records.transition(self.run, RunState.CANCELLED, "by the test")


@pytest.fixture
async def told(redis, run_id):
    return await Told(redis, run_id).create()


@pytest.fixture
async def served(redis):
    """A gateway on a socket; its address."""
    stopping, port = asyncio.Event(), free_port()
    serving = asyncio.create_task(serve_api(redis, ACCESS, "127.0.0.1", port, stopping))
    async with asyncio.timeout(DEADLINE_S):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            while True:
                try:
                    await client.get("/healthz")
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(0.02)
    yield f"http://127.0.0.1:{port}"
    stopping.set()
    async with asyncio.timeout(DEADLINE_S):
        await serving


async def frames(lines):
    """The server-sent events of a response's lines, as dicts; comments are left out."""
    found = {}
    async for line in lines:
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(": ")
            found[name] = value
        elif found.keys() - {"retry"}:
            yield found
            found = {}


async def taken(stream, count):
    """The next frames of a stream."""
    async with asyncio.timeout(DEADLINE_S):
        return [await anext(stream) for _ in range(count)]


async def page_of(api, run, **params):
    answer = await api.get(f"/v1/runs/{run}/events", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_page_has_the_story_in_order(api, told):
    await told.log.write("queued", "one")
    await told.step(1)
    await told.evaluation("before")
    page = await page_of(api, told.run)
    assert [found["kind"] for found in page["events"]] == ["state", "event", "step", "evaluation"]
    assert [page["more"], page["ended"]] == [False, False]
    state, event, step, evaluation = (found["data"] for found in page["events"])
    assert (state["state"], event["text"], step["metrics"], evaluation["name"]) == (
        "queued", "one", {"accuracy": 0.1}, "before",
    )  # fmt: skip
    assert step["id"]
    assert page["events"][-1]["id"] == page["next"]


async def test_each_cursor_continues_exactly_behind_its_item(api, told):
    for number in range(1, 4):
        await told.step(number)
        await told.log.write("scaling", str(number))
    await told.end()
    whole = await page_of(api, told.run)
    for index, found in enumerate(whole["events"]):
        rest = await page_of(api, told.run, after=found["id"])
        assert rest["events"] == whole["events"][index + 1 :]
    assert whole["ended"]
    assert (await page_of(api, told.run, after="end"))["events"] == []


async def test_small_pages_lose_and_repeat_nothing(api, told):
    for number in range(1, 8):
        await told.step(number)
        await told.log.write("scaling", str(number))
    found, after, more = [], "start", True
    while more:
        page = await page_of(api, told.run, after=after, limit=3)
        found, after, more = found + page["events"], page["next"], page["more"]
    assert found == (await page_of(api, told.run))["events"]
    assert len(found) == 15


async def test_entries_of_equal_ids_are_all_told(api, told):
    """Two streams may give the same id: one position for both would skip an entry."""
    entry = "99999999999999-5"
    await told.redis.xadd(told.keys.steps, {"m": step_of(1).model_dump_json()}, id=entry)
    page = await page_of(api, told.run)
    await told.redis.xadd(told.keys.evaluations, {"m": evaluation_of("late").model_dump_json()}, id=entry)
    [found] = (await page_of(api, told.run, after=page["next"]))["events"]
    assert found["data"]["name"] == "late"


async def test_hostile_entries_are_left_out(api, told):
    for body in (b"", b"\xff", b"{}", b'{"kind": "event"}', b"[" * 5000):
        await told.redis.xadd(told.keys.events, {"m": body})
    await told.log.write(
        "queued", "\x1b[31m\ud83d\ude00\r\ndata: forged\u2028".encode("utf-16", "surrogatepass").decode("utf-16")
    )
    page = await page_of(api, told.run)
    assert [found["kind"] for found in page["events"]] == ["state", "event"]
    assert "forged" in page["events"][1]["data"]["text"]


@pytest.mark.parametrize(
    "after", ["²-0_0-0_0-0_0", "\uff11-0_0-0_0-0_0", "0-0", "end ", "", "9" * 40, "1-1_1-1_1-1_1\n"]
)
async def test_a_bad_cursor_is_422(api, told, after):
    answer = await api.get(f"/v1/runs/{told.run}/events", params={"after": after})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "query.after")
    if after.isascii() and "\n" not in after:
        answer = await api.get(f"/v1/runs/{told.run}/events", headers={"last-event-id": after or "-"})
        assert answer.status_code == 422


async def test_a_stream_sends_history_then_follows_to_the_end(served, told):
    await told.log.write("queued", FORGED)
    async with httpx.AsyncClient(base_url=served, headers=STREAM) as client:
        async with client.stream("GET", f"/v1/runs/{told.run}/events") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            stream = frames(answer.aiter_lines())
            state, event = await taken(stream, 2)
            assert (state["event"], event["event"]) == ("state", "event")
            assert json.loads(event["data"])["data"]["text"] == FORGED
            await told.step(1)
            [step] = await taken(stream, 1)
            assert json.loads(step["data"])["data"]["metrics"] == {"accuracy": 0.1}
            await told.evaluation("before")
            [evaluation] = await taken(stream, 1)
            assert evaluation["event"] == "evaluation"
            await told.end()
            state, end = await taken(stream, 2)
            assert json.loads(state["data"])["data"]["state"] == "cancelled"
            assert (end["event"], json.loads(end["data"])) == ("end", {"reason": "the run is cancelled"})
            async with asyncio.timeout(DEADLINE_S):
                assert [found async for found in stream] == []
        headers = {"last-event-id": event["id"]}
        async with client.stream("GET", f"/v1/runs/{told.run}/events", headers=headers) as answer:
            again = [found async for found in frames(answer.aiter_lines())]
    assert [found["event"] for found in again] == ["step", "evaluation", "state", "end"]
    assert [found["id"] for found in again[:1]] == [step["id"]]


async def test_no_item_is_lost_or_repeated_while_streams_join(served, told):
    """Streams open while the run writes; each gets every item once."""
    count = 300

    async def write():
        for number in range(count):
            await told.log.write("scaling", f"number {number}")
            if number % 10 == 0:
                await asyncio.sleep(0.005)
        await told.end()

    async def read(client):
        async with client.stream("GET", f"/v1/runs/{told.run}/events") as answer:
            return [found async for found in frames(answer.aiter_lines())]

    async with httpx.AsyncClient(base_url=served, headers=STREAM, timeout=DEADLINE_S) as client:
        writing = asyncio.create_task(write())
        readers = []
        for _ in range(8):
            readers.append(asyncio.create_task(read(client)))
            await asyncio.sleep(0.03)
        async with asyncio.timeout(DEADLINE_S):
            stories = await asyncio.gather(*readers)
            await writing
    for story in stories:
        texts = [json.loads(found["data"])["data"]["text"] for found in story if found["event"] == "event"]
        assert texts == [f"number {number}" for number in range(count)]
        assert len({found["id"] for found in story if "id" in found}) == count + 2


async def test_a_deleted_run_ends_its_streams(served, told):
    async with (
        httpx.AsyncClient(base_url=served, headers=STREAM) as client,
        client.stream("GET", f"/v1/runs/{told.run}/events") as answer,
    ):
        stream = frames(answer.aiter_lines())
        await taken(stream, 1)
        await told.redis.delete(told.keys.record)
        [end] = await taken(stream, 1)
    assert json.loads(end["data"]) == {"reason": "the run was deleted"}


async def test_an_idle_stream_has_heartbeats(served, told, monkeypatch):
    monkeypatch.setattr("services.api.streams.following.HEARTBEAT_S", 0.05)
    async with (
        httpx.AsyncClient(base_url=served, headers=STREAM) as client,
        client.stream("GET", f"/v1/runs/{told.run}/events") as answer,
        asyncio.timeout(DEADLINE_S),
    ):
        async for line in answer.aiter_lines():
            if line == ": ping":
                break


async def test_a_busy_stream_ends_when_its_token_does(redis, told, monkeypatch):
    """Not only an idle one: a run that trains has an item every few seconds."""
    monkeypatch.setattr("services.api.dependencies.LOOKED_AGAIN_S", 0.0)
    principals = {token_digest(TOKEN): local_principal()}
    access = TokenAccess(principals)
    monkeypatch.setattr(access, "_principals", principals)
    stopping, port = asyncio.Event(), free_port()
    serving = asyncio.create_task(serve_api(redis, access, "127.0.0.1", port, stopping))
    url = f"http://127.0.0.1:{port}/v1/runs/{told.run}/events"
    async with (
        httpx.AsyncClient(headers=STREAM, transport=httpx.AsyncHTTPTransport(retries=5)) as client,
        client.stream("GET", url) as answer,
    ):
        stream = frames(answer.aiter_lines())
        await taken(stream, 1)
        await told.log.write("queued", "while it is valid")
        [before] = await taken(stream, 1)
        principals.clear()
        await told.log.write("queued", "a secret")
        async with asyncio.timeout(DEADLINE_S):
            after = [found async for found in stream]
    assert "while it is valid" in before["data"]
    assert not after
    stopping.set()
    await serving


async def test_a_damaged_run_stops_no_other_stream(served, told, run_id):
    other = await Told(told.redis, f"{run_id}-damaged").create()
    async with (
        httpx.AsyncClient(base_url=served, headers=STREAM) as client,
        client.stream("GET", f"/v1/runs/{told.run}/events") as whole,
        client.stream("GET", f"/v1/runs/{other.run}/events") as damaged,
    ):
        stream, beside = frames(whole.aiter_lines()), frames(damaged.aiter_lines())
        await taken(stream, 1)
        await taken(beside, 1)
        await told.redis.hset(other.keys.record, "history", "garbage")
        await told.records.transition(told.run, RunState.STARTING, "test")
        [state] = await taken(stream, 1)  # the states of both are read together
        await told.log.write("queued", "it goes on")
        [found] = await taken(stream, 1)
        assert (state["event"], "it goes on" in found["data"]) == ("state", True)
        page = await client.get(f"/v1/runs/{other.run}/events", headers={"accept": "application/json"})
        assert (page.status_code, page.json()["events"]) == (200, [])


async def test_a_stopping_gateway_ends_its_streams_at_once(redis, told):
    stopping, port = asyncio.Event(), free_port()
    serving = asyncio.create_task(serve_api(redis, ACCESS, "127.0.0.1", port, stopping))
    url = f"http://127.0.0.1:{port}/v1/runs/{told.run}/events"
    async with (
        httpx.AsyncClient(headers=STREAM, transport=httpx.AsyncHTTPTransport(retries=5)) as client,
        client.stream("GET", url) as answer,
    ):
        stream = frames(answer.aiter_lines())
        await taken(stream, 1)
        stopping.set()
        [end] = await taken(stream, 1)
    assert json.loads(end["data"]) == {"reason": "the gateway stops"}
    async with asyncio.timeout(2.5):
        await serving


async def test_more_streams_than_allowed_are_503(served, told, monkeypatch):
    monkeypatch.setenv(sending.STREAMS, "1")
    stopping, port = asyncio.Event(), free_port()
    serving = asyncio.create_task(serve_api(told.redis, ACCESS, "127.0.0.1", port, stopping))
    url = f"http://127.0.0.1:{port}/v1/runs/{told.run}/events"
    async with httpx.AsyncClient(headers=STREAM, transport=httpx.AsyncHTTPTransport(retries=5)) as client:
        async with client.stream("GET", url) as answer:
            stream = frames(answer.aiter_lines())  # its name keeps it open
            await taken(stream, 1)
            refused = await client.get(url)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            assert "PENSTOCK_STREAMS" in refused.json()["detail"]
        async with asyncio.timeout(DEADLINE_S):  # the slot is free as soon as its client has left
            while True:
                async with client.stream("GET", url) as answer:
                    if answer.status_code == 200:
                        break
                await asyncio.sleep(0.02)
    stopping.set()
    await serving


async def test_a_slow_subscriber_is_dropped_with_a_log_line(told, caplog):
    hub = hubs.Hub(told.redis)
    slow = hub.subscribe(told.run, {told.keys.events: "0-0"}, 0)
    quick = hub.subscribe(told.run, {told.keys.events: "0-0"}, 0)
    with caplog.at_level(logging.WARNING):
        slow.offer([hubs.StreamItem(told.keys.events, f"1-{number}", b"") for number in range(hubs.QUEUED + 1)])
    assert f"a stream of run {told.run} was dropped" in caplog.text
    with pytest.raises(hubs.DroppedError):
        await slow.take(1.0)
    await told.log.write("queued", "for the others")
    async with asyncio.timeout(DEADLINE_S):
        while not any(b"for the others" in item.body for item in await quick.take(1.0)):
            pass
    await hub.close()


async def test_a_client_that_reads_nothing_is_left(redis, told, monkeypatch, caplog):
    """Its stream ends although the client keeps the connection open."""
    monkeypatch.setattr(sending, "SEND_S", 0.2)
    slots = sending.Slots(5)

    async def much():
        while True:
            yield b": x\n\n"

    async def never():
        await asyncio.Event().wait()

    stream = sending.EventStream(slots, much, "a stream of the test")
    sent = []

    async def send(message):
        sent.append(message)
        if len(sent) == 3:
            await asyncio.Event().wait()

    async with asyncio.timeout(DEADLINE_S):
        await stream({"type": "http"}, never, send)
    assert "has read nothing" in caplog.text
    assert slots.open == 0


async def test_one_reader_serves_all_streams(told, redis):
    """However many streams are open, Redis is asked as often as for one."""

    async def reads(count):
        hub = hubs.Hub(redis)
        subscriptions = [hub.subscribe(told.run, {told.keys.events: "0-0"}, 0) for _ in range(count)]
        before = (await redis.info("commandstats")).get("cmdstat_xread", {"calls": 0})["calls"]
        await asyncio.gather(*(subscription.take(1.0) for subscription in subscriptions))
        after = (await redis.info("commandstats"))["cmdstat_xread"]["calls"]
        await hub.close()
        return after - before

    assert await reads(200) <= 2 * await reads(1) + 5


def test_a_cursor_survives_its_text():
    assert str(StoryCursor("1-2", "3-4", "5-6", 7)) == "1-2_3-4_5-6_7"
