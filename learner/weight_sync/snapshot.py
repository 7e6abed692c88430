"""Owns a policy version at rest: flat buckets on the CPU, fit to be broadcast, checked and exported.

Must not talk to anybody but the learner's own ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from learner.training.trainer import Trainer
from services.contracts import TensorEntry, WeightManifest
from services.contracts.weight_layout import bucket_layout, cut_buckets, tensor_bytes

MIB = 1 << 20


@dataclass(frozen=True)
class Snapshot:
    """Policy `version` as it was; never written to again, so it may be sent while training goes on.

    buckets: one uint8 [bucket bytes] each, in the manifest's order and layout.
    """

    version: int
    manifest: WeightManifest
    buckets: tuple[Tensor, ...]

    @cached_property
    def checksums(self) -> Tensor:
        """int64 [buckets]: each bucket's sum as int32, accumulated in int64."""
        return torch.stack([bucket.view(torch.int32).sum(dtype=torch.int64) for bucket in self.buckets])

    @cached_property
    def digest(self) -> str:
        """What tells these weights from others: SHA-256 of the checksums, as hexadecimal digits."""
        return hashlib.sha256(self.checksums.numpy().tobytes()).hexdigest()[:32]

    def numbered(self, version: int) -> Snapshot:
        """The same weights as policy `version`."""
        copy = replace(self, version=version)
        copy.__dict__["checksums"] = self.checksums  # what is cached of the weights holds for the copy
        return copy

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) in manifest order; views into the buckets."""
        for entries, bucket in zip(self.manifest.buckets, self.buckets, strict=True):
            yield from ((entry.name, view) for entry, view in zip(entries, _views(entries, bucket), strict=True))


def _views(entries: tuple[TensorEntry, ...], bucket: Tensor) -> list[Tensor]:
    offsets = bucket_layout(entries).offsets
    return [
        bucket[offset : offset + tensor_bytes(entry)].view(getattr(torch, entry.dtype)).view(entry.shape)
        for entry, offset in zip(entries, offsets, strict=True)
    ]


def _named(trainer: Trainer) -> dict[str, Any]:
    # named_parameters() names a tied tensor once, by its first use.
    return dict(trainer.causal_lm.named_parameters())


def make_manifest(trainer: Trainer, bucket_mib: int) -> WeightManifest:
    """The policy's tensors in model order, tied duplicates left out, cut into buckets of about `bucket_mib`."""
    entries = [
        # At ZeRO stage 3 the parameter itself is empty; ds_shape is what it stands for.
        TensorEntry(
            name=name, shape=tuple(getattr(one, "ds_shape", one.shape)), dtype=str(one.dtype).removeprefix("torch.")
        )
        for name, one in _named(trainer).items()
    ]
    return WeightManifest(buckets=cut_buckets(entries, bucket_mib * MIB))


def take_snapshot(trainer: Trainer, manifest: WeightManifest, version: int, *, keep: bool) -> Snapshot | None:
    """Copy the policy, bucket by bucket. Collective; only ranks that `keep` it hold a copy, others get None."""
    named = _named(trainer)
    buckets = []
    for entries in manifest.buckets:
        parameters = [named[entry.name] for entry in entries]
        with trainer.gathered(parameters):
            if keep:
                bucket = torch.zeros(bucket_layout(entries).size, dtype=torch.uint8)
                for view, parameter in zip(_views(entries, bucket), parameters, strict=True):
                    view.copy_(parameter.detach())
                buckets.append(bucket)
    return Snapshot(version, manifest, tuple(buckets)) if keep else None
