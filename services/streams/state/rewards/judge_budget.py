"""Owns the budget of a judge model, which all replicas of a run share.

Must not send a request to the model.

Each process stores what it has used in all, so that a call which is repeated counts once. What a process that has ended
had taken stays taken.
"""

from __future__ import annotations

import asyncio
import hashlib

from services.streams.connection.client import Redis
from services.streams.connection.functions import call
from services.streams.keys import RunKeys

DIGEST_CHARACTERS = 16


class SharedBudget:
    """What the judges of a run may use of one model, in requests and tokens (None: any number).

    `reward`: the judge's text, which names it; `process`: the id of this process.
    """

    def __init__(
        self,
        redis: Redis,
        keys: RunKeys,
        process: str,
        reward: str,
        max_requests: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self._redis, self._key, self._process = redis, keys.judge_budget, process
        self._name = hashlib.sha256(reward.encode()).hexdigest()[:DIGEST_CHARACTERS]
        self._most = ["" if most is None else str(most) for most in (max_requests, max_tokens)]
        self._requests = self._tokens = 0
        self._changing = asyncio.Lock()

    async def take(self, requests: int, tokens: int) -> bool:
        """Take both if both are left, else neither; returns whether they were taken."""
        return await self._change(requests, tokens, self._most)

    async def settle(self, requests: int, tokens: int) -> None:
        """Account for what was used beyond what was taken, even if nothing is left; negative numbers give back."""
        await self._change(requests, tokens, ["", ""])

    async def _change(self, requests: int, tokens: int, most: list[str]) -> bool:
        async with self._changing:
            after = self._requests + requests, self._tokens + tokens
            taken = await call(
                self._redis,
                "take_budget",
                budget_key=self._key,
                reward=self._name,
                process=self._process,
                requests=after[0],
                tokens=after[1],
                most_requests=most[0],
                most_tokens=most[1],
            )
            if taken:
                self._requests, self._tokens = after
            return bool(taken)
