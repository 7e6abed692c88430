"""Owns how a process takes part in a broadcast group: meet the members, wait for a transfer, leave at any moment.

Must not import torch: both ends bring their backend's group, Gloo's or NCCL's. Neither backend can be left at any
moment: Gloo's constructor and a transfer in progress end only at their own deadline, and NCCL's abort waits for a lock
that an initialisation holds. So they run in threads of their own, and this end waits for them with a deadline.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Generic, Protocol, TypeVar

log = logging.getLogger(__name__)

G = TypeVar("G")

MEET_POLL_S = 0.05
MET = "all members"
"""The key by which rank 0 says that all members are there."""
TRANSFER_POLL_S = 0.001
"""As often as torch itself looks whether an NCCL transfer is done."""
GLOO_LOOK_S = timedelta(seconds=0.02)
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_environment = threading.Lock()


def nccl_environment(timeout_s: float) -> dict[str, str]:
    """The variables that a process with NCCL broadcast groups needs before its first NCCL group.

    Without the first, a member that vanishes while a communicator forms holds the others for 30 minutes. The second is
    torch's default; see `without_watchdog`.
    """
    return {"TORCH_NCCL_NONBLOCKING_TIMEOUT": str(math.ceil(timeout_s)), BLOCKING_WAIT: "0"}


@contextmanager
def without_watchdog() -> Iterator[None]:
    """Construct an NCCL group in the body that no watchdog watches: errors are raised where its transfer is awaited.

    Torch's default is a thread per group that ends the whole process, this end's engine or learner, when a transfer
    fails or a member dies. Torch reads the variable only in the constructor, and other groups must keep theirs. It is
    never unset, so that a thread of C++ which reads the environment meanwhile finds one value or the other.
    """
    with _environment:
        before = os.environ.get(BLOCKING_WAIT, "0")
        os.environ[BLOCKING_WAIT] = "1"
        try:
            yield
        finally:
            os.environ[BLOCKING_WAIT] = before


class GroupLeftError(RuntimeError):
    """This process left the group while it was forming, or in the middle of a transfer."""


class Store(Protocol):
    """The part of torch's store that a meeting needs. Both calls raise RuntimeError if the store cannot be reached."""

    def set(self, key: str, value: str, /) -> None:
        """Store a value."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys exist."""


class Work(Protocol):
    """A transfer of a backend."""

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""

    def wait(self) -> object:
        """Raise its error, once it has ended."""


class GlooTransfer:
    """A transfer of Gloo, `work`, whose end is noticed at once: a poll's sleep between two buckets is lost time."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def is_completed(self) -> bool:
        """Whether it has ended, well or not; waits for that, for at most GLOO_LOOK_S."""
        with suppress(RuntimeError):  # it goes on, or it has failed, and `wait` raises that
            self._work.wait(GLOO_LOOK_S)
        return bool(self._work.is_completed())

    def wait(self) -> object:
        """Raise its error, once it has ended."""
        return self._work.wait()


class Membership(Generic[G]):
    """Rank `rank`'s membership in a group of `world`, once, from forming to leaving; `close` drops a backend's group.

    `form` and `transfer` block, for at most `timeout_s` seconds, and raise RuntimeError; after an error, call `leave`.
    """

    def __init__(self, rank: int, world: int, timeout_s: float, close: Callable[[G], None]) -> None:
        self.rank = rank
        self.world = world
        self.timeout_s = timeout_s
        self._close = close
        self._left = threading.Event()
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        """Held while a transfer starts: its thread must not be the one that drops the last reference to the group."""
        self._group: G | None = None
        self._waits_for = "the group's store"

    def form(self, connect: Callable[[], G]) -> None:
        """Form the group. `connect` runs in a thread that ends on its own; it calls `meet`, and returns the group."""
        connected = threading.Event()
        errors: list[BaseException] = []

        def run() -> None:
            try:
                self._keep(connect())
            except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
                # Its frames would keep the connections of a group that did not form.
                errors.append(error.with_traceback(None))
                if self._left.is_set():
                    log.info("rank %d, which has left, could not form the group: %s", self.rank, error)
            connected.set()

        ends = time.monotonic() + self.timeout_s
        threading.Thread(target=run, name="forming-group", daemon=True).start()
        while not connected.wait(MEET_POLL_S):
            self._check(ends)
        if errors:
            raise errors.pop()
        self._check(math.inf)

    def _keep(self, group: G) -> None:
        """Use `group`, or drop it if this process has left meanwhile."""
        with self._lock:
            if not self._left.is_set():
                self._group = group
                return
        self._close(group)

    def meet(self, store: Store) -> None:
        """Announce this rank in the group's store, and wait until all ranks are there.

        After this, a backend finds all members, except one that dies within the moment. Rank 0 looks for all others,
        and they for its word: a fleet of hundreds must not keep the store busy.
        """
        store.set(f"member-{self.rank}", "here")
        ends = time.monotonic() + self.timeout_s
        missing = [f"member-{rank}" for rank in range(self.world)] if self.rank == 0 else [MET]
        while missing := [key for key in missing if not store.check([key])]:
            self._waits_for = f"members of a group of {self.world} to join: {', '.join(missing)}"
            self._check(ends)
            self._left.wait(MEET_POLL_S)
        if self.rank == 0:
            store.set(MET, "")
        self._waits_for = f"the connections of {self.world} ranks"

    def transfer(self, start: Callable[[G], Work]) -> None:
        """Start a transfer in the group, and wait for its end."""
        self.finish(self.begin(start))

    def begin(self, start: Callable[[G], Work]) -> Work:
        """Start a transfer in the group."""
        with self._starting:
            with self._lock:
                group = self._group
            if group is None:
                raise GroupLeftError(f"rank {self.rank} is in no group")
            self._waits_for = f"a transfer between {self.world} ranks"
            return start(group)

    def finish(self, work: Work) -> None:
        """Wait for the end of a transfer that has begun."""
        ends = time.monotonic() + self.timeout_s
        while not work.is_completed():
            self._check(ends)
            self._left.wait(TRANSFER_POLL_S)
        work.wait()

    def _check(self, ends: float) -> None:
        if self._left.is_set():
            raise GroupLeftError(f"rank {self.rank} left the group")
        if time.monotonic() > ends:
            raise RuntimeError(f"waited {self.timeout_s:g} s for {self._waits_for}")

    def leave(self) -> None:
        """Leave the group, in any state and from any thread, and return at once.

        A thread in `form` or `transfer` raises GroupLeftError. What the backend had in progress ends within the
        deadline, and with it its threads and connections; a request to a store whose process is stopped ends when
        that process is ended or goes on.
        """
        with self._lock:
            self._left.set()
            group, self._group = self._group, None
        if group is None:
            return
        leaving = [group]
        del group  # the thread must drop the last reference: that may block until the deadline
        threading.Thread(target=self._drop, args=(leaving,), name="leaving-group", daemon=True).start()

    def _drop(self, leaving: list[Any]) -> None:
        started = self._starting.acquire(timeout=self.timeout_s)
        if not started:
            log.warning("rank %d: a transfer did not start in %g s; its group is closed", self.rank, self.timeout_s)
        try:
            self._close(leaving[0])
        except RuntimeError as error:
            log.warning("rank %d: the group could not be left: %s", self.rank, error)
        finally:
            if started:
                self._starting.release()
        leaving.clear()
