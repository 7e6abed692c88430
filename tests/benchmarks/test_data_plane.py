"""The data plane benchmark delays without serialising, adds its stages up, and measures every stage of a real run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import redis

from benchmarks.api.ended_runs import Cost
from benchmarks.data_plane import backlog, command, pending, rewind
from benchmarks.data_plane.command import Moved
from benchmarks.data_plane.latency import delayed
from benchmarks.data_plane.pending import Share
from benchmarks.data_plane.reference import Messages, Pace, together
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


def test_groups_and_bytes_have_one_ratio() -> None:
    slow, fast = ({"dispatched": Pace(rate, 0.1), "judged": Pace(16 * rate, 0.1)} for rate in (10.0, 20.0))
    part = command.of_streams([Moved(slow, fast, {"dispatched": 4, "judged": 64}, 1e6)] * 2)
    found = {(figure.name, figure.unit): figure.values for figure in part.figures}
    assert found["all streams / redis-py: groups/s and MB/s", ""] == (0.5, 0.5)
    assert found["all streams, Penstock", "groups/s"] == found["all streams, Penstock", "MB/s"] == (5.0, 5.0)
    assert found["judged / redis-py", ""] == (0.5, 0.5)
    assert found["CPU time, redis-py / all streams", ""] == (1.0, 1.0)


def test_a_group_writes_tasks_and_verdicts_twice() -> None:
    messages = Messages([b"tt"], [b"sss"], [b"vvvv"], [{b"text": b"ppppp"}])
    assert messages.group_bytes(16) == 2 * 2 + 16 * (3 + 2 * 4 + 5)


def test_the_largest_of_a_repeat_is_divided_by_its_smallest() -> None:
    found = {100: [Share(0.25, 0.25), Share(0.5, 0.5)], 1000: [Share(0.5, 0.25), Share(0.25, 0.25)]}
    *each, flat, archived = command.of_pending(found, [Share(1.0, 0.5)]).figures
    assert archived.values == (1.5,)
    assert [figure.values for figure in each] == [(0.5, 1.0), (0.75, 0.5)]
    assert flat.values == (1.5, 2.0)
    assert flat.missed


def test_a_page_that_runs_fill_is_compared_with_a_full_one() -> None:
    costs = {size: Cost(0.1, {"one run": 1.0 + size, "page of 50": 1.0 + size}) for size in (0, 100, 5000)}
    found = {figure.name: figure.values for figure in command.of_ended([costs]).figures}
    assert found["one run: beside 5,000 / 0 ended runs"] == (5001.0,)
    assert found["page of 50: beside 5,000 / 100 ended runs"] == (pytest.approx(5001 / 101),)


def test_ended_runs_are_reported(tmp_path: Path) -> None:
    options = ["--parts", "ended", "--ended", "0", "60", "--times", "3", "--repeats", "1", "--out", str(tmp_path)]
    command.main(options)
    found = json.loads((tmp_path / "data-plane.json").read_text())
    assert any(row["name"] == "look of the controller: beside 60 / 0 ended runs" for row in found["figures"])
    assert all(value > 0 for row in found["figures"] for value in row["values"])


@pytest.mark.slow
def test_the_sampler_and_the_others_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "WINDOW", 4)
    shares = pending.measure(tmp_path, 12, windows=2, repeats=2)
    assert len(shares) == 2
    assert all(share.sampler_ms > 0 and share.server_ms > 0 for share in shares)
