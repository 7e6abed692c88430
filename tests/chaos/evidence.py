"""Owns the evidence that the oracle judges: the tail's file, Redis' content at the end, and the run's folder.

Must not import the code under test, or judge.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.chaos.cuts import Cut, lost, order
from tests.chaos.lookups import LANES, READERS, STREAMS, key, message, texts
from tests.chaos.watch import Seen, Watch
from tests.harness.servers import redis_log

ADDED = ("epoch", "owner", "digest")
"""What the archive adds to a batch message."""


@dataclass(frozen=True)
class Entry:
    """A stream entry as the tail read it; `body` is None if it was not a JSON object."""

    id: str
    body: dict[str, Any] | None

    @property
    def order(self) -> tuple[int, int]:
        """A sort key: the order of the stream."""
        return order(self.id)


@dataclass
class Lane:
    """A lane's state after the run: its counters, and the ids that it counts as pending."""

    counters: dict[str, int] = field(default_factory=dict)
    pending: set[str] = field(default_factory=set)


@dataclass
class Evidence:
    """All evidence about one run. Streams and lanes by name; `recipe` is that of the run's record.

    `added`: how many entries each stream ever had; for `restarted` streams a lower bound. `read`: how many of them are
    here; `filled` is the number that was trimmed before the tail read them, restored from the append-only file.
    `unacked`: entries that a consumer group had not acked. `groups`: the hashes of all groups that still have one.
    `steps` and `evaluations`: the records of the surviving history. `archive`, `records`, `shares` by rollout step; a
    share's rows are (payload, group). `injected`: entries that the injector added, by stream.
    """

    recipe: dict[str, Any]
    state: str
    entries: dict[str, list[Entry]]
    added: dict[str, int]
    read: dict[str, int]
    restarted: set[str]
    unacked: dict[str, set[str]]
    lanes: dict[str, Lane]
    groups: dict[str, dict[str, str]]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    policy: dict[str, str]
    archive: dict[int, dict[str, Any]]
    records: dict[int, dict[str, Any]]
    shares: dict[int, list[tuple[str, str]]]
    checkpoints: set[int]
    filled: int = 0
    injected: dict[str, set[str]] = field(default_factory=dict)

    def own(self, stream: str) -> list[Entry]:
        """The entries of a stream that the run itself wrote."""
        return [entry for entry in self.entries[stream] if entry.id not in self.injected.get(stream, ())]

    def bodies(self, stream: str) -> list[dict[str, Any]]:
        """The messages that the run itself wrote to a stream."""
        return [entry.body for entry in self.own(stream) if entry.body is not None]


def read_tail(path: Path, cuts: Sequence[Cut] = ()) -> tuple[dict[str, list[Entry]], dict[str, int]]:
    """The tail's file: entries by stream, and its own count of them ({} if the tail did not finish).

    Entries that a failover lost are left out: they are no part of the history.
    """
    entries: dict[str, list[Entry]] = {name: [] for name in STREAMS}
    end: dict[str, int] = {}
    gone: Counter[str] = Counter()
    for line in path.read_text(encoding="utf-8").splitlines():
        parsed = json.loads(line)
        if "stream" in parsed:
            if lost(cuts, parsed["stream"], parsed["id"]):
                gone[parsed["stream"]] += 1
            else:
                entries[parsed["stream"]].append(Entry(parsed["id"], _object(parsed["m"])))
        elif "end" in parsed:
            end = {name: count - gone[name] for name, count in parsed["end"].items()}
    return entries, end


