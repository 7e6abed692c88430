"""Owns the receiving side of a weight broadcast: a thread receives buckets into staging buffers and verifies them.

Must not touch a model: weights are passed on only when all of them have arrived and are verified.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from socket import AF_UNIX, SOCK_DGRAM, socket
from typing import Any, Literal

import torch

from rollout.channel import Channel
from services.contracts import TensorEntry, WeightManifest, WeightPlan
from services.contracts.weight_layout import bucket_layout, checksum, empty_bucket

log = logging.getLogger(__name__)

Phase = Literal["receiving", "staged", "failed"]


class BrokenBroadcastError(RuntimeError):
    """The received weights differ from those that were sent, or the staging was abandoned."""


@dataclass(frozen=True)
class StagingProgress:
    """The progress of a staging; `seconds` from its start to its end."""

    phase: Phase
    detail: str = ""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain data that can cross a process boundary."""
        return asdict(self)


def checksum_of(bucket: torch.Tensor) -> int:
    """The checksum of a bucket (uint8 [a multiple of 16]) on any device."""
    if bucket.device.type == "cpu":
        return checksum(bucket.numpy())
    return int(bucket.view(torch.int64).sum())


def _views(bucket: tuple[TensorEntry, ...], buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for entry, offset in zip(bucket, bucket_layout(bucket).offsets, strict=True):
        dtype: torch.dtype = getattr(torch, entry.dtype)
        end = offset + math.prod(entry.shape) * dtype.itemsize
        yield entry.name, buffer[offset:end].view(dtype).view(entry.shape)


@dataclass(frozen=True)
class StagingOptions:
    """How a worker receives: its rank in the broadcast group, backend and device.

    `on_host` moves each bucket to the host's memory as soon as it has arrived; from a CPU it need not. `listener`: the
    address of the Unix socket that gets a datagram when the staging has ended; "": none.
    """

    rank: int
    backend: str
    device: torch.device
    on_host: bool = False
    listener: str = ""


class Staging:
    """One attempt to receive one version. The group is kept in `channel` for the next plan of its generation."""

    def __init__(
        self,
        options: StagingOptions,
        plan: WeightPlan,
        manifest: WeightManifest,
        channel: Channel | None,
        memory: Sequence[torch.Tensor] = (),
    ) -> None:
        """Start receiving, through `channel` where that is a formed group, into `memory` where its buckets fit."""
        self.plan = plan
        self.progress = StagingProgress("receiving")
        # It exists before it is formed, so that `abandon` reaches it at any moment.
        self.channel: Channel | None = channel or Channel(
            options.backend, plan.generation, options.rank, plan.world, plan.timeout_s, options.device
        )
        self._joined = channel is not None
        self._options = options
        self._manifest = manifest
        self._memory = list(memory)
        self._buffers: list[torch.Tensor] = []
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, name="weight-staging", daemon=True)
        self._thread.start()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The policy's tensors by Hugging Face name, in manifest order: views into the staging buffers."""
        for bucket, buffer in zip(self._manifest.buckets, self._buffers, strict=True):
            yield from _views(bucket, buffer)

    def abandon(self) -> None:
        """Stop receiving and drop the buffers, at once; this also breaks the group for its other members."""
        self._abandoned = True
        channel = self.channel
        if self.progress.phase == "receiving" and channel is not None:
            channel.abort()
            self.channel = None
        self._buffers = []

    def spare_memory(self) -> list[torch.Tensor]:
        """The host's memory that this staging received into, for the next one; none unless it was received whole."""
        return self._memory if self.progress.phase == "staged" else []

    @classmethod
    def after(
        cls, previous: Staging | None, options: StagingOptions, plan: WeightPlan, manifest: WeightManifest
    ) -> Staging:
        """Start to receive `plan`: abandon an unfinished staging, reuse a group of the same generation.

        Also reuse the host's memory that a finished one received into: new memory would be mapped page by page while
        the bytes wait. Into that of an unfinished one the backend may still write.
        """
        channel = None
        memory: list[torch.Tensor] = []
        if previous is not None:
            previous.abandon()
            channel, memory = previous.channel, previous.spare_memory()
        if channel is not None and (channel.generation, channel.world) != (plan.generation, plan.world):
            channel.abort()
            channel = None
        return cls(options, plan, manifest, channel, memory)

    def _run(self) -> None:
        started = time.monotonic()
        try:
            channel = self.channel
            if channel is None:
                raise BrokenBroadcastError("abandoned for a newer plan")
            try:
                self._buffers = self._receive(channel)
            except BaseException:
                self.channel = None
                channel.abort()
                raise
            outcome = StagingProgress("staged", seconds=time.monotonic() - started)
        except Exception as error:  # noqa: BLE001 - the service has to see every failure
            outcome = StagingProgress("failed", f"{type(error).__name__}: {error}", time.monotonic() - started)
        self.progress = outcome
        if self._options.listener:
            # A listener that has gone away looks at the progress by itself, or does not need it any more.
            with suppress(OSError), socket(AF_UNIX, SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.sendto(b"", self._options.listener)

    def _receive(self, channel: Channel) -> list[torch.Tensor]:
        """The buckets, verified. Raises RuntimeError (BrokenBroadcastError is one)."""
        device = self._options.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # it is a property of the thread
        if not self._joined:
            channel.join(self.plan.host, self.plan.port)
        buffers: list[torch.Tensor] = []
        sums: list[int] = []

        def receive(tensor: torch.Tensor) -> None:
            """Receive, and meanwhile check the bucket before."""
            self._still_wanted()
            work = channel.begin(tensor)
            sums.extend(checksum_of(buffer) for buffer in buffers[len(sums) :])
            channel.finish(work)

        sizes, on_host = [bucket_layout(bucket).size for bucket in self._manifest.buckets], device.type == "cpu"
        if (on_host or self._options.on_host) and sizes != [buffer.numel() for buffer in self._memory]:
            self._memory = [torch.from_numpy(empty_bucket(size)) for size in sizes]
        for number, size in enumerate(sizes):
            arriving = self._memory[number] if on_host else torch.empty(size, dtype=torch.uint8, device=device)
            receive(arriving)
            moves = self._options.on_host and not on_host
            buffers.append(self._memory[number].copy_(arriving) if moves else arriving)
        expected = torch.empty(len(buffers), dtype=torch.int64, device=device)
        receive(expected)
        if wrong := [index for index, sent in enumerate(expected.tolist()) if sums[index] != sent]:
            raise BrokenBroadcastError(
                f"version {self.plan.version}: checksums of buckets {wrong} do not match those sent"
            )
        self._still_wanted()
        return buffers

    def _still_wanted(self) -> None:
        if self._abandoned:
            raise BrokenBroadcastError("abandoned for a newer plan")
