"""Owns the judging processes: limits their time and memory, kills and replaces those that exceed a limit.

Must not interpret an unknown outcome.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from services.contracts import Outcome, SandboxFault
from verifier.sandbox.process import (
    JudgementRequest,
    JudgementTimeoutError,
    JudgingProcess,
    ProcessFailedError,
    Reply,
    request_of,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

RENEWED_AFTER = 10_000  # judgements per process: limits what a leaking library can hold
KEPT_BYTES = 256 << 20
"""How much more memory than at its start a process may hold; one that holds more is replaced."""
START_S = 120.0
HANDED_OVER_S = 0.1
"""The longest that a finding waits for those after it. Handing over each one costs more than a fast judgement."""


class SandboxError(Exception):
    """A judging process does not start, or cannot be confined."""


@dataclass(frozen=True)
class Finding:
    """An outcome and its score; for `unknown` the reason, otherwise the judged answer (at most 200 characters).

    `fault`: why there is no judgement; None when there is one.
    """

    outcome: Outcome
    score: float
    reason: str = ""
    answer: str = ""
    fault: SandboxFault | None = None


class Sandbox:
    """A pool of judging processes; `timeout_s` limits each judgement, `start_s` the start of each process.

    `verifiers`: those whose libraries load before the first judgement; any other loads its library during its first
    judgement. `program`: the module that the processes run. Each process has a thread that waits for it.
    """

    def __init__(
        self,
        processes: int,
        timeout_s: float,
        verifiers: Iterable[str] = (),
        *,
        start_s: float = START_S,
        program: str = "verifier.sandbox.child",
    ) -> None:
        self._timeout_s = timeout_s
        self._start_s = start_s
        self._kind = (sorted(set(verifiers)), program)
        self._count = processes
        self._closed = False
        self._closing = threading.Lock()
        self._all: set[JudgingProcess] = set()
        self._idle: queue.SimpleQueue[JudgingProcess] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="judge")
        for _ in range(processes):  # in those threads, because a process dies with the thread that started it
            self._idle.put(self._threads.submit(self._start_process).result())

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._closing:
            self._closed = True
            for process in self._all:
                process.kill()  # also ends the threads' waits
        self._threads.shutdown(cancel_futures=True)
        for process in self._all:
            process.close()

    async def start(self) -> tuple[str, ...]:
        """Wait for all processes; returns the gaps of their confinement on this platform, one sentence each.

        Call it before the first judgement or not at all. Raises SandboxError when a process cannot be confined or is
        not ready in time.
        """
        return await self._run(self._start)

    async def judge(self, verifier: str, text: str, reference: Mapping[str, Any], *, fresh: bool = False) -> Finding:
        """Judge a response; a timeout, a crash or an unusable reference is `unknown`, never wrong.

        `fresh`: use a process that has judged no other text, so that no earlier text can cause a fault.
        """
        findings: deque[tuple[int, Finding]] = deque()
        await self._run(self._judge_each, [(verifier, text, reference)], fresh, findings)
        return findings[0][1]

    async def judge_all(
        self, texts: Sequence[tuple[str, str, Mapping[str, Any]]]
    ) -> AsyncIterator[list[tuple[int, Finding]]]:
        """Judge several responses, each (verifier, text, reference), one after another; see `judge`.

        Yields findings, each with its place in `texts`: every HANDED_OVER_S those since the last time, and the rest.
        Cheaper than as many calls. A text that takes long delays only those after it.
        """
        findings: deque[tuple[int, Finding]] = deque()
        judging = self._run(self._judge_each, texts, False, findings)
        try:
            ended = False
            while not ended:
                ended = bool((await asyncio.wait({judging}, timeout=HANDED_OVER_S))[0])
                if new := [findings.popleft() for _ in range(len(findings))]:
                    yield new
            judging.result()
        finally:
            judging.cancel()

    def _run(self, work: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def _judge_each(
        self, texts: Sequence[tuple[str, str, Mapping[str, Any]]], fresh: bool, findings: deque[tuple[int, Finding]]
    ) -> None:
        waiting: dict[int, JudgementRequest] = {}
        for number, text in enumerate(texts):
            try:
                waiting[number] = request_of(*text)
            except (TypeError, ValueError) as error:  # the reference cannot be written as JSON
                reason = f"{type(error).__name__}: {error}"
                findings.append((number, _no_judgement(reason, SandboxFault.ERROR)))
        while waiting:
            self._judge_until_fault(waiting, findings, fresh)

    def _judge_until_fault(
        self, waiting: dict[int, JudgementRequest], findings: deque[tuple[int, Finding]], fresh: bool
    ) -> None:
        """Move requests, in order, from those that wait to the findings, until a process fails or none is left."""
        process = self._usable(self._idle.get(), at_most=1 if fresh else RENEWED_AFTER)
        numbers = iter(list(waiting))
        try:
            process.ready(self._start_s)
            for reply in process.judge(list(waiting.values()), self._timeout_s):
                number = next(numbers)
                del waiting[number]
                findings.append((number, _finding(reply)))
        except JudgementTimeoutError as error:
            del waiting[number := next(numbers)]
            findings.append((number, _no_judgement(f"no judgement {error}", SandboxFault.TIMEOUT)))
        except ProcessFailedError as error:
            del waiting[number := next(numbers)]
            reason = f"the judging process failed: {error}"
            findings.append((number, _no_judgement(reason, SandboxFault.DIED)))
        finally:
            self._idle.put(self._usable(process))

    def _start(self) -> tuple[str, ...]:
        processes = [self._idle.get() for _ in range(self._count)]
        try:
            return tuple(sorted({gap for process in processes for gap in process.ready(self._start_s)}))
        except JudgementTimeoutError as error:
            raise SandboxError(f"a judging process was not ready {error}") from None
        except ProcessFailedError as error:
            raise SandboxError(f"the start of a judging process failed: {error}") from None
        finally:
            for process in processes:
                self._idle.put(process)

    def _usable(self, process: JudgingProcess, at_most: int = RENEWED_AFTER) -> JudgingProcess:
        if process.alive and process.judged < at_most and process.kept_bytes() <= KEPT_BYTES:
            return process
        process.kill()
        try:
            return self._start_process(replaced=process)
        except (OSError, SandboxError) as error:
            log.warning("starting a judging process failed, the next judgement retries: %s", error)
            return process

    def _start_process(self, replaced: JudgingProcess | None = None) -> JudgingProcess:
        with self._closing:
            if self._closed:
                raise SandboxError("the sandbox is closed")
            process = JudgingProcess(*self._kind)
            self._all.add(process)
            if replaced is not None:
                self._all.discard(replaced)
                replaced.close()
            return process


def _finding(reply: Reply) -> Finding:
    if reply.correct is None:
        return _no_judgement(reply.reason, SandboxFault.ERROR)
    return Finding(Outcome.CORRECT if reply.correct else Outcome.WRONG, reply.score, answer=reply.answer)


def _no_judgement(reason: str, fault: SandboxFault) -> Finding:
    return Finding(Outcome.UNKNOWN, 0.0, reason[:500], fault=fault)
