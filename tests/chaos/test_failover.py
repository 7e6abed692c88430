"""The failover that loses a second: it counts only if writes were lost, and the oracle leaves exactly those out."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import failover
from tests.chaos.cuts import Cut
from tests.chaos.evidence import read_tail
from tests.chaos.ground import Ground
from tests.chaos.lookups import client, key
from tests.chaos.recovery import entry_dealt_with, rejected
from tests.chaos.scene import Moment, Scene
from tests.chaos.strikes import Struck, struck_now
from tests.chaos.watch import Seen
from tests.harness.each import each
from tests.harness.servers.watched_servers import Watched, in_sync, watched_servers
from tests.harness.workload import recipe

RUN = "cut"
CUT = Cut(since=5000, until=6000, kept={"tasks": "5500-2", "samples": "0-0"})


@each(
    "lost, stream, entry",
    [
        (False, "tasks", "5500-2"),
        (True, "tasks", "5500-3"),
        (True, "tasks", "6000-9"),
        (False, "tasks", "6001-0"),
        (False, "verdicts", "4999-7"),
        (True, "verdicts", "5000-0"),
        (False, "verdicts", "6001-0"),
        (False, "samples", "4999-7"),
        (True, "samples", "5000-0"),
    ],
)
def test_what_only_the_dead_primary_had_is_lost(lost: bool, stream: str, entry: str):
    assert CUT.lost(stream, entry) is lost


def test_lost_entries_are_no_evidence(tmp_path: Path):
    path = tmp_path / "tail.jsonl"
    lines: list[dict[str, Any]] = [{"stream": "tasks", "id": entry, "m": "{}"} for entry in ("5500-2", "5600-0", "7-0")]
    path.write_text("\n".join(map(json.dumps, [*lines, {"end": {"tasks": 3, "events": 4}}])))
    entries, end = read_tail(path, [CUT])
    assert [entry.id for entry in entries["tasks"]] == ["5500-2", "7-0"]
    assert end == {"tasks": 2, "events": 4}


def test_a_promoted_replica_counts_from_what_it_has():
    """It lacks 20 of 100 entries, and gets 50 more: the stream had 130. A rewind on it starts a new count."""
    seen = Seen()
    for added, server in ((100, "old"), (80, "new"), (130, "new")):
        seen.note(added, server)
    assert (seen.added, seen.restarted) == (130, True)
    seen.note(10, "new")
    assert seen.added == 140


def struck_by(scene: Scene, stream: str, entry: str) -> Struck:
    struck = struck_now(scene, Moment())
    struck.entry = (stream, entry)
    return struck


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    with watched_servers(tmp_path, 2000) as group:
        yield group


@pytest.fixture
def scene(watched: Watched, tmp_path: Path) -> Iterator[Scene]:
    document = recipe(tmp_path, tmp_path, steps=20, replicas=1, ranks=1, staleness=1)
    raw = client(watched.url)
    raw.hset(key(RUN, "record"), mapping={"state": "running"})
    raw.xadd(key(RUN, "tasks"), {"m": "{}"})
    raw.xgroup_create(key(RUN, "tasks"), "rollout", id="0")
    raw.xreadgroup("rollout", "victim", {key(RUN, "tasks"): ">"})
    stands_on = Ground(watched.url, watched.url, watched=watched)
    yield Scene(RUN, raw, None, tmp_path, document, random.Random(7), stands_on)  # type: ignore[arg-type]
    raw.close()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_failover_loses_a_second_and_is_repeated(scene: Scene, watched: Watched, monkeypatch: pytest.MonkeyPatch):
    for number in range(2):
        watched.until(lambda: failover.watched(scene) is not None, "no failover is possible")
        writes = write_meanwhile(scene, monkeypatch)
        struck = failover.fail_over(scene, failover.watched(scene) or Moment())
        assert struck is not None
        assert struck.release is not None
        watched.until(struck.due, "the replica was not promoted")
        struck.release()
        assert struck.had_effect(), "the marker survived"
        assert struck.facts["lost_entries"] == len(writes) > 0
        assert len(scene.cuts) == number + 1
        found = {entry.decode() for entry, _ in scene.server.xrange(key(RUN, "tasks"))}
        assert not found & set(writes)
        assert all(scene.cuts[-1].lost("tasks", entry) for entry in writes)
        assert not any(scene.cuts[-1].lost("tasks", entry) for entry in found)
        lost = struck_by(scene, "tasks", writes[0])
        assert entry_dealt_with(scene, lost)
        assert rejected(scene, lost)
    watched.until(lambda: in_sync(*watched.roles), "the dead primary has not become a replica")


def write_meanwhile(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the entries that the primary adds while it is alone."""
    entries: list[str] = []

    def write_and_ask() -> bool:
        entries.append(scene.server.xadd(key(RUN, "tasks"), {"m": "{}"}).decode())
        return False

    monkeypatch.setattr(scene, "ended", write_and_ask)
    return entries


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_primary_without_a_write_is_left_alive(scene: Scene, watched: Watched, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.chaos.failover.LONGEST_S", 1.5)
    assert failover.fail_over(scene, Moment()) is None
    assert scene.cuts == []
    watched.until(lambda: in_sync(*watched.roles), "the replica was not let in again")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_failover_that_lost_nothing_has_no_effect(scene: Scene, watched: Watched, monkeypatch: pytest.MonkeyPatch):
    write_meanwhile(scene, monkeypatch)
    monkeypatch.setattr(watched, "cut", lambda: None)
    monkeypatch.setattr("tests.chaos.failover.last_entries", lambda server, run: {"tasks": str(server.port)})
    struck = failover.fail_over(scene, Moment())
    assert struck is not None
    assert struck.release is not None
    watched.until(struck.due, "the replica was not promoted")
    struck.release()
    assert not struck.had_effect()
