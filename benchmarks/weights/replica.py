"""Owns a replica without a model: the real follower and staging around a stub engine, which keeps what it received.

Must not measure. It answers commands on its standard input, one JSON object per line; see `Commands`.
Run as `python -m benchmarks.weights.replica --run ID --redis URL`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from math import prod
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.weights.policies import flat, sum_of
from benchmarks.weights.raw import TIMEOUT, RawGroup
from rollout import staging
from rollout.staging import Staging, StagingOptions
from rollout.weight_sync import WeightFollower
from services.contracts import WeightManifest, WeightPlan, parse_manifest
from services.process.hosting import Context
from services.streams.connection.client import connect
from services.waits import cancel_and_wait
from tests.harness.small_run import service_context
from tests.harness.stubs.engine import Answers, StubEngine

CPU = torch.device("cpu")


class StagingEngine(StubEngine):
    """The stub engine of the harness, with a worker's real staging.

    memory: float32 [n], all parameters that it serves, one after the other.
    """

    def __init__(self, manifest: WeightManifest) -> None:
        super().__init__(Answers())
        entries = [entry for bucket in manifest.buckets for entry in bucket]
        self.memory, self._places = flat([prod(entry.shape) for entry in entries])
        self._staging: Staging | None = None

    async def call_workers(self, method: str, *args: Any, deadline_s: float = 0.0) -> list[Any]:
        """What a worker does (rollout.vllm_worker.WorkerExtension)."""
        if method == "stage_weights":
            plan, manifest, rank, backend, on_host, listener = args
            options = StagingOptions(rank, backend, CPU, on_host, listener)
            self._staging = Staging.after(
                self._staging, options, WeightPlan.model_validate_json(plan), parse_manifest(manifest)
            )
            return [None]
        assert self._staging is not None
        if method == "abandon_staging":
            self._staging.abandon()
            return [None]
        return [self._staging.progress.as_dict()]

    async def apply_staged(self, version: int, deadline_s: float) -> None:
        """Copy the version into the parameters, as an engine does that has no other layout."""
        assert self._staging is not None
        for place, (_, tensor) in zip(self._places, self._staging.tensors(), strict=True):
            place.copy_(tensor.view(-1))
        self._staging.abandon()
        self.version = version


class Commands:
    """What a replica is told by its standard input, each with one line as the answer.

    {"do": "join", ...}: join a RawGroup, with the first parameters as its tensor. {"do": "broadcast"}: receive it once.
    {"do": "facts"}: version, sum of the parameters, seconds of checksums since the last call.
    """

    def __init__(self, engine: StagingEngine) -> None:
        self._engine = engine
        self._raw: RawGroup | None = None
        self._checksum_s = 0.0
        checksum_of = staging.checksum_of

        def timed(bucket: torch.Tensor) -> int:
            started = time.perf_counter()
            found = checksum_of(bucket)
            self._checksum_s += time.perf_counter() - started
            return found

        staging.checksum_of = timed

    def answer(self, do: str, rank: int = 0, world: int = 0, elements: int = 0, port: int = 0) -> dict[str, Any]:
        """Carry out one command. Blocks."""
        if do == "join":
            store = TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
            self._raw = RawGroup(store, rank, world, self._engine.memory[:elements])
            return {}
        if do == "broadcast":
            assert self._raw is not None
            self._raw.broadcast()
            return {}
        spent, self._checksum_s = self._checksum_s, 0.0
        return {"version": self._engine.version, "sum": sum_of(self._engine.memory), "checksum_s": spent}


async def host(run: str, redis_url: str) -> None:
    """Follow the run's plans until the standard input ends."""
    redis = await connect(redis_url)
    async with service_context(redis, run, {}, "rollout") as context:
        manifest = await redis.get(context.keys.manifest)
        assert manifest is not None, "the learner stores it before it starts replicas"
        engine = StagingEngine(parse_manifest(manifest.decode()))
        commands = Commands(engine)
        await context.heartbeat.update(state="joining")
        following = asyncio.create_task(_follow(context, engine))
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await asyncio.to_thread(commands.answer, **json.loads(line))), flush=True)
        await cancel_and_wait(following)
    await redis.aclose()


async def _follow(context: Context, engine: Any) -> None:
    await WeightFollower(context, engine).run()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights.replica")
    parser.add_argument("--run", required=True)
    parser.add_argument("--redis", required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    asyncio.run(host(given.run, given.redis))
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads outlive the group


if __name__ == "__main__":
    main()