def collect(
    server: Any,
    run: str,
    tail: Path,
    watch: Watch,
    files: Path,
    injected: Iterable[tuple[str, str]] = (),
    cuts: Sequence[Cut] = (),
) -> Evidence:
    """Read all evidence after the run has ended and tail and watch are closed. `files`: where the run's are durable."""
    entries, read = read_tail(tail, cuts)
    added = {name: seen.added for name, seen in watch.seen.items()} if read else dict.fromkeys(STREAMS, -1)
    filled = {name: _filled(server, run, name, entries) for name in STREAMS if read.get(name, 0) < added[name]}
    dispatched = {entry.body["group"] for lane in LANES.values() for entry in entries[f"{lane}tasks"] if _named(entry)}
    record = texts(server.hgetall(key(run, "record")))
    steps, evaluations = _messages(server, run, "steps"), _messages(server, run, "evaluations")
    by_stream: dict[str, set[str]] = {}
    for stream, entry in injected:
        by_stream.setdefault(stream, set()).add(entry)
    return Evidence(
        recipe=json.loads(record["recipe"]),
        state=record["state"],
        entries=entries,
        added=added,
        restarted={name for name, seen in watch.seen.items() if seen.restarted},
        read={name: read.get(name, 0) + filled.get(name, 0) for name in STREAMS},
        filled=sum(filled.values()),
        unacked={name: _unacked(watch.seen[name], entries[name]) for name in READERS},
        lanes={name: _lane(server, run, prefix) for name, prefix in LANES.items()},
        groups={name: fields for name in sorted(dispatched) if (fields := _group(server, run, name))},
        steps=steps,
        evaluations=evaluations,
        policy=texts(server.hgetall(key(run, "policy"))),
        archive=_archived(files / "batches", steps),
        records=_documents(files / "records", steps),
        shares=_shares(files / "batches", steps),
        checkpoints={
            int(json.loads(path.read_text())["step"]) for path in (files / "checkpoints").glob("step-*/checkpoint.json")
        },
        injected=by_stream,
    )


def _messages(server: Any, run: str, stream: str) -> list[dict[str, Any]]:
    return [body for _, fields in server.xrange(key(run, stream)) if (body := message(fields)) is not None]


def _filled(server: Any, run: str, name: str, entries: dict[str, list[Entry]]) -> int:
    """Add entries that were trimmed before the tail read them, from the append-only file; returns their number."""
    missed = redis_log.missed(server, key(run, name), {entry.id for entry in entries[name]})
    found = [*entries[name], *(Entry(entry, message(fields)) for entry, fields in missed)]
    entries[name] = sorted(found, key=lambda entry: entry.order)
    return len(missed)


def _named(entry: Entry) -> bool:
    return entry.body is not None and isinstance(entry.body.get("group"), str)


def _object(text: str) -> dict[str, Any] | None:
    try:
        body = json.loads(text)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def _lane(server: Any, run: str, prefix: str) -> Lane:
    counters = texts(server.hgetall(key(run, f"{prefix}counters")))
    members = server.smembers(key(run, f"{prefix}pending"))
    return Lane({name: int(value) for name, value in counters.items()}, {member.decode() for member in members})


def _group(server: Any, run: str, name: str) -> dict[str, str]:
    return texts(server.hgetall(key(run, f"group:{name}")))


def _unacked(seen: Seen, entries: list[Entry]) -> set[str]:
    """The entries that were unacked when the stream was last read, and those added since."""
    return seen.unacked | {entry.id for entry in entries if entry.order[0] >= seen.at}


def _own_name(record: dict[str, Any]) -> str:
    """The name, in file names, of what the learner of a step's record wrote for the step."""
    return f"step-{record['step']:06d}.e{record['epoch']:04d}-{record['owner']}"


def _archived(folder: Path, steps: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """By step, the archived batch message without what the archive adds to it."""
    found = _documents(folder, steps)
    return {
        step: {name: value for name, value in document.items() if name not in ADDED} for step, document in found.items()
    }


def _documents(folder: Path, steps: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    paths = {record["step"]: folder / f"{_own_name(record)}.json" for record in steps}
    return {step: json.loads(path.read_text()) for step, path in paths.items() if path.exists()}


def _shares(folder: Path, steps: list[dict[str, Any]]) -> dict[int, list[tuple[str, str]]]:
    found: dict[int, list[tuple[str, str]]] = {}
    for record in steps:
        for path in sorted(folder.glob(f"{_own_name(record)}.rank-*.parquet")):
            table = pq.ParquetFile(path).read(columns=["payload", "group"])
            rows = zip(table.column("payload").to_pylist(), table.column("group").to_pylist(), strict=True)
            found.setdefault(record["step"], []).extend(rows)
    return found
