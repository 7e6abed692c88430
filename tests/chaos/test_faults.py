"""Faults on a real server: a moment counts only while its victim holds something, and damage takes effect."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import redis

from services.contracts import Batch, BatchGroup, BatchSample, Prompt, SamplerState, Sampling, Task, VersionSpan
from services.streams.delivery.payloads import PayloadMissingError, SamplePayload, pack, unpack
from services.streams.delivery.validation import Malformed, admit
from services.streams.keys import RunKeys
from tests.chaos import disk, moments, strikes
from tests.chaos.damage import MESSAGES, PAYLOADS
from tests.chaos.faults import FAULTS
from tests.chaos.injector import inject
from tests.chaos.lookups import Held, batch_in_flight, client, key, leases, open_sync, still_leased
from tests.chaos.recovery import entry_dealt_with, rejected
from tests.chaos.scene import Moment, Scene
from tests.chaos.server import Server
from tests.harness.stack import exists
from tests.harness.workload import recipe

RUN = "struck"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("valkey")) as started:
        yield started


@pytest.fixture
def raw(server: Server) -> Iterator[Any]:
    with client(server.url) as connection:
        connection.flushall()
        yield connection


@pytest.fixture
def scene(raw: Any, tmp_path: Path) -> Scene:
    document = recipe(tmp_path, tmp_path, steps=20, replicas=1, ranks=1, staleness=1)
    raw.hset(key(RUN, "record"), mapping={"state": "running"})
    return Scene(RUN, raw, None, tmp_path, document, random.Random(7))  # type: ignore[arg-type]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    yield process
    process.kill()
    process.wait(10)


def announce(raw: Any, service: str, pid: int, name: str = "victim", state: str = "ready") -> None:
    announced = {"id": name, "service": service, "pid": pid, "state": state, "version": 0}
    raw.hset(key(RUN, "heartbeats"), name, f"{raw.time()[0] * 1000} {json.dumps(announced)}")


def lease(raw: Any, stream: str, reader: str, body: dict[str, Any], consumer: str = "victim") -> str:
    entry = raw.xadd(key(RUN, stream), {"m": json.dumps(body)})
    if not raw.exists(key(RUN, stream)) or not raw.xinfo_groups(key(RUN, stream)):
        raw.xgroup_create(key(RUN, stream), reader, id="0")
    raw.xreadgroup(reader, consumer, {key(RUN, stream): ">"})
    return str(entry.decode())


def test_a_lease_is_reported_until_it_is_acked(raw):
    assert leases(raw, RUN) == []
    entry = lease(raw, "samples", "verifier", {"group": "g0"})
    held = Held("samples", entry, "victim")
    assert leases(raw, RUN, "verifier", "victim") == [held]
    assert leases(raw, RUN, "verifier", "another") == leases(raw, RUN, "rollout") == []
    assert still_leased(raw, RUN, (held,)) == [held]
    raw.xack(key(RUN, "samples"), "verifier", entry)
    assert leases(raw, RUN) == still_leased(raw, RUN, (held,)) == []


def test_a_batch_is_in_flight_until_its_step_is_committed(raw):
    assert batch_in_flight(raw, RUN) is None
    for step in (1, 2):
        raw.xadd(key(RUN, "batches"), {"m": json.dumps({"step": step})})
    assert batch_in_flight(raw, RUN) is None, "the learner has not started yet"
    raw.hset(key(RUN, "policy"), mapping={"version": 1, "step": 1})
    assert batch_in_flight(raw, RUN)[1] == 2
    raw.hset(key(RUN, "policy"), mapping={"version": 2, "step": 2})
    assert batch_in_flight(raw, RUN) is None


def test_a_sync_is_open_until_all_members_have_acked(raw):
    assert open_sync(raw, RUN) is None
    raw.xadd(key(RUN, "weight-plans"), {"m": json.dumps({"generation": 5, "version": 3, "members": {"a": 1, "b": 2}})})
    assert open_sync(raw, RUN).missing == {"a", "b"}
    for member, generation in (("a", 5), ("b", 4)):
        ack = {"member": member, "generation": generation, "version": 3, "phase": "applied"}
        raw.xadd(key(RUN, "weight-acks"), {"m": json.dumps(ack)})
    assert open_sync(raw, RUN).missing == {"b"}, "an ack of an older plan must not count"
    raw.xadd(key(RUN, "weight-acks"), {"m": json.dumps({"member": "b", "generation": 5, "version": 3})})
    assert open_sync(raw, RUN) is None


def test_a_victim_without_a_lease_is_not_killed(raw, scene, sleeper, monkeypatch):
    announce(raw, "verifier", sleeper.pid)
    entry = lease(raw, "samples", "verifier", {"group": "g0"})
    moment = moments.working("verifier")(scene)
    assert (moment.process, moment.pid) == ("victim", sleeper.pid)
    raw.xack(key(RUN, "samples"), "verifier", entry)
    assert strikes.kill(scene, moment) is None
    assert exists(sleeper.pid)
    assert psutil.Process(sleeper.pid).status() != psutil.STATUS_STOPPED
    monkeypatch.setattr("tests.chaos.injector.MOMENT_S", 0.5)
    outcome = inject(scene, "kill verifier")
    assert not outcome.counted
    assert exists(sleeper.pid)


def test_a_victim_with_a_lease_is_killed_and_recorded(raw, scene, sleeper):
    announce(raw, "verifier", sleeper.pid)
    entry = lease(raw, "samples", "verifier", {"group": "g0"})
    struck = strikes.kill(scene, moments.working("verifier")(scene))
    assert sleeper.wait(10) == -9
    assert struck.moment.as_json()["leases"] == [["samples", entry, "victim"]]
    recovered = FAULTS["kill verifier"].recovered
    assert not recovered(scene, struck)
    raw.xack(key(RUN, "samples"), "verifier", entry)
    assert not recovered(scene, struck), "the killed process's heartbeat must not count"
    for name in ("another", "one-more"):
        announce(raw, "verifier", 1, name)
    assert recovered(scene, struck)


def test_a_sampler_is_killed_with_a_verdict_that_it_waited_for(raw, scene, sleeper):
    announce(raw, "sampler", sleeper.pid)
    assert moments.sampling(scene) is None, "nothing is at work"
    lease(raw, "samples", "verifier", {"group": "g0"}, consumer="a-verifier")
    moment = moments.sampling(scene)
    assert (moment.process, moment.leases) == ("victim", ())
    assert strikes.kill(scene, moment) is None, "no verdict came"
    assert psutil.Process(sleeper.pid).status() != psutil.STATUS_STOPPED
    judging = threading.Timer(0.2, lambda: lease(raw, "verdicts", "sampler", {"group": "g0"}))
    judging.start()
    struck = strikes.kill(scene, moment)
    judging.join()
    assert sleeper.wait(10) == -9
    assert [held.stream for held in struck.moment.leases] == ["verdicts"]


@pytest.mark.parametrize(("look", "victim"), [(moments.first_rank, "rank-0"), (moments.later_rank, "rank-1")])
def test_the_named_rank_is_the_victim(raw, scene, sleeper, look, victim):
    raw.set(key(RUN, "epoch:learner"), "3 rank-0")
    raw.hset(key(RUN, "policy"), mapping={"version": 1, "step": 1})
    for name in ("rank-0", "rank-1"):
        announce(raw, "learner", sleeper.pid, name)
    assert look(scene) is None, "no batch is in flight"
    raw.xadd(key(RUN, "batches"), {"m": json.dumps({"step": 2})})
    assert (look(scene).process, look(scene).batch) == (victim, 2)
    raw.hdel(key(RUN, "heartbeats"), "rank-1")
    assert look(scene) is None, "a learner of one rank has neither"


def test_a_stopped_victim_continues(raw, scene, sleeper):
    announce(raw, "verifier", sleeper.pid)
    lease(raw, "samples", "verifier", {"group": "g0"})
    struck = strikes.stop(scene, moments.working("verifier")(scene))
    assert psutil.Process(sleeper.pid).status() == psutil.STATUS_STOPPED
    assert not struck.due()
    struck.release()
    assert psutil.Process(sleeper.pid).status() != psutil.STATUS_STOPPED


def test_a_victim_does_not_stay_stopped_when_redis_fails(raw, scene, sleeper):
    announce(raw, "verifier", sleeper.pid)
    lease(raw, "samples", "verifier", {"group": "g0"})
    moment = moments.working("verifier")(scene)
    raw.rename(key(RUN, "samples"), key(RUN, "elsewhere"))
    raw.set(key(RUN, "samples"), "no stream")
    with pytest.raises(redis.exceptions.ResponseError):
        strikes.stop(scene, moment)
    assert psutil.Process(sleeper.pid).status() != psutil.STATUS_STOPPED


def a_task() -> Task:
    prompt = Prompt(id="p", messages=({"role": "user", "content": "?"},), verifier="pattern", reference={})
    return Task(group="g0", prompt=prompt, samples=4, sampling=Sampling(temperature=1.0, top_p=1.0, max_new_tokens=4))


def a_batch() -> Batch:
    payload = RunKeys(RUN).payload("g0", 0)
    sample = BatchSample(payload=payload, tokens=3, advantage=0.1, reward=1, correct=True, masked=False, staleness=0)
    return Batch(
        step=1,
        version=0,
        groups=(BatchGroup(group="g0", samples=(sample,)),),
        sampling_metrics={},
        sampler_state=SamplerState(cursor=0, next_group=1),
        generation_started_at=0.0,
        generation_finished_at=1.0,
    )


@pytest.mark.parametrize("how", sorted(MESSAGES))
@pytest.mark.parametrize("message", [a_task(), a_batch()], ids=["task", "batch"])
def test_a_damaged_message_is_no_message_of_the_run(how: str, message: Task | Batch):
    body = message.model_dump_json().encode()
    assert not isinstance(admit(RunKeys(RUN), type(message), body), Malformed)
    for seed in range(20):
        admitted = admit(RunKeys(RUN), type(message), MESSAGES[how](body, random.Random(seed)))
        # Only Redis knows whether a task's group is one of this run.
        assert isinstance(admitted, Malformed) or admitted.group == "of-another-run"


@pytest.mark.parametrize("how", sorted(PAYLOADS))
def test_every_damage_changes_an_existing_payload(raw, how: str):
    name = RunKeys(RUN).payload("g0", 0)
    ids = np.arange(3, dtype=np.int32)
    fields = pack(
        SamplePayload(ids, ids, np.zeros(3, np.float32), "abc", "stop", (VersionSpan(version=0, start=0, end=3),))
    )
    assert not PAYLOADS[how](raw, name, random.Random(1))
    assert not raw.exists(name), "a released payload must not be created again"
    raw.hset(name, mapping=fields)
    unpack(name, raw.hgetall(name))
    assert PAYLOADS[how](raw, name, random.Random(1))
    found = raw.hgetall(name)
    assert sum(found[field.encode()] != value for field, value in fields.items()) == 1
    with pytest.raises(PayloadMissingError):
        unpack(name, found)


def test_a_message_is_copied_while_it_is_leased(raw, scene):
    look = moments.message_in_flight("tasks")
    assert look(scene) is None
    entry = lease(raw, "tasks", "rollout", {"group": "g0"})
    struck = strikes.duplicate_message(scene, look(scene))
    assert struck.moment.facts == {"stream": "tasks", "of": entry}
    assert scene.injected == [struck.entry]
    assert len({fields[b"m"] for _, fields in raw.xrange(key(RUN, "tasks"))}) == 1
    assert not entry_dealt_with(scene, struck)
    [(_, [(delivered, _)])] = raw.xreadgroup("rollout", "victim", {key(RUN, "tasks"): ">"})
    assert not entry_dealt_with(scene, struck)
    raw.xack(key(RUN, "tasks"), "rollout", delivered)
    assert entry_dealt_with(scene, struck)


def test_a_rejected_message_is_found_by_its_entry(raw, scene):
    lease(raw, "tasks", "rollout", {"group": "g0"})
    struck = strikes.damage_message(scene, moments.message_in_flight("tasks")(scene))
    stream, entry = struck.entry
    letter = {"stream": key(RUN, stream), "entry": entry, "cause": "deliveries"}
    raw.xadd(key(RUN, "dead"), {"m": json.dumps(letter)})
    assert not rejected(scene, struck)
    raw.xadd(key(RUN, "dead"), {"m": json.dumps({**letter, "cause": "invalid"})})
    assert rejected(scene, struck)


def test_a_payload_counts_until_its_batch_is_trained(raw, scene):
    raw.hset(key(RUN, "policy"), mapping={"version": 1, "step": 1})
    raw.hset(key(RUN, "payload:e.held-out.before.000001:0"), "text", "x")
    raw.hset(key(RUN, "payload:g0:1"), "text", "x")
    raw.hset(key(RUN, "group:g0"), mapping={"state": "batched", "step": 1})
    assert moments.payload_waiting(scene) is None
    raw.hset(key(RUN, "group:g0"), mapping={"step": 2})
    assert moments.payload_waiting(scene).facts["group"] == "g0"


def test_a_bit_of_a_checkpoint_is_flipped(tmp_path):
    folder = tmp_path / "step-000002-0a1b2c3d"
    folder.mkdir()
    assert not strikes.flip_a_bit(folder, 0.5)
    (folder / "rank-0000.safetensors").write_bytes(bytes(100))
    assert strikes.flip_a_bit(folder, 0.5)
    assert sum((folder / "rank-0000.safetensors").read_bytes()) == 0x10


@pytest.mark.skipif(disk.refusal() is not None, reason=str(disk.refusal()))
def test_a_disk_is_filled_and_emptied(raw, scene):
    checkpoints = scene.folder / "checkpoints"
    with disk.own_disk(checkpoints):
        started = time.monotonic()
        struck = strikes.fill_disk(scene, Moment())
        assert time.monotonic() - started < 10
        with pytest.raises(OSError, match="No space left"), (checkpoints / "one-byte").open("wb", buffering=0) as file:
            file.write(b"1")
        assert not struck.had_effect()
        raw.xadd(key(RUN, "events"), {"m": json.dumps({"phase": "checkpoint-failed", "text": "no space"})})
        assert struck.had_effect()
        assert struck.due()
        struck.release()
        (checkpoints / "a-megabyte").write_bytes(bytes(2**20))
    assert not checkpoints.is_mount()
    assert list(checkpoints.iterdir()) == []
