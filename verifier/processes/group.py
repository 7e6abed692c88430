"""Owns a child that leads a process group: whether it runs, its exit status, and the end of the whole group.

Must not reap the child before its group is killed: until then no other process or group can have its number.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from contextlib import suppress

import psutil

LOOK_S = 0.01
END_S = 10.0


class GroupLeader:
    """A child that `subprocess.Popen` has started with `start_new_session`. Any thread may use it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._ending = threading.Lock()

    @property
    def pid(self) -> int:
        """Its process id, which is also the id of its group."""
        return self._process.pid

    def runs(self) -> bool:
        """Whether it has not ended."""
        with self._ending:
            if self._process.returncode is None:
                with suppress(psutil.NoSuchProcess):
                    return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
            return False

    def wait(self, patience_s: float) -> bool:
        """Wait until it ends by itself, at most `patience_s`; whether it has."""
        until = time.monotonic() + patience_s
        while self.runs():
            if time.monotonic() > until:
                return False
            time.sleep(LOOK_S)
        return True

    def end(self) -> int:
        """Kill its group, if it was not killed before, and reap it; returns its exit status, negative for a signal.

        Raises subprocess.TimeoutExpired when the kernel does not end it within END_S seconds.
        """
        with self._ending:
            if self._process.returncode is None:
                with suppress(ProcessLookupError, PermissionError):  # macOS refuses a group of zombies
                    os.killpg(self.pid, signal.SIGKILL)
                self._process.kill()
            return self._process.wait(END_S)
