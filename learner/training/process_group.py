"""Owns the process group of the learner: joining it, small exchanges between ranks, leaving it, and ending the process.

Must not know DeepSpeed or messages.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from services.contracts.listening import advertised_host, listening_socket, socket_environment
from services.process.teardown import exit_now

log = logging.getLogger(__name__)

R = TypeVar("R")

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
LARGEST_KEPT_BLOCK = 128 << 20
GRACE_S = 2.0
"""Seconds that torch's own deadline, whose error tells more, may take to be noticed."""


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


def nccl_failure_policy(timeout_s: float) -> dict[str, str]:
    """The variables that torch's NCCL groups of the ranks need; set them before the first group.

    A collective that fails, or takes longer than its deadline, ends the process within some seconds: the thread that
    waits for it may hang in CUDA, and cannot be told. The communicators are not aborted first, because that may hang
    as well. The monitor ends a process whose watchdog itself hangs for `timeout_s` seconds.
    """
    return {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(math.ceil(timeout_s)),
        # The process ends four times as long after an error, in which its ranks write what they did to disk.
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "2000",
    }


def within(deadline_s: float, what: str, work: Callable[[], R]) -> R:
    """The result of blocking `work`, done in a thread of its own.

    Raises RuntimeError if it takes longer than `deadline_s` seconds; the thread is left behind.
    """
    done: Future[R] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            done.set_exception(error)

    threading.Thread(target=run, name="within-deadline", daemon=True).start()
    try:
        return done.result(deadline_s)
    except TimeoutError:
        if done.done():
            raise
        raise RuntimeError(f"{what} took longer than {deadline_s:g} s") from None


def served_store(host: str, port: int, timeout: timedelta, world: int | None = None) -> TCPStore:
    """A store that this process serves on `host:port` alone; with port 0, on a free port.

    With `world` it waits until that many members have joined. Raises RuntimeError.
    """
    with listening_socket(host, port) as listener:
        chosen = int(listener.getsockname()[1])
        return TCPStore(
            host,
            chosen,
            world,
            is_master=True,
            timeout=timeout,
            wait_for_workers=world is not None,
            master_listen_fd=listener.detach(),  # the store closes it
        )


class Ranks:
    """The place of this process among the learner ranks. One per process; calls block; use it from one thread."""

    def __init__(self, rank: int, world: int, host: str, port: int, timeout_s: float, meet_s: float = 0.0) -> None:
        """Join the group; blocks until all ranks have joined. Raises RuntimeError after the deadline.

        Rank 0 listens on `host:port`, and every rank on its advertised host, for the others. `timeout_s` limits each
        collective. `meet_s`, if longer, limits the time until all ranks, each with its model, have joined.
        """
        if world > 1 and port == 0:
            raise ValueError(f"master_port: {port} is not valid with world = {world}: expected a free port of rank 0")
        self.rank = rank
        self.world = world
        # Each rank sees only its own device.
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        os.environ.update(socket_environment(advertised_host()))
        timeout, meeting = timedelta(seconds=timeout_s), timedelta(seconds=max(timeout_s, meet_s))

        def meet() -> TCPStore:
            if rank == 0:
                store = served_store(host, port, meeting, world)
            else:
                store = TCPStore(host, port, world, is_master=False, timeout=meeting)
            store.set_timeout(timeout)
            return store

        # torch has deadlines of its own, but waits without one for the answer of a store whose process is stopped.
        store = within(meeting.total_seconds() + GRACE_S, f"the meeting of {world} ranks", meet)
        within(timeout_s + GRACE_S, f"connecting {world} ranks", lambda: self._connect(store, timeout))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # it is a property of the thread

    def _connect(self, store: TCPStore, timeout: timedelta) -> None:
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world, timeout=timeout)
        if self.device.type == "cuda":
            # Otherwise the communicator forms in the first collective, and no watchdog watches it until then.
            torch.cuda.set_device(self.device)
            dist.all_reduce(torch.zeros(1, device=self.device))
            torch.cuda.synchronize(self.device)

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
    exit_now(status)
