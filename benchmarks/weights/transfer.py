"""Owns the measurement of publications to replicas without a model, each between two broadcasts of raw Gloo.

Must not report.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.weights.policies import Policy
from benchmarks.weights.raw import TIMEOUT, RawGroup
from learner.weight_sync.publisher import Publisher
from learner.weight_sync.snapshot import Snapshot, make_manifest, take_snapshot
from services.contracts import WeightAck
from services.settings import WeightsSettings
from services.streams.connection.client import Redis, connect
from services.streams.delivery.consumer import tail_messages
from services.streams.state.policy_history import History
from tests.harness.small_run import recipe_document, service_context

START_S = 300.0
LOOK_S = 0.05
END_S = 20.0


class Replica:
    """A process of the module `program`, which answers commands."""

    def __init__(self, run: str, redis_url: str, program: str) -> None:
        command = [sys.executable, "-m", program, "--run", run, "--redis", redis_url]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, do: str, **more: int) -> None:
        """Send a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do} | more) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The answer to the last command. Raises RuntimeError if the process has ended."""
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):  # libraries print, too
                return dict(json.loads(line))
        raise RuntimeError(f"a replica has ended with status {self._process.wait()}")

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


@contextmanager
def fleet(
    run: str, redis_url: str, replicas: int, program: str = "benchmarks.weights.replica"
) -> Iterator[list[Replica]]:
    """That many replicas."""
    started = [Replica(run, redis_url, program) for _ in range(replicas)]
    try:
        yield started
    finally:
        for replica in started:
            replica.end()


class RawGloo:
    """Raw broadcasts of `tensor` from this process to the replicas."""

    def __init__(self, replicas: list[Replica], tensor: torch.Tensor) -> None:
        self._replicas, self._size = replicas, tensor.nbytes
        world = len(replicas) + 1
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        for rank, replica in enumerate(replicas, 1):
            replica.tell("join", rank=rank, world=world, elements=tensor.numel(), port=store.port)
        self._group = RawGroup(store, 0, world, tensor)
        for replica in replicas:
            replica.answer()

    def per_s(self) -> float:
        """Broadcast once. Returns the bytes per second that each replica received."""
        for replica in self._replicas:
            replica.tell("broadcast")
        seconds = self._group.broadcast()
        for replica in self._replicas:
            replica.answer()
        return self._size / seconds


class TimedPublisher(Publisher):
    """The publisher, which notes its phases in `phases`, in seconds, beside the metrics."""

    phases: dict[str, float]

    def _observe(self, phase: str, seconds: float) -> None:
        self.phases[phase] = seconds
        super()._observe(phase, seconds)


@dataclass(frozen=True)
class Publication:
    """One publication, in seconds; of replicas, the slowest.

    publish_s: from the call until every replica had acknowledged the version. snapshot_s: the copy before that.
    form_s: forming the group, 0 if one was reused. broadcast_s: the sender's. staging_s: a replica's, from its start
    until all is received and verified; checksum_s of it verifying. apply_s: the copy into the parameters.
    raw_per_s: bytes per second of raw Gloo, the mean of the broadcasts before and after.
    """

    size: int
    publish_s: float
    snapshot_s: float
    form_s: float
    broadcast_s: float
    staging_s: float
    checksum_s: float
    apply_s: float
    raw_per_s: float

    @property
    def rest_s(self) -> float:
        """The seconds of the publication that are no part of another phase: plan, acks, and the last checksums."""
        return self.publish_s - self.form_s - self.broadcast_s - self.apply_s

    @property
    def received(self) -> float:
        """The bytes per second until every replica had received and verified the version, to raw Gloo's."""
        return self.size / (self.publish_s - self.apply_s) / self.raw_per_s

    @property
    def held(self) -> float:
        """The bytes per second until every replica served the version, to raw Gloo's."""
        return self.size / self.publish_s / self.raw_per_s


