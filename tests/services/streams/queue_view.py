"""Owns the queue test's view of a run's content in Redis, and its invariants.

Must not import the code under test: it reads keys and messages as stored.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NamedTuple

from redis.exceptions import ResponseError

from tests.services.streams.queue_model import ENDED, SAMPLES, STREAMS, TASKS, VERDICTS, Model

READERS = {TASKS: "rollout", SAMPLES: "verifier", VERDICTS: "sampler"}


class Seen(NamedTuple):
    """A stream's entries as (id, message), its leases as {id: (owner, deliveries)}, and the id delivered last."""

    entries: list[tuple[str, dict[str, Any]]]
    leases: dict[str, tuple[str, int]]
    delivered: tuple[int, int]

    @property
    def open(self) -> list[dict[str, Any]]:
        """The messages without an ack: under lease, or not delivered yet."""
        return [body for entry, body in self.entries if entry in self.leases or order(entry) > self.delivered]


def order(entry: str) -> tuple[int, int]:
    """An entry's id as a sort key."""
    first, second = entry.split("-")
    return int(first), int(second)


class View:
    """All of a run at one moment, after each step of the test; announcements are counted over all steps."""

    def __init__(self, redis: Any, run: str) -> None:
        self._redis = redis
        self._prefix = f"penstock:{{{run}}}:"
        self._parsed: dict[tuple[str, str], dict[str, Any]] = {}
        self._announced: Counter[tuple[str, str, int, int]] = Counter()
        self.copies: set[str] = set()

    def look(self) -> None:
        """Read everything in two transactions: the second reads the keys that the first lists."""
        key = self._prefix
        pipe = self._redis.pipeline(transaction=True)
        pipe.keys(f"{key}*")
        for name in (*STREAMS, "batches", "steps", "dead"):
            pipe.xrange(key + name)
        for name in STREAMS:
            pipe.xpending_range(key + name, READERS[name], "-", "+", 1000)
            pipe.xinfo_groups(key + name)
        pipe.hgetall(key + "counters").smembers(key + "pending").lrange(key + "released", 0, -1)
        pipe.lrange(key + "unarchived", 0, -1).lrange(key + "unarchived-bare", 0, -1)
        pipe.hgetall(key + "policy").hgetall(key + "queue")
        pipe.hgetall(key + "tokens-in-flight").hgetall(key + "step-tokens")
        names, *reply = pipe.execute(raise_on_error=False)
        streams = [self._messages(name, got) for name, got in zip((*STREAMS, "batches", "steps"), reply, strict=False)]
        self.batches, self.steps = ([body for _, body in stream] for stream in streams[3:])
        self.dead = [body for _, body in self._messages("dead", reply[5])]
        self.streams = {
            name: Seen(streams[at], *_leases(reply[6 + 2 * at], reply[7 + 2 * at])) for at, name in enumerate(STREAMS)
        }
        self.counters = {name.decode(): int(value) for name, value in reply[12].items()}
        self.pending = {name.decode() for name in reply[13]}
        self.released, self.unarchived, self.bare = (
            [name.decode().removeprefix(f"{key}group:") for name in names_of] for names_of in reply[14:17]
        )
        self.policy, self.queue = ({k.decode(): v.decode() for k, v in fields.items()} for fields in reply[17:19])
        self.tokens_of, self.step_tokens = ({k.decode(): int(v) for k, v in fields.items()} for fields in reply[19:21])
        self._look_at([name.decode().removeprefix(key) for name in names])

    def _look_at(self, names: list[str]) -> None:
        groups = [name.removeprefix("group:") for name in names if name.startswith("group:")]
        payloads = [name.removeprefix("payload:") for name in names if name.startswith("payload:")]
        partials = [name.removeprefix("partials:") for name in names if name.startswith("partials:")]
        pipe = self._redis.pipeline(transaction=True)
        for name in groups:
            pipe.hgetall(f"{self._prefix}group:{name}")
        for name in payloads:
            pipe.hget(f"{self._prefix}payload:{name}", "text")
        for name in partials:
            pipe.hkeys(f"{self._prefix}partials:{name}")
        reply = pipe.execute()
        self.partials = {
            name: {int(field[7:]) for field in fields if field.startswith(b"tokens:")}
            for name, fields in zip(partials, reply[len(groups) + len(payloads) :], strict=True)
        }
        hashes = [{k.decode(): v.decode() for k, v in fields.items()} for fields in reply[: len(groups)]]
        self.groups = dict(zip(groups, hashes, strict=True))
        texts = [float(text) for text in reply[len(groups) : len(groups) + len(payloads)]]
        keyed = [(group, int(index)) for group, _, index in (name.rpartition(":") for name in payloads)]
        self.payloads = dict(zip(keyed, texts, strict=True))

    def _messages(self, stream: str, entries: Any) -> list[tuple[str, dict[str, Any]]]:
        messages = []
        for entry, fields in entries:
            name = entry.decode()
            if (stream, name) not in self._parsed:
                self._parsed[stream, name] = json.loads(fields[b"m"])
            messages.append((name, self._parsed[stream, name]))
        return messages

    def check(self, model: Model) -> None:
        """Everything that must hold after every step."""
        self.counters_reconcile(model)
        self.tokens_close(model)
        self.every_group_is_in_one_state(model)
        self.results_are_the_first_ones(model)
        self.streams_hold_what_was_published_and_not_trimmed(model)
        self.a_group_is_trained_once(model)
        self.the_history_is_as_committed(model)
        self.every_pending_group_can_finish(model)
        self.only_half_drawn_responses_are_kept(model)

    def only_half_drawn_responses_are_kept(self, model: Model) -> None:
        for name, indices in self.partials.items():
            assert self.groups[name]["state"] == "pending", f"{name}: what was kept outlives its group"
            assert not indices & set(model.groups[name].payloads), f"{name}: a published sample is kept too"

    def counters_reconcile(self, model: Model) -> None:
        ended = {name: self.counters.get(name, 0) for name in ENDED}
        dispatched = self.counters.get("dispatched", 0)
        assert dispatched == sum(ended.values()) + len(self.pending)
        counts = Counter({**ended, "dispatched": dispatched, "pending": len(self.pending)})
        assert +counts == model.counts()
        assert self.counters.get("response_tokens", 0) == model.response_tokens

    def tokens_close(self, model: Model) -> None:
        counted = Counter(
            {name.removeprefix("tokens_"): n for name, n in self.counters.items() if name.startswith("tokens_")}
        )
        assert +counted == +model.tokens
        assert counted.pop("generated", 0) == sum(counted.values()) + sum(self.tokens_of.values())
        assert self.tokens_of == {group.name: group.tokens for group in model.groups.values() if group.tokens}
        assert self.step_tokens == {str(step): tokens for step, tokens in model.step_tokens.items()}

    def every_group_is_in_one_state(self, model: Model) -> None:
        states = {name: fields["state"] for name, fields in self.groups.items()}
        assert states == {name: group.state for name, group in model.groups.items() if not group.gone}
        assert {name for name, state in states.items() if state not in ENDED} == self.pending
        assert self.released == model.tombstones
        assert (self.unarchived, self.bare) == (model.unarchived, model.bare)

    def results_are_the_first_ones(self, model: Model) -> None:
        """Payloads exist exactly while they may be needed, and each recorded verdict is of that payload."""
        wanted = {(name, n): nonce for name, group in model.groups.items() for n, nonce in group.payloads.items()}
        assert self.payloads == wanted
        for name, fields in self.groups.items():
            group = model.groups[name]
            recorded = {
                int(field.removeprefix("verdict:")): json.loads(value)["facts"]["started_at"]
                for field, value in fields.items()
                if field.startswith("verdict:")
            }
            assert recorded == group.recorded, name
            assert {int(field[7:]) for field in fields if field.startswith("judged:")} == set(group.judged), name
            for index, nonce in recorded.items():
                assert self.payloads.get((name, index), nonce) == nonce, f"{name}:{index} has a verdict on another text"

    def streams_hold_what_was_published_and_not_trimmed(self, model: Model) -> None:
        for name in STREAMS:
            seen, expected = self.streams[name], model.streams[name]
            assert [_identity(body) for _, body in seen.entries] == [
                (entry.group, entry.wanted, entry.index, entry.nonce) for entry in expected.entries
            ], name
            leases = [seen.leases[entry] for entry, _ in seen.entries if entry in seen.leases]
            assert leases == [(entry.owner, entry.deliveries) for entry in expected.of("leased")], name
            assert len(leases) == len(seen.leases), f"{name}: a lease on a deleted entry"
            assert len(seen.open) == len(expected.of("leased")) + len(expected.of("new")), name
            self._count_announced(model, name)

    def _count_announced(self, model: Model, stream: str) -> None:
        """A sample is announced once per life of its group, and judged once."""
        for entry, body in self.streams[stream].entries:
            if stream != TASKS and entry not in self.copies and not body.get("counted"):
                body["counted"] = True
                self._announced[stream, body["group"], model.groups[body["group"]].life, body["index"]] += 1
                assert max(self._announced.values()) == 1, f"{stream}: {entry} is announced twice"

    def a_group_is_trained_once(self, model: Model) -> None:
        trained = [name for record in self.steps for name in record["groups"]]
        last = max((record["step"] for record in self.steps), default=0)
        waiting = [group["group"] for batch in self.batches if batch["step"] > last for group in batch["groups"]]
        assert len({*trained, *waiting}) == len(trained) + len(waiting), (trained, waiting)
        assert len(trained) == self.counters.get("trained", 0)

    def the_history_is_as_committed(self, model: Model) -> None:
        assert [(record["step"], tuple(record["groups"])) for record in self.steps] == model.steps
        log = [(batch["step"], tuple(group["group"] for group in batch["groups"])) for batch in self.batches]
        assert log == [(batch.step, batch.groups) for batch in model.log]
        steps = json.loads(self.policy.get("version_steps", "{}"))
        assert {int(version): step for version, step in steps.items()} == model.version_steps
        if model.committed:
            standing = int(self.policy["version"]), int(self.policy["step"]), self.policy["weights"]
            assert standing == model.committed
        assert int(self.queue.get("step", 0)) == model.queue_step

    def every_pending_group_can_finish(self, model: Model) -> None:
        """Each missing verdict of a pending group has an open verdict, sample or task, or a letter ends the group."""
        verdicts, samples = (
            {(body["group"], body["index"]) for body in self.streams[name].open} for name in (VERDICTS, SAMPLES)
        )
        tasks: Counter[str] = Counter()
        for body in self.streams[TASKS].open:
            tasks[body["group"]] = max(tasks[body["group"]], body["stop"] or body["samples"])
        letters = {(letter.group, letter.life) for letter in model.letters if letter.cause != "invalid"}
        for name, fields in self.groups.items():
            if fields["state"] != "pending" or (name, model.groups[name].life) in letters:
                continue
            task = json.loads(fields["task"])
            for index in range(task["stop"] or task["samples"]):
                in_flight = (name, index) in verdicts or (name, index) in samples or tasks[name] > index
                assert f"verdict:{index}" in fields or in_flight, f"{name}:{index} is lost"


def _identity(body: dict[str, Any]) -> tuple[str, int, int, float]:
    if body["kind"] == "task":
        return body["group"], body["stop"] or body["samples"], -1, 0.0
    return body["group"], 0, body["index"], body["facts"]["started_at"]


def _leases(pending: Any, groups: Any) -> tuple[dict[str, tuple[str, int]], tuple[int, int]]:
    if isinstance(pending, ResponseError) or isinstance(groups, ResponseError):
        return {}, (0, 0)
    leases = {lease["message_id"].decode(): (lease["consumer"].decode(), lease["times_delivered"]) for lease in pending}
    return leases, order(groups[0]["last-delivered-id"].decode())
