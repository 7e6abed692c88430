"""Owns the learner's side of weight syncs for the rollout tests: store, groups, buckets, checksums, acks.

Must not be used outside tests.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from services.contracts import TensorEntry, WeightAck, WeightManifest, WeightPlan
from services.contracts.weight_group import Membership
from services.contracts.weight_layout import bucket_layout, cut_buckets
from services.process.hosting import Context
from services.streams.delivery.consumer import tail

HOST = "127.0.0.1"
BUCKET_BYTES = 200_000


def manifest_of(weights: Mapping[str, torch.Tensor]) -> WeightManifest:
    """Whole tensors in model order, cut into several buckets."""
    entries = [
        TensorEntry(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        for name, tensor in weights.items()
    ]
    return WeightManifest(buckets=cut_buckets(entries, BUCKET_BYTES))


def flatten(manifest: WeightManifest, weights: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """One uint8 tensor per bucket."""
    buffers = []
    for bucket in manifest.buckets:
        layout = bucket_layout(bucket)
        buffer = torch.zeros(layout.size, dtype=torch.uint8)
        for entry, offset in zip(bucket, layout.offsets, strict=True):
            raw = weights[entry.name].contiguous().view(-1).view(torch.uint8)
            buffer[offset : offset + raw.numel()] = raw
        buffers.append(buffer)
    return buffers


def checksums(buffers: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([int(buffer.view(torch.int64).sum()) for buffer in buffers])


def form(port: int, generation: int, world: int, timeout_s: float) -> Any:
    deadline = timedelta(seconds=timeout_s)
    store = TCPStore(HOST, port, is_master=False, timeout=deadline)
    prefixed = PrefixStore(f"gen{generation}", store)
    Membership[Any](0, world, timeout_s, lambda _: None).meet(prefixed)
    return dist.ProcessGroupGloo(prefixed, 0, world, deadline)


def broadcast(group: Any, tensor: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()


DYING = 3
"""The generation of the broadcast group whose sender dies."""


def send_one_bucket_and_die(port: int, bucket_bytes: int) -> None:
    """A learner's process, which also hosts the store; it dies in the middle of a broadcast."""
    store = TCPStore(HOST, port, is_master=True, wait_for_workers=False)
    group = form(port, DYING, 2, 60.0)
    broadcast(group, torch.zeros(bucket_bytes, dtype=torch.uint8))
    del store
    os._exit(9)


class Sender:
    """Acts as learner rank 0 for one replica."""

    def __init__(self, context: Context, member: str) -> None:
        self._context = context
        self._member = member
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._groups: dict[int, Any] = {}
        self._acks_read_to = "0-0"

    def plan(self, generation: int, version: int, timeout_s: float = 20.0, port: int | None = None) -> WeightPlan:
        return WeightPlan(
            generation=generation,
            version=version,
            host=HOST,
            port=port or self._store.port,
            world=2,
            members={self._member: 1},
            timeout_s=timeout_s,
        )

    async def announce(self, plan: WeightPlan, manifest: WeightManifest) -> None:
        await self._context.redis.set(self._context.keys.manifest, manifest.model_dump_json())
        await self._context.redis.xadd(self._context.keys.weight_plans, {"m": plan.model_dump_json()})

    async def send(self, plan: WeightPlan, weights: Mapping[str, torch.Tensor], corruption: int = 0) -> WeightAck:
        """Publish a version by the protocol and return its ack; `corruption` is added to the first checksum."""
        manifest = manifest_of(weights)
        await self.announce(plan, manifest)
        await asyncio.to_thread(self._transmit, plan, flatten(manifest, weights), corruption)
        return await self.ack()

    def _transmit(self, plan: WeightPlan, buffers: list[torch.Tensor], corruption: int) -> None:
        if plan.generation not in self._groups:
            self._groups = {plan.generation: form(plan.port, plan.generation, plan.world, plan.timeout_s)}
        sums = checksums(buffers)
        sums[0] += corruption
        for tensor in (*buffers, sums):
            broadcast(self._groups[plan.generation], tensor)

    async def ack(self, deadline_s: float = 40.0) -> WeightAck:
        """The next ack."""
        async with asyncio.timeout(deadline_s):
            while True:
                keys = self._context.keys
                for entry, body in await tail(self._context.redis, keys.weight_acks, self._acks_read_to, 1, 1.0):
                    self._acks_read_to = entry
                    return WeightAck.model_validate_json(body)
