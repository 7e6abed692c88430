"""Owns the process group of the learner: joining it, small exchanges between ranks, leaving it, and ending the process.

Must not know DeepSpeed or messages.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

log = logging.getLogger(__name__)

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
LARGEST_KEPT_BLOCK = 128 << 20


def keep_freed_memory() -> None:
    """Make glibc reuse large freed blocks: returning them cost 11 % of a CPU step in page faults."""
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError) as error:
        log.info("the allocator's settings are unchanged: %s", error)
        return
    # One arena: blocks in the arenas of other threads cannot exceed 64 MiB, so larger ones would be mapped every time.
    for option, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, LARGEST_KEPT_BLOCK), (M_TRIM_THRESHOLD, -1)):
        mallopt(option, value)


class Ranks:
    """The place of this process among the learner ranks. One per process; calls block; use it from one thread."""

    def __init__(self, rank: int, world: int, host: str, port: int, timeout_s: float, meet_s: float = 0.0) -> None:
        """Join the group; blocks until all ranks have joined.

        `timeout_s` limits each collective. `meet_s`, if longer, limits the time until all ranks, each with its model,
        have joined.
        """
        if world > 1 and port == 0:
            raise ValueError(f"master_port: {port} is not valid with world = {world}: expected a free port of rank 0")
        self.rank = rank
        self.world = world
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        timeout = timedelta(seconds=timeout_s)
        meeting = timedelta(seconds=max(timeout_s, meet_s))
        store = TCPStore(host, port, world, is_master=rank == 0, timeout=meeting)
        store.set_timeout(timeout)
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)

    def all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce a small CPU tensor over all ranks, in place, and return it."""
        if self.world > 1:
            dist.all_reduce(values, op=op)
        return values

    def broadcast_bytes(self, message: bytes | None) -> bytes:
        """Return the `message` of rank 0 on every rank. The others pass None. Raises RuntimeError on timeout."""
        if self.world == 1:
            assert message is not None, "rank 0 must pass a message"
            return message
        length = torch.tensor([len(message or b"")], dtype=torch.int64)
        dist.broadcast(length, 0)
        body = torch.zeros(int(length), dtype=torch.uint8)
        if message:
            body.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        if len(body):
            dist.broadcast(body, 0)
        return bytes(body.numpy().tobytes())

    def leave(self) -> None:
        """Destroy the group. DeepSpeed may still hold references to it; see `end_with`."""
        if dist.is_initialized():
            dist.destroy_process_group()


def end_with(work: Callable[[], int]) -> NoReturn:
    """Do the work of this process, then exit with the status it returns, or with 1 and a traceback.

    The exit skips the interpreter's shutdown: DeepSpeed's parameters hold process groups whose Gloo threads outlive
    `destroy_process_group`, and such a thread aborts the process (status -6) if it needs the interpreter during the
    shutdown (pytorch/pytorch pull request 179291). A SystemExit raised by `work` exits in the usual way, because the
    work had not started.
    """
    try:
        status = work()
    except Exception:
        log.exception("this process failed")
        status = 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
