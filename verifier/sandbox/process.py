"""Owns the verifier's side of one judging process: one request at a time, each with a deadline, kill.

Must not trust what it reads: a judged text may have written it.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple

import psutil
from pydantic import BaseModel, Field, ValidationError

from verifier.sandbox.deadline import Clock, Deadline
from verifier.verifiers.base import ANSWER_CHARACTERS, Candidate

REPLY_BYTES = 16384


class ProcessFailedError(Exception):
    """The judging process has exited, or sent an invalid line and was killed; it has to be replaced."""


class JudgementTimeoutError(ProcessFailedError):
    """The judging process did not answer in time and was killed."""


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


class JudgingProcess:
    """A judging process that a warm parent has forked. For one thread at a time, except `kill`.

    `verifier`: what its warm parent is for; `watched`: None if it has ended already; `descriptor`: a pidfd, or -1 where
    there are none; `requests`, `replies`: our ends of its pipes.
    """

    def __init__(
        self, verifier: str, watched: psutil.Process | None, pid: int, descriptor: int, requests: int, replies: int
    ) -> None:
        self.verifier, self.pid, self._descriptor = verifier, pid, descriptor
        self._requests, self._replies = requests, replies
        os.set_blocking(requests, False)  # a process that does not read must not block its parent
        self._writable, self._readable = _poll(requests, select.POLLOUT), _poll(replies, select.POLLIN)
        self._unread, self._due, self._dead = b"", 0, False
        self._deadline: Deadline | None = None
        self._mark = ""
        self._watched = watched
        self._bytes_at_start = self._resident_bytes()
        self.judged = 0

    @property
    def alive(self) -> bool:
        """Whether it was not seen to end."""
        return not self._dead

    def kept_bytes(self) -> int:
        """How many bytes more memory it holds than when it was forked."""
        return self._resident_bytes() - self._bytes_at_start

    def _resident_bytes(self) -> int:
        try:
            return int(self._watched.memory_info().rss) if self._watched else 0
        except psutil.NoSuchProcess:
            return 0

    def ask(self, request: JudgementRequest, cpu_s: float, wall_s: float) -> None:
        """Send a text, which has `cpu_s` seconds of the process's CPU time and `wall_s` on the clock from now.

        Raises ProcessFailedError, JudgementTimeoutError.
        """
        self._deadline, self._mark = Deadline(Clock(self.pid), cpu_s, wall_s), request.mark
        self.judged += 1
        self._send(request.line, self._deadline)

    def quick_reply(self, slow_s: float) -> Reply | None:
        """The reply to the text that was sent; None if its judgement takes long, `slow_s` CPU seconds.

        Raises ProcessFailedError, JudgementTimeoutError.
        """
        return self._parsed(self._unread, self._mark) if self._received(slow_s) else None

    def reply_within(self, pause_s: float) -> Reply | None:
        """The reply to the text that was sent, None if it is not there after `pause_s` on the clock.

        Raises ProcessFailedError, JudgementTimeoutError.
        """
        assert self._deadline is not None
        with self._killing():
            if not self._deadline.look(self._readable, pause_s) or not self._whole_line():
                return None
        return self._parsed(self._unread, self._mark)

    def reply(self) -> Reply:
        """The reply to the text that was sent, by its deadline. Raises ProcessFailedError, JudgementTimeoutError."""
        self._received()
        return self._parsed(self._unread, self._mark)

    def check_ended(self) -> None:
        """Raise unless the judgement has ended: a text that writes the reply itself and keeps running has none.

        The process must answer an empty request before the text's deadline. Raises ProcessFailedError,
        JudgementTimeoutError.
        """
        assert self._deadline is not None
        empty = _marked()
        self._send(empty.line, self._deadline)
        try:
            self._received()
        except JudgementTimeoutError as error:
            raise JudgementTimeoutError(f"{error}: the judged text kept running after its reply") from None
        self._parsed(self._unread, empty.mark)

    @property
    def cpu_seconds(self) -> float:
        """The CPU seconds that its text has taken."""
        return self._deadline.cpu_seconds if self._deadline else 0.0

    @property
    def silent(self) -> bool:
        """Whether it has neither ended nor written a line, while it has no text."""
        return not self._readable.poll(0)

    def suspend(self) -> None:
        """Stop it: without a text, code that an earlier text left in it does not run; with one, others go first."""
        if sys.platform == "linux":  # elsewhere a stopped process would outlive a killed parent
            self._signal(signal.SIGSTOP)
            if self._deadline:
                self._deadline.stopped()

    def wake(self) -> None:
        """Let it run again."""
        self._signal(signal.SIGCONT)
        if self._deadline:
            self._deadline.continued()

    def kill(self) -> None:
        """Kill it. Its warm parent reaps it."""
        self._dead = True
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        """Kill it and close its pipes."""
        self.kill()
        for descriptor in (self._requests, self._replies, self._descriptor):
            if descriptor >= 0:
                os.close(descriptor)
        self._requests = self._replies = self._descriptor = -1

    def _signal(self, number: signal.Signals) -> None:
        try:
            if self._descriptor >= 0:
                signal.pidfd_send_signal(self._descriptor, number)
            elif self._watched:
                self._watched.send_signal(number)  # none to another process that has got its number
            else:
                self._dead = True
        except (ProcessLookupError, psutil.NoSuchProcess):
            self._dead = True

    def _parsed(self, line: bytes, mark: str) -> Reply:
        self._unread = b""
        try:
            reply = Reply.model_validate_json(line)
        except ValidationError:
            self.kill()
            raise ProcessFailedError("it sent an invalid reply and was killed") from None
        if reply.to != mark:
            self.kill()
            raise ProcessFailedError("it answered another request and was killed")
        return reply

    def _send(self, lines: bytes, deadline: Deadline) -> None:
        with self._killing():
            if self._readable.poll(0):
                raise OSError(self._unasked())
            left = memoryview(lines)
            while left:
                try:
                    left = left[os.write(self._requests, left) :]
                except BlockingIOError:
                    deadline.wait(self._writable)

    def _unasked(self) -> str:
        return "it wrote a line without a request" if os.read(self._replies, REPLY_BYTES) else "it has ended"

    def _received(self, slow_s: float | None = None) -> bool:
        """Whether one line, the last that was sent, has been read: False if that takes long (see Deadline.wait)."""
        assert self._deadline is not None
        with self._killing():
            while self._deadline.wait(self._readable, slow_s):
                if self._whole_line():
                    return True
        return False

    def _whole_line(self) -> bool:
        """Read what there is; whether it ends a line. Raises OSError."""
        part = os.read(self._replies, REPLY_BYTES)
        self._unread += part
        if not part or len(self._unread) > REPLY_BYTES:
            raise OSError("it has ended" if not part else f"it wrote more than {REPLY_BYTES} bytes a line")
        return self._unread.endswith(b"\n")

    @contextmanager
    def _killing(self) -> Iterator[None]:
        """Kill the process when it is too late or breaks the rules, and say which."""
        try:
            yield
        except TimeoutError as error:
            self.kill()
            raise JudgementTimeoutError(str(error)) from None
        except OSError as error:
            self.kill()
            raise ProcessFailedError(str(error)) from None


def request_of(kind: str, options: Mapping[str, Any], candidate: Candidate) -> JudgementRequest:
    """The request to judge a text. Raises TypeError, ValueError for a reference that cannot be written as JSON."""
    return _marked(
        {
            "kind": kind,
            "options": dict(options),
            "text": candidate.text,
            "reference": dict(candidate.reference),
            "messages": [dict(message) for message in candidate.messages],
            "metadata": dict(candidate.metadata),
        }
    )


def _marked(*asked: Any) -> JudgementRequest:
    mark = secrets.token_hex(8)
    return JudgementRequest(mark, json.dumps([mark, *asked]).encode() + b"\n")


def _poll(descriptor: int, event: int) -> select.poll:
    ready = select.poll()
    ready.register(descriptor, event)
    return ready
