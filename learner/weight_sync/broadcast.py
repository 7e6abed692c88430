"""Owns the collective that sends weights: forming the group of learner and receivers, sending, and aborting.

Must not decide which replicas belong to a group, or how to handle a failure.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from learner.weight_sync.snapshot import Snapshot

log = logging.getLogger(__name__)


class BroadcastGroup(Protocol):
    """A formed group in which this process is rank 0. Every call blocks and raises RuntimeError on failure."""

    def send(self, tensor: Tensor) -> None:
        """Broadcast a CPU tensor. Blocks until it is sent, at most for the timeout of the group."""

    def abort(self) -> None:
        """Abandon the group without waiting for its members. Their pending receives fail."""


class GlooGroup:
    """Gloo over TCP, for learners on CPU."""

    def __init__(self, store: Store, world: int, timeout_s: float) -> None:
        self._group: Any = ProcessGroupGloo(store, 0, world, timedelta(seconds=timeout_s))

    def send(self, tensor: Tensor) -> None:
        self._group.broadcast(tensor, 0).wait()

    def abort(self) -> None:
        # Dropping the last reference closes the connections, so the receives of the members fail at once.
        self._group = None


class NcclGroup:
    """NCCL between GPUs, for clusters."""

    def __init__(self, store: Store, world: int, timeout_s: float) -> None:
        # Only CUDA builds of torch have it.
        from torch._C._distributed_c10d import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Any = ProcessGroupNCCL(store, 0, world, options)

    def send(self, tensor: Tensor) -> None:
        self._group.broadcast(tensor.to(self._device), 0).wait(self._timeout)
        torch.cuda.synchronize(self._device)

    def abort(self) -> None:
        # The group is never destroyed, because that is a collective and hangs after a failure.
        self._group.abort()


BACKENDS: dict[str, Callable[[Store, int, float], BroadcastGroup]] = {"gloo": GlooGroup, "nccl": NcclGroup}
"""The group classes by `weights.backend`."""


class Rendezvous:
    """The store at which groups are formed. This process serves it until it exits."""

    def __init__(self, host: str, backend: str, timeout_s: float) -> None:
        self.host = host
        self._timeout_s = timeout_s
        self._make = BACKENDS[backend]
        self._server = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))

    @property
    def port(self) -> int:
        """The port on which the store listens."""
        return int(self._server.port)

    def form(self, generation: int, world: int) -> BroadcastGroup:
        """Form a group with `world` - 1 receivers. Blocks at most for the timeout; raises RuntimeError."""
        timeout = timedelta(seconds=self._timeout_s)
        client = TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=timeout)
        return self._make(PrefixStore(f"gen{generation}", client), world, self._timeout_s)


def send_snapshot(group: BroadcastGroup, snapshot: Snapshot) -> float:
    """Send every bucket, then the checksums. Returns the seconds it took. Blocks; raises RuntimeError."""
    started = time.monotonic()
    for bucket in snapshot.buckets:
        group.send(bucket)
    group.send(snapshot.checksums)
    return time.monotonic() - started
