"""The tail on a real server: it misses no entry when the server is killed, and reports a gap."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.evidence import Evidence, collect, read_tail
from tests.chaos.finding import Kind
from tests.chaos.lookups import READERS, client, key
from tests.chaos.oracle import judge
from tests.chaos.server import Server
from tests.chaos.synthetic import clean_run
from tests.chaos.tail import Tail
from tests.chaos.watch import Watch

RUN = "tailed"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "valkey") as started:
        yield started


@pytest.fixture
def redis_client(server: Server) -> Iterator[Any]:
    connection = client(server.url)
    yield connection
    connection.close()


def add(redis_client: Any, stream: str, *numbers: int) -> None:
    for number in numbers:
        redis_client.xadd(key(RUN, stream), {"m": json.dumps({"group": f"g{number}", "samples": 1})})


def test_every_entry_is_kept_over_two_kills_of_the_server(server, redis_client, tmp_path):
    tail = Tail(server.url, RUN, tmp_path / "tail.jsonl")
    with tail:
        for start in (0, 100, 200):
            add(redis_client, "tasks", *range(start, start + 100))
            redis_client.xadd(key(RUN, "events"), {"m": b"\xff no text", "other": "x"})
            if start < 200:
                server.kill()
                time.sleep(0.3)
                server.start()
                redis_client.ping()
        tail.close()
    entries, end = read_tail(tmp_path / "tail.jsonl")
    assert [entry.body["group"] for entry in entries["tasks"] if entry.body] == [f"g{number}" for number in range(300)]
    assert [entry.body for entry in entries["events"]] == [None, None, None]
    assert (end["tasks"], end["events"], end["steps"]) == (300, 3, 0)
    outages = [line for line in (tmp_path / "tail.jsonl").read_text().splitlines() if "outage" in line]
    assert len(outages) == 2


WRITTEN = "step-{:06d}.e0002-learner-1a2b3c4d"
"""The name of a batch and of a record in the archive of the synthetic run."""
BELONGS = {"epoch": 2, "owner": "learner-1a2b3c4d", "digest": "0" * 64}
"""What the archive adds to a batch message."""


def write_to(redis_client: Any, folder: Path) -> None:
    """Write the synthetic run to Redis and disk, as a real run leaves it."""
    run = clean_run()
    for reader, streams in {
        "rollout": ["tasks", "evaluation:tasks"],
        "verifier": ["samples", "evaluation:samples"],
        "sampler": ["verdicts", "evaluation:verdicts"],
    }.items():
        for stream in streams:
            redis_client.xgroup_create(key(RUN, stream), reader, id="0", mkstream=True)
    redis_client.hset(key(RUN, "record"), mapping={"recipe": json.dumps(run.recipe), "state": run.state})
    for stream, entries in run.entries.items():
        for entry in entries:
            redis_client.xadd(key(RUN, stream), {"m": json.dumps(entry.body)}, id=entry.id)
    for stream, reader in (("tasks", "rollout"), ("samples", "verifier"), ("verdicts", "sampler")):
        held = redis_client.xreadgroup(reader, "consumer", {key(RUN, stream): ">"}, count=1000)[0][1]
        done = [entry for entry, _ in held if entry.decode() not in run.unacked[stream]]
        redis_client.xack(key(RUN, stream), reader, *done)
    for prefix, lane in (("", run.lanes["train"]), ("evaluation:", run.lanes["evaluation"])):
        redis_client.hset(key(RUN, f"{prefix}counters"), mapping=lane.counters)
        if lane.pending:
            redis_client.sadd(key(RUN, f"{prefix}pending"), *lane.pending)
    for name, fields in run.groups.items():
        redis_client.hset(key(RUN, f"group:{name}"), mapping=fields)
    redis_client.hset(key(RUN, "policy"), mapping=run.policy)
    for part, documents, added in (("batches", run.archive, BELONGS), ("records", run.records, {})):
        (folder / part).mkdir(parents=True)
        for step, document in documents.items():
            (folder / part / f"{WRITTEN.format(step)}.json").write_text(json.dumps(document | added))
    # Of a learner that was replaced, and committed nothing.
    for part in ("batches", "records"):
        (folder / part / "step-000001.e0001-learner-00000000.json").write_text("{}")


def write_shares(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for step, rows in clean_run().shares.items():
        payloads, groups = zip(*rows, strict=True)
        table = pa.table({"payload": list(payloads), "group": list(groups)})
        pq.write_table(table, folder / "batches" / f"{WRITTEN.format(step)}.rank-0.parquet")


@pytest.fixture
def watch(redis_client: Any) -> Watch:
    return Watch(redis_client, RUN)


@pytest.fixture
def left(server: Server, redis_client: Any, watch: Watch, tmp_path: Path) -> Iterator[Callable[[], Evidence]]:
    """The synthetic run is in Redis and on disk; the call closes tail and watch and collects the evidence."""
    write_to(redis_client, tmp_path / RUN)
    write_shares(tmp_path / RUN)
    with Tail(server.url, RUN, tmp_path / "tail.jsonl") as tail:

        def evidence() -> Evidence:
            tail.close()
            watch.close()
            return collect(redis_client, RUN, tmp_path / "tail.jsonl", watch, tmp_path / RUN)

        watch.__enter__()
        yield evidence


def test_evidence_is_collected_from_redis_and_disk(left):
    collected = left()
    # The evaluation's streams were never read, and there is no checkpoint: neither changes the findings.
    assert judge(collected).findings == ()
    assert collected.unacked["tasks"] == clean_run().unacked["tasks"]
    assert collected.shares == clean_run().shares


def test_a_hash_that_is_missing_in_redis_is_found(left, redis_client):
    redis_client.delete(key(RUN, "group:g4"))
    assert [finding.subject for finding in judge(left()).of(Kind.LOST)] == ["g4"]


def test_streams_are_read_before_a_finished_run_deletes_them(left, watch, redis_client):
    ends = time.monotonic() + 20
    while not (all(watch.seen[name].at for name in READERS) and watch.seen["batches"].added):
        assert time.monotonic() < ends, f"not read in time: {watch.seen}"
        time.sleep(0.1)
    redis_client.delete(*(key(RUN, name) for name in (*READERS, "batches")))
    collected = left()
    assert "tasks" in collected.restarted
    assert collected.unacked["tasks"] == clean_run().unacked["tasks"]
    assert judge(collected).findings == ()


@pytest.mark.parametrize("logged", [True, False])
def test_entries_trimmed_too_early_are_recovered_or_a_gap(server, redis_client, tmp_path, logged):
    write_to(redis_client, tmp_path / RUN)
    write_shares(tmp_path / RUN)
    redis_client.xtrim(key(RUN, "samples"), maxlen=2, approximate=False)
    redis_client.config_set("appendonly", "yes" if logged else "no")
    watch = Watch(redis_client, RUN)
    watch.look()
    with Tail(server.url, RUN, tmp_path / "tail.jsonl") as tail:
        tail.close()
    collected = collect(redis_client, RUN, tmp_path / "tail.jsonl", watch, tmp_path / RUN)
    whole = [entry.body for entry in clean_run().entries["samples"]]
    if logged:
        assert collected.filled == len(whole) - 2
        assert [entry.body for entry in collected.entries["samples"]] == whole
        assert judge(collected).findings == ()
    else:
        assert collected.filled == 0
        assert [finding.subject for finding in judge(collected).of(Kind.GAP)] == ["samples"]


def test_entries_of_a_restarted_stream_are_added_up(redis_client):
    watch = Watch(redis_client, RUN)
    add(redis_client, "tasks", 1, 2, 3)
    watch.look()
    redis_client.delete(key(RUN, "tasks"))
    add(redis_client, "tasks", 4, 5)
    watch.look()
    assert (watch.seen["tasks"].added, watch.seen["tasks"].restarted) == (5, True)
    assert (watch.seen["steps"].added, watch.seen["steps"].restarted) == (0, False)
