"""Owns the chaos suite's own view of Redis: a run's key names, and what each process holds, by raw commands.

Must not import the code under test: what that reports is not evidence.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

BODY = b"m"
"""The one field of a stream entry: the message as JSON."""
READERS = {
    "tasks": "rollout",
    "samples": "verifier",
    "verdicts": "sampler",
    "evaluation:tasks": "rollout",
    "evaluation:samples": "verifier",
    "evaluation:verdicts": "sampler",
}
"""The streams with leases, and the consumer group (the name of the service) that reads each."""
STREAMS = (*READERS, "batches", "steps", "events", "dead", "evaluations", "weight-plans", "weight-acks")
"""Every stream of a run."""
LANES = {"train": "", "evaluation": "evaluation:"}
"""By lane: the prefix of its streams and counters."""
READY = "ready"
LAPSES_S = 10
"""How long a heartbeat counts, by Redis' clock."""
SENTINELS = "redis+sentinel://"
DOWN = (redis.exceptions.ConnectionError, redis.exceptions.BusyLoadingError)


def key(run: str, name: str) -> str:
    """The key called `name` in a run."""
    return f"penstock:{{{run}}}:{name}"


def client(url: str, patience_s: float = 40.0) -> Any:
    """The suite's own connection, past any proxy; waits `patience_s` seconds for a server that is down."""
    pause = 0.1
    # A server that accepts a connection but does not answer is stopped: the caller must release it, so no retry.
    return connection(url, Retry(ConstantBackoff(pause), int(patience_s / pause), supported_errors=DOWN), 2, 15)


def connection(url: str, retry: Retry, connect_s: float, answer_s: float) -> Any:
    """A connection to the server at `url`, or to the primary that the Sentinels there name."""
    options: dict[str, Any] = {
        "protocol": 2,
        "socket_connect_timeout": connect_s,
        "socket_timeout": answer_s,
        "retry": retry,
    }
    if not url.startswith(SENTINELS):
        return redis.Redis.from_url(url, **options)
    addresses, service, _ = url.removeprefix(SENTINELS).split("/")
    sentinels = [(host, int(port)) for host, _, port in (each.rpartition(":") for each in addresses.split(","))]
    return Sentinel(sentinels, socket_timeout=connect_s).master_for(service, **options)


def texts(fields: dict[bytes, bytes]) -> dict[str, str]:
    """A hash with names and values as text; undecodable bytes survive as surrogates."""
    return {name.decode(): value.decode(errors="surrogateescape") for name, value in fields.items()}


@dataclass(frozen=True)
class Process:
    """A process as its heartbeat announces it. `waits`: the names of what it waits for."""

    id: str
    service: str
    pid: int
    state: str
    version: int | None
    waits: tuple[str, ...] = ()


def processes(server: Any, run: str, service: str | None = None) -> list[Process]:
    """The run's live processes, or those of `service`."""
    found = []
    seconds, _ = server.time()
    for _, value in sorted(server.hgetall(key(run, "heartbeats")).items()):
        at_ms, _, body = value.partition(b" ")
        if abs(seconds - int(at_ms) / 1000) <= LAPSES_S:
            announced = json.loads(body)
            waits = tuple(wait["name"] for wait in announced.get("waits", ()))
            found.append(Process(*(announced[name] for name in ("id", "service", "pid", "state", "version")), waits))
    return [process for process in found if service in (None, process.service)]


@dataclass(frozen=True)
class Held:
    """An entry under lease: the stream's name in the run, the entry's id, the consumer."""

    stream: str
    entry: str
    consumer: str


def leases(server: Any, run: str, service: str | None = None, consumer: str | None = None) -> list[Held]:
    """The leases of `service` (default: all), or only those of process `consumer`; at most 50 per stream."""
    found = []
    for stream, reader in READERS.items():
        if service not in (None, reader):
            continue
        try:
            pending = server.xpending_range(key(run, stream), reader, "-", "+", 50, consumername=consumer)
        except redis.exceptions.ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
            continue  # no consumer has read it yet
        found += [Held(stream, entry["message_id"].decode(), entry["consumer"].decode()) for entry in pending]
    return found


def still_leased(server: Any, run: str, held: tuple[Held, ...]) -> list[Held]:
    """The entries of `held` that are not acked yet, whatever their consumer."""
    return [lease for lease in held if _leased(server, run, lease)]


def _leased(server: Any, run: str, lease: Held) -> bool:
    try:
        return bool(server.xpending_range(key(run, lease.stream), READERS[lease.stream], lease.entry, lease.entry, 1))
    except redis.exceptions.ResponseError as error:
        if not str(error).startswith("NOGROUP"):
            raise
        return False  # the run has ended, and its streams are gone


def policy(server: Any, run: str) -> tuple[int, int] | None:
    """The committed (version, rollout step); None before the first."""
    version, step = server.hmget(key(run, "policy"), "version", "step")
    return None if version is None else (int(version), int(step))


def owner(server: Any, run: str, role: str) -> str:
    """The process that owns a role; of the learner, that is rank 0."""
    return str((server.get(key(run, f"epoch:{role}")) or b"").decode().partition(" ")[2])


def batch_in_flight(server: Any, run: str) -> tuple[str, int] | None:
    """The oldest batch after the committed step: (entry, step); None when the learner has no work."""
    committed = policy(server, run)
    if committed is None:
        return None
    for entry, fields in server.xrange(key(run, "batches")):
        body = message(fields)
        if body is not None and body.get("step", 0) > committed[1]:
            return entry.decode(), int(body["step"])
    return None


@dataclass(frozen=True)
class Sync:
    """A weight sync in flight: the plan's group and version, and the members that have not acked it."""

    generation: int
    version: int
    missing: frozenset[str]


def open_sync(server: Any, run: str) -> Sync | None:
    """The newest weight plan, unless all of its members have acked it."""
    plans = server.xrevrange(key(run, "weight-plans"), count=1)
    plan = message(plans[0][1]) if plans else None
    if plan is None:
        return None
    wanted = (plan["generation"], plan["version"])
    answered = set()
    for _, fields in server.xrevrange(key(run, "weight-acks"), count=50):
        ack = message(fields)
        if ack is not None and (ack["generation"], ack["version"]) == wanted:
            answered.add(ack["member"])
    missing = frozenset(plan["members"]) - answered
    return Sync(*wanted, missing) if missing else None


def state(server: Any, run: str) -> str:
    """The run's state."""
    return str((server.hget(key(run, "record"), "state") or b"").decode())


def message(fields: dict[bytes, bytes]) -> dict[str, Any] | None:
    """The message of a stream entry; None if it is not a JSON object."""
    try:
        body = json.loads(fields.get(BODY, b""))
    except ValueError:
        return None
    return body if isinstance(body, dict) else None
