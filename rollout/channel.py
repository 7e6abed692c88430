"""Owns a worker's membership in a broadcast group: joining, receiving, leaving.

Must not know what the tensors mean. The learner hosts the group's store and is rank 0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # re-exports without __all__

from services.contracts.weight_group import GlooTransfer, Membership, Work, without_watchdog

log = logging.getLogger(__name__)

ROOT = 0


class Receiver(Protocol):
    """A backend's group in which this worker receives."""

    def broadcast(self, tensor: torch.Tensor) -> Work:
        """Start to fill `tensor` with the one that rank 0 sends."""

    def close(self) -> None:
        """Leave the group. May block until the deadline of the transfer in progress."""


class GlooReceiver:
    """Gloo over TCP. The connections close with the last reference to the group."""

    def __init__(self, store: Any, rank: int, world: int, deadline: timedelta, device: torch.device) -> None:
        self._group: Any = dist.ProcessGroupGloo(store, rank, world, deadline)

    def broadcast(self, tensor: torch.Tensor) -> Work:
        return GlooTransfer(self._group.broadcast(tensor, ROOT))

    def close(self) -> None:
        self._group = None


class NcclReceiver:
    """NCCL between GPUs."""

    def __init__(self, store: Any, rank: int, world: int, deadline: timedelta, device: torch.device) -> None:
        self._device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(self._device)
        # A separate stream: the transfer runs in parallel with decoding instead of in line with it.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = deadline
        # A blocking initialisation could not be aborted.
        options.config.blocking = 0
        with without_watchdog():
            group = dist.ProcessGroupNCCL(store, rank, world, options)
        group.eager_connect_single_device(self._device)
        self._group: Any = group
        # It returns before the members are connected; the first transfer waits for that.
        self.broadcast(torch.zeros(1, device=self._device)).wait()

    def broadcast(self, tensor: torch.Tensor) -> Work:
        torch.cuda.set_device(self._device)  # it is a property of the thread
        # The memory of `tensor` may still be in use by what was queued before it was allocated.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            return self._group.broadcast(tensor, ROOT)  # type: ignore[no-any-return]

    def close(self) -> None:
        # Never destroyed: that is a collective, and hangs when a member has died.
        self._group.abort()


BACKENDS: dict[str, Callable[[Any, int, int, timedelta, torch.device], Receiver]] = {
    "gloo": GlooReceiver,
    "nccl": NcclReceiver,
}
"""The backends by `weights.backend`."""


class Channel:
    """A worker's place in group `generation`: rank `rank` of `world`.

    `join`, `receive` and `finish` block, for at most `timeout_s` seconds, and raise RuntimeError (DistError is one);
    after an error the group must not be used again.
    """

    def __init__(
        self, backend: str, generation: int, rank: int, world: int, timeout_s: float, device: torch.device
    ) -> None:
        self.generation = generation
        self.world = world
        self._backend = BACKENDS[backend]
        self._device = device
        self._membership = Membership[Receiver](rank, world, timeout_s, lambda group: group.close())

    def join(self, host: str, port: int) -> None:
        """Form the group with the other members, at the learner's store."""
        membership, deadline = self._membership, timedelta(seconds=self._membership.timeout_s)

        def connect() -> Receiver:
            server = TCPStore(host, port, is_master=False, timeout=deadline)
            store = PrefixStore(f"gen{self.generation}", server)
            membership.meet(store)
            return self._backend(store, membership.rank, membership.world, deadline, self._device)

        membership.form(connect)

    def receive(self, tensor: torch.Tensor) -> None:
        """Fill `tensor` with the tensor that rank 0 broadcasts."""
        self.finish(self.begin(tensor))

    def begin(self, tensor: torch.Tensor) -> Work:
        """Start to fill `tensor` with the tensor that rank 0 broadcasts next."""
        return self._membership.begin(lambda group: group.broadcast(tensor))

    def finish(self, work: Work) -> None:
        """Wait until the tensor of `begin` is filled."""
        self._membership.finish(work)

    def abort(self) -> None:
        """Leave, at any moment and from any thread; returns at once."""
        self._membership.leave()
