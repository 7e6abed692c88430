"""Owns what judges outside of the sandbox: services, judge models, functions that need network or files, programs.

Must not judge: each kind has its own package.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from services.settings.rewards.kinds import CodeReward, HttpReward, JudgeReward, PythonReward
from services.settings.rewards.reward import Reward
from verifier.judging import OutsideJudge, OutsideTable, is_confined
from verifier.programs.isolation import find_isolation
from verifier.programs.limits import ProgramLimits
from verifier.programs.verdict import judge
from verifier.remote.budget import Budget
from verifier.remote.faults import RemoteSetupError
from verifier.remote.functions.function_judge import FunctionJudge
from verifier.remote.functions.owned_server import FunctionsServer
from verifier.remote.functions.place import URL_VARIABLE, FunctionsPlace, place_from
from verifier.remote.functions.warm import TextLimits
from verifier.remote.http_judge import HttpJudge
from verifier.remote.model_judge import ModelJudge
from verifier.verifiers.base import Candidate, Judgement, UndecidedError

HOSTS_VARIABLE = "PENSTOCK_REWARD_HOSTS"
"""The hosts that rewards may send requests to, separated by commas. A cluster always sets it; unset: any host that the
recipe names."""
WALL_FACTOR = 3.0
"""The bound on the clock of a function that needs network or files, in its CPU seconds."""


class ProgramJudge:
    """Judges programs by their tests, `at_once` at a time."""

    def __init__(self, options: CodeReward, at_once: asyncio.Semaphore) -> None:
        self._options = options.model_dump(mode="json")
        self._limits, self._at_once = ProgramLimits.from_options(self._options), at_once

    async def judge_all(self, candidates: Sequence[Candidate]) -> list[Judgement | UndecidedError]:
        """The judgement of each program in turn."""
        return list(await asyncio.gather(*map(self._judge, candidates)))

    async def aclose(self) -> None:
        """Nothing is left of a program once it is judged."""

    async def _judge(self, candidate: Candidate) -> Judgement | UndecidedError:
        async with self._at_once:
            try:
                return await judge(candidate.text, candidate.reference, self._options, self._limits)
            except UndecidedError as error:
                return error
            except ValueError as error:  # the reference
                return UndecidedError(str(error))


@asynccontextmanager
async def outside_judges(
    rewards: Sequence[Reward],
    files: Mapping[str, str],
    *,
    timeout_s: float,
    at_once: int,
    budget_of: Callable[[Reward], Budget | None] = lambda _: None,
) -> AsyncIterator[OutsideTable]:
    """What judges by each kind of single reward that is not confined, with what it needs started.

    `rewards`: all that may come; `files`: the user's, by name; `timeout_s`: the CPU seconds of a function; `at_once`:
    programs that run at once; `budget_of`: the budget of a judge model. Raises RemoteSetupError, IsolationError.
    """
    outside = [single for reward in rewards for single in reward.singles if not is_confined(single)]
    programs = asyncio.Semaphore(at_once)
    contents = {name: text.encode() for name, text in files.items()}
    hosts = allowed_hosts(os.environ)
    limits = TextLimits(cpu_s=timeout_s, wall_s=timeout_s * WALL_FACTOR)
    async with AsyncExitStack() as stack:
        functions: FunctionsPlace | None = None
        if any(isinstance(single.options, PythonReward) for single in outside):
            functions = place_from(os.environ)
            if functions is None and hosts is not None:
                # On a cluster a server of our own would have the verifier's network and user.
                raise RemoteSetupError(
                    f"{URL_VARIABLE}: not set: expected a server of functions (rewardFunctions.enabled)"
                )
            functions = functions or await stack.enter_async_context(FunctionsServer())
        if any(isinstance(single.options, CodeReward) for single in outside):
            await asyncio.to_thread(find_isolation)

        def http(reward: Reward) -> OutsideJudge:
            assert isinstance(reward.options, HttpReward)
            return HttpJudge(reward.options, allowed_hosts=hosts)

        def model(reward: Reward) -> OutsideJudge:
            assert isinstance(reward.options, JudgeReward)
            rubric = files[reward.options.rubric]
            return ModelJudge(reward.options, rubric, budget=budget_of(reward), allowed_hosts=hosts)

        def function(reward: Reward) -> OutsideJudge:
            assert isinstance(reward.options, PythonReward)
            assert functions is not None, "functions with needs are among the rewards that were announced"
            return FunctionJudge(reward.options, contents, functions, limits)

        def code(reward: Reward) -> OutsideJudge:
            assert isinstance(reward.options, CodeReward)
            return ProgramJudge(reward.options, programs)

        yield {"http": http, "judge": model, "python": function, "code": code}


def allowed_hosts(environ: Mapping[str, str]) -> frozenset[str] | None:
    """The hosts that rewards may send requests to; None for any."""
    given = environ.get(HOSTS_VARIABLE)
    return None if given is None else frozenset(host.strip() for host in given.split(",") if host.strip())
