"""Owns a replica with vLLM, whose requests note when each of their tokens was there.

Must not publish. It answers commands on its standard input, one JSON object per line; see `Requests`.
Run as `python -m benchmarks.weights.engine_replica --run ID --redis URL`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rollout.engine import Generation, RolloutEngine
from rollout.weight_sync import WeightFollower
from services.contracts import Sampling
from services.streams.connection.client import connect
from services.waits import cancel_and_wait
from tests.harness.small_run import service_context

LOOK_S = 0.002
PROMPT = list(range(7, 55))
STARTED = 8
"""Each request has so many tokens before a version is published."""
MOST_S = 240.0


@dataclass(frozen=True)
class Seen:
    """What the requests of a round saw. Tokens: `asked` of all requests; `lost` of these, and those of another content
    than was there before the sync. `versions`: the most that one response has. Gaps, in seconds, between two tokens of
    a request: the longest of all, and the median."""

    asked: int
    lost: int
    versions: int
    longest_gap_s: float
    usual_gap_s: float


class Requests:
    """Requests side by side, of `tokens` tokens each.

    {"do": "start", ...}: the answer comes when all of them draw tokens. {"do": "finish"}: it comes when all have ended.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._numbers = itertools.count()
        self._running: dict[str, asyncio.Task[Generation]] = {}
        self._times: dict[str, list[float]] = {}
        self._before: dict[str, list[int]] = {}
        self._tokens = 0

    async def answer(self, do: str, requests: int = 0, tokens: int = 0) -> dict[str, Any]:
        """Carry out one command."""
        if do == "start":
            await self._start(requests, tokens)
            return {}
        return asdict(await self._finish())

    async def _start(self, requests: int, tokens: int) -> None:
        self._tokens = tokens
        sampling = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=tokens)
        names = [f"request-{next(self._numbers)}" for _ in range(requests)]
        self._times = {name: [] for name in names}
        self._running = {name: asyncio.create_task(self._engine.generate(PROMPT, sampling, name)) for name in names}
        self._looking = asyncio.create_task(self._look())
        ends = time.monotonic() + MOST_S
        while min(map(len, self._times.values())) < STARTED:
            if time.monotonic() > ends:
                raise TimeoutError(f"the requests drew no {STARTED} tokens within {MOST_S:g} s")
            await asyncio.sleep(LOOK_S)
        drawn = {name: self._engine.drawn(name, 0) for name in names}
        self._before = {name: found.response_ids.tolist() for name, found in drawn.items() if found is not None}

    async def _look(self) -> None:
        """Note the time of each new token of each request."""
        processor = self._engine._llm.output_processor
        while True:
            now = time.perf_counter()
            for state in list(processor.request_states.values()):
                times = self._times.get(state.external_req_id)
                if times is not None:
                    times += [now] * (state.detokenizer.num_output_tokens() - len(times))
            await asyncio.sleep(LOOK_S)

    async def _finish(self) -> Seen:
        async with asyncio.timeout(MOST_S):
            found = dict(zip(self._running, await asyncio.gather(*self._running.values()), strict=True))
        await cancel_and_wait(self._looking)
        lost = 0
        for name, generation in found.items():
            ids, before = generation.response_ids.tolist(), self._before[name]
            lost += abs(self._tokens - len(ids)) + sum(a != b for a, b in zip(before, ids, strict=False))
        gaps = [later - earlier for times in self._times.values() for earlier, later in itertools.pairwise(times)]
        return Seen(
            asked=self._tokens * len(found),
            lost=lost,
            versions=max(len({span.version for span in generation.spans}) for generation in found.values()),
            longest_gap_s=max(gaps),
            usual_gap_s=median(gap for gap in gaps if gap),
        )


async def host(run: str, redis_url: str) -> None:
    """Follow the run's plans until the standard input ends."""
    redis = await connect(redis_url)
    async with service_context(redis, run, {}, "rollout") as context:
        recipe = context.record.recipe
        engine = await RolloutEngine.start(recipe, str(recipe.model.path), [], context.heartbeat.info.id)
        try:
            await context.heartbeat.update(state="joining")
            following = asyncio.create_task(WeightFollower(context, engine).run())
            requests = Requests(engine)
            while line := await asyncio.to_thread(sys.stdin.readline):
                print(json.dumps(await requests.answer(**json.loads(line))), flush=True)
            await cancel_and_wait(following)
        finally:
            await engine.stop()
    await redis.aclose()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights.engine_replica")
    parser.add_argument("--run", required=True)
    parser.add_argument("--redis", required=True)
    given = parser.parse_args()
    asyncio.run(host(given.run, given.redis))
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads outlive the group


if __name__ == "__main__":
    main()
