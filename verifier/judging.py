"""Owns the way of a response through the rewards that judge it: confined, outside, or combined of several.

Must not judge: the sandbox does, and what is outside of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol

from services.contracts import Lane, SandboxFault
from services.settings.rewards.kinds import PythonReward
from services.settings.rewards.reward import Reward, RewardError, parse_text
from services.waits import cancel_and_wait
from verifier.combination import combined
from verifier.sandbox.finding import Finding, finding_of, no_judgement
from verifier.sandbox.pool import Sandbox
from verifier.verifiers.base import Candidate, Judgement, UndecidedError

SEES_PROMPT = frozenset({"python", "http", "judge"})
"""The kinds of rewards that read the prompt and its row's metadata."""

JudgedText = tuple[Reward, Candidate]
Placed = list[tuple[int, Finding]]


class OutsideJudge(Protocol):
    """Judges responses outside of the sandbox. A fault of its own or of a text is an UndecidedError in its place."""

    async def judge_all(self, candidates: Sequence[Candidate]) -> list[Judgement | UndecidedError]:
        """The judgements in the order of the candidates."""

    async def aclose(self) -> None:
        """Release its connections and processes."""


OutsideTable = Mapping[str, Callable[[Reward], OutsideJudge]]
"""By kind of a single reward: what judges outside of the sandbox."""


class _Part(NamedTuple):
    """A single reward of the text at `place`, the `order`-th of its reward."""

    place: int
    order: int
    reward: Reward
    candidate: Candidate


def is_confined(single: Reward) -> bool:
    """Whether the sandbox judges by a single reward."""
    if isinstance(single.options, PythonReward):
        return not single.options.needs
    return single.kind in ("math", "answer-line", "pattern", "reasoning-gym")


def sees_prompt(reward: Reward) -> bool:
    """Whether the prompt's chat and metadata are needed to judge by a reward."""
    return any(single.kind in SEES_PROMPT for single in reward.singles)


def reward_of(text: str) -> Reward | Finding:
    """The reward that a sample names, or why there can be no judgement by it."""
    try:
        reward = parse_text(text)
    except RewardError as error:
        return no_judgement(str(error), SandboxFault.ERROR)
    if unresolved := [single.name for single in reward.singles if not single.kind]:
        return no_judgement(f"verifier: {unresolved[0]!r} is not valid: expected a verifier", SandboxFault.ERROR)
    return reward


class RewardJudges:
    """Judges responses by any reward. `outside`: what judges by those that are not confined."""

    def __init__(self, sandbox: Sandbox, outside: OutsideTable) -> None:
        self._sandbox, self._outside = sandbox, outside
        self._judges: dict[str, OutsideJudge] = {}

    def prepare(self, rewards: Sequence[Reward]) -> None:
        """Set up what judges by these rewards outside of the sandbox. Raises RemoteSetupError."""
        for single in (single for reward in rewards for single in reward.singles):
            if not is_confined(single):
                self._outside_judge(single)

    async def aclose(self) -> None:
        """Release what judges outside of the sandbox."""
        for judge in self._judges.values():
            await judge.aclose()

    async def judge_all(self, texts: Sequence[JudgedText], *, lane: Lane = Lane.TRAIN) -> AsyncGenerator[Placed, None]:
        """Judge several responses; yields findings as they come, each with its place in `texts`.

        A timeout, a crash or an unusable reference is `unknown`, never wrong.
        """
        parts = [
            _Part(place, order, single, candidate)
            for place, (reward, candidate) in enumerate(texts)
            for order, single in enumerate(reward.singles)
        ]
        found: asyncio.Queue[list[tuple[_Part, Finding]]] = asyncio.Queue()
        working = [asyncio.create_task(work) for work in self._work(parts, found, lane)]
        missing: list[dict[int, Finding]] = [{} for _ in texts]
        left = len(texts)
        try:
            while left:
                whole: Placed = []
                for part, finding in await _next(found, working):
                    reward, known = texts[part.place][0], missing[part.place]
                    known[part.order] = finding
                    if len(known) == len(reward.singles):
                        whole.append((part.place, combined(reward, [known[order] for order in sorted(known)])))
                if whole:
                    left -= len(whole)
                    yield whole
        finally:
            await cancel_and_wait(*working)

    def _work(
        self, parts: Sequence[_Part], found: asyncio.Queue[list[tuple[_Part, Finding]]], lane: Lane
    ) -> list[Coroutine[Any, Any, None]]:
        confined = [part for part in parts if is_confined(part.reward)]
        outside: dict[str, list[_Part]] = {}
        for part in parts:
            if not is_confined(part.reward):
                outside.setdefault(part.reward.text, []).append(part)
        works = [self._judge_outside(each, found) for each in outside.values()]
        return [*([self._judge_confined(confined, found, lane)] if confined else []), *works]

    async def _judge_confined(
        self, parts: Sequence[_Part], found: asyncio.Queue[list[tuple[_Part, Finding]]], lane: Lane
    ) -> None:
        texts = [(part.reward, part.candidate) for part in parts]
        async with aclosing(self._sandbox.judge_all(texts, lane=lane)) as judging:
            async for findings in judging:
                found.put_nowait([(parts[place], finding) for place, finding in findings])

    async def _judge_outside(self, parts: Sequence[_Part], found: asyncio.Queue[list[tuple[_Part, Finding]]]) -> None:
        judge = self._outside_judge(parts[0].reward)
        judgements = await judge.judge_all([part.candidate for part in parts])
        found.put_nowait([(part, _outside_finding(each)) for part, each in zip(parts, judgements, strict=True)])

    def _outside_judge(self, single: Reward) -> OutsideJudge:
        if single.text not in self._judges:
            self._judges[single.text] = self._outside[single.kind](single)
        return self._judges[single.text]


async def _next(
    found: asyncio.Queue[list[tuple[_Part, Finding]]], working: Sequence[asyncio.Task[None]]
) -> list[tuple[_Part, Finding]]:
    """The next findings. Raises what a task raised, and RuntimeError if all have ended without any."""
    getting = asyncio.ensure_future(found.get())
    try:
        while not getting.done():
            running = [task for task in working if not task.done()]
            if not running and found.empty():
                raise RuntimeError("all judges have ended, but a text has no finding")
            await asyncio.wait([getting, *running], return_when=asyncio.FIRST_COMPLETED)
            for task in working:
                if task.done() and (error := task.exception()):
                    raise error
        return getting.result()
    finally:
        getting.cancel()


def _outside_finding(judged: Judgement | UndecidedError) -> Finding:
    if isinstance(judged, UndecidedError):
        return no_judgement(str(judged), SandboxFault.ERROR)
    return finding_of(judged)
