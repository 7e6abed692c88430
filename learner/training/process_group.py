"""Owns the learner's process group: forming it, small exchanges between ranks, leaving it, the end of its process.

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
    """Let glibc reuse large freed blocks instead of returning them: 11 % of a CPU step went into page faults."""
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError) as error:
        log.info("the allocator stays as it is: %s", error)
        return
    # One arena: blocks of other threads' arenas cannot exceed 64 MiB and would be mapped anew each time.
    for option, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, LARGEST_KEPT_BLOCK), (M_TRIM_THRESHOLD, -1)):
        mallopt(option, value)


class Ranks:
    """This process's place among the learner's ranks. One per process; blocking; use from one thread."""

    def __init__(self, rank: int, world: int, host: str, port: int, timeout_s: float, meet_s: float = 0.0) -> None:
        """`timeout_s` is for each collective; `meet_s`, where longer, for all ranks to come, each with its model."""
        if world > 1 and port == 0:
            raise ValueError(f"master_port = {port} is not accepted with world = {world}; a free port of rank 0 is")
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
        """Combine a small CPU tensor over all ranks, in place."""
        if self.world > 1:
            dist.all_reduce(values, op=op)
        return values

    def broadcast_bytes(self, message: bytes | None) -> bytes:
        """Rank 0's `message`, on every rank; the others pass None. Raises RuntimeError after the group's timeout."""
        if self.world == 1:
            assert message is not None, "rank 0 always has a message"
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
        """Destroy the group, so far as nobody else holds it; `end_with` says what that means for the process."""
        if dist.is_initialized():
            dist.destroy_process_group()


def end_with(work: Callable[[], int]) -> NoReturn:
    """Do the work of this process and end it with the returned status, or with 1 and a traceback.

    Without taking the interpreter apart: DeepSpeed's parameters hold process groups whose Gloo threads outlive
    `destroy_process_group`, and a thread that wants the interpreter while it goes aborts the process (status -6;
    pytorch/pytorch pull request 179291). A SystemExit of `work` ends the process as ever: nothing was begun.
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
