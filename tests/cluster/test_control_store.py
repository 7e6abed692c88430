"""Attacks Ray's control store in the head's pod: its Redis refuses writes for a while, and restarts.

Must not need a run: what runs do meanwhile is in tests/chaos/test_volume.py and tests/cluster/test_day_two.py.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import redis

from tests.cluster.pods import REDIS_MAXMEMORY, Cluster

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

REFUSING_S = 20.0
"""Ray's own retries of a request last three seconds."""
END_S = 120.0


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("setting", "before"), [("maxmemory", REDIS_MAXMEMORY), ("min-replicas-to-write", "0")])
def test_a_head_outlives_a_redis_that_refuses_writes(tmp_path: Path, setting: str, before: str) -> None:
    """As the chart's server does on a volume that fills, and, the first, any server whose memory is full."""
    with Cluster(tmp_path) as cluster:
        server = cluster.redis.process.client(username="keeper", password=cluster.redis.keeper_password)
        head = cluster.pods["head"]
        first = head.process.pid
        server.config_set(setting, "1")
        with pytest.raises(redis.ResponseError):
            cluster.redis.process.client(username="ray", password=cluster.redis.passwords["ray"]).set("RAYx", "1")
        worker = cluster.start_worker("cpu", "cpu")  # to join is a write
        ends = time.monotonic() + REFUSING_S
        while time.monotonic() < ends:
            assert (head.process.poll(), head.process.pid) == (None, first), head.said()[-4000:]
            assert head.probe("/healthz")[0] != 503  # 0 on a busy machine
            assert worker.probe("/readyz")[0] != 200, "nothing can join while writes are refused"
            time.sleep(0.5)
        server.config_set(setting, before)
        worker.until_ready()
        assert head.process.poll() is None


@pytest.mark.timeout(600)
def test_a_head_whose_redis_restarts_is_replaced(tmp_path: Path) -> None:
    """The pod ends by itself or, where its own thread hangs in Ray, by the liveness probe."""
    with Cluster(tmp_path) as cluster:
        cluster.start_worker("cpu", "cpu")  # where the controller runs
        head = cluster.pods["head"]
        ends = time.monotonic() + END_S
        while "the controller runs" not in head.said():
            assert time.monotonic() < ends, head.said()[-4000:]
            time.sleep(0.5)
        cluster.redis.process.stop()
        cluster.redis.process.start()
        ends = time.monotonic() + END_S
        while (status := head.process.poll()) is None and head.probe("/healthz")[0] != 503:
            assert time.monotonic() < ends, head.said()[-4000:]
            time.sleep(0.5)
        reason = head.said() if status is not None else head.probe("/healthz")[1]
        assert "Ray's control store has read nothing from Redis for" in reason
        head.kill()
        cluster.start_head()
