"""Owns a replica that follows the weight protocol with torch only, without an engine.

Must not be used outside tests. Run as a program, it is a separate process, which may die during a broadcast.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from services.contracts import ProcessInfo, WeightAck, WeightManifest, WeightPlan
from services.contracts.weight_group import Membership
from services.contracts.weight_layout import bucket_layout, tensor_bytes
from services.streams.connection.client import connect
from services.streams.delivery.consumer import tail
from services.streams.keys import RunKeys
from services.streams.state.heartbeat import Heartbeat


class Receiver:
    """Follows plans that name it. `weights` has the tensors of `version`; `plans`, the plans that it read."""

    def __init__(self, redis: Any, run: str, name: str, die_after_buckets: int | None = None) -> None:
        self._redis = redis
        self._keys = RunKeys(run)
        self._die_after = die_after_buckets
        self._groups: dict[int, Any] = {}
        self.info = ProcessInfo(
            id=name,
            service="rollout",
            run=run,
            host="127.0.0.1",
            pid=os.getpid(),
            metrics="127.0.0.1:0",
            state="joining",
            started_at=float(os.getpid()),
        )
        self.weights: dict[str, torch.Tensor] = {}
        self.version: int | None = None
        self.received = asyncio.Event()
        self.plans: list[WeightPlan] = []
        self.failures: list[str] = []

    async def run(self) -> None:
        """Serve until cancelled."""
        after = "0-0"
        async with Heartbeat(self._redis, self.info) as heartbeat:
            while True:
                entries = await tail(self._redis, self._keys.weight_plans, after, block_s=0.5)
                if not entries:
                    continue
                after = entries[-1][0]
                plan = WeightPlan.model_validate_json(entries[-1][1])
                if self.info.id in plan.members:
                    await self._follow(plan, heartbeat)

    async def _follow(self, plan: WeightPlan, heartbeat: Heartbeat) -> None:
        self.plans.append(plan)
        manifest = WeightManifest.model_validate_json(await self._redis.get(self._keys.manifest))
        try:
            self.weights = await asyncio.to_thread(self._receive, plan, manifest)
        except RuntimeError as error:
            self.failures.append(str(error))
            await self._ack(plan, "failed", str(error))
            return
        self.version = plan.version
        self.received.set()
        await heartbeat.update(state="ready", version=plan.version)
        await self._ack(plan, "applied")

    async def _ack(self, plan: WeightPlan, phase: Any, detail: str = "") -> None:
        ack = WeightAck(
            member=self.info.id, generation=plan.generation, version=plan.version, phase=phase, detail=detail
        )
        await self._redis.xadd(self._keys.weight_acks, {"m": ack.model_dump_json()})

    def _receive(self, plan: WeightPlan, manifest: WeightManifest) -> dict[str, torch.Tensor]:
        group = self._group(plan)
        found = {}
        sums = []
        for number, entries in enumerate(manifest.buckets, start=1):
            layout = bucket_layout(entries)
            bucket = torch.empty(layout.size, dtype=torch.uint8)
            group.broadcast(bucket, 0).wait()
            if number == self._die_after:
                os.kill(os.getpid(), signal.SIGKILL)
            sums.append(bucket.view(torch.int64).sum())
            for entry, offset in zip(entries, layout.offsets, strict=True):
                raw = bucket[offset : offset + tensor_bytes(entry)]
                found[entry.name] = raw.view(getattr(torch, entry.dtype)).view(entry.shape)
        expected = torch.empty(len(sums), dtype=torch.int64)
        group.broadcast(expected, 0).wait()
        if not torch.equal(expected, torch.stack(sums)):
            raise RuntimeError("checksum mismatch")
        return found

    def _group(self, plan: WeightPlan) -> Any:
        if plan.generation not in self._groups:
            timeout = timedelta(seconds=plan.timeout_s)
            store = TCPStore(plan.host, plan.port, is_master=False, wait_for_workers=False, timeout=timeout)
            prefixed = PrefixStore(f"gen{plan.generation}", store)
            rank = plan.members[self.info.id]
            Membership[Any](rank, plan.world, plan.timeout_s, lambda _: None).meet(prefixed)
            self._groups = {plan.generation: ProcessGroupGloo(prefixed, rank, plan.world, timeout)}
        return self._groups[plan.generation]


async def main(url: str, run: str, name: str, die_after_buckets: str) -> None:
    redis = await connect(url)
    await Receiver(redis, run, name, int(die_after_buckets)).run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
