"""Owns the processes that judge: bounded in time and memory, killed and replaced when they exceed either.

Must not decide what an unknown outcome means.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from services.contracts import Outcome
from verifier.sandbox.process import JudgingProcess, ProcessFailedError, TooLateError

log = logging.getLogger(__name__)

RENEWED_AFTER = 10_000  # judgements per process: bounds what a leaking library can hold
KEPT_BYTES = 256 << 20
"""What judged texts may leave in the memory of a process; one that holds more is renewed."""
START_S = 120.0


class SandboxError(Exception):
    """The judging processes do not start, or refuse to work."""


@dataclass(frozen=True)
class Finding:
    """An outcome with its score; for `unknown` the reason, else the answer that was judged (at most 200 characters).

    `fault`: why there is no judgement, one of services.metrics.SANDBOX_FAULTS; empty when there is one.
    """

    outcome: Outcome
    score: float
    reason: str = ""
    answer: str = ""
    fault: str = ""


class Sandbox:
    """A number of judging processes; `timeout_s` bounds each judgement, `start_s` the start of each process.

    `verifiers` are those that will be asked for; another one loads its library within its first judgement. `program`
    is the module that the processes run. Each process has a thread that waits for it.
    """

    def __init__(
        self, processes: int, timeout_s: float, verifiers: Iterable[str] = (), *, start_s: float = START_S,
        program: str = "verifier.sandbox.child",
    ) -> None:  # fmt: skip
        self._timeout_s = timeout_s
        self._start_s = start_s
        self._kind = (sorted(set(verifiers)), program)
        self._count = processes
        self._closed = False
        self._closing = threading.Lock()
        self._all: set[JudgingProcess] = set()
        self._idle: queue.SimpleQueue[JudgingProcess] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="judge")
        for _ in range(processes):  # in those threads, because a process ends with the thread that made it
            self._idle.put(self._threads.submit(self._new).result())

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._closing:
            self._closed = True
            for process in self._all:
                process.kill()  # and so end what the threads wait for
        self._threads.shutdown(cancel_futures=True)
        for process in self._all:
            process.close()

    async def start(self) -> tuple[str, ...]:
        """Wait for all processes; what their confinement lacks on this platform, one sentence each. Raises SandboxError
        when one cannot be confined or is not ready in time. Before the first judgement, or not at all."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._start)

    async def judge(
        self, verifier: str, text: str, reference: Mapping[str, Any], *, fresh: bool = False
    ) -> Finding:  # fmt: skip
        """Judge a response; a time-out, a crash or an unusable reference is `unknown`, never wrong. `fresh` asks for a
        process that has judged no other text, whose fault it could be."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._judge, verifier, text, reference, fresh)

    def _start(self) -> tuple[str, ...]:
        processes = [self._idle.get() for _ in range(self._count)]
        try:
            return tuple(sorted({gap for process in processes for gap in process.ready(self._start_s)}))
        except TooLateError as error:
            raise SandboxError(f"a judging process was not ready {error}") from None
        except ProcessFailedError as error:
            raise SandboxError(f"a judging process failed at its start: {error}") from None
        finally:
            for process in processes:
                self._idle.put(process)

    def _judge(self, verifier: str, text: str, reference: Mapping[str, Any], fresh: bool) -> Finding:
        process = self._usable(self._idle.get(), at_most=1 if fresh else RENEWED_AFTER)
        try:
            process.ready(self._start_s)
            reply = process.judge(verifier, text, reference, self._timeout_s)
        except TooLateError as error:
            return Finding(Outcome.UNKNOWN, 0.0, f"no judgement {error}", fault="timeout")
        except ProcessFailedError as error:
            return Finding(Outcome.UNKNOWN, 0.0, f"the judging process failed: {error}"[:500], fault="died")
        except (TypeError, ValueError) as error:  # a reference that is no JSON
            return Finding(Outcome.UNKNOWN, 0.0, f"{type(error).__name__}: {error}"[:500], fault="error")
        finally:
            self._idle.put(self._usable(process))
        if reply.correct is None:
            return Finding(Outcome.UNKNOWN, 0.0, reply.reason, fault="error")
        return Finding(Outcome.CORRECT if reply.correct else Outcome.WRONG, reply.score, answer=reply.answer)

    def _usable(self, process: JudgingProcess, at_most: int = RENEWED_AFTER) -> JudgingProcess:
        if process.alive and process.judged < at_most and process.kept_bytes() <= KEPT_BYTES:
            return process
        process.kill()
        try:
            return self._new(instead_of=process)
        except (OSError, SandboxError) as error:
            log.warning("no judging process can be started, the next judgement tries again: %s", error)
            return process

    def _new(self, instead_of: JudgingProcess | None = None) -> JudgingProcess:
        with self._closing:
            if self._closed:
                raise SandboxError("the sandbox is closed")
            process = JudgingProcess(*self._kind)
            self._all.add(process)
            if instead_of is not None:
                self._all.discard(instead_of)
                instead_of.close()
            return process
