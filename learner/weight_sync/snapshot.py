"""Owns the snapshot of a policy version: flat buckets on the CPU, to be broadcast, checked and exported.

Must not communicate with any process except the learner ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.training.trainer import Trainer
from services.contracts import TensorEntry, WeightManifest
from services.contracts.weight_layout import bucket_layout, checksum, cut_buckets, empty_bucket, tensor_bytes

MIB = 1 << 20


class BucketSums(NamedTuple):
    """A bucket's checksum, and its sum read as int32, accumulated in int64, of which the digest is made."""

    words: int
    halves: int


def sums_of(bucket: NDArray[np.uint8]) -> BucketSums:
    """The sums of a bucket (uint8 [a multiple of 16]); other threads run meanwhile."""
    return BucketSums(checksum(bucket), int(bucket.view(np.int32).sum(dtype=np.int64)))


@dataclass(frozen=True)
class Snapshot:
    """The weights of policy `version`. They never change, so they can be sent while training continues.

    buckets: uint8 [bucket bytes] each, in the order and layout of the manifest.
    checksums: int64 [buckets], with which a receiver checks each bucket (`services.contracts.weight_layout`).
    digest: the fingerprint of the weights, which a run's records keep: the first 32 hexadecimal digits of the SHA-256
    of the buckets' `BucketSums.halves` as int64.
    """

    version: int
    manifest: WeightManifest
    buckets: tuple[Tensor, ...]
    checksums: Tensor
    digest: str

    @classmethod
    def of(
        cls, version: int, manifest: WeightManifest, buckets: Sequence[Tensor], sums: Sequence[BucketSums]
    ) -> Snapshot:
        """The snapshot of `buckets` with their `sums`. These take long for a large policy, so not here."""
        checksums = torch.tensor([each.words for each in sums], dtype=torch.int64)
        digest = hashlib.sha256(np.array([each.halves for each in sums], np.int64).tobytes()).hexdigest()[:32]
        return cls(version, manifest, tuple(buckets), checksums, digest)

    def numbered(self, version: int) -> Snapshot:
        """The same weights as policy `version`."""
        return replace(self, version=version)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) in the order of the manifest. The tensors are views of the buckets."""
        for entries, bucket in zip(self.manifest.buckets, self.buckets, strict=True):
            yield from ((entry.name, view) for entry, view in zip(entries, _views(entries, bucket), strict=True))


def _views(entries: tuple[TensorEntry, ...], bucket: Tensor) -> list[Tensor]:
    offsets = bucket_layout(entries).offsets
    return [
        bucket[offset : offset + tensor_bytes(entry)].view(getattr(torch, entry.dtype)).view(entry.shape)
        for entry, offset in zip(entries, offsets, strict=True)
    ]


def _clear_padding(entries: tuple[TensorEntry, ...], bucket: Tensor) -> None:
    layout = bucket_layout(entries)
    for entry, offset, end in zip(entries, layout.offsets, (*layout.offsets[1:], layout.size), strict=True):
        if (filled := offset + tensor_bytes(entry)) < end:
            bucket[filled:end] = 0


def _named(trainer: Trainer) -> dict[str, Any]:
    # named_parameters() lists a tied tensor once, by its first name.
    return dict(trainer.causal_lm.named_parameters())


def make_manifest(trainer: Trainer, bucket_mib: int) -> WeightManifest:
    """List the tensors of the policy in model order, without tied duplicates, in buckets of about `bucket_mib` MiB."""
    entries = [
        TensorEntry(
            name=name,
            # At ZeRO stage 3 the parameter itself is empty. Its real shape is ds_shape.
            shape=tuple(getattr(parameter, "ds_shape", parameter.shape)),
            dtype=str(parameter.dtype).removeprefix("torch."),
        )
        for name, parameter in _named(trainer).items()
    ]
    return WeightManifest(buckets=cut_buckets(entries, bucket_mib * MIB))


def take_snapshot(trainer: Trainer, manifest: WeightManifest, version: int, *, keep: bool) -> Snapshot | None:
    """Copy the policy, bucket by bucket, and sum it. Collective. Blocks for seconds per 10 GB.

    Returns None on ranks without `keep`, which hold no copy.
    """
    named = _named(trainer)
    buckets: list[Tensor] = []
    sums: list[Future[BucketSums]] = []
    # A bucket is summed while the next one is copied. All of them are kept in any case, so none waits for its sum.
    with ThreadPoolExecutor(1, thread_name_prefix="checksums") as summing:
        for entries in manifest.buckets:
            parameters = [named[entry.name] for entry in entries]
            with trainer.gathered(parameters):
                if keep:
                    bucket = torch.from_numpy(empty_bucket(bucket_layout(entries).size))
                    _clear_padding(entries, bucket)
                    for view, parameter in zip(_views(entries, bucket), parameters, strict=True):
                        view.copy_(parameter.detach())
                    buckets.append(bucket)
                    sums.append(summing.submit(sums_of, bucket.numpy()))
    return Snapshot.of(version, manifest, buckets, [found.result() for found in sums]) if keep else None
