"""A snapshot is summed beside its copy, never on the event loop; its digest is that of earlier releases."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.learner.memory.snapshot import Policy, publish_once, watched
from learner.weight_sync import snapshot
from learner.weight_sync.snapshot import make_manifest, take_snapshot
from services.contracts import parse_manifest

MIB = 1 << 20


def policy() -> Policy:
    return Policy(12 * MIB, layer_bytes=MIB)


def test_checksums_and_digest_are_those_of_the_buckets() -> None:
    found = take_snapshot(policy(), make_manifest(policy(), 4), 7, keep=True)  # type: ignore[arg-type]
    assert found is not None
    assert len(found.buckets) > 2
    assert torch.equal(found.checksums, torch.stack([bucket.view(torch.int64).sum() for bucket in found.buckets]))
    halves = torch.stack([bucket.view(torch.int32).sum(dtype=torch.int64) for bucket in found.buckets])
    assert found.digest == hashlib.sha256(halves.numpy().tobytes()).hexdigest()[:32]
    again = found.numbered(8)
    assert (again.version, again.digest) == (8, found.digest)


def test_padding_is_zero_in_used_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the digest of equal weights would differ."""
    monkeypatch.setattr(snapshot, "empty_bucket", lambda size: np.full(size, 7, np.uint8))
    odd = torch.arange(3, dtype=torch.float32)
    named = SimpleNamespace(named_parameters=lambda: [("a", odd), ("b", odd)])
    trainer: Any = SimpleNamespace(causal_lm=named, gathered=lambda _: nullcontext())
    found = take_snapshot(trainer, make_manifest(trainer, 1), 0, keep=True)
    assert found is not None
    assert found.buckets[0].view(torch.float32).tolist() == [0, 1, 2, 0, 0, 1, 2, 0]


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
