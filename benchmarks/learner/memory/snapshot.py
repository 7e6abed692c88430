"""Owns the benchmark of a large policy's snapshot: how long rank 0's event loop stands still while it is published.

Must not train. The policy's layers are views of one tensor, so that only the snapshot takes memory. Run it as
`python -m benchmarks.learner.memory.snapshot --gb 20`; it needs that much free memory, and about a second per GB.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deploy.local.valkey import EmbeddedValkey
from learner.coordinator.publication import Publication
from learner.rank.worker import RankWorker
from learner.weight_sync import snapshot
from learner.weight_sync.publisher import Publisher
from learner.weight_sync.snapshot import BucketSums
from services.contracts import ProcessInfo
from services.process.hosting import Context
from services.settings import load_recipe
from services.streams.connection.client import Redis, connect
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog
from services.streams.state.heartbeat import Heartbeat
from services.streams.state.policy_history import History
from services.streams.state.runs import RunRecords
from services.waits import Waits

RECIPE = load_recipe(Path(__file__).parents[3] / "deploy/recipes/qwen2.5-32b-dapo.yaml")
GB = 10**9
ROWS, COLUMNS = 27_648, 5_120
"""The largest matrix of a layer of that recipe's model."""
TICK_S = 0.01


class Policy:
    """Layers in bfloat16 of `layer_bytes` each, in place of a trainer."""

    def __init__(self, size: int, layer_bytes: int = 2 * ROWS * COLUMNS) -> None:
        rows = max(1, layer_bytes // (2 * COLUMNS))
        layer = torch.randn(COLUMNS).to(torch.bfloat16).repeat(rows, 1)
        self._layers = [layer.view(rows, COLUMNS) for _ in range(max(1, round(size / (2 * rows * COLUMNS))))]

    @property
    def causal_lm(self) -> Policy:
        """The model, of which a snapshot reads names and parameters."""
        return self

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The layers."""
        return ((f"layers.{number}.weight", layer) for number, layer in enumerate(self._layers))

    @contextmanager
    def gathered(self, parameters: list[Any]) -> Iterator[None]:
        """They are whole."""
        yield


@dataclass
class Sums:
    """When and where checksums were computed: the threads' names, and seconds in them; see `watched`."""

    threads: list[str] = field(default_factory=list)
    seconds: float = 0.0
    last_started: float = 0.0
    """When the last of them started, by `time.monotonic`: about then its bucket, the last one, was copied."""


@contextmanager
def watched() -> Iterator[Sums]:
    """Watch the checksums of snapshots during the body."""
    sums, original = Sums(), snapshot.sums_of

    def sums_of(bucket: NDArray[np.uint8]) -> BucketSums:
        started = sums.last_started = time.monotonic()
        found = original(bucket)
        sums.threads.append(threading.current_thread().name)
        sums.seconds += time.monotonic() - started
        return found

    snapshot.sums_of = sums_of
    try:
        yield sums
    finally:
        snapshot.sums_of = original


@dataclass
class Pulse:
    """The longest time, in seconds, between two turns of the event loop; see `beating`."""

    longest_s: float = 0.0


@asynccontextmanager
async def beating() -> AsyncIterator[Pulse]:
    """Let a task run every TICK_S beside the body."""
    pulse = Pulse()

    async def beat() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            pulse.longest_s, last = max(pulse.longest_s, now - last), now

    task = asyncio.create_task(beat())
    try:
        yield pulse
        await asyncio.sleep(2 * TICK_S)
    finally:
        task.cancel()


@asynccontextmanager
async def rank_zero(redis: Redis, run: str, policy: Policy, bucket_mib: int) -> AsyncIterator[Publication]:
    """What rank 0 of a run's learner publishes with; the run has no replicas."""
    record, keys = await RunRecords(redis).create(run, RECIPE), RunKeys(run)
    event_log, waits = EventLog(redis, keys, "learner"), Waits()
    info = ProcessInfo(id="learner-0", service="learner", run=run, host="127.0.0.1", pid=0, metrics="127.0.0.1:0")
    async with Heartbeat(redis, info, waits, event_log) as heartbeat:
        context = Context(redis, keys, record, heartbeat, event_log, asyncio.Event(), "127.0.0.1", waits)
        worker = RankWorker(context, 0, 1, ("127.0.0.1", 0))
        worker._rank.trainer = policy  # type: ignore[assignment]
        worker.manifest = snapshot.make_manifest(policy, bucket_mib)  # type: ignore[arg-type]
        history = await History.fenced(redis, keys, "learner", info.id)
        weights = RECIPE.weights.model_copy(update={"backend": "gloo"})
        publisher = Publisher(redis, keys, event_log, weights, "127.0.0.1", history)
        await publisher.open(worker.manifest)
        try:
            yield Publication(context, worker, history, publisher)
        finally:
            await publisher.close()
            worker._rank.close()


@dataclass
class Figures:
    """What a publication took, in seconds; `overlapped`: the share of the summing that ran beside the copying."""

    snapshot_s: float
    copy_s: float
    sums: Sums
    publish_s: float
    pulse: Pulse

    @property
    def overlapped(self) -> float:
        """Between 0 and 1."""
        return max(0.0, min(1.0, 1 - (self.snapshot_s - self.copy_s) / max(self.sums.seconds, 1e-9)))


async def publish_once(redis: Redis, run: str, policy: Policy, bucket_mib: int) -> Figures:
    """Copy the policy, commit and publish it, as rank 0 does at its start, beside a heartbeat."""
    async with rank_zero(redis, run, policy, bucket_mib) as publication:
        with watched() as sums:
            async with beating() as pulse:
                started = time.monotonic()
                await publication.take_snapshot()
                snapshot_s = time.monotonic() - started
                publish_s = await publication.publish(await publication.commit_start(0))
        return Figures(snapshot_s, sums.last_started - started, sums, publish_s, pulse)


async def measure(folder: Path, size: int, bucket_mib: int) -> None:
    """Print the figures for a policy of `size` bytes."""
    server = EmbeddedValkey(folder / "valkey")
    redis = await connect(server.start())
    try:
        found = await publish_once(redis, "snapshot", Policy(size), bucket_mib)
    finally:
        await redis.aclose()
        server.stop()
    print(f"{size / GB:g} GB in {len(found.sums.threads)} buckets of about {bucket_mib} MiB")
    print(f"snapshot: {found.snapshot_s:.1f} s; of these, {found.copy_s:.1f} s until the last bucket was copied")
    print(f"checksums: {found.sums.seconds:.1f} s, {found.overlapped:.0%} of it beside the copy")
    print(f"published to a fleet without replicas in {found.publish_s:.2f} s")
    print(f"longest gap of the event loop: {found.pulse.longest_s:.3f} s")


def main() -> None:
    """Measure on an embedded server."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("--gb", type=float, default=20.0, help="size of the policy's weights, in 10^9 bytes")
    parser.add_argument("--bucket-mib", type=int, default=RECIPE.weights.bucket_mib)
    parser.add_argument("--threads", type=int, default=RECIPE.learner.threads, help="that copy")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder), round(options.gb * GB), options.bucket_mib))


if __name__ == "__main__":
    main()
