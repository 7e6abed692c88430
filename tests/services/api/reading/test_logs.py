"""The logs of a run's processes: the last lines, without secrets, as pages and streams."""

import asyncio
import json
import logging

import pytest

from services.contracts import ProcessInfo, RunState
from services.settings import Recipe
from services.streams.delivery import process_logs
from services.streams.delivery.process_logs import HIDDEN, LINE_CHARACTERS, LogShipping, redacted_line, secrets_of
from services.streams.keys import RunKeys
from services.streams.state.runs import RunRecords
from tests.harness.small_run import recipe_document

log = logging.getLogger("learner.tests")
DEADLINE_S = 20.0


def process_of(run, name="learner-1"):
    return ProcessInfo(id=name, service="learner", run=run, host="h", pid=1, metrics="h:1", started_at=1.0)


@pytest.fixture
async def keys(redis, run_id, monkeypatch):
    monkeypatch.setattr(process_logs, "FLUSH_S", 0.05)
    monkeypatch.setattr(logging.getLogger(), "level", logging.INFO)
    await RunRecords(redis).create(run_id, Recipe.model_validate(recipe_document("/none")))
    return RunKeys(run_id)


async def lines_of(api, run, process="learner-1", **params):
    answer = await api.get(f"/v1/runs/{run}/logs/{process}", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_lines_are_shown_with_a_cursor(api, redis, keys, run_id):
    async with LogShipping(redis, keys, process_of(run_id), "redis://h/0"):
        for number in range(5):
            log.info("number %d", number)
        log.debug("not shown")
    [source] = (await api.get(f"/v1/runs/{run_id}/logs")).json()["processes"]
    assert (source["process"], source["service"], source["dropped"], source["live"]) == (
        "learner-1",
        "learner",
        0,
        False,
    )
    page = await lines_of(api, run_id, limit=3)
    assert [line["text"] for line in page["lines"]] == [f"learner.tests: number {number}" for number in range(3)]
    assert page["more"]
    rest = await lines_of(api, run_id, after=page["next"])
    assert [line["text"][-1] for line in rest["lines"]] == ["3", "4"]


async def test_an_error_is_logged_with_its_traceback(api, redis, keys, run_id):
    with pytest.raises(RuntimeError):
        async with LogShipping(redis, keys, process_of(run_id), "redis://h/0"):
            raise RuntimeError("the service failed")
    text = "\n".join(line["text"] for line in (await lines_of(api, run_id))["lines"])
    assert "Traceback" in text
    assert "RuntimeError: the service failed" in text


SECRETS = [
    ("redis://user:hunter22@host:6379/0", "hunter22"),
    ("redis://:p@ss/w:rd@host", "ss/w"),
    ("Authorization: Bearer abcdefgh.ijk-lmn", "abcdefgh"),
    ("bearer   ABCDEF123456", "ABCDEF"),
    ('{"password": "hunter22"}', "hunter22"),
    ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI", "wJalr"),
    ("api-key: abc123", "abc123"),
    ("open http://127.0.0.1:8470/#token=xyz-123", "xyz-123"),
    ("using hf_abcdefghijklmnopqrst", "hf_abc"),
    ("AKIAIOSFODNN7EXAMPLE", "IOSFOD"),
    ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.dozjgNryP4J3jVmN", "dozjg"),
    ("the value known-by-heart occurs", "known-by-heart"),
]


@pytest.mark.parametrize(("text", "secret"), SECRETS)
async def test_no_secret_leaves_the_process(api, redis, keys, run_id, monkeypatch, text, secret):
    monkeypatch.setenv("SOME_TOKEN", "known-by-heart")
    async with LogShipping(redis, keys, process_of(run_id), "redis://:of-the-redis@h/0"):
        log.warning("%s", text)
        log.warning("of-the-redis")
    shown = json.dumps(await lines_of(api, run_id))
    assert secret not in shown
    assert "of-the-redis" not in shown
    assert HIDDEN in shown
    raw = b"".join(fields[b"m"] for _, fields in await redis.xrange(keys.log("learner-1")))
    assert secret.encode() not in raw


def test_what_is_no_secret_stays():
    for text in ("1234 tokens/s: 5", "s3://bucket/path", "token 5 of 7", "a@b.c", "see https://example.org/a"):
        assert redacted_line(text, []) == text
    assert secrets_of({"A_TOKEN": "short", "HOME": "/home/user", "X_SECRET": "long-enough"}, "nonsense") == [
        "long-enough"
    ]


def test_a_hostile_line_is_plain_and_short():
    text = redacted_line("\x1b[31m" + "\ud800" + "://" * 100_000 + "token=" * 100_000, [])
    assert len(text) == LINE_CHARACTERS
    assert text.isprintable()
    assert text.encode()


async def test_the_logs_of_a_run_are_bounded(redis, keys, run_id, monkeypatch):
    monkeypatch.setattr(process_logs, "LOGS_KEPT", 3)
    monkeypatch.setattr(process_logs, "LINES_KEPT", 10)
    for number in range(6):
        async with LogShipping(redis, keys, process_of(run_id, f"learner-{number}"), "redis://h/0"):
            for _ in range(20):
                log.info("line")
    names = [name.decode() for name in await redis.hkeys(keys.logs)]
    assert sorted(names) == ["learner-3", "learner-4", "learner-5"]
    assert await redis.xlen(keys.log("learner-5")) == 10
    assert not await redis.exists(keys.log("learner-0"))
    assert 0 < await redis.ttl(keys.log("learner-5")) <= process_logs.KEEP_S


async def test_a_burst_is_dropped_and_counted(api, redis, keys, run_id):
    async with LogShipping(redis, keys, process_of(run_id), "redis://h/0"):
        for _ in range(process_logs.WAITING + 7):
            log.info("line")
    [source] = (await api.get(f"/v1/runs/{run_id}/logs")).json()["processes"]
    assert source["dropped"] == 7


async def test_services_in_one_process_keep_their_own_lines(api, redis, keys, run_id):
    async def serve(name):
        async with LogShipping(redis, keys, process_of(run_id, name), "redis://h/0"):
            log.info("of %s", name)
            await asyncio.to_thread(log.info, "of %s in a thread", name)

    await asyncio.gather(asyncio.create_task(serve("sampler-1")), asyncio.create_task(serve("verifier-1")))
    for name in ("sampler-1", "verifier-1"):
        texts = [line["text"] for line in (await lines_of(api, run_id, name))["lines"]]
        assert texts == [f"learner.tests: of {name}", f"learner.tests: of {name} in a thread"]


async def test_a_deleted_run_gets_no_log(redis, run_id, keys):
    await redis.delete(keys.record)
    async with LogShipping(redis, keys, process_of(run_id), "redis://h/0"):
        log.info("line")
    assert not await redis.exists(keys.logs, keys.log("learner-1"))


@pytest.mark.parametrize("process", ["none", "..", "*", "a%00b", "\u00b2", "%ED%A0%80"])
async def test_an_unknown_process_is_404(api, keys, run_id, process):
    answer = await api.get(f"/v1/runs/{run_id}/logs/{process}")
    assert answer.status_code in ((404, 200) if process == ".." else (404,))


async def test_a_stream_follows_a_log(api, redis, keys, run_id):
    """In process the whole answer is one piece: the run ends, and so does the stream."""

    async def write():
        async with LogShipping(redis, keys, process_of(run_id), "redis://h/0"):
            log.info("before")
            await redis.xread({keys.log("learner-1"): "0-0"}, block=5000)
            reading = asyncio.create_task(
                api.get(f"/v1/runs/{run_id}/logs/learner-1", headers={"accept": "text/event-stream"})
            )
            for number in range(20):
                log.info("number %d", number)
                await asyncio.sleep(0.01)
        await RunRecords(redis).transition(run_id, RunState.CANCELLED, "by the test")
        return await reading

    async with asyncio.timeout(DEADLINE_S):
        answer = await write()
    blocks = [block for block in answer.text.split("\n\n") if "data: " in block]
    texts = [json.loads(block.split("data: ")[1]).get("text") for block in blocks]
    assert texts[:-1] == ["learner.tests: before", *(f"learner.tests: number {number}" for number in range(20))]
    assert blocks[-1].startswith("event: end")
