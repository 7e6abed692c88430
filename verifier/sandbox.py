"""Owns the processes that judge: bounded in time and memory, killed and replaced when they exceed either.

Must not decide what an unknown outcome means.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import multiprocessing
import os
import resource
import signal
from collections.abc import Iterable, Mapping
from concurrent.futures import TimeoutError as JudgementTimeoutError
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from pebble import ProcessExpired, ProcessPool

from services.contracts import Outcome
from verifier.judgement import Judgement, bounded
from verifier.table import LIBRARIES, judge

MEMORY_BYTES = 4 << 30
PR_SET_PDEATHSIG = 1
RENEWED_AFTER = 10_000  # judgements per process: bounds what a leaking library can hold


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


def _confine(parent: int, libraries: tuple[str, ...]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before prctl could bind us to it
    for library in libraries:
        importlib.import_module(library)


class Sandbox:
    """A pool of judging processes; `timeout_s` bounds each judgement, without the import of the verifiers' libraries.

    `verifiers` are those that will be asked for; another one loads its library within its first judgement.
    """

    def __init__(self, processes: int, timeout_s: float, verifiers: Iterable[str] = ()) -> None:
        self._timeout_s = timeout_s
        self._pool = ProcessPool(
            max_workers=processes,
            max_tasks=RENEWED_AFTER,
            initializer=_confine,
            initargs=[os.getpid(), tuple(LIBRARIES[one] for one in sorted(set(verifiers)) if one in LIBRARIES)],
            context=multiprocessing.get_context("spawn"),
        )

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.stop()
        self._pool.join(timeout=10)

    async def judge(self, verifier: str, text: str, reference: Mapping[str, Any]) -> Finding:
        """Judge a response; a time-out, a crash or an unusable reference is `unknown`, never wrong."""
        future = self._pool.schedule(judge, args=[verifier, text, dict(reference)], timeout=self._timeout_s)
        try:
            judgement: Judgement = await asyncio.wrap_future(future)
        except JudgementTimeoutError:
            return Finding(Outcome.UNKNOWN, 0.0, f"no judgement within {self._timeout_s:g} s", fault="timeout")
        except ProcessExpired as error:
            return Finding(Outcome.UNKNOWN, 0.0, f"the judging process died: {error}", fault="died")
        except Exception as error:  # noqa: BLE001 - whatever the verifier raised in its process is its reason
            return Finding(Outcome.UNKNOWN, 0.0, f"{type(error).__name__}: {error}"[:500], fault="error")
        outcome = Outcome.CORRECT if judgement.correct else Outcome.WRONG
        return Finding(outcome, judgement.score, answer=bounded(judgement.answer))