class Measurement:
    """A learner that publishes a policy to a fleet, in this process. `open` makes one."""

    def __init__(self, redis: Redis, publisher: TimedPublisher, policy: Policy, bucket_mib: int) -> None:
        self._redis, self._publisher, self._policy = redis, publisher, policy
        self._manifest = make_manifest(policy, bucket_mib)  # type: ignore[arg-type]
        self._snapshot: Snapshot | None = None
        self._acks_after = "0-0"

    @classmethod
    @asynccontextmanager
    async def open(
        cls, redis: Redis, run: str, policy: Policy, settings: WeightsSettings, model: Path, /, **sections: Any
    ) -> AsyncIterator[Measurement]:
        """Create the run, with `sections` in its recipe, and serve its rendezvous."""
        async with service_context(redis, run, recipe_document(model, **sections), "learner") as context:
            history = await History.fenced(redis, context.keys, "learner", context.heartbeat.info.id)
            publisher = TimedPublisher(redis, context.keys, context.event_log, settings, "127.0.0.1", history)
            found = cls(redis, publisher, policy, settings.bucket_mib)
            await publisher.open(found._manifest)
            try:
                yield found
            finally:
                await publisher.close()

    async def await_replicas(self, count: int) -> None:
        """Wait until that many have announced themselves. Raises TimeoutError."""
        ends = time.monotonic() + START_S
        while len(await self._publisher._receivers()) < count:
            if time.monotonic() > ends:
                raise TimeoutError(f"{count} replicas did not start within {START_S:g} s")
            await asyncio.sleep(LOOK_S)

    async def publish(self, version: int) -> dict[str, float]:
        """Train, copy and publish the policy as `version`; the fields of Publication that the learner knows."""
        self._policy.train(version)
        started = time.perf_counter()
        taken = await asyncio.to_thread(take_snapshot, self._policy, self._manifest, version, keep=True)  # type: ignore[arg-type]
        snapshot_s = time.perf_counter() - started
        assert taken is not None
        self._snapshot = taken
        phases = self._publisher.phases = {"form": 0.0}
        publish_s = await self._publisher.publish(taken)
        acks = await self._acks(version)
        return {
            "snapshot_s": snapshot_s,
            "publish_s": publish_s,
            "form_s": phases["form"],
            "broadcast_s": phases["broadcast"],
            "staging_s": max(ack.staging_s for ack in acks),
            "apply_s": max(ack.pause_s for ack in acks),
        }

    async def _acks(self, version: int) -> list[WeightAck]:
        keys, found = self._publisher._keys, []
        for entry, ack in await tail_messages(self._redis, keys, keys.weight_acks, WeightAck, self._acks_after):
            self._acks_after = entry
            if ack.phase == "failed":
                raise RuntimeError(f"version {ack.version}: {ack.member} reports: {ack.detail}")
            if ack.version == version:
                found.append(ack)
        return found


async def measure(
    redis_url: str, run: str, policy: Policy, settings: WeightsSettings, replicas: int, repeats: int, raw_bytes: int
) -> list[Publication]:
    """The first publication, which forms the group, and `repeats` more, to a fleet of its own."""
    redis = await connect(redis_url)
    try:
        async with Measurement.open(redis, run, policy, settings, Path("unused")) as learner:
            with fleet(run, redis_url, replicas) as members:
                await learner.await_replicas(replicas)
                return await _measured(learner, members, policy, repeats, raw_bytes)
    finally:
        await redis.aclose()


async def _measured(
    learner: Measurement, members: list[Replica], policy: Policy, repeats: int, raw_bytes: int
) -> list[Publication]:
    raw = await asyncio.to_thread(RawGloo, members, policy.memory[: raw_bytes // 4])
    found, before = [], await asyncio.to_thread(raw.per_s)
    for version in range(repeats + 1):
        seconds = await learner.publish(version)
        for member in members:
            member.tell("facts")
        facts = [await asyncio.to_thread(member.answer) for member in members]
        if any((fact["version"], fact["sum"]) != (version, policy.sum) for fact in facts):
            raise RuntimeError(f"a replica does not hold version {version} as it was published")
        after = await asyncio.to_thread(raw.per_s)
        checksum_s = max(fact["checksum_s"] for fact in facts)
        found.append(Publication(policy.size, **seconds, checksum_s=checksum_s, raw_per_s=fmean((before, after))))
        before = after
    return found
