"""Owns the repair of damaged or missing archived batches from Redis, which keeps them until a checkpoint covers them.

Must not train, nor change a batch that the archive holds intact.
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


async def repair_batches(redis: Redis, keys: RunKeys, archive: RunArchive, steps: Collection[int]) -> list[int]:
    """Archive the batches of these committed steps again, each as the share of one rank.

    Returns the steps that Redis still holds. A payload that is damaged in Redis was already damaged when the batch was
    trained, so it is masked again.
    """
    repaired = []
    for batch in await published_batches(redis, keys, steps):
        intact, damaged = await fetch(redis, trained_payloads(batch))
        await asyncio.to_thread(_archive, archive, masked(batch, damaged.keys()), intact)
        repaired.append(batch.step)
    return repaired


def _archive(archive: RunArchive, batch: Batch, payloads: dict[str, SamplePayload]) -> None:
    archive.delete_batch(batch.step)
    archive.write_share(batch, 0, payloads)
    archive.write_batch(batch)
