"""The benchmark of replicas that are taken away, shortened: real replicas that are killed lose no group."""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from pathlib import Path

import pytest

from benchmarks.loop.spot.__main__ import Part, part, write_model
from benchmarks.loop.spot.fleet import Fleet, Member
from benchmarks.loop.spot.replica import _COUNT, new_count, read_count
from services.streams.keys import RunKeys
from tests.harness.servers.redis_servers import start_server


def test_a_part_divides_by_the_seconds_of_ready_replicas() -> None:
    measured = Part("kill", ready_s=50.0, drawn=1000, in_vain=20, taken_away=3, groups=8, lost=0)
    assert measured.per_s == 19.6
    assert measured.line(20.0).split() == ["kill", "3", "50", "20", "0.980", "2.00", "8", "0"]


def test_a_member_counts_while_it_draws(tmp_path: Path) -> None:
    """From its readiness to its end, or to its last token if it still drew after the notice."""
    file = tmp_path / "count"
    new_count(file)
    process = None
    member = Member(process, file, slot=0)  # type: ignore[arg-type]
    assert member.ready_s(0.0, 100.0) == 0.0
    file.write_bytes(_COUNT.pack(7, 20.0, 61.0))
    assert (read_count(file).drawn, member.ready_s(0.0, 100.0), member.ready_s(30.0, 40.0)) == (7, 80.0, 10.0)
    member.ended_at = 60.0
    assert (member.ready_s(0.0, 100.0), member.ready_s(70.0, 100.0)) == (41.0, 0.0)
    fleet = Fleet("run", "url", tmp_path, 1, [member, member])
    assert (fleet.drawn(), fleet.ready_s(0.0, 100.0)) == (14, 82.0)


@pytest.mark.slow
@pytest.mark.xdist_group("vllm")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_replicas_that_end_lose_no_group(tmp_path: Path, sent: signal.Signals) -> None:
    given = argparse.Namespace(seconds=40.0, every=15.0, replicas=2, tokens=2000)
    write_model(tmp_path / "model", given.tokens + 128)
    began = time.monotonic()
    with start_server(tmp_path, "--appendfsync", "everysec") as server:
        measured = asyncio.run(part(sent.name.lower(), sent, given, tmp_path, f"redis://127.0.0.1:{server.port}/0"))
        events = server.client().xrange(RunKeys(f"spot-{sent.name.lower()}").events)
    assert measured.taken_away >= 1
    assert measured.lost == 0
    assert not any("partial-damaged" in fields["m"] for _, fields in events)
    # What two engines draw in one second is less than this share of it all, however busy the machine is.
    assert measured.in_vain < measured.drawn / (2 if sent == signal.SIGKILL else 10), time.monotonic() - began
