"""A snapshot is summed beside its copy, never on the event loop; its digest is that of earlier releases."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from benchmarks.learner.memory.snapshot import Policy, publish_once, watched
from learner.weight_sync.snapshot import make_manifest, take_snapshot
from services.contracts import parse_manifest

MIB = 1 << 20


def policy() -> Policy:
    return Policy(12 * MIB, layer_bytes=MIB)


def test_checksums_and_digest_are_those_of_the_buckets() -> None:
    found = take_snapshot(policy(), make_manifest(policy(), 4), 7, keep=True)  # type: ignore[arg-type]
    assert found is not None
    sums = torch.stack([bucket.view(torch.int32).sum(dtype=torch.int64) for bucket in found.buckets])
    assert len(sums) > 2
    assert torch.equal(found.checksums, sums)
    assert found.digest == hashlib.sha256(sums.numpy().tobytes()).hexdigest()[:32]
    again = found.numbered(8)
    assert (again.version, again.digest) == (8, found.digest)


def test_a_rank_that_keeps_no_copy_sums_nothing() -> None:
    with watched() as sums:
        assert take_snapshot(policy(), make_manifest(policy(), 4), 7, keep=False) is None  # type: ignore[arg-type]
    assert sums.threads == []


async def test_no_bucket_is_summed_on_the_event_loop(redis: Any, run_id: str) -> None:
    found = await publish_once(redis, run_id, policy(), bucket_mib=4)
    assert len(found.sums.threads) > 2, "each bucket is summed once"
    assert {name.partition("_")[0] for name in found.sums.threads} == {"checksums"}
    assert found.pulse.longest_s > 0


def test_a_manifest_is_parsed_once_for_all_versions() -> None:
    text = make_manifest(policy(), 4).model_dump_json()  # type: ignore[arg-type]
    assert parse_manifest(text) is parse_manifest(str(text))
