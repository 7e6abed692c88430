"""Owns one replica of the benchmark: the product's, with a count of every token that its engine draws.

Must not change what it measures. The count is in a file that another process reads, and outlives a kill.
Run as `python -m benchmarks.loop.spot.replica --run ID --redis URL --count FILE --core NUMBER`.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import signal
import struct
import time
from pathlib import Path
from typing import Any, NamedTuple

from rollout.engine import RolloutEngine
from rollout.service import RolloutService
from services.contracts import ProcessInfo
from services.process.hosting import configure_logging, host_service

LOOK_S = 0.01
_COUNT = struct.Struct("<Qdd")


class Count(NamedTuple):
    """The tokens that a replica has drawn; since when it is ready, and when it last drew (monotonic; 0.0: never)."""

    drawn: int
    ready_at: float
    drew_at: float


def new_count(file: Path) -> None:
    """Create the file of a replica that is to start."""
    file.write_bytes(_COUNT.pack(0, 0.0, 0.0))


def read_count(file: Path) -> Count:
    """What a replica has counted so far."""
    return Count(*_COUNT.unpack(file.read_bytes()))


class Counter:
    """Counts what the engine draws: the tokens of finished and of aborted requests, and those of running ones."""

    def __init__(self, file: Path) -> None:
        with file.open("r+b") as opened:
            self._shared = mmap.mmap(opened.fileno(), _COUNT.size)
        self._done = 0
        self._running: dict[str, int] = {}
        self._drawn, self._ready_at, self._drew_at = 0, 0.0, 0.0
        self._looking: asyncio.Task[None] | None = None

    def changed(self, info: ProcessInfo) -> None:
        """Note when the replica is ready."""
        if info.state == "ready" and not self._ready_at:
            self._ready_at = time.monotonic()
            self._write()

    def watch(self, engine: RolloutEngine) -> None:
        """Count from now on."""
        generate = engine.generate

        async def counted(prompt_ids: Any, sampling: Any, request_id: str, seed: int | None = None) -> Any:
            self._running[request_id] = 0
            try:
                generation = await generate(prompt_ids, sampling, request_id, seed)
                self._running[request_id] = len(generation.response_ids)
                return generation
            finally:
                self._done += self._running.pop(request_id)

        engine.generate = counted  # type: ignore[method-assign]
        self._looking = asyncio.create_task(self._look(engine), name="count of drawn tokens")

    async def _look(self, engine: RolloutEngine) -> None:
        while True:
            processor = engine._llm.output_processor if engine._llm else None
            for state in list(processor.request_states.values()) if processor else []:
                if state.external_req_id in self._running:
                    self._running[state.external_req_id] = state.detokenizer.num_output_tokens()
            self._write()
            await asyncio.sleep(LOOK_S)

    def _write(self) -> None:
        drawn = self._done + sum(self._running.values())
        if drawn != self._drawn:
            self._drawn, self._drew_at = drawn, time.monotonic()
        self._shared[:] = _COUNT.pack(drawn, self._ready_at, self._drew_at)


async def host(run: str, redis_url: str, counter: Counter) -> None:
    """Run the replica until a signal."""
    start, stopping = RolloutEngine.start, asyncio.Event()

    async def started(*given: Any, **named: Any) -> RolloutEngine:
        engine = await start(*given, **named)
        counter.watch(engine)
        return engine

    RolloutEngine.start = started  # type: ignore[method-assign]
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    await host_service(RolloutService(), run, redis_url, stopping, on_change=counter.changed)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loop.spot.replica")
    for option in ("--run", "--redis", "--count"):
        parser.add_argument(option, required=True)
    parser.add_argument("--core", type=int, required=True, help="where it and its engine run")
    given = parser.parse_args()
    os.sched_setaffinity(0, {given.core})  # threads that exist already, such as BLAS', do nothing here
    configure_logging("rollout")
    asyncio.run(host(given.run, given.redis, Counter(Path(given.count))))


if __name__ == "__main__":
    main()
