"""The data plane benchmark delays without serialising, adds its stages up, and measures every stage of a real run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import redis

from benchmarks.data_plane import backlog, rewind
from benchmarks.data_plane.latency import delayed
from benchmarks.data_plane.reference import Pace, together
from tests.harness.servers.redis_servers import embedded_server

DELAY_S = 0.1


def test_the_proxy_delays_each_way_and_not_each_chunk() -> None:
    with embedded_server() as server, delayed(server.port, 1000 * DELAY_S) as url:
        client = redis.Redis.from_url(url)
        client.ping()
        started = time.perf_counter()
        client.ping()
        once = time.perf_counter() - started
        assert once >= 2 * DELAY_S
        pipe = client.pipeline(transaction=False)
        for index in range(64):
            pipe.set(f"k{index}", bytes(1 << 16))  # 4 MiB, which is many chunks
        started = time.perf_counter()
        pipe.execute()
        assert time.perf_counter() - started < 32 * DELAY_S
        client.close()


def test_stages_add_up_by_their_time() -> None:
    found = together({"a": Pace(10.0, 0.1), "b": Pace(100.0, 0.2)}, {"a": 10, "b": 300})
    assert found.per_s == pytest.approx(310 / (1 + 3))
    assert found.cpu_s == pytest.approx((10 * 0.1 + 300 * 0.2) / 310)


def test_a_rewind_is_measured_in_its_parts(tmp_path: Path) -> None:
    found = rewind.measure(tmp_path, groups=130)
    assert list(found) == [
        "start",
        "reopen",
        "posteriors",
        "finish",
        "recover",
        "release",
        "archived",
        "forget",
        "trim",
    ]
    assert all(part.longest_ms * 1000 >= rewind.LOGGED_US for part in found.values())


@pytest.mark.slow
def test_each_stage_works_off_its_backlog(tmp_path: Path) -> None:
    found = backlog.measure(tmp_path, "small", groups=24)
    assert list(found.paces) == ["dispatched", "generated", "judged", "recorded"]
    assert all(pace.per_s > 0 and pace.cpu_s >= 0 for pace in found.paces.values())
    assert found.messages is not None
    assert len(found.messages.samples) == len(found.messages.payloads) == 24 * backlog.SAMPLES
