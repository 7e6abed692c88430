"""Owns what the oracle judges: the tail's file, what Redis holds at the end, and the run's folder, read side by side.

Must not import the code under test, nor judge.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.chaos.lookups import LANES, READERS, STREAMS, key, message, texts
from tests.chaos.watch import Seen, Watch
from tests.harness.servers import redis_log


@dataclass(frozen=True)
class Entry:
    """A stream entry as the tail saw it; `body` is None where it was no JSON object."""

    id: str
    body: dict[str, Any] | None

    @property
    def order(self) -> tuple[int, int]:
        """Ids in the order of the stream."""
        milliseconds, number = self.id.split("-")
        return int(milliseconds), int(number)


@dataclass
class Lane:
    """Of one lane, when all was over: its counters, the ids that it counts as pending."""

    counters: dict[str, int] = field(default_factory=dict)
    pending: set[str] = field(default_factory=set)


@dataclass
class Evidence:
    """Everything that is known of one run. Streams and lanes by name; `recipe` as the run's record has it.

    `added`: entries that each stream ever had, of `restarted` ones those that were seen, at least. `read`: those that
    we have, of which `filled` were trimmed before the tail saw them and come from the server's append-only file.
    `unacked`: entries that a consumer group still had to deal with. `groups`: the hashes of all groups that still have
    one. `steps`: the step records that are the history now. `archive`, `records`, `shares` by rollout step; a share's
    rows are (payload, group). `injected`: entries that the injector added, by stream.
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


def read_tail(path: Path) -> tuple[dict[str, list[Entry]], dict[str, int]]:
    """The tail's file: entries by stream, and how many it says they are ({} where it did not come to its end)."""
    entries: dict[str, list[Entry]] = {name: [] for name in STREAMS}
    end: dict[str, int] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        told = json.loads(line)
        if "stream" in told:
            entries[told["stream"]].append(Entry(told["id"], _object(told["m"])))
        elif "end" in told:
            end = told["end"]
    return entries, end


def collect(
    server: Any, run: str, tail: Path, watch: Watch, folder: Path, injected: Iterable[tuple[str, str]] = ()
) -> Evidence:
    """Read everything, after the run has ended and its tail and watch were closed. `folder`: the run's."""
    entries, read = read_tail(tail)
    added = {name: seen.added for name, seen in watch.seen.items()} if read else dict.fromkeys(STREAMS, -1)
    filled = {name: _filled(server, run, name, entries) for name in STREAMS if read.get(name, 0) < added[name]}
    dispatched = {entry.body["group"] for lane in LANES.values() for entry in entries[f"{lane}tasks"] if _named(entry)}
    record = texts(server.hgetall(key(run, "record")))
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
        steps=[body for _, fields in server.xrange(key(run, "steps")) if (body := message(fields)) is not None],
        policy=texts(server.hgetall(key(run, "policy"))),
        archive=_numbered(folder / "batches"),
        records=_numbered(folder / "records"),
        shares=_shares(folder / "batches"),
        checkpoints={
            int(json.loads(path.read_text())["step"])
            for path in (folder / "checkpoints").glob("step-*/checkpoint.json")
        },
        injected=by_stream,
    )


def _filled(server: Any, run: str, name: str, entries: dict[str, list[Entry]]) -> int:
    """Take in what was trimmed before the tail saw it, as far as the server has logged it; how many entries."""
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
    """What was unacked when the stream was last looked at, and what came after that look."""
    return seen.unacked | {entry.id for entry in entries if entry.order[0] >= seen.at}


def _numbered(folder: Path) -> dict[int, dict[str, Any]]:
    found = {}
    for path in folder.glob("step-*.json"):
        found[int(path.stem.removeprefix("step-"))] = json.loads(path.read_text())
    return found


def _shares(folder: Path) -> dict[int, list[tuple[str, str]]]:
    found: dict[int, list[tuple[str, str]]] = {}
    for path in sorted(folder.glob("step-*.rank-*.parquet")):
        step = int(path.name.split(".")[0].removeprefix("step-"))
        table = pq.ParquetFile(path).read(columns=["payload", "group"])
        rows = zip(table.column("payload").to_pylist(), table.column("group").to_pylist(), strict=True)
        found.setdefault(step, []).extend(rows)
    return found
