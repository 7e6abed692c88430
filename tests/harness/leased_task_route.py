"""Owns the trace of a leased task: the files whose functions get the task, its delivery or its message.

Must not need an engine: every response is the same.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

from rollout.engine import Generation
from rollout.generation import ResponseGenerator
from rollout.tasks import GroupWorker, LeasedTask
from services.contracts import Lane, Task, VersionSpan
from services.streams.delivery.consumer import Consumer
from services.streams.state.group_state import GroupTransitions
from tests.harness.small_run import recipe_document, service_context
from tests.rollout.hand_sampler import task

ROOT = Path(__file__).parents[2]


class SameAnswer:
    """Answers every request with the same response, and notes the names of the requests."""

    version = 4

    def __init__(self, answer: Generation) -> None:
        self.names: list[str] = []
        self.answer = answer

    async def generate(self, _ids: list[int], _sampling: Any, name: str, _seed: int | None) -> Generation:
        self.names.append(name)
        return self.answer


class FixedTokenizer:
    """The same token ids for every prompt, and the same text for every response."""

    stop_ids = (3,)

    def __init__(self, ids: Any) -> None:
        self.ids = ids

    def prompt_ids(self, _messages: Any) -> Any:
        return self.ids

    def text(self, _ids: Any) -> str:
        return "ab"


def _tracer(task: LeasedTask, visited: list[str]) -> Callable[[FrameType, str, Any], None]:
    parts = {id(part) for part in (task, task.delivery, task.message)}
    entered: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        ours = file.is_relative_to(ROOT) and not file.is_relative_to(ROOT / "tests")
        # Each function counts where it is met first: a coroutine that continues is called again.
        if event != "call" or not ours or frame.f_code in entered:
            return
        if any(id(value) in parts for value in frame.f_locals.values()):
            entered.add(frame.f_code)
            if visited[-1:] != [file.name]:
                visited.append(file.name)

    return note


async def leased_task_route(redis: Any, run: str) -> list[str]:
    """Work on one task from its lease to its published sample. Returns the files in the order of the visits."""
    visited: list[str] = []
    async with leased_task(redis, run, samples=1) as (worker, task):
        sys.setprofile(_tracer(task, visited))
        try:
            await worker.work(task)
        finally:
            sys.setprofile(None)
        missing = await task.missing_samples()
        if missing:
            raise RuntimeError(f"samples {missing} of the traced task were not published")
    return visited


@asynccontextmanager
async def leased_task(redis: Any, run: str, samples: int) -> AsyncIterator[tuple[GroupWorker, LeasedTask]]:
    """A worker, and a task under lease for it."""
    answer = Generation(
        np.array([5], np.int32), np.array([-0.5], np.float32), (VersionSpan(version=4, start=0, end=1),), "stop"
    )
    generator = ResponseGenerator(SameAnswer(answer), FixedTokenizer(np.array([2, 4, 9], np.int32)), 256)  # type: ignore[arg-type]
    async with service_context(redis, run, recipe_document("/none"), "rollout") as context:
        transitions = await GroupTransitions.fenced(redis, context.keys, "rollout")
        consumer = Consumer(redis, context.keys, context.keys.lane(Lane.TRAIN).tasks, "rollout", "me", Task, 30.0, 3)
        await transitions.dispatch(Lane.TRAIN, [task("g0", samples)], None)
        await consumer.open()
        [delivery] = await consumer.read(1, 5.0)
        yield GroupWorker(generator), LeasedTask(context, Lane.TRAIN, consumer, transitions, delivery)
