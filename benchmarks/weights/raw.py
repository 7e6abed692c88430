"""Owns the yardstick: one tensor broadcast by Gloo between the same processes, without anything of the product.

Must not know weights.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]

TIMEOUT = timedelta(seconds=120)


class RawGroup:
    """Rank `rank` of `world` processes that broadcast `tensor`, whose memory was touched before; rank 0 sends.

    The connections have carried the tensor once before the first measurement.
    """

    def __init__(self, store: Store, rank: int, world: int, tensor: torch.Tensor) -> None:
        self._group: Any = ProcessGroupGloo(PrefixStore("raw", store), rank, world, TIMEOUT)
        self._tensor = tensor
        self.broadcast()

    def broadcast(self) -> float:
        """Broadcast the tensor. Returns the seconds until every rank has it."""
        self._group.barrier().wait()
        started = time.perf_counter()
        self._group.broadcast(self._tensor, 0).wait()
        self._group.barrier().wait()
        return time.perf_counter() - started
