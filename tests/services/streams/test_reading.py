"""Several keys are read as of one moment, also while Redis refuses data, or every write."""

import pytest

from services.contracts import Lane
from services.streams.connection.client import client
from services.streams.connection.functions import load
from services.streams.connection.reading import read_together
from services.streams.delivery.following import last_ids, read_pages
from services.streams.keys import RunKeys
from services.streams.runs.ledger import read_ledger
from services.streams.runs.lists import RunLists
from services.streams.state.events import EvaluationFollower
from services.streams.state.group_counts import group_counts
from tests.harness.servers.redis_servers import ROOT, start_server

REFUSALS = [{"maxmemory": 1}, {"maxmemory": 1, "min-replicas-to-write": 1}]


@pytest.fixture(params=REFUSALS, ids=["data", "writes"])
async def refusing(request, tmp_path):
    with start_server(tmp_path) as server:
        redis = client(f"redis://127.0.0.1:{server.port}/0")
        await load(redis)
        await redis.hset("hash", mapping={"a": "1", "b": "2"})
        await redis.xadd("stream", {"m": "x"}, id="1-1")
        await redis.xadd("stream", {"m": "y"}, id="2-1")
        await redis.sadd("set", "one")
        for name, value in request.param.items():
            await redis.config_set(name, value)
        yield redis
        await redis.aclose()


async def test_a_full_server_is_read_like_any_other(refusing):
    redis = refusing
    assert await read_together(
        redis, ("hgetall", "hash"), ("xrange", "stream", "(1-1", "+", "COUNT", 5), ("xlen", "stream"), ("scard", "none")
    ) == [{b"a": b"1", b"b": b"2"}, [(b"2-1", {b"m": b"y"})], 2, 0]
    assert await read_pages(redis, {"stream": "0-0", "none": "0-0"}, 1) == {"stream": [("1-1", b"x")], "none": []}
    assert await last_ids(redis, ["stream", "none"]) == {"stream": "2-1", "none": "0-0"}
    assert await read_together(redis) == []


async def test_what_the_platform_watches_is_read_while_redis_is_full(refusing):
    keys = RunKeys("run")
    assert (await group_counts(refusing, keys, Lane.TRAIN)).reconciled
    assert (await read_ledger(refusing, keys)).charged == {}
    assert (await RunLists(refusing).states()).unlisted == 0
    follower = EvaluationFollower(refusing, keys)
    await follower.look()
    assert follower.count == 0


def test_no_transaction_only_reads():
    """Redis at its maxmemory refuses even a transaction that only reads."""
    for source in (ROOT / "services").rglob("*.py"):
        assert "transaction=True" not in source.read_text(), source
