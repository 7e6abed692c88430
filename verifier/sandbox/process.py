"""Owns the parent's side of one judging process: start, one request at a time, each with a deadline, kill.

Must not trust what it reads: a judged text may have written it.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple, TypeVar

import psutil
from pydantic import BaseModel, Field, ValidationError

from verifier.verifiers.base import ANSWER_CHARACTERS

REPLY_BYTES = 16384

PASSED = (
    *("HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "MPLCONFIGDIR", "PATH"),
    *("PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "PYTHONPYCACHEPREFIX", "TMPDIR", "TZ"),
)
"""Variables that a judging process gets. All others, credentials included, are withheld."""

ONE_THREAD = dict.fromkeys(("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class ProcessFailedError(Exception):
    """The judging process has exited, or sent an invalid line and was killed; it has to be replaced."""


class JudgementTimeoutError(ProcessFailedError):
    """The judging process did not answer in time and was killed."""


class Start(BaseModel):
    """The first line of a judging process: the gaps of its confinement, or why it cannot judge."""

    gaps: tuple[str, ...] = ()
    refused: str = ""


class Reply(BaseModel):
    """The answer to a request: a judgement, or only the `reason` why there is none; to a bare mark, only `to`.

    `to` repeats the request's mark, so a line that was written for another request is never taken for its reply.
    """

    to: str
    correct: bool | None = None
    score: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    answer: Annotated[str, Field(max_length=ANSWER_CHARACTERS)] = ""
    reason: Annotated[str, Field(max_length=500)] = ""


class JudgementRequest(NamedTuple):
    """A line for a judging process, and the mark that its reply must repeat."""

    mark: str
    line: bytes


def environment() -> dict[str, str]:
    """The variables of a judging process: those in PASSED, and the module path."""
    passed = {name: os.environ[name] for name in PASSED if name in os.environ}
    return passed | ONE_THREAD | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


Line = TypeVar("Line", Start, Reply)


class JudgingProcess:
    """A judging process, started by the constructor. For one thread at a time, except `kill`.

    On Linux it is killed when the thread that started it ends. It is stopped after the last of the texts that it was
    given together, so that code which a text left in it does not run. `program`: the module that it runs. Raises
    OSError when it cannot be started.
    """

    def __init__(self, verifiers: Sequence[str], program: str) -> None:
        command = [sys.executable, "-P", "-m", program, str(os.getpid()), *verifiers]
        self._process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            cwd="/",
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout
        os.set_blocking(self._requests.fileno(), False)  # a process that does not read must not block its parent
        self._writable = _poll(self._requests.fileno(), select.POLLOUT)
        self._readable = _poll(self._replies.fileno(), select.POLLIN)
        self._unread = b""
        self._patience_s = 0.0
        self._gaps: tuple[str, ...] | None = None
        self._seen = psutil.Process(self._process.pid)
        self._bytes_at_start = 0
        self.judged = 0

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def ready(self, patience_s: float) -> tuple[str, ...]:
        """Wait until it is confined; returns the gaps of its confinement.

        Raises ProcessFailedError, with the process's own reason when it cannot judge.
        """
        if self._gaps is None:
            self._patience_s = patience_s
            start = self._parsed(Start, self._received(time.monotonic() + patience_s))
            if start.refused:
                self.kill()
                raise ProcessFailedError(f"it cannot judge: {start.refused}")
            self._gaps = start.gaps
            self._bytes_at_start = self._resident_bytes()
        return self._gaps

    def kept_bytes(self) -> int:
        """How many bytes more memory it holds than before its first judgement."""
        return self._resident_bytes() - self._bytes_at_start if self._gaps is not None else 0

    def _resident_bytes(self) -> int:
        try:
            return int(self._seen.memory_info().rss)
        except psutil.NoSuchProcess:
            return 0

    def judge(self, requests: Sequence[JudgementRequest], timeout_s: float) -> Iterator[Reply]:
        """The reply to each request in turn; each text has `timeout_s` seconds.

        Within them the process must also answer a second, empty request. So a text that writes the reply itself and
        keeps running has no judgement. Raises ProcessFailedError, JudgementTimeoutError: then the request whose reply
        is missing failed, and those after it are not judged.
        """
        self._process.send_signal(signal.SIGCONT)
        self._patience_s, until = timeout_s, time.monotonic() + timeout_s
        self._send(requests[0].line, until)
        for place, request in enumerate(requests):
            self.judged += 1
            reply = self._reply(request.mark, until, due=1)
            # The next request travels with the empty one: the process need not be woken for each.
            empty, following = _marked(), requests[place + 1 : place + 2]
            self._send(b"".join(each.line for each in (empty, *following)), until)
            try:
                self._reply(empty.mark, until, due=1 + len(following))
            except JudgementTimeoutError:
                raise JudgementTimeoutError(
                    f"within {timeout_s:g} s: the judged text kept running after its reply"
                ) from None
            until = time.monotonic() + timeout_s
            yield reply
        if sys.platform == "linux":  # elsewhere a stopped process would outlive a killed parent
            self._process.send_signal(signal.SIGSTOP)

    def _reply(self, mark: str, until: float, due: int) -> Reply:
        """The reply to the request with that mark; `due`: how many replies are due, this one included."""
        reply = self._parsed(Reply, self._received(until, due))
        if reply.to != mark:
            self.kill()
            raise ProcessFailedError("it answered another request and was killed")
        return reply

    def kill(self) -> None:
        """Kill it and wait for its exit."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Kill it and close its pipes."""
        self.kill()
        self._requests.close()
        self._replies.close()

    def _parsed(self, kind: type[Line], line: bytes) -> Line:
        try:
            return kind.model_validate_json(line)
        except ValidationError:
            self.kill()
            raise ProcessFailedError(f"it sent an invalid {kind.__name__.lower()} and was killed") from None

    def _send(self, lines: bytes, until: float) -> None:
        with self._killing():
            if self._readable.poll(0):
                raise OSError("it wrote a line without a request")
            left = memoryview(lines)
            while left:
                try:
                    left = left[os.write(self._requests.fileno(), left) :]
                except BlockingIOError:
                    _wait(self._writable, until)

    def _received(self, until: float, due: int = 1) -> bytes:
        """One line; the last one that is due ends with all that was sent."""
        with self._killing():
            while b"\n" not in self._unread if due > 1 else not self._unread.endswith(b"\n"):
                _wait(self._readable, until)
                part = os.read(self._replies.fileno(), REPLY_BYTES)
                self._unread += part
                if not part or len(self._unread) > due * REPLY_BYTES:
                    raise OSError(
                        "it closed its pipe" if not part else f"it wrote more than {REPLY_BYTES} bytes a line"
                    )
        end = self._unread.index(b"\n") + 1 if due > 1 else len(self._unread)
        line, self._unread = self._unread[:end], self._unread[end:]
        return line

    @contextmanager
    def _killing(self) -> Iterator[None]:
        """Kill the process when it is too late or breaks the rules, and say which."""
        try:
            yield
        except TimeoutError:
            self.kill()
            raise JudgementTimeoutError(f"within {self._patience_s:g} s") from None
        except OSError as error:
            self.kill()
            raise ProcessFailedError(f"it died with {_exit_name(self._process.returncode)}: {error}") from None


def request_of(verifier: str, text: str, reference: Mapping[str, Any]) -> JudgementRequest:
    """The request to judge a text. Raises TypeError, ValueError for a reference that cannot be written as JSON."""
    return _marked(verifier, text, dict(reference))


def _marked(*asked: Any) -> JudgementRequest:
    mark = secrets.token_hex(8)
    return JudgementRequest(mark, json.dumps([mark, *asked]).encode() + b"\n")


def _wait(ready: select.poll, until: float) -> None:
    if not ready.poll(max(0.0, until - time.monotonic()) * 1000):
        raise TimeoutError


def _poll(descriptor: int, event: int) -> select.poll:
    ready = select.poll()
    ready.register(descriptor, event)
    return ready


def _exit_name(code: int) -> str:
    if code >= 0:
        return f"status {code}"
    known = {number.value: number.name for number in signal.Signals}  # the real-time signals have no names
    return known.get(-code, f"signal {-code}")
