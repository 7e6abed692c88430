"""Owns the collective that sends weights: forming the group of learner and receivers, sending, and aborting.

Must not decide which replicas belong to a group, or how to handle a failure.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from learner.training.process_group import served_store
from learner.weight_sync.snapshot import Snapshot
from services.contracts.listening import socket_environment
from services.contracts.weight_group import GlooTransfer, Membership, Work, without_watchdog

log = logging.getLogger(__name__)


class Sender(Protocol):
    """A backend's group in which this process is rank 0."""

    def broadcast(self, tensor: Tensor) -> Work:
        """Start to send a CPU tensor."""

    def close(self) -> None:
        """Leave the group. May block until the deadline of the transfer in progress."""


class GlooSender:
    """Gloo over TCP, for learners on CPU. The connections close with the last reference to the group."""

    def __init__(self, store: Store, world: int, timeout: timedelta, device: torch.device | None) -> None:
        self._group: Any = ProcessGroupGloo(store, 0, world, timeout)

    def broadcast(self, tensor: Tensor) -> Work:
        return GlooTransfer(self._group.broadcast(tensor, 0))

    def close(self) -> None:
        self._group = None


class NcclSender:
    """NCCL between GPUs, for clusters."""

    def __init__(self, store: Store, world: int, timeout: timedelta, device: torch.device | None) -> None:
        # Only CUDA builds of torch have it.
        from torch._C._distributed_c10d import ProcessGroupNCCL

        self._device = device or torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(self._device)
        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        # A blocking initialisation could not be aborted.
        options.config.blocking = 0
        with without_watchdog():
            group = ProcessGroupNCCL(store, 0, world, options)
        group.eager_connect_single_device(self._device)
        self._group: Any = group
        # It returns before the members are connected; the first transfer waits for that.
        self.broadcast(torch.zeros(1)).wait()

    def broadcast(self, tensor: Tensor) -> Work:
        torch.cuda.set_device(self._device)  # it is a property of the thread
        return self._group.broadcast(tensor.to(self._device), 0)  # type: ignore[no-any-return]

    def close(self) -> None:
        # The group is never destroyed, because that is a collective and hangs after a failure.
        self._group.abort()


BACKENDS: dict[str, Callable[[Store, int, timedelta, torch.device | None], Sender]] = {
    "gloo": GlooSender,
    "nccl": NcclSender,
}
"""The backends by `weights.backend`."""


class BroadcastGroup:
    """A group of this process, rank 0, and `world` - 1 receivers.

    `form` and `send` block, for at most the timeout, and raise RuntimeError; the group must not be used after that.
    """

    def __init__(self, world: int, timeout_s: float, connect: Callable[[Membership[Sender]], Sender]) -> None:
        self._membership = Membership[Sender](0, world, timeout_s, lambda group: group.close())
        self._connect = connect

    def form(self) -> None:
        """Form the group, when all receivers have joined."""
        self._membership.form(lambda: self._connect(self._membership))

    def send(self, tensor: Tensor) -> None:
        """Broadcast a CPU tensor."""
        self._membership.transfer(lambda group: group.broadcast(tensor))

    def abort(self) -> None:
        """Abandon the group, at any moment and from any thread; returns at once. The receivers fail."""
        self._membership.leave()


class Rendezvous:
    """The store at which groups are formed, on `host` alone. This process serves it until it exits.

    `host`: an address of this machine. `device`: from which NCCL sends.
    """

    def __init__(self, host: str, backend: str, timeout_s: float, device: torch.device | None = None) -> None:
        self.host = host
        self._timeout_s = timeout_s
        self._timeout = timedelta(seconds=timeout_s)
        self._backend = BACKENDS[backend]
        self._device = device
        os.environ.update(socket_environment(host))
        self._server = served_store(host, 0, self._timeout)

    @property
    def port(self) -> int:
        """The port on which the store listens."""
        return int(self._server.port)

    def group(self, generation: int, world: int) -> BroadcastGroup:
        """A group with `world` - 1 receivers, not formed yet."""

        def connect(membership: Membership[Sender]) -> Sender:
            client = TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=self._timeout)
            store = PrefixStore(f"gen{generation}", client)
            membership.meet(store)
            return self._backend(store, world, self._timeout, self._device)

        return BroadcastGroup(world, self._timeout_s, connect)


def send_snapshot(group: BroadcastGroup, snapshot: Snapshot) -> float:
    """Send every bucket, then the checksums. Returns the seconds it took. Blocks; raises RuntimeError."""
    started = time.monotonic()
    for bucket in snapshot.buckets:
        group.send(bucket)
    group.send(snapshot.checksums)
    return time.monotonic() - started
