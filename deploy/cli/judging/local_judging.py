"""Owns judging on this machine: the sandbox and what is outside of it, for commands that need no run.

Must not read files or print anything but progress.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from services.contracts import Lane
from services.settings.rewards.kinds import JudgeReward
from services.settings.rewards.reward import Reward
from services.waits import cancel_and_wait
from verifier.judging import JudgedText, RewardJudges, is_confined
from verifier.outside import outside_judges
from verifier.processes.prctl import deny_inspection
from verifier.programs.isolation import IsolationError
from verifier.remote.budget import LocalBudget
from verifier.remote.faults import RemoteSetupError
from verifier.sandbox.finding import Finding
from verifier.sandbox.pool import Sandbox, SandboxError, default_processes

T = TypeVar("T")

TOGETHER = 64
"""Texts that are read and handed to the judges together."""
IN_FLIGHT = 4
"""How many such parts are judged at once: a text that takes long does not stop those after it."""


class LocalJudgingError(RuntimeError):
    """Nothing can be judged on this machine by these rewards. The text says why."""


class Asked(NamedTuple, Generic[T]):
    """A text to judge; `of` is the caller's, and comes back with the finding."""

    of: T
    text: JudgedText


class JudgedHere(NamedTuple, Generic[T]):
    """A text's finding. `seconds`: since it was handed to the judges with the others of its part."""

    of: T
    finding: Finding
    seconds: float


@dataclass(frozen=True)
class LocalJudges:
    """Judges on this machine. `gaps`: what its confinement lacks on this platform, one sentence each."""

    judges: RewardJudges
    gaps: tuple[str, ...]

    async def judge(
        self, asked: Iterable[Asked[T]], *, together: int = TOGETHER
    ) -> AsyncGenerator[JudgedHere[T], None]:
        """The findings in the order of the texts, of which a few times `together` are held at once.

        With `together` = 1, one text is judged after the other and `seconds` is its own time. `asked` is read in a
        thread; what it raises is raised after the findings of the texts before.
        """
        most = 1 if together == 1 else IN_FLIGHT
        judging: deque[asyncio.Task[list[JudgedHere[T]]]] = deque()
        ended_by: Exception | None = None
        try:
            async with aclosing(_parts(asked, together)) as parts:
                async for part in parts:
                    if isinstance(part, Exception):
                        ended_by = part
                        break
                    judging.append(asyncio.create_task(self._judged(part)))
                    if len(judging) >= most:
                        for found in await judging.popleft():
                            yield found
            while judging:
                for found in await judging.popleft():
                    yield found
        finally:
            await cancel_and_wait(*judging)
        if ended_by is not None:
            raise ended_by

    async def _judged(self, part: Sequence[Asked[T]]) -> list[JudgedHere[T]]:
        started, found = time.monotonic(), dict[int, JudgedHere[T]]()
        async with aclosing(self.judges.judge_all([each.text for each in part], lane=Lane.EVALUATION)) as judging:
            async for placed in judging:
                seconds = time.monotonic() - started
                found |= {place: JudgedHere(part[place].of, finding, seconds) for place, finding in placed}
        return [found[place] for place in range(len(part))]


def _next_part(source: Iterator[T], size: int) -> tuple[list[T], Exception | None]:
    """The next `size` items; fewer if they end, or if an error ends them."""
    part: list[T] = []
    try:
        part.extend(islice(source, size))
    except Exception as error:  # noqa: BLE001 - the reader of the parts raises it
        return part, error
    return part, None


async def _parts(items: Iterable[T], size: int) -> AsyncGenerator[list[T] | Exception, None]:
    """The items in lists of `size`, and last the error that ended them, if one did.

    They are read in a thread that does not outlive the process, because standard input may block it.
    """
    loop, found = asyncio.get_running_loop(), asyncio.Queue[list[T] | Exception]()
    room, closed = threading.Semaphore(1), threading.Event()

    def read() -> None:
        source = iter(items)
        ended = False
        while not ended:
            room.acquire()
            part, error = _next_part(source, size)
            if closed.is_set():
                return
            ended = len(part) < size
            ends: list[list[T] | Exception] = [error or []] if ended else []
            for each in [*([part] if part else []), *ends]:
                loop.call_soon_threadsafe(found.put_nowait, each)

    threading.Thread(target=read, name="texts-to-judge", daemon=True).start()
    try:
        while part := await found.get():
            yield part
            room.release()
    finally:
        closed.set()
        room.release()


@asynccontextmanager
async def local_judges(
    rewards: Sequence[Reward], files: Mapping[str, str], *, timeout_s: float, processes: int | None = None
) -> AsyncIterator[LocalJudges]:
    """Judges by these rewards, ready for the first text. `files`: the user's, by the names that rewards give them.

    `timeout_s`: the CPU seconds of a judgement; `processes`: texts judged at once, by default one more than
    cores. Limits of a judge model hold for this process. Raises LocalJudgingError.
    """
    at_once = processes or default_processes()
    confined = {single.text: single for reward in rewards for single in reward.singles if is_confined(single)}
    with _explained(), Sandbox(at_once, timeout_s, confined.values(), files=files) as sandbox:
        gaps = await sandbox.start()
        if gaps:  # without Landlock a judged text could read this process's memory in /proc
            deny_inspection()
        outside = outside_judges(rewards, files, timeout_s=timeout_s, at_once=at_once, budget_of=_budget)
        async with outside as table, aclosing(RewardJudges(sandbox, table)) as judges:
            judges.prepare(rewards)
            yield LocalJudges(judges, gaps)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (SandboxError, RemoteSetupError, IsolationError) as error:
        raise LocalJudgingError(str(error)) from None


def _budget(reward: Reward) -> LocalBudget | None:
    options = reward.options
    return LocalBudget(options.max_requests, options.max_tokens) if isinstance(options, JudgeReward) else None
