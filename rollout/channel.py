"""Owns a worker's membership in a broadcast group: joining, receiving, leaving.

Must not know what the tensors mean. The learner hosts the group's store and is rank 0.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # re-exports without __all__

log = logging.getLogger(__name__)

ROOT = 0


class Channel:
    """A formed group. Every broadcast has the group's deadline; after an error the group must not be used again."""

    def __init__(self, generation: int, world: int, group: Any, deadline: timedelta, stream: Any = None) -> None:
        self.generation = generation
        self.world = world
        self._group = group
        self._deadline = deadline
        self._stream = stream

    def receive(self, tensor: torch.Tensor) -> None:
        """Fill `tensor` with the tensor that rank 0 broadcasts.

        Raises RuntimeError (DistBackendError) when the group breaks or times out.
        """
        if self._stream is None:
            self._group.broadcast([tensor], _root()).wait(self._deadline)
            return
        with torch.cuda.stream(self._stream):
            # Without a deadline NCCL's wait only orders streams, and a broken broadcast would hang synchronize().
            self._group.broadcast([tensor], _root()).wait(self._deadline)
        self._stream.synchronize()

    def abort(self) -> None:
        """Leave at once, even while another thread receives.

        An NCCL group is aborted, never destroyed: destroying is collective and hangs when a member has died.
        """
        self._group.abort()


def _root() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = ROOT
    options.rootTensor = 0
    return options


def _gloo(store: Any, rank: int, world: int, deadline: timedelta) -> tuple[Any, Any]:
    return dist.ProcessGroupGloo(store, rank, world, deadline), None


def _nccl(store: Any, rank: int, world: int, deadline: timedelta) -> tuple[Any, Any]:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = deadline
    # A separate stream: the transfer runs in parallel with decoding instead of in line with it.
    return dist.ProcessGroupNCCL(store, rank, world, options), torch.cuda.Stream()  # type: ignore[no-untyped-call]


BACKENDS = {"gloo": _gloo, "nccl": _nccl}


def join(backend: str, generation: int, host: str, port: int, rank: int, world: int, timeout_s: float) -> Channel:
    """Form group `generation` with the other members; returns when all have joined.

    Raises RuntimeError (DistError) when the store cannot be reached or a member is missing after `timeout_s`.
    """
    deadline = timedelta(seconds=timeout_s)
    server = TCPStore(host, port, is_master=False, timeout=deadline)
    group, stream = BACKENDS[backend](PrefixStore(f"gen{generation}", server), rank, world, deadline)
    return Channel(generation, world, group, deadline, stream)
