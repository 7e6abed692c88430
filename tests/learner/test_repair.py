"""Damaged or missing archived batches are repaired from Redis, which keeps them until a checkpoint covers them."""

from pathlib import Path
from typing import Any

import pytest

from learner.archive import RunArchive
from learner.recovery.repair import repair_batches
from learner.recovery.start import archived_payloads
from services.streams.delivery.payloads import fetch
from services.streams.keys import RunKeys
from tests.services.driven import DrivenRun, batch_of


@pytest.fixture
def archive(tmp_path: Path) -> RunArchive:
    made = RunArchive(tmp_path / "run")
    made.prepare()
    return made


async def test_batches_that_redis_still_has_are_archived_again(redis: Any, run_id: str, archive: RunArchive) -> None:
    keys = RunKeys(run_id)
    run = await DrivenRun.open(redis, keys)
    covered, *logged = [await run.trained(step, f"g{step}", f"h{step}") for step in (1, 2, 3)]
    await run.learner.cover_batch(covered)
    await run.batched(4, "g4")  # not trained yet, so it does not belong in the archive
    damaged = keys.payload("g3", 1)
    await redis.hset(damaged, "response_ids", b"?")
    # An entry that the sampler did not publish.
    await run.append(keys.batches, batch_of(keys, 2, ["g3"]))
    for rank in range(2):
        archive.write_share(logged[0].batch, rank, {})
    archive.batch_path(3).write_text("{")

    assert await repair_batches(redis, keys, archive, [1, 2, 3, 4]) == [2, 3]
    assert archive.batch(2) == logged[0].batch
    assert [path.name for path in archive.share_path(2, 0).parent.glob("*2.rank*")] == ["step-000002.rank-0.parquet"]
    assert [group.group for group in archive.batch(3).groups] == ["g3", "h3"]
    masks = {sample.payload: sample.masked for group in archive.batch(3).groups for sample in group.samples}
    assert [key for key, mask in masks.items() if mask] == [damaged]
    for step in (2, 3):
        found = archived_payloads(archive, archive.batch(step))
        whole, _ = await fetch(redis, list(found))
        assert found.keys() == whole.keys()
        assert all((found[key].response_ids == whole[key].response_ids).all() for key in found)
    assert len(found) == 3
