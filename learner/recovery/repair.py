"""Owns bringing archived batches back that are damaged or gone, from Redis, which keeps what no checkpoint covers yet.

Must not train, nor touch a batch that the archive holds whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from learner.archive import RunArchive
from learner.recovery.start import trained_payloads
from learner.training.minibatches import masked
from services.contracts import Batch
from services.streams.connection.client import Redis
from services.streams.delivery.payloads import SamplePayload, fetch
from services.streams.keys import RunKeys
from services.streams.state.policy_history import published_batches


async def repair(redis: Redis, keys: RunKeys, archive: RunArchive, steps: Collection[int]) -> list[int]:
    """Archive the batches of these committed steps anew, as one rank's share; the steps of those that Redis still has.

    A payload that is damaged in Redis was so when the batch was trained, and is left out as it was then.
    """
    repaired = []
    for batch in await published_batches(redis, keys, steps):
        whole, damaged = await fetch(redis, trained_payloads(batch))
        await asyncio.to_thread(_archive, archive, masked(batch, damaged.keys()), whole)
        repaired.append(batch.step)
    return repaired


def _archive(archive: RunArchive, batch: Batch, payloads: dict[str, SamplePayload]) -> None:
    archive.forget_batch(batch.step)
    archive.write_share(batch, 0, payloads)
    archive.write_batch(batch)
