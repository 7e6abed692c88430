"""Owns the verifier's side of one warm parent: start with a deadline, fork, restart when it has died.

Must not send it a text.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil
from pydantic import BaseModel, Field, ValidationError, model_validator

from verifier.processes.group import GroupLeader
from verifier.sandbox.process import JudgingProcess
from verifier.verifiers.registry import EVERY

log = logging.getLogger(__name__)

FORK_S = 30.0
"""How long a fork may take on a busy machine."""
EXIT_S = 1.0
"""How long the exit of a warm parent that has closed its socket may take."""
MOST_DEATHS = 3
"""How often in a row a warm parent may die without a judgement; then it is not started again."""
LINE_BYTES = 65536
GONE = -1
NO_PROCESS = 0
"""To the kernel 0 is the group of the process that signals; no process has this number."""
MOST_PID = 1 << 22
"""The kernel's own limit (proc(5), pid_max)."""

PASSED = (
    *("HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "MPLCONFIGDIR", "PATH"),
    *("PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "PYTHONPYCACHEPREFIX", "TMPDIR", "TZ"),
)
"""Variables that a warm parent and its judging processes get. All others, credentials included, are withheld."""

ONE_THREAD = dict.fromkeys(("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class WarmParentError(Exception):
    """A warm parent does not start, cannot be confined, cannot load the user's function, or has died too often."""


class Start(BaseModel, extra="forbid"):
    """The first line of a warm parent: the gaps of its confinement, or why it cannot judge.

    `apart`: the tasks each of whose texts needs a process of its own (verifier.verifiers.registry.apart).
    """

    gaps: tuple[str, ...] = ()
    refused: str = ""
    apart: frozenset[str] = frozenset()


class Forked(BaseModel, extra="forbid"):
    """The answer to a request for a process: its id, or why there is none."""

    pid: int = Field(default=NO_PROCESS, ge=NO_PROCESS, le=MOST_PID)
    refused: str = ""

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if bool(self.refused) == (self.pid != NO_PROCESS):
            raise ValueError("pid or refused is expected")
        return self


def environment() -> dict[str, str]:
    """The variables of a warm parent: those in PASSED, and the module path."""
    passed = {name: os.environ[name] for name in PASSED if name in os.environ}
    return passed | ONE_THREAD | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class WarmParent:
    """The warm parent of one verifier. Any thread may use it; the process dies with the thread that started it.

    `name`: what it is for; `setup`: what it loads, see verifier.sandbox.server; `program`: the module that it runs.
    """

    def __init__(self, name: str, setup: Mapping[str, Any], program: str) -> None:
        self.name, self._setup, self._program = name, dict(setup), program
        self._lock = threading.Lock()
        self._leader: GroupLeader | None = None
        self._control: socket.socket | None = None
        self._unread = b""
        self._start: Start | None = None
        self._refused = ""
        self.life = 0
        """How often it has been started."""
        self.deaths = 0
        """How often it was started again since a process of it has judged."""

    def start(self) -> None:
        """Start it, without waiting; from a thread that lives as long as it must. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        command = [sys.executable, "-P", "-m", self._program, str(os.getpid()), str(theirs.fileno())]
        with theirs:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=environment(),
                cwd="/",
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        self._leader = GroupLeader(process)
        self._control, self._unread, self._start, self._refused = ours, b"", None, ""
        self.life += 1
        document = json.dumps(self._setup).encode()
        stdin = process.stdin
        assert stdin is not None
        # In a thread: a process that does not read must not block this one.
        threading.Thread(target=_write_all, args=(stdin, document), daemon=True).start()

    def restart(self) -> None:
        """Start it, in place of one that has died. Raises OSError."""
        with self._lock:  # another thread may still wait for the one that died
            self.close()
            self.start()

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._leader is not None and self._leader.runs()

    def ready(self, patience_s: float) -> Start:
        """Wait until it is confined. Raises WarmParentError, with the process's own reason when it cannot judge."""
        with self._lock:
            return self._started(patience_s)

    def _started(self, patience_s: float) -> Start:
        if self._refused:
            raise WarmParentError(self._refused)
        if self._start is None:
            try:
                line, _ = self._line(time.monotonic() + patience_s, f"ready within {patience_s:g} s")
            except WarmParentError as error:
                if self._setup["kind"] == "python":  # the user's file would do the same the next time
                    self._refused = str(error)
                raise
            start = self._parsed(Start, line)
            if start.refused:
                self.kill()
                self._refused = f"it cannot judge: {start.refused}"
                raise WarmParentError(self._refused)
            self._start = start
        return self._start

    def needs_own_process(self, reference: Mapping[str, Any]) -> bool:
        """Whether a text with this reference must not share its process with another text."""
        alone = self._start.apart if self._start else frozenset({EVERY})
        task = reference.get("task")
        return EVERY in alone or (isinstance(task, str) and task in alone)

    def fork(self, patience_s: float) -> JudgingProcess:
        """A new judging process. Raises WarmParentError."""
        their_requests, our_requests = os.pipe()
        our_replies, their_replies = os.pipe()
        descriptors: list[int] = []
        try:
            with self._lock:  # from its first line to its answer: another thread may start it again before or after
                self._started(patience_s)
                assert self._control is not None
                try:
                    socket.send_fds(self._control, [b"f"], [their_requests, their_replies])
                except OSError as error:
                    self.kill()
                    raise WarmParentError(f"it died with {self._exit()}: {error}") from None
                line, descriptors = self._line(time.monotonic() + FORK_S, f"able to fork within {FORK_S:g} s")
                forked = self._parsed(Forked, line)
                if forked.refused:
                    raise WarmParentError(f"it cannot fork: {forked.refused}")
                child = self._checked_child(forked.pid, descriptors)
        except BaseException:
            for descriptor in (our_requests, our_replies, *descriptors):
                os.close(descriptor)
            raise
        finally:
            os.close(their_requests)
            os.close(their_replies)
        descriptor = descriptors[0] if descriptors else -1
        return JudgingProcess(self.name, child, forked.pid, descriptor, our_requests, our_replies)

    def _checked_child(self, pid: int, descriptors: Sequence[int]) -> psutil.Process | None:
        """The process `pid`; None if it has ended already, which its first text notices.

        Kills the warm parent unless it is a child of it: a user's file in it may name another process to be killed.
        """
        assert self._leader is not None
        child: psutil.Process | None = None
        related = True
        with suppress(psutil.NoSuchProcess):
            child = psutil.Process(pid)
            related = child.ppid() == self._leader.pid
        named = [_pid_of(descriptor) for descriptor in descriptors]
        if not related or any(each not in (pid, GONE) for each in named):
            self.kill()
            raise WarmParentError(f"it named process {pid}, which is none of its own, and was killed")
        return child

    def restartable(self) -> bool:
        """Whether it may be started again: it has died, but not too often. Counts its deaths.

        One that could not load the user's file would not the next time either; what else fails may be a machine that
        was short of memory or processes.
        """
        if self.alive or (self._refused and self._setup["kind"] == "python"):
            return False
        self.deaths += 1
        return self.deaths <= MOST_DEATHS

    def kill(self) -> None:
        """Kill it with all processes that it has forked, and wait for its exit."""
        if self._leader is not None:
            self._leader.end()  # nothing in its session can leave it

    def close(self) -> None:
        """Kill it and close its socket."""
        self.kill()
        if self._control is not None:
            self._control.close()

    def _parsed(self, kind: type[Any], line: bytes) -> Any:
        try:
            return kind.model_validate_json(line)
        except ValidationError:
            self.kill()
            raise WarmParentError(f"it sent an invalid {kind.__name__.lower()} and was killed") from None

    def _line(self, until: float, expected: str) -> tuple[bytes, list[int]]:
        assert self._control is not None
        readable = select.poll()
        readable.register(self._control, select.POLLIN)
        descriptors: list[int] = []
        while b"\n" not in self._unread:
            if not readable.poll(max(0.0, until - time.monotonic()) * 1000):
                self.kill()
                raise WarmParentError(f"it was not {expected}")
            try:
                part, found, _, _ = socket.recv_fds(self._control, LINE_BYTES, 1)
            except OSError:  # it died with bytes that it had not read
                part, found = b"", []
            descriptors += found
            self._unread += part
            if not part or len(self._unread) > LINE_BYTES:
                for descriptor in descriptors:
                    os.close(descriptor)
                if not part and self._leader:
                    self._leader.wait(EXIT_S)  # for its own exit status
                self.kill()
                raise WarmParentError(f"it died with {self._exit()}" if not part else "it wrote too long a line")
        line, _, self._unread = self._unread.partition(b"\n")
        return line, descriptors

    def _exit(self) -> str:
        assert self._leader is not None
        code = self._leader.end()
        if code >= 0:
            return f"status {code}"
        known = {number.value: number.name for number in signal.Signals}  # the real-time signals have no names
        return known.get(-code, f"signal {-code}")


def _pid_of(descriptor: int) -> int:
    """The process of a pidfd, GONE once it is reaped; 0 for another descriptor."""
    lines = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("Pid:")), 0)


def _write_all(stdin: Any, document: bytes) -> None:
    try:
        with stdin:
            stdin.write(document)
    except BrokenPipeError:
        log.debug("a warm parent ended before it had read its setup")
